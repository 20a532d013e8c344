"""Pure: whether a live object already is what would be applied, so that a steady state writes nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kimi_operator.api.base import GROUP
from kimi_operator.store import Document, ObjectKey, key_of

ANNOTATION_APPLIED = f"{GROUP}/applied"
"""Hash over the manifest as it was last applied: shows fields that the next one no longer has."""


def with_hash(manifest: Document) -> dict[str, Any]:
    """The manifest with the hash over itself among its annotations."""
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), ANNOTATION_APPLIED: _digest(manifest)}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def covers(live: object, wanted: object) -> bool:
    """Whether everything that is wanted stands in the live value; what else stands there is others' business."""
    if isinstance(wanted, Mapping):
        return isinstance(live, Mapping) and all(
            name in live and covers(live[name], value) for name, value in wanted.items()
        )
    if isinstance(wanted, list | tuple):
        return (
            isinstance(live, list | tuple)
            and len(live) == len(wanted)
            and all(covers(have, want) for have, want in zip(live, wanted, strict=True))
        )
    return live == wanted


class Accepted:
    """What the API server made of manifests that it writes differently (1000m becomes 1): remembered by content."""

    def __init__(self) -> None:
        self._by_key: dict[ObjectKey, tuple[str, str]] = {}

    def note(self, manifest: Document, answer: Document) -> None:
        """The server answered this to that manifest."""
        self._by_key[key_of(manifest)] = (_hash_of(manifest), _digest(_own_content(answer)))

    def forget(self, key: ObjectKey) -> None:
        """The object is gone."""
        self._by_key.pop(key, None)

    def is_settled(self, live: Document, manifest: Document) -> bool:
        """Whether applying the manifest (from `with_hash`) would change nothing."""
        if _hash_of(live) != _hash_of(manifest):
            return False
        if covers(live, manifest):
            return True
        return self._by_key.get(key_of(manifest)) == (_hash_of(manifest), _digest(_own_content(live)))


def _hash_of(document: Document) -> str:
    return str(document["metadata"].get("annotations", {}).get(ANNOTATION_APPLIED, ""))


def _own_content(document: Document) -> dict[str, Any]:
    """An object without what controllers write: status, versions, the others' annotations."""
    metadata = document["metadata"]
    body = {name: value for name, value in document.items() if name not in ("status", "metadata")}
    annotations = {name: value for name, value in metadata.get("annotations", {}).items() if name.startswith(GROUP)}
    return {**body, "uid": metadata.get("uid"), "labels": metadata.get("labels"), "annotations": annotations}


def _digest(content: object) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
