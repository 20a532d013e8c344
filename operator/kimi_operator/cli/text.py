"""A plan for a terminal: twelve lines that answer, then the details."""

from __future__ import annotations

from collections.abc import Iterator

from kimi_operator.api.deployment import Role
from kimi_operator.cli.cost import Cost, cost_text
from kimi_operator.cli.figures import number, with_band
from kimi_operator.cli.outlook import Outlook, RoleOutlook, Speed
from kimi_operator.cli.time_figures import growing
from kimi_operator.errors import Problem
from kimi_operator.planner import MemoryLine, RolePlan
from kimi_operator.planner.case import Solution
from kimi_operator.planner.designs import Designs, compare_designs
from kimi_operator.planner.predict import PAGES, PREFILL, SLOTS, CurvePoint
from kimi_operator.planner.targets import ARRIVING
from kimi_operator.planner.units import binding, bytes_text, counted

LABEL_WIDTH = 28
HEAD_WIDTH = 20
COLUMN_WIDTH = 22
DESIGN_WIDTH = 18
DESIGN_HEADS = (
    "tokens a request", "pages and slots", "bytes", "unified blocks", "bytes", "FP8 pages, slots", "FP8 blocks",
)  # fmt: skip
AT_ONCE = (
    "requests at once count those in prefill too, which have their memory on decode, and TPOT is as if all were in "
    "decode, until prefill binds; until something else binds, output tokens/s = at once / (TPOT + "
    "prefill of a prompt beside the others / tokens of an answer); lanes of prefill are taken to keep step: kimictl "
    "replay counts what they wait for each other"
)
BAR_WIDTH = 60
BAR = {"weights": "#", "reserved": "=", "state slots": "s", "KV pages": "k", "free": "."}


def plan_text(outlook: Outlook, cost: Cost | None) -> Iterator[str]:
    """Everything, most important first."""
    yield from summary(outlook)
    yield ""
    if outlook.better:
        yield f"better layout: {outlook.better}"
        yield ""
    if cost is not None:
        yield from cost_text(cost)
        yield ""
    for role in Role:
        yield from _role_text(outlook.role(role), outlook)
        yield ""
    yield from _speed_text(outlook)
    plan = outlook.plan
    yield from _designs_text(compare_designs(outlook.planned.architecture, plan, plan.decode), plan.kv_cache_dtype)


def refusal_text(problems: tuple[Problem, ...], head: str = "does not fit:") -> Iterator[str]:
    """What is wrong, and what to do."""
    yield head
    for problem in problems:
        yield f"  {problem.field}"
        yield f"    got       {problem.got}"
        yield f"    expected  {problem.expected}"
        yield f"    remedy    {problem.remedy}"


def summary(outlook: Outlook) -> Iterator[str]:
    """The first lines: all that most people ask for."""
    plan = outlook.plan
    yield f"{plan.architecture} on {plan.profile}: {counted(plan.gpus, 'GPU')}, KV rows {plan.kv_cache_dtype}, " + (
        f"experts {plan.experts}, handoff {plan.transport}"
    )
    yield verdict(outlook)
    yield from (f"warning: {warning}" for warning in plan.warnings)
    yield _row("", *(f"{role}: {layout_text(outlook.role(role))}" for role in Role))
    yield _row("maxNumSeqs a lane", *(_seqs(outlook.role(role)) for role in Role))
    yield _row("KV tokens a lane", *(f"{_tokens(plan.role(role)):,}" for role in Role))
    yield _row("longest request", counted(plan.decode.max_model_len, "token"))
    yield _row("binds in decode", plan.decode.binds)
    yield from (_row(label, value) for label, value in headline(outlook).items())


def headline(outlook: Outlook) -> dict[str, str]:
    """Predictions in short, or why there are none, and the workload that they are for."""
    speed, partial = outlook.speed, outlook.decode_speed
    if partial is not None:
        alone, by_bytes = f"{with_band(partial.tpot_alone)} alone", "decode is by bytes, FLOPs taken not to bind"
        found = {
            "TPOT": f"{with_band(partial.tpot)} with {partial.running:,} running, if prefill feeds so many; {alone}",
            "prefill, output": f"not predicted: {outlook.no_speed}; {by_bytes}",
        }
    elif speed is None:
        found = {"no predictions": outlook.no_speed or "the workload does not fit"}
    else:
        alone = f"{with_band(speed.tpot_alone)} alone"
        rate = f"{with_band(speed.at.tokens_per_second)} at {speed.at.concurrency:,} at once"
        found = {
            "TPOT": f"{with_band(speed.tpot)} with {_sustained(speed)}; {alone}",
            "TTFT": ttft_text(speed),
            "output": f"{rate}; {_binding(speed.at)}; knee at {knee_text(speed)}",
        }
    if beyond := beyond_text(outlook):
        found["not in the bands"] = beyond
    return {**found, "workload": workload_text(outlook)}


