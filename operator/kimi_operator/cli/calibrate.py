"""`kimictl profile calibrate`: fit a profile's speed to a measured run, and show what that changes."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from cyclopts import Parameter
from msgspec import Struct
from msgspec.structs import replace

from kimi_operator.api.base import API_VERSION, dump, parse
from kimi_operator.api.calibration import CalibrationSpec
from kimi_operator.api.profile import HardwareProfile
from kimi_operator.cli.files import profiles_in
from kimi_operator.cli.flags import Whole, read_choice, refuse
from kimi_operator.cli.held_out import PHASES
from kimi_operator.cli.results import Results, read_results
from kimi_operator.planner.fit import MOST_FACTOR, Change, Sample, Use, refit
from kimi_operator.planner.roofline import DecodeLoad, PrefillLoad, Setup, Split
from kimi_operator.planner.units import ceil_div, counted
from kimi_operator.profiles import architecture as built_in_architecture
from kimi_operator.profiles.draft import NAME
from kimi_operator.profiles.measurements import (
    MODEL,
    built_in_measurements,
    calibration_for,
    check_layout,
    worker_engine,
)
from kimi_operator.profiles.support import WORKER

Output = Literal["text", "json", "yaml"]
UNITS = {"decode": "tpotMs, which is in milliseconds", "prefill": "seconds, which are no milliseconds"}
MOST_BETWEEN_REPEATS = 1.5
"""Slowest over fastest time of one load. Runs in a row lie within some percent; a unit or a setup apart is far more."""
MOST_BETWEEN_POINTS = 2.0
"""A point over what the others predict for it, from which on the user is told that no factor fits them."""


class Calibrated(Struct, frozen=True):
    """What came of a run: the samples and the change of each phase that was measured."""

    results: Results
    profile: str
    setup: Setup
    samples: dict[str, list[Sample]]
    changes: dict[str, Change]


def calibrate(  # noqa: PLR0913 - the options of a command
    results: Annotated[Path, Parameter(allow_leading_hyphen=True)],
    *,
    chip: str | None = None,
    engine: str | None = None,
    architecture: str | None = None,
    nodes: Whole = None,
    gpus_per_node: Whole = None,
    tensor_parallel: Whole = None,
    groups: Whole = None,
    name: str | None = None,
    file: Annotated[list[Path] | None, Parameter(name=["--file", "-f"], allow_leading_hyphen=True, negative=())] = None,
    output: Annotated[Output, Parameter(name=["--output", "-o"], converter=read_choice, n_tokens=1)] = "text",
) -> int:
    """`kimictl profile calibrate`; its help stands beside the list of commands.

    Parameters
    ----------
    results
        What `kimictl needle -o json` or `make bench` wrote, or YAML with chip, layout, and lists of
        points: decode with concurrency (of those that decode), contextTokens and tpotMs, prefill with promptTokens and
        seconds; `-` is standard input.
    chip
        Hardware profile of the GPUs that were measured, where the file does not say it.
    engine
        Software that was measured; kimi-worker by default.
    architecture
        Model that was served; kimi-k3 by default, kimi-k3-tiny for the tiny one.
    nodes
        Nodes of a group; with gpus-per-node and tensor-parallel, where the file states no layout.
    gpus_per_node
        GPUs of each node.
    tensor_parallel
        GPUs of a lane.
    groups
        Groups of decode that shared the load; 1 by default.
    name
        Print the whole profile under this name, which `kimictl plan -f` takes, not the fragment for a cluster's.
    file
        YAML with your own HardwareProfiles. Can be repeated.
    output
        text, json, or yaml: the fragment or the profile alone.
    """
    layout = _layout(nodes, gpus_per_node, tensor_parallel)
    options = {"chip": chip, "engine": engine, "architecture": architecture, "layout": layout, "groups": groups}
    read = read_results(results, {name: value for name, value in options.items() if value is not None})
    profiles = profiles_in(file or [])
    done = _calibrate(read, profiles, str(results))
    contradictions = list(_contradictions(done))
    fragment = None if contradictions else _fragment(done)
    whole = None if fragment is None or name is None else _whole(profiles[done.profile], fragment, name)
    if output == "json":
        named = {} if name is None else {"wholeProfile": whole}
        sys.stdout.write(json.dumps(_document(done) | {"fragment": fragment} | named, indent=2) + "\n")
    else:
        sys.stdout.write("".join(f"{line}\n" for line in (_text(done) if output == "text" else ())))
        sys.stdout.write("" if fragment is None else _printed(whole or fragment, output, is_whole=whole is not None))
    sys.stderr.write("".join(f"kimictl: {warning}\n" for warning in (*_warnings(done), *contradictions)))
    return 1 if contradictions else 0


def _printed(document: Mapping[str, Any], output: Output, *, is_whole: bool) -> str:
    """The fragment or the profile alone as YAML, or as text after how to use it."""
    name = document["metadata"]["name"]
    how = ""
    if output == "text" and is_whole:
        how = f"\nsave it with -o yaml, then {_planning(name)}:\n"
    elif output == "text":
        how = (
            f"\nwithout a cluster: --name {name}-measured -o yaml gives the whole profile, then "
            f"{_planning(f'{name}-measured')}\n\nfor a cluster's profile; save it with -o yaml, then kubectl patch "
            f"hardwareprofile {name} --type merge --patch-file FILE:\n"
        )
    return how + yaml.safe_dump(dict(document), sort_keys=False, width=120, allow_unicode=True)


def _planning(name: str) -> str:
    return f"kimictl plan -f FILE --chip {name}, or -f MANIFEST -f FILE with spec.hardware.profile: {name}"


def _whole(profile: HardwareProfile, fragment: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The profile as the fragment leaves it, under a name of its own. Raises InvalidSpec for what is no name."""
    if not NAME.fullmatch(name):
        expected = "a name of lower-case letters, digits, dots and hyphens"
        raise refuse("--name", repr(name), expected, f"write {profile.metadata.name}-measured")
    document = dump(profile)
    calibration = document["spec"].get("calibration") or {}
    document["metadata"] = {"name": name}
    document["spec"]["calibration"] = calibration | fragment["spec"]["calibration"]
    parse(HardwareProfile, document)
    return document


