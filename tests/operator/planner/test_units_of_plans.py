"""Bytes, tokens, pages and requests are never mixed: asked for in other units, a plan is the same in those units."""

from __future__ import annotations

import re
from math import prod
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from kimi_operator.api import KimiDeploymentSpec, Role, parse
from kimi_operator.api.profile import DType, HardwareProfile
from kimi_operator.api.quantity import parse_bytes
from kimi_operator.errors import Problem
from kimi_operator.planner import Infeasible, Plan, make_plan
from kimi_operator.planner.budget import BlockPool, Budget, Captures, PagePool, PoolDesign
from kimi_operator.planner.case import Case
from kimi_operator.planner.memory import (
    ExpertFormat,
    GroupShape,
    MemoryLine,
    page_bytes,
    reserve_lines,
    slot_bytes,
    weight_lines,
)
from kimi_operator.planner.report import plan_status
from kimi_operator.planner.solve import solve, stretches, unused
from kimi_operator.planner.unified import block_layout
from kimi_operator.planner.units import bytes_text
from kimi_operator.planner.workload import Workload, empirical, fixed
from kimi_operator.profiles import architecture, built_in_profiles
from msgspec import Struct
from msgspec.structs import replace
from other_units import (
    in_units,
    larger_rows,
    numbers,
    profile_in_bytes,
    profile_in_tokens,
    smaller_bytes,
    smaller_tokens,
)

K3 = architecture("kimi-k3")
MI300X = built_in_profiles()["mi300x"]
GIB = 2**30
SIZES = st.integers(2, 10**6)
FEW = st.integers(2, 16)
SPARES = st.builds(lambda gib, rest: gib * GIB + rest, st.sampled_from(range(41)), st.integers(0, GIB))
"""Bytes up to 40 GiB, small ones no likelier than large ones."""


class Asked(Struct, frozen=True):
    """What a plan is asked for; None leaves it to the plan."""

    spare: int
    """Bytes of a GPU beside weights and reserves."""
    nodes: int
    tensor_parallel: int
    kv_cache: str
    max_num_seqs: int | None
    max_model_len: int | None
    prompt: int | None
    """Half the tokens of each prompt of the workload, and all of each answer."""
    context: int = 16_384
    """Tokens that the profile sets aside for a running request."""

    @property
    def profile(self) -> HardwareProfile:
        """MI300X with so much memory; to be read in the planner's own units."""
        shape = GroupShape(self.nodes, 8, self.tensor_parallel)
        weights = weight_lines(K3, shape, ExpertFormat.MXFP4, DType.BFLOAT16)
        memory = self.spare + sum(line.bytes for line in (*weights, *reserve_lines(MI300X.spec)))
        gpu = MI300X.spec.gpu.model_copy(update={"memory": memory})
        limits = MI300X.spec.limits.model_copy(update={"context_tokens_per_seq": self.context})
        return MI300X.model_copy(update={"spec": MI300X.spec.model_copy(update={"gpu": gpu, "limits": limits})})

    def plan(self, profile: HardwareProfile, k: int = 1) -> Plan | Infeasible:
        """In tokens of 1/k."""
        shape = {"nodesPerGroup": self.nodes, "gpusPerNode": 8, "tensorParallel": self.tensor_parallel}
        role = shape | ({"maxNumSeqs": self.max_num_seqs} if self.max_num_seqs else {})
        model: dict[str, Any] = {"checkpoint": {"hostPath": {"path": "/k3"}}}
        document = {"model": model, "precision": {"kvCache": self.kv_cache}, "prefill": role, "decode": role}
        if self.max_model_len:
            model["maxModelLen"] = self.max_model_len * k
        if self.prompt:
            document["workload"] = {"prompt": {"fixed": self.prompt * 2 * k}, "output": {"fixed": self.prompt * k}}
        a = replace(K3, max_positions=K3.max_positions * k)
        return make_plan(a, parse(KimiDeploymentSpec, document, "spec"), profile)


