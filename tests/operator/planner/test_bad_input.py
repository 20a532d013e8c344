"""Nonsense in a deployment or a profile: every refusal names the field, the value and what to do; nothing crashes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from kimi_operator.api import HardwareProfile, KimiDeploymentSpec, parse
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.planner import Plan, make_plan, plan_status
from kimi_operator.planner.designs import compare_designs
from kimi_operator.profiles import architecture, select_profile

REPOSITORY = Path(__file__).resolve().parents[3]
SPEC = yaml.safe_load((REPOSITORY / "examples" / "mi300x-2p2d.yaml").read_text())["spec"]
PROFILE = yaml.safe_load(
    (REPOSITORY / "operator" / "kimi_operator" / "profiles" / "hardware" / "mi300x.yaml").read_text()
)
K3 = architecture("kimi-k3")


def changed(document: Mapping[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy with one field set."""
    copied = copy.deepcopy(dict(document))
    *sections, field = path.split(".")
    place = copied
    for section in sections:
        place = place.setdefault(section, {})
    place[field] = value
    return copied


def problems_of(spec: Mapping[str, Any], profile: Mapping[str, Any]) -> tuple[Problem, ...]:
    """Why there is no plan; nothing when there is one."""
    try:
        hardware = parse(HardwareProfile, profile)
        asked = parse(KimiDeploymentSpec, spec, "spec")
        select_profile(asked, {hardware.metadata.name: hardware}, ())
        plan = make_plan(K3, asked, hardware)
    except InvalidSpec as error:
        return error.problems
    if isinstance(plan, Plan):
        plan_status(plan, hardware)
        compare_designs(K3, plan, plan.decode)
        return ()
    return plan.problems


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("model.maxModelLen", 0, "greater than or equal to 1"),
        ("model.maxModelLen", -900_000, "greater than or equal to 1"),
        ("model.maxModelLen", 1_048_577, "at most 1,048,576, which kimi-k3 was made for"),
        ("model.maxModelLen", 10**30, "less than or equal to 16777216"),
        ("model.maxModelLen", "1M", "a valid integer"),
        ("decode.maxNumSeqs", 0, "greater than or equal to 1"),
        ("decode.maxNumSeqs", -8, "greater than or equal to 1"),
        ("decode.maxNumSeqs", 4_096, "at most 32 (profile's limits.maxNumSeqs)"),
        ("decode.maxNumSeqs", 10**9, "less than or equal to 4096"),
        ("decode.maxNumSeqs", 7.5, "a valid integer"),
        ("decode.tensorParallel", 0, "greater than or equal to 1"),
        ("decode.tensorParallel", -2, "greater than or equal to 1"),
        ("decode.tensorParallel", 3, "a divisor of gpusPerNode 8"),
        # 16 ranks of one lane: no lane at all in a node
        ("decode.tensorParallel", 16, "a divisor of gpusPerNode 8"),
        ("decode.gpusPerNode", 0, "greater than or equal to 1"),
        ("decode.gpusPerNode", 16, "at most 8, the GPUs of a node"),
        ("decode.nodesPerGroup", 0, "greater than or equal to 1"),
        ("decode.nodesPerGroup", 3, "ranks that divide the 896 experts"),
        ("decode.nodesPerGroup", 65, "less than or equal to 64"),
        ("decode.groups", 0, "greater than or equal to 1"),
        ("decode.groups", 10**6, "less than or equal to 64"),
        ("hardware.profile", "mi999", "the name of a HardwareProfile"),
        ("precision.kvCache", "FP8", "'Auto', 'BF16' or 'FP32'"),
        ("handoff.transport", "TCP", "'Auto', 'MoRIIO' or 'NIXL'"),
        ("decode.maxNumSeq", 8, "no such field"),
    ],
)
def test_a_wrong_deployment_names_field_value_and_remedy(path: str, value: object, expected: str) -> None:
    problems = problems_of(changed(SPEC, path, value), PROFILE)
    match = [problem for problem in problems if problem.field == f"spec.{path}" and expected in problem.expected]
    assert match, [str(problem) for problem in problems]
    shown = match[0].got.replace(",", "").replace("'", "")
    assert shown.startswith(str(value)) or str(value) in repr(match[0].got)
    assert match[0].remedy


