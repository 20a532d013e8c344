"""Amounts as Kubernetes writes them: 64Mi, 8Gi, 500m. What cannot be meant is refused with what is likely meant."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

from pydantic_core import PydanticCustomError

UNITS = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
QUANTITY_PATTERN = rf"^[0-9]+(\.[0-9]+)?(m|{'|'.join(UNITS)})?$"
REFUSED = "quantity"
"""Type of the errors below; their context has `expected` and `remedy`, and the `key` of a table."""
LEAST_BYTES = 2**20
"""A smaller number without a unit is one whose unit was forgotten."""
MOST_BYTES = 2**60
"""Far above any hardware."""
BYTE_KEYS = ("memory", "ephemeral-storage")
"""Names of a pod's resources that are bytes."""
_MOST_MEANT = {"staging": 2**30, "margin": 2**34, "graphs": 2**34, "activations": 2**36, "contexts": 2**36}
"""More than such a field ever has; the largest unit that stays below is advised."""
_MOST_MEANT |= {"symmetric_heap": 2**37, "shared_memory": 2**40}
_MOST_OF_A_GPU, _MOST_OF_A_POD = 2**39, 2**42

_BYTES = re.compile(rf"(?P<amount>[0-9]+(\.[0-9]+)?)(?P<unit>{'|'.join(UNITS)})?")
_WRITTEN = re.compile(r"(?P<amount>[0-9][0-9,_ ]*(\.[0-9]+)?)(?P<exponent>[eE][+]?[0-9]{1,2})?\s*(?P<unit>[A-Za-z]*)")
_MEANT = re.compile(r"([kmgtp])(i?)(b|bytes?|[a-z])?", re.IGNORECASE)
_EXPECTED = f"whole bytes, or a number with one of the units {', '.join(UNITS)}"


def parse_bytes(value: object) -> int:
    """Bytes of a Kubernetes quantity such as 64Mi, 191.98Gi or 13000000000; fractions of a byte are dropped.

    Raises ValueError with what was expected, and the nearest right spelling, when the text is no quantity.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _BYTES.fullmatch(str(value))
    if match is None:
        raise refusal(_EXPECTED, _remedy(str(value)))
    return int(Decimal(match["amount"]) * UNITS.get(match["unit"], 1))


def read_bytes(value: object, field: str = "") -> int:
    """The same of a field; no bare number but 0 may be so small that its unit was forgotten. Raises ValueError."""
    amount = parse_bytes(value)
    if _is_too_small(str(value), amount):
        raise _too_small(str(value), _MOST_MEANT.get(field, _MOST_OF_A_GPU))
    return amount


def checked(value: object) -> object:
    """A quantity that is passed on as it was written. Raises ValueError as above for units that there are not."""
    if isinstance(value, str) and re.fullmatch(QUANTITY_PATTERN, value) is None:
        raise refusal(f"a number, or one with a unit of m, {', '.join(UNITS)}", _remedy(value, "500m or 8Gi"))
    return value


def with_enough_bytes(amounts: dict[str, str | int]) -> dict[str, str | int]:
    """A pod's resources, whose bytes are no forgotten units, nor thousandths as of a CPU. Raises ValueError."""
    for key in BYTE_KEYS:
        written = str(amounts.get(key, 0))
        whole = written.removesuffix("m")
        amount = parse_bytes(whole) // (1000 if whole != written else 1)
        if _is_too_small(whole, amount):
            raise _too_small(written, _MOST_OF_A_POD, key)
    return amounts


def refusal(expected: str, remedy: str, key: str = "") -> PydanticCustomError:
    """What pydantic is told, and `base.parse` tells on."""
    context: Mapping[str, str] = {"expected": expected, "remedy": remedy, "key": key}
    return PydanticCustomError(REFUSED, "{expected}; {remedy}", dict(context))


def _is_too_small(written: str, amount: int) -> bool:
    """Whether a number other than 0 lacks its unit, or has one and is none of a whole byte: 0.0001Ki."""
    least = LEAST_BYTES if _is_bare(written) else 1
    return 0 <= amount < least and re.search("[1-9]", written) is not None


def _is_bare(written: str) -> bool:
    return not written[-1:].isalpha()


def _too_small(written: str, most: int, key: str = "") -> PydanticCustomError:
    """Advises the largest unit with which the amount is at most `most` bytes."""
    number = written.removesuffix("m")
    if not _is_bare(number):
        return refusal("0, or at least a byte", "write 0 or a larger amount", key)
    units = ("Mi",) if number != written else ("Gi", "Mi")
    unit = next((unit for unit in units if Decimal(number) * UNITS[unit] <= most), "Ki")
    remedy = f"write it with its unit, such as {number}{unit}"
    return refusal(f"0, a number with its unit, or at least {LEAST_BYTES:,} bytes", remedy, key)


def _remedy(written: str, unit: str = "64Mi or 8Gi") -> str:
    """The nearest right spelling; `unit` is for what has none, and for what is more than anything has."""
    match = _WRITTEN.fullmatch(written.strip())
    if match is None:
        return f"write a number with a unit, such as {unit}"
    amount = re.sub("[,_ ]", "", match["amount"])
    if match["exponent"]:
        amount = f"{Decimal(amount + match['exponent']):f}"
    meant = "" if match["unit"].lower() in ("", "b", "byte", "bytes") else _unit(match["unit"])
    if Decimal(amount) * UNITS.get(meant or "", 1) > MOST_BYTES:
        return f"write a number with a unit, such as {unit}"
    if meant is None:
        return f"write {amount} with one of these units"
    return f"write {amount}{meant}"


def _unit(written: str) -> str | None:
    """The unit that is meant; None where none is."""
    meant = _MEANT.fullmatch(written)
    if meant is None:
        return None
    letter = meant[1].lower() if meant[1] in "kK" and not meant[2] else meant[1].upper()
    return f"{letter}{meant[2].lower()}"
