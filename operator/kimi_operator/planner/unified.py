"""vLLM's pool of a hybrid model: blocks of one size for all layers. Modelled to compare, and to meet published figures.

Layers are sorted into groups of equal size and of one kind; a block serves all layers of one group. A block of a KDA
group holds one request's state, a block of an MLA group the rows of so many tokens as take the bytes of a state.
So a request takes one block for each KDA group, however short it is, and one more for each started block of tokens.
"""

from __future__ import annotations

from msgspec import Struct

from kimi_operator.planner.architecture import Architecture
from kimi_operator.planner.memory import layer_row_bytes, layer_state_bytes
from kimi_operator.planner.units import ceil_div

ALIGNMENT_TOKENS = 128
"""Block sizes are multiples of this. With it the published pool sizes come out, to the token."""
PADDING_LIMIT = 1.5
"""Kinds of layers whose numbers differ by less than this factor are padded to one group each."""


class BlockLayout(Struct, frozen=True):
    """One block, and how many of them a request takes."""

    block_tokens: int
    """Tokens whose rows one block holds."""
    block_bytes: int
    row_groups: int
    """Groups of MLA layers: each takes a block for every started `block_tokens` tokens."""
    state_groups: int
    """Groups of KDA layers: each takes one block a request."""

    def blocks_of(self, tokens: int) -> int:
        """Blocks of a request of so many tokens."""
        return self.row_groups * ceil_div(tokens, self.block_tokens) + self.state_groups

    def longest(self, num_blocks: int) -> int:
        """Tokens of the longest request that so many blocks hold, 0 when they hold none."""
        return max(0, num_blocks - self.state_groups) // self.row_groups * self.block_tokens

    def request_bytes(self, tokens: int) -> int:
        """Bytes of a request on one rank."""
        return self.blocks_of(tokens) * self.block_bytes


def block_layout(a: Architecture, tensor_parallel: int, row_itemsize: int, conv_itemsize: int = 2) -> BlockLayout:
    """The blocks of a model on one rank.

    row_itemsize   bytes a number of the cached MLA rows (1 is FP8)
    conv_itemsize  bytes a number of the convolutions' inputs; the state itself is float32
    """
    row = layer_row_bytes(a, row_itemsize)
    state = layer_state_bytes(a, tensor_parallel, conv_itemsize)
    tokens = ceil_div(ceil_div(state, row), ALIGNMENT_TOKENS) * ALIGNMENT_TOKENS
    group = _layers_per_group(a.num_mla_layers, a.num_kda_layers)
    return BlockLayout(
        block_tokens=tokens,
        block_bytes=tokens * row * group,
        row_groups=ceil_div(a.num_mla_layers, group),
        state_groups=ceil_div(a.num_kda_layers, group),
    )


def _layers_per_group(*kinds: int) -> int:
    fewest, most = min(kinds), max(kinds)
    return most if most < PADDING_LIMIT * fewest else fewest


class UnifiedPool(Struct, frozen=True):
    """The blocks that one rank's KV memory holds; a lane's ranks all hold the same ones."""

    layout: BlockLayout
    pool_bytes: int

    @property
    def num_blocks(self) -> int:
        """Whole blocks in the pool."""
        return self.pool_bytes // self.layout.block_bytes

    def num_requests(self, tokens: int) -> int:
        """Requests of so many tokens that fit at once."""
        return self.num_blocks // self.layout.blocks_of(tokens)

    def num_tokens(self, max_model_len: int) -> int:
        """Size of the pool as vLLM prints it: tokens of requests of the longest length, a part of one included."""
        return self.num_blocks * max_model_len // self.layout.blocks_of(max_model_len)
