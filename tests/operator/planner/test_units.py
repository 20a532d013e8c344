"""Bytes for people: binary units only, so that a decimal figure shows as what it is."""

from __future__ import annotations

import pytest
from kimi_operator.planner.units import bytes_text, ceil_div


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.0 KiB"),
        (-3 * 2**20, "-3.0 MiB"),
        # what --kv-cache-memory-bytes was set to in the published runs: GB, not GiB
        (13_000_000_000, "12.1 GiB"),
        (40_000_000_000, "37.3 GiB"),
        (1_560_860_324_864, "1,453.7 GiB"),
    ],
)
def test_bytes_are_shown_in_the_largest_binary_unit(amount: int, text: str) -> None:
    assert bytes_text(amount) == text


@pytest.mark.parametrize("unit", [1, 3, 64])
def test_ceil_div_is_the_fewest_units_that_hold_it(unit: int) -> None:
    for amount in range(200):
        units = ceil_div(amount, unit)
        assert (units - 1) * unit < amount <= units * unit or amount == units == 0
    # exact where a float is not
    assert ceil_div(10**30 + 1, 10) == 10**29 + 1
