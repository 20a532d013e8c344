"""The profiles that ship: valid, sourced figure by figure, in the chart byte for byte, honest about the worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from kimi_operator.api import HardwareProfile, dump, parse
from kimi_operator.api.crd import PROFILE_FOLDER
from kimi_operator.api.deployment import KimiDeploymentSpec, Transport
from kimi_operator.api.profile import Basis, WorkerSpec, WorkerSupport
from kimi_operator.errors import InvalidSpec
from kimi_operator.planner import Plan, make_plan
from kimi_operator.planner.memory import reserve_lines
from kimi_operator.profiles import architecture, built_in_profiles
from kimi_operator.profiles.support import support_problem, support_warning, worker_support

REPOSITORY = Path(__file__).resolve().parents[3]
HARDWARE = REPOSITORY / "operator" / "kimi_operator" / "profiles" / "hardware"
BUILT_IN = built_in_profiles()
GIB = 2**30


def with_spec(profile: HardwareProfile, **changes: object) -> HardwareProfile:
    return profile.model_copy(update={"spec": profile.spec.model_copy(update=changes)})


def test_one_for_each_chip() -> None:
    assert list(BUILT_IN) == ["mi300x", "mi308x", "mi325x", "mi350x", "mi355x"]


def test_no_device_id_is_in_two_profiles() -> None:
    ids = [device for profile in BUILT_IN.values() for device in profile.spec.match.device_ids]
    assert len(ids) == len(set(ids))


def test_chart_holds_the_same_files_byte_for_byte() -> None:
    shipped = {path.name: path.read_bytes() for path in (REPOSITORY / PROFILE_FOLDER).iterdir()}
    assert shipped == {path.name: path.read_bytes() for path in HARDWARE.iterdir()}, "run `make generate`"


@pytest.mark.parametrize("name", BUILT_IN)
def test_it_is_valid_and_named_after_its_file(name: str) -> None:
    document = yaml.safe_load((HARDWARE / f"{name}.yaml").read_text())
    profile = parse(HardwareProfile, document, name)
    assert profile.metadata.name == name
    assert parse(HardwareProfile, dump(profile)) == profile


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_figure_has_a_source_and_a_basis(name: str) -> None:
    spec = BUILT_IN[name].spec
    assert len(spec.figures()) >= 28
    for path in spec.figures():
        assert spec.source(path) != "no source given", path
        assert spec.basis_of(path) is not None, path
    assert set(spec.basis) <= set(spec.sources)


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_is_called_measured_is_no_figure_of_another_chip(name: str) -> None:
    spec = BUILT_IN[name].spec
    others = {other.upper() for other in BUILT_IN} - {name.upper()}
    for path, basis in spec.basis.items():
        if basis in {Basis.MEASURED, Basis.DERIVED}:
            assert not any(other in spec.sources[path] for other in others), path


@pytest.mark.parametrize(
    ("name", "gib", "units", "dies", "terabytes"),
    [
        ("mi300x", 192, 304, 8, 5.3),
        ("mi308x", 192, 80, 4, 5.3),
        ("mi325x", 256, 304, 8, 6.0),
        ("mi350x", 288, 256, 8, 8.0),
        ("mi355x", 288, 256, 8, 8.0),
    ],
)
def test_card_is_the_vendors(name: str, gib: int, units: int, dies: int, terabytes: float) -> None:
    gpu = BUILT_IN[name].spec.gpu
    assert gpu.card is not None
    assert (gpu.card.memory, gpu.card.compute_units, gpu.card.compute_dies) == (gib * GIB, units, dies)
    assert gpu.hbm_bytes_per_second == terabytes * 1e12
    assert gpu.partition.is_whole
    assert str(gpu.partition) == "spx_nps1"


def test_what_nobody_measured_says_so_in_the_lines_of_a_plan() -> None:
    hows = {name: {line.label: line.how for line in reserve_lines(BUILT_IN[name].spec)} for name in BUILT_IN}
    assert hows["mi300x"]["contexts"].endswith("172.74 GiB measured free before load")
    assert hows["mi300x"]["activations"].endswith("split assumed (not measured)")
    for name in ("mi308x", "mi350x", "mi355x"):
        for label in ("contexts", "symmetric heap", "activations", "captured graphs"):
            assert "(not measured on this hardware)" in hows[name][label], (name, label)


@pytest.mark.parametrize("name", BUILT_IN)
def test_it_alone_says_how_mori_spreads_a_transfer(name: str) -> None:
    """The worker passes MoRI no queue pairs and no threads: whoever tunes them has one place to look."""
    spec = BUILT_IN[name].spec
    assert spec.fabric.transport is Transport.MORIIO
    names = [one.name for one in spec.pod.env]
    assert len(names) == len(set(names))
    assert {"MORI_IO_QP_PER_TRANSFER", "MORI_IO_NUM_WORKER_THREADS"} <= set(names)


def test_bandwidth_of_mi308x_is_not_verified() -> None:
    assert BUILT_IN["mi308x"].spec.source("gpu.hbmBytesPerSecond").endswith("(not verified)")
    assert "gpu.hbmBytesPerSecond" in BUILT_IN["mi308x"].spec.unmeasured()
    assert BUILT_IN["mi308x"].spec.gpu.bf16_flops_per_second is None


def test_a_section_speaks_for_its_fields_and_a_field_for_itself() -> None:
    spec = BUILT_IN["mi300x"].spec.model_copy(
        update={
            "sources": {"limits": "chosen", "limits.maxNumSeqs": "tried"},
            "basis": {"limits": Basis.ASSUMED, "limits.maxNumSeqs": Basis.MEASURED},
        }
    )
    assert spec.source("limits.maxNumSeqs") == "tried"
    assert spec.source("limits.maxQueued") == "chosen (not measured)"
    assert spec.source("timeouts.drainSeconds") == "no source given"
    assert "limits.maxNumSeqs" not in spec.unmeasured()
    assert "timeouts.drainSeconds" in spec.unmeasured()


# the bundled worker


@pytest.mark.parametrize("name", ["mi350x", "mi355x"])
def test_gfx950_is_warned_of_and_says_why(name: str) -> None:
    profile = BUILT_IN[name]
    worker = worker_support(profile.spec)
    assert profile.spec.gpu.architecture == "gfx950"
    assert worker.support is WorkerSupport.UNTESTED
    assert worker.works
    warning = support_warning(profile)
    assert warning is not None
    assert f"untested on {name} (gfx950)" in warning
    assert "FP4" in warning
    assert support_problem(profile) is None
    env = {one.name: one.value for one in profile.spec.pod.env}
    assert env["MORI_GPU_ARCHS"] == "gfx950"


@pytest.mark.parametrize("name", ["mi300x", "mi308x", "mi325x"])
def test_gfx942_is_what_the_worker_is_made_for(name: str) -> None:
    assert worker_support(BUILT_IN[name].spec).support is WorkerSupport.TARGET
    assert support_warning(BUILT_IN[name]) is None
    assert support_problem(BUILT_IN[name]) is None


def test_a_profile_that_says_nothing_is_judged_by_its_architecture() -> None:
    silent = with_spec(BUILT_IN["mi300x"], worker=None)
    assert worker_support(silent.spec).support is WorkerSupport.TARGET
    gpu = silent.spec.gpu.model_copy(update={"architecture": "gfx1201"})
    warning = support_warning(with_spec(silent, gpu=gpu))
    assert warning is not None
    assert "gfx1201" in warning


def test_an_unsupported_profile_refuses_with_its_reasons() -> None:
    worker = WorkerSpec(support=WorkerSupport.UNSUPPORTED, lacks=("wave32 kernels",))
    problem = support_problem(with_spec(BUILT_IN["mi300x"], worker=worker))
    assert problem is not None
    assert problem.field == "spec.hardware.profile"
    assert problem.got == "mi300x: wave32 kernels"
    assert "gfx942" in problem.remedy
    assert support_warning(with_spec(BUILT_IN["mi300x"], worker=worker)) is None


@pytest.mark.parametrize("name", BUILT_IN)
def test_kimi_k3_fits_in_two_nodes_a_role(name: str) -> None:
    spec = parse(
        KimiDeploymentSpec,
        {
            "model": {"checkpoint": {"hostPath": {"path": "/k3"}}, "maxModelLen": 131_072},
            "hardware": {"profile": name},
            "prefill": {},
            "decode": {},
        },
    )
    assert isinstance(make_plan(architecture("kimi-k3"), spec, BUILT_IN[name]), Plan)


# measured speed


def test_a_calibration_is_part_of_a_profile() -> None:
    document = dump(BUILT_IN["mi300x"])
    document["spec"]["calibration"] = {
        "decodeFactor": 1.71,
        "decodeBandPercent": 25.0,
        "measuredOn": "2P2D, 1 December",
    }
    calibration = parse(HardwareProfile, document).spec.calibration
    assert calibration is not None
    assert (calibration.engine, calibration.decode_factor, calibration.prefill_factor) == ("kimi-worker", 1.71, None)
    document["spec"]["calibration"] = {"decodeFactor": 0}
    with pytest.raises(InvalidSpec) as error:
        parse(HardwareProfile, document)
    assert [(problem.field, problem.got) for problem in error.value.problems] == [
        ("spec.calibration.decodeFactor", "0"),
        ("spec.calibration.measuredOn", "nothing"),
    ]
