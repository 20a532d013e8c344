"""A prefill pod and a decode pod with a real transport between them."""

import os
import signal
import time
from pathlib import Path

import pytest
from kimi_worker.settings import HandoffSettings
from worker_pods import Answer, LaneClient, Pod, Pods, disturb, listening_ports, pod_settings, wait_until

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(600)]

TP2 = {"ranks_per_node": 2, "tensor_parallel": 2}


def start_pair(pods: Pods, checkpoint: Path, **changes: dict[str, object]) -> tuple[Pod, Pod]:
    prefill = pods.start(pod_settings(checkpoint, role="prefill", **changes), name="prefill")
    decode = pods.start(pod_settings(checkpoint, role="decode", **changes), name="decode")
    return prefill, decode


def endpoint(lane: LaneClient) -> str:
    assert lane.state is not None
    return lane.state.handoff


@pytest.fixture(scope="module")
def pair(module_pods: Pods, random_checkpoint: Path) -> tuple[Pod, Pod]:
    pair = start_pair(module_pods, random_checkpoint, parallel=TP2)
    for pod in pair:
        pod.wait_ready()
    return pair


@pytest.fixture
def lanes(pair: tuple[Pod, Pod]) -> tuple[LaneClient, LaneClient]:
    prefill, decode = (pod.client() for pod in pair)
    prefill.wait_ready()
    decode.wait_ready()
    return prefill, decode


def test_handed_off_answers_equal_those_of_one_process(
    lanes: tuple[LaneClient, LaneClient], prompts: dict[str, list[int]], reference: dict[str, Answer]
) -> None:
    prefill, decode = lanes
    for _ in range(3):
        ids = [decode.submit(prompt, endpoint(prefill), max_tokens=24, logprobs=0) for prompt in prompts.values()]
        for name, answer in zip(prompts, decode.finish(ids), strict=True):
            assert answer.failed is None
            assert answer.tokens == reference[name].tokens, name
            assert answer.logprobs == pytest.approx(reference[name].logprobs, abs=1e-3)
            assert answer.handoff_bytes > 0
    prefill.wait_idle()
    decode.wait_idle()


def test_seeded_sampling_does_not_depend_on_the_handoff(
    lanes: tuple[LaneClient, LaneClient], prompts: dict[str, list[int]]
) -> None:
    prefill, decode = lanes
    sampling = {"temperature": 1.0, "seed": 11, "max_tokens": 24}
    ids = [decode.submit(prompts["chunks"], where, **sampling) for where in (endpoint(prefill), None)]
    handed_off, alone = decode.finish(ids)
    assert handed_off.tokens == alone.tokens


def test_request_may_end_with_the_token_that_prefill_sampled(
    lanes: tuple[LaneClient, LaneClient], prompts: dict[str, list[int]], reference: dict[str, Answer]
) -> None:
    prefill, decode = lanes
    first = reference["chunks"].tokens[0]
    ids = [
        decode.submit(prompts["chunks"], endpoint(prefill), max_tokens=1),
        decode.submit(prompts["chunks"], endpoint(prefill), max_tokens=9, stop_token_ids=(first,)),
    ]
    short, stopped = decode.finish(ids)
    assert (short.tokens, short.finish_reason) == ([first], "length")
    assert (stopped.tokens, stopped.finish_reason) == ([first], "stop")
    prefill.wait_idle()
    decode.wait_idle()


def test_cancel_at_every_stage_frees_both_sides(
    lanes: tuple[LaneClient, LaneClient], prompts: dict[str, list[int]]
) -> None:
    """Some of these are queued, some reserved, some being computed or written, some active when they are cancelled."""
    prefill, decode = lanes
    for pause_s in (0.0, 0.01, 0.05, 0.1, 0.3):
        ids = [decode.submit(prompts["long"], endpoint(prefill), max_tokens=200) for _ in range(3)]
        ids += [decode.submit(prompts["short"], endpoint(prefill), max_tokens=200) for _ in range(3)]
        decode.receive(pause_s)
        for request_id in ids:
            decode.cancel(request_id)
        prefill.wait_idle()
        decode.wait_idle()


def test_no_stranger_ends_a_handoff_by_any_port(
    pair: tuple[Pod, Pod],
    lanes: tuple[LaneClient, LaneClient],
    prompts: dict[str, list[int]],
    reference: dict[str, Answer],
) -> None:
    """UCX's ports among them."""
    prefill, decode = lanes
    ports = set[int]().union(*map(listening_ports, pair))
    assert {pod.settings["ports"]["handoff"] for pod in pair} <= ports
    for _ in range(2):
        ids = [decode.submit(prompt, endpoint(prefill), max_tokens=24) for prompt in prompts.values()]
        for port in sorted(ports):
            disturb(port)
        for name, answer in zip(prompts, decode.finish(ids), strict=True):
            assert (answer.failed, answer.tokens) == (None, reference[name].tokens)
    prefill.wait_idle()
    decode.wait_idle()


def test_what_is_no_endpoint_is_an_error_of_its_request(pods: Pods, random_checkpoint: Path) -> None:
    settings = pod_settings(random_checkpoint, role="decode", handoff={"silence_s": 0.5})
    [decode] = pods.start(settings, name="decode").wait_ready()
    wrong = ["tcp://!:1", "tcp://prefill:29600", "tcp://127.0.0.1:0"]
    for name, answer in zip(wrong, decode.finish([decode.submit([1, 2, 3], name) for name in wrong]), strict=True):
        assert answer.failed is not None
        assert (answer.failed.code, name in answer.failed.message) == ("prefill_unreachable", True)
    decode.wait_idle()


