"""Command lines that a parser cannot read: said by flag, with what it got and what to do. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from kimi_operator.errors import Problem

if TYPE_CHECKING:
    from cyclopts import App, CycloptsError

_NEGATIVE = re.compile(r"-\.?[0-9]")
_NEAREST = {
    "--prompt-tokens": ("--first-prompt-tokens",),
    "--first-prompt-tokens": ("--prompt-tokens",),
    "--concurrency": ("--agents",),
    "--agents": ("--concurrency",),
}
"""Flags of other commands that state the same of a load, or nearly."""
_FILES = {"--compare": ("A.yaml", "B.yaml")}
"""Flags that take several files, as they could be written."""


def joined(words: Sequence[str]) -> list[str]:
    """The same words, a flag and a negative value behind it as one: `--ramp -60ms` is `--ramp=-60ms`.

    Parsers take `-60ms` for flags, and would never ask the flag before it what is wrong with its value.
    """
    found: list[str] = []
    for word in words:
        before = found[-1] if found else ""
        is_flag = before.startswith("--") and len(before) > len("--") and "=" not in before
        if is_flag and _NEGATIVE.match(word) and "--" not in found:
            found[-1] = f"{before}={word}"
        else:
            found.append(word)
    return found


def without_value(flag: str, words: Sequence[str], flags: Collection[str]) -> Problem:
    """A flag that needs a value and has none. `flags` are those of its command."""
    behind = [words[i + 1] for i, word in enumerate(words[:-1]) if word == flag]
    odd = next((word for word in behind if word.startswith("-") and word.split("=")[0] not in flags), None)
    if odd is None and flag in _FILES:
        return too_few_files(flag, [])
    if odd is None:
        return Problem(flag, "nothing", "a value", "write it behind the flag")
    return Problem(flag, f"{odd!r}, which reads as a flag", "a value", f"write {flag}={odd} if it is one")


def too_few_files(flag: str, given: Sequence[str]) -> Problem:
    """A flag that takes several files and has none, or not all."""
    files, num = _FILES[flag], len(given)
    remedy = f"write {' '.join((flag, *files))}"
    if not given:
        return Problem(flag, "nothing", f"{len(files)} files", remedy)
    return Problem(flag, f"{num} file{'' if num == 1 else 's'}", f"{len(files)}", remedy)


def of_others(flag: str, command: str, flags: Mapping[str, Collection[str]]) -> Problem | None:
    """A flag that only other commands have; None where no command has it. `flags` are those of each command."""
    others = [name for name, known in flags.items() if flag in known and name != command]
    if not others:
        return None
    own = flags[command]
    nearest = next((name for name in _NEAREST.get(flag, ()) if name in own), None)
    remedy = f"{command} has {nearest}" if nearest else "leave it out, or choose the other command"
    return Problem(flag, f"a flag of {' and '.join(others)}", f"a flag of {command}", remedy)


def misread(error: CycloptsError, words: Sequence[str], app: App) -> Problem | None:
    """What a parser's error is about; None where its own words say it."""
    from cyclopts import MissingArgumentError, UnknownOptionError  # noqa: PLC0415

    command = " ".join(error.command_chain or ())
    if isinstance(error, MissingArgumentError) and error.keyword is not None:
        if not error.tokens_so_far:
            return without_value(error.keyword, words, _flags(app, command))
        if error.keyword in _FILES:
            return too_few_files(error.keyword, error.tokens_so_far)
    if isinstance(error, UnknownOptionError):
        word = error.token.keyword or error.token.value
        names = {command, *(name for name in app if not name.startswith("-"))}
        return of_others(word.split("=")[0], command, {name: _flags(app, name) for name in sorted(names)})
    return None


def _flags(app: App, command: str) -> set[str]:
    """Every name of the flags of a command; none of a command that has others below it."""
    found = app
    for name in command.split():
        found = found[name]
    if found.default_command is None:
        return set()
    return {name for argument in found.assemble_argument_collection() for name in argument.names}
