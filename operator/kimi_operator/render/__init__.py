"""Pure renderer: from spec and plan to the ordered manifests of a deployment's children."""

from __future__ import annotations

from kimi_operator.api.deployment import Role
from kimi_operator.render.config_maps import render_worker_config_map
from kimi_operator.render.inputs import Manifest, RenderConfig, Rendered, RenderInputs
from kimi_operator.render.names import GroupKey, Owner
from kimi_operator.render.revision import combined_revision
from kimi_operator.render.router import render_router
from kimi_operator.render.services import render_headless_service
from kimi_operator.render.worker import render_stateful_set, role_revision

__all__ = ["GroupKey", "Manifest", "Owner", "RenderConfig", "RenderInputs", "Rendered", "render"]


def render(inputs: RenderInputs) -> Rendered:
    """Every child: Services, ConfigMaps, one StatefulSet a group, router.

    A suspended deployment renders the same objects with 0 replicas.
    """
    revisions = {role: role_revision(inputs, role) for role in Role}
    services = [render_headless_service(inputs, role) for role in Role]
    config_maps = {role: render_worker_config_map(inputs, role) for role in Role}
    groups = [
        render_stateful_set(inputs, GroupKey(role, group), revisions[role], config_maps[role].name)
        for role in Role
        for group in range(inputs.spec.role(role).groups)
    ]
    router_revision, router = render_router(inputs)
    return Rendered(
        manifests=(*services, *config_maps.values(), *groups, *router),
        revisions=revisions,
        router_revision=router_revision,
        revision=combined_revision(*revisions.values(), router_revision),
    )
