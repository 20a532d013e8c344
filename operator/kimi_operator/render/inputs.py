"""What goes into the renderer and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kimi_operator.api.deployment import KimiDeploymentSpec, Role
from kimi_operator.api.profile import HardwareProfile
from kimi_operator.planner.plan import Plan
from kimi_operator.render.names import GroupKey, Owner, common_labels


@dataclass(frozen=True, slots=True)
class RenderConfig:
    """What the operator's own settings (chart values) add to every deployment."""

    worker_image: str
    """Image of workers and router when a template names none."""
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Manifest:
    """One object to apply, with its identity at hand."""

    api_version: str
    kind: str
    namespace: str
    name: str
    body: Mapping[str, Any]

    @property
    def key(self) -> tuple[str, str]:
        """(kind, name): unique within a deployment's namespace."""
        return (self.kind, self.name)


@dataclass(frozen=True, slots=True)
class Rendered:
    """All children in the order to apply them, and the revisions that they carry."""

    manifests: tuple[Manifest, ...]
    revisions: Mapping[Role, str] = field(default_factory=dict)
    """Revision of each role: `v1-` and eight hex digits."""
    router_revision: str = ""
    revision: str = ""
    """Revision of the whole deployment, over both roles and the router."""


@dataclass(frozen=True, slots=True)
class RenderInputs:
    """Everything that the children follow from."""

    owner: Owner
    spec: KimiDeploymentSpec
    plan: Plan
    profile: HardwareProfile
    config: RenderConfig
    generations: Mapping[GroupKey, int] = field(default_factory=dict)
    """Of groups that have been restarted or rolled; others are at 1."""

    def manifest(
        self, api_version: str, kind: str, name: str, component: str, body: Mapping[str, Any], **metadata: Any
    ) -> Manifest:
        """An object of this deployment: `body` under the metadata that every child carries."""
        labels = {**common_labels(self.owner.name, component), **metadata.pop("labels", {})}
        document = {
            "apiVersion": api_version,
            "kind": kind,
            "metadata": {
                "name": name,
                "namespace": self.owner.namespace,
                "labels": labels,
                "ownerReferences": [self.owner.reference()],
                **metadata,
            },
            **body,
        }
        return Manifest(api_version, kind, self.owner.namespace, name, document)
