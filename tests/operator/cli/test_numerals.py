"""Whole numbers as people write them."""

from __future__ import annotations

import pytest
from kimi_operator.numerals import whole


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ("8", 8), (8, 8), (8.0, 8), ("8.0", 8), (4e12, 4 * 10**12), ("4.0e12", 4 * 10**12), ("4E+12", 4 * 10**12),
        ("100k", 100_000), ("100K", 100_000), ("1.5M", 1_500_000), ("5.3T", 5_300_000_000_000), ("100,000", 100_000),
        ("1_000_000", 1_000_000), ("1 000", 1000), (" 7 ", 7),
    ],
)  # fmt: skip
def test_whole_numbers_are_read(written: object, number: int) -> None:
    assert whole(written) == number


@pytest.mark.parametrize(
    "written",
    ["", "k", "1.5", 1.5, "1.0005k", "1,5", "1,00", "-8", -8, "8e-3", True, None, [8], "1-8", "8GB", "eight",
     "9" * 20, "1e99", float("inf"), float("nan"), 2**53],
)  # fmt: skip
def test_what_is_none_or_not_sure_is_not(written: object) -> None:
    assert whole(written) is None
