"""Text to token ids and back, from the checkpoint's tiktoken ranks and its special tokens."""

import base64
import codecs
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiktoken

from kimi_worker.model.config import ConfigError, SpecialToken, read_end_ids, read_special_tokens

# letters without the Han script, which has an alternative of its own
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"\p{Han}+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""How K3 cuts text before byte pairs are merged."""

# The merge of one piece costs more than linear time and the pattern backtracks over long runs, so text is cut after
# this many characters in a row that are all white space or all not.
_MAX_RUN = 25_000
_RUNS = re.compile(rf"\s{{{_MAX_RUN}}}|\S{{{_MAX_RUN}}}")


class TokenizerError(Exception):
    """A tokenizer file of the checkpoint is missing or wrong; the message names it."""


@dataclass(frozen=True, slots=True)
class Controls:
    """Ids of the tokens that structure a conversation."""

    open: int
    close: int
    sep: int
    end_of_msg: int


_MEDIA = ("<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>")
"""Where an image stands in a prompt."""


class Tokenizer:
    """The checkpoint's vocabulary. `encode` never gives a special id, whatever the text holds."""

    def __init__(
        self, ranks: dict[bytes, int], tokens: dict[int, SpecialToken], stop_ids: Iterable[int], vocab_size: int
    ) -> None:
        """`tokens` are the special ones, by id; `stop_ids` those that end an answer."""
        special = {token.text: token_id for token_id, token in tokens.items()}
        self._encoding = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
        self.vocab_size = vocab_size
        self.special = special
        self._hidden = {token_id for token_id, token in tokens.items() if token.is_hidden}
        names = {token_id: token.text for token_id, token in tokens.items()}
        self._bytes = [names.get(token_id, f"<|reserved_token_{token_id}|>").encode() for token_id in range(vocab_size)]
        for piece, token_id in ranks.items():
            self._bytes[token_id] = piece
        self._reserved = set(range(vocab_size)) - set(ranks.values()) - set(names)
        self.controls = Controls(
            special["<|open|>"], special["<|close|>"], special["<|sep|>"], special["<|end_of_msg|>"]
        )
        self.stop_ids = frozenset({*stop_ids, self.controls.end_of_msg})
        self.media_ids = frozenset(special[name] for name in _MEDIA if name in special)

    @classmethod
    def load(cls, checkpoint: Path) -> "Tokenizer":
        """Read `tiktoken.model`, `tokenizer_config.json` and `config.json`. Raises TokenizerError."""
        ranks = _read_ranks(checkpoint / "tiktoken.model")
        config = read_json(checkpoint / "config.json")
        text_config = config.get("text_config", config)
        try:
            tokens, stop_ids = read_special_tokens(checkpoint), read_end_ids(checkpoint)
        except ConfigError as error:
            raise TokenizerError(str(error)) from error
        vocab_size = text_config.get("vocab_size")
        if not isinstance(vocab_size, int):
            raise TokenizerError(f"{checkpoint / 'config.json'}: vocab_size: want an integer, got {vocab_size!r}")
        _check(ranks, {token.text: token_id for token_id, token in tokens.items()}, vocab_size, checkpoint)
        return cls(ranks, tokens, stop_ids, vocab_size)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; special tokens that are spelt out in it stay text."""
        ids: list[int] = []
        start = 0
        for run in _RUNS.finditer(text):
            ids += self._encoding.encode_ordinary(text[start : run.end()])
            start = run.end()
        ids += self._encoding.encode_ordinary(text[start:])
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """What a token spells; a special token its name."""
        return self._bytes[token_id]

    def is_hidden(self, token_id: int) -> bool:
        """Whether an answer's text leaves this token out."""
        return token_id in self._hidden or token_id in self._reserved

    def token_text(self, token_id: int) -> str:
        """A token on its own as text; half characters are shown as U+FFFD."""
        return self._bytes[token_id].decode(errors="replace")

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of whole output, hidden tokens left out."""
        detokenizer = Detokenizer(self)
        return detokenizer.feed(token_ids) + detokenizer.finish()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of the checkpoint. Raises TokenizerError."""
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise TokenizerError(f"{path}: {error.strerror}; the checkpoint is not complete") from error
    except ValueError as error:
        raise TokenizerError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: want an object, got {type(value).__name__}")
    return value


def _read_ranks(path: Path) -> dict[bytes, int]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TokenizerError(f"{path}: {error.strerror}; the checkpoint is not complete") from error
    ranks = {}
    for number, line in enumerate(lines, 1):
        try:
            piece, rank = line.split()
            ranks[base64.b64decode(piece, validate=True)] = int(rank)
        except ValueError as error:
            raise TokenizerError(f"{path}: line {number}: want '<base64> <rank>', got {line[:60]!r}") from error
    if sorted(ranks.values()) != list(range(len(lines))):
        raise TokenizerError(f"{path}: the ranks of its {len(lines)} lines are not 0 to {len(lines) - 1}, each once")
    return ranks


def _check(ranks: dict[bytes, int], special: dict[str, int], vocab_size: int, checkpoint: Path) -> None:
    """Refuse a vocabulary that could not spell every text or would not fit the model."""
    if absent := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise TokenizerError(
            f"{checkpoint / 'tiktoken.model'}: no token for the bytes {absent[:8]}; all 256 are needed"
        )
    tokens_path = checkpoint / "tokenizer_config.json"
    for name in ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"):
        if name not in special:
            raise TokenizerError(
                f"{tokens_path}: added_tokens_decoder does not name {name}, which the chat format needs"
            )
    for name, token_id in special.items():
        if not len(ranks) <= token_id < vocab_size:
            raise TokenizerError(
                f"{tokens_path}: {name} has id {token_id}; want {len(ranks)} (after the ranks) to {vocab_size - 1} "
                "(vocab_size of config.json)"
            )


class Detokenizer:
    """Text of tokens as they come; the bytes of an unfinished character wait for the rest."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        tokenizer = self._tokenizer
        spelt = b"".join(tokenizer.token_bytes(token) for token in token_ids if not tokenizer.is_hidden(token))
        return self._decoder.decode(spelt)

    def finish(self) -> str:
        """What is left: U+FFFD for an unfinished character. The next `feed` starts afresh."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


class StopStrings:
    """Cuts text where the first stop string is complete; holds back what may still become one.

    The result does not depend on how the text is cut into pieces: of several stop strings the one that ends first
    counts, of those that end together the longest.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_matched = False

    def feed(self, text: str) -> str:
        """The part of the text so far that is certain and was not given out yet."""
        if self.is_matched or not self._stops:
            return "" if self.is_matched else text
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.is_matched, self._held = True, ""
            return text[: min(found)[1]]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back; the text ends here."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
