"""Simulated lanes around the real sessions and rank ports, which check the handoff's invariants on every byte.

Each owner stamps its pages and slot; free memory is poisoned. So a page that is read too early, reused too early, or
written by a stranger shows as wrong bytes:

I1 nothing is read before every byte has arrived        I4 exactly one side frees each resource, exactly once
I2 nothing is reused while a write may be in flight     I5 every request ends, and nothing is left
I3 a slot never shows a previous owner's state          I6 different layouts never exchange
"""

import functools
import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kimi_worker.handoff.actions import (
    Action,
    Activate,
    CancelCompute,
    Enqueue,
    Fail,
    FreeReservation,
    FreeSource,
    HandoffRequest,
    LaneIdentity,
    Send,
    Timing,
    ToRanks,
)
from kimi_worker.handoff.decode_side import DecodeSide
from kimi_worker.handoff.fabric import SCRATCH_UNITS
from kimi_worker.handoff.plan import Layout, RegionLayout, Unit
from kimi_worker.handoff.prefill_side import PrefillSide
from kimi_worker.handoff.rank import RankPort
from kimi_worker.handoff.transport import Region
from kimi_worker.protocol.engine import SampledToken, Sampling
from kimi_worker.protocol.handoff import LaneMessage, RankCommand, TransferKey
from sim_fabric import SCRATCH_LAYOUT, Fabric, Loop, SimNetwork, SimScratch, SimTransport

POISON = 0xEE
LAYOUT: Layout = (
    RegionLayout("pages", Unit.PAGE, 64),
    RegionLayout("state", Unit.SLOT, 80),
    RegionLayout("conv", Unit.SLOT, 32),
)
NUM_PAGES, NUM_SLOTS, NUM_RANKS = 12, 4, 2
UNITS = {Unit.PAGE: NUM_PAGES, Unit.SLOT: NUM_SLOTS}
ALL_UNITS = frozenset(UNITS)
TIMING = Timing(
    reservation_timeout_s=60.0, resend_max_s=4.0, silence_s=4.0, revoke_wait_s=6.0, write_timeout_s=16.0, forget_s=120.0
)
LONGEST_STEP_S = 12.0
"""Several times the silence that loses a peer, and less than writes may take."""
GREEDY = Sampling(max_tokens=8, temperature=0.0)


def _regions() -> list[Region]:
    regions, start = [], 0
    for layout in LAYOUT:
        regions.append(Region(layout, start, UNITS[layout.unit]))
        start += regions[-1].num_bytes
    return regions


REGIONS = _regions()
SCRATCH_START = sum(region.num_bytes for region in REGIONS)
RANK_BYTES = SCRATCH_START + SCRATCH_LAYOUT.bytes_per_unit * SCRATCH_UNITS


class InvariantError(Exception):
    """A check failed; the message names the invariant."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Memory that one request holds on one lane."""

    pages: tuple[int, ...]
    slot: int


