"""`make bench`: every measurement in turn, their tables on the terminal and all figures in one JSON.

usage: run.py [NAME ...]     names of the files beside this one, without .py; all by default
"""

import json
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "bench-results"
NAMES = ("engine", "handoff", "router", "reconcile")


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


def main() -> int:
    names = sys.argv[1:] or NAMES
    if unknown := [name for name in names if name not in NAMES]:
        sys.exit(f"no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}")
    results: dict[str, object] = {"machine": machine(), "commit": commit(), "date": datetime.now(UTC).isoformat()}
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
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / f"{results['commit']}.json"
    target.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{results['machine']}, commit {results['commit']}\nall figures: {target.relative_to(HERE.parents[1])}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
