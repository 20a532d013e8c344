"""What is asked of a deployment: lengths of prompts and answers, reuse, targets, and how many requests at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import cached_property
from statistics import NormalDist
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from kimi_operator.api.base import parse
from kimi_operator.api.deployment import Role
from kimi_operator.api.workload import ONE_DISTRIBUTION, LengthsSpec, WorkloadSpec
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.numerals import whole
from kimi_operator.planner.units import counted

NUM_POINTS = 32
"""Lengths that stand for a distribution; its longest is kept apart."""
LONGEST_PERCENTILE = 0.99
"""A log-normal has no longest: this part of it is served in full."""

MOST_TPOT_S = 10
"""Nobody waits longer for each token: a target of more is one of milliseconds."""

_P95 = NormalDist().inv_cdf(0.95)


class Lengths(Struct, frozen=True, dict=True):
    """A distribution of lengths in tokens: equally likely `points`, ascending, and the `longest` that must fit."""

    points: tuple[int, ...]
    longest: int
    text: str
    """As a person would write it."""
    has_tail: bool = False
    """Some requests are longer than `longest`."""

    def __post_init__(self) -> None:
        """Points must be there, in order, and none above the longest."""
        assert self.points, "a distribution without points"
        assert list(self.points) == sorted(self.points), self.points
        assert self.points[-1] <= self.longest, (self.points[-1], self.longest)

    @cached_property
    def mean(self) -> Fraction:
        """Mean length in tokens, exact for the points."""
        return Fraction(sum(self.points), len(self.points))

    @property
    def stated(self) -> int:
        """What must be served: the longest, but of a tail only the point below the median."""
        return self.points[(len(self.points) - 1) // 2] if self.has_tail else self.longest

    def within(self, limit: int) -> Lengths:
        """The same with nothing above `limit` tokens."""
        if self.longest <= limit:
            return self
        points = tuple(min(point, limit) for point in self.points)
        return Lengths(points, limit, f"{self.text}, over {limit:,} refused", self.has_tail)

    def plus(self, other: Lengths) -> Lengths:
        """Sums of two independent lengths."""
        points = sorted(mine + its for mine in self.points for its in other.points)
        has_tail = self.has_tail or other.has_tail
        return Lengths(tuple(points), self.longest + other.longest, f"{self.text} + {other.text}", has_tail)

    def __str__(self) -> str:
        return self.text


def fixed(tokens: int) -> Lengths:
    """All of one length."""
    return Lengths((tokens,), tokens, counted(tokens, "token"))


def uniform(least: int, most: int) -> Lengths:
    """Any length from `least` to `most`, equally likely."""
    points = (least + (most - least) * (2 * i + 1) // (2 * NUM_POINTS) for i in range(NUM_POINTS))
    return Lengths(tuple(points), most, f"{least:,} to {counted(most, 'token')}")


def log_normal(median: int, p95: int) -> Lengths:
    """Log-normal by its median and 95th percentile; the longest is the 99th percentile."""
    sigma = math.log(p95 / median) / _P95

    def at(share: float) -> int:
        return max(1, math.ceil(median * math.exp(sigma * NormalDist().inv_cdf(share))))

    points = tuple(at((2 * i + 1) / (2 * NUM_POINTS)) for i in range(NUM_POINTS))
    text = f"log-normal, median {median:,}, p95 {counted(p95, 'token')}"
    return Lengths(points, max(at(LONGEST_PERCENTILE), points[-1]), text, has_tail=True)


def empirical(observed: tuple[int, ...]) -> Lengths:
    """As observed. More than 32 are represented by 32 of them, evenly spaced by rank, and by the longest."""
    ranked = sorted(observed)
    if len(ranked) <= NUM_POINTS:
        points = tuple(ranked)
    else:
        points = tuple(ranked[(2 * i + 1) * len(ranked) // (2 * NUM_POINTS)] for i in range(NUM_POINTS))
    return Lengths(
        points, ranked[-1], f"{counted(len(ranked), 'observed length')} up to {counted(ranked[-1], 'token')}"
    )


class Workload(Struct, frozen=True, dict=True):
    """Requests as a lane sees them. Prompt and output lengths are independent of each other, unless a tail was cut."""

    prompt: Lengths
    output: Lengths
    reuse: Fraction = Fraction(0)
    """Share of prompt tokens whose prefix is in the cache: it spares prefill work. Decode pages are written in full."""
    ttft_s: float | None = None
    tpot_s: float | None = None
    concurrency: int | None = None
    """Requests that clients keep going; decode has room for all of them. None asks for as many as fit."""
    requests_per_second: Fraction | None = None
    whole: Workload | None = None
    """The workload before its tails were cut; None when nothing was."""
    longest: int | None = None
    """Where a cut workload's requests end, in tokens."""

    @cached_property
    def decode_tokens(self) -> Lengths:
        """What a request holds on decode just before it ends: its prompt and its whole answer."""
        if self.whole is None or self.longest is None:
            return self.prompt.plus(self.output)
        return self.whole.decode_tokens.within(self.longest)

    def tokens(self, role: Role) -> Lengths:
        """What a request holds at most on a lane of a role."""
        return self.decode_tokens if role is Role.DECODE else self.prompt

    def computed_and_reused(self, prompt_tokens: Fraction | int) -> tuple[int, int]:
        """Tokens of a prompt that prefill computes, at least one, and those that it finds in the cache."""
        whole = math.ceil(prompt_tokens)
        computed = max(1, math.ceil(whole * (1 - self.reuse)))
        return computed, whole - computed

    @property
    def mean_lengths(self) -> tuple[int, int]:
        """Whole tokens of a mean request's prompt and answer."""
        return math.ceil(self.prompt.mean), max(1, round(self.output.mean))

    @cached_property
    def mean_context(self) -> int:
        """Tokens that those requests hold on average that decode at any moment.

        A long answer takes its place for longer, so more of those that run are long: E[p] + E[o^2] / (2 E[o]) for
        prompts p and answers o (the length bias of renewal theory). Of answers of one length that is halfway.
        """
        answers = self.output.points
        return math.ceil(self.prompt.mean + Fraction(sum(answer**2 for answer in answers), 2 * sum(answers)))

    @property
    def running(self) -> int | None:
        """Requests that decode has room for, over all lanes; from the rate by Little's law where a rate is given."""
        if self.requests_per_second is None or self.tpot_s is None:
            return self.concurrency
        return max(1, math.ceil(self.requests_per_second * self.output.mean * Fraction(str(self.tpot_s))))

    def within(self, max_positions: int) -> Workload:
        """The same as a worker serves it that takes no more tokens a request: its answers end there.

        Of prompts only a tail is cut. What `check_lengths` refuses stays as it is: it cannot be served.
        """
        whole = self.whole or self
        if self.decode_tokens.longest <= max_positions or check_lengths(whole, max_positions):
            return self
        prompt = whole.prompt.within(max_positions - 1)
        rooms = [max_positions - tokens for tokens in prompt.points]
        answers = sorted(min(answer, room) for room in rooms for answer in whole.output.points)
        text = f"{whole.output}, ended where a request has {max_positions:,}"
        output = Lengths(tuple(answers), min(whole.output.longest, max(rooms)), text, whole.output.has_tail)
        return replace(self, prompt=prompt, output=output, whole=whole, longest=max_positions)


