"""Lanes of prefill in a replay: queues of prompts whose groups compute a chunk a lane in each step, as the worker does.

A prompt goes to the lane with the fewest tokens to compute when it is asked, and stays there. A lane computes in order
and fills what a prompt leaves of a chunk with the next one's tokens. All lanes of a group step together, each as long
as the slowest: experts lie on all ranks. What comes during a step waits for its end. All is pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from kimi_operator.planner.served import Served
from kimi_operator.planner.service import Service
from kimi_operator.planner.units import ceil_div


@dataclass(slots=True)
class PrefillLane:
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

    def finish(self) -> list[Served]:
        """The chunk is computed; returns the prompts that are whole with it."""
        whole = []
        self.to_compute -= self.share
        self.done += self.share
        while self.prompts and self.done >= self.prompts[0].computed_tokens:
            self.done -= self.prompts[0].computed_tokens
            whole.append(self.prompts.popleft())
        self.sent -= len(whole)
        self.share = self.begun = 0
        return whole


@dataclass(slots=True)
class PrefillGroup:
    """Lanes that step together."""

    lanes: Sequence[PrefillLane]
    busy_lanes: int = 0
    """Lanes that the step under way computes something on; 0 between two steps."""
    lockstep_s: float = 0.0
    """Time that such lanes have been done before the slowest, summed over steps and lanes."""

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return any(lane.prompts for lane in self.lanes)

    def begin(self, service: Service, now_s: float) -> float:
        """Begin a step; returns how long it takes."""
        shares = [lane.begin(service, now_s) for lane in self.lanes if lane.prompts]
        # the experts' work is that of all tokens: of as many lanes as would have them in shares of this one's size
        total = sum(share for share, _ in shares)
        each_s = [service.prefill_step_s(share, before, ceil_div(total, share)) for share, before in shares]
        self.busy_lanes, slowest_s = len(shares), max(each_s)
        self.lockstep_s += len(shares) * slowest_s - sum(each_s)
        return slowest_s

    def finish(self) -> list[Served]:
        """The step is over; returns the prompts that are whole with it."""
        self.busy_lanes = 0
        return [turn for lane in self.lanes if lane.share for turn in lane.finish()]


def least_loaded(lanes: Sequence[PrefillLane]) -> int:
    """Where the router sends a prompt. It forgets at a lane's report what waits elsewhere for memory; not so here."""
    return min(range(len(lanes)), key=lambda i: (lanes[i].to_compute, lanes[i].sent))
