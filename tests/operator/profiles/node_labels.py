"""Nodes as AMD's device plugin and node labeller describe them."""

from __future__ import annotations

from typing import Any


def labelled(
    device: str, vram: str | None = None, units: int | None = None, partition: str | None = None
) -> dict[str, str]:
    """Labels of a node whose GPUs are all alike; what is None has no label."""
    values = {"device-id": device, "vram": vram, "cu-count": units, "compute-memory-partition": partition}
    return {f"amd.com/gpu.{name}": str(value) for name, value in values.items() if value is not None}


def older_labels(device: str, vram: str, units: int, count: int) -> dict[str, str]:
    """Labels of the first labellers: under beta, values in the keys, partitions under the whole card's memory."""
    counts = {"device-id": (device, count), "vram": (vram, count), "cu-count": (units, count)}
    return {f"beta.amd.com/gpu.{name}.{value}": str(number) for name, (value, number) in counts.items()}


def node(labels: dict[str, str], gpus: int = 8, resource: str = "amd.com/gpu", name: str = "gpu-1") -> dict[str, Any]:
    """A Node with its labels and capacity."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "status": {"capacity": {"cpu": "192", "memory": "2000Gi", resource: str(gpus)}},
    }
