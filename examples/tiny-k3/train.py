"""Train the tiny Kimi-K3 to recall needles; resumable, on one or two CPU cores.

    python examples/tiny-k3/train.py

A run that was ended goes on from the last save of its folder. At the end the checkpoint is written beside this script.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tiny_k3.checkpoint import save_checkpoint
from tiny_k3.data import Batch, Mixture, make_batch
from tiny_k3.model import Moe, TinyK3
from tiny_k3.sizes import Sizes
from torch import Tensor
from torch.nn import functional

WARMUP_STEPS = 100
ROUTER_BIAS_STEP = 1e-3
ENDING_WEIGHT = 0.1
"""Share of the loss on the tokens that end an answer; they are learnt in a few steps and then cost nothing."""
FIRST_DIGIT_WEIGHT = 3.0
LOG_EVERY = 7
SAVE_EVERY = 100


@dataclass(frozen=True, slots=True)
class Phase:
    """From this step on, batches are drawn from these mixtures in turn."""

    first_step: int
    mixtures: tuple[Mixture, ...]
    tokens_per_step: int


PHASES = (
    # Values of one digit, told many times: the densest form of the task. A long value can be continued from its own
    # digits, and with those at hand from the start the look-up by key is not learnt.
    Phase(0, (Mixture(128, 4, 8, 0, digits=1),), 2560),
    # The key must be carried from a question through the chat template to the answer.
    Phase(200, (Mixture(128, 3, 5, 0), Mixture(160, 3, 1, 2)), 2560),
    Phase(400, (Mixture(160, 3, 1, 2), Mixture(256, 4, 2, 2), Mixture(320, 6, 2, 3)), 2560),
    Phase(900, (Mixture(256, 6, 0, 2), Mixture(320, 6, 2, 3), Mixture(512, 8, 0, 4), Mixture(512, 4, 0, 4)), 4096),
    # The second cycle: values as the text prompts have them, and some long conversations.
    Phase(
        2000,
        (
            Mixture(256, 4, 0, 2, unlike=True),
            Mixture(320, 6, 0, 4, unlike=True),
            Mixture(512, 4, 0, 4, unlike=True),
            Mixture(512, 8, 0, 6, unlike=True),
            Mixture(1024, 6, 0, 6, unlike=True),
        ),
        4096,
    ),
    Phase(
        3000,
        (
            Mixture(256, 4, 0, 3, unlike=True),
            Mixture(384, 6, 0, 5, unlike=True),
            Mixture(512, 4, 0, 4, unlike=True),
            Mixture(512, 6, 0, 6, unlike=True),
            Mixture(1024, 4, 0, 4, unlike=True),
        ),
        4096,
    ),
)


@dataclass(frozen=True, slots=True)
class Cycle:
    """The learning rate up to this step: a short rise, then constant, then in a straight line to zero."""

    end_step: int
    rate: float
    decay_steps: int


# The first cycle learns the task, the others make it sure.
CYCLES = (Cycle(2000, 4e-3, 800), Cycle(3000, 3e-3, 1000), Cycle(3800, 2e-3, 800))
NUM_STEPS = CYCLES[-1].end_step
ROUNDING_FIRST_STEP = 1600
"""From this step on the experts are rounded to MXFP4 in the forward pass."""


def learning_rate(step: int) -> float:
    begin = 0
    for cycle in CYCLES:
        if step < cycle.end_step:
            rise, fall = (step - begin + 1) / WARMUP_STEPS, (cycle.end_step - step) / cycle.decay_steps
            return cycle.rate * min(1.0, rise, fall)
        begin = cycle.end_step
    return 0.0


def draw(step: int, seed: int) -> Batch:
    """The batch of a step; a function of seed and step alone, so that a resumed run sees the same data."""
    phase = [phase for phase in PHASES if step >= phase.first_step][-1]
    mixture = phase.mixtures[step % len(phase.mixtures)]
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    return make_batch(mixture, phase.tokens_per_step // mixture.tokens, generator)


def losses(model: TinyK3, batch: Batch) -> dict[str, Tensor]:
    """Mean loss on answer digits and on endings (0 without any), shares of digits and of first digits that are right.

    A first digit counts FIRST_DIGIT_WEIGHT times: it alone needs the key.
    """
    rows = model(batch.tokens[:, :-1])
    targets = batch.tokens[:, 1:]
    known, first, ending = (mask[:, 1:] for mask in (batch.answer, batch.first, batch.ending))
    logits = model.lm_head(rows[known])
    weight = torch.where(first[known], FIRST_DIGIT_WEIGHT, 1.0)
    digits = (functional.cross_entropy(logits, targets[known], reduction="none") * weight).sum() / weight.sum()
    right = (logits.argmax(-1) == targets[known]).float()
    endings = digits.new_zeros(())
    if ending.any():
        endings = functional.cross_entropy(model.lm_head(rows[ending]), targets[ending])
    return {"digits": digits, "endings": endings, "right": right.mean(), "first": right[first[known]].mean()}


def balance_routers(model: TinyK3) -> None:
    """Move each router's bias against the load that its experts had in this step."""
    for module in model.modules():
        if isinstance(module, Moe):
            load = module.gate.load
            module.gate.e_score_correction_bias += ROUTER_BIAS_STEP * torch.sign(load.mean() - load)
            load.zero_()


