"""Ports for the processes that tests start."""

import contextlib
import random
import socket
from pathlib import Path


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nobody uses now, different ones.

    All lie below the range that the kernel gives to outgoing connections: such a connection, even one that waits for
    its own server on the same port, could otherwise take the port before the server binds it.
    """
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = random.Random().sample(range(10_000, first_outgoing), 20 * count)
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in candidates:
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                ports.append(port)
            if len(ports) == count:
                return ports
    raise AssertionError(f"{count} free ports not found among {candidates}")
