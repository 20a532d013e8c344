"""Fixtures that the tests of the server, of the router and of their contract share."""

import asyncio
import base64
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from kimi_worker.router.app import create_app as create_router
from kimi_worker.server.app import create_app
from kimi_worker.server.text import Tokenizer
from kimi_worker.settings import PodIdentity, RouterSettings, WorkerSettings
from replay_engine import ReplayEngine, Script, replay

WORDS = ["hello", " world", " stop", " the", " answer", " is", "message", "response", "think", " role", "user"]
SPECIAL = ["[BOS]", "[EOS]", "<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"]
SPECIAL += ["<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>"]
NUM_RANKS = 256 + len(WORDS)
VOCAB_SIZE = NUM_RANKS + 16
MODEL = "tiny"


ENCODER = """
EFFORTS = ("low", "high", "max")

def effort_message(thinking_effort):
    return f"Set `thinking_effort`: `low`, `high`, `max`. Now it is `thinking_effort={thinking_effort}`."
"""
"""What is needed of a checkpoint's chat encoder, in words of its own."""


def write_tokenizer(folder: Path) -> None:
    """The tokenizer's files of a small checkpoint: every byte, a few words, the named special tokens, its encoder."""
    (folder / "encoding_k3.py").write_text(ENCODER)
    pieces = [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS]
    lines = [f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(pieces)]
    (folder / "tiktoken.model").write_text("".join(lines))
    added = {
        str(NUM_RANKS + at): {"content": name, "special": name not in ("<|open|>", "<|close|>", "<|sep|>")}
        for at, name in enumerate(SPECIAL)
    }
    tokens = {"added_tokens_decoder": added, "eos_token": "[EOS]", "chat_template_kwargs": {"thinking": False}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    config = {"eos_token_id": NUM_RANKS + SPECIAL.index("<|end_of_msg|>"), "text_config": {"vocab_size": VOCAB_SIZE}}
    (folder / "config.json").write_text(json.dumps(config))


def said(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a whole answer as the model gives it, from within its response."""
    controls = tokenizer.controls
    closed = [controls.close, *tokenizer.encode("response"), controls.sep]
    end = [controls.close, *tokenizer.encode("message"), controls.sep, controls.end_of_msg]
    return [*tokenizer.encode(text), *closed, *end]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.load(checkpoint)


def worker_settings(checkpoint: Path, *, role: str, num_lanes: int, max_model_len: int) -> WorkerSettings:
    return WorkerSettings.model_validate(
        {
            "deployment": "k3",
            "role": role,
            "model": {"checkpoint": str(checkpoint), "served_name": MODEL, "max_model_len": max_model_len},
            "parallel": {"ranks_per_node": num_lanes},
            "limits": {"max_num_seqs": 8, "num_pages": max(64, -(-max_model_len // 64)), "num_state_slots": 10},
            "timeouts": {"collective_s": 60.0, "drain_s": 2.0},
        }
    )


@asynccontextmanager
async def listening(app: FastAPI) -> AsyncIterator[str]:
    """Serve an app on a free port; gives its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2)
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


@dataclass
class Pod:
    """A pod's API process with replayed lanes."""

    url: str
    engines: list[ReplayEngine]
    app: FastAPI

    @property
    def engine(self) -> ReplayEngine:
        return self.engines[0]

    def play(self, script: Script | Callable[[Any], Script]) -> None:
        for engine in self.engines:
            engine.script = script if callable(script) else lambda _: script

    async def publish(self, **changes: object) -> None:
        """Change the state of every lane and wait until the API process has it."""
        for engine in self.engines:
            await engine.publish(**changes)
        lanes = self.app.state.pod.lanes
        async with asyncio.timeout(60):
            while lanes.states != [engine.state for engine in self.engines]:  # noqa: ASYNC110  # a state, not an event
                await asyncio.sleep(0.005)


PodFactory = Callable[..., Any]


@pytest.fixture
async def start_pod(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PodFactory]:
    """Start pods that end with the test: `await start_pod(role="decode", num_lanes=1, layout_hash="l1")`."""
    async with AsyncExitStack() as stack:

        async def start(
            *, role: str = "decode", num_lanes: int = 1, layout_hash: str = "l1", max_model_len: int = 512
        ) -> Pod:
            run_dir = tmp_path_factory.mktemp("run")
            engines = await stack.enter_async_context(
                replay(run_dir, lambda _: Script(), num_lanes=num_lanes, layout_hash=layout_hash)
            )
            settings = worker_settings(checkpoint, role=role, num_lanes=num_lanes, max_model_len=max_model_len)
            app = create_app(settings, PodIdentity(run_dir=run_dir))
            url = await stack.enter_async_context(listening(app))
            async with asyncio.timeout(60):
                while app.state.pod.lanes.not_ready:  # noqa: ASYNC110  # a state, not an event
                    await asyncio.sleep(0.005)
            return Pod(url, engines, app)

        yield start


@pytest.fixture
async def pod(start_pod: PodFactory) -> Pod:
    return await start_pod()


def router_settings(prefills: list[Pod], decodes: list[Pod], **changes: object) -> RouterSettings:
    """A router that knows these pods by address; it polls them often."""
    return RouterSettings.model_validate(
        {
            "deployment": "k3",
            "served_name": MODEL,
            "prefill_service": addresses(prefills),
            "decode_service": addresses(decodes),
            "poll_interval_s": 0.02,
            **changes,
        }
    )


def addresses(pods: list[Pod]) -> str:
    return ",".join(pod.url.removeprefix("http://") for pod in pods)


@asynccontextmanager
async def routing(settings: RouterSettings) -> AsyncIterator[str]:
    """A router that has heard of all its pods; gives its URL."""
    app = create_router(settings)
    async with listening(app) as url:
        async with httpx.AsyncClient(base_url=url, timeout=60) as http, asyncio.timeout(60):
            while not _is_settled((await http.get("/state")).json()):  # noqa: ASYNC110  # a state, not an event
                await asyncio.sleep(0.01)
        yield url


def _is_settled(state: dict[str, Any]) -> bool:
    return state["ready"] and not any(pod["error"] for pod in [*state["prefill"], *state["decode"]])


@pytest.fixture(params=["server", "router"])
async def front(request: pytest.FixtureRequest, pod: Pod, start_pod: PodFactory) -> AsyncIterator[str]:
    """The URL that clients use: the pod itself, or a router in front of it and of a prefill pod."""
    if request.param == "server":
        yield pod.url
        return
    prefill = await start_pod(role="prefill")
    async with routing(router_settings([prefill], [pod])) as url:
        yield url
