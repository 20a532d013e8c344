"""`kimictl` as a process: help, closed pipes, full disks, Ctrl-C, and what a plan must not load."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cyclopts import App
from kimi_operator.cli import COMMANDS, INTERRUPTED, READER_GONE, build_app, main

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
MI300X = EXAMPLES / "mi300x-2p2d.yaml"
KIMICTL = str(Path(sys.executable).parent / "kimictl")
TIMEOUT_S = 60
Run = Callable[..., tuple[int, str, str]]


def start(*arguments: object, **streams: int) -> subprocess.Popen[str]:
    return subprocess.Popen([KIMICTL, *map(str, arguments)], stderr=subprocess.PIPE, text=True, **streams)


def test_the_list_of_commands_describes_each_and_imports_none(run: Run) -> None:
    """The list is made of texts beside it: a command that has run once in this process proves nothing."""
    script = (
        "import sys; from kimi_operator.cli import COMMANDS, main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({c.target.partition(':')[0] for c in COMMANDS.values()} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    assert done.stderr == "[]\n"
    listed = " ".join(done.stdout.split()).replace("│ │", " ")
    for name, command in COMMANDS.items():
        first_words = " ".join(command.help.split()[:3])
        assert f"{name} {first_words}" in " ".join(listed.split())


def walk(app: App, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], App]]:
    """Every command below `app`, with the words that call it."""
    found = []
    for name in app:
        if name.startswith("-"):
            continue
        found += [((*path, name), app[name]), *walk(app[name], (*path, name))]
    return found


def test_every_command_and_every_flag_has_a_description() -> None:
    commands = walk(build_app())
    assert {path[0] for path, _ in commands} == set(COMMANDS)
    bare = [" ".join(path) for path, app in commands if not (app.help or "").strip()]
    for path, app in commands:
        if app.default_command is not None:
            arguments = app.assemble_argument_collection(parse_docstring=True)
            flags = [each for each in arguments if not each.children]
            bare += [f"{' '.join(path)} {flag.name}" for flag in flags if not flag.parameter.help]
    assert not bare


@pytest.mark.parametrize("arguments", [("plan", "-f", MI300X, "-o", "html"), ("plan", "--check")])
def test_a_reader_that_leaves_is_no_error(arguments: tuple[object, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        process = start(*arguments, stdout=writing)
    finally:
        os.close(writing)
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, err) == (READER_GONE, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_is_told_in_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        process = start("plan", "-f", MI300X, stdout=full.fileno())
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, err) == (2, "kimictl: standard output: No space left on device\n")


def test_interrupting_ends_with_one_line(tmp_path: Path) -> None:
    """It waits at a pipe that nobody writes to, so it is surely running when the signal comes."""
    pipe = tmp_path / "manifest.yaml"
    os.mkfifo(pipe)
    with start("plan", "-f", pipe, stdout=subprocess.PIPE) as process, pipe.open("w"):  # both sides have opened it
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out, err) == (INTERRUPTED, "", "kimictl: interrupted\n")


def test_a_command_that_is_called_leaves_its_caller_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    before = gc.get_threshold(), dict(os.environ)
    with pytest.raises(SystemExit):
        main(["profile", "list"])
    assert (gc.get_threshold(), dict(os.environ)) == before
    assert capsys.readouterr().out


def test_planning_loads_nothing_that_it_does_not_need() -> None:
    script = (
        "import sys; from kimi_operator.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print(*sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "plan", "-f", str(MI300X)],
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    loaded = set(done.stderr.split())
    packages = {"torch", "numpy", "kopf", "kubernetes", "aiohttp", "httpx", "rich", "asyncio", "structlog"}
    packages |= {"pydantic_settings", "prometheus_client", "docstring_parser"}
    own = {"search", "check", "changes", "explain", "sides", "page", "picture", "markdown", "needle", "profile"}
    assert not packages & loaded
    assert not {f"kimi_operator.cli.{name}" for name in own} & loaded
    assert not {"kimi_operator.render", "kimi_operator.planner.search", "kimi_operator.planner.published"} & loaded
