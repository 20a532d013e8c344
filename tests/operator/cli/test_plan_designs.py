"""The table of both pool designs compares like with like, and its heading says on what basis."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
Run = Callable[..., tuple[int, str, str]]
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def size_of(text: str) -> float:
    """The bytes that a text begins with."""
    number, unit, *_ = text.split()
    return float(number) * UNITS[unit]


@pytest.mark.parametrize(("example", "dtype"), [("mi300x-workload.yaml", "bfloat16"), ("local/2p2d.yaml", "float32")])
def test_the_heading_names_what_both_designs_share(run: Run, example: str, dtype: str) -> None:
    _, text, _ = run("plan", "-f", EXAMPLES / example)
    _, out, _ = run("plan", "-f", EXAMPLES / example, "-o", "json")
    plan = json.loads(out)
    designs = plan["designs"]
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if "in two designs, like for like" in line)
    assert f"all of one length, and bytes of each; {dtype} rows in both" in lines[at]
    assert "none kept for handoffs" in lines[at]
    assert size_of(lines[at]) == pytest.approx(designs["pool_bytes"], rel=0.005)
    pools = [line["bytes"] for line in plan["decode"]["lines"] if line["label"] in ("state slots", "KV pages")]
    assert designs["pool_bytes"] == sum(pools)
    blocks, tokens, size = (int(n.replace(",", "")) for n in re.findall(r"(?<!\S)[\d,]*\d(?!\S)", lines[at + 1])[:3])
    layout = designs["layout"]
    assert (blocks, tokens, size) == (designs["num_blocks"], layout["block_tokens"], layout["block_bytes"])
    assert blocks == designs["pool_bytes"] // size
    for row, line in zip(designs["rows"], lines[at + 3 :], strict=False):
        tokens, apart, _, _, unified, *_ = line.split()
        sizes = [row["apart_request_bytes"], row["unified_request_bytes"]]
        assert [size_of(cell) for cell in re.findall(r"[\d.]+ [KMG]iB", line)] == pytest.approx(sizes, rel=0.05)
        assert (tokens, apart, unified) == tuple(f"{row[k]:,}" for k in ("context_tokens", "apart", "unified"))
    # small pages never hold fewer than blocks of the same rows and bytes
    assert all(row["apart"] >= row["unified"] and row["apart_fp8"] >= row["unified_fp8"] for row in designs["rows"])