def _layout(nodes: int | None, gpus_per_node: int | None, tensor_parallel: int | None) -> dict[str, int] | None:
    given = {"nodes": nodes, "gpusPerNode": gpus_per_node, "tensorParallel": tensor_parallel}
    stated = {name: value for name, value in given.items() if value is not None}
    if stated and len(stated) < len(given):
        missing = ", ".join(sorted(given.keys() - stated.keys()))
        raise refuse("--nodes, --gpus-per-node, --tensor-parallel", f"no {missing}", "all three", "state the others")
    return stated or None


def _calibrate(results: Results, profiles: Mapping[str, HardwareProfile], where: str) -> Calibrated:
    """Fit each phase that the run has points of. Raises InvalidSpec for what it does not state or what cannot be."""
    if results.chip is None or results.chip not in profiles:
        got = "nothing" if results.chip is None else repr(results.chip)
        raise refuse(
            f"{where}: chip", got, f"one of {sorted(profiles)}", "state it, or --chip, or add a profile with -f"
        )
    if results.layout is None:
        remedy = "state it, or --nodes, --gpus-per-node and --tensor-parallel"
        raise refuse(f"{where}: layout", "nothing", "nodes, gpusPerNode and tensorParallel", remedy)
    published, profile = built_in_measurements(), profiles[results.chip]
    model = built_in_architecture(results.architecture)
    check_layout(model, results.layout.shape, where)
    is_worker = results.engine == WORKER
    setup = Setup(
        architecture=model,
        chip=published.chip(profile),
        shape=results.layout.shape,
        engine=worker_engine(profile) if is_worker else published.engine(results.engine, f"{where}: engine"),
        split=Split[results.layout.split.name],
        graphs=results.graphs,
    )
    step_tokens = results.prefill_batched_tokens or profile.spec.limits.prefill_batched_tokens
    samples = {
        name: _one_a_load(found, f"{where}: {name}")
        for name, found in _samples(results, setup, step_tokens).items()
        if found
    }
    changes = {}
    for name, measured in samples.items():
        own = profile.spec.calibration
        try:
            changes[name] = refit(measured, calibration_for(setup, PHASES[name], own), published.samples)
        except ValueError as error:
            remedy = f"check {UNITS[name]}, model, layout and chip, and the bandwidth and FLOPs in the profile"
            expected = f"a time that the chip can reach, and no more than {MOST_FACTOR} times as long"
            raise refuse(f"{where}: {name}", str(error), expected, remedy) from error
    return Calibrated(results, profile.metadata.name, setup, samples, changes)


