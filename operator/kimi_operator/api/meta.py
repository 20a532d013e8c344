"""Object metadata, as far as this project reads it."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from kimi_operator.api.base import ApiModel


class ObjectMeta(ApiModel):
    """Names and identity of an object; the API server owns the rest."""

    model_config = ConfigDict(extra="ignore")

    name: str = Field(min_length=1, max_length=253)
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    deletion_timestamp: str | None = None
