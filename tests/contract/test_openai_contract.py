"""The official OpenAI client against a pod and against the router, unchanged."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from kimi_worker.server.text import Tokenizer
from openai import AsyncOpenAI
from replay_engine import Script
from replay_fixtures import MODEL, Pod, said

ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
async def client(pod: Pod, front: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{front}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


async def test_models(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt")


async def test_chat(pod: Pod, client: AsyncOpenAI, tokenizer: Tokenizer) -> None:
    answer = said(tokenizer, "hello world €")
    pod.play(Script(answer))
    reply = await client.chat.completions.create(**ASK)
    assert reply.choices[0].message.content == "hello world €"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage
    assert reply.usage.completion_tokens == len(answer)
    assert reply.usage.prompt_tokens == len(pod.engine.submits[0].token_ids)
    assert not pod.engine.cancels


async def test_chat_stream(pod: Pod, client: AsyncOpenAI, tokenizer: Tokenizer) -> None:
    answer = said(tokenizer, "hello world €")
    pod.play(Script(answer))
    stream = await client.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello world €"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == len(answer)
    assert len({chunk.id for chunk in chunks}) == 1


async def test_thinking_is_apart(pod: Pod, client: AsyncOpenAI, tokenizer: Tokenizer) -> None:
    controls = tokenizer.controls
    opened = [controls.open, *tokenizer.encode("response"), controls.sep]
    thought = [*tokenizer.encode("hm"), controls.close, *tokenizer.encode("think"), controls.sep]
    pod.play(Script([*thought, *opened, *said(tokenizer, "yes")]))
    on = {"chat_template_kwargs": {"thinking": True}}
    reply = await client.chat.completions.create(**ASK, extra_body=on)
    assert reply.choices[0].message.content == "yes"
    assert reply.choices[0].message.reasoning_content == "hm"
    stream = await client.chat.completions.create(**ASK, stream=True, extra_body=on)
    deltas = [chunk.choices[0].delta async for chunk in stream]
    assert "".join(delta.content or "" for delta in deltas) == "yes"
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "hm"


async def test_logprobs_and_token_ids(pod: Pod, client: AsyncOpenAI, tokenizer: Tokenizer) -> None:
    answer = said(tokenizer, "hello €")
    pod.play(Script(answer, tokens_per_output=2))
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "extra_body": {"return_token_ids": True}}
    reply = await client.chat.completions.create(**ASK, **options)
    stream = await client.chat.completions.create(**ASK, **options, stream=True)
    chunks = [chunk async for chunk in stream]
    assert reply.choices[0].token_ids == answer
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == answer
    assert reply.prompt_token_ids == chunks[0].prompt_token_ids == pod.engine.submits[0].token_ids
    assert reply.choices[0].logprobs
    entries = reply.choices[0].logprobs.content or []
    assert [entry.logprob for entry in entries] == [-0.5 - token / 1024 for token in answer]
    assert b"".join(bytes(entry.bytes or []) for entry in entries).startswith("hello €".encode())
    assert [len(entry.top_logprobs) for entry in entries] == [2] * len(answer)
    streamed = [
        entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == entries


async def test_stop_string_ends_the_request_in_the_lane(pod: Pod, client: AsyncOpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello world, the answer is 5")
    # the last token never comes: what ends the request is the stop string
    pod.play(Script(ids, tokens_per_output=len(ids) - 1, gate=asyncio.Event()))
    reply = await client.chat.completions.create(**ASK, stop=[" the answer", "nothing"])
    assert reply.choices[0].message.content == "hello world,"
    assert reply.choices[0].finish_reason == "stop"
    await pod.engine.until(lambda engine: bool(engine.cancels))
    stream = await client.chat.completions.create(**ASK, stop=" the answer", stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello world,"
    await pod.engine.until(lambda engine: len(engine.cancels) == 2)


async def test_completions(pod: Pod, client: AsyncOpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello world")
    pod.play(Script(ids, finish_reason="length"))
    for prompt in ("the answer", tokenizer.encode("the answer"), ["the answer"]):
        reply = await client.completions.create(model=MODEL, prompt=prompt, logprobs=1, max_tokens=2)
        assert reply.choices[0].text == "hello world"
        assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].logprobs
    assert reply.choices[0].logprobs.tokens == ["hello", " world"]
    assert reply.choices[0].logprobs.text_offset == [0, 5]
    stream = await client.completions.create(model=MODEL, prompt="the answer", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "hello world"
    assert {tuple(submit.token_ids) for submit in pod.engine.submits} == {tuple(tokenizer.encode("the answer"))}
    assert pod.engine.submits[-1].sampling.max_tokens == 16


async def test_sampling_arrives_in_the_lane(pod: Pod, client: AsyncOpenAI, tokenizer: Tokenizer) -> None:
    pod.play(Script(tokenizer.encode("x")))
    await client.chat.completions.create(**ASK, temperature=0, top_p=0.5, seed=7, max_completion_tokens=9)
    sampling = pod.engine.submits[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.max_tokens) == (0.0, 0.5, 7, 9)
    assert sampling.logprobs is None
    assert set(sampling.stop_token_ids) == tokenizer.stop_ids
    await client.chat.completions.create(**ASK, extra_body={"ignore_eos": True, "stop_token_ids": [4]})
    sampling = pod.engine.submits[1].sampling
    assert (sampling.temperature, sampling.ignore_eos, sampling.stop_token_ids) == (1.0, True, (4,))
    assert sampling.max_tokens == 512 - len(pod.engine.submits[1].token_ids)


async def test_errors_have_openai_classes(pod: Pod, client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await client.chat.completions.create(**ASK, temperature=3)
    with pytest.raises(openai.BadRequestError, match="tools"):
        await client.chat.completions.create(**ASK, tools=[{"type": "function", "function": {"name": "f"}}])
    with pytest.raises(openai.NotFoundError, match="gpt"):
        await client.chat.completions.create(**{**ASK, "model": "gpt"})
    pod.play(Script(refusal=("queue_full", True)))
    with pytest.raises(openai.RateLimitError) as caught:
        await client.chat.completions.create(**ASK, stream=True)
    assert caught.value.response.headers["retry-after"] == "2"
    pod.play(Script(failure=("engine_error", False)))
    with pytest.raises(openai.InternalServerError, match="scripted"):
        await client.chat.completions.create(**ASK)


async def test_a_failure_within_a_stream_is_an_error_event(pod: Pod, client: AsyncOpenAI, tokenizer: Tokenizer) -> None:
    pod.play(Script(tokenizer.encode("hello"), failure=("engine_error", False)))
    stream = await client.chat.completions.create(**ASK, stream=True)
    assert (await anext(stream)).choices[0].delta.content == "hello"
    with pytest.raises(openai.APIError, match="scripted engine_error"):
        await anext(stream)


async def test_a_client_that_goes_cancels_its_request(pod: Pod, client: AsyncOpenAI, tokenizer: Tokenizer) -> None:
    pod.play(Script(tokenizer.encode("hello world"), gate=asyncio.Event()))
    stream = await client.chat.completions.create(**ASK, stream=True)
    assert (await anext(stream)).choices
    await stream.close()
    await pod.engine.until(lambda engine: len(engine.cancels) == 1)

    pod.play(Script(admission=asyncio.Event()))
    waiting = asyncio.create_task(client.chat.completions.create(**ASK))
    await pod.engine.until(lambda engine: len(engine.submits) == 2)
    waiting.cancel()
    await pod.engine.until(lambda engine: len(engine.cancels) == 2)
    assert [submit.request_id for submit in pod.engine.submits] == pod.engine.cancels


async def test_many_streams_at_once(pod: Pod, client: AsyncOpenAI, tokenizer: Tokenizer) -> None:
    """Each request gets its own answer: the replayed one is the prompt of the request."""
    pod.play(lambda submit: Script(submit.token_ids, finish_reason="length"))

    async def ask(text: str) -> str:
        stream = await client.completions.create(model=MODEL, prompt=text, stream=True, max_tokens=400)
        return "".join([chunk.choices[0].text async for chunk in stream])

    prompts = [f"hello {number} world {number * number}" for number in range(64)]
    assert await asyncio.gather(*map(ask, prompts)) == prompts
