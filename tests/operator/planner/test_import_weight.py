"""`kimictl plan` answers at once: it loads nothing that talks to a cluster or computes."""

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


def loaded_by(*arguments: str) -> set[str]:
    """Modules of a process that has run one command to its end."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=120, check=True
    )
    status, modules = json.loads(ran.stderr.splitlines()[-1])
    assert status == 0, ran.stderr
    return set(modules)


@pytest.mark.parametrize("arguments", [("-f", str(EXAMPLE)), ("-f", str(EXAMPLE), "-o", "json"), ("--check",)])
def test_a_plan_loads_no_client_and_no_framework(arguments: tuple[str, ...]) -> None:
    assert not loaded_by("plan", *arguments) & HEAVY
