"""Plans: what the examples plan to, what is refused and with which words, and what must hold for every plan."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from kimi_operator.api import HardwareProfile, KimiDeploymentSpec, Role, parse
from kimi_operator.api.profile import WorkerSpec, WorkerSupport
from kimi_operator.errors import InvalidSpec
from kimi_operator.planner import Infeasible, Plan, plan_status, weights_bytes
from kimi_operator.planner.memory import reserve_lines
from kimi_operator.planner.pools import num_slots
from kimi_operator.profiles import architecture, built_in_profiles, select_profile
from kimi_operator.profiles.forecast import plan_on

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
LOCAL_PROFILE = yaml.safe_load((EXAMPLES / "local" / "profile.yaml").read_text())
PROFILES = {**built_in_profiles(), "local-cpu": parse(HardwareProfile, LOCAL_PROFILE)}


def spec_of(example: str, **changes: Any) -> KimiDeploymentSpec:
    """An example's spec; `role__field=value` and `section__field=value` change one field each."""
    document = yaml.safe_load((EXAMPLES / example).read_text())["spec"]
    for path, value in changes.items():
        section, field = path.split("__")
        document.setdefault(section, {})[field] = value
        if value is None:
            del document[section][field]
    return parse(KimiDeploymentSpec, document, "spec")


def plan_of(example: str, profile: str | None = None, **changes: Any) -> Plan | Infeasible:
    spec = spec_of(example, **changes)
    chosen = PROFILES[profile] if profile else select_profile(spec, PROFILES, ())
    return plan_on(architecture(spec.model.architecture), spec, chosen)


def fitting(example: str, profile: str | None = None, **changes: Any) -> Plan:
    plan = plan_of(example, profile, **changes)
    assert isinstance(plan, Plan), str(plan)
    return plan


def refused(example: str, profile: str | None = None, **changes: Any) -> Infeasible:
    plan = plan_of(example, profile, **changes)
    assert isinstance(plan, Infeasible)
    return plan


@pytest.mark.parametrize(
    ("example", "gpus", "shape", "limits", "pools"),
    [
        ("mi300x-2p2d.yaml", 32, (16, 8, 56), (8, 524_288), (8_607, 64, 10)),
        ("mi325x-2p2d.yaml", 32, (16, 8, 56), (64, 1_048_576), (33_710, 64, 80)),
        ("local/2p2d.yaml", 8, (4, 2, 2), (8, 8_192), (3_955, 16, 10)),
    ],
)
def test_examples_plan_to(example: str, gpus: int, shape: tuple, limits: tuple, pools: tuple) -> None:
    plan = fitting(example)
    assert plan.gpus == gpus
    for role in (plan.prefill, plan.decode):
        assert (role.ranks, role.lanes, role.experts_per_rank) == shape
        assert (role.max_num_seqs, role.max_model_len) == limits
        assert (role.num_pages, role.page_size_tokens, role.num_state_slots) == pools


@pytest.mark.parametrize("example", ["mi300x-2p2d.yaml", "mi325x-2p2d.yaml", "local/2p2d.yaml"])
def test_lines_add_up_to_the_memory_of_a_gpu(example: str) -> None:
    spec, plan = spec_of(example), fitting(example)
    for role in Role:
        lines = plan.role(role).lines
        assert sum(line.bytes for line in lines) == PROFILES[str(spec.hardware.profile)].spec.gpu.memory
        assert all(line.bytes >= 0 and line.how for line in lines)
        assert lines[-1].bytes < plan.role(role).page_bytes


def test_one_page_and_one_slot_are_what_the_worker_allocates() -> None:
    """[mla_layers, page_size, kv_lora + rope]; [kda_layers, heads/TP, K, V] f32 and [kda_layers, 3, 3 heads K / TP]."""
    tiny = fitting("local/2p2d.yaml").decode
    assert tiny.page_bytes == 2 * 16 * (32 + 16) * 4
    assert tiny.slot_bytes == 3 * (2 * 16 * 16 * 4 + 3 * 3 * 2 * 16 * 4)
    full = fitting("mi300x-2p2d.yaml").decode
    assert full.page_bytes == 24 * 64 * 576 * 2
    assert full.slot_bytes == 69 * (3_145_728 + 110_592)


def test_fp32_rows_take_twice_the_pages_of_bf16() -> None:
    bf16 = fitting("mi325x-2p2d.yaml").decode
    fp32 = fitting("mi325x-2p2d.yaml", precision__kvCache="FP32").decode
    assert fp32.page_bytes == 2 * bf16.page_bytes
    assert fp32.num_pages == bf16.num_pages // 2