def asked(**fixed_fields: Any) -> st.SearchStrategy[Asked]:
    fields: dict[str, Any] = {
        "spare": SPARES,
        "nodes": st.sampled_from([1, 2, 7]),
        "tensor_parallel": st.sampled_from([1, 2, 8]),
        "kv_cache": st.sampled_from(["BF16", "FP32"]),
        "max_num_seqs": st.none() | st.integers(1, 32),
        "max_model_len": st.none() | st.integers(1, 8000) | st.integers(1, K3.max_positions),
        "prompt": st.none() | st.integers(1, 20_000),
        "context": st.integers(64, 16_384),
    }
    return st.builds(Asked, **(fields | fixed_fields))


CROWDED = Asked(15 * GIB, 2, 2, "FP32", None, None, None, context=100)
ROOMY = Asked(20 * GIB, 2, 2, "FP32", None, None, 3000)
SHORT = Asked(15 * GIB, 2, 2, "FP32", None, 1500, None)
"""Its longest request takes 24 pages; the pools hold a few hundred."""
TIGHT = Asked(10 * GIB, 2, 2, "BF16", 16, 200_000, None)
TOO_SMALL = Asked(GIB // 8, 2, 2, "FP32", None, 100_000, None)


def assert_same_refusal(one: Infeasible, other: Infeasible) -> None:
    """The same fields; remedies name tokens, requests and layouts, so they are the same in any bytes."""
    assert [(p.field, p.remedy) for p in one.problems] == [(p.field, p.remedy) for p in other.problems]


@settings(max_examples=25)
@given(ask=asked(), k=SIZES)
@example(ask=ROOMY, k=1000)
@example(ask=TIGHT, k=1024)
@example(ask=TOO_SMALL, k=3)
def test_a_plan_in_smaller_bytes_has_k_times_the_bytes_and_the_same_counts(ask: Asked, k: int) -> None:
    profile = ask.profile
    plan = ask.plan(profile)
    with smaller_bytes(k):
        profile_k = profile_in_bytes(profile, k)
        plan_k = ask.plan(profile_k)
    if isinstance(plan, Infeasible) or isinstance(plan_k, Infeasible):
        assert isinstance(plan, Infeasible)
        assert isinstance(plan_k, Infeasible)
        assert_same_refusal(plan, plan_k)
        return
    assert plan_k.gpus == plan.gpus
    for role in Role:
        one, other = plan.role(role), plan_k.role(role)
        assert numbers(other) == in_units(one, k, "_bytes")
        assert [(line.label, line.bytes) for line in other.lines] == [
            (each.label, each.bytes * k) for each in one.lines
        ]
    status, status_k = plan_status(plan, profile), plan_status(plan_k, profile_k)
    assert status_k.gpu_memory_bytes == status.gpu_memory_bytes * k
    for mine, its in ((status.prefill, status_k.prefill), (status.decode, status_k.decode)):
        assert (its.weights_bytes, its.free_bytes) == (mine.weights_bytes * k, mine.free_bytes * k)


@settings(max_examples=25)
@given(ask=asked(kv_cache=st.just("FP32")), k=FEW)
@example(ask=ROOMY, k=7)
@example(ask=SHORT, k=3)
@example(ask=CROWDED, k=2)
@example(ask=replace(TIGHT, kv_cache="FP32", spare=40 * GIB), k=2)
@example(ask=TOO_SMALL, k=2)
def test_a_plan_in_smaller_tokens_has_k_times_the_tokens_and_the_same_pages(ask: Asked, k: int) -> None:
    profile = ask.profile
    with larger_rows(k):
        plan = ask.plan(profile)
    plan_k = ask.plan(profile_in_tokens(profile, k), k)
    if isinstance(plan, Infeasible) or isinstance(plan_k, Infeasible):
        assert isinstance(plan, Infeasible)
        assert isinstance(plan_k, Infeasible)
        assert [problem.field for problem in plan.problems] == [problem.field for problem in plan_k.problems]
        assert lengths(plan_k) == [tokens * k for tokens in lengths(plan)]
        return
    for role in Role:
        one, other = plan.role(role), plan_k.role(role)
        assert numbers(other) == in_units(one, k, "_tokens", "max_model_len")
        assert [(line.label, line.bytes) for line in other.lines] == [(each.label, each.bytes) for each in one.lines]


def lengths(refused: Infeasible) -> list[int]:
    """Tokens that the remedies name."""
    return [whole(n) for p in refused.problems for n in re.findall(r"maxModelLen to (\d[\d,]*\d|\d)", p.remedy)]


@st.composite
def budgets(draw: st.DrawFn) -> Budget:
    """A GPU's memory in either design, with or without a stated pool and captured graphs."""
    design = draw(st.sampled_from(["pages", "blocks"]))
    lines = tuple(MemoryLine(f"line {i}", draw(SPARES), "") for i in range(2))
    memory = draw(SPARES) + sum(line.bytes for line in lines)
    pool = draw(st.none() | st.sampled_from([4 * GIB, 9 * GIB]))
    captures = draw(st.none() | st.builds(Captures, st.integers(0, 64 * 2**20)))
    pages = PagePool(64, *draw(st.sampled_from(PAGES_AND_SLOTS)))
    return Budget(memory, lines, pages if design == "pages" else block_pool(1), pool, captures)


PAGES_AND_SLOTS = [
    (page_bytes(K3, 64, DType.BFLOAT16), slot_bytes(K3, 2, DType.BFLOAT16)),
    # so small that bytes and numbers of pages could be taken for each other
    (40, 100),
    (1, 100),
]


def block_pool(k: int, row_itemsize: int = 1) -> BlockPool:
    return BlockPool(block_layout(K3, 2, row_itemsize * k, 2 * k))


def cases() -> st.SearchStrategy[Case]:
    lengths = st.lists(st.integers(1, 20_000), min_size=1, max_size=8).map(tuple).map(empirical)
    work = st.builds(Workload, lengths, st.integers(1, 4000).map(fixed), concurrency=st.none() | st.integers(1, 500))

    def case(work: Workload, role: Role, budget: Budget, most_seqs: int) -> Case:
        return Case(work, role, 8, budget, most_seqs, K3.max_positions)

    return st.builds(case, work, st.sampled_from(list(Role)), budgets(), st.integers(1, 512))


@settings(max_examples=60)
@given(case=cases(), k=SIZES)
def test_a_budget_in_smaller_bytes_is_solved_alike(case: Case, k: int) -> None:
    budget = case.budget
    if isinstance(budget.design, PagePool):
        pages = budget.design
        design_k: PoolDesign = replace(pages, page_bytes=pages.page_bytes * k, slot_bytes=pages.slot_bytes * k)
    else:
        with smaller_bytes(k):
            design_k = block_pool(k)
        layout = block_pool(1).layout
        assert design_k == BlockPool(replace(layout, block_bytes=layout.block_bytes * k))
    budget_k = Budget(
        budget.memory * k,
        tuple(replace(line, bytes=line.bytes * k) for line in budget.lines),
        design_k,
        None if budget.pool_bytes is None else budget.pool_bytes * k,
        None if budget.captures is None else Captures(budget.captures.bytes_each * k),
    )
    for seqs in (1, 17, 300):
        assert budget_k.num_units(seqs) == budget.num_units(seqs)
        for size in ("graphs_bytes", "pool", "outside"):
            assert getattr(budget_k, size)(seqs) == getattr(budget, size)(seqs) * k
    case_k = replace(case, budget=budget_k)
    one, other = solve(case), solve(case_k)
    if isinstance(one, Problem) or isinstance(other, Problem):
        assert isinstance(one, Problem)
        assert isinstance(other, Problem)
        assert one.field == other.field
        return
    assert numbers(other) == in_units(one, k, "_bytes")
    assert [(b.limit, b.max_num_seqs) for b in other.bounds] == [(b.limit, b.max_num_seqs) for b in one.bounds]
    assert stretches(case_k) == stretches(case)
    spare = {line.label: line.bytes * k for line in unused(case, one)}
    assert {line.label: line.bytes for line in unused(case_k, other)} == spare


@settings(max_examples=60)
@given(case=cases(), k=FEW)
def test_a_budget_in_smaller_tokens_is_solved_alike(case: Case, k: int) -> None:
    """The same bytes hold k times the tokens, each of 1/k of the bytes; pages, blocks and requests stay."""
    budget, work = case.budget, case.workload
    if isinstance(budget.design, PagePool):
        design_k: PoolDesign = replace(budget.design, page_size_tokens=64 * k)
    else:
        # rows of k bytes against k rows of one byte
        one_block = block_pool(1, k)
        budget = replace(budget, design=one_block)
        with smaller_tokens(k):
            design_k = block_pool(1)
        assert design_k == BlockPool(replace(one_block.layout, block_tokens=one_block.layout.block_tokens * k))
    work_k = replace(
        work,
        prompt=empirical(tuple(tokens * k for tokens in work.prompt.points)),
        output=fixed(work.output.longest * k),
    )
    case = replace(case, budget=budget)
    case_k = replace(
        case, workload=work_k, budget=replace(budget, design=design_k), max_positions=case.max_positions * k
    )
    one, other = solve(case), solve(case_k)
    if isinstance(one, Problem) or isinstance(other, Problem):
        assert isinstance(one, Problem)
        assert isinstance(other, Problem)
        assert one.field == other.field
        return
    assert numbers(other) == in_units(one, k, "max_model_len")
    assert [(b.limit, b.max_num_seqs) for b in other.bounds] == [(b.limit, b.max_num_seqs) for b in one.bounds]


# GiB against GB


@given(amount=st.integers(0, 2**60))
def test_a_size_for_people_is_right_to_half_of_its_last_digit_in_the_unit_that_it_names(amount: int) -> None:
    number, unit = bytes_text(amount).replace(",", "").split()
    factor = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    assert abs(float(number) * factor - amount) <= factor * 0.05 + amount * 1e-12
    assert amount < 2**10 if unit == "B" else amount >= factor


@given(amount=st.integers(0, 10**6), suffix=st.sampled_from("kMGTP"))
def test_decimal_and_binary_suffixes_of_sizes_differ(amount: int, suffix: str) -> None:
    power = "kMGTP".index(suffix) + 1
    assert parse_bytes(f"{amount}{suffix}") == amount * 1000**power
    assert parse_bytes(f"{amount}{suffix.upper()}i") == amount * 1024**power


@settings(max_examples=25)
@given(ask=asked(prompt=st.none()))
@example(ask=ROOMY)
def test_the_arithmetic_that_stands_beside_a_line_gives_its_bytes(ask: Asked) -> None:
    """Pages x tokens x bytes a token, slots x bytes, experts x layers x bytes: whoever multiplies gets the line."""
    plan = ask.plan(ask.profile)
    if isinstance(plan, Infeasible):
        return
    for role in Role:
        lines = {line.label: line for line in plan.role(role).lines}
        experts = re.match(r"(\d+) of \d+ experts x (\d+) layers x ([\d,]+) B", lines["routed experts"].how)
        pages = re.match(r"([\d,]+) pages x (\d+) tokens x ([\d,]+) B", lines["KV pages"].how)
        slots = re.match(r"\((\d+) running \+ (\d+) reserved by handoffs\) x ([\d,]+) B", lines["state slots"].how)
        assert experts
        assert pages
        assert slots
        running, reserved, slot = (whole(text) for text in slots.groups())
        assert prod(whole(text) for text in experts.groups()) == lines["routed experts"].bytes
        assert prod(whole(text) for text in pages.groups()) == lines["KV pages"].bytes
        assert (running + reserved) * slot == lines["state slots"].bytes


def whole(text: str) -> int:
    return int(text.replace(",", ""))
