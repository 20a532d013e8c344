"""The exchange of token rows among the ranks that own the experts.

A rank hands in its rows with their chosen experts and gets back, for each row, the weighted sum over those experts. The
torch implementation is the reference and runs anywhere; a device library can take its place behind the same call.
"""

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from kimi_worker.parallel.groups import Collective, Groups
from kimi_worker.parallel.ranks import RankPlace

Compute: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows [n, latent], expert ids [n, top_k], weights [n, top_k]) to the local experts' weighted sum [n, latent] fp32."""


class ExpertExchange(Protocol):
    """Collective over all ranks of the group: every rank calls `run` once a MoE layer, with zero rows too."""

    def run(self, rows: Tensor, indices: Tensor, weights: Tensor, compute: Compute) -> Tensor:
        """Run the chosen experts of every row, wherever they are.

        rows     [n, latent]  activation dtype
        indices  [n, top_k]   int64, global expert ids
        weights  [n, top_k]   fp32
        compute  the experts of this rank; passes over ids that are not its own
        returns  [n, latent]  fp32, summed in fp32
        """
        ...


class LocalExchange:
    """All experts are here."""

    def run(self, rows: Tensor, indices: Tensor, weights: Tensor, compute: Compute) -> Tensor:
        return compute(rows, indices, weights)


class AllToAllExchange:
    """A row goes once to each rank that owns at least one of its experts, and comes back as one partial sum."""

    def __init__(self, world: Collective, num_experts: int, place: RankPlace) -> None:
        self._world = world
        self._per_rank = len(place.experts(num_experts))

    def run(self, rows: Tensor, indices: Tensor, weights: Tensor, compute: Compute) -> Tensor:
        """See ExpertExchange. Raises CollectiveError."""
        num, size = rows.shape[0], self._world.size
        goes_to = torch.zeros(size, num, dtype=torch.bool, device=rows.device)
        goes_to.scatter_(0, (indices // self._per_rank).T, value=True)
        # Row-major order sorts the copies by owner, as the exchange wants them.
        token = goes_to.nonzero(as_tuple=True)[1]
        counts = goes_to.sum(1)
        ones = [1] * size
        send, receive = torch.stack([counts, self._world.all_to_all(counts, ones, ones)]).tolist()
        arrived = self._world.all_to_all(_pack(rows, indices, weights)[token], send, receive)
        partial = compute(*_unpack(arrived, rows, indices))
        returned = self._world.all_to_all(partial, receive, send)
        return torch.zeros(rows.shape, dtype=torch.float32, device=rows.device).index_add_(0, token, returned)


def exchange_for(groups: Groups, num_experts: int) -> ExpertExchange:
    """The exchange of a group: none of the collectives when it has one rank."""
    if groups.world is None:
        return LocalExchange()
    return AllToAllExchange(groups.world, num_experts, groups.place)


def _pack(rows: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Rows, expert ids and weights side by side as bytes, so that one exchange moves them: [n, bytes] uint8."""
    parts = (rows.contiguous(), indices.to(torch.int32), weights.contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], dim=-1)


def _unpack(packed: Tensor, rows: Tensor, indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Undo _pack; `rows` and `indices` tell the widths and the rows' dtype."""
    widths = [rows.shape[1] * rows.element_size(), indices.shape[1] * 4, indices.shape[1] * 4]
    latent, ids, weights = (part.contiguous() for part in packed.split(widths, dim=-1))
    return latent.view(rows.dtype), ids.view(torch.int32).to(torch.int64), weights.view(torch.float32)
