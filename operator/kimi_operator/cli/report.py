"""What a needle run shows: progress, one table, or a JSON document."""

from __future__ import annotations

import itertools
import math
import re
import statistics
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Self, TextIO

from msgspec import Struct
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kimi_operator.cli.ask import Answer
from kimi_operator.cli.compare import Difference
from kimi_operator.planner.pressure import percentile

LOG_WIDTH = 150
TICK_S = 1.8

_VALUE = re.compile(r"\d{6,}")


class Row(Struct, frozen=True):
    """One needle and what the service said."""

    number: int
    num_tokens: int
    key: str
    expected: str
    answer: Answer
    difference: Difference | None = None

    @property
    def is_found(self) -> bool:
        """The answer names the expected value and no other."""
        return self.answer.error is None and _VALUE.findall(self.answer.text) == [self.expected]

    @property
    def problem(self) -> str | None:
        """Why this needle counts as failed."""
        if self.answer.error:
            return self.answer.error
        if not self.is_found:
            return f"said {self.answer.text[:60]!r}, expected {self.expected}"
        return self.difference.reason if self.difference else None


class Level(Struct, frozen=True):
    """The requests that were sent at once."""

    concurrency: int
    duration_s: float
    rows: list[Row]

    @property
    def num_found(self) -> int:
        """Rows whose answer names the expected value."""
        return sum(row.is_found for row in self.rows)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all requests over the time of the level."""
        return sum(len(row.answer.token_ids) for row in self.rows) / self.duration_s if self.duration_s else 0.0


class Run(Struct, frozen=True, dict=True):
    """A whole run; with a reference every row has a difference."""

    url: str
    model: str
    levels: list[Level]
    reference_url: str | None = None
    logprob_bound: float | None = None

    @cached_property
    def rows(self) -> list[Row]:
        """Of all levels, in order."""
        return [row for level in self.levels for row in level.rows]

    @property
    def problems(self) -> list[Row]:
        """Rows that failed."""
        return [row for row in self.rows if row.problem]

    @property
    def is_right(self) -> bool:
        """Whether none failed."""
        return not self.problems


@contextmanager
def progress() -> Iterator[Callable[[str, int], Callable[[], None]]]:
    """Show on standard error how far it is: `advance = bar("needles", 57)`. Bars on a terminal, lines elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        with _Lines(sys.stderr) as lines:
            yield lines.add
        return
    columns = (TextColumn("{task.description:10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:

        def add(name: str, total: int) -> Callable[[], None]:
            task = bars.add_task(name, total=total)
            return lambda: bars.advance(task)

        yield add


class _Lines:
    """Progress in a log: a line at the beginning and about eight more, and between them dots, never 2 s of silence."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lock = threading.Lock()
        self._is_in_dots = False
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Self:
        self._ticker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._ticker.join()
        self._write("")

    def add(self, name: str, total: int) -> Callable[[], None]:
        """Begin another bar; each call of the answer is one step of it."""
        counter = itertools.count(1)
        every = max(1, total // 8)

        def advance() -> None:
            if (done := next(counter)) % every == 0 or done == total:
                self._write(f"{name}: {done} of {total}\n")

        self._write(f"{name}: 0 of {total}\n")
        return advance

    def _tick(self) -> None:
        while not self._ended.wait(TICK_S):
            with self._lock:
                self._put(".")
                self._is_in_dots = True

    def _write(self, line: str) -> None:
        with self._lock:
            self._put(("\n" if self._is_in_dots else "") + line)
            self._is_in_dots = False

    def _put(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def level_figures(level: Level) -> dict[str, float | int | None]:
    """Figures of a level; times in milliseconds, sizes in bytes."""
    answers = [row.answer for row in level.rows]
    handoffs = [answer for answer in answers if answer.handoff_bytes]
    lengths = [answer.prompt_tokens for answer in answers]
    figures: dict[str, float | int | None] = {
        "concurrency": level.concurrency,
        "asked": len(level.rows),
        "found": level.num_found,
        "prompt_tokens_min": min(lengths),
        "prompt_tokens_max": max(lengths),
        "ttft_p50_ms": _percentile_ms((answer.ttft_s for answer in answers), 0.5),
        "ttft_p95_ms": _percentile_ms((answer.ttft_s for answer in answers), 0.95),
        "tpot_p50_ms": _percentile_ms((answer.tpot_s for answer in answers), 0.5),
        "tpot_p95_ms": _percentile_ms((answer.tpot_s for answer in answers), 0.95),
        "decoding_mean": decoding_at_once(answers),
        "output_tokens_per_s": level.tokens_per_s,
        "handoff_bytes_mean": round(statistics.fmean(answer.handoff_bytes for answer in handoffs))
        if handoffs
        else None,
        "handoff_p50_ms": _percentile_ms((answer.handoff_s for answer in handoffs), 0.5),
        "handoff_p95_ms": _percentile_ms((answer.handoff_s for answer in handoffs), 0.95),
        "duration_s": level.duration_s,
    }
    if differences := [row.difference for row in level.rows if row.difference]:
        figures["equal_to_reference"] = sum(difference.reason is None for difference in differences)
        largest = max(difference.max_logprob for difference in differences)
        figures["max_logprob_difference"] = largest if math.isfinite(largest) else None
    return figures


def decoding_at_once(answers: Iterable[Answer]) -> float | None:
    """Requests in decode at once as each of them sees it on average, itself included; None where none decodes.

    They were sent together. Those whose first token is still to come are in prefill, or wait for it.
    """
    spans = ((answer.ttft_s, answer.last_s) for answer in answers)
    changes = sorted(
        (at_s, step) for began, ended in spans if began is not None for at_s, step in ((began, 1), (ended, -1))
    )
    counts = itertools.accumulate(step for _, step in changes)
    gaps_s = (after - at for (at, _), (after, _) in itertools.pairwise(changes))
    lasting = list(zip(counts, gaps_s, strict=False))
    decoding_s = sum(count * seconds for count, seconds in lasting)
    return sum(count**2 * seconds for count, seconds in lasting) / decoding_s if decoding_s else None


def _percentile_ms(seconds: Iterable[float | None], share: float) -> float | None:
    """Of those that are known."""
    found = percentile(sorted(each for each in seconds if each is not None), share)
    return None if found is None else found * 1000


def document(run: Run) -> dict[str, object]:
    """The run as JSON."""
    return {
        "url": run.url,
        "model": run.model,
        "reference_url": run.reference_url,
        "logprob_bound": run.logprob_bound,
        "asked": len(run.rows),
        "found": sum(row.is_found for row in run.rows),
        "right": run.is_right,
        "levels": [level_figures(level) for level in run.levels],
        "problems": [
            {"number": row.number, "prompt_tokens": row.num_tokens, "problem": row.problem} for row in run.problems
        ],
    }


def print_run(run: Run, console: Console | None = None) -> None:
    """One table, then what went wrong, then one line that sums up."""
    # a log has no width of its own
    console = console or Console(width=None if sys.stdout.isatty() else LOG_WIDTH)
    console.print(_table(run))
    for row in run.problems:
        console.print(f"needle {row.number} ({row.num_tokens} tokens): {row.problem}", markup=False, highlight=False)
    found = sum(row.is_found for row in run.rows)
    summary = f"{found} of {len(run.rows)} needles found"
    if run.reference_url:
        equal = sum(row.difference is not None and row.difference.reason is None for row in run.rows)
        summary += (
            f", {equal} of {len(run.rows)} equal to the reference (log-probabilities within {run.logprob_bound:g})"
        )
    console.print(summary, style="bold green" if run.is_right else "bold red", highlight=False)


def _table(run: Run) -> Table:
    table = Table(title=f"Needles in {run.model} at {run.url}")
    headers = [
        "at once",
        "recall",
        "prompt tokens",
        "TTFT p50/p95 ms",
        "TPOT p50/p95 ms",
        "tokens/s",
        "handoff",
        "handoff p50/p95 ms",
    ]
    if run.reference_url:
        headers += ["as reference", "max |Δlogprob|"]
    for header in headers:
        table.add_column(header, justify="right")
    for level in run.levels:
        table.add_row(*_cells(level_figures(level)))
    return table


def _cells(figures: dict[str, float | int | None]) -> Sequence[str]:
    cells = [
        f"{figures['concurrency']}",
        f"{figures['found']}/{figures['asked']}",
        f"{figures['prompt_tokens_min']} to {figures['prompt_tokens_max']}",
        f"{_number(figures['ttft_p50_ms'])} / {_number(figures['ttft_p95_ms'])}",
        f"{_number(figures['tpot_p50_ms'])} / {_number(figures['tpot_p95_ms'])}",
        _number(figures["output_tokens_per_s"]),
        _bytes(figures["handoff_bytes_mean"]),
        f"{_number(figures['handoff_p50_ms'])} / {_number(figures['handoff_p95_ms'])}",
    ]
    if "equal_to_reference" in figures:
        largest = figures["max_logprob_difference"]
        cells += [f"{figures['equal_to_reference']}/{figures['asked']}", "NaN" if largest is None else f"{largest:.2g}"]
    return cells


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _bytes(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 2**20:.1f} MiB" if value >= 2**20 else f"{value / 2**10:.0f} KiB"
