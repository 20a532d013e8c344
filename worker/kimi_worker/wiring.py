"""Composition root of a rank process: from settings to a loop that is ready to run. Nothing else knows all parts."""

import gc
import secrets
import time
from dataclasses import dataclass

import structlog
import zmq
from kimi_kernels.mla import BLOCK_ROWS

from kimi_worker.engine.caches import TensorScratch, registered
from kimi_worker.engine.coordination import Coordination, CoordinatorHost, CoordinatorMember
from kimi_worker.engine.follower import Follower
from kimi_worker.engine.lane import LaneEngine
from kimi_worker.engine.leader import Leader, Links
from kimi_worker.engine.links import ClientLink, Context, FollowerLink, LeaderLink, PeerLink, new_context
from kimi_worker.engine.messages import Started, tcp_address
from kimi_worker.engine.runner import Runner
from kimi_worker.handoff.actions import LaneIdentity, Timing
from kimi_worker.handoff.plan import RegionLayout, Unit
from kimi_worker.handoff.rank import RankPort
from kimi_worker.handoff.session import DecodeSide, PrefillSide
from kimi_worker.handoff.transport import Transport
from kimi_worker.parallel.groups import Groups, Rendezvous, connect, device_of
from kimi_worker.parallel.ranks import place
from kimi_worker.protocol.engine import LaneState
from kimi_worker.protocol.step import SequenceStep, StepPlan
from kimi_worker.scheduler.lane import LaneScheduler
from kimi_worker.settings import PodIdentity, Role, WorkerSettings

log = structlog.get_logger()


class RankStartError(Exception):
    """A rank of the lane did not start in time."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a rank consists of, whatever its place."""

    settings: WorkerSettings
    identity: PodIdentity
    groups: Groups
    runner: Runner
    port: RankPort | None
    context: Context


def build_rank(settings: WorkerSettings, identity: PodIdentity, local: int) -> Leader | Follower:
    """Meet the group, load the weights, open the sockets. Raises what the parts raise when the rank cannot start."""
    begun = time.monotonic()
    where = place(settings.parallel, identity.ordinal, local)
    groups = connect(where, device_of(where, settings.runtime.device), _rendezvous(settings, identity))
    log.info("rank_connected", rank=where.rank, world_size=where.world_size, seconds=round(time.monotonic() - begun, 3))
    runner = Runner(settings, groups)
    runner.load()
    log.info(
        "rank_loaded",
        rank=where.rank,
        weights_bytes=runner.memory.weights_bytes,
        pages_bytes=runner.memory.pages_bytes,
        slots_bytes=runner.memory.slots_bytes,
        seconds=round(time.monotonic() - begun, 3),
    )
    _warm_up(settings, runner)
    log.info("rank_warm", rank=where.rank, seconds=round(time.monotonic() - begun, 3))
    port = _port(settings, identity, runner, groups) if settings.role is not Role.BOTH else None
    parts = Parts(settings, identity, groups, runner, port, new_context())
    rank = _leader(parts) if where.is_leader else _follower(parts)
    # What lives now lives as long as the process: spare the collector from looking at it again.
    gc.collect()
    gc.freeze()
    return rank


