"""Flags of `kimictl plan` as the documents that they stand for, which are then read like files; errors by flag."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from kimi_operator.api.base import API_VERSION
from kimi_operator.api.deployment import KvPrecision, Role
from kimi_operator.api.profile import HardwareProfile
from kimi_operator.cli.files import read_objects
from kimi_operator.cli.flags import MOST_WRITTEN, DeploymentFlags, WorkloadFlags, known_as, refuse, shown
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.numerals import whole
from kimi_operator.planner.layout import MAX_NODES
from kimi_operator.planner.workload import check_lengths, read_workload

CHECKPOINT_PATH = "/models/checkpoint"
"""Where a deployment that was made of flags has its checkpoint; a plan does not look at it."""

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


LOADS = {"concurrency", "requestsPerSecond"}
"""Of a workload, one or the other."""
DEPLOYMENT_FLAGS = frozenset(flag for field, flag in FLAG_OF_FIELD.items() if field.startswith("spec."))


class Typed(Struct, frozen=True):
    """What was written in flags where the documents that are made of them say it otherwise."""

    texts: Mapping[str, str] = field(default_factory=dict)
    """Times with their units, and lengths, by flag."""
    nodes: int | None = None
    """Of all groups, where --nodes states them."""
    num_groups: int = 1
    workload_file: Path | None = None

    def said(self, problem: Problem) -> Problem:
        """The problem, which is named by its flag, in the user's own words; what is in a file, by the file."""
        if self.workload_file is not None and problem.field.startswith("workload."):
            field = problem.field.removeprefix("workload.")
            return replace(problem, field=f"--workload {self.workload_file}: {field}")
        if problem.field in self.texts and _NUMBER.fullmatch(problem.got):
            # a bound of the field itself has no unit; what a prediction asks for has one
            is_bare = problem.field.startswith("--target") and problem.expected[-1:].isdigit()
            expected = f"{problem.expected} s" if is_bare else problem.expected
            return replace(problem, got=self.texts[problem.field], expected=expected)
        if self.nodes is None or problem.field not in _OF_A_GROUP:
            return problem
        got = f"{self.nodes}: {self.num_groups} groups of {problem.got}"
        if problem.field != "--nodes-per-group":
            nearest = _NEAREST.search(problem.remedy)
            if nearest is None or self._of_all(nearest[1]) == str(self.nodes):
                return problem  # it is not the number of nodes that must change
            remedy = f"{problem.remedy} a group: --nodes {self._of_all(nearest[1])} --tensor-parallel {nearest[2]}"
            return Problem("--nodes", got, problem.expected, remedy)
        remedy = _LIST.sub(lambda each: f"[{', '.join(map(self._of_all, each[1].split(', ')))}]", problem.remedy)
        return Problem("--nodes", got, problem.expected, remedy)

    def _of_all(self, nodes_of_a_group: str) -> str:
        return str(int(nodes_of_a_group) * self.num_groups)


_FIELD = re.compile(r"\bspec(\.[a-zA-Z]+)+")
_NUMBER = re.compile(r"[0-9.,e+-]+( s)?")
_OF_A_GROUP = {"--nodes-per-group", "spec.prefill", "spec.decode"}
_LIST = re.compile(r"\[([0-9]+(?:, [0-9]+)*)\]")
_NEAREST = re.compile(r"([0-9]+) x [0-9]+ GPUs? with tensorParallel ([0-9]+)$")
NOTHING_TYPED = Typed()


def typed(flags: DeploymentFlags, work: WorkloadFlags) -> Typed:
    """What the flags say in words of their own."""
    texts = {
        "--target-tpot": work.target_tpot,
        "--target-ttft": work.target_ttft,
        "--prompt-tokens": work.prompt_tokens,
        "--output-tokens": work.output_tokens,
    }
    groups = _stated(flags.prefill_groups, 1) + _stated(flags.decode_groups, 1)
    stated = {flag: text for flag, text in texts.items() if text is not None}
    return Typed(stated, flags.nodes, groups, work.workload)


def named_by_flag(
    problems: tuple[Problem, ...], flags: Container[str], written: Typed = NOTHING_TYPED
) -> tuple[Problem, ...]:
    """The same problems with one of `flags` for its field, and for others to change; what both roles share once."""
    named = (
        replace(
            problem,
            field=_flag(problem.field, flags),
            remedy=_FIELD.sub(lambda field: _flag(field[0], flags), problem.remedy),
        )
        for problem in problems
    )
    return tuple(dict.fromkeys(map(written.said, named)))


