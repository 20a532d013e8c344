"""Every state and transition of prefill's table, one event at a time."""

from collections.abc import Sequence

import pytest
from kimi_worker.handoff.actions import (
    Action,
    CancelCompute,
    Enqueue,
    FreeSource,
    LaneIdentity,
    Send,
    Timing,
    ToRanks,
)
from kimi_worker.handoff.plan import digest_of_reservation
from kimi_worker.handoff.prefill_side import PrefillSide
from kimi_worker.protocol.engine import SampledToken, Sampling
from kimi_worker.protocol.handoff import (
    Abort,
    Aborted,
    Accepted,
    Connect,
    Disconnect,
    Disconnected,
    Fence,
    Fenced,
    Hello,
    LaneMessage,
    Prefill,
    Query,
    Ready,
    Refused,
    Release,
    TransferKey,
    Watch,
    Write,
    Wrote,
)
from msgspec.structs import replace

PEER = "tcp://decode:1"
MINE, THEIRS = 900, 500
KEY = TransferKey(PEER, THEIRS, 1)
GREEDY = Sampling(max_tokens=4)
HELLO = Hello("decode", THEIRS, "layout", [b"rank 0", b"rank 1"], 0, 1)
ANSWER = Send(PEER, Hello("prefill", MINE, "layout", [], THEIRS))
PREFILL = Prefill(1, THEIRS, MINE, [1, 2, 3], GREEDY, [3, 4, 8], 1, deadline_s=50.0)
ACCEPTED = Send(PEER, Accepted(1, MINE, THEIRS))
WRITE = Write(KEY, [0, 5, 6], [3, 4, 8], 2, 1)
FIRST = SampledToken(77)
NUM_BYTES = 2 * (3 * 64 + 16)
WATCH, UNWATCH = ToRanks(Watch(True)), ToRanks(Watch(False))
DISCONNECT = ToRanks(Disconnect(PEER, THEIRS))


@pytest.fixture
def side(prefill_identity: LaneIdentity, timing: Timing) -> PrefillSide:
    side = PrefillSide(prefill_identity, timing)
    side.receive(PEER, HELLO, 0.0)
    return side


@pytest.fixture
def fenced_side(prefill_identity: LaneIdentity, timing: Timing) -> PrefillSide:
    side = PrefillSide(prefill_identity, timing, fence=True)
    side.receive(PEER, HELLO, 0.0)
    return side


@pytest.fixture
def digest(prefill_identity: LaneIdentity) -> str:
    return digest_of_reservation(prefill_identity.layout, [3, 4, 8], 1)


def queue(side: PrefillSide) -> None:
    side.receive(PEER, PREFILL, 1.0)


def compute(side: PrefillSide, now: float = 2.0) -> list[Action]:
    queue(side)
    return side.computed(KEY, [0, 5, 6], 2, FIRST, now)


def wrote(side: PrefillSide, digest: str, now: float = 3.0, error: str = "", settled: bool = True) -> list[Action]:
    """Rank 0 writes well; rank 1 as told."""
    assert side.report(Wrote(0, KEY, "", True, digest, 208), now) == []
    return side.report(Wrote(1, KEY, error, settled, digest, 208), now)


def messages(actions: Sequence[Action]) -> list[LaneMessage]:
    return [action.message for action in actions if isinstance(action, Send)]


def aborted(actions: Sequence[Action]) -> Aborted:
    (message,) = messages(actions)
    assert isinstance(message, Aborted)
    return message


def test_first_hello_connects_the_ranks(prefill_identity: LaneIdentity, timing: Timing) -> None:
    side = PrefillSide(prefill_identity, timing)
    connect = ToRanks(Connect(PEER, THEIRS, [b"rank 0", b"rank 1"]))
    assert side.receive(PEER, HELLO, 0.0) == [connect, ANSWER]
    assert side.receive(PEER, HELLO, 1.0) == [ANSWER]
    assert side.next_deadline() is None


def test_other_layout_gets_an_answer_and_no_connection(prefill_identity: LaneIdentity, timing: Timing) -> None:
    side = PrefillSide(prefill_identity, timing)
    assert side.receive(PEER, replace(HELLO, layout_hash="other"), 0.0) == [ANSWER]
    assert not aborted(side.receive(PEER, PREFILL, 1.0)).settled
    assert side.num_open == 0


def test_wrong_number_of_ranks_gets_nothing(prefill_identity: LaneIdentity, timing: Timing) -> None:
    assert PrefillSide(prefill_identity, timing).receive(PEER, replace(HELLO, ranks=[b"one"]), 0.0) == []