class Pool:
    """Pages and slots of one process, and the bytes of all its ranks."""

    def __init__(self) -> None:
        self.free_pages = set(range(NUM_PAGES))
        self.free_slots = set(range(NUM_SLOTS))
        self.ranks = [bytearray([POISON]) * RANK_BYTES for _ in range(NUM_RANKS)]

    def take(self, rng: random.Random, num_pages: int) -> Holding | None:
        if len(self.free_pages) < num_pages or not self.free_slots:
            return None
        holding = Holding(tuple(rng.sample(sorted(self.free_pages), num_pages)), rng.choice(sorted(self.free_slots)))
        self.check(holding, None, "I2: written while it was free")
        self.free_pages -= set(holding.pages)
        self.free_slots.discard(holding.slot)
        return holding

    def give_back(self, holding: Holding) -> None:
        if holding.slot in self.free_slots or self.free_pages & set(holding.pages):
            raise InvariantError(f"I4: {holding} was freed twice")
        self.free_pages |= set(holding.pages)
        self.free_slots.add(holding.slot)
        self.fill(holding, None)

    def fill(self, holding: Holding, owner: str | None) -> None:
        for rank in range(NUM_RANKS):
            for _, start, stamp in _stamps(holding, owner, rank):
                self.ranks[rank][start : start + len(stamp)] = stamp

    def check(self, holding: Holding, owner: str | None, rule: str, units: frozenset[Unit] = ALL_UNITS) -> None:
        for rank in range(NUM_RANKS):
            for unit, start, stamp in _stamps(holding, owner, rank):
                found = self.ranks[rank][start : start + len(stamp)]
                if unit in units and found != stamp:
                    raise InvariantError(f"{rule}: rank {rank}, {holding}, byte {start}: found {found.hex()}")

    def check_no_state_of(self, owner: str, holding: Holding) -> None:
        """No region of the slot may show the bytes that its previous owner left."""
        for rank in range(NUM_RANKS):
            for unit, start, stamp in _stamps(holding, owner, rank):
                if unit is Unit.SLOT and self.ranks[rank][start : start + len(stamp)] == stamp:
                    raise InvariantError(f"I3: rank {rank}, {holding}, byte {start}: the state of {owner}")

    def check_all_free(self) -> None:
        if len(self.free_pages) != NUM_PAGES or len(self.free_slots) != NUM_SLOTS:
            raise InvariantError(f"I5: leaked pages or slots; free are {self.free_pages} and {self.free_slots}")
        for slot in range(NUM_SLOTS):
            self.check(Holding(tuple(range(NUM_PAGES)), slot), None, "I2: written while it was free")

    def is_free(self, start: int) -> bool:
        """Whether a byte of a rank's memory belongs to a free page or slot; the scratch never does."""
        for region in REGIONS:
            if region.pointer <= start < region.pointer + region.num_bytes:
                unit = (start - region.pointer) // region.layout.bytes_per_unit
                return unit in (self.free_pages if region.layout.unit is Unit.PAGE else self.free_slots)
        if start >= SCRATCH_START:
            return False
        raise InvariantError(f"I2: byte {start} is in no region")


@functools.lru_cache(maxsize=1024)
def _stamps(holding: Holding, owner: str | None, rank: int) -> list[tuple[Unit, int, bytes]]:
    """Addresses and bytes of all that the owner holds on a rank; without an owner the bytes are poison."""
    stamps = []
    for region in REGIONS:
        size = region.layout.bytes_per_unit
        units: Sequence[int] = holding.pages if region.layout.unit is Unit.PAGE else (holding.slot,)
        for index, unit in enumerate(units):
            stamp = _stamp(owner, rank, region.layout.name, index, size)
            stamps.append((region.layout.unit, region.pointer + unit * size, stamp))
    return stamps


def _stamp(owner: str | None, rank: int, region: str, index: int, size: int) -> bytes:
    """Bytes that only this unit of this owner holds."""
    if owner is None:
        return bytes([POISON]) * size
    return hashlib.shake_128(f"{owner}/{rank}/{region}/{index}".encode()).digest(size)


@dataclass(slots=True)
class World:
    """What all simulated lanes share."""

    loop: Loop
    rng: random.Random
    network: SimNetwork
    fabric: Fabric
    trace: Callable[..., None]
    """Called with what happens, for the report of a failure; formats nothing by itself."""


