"""Lanes of prefill in a replay: queues of prompts whose groups compute a chunk a lane in each step, as the worker does.

A prompt goes to the lane with the fewest tokens to compute when it is asked, and stays there. A lane computes in order
and fills what a prompt leaves of a chunk with the next one's tokens. All lanes of a group step together, each as long
as the slowest: experts lie on all ranks. What comes during a step waits for its end. All is pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

from msgspec import Struct, field

from kimi_operator.planner.served import Served
from kimi_operator.planner.service import Service
from kimi_operator.planner.units import ceil_div


class PrefillLane(Struct):
    """Prompts in order; only the first one can be computed in part."""

    prompts: deque[Served] = field(default_factory=deque)
    """They hold decode's memory."""
    sent: int = 0
    """Prompts that were sent here and are not computed, those included that wait for memory."""
    to_compute: int = 0
    """Their tokens."""
    done: int = 0
    """Tokens computed of the first prompt, when the last step ended."""
    share: int = 0
    """Tokens that the step under way computes."""
    begun: int = 0
    """Prompts that they are of."""

    @property
    def num_waiting(self) -> int:
        """Prompts that wait for another one; who is first waits for the end of a step at most."""
        return max(0, len(self.prompts) - (self.begun or 1))

    def send(self, tokens: int) -> None:
        """A prompt with so many tokens to compute will come here."""
        self.sent, self.to_compute = self.sent + 1, self.to_compute + tokens

    def begin(self, service: Service, now_s: float) -> tuple[int, float]:
        """Take the next chunk of the prompts that are here: how many tokens, and the mean number of those before."""
        left, done, before = service.chunk_tokens, self.done, 0
        self.begun = 0
        for turn in islice(self.prompts, service.prefill_running):
            if not left:
                break
            if not done:
                turn.prefill_s = now_s
            taken = min(turn.computed_tokens - done, left)
            before += taken * (turn.prompt_tokens - turn.computed_tokens + done)
            left, done, self.begun = left - taken, 0, self.begun + 1
        self.share = service.chunk_tokens - left
        return self.share, before / self.share

    def compute(self, tokens: int) -> None:
        """So many tokens are computed, from the first prompt on."""
        self.done, self.to_compute = self.done + tokens, self.to_compute - tokens

    def whole_chunks(self, chunk_tokens: int) -> int:
        """Steps, the one under way included, that compute a chunk of the first prompt and of no other one."""
        return (self.prompts[0].computed_tokens - self.done) // chunk_tokens

    def finish(self) -> list[Served]:
        """The chunk is computed; returns the prompts that are whole with it."""
        whole = []
        self.compute(self.share)
        while self.prompts and self.done >= self.prompts[0].computed_tokens:
            self.done -= self.prompts[0].computed_tokens
            whole.append(self.prompts.popleft())
        self.sent -= len(whole)
        self.share = self.begun = 0
        return whole


class PrefillGroup(Struct):
    """Lanes that step together."""

    lanes: Sequence[PrefillLane]
    busy_lanes: int = 0
    """Lanes that the step under way computes something on; 0 between two steps."""
    lockstep_s: float = 0.0
    """Time that such lanes have been done before the slowest, summed over steps and lanes."""
    alike: int = 0
    """Steps after the one under way in which each of its lanes computes a whole chunk of the same prompt again."""
    unsettled: int = 0
    """Such steps that have ended and that the lanes' sums do not have yet."""
    before: list[float] = field(default_factory=list)
    """Mean number of tokens before those that the step computes, for each of its lanes."""
    idle: list[PrefillLane] = field(default_factory=list)
    """The other lanes."""

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return any(lane.prompts for lane in self.lanes)

    @property
    def goes_on(self) -> bool:
        """Whether the next step is as the last one, a chunk later: of a long prompt hundreds are."""
        return self.alike > 0 and not (self.idle and any(lane.prompts for lane in self.idle))

    def begin(self, service: Service, now_s: float) -> float:
        """Begin a step; returns how long it takes."""
        self.settle()
        busy = [lane for lane in self.lanes if lane.prompts]
        self.idle = [lane for lane in self.lanes if not lane.prompts]
        shares = [lane.begin(service, now_s) for lane in busy]
        self.before = [before for _, before in shares]
        self.alike = min(lane.whole_chunks(service.chunk_tokens) for lane in busy) - 1
        # the experts' work is that of all tokens: of as many lanes as would have them in shares of this one's size
        total = sum(share for share, _ in shares)
        return self._wait(service.prefill_step_s(share, before, ceil_div(total, share)) for share, before in shares)

    def go_on(self, service: Service) -> float:
        """Begin the next step where it is as the last one; returns how long it takes."""
        full, busy = service.chunk_tokens, len(self.before)
        self.alike -= 1
        self.before = [before + full for before in self.before]
        return self._wait(service.prefill_step_s(full, before, busy) for before in self.before)

    def _wait(self, times_s: Iterable[float]) -> float:
        """Every lane waits for the slowest."""
        each_s = list(times_s)
        self.busy_lanes, slowest_s = len(each_s), max(each_s)
        self.lockstep_s += len(each_s) * slowest_s - sum(each_s)
        return slowest_s

    def finish(self) -> list[Served]:
        """The step is over; returns the prompts that are whole with it."""
        self.busy_lanes = 0
        if self.alike > 0:
            self.unsettled += 1
            return []
        self.settle()
        return [turn for lane in self.lanes if lane.share for turn in lane.finish()]

    def settle(self) -> None:
        """Bring the lanes' sums up to the last step's end."""
        if self.unsettled:
            for lane in self.lanes:
                lane.compute(self.unsettled * lane.share)
            self.unsettled = 0


def least_loaded(groups: Sequence[PrefillGroup]) -> int:
    """Where the router sends a prompt. It forgets at a lane's report what waits elsewhere for memory; not so here."""
    loads = [
        (lane.to_compute, of_group, lane.sent)
        for group in groups
        for of_group in [sum(lane.to_compute for lane in group.lanes)]
        for lane in group.lanes
    ]
    return min(range(len(loads)), key=loads.__getitem__)