def test_request_is_accepted_and_queued(side: PrefillSide) -> None:
    assert side.receive(PEER, PREFILL, 1.0) == [ACCEPTED, Enqueue(KEY, [1, 2, 3], GREEDY), WATCH]
    assert side.num_open == 1


def test_repeated_request_is_accepted_and_not_queued_again(side: PrefillSide) -> None:
    queue(side)
    assert side.receive(PEER, PREFILL, 1.5) == [ACCEPTED]
    side.computed(KEY, [0, 5, 6], 2, FIRST, 2.0)
    assert side.receive(PEER, PREFILL, 2.5) == [ACCEPTED]


def test_request_to_another_epoch_tells_ours(side: PrefillSide) -> None:
    for message in (replace(PREFILL, peer_epoch=MINE - 1), Abort(1, THEIRS, MINE - 1), Release(1, THEIRS, MINE - 1)):
        assert side.receive(PEER, message, 1.0) == [ANSWER]
    assert side.num_open == 0


def test_strangers_get_no_promise(side: PrefillSide) -> None:
    assert not aborted(side.receive("tcp://decode:9", PREFILL, 1.0)).settled
    assert not aborted(side.receive("tcp://decode:9", Abort(1, THEIRS, MINE), 1.0)).settled
    assert side.receive("tcp://decode:9", Release(1, THEIRS, MINE), 1.0) == []


def test_request_that_names_a_page_twice_is_refused(side: PrefillSide) -> None:
    (message,) = messages(side.receive(PEER, replace(PREFILL, page_ids=[3, 3, 4]), 1.0))
    assert isinstance(message, Refused)
    assert "twice" in message.message


def test_writes_go_out_when_computed(side: PrefillSide) -> None:
    assert compute(side) == [ToRanks(WRITE)]


def test_ready_waits_for_every_rank(side: PrefillSide, digest: str) -> None:
    compute(side, 2.0)
    assert wrote(side, digest, 3.0) == [Send(PEER, Ready(1, MINE, THEIRS, digest, FIRST, NUM_BYTES, 1.0))]


def test_ready_waits_for_the_fence_of_every_rank(fenced_side: PrefillSide, digest: str) -> None:
    compute(fenced_side, 2.0)
    assert wrote(fenced_side, digest, 3.0) == [ToRanks(Fence(WRITE))]
    assert fenced_side.report(Fenced(1, KEY, ""), 3.5) == []
    assert messages(fenced_side.report(Fenced(0, KEY, ""), 4.0)) == [
        Ready(1, MINE, THEIRS, digest, FIRST, NUM_BYTES, 2.0)
    ]


def test_failed_fence_is_not_settled(fenced_side: PrefillSide, digest: str) -> None:
    compute(fenced_side)
    wrote(fenced_side, digest)
    fenced_side.report(Fenced(1, KEY, "lost"), 3.5)
    actions = fenced_side.report(Fenced(0, KEY, ""), 4.0)
    assert actions[0] == FreeSource(KEY)
    assert not aborted(actions).settled
    assert "rank 1: fence: lost" in aborted(actions).message


def test_ready_is_repeated_with_pauses_until_release(side: PrefillSide, digest: str) -> None:
    compute(side)
    wrote(side, digest, 3.0)
    times = []
    for tenths in range(31, 150):
        side.receive(PEER, HELLO, tenths / 10)
        times += [tenths / 10 for _ in messages(side.tick(tenths / 10))]
    assert times == [4.0, 6.0, 10.0, 14.0]
    assert side.receive(PEER, Release(1, THEIRS, MINE), 15.0) == [FreeSource(KEY), UNWATCH]
    assert side.next_deadline() is None


def test_repeated_release_and_requests_after_it_are_nothing(side: PrefillSide, digest: str) -> None:
    compute(side)
    wrote(side, digest)
    side.receive(PEER, Release(1, THEIRS, MINE), 4.0)
    assert side.receive(PEER, Release(1, THEIRS, MINE), 4.1) == []
    assert side.receive(PEER, PREFILL, 4.2) == []
    assert aborted(side.receive(PEER, Abort(1, THEIRS, MINE), 4.3)).settled


def test_query_and_abort_after_release_free_nothing_again(side: PrefillSide, digest: str) -> None:
    query, abort = Query(1, THEIRS, MINE), Abort(1, THEIRS, MINE)
    compute(side)
    wrote(side, digest)
    assert FreeSource(KEY) in side.receive(PEER, Release(1, THEIRS, MINE), 4.0)
    # Overtaken by the Release: decode has activated and waits for nothing
    assert side.receive(PEER, query, 4.1) == []
    (answer,) = side.receive(PEER, abort, 4.2)
    assert aborted([answer]).settled
    # From now on that is the answer, and nothing is freed, cancelled or written again
    assert [side.receive(PEER, message, 4.3) for message in (query, abort, PREFILL)] == [[answer]] * 3
    assert side.computed(KEY, [0, 5, 6], 2, FIRST, 4.4) == [FreeSource(KEY)], "a late result is given back"
    assert (side.num_open, side.next_deadline()) == (0, None)


