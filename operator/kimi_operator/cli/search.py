"""`kimictl plan --search NODES`: layouts that fit, best first; those that do not, with the arithmetic."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from kimi_operator.api.base import dump
from kimi_operator.api.deployment import KimiDeploymentSpec, Role
from kimi_operator.api.profile import DType, HardwareProfile
from kimi_operator.cli import program_name
from kimi_operator.cli.asking import Asked, asked_for, has_lengths, make_plan
from kimi_operator.cli.beside import with_forecast
from kimi_operator.cli.cost import all_in, check_price, without_throughput
from kimi_operator.cli.first_row import FirstRow, Typed
from kimi_operator.cli.flag_documents import read_by_flag
from kimi_operator.cli.flags import SEARCHED, DeploymentFlags, WorkloadFlags, flag_name, refuse
from kimi_operator.cli.outlook import assumed_lengths
from kimi_operator.errors import InvalidSpec, KimiError
from kimi_operator.planner import Architecture
from kimi_operator.planner.plan import kv_dtype_of
from kimi_operator.planner.search import Candidate, SearchResult, search
from kimi_operator.planner.space import longest_request, worker_search
from kimi_operator.planner.workload import Workload, read_workload
from kimi_operator.profiles import architecture, select_profile
from kimi_operator.profiles.forecast import forecast_of
from kimi_operator.profiles.support import rates_warning, support_problem, support_warning

SEARCHED_FLAGS = tuple(map(flag_name, SEARCHED))
CHOSEN = ("groups", "nodesPerGroup", "gpusPerNode", "tensorParallel", "maxNumSeqs")
"""Fields of a role that a search chooses, whatever a manifest states."""


class Wanted(Struct, frozen=True):
    """What the layouts are searched for."""

    workload: Workload
    num_nodes: int
    max_model_len: int | None = None
    is_assumed: bool = False
    """Nobody stated the lengths."""


class Found(Struct, frozen=True):
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
    first: FirstRow | None = None
    """What to type for the best layout; None where none fits."""

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
    if not files and not flags.given:
        raise refuse("--search", f"{num_nodes} alone", "a chip or a manifest too", "add --chip mi300x, or -f FILE")
    asked = asked_for(files, flags, work)
    if not asked.is_from_flags:
        make_plan(asked)
    named = replace(asked, flags=asked.flags | {"--search"})
    found = read_by_flag(named.flags, lambda: _found(asked, num_nodes), asked.written)
    if price is not None and found.no_speed:
        raise without_throughput(found.no_speed)
    manifest = None if asked.is_from_flags else asked.deployment.spec
    not_kept = () if manifest is None else tuple(_not_kept(manifest))
    typed = Typed(program_name(sys.argv[0]), tuple(files), flags, work)
    first = (
        typed.row(found.result.ranked[0], manifest, is_assumed=found.wanted.is_assumed) if found.result.ranked else None
    )
    return replace(found, price=price, not_kept=not_kept, first=first, result=_named(found.result, named))


def _found(asked: Asked, num_nodes: int) -> Found:
    spec = asked.deployment.spec
    profile = select_profile(spec, asked.profiles, node_labels=())
    model = architecture(spec.model.architecture)
    document = asked.workload or ({} if spec.workload is None else dump(spec.workload))
    longest = longest_request(model, spec.model.max_model_len)
    workload = _workload(document, assumed_lengths(profile.spec.limits, longest))
    wanted = Wanted(workload, num_nodes, spec.model.max_model_len, not has_lengths(document))
    return find_layouts(model, profile, kv_dtype_of(spec, profile.spec), wanted)


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

    ranked = tuple(
        replace(each, misses=asked.problems(each.misses), doubts=asked.problems(each.doubts)) for each in result.ranked
    )
    shortage = None if result.shortage is None else asked.problems((result.shortage,))[0]
    return replace(result, ranked=ranked, shortage=shortage)


def _workload(document: Mapping[str, Any], assumed: tuple[int, int]) -> Workload:
    """The stated workload; without lengths, requests of the assumed ones."""
    if not has_lengths(document):
        prompt, output = assumed
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
        request = with_forecast(request, forecast)
        text = f"decode: {forecast.decode.text}; prefill: {forecast.prefill.text}"
    said = (support_warning(profile), None if no_speed else rates_warning(profile))
    warnings = tuple(each for each in said if each is not None)
    return Found(profile.metadata.name, wanted, search(request), no_speed, text, price=None, warnings=warnings)
