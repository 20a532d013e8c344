"""A long answer whose client may go: every kind of it says what to do then."""

import asyncio

import pytest
from kimi_worker.server.http import HangUpResponse
from starlette.types import Message, Receive, Scope, Send


class Speechless(HangUpResponse):
    """Forgets to say what happens when the client goes."""

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})


class Waiting(Speechless):
    """Works until it is cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.events.append("cancelled")

    def client_gone(self) -> None:
        self.events.append("gone")


def test_an_incomplete_answer_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="client_gone"):
        Speechless()  # type: ignore[abstract]


async def test_work_ends_when_the_client_goes() -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    response = Waiting()
    await response({"type": "http"}, receive, send)
    assert response.events == ["cancelled", "gone"]
    assert not sent