def test_query_after_an_abort_repeats_its_answer(side: PrefillSide, digest: str) -> None:
    query, abort = Query(1, THEIRS, MINE), Abort(1, THEIRS, MINE)
    compute(side)
    assert side.receive(PEER, abort, 2.5) == []
    assert side.receive(PEER, query, 2.6) == [ACCEPTED], "the writes are still under way"
    answer = next(action for action in wrote(side, digest) if isinstance(action, Send))
    assert aborted([answer]).settled
    assert [side.receive(PEER, message, 4.0) for message in (query, abort, PREFILL)] == [[answer]] * 3
    assert (side.num_open, side.next_deadline()) == (0, None)


def test_query_after_an_unsettled_end_stays_unsettled(side: PrefillSide, digest: str) -> None:
    compute(side)
    answer = next(action for action in wrote(side, digest, error="broken", settled=False) if isinstance(action, Send))
    assert not aborted([answer]).settled
    assert side.receive(PEER, Query(1, THEIRS, MINE), 4.0) == [answer]
    assert side.receive(PEER, Abort(1, THEIRS, MINE), 4.1) == [answer]


def test_release_of_the_unknown_or_unfinished_frees_nothing(side: PrefillSide) -> None:
    assert side.receive(PEER, Release(7, THEIRS, MINE), 1.0) == []
    queue(side)
    assert side.receive(PEER, Release(1, THEIRS, MINE), 1.0) == []
    assert side.num_open == 1


def test_engine_refusal_is_passed_on_and_repeated(side: PrefillSide) -> None:
    queue(side)
    refused = Send(PEER, Refused(1, MINE, THEIRS, "prefill_full", "no room"))
    assert side.fail(KEY, "prefill_full", "no room", 1.5) == [refused, UNWATCH]
    assert side.receive(PEER, PREFILL, 2.0) == [refused]
    assert side.receive(PEER, Abort(1, THEIRS, MINE), 2.0) == [refused]
    assert side.fail(KEY, "prefill_full", "again", 2.5) == []


def test_abort_while_queued_cancels(side: PrefillSide) -> None:
    queue(side)
    actions = side.receive(PEER, Abort(1, THEIRS, MINE), 1.5)
    assert actions[0] == CancelCompute(KEY)
    assert aborted(actions).settled
    assert actions[-1] == UNWATCH


def test_abort_while_writing_is_answered_when_the_writes_have_ended(side: PrefillSide, digest: str) -> None:
    compute(side)
    assert side.receive(PEER, Abort(1, THEIRS, MINE), 2.5) == []
    actions = wrote(side, digest)
    assert actions[0] == FreeSource(KEY)
    assert aborted(actions).settled


def test_abort_while_writing_waits_for_the_fence_too(fenced_side: PrefillSide, digest: str) -> None:
    compute(fenced_side)
    fenced_side.receive(PEER, Abort(1, THEIRS, MINE), 2.5)
    assert wrote(fenced_side, digest) == [ToRanks(Fence(WRITE))]
    fenced_side.report(Fenced(0, KEY, ""), 3.5)
    assert aborted(fenced_side.report(Fenced(1, KEY, ""), 3.6)).settled


def test_abort_after_ready_frees(side: PrefillSide, digest: str) -> None:
    compute(side)
    wrote(side, digest)
    actions = side.receive(PEER, Abort(1, THEIRS, MINE), 4.0)
    assert actions[0] == FreeSource(KEY)
    assert aborted(actions).settled


def test_abort_that_overtakes_its_request_ends_it(side: PrefillSide) -> None:
    assert aborted(side.receive(PEER, Abort(1, THEIRS, MINE), 1.0)).settled
    assert aborted(side.receive(PEER, PREFILL, 1.5)).settled
    assert side.num_open == 0


def test_computed_after_a_cancel_is_given_back(side: PrefillSide) -> None:
    queue(side)
    side.receive(PEER, Abort(1, THEIRS, MINE), 1.5)
    assert side.computed(KEY, [0, 5, 6], 2, FIRST, 2.0) == [FreeSource(KEY)]
    assert side.computed(TransferKey("nobody", 1, 1), [0], 2, FIRST, 2.0) == [FreeSource(TransferKey("nobody", 1, 1))]


