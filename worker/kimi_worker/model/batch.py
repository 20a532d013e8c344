"""A step plan as tensors: one axis of tokens, decodes first, then the longer pieces."""

from dataclasses import dataclass

import torch
from kimi_kernels.mla import PageTable
from torch import Tensor

from kimi_worker.protocol.step import SequenceStep, StepPlan


@dataclass(frozen=True, slots=True)
class Piece:
    """Several tokens of one sequence: the batch's tokens [start, stop).

    page_ids    [n]  int64, the sequence's pages in order
    num_cached  rows of the sequence in its pages once these tokens' rows are written
    """

    start: int
    stop: int
    slot: int
    page_ids: Tensor
    num_cached: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything the model needs to know about one lane's step; T tokens, the first R of them decodes, longest first.

    token_ids       [T]  int64
    row_pages       [T]  int64, page that takes the token's latent row
    row_offsets     [T]  int64, row within that page
    decode_slots    [R]  int64
    decode_table    pages of the R decodes, int64, padded with a page of the same request; the lengths are the rows
                    once this step's row is written
    sampled         [n]  int64, tokens whose logits are wanted, in the plan's order
    """

    token_ids: Tensor
    row_pages: Tensor
    row_offsets: Tensor
    decode_slots: Tensor
    decode_table: PageTable
    pieces: list[Piece]
    sampled: Tensor

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_decodes(self) -> int:
        return self.decode_slots.shape[0]


def build_batch(plan: StepPlan, page_size: int, device: torch.device) -> Batch:
    """Lay out a plan. A piece of one token is a decode, also when it is the end of a prompt: the maths is the same."""
    order = sorted(range(len(plan.sequences)), key=lambda i: _place_in_batch(plan.sequences[i]))
    token_ids: list[int] = []
    row_pages: list[int] = []
    row_offsets: list[int] = []
    decodes: list[SequenceStep] = []
    pieces: list[Piece] = []
    last_token: dict[int, int] = {}
    for i in order:
        sequence = plan.sequences[i]
        start, length = len(token_ids), sequence.num_cached + len(sequence.token_ids)
        assert sequence.token_ids, f"step {plan.step}: sequence {i} has no tokens"
        assert len(sequence.page_ids) * page_size >= length, (
            f"step {plan.step}: {len(sequence.page_ids)} pages of {page_size} are too few for {length} tokens"
        )
        token_ids += sequence.token_ids
        row_pages += [sequence.page_ids[position // page_size] for position in range(sequence.num_cached, length)]
        row_offsets += [position % page_size for position in range(sequence.num_cached, length)]
        last_token[i] = len(token_ids) - 1
        if len(sequence.token_ids) == 1:
            decodes.append(sequence)
        else:
            pages = torch.tensor(sequence.page_ids[: -(-length // page_size)], dtype=torch.int64, device=device)
            pieces.append(Piece(start, len(token_ids), sequence.slot, pages, length))
    # The plan may name pages beyond this step; only those with rows are read.
    most_pages = -(-(decodes[0].num_cached + 1) // page_size) if decodes else 0

    def integers(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    lengths = tuple(sequence.num_cached + 1 for sequence in decodes)
    page_ids = integers([_padded(sequence.page_ids, most_pages) for sequence in decodes])
    return Batch(
        token_ids=integers(token_ids),
        row_pages=integers(row_pages),
        row_offsets=integers(row_offsets),
        decode_slots=integers([sequence.slot for sequence in decodes]),
        decode_table=PageTable(page_ids.view(len(decodes), most_pages), integers(lengths), lengths),
        pieces=pieces,
        sampled=integers([last_token[i] for i, sequence in enumerate(plan.sequences) if sequence.sample]),
    )


def _place_in_batch(sequence: SequenceStep) -> tuple[bool, int]:
    """Sorts decodes before pieces and longer sequences before shorter ones."""
    return len(sequence.token_ids) > 1, -sequence.num_cached


def _padded(page_ids: list[int], length: int) -> list[int]:
    return page_ids[:length] + page_ids[-1:] * (length - len(page_ids))
