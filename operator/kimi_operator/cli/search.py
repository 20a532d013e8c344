"""`kimictl plan --search NODES`: layouts that fit, best first; those that do not, with the arithmetic. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_operator.api.base import parse
from kimi_operator.api.deployment import PrecisionSpec, Role
from kimi_operator.api.profile import Device, DType, HardwareProfile
from kimi_operator.cli.asking import chip_of
from kimi_operator.cli.cost import all_in, check_price, money, without_throughput
from kimi_operator.cli.document import dumped
from kimi_operator.cli.figures import number
from kimi_operator.cli.files import profiles_of
from kimi_operator.cli.flag_documents import DEPLOYMENT_FLAGS, read_by_flag, workload_document
from kimi_operator.cli.flags import DeploymentFlags, WorkloadFlags, refuse
from kimi_operator.cli.manifests import deployment_of, read_documents
from kimi_operator.cli.outlook import assumed_lengths
from kimi_operator.cli.text import refusal_text
from kimi_operator.errors import InvalidSpec
from kimi_operator.planner import Architecture
from kimi_operator.planner.memory import ExpertFormat, GroupShape
from kimi_operator.planner.plan import KV_DTYPES
from kimi_operator.planner.search import Candidate, Search, SearchResult, page_pools, search
from kimi_operator.planner.workload import Workload, read_workload
from kimi_operator.profiles import architecture, select_profile
from kimi_operator.profiles.forecast import forecast_of
from kimi_operator.profiles.support import support_problem, support_warning

SHOWN = 10
SEARCHED_FLAGS = ("--chip", "--architecture", "--kv-cache")
COLUMNS = {"": 4, "nodes": 5, "prefill": 32, "decode": 32, "maxNumSeqs": 10, "at once": 8, "longest": 9, "tokens/s": 9}
COST_HEAD = "a million output tokens"


@dataclass(frozen=True, slots=True)
class Found:
    """A search and what it was for."""

    profile: str
    num_nodes: int
    workload: Workload
    result: SearchResult
    no_speed: str
    """Why layouts are not ranked by throughput; empty when they are."""
    calibrated_on: str
    price: float | None
    """Of a GPU-hour; None when nobody asks for costs."""
    warning: str | None = None
    """What to say of the bundled worker on this hardware; None when it is made for it."""

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
    """Search for --chip or for the manifest's hardware, model and precision. Raises InvalidSpec for bad input."""
    if price is not None:
        check_price(price)
    documents = read_documents(files)
    profiles, document = profiles_of(documents), workload_document(work)
    extra = [flag for flag in flags.given if flag not in SEARCHED_FLAGS]
    if extra:
        raise refuse(extra[0], "a flag of one layout", f"{', '.join(SEARCHED_FLAGS)} with --search", "leave it out")
    if any(each.get("kind") == "KimiDeployment" for _, each in documents):
        spec = deployment_of(documents, files).spec
        profile, name, precision = (
            select_profile(spec, profiles, node_labels=()),
            spec.model.architecture,
            spec.precision,
        )
    else:
        profile, name = chip_of(flags, profiles), flags.architecture or "kimi-k3"
        stated = {"kvCache": flags.kv_cache or "Auto"}
        precision = read_by_flag(DEPLOYMENT_FLAGS, lambda: parse(PrecisionSpec, stated, "spec.precision"))
    model = read_by_flag(DEPLOYMENT_FLAGS, lambda: architecture(name))
    kv = KV_DTYPES.get(precision.kv_cache, profile.spec.runtime.kv_cache_dtype)
    found = read_by_flag(
        work.given | {"--search"},
        lambda: find_layouts(model, profile, kv, _workload(document, profile, model), num_nodes),
    )
    if price is not None and found.no_speed:
        raise without_throughput(found.no_speed)
    return dataclasses.replace(found, price=price)


