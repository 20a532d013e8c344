"""`kimictl plan --search NODES`: layouts that fit, best first; those that do not, with the arithmetic. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kimi_operator.api.base import dump
from kimi_operator.api.deployment import KimiDeploymentSpec, Role
from kimi_operator.api.profile import DType, HardwareProfile
from kimi_operator.cli.asking import Asked, asked_for, has_lengths, make_plan
from kimi_operator.cli.cost import all_in, check_price, money, without_throughput
from kimi_operator.cli.document import dumped
from kimi_operator.cli.figures import number
from kimi_operator.cli.flag_documents import read_by_flag
from kimi_operator.cli.flags import DeploymentFlags, WorkloadFlags, refuse
from kimi_operator.cli.outlook import assumed_lengths
from kimi_operator.cli.text import refusal_text
from kimi_operator.errors import InvalidSpec, KimiError
from kimi_operator.planner import Architecture
from kimi_operator.planner.case import Solution
from kimi_operator.planner.memory import GroupShape
from kimi_operator.planner.plan import KV_DTYPES
from kimi_operator.planner.search import Candidate, Reason, Refusal, SearchResult, search
from kimi_operator.planner.space import longest_request, worker_search
from kimi_operator.planner.workload import Workload, read_workload
from kimi_operator.profiles import architecture, select_profile
from kimi_operator.profiles.forecast import forecast_of
from kimi_operator.profiles.support import rates_warning, support_problem, support_warning

SHOWN = 10
SHAPES_SHOWN = 6
SEARCHED_FLAGS = ("--chip", "--architecture", "--kv-cache", "--max-model-len")
CHOSEN = ("groups", "nodesPerGroup", "gpusPerNode", "tensorParallel", "maxNumSeqs")
"""Fields of a role that a search chooses, whatever a manifest states."""
COLUMNS = {"": 4, "nodes": 5, "prefill": 32, "decode": 32, "maxNumSeqs": 10, "at once": 8, "longest": 9, "tokens/s": 9}
COST_HEAD = "a million output tokens"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the layouts are searched for."""

    workload: Workload
    num_nodes: int
    max_model_len: int | None = None
    is_assumed: bool = False
    """Nobody stated the lengths."""


@dataclass(frozen=True, slots=True)
class Found:
    """A search and what it was for."""

    profile: str
    wanted: Wanted
    result: SearchResult
    no_speed: str
    """Why layouts are not ranked by throughput; empty when they are."""
    calibrated_on: str
    price: float | None
    """Of a GPU-hour; None when nobody asks for costs."""
    warnings: tuple[str, ...] = ()
    """What to say of the bundled worker on this hardware, and of rates that nobody measured."""
    not_kept: tuple[str, ...] = ()
    """What the manifest states and the search chooses."""

    def shown(self, output: str) -> str:
        """The search as text, json or yaml."""
        if output == "text":
            return "".join(f"{line}\n" for line in search_text(self))
        return dumped(search_document(self), output)

    def cost(self, candidate: Candidate) -> float | None:
        """Money for a million output tokens of a layout; None where it has no throughput or nobody asks."""
        if self.price is None or not candidate.throughput:
            return None
        gpus = sum(candidate.layout.groups(role) * candidate.layout.shape(role).ranks for role in Role)
        return all_in(gpus, self.price, candidate.throughput)

    @property
    def fits(self) -> bool:
        """Whether the best layout exists and meets the workload."""
        return bool(self.result.ranked) and not self.result.ranked[0].misses


def answer_search(
    files: list[Path], flags: DeploymentFlags, work: WorkloadFlags, num_nodes: int, price: float | None
) -> Found:
    """Search for --chip or for the manifest's hardware, model, precision and workload. Raises InvalidSpec.

    What a plan calls bad input in a manifest is bad input here too, though the search would choose it.
    """
    if price is not None:
        check_price(price)
    extra = [flag for flag in flags.given if flag not in SEARCHED_FLAGS]
    if extra:
        raise refuse(extra[0], "a flag of one layout", f"{', '.join(SEARCHED_FLAGS)} with --search", "leave it out")
    asked = asked_for(files, flags, work)
    if not asked.is_from_flags:
        make_plan(asked)
    named = replace(asked, flags=asked.flags | {"--search"})
    found = read_by_flag(named.flags, lambda: _found(asked, num_nodes), asked.written)
    if price is not None and found.no_speed:
        raise without_throughput(found.no_speed)
    not_kept = () if asked.is_from_flags else tuple(_not_kept(asked.deployment.spec))
    return replace(found, price=price, not_kept=not_kept, result=_named(found.result, named))