def read_workload(document: Mapping[str, Any], where: str = "workload") -> Workload:
    """A workload from a small mapping, as it stands in YAML: a WorkloadSpec whose lengths may be plain numbers.

    Raises InvalidSpec that names each wrong field, its value and what to do.
    """
    lengths = {name: _number_is_fixed(document[name]) for name in ("prompt", "output") if name in document}
    return workload_of(parse(WorkloadSpec, {**document, **lengths}, where), where)


def workload_of(spec: WorkloadSpec, where: str) -> Workload:
    """What a spec asks for. Raises InvalidSpec for fields that contradict each other; `where` is the spec's path."""
    problems = [
        *_check_one_distribution(spec.prompt, f"{where}.prompt"),
        *_check_one_distribution(spec.output, f"{where}.output"),
        *_check_load(spec, where),
        *_check_target(spec.targets.tpot_seconds, f"{where}.targets.tpotSeconds"),
    ]
    if problems:
        raise InvalidSpec(tuple(problems))
    rate = spec.requests_per_second
    return Workload(
        prompt=_lengths(spec.prompt),
        output=_lengths(spec.output),
        reuse=Fraction(str(spec.reuse)),
        ttft_s=spec.targets.ttft_seconds,
        tpot_s=spec.targets.tpot_seconds,
        concurrency=spec.concurrency,
        requests_per_second=None if rate is None else Fraction(str(rate)),
    )


