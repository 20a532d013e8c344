"""The views of `kimictl plan`: each takes what was asked and gives its text and the exit status."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from kimi_operator.api.base import dump
from kimi_operator.cli.asking import Asked, asked_for, make_plan, outlook_of
from kimi_operator.cli.changes import (
    Change,
    changes,
    deployment_inputs,
    edited,
    markdown_table,
    named,
    read_edited,
    table,
)
from kimi_operator.cli.cost import Cost, cost_figures, cost_of
from kimi_operator.cli.document import dumped, plan_document, refusal_document
from kimi_operator.cli.explain import explanation, find_figures
from kimi_operator.cli.figures import Figure, figures
from kimi_operator.cli.flag_documents import DEPLOYMENT_FLAGS, workload_document
from kimi_operator.cli.flags import DeploymentFlags, View, WorkloadFlags
from kimi_operator.cli.manifests import Planned, deployment_of, plan_deployment, profiles_of, read_documents
from kimi_operator.cli.outlook import Outlook
from kimi_operator.cli.text import plan_text, refusal_text
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.planner import Infeasible

FITS, DOES_NOT_FIT = 0, 1
Answer: TypeAlias = tuple[str, int]
Flags: TypeAlias = tuple[DeploymentFlags, WorkloadFlags, View]


def answer(files: list[Path], flags: Flags, output: str) -> Answer:
    """What a command line is answered with. Raises InvalidSpec for bad input."""
    deployment, workload, show = flags
    if show.compare is not None:
        return _compare(show.compare, files, workload, output)
    if show.search is not None:
        # Searching loads the search.
        from kimi_operator.cli.search import answer_search  # noqa: PLC0415

        found = answer_search(files, deployment, workload, show.search)
        return found.shown(output), FITS if found.fits else DOES_NOT_FIT
    asked = asked_for(files, deployment, workload)
    if show.what_if:
        return _what_if(asked, show.what_if, show.cost, output)
    planned = make_plan(asked)
    if isinstance(planned.plan, Infeasible):
        return _refusal(asked.problems(planned.plan.problems), output), DOES_NOT_FIT
    outlook = outlook_of(planned, asked)
    outlook = replace(outlook, misses=asked.problems(outlook.misses))
    cost = None if show.cost is None else cost_of(outlook, show.cost)
    if show.explain is not None:
        return _explained(outlook, cost, show.explain, output), FITS
    return _shown(outlook, cost, output), DOES_NOT_FIT if outlook.misses else FITS


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _shown(outlook: Outlook, cost: Cost | None, output: str) -> str:
    if output in ("json", "yaml"):
        return dumped(plan_document(outlook, cost), output)
    if output == "markdown":
        from kimi_operator.cli.markdown import plan_markdown  # noqa: PLC0415

        return _lines(plan_markdown(outlook, cost))
    if output == "html":
        from kimi_operator.cli.page import plan_page  # noqa: PLC0415

        return plan_page(outlook, cost)
    return _lines(plan_text(outlook, cost))


def _refusal(problems: tuple[Problem, ...], output: str) -> str:
    if output in ("json", "yaml"):
        return dumped(refusal_document(problems), output)
    if output == "markdown":
        from kimi_operator.cli.markdown import refusal_markdown  # noqa: PLC0415

        return _lines(refusal_markdown(problems))
    if output == "html":
        from kimi_operator.cli.page import refusal_page  # noqa: PLC0415

        return refusal_page(problems)
    return _lines(refusal_text(problems))


def _explained(outlook: Outlook, cost: Cost | None, wanted: str, output: str) -> str:
    found = find_figures(_figures(outlook, cost), wanted)
    if output == "text":
        return _lines(explanation(found))
    return dumped({"figures": [dataclasses.asdict(figure) for figure in found]}, output)


def _figures(outlook: Outlook, cost: Cost | None) -> list[Figure]:
    return [*figures(outlook), *(cost_figures(outlook, cost) if cost else ())]


@dataclass(frozen=True, slots=True)
class _Side:
    """One of two plans: its figures, or why it does not fit."""

    figures: list[Figure]
    problems: tuple[Problem, ...]
    """Why it does not fit, or what it misses."""

    @property
    def text(self) -> str:
        """Whether it fits, in a cell."""
        if not self.problems:
            return "yes"
        return ("yes, but misses " if self.figures else "no: ") + "; ".join(map(str, self.problems))


def _side(planned: Planned, asked: Asked, price: float | None) -> _Side:
    if isinstance(planned.plan, Infeasible):
        return _Side([], asked.problems(planned.plan.problems))
    outlook = outlook_of(planned, asked)
    cost = None if price is None else cost_of(outlook, price)
    return _Side(_figures(outlook, cost), asked.problems(outlook.misses))


def _what_if(asked: Asked, edits: list[str], price: float | None, output: str) -> Answer:
    """Edits are made to what the flags or the manifest say, not to what the plan chose."""
    first = make_plan(asked)
    stated = first.deployment.spec.workload
    workload = asked.workload or ({} if stated is None else dump(stated))
    inputs = deployment_inputs(asked.deployment, first.profile, workload)
    changed = edited(inputs, edits, asked.profiles)
    try:
        deployment, profile = read_edited(changed)
        profiles = {**asked.profiles, profile.metadata.name: profile}
        other = Asked(deployment, profiles, changed.workload, DEPLOYMENT_FLAGS if asked.is_from_flags else frozenset())
        after = _side(make_plan(other), other, price)
    except InvalidSpec as error:
        raise named(error, "--what-if") from error
    heads = ("before", ", ".join(edits))
    return _changes((_side(first, asked, price), after), heads, output, is_whole=False)


def _compare(pair: tuple[Path, Path], files: list[Path], work: WorkloadFlags, output: str) -> Answer:
    sides = []
    for path in pair:
        documents = read_documents([*files, path])
        deployment = deployment_of([each for each in documents if each[0] == path], [path])
        asked = Asked(deployment, profiles_of(documents), workload_document(work), work.given)
        try:
            sides.append(_side(plan_deployment(deployment, asked.profiles), asked, None))
        except InvalidSpec as error:
            raise named(error, str(path)) from error
    return _changes((sides[0], sides[1]), (str(pair[0]), str(pair[1])), output, is_whole=True)


def _changes(sides: tuple[_Side, _Side], heads: tuple[str, str], output: str, *, is_whole: bool) -> Answer:
    """Both sides, or only what differs; figures of one side alone say nothing, so then the verdict stands alone."""
    before, after = sides
    rows = changes(before.figures, after.figures) if before.figures and after.figures else []
    rows = [Change("fits", before.text, after.text), *rows]
    rows = [row for row in rows if is_whole or row.is_changed]
    status = DOES_NOT_FIT if after.problems or (is_whole and before.problems) else FITS
    if output in ("json", "yaml"):
        listed = [{"key": row.key, "before": row.before, "after": row.after} for row in rows]
        return dumped({"before": heads[0], "after": heads[1], "changes": listed}, output), status
    if not rows:
        return "nothing changes\n", status
    return _lines(markdown_table(rows, heads) if output == "markdown" else table(rows, heads)), status
