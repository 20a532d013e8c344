"""Fixtures for tests that start several real processes."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "worker/model"))

from worker_pods import Answer, Pods, pod_settings, write_random_checkpoint

PROMPTS = {
    "short": [5, 9, 2],
    "page": list(range(40, 56)),
    "chunks": [1 + (7 * at) % 250 for at in range(150)],
    "long": [3 + (11 * at) % 240 for at in range(600)],
    "other": [2 + (13 * at) % 251 for at in range(90)],
    "last": [4 + (17 * at) % 243 for at in range(33)],
}
"""Of less than a page, exactly one, more than a step's tokens, many chunks, and some in between."""


@pytest.fixture(scope="session")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random-k3")
    write_random_checkpoint(folder)
    return folder


@pytest.fixture
def pods() -> Iterator[Pods]:
    with Pods() as pods:
        yield pods


@pytest.fixture(scope="module")
def module_pods() -> Iterator[Pods]:
    with Pods() as pods:
        yield pods


@pytest.fixture(scope="session")
def prompts() -> dict[str, list[int]]:
    return PROMPTS


@pytest.fixture(scope="session")
def reference(random_checkpoint: Path) -> dict[str, Answer]:
    """What one process answers to each prompt when it has nothing else to do: 24 greedy tokens with their logprobs."""
    with Pods() as pods:
        [client] = pods.start(pod_settings(random_checkpoint)).wait_ready()
        return {
            name: client.finish([client.submit(prompt, max_tokens=24, logprobs=0)])[0]
            for name, prompt in PROMPTS.items()
        }
