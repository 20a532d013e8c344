"""Rows of published figures: read from data, and judged against what was computed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import TypeAlias

from msgspec import Struct

from kimi_operator.errors import InvalidSpec, Problem

Value: TypeAlias = int | float | str


class Kind(StrEnum):
    """How a published figure is to be met."""

    EXACT = "exact"
    """Equal as an integer or a text, or to the printed digit."""
    WITHIN = "within"
    """Inside a relative tolerance."""
    CHOSEN = "chosen"
    """Equal, with inputs that were not published and are chosen so that it is: shows what would explain the figure."""
    DEFINITION = "definition"
    """Holds by what the figure means or was set to; of hardware and model at most that they allow it is computed."""
    NOTE = "note"
    """Known not to reconcile: shown, never fitted to. Its value must stay as its reason was written for."""


class Verdict(StrEnum):
    """What a comparison says."""

    MET = "met"
    FITTED = "fitted"
    """Met by a factor that was fitted on this very figure, so it could not miss."""
    CHOSEN = "met, inputs chosen"
    DEFINITION = "by definition"
    MISSED = "MISSED"
    NOTE = "known not to reconcile"
    NOT_COMPUTED = "not computed"


NOTE_TOLERANCE = 0.001
"""How far, relatively, a note's value may lie from the one that its reason was written for."""


class Figure(Struct, frozen=True):
    """One row."""

    section: str
    name: str
    published: Value
    kind: Kind
    tolerance: float | None = None
    """Relative; of `within` alone."""

    @property
    def path(self) -> str:
        """Section and name, as computations are registered."""
        return f"{self.section}.{self.name}"

    @property
    def decimals(self) -> int:
        """Digits after the point, as printed."""
        return len(str(self.published).partition(".")[2])


class Computed(Struct, frozen=True):
    """What the planner says about a row, and how it gets there."""

    value: Value
    how: str
    reason: str = ""
    """Why it does not reconcile with what was published."""
    is_fitted: bool = False
    """Whether the published figure itself gave the factor of the computed one."""
    recorded: float | None = None
    """Of a note: the value that its reason was written for."""


class Explained(Struct, frozen=True):
    """Why a published figure does not reconcile with the value that is computed for it."""

    reason: str
    """`{times}` in it stands for computed over published."""
    published: float
    recorded: float
    """The value that was computed when the reason was written."""

    def text(self, computed: float) -> str:
        """The reason, with figures of what is computed now."""
        return self.reason.replace("{times}", f"{computed / self.published:.1f}")


class Checked(Struct, frozen=True):
    """A row, judged."""

    figure: Figure
    computed: Computed | None
    verdict: Verdict

    @property
    def is_right(self) -> bool:
        """Whether nothing is wrong with the planner's side of the row."""
        return self.verdict not in (Verdict.MISSED, Verdict.NOT_COMPUTED)


_MET = {
    Kind.EXACT: Verdict.MET,
    Kind.WITHIN: Verdict.MET,
    Kind.CHOSEN: Verdict.CHOSEN,
    Kind.DEFINITION: Verdict.DEFINITION,
}


def judge(figure: Figure, computed: Computed | None) -> Checked:
    """Compare one row. A note without a reason, or whose value has moved, is a miss: it would hide a deviation."""
    if computed is None:
        verdict = Verdict.NOT_COMPUTED
    elif figure.kind is Kind.NOTE:
        verdict = Verdict.NOTE if computed.reason and _has_stayed(computed) else Verdict.MISSED
    elif not _agrees(figure, computed.value):
        verdict = Verdict.MISSED
    else:
        verdict = Verdict.FITTED if computed.is_fitted else _MET[figure.kind]
    return Checked(figure, computed, verdict)


def _has_stayed(computed: Computed) -> bool:
    value, recorded = computed.value, computed.recorded
    if recorded is None or isinstance(value, str):
        return False
    return abs(value - recorded) <= NOTE_TOLERANCE * abs(recorded)


def _agrees(figure: Figure, computed: Value) -> bool:
    published = figure.published
    if isinstance(published, str) or isinstance(computed, str):
        return published == computed
    if figure.kind is Kind.WITHIN:
        assert figure.tolerance is not None, figure.path
        return abs(computed - published) <= figure.tolerance * abs(published)
    return published == (computed if isinstance(published, int) else round(computed, figure.decimals))


def read_figures(document: object) -> tuple[Figure, ...]:
    """Rows of `{section: {name: {published, kind, tol}}}`. Raises InvalidSpec that names the row which is wrong."""
    figures = []
    for section, rows in _items("figures", document):
        figures += [_read_row(section, name, row) for name, row in _items(section, rows)]
    return tuple(figures)


def _items(path: str, value: object) -> Iterator[tuple[str, object]]:
    if not isinstance(value, Mapping) or not value:
        raise _refuse(path, value, "an object with at least one entry")
    return ((str(key), item) for key, item in value.items())


def _read_row(section: str, name: str, row: object) -> Figure:
    path = f"{section}.{name}"
    fields = dict(_items(path, row))
    if unknown := fields.keys() - {"published", "kind", "tol"}:
        raise _refuse(path, sorted(unknown), "published, kind and tol alone")
    kind = _kind(f"{path}.kind", fields.get("kind"))
    return Figure(
        section, name, _value(f"{path}.published", fields.get("published")), kind, _tolerance(path, kind, fields)
    )


def _kind(path: str, value: object) -> Kind:
    for known in Kind:
        if value == known:
            return known
    raise _refuse(path, value, f"one of {[str(known) for known in Kind]}")


def _value(path: str, value: object) -> Value:
    if isinstance(value, str | int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise _refuse(path, value, "a number or a text")


def _tolerance(path: str, kind: Kind, fields: Mapping[str, object]) -> float | None:
    value = fields.get("tol")
    if kind is not Kind.WITHIN and value is None:
        return None
    if kind is Kind.WITHIN and isinstance(value, float) and 0 < value < 1:
        return value
    raise _refuse(f"{path}.tol", value, "a fraction between 0 and 1 with kind within, nothing otherwise")


def _refuse(path: str, got: object, expected: str) -> InvalidSpec:
    return InvalidSpec((Problem(path, repr(got), expected, "mend the row"),))
