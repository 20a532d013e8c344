"""The first layout of a search as what to type: `kimictl plan` with flags or with edits of the manifest. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from kimi_operator.api.base import dump
from kimi_operator.api.deployment import KimiDeploymentSpec, Role
from kimi_operator.cli.flags import DeploymentFlags, WorkloadFlags, as_typed, flag_name
from kimi_operator.planner.search import Candidate

Sizes = dict[str, dict[str, int]]
"""Fields of spec.prefill and spec.decode, by role."""


class FirstRow(Struct, frozen=True):
    """How the first layout is planned."""

    sizes: Sizes
    command: str | None
    """None where neither flags nor a manifest that was given can say it."""

    def __str__(self) -> str:
        if self.command is not None:
            return f"to plan row 1: {self.command}"
        roles = (
            f"spec.{role}: {{{', '.join(f'{name}: {value}' for name, value in stated.items())}}}"
            for role, stated in self.sizes.items()
        )
        why = "flags give both roles one shape of a group and one maxNumSeqs"
        return f"to plan row 1, write a manifest with {' and '.join(roles)}: {why}"


class Typed(Struct, frozen=True):
    """The command line of a search."""

    program: str
    files: tuple[Path, ...]
    deployment: DeploymentFlags
    work: WorkloadFlags

    def row(self, first: Candidate, manifest: KimiDeploymentSpec | None, *, is_assumed: bool) -> FirstRow:
        """The first layout; `manifest` is None where the deployment is of flags, `is_assumed` where lengths are."""
        sizes = _sizes(first)
        if manifest is not None:
            return FirstRow(sizes, self._command(_edits(sizes, manifest)))
        # a plan for no stated lengths cuts nothing for a target, and flags give both roles one maxNumSeqs
        is_cut = is_assumed and self.work.target_tpot is not None
        if first.layout.prefill != first.layout.decode or (
            is_cut and first.prefill.max_num_seqs != first.decode.max_num_seqs
        ):
            return FirstRow(sizes, None)
        return FirstRow(sizes, self._command(_flags(first)))

    def _command(self, more: Iterable[str]) -> str:
        words = ["plan", *(word for file in self.files for word in ("-f", str(file))), *as_typed(self.deployment)]
        return f"{self.program} {shlex.join((*words, *more, *as_typed(self.work)))}"


def _sizes(first: Candidate) -> Sizes:
    return {
        str(role): {
            "groups": first.layout.groups(role),
            "nodesPerGroup": first.layout.shape(role).nodes,
            "gpusPerNode": first.layout.shape(role).gpus_per_node,
            "tensorParallel": first.layout.shape(role).tensor_parallel,
            "maxNumSeqs": (first.prefill if role is Role.PREFILL else first.decode).max_num_seqs,
        }
        for role in Role
    }


def _edits(sizes: Sizes, manifest: KimiDeploymentSpec) -> Iterator[str]:
    """What the manifest states otherwise."""
    for role in Role:
        stated = dump(manifest.role(role))
        for name, value in sizes[str(role)].items():
            if stated.get(name) != value:
                yield from ("--what-if", f"{role}.{name}={value}")


def _flags(first: Candidate) -> Iterator[str]:
    """A search takes all GPUs of a node, and so do flags; both choose maxNumSeqs alike."""
    layout = first.layout
    stated = {
        "nodes_per_group": layout.decode.nodes,
        "tensor_parallel": layout.decode.tensor_parallel,
        "prefill_groups": layout.prefill_groups,
        "decode_groups": layout.decode_groups,
    }
    for name, value in stated.items():
        yield from (flag_name(name), str(value))
