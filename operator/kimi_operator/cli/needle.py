"""`kimictl needle`: does the service recall distinct needles at rising concurrency, and how fast."""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Literal

import httpx
from cyclopts import Parameter
from msgspec import Struct
from msgspec.structs import replace

from kimi_operator.cli import INTERRUPTED
from kimi_operator.cli.ask import Answer, Service, ask, choose_model
from kimi_operator.cli.compare import Difference, compare
from kimi_operator.cli.flags import read_choice, read_whole, refuse
from kimi_operator.cli.haystack import FRAME_TOKENS, MAX_NEEDLES, NEEDLE_TOKENS, Needle, make_run
from kimi_operator.cli.report import Level, Row, Run, document, print_run, progress

MOST_REQUESTS = 4096
"""All prompts of a run are made before it starts."""
MOST_TOKENS = 2**20
"""The longest context of the model."""
MOST_SECONDS = 86_400
MOST_PORT = 65_535

Count = Annotated[int, Parameter(converter=read_whole, n_tokens=1)]


class Job(Struct, frozen=True):
    """One needle with the length of its prompt."""

    needle: Needle
    num_tokens: int


def needle(  # noqa: PLR0913 - the options of a command
    *,
    url: str,
    reference_url: str | None = None,
    concurrency: str = "1,8,16,32",
    min_tokens: Count = 256,
    max_tokens: Count = 4096,
    needles: Count = 2,
    seed: Count = 0,
    model: str | None = None,
    logprob_bound: float = 0.01,
    timeout_s: float = 600.0,
    output: Annotated[
        Literal["text", "json"], Parameter(name=["--output", "-o"], converter=read_choice, n_tokens=1)
    ] = "text",
) -> int:
    """`kimictl needle`; its help stands beside the list of commands.

    Parameters
    ----------
    url
        The service, for example http://127.0.0.1:8000.
    reference_url
        A second service with the same checkpoint, for example one process alone. Each prompt is sent to it too, one at
        a time; token ids must be equal and log-probabilities within the bound.
    concurrency
        Levels, separated by commas.
    min_tokens
        Shortest prompt, in tokens of the tiny model's vocabulary.
    max_tokens
        Longest prompt; lengths are spread evenly between the two.
    needles
        Needles hidden in each prompt; one of them is asked for.
    seed
        Prompts and lengths follow from it.
    model
        Name of the model; the first one that is served by default.
    logprob_bound
        Largest allowed difference of a log-probability from the reference.
    timeout_s
        Longest silence of an answer before it counts as failed, in seconds.
    output
        text or json.
    """
    for flag, address in (("--url", url), ("--reference-url", reference_url)):
        _check_address(flag, address)
    _check_bounds(timeout_s, logprob_bound)
    levels = _levels(concurrency)
    lengths = spread(sum(levels), min_tokens, max_tokens, needles, seed)
    jobs = [Job(*pair) for pair in zip(make_run(seed, lengths, needles), lengths, strict=True)]
    try:
        run = asyncio.run(_run(url, reference_url, model, timeout_s, Plan(levels, jobs, logprob_bound)))
    except KeyboardInterrupt:
        sys.stderr.write("kimictl: interrupted; the requests were cancelled\n")
        return INTERRUPTED
    if output == "json":
        sys.stdout.write(json.dumps(document(run), indent=2) + "\n")
    else:
        print_run(run)
    return 0 if run.is_right else 1


class Plan(Struct, frozen=True):
    """What a run sends."""

    levels: list[int]
    jobs: list[Job]
    logprob_bound: float


def _check_address(flag: str, address: str | None) -> None:
    if address is None:
        return
    try:
        url = httpx.URL(address)
    except httpx.InvalidURL as error:
        raise refuse(flag, repr(address), f"an address ({error})", "try http://127.0.0.1:8000") from error
    if url.scheme not in ("http", "https") or not url.host or (url.port or 0) > MOST_PORT:
        raise refuse(
            flag,
            repr(address),
            "an address with http:// or https:// and a port that can be",
            "try http://127.0.0.1:8000",
        )


