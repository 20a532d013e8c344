"""A much faster layout of a plan's nodes, in one line with the command that ranks all layouts. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from kimi_operator.api.deployment import Role
from kimi_operator.cli.beside import search_beside
from kimi_operator.cli.figures import with_band
from kimi_operator.cli.flags import SEARCHED, DeploymentFlags, WorkloadFlags, as_typed
from kimi_operator.cli.outlook import Outlook
from kimi_operator.planner.case import Solution
from kimi_operator.planner.elsewhere import layout_of, regrouped
from kimi_operator.planner.layout import MAX_NODES
from kimi_operator.planner.predict import CurvePoint
from kimi_operator.planner.space import Layout
from kimi_operator.planner.targets import told

WORTH_SAYING = 1.25
"""Times the most output of the plan's own layout; below it the choice may have other reasons."""
WORTH_REGROUPING = 1.05
"""Times the output of another tensorParallel, which changes less."""


class _Output(Struct, frozen=True):
    """What a layout gives."""

    layout: Layout
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
    """A layout that gives much more output for no more misses; empty when the plan's own does as well.

    That one is taken with its best maxNumSeqs, which a plan names where a manifest states less. Groups change only
    where another tensorParallel alone gives clearly less.
    """
    if outlook.speed is None or outlook.nodes > MAX_NODES:
        return ""
    own = layout_of(outlook.planned.deployment.spec)
    planned = _Output(own, {role: outlook.plan.role(role).max_num_seqs for role in Role}, outlook.speed.at)
    rated = sorted(_rated(outlook), key=lambda each: (each[0], each[1].decode.tensor_parallel), reverse=True)
    at_best = _outputs(outlook, (each for each in rated if each[1] == own))
    most = max((planned, *at_best), key=lambda each: each.rate)
    # what is judged takes most of the time: nothing that is not worth saying is
    worth = [each for each in rated if each[0] >= WORTH_SAYING * most.rate]
    far = next(_outputs(outlook, worth), None)
    if far is None:
        return ""
    near = next(_outputs(outlook, (each for each in worth if _has_groups_of(own, each[1]))), None)
    best = far if near is None or far.rate > WORTH_REGROUPING * near.rate else near
    name, mine = str(best.layout), f"these groups with tensorParallel {own.decode.tensor_parallel}"
    if _has_groups_of(own, best.layout):
        name, mine = (f"tensorParallel {each.decode.tensor_parallel}" for each in (best.layout, own))
    return f"{name}, predicted {best}: {best.rate / most.rate:.1f} times the most of {mine}, {most}; see {command}"


_Rated = tuple[float, Layout, Solution, Solution]


def _rated(outlook: Outlook) -> Iterator[_Rated]:
    """Layouts of the same nodes with their output, which takes a small part of the time that bands and waits take."""
    assert outlook.forecast is not None, "speed is of a forecast"
    for layout, prefill, decode in regrouped(search_beside(outlook), outlook.planned.deployment.spec):
        yield outlook.forecast.throughput(layout, decode), layout, prefill, decode


def _outputs(outlook: Outlook, rated: Iterable[_Rated]) -> Iterator[_Output]:
    """In order, those that miss no more than the plan."""
    request, forecast = search_beside(outlook), outlook.forecast
    assert forecast is not None, "speed is of a forecast"
    for _, layout, prefill, decode in rated:
        misses, _ = told((prefill, decode), request.queued(layout, decode))
        if len(misses) <= len(outlook.misses):
            seqs = {Role.PREFILL: prefill.max_num_seqs, Role.DECODE: decode.max_num_seqs}
            yield _Output(layout, seqs, forecast.point(layout, decode))


def _has_groups_of(own: Layout, other: Layout) -> bool:
    """Whether at most tensorParallel is another one."""
    return all(
        (own.groups(role), own.shape(role).nodes) == (other.groups(role), other.shape(role).nodes) for role in Role
    )


def search_command(
    program: str, files: Iterable[Path], deployment: DeploymentFlags, work: WorkloadFlags, nodes: int
) -> str:
    """The command that ranks the layouts of so many nodes for what was typed: a manifest or a chip, and a workload."""
    words = ["plan", "--search", str(nodes)]
    for file in files:
        words += ["-f", str(file)]
    # the others are of one layout
    kept = DeploymentFlags(**{name: getattr(deployment, name) for name in SEARCHED})
    return f"{program} {shlex.join((*words, *as_typed(kept), *as_typed(work)))}"
