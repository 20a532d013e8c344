"""A replay as Markdown, and as one HTML page that works from a file. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from kimi_operator.cli import markdown, page
from kimi_operator.cli import replay_rows as rows
from kimi_operator.cli.replayed import Outcome

OVER_TIME_NUMBERS = range(len(rows.OVER_TIME) - 1)
"""All columns but the last, which says what binds."""
BY_TURN_NUMBERS = range(len(rows.BY_TURN))


def replay_markdown(outcome: Outcome) -> Iterator[str]:
    """For a review or a ticket."""
    yield f"# {markdown.cell(rows.title(outcome))}"
    yield from (f"\n{markdown.cell(line)}" for line in rows.opening(outcome))
    yield from (f"\n> warning: {markdown.cell(warning)}" for warning in rows.warnings(outcome))
    if not outcome.value.summary.turns:
        yield f"\n**{rows.NOTHING_SERVED}**"
        return
    yield ""
    yield from markdown.table(("", ""), rows.summary_rows(outcome))
    yield f"\n## {_heading(rows.over_time_title(outcome))}\n"
    yield from markdown.table(rows.OVER_TIME, rows.over_time(outcome))
    yield f"\n## {_heading(rows.BY_TURN_TITLE)}\n"
    yield from markdown.table(rows.BY_TURN, rows.by_turn(outcome))
    yield "\n## What the figures stand on\n"
    yield from (f"- {markdown.cell(note)}" for note in rows.notes(outcome))


def replay_page(outcome: Outcome) -> str:
    """For a browser."""
    return page.page(rows.title(outcome), _body(outcome))


def _body(outcome: Outcome) -> Iterator[str]:
    yield from (f'<p class="dim">{escape(line)}</p>' for line in rows.opening(outcome))
    yield from (f'<p class="bad">warning: {escape(warning)}</p>' for warning in rows.warnings(outcome))
    if not outcome.value.summary.turns:
        yield f'<p class="verdict bad">{rows.NOTHING_SERVED}</p>'
        return
    yield from page.table(("", ""), rows.summary_rows(outcome))
    yield f"<h2>{escape(_heading(rows.over_time_title(outcome)))}</h2>"
    yield from page.table(rows.OVER_TIME, rows.over_time(outcome), OVER_TIME_NUMBERS)
    yield f"<h2>{escape(_heading(rows.BY_TURN_TITLE))}</h2>"
    yield from page.table(rows.BY_TURN, rows.by_turn(outcome), BY_TURN_NUMBERS)
    yield "<h2>What the figures stand on</h2><ul>"
    yield from (f"<li>{escape(note)}</li>" for note in rows.notes(outcome))
    yield "</ul>"


def _heading(text: str) -> str:
    return text[:1].upper() + text[1:]
