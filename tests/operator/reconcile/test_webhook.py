"""The endpoint of admission over TLS and a real socket, beside an API server in memory."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import ssl
import subprocess
import zlib
from asyncio.sslproto import SSLProtocol
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from api_server import UNANSWERED, Fault
from kimi_operator import webhook as endpoint
from kimi_operator.__main__ import make_webhook
from kimi_operator.cluster import Cluster
from kimi_operator.metrics import Metrics
from kimi_operator.settings import OperatorSettings
from kimi_operator.webhook import PATH, Webhook
from stage import Stage, node
from test_admission import TOO_LARGE, deployment, review

DEADLINE_S = 30.0
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def write_pair(folder: Path, name: str = "localhost") -> bytes:
    """A new self-signed pair, put where the chart mounts one; the certificate."""
    request = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    files = ["-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.crt")]
    names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost", "-days", "2"]
    subprocess.run([*request, *files, *names], check=True, capture_output=True, timeout=60)
    return (folder / "tls.crt").read_bytes()


@dataclass
class Asker:
    """The API server's side."""

    webhook: Webhook
    folder: Path
    metrics: Metrics
    task: asyncio.Task[Any]
    trusted: str = ""
    answers: Counter[int] = field(default_factory=Counter)

    async def ask(self, body: object, method: str = "POST", path: str = PATH, **more: Any) -> tuple[int, Any]:
        """Status, and the answer as JSON or text. A connection of its own: a new certificate counts from the next."""
        context = ssl.create_default_context(cadata=self.trusted)
        url = f"https://localhost:{self.webhook.bound_port}{path}"
        sent = {"data": io.BytesIO(body)} if isinstance(body, bytes) else {"json": body}
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:
            timeout = aiohttp.ClientTimeout(total=2 * DEADLINE_S)
            async with session.request(method, url, timeout=timeout, **sent, **more) as answer:
                is_json = answer.content_type == "application/json"
                return answer.status, await answer.json() if is_json else await answer.text()

    async def connect(self, context: ssl.SSLContext | None = None) -> Streams:
        """By the address: a name would be looked up in a thread, and a busy machine takes seconds for hundreds."""
        name = "localhost" if context else None
        return await asyncio.open_connection("127.0.0.1", self.webhook.bound_port, ssl=context, server_hostname=name)

    @asynccontextmanager
    async def slow_client(self, sent: bytes, of_bytes: int = 10) -> AsyncIterator[Streams]:
        """A connection whose body has begun, and does not come to its end."""
        streams = await self.connect(ssl.create_default_context(cadata=self.trusted))
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {of_bytes}\r\n\r\n"
        try:
            streams[1].write(head.encode() + sent)
            await streams[1].drain()
            yield streams
        finally:
            streams[1].transport.abort()

    def count(self, answer: str) -> float:
        return self.metrics.registry.get_sample_value("kimi_operator_admissions_total", {"answer": answer}) or 0.0

    async def wait_until_it_serves(self) -> None:
        def serves() -> bool:
            assert not self.task.done(), self.task
            return bool(self.webhook.bound_port)

        await until(serves)


