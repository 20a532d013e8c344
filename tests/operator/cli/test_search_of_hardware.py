"""`kimictl plan --search` on hardware that the bundled worker cannot run on, or was never run on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import yaml
from kimi_operator.api import dump
from kimi_operator.profiles import built_in_profiles

Run = Callable[..., tuple[int, str, str]]
LENGTHS = ("--prompt-tokens", "1000", "--output-tokens", "100")


def profile_file(folder: Path, worker: dict[str, object]) -> Path:
    """A profile like that of MI325X, but for what it says of the bundled worker."""
    document = dump(built_in_profiles()["mi325x"])
    document["metadata"]["name"] = "odd"
    document["spec"]["worker"] = worker
    file = folder / "odd.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


def test_unsupported_hardware_is_not_searched(run: Run, tmp_path: Path) -> None:
    file = profile_file(tmp_path, {"support": "Unsupported", "lacks": ["wave32 kernels"]})
    status, out, err = run("plan", "-f", file, "--chip", "odd", "--search", "4", *LENGTHS)
    assert status != 0
    assert "odd: wave32 kernels" in out + err
    assert "layouts fit" not in out


def test_untested_hardware_is_searched_with_the_warning_of_a_plan(run: Run, tmp_path: Path) -> None:
    file = profile_file(tmp_path, {"support": "Untested", "lacks": ["its image"]})
    status, out, _ = run("plan", "-f", file, "--chip", "odd", "--search", "4", *LENGTHS)
    assert status == 0
    assert "warning: the bundled worker is untested on odd (gfx942): its image\n" in out
    _, found, _ = run("plan", "-f", file, "--chip", "odd", "--search", "4", *LENGTHS, "-o", "json")
    _, planned, _ = run("plan", "-f", file, "--chip", "odd", "--nodes", "4", *LENGTHS)
    (warning,) = json.loads(found)["warnings"]
    assert f"warning: {warning}\n" in planned


def test_hardware_that_the_worker_is_made_for_brings_no_warning(run: Run) -> None:
    _, out, _ = run("plan", "--chip", "mi325x", "--search", "4", *LENGTHS, "-o", "json")
    assert json.loads(out)["warnings"] == []


def test_a_search_of_nothing_says_what_is_missing(run: Run) -> None:
    status, out, err = run("plan", "--search", 4)
    assert (status, out) == (2, "")
    assert err == "kimictl: --search: got 4 alone, expected a chip or a manifest too; add --chip mi300x, or -f FILE\n"
