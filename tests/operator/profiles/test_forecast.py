"""Times that a profile's own calibration gives, from the measured run to the solver and the search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from kimi_operator.api import HardwareProfile, dump, parse
from kimi_operator.api.profile import DType
from kimi_operator.cli.calibrate import calibrate
from kimi_operator.errors import InvalidSpec
from kimi_operator.planner.case import Timing
from kimi_operator.planner.memory import GroupShape
from kimi_operator.planner.search import Search, page_pools, search
from kimi_operator.planner.workload import Workload, fixed
from kimi_operator.profiles import architecture, built_in_profiles
from kimi_operator.profiles.forecast import forecast_of

K3 = architecture("kimi-k3")
MI300X = built_in_profiles()["mi300x"]
EP16 = GroupShape(2, 8, 2)
WORK = Workload(fixed(4096), fixed(256))
CONTEXT = 4096


def timing(profile: HardwareProfile) -> Timing:
    return forecast_of(K3, profile, DType.BFLOAT16, WORK).timing(EP16, 1)


def step_ms(profile: HardwareProfile, concurrency: int) -> float:
    return timing(profile).decode_step_s(concurrency // EP16.lanes, CONTEXT) * 1e3


def patched(profile: HardwareProfile, fragment: dict[str, Any]) -> HardwareProfile:
    """As `kubectl patch --type merge` does with one section that was not there before."""
    document = dump(profile)
    document["spec"] |= fragment["spec"]
    return parse(HardwareProfile, document)


@pytest.fixture
def calibrated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> HardwareProfile:
    """The profile after a run of the bundled worker that took 1.4 times what is predicted today."""
    run = {
        "chip": "mi300x", "layout": {"nodes": 2, "gpusPerNode": 8, "tensorParallel": 2}, "measuredOn": "cluster a",
        "decode": [
            {"concurrency": c, "contextTokens": CONTEXT, "tpotMs": 1.4 * step_ms(MI300X, c)} for c in (8, 64, 128)
        ],
    }  # fmt: skip
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run))
    assert calibrate(file, output="yaml") == 0
    return patched(MI300X, yaml.safe_load(capsys.readouterr().out))


def test_a_run_changes_every_step_that_is_predicted_of_its_profile(calibrated: HardwareProfile) -> None:
    for concurrency in (8, 16, 256):
        assert step_ms(calibrated, concurrency) == pytest.approx(1.4 * step_ms(MI300X, concurrency), rel=1e-4)


def test_what_the_run_did_not_measure_keeps_the_nearest_measurements(calibrated: HardwareProfile) -> None:
    prompt = (50_000, 0)
    measured, built_in = (timing(each).prefill_s(*prompt) for each in (calibrated, MI300X))
    assert measured == built_in


def test_forecasts_say_what_they_are_calibrated_on(calibrated: HardwareProfile) -> None:
    before, after = (forecast_of(K3, each, DType.BFLOAT16, WORK) for each in (MI300X, calibrated))
    assert "borrowed: nothing of kimi-worker on gfx942 was measured" in before.decode.text
    assert "of the profile: kimi-k3 on 2 x 8 GPUs" in after.decode.text
    assert after.decode.text.endswith("cluster a")
    assert after.prefill == before.prefill


def test_the_search_ranks_by_the_profiles_own_speed(calibrated: HardwareProfile) -> None:
    rates = []
    answers = Workload(fixed(256), fixed(65_536))  # decode binds, not prefill
    for profile in (MI300X, calibrated):
        forecast = forecast_of(K3, profile, DType.BFLOAT16, answers)
        pools = page_pools(K3, profile.spec, DType.BFLOAT16)
        request = Search(K3, profile.spec, answers, 4, pools, timing=forecast.timing, throughput=forecast.throughput)
        rates.append({str(one.layout): one.throughput for one in search(request).ranked})
    before, after = rates
    assert before
    assert after == {name: pytest.approx(rate / 1.4, rel=1e-4) for name, rate in before.items() if rate is not None}


def test_a_factor_of_another_engine_is_not_used() -> None:
    fragment = {"spec": {"calibration": {
        "engine": "vllm-int4", "decodeFactor": 9.0, "decodeBandPercent": 1.0, "measuredOn": "elsewhere",
    }}}  # fmt: skip
    assert step_ms(patched(MI300X, fragment), 64) == step_ms(MI300X, 64)


def test_rows_of_the_cache_count_as_they_are_stored() -> None:
    narrow, wide = (forecast_of(K3, MI300X, dtype, WORK).timing(EP16, 1) for dtype in (DType.BFLOAT16, DType.FLOAT32))
    assert wide.decode_step_s(8, 100_000) > narrow.decode_step_s(8, 100_000)


@pytest.mark.parametrize("field", ["hbmBytesPerSecond", "bf16FlopsPerSecond"])
def test_without_the_peaks_of_a_chip_there_is_no_forecast(field: str) -> None:
    document = dump(MI300X)
    del document["spec"]["gpu"][field]
    document["spec"]["basis"].pop(f"gpu.{field}", None)
    with pytest.raises(InvalidSpec, match=rf"HardwareProfile mi300x: spec\.gpu\.{field}: got nothing"):
        forecast_of(K3, parse(HardwareProfile, document), DType.BFLOAT16, WORK)
