"""Services that replays are tested on: with room for everything, and short of each thing."""

from __future__ import annotations

from typing import Any

from kimi_operator.planner.service import Lane, Service, paced
from msgspec.structs import replace

LANE = Lane(
    num_pages=10_000, page_size_tokens=64, num_slots=40, max_running=32, max_context=100_000, max_queued=64,
    reservation_s=1e9,
)  # fmt: skip
ROOMY = Service(
    lane=LANE,
    lanes=2,
    groups=1,
    prefill_lanes=8,
    prefill_groups=2,
    prefill_running=32,
    chunk_tokens=256,
    prefill_step_s=lambda tokens, before, busy: 0.05 + tokens / 900 * (1 + busy / 20) + before / 90_000,
    decode_step_s=lambda decoding, context: 0.02 + decoding / 1000 + context / 1e5,
    reuse=0.9,
)


def changed(service: Service = ROOMY, **changes: Any) -> Service:
    """With other fields of it or of its lane."""
    of_lane = {name: changes.pop(name) for name in list(changes) if hasattr(LANE, name)}
    return replace(service, lane=replace(service.lane, **of_lane), **changes)


TIGHT = changed(num_pages=70, num_slots=4, max_running=3, prefill_lanes=2, prefill_groups=1, max_context=3000)
SERVICES = {
    "roomy": ROOMY,
    "tight": TIGHT,
    "few run": paced(changed(max_running=1, num_slots=3, groups=2, prefill_running=1), prefill=0.5, decode=2),
    "few slots": changed(num_slots=2, max_running=2),
    "few pages": paced(changed(num_pages=60, groups=2, lanes=1), prefill=1, decode=2),
    "one lane": changed(lanes=1, prefill_lanes=1, prefill_groups=1),
}
FLAT = changed(
    prefill_lanes=1, prefill_groups=16, prefill_running=1, chunk_tokens=10_000, prefill_step_s=lambda *_: 1.0,
    decode_step_s=lambda decoding, context: 0.1 * decoding, reuse=0.0,
)  # fmt: skip
"""A second a prompt, each on a lane that is a group, and a step of a tenth for each request that decodes."""