def test_other_number_of_pages_than_reserved_is_refused(side: PrefillSide) -> None:
    queue(side)
    actions = side.computed(KEY, [0, 5], 2, FIRST, 2.0)
    assert actions[0] == FreeSource(KEY)
    (message,) = messages(actions)
    assert isinstance(message, Refused)
    assert message.message == "the prompt fills 2 pages, decode reserved 3"


def test_broken_write_ends_the_transfer_and_the_connection(side: PrefillSide, digest: str) -> None:
    compute(side)
    actions = wrote(side, digest, error="the link went down", settled=False)
    assert actions[0] == FreeSource(KEY)
    assert not aborted(actions).settled
    assert "rank 1: the link went down" in aborted(actions).message
    assert DISCONNECT in actions
    # Until the ranks have disconnected no Hello is answered; then it connects anew
    assert side.receive(PEER, HELLO, 3.5) == []
    side.report(Disconnected(0, PEER, THEIRS), 3.6)
    assert side.report(Disconnected(1, PEER, THEIRS), 3.7) == [UNWATCH]
    assert side.receive(PEER, HELLO, 4.0)[0] == ToRanks(Connect(PEER, THEIRS, [b"rank 0", b"rank 1"]))


def test_write_that_was_never_posted_is_settled(side: PrefillSide, digest: str) -> None:
    compute(side)
    assert aborted(wrote(side, digest, error="not connected", settled=True)).settled


def test_error_with_a_local_completion_elsewhere_is_not_settled(fenced_side: PrefillSide, digest: str) -> None:
    compute(fenced_side)
    assert not aborted(wrote(fenced_side, digest, error="not connected", settled=True)).settled


def test_write_to_other_places_than_asked_is_no_ready(side: PrefillSide, digest: str) -> None:
    compute(side)
    side.report(Wrote(0, KEY, "", True, "elsewhere", 208), 3.0)
    actions = side.report(Wrote(1, KEY, "", True, digest, 208), 3.0)
    assert "other places" in aborted(actions).message


def test_late_and_repeated_reports_are_nothing(side: PrefillSide, digest: str) -> None:
    assert side.report(Wrote(0, KEY, "", True, digest, 208), 1.0) == []
    assert side.report(Fenced(0, KEY, ""), 1.0) == []
    assert side.report(Disconnected(0, "nobody", 1), 1.0) == []
    compute(side)
    wrote(side, digest)
    assert side.report(Wrote(1, KEY, "", True, digest, 208), 4.0) == []


def test_deadline_while_queued_cancels_and_refuses(side: PrefillSide) -> None:
    queue(side)
    for now in range(5, 51, 5):
        side.receive(PEER, HELLO, float(now))
    actions = side.tick(51.0)
    assert actions[0] == CancelCompute(KEY)
    (message,) = messages(actions)
    assert isinstance(message, Refused)
    assert "deadline" in message.message


def test_silent_peer_is_disconnected_and_its_requests_cancelled(side: PrefillSide) -> None:
    queue(side)
    assert side.next_deadline() == 11.0
    actions = side.tick(11.0)
    assert actions[0] == CancelCompute(KEY)
    assert DISCONNECT in actions
    assert side.num_open == 0


def test_silent_peer_that_is_seen_is_kept(side: PrefillSide) -> None:
    queue(side)
    for now in range(2, 51):
        side.see(PEER, float(now))
        assert side.tick(float(now)) == []
    assert side.num_open == 1


def test_only_the_current_epoch_of_a_peer_is_seen(side: PrefillSide) -> None:
    """The successor of a process at the same endpoint does not keep its predecessor's transfers."""
    queue(side)
    side.see("tcp://decode:9", 10.0)
    actions = side.receive(PEER, replace(HELLO, epoch=THEIRS * 2**30), 10.0)
    assert CancelCompute(KEY) in actions


def test_query_is_answered_with_where_the_transfer_is(side: PrefillSide, digest: str) -> None:
    query = Query(1, THEIRS, MINE)
    queue(side)
    assert side.receive(PEER, query, 1.5) == [ACCEPTED]
    compute(side, 2.0)
    assert side.receive(PEER, query, 2.5) == [ACCEPTED]
    (ready,) = messages(wrote(side, digest))
    assert messages(side.receive(PEER, query, 4.0)) == [ready]
    # Never heard of, so nothing was or will be written
    assert aborted(side.receive(PEER, Query(2, THEIRS, MINE), 4.0)).settled
    assert aborted(side.receive(PEER, replace(PREFILL, number=2), 4.1)).settled


