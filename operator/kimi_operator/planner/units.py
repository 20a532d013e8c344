"""Bytes and numbers of things for people, and whole units."""

from __future__ import annotations

from collections.abc import Callable

_SEVERAL = ("captures", "lanes", "pages", "slots")
"""What stands in the plural; `maxNumSeqs` does not."""
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def bytes_text(amount: int) -> str:
    """Bytes with one decimal in the largest binary unit that keeps a whole number before the point."""
    for unit, factor in _UNITS:
        if abs(amount) >= factor:
            return f"{amount / factor:,.1f} {unit}"
    return f"{amount:,} B"


def counted(number: int, noun: str) -> str:
    """A number of things: `1 token`, `2 tokens`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def binding(what: str) -> str:
    """What binds, in a sentence: `KV pages bind`, `memory binds`."""
    return f"{what} bind" if what.rsplit(maxsplit=1)[-1] in _SEVERAL else f"{what} binds"


def seconds_text(*seconds: float) -> str:
    """Seconds, or the ends of a range, with four digits, or whole ones where those are more."""
    return f"{' to '.join(f'{each:,.0f}' if each >= 1000 else f'{each:.4g}' for each in seconds)} s"


def ceil_div(amount: int, unit: int) -> int:
    """The fewest whole units that hold an amount."""
    return -(-amount // unit)


def most(allows: Callable[[int], bool], least: int, greatest: int) -> int:
    """The greatest number up to `greatest` that is allowed, when all from `least` to it are; else `least` - 1."""
    low, high = least - 1, greatest
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if allows(middle) else (low, middle - 1)
    return low