def beyond_text(outlook: Outlook) -> str:
    """What the predictions count that nobody measured; empty where the engine itself was."""
    speed, either = outlook.speed, outlook.speed or outlook.decode_speed
    found = [f"TPOT: {either.tpot.beyond}"] if either is not None and either.tpot.beyond else []
    if speed is not None and speed.prefill.beyond:
        terms = {term.label: term.seconds for term in speed.prefill.terms}
        share = terms["attention"] / sum(terms.values())
        found.append(f"TTFT: {speed.prefill.beyond}: {share:.0%} of a prompt's time here")
    if speed is not None and len(outlook.workload.prompt.points) > 1:
        found.append("output, TTFT: lanes of prefill wait for longer prompts beside theirs; see kimictl replay")
    return "; ".join(found)


def knee_text(speed: Speed) -> str:
    """Where the curve bends, and how many of these requests are in decode where it cannot be all."""
    beyond = speed.knee.concurrency > speed.capacity
    return f"{speed.knee.concurrency:,}" + (f", of which decode runs {speed.capacity:,}" if beyond else "")


def _binding(point: CurvePoint) -> str:
    """What binds, and how many hold it where that is memory."""
    text = binding(point.binds)
    return f"{text}, held by {point.held:,} in prefill and decode" if point.binds in (PAGES, SLOTS) else text


def _sustained(speed: Speed) -> str:
    """The load that a TPOT is for."""
    if speed.at.binds != PREFILL or speed.running >= speed.at.concurrency:
        return f"{speed.running:,} running"
    return f"{number(speed.mean_running)} of {speed.at.concurrency:,} running on average: prefill feeds no more"


def prefill_text(speed: Speed) -> str:
    """The time of a prompt alone, and beside those that this load computes at once."""
    tokens = counted(speed.request.prompt_tokens, "token")
    prompt = tokens if speed.request.pairs_factor == 1 else f"prompts of {tokens} on average, the longer ones included,"
    text = f"{with_band(speed.prefill)} for {prompt} alone in a group"
    if speed.busy_lanes > 1:
        text += f"; {with_band(speed.prefill_busy)} while {speed.busy_lanes} lanes compute"
    return text


def ttft_text(speed: Speed) -> str:
    """Time to the first token, and whether a wait is in it."""
    alone = f"{with_band(speed.prefill)} alone"
    if speed.grows:
        return f"{growing(speed)}; {with_band(speed.prefill_busy)} without a wait; {alone}"
    if speed.waiting_ttft is not None:
        without = f"{with_band(speed.prefill_busy)} without a wait"
        return f"{with_band(speed.ttft)} on average, as {speed.at.waits}; {without}; {alone}"
    if speed.arriving_ttft is not None:
        return f"{with_band(speed.ttft)} on average, {ARRIVING}; {alone}"
    if speed.busy_lanes == 1:
        return f"{alone}, no wait counted"
    return f"{with_band(speed.ttft)} while {speed.busy_lanes} lanes of a group compute, no wait counted; {alone}"


def verdict(outlook: Outlook) -> str:
    """Whether it fits, and what of the workload it misses."""
    if not outlook.misses:
        unsure = ", ".join(doubt.field for doubt in outlook.doubts)
        return "fits" + _what_was_checked(outlook) + (f"; {unsure} met by less than the band" if unsure else "")
    fields = ", ".join(dict.fromkeys(problem.field for problem in outlook.misses))
    return f"fits, but misses the workload: {fields} (see below)"


def meets_workload(outlook: Outlook) -> bool | None:
    """Whether the load and the targets that were stated are met; None where none could be checked."""
    work = outlook.workload
    if outlook.misses:
        return False
    if _has_targets(outlook):
        return None if _unchecked(outlook) else True
    return None if work.running is None else True