def _found(asked: Asked, num_nodes: int) -> Found:
    spec = asked.deployment.spec
    profile = select_profile(spec, asked.profiles, node_labels=())
    model = architecture(spec.model.architecture)
    kv = KV_DTYPES.get(spec.precision.kv_cache, profile.spec.runtime.kv_cache_dtype)
    document = asked.workload or ({} if spec.workload is None else dump(spec.workload))
    longest = longest_request(model, spec.model.max_model_len)
    workload = _workload(document, min(profile.spec.limits.context_tokens_per_seq, longest))
    wanted = Wanted(workload, num_nodes, spec.model.max_model_len, not has_lengths(document))
    return find_layouts(model, profile, kv, wanted)


def _not_kept(spec: KimiDeploymentSpec) -> Iterator[str]:
    """Fields of the roles that the manifest states, and what it states of maxNumSeqs."""
    for name in CHOSEN:
        stated = {role: dump(spec.role(role)).get(name) for role in Role}
        if name != "maxNumSeqs":
            yield name
        elif any(stated.values()):
            yield f"{name} ({', '.join(f'{value} in {role}' for role, value in stated.items() if value)})"


def _named(result: SearchResult, asked: Asked) -> SearchResult:
    """The same; what is missed or in the way is named as the user wrote it."""

    def named(solution: Solution) -> Solution:
        return replace(solution, misses=asked.problems(solution.misses), doubts=asked.problems(solution.doubts))

    ranked = tuple(replace(each, prefill=named(each.prefill), decode=named(each.decode)) for each in result.ranked)
    shortage = None if result.shortage is None else asked.problems((result.shortage,))[0]
    return replace(result, ranked=ranked, shortage=shortage)


def _workload(document: Mapping[str, Any], context: int) -> Workload:
    """The stated workload; without lengths, requests of so many tokens."""
    if not has_lengths(document):
        prompt, output = assumed_lengths(context)
        document = {**document, "prompt": prompt, "output": output}
    return read_workload(document)


def find_layouts(a: Architecture, profile: HardwareProfile, kv: DType, wanted: Wanted) -> Found:
    """Search. Raises InvalidSpec when nodes, maxModelLen or the workload's lengths are out of range.

    It raises KimiError when the bundled worker cannot run on the hardware.
    """
    if unsupported := support_problem(profile):
        raise KimiError(str(unsupported))
    wanted = replace(wanted, workload=wanted.workload.within(longest_request(a, wanted.max_model_len)))
    request = worker_search(a, profile.spec, kv, wanted.workload, wanted.num_nodes)
    request = replace(request, max_model_len=wanted.max_model_len, is_assumed=wanted.is_assumed)
    no_speed = text = ""
    try:
        forecast = forecast_of(a, profile, kv, wanted.workload)
    except InvalidSpec as error:
        no_speed = str(error)
    else:
        request = replace(request, timing=forecast.timing, throughput=forecast.throughput)
        text = f"decode: {forecast.decode.text}; prefill: {forecast.prefill.text}"
    said = (support_warning(profile), None if no_speed else rates_warning(profile))
    warnings = tuple(each for each in said if each is not None)
    return Found(profile.metadata.name, wanted, search(request), no_speed, text, price=None, warnings=warnings)


def search_text(found: Found) -> Iterator[str]:
    """For a terminal."""
    result, wanted, work = found.result, found.wanted, found.wanted.workload
    longest = "" if wanted.max_model_len is None else f", requests of up to {wanted.max_model_len:,} (maxModelLen)"
    assumed = " (assumed: none was given)" if wanted.is_assumed else ""
    shapes = len({each.shape for each in result.refused})
    yield (
        f"{len(result.ranked)} layouts fit {wanted.num_nodes} nodes of {found.profile} with prompts of {work.prompt}, "
        f"answers of {work.output}{assumed}{longest}; {shapes} shapes of a group do not"
    )
    if found.not_kept:
        yield f"chosen here, not kept from the manifest: {', '.join(found.not_kept)}"
    yield from (f"warning: {warning}" for warning in found.warnings)
    if found.no_speed:
        yield f"not ranked by throughput: {found.no_speed}"
    yield f"ranked by {result.objective}"
    if result.ranked:
        yield "maxNumSeqs is of a lane, in prefill / in decode; the longest request is what both hold beside them"
        yield _columns(tuple(COLUMNS)) + ("" if found.price is None else f"  {COST_HEAD}")
    for place, candidate in enumerate(result.ranked[:SHOWN], start=1):
        cost = found.cost(candidate)
        yield _columns(_cells(place, candidate)) + ("" if cost is None else f"  {money(cost):>{len(COST_HEAD)}}")
        for problem in candidate.misses:
            yield f"      misses: {problem}"
        for problem in candidate.doubts:
            yield f"      not sure: {problem}"
    if len(result.ranked) > SHOWN:
        yield f"  and {len(result.ranked) - SHOWN} more; -o json lists all"
    if result.shortage is not None:
        yield from refusal_text((result.shortage,))
    yield from map(_refused, _by_reason(result.refused))
    if result.refused:
        yield "-o json gives the arithmetic of each shape"
    if found.price is not None:
        yield f"cost at {found.price:g} a GPU-hour, all GPUs over output tokens alone"
    if found.calibrated_on:
        yield f"throughput calibrated on {found.calibrated_on}"


