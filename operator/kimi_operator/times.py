"""Times as the API server writes them (RFC 3339, UTC) and as this package computes with them (seconds since 1970)."""

from __future__ import annotations

from datetime import UTC, datetime


def parse_time(text: str | None) -> float | None:
    """Seconds since 1970 of an RFC 3339 time; None for an absent or empty one."""
    if not text:
        return None
    return datetime.fromisoformat(text).timestamp()


def format_time(seconds: float) -> str:
    """RFC 3339 in UTC with whole seconds, as Kubernetes writes its own times."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
