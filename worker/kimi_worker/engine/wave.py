"""When the lanes of a group step together: numbered waves. Pure; the rank's loop carries the messages.

All ranks take part in every step, because MoE layers exchange tokens among all of them. So a lane that gets work cannot
step alone: it asks the coordinator (on rank 0) for the next wave, and the coordinator tells every lane, once. In a wave
every lane contributes to every step, perhaps nothing. The wave ends for all at the first step to which no lane
contributes; each lane knows that from the sum which the step begins with, so it takes no message to end a wave.

Why no wake-up is lost: every lane lives through every wave, in order. A lane that finds work after wave n has ended
for it asks for n + 1; either that wave has begun and its Wake is on the way, or this request begins it. A Wake that
overtakes the end of the wave before it is kept. Why no lane is alone in a collective: a wave has one Wake for every
lane.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class LaneWave:
    """A lane's view. Waves count from 1; links are reliable and ordered, or the group is restarted."""

    ended: int = 0
    """The last wave that has ended here."""
    woken: int = 0
    """The last wave whose Wake has arrived."""
    asked: int = 0
    """The last wave that this lane has asked for."""

    @property
    def is_running(self) -> bool:
        return self.woken > self.ended

    def ask(self) -> int | None:
        """The lane has work. Returns the wave to ask the coordinator for, or None when that is not needed."""
        wanted = self.ended + 1
        if self.is_running or self.asked >= wanted:
            return None
        self.asked = wanted
        return wanted

    def wake(self, wave: int) -> None:
        """The coordinator has begun a wave."""
        assert wave == self.woken + 1, f"woken for wave {wave} after wave {self.woken}: a message was lost"
        assert wave <= self.ended + 2, f"wave {wave} began while this lane is still in wave {self.ended + 1}"
        self.woken = wave

    def end(self) -> None:
        """A step of the running wave began with the sum 0."""
        assert self.is_running, f"wave {self.ended} has already ended"
        self.ended += 1


@dataclass(slots=True)
class Coordinator:
    """Begins each wave once."""

    begun: int = 0

    def ask(self, wave: int) -> bool:
        """A lane asks for a wave. True: it begins now, wake every lane, the asking one too."""
        assert wave <= self.begun + 1, f"a lane asks for wave {wave} but only {self.begun} have begun"
        if wave <= self.begun:
            return False
        self.begun = wave
        return True
