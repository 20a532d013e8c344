"""The published figures that ship with the operator, as data."""

from __future__ import annotations

from pathlib import Path

import yaml

from kimi_operator.planner.figures import Figure, read_figures

PUBLISHED = "published.yaml"


def published_figures() -> tuple[Figure, ...]:
    """Every row of the file, in its order. Raises InvalidSpec that names a row which is wrong."""
    text = Path(__file__).with_name(PUBLISHED).read_text(encoding="utf-8")
    return read_figures(yaml.load(text, Loader=yaml.CSafeLoader))
