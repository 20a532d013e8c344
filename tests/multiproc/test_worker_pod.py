"""One worker pod with all its processes: answers, limits, cancels, drains and every way to die."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from ports import free_ports
from worker_pods import END_S, Answer, LaneClient, Pod, Pods, alive, assert_idle, pod_settings, wait_until

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def pod(module_pods: Pods, random_checkpoint: Path) -> Pod:
    pod = module_pods.start(pod_settings(random_checkpoint))
    pod.wait_ready()
    return pod


@pytest.fixture
def lane(pod: Pod) -> LaneClient:
    client = pod.client()
    client.wait_ready()
    return client


def test_batched_answers_equal_those_of_lone_requests(
    lane: LaneClient, prompts: dict[str, list[int]], reference: dict[str, Answer]
) -> None:
    ids = [lane.submit(prompt, max_tokens=24, logprobs=0) for prompt in prompts.values()]
    for name, answer in zip(prompts, lane.finish(ids), strict=True):
        assert answer.tokens == reference[name].tokens, name
        assert answer.logprobs == pytest.approx(reference[name].logprobs, abs=1e-4)
        assert (answer.admitted, answer.finish_reason) == (True, "length")
    lane.wait_idle()


def test_seeded_sampling_repeats_and_seeds_differ(lane: LaneClient, prompts: dict[str, list[int]]) -> None:
    def sample(seed: int) -> str:
        return lane.submit(prompts["short"], temperature=1.0, seed=seed)

    first, second, other = lane.finish([sample(7), sample(7), sample(8)])
    assert first.tokens == second.tokens
    assert first.tokens != other.tokens


def test_cancel_frees_everything_in_every_phase(lane: LaneClient, prompts: dict[str, list[int]]) -> None:
    """Four run, the rest wait: one is cancelled while it decodes, one in the middle of its prompt, one in the queue."""
    for _ in range(20):
        if cancel_in_every_phase(lane, prompts["short"]):
            return
    raise AssertionError("each time the prompt was computed before it was cancelled")


def cancel_in_every_phase(lane: LaneClient, short: list[int]) -> bool:
    """False when this process, on a busy machine, saw or said it too late: after the prompt's last step."""
    decoding = lane.submit(short, max_tokens=1000)
    lane.wait(lambda: lane.answers[decoding].tokens)
    prefilling = lane.submit([1 + at % 200 for at in range(1000)], max_tokens=10)
    others = [lane.submit(short, max_tokens=1000) for _ in range(2)]
    waiting = lane.submit(short, max_tokens=10)
    prefilled, queued = lane.answers[prefilling], lane.answers[waiting]
    lane.wait(
        lambda: prefilled.tokens or (lane.state is not None and lane.state.waiting == 1 and lane.state.running == 4)
    )
    for request_id in (prefilling, waiting, decoding, *others):
        lane.cancel(request_id)
    lane.wait_idle()
    if prefilled.tokens:
        return False
    assert not queued.tokens
    return True


def test_full_queue_is_refused_and_what_was_admitted_is_answered(
    pod: Pod, lane: LaneClient, prompts: dict[str, list[int]]
) -> None:
    rank = pod.children()["rank-0"]
    os.kill(rank, signal.SIGSTOP)  # so that none ends before the last is there
    try:
        ids = [lane.submit(prompts["short"], max_tokens=40) for _ in range(20)]
    finally:
        os.kill(rank, signal.SIGCONT)
    answers = lane.finish(ids)
    refused = [answer.failed for answer in answers if answer.failed is not None]
    assert {failure.code for failure in refused} == {"queue_full"}
    assert all(failure.retryable for failure in refused)
    # 4 run and 8 wait at most; while the messages arrive one more may have been let in for each that ended.
    assert 8 <= len(answers) - len(refused) < 20
    assert all(len(answer.tokens) == 40 for answer in answers if answer.failed is None)
    lane.wait_idle()


def test_recycled_state_gives_wrong_answers(
    pods: Pods, random_checkpoint: Path, prompts: dict[str, list[int]], reference: dict[str, Answer]
) -> None:
    """The test-only switch brings back a known bug: a slot keeps its last owner's state. Tests must see it."""
    pod = pods.start(pod_settings(random_checkpoint, faults={"keep_recycled_state": True}))
    [lane] = pod.wait_ready()
    answers = lane.finish([lane.submit(prompt, max_tokens=24) for prompt in prompts.values()])
    assert any(answer.tokens != reference[name].tokens for name, answer in zip(prompts, answers, strict=True))


