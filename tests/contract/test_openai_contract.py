"""The official OpenAI client against the server, unchanged."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from kimi_worker.server.text import Tokenizer
from openai import AsyncOpenAI
from replay_engine import Script
from replay_fixtures import MODEL, Pod


@pytest.fixture
async def client(pod: Pod) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{pod.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def said(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a whole answer as the model gives it with thinking off."""
    controls = tokenizer.controls
    close = [controls.close, *tokenizer.encode("response"), controls.sep]
    return [
        *tokenizer.encode(text),
        *close,
        controls.close,
        *tokenizer.encode("message"),
        controls.sep,
        controls.end_of_msg,
    ]


ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


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
