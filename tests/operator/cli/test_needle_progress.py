"""How far a needle run is, as a log shows it: from the first moment on, and never two seconds of silence."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from kimi_operator.cli import report

LIMIT_S = 20.0


class Log:
    """A standard error that no person looks at."""

    def __init__(self) -> None:
        self.text = ""
        self._changed = threading.Condition()

    def write(self, text: str) -> None:
        with self._changed:
            self.text += text
            self._changed.notify_all()

    def flush(self) -> None:
        """Nothing is held back."""

    def wait_for(self, words: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: words in self.text, LIMIT_S), self.text


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()
    monkeypatch.setattr(report, "sys", SimpleNamespace(stderr=log))
    return log


def test_a_line_stands_there_before_the_first_answer(log: Log) -> None:
    with report.progress() as add:
        for name in ("needles", "reference"):
            advance = add(name, 16)
            assert log.text.endswith(f"{name}: 0 of 16\n")
            for _ in range(16):
                advance()
    assert log.text.splitlines() == [
        f"{name}: {done} of 16" for name in ("needles", "reference") for done in range(0, 17, 2)
    ]


def test_a_long_wait_is_not_silent(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    assert report.TICK_S < 2
    monkeypatch.setattr(report, "TICK_S", 0.01)
    with report.progress() as add:
        advance = add("reference", 1)
        log.wait_for("reference: 0 of 1\n...")
        advance()
        log.wait_for("1 of 1\n.")
    lines = log.text.splitlines()
    assert [line.strip(".") for line in lines] == ["reference: 0 of 1", "", "reference: 1 of 1", ""]
    assert log.text.endswith("\n")
    num_threads = threading.active_count()
    with report.progress() as add:
        add("reference", 1)
        assert threading.active_count() == num_threads + 1
    assert threading.active_count() == num_threads, "its thread ends with it"
