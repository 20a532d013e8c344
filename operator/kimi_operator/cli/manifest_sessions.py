"""What a manifest's workload says of sessions, as defaults of flags, and what of it a replay does not use. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from kimi_operator.cli.flags import flag_name
from kimi_operator.cli.session_flags import SessionFlags
from kimi_operator.planner.workload import Lengths, Workload

LATER = " (of first turns alone: later prompts hold the session so far)"
OF_TRACE = "the trace has its own"
OWN_PACE = "sessions ask when they are answered, at no fixed rate; --agents and --ramp set the load"


class FromManifest(Struct, frozen=True):
    """Nothing where the workload says nothing, or where a flag or a trace says it."""

    agents: int | None = None
    first_prompt: Lengths | None = None
    output: Lengths | None = None
    reuse: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    taken: tuple[str, ...] = ()
    """Fields that are used, and as what."""
    unused: tuple[str, ...] = ()
    """Fields that are not, and why."""


def from_manifest(workload: Workload, flags: SessionFlags) -> FromManifest:
    """Flags win, and a trace states all but reuse and targets."""
    taken, unused, stated = [], [], set()
    for field, flag in _fields(workload):
        if flag == "reuse" and flags.reuse is None:
            taken.append("reuse (of earlier turns alone)")
        elif getattr(flags, flag) is not None:
            unused.append(f"{field} ({flag_name(flag)} says otherwise)")
            continue
        elif flag != "reuse" and flags.trace is not None:
            unused.append(f"{field} ({OF_TRACE})")
            continue
        else:
            taken.append(f"{field} as {flag_name(flag)}{LATER if field == 'prompt' else ''}")
        stated.add(field)
    if workload.requests_per_second is not None:
        unused.append(f"requestsPerSecond ({OWN_PACE if flags.trace is None else OF_TRACE})")
    targets = workload.ttft_s is not None or workload.tpot_s is not None
    return FromManifest(
        agents=workload.concurrency if "concurrency" in stated else None,
        first_prompt=workload.prompt if "prompt" in stated else None,
        output=workload.output if "output" in stated else None,
        reuse=float(workload.reuse) if "reuse" in stated else None,
        ttft_s=workload.ttft_s,
        tpot_s=workload.tpot_s,
        taken=(*taken, *(["targets"] if targets else [])),
        unused=tuple(unused),
    )


def _fields(workload: Workload) -> Iterator[tuple[str, str]]:
    """Stated fields and the flags that they are defaults of."""
    yield "prompt", "first_prompt_tokens"
    yield "output", "output_tokens"
    if workload.reuse:
        yield "reuse", "reuse"
    if workload.concurrency is not None:
        yield "concurrency", "agents"