def _by_reason(refused: Iterable[Refusal]) -> Iterator[list[Refusal]]:
    """Refusals of equal reasons together, each shape once; what is nearest to fitting comes first."""
    groups: dict[Reason, dict[GroupShape, Refusal]] = {}
    for refusal in refused:
        groups.setdefault(refusal.reason, {}).setdefault(refusal.shape, refusal)
    for group in groups.values():
        yield sorted(group.values(), key=lambda refusal: refusal.missing_bytes)


def _refused(group: list[Refusal]) -> str:
    """One line for all refusals of one reason, with what the nearest to fitting asks for."""
    first, num = group[0], len(group)
    names = ", ".join(map(_named_shape, group[:SHAPES_SHOWN]))
    more = f" and {num - SHAPES_SHOWN} more" if num > SHAPES_SHOWN else ""
    shapes, whose = ("shape", "") if num == 1 else ("shapes", "of the first ")
    told = f"{first.reason}: {whose}expected {first.problem.expected}; {first.problem.remedy}"
    return f"refused {num} {shapes} of a group ({names}{more}): {told}"


def _named_shape(refusal: Refusal) -> str:
    shape = refusal.shape
    size = f"{shape.nodes} x {shape.gpus_per_node} GPUs"
    return size if refusal.reason is Reason.UNEVEN else f"{size} TP{shape.tensor_parallel}"


def _cells(place: int, candidate: Candidate) -> tuple[str, ...]:
    layout, rate = candidate.layout, candidate.throughput
    shapes = (f"{layout.groups(role)} x {_shape(layout.shape(role))}" for role in Role)
    return (
        f"{place}.",
        f"{layout.nodes}",
        *shapes,
        " / ".join(f"{each.max_num_seqs:,}" for each in (candidate.prefill, candidate.decode)),
        f"{candidate.capacity:,}",
        f"{candidate.longest:,}",
        "-" if rate is None else number(rate),
    )


def _shape(shape: GroupShape) -> str:
    nodes = f"{shape.nodes} node" + ("s" if shape.nodes > 1 else "")
    return f"{nodes} TP{shape.tensor_parallel} DP{shape.lanes} EP{shape.ranks}"


def _columns(cells: tuple[str, ...]) -> str:
    padded = []
    for cell, (head, width) in zip(cells, COLUMNS.items(), strict=True):
        padded.append(cell.ljust(width) if head in ("prefill", "decode") else cell.rjust(width))
    return "  ".join(padded).rstrip()


def search_document(found: Found) -> dict[str, Any]:
    """For scripts."""
    result = found.result
    return {
        "feasible": bool(result.ranked),
        "meets_workload": found.fits,
        "profile": found.profile,
        "nodes": found.wanted.num_nodes,
        "max_model_len": found.wanted.max_model_len,
        "not_kept": list(found.not_kept),
        "objective": result.objective,
        "warnings": list(found.warnings),
        "calibrated_on": found.calibrated_on or found.no_speed,
        "ranked": [
            {
                "layout": str(candidate.layout),
                "nodes": candidate.layout.nodes,
                "capacity": candidate.capacity,
                "tokens_per_second": candidate.throughput,
                "cost_per_million_output_tokens": found.cost(candidate),
                "prefill": _role_document(candidate, Role.PREFILL),
                "decode": _role_document(candidate, Role.DECODE),
                "misses": [dataclasses.asdict(problem) for problem in candidate.misses],
                "not_sure": [dataclasses.asdict(problem) for problem in candidate.doubts],
            }
            for candidate in result.ranked
        ],
        "refused": [
            {
                "roles": list(map(str, refusal.roles)),
                "shape": str(refusal.shape),
                "reason": str(refusal.reason),
                **dataclasses.asdict(refusal.problem),
            }
            for refusal in result.refused
        ],
        "shortage": None if result.shortage is None else dataclasses.asdict(result.shortage),
    }


def _role_document(candidate: Candidate, role: Role) -> dict[str, Any]:
    layout, shape = candidate.layout, candidate.layout.shape(role)
    solution = candidate.prefill if role is Role.PREFILL else candidate.decode
    return {
        "groups": layout.groups(role),
        "nodes_per_group": shape.nodes,
        "gpus_per_node": shape.gpus_per_node,
        "tensor_parallel": shape.tensor_parallel,
        "max_num_seqs": solution.max_num_seqs,
        "max_model_len": candidate.longest,
        "binds": solution.binds.value,
    }
