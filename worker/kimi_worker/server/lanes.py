"""The API process's side of the sockets to the pod's lane leaders."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import structlog
import zmq
import zmq.asyncio

from kimi_worker.protocol.engine import (
    Admitted,
    Cancel,
    Failed,
    FromEngine,
    LaneState,
    Output,
    Submit,
    ToEngine,
    Watch,
    api_socket,
)
from kimi_worker.server.private_logs import places

log = structlog.get_logger()
_decoder = msgspec.msgpack.Decoder(FromEngine)
_encoder = msgspec.msgpack.Encoder()

_WATCH_AGAIN_S = 2.0
"""A leader that starts after this process may have lost the first Watch."""


class RequestFailedError(Exception):
    """The lane ended the request; `failed` says why."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed


class Ticket:
    """One request in a lane: its answers, in order, until the last one."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self.is_finished = False
        self._arrived = asyncio.Event()
        self._outputs: list[Output] = []
        self._failed: Failed | None = None

    def put(self, message: Admitted | Output | Failed) -> None:
        if isinstance(message, Output):
            self._outputs.append(message)
            self.is_finished = message.finish_reason is not None
        elif isinstance(message, Failed):
            self._failed = message
            self.is_finished = True
        self._arrived.set()

    async def admitted(self, timeout_s: float) -> None:
        """Wait until the lane has taken the request. Raises RequestFailedError; also when the lane says nothing."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()
        except TimeoutError:
            message = f"the lane did not answer within {timeout_s:g} s"
            raise RequestFailedError(
                Failed(request_id=self._request_id, code="lane_silent", message=message, retryable=True)
            ) from None
        if self._failed and not self._outputs:
            raise RequestFailedError(self._failed)

    async def outputs(self) -> list[Output]:
        """Wait for at least one output and take all there are. Raises RequestFailedError after the last of them."""
        while not self._outputs:
            if self._failed:
                raise RequestFailedError(self._failed)
            self._arrived.clear()
            await self._arrived.wait()
        taken, self._outputs = self._outputs, []
        return taken


class Lane:
    """One lane leader: sends it requests, sorts its answers, keeps its last state."""

    def __init__(self, context: zmq.asyncio.Context, run_dir: Path, index: int) -> None:
        self.index = index
        self.state: LaneState | None = None
        self._tickets: dict[str, Ticket] = {}
        self._heard_s = time.monotonic()
        self._socket = context.socket(zmq.DEALER)
        # requests are bounded by the lane's queue; the socket must not drop or block
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(api_socket(run_dir, index))

    @property
    def num_requests(self) -> int:
        return len(self._tickets)

    @property
    def silent_s(self) -> float:
        """For how long the lane has said nothing although it has work."""
        return time.monotonic() - self._heard_s if self._tickets else 0.0

    @asynccontextmanager
    async def request(self, submit: Submit) -> AsyncIterator[Ticket]:
        """Hand over a request; one that still runs at the end of the context is cancelled."""
        if not self._tickets:
            self._heard_s = time.monotonic()
        ticket = self._tickets[submit.request_id] = Ticket(submit.request_id)
        try:
            await self._send(submit)
            yield ticket
        finally:
            del self._tickets[submit.request_id]
            if not ticket.is_finished:
                await self._send(Cancel(request_id=submit.request_id))

    async def listen(self) -> None:
        """Receive until cancelled."""
        await self._send(Watch())
        while True:
            if self.state is None and not await self._socket.poll(int(_WATCH_AGAIN_S * 1000)):
                await self._send(Watch())
                continue
            self._sort(_decoder.decode(await self._socket.recv()))

    def close(self) -> None:
        self._socket.close()

    def _sort(self, message: FromEngine) -> None:
        self._heard_s = time.monotonic()
        if isinstance(message, LaneState):
            self.state = message
        elif ticket := self._tickets.get(message.request_id):
            ticket.put(message)

    async def _send(self, message: ToEngine) -> None:
        await self._socket.send(_encoder.encode(message))


class Lanes:
    """All lanes of the pod. Use as an async context."""

    def __init__(self, run_dir: Path, num_lanes: int) -> None:
        self._context = zmq.asyncio.Context()
        self._all = [Lane(self._context, run_dir, index) for index in range(num_lanes)]
        self._listeners: list[asyncio.Task[None]] = []
        self.error: str | None = None
        """Why this process no longer hears its lanes."""

    def __getitem__(self, index: int) -> Lane:
        return self._all[index]

    def __len__(self) -> int:
        return len(self._all)

    async def __aenter__(self) -> "Lanes":
        for lane in self._all:
            task = asyncio.create_task(lane.listen(), name=f"lane-{lane.index}")
            task.add_done_callback(self._listener_ended)
            self._listeners.append(task)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._listeners:
            task.cancel()
        await asyncio.gather(*self._listeners, return_exceptions=True)
        for lane in self._all:
            lane.close()
        self._context.term()

    @property
    def states(self) -> list[LaneState]:
        """The last state of each lane that has reported."""
        return [lane.state for lane in self._all if lane.state]

    @property
    def num_requests(self) -> int:
        return sum(lane.num_requests for lane in self._all)

    @property
    def is_draining(self) -> bool:
        """Whether the lanes take nothing new: this pod or another one of its group was told to end."""
        return any(state.draining for state in self.states)

    @property
    def not_ready(self) -> str | None:
        """Why the pod cannot take requests; None when it can."""
        if self.is_draining:
            return "draining"
        if self.error:
            return self.error
        waiting = [lane.index for lane in self._all if lane.state is None or not lane.state.ready]
        if waiting:
            return f"lanes {waiting} of {len(self._all)} are not ready yet"
        if len({state.layout_hash for state in self.states}) > 1:
            return "the lanes report different layouts"
        return None

    def least_busy(self) -> Lane:
        return min(self._all, key=lambda lane: lane.num_requests)

    def _listener_ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()):
            # clients and /state read it; the error's own words may quote an answer
            self.error = f"{task.get_name()}: {type(error).__name__}; this pod's log has the place"
            log.error("lane_listener_failed", lane=task.get_name(), errors=places(error))
