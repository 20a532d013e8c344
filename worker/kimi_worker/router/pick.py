"""Which decode lane and which prefill lane answer a request. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple


class LaneKey(NamedTuple):
    """A lane in the cluster: its pod's address (host:port) and its index in that pod."""

    pod: str
    lane: int


@dataclass(frozen=True, slots=True)
class LaneView:
    """A lane that takes requests, with its load as far as the router knows it."""

    key: LaneKey
    layout_hash: str
    handoff: str
    """Endpoint for the handoff, tcp://ip:port."""
    can_prefill: bool
    """Computes prompts itself; a request needs no second lane."""
    room: int
    """Requests that could run at once beyond those it has; negative when some must wait."""
    free_pages: int
    queued_tokens: int
    """Prompt tokens that wait to be computed."""
    group: str = ""
    """Lanes of one group step together, each step as long as the slowest lane's."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Who answers a request. `prefill` is None when the decode lane computes the prompt itself."""

    decode: LaneView
    prefill: LaneView | None


def pick(decodes: Sequence[LaneView], prefills: Sequence[LaneView], avoid: Iterable[LaneKey] = ()) -> Pair | None:
    """The decode lane with the most room and, of those with its layout, the prefill lane with the fewest queued tokens.

    Of equal lanes, idle ones above all, that whose group has the least to do: there it keeps step with nobody.
    None when no decode lane has a partner of its layout. `avoid` are lanes that have just refused this request.
    """
    avoided = set(avoid)
    partners = [lane for lane in prefills if lane.key not in avoided]
    layouts = {lane.layout_hash for lane in partners}
    able = [lane for lane in decodes if lane.key not in avoided and (lane.can_prefill or lane.layout_hash in layouts)]
    if not able:
        return None
    rooms = defaultdict[str, list[int]](list)
    for lane in decodes:
        rooms[lane.group].append(lane.room)
    room = {group: fmean(each) for group, each in rooms.items()}
    queued = Counter[str]()
    for lane in prefills:
        queued[lane.group] += lane.queued_tokens
    decode = max(able, key=lambda lane: (lane.room, lane.free_pages, room[lane.group]))
    if decode.can_prefill:
        return Pair(decode, None)
    fitting = (lane for lane in partners if lane.layout_hash == decode.layout_hash)
    return Pair(decode, min(fitting, key=lambda lane: (lane.queued_tokens, queued[lane.group], -lane.room)))


def explain(decodes: Sequence[LaneView], prefills: Sequence[LaneView]) -> str:
    """What is missing when no pair can be picked at all."""
    if not decodes:
        return "no decode lane is ready"
    if not prefills:
        return "no prefill lane is ready"
    layouts = [", ".join(sorted({lane.layout_hash or "none" for lane in lanes})) for lanes in (decodes, prefills)]
    return f"decode lanes have layout {layouts[0]} and prefill lanes {layouts[1]}; only equal ones can be paired"
