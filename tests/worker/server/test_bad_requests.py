"""Whatever a client sends: an OpenAI-style error that names the field, never a 500, never a hang."""

import json
import re
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kimi_worker.protocol.openai import ApiError, ChatRequest, CompletionRequest, read_request
from kimi_worker.server.work import Intake
from replay_engine import Script
from replay_fixtures import MODEL, Pod

USER = {"role": "user", "content": "hello"}


def chat_body(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "messages": [USER], **fields}


@pytest.fixture(scope="module")
def intake(checkpoint) -> Intake:
    return Intake.load(checkpoint, MODEL, 512)


CHAT_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [5]}, "messages.0"),
    ({"messages": [{"content": "x"}]}, "messages.0.role"),
    ({"messages": [{**USER, "role": 5}]}, "messages.0.role"),
    ({"messages": [{**USER, "name": 5}]}, "messages.0.name"),
    ({"messages": [{"role": "user", "content": "a" * 600}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": 512}, "max_tokens"),
    ({"max_completion_tokens": 512}, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_completion_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"seed": 2**63}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": [""]}, "stop.0"),
    ({"stop": ""}, "stop"),
    ({"stop": "a" * 257}, "stop"),
    ({"stop": ["a" * 257]}, "stop.0"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"chat_template_kwargs": {"thinking": "no"}}, "chat_template_kwargs.thinking"),
    ({"chat_template_kwargs": {"color": 1}}, "chat_template_kwargs.color"),
    ({"reasoning_effort": "medium"}, "reasoning_effort"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"reasoning_effort": 5}, "reasoning_effort"),
    ({"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}}, "reasoning_effort"),
    ({"reasoning_effort": "high", "chat_template_kwargs": {"thinking": False}}, "reasoning_effort"),
    ({"n": 2}, "n"),
    ({"n": True}, "n"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"top_k": 5}, "top_k"),
    ({"temprature": 0.5}, "temprature"),
]


@pytest.mark.parametrize(("fields", "param"), CHAT_ERRORS)
def test_a_wrong_field_is_named(intake: Intake, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        intake.chat_work(json.dumps(chat_body(**fields)).encode())
    assert caught.value.status == 400
    assert caught.value.param == param
    assert param in caught.value.message


WORDS: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "function"}]}, "tools: got a list of 1; this server does not call tools; leave the field out"),
    ({"tool_choice": "required"}, "tool_choice: got 'required'; this server does not call tools; leave the field out"),
    ({"messages": [USER, {"role": "tool", "content": "5"}]}, "messages.1.role: got 'tool'; this server does not call"),
    (
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}, {}]}]},
        "messages.0.tool_calls: got a list of 2; this server does not call tools; leave the field out",
    ),
    ({"messages": [{**USER, "weight": 1}]}, "messages.0.weight: unknown field; leave it out or mend its spelling"),
    ({"n": 2}, "n: got 2; one request gets one answer, so send one for each; leave the field out"),
    ({"n": True}, "n: got true; "),
    ({"response_format": {"type": "json_object"}}, "response_format: got an object; answers are free text"),
    ({"max_tokens": 0}, "max_tokens: got 0; want at least 1"),
    ({"max_tokens": True}, "max_tokens: got true; want an integer"),
    ({"stop": ["a"] * 17}, "stop: got a list of 17; want a list of at most 16 items"),
    ({"messages": None}, "messages: got null; want a list"),
    ({"messages": [{"content": "x"}]}, "messages.0.role: is missing; send it"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage: unknown field; leave it out"),
]


@pytest.mark.parametrize(("fields", "words"), WORDS)
def test_an_error_says_what_came_and_what_to_do(intake: Intake, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError) as caught:
        intake.chat_work(json.dumps(chat_body(**fields)).encode())
    assert caught.value.message.startswith(words)


PYTHON = re.compile(r"\b(None|True|False|dict|list\)|str|NoneType|Input should|should have|is supported)\b|[{\[]")


@pytest.mark.parametrize(("fields", "_"), CHAT_ERRORS)
def test_no_error_speaks_python(intake: Intake, fields: dict[str, Any], _: str) -> None:
    with pytest.raises(ApiError) as caught:
        intake.chat_work(json.dumps(chat_body(**fields)).encode())
    assert not PYTHON.search(caught.value.message), caught.value.message


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ("", "prompt"),
        ([], "prompt"),
        ([[]], "prompt"),
        (["a", "b"], "prompt"),
        ([[1], [2]], "prompt"),
        ([1, "a"], "prompt.1"),
        ([-1], "prompt.0"),
        ([10**6], "prompt"),
        ({"text": "x"}, "prompt"),
        ("a" * 512, "prompt"),
    ],
)
def test_a_wrong_prompt_is_named(intake: Intake, prompt: object, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        intake.completion_work(json.dumps({"prompt": prompt}).encode())
    assert caught.value.status == 400
    assert str(caught.value.param).startswith("prompt")
    if param == "prompt":
        assert caught.value.message.startswith("prompt")


def test_the_place_of_an_image_is_no_prompt(intake: Intake) -> None:
    """Its token would be read as text, and the answer would be about nothing."""
    for name in ("<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>"):
        token = intake.tokenizer.special[name]
        with pytest.raises(ApiError) as caught:
            intake.completion_work(json.dumps({"prompt": [104, token]}).encode())
        assert caught.value.param == "prompt"
        assert f"token id {token} at 1 is {name}" in caught.value.message


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low"}, True),
        ({"chat_template_kwargs": {"thinking": True}}, True),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"thinking": True}}, True),
    ],
)
def test_how_much_to_think(intake: Intake, fields: dict[str, Any], thinking: bool) -> None:
    """Where nothing is said the checkpoint decides, and the effort is the release's highest."""
    work = intake.chat_work(json.dumps(chat_body(**fields)).encode())
    assert work.thinking is thinking
    effort = fields.get("reasoning_effort", "max")
    assert (f"`thinking_effort={effort}`" in intake.tokenizer.decode(work.token_ids)) is thinking


