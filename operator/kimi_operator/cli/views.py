"""The views of `kimictl plan`: each takes what was asked and gives its text and the exit status."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from msgspec.structs import replace

from kimi_operator.cli import DOES_NOT_FIT, FITS, program_name
from kimi_operator.cli.asking import asked_for, make_plan, outlook_of
from kimi_operator.cli.better import better_layout, search_command
from kimi_operator.cli.cost import Cost, cost_of
from kimi_operator.cli.document import dumped, plan_document, refusal_document
from kimi_operator.cli.flags import DeploymentFlags, View, WorkloadFlags
from kimi_operator.cli.outlook import Outlook
from kimi_operator.cli.text import plan_text, refusal_text
from kimi_operator.errors import Problem
from kimi_operator.planner import Infeasible
from kimi_operator.planner.layout import MAX_NODES

EXPLAINED = ("key", "text", "means", "formula", "values", "source")
"""Columns of an explanation."""
Answer: TypeAlias = tuple[str, int]
Flags: TypeAlias = tuple[DeploymentFlags, WorkloadFlags, View]


def answer(files: list[Path], flags: Flags, output: str) -> Answer:
    """What a command line is answered with. Raises InvalidSpec for bad input."""
    deployment, workload, show = flags
    if show.compare is not None:
        # Each view loads its own parts.
        from kimi_operator.cli.sides import compare  # noqa: PLC0415

        return compare(show.compare, files, workload, show.cost, output)
    if show.search is not None:
        from kimi_operator.cli.search import answer_search  # noqa: PLC0415
        from kimi_operator.cli.search_views import search_view  # noqa: PLC0415

        found = answer_search(files, deployment, workload, show.search, show.cost)
        return search_view(found, output), FITS if found.fits else DOES_NOT_FIT
    asked = asked_for(files, deployment, workload)
    if show.what_if:
        from kimi_operator.cli.sides import what_if  # noqa: PLC0415

        return what_if(asked, show.what_if, show.cost, output)
    planned = make_plan(asked)
    if isinstance(planned.plan, Infeasible):
        return refusal(asked.problems(planned.plan.problems), output), DOES_NOT_FIT
    outlook = outlook_of(planned, asked)
    cost = None if show.cost is None else cost_of(outlook, show.cost)
    if show.explain is not None:
        return _explained(outlook, cost, show.explain, output), FITS
    # a search takes as long as all the rest: for scripts its flag stands in the document
    if outlook.nodes <= MAX_NODES and output not in ("json", "yaml"):
        search = search_command(program_name(sys.argv[0]), files, deployment, workload, outlook.nodes)
        outlook = replace(outlook, better=better_layout(outlook, search))
    return _shown(outlook, cost, output), DOES_NOT_FIT if outlook.misses else FITS


def lines(each: Iterable[str]) -> str:
    """One text, with a newline after each."""
    return "".join(f"{line}\n" for line in each)


def _shown(outlook: Outlook, cost: Cost | None, output: str) -> str:
    if output in ("json", "yaml"):
        return dumped(plan_document(outlook, cost), output)
    if output == "markdown":
        from kimi_operator.cli.markdown import plan_markdown  # noqa: PLC0415

        return lines(plan_markdown(outlook, cost))
    if output == "html":
        from kimi_operator.cli.page import plan_page  # noqa: PLC0415

        return plan_page(outlook, cost)
    return lines(plan_text(outlook, cost))


def refusal(problems: tuple[Problem, ...], output: str) -> str:
    """What does not fit, in the form that is asked for."""
    if output in ("json", "yaml"):
        return dumped(refusal_document(problems), output)
    if output == "markdown":
        from kimi_operator.cli.markdown import refusal_markdown  # noqa: PLC0415

        return lines(refusal_markdown(problems))
    if output == "html":
        from kimi_operator.cli.page import refusal_page  # noqa: PLC0415

        return refusal_page(problems)
    return lines(refusal_text(problems))


def _explained(outlook: Outlook, cost: Cost | None, wanted: str, output: str) -> str:
    from kimi_operator.cli.explain import explanation, explanation_document, find_figures  # noqa: PLC0415
    from kimi_operator.cli.glossary import explained_figures  # noqa: PLC0415

    found = find_figures(explained_figures(outlook, cost), wanted)
    if output == "text":
        return lines(explanation(found))
    document = explanation_document(found)
    if output == "markdown":
        from kimi_operator.cli.markdown import table  # noqa: PLC0415

        return lines(table(EXPLAINED, ([figure[name] for name in EXPLAINED] for figure in document["figures"])))
    return dumped(document, output)
