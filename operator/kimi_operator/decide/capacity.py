"""Pure: what the groups need of the cluster's nodes, and how much of it is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kimi_operator.api.conditions import Reason
from kimi_operator.decide.blocked import unschedulable_reason
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
    """Why the scheduler finds no node, in its words; None while it refuses no pod, or only for a missing claim.

    The numbers stand before them when the words are about GPUs, or about nodes that pods of this deployment hold.
    """
    pods = [pod for group in seen.groups.values() for pod in group.current]
    refused = [pod for pod in pods if pod.unschedulable is not None]
    refused = [pod for pod in refused if unschedulable_reason(pod.unschedulable or "") is not Reason.WEIGHTS_MISSING]
    if not refused:
        return None
    # What is short of GPUs comes first: its numbers explain most.
    refused.sort(key=lambda pod: not _is_about_gpus(pod.unschedulable or "", capacity.resource))
    words = _words(refused)
    if not _is_about_gpus(refused[0].unschedulable or "", capacity.resource):
        return words
    return f"{'; '.join(_count(wanted, seen, capacity))}; {words}"


def _is_about_gpus(words: str, resource: str) -> bool:
    return f"Insufficient {resource}" in words or "anti-affinity" in words


def _count(wanted: Sequence[GroupWanted], seen: Observed, capacity: Capacity) -> list[str]:
    """For each number of GPUs a node: how many nodes are needed, and how many there are.

    A node counts once: for the pod of this deployment that it holds, else for the largest need that it can meet.
    """
    needed: Counter[int] = Counter()
    for group in wanted:
        needed[capacity.gpus_per_pod[group.key.role]] += group.replicas
    homes = {
        pod.node: capacity.gpus_per_pod[key.role]
        for key, group in seen.groups.items()
        for pod in group.current
        if pod.node is not None
    }
    held = Counter(homes.values())
    room = _room(seen, capacity, homes)
    usable = {}
    for gpus in sorted(needed, reverse=True):
        fitting = sorted((free, name) for name, free in room.items() if free >= gpus)
        usable[gpus] = held[gpus] + len(fitting)
        for _, name in fitting[: max(0, needed[gpus] - held[gpus])]:
            del room[name]
    return [
        f"needs {count} nodes x {gpus} {capacity.resource}, {usable[gpus]} free"
        for gpus, count in sorted(needed.items())
    ]


def _room(seen: Observed, capacity: Capacity, homes: Mapping[str, int]) -> dict[str, int]:
    """Free GPUs of each node that may take a pod of this deployment."""
    return {
        name: node.gpus.get(capacity.resource, 0) - capacity.in_use.get(name, 0)
        for name, node in seen.nodes.items()
        if name not in homes and node.ready and node.schedulable
    }


def _words(refused: Sequence[PodSeen]) -> str:
    first = refused[0]
    more = f" (and {len(refused) - 1} more pods)" if len(refused) > 1 else ""
    return f"{first.name}{more}: {first.unschedulable}"
