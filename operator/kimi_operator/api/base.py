"""What all models of the API share: camelCase names, frozen values, unknown fields are errors, exact quantities."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic.alias_generators import to_camel

from kimi_operator.api.quantity import MOST_BYTES, QUANTITY_PATTERN, REFUSED, checked, read_bytes
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.numerals import whole

GROUP = "kimi-operator.io"
VERSION = "v1alpha1"
API_VERSION: Final = "kimi-operator.io/v1alpha1"


class ApiModel(BaseModel):
    """A frozen value of the API. Strict: a string is no number. Read with `parse`, write with `dump`."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_alias=True,
        validate_by_name=True,
        frozen=True,
        extra="forbid",
        strict=True,
        defer_build=True,
    )

    @classmethod
    def instead_of(cls, value: object) -> str:  # noqa: ARG003 - some models know what is meant by it
        """What to write instead of a value that is no object."""
        return "correct the value"


_INT_OR_STRING = {
    "x-kubernetes-int-or-string": True,
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "pattern": QUANTITY_PATTERN,
    "maxLength": 24,
}


def rule(cel: str, message: str, *, field_path: str = "") -> dict[str, Any]:
    """One CEL rule, as it stands in a CRD; `self` is the value, `oldSelf` its former one.

    The message is fixed: one that is put together from values costs more than the API server allows.
    """
    return {"rule": cel, "message": message, **({"fieldPath": field_path} if field_path else {})}


def rules(*items: dict[str, Any]) -> dict[str, Any]:
    """Extra JSON schema that carries CEL rules; pydantic itself does not look at them."""
    return {"x-kubernetes-validations": list(items)}


def immutable(what: str) -> dict[str, Any]:
    """Extra JSON schema of a field that keeps its first value."""
    return rules(rule("self == oldSelf", f"{what} cannot change; create a new KimiDeployment instead"))


def _read_field(value: object, info: ValidationInfo) -> int:
    return read_bytes(value, info.field_name or "")


# Bytes: read from a quantity, held as an exact integer.
Bytes = Annotated[int, BeforeValidator(_read_field), Field(ge=0, le=MOST_BYTES), WithJsonSchema(_INT_OR_STRING)]
# A quantity that is passed on as it was written (cpu: 500m, memory: 64Gi).
Quantity = Annotated[
    Annotated[str, StringConstraints(pattern=QUANTITY_PATTERN, max_length=24)] | Annotated[int, Field(ge=0)],
    BeforeValidator(checked),
    WithJsonSchema(_INT_OR_STRING),
]
# Any object of the Kubernetes API that this API passes on unread; the API server checks it where it is used.
FreeForm = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "x-kubernetes-preserve-unknown-fields": True})]

A_LIST = "a list"
A_WHOLE_NUMBER = "a valid integer"
"""In pydantic's words."""

MOST_SHOWN = 120
"""Characters of a wrong value in a message; it may be a whole object."""
MOST_FIELDS = 12
"""Fields that are listed where one is misspelt; objects of Kubernetes have dozens."""
MOST_DIGITS = 1000
"""Of a whole number; Python writes none of more than 4,300, and no field takes one of 30."""
MOST_LEVELS = 100
"""Objects in objects; readers of JSON end at some more, and an object of Kubernetes has a dozen."""

_HALF = re.compile("[\ud800-\udfff]")
"""Of a character of JSON that takes two escapes."""

Model = TypeVar("Model", bound=BaseModel)


def parse(model: type[Model], document: Mapping[str, Any], where: str = "") -> Model:
    """Validate a document as the API server would hand it over.

    Raises InvalidSpec with one problem a wrong field; `where` is put before each field's path; one that ends
    in a colon and a space, as a file does, without a dot.
    """
    try:
        # JSON mode: strict about numbers and strings, but a list may become a tuple and a string an enum.
        return model.model_validate_json(json.dumps(document, default=str))
    except ValidationError as error:
        if any(item["type"] == "json_invalid" for item in error.errors()):
            check_plain(document, where)
        raise InvalidSpec(tuple(_problem(item, where, model) for item in error.errors())) from error
    except (ValueError, RecursionError):
        check_plain(document, where)
        raise


def check_plain(document: object, where: str = "") -> None:
    """Raises InvalidSpec for what JSON cannot carry: endless nesting, numbers of many digits, halves of characters.

    `where` as in `parse`.
    """
    waiting: list[tuple[tuple[object, ...], object]] = [((), document)]
    while waiting:
        place, value = waiting.pop()
        if len(place) > MOST_LEVELS:
            got, expected = f"more than {MOST_LEVELS} levels of objects in objects", f"at most {MOST_LEVELS}"
            raise InvalidSpec((Problem(_named(where, place[:1]), got, expected, "write it flatter"),))
        inside = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
        keys = list(value) if isinstance(value, Mapping) else []
        for each, what in [*((key, "a key, ") for key in keys), (value, "")]:
            if odd := _odd(each):
                raise InvalidSpec((Problem(_named(where, place), what + odd[0], *odd[1:]),))
        waiting += [((*place, key), item) for key, item in inside]


