"""A search in each form: for a terminal, as Markdown or one HTML page from the same rows, and for scripts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from typing import Any

from msgspec import to_builtins
from msgspec.structs import astuple

from kimi_operator.api.deployment import Role
from kimi_operator.cli.cost import money
from kimi_operator.cli.document import dumped
from kimi_operator.cli.figures import number
from kimi_operator.cli.search import Found
from kimi_operator.cli.text import refusal_text
from kimi_operator.errors import Problem
from kimi_operator.planner.memory import GroupShape
from kimi_operator.planner.search import Candidate, Reason, Refusal
from kimi_operator.planner.units import bytes_text, counted

SHOWN = 10
SHAPES_SHOWN = 6
COLUMNS = {"": 4, "nodes": 5, "prefill": 32, "decode": 32, "maxNumSeqs": 10, "room for": 8, "longest": 9, "tokens/s": 9}
TEXTS = ("prefill", "decode")
"""Columns of words; all others are of numbers."""
COST_HEAD = "a million output tokens"
LEGEND = (
    "maxNumSeqs is of a lane, in prefill / in decode; room for: requests that decode could run at once, whatever is "
    "asked for; the longest request is what both roles hold beside them"
)
TOLD = "Misses and doubts"
PROBLEM_HEADS = ("field", "got", "expected", "remedy")


def search_view(found: Found, output: str) -> str:
    """A search in the form that is asked for."""
    if output in ("json", "yaml"):
        return dumped(search_document(found), output)
    if output == "html":
        return _page(found)
    text = _markdown(found) if output == "markdown" else _text(found)
    return "".join(f"{line}\n" for line in text)


def _text(found: Found) -> Iterator[str]:
    result = found.result
    yield _head(found)
    yield from _before(found)
    if result.ranked:
        yield LEGEND
        yield _columns(_heads(found))
    for candidate, cells in zip(result.ranked, _rows(found), strict=False):
        yield _columns(cells)
        yield from (f"      {told}: {problem}" for told, problem in _told(candidate))
    yield from _more(found)
    if result.shortage is not None:
        yield from refusal_text((result.shortage,))
    yield from _after(found)


def _markdown(found: Found) -> Iterator[str]:
    # Each form loads its own parts.
    from kimi_operator.cli.markdown import cell, refusal_markdown, table  # noqa: PLC0415

    result = found.result
    yield f"# {_title(found)}\n"
    yield f"**{cell(_head(found))}**\n"
    yield from (f"- {cell(line)}" for line in _before(found))
    if result.ranked:
        yield f"\n{LEGEND}\n"
        yield from table(_heads(found), _rows(found))
    if told := list(_told_by_place(found)):
        yield f"\n## {TOLD}\n"
        yield from (f"- {place} {cell(f'{word}: {problem}')}" for place, word, problem in told)
    if result.shortage is not None:
        yield ""
        yield from refusal_markdown((result.shortage,))
    yield ""
    yield from (f"- {cell(line)}" for line in (*_more(found), *_after(found)))


def _page(found: Found) -> str:
    from kimi_operator.cli.page import page  # noqa: PLC0415

    return page(_title(found), _body(found))


def _body(found: Found) -> Iterator[str]:
    from kimi_operator.cli.page import table  # noqa: PLC0415

    result = found.result
    yield f'<p class="verdict{"" if found.fits else " bad"}">{escape(_head(found))}</p>'
    yield from (f"<p>{escape(line)}</p>" for line in _before(found))
    if result.ranked:
        yield f"<p>{LEGEND}</p>"
        heads = _heads(found)
        numbers = [column for column, head in enumerate(heads) if head not in TEXTS]
        yield from table(heads, _rows(found), numbers=numbers)
    if told := list(_told_by_place(found)):
        yield f"<h2>{TOLD}</h2>"
        rows = ((place, word, *astuple(problem)) for place, word, problem in told)
        yield from table(("", "", *PROBLEM_HEADS), rows)
    if result.shortage is not None:
        yield from table(PROBLEM_HEADS, [astuple(result.shortage)])
    yield from (f'<p class="dim">{escape(line)}</p>' for line in (*_more(found), *_after(found)))


def _title(found: Found) -> str:
    return f"Layouts of {counted(found.wanted.num_nodes, 'node')} of {found.profile}"


def _head(found: Found) -> str:
    """How many layouts fit, and for what they were searched."""
    wanted, work, num = found.wanted, found.wanted.workload, len(found.result.ranked)
    longest = "" if wanted.max_model_len is None else f", requests of up to {wanted.max_model_len:,} (maxModelLen)"
    assumed = " (assumed: none was given)" if wanted.is_assumed else ""
    fit = f"{counted(num, 'layout')} {'fits' if num == 1 else 'fit'}" if num else "no layout fits"
    refused = len({each.shape for each in found.result.refused})
    return (
        f"{fit} {counted(wanted.num_nodes, 'node')} of {found.profile} with prompts of {work.prompt}, "
        f"answers of {work.output}{assumed}{longest}; {counted(refused, 'shape')} of a group "
        f"{'does' if refused == 1 else 'do'} not"
    )


def _before(found: Found) -> Iterator[str]:
    """What to know of the ranking."""
    if found.not_kept:
        yield f"chosen here, not kept from the manifest: {', '.join(found.not_kept)}"
    yield from (f"warning: {warning}" for warning in found.warnings)
    if found.no_speed:
        yield f"not ranked by throughput: {found.no_speed}"
    if found.result.ranked:
        yield f"ranked by {found.result.objective}"


def _more(found: Found) -> Iterator[str]:
    if (beyond := len(found.result.ranked) - SHOWN) > 0:
        yield f"and {beyond} more; -o json lists all"
    if found.first is not None:
        yield str(found.first)


def _after(found: Found) -> Iterator[str]:
    """What does not fit, and where figures come from."""
    yield from map(_refused, _by_reason(found.result.refused))
    if found.result.refused:
        yield "-o json gives the arithmetic of each shape"
    if found.price is not None and found.result.ranked:
        yield f"cost at {found.price:g} a GPU-hour, all GPUs over output tokens alone"
    if found.calibrated_on and found.result.ranked:
        yield f"throughput calibrated on {found.calibrated_on}"


def _told(candidate: Candidate) -> Iterator[tuple[str, Problem]]:
    yield from (("misses", problem) for problem in candidate.misses)
    yield from (("not sure", problem) for problem in candidate.doubts)


def _told_by_place(found: Found) -> Iterator[tuple[str, str, Problem]]:
    for place, candidate in enumerate(found.result.ranked[:SHOWN], start=1):
        yield from ((f"{place}.", word, problem) for word, problem in _told(candidate))


def _by_reason(refused: Iterable[Refusal]) -> Iterator[list[Refusal]]:
    """Refusals of equal reasons together, each shape once; what is nearest to fitting comes first."""
    groups: dict[Reason, dict[GroupShape, Refusal]] = {}
    for refusal in refused:
        groups.setdefault(refusal.reason, {}).setdefault(refusal.shape, refusal)
    for group in groups.values():
        yield sorted(group.values(), key=lambda refusal: refusal.missing_bytes)


def _refused(group: list[Refusal]) -> str:
    """One line for all refusals of one reason, with what the nearest to fitting asks for."""
    first, num = group[0], len(group)
    names = ", ".join(map(_named_shape, group[:SHAPES_SHOWN]))
    more = f" and {num - SHAPES_SHOWN} more" if num > SHAPES_SHOWN else ""
    whose = "" if num == 1 else "of the first "
    told = f"{first.reason}: {whose}expected {first.problem.expected}; {first.problem.remedy}"
    return f"refused {counted(num, 'shape')} of a group ({names}{more}): {told}{_too_large(group)}"


def _too_large(group: list[Refusal]) -> str:
    """The weights that memory is too small for: those of a GPU, or all of them where all GPUs together are too few."""
    split = [refusal for refusal in group if refusal.weights_bytes and not refusal.total]
    told = [refusal.total for refusal in group if refusal.total][:1]
    if split:
        least, most = (bytes_text(pick(refusal.weights_bytes for refusal in split)) for pick in (min, max))
        held = least if least == most else f"{least} to {most}"
        whose = f"each of {split[0].shape.ranks} GPUs" if len(split) == 1 else "a GPU"
        told.insert(0, f"{whose} would hold {held} of weights")
    return "".join(f"; {text}" for text in told)


def _named_shape(refusal: Refusal) -> str:
    shape = refusal.shape
    size = f"{shape.nodes} x {counted(shape.gpus_per_node, 'GPU')}"
    return size if refusal.reason is Reason.UNEVEN else f"{size} TP{shape.tensor_parallel}"


def _heads(found: Found) -> tuple[str, ...]:
    return tuple(COLUMNS) if found.price is None else (*COLUMNS, COST_HEAD)


def _rows(found: Found) -> Iterator[tuple[str, ...]]:
    """The first layouts, in the order of the columns."""
    for place, candidate in enumerate(found.result.ranked[:SHOWN], start=1):
        cost = found.cost(candidate)
        price = () if found.price is None else ("-" if cost is None else money(cost),)
        yield (*_cells(place, candidate), *price)


def _cells(place: int, candidate: Candidate) -> tuple[str, ...]:
    layout, rate = candidate.layout, candidate.throughput
    shapes = (f"{layout.groups(role)} x {layout.shape(role).in_nodes}" for role in Role)
    return (
        f"{place}.",
        f"{layout.nodes}",
        *shapes,
        " / ".join(f"{each.max_num_seqs:,}" for each in (candidate.prefill, candidate.decode)),
        f"{candidate.capacity:,}",
        f"{candidate.longest:,}",
        "-" if rate is None else number(rate),
    )


def _columns(cells: tuple[str, ...]) -> str:
    padded, widths = [], {**COLUMNS, COST_HEAD: len(COST_HEAD)}
    for cell, (head, width) in zip(cells, widths.items(), strict=False):
        padded.append(cell.ljust(width) if head in TEXTS else cell.rjust(width))
    return "  ".join(padded).rstrip()


def search_document(found: Found) -> dict[str, Any]:
    """For scripts."""
    result = found.result
    return {
        "feasible": bool(result.ranked),
        "meets_workload": found.fits,
        "profile": found.profile,
        "nodes": found.wanted.num_nodes,
        "max_model_len": found.wanted.max_model_len,
        "not_kept": list(found.not_kept),
        "objective": result.objective,
        "warnings": list(found.warnings),
        "calibrated_on": found.calibrated_on or found.no_speed,
        "ranked": [
            {
                "layout": str(candidate.layout),
                "nodes": candidate.layout.nodes,
                "capacity": candidate.capacity,
                "tokens_per_second": candidate.throughput,
                "cost_per_million_output_tokens": found.cost(candidate),
                "prefill": _role_document(candidate, Role.PREFILL),
                "decode": _role_document(candidate, Role.DECODE),
                "misses": [to_builtins(problem) for problem in candidate.misses],
                "not_sure": [to_builtins(problem) for problem in candidate.doubts],
            }
            for candidate in result.ranked
        ],
        "to_plan_first": None if found.first is None else {"command": found.first.command, "spec": found.first.sizes},
        "refused": [
            {
                "roles": list(map(str, refusal.roles)),
                "shape": str(refusal.shape),
                "reason": str(refusal.reason),
                **to_builtins(refusal.problem),
            }
            for refusal in result.refused
        ],
        "shortage": None if result.shortage is None else to_builtins(result.shortage),
    }


def _role_document(candidate: Candidate, role: Role) -> dict[str, Any]:
    layout, shape = candidate.layout, candidate.layout.shape(role)
    solution = candidate.prefill if role is Role.PREFILL else candidate.decode
    return {
        "groups": layout.groups(role),
        "nodes_per_group": shape.nodes,
        "gpus_per_node": shape.gpus_per_node,
        "tensor_parallel": shape.tensor_parallel,
        "max_num_seqs": solution.max_num_seqs,
        "max_model_len": candidate.longest,
        "binds": solution.binds.value,
    }
