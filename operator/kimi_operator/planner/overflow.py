"""The words for a GPU's memory that is too small: the line that does not fit, by how much, and the nearest way out."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from kimi_operator.api.deployment import Role
from kimi_operator.planner.layout import MAX_NODES
from kimi_operator.planner.memory import GroupShape, MemoryLine
from kimi_operator.planner.units import bytes_text


class Overflow(Struct, frozen=True):
    """Lines that need more than a GPU's memory. All sizes are of one GPU."""

    memory: int
    line: MemoryLine
    """The first that does not fit, counted in order."""
    left: int
    """Bytes that the lines before it leave."""
    missing: int
    """Bytes that all lines need beyond the memory."""

    def __str__(self) -> str:
        """What was expected, as all refusals say it."""
        return (
            f"at most {bytes_text(self.memory)}, the memory of a GPU: the line {self.line.label!r} of "
            f"{bytes_text(self.line.bytes)} does not fit into the {bytes_text(self.left)} that are left, and "
            f"{bytes_text(self.missing)} are missing in all"
        )


def find_overflow(memory: int, lines: Iterable[MemoryLine]) -> Overflow | None:
    """The first line that does not fit; None when all do."""
    lines, left = tuple(lines), memory
    for line in lines:
        if line.bytes > left:
            return Overflow(memory, line, left, sum(each.bytes for each in lines) - memory)
        left -= line.bytes
    return None


def nearest_text(nearest: GroupShape | None) -> str:
    """The way out by another layout, or that there is none."""
    if nearest is None:
        return f"no layout of up to {MAX_NODES} nodes fits: use GPUs with more memory, or lower the profile's reserves"
    return f"use the nearest layout that fits: {nearest}"


def nearest_texts(nearest: GroupShape, other: Role, beside: GroupShape) -> str:
    """The way out by other layouts of both roles: lanes are equally wide."""
    return f"use the nearest layouts that fit: {nearest}, and for spec.{other} {beside}"