async def until(holds: Callable[[], bool]) -> None:
    """What is looked at has no event to offer."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if holds():
                return
            await asyncio.sleep(0.01)


@pytest.fixture
async def asker(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Asker]:
    """A replica that does not lead, as the program makes it; no certificate lies there yet."""
    monkeypatch.setattr(endpoint, "LOOK_AGAIN_S", 0.02)
    monkeypatch.setattr(endpoint, "ANSWER_S", DEADLINE_S)  # a busy machine must answer in it
    settings, metrics = OperatorSettings(webhook_cert_dir=tmp_path), Metrics()
    webhook = make_webhook(settings, stage.api, metrics, 0)
    # With port 0, each family of addresses would get a port of its own.
    webhook.host = "127.0.0.1"
    task = asyncio.create_task(webhook.serve())
    yield Asker(webhook, tmp_path, metrics, task)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@pytest.fixture
async def trusted(asker: Asker) -> Asker:
    """The same, once it serves."""
    asker.trusted = write_pair(asker.folder).decode()
    await asker.wait_until_it_serves()
    return asker


async def test_what_fits_passes_and_what_does_not_is_refused_with_the_sums(trusted: Asker) -> None:
    status, answer = await trusted.ask(review(deployment()))
    assert (status, answer["response"]) == (200, {"uid": "705ab4f5", "allowed": True})
    assert (answer["apiVersion"], answer["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    status, answer = await trusted.ask(review(deployment(TOO_LARGE)))
    assert (status, answer["response"]["allowed"], answer["response"]["status"]["code"]) == (200, False, 422)
    message = answer["response"]["status"]["message"]
    assert "at most 64.0 MiB, the memory of a GPU: the line 'routed experts' of" in message
    assert "does not fit into the 64.0 MiB that are left" in message
    assert (trusted.count("allowed"), trusted.count("refused"), trusted.count("warned")) == (1, 1, 0)


async def test_the_profile_of_this_moment_counts(stage: Stage, trusted: Asker) -> None:
    """Whoever enlarges a profile and then applies what needs it must not be refused by what was remembered."""
    spec = stage.server.get("HardwareProfile", "local-cpu")["spec"]
    for memory, is_allowed in (("40Mi", False), ("64Mi", True)):
        stage.server.edit("HardwareProfile", "local-cpu", spec={**spec, "gpu": {**spec["gpu"], "memory": memory}})
        _, answer = await trusted.ask(review(deployment()))
        assert answer["response"]["allowed"] is is_allowed


async def test_where_no_profile_is_named_the_nodes_are_asked(stage: Stage, trusted: Asker) -> None:
    nameless = deployment(TOO_LARGE | {"spec.hardware": None})
    _, answer = await trusted.ask(review(nameless))
    assert answer["response"]["allowed"] is True
    assert "ProfileUnknown" in answer["response"]["warnings"][0]
    spec = stage.server.get("HardwareProfile", "local-cpu")["spec"]
    stage.server.edit("HardwareProfile", "local-cpu", spec={**spec, "match": {"deviceIds": ["74a1"]}})
    stage.server.put(node("node0", **{"amd.com/gpu.device-id": "74a1"}))
    _, answer = await trusted.ask(review(nameless))
    assert answer["response"]["allowed"] is False


async def test_whoever_was_planned_keeps_the_profile_and_no_node_is_looked_at(stage: Stage, trusted: Asker) -> None:
    stage.server.faults.append(Fault(500, "Node"))
    planned = {"spec.hardware": None, "status": {"plan": {"profile": "local-cpu"}}}
    _, answer = await trusted.ask(review(deployment(planned | {"spec.suspend": True}), deployment(planned)))
    assert answer["response"] == {"uid": "705ab4f5", "allowed": True}


@pytest.mark.parametrize("status", [403, 500, 503, UNANSWERED])
async def test_without_the_profiles_everything_passes_and_says_so(stage: Stage, trusted: Asker, status: int) -> None:
    stage.server.faults.append(Fault(status, "HardwareProfile"))
    _, answer = await trusted.ask(review(deployment(TOO_LARGE)))
    assert answer["response"]["allowed"] is True
    assert "not checked whether this fits" in answer["response"]["warnings"][0]


async def test_what_changes_no_spec_asks_nobody(stage: Stage, trusted: Asker) -> None:
    stage.server.faults.append(Fault(500))
    old = deployment(TOO_LARGE)
    for new in (deployment(TOO_LARGE | {"metadata.finalizers": []}), old):
        assert await trusted.ask(review(new, old)) == (
            200,
            {
                "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
                "response": {"uid": "705ab4f5", "allowed": True},
            },
        )  # fmt: skip


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "the body is no JSON"),
        (b"\xff\xfe", "the body is no JSON"),
        (b"[" * 100_000, "the body is no JSON"),
        (b"[]", "the body: got list, expected a JSON object"),
        (b'{"kind": "Pod", "apiVersion": "v1"}', "got v1 Pod, expected admission.k8s.io/v1 AdmissionReview"),
        (b'{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1"}', "request: got nothing"),
    ],
)
async def test_a_bad_question_gets_a_400_that_says_why(trusted: Asker, body: bytes, words: str) -> None:
    status, text = await trusted.ask(body)
    assert status == 400
    assert words in text


HALF = "\ud800"
"""The first half of a character: JSON's escapes have it, UTF-8 does not."""


def with_half(value: Any) -> Iterator[Any]:
    """The document with each of its texts, and each of its keys, replaced by half a character, one at a time."""
    if isinstance(value, str):
        yield HALF
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield {HALF if other == key else other: value[other] for other in value}
            yield from ({**value, key: changed} for changed in with_half(inner))


def no_text_of_utf8() -> Iterator[Any]:
    yield from with_half(review(deployment(TOO_LARGE)))
    yield from ({"apiVersion": HALF, "kind": "x"}, {"apiVersion": [HALF], "kind": {HALF: 1}}, HALF, [HALF], {HALF: 1})


async def test_halves_of_characters_are_told_wherever_they_stand(trusted: Asker) -> None:
    for body in no_text_of_utf8():
        status, answer = await trusted.ask(json.dumps(body).encode())
        assert status == 400, (body, answer)
        assert "expected" in answer


