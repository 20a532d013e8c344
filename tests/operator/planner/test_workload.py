"""Workloads: what a mapping says, which lengths stand for it, and what is refused with which words."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kimi_operator.api.deployment import Role
from kimi_operator.errors import InvalidSpec
from kimi_operator.planner.workload import (
    NUM_POINTS,
    Lengths,
    Workload,
    check_lengths,
    empirical,
    fixed,
    log_normal,
    read_workload,
    uniform,
)

SIZES = st.integers(1, 100_000)


def document(**changes: Any) -> dict[str, Any]:
    return {"prompt": 2048, "output": 128, **changes}


def problems_of(doc: dict[str, Any]) -> list[str]:
    with pytest.raises(InvalidSpec) as refused:
        read_workload(doc)
    return [str(problem) for problem in refused.value.problems]


def test_numbers_are_fixed_lengths_and_nothing_else_is_asked_for() -> None:
    workload = read_workload(document())
    assert (workload.prompt.points, workload.output.points) == ((2048,), (128,))
    assert (workload.decode_tokens.longest, workload.mean_context) == (2176, 2112)
    assert workload.tokens(Role.PREFILL).longest == 2048
    assert (workload.reuse, workload.running, workload.ttft_s, workload.tpot_s) == (0, None, None, None)


def test_everything_at_once() -> None:
    workload = read_workload(
        document(
            prompt={"logNormal": {"median": 8000, "p95": 60_000}},
            output={"uniform": {"min": 100, "max": 500}},
            reuse=0.9,
            targets={"ttftSeconds": 2.5, "tpotSeconds": 0.1},
            concurrency=512,
        )
    )
    assert workload.reuse == Fraction(9, 10)
    assert (workload.ttft_s, workload.tpot_s, workload.running) == (2.5, 0.1, 512)
    assert str(workload.prompt) == "log-normal, median 8,000, p95 60,000 tokens"
    assert len(workload.decode_tokens.points) == NUM_POINTS**2


def test_observed_lengths_are_a_list() -> None:
    workload = read_workload(document(prompt={"empirical": [30, 10, 20]}, output={"fixed": 5}))
    assert workload.decode_tokens.points == (15, 25, 35)
    assert workload.prompt.longest == 30


def test_a_rate_becomes_running_requests_by_littles_law() -> None:
    rate = read_workload(document(requestsPerSecond=3.5, output=200, targets={"tpotSeconds": 0.1}))
    assert rate.running == 70  # 3.5/s x 200 tokens x 0.1 s: exact, though 0.1 is no binary fraction
    assert read_workload(document(requestsPerSecond=0.001, targets={"tpotSeconds": 0.01})).running == 1


def test_reuse_spares_prefill_work_but_no_pages() -> None:
    fresh, reused = read_workload(document()), read_workload(document(reuse=0.75))
    assert fresh.computed_and_reused(2048) == (2048, 0)
    assert reused.computed_and_reused(2048) == (512, 1536)
    assert reused.computed_and_reused(Fraction(7, 2)) == (1, 3)
    assert reused.decode_tokens == fresh.decode_tokens


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt": 0}, "workload.prompt.fixed: got 0, expected greater than or equal to 1"),
        ({"prompt": -5}, "workload.prompt.fixed: got -5"),
        ({"prompt": 10**12}, "workload.prompt.fixed: got 1000000000000, expected less than or equal to 16777216"),
        ({"prompt": "long"}, "workload.prompt: got 'long'"),
        ({"prompt": True}, "workload.prompt: got true"),
        ({"prompt": {}}, "workload.prompt: got nothing, expected exactly one of fixed, uniform, logNormal, empirical"),
        ({"prompt": {"fixed": 1, "empirical": [1]}}, "workload.prompt: got empirical and fixed"),
        ({"prompt": {"empirical": []}}, "workload.prompt.empirical: got []"),
        ({"prompt": {"empirical": [5, "6"]}}, "workload.prompt.empirical.1: got '6'"),
        ({"prompt": {"uniform": {"min": 9, "max": 3}}}, "prompt.uniform.min: got 9, expected at most max, 3; swap"),
        (
            {"output": {"logNormal": {"median": 90, "p95": 30}}},
            "workload.output.logNormal.p95: got 30, expected at least the median, 90; raise p95 or lower the median",
        ),
        ({"promt": 3}, "workload.promt: got 3, expected no such field; remove it or mend its spelling"),
        ({"reuse": 1.0}, "workload.reuse: got 1.0, expected less than 1"),
        ({"targets": {"tpotSeconds": 0}}, "workload.targets.tpotSeconds: got 0"),
        ({"concurrency": 0}, "workload.concurrency: got 0, expected greater than or equal to 1"),
        ({"concurrency": 1.5}, "workload.concurrency: got 1.5"),
        (
            {"concurrency": 4, "requestsPerSecond": 2.0, "targets": {"tpotSeconds": 0.1}},
            "workload.requestsPerSecond: got 2 beside concurrency 4, expected one of the two; remove either",
        ),
        ({"requestsPerSecond": 2.0}, "workload.targets.tpotSeconds: got nothing"),
        (
            {"targets": {"tpotSeconds": 60}},
            "workload.targets.tpotSeconds: got 60, expected at most 10 s for each token; write it in seconds: 60 ms "
            "are 0.06 s",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_value_and_a_remedy(changes: dict[str, Any], said: str) -> None:
    problems = problems_of(document(**changes))
    assert any(said in problem for problem in problems), problems
    assert all(problem.partition("; ")[2] for problem in problems)


def test_all_problems_are_told_at_once() -> None:
    doc = document(prompt={"uniform": {"min": 9, "max": 3}}, output={}, requestsPerSecond=1.0)
    assert len(problems_of(doc)) == 3


def test_a_missing_length_is_named() -> None:
    assert problems_of({"prompt": 3}) == ["workload.output: got nothing, expected a value; set it"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt": 1000}, "workload.prompt: got 1,000 tokens, expected less than 1,000 tokens"),
        ({"prompt": {"uniform": {"min": 1, "max": 2000}}}, "workload.prompt: got 1 to 2,000 tokens"),
        ({"prompt": {"logNormal": {"median": 1500, "p95": 1600}}}, "workload.prompt: got log-normal, median 1,500"),
        ({"output": 4000}, "workload.output: got 4,000 tokens"),
        ({"prompt": 900}, "1,028 together, expected at most 1,000 tokens, the model's longest sequence; lower the "),
    ],
)
def test_lengths_that_the_model_was_not_made_for(changes: dict[str, Any], said: str) -> None:
    problems = check_lengths(read_workload(document(**{"prompt": 100, **changes})), 1000)
    assert any(said in str(problem) for problem in problems), problems


def test_the_tail_of_a_log_normal_is_cut_not_refused() -> None:
    workload = read_workload(document(prompt={"logNormal": {"median": 300, "p95": 1200}}))
    assert check_lengths(workload, 1000) == ()
    served = workload.within(1000)
    assert served.decode_tokens.longest == 1000
    assert served.prompt.points[0] == workload.prompt.points[0]
    assert served.within(1000) is served


# what is cut: pairs of a prompt and an answer, each served as a worker serves it

SHORT = st.integers(1, 3000)
STATED = st.one_of(
    SHORT.map(fixed),
    st.tuples(SHORT, SHORT).map(lambda two: uniform(min(two), max(two))),
    st.lists(SHORT, min_size=1, max_size=40).map(lambda many: empirical(tuple(many))),
)
TAILED = st.tuples(SHORT, st.integers(1, 30)).map(lambda two: log_normal(two[0], two[0] * two[1]))
ANY = st.one_of(STATED, TAILED)


def longer(lengths: Lengths, factor: int) -> Lengths:
    """Every length drawn out by the same factor."""
    return Lengths(
        tuple(point * factor for point in lengths.points), lengths.longest * factor, "longer", lengths.has_tail
    )


@given(prompt=ANY, output=ANY, limit=st.integers(1, 8000))
def test_a_cut_workload_is_what_a_worker_serves_pair_by_pair(prompt: Lengths, output: Lengths, limit: int) -> None:
    whole = Workload(prompt, output)
    cut = whole.within(limit)
    if check_lengths(whole, limit):
        assert cut is whole
        return
    pairs = [(min(p, limit - 1), o) for p in prompt.points for o in output.points]
    assert cut.decode_tokens.points == tuple(sorted(min(p + o, limit) for p, o in pairs))
    assert cut.decode_tokens.longest == min(prompt.longest + output.longest, limit)
    assert cut.output.mean == Fraction(sum(min(o, limit - p) for p, o in pairs), len(pairs))
    assert cut.prompt.mean + cut.output.mean == cut.decode_tokens.mean
    assert cut.within(limit) is cut


@given(prompt=STATED, output=ANY, limit=st.integers(1, 8000))
def test_prompts_without_a_tail_are_never_cut(prompt: Lengths, output: Lengths, limit: int) -> None:
    assert Workload(prompt, output).within(limit).prompt is prompt


@given(prompt=STATED, output=STATED, limit=st.integers(1, 8000))
def test_requests_without_a_tail_are_served_whole_or_refused(prompt: Lengths, output: Lengths, limit: int) -> None:
    workload = Workload(prompt, output)
    assert workload.within(limit) is workload
    assert (check_lengths(workload, limit) == ()) == (prompt.longest + output.longest <= limit)


@given(prompt=ANY, output=TAILED, factor=st.integers(2, 30), limit=st.integers(1, 8000))
def test_a_longer_tail_never_asks_for_less(prompt: Lengths, output: Lengths, factor: int, limit: int) -> None:
    short, long = Workload(prompt, output), Workload(prompt, longer(output, factor))
    if check_lengths(long, limit):
        return
    assert check_lengths(short, limit) == ()
    less, more = short.within(limit), long.within(limit)
    assert less.prompt.points == more.prompt.points
    assert less.decode_tokens.longest <= more.decode_tokens.longest
    assert all(a <= b for a, b in zip(less.decode_tokens.points, more.decode_tokens.points, strict=True))
    assert less.output.mean <= more.output.mean


@given(prompt=ANY, output=ANY, limits=st.tuples(st.integers(1, 8000), st.integers(1, 8000)))
def test_cutting_twice_is_cutting_to_the_lesser(prompt: Lengths, output: Lengths, limits: tuple[int, int]) -> None:
    workload, least = Workload(prompt, output), min(limits)
    if check_lengths(workload, least):
        return
    twice = workload.within(max(limits)).within(least)
    assert (twice.prompt, twice.output, twice.decode_tokens) == (
        workload.within(least).prompt,
        workload.within(least).output,
        workload.within(least).decode_tokens,
    )


def test_what_is_cut_is_told() -> None:
    tail = {"logNormal": {"median": 300, "p95": 1200}}
    served = read_workload(document(prompt=tail, output=tail)).within(1000)
    assert str(served.prompt) == "log-normal, median 300, p95 1,200 tokens, over 999 refused"
    assert str(served.output) == "log-normal, median 300, p95 1,200 tokens, ended where a request has 1,000"


@pytest.mark.parametrize(("prompt", "which"), [(fixed(700), "longest"), (log_normal(700, 800), "median")])
def test_a_tail_whose_median_has_no_room_is_refused_with_what_has(prompt: Lengths, which: str) -> None:
    (problem,) = check_lengths(Workload(prompt, log_normal(400, 500)), 1000)
    assert problem.got.endswith(" together, tails at their median")
    room = int(problem.remedy.removeprefix(f"lower the {which} prompt to "))
    shorter = fixed(room) if which == "longest" else log_normal(room, room + 100)
    assert check_lengths(Workload(shorter, log_normal(400, 500)), 1000) == ()


def test_a_log_normal_meets_its_median_and_its_95th_percentile() -> None:
    lengths = log_normal(1000, 8000)
    below = [sum(point <= limit for point in lengths.points) / NUM_POINTS for limit in (1000, 8000)]
    assert below == pytest.approx([0.5, 0.95], abs=1 / NUM_POINTS)
    assert 8000 < lengths.longest < 40_000
    assert log_normal(700, 700).points == (700,) * NUM_POINTS


@given(least=SIZES, span=st.integers(0, 100_000))
def test_a_uniform_keeps_its_ends_and_its_mean(least: int, span: int) -> None:
    lengths = uniform(least, least + span)
    assert least <= lengths.points[0]
    assert lengths.longest == least + span
    assert abs(lengths.mean - Fraction(2 * least + span, 2)) <= 1


@given(st.lists(SIZES, min_size=1, max_size=NUM_POINTS))
def test_few_observed_lengths_are_kept_as_they_are(observed: list[int]) -> None:
    lengths = empirical(tuple(observed))
    assert lengths.mean == Fraction(sum(observed), len(observed))
    assert lengths.longest == max(observed)


@pytest.mark.parametrize("seed", range(5))
def test_many_observed_lengths_keep_their_longest_and_nearly_their_mean(seed: int) -> None:
    rng = random.Random(seed)
    observed = tuple(rng.randint(1, 10_000) for _ in range(5000))
    lengths = empirical(observed)
    assert len(lengths.points) == NUM_POINTS
    assert lengths.longest == max(observed)
    assert float(lengths.mean) == pytest.approx(sum(observed) / len(observed), rel=0.01)


@given(first=SIZES, second=SIZES)
def test_sums_of_fixed_lengths_are_fixed(first: int, second: int) -> None:
    assert fixed(first).plus(fixed(second)).points == (first + second,)


@pytest.mark.parametrize("answers", [fixed(60), uniform(1, 120), log_normal(30, 300), empirical((5, 5, 5, 400))])
def test_those_that_run_hold_what_a_lane_of_places_holds(answers: Lengths) -> None:
    """Places that are never empty, each a token a step: long answers fill most of them."""
    rng, prompt = random.Random(7), 100
    left = [0] * 64
    done = [0] * 64
    held = []
    for step in range(12_000):
        for place, tokens in enumerate(left):
            if not tokens:
                left[place], done[place] = rng.choice(answers.points), 0
            left[place] -= 1
            done[place] += 1
        if step >= 2000:
            held.append(prompt + sum(done) / len(done) - 0.5)
    assert Workload(fixed(prompt), answers).mean_context == pytest.approx(sum(held) / len(held), rel=0.03)
