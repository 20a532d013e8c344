"""Which bytes go where: pages and slots of one lane into pages and slots of another. Pure."""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kimi_worker.protocol.handoff import Write

READ_BACK_BYTES = 8
READ_BACK_LIMIT = 64
"""Most reads of one fence; enough to reach every queue pair that a transfer may have used."""


class Unit(Enum):
    """What a region is an array of."""

    PAGE = "page"
    SLOT = "slot"
    SCRATCH = "scratch"
    """Of test writes; belongs to no request."""


@dataclass(frozen=True, slots=True)
class RegionLayout:
    """An array of `num_units` contiguous pages or slots, each holding all of its layers."""

    name: str
    unit: Unit
    bytes_per_unit: int


Layout = tuple[RegionLayout, ...]
"""The regions of a rank, in an order that both sides share. Equal layout hashes imply equal layouts."""


class Copy(NamedTuple):
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
    copies: list[Copy] = []
    for index, region in enumerate(layout):
        copies += _merged(index, region.bytes_per_unit, pairs[region.unit])
    return copies


def _merged(index: int, size: int, pairs: Sequence[tuple[int, int]]) -> list[Copy]:
    """Copies of sorted (local, remote) units, where runs of neighbours on both sides become one."""
    copies: list[Copy] = []
    first = expected = (-1, -1)
    for pair in pairs:
        if pair != expected:
            if expected != (-1, -1):
                copies.append(Copy(index, first[0] * size, first[1] * size, (expected[0] - first[0]) * size))
            first = pair
        expected = (pair[0] + 1, pair[1] + 1)
    if pairs:
        copies.append(Copy(index, first[0] * size, first[1] * size, (expected[0] - first[0]) * size))
    return copies


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
    return _digest(sorted((copy.region, copy.remote_offset, copy.num_bytes) for copy in copies))


def digest_of_reservation(layout: Layout, page_ids: Sequence[int], slot: int) -> str:
    """Digest that a transfer into exactly these pages and this slot must have."""
    units = {Unit.PAGE: sorted(page_ids), Unit.SLOT: [slot]}
    ranges: list[tuple[int, int, int]] = []
    for index, region in enumerate(layout):
        size = region.bytes_per_unit
        ranges += [(index, unit * size, size) for unit in units[region.unit]]
    return _digest(ranges)


def _digest(ranges: Sequence[tuple[int, int, int]]) -> str:
    """Hash sorted (region, offset, size) with touching ranges joined."""
    joined = array("q")
    last, end = -1, -1
    for region, offset, size in ranges:
        if region == last and offset == end:
            joined[-1] += size
        else:
            joined.extend((region, offset, size))
        last, end = region, offset + size
    return hashlib.blake2b(joined.tobytes(), digest_size=16).hexdigest()
