"""A rank port over the simulated transport: commands in, reports out."""

import random

import pytest
from kimi_worker.handoff.plan import RegionLayout, Unit, digest_of_reservation
from kimi_worker.handoff.rank import RankPort
from kimi_worker.handoff.transport import Region
from kimi_worker.protocol.handoff import (
    Connect,
    Disconnect,
    Disconnected,
    Fence,
    Fenced,
    RankReport,
    Revoke,
    Revoked,
    TransferKey,
    Watch,
    Write,
    Wrote,
)
from sim_fabric import Fabric, Faults, Loop, SimTransport

LAYOUT = (RegionLayout("pages", Unit.PAGE, 64), RegionLayout("state", Unit.SLOT, 32))
REGIONS = [Region(LAYOUT[0], 0, 4), Region(LAYOUT[1], 256, 2)]
KEY = TransferKey("tcp://decode:1", 5, 1)
WRITE = Write(KEY, [0, 1], [2, 3], 0, 1)


class Pair:
    """A prefill rank and a decode rank, both TP rank 0, on one fabric."""

    def __init__(self) -> None:
        self.loop = Loop()
        fabric = Fabric(self.loop, random.Random(1), Faults())
        self.memories = [bytearray([fill] * 320) for fill in (7, 0)]
        self.transports = [
            SimTransport(fabric, name, memory)
            for name, memory in zip(("prefill", "decode"), self.memories, strict=True)
        ]
        self.prefill, self.decode = (RankPort(0, transport, REGIONS) for transport in self.transports)

    def connect(self) -> None:
        self.prefill.execute(Connect(KEY.peer, KEY.epoch, [self.decode.descriptor]))

    def reports(self) -> list[RankReport]:
        self.loop.run(self.loop.now + 10.0)
        return self.prefill.poll()


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_write_moves_the_bytes_and_reports_where_they_went(pair: Pair) -> None:
    pair.connect()
    pair.prefill.execute(WRITE)
    assert pair.prefill.poll() == []
    digest = digest_of_reservation(LAYOUT, [2, 3], 1)
    assert pair.reports() == [Wrote(0, KEY, "", True, digest, 160)]
    assert pair.memories[1] == bytes([0] * 128 + [7] * 128 + [0] * 32 + [7] * 32)


def test_fence_reports(pair: Pair) -> None:
    pair.connect()
    pair.prefill.execute(WRITE)
    pair.reports()
    pair.prefill.execute(Fence(WRITE))
    assert pair.reports() == [Fenced(0, KEY, "")]


def test_unconnected_peer_is_a_settled_error(pair: Pair) -> None:
    pair.prefill.execute(WRITE)
    pair.prefill.execute(Fence(WRITE))
    assert pair.prefill.poll() == [
        Wrote(0, KEY, f"not connected to {KEY.peer}", True, "", 0),
        Fenced(0, KEY, f"not connected to {KEY.peer}"),
    ]


def test_peer_that_cannot_be_connected_says_why_at_the_write(pair: Pair) -> None:
    pair.decode.close()
    pair.connect()
    pair.prefill.execute(WRITE)
    (report,) = pair.prefill.poll()
    assert isinstance(report, Wrote)
    assert "no memory decode/1" in report.error
    assert report.settled


def test_senseless_write_is_a_settled_error(pair: Pair) -> None:
    pair.connect()
    pair.prefill.execute(Write(KEY, [0, 1], [2], 0, 1))
    (report,) = pair.prefill.poll()
    assert isinstance(report, Wrote)
    assert "2 local pages for 1 remote pages" in report.error


def test_disconnect_ends_open_writes_before_it_reports(pair: Pair) -> None:
    pair.connect()
    pair.prefill.execute(WRITE)
    pair.prefill.execute(Disconnect(KEY.peer, KEY.epoch))
    wrote, disconnected = pair.prefill.poll()
    assert isinstance(wrote, Wrote)
    assert (wrote.error, wrote.settled) == ("disconnected from decode/1", False)
    assert disconnected == Disconnected(0, KEY.peer, KEY.epoch)


def test_disconnect_of_the_unknown_reports_too(pair: Pair) -> None:
    pair.prefill.execute(Disconnect("nobody", 1))
    assert pair.prefill.poll() == [Disconnected(0, "nobody", 1)]


def test_revoke_reports_a_new_descriptor_and_keeps_old_writes_out(pair: Pair) -> None:
    pair.connect()
    pair.prefill.execute(WRITE)
    old = pair.decode.descriptor
    pair.decode.execute(Revoke())
    assert pair.decode.poll() == [Revoked(0, pair.decode.descriptor)]
    assert pair.decode.descriptor != old
    (report,) = pair.reports()
    assert isinstance(report, Wrote)
    assert not report.settled
    assert pair.memories[1] == bytes(320)


def test_watch_is_a_flag_for_the_ranks_loop(pair: Pair) -> None:
    assert not pair.decode.is_watching
    pair.decode.execute(Watch(True))
    assert pair.decode.is_watching
    pair.decode.execute(Watch(False))
    assert not pair.decode.is_watching