def _samples(results: Results, setup: Setup, step_tokens: int) -> dict[str, list[Sample]]:
    decode = [
        Sample(
            name=f"{counted(point.concurrency, 'request')} at {counted(point.context_tokens, 'token')}",
            setup=setup,
            load=DecodeLoad(ceil_div(point.concurrency, results.groups), point.context_tokens),
            measured_s=point.tpot_ms / 1e3,
            use=Use.FITTED,
            source="",
        )
        for point in results.decode
    ]
    prefill = [
        Sample(
            name=counted(point.prompt_tokens, "token"),
            setup=setup,
            load=PrefillLoad(point.prompt_tokens, chunk_tokens=step_tokens),
            measured_s=point.seconds,
            use=Use.FITTED,
            source="",
        )
        for point in results.prefill
    ]
    return {"decode": decode, "prefill": prefill}


def _one_a_load(samples: list[Sample], field: str) -> list[Sample]:
    """Repeats of a load as one point, at their geometric mean: counted each, they would narrow the band.

    Raises InvalidSpec when they contradict each other.
    """
    repeats: dict[DecodeLoad | PrefillLoad, list[Sample]] = {}
    for sample in samples:
        repeats.setdefault(sample.load, []).append(sample)
    merged = []
    for same in repeats.values():
        times_s = [sample.measured_s for sample in same]
        if max(times_s) > MOST_BETWEEN_REPEATS * min(times_s):
            got = f"{1e3 * min(times_s):.4g} and {1e3 * max(times_s):.4g} ms for {same[0].name}"
            expected = f"times of one load within a factor of {MOST_BETWEEN_REPEATS:g}"
            raise refuse(field, got, expected, "leave out the disturbed run, or check units, layout and groups")
        name = same[0].name if len(same) == 1 else f"{same[0].name}, {len(same)} times"
        merged.append(replace(same[0], name=name, measured_s=statistics.geometric_mean(times_s)))
    return merged


def _warnings(done: Calibrated) -> Iterator[str]:
    """What the user should know before the fragment is applied."""
    given = {"decode": len(done.results.decode), "prefill": len(done.results.prefill)}
    for name, samples in done.samples.items():
        if given[name] > len(samples):
            yield f"{name}: {given[name]} points of {len(samples)} loads; repeats count as one, at their geometric mean"
    if done.results.architecture != MODEL:
        yield f"measured with {done.results.architecture}; its factor says little about {MODEL}"


def _contradictions(done: Calibrated) -> Iterator[str]:
    """Points of a phase that no factor fits: each with what the others predict for it."""
    for name, samples in done.samples.items():
        errors = done.changes[name].errors_left_out
        far = max((abs(math.log1p(error)) for error in errors), default=0.0)
        if far <= math.log(MOST_BETWEEN_POINTS):
            continue
        yield (
            f"{name}: the points contradict each other: one is {math.exp(far):,.1f} times off what the others say, so "
            "that no factor is given; check units, layout, groups and engine of each, and leave out what is wrong"
        )
        for sample, error in zip(samples, errors, strict=True):
            measured = 1e3 * sample.measured_s
            yield f"  {sample.name}: {measured:,.2f} ms, the others say {measured * (1 + error):,.2f} ms ({error:+.1%})"


