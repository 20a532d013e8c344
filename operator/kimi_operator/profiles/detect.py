"""Pure: from a node's labels to the HardwareProfile of its GPUs, and to the part of a card that each of them is.

Chips are told apart by PCI device id and memory; a product name decides nothing, for virtual functions bear none. The
labels are those of AMD's GPU operator and its node labeller, which writes them once, when it starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from msgspec import Struct

from kimi_operator.api.contradictions import PARTITIONS, num_partitions
from kimi_operator.api.profile import (
    CardSpec,
    ComputePartition,
    GpuSpec,
    HardwareProfile,
    MemoryPartition,
    PartitionSpec,
)
from kimi_operator.api.quantity import parse_bytes
from kimi_operator.errors import InvalidSpec, Problem

LABEL_PREFIXES = ("amd.com/gpu.", "beta.amd.com/gpu.")
PARTITION_LABELS = ("amd.com/gpu.compute-memory-partition", "amd.com/compute-memory-partition")
PASSED_THROUGH = ("vf-passthrough", "pf-passthrough")
"""Values of the label amd.com/gpu.mode with which a node gives its GPUs to virtual machines, not to containers."""
CHIPS_WITHOUT_PROFILE = {"74a0": "MI300A", "75a8": "MI350P", "75b8": "MI350P"}
MOST_DIES = 64
"""Compute dies of a card at most, as the API has it; labels that count more count something else."""
GIB = 2**30
MOST_MEMORY = 2**60
"""Bytes of a GPU at most, as the API has it."""
MOST_DIGITS = 8
"""Of a count in a label or capacity: beyond, it counts nothing that a node has."""
MOST_SHOWN = 80
"""Characters of a wrong value in a message. The API server bounds labels; a file may hold anything."""


class GpuLabels(Struct, frozen=True):
    """What a node's labels say of its GPUs, which are all alike; None where no label says it."""

    node: str
    device_id: str
    vram: int | None = None
    """Bytes of one GPU, rounded to whole GiB by the labeller."""
    compute_units: int | None = None
    partition: PartitionSpec | None = None
    mode: str | None = None
    product_name: str | None = None

    def where(self, name: str) -> str:
        """A label of this node, as a person finds it."""
        return f"label amd.com/gpu.{name} of node {self.node}"


class Share(Struct, frozen=True):
    """Which part of its card one GPU is."""

    chip: str
    """Name of the profile of the whole card."""
    card: CardSpec
    memory: int
    """Bytes that are this GPU's alone."""
    compute_units: int
    parts: int
    """GPUs that the card is split into; 1 also for a virtual function that is less than its card."""
    partition: PartitionSpec
    """As labelled, or what makes so many parts of a card where no label tells."""
    is_virtual: bool
    counted_dies: int
    """Compute dies of the card, by the compute units of one where the labels tell."""
    has_known_units: bool
    """Whether a label, the partition or a whole card's memory tells the compute units; else they are the card's."""

    @property
    def is_whole(self) -> bool:
        """Whether memory and compute units are those of the card; labels are rounded to whole GiB."""
        return (
            self.parts == 1 and self.memory + GIB > self.card.memory and self.compute_units >= self.card.compute_units
        )

    def __str__(self) -> str:
        kind = "a virtual function" if self.is_virtual else "a GPU"
        units = self.units_text if self.has_known_units else "an unknown number of compute units"
        return f"{kind} with {self.memory_text} and {units} of a card ({self.chip})"

    @property
    def memory_text(self) -> str:
        """Its memory and that of the card."""
        return f"{self.memory // GIB} of {self.card.memory // GIB} GiB"

    @property
    def units_text(self) -> str:
        """Its compute units and those of the card."""
        return f"{self.compute_units} of {self.card.compute_units} compute units"


class Match(Struct, frozen=True):
    """The profile of a node's GPUs; `share` is None where the profile does not describe its card."""

    profile: str
    share: Share | None
    notes: tuple[str, ...]
    """What to know beside the match."""


class Refused(Struct, frozen=True):
    """Why a node's GPUs have no profile."""

    problems: tuple[Problem, ...]

    def __str__(self) -> str:
        return "; ".join(str(problem) for problem in self.problems)