def _workload(document: Mapping[str, Any], profile: HardwareProfile, model: Architecture) -> Workload:
    """The stated workload; without lengths, requests of the context that the profile sets aside."""
    if "prompt" not in document and "output" not in document:
        prompt, output = assumed_lengths(min(profile.spec.limits.context_tokens_per_seq, model.max_positions))
        document = {**document, "prompt": prompt, "output": output}
    return read_workload(document)


def find_layouts(a: Architecture, profile: HardwareProfile, kv: DType, workload: Workload, num_nodes: int) -> Found:
    """Search. Raises InvalidSpec when the number of nodes or the workload's lengths are out of range.

    It raises InvalidSpec too for hardware that the bundled worker cannot run on.
    """
    if unsupported := support_problem(profile):
        raise InvalidSpec((unsupported,))
    spec, workload = profile.spec, workload.within(a.max_positions)
    is_gpu = spec.runtime.device is Device.CUDA
    request = Search(
        architecture=a,
        profile=spec,
        workload=workload,
        num_nodes=num_nodes,
        design=page_pools(a, spec, kv),
        experts=ExpertFormat.MXFP4 if is_gpu else ExpertFormat(spec.runtime.dtype.value),
    )
    no_speed = text = ""
    try:
        forecast = forecast_of(a, profile, kv, workload)
    except InvalidSpec as error:
        no_speed = str(error)
    else:
        request = dataclasses.replace(request, timing=forecast.timing, throughput=forecast.throughput)
        text = f"decode: {forecast.decode.text}; prefill: {forecast.prefill.text}"
    name, warning = profile.metadata.name, support_warning(profile)
    return Found(name, num_nodes, workload, search(request), no_speed, text, price=None, warning=warning)


def search_text(found: Found) -> Iterator[str]:
    """For a terminal."""
    result, work = found.result, found.workload
    yield (
        f"{len(result.ranked)} layouts fit {found.num_nodes} nodes of {found.profile} with prompts of {work.prompt}, "
        f"answers of {work.output}; {len(result.refused)} shapes of a group do not"
    )
    if found.warning:
        yield f"warning: {found.warning}"
    if found.no_speed:
        yield f"not ranked by throughput: {found.no_speed}"
    yield f"ranked by {result.objective}"
    if result.ranked:
        yield _columns(tuple(COLUMNS)) + ("" if found.price is None else f"  {COST_HEAD}")
    for place, candidate in enumerate(result.ranked[:SHOWN], start=1):
        cost = found.cost(candidate)
        yield _columns(_cells(place, candidate)) + ("" if cost is None else f"  {money(cost):>{len(COST_HEAD)}}")
        for problem in candidate.misses:
            yield f"      misses: {problem}"
    if len(result.ranked) > SHOWN:
        yield f"  and {len(result.ranked) - SHOWN} more; -o json lists all"
    if result.shortage is not None:
        yield from refusal_text((result.shortage,), "not enough nodes:")
    for refusal in result.refused:
        yield from refusal_text((refusal.problem,), f"refused for {' and '.join(refusal.roles)}:")
    if found.price is not None:
        yield f"cost at {found.price:g} a GPU-hour, all GPUs over output tokens alone"
    if found.calibrated_on:
        yield f"throughput calibrated on {found.calibrated_on}"


def _cells(place: int, candidate: Candidate) -> tuple[str, ...]:
    layout, rate = candidate.layout, candidate.throughput
    shapes = (f"{layout.groups(role)} x {_shape(layout.shape(role))}" for role in Role)
    return (
        f"{place}.",
        f"{layout.nodes}",
        *shapes,
        f"{candidate.decode.max_num_seqs:,}",
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
        "nodes": found.num_nodes,
        "objective": result.objective,
        "warnings": [found.warning] if found.warning else [],
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
            }
            for candidate in result.ranked
        ],
        "refused": [
            {"roles": list(map(str, refusal.roles)), "shape": str(refusal.shape), **dataclasses.asdict(refusal.problem)}
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
