"""Attention residuals: a softmax mix over layer-block snapshots and the running prefix."""

from kimi_kernels.attn_res.reference import mix, site_weight

__all__ = ["mix", "site_weight"]
