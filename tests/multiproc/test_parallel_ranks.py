"""Groups of several rank processes compute what one process computes.

Run as a script, this file is the rank processes: it imports torch once and forks one child a rank.
"""

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from kimi_worker.engine.runner import Runner
from kimi_worker.parallel.groups import CollectiveError, Groups, Rendezvous, connect
from kimi_worker.parallel.ranks import RankPlace, place
from kimi_worker.protocol.step import SequenceStep, StepPlan
from kimi_worker.settings import ParallelSettings, WorkerSettings
from ports import free_ports

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(500)]

LOGPROB_BOUND = 1e-4
"""Largest difference of any log-probability between a group and one process, float32: sums come in another order."""
# Generous, because importing torch in a busy machine's processes takes its time; no test waits for them to pass.
START_TIMEOUT_S = 240.0
COLLECTIVE_TIMEOUT_S = 120.0
JOB_TIMEOUT_S = 400.0
PAGE_SIZE = 16
NUM_PAGES = 64
VOCAB = 90


@dataclass
class Job:
    """What a group of rank processes is to do. `plans[step][lane]` is a StepPlan as JSON."""

    checkpoint: str
    out: str
    port: int
    parallel: dict[str, int]
    plans: list[list[Any]]
    dies: dict[str, int] = field(default_factory=dict)
    """Rank (as text) to the step before which it kills itself."""


def settings_for(checkpoint: str, parallel: dict[str, int]) -> WorkerSettings:
    return WorkerSettings.model_validate(
        {
            "deployment": "test",
            "role": "both",
            "model": {"checkpoint": checkpoint, "served_name": "tiny", "max_model_len": 512},
            "parallel": parallel,
            "limits": {"max_num_seqs": 8, "num_pages": NUM_PAGES, "page_size_tokens": PAGE_SIZE, "num_state_slots": 8},
        }
    )


def run_rank(job: Job, rank: int) -> None:
    """The life of one rank process: meet, load, run all steps, save what the leader saw."""
    started = time.monotonic()
    settings = settings_for(job.checkpoint, job.parallel)
    here = place(settings.parallel, *divmod(rank, settings.parallel.ranks_per_node))
    meeting = Rendezvous("127.0.0.1", job.port, "127.0.0.1", 3, "gloo", START_TIMEOUT_S, COLLECTIVE_TIMEOUT_S)
    groups = connect(here, torch.device("cpu"), meeting)
    runner = Runner(settings, groups)
    runner.load()
    assert groups.sum_over_group(rank + 1) == math.comb(here.world_size + 1, 2)
    arrays: dict[str, np.ndarray] = {}
    try:
        for step, lanes in enumerate(job.plans):
            if job.dies.get(str(rank)) == step:
                os._exit(9)
            started = time.monotonic()
            logits = runner.execute(msgspec.convert(lanes[here.lane], StepPlan))
            assert (logits is None) == (not here.is_leader)
            if logits is not None:
                arrays[f"logits-{step}"] = logits.numpy()
        arrays["pages"] = runner.caches.pages.numpy()
    except CollectiveError as error:
        outcome = {"error": str(error), "seconds": time.monotonic() - started}
        Path(job.out, f"error-{rank}.json").write_text(json.dumps(outcome))
        os._exit(3)
    np.savez(Path(job.out, f"rank-{rank}.npz"), **arrays)
    groups.close()


def main(path: str) -> None:
    """Fork the ranks and exit with status 1 when one of them failed."""
    job = Job(**json.loads(Path(path).read_text()))
    children = []
    for rank in range(ParallelSettings.model_validate(job.parallel).world_size):
        pid = os.fork()
        if pid == 0:
            run_rank(job, rank)
            os._exit(0)
        children.append(pid)
    statuses = []
    while children:
        pid, status = os.wait()
        children.remove(pid)
        statuses.append(os.waitstatus_to_exitcode(status))
        if statuses[-1] and not job.dies:
            # Nobody planned this end, so the others would only wait for their timeouts.
            for child in children:
                os.kill(child, signal.SIGKILL)
    sys.exit(next((1 for status in statuses if status), 0))


# --- the tests -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    import checkpoint_factory  # noqa: PLC0415 - on the path of the tests, not of the rank processes

    folder = tmp_path_factory.mktemp("checkpoint")
    checkpoint_factory.write_checkpoint(folder, seed=5)
    return str(folder)


