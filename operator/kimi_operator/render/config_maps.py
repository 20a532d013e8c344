"""ConfigMaps: a role's worker.json under a name that follows from its content, and the router's router.json."""

from __future__ import annotations

import json

from kimi_operator.api.deployment import Role
from kimi_operator.render.inputs import Manifest, RenderInputs
from kimi_operator.render.names import ROUTER, router_name
from kimi_operator.render.revision import content_hash
from kimi_operator.render.settings import to_router_settings, to_worker_settings

WORKER_FILE = "worker.json"
ROUTER_FILE = "router.json"


def render_worker_config_map(inputs: RenderInputs, role: Role) -> Manifest:
    """`<name>-<role>-<hash>`, immutable: running pods keep reading the one that they started with."""
    settings = to_worker_settings(inputs, role)
    name = f"{inputs.owner.name}-{role}-{content_hash(settings)}"
    body = {"data": {WORKER_FILE: json.dumps(settings, indent=2) + "\n"}, "immutable": True}
    return inputs.manifest("v1", "ConfigMap", name, role.value, body)


def render_router_config_map(inputs: RenderInputs) -> Manifest:
    """`<name>-router`; the Deployment rolls by the revision label of its pods when the content changes."""
    body = {"data": {ROUTER_FILE: json.dumps(to_router_settings(inputs), indent=2) + "\n"}}
    return inputs.manifest("v1", "ConfigMap", router_name(inputs.owner.name), ROUTER, body)
