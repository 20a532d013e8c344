"""The handoff's story, and how a lane leader drives it.

Decode reserves pages and a slot, then asks prefill; prefill computes and its ranks write one-sided into decode's
memory; decode uses the bytes only after Ready. Both sides are tables without I/O: events go in, actions come out, the
clock is an argument (monotonic seconds), so the same code runs in a lane leader and under a simulated network.

    decode                                  prefill
    begin(request)      -- Hello -->                         until the peer's epoch and layout are known
                        <-- Hello --        ToRanks(Connect)
    RESERVED            -- Prefill -->      QUEUED           Enqueue
                        <-- Accepted --                      Query asks again, in case the end was lost
                                            WRITING          computed() -> ToRanks(Write); every rank reports Wrote
                                            (WRITING)        ToRanks(Fence), where completion is only local
                        <-- Ready --        FENCED           repeated until Release
    ACTIVE   Activate   -- Release -->      RELEASED         FreeSource

A reservation that ends before Ready (cancel, time-out, lost peer) becomes QUARANTINED: decode sends Abort and holds the
memory until prefill answers that no write is in flight (Aborted, Refused, or a late Ready). Where no such answer
can come - the peer is silent, restarted, or its writes broke off - decode cuts everybody off: ToRanks(Revoke) makes all
descriptors given out worthless, decode takes a new epoch and introduces itself anew. It does so as soon as no healthy
transfer is open, or after `revoke_wait_s` at the latest; transfers that a Revoke interrupts fail retryably.

A lane reads messages between steps only, and a step may take minutes. So silence alone says nothing: `see(peer, now)`
tells a side that the peer's process lives (its I/O thread answers pings), and silence counts from there. A process that
is killed, stopped or cut off is not seen.

The loop of a lane leader (decode lanes own a DecodeSide, prefill lanes a PrefillSide):

    actions = side.receive(peer, message, now)     for each control message; peer is the sender's endpoint
    actions = side.report(report, now)             for each RankReport of any rank of the lane
    side.see(peer, now)                            for each peer whose process answers, before a tick
    actions = side.tick(now)                       at least when now >= side.next_deadline()
    decode:   begin(request, now), cancel(request_id, now), verify(endpoints, now) for the test writes of fabric.py
    prefill:  computed(key, page_ids, slot, first, now), fail(key, code, message, now)

and performs the actions in order: Send to the peer's control socket, ToRanks to every rank of the lane (each feeds its
`rank.RankPort` and returns the reports), the others to the scheduler. `next_deadline()` is None when nothing is open:
the leader may then block without a time-out. The transport makes progress only inside `RankPort.poll()`, on decode's
side too: every rank calls it about each millisecond while `RankPort.is_watching` (set by ToRanks(Watch)), also between
steps and while it waits for its leader; an idle rank need not.

Ownership: from `begin` until Activate or FreeReservation a reservation is the session's; each begun request gets
exactly one of the two. From `computed` until FreeSource the source is the session's; each `computed` gets exactly one.
"""

from kimi_worker.handoff.actions import (
    Action,
    Activate,
    CancelCompute,
    Enqueue,
    Fail,
    FreeReservation,
    FreeSource,
    HandoffRequest,
    LaneIdentity,
    Send,
    Timing,
    ToRanks,
)
from kimi_worker.handoff.decode_side import DecodeSide
from kimi_worker.handoff.prefill_side import PrefillSide

__all__ = [
    "Action",
    "Activate",
    "CancelCompute",
    "DecodeSide",
    "Enqueue",
    "Fail",
    "FreeReservation",
    "FreeSource",
    "HandoffRequest",
    "LaneIdentity",
    "PrefillSide",
    "Send",
    "Timing",
    "ToRanks",
]
