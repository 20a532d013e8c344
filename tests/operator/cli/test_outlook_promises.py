"""What an outlook says of a layout holds where the same is asked in another way: by a search, by a stated setting."""

from __future__ import annotations

from typing import Any

from kimi_operator.api import KimiDeployment, parse
from kimi_operator.api.profile import HardwareProfile
from kimi_operator.cli.manifests import plan_deployment
from kimi_operator.cli.outlook import Outlook, Speed, look_ahead
from kimi_operator.planner import Infeasible, Plan
from kimi_operator.planner.workload import read_workload
from kimi_operator.profiles import built_in_profiles

MI300X = built_in_profiles()["mi300x"]
ROLE = {"groups": 1, "nodesPerGroup": 2, "gpusPerNode": 8, "tensorParallel": 2}


def planned_on(profile: HardwareProfile, workload: dict[str, Any], **model: int) -> Outlook | Infeasible:
    """2 + 2 nodes, TP2, under a workload."""
    spec = {
        "model": {"checkpoint": {"hostPath": {"path": "/k3"}}, **model},
        "hardware": {"profile": profile.metadata.name},
        "prefill": ROLE,
        "decode": ROLE,
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