def _fragment(done: Calibrated) -> dict[str, Any]:
    """The part of a HardwareProfile that states the new factors; read back once, so that it can be applied."""
    calibration: dict[str, Any] = {"engine": done.results.engine}
    for name, change in done.changes.items():
        calibration[f"{name}Factor"] = float(f"{change.after.factor():.5g}")
        # never narrower than it is
        calibration[f"{name}BandPercent"] = math.ceil(1e3 * math.expm1(change.after.error)) / 10
    shape = done.setup.shape
    calibration["layout"] = {
        "nodes": shape.nodes,
        "gpusPerNode": shape.gpus_per_node,
        "tensorParallel": shape.tensor_parallel,
    }
    loads = ", ".join(f"{len(samples)} of {name}" for name, samples in done.samples.items())
    what = f"{done.results.architecture} on {done.setup.shape}, points: {loads}"
    calibration["measuredOn"] = "; ".join(part for part in (what, done.results.measured_on) if part)[:256]
    spec = parse(CalibrationSpec, calibration, "calibration")
    return {
        "apiVersion": API_VERSION,
        "kind": "HardwareProfile",
        "metadata": {"name": done.profile},
        "spec": {"calibration": dump(spec)},
    }


def _document(done: Calibrated) -> dict[str, Any]:
    return {
        "profile": done.profile,
        "engine": done.results.engine,
        "layout": str(done.setup.shape),
        "phases": {name: _phase_document(change, done.samples[name]) for name, change in done.changes.items()},
    }


def _phase_document(change: Change, samples: list[Sample]) -> dict[str, Any]:
    left_out: tuple[float | None, ...] = change.errors_left_out or (None,) * len(samples)
    rows = zip(samples, change.errors_before, change.errors_after, left_out, strict=True)
    return {
        "factorBefore": change.before.factor(),
        "factorAfter": change.after.factor(),
        "bandPercentBefore": 100 * math.expm1(change.before.error),
        "bandPercentAfter": 100 * math.expm1(change.after.error),
        "calibratedOnBefore": change.before.text,
        "calibratedOnAfter": change.after.text,
        "points": [
            {
                "load": sample.name,
                "measuredMs": sample.measured_s * 1e3,
                "errorBefore": before,
                "errorAfter": after,
                "errorLeftOut": alone,
            }
            for sample, before, after, alone in rows
        ],
    }


def _text(done: Calibrated) -> Iterator[str]:
    yield f"{done.profile}, {done.results.engine}, {done.setup.architecture.name}: {done.setup.shape}"
    for name, change in done.changes.items():
        old, new = change.before.factor(), change.after.factor()
        yield ""
        yield f"{name} factor {old:.3f} -> {new:.3f} ({new / old - 1:+.1%})"
        bands = (math.expm1(each.error) for each in (change.before, change.after))
        yield "  band  {:.1%} -> {:.1%}".format(*bands)
        yield f"  before: {change.before.text}"
        yield f"  after: {change.after.text}"
        yield f"  {'measured':<34} {'ms':>12} {'error before':>13} {'after':>8} {'left out':>9}"
        for point in _phase_document(change, done.samples[name])["points"]:
            errors = (_percent(point[error]) for error in ("errorBefore", "errorAfter", "errorLeftOut"))
            yield "  {:<34} {:>12,.2f} {:>13} {:>8} {:>9}".format(point["load"], point["measuredMs"], *errors)


def _percent(share: float | None) -> str:
    """Signed, with no minus before a zero."""
    return "-" if share is None else f"{round(share, 3) + 0.0:+.1%}"