def detect(node: str, labels: Mapping[str, str], profiles: Mapping[str, HardwareProfile]) -> Match | Refused:
    """Find the profile of a node's GPUs among `profiles`, by name.

    A partition or a part of a card matches only a profile that describes exactly that part.
    """
    try:
        return match_labels(read_labels(node, labels), profiles)
    except InvalidSpec as error:
        return Refused(error.problems)


def match_labels(seen: GpuLabels, profiles: Mapping[str, HardwareProfile]) -> Match | Refused:
    """As `detect`, of labels that were read before."""
    try:
        return _match(seen, profiles)
    except InvalidSpec as error:
        return Refused(error.problems)


def misfit(
    node: str, labels: Mapping[str, str], profile: HardwareProfile, profiles: Mapping[str, HardwareProfile]
) -> Problem | None:
    """Why a node's GPUs are not what `profile`, one of `profiles`, describes; None when they are."""
    try:
        seen = read_labels(node, labels)
        share, fitting = _fitting(seen, profiles)
    except InvalidSpec as error:
        return error.problems[0]
    if profile.metadata.name in fitting:
        return None
    return _another(seen, fitting, profile) if fitting else _unfit(seen, share, profiles)


def _match(seen: GpuLabels, profiles: Mapping[str, HardwareProfile]) -> Match:
    share, fitting = _fitting(seen, profiles)
    if len(fitting) == 1:
        return Match(fitting[0], share, tuple(_notes(seen, share)))
    raise InvalidSpec((_ambiguous(seen, fitting) if fitting else _unfit(seen, share, profiles),))


def _fitting(seen: GpuLabels, profiles: Mapping[str, HardwareProfile]) -> tuple[Share | None, list[str]]:
    """The part of a card that a GPU is, and every profile that describes it.

    Raises InvalidSpec with one problem when pods cannot have the GPUs, nobody knows the chip or labels are stale.
    """
    if seen.mode in PASSED_THROUGH:
        raise InvalidSpec((_passed_through(seen),))
    candidates = candidates_of(seen, profiles)
    if not candidates:
        raise InvalidSpec((_unknown_chip(seen),))
    share = share_of(seen, candidates)
    if share is not None and (problem := stale(seen, share)) is not None:
        raise InvalidSpec((problem,))
    return share, [name for name, one in candidates.items() if _fits(seen, share, one)]


def candidates_of(seen: GpuLabels, profiles: Mapping[str, HardwareProfile]) -> dict[str, HardwareProfile]:
    """The profiles of this device id, by name in order."""
    return {name: one for name, one in sorted(profiles.items()) if seen.device_id in one.spec.match.device_ids}


def read_labels(node: str, labels: Mapping[str, str]) -> GpuLabels:
    """Read what the labels say. Raises InvalidSpec when they say nothing, different things or nonsense."""
    device_id = _one(node, labels, "device-id")
    if device_id is None:
        raise InvalidSpec((_no_labels(node),))
    device_id = device_id.lower().removeprefix("0x")
    if not re.fullmatch(r"[0-9a-f]{4}", device_id):
        raise _nonsense(node, "device-id", device_id, "four hex digits such as 74a1")
    vram = _one(node, labels, "vram")
    return GpuLabels(
        node=node,
        device_id=device_id,
        vram=None if vram is None else _gib(node, vram),
        compute_units=_count(node, _one(node, labels, "cu-count")),
        partition=_partition(node, next((labels[name] for name in PARTITION_LABELS if name in labels), None)),
        mode=_one(node, labels, "mode"),
        product_name=_one(node, labels, "product-name"),
    )