@pytest.mark.parametrize(("seqs", "slots"), [(1, 2), (2, 3), (4, 5), (5, 7), (8, 10), (64, 80)])
def test_a_quarter_more_slots_than_running_requests(seqs: int, slots: int) -> None:
    assert num_slots(seqs) == slots


def test_limits_left_to_the_plan_hold_the_context_of_the_profile() -> None:
    plan = fitting("mi300x-2p2d.yaml", model__maxModelLen=None, prefill__maxNumSeqs=None, decode__maxNumSeqs=None)
    role = plan.decode
    assert role.max_num_seqs > 8
    assert role.num_pages * role.page_size_tokens >= role.max_num_seqs * 16_384
    assert plan.prefill.max_model_len == role.max_model_len == role.num_pages * role.page_size_tokens


def test_binds_says_from_which_context_pages_bind() -> None:
    assert "68,856 tokens" in fitting("mi300x-2p2d.yaml").decode.binds
    assert "every context" in fitting("local/2p2d.yaml", decode__maxNumSeqs=1).decode.binds


def test_a_plan_that_chooses_says_that_more_memory_may_leave_fewer_pages() -> None:
    """40 MB more make room for an 18th request, whose slot takes 104 pages."""
    left = {"model__maxModelLen": None, "prefill__maxNumSeqs": None, "decode__maxNumSeqs": None}
    spec = spec_of("mi300x-2p2d.yaml", **left)
    found = []
    for memory in (201_966_592_000, 202_006_592_000):
        gpu = PROFILES["mi300x"].spec.gpu.model_copy(update={"memory": memory})
        profile = PROFILES["mi300x"].model_copy(
            update={"spec": PROFILES["mi300x"].spec.model_copy(update={"gpu": gpu})}
        )
        plan = plan_on(architecture("kimi-k3"), spec, profile)
        assert isinstance(plan, Plan)
        found.append((plan.decode.max_num_seqs, plan.decode.num_pages, plan.decode.max_model_len))
        assert plan.decode.binds.endswith(
            "; the plan chose as many as have limits.contextTokensPerSeq each: with more memory it may choose more and "
            "leave fewer KV pages; set maxNumSeqs to keep both as they are"
        )
    assert found == [(17, 4_724, 302_336), (18, 4_620, 295_680)]
    # No further request, no loss: as many as the profile allows, or as the user states.
    assert "the plan chose" not in fitting("mi325x-2p2d.yaml", **left).decode.binds
    assert "the plan chose" not in fitting("mi300x-2p2d.yaml").decode.binds


def test_step_budget_never_falls_below_the_running_requests() -> None:
    assert fitting("mi325x-2p2d.yaml").decode.max_num_batched_tokens == 512
    assert fitting("mi325x-2p2d.yaml").prefill.max_num_batched_tokens == 2048


# refusals: field, what was got, remedy


def test_tp1_on_mi300x_is_refused_with_the_arithmetic_and_the_nearest_layout() -> None:
    problems = refused("mi300x-2p2d.yaml", prefill__tensorParallel=1, decode__tensorParallel=1).problems
    assert [problem.field for problem in problems] == ["spec.prefill", "spec.decode"]
    assert "191.0 GiB of weights + 32.2 GiB reserved" in problems[0].got
    assert problems[0].expected == (
        "at most 192.0 GiB, the memory of a GPU: the line 'contexts' of 11.2 GiB does not fit into the 998.4 MiB that "
        "are left, and 45.6 GiB are missing in all"
    )
    assert problems[0].remedy == "use the nearest layout that fits: 2 x 8 GPUs with tensorParallel 2"


def test_one_node_of_mi300x_cannot_hold_the_checkpoint() -> None:
    problems = refused("mi300x-2p2d.yaml", prefill__nodesPerGroup=1, decode__nodesPerGroup=1).problems
    assert "nearest layout that fits: 2 x 8 GPUs with tensorParallel" in problems[0].remedy


def test_a_wider_lane_is_proposed_for_both_roles_since_one_alone_would_be_refused() -> None:
    example, freed = "mi325x-2p2d.yaml", {"model__maxModelLen": None, "prefill__maxNumSeqs": 8, "decode__maxNumSeqs": 8}
    (problem,) = refused(example, prefill__nodesPerGroup=1, **freed).problems
    assert problem.field == "spec.prefill"
    assert problem.remedy == (
        "use the nearest layouts that fit: 1 x 8 GPUs with tensorParallel 4, and for spec.decode 2 x 8 GPUs with "
        "tensorParallel 4"
    )
    wider = {"prefill__tensorParallel": 4, "decode__tensorParallel": 4}
    assert isinstance(plan_of(example, prefill__nodesPerGroup=1, **wider, **freed), Plan)


