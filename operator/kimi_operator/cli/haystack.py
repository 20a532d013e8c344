"""Prompts that hide needles among random words, for the recall run; no torch, the same prompts from the same seed.

A needle is a sentence `The key of W1 W2 is dddddd.`; a prompt asks for one of its needles. Token counts are those of
the tiny model of examples/tiny-k3, whose tokenizer has every word of words.txt as one token.
"""

import random
from collections.abc import Iterator, Sequence
from importlib.resources import files

from msgspec import Struct, field

NUM_DIGITS = 6
NEEDLE_TOKENS = 14
"""The, key, of, W1, W2, is, a space, six digits, a full stop."""
MAX_NEEDLES = 8
"""A prompt's values begin with different digits, and no digit stands twice before the same one."""
FRAME_TOKENS = 31
"""Chat template around the user's text (21), the opening `Notes:` (2) and the question (8)."""

WORDS: tuple[str, ...] = tuple(files(__package__).joinpath("words.txt").read_text(encoding="utf-8").split())


class Needle(Struct, frozen=True):
    """One prompt and what a model that recalls must answer."""

    prompt_text: str
    """Content of the user message."""
    answer: str
    """Six digits."""
    key: str
    """The two words asked for."""


class Taken(Struct):
    """Keys and values used so far, so that no two needles of a run share one."""

    keys: set[tuple[str, str]] = field(default_factory=set)
    values: set[str] = field(default_factory=set)


def make_prompt(rng: random.Random, num_tokens: int, num_needles: int, taken: Taken | None = None) -> Needle:
    """Make one prompt of exactly num_tokens prompt tokens, chat template included (thinking off).

    Two needles in a row share their first word, so that both words of a key count; the one asked for is any of them.
    The values of a prompt begin with different digits and have no two neighbouring digits in common (the model is not
    asked to tell apart numbers that run alike); values of different prompts may.
    Keys and values not in `taken` are drawn and then added to it.
    Raises ValueError when num_needles is not in 1..MAX_NEEDLES or num_tokens cannot hold the needles.
    """
    if not 1 <= num_needles <= MAX_NEEDLES:
        raise ValueError(f"num_needles is {num_needles}, expected 1 to {MAX_NEEDLES}")
    num_fillers = num_tokens - FRAME_TOKENS - num_needles * NEEDLE_TOKENS
    if num_fillers < 0:
        raise ValueError(
            f"num_tokens is {num_tokens}, but {num_needles} needles need {num_tokens - num_fillers}; "
            "ask for more tokens or fewer needles"
        )
    pairs = _draw_pairs(rng, num_needles, Taken() if taken is None else taken)
    sentences = [f"The key of {first} {second} is {value}." for (first, second), value in pairs]
    asked = rng.randrange(num_needles)
    (first, second), answer = pairs[asked]
    rng.shuffle(sentences)
    pieces = rng.choices(WORDS, k=num_fillers)
    gaps = sorted(rng.randint(0, num_fillers) for _ in sentences)
    # From the last gap on, so that an insertion does not move the gaps still to come.
    for gap, sentence in zip(reversed(gaps), reversed(sentences), strict=True):
        pieces.insert(gap, sentence)
    text = " ".join(["Notes:", *pieces, f"What is the key of {first} {second}?"])
    return Needle(prompt_text=text, answer=answer, key=f"{first} {second}")


def make_run(seed: int, lengths: Sequence[int], num_needles: int) -> Iterator[Needle]:
    """One prompt for each length in order; all keys and all values of the run are distinct."""
    rng = random.Random(seed)  # noqa: S311 - test data, not a secret
    taken = Taken()
    for num_tokens in lengths:
        yield make_prompt(rng, num_tokens, num_needles, taken)


def _draw_pairs(rng: random.Random, num_needles: int, taken: Taken) -> list[tuple[tuple[str, str], str]]:
    """Draw keys and values that are new to the run; neighbours (0 and 1, 2 and 3, ...) share their first word."""
    keys: list[tuple[str, str]] = []
    used_words: set[str] = set()
    first = ""
    while len(keys) < num_needles:
        if len(keys) % 2 == 0:
            first = rng.choice([word for word in WORDS if word not in used_words])
            used_words.add(first)
        second = rng.choice(WORDS)
        if second in used_words or (first, second) in taken.keys:
            continue
        used_words.add(second)
        keys.append((first, second))
    values = _draw_values(rng, num_needles)
    while not taken.values.isdisjoint(values):
        values = _draw_values(rng, num_needles)
    taken.keys.update(keys)
    taken.values.update(values)
    return list(zip(keys, values, strict=True))


def _draw_values(rng: random.Random, num_needles: int) -> list[str]:
    """Values that begin with different digits and in which no digit stands twice before the same one."""
    unused = {digit: set("0123456789") for digit in "0123456789"}
    values = []
    for first in rng.sample("0123456789", num_needles):
        digits = [first]
        while len(digits) < NUM_DIGITS:
            # Eight values need 40 of the 100 pairs, so a digit without a follower is rare; it may repeat one then.
            follower = rng.choice(sorted(unused[digits[-1]]) or "0123456789")
            unused[digits[-1]].discard(follower)
            digits.append(follower)
        values.append("".join(digits))
    return values
