"""Flags of `kimictl plan`: a deployment, a workload, and what to show.

No pydantic here, which would be asked to check every flag a second time while the command line is read; and types are
no texts here, which would have to be read once more for each flag.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, TypeAlias, get_args

from cyclopts import Group, Parameter, Token

from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.numerals import MOST_EXACT, whole

SEARCHED = ("chip", "architecture", "kv_cache", "max_model_len")
"""Flags of a deployment that say no layout."""

MANIFEST = Group("A deployment from flags, instead of --file", sort_key=1)
WORKLOAD = Group("The workload", sort_key=2)
VIEWS = Group("What to show", sort_key=3)


MOST_WRITTEN = 40
"""Characters of a number or a time; no sensible one has half of them."""
_INSIDE = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_SUCH_AS = "write one such as 8"
_INFINITE = re.compile(r"[+-]?inf(inity)?", re.IGNORECASE)


def read_whole(_: object, tokens: Sequence[Token]) -> int:
    """A whole number as it is written; 1.5 is none, though cyclopts would round it. Raises InvalidSpec."""
    text = tokens[0].value.strip()
    try:
        if len(text) <= MOST_WRITTEN:
            return int(text)
    except ValueError:
        pass
    raise refuse(tokens[0].keyword or "", shown(text), "a whole number", _other_whole(text))


def _other_whole(text: str) -> str:
    """What to write instead, where the text is another number."""
    if (meant := whole(text)) is not None:
        return f"write {meant}"
    try:
        number = float(text)
    except ValueError:
        return _SUCH_AS
    if not math.isfinite(number) and len(text) <= MOST_WRITTEN:
        return _SUCH_AS
    if abs(number) >= MOST_EXACT:
        return "write one of fewer digits"
    low = math.floor(number)
    return f"write {low}" if low == number else f"write {low} or {low + 1}"


def read_choice(choices: object, tokens: Sequence[Token]) -> str:
    """One of the texts that a flag takes, in capitals or not. Raises ValueError, which the parser says by the flag."""
    return known_as(tokens[0].value, get_args(choices))


def known_as(text: str, names: Iterable[str]) -> str:
    """The name that is written, in capitals or not. Raises ValueError for what is none of them, or might be several."""
    names = list(names)
    alike = [name for name in names if name.lower() == text.lower()]
    if text not in names and len(alike) != 1:
        raise ValueError(text)
    return text if text in names else alike[0]


def read_number(_: object, tokens: Sequence[Token]) -> float:
    """A number; what stands around one, as a currency does, is shown how to be left out. Raises InvalidSpec."""
    text = tokens[0].value.strip()
    try:
        number = float(text)
        if not math.isinf(number) or _INFINITE.fullmatch(text):
            return number
        remedy = "write one of fewer digits"
    except ValueError:
        remedy = _other_number(text)
    raise refuse(tokens[0].keyword or "", shown(text), "a number", remedy)


def _other_number(text: str) -> str:
    inside = _INSIDE.findall(text)
    if len(inside) != 1 or len(inside[0]) > MOST_WRITTEN:
        return "write one such as 0.9 or 2.5"
    return f"write {float(inside[0]) / 100:g}" if text.endswith("%") else f"write {inside[0]}"


def shown(text: str) -> str:
    """A text of a command line, in a message."""
    if len(text) <= MOST_WRITTEN:
        return repr(text)
    return f"{text[:MOST_WRITTEN]!r} and {len(text) - MOST_WRITTEN:,} characters more"


Number: TypeAlias = Annotated[float | None, Parameter(converter=read_number, n_tokens=1)]
Whole: TypeAlias = Annotated[int | None, Parameter(converter=read_whole, n_tokens=1)]


@dataclass(frozen=True)
class DeploymentFlags:
    """A KimiDeployment in flags; both roles have the same shape."""

    chip: Annotated[str | None, Parameter(group=MANIFEST, help="HardwareProfile of the nodes, such as mi300x.")] = None
    architecture: Annotated[str | None, Parameter(group=MANIFEST, help="kimi-k3 (the default) or kimi-k3-tiny.")] = None
    nodes: Annotated[
        Whole, Parameter(group=MANIFEST, help="Nodes of all groups together; groups are equally large.")
    ] = None
    nodes_per_group: Annotated[
        Whole, Parameter(group=MANIFEST, help="Nodes of a group; follows from --nodes and the groups.")
    ] = None
    gpus_per_node: Annotated[Whole, Parameter(group=MANIFEST, help="GPUs of a node; all by default.")] = None
    tensor_parallel: Annotated[Whole, Parameter(group=MANIFEST, help="GPUs of a lane; 2 by default.")] = None
    prefill_groups: Annotated[Whole, Parameter(group=MANIFEST, help="1 by default.")] = None
    decode_groups: Annotated[Whole, Parameter(group=MANIFEST, help="1 by default.")] = None
    max_num_seqs: Annotated[
        Whole,
        Parameter(group=MANIFEST, help="Running requests a lane; as the workload needs and memory allows by default."),
    ] = None
    max_model_len: Annotated[Whole, Parameter(group=MANIFEST, help="Longest prompt plus answer, in tokens.")] = None
    kv_cache: Annotated[str | None, Parameter(group=MANIFEST, help="Auto (the profile's), BF16 or FP32.")] = None

    @property
    def given(self) -> tuple[str, ...]:
        """Flags that were stated, as the user writes them."""
        return tuple(flag_name(field.name) for field in fields(self) if getattr(self, field.name) is not None)


@dataclass(frozen=True)
class View:
    """What to show of a plan."""

    what_if: Annotated[
        list[str] | None,
        Parameter(
            group=VIEWS,
            negative=(),
            help="KEY=VALUE, such as decode.maxNumSeqs=32, nodes=8, chip=mi325x, profile.reserve.symmetricHeap=16Gi or "
            "workload.concurrency=256: show what changes. Can be repeated.",
        ),
    ] = None
    compare: Annotated[
        tuple[Path, Path] | None,
        Parameter(group=VIEWS, negative=(), help="Two manifests: show both plans side by side."),
    ] = None
    cost: Annotated[
        Number,
        Parameter(group=VIEWS, help="Price of a GPU-hour: show what a million tokens cost."),
    ] = None
    explain: Annotated[
        str | None, Parameter(group=VIEWS, help="A line or figure, such as 'KV pages', decode.maxNumSeqs or tpot.")
    ] = None
    search: Annotated[
        Whole, Parameter(group=VIEWS, help="Number of nodes: rank the layouts that fit them, for --chip or -f.")
    ] = None
    check: Annotated[
        bool,
        Parameter(
            group=VIEWS, negative=(), help="Compare the planner with published figures and times, fitted and held out."
        ),
    ] = False

    @property
    def chosen(self) -> tuple[str, ...]:
        """Views that exclude each other, as the user writes them."""
        stated = {
            "--what-if": bool(self.what_if),
            "--compare": self.compare is not None,
            "--explain": self.explain is not None,
            "--search": self.search is not None,
            "--check": self.check,
        }
        return tuple(name for name, is_stated in stated.items() if is_stated)


@dataclass(frozen=True)
class WorkloadFlags:
    """A workload in flags, which win over --workload."""

    workload: Annotated[
        Path | None,
        Parameter(
            group=WORKLOAD,
            allow_leading_hyphen=True,
            help="YAML with prompt and output (each N, {uniform: {min: N, max: N}}, {logNormal: {median: N, p95: N}} "
            "or {empirical: [N, N]}), reuse, concurrency and targets ({ttftSeconds: 5, tpotSeconds: 0.06}).",
        ),
    ] = None
    prompt_tokens: Annotated[str | None, Parameter(group=WORKLOAD, help="N, or MIN-MAX.")] = None
    output_tokens: Annotated[str | None, Parameter(group=WORKLOAD, help="N, or MIN-MAX.")] = None
    reuse: Annotated[
        Number, Parameter(group=WORKLOAD, help="Share of prompt tokens that the cache has, 0 to below 1.")
    ] = None
    concurrency: Annotated[
        Whole,
        Parameter(
            group=WORKLOAD, help="Requests at once, in prefill or in decode; as many as decode holds by default."
        ),
    ] = None
    requests_per_second: Annotated[
        Number, Parameter(group=WORKLOAD, help="Instead of --concurrency; needs --target-tpot.")
    ] = None
    target_tpot: Annotated[
        str | None, Parameter(group=WORKLOAD, help="Longest time between two tokens, such as 60ms.")
    ] = None
    target_ttft: Annotated[
        str | None, Parameter(group=WORKLOAD, help="Longest time to the first token, such as 5s.")
    ] = None

    @property
    def stated(self) -> tuple[str, ...]:
        """Flags that were stated, as the user writes them."""
        return tuple(flag_name(field.name) for field in fields(self) if getattr(self, field.name) is not None)

    @property
    def given(self) -> frozenset[str]:
        """Flags that were stated, and those that they need: a rate needs a target."""
        needs_target = self.requests_per_second is not None and self.workload is None
        return frozenset((*self.stated, "--target-tpot") if needs_target else self.stated)


def as_typed(flags: DeploymentFlags | WorkloadFlags) -> Iterator[str]:
    """Words of a command line that state the same flags."""
    for field in fields(flags):
        if (value := getattr(flags, field.name)) is not None:
            yield from (flag_name(field.name), str(value))


def flag_name(field: str) -> str:
    """The flag of a field of the dataclasses above."""
    return "--" + field.replace("_", "-")


def refuse(field: str, got: str, expected: str, remedy: str) -> InvalidSpec:
    """One thing that is wrong with what the user wrote."""
    return InvalidSpec((Problem(field, got, expected, remedy),))
