"""What serves the sessions of a replay, as its workers are set, and how long its work takes. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from kimi_operator.planner.predict import Side, roofline_s
from kimi_operator.planner.roofline import DecodeLoad, PrefillLoad
from kimi_operator.planner.units import ceil_div

_FAR = 2**20
"""A context, in tokens, beside 0: a decode step is affine in the context, so two are priced."""


@dataclass(frozen=True, slots=True)
class Lane:
    """What a decode lane takes, as its worker is set."""

    num_pages: int
    page_size_tokens: int
    num_slots: int
    """Requests that hold memory at once, prefill's share of their life included."""
    max_running: int
    """Those of them that decode at once."""
    max_context: int
    max_queued: int
    """Requests that wait for memory before the next one is refused."""
    reservation_s: float
    """Longest time from taking memory to the end of prefill; then the request fails."""


@dataclass(frozen=True, slots=True)
class Service:
    """What serves the sessions, and how long work takes."""

    lane: Lane
    lanes: int
    """Decode lanes of a group. They step together."""
    groups: int
    prefill_lanes: int
    """Of all groups; a prompt takes the first that is free."""
    prefill_s: Callable[[int, int, int], float]
    """(tokens to compute, tokens found in the cache, busy lanes) -> seconds on one lane; taken once, at its start."""
    decode_step_s: Callable[[int, float], float]
    """(requests of a group that decode, mean of their contexts) -> seconds of a step; affine in the mean."""
    reuse: float
    """Share of a session's earlier context that a turn finds in the cache."""


def paced(service: Service, prefill: float, decode: float) -> Service:
    """The same service with all times of a phase so many times as long."""
    return replace(
        service,
        prefill_s=lambda new, cached, busy: prefill * service.prefill_s(new, cached, busy),
        decode_step_s=lambda decoding, context: decode * service.decode_step_s(decoding, context),
    )


def predicted_service(decode: Side, prefill: Side, lane: Lane, chunk_tokens: int, reuse: float) -> Service:
    """The service that predictions describe; a step of prefill computes at most `chunk_tokens`."""
    prefill_factor, decode_factor = prefill.calibration.factor(), decode.calibration.factor()

    def prefill_s(new: int, cached: int, busy: int) -> float:
        load = PrefillLoad(new, cached, chunk_tokens, ceil_div(busy, prefill.groups))
        return prefill_factor * roofline_s(prefill.setup, load)

    @cache
    def line(decoding: int) -> tuple[float, float]:
        near, far = (roofline_s(decode.setup, DecodeLoad(decoding, context)) for context in (0, _FAR))
        return decode_factor * near, decode_factor * (far - near) / _FAR

    def decode_step_s(decoding: int, context: float) -> float:
        least, each = line(decoding)
        return least + each * context

    lanes, prefill_lanes = decode.setup.shape.lanes, prefill.setup.shape.lanes * prefill.groups
    return Service(lane, lanes, decode.groups, prefill_lanes, prefill_s, decode_step_s, reuse)
