"""Sizes, token ids and file-level constants of the tiny model: the one place that fixes them."""

from dataclasses import dataclass
from pathlib import Path

WORDS_FILE = Path(__file__).resolve().parents[3] / "operator/kimi_operator/cli/words.txt"
WORDS = tuple(WORDS_FILE.read_text(encoding="utf-8").split())

# Every whole-word token beside the 256 single bytes; a token's id is its rank.
TEMPLATE_WORDS = (
    "message", "response", "think", "tools", "call", "argument", " role", " name", '="', "user", "assistant", "system",
    "tool", "Notes", "The", " The", "What", " What", " is", " the", " key", " of", "Answer", " Answer", " with", " six",
    " digits",
)  # fmt: skip
RANKED = tuple(bytes([value]) for value in range(256)) + tuple(
    text.encode() for text in (*TEMPLATE_WORDS, *(f" {word}" for word in WORDS))
)
NUM_SPECIAL = 37
FIRST_SPECIAL = len(RANKED)
VOCAB_SIZE = FIRST_SPECIAL + NUM_SPECIAL

# Offsets from the first special id are those of the released model; [UNK] and [PAD] are the last two, as there.
SPECIAL_OFFSETS = {
    "[BOS]": 0, "[EOS]": 1, "<|end_of_msg|>": 2, "<|open|>": 3, "<|close|>": 4, "<|sep|>": 5, "[start_header_id]": 6,
    "[end_header_id]": 7, "[EOT]": 9, "<|media_begin|>": 18, "<|media_content|>": 19, "<|media_end|>": 20,
    "<|media_pad|>": 21, "[UNK]": NUM_SPECIAL - 2, "[PAD]": NUM_SPECIAL - 1,
}  # fmt: skip
SPECIAL_IDS = {name: FIRST_SPECIAL + offset for name, offset in SPECIAL_OFFSETS.items()}
TOKEN_IDS = {token: rank for rank, token in enumerate(RANKED)}


def ids_of(*tokens: str) -> list[int]:
    """Ids of whole tokens, special ones by name; raises KeyError for text that is not one token."""
    return [SPECIAL_IDS[token] if token in SPECIAL_IDS else TOKEN_IDS[token.encode()] for token in tokens]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the model; the same names stand in config.json where the release has them."""

    vocab: int = VOCAB_SIZE
    hidden: int = 64
    layers: int = 5
    mla_layers: tuple[int, ...] = (3, 4)
    heads: int = 4
    kda_dim: int = 16
    q_lora: int = 32
    kv_lora: int = 32
    nope: int = 16
    rope: int = 16
    v_dim: int = 16
    dense: int = 128
    experts: int = 8
    top_k: int = 2
    latent: int = 32
    expert_width: int = 32
    shared_experts: int = 2
    attn_res_block: int = 3
    a_log_entries: int = 128
    eps: float = 1e-5
    lora_eps: float = 1e-6
    gate_lower_bound: float = -5.0
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