def make_optimizer(model: TinyK3) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim > 1 and p.shape[0] > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1 or p.shape[0] == 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=CYCLES[0].rate, betas=(0.9, 0.95), foreach=True)


def save(path: Path, model: TinyK3, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write next to the old file and rename, so that a killed run leaves a whole one."""
    temporary = path.with_suffix(".new")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, temporary)
    temporary.replace(path)


def train(run_dir: Path, num_steps: int, seed: int) -> TinyK3:
    """Train from the last save in run_dir, or from the start; one JSON line of progress every LOG_EVERY steps."""
    torch.manual_seed(seed)
    model = TinyK3(Sizes())
    optimizer = make_optimizer(model)
    run_dir.mkdir(parents=True, exist_ok=True)
    last = run_dir / "last.pt"
    first = 0
    if last.exists():
        state = torch.load(last, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    model.train()
    with (run_dir / "log.jsonl").open("a", encoding="utf-8") as log:
        for step in range(first, num_steps):
            report = train_step(model, optimizer, step, seed)
            if step % LOG_EVERY == 0:
                line = json.dumps({"step": step + 1, "at_s": round(time.process_time(), 1), **report})
                print(line, file=log, flush=True)
                print(f"{step + 1} of {num_steps} steps: {line}", flush=True)
            if (step + 1) % SAVE_EVERY == 0 or step + 1 == num_steps:
                save(last, model, optimizer, step + 1)
    return model.eval()


def train_step(model: TinyK3, optimizer: torch.optim.Optimizer, step: int, seed: int) -> dict[str, float]:
    rate = learning_rate(step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    for module in model.modules():
        if isinstance(module, Moe):
            module.rounds_experts = step >= ROUNDING_FIRST_STEP
    batch = draw(step, seed)
    parts = losses(model, batch)
    optimizer.zero_grad()
    (parts["digits"] + ENDING_WEIGHT * parts["endings"]).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    balance_routers(model)
    values = {name: value.item() for name, value in parts.items()} | {"norm": norm.item(), "rate": rate}
    return {name: round(value, 5) for name, value in values.items()} | {"tokens": batch.tokens.shape[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, default=Path(".train"), help="log and resumable state")
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="cores to use; 1 is faster than 2 on a busy machine")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent, help="folder of the checkpoint")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = train(arguments.run_dir, arguments.steps, arguments.seed)
    save_checkpoint(model, arguments.out)


if __name__ == "__main__":
    main()
