"""Who owns which slot of the KDA state."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot in one owner's hands; the next owner of the same index has a higher generation."""

    index: int
    generation: int


class SlotAllocator:
    """Hands out the slots 0 .. num_slots - 1, each to one owner at a time."""

    def __init__(self, num_slots: int) -> None:
        self._generations = [0] * num_slots
        self._free = list(reversed(range(num_slots)))
        self._taken: set[Slot] = set()

    @property
    def num_slots(self) -> int:
        return len(self._generations)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def reserve(self) -> Slot | None:
        """Take a slot, or return None when all are taken. The slot freed last is taken first."""
        if not self._free:
            return None
        index = self._free.pop()
        self._generations[index] += 1
        slot = Slot(index, self._generations[index])
        self._taken.add(slot)
        return slot

    def release(self, slot: Slot) -> None:
        """Give a slot back. A slot of an earlier generation is no longer its holder's to release."""
        assert slot in self._taken, f"{slot} is released but not taken; generation is {self._generations[slot.index]}"
        self._taken.remove(slot)
        self._free.append(slot.index)

    def check(self) -> None:
        """Assert that every slot is either free or taken, once, and in its current generation."""
        taken = {slot.index for slot in self._taken}
        assert len(taken) == len(self._taken), "a slot is taken twice"
        assert len(set(self._free)) == len(self._free), "a slot is free twice"
        assert not taken & set(self._free), f"slots both free and taken: {sorted(taken & set(self._free))}"
        assert taken | set(self._free) == set(range(self.num_slots)), "a slot is neither free nor taken"
        stale = [slot for slot in self._taken if slot.generation != self._generations[slot.index]]
        assert not stale, f"slots of an old generation are still taken: {stale}"