def _number_is_fixed(value: object) -> object:
    is_fixed = (isinstance(value, int) and not isinstance(value, bool)) or whole(value) is not None
    return {"fixed": value} if is_fixed else value


def check_lengths(
    workload: Workload, max_positions: int, where: str = "workload", limit: str = "the model's longest sequence"
) -> tuple[Problem, ...]:
    """Lengths beyond `limit`, as it is called: what the model was made for, or less.

    The tail of a log-normal may be longer: it is cut, not refused. What is stated is served: the longest of lengths
    without a tail, and the median of those with one, together.
    """
    problems = []
    for field, lengths in (("prompt", workload.prompt), ("output", workload.output)):
        if lengths.stated >= max_positions:
            expected = f"less than {counted(max_positions, 'token')}, {limit}"
            problems.append(Problem(f"{where}.{field}", str(lengths), expected, f"lower it below {max_positions:,}"))
    together = workload.prompt.stated + workload.output.stated
    if not problems and together > max_positions:
        at_median = ", tails at their median" if workload.decode_tokens.has_tail else ""
        got = f"{workload.prompt} and {workload.output}: {together:,} together{at_median}"
        expected = f"at most {counted(max_positions, 'token')}, {limit}"
        which = "median" if workload.prompt.has_tail else "longest"
        remedy = f"lower the {which} prompt to {max_positions - workload.output.stated:,}"
        problems.append(Problem(f"{where}.prompt", got, expected, remedy))
    return tuple(problems)


def _lengths(spec: LengthsSpec) -> Lengths:
    if spec.uniform is not None:
        return uniform(spec.uniform.min, spec.uniform.max)
    if spec.log_normal is not None:
        return log_normal(spec.log_normal.median, spec.log_normal.p95)
    if spec.empirical is not None:
        return empirical(spec.empirical)
    assert spec.fixed is not None, "checked: exactly one is given"
    return fixed(spec.fixed)


def _check_one_distribution(spec: LengthsSpec, where: str) -> Iterator[Problem]:
    given = sorted(spec.model_dump(by_alias=True, exclude_none=True))
    if len(given) != 1:
        yield Problem(where, " and ".join(given) or "nothing", ONE_DISTRIBUTION, "keep one of them")
    if spec.uniform is not None and spec.uniform.min > spec.uniform.max:
        most = spec.uniform.max
        yield Problem(f"{where}.uniform.min", f"{spec.uniform.min:,}", f"at most max, {most:,}", "swap min and max")
    if spec.log_normal is not None and spec.log_normal.median > spec.log_normal.p95:
        got, least = f"{spec.log_normal.p95:,}", f"at least the median, {spec.log_normal.median:,}"
        yield Problem(f"{where}.logNormal.p95", got, least, "raise p95 or lower the median")


def _check_load(spec: WorkloadSpec, where: str) -> Iterator[Problem]:
    rate = spec.requests_per_second
    if rate is None:
        return
    if spec.concurrency is not None:
        got = f"{rate:g} beside concurrency {spec.concurrency:,}"
        yield Problem(f"{where}.requestsPerSecond", got, "one of the two", "remove either")
    if spec.targets.tpot_seconds is None:
        expected = "a value: running requests are the rate x output tokens x TPOT"
        yield Problem(f"{where}.targets.tpotSeconds", "nothing", expected, "set it, or state concurrency instead")


def _check_target(tpot_s: float | None, where: str) -> Iterator[Problem]:
    if tpot_s is not None and tpot_s > MOST_TPOT_S:
        expected = f"at most {MOST_TPOT_S} s for each token"
        yield Problem(where, f"{tpot_s:g}", expected, f"write it in seconds: {tpot_s:g} ms are {tpot_s / 1000:g} s")
