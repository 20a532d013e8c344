"""Plans for a stated workload: maxNumSeqs by brute force, what binds, targets that are missed, and what is refused."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kimi_operator.api import KimiDeploymentSpec, dump, parse
from kimi_operator.api.profile import HardwareProfile
from kimi_operator.planner import Infeasible, Plan, make_plan, plan_status
from kimi_operator.planner.plan import RolePlan
from kimi_operator.planner.pools import num_slots
from kimi_operator.planner.workload import workload_of
from kimi_operator.profiles import architecture, built_in_profiles
from kimi_operator.profiles.forecast import plan_on

REPOSITORY = Path(__file__).resolve().parents[3]
SPEC = yaml.safe_load((REPOSITORY / "examples" / "mi300x-2p2d.yaml").read_text())["spec"]
K3 = architecture("kimi-k3")
PROFILES = built_in_profiles()
POOLS = {"state slots", "KV pages", "free"}


def asked(workload: dict[str, Any] | None, **changes: Any) -> KimiDeploymentSpec:
    """The example without maxNumSeqs, under a workload; `decode__maxNumSeqs` is a path."""
    document = copy.deepcopy(SPEC)
    for role in ("prefill", "decode"):
        document[role].pop("maxNumSeqs", None)
    document["model"].pop("maxModelLen", None)
    if workload is not None:
        document["workload"] = {"prompt": {"fixed": 2048}, "output": {"fixed": 128}} | workload
    for path, value in changes.items():
        section, _, field = path.partition("__")
        document[section][field] = value
    return parse(KimiDeploymentSpec, document, "spec")


def plan(workload: dict[str, Any] | None, profile: HardwareProfile = PROFILES["mi300x"], **changes: Any) -> Plan:
    made = plan_on(K3, asked(workload, **changes), profile)
    assert isinstance(made, Plan), str(made)
    return made


def refused(workload: dict[str, Any], **changes: Any) -> Infeasible:
    made = plan_on(K3, asked(workload, **changes), PROFILES["mi300x"])
    assert isinstance(made, Infeasible)
    return made


def free(role: RolePlan) -> int:
    """Bytes of a GPU that slots and pages share."""
    return sum(line.bytes for line in role.lines if line.label in POOLS)


def by_brute_force(role: RolePlan, tokens: int, limit: int, slots: int | None = None) -> int:
    """Most requests of one length that fit with their slots and pages, one by one; or beside so many slots."""
    pages, seqs = -(-tokens // role.page_size_tokens), 0
    while seqs < limit:
        need = (slots or num_slots(seqs + 1)) * role.slot_bytes + (seqs + 1) * pages * role.page_bytes
        if need > free(role):
            break
        seqs += 1
    return seqs


@settings(max_examples=25)
@given(prompt=st.integers(1, 200_000), output=st.integers(1, 50_000))
def test_a_lane_runs_what_slots_and_pages_hold_of_one_length(prompt: int, output: int) -> None:
    made = plan({"prompt": {"fixed": prompt}, "output": {"fixed": output}})
    limit = PROFILES["mi300x"].spec.limits.max_num_seqs
    assert made.prefill.max_num_seqs == by_brute_force(made.prefill, prompt, limit)
    assert made.decode.max_num_seqs == by_brute_force(made.decode, prompt + output, limit)
    assert made.warnings == ()


def test_without_a_workload_the_profiles_context_decides_as_before() -> None:
    made, before = plan(None), make_plan(K3, asked(None), PROFILES["mi300x"])
    assert made == before
    assert isinstance(before, Plan)
    assert before.decode.binds.startswith("maxNumSeqs (")


def test_long_requests_run_fewer_and_leave_pages_where_slots_were() -> None:
    short, long = plan({}), plan({"prompt": {"fixed": 100_000}})
    assert long.decode.max_num_seqs < short.decode.max_num_seqs
    assert long.decode.num_pages > short.decode.num_pages
    assert long.decode.binds.startswith("pages for prompts of 100,000 tokens, answers of 128 tokens: ")


def test_no_more_slots_than_are_asked_for() -> None:
    made = plan({"concurrency": 16})
    assert (made.decode.lanes, made.decode.max_num_seqs) == (8, 2)
    assert made.decode.binds.startswith("workload for prompts of ")
    assert made.decode.num_pages > plan({}).decode.num_pages
    rate = {"requestsPerSecond": 0.5, "targets": {"tpotSeconds": 2}}
    assert plan(rate).decode.max_num_seqs == 16  # 0.5/s x 128 tokens x 2 s = 128 over 8 lanes
    decode, prefill = sorted(plan(rate | {"requestsPerSecond": 500}).warnings, key=len, reverse=True)
    assert decode.startswith("spec.workload.requestsPerSecond: got 500, which needs 128,000 requests at once, expected")
    assert prefill.startswith("spec.workload.requestsPerSecond: got 500, expected at most ")
    assert "what prefill feeds" in prefill


def test_what_a_role_states_wins_and_is_said_to_be_too_much() -> None:
    made = plan({"prompt": {"fixed": 100_000}}, decode__maxNumSeqs=24)
    assert made.decode.max_num_seqs == 24
    (warning,) = made.warnings
    holds = by_brute_force(made.decode, 100_128, 24)
    assert warning.startswith(f"spec.decode.maxNumSeqs: got 24, expected at most {holds}, which memory holds of this")
    beside = by_brute_force(made.decode, 100_128, 24, slots=made.decode.num_state_slots)
    assert f"lower it: beside the slots of 24 it holds {beside}, and the youngest requests are preempted" in warning
    assert made.decode.binds.startswith("pages for prompts of 100,000 tokens, ")
    assert f": {beside} a lane; {made.decode.num_pages:,} KV pages; " in made.decode.binds
    assert plan({"prompt": {"fixed": 100_000}}, decode__maxNumSeqs=1).warnings == ()
    assert plan({"prompt": {"fixed": 100_000}}, decode__maxNumSeqs=holds).warnings == ()


def test_a_demand_that_does_not_fit_is_planned_with_a_warning() -> None:
    made = plan({"concurrency": 100_000})
    (warning,) = made.warnings
    assert warning.startswith("spec.workload.concurrency: got 100,000, expected at most ")
    assert "lanes" in warning


def test_status_shows_what_was_planned_for() -> None:
    made = plan({})
    status = plan_status(made, PROFILES["mi300x"])
    assert status.workload == "prompts of 2,048 tokens, answers of 128 tokens"
    assert status.decode.binds == made.decode.binds
    assert plan_status(plan(None), PROFILES["mi300x"]).workload == ""


# targets


def test_a_target_leaves_as_many_as_meet_it() -> None:
    profile = PROFILES["mi325x"]
    free_plan = plan({}, profile)
    tight, work = plan({"targets": {"tpotSeconds": 0.3}}, profile), asked({}).workload
    assert work is not None
    assert 1 < tight.decode.max_num_seqs < free_plan.decode.max_num_seqs
    assert tight.decode.binds.startswith("target TPOT for prompts of 2,048 tokens")
    assert tight.prefill == free_plan.prefill


def test_a_target_that_nothing_meets_is_a_warning() -> None:
    made = plan({"targets": {"tpotSeconds": 0.001, "ttftSeconds": 0.001}})
    assert made.decode.max_num_seqs == 1
    fields = [warning.partition(":")[0] for warning in made.warnings]
    assert fields == ["spec.workload.targets.ttftSeconds", "spec.workload.targets.tpotSeconds"]


def test_a_profiles_own_calibration_changes_what_a_target_allows() -> None:
    document = dump(PROFILES["mi325x"])
    document["spec"]["calibration"] = {"decodeFactor": 4.0, "decodeBandPercent": 5.0, "measuredOn": "a slow cluster"}
    slow, targets = parse(HardwareProfile, document), {"targets": {"tpotSeconds": 0.2}}
    assert plan(targets, slow).decode.max_num_seqs < plan(targets, PROFILES["mi325x"]).decode.max_num_seqs


def test_targets_without_predictions_are_left_aside_and_it_says_so() -> None:
    targets = {"targets": {"tpotSeconds": 0.001}}
    alone = make_plan(K3, asked(targets), PROFILES["mi300x"])
    assert isinstance(alone, Plan)
    assert alone.warnings == ("spec.workload.targets are left aside: nothing predicts times here",)
    document = dump(PROFILES["mi300x"])
    for part in (document["spec"]["basis"], document["spec"]["sources"]):
        del part["gpu.hbmBytesPerSecond"]
    del document["spec"]["gpu"]["hbmBytesPerSecond"]
    (warning,) = plan(targets, parse(HardwareProfile, document)).warnings
    assert "left aside: HardwareProfile mi300x: spec.gpu.hbmBytesPerSecond: got nothing" in warning
    # steps of decode need no FLOPs
    (warning,) = plan(targets, PROFILES["mi308x"]).warnings
    assert warning.startswith("spec.workload.targets.tpotSeconds: got 0.001 s, expected at least")
    assert alone.decode.max_num_seqs == plan({}).decode.max_num_seqs


# what is refused


@pytest.mark.parametrize(
    ("workload", "changes", "said"),
    [
        ({"prompt": {}}, {}, "spec.workload.prompt: got nothing, expected exactly one of fixed, uniform"),
        ({"prompt": {"uniform": {"min": 9, "max": 3}}}, {}, "spec.workload.prompt.uniform.min: got 9"),
        ({"prompt": {"fixed": 1_048_576}}, {}, "spec.workload.prompt: got 1,048,576 tokens, expected less than"),
        ({"output": {"fixed": 3000}}, {"model__maxModelLen": 4096}, "5,048 together, expected at most 4,096 tokens"),
        ({"requestsPerSecond": 2.0}, {}, "spec.workload.targets.tpotSeconds: got nothing, expected a value"),
        ({"prompt": {"fixed": 1_000_000}}, {}, "for one request of 1,000,128 tokens a GPU, expected at most 192.0 GiB"),
    ],
)
def test_what_no_plan_serves_is_named(workload: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    assert said in str(refused(workload, **changes))


def test_a_longest_request_of_the_deployment_fits_beside_the_slots() -> None:
    made = plan({"prompt": {"fixed": 100}}, model__maxModelLen=400_000)
    assert made.decode.num_pages * made.decode.page_size_tokens >= 400_000
    assert made.decode.max_num_seqs < plan({"prompt": {"fixed": 100}}).decode.max_num_seqs
    assert "a request of 400,000 tokens, prompt and answer, must fit beside the slots of all" in made.decode.binds


# whatever is asked for

TOKENS = st.one_of(st.integers(1, 4000), st.integers(1, 100_000), st.sampled_from([1, 64, 1_048_576, 16_777_216]))
LENGTHS = st.one_of(
    TOKENS.map(lambda n: {"fixed": n}),
    st.tuples(TOKENS, TOKENS).map(lambda two: {"uniform": {"min": min(two), "max": max(two)}}),
    st.tuples(TOKENS, TOKENS).map(lambda two: {"logNormal": {"median": min(two), "p95": max(two)}}),
    st.lists(TOKENS, min_size=1, max_size=40).map(lambda many: {"empirical": many}),
)
SECONDS = st.floats(1e-6, 3600)
WORKLOADS = st.fixed_dictionaries(
    {"prompt": LENGTHS, "output": LENGTHS},
    optional={
        "reuse": st.floats(0, 0.999),
        "targets": st.fixed_dictionaries({}, optional={"ttftSeconds": SECONDS, "tpotSeconds": SECONDS}),
        "concurrency": st.integers(1, 1_000_000),
        "requestsPerSecond": st.floats(1e-6, 1e6),
    },
)


STATED_SEQS = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("prefill__maxNumSeqs", "decode__maxNumSeqs"), st.integers(1, 60))
)


@settings(max_examples=60)
@given(WORKLOADS, st.sampled_from(sorted(PROFILES)), st.sampled_from([None, 4096, 131_072]), STATED_SEQS)
def test_every_workload_gets_a_plan_that_adds_up_or_a_reason(
    workload: dict[str, Any], name: str, longest: int | None, stated: dict[str, int]
) -> None:
    changes = stated if longest is None else stated | {"model__maxModelLen": longest}
    spec = asked(workload, **changes)
    made = plan_on(K3, spec, PROFILES[name])
    if isinstance(made, Infeasible):
        assert all(each.field and each.got and each.expected and each.remedy for each in made.problems)
        return
    for role in (made.prefill, made.decode):
        assert sum(line.bytes for line in role.lines) == PROFILES[name].spec.gpu.memory
        assert all(line.bytes >= 0 for line in role.lines)
        most = stated.get(f"{role.role}__maxNumSeqs", PROFILES[name].spec.limits.max_num_seqs)
        assert 1 <= role.max_num_seqs <= most
        assert_serves_its_longest(spec, role)
        assert_words_are_of_its_pool(role)
        assert role.num_state_slots == num_slots(role.max_num_seqs)
        assert len(role.binds) <= 1024
    assert all(made.warnings)


def assert_serves_its_longest(spec: KimiDeploymentSpec, role: RolePlan) -> None:
    """What the plan serves is the whole of the workload; without a tail that is every request."""
    assert spec.workload is not None
    workload = workload_of(spec.workload, "workload")
    served = workload.within(spec.model.max_model_len or K3.max_positions)
    assert served.decode_tokens.longest <= role.max_model_len <= role.num_pages * role.page_size_tokens
    assert served.decode_tokens.has_tail or served is workload


def assert_words_are_of_its_pool(role: RolePlan) -> None:
    """Pages that are named in what binds are those of the plan."""
    for pages in re.findall(r"([\d,]+) KV pages;", role.binds):
        assert pages == f"{role.num_pages:,}"


TAILS = st.tuples(st.integers(1, 4000), st.integers(1, 40)).map(lambda two: (two[0], two[0] * two[1]))


def missed_of(made: Plan) -> set[str]:
    """What warnings say, without the layout that would meet it: longer answers may not fit there."""
    return {warning.split("; ")[0] for warning in made.warnings}


@settings(max_examples=30)
@given(
    prompt=st.integers(1, 28_000),
    tail=TAILS,
    longer=st.integers(2, 20),
    longest=st.sampled_from([None, 32_768]),
    target=st.sampled_from([None, 1.0, 20.0]),
)
@example(prompt=4089, tail=(781, 22649), longer=10, longest=None, target=1.0)
def test_a_longer_tail_of_answers_changes_no_prefill_and_never_gives_a_better_plan(
    prompt: int, tail: tuple[int, int], longer: int, longest: int | None, target: float | None
) -> None:
    def planned(factor: int) -> Plan | Infeasible:
        answers = {"median": tail[0] * factor, "p95": tail[1] * factor}
        targets = {} if target is None else {"targets": {"ttftSeconds": target}}
        document = {"prompt": {"fixed": prompt}, "output": {"logNormal": answers}} | targets
        return plan_on(K3, asked(document, **({"model__maxModelLen": longest} if longest else {})), PROFILES["mi325x"])

    short, long = planned(1), planned(longer)
    if isinstance(long, Infeasible):
        return
    assert isinstance(short, Plan), str(short)
    assert long.decode.max_num_seqs <= short.decode.max_num_seqs
    assert missed_of(long) >= missed_of(short)
    if longest:
        assert long.prefill.max_num_seqs == short.prefill.max_num_seqs
        assert long.warnings == short.warnings


def test_a_tail_that_is_cut_is_told_and_its_prompt_meets_no_target_that_it_missed() -> None:
    """The prompt is whole, so its target is missed however long answers are."""
    warnings = set()
    for p95 in (6000, 30_000, 300_000):
        work = {"prompt": {"fixed": 16_384}, "output": {"logNormal": {"median": 1000, "p95": p95}}}
        made = plan(work | {"targets": {"ttftSeconds": 5.0}}, model__maxModelLen=32_768)
        warnings |= set(made.warnings)
        assert made.workload.endswith("ended where a request has 32,768") == (p95 > 6000)
        assert made.prefill.max_num_seqs == 1
    (warning,) = warnings
    assert warning.startswith("spec.workload.targets.ttftSeconds: got 5 s, expected at least ")
    assert "which 16,384 prompt tokens and 0 reused take" in warning


# refusals of what the pools cannot serve, and what their remedies lead to


def number_after(text: str, words: str) -> int:
    return int(re.search(rf"{words} ([\d,]*\d)", text)[1].replace(",", ""))  # type: ignore[index]


@settings(max_examples=30)
@given(
    prompt=st.integers(1, 900_000), output=st.integers(1, 100_000), seqs=st.integers(1, 32), stated=st.integers(1, 32)
)
def test_a_request_that_no_lane_holds_is_refused_and_each_remedy_leads_to_a_plan(
    prompt: int, output: int, seqs: int, stated: int
) -> None:
    def planned(longest: int, **changes: Any) -> Plan | Infeasible:
        work = {"prompt": {"fixed": longest - 1}, "output": {"fixed": 1}}
        settings = {"prefill__maxNumSeqs": seqs, "decode__maxNumSeqs": stated} | changes
        return plan_on(K3, asked(work, **settings), PROFILES["mi300x"])

    longest = prompt + output
    made = planned(longest)
    if isinstance(made, Plan):
        assert made.decode.max_model_len >= longest
        return
    lower = {problem.field: number_after(problem.remedy, "lower it to") for problem in made.problems
             if problem.field.endswith("maxNumSeqs")}  # fmt: skip
    if len(lower) == len(made.problems):
        fewer = {path.removeprefix("spec.").replace(".", "__"): most for path, most in lower.items()}
        assert isinstance(planned(longest, **fewer), Plan)
        for path, most in fewer.items():
            assert isinstance(planned(longest, **fewer | {path: most + 1}), Infeasible)
    for problem in made.problems:
        if "workload's longest request to" in problem.remedy:
            shorter = number_after(problem.remedy, "workload's longest request to")
            assert isinstance(planned(shorter), Plan)
            assert isinstance(planned(shorter + 64), Infeasible)


def test_prefill_that_holds_the_prompt_but_not_the_answer_is_refused() -> None:
    """Both roles have one longest request: the plan would serve less than is asked for."""
    work = {"prompt": {"fixed": 600_000}, "output": {"fixed": 100_000}}
    made = refused(work, decode__nodesPerGroup=4)
    assert [problem.field for problem in made.problems] == ["spec.prefill"]
    assert "lower the workload's longest request to 615,872" in made.problems[0].remedy
    shorter = plan(work | {"prompt": {"fixed": 515_872}}, decode__nodesPerGroup=4)
    assert shorter.prefill.max_model_len == shorter.decode.max_model_len == 615_872


def test_prefill_runs_fewer_where_its_pool_would_not_hold_prompt_and_answer() -> None:
    made = plan({"prompt": {"fixed": 100_000}, "output": {"fixed": 500_000}})
    assert made.prefill.max_model_len >= 600_000
    assert made.prefill.max_num_seqs < plan({"prompt": {"fixed": 100_000}}).prefill.max_num_seqs
    assert "a request of 600,000 tokens, prompt and answer, must fit beside the slots" in made.prefill.binds


def test_a_tail_beyond_the_pools_is_refused_until_a_longest_request_cuts_it() -> None:
    work = {"prompt": {"logNormal": {"median": 8000, "p95": 400_000}}}
    remedy = refused(work).problems[0].remedy
    longest = number_after(remedy, "shorten the workload's tail, or cut it by spec.model.maxModelLen, to")
    made = plan(work, model__maxModelLen=longest)
    assert f"over {longest - 1:,} refused" in made.workload
    assert made.decode.max_model_len == longest


@settings(max_examples=30)
@given(st.integers(1, 400_000), st.integers(0, 100_000), st.integers(1, 500), st.integers(0, 500))
def test_longer_requests_never_run_more_and_more_load_never_fewer(
    prompt: int, longer: int, concurrency: int, more: int
) -> None:
    def seqs(tokens: int, load: int) -> int:
        return plan({"prompt": {"fixed": tokens}, "concurrency": load}).decode.max_num_seqs

    assert seqs(prompt + longer, concurrency) <= seqs(prompt, concurrency) <= seqs(prompt, concurrency + more)


def test_a_plan_tells_that_no_prompt_is_kept() -> None:
    (told,) = (each for each in plan({"reuse": 0.5}).warnings if "prefix cache" in each)
    assert "computes whole prompts" in told
    assert "50%" in told
    assert not any("prefix cache" in each for each in plan({}).warnings)
