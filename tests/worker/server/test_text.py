"""Tokens to text and back: nothing is lost, whatever the pieces."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kimi_worker.model.config import SpecialToken
from kimi_worker.server.text import Detokenizer, StopStrings, Tokenizer, TokenizerError
from replay_fixtures import NUM_RANKS, SPECIAL, VOCAB_SIZE, WORDS, write_tokenizer

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=60) | st.sampled_from(
    [
        "hello world",
        "<|open|>message<|sep|>",
        "日本語と English",
        "naïve café's",
        "a\r\n\r\n  b",
        "12345",
        "👩‍👩‍👧",
        " \t\n",
    ]
)


@given(text=TEXTS)
def test_text_survives_and_is_never_special(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert all(token < NUM_RANKS for token in ids)
    assert tokenizer.decode(ids) == text


def test_words_are_whole_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("hello world") == [256 + WORDS.index("hello"), 256 + WORDS.index(" world")]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("1234567", ["123", "456", "7"]),
        ("Hello World's", ["Hello", " World's"]),
        ("HTTPServer", ["HTTPServer"]),
        ("日本語abc", ["日本語", "abc"]),
        ("a  b", ["a", " ", " b"]),
        ("x!?\n\ny", ["x", "!?\n\n", "y"]),
        ("end  \n next", ["end", "  \n", " next"]),
    ],
)
def test_text_is_cut_as_k3_cuts_it(text: str, pieces: list[str]) -> None:
    """Ranks that hold each expected piece whole: the piece is one token only where the pattern cuts there."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    for piece in pieces:
        ranks.setdefault(piece.encode(), len(ranks))
    special = {len(ranks) + at: SpecialToken(name, is_hidden=False) for at, name in enumerate(SPECIAL)}
    tokenizer = Tokenizer(ranks, special, [], len(ranks) + len(special))
    assert [tokenizer.token_text(token) for token in tokenizer.encode(text)] == pieces


@pytest.mark.timeout(60)
@pytest.mark.parametrize("text", ["a" * 200_000, " " * 100_000, "x " * 50_000, "日" * 60_000])
def test_long_runs_end_soon_and_survive(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=TEXTS, data=st.data())
def test_detokeniser_does_not_depend_on_the_groups(tokenizer: Tokenizer, text: str, data: st.DataObject) -> None:
    ids = list(text.encode())  # one token a byte: characters are cut anywhere
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    detokenizer = Detokenizer(tokenizer)
    parts = [detokenizer.feed(ids[start:end]) for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert "".join(parts) + detokenizer.finish() == text
    assert "\ufffd" not in text or "\ufffd" in "".join(parts)


@given(ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40))
def test_any_output_becomes_text(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Models may emit broken UTF-8, reserved tokens and half characters at the end."""
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.feed([token]) for token in ids) + detokenizer.finish()
    spelt = b"".join(tokenizer.token_bytes(token) for token in ids if not tokenizer.is_hidden(token))
    assert text == spelt.decode(errors="replace")


def test_end_tokens_are_hidden_and_tags_are_not(tokenizer: Tokenizer) -> None:
    shown = [name for name in SPECIAL if tokenizer.decode([tokenizer.special[name]])]
    assert shown == ["<|open|>", "<|close|>", "<|sep|>"]
    assert tokenizer.stop_ids == {tokenizer.special["[EOS]"], tokenizer.special["<|end_of_msg|>"]}
    assert tokenizer.token_text(VOCAB_SIZE - 1) == f"<|reserved_token_{VOCAB_SIZE - 1}|>"


LETTERS = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3)


def cut_by_definition(text: str, stops: list[str]) -> str:
    """Slow truth: read character by character until some stop string is complete."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))]
    return text


@given(text=LETTERS, stops=STOPS, data=st.data())
def test_stop_strings_match_their_definition(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    reader = StopStrings(stops)
    given_out = "".join(reader.feed(text[start:end]) for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True))
    assert reader.is_matched == any(stop in text for stop in stops)
    assert given_out + ("" if reader.is_matched else reader.finish()) == cut_by_definition(text, stops)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    reader = StopStrings(["END"])
    assert [reader.feed(text) for text in ["say E", "N", "O ", "EN", "D more"]] == ["say ", "", "ENO ", "", ""]
    assert reader.is_matched


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda folder: (folder / "tiktoken.model").unlink(), "tiktoken.model: No such file"),
        (lambda folder: (folder / "tiktoken.model").write_text("QQ== 0\nnonsense\n"), "line 2"),
        (lambda folder: (folder / "tiktoken.model").write_text("QQ== 0\nQg== 5\n"), "ranks of its 2 lines"),
        (lambda folder: (folder / "tiktoken.model").write_text("QQ== 0\n"), "no token for the bytes"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json: not JSON"),
        (lambda folder: (folder / "config.json").write_text("{}"), "config.json: vocab_size"),
        (lambda folder: (folder / "config.json").write_text('{"vocab_size": 260}'), "vocab_size of config.json"),
        (lambda folder: rewrite(folder / "tokenizer_config.json", added_tokens_decoder={}), "does not name <|open|>"),
        (
            lambda folder: rewrite(folder / "tokenizer_config.json", added_tokens_decoder=[1]),
            "added_tokens_decoder: want",
        ),
    ],
)
def test_a_damaged_tokenizer_is_named(tmp_path: Path, damage, named: str) -> None:
    write_tokenizer(tmp_path)
    damage(tmp_path)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(tmp_path)
    assert named in str(caught.value)
    assert str(tmp_path) in str(caught.value)
