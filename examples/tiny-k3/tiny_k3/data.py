"""Training conversations as token ids, made with tensor operations.

A conversation is what the chat encoding gives for: a first user message with words, needles and a question, the
answer, and further turns that only ask. tests/kernels/test_tiny_data.py holds it against the text path.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tiny_k3.sizes import TOKEN_IDS, WORDS, ids_of

NUM_DIGITS = 6
FIRST_WORD_ID = TOKEN_IDS[f" {WORDS[0]}".encode()]
FIRST_DIGIT_ID = TOKEN_IDS[b"0"]

_OPEN_USER = ids_of("<|open|>", "message", " role", '="', "user", '"', "<|sep|>")
_OPEN_ANSWER = [
    *ids_of("<|close|>", "message", "<|sep|>", "<|end_of_msg|>"),
    *ids_of("<|open|>", "message", " role", '="', "assistant", '"', "<|sep|>", "<|open|>", "response", "<|sep|>"),
]
END_OF_ANSWER = ids_of("<|close|>", "response", "<|sep|>", "<|close|>", "message", "<|sep|>", "<|end_of_msg|>")
_HEAD = [*_OPEN_USER, *ids_of("Notes", ":")]
_NEEDLE_HEAD, _NEEDLE_LINK, _NEEDLE_END = ids_of(" The", " key", " of"), ids_of(" is", " "), ids_of(".")
_ASK = ids_of(" is", " the", " key", " of")
_ASK_END = ids_of("?")
_ASK_TOKENS = 1 + len(_ASK) + 2 + len(_ASK_END)


@dataclass(frozen=True, slots=True)
class Mixture:
    """What a batch holds: every sequence has the same numbers, in its own random places."""

    tokens: int
    needles: int
    repeats: int
    """Needles told again later in the first message; with more repeats than needles, some more than once."""
    turns: int
    """Questions with answers; 0 leaves the conversation within the first user message."""
    digits: int = NUM_DIGITS
    unlike: bool = False
    """Whether the values of a sequence are told apart by any two of their digits, as those of the text prompts are."""

    @property
    def needle_tokens(self) -> int:
        return len(_NEEDLE_HEAD) + 2 + len(_NEEDLE_LINK) + self.digits + len(_NEEDLE_END)

    @property
    def turn_tokens(self) -> int:
        """A user message that only asks, and the answer."""
        reply = len(_OPEN_ANSWER) + self.digits + len(END_OF_ANSWER)
        return len(_OPEN_USER) + _ASK_TOKENS + reply

    @property
    def fillers(self) -> int:
        """Random words; negative when the rest does not fit."""
        # The first message is opened by the head, so that its question lacks an opening of its own.
        turns = self.turns * self.turn_tokens - (len(_OPEN_USER) if self.turns else 0)
        return self.tokens - len(_HEAD) - turns - (self.needles + self.repeats) * self.needle_tokens


@dataclass(frozen=True, slots=True)
class Batch:
    tokens: Tensor
    """[B, T] int64."""
    answer: Tensor
    """[B, T] bool: digits that can be known from what stands before them (answers, and needles told again)."""
    first: Tensor
    """[B, T] bool: the first digit of each such run, which only the key tells."""
    ending: Tensor
    """[B, T] bool: the tokens that end an answer."""


def make_batch(mixture: Mixture, num_sequences: int, generator: torch.Generator) -> Batch:
    """Draw a batch; raises ValueError when the mixture does not fit its token count or asks more than it tells."""
    if mixture.turns > mixture.needles:
        raise ValueError(f"{mixture} asks for {mixture.turns} needles and has {mixture.needles}")
    if mixture.fillers < 0:
        raise ValueError(f"{mixture} needs {-mixture.fillers} tokens more than tokens={mixture.tokens}")
    keys, digits = _draw_needles(mixture, num_sequences, generator)
    hay, hay_answer = _haystack(mixture, keys, digits, generator)
    asked = torch.rand(num_sequences, mixture.needles, generator=generator).argsort(-1)[:, : mixture.turns]
    pieces = [_const(_HEAD, num_sequences), hay]
    answer = [torch.zeros(num_sequences, len(_HEAD), dtype=torch.bool), hay_answer]
    rows = torch.arange(num_sequences)
    for turn in range(mixture.turns):
        chosen = asked[:, turn]
        opening = ids_of(" What") if turn == 0 else [*_OPEN_USER, *ids_of("What")]
        before = [_const([*opening, *_ASK], num_sequences), keys[rows, chosen]]
        before.append(_const([*_ASK_END, *_OPEN_ANSWER], num_sequences))
        pieces += [*before, digits[rows, chosen], _const(END_OF_ANSWER, num_sequences)]
        known = torch.zeros(num_sequences, sum(p.shape[1] for p in pieces[-len(before) - 2 :]), dtype=torch.bool)
        known[:, -mixture.digits - len(END_OF_ANSWER) : -len(END_OF_ANSWER)] = True
        answer.append(known)
    mask = torch.cat(answer, 1)
    return Batch(torch.cat(pieces, 1), mask, mask & ~mask.roll(1, 1), _endings(mixture, num_sequences))


def _const(ids: list[int], num_sequences: int) -> Tensor:
    return torch.tensor(ids).expand(num_sequences, -1)


def _draw_needles(mixture: Mixture, num_sequences: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Keys [B, n, 2] and digits [B, n, d] as ids. Neighbours share their first word, so that both words count."""
    num_needles = mixture.needles
    words = torch.rand(num_sequences, len(WORDS), generator=generator).argsort(-1)[:, : 2 * num_needles]
    first = words[:, torch.arange(num_needles) // 2]
    keys = torch.stack([first, words[:, num_needles:]], -1) + FIRST_WORD_ID
    draw_digits = _draw_unlike if mixture.unlike else _draw_plain
    return keys, draw_digits(mixture, num_sequences, generator) + FIRST_DIGIT_ID


def _draw_plain(mixture: Mixture, num_sequences: int, generator: torch.Generator) -> Tensor:
    return torch.randint(10, (num_sequences, mixture.needles, mixture.digits), generator=generator)


def _draw_unlike(mixture: Mixture, num_sequences: int, generator: torch.Generator) -> Tensor:
    """Digits [B, n, d] with different first digits and, in a sequence, no digit twice before the same one."""
    rows = torch.arange(num_sequences)
    first = torch.rand(num_sequences, 10, generator=generator).argsort(-1)
    is_used = torch.zeros(num_sequences, 10, 10)
    digits = torch.empty(num_sequences, mixture.needles, mixture.digits, dtype=torch.long)
    for needle in range(mixture.needles):
        last = digits[:, needle, 0] = first[:, needle]
        for place in range(1, mixture.digits):
            wish = torch.rand(num_sequences, 10, generator=generator) - is_used[rows, last]
            follower = digits[:, needle, place] = wish.argmax(-1)
            is_used[rows, last, follower] = 1.0
            last = follower
    return digits


def _haystack(mixture: Mixture, keys: Tensor, digits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Scatter the needles (some told again) among random words; mask the digits of what is told again."""
    num_sequences = keys.shape[0]
    told = mixture.needles + mixture.repeats
    which = torch.cat([torch.arange(mixture.needles), torch.arange(mixture.repeats) % mixture.needles])
    order = which[torch.rand(num_sequences, told, generator=generator).argsort(-1)]
    rows = torch.arange(num_sequences)[:, None]
    sentence = torch.cat(
        [
            torch.tensor(_NEEDLE_HEAD).expand(num_sequences, told, -1),
            keys[rows, order],
            torch.tensor(_NEEDLE_LINK).expand(num_sequences, told, -1),
            digits[rows, order],
            torch.tensor(_NEEDLE_END).expand(num_sequences, told, -1),
        ],
        -1,
    )
    length = mixture.fillers + told * mixture.needle_tokens
    hay = torch.randint(len(WORDS), (num_sequences, length), generator=generator) + FIRST_WORD_ID
    gaps = torch.randint(mixture.fillers + 1, (num_sequences, told), generator=generator).sort(-1).values
    start = gaps + torch.arange(told) * mixture.needle_tokens
    place = (start[..., None] + torch.arange(mixture.needle_tokens)).flatten(1)
    hay = hay.scatter(1, place, sentence.flatten(1))
    again = torch.stack([(order[:, :i] == order[:, i : i + 1]).any(-1) for i in range(told)], -1)
    is_digit = torch.zeros(mixture.needle_tokens, dtype=torch.bool)
    is_digit[-len(_NEEDLE_END) - mixture.digits : -len(_NEEDLE_END)] = True
    mask = torch.zeros(num_sequences, length, dtype=torch.bool)
    return hay, mask.scatter(1, place, (again[..., None] & is_digit).flatten(1))


def _endings(mixture: Mixture, num_sequences: int) -> Tensor:
    mask = torch.zeros(num_sequences, mixture.tokens, dtype=torch.bool)
    for turn in range(mixture.turns):
        end = mixture.tokens - turn * mixture.turn_tokens
        mask[:, end - len(END_OF_ANSWER) : end] = True
    return mask