async def test_a_body_that_is_too_large_or_never_comes_is_given_up(
    trusted: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await trusted.ask(b" " * (endpoint.MAX_BODY_BYTES + 1)))[0] == 413
    monkeypatch.setattr(endpoint, "ANSWER_S", 0.05)
    async with trusted.slow_client(b"{") as (reader, _), asyncio.timeout(DEADLINE_S):
        assert (await reader.readline()).split()[1] == b"408"


HALF_A_HEAD = f"POST {PATH} HTTP/1.1\r\nHost: ".encode()


def num_held() -> int:
    """Connections in memory, by type: isinstance would ask objects of other tests, which may answer with a warning."""
    return sum(type(one) is SSLProtocol for one in gc.get_objects())


async def ask_again(streams: Streams) -> int:
    """A short question over a connection that stays open; the status."""
    reader, writer = streams
    writer.write(HALF_A_HEAD + b"localhost\r\nContent-Length: 2\r\n\r\n{}")
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    await reader.readexactly(int(head.lower().partition("content-length:")[2].split()[0]))
    return int(head.split()[1])


@pytest.mark.parametrize(("kind", "clients"), [("never a handshake", 700), ("half a head", 300)])
async def test_idle_connections_are_bounded_and_keep_nobody_from_an_answer(
    trusted: Asker, kind: str, clients: int
) -> None:
    """While they come, whoever asks keeps the connection; those that have been idle the longest give way."""
    context = ssl.create_default_context(cadata=trusted.trusted)
    at_most = endpoint.MAX_CONNECTIONS
    idle: list[Streams] = []
    held_before = num_held()
    async with asyncio.timeout(4 * DEADLINE_S), AsyncExitStack() as opened:
        used = await trusted.connect(context)
        opened.callback(used[1].transport.abort)
        for number in range(clients):
            streams = await trusted.connect(context if "head" in kind else None)
            opened.callback(streams[1].transport.abort)
            if "head" in kind:
                streams[1].write(HALF_A_HEAD)
            idle.append(streams)
            if number % 50 == 0:
                assert await ask_again(used) == 400
        assert (await trusted.ask(review(deployment(TOO_LARGE))))[1]["response"]["allowed"] is False
        await until(lambda: sum(not reader.at_eof() for reader, _ in idle) < at_most)
        assert await ask_again(used) == 400
        held = num_held() - held_before
        assert held < 3 * at_most + clients * ("head" in kind), "what has ended is not kept in memory"


