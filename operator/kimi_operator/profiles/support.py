"""Pure: whether the bundled worker may run on a node class, and what to warn of."""

from __future__ import annotations

from kimi_operator.api.profile import HardwareProfile, HardwareProfileSpec, WorkerSpec, WorkerSupport
from kimi_operator.errors import Problem

TARGETS = frozenset({"gfx942", "cpu"})
"""Values of gpu.architecture that the bundled worker is made for."""


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
