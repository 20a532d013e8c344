"""The choice of lanes, without any I/O."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kimi_worker.router.pick import LaneKey, LaneView, explain, pick
from kimi_worker.router.pool import LaneReport, Pod, PodReport
from kimi_worker.settings import Role

LAYOUTS = st.sampled_from(["l1", "l2"])


def view(pod: str, lane: int = 0, **changes: object) -> LaneView:
    fields: dict[str, object] = {
        "layout_hash": "l1",
        "handoff": f"tcp://{pod}:29600",
        "can_prefill": False,
        "room": 8,
        "free_pages": 64,
        "queued_tokens": 0,
        **changes,
    }
    return LaneView(key=LaneKey(pod, lane), **fields)  # type: ignore[arg-type]


@st.composite
def lanes(draw: st.DrawFn, role: str) -> list[LaneView]:
    return [
        view(
            f"{role}{index}",
            layout_hash=draw(LAYOUTS),
            can_prefill=role == "d" and draw(st.booleans()),
            room=draw(st.integers(-3, 8)),
            free_pages=draw(st.integers(0, 3)),
            queued_tokens=draw(st.integers(0, 5)),
        )
        for index in range(draw(st.integers(0, 5)))
    ]


@given(decodes=lanes("d"), prefills=lanes("p"), data=st.data())
def test_the_pick_is_the_best_allowed(decodes: list[LaneView], prefills: list[LaneView], data: st.DataObject) -> None:
    keys = [lane.key for lane in [*decodes, *prefills]]
    avoid = set(data.draw(st.lists(st.sampled_from(keys), max_size=4))) if keys else set()
    pair = pick(decodes, prefills, avoid)
    allowed = [
        (decode, prefill)
        for decode in decodes
        for prefill in ([None] if decode.can_prefill else prefills)
        if decode.key not in avoid
        and (prefill is None or (prefill.key not in avoid and prefill.layout_hash == decode.layout_hash))
    ]
    if pair is None:
        assert not allowed
        return
    assert (pair.decode, pair.prefill) in allowed
    assert pair.decode.room == max(decode.room for decode, _ in allowed)
    if pair.prefill:
        partners = [prefill for decode, prefill in allowed if decode == pair.decode and prefill]
        assert pair.prefill.queued_tokens == min(prefill.queued_tokens for prefill in partners)


def test_equal_lanes_of_an_idle_group_come_first() -> None:
    """Lanes of one group step together: a prompt beside others waits for the slowest of them."""
    decodes = [view("d0", 0, room=7, group="0"), view("d0", 1, group="0"), view("d1", 0, group="1")]
    prefills = [
        view("p0", 0, queued_tokens=900, group="0"), view("p0", 1, group="0"),
        view("p1", 0, queued_tokens=50, group="1"), view("p1", 1, group="1"),
    ]  # fmt: skip
    pair = pick(decodes, prefills)
    assert pair is not None
    assert pair.prefill is not None
    assert (pair.decode.key, pair.prefill.key) == (LaneKey("d1", 0), LaneKey("p1", 1))
    # a lane's own load comes before its group's
    own = pick(decodes, [*prefills[:1], view("p0", 1, queued_tokens=10, group="0"), *prefills[2:3]])
    assert own is not None
    assert own.prefill is not None
    assert own.prefill.key == LaneKey("p0", 1)


def test_a_view_names_its_group_of_its_generation() -> None:
    """Groups of one number stand beside each other while a deployment rolls."""
    pods = [Pod("p0:8000", Role.DECODE), Pod("p1:8000", Role.DECODE)]
    for generation, pod in enumerate(pods):
        pod.take(msgspec.structs.replace(report(), generation=generation), 1.0)
    assert len({lane.group for pod in pods for lane in pod.lanes()}) == 2


@pytest.mark.parametrize(
    ("decodes", "prefills", "said"),
    [
        ([], [view("p")], "no decode lane"),
        ([view("d")], [], "no prefill lane"),
        ([view("d")], [view("p", layout_hash="l2")], "decode lanes have layout l1 and prefill lanes l2"),
    ],
)
def test_what_is_missing_is_said(decodes: list[LaneView], prefills: list[LaneView], said: str) -> None:
    assert pick(decodes, prefills) is None
    assert said in explain(decodes, prefills)


def report(**changes: int) -> PodReport:
    loads = {"running": 0, "waiting": 0, "reserved": 0, "queued_tokens": 0, **changes}
    lane = LaneReport(lane=0, handoff="tcp://p:1", free_pages=64, max_num_seqs=8, **loads)
    return PodReport("k3", "decode", "0", 1, "l1", ready=True, draining=False, lanes=[lane])


def test_requests_since_the_last_report_count() -> None:
    """Between two reports the router spreads requests by what it has sent itself."""
    pod = Pod("d:8000", Role.DECODE)
    pod.take(report(running=2), asked_s=10.0)
    first, second = (pod.send(0, 100, now_s=11.0 + at) for at in range(2))
    assert (pod.lanes()[0].room, pod.lanes()[0].queued_tokens) == (4, 200)
    first.end()
    first.end()
    assert (pod.lanes()[0].room, pod.lanes()[0].queued_tokens) == (5, 100)
    # the next report was asked for before the second request went out: it cannot show it
    pod.take(report(running=2), asked_s=11.5)
    assert (pod.lanes()[0].room, pod.lanes()[0].queued_tokens) == (5, 100)
    # this one shows it; its end is news again
    pod.take(report(running=3, queued_tokens=100), asked_s=13.0)
    assert (pod.lanes()[0].room, pod.lanes()[0].queued_tokens) == (5, 100)
    second.end()
    assert pod.lanes()[0].room == 6
    pod.take(report(), asked_s=14.0)
    assert pod.lanes()[0].room == 8
    assert not pod.trips


@given(
    events=st.lists(st.tuples(st.sampled_from(["send", "end", "report"]), st.integers(0, 7)), max_size=40),
    delay=st.integers(0, 3),
)
def test_the_books_always_agree_with_the_truth(events: list[tuple[str, int]], delay: int) -> None:
    """With reports that are exact when they are asked for, the router knows the load, however late they come."""
    pod = Pod("d:8000", Role.DECODE)
    pod.take(report(), asked_s=0.0)
    trips, pending = [], []
    for now, (event, which) in enumerate(events, 1):
        if event == "send":
            trips.append(pod.send(0, 1, now_s=float(now)))
        elif event == "end" and trips and not pending:
            trips.pop(which % len(trips)).end()
        elif event == "report":
            pending.append((now + delay, float(now), len(trips)))
        while pending and pending[0][0] <= now:
            _, asked_s, running = pending.pop(0)
            pod.take(report(running=running), asked_s)
        assert pod.lanes()[0].room == 8 - len(trips)


def test_a_lost_or_draining_pod_has_no_lanes() -> None:
    pod = Pod("d:8000", Role.DECODE)
    assert pod.lanes() == []
    pod.take(report(), asked_s=1.0)
    assert len(pod.lanes()) == 1
    pod.lose("refused")
    assert pod.lanes() == []
