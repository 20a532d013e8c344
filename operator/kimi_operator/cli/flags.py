"""Flags of `kimictl plan` that stand for a manifest and for a workload, as documents that are then read like files."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cyclopts import Group, Parameter

from kimi_operator.api.base import API_VERSION
from kimi_operator.cli.manifests import read_documents
from kimi_operator.errors import InvalidSpec, Problem

MANIFEST = Group("A deployment from flags, instead of --file", sort_key=1)
WORKLOAD = Group("The workload", sort_key=2)
VIEWS = Group("What to show", sort_key=3)
CHECKPOINT_PATH = "/models/checkpoint"
"""Where a deployment that was made of flags has its checkpoint; a plan does not look at it."""


@dataclass(frozen=True)
class DeploymentFlags:
    """A KimiDeployment in flags; both roles have the same shape."""

    chip: Annotated[str | None, Parameter(group=MANIFEST, help="HardwareProfile of the nodes, such as mi300x.")] = None
    architecture: Annotated[str | None, Parameter(group=MANIFEST, help="kimi-k3 (the default) or kimi-k3-tiny.")] = None
    nodes: Annotated[
        int | None, Parameter(group=MANIFEST, help="Nodes of all groups together; groups are equally large.")
    ] = None
    nodes_per_group: Annotated[
        int | None, Parameter(group=MANIFEST, help="Nodes of a group; follows from --nodes and the groups.")
    ] = None
    gpus_per_node: Annotated[int | None, Parameter(group=MANIFEST, help="GPUs of a node; all by default.")] = None
    tensor_parallel: Annotated[int | None, Parameter(group=MANIFEST, help="GPUs of a lane; 2 by default.")] = None
    prefill_groups: Annotated[int | None, Parameter(group=MANIFEST, help="1 by default.")] = None
    decode_groups: Annotated[int | None, Parameter(group=MANIFEST, help="1 by default.")] = None
    max_num_seqs: Annotated[
        int | None,
        Parameter(group=MANIFEST, help="Running requests a lane; as the workload needs and memory allows by default."),
    ] = None
    max_model_len: Annotated[int | None, Parameter(group=MANIFEST, help="Longest prompt plus answer, in tokens.")] = (
        None
    )
    kv_cache: Annotated[str | None, Parameter(group=MANIFEST, help="Auto (the profile's), BF16 or FP32.")] = None

    @property
    def given(self) -> tuple[str, ...]:
        """Flags that were stated, as the user writes them."""
        return tuple(flag_name(field.name) for field in fields(self) if getattr(self, field.name) is not None)


@dataclass(frozen=True)
class View:
    """What to show of a plan."""

    what_if: Annotated[
        list[str] | None,
        Parameter(
            group=VIEWS,
            negative=(),
            help="KEY=VALUE, such as decode.maxNumSeqs=32, nodes=6, chip=mi325x, profile.reserve.symmetricHeap=16Gi or "
            "workload.concurrency=256: show what changes. Can be repeated.",
        ),
    ] = None
    compare: Annotated[
        tuple[Path, Path] | None, Parameter(group=VIEWS, help="Two manifests: show both plans side by side.")
    ] = None
    cost: Annotated[
        float | None, Parameter(group=VIEWS, help="Price of a GPU-hour: show the cost of a million tokens.")
    ] = None
    explain: Annotated[
        str | None, Parameter(group=VIEWS, help="A line or figure, such as 'KV pages', decode.maxNumSeqs or tpot.")
    ] = None
    search: Annotated[
        int | None, Parameter(group=VIEWS, help="Number of nodes: rank the layouts that fit them, for --chip or -f.")
    ] = None
    check: Annotated[
        bool,
        Parameter(group=VIEWS, negative=(), help="Compare the planner with published figures of Kimi-K3, row by row."),
    ] = False

    @property
    def chosen(self) -> tuple[str, ...]:
        """Views that exclude each other, as the user writes them."""
        stated = {
            "--what-if": bool(self.what_if),
            "--compare": self.compare is not None,
            "--explain": self.explain is not None,
            "--search": self.search is not None,
            "--check": self.check,
        }
        return tuple(name for name, is_stated in stated.items() if is_stated)


@dataclass(frozen=True)
class WorkloadFlags:
    """A workload in flags, which win over --workload."""

    workload: Annotated[
        Path | None,
        Parameter(
            group=WORKLOAD,
            allow_leading_hyphen=True,
            help="YAML with prompt, output (N, {uniform}, {logNormal}, {empirical}), reuse, targets and concurrency.",
        ),
    ] = None
    prompt_tokens: Annotated[str | None, Parameter(group=WORKLOAD, help="N, or MIN-MAX.")] = None
    output_tokens: Annotated[str | None, Parameter(group=WORKLOAD, help="N, or MIN-MAX.")] = None
    reuse: Annotated[
        float | None, Parameter(group=WORKLOAD, help="Share of prompt tokens that the cache has, 0 to below 1.")
    ] = None
    concurrency: Annotated[
        int | None, Parameter(group=WORKLOAD, help="Requests in decode at once; as many as fit by default.")
    ] = None
    requests_per_second: Annotated[
        float | None, Parameter(group=WORKLOAD, help="Instead of --concurrency; needs --target-tpot.")
    ] = None
    target_tpot: Annotated[
        str | None, Parameter(group=WORKLOAD, help="Longest time between two tokens, such as 60ms.")
    ] = None
    target_ttft: Annotated[
        str | None, Parameter(group=WORKLOAD, help="Longest time to the first token, such as 5s.")
    ] = None

    @property
    def given(self) -> frozenset[str]:
        """Flags that were stated; of the two lengths both, since either needs the other."""
        stated = {flag_name(field.name) for field in fields(self) if getattr(self, field.name) is not None}
        lengths = {"--prompt-tokens", "--output-tokens"}
        return frozenset(stated | lengths if stated & lengths and self.workload is None else stated)


FLAG_OF_FIELD = {
    "spec.hardware.profile": "--chip",
    "spec.model.architecture": "--architecture",
    "spec.model.maxModelLen": "--max-model-len",
    "spec.precision.kvCache": "--kv-cache",
    **{f"spec.{role}.nodesPerGroup": "--nodes-per-group" for role in ("prefill", "decode")},
    **{f"spec.{role}.gpusPerNode": "--gpus-per-node" for role in ("prefill", "decode")},
    **{f"spec.{role}.tensorParallel": "--tensor-parallel" for role in ("prefill", "decode")},
    **{f"spec.{role}.maxNumSeqs": "--max-num-seqs" for role in ("prefill", "decode")},
    **{f"spec.{role}.groups": f"--{role}-groups" for role in ("prefill", "decode")},
    "nodes": "--search",
    "workload.prompt": "--prompt-tokens",
    "workload.output": "--output-tokens",
    "workload.reuse": "--reuse",
    "workload.concurrency": "--concurrency",
    "workload.requestsPerSecond": "--requests-per-second",
    "workload.targets.tpotSeconds": "--target-tpot",
    "workload.targets.ttftSeconds": "--target-ttft",
}


DEPLOYMENT_FLAGS = frozenset(flag for field, flag in FLAG_OF_FIELD.items() if field.startswith("spec."))


def flag_name(field: str) -> str:
    """The flag of a field of the dataclasses above."""
    return "--" + field.replace("_", "-")


def named_by_flag(problems: tuple[Problem, ...], flags: Container[str]) -> tuple[Problem, ...]:
    """The same problems with one of `flags` for its field; what both roles have in common once."""
    named = (replace(problem, field=_flag(problem.field, flags)) for problem in problems)
    return tuple(dict.fromkeys(named))


def _flag(field: str, flags: Container[str]) -> str:
    for path, flag in FLAG_OF_FIELD.items():
        if flag in flags and (field == path or field.startswith(f"{path}.")):
            return flag
    return field


_T = TypeVar("_T")


def read_by_flag(flags: Container[str], read: Callable[[], _T]) -> _T:
    """What `read` gives; its InvalidSpec names these flags instead of fields."""
    try:
        return read()
    except InvalidSpec as error:
        raise InvalidSpec(named_by_flag(error.problems, flags)) from error


def deployment_document(flags: DeploymentFlags, gpus_per_node: int) -> dict[str, Any]:
    """The manifest that the flags stand for; `gpus_per_node` are those of the chip. Raises InvalidSpec."""
    groups = {"prefill": _stated(flags.prefill_groups, 1), "decode": _stated(flags.decode_groups, 1)}
    shape = {
        "nodesPerGroup": _nodes_per_group(flags, sum(groups.values())),
        "gpusPerNode": _stated(flags.gpus_per_node, gpus_per_node),
        "tensorParallel": _stated(flags.tensor_parallel, 2),
        "maxNumSeqs": flags.max_num_seqs,
    }
    model = {
        "architecture": _stated(flags.architecture, "kimi-k3"),
        "checkpoint": {"hostPath": {"path": CHECKPOINT_PATH}},
        "maxModelLen": flags.max_model_len,
    }
    return {
        "apiVersion": API_VERSION,
        "kind": "KimiDeployment",
        "metadata": {"name": "planned"},
        "spec": {
            "model": _without_none(model),
            "hardware": {"profile": flags.chip},
            "precision": {"kvCache": _stated(flags.kv_cache, "Auto")},
            **{role: _without_none({"groups": number, **shape}) for role, number in groups.items()},
        },
    }


def _nodes_per_group(flags: DeploymentFlags, num_groups: int) -> int:
    """Raises InvalidSpec when --nodes cannot be spread evenly over the groups, or says otherwise than the others."""
    if flags.nodes is None:
        return _stated(flags.nodes_per_group, 2)
    each, rest = divmod(flags.nodes, max(1, num_groups))
    if flags.nodes_per_group is not None and flags.nodes != flags.nodes_per_group * num_groups:
        expected = f"{num_groups} groups x {flags.nodes_per_group} nodes = {flags.nodes_per_group * num_groups}"
        raise refuse("--nodes", str(flags.nodes), expected, "leave one of --nodes and --nodes-per-group out")
    if each < 1 or rest:
        expected = f"a multiple of {num_groups}, the prefill and decode groups together; at least one node each"
        remedy = "change it, --prefill-groups or --decode-groups, or let --search choose"
        raise refuse("--nodes", str(flags.nodes), expected, remedy)
    return each


def workload_document(flags: WorkloadFlags) -> dict[str, Any]:
    """The workload of --workload and of the flags, in the form of the file. Empty without any. Raises InvalidSpec."""
    document: dict[str, Any] = {} if flags.workload is None else dict(_file(flags.workload))
    targets = document.get("targets", {})
    times = {
        "tpotSeconds": _seconds("--target-tpot", flags.target_tpot),
        "ttftSeconds": _seconds("--target-ttft", flags.target_ttft),
    }
    stated = {
        "prompt": _lengths("--prompt-tokens", flags.prompt_tokens),
        "output": _lengths("--output-tokens", flags.output_tokens),
        "reuse": flags.reuse,
        "concurrency": flags.concurrency,
        "requestsPerSecond": flags.requests_per_second,
    }
    document |= _without_none(stated)
    if given := _without_none(times):
        document["targets"] = {**targets, **given} if isinstance(targets, Mapping) else given
    return document


def _file(file: Path) -> Mapping[str, Any]:
    found = [document for _, document in read_documents([file])]
    # a profile beside the file is none of its documents
    found = [document for document in found if document.get("kind") != "HardwareProfile"]
    if len(found) != 1:
        raise refuse(f"--workload {file}", f"{len(found)} documents", "one, with prompt and output", "mend the file")
    return found[0]


_RANGE = re.compile(r"([0-9][0-9_,]*)(?:-([0-9][0-9_,]*))?")
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s)")


def _lengths(flag: str, text: str | None) -> int | dict[str, Any] | None:
    if text is None:
        return None
    match = _RANGE.fullmatch(text)
    if match is None:
        raise refuse(
            flag, repr(text), "a number of tokens, or MIN-MAX", "write 4096 or 1000-8000; others in --workload"
        )
    least, most = (None if part is None else int(re.sub("[_,]", "", part)) for part in match.groups())
    return least if most is None else {"uniform": {"min": least, "max": most}}


def _seconds(flag: str, text: str | None) -> float | None:
    if text is None:
        return None
    match = _TIME.fullmatch(text)
    if match is None:
        raise refuse(flag, repr(text), "a time with its unit", "write 60ms or 0.06s")
    return float(match[1]) / (1000 if match[2] == "ms" else 1)


def refuse(field: str, got: str, expected: str, remedy: str) -> InvalidSpec:
    """One thing that is wrong with the command line."""
    return InvalidSpec((Problem(field, got, expected, remedy),))


def _stated(value: _T | None, otherwise: _T) -> _T:
    return otherwise if value is None else value


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
