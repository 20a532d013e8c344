"""The cluster's control socket: one JSON object a line in, one out.

A Unix socket is reached by its path from every network namespace, and the kernel tells each side the other's process
id in its own numbering, which is how nodes and callers find each other's namespaces.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kimi_localcluster.errors import LocalClusterError

Message = dict[str, Any]


def peer_process(sock: socket.socket) -> int:
    """Process id of the other end, as seen from here."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])


@contextmanager
def connect(path: Path, timeout_s: float = 10) -> Iterator[socket.socket]:
    """Connect to a Unix socket whose path may be longer than the 107 bytes that an address holds."""
    folder = os.open(path.parent, os.O_PATH)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect(f"/proc/self/fd/{folder}/{path.name}")
        yield sock
    finally:
        sock.close()
        os.close(folder)


def request(path: Path, timeout_s: float = 10, **message: Any) -> Message:
    """Send one request and return its answer. Raises LocalClusterError with the other side's message.

    OSError means that nobody listens there.
    """
    with connect(path, timeout_s) as sock:
        sock.sendall(json.dumps(message).encode() + b"\n")
        with sock.makefile("rb") as lines:
            line = lines.readline()
    if not line:
        raise LocalClusterError(f"the cluster ended while it handled {message}")
    answer: Message = json.loads(line)
    if "error" in answer:
        raise LocalClusterError(answer["error"])
    return answer
