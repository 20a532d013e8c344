"""The report's --max-num-seqs, solved for: which requests they would be right for, since it does not say which it ran.

Two inputs were not published and are chosen: the context of a request (the longest that so many hold in the pool) and
the bytes of a captured graph (a 200th of what the pool leaves). So a row shows that the solver explains a setting, and
for which contexts; it is no prediction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kimi_operator.api.deployment import Role
from kimi_operator.planner.architecture import Architecture
from kimi_operator.planner.budget import MOST_CAPTURED, BlockPool, Budget, Captures
from kimi_operator.planner.case import Case, Solution
from kimi_operator.planner.memory import GroupShape
from kimi_operator.planner.solve import solve, stretches
from kimi_operator.planner.unified import block_layout
from kimi_operator.planner.units import bytes_text
from kimi_operator.planner.workload import Workload, fixed

GIB = 2**30
EP16_TP2 = GroupShape(nodes=2, gpus_per_node=8, tensor_parallel=2)
"""A group of the published runs."""
FP8 = 1
"""Bytes a number of the cached rows."""
WEIGHTS = int(148.6 * GIB)
"""Measured (published)."""
FREE_MI300X = int(172.74 * GIB) - WEIGHTS
"""Free before load, measured with a heap of 8 GiB, less weights (published)."""
FREE_MI325X = int((256 - 11.2 - 16) * GIB) - WEIGHTS
"""Memory less contexts (as they follow for MI300X), a heap of 16 GiB and weights."""
POOL_MI300X, POOL_MI325X = 13_000_000_000, 40_000_000_000
"""--kv-cache-memory-bytes of the published runs."""
GRAPHS_IN_REST = 200
"""Captured graphs that would take all that the pool leaves. By hand: from 25 on pages bind, and all give the same."""


@dataclass(frozen=True, slots=True)
class PublishedSetting:
    """One --max-num-seqs of the report, and the context that is chosen for it."""

    free: int
    """Bytes of a GPU before pool and captured graphs."""
    pool_bytes: int
    max_num_seqs: int
    tokens: int
    """Of each request."""

    def case(self, a: Architecture) -> Case:
        """What the solver is asked; MAX_NUM_SEQS is left open."""
        rest = self.free - self.pool_bytes
        pool = BlockPool(block_layout(a, EP16_TP2.tensor_parallel, FP8))
        budget = Budget(self.free, (), pool, self.pool_bytes, Captures(rest // GRAPHS_IN_REST))
        work = Workload(fixed(self.tokens - 1), fixed(1))
        return Case(work, Role.DECODE, EP16_TP2.lanes, budget, MOST_CAPTURED, a.max_positions)

    def solution(self, a: Architecture) -> Solution:
        """What it answers."""
        found = solve(self.case(a))
        assert isinstance(found, Solution), str(found)
        return found

    def contexts(self, a: Architecture) -> tuple[int, int]:
        """Shortest and longest request, in tokens, for which the solver answers this setting."""
        case = self.case(a)
        above = next(size for size in Captures(1).sizes(MOST_CAPTURED) if size > self.max_num_seqs)
        reach, next_reach = (_reach(replace(case, most_seqs=seqs)) for seqs in (self.max_num_seqs, above))
        return next_reach + 1, reach

    def how(self, a: Architecture) -> str:
        """Inputs, which of them are chosen, and what binds."""
        solution, (first, last) = self.solution(a), self.contexts(a)
        fits = next(bound.max_num_seqs for bound in solution.bounds if bound.limit is solution.binds)
        unused = self.free - self.pool_bytes
        return (
            f"{solution.binds} bind: {fits} requests of {self.tokens:,} tokens fit, a captured batch is "
            f"{solution.max_num_seqs}; context chosen: {self.max_num_seqs} come out from {first:,} to {last:,} tokens; "
            f"bytes of a graph chosen by hand: 1/{GRAPHS_IN_REST} of the {bytes_text(unused)} that the pool leaves of "
            f"{bytes_text(self.free)} free"
        )


def _reach(case: Case) -> int:
    """Longest request up to which all lanes are full."""
    return stretches(case)[0].last_tokens


SETTINGS: dict[str, PublishedSetting] = {
    "mi300x_max_num_seqs_13e9": PublishedSetting(FREE_MI300X, POOL_MI300X, 8, 97_920),
    "mi325x_max_num_seqs_40e9": PublishedSetting(FREE_MI325X, POOL_MI325X, 32, 69_120),
    "mi325x_max_num_seqs_40e9_at_floor": PublishedSetting(FREE_MI325X, POOL_MI325X, 64, 23_040),
}
"""By the name of the row."""