def _flag(field: str, flags: Container[str]) -> str:
    # the workload stands in a file of its own, or in the spec
    name = field.removeprefix("spec.") if field.startswith("spec.workload.") else field
    for path, flag in FLAG_OF_FIELD.items():
        if flag in flags and (name == path or name.startswith(f"{path}.")):
            return flag
    # beside a manifest its own workload stands in its spec
    return name if "--chip" in flags else field


_T = TypeVar("_T")


def read_by_flag(flags: Container[str], read: Callable[[], _T], written: Typed = NOTHING_TYPED) -> _T:
    """What `read` gives; its InvalidSpec names these flags instead of fields."""
    try:
        return read()
    except InvalidSpec as error:
        raise InvalidSpec(named_by_flag(error.problems, flags, written)) from error


def deployment_document(flags: DeploymentFlags, chip: HardwareProfile) -> dict[str, Any]:
    """The manifest that the flags stand for, on nodes of this chip. Raises InvalidSpec."""
    groups = {"prefill": _stated(flags.prefill_groups, 1), "decode": _stated(flags.decode_groups, 1)}
    shape = {
        "nodesPerGroup": _nodes_per_group(flags, sum(groups.values()), chip),
        "gpusPerNode": _stated(flags.gpus_per_node, chip.spec.gpu.per_node),
        "tensorParallel": _stated(flags.tensor_parallel, 2),
        "maxNumSeqs": flags.max_num_seqs,
    }
    model = {
        "architecture": _stated(flags.architecture, "kimi-k3").lower(),
        "checkpoint": {"hostPath": {"path": CHECKPOINT_PATH}},
        "maxModelLen": flags.max_model_len,
    }
    return {
        "apiVersion": API_VERSION,
        "kind": "KimiDeployment",
        "metadata": {"name": "planned"},
        "spec": {
            "model": _without_none(model),
            "hardware": {"profile": chip.metadata.name},
            "precision": {"kvCache": _kv_cache(flags.kv_cache)},
            **{role: _without_none({"groups": number, **shape}) for role, number in groups.items()},
        },
    }


def _kv_cache(stated: str | None) -> str:
    """In capitals or not; what is none is refused as in a manifest."""
    try:
        return known_as(_stated(stated, KvPrecision.AUTO), KvPrecision)
    except ValueError:
        return str(stated)


def _nodes_per_group(flags: DeploymentFlags, num_groups: int, chip: HardwareProfile) -> int:
    """Raises InvalidSpec when --nodes cannot be spread evenly over the groups, or says otherwise than the others."""
    if flags.nodes is None:
        return _stated(flags.nodes_per_group, 2)
    each, rest = divmod(flags.nodes, max(1, num_groups))
    if flags.nodes_per_group is not None and flags.nodes != flags.nodes_per_group * num_groups:
        expected = f"{num_groups} groups x {flags.nodes_per_group} nodes = {flags.nodes_per_group * num_groups}"
        raise refuse("--nodes", str(flags.nodes), expected, "leave one of --nodes and --nodes-per-group out")
    if num_groups < len(Role):
        return 1  # a number of groups is refused by its own name
    if flags.nodes > (most := num_groups * MAX_NODES):
        expected = f"at most {most}: prefill and decode have {num_groups} groups, of at most {MAX_NODES} nodes each"
        raise refuse("--nodes", str(flags.nodes), expected, _other_nodes(flags, num_groups, chip))
    if each < 1 or rest:
        expected = f"a multiple of {num_groups}: prefill and decode have {num_groups} groups, equally large"
        raise refuse("--nodes", str(flags.nodes), expected, _other_nodes(flags, num_groups, chip))
    return each


def _other_nodes(flags: DeploymentFlags, num_groups: int, chip: HardwareProfile) -> str:
    """What to write instead of a number of nodes that cannot be spread over the groups."""
    # it loads the planner of whole deployments, which flags that can be do not need here
    from kimi_operator.cli.other_nodes import Asked  # noqa: PLC0415

    def document(nodes: int) -> dict[str, Any]:
        return deployment_document(dataclasses.replace(flags, nodes=nodes), chip)

    assert flags.nodes is not None
    return Asked(flags.nodes, num_groups, chip, document).remedy()


