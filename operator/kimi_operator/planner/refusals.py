"""Why shapes are no groups of a layout: the line of memory that does not fit, the sums, and the nearest that does."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from msgspec import Struct

from kimi_operator.api.deployment import Role
from kimi_operator.errors import Problem
from kimi_operator.planner.layout import MAX_NODES, nearest_layout
from kimi_operator.planner.memory import GroupShape
from kimi_operator.planner.overflow import nearest_text
from kimi_operator.planner.space import Search, shapes_of
from kimi_operator.planner.tensors import tensor_table, total_bytes
from kimi_operator.planner.units import bytes_text, counted


class Reason(StrEnum):
    """What all refusals of a kind have in common."""

    MEMORY = "too little memory a GPU"
    LONGEST = "pages for less than the longest request"
    UNEVEN = "ranks that do not divide the experts"


class Refusal(Struct, frozen=True):
    """A shape that cannot be a group of these roles."""

    roles: tuple[Role, ...]
    shape: GroupShape
    reason: Reason
    problem: Problem
    missing_bytes: int = 0
    """Of a GPU's memory, where that is the reason."""
    weights_bytes: int = 0
    """Those that a GPU would hold, where its memory is the reason."""
    total: str = ""
    """The checkpoint beside all GPUs together, where those cannot hold it."""


def refusals(request: Search) -> Iterator[Refusal]:
    """Every shape of up to all nodes that cannot be a group, in order of nodes."""
    for nodes in range(1, request.num_nodes + 1):
        shapes = shapes_of(request, nodes)
        if not shapes:
            yield _uneven(request, nodes)
        for shape in shapes:
            yield from _refusals_of(request, shape)


def _uneven(request: Search, nodes: int) -> Refusal:
    a, shape = request.architecture, GroupShape(nodes, request.profile.gpu.per_node, 1)
    allowed = [n for n in range(1, request.num_nodes + 1) if shapes_of(request, n)]
    remedy = f"use groups of {allowed} nodes" if allowed else "use another number of GPUs a node"
    expected = f"ranks that divide the {a.num_experts} experts of {a.name}"
    problem = Problem(f"{counted(nodes, 'node')} a group", counted(shape.ranks, "rank"), expected, remedy)
    return Refusal(tuple(Role), shape, Reason.UNEVEN, problem)


def _refusals_of(request: Search, shape: GroupShape) -> Iterator[Refusal]:
    """One refusal when the GPU's memory is too small for either role, else one a role."""
    if (overflow := request.budget(shape).overflow()) is not None:
        problem = request.outcome(Role.DECODE, shape, 1)
        assert isinstance(problem, Problem)
        problem = _explained(request, Role.DECODE, shape, problem, f"a group of {shape}")
        weights, total = _sums(request, shape)[0] // shape.ranks, _total(request, shape)
        yield Refusal(tuple(Role), shape, Reason.MEMORY, problem, overflow.missing, weights, total)
        return
    for role in Role:
        problem = request.outcome(role, shape, 1)
        if isinstance(problem, Problem):
            problem = _explained(request, role, shape, problem, f"a {role} group of {shape}")
            yield Refusal((role,), shape, Reason.LONGEST, problem)


def _explained(request: Search, role: Role, shape: GroupShape, problem: Problem, field: str) -> Problem:
    """The solver's problem with the sums over the group, and with the nearest layout that fits."""
    (weights, reserved), checkpoint = _sums(request, shape), _checkpoint_bytes(request)
    memory, ranks = request.profile.gpu.memory, shape.ranks
    got = (
        f"{problem.got}; in the group {bytes_text(weights)} of weights (checkpoint {bytes_text(checkpoint)}) and "
        f"{bytes_text(reserved)} reserved of {ranks} x {bytes_text(memory)} = {bytes_text(ranks * memory)}"
    )
    remedies = [_nearest(request, role, shape)]
    if request.budget(shape).overflow() is None:
        remedies.append(problem.remedy)
    return Problem(field, got, problem.expected, ", or ".join(remedies))


def _sums(request: Search, shape: GroupShape) -> tuple[int, int]:
    """Bytes of weights and of what is reserved, over all GPUs of the group."""
    lines = request.budget(shape).lines
    weights = sum(line.bytes for line in lines if line.is_weights)
    return shape.ranks * weights, shape.ranks * sum(line.bytes for line in lines if not line.is_weights)


def _checkpoint_bytes(request: Search) -> int:
    return total_bytes(tensor_table(request.architecture))


def _total(request: Search, shape: GroupShape) -> str:
    """That all GPUs together are too few, however weights are split; empty where they are not."""
    (_, reserved), checkpoint, memory = _sums(request, shape), _checkpoint_bytes(request), request.profile.gpu.memory
    if checkpoint + reserved <= shape.ranks * memory:
        return ""
    have = f"{shape.ranks} x {bytes_text(memory)}"
    return f"{have} do not hold {bytes_text(checkpoint)} of checkpoint beside {bytes_text(reserved)} reserved"


def _nearest(request: Search, role: Role, shape: GroupShape) -> str:
    per_node = request.profile.gpu.per_node
    near = nearest_layout(request.architecture, shape, per_node, lambda other: request.fits(role, other))
    beyond = f", more than the {request.num_nodes} given" if near is not None and near.nodes > request.num_nodes else ""
    return nearest_text(near) + beyond


def shortage(request: Search) -> Problem | None:
    """When each role fits some shape but not both fit the nodes together: how many nodes they need."""
    needs = [
        need
        for tensor_parallel in range(1, request.profile.gpu.per_node + 1)
        if (need := _least(request, tensor_parallel))
    ]
    if not needs:
        return None
    nodes, shapes = min(needs, key=lambda need: need[0])
    if nodes <= request.num_nodes:
        return None
    expected = f"at least {nodes}: one prefill group of {shapes[0]} and one decode group of {shapes[1]}"
    return Problem("nodes", str(request.num_nodes), expected, f"raise it to {nodes}")


def _least(request: Search, tensor_parallel: int) -> tuple[int, tuple[GroupShape, GroupShape]] | None:
    """Nodes of the smallest group of each role, with equally wide lanes."""
    smallest = []
    for role in Role:
        shapes = (GroupShape(n, request.profile.gpu.per_node, tensor_parallel) for n in range(1, MAX_NODES + 1))
        fitting = next((shape for shape in shapes if request.fits(role, shape)), None)
        if fitting is None:
            return None
        smallest.append(fitting)
    prefill, decode = smallest
    return prefill.nodes + decode.nodes, (prefill, decode)
