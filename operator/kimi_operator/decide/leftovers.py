"""Pure: children that nothing wants any more."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from kimi_operator.api.deployment import Role
from kimi_operator.observe import Observed
from kimi_operator.render.names import LABEL_ROLE
from kimi_operator.store import Document, controller_of

_OWNED_KINDS = frozenset({"StatefulSet", "Deployment", "Service", "ConfigMap", "PodDisruptionBudget"})


def find_leftovers(
    children: Iterable[Document], rendered: Collection[tuple[str, str]], seen: Observed, owner_uid: str
) -> list[Document]:
    """Children of this owner that are not rendered; of the workers' ConfigMaps only those that no pod may still read.

    `rendered` holds (kind, name).
    """
    children = list(children)
    in_use = {name for child in children if child["kind"] == "StatefulSet" for name in _config_maps(child)}
    # Pods of an earlier generation may read what no template names any more.
    draining = {key.role for key, group in seen.groups.items() if group.stale}
    found = []
    for child in children:
        kind, metadata = child["kind"], child["metadata"]
        if (
            kind not in _OWNED_KINDS
            or metadata.get("deletionTimestamp")
            or controller_of(child).get("uid") != owner_uid
        ):
            continue
        if (kind, metadata["name"]) in rendered:
            continue
        role = metadata.get("labels", {}).get(LABEL_ROLE)
        if kind == "ConfigMap" and (metadata["name"] in in_use or (role in tuple(Role) and Role(role) in draining)):
            continue
        found.append(child)
    return found


def _config_maps(stateful_set: Document) -> list[str]:
    volumes = stateful_set["spec"]["template"]["spec"].get("volumes", ())
    return [volume["configMap"]["name"] for volume in volumes if "configMap" in volume]
