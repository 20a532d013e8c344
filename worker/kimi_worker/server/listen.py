"""Takes the port of an HTTP app, or says who has it."""

import errno
import os
import socket
from pathlib import Path

BACKLOG = 2048
_LISTENING = "0A"
"""A socket's state in /proc/net/tcp."""


class PortError(Exception):
    """The port cannot be taken; the message says which, why and by whom it is held."""


def take_port(port: int, address: str = "0.0.0.0") -> socket.socket:  # noqa: S104  # the pod's network is its own
    """Listen on a port of one of this machine's addresses, or of all. Raises PortError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, port), family=family, backlog=BACKLOG)
    except OSError as error:
        what = f"port {port} of {address} cannot be listened on: {_cause(error)}"
        if error.errno != errno.EADDRINUSE:
            raise PortError(what) from error
        raise PortError(f"{what}; {_holder(port)} has it: end that process or set another port") from error
    # inherited by every connection: a peer whose machine is gone is noticed while nothing is said
    keep_alive(listener)
    return listener


def _cause(error: OSError) -> str:
    """Without what Python adds, which repeats the address; an error of the name service has numbers of its own."""
    return str(error.strerror) if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel ask an idle connection's peer whether it lives: it is given up after 25 s without an answer."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _holder(port: int) -> str:
    """The process that listens on a port, for people; on a host's network it may be in another container."""
    inodes = _listening_inodes(port)
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if str(link.readlink()) in inodes:
                pid = link.parts[2]
                return f"process {pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})"
        except OSError:  # it has ended, or is another user's
            continue
    return "a process that cannot be seen from here"


def _listening_inodes(port: int) -> set[str]:
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not Path(table).exists():
            continue
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(f"socket:[{fields[9]}]")
    return found
