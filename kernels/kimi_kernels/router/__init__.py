"""Expert choice of the latent mixture of experts."""

from kimi_kernels.router.reference import route

__all__ = ["route"]
