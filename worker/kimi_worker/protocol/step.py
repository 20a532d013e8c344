"""What a lane's leader tells its ranks to run: one plan a step."""

from msgspec import Struct


class SequenceStep(Struct, frozen=True, array_like=True):
    """The tokens of one request that one step computes.

    `page_ids` cover `num_cached + len(token_ids)` tokens. A sequence with `num_cached == 0` starts from a
    zeroed `slot`. With `sample` the logits after the last token are wanted.
    """

    token_ids: list[int]
    num_cached: int
    page_ids: list[int]
    slot: int
    sample: bool


class StepPlan(Struct, frozen=True, array_like=True):
    """One lane's share of one step of its group; an idle lane takes part with no sequences."""

    step: int
    sequences: list[SequenceStep]

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.token_ids) for sequence in self.sequences)
