"""What a prefix cache would have found during a replay: prompts kept in a pool of pages, least recently used out first.

Beside its pages a kept prompt takes a KDA state, which counts as the pages that it would fill. The cache answers
whether the reuse that a replay was run with can be had from the memory that is there. All is pure.

It is one pool, as if each prompt came back to the lane that has it: real lanes keep less. Nothing is shared between
sessions. The state that is kept is that at the end of the prompt's last whole page, where computing goes on.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from msgspec import Struct, field

from kimi_operator.planner.served import Served
from kimi_operator.planner.units import ceil_div


class Retention(Struct, frozen=True):
    """A cache of `num_pages` under the turns of a replay, at the times that the replay gave them."""

    num_pages: int
    wanted_pages: int
    """Most pages at once, if every prompt that its session comes back to were kept."""
    returning_turns: int
    """Turns that continue a session."""
    evicted_turns: int
    """Those of them whose prompt was gone before they came back."""
    context_tokens: int
    """Earlier context of all returning turns."""
    found_tokens: int
    """What of it the cache has, in whole pages. The last answer is not there: prefill never saw it."""

    @property
    def reuse(self) -> float:
        """Share of earlier context that is found; 0 when no turn returns."""
        return self.found_tokens / self.context_tokens if self.context_tokens else 0.0


class _Cache(Struct):
    """Prompts by session, least recently used first, beside the pages of prompts that are being computed."""

    num_pages: int
    page_size_tokens: int
    state_pages: int
    kept: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Tokens of the prompt that each session left."""
    kept_pages: int = 0
    """Of prompts and their states."""
    busy_pages: int = 0

    def pages(self, tokens: int) -> int:
        return ceil_div(tokens, self.page_size_tokens)

    def cost(self, tokens: int) -> int:
        """Pages of a prompt that is kept."""
        return self.pages(tokens) + self.state_pages

    def begin(self, turn: Served) -> int | None:
        """Tokens that are found for a turn; None when its session has nothing here. Its pages are in use from now."""
        found = self.kept.pop(turn.session, None)
        if found is not None:
            self.kept_pages -= self.cost(found)
        self.busy_pages += self.pages(turn.prompt_tokens)
        while self.kept and self.kept_pages + self.busy_pages > self.num_pages:
            _, tokens = self.kept.popitem(last=False)
            self.kept_pages -= self.cost(tokens)
        return None if found is None else found // self.page_size_tokens * self.page_size_tokens

    def end(self, turn: Served) -> None:
        """The prompt is computed: it may be kept, and may be thrown out."""
        self.busy_pages -= self.pages(turn.prompt_tokens)
        cost = self.cost(turn.prompt_tokens)
        if self.kept_pages + self.busy_pages + cost <= self.num_pages:
            self.kept[turn.session] = turn.prompt_tokens
            self.kept_pages += cost


def retention(turns: Sequence[Served], num_pages: int, page_size_tokens: int, state_pages: int) -> Retention:
    """Run the turns through a cache of so many pages, which prompts in prefill are taken from too.

    A state of a kept prompt takes `state_pages`; that of a prompt in prefill is in a slot of the lane.
    """
    cache = _Cache(num_pages, page_size_tokens, state_pages)
    returning = evicted = context = found_tokens = 0
    for _, is_begin, turn in sorted(_moments(turns), key=lambda moment: moment[:2]):
        if not is_begin:
            cache.end(turn)
            continue
        found = cache.begin(turn)
        if turn.turn == 0:
            continue
        returning, context = returning + 1, context + turn.context_tokens
        evicted += found is None
        found_tokens += found or 0
    return Retention(num_pages, _wanted(turns, cache), returning, evicted, context, found_tokens)


def _moments(turns: Sequence[Served]) -> Iterator[tuple[float, bool, Served]]:
    """Begin and end of each prefill; what ends at a moment is over before another begins at it."""
    for turn in turns:
        yield turn.prefill_s, True, turn
        yield turn.first_s, False, turn


def _wanted(turns: Sequence[Served], cache: _Cache) -> int:
    """Each prompt takes its pages while it is computed, and then with its state until the session's next turn."""
    changes = []
    ordered = sorted(turns, key=lambda turn: (turn.session, turn.turn))
    for turn, following in itertools.zip_longest(ordered, ordered[1:]):
        pages = cache.pages(turn.prompt_tokens)
        changes += [(turn.prefill_s, pages), (turn.first_s, -pages)]
        if following is not None and following.session == turn.session:
            cost = cache.cost(turn.prompt_tokens)
            changes += [(turn.first_s, cost), (following.prefill_s, -cost)]
    # negative amounts sort first: what ends at a moment is gone before another begins at it
    return max(itertools.accumulate((amount for _, amount in sorted(changes)), initial=0))
