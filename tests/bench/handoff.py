"""GB/s of the handoff's transport (plan, post, poll, report) against bare NIXL, with the same bytes in the same run.

Two processes on this machine; the written one pumps every millisecond, as a decode rank does. The two ways take turns,
so that whatever else the machine does hits both; the ratio is that of the best rounds, which a busy machine disturbs
least, and the medians stand beside it.

usage: handoff.py [--json FILE] [--rounds N] [--tls tcp,all]
"""

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import nixl_cu12
import numpy as np
from kimi_worker.handoff import nixl
from kimi_worker.handoff.plan import Layout, RegionLayout, Unit, num_bytes, plan_copies
from kimi_worker.handoff.rank import RankPort
from kimi_worker.handoff.transport import Region
from kimi_worker.protocol.handoff import Connect, TransferKey, Write, Wrote

PUMP_S = 0.001
WARM_UP = 2
MIN_ROUNDS = 5
CASE_S = 8.0
"""After so long a case makes no further rounds."""
KEY = TransferKey("decode", 1, 1)


@dataclass(frozen=True)
class Case:
    """A request of one rank: pages of one size, and a slot."""

    name: str
    num_pages: int
    page_bytes: int
    slot_bytes: int
    is_scattered: bool
    """Pages in random order, so that hardly any two can be merged."""

    @property
    def layout(self) -> Layout:
        return (
            RegionLayout("pages", Unit.PAGE, self.page_bytes),
            RegionLayout("state", Unit.SLOT, self.slot_bytes),
            RegionLayout("conv", Unit.SLOT, self.slot_bytes // 16),
        )

    @property
    def write(self) -> Write:
        pages = list(range(self.num_pages))
        rng = random.Random(1)
        local, remote = (rng.sample(pages, len(pages)) if self.is_scattered else pages for _ in range(2))
        return Write(KEY, local, remote, 0, 1)


CASES = (
    Case("tiny model, 4,096 tokens", 64, 16 << 10, 64 << 10, is_scattered=True),
    Case("8 MiB in pages of 64 KiB", 128, 64 << 10, 1 << 20, is_scattered=True),
    Case("64 MiB in pages of 256 KiB", 256, 256 << 10, 4 << 20, is_scattered=True),
    Case("64 MiB in one piece", 256, 256 << 10, 4 << 20, is_scattered=False),
    Case("64 MiB in pages of 2 MiB", 32, 2 << 20, 8 << 20, is_scattered=True),
)


class Memory:
    """A rank's regions in host memory."""

    def __init__(self, case: Case, fill: int) -> None:
        units = {Unit.PAGE: case.num_pages, Unit.SLOT: 2}
        self.arrays = [np.full((units[layout.unit], layout.bytes_per_unit), fill, np.uint8) for layout in case.layout]
        self.regions = [
            Region(layout, array.ctypes.data, len(array))
            for layout, array in zip(case.layout, self.arrays, strict=True)
        ]


def serve(case: Case, orders: "Connection[Any, Any]") -> None:
    """The written rank."""
    memory = Memory(case, 0)
    port = RankPort(0, nixl.NixlTransport("decode"), memory.regions)
    orders.send(port.descriptor)
    while not orders.poll(PUMP_S):
        port.poll()
    orders.recv()
    write = case.write
    pages, *slots = memory.arrays
    orders.send(bool((pages[write.remote_pages] == 7).all()) and all(bool((slot[1] == 7).all()) for slot in slots))
    port.close()


def measure(case: Case, rounds: int, descriptor: bytes, answer: "Connection[Any, Any]") -> None:
    """The writing rank: seconds of each round, ours and bare."""
    memory = Memory(case, 7)
    ways = {"ours": handoff(case, memory, descriptor), "bare": bare_nixl(case, memory, descriptor)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    deadline = time.monotonic() + CASE_S
    for number in range(WARM_UP + rounds):
        if number >= MIN_ROUNDS + WARM_UP and time.monotonic() > deadline:
            break
        for name in random.Random(number).sample(list(ways), 2):
            began = time.perf_counter()
            ways[name]()
            if number >= WARM_UP:
                seconds[name].append(time.perf_counter() - began)
    answer.send(seconds)


def handoff(case: Case, memory: Memory, descriptor: bytes) -> Callable[[], None]:
    port = RankPort(0, nixl.NixlTransport("prefill"), memory.regions)
    port.execute(Connect(KEY.peer, KEY.epoch, [descriptor]))

    def transfer() -> None:
        port.execute(case.write)
        while not (reports := port.poll()):
            pass
        (report,) = reports
        assert isinstance(report, Wrote)
        assert not report.error, report.error

    return transfer


def bare_nixl(case: Case, memory: Memory, descriptor: bytes) -> Callable[[], None]:
    """The same ranges, computed beforehand, given to NIXL directly."""
    peer = msgspec.msgpack.decode(descriptor, type=nixl._Descriptor)
    agent = nixl_cu12.nixl_agent("bare", nixl_cu12.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    agent.register_memory([(region.pointer, region.num_bytes, 0, "") for region in memory.regions], "DRAM")
    name = agent.add_remote_agent(peer.metadata)
    copies = plan_copies(case.layout, case.write)
    local, remote = (
        np.array([(base[copy.region] + offset, copy.num_bytes, 0) for copy, offset in pairs], np.uint64)
        for base, pairs in (
            ([region.pointer for region in memory.regions], [(copy, copy.local_offset) for copy in copies]),
            ([region.pointer for region in peer.regions], [(copy, copy.remote_offset) for copy in copies]),
        )
    )

    def transfer() -> None:
        handle = agent.initialize_xfer(
            "WRITE", agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, "DRAM"), name
        )
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        assert state == "DONE", state
        agent.release_xfer_handle(handle)

    return transfer


def run(case: Case, tls: str, rounds: int) -> dict[str, Any]:
    os.environ["UCX_TLS"] = tls
    context = multiprocessing.get_context("spawn")
    orders, orders_of_child = context.Pipe()
    answer, answer_of_child = context.Pipe()
    target = context.Process(daemon=True, target=serve, args=(case, orders_of_child))
    target.start()
    writer = context.Process(daemon=True, target=measure, args=(case, rounds, orders.recv(), answer_of_child))
    writer.start()
    seconds = answer.recv()
    writer.join()
    orders.send("check")
    assert orders.recv(), f"{case.name}: the bytes that arrived are wrong"
    target.join()
    copies = plan_copies(case.layout, case.write)
    size = num_bytes(copies)
    ours, bare = (min(seconds[name]) for name in ("ours", "bare"))
    median_ours, median_bare = (statistics.median(seconds[name]) for name in ("ours", "bare"))
    return {
        "case": case.name, "tls": tls, "bytes": size, "copies": len(copies), "rounds": len(seconds["ours"]),
        "ours_gb_per_s": size / ours / 1e9, "bare_gb_per_s": size / bare / 1e9, "ratio": bare / ours,
        "ours_ms": ours * 1e3, "median_ours_ms": median_ours * 1e3, "median_bare_ms": median_bare * 1e3,
    }  # fmt: skip


def machine() -> dict[str, str | int]:
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "cpu": models[0].partition(": ")[2] if models else platform.processor(),
        "cores": os.cpu_count() or 0,
        "kernel": platform.release(),
        "commit": commit.stdout.strip(),
        "load_1min": f"{os.getloadavg()[0]:.1f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--tls", default="tcp,all", help="values of UCX_TLS; between pods only tcp applies")
    arguments = parser.parse_args()
    print(" ".join(f"{key} {value}" for key, value in machine().items()))
    head = f"{'case':28s} {'UCX_TLS':7s} {'MiB':>7s} {'copies':>6s} {'GB/s':>6s} {'NIXL':>6s} {'ratio':>7s}"
    print(f"{head} {'median ms, NIXL':>17s}")
    rows = []
    for tls, case in itertools.product(arguments.tls.split(","), CASES):
        row = run(case, tls, arguments.rounds)
        rows.append(row)
        print(
            f"{row['case']:28s} {row['tls']:7s} {row['bytes'] / 2**20:7.1f} {row['copies']:6d} "
            f"{row['ours_gb_per_s']:6.2f} {row['bare_gb_per_s']:6.2f} {row['ratio']:7.1%} "
            f"{row['median_ours_ms']:8.2f} {row['median_bare_ms']:8.2f}",
            flush=True,
        )
    if arguments.output:
        arguments.output.write_text(json.dumps({"machine": machine(), "handoff": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
