"""Asks ready workers for their real pools, once a pod, and for the fabric until it is verified.

Pools do not change after loading. The fabric is asked about anew when other prefill pods are there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import aiohttp
import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kimi_operator.api.deployment import Role
from kimi_operator.api.status import GroupState, MeasuredFabric, MeasuredPools
from kimi_operator.decide.groups import GroupDecision
from kimi_operator.observe import GroupSeen, PodSeen
from kimi_operator.render.names import API_PORT, GroupKey

TIMEOUT_S = 2.0
log = structlog.get_logger()


class _Lane(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    num_pages: int
    num_slots: int
    max_num_seqs: int


class _Memory(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    weights_bytes: int = Field(default=0, ge=0)
    free_bytes: int = Field(default=0, ge=0)
    """0 where the device cannot tell."""


class _Fabric(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    peers: int
    verified: int
    error: str | None = None


class _State(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    deployment: str
    role: str
    group: str
    generation: int
    lanes: tuple[_Lane, ...] = Field(min_length=1)
    memory: _Memory = _Memory()
    fabric: _Fabric | None = None
    """Absent from a worker that makes no test writes."""


@dataclass(frozen=True, slots=True)
class _Report:
    """What a pod said, and while which prefill pods were there."""

    pools: MeasuredPools
    """With memory in bytes a lane."""
    peers: frozenset[str]

    def is_final(self, key: GroupKey, peers: frozenset[str]) -> bool:
        """Whether asking again could tell nothing new."""
        fabric = self.pools.fabric
        if key.role is Role.PREFILL or fabric is None:
            return True
        return fabric.is_verified and self.peers == peers


@dataclass(slots=True)
class PoolReader:
    """Remembers what each pod reported, by its uid."""

    session: aiohttp.ClientSession
    _known: dict[str, _Report] = field(default_factory=dict)

    async def read(
        self,
        groups: Mapping[GroupKey, GroupSeen],
        decisions: Mapping[GroupKey, GroupDecision],
        gpus_per_lane: int,
    ) -> dict[GroupKey, MeasuredPools]:
        """The smallest pools of each ready group. A pod that does not answer leaves its group out until it does."""
        ready = _ready(groups, decisions)
        peers = _peers(ready)
        await asyncio.gather(*(self._ask(group, pod, peers) for group, pod in self._open(ready, peers)))
        reports = {key: self._reports(group) for key, group in ready.items()}
        return {key: _together(found, gpus_per_lane) for key, found in reports.items() if found}

    def has_open_questions(
        self, groups: Mapping[GroupKey, GroupSeen], decisions: Mapping[GroupKey, GroupDecision]
    ) -> bool:
        """Whether another reading may tell more."""
        ready = _ready(groups, decisions)
        return any(True for _ in self._open(ready, _peers(ready)))

    def forget_except(self, uids: Iterable[str]) -> None:
        """Drop the reports of pods that are gone."""
        alive = set(uids)
        self._known = {uid: report for uid, report in self._known.items() if uid in alive}

    def _open(self, ready: Mapping[GroupKey, GroupSeen], peers: frozenset[str]) -> Iterator[tuple[GroupSeen, PodSeen]]:
        for key, group in ready.items():
            for pod in group.current:
                known = self._known.get(pod.uid)
                if known is None or not known.is_final(key, peers):
                    yield group, pod

    def _reports(self, group: GroupSeen) -> list[tuple[PodSeen, MeasuredPools]]:
        """What all pods of a group reported; nothing while one is missing."""
        known = [(pod, self._known[pod.uid].pools) for pod in group.current if pod.uid in self._known]
        return known if len(known) == len(group.current) else []

    async def _ask(self, group: GroupSeen, pod: PodSeen, peers: frozenset[str]) -> None:
        if not pod.ip:
            return
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        try:
            timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
            async with self.session.get(f"http://{host}:{API_PORT}/state", timeout=timeout) as answer:
                answer.raise_for_status()
                state = _State.model_validate_json(await answer.read())
        except (aiohttp.ClientError, TimeoutError, OSError, ValidationError) as error:
            log.info("state_not_read", pod=pod.name, error=repr(error))
            return
        answered = f"{state.deployment}-{state.role}-{state.group} generation {state.generation}"
        # On the node's network, another pod may have the address and the port.
        if answered != f"{pod.name.rpartition('-')[0]} generation {group.generation}":
            log.warning("state_of_another_pod", pod=pod.name, address=pod.ip, answered=answered)
            return
        self._known[pod.uid] = _Report(_pools(state), peers)


def _pools(state: _State) -> MeasuredPools:
    """The smallest lane's, and the memory of the pod's GPUs by lane."""
    memory, num_lanes = state.memory, len(state.lanes)
    # Nobody writes into prefill pods: their 0 of 0 peers would look like a fault.
    fabric = state.fabric if state.role == Role.DECODE else None
    return MeasuredPools(
        num_pages=min(lane.num_pages for lane in state.lanes),
        num_state_slots=min(lane.num_slots for lane in state.lanes),
        max_num_seqs=min(lane.max_num_seqs for lane in state.lanes),
        weights_bytes=memory.weights_bytes // num_lanes,
        free_bytes=memory.free_bytes // num_lanes if memory.free_bytes else None,
        fabric=MeasuredFabric(
            peers=max(0, fabric.peers), verified=max(0, fabric.verified), error=(fabric.error or "")[:1024]
        )
        if fabric
        else None,
    )


def _ready(
    groups: Mapping[GroupKey, GroupSeen], decisions: Mapping[GroupKey, GroupDecision]
) -> dict[GroupKey, GroupSeen]:
    return {key: groups[key] for key, one in decisions.items() if one.state is GroupState.READY and key in groups}


def _peers(ready: Mapping[GroupKey, GroupSeen]) -> frozenset[str]:
    """Uids of the prefill pods that decode pods write to and from."""
    return frozenset(pod.uid for key, group in ready.items() if key.role is Role.PREFILL for pod in group.current)


def _together(reports: list[tuple[PodSeen, MeasuredPools]], gpus_per_lane: int) -> MeasuredPools:
    """The smallest pools, the fullest pod's memory a GPU, and the sums of what was said of the fabric."""
    pools = [report for _, report in reports]
    free = [report.free_bytes for report in pools if report.free_bytes is not None]
    fabrics = [(pod, report.fabric) for pod, report in reports if report.fabric is not None]
    errors = [f"{pod.name}: {fabric.error}"[:1024] for pod, fabric in fabrics if fabric.error]
    fabric = MeasuredFabric(
        peers=sum(one.peers for _, one in fabrics),
        verified=sum(one.verified for _, one in fabrics),
        error=errors[0] if errors else "",
    )
    return MeasuredPools(
        num_pages=min(report.num_pages for report in pools),
        num_state_slots=min(report.num_state_slots for report in pools),
        max_num_seqs=min(report.max_num_seqs for report in pools),
        weights_bytes=max(report.weights_bytes for report in pools) // gpus_per_lane,
        free_bytes=min(free) // gpus_per_lane if free else None,
        fabric=fabric if fabrics else None,
    )
