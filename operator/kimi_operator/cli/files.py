"""Files of a command line, read as objects; whatever else a file may hold is refused by its name."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from kimi_operator.api.base import MOST_SHOWN, check_plain, parse
from kimi_operator.api.profile import HardwareProfile
from kimi_operator.cli.flags import refuse
from kimi_operator.errors import InvalidSpec, KimiError
from kimi_operator.profiles import built_in_profiles

MANIFEST = "an object with apiVersion, kind, metadata and spec"
STANDARD_INPUT = Path("-")
BYTE_ORDER_MARK = "\ufeff"
"""What some editors write before a text."""
MOST_CHARACTERS = 2**22
"""A manifest has a few thousand, a long run of needles some hundred thousand."""
MOST_VALUES = 200_000
"""Values of a document with every alias written out: a few lines of YAML can stand for billions."""
_MERGE = "tag:yaml.org,2002:merge"
_DIGITS = "integer string conversion"
"""In Python's words for whole numbers of too many digits."""
_TOO_MANY = "a number of too many digits"

Document = Mapping[str, Any]
Documents = list[tuple[Path, Document]]


def read_objects(file: Path, expected: str = MANIFEST) -> list[Document]:
    """Every object of a file of YAML or JSON; `-` is standard input. Empty documents are left out.

    Raises InvalidSpec that names the file: unreadable, too large, neither YAML nor JSON, or something but an object.
    """
    found = [document for document in _parsed(file, text_of(file)) if document is not None]
    for document in found:
        if not isinstance(document, Mapping):
            raise refuse_file([file], type(document).__name__, expected)
        check_values(str(file), document)
        check_plain(document, f"{file}: ")
    return found


def read_value(where: str, text: str) -> object:
    """A value of a command line, written as in YAML. Raises InvalidSpec that names `where`."""
    try:
        value = yaml.load(text, Loader=UniqueKeys)  # noqa: S506 - it adds to the safe one
    except DuplicateKeyError as error:
        raise refuse(where, str(error), "each key once", "leave one of them") from error
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:
        got = _TOO_MANY if _DIGITS in str(error) else repr(text[:MOST_SHOWN])
        raise refuse(where, got, "a value", "quote it as in YAML") from error
    check_values(where, value)
    check_plain(value, where)
    return value


def profiles_of(documents: Iterable[tuple[Path, Document]]) -> Mapping[str, HardwareProfile]:
    """The built-in profiles and those of the documents, by name. Raises InvalidSpec that names file and field."""
    profiles = dict(built_in_profiles())
    for file, document in documents:
        if document.get("kind") == "HardwareProfile":
            profile = parse(HardwareProfile, document, f"{file}: ")
            profiles[profile.metadata.name] = profile
    return profiles


def profiles_in(files: Iterable[Path]) -> Mapping[str, HardwareProfile]:
    """The built-in profiles and those in the files, by name. Raises InvalidSpec that names file and field."""
    found = []
    for file in files:
        stated = [(file, document) for document in read_objects(file) if document.get("kind") == "HardwareProfile"]
        if not stated:
            raise refuse_file([file], "no HardwareProfile", "at least one", "name a file that has one")
        found += stated
    return profiles_of(found)


def refuse_file(files: Iterable[Path], got: str, expected: str, remedy: str = "mend the file") -> InvalidSpec:
    """One thing that is wrong with these files."""
    return refuse(", ".join(str(file) for file in files), got, expected, remedy)


def text_of(file: Path) -> str:
    """What the file says; `-` is standard input. Raises InvalidSpec that names the file: unreadable or too large."""
    if file == STANDARD_INPUT and sys.stdin is None:
        raise refuse_file([file], "a closed standard input", "a readable one", "write the name of a file")
    try:
        if file == STANDARD_INPUT:
            text = sys.stdin.read(MOST_CHARACTERS + 1)
        else:
            with file.open(encoding="utf-8") as opened:
                text = opened.read(MOST_CHARACTERS + 1)
    except OSError as error:
        # both an empty name and the folder itself are this path
        reason = "an empty name, or the folder itself" if file == Path() else error.strerror or str(error)
        raise refuse_file([file], reason, "a readable file", "mend the file or its name") from error
    except UnicodeDecodeError as error:
        raise refuse_file([file], f"no UTF-8 ({error.reason} at byte {error.start})", "text in UTF-8") from error
    if len(text) > MOST_CHARACTERS:
        raise refuse_file([file], "a larger file", f"at most {MOST_CHARACTERS:,} characters", "name another file")
    return text.removeprefix(BYTE_ORDER_MARK)


