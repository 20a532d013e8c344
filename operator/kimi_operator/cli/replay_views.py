"""What `kimictl replay` answers: one outcome, as text, Markdown, a page, or a document for scripts."""

from __future__ import annotations

from pathlib import Path

from kimi_operator.cli.asking import asked_for, make_plan
from kimi_operator.cli.document import dumped
from kimi_operator.cli.files import STANDARD_INPUT
from kimi_operator.cli.flags import DeploymentFlags, WorkloadFlags, refuse
from kimi_operator.cli.progress import Progress
from kimi_operator.cli.replayed import Outcome, num_turns, replay_on
from kimi_operator.cli.session_flags import SessionFlags, TableFlags
from kimi_operator.cli.sessions import asked_sessions
from kimi_operator.cli.views import lines, refusal
from kimi_operator.planner import Infeasible
from kimi_operator.planner.demand import FIELD
from kimi_operator.planner.workload import workload_of

DEFAULT_ROWS = 10
MOST_ROWS = 200
Flags = tuple[DeploymentFlags, SessionFlags, TableFlags]


def answer(files: list[Path], flags: Flags, output: str) -> tuple[str, int]:
    """What a command line is answered with, and the exit status: 1 when something does not fit.

    Raises InvalidSpec for bad input.
    """
    deployment, of_sessions, tables = flags
    rows = DEFAULT_ROWS if tables.rows is None else tables.rows
    if not 1 <= rows <= MOST_ROWS:
        raise refuse("--rows", f"{rows:,}", f"from 1 to {MOST_ROWS}", "correct it")
    if STANDARD_INPUT in files and of_sessions.trace == STANDARD_INPUT:
        raise refuse("--file", "- beside --trace -", "one of them to be standard input", "name a file for the other")
    if not files and not deployment.given:
        raise refuse("--file", "nothing", "a manifest, or flags such as --chip mi300x", "name one with -f")
    asked = asked_for(files, deployment, WorkloadFlags())
    stated = asked.deployment.spec.workload
    sessions = asked_sessions(of_sessions, None if stated is None else workload_of(stated, FIELD))
    planned = make_plan(asked)
    if isinstance(planned.plan, Infeasible):
        return refusal(asked.problems(planned.plan.problems), output), 1
    progress = Progress("turns replayed, at predicted, short and long times", num_turns(sessions))
    outcome = replay_on(planned, sessions, rows, progress)
    found = outcome.value.summary
    return _shown(outcome, output), 1 if found.cut_sessions or found.refused_turns or found.expired_turns else 0


def _shown(outcome: Outcome, output: str) -> str:
    # Each form loads its own parts.
    if output in ("json", "yaml"):
        from kimi_operator.cli.replay_document import replay_document  # noqa: PLC0415

        return dumped(replay_document(outcome), output)
    if output == "text":
        from kimi_operator.cli.replay_text import replay_text  # noqa: PLC0415

        return lines(replay_text(outcome))
    from kimi_operator.cli.replay_pages import replay_markdown, replay_page  # noqa: PLC0415

    return lines(replay_markdown(outcome)) if output == "markdown" else replay_page(outcome)
