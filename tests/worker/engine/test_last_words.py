"""What a process of a pod leaves and logs when it fails: enough to mend it, and nothing of a prompt."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from kimi_worker.processes import read_last_words

PROMPT = "my-diary-of-1987"
FAILS = """
import sys
from pathlib import Path
from kimi_worker.engine.coordination import GroupLostError
from kimi_worker.logs import configure_logs
from kimi_worker.model.checkpoint import CheckpointError
from kimi_worker.processes import run_child

def place_of_the_bug():
    raise eval(sys.argv[2])

configure_logs("rank-0")
run_child("rank-0", Path(sys.argv[1]), "rank 0", place_of_the_bug)
"""


def fail(run_dir: Path, error: str) -> tuple[str, bool, str]:
    """Let a child process fail: its last words, whether it blames another one, and its log."""
    done = subprocess.run(
        [sys.executable, "-c", FAILS, str(run_dir), error], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stderr
    (said,) = read_last_words(run_dir)
    return said.message, said.is_consequence, done.stderr


@pytest.mark.parametrize("error", [f"ValueError({PROMPT!r})", f"KeyError({PROMPT!r})", f"AssertionError([{PROMPT!r}])"])
def test_a_bug_is_told_by_its_place(tmp_path: Path, error: str) -> None:
    message, is_consequence, log = fail(tmp_path, error)
    kind = error.partition("(")[0]
    assert message.startswith(f"rank 0: {kind} at ")
    assert message.endswith(" place_of_the_bug")
    assert PROMPT not in message + log
    (line,) = [json.loads(line) for line in log.splitlines()]
    assert (line["event"], line["errors"][0]["type"]) == ("process_failed", kind)
    assert line["errors"][0]["frames"][-1].endswith(" place_of_the_bug")
    assert not is_consequence


@pytest.mark.parametrize(
    "error",
    [
        "CheckpointError('config.json: no such file; mount the checkpoint')",
        "OSError(28, 'No space left on device')",
        "RuntimeError('HIP out of memory. Tried to allocate 20 MiB')",
    ],
)
def test_what_is_about_the_machine_is_told_in_its_words(tmp_path: Path, error: str) -> None:
    message, _, log = fail(tmp_path, error)
    words = error.split("'")[1]
    assert words in message
    assert words not in log, "the log names the place; the supervisor logs the message that it passes on"


def test_a_lost_peer_is_a_consequence(tmp_path: Path) -> None:
    assert fail(tmp_path, "GroupLostError('gone')")[:2] == ("rank 0: GroupLostError: gone", True)
