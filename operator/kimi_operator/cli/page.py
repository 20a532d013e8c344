"""A plan as one HTML page that works from a file: inline style and SVG, no scripts, nothing from elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from kimi_operator.api.deployment import Role
from kimi_operator.cli.cost import Cost, price_text, rows
from kimi_operator.cli.look_ahead import contexts
from kimi_operator.cli.outlook import Outlook, RoleOutlook
from kimi_operator.cli.picture import legend, memory_picture, pictures
from kimi_operator.cli.text import headline, layout_text, total_of, verdict
from kimi_operator.errors import Problem
from kimi_operator.planner.units import bytes_text

STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --dim: #59636e; --page: #fff; --line: #d1d9e0; --weights: #3b6fb6;
  --reserved: #9aa4b2; --slots: #c26a1b; --pages: #2c8a5b; --free: #e8ebef; --asked: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --text: #e6eaef; --dim: #9aa4b2; --page: #14181d; --line: #343c46;
  --weights: #6c9be0; --reserved: #6b7684; --slots: #e09a55; --pages: #5bbd8b; --free: #262d35; --asked: #ff8a80; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.verdict { font-size: 1.1rem; font-weight: 600; } .bad { color: var(--asked); } .dim, figcaption { color: var(--dim); }
figure { margin: 1rem 0; } svg { width: 100%; height: auto; display: block; } figcaption { font-size: .85rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; } .scroll { overflow-x: auto; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th.number, td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
svg text { font: 12px system-ui, sans-serif; fill: var(--dim); } svg text.inside { fill: #fff; font-weight: 600; }
svg text.mark { fill: var(--text); } .grid { stroke: var(--line); } .band { fill: var(--weights); opacity: .18; }
.line { fill: none; stroke-width: 2; } .line.value { stroke: var(--weights); }
.line.cut { stroke: var(--slots); stroke-dasharray: 5 4; } .dot.value { fill: var(--weights); }
line.knee { stroke: var(--pages); stroke-dasharray: 2 3; } line.asked { stroke: var(--asked); stroke-dasharray: 6 3; }
.weights { fill: var(--weights); background: var(--weights); } .reserved { fill: var(--reserved);
  background: var(--reserved); } .slots { fill: var(--slots); background: var(--slots); }
.pages { fill: var(--pages); background: var(--pages); } .free { fill: var(--free); background: var(--free); }
.swatch { display: inline-block; width: .8em; height: .8em; margin: 0 .35em 0 1em; border: 1px solid var(--line); }
"""


def plan_page(outlook: Outlook, cost: Cost | None) -> str:
    """The whole page."""
    plan = outlook.plan
    return page(f"{plan.architecture} on {plan.profile}: {plan.gpus} GPUs", _body(outlook, cost))


def refusal_page(problems: tuple[Problem, ...]) -> str:
    """Why it does not fit."""
    lines = ((each.field, each.got, each.expected, each.remedy) for each in problems)
    body = ['<p class="verdict bad">does not fit</p>', *table(("field", "got", "expected", "remedy"), lines)]
    return page("Does not fit", body)


def _body(outlook: Outlook, cost: Cost | None) -> Iterator[str]:
    name = "verdict bad" if outlook.misses else "verdict"
    yield f'<p class="{name}">{escape(verdict(outlook))}</p>'
    yield from (f'<p class="bad">warning: {escape(warning)}</p>' for warning in outlook.plan.warnings)
    if outlook.misses:
        misses = ((each.field, each.got, each.expected, each.remedy) for each in outlook.misses)
        yield from table(("misses", "got", "expected", "remedy"), misses)
    yield from table(("", *(f"{role}: {layout_text(outlook.role(role))}" for role in Role)), _limits(outlook))
    yield from table(("", ""), headline(outlook).items())
    if outlook.better:
        yield f"<p>better layout: {escape(outlook.better)}</p>"
    yield "<h2>Memory of a GPU</h2>"
    for role in Role:
        yield from _memory_figure(outlook.role(role))
    yield "<h2>How many at once, how fast</h2>"
    for svg, words in pictures(outlook, contexts(outlook)):
        yield f"<figure>{svg}<figcaption>{escape(words)}</figcaption></figure>"
    if cost is not None:
        yield f"<h2>Cost at {cost.per_gpu_hour:g} a GPU-hour, with {cost.concurrency:,} at once</h2>"
        yield from table(("of", "cost"), ((label, price_text(price)) for label, price in rows(cost).items()))
    yield "<h2>Line by line</h2>"
    for role in Role:
        yield from _details(outlook.role(role))


def _limits(outlook: Outlook) -> Iterator[tuple[str, ...]]:
    plans = [outlook.plan.role(role) for role in Role]
    yield ("maxNumSeqs a lane", *(f"{plan.max_num_seqs:,}" for plan in plans))
    yield ("KV tokens a lane", *(f"{plan.num_pages * plan.page_size_tokens:,}" for plan in plans))
    yield ("longest request, tokens", *(f"{plan.max_model_len:,}" for plan in plans))
    yield ("binds", *(plan.binds for plan in plans))


def _memory_figure(each: RoleOutlook) -> Iterator[str]:
    items = "".join(
        f'<span class="swatch {name}"></span>{escape(label)} {escape(size)}' for name, label, size in legend(each)
    )
    yield f"<figure>{memory_picture(each)}<figcaption>{each.plan.role}: {items}</figcaption></figure>"


def _details(each: RoleOutlook) -> Iterator[str]:
    yield f"<h3>{each.plan.role}</h3>"
    shown = (*each.plan.lines, total_of(each.plan))
    lines = [(line.label, f"{line.bytes:,}", bytes_text(line.bytes), line.how) for line in shown]
    yield from table(("memory of a GPU", "bytes", "", "how"), lines, numbers=(1, 2))
    if each.unused:
        lines = [(line.label, f"{line.bytes:,}", bytes_text(line.bytes), line.how) for line in each.unused]
        yield from table(("unused by the workload", "bytes", "", "how"), lines, numbers=(1, 2))
    yield "<p>What binds, if slots and pages are cut for the context:</p><ul>"
    yield from (f"<li>{escape(str(stretch))}</li>" for stretch in each.stretches)
    yield "</ul>"


def table(head: Sequence[str], body: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> Iterator[str]:
    """A table of texts; columns of `numbers` stand to the right."""
    yield '<div class="scroll"><table>'
    if any(head):
        yield f"<thead>{_row('th', head, numbers)}</thead>"
    yield "<tbody>"
    yield from (_row("td", row, numbers) for row in body)
    yield "</tbody></table></div>"


def _row(tag: str, cells: Sequence[str], numbers: Sequence[int]) -> str:
    names = (' class="number"' if column in numbers else "" for column in range(len(cells)))
    inside = (f"<{tag}{name}>{escape(text)}</{tag}>" for text, name in zip(cells, names, strict=True))
    return f"<tr>{''.join(inside)}</tr>"


def page(title: str, body: Iterable[str]) -> str:
    """A whole page; the title stands above the body, which is markup."""
    inside = "\n".join(body)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"/>\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n{inside}\n</body>\n</html>\n"
    )
