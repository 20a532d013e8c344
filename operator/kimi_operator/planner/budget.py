"""A GPU's memory and how its pool is cut, behind one interface: the bundled worker's pages and slots, vLLM's blocks."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Protocol

from msgspec import Struct

from kimi_operator.planner.memory import MemoryLine
from kimi_operator.planner.overflow import Overflow, find_overflow
from kimi_operator.planner.pools import num_slots, whole_units
from kimi_operator.planner.unified import BlockLayout
from kimi_operator.planner.units import ceil_div

MOST_CAPTURED = 512
_CAPTURED: tuple[int, ...] = (1, 2, 4, *range(8, 256, 8), *range(256, MOST_CAPTURED + 1, 16))
"""Batches that vLLM captures a graph for: few small ones, then steps of 8, from 256 on steps of 16."""


class PoolDesign(Protocol):
    """How a lane's requests share the KV memory of each of its GPUs. All sizes are of one GPU."""

    def __hash__(self) -> int:
        """A value: the solver keeps what it computed for it."""

    @property
    def unit(self) -> str:
        """What the pool is counted in, in the plural."""

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit."""

    def fixed_bytes(self, max_num_seqs: int) -> int:
        """Bytes set aside for so many running requests before any of them comes."""

    def num_slots(self, max_num_seqs: int) -> int | None:
        """Requests whose state is set aside for so many running ones; None where state lies in the units."""

    def units(self, tokens: int) -> int:
        """Units that a running request of so many tokens takes; those of 0 tokens are what its state takes."""

    def longest(self, num_units: int) -> int:
        """Tokens of the longest request that so many units hold, 0 when they hold none."""


class PagePool(Struct, frozen=True):
    """The bundled worker: KV pages of a few tokens, and a state slot a request, apart from each other."""

    page_size_tokens: int
    page_bytes: int
    slot_bytes: int
    unit: str = "KV pages"
    slots: int | None = None
    """Slots of a pool that is cut already; None cuts what the running requests need."""

    @property
    def unit_bytes(self) -> int:
        """Bytes of a page."""
        return self.page_bytes

    def fixed_bytes(self, max_num_seqs: int) -> int:
        """State slots of running requests and of those that a handoff has reserved."""
        return self.num_slots(max_num_seqs) * self.slot_bytes

    def num_slots(self, max_num_seqs: int) -> int:
        """As the pool was cut, else as it would be."""
        return self.slots or num_slots(max_num_seqs)

    def units(self, tokens: int) -> int:
        """Pages."""
        return ceil_div(tokens, self.page_size_tokens)

    def longest(self, num_units: int) -> int:
        """Tokens that fill so many pages."""
        return num_units * self.page_size_tokens


class BlockPool(Struct, frozen=True):
    """vLLM: blocks of one size for rows and for state, so a short request pays for its state in blocks."""

    layout: BlockLayout
    unit: str = "blocks"

    @property
    def unit_bytes(self) -> int:
        """Bytes of a block."""
        return self.layout.block_bytes

    def fixed_bytes(self, max_num_seqs: int) -> int:  # noqa: ARG002 - of the interface
        """Nothing: state comes from the same blocks."""
        return 0

    def num_slots(self, max_num_seqs: int) -> None:
        """None: as many have state as have blocks."""

    def units(self, tokens: int) -> int:
        """Blocks, of which some hold the state."""
        return self.layout.blocks_of(tokens)

    def longest(self, num_units: int) -> int:
        """Tokens that fill so many blocks beside the state's."""
        return self.layout.longest(num_units)


class Captures(Struct, frozen=True):
    """Memory of captured graphs, which grows with MAX_NUM_SEQS: one graph for each batch size up to twice it."""

    bytes_each: int
    """Bytes a captured size takes. Nobody published it; state where yours comes from."""

    def sizes(self, max_num_seqs: int) -> tuple[int, ...]:
        """Batch sizes that are captured."""
        return _CAPTURED[: bisect_right(_CAPTURED, min(2 * max_num_seqs, MOST_CAPTURED))]

    def total_bytes(self, max_num_seqs: int) -> int:
        """Bytes of all captured sizes."""
        return len(self.sizes(max_num_seqs)) * self.bytes_each

    def padded(self, num_seqs: int, most: int) -> int:
        """MAX_NUM_SEQS near `num_seqs`, at most `most`: a step is padded to a captured size, so take one."""
        if num_seqs > MOST_CAPTURED:
            return num_seqs
        above = _CAPTURED[bisect_left(_CAPTURED, num_seqs)]
        return above if above <= most else _CAPTURED[bisect_right(_CAPTURED, num_seqs) - 1]


class Budget(Struct, frozen=True):
    """The memory of one GPU: what is spent before the pool, and how the pool is cut."""

    memory: int
    lines: tuple[MemoryLine, ...]
    """Weights and reserves; captured graphs too, unless `captures` counts them."""
    design: PoolDesign
    pool_bytes: int | None = None
    """Pool of a stated size (vLLM's --kv-cache-memory-bytes); None takes all that is free."""
    captures: Captures | None = None

    @property
    def free(self) -> int:
        """Bytes that the lines leave for pool and captured graphs; negative when they do not fit."""
        return self.memory - sum(line.bytes for line in self.lines)

    def overflow(self) -> Overflow | None:
        """The first line that does not fit, counted in order, and by how much."""
        return find_overflow(self.memory, self.lines)

    def graphs_bytes(self, max_num_seqs: int) -> int:
        """Bytes of captured graphs that are not in `lines`."""
        return 0 if self.captures is None else self.captures.total_bytes(max_num_seqs)

    def pool(self, max_num_seqs: int) -> int:
        """Bytes of the pool."""
        return self.free - self.graphs_bytes(max_num_seqs) if self.pool_bytes is None else self.pool_bytes

    def outside(self, max_num_seqs: int) -> int:
        """Bytes that nothing uses; negative when a stated pool and the graphs do not fit together."""
        return self.free - self.graphs_bytes(max_num_seqs) - self.pool(max_num_seqs)

    def num_units(self, max_num_seqs: int) -> int:
        """Whole pages or blocks of the pool."""
        return whole_units(self.pool(max_num_seqs), self.design.fixed_bytes(max_num_seqs), self.design.unit_bytes)

    def holds(self, tokens: int, max_num_seqs: int) -> bool:
        """Whether one request of so many tokens fits beside what so many running ones set aside."""
        return self.num_units(max_num_seqs) >= self.design.units(tokens)
