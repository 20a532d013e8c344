"""Two plans side by side: one before and after edits (`--what-if`), or those of two manifests (`--compare`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct, field, to_builtins
from msgspec.structs import replace

from kimi_operator.cli import DOES_NOT_FIT, FITS
from kimi_operator.cli.asking import LENGTHS, Asked, make_plan, outlook_of, own_workload
from kimi_operator.cli.changes import (
    Change,
    Inputs,
    changes,
    deployment_inputs,
    edited,
    factor_notes,
    heading,
    markdown_table,
    named,
    read_edited,
    table,
)
from kimi_operator.cli.cost import all_figures, cost_of
from kimi_operator.cli.document import dumped
from kimi_operator.cli.figures import Figure
from kimi_operator.cli.files import STANDARD_INPUT, profiles_of, read_objects
from kimi_operator.cli.flag_documents import DEPLOYMENT_FLAGS, typed, workload_document
from kimi_operator.cli.flags import DeploymentFlags, WorkloadFlags, refuse
from kimi_operator.cli.manifests import Planned, deployment_of, plan_deployment, read_documents
from kimi_operator.cli.outlook import Outlook, assumed_lengths, assumed_workload
from kimi_operator.cli.views import Answer, lines
from kimi_operator.errors import InvalidSpec, Problem
from kimi_operator.planner import Infeasible
from kimi_operator.planner.predict import Prediction
from kimi_operator.planner.space import longest_request
from kimi_operator.planner.units import counted


class _Side(Struct, frozen=True):
    """One of two plans: its figures, or why it does not fit."""

    figures: list[Figure]
    problems: tuple[Problem, ...]
    """Why it does not fit, or what it misses."""
    doubts: tuple[Problem, ...] = ()
    """Targets that it meets within the prediction's band alone."""
    times: Mapping[str, Prediction] = field(default_factory=dict)
    """By phase."""

    @property
    def text(self) -> str:
        """Whether it fits, in a cell."""
        unsure = "".join(f", not sure: {doubt}" for doubt in self.doubts)
        if not self.problems:
            return f"yes{unsure}"
        return ("yes, but misses " if self.figures else "no: ") + "; ".join(map(str, self.problems)) + unsure


def _side(planned: Planned, asked: Asked, price: float | None) -> _Side:
    if isinstance(planned.plan, Infeasible):
        return _Side([], asked.problems(planned.plan.problems))
    outlook = outlook_of(planned, asked)
    cost = None if price is None else cost_of(outlook, price)
    return _Side(all_figures(outlook, cost), outlook.misses, outlook.doubts, _times(outlook))


def _times(outlook: Outlook) -> dict[str, Prediction]:
    speed = outlook.speed or outlook.decode_speed
    times = {} if speed is None else {"decode, one request": speed.tpot_alone}
    return times if outlook.speed is None else {**times, "prefill, one prompt": outlook.speed.prefill}


def what_if(asked: Asked, edits: list[str], price: float | None, output: str) -> Answer:
    """Edits are made to what the flags or the manifest say, not to what the plan chose."""
    first = make_plan(asked)
    inputs = deployment_inputs(asked.deployment, first.profile, asked.workload)
    changed = edited(inputs, edits, asked.profiles)
    changed, notes = _with_assumed(changed, first)
    try:
        deployment, profile = read_edited(changed)
        profiles = {**asked.profiles, profile.metadata.name: profile}
        other = Asked(deployment, profiles, changed.workload, DEPLOYMENT_FLAGS if asked.is_from_flags else frozenset())
        after = _side(make_plan(other), other, price)
    except InvalidSpec as error:
        raise named(error, "--what-if") from error
    heads = ("before", heading(edits, deployment.spec))
    return _changes((_side(first, asked, price), after), heads, output, notes, is_whole=False)


def _with_assumed(changed: Inputs, first: Planned) -> tuple[Inputs, tuple[str, ...]]:
    """Beside one edited length of a workload that nobody stated, the other as it was assumed; and what says so."""
    missing = [name for name in LENGTHS if name not in changed.workload]
    if len(missing) != 1 or first.deployment.spec.workload is not None:
        return changed, ()
    if isinstance(first.plan, Infeasible):
        longest = longest_request(first.architecture, first.deployment.spec.model.max_model_len)
        lengths = assumed_lengths(first.profile.spec.limits, longest)
    else:
        assumed = assumed_workload(first, first.plan)
        lengths = assumed.prompt.longest, assumed.output.longest
    tokens = dict(zip(LENGTHS, lengths, strict=True))[missing[0]]
    note = f"workload.{missing[0]} is {counted(tokens, 'token')} (assumed: none was given)"
    return replace(changed, workload={**changed.workload, missing[0]: tokens}), (note,)


def compare(
    pair: tuple[Path, Path], files: list[Path], work: WorkloadFlags, price: float | None, output: str
) -> Answer:
    """Both manifests, each under its workload as the flags change it, with your own profiles of `files`.

    Raises InvalidSpec.
    """
    _check_files(files)
    sides = []
    for path in pair:
        documents = read_documents([*files, path])
        deployment = deployment_of([each for each in documents if each[0] == path], [path])
        written = typed(DeploymentFlags(), work)
        asked = Asked(
            deployment, profiles_of(documents), workload_document(work, own_workload(deployment)), work.given, written
        )
        try:
            sides.append(_side(plan_deployment(deployment, asked.profiles), asked, price))
        except InvalidSpec as error:
            raise named(error, str(path)) from error
    notes = ("both are the same file",) if pair[0].resolve() == pair[1].resolve() else ()
    return _changes((sides[0], sides[1]), (str(pair[0]), str(pair[1])), output, notes, is_whole=True)


def _check_files(files: list[Path]) -> None:
    """Raises InvalidSpec where beside the two manifests a third one is named, or one of them once more."""
    for file in files:
        # standard input can be read once
        found = () if file == STANDARD_INPUT else read_objects(file)
        if any(document.get("kind") == "KimiDeployment" for document in found):
            expected = "HardwareProfiles alone beside --compare, whose two manifests are planned"
            raise refuse("--file", f"{file} with a KimiDeployment", expected, f"leave out --file {file}")


def _changes(
    sides: tuple[_Side, _Side], heads: tuple[str, str], output: str, notes: tuple[str, ...] = (), *, is_whole: bool
) -> Answer:
    """What differs, and of two whole plans the verdict; for scripts what is equal too.

    Figures of one side alone say nothing, so then the verdict stands alone.
    """
    before, after = sides
    notes = (*notes, *factor_notes(before.times, after.times))
    rows = changes(before.figures, after.figures) if before.figures and after.figures else []
    verdict = Change("fits", before.text, after.text)
    # prices are there because somebody asked for them
    differing = [row for row in rows if row.is_changed or row.key.startswith("cost.")]
    status = DOES_NOT_FIT if after.problems or (is_whole and before.problems) else FITS
    head = [verdict] if is_whole or verdict.is_changed or after.problems or after.doubts else []
    if output in ("json", "yaml"):
        document = {"before": heads[0], "after": heads[1], "changes": [*head, *differing], "notes": notes}
        if is_whole:
            document["equal"] = [row for row in rows if row not in differing]
        return dumped(to_builtins(document), output), status
    shown, text = [*head, *differing], []
    if shown:
        text = [*(markdown_table if output == "markdown" else table)(shown, heads)]
    text += [line for note in notes for line in ("", note)]
    if is_whole and rows:
        text += ["", f"{len(rows) - len(differing)} other figures are equal; -o json lists them"]
    return lines(text or ["nothing changes"]), status
