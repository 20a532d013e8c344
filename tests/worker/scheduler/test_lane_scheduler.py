"""The lane's scheduler against a model that is a pure function of the tokens it is given."""

import random
from collections.abc import Sequence

import pytest
from kimi_worker.protocol.engine import Sampling
from kimi_worker.scheduler.lane import LaneScheduler, RequestRefusedError, Share, plan_of
from kimi_worker.scheduler.requests import Goal, Phase, Request
from kimi_worker.settings import LimitSettings

EOS = 0
VOCABULARY = 23


def next_token(prefix: Sequence[int]) -> int:
    """A stand-in for the model: any change of any earlier token changes what follows."""
    value = 7
    for position, token in enumerate(prefix):
        value = (value * 31 + token * 17 + position) % 1_000_003
    return value % VOCABULARY


def generate(prompt: Sequence[int], sampling: Sampling, max_model_len: int) -> tuple[list[int], str]:
    """The answer that a single request would get with the whole machine to itself."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens))
        if tokens[-1] in sampling.stop_token_ids or (tokens[-1] == EOS and not sampling.ignore_eos):
            return tokens[len(prompt) :], "stop"
        if len(tokens) - len(prompt) >= sampling.max_tokens or len(tokens) >= max_model_len:
            return tokens[len(prompt) :], "length"


class Cache:
    """What the ranks' memory would hold: each page's tokens and each slot's whole prefix."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._pages: dict[tuple[int, int], int] = {}
        self._slots: dict[int, list[int]] = {}

    def execute(self, shares: Sequence[Share]) -> list[int]:
        """Run the plan the way a rank does and return the sampled tokens."""
        sampled = []
        for sequence in plan_of(0, shares, self._page_size).sequences:
            if sequence.num_cached == 0:
                self._slots[sequence.slot] = []
            self.write(sequence.page_ids, sequence.slot, sequence.num_cached, sequence.token_ids)
            end = sequence.num_cached + len(sequence.token_ids)
            assert len(sequence.page_ids) == -(-end // self._page_size)
            read = [self._pages[sequence.page_ids[at // self._page_size], at % self._page_size] for at in range(end)]
            assert read == self._slots[sequence.slot], "pages and state do not belong to one sequence"
            if sequence.sample:
                sampled.append(next_token(read))
        return sampled

    def write(self, page_ids: Sequence[int], slot: int, start: int, token_ids: Sequence[int]) -> None:
        assert len(self._slots[slot]) == start, "the slot's state is not of this prefix"
        self._slots[slot].extend(token_ids)
        for at, token in enumerate(token_ids, start):
            self._pages[page_ids[at // self._page_size], at % self._page_size] = token

    def fill(self, request: Request) -> None:
        """What a prefill lane does from outside."""
        assert request.memory is not None
        self._slots[request.memory.slot.index] = []
        self.write(request.memory.pages, request.memory.slot.index, 0, request.token_ids)


def limits(**changes: int) -> LimitSettings:
    values = {
        "max_num_seqs": 4,
        "max_queued": 6,
        "max_num_batched_tokens": 16,
        "num_pages": 16,
        "page_size_tokens": 4,
        "num_state_slots": 6,
    }
    return LimitSettings(**(values | changes))


def scheduler(**changes: int) -> LaneScheduler:
    return LaneScheduler(limits(**changes), max_model_len=48, vocab_size=VOCABULARY, eos_token_ids=frozenset({EOS}))


def request(name: str, num_tokens: int, max_tokens: int = 8, **fields: object) -> Request:
    tokens = [1 + (7 * at + len(name)) % (VOCABULARY - 1) for at in range(num_tokens)]
    goal = fields.pop("goal", Goal.GENERATE)
    assert isinstance(goal, Goal)
    return Request(name, tokens, Sampling(max_tokens=max_tokens, ignore_eos=True, **fields), goal)  # type: ignore[arg-type]


def run_to_end(lane: LaneScheduler, cache: Cache) -> dict[str, str]:
    """Step until nothing runs; the reasons by request."""
    reasons = {}
    while lane.has_work:
        shares = lane.schedule()
        for progress in lane.complete(shares, cache.execute(shares)):
            if progress.finish_reason is not None:
                reasons[progress.request.request_id] = progress.finish_reason
        lane.check()
    return reasons


def test_prompt_is_computed_in_chunks_behind_decodes() -> None:
    lane, cache = scheduler(), Cache(4)
    lane.submit(request("decode", 3))
    shares = lane.schedule()
    lane.complete(shares, cache.execute(shares))
    lane.submit(request("prompt", 40))
    chunks = []
    while (waiting := lane.get("prompt")) is not None and waiting.num_generated == 0:
        shares = lane.schedule()
        assert [share.request.request_id for share in shares] == ["decode", "prompt"]
        assert sum(share.num_tokens for share in shares) <= 16
        chunks.append(shares[1].num_tokens)
        lane.complete(shares, cache.execute(shares))
    assert chunks == [15, 15, 10]


def test_no_more_than_max_num_seqs_run_and_the_queue_is_first_in_first_out() -> None:
    lane, cache = scheduler(num_pages=64, num_state_slots=9), Cache(4)
    names = [f"r{i}" for i in range(6)]
    for name in names:
        lane.submit(request(name, 2))
    shares = lane.schedule()
    assert [share.request.request_id for share in shares] == names[:4]
    assert (lane.num_running, lane.num_waiting) == (4, 2)
    lane.complete(shares, cache.execute(shares))
    lane.cancel("r1")
    assert {share.request.request_id for share in lane.schedule()} == {"r0", "r2", "r3", "r4"}


def test_large_request_at_the_head_is_waited_for_and_not_overtaken() -> None:
    """First in, first out: what does not fit holds back what would, so that nothing large starves."""
    lane, cache = scheduler(num_pages=4), Cache(4)
    for name, num_tokens in (("holds", 8), ("large", 12), ("small", 3)):
        lane.submit(request(name, num_tokens, max_tokens=1))
    steps = []
    while lane.has_work:
        shares = lane.schedule()
        steps.append([share.request.request_id for share in shares])
        lane.complete(shares, cache.execute(shares))
    assert steps == [["holds"], ["large", "small"]]


def test_full_queue_and_impossible_prompts_are_refused_and_leave_nothing() -> None:
    lane = scheduler(max_queued=1)
    lane.submit(request("first", 4))
    with pytest.raises(RequestRefusedError, match="1 requests wait") as full:
        lane.submit(request("second", 4))
    assert full.value.code == "queue_full"
    lane.cancel("first")
    with pytest.raises(RequestRefusedError, match="48 tokens; at most 47") as long:
        lane.submit(request("long", 48))
    assert long.value.code == "prompt_too_long"
    with pytest.raises(RequestRefusedError, match="no tokens"):
        lane.submit(request("empty", 0))
    with pytest.raises(RequestRefusedError, match="token id 23 is not below the 23"):
        lane.submit(Request("strange", [1, VOCABULARY, 2], Sampling(max_tokens=1)))
    assert lane.num_requests == 0
    lane.check()


def test_id_in_use_is_refused() -> None:
    lane = scheduler()
    lane.submit(request("same", 4))
    with pytest.raises(RequestRefusedError, match="already in use"):
        lane.submit(request("same", 4))


def test_ends_by_eos_stop_token_max_tokens_and_model_length() -> None:
    lane, cache = scheduler(num_pages=64), Cache(4)
    prompt = request("probe", 5).token_ids
    follow, _ = generate(prompt, Sampling(max_tokens=43, ignore_eos=True), 48)
    stop = follow[3]
    lane.submit(Request("stop", list(prompt), Sampling(max_tokens=40, ignore_eos=True, stop_token_ids=(stop,))))
    lane.submit(Request("max", list(prompt), Sampling(max_tokens=2, ignore_eos=True)))
    lane.submit(Request("length", list(prompt), Sampling(max_tokens=1000, ignore_eos=True)))
    requests = {name: lane.get(name) for name in ("stop", "max", "length")}
    assert run_to_end(lane, cache) == {"stop": "stop", "max": "length", "length": "length"}
    assert {name: done.token_ids[5:] for name, done in requests.items() if done} == {
        "stop": follow[: follow.index(stop) + 1],
        "max": follow[:2],
        "length": follow[:43],
    }


def test_eos_ends_unless_ignored() -> None:
    seed = next(at for at in range(1000) if EOS in generate([at, 3], Sampling(max_tokens=9), 48)[0])
    sampling = Sampling(max_tokens=9)
    lane, cache = scheduler(), Cache(4)
    lane.submit(Request("a", [seed, 3], sampling))
    done = lane.get("a")
    assert run_to_end(lane, cache) == {"a": "stop"}
    assert done is not None
    assert done.token_ids[2:] == generate([seed, 3], sampling, 48)[0]


def test_youngest_gives_way_when_pages_run_out() -> None:
    lane, cache = scheduler(num_pages=5), Cache(4)
    old, young = request("old", 8, max_tokens=12), request("young", 8, max_tokens=8)
    lane.submit(old)
    lane.submit(young)
    expected = {r.request_id: generate(r.token_ids, r.sampling, 48)[0] for r in (old, young)}
    assert run_to_end(lane, cache) == {"old": "length", "young": "length"}
    assert lane.num_preemptions > 0
    assert {r.request_id: r.token_ids[8:] for r in (old, young)} == expected


def test_prefilled_memory_is_held_until_released() -> None:
    lane, cache = scheduler(), Cache(4)
    lane.submit(request("p", 20, goal=Goal.PREFILL))
    held = lane.get("p")
    assert held is not None
    assert run_to_end(lane, cache) == {}
    assert held.phase is Phase.PREFILLED
    assert held.token_ids[20:] == [next_token(held.token_ids[:20])]
    assert (lane.num_running, lane.num_owning, lane.memory.pages.num_free) == (0, 1, 11)
    lane.release(held)
    assert (lane.num_requests, lane.memory.pages.num_free, lane.memory.slots.num_free) == (0, 16, 6)


def test_cancelled_prefilled_request_keeps_its_memory_until_released() -> None:
    lane, cache = scheduler(), Cache(4)
    lane.submit(request("p", 20, goal=Goal.PREFILL))
    held = lane.get("p")
    run_to_end(lane, cache)
    assert lane.cancel("p") is held
    assert held is not None
    assert lane.memory.pages.num_free == 11
    lane.release(held)
    lane.memory.check()
    assert lane.memory.pages.num_free == 16


def test_handoff_is_reserved_filled_and_activated() -> None:
    lane, cache = scheduler(), Cache(4)
    lane.submit(request("d", 10, max_tokens=5, goal=Goal.GENERATE_FROM_HANDOFF))
    assert not lane.has_work
    [reserved] = lane.reserve_handoffs()
    assert reserved.phase is Phase.RESERVED
    assert lane.schedule() == []
    cache.fill(reserved)
    first = next_token(reserved.token_ids)
    assert lane.activate(reserved, first).finish_reason is None
    assert run_to_end(lane, cache) == {"d": "length"}
    assert reserved.token_ids[10:] == generate(reserved.token_ids[:10], reserved.sampling, 48)[0]
    assert lane.memory.slots.num_free == 6


def test_handoff_may_end_with_its_first_token() -> None:
    lane = scheduler()
    lane.submit(request("d", 10, max_tokens=1, goal=Goal.GENERATE_FROM_HANDOFF))
    [reserved] = lane.reserve_handoffs()
    assert lane.activate(reserved, 5).finish_reason == "length"
    assert lane.num_requests == 0
    assert lane.memory.pages.num_free == 16
    lane.check()


def test_cancelled_reservation_is_quarantined() -> None:
    lane = scheduler()
    lane.submit(request("d", 10, goal=Goal.GENERATE_FROM_HANDOFF))
    [reserved] = lane.reserve_handoffs()
    assert lane.cancel("d") is reserved
    assert lane.num_requests == 0
    assert (lane.memory.num_quarantined, lane.memory.pages.num_free) == (1, 13)
    lane.release(reserved)
    assert (lane.memory.num_quarantined, lane.memory.pages.num_free) == (0, 16)
    assert lane.cancel("d") is None


def test_request_without_a_token_ends_and_frees_its_memory() -> None:
    lane, cache = scheduler(), Cache(4)
    lane.submit(request("bad", 5))
    lane.submit(request("good", 5))
    shares = lane.schedule()
    [bad, good] = lane.complete(shares, [None, *cache.execute(shares)[1:]])
    assert (bad.token_id, bad.request.phase) == (None, Phase.DONE)
    assert good.request.phase is Phase.RUNNING
    assert lane.num_requests == 1
    lane.check()


class Walk:
    """Random arrivals of all kinds, cancels at any moment, few pages."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.max_num_seqs = rng.randint(1, 4)
        self.lane = scheduler(
            max_num_seqs=self.max_num_seqs,
            num_pages=rng.randint(12, 20),
            num_state_slots=self.max_num_seqs + rng.randint(0, 2),
            max_num_batched_tokens=rng.randint(self.max_num_seqs, 24),
        )
        self.cache = Cache(4)
        self.prompts: dict[Request, list[int]] = {}
        self.ended: dict[Request, str] = {}
        self.reserved: list[Request] = []
        self.quarantined: list[Request] = []
        self.held: list[Request] = []

    def submit(self) -> None:
        rng = self.rng
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 30))]
        sampling = Sampling(max_tokens=rng.randint(1, 20), ignore_eos=rng.random() < 0.5)
        new = Request(f"r{len(self.prompts)}", list(prompt), sampling, rng.choice(list(Goal)))
        if self.lane.num_waiting < 6:
            self.lane.submit(new)
            self.prompts[new] = prompt
        else:
            with pytest.raises(RequestRefusedError, match="try again later"):
                self.lane.submit(new)

    def step(self) -> None:
        self.reserved.extend(self.lane.reserve_handoffs())
        shares = self.lane.schedule()
        assert self.lane.num_running <= self.max_num_seqs
        for progress in self.lane.complete(shares, self.cache.execute(shares)):
            if progress.request.phase is Phase.PREFILLED:
                self.held.append(progress.request)
            self.end(progress.request, progress.finish_reason)

    def end(self, request: Request, reason: str | None) -> None:
        if reason is not None:
            assert request not in self.ended, f"{request.request_id} ends twice"
            self.ended[request] = reason

    def cancel(self) -> None:
        victim = self.rng.choice(list(self.prompts))
        cancelled = self.lane.cancel(victim.request_id)
        assert (cancelled is None) is (victim in self.ended)
        if cancelled is not None:
            self.ended[victim] = "cancelled"
        if victim in self.reserved:
            self.reserved.remove(victim)
            self.quarantined.append(victim)

    def activate(self) -> None:
        done = self.reserved.pop(self.rng.randrange(len(self.reserved)))
        self.cache.fill(done)
        self.end(done, self.lane.activate(done, next_token(done.token_ids)).finish_reason)

    def hand_over(self) -> None:
        done = self.held.pop(self.rng.randrange(len(self.held)))
        self.lane.release(done)
        self.ended.setdefault(done, "handed_over")

    def act(self) -> None:
        match self.rng.randrange(8):
            case 0 | 1:
                self.submit()
            case 2 if self.prompts:
                self.cancel()
            case 3 if self.reserved:
                self.activate()
            case 4 if self.quarantined:
                self.lane.release(self.quarantined.pop())
            case 5 if self.held:
                self.hand_over()
            case _:
                self.step()
        self.lane.check()

    def finish(self) -> None:
        """Let everything that is under way come to its end."""
        while self.lane.num_requests or self.quarantined:
            self.step()
            while self.reserved:
                self.activate()
            while self.held:
                self.hand_over()
            while self.quarantined:
                self.lane.release(self.quarantined.pop())
            self.lane.check()


@pytest.mark.parametrize("seed", range(60))
def test_random_walk_answers_every_request_and_leaks_nothing(seed: int) -> None:
    walk = Walk(random.Random(seed))
    for _ in range(400):
        walk.act()
    walk.finish()

    memory = walk.lane.memory
    assert (memory.pages.num_free, memory.slots.num_free) == (memory.pages.num_pages, memory.slots.num_slots)
    assert walk.ended.keys() == walk.prompts.keys()
    for request, prompt in walk.prompts.items():
        answer, reason = generate(prompt, request.sampling, 48)
        got = request.token_ids[len(prompt) :]
        match walk.ended[request]:
            case "cancelled":
                assert got == answer[: len(got)]
            case "handed_over":
                assert got == answer[:1]
            case ended:
                assert (got, ended) == (answer, reason)


def test_the_walks_preempt() -> None:
    """The random walks above would prove little if memory were never short."""
    walks = [Walk(random.Random(seed)) for seed in range(20)]
    for walk in walks:
        for _ in range(400):
            walk.act()
    assert sum(walk.lane.num_preemptions for walk in walks) > 50