def test_remedies_of_two_refused_roles_go_together() -> None:
    """Alone, prefill's two nodes would take lanes of 4 GPUs, decode's four nodes lanes of 2."""
    shapes: dict[str, Any] = {"prefill__tensorParallel": 1, "decode__tensorParallel": 1, "decode__nodesPerGroup": 4}
    asked = {"model__maxModelLen": 620_000, "prefill__maxNumSeqs": 1, "decode__maxNumSeqs": 1}
    problems = refused("mi300x-2p2d.yaml", **asked, **shapes).problems
    assert [problem.field for problem in problems] == ["spec.prefill", "spec.decode"]
    for role, problem in zip(Role, problems, strict=True):
        nodes, width = re.findall(r"(\d+) x 8 GPUs with tensorParallel (\d+)", problem.remedy)[0]
        shapes |= {f"{role}__nodesPerGroup": int(nodes), f"{role}__tensorParallel": int(width)}
    fitting("mi300x-2p2d.yaml", **asked, **shapes)


def test_a_length_that_does_not_fit_names_the_longest_that_does() -> None:
    problem = refused("mi300x-2p2d.yaml", model__maxModelLen=900_000).problems[0]
    longest = int(problem.remedy.partition("maxModelLen to ")[2].partition(" ")[0].rstrip(",").replace(",", ""))
    # Beside the running requests that the spec asks for: following a remedy must not bring the next refusal.
    assert isinstance(plan_of("mi300x-2p2d.yaml", model__maxModelLen=longest), Plan)
    assert isinstance(plan_of("mi300x-2p2d.yaml", model__maxModelLen=longest + 64), Infeasible)
    # One token more than fits beside them is refused for them, with the same length as remedy.
    problem = refused("mi300x-2p2d.yaml", model__maxModelLen=longest + 64).problems[0]
    assert problem.field == "spec.prefill.maxNumSeqs"
    assert problem.remedy.endswith(f"lower spec.model.maxModelLen to {longest:,}")


def test_too_many_requests_name_the_most_that_fit() -> None:
    (problem,) = refused("mi300x-2p2d.yaml", decode__maxNumSeqs=32).problems
    assert problem.field == "spec.decode.maxNumSeqs"
    assert "40 state slots of 214.3 MiB need 8,987,443,200 B a GPU" in problem.got
    most = int(problem.remedy.split()[3])
    assert isinstance(plan_of("mi300x-2p2d.yaml", decode__maxNumSeqs=most), Plan)
    assert isinstance(plan_of("mi300x-2p2d.yaml", decode__maxNumSeqs=most + 1), Infeasible)


def test_nothing_fits_a_gpu_whose_memory_is_spoken_for() -> None:
    document = yaml.safe_load((EXAMPLES / "local" / "profile.yaml").read_text())
    document["spec"]["gpu"]["memory"] = sum(line.bytes for line in reserve_lines(PROFILES["local-cpu"].spec)) + 4096
    spec = spec_of("local/2p2d.yaml")
    plan = plan_on(architecture("kimi-k3-tiny"), spec, parse(HardwareProfile, document))
    assert isinstance(plan, Infeasible)
    assert "no layout of up to 64 nodes fits" in plan.problems[0].remedy


@pytest.mark.parametrize(
    ("changes", "field", "got", "remedy"),
    [
        ({"decode__nodesPerGroup": 3}, "spec.decode.nodesPerGroup", "24 ranks", "[1, 2, 4, 7, 8, 14,"),
        ({"decode__gpusPerNode": 16}, "spec.decode.gpusPerNode", "16", "lower it to 8"),
        ({"decode__maxNumSeqs": 33}, "spec.decode.maxNumSeqs", "33", "lower it to 32"),
        ({"decode__tensorParallel": 4}, "spec.decode.tensorParallel", "4", "set both to the same value"),
        ({"model__maxModelLen": 2_000_000}, "spec.model.maxModelLen", "2,000,000", "lower it to 1,048,576"),
        (
            {"prefill__tensorParallel": 3, "decode__tensorParallel": 3},
            "spec.prefill.tensorParallel",
            "3",
            "set it to one of [1, 2, 4, 8]",
        ),
    ],
)
def test_numbers_that_do_not_go_together(changes: dict, field: str, got: str, remedy: str) -> None:
    problems = refused("mi300x-2p2d.yaml", **changes).problems
    match = [problem for problem in problems if problem.field == field]
    assert match, [str(problem) for problem in problems]
    assert got in match[0].got
    assert remedy in match[0].remedy


def test_a_tensor_parallel_that_does_not_divide_the_model_names_what_it_does_not_divide() -> None:
    problems = refused("local/2p2d.yaml", "mi300x", prefill__gpusPerNode=8, prefill__tensorParallel=8).problems
    assert any("attention heads" in problem.expected for problem in problems)