def test_silent_peer_after_ready_frees_the_source(side: PrefillSide, digest: str) -> None:
    compute(side)
    wrote(side, digest)
    assert FreeSource(KEY) in side.tick(20.0)


def test_silent_peer_while_writing_waits_for_the_ranks(side: PrefillSide, digest: str) -> None:
    compute(side)
    assert side.tick(20.0) == [DISCONNECT]
    assert side.num_open == 1
    actions = wrote(side, digest, 20.5, "disconnected", False)
    assert actions[0] == FreeSource(KEY)
    side.report(Disconnected(0, PEER, THEIRS), 21.0)
    assert side.report(Disconnected(1, PEER, THEIRS), 21.0) == [UNWATCH]
    # Still remembered, so that a late Abort is answered truthfully
    assert not aborted(side.receive(PEER, Abort(1, THEIRS, MINE), 22.0)).settled
    assert aborted(side.receive(PEER, Abort(2, THEIRS, MINE), 22.0)).settled


def test_stalled_write_disconnects(side: PrefillSide) -> None:
    compute(side, 2.0)
    for now in range(5, 61, 5):
        side.receive(PEER, HELLO, float(now))
        assert side.tick(float(now)) == []
    assert side.tick(62.0) == [DISCONNECT]


def test_request_on_a_closing_link_is_refused(side: PrefillSide) -> None:
    compute(side)
    side.tick(20.0)
    (message,) = messages(side.receive(PEER, replace(PREFILL, number=2), 20.1))
    assert isinstance(message, Refused)


def test_new_epoch_ends_the_old_ones_transfers(side: PrefillSide) -> None:
    queue(side)
    actions = side.receive(PEER, replace(HELLO, epoch=THEIRS + 1), 2.0)
    assert actions[0] == CancelCompute(KEY)
    assert actions.index(DISCONNECT) < actions.index(ToRanks(Connect(PEER, THEIRS + 1, [b"rank 0", b"rank 1"])))
    assert side.num_open == 0


def test_hello_of_an_older_epoch_of_the_same_process_is_ignored(side: PrefillSide) -> None:
    newer = replace(HELLO, epoch=THEIRS + 1)
    side.receive(PEER, newer, 1.0)
    side.receive(PEER, replace(PREFILL, epoch=THEIRS + 1), 1.0)
    assert side.receive(PEER, HELLO, 1.1) == []
    assert side.num_open == 1


def test_hello_closes_older_numbers(side: PrefillSide, digest: str) -> None:
    compute(side)
    wrote(side, digest)
    actions = side.receive(PEER, replace(HELLO, oldest=2), 4.0)
    assert FreeSource(KEY) in actions
    assert side.receive(PEER, PREFILL, 4.5) == []
    assert side.receive(PEER, Abort(1, THEIRS, MINE), 4.5) == []
    # A Hello that comes late does not open them again
    side.receive(PEER, HELLO, 5.0)
    assert side.receive(PEER, PREFILL, 5.5) == []


def test_hello_that_closes_a_number_being_written_waits_for_the_writes(side: PrefillSide, digest: str) -> None:
    compute(side)
    assert side.receive(PEER, replace(HELLO, oldest=2), 2.5) == [ANSWER]
    assert wrote(side, digest)[0] == FreeSource(KEY)


def test_finished_transfers_and_lost_peers_are_forgotten(side: PrefillSide, digest: str) -> None:
    compute(side)
    wrote(side, digest)
    side.receive(PEER, Release(1, THEIRS, MINE), 4.0)
    side.receive(PEER, replace(HELLO, oldest=2), 5.0)
    assert side._links[PEER, THEIRS].transfers == {}
    assert DISCONNECT in side.tick(5.0 + 6 * 3600)
    for rank in (0, 1):
        side.report(Disconnected(rank, PEER, THEIRS), 5.0 + 6 * 3600)
    side.tick(6.0 + 6 * 3600)
    assert side._links == {}
    assert side._current == {}


def test_fault_tells_decode_before_the_writes(prefill_identity: LaneIdentity, timing: Timing, digest: str) -> None:
    side = PrefillSide(prefill_identity, timing, notify_before_writes_land=True)
    side.receive(PEER, HELLO, 0.0)
    assert [type(message) for message in messages(compute(side, 2.0))] == [Ready]
    assert side.receive(PEER, Release(1, THEIRS, MINE), 2.01) == []
    assert side.next_deadline() == 2.2
    assert side.tick(2.2) == [ToRanks(WRITE)]
    assert wrote(side, digest)[0] == FreeSource(KEY)
    assert side.num_open == 0
