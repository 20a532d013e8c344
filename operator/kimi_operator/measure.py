"""Asks ready workers for their real pools, once a pod: they do not change after loading."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import aiohttp
import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from kimi_operator.api.status import GroupState, MeasuredPools
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

    weights_bytes: int = 0


class _State(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    lanes: tuple[_Lane, ...]
    memory: _Memory = _Memory()


@dataclass(slots=True)
class PoolReader:
    """Remembers what each pod reported, by its uid."""

    session: aiohttp.ClientSession
    _known: dict[str, MeasuredPools] = field(default_factory=dict)

    async def read(
        self, groups: Mapping[GroupKey, GroupSeen], decisions: Mapping[GroupKey, GroupDecision]
    ) -> dict[GroupKey, MeasuredPools]:
        """The smallest pools of each ready group. A pod that does not answer leaves its group out until it does."""
        ready = {key: groups[key] for key, one in decisions.items() if one.state is GroupState.READY and key in groups}
        unknown = [pod for group in ready.values() for pod in group.current if pod.uid not in self._known and pod.ip]
        await asyncio.gather(*(self._ask(pod) for pod in unknown))
        reports = {key: self._reports(group) for key, group in ready.items()}
        return {key: _smallest(found) for key, found in reports.items() if found}

    def forget_except(self, uids: Iterable[str]) -> None:
        """Drop the reports of pods that are gone."""
        alive = set(uids)
        self._known = {uid: report for uid, report in self._known.items() if uid in alive}

    def _reports(self, group: GroupSeen) -> list[MeasuredPools]:
        """What all pods of a group reported; nothing while one is missing."""
        known = [self._known[pod.uid] for pod in group.current if pod.uid in self._known]
        return known if len(known) == len(group.current) else []

    async def _ask(self, pod: PodSeen) -> None:
        host = f"[{pod.ip}]" if ":" in (pod.ip or "") else pod.ip
        try:
            timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
            async with self.session.get(f"http://{host}:{API_PORT}/state", timeout=timeout) as answer:
                answer.raise_for_status()
                state = _State.model_validate_json(await answer.read())
        except (aiohttp.ClientError, TimeoutError, OSError, ValidationError) as error:
            log.info("state_not_read", pod=pod.name, error=repr(error))
            return
        if state.lanes:
            self._known[pod.uid] = MeasuredPools(
                num_pages=min(lane.num_pages for lane in state.lanes),
                num_state_slots=min(lane.num_slots for lane in state.lanes),
                max_num_seqs=min(lane.max_num_seqs for lane in state.lanes),
                weights_bytes=state.memory.weights_bytes,
            )


def _smallest(reports: list[MeasuredPools]) -> MeasuredPools:
    return MeasuredPools(
        num_pages=min(report.num_pages for report in reports),
        num_state_slots=min(report.num_state_slots for report in reports),
        max_num_seqs=min(report.max_num_seqs for report in reports),
        weights_bytes=max(report.weights_bytes for report in reports),
    )
