"""A request of a lane: its tokens, how many of them are computed, and who holds its memory."""

import enum
from dataclasses import dataclass, field

from kimi_worker.protocol.engine import Sampling
from kimi_worker.scheduler.memory import Reservation


class Goal(enum.Enum):
    """What a lane does for a request."""

    GENERATE = "generate"
    """Compute the prompt and generate."""
    GENERATE_FROM_HANDOFF = "generate_from_handoff"
    """Generate; a prefill lane computes the prompt and writes it into this lane's memory."""
    PREFILL = "prefill"
    """Compute the prompt and one token, then hold the memory for the handoff."""


class Phase(enum.Enum):
    WAITING = "waiting"
    """In the queue; owns nothing."""
    RESERVED = "reserved"
    """Owns memory that a prefill lane fills."""
    READY = "ready"
    """Filled by a prefill lane; waits for room among the running."""
    RUNNING = "running"
    """Takes part in steps."""
    PREFILLED = "prefilled"
    """The prompt is computed; owns its memory until the handoff is over."""
    DONE = "done"
    """Takes no part any more."""


@dataclass(slots=True, eq=False)
class Request:
    """`token_ids` are the prompt's and then the generated ones; the cache holds the first `num_computed` of them."""

    request_id: str
    token_ids: list[int]
    sampling: Sampling
    goal: Goal = Goal.GENERATE
    seed: int = 0
    """Names, with the position of a token, the random number that the token is drawn by."""
    phase: Phase = Phase.WAITING
    num_computed: int = 0
    memory: Reservation | None = None
    num_prompt_tokens: int = field(init=False)
    arrival: int = 0
    """Order of submission in the lane; the highest is the youngest."""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_missing(self) -> int:
        """Tokens that must be computed before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed

    def finish_reason(self, max_model_len: int, eos_token_ids: frozenset[int]) -> str | None:
        """Why the request ends after its last token, or None while it goes on."""
        last = self.token_ids[-1]
        if last in self.sampling.stop_token_ids or (last in eos_token_ids and not self.sampling.ignore_eos):
            return "stop"
        if self.num_generated >= self.sampling.max_tokens or len(self.token_ids) >= max_model_len:
            return "length"
        return None
