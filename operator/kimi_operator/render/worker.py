"""One StatefulSet a group of ranks: all pods at once, replaced only when the operator deletes them."""

from __future__ import annotations

from typing import Any

from kimi_operator.api.deployment import Role, RoleSpec
from kimi_operator.api.pod import EnvVar
from kimi_operator.api.profile import HardwareProfileSpec
from kimi_operator.render.config_maps import WORKER_FILE
from kimi_operator.render.inputs import Manifest, RenderInputs
from kimi_operator.render.names import (
    API_PORT,
    COORDINATOR_PORT,
    HANDOFF_PORT,
    LABEL_DEPLOYMENT,
    LABEL_GENERATION,
    LABEL_GROUP,
    LABEL_REVISION,
    LABEL_ROLE,
    RENDEZVOUS_PORT,
    GroupKey,
    common_labels,
    headless_name,
    selector,
    stateful_set_name,
)
from kimi_operator.render.pods import container, environment, http_probe, pod_spec, resources, without_empty
from kimi_operator.render.revision import revision_of
from kimi_operator.render.settings import to_worker_settings
from kimi_operator.render.volumes import worker_volumes

STARTUP_PERIOD_S = 5
SYMMETRIC_HEAP_VARIABLE = "MORI_SHMEM_HEAP_SIZE"
GROUP_IDENTITY = {
    "KIMI_GROUP": f"metadata.labels['{LABEL_GROUP}']",
    "KIMI_GROUP_GENERATION": f"metadata.labels['{LABEL_GENERATION}']",
}


def render_stateful_set(inputs: RenderInputs, key: GroupKey, revision: str, config_map: str) -> Manifest:
    """`<name>-<role>-<group>`. The group's generation and revision stand on the pod template only."""
    name = inputs.owner.name
    generation = inputs.generations.get(key, 1)
    labels = {LABEL_GROUP: str(key.group), LABEL_GENERATION: str(generation), LABEL_REVISION: revision}
    template = _pod_template(inputs, key.role, config_map)
    template["metadata"]["labels"] |= labels
    spec = {
        "serviceName": headless_name(name, key.role),
        "replicas": 0 if inputs.spec.suspend else inputs.spec.role(key.role).nodes_per_group,
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "OnDelete"},
        "revisionHistoryLimit": 2,
        "selector": {"matchLabels": selector(name, key)},
        "template": template,
    }
    return inputs.manifest(
        "apps/v1", "StatefulSet", stateful_set_name(name, key), key.role.value, {"spec": spec},
        labels={LABEL_GROUP: str(key.group)},
    )  # fmt: skip


def role_revision(inputs: RenderInputs, role: Role) -> str:
    """Hash over what a pod of this role is and reads; not over the number of groups or their restarts."""
    return revision_of(_pod_template(inputs, role, ""), to_worker_settings(inputs, role))


def _pod_template(inputs: RenderInputs, role: Role, config_map: str) -> dict[str, Any]:
    template, profile = inputs.spec.role(role).template, inputs.profile.spec
    volumes, mounts = worker_volumes(inputs.spec.model.checkpoint, profile.pod, config_map)
    spec = pod_spec(template, inputs.config, profile.timeouts.drain_seconds)
    spec["affinity"] = _one_pod_a_node(inputs.owner.name, template.affinity or {})
    if profile.pod.supplemental_groups:
        spec["securityContext"]["supplementalGroups"] = list(profile.pod.supplemental_groups)
    if profile.pod.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    metadata = {
        "labels": common_labels(inputs.owner.name, role.value),
        "annotations": dict(template.annotations),
    }
    return {
        "metadata": without_empty(metadata),
        "spec": {**spec, "containers": [_container(inputs, role, mounts)], "volumes": volumes},
    }


def _container(inputs: RenderInputs, role: Role, mounts: list[dict[str, Any]]) -> dict[str, Any]:
    role_spec, profile = inputs.spec.role(role), inputs.profile.spec
    template, pod = role_spec.template, profile.pod
    budget = -(-pod.startup_budget_seconds // STARTUP_PERIOD_S)
    return {
        **container("worker", ["kimi-worker", "serve"], template, inputs.config, pod.capabilities),
        "env": environment(WORKER_FILE, [_heap(profile), pod.env, template.env], GROUP_IDENTITY),
        "ports": _ports(role_spec),
        # Ready means: the whole group has loaded. Until then only the budget ends a pod.
        "startupProbe": http_probe("/ready", STARTUP_PERIOD_S, budget),
        "readinessProbe": http_probe("/ready", period_s=5, failures=2),
        "livenessProbe": http_probe("/health", period_s=10, failures=6),
        "resources": resources(
            pod.resources, template.resources, extended={profile.gpu.resource: role_spec.gpus_per_node}
        ),
        "volumeMounts": mounts,
    }


def _ports(role: RoleSpec) -> list[dict[str, Any]]:
    """Every fixed port. On the node's network they are host ports: the scheduler keeps them apart."""
    ports = {"http": API_PORT, "rendezvous": RENDEZVOUS_PORT, "coordinator": COORDINATOR_PORT}
    for lane in range(role.gpus_per_node // role.tensor_parallel):
        ports[f"handoff-{lane}"] = HANDOFF_PORT + lane
    return [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()]


def _heap(profile: HardwareProfileSpec) -> list[EnvVar]:
    """The heap of the expert exchange, of the size that the plan has set aside."""
    heap = profile.reserve.symmetric_heap
    return [EnvVar(name=SYMMETRIC_HEAP_VARIABLE, value=str(heap))] if heap else []


def _one_pod_a_node(deployment: str, affinity: dict[str, Any]) -> dict[str, Any]:
    """The user's affinity, and the rule that worker pods of one deployment never share a node."""
    rule = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {
            "matchLabels": {LABEL_DEPLOYMENT: deployment},
            "matchExpressions": [{"key": LABEL_ROLE, "operator": "In", "values": [role.value for role in Role]}],
        },
    }
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    anti = dict(affinity.get("podAntiAffinity", {}))
    anti[required] = [*anti.get(required, []), rule]
    return {**affinity, "podAntiAffinity": anti}
