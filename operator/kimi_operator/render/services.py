"""Services: one headless a role, by which ranks and router find pods, and the router's own."""

from __future__ import annotations

from kimi_operator.api.deployment import Role
from kimi_operator.render.inputs import Manifest, RenderInputs
from kimi_operator.render.names import (
    API_PORT,
    ROUTER,
    headless_name,
    role_selector,
    router_name,
    router_selector,
)


def render_headless_service(inputs: RenderInputs, role: Role) -> Manifest:
    """Names of a role's pods. Ranks meet before they are ready, so addresses of pods that are not ready count."""
    name = headless_name(inputs.owner.name, role)
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": role_selector(inputs.owner.name, role),
        "ports": [_api_port()],
    }
    return inputs.manifest("v1", "Service", name, role.value, {"spec": spec})


def render_router_service(inputs: RenderInputs) -> Manifest:
    """Where clients send their requests."""
    spec = {"type": "ClusterIP", "selector": router_selector(inputs.owner.name), "ports": [_api_port()]}
    return inputs.manifest("v1", "Service", router_name(inputs.owner.name), ROUTER, {"spec": spec})


def _api_port() -> dict[str, object]:
    return {"name": "http", "port": API_PORT, "targetPort": "http", "protocol": "TCP"}
