"""`kimictl plan --explain LINE`: formula, values, source and plain words of any label. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import to_builtins

from kimi_operator.api.deployment import Role
from kimi_operator.cli.figures import Figure
from kimi_operator.cli.flags import refuse
from kimi_operator.cli.glossary import GROUPS, WORDS

MOST_SUGGESTIONS = 8
LONGEST_REPEATED = 120
"""Characters of a source that stands beside each of its figures."""
LEAST_LIKENESS = 0.75
"""Of a typing error; less alike are words that have nothing to do with each other."""


def find_figures(known: Iterable[Figure], wanted: str) -> list[Figure]:
    """Figures of that name or label: with its role as `decode.KV pages`, or without for every role's.

    Case, spaces and signs do not matter, and `cost` stands for every figure of it. Raises InvalidSpec that lists the
    nearest labels, or all names.
    """
    known, name = list(known), _plain(wanted)
    exact = [figure for figure in known if _plain(figure.key) == name]
    if found := exact or [figure for figure in known if name in map(_plain, _names(figure))]:
        return found
    if found := [figure for figure in known if name and _plain(figure.key).startswith(f"{name}.")]:
        return found
    if name in COST_NAMES:
        expected = "a price, without which nothing has a cost"
        raise refuse("--explain", repr(wanted), expected, "add --cost PRICE, the price of a GPU-hour")
    remedy = f"name one of: {_near(known, name) or _all(known)}"
    raise refuse("--explain", repr(wanted), "a line, a column or a figure of the plan", remedy)


def _near(known: Iterable[Figure], name: str) -> str:
    """Labels like this one; empty when there are none."""
    names = {_plain(each): each for figure in known for each in _names(figure) if not each.startswith(tuple(Role))}
    name = name.removeprefix("prefill.").removeprefix("decode.")
    inside = [each for each in names if name and name in each]
    near = inside or difflib.get_close_matches(name, names, MOST_SUGGESTIONS, LEAST_LIKENESS)
    return "; ".join(names[each] for each in near[:MOST_SUGGESTIONS])


def _all(known: Iterable[Figure]) -> str:
    """Every name, by what it is of."""
    there = {_without_role(figure.key) for figure in known}
    found = {group: [name for name in names if name in there] for group, names in GROUPS.items()}
    return "; ".join(f"{group}: {', '.join(names)}" for group, names in found.items() if names)


def explanation(found: Iterable[Figure]) -> Iterator[str]:
    """For a terminal; a long source that figures share stands once."""
    first: dict[str, str] = {}
    for figure in found:
        told = first.setdefault(figure.source, figure.key)
        is_again = told != figure.key and len(figure.source) > LONGEST_REPEATED
        yield f"{figure.key} = {figure.text}"
        yield f"  means    {means(figure)}"
        yield f"  formula  {figure.formula}"
        yield f"  values   {figure.values}"
        yield f"  source   {f'as of {told}' if is_again else figure.source}"


def explanation_document(found: Iterable[Figure]) -> dict[str, list[dict[str, Any]]]:
    """For scripts."""
    return {"figures": [_figure_document(figure) for figure in found]}


def _figure_document(figure: Figure) -> dict[str, Any]:
    texts = {name: value for name, value in to_builtins(figure).items() if name != "exact"}
    return {**texts, "amount": to_builtins(figure.amount), "means": means(figure)}


def means(figure: Figure) -> str:
    """The figure in one sentence of plain words."""
    return WORDS[_without_role(figure.key)].means


def _names(figure: Figure) -> Iterator[str]:
    """What the figure is called: its key, and its labels, each with its role and without."""
    name = _without_role(figure.key)
    role = figure.key.removesuffix(name)
    for label in (name, *WORDS[name].labels):
        yield from dict.fromkeys((label, f"{role}{label}"))


def _without_role(key: str) -> str:
    role, _, name = key.partition(".")
    return name if name and role in tuple(Role) else key


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


COST_NAMES = {
    "price",
    "cost",
    *(_plain(each) for name, words in GROUPS["cost"].items() for each in (name, *words.labels)),
}
"""What a plan without a price cannot explain."""