def test_prompt_without_room_for_an_answer_is_refused(lane: LaneClient) -> None:
    [answer] = lane.finish([lane.submit([1] * 1024)])
    assert answer.failed is not None
    assert (answer.failed.code, answer.failed.retryable) == ("prompt_too_long", False)
    assert "1024 tokens; at most 1023" in answer.failed.message


def test_preempted_requests_get_the_same_tokens(lane: LaneClient, prompts: dict[str, list[int]]) -> None:
    """Four requests want 84 pages, there are 80: the youngest is computed anew."""
    starts = [[seed, *prompts["long"][:269]] for seed in range(4)]
    alone = [lane.finish([lane.submit(start, max_tokens=60)])[0] for start in starts]
    before = lane.state.preemptions if lane.state is not None else 0
    together = lane.finish([lane.submit(start, max_tokens=60) for start in starts])
    assert [answer.tokens for answer in together] == [answer.tokens for answer in alone]
    lane.wait_idle()
    assert lane.state is not None
    assert lane.state.preemptions > before


def test_a_handoff_is_refused_by_a_lane_that_takes_none(lane: LaneClient) -> None:
    [answer] = lane.finish([lane.submit([1, 2, 3], prefill="tcp://127.0.0.1:1")])
    assert answer.failed is not None
    assert answer.failed.code == "engine_error"


def test_idle_pod_neither_polls_nor_spins(pod: Pod, lane: LaneClient) -> None:
    lane.wait_idle()
    assert_idle([pod], lane)


def test_draining_pod_finishes_what_runs_and_takes_nothing_new(pods: Pods, random_checkpoint: Path) -> None:
    pod = pods.start(pod_settings(random_checkpoint))
    [lane] = pod.wait_ready()
    running = lane.submit([5, 9, 2], max_tokens=600)
    lane.wait(lambda: lane.answers[running].tokens)
    pod.terminate()
    lane.wait(lambda: lane.state is not None and lane.state.draining)
    assert lane.state is not None
    assert not lane.state.ready
    [late] = lane.finish([lane.submit([1, 2, 3])])
    assert late.failed is not None
    assert (late.failed.code, late.failed.retryable) == ("draining", True)
    [done] = lane.finish([running])
    assert len(done.tokens) == 600
    assert (pod.wait_end(), pod.message) == (0, "")


@pytest.mark.parametrize("how", ["timeout", "second signal"])
def test_drain_that_takes_too_long_ends_with_a_message(pods: Pods, random_checkpoint: Path, how: str) -> None:
    drain_s = 0.3 if how == "timeout" else 60.0
    pod = pods.start(pod_settings(random_checkpoint, timeouts={"drain_s": drain_s}))
    [lane] = pod.wait_ready()
    running = lane.submit([5, 9, 2], max_tokens=1000)
    lane.wait(lambda: lane.answers[running].tokens)
    pids = pod.children().values()
    pod.terminate()
    if how == "second signal":
        lane.wait(lambda: lane.state is not None and lane.state.draining)
        pod.terminate()
    assert pod.wait_end() == 1
    expected = "1 requests were still under way after 0.3 s" if how == "timeout" else "told to end twice"
    assert expected in pod.message
    assert alive(pids) == []


@pytest.mark.parametrize("victim", ["rank-1", "api"])
def test_one_dead_process_ends_an_idle_pod(pods: Pods, random_checkpoint: Path, victim: str) -> None:
    """Nothing but the death itself can be noticed."""
    pod = pods.start(pod_settings(random_checkpoint, parallel={"ranks_per_node": 2, "tensor_parallel": 2}))
    pod.wait_ready()
    children = pod.children()
    assert children.keys() == {"ranks", "rank-0", "rank-1", "api"}
    begun = time.monotonic()
    os.kill(children[victim], signal.SIGKILL)
    assert pod.wait_end() == 1
    assert time.monotonic() - begun < 10.0
    assert pod.message == f"{victim.replace('rank-', 'rank ')}: killed by SIGKILL"
    assert alive(children.values()) == []


