"""Measured runs in a file: what `kimictl needle -o json` or `make bench` wrote, or a small YAML written by hand.

The YAML, of which `chip`, `layout` and one point are needed when no option of the command says them:

    chip: mi300x                      # a HardwareProfile
    engine: kimi-worker               # what was measured; kimi-worker when absent
    architecture: kimi-k3
    layout: {nodes: 2, gpusPerNode: 8, tensorParallel: 2}
    graphs: full                      # or piecewise
    prefillBatchedTokens: 2048        # of one step of prefill; the profile's when absent
    groups: 1                         # groups of the role that shared the load
    measuredOn: cluster a, 2026-11-29
    decode:
      - {concurrency: 8, contextTokens: 4096, tpotMs: 96.4}    # 8 in decode at once, without those that wait
    prefill:
      - {promptTokens: 100000, seconds: 49.4}
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from kimi_operator.api.base import ApiModel, parse
from kimi_operator.cli.files import read_objects
from kimi_operator.cli.flags import refuse
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.planner.roofline import Graphs
from kimi_operator.profiles import architecture
from kimi_operator.profiles.measurements import MODEL, LayoutFigures, Name, Rate, Tokens
from kimi_operator.profiles.support import WORKER

NEEDLE_ANSWER_TOKENS = 64
"""Most tokens of a needle's answer; half of them stand for the context of its middle."""
BENCH_PROMPT_TOKENS, BENCH_ANSWER_TOKENS, BENCH_LONG_PROMPT_TOKENS = 8, 64, 4000
"""What `make bench` sends to the tiny model."""
BENCH_ARCHITECTURE = "kimi-k3-tiny"
BENCH_STEP_TOKENS = 512
"""Of the standalone worker that it starts, whatever a profile says."""

_RUN = "an object with chip, layout, and lists decode or prefill"
_BENCH_STEP = re.compile(r"decode_step_ms_batch_(\d+)")


class DecodePoint(ApiModel):
    """Mean time between two tokens while `concurrency` requests decode, each at about `context_tokens`."""

    concurrency: int = Field(ge=1, le=1_000_000)
    context_tokens: Tokens
    tpot_ms: Rate


class PrefillPoint(ApiModel):
    """Time of one prompt alone in its group, from the first chunk to the first token."""

    prompt_tokens: Tokens
    seconds: Rate


class Results(ApiModel):
    """A measured run."""

    chip: Name | None = None
    engine: Name = WORKER
    architecture: Name = MODEL
    layout: LayoutFigures | None = None
    graphs: Graphs = Graphs.FULL
    prefill_batched_tokens: int | None = Field(default=None, ge=1, le=1_048_576)
    """Most prompt tokens of one step; None: as in the profile."""
    groups: int = Field(default=1, ge=1, le=1024)
    measured_on: Annotated[str, Field(min_length=1, max_length=160)] | None = None
    decode: tuple[DecodePoint, ...] = Field(default=(), max_length=1000)
    prefill: tuple[PrefillPoint, ...] = Field(default=(), max_length=1000)


def read_results(file: Path, options: Mapping[str, Any]) -> Results:
    """Read a run; `options` fill in what the file does not state, by the file's names.

    Raises InvalidSpec that names file and field: unreadable, neither of the shapes, without points, at odds with an
    option, or longer than the model's longest sequence.
    """
    document = _load(file)
    stated = _stated(document, str(file))
    for name, value in options.items():
        if name in stated and stated[name] != value:
            expected = f"{value!r}, as the option says"
            raise refuse(f"{file}: {name}", repr(stated[name]), expected, "leave one of the two out")
    results = parse(Results, {**stated, **options}, str(file))
    if not results.decode and not results.prefill:
        raise refuse(f"{file}: decode", "no point", "at least one point of decode or prefill", "measure one")
    if too_long := tuple(_too_long(results, str(file))):
        raise InvalidSpec(too_long)
    return results


