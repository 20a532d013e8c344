"""How long decode keeps room for a prompt that prefill still computes, beside the time that is predicted for it. Pure.

A worker fails a request whose prompt is not there by then, and its memory was held for nothing.
"""

from __future__ import annotations

import math

from kimi_operator.errors import Problem
from kimi_operator.planner.case import Timing
from kimi_operator.planner.units import counted, most, seconds_text

RESERVATION = "profile.timeouts.reservationSeconds"
_MOST_S = 86_400
"""The most that it may be."""


def raised(what: str, needed_s: float, otherwise: str) -> str:
    """What to do about a prompt that may take so long."""
    enough = 100 * math.ceil(needed_s / 100)
    return f"raise {what} to {enough:,}, or {otherwise}" if enough <= _MOST_S else otherwise


def late_longest(max_model_len: int, timing: Timing) -> Problem | None:
    """Why the longest request that is admitted may fail, its prompt alone in a group; None where it does not."""
    limit_s, longest = timing.reservation_s, max_model_len - 1
    if limit_s is None or timing.prefill_band_s is None or longest < 1:
        return None
    time_s, (low_s, high_s) = timing.prefill_s(longest, 0), timing.prefill_band_s(longest, 0)
    if high_s <= limit_s:
        return None
    keeps = f"the {limit_s:,g} s that decode keeps room for it ({RESERVATION})"
    band = f"{seconds_text(time_s)} ({seconds_text(low_s, high_s)}) alone in its group"
    if time_s <= limit_s:
        expected = f"less to be sure: its prompt takes {band}, and within that band lie {keeps}"
        otherwise = "measure it"
    else:
        in_time = most(lambda tokens: timing.prefill_s(tokens, 0) <= limit_s, 1, longest)
        expected = f"a prompt of at most {counted(in_time, 'token')}: the longest one takes {band}, more than {keeps}"
        otherwise = f"lower maxModelLen to {in_time + 1:,}" if in_time else "use faster prefill"
    got = counted(max_model_len, "token")
    return Problem("spec.model.maxModelLen", got, expected, raised(RESERVATION, high_s, otherwise))