def test_unreachable_prefill_lane_is_a_retryable_error(pods: Pods, random_checkpoint: Path) -> None:
    settings = pod_settings(random_checkpoint, role="decode", handoff={"reservation_timeout_s": 1.0})
    [decode] = pods.start(settings, name="decode").wait_ready()
    [answer] = decode.finish([decode.submit([1, 2, 3], "tcp://127.0.0.1:9")])
    assert answer.failed is not None
    assert answer.failed.retryable
    decode.wait_idle()


def test_lost_prefill_pod_fails_its_requests_and_leaks_nothing(pods: Pods, random_checkpoint: Path) -> None:
    """The prefill pod dies while it computes; another one takes new prompts at once."""
    # Small steps, so that a busy machine has the time to see the prompt being computed, and to end that
    first, decode_pod = start_pair(pods, random_checkpoint, limits={"max_num_batched_tokens": 4})
    spare = pods.start(pod_settings(random_checkpoint, role="prefill"), name="spare")
    [prefill], [decode], [other] = (pod.wait_ready() for pod in (first, decode_pod, spare))
    rank = first.children()["rank-0"]
    prompt = [1 + at % 250 for at in range(900)]
    ids = [decode.submit(prompt, endpoint(prefill), max_tokens=5)]
    wait_until(lambda: prefill.receive(0.01) or prefill.state.running, 30.0, "prefill computes")  # type: ignore[union-attr]
    os.kill(rank, signal.SIGKILL)
    [answer] = decode.finish(ids)
    assert answer.failed is not None
    assert answer.failed.retryable
    decode.wait_idle()
    [answer] = decode.finish([decode.submit(prompt, endpoint(other), max_tokens=5)])
    assert len(answer.tokens) == 5


SILENCE_S = 4.0
"""Shorter than a test may wait, longer than a loaded machine keeps a process from answering a ping."""


@pytest.fixture(scope="module")
def hasty_pair(module_pods: Pods, random_checkpoint: Path) -> tuple[Pod, Pod]:
    """A peer that is silent for `SILENCE_S` is lost."""
    pair = start_pair(module_pods, random_checkpoint, parallel=TP2, handoff={"silence_s": SILENCE_S})
    for pod in pair:
        pod.wait_ready()
    return pair


@pytest.mark.parametrize("slow", [0, 1], ids=["prefill", "decode"])
def test_a_step_longer_than_any_silence_loses_nothing(
    hasty_pair: tuple[Pod, Pod], prompts: dict[str, list[int]], reference: dict[str, Answer], slow: int
) -> None:
    """The leader of one lane waits in a collective for its stopped follower; its process still answers pings."""
    prefill, decode = (pod.client() for pod in hasty_pair)
    prefill.wait_ready()
    decode.wait_ready()
    decode.finish([decode.submit(prompts["short"], endpoint(prefill), max_tokens=2)])
    follower = hasty_pair[slow].children()["rank-1"]
    os.kill(follower, signal.SIGSTOP)
    try:
        # The second of them keeps a stopped decode lane in a step as well
        ids = [decode.submit(prompts["long"], endpoint(prefill), max_tokens=24)]
        ids.append(decode.submit(prompts["chunks"], max_tokens=24))
        # A connection may stand for one silence after its last answered ping, and be missed for another
        until = time.monotonic() + 3 * SILENCE_S
        while time.monotonic() < until:
            decode.receive(0.1)
            assert [decode.answers[request_id].failed for request_id in ids] == [None, None]
    finally:
        os.kill(follower, signal.SIGCONT)
    answers = decode.finish(ids)
    assert [answer.failed for answer in answers] == [None, None]
    assert [answer.tokens for answer in answers] == [reference[name].tokens for name in ("long", "chunks")]
    prefill.wait_idle()
    decode.wait_idle()


def test_a_stopped_prefill_process_is_found(hasty_pair: tuple[Pod, Pod], prompts: dict[str, list[int]]) -> None:
    """Stopped in full, as when its node loses power. It ends the fixture's pair: keep it last."""
    prefill, decode = (pod.client() for pod in hasty_pair)
    prefill.wait_ready()
    decode.wait_ready()
    leader = hasty_pair[0].children()["rank-0"]
    os.kill(leader, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        [answer] = decode.finish([decode.submit(prompts["short"], endpoint(prefill), max_tokens=2)])
        assert answer.failed is not None
        assert (answer.failed.code, answer.failed.retryable) == ("prefill_unreachable", True)
        assert time.monotonic() - begun < HandoffSettings().reservation_timeout_s / 2
        decode.wait_idle()
    finally:
        os.kill(leader, signal.SIGCONT)


@pytest.mark.parametrize("is_early", [True, False])
def test_early_notice_gives_wrong_answers(
    pods: Pods, random_checkpoint: Path, prompts: dict[str, list[int]], reference: dict[str, Answer], is_early: bool
) -> None:
    """The test-only switch brings back a known bug: Ready before the writes have landed. Tests must see it."""
    pair = start_pair(pods, random_checkpoint, faults={"notify_before_writes_land": is_early})
    [prefill], [decode] = (pod.wait_ready() for pod in pair)
    names = ["long", "chunks", "other", "last"] * 2
    wrong = 0
    for _ in range(3):
        ids = [decode.submit(prompts[name], endpoint(prefill), max_tokens=24) for name in names]
        answers = decode.finish(ids)
        assert all(answer.failed is None for answer in answers)
        wrong += sum(answer.tokens != reference[name].tokens for name, answer in zip(names, answers, strict=True))
    assert (wrong > 0) == is_early
