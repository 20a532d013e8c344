"""Pure: what the groups need of the cluster's nodes, and how much of it is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kimi_operator.decide.groups import GroupWanted
from kimi_operator.observe import Observed, PodSeen


@dataclass(frozen=True, slots=True)
class Capacity:
    """GPUs as the groups ask for them and as the nodes have them."""

    resource: str
    """Extended resource, such as amd.com/gpu."""
    gpus_per_pod: Mapping[str, int]
    """By role."""
    in_use: Mapping[str, int]
    """GPUs that pods hold, by node; those of this deployment included."""


def find_shortage(wanted: Sequence[GroupWanted], seen: Observed, capacity: Capacity) -> str | None:
    """What is missing, with the numbers and the scheduler's words; None while no pod is refused."""
    pods = [pod for group in seen.groups.values() for pod in group.current]
    refused = [pod for pod in pods if pod.unschedulable is not None]
    if not refused:
        return None
    needed: Counter[int] = Counter()
    for group in wanted:
        needed[capacity.gpus_per_pod[group.key.role]] += group.replicas
    homes = {pod.node for pod in pods if pod.node is not None}
    lines = [
        f"needs {count} nodes x {gpus} {capacity.resource}, {_usable(seen, capacity, homes, gpus)} free"
        for gpus, count in sorted(needed.items())
    ]
    return f"{'; '.join(lines)}; {_words(refused)}"


def _usable(seen: Observed, capacity: Capacity, homes: set[str], gpus: int) -> int:
    """Nodes that hold a pod of this deployment already, or have room for one."""
    return sum(
        name in homes
        or (
            node.ready
            and node.schedulable
            and node.gpus.get(capacity.resource, 0) - capacity.in_use.get(name, 0) >= gpus
        )
        for name, node in seen.nodes.items()
    )


def _words(refused: Sequence[PodSeen]) -> str:
    first = refused[0]
    more = f" (and {len(refused) - 1} more pods)" if len(refused) > 1 else ""
    return f"{first.name}{more}: {first.unschedulable}"
