"""Which bytes go where: pages and slots of one lane into pages and slots of another. Pure."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kimi_worker.protocol.handoff import Write

READ_BACK_BYTES = 8
READ_BACK_LIMIT = 64
"""Most reads of one fence; enough to reach every queue pair that a transfer may have used."""


class Unit(Enum):
    """What a region is an array of."""

    PAGE = "page"
    SLOT = "slot"


@dataclass(frozen=True, slots=True)
class RegionLayout:
    """An array of `num_units` contiguous pages or slots, each holding all of its layers."""

    name: str
    unit: Unit
    bytes_per_unit: int


Layout = tuple[RegionLayout, ...]
"""The regions of a rank, in an order that both sides share. Equal layout hashes imply equal layouts."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Contiguous bytes of one region (by index in the layout); offsets in bytes from the region's start."""

    region: int
    local_offset: int
    remote_offset: int
    num_bytes: int


def plan_copies(layout: Layout, write: Write) -> list[Copy]:
    """Return the copies of a transfer, neighbours merged where they touch on both sides.

    Raises ValueError when the page lists differ in length or name a page twice.
    """
    local, remote = write.local_pages, write.remote_pages
    if len(local) != len(remote):
        raise ValueError(f"transfer {write.key}: {len(local)} local pages for {len(remote)} remote pages")
    for side, pages in (("local", local), ("remote", remote)):
        if len(set(pages)) != len(pages):
            raise ValueError(f"transfer {write.key}: a {side} page appears twice in {pages}")
    pairs = {Unit.PAGE: sorted(zip(local, remote, strict=True)), Unit.SLOT: [(write.local_slot, write.remote_slot)]}
    return [copy for index in range(len(layout)) for copy in _merged(index, layout[index], pairs[layout[index].unit])]


def _merged(index: int, region: RegionLayout, pairs: Sequence[tuple[int, int]]) -> list[Copy]:
    copies: list[Copy] = []
    size = region.bytes_per_unit
    run_start = 0
    for end in range(1, len(pairs) + 1):
        if end < len(pairs) and _follows(pairs[end - 1], pairs[end]):
            continue
        local, remote = pairs[run_start]
        copies.append(Copy(index, local * size, remote * size, (end - run_start) * size))
        run_start = end
    return copies


def _follows(before: tuple[int, int], after: tuple[int, int]) -> bool:
    return after[0] == before[0] + 1 and after[1] == before[1] + 1


def read_back_targets(copies: Sequence[Copy], limit: int = READ_BACK_LIMIT) -> list[Copy]:
    """Return the last few bytes of copies to read back: of each region's last copy, and of others up to the limit."""
    last_of_region = {copy.region: index for index, copy in enumerate(copies)}
    chosen = set(last_of_region.values())
    chosen.update(range(0, len(copies), max(1, len(copies) // max(1, limit - len(chosen)) + 1)))
    return [_tail(copies[index]) for index in sorted(chosen)]


def _tail(copy: Copy) -> Copy:
    size = min(READ_BACK_BYTES, copy.num_bytes)
    skip = copy.num_bytes - size
    return Copy(copy.region, copy.local_offset + skip, copy.remote_offset + skip, size)


def num_bytes(copies: Sequence[Copy]) -> int:
    return sum(copy.num_bytes for copy in copies)


def transfer_bytes(layout: Layout, num_pages: int) -> int:
    """Bytes that one rank moves for a request of `num_pages` pages."""
    return sum(region.bytes_per_unit * (num_pages if region.unit is Unit.PAGE else 1) for region in layout)


def digest_of_copies(copies: Sequence[Copy]) -> str:
    """Digest of where the bytes went, independent of how the copies were cut and ordered."""
    return _digest([(copy.region, copy.remote_offset, copy.num_bytes) for copy in copies])


def digest_of_reservation(layout: Layout, page_ids: Sequence[int], slot: int) -> str:
    """Digest that a transfer into exactly these pages and this slot must have."""
    units = {Unit.PAGE: page_ids, Unit.SLOT: [slot]}
    return _digest(
        [
            (index, unit * region.bytes_per_unit, region.bytes_per_unit)
            for index, region in enumerate(layout)
            for unit in units[region.unit]
        ]
    )


def _digest(ranges: list[tuple[int, int, int]]) -> str:
    joined: list[tuple[int, int, int]] = []
    for region, offset, size in sorted(ranges):
        if joined and joined[-1][0] == region and sum(joined[-1][1:]) == offset:
            joined[-1] = (region, joined[-1][1], joined[-1][2] + size)
        else:
            joined.append((region, offset, size))
    return hashlib.blake2b(repr(joined).encode(), digest_size=16).hexdigest()
