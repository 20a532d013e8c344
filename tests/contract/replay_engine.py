"""A lane leader without a model: the real socket and messages, answers from a script.

With it the HTTP front end is tested in full: streams, stop strings, parsing, cancels, a full queue, failures.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio
from kimi_worker.protocol.engine import (
    Admitted,
    Cancel,
    Drain,
    Failed,
    FromEngine,
    LaneState,
    Output,
    SampledToken,
    Submit,
    ToEngine,
    TokenLogprob,
    Watch,
    api_socket,
)

_ports = itertools.count(29600)
"""Nobody listens there; every lane names another."""

_decoder = msgspec.msgpack.Decoder(ToEngine)


@dataclass
class Script:
    """What the engine does with one request."""

    token_ids: list[int] = field(default_factory=list)
    tokens_per_output: int = 1
    finish_reason: str = "stop"
    refusal: tuple[str, bool] | None = None
    """Code and whether another pod may answer, instead of Admitted."""
    failure: tuple[str, bool] | None = None
    """The same, after the tokens and instead of a finish reason."""
    gate: asyncio.Event | None = None
    """Wait for it after the first output."""
    admission: asyncio.Event | None = None
    """Wait for it before anything is said."""
    pause_s: float = 0.0
    """Between two outputs."""


class ReplayEngine:
    """One lane. `script` is asked for every request; what came in is kept for the test to look at."""

    def __init__(
        self, run_dir: Path, lane: int, script: Callable[[Submit], Script], *, layout_hash: str = "l1"
    ) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(api_socket(run_dir, lane))
        self.script = script
        self.submits: list[Submit] = []
        self.cancels: list[str] = []
        self.is_draining = False
        self.state = lane_state(lane, layout_hash)
        self._watchers: set[bytes] = set()
        self._running: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        while True:
            client, frame = await self._socket.recv_multipart()
            message = _decoder.decode(frame)
            if isinstance(message, Watch):
                self._watchers.add(client)
                await self._send(client, self.state)
            elif isinstance(message, Submit):
                self.submits.append(message)
                task = asyncio.create_task(self._play(client, message, self.script(message)))
                self._running[message.request_id] = task
            elif isinstance(message, Cancel):
                self.cancels.append(message.request_id)
                if task := self._running.pop(message.request_id, None):
                    task.cancel()
            elif isinstance(message, Drain):
                self.is_draining = True
            async with self._changed:
                self._changed.notify_all()

    async def until(self, condition: Callable[["ReplayEngine"], bool]) -> None:
        """Wait until what has come in satisfies the condition, at most 60 s."""
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(lambda: condition(self))

    async def publish(self, **changes: object) -> None:
        """Change the lane's state and tell all that watch."""
        self.state = msgspec.structs.replace(self.state, **changes)
        for client in self._watchers:
            await self._send(client, self.state)

    def close(self) -> None:
        for task in self._running.values():
            task.cancel()
        self._socket.close()

    async def _play(self, client: bytes, submit: Submit, script: Script) -> None:
        request_id = submit.request_id
        if script.admission:
            await script.admission.wait()
        if script.refusal:
            code, retryable = script.refusal
            await self._send(client, Failed(request_id, code, f"scripted {code}", retryable, 2.0))
            return
        await self._send(client, Admitted(request_id))
        size = script.tokens_per_output
        groups = [script.token_ids[at : at + size] for at in range(0, len(script.token_ids), size)]
        for index, group in enumerate(groups):
            is_last = index == len(groups) - 1 and script.failure is None
            tokens = [sampled(token, submit.sampling.logprobs) for token in group]
            reason = script.finish_reason if is_last else None
            await self._send(
                client, Output(request_id, tokens, reason, handoff_bytes=4096, handoff_s=0.25, reserved_s=0.5)
            )
            if index == 0 and script.gate:
                await script.gate.wait()
            await asyncio.sleep(script.pause_s)
        if script.failure:
            code, retryable = script.failure
            await self._send(client, Failed(request_id, code, f"scripted {code}", retryable))

    async def _send(self, client: bytes, message: FromEngine) -> None:
        await self._socket.send_multipart([client, msgspec.msgpack.encode(message)])


def sampled(token_id: int, num_logprobs: int | None) -> SampledToken:
    """A token with log-probabilities that its id determines."""
    if num_logprobs is None:
        return SampledToken(token_id)
    top = [TokenLogprob((token_id + rank) % 256, -0.5 - rank) for rank in range(num_logprobs)]
    return SampledToken(token_id, -0.5 - token_id / 1024, top)


def lane_state(lane: int, layout_hash: str) -> LaneState:
    """An idle lane."""
    return LaneState(
        lane=lane,
        handoff=f"tcp://127.0.0.1:{next(_ports)}",
        ready=True,
        running=0,
        waiting=0,
        reserved=0,
        queued_tokens=0,
        num_pages=64,
        free_pages=64,
        num_slots=10,
        free_slots=10,
        max_num_seqs=8,
        layout_hash=layout_hash,
    )


@asynccontextmanager
async def replay(
    run_dir: Path, script: Callable[[Submit], Script], *, num_lanes: int = 1, layout_hash: str = "l1"
) -> AsyncIterator[list[ReplayEngine]]:
    """The lanes of one pod."""
    engines = [ReplayEngine(run_dir, lane, script, layout_hash=layout_hash) for lane in range(num_lanes)]
    tasks = [asyncio.create_task(engine.run()) for engine in engines]
    try:
        yield engines
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for engine in engines:
            engine.close()