async def test_a_question_that_is_being_decided_keeps_its_connection(
    stage: Stage, trusted: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many connections come meanwhile."""
    answers, asked, real = asyncio.Event(), asyncio.Event(), Cluster.list

    async def late(cluster: Cluster, kind: str, **more: Any) -> Any:
        asked.set()
        await answers.wait()
        return await real(cluster, kind, **more)

    monkeypatch.setattr(Cluster, "list", late)
    async with asyncio.timeout(2 * DEADLINE_S), AsyncExitStack() as opened, asyncio.TaskGroup() as group:
        question = group.create_task(trusted.ask(review(deployment())))
        await asked.wait()
        burst = [await trusted.connect() for _ in range(2 * endpoint.MAX_CONNECTIONS)]
        for _, writer in burst:
            opened.callback(writer.transport.abort)
        answers.set()
        assert (await question)[1]["response"]["allowed"] is True


@pytest.mark.parametrize("sent", [b"", HALF_A_HEAD])
async def test_a_head_that_never_comes_is_given_up(asker: Asker, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(endpoint, "IDLE_S", 0.2)
    asker.trusted = write_pair(asker.folder).decode()
    await asker.wait_until_it_serves()
    context = ssl.create_default_context(cadata=asker.trusted)
    reader, writer = await asker.connect(context)
    writer.write(sent)
    async with asyncio.timeout(DEADLINE_S):
        # what it sends late, on a busy machine, is answered by a reset
        with suppress(ConnectionError):
            assert await reader.read() == b""
    writer.close()


async def test_a_head_of_many_lines_is_refused(trusted: Asker) -> None:
    """Each may have 8 KiB, which every connection could keep."""
    headers = {f"x-{number}": "" for number in range(endpoint.MAX_HEADERS)}
    assert (await trusted.ask(review(deployment()), headers=headers))[0] == 400


MIB = 2**20
SLOW = {
    "heads alone": (64, b"", 0),
    "a byte each": (64, b"{", 64),
    "all but a byte": (12, b" " * (4 * MIB - 1), 8 * MIB),
}


@pytest.mark.parametrize("kind", SLOW)
async def test_slow_clients_keep_nobody_from_an_answer(
    trusted: Asker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """While they are all still connected, a review is answered; what they sent is bounded in sum."""
    clients, sent, least_held = SLOW[kind]
    monkeypatch.setattr(endpoint, "ANSWER_S", 2 * DEADLINE_S)
    intake = trusted.webhook._intake
    async with AsyncExitStack() as slow, asyncio.timeout(2 * DEADLINE_S):
        for _ in range(clients):
            await slow.enter_async_context(trusted.slow_client(sent, of_bytes=4 * MIB))
            assert intake.held_bytes <= intake.max_held_bytes
        _, answer = await trusted.ask(review(deployment(TOO_LARGE)))
        assert answer["response"]["allowed"] is False
        await until(lambda: least_held <= intake.held_bytes <= intake.max_held_bytes)
    await until(lambda: not intake.held_bytes)
    assert not caplog.records, "whoever goes away is no error of ours"


async def ask_whole(asker: Asker, body: object) -> tuple[int, Any]:
    """Ask again while the body does not come in time: a machine that stalls keeps it back."""
    while True:
        status, answer = await asker.ask(body)
        if status != 408:
            return status, answer


async def test_large_questions_wait_for_one_another_and_for_nobody_else(
    stage: Stage, trusted: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the API server is silent, each holds all that it says in memory."""
    answers, asked, real = asyncio.Event(), [], Cluster.list

    async def late(cluster: Cluster, kind: str, **more: Any) -> Any:
        asked.append(kind)
        await answers.wait()
        return await real(cluster, kind, **more)

    monkeypatch.setattr(Cluster, "list", late)
    large = deployment({"metadata.annotations": {"a": "x" * endpoint.LARGE_BYTES}})
    async with asyncio.timeout(2 * DEADLINE_S), asyncio.TaskGroup() as group:
        first = group.create_task(trusted.ask(review(large)))
        await until(lambda: len(asked) == 1)
        monkeypatch.setattr(endpoint, "ANSWER_S", 0.5)
        assert await ask_whole(trusted, review(large)) == (503, "no place was free within 0.5 s\n")
        assert len(asked) == 1
        _, small = await ask_whole(trusted, review(deployment()))
        assert "did not answer in 0.5 s" in small["response"]["warnings"][0]
        answers.set()
    allowed = {"uid": "705ab4f5", "allowed": True}
    assert (await first)[1]["response"] == allowed
    assert (await trusted.ask(review(large)))[1]["response"] == allowed


async def test_compressed_bodies_are_not_unpacked(trusted: Asker) -> None:
    body = zlib.compress(b" " * endpoint.MAX_BODY_BYTES)
    status, text = await trusted.ask(body, headers={"Content-Encoding": "deflate"})
    assert (status, "no JSON" in text) == (400, True)


async def test_more_questions_than_places_are_all_answered(trusted: Asker) -> None:
    questions = [trusted.ask(review(deployment(), uid=str(number))) for number in range(3 * endpoint.MAX_AT_ONCE)]
    answers = await asyncio.gather(*questions)
    assert [answer["response"] for _, answer in answers] == [
        {"uid": str(number), "allowed": True} for number in range(len(answers))
    ]


async def test_only_one_path_and_one_method_are_served(trusted: Asker) -> None:
    assert (await trusted.ask(b"", method="GET"))[0] == 405
    assert (await trusted.ask(b"{}", path="/metrics"))[0] == 404


async def test_it_serves_once_a_certificate_comes_and_takes_a_new_one_in_place(asker: Asker) -> None:
    assert not asker.webhook.certificate.renew()
    (asker.folder / "tls.crt").write_text("half a pair")
    assert not asker.webhook.certificate.renew()
    asker.trusted = write_pair(asker.folder).decode()
    await asker.wait_until_it_serves()
    assert (await asker.ask(review(deployment())))[0] == 200
    (asker.folder / "other").mkdir()
    (asker.folder / "tls.crt").write_bytes(write_pair(asker.folder / "other"))
    assert asker.webhook.certificate.renew(), "the old pair goes on"
    assert (await asker.ask(review(deployment())))[0] == 200
    asker.trusted = write_pair(asker.folder, "renewed").decode()
    async with asyncio.timeout(DEADLINE_S):
        while True:
            with suppress(aiohttp.ClientConnectorCertificateError):
                assert (await asker.ask(review(deployment())))[0] == 200
                return


async def test_without_tls_nothing_is_answered(trusted: Asker) -> None:
    url = f"http://localhost:{trusted.webhook.bound_port}{PATH}"
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.post(url, json=review(deployment()))
