"""What the supervisor concludes from what its processes say and how they end."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from kimi_worker.processes import LastWords
from kimi_worker.protocol.engine import LaneState
from kimi_worker.supervisor import LaneStates, blame

STARTING = LaneState(0, "tcp://10.0.0.1:1", False, 0, 0, 0, 0, 8, 8, 4, 4, 2)
READY = msgspec.structs.replace(STARTING, ready=True, assembled=True)
DRAINING = msgspec.structs.replace(STARTING, draining=True)
BUSY = msgspec.structs.replace(READY, ready=False, draining=True, running=1, reserved=2)
DRAINED = msgspec.structs.replace(BUSY, running=0, reserved=0, drained=True)


def test_a_pod_whose_group_never_assembled_has_nothing_to_drain() -> None:
    """Told to end, its lanes say that they drain; they can never say that the group has."""
    states = LaneStates(2)
    for state in (STARTING, DRAINING):
        for lane in range(2):
            states.take(lane, state)
    assert not states.have_served


def test_a_pod_that_was_ready_drains_until_every_lane_says_so() -> None:
    states = LaneStates(2)
    states.take(0, READY)
    assert not states.have_served
    states.take(1, READY)
    assert states.have_served
    states.take(0, BUSY)
    states.take(1, DRAINED)
    assert (states.have_served, states.are_drained, states.num_left) == (True, False, 3)
    states.take(0, DRAINED)
    assert states.are_drained


def test_a_busy_pod_of_which_nothing_was_heard_before_its_end_drains() -> None:
    states = LaneStates(1)
    states.take(0, BUSY)
    assert (states.have_served, states.are_drained) == (True, False)


def say(run_dir: Path, process: str, message: str, *, is_consequence: bool) -> None:
    (run_dir / f"{process}.error").write_bytes(msgspec.json.encode(LastWords(message, is_consequence)))


def test_the_cause_is_named_whoever_died_first(tmp_path: Path) -> None:
    say(tmp_path, "rank-0", "rank 0: CollectiveError: gone", is_consequence=True)
    say(tmp_path, "rank-1", "rank 1: out of memory", is_consequence=False)
    say(tmp_path, "rank-2", "rank 2: GroupLostError: gone", is_consequence=True)
    assert blame(tmp_path, "ranks: ended with status 1") == "rank 1: out of memory"


def test_a_consequence_is_named_when_the_cause_is_elsewhere(tmp_path: Path) -> None:
    say(tmp_path, "rank-0", "rank 0: GroupLostError: gone", is_consequence=True)
    assert blame(tmp_path, "ranks: ended with status 1") == "rank 0: GroupLostError: gone"


def test_a_silent_end_is_told_by_its_status(tmp_path: Path) -> None:
    assert blame(tmp_path, "api: killed by SIGKILL") == "api: killed by SIGKILL"


SIGNALLED = """
import os, signal, sys
from pathlib import Path
from kimi_worker.processes import fork_child, wait_for_first
run_dir, collectives, number = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
pid = fork_child("rank-0", run_dir, "rank 0", lambda: os.kill(os.getpid(), number))
wait_for_first({pid: "rank 0"}, run_dir, collectives)
"""


@pytest.mark.parametrize(
    ("collectives", "signal_number", "blamed"),
    [
        ("nccl", 6, "rank 1: no space"),
        ("gloo", 6, "rank 0: killed by SIGABRT"),
        ("nccl", 9, "rank 0: killed by SIGKILL"),
    ],
)
def test_an_abort_by_the_watchdog_of_rccl_is_a_consequence(
    tmp_path: Path, collectives: str, signal_number: int, blamed: str
) -> None:
    command = [sys.executable, "-c", SIGNALLED, str(tmp_path), collectives, str(signal_number)]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    say(tmp_path, "rank-1", "rank 1: no space", is_consequence=False)
    assert blame(tmp_path, "ranks: ended with status 0") == blamed
