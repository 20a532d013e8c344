"""What an outlook says of a layout holds where the same is asked in another way: by a search, by a stated setting."""

from __future__ import annotations

from typing import Any

import pytest
from kimi_operator.api import KimiDeployment, Role, parse
from kimi_operator.api.profile import HardwareProfile
from kimi_operator.cli.look_ahead import contexts, look_ahead
from kimi_operator.cli.manifests import plan_deployment
from kimi_operator.cli.outlook import Outlook, Speed
from kimi_operator.cli.search import Wanted, find_layouts
from kimi_operator.planner import Infeasible, Plan
from kimi_operator.planner.case import Solution
from kimi_operator.planner.memory import GroupShape
from kimi_operator.planner.search import Layout
from kimi_operator.planner.workload import read_workload
from kimi_operator.profiles import architecture, built_in_profiles

K3 = architecture("kimi-k3")
MI300X = built_in_profiles()["mi300x"]
ROLE = {"groups": 1, "nodesPerGroup": 2, "gpusPerNode": 8, "tensorParallel": 2}


def planned_on(
    profile: HardwareProfile, workload: dict[str, Any], seqs: int | None = None, **model: int
) -> Outlook | Infeasible:
    """2 + 2 nodes, TP2, under a workload."""
    role = ROLE if seqs is None else {**ROLE, "maxNumSeqs": seqs}
    spec = {
        "model": {"checkpoint": {"hostPath": {"path": "/k3"}}, **model},
        "hardware": {"profile": profile.metadata.name},
        "prefill": role,
        "decode": role,
        "workload": {
            name: {"fixed": value} if name in ("prompt", "output") else value for name, value in workload.items()
        },
    }
    document = {
        "apiVersion": "kimi-operator.io/v1alpha1",
        "kind": "KimiDeployment",
        "metadata": {"name": "k3"},
        "spec": spec,
    }
    planned = plan_deployment(parse(KimiDeployment, document), {profile.metadata.name: profile})
    if not isinstance(planned.plan, Plan):
        return planned.plan
    return look_ahead(planned, read_workload(workload))


def speed_on(profile: HardwareProfile, workload: dict[str, Any]) -> Speed:
    outlook = planned_on(profile, workload)
    assert isinstance(outlook, Outlook), str(outlook)
    assert outlook.speed is not None
    return outlook.speed


def test_smaller_steps_of_prefill_slow_the_curve_that_prefill_binds() -> None:
    work = {"prompt": 100_000, "output": 100}
    limits = MI300X.spec.limits.model_copy(update={"prefill_batched_tokens": 512})
    small = MI300X.model_copy(update={"spec": MI300X.spec.model_copy(update={"limits": limits})})
    one, other = speed_on(MI300X, work), speed_on(small, work)
    assert one.at.binds == other.at.binds == "prefill"
    assert other.prefill.value > 1.01 * one.prefill.value
    assert other.at.tokens_per_second.value < 0.995 * one.at.tokens_per_second.value


@pytest.mark.parametrize("concurrency", [None, 1, 10, 150])
@pytest.mark.parametrize(("prompt", "output"), [(20_000, 100), (1000, 2000), (30_000, 4000)])
def test_a_search_promises_the_tokens_of_the_plan(concurrency: int | None, prompt: int, output: int) -> None:
    work = {"prompt": prompt, "output": output} | ({} if concurrency is None else {"concurrency": concurrency})
    found = find_layouts(K3, MI300X, MI300X.spec.runtime.kv_cache_dtype, Wanted(read_workload(work), 4))
    wanted = GroupShape(2, 8, 2)
    (same,) = (each for each in found.result.ranked if each.layout == Layout(wanted, 1, wanted, 1))
    assert same.throughput == pytest.approx(speed_on(MI300X, work).at.tokens_per_second.value)


@pytest.mark.parametrize("longest", [428_992, 307_072, 200_000])
def test_what_could_run_is_planned_when_it_is_stated(longest: int) -> None:
    """Beside a stated maxModelLen, whose pages the slots of more requests would take."""
    work = {"prompt": 1000, "output": 100}
    outlook = planned_on(MI300X, work, maxModelLen=longest)
    assert isinstance(outlook, Outlook), str(outlook)
    could = {solution.max_num_seqs for role in Role if isinstance(solution := outlook.role(role).best, Solution)}
    assert len(could) == 1
    seqs = could.pop()
    assert isinstance(planned_on(MI300X, work, seqs=seqs, maxModelLen=longest), Outlook)
    most = MI300X.spec.limits.max_num_seqs
    assert seqs == most or isinstance(planned_on(MI300X, work, seqs=seqs + 1, maxModelLen=longest), Infeasible)
    for role in Role:
        assert max(stretch.seqs_at_first for stretch in outlook.role(role).stretches) == seqs
    assert max(point.cut_for_it for point in contexts(outlook)) == seqs * outlook.decode.lanes


LONG = {"prompt": 20_000, "output": 100}


def missed(workload: dict[str, Any]) -> set[str]:
    outlook = planned_on(MI300X, workload)
    assert isinstance(outlook, Outlook), str(outlook)
    return {miss.field for miss in outlook.misses}


def test_a_target_ttft_is_met_only_by_a_prompt_beside_those_of_other_lanes() -> None:
    """Eight prompts at once share a group's experts: 17.6 s alone, 21.8 s with all lanes busy."""
    speed = speed_on(MI300X, LONG)
    busy_s = 8 * 100 / speed.at.tokens_per_second.value
    assert speed.at.binds == "prefill"
    assert speed.prefill.value / 1e3 < 20 < busy_s
    for concurrency, met in ((1, True), (8, False)):
        work = LONG | {"concurrency": concurrency, "targets": {"ttftSeconds": 20, "tpotSeconds": 2}}
        assert missed(work) == (set() if met else {"workload.targets.ttftSeconds"})


@pytest.mark.parametrize(
    ("load", "fields"),
    [
        ({"concurrency": 8}, set()),
        ({"concurrency": 40}, {"workload.targets.ttftSeconds"}),
        ({"requestsPerSecond": 0.15}, set()),
        ({"requestsPerSecond": 0.34}, {"workload.targets.ttftSeconds"}),
        ({"requestsPerSecond": 0.5}, {"workload.targets.ttftSeconds", "workload.requestsPerSecond"}),
    ],
)
def test_prompts_that_pile_up_miss_what_each_alone_would_keep(load: dict[str, Any], fields: set[str]) -> None:
    """Prefill's 8 lanes take 21.8 s a prompt, 0.367 a second: 40 clients wait 109 s for each answer."""
    work = LONG | load | {"targets": {"ttftSeconds": 30, "tpotSeconds": 2}}
    assert missed(work) == fields


@pytest.mark.parametrize(("rate", "is_fed"), [(0.3, True), (0.5, False), (50, False)])
def test_a_rate_that_prefill_cannot_feed_is_a_miss_without_a_target_for_the_first_token(
    rate: float, is_fed: bool
) -> None:
    work = LONG | {"requestsPerSecond": rate, "targets": {"tpotSeconds": 2}}
    assert missed(work) == (set() if is_fed else {"workload.requestsPerSecond"})
