"""A workload in the spec, on its way to the pods: status, settings, and which groups it restarts."""

from __future__ import annotations

import json
from typing import Any

from stage import Stage, example

WORKLOAD = {"prompt": {"fixed": 1000}, "output": {"fixed": 100}, "concurrency": 4}


def limits(stage: Stage, role: str) -> dict[str, Any]:
    """What the pods of a role are told, by the ConfigMap that their StatefulSet mounts."""
    pod = stage.server.get("StatefulSet", f"k3-{role}-0")["spec"]["template"]["spec"]
    (name,) = (each["configMap"]["name"] for each in pod["volumes"] if "configMap" in each)
    found: dict[str, Any] = json.loads(stage.server.get("ConfigMap", name)["data"]["worker.json"])["limits"]
    return found


def decode_without_max_num_seqs() -> dict[str, Any]:
    role: dict[str, Any] = example("2p2d.yaml")["spec"]["decode"]
    del role["maxNumSeqs"]
    return role


async def test_a_workload_sets_what_no_role_states_and_restarts_no_other(stage: Stage) -> None:
    stage.change_spec(decode=decode_without_max_num_seqs())
    await stage.settle()
    before = limits(stage, "decode")
    assert before["max_num_seqs"] > 2
    stage.change_spec(workload=WORKLOAD)
    stage.server.now_s += 60
    await stage.settle()
    plan = stage.status()["plan"]
    assert plan["workload"] == "prompts of 1,000 tokens, answers of 100 tokens"
    assert (plan["decode"]["lanes"], plan["decode"]["maxNumSeqs"], plan["prefill"]["maxNumSeqs"]) == (2, 2, 8)
    after = limits(stage, "decode")
    assert (after["max_num_seqs"], after["num_state_slots"]) == (2, 3)
    assert after["num_pages"] > before["num_pages"]
    assert (stage.generation("k3-decode-0"), stage.generation("k3-prefill-0")) == (2, 1)
    assert plan["decode"]["binds"].startswith("workload for prompts of 1,000 tokens, answers of 100 tokens: 2 a lane")


async def test_what_a_workload_misses_stands_in_the_status(stage: Stage) -> None:
    stage.change_spec(workload=WORKLOAD | {"concurrency": 1000, "targets": {"tpotSeconds": 0.1}})
    await stage.settle()
    left_aside, missed = stage.status()["plan"]["warnings"]
    assert left_aside.startswith("spec.workload.targets are left aside: HardwareProfile local-cpu: spec.gpu.")
    assert missed.startswith("spec.workload.concurrency: got 1,000, expected at most 16")
    assert stage.condition("Ready") == ("True", "AsDesired")


async def test_a_workload_that_does_not_fit_leaves_running_what_runs(stage: Stage) -> None:
    await stage.settle()
    stage.change_spec(workload=WORKLOAD | {"prompt": {"fixed": 9000}})
    await stage.settle()
    assert stage.condition("PlanResolved") == ("False", "DoesNotFit")
    assert "spec.workload.prompt: got 9,000 tokens, expected less than 8,192" in stage.message("PlanResolved")
    assert stage.generation("k3-decode-0") == 1
