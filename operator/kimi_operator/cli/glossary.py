"""What the labels of a plan mean, in plain words; and figures that only explain, as of its columns. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kimi_operator.api.deployment import KvPrecision, Role, TransportChoice
from kimi_operator.cli.cost import Cost, all_figures
from kimi_operator.cli.figures import Figure, of_plan, reserved_of, sum_of, weights_of
from kimi_operator.cli.outlook import Outlook, RoleOutlook
from kimi_operator.cli.text import workload_text
from kimi_operator.planner import MemoryLine
from kimi_operator.planner.designs import Designs, compare_designs
from kimi_operator.planner.plan import Plan
from kimi_operator.planner.units import bytes_text


class Words(NamedTuple):
    """`means` is one sentence; `labels` are how the text of a plan shows the figure, beside its name."""

    means: str
    labels: tuple[str, ...] = ()


GROUPS: dict[str, dict[str, Words]] = {
    "the deployment": {
        "gpus": Words("All GPUs that the deployment takes, and that are paid for."),
        "nodes": Words("All nodes that the deployment takes."),
        "groups": Words("A group is the nodes whose GPUs compute together; more groups of a role serve more requests."),
        "ranks": Words("A rank is one GPU of a group; the experts of a layer are spread over all of them.", ("EP",)),
        "tensorParallel": Words(
            "GPUs that hold one model's attention together and so serve the same requests.", ("TP",)
        ),
        "lanes": Words(
            "A lane serves requests of its own, on so many GPUs of a group as tensorParallel says; lanes bind where "
            "each runs as many as it may, so that only more lanes run more.",
            ("DP", "lanes bind"),
        ),
        "expertsPerRank": Words("Routed experts of each layer that one GPU holds.", ("experts a rank",)),
        "kvRows": Words("The number type of what attention keeps of each token; a smaller one holds longer contexts."),
        "experts": Words("The number type of the routed experts, which are most of the weights."),
        "transport": Words("How a prompt's cache gets from prefill's GPUs to those of decode."),
        "workload": Words("The requests that all of this is planned and predicted for."),
    },
    "limits of a role": {
        "maxNumSeqs": Words("Requests that a lane runs at once; more wait in its queue.", ("maxNumSeqs a lane",)),
        "numStateSlots": Words(
            "A slot holds the fixed-size state of one request; handoffs hold some before their requests run.",
            ("state slots a lane",),
        ),
        "numPages": Words(
            "Pages hold what attention keeps of tokens; a request takes as it grows.", ("KV pages a lane",)
        ),
        "KVTokens": Words("Tokens of all requests of a lane together that its pages hold.", ("KV tokens a lane",)),
        "pageBytes": Words("Bytes of one page on each GPU."),
        "slotBytes": Words("Bytes of one request's state on each GPU, whatever its length."),
        "maxModelLen": Words(
            "Prompt and answer of one request together are at most so long.",
            ("longest request", "longest request, tokens"),
        ),
        "maxNumBatchedTokens": Words("Tokens that one step computes at most; longer prompts take several steps."),
        "bestMaxNumSeqs": Words(
            "How many requests a lane would run if its memory were cut anew for this workload.",
            ("if cut for the workload",),
        ),
        "binds": Words("The limit that is met first: raising another one gains nothing.", ("binds in decode",)),
        "unused": Words(
            "Memory that is paid for and that this workload never touches.",
            ("unused by the workload", "unused by the workload, a GPU"),
        ),
    },
    "memory of a GPU": {
        "routed experts": Words("Weights of the experts that this GPU holds."),
        "weights split over a lane": Words("Weights of which each GPU of a lane holds its part."),
        "weights whole on each rank": Words("Weights that every GPU holds in full."),
        "contexts": Words("What the driver and the libraries take on each GPU before any weight is loaded."),
        "symmetric heap": Words("Memory that GPUs of a group would write to each other through."),
        "activations": Words("Scratch of a step: the numbers between layers."),
        "captured graphs": Words("Recorded steps that start faster."),
        "handoff staging": Words(
            "Buffers between cache and network card; none are needed where both share the memory."
        ),
        "reserve": Words("Left free on purpose, for what nobody foresaw."),
        "state slots": Words("Memory of all state slots of the lane, on each of its GPUs."),
        "KV pages": Words("Memory of all pages of the lane, on each of its GPUs."),
        "free": Words("Less than a page: nothing more fits."),
        "total": Words("All lines of a GPU's memory; they add up to what it has, to the byte.", ("memory of a GPU",)),
        "weights": Words("All weights on one GPU: the part of the bar that is drawn as #."),
        "reserved": Words("What is kept beside weights, slots and pages: the part of the bar that is drawn as =."),
        "outside the pool": Words("Memory that a stated size of the pool leaves out."),
        "pool's remainder": Words("Less than one page: too little for another."),
        "idle KV pages": Words("Pages that stay empty, since maxNumSeqs requests of this workload need fewer."),
        "bytes": Words("Whole bytes on one GPU; KiB, MiB and GiB beside them are powers of 1,024."),
    },
    "predictions": {
        "tpot": Words(
            "Time from one token of an answer to its next, for each of the requests that run at once.",
            ("TPOT", "TPOT ms", "decode step", "no predictions", "not in the bands"),
        ),
        "tpotAlone": Words("The same while a single request runs."),
        "prefill": Words(
            "Time to compute one prompt while nothing else runs.",
            ("prefill, output", "no predictions", "not in the bands"),
        ),
        "prefillBusy": Words("Time to compute one prompt beside those that this load computes at the same time."),
        "ttft": Words(
            "Time from asking to the first token, without the handoff; with waits at a rate, and where clients wait "
            "for their answers and prefill binds, or more ask than have memory on decode. A target TTFT is held "
            "against the longest prompt, and where prompts wait against this mean too.",
            ("TTFT", "prefill, output", "no predictions"),
        ),
        "handoff": Words("Time to write a prompt's cache from prefill's GPUs into those of decode."),
        "throughput": Words(
            "Tokens of answers a second, of all requests together.",
            ("output", "output tokens/s", "prefill, output", "no predictions"),
        ),
        "concurrency": Words(
            "Requests that clients keep going: in prefill, in decode, or waiting. Each has its pages and slot on "
            "decode before its prompt is computed, so that these may bind while decode is not full. Where concurrency "
            "binds, more of them would give more output.",
            ("at once", "this load", "fills decode"),
        ),
        "knee": Words(
            "From so many requests at once on, more of them gain little output and cost each its speed. It may lie "
            "above what decode runs, since some are in prefill."
        ),
        "calibration.decode": Words(
            "How much longer measured decode steps took than bytes and launches alone say, and on what that was "
            "measured.",
            ("decode calibrated on", "calibrated on"),
        ),
        "calibration.prefill": Words(
            "How much longer measured prompts took than bytes and FLOPs alone say, and on what that was measured.",
            ("prefill calibrated on", "calibrated on"),
        ),
    },
    "pool designs": {
        "designs.length": Words("Prompt and answer of each request in a row of the table.", ("tokens a request",)),
        "designs.pagesAndSlots": Words(
            "Requests at once as this worker keeps them: small pages for tokens, a slot apart for the state.",
            ("pages and slots", "FP8 pages, slots"),
        ),
        "designs.unifiedBlocks": Words(
            "Requests at once as vLLM keeps them: blocks of one size for tokens and state alike.",
            ("unified blocks", "FP8 blocks"),
        ),
        "designs.longest": Words(
            "The longest request that the pool holds while no other runs.", ("longest alone, tokens",)
        ),
    },
    "cost": {
        "cost.prompt": Words(
            "Prefill's GPUs, paid by the prompt tokens that they take in.", ("a million prompt tokens",)
        ),
        "cost.output": Words("Decode's GPUs, paid by the tokens that they answer.", ("a million output tokens",)),
        "cost.allIn": Words("All GPUs, paid by the tokens of answers.", ("all GPUs, a million output tokens",)),
        "cost.request": Words("All GPUs, paid by whole requests of the workload's mean lengths.", ("a request",)),
        "cost.binds": Words("What keeps this load from more output, and so from a lower price.", ("binds",)),
    },
}
"""Figures of a plan by what they are of."""

WORDS = {name: words for group in GROUPS.values() for name, words in group.items()}
"""By the figure's name, without its role."""


