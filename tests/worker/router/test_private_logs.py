"""A bug that raises errors with a prompt in them: the logs tell what and where, and nothing of the prompt."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kimi_worker.server.private_logs import places
from ports import free_ports
from replay_fixtures import router_settings, worker_settings
from stub_pods import client, until_up

SCRIPT = Path(__file__).parent / "broken_process.py"
PROMPT = "my-diary-of-1987"


@pytest.fixture(params=["router", "api"])
def broken(request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """URL and log of the process."""
    [port], nobody = free_ports(1), "127.0.0.1:1"
    if request.param == "router":
        settings = router_settings([], [], port=port, prefill_service=nobody, decode_service=nobody)
        text = settings.model_dump_json()
    else:
        api = worker_settings(checkpoint, role="decode", num_lanes=1, max_model_len=512).model_dump(mode="json")
        text = json.dumps({**api, "ports": {**api["ports"], "api": port}})
    (tmp_path / "settings.json").write_text(text)
    log = tmp_path / "log"
    command = [sys.executable, str(SCRIPT), request.param, str(tmp_path / "settings.json"), str(tmp_path)]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        yield f"http://127.0.0.1:{port}", log
    finally:
        process.kill()
        process.wait()


def log_lines(log: Path) -> list[dict[str, Any]]:
    """Every line is one object; the last may not be complete yet."""
    return [json.loads(line) for line in log.read_text().split("\n")[:-1]]


@pytest.mark.multiproc
async def test_a_bug_is_logged_by_its_place(broken: tuple[str, Path]) -> None:
    url, log = broken
    wanted = {"ValueError", "KeyError", "LookupError", "AttributeError", "ArithmeticError"}
    async with client(url) as http:
        await until_up(http, "/health")
        async with asyncio.timeout(60):
            # a task that nobody waited for is noticed when its memory is collected
            while True:
                reply = await http.post("/v1/completions", json={"prompt": PROMPT})
                errors = [error for line in log_lines(log) for error in line.get("errors", [])]
                if wanted <= {error["type"] for error in errors}:
                    break
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
    assert reply.headers["connection"] == "close"
    assert PROMPT not in reply.text
    assert PROMPT not in log.read_text()
    raised_in = {error["type"]: error["frames"][-1].partition(f"{SCRIPT}:")[2] for error in errors}
    assert {kind: place.split(" ")[1] for kind, place in raised_in.items() if kind in wanted} == {
        "ValueError": "broken_read_body",
        "KeyError": "broken_read_body",
        "LookupError": "fail_unheard",
        "AttributeError": "fail_in_callback",
        "ArithmeticError": "Unlucky.__del__",
    }
    told = {line["text"] for line in log_lines(log) if "text" in line}
    assert {
        "Exception in ASGI application",
        "Exception in callback",
        "Task exception was never retrieved",
        "cannot look up %s",
    } <= told


def nested(depth: int) -> None:
    if depth:
        nested(depth - 1)
    raise ExceptionGroup(PROMPT, [OSError(PROMPT), ValueError(PROMPT)])


def test_groups_and_deep_recursions_are_told_too() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        nested(100)
    group, *members = places(caught.value)
    assert group["type"] == "ExceptionGroup"
    assert {member["type"] for member in members} == {"OSError", "ValueError"}
    frames = group["frames"]
    assert isinstance(frames, list)
    assert len(frames) == 30
    assert frames[-1].endswith(" nested")
    assert PROMPT not in str(places(caught.value))


def test_a_circle_of_causes_ends() -> None:
    first, second = ValueError(PROMPT), KeyError(PROMPT)
    first.__cause__, second.__cause__ = second, first
    assert [error["type"] for error in places(first)] == ["ValueError", "KeyError"]
    assert places(None) == []
