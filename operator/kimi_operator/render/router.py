"""The router: a Deployment without access to the API server, its Service, settings and disruption budget."""

from __future__ import annotations

from typing import Any

from kimi_operator.api.pod import Resources
from kimi_operator.render.config_maps import ROUTER_FILE, render_router_config_map
from kimi_operator.render.inputs import Manifest, RenderInputs
from kimi_operator.render.names import (
    API_PORT,
    LABEL_REVISION,
    ROUTER,
    common_labels,
    router_name,
    router_selector,
)
from kimi_operator.render.pods import container, environment, http_probe, pod_spec, resources, without_empty
from kimi_operator.render.revision import revision_of
from kimi_operator.render.services import render_router_service
from kimi_operator.render.settings import to_router_settings
from kimi_operator.render.volumes import scratch_volumes, settings_volume

DEFAULT_RESOURCES = Resources(requests={"cpu": "100m", "memory": "128Mi"})


def render_router(inputs: RenderInputs) -> tuple[str, tuple[Manifest, ...]]:
    """The router's revision, and its objects in the order to apply them."""
    template = _pod_template(inputs)
    revision = revision_of(template, to_router_settings(inputs))
    template["metadata"]["labels"][LABEL_REVISION] = revision
    objects = [render_router_service(inputs), render_router_config_map(inputs), _deployment(inputs, template)]
    if inputs.spec.router.replicas > 1:
        objects.append(_disruption_budget(inputs))
    return revision, tuple(objects)


def _deployment(inputs: RenderInputs, template: dict[str, Any]) -> Manifest:
    spec = {
        "replicas": 0 if inputs.spec.suspend else inputs.spec.router.replicas,
        "revisionHistoryLimit": 2,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "selector": {"matchLabels": router_selector(inputs.owner.name)},
        "template": template,
    }
    return inputs.manifest("apps/v1", "Deployment", router_name(inputs.owner.name), ROUTER, {"spec": spec})


def _disruption_budget(inputs: RenderInputs) -> Manifest:
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": router_selector(inputs.owner.name)}}
    return inputs.manifest("policy/v1", "PodDisruptionBudget", router_name(inputs.owner.name), ROUTER, {"spec": spec})


def _pod_template(inputs: RenderInputs) -> dict[str, Any]:
    name, template = inputs.owner.name, inputs.spec.router.template
    pairs = [settings_volume(router_name(name)), *scratch_volumes()]
    spec = pod_spec(template, inputs.config, inputs.profile.spec.timeouts.drain_seconds)
    spec["affinity"] = template.affinity or _spread(name)
    router = {
        **container("router", ["kimi-worker", "route"], template, inputs.config),
        "env": environment(ROUTER_FILE, [template.env]),
        "ports": [{"name": "http", "containerPort": API_PORT, "protocol": "TCP"}],
        "startupProbe": http_probe("/health", period_s=2, failures=60),
        "readinessProbe": http_probe("/ready", period_s=5, failures=2),
        "livenessProbe": http_probe("/health", period_s=10, failures=6),
        "resources": resources(DEFAULT_RESOURCES, template.resources),
        "volumeMounts": [mount for _, mount in pairs],
    }
    metadata = {"labels": common_labels(name, ROUTER), "annotations": dict(template.annotations)}
    return {
        "metadata": without_empty(metadata),
        "spec": {**spec, "containers": [router], "volumes": [volume for volume, _ in pairs]},
    }


def _spread(deployment: str) -> dict[str, Any]:
    """Router pods prefer different nodes."""
    term = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": router_selector(deployment)}}
    return {
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]
        }
    }
