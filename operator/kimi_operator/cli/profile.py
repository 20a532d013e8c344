"""`kimictl profile`: hardware profiles with the source of each figure, and drafts of new ones from nodes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from cyclopts import App, Parameter
from msgspec.structs import replace

from kimi_operator.api.base import dump
from kimi_operator.api.profile import HardwareProfile
from kimi_operator.cli.files import STANDARD_INPUT, profiles_in, read_objects
from kimi_operator.cli.flags import known_as, read_choice, refuse
from kimi_operator.errors import ClusterUnavailable, InvalidSpec
from kimi_operator.planner.units import bytes_text
from kimi_operator.profiles.detect import Refused, drafted_by, match_labels
from kimi_operator.profiles.draft import BYTE_FIELDS, NodeFacts, draft, read_node
from kimi_operator.profiles.support import support_warning, worker_support

Output = Literal["text", "json", "yaml", "markdown"]
Files = Annotated[list[Path] | None, Parameter(name=["--file", "-f"], allow_leading_hyphen=True, negative=())]
Format = Annotated[Output, Parameter(name=["--output", "-o"], converter=read_choice, n_tokens=1)]

KUBECTL_TIMEOUT_S = 30.0
HEAD = ("NAME", "GPU", "PARTITION", "GPUS", "MEMORY", "CUS", "HBM TB/S", "WORKER", "UNMEASURED", "DEVICE IDS")

app = App(name="profile")
app.command(
    "kimi_operator.cli.calibrate:calibrate",
    name="calibrate",
    help="""Fit a profile's speed to a measured run; show old and new factor and what to put into the profile.

Nothing is written: add the fragment to your profile and apply it.

