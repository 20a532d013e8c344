"""Lane engines on a simulated network and fabric, with a toy model that reads every token back from the lane's memory.

The engines, schedulers, sessions and rank ports are the real ones. A page or state that is not exactly the request's
prefix gives other tokens than the same request alone.
"""

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from kimi_worker.engine.lane import LaneEngine, ToClient
from kimi_worker.handoff.actions import LaneIdentity, Timing
from kimi_worker.handoff.plan import RegionLayout, Unit
from kimi_worker.handoff.rank import RankPort
from kimi_worker.handoff.session import DecodeSide, PrefillSide, Send, ToRanks
from kimi_worker.handoff.transport import Region
from kimi_worker.protocol.engine import (
    Admitted,
    Cancel,
    Drain,
    Failed,
    LaneState,
    Output,
    SampledToken,
    Sampling,
    Submit,
    Watch,
)
from kimi_worker.protocol.handoff import LaneMessage
from kimi_worker.protocol.step import StepPlan
from kimi_worker.scheduler.lane import LaneScheduler, plan_of
from kimi_worker.settings import LimitSettings
from sim_fabric import Fabric, Faults, Loop, SimNetwork, SimTransport

VOCABULARY = 251
PAGE_SIZE = 4
MAX_MODEL_LEN = 48
LIMITS = LimitSettings(
    max_num_seqs=3,
    max_queued=6,
    max_num_batched_tokens=16,
    num_pages=20,
    page_size_tokens=PAGE_SIZE,
    num_state_slots=5,
)
LAYOUT = (RegionLayout("pages", Unit.PAGE, 4 * PAGE_SIZE), RegionLayout("state", Unit.SLOT, 8))
PAGES_BYTES = LIMITS.num_pages * LAYOUT[0].bytes_per_unit
REGIONS = (
    Region(LAYOUT[0], 0, LIMITS.num_pages),
    Region(LAYOUT[1], PAGES_BYTES, LIMITS.num_state_slots),
)
STEP_S = 0.004
PUMP_S = 0.05
CLIENT = b"client"


def advance(state: int, token: int) -> int:
    return (state * 6364136223846793005 + token + 1442695040888963407) % 2**64