def test_gpus_that_do_not_divide_the_experts_are_shown_with_the_nodes() -> None:
    """5 GPUs on each of 2 nodes are 10 ranks: what one would change is the nodes, and no number of them helps."""
    problems = problems_of(changed(SPEC, "decode", {**SPEC["decode"], "gpusPerNode": 5, "tensorParallel": 1}), PROFILE)
    (problem,) = (p for p in problems if p.field == "spec.decode.nodesPerGroup")
    assert problem.got == "2 (x gpusPerNode 5 = 10 ranks)"
    assert problem.remedy == "change gpusPerNode"


@pytest.mark.parametrize(
    ("path", "value", "field", "expected"),
    [
        ("gpu.memory", 0, "reserve", "less than gpu.memory"),
        ("gpu.memory", -1, "gpu.memory", "greater than or equal to 0"),
        ("gpu.memory", "192 GB", "gpu.memory", "a number with one of the units"),
        ("gpu.perNode", 0, "gpu.perNode", "greater than or equal to 1"),
        ("gpu.perNode", 10**6, "gpu.perNode", "less than or equal to 64"),
        ("gpu.perNode", None, "gpu.perNode", "a valid integer"),
        ("reserve.contexts", "-1Gi", "reserve.contexts", "whole bytes, or a number"),
        ("reserve.activations", "200Gi", "reserve", "less than gpu.memory"),
        ("reserve.contexts", "40Gi", "spec.decode", "at most 192.0 GiB, the memory of a GPU"),
        ("limits.pageSizeTokens", 0, "limits.pageSizeTokens", "greater than or equal to 1"),
        ("limits.maxNumSeqs", 0, "limits.maxNumSeqs", "greater than or equal to 1"),
        ("runtime.kvCacheDtype", "fp8", "runtime.kvCacheDtype", "'float32' or 'bfloat16'"),
    ],
)
def test_a_wrong_profile_names_field_value_and_remedy(path: str, value: object, field: str, expected: str) -> None:
    problems = problems_of(SPEC, changed(PROFILE, f"spec.{path}", value))
    match = [problem for problem in problems if problem.field.endswith(field) and expected in problem.expected]
    assert match, [str(problem) for problem in problems]
    assert match[0].got
    assert match[0].remedy


def leaves(document: object, path: str = "") -> Iterator[str]:
    """Paths of the fields that hold one value."""
    if isinstance(document, Mapping):
        for name, value in document.items():
            yield from leaves(value, f"{path}.{name}" if path else name)
    elif not isinstance(document, list):
        yield path


MORE_FIELDS = ("prefill.maxNumSeqs", "decode.groups", "precision.kvCache", "restartBudget")
NONSENSE = (
    st.integers(-(10**30), 10**30)
    | st.integers(-2, 300)
    | st.sampled_from([2**24, 2**40, 2**60, 2**60 + 1, "", "x", "1Gi", "-1Gi", "1e99", None, True, 1.5, [], {}])
)


@settings(max_examples=300)
@given(
    target=st.sampled_from(
        [("spec", path) for path in (*leaves(SPEC), *MORE_FIELDS)]
        + [("profile", path) for path in leaves(PROFILE) if path.startswith("spec.")]
    ),
    value=NONSENSE,
)
def test_any_value_in_any_field_plans_or_is_refused_in_words(target: tuple[str, str], value: object) -> None:
    which, path = target
    spec = changed(SPEC, path, value) if which == "spec" else SPEC
    profile = changed(PROFILE, path, value) if which == "profile" else PROFILE
    for problem in problems_of(spec, profile):
        assert problem.field
        assert problem.got
        assert problem.expected
        assert problem.remedy
