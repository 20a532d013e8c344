"""Test writes between simulated lanes: which fabrics pass, what is said of those that do not, what it costs."""

import random

import pytest
from kimi_worker.handoff.fabric import RETRY_S
from sim_fabric import Fabric, Faults, Loop, SimNetwork
from sim_lanes import POISON, SCRATCH_START, TIMING, DecodeLane, PrefillLane, World


class Lanes:
    """One decode lane and a few prefill lanes."""

    def __init__(self, faults: Faults, num_prefills: int = 2, *, fence: bool = False) -> None:
        self.loop, rng = Loop(), random.Random(1)
        self.events: list[tuple[object, ...]] = []
        fabric = Fabric(self.loop, rng, faults, completes_locally=fence)
        self.network = SimNetwork(self.loop, rng, faults)
        world = World(self.loop, rng, self.network, fabric, lambda *event: self.events.append(event))
        self.decode = DecodeLane(world, "decode", "layout")
        self.prefills = [
            PrefillLane(world, f"prefill-{at}", "layout", fence=fence, early=False) for at in range(num_prefills)
        ]
        self.world = world

    def verify(self) -> None:
        self.decode.verify([lane.endpoint for lane in self.prefills])

    def run(self, seconds: float) -> tuple[int, int, str]:
        self.loop.run(self.loop.now + seconds)
        fabric = self.decode.decode_side.fabric
        return fabric.num_peers, fabric.num_verified, fabric.error

    def assert_at_rest(self) -> None:
        for lane in (self.decode, *self.prefills):
            lane.check_idle()


@pytest.mark.parametrize("fence", [False, True])
def test_working_fabric_is_verified_and_costs_nothing_afterwards(fence: bool) -> None:
    lanes = Lanes(Faults(), fence=fence)
    lanes.verify()
    assert lanes.run(5.0) == (2, 2, "")
    lanes.assert_at_rest()
    before = len(lanes.events)
    lanes.verify()
    assert lanes.run(600.0) == (2, 2, "")
    assert len(lanes.events) == before
    lanes.assert_at_rest()


def test_more_lanes_than_scratch_units_are_verified() -> None:
    lanes = Lanes(Faults(), num_prefills=30)
    lanes.verify()
    assert lanes.run(60.0) == (30, 30, "")
    lanes.assert_at_rest()


def test_dropped_writes_are_seen_named_and_tried_again_until_they_arrive() -> None:
    faults = Faults(drop_writes=True)
    lanes = Lanes(faults, num_prefills=1)
    lanes.verify()
    peers, verified, error = lanes.run(5.0)
    assert (peers, verified) == (1, 0)
    assert error.startswith("prefill-0 over nixl: the test write was reported done but did not arrive: rank ")
    assert "check that UCX_TLS" in error
    lanes.decode.pool.check_all_free()
    faults.drop_writes = False
    assert lanes.run(10 * RETRY_S) == (1, 1, "")
    lanes.assert_at_rest()


def test_broken_connection_is_named() -> None:
    lanes = Lanes(Faults(break_wire=1.0, slow_write=1.0), num_prefills=1)
    lanes.verify()
    peers, verified, error = lanes.run(15.0)
    assert (peers, verified) == (1, 0)
    assert "prefill-0 over nixl: the test write failed: rank " in error


def test_unreachable_peer_is_named_and_not_polled_for() -> None:
    lanes = Lanes(Faults(), num_prefills=1)
    lanes.network.cut.add(frozenset(("decode", "prefill-0")))
    lanes.verify()
    assert lanes.run(1.0) == (1, 0, "")
    assert not any(port.is_watching for port in lanes.decode.ports)
    assert "prefill-0 over nixl: prefill-0 has been silent" in lanes.run(TIMING.silence_s)[2]
    lanes.network.cut.clear()
    assert lanes.run(20 * RETRY_S) == (1, 1, "")
    lanes.assert_at_rest()


def test_peer_that_goes_is_forgotten_and_its_successor_verified() -> None:
    lanes = Lanes(Faults())
    lanes.verify()
    lanes.run(5.0)
    lanes.prefills.pop().crash()
    lanes.verify()
    assert lanes.run(5.0) == (1, 1, "")
    lanes.prefills.append(PrefillLane(lanes.world, "prefill-1", "layout", fence=False, early=False))
    lanes.verify()
    assert lanes.run(5.0) == (2, 2, "")
    lanes.assert_at_rest()


def test_peer_in_a_long_step_is_waited_for() -> None:
    lanes = Lanes(Faults(), num_prefills=1)
    lanes.prefills[0].step_for(3 * TIMING.silence_s)
    lanes.verify()
    assert lanes.run(2 * TIMING.silence_s) == (1, 0, "")
    assert lanes.run(2 * TIMING.silence_s) == (1, 1, "")


def test_every_rank_writes_its_own_pattern() -> None:
    lanes = Lanes(Faults(), num_prefills=1)
    lanes.verify()
    lanes.run(5.0)
    first, second = (bytes(memory[SCRATCH_START:]) for memory in lanes.decode.pool.ranks)
    assert first != second
    assert bytes([POISON]) * len(first) not in (first, second)
