"""`kimictl plan --check`: every published figure beside what the planner computes, then every measured time."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from kimi_operator.cli.document import dumped
from kimi_operator.cli.held_out import HEAD, cells, summaries, time_document, times_text
from kimi_operator.cli.held_out_rates import (
    RateResidual,
    rate_cells,
    rate_document,
    rate_residuals,
    rate_summary,
    rates_text,
)
from kimi_operator.cli.markdown import cell, table
from kimi_operator.planner.figures import Checked, Kind, Value, Verdict, judge
from kimi_operator.planner.fit import Residual, residuals
from kimi_operator.planner.published import Given, compute
from kimi_operator.profiles import architecture
from kimi_operator.profiles.figures import published_figures
from kimi_operator.profiles.measurements import built_in_measurements

ARCHITECTURE = "kimi-k3"
NAME_WIDTH, VERDICT_WIDTH = 48, 22
NUMBER_WIDTHS = (17, 17, 10)
TITLES = ("published figure", "published", "computed", "tolerance", "verdict", "how")


def check(output: str) -> int:
    """Print the comparison as text, json, yaml or markdown; returns 1 when a row is missed or not computed."""
    measured = built_in_measurements()
    given = Given(architecture(ARCHITECTURE), measured.samples, {note.name: note.explained for note in measured.notes})
    rows = [judge(figure, compute(figure.path, given)) for figure in published_figures()]
    times, rates = residuals(measured.samples), rate_residuals(measured)
    if output in ("json", "yaml"):
        sys.stdout.write(dumped(_document(rows, times, rates), output))
    else:
        lines = _markdown(rows, times, rates) if output == "markdown" else _text(rows, times, rates)
        sys.stdout.writelines(f"{line}\n" for line in lines)
    return 0 if all(row.is_right for row in rows) else 1


def _document(rows: list[Checked], times: tuple[Residual, ...], rates: tuple[RateResidual, ...]) -> dict[str, Any]:
    return {
        "architecture": ARCHITECTURE,
        "ok": all(row.is_right for row in rows),
        "rows": [_row_document(row) for row in rows],
        "times": [time_document(residual) for residual in times],
        "rates": [rate_document(rate) for rate in rates],
        "held_out": [*summaries(times), rate_summary(rates)],
    }


def _row_document(row: Checked) -> dict[str, Any]:
    figure, computed = row.figure, row.computed
    return {
        "section": figure.section,
        "name": figure.name,
        "published": figure.published,
        "computed": None if computed is None else computed.value,
        "kind": figure.kind.value,
        "tolerance": figure.tolerance,
        "deviation": deviation(row),
        "verdict": row.verdict.value,
        "how": "" if computed is None else computed.how,
        "reason": "" if computed is None else computed.reason,
    }


def deviation(row: Checked) -> float | None:
    """Computed over published, less 1; None where one of them is no number."""
    published, computed = row.figure.published, row.computed
    if computed is None or isinstance(computed.value, str) or isinstance(published, str) or published == 0:
        return None
    return computed.value / published - 1


def _text(rows: list[Checked], times: tuple[Residual, ...], rates: tuple[RateResidual, ...]) -> Iterator[str]:
    yield _columns(*TITLES)
    section = ""
    for row in rows:
        if row.figure.section != section:
            section = row.figure.section
            yield section
        name, *others = _cells(row)
        yield _columns(f"  {name}", *others)
        if row.computed is not None and row.computed.reason:
            yield f"    why: {row.computed.reason}"
    yield ""
    yield _count(rows)
    yield ""
    yield from times_text(times)
    yield from rates_text(rates)


def _markdown(rows: list[Checked], times: tuple[Residual, ...], rates: tuple[RateResidual, ...]) -> Iterator[str]:
    yield f"# Published figures of {ARCHITECTURE}"
    for section in dict.fromkeys(row.figure.section for row in rows):
        yield f"\n## {section}\n"
        yield from table((*TITLES, "why"), (_reasoned(row) for row in rows if row.figure.section == section))
    yield f"\n{_count(rows)}"
    yield "\n## Measured times, ms: fitted and held out\n"
    yield from table(HEAD, map(cells, times))
    yield ""
    yield from (f"- {summary}" for summary in summaries(times))
    yield from _whys(times)
    yield "\n## Measured throughput, tokens/s: held out\n"
    yield from table(HEAD, map(rate_cells, rates))
    yield f"\n- {rate_summary(rates)}"
    yield from _whys(rates)


def _whys(found: tuple[Residual, ...] | tuple[RateResidual, ...]) -> Iterator[str]:
    """What would explain rows of a table, in Markdown."""
    reasons = ((each.sample.name, each.sample.reason) for each in found if each.sample.reason)
    yield from (f"- {cell(name)}: {cell(reason)}" for name, reason in reasons)


def _reasoned(row: Checked) -> tuple[str, ...]:
    return (*_cells(row), "" if row.computed is None else row.computed.reason)


def _count(rows: list[Checked]) -> str:
    counts = Counter(row.verdict for row in rows)
    return f"{len(rows)} rows: " + ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])


def _cells(row: Checked) -> tuple[str, ...]:
    """As in `TITLES`."""
    figure, computed = row.figure, row.computed
    tolerance = "none" if figure.kind is Kind.NOTE else str(figure.kind)
    if figure.kind is Kind.WITHIN:
        tolerance = f"{100 * (figure.tolerance or 0):g} %"
    verdict = str(row.verdict)
    off = deviation(row)
    if figure.kind is Kind.WITHIN and off is not None:
        verdict += f" {100 * off:+.2g} %"
    value, how = ("-", "") if computed is None else (_number(computed.value, figure.decimals), computed.how)
    return figure.name, _number(figure.published, figure.decimals), value, tolerance, verdict, how


def _number(value: Value, decimals: int) -> str:
    """Text and whole numbers as they are, others with two digits more than were printed."""
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.{decimals + 2}f}".rstrip("0").removesuffix(".")


def _columns(*cells: str) -> str:
    """Name to the left, the three numbers to the right, verdict and how to the left."""
    name, *numbers, verdict, how = cells
    aligned = " ".join(f"{number:>{width}}" for number, width in zip(numbers, NUMBER_WIDTHS, strict=True))
    return f"{name:<{NAME_WIDTH}} {aligned}  {verdict:<{VERDICT_WIDTH}} {how}".rstrip()