def run_group(job: Job) -> int:
    """Run the ranks to their end and return the exit status; nothing is left running."""
    path = Path(job.out, "job.json")
    path.write_text(json.dumps(asdict(job)))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, __file__, str(path)],
        env=environment,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            _, errors = process.communicate(timeout=JOB_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            _, errors = process.communicate()
            pytest.fail(f"rank processes had not ended after {JOB_TIMEOUT_S:.0f} s:\n{errors}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode and not job.dies:
        pytest.fail(f"rank processes ended with status {process.returncode}:\n{errors}")
    return process.returncode


def random_load(seed: int, num_steps: int) -> list[StepPlan]:
    """Plans of one lane: up to four sequences advance by random pieces; some steps have none."""
    rng = random.Random(seed)
    sequences = [[rng.randrange(VOCAB) for _ in range(rng.randint(20, 60))] for _ in range(4)]
    done = [0] * len(sequences)
    plans = []
    for step in range(num_steps):
        steps = []
        for i, tokens in enumerate(sequences):
            left = len(tokens) - done[i]
            if not left or rng.random() < 0.4:
                continue
            count = min(left, rng.choice([1, 1, 2, 7, 19]))
            pages = list(range(i * 4, i * 4 + -(-(done[i] + count) // PAGE_SIZE)))
            steps.append(SequenceStep(tokens[done[i] : done[i] + count], done[i], pages, i, rng.random() < 0.8))
            done[i] += count
        plans.append(StepPlan(step, steps))
    return plans


def one_process(checkpoint: str, plans: list[StepPlan]) -> list[np.ndarray]:
    runner = Runner(settings_for(checkpoint, {}), Groups(RankPlace(0, 1, 1, 1), torch.device("cpu")))
    runner.load()
    results = []
    for plan in plans:
        logits = runner.execute(plan)
        assert logits is not None
        results.append(logits.numpy())
    return results


def logprobs(logits: np.ndarray) -> np.ndarray:
    return torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy()


SHAPES = {
    "TP2": {"nodes_per_group": 1, "ranks_per_node": 2, "tensor_parallel": 2},
    "EP2": {"nodes_per_group": 2, "ranks_per_node": 1, "tensor_parallel": 1},
    "EP4, TP2": {"nodes_per_group": 2, "ranks_per_node": 2, "tensor_parallel": 2},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_group_equals_one_process(shape: str, checkpoint: str, tmp_path: Path) -> None:
    parallel = SHAPES[shape]
    num_lanes = parallel["nodes_per_group"] * parallel["ranks_per_node"] // parallel["tensor_parallel"]
    loads = [random_load(seed, num_steps=12) for seed in range(num_lanes)]
    # Lanes differ in load; one is idle for whole stretches, and every lane is idle at the end.
    loads = [
        [*renumbered([StepPlan(i, []) if lane and i < 3 else plan for i, plan in enumerate(load)]), StepPlan(12, [])]
        for lane, load in enumerate(loads)
    ]
    plans = [[msgspec.to_builtins(load[step]) for load in loads] for step in range(13)]
    run_group(Job(checkpoint, str(tmp_path), *free_ports(1), parallel, plans))
    differences = []
    for lane, load in enumerate(loads):
        leader = lane * parallel["tensor_parallel"]
        got = np.load(tmp_path / f"rank-{leader}.npz")
        for step, want in enumerate(one_process(checkpoint, load)):
            assert got[f"logits-{step}"].shape == want.shape
            if want.size:
                differences.append(np.abs(logprobs(got[f"logits-{step}"]) - logprobs(want)).max())
        for follower in range(leader + 1, leader + parallel["tensor_parallel"]):
            # Latent rows are replicated over the lane: a follower that drifted would show here.
            np.testing.assert_array_equal(np.load(tmp_path / f"rank-{follower}.npz")["pages"], got["pages"])
    assert len(differences) > 6
    print(f"{shape}: largest log-probability difference {max(differences):.1e}")
    assert max(differences) < LOGPROB_BOUND


def renumbered(load: list[StepPlan]) -> list[StepPlan]:
    """Make a lane's plans consistent again after some were emptied: what was left out is recomputed later, in order."""
    done: dict[int, int] = {}
    plans = []
    for plan in load:
        steps = []
        for sequence in plan.sequences:
            at = done.get(sequence.slot, 0)
            length = at + len(sequence.token_ids)
            first = sequence.slot * 4
            pages = list(range(first, first + -(-length // PAGE_SIZE)))
            steps.append(msgspec.structs.replace(sequence, num_cached=at, page_ids=pages))
            done[sequence.slot] = length
        plans.append(StepPlan(plan.step, steps))
    return plans


def test_a_dead_rank_ends_the_others_promptly(checkpoint: str, tmp_path: Path) -> None:
    load = renumbered(random_load(seed=1, num_steps=8))
    plans = [[msgspec.to_builtins(plan)] * 2 for plan in load]
    status = run_group(Job(checkpoint, str(tmp_path), *free_ports(1), SHAPES["EP4, TP2"], plans, dies={"3": 4}))
    assert status != 0
    for rank in range(3):
        outcome = json.loads((tmp_path / f"error-{rank}.json").read_text())
        assert "a rank has died or hangs" in outcome["error"]
        # Well before the collective's own timeout: the closed socket tells.
        assert outcome["seconds"] < COLLECTIVE_TIMEOUT_S / 2


def test_a_missing_rank_is_named_at_the_start() -> None:
    meeting = Rendezvous("127.0.0.1", *free_ports(1), "127.0.0.1", 1, "gloo", 4.0, 30.0)
    with pytest.raises(CollectiveError, match=r"rank 0 \(generation 1\): ranks \[1\] of 2 were not present within 4 s"):
        connect(RankPlace(0, 2, 2, 1), torch.device("cpu"), meeting)


if __name__ == "__main__":
    main(sys.argv[1])
