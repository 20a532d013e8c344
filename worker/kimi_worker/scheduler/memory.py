"""A lane's pages and slots, taken together or not at all."""

from dataclasses import dataclass

from kimi_worker.scheduler.pages import PageAllocator, PageId
from kimi_worker.scheduler.slots import Slot, SlotAllocator


@dataclass(slots=True, eq=False)
class Reservation:
    """Memory of one sequence: a slot and the pages of its tokens in order."""

    pages: list[PageId]
    slot: Slot


class LaneMemory:
    """Owns both allocators. A reservation is live, quarantined (a peer may still write into it) or gone."""

    def __init__(self, num_pages: int, page_size_tokens: int, num_slots: int) -> None:
        self.pages = PageAllocator(num_pages)
        self.slots = SlotAllocator(num_slots)
        self._page_size = page_size_tokens
        self._live: set[Reservation] = set()
        self._quarantined: set[Reservation] = set()

    @property
    def num_quarantined(self) -> int:
        return len(self._quarantined)

    def fits(self, num_tokens: int) -> bool:
        """Whether `reserve` would succeed now."""
        return self._num_pages_of(num_tokens) <= self.pages.num_free and self.slots.num_free > 0

    def reserve(self, num_tokens: int) -> Reservation | None:
        """Take a slot and the pages of `num_tokens`, or take nothing and return None."""
        if not self.fits(num_tokens):
            return None
        pages, slot = self.pages.reserve(self._num_pages_of(num_tokens)), self.slots.reserve()
        assert pages is not None
        assert slot is not None
        reservation = Reservation(pages, slot)
        self._live.add(reservation)
        return reservation

    def extend(self, reservation: Reservation, num_tokens: int) -> bool:
        """Grow to hold `num_tokens` in all. False, and nothing taken, when pages are short."""
        assert reservation in self._live, f"{reservation} does not grow: it is not live"
        missing = self._num_pages_of(num_tokens) - len(reservation.pages)
        pages = self.pages.reserve(max(missing, 0))
        if pages is None:
            return False
        reservation.pages.extend(pages)
        return True

    def quarantine(self, reservation: Reservation) -> None:
        """Keep the memory from its next owner until `release`: a peer may still write into it."""
        assert reservation in self._live, f"{reservation} is not live"
        self._live.remove(reservation)
        self._quarantined.add(reservation)

    def release(self, reservation: Reservation) -> None:
        """Free a live or quarantined reservation."""
        assert reservation in self._live or reservation in self._quarantined, f"{reservation} is already gone"
        self._live.discard(reservation)
        self._quarantined.discard(reservation)
        self.pages.release(reservation.pages)
        self.slots.release(reservation.slot)

    def check(self) -> None:
        """Assert that the allocators' books are right and that reservations account for all that is taken."""
        self.pages.check()
        self.slots.check()
        assert not self._live & self._quarantined
        held = [*self._live, *self._quarantined]
        pages = [page for reservation in held for page in reservation.pages]
        assert len(set(pages)) == len(pages), "two reservations share a page"
        assert len(pages) == self.pages.num_pages - self.pages.num_free, "taken pages belong to no reservation"
        slots = {reservation.slot.index for reservation in held}
        assert len(slots) == len(held), "two reservations share a slot"
        assert len(held) == self.slots.num_slots - self.slots.num_free, "taken slots belong to no reservation"

    def _num_pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)
