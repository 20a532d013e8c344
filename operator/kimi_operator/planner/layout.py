"""Which layouts divide a model evenly, and which one near a given layout fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from kimi_operator.api.deployment import KimiDeploymentSpec, Role, RoleSpec
from kimi_operator.api.profile import HardwareProfileSpec
from kimi_operator.errors import Problem
from kimi_operator.planner.architecture import Architecture
from kimi_operator.planner.memory import GroupShape
from kimi_operator.planner.units import counted

MAX_NODES = 64


def check_layout(a: Architecture, spec: KimiDeploymentSpec, profile: HardwareProfileSpec) -> tuple[Problem, ...]:
    """Everything about numbers that do not divide or that exceed a bound."""
    problems = [problem for role in Role for problem in _check_role(a, role, spec.role(role), profile)]
    problems += _check_roles_agree(spec)
    return (*problems, *check_longest(a, spec.model.max_model_len))


def check_longest(a: Architecture, max_model_len: int | None) -> tuple[Problem, ...]:
    """A longest request beyond the model's."""
    if max_model_len is None or max_model_len <= a.max_positions:
        return ()
    expected = f"at most {a.max_positions:,}, which {a.name} was made for"
    remedy = f"lower it to {a.max_positions:,} or less"
    return (Problem("spec.model.maxModelLen", f"{max_model_len:,}", expected, remedy),)


def sizes_split_by_lane(a: Architecture) -> dict[str, int]:
    """What tensorParallel must divide."""
    return {
        "attention heads": a.num_heads,
        "KDA heads": a.kda_heads,
        "vocabulary rows": a.vocab,
        "dense MLP columns": a.dense_width,
        "shared expert columns": a.shared_width,
    }


def divides(a: Architecture, shape: GroupShape) -> bool:
    """Whether a layout splits every tensor evenly."""
    return (
        shape.gpus_per_node % shape.tensor_parallel == 0
        and a.num_experts % shape.ranks == 0
        and all(size % shape.tensor_parallel == 0 for size in sizes_split_by_lane(a).values())
    )


def nearest_layout(
    a: Architecture, shape: GroupShape, gpus_per_node: int, fits: Callable[[GroupShape], bool]
) -> GroupShape | None:
    """The layout that fits and changes least, nodes before tensorParallel. None when nothing fits."""
    shapes = (other for nodes in range(1, MAX_NODES + 1) for other in even_shapes(a, nodes, gpus_per_node))
    candidates = (other for other in shapes if other != shape and fits(other))
    return min(candidates, key=lambda other: distance(shape, other), default=None)


def nearest_layouts(
    a: Architecture, wanted: Mapping[Role, GroupShape], gpus_per_node: int, fits: Callable[[GroupShape], bool]
) -> dict[Role, GroupShape] | None:
    """Layouts of both roles, equally wide, that fit and together change least. None when nothing fits."""
    pairs = []
    for width in range(1, gpus_per_node + 1):
        near = {role: _nearest_of_width(a, shape, gpus_per_node, width, fits) for role, shape in wanted.items()}
        pair = {role: shape for role, shape in near.items() if shape is not None}
        if len(pair) == len(wanted):
            pairs.append(pair)

    def changes(pair: Mapping[Role, GroupShape]) -> tuple[int, ...]:
        distances = [distance(wanted[role], shape) for role, shape in pair.items()]
        return tuple(sum(each) for each in zip(*distances, strict=True))

    return min(pairs, key=changes, default=None)


def _nearest_of_width(
    a: Architecture, wanted: GroupShape, gpus_per_node: int, width: int, fits: Callable[[GroupShape], bool]
) -> GroupShape | None:
    """The wanted GPUs of a node come before all of them: a role that fits need not change."""
    sizes = (wanted.gpus_per_node, gpus_per_node)
    shapes = {GroupShape(nodes, gpus, width) for nodes in range(1, MAX_NODES + 1) for gpus in sizes}
    nearest_first = sorted(shapes, key=lambda shape: distance(wanted, shape))
    return next((shape for shape in nearest_first if divides(a, shape) and fits(shape)), None)


def even_shapes(a: Architecture, nodes: int, gpus_per_node: int) -> list[GroupShape]:
    """Shapes of a group of so many nodes that split every tensor evenly."""
    shapes = (GroupShape(nodes, gpus_per_node, tensor_parallel) for tensor_parallel in range(1, gpus_per_node + 1))
    return [shape for shape in shapes if divides(a, shape)]


def distance(wanted: GroupShape, other: GroupShape) -> tuple[int, int, int]:
    """How much changes, nodes before GPUs of a node before tensorParallel."""
    return (
        abs(other.nodes - wanted.nodes),
        abs(other.gpus_per_node - wanted.gpus_per_node),
        abs(other.tensor_parallel - wanted.tensor_parallel),
    )


def _check_role(a: Architecture, role: Role, spec: RoleSpec, profile: HardwareProfileSpec) -> Iterator[Problem]:
    path, tp = f"spec.{role}", spec.tensor_parallel
    if spec.gpus_per_node > profile.gpu.per_node:
        yield Problem(
            f"{path}.gpusPerNode",
            str(spec.gpus_per_node),
            f"at most {profile.gpu.per_node}, the GPUs of a node (profile's gpu.perNode)",
            f"lower it to {profile.gpu.per_node}",
        )
    if spec.gpus_per_node % tp:
        yield Problem(
            f"{path}.tensorParallel",
            str(tp),
            f"a divisor of gpusPerNode {spec.gpus_per_node}: a lane never crosses a node",
            f"set it to one of {_divisors(spec.gpus_per_node)}",
        )
    uneven = {what: size for what, size in sizes_split_by_lane(a).items() if size % tp}
    if uneven:
        shares = ", ".join(f"{size:,} {what}" for what, size in uneven.items())
        even = [d for d in _divisors(spec.gpus_per_node) if all(n % d == 0 for n in sizes_split_by_lane(a).values())]
        yield Problem(
            f"{path}.tensorParallel", str(tp), f"a divisor of the {shares} of {a.name}", f"set it to one of {even}"
        )
    ranks = spec.nodes_per_group * spec.gpus_per_node
    if a.num_experts % ranks:
        allowed = [n for n in range(1, MAX_NODES + 1) if a.num_experts % (n * spec.gpus_per_node) == 0]
        yield Problem(
            f"{path}.nodesPerGroup",
            f"{spec.nodes_per_group} (x gpusPerNode {spec.gpus_per_node} = {counted(ranks, 'rank')})",
            f"ranks that divide the {a.num_experts} experts of {a.name}",
            f"set it to one of {allowed}" if allowed else "change gpusPerNode",
        )
    cap = profile.limits.max_num_seqs
    if spec.max_num_seqs is not None and spec.max_num_seqs > cap:
        yield Problem(
            f"{path}.maxNumSeqs",
            str(spec.max_num_seqs),
            f"at most {cap} (profile's limits.maxNumSeqs)",
            f"lower it to {cap}, or raise the profile's limit",
        )


def _check_roles_agree(spec: KimiDeploymentSpec) -> Iterator[Problem]:
    if spec.prefill.tensor_parallel != spec.decode.tensor_parallel:
        yield Problem(
            "spec.decode.tensorParallel",
            str(spec.decode.tensor_parallel),
            f"{spec.prefill.tensor_parallel}, as in spec.prefill: a rank writes straight into its peer's memory",
            "set both to the same value",
        )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