def test_equal_limits_are_one(intake: Intake) -> None:
    work = intake.chat_work(json.dumps(chat_body(max_tokens=5, max_completion_tokens=5)).encode())
    assert work.sampling.max_tokens == 5


HARMLESS: dict[str, Any] = {
    "n": 1,
    "user": "me",
    "metadata": {"a": "b"},
    "tools": [],
    "tool_choice": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0,
    "response_format": {"type": "text"},
    "logit_bias": None,
    "top_k": -1,
    "repetition_penalty": 1.0,
    "skip_special_tokens": True,
    "store": False,
    "stop": None,
    "seed": None,
    "temperature": None,
    "stream": False,
    "logprobs": False,
}


def test_what_changes_nothing_is_accepted(intake: Intake) -> None:
    plain, dressed = (intake.chat_work(json.dumps(chat_body(**fields)).encode()) for fields in ({}, HARMLESS))
    assert replace(dressed, request_id=plain.request_id, created_s=plain.created_s) == plain


BROKEN = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"\xff\xfe",
    b'{"messages": "\xff"}',
    b'{"a": NaN}',
    b"[" * 10_000,
    b'{"x":' * 5_000,
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": ' + b"9" * 5_000 + b"}",
    b'"text"',
    b"model=tiny&prompt=a",
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_broken_bodies(pod: Pod, path: str) -> None:
    async with httpx.AsyncClient(base_url=pod.url, timeout=60) as http:
        for body in BROKEN:
            reply = await http.post(path, content=body)
            assert reply.status_code == 400, body[:40]
            assert reply.json()["error"]["type"] == "invalid_request_error"
            assert reply.json()["error"]["message"]
    assert not pod.engine.submits


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, *HARMLESS, "odd", ""}))


@given(changes=st.dictionaries(FIELDS, JSON, max_size=4), is_chat=st.booleans())
@settings(max_examples=400)
def test_any_json_is_work_or_a_named_error(intake: Intake, changes: dict[str, Any], is_chat: bool) -> None:
    body = json.dumps({**(chat_body() if is_chat else {"prompt": "hello"}), **changes}).encode()
    try:
        work = (intake.chat_work if is_chat else intake.completion_work)(body)
    except ApiError as error:
        named = 400 <= error.status < 500 and error.message and error.param is not None
        assert named, error  # noqa: PT017  # either outcome is right
    else:
        assert work.token_ids
        assert 1 <= work.sampling.max_tokens <= 512 - len(work.token_ids)


@given(body=st.binary(max_size=60))
def test_any_bytes_are_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read_request(body, ChatRequest)
    assert caught.value.status == 400


async def test_odd_http_gets_an_openai_error(pod: Pod) -> None:
    async with httpx.AsyncClient(base_url=pod.url, timeout=60) as http:
        for reply, status in (
            (await http.get("/nothing"), 404),
            (await http.get("/v1/completions"), 405),
            (await http.post("/v1/models"), 405),
            (await http.post("/v1/completions", content=b" " * 2_000_000), 413),
        ):
            assert reply.status_code == status
            assert reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {"x-kimi-lane": "one"},
        {"x-kimi-lane": "7"},
        {"x-kimi-lane": "-1"},
        {"x-kimi-lane": "0000000005"},
        {"x-kimi-lane": "0" * 10 + "9" * 5000},
        {"x-kimi-lane": "²"},
        {"x-kimi-prefill": "http://example"},
        {"x-kimi-prefill": "tcp://host:port"},
        {"x-kimi-prefill": "tcp://!:1"},
    ],
)
async def test_wrong_routing_headers_are_named(pod: Pod, headers: dict[str, str]) -> None:
    async with httpx.AsyncClient(base_url=pod.url, timeout=60) as http:
        encoded = {name: value.encode() for name, value in headers.items()}
        reply = await http.post("/v1/completions", json={"prompt": "a"}, headers=encoded)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == next(iter(headers))


async def test_a_bad_request_leaves_nothing_behind(pod: Pod) -> None:
    async with httpx.AsyncClient(base_url=pod.url, timeout=60) as http:
        for fields, _ in CHAT_ERRORS:
            reply = await http.post("/v1/chat/completions", json=chat_body(**fields))
            assert reply.status_code == 400
        assert pod.app.state.pod.lanes.num_requests == 0
        pod.play(Script([104, 105]))
        assert (await http.post("/v1/completions", json={"prompt": "a"})).json()["choices"][0]["text"] == "hi"