class Lane:
    """One process: a leader with its side of the handoff, its ranks, its memory, and a toy engine."""

    def __init__(self, world: World, endpoint: str, layout_hash: str) -> None:
        self.world = world
        self.endpoint = endpoint
        self.pool = Pool()
        self.is_alive = True
        epoch = world.rng.getrandbits(40)
        names = [f"{endpoint}/{layout_hash}/{epoch:x}/{rank}" for rank in range(NUM_RANKS)]
        self.transports = [
            SimTransport(world.fabric, name, memory) for name, memory in zip(names, self.pool.ranks, strict=True)
        ]
        self.ports = [
            RankPort(rank, transport, REGIONS, SimScratch(transport.memory, SCRATCH_START))
            for rank, transport in enumerate(self.transports)
        ]
        self._mailbox_free_at = [0.0] * NUM_RANKS
        for rank, transport in enumerate(self.transports):
            transport.on_ended = lambda rank=rank: self._when_free(lambda: self._poll(rank))  # type: ignore[misc]
            transport.makes_progress = lambda rank=rank: self._pumps(rank)  # type: ignore[misc]
        self.identity = LaneIdentity(endpoint, epoch, layout_hash, LAYOUT, NUM_RANKS, self._descriptors())
        self._timer: float | None = None
        self._busy_until = 0.0
        self.side: DecodeSide | PrefillSide
        world.network.receivers[endpoint] = self._receive

    def _descriptors(self) -> tuple[bytes, ...]:
        return tuple(port.descriptor for port in self.ports)

    def crash(self) -> None:
        self.is_alive = False
        self.world.trace(self.endpoint, "crashes")
        del self.world.network.receivers[self.endpoint]
        for transport in self.transports:
            transport.close()

    def step_for(self, seconds: float) -> None:
        """All ranks of the lane are in one long step: nothing is read, written or decided before it ends."""
        self._busy_until = max(self._busy_until, self.world.loop.now + seconds)
        self.world.trace(self.endpoint, "steps until", self._busy_until)

    def _when_free(self, event: Callable[[], None]) -> None:
        """Let the event happen now, or when the step has ended, in order."""
        if self.world.loop.now < self._busy_until:
            self.world.loop.after(self._busy_until - self.world.loop.now, lambda: self._when_free(event))
        elif self.is_alive:
            event()

    def _pumps(self, rank: int) -> bool:
        return self.ports[rank].is_watching and self.world.loop.now >= self._busy_until

    def see_peers(self) -> None:
        raise NotImplementedError

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            self.world.trace(self.endpoint, "->", action)
            match action:
                case Send(peer, message):
                    self.world.network.send(self.endpoint, peer, message)
                case ToRanks(command):
                    for rank in range(NUM_RANKS):
                        self._to_rank(rank, command)
                case _:
                    self.for_engine(action)
        self._set_timer()

    def for_engine(self, action: Action) -> None:
        raise NotImplementedError

    def _receive(self, peer: str, message: LaneMessage) -> None:
        self._when_free(lambda: self._take(peer, message))

    def _take(self, peer: str, message: LaneMessage) -> None:
        self.world.trace(self.endpoint, "<-", peer, message)
        self.perform(self.side.receive(peer, message, self.world.loop.now))  # type: ignore[arg-type]

    def _to_rank(self, rank: int, command: RankCommand) -> None:
        """Commands reach a rank after a while, in order."""
        now = self.world.loop.now
        at = self._mailbox_free_at[rank] = max(self._mailbox_free_at[rank], now + self.world.rng.uniform(0, 0.01))
        self.world.loop.after(at - now, lambda: self._when_free(lambda: self._execute(rank, command)))

    def _execute(self, rank: int, command: RankCommand) -> None:
        if self.is_alive:
            self.ports[rank].execute(command)
            self._poll(rank)

    def _poll(self, rank: int) -> None:
        if not self.is_alive:
            return
        for report in self.ports[rank].poll():
            delay = self.world.rng.uniform(0, 0.01)
            reported = functools.partial(self._reported, report)
            self.world.loop.after(delay, functools.partial(self._when_free, reported))

    def _reported(self, report: object) -> None:
        if self.is_alive:
            self.world.trace(self.endpoint, "<-", report)
            self.perform(self.side.report(report, self.world.loop.now))  # type: ignore[arg-type]

    def _set_timer(self) -> None:
        deadline = self.side.next_deadline()
        if deadline is None or (self._timer is not None and self._timer <= deadline):
            return
        self._timer = deadline
        self.world.loop.after(deadline - self.world.loop.now, lambda: self._when_free(lambda: self._fire(deadline)))

    def _fire(self, deadline: float) -> None:
        if self._timer != deadline:
            return
        self._timer = None
        self.see_peers()
        self.perform(self.side.tick(self.world.loop.now))

    def check_idle(self) -> None:
        """I5: nothing is left, and all memory is free and clean."""
        if self.side.num_open:
            raise InvariantError(f"I5: {self.endpoint} still has {self.side.num_open} open transfers")
        if self.side.next_deadline() is not None:
            raise InvariantError(f"I5: {self.endpoint} is idle but still sets a timer")
        if any(port.is_watching for port in self.ports):
            raise InvariantError(f"I5: {self.endpoint} is idle but its ranks still poll")
        self.pool.check_all_free()


