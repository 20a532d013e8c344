"""A much faster tensorParallel for the groups of a plan, in one line with the command that ranks all layouts. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path

from kimi_operator.api.deployment import Role
from kimi_operator.cli.figures import number
from kimi_operator.cli.flags import WorkloadFlags, flag_name
from kimi_operator.cli.outlook import Outlook
from kimi_operator.planner.case import Solution
from kimi_operator.planner.elsewhere import same_demand, same_groups
from kimi_operator.planner.layout import MAX_NODES
from kimi_operator.planner.pools import Settings
from kimi_operator.planner.space import Search
from kimi_operator.planner.targets import told
from kimi_operator.profiles.forecast import forecast_of

WORTH_SAYING = 1.25
"""Times the output of the plan; below it the choice may have other reasons."""


def search_beside(outlook: Outlook) -> Search:
    """The plan's demand, of any layout of its nodes. Raises InvalidSpec when too little is known of the chip."""
    planned, plan = outlook.planned, outlook.plan
    forecast = forecast_of(planned.architecture, planned.profile, plan.kv_cache_dtype, outlook.workload)
    spec, profile = planned.deployment.spec, planned.profile.spec
    settings = Settings(planned.architecture, spec, profile, plan.kv_cache_dtype, plan.transport)
    request = same_demand(settings, outlook.workload, forecast.timing)
    request = replace(request, throughput=forecast.throughput, queued=forecast.queued_on)
    return replace(request, is_assumed=outlook.is_assumed)


def better_layout(outlook: Outlook, command: str) -> str:
    """The tensorParallel that gives much more output for no more misses; empty when the plan's own does as well."""
    if outlook.speed is None or outlook.nodes > MAX_NODES:
        return ""
    request, now = search_beside(outlook), outlook.speed.at.tokens_per_second.value
    found: list[tuple[float, int, dict[Role, Solution]]] = []
    for layout, solutions in same_groups(request, outlook.planned.deployment.spec):
        assert request.throughput is not None
        rate = request.throughput(layout, solutions[Role.DECODE])
        misses, _ = told(solutions.values(), request.waits(layout, solutions[Role.DECODE]))
        if len(misses) <= len(outlook.misses):
            found.append((rate, layout.decode.tensor_parallel, solutions))
    rate, width, solutions = max(found, key=lambda each: each[:2], default=(0.0, 0, {}))
    if rate < WORTH_SAYING * now:
        return ""
    gives = f"{number(rate)} tokens/s, {rate / now:.1f} times as many"
    return f"tensorParallel {width} with maxNumSeqs {_seqs(solutions)}: {gives}; see {command}"


def _seqs(solutions: Mapping[Role, Solution]) -> str:
    seqs = {role: f"{each.max_num_seqs:,}" for role, each in solutions.items()}
    if len(set(seqs.values())) == 1:
        return next(iter(seqs.values()))
    return " and ".join(f"{number} in {role}" for role, number in seqs.items())


def search_command(files: Iterable[Path], work: WorkloadFlags, nodes: int) -> str:
    """The command that ranks the layouts of so many nodes for a manifest, with the workload that was typed."""
    words = ["kimictl", "plan", "--search", str(nodes)]
    for file in files:
        words += ["-f", str(file)]
    for field in fields(work):
        if (value := getattr(work, field.name)) is not None:
            words += [flag_name(field.name), str(value)]
    return shlex.join(words)
