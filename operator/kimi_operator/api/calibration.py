"""What a hardware profile states about measured speed: a factor a phase over the planner's roofline, and its band."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from kimi_operator.api.base import ApiModel

# Not gt=0: a CRD's schema has no number for an open bound.
Factor = Annotated[float, Field(ge=1e-6, le=1_000_000, allow_inf_nan=False)]
Percent = Annotated[float, Field(ge=0, le=1_000_000, allow_inf_nan=False)]


class CalibratedLayout(ApiModel):
    """The group that was measured."""

    nodes: int = Field(ge=1, le=64, description="Nodes of the group.")
    gpus_per_node: int = Field(ge=1, le=64, description="GPUs of each node.")
    tensor_parallel: int = Field(ge=1, le=64, description="GPUs of a lane.")


class CalibrationSpec(ApiModel):
    """Made by `kimictl profile calibrate`. A factor without its band is not used."""

    engine: Annotated[str, StringConstraints(min_length=1, max_length=64)] = Field(
        default="kimi-worker", description="Software that was measured; the factors are used for it alone."
    )
    decode_factor: Factor | None = Field(default=None, description="Measured decode step over the roofline.")
    decode_band_percent: Percent | None = Field(default=None, description="How far such a prediction may be off.")
    prefill_factor: Factor | None = Field(default=None, description="Measured prefill over the roofline.")
    prefill_band_percent: Percent | None = Field(default=None, description="How far such a prediction may be off.")
    layout: CalibratedLayout | None = Field(
        default=None,
        description="The group that was measured: for others the band is no narrower than without this calibration. "
        "Absent, the band is taken to hold for all.",
    )
    measured_on: Annotated[str, StringConstraints(min_length=1, max_length=256)] = Field(
        description="Layout, loads and day of the measured run."
    )
