"""`kimi-worker serve` with a random small model: the official client against real processes."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import checkpoint_factory
import httpx
import openai
import pytest
from openai import AsyncOpenAI
from ports import free_ports
from replay_fixtures import NUM_RANKS, SPECIAL, VOCAB_SIZE, write_tokenizer

pytestmark = pytest.mark.multiproc

MODEL = "model-of-words"
ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello world"}]}
GREEDY: dict[str, Any] = {**ASK, "temperature": 0, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
IDS = {"extra_body": {"return_token_ids": True}}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights with the vocabulary of the replayed pods."""
    folder = tmp_path_factory.mktemp(MODEL, numbered=False)
    config = checkpoint_factory.config_json()
    config["text_config"]["vocab_size"] = VOCAB_SIZE
    config |= {"bos_token_id": NUM_RANKS, "eos_token_id": NUM_RANKS + SPECIAL.index("<|end_of_msg|>")}
    config |= {"pad_token_id": VOCAB_SIZE - 1, "media_placeholder_token_id": VOCAB_SIZE - 2}
    checkpoint_factory.write_checkpoint(folder, config=config)
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def url(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    [port] = free_ports(1)
    log = tmp_path_factory.mktemp("log") / "log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KIMI_TERMINATION_LOG": str(log.with_name("end"))}
    command = [sys.executable, "-m", "kimi_worker", "serve", "--standalone", str(model_folder), "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
    assert status == 0, log.read_text()[-2000:]


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http, asyncio.timeout(200):
        while True:
            with suppress(httpx.TransportError):
                if (await http.get("/ready")).is_success:
                    break
            await asyncio.sleep(0.1)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


async def test_answers_do_not_depend_on_the_company(client: AsyncOpenAI) -> None:
    alone = (await client.chat.completions.create(**GREEDY, **IDS)).choices[0]
    together = await asyncio.gather(*(client.chat.completions.create(**GREEDY, **IDS) for _ in range(12)))
    stream = await client.chat.completions.create(**GREEDY, **IDS, stream=True)
    streamed = [token async for chunk in stream for token in chunk.choices[0].token_ids]
    assert alone.finish_reason == "length"
    assert streamed == alone.token_ids
    assert alone.logprobs
    wanted = [entry.logprob for entry in alone.logprobs.content or []]
    for reply in together:
        choice = reply.choices[0]
        assert choice.token_ids == alone.token_ids
        assert choice.logprobs
        assert [entry.logprob for entry in choice.logprobs.content or []] == pytest.approx(wanted, abs=1e-4)
    for entry in alone.logprobs.content or []:
        assert entry.logprob == pytest.approx(max(top.logprob for top in entry.top_logprobs))


async def test_a_model_is_named_by_its_folder(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]


async def test_only_this_machine_is_let_in(client: AsyncOpenAI, url: str) -> None:
    """Nothing asks who a client is. All of 127.0.0.0/8 leads to a process that listens on all addresses."""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", httpx.URL(url).port), timeout=10)


async def test_a_seed_repeats_a_sampled_answer(client: AsyncOpenAI) -> None:
    texts = [
        (await client.completions.create(model=MODEL, prompt="hello", max_tokens=20, seed=seed)).choices[0].text
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


async def test_a_full_queue_is_429_and_a_gone_client_frees_its_memory(client: AsyncOpenAI, url: str) -> None:
    replies = await asyncio.gather(
        *(client.chat.completions.create(**{**GREEDY, "max_tokens": 40}) for _ in range(100)), return_exceptions=True
    )
    refused = [reply for reply in replies if isinstance(reply, BaseException)]
    assert refused
    assert all(isinstance(reply, openai.RateLimitError) for reply in refused)
    assert len(refused) < 100
    endless = {"extra_body": {"ignore_eos": True}}
    stream = await client.completions.create(model=MODEL, prompt="hello", max_tokens=4000, stream=True, **endless)
    await anext(stream)
    await stream.close()
    async with httpx.AsyncClient(base_url=url, timeout=60) as http, asyncio.timeout(60):
        while True:
            [lane] = (await http.get("/state")).json()["lanes"]
            if lane["running"] == 0 and lane["free_pages"] == lane["num_pages"]:
                break
            await asyncio.sleep(0.05)
    assert lane["free_slots"] == lane["num_slots"]
