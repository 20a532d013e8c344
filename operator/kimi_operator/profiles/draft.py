"""Pure: a HardwareProfile drafted from a node. What the node or a profile of its chip says is filled in; what nobody
measured stays out, as a comment that says what to measure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from msgspec import Struct

from kimi_operator.api.base import dump
from kimi_operator.api.contradictions import PARTITIONS, SLOWEST_MEMORY, num_partitions
from kimi_operator.api.profile import Basis, HardwareProfile, HardwareProfileSpec, PartitionSpec
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.planner.units import counted
from kimi_operator.profiles.detect import (
    MOST_DIGITS,
    GpuLabels,
    Share,
    beyond_card,
    candidates_of,
    read_labels,
    share_of,
    shown,
    stale,
)

RESOURCE = "amd.com/gpu"
KEPT_OF_A_PART = frozenset({"runtime", "fabric", "pod", "limits", "timeouts", "worker"})
"""Sections that say the same of a part of a card."""
SECTIONS = ("match", "gpu", "runtime", "fabric", "reserve", "pod", "limits", "timeouts", "worker")
CARRIED = frozenset({Basis.MEASURED, Basis.DERIVED, Basis.PUBLISHED, Basis.DATA_SHEET})
MEASURE = {
    "gpu.architecture": "what `rocminfo` calls the GPU: gfx942 or another",
    "gpu.memory": "bytes that programs see: torch.cuda.mem_get_info()[1]",
    "gpu.hbmBytesPerSecond": "peak of the data sheet, in bytes a second",
    "gpu.computeUnits": "what `rocminfo` counts of the GPU",
    "gpu.bf16FlopsPerSecond": "peak of dense bfloat16 in operations a second; of a part, by its compute units",
    "gpu.card": "memory, computeUnits and computeDies of the whole card",
    "reserve.contexts": "memory in use once all ranks have started and before weights are loaded, less the heap",
    "reserve.activations": "the most that a step of prefillBatchedTokens takes on top of weights and pools",
}
NAME = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")
DEVICE_ID = re.compile(r"[0-9a-f]{4}")
BYTE_FIELDS = frozenset({"vram", "memory", "sharedMemory", "symmetricHeap", "contexts", "activations", "graphs"})
BYTE_FIELDS |= {"staging", "margin"}
MOST_GPUS = 64
"""GPUs of a node at most, as the API has it."""
READ_ANEW = "restart AMD's node labeller and device plugin on the node, which read its GPUs only when they start"
CHECK_PLUGIN = "check that AMD's device plugin runs on the node"


class NodeFacts(Struct, frozen=True):
    """What a node says of its GPUs, in labels and in its capacity."""

    labels: GpuLabels
    resource: str
    gpus: int


def read_node(document: Mapping[str, Any]) -> NodeFacts:
    """Read a Node of the Kubernetes API. Raises InvalidSpec that names label or field."""
    if document.get("kind") != "Node":
        kind = shown(document.get("kind"))
        raise InvalidSpec((Problem("kind", kind, "a Node", "save `kubectl get node NODE -o json`"),))
    metadata = _table("metadata", document.get("metadata", {}))
    name = str(metadata.get("name", ""))
    _check_name("metadata.name", name)
    labels = read_labels(name, _texts("metadata.labels", metadata.get("labels")))
    capacity = _texts("status.capacity", _table("status", document.get("status", {})).get("capacity"))
    # With resource_naming_strategy mixed the device plugin names the resource after the partition.
    named = [RESOURCE, f"amd.com/{labels.partition or PartitionSpec()}"]
    for resource in named:
        if (amount := capacity.get(resource, "0")) != "0":
            return NodeFacts(labels, resource, _count(f"status.capacity.{resource} of node {name}", amount))
    problem = Problem(
        f"status.capacity of node {name}", shown(", ".join(sorted(capacity)), quoted=False) or "nothing",
        f"a number of {' or '.join(named)}", CHECK_PLUGIN,
    )  # fmt: skip
    raise InvalidSpec((problem,))


def _count(field: str, text: str) -> int:
    """GPUs of a node, as many as a profile may have."""
    if text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS and 0 < int(text) <= MOST_GPUS:
        return int(text)
    raise InvalidSpec((Problem(field, shown(text), f"a number of GPUs from 1 to {MOST_GPUS}", CHECK_PLUGIN),))


def _check_name(field: str, name: str) -> None:
    if not NAME.fullmatch(name):
        expected = "a name of lower-case letters, digits, dots and hyphens"
        raise InvalidSpec((Problem(field, shown(name), expected, "correct it"),))


def _table(field: str, value: object) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise InvalidSpec((Problem(field, shown(value), "a table of names and values", "save the node anew"),))
    return value


def _texts(field: str, value: object) -> dict[str, str]:
    """A table of texts, as labels and capacities are; numbers that lost their quotes are texts again."""
    texts = {}
    for key, text in _table(field, {} if value is None else value).items():
        if isinstance(text, list | Mapping):
            raise InvalidSpec((Problem(f"{field}.{key}", shown(text), "a text", "save the node anew"),))
        texts[shown(key, quoted=False)] = text if isinstance(text, str) else shown(text, quoted=False)
    return texts


def draft(facts: NodeFacts, profiles: Mapping[str, HardwareProfile], name: str | None = None) -> str:
    """YAML of a HardwareProfile for the node's GPUs, with a comment for each figure that is not known.

    Raises InvalidSpec when labels and capacity contradict each other or the card, or `name` is no name.
    """
    if name is not None:
        _check_name("--name", name)
    labels = facts.labels
    candidates = candidates_of(labels, profiles)
    share = share_of(labels, candidates)
    if share is not None and (problem := _contradiction(facts, share, candidates)) is not None:
        raise InvalidSpec((problem,))
    if share is None:
        spec, name = _of_unknown(facts), name or f"device-{labels.device_id}"
        head = f"# Device id {labels.device_id} is in no profile that describes its card."
    elif share.is_whole and share.partition.is_whole:
        spec, name = _of_whole(facts, candidates[share.chip].spec, share), name or f"{share.chip}-site"
        head = f"# {_beside(facts, share.chip, candidates[share.chip].spec.gpu.per_node)}"
    else:
        part = "part" if share.partition.is_whole else str(share.partition).replace("_", "-")
        spec, name = _of_part(facts, candidates[share.chip].spec, share), name or f"{share.chip}-{part}"
        head = f"# Each is {share}{f', one of {share.parts}' if share.parts > 1 else ''}."
        if labels.partition is None and share.parts > 1:
            head += f"\n# No label names their partition: {share.partition} makes so many; check gpu.partition."
    if share is not None and labels.vram is None:
        head += (
            f"\n# No {labels.where('vram')}: match.vram and gpu.memory follow from profile {share.chip}; check them, "
            "or run AMD's node labeller with -vram."
        )
    return "".join(f"{line}\n" for line in (
        f"# Drafted from node {labels.node}: {facts.gpus} x {facts.resource}, device id {labels.device_id}.",
        head,
        f"# Fill in what is not measured, then check it: kimictl profile show {name} -f FILE",
        *_document(name, spec),
    ))  # fmt: skip


def _beside(facts: NodeFacts, chip: str, per_node: int) -> str:
    """How the profile of the node's whole cards and its draft stand to each other."""
    choose = "with two that match, name one in spec.hardware.profile."
    if facts.gpus == per_node:
        return f"Profile {chip} matches it as it is; {choose}"
    return f"Profile {chip} matches its GPUs but has {per_node} a node, this draft {facts.gpus}; {choose}"


