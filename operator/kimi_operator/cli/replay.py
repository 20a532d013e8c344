"""`kimictl replay`: what sessions of agents do to a deployment, predicted: load, pressure, waits and times of turns."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from kimi_operator.cli.flags import DeploymentFlags, read_choice
from kimi_operator.cli.session_flags import SessionFlags, TableFlags

Output = Literal["text", "json", "yaml", "markdown", "html"]


def replay(
    *,
    file: Annotated[list[Path] | None, Parameter(name=["--file", "-f"], allow_leading_hyphen=True, negative=())] = None,
    output: Annotated[Output, Parameter(name=["--output", "-o"], converter=read_choice, n_tokens=1)] = "text",
    deployment: Annotated[DeploymentFlags | None, Parameter(name="*")] = None,
    sessions: Annotated[SessionFlags | None, Parameter(name="*")] = None,
    tables: Annotated[TableFlags | None, Parameter(name="*")] = None,
) -> int:
    """`kimictl replay`; its help stands beside the list of commands.

    Parameters
    ----------
    file
        YAML with one KimiDeployment, and your own HardwareProfiles if any; `-` is standard input. Can be repeated.
        A `profile.yaml` beside it is read too, which standard error then says. Its spec.workload, if any, gives
        defaults of --first-prompt-tokens, --output-tokens, --reuse and --agents.
    output
        text, json, yaml, markdown, or html: one page that needs nothing else.
    """
    # Flags that cannot be read are answered before the planner is loaded.
    from kimi_operator.cli.replay_views import answer  # noqa: PLC0415

    flags = (deployment or DeploymentFlags(), sessions or SessionFlags(), tables or TableFlags())
    text, status = answer(file or [], flags, output)
    sys.stdout.write(text)
    return status
