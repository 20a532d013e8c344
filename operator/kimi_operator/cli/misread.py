"""Command lines that a parser cannot read: said by flag, with what it got and what to do. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, get_args

from kimi_operator.cli.flags import shown
from kimi_operator.errors import Problem

if TYPE_CHECKING:
    from cyclopts import App, CycloptsError, MissingArgumentError
    from cyclopts.argument import Argument

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

_ENDINGS = (".yaml", ".yml", ".json")


def joined(words: Sequence[str]) -> list[str]:
    """The same words, a flag and a negative value behind it as one: `--ramp -60ms` is `--ramp=-60ms`.

    Parsers take `-60ms` for flags, and would never ask the flag before it what is wrong with its value.
    """
    found: list[str] = []
    for word in words:
        before = found[-1] if found else ""
        is_flag = before.startswith("--") and len(before) > len("--") and "=" not in before
        if word == "-" and "--compare" in found[-2:]:
            # standard input: the parser takes a lone hyphen for a flag, and both are the same path
            found.append("./-")
        elif is_flag and _NEGATIVE.match(word) and "--" not in found:
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


def too_many(words: Sequence[str], command: str, *, takes_file: bool) -> Problem:
    """Words that belong to no flag."""
    word = words[0]
    if takes_file and word.endswith(_ENDINGS):
        return Problem(repr(word), "a file without a flag", "one behind -f", f"write -f {word}")
    remedy = "leave it out, or quote a value that has spaces"
    return Problem(repr(word), "a word that belongs to no flag", f"none at the end of {command}", remedy)


def not_given(argument: Argument, command: str) -> Problem:
    """An argument or a flag that the command cannot do without."""
    if argument.index is None:
        return Problem(argument.name, "nothing", "a value", f"add {argument.name}")
    name = argument.name.lstrip("-").upper()
    return Problem(name, "nothing", "a value", f"write {command} {name}")


def unfit(flag: str, value: str, target: object) -> Problem | None:
    """A value that is none of its flag's kind. None for kinds that say so themselves."""
    if choices := [str(choice) for choice in get_args(target) if isinstance(choice, str)]:
        return Problem(flag, shown(value), f"one of {', '.join(choices)}", "choose one of them")
    if target is bool:
        return Problem(flag, shown(value), "no value", f"write {flag} alone")
    return Problem(flag, shown(value), "a number", "write one such as 2.5") if target is float else None


def misread(error: CycloptsError, words: Sequence[str], app: App) -> Problem | None:
    """What a parser's error is about; None where its own words say it."""
    from cyclopts import (  # noqa: PLC0415
        CoercionError,
        MissingArgumentError,
        RepeatArgumentError,
        UnknownOptionError,
        UnusedCliTokensError,
    )

    command = " ".join(error.command_chain or ())
    match error:
        case MissingArgumentError():
            return _missing(error, words, _flags(app, command))
        case UnknownOptionError(token=token):
            names = {command, *(name for name in app if not name.startswith("-"))}
            word = (token.keyword or token.value).split("=")[0]
            return of_others(word, command, {name: _flags(app, name) for name in sorted(names)})
        case UnusedCliTokensError(unused_tokens=[_, *_] as unused):
            return too_many(unused, command, takes_file="-f" in _flags(app, command) and "--compare" not in words)
        case RepeatArgumentError(token=token):
            return Problem(str(token.keyword), "it more than once", "it once", "leave all but one out")
        case CoercionError(token=token, target_type=target) if token is not None:
            return unfit(token.keyword or "", token.value, target)
    return None


def _missing(error: MissingArgumentError, words: Sequence[str], flags: Collection[str]) -> Problem | None:
    if error.keyword is None:
        return None if error.argument is None else not_given(error.argument, " ".join(error.command_chain or ()))
    if not error.tokens_so_far:
        return without_value(error.keyword, words, flags)
    return too_few_files(error.keyword, error.tokens_so_far) if error.keyword in _FILES else None


def _flags(app: App, command: str) -> set[str]:
    """Every name of the flags of a command; none of a command that has others below it."""
    found = app
    for name in command.split():
        found = found[name]
    if found.default_command is None:
        return set()
    return {name for argument in found.assemble_argument_collection() for name in argument.names}
