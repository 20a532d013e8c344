"""Pure: a pod that has the name of a group's pod and is not the group's. While it stands, the group misses that pod."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kimi_operator.store import Document, controller_of

_MADE_FOR = "statefulset.kubernetes.io/pod-name"
"""A label of every pod that a StatefulSet makes."""


def missing_pods(stateful_set: Document, children: Iterable[Document]) -> list[str]:
    """Names of the pods that a StatefulSet should have and does not own."""
    metadata = stateful_set["metadata"]
    owned = {
        child["metadata"]["name"]
        for child in children
        if child["kind"] == "Pod" and controller_of(child).get("uid") == metadata["uid"]
    }
    names = [f"{metadata['name']}-{ordinal}" for ordinal in range(stateful_set["spec"].get("replicas", 1))]
    return [name for name in names if name not in owned]


def short_sets(children: Iterable[Document]) -> list[Document]:
    """StatefulSets that have fewer pods than they should make."""
    children = list(children)
    num_pods = Counter(controller_of(child).get("uid") for child in children if child["kind"] == "Pod")
    return [
        child
        for child in children
        if child["kind"] == "StatefulSet"
        and not child["metadata"].get("deletionTimestamp")
        and num_pods[child["metadata"]["uid"]] < child["spec"].get("replicas", 1)
    ]


def why_not_ours(pod: Document, stateful_set: Document) -> str:
    """Why a pod holds a name of the StatefulSet's, and what to do; empty for one that goes or will be adopted."""
    metadata = pod["metadata"]
    name, namespace, labels = metadata["name"], metadata["namespace"], metadata.get("labels", {})
    holder = controller_of(pod)
    if holder.get("uid") == stateful_set["metadata"]["uid"] or metadata.get("deletionTimestamp"):
        return ""
    selector = stateful_set["spec"]["selector"]["matchLabels"]
    wrong = {label: value for label, value in selector.items() if labels.get(label) != value}
    delete = f"delete it: kubectl delete pod -n {namespace} {name}"
    if holder:
        why, remedy = f"belongs to {holder['kind']} {holder['name']}", f"rename what makes it, or {delete}"
    elif not wrong:
        return ""
    else:
        have = ", ".join(f"{label} is {labels.get(label, 'absent')}" for label in wrong)
        want = " ".join(f"{label}={value}" for label, value in wrong.items())
        why, remedy = f"lacks labels of the group ({have})", delete
        # Only a pod that a StatefulSet has made may be taken back by one.
        if labels.get(_MADE_FOR) == name:
            remedy = f"restore them: kubectl label pod -n {namespace} {name} --overwrite {want}; or {delete}"
    return (
        f"pod {name} is missing, and StatefulSet {stateful_set['metadata']['name']} cannot make it: the pod of this "
        f"name {why}; {remedy}"
    )