def explained_figures(outlook: Outlook, cost: Cost | None) -> list[Figure]:
    """Every figure of a plan, and those of its columns and names."""
    plan = outlook.plan
    designs = compare_designs(outlook.planned.architecture, plan, plan.decode)
    both = (figure for role in Role for figure in _of_role(outlook.role(role)))
    return [*all_figures(outlook, cost), *_of_plan(outlook), *both, *_of_designs(designs, plan)]


def _of_plan(outlook: Outlook) -> Iterator[Figure]:
    plan, spec, stated = outlook.plan, outlook.planned.profile.spec, outlook.planned.deployment.spec
    profile = f"profile {plan.profile}"
    formula = "spec.precision.kvCache, or the profile's runtime.kvCacheDtype where it is Auto"
    if stated.precision.kv_cache is not KvPrecision.AUTO:
        values, source = f"{stated.precision.kv_cache}", "spec.precision.kvCache"
    else:
        values = f"Auto: {spec.runtime.kv_cache_dtype} of the profile"
        source = f"{profile}: {spec.source('runtime.kvCacheDtype')}"
    yield Figure("kvRows", str(plan.kv_cache_dtype), formula, values, source)
    yield Figure("experts", str(plan.experts), "by the profile's runtime.device", str(spec.runtime.device), profile)
    formula = "spec.handoff.transport, or the profile's fabric.transport where it is Auto"
    if stated.handoff.transport is TransportChoice.AUTO:
        values = f"Auto: {spec.fabric.transport} of the profile"
        source = f"{profile}: {spec.source('fabric.transport')}"
    else:
        values, source = f"{stated.handoff.transport}", "spec.handoff.transport"
    yield Figure("transport", str(plan.transport), formula, values, source)
    source = "assumed: lengths of the context that the profile sets aside a request" if outlook.is_assumed else "stated"
    text = workload_text(outlook)
    yield Figure("workload", text, "spec.workload, --workload or its flags", text, source)
    yield Figure(
        "bytes", "whole bytes", "1 GiB = 1,024 x 1,024 x 1,024 B", "1,073,741,824 B", "binary prefixes of IEC 80000-13"
    )