def next_token(tokens: Sequence[int], state: int) -> int:
    return (sum((at + 1) * token for at, token in enumerate(tokens)) + state // 3) % VOCABULARY


def generate(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What the toy model answers when nothing disturbs it."""
    tokens, state = list(prompt), 0
    for token in prompt:
        state = advance(state, token)
    while len(tokens) - len(prompt) < max_tokens and len(tokens) < MAX_MODEL_LEN:
        tokens.append(next_token(tokens, state))
        state = advance(state, tokens[-1])
    return tokens[len(prompt) :]


class ToyModel:
    """Keeps tokens in pages and a running hash in slots of one memory."""

    def __init__(self) -> None:
        self.memory = bytearray(b"\xee" * (PAGES_BYTES + 8 * LIMITS.num_state_slots))

    def execute(self, plan: StepPlan) -> list[SampledToken]:
        sampled = []
        for sequence in plan.sequences:
            slot = PAGES_BYTES + 8 * sequence.slot
            state = struct.unpack_from("<Q", self.memory, slot)[0] if sequence.num_cached else 0
            for at, token in enumerate(sequence.token_ids, sequence.num_cached):
                struct.pack_into("<I", self.memory, self._address(sequence.page_ids, at), token)
                state = advance(state, token)
            struct.pack_into("<Q", self.memory, slot, state)
            if sequence.sample:
                end = sequence.num_cached + len(sequence.token_ids)
                tokens = [
                    struct.unpack_from("<I", self.memory, self._address(sequence.page_ids, at))[0] for at in range(end)
                ]
                sampled.append(SampledToken(next_token(tokens, state)))
        return sampled

    def _address(self, page_ids: Sequence[int], at: int) -> int:
        return page_ids[at // PAGE_SIZE] * LAYOUT[0].bytes_per_unit + 4 * (at % PAGE_SIZE)


@dataclass
class World:
    loop: Loop
    rng: random.Random
    network: SimNetwork
    fabric: Fabric


@dataclass
class Outcome:
    tokens: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    is_cancelled: bool = False


class Lane:
    """What leader.py does around an engine, in virtual time."""

    def __init__(self, world: World, endpoint: str, role: str) -> None:
        self.world = world
        self.endpoint = endpoint
        self.model = ToyModel()
        transport = SimTransport(world.fabric, endpoint, self.model.memory)
        self.port = RankPort(0, transport, REGIONS)
        transport.on_ended = self.turn
        transport.makes_progress = lambda: self.port.is_watching
        ranks = (self.port.descriptor,) if role == "decode" else ()
        identity = LaneIdentity(endpoint, world.rng.getrandbits(40), "layout", LAYOUT, 1, ranks)
        timing = Timing(reservation_timeout_s=20.0, silence_s=6.0, write_timeout_s=8.0)
        facts = LaneState(0, endpoint, False, 0, 0, 0, 0, LIMITS.num_pages, 0, LIMITS.num_state_slots, 0, 3)
        self.engine = LaneEngine(
            LaneScheduler(LIMITS, MAX_MODEL_LEN, VOCABULARY, frozenset()),
            facts,
            decode=DecodeSide(identity, timing) if role == "decode" else None,
            prefill=PrefillSide(identity, timing) if role == "prefill" else None,
        )
        self.engine.is_assembled = True
        self.outcomes: dict[str, Outcome] = {}
        self.states: list[LaneState] = []
        self._timer = -1.0
        world.network.receivers[endpoint] = self._receive

    def send(self, message: Submit | Cancel | Drain | Watch) -> None:
        """A message of the lane's client."""
        if isinstance(message, Submit):
            self.outcomes[message.request_id] = Outcome()
        self.engine.receive(CLIENT, message, self.world.loop.now)
        self.turn()

    def turn(self) -> None:
        """One pass of the leader's loop: reports, deadlines, a step, and what comes of them."""
        now = self.world.loop.now
        for report in self.port.poll():
            self.engine.report(report, now)
        self.engine.tick(now)
        shares = self.engine.scheduler.schedule()
        if shares:
            self.engine.complete(shares, list(self.model.execute(plan_of(0, shares, PAGE_SIZE))), now)
            self.engine.tick(now)
        self.engine.publish_state(is_due=False)
        self._flush()
        self.engine.scheduler.check()
        if self.engine.scheduler.has_work:
            self._wake_at(now + STEP_S)
        elif self.port.is_watching:
            self._wake_at(now + PUMP_S)
        elif self.engine.next_deadline is not None:
            self._wake_at(self.engine.next_deadline)

    def _receive(self, peer: str, message: LaneMessage) -> None:
        self.engine.receive_from_peer(peer, message, self.world.loop.now)
        self.turn()

    def _flush(self) -> None:
        effects, self.engine.effects = self.engine.effects, []
        for effect in effects:
            match effect:
                case ToClient(_, message):
                    self._answer(message)
                case Send(peer, control):
                    self.world.network.send(self.endpoint, peer, control)
                case ToRanks(command):
                    self.port.execute(command)

    def _answer(self, message: object) -> None:
        match message:
            case LaneState():
                self.states.append(message)
            case Output():
                outcome = self.outcomes[message.request_id]
                assert not outcome.ends, "tokens after the end"
                outcome.tokens += [token.token_id for token in message.tokens]
                outcome.ends += [message.finish_reason] if message.finish_reason else []
            case Failed():
                self.outcomes[message.request_id].ends.append(message.code)
            case Admitted():
                assert not self.outcomes[message.request_id].ends

    def _wake_at(self, when: float) -> None:
        if self._timer <= self.world.loop.now or when < self._timer:
            self._timer = when
            self.world.loop.after(when - self.world.loop.now, self._wake)

    def _wake(self) -> None:
        if self.world.loop.now >= self._timer:
            self.turn()

    def assert_at_rest(self) -> None:
        memory = self.engine.scheduler.memory
        assert self.engine.is_empty
        assert (memory.pages.num_free, memory.slots.num_free) == (LIMITS.num_pages, LIMITS.num_state_slots)
        assert self.engine.effects == []


def make_world(rng: random.Random, faults: Faults) -> World:
    loop = Loop()
    return World(loop, rng, SimNetwork(loop, rng, faults), Fabric(loop, rng, faults))


def greedy(max_tokens: int) -> Sampling:
    return Sampling(max_tokens=max_tokens, temperature=0.0)


def pair() -> tuple[Lane, Lane]:
    world = make_world(random.Random(1), Faults())
    return Lane(world, "prefill", "prefill"), Lane(world, "decode", "decode")


@pytest.mark.parametrize("seed", range(30))
def test_random_walk_answers_every_request_and_leaks_nothing(seed: int) -> None:
    """Requests with and without handoff, cancels, lost, late and repeated messages, slow and broken writes."""
    rng = random.Random(seed)
    faults = Faults(
        lose_message=rng.choice([0, 0.1]),
        repeat_message=rng.choice([0, 0.2]),
        late_message=rng.choice([0, 0.1]),
        slow_write=rng.choice([0, 0.1]),
        break_wire=rng.choice([0, 0, 0.1]),
    )
    world = make_world(rng, faults)
    prefills = [Lane(world, f"prefill-{index}", "prefill") for index in range(2)]
    decodes = [Lane(world, f"decode-{index}", "decode") for index in range(2)]
    submits: dict[str, tuple[Submit, Lane]] = {}

    def submit() -> None:
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 30))]
        prefill = rng.choice([*(lane.endpoint for lane in prefills), None])
        message = Submit(f"r{len(submits)}", prompt, greedy(rng.randint(1, 20)), prefill)
        lane = rng.choice(decodes)
        submits[message.request_id] = (message, lane)
        lane.send(message)
        if rng.random() < 0.3:
            world.loop.after(rng.uniform(0, 3.0), lambda: cancel(message.request_id, lane))

    def cancel(request_id: str, lane: Lane) -> None:
        lane.outcomes[request_id].is_cancelled = True
        lane.send(Cancel(request_id))

    for _ in range(60):
        world.loop.after(rng.uniform(0, 10.0), submit)
    world.loop.run(10.0)
    faults.stop()
    world.loop.run(120.0, max_events=400_000)

    for lane in (*prefills, *decodes):
        lane.assert_at_rest()
    for request_id, (message, lane) in submits.items():
        outcome = lane.outcomes[request_id]
        answer = generate(message.token_ids, message.sampling.max_tokens)
        assert outcome.tokens == answer[: len(outcome.tokens)], request_id
        assert len(outcome.ends) == 1 or (outcome.is_cancelled and not outcome.ends)
        if outcome.ends == ["length"]:
            assert outcome.tokens == answer
    ends = [end for lane in decodes for outcome in lane.outcomes.values() for end in outcome.ends]
    assert ends.count("length") > 5