def _check_bounds(timeout_s: float, logprob_bound: float) -> None:
    """NaN is within no bounds."""
    if not 0 < timeout_s <= MOST_SECONDS:
        raise refuse("--timeout-s", f"{timeout_s:g}", f"above 0 and up to {MOST_SECONDS:,} s", "try 600")
    if not 0 <= logprob_bound < math.inf:
        raise refuse("--logprob-bound", f"{logprob_bound:g}", "a difference from 0", "try 0.01")


def _levels(text: str) -> list[int]:
    try:
        levels = [int(part) for part in text.split(",")]
    except ValueError:
        levels = [0]
    if min(levels) < 1 or sum(levels) > MOST_REQUESTS:
        expected = f"numbers from 1, separated by commas, together at most {MOST_REQUESTS:,}"
        raise refuse("--concurrency", repr(text), expected, "try 1,8,16,32")
    return levels


def spread(count: int, min_tokens: int, max_tokens: int, needles: int, seed: int) -> list[int]:
    """`count` prompt lengths, even from min to max, in an order that the seed gives. Raises InvalidSpec."""
    if not 1 <= needles <= MAX_NEEDLES:
        raise refuse("--needles", str(needles), f"1 to {MAX_NEEDLES}", "choose fewer")
    least = FRAME_TOKENS + needles * NEEDLE_TOKENS
    if min_tokens < least:
        remedy = "raise it or hide fewer needles"
        raise refuse("--min-tokens", str(min_tokens), f"at least {least} for {needles} needles", remedy)
    if not min_tokens <= max_tokens <= MOST_TOKENS:
        raise refuse("--max-tokens", str(max_tokens), f"--min-tokens, {min_tokens}, to {MOST_TOKENS:,}", "correct it")
    step = (max_tokens - min_tokens) / max(1, count - 1)
    lengths = [min_tokens + round(step * index) for index in range(count)]
    random.Random(seed).shuffle(lengths)  # noqa: S311 - test data, not a secret
    return lengths


async def _run(url: str, reference_url: str | None, model: str | None, timeout_s: float, plan: Plan) -> Run:
    async with _client(timeout_s) as http:
        services = [await _service(http, base, model) for base in (url, reference_url) if base]
        with progress() as advance:
            levels = await _all_levels(http, services[0], plan, advance("needles", len(plan.jobs)))
            if reference_url is None:
                return Run(url, services[0].model, levels)
            differences = await _differences(http, services[1], plan, levels, advance("reference", len(plan.jobs)))
    levels = [
        replace(level, rows=[replace(row, difference=differences[row.number]) for row in level.rows])
        for level in levels
    ]
    return Run(url, services[0].model, levels, reference_url, plan.logprob_bound)


def _client(timeout_s: float) -> httpx.AsyncClient:
    # a proxy of the environment is for the Internet, not for the service under test
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(timeout=httpx.Timeout(timeout_s, connect=10), limits=limits, trust_env=False)


async def _service(http: httpx.AsyncClient, url: str, model: str | None) -> Service:
    base = url.rstrip("/").removesuffix("/v1")
    return Service(base, await choose_model(http, base, model))


async def _all_levels(
    http: httpx.AsyncClient, service: Service, plan: Plan, advance: Callable[[], None]
) -> list[Level]:
    levels = []
    start = 0
    clock = asyncio.get_running_loop().time
    for concurrency in plan.levels:
        numbers = range(start, start + concurrency)
        began_s = clock()
        rows = await asyncio.gather(*(_row(http, service, plan.jobs[number], number, advance) for number in numbers))
        levels.append(Level(concurrency, clock() - began_s, list(rows)))
        start += concurrency
    return levels


async def _row(http: httpx.AsyncClient, service: Service, job: Job, number: int, advance: Callable[[], None]) -> Row:
    answer = await ask(http, service, job.needle.prompt_text)
    advance()
    return Row(number, job.num_tokens, job.needle.key, job.needle.answer, answer)


async def _differences(
    http: httpx.AsyncClient, service: Service, plan: Plan, levels: Sequence[Level], advance: Callable[[], None]
) -> list[Difference]:
    """One prompt at a time, so that the reference never has two in a batch."""
    rows = [row for level in levels for row in level.rows]
    differences = []
    for row, job in zip(rows, plan.jobs, strict=True):
        reference: Awaitable[Answer] = ask(http, service, job.needle.prompt_text)
        differences.append(compare(row.answer, await reference, plan.logprob_bound))
        advance()
    return differences
