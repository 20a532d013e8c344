"""`kimictl`: plan, replay, render and check deployments from a prompt. Each command is imported only when it runs."""

from __future__ import annotations

import gc
import os
import sys
from inspect import cleandoc
from pathlib import PurePath
from typing import TYPE_CHECKING

from msgspec import Struct

from kimi_operator.cli.reasons import forget, reasons_cannot_fail
from kimi_operator.errors import InvalidSpec, KimiError

if TYPE_CHECKING:
    from cyclopts import App


class Command(Struct, frozen=True):
    """Where a command is, and its help: here, so that the list of commands imports none of them."""

    target: str
    help: str


COMMANDS = {
    "plan": Command(
        "kimi_operator.cli.plan:plan",
        """Plan a deployment without a cluster, from a manifest or from flags.

        What it would run with, how fast, and the arithmetic behind it.

        Exit status: 0 it fits and meets the workload; 1 it does not fit, misses a target, or --check missed a row;
        2 bad input, named with its value and what to do.
        """,
    ),
    "replay": Command(
        "kimi_operator.cli.replay:replay",
        """Replay agents on a deployment without a cluster: sessions of turns whose context grows, drawn or recorded.

        What binds over time, pressure on prefill, KV pages and a prefix cache, and times turn by turn; all predicted.

        Exit status: 0 every turn is served; 1 the deployment does not fit, or turns are cut at its longest request,
        refused or failed; 2 bad input, named with its value and what to do.
        """,
    ),
    "render": Command(
        "kimi_operator.cli.render:render",
        "Print every manifest that the operator would apply for a KimiDeployment, as YAML.",
    ),
    "needle": Command(
        "kimi_operator.cli.needle:needle",
        """Ask a running service for distinct needles in random text; exit 1 unless every one is found.

        A level of concurrency c sends c requests at once, so 1,8,16,32 asks for 57 needles.
        """,
    ),
    "profile": Command(
        "kimi_operator.cli.profile:app",
        "Show hardware profiles, draft new ones from nodes, and calibrate them.",
    ),
}
PLUGIN = "kubectl-kimi"
"""An executable of this name on PATH is run by `kubectl kimi`."""

FITS, DOES_NOT_FIT, BAD_INPUT = 0, 1, 2
INTERRUPTED, READER_GONE = 130, 141
"""As shells report a program that SIGINT or SIGPIPE ended."""

MOST_PROBLEMS = 5
"""Lines of problems; a file of another kind has one in each field."""

COLLECT_AFTER = 100_000
"""Objects made between two collections: the imports of one answer make some tens of thousands, and free none."""

HELP = """Plan, replay, render and check Kimi deployments.

Exit status: 0 it fits, or the check is passed; 1 it does not fit, misses a target, or the service did not pass;
2 bad input, named with its value and what to do.

Installed as `kubectl-kimi` too, so that `kubectl kimi plan ...` is the same as `kimictl plan ...`.
"""


def build_app(name: str = "kimictl") -> App:
    """The app with every command."""
    from cyclopts import App  # noqa: PLC0415

    app = App(name=name, help=HELP, suppress_keyboard_interrupt=False)
    for title, command in COMMANDS.items():
        app.command(command.target, name=title, help=cleandoc(command.help))
    return app


def program_name(path: str) -> str:
    """What the user typed: kubectl finds its plugins by the name of the file."""
    return "kubectl kimi" if PurePath(path).stem == PLUGIN else "kimictl"


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit with its status; reasons stand on standard error.

    Without arguments those of the program, which then is the whole process.
    """
    if arguments is None:
        _start_fast()
    with reasons_cannot_fail():
        status = _status(program_name(sys.argv[0]), arguments)
    if arguments is None:
        # the interpreter's end would search all that was loaded for garbage, a sixth of the whole time
        gc.freeze()
    sys.exit(status)


def _status(name: str, arguments: list[str] | None) -> int:
    """The exit status of one command, however it ends."""
    if sys.stdout is None:
        sys.stderr.write(f"{name}: standard output is closed\n")
        return BAD_INPUT
    try:
        status = run(name, arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write(f"{name}: interrupted\n")
        status = INTERRUPTED
    except BrokenPipeError:
        status = READER_GONE
        forget(sys.stdout)
    except OSError as error:
        # files that cannot be read are refused by name where they are read; what is left is a full disk
        sys.stderr.write(f"{name}: standard output: {error.strerror or error}\n")
        status = BAD_INPUT
        forget(sys.stdout)
    return status


def run(name: str, arguments: list[str] | None) -> int:
    """The exit status of one command; reasons stand on standard error."""
    # Imported in here, so that Ctrl-C is answered in one line from the first moment on.
    from cyclopts import CycloptsError  # noqa: PLC0415

    from kimi_operator.cli.misread import joined, misread  # noqa: PLC0415

    app, words = build_app(name), joined(sys.argv[1:] if arguments is None else arguments)
    try:
        status = app(words, result_action="return_value", exit_on_error=False, print_error=False)
    except CycloptsError as error:
        reason = str(misread(error, words, app) or " ".join(str(error).split()).rstrip("."))
        sys.stderr.write(f"{name}: {reason}; see `{' '.join((name, *(error.command_chain or ())))} --help`\n")
        return BAD_INPUT
    except InvalidSpec as error:
        sys.stderr.writelines(f"{name}: {problem}\n" for problem in error.problems[:MOST_PROBLEMS])
        if (more := len(error.problems) - MOST_PROBLEMS) > 0:
            sys.stderr.write(f"{name}: and {more} more\n")
        return BAD_INPUT
    except KimiError as error:
        sys.stderr.write(f"{name}: {error}\n")
        return DOES_NOT_FIT
    return status if isinstance(status, int) else FITS


def _start_fast() -> None:
    """An answer would spend a tenth of its time on collecting its imports and on asking every package for plugins."""
    gc.set_threshold(COLLECT_AFTER)
    os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