def _of_role(each: RoleOutlook) -> Iterator[Figure]:
    name, shape = each.plan.role, each.shape
    source, stated = f"spec.{name}.tensorParallel", str(shape.tensor_parallel)
    yield Figure(f"{name}.tensorParallel", stated, "stated", stated, source)
    for part, lines in (("weights", weights_of(each)), ("reserved", reserved_of(each))):
        total = sum(line.bytes for line in lines)
        text = f"{total:,} B = {bytes_text(total)}"
        sources = of_plan(each.plan.role, *(line.label for line in lines))
        yield Figure(f"{name}.{part}", text, "sum of its lines of a GPU's memory", sum_of(lines), sources)
    known = {line.label for line in each.plan.lines}
    yield from (_unused(each, line) for line in each.unused if line.label not in known)


def _unused(each: RoleOutlook, line: MemoryLine) -> Figure:
    """A line of what the workload leaves, that is no line of the plan."""
    plan, values = each.plan, line.how
    source = of_plan(plan.role, "numPages", "pageBytes", "maxNumSeqs")
    if line.label == "pool's remainder":
        source = of_plan(plan.role, "free")
        values = next(each.how for each in plan.lines if each.label == "free")
    elif line.label.startswith("idle"):
        values = f"{line.bytes // plan.page_bytes:,} pages x {plan.page_bytes:,} B; {line.how}"
    text = f"{line.bytes:,} B = {bytes_text(line.bytes)}"
    return Figure(f"{plan.role}.{line.label}", text, "what the pool has - what the workload fills", values, source)


def _of_designs(designs: Designs, plan: Plan) -> Iterator[Figure]:
    pool, layout, last = f"{designs.pool_bytes:,} B", designs.layout, designs.rows[-1]
    blocks, page, slot = f"floor({pool} / {layout.block_bytes:,} B)", plan.decode.page_bytes, plan.decode.slot_bytes
    source = f"the decode pool of the plan; {plan.kv_cache_dtype} rows, in the columns of FP8 one byte a number"
    lengths = " to ".join(f"{row.context_tokens:,}" for row in (designs.rows[0], last))
    yield Figure("designs.length", f"{lengths} tokens", "four times the last, up to maxModelLen", lengths, source)
    yield Figure(
        "designs.pagesAndSlots", f"{last.apart:,} at {last.context_tokens:,} tokens",
        "bytes of the pool / (pages of a request x bytes of a page + bytes of a slot), rounded down",
        f"floor({pool} / ({(last.apart_request_bytes - slot) // page:,} x {page:,} B + {slot:,} B))", source,
    )  # fmt: skip
    yield Figure(
        "designs.unifiedBlocks", f"{last.unified:,} at {last.context_tokens:,} tokens",
        "whole blocks of the pool / (blocks of a request's tokens + those of its state), rounded down",
        f"floor({blocks} / ({last.unified_request_bytes // layout.block_bytes - layout.state_groups:,} + "
        f"{layout.state_groups}))", source,
    )  # fmt: skip
    yield Figure(
        "designs.longest", f"{designs.longest_apart:,} in pages; {designs.longest_unified:,} in blocks",
        "what the pool holds beside one request's state: whole pages or blocks x tokens of each",
        f"floor(({pool} - {slot:,} B) / {page:,} B) x {plan.decode.page_size_tokens} in pages; "
        f"floor(({blocks} - {layout.state_groups}) / {layout.row_groups}) x {layout.block_tokens:,} in blocks", source,
    )  # fmt: skip
