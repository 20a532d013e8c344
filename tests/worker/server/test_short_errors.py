"""However long what a client sends is, the error about it is short."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import httpx
import pytest
from kimi_worker.protocol import openai
from kimi_worker.protocol.openai import ApiError, ChatRequest, CompletionRequest, GenerationRequest
from kimi_worker.server.http import error_response
from kimi_worker.server.work import Intake
from pydantic import BaseModel
from replay_fixtures import MODEL, Pod

MAX_BYTES = 1000
SIZE = 3_000
LONG = {
    "letters": "a" * SIZE,
    "quotes": '"' * SIZE,
    "controls": "\x01" * SIZE,
    "emoji": "\U0001f600" * SIZE,
}
BODIES: dict[type[GenerationRequest], dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "a"}]},
    CompletionRequest: {"prompt": "a"},
}
FIELDS = [*openai._HARMLESS, *openai._UNSUPPORTED]


@pytest.fixture(scope="module")
def intake(checkpoint: Path) -> Intake:
    return Intake.load(checkpoint, MODEL, 512)


def models_in(annotation: object) -> Iterator[type[BaseModel]]:
    """The kinds of objects that a field may hold, also in lists."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (list, Union, UnionType, Annotated):
        for inner in get_args(annotation):
            yield from models_in(inner)


def places(kind: type[BaseModel], valid: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Every field of a body and of the objects in it, as (body, name), and one that nobody knows."""
    for name in [*kind.model_fields, "unknown"]:
        yield valid, name
    for name, field in kind.model_fields.items():
        for model in models_in(field.annotation):
            is_list = name == "messages"
            base = dict(valid[name][0]) if is_list else {}
            for inner, deeper in places(model, base):
                yield (
                    {**valid, name: [{**inner}] if is_list else {**inner}},
                    f"{name}.{'0.' if is_list else ''}{deeper}",
                )


def changed(body: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """The body with this value at a path."""
    body = json.loads(json.dumps(body))
    *way, last = path.split(".")
    at: Any = body
    for step in way:
        at = at[int(step) if isinstance(at, list) else step]
    at[last] = value
    return body


def bad_values(text: str) -> list[object]:
    return [text, [text], {text: 1}, {"type": text}, [{"type": text}], [{"type": [text]}], [{"type": "text", text: 1}]]


def error_of(intake: Intake, kind: type[GenerationRequest], body: dict[str, Any]) -> ApiError | None:
    try:
        (intake.chat_work if kind is ChatRequest else intake.completion_work)(json.dumps(body).encode())
    except ApiError as error:
        return error
    return None


def size_of(error: ApiError) -> int:
    response = error_response(error)
    return len(response.body) + sum(len(name) + len(value) for name, value in response.raw_headers)


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
@pytest.mark.parametrize("kind", BODIES)
def test_a_long_value_or_name_anywhere(intake: Intake, kind: type[GenerationRequest], text: str) -> None:
    valid = BODIES[kind]
    assert error_of(intake, kind, valid) is None
    paths = [*places(kind, valid), *((valid, name) for name in FIELDS)]
    bodies = [changed(body, path, value) for body, path in paths for value in bad_values(text)]
    bodies += [changed(body, ".".join([*path.split(".")[:-1], text]), 1) for body, path in paths]
    errors = [error for body in bodies if (error := error_of(intake, kind, body))]
    refused = {str(error.param) for error in errors}
    assert {"model", "stop", "seed", "tools", "stream"} <= refused
    if kind is ChatRequest:
        wanted = {"messages.0.role", "messages.0.content.0.type", "reasoning_effort", "chat_template_kwargs.thinking"}
        assert wanted <= refused
    assert [(error.param, size) for error in errors if (size := size_of(error)) > MAX_BYTES] == []


def test_a_contradiction_with_a_long_effort(intake: Intake) -> None:
    body = {**BODIES[ChatRequest], "reasoning_effort": LONG["quotes"], "chat_template_kwargs": {"thinking": False}}
    error = error_of(intake, ChatRequest, body)
    assert error
    assert error.param == "reasoning_effort"
    assert size_of(error) < MAX_BYTES


@pytest.mark.parametrize("digits", [60, 4000, 5000])
def test_long_numbers(intake: Intake, digits: int) -> None:
    number = "9" * digits
    for kind, valid in BODIES.items():
        for name in kind.model_fields:
            body = json.dumps(changed(valid, name, "NUMBER")).replace('"NUMBER"', number)
            with pytest.raises(ApiError) as caught:
                (intake.chat_work if kind is ChatRequest else intake.completion_work)(body.encode())
            assert size_of(caught.value) < MAX_BYTES
    kinds = f'{{"messages": [{{"role": "user", "content": [{{"type": {number}}}]}}]}}'
    with pytest.raises(ApiError) as caught:
        intake.chat_work(kinds.encode())
    assert size_of(caught.value) < MAX_BYTES


async def test_over_http(pod: Pod) -> None:
    """A path, a header, a megabyte."""
    text, role = "x" * 20_000, {"messages": [{"role": "x" * 1_000_000, "content": "a"}]}
    async with httpx.AsyncClient(base_url=pod.url, timeout=60) as http:
        replies = [await http.get(f"/{text}"), await http.get(f"/v1/models/{text}"), await http.get("/" + "%01" * 5000)]
        replies.append(await http.post("/v1/chat/completions", json=role))
        for name in ("x-kimi-lane", "x-kimi-prefill"):
            replies.append(await http.post("/v1/completions", json={"prompt": "a"}, headers={name: text}))
    assert {reply.status_code for reply in replies} == {404, 400}
    assert [len(reply.content) for reply in replies if len(reply.content) > MAX_BYTES] == []


def test_an_echo_can_be_recognised() -> None:
    assert openai.echo("user") == "'user'"
    assert openai.echo("a" * 58) == f"'{'a' * 58}'"
    assert openai.echo("a" * 59).endswith("...")
    assert [openai.echo(value) for value in (1.5, True, None, 10**9, 10**70, [1], {})] == [
        "1.5", "true", "null", "1000000000", "a number of over 60 digits", "a list of 1", "an object",
    ]  # fmt: skip
