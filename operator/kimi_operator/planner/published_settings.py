"""The report's --max-num-seqs, solved for: which requests they would be right for, since it does not say which it ran.

Two inputs were not published and are chosen: the context of a request (the longest that so many hold in the pool) and
the bytes of a captured graph (a 200th of what the pool leaves). So a row shows that the solver explains a setting, and
for which contexts; it is no prediction. The cause that was published for 8 on MI300X, graphs that left too little, is
solved for beside it, from what they left: there graphs bind short requests, and pages longer ones.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from kimi_operator.api.deployment import Role
from kimi_operator.planner.architecture import Architecture
from kimi_operator.planner.budget import MOST_CAPTURED, BlockPool, Budget, Captures
from kimi_operator.planner.case import Case, Solution
from kimi_operator.planner.memory import GroupShape, MemoryLine
from kimi_operator.planner.solve import solve, stretches
from kimi_operator.planner.unified import block_layout
from kimi_operator.planner.units import binding, bytes_text
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

LENGTHS = (2176, 20_000, 97_920)
"""Tokens of a request that the published cause is solved for: short, middling, and as chosen for the row."""


class LeftByGraphs(Struct, frozen=True):
    """What captured graphs left beside the pool for so many requests a lane: too little (published)."""

    max_num_seqs: int
    bytes: int

    @property
    def num_graphs(self) -> int:
        """Batch sizes that were captured."""
        return len(Captures(1).sizes(self.max_num_seqs))


class PublishedSetting(Struct, frozen=True):
    """One --max-num-seqs of the report, and the context that is chosen for it."""

    free: int
    """Bytes of a GPU before pool and captured graphs."""
    pool_bytes: int
    max_num_seqs: int
    tokens: int
    """Of each request."""
    left: LeftByGraphs | None = None
    """Where a cause was published: what a larger setting left."""

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

    def with_published_graphs(self, a: Architecture, tokens: int) -> Solution:
        """The same hardware and pool, with graphs as large as the published remainder says, and more than it free."""
        assert self.left is not None
        # bytes of a graph are rounded down: by so many at most in all
        least = self.left.bytes + self.left.num_graphs
        case, keep = self.case(a), MemoryLine("kept free", least, "more than was too little")
        budget = replace(case.budget, lines=(keep,), captures=Captures(self._graph_bytes()))
        found = solve(replace(case, workload=Workload(fixed(tokens - 1), fixed(1)), budget=budget))
        assert isinstance(found, Solution), str(found)
        return found

    def _graph_bytes(self) -> int:
        """Bytes of one graph, activations counted as none: they were not published."""
        assert self.left is not None
        return (self.free - self.pool_bytes - self.left.bytes) // self.left.num_graphs

    def _cause(self, a: Architecture) -> str:
        if self.left is None:
            return ""
        solved = ((tokens, self.with_published_graphs(a, tokens)) for tokens in LENGTHS)
        found = (f"{s.max_num_seqs} of {tokens:,} tokens, {binding(s.binds)}" for tokens, s in solved)
        return (
            f". Published cause: {self.left.num_graphs} captured sizes of {self.left.max_num_seqs} requests left "
            f"{self.left.bytes:,} B: {self._graph_bytes():,} B each without activations; "
            f"with more than that kept free {'; '.join(found)}"
        )

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
            f"{binding(solution.binds)}: {fits} requests of {self.tokens:,} tokens fit, a captured batch is "
            f"{solution.max_num_seqs}; context chosen: {self.max_num_seqs} come out from {first:,} to {last:,} tokens; "
            f"bytes of a graph chosen by hand: 1/{GRAPHS_IN_REST} of the {bytes_text(unused)} that the pool leaves of "
            f"{bytes_text(self.free)} free{self._cause(a)}"
        )


def _reach(case: Case) -> int:
    """Longest request up to which all lanes are full."""
    return stretches(case)[0].last_tokens


SETTINGS: dict[str, PublishedSetting] = {
    "mi300x_max_num_seqs_13e9": PublishedSetting(FREE_MI300X, POOL_MI300X, 8, 97_920, LeftByGraphs(32, 1_290_000_000)),
    "mi325x_max_num_seqs_40e9": PublishedSetting(FREE_MI325X, POOL_MI325X, 32, 69_120),
    "mi325x_max_num_seqs_40e9_at_floor": PublishedSetting(FREE_MI325X, POOL_MI325X, 64, 23_040),
}
"""By the name of the row."""
