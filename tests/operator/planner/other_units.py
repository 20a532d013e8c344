"""The same question in smaller bytes, tokens or seconds: the answer must be the same answer, in those units.

Sizes that the planner holds itself (of numbers, blocks, latencies) are changed inside a `with`; what a caller states is
converted by the functions beside it. `k` is how many new units make an old one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kimi_operator.api.profile import DType, HardwareProfile
from kimi_operator.planner import memory, predict, roofline, unified
from kimi_operator.planner.roofline import ASSUMED, ASSUMED_RANGES, Chip, Setup
from kimi_operator.planner.tensors import Tensor
from kimi_operator.profiles.measurements import built_in_measurements
from msgspec.structs import asdict, fields, force_setattr, replace

LATENCIES = [field.name for field in fields(ASSUMED) if field.name.endswith("_s")]
RATES = [field.name for field in fields(Chip) if field.name.endswith(("_per_second", "_flops"))]


@contextmanager
def smaller_bytes(k: int) -> Iterator[None]:
    """A byte is 1/k of what it was: every number in memory takes k times as many."""
    held, stored, links = Tensor.resident_bytes, Tensor.bytes, built_in_measurements().links
    with pytest.MonkeyPatch.context() as patch, _nothing_remembered():
        for dtype, size in memory.ITEMSIZE.items():
            patch.setitem(memory.ITEMSIZE, dtype, size * k)
        for name, (bits, scale_bits) in memory._EXPERT_BITS.items():
            patch.setitem(memory._EXPERT_BITS, name, (bits * k, scale_bits * k))
        patch.setattr(memory, "STATE_ITEMSIZE", memory.STATE_ITEMSIZE * k)
        for name in ("ROW_ITEMSIZE", "SUM_ITEMSIZE", "CHOICE_BYTES"):
            patch.setattr(roofline, name, getattr(roofline, name) * k)
        patch.setattr(Tensor, "resident_bytes", lambda self, itemsize: held(self, itemsize // k) * k)
        patch.setattr(Tensor, "bytes", property(lambda self: stored.__get__(self) * k))
        for isa, rate in links.items():
            patch.setitem(links, isa, rate * k)
        yield


@contextmanager
def smaller_tokens(k: int) -> Iterator[None]:
    """A token is 1/k of what it was. Rows of float32 take what those of `larger_rows` take for k of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unified, "ALIGNMENT_TOKENS", unified.ALIGNMENT_TOKENS * k)
        yield


@contextmanager
def larger_rows(k: int) -> Iterator[None]:
    """A cached number of float32 takes k times its bytes: what k smaller tokens together take without this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(memory.ITEMSIZE, DType.FLOAT32, memory.ITEMSIZE[DType.FLOAT32] * k)
        yield


@contextmanager
def shorter_seconds(k: int) -> Iterator[None]:
    """A second is 1/k of what it was: every latency takes k times as many."""
    links, before = built_in_measurements().links, {name: getattr(ASSUMED, name) for name in LATENCIES}
    with pytest.MonkeyPatch.context() as patch, _nothing_remembered():
        for name, (least, most) in ASSUMED_RANGES.items():
            if name in LATENCIES:
                patch.setitem(ASSUMED_RANGES, name, (least * k, most * k))
        for isa, rate in links.items():
            patch.setitem(links, isa, rate / k)
        try:
            # the one value is the default of many arguments, so it is changed in place
            for name, seconds in before.items():
                force_setattr(ASSUMED, name, seconds * k)
            yield
        finally:
            for name, seconds in before.items():
                force_setattr(ASSUMED, name, seconds)


@contextmanager
def _nothing_remembered() -> Iterator[None]:
    """What the planner keeps of sizes in these units is dropped before and after."""
    remembered = (memory._resident_parts, roofline._trunk_bytes, predict._refits)
    try:
        for function in remembered:
            function.cache_clear()
        yield
    finally:
        for function in remembered:
            function.cache_clear()


def profile_in_bytes(profile: HardwareProfile, k: int) -> HardwareProfile:
    """A profile in smaller bytes. Not validated: figures may be far beyond any hardware."""
    spec = profile.spec
    gpu, fabric = _multiplied(spec.gpu, ("memory", "hbm_bytes_per_second"), k), spec.fabric
    reserve = _multiplied(spec.reserve, tuple(type(spec.reserve).model_fields), k)
    changed = {"gpu": gpu, "reserve": reserve, "fabric": _multiplied(fabric, ("nic_bytes_per_second",), k)}
    return profile.model_copy(update={"spec": spec.model_copy(update=changed)})


def profile_in_tokens(profile: HardwareProfile, k: int) -> HardwareProfile:
    """A profile in smaller tokens."""
    limits = profile.spec.limits
    names = tuple(name for name in type(limits).model_fields if "tokens" in name)
    return profile.model_copy(
        update={"spec": profile.spec.model_copy(update={"limits": _multiplied(limits, names, k)})}
    )


def profile_in_seconds(profile: HardwareProfile, k: int) -> HardwareProfile:
    """A profile in shorter seconds: all rates are lower."""
    spec = profile.spec
    gpu = _multiplied(spec.gpu, ("hbm_bytes_per_second", "bf16_flops_per_second"), 1 / k)
    fabric = _multiplied(spec.fabric, ("nic_bytes_per_second",), 1 / k)
    return profile.model_copy(update={"spec": spec.model_copy(update={"gpu": gpu, "fabric": fabric})})


def setup_in_bytes(setup: Setup, k: int) -> Setup:
    """A group in smaller bytes."""
    engine = replace(setup.engine, kv_itemsize=setup.engine.kv_itemsize * k, itemsize=setup.engine.itemsize * k)
    rates = {name: rate * k for name, rate in _rates(setup.chip).items() if name.endswith("_bytes_per_second")}
    return replace(setup, engine=engine, chip=replace(setup.chip, **rates))


def setup_in_seconds(setup: Setup, k: int) -> Setup:
    """A group in shorter seconds."""
    return replace(setup, chip=replace(setup.chip, **{name: rate / k for name, rate in _rates(setup.chip).items()}))


def numbers(value: Any) -> dict[str, Any]:
    """What a plan or a solution states, field by field, without its sentences."""
    texts = {"binds", "lines", "bounds", "misses", "doubts"}
    return {name: each for name, each in asdict(value).items() if name not in texts}


def in_units(value: Any, k: int, *endings: str) -> dict[str, Any]:
    """The numbers with those multiplied whose names end in one of these units."""
    return {name: each * k if name.endswith(endings) else each for name, each in numbers(value).items()}


def _rates(chip: Chip) -> dict[str, float]:
    return {name: rate for name in RATES if (rate := getattr(chip, name)) is not None}


def _multiplied(model: Any, names: tuple[str, ...], k: float) -> Any:
    values = {name: getattr(model, name) * k for name in names if getattr(model, name) is not None}
    # a rate of a profile is a whole number, as the API has it
    whole = {name: int(value) if value == int(value) else value for name, value in values.items()}
    return model.model_copy(update=whole)