def test_dead_rank_ends_a_busy_pod_and_is_named(pods: Pods, random_checkpoint: Path) -> None:
    """Its peer fails in a collective at the same moment; the message is about the cause."""
    pod = pods.start(pod_settings(random_checkpoint, parallel={"ranks_per_node": 2, "tensor_parallel": 2}))
    [lane] = pod.wait_ready()
    running = lane.submit([5, 9, 2], max_tokens=1000)
    lane.wait(lambda: len(lane.answers[running].tokens) > 3)
    os.kill(pod.children()["rank-1"], signal.SIGKILL)
    assert pod.wait_end() == 1
    assert pod.message == "rank 1: killed by SIGKILL"


def test_killed_supervisor_leaves_nothing_and_a_restart_in_place_waits(pods: Pods, random_checkpoint: Path) -> None:
    pod = pods.start(pod_settings(random_checkpoint, parallel={"ranks_per_node": 2, "tensor_parallel": 2}))
    pod.wait_ready()
    pids = list(pod.children().values())
    pod.process.kill()
    pod.wait_end()
    wait_until(lambda: not alive(pids), END_S, f"the children {pids} are gone")
    pod.start()
    wait_until(lambda: "container_restarted_in_place" in pod.log.read_text(), 60.0, "the second run has started")
    assert pod.children() == {}
    pod.terminate()
    assert pod.wait_end() == 0


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda settings: settings["model"].update(checkpoint="/nowhere"), "/nowhere/config.json: No such file"),
        (lambda settings: settings["model"].update(max_model_len=5000), "limits.num_pages"),
        (lambda settings: settings["limits"].update(max_num_seq=3), "limits.max_num_seq: Extra inputs"),
        (
            lambda settings: settings["parallel"].update(ranks_per_node=3),
            "num_experts 8 is not a multiple of the group's 3 ranks",
        ),
    ],
)
def test_impossible_settings_end_the_pod_before_it_starts(
    pods: Pods, random_checkpoint: Path, spoil: object, expected: str
) -> None:
    settings = pod_settings(random_checkpoint)
    assert callable(spoil)
    spoil(settings)
    pod = pods.start(settings)
    assert pod.wait_end(120.0) == 1
    assert expected in pod.message
    assert not (pod.run_dir / "started").exists()


def test_rank_that_cannot_start_says_why(pods: Pods, random_checkpoint: Path) -> None:
    """The second pod of this group never comes."""
    settings = pod_settings(random_checkpoint, parallel={"nodes_per_group": 2}, timeouts={"group_start_s": 4.0})
    pod = pods.start(settings)
    assert pod.wait_end(120.0) == 1
    assert pod.message.startswith("rank 0: CollectiveError: ")
    assert "ranks [1] of 2 were not present within 4 s" in pod.message


def test_preflight_prints_its_findings_or_the_fault(random_checkpoint: Path, tmp_path: Path) -> None:
    settings = tmp_path / "worker.json"
    command = [sys.executable, "-m", "kimi_worker", "preflight", "--settings", str(settings)]
    settings.write_text(json.dumps(pod_settings(random_checkpoint)))
    good = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(good.stdout)["experts_per_rank"] == 8
    settings.write_text(json.dumps(pod_settings(tmp_path)))
    bad = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert bad.returncode == 1
    assert f"{tmp_path}/config.json" in bad.stderr.splitlines()[-1]


def test_standalone_serves_from_one_process_and_leaves_nothing(random_checkpoint: Path, tmp_path: Path) -> None:
    [port] = free_ports(1)
    log = (tmp_path / "log").open("wb")
    command = [
        sys.executable,
        "-m",
        "kimi_worker",
        "serve",
        "--standalone",
        str(random_checkpoint),
        "--port",
        str(port),
    ]
    process = subprocess.Popen(command, stderr=log)

    def is_ready() -> bool:
        assert process.poll() is None, (tmp_path / "log").read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=1):
                return True
        except OSError:
            return False

    try:
        wait_until(is_ready, 300.0, "ready")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/state", timeout=60) as answer:
            state = json.load(answer)
        assert [lane["max_num_seqs"] for lane in state["lanes"]] == [8]
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        log.close()


def test_router_and_supervisor_never_load_torch() -> None:
    code = (
        "import sys, kimi_worker.__main__, kimi_worker.supervisor, kimi_worker.preflight, kimi_worker.router.app;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
