"""Pages and slots: every one free or owned once, whatever happens."""

import random

import pytest
from kimi_worker.scheduler.memory import LaneMemory, Reservation
from kimi_worker.scheduler.pages import PageAllocator, PageId
from kimi_worker.scheduler.slots import Slot, SlotAllocator


@pytest.mark.parametrize("seed", range(20))
def test_random_walk_never_leaks_a_page(seed: int) -> None:
    rng = random.Random(seed)
    allocator = PageAllocator(num_pages=32)
    held: list[list[PageId]] = []
    for _ in range(500):
        if held and rng.random() < 0.5:
            allocator.release(held.pop(rng.randrange(len(held))))
        elif (pages := allocator.reserve(rng.randint(0, 6))) is not None:
            held.append(pages)
        allocator.check()
        assert allocator.num_free == 32 - sum(map(len, held))
    for pages in held:
        allocator.release(pages)
    assert allocator.num_free == 32


def test_pages_are_taken_all_or_none() -> None:
    allocator = PageAllocator(num_pages=3)
    assert allocator.reserve(4) is None
    assert allocator.num_free == 3


def test_second_release_of_a_page_is_refused() -> None:
    allocator = PageAllocator(num_pages=2)
    pages = allocator.reserve(1)
    assert pages is not None
    allocator.release(pages)
    with pytest.raises(AssertionError, match="released but not taken"):
        allocator.release(pages)


def test_check_sees_a_lost_and_a_doubled_page() -> None:
    lost = PageAllocator(num_pages=2)
    lost._free.pop()
    with pytest.raises(AssertionError, match="neither free nor taken"):
        lost.check()
    doubled = PageAllocator(num_pages=2)
    doubled._free.append(doubled._free[0])
    with pytest.raises(AssertionError, match="free twice"):
        doubled.check()
    both = PageAllocator(num_pages=2)
    both._taken.add(both._free[0])
    with pytest.raises(AssertionError, match="both free and taken"):
        both.check()


def test_slot_generation_rises_with_each_owner() -> None:
    allocator = SlotAllocator(num_slots=1)
    first = allocator.reserve()
    assert first is not None
    assert allocator.reserve() is None
    allocator.release(first)
    second = allocator.reserve()
    assert second is not None
    assert second.index == first.index
    assert second.generation > first.generation
    with pytest.raises(AssertionError, match="not taken"):
        allocator.release(first)
    allocator.release(second)
    allocator.check()
    assert allocator.num_free == 1


def test_slot_check_sees_broken_books() -> None:
    doubled = SlotAllocator(num_slots=2)
    doubled._free.append(0)
    with pytest.raises(AssertionError, match="free twice"):
        doubled.check()
    stale = SlotAllocator(num_slots=1)
    stale._free.clear()
    stale._taken.add(Slot(0, 7))
    with pytest.raises(AssertionError, match="old generation"):
        stale.check()


def test_reservation_takes_pages_and_slot_together_or_nothing() -> None:
    no_pages = LaneMemory(num_pages=2, page_size_tokens=4, num_slots=2)
    assert no_pages.reserve(9) is None
    assert (no_pages.pages.num_free, no_pages.slots.num_free) == (2, 2)
    no_slots = LaneMemory(num_pages=4, page_size_tokens=4, num_slots=1)
    assert no_slots.reserve(4) is not None
    assert no_slots.reserve(4) is None
    assert no_slots.pages.num_free == 3
    no_slots.check()


def test_quarantined_memory_is_not_reused_until_released() -> None:
    memory = LaneMemory(num_pages=2, page_size_tokens=4, num_slots=1)
    reservation = memory.reserve(8)
    assert reservation is not None
    memory.quarantine(reservation)
    memory.check()
    assert memory.num_quarantined == 1
    assert memory.reserve(1) is None
    with pytest.raises(AssertionError, match="not live"):
        memory.extend(reservation, 9)
    memory.release(reservation)
    memory.check()
    assert memory.num_quarantined == 0
    assert memory.reserve(8) is not None
    with pytest.raises(AssertionError, match="already gone"):
        memory.release(reservation)


@pytest.mark.parametrize("seed", range(20))
def test_random_walk_of_reservations_never_leaks(seed: int) -> None:
    rng = random.Random(seed)
    memory = LaneMemory(num_pages=24, page_size_tokens=4, num_slots=5)
    live: dict[Reservation, int] = {}
    quarantined: list[Reservation] = []
    for _ in range(500):
        match rng.randrange(4):
            case 0:
                num_tokens = rng.randint(1, 40)
                reservation = memory.reserve(num_tokens)
                if reservation is not None:
                    live[reservation] = num_tokens
                    assert len(reservation.pages) == -(-num_tokens // 4)
            case 1 if live:
                reservation = rng.choice(list(live))
                if memory.extend(reservation, live[reservation] + 3):
                    live[reservation] += 3
                assert len(reservation.pages) == -(-live[reservation] // 4)
            case 2 if live:
                reservation = rng.choice(list(live))
                del live[reservation]
                if rng.random() < 0.5:
                    memory.quarantine(reservation)
                    quarantined.append(reservation)
                else:
                    memory.release(reservation)
            case 3 if quarantined:
                memory.release(quarantined.pop())
        memory.check()
    for reservation in (*live, *quarantined):
        memory.release(reservation)
    memory.check()
    assert (memory.pages.num_free, memory.slots.num_free) == (24, 5)
