"""The model's tensors and sizes, generated from a config in the shape of the released config.json."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes of a Kimi-K3 model, by their meaning."""

    name: str
