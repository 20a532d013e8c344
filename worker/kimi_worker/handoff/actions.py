"""What the two sides of a handoff ask their lane leader to do, and what they know of themselves."""

from dataclasses import dataclass
from typing import TypeAlias

from kimi_worker.handoff.plan import Layout
from kimi_worker.protocol.engine import SampledToken, Sampling
from kimi_worker.protocol.handoff import LaneMessage, RankCommand, TransferKey


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. The defaults suit a data centre; tests pass their own."""

    reservation_timeout_s: float = 120.0
    """From reservation to Ready; afterwards the request fails and the reservation is quarantined."""
    resend_s: float = 0.5
    """First repetition of an unanswered message; each further one waits twice as long, up to resend_max_s."""
    resend_max_s: float = 8.0
    """Also between Queries for a transfer that prefill has accepted."""
    hello_s: float = 2.0
    """Between Hellos to a peer with open transfers; up to twice as long while it does not answer."""
    silence_s: float = 15.0
    """A peer with open transfers that says nothing for so long is lost, unless `see` says that it is only busy."""
    revoke_wait_s: float = 30.0
    """So long a Revoke waits for healthy transfers to end."""
    write_timeout_s: float = 120.0
    """From posting a transfer's writes to the last completion. Longer than any step: ranks take part between steps."""
    forget_s: float = 6 * 3600.0
    """How long a peer without open transfers is remembered."""


@dataclass(frozen=True, slots=True)
class LaneIdentity:
    """What a lane says of itself in Hello. `epoch` is random per process start (below 2**62)."""

    engine: str
    epoch: int
    layout_hash: str
    layout: Layout
    num_ranks: int
    ranks: tuple[bytes, ...] = ()
    """Transport descriptors in TP rank order; empty on a prefill lane."""
    transport: str = "nixl"
    """Name of the transport, for messages."""


@dataclass(frozen=True, slots=True)
class HandoffRequest:
    """A request whose pages and slot decode has reserved."""

    request_id: str
    prefill: str
    """Endpoint of the prefill lane, tcp://ip:port."""
    token_ids: list[int]
    sampling: Sampling
    page_ids: list[int]
    slot: int


# For either side


@dataclass(frozen=True, slots=True)
class Send:
    """Send a control message; losing it is harmless."""

    peer: str
    message: LaneMessage


@dataclass(frozen=True, slots=True)
class ToRanks:
    """Give the command to every rank of the lane, in order with those before it."""

    command: RankCommand


# Decode side, for the scheduler


@dataclass(frozen=True, slots=True)
class Activate:
    """Every byte of the prompt is in the reservation, which is the scheduler's from now on."""

    request_id: str
    first: SampledToken
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell the client. The reservation stays held until FreeReservation.

    `code` is one of protocol.engine.Failed's.
    """

    request_id: str
    code: str
    message: str
    retryable: bool


@dataclass(frozen=True, slots=True)
class FreeReservation:
    """The pages and the slot may be reused. Once for each begun request that was not activated."""

    request_id: str


# Prefill side, for the scheduler


@dataclass(frozen=True, slots=True)
class Enqueue:
    """Compute the prompt and its first token. Answer with `computed` or `fail`, unless CancelCompute comes first."""

    key: TransferKey
    token_ids: list[int]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class CancelCompute:
    """Nobody wants the prompt any more; the scheduler frees what it holds for it."""

    key: TransferKey


@dataclass(frozen=True, slots=True)
class FreeSource:
    """No write reads these pages and this slot any more. Once for each `computed`."""

    key: TransferKey


Action: TypeAlias = Send | ToRanks | Activate | Fail | FreeReservation | Enqueue | CancelCompute | FreeSource
