"""Revisions: short hashes over what affects pods, so that equal content never rolls anything."""

from __future__ import annotations

import hashlib
import json

REVISION_VERSION = "v1"
"""Raised when the hashed content is arranged anew; pods then roll on purpose."""


def content_hash(content: object) -> str:
    """Eight hex digits over canonical JSON."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def revision_of(*content: object) -> str:
    """Revision of pods that follow from `content`."""
    return f"{REVISION_VERSION}-{content_hash(list(content))}"


def combined_revision(*revisions: str) -> str:
    """One revision over several."""
    return revision_of(*revisions)
