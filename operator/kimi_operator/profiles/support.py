"""Pure: whether the bundled worker may run on a node class, how well its rates are known, and what to warn of."""

from __future__ import annotations

from kimi_operator.api.profile import HardwareProfile, HardwareProfileSpec, WorkerSpec, WorkerSupport
from kimi_operator.errors import Problem

WORKER = "kimi-worker"
"""The engine that this project brings."""
TARGETS = frozenset({"gfx942", "cpu"})
"""Values of gpu.architecture that the bundled worker is made for."""

HOW_TO_MEASURE = (
    "measure a run and give its factors to the profile with kimictl profile calibrate, or set what you know in a "
    "HardwareProfile of your own: kimictl profile show {name} -o yaml > own.yaml, then -f own.yaml"
)


def worker_support(spec: HardwareProfileSpec) -> WorkerSpec:
    """What the profile says of the bundled worker; by its architecture when it says nothing."""
    if spec.worker is not None:
        return spec.worker
    if spec.gpu.architecture in TARGETS:
        return WorkerSpec(support=WorkerSupport.TARGET)
    lacks = f"the bundled worker is made for {' and '.join(sorted(TARGETS))}, not for {spec.gpu.architecture}"
    return WorkerSpec(support=WorkerSupport.UNTESTED, lacks=(lacks,))


def support_problem(profile: HardwareProfile) -> Problem | None:
    """Why no deployment may use this profile with the bundled worker; None when it may."""
    worker = worker_support(profile.spec)
    if worker.support is not WorkerSupport.UNSUPPORTED:
        return None
    return Problem(
        "spec.hardware.profile", f"{profile.metadata.name}: {'; '.join(worker.lacks) or 'worker.support Unsupported'}",
        "hardware that the bundled worker can run on", f"choose nodes of {' or '.join(sorted(TARGETS - {'cpu'}))}",
    )  # fmt: skip


def support_warning(profile: HardwareProfile) -> str | None:
    """What to say beside every plan on this hardware; None when the worker is made for it."""
    worker = worker_support(profile.spec)
    if worker.support is not WorkerSupport.UNTESTED:
        return None
    lacks = "; ".join(worker.lacks) or "nobody ran it there"
    return f"the bundled worker is untested on {profile.metadata.name} ({profile.spec.gpu.architecture}): {lacks}"


def rates_warning(profile: HardwareProfile) -> str | None:
    """What to say beside predictions on this hardware; None when what they rest on is known.

    A phase whose own factor is stated does not count: what was measured stands in for the rate.
    """
    spec = profile.spec
    own = spec.calibration if spec.calibration is not None and spec.calibration.engine == WORKER else None
    rests_on = {
        "gpu.hbmBytesPerSecond": ("decode", own and own.decode_factor),
        "gpu.bf16FlopsPerSecond": ("prefill", own and own.prefill_factor),
        "fabric.nicBytesPerSecond": ("the handoff", None),
    }
    figures, unmeasured = spec.figures(), spec.unmeasured()
    found = [
        f"{phase} on spec.{path} {figures[path]:,}: {unmeasured[path]}"
        for path, (phase, factor) in rests_on.items()
        if factor is None and path in unmeasured
    ]
    if not found:
        return None
    name = profile.metadata.name
    return f"predictions rest on what nobody measured of {name}: {'; '.join(found)}; {HOW_TO_MEASURE.format(name=name)}"
