"""Latent attention: absorbed form over a paged cache for serving, plain form over whole sequences."""

from kimi_kernels.mla.reference import absorb_query, expand_output, full, paged, paged_decode, split_kv_b

__all__ = ["absorb_query", "expand_output", "full", "paged", "paged_decode", "split_kv_b"]
