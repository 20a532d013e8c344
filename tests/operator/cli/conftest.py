"""Running `kimictl` as a user does."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from kimi_operator.cli import main, progress

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy with other things must not add lines to standard error."""
    monkeypatch.setattr(progress, "QUIET_S", math.inf)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs one command line: exit status, standard output, standard error."""

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return call