def previous_owner(request_id: str) -> str:
    """Whose bytes a request finds in the memory that it is given."""
    return f"stale/{request_id}"


@dataclass(slots=True)
class Outcome:
    """How one request ended: done, failed <code>, cancelled, or lost with its process."""

    ended: str = ""


class DecodeLane(Lane):
    """Reserves, hands off, reads what arrived, holds it for a while, frees it."""

    def __init__(self, world: World, endpoint: str, layout_hash: str) -> None:
        super().__init__(world, endpoint, layout_hash)
        self.side = DecodeSide(self.identity, TIMING)
        self.held: dict[str, Holding] = {}
        self.outcomes: dict[str, Outcome] = {}

    def request(self, request_id: str, prefill: str, num_pages: int) -> None:
        self._when_free(lambda: self._request(request_id, prefill, num_pages))

    def _request(self, request_id: str, prefill: str, num_pages: int) -> None:
        holding = self.pool.take(self.world.rng, num_pages) if self.is_alive else None
        if holding is None:
            return
        self.pool.fill(holding, previous_owner(request_id))
        self.held[request_id] = holding
        self.outcomes[request_id] = Outcome()
        tokens = [int(request_id), num_pages]
        request = HandoffRequest(request_id, prefill, tokens, GREEDY, list(holding.pages), holding.slot)
        self.perform(self.decode_side.begin(request, self.world.loop.now))

    def see_peers(self) -> None:
        for peer in self.world.network.reached(self.endpoint):
            self.decode_side.see(peer, self.world.loop.now)

    @property
    def decode_side(self) -> DecodeSide:
        assert isinstance(self.side, DecodeSide)
        return self.side

    def verify(self, prefills: list[str]) -> None:
        self._when_free(lambda: self.perform(self.decode_side.verify(prefills, self.world.loop.now)))

    def cancel(self, request_id: str) -> None:
        outcome = self.outcomes.get(request_id)
        if self.is_alive and outcome is not None and not outcome.ended:
            outcome.ended = "cancelled"
            self.perform(self.decode_side.cancel(request_id, self.world.loop.now))

    def for_engine(self, action: Action) -> None:
        match action:
            case Activate():
                self._activate(action)
            case Fail():
                outcome = self.outcomes[action.request_id]
                if outcome.ended:
                    raise InvariantError(f"I5: {action} after the request was {outcome.ended}")
                outcome.ended = f"failed {action.code}"
            case FreeReservation():
                if not self.outcomes[action.request_id].ended:
                    raise InvariantError(f"I5: {action} of a request without an end")
                self._free(action.request_id)
            case _:
                raise AssertionError(action)

    def _activate(self, action: Activate) -> None:
        holding, outcome = self._holding(action.request_id), self.outcomes[action.request_id]
        if outcome.ended:
            raise InvariantError(f"I4: {action} after the request was {outcome.ended}")
        if action.first.token_id != int(action.request_id) + 1:
            raise InvariantError(f"I5: {action} has another request's first token")
        outcome.ended = "done"
        self.pool.check(holding, action.request_id, "I1", frozenset({Unit.PAGE}))
        self.pool.check_no_state_of(previous_owner(action.request_id), holding)
        self.pool.check(holding, action.request_id, "I1")
        self.world.loop.after(self.world.rng.uniform(0, 3), lambda: self._finish(action.request_id))

    def _finish(self, request_id: str) -> None:
        if self.is_alive:
            self.pool.check(self._holding(request_id), request_id, "I2")
            self._free(request_id)

    def _free(self, request_id: str) -> None:
        self.pool.give_back(self._holding(request_id))
        del self.held[request_id]

    def _holding(self, request_id: str) -> Holding:
        """Both the session and the engine free, in turn: each must still find what it holds."""
        if request_id not in self.held:
            raise InvariantError(f"I4: what {request_id} of {self.endpoint} holds was freed before")
        return self.held[request_id]