def test_undisturbed_requests_are_all_answered_and_state_is_told() -> None:
    prefill, decode = pair()
    for lane in (prefill, decode):
        lane.send(Watch())
    for number in range(4):
        decode.send(Submit(f"r{number}", list(range(10 + number)), greedy(6), "prefill"))
    prefill.world.loop.run(5.0)
    for number in range(4):
        outcome = decode.outcomes[f"r{number}"]
        assert (outcome.tokens, outcome.ends) == (generate(range(10 + number), 6), ["length"])
    assert max(state.reserved + state.running for state in decode.states) >= 4
    assert (decode.states[-1].running, decode.states[-1].free_pages) == (0, LIMITS.num_pages)
    assert decode.states[-1].ready
    prefill.assert_at_rest()


def test_a_first_token_that_the_model_does_not_have_fails_its_request_alone() -> None:
    """As of a prefill pod that is not what it says: as the input of a step it would end a rank."""
    prefill, decode = pair()
    honest = prefill.model.execute
    prefill.model.execute = lambda plan: [SampledToken(VOCABULARY) for _ in honest(plan)]  # type: ignore[method-assign]
    decode.send(Submit("strange", [1, 2, 3], greedy(8), "prefill"))
    decode.send(Submit("own", [1, 2, 3], greedy(8), None))
    decode.world.loop.run(30.0)
    assert (decode.outcomes["strange"].tokens, decode.outcomes["strange"].ends) == ([], ["handoff_failed"])
    assert decode.outcomes["own"].tokens == generate([1, 2, 3], 8)
    for lane in (prefill, decode):
        lane.assert_at_rest()


