"""`kimictl plan`: what a deployment would run with, how fast, and the arithmetic behind it."""

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from kimi_operator.cli.flags import DeploymentFlags, View, WorkloadFlags, read_choice, refuse

Output = Literal["text", "json", "yaml", "markdown", "html"]
OUTPUTS: dict[str, tuple[Output, ...]] = {
    "--check": ("text", "json", "yaml", "markdown"),
    "--compare": ("text", "json", "yaml", "markdown"),
    "--what-if": ("text", "json", "yaml", "markdown"),
    "--explain": ("text", "json", "yaml", "markdown"),
}
"""Forms of the views that have not all of them."""


def plan(
    *,
    file: Annotated[list[Path] | None, Parameter(name=["--file", "-f"], allow_leading_hyphen=True, negative=())] = None,
    output: Annotated[Output, Parameter(name=["--output", "-o"], converter=read_choice, n_tokens=1)] = "text",
    deployment: Annotated[DeploymentFlags | None, Parameter(name="*")] = None,
    workload: Annotated[WorkloadFlags | None, Parameter(name="*")] = None,
    view: Annotated[View | None, Parameter(name="*")] = None,
) -> int:
    """`kimictl plan`; its help stands beside the list of commands.

    Parameters
    ----------
    file
        YAML with one KimiDeployment, and your own HardwareProfiles if any; `-` is standard input. Can be repeated.
        A `profile.yaml` beside it is read too, which standard error then says.
    output
        text, json, yaml, markdown, or html: one page with pictures that needs nothing else.
    """
    files, show = file or [], view or View()
    flags = (deployment or DeploymentFlags(), workload or WorkloadFlags(), show)
    _check_view(show, output)
    _check_beside(files, *flags)
    if show.check:
        # The comparison loads the published figures, which no plan needs.
        from kimi_operator.cli.check import check as check_published  # noqa: PLC0415

        return check_published(output)
    # Bad combinations of flags are answered before the planner is loaded.
    from kimi_operator.cli.views import answer  # noqa: PLC0415

    text, status = answer(files, flags, output)
    sys.stdout.write(text)
    return status


def _check_view(show: View, output: Output) -> None:
    """Raises InvalidSpec for views that exclude each other, and for forms that a view does not have."""
    if len(show.chosen) > 1:
        raise refuse(show.chosen[0], f"{' and '.join(show.chosen)} at once", "one of them", "leave the others out")
    for name in show.chosen:
        if output not in (forms := OUTPUTS.get(name, (output,))):
            expected = f"one of {', '.join(forms)} with {name}"
            raise refuse("--output", output, expected, "choose one of them")
    if show.cost is not None and show.check:
        raise refuse("--cost", "--cost and --check at once", "either of them", "leave one out")


def _check_beside(files: list[Path], deployment: DeploymentFlags, workload: WorkloadFlags, show: View) -> None:
    """Raises InvalidSpec for flags that a view does not look at."""
    if show.check:
        stated = [*(["--file"] if files else []), *deployment.given, *workload.stated]
        expected, remedy = "it alone, since it plans what was published", "leave --check or the flag out"
    elif show.compare is not None:
        stated = list(deployment.given)
        expected, remedy = "two manifests, and flags of a workload", "edit the manifests, or plan without --compare"
    else:
        return
    if stated:
        raise refuse(stated[0], f"a flag beside {show.chosen[0]}", expected, remedy)