def _unchecked(outlook: Outlook) -> list[str]:
    """What is stated that nothing predicts a time for."""
    work, prefill, decode = outlook.workload, outlook.prefill, outlook.decode
    stated = {
        "target TPOT": (work.tpot_s, decode),
        "target TTFT": (work.ttft_s, prefill),
        "whether prefill feeds the rate": (work.requests_per_second, prefill),
    }
    return [name for name, (value, role) in stated.items() if value is not None and role.case.timing is None]


def _has_targets(outlook: Outlook) -> bool:
    return outlook.workload.ttft_s is not None or outlook.workload.tpot_s is not None


def _what_was_checked(outlook: Outlook) -> str:
    if meets_workload(outlook):
        return ", and meets what is stated, at assumed lengths" if outlook.is_assumed else ", and meets the workload"
    if _has_targets(outlook):
        return f"; {' and '.join(_unchecked(outlook))} not checked: nothing predicts it"
    return "" if outlook.is_assumed else "; no target stated"


def layout_text(each: RoleOutlook) -> str:
    """Groups and how their ranks share the work."""
    return f"{each.groups} x {each.shape.in_nodes}"


def _seqs(each: RoleOutlook) -> str:
    best = each.best
    text = f"{each.plan.max_num_seqs:,} ({each.plan.max_num_seqs * each.lanes:,} in all)"
    if isinstance(best, Solution) and best.max_num_seqs > each.plan.max_num_seqs:
        text += f", {best.max_num_seqs:,} could"
    return text


def _tokens(role: RolePlan) -> int:
    return role.num_pages * role.page_size_tokens


def workload_text(outlook: Outlook) -> str:
    """Lengths and reuse, and whether anybody stated them."""
    work = outlook.workload
    text = f"prompts of {work.prompt}, answers of {work.output}"
    if work.reuse:
        text += f", {float(work.reuse):.0%} of the prompt reused"
    return text + (" (assumed: none was given)" if outlook.is_assumed else "")


def _row(label: str, *cells: str) -> str:
    first, *rest = cells
    width = COLUMN_WIDTH + 12
    return f"  {label:<{HEAD_WIDTH}} " + (f"{first:<{width}} " + " ".join(rest) if rest else first).rstrip()


def _role_text(each: RoleOutlook, outlook: Outlook) -> Iterator[str]:
    role = each.plan
    yield (
        f"{role.role}: a group is {counted(role.ranks, 'rank')} (EP{role.ranks}), {counted(role.lanes, 'lane')}, "
        f"{role.experts_per_rank} experts a rank"
    )
    limits = {
        "maxNumSeqs a lane": f"{role.max_num_seqs:,}",
        "maxNumBatchedTokens": f"{role.max_num_batched_tokens:,}",
        "maxModelLen": counted(role.max_model_len, "token"),
        "KV pages a lane": f"{role.num_pages:,} x {counted(role.page_size_tokens, 'token')} = {_tokens(role):,}",
        "state slots a lane": f"{role.num_state_slots:,}",
        "binds": role.binds,
    }
    yield from (_labelled(label, value) for label, value in limits.items())
    yield _labelled("if cut for the workload", _best(each))
    for stretch in each.stretches:
        yield _labelled("", str(stretch))
    if role.role is Role.DECODE and role.lines == outlook.prefill.plan.lines:
        yield _labelled("memory of a GPU", "as in prefill, line by line")
    else:
        yield from _memory_text(role)
    total = sum(line.bytes for line in each.unused)
    if isinstance(each.at_plan, Solution):
        yield _labelled("unused by the workload", bytes_text(total) if total else "nothing")
        yield from (_line_text(line) for line in each.unused)


def _best(each: RoleOutlook) -> str:
    if isinstance(each.best, Problem):
        return str(each.best)
    best = each.best
    bounds = ", ".join(f"{bound.limit} {bound.max_num_seqs:,}" for bound in best.bounds)
    seqs = f"maxNumSeqs {best.max_num_seqs:,}: {binding(best.binds)} ({bounds})"
    return f"{seqs}; the longest request {best.max_model_len:,}"


def _memory_text(role: RolePlan) -> Iterator[str]:
    yield f"  {'memory of a GPU':<{LABEL_WIDTH}} {'bytes':>18}"
    yield f"    {bar(role.lines)}"
    yield "    " + ", ".join(f"{BAR[name]} {name} {bytes_text(size)}" for name, size in segments(role.lines).items())
    yield from (_line_text(line) for line in role.lines)
    yield _line_text(total_of(role))


def total_of(role: RolePlan) -> MemoryLine:
    """All memory of a GPU, as the line below its lines."""
    return MemoryLine("total", sum(line.bytes for line in role.lines), "")


