"""What the handoff asks of a one-sided transport. One object a rank; used from one thread only."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kimi_worker.handoff.plan import Copy, RegionLayout


class TransportError(Exception):
    """The transport cannot do what was asked; the message names the peer and what to check."""


@dataclass(frozen=True, slots=True)
class Region:
    """Memory of this rank that peers may write: `num_units * layout.bytes_per_unit` bytes from `pointer`."""

    layout: RegionLayout
    pointer: int
    num_units: int
    device: str = "cpu"
    """`cpu` or `cuda` (also ROCm's name)."""
    device_id: int = 0
    """Index of the GPU; 0 for `cpu`."""

    @property
    def num_bytes(self) -> int:
        return self.num_units * self.layout.bytes_per_unit


class Scratch(Protocol):
    """A little memory of the kind that the other regions are of; only test writes go there."""

    @property
    def region(self) -> Region:
        """Its units are what one test write fills."""

    def fill(self, unit: int, data: bytes) -> None:
        """Write a whole unit."""

    def read(self, unit: int) -> bytes:
        """Read a whole unit."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A post has ended and touches local memory no more; `error` is empty when every byte was moved.

    `settled`: no byte of it is under way to the peer (it succeeded, or it was never posted).
    """

    post: int
    error: str = ""
    settled: bool = True


class Transport(Protocol):
    """Errors of a post arrive as Completions; a call raises TransportError only where it says so."""

    def register(self, regions: Sequence[Region]) -> bytes:
        """Register the rank's memory once and return its descriptor for peers. Raises TransportError."""

    def connect(self, descriptor: bytes) -> str:
        """Load a peer's descriptor and return its handle. Raises TransportError."""

    def post_write(self, peer: str, copies: Sequence[Copy]) -> int:
        """Start writing into the peer's memory; the post's Completion comes from `poll`."""

    def post_read_back(self, peer: str, copies: Sequence[Copy]) -> int:
        """Start reading a few bytes of each region that the copies wrote, behind those writes."""

    def poll(self) -> list[Completion]:
        """Make progress and return the posts that have ended since the last call; each exactly once."""

    def pump(self) -> None:
        """Make progress only, for the side that is written to."""

    def disconnect(self, peer: str) -> None:
        """Forget the peer; its open posts complete with an error and touch local memory no more."""

    def revoke(self) -> bytes:
        """Drop all connections and registrations, register anew, return the new descriptor. Raises TransportError.

        Afterwards no write that was made with an earlier descriptor can land in this rank's memory.
        """

    def close(self) -> None:
        """Give everything back; open posts are dropped."""
