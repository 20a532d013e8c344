"""Text prompts and training data are the same thing: one grammar, one tokenizer, the same ids."""

import random
import re

import pytest
import torch
from kimi_operator.cli import haystack
from tiny_k3.chat import ChatTokenizer, write_tokenizer
from tiny_k3.data import END_OF_ANSWER, Mixture, make_batch
from tiny_k3.sizes import SPECIAL_IDS, VOCAB_SIZE, WORDS

NEEDLE = re.compile(r" The key of ([a-z]+) ([a-z]+) is (\d{6})\.")
USER_TEXT = re.compile(
    r"Notes:(?:(?: The key of [a-z]+ [a-z]+ is \d{6}\.)|(?: [a-z]+))* What is the key of ([a-z]+ [a-z]+)\?"
)
OPENING, CLOSING = '<|open|>message role="user"<|sep|>', "<|close|>message<|sep|><|end_of_msg|>"
REPLY = '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, 8192)
    return ChatTokenizer(folder)


def test_words_are_distinct_lower_case_and_one_token_each(tokenizer: ChatTokenizer) -> None:
    assert len(set(WORDS)) == len(WORDS) == 400
    assert all(re.fullmatch("[a-z]{3,10}", word) for word in WORDS)
    assert all(len(tokenizer.encode_text(f" {word}")) == 1 for word in WORDS)
    assert WORDS == haystack.WORDS


def test_special_ids_stand_after_the_ranks_in_the_released_order() -> None:
    first = SPECIAL_IDS["[BOS]"]
    released = {"[EOS]": 1, "<|end_of_msg|>": 2, "<|open|>": 3, "<|close|>": 4, "<|sep|>": 5, "<|media_pad|>": 21}
    assert {name: SPECIAL_IDS[name] - first for name in released} == released
    assert SPECIAL_IDS["[PAD]"] == VOCAB_SIZE - 1
    assert VOCAB_SIZE % 2 == 0


def test_any_text_survives_and_never_becomes_a_control_token(tokenizer: ChatTokenizer) -> None:
    for text in ("héllo wörld 12345", "中文 text\r\n\n  x", "<|end_of_msg|> [EOS] <|open|>", "it's DON'T 3.14"):
        ids = tokenizer.encode_text(text)
        assert tokenizer.decode(ids) == text
        assert max(ids) < SPECIAL_IDS["[BOS]"]


def test_digits_are_single_tokens(tokenizer: ChatTokenizer) -> None:
    assert tokenizer.encode_text("482913") == [ord(digit) for digit in "482913"]


@pytest.mark.parametrize("mixture", [Mixture(128, 2, 4, 1), Mixture(320, 6, 2, 3), Mixture(512, 8, 0, 4)])
def test_training_ids_are_the_encoding_of_their_own_text(mixture: Mixture, tokenizer: ChatTokenizer) -> None:
    batch = make_batch(mixture, 5, torch.Generator().manual_seed(7))
    for ids in batch.tokens.tolist():
        assert len(ids) == mixture.tokens
        again: list[int] = []
        needles: dict[str, str] = {}
        turns = tokenizer.decode(ids).split(OPENING)[1:]
        assert len(turns) == mixture.turns
        for turn in turns:
            content, reply = turn.split(CLOSING, 1)
            answer = re.match(re.escape(REPLY) + r"(\d{6})", reply).group(1)
            needles |= {f"{first} {second}": value for first, second, value in NEEDLE.findall(content)}
            asked = re.search(r"(?:^| )What is the key of ([a-z]+ [a-z]+)\?$", content).group(1)
            assert needles[asked] == answer
            again += tokenizer.encode_prompt(content) + tokenizer.encode_answer(answer)
        assert again == ids
        assert len(needles) == mixture.needles


def test_training_masks_cover_answers_and_endings_alone(tokenizer: ChatTokenizer) -> None:
    mixture = Mixture(320, 6, 2, 3)
    batch = make_batch(mixture, 4, torch.Generator().manual_seed(8))
    for ids, answer, ending in zip(batch.tokens, batch.answer, batch.ending, strict=True):
        assert re.fullmatch(r"\d+", tokenizer.decode(ids[answer].tolist()))
        # Answers of the turns and the second telling of a needle; each has six digits.
        assert int(answer.sum()) == 6 * (mixture.turns + mixture.repeats)
        assert ids[ending].tolist() == END_OF_ANSWER * mixture.turns


@pytest.mark.parametrize("num_tokens", [45, 256, 511, 4096])
def test_prompts_have_the_training_form_and_the_exact_length(num_tokens: int, tokenizer: ChatTokenizer) -> None:
    needle = haystack.make_prompt(random.Random(3), num_tokens, 1 if num_tokens == 45 else 5)
    match = USER_TEXT.fullmatch(needle.prompt_text)
    assert match
    assert match.group(1) == needle.key
    told = {f"{first} {second}": value for first, second, value in NEEDLE.findall(needle.prompt_text)}
    assert told[needle.key] == needle.answer
    ids = tokenizer.encode_prompt(needle.prompt_text)
    assert len(ids) == num_tokens
    assert tokenizer.decode(ids) == OPENING + needle.prompt_text + CLOSING + REPLY


def test_a_run_repeats_from_its_seed_and_shares_no_key_and_no_value() -> None:
    run = list(haystack.make_run(1, [256] * 57, 6))
    assert run == list(haystack.make_run(1, [256] * 57, 6))
    assert run != list(haystack.make_run(2, [256] * 57, 6))
    told = [found for needle in run for found in NEEDLE.findall(needle.prompt_text)]
    assert len(told) == 57 * 6
    assert len({(first, second) for first, second, _ in told}) == len({value for *_, value in told}) == len(told)


def test_needles_share_first_words_so_that_both_words_count() -> None:
    needle = haystack.make_prompt(random.Random(5), 400, 6)
    firsts = [first for first, *_ in NEEDLE.findall(needle.prompt_text)]
    assert sorted(firsts.count(first) for first in set(firsts)) == [2, 2, 2]


def pairs_of(values: list[str]) -> list[str]:
    return [value[i : i + 2] for value in values for i in range(len(value) - 1)]


def test_values_of_a_prompt_run_unlike_in_text_and_in_training(tokenizer: ChatTokenizer) -> None:
    prompts = [needle.prompt_text for needle in haystack.make_run(4, [256] * 20, 6)]
    batch = make_batch(Mixture(512, 6, 0, 2, unlike=True), 20, torch.Generator().manual_seed(9))
    prompts += [tokenizer.decode(ids) for ids in batch.tokens.tolist()]
    for text in prompts:
        values = [value for *_, value in NEEDLE.findall(text)]
        assert len({value[0] for value in values}) == len(values) == 6
        assert len(set(pairs_of(values))) == 6 * 5


def test_a_prompt_that_cannot_hold_its_needles_is_refused() -> None:
    with pytest.raises(ValueError, match="num_tokens is 100, but 6 needles need 115"):
        haystack.make_prompt(random.Random(0), 100, 6)
    with pytest.raises(ValueError, match="num_needles is 0, expected 1 to 8"):
        haystack.make_prompt(random.Random(0), 100, 0)
    with pytest.raises(ValueError, match="needs 6 tokens more than tokens=150"):
        make_batch(Mixture(150, 5, 0, 2), 1, torch.Generator())
