"""Finds the prefill lanes that may write into this decode pod: every address of their headless service, every lane."""

import contextlib
import socket
import threading

import msgspec

from kimi_worker.settings import PeerSettings

RESOLVE_S = 10.0
"""Between look-ups of the service's name."""


class PeerDiscovery:
    """A thread, because the name service may take its time to answer. `socket` is readable when the list changes."""

    def __init__(self, peers: PeerSettings) -> None:
        self._peers = peers
        self._stop = threading.Event()
        self.socket, self._writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.setblocking(False)
        self._thread = threading.Thread(target=self._watch, name="peer-discovery", daemon=True)
        self._thread.start()

    def take(self) -> list[str] | None:
        """The handoff endpoints of all prefill lanes, when they have changed."""
        try:
            return msgspec.json.decode(self.socket.recv(1 << 20), type=list[str])
        except BlockingIOError:
            return None

    def close(self) -> None:
        """Look nothing up any more. The thread is not waited for: the name service may hold it up."""
        self._stop.set()
        self.socket.close()

    def _watch(self) -> None:
        known: list[str] = []
        with self._writer:
            while not self._stop.is_set():
                found = endpoints(self._peers)
                # An empty answer is more often a name service in trouble than a role without pods.
                if found and found != known:
                    with contextlib.suppress(BrokenPipeError):
                        self._writer.send(msgspec.json.encode(found))
                    known = found
                self._stop.wait(RESOLVE_S)


def endpoints(peers: PeerSettings) -> list[str]:
    """Where the lanes of the pods behind the service receive; empty when the name does not resolve."""
    try:
        answers = socket.getaddrinfo(peers.service, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    hosts = sorted({str(address[0]) for *_, address in answers})
    bracketed = [f"[{host}]" if ":" in host else host for host in hosts]
    return [f"tcp://{host}:{peers.port + lane}" for host in bracketed for lane in range(peers.lanes_per_pod)]
