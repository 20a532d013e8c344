"""Messages of the handoff: between a decode lane and a prefill lane, and between a lane's leader and its ranks.

A transfer is named by decode: (decode's endpoint, decode's epoch, a number that only grows within that epoch).
"""

import re
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import Annotated, NamedTuple, TypeAlias

from msgspec import Meta, Struct

from kimi_worker.protocol.engine import SampledToken, Sampling

Index = Annotated[int, Meta(ge=0, lt=2**31)]
"""Of a page, a slot or a token. Whether there is such a one is for the receiver to know."""
_ENDPOINT = re.compile(r"tcp://(?:\[([0-9a-fA-F:.]{2,45})\]|([0-9.]{7,15})):([0-9]{1,5})", re.ASCII)


def is_endpoint(text: str) -> bool:
    """Whether the text names a place where a lane may receive: `tcp://10.0.0.1:29600` or `tcp://[fd00::1]:29600`.

    Names are none: looking one up would hold up the thread that answers the pings of all peers.
    """
    match = _ENDPOINT.fullmatch(text)
    if match is None or not 0 < int(match[3]) < 2**16:
        return False
    try:
        _ = IPv6Address(match[1]) if match[1] else IPv4Address(match[2])
    except AddressValueError:
        return False
    return True


class TransferKey(NamedTuple):
    """One transfer, as prefill names it: decode's endpoint, decode's epoch, decode's number."""

    peer: str
    epoch: int
    number: int


# Between lanes. `epoch` is the sender's; `peer_epoch` the one the sender last heard from the receiver.


class Hello(Struct, frozen=True, tag="hello"):
    """Decode introduces itself and repeats it while transfers are open; prefill answers each with its own.

    `ranks` holds each TP rank's transport descriptor, in rank order; prefill's is empty, nobody writes there.
    """

    engine: str
    epoch: int
    layout_hash: str
    ranks: list[bytes]
    peer_epoch: int = 0
    """In prefill's answer: the epoch it answers."""
    oldest: int = 0
    """Decode's lowest open number; everything below is closed and may be forgotten."""


class Prefill(Struct, frozen=True, tag="prefill"):
    """Decode asks: compute these tokens, write their cache into these pages and this slot, tell me the first token.

    Repeated until Accepted, while prefill answers Hellos. The reservation stands until Ready, Refused, or Aborted.
    """

    number: int
    epoch: int
    peer_epoch: int
    token_ids: list[Index]
    sampling: Sampling
    page_ids: list[Index]
    slot: Index
    deadline_s: Annotated[float, Meta(ge=0, le=1e6)]
    """Seconds from receipt after which decode gives up."""


class Accepted(Struct, frozen=True, tag="accepted"):
    """Prefill has the request and will answer Ready, Refused or Aborted."""

    number: int
    epoch: int
    peer_epoch: int


class Refused(Struct, frozen=True, tag="refused"):
    """Prefill does not take the request: no write of it was or will be made by this process."""

    number: int
    epoch: int
    peer_epoch: int
    code: str
    message: str


class Query(Struct, frozen=True, tag="query"):
    """Decode asks where an accepted transfer is, in case its end was lost. Answered like a repeated Prefill."""

    number: int
    epoch: int
    peer_epoch: int


class Ready(Struct, frozen=True, tag="ready"):
    """Every byte of every region of every rank has arrived. Repeated until Release."""

    number: int
    epoch: int
    peer_epoch: int
    digest: str
    """Of where the bytes went; decode computes the same from its reservation."""
    first: SampledToken
    num_bytes: int
    seconds: float
    """From the first write to the last completion or fence, on prefill's clock."""


class Abort(Struct, frozen=True, tag="abort"):
    """Decode no longer wants the transfer. Repeated until Aborted."""

    number: int
    epoch: int
    peer_epoch: int


