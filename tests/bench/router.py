"""How much later does a token arrive because the router stands in between?

A stub upstream (its own process) streams chunks that carry the time at which they were written; a client (this
process) notes when they arrive, once directly and once through `kimi-worker route`. All clocks are this machine's
monotonic one. Streams begin at random moments of the interval, so that tokens do not come in lockstep.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import uvloop

FIRST_TOKENS, LAST_TOKENS = 25, 10
"""Left out of each stream: several hundred requests that begin or end within a second cost what no steady load does."""
_TIME = re.compile(rb'"t": (\d+)')
_LANE = {
    "lane": 0,
    "handoff": "tcp://127.0.0.1:1",
    "running": 0,
    "waiting": 0,
    "reserved": 0,
    "queued_tokens": 0,
    "free_pages": 1,
    "max_num_seqs": 1024,
}
_STATE = {
    "deployment": "bench",
    "role": "both",
    "group": "0",
    "generation": 1,
    "layout_hash": "l",
    "ready": True,
    "draining": False,
    "error": None,
    "lanes": [_LANE],
}


class Stub(asyncio.Protocol):
    """A pod that answers /state, and any POST with a stream of `tokens` chunks, one every `interval_s`."""

    def __init__(self, tokens: int, interval_s: float) -> None:
        self._tokens = tokens
        self._interval_s = interval_s
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._head += data
        head, found, rest = self._head.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        if not found or len(rest) < int(length[1] if length else 0):
            return
        self._head = b""
        if head.startswith(b"GET"):
            body = json.dumps(_STATE).encode()
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
            return
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        first_s = loop.time() + random.random() * self._interval_s
        loop.call_at(first_s, self._emit, first_s, 0)

    def _emit(self, at_s: float, number: int) -> None:
        if self._transport.is_closing():
            return
        if number == self._tokens:
            self._transport.write(b"0\r\n\r\n")
            return
        event = (
            b'data: {"id": "cmpl-0", "object": "text_completion", "model": "bench", "choices": [{"index": 0, "text": '
            b'" token", "logprobs": null, "finish_reason": null}], "t": %d}\n\n' % time.monotonic_ns()
        )
        self._transport.write(b"%x\r\n%s\r\n" % (len(event), event))
        asyncio.get_running_loop().call_at(at_s + self._interval_s, self._emit, at_s + self._interval_s, number + 1)


async def run_stub(listener: socket.socket, tokens: int, interval_s: float) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Stub(tokens, interval_s), sock=listener)
    async with server:
        await server.serve_forever()


class Client(asyncio.Protocol):
    """One stream; notes the age of every chunk in nanoseconds."""

    def __init__(self) -> None:
        self.ages_ns: list[int] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.first_bytes = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        body = b'{"model": "bench", "prompt": "a", "stream": true}'
        transport.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        self.first_bytes = self.first_bytes or data[:200]
        self.ages_ns += [now_ns - int(written) for written in _TIME.findall(data)]
        if data.endswith(b"0\r\n\r\n"):
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def stream_all(port: int, streams: int, tokens: int) -> list[int]:
    """Run that many streams at once; ages in ns while all of them run. Raises RuntimeError when one breaks."""
    loop = asyncio.get_running_loop()
    clients = [(await loop.create_connection(Client, "127.0.0.1", port))[1] for _ in range(streams)]
    await asyncio.gather(*(client.done for client in clients))
    for client in clients:
        if len(client.ages_ns) != tokens:
            raise RuntimeError(
                f"a stream has {len(client.ages_ns)} of {tokens} tokens; it began {client.first_bytes!r}"
            )
    return sorted(age for client in clients for age in client.ages_ns[FIRST_TOKENS:-LAST_TOKENS])


@contextmanager
def process(arguments: list[str], **options: object) -> Iterator[int]:
    """A child process that ends with the block; gives its id."""
    child = subprocess.Popen([sys.executable, *arguments], **options)
    try:
        yield child.pid
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def wait_ready(port: int) -> None:
    """Until the router has seen the stub. Raises RuntimeError after 60 s."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError("the router is not ready after 60 s; its output stands above")


def cpu_s(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def summary(ages_ns: list[int]) -> dict[str, float]:
    """Percentiles in milliseconds."""
    return {f"p{share}_ms": ages_ns[min(len(ages_ns) - 1, len(ages_ns) * share // 100)] / 1e6 for share in (50, 99)}


def measure(streams: int, tokens: int, interval_s: float) -> dict[str, object]:
    """One row: ages directly and through the router, and the difference of their percentiles."""
    router_port = free_port()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=2048))
        stub_port = listener.getsockname()[1]
        stub = [
            __file__,
            "--stub",
            str(listener.fileno()),
            "--tokens",
            str(tokens),
            "--interval-ms",
            str(interval_s * 1e3),
        ]
        stack.enter_context(process(stub, pass_fds=[listener.fileno()]))
        settings = {
            "deployment": "bench",
            "served_name": "bench",
            "port": router_port,
            "prefill_service": f"127.0.0.1:{stub_port}",
            "decode_service": f"127.0.0.1:{stub_port}",
        }
        (folder / "router.json").write_text(json.dumps(settings))
        environment = {**os.environ, "KIMI_SETTINGS": str(folder / "router.json")}
        router = stack.enter_context(process(["-m", "kimi_worker", "route"], env=environment))
        wait_ready(router_port)
        direct = summary(uvloop.run(stream_all(stub_port, streams, tokens)))
        before_s = cpu_s(router)
        via = summary(uvloop.run(stream_all(router_port, streams, tokens)))
        used_s = cpu_s(router) - before_s
    return {
        "streams": streams,
        "tokens_per_s": streams / interval_s,
        "direct": direct,
        "router": via,
        "added": {name: via[name] - direct[name] for name in via},
        "router_cpu_us_per_token": used_s * 1e6 / (streams * tokens),
    }


def _line(*cells: object) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, (8, 10, 20, 20, 20, 14), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,64,512", help="numbers of streams (1,64,512)")
    parser.add_argument("--tokens", type=int, default=100, help="tokens of a stream (100)")
    parser.add_argument("--interval-ms", type=float, default=80.0, help="between two tokens of a stream (80)")
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    parser.add_argument("--stub", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stub is not None:
        uvloop.run(run_stub(socket.socket(fileno=options.stub), options.tokens, options.interval_ms / 1e3))
        return
    print(_line("streams", "tokens/s", "direct p50/p99 ms", "router p50/p99 ms", "added p50/p99 ms", "CPU us/token"))
    rows = []
    for streams in map(int, options.streams.split(",")):
        row = measure(streams, options.tokens, options.interval_ms / 1e3)
        pairs = (row[name] for name in ("direct", "router", "added"))
        cells = [f"{pair['p50_ms']:.2f} / {pair['p99_ms']:.2f}" for pair in pairs]
        print(_line(streams, round(row["tokens_per_s"]), *cells, round(row["router_cpu_us_per_token"])), flush=True)
        rows.append(row)
    if options.output:
        load = dict(zip(("1m", "5m", "15m"), os.getloadavg(), strict=True))
        machine = {
            "cpus": os.cpu_count(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "load": load,
        }
        options.output.write_text(json.dumps({"router": rows, "machine": machine}, indent=2) + "\n")


if __name__ == "__main__":
    main()
