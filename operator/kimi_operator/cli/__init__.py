"""`kimictl`: plan, render and check deployments from a prompt. Each command is imported only when it runs."""

from __future__ import annotations

import sys

from cyclopts import App

from kimi_operator.errors import KimiError

COMMANDS = {
    "plan": "kimi_operator.cli.plan:plan",
    "render": "kimi_operator.cli.render:render",
    "needle": "kimi_operator.cli.needle:needle",
    "profile": "kimi_operator.cli.profile:app",
}


def build_app() -> App:
    """The app with every command."""
    app = App(name="kimictl", help="Plan, render and check Kimi deployments.")
    for name, target in COMMANDS.items():
        app.command(target, name=name)
    return app


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit with its status; 1, with the reason on standard error, when it cannot be done."""
    try:
        status = build_app()(arguments, result_action="return_value")
    except KimiError as error:
        sys.stderr.write(f"kimictl: {error}\n")
        sys.exit(1)
    sys.exit(status if isinstance(status, int) else 0)
