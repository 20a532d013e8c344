"""Messages between a pod's API process and its lane leaders.

Each lane leader binds a ROUTER at `api_socket`; a client connects a DEALER and sends `Watch` first. A message is one
frame, a MessagePack of `ToEngine` or `FromEngine`. Answers go to the client that submitted, LaneState to all watchers.
"""

from pathlib import Path
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

MAX_LOGPROBS = 20


def api_socket(run_dir: Path, lane: int) -> str:
    """ZeroMQ address of a lane of this pod; `lane` counts from 0 within the pod."""
    return f"ipc://{run_dir}/lane-{lane}.sock"


class Sampling(Struct, frozen=True):
    """How to choose tokens and when to stop. Temperature 0 is greedy; `seed` makes sampling repeatable."""

    max_tokens: Annotated[int, Meta(ge=1)]
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    seed: int | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """None: no log-probabilities; n: the chosen token's and the n most likely ones'."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class Watch(Struct, frozen=True, tag="watch"):
    """A client's first message: answered at once by a LaneState, followed by one at every change."""


class Submit(Struct, frozen=True, tag="submit"):
    """A new request for this lane.

    `prefill` names the handoff endpoint of the prefill lane; None: this lane computes the prompt itself.
    """

    request_id: str
    token_ids: list[int]
    sampling: Sampling
    prefill: str | None = None


class Cancel(Struct, frozen=True, tag="cancel"):
    """The client has gone, or a stop string was seen. No answer follows."""

    request_id: str


class Drain(Struct, frozen=True, tag="drain"):
    """Accept nothing new; finish what runs."""


class Verify(Struct, frozen=True, tag="verify"):
    """The handoff endpoints of all prefill lanes that there are: check that each can write into this lane."""

    endpoints: list[str]


class TokenLogprob(Struct, frozen=True, array_like=True):
    token_id: int
    logprob: float
    """Natural logarithm, of the distribution before temperature and top-p."""


class SampledToken(Struct, frozen=True, array_like=True):
    token_id: Annotated[int, Meta(ge=0, lt=2**31)]
    logprob: float | None = None
    top: list[TokenLogprob] = []


class Admitted(Struct, frozen=True, tag="admitted"):
    """The lane has taken the request; Output or Failed follow."""

    request_id: str


class Output(Struct, frozen=True, tag="output"):
    """New tokens of a request. Each has the handoff's figures, the last one a `finish_reason` (stop, length).

    An end-of-sequence or stop token is the last of `tokens`; whoever makes text leaves it out.
    """

    request_id: str
    tokens: list[SampledToken]
    finish_reason: str | None = None
    handoff_bytes: int = 0
    handoff_s: float = 0.0
    """From prefill's first write to its last completion or fence, in seconds."""
    reserved_s: float = 0.0
    """From the reservation of memory to activation, in seconds."""


class Failed(Struct, frozen=True, tag="failed"):
    """The request ends without (more) tokens.

    `code` is one of queue_full, prefill_full, prompt_too_long, draining, handoff_failed, prefill_unreachable,
    layout_mismatch, engine_error.
    `retryable`: another pod may answer it.
    """

    request_id: str
    code: str
    message: str
    retryable: bool
    retry_after_s: float = 1.0


class LaneState(Struct, frozen=True, tag="lane"):
    """A lane's books, sent when they change and at least once a second while it is busy."""

    lane: int
    """Index of the lane within its pod."""
    handoff: str
    """Endpoint of the lane's handoff socket, tcp://ip:port."""
    ready: bool
    running: int
    waiting: int
    reserved: int
    queued_tokens: int
    num_pages: int
    free_pages: int
    num_slots: int
    free_slots: int
    max_num_seqs: int
    transfers: int = 0
    """Handoffs in flight on either side."""
    quarantined: int = 0
    layout_hash: str = ""
    weights_bytes: int = 0
    pages_bytes: int = 0
    slots_bytes: int = 0
    free_bytes: int = 0
    """Device memory left once the largest steps have run, in bytes; 0 where the device cannot tell."""
    steps: int = 0
    step_s: float = 0.0
    """Duration of the last step, in seconds."""
    preemptions: int = 0
    """Requests whose memory was taken away, to be computed anew, since the start."""
    draining: bool = False
    """Nothing new is accepted; the whole group drains together."""
    drained: bool = False
    """No lane of the group has anything left to do: its pods may end."""
    fabric_peers: int = 0
    """Prefill lanes that this decode lane knows of."""
    fabric_verified: int = 0
    """Those of them whose test write has arrived."""
    fabric_error: str = ""
    """Of one of the others: who, over what, why, and what to check."""
    assembled: bool = False
    """All lanes of the group have met: from then on it serves, and drains as a whole."""


ToEngine: TypeAlias = Watch | Submit | Cancel | Drain | Verify
FromEngine: TypeAlias = Admitted | Output | Failed | LaneState
