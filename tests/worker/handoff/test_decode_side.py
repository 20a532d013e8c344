"""Every state and transition of decode's table, one event at a time."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from kimi_worker.handoff.actions import (
    Action,
    Activate,
    Fail,
    FreeReservation,
    HandoffRequest,
    LaneIdentity,
    Send,
    Timing,
    ToRanks,
)
from kimi_worker.handoff.decode_side import DecodeSide
from kimi_worker.handoff.plan import digest_of_reservation
from kimi_worker.protocol.engine import SampledToken, Sampling
from kimi_worker.protocol.handoff import (
    Abort,
    Aborted,
    Accepted,
    Hello,
    LaneMessage,
    Prefill,
    Query,
    Ready,
    Refused,
    Release,
    Revoke,
    Revoked,
    Watch,
)
from msgspec.structs import replace

PEER, OTHER = "tcp://prefill:1", "tcp://prefill:2"
MINE, THEIRS = 500, 900
PAGES, SLOT = [3, 4, 8], 1
FIRST = SampledToken(77)
WATCH, UNWATCH = ToRanks(Watch(True)), ToRanks(Watch(False))


def request(request_id: str = "a", prefill: str = PEER) -> HandoffRequest:
    return HandoffRequest(request_id, prefill, [1, 2, 3], Sampling(max_tokens=4), PAGES, SLOT)


def answer(epoch: int = THEIRS, peer_epoch: int = MINE, layout_hash: str = "layout") -> Hello:
    return Hello("prefill", epoch, layout_hash, [], peer_epoch)


def sent(actions: Sequence[Action], kind: type[LaneMessage] | None = None) -> list[LaneMessage]:
    messages = [action.message for action in actions if isinstance(action, Send)]
    return [message for message in messages if kind is None or isinstance(message, kind)]


@pytest.fixture
def side(decode_identity: LaneIdentity, timing: Timing) -> DecodeSide:
    return DecodeSide(decode_identity, timing)


@pytest.fixture
def ready(decode_identity: LaneIdentity) -> Ready:
    digest = digest_of_reservation(decode_identity.layout, PAGES, SLOT)
    return Ready(1, THEIRS, MINE, digest, FIRST, num_bytes=416, seconds=0.5)


def reserved(side: DecodeSide, request_id: str = "a", prefill: str = PEER, now: float = 0.0) -> None:
    """Bring a request to the point where its Prefill is out."""
    side.begin(request(request_id, prefill), now)
    side.receive(prefill, answer(), now)


def quarantined(side: DecodeSide, now: float = 1.0) -> None:
    reserved(side)
    side.cancel("a", now)


def lost(side: DecodeSide, code: str) -> list[Action]:
    """Let the peer be silent until it is given up; return what happened then."""
    actions: list[Action] = []
    while not any(isinstance(action, Fail) for action in actions):
        deadline = side.next_deadline()
        assert deadline is not None
        actions = side.tick(deadline)
    assert [action.code for action in actions if isinstance(action, Fail)] == [code]
    return actions


def test_begin_says_hello_and_holds_the_request_back(side: DecodeSide) -> None:
    actions = side.begin(request(), 0.0)
    assert actions == [Send(PEER, Hello("decode", MINE, "layout", [b"rank 0", b"rank 1"], 0, 1)), WATCH]
    assert (side.num_open, side.num_quarantined) == (1, 0)


def test_hello_is_answered_with_the_request(side: DecodeSide) -> None:
    side.begin(request(), 0.0)
    (message,) = sent(side.receive(PEER, answer(), 0.5))
    assert message == Prefill(1, MINE, THEIRS, [1, 2, 3], Sampling(max_tokens=4), PAGES, SLOT, deadline_s=99.5)


def test_a_fresh_peer_needs_no_new_hello(side: DecodeSide) -> None:
    reserved(side)
    assert [type(message) for message in sent(side.begin(request("b"), 1.0))] == [Prefill]


def test_a_peer_not_heard_lately_is_asked_first(side: DecodeSide, ready: Ready) -> None:
    reserved(side)
    side.receive(PEER, ready, 1.0)
    assert [type(message) for message in sent(side.begin(request("b"), 50.0))] == [Hello]
    assert [type(message) for message in sent(side.receive(PEER, answer(), 50.0))] == [Prefill]


def test_hello_for_another_epoch_of_ours_is_ignored(side: DecodeSide) -> None:
    side.begin(request(), 0.0)
    assert side.receive(PEER, answer(peer_epoch=MINE - 1), 0.5) == []


def test_hello_of_a_stranger_is_ignored(side: DecodeSide) -> None:
    assert side.receive(OTHER, answer(), 0.0) == []


def test_other_layout_is_refused_before_anything_is_sent(side: DecodeSide) -> None:
    side.begin(request(), 0.0)
    failed, freed, unwatch = side.receive(PEER, answer(layout_hash="other"), 0.5)
    assert isinstance(failed, Fail)
    assert (failed.code, failed.retryable) == ("layout_mismatch", True)
    assert "other" in failed.message
    assert [freed, unwatch] == [FreeReservation("a"), UNWATCH]


def test_ready_activates_and_releases(side: DecodeSide, ready: Ready) -> None:
    reserved(side)
    actions = side.receive(PEER, ready, 2.0)
    assert actions == [Activate("a", FIRST, 416, 0.5), Send(PEER, Release(1, MINE, THEIRS)), UNWATCH]
    assert side.num_open == 0
    assert side.next_deadline() is None


def test_repeated_ready_is_released_again_and_activates_nothing(side: DecodeSide, ready: Ready) -> None:
    reserved(side)
    side.receive(PEER, ready, 2.0)
    assert side.receive(PEER, ready, 3.0) == [Send(PEER, Release(1, MINE, THEIRS))]


@pytest.mark.parametrize("wrong", [{"peer_epoch": MINE + 1}, {"peer_epoch": 0}])
def test_ready_for_another_epoch_is_ignored(side: DecodeSide, ready: Ready, wrong: dict[str, int]) -> None:
    reserved(side)
    assert side.receive(PEER, replace(ready, **wrong), 2.0) == []
    assert side.num_open == 1


def test_ready_of_another_process_or_peer_activates_nothing(side: DecodeSide, ready: Ready) -> None:
    reserved(side)
    for peer, message in [(PEER, replace(ready, epoch=THEIRS + 1)), (OTHER, ready)]:
        assert not any(isinstance(action, Activate) for action in side.receive(peer, message, 2.0))
    assert side.num_open == 1


def test_ready_with_another_digest_is_quarantined(side: DecodeSide, ready: Ready) -> None:
    reserved(side)
    actions = side.receive(PEER, replace(ready, digest="elsewhere"), 2.0)
    assert [type(action) for action in actions] == [Fail, Send]
    assert sent(actions) == [Abort(1, MINE, THEIRS)]
    assert side.num_quarantined == 1


@pytest.mark.parametrize(
    ("code", "retryable"), [("prefill_full", True), ("prompt_too_long", False), ("engine_error", False)]
)
def test_refused_fails_and_frees(side: DecodeSide, code: str, retryable: bool) -> None:
    reserved(side)
    actions = side.receive(PEER, Refused(1, THEIRS, MINE, code, "because"), 1.0)
    assert actions == [Fail("a", code, "because", retryable), FreeReservation("a"), UNWATCH]


def test_prefill_is_repeated_with_pauses_until_accepted(side: DecodeSide) -> None:
    reserved(side)
    times = []
    for tenths in range(1, 90):
        now = tenths / 10
        times += [now for message in sent(side.tick(now)) if isinstance(message, Prefill)]
        side.receive(PEER, answer(), now)
    assert times == [1.0, 3.0, 7.0]
    side.receive(PEER, Accepted(1, THEIRS, MINE), 9.0)
    assert sent(side.tick(60.0), Prefill) == []


def test_prefill_is_not_repeated_to_a_peer_that_has_read_nothing_since(side: DecodeSide) -> None:
    """It is in a long step: the prompt waits in its inbox already."""
    reserved(side)
    for tenths in range(1, 300):
        now = tenths / 10
        side.see(PEER, now)
        assert sent(side.tick(now), Prefill) == []
    side.receive(PEER, answer(), 30.0)
    now = 30.0
    while not sent(side.tick(now), Prefill):
        now += 0.1
        assert now < 35.0


def test_hellos_to_a_busy_peer_become_rare(side: DecodeSide) -> None:
    reserved(side)
    times = []
    for tenths in range(1, 200):
        side.see(PEER, tenths / 10)
        times += [tenths / 10 for _ in sent(side.tick(tenths / 10), Hello)]
    assert [round(later - earlier, 1) for earlier, later in pairwise(times)][-3:] == [4.0, 4.0, 4.0]


def test_a_peer_that_is_seen_is_not_lost(side: DecodeSide) -> None:
    reserved(side)
    for now in range(1, 99):
        side.see(PEER, float(now))
        assert not any(isinstance(action, Fail | ToRanks) for action in side.tick(float(now)))
    assert any(isinstance(action, Fail) for action in side.tick(100.0))


def test_accepted_transfer_is_asked_for_until_it_ends(side: DecodeSide) -> None:
    reserved(side)
    side.receive(PEER, Accepted(1, THEIRS, MINE), 1.0)
    times = []
    for tenths in range(11, 150):
        now = tenths / 10
        side.receive(PEER, answer(), now)
        if sent(side.tick(now), Query) == [Query(1, MINE, THEIRS)]:
            times.append(now)
            side.receive(PEER, Accepted(1, THEIRS, MINE), now)
    assert times == [5.0, 9.0, 13.0]
    refused = Refused(1, THEIRS, MINE, "prefill_full", "no room")
    assert [type(action) for action in side.receive(PEER, refused, 15.0)][:2] == [Fail, FreeReservation]


def test_hello_is_repeated_while_something_is_open(side: DecodeSide) -> None:
    reserved(side)
    assert sent(side.tick(1.9), Hello) == []
    assert sent(side.tick(2.0), Hello) == [Hello("decode", MINE, "layout", [b"rank 0", b"rank 1"], 0, 1)]


def test_hello_names_the_oldest_open_number(side: DecodeSide, ready: Ready) -> None:
    reserved(side)
    side.begin(request("b"), 0.0)
    side.receive(PEER, ready, 1.0)
    (hello,) = sent(side.tick(2.0), Hello)
    assert isinstance(hello, Hello)
    assert hello.oldest == 2


def test_cancel_before_anything_was_sent_frees_at_once(side: DecodeSide) -> None:
    side.begin(request(), 0.0)
    assert side.cancel("a", 0.1) == [FreeReservation("a"), UNWATCH]


def test_cancel_afterwards_quarantines(side: DecodeSide) -> None:
    reserved(side)
    assert side.cancel("a", 1.0) == [Send(PEER, Abort(1, MINE, THEIRS))]
    assert side.num_quarantined == 1
    assert side.cancel("a", 1.0) == []


def test_cancel_of_the_unknown_is_nothing(side: DecodeSide) -> None:
    assert side.cancel("nobody", 0.0) == []


@pytest.mark.parametrize(
    "last", [Aborted(1, THEIRS, MINE, True, "handoff_failed", "gone"), Refused(1, THEIRS, MINE, "prefill_full", "no")]
)
def test_quarantine_ends_when_prefill_says_so(side: DecodeSide, last: Aborted | Refused) -> None:
    quarantined(side)
    assert side.receive(PEER, last, 2.0) == [FreeReservation("a"), UNWATCH]


def test_quarantine_ends_with_a_late_ready(side: DecodeSide, ready: Ready) -> None:
    quarantined(side)
    assert side.receive(PEER, ready, 2.0) == [Send(PEER, Release(1, MINE, THEIRS)), FreeReservation("a"), UNWATCH]


def test_abort_is_repeated_and_no_late_accepted_stops_it(side: DecodeSide) -> None:
    quarantined(side)
    side.receive(PEER, Accepted(1, THEIRS, MINE), 1.5)
    assert sent(side.tick(2.0), Abort) == [Abort(1, MINE, THEIRS)]


def test_timeout_fails_quarantines_and_aborts(side: DecodeSide) -> None:
    reserved(side)
    side.receive(PEER, Accepted(1, THEIRS, MINE), 1.0)
    for now in range(2, 100, 2):
        side.tick(float(now))
        side.receive(PEER, answer(), float(now))
    failed, *rest = side.tick(100.0)[1:]
    assert isinstance(failed, Fail)
    assert (failed.code, failed.retryable) == ("handoff_failed", True)
    assert "within 100 s" in failed.message
    assert rest == [Send(PEER, Abort(1, MINE, THEIRS))]
    assert (side.num_open, side.num_quarantined) == (1, 1)


def test_aborted_by_prefill_fails_and_frees(side: DecodeSide) -> None:
    reserved(side)
    actions = side.receive(PEER, Aborted(1, THEIRS, MINE, True, "handoff_failed", "broke"), 1.0)
    assert actions == [Fail("a", "handoff_failed", "broke", True), FreeReservation("a"), UNWATCH]


def test_unsettled_abort_leads_to_a_revoke(side: DecodeSide) -> None:
    reserved(side)
    actions = side.receive(PEER, Aborted(1, THEIRS, MINE, False, "handoff_failed", "broke"), 1.0)
    assert actions == [Fail("a", "handoff_failed", "broke", True), ToRanks(Revoke())]
    assert side.num_quarantined == 1
    assert side.report(Revoked(0, b"new 0"), 1.1) == []
    assert side.report(Revoked(1, b"new 1"), 1.2) == [FreeReservation("a"), UNWATCH]
    assert side.epoch == MINE + 1
    hello = Hello("decode", MINE + 1, "layout", [b"new 0", b"new 1"], 0, 2)
    assert sent(side.begin(request("b"), 2.0)) == [hello]


def test_silence_before_anything_was_sent_frees(side: DecodeSide) -> None:
    side.begin(request(), 0.0)
    assert lost(side, "prefill_unreachable")[1:] == [FreeReservation("a"), UNWATCH]


def test_silence_afterwards_leads_to_a_revoke(side: DecodeSide) -> None:
    reserved(side)
    assert lost(side, "prefill_unreachable")[1:] == [ToRanks(Revoke())]
    side.report(Revoked(1, b"new 1"), 20.0)
    assert side.report(Revoked(0, b"new 0"), 20.0) == [FreeReservation("a"), UNWATCH]
    assert side.next_deadline() is None


def test_silence_in_quarantine_leads_to_a_revoke(side: DecodeSide) -> None:
    quarantined(side)
    actions: list[Action] = []
    while ToRanks(Revoke()) not in actions:
        deadline = side.next_deadline()
        assert deadline is not None
        actions = side.tick(deadline)
    assert not any(isinstance(action, Fail) for action in actions)


def test_restarted_peer_fails_what_was_sent_and_gets_what_was_not(side: DecodeSide) -> None:
    reserved(side)
    actions = side.receive(PEER, answer(epoch=THEIRS + 1), 1.0)
    assert [type(action) for action in actions] == [Fail, ToRanks]
    # What comes meanwhile waits for the new epoch of ours
    assert sent(side.begin(request("b"), 1.1)) == []
    side.report(Revoked(0, b"new 0"), 1.2)
    actions = side.report(Revoked(1, b"new 1"), 1.3)
    assert actions[0] == FreeReservation("a")
    assert [type(message) for message in sent(actions)] == [Hello]
    (prefill,) = sent(side.receive(PEER, answer(epoch=THEIRS + 1, peer_epoch=MINE + 1), 1.4))
    assert isinstance(prefill, Prefill)
    assert (prefill.number, prefill.epoch, prefill.peer_epoch) == (2, MINE + 1, THEIRS + 1)


def test_revoke_waits_for_healthy_transfers(side: DecodeSide, ready: Ready) -> None:
    reserved(side, "a", PEER)
    reserved(side, "b", OTHER)
    broke = Aborted(2, THEIRS, MINE, False, "handoff_failed", "broke")
    assert [type(action) for action in side.receive(OTHER, broke, 1.0)] == [Fail]
    assert sent(side.begin(request("c"), 1.0), Prefill) == []
    assert side.receive(PEER, ready, 2.0) == [
        Activate("a", FIRST, 416, 0.5),
        Send(PEER, Release(1, MINE, THEIRS)),
        ToRanks(Revoke()),
    ]


def test_revoke_does_not_wait_for_ever(side: DecodeSide) -> None:
    reserved(side, "a", PEER)
    reserved(side, "b", OTHER)
    side.receive(OTHER, Aborted(2, THEIRS, MINE, False, "handoff_failed", "broke"), 1.0)
    for now in range(2, 11):
        assert ToRanks(Revoke()) not in side.tick(float(now))
        side.receive(PEER, answer(), float(now))
    actions = side.tick(11.0)
    assert ToRanks(Revoke()) in actions
    assert [action.request_id for action in actions if isinstance(action, Fail)] == ["a"]
    side.report(Revoked(0, b"new 0"), 12.0)
    freed = side.report(Revoked(1, b"new 1"), 12.0)
    assert freed == [FreeReservation("a"), FreeReservation("b"), UNWATCH]


def test_late_settled_answer_makes_the_revoke_needless(side: DecodeSide) -> None:
    reserved(side, "a", PEER)
    reserved(side, "b", OTHER)
    side.receive(OTHER, Aborted(2, THEIRS, MINE, False, "handoff_failed", "broke"), 1.0)
    held = side.begin(request("c"), 1.0)
    assert sent(held, Prefill) == []
    actions = side.receive(OTHER, Aborted(2, THEIRS, MINE, True, "handoff_failed", "ended"), 1.5)
    assert actions[0] == FreeReservation("b")
    assert [type(message) for message in sent(actions)] == [Prefill]


def test_reports_that_nobody_waits_for_are_ignored(side: DecodeSide) -> None:
    assert side.report(Revoked(0, b"late"), 0.0) == []


def test_the_same_request_twice_is_our_bug(side: DecodeSide) -> None:
    side.begin(request(), 0.0)
    with pytest.raises(AssertionError, match="already in the handoff"):
        side.begin(request(), 0.0)


def test_peers_are_forgotten(side: DecodeSide, ready: Ready) -> None:
    reserved(side)
    side.receive(PEER, ready, 2.0)
    side.tick(2.0 + 7 * 3600)
    assert side._peers == {}
