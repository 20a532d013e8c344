"""An outlook speaks of the plan's own pool, whatever maxNumSeqs are stated and whatever workload is asked about."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from kimi_operator.api import KimiDeployment, parse
from kimi_operator.cli.look_ahead import look_ahead
from kimi_operator.cli.manifests import plan_deployment
from kimi_operator.cli.outlook import Outlook
from kimi_operator.planner import Plan
from kimi_operator.planner.case import Solution
from kimi_operator.planner.workload import Workload, fixed, workload_of
from kimi_operator.profiles import built_in_profiles

MANIFEST = Path(__file__).resolve().parents[3] / "examples" / "mi300x-2p2d.yaml"
SPEC = yaml.safe_load(MANIFEST.read_text())
SEQS = st.one_of(st.none(), st.integers(1, 32))


def outlook_of(
    prompt: int, output: int, prefill: int | None, decode: int | None, *, is_in_spec: bool
) -> Outlook | None:
    """Under a workload of the spec, or of the command line beside it; None when it does not fit."""
    document: dict[str, Any] = {**SPEC, "spec": {**SPEC["spec"], "model": dict(SPEC["spec"]["model"])}}
    document["spec"]["model"].pop("maxModelLen", None)
    for role, seqs in (("prefill", prefill), ("decode", decode)):
        stated = {name: value for name, value in SPEC["spec"][role].items() if name != "maxNumSeqs"}
        document["spec"][role] = stated | ({} if seqs is None else {"maxNumSeqs": seqs})
    if is_in_spec:
        document["spec"]["workload"] = {"prompt": {"fixed": prompt}, "output": {"fixed": output}}
    planned = plan_deployment(parse(KimiDeployment, document), built_in_profiles())
    if not isinstance(planned.plan, Plan):
        return None
    spec = planned.deployment.spec.workload
    return look_ahead(
        planned, Workload(fixed(prompt), fixed(output)) if spec is None else workload_of(spec, "workload")
    )


@settings(max_examples=12)
@given(
    prompt=st.integers(1, 300_000),
    output=st.integers(1, 20_000),
    prefill=SEQS,
    decode=SEQS,
    is_in_spec=st.booleans(),
)
def test_words_figures_and_idle_memory_are_of_the_pool_that_is_planned(
    prompt: int, output: int, prefill: int | None, decode: int | None, is_in_spec: bool
) -> None:
    outlook = outlook_of(prompt, output, prefill, decode, is_in_spec=is_in_spec)
    if outlook is None:
        return
    for each in (outlook.prefill, outlook.decode):
        if not isinstance(each.at_plan, Solution):
            assert prompt + output > outlook.plan.decode.max_model_len
            continue
        plan, unused = each.plan, {line.label: line for line in each.unused}
        assert each.at_plan.num_units == plan.num_pages
        assert each.at_plan.max_num_seqs <= plan.max_num_seqs
        if "pool's remainder" in unused:
            assert unused["pool's remainder"].bytes == next(line.bytes for line in plan.lines if line.label == "free")
        if "idle KV pages" in unused:
            assert f" of {plan.num_pages:,} KV pages: " in unused["idle KV pages"].how
        for pages in re.findall(r"([\d,]+) KV pages;", plan.binds):
            assert pages == f"{plan.num_pages:,}"


def test_what_could_run_is_said_with_slots_of_its_own() -> None:
    """Eight stated of 100,000 tokens leave slots idle that fewer would turn into pages."""
    outlook = outlook_of(100_000, 1000, 32, 32, is_in_spec=False)
    assert outlook is not None
    assert isinstance(outlook.decode.best, Solution)
    assert isinstance(outlook.decode.at_plan, Solution)
    assert outlook.decode.best.max_num_seqs > outlook.decode.at_plan.max_num_seqs
    assert outlook.decode.best.num_units > outlook.decode.plan.num_pages
