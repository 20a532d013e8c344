"""Progress of long steps: a live line on a terminal, growing lines in a log, never two seconds of silence."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

TICK_S = 1.8
SECONDS_PER_NOTE = 30
SLOW = 1.25
"""Times the expected duration, from where on a step is called slow."""


def format_seconds(seconds: float) -> str:
    """Seconds for people: `7.3 s`, `48 s`, `4 min 5 s`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 120 else f"{int(seconds) // 60} min {int(seconds) % 60} s"


class Step:
    """One running step. `note` replaces the text beside its title.

    `expected_s` was measured on two idle cores. It is no promise: once it has passed, the line says so.
    """

    def __init__(self, title: str, expected_s: float | None) -> None:
        self.title = title
        self._expected_s = expected_s
        self._start = time.monotonic()
        self._note = ""

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def note(self, text: str) -> None:
        self._note = text

    def line(self) -> str:
        note = f" - {self._note}" if self._note else ""
        return f"{self.title} ({self._time()}){note}"

    def end(self, mark: str) -> str:
        """The last line: how it ended and how long it took, beside the usual time where it took much longer."""
        slow = f", usually about {self._usual}" if self._is_slow else ""
        return f"{self.title}: {mark} in {format_seconds(self.elapsed_s)}{slow}"

    def _time(self) -> str:
        elapsed = format_seconds(self.elapsed_s)
        if not self._expected_s:
            return elapsed
        if self.elapsed_s <= self._expected_s:
            return f"{elapsed} of about {format_seconds(self._expected_s)}"
        return f"{'slower than usual: ' if self._is_slow else ''}{elapsed}, usually about {self._usual}"

    @property
    def _usual(self) -> str:
        return f"{format_seconds(self._expected_s or 0)} on 2 idle cores"

    @property
    def _is_slow(self) -> bool:
        return bool(self._expected_s) and self.elapsed_s > SLOW * (self._expected_s or 0)


class Progress:
    """Writes steps to standard error, so that standard output stays clean for results."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def step(self, title: str, *, expected_s: float | None = None) -> Iterator[Step]:
        """Show a step while the block runs, then how long it took and whether it failed."""
        step = Step(title, expected_s)
        finished = threading.Event()
        show = self._show_live if self._console.is_terminal else self._show_log
        ticker = threading.Thread(target=show, args=(step, finished), daemon=True)
        ticker.start()
        mark = "[red]failed[/]"
        try:
            yield step
            mark = "[green]done[/]"
        finally:
            finished.set()
            ticker.join()
            self._console.print(step.end(mark), soft_wrap=True)

    def _show_live(self, step: Step, finished: threading.Event) -> None:
        with self._console.status(step.line()) as status:
            while not finished.wait(0.2):
                status.update(step.line())

    def _show_log(self, step: Step, finished: threading.Event) -> None:
        """Dots, and now and then a line with the time, because a log cannot be rewritten."""
        if finished.wait(TICK_S):
            return
        self._console.print(step.line(), end=" ", markup=False, soft_wrap=True)
        next_note_s = step.elapsed_s + SECONDS_PER_NOTE
        while not finished.wait(TICK_S):
            if step.elapsed_s < next_note_s:
                self._console.print(".", end="", markup=False)
            else:
                self._console.print(f"\n{step.line()}", end=" ", markup=False, soft_wrap=True)
                next_note_s = step.elapsed_s + SECONDS_PER_NOTE
        self._console.print("")
