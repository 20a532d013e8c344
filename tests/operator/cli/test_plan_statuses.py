"""Exit statuses of `kimictl plan`: sizes that can never be are bad input, by the same words in each form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

MI300X = Path(__file__).resolve().parents[3] / "examples" / "mi300x-2p2d.yaml"
BOTH = ("prefill", "decode")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def manifest(tmp_path: Path) -> Callable[..., Path]:
    """The example with other values; `prefill__groups=2` is a field of a section."""

    def write(**values: Any) -> Path:
        document = yaml.safe_load(MI300X.read_text())
        for path, value in values.items():
            *sections, field = ("spec", *path.split("__"))
            place = document
            for section in sections:
                place = place.setdefault(section, {})
            place[field] = value
        file = tmp_path / "k3.yaml"
        file.write_text(yaml.safe_dump(document))
        return file

    return write


def of_both(field: str, value: int) -> dict[str, int]:
    return {f"{role}__{field}": value for role in BOTH}


@pytest.mark.parametrize(
    ("fields", "flags", "edits", "words"),
    [
        (
            of_both("tensorParallel", 3),
            ("--tensor-parallel", 3),
            ("tensorParallel=3",),
            "got 3, expected a divisor of gpusPerNode 8: a lane never crosses a node; set it to one of [1, 2, 4, 8]",
        ),
        (
            of_both("gpusPerNode", 16),
            ("--gpus-per-node", 16),
            ("gpusPerNode=16",),
            "got 16, expected at most 8, the GPUs of a node (profile's gpu.perNode); lower it to 8",
        ),
        (
            {"model__maxModelLen": 2_000_000},
            ("--max-model-len", 2_000_000),
            ("maxModelLen=2000000",),
            "got 2,000,000, expected at most 1,048,576, which kimi-k3 was made for; lower it to 1,048,576 or less",
        ),
        (
            {"workload__prompt": {"uniform": {"min": 9, "max": 3}}, "workload__output": {"fixed": 5}},
            ("--prompt-tokens", "9-3", "--output-tokens", 5),
            ("workload.prompt={uniform: {min: 9, max: 3}}", "workload.output={fixed: 5}"),
            "expected at most max, 3; swap min and max",
        ),
    ],
)
def test_sizes_that_can_never_be_are_bad_input_in_every_form(
    run: Run,
    manifest: Callable[..., Path],
    *,
    fields: dict[str, Any],
    flags: tuple[object, ...],
    edits: tuple[str, ...],
    words: str,
) -> None:
    file = manifest(**fields)
    what_if = [part for edit in edits for part in ("--what-if", edit)]
    for arguments in (
        ("plan", "--chip", "mi300x", *flags),
        ("plan", "-f", file),
        ("plan", "-f", file, "-o", "json"),
        ("plan", "-f", MI300X, *what_if),
        ("plan", "-f", file, "--search", 4),
        ("plan", "--compare", MI300X, file),
        ("render", "-f", file),
    ):
        status, out, err = run(*arguments)
        assert (status, out) == (2, ""), arguments
        assert words in err, arguments


def test_a_search_from_flags_refuses_a_longest_request_beyond_the_model(run: Run) -> None:
    status, out, err = run("plan", "--chip", "mi300x", "--search", 4, "--max-model-len", 2_000_000)
    assert (status, out) == (2, "")
    assert "--max-model-len: got 2,000,000, expected at most 1,048,576, which kimi-k3 was made for" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("--tensor-parallel", 1),
        ("--max-model-len", 10_000, "--prompt-tokens", 20_000, "--output-tokens", 9),
        ("--search", 1),
        ("--search", 4, "--max-model-len", 10_000, "--prompt-tokens", 20_000, "--output-tokens", 9),
    ],
)
def test_a_question_whose_answer_is_no_exits_1_with_the_reason_on_standard_output(
    run: Run, arguments: tuple[object, ...]
) -> None:
    status, out, err = run("plan", "--chip", "mi300x", *arguments)
    assert (status, err) == (1, "")
    assert "does not fit:\n" in out


def test_what_the_stated_limit_refuses_is_not_blamed_on_the_model(run: Run) -> None:
    flags = ("--max-model-len", 10_000, "--prompt-tokens", 20_000, "--output-tokens", 9)
    _, out, _ = run("plan", "--chip", "mi300x", *flags)
    assert "--prompt-tokens\n    got       20,000 tokens\n    expected  less than 10,000 tokens, spec.model.max" in out
