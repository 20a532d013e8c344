"""Names and labels of everything a KimiDeployment owns. Nothing else may spell them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kimi_operator.api.base import GROUP
from kimi_operator.api.deployment import Role

LABEL_DEPLOYMENT = f"{GROUP}/deployment"
LABEL_ROLE = f"{GROUP}/role"
LABEL_GROUP = f"{GROUP}/group"
LABEL_GENERATION = f"{GROUP}/generation"
LABEL_REVISION = f"{GROUP}/revision"
ANNOTATION_RESTARTED_AT = f"{GROUP}/restarted-at"
MANAGED_BY = "kimi-operator"
ROUTER = "router"

API_PORT = 8000
RENDEZVOUS_PORT = 29500
COORDINATOR_PORT = 29501
HANDOFF_PORT = 29600


class GroupKey(NamedTuple):
    """Which group of a deployment."""

    role: Role
    group: int


@dataclass(frozen=True, slots=True)
class Owner:
    """The KimiDeployment that everything rendered belongs to."""

    name: str
    namespace: str
    uid: str

    def reference(self) -> dict[str, object]:
        """The controller owner reference of every child."""
        return {
            "apiVersion": f"{GROUP}/v1alpha1",
            "kind": "KimiDeployment",
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }


def stateful_set_name(deployment: str, key: GroupKey) -> str:
    """Name of a group's StatefulSet; its pods append their ordinal."""
    return f"{deployment}-{key.role}-{key.group}"


def headless_name(deployment: str, role: Role) -> str:
    """Name of a role's headless Service."""
    return f"{deployment}-{role}"


def router_name(deployment: str) -> str:
    """Name of the router's Deployment, Service and PodDisruptionBudget."""
    return f"{deployment}-{ROUTER}"


def selector(deployment: str, key: GroupKey) -> dict[str, str]:
    """Immutable selector of a group's pods."""
    return {LABEL_DEPLOYMENT: deployment, LABEL_ROLE: key.role.value, LABEL_GROUP: str(key.group)}


def role_selector(deployment: str, role: Role) -> dict[str, str]:
    """Selector of all pods of a role."""
    return {LABEL_DEPLOYMENT: deployment, LABEL_ROLE: role.value}


def router_selector(deployment: str) -> dict[str, str]:
    """Selector of the router's pods."""
    return {LABEL_DEPLOYMENT: deployment, LABEL_ROLE: ROUTER}


def common_labels(deployment: str, component: str) -> dict[str, str]:
    """Labels that every child carries."""
    return {
        "app.kubernetes.io/name": "kimi",
        "app.kubernetes.io/instance": deployment,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/part-of": "kimi",
        "app.kubernetes.io/managed-by": MANAGED_BY,
        LABEL_DEPLOYMENT: deployment,
        LABEL_ROLE: component,
    }


def selector_text(labels: Mapping[str, str]) -> str:
    """A selector as the API takes it in a query."""
    return ",".join(f"{key}={value}" for key, value in labels.items())
