"""Measured times as data: the built-in ones beside this file, as the planner's samples."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from msgspec import Struct
from msgspec.structs import replace
from pydantic import Field

from kimi_operator.api.base import ApiModel, parse
from kimi_operator.api.calibration import CalibrationSpec
from kimi_operator.api.profile import HardwareProfile
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.planner.architecture import Architecture
from kimi_operator.planner.figures import Explained
from kimi_operator.planner.fit import Sample, Use, calibrate, stated
from kimi_operator.planner.layout import divides
from kimi_operator.planner.memory import ITEMSIZE, ExpertFormat, GroupShape, expert_format
from kimi_operator.planner.predict import Calibration, Request
from kimi_operator.planner.roofline import (
    Attention,
    Chip,
    DecodeLoad,
    Decoding,
    Engine,
    Exchange,
    Graphs,
    PrefillLoad,
    Resident,
    Setup,
    Split,
)
from kimi_operator.profiles import architecture, built_in_profiles
from kimi_operator.profiles.support import WORKER

FILE = "measurements.yaml"
MODEL = "kimi-k3"

Name = Annotated[str, Field(min_length=1, max_length=128)]
Rate = Annotated[float, Field(gt=0, le=1e18, allow_inf_nan=False)]
Tokens = Annotated[int, Field(ge=1, le=16_777_216)]


class LinkFigures(ApiModel):
    """One link between two GPUs of a node, one way."""

    bytes_per_second: Rate
    source: str


class Float32Figures(ApiModel):
    """How many times as long a matrix product takes in float32 as in bfloat16."""

    slowdown: float = Field(ge=1, le=1024)
    source: str


class EngineFigures(ApiModel):
    """What bytes depend on in an engine."""

    experts: ExpertFormat
    kv_itemsize: int = Field(ge=1, le=4)
    resident: Resident
    attention: Attention = Attention.EXPANDED
    exchange: Exchange = Exchange.LIBRARY
    decoding: Decoding = Decoding.IN_REGISTERS
    source: str


class LayoutFigures(ApiModel):
    """A group: nodes, GPUs of each, ranks of a lane, and how ranks share routed experts."""

    nodes: int = Field(ge=1, le=64)
    gpus_per_node: int = Field(ge=1, le=64)
    tensor_parallel: int = Field(ge=1, le=64)
    split: Split = Split.BY_EXPERT

    @property
    def shape(self) -> GroupShape:
        """For the planner."""
        return GroupShape(self.nodes, self.gpus_per_node, self.tensor_parallel)


class _RunFigures(ApiModel):
    name: Name
    chip: Name
    engine: Name
    layout: LayoutFigures
    graphs: Graphs = Graphs.FULL
    source: str


class _PointFigures(_RunFigures):
    use: Use


class DecodeFigures(_PointFigures):
    """Mean time between two tokens with `concurrency` requests in the group at `context_tokens` each."""

    concurrency: int = Field(ge=1, le=1_000_000)
    context_tokens: Tokens
    tpot_ms: Rate
    reason: str = ""
    """What would explain that predictions miss it, or meet it by chance."""


class PrefillFigures(_PointFigures):
    """Time of one prompt alone in its group."""

    prompt_tokens: Tokens
    seconds: Rate


class RateFigures(_RunFigures):
    """Output tokens a second of one group of each role, both of `layout`, while clients keep `concurrency` going."""

    concurrency: int = Field(ge=1, le=1_000_000)
    prompt_tokens: Tokens
    output_tokens: Tokens
    chunk_tokens: Tokens
    tokens_per_second: Rate
    reason: str = ""
    """What would explain that the curve misses it."""


class Note(ApiModel):
    """A published figure that is shown with the reason why it does not reconcile, and never fitted."""

    name: Name
    published: float
    computed: float
    unit: str
    reason: str

    @property
    def explained(self) -> Explained:
        """For the row of the published figure."""
        return Explained(self.reason, self.published, self.computed)


class MeasurementFile(ApiModel):
    """The whole file."""

    links: dict[str, LinkFigures]
    engines: dict[str, EngineFigures]
    decode: tuple[DecodeFigures, ...]
    prefill: tuple[PrefillFigures, ...]
    throughput: tuple[RateFigures, ...] = ()
    notes: tuple[Note, ...] = ()
    float32: dict[str, Float32Figures] = Field(default_factory=dict)


class RateSample(Struct, frozen=True):
    """A measured throughput of one group of each role. Nothing is fitted on it."""

    name: str
    setup: Setup
    request: Request
    concurrency: int
    chunk_tokens: int
    tokens_per_second: float
    source: str
    reason: str = ""
    """What would explain that the curve misses it; empty where nothing has to be explained."""


class Measurements(Struct, frozen=True):
    """The file, read."""

    links: Mapping[str, float]
    """Bytes a second by instruction set."""
    engines: Mapping[str, Engine]
    samples: tuple[Sample, ...]
    notes: tuple[Note, ...]
    float32: Mapping[str, float]
    """Slowdown by instruction set."""
    rates: tuple[RateSample, ...] = ()

    def engine(self, name: str, where: str) -> Engine:
        """An engine by name. Raises InvalidSpec that lists the known ones; `where` is the field that named it."""
        return _known(self.engines, name, where)

    def chip(self, profile: HardwareProfile) -> Chip:
        """The GPU of a profile. Raises InvalidSpec when it states no memory bandwidth: nothing follows without it."""
        gpu, fabric, name = profile.spec.gpu, profile.spec.fabric, profile.metadata.name
        if gpu.hbm_bytes_per_second is None:
            field = f"HardwareProfile {name}: spec.gpu.hbmBytesPerSecond"
            raise InvalidSpec((Problem(field, "nothing", "bytes a second", "state the peak memory bandwidth"),))
        slowdown = self.float32.get(gpu.architecture)
        return Chip(
            name=name,
            isa=gpu.architecture,
            hbm_bytes_per_second=gpu.hbm_bytes_per_second,
            bf16_flops=gpu.bf16_flops_per_second,
            link_bytes_per_second=self.links.get(gpu.architecture),
            nic_bytes_per_second=fabric.nic_bytes_per_second,
            nics_per_node=fabric.nics_per_node,
            **({} if slowdown is None else {"float32_slowdown": slowdown}),
        )


def read_measurements(
    document: Mapping[str, Any], architecture: Architecture, profiles: Mapping[str, HardwareProfile], where: str
) -> Measurements:
    """Read a file of this form. Raises InvalidSpec that names each field which is wrong."""
    figures = parse(MeasurementFile, document, where)
    links = {name: link.bytes_per_second for name, link in figures.links.items()}
    engines = {name: _engine(name, e) for name, e in figures.engines.items()}
    float32 = {name: each.slowdown for name, each in figures.float32.items()}
    found = Measurements(links, engines, (), figures.notes, float32)
    points: list[DecodeFigures | PrefillFigures] = [*figures.decode, *figures.prefill]
    samples = (_sample(found, architecture, profiles, point, f"{where}:{point.name}") for point in points)
    rates = (_rate(found, architecture, profiles, point, f"{where}:{point.name}") for point in figures.throughput)
    return replace(found, samples=tuple(samples), rates=tuple(rates))


@cache
def built_in_measurements() -> Measurements:
    """The measurements that ship with the operator."""
    text = Path(__file__).with_name(FILE).read_text(encoding="utf-8")
    document = yaml.load(text, Loader=yaml.CSafeLoader)
    return read_measurements(document, architecture(MODEL), built_in_profiles(), FILE)


def worker_engine(profile: HardwareProfile) -> Engine:
    """The bundled worker on this hardware: what it holds experts, rows and other weights in."""
    runtime = profile.spec.runtime
    kv, own = ITEMSIZE[runtime.kv_cache_dtype], ITEMSIZE[runtime.dtype]
    experts = expert_format(runtime)
    decoding = Decoding.IN_MEMORY if experts is ExpertFormat.MXFP4 else Decoding.IN_REGISTERS
    return Engine(WORKER, experts, kv, Resident.AS_LOADED, own, Attention.LATENT, Exchange.ALL_TO_ALLS, decoding)


def calibration_for(setup: Setup, phase: type[DecodeLoad | PrefillLoad], own: CalibrationSpec | None) -> Calibration:
    """What a profile states of this engine, else the nearest factor of the built-in measurements."""
    if own is not None and own.engine == setup.engine.name:
        is_decode = phase is DecodeLoad
        factor = own.decode_factor if is_decode else own.prefill_factor
        band = own.decode_band_percent if is_decode else own.prefill_band_percent
        if factor is not None and band is not None:
            return stated(factor, band, own.measured_on)
    return calibrate(setup, phase, built_in_measurements().samples)


def check_layout(architecture: Architecture, shape: GroupShape, where: str) -> None:
    """Raises InvalidSpec when a layout does not split the model evenly."""
    if not divides(architecture, shape):
        expected = f"a layout that splits {architecture.num_experts} experts and {architecture.num_heads} heads evenly"
        raise InvalidSpec((Problem(f"{where}.layout", str(shape), expected, "state the layout that was measured"),))


def _engine(name: str, figures: EngineFigures) -> Engine:
    return Engine(
        name=name,
        experts=figures.experts,
        kv_itemsize=figures.kv_itemsize,
        resident=figures.resident,
        attention=figures.attention,
        exchange=figures.exchange,
        decoding=figures.decoding,
    )


def _sample(
    found: Measurements,
    a: Architecture,
    profiles: Mapping[str, HardwareProfile],
    point: DecodeFigures | PrefillFigures,
    where: str,
) -> Sample:
    setup = _setup(found, a, profiles, point, where)
    if isinstance(point, DecodeFigures):
        load = DecodeLoad(point.concurrency, point.context_tokens)
        return Sample(point.name, setup, load, point.tpot_ms / 1e3, point.use, point.source, point.reason)
    return Sample(point.name, setup, PrefillLoad(point.prompt_tokens), point.seconds, point.use, point.source)


def _rate(
    found: Measurements, a: Architecture, profiles: Mapping[str, HardwareProfile], point: RateFigures, where: str
) -> RateSample:
    return RateSample(
        name=point.name,
        setup=_setup(found, a, profiles, point, where),
        request=Request(point.prompt_tokens, point.output_tokens),
        concurrency=point.concurrency,
        chunk_tokens=point.chunk_tokens,
        tokens_per_second=point.tokens_per_second,
        source=point.source,
        reason=point.reason,
    )


def _setup(
    found: Measurements, a: Architecture, profiles: Mapping[str, HardwareProfile], point: _RunFigures, where: str
) -> Setup:
    check_layout(a, point.layout.shape, where)
    return Setup(
        architecture=a,
        chip=found.chip(_known(profiles, point.chip, f"{where}.chip")),
        shape=point.layout.shape,
        engine=found.engine(point.engine, f"{where}.engine"),
        split=point.layout.split,
        graphs=point.graphs,
    )


_T = TypeVar("_T")


def _known(known: Mapping[str, _T], name: str, where: str) -> _T:
    if name not in known:
        raise InvalidSpec((Problem(where, repr(name), f"one of {sorted(known)}", "name one of them"),))
    return known[name]
