"""Predicted times on the hardware of a profile: by its own calibration, else by the nearest measurements."""

from __future__ import annotations

from msgspec.structs import replace

from kimi_operator.api.calibration import CalibrationSpec
from kimi_operator.api.deployment import KimiDeploymentSpec
from kimi_operator.api.profile import DType, HardwareProfile
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.planner.architecture import Architecture
from kimi_operator.planner.demand import TimingOf
from kimi_operator.planner.memory import ITEMSIZE, GroupShape
from kimi_operator.planner.objective import Forecast
from kimi_operator.planner.plan import Infeasible, Plan, make_plan
from kimi_operator.planner.predict import Calibration
from kimi_operator.planner.roofline import DecodeLoad, Graphs, PrefillLoad, Setup
from kimi_operator.planner.workload import Workload
from kimi_operator.profiles.measurements import built_in_measurements, calibration_for, worker_engine
from kimi_operator.profiles.support import support_problem, support_warning


def plan_on(a: Architecture, spec: KimiDeploymentSpec, profile: HardwareProfile) -> Plan | Infeasible:
    """The plan of a deployment, with predictions where its workload has targets.

    Hardware that the bundled worker cannot run on is refused, and one that it was never run on is warned of.
    """

    def speed(kv_dtype: DType, workload: Workload) -> TimingOf:
        return timing_of(a, profile, kv_dtype, workload)

    plan = make_plan(a, spec, profile, speed)
    if unsupported := support_problem(profile):
        other = plan if isinstance(plan, Infeasible) else Infeasible(())
        return replace(other, problems=(unsupported, *other.problems))
    warning = support_warning(profile)
    if warning is None or isinstance(plan, Infeasible):
        return plan
    return replace(plan, warnings=(warning, *plan.warnings))


def forecast_of(a: Architecture, profile: HardwareProfile, kv_dtype: DType, workload: Workload) -> Forecast:
    """Times of the bundled worker under a workload, on any layout of these GPUs.

    Raises InvalidSpec when the profile does not state bandwidth and FLOPs: no time follows without them.
    """
    if profile.spec.gpu.bf16_flops_per_second is None:
        decode_forecast(a, profile, kv_dtype)
        field = f"HardwareProfile {profile.metadata.name}: spec.gpu.bf16FlopsPerSecond"
        remedy = "state the peak of dense bfloat16 in a HardwareProfile of your own, then kimictl profile calibrate"
        raise InvalidSpec((Problem(field, "nothing", "operations a second", remedy),))
    return _forecast(a, profile, kv_dtype, workload)


def timing_of(a: Architecture, profile: HardwareProfile, kv_dtype: DType, workload: Workload) -> TimingOf:
    """The same times of any layout, or those of decode alone without FLOPs. Raises InvalidSpec without bandwidth."""
    return _forecast(a, profile, kv_dtype, workload).timing


def _forecast(a: Architecture, profile: HardwareProfile, kv_dtype: DType, workload: Workload) -> Forecast:
    one_gpu, decode = decode_forecast(a, profile, kv_dtype)

    def setup(shape: GroupShape) -> Setup:
        return replace(one_gpu, shape=shape)

    prefill = _calibration(one_gpu, PrefillLoad, profile.spec.calibration)
    chunk_tokens, kept_s = profile.spec.limits.prefill_batched_tokens, profile.spec.timeouts.reservation_seconds
    return Forecast(workload, setup, decode, prefill, chunk_tokens, kept_s)


def decode_forecast(a: Architecture, profile: HardwareProfile, kv_dtype: DType) -> tuple[Setup, Calibration]:
    """The bundled worker on one of these GPUs, and the factor of its decode steps, which needs no FLOPs.

    Which factor is nearest does not depend on the layout. Raises InvalidSpec when no bandwidth is stated.
    """
    chip = built_in_measurements().chip(profile)
    engine = replace(worker_engine(profile), kv_itemsize=ITEMSIZE[kv_dtype])
    one_gpu = Setup(a, chip, GroupShape(1, 1, 1), engine, graphs=Graphs.NONE)
    return one_gpu, _calibration(one_gpu, DecodeLoad, profile.spec.calibration)


def _calibration(setup: Setup, phase: type[DecodeLoad | PrefillLoad], own: CalibrationSpec | None) -> Calibration:
    """The factor of an engine. What a profile states was measured on one layout, and narrows the band on no other."""
    found = calibration_for(setup, phase, own)
    if own is None or own.layout is None or found.anchors:
        return found
    layout = own.layout
    shape = GroupShape(layout.nodes, layout.gpus_per_node, layout.tensor_parallel)
    return replace(found, shape=shape, elsewhere=calibration_for(setup, phase, None))
