"""Every order in which messages, steps and work can happen in a small group: nothing is lost, nobody steps alone."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from kimi_worker.engine.wave import Coordinator, LaneWave


@dataclass
class Lane:
    wave: LaneWave = field(default_factory=LaneWave)
    future_work: int = 0
    """Pieces of work that will still arrive."""
    work: int = 0
    """Pieces that wait for a step; a step does one."""
    steps: int = 0
    """Steps that have ended here."""
    contribution: int | None = None
    """To the step that this lane stands in."""
    asks: list[int] = field(default_factory=list)
    wakes: list[int] = field(default_factory=list)


class Group:
    """Lanes, a coordinator and the messages between them; `actions` are all that can happen next."""

    def __init__(self, works: list[int]) -> None:
        self.lanes = [Lane(future_work=work) for work in works]
        self.coordinator = Coordinator()
        self.entered: dict[int, list[tuple[int, int]]] = {}
        """Step number -> (wave, contribution) of each lane that has entered it."""

    def actions(self) -> list[Callable[["Group"], None]]:
        possible: list[Callable[[Group], None]] = []
        for index, lane in enumerate(self.lanes):
            if lane.future_work:
                possible.append(lambda group, i=index: group.arrive(i))
            if lane.asks:
                possible.append(lambda group, i=index: group.deliver_ask(i))
            if lane.wakes:
                possible.append(lambda group, i=index: group.deliver_wake(i))
            if lane.wave.is_running and lane.contribution is None:
                possible.append(lambda group, i=index: group.enter(i))
            if lane.contribution is not None and len(self.entered[lane.steps]) == len(self.lanes):
                possible.append(lambda group, i=index: group.leave(i))
        return possible

    def arrive(self, index: int) -> None:
        lane = self.lanes[index]
        lane.future_work -= 1
        lane.work += 1
        self.ask(lane)

    def ask(self, lane: Lane) -> None:
        wave = lane.wave.ask()
        if wave is not None:
            lane.asks.append(wave)

    def deliver_ask(self, index: int) -> None:
        wave = self.lanes[index].asks.pop(0)
        if self.coordinator.ask(wave):
            for lane in self.lanes:
                lane.wakes.append(wave)

    def deliver_wake(self, index: int) -> None:
        self.lanes[index].wave.wake(self.lanes[index].wakes.pop(0))

    def enter(self, index: int) -> None:
        lane = self.lanes[index]
        lane.contribution = min(lane.work, 1)
        self.entered.setdefault(lane.steps, []).append((lane.wave.ended + 1, lane.contribution))

    def leave(self, index: int) -> None:
        lane = self.lanes[index]
        entered = self.entered[lane.steps]
        assert len({wave for wave, _ in entered}) == 1, "lanes of different waves met in one step"
        lane.work -= lane.contribution or 0
        lane.contribution = None
        lane.steps += 1
        if sum(contribution for _, contribution in entered) == 0:
            lane.wave.end()
            if lane.work:
                self.ask(lane)

    def assert_finished(self) -> None:
        """Nothing can happen any more: then nothing may be left to do."""
        assert all(lane.work == 0 for lane in self.lanes), "work was left: a wake-up was lost"
        assert all(lane.contribution is None for lane in self.lanes), "a lane hangs in a step"
        assert not any(lane.wave.is_running for lane in self.lanes), "a lane never goes idle"
        assert len({lane.steps for lane in self.lanes}) == 1

    def key(self) -> str:
        """Equal for states with the same future."""
        first = min(lane.steps for lane in self.lanes)
        lanes = [
            (lane.wave, lane.future_work, lane.work, lane.steps - first, lane.contribution, lane.asks, lane.wakes)
            for lane in self.lanes
        ]
        return repr((lanes, self.coordinator, {k - first: v for k, v in self.entered.items() if k >= first}))


@pytest.mark.parametrize("works", [[1], [3], [1, 1], [2, 1], [2, 2], [0, 3], [1, 1, 0]])
def test_every_order_of_events_ends_with_all_work_done_and_all_lanes_idle(works: list[int]) -> None:
    seen: set[str] = set()
    todo = [Group(works)]
    num_ends = 0
    while todo:
        group = todo.pop()
        actions = group.actions()
        if not actions:
            group.assert_finished()
            num_ends += 1
        for action in actions:
            following = copy.deepcopy(group)
            action(following)
            if (key := following.key()) not in seen:
                seen.add(key)
                todo.append(following)
    assert num_ends > 0


@pytest.mark.parametrize("seed", range(50))
def test_random_orders_in_a_larger_group(seed: int) -> None:
    rng = random.Random(seed)
    group = Group([rng.randint(0, 6) for _ in range(8)])
    while actions := group.actions():
        rng.choice(actions)(group)
    group.assert_finished()


def test_lost_wake_is_an_error_not_a_hang() -> None:
    lane = LaneWave()
    with pytest.raises(AssertionError, match="a message was lost"):
        lane.wake(2)


def test_idle_group_asks_once() -> None:
    lane = LaneWave()
    assert lane.ask() == 1
    assert lane.ask() is None
    lane.wake(1)
    assert lane.ask() is None
    lane.end()
    assert lane.ask() == 2
