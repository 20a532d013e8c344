"""What serves the sessions of a replay, as its workers are set, and how long its work takes. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from kimi_operator.planner.predict import Side, roofline_s
from kimi_operator.planner.roofline import DecodeLoad, PrefillLoad

_FAR = 2**20
"""A context, in tokens, beside 0: steps of both phases are affine in the context, so two are priced."""


class Lane(Struct, frozen=True):
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


NO_DECODE = Lane(0, 1, 0, 0, 0, 0, math.inf)
"""Where prefill alone matters."""


class Chunk(NamedTuple):
    """What a lane of prefill computes in one step at most."""

    tokens: int
    running: int
    """Prompts that they are of."""


class Service(Struct, frozen=True):
    """What serves the sessions, and how long work takes."""

    lane: Lane
    lanes: int
    """Decode lanes of a group. They step together."""
    groups: int
    prefill_lanes: int
    """Of a group. They step together too."""
    prefill_groups: int
    prefill_running: int
    """Prompts that a lane computes in one step at most."""
    chunk_tokens: int
    """Tokens that a lane computes in one step at most."""
    prefill_step_s: Callable[[int, float, int], float]
    """(tokens that a lane computes, mean number of tokens before them, lanes of the group that compute as many at once)
    -> seconds of a step; affine in the mean."""
    decode_step_s: Callable[[int, float], float]
    """(requests of a group that decode, mean of their contexts) -> seconds of a step; affine in the mean."""
    reuse: float
    """Share of a session's earlier context that a turn finds in the cache."""

    @property
    def all_prefill_lanes(self) -> int:
        """Of all groups."""
        return self.prefill_lanes * self.prefill_groups


def paced(service: Service, prefill: float, decode: float) -> Service:
    """The same service with all times of a phase so many times as long."""
    return replace(
        service,
        prefill_step_s=lambda tokens, before, busy: prefill * service.prefill_step_s(tokens, before, busy),
        decode_step_s=lambda decoding, context: decode * service.decode_step_s(decoding, context),
    )


def predicted_service(decode: Side, prefill: Side, lane: Lane, chunk: Chunk, reuse: float) -> Service:
    """The service that predictions describe."""
    prefill_factor, decode_factor = prefill.calibration.factor(), decode.calibration.factor()

    @cache
    def chunk_line(tokens: int, busy: int) -> tuple[float, float]:
        loads = (PrefillLoad(tokens, before, chunk.tokens, busy) for before in (0, _FAR))
        near, far = (roofline_s(prefill.setup, load) for load in loads)
        return prefill_factor * near, prefill_factor * (far - near) / _FAR

    def prefill_step_s(tokens: int, before: float, busy: int) -> float:
        least, each = chunk_line(tokens, busy)
        return least + each * before

    @cache
    def line(decoding: int) -> tuple[float, float]:
        near, far = (roofline_s(decode.setup, DecodeLoad(decoding, context)) for context in (0, _FAR))
        return decode_factor * near, decode_factor * (far - near) / _FAR

    def decode_step_s(decoding: int, context: float) -> float:
        least, each = line(decoding)
        return least + each * context

    return Service(
        lane=lane,
        lanes=decode.setup.shape.lanes,
        groups=decode.groups,
        prefill_lanes=prefill.setup.shape.lanes,
        prefill_groups=prefill.groups,
        prefill_running=chunk.running,
        chunk_tokens=chunk.tokens,
        prefill_step_s=prefill_step_s,
        decode_step_s=decode_step_s,
        reuse=reuse,
    )