Exit status: 0 a factor was fitted; 1 points contradict each other, which are shown with their residuals; 2 bad input,
named with its value and what to do.""",
)


@app.command(name="list")
def list_profiles(*, file: Files = None, output: Format = "text") -> None:
    """List the profiles that ship with the operator.

    Parameters
    ----------
    file
        YAML with your own HardwareProfiles; `-` is standard input. Can be repeated.
    output
        text, json, yaml or markdown.
    """
    rows = [_summary(profile) for profile in _profiles(file).values()]
    cells = list(map(_cells, rows))
    _print(output, rows, _markdown_table(HEAD, cells) if output == "markdown" else _aligned([HEAD, *cells]))


@app.command
def show(name: str, *, file: Files = None, output: Format = "text") -> None:
    """Show one profile: every figure, how well it is known and where it comes from.

    Parameters
    ----------
    name
        Name of a profile, in capitals or not.
    file
        YAML with your own HardwareProfiles; `-` is standard input. Can be repeated.
    output
        text or markdown; json or yaml: the HardwareProfile itself.
    """
    profiles = _profiles(file)
    try:
        profile = profiles[known_as(name, profiles)]
    except ValueError as error:
        remedy = "name one of them, or give its file with -f"
        raise refuse("profile", repr(name), f"one of {sorted(profiles)}", remedy) from error
    _print(output, dump(profile), _markdown(profile) if output == "markdown" else _text(profile))


@app.command
def from_node(
    node: Annotated[str, Parameter(allow_leading_hyphen=True)], *, name: str | None = None, file: Files = None
) -> None:
    """Draft a HardwareProfile from a node's labels and capacity. What nobody measured is left open and says so.

    Parameters
    ----------
    node
        Name of a node, which kubectl is asked for, or a file with a Node as JSON or YAML; `-` is standard input.
    name
        Name of the draft; made from the chip when absent.
    file
        YAML with your own HardwareProfiles, which may know the chip; can be repeated.
    """
    facts, profiles = _facts(node), _profiles(file)
    text = draft(facts, profiles, name)
    found = match_labels(facts.labels, profiles)
    if isinstance(found, Refused):
        notes = [str(found).replace(drafted_by(facts.labels.node), "the draft on standard output is one")]
    else:
        notes = [_matched(found.profile, profiles[found.profile].spec.gpu.per_node, facts.gpus), *found.notes]
    sys.stderr.write("".join(f"kimictl: {note}\n" for note in notes))
    sys.stdout.write(text)


def _matched(name: str, per_node: int, gpus: int) -> str:
    """The profile that matches, and whether it plans with as many GPUs as the node has."""
    if gpus == per_node:
        return f"profile {name} matches"
    fewer = f", or set gpusPerNode to {gpus} in both roles" if gpus < per_node else ""
    return (
        f"profile {name} matches the GPUs, but plans with {per_node} a node where this one has {gpus}; use the draft "
        f"on standard output{fewer}"
    )


def _profiles(files: list[Path] | None) -> Mapping[str, HardwareProfile]:
    """Built-in profiles and those in the files, in the order of their names."""
    return dict(sorted(profiles_in(files or []).items()))


def _facts(wanted: str) -> NodeFacts:
    """Of a Node from a file, or from the cluster that kubectl is set up for. Raises InvalidSpec that names the file."""
    if not wanted.strip():
        raise refuse("node", repr(wanted), "the name of a node, or a file", "see `kubectl get nodes`")
    path = Path(wanted)
    looks_like_file = "/" in wanted or path.suffix in {".json", ".yaml", ".yml"}
    if path != STANDARD_INPUT and not looks_like_file and not path.exists():
        return read_node(_one_node(wanted, [_ask_kubectl(wanted)]))
    node = _one_node(wanted, read_objects(path))
    try:
        return read_node(node)
    except InvalidSpec as error:
        named = (replace(problem, field=f"{path}: {problem.field}") for problem in error.problems)
        raise InvalidSpec(tuple(named)) from error


def _one_node(wanted: str, documents: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    if len(documents) == 1 and isinstance(listed := documents[0].get("items"), list):
        documents = listed
    if len(documents) != 1 or not isinstance(documents[0], Mapping):
        raise refuse(
            wanted, f"{len(documents)} documents", "one Node", "save the output of `kubectl get node NODE -o json`"
        )
    node: Mapping[str, Any] = documents[0]
    return node


def _ask_kubectl(name: str) -> Mapping[str, Any]:
    program = shutil.which("kubectl")
    if program is None:
        raise refuse(
            name, "no kubectl on PATH", "kubectl, or a file of that name",
            "install kubectl, or pass the output of `kubectl get node NODE -o json` as a file",
        )  # fmt: skip
    command = [program, "get", "node", "-o", "json", "--", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=KUBECTL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ClusterUnavailable(
            f"node {name}: kubectl gave no answer within {KUBECTL_TIMEOUT_S:.0f} s; check that the API server answers"
        ) from None
    if done.returncode != 0:
        # Its last line is the answer, those before are how often it tried.
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise refuse(f"node {name}", f"from kubectl: {reason}", "a node of the cluster", "see `kubectl get nodes`")
    try:
        document: Mapping[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        raise refuse(f"node {name}", f"no JSON from kubectl: {error}", "a Node", "see `kubectl get nodes`") from error
    return document


def _summary(profile: HardwareProfile) -> dict[str, Any]:
    spec = profile.spec
    return {
        "name": profile.metadata.name,
        "deviceIds": list(spec.match.device_ids),
        "architecture": spec.gpu.architecture,
        "partition": str(spec.gpu.partition),
        "memory": spec.gpu.memory,
        "computeUnits": spec.gpu.compute_units,
        "hbmBytesPerSecond": spec.gpu.hbm_bytes_per_second,
        "perNode": spec.gpu.per_node,
        "worker": worker_support(spec).support.value,
        "unmeasured": sorted(spec.unmeasured()),
    }


def _aligned(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    yield from (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _markdown_table(head: Sequence[str], body: Iterable[Sequence[str]]) -> Iterator[str]:
    # it loads the planner, which the other forms do not need
    from kimi_operator.cli.markdown import table  # noqa: PLC0415

    return table(head, body)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    rate = row["hbmBytesPerSecond"]
    return (
        row["name"], row["architecture"], row["partition"], str(row["perNode"]), bytes_text(row["memory"]),
        str(row["computeUnits"] or "unknown"), f"{rate / 1e12:.1f}" if rate else "unknown", row["worker"],
        f"{len(row['unmeasured'])} figures", ",".join(row["deviceIds"]),
    )  # fmt: skip


def _text(profile: HardwareProfile) -> Iterator[str]:
    yield _title(profile)
    yield _device_ids(profile)
    yield f"bundled worker: {worker_support(profile.spec).support.value}"
    yield from (f"  {kind:<5}  {note}" for kind, note in _worker_notes(profile))
    if warning := support_warning(profile):
        yield f"warning: {warning}"
    yield ""
    yield f"{_unmeasured(profile)}, marked with *, were not measured on this hardware"
    for mark, path, value, basis, source in _figures(profile):
        yield f"{mark or ' '} {path:<30} {value:>21}  {basis:<9}  {source}"


def _markdown(profile: HardwareProfile) -> Iterator[str]:
    from kimi_operator.cli.markdown import cell  # noqa: PLC0415

    yield f"# {cell(_title(profile))}"
    yield f"\n{cell(_device_ids(profile))}"
    yield f"\nbundled worker: {worker_support(profile.spec).support.value}\n"
    yield from (f"- {kind}: {cell(note)}" for kind, note in _worker_notes(profile))
    if warning := support_warning(profile):
        yield f"\n> warning: {cell(warning)}"
    yield f"\n{_unmeasured(profile)}, marked with \\*, were not measured on this hardware\n"
    yield from _markdown_table(("", "figure", "value", "basis", "source"), _figures(profile))


def _title(profile: HardwareProfile) -> str:
    spec = profile.spec
    return f"{profile.metadata.name}: {spec.gpu.architecture}, {spec.gpu.per_node} GPUs a node as {spec.gpu.resource}"


def _device_ids(profile: HardwareProfile) -> str:
    match = profile.spec.match
    virtual = ", ".join(match.virtual_device_ids) or "none"
    return f"device ids {', '.join(match.device_ids) or 'none'}, of which virtual functions: {virtual}"


def _worker_notes(profile: HardwareProfile) -> Iterator[tuple[str, str]]:
    worker = worker_support(profile.spec)
    yield from (("works", note) for note in worker.works)
    yield from (("lacks", note) for note in worker.lacks)


def _unmeasured(profile: HardwareProfile) -> str:
    return f"{len(profile.spec.unmeasured())} of {len(profile.spec.figures())} figures"


def _figures(profile: HardwareProfile) -> Iterator[tuple[str, str, str, str, str]]:
    """Mark, path, value, basis and source of each."""
    spec, unmeasured = profile.spec, profile.spec.unmeasured()
    for path, value in spec.figures().items():
        mark, basis = "*" if path in unmeasured else "", spec.basis_of(path)
        yield mark, path, _value(path, value), str(basis or "unknown"), spec.source(path)


def _value(path: str, value: int | str) -> str:
    if isinstance(value, int) and path.rpartition(".")[2] in BYTE_FIELDS:
        return bytes_text(value)
    return f"{value:,}" if isinstance(value, int) else value


def _print(output: Output, document: Any, text: Iterable[str]) -> None:
    if output == "json":
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    elif output == "yaml":
        sys.stdout.write(yaml.safe_dump(document, sort_keys=False, width=120, allow_unicode=True))
    else:
        sys.stdout.write("".join(f"{line}\n" for line in text))