def _odd(value: object) -> tuple[str, str, str] | None:
    """What a value is, what was expected and what to do, where JSON cannot carry it."""
    if isinstance(value, int) and (digits := round(value.bit_length() * math.log10(2))) > MOST_DIGITS:
        return f"a whole number of about {digits:,} digits", f"at most {MOST_DIGITS:,} digits", "correct the value"
    if isinstance(value, str) and not value.isascii() and (half := _HALF.search(value)):
        return f"half a character, {half[0]!a}", "both halves, or none", "mend the text"
    return None


def dump(model: BaseModel) -> dict[str, Any]:
    """The model as the API server takes it: camelCase, without fields that are absent."""
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)


def _problem(item: Any, where: str, model: type[BaseModel]) -> Problem:
    place, field = item["loc"], _named(where, item["loc"])
    got = _shortened(_written(item["input"]))
    match item["type"]:
        case "extra_forbidden":
            remedy = f"remove it or mend its spelling{_hint(str(place[-1]), fields_at(model, place[:-1]))}"
            return Problem(field, got, "no such field", remedy)
        case kind if kind == REFUSED:
            context = item["ctx"]
            if context["key"]:
                field, got = f"{field}.{context['key']}", _shortened(_written(item["input"][context["key"]]))
            return Problem(field, got, context["expected"], context["remedy"])
        case "missing":
            return Problem(field, "nothing", "a value", "set it")
        case "model_type" if 0 < len(names := fields_at(model, place)) <= MOST_FIELDS:
            remedy = next(
                each.instead_of(item["input"]) for each in _models_at(model, place) if issubclass(each, ApiModel)
            )
            return Problem(field, got, f"an object with any of {', '.join(names)}", remedy)
        case _:
            expected = _expected(item)
            return Problem(field, got, expected, _other_spelling(item["input"], expected))


def _expected(item: Any) -> str:
    """In the words of YAML and JSON, which know no tuples."""
    match item:
        case {"type": "too_short", "ctx": {"min_length": least}}:
            return f"{least} or more entries"
        case {"type": "too_long", "ctx": {"max_length": most}}:
            return f"{most:,} entries or fewer"
        case {"type": "tuple_type" | "list_type"}:
            return A_LIST
    text: str = item["msg"]
    return text.removeprefix("Value error, ").removeprefix("Input should be ")


def _other_spelling(value: object, expected: str) -> str:
    """What to write instead of a value that is near what is expected: a whole number, a word of several, a list."""
    if expected == A_WHOLE_NUMBER and (number := whole(value)) is not None:
        return f"write {number}"
    if expected == A_LIST and isinstance(value, int | float | str):
        return f"write [{value}]"
    alike = [word for word in re.findall(r"'([^']*)'", expected) if word.lower() == str(value).lower()]
    return f"write {alike[0]}" if alike else "correct the value"


def _named(where: str, place: Sequence[object]) -> str:
    path = ".".join(map(str, place))
    if where and not where.endswith(": "):
        return f"{where}.{path}" if path else where
    return where + (path or "the document")


def fields_at(model: type[BaseModel], place: Sequence[int | str]) -> list[str]:
    """Names of the fields that the object at this place may have, as they are written; none for a free form."""
    return list(dict.fromkeys(name for each in _models_at(model, place) for name, _ in _written_fields(each)))


def paths_of(model: type[BaseModel], name: str) -> Iterator[str]:
    """Where below a model a field of this name stands."""
    for field, info in _written_fields(model):
        if field == name:
            yield field
        yield from (f"{field}.{path}" for inner in _models_in(info.annotation) for path in paths_of(inner, name))


def _models_at(model: type[BaseModel], place: Sequence[int | str]) -> list[type[BaseModel]]:
    models = [model]
    for part in place:
        inner = [field.annotation for each in models for name, field in _written_fields(each) if name == part]
        # a place in a list and a key of a table are no field, and leave what may stand there
        if inner:
            models = [found for annotation in inner for found in _models_in(annotation)]
    return models


def _written_fields(model: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    return ((field.alias or to_camel(name), field) for name, field in model.model_fields.items())


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def _hint(wrong: str, names: list[str]) -> str:
    """What may be meant, and what there is; empty where neither is known."""
    plain = {name.lower(): name for name in names}
    begun = [name for name in plain if len(wrong) > 2 and name.startswith(wrong.lower())]
    near = [plain[name] for name in (begun or difflib.get_close_matches(wrong.lower(), plain, 1))[:1]]
    hint = f"; did you mean {near[0]}?" if near else ""
    if not 0 < len(names) <= MOST_FIELDS:
        return hint
    return f"{hint or ';'} known here: {', '.join(names)}"


def _written(value: object) -> str:
    """Objects, lists, booleans and null as in JSON."""
    is_plain = value is None or isinstance(value, dict | list | bool)
    return json.dumps(value, ensure_ascii=False) if is_plain else repr(value)


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 3]}..."
