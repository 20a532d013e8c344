"""Figures of a plan with formula, values and source, for views, comparison and explanation: memory and pools. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from msgspec import Struct

from kimi_operator.api.deployment import Role
from kimi_operator.cli.outlook import Outlook, RoleOutlook, Speed
from kimi_operator.errors import Problem
from kimi_operator.planner import MemoryLine
from kimi_operator.planner.case import Solution
from kimi_operator.planner.memory import ITEMSIZE
from kimi_operator.planner.pools import context_of_each, num_slots
from kimi_operator.planner.predict import (
    Prediction,
)
from kimi_operator.planner.units import bytes_text, ceil_div, counted

_WEIGHT_FORMULAS = {
    "routed experts": "experts of a rank x MoE layers x bytes of an expert",
    "weights split over a lane": "bytes of all tensors that a lane splits / tensorParallel",
    "weights whole on each rank": "bytes of all tensors that each rank holds",
}


_WHOLE = re.compile(r"([0-9][0-9,]*)(?: (B)(?: = .*)?| at once)?")


class Amount(Struct, frozen=True, omit_defaults=True):
    """A figure as a number, for scripts; the unit is empty of what is counted."""

    value: float
    unit: str = ""
    low: float | None = None
    high: float | None = None


class Figure(Struct, frozen=True):
    """One figure: `key` is its name in `--explain`, unique within a plan.

    What stands in `values` before a colon or semicolon gives a numeric `text`: its words may be left out, floor, ceil,
    sqrt, min and max are functions, and units are factors.
    """

    key: str
    text: str
    formula: str
    values: str
    source: str
    exact: Amount | None = None
    """Where the text has fewer digits."""

    @property
    def amount(self) -> Amount | None:
        """The figure as a number; None where it is words."""
        match = _WHOLE.fullmatch(self.text)
        return self.exact if match is None else Amount(int(match[1].replace(",", "")), match[2] or "")


def figures(outlook: Outlook) -> Iterator[Figure]:
    """The deployment's, and each role's limits and memory; those of times and rates are `time_figures`."""
    counts = [f"{each.groups} x {each.plan.ranks}" for each in (outlook.prefill, outlook.decode)]
    spec = "spec.prefill and spec.decode"
    yield Figure("gpus", f"{outlook.plan.gpus:,}", "groups x ranks of each role", " + ".join(counts), spec)
    yield Figure("nodes", f"{outlook.nodes:,}", "groups x nodesPerGroup of each role", _nodes(outlook), spec)
    for role in Role:
        each = outlook.role(role)
        yield from _layout(outlook, each)
        yield from _limits(outlook, each)
        yield from (_memory(outlook, each, line) for line in each.plan.lines)
        yield _total(outlook, each)
        yield from _solved(each)


def _nodes(outlook: Outlook) -> str:
    return " + ".join(f"{each.groups} x {each.shape.nodes}" for each in (outlook.prefill, outlook.decode))


def _layout(outlook: Outlook, each: RoleOutlook) -> Iterator[Figure]:
    name, shape, a = each.plan.role, each.shape, outlook.planned.architecture
    spec = f"spec.{name}"
    yield Figure(f"{name}.groups", f"{each.groups}", "stated", f"{each.groups}", f"{spec}.groups")
    values = f"{shape.nodes} x {shape.gpus_per_node}"
    source = f"{spec}.nodesPerGroup, .gpusPerNode"
    yield Figure(f"{name}.ranks", f"{each.plan.ranks}", "nodesPerGroup x gpusPerNode", values, source)
    values = f"{each.plan.ranks} / {shape.tensor_parallel} x {counted(each.groups, 'group')}"
    yield Figure(f"{name}.lanes", f"{each.lanes}", "ranks / tensorParallel x groups", values, f"{spec}.tensorParallel")
    values = f"{a.num_experts} / {each.plan.ranks}"
    yield Figure(
        f"{name}.expertsPerRank", f"{each.plan.experts_per_rank}", "experts / ranks", values, f"config of {a.name}"
    )


def _limits(outlook: Outlook, each: RoleOutlook) -> Iterator[Figure]:
    plan, limits = each.plan, outlook.planned.profile.spec.limits
    name, profile = plan.role, f"profile {outlook.plan.profile}"
    yield _max_num_seqs(outlook, each)
    yield _num_slots(outlook, each)
    memory, slots = outlook.planned.profile.spec.gpu.memory, plan.num_state_slots * plan.slot_bytes
    weights, reserved = (sum(line.bytes for line in lines) for lines in (weights_of(each), reserved_of(each)))
    yield Figure(
        f"{name}.numPages", f"{plan.num_pages:,}",
        "(gpu.memory - weights - reserved - state slots) / bytes of a page, rounded down",
        f"floor(({memory:,} B - {weights:,} B - {reserved:,} B - {slots:,} B) / {plan.page_bytes:,} B)",
        of_plan(name, "total", "weights", "reserved", "state slots", "pageBytes"),
    )  # fmt: skip
    tokens = plan.num_pages * plan.page_size_tokens
    yield Figure(
        f"{name}.KVTokens", f"{tokens:,}", "KV pages x tokens of a page; whole on each rank of a lane",
        f"{plan.num_pages:,} x {plan.page_size_tokens}", f"{profile}: limits.pageSizeTokens",
    )  # fmt: skip
    yield _page_bytes(outlook, each)
    yield _slot_bytes(outlook, each)
    yield _max_model_len(outlook, each)
    field = f"limits.{name}BatchedTokens"
    budget = limits.prefill_batched_tokens if name is Role.PREFILL else limits.decode_batched_tokens
    yield Figure(
        f"{name}.maxNumBatchedTokens", f"{plan.max_num_batched_tokens:,}", "the profile's, at least maxNumSeqs",
        f"max({budget:,}, {plan.max_num_seqs:,})", f"{profile}: {outlook.planned.profile.spec.source(field)}",
    )  # fmt: skip


def _max_num_seqs(outlook: Outlook, each: RoleOutlook) -> Figure:
    limits, plan = outlook.planned.profile.spec.limits, each.plan
    context = context_of_each(limits, outlook.planned.deployment.spec.model.max_model_len)
    if outlook.planned.deployment.spec.role(plan.role).max_num_seqs is not None:
        source = f"spec.{plan.role}.maxNumSeqs"
        return Figure(f"{plan.role}.maxNumSeqs", f"{plan.max_num_seqs:,}", "stated", f"{plan.max_num_seqs}", source)
    if outlook.plan.workload:
        formula = "the least of what lanes, memory, targets and load allow"
        is_best = isinstance(each.best, Solution) and each.best.max_num_seqs == plan.max_num_seqs
        values = f"{_least(each.best)}; {plan.binds}" if is_best and isinstance(each.best, Solution) else plan.binds
        return Figure(f"{plan.role}.maxNumSeqs", f"{plan.max_num_seqs:,}", formula, values, "spec.workload")
    return Figure(
        f"{plan.role}.maxNumSeqs", f"{plan.max_num_seqs:,}",
        "the most, up to limits.maxNumSeqs, whose slots and context each fit what is free; the context is "
        "limits.contextTokensPerSeq, and spec.model.maxModelLen where that is less",
        f"up to {limits.max_num_seqs}, {counted(context, 'token')} each: "
        f"{_pool_of(outlook, each, plan.max_num_seqs)}, {_free(each):,} B are free; "
        f"with one more {_pool_of(outlook, each, plan.max_num_seqs + 1)}",
        f"profile {outlook.plan.profile}: {outlook.planned.profile.spec.source('limits.maxNumSeqs')}",
    )  # fmt: skip


def _pool_of(outlook: Outlook, each: RoleOutlook, seqs: int) -> str:
    """Bytes of so many slots and contexts of the profile; one stated maxModelLen has its pages in any case."""
    limits, plan = outlook.planned.profile.spec.limits, each.plan
    stated = outlook.planned.deployment.spec.model.max_model_len
    lengths = (context_of_each(limits, stated), stated or 1)
    context, needed = (ceil_div(n, limits.page_size_tokens) for n in lengths)
    slots, pages = num_slots(seqs), max(needed, seqs * context)
    total = slots * plan.slot_bytes + pages * plan.page_bytes
    return f"{slots:,} slots x {plan.slot_bytes:,} B + {pages:,} pages x {plan.page_bytes:,} B = {total:,} B"


def _free(each: RoleOutlook) -> int:
    """What weights and reserves leave."""
    return sum(line.bytes for line in each.plan.lines if line.is_pool)


def _max_model_len(outlook: Outlook, each: RoleOutlook) -> Figure:
    key, text = f"{each.plan.role}.maxModelLen", f"{each.plan.max_model_len:,}"
    if stated := outlook.planned.deployment.spec.model.max_model_len:
        return Figure(key, text, "stated", f"{stated:,}", "spec.model.maxModelLen")
    a, plans = outlook.planned.architecture, [outlook.plan.role(role) for role in Role]
    pools = ", ".join(f"{plan.role} {plan.num_pages:,} pages x {plan.page_size_tokens} tokens" for plan in plans)
    formula = "the least of the model's positions and of the tokens of either role's pool"
    source = f"config of {a.name}; {', '.join(f'{role}.numPages' for role in Role)} of this plan"
    return Figure(key, text, formula, f"min(model {a.max_positions:,}, {pools})", source)


def _num_slots(outlook: Outlook, each: RoleOutlook) -> Figure:
    plan, speed = each.plan, outlook.speed
    extra = plan.num_state_slots - plan.max_num_seqs
    values = f"{plan.max_num_seqs} + {extra}"
    if speed is not None and speed.handoff is not None:
        values += f"; {_held_by_handoffs(speed, each, extra)}"
    formula = "maxNumSeqs + a quarter of it, rounded up, for handoffs"
    why = {
        Role.DECODE: "Assumed: the quarter; a slot is reserved before its prompt is computed, so that no prompt is "
        "computed for a lane without room",
        Role.PREFILL: "Assumed: the quarter; a prompt keeps its slot until all of it is written, while others run",
    }[plan.role]
    return Figure(f"{plan.role}.numStateSlots", f"{plan.num_state_slots:,}", formula, values, why)


def _held_by_handoffs(speed: Speed, each: RoleOutlook, extra: int) -> str:
    """Slots of a lane that handoffs hold at once, by Little's law: requests a second x the time that each holds one."""
    assert speed.handoff is not None
    prefill, handoff = (f"{number(p.value)} ms" for p in (speed.prefill_busy, speed.handoff))
    if each.plan.role is Role.PREFILL:
        held = speed.handoff.value / speed.prefill_busy.value
        how = f"one prompt each {prefill} x {handoff} to write it"
    else:
        ended = speed.at.tokens_per_second.value / speed.request.output_tokens / each.lanes
        held = ended * (speed.prefill_busy.value + speed.handoff.value) / 1e3
        how = f"{number(ended)} requests/s a lane x ({prefill} prefill + {handoff} handoff)"
    verdict = f"{extra} suffice" if held <= extra else f"more than {extra}: such lanes do not stay full"
    return f"this workload holds {how} = {number(held)} at once, queues left out: {verdict}"


