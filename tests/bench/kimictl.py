"""How long `kimictl plan` takes, from its start to its exit: wall clock and processor time of whole processes.

usage: kimictl.py [--runs N] [--output FILE]

The first run of each command line is not counted: it writes the bytecode that an installed program has.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KIMICTL = str(Path(sys.executable).parent / "kimictl")
FLAGS = (
    "--chip",
    "mi325x",
    "--nodes",
    "4",
    "--prompt-tokens",
    "2048",
    "--output-tokens",
    "128",
    "--concurrency",
    "512",
)
LIBRARIES = """
from cyclopts import App
from pydantic import BaseModel

class Model(BaseModel):
    value: int = 3

app = App()

@app.command
def plan(value: int = 3) -> None:
    Model(value=value)

app(["plan"])
"""
"""What no `kimictl` with these libraries can go below: one model and one command."""

COMMANDS = {
    "interpreter": (sys.executable, "-c", "pass"),
    "libraries": (sys.executable, "-c", LIBRARIES),
    "plan_manifest": (KIMICTL, "plan", "-f", str(ROOT / "examples" / "mi300x-2p2d.yaml")),
    "plan_flags": (KIMICTL, "plan", *FLAGS),
    "help": (KIMICTL, "--help"),
}
RUNS = 20


def run(argv: tuple[str, ...]) -> tuple[float, float]:
    """Milliseconds of wall clock and of processor time of one process."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    used, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(argv, env=environment, stdout=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    return wall * 1e3, cpu * 1e3


def measure(argv: tuple[str, ...], runs: int) -> dict[str, float]:
    run(argv)
    walls, cpus = zip(*(run(argv) for _ in range(runs)), strict=True)
    return {
        "wall_ms_median": statistics.median(walls), "wall_ms_min": min(walls),
        "cpu_ms_median": statistics.median(cpus), "cpu_ms_min": min(cpus),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    figures: dict[str, object] = {"runs": arguments.runs, "load_average": os.getloadavg()[0]}
    head = f"ms, {arguments.runs} runs"
    print(f"{head:16s} {'wall median':>12s} {'min':>8s} {'CPU median':>12s} {'min':>8s}")
    for name, argv in COMMANDS.items():
        figures[name] = found = measure(argv, arguments.runs)
        wall, least_wall, cpu, least_cpu = found.values()
        print(f"{name:16s} {wall:12.0f} {least_wall:8.0f} {cpu:12.0f} {least_cpu:8.0f}", flush=True)
    print(f"load average at the start: {figures['load_average']:.1f}")
    if arguments.output:
        arguments.output.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
