"""Kimi-K3 on the hardware and in the layouts of the published runs, for tests of predictions."""

from __future__ import annotations

import math

from kimi_operator.planner.memory import GroupShape
from kimi_operator.planner.predict import Calibration
from kimi_operator.planner.roofline import Setup
from kimi_operator.profiles import architecture, built_in_profiles
from kimi_operator.profiles.measurements import built_in_measurements

K3 = architecture("kimi-k3")
BUILT_IN = built_in_measurements()
EP16, TP8 = GroupShape(2, 8, 2), GroupShape(1, 8, 8)
MI300X, MI325X = (BUILT_IN.chip(built_in_profiles()[name]) for name in ("mi300x", "mi325x"))
INT4 = BUILT_IN.engines["vllm-int4"]
DECODE = Setup(K3, MI300X, EP16, INT4)
FACTOR_2 = Calibration((), math.log(1.2), "stated for a test", 2.0)
