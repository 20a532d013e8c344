"""Text to token ids and back for the tiny model: its tokenizer files and the chat encoding with thinking off."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path

import tiktoken

from tiny_k3.sizes import FIRST_SPECIAL, NUM_SPECIAL, RANKED, SPECIAL_IDS

_LOWER_END = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_UPPER_START = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PRE_TOKENIZER = "|".join(
    (
        r"\p{Han}+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER_START}*{_LOWER_END}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER_START}+{_LOWER_END}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
# Control tokens that are part of the visible chat markup: a decoder that skips special tokens keeps them.
_VISIBLE = ("<|open|>", "<|close|>", "<|sep|>")


def special_names() -> dict[int, str]:
    """Every id past the ranks with its name; ids without one of their own are reserved."""
    named = {token_id: name for name, token_id in SPECIAL_IDS.items()}
    last = FIRST_SPECIAL + NUM_SPECIAL
    return {token_id: named.get(token_id, f"<|reserved_token_{token_id}|>") for token_id in range(FIRST_SPECIAL, last)}


def write_tokenizer(folder: Path, max_length: int) -> None:
    """Write tiktoken.model and tokenizer_config.json."""
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(RANKED)]
    (folder / "tiktoken.model").write_text("".join(lines), encoding="ascii")
    decoder = {
        str(token_id): {
            "content": name,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": name not in _VISIBLE,
        }
        for token_id, name in special_names().items()
    }
    config = {
        "added_tokens_decoder": decoder,
        "additional_special_tokens": ["<|end_of_msg|>"],
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        # Trained without a thinking channel: a chat that does not say gets none.
        "chat_template_kwargs": {"thinking": False},
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "tokenizer_class": "TikTokenTokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class ChatTokenizer:
    """The tokenizer read back from its files, with the one chat form that the model is trained on."""

    def __init__(self, folder: Path) -> None:
        lines = (folder / "tiktoken.model").read_text(encoding="ascii").splitlines()
        ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        self.special = {entry["content"]: int(key) for key, entry in config["added_tokens_decoder"].items()}
        self._encoding = tiktoken.Encoding(
            folder.name, pat_str=PRE_TOKENIZER, mergeable_ranks=ranks, special_tokens=self.special
        )

    def encode_text(self, text: str) -> list[int]:
        """Ordinary text: names of control tokens in it stay text."""
        return self._encoding.encode_ordinary(text)

    def encode_prompt(self, content: str) -> list[int]:
        """One user message and the opening of the assistant's response; each segment is encoded on its own."""
        return [
            *self._tag("<|open|>", 'message role="user"'),
            *self.encode_text(content),
            *self._tag("<|close|>", "message"),
            self.special["<|end_of_msg|>"],
            *self._tag("<|open|>", 'message role="assistant"'),
            *self._tag("<|open|>", "response"),
        ]

    def encode_answer(self, answer: str) -> list[int]:
        """The whole of what the model says: the answer, and the tags and token that end it."""
        return [
            *self.encode_text(answer),
            *self._tag("<|close|>", "response"),
            *self._tag("<|close|>", "message"),
            self.special["<|end_of_msg|>"],
        ]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._encoding.decode(list(tokens))

    def _tag(self, kind: str, text: str) -> list[int]:
        return [self.special[kind], *self.encode_text(text), self.special["<|sep|>"]]
