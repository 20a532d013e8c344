"""`kimictl plan --explain LINE`: formula, values and source of any figure. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator

from kimi_operator.api.deployment import Role
from kimi_operator.cli.figures import Figure
from kimi_operator.cli.flags import refuse

MOST_SUGGESTIONS = 5


def find_figures(known: Iterable[Figure], wanted: str) -> list[Figure]:
    """Figures of that name: with its role as `decode.KV pages`, or without for every role's. Case does not matter.

    Raises InvalidSpec that lists the nearest names, or all.
    """
    by_name = {_plain(figure.key): figure for figure in known}
    name = _plain(wanted)
    if name in by_name:
        return [by_name[name]]
    found = [figure for figure in by_name.values() if _plain(_without_role(figure.key)) == name]
    if found:
        return found
    names = {_plain(_without_role(figure.key)): _without_role(figure.key) for figure in by_name.values()}
    near = difflib.get_close_matches(name.rpartition(".")[2], names, MOST_SUGGESTIONS)
    suggested = [names[each] for each in near] or sorted(names.values())
    raise refuse("--explain", repr(wanted), "a line or a figure of the plan", f"name one of: {', '.join(suggested)}")


def explanation(found: Iterable[Figure]) -> Iterator[str]:
    """For a terminal."""
    for figure in found:
        yield f"{figure.key} = {figure.text}"
        yield f"  formula  {figure.formula}"
        yield f"  values   {figure.values}"
        yield f"  source   {figure.source}"


def _without_role(key: str) -> str:
    role, _, name = key.partition(".")
    return name if name and role in tuple(Role) else key


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())
