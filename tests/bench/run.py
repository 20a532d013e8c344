"""`make bench`: every measurement in turn, their tables on the terminal and all figures in one JSON.

usage: run.py [NAME ...]     names of the files beside this one, without .py; all by default
"""

import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "bench-results"
NAMES = ("kimictl", "engine", "handoff", "router", "reconcile")


def machine() -> str:
    """Processor and kernel of this machine."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{len(models)} x {models[0]}, Linux {platform.release()}"


def commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=HERE, check=False, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


@dataclass(frozen=True)
class Goal:
    """A figure that has a goal: where it stands in the results, and the bound."""

    what: str
    benchmark: str
    find: Callable[[Any], float]
    relation: str
    bound: float
    unit: str

    def line(self, results: dict[str, Any]) -> str:
        """One row of the summary."""
        if self.benchmark not in results:
            return f"{self.what:64s} {'not measured':>12s}"
        value = self.find(results[self.benchmark])
        is_met = value <= self.bound if self.relation == "<=" else value >= self.bound
        verdict = "met" if is_met else "MISSED"
        return f"{self.what:64s} {value:12.4g} {self.relation} {self.bound:5g} {self.unit:4s} {verdict}"


GOALS = (
    Goal("a plan of a manifest by kimictl, median of whole runs", "kimictl",
         lambda found: found["plan_manifest"]["wall_ms_median"], "<=", 300, "ms"),
    Goal("first write after a change of spec, p99, at 50 changes/s", "reconcile",
         lambda found: found["operator"]["rates"][-1]["first_write_ms"]["p99"], "<=", 250, "ms"),
    Goal("memory of the operator with 100 deployments", "reconcile",
         lambda found: found["operator"]["memory_loaded_bytes"] / 1e6, "<=", 100, "MB"),
    Goal("writes at rest", "reconcile", lambda found: sum(found["operator"]["writes_at_rest"].values()), "<=", 0, ""),
    Goal("time that the router adds to a token, p99, at 512 streams", "router",
         lambda found: found["router"][-1]["added"]["p99_ms"], "<=", 5, "ms"),
    Goal("handoff against raw NIXL over TCP, smallest ratio of sizes", "handoff",
         lambda found: min(row["ratio"] for row in found["handoff"] if row["tls"] == "tcp") * 100, ">=", 90, "%"),
)  # fmt: skip


def main() -> int:
    names = sys.argv[1:] or NAMES
    if unknown := [name for name in names if name not in NAMES]:
        sys.exit(f"no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}")
    results: dict[str, Any] = {"machine": machine(), "commit": commit(), "date": datetime.now(UTC).isoformat()}
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            print(f"\n== {name}: tests/bench/{name}.py", flush=True)
            output = Path(folder) / f"{name}.json"
            argv = [sys.executable, str(HERE / f"{name}.py"), "--output", str(output)]
            if subprocess.run(argv, check=False).returncode:
                failed.append(name)
            else:
                results[name] = json.loads(output.read_text())
    print("\n== goals", *(goal.line(results) for goal in GOALS if goal.benchmark in names), sep="\n")
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / f"{results['commit']}.json"
    target.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{results['machine']}, commit {results['commit']}\nall figures: {target.relative_to(HERE.parents[1])}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
