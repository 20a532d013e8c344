"""The table of both pool designs compares like with like, and its heading says on what basis."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(("example", "dtype"), [("mi300x-workload.yaml", "bfloat16"), ("local/2p2d.yaml", "float32")])
def test_the_heading_names_what_both_designs_share(run: Run, example: str, dtype: str) -> None:
    _, text, _ = run("plan", "-f", EXAMPLES / example)
    _, out, _ = run("plan", "-f", EXAMPLES / example, "-o", "json")
    designs = json.loads(out)["designs"]
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if "in two designs, like for like" in line)
    assert f"all of one length, and bytes of each; {dtype} rows in both" in lines[at]
    assert "none kept for handoffs" in lines[at]
    for row, line in zip(designs["rows"], lines[at + 3 :], strict=False):
        tokens, apart, _, _, unified, *_ = line.split()
        assert (tokens, apart, unified) == tuple(f"{row[k]:,}" for k in ("context_tokens", "apart", "unified"))
    # small pages never hold fewer than blocks of the same rows and bytes
    assert all(row["apart"] >= row["unified"] and row["apart_fp8"] >= row["unified_fp8"] for row in designs["rows"])
