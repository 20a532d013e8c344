"""Each view in each form of -o: it works, or it is refused with the forms that it has. One table over all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
MI300X = ("--chip", "mi300x")
FORMS = ("text", "json", "yaml", "markdown", "html")
THREE, FOUR = FORMS[:3], FORMS[:4]
Run = Callable[..., tuple[int, str, str]]

VIEWS: dict[str, tuple[tuple[object, ...], int, tuple[str, ...]]] = {
    "plan": (("plan", *MI300X), 0, FORMS),
    "a plan that does not fit": (("plan", *MI300X, "--nodes", 2), 1, FORMS),
    "a plan that misses": (("plan", "--chip", "mi325x", "--requests-per-second", 99, "--target-tpot", "1s"), 1, FORMS),
    "a plan without all predictions": (("plan", "--chip", "mi308x"), 0, FORMS),
    "--cost": (("plan", *MI300X, "--cost", 2), 0, FORMS),
    "--compare": (("plan", "--compare", EXAMPLES / "mi300x-2p2d.yaml", EXAMPLES / "mi325x-2p2d.yaml"), 0, FOUR),
    "--what-if": (("plan", *MI300X, "--what-if", "maxNumSeqs=8", "--cost", 2), 0, FOUR),
    "--explain": (("plan", *MI300X, "--explain", "KV pages a lane"), 0, FOUR),
    "--explain what does not fit": (("plan", *MI300X, "--nodes", 2, "--explain", "TPOT"), 1, FOUR),
    "--check": (("plan", "--check"), 0, FOUR),
    "--search": (("plan", *MI300X, "--search", 4, "--cost", 2), 0, FORMS),
    "a search without a layout": (("plan", *MI300X, "--search", 2), 1, FORMS),
    "replay": (("replay", *MI300X, "--agents", 1, "--turns", 2), 0, FORMS),
    "a replay that does not fit": (("replay", *MI300X, "--nodes", 2), 1, FORMS),
    "profile list": (("profile", "list"), 0, FOUR),
    "profile show": (("profile", "show", "mi308x"), 0, FOUR),
    "profile calibrate": (("profile", "calibrate", "RUN"), 0, THREE),
}


@pytest.mark.parametrize("form", FORMS)
def test_all_memory_of_a_gpu_is_in_each_form(run: Run, form: str) -> None:
    out = run("plan", *MI300X, "-o", form)[1]
    assert out.replace(",", "").count("206141652992") == (1 if form == "text" else 2), (
        "text says of decode: as in prefill"
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("view", VIEWS)
def test_each_form_of_each_view_works_or_is_refused_with_what_is_possible(
    run: Run, tmp_path: Path, view: str, form: str
) -> None:
    arguments, expected, forms = VIEWS[view]
    measured = tmp_path / "run.yaml"
    layout = {"nodes": 2, "gpusPerNode": 8, "tensorParallel": 2}
    point = {"concurrency": 8, "contextTokens": 4096, "tpotMs": 130.0}
    measured.write_text(yaml.safe_dump({"chip": "mi300x", "layout": layout, "decode": [point]}), encoding="utf-8")
    status, out, err = run(*(measured if each == "RUN" else each for each in arguments), "-o", form)
    if form not in forms:
        assert (status, out) == (2, "")
        assert form in err
        named = err.replace('"', "").replace(",", " ").replace(";", " ").split()
        assert [each for each in FORMS if each in named and each != form] == list(forms)
        return
    assert (status, err) == (expected, "")
    assert is_of(form, out), out[:200]


def is_of(form: str, text: str) -> bool:
    """Whether a text is what its form says, and no other."""
    try:
        is_json = bool(json.loads(text))
    except ValueError:
        is_json = False
    is_html = text.startswith("<!DOCTYPE html>") and text.rstrip().endswith("</html>")
    has_table = any(line.startswith("|--") for line in text.splitlines())
    if form == "yaml":
        return not (is_json or is_html or has_table) and isinstance(yaml.safe_load(text), dict | list)
    found = {"json": is_json, "html": is_html, "markdown": has_table}
    return [name for name, is_found in found.items() if is_found] == ([form] if form in found else [])
