"""SiTU-GLU, the activation of every MLP of Kimi-K3."""

from kimi_kernels.situ.reference import situ

__all__ = ["situ"]