class PrefillLane(Lane):
    """Computes prompts into its own memory after a while, sometimes refuses, fails, or computes after a cancel."""

    def __init__(self, world: World, endpoint: str, layout_hash: str, *, fence: bool, early: bool) -> None:
        super().__init__(world, endpoint, layout_hash)
        self.side = PrefillSide(self.identity, TIMING, fence=fence, notify_before_writes_land=early)
        self.computing: dict[TransferKey, Holding | None] = {}
        self.sources: dict[TransferKey, Holding] = {}
        self.trouble = 0.0
        """Chance that the engine refuses or fails a request."""

    def see_peers(self) -> None:
        for peer in self.world.network.heard(self.endpoint):
            self.prefill_side.see(peer, self.world.loop.now)

    @property
    def prefill_side(self) -> PrefillSide:
        assert isinstance(self.side, PrefillSide)
        return self.side

    def for_engine(self, action: Action) -> None:
        match action:
            case Enqueue():
                if action.key in self.computing:
                    raise InvariantError(f"I5: {action} twice")
                self.computing[action.key] = None
                start = functools.partial(self._start, action)
                self.world.loop.after(self.world.rng.uniform(0, 0.5), lambda: self._when_free(start))
            case CancelCompute():
                holding = self.computing.pop(action.key)
                if holding is not None:
                    self.pool.give_back(holding)
            case FreeSource():
                if action.key not in self.sources:
                    raise InvariantError(f"I4: {action} of what is not held")
                self.pool.give_back(self.sources.pop(action.key))
            case _:
                raise AssertionError(action)

    def _start(self, action: Enqueue) -> None:
        if not self.is_alive or action.key not in self.computing:
            return
        rng, now = self.world.rng, self.world.loop.now
        holding = self.pool.take(rng, action.token_ids[1])
        if holding is None or rng.random() < self.trouble:
            del self.computing[action.key]
            if holding is not None:
                self.pool.give_back(holding)
            self.perform(self.prefill_side.fail(action.key, "prefill_full", "no room", now))
            return
        self.computing[action.key] = holding
        computed = functools.partial(self._computed, action, holding)
        self.world.loop.after(rng.uniform(0, 2), lambda: self._when_free(computed))

    def _computed(self, action: Enqueue, holding: Holding) -> None:
        if not self.is_alive or self.computing.get(action.key) is not holding:
            return
        del self.computing[action.key]
        self.sources[action.key] = holding
        self.pool.fill(holding, str(action.token_ids[0]))
        first = SampledToken(action.token_ids[0] + 1)
        side, now = self.prefill_side, self.world.loop.now
        self.perform(side.computed(action.key, list(holding.pages), holding.slot, first, now))

    def check_idle(self) -> None:
        if self.computing or self.sources:
            raise InvariantError(f"I5: {self.endpoint} still computes {self.computing}, holds {self.sources}")
        super().check_idle()