class Aborted(Struct, frozen=True, tag="aborted"):
    """The transfer has ended without a Ready. Answers Abort; also sent when the writes fail.

    `settled`: no write of it is or will be in flight, so decode may reuse the pages. Not settled: the writes broke
    off and bytes may still be under way; decode must cut its peers off first.
    """

    number: int
    epoch: int
    peer_epoch: int
    settled: bool
    code: str
    message: str


class Release(Struct, frozen=True, tag="release"):
    """Decode has activated the request, or wants nothing more of it: prefill may free its side."""

    number: int
    epoch: int
    peer_epoch: int


class Probe(Struct, frozen=True, tag="probe"):
    """Decode asks for a test write: each rank's pattern of the nonce into its peer's scratch. Repeated until Probed."""

    number: int
    """Counts probes, not transfers."""
    epoch: int
    peer_epoch: int
    nonce: int


class Probed(Struct, frozen=True, tag="probed"):
    """Every rank's test write is complete, or `error` says why not."""

    number: int
    epoch: int
    peer_epoch: int
    error: str


ToPrefill: TypeAlias = Hello | Prefill | Query | Abort | Release | Probe
ToDecode: TypeAlias = Hello | Accepted | Refused | Ready | Aborted | Probed
LaneMessage: TypeAlias = (
    Hello | Prefill | Query | Accepted | Refused | Ready | Abort | Aborted | Release | Probe | Probed
)


# From a lane's leader to each rank of the lane (itself too), in order.


class Connect(Struct, frozen=True, tag="connect"):
    """Rank i connects to `ranks[i]` of the peer, under the name (peer, epoch)."""

    peer: str
    epoch: int
    ranks: list[bytes]


class Disconnect(Struct, frozen=True, tag="disconnect"):
    """Forget the peer; writes to it that are open end with an error. Answered by Disconnected."""

    peer: str
    epoch: int


class Write(Struct, frozen=True, tag="write"):
    """Write these local pages and this slot into the peer's. Answered by Wrote."""

    key: TransferKey
    local_pages: list[int]
    remote_pages: list[int]
    local_slot: int
    remote_slot: int


class Fence(Struct, frozen=True, tag="fence"):
    """Read back from every region that this write wrote. Answered by Fenced."""

    write: Write


class Stamp(Struct, frozen=True, tag="stamp"):
    """Write the pattern of the nonce into the peer's scratch, read it back if `fence`. Answered by Stamped."""

    key: TransferKey
    nonce: int
    fence: bool


class Inspect(Struct, frozen=True, tag="inspect"):
    """Look whether the pattern of the nonce is in the own scratch. Answered by Inspected."""

    number: int
    nonce: int


class Watch(Struct, frozen=True, tag="watch"):
    """From now on (or no longer) transfers may be open: poll the transport about every millisecond."""

    active: bool


class Revoke(Struct, frozen=True, tag="revoke"):
    """Make every descriptor that was ever given out worthless. Answered by Revoked with a new one."""


RankCommand: TypeAlias = Connect | Disconnect | Write | Fence | Stamp | Inspect | Watch | Revoke


# From a rank to its leader.


class Wrote(Struct, frozen=True, tag="wrote"):
    """All writes of the key have ended on this rank; `error` is empty when all bytes were written.

    `settled`: no byte of them is under way (they completed, or none was ever posted).
    """

    rank: int
    key: TransferKey
    error: str
    settled: bool
    digest: str
    num_bytes: int


class Fenced(Struct, frozen=True, tag="fenced"):
    rank: int
    key: TransferKey
    error: str


class Stamped(Struct, frozen=True, tag="stamped"):
    rank: int
    key: TransferKey
    error: str


class Inspected(Struct, frozen=True, tag="inspected"):
    rank: int
    number: int
    error: str


class Disconnected(Struct, frozen=True, tag="disconnected"):
    rank: int
    peer: str
    epoch: int


class Revoked(Struct, frozen=True, tag="revoked"):
    rank: int
    descriptor: bytes


RankReport: TypeAlias = Wrote | Fenced | Stamped | Inspected | Disconnected | Revoked