def _too_long(results: Results, where: str) -> Iterator[Problem]:
    """Contexts beyond the model's longest sequence, and prompts that leave no place for an answer."""
    most = architecture(results.architecture).max_positions
    contexts = {f"decode.{i}.contextTokens": point.context_tokens for i, point in enumerate(results.decode)}
    prompts = {f"prefill.{i}.promptTokens": point.prompt_tokens + 1 for i, point in enumerate(results.prefill)}
    for field, tokens in (contexts | prompts).items():
        if tokens > most:
            is_prompt = field in prompts
            expected = (
                f"{'less than' if is_prompt else 'at most'} {most:,}, the longest sequence of {results.architecture}"
            )
            remedy = "correct it, or name the model that was served in architecture"
            yield Problem(f"{where}.{field}", f"{tokens - is_prompt:,}", expected, remedy)


def _load(file: Path) -> Mapping[str, Any]:
    found = read_objects(file, _RUN)
    if len(found) != 1:
        raise refuse(str(file), f"{len(found)} documents", _RUN, "mend the file")
    if "kind" in found[0]:
        raise refuse(f"{file}: kind", repr(found[0]["kind"]), "a measured run, no manifest", "name another file")
    return found[0]


def _stated(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The run in the form of the YAML, whichever shape it came in."""
    if "levels" in document:
        return _needle(document, where)
    if isinstance(document.get("engine"), Mapping):
        return _bench(document, document["engine"])
    return dict(document)


def _needle(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Levels of `kimictl needle -o json`. A run that lost needles is refused: wrong answers may well be fast."""
    if document.get("right") is not True:
        found, asked = document.get("found"), document.get("asked")
        raise refuse(f"{where}: right", f"{found} of {asked} needles", "every needle", "mend the service first")
    levels = document["levels"]
    if not isinstance(levels, list) or not all(isinstance(level, Mapping) for level in levels):
        raise refuse(f"{where}: levels", repr(levels)[:80], "a list of objects", "save the output of needle -o json")
    points = [_needle_point(level, f"{where}: levels.{i}") for i, level in enumerate(levels)]
    return {
        "measuredOn": f"needles at {document.get('url', 'a service')}",
        "decode": [point for point in points if point is not None],
    }


def _needle_point(level: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """None for a level whose answers were too short to have a time a token.

    Its concurrency counts those that wait for prefill too, whom no decode step serves.
    """
    shortest, longest = level.get("prompt_tokens_min"), level.get("prompt_tokens_max")
    if not isinstance(shortest, int) or not isinstance(longest, int):
        got = f"{shortest!r} and {longest!r}"
        raise refuse(where, got, "prompt_tokens_min and prompt_tokens_max", "save needle -o json unchanged")
    if not level.get("tpot_p50_ms"):
        return None
    decoding = level.get("decoding_mean")
    if not isinstance(decoding, int | float) or not 0 < decoding < math.inf:
        got, remedy = "nothing" if decoding is None else repr(decoding), "ask again, or write decode points by hand"
        raise refuse(f"{where}.decoding_mean", got, "the requests that decoded at once", remedy)
    context = (shortest + longest + NEEDLE_ANSWER_TOKENS) // 2
    return {"concurrency": max(1, round(decoding)), "contextTokens": context, "tpotMs": level["tpot_p50_ms"]}


def _bench(document: Mapping[str, Any], engine: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of `make bench`: the tiny model in one process."""
    context = BENCH_PROMPT_TOKENS + BENCH_ANSWER_TOKENS // 2
    steps = [(_BENCH_STEP.fullmatch(str(name)), value) for name, value in engine.items()]
    stated: dict[str, Any] = {
        "architecture": BENCH_ARCHITECTURE,
        "prefillBatchedTokens": BENCH_STEP_TOKENS,
        "layout": {"nodes": 1, "gpusPerNode": 1, "tensorParallel": 1},
        "measuredOn": f"make bench, commit {document.get('commit', 'unknown')}, {document.get('machine', 'unknown')}",
        "decode": [
            {"concurrency": int(match[1]), "contextTokens": context, "tpotMs": value} for match, value in steps if match
        ],
    }
    rate = engine.get("prefill_tokens_per_s")
    if isinstance(rate, int | float) and rate > 0:
        stated["prefill"] = [{"promptTokens": BENCH_LONG_PROMPT_TOKENS, "seconds": BENCH_LONG_PROMPT_TOKENS / rate}]
    return stated
