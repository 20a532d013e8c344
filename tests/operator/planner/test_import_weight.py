"""`kimictl plan` answers at once: it loads nothing that it does not use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "mi300x-2p2d.yaml"
PROGRAM = """
import json, sys
from kimi_operator.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    print(json.dumps([end.code, sorted(sys.modules)]), file=sys.stderr)
"""
HEAVY = {"torch", "numpy", "kopf", "kubernetes", "aiohttp", "httpx", "fastapi", "prometheus_client", "asyncio.runners"}
OF_PREDICTIONS = {"kimi_operator.planner.predict", "kimi_operator.profiles.measurements"}


def loaded_by(*arguments: str) -> set[str]:
    """Modules of a process that has run one command to its end."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=120, check=True
    )
    status, modules = json.loads(ran.stderr.splitlines()[-1])
    assert status == 0, ran.stderr
    return set(modules)


@pytest.mark.parametrize("output", ["text", "json"])
def test_a_plan_loads_no_client_no_framework_and_no_predictions(output: str) -> None:
    loaded = loaded_by("plan", "-f", str(EXAMPLE), "-o", output)
    assert not loaded & (HEAVY | OF_PREDICTIONS)


def test_the_check_loads_no_client_and_no_framework() -> None:
    loaded = loaded_by("plan", "--check")
    assert not loaded & HEAVY
    assert loaded >= OF_PREDICTIONS
