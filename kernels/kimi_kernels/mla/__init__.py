"""Latent attention: absorbed form over a paged cache for serving, plain form over whole sequences."""

from torch import Tensor

from kimi_kernels.backend import Backend
from kimi_kernels.mla import blocks
from kimi_kernels.mla.blocks import BLOCK_ROWS, SCRATCH_BYTES, paged
from kimi_kernels.mla.reference import absorb_query, expand_output, full, split_kv_b
from kimi_kernels.mla.table import PageTable

__all__ = [
    "BLOCK_ROWS",
    "SCRATCH_BYTES",
    "PageTable",
    "absorb_query",
    "expand_output",
    "full",
    "paged",
    "paged_decode",
    "split_kv_b",
]


def paged_decode(  # noqa: PLR0913 - what blocks.paged_decode takes, and who is to do it
    q_latent: Tensor,
    cache: Tensor,
    table: PageTable,
    scale: float,
    *,
    latent_rank: int,
    backend: Backend | None = None,
) -> Tensor:
    """blocks.paged_decode by the backend that is named, or else by the one that suits q_latent's device."""
    if (backend or Backend.suited_to(q_latent.device)) is Backend.TORCH:
        return blocks.paged_decode(q_latent, cache, table, scale, latent_rank=latent_rank)
    # Imported late: Triton takes a second, and a CPU does without.
    from kimi_kernels.mla import kernel  # noqa: PLC0415

    return kernel.paged_decode(q_latent, cache, table, scale, latent_rank=latent_rank)
