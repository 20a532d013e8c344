"""Layouts for a number of nodes: TP x DP x EP, nodes and groups of each role. Those that fit, ranked; those refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from kimi_operator.api.deployment import Role
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.planner.case import Limit, Solution
from kimi_operator.planner.elsewhere import load_on, with_room
from kimi_operator.planner.layout import MAX_NODES, check_longest
from kimi_operator.planner.refusals import Reason, Refusal, refusals, shortage
from kimi_operator.planner.space import Layout, Search, block_pools, layouts, page_pools
from kimi_operator.planner.targets import told
from kimi_operator.planner.units import most
from kimi_operator.planner.workload import check_lengths

__all__ = ["Candidate", "Layout", "Reason", "Refusal", "Search", "SearchResult", "block_pools", "page_pools", "search"]


class Candidate(Struct, frozen=True):
    """A layout that fits, with the settings of both roles."""

    layout: Layout
    prefill: Solution
    decode: Solution
    throughput: float | None
    """By the caller's objective; None without one."""
    misses: tuple[Problem, ...]
    """Targets and demands that it does not meet."""
    doubts: tuple[Problem, ...]
    """Targets that it meets by less than the prediction's band."""

    @property
    def longest(self) -> int:
        """Longest request that the layout serves, prompt and answer, in tokens: both roles hold it."""
        return min(self.prefill.max_model_len, self.decode.max_model_len)

    @property
    def capacity(self) -> int:
        """Requests of the workload that decode could run at once, whatever is asked for."""
        seqs = min(bound.max_num_seqs for bound in self.decode.bounds if bound.limit is not Limit.WORKLOAD)
        return seqs * self.layout.lanes(Role.DECODE)


class SearchResult(Struct, frozen=True):
    """Layouts that fit, best first, and shapes that do not, each with why and what would."""

    objective: str
    ranked: tuple[Candidate, ...]
    refused: tuple[Refusal, ...]
    shortage: Problem | None
    """Why nothing is ranked: for want of nodes, or for requests beyond the stated maxModelLen."""


def search(request: Search) -> SearchResult:
    """All layouts on at most `num_nodes` nodes: those that meet the workload first, then by throughput or capacity.

    Decode has all groups that the nodes allow; with a throughput only those without which it would be less.

    Raises InvalidSpec when the number of nodes, maxModelLen or the workload's lengths are out of range.
    """
    a = request.architecture
    lengths = (*check_longest(a, request.max_model_len), *check_lengths(request.workload, a.max_positions))
    if problems := (*_check_nodes(request, are_lengths_wrong=bool(lengths)), *lengths):
        raise InvalidSpec(problems)
    objective = "requests of the workload that decode can run at once" if request.throughput is None else "throughput"
    objective = f"targets met, then {objective}, then fewest nodes"
    for problem in check_lengths(request.workload, request.longest, limit="spec.model.maxModelLen"):
        return SearchResult(objective, (), (), problem)
    ranked = sorted(_candidates(request), key=_rank)
    return SearchResult(objective, tuple(ranked), tuple(refusals(request)), shortage(request))


def _check_nodes(request: Search, *, are_lengths_wrong: bool) -> Iterator[Problem]:
    num_nodes = request.num_nodes
    if num_nodes < 1:
        separate = "at least 2: prefill and decode stand on separate nodes"
        anything = Problem("nodes", str(num_nodes), separate, "raise it to 2 or more")
        yield anything if are_lengths_wrong else shortage(request) or anything
    if num_nodes > MAX_NODES:
        remedy = f"lower it to {MAX_NODES} or less, and repeat the layout"
        yield Problem("nodes", f"{num_nodes:,}", f"at most {MAX_NODES}", remedy)


def _rank(candidate: Candidate) -> tuple[float, ...]:
    layout = candidate.layout
    return (
        len({miss.field for miss in candidate.misses}),
        -(candidate.capacity if candidate.throughput is None else candidate.throughput),
        layout.nodes,
        -candidate.capacity,
        -candidate.longest,
        layout.decode.nodes,
        layout.prefill.nodes,
        layout.decode.tensor_parallel,
    )


def _candidates(request: Search) -> Iterator[Candidate]:
    for layout in layouts(request):
        used = layout if request.throughput is None else _with_fewest_groups(request, layout, request.throughput)
        prefill = request.outcome(Role.PREFILL, used.prefill, used.prefill_groups)
        decode = _decode(request, used)
        assert isinstance(prefill, Solution), prefill
        rate = None if request.throughput is None else request.throughput(used, decode)
        decode = replace(decode, misses=_with_room(request, used, decode))
        yield Candidate(used, prefill, decode, rate, *told((prefill, decode), request.queued(used, decode)))


def _with_room(request: Search, layout: Layout, decode: Solution) -> tuple[Problem, ...]:
    """What decode misses, with what would make room for a load."""
    if not decode.misses:
        return ()
    load = load_on(request.workload, layout, request.timing)
    return with_room(decode.misses, decode, decode, "spec.decode.maxNumSeqs", load)


def _decode(request: Search, layout: Layout) -> Solution:
    decode = request.outcome(Role.DECODE, layout.decode, layout.decode_groups)
    assert isinstance(decode, Solution), decode
    return decode


def _with_fewest_groups(request: Search, layout: Layout, throughput: Callable[[Layout, Solution], float]) -> Layout:
    """The same without decode groups that add no throughput and meet nothing: prompts wait no longer without them."""

    def without(num_groups: int) -> Layout:
        return replace(layout, decode_groups=layout.decode_groups - num_groups)

    def served(other: Layout) -> tuple[float, int]:
        decode = _decode(request, other)
        return throughput(other, decode), -len(decode.misses)

    def loses_nothing(num_groups: int) -> bool:
        return all(some >= whole for some, whole in zip(served(without(num_groups)), all_serve, strict=True))

    most_fewer, all_serve = layout.decode_groups - 1, served(layout)
    # in most layouts each group adds something: no other number needs to be tried
    return without(most(loses_nothing, 1, most_fewer)) if most_fewer and loses_nothing(1) else layout
