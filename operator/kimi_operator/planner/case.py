"""What the solver is asked, and what it answers: one role of one layout under one workload."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from msgspec import Struct

from kimi_operator.api.deployment import Role
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.planner.budget import Budget
from kimi_operator.planner.predict import Prediction
from kimi_operator.planner.units import binding, counted
from kimi_operator.planner.workload import Lengths, Workload


class Limit(StrEnum):
    """What keeps a number from being larger."""

    LANES = "lanes"
    """Each lane runs the most that it may; only more lanes run more."""
    GRAPHS = "graph captures"
    SLOTS = "slots"
    """Memory, and more of it goes to the state of one more request than to its tokens."""
    PAGES = "pages"
    """Memory, and more of it goes to the tokens of one more request than to its state."""
    TPOT = "target TPOT"
    TTFT = "target TTFT"
    WORKLOAD = "workload"
    """No more is asked for."""
    MEMORY = "memory"
    SETTING = "stated pool"
    MODEL = "model"

    @property
    def is_memory(self) -> bool:
        """Whether it says how many requests memory holds at once."""
        return self in (Limit.GRAPHS, Limit.SLOTS, Limit.PAGES)


class Timing(Struct, frozen=True):
    """Predicted times of the layout at hand."""

    decode_step_s: Callable[[int, int], float]
    """(running requests a lane, tokens that each holds) -> seconds; falls in neither."""
    prefill_s: Callable[[int, int], float]
    """(prompt tokens to compute, tokens reused before them) -> seconds on a lane beside the busy ones."""
    decode_band_s: Callable[[int, int], tuple[float, float]] | None = None
    """The least and the most that such a step may take; None where nobody says how sure its time is."""
    prefill_band_s: Callable[[int, int], tuple[float, float]] | None = None
    arriving_ttft: Callable[[], Prediction | None] = lambda: None
    """-> mean time to the first token of prompts that come at the workload's rate, with their waits; None without."""
    is_prefill_known: bool = True
    """Whether prompts have times at all: they need FLOPs, which steps of decode do not."""
    reservation_s: float | None = None
    """How long decode keeps room for a prompt; None where that is not judged."""

    def of(self, role: Role) -> Timing | None:
        """The same for a role; None where nothing predicts its times."""
        return self if self.is_prefill_known or role is Role.DECODE else None


class Case(Struct, frozen=True):
    """One role of one layout under one workload."""

    workload: Workload
    role: Role
    lanes: int
    """Lanes of all groups of the role."""
    budget: Budget
    most_seqs: int
    """Most running requests of a lane, whatever fits: the profile's limit, or a setting to be judged."""
    max_positions: int
    """Longest sequence of the model."""
    timing: Timing | None = None
    longest: int = 1
    """Tokens of a request that must fit whatever the workload's are, such as maxModelLen."""
    is_set: bool = False
    """A lane runs as many as come up to `most_seqs`, however long that takes: targets are judged and choose nothing."""

    def __post_init__(self) -> None:
        """Raises InvalidSpec for counts below 1."""
        counts = {"lanes": self.lanes, "maxNumSeqs": self.most_seqs, "maxPositions": self.max_positions}
        problems = [
            Problem(f"spec.{self.role}.{name}", str(n), "at least 1", "raise it") for name, n in counts.items() if n < 1
        ]
        if problems:
            raise InvalidSpec(tuple(problems))

    @property
    def requests(self) -> Lengths:
        """Tokens that a request holds on this role."""
        return self._served.tokens(self.role)

    @property
    def held(self) -> int:
        """Tokens that running requests hold on average on decode; prefill keeps a prompt no longer than its time."""
        return min(self.workload.mean_context, self.max_positions) if self.role is Role.DECODE else 0

    @property
    def longest_request(self) -> int:
        """Tokens that one request must find room for. Both roles have one limit: a prompt and its whole answer."""
        return max(self.longest, self._served.decode_tokens.longest)

    @property
    def _served(self) -> Workload:
        return self.workload.within(self.max_positions)


class Bound(Struct, frozen=True):
    """What one limit alone would allow."""

    limit: Limit
    max_num_seqs: int
    how: str


class Solution(Struct, frozen=True):
    """Settings of a lane, and why they are not larger."""

    max_num_seqs: int
    running: int
    """Requests that all lanes run at once."""
    num_units: int
    """Pages or blocks of the pool."""
    num_slots: int | None
    """State slots of a lane; None where state lies in the blocks."""
    held: int
    """Requests of mean length that a lane's pages or blocks hold at once: those in prefill too."""
    pool_bytes: int
    max_model_len: int
    """Longest request that the pool and the model hold."""
    binds: Limit
    """What binds max_num_seqs at this workload."""
    pool_binds: Limit
    length_binds: Limit
    bounds: tuple[Bound, ...]
    misses: tuple[Problem, ...]
    """Targets and demands of the workload that these settings do not meet."""
    doubts: tuple[Problem, ...] = ()
    """Targets that they meet by less than the prediction's band."""


class Stretch(Struct, frozen=True):
    """Contexts, all requests being that long, over which one thing binds."""

    first_tokens: int
    last_tokens: int
    binds: Limit
    seqs_at_first: int
    """Requests of a lane; 0 where not even one meets the target TPOT."""
    seqs_at_last: int

    def __str__(self) -> str:
        seqs = f"{self.seqs_at_first:,}"
        if self.seqs_at_last != self.seqs_at_first:
            seqs += f" down to {self.seqs_at_last:,}"
        return f"{binding(self.binds)} {self._contexts} a request: {seqs} a lane"

    @property
    def _contexts(self) -> str:
        if self.first_tokens == self.last_tokens:
            return f"at {counted(self.first_tokens, 'token')}"
        return f"from {self.first_tokens:,} to {counted(self.last_tokens, 'token')}"
