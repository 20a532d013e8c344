"""`kimictl`: plan, render and check deployments from a prompt. Each command is imported only when it runs."""

from __future__ import annotations

import sys
from pathlib import PurePath

from cyclopts import App, CycloptsError

from kimi_operator.errors import InvalidSpec, KimiError

COMMANDS = {
    "plan": "kimi_operator.cli.plan:plan",
    "render": "kimi_operator.cli.render:render",
    "needle": "kimi_operator.cli.needle:needle",
    "profile": "kimi_operator.cli.profile:app",
}
PLUGIN = "kubectl-kimi"
"""An executable of this name on PATH is run by `kubectl kimi`."""

FITS, DOES_NOT_FIT, BAD_INPUT = 0, 1, 2
HELP = """Plan, render and check Kimi deployments.

`plan`: what a deployment would run with, how fast, and the arithmetic behind it. `render`: the manifests that the
operator would apply. `needle`: recall of hidden facts by a running service. `profile`: hardware profiles.

Exit status: 0 it fits, or the check is passed; 1 it does not fit, misses a target, or the service did not pass;
2 bad input, named with its value and what to do.

Installed as `kubectl-kimi` too, so that `kubectl kimi plan ...` is the same as `kimictl plan ...`.
"""


def build_app(name: str = "kimictl") -> App:
    """The app with every command."""
    app = App(name=name, help=HELP)
    for command, target in COMMANDS.items():
        app.command(target, name=command)
    return app


def program_name(path: str) -> str:
    """What the user typed: kubectl finds its plugins by the name of the file."""
    return "kubectl kimi" if PurePath(path).stem == PLUGIN else "kimictl"


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit with its status; reasons stand on standard error."""
    name = program_name(sys.argv[0])
    try:
        status = build_app(name)(arguments, result_action="return_value", exit_on_error=False, print_error=False)
    except CycloptsError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        sys.stderr.write(f"{name}: {reason}; see `{name} --help`\n")
        sys.exit(BAD_INPUT)
    except KimiError as error:
        sys.stderr.write(f"{name}: {error}\n")
        sys.exit(BAD_INPUT if isinstance(error, InvalidSpec) else DOES_NOT_FIT)
    sys.exit(status if isinstance(status, int) else FITS)