def workload_document(
    flags: WorkloadFlags, own: Mapping[str, Any] | None = None, max_positions: int | None = None
) -> dict[str, Any]:
    """The workload of --workload and of the flags, in the form of the file. Empty without any. Raises InvalidSpec.

    Flags change `own`, the manifest's; a file takes its place. `max_positions` are those of the model, where it is
    known: a length beyond them is told though the other is missing.
    """
    if not flags.given:
        return {}
    if flags.reuse is not None and not 0 <= flags.reuse < 1:
        raise refuse("--reuse", f"{flags.reuse:g}", "a number from 0 to below 1", "write the share, such as 0.9")
    document: dict[str, Any] = dict(own or {}) if flags.workload is None else dict(_file(flags.workload))
    targets = document.get("targets", {})
    times = {
        "tpotSeconds": seconds("--target-tpot", flags.target_tpot),
        "ttftSeconds": seconds("--target-ttft", flags.target_ttft),
    }
    stated = _without_none(
        {
            "prompt": _lengths("--prompt-tokens", flags.prompt_tokens),
            "output": _lengths("--output-tokens", flags.output_tokens),
            "reuse": flags.reuse,
            "concurrency": flags.concurrency,
            "requestsPerSecond": flags.requests_per_second,
        }
    )
    if not stated.keys().isdisjoint(LOADS):
        document = {name: value for name, value in document.items() if name not in LOADS}
    document |= stated
    if given := _without_none(times):
        document["targets"] = {**targets, **given} if isinstance(targets, Mapping) else given
    if flags.workload is None and not own:
        _check_both_lengths(document, flags, max_positions)
    return document


def _check_both_lengths(document: Mapping[str, Any], flags: WorkloadFlags, max_positions: int | None) -> None:
    """Raises InvalidSpec for one length without the other, and first for what is wrong with the one."""
    texts = {"prompt": flags.prompt_tokens, "output": flags.output_tokens}
    missing = [name for name, text in texts.items() if text is None]
    if len(missing) != 1:
        return
    (lone,) = texts.keys() - missing
    written, other = typed(DeploymentFlags(), flags), f"--{missing[0]}-tokens"
    alone = read_by_flag(flags.given, lambda: read_workload({**document, missing[0]: 1}), written)
    problems = () if max_positions is None else check_lengths(alone, max_positions)
    example = f"{other} {500 if missing[0] == 'output' else 4096}"
    needs = Problem(f"--{lone}-tokens", f"{texts[lone]} alone", f"{other} too", f"add it, such as {example}")
    raise InvalidSpec((*named_by_flag(problems, flags.given, written), needs))


def _file(file: Path) -> Mapping[str, Any]:
    expected = "one object with prompt and output"
    found = read_objects(file, expected)
    if len(found) != 1:
        raise refuse(f"--workload {file}", f"{len(found)} documents", expected, "mend the file")
    if "kind" in found[0]:
        got, expected = repr(found[0]["kind"]), "a workload, no manifest"
        raise refuse(f"--workload {file}: kind", got, expected, "give a manifest with -f")
    return found[0]


_RANGE = re.compile(r"([0-9][0-9_,]*)(?:-([0-9][0-9_,]*))?")
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(ms|s)")


def _lengths(flag: str, text: str | None) -> int | dict[str, Any] | None:
    if text is None:
        return None
    if len(text) > MOST_WRITTEN:
        raise refuse(flag, shown(text), "a number of tokens, or MIN-MAX", "write 4096 or 1000-8000")
    match = _RANGE.fullmatch(text)
    if match is None:
        in_full = "-".join(str(whole(part)) for part in text.split("-"))
        remedy = f"write {in_full}" if _RANGE.fullmatch(in_full) else "write 4096 or 1000-8000; others in --workload"
        raise refuse(flag, repr(text), "a number of tokens, or MIN-MAX", remedy)
    least, most = (None if part is None else int(re.sub("[_,]", "", part)) for part in match.groups())
    return least if most is None else {"uniform": {"min": least, "max": most}}


def seconds(flag: str, text: str | None) -> float | None:
    """A time such as 60ms or 0.06s. Raises InvalidSpec that names the flag."""
    if text is None:
        return None
    match = _TIME.fullmatch(text)
    if match is None or len(text) > MOST_WRITTEN:
        raise refuse(flag, shown(text), "a time with its unit", "write 60ms or 0.06s")
    return float(match[1]) / (1000 if match[2] == "ms" else 1)


def _stated(value: _T | None, otherwise: _T) -> _T:
    return otherwise if value is None else value


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
