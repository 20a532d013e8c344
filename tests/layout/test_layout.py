"""The rules of the tree that no linter knows."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = """
    .dockerignore .gitignore .importlinter .pre-commit-config.yaml CHANGELOG.md DESIGN.md LICENSE Makefile README.md
    pyproject.toml uv.lock
"""
FOLDERS = ".ci .github charts crds examples kernels operator tests worker"
# The local cluster's one reader: where caches and tools of this machine are.
HARNESS_PATHS = Path("tests/localcluster/kimi_localcluster/paths.py")
TOP_LEVEL = {*FILES.split(), *FOLDERS.split()}


def tracked(pattern: str = "") -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return [Path(name) for name in listing.split("\0") if name and name.endswith(pattern) and (ROOT / name).exists()]


def sources() -> list[Path]:
    return [
        path
        for path in tracked(".py")
        if path.parts[0] in {"operator", "worker", "kernels"} or "localcluster" in path.parts
    ]


def test_top_level_is_fixed() -> None:
    assert {path.parts[0] for path in tracked()} == TOP_LEVEL


@pytest.mark.parametrize("folder", ["operator", "worker", "kernels", "tests"])
def test_no_package_shadows_the_standard_library(folder: str) -> None:
    """An `operator/__init__.py` would shadow the standard library's `operator` for whoever runs from the root."""
    assert not (ROOT / folder / "__init__.py").exists()


def test_environment_is_read_only_in_settings() -> None:
    """Elsewhere a constant may be set there, for a library that has no other switch."""
    readers = [
        str(path)
        for path in sources()
        if path.name != "settings.py" and path != HARNESS_PATHS
        for tree in [ast.parse((ROOT / path).read_text())]
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in {"environ", "getenv"}
        and node not in _set_to_constants(tree)
    ]
    assert not readers


def _set_to_constants(tree: ast.Module) -> list[ast.expr]:
    """What stands before the brackets in `name["KEY"] = "constant"`."""
    return [
        target.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Subscript)
    ]


def test_values_of_kimictl_cost_nothing_to_define() -> None:
    """A dataclass is compiled at every start, half a millisecond each; flags are some, since cyclopts reads them."""
    folders = {f"operator/kimi_operator/{name}" for name in ("planner", "profiles", "cli")}
    paths = [path for path in sources() if str(path.parent) in folders and not path.stem.endswith("flags")]
    assert len(paths) > 50
    compiled = [str(path) for path in paths if "@dataclass" in (ROOT / path).read_text()]
    assert not compiled, "make it a msgspec.Struct"


def test_files_and_functions_stay_small() -> None:
    long = []
    for path in sources():
        text = (ROOT / path).read_text()
        if (lines := text.count("\n")) > 600:
            long.append(f"{path}: {lines} lines, at most 600")
        long += [
            f"{path}:{node.lineno} {node.name}: {node.end_lineno - node.lineno + 1} lines, at most 80"
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= 80
        ]
    assert not long, "\n".join(long)


def test_test_files_have_unique_names() -> None:
    names = [path.name for path in tracked(".py") if path.name.startswith("test_")]
    assert sorted(names) == sorted(set(names))
