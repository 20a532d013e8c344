"""What would meet what a layout misses: another layout of the same nodes, or more running requests of a lane."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

from msgspec.structs import replace

from kimi_operator.api.deployment import KimiDeploymentSpec, Role
from kimi_operator.errors import Problem
from kimi_operator.planner.case import Limit, Solution, Timing
from kimi_operator.planner.feed import MORE_PREFILL, Load, load_of
from kimi_operator.planner.layout import distance, divides
from kimi_operator.planner.memory import GroupShape
from kimi_operator.planner.pools import Settings
from kimi_operator.planner.space import Layout, Search, worker_search
from kimi_operator.planner.targets import TARGETS, told
from kimi_operator.planner.units import ceil_div
from kimi_operator.planner.workload import Workload

_SPLITS = 8
LOADS = ("workload.concurrency", "workload.requestsPerSecond")


def same_demand(s: Settings, workload: Workload, timing: Callable[[GroupShape, int], Timing] | None) -> Search:
    """What a deployment is asked for, of any layout of as many nodes."""
    num_nodes = sum(s.spec.role(role).groups * s.spec.role(role).nodes_per_group for role in Role)
    request = worker_search(s.architecture, s.profile, s.kv_dtype, workload, num_nodes)
    return replace(request, max_model_len=s.spec.model.max_model_len, timing=timing)


def with_remedies(problems: Iterable[Problem], request: Search, spec: KimiDeploymentSpec) -> tuple[Problem, ...]:
    """The same; a missed target names the layout that meets it, or says that none does.

    Each role keeps its nodes, the GPUs of a node and a maxNumSeqs that is stated; how nodes are grouped, and
    tensorParallel, may change.
    """
    stated = {role: seqs for role in Role if (seqs := spec.role(role).max_num_seqs) is not None}
    request = replace(request, max_num_seqs=stated)
    return tuple(
        replace(problem, remedy=_remedy(problem, request, spec)) if problem.field in TARGETS else problem
        for problem in problems
    )


def with_room(misses: Iterable[Problem], now: Solution, best: Solution, field: str, load: Load) -> tuple[Problem, ...]:
    """What decode misses; a load that it has no room for is told what makes room, as far as prefill fills it.

    `best` is `now` with maxNumSeqs, which `field` states, left to what fits.
    """
    misses = tuple(misses)
    if not any(miss.field in LOADS for miss in misses):
        return misses
    if _fit(best) == now.max_num_seqs:
        # with maxNumSeqs left open it is not what binds
        open_misses = {miss.field: miss for miss in best.misses}
        misses = tuple(open_misses.get(miss.field, miss) if miss.field in LOADS else miss for miss in misses)
    remedy = _room(now, _fit(best), field, load)
    return tuple(replace(miss, remedy=remedy) if miss.field in LOADS else miss for miss in misses)


def _fit(best: Solution) -> int:
    """Running requests of a lane that would fit and meet the target TPOT, whatever is asked for."""
    return min(bound.max_num_seqs for bound in best.bounds if bound.limit is not Limit.WORKLOAD)


def _room(now: Solution, fit: int, field: str, load: Load) -> str:
    """A remedy: more running requests of a lane come before more lanes, and both only while prefill fills them."""
    assert load.running is not None, "as many as fit are not missed"
    seqs = now.max_num_seqs
    if fit < 1:
        return "meet the target TPOT first, which not even one request a lane does"
    if fit <= seqs or load.is_fed_less(seqs):
        return load.room(min(fit, seqs))
    lanes = now.running // seqs
    wanted = ceil_div(load.running, lanes)
    if wanted <= fit:
        return f"raise {field} to {wanted} ({fit} fit), or {load.room(seqs)}"
    held = f"as many as fit, for {fit * lanes:,} at once"
    return f"raise {field} to {fit}, {held}; for all {load.running:,} {load.room(fit)}"


def load_on(work: Workload, layout: Layout, timing: Callable[[GroupShape, int], Timing] | None) -> Load:
    """What decode of a layout is asked to run, beside its prefill where times are predicted."""
    prefill, decode = Role.PREFILL, Role.DECODE
    lanes = layout.lanes(prefill), layout.lanes(decode)
    if timing is None:
        return load_of(work, lanes, None)
    of_prefill, of_decode = (timing(layout.shape(role), layout.groups(role)) for role in (prefill, decode))
    return load_of(work, lanes, (of_prefill, of_decode) if of_prefill.is_prefill_known else None)


def _remedy(problem: Problem, request: Search, spec: KimiDeploymentSpec) -> str:
    own = layout_of(spec)

    def changes(layout: Layout) -> tuple[int, ...]:
        each = [distance(own.shape(role), layout.shape(role)) for role in Role]
        return tuple(sum(parts) for parts in zip(*each, strict=True))

    # its own layout meets it with fewer running requests, which the problem says itself
    solved = {layout: each for layout, each in _solved(request, spec).items() if layout != own}
    judged = [(layout, *told(each, request.queued(layout, each[1]))) for layout, each in solved.items()]
    met = [each for each in judged if problem.field not in {miss.field for miss in each[1]}]
    if not met:
        # what is missed may be the wait alone, which the problem does not speak of
        alone = [layout for layout, each in solved.items() if not _is_missed(problem.field, each)]
        if not alone:
            return f"no other tensorParallel or size of a group on the same nodes meets it: {problem.remedy}"
        but = "meets it but for the wait (with it none of the same nodes does)"
        return f"use {min(alone, key=changes)}, which {but}, and {MORE_PREFILL} or lower the load; or {problem.remedy}"
    layout, misses, doubts = min(met, key=lambda each: (len(each[1]), changes(each[0])))
    others = " and ".join(dict.fromkeys(miss.field.rpartition(".")[2] for miss in misses))
    meets = "meets it within the band" if problem.field in {doubt.field for doubt in doubts} else "meets it"
    return f"use {layout}, which {meets}{f' but misses {others}' if others else ''}, or {problem.remedy}"


def _is_missed(field: str, solutions: Iterable[Solution]) -> bool:
    """Whether a target is missed by themselves, waits left aside."""
    return any(miss.field == field for each in solutions for miss in each.misses)


def _solved(request: Search, spec: KimiDeploymentSpec) -> dict[Layout, tuple[Solution, Solution]]:
    """Prefill and decode of the layouts of the same nodes that fit."""
    found = {}
    for prefill, prefill_groups in _splits(request, spec, Role.PREFILL):
        for decode, decode_groups in _splits(request, spec, Role.DECODE):
            if prefill.tensor_parallel != decode.tensor_parallel:
                continue
            first = request.outcome(Role.PREFILL, prefill, prefill_groups)
            second = request.outcome(Role.DECODE, decode, decode_groups)
            if isinstance(first, Solution) and isinstance(second, Solution):
                found[Layout(prefill, prefill_groups, decode, decode_groups)] = (first, second)
    return found


def regrouped(request: Search, spec: KimiDeploymentSpec) -> Iterator[tuple[Layout, Solution, Solution]]:
    """The groups of a deployment, and others on no more nodes that are alike in both roles, with each tensorParallel.

    How each role is solved stands beside a layout that fits.
    """
    for layout in dict.fromkeys((*_with_each_width(spec), *_alike(spec))):
        if not all(divides(request.architecture, layout.shape(role)) for role in Role):
            continue
        outcomes = [request.outcome(role, layout.shape(role), layout.groups(role)) for role in Role]
        prefill, decode = outcomes
        if isinstance(prefill, Solution) and isinstance(decode, Solution):
            yield layout, prefill, decode


def _with_each_width(spec: KimiDeploymentSpec) -> Iterator[Layout]:
    for width in range(1, min(spec.role(role).gpus_per_node for role in Role) + 1):
        prefill, decode = (replace(_shape(spec, role), tensor_parallel=width) for role in (Role.PREFILL, Role.DECODE))
        yield Layout(prefill, spec.prefill.groups, decode, spec.decode.groups)


def _alike(spec: KimiDeploymentSpec) -> Iterator[Layout]:
    """Splits of all nodes into groups of one shape; none where roles use other numbers of GPUs of a node."""
    gpus = {spec.role(role).gpus_per_node for role in Role}
    total = sum(spec.role(role).groups * spec.role(role).nodes_per_group for role in Role)
    if len(gpus) > 1:
        return
    for nodes, width in itertools.product(range(1, total // 2 + 1), range(1, max(gpus) + 1)):
        shape, num_groups = GroupShape(nodes, max(gpus), width), total // nodes
        # of many groups some splits, a fraction of them apart: a search tries them all
        splits = {round(num_groups * i / _SPLITS) for i in range(1, _SPLITS)} - {0, num_groups}
        yield from (Layout(shape, groups, shape, num_groups - groups) for groups in sorted(splits))


def _splits(request: Search, spec: KimiDeploymentSpec, role: Role) -> Iterator[tuple[GroupShape, int]]:
    """Every shape of a group that divides the role's nodes, and the number of groups."""
    stated = spec.role(role)
    total, gpus = stated.groups * stated.nodes_per_group, stated.gpus_per_node
    for nodes in (n for n in range(1, total + 1) if total % n == 0):
        for tensor_parallel in range(1, gpus + 1):
            shape = GroupShape(nodes, gpus, tensor_parallel)
            if divides(request.architecture, shape):
                yield shape, total // nodes


def layout_of(spec: KimiDeploymentSpec) -> Layout:
    """The groups that a deployment states."""
    prefill, decode = (_shape(spec, role) for role in (Role.PREFILL, Role.DECODE))
    return Layout(prefill, spec.prefill.groups, decode, spec.decode.groups)


def _shape(spec: KimiDeploymentSpec, role: Role) -> GroupShape:
    stated = spec.role(role)
    return GroupShape(stated.nodes_per_group, stated.gpus_per_node, stated.tensor_parallel)
