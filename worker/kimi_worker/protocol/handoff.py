"""Control messages of the handoff, between a decode lane and a prefill lane."""

from typing import TypeAlias

from msgspec import Struct

from kimi_worker.protocol.engine import SampledToken, Sampling


class Hello(Struct, frozen=True, tag="hello"):
    """First message each way. `ranks` holds each TP rank's transport descriptor, in rank order."""

    engine: str
    epoch: int
    layout_hash: str
    ranks: list[bytes]


class Prefill(Struct, frozen=True, tag="prefill"):
    """Decode asks: compute these tokens, write their cache into these pages and this slot, tell me the first token.

    The reservation stands until Release, or until Abort has been answered.
    """

    transfer: str
    epoch: int
    peer_epoch: int
    token_ids: list[int]
    sampling: Sampling
    page_ids: list[int]
    slot: int
    deadline_s: float
    """Seconds from receipt after which decode gives up."""


class Refused(Struct, frozen=True, tag="refused"):
    """Prefill does not take the request: nothing was and nothing will be written."""

    transfer: str
    epoch: int
    code: str
    message: str


class Ready(Struct, frozen=True, tag="ready"):
    """Every byte of every region of every rank has arrived. Repeated until Release."""

    transfer: str
    epoch: int
    digest: str
    """Of the copies that were made; decode computes the same from its reservation."""
    first: SampledToken
    num_bytes: int
    seconds: float


class Abort(Struct, frozen=True, tag="abort"):
    """Decode no longer wants the transfer. Answered by Aborted once no write can be in flight."""

    transfer: str
    epoch: int


class Aborted(Struct, frozen=True, tag="aborted"):
    """No write of this transfer is or will be in flight: decode may reuse the pages.

    Answers Abort; also sent when prefill fails by itself.
    """

    transfer: str
    epoch: int
    code: str
    message: str


class Release(Struct, frozen=True, tag="release"):
    """Decode has activated the request (or knows nothing of it): prefill may free its side."""

    transfer: str
    epoch: int


ToPrefill: TypeAlias = Hello | Prefill | Abort | Release
ToDecode: TypeAlias = Hello | Refused | Ready | Aborted
