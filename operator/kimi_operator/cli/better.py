"""A much faster tensorParallel for the groups of a plan, in one line with the command that ranks all layouts. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from kimi_operator.api.deployment import Role
from kimi_operator.cli.beside import search_beside
from kimi_operator.cli.figures import with_band
from kimi_operator.cli.flags import WorkloadFlags, as_typed
from kimi_operator.cli.outlook import Outlook
from kimi_operator.planner.elsewhere import same_groups
from kimi_operator.planner.layout import MAX_NODES
from kimi_operator.planner.predict import CurvePoint
from kimi_operator.planner.targets import told

WORTH_SAYING = 1.25
"""Times the most output of the plan's own tensorParallel; below it the choice may have other reasons."""


class _Output(Struct, frozen=True):
    """What the groups give with one tensorParallel."""

    tensor_parallel: int
    max_num_seqs: Mapping[Role, int]
    point: CurvePoint

    @property
    def rate(self) -> float:
        return self.point.tokens_per_second.value

    def __str__(self) -> str:
        seqs = {role: f"{each:,}" for role, each in self.max_num_seqs.items()}
        text = " and ".join(f"{each} in {role}" for role, each in seqs.items())
        if len(set(seqs.values())) == 1:
            text = seqs[Role.DECODE]
        rate, tpot = with_band(self.point.tokens_per_second), with_band(self.point.tpot)
        return f"{rate} at {self.point.concurrency:,} at once with maxNumSeqs {text}, TPOT {tpot}"


def better_layout(outlook: Outlook, command: str) -> str:
    """The tensorParallel that gives much more output for no more misses; empty when the plan's own does as well.

    That one is taken with its best maxNumSeqs, which a plan names where a manifest states less.
    """
    if outlook.speed is None or outlook.nodes > MAX_NODES:
        return ""
    own = outlook.decode.shape.tensor_parallel
    planned = _Output(own, {role: outlook.plan.role(role).max_num_seqs for role in Role}, outlook.speed.at)
    found = list(_outputs(outlook))
    most = max((planned, *(each for each in found if each.tensor_parallel == own)), key=lambda each: each.rate)
    best = max(found, key=lambda each: (each.rate, each.tensor_parallel), default=None)
    if best is None or best.rate < WORTH_SAYING * most.rate:
        return ""
    times = f"{best.rate / most.rate:.1f} times the most of tensorParallel {own}"
    return f"tensorParallel {best.tensor_parallel}, predicted {best}: {times}, {most}; see {command}"


def _outputs(outlook: Outlook) -> Iterator[_Output]:
    """Of each tensorParallel that misses no more than the plan."""
    request, forecast = search_beside(outlook), outlook.forecast
    assert forecast is not None, "speed is of a forecast"
    for layout, solutions in same_groups(request, outlook.planned.deployment.spec):
        decode = solutions[Role.DECODE]
        misses, _ = told(solutions.values(), request.queued(layout, decode))
        if len(misses) <= len(outlook.misses):
            seqs = {role: each.max_num_seqs for role, each in solutions.items()}
            yield _Output(layout.decode.tensor_parallel, seqs, forecast.point(layout, decode))


def search_command(program: str, files: Iterable[Path], work: WorkloadFlags, nodes: int) -> str:
    """The command that ranks the layouts of so many nodes for a manifest, with the workload that was typed."""
    words = ["plan", "--search", str(nodes)]
    for file in files:
        words += ["-f", str(file)]
    return f"{program} {shlex.join((*words, *as_typed(work)))}"