def _page_bytes(outlook: Outlook, each: RoleOutlook) -> Figure:
    a, plan = outlook.planned.architecture, each.plan
    itemsize = ITEMSIZE[outlook.plan.kv_cache_dtype]
    return Figure(
        f"{plan.role}.pageBytes", f"{plan.page_bytes:,} B",
        "tokens of a page x (kv_lora + rope) x MLA layers x bytes a number",
        f"{plan.page_size_tokens} x ({a.kv_lora} + {a.qk_rope}) x {a.num_mla_layers} x {itemsize}",
        f"config of {a.name}; rows are {outlook.plan.kv_cache_dtype}",
    )  # fmt: skip


def _slot_bytes(outlook: Outlook, each: RoleOutlook) -> Figure:
    a, plan = outlook.planned.architecture, each.plan
    heads, itemsize = a.kda_heads // each.shape.tensor_parallel, ITEMSIZE[outlook.plan.dtype]
    return Figure(
        f"{plan.role}.slotBytes", f"{plan.slot_bytes:,} B",
        "KDA layers x (heads of a rank x K x V x 4 + 3 x (kernel - 1) x heads of a rank x K x bytes a number)",
        f"{a.num_kda_layers} x ({heads} x {a.kda_head} x {a.kda_head} x 4 + "
        f"3 x {a.conv_kernel - 1} x {heads} x {a.kda_head} x {itemsize})",
        f"config of {a.name}; the state is float32, the convolutions' inputs {outlook.plan.dtype}",
    )  # fmt: skip


