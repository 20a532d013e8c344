"""Where the fields of one HardwareProfile contradict each other. Pure; each problem names field, value and remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from kimi_operator.errors import Problem

if TYPE_CHECKING:
    from kimi_operator.api.profile import HardwareProfileSpec

Figures: TypeAlias = dict[str, int | str]
"""Every number that the profile states, by its path."""
GIB = 2**30
PARTITIONS = {"SPX": 1, "DPX": 2, "TPX": 3, "QPX": 4}
"""GPUs that a mode makes of a card; CPX makes one of each compute die."""
SLOWEST_MEMORY = 10**11
"""Bytes a second: below it stands a figure in GB/s or TB/s."""
_SLOWEST = {
    "gpu.hbmBytesPerSecond": (SLOWEST_MEMORY, "bytes", "5.3 TB/s as 5300000000000"),
    "gpu.bf16FlopsPerSecond": (10**12, "operations", "1307.4 TFLOPS as 1307400000000000"),
    "fabric.nicBytesPerSecond": (10**8, "bytes", "400 Gb/s as 50000000000"),
}
"""Least of each rate, its unit and how to write it: what is less was stated with a prefix."""


def num_partitions(compute: str, compute_dies: int) -> int:
    """Into how many GPUs a compute mode (SPX, DPX, TPX, QPX, CPX) splits a card of so many dies."""
    return PARTITIONS.get(compute, compute_dies)


def contradictions(name: str, spec: HardwareProfileSpec) -> Iterator[Problem]:
    """Everything that cannot be true at once in the profile called `name`."""
    where, figures = f"HardwareProfile {name}: spec", spec.figures()
    yield from _match(where, spec)
    yield from _card(where, spec)
    yield from _reserve(where, spec, figures)
    yield from _rates(where, spec, figures)
    yield from _runtime(where, spec)
    yield from _basis(where, spec, figures)


def _match(where: str, spec: HardwareProfileSpec) -> Iterator[Problem]:
    match = spec.match
    if match.vram is not None and not match.device_ids:
        yield Problem(
            f"{where}.match.deviceIds", "nothing", "at least one device id beside match.vram",
            "add the values of the nodes' label amd.com/gpu.device-id, or remove match.vram",
        )  # fmt: skip
    for device in match.virtual_device_ids:
        if device not in match.device_ids:
            yield Problem(
                f"{where}.match.virtualDeviceIds", device, f"some of match.deviceIds {list(match.device_ids)}",
                "add it to match.deviceIds too, or remove it",
            )  # fmt: skip
    # The label is rounded to whole GiB, and a driver keeps a little for itself.
    if match.vram is not None and spec.gpu.memory > match.vram + GIB // 2:
        yield Problem(
            f"{where}.gpu.memory", _gib(spec.gpu.memory), f"at most match.vram {_gib(match.vram)}",
            "lower it to what programs see, or correct match.vram",
        )  # fmt: skip


def _card(where: str, spec: HardwareProfileSpec) -> Iterator[Problem]:
    gpu, card = spec.gpu, spec.gpu.card
    if card is None:
        if not gpu.partition.is_whole:
            yield Problem(
                f"{where}.gpu.card", "nothing", f"the card that a {gpu.partition} GPU is a part of",
                "set gpu.card.memory, computeUnits and computeDies",
            )  # fmt: skip
        return
    parts = num_partitions(gpu.partition.compute, card.compute_dies)
    part = f"a {gpu.partition} GPU is 1/{parts} of its card" if parts > 1 else "a GPU is the whole card"
    if gpu.memory > card.memory // parts:
        yield Problem(
            f"{where}.gpu.memory", _gib(gpu.memory),
            f"at most {_gib(card.memory // parts)}: {part} of {_gib(card.memory)} (gpu.card.memory)",
            f"lower it to {card.memory // parts}, or correct gpu.partition or gpu.card.memory",
        )  # fmt: skip
    if gpu.compute_units is not None and gpu.compute_units > card.compute_units // parts:
        yield Problem(
            f"{where}.gpu.computeUnits", str(gpu.compute_units),
            f"at most {card.compute_units // parts}: {part} of {card.compute_units} (gpu.card.computeUnits)",
            f"lower it to {card.compute_units // parts}, or correct gpu.partition or gpu.card.computeUnits",
        )  # fmt: skip
    if gpu.per_node % parts:
        yield Problem(
            f"{where}.gpu.perNode", str(gpu.per_node), f"a multiple of {parts}: {part}",
            "count GPUs, not cards: the node's allocatable amount of gpu.resource",
        )  # fmt: skip


def _reserve(where: str, spec: HardwareProfileSpec, figures: Figures) -> Iterator[Problem]:
    if spec.runtime.device == "cpu":
        # There gpu.memory is a budget that somebody chose, and the plan says what does not fit it.
        return
    amounts = {path: value for path, value in figures.items() if path.startswith("reserve.")}
    total = sum(int(value) for value in amounts.values())
    if total >= spec.gpu.memory:
        parts = " + ".join(f"{path.partition('.')[2]} {_gib(int(value))}" for path, value in amounts.items() if value)
        yield Problem(
            f"{where}.reserve", f"{parts} = {_gib(total)}", f"less than gpu.memory {_gib(spec.gpu.memory)}",
            "lower the reserves to what was measured on this hardware, or correct gpu.memory",
        )  # fmt: skip


def _rates(where: str, spec: HardwareProfileSpec, figures: Figures) -> Iterator[Problem]:
    if spec.runtime.device != "cuda":
        return
    for path, (least, unit, remedy) in _SLOWEST.items():
        rate = int(figures.get(path, least))
        if rate < least:
            yield Problem(
                f"{where}.{path}", f"{rate:,}", f"{unit} a second, at least {least:,} on a GPU",
                f"write {remedy}, or leave it out while it is unknown",
            )  # fmt: skip


def _runtime(where: str, spec: HardwareProfileSpec) -> Iterator[Problem]:
    runtime, fabric = spec.runtime, spec.fabric
    if runtime.device == "cpu" and runtime.collectives != "gloo":
        yield Problem(
            f"{where}.runtime.collectives", str(runtime.collectives), "gloo where runtime.device is cpu", "set gloo"
        )
    if fabric.transport == "MoRIIO" and fabric.fence != "read_back":
        yield Problem(
            f"{where}.fabric.fence", fabric.fence,
            "read_back with transport MoRIIO, whose writes complete before their bytes are seen", "set read_back",
        )  # fmt: skip
    if fabric.transport == "MoRIIO" and runtime.device == "cpu":
        yield Problem(f"{where}.fabric.transport", "MoRIIO", "NIXL where runtime.device is cpu", "set NIXL")


def _basis(where: str, spec: HardwareProfileSpec, figures: Figures) -> Iterator[Problem]:
    for path in spec.basis:
        if not any(f"{figure}.".startswith(f"{path}.") for figure in figures):
            yield Problem(
                f"{where}.basis", path, "path of a figure that this profile states, such as reserve.contexts",
                "correct the path or remove it",
            )  # fmt: skip


def _gib(amount: int) -> str:
    return f"{amount / GIB:.2f} GiB" if amount >= GIB // 100 else f"{amount:,} B"
