"""What the session tests share: a lane of two ranks and the peers it talks to."""

import pytest
from kimi_worker.handoff.actions import LaneIdentity, Timing
from kimi_worker.handoff.plan import Layout, RegionLayout, Unit

LAYOUT: Layout = (RegionLayout("pages", Unit.PAGE, 64), RegionLayout("state", Unit.SLOT, 16))


@pytest.fixture
def timing() -> Timing:
    return Timing(
        reservation_timeout_s=100.0,
        resend_s=1.0,
        resend_max_s=4.0,
        hello_s=2.0,
        silence_s=10.0,
        revoke_wait_s=10.0,
        write_timeout_s=60.0,
    )


@pytest.fixture
def decode_identity() -> LaneIdentity:
    return LaneIdentity("decode", 500, "layout", LAYOUT, 2, (b"rank 0", b"rank 1"))


@pytest.fixture
def prefill_identity() -> LaneIdentity:
    return LaneIdentity("prefill", 900, "layout", LAYOUT, 2)