def _memory(outlook: Outlook, each: RoleOutlook, line: MemoryLine) -> Figure:
    key, text = f"{each.plan.role}.{line.label}", f"{line.bytes:,} B = {bytes_text(line.bytes)}"
    if line.is_weights:
        source = f"tensor table of {outlook.plan.architecture}, held as {outlook.plan.experts} and {outlook.plan.dtype}"
        return Figure(key, text, _WEIGHT_FORMULAS[line.label], line.how, source)
    if line.is_pool:
        formula = {
            "state slots": "slots x bytes of a slot",
            "KV pages": "pages x bytes of a page",
            "free": "what weights and reserves leave - state slots - KV pages",
        }[line.label]
        source = {
            "state slots": of_plan(each.plan.role, "numStateSlots", "slotBytes"),
            "KV pages": of_plan(each.plan.role, "numPages", "pageBytes"),
            "free": of_plan(each.plan.role, "total", "state slots", "KV pages"),
        }[line.label]
        return Figure(key, text, formula, line.how, source)
    source = f"profile {outlook.plan.profile}: {line.how}"
    return Figure(key, text, f"the profile's {line.field}", f"{line.bytes:,} B", source)


def _total(outlook: Outlook, each: RoleOutlook) -> Figure:
    total = sum(line.bytes for line in each.plan.lines)
    profile = outlook.planned.profile.spec
    source = f"profile {outlook.plan.profile}: {profile.source('gpu.memory')}"
    text = f"{total:,} B = {bytes_text(total)}"
    return Figure(
        f"{each.plan.role}.total", text, "the sum of all lines is gpu.memory", sum_of(each.plan.lines), source
    )