def _parsed(file: Path, text: str) -> list[Any]:
    try:
        if text.lstrip().startswith("{"):
            # YAML 1.1 takes the 1e-05 of JSON for a text
            try:
                return [read_json(text)]
            except json.JSONDecodeError:
                pass  # YAML may begin with a brace too
        return list(yaml.load_all(text, Loader=UniqueKeys))
    except DuplicateKeyError as error:
        raise refuse_file([file], str(error), "each key once", "leave one of them") from error
    except yaml.MarkedYAMLError as error:
        raise refuse_file([file], f"no YAML or JSON: {_reason(error)}", "YAML or JSON") from error
    except (yaml.YAMLError, ValueError, TypeError, AttributeError) as error:
        # values that their tag or their look does not fit, such as the 45th of January
        reason = _TOO_MANY if _DIGITS in str(error) else " ".join(str(error).split())
        raise refuse_file([file], f"no YAML or JSON: {reason}", "YAML or JSON") from error
    except RecursionError as error:
        raise refuse_file([file], "objects in objects without end", "YAML or JSON of a few levels") from error


class DuplicateKeyError(KimiError):
    """An object has a key twice; says which, and where that is known."""


def read_json(text: str) -> Any:
    """One value of JSON. Raises DuplicateKeyError, RecursionError, or ValueError: no JSON, or too many digits."""
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = Counter(key for key, _ in pairs)
        raise DuplicateKeyError(f"the key {keys.most_common(1)[0][0]!r} more than once in an object")
    return found


class UniqueKeys(yaml.CSafeLoader):
    """Reads YAML as the safe loader does; of a key that stands twice in an object that one keeps the last."""

    def construct_document(self, node: yaml.Node) -> Any:
        """Raises DuplicateKeyError. Whole documents are looked at: keys that `<<` merges in may well be set anew."""
        waiting, seen = [node], set()
        while waiting:
            one = waiting.pop()
            if id(one) in seen or isinstance(one, yaml.ScalarNode):
                continue
            seen.add(id(one))
            if isinstance(one, yaml.MappingNode):
                _check_keys(one)
                waiting += [value for _, value in one.value]
            else:
                waiting += one.value
        return super().construct_document(node)


def _check_keys(node: yaml.MappingNode) -> None:
    lines: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
            continue
        line, known = key.start_mark.line + 1, (key.tag, key.value)
        if known in lines:
            both = (
                f"twice on line {line}" if lines[known] == line else f"on line {lines[known]} and again on line {line}"
            )
            raise DuplicateKeyError(f"the key {key.value!r} {both}")
        lines[known] = line


def _reason(error: yaml.MarkedYAMLError) -> str:
    """On one line, with the place."""
    place = "" if error.problem_mark is None else f"line {error.problem_mark.line + 1}: "
    return " ".join(f"{place}{error.problem or error.context}".split())


def check_values(where: str, document: object) -> None:
    """Raises InvalidSpec for more values than any manifest has, as aliases of aliases make, and for keys of no text."""
    left = MOST_VALUES
    waiting: list[Any] = [document]
    while waiting:
        value = waiting.pop()
        inside = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else []
        if isinstance(value, Mapping) and (odd := [key for key in value if not isinstance(key, str | int | float)]):
            raise refuse(where, f"the key {odd[0]!r}", "keys that are text", "quote it")
        left -= len(inside)
        if left < 0:
            expected = f"at most {MOST_VALUES:,} values, with each alias written out"
            raise refuse(where, "more values", expected, "mend its aliases, or name another file")
        waiting += inside
