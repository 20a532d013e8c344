"""Whole numbers that are written otherwise than in digits: 100k, 1.5M, 100,000, 8.0, 4e12. Pure."""

from __future__ import annotations

import re
from decimal import Decimal

MOST_EXACT = 2**53
"""Whole numbers from here on are not written in full as they were meant."""
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_WRITTEN = re.compile(
    r"([0-9]{1,16}|[0-9]{1,3}(?:[,_ ][0-9]{3}){1,4})(\.[0-9]{1,16})?(?:e\+?([0-9]{1,2}))?([kmgt]?)", re.I
)


def whole(value: object) -> int | None:
    """The whole number that is meant; None where it is none, or not sure."""
    if not isinstance(value, int | float | str) or isinstance(value, bool):
        return None
    match = _WRITTEN.fullmatch(str(value).strip())
    if match is None:
        return None
    digits, fraction, exponent, unit = match.groups(default="")
    number = Decimal(re.sub("[,_ ]", "", digits) + fraction) * 10 ** int(exponent or 0) * _FACTORS[unit.lower()]
    return int(number) if number == int(number) and number < MOST_EXACT else None
