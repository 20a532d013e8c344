"""One rank of the NIXL tests: a process of its own that polls its transport and obeys orders over a socket.

Started as `python nixl_peer.py <socket> <name>`. An order is (method of Rank, arguments...); its answer is the method's
result, or the TransportError it raised.
"""

import hashlib
import os
import sys
import time
from multiprocessing.connection import Client
from pathlib import Path

import numpy as np
from kimi_worker.handoff.nixl import NixlTransport
from kimi_worker.handoff.plan import RegionLayout, Unit, plan_copies
from kimi_worker.handoff.transport import Completion, Region, TransportError
from kimi_worker.protocol.handoff import Write

LAYOUTS = (
    RegionLayout("pages", Unit.PAGE, 128 << 10),
    RegionLayout("state", Unit.SLOT, 1 << 20),
    RegionLayout("conv", Unit.SLOT, 96 << 10),
)
NUM_UNITS = {Unit.PAGE: 96, Unit.SLOT: 4}


class Rank:
    """A transport and the memory it may write."""

    def __init__(self, name: str) -> None:
        self.arrays = [np.zeros((NUM_UNITS[layout.unit], layout.bytes_per_unit), np.uint8) for layout in LAYOUTS]
        regions = [
            Region(layout, array.ctypes.data, len(array)) for layout, array in zip(LAYOUTS, self.arrays, strict=True)
        ]
        self.transport = NixlTransport(name)
        self.descriptor = self.transport.register(regions)
        self.ended: dict[int, Completion] = {}

    def poll(self) -> None:
        self.transport.pump()
        for completion in self.transport.poll():
            assert completion.post not in self.ended, f"{completion} came twice"
            self.ended[completion.post] = completion

    def describe(self) -> bytes:
        return self.descriptor

    def connect(self, descriptor: bytes) -> str:
        return self.transport.connect(descriptor)

    def disconnect(self, peer: str) -> None:
        self.transport.disconnect(peer)

    def revoke(self) -> bytes:
        return self.transport.revoke()

    def write(self, peer: str, write: Write) -> int:
        return self.transport.post_write(peer, plan_copies(LAYOUTS, write))

    def read_back(self, peer: str, write: Write) -> int:
        return self.transport.post_read_back(peer, plan_copies(LAYOUTS, write))

    def wait(self, post: int, seconds: float) -> Completion | None:
        """The post's completion, or None when it has not come in time."""
        deadline = time.monotonic() + seconds
        while post not in self.ended and time.monotonic() < deadline:
            self.poll()
        return self.ended.pop(post, None)

    def randomise(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for array in self.arrays:
            array[:] = rng.integers(0, 256, array.shape, np.uint8)

    def fill(self, value: int) -> None:
        for array in self.arrays:
            array[:] = value

    def digest(self, pages: list[int], slot: int) -> str:
        """Digest of the bytes in these pages, in this order, and in this slot."""
        found = hashlib.blake2b()
        for layout, array in zip(LAYOUTS, self.arrays, strict=True):
            for unit in pages if layout.unit is Unit.PAGE else [slot]:
                found.update(array[unit])
        return found.hexdigest()

    def usage(self) -> tuple[int, int]:
        """Resident bytes of this process, and its open files."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE"), len(list(Path("/proc/self/fd").iterdir()))


def main(address: str, name: str) -> None:
    rank = Rank(name)
    with Client(address) as orders:
        while True:
            rank.poll()
            if not orders.poll(0.001):
                continue
            method, *arguments = orders.recv()
            if method == "stop":
                rank.transport.close()
                return
            try:
                answer = getattr(rank, method)(*arguments)
            except TransportError as error:
                answer = error
            orders.send(answer)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