def segments(lines: tuple[MemoryLine, ...]) -> dict[str, int]:
    """Bytes of what a picture tells apart."""
    sizes = dict.fromkeys(BAR, 0)
    for line in lines:
        sizes["weights" if line.is_weights else line.label if line.is_pool else "reserved"] += line.bytes
    return sizes


def bar(lines: tuple[MemoryLine, ...], width: int = BAR_WIDTH) -> str:
    """Memory of a GPU in characters; each end is rounded, so that the whole is `width` wide."""
    sizes, text, seen = segments(lines), "", 0
    total = sum(sizes.values()) or 1
    for name, size in sizes.items():
        seen += size
        text += BAR[name] * (round(width * seen / total) - len(text))
    return f"[{text}]"


def _line_text(line: MemoryLine) -> str:
    width = LABEL_WIDTH - 2
    return f"    {line.label:<{width}} {line.bytes:>18,} {bytes_text(line.bytes):>11}  {line.how}".rstrip()


def _labelled(label: str, value: str) -> str:
    return f"  {label:<{LABEL_WIDTH}} {value}"


def _speed_text(outlook: Outlook) -> Iterator[str]:
    for problem in outlook.misses:
        yield f"misses: {problem}"
    speed, either = outlook.speed, outlook.speed or outlook.decode_speed
    if either is None:
        return
    yield "predictions"
    request = either.request
    load = f"with {either.running:,} running at {counted(request.mean_context, 'token')}"
    yield _labelled("decode step", f"{with_band(either.tpot)} {load}")
    if speed is None:
        yield _labelled("prefill", "not predicted, see above")
    else:
        yield _labelled("prefill", prefill_text(speed))
    if either.handoff is not None:
        yield _labelled("handoff", with_band(either.handoff))
    yield _labelled("decode calibrated on", either.tpot.calibrated_on)
    if speed is None:
        yield ""
        return
    yield _labelled("prefill calibrated on", speed.prefill.calibrated_on)
    yield AT_ONCE
    yield f"    {'at once':>12}{'TPOT ms':>26}{'output tokens/s':>30}  binds"
    for point in speed.rows:
        tpot, rate = (_spread(p.low, p.value, p.high) for p in (point.tpot, point.tokens_per_second))
        yield f"    {point.concurrency:>12,}{tpot:>26}{rate:>30}  {point.binds}{_marks(speed, point)}"
    yield ""


def _marks(speed: Speed, point: CurvePoint) -> str:
    marks = {"fills decode": speed.capacity, "knee": speed.knee.concurrency, "this load": speed.at.concurrency}
    found = " and ".join(name for name, at in marks.items() if at == point.concurrency)
    return f" <- {found}" if found else ""


def _spread(low: float, value: float, high: float) -> str:
    return f"{number(value)} ({number(low)} to {number(high)})"


def _designs_text(designs: Designs, dtype: str) -> Iterator[str]:
    layout = designs.layout
    yield (
        f"{bytes_text(designs.pool_bytes)} of a decode GPU in two designs, like for like: requests a lane at once, all "
        f"of one length, and bytes of each; {dtype} rows in both, FP8 rows in both on the right; none kept for handoffs"
    )
    yield (
        f"unified blocks are vLLM's: {designs.num_blocks:,} of {layout.block_tokens:,} tokens = "
        f"{layout.block_bytes:,} B; a request takes {layout.state_groups} for its state"
    )
    yield _design_columns(DESIGN_HEADS)
    for row in designs.rows:
        apart, unified = bytes_text(row.apart_request_bytes), bytes_text(row.unified_request_bytes)
        counts = (row.context_tokens, row.apart, apart, row.unified, unified, row.apart_fp8, row.unified_fp8)
        yield _design_columns(tuple(cell if isinstance(cell, str) else f"{cell:,}" for cell in counts))
    longest = (designs.longest_apart, designs.longest_unified, designs.longest_apart_fp8, designs.longest_unified_fp8)
    apart, unified, *fp8 = (f"{tokens:,}" for tokens in longest)
    yield _design_columns(("longest alone, tokens", apart, "", unified, "", *fp8))


def _design_columns(cells: tuple[str, ...]) -> str:
    first, *others = cells
    return f"  {first:<{LABEL_WIDTH}}" + "".join(f"{cell:>{DESIGN_WIDTH}}" for cell in others).rstrip()
