"""Random walks of whole lanes through faults. KIMI_WALK_SEEDS sets how many (default 2,000)."""

import os
from typing import Any

import pytest
from kimi_worker.handoff import decode_side, prefill_side, rank
from kimi_worker.handoff.actions import Action, FreeReservation, Send
from kimi_worker.handoff.decode_side import DecodeSide
from kimi_worker.handoff.plan import Copy, Unit, digest_of_reservation, plan_copies
from kimi_worker.handoff.prefill_side import PrefillSide
from kimi_worker.protocol.handoff import Release
from msgspec.structs import replace
from sim_lanes import InvariantError
from sim_walk import Walk

BLOCK = 100
NUM_SEEDS = int(os.environ.get("KIMI_WALK_SEEDS", "2000"))
FAULTY_SEEDS = 250
"""Enough for each planted bug below to show; most show within ten."""


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, BLOCK))
def test_invariants_hold_through_faults(first: int) -> None:
    done = 0
    for seed in range(first, first + BLOCK):
        try:
            done += Walk(seed).run()["done"]
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    # The walks must not only fail cleanly
    assert done > BLOCK


def long_steps(num_seeds: int) -> set[str]:
    """How requests end that meet nothing worse than steps of several times the silence that loses a peer."""
    return {end for seed in range(num_seeds) for end in Walk(seed, only_steps=True).run()}


def test_long_steps_lose_no_peer() -> None:
    assert long_steps(FAULTY_SEEDS) <= {"done", "cancelled", "failed prefill_full", "failed layout_mismatch"}


@pytest.mark.parametrize("side", [DecodeSide, PrefillSide])
def test_without_seeing_busy_peers_long_steps_lose_them(side: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side, "see", lambda *_: None)
    assert long_steps(FAULTY_SEEDS) & {"failed prefill_unreachable", "failed handoff_failed"}


def test_a_walk_is_repeatable() -> None:
    assert Walk(7).run() == Walk(7).run()


def breaks(rule: str, *, early: bool = False) -> bool:
    """Whether some walk breaks the invariant."""
    for seed in range(FAULTY_SEEDS):
        try:
            Walk(seed, early=early).run()
        except InvariantError as error:
            if str(error).startswith(rule):
                return True
        except RuntimeError:
            # A planted bug may also make the lanes talk for ever; another seed shows the broken invariant
            continue
    return False


def test_notifying_before_the_writes_land_breaks_i1() -> None:
    assert breaks("I1", early=True)


_wrote, _aborted, _close_below = PrefillSide._wrote, PrefillSide._aborted, PrefillSide._close_numbers_below
_prefill_meets, _decode_meets = PrefillSide._meet, DecodeSide._meet
_release, _free, _decode_landed = PrefillSide._release, DecodeSide._free, DecodeSide._landed


def free_at_once(side: DecodeSide, item: Any, now: float) -> list[Action]:
    return side._free(item)


def abort_while_writing(side: PrefillSide, link: Any, message: Any, now: float) -> list[Action]:
    transfer = link.transfers.get(message.number)
    return [] if transfer is None else side._end(transfer, "decode gave up")


def first_rank_is_enough(side: PrefillSide, report: Any, now: float) -> list[Action]:
    transfer = side._find(report.key)
    return [] if transfer is None or transfer.ready is None else side._landed(transfer, now)


def skip_the_fence(side: PrefillSide, report: Any, now: float) -> list[Action]:
    side._fence = False
    return _wrote(side, report, now)


def call_all_settled(side: PrefillSide, key: Any, text: str, settled: bool) -> Any:
    return _aborted(side, key, text, settled=True)


def forget_what_is_closed(side: PrefillSide, link: Any, oldest: int) -> list[Action]:
    actions = _close_below(side, link, oldest)
    link.oldest = 0
    return actions


def leave_out_the_state(layout: Any, write: Any) -> list[Copy]:
    return [copy for copy in plan_copies(layout, write) if layout[copy.region].unit is Unit.PAGE]


def look_at_the_pages_alone(layout: Any, page_ids: Any, slot: int) -> str:
    return digest_of_reservation(tuple(region for region in layout if region.unit is Unit.PAGE), page_ids, slot)


def free_the_source_twice(side: PrefillSide, link: Any, message: Any) -> list[Action]:
    return [action for action in _release(side, link, message) for _ in range(2)]


def free_the_reservation_twice(side: DecodeSide, item: Any) -> list[Action]:
    return _free(side, item) * 2


def activate_and_free(side: DecodeSide, item: Any, message: Any, now: float) -> list[Action]:
    """The session frees what it has handed to the engine, which frees it again when the request ends."""
    return [*_decode_landed(side, item, message, now), FreeReservation(item.request.request_id)]


def never_ask_again(side: DecodeSide, item: Any, now: float) -> Action:
    item.next_send = float("inf")
    return Send(item.request.prefill, Release(0, side.epoch, 0))


def accept_any_decode(side: PrefillSide, peer: str, hello: Any, now: float) -> list[Action]:
    return _prefill_meets(side, peer, replace(hello, layout_hash=side._identity.layout_hash), now)


def accept_any_prefill(side: DecodeSide, peer: str, hello: Any, now: float) -> list[Action]:
    return _decode_meets(side, peer, replace(hello, layout_hash=side._identity.layout_hash), now)


@pytest.mark.parametrize(
    ("rule", "plants"),
    [
        pytest.param("I2", [(DecodeSide, "_give_up", free_at_once)], id="no quarantine"),
        pytest.param("I2", [(DecodeSide, "_cut_off", free_at_once)], id="no revoke"),
        pytest.param("I2", [(PrefillSide, "_abort", abort_while_writing)], id="abort answered while writing"),
        pytest.param("I1", [(PrefillSide, "_wrote", first_rank_is_enough)], id="ready at the first rank"),
        pytest.param("I1", [(PrefillSide, "_wrote", skip_the_fence)], id="no fence"),
        pytest.param("I2", [(PrefillSide, "_aborted", call_all_settled)], id="broken writes called settled"),
        pytest.param(
            "I2", [(PrefillSide, "_close_numbers_below", forget_what_is_closed)], id="late request done again"
        ),
        pytest.param(
            "I3",
            [
                (rank, "plan_copies", leave_out_the_state),
                (prefill_side, "digest_of_reservation", look_at_the_pages_alone),
                (decode_side, "digest_of_reservation", look_at_the_pages_alone),
            ],
            id="state not handed over",
        ),
        pytest.param("I4", [(PrefillSide, "_release", free_the_source_twice)], id="prefill frees twice"),
        pytest.param("I4", [(DecodeSide, "_free", free_the_reservation_twice)], id="decode frees twice"),
        pytest.param("I4", [(DecodeSide, "_landed", activate_and_free)], id="freed by the session and the engine"),
        pytest.param("I5", [(DecodeSide, "_query", never_ask_again)], id="lost answers not asked for"),
        pytest.param(
            "I6",
            [(PrefillSide, "_meet", accept_any_decode), (DecodeSide, "_meet", accept_any_prefill)],
            id="layouts not compared",
        ),
    ],
)
def test_a_planted_bug_shows(rule: str, plants: list[tuple[object, str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name, bug in plants:
        monkeypatch.setattr(owner, name, bug)
    assert breaks(rule)