def test_moriio_needs_a_gpu() -> None:
    (problem,) = refused("local/2p2d.yaml", handoff__transport="MoRIIO").problems
    assert (problem.field, problem.got) == ("spec.handoff.transport", "MoRIIO")
    assert problem.remedy == "set NIXL or Auto"


@pytest.mark.parametrize("example", ["mi300x-2p2d.yaml", "mi325x-2p2d.yaml", "local/2p2d.yaml"])
def test_hardware_that_the_worker_is_made_for_brings_no_warning(example: str) -> None:
    assert fitting(example).warnings == ()


def test_untested_hardware_is_planned_with_a_warning_and_unsupported_is_refused() -> None:
    (warning,) = fitting("mi325x-2p2d.yaml", "mi355x").warnings
    assert warning.startswith("the bundled worker is untested on mi355x (gfx950): ")
    worker = WorkerSpec(support=WorkerSupport.UNSUPPORTED, lacks=("a kernel for it",))
    spec = PROFILES["mi355x"].spec.model_copy(update={"worker": worker})
    profile = PROFILES["mi355x"].model_copy(update={"spec": spec})
    plan = plan_on(architecture("kimi-k3"), spec_of("mi325x-2p2d.yaml"), profile)
    assert isinstance(plan, Infeasible)
    (problem,) = plan.problems
    assert (problem.field, problem.got) == ("spec.hardware.profile", "mi355x: a kernel for it")
    assert problem.remedy == "choose nodes of gfx942"


# profiles


def test_an_unknown_profile_names_the_known_ones() -> None:
    spec = spec_of("mi300x-2p2d.yaml", hardware__profile="mi300")
    with pytest.raises(InvalidSpec, match=r"spec\.hardware\.profile: got 'mi300', .*'mi300x'.*'mi325x'"):
        select_profile(spec, PROFILES, ())


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        ({"amd.com/gpu.device-id": "74a1", "amd.com/gpu.vram": "192G"}, "mi300x"),
        ({"amd.com/gpu.device-id": "74b5"}, "mi300x"),
        ({"beta.amd.com/gpu.device-id": "74a5", "beta.amd.com/gpu.vram": "256G"}, "mi325x"),
    ],
)
def test_a_profile_is_found_by_device_id_and_memory(labels: dict[str, str], name: str) -> None:
    spec = spec_of("mi300x-2p2d.yaml", hardware__profile=None)
    assert select_profile(spec, PROFILES, [("control-plane", {}), ("gpu-1", labels)]).metadata.name == name


@pytest.mark.parametrize(
    "nodes",
    [
        [],
        [{"amd.com/gpu.product-name": "AMD_Instinct_MI300X"}],
        [{"amd.com/gpu.device-id": "74a1", "amd.com/gpu.vram": "24G"}],
        [{"amd.com/gpu.device-id": "74a1", "amd.com/gpu.vram": "unknown"}],
        [{"amd.com/gpu.device-id": "74a1"}, {"amd.com/gpu.device-id": "74a5"}],
    ],
)
def test_no_profile_is_guessed(nodes: list[dict[str, str]]) -> None:
    spec = spec_of("mi300x-2p2d.yaml", hardware__profile=None)
    with pytest.raises(InvalidSpec, match=r"spec\.hardware\.profile: got nothing"):
        select_profile(spec, PROFILES, [(f"gpu-{number}", labels) for number, labels in enumerate(nodes)])


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_sources_name_fields_that_exist(name: str) -> None:
    document = PROFILES[name].spec.model_dump(by_alias=True)
    for path in PROFILES[name].spec.sources:
        value: Any = document
        for part in path.split("."):
            assert part in value, path
            value = value[part]


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_every_reserve_has_a_source(name: str) -> None:
    profile = PROFILES[name].spec
    reserves = profile.reserve.model_dump(by_alias=True, exclude_defaults=True)
    assert {f"reserve.{field}" for field, amount in reserves.items() if amount} <= set(profile.sources)


# what status shows


def test_status_shows_limits_lines_and_the_profile_that_was_used() -> None:
    plan, profile = fitting("mi300x-2p2d.yaml"), PROFILES["mi300x"]
    status = plan_status(plan, profile)
    assert (status.decode.max_num_seqs, status.decode.num_pages, status.decode.kv_pool) == (8, 8_607, "16.3 GiB")
    assert [line.label for line in status.prefill.lines] == [line.label for line in plan.prefill.lines]
    other = profile.model_copy(update={"spec": profile.spec.model_copy(update={"sources": {}})})
    assert plan_status(plan, other).profile_version != status.profile_version


def test_planned_weights_are_the_lines_of_the_weights() -> None:
    role = fitting("mi300x-2p2d.yaml").decode
    assert weights_bytes(role) == sum(line.bytes for line in role.lines[:3])
