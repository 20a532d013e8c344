"""Measure recall of a saved checkpoint on real text prompts, and write the table.

    python examples/tiny-k3/evaluate.py examples/tiny-k3 --questions 200

An answer counts when every token of it, the six digits and all that ends it, is the most likely one. Each is judged
given the right tokens before it, so a whole answer that counts is what greedy decoding says.
"""

import argparse
import time
from pathlib import Path

import torch
from kimi_operator.cli.haystack import Needle, make_run
from tiny_k3.chat import ChatTokenizer
from tiny_k3.checkpoint import load_checkpoint
from tiny_k3.model import TinyK3

LENGTHS = (256, 512, 1024, 2048, 4096)


@torch.inference_mode()
def recall(model: TinyK3, tokenizer: ChatTokenizer, needles: list[Needle], tokens_per_batch: int = 8192) -> list[bool]:
    """Whether each needle is answered in full; all prompts must have one length."""
    prompts = [tokenizer.encode_prompt(needle.prompt_text) for needle in needles]
    answers = torch.tensor([tokenizer.encode_answer(needle.answer) for needle in needles])
    sequences = torch.cat([torch.tensor(prompts), answers], 1)
    right: list[bool] = []
    per_batch = max(1, tokens_per_batch // sequences.shape[1])
    for tokens, answer in zip(sequences.split(per_batch), answers.split(per_batch), strict=True):
        rows = model(tokens[:, :-1])[:, -answer.shape[1] :]
        right += (model.lm_head(rows).argmax(-1) == answer).all(-1).tolist()
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--questions", type=int, default=200, help="questions a length")
    parser.add_argument("--needles", type=int, default=2, help="needles a prompt")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model, tokenizer = load_checkpoint(arguments.checkpoint), ChatTokenizer(arguments.checkpoint)
    print("prompt tokens | right | of | seconds")
    for length in arguments.lengths:
        began = time.monotonic()
        needles = list(make_run(arguments.seed + length, [length] * arguments.questions, arguments.needles))
        right = recall(model, tokenizer, needles)
        print(f"{length:13} | {sum(right):5} | {len(right):2} | {time.monotonic() - began:.0f}", flush=True)


if __name__ == "__main__":
    main()