def _contradiction(facts: NodeFacts, share: Share, candidates: Mapping[str, HardwareProfile]) -> Problem | None:
    """Why labels and capacity cannot all be true."""
    if problem := stale(facts.labels, share) or beyond_card(facts.labels, share):
        return problem
    field, got = f"status.capacity of node {facts.labels.node}", f"{facts.gpus} {facts.resource}"
    if facts.gpus % share.parts:
        expected = f"a multiple of {share.parts}: each is {share}, one of {share.parts}"
        return Problem(field, got, expected, READ_ANEW)
    cards = max(_cards(one.spec) for one in candidates.values())
    if facts.gpus > (most := cards * max(share.parts, share.card.memory // share.memory)):
        expected = f"at most {most} of a node's {counted(cards, 'card')}: each is, as far as labels tell, {share}"
        more = f"where a node does have {facts.gpus}, give its HardwareProfile with -f, with gpu.perNode {facts.gpus}"
        return Problem(field, got, expected, f"{_suspected(facts.gpus, share, cards)}{READ_ANEW}; {more}")
    return None


def _cards(spec: HardwareProfileSpec) -> int:
    """Whole cards of a node."""
    gpu = spec.gpu
    parts = 1 if gpu.card is None else num_partitions(gpu.partition.compute, gpu.card.compute_dies)
    return max(1, gpu.per_node // parts)


def _suspected(gpus: int, share: Share, cards: int) -> str:
    """Which partition would make so many GPUs of the cards, and how to see it."""
    modes = {number: mode for mode, number in PARTITIONS.items()} | {share.card.compute_dies: "CPX"}
    parts, rest = divmod(gpus, cards)
    if rest or parts not in modes:
        return ""
    return f"they may be {counted(cards, 'card')} in {modes[parts]}, as `amd-smi static --partition` would show; "


def _of_whole(facts: NodeFacts, base: HardwareProfileSpec, share: Share) -> dict[str, Any]:
    """The chip's own profile, with what this node says."""
    spec = dump(base)
    for section in ("gpu", "match"):
        spec[section] = dict(spec[section])
    spec["gpu"] |= {"resource": facts.resource, "perNode": facts.gpus}
    sources, basis = dict(spec["sources"]), dict(spec["basis"])
    _report(facts, sources, basis, ["gpu.perNode"])
    if facts.labels.vram is None:
        sources["match.vram"] = f"as of {share.chip}: the node has no label of it"
        basis["match.vram"] = Basis.ASSUMED.value
    if share.is_virtual and basis.get("gpu.memory") == Basis.MEASURED:
        sources["gpu.memory"] = f"as of {share.chip} without virtualisation: {sources['gpu.memory']}"
        basis["gpu.memory"] = Basis.CARRIED.value
    return spec | {"sources": sources, "basis": basis}


def _of_part(facts: NodeFacts, base: HardwareProfileSpec, share: Share) -> dict[str, Any]:
    """A part of a card: memory and rates by its share; reserves stay open, a whole card's say nothing about them."""
    whole = dump(base)
    gpu = whole["gpu"] | {
        "resource": facts.resource,
        "perNode": facts.gpus,
        "memory": min(share.memory, base.gpu.memory // share.parts),
        "computeUnits": share.compute_units,
        "partition": dump(share.partition),
    }
    shares = _shares(share)
    for rate, (fraction, _) in shares.items():
        if rate in gpu:
            gpu[rate] = int(gpu[rate] * fraction)
    if not share.has_known_units:
        # Those of the whole card would promise what a part of its memory may not come with.
        del gpu["computeUnits"]
        gpu.pop("bf16FlopsPerSecond", None)
    if gpu.get("hbmBytesPerSecond", SLOWEST_MEMORY) < SLOWEST_MEMORY:
        # Of so little a share says less than a measurement.
        del gpu["hbmBytesPerSecond"]
    match = {"deviceIds": [facts.labels.device_id], "vram": share.memory}
    if share.is_virtual:
        match["virtualDeviceIds"] = match["deviceIds"]
    sources, basis = _carried(whole, share)
    told = {f"gpu.{rate}": text for rate, (_, text) in shares.items()}
    told |= {"gpu.computeUnits": share.units_text, "gpu.memory": share.memory_text, "match.vram": share.memory_text}
    for path, text in told.items():
        if path.partition(".")[2] in gpu | match:
            sources[path], basis[path] = f"share of {share.chip}, {text}", Basis.DERIVED.value
        else:
            sources.pop(path, None)
            basis.pop(path, None)
    reported = ["gpu.perNode"] + (["gpu.computeUnits"] if facts.labels.compute_units else [])
    if share.counted_dies != share.card.compute_dies:
        gpu["card"] = gpu["card"] | {"computeDies": share.counted_dies}
        reported.append("gpu.card.computeDies")
    _report(facts, sources, basis, reported)
    kept = {name: whole[name] for name in KEPT_OF_A_PART if name in whole}
    return {"match": match, "gpu": gpu} | kept | {"sources": sources, "basis": basis}


def _shares(share: Share) -> dict[str, tuple[float, str]]:
    """What a part has of each of its card's rates, and by what: FLOPs go with compute units, bandwidth with both."""
    memory = share.memory / share.card.memory, share.memory_text
    units = share.compute_units / share.card.compute_units, share.units_text
    return {"hbmBytesPerSecond": min(memory, units, key=lambda each: each[0]), "bf16FlopsPerSecond": units}


def _of_unknown(facts: NodeFacts) -> dict[str, Any]:
    """A chip of which only its labels are known."""
    labels = facts.labels
    gpu: dict[str, Any] = {"resource": facts.resource, "perNode": facts.gpus}
    match: dict[str, Any] = {"deviceIds": [labels.device_id]}
    reported = ["gpu.perNode"]
    if labels.vram is not None:
        match["vram"] = labels.vram
        reported.append("match.vram")
    if labels.compute_units is not None:
        gpu["computeUnits"] = labels.compute_units
        reported.append("gpu.computeUnits")
    if labels.partition is not None and not labels.partition.is_whole:
        gpu["partition"] = dump(labels.partition)
    sources: dict[str, str] = {}
    basis: dict[str, str] = {}
    _report(facts, sources, basis, reported)
    runtime = {"device": "cuda", "dtype": "bfloat16", "kvCacheDtype": "bfloat16", "collectives": "nccl"}
    return {"match": match, "gpu": gpu, "runtime": runtime, "sources": sources, "basis": basis}


def _report(facts: NodeFacts, sources: dict[str, str], basis: dict[str, str], paths: list[str]) -> None:
    for path in paths:
        sources[path] = f"node {facts.labels.node}"
        basis[path] = Basis.REPORTED.value


def _carried(whole: dict[str, Any], share: Share) -> tuple[dict[str, str], dict[str, str]]:
    """Sources of a card's figures, for a part of it: what was measured on the card was not measured on the part."""
    sources, basis = {}, {}
    for path, text in whole["sources"].items():
        if path.partition(".")[0] not in KEPT_OF_A_PART | {"gpu"}:
            continue
        known = whole["basis"].get(path)
        # Nodes and cards stay what they are.
        carries = known in CARRIED and path.startswith(("gpu.", "limits.")) and not path.startswith("gpu.card")
        sources[path] = f"of a whole {share.chip}: {text}" if carries else text
        if known is not None:
            basis[path] = Basis.CARRIED.value if carries else known
    return sources, basis


def _document(name: str, spec: dict[str, Any]) -> Iterator[str]:
    yield "apiVersion: kimi-operator.io/v1alpha1\nkind: HardwareProfile\nmetadata:"
    yield f"  name: {name}\nspec:"
    others = [section for section in spec if section not in (*SECTIONS, "sources", "basis")]
    for section in (*SECTIONS, *others):
        yield from _section(section, spec.get(section) or {})
    yield from _yaml({"sources": spec["sources"], "basis": spec["basis"]})


def _section(section: str, value: dict[str, Any]) -> Iterator[str]:
    """One section; figures that nobody measured as comments at its end."""
    missing = [path.partition(".")[2] for path in MEASURE if path.startswith(f"{section}.")]
    missing = [field for field in missing if field not in value]
    if value:
        yield from _yaml({section: _quantities(value)})
    elif missing:
        yield f"  # {section}:"
    indent = "    # " if value else "  #   "
    yield from (f"{indent}{field}: not measured; {MEASURE[f'{section}.{field}']}" for field in missing)


class _Dumper(yaml.CSafeDumper):
    """Device ids in quotes: some parsers read 74e1 as a number."""


def _represent_text(dumper: yaml.CSafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if DEVICE_ID.fullmatch(text) else None)


_Dumper.add_representer(str, _represent_text)


def _yaml(value: dict[str, Any]) -> Iterator[str]:
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)
    return (f"  {line}" for line in text.splitlines())


def _quantities(value: Any, name: str = "") -> Any:
    """The same with bytes as quantities, and without what is empty."""
    if isinstance(value, dict):
        return {key: _quantities(inner, key) for key, inner in value.items() if inner not in ([], {}, ())}
    if isinstance(value, int) and name in BYTE_FIELDS and value:
        for suffix, factor in (("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10)):
            if value % factor == 0:
                return f"{value // factor}{suffix}"
    return value
