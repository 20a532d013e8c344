"""Whether prefill pods can write into a decode pod is found out by itself, over the real transport."""

import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from worker_pods import END_S, Answer, Pod, Pods, assert_idle, pod_settings, wait_until

pytestmark = [pytest.mark.multiproc, pytest.mark.timeout(600)]

TP2 = {"ranks_per_node": 2, "tensor_parallel": 2}


def fabric(pod: Pod) -> Any:
    url = f"http://127.0.0.1:{pod.settings['ports']['api']}/state"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)["fabric"]


def start_pair(pods: Pods, checkpoint: Path, **changes: Any) -> tuple[Pod, Pod]:
    """The decode pod finds the prefill pod by the name of its service."""
    settings = pod_settings(checkpoint, role="prefill", **changes)
    peers = {"service": "127.0.0.1", "port": settings["ports"]["handoff"], "lanes_per_pod": 1}
    decode = pods.start(pod_settings(checkpoint, role="decode", handoff={"peers": peers}, **changes), name="decode")
    return pods.start(settings, name="prefill"), decode


def test_fabric_is_verified_before_the_first_request_without_polling(
    pods: Pods, random_checkpoint: Path, prompts: dict[str, list[int]], reference: dict[str, Answer]
) -> None:
    prefill_pod, decode_pod = start_pair(pods, random_checkpoint, parallel=TP2)
    [prefill], [decode] = (pod.wait_ready() for pod in (prefill_pod, decode_pod))
    wait_until(lambda: fabric(decode_pod)["verified"], END_S, "the test write arrives")
    assert fabric(decode_pod) == {"peers": 1, "verified": 1, "error": ""}
    assert fabric(prefill_pod) == {"peers": 0, "verified": 0, "error": ""}
    assert_idle([prefill_pod, decode_pod], decode)
    assert prefill.state is not None
    [answer] = decode.finish([decode.submit(prompts["long"], prefill.state.handoff, max_tokens=24)])
    assert answer.tokens == reference["long"].tokens
    decode.wait_idle()


def test_prefill_pod_that_is_gone_is_named(pods: Pods, random_checkpoint: Path) -> None:
    prefill, decode = start_pair(pods, random_checkpoint)
    [lane] = decode.wait_ready()
    prefill.wait_ready()
    wait_until(lambda: fabric(decode)["verified"] == 1, END_S, "the test write arrives")
    assert lane.state is not None
    rank = prefill.children()["rank-0"]
    os.kill(rank, signal.SIGKILL)
    prefill.wait_end()
    # Nothing is sent at rest; the next request finds out
    [answer] = lane.finish([lane.submit([1, 2, 3], f"tcp://127.0.0.1:{prefill.settings['ports']['handoff']}")])
    assert answer.failed is not None
    wait_until(lambda: fabric(decode)["verified"] == 0, END_S, "the peer is known to be gone")
    assert "has been silent" in fabric(decode)["error"]
