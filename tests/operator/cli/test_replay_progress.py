"""A long replay says on standard error how far it is; a short one says nothing, and standard output stays as it is."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from kimi_operator.cli import progress

Run = Callable[..., tuple[int, str, str]]
REPLAY = ("replay", "--chip", "mi300x", "--agents", 4, "--turns", 3)
EVERY_PROMPT = 3 * 4 * 3
"""Of three runs."""


@pytest.mark.parametrize("output", ["text", "json"])
def test_progress_counts_every_prompt_and_leaves_standard_output_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    status, quiet, err = run(*REPLAY, "-o", output)
    assert (status, err) == (0, "")
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    status, out, err = run(*REPLAY, "-o", output)
    assert (status, out) == (0, quiet)
    counts = [int(done) for done in re.findall(rf": ([0-9]+) of {EVERY_PROMPT} \(", err)]
    assert counts == list(range(1, EVERY_PROMPT + 1))
    assert err.endswith("36 of 36 (100%)\n")


def test_nothing_is_said_before_two_seconds_and_then_once_every_two(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "QUIET_S", 2.0)
    now_s = 100.0
    step = progress.Progress("steps", 80, clock=lambda: now_s)
    for number in range(1, 81):
        now_s = 100.0 + number / 10
        step()
    assert capsys.readouterr().err.splitlines() == [
        f"kimictl: steps: {done} of 80 ({done / 80:.0%})" for done in (20, 40, 60, 80)
    ]
