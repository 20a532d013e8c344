"""`kimictl render`: the manifests that the operator would apply, without a cluster."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import yaml
from cyclopts import Parameter

from kimi_operator.cli.flags import refuse
from kimi_operator.cli.manifests import read_and_plan
from kimi_operator.errors import KimiError
from kimi_operator.planner import Infeasible
from kimi_operator.render import Owner, RenderConfig, RenderInputs
from kimi_operator.render import render as render_children

DEFAULT_IMAGE = "kimi-worker:dev"
NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
IMAGE = re.compile(r"[A-Za-z0-9][^\s]*")
UNKNOWN_UID = "00000000-0000-0000-0000-000000000000"


class DoesNotFit(KimiError):  # noqa: N818 - named for what is wrong
    """There is no plan to render; the message says why, with the arithmetic."""


def render(
    *,
    file: Annotated[list[Path], Parameter(name=["--file", "-f"], allow_leading_hyphen=True, negative=())],
    worker_image: str = DEFAULT_IMAGE,
    namespace: Annotated[str | None, Parameter(name=["--namespace", "-n"])] = None,
) -> None:
    """`kimictl render`; its help stands beside the list of commands.

    Parameters
    ----------
    file
        YAML with one KimiDeployment, and your own HardwareProfiles if any; `-` is standard input. Can be repeated.
        A `profile.yaml` beside it is read too, which standard error then says.
    worker_image
        Image of pods whose template names none.
    namespace
        Namespace of the children; the manifest's own, else default.
    """
    _check_names(worker_image, namespace)
    planned = read_and_plan(file)
    if isinstance(planned.plan, Infeasible):
        raise DoesNotFit(str(planned.plan))
    metadata = planned.deployment.metadata
    # Only the API server knows the uid; children that are applied by hand would not be collected with their owner.
    owner = Owner(metadata.name, namespace or metadata.namespace, metadata.uid or UNKNOWN_UID)
    config = RenderConfig(worker_image=worker_image)
    inputs = RenderInputs(owner, planned.deployment.spec, planned.plan, planned.profile, config)
    sys.stdout.write(to_yaml([dict(manifest.body) for manifest in render_children(inputs).manifests]))


def _check_names(worker_image: str, namespace: str | None) -> None:
    """Raises InvalidSpec for what no API server would take."""
    if namespace is not None and not NAMESPACE.fullmatch(namespace):
        expected = "at most 63 small letters, digits and dashes, with no dash at an end"
        raise refuse("--namespace", repr(namespace), expected, "name a namespace")
    if not IMAGE.fullmatch(worker_image):
        raise refuse("--worker-image", repr(worker_image), "REGISTRY/NAME:TAG, without spaces", "name an image")


class _Dumper(yaml.CSafeDumper):
    """YAML without anchors, with long texts as blocks."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the base class's signature
        return True


def _represent_text(dumper: yaml.CSafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def to_yaml(documents: list[dict[str, Any]]) -> str:
    """Several documents, keys in the order in which they were built."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120, explicit_start=True)
