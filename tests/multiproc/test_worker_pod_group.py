"""A group of two pods: its lanes step together, and it lives and dies as one."""

import os
import signal
import time
from pathlib import Path

import pytest
from worker_pods import Answer, LaneClient, Pod, Pods, assert_idle, disturb, listening_ports, pod_settings

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def group(module_pods: Pods, random_checkpoint: Path) -> list[Pod]:
    """Four expert-parallel ranks, two tensor-parallel lanes, two pods."""
    parallel = {"nodes_per_group": 2, "ranks_per_node": 2, "tensor_parallel": 2}
    group = module_pods.start_group(pod_settings(random_checkpoint, parallel=parallel))
    for pod in group:
        pod.wait_ready()
    return group


@pytest.fixture
def lanes(group: list[Pod]) -> list[LaneClient]:
    lanes = [pod.client() for pod in group]
    for lane in lanes:
        lane.wait_ready()
    return lanes


def submit_all(lane: LaneClient, prompts: dict[str, list[int]]) -> list[str]:
    return [lane.submit(prompt, max_tokens=24, logprobs=0) for prompt in prompts.values()]


def assert_equal(answers: list[Answer], prompts: dict[str, list[int]], reference: dict[str, Answer]) -> None:
    for name, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == reference[name].tokens, name
        assert answer.logprobs == pytest.approx(reference[name].logprobs, abs=1e-3)


def test_both_lanes_answer_like_one_process(
    lanes: list[LaneClient], prompts: dict[str, list[int]], reference: dict[str, Answer]
) -> None:
    ids = [submit_all(lane, prompts) for lane in lanes]
    for lane, lane_ids in zip(lanes, ids, strict=True):
        assert_equal(lane.finish(lane_ids), prompts, reference)
        lane.wait_idle()


@pytest.mark.parametrize("busy", [0, 1])
def test_one_lane_works_while_the_other_has_nothing(
    lanes: list[LaneClient], prompts: dict[str, list[int]], reference: dict[str, Answer], busy: int
) -> None:
    idle = lanes[1 - busy]
    assert_equal(lanes[busy].finish(submit_all(lanes[busy], prompts)), prompts, reference)
    idle.wait_idle()


def test_many_short_waves_lose_no_wake_up(
    lanes: list[LaneClient], prompts: dict[str, list[int]], reference: dict[str, Answer]
) -> None:
    """Each request comes just as the wave of the one before it ends, from either side."""
    for turn in range(30):
        lane = lanes[turn % 2]
        [answer] = lane.finish([lane.submit(prompts["short"], max_tokens=1 + turn % 3)])
        assert answer.tokens == reference["short"].tokens[: 1 + turn % 3]


def test_idle_group_neither_polls_nor_spins(group: list[Pod], lanes: list[LaneClient]) -> None:
    for lane in lanes:
        lane.wait_idle()
    assert_idle(group, lanes[0])


def test_no_stranger_ends_the_group_by_any_port(
    group: list[Pod], lanes: list[LaneClient], prompts: dict[str, list[int]], reference: dict[str, Answer]
) -> None:
    """Every port that its processes listen on: ours, those of gloo, and that of torch's rendezvous store."""
    store = group[0].settings["ports"]["rendezvous"]
    ports = set[int]().union(*(listening_ports(pod) for pod in group))
    assert {group[0].settings["ports"]["coordinator"], group[0].settings["ports"]["api"], store} <= ports
    running = [submit_all(lane, prompts) for lane in lanes]
    for port in sorted(ports):
        disturb(port)
    for lane, ids in zip(lanes, running, strict=True):
        assert_equal(lane.finish(ids), prompts, reference)
    for port in sorted(ports):
        disturb(port)
    for lane in lanes:
        lane.wait_idle()
        assert_equal(lane.finish(submit_all(lane, prompts)), prompts, reference)


@pytest.mark.parametrize("is_busy", [False, True])
def test_dead_rank_ends_every_pod_of_its_group(pods: Pods, random_checkpoint: Path, is_busy: bool) -> None:
    settings = pod_settings(random_checkpoint, parallel={"nodes_per_group": 2})
    group = pods.start_group(settings)
    lanes = [pod.wait_ready()[0] for pod in group]
    if is_busy:
        running = lanes[0].submit([5, 9, 2], max_tokens=1000)
        lanes[0].wait(lambda: len(lanes[0].answers[running].tokens) > 3)
    victim, other = group[1 - is_busy], group[is_busy]
    begun = time.monotonic()
    os.kill(victim.children()["rank-0"], signal.SIGKILL)
    assert [victim.wait_end(), other.wait_end()] == [1, 1]
    assert time.monotonic() - begun < 15.0
    assert victim.message == f"rank {victim.ordinal}: killed by SIGKILL"
    assert other.message.startswith(f"rank {other.ordinal}: ")
    assert "CollectiveError" in other.message if is_busy else "left the group" in other.message


def test_group_drains_together(pods: Pods, random_checkpoint: Path) -> None:
    """One pod is told to end; the other one's request needs both, so both finish it first."""
    group = pods.start_group(pod_settings(random_checkpoint, parallel={"nodes_per_group": 2}))
    lanes = [pod.wait_ready()[0] for pod in group]
    running = lanes[1].submit([5, 9, 2], max_tokens=300)
    lanes[1].wait(lambda: lanes[1].answers[running].tokens)
    group[0].terminate()
    lanes[1].wait(lambda: lanes[1].state is not None and lanes[1].state.draining)
    [late] = lanes[1].finish([lanes[1].submit([1, 2, 3])])
    assert late.failed is not None
    assert late.failed.code == "draining"
    [done] = lanes[1].finish([running])
    assert len(done.tokens) == 300
    assert group[0].wait_end() == 0
    # The other pod is not ready, and waits for the operator to end it too.
    lanes[1].wait(lambda: lanes[1].state is not None and lanes[1].state.drained)
    assert group[1].process.poll() is None
