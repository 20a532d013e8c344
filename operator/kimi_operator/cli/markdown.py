"""A plan as Markdown, for a review or a ticket. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kimi_operator.api.deployment import Role
from kimi_operator.cli.cost import Cost, price_text, rows
from kimi_operator.cli.figures import with_band
from kimi_operator.cli.outlook import Outlook
from kimi_operator.cli.text import headline, layout_text, prefill_text, total_of, verdict
from kimi_operator.errors import Problem
from kimi_operator.planner.units import bytes_text


def plan_markdown(outlook: Outlook, cost: Cost | None) -> Iterator[str]:
    """Verdict, limits, memory and predictions as tables."""
    plan = outlook.plan
    yield f"# {plan.architecture} on {plan.profile}: {plan.gpus} GPUs"
    yield ""
    yield f"**{verdict(outlook)}**"
    yield from (f"\n> warning: {cell(warning)}" for warning in plan.warnings)
    yield ""
    yield from table(("", *(f"{role}: {layout_text(outlook.role(role))}" for role in Role)), _limits(outlook))
    if outlook.misses:
        yield "\n## Misses\n"
        yield from (f"- {cell(str(problem))}" for problem in outlook.misses)
    yield "\n## Predictions\n"
    yield from _predictions(outlook)
    if cost is not None:
        yield f"\n## Cost at {cost.per_gpu_hour:g} a GPU-hour, {cost.concurrency:,} at once\n"
        yield from table(("of", "cost"), ((label, price_text(price)) for label, price in rows(cost).items()))
    for role in Role:
        each = outlook.role(role)
        yield f"\n## Memory of a {role} GPU\n"
        shown = (*each.plan.lines, total_of(each.plan))
        lines = ((line.label, f"{line.bytes:,}", bytes_text(line.bytes), line.how) for line in shown)
        yield from table(("line", "bytes", "", "how"), lines)
        yield f"\nWhat binds, if slots and pages are cut for the context, in {role}:\n"
        yield from (f"- {stretch}" for stretch in each.stretches)


def refusal_markdown(problems: tuple[Problem, ...]) -> Iterator[str]:
    """Why it does not fit."""
    yield "**does not fit**"
    yield ""
    rows = ((each.field, each.got, each.expected, each.remedy) for each in problems)
    yield from table(("field", "got", "expected", "remedy"), rows)


def _limits(outlook: Outlook) -> Iterator[tuple[str, ...]]:
    plans = [outlook.plan.role(role) for role in Role]
    yield ("maxNumSeqs a lane", *(f"{plan.max_num_seqs:,}" for plan in plans))
    yield ("KV tokens a lane", *(f"{plan.num_pages * plan.page_size_tokens:,}" for plan in plans))
    yield ("longest request, tokens", *(f"{plan.max_model_len:,}" for plan in plans))
    yield ("binds", *(plan.binds for plan in plans))
    unused = (sum(line.bytes for line in outlook.role(role).unused) for role in Role)
    yield ("unused by the workload, a GPU", *(bytes_text(size) for size in unused))


def _predictions(outlook: Outlook) -> Iterator[str]:
    for label, text in headline(outlook).items():
        yield f"- {label}: {cell(text)}"
    if outlook.better:
        yield f"- better layout: {cell(outlook.better)}"
    speed, either = outlook.speed, outlook.speed or outlook.decode_speed
    if either is None:
        return
    if speed is not None:
        yield f"- prefill: {prefill_text(speed)}"
    if either.handoff is not None:
        yield f"- handoff: {with_band(either.handoff)}"
    yield f"- decode calibrated on: {cell(either.tpot.calibrated_on)}"
    if speed is not None:
        yield f"- prefill calibrated on: {cell(speed.prefill.calibrated_on)}"


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table of texts, none of which can end a cell."""
    yield f"| {' | '.join(map(cell, head))} |"
    yield "|" + "---|" * len(head)
    yield from (f"| {' | '.join(map(cell, row))} |" for row in body)


def cell(text: str) -> str:
    """A text that neither ends a cell nor begins markup."""
    for mark in "\\|<>*_`":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())
