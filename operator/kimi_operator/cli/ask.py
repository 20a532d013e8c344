"""One streaming chat completion, with times, token ids, log-probabilities and the handoff's figures."""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
from msgspec import Struct, field

from kimi_operator.cli.flags import refuse
from kimi_operator.errors import ClusterUnavailable

ANSWER_TOKENS = 64
"""Enough for six digits, a sentence around them and the tags that end a message."""


class Service(Struct, frozen=True):
    """An OpenAI API, `url` without /v1."""

    url: str
    model: str


class Answer(Struct):
    """What came back. Times in seconds from the request; `error` says why an answer is not whole."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    ttft_s: float | None = None
    last_s: float = 0.0
    handoff_bytes: int = 0
    handoff_s: float = 0.0
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first."""
        if self.ttft_s is None or len(self.token_ids) < 2:
            return None
        return (self.last_s - self.ttft_s) / (len(self.token_ids) - 1)

    def take(self, chunk: dict[str, Any], now_s: float) -> None:
        """Add one chunk of the stream."""
        if error := chunk.get("error"):
            self.error = f"{error.get('code')}: {error.get('message')}"
            return
        if usage := chunk.get("usage"):
            self.prompt_tokens = usage["prompt_tokens"]
        if stats := chunk.get("kimi"):
            self.handoff_bytes, self.handoff_s = stats["handoff_bytes"], stats["handoff_s"]
        for choice in chunk["choices"]:
            self.text += choice["delta"].get("content") or ""
            new = choice.get("token_ids") or []
            self.token_ids += new
            entries = (choice.get("logprobs") or {}).get("content") or []
            self.logprobs += [math.nan if entry["logprob"] is None else entry["logprob"] for entry in entries]
            if new:
                self.ttft_s = self.ttft_s if self.ttft_s is not None else now_s
                self.last_s = now_s


async def choose_model(http: httpx.AsyncClient, url: str, wanted: str | None) -> str:
    """The model to ask for. Raises ClusterUnavailable, InvalidSpec."""
    try:
        reply = await http.get(f"{url}/v1/models")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        raise ClusterUnavailable(
            f"{url} cannot be reached ({reason}); check the address and that the router is up"
        ) from error
    if reply.status_code != httpx.codes.OK:
        raise ClusterUnavailable(f"{url}/v1/models answers {reply.status_code}: {_message(reply.text)}")
    try:
        names = [str(entry["id"]) for entry in reply.json()["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ClusterUnavailable(f"{url}/v1/models is not an OpenAI API: {reply.text[:100]!r}") from error
    if not names or (wanted is not None and wanted not in names):
        served = ", ".join(names) or "nothing"
        raise refuse("--model", str(wanted), f"one that {url} serves: {served}", "name one of them")
    return wanted or names[0]


async def ask(http: httpx.AsyncClient, service: Service, prompt: str) -> Answer:
    """Ask greedily. Never raises for what the service does: `error` of the answer says it."""
    answer = Answer()
    body = {
        "model": service.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "return_token_ids": True,
        "chat_template_kwargs": {"thinking": False},
    }
    start_s = time.monotonic()
    url = f"{service.url}/v1/chat/completions"
    is_done = False
    try:
        async with http.stream("POST", url, json=body, headers={"x-kimi-stats": "1"}) as reply:
            if reply.status_code != httpx.codes.OK:
                answer.error = f"{reply.status_code}: {_message((await reply.aread()).decode(errors='replace'))}"
                return answer
            async for data in _events(reply):
                is_done = data == "[DONE]"
                if not is_done:
                    answer.take(json.loads(data), time.monotonic() - start_s)
    except httpx.HTTPError as error:
        answer.error = f"no whole answer came: {type(error).__name__}: {error}".rstrip(": ")
    except (ValueError, KeyError, TypeError) as error:
        answer.error = f"not a chunk of a chat completion: {error!r}"
    if not is_done and answer.error is None:
        answer.error = "the stream ended without [DONE]"
    return answer


async def _events(reply: httpx.Response) -> AsyncIterator[str]:
    async for line in reply.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def _message(text: str) -> str:
    """The message of an OpenAI error, or the start of whatever came instead."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]
