"""`kimictl` with standard streams that are closed or full: the exit status is that of the answer, not of the stream."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MI300X = Path(__file__).resolve().parents[3] / "examples" / "mi300x-2p2d.yaml"
KIMICTL = Path(sys.executable).parent / "kimictl"
TIMEOUT_S = 60
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")


def shell(line: str) -> tuple[int, str]:
    """Exit status and what standard error got."""
    done = subprocess.run(
        ["sh", "-c", f"{KIMICTL} {line}"],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, check=False, timeout=TIMEOUT_S,
    )  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        "plan -f -",
        "plan --chip mi300x --workload -",
        "render -f -",
        "replay -f -",
        "replay --chip mi300x --trace -",
        "profile calibrate -",
        "profile from-node -",
    ],
)
def test_closed_standard_input_is_bad_input(command: str) -> None:
    status, err = shell(f"{command} <&-")
    assert (status, err) == (
        2, "kimictl: -: got a closed standard input, expected a readable one; write the name of a file\n"
    )  # fmt: skip


@needs_full
@pytest.mark.parametrize("stream", ["2>&-", "2>/dev/full"])
@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("plan -f nofile", 2),
        ("plan --no-such-flag", 2),
        (f"plan -f {MI300X} >/dev/full", 2),
        (f"plan -f {MI300X} >&-", 2),
        ("plan --chip mi300x --prompt-tokens 9000 --output-tokens 500 --target-tpot 1ms", 1),
        (f"plan -f {MI300X}", 0),
    ],
)
def test_the_status_is_the_same_where_no_reason_can_be_told(stream: str, command: str, expected: int) -> None:
    assert shell(f"{command} {stream}") == (expected, "")


def test_closed_standard_output_is_told_in_one_line() -> None:
    assert shell(f"plan -f {MI300X} >&-") == (2, "kimictl: standard output is closed\n")