def weights_of(each: RoleOutlook) -> list[MemoryLine]:
    """What the bar draws as weights."""
    return [line for line in each.plan.lines if line.is_weights]


def reserved_of(each: RoleOutlook) -> list[MemoryLine]:
    """What neither weights nor pools have."""
    return [line for line in each.plan.lines if line.field]


def sum_of(lines: Iterable[MemoryLine]) -> str:
    """The bytes of each line."""
    return " + ".join(f"{line.label} {line.bytes:,} B" for line in lines) or "0 B"


def of_plan(role: Role, *names: str) -> str:
    """A source: other figures of a role, which `--explain` takes."""
    return f"{', '.join(f'{role}.{name}' for name in names)} of this plan"


def _solved(each: RoleOutlook) -> Iterator[Figure]:
    """What the workload would allow, and what it leaves unused."""
    name = each.plan.role
    if isinstance(each.best, Solution):
        hows = "; ".join(f"{bound.limit}: {bound.how}" for bound in each.best.bounds)
        formula = "the least of what each limit alone would allow"
        yield Figure(f"{name}.bestMaxNumSeqs", f"{each.best.max_num_seqs:,}", formula, _least(each.best), hows)
    elif isinstance(each.best, Problem):
        problem = each.best
        yield Figure(f"{name}.bestMaxNumSeqs", "0", "the longest request must fit", problem.got, problem.expected)
    source = of_plan(name, "maxNumSeqs", "numStateSlots", "numPages")
    yield Figure(f"{name}.binds", each.plan.binds, "which limit is reached first", each.plan.binds, source)
    total, values = sum(line.bytes for line in each.unused), sum_of(each.unused)
    source = "; ".join(f"{line.label}: {line.how}" for line in each.unused) or "this workload uses all"
    yield Figure(f"{name}.unused", f"{total:,} B = {bytes_text(total)}", "paid for, never touched", values, source)


def _least(best: Solution) -> str:
    return f"min({', '.join(f'{bound.limit} {bound.max_num_seqs:,}' for bound in best.bounds)})"


def banded(key: str, prediction: Prediction, formula: str, values: str) -> Figure:
    """A predicted figure."""
    exact = Amount(prediction.value, prediction.unit, prediction.low, prediction.high)
    return Figure(key, with_band(prediction), formula, values, prediction.calibrated_on, exact)


def factor_of(prediction: Prediction) -> float:
    """By how much a time in ms is longer than its terms together."""
    return prediction.value / (1e3 * sum(term.seconds for term in prediction.terms))


def with_band(prediction: Prediction) -> str:
    """A prediction and its band: 72.1 ms (55.3 to 98.0). Times of seconds are shown in seconds."""
    value, unit = prediction, prediction.unit
    if unit == "ms" and prediction.value >= 1000:
        value, unit = prediction.scaled(1e-3, "s"), "s"
    low, middle, high = (number(x) for x in (value.low, value.value, value.high))
    return f"{middle} {unit} ({low} to {high})"


def number(value: float) -> str:
    """Three digits or more."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3g}"