def share_of(seen: GpuLabels, candidates: Mapping[str, HardwareProfile]) -> Share | None:
    """The part of a card that one GPU is; None when no profile of this device id describes the card."""
    described = [(card, one) for one in candidates.values() if (card := one.spec.gpu.card) is not None]
    # Cards of one device id that differ are told apart by what they can hold.
    described.sort(key=lambda pair: (_exceeding(seen, pair[0]) is not None, not pair[1].spec.gpu.partition.is_whole))
    if not described:
        return None
    card, profile = described[0]
    is_virtual = seen.device_id in profile.spec.match.virtual_device_ids
    parts = _parts(seen, card, is_virtual=is_virtual)
    # NPS1 lets each partition address all memory, but its siblings live in the same: its own is its share. Older
    # labellers state the whole card's. More than that is kept as it stands: it is no part of this card.
    memory = seen.vram or card.memory
    if _exceeding(seen, card) != "vram":
        memory = min(memory, card.memory // parts)
    partition = seen.partition or _partition_into(parts)
    return Share(
        chip=profile.metadata.name,
        card=card,
        memory=memory,
        compute_units=seen.compute_units or card.compute_units // parts,
        parts=parts,
        partition=partition,
        is_virtual=is_virtual,
        counted_dies=parts if partition.compute is ComputePartition.CPX else card.compute_dies,
        has_known_units=seen.compute_units is not None or parts > 1 or memory + GIB > card.memory,
    )


def _parts(seen: GpuLabels, card: CardSpec, *, is_virtual: bool) -> int:
    """GPUs that the card is split into. Older labellers name no partition, but count its compute units."""
    counted = _times(card.compute_units, seen.compute_units)
    if seen.partition is not None:
        # Of some chips the number of dies is hearsay; the count of a die's compute units is not.
        is_counted = seen.partition.compute is ComputePartition.CPX and counted > 1
        return counted if is_counted else num_partitions(seen.partition.compute, card.compute_dies)
    if is_virtual:
        return 1
    return counted if seen.compute_units is not None else _times(card.memory, seen.vram)


def _times(whole: int, part: int | None) -> int:
    """How many such parts make the whole; 1 where none do, or more than a card has dies."""
    return whole // part if part and whole % part == 0 and whole // part <= MOST_DIES else 1


def _partition_into(parts: int) -> PartitionSpec:
    """How a card is split into so many GPUs. What is no mode's number is the card's number of dies."""
    compute = next((mode for mode, number in PARTITIONS.items() if number == parts), ComputePartition.CPX)
    return PartitionSpec(compute=ComputePartition(compute))


def _fits(seen: GpuLabels, share: Share | None, profile: HardwareProfile) -> bool:
    gpu, vram = profile.spec.gpu, profile.spec.match.vram
    if not _is_partition(seen, share, gpu):
        return False
    if gpu.compute_units is not None and seen.compute_units not in (None, gpu.compute_units):
        return False
    memory = share.memory if share is not None and not gpu.partition.is_whole else seen.vram
    return vram is None or memory is None or memory == vram


def _is_partition(seen: GpuLabels, share: Share | None, gpu: GpuSpec) -> bool:
    if seen.partition is not None:
        return seen.partition == gpu.partition
    if share is None:
        return gpu.partition.is_whole
    return num_partitions(gpu.partition.compute, (gpu.card or share.card).compute_dies) == share.parts


def _notes(seen: GpuLabels, share: Share | None) -> Iterator[str]:
    if share is not None and share.is_virtual and share.is_whole:
        yield f"{seen.device_id} is a virtual function with its whole card; figures were taken without virtualisation"
    if seen.vram is None:
        yield f"{seen.where('vram')} is absent: memory was not checked; run AMD's node labeller with -vram"
    if seen.partition is None and seen.compute_units is None:
        yield f"{seen.where('compute-memory-partition')} is absent: nothing tells a partition from a card"
    named = re.search(r"MI\d{3}[A-Z]", seen.product_name or "")
    if share is not None and named is not None and named[0].lower() not in share.chip:
        yield f"{seen.where('product-name')} says {seen.product_name}; the device id {seen.device_id} decides"


def stale(seen: GpuLabels, share: Share) -> Problem | None:
    """Why labels of before and after a repartitioning cannot be believed; a virtual function may have less."""
    if seen.partition is None:
        return None
    units, memory = share.card.compute_units // share.parts, share.card.memory // share.parts
    has_other = seen.compute_units is not None and seen.compute_units != units
    remedy = "restart AMD's node labeller on the node, which reads them only when it starts"
    if has_other and not (share.is_virtual and share.compute_units < units):
        return Problem(
            seen.where("cu-count"), str(seen.compute_units),
            f"{units} with compute-memory-partition {seen.partition}", remedy,
        )  # fmt: skip
    # More is no contradiction: older labellers state the whole card's.
    if seen.vram is not None and seen.vram + GIB < memory and not share.is_virtual:
        return Problem(
            seen.where("vram"), f"{seen.vram // GIB}G",
            f"{memory // GIB}G with compute-memory-partition {seen.partition}", remedy,
        )  # fmt: skip
    return None


def _exceeding(seen: GpuLabels, card: CardSpec) -> str | None:
    """The label that states more than all of the card; memory is rounded to whole GiB."""
    if (seen.vram or 0) >= card.memory + GIB:
        return "vram"
    return "cu-count" if (seen.compute_units or 0) > card.compute_units else None


def beyond_card(seen: GpuLabels, share: Share) -> Problem | None:
    """Why labels that state more than all of the card cannot be believed, with a partition or without."""
    label = _exceeding(seen, share.card)
    if label is None:
        return None
    is_vram = label == "vram"
    got = f"{(seen.vram or 0) // GIB}G" if is_vram else str(seen.compute_units)
    most = f"{share.card.memory // GIB}G" if is_vram else str(share.card.compute_units)
    return Problem(
        seen.where(label), got, f"at most {most}, all of a card with device id {seen.device_id} ({share.chip})",
        "restart AMD's node labeller on the node; if the card does have more, write a HardwareProfile for "
        f"{seen.device_id} that says so in gpu.card",
    )  # fmt: skip


def _part_of_card(seen: GpuLabels, share: Share | None) -> Problem | None:
    partition = seen.partition or PartitionSpec()
    own = f"write a profile for such GPUs: {drafted_by(seen.node)}"
    if share is not None and share.is_virtual and not share.is_whole:
        label = "vram" if share.memory + GIB <= share.card.memory else "cu-count"
        got = f"{seen.device_id}: {share}"
        return Problem(seen.where(label), got, "whole cards", f"give the virtual machine one function a card, or {own}")
    if partition.is_whole and (share is None or share.parts == 1):
        return None
    what = "" if share is None else f": {share}, one of {share.parts}"
    label, value = _tells_partition(seen)
    return Problem(
        seen.where(label), f"{value}{what}", "whole cards, spx_nps1",
        f"set compute partition SPX and memory partition NPS1 with AMD's device config manager or amd-smi, or {own}",
    )  # fmt: skip


def _tells_partition(seen: GpuLabels) -> tuple[str, str]:
    """The label that shows a part of a card, and its value."""
    if seen.partition is not None:
        return "compute-memory-partition", str(seen.partition)
    if seen.compute_units is not None:
        return "cu-count", str(seen.compute_units)
    return "vram", f"{(seen.vram or 0) // GIB}G"


def _other_memory(seen: GpuLabels, candidates: Mapping[str, HardwareProfile]) -> Problem:
    specs = {name: one.spec for name, one in candidates.items()}
    if seen.vram is not None and seen.vram not in [spec.match.vram for spec in specs.values()]:
        label, got = "vram", f"{seen.vram // GIB}G"
        known = [f"{(spec.match.vram or spec.gpu.memory) // GIB}G ({name})" for name, spec in specs.items()]
    else:
        label, got = "cu-count", str(seen.compute_units)
        known = [f"{spec.gpu.compute_units} ({name})" for name, spec in specs.items()]
    return Problem(
        seen.where(label), got, f"with device id {seen.device_id}: {', '.join(known)}",
        f"check the card, or write a profile for it: {drafted_by(seen.node)}",
    )  # fmt: skip


def _unfit(seen: GpuLabels, share: Share | None, profiles: Mapping[str, HardwareProfile]) -> Problem:
    """Why no profile of this device id describes these GPUs."""
    excess = None if share is None else beyond_card(seen, share)
    return excess or _part_of_card(seen, share) or _other_memory(seen, candidates_of(seen, profiles))


def _another(seen: GpuLabels, fitting: list[str], profile: HardwareProfile) -> Problem:
    match, name = profile.spec.match, profile.metadata.name
    first = match.device_ids[0] if match.device_ids else "..."
    selector = "keep the pods off it with template.nodeSelector of both roles"
    if seen.device_id in match.device_ids:
        vram = "" if seen.vram is None else f", {seen.vram // GIB}G"
        got, expected = f"{seen.device_id}{vram} ({' or '.join(fitting)})", f"GPUs of {name}"
    else:
        got, expected = f"{seen.device_id} ({' or '.join(fitting)})", f"{' or '.join(match.device_ids)} ({name})"
        selector += f", such as amd.com/gpu.device-id: {first!r}"
    return Problem(seen.where("device-id"), got, expected, selector)


def _ambiguous(seen: GpuLabels, names: list[str]) -> Problem:
    return Problem(
        seen.where("device-id"), seen.device_id, f"one HardwareProfile that matches, not {', '.join(names)}",
        "name one in spec.hardware.profile, or make their match or gpu.partition differ",
    )  # fmt: skip


def _unknown_chip(seen: GpuLabels) -> Problem:
    name = CHIPS_WITHOUT_PROFILE.get(seen.device_id)
    return Problem(
        seen.where("device-id"), f"{seen.device_id} ({name})" if name else seen.device_id,
        "a device id in match.deviceIds of a HardwareProfile",
        f"write a profile for it: {drafted_by(seen.node)}, and marks what was not measured",
    )  # fmt: skip


def _passed_through(seen: GpuLabels) -> Problem:
    return Problem(
        seen.where("mode"), str(seen.mode), "container: GPUs that pods can use",
        "set driverType container in the node's DeviceConfig, or use other nodes",
    )  # fmt: skip


def _no_labels(node: str) -> Problem:
    return Problem(
        f"label amd.com/gpu.device-id of node {node}", "nothing", "the PCI device id of its GPUs, such as 74a1",
        "enable the node labeller of AMD's GPU operator (spec.devicePlugin.enableNodeLabeller in the DeviceConfig)",
    )  # fmt: skip


def _one(node: str, labels: Mapping[str, str], name: str) -> str | None:
    """A label's value. With cards of several kinds the labeller writes values into keys, each with its count."""
    for prefix in LABEL_PREFIXES:
        if prefix + name in labels:
            return labels[prefix + name]
    counted = {
        key.removeprefix(f"{prefix}{name}."): count
        for prefix in LABEL_PREFIXES
        for key, count in labels.items()
        if key.startswith(f"{prefix}{name}.")
    }
    if len(counted) <= 1:
        return next(iter(counted), None)
    kinds = ", ".join(f"{count} x {value}" for value, count in sorted(counted.items()))
    raise InvalidSpec((Problem(
        f"label amd.com/gpu.{name} of node {node}", kinds, "GPUs of one kind on a node",
        "partition all cards alike, or take the other cards out (AMD_GPU_DEVICE_COUNT hides some)",
    ),))  # fmt: skip


def _gib(node: str, text: str) -> int:
    """Bytes: the labeller writes 192G for 192 GiB."""
    try:
        amount = parse_bytes(text.removesuffix("i") + "i")
    except ValueError:
        amount = 0
    if not GIB <= amount <= MOST_MEMORY:
        raise _nonsense(node, "vram", text, "whole GiB such as 192G")
    return amount


def _count(node: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > MOST_DIGITS or not 0 < int(text) <= 4096:
        raise _nonsense(node, "cu-count", text, "a number of compute units such as 304")
    return int(text)


def _partition(node: str, text: str | None) -> PartitionSpec | None:
    """Drivers without partitions leave both halves empty."""
    if text is None or not text.strip("_"):
        return None
    compute, _, memory = text.upper().partition("_")
    try:
        return PartitionSpec(compute=ComputePartition(compute), memory=MemoryPartition(memory))
    except ValueError:
        modes = f"{'|'.join(ComputePartition)}_{'|'.join(MemoryPartition)} in lower case, such as spx_nps1"
        raise _nonsense(node, "compute-memory-partition", text, modes) from None


def _nonsense(node: str, name: str, got: str, expected: str) -> InvalidSpec:
    remedy = "correct the label, or restart AMD's node labeller on the node"
    return InvalidSpec((Problem(f"label amd.com/gpu.{name} of node {node}", shown(got), expected, remedy),))


def drafted_by(node: str) -> str:
    """What a remedy says of a profile that nobody has written yet."""
    return f"`kimictl profile from-node {node}` drafts it"


def shown(value: object, *, quoted: bool = True) -> str:
    """A wrong value in a message, cut."""
    try:
        text = repr(value) if quoted else str(value)
    except ValueError:
        # Of thousands of digits, which YAML can say in hexadecimal, Python writes no decimal number.
        text = "a number of thousands of digits"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."
