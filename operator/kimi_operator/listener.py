"""A listening socket with a limit of connections: whichever was used last the longest ago gives way to a new one."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self


class Listener(socket.socket):
    """It counts where connections are taken: below TLS, so that one whose handshake never comes counts too."""

    _max_connections: int
    _used: dict[int, socket.socket]
    """By their file descriptors, in the order of their last use; closed ones stay until room is needed."""
    _num_taken: int

    @classmethod
    def bind_to(cls, host: str | None, port: int, max_connections: int) -> Self:
        """Take a port of an address, or of all, of both families where the machine has both. Raises OSError."""
        is_dual = host is None and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        bound = socket.create_server((host or "", port), family=family, dualstack_ipv6=is_dual)
        listener = cls(family, socket.SOCK_STREAM, fileno=bound.detach())
        listener._max_connections, listener._used, listener._num_taken = max_connections, {}, 0
        return listener

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        self._used.pop(connection.fileno(), None)
        self._used[connection.fileno()] = connection
        if len(self._used) > self._max_connections:
            self._make_room()
        self._num_taken += 1
        if self._num_taken % self._max_connections == 0:
            # asyncio ties those that failed at their handshake into cycles, 0.3 MiB each: too few objects for Python
            # to look at them before they fill the memory.
            gc.collect()
        return connection, address

    def use(self, descriptor: int) -> None:
        """A connection has brought a request: the others go first."""
        with self.keep(descriptor):
            pass

    @contextmanager
    def keep(self, descriptor: int) -> Iterator[None]:
        """A connection that must not give way while the block runs; the caller bounds how many there are."""
        connection = self._used.pop(descriptor, None)
        try:
            yield
        finally:
            # closed meanwhile, its number may be another one's
            if connection is not None and connection.fileno() == descriptor:
                self._used[descriptor] = connection

    def _make_room(self) -> None:
        self._used = {at: connection for at, connection in self._used.items() if connection.fileno() == at}
        while len(self._used) > self._max_connections:
            # Its owner reads an end, as if the client had gone, and closes it.
            with suppress(OSError):
                self._used.pop(next(iter(self._used))).shutdown(socket.SHUT_RDWR)