def test_draining_lane_refuses_clients_and_peers_but_finishes() -> None:
    prefill, decode = pair()
    decode.send(Submit("before", [1, 2, 3], greedy(8), "prefill"))
    prefill.send(Drain())
    decode.send(Submit("after", [1, 2, 3], greedy(8), "prefill"))
    decode.send(Drain())
    decode.send(Submit("late", [1, 2, 3], greedy(8), None))
    decode.world.loop.run(30.0)
    assert decode.outcomes["late"].ends == ["draining"]
    assert all(outcome.ends in (["draining"], ["length"]) for outcome in decode.outcomes.values())
    for lane in (prefill, decode):
        lane.assert_at_rest()


def test_id_that_the_handoff_still_holds_is_refused() -> None:
    prefill, decode = pair()
    decode.world.network.receivers.pop("prefill")
    decode.send(Submit("same", [1, 2, 3], greedy(8), "prefill"))
    decode.world.loop.run(0.1)
    decode.send(Submit("same", [1, 2, 3], greedy(8), None))
    assert decode.outcomes["same"].ends == ["engine_error"]
    prefill.assert_at_rest()


def test_message_for_the_other_role_is_dropped() -> None:
    prefill, decode = pair()
    decode.send(Submit("r", [1, 2, 3], greedy(2), "decode"))
    decode.world.loop.run(60.0)
    assert decode.outcomes["r"].ends in (["prefill_unreachable"], ["handoff_failed"])
    decode.assert_at_rest()
    prefill.assert_at_rest()


def test_not_finite_logits_fail_the_request_alone() -> None:
    world = make_world(random.Random(1), Faults())
    lane = Lane(world, "both", "both")
    lane.engine.receive(CLIENT, Submit("bad", [1, 2], greedy(4), None), 0.0)
    lane.engine.receive(CLIENT, Submit("good", [1, 2], greedy(4), None), 0.0)
    lane.outcomes = {"bad": Outcome(), "good": Outcome()}
    shares = lane.engine.scheduler.schedule()
    good = lane.model.execute(plan_of(0, shares, PAGE_SIZE))[1]
    lane.engine.complete(shares, [None, good], 0.0)
    world.loop.after(0.0, lane.turn)
    world.loop.run(5.0)
    assert lane.outcomes["bad"].ends == ["engine_error"]
    assert lane.outcomes["good"].tokens == generate([1, 2], 4)
    lane.assert_at_rest()


def test_lane_of_a_group_that_has_not_assembled_takes_nothing() -> None:
    world = make_world(random.Random(1), Faults())
    lane = Lane(world, "both", "both")
    lane.engine.is_assembled = False
    lane.send(Watch())
    lane.send(Submit("early", [1, 2], greedy(4), None))
    assert lane.outcomes["early"].ends == ["draining"]
    assert not lane.states[-1].ready