def _warm_up(settings: WorkerSettings, runner: Runner) -> None:
    """Run the most that a step can ask for, all ranks together: what is compiled or allocated late is so before Ready.

    That is the largest chunk behind enough rows to meet every shape that a longer context has, and a decode of as many
    requests as may run, all about as long as one may be. Nobody owns memory yet, so they share pages; what they leave
    there and in their slots is zeroed.
    """
    limits, longest = settings.limits, settings.model.max_model_len
    size = limits.page_size_tokens
    num_tokens = min(limits.max_num_batched_tokens, longest)
    before = min(longest - num_tokens, BLOCK_ROWS)
    pages, slots = list(range(-(-longest // size))), range(limits.max_num_seqs)
    chunk = SequenceStep([0] * num_tokens, before, pages[: -(-(before + num_tokens) // size)], 0, sample=True)
    # Of different lengths, so that the rows past a length are masked.
    decodes = [SequenceStep([0], max(longest - 1 - slot, 0), pages, slot, sample=True) for slot in slots]
    for step, sequences in enumerate(([chunk], decodes)):
        runner.execute(StepPlan(step, sequences))
    runner.caches.pages[: len(pages)] = 0.0
    runner.caches.zero_slots(slots)


def _rendezvous(settings: WorkerSettings, identity: PodIdentity) -> Rendezvous:
    return Rendezvous(
        host=_group_host(settings, identity),
        port=settings.ports.rendezvous,
        own_ip=identity.pod_ip,
        generation=identity.generation,
        collectives=settings.runtime.collectives,
        start_timeout_s=settings.timeouts.group_start_s,
        collective_timeout_s=settings.timeouts.collective_s,
    )


def _group_host(settings: WorkerSettings, identity: PodIdentity) -> str:
    """Where the other ranks find rank 0. Without a headless service the whole group is on this machine."""
    service = settings.service
    if not service.headless:
        return identity.pod_ip
    return f"{identity.group_name}-0.{service.headless}.{service.namespace}.svc"


def _port(settings: WorkerSettings, identity: PodIdentity, runner: Runner, groups: Groups) -> RankPort:
    # The name tells this process from every other one that a peer may still know.
    name = f"{identity.pod_name}/{groups.place.rank}/{secrets.token_hex(4)}"
    regions = [registered(region.name, Unit(region.unit), region.tensor) for region in runner.caches.regions]
    scratch = TensorScratch(groups.device)
    return RankPort(groups.place.tp_rank, _transport(settings, identity, name), regions, scratch)


def _transport(settings: WorkerSettings, identity: PodIdentity, name: str) -> Transport:
    # Imported late: a node has the library of its own fabric only.
    if settings.handoff.transport == "nixl":
        from kimi_worker.handoff.nixl import NixlTransport  # noqa: PLC0415

        return NixlTransport(name)
    from kimi_worker.handoff.moriio import MoriioTransport  # noqa: PLC0415

    return MoriioTransport(name, identity.pod_ip)


def _follower(parts: Parts) -> Follower:
    link = LeaderLink(parts.context, parts.identity.run_dir, parts.groups.place.local)
    link.send(_started(parts))
    return Follower(link, parts.runner, parts.groups, parts.port)


def _started(parts: Parts) -> Started:
    memory = parts.runner.memory
    descriptor = parts.port.descriptor if parts.port is not None else b""
    return Started(parts.groups.place.tp_rank, descriptor, memory.weights_bytes, memory.free_bytes)


def _leader(parts: Parts) -> Leader:
    settings, where, run_dir = parts.settings, parts.groups.place, parts.identity.run_dir
    followers = [FollowerLink(parts.context, run_dir, where.local + rank) for rank in range(1, where.tp_size)]
    started = [_started(parts), *_wait_for(followers, settings.timeouts.group_start_s)]
    endpoint = tcp_address(parts.identity.pod_ip, settings.ports.handoff + where.local_lane)
    decode, prefill = _handoff_sides(parts, [rank.descriptor for rank in started])
    lane = LaneEngine(_scheduler(parts), _facts(parts, endpoint, started), decode, prefill)
    links = Links(
        clients=ClientLink(parts.context, run_dir, where.local_lane),
        followers=followers,
        coordination=_coordination(parts),
        peers=PeerLink(parts.context, endpoint, settings.handoff.silence_s) if parts.port is not None else None,
    )
    return Leader(lane, links, parts.runner, parts.groups, parts.port)


def _scheduler(parts: Parts) -> LaneScheduler:
    settings, config = parts.settings, parts.runner.config
    eos_token_ids = frozenset(config.eos_token_ids)
    return LaneScheduler(settings.limits, settings.model.max_model_len, config.vocab_size, eos_token_ids)


def _wait_for(followers: list[FollowerLink], timeout_s: float) -> list[Started]:
    """Each follower's first message, in order of TP rank. Raises RankStartError."""
    deadline = time.monotonic() + timeout_s
    started = []
    for tp_rank, follower in enumerate(followers, 1):
        if not follower.socket.poll(max(0, int((deadline - time.monotonic()) * 1000)), zmq.POLLIN):
            raise RankStartError(f"TP rank {tp_rank} of the lane did not start within {timeout_s:.0f} s")
        first = next(follower.receive())
        assert isinstance(first, Started)
        started.append(first)
    return started


def _facts(parts: Parts, endpoint: str, started: list[Started]) -> LaneState:
    """What stays the same in the lane's state. Bytes are those of all its ranks."""
    settings, where, memory = parts.settings, parts.groups.place, parts.runner.memory
    limits = settings.limits
    return LaneState(
        lane=where.local_lane,
        handoff=endpoint,
        ready=False,
        running=0,
        waiting=0,
        reserved=0,
        queued_tokens=0,
        num_pages=limits.num_pages,
        free_pages=limits.num_pages,
        num_slots=limits.num_state_slots,
        free_slots=limits.num_state_slots,
        max_num_seqs=limits.max_num_seqs,
        layout_hash=parts.runner.layout_hash,
        weights_bytes=sum(rank.weights_bytes for rank in started),
        pages_bytes=memory.pages_bytes * where.tp_size,
        slots_bytes=memory.slots_bytes * where.tp_size,
        free_bytes=sum(rank.free_bytes for rank in started),
    )


def _handoff_sides(parts: Parts, descriptors: list[bytes]) -> tuple[DecodeSide | None, PrefillSide | None]:
    settings, where = parts.settings, parts.groups.place
    if settings.role is Role.BOTH:
        return None, None
    timing = Timing(
        reservation_timeout_s=settings.handoff.reservation_timeout_s,
        write_timeout_s=settings.handoff.write_timeout_s,
        silence_s=settings.handoff.silence_s,
    )
    is_decode = settings.role is Role.DECODE
    identity = LaneIdentity(
        engine=f"{parts.identity.pod_name}/{where.local_lane}",
        epoch=secrets.randbits(62),
        layout_hash=parts.runner.layout_hash,
        layout=tuple(
            RegionLayout(region.name, Unit(region.unit), region.unit_bytes) for region in parts.runner.caches.regions
        ),
        num_ranks=where.tp_size,
        ranks=tuple(descriptors) if is_decode else (),
        transport=settings.handoff.transport,
    )
    if is_decode:
        return DecodeSide(identity, timing), None
    fence, early = settings.handoff.fence == "read_back", settings.faults.notify_before_writes_land
    return None, PrefillSide(identity, timing, fence=fence, notify_before_writes_land=early)


def _coordination(parts: Parts) -> Coordination:
    settings, where = parts.settings, parts.groups.place
    if where.lane == 0:
        address = tcp_address(parts.identity.pod_ip, settings.ports.coordinator)
        return CoordinatorHost(parts.context, where.num_lanes, address)
    address = tcp_address(_group_host(settings, parts.identity), settings.ports.coordinator)
    return CoordinatorMember(parts.context, address)
