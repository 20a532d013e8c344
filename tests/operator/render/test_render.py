"""Rules that hold for every rendering, and what a change of the spec does to it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kimi_operator.api import HardwareProfile, KimiDeploymentSpec, Role, dump, parse
from kimi_operator.cli.manifests import read_and_plan
from kimi_operator.planner import Plan
from kimi_operator.render import GroupKey, Manifest, Owner, RenderConfig, Rendered, RenderInputs, render
from kimi_operator.render.names import LABEL_GENERATION, LABEL_REVISION
from kimi_worker.settings import RouterSettings, WorkerSettings

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
MI300X, MI325X, LOCAL = "mi300x-2p2d.yaml", "mi325x-2p2d.yaml", "local/2p2d.yaml"
OWNER = Owner("k3", "ns", "uid-1")
WORKERS = ("k3-prefill-0", "k3-decode-0")


def inputs_of(example: str = LOCAL, **changes: Any) -> RenderInputs:
    """The inputs of an example; `prefill__groups=2` changes one field of the spec."""
    planned = read_and_plan([EXAMPLES / example])
    assert isinstance(planned.plan, Plan)
    document = dump(planned.deployment.spec)
    for path, value in changes.items():
        *parents, last = path.split("__")
        inner = document
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    spec = parse(KimiDeploymentSpec, document)
    return RenderInputs(OWNER, spec, planned.plan, planned.profile, RenderConfig(worker_image="worker:1"))


def body(rendered: Rendered, kind: str, name: str) -> dict[str, Any]:
    return dict(next(manifest.body for manifest in rendered.manifests if manifest.key == (kind, name)))


def pod(rendered: Rendered, name: str, kind: str = "StatefulSet") -> dict[str, Any]:
    return body(rendered, kind, name)["spec"]["template"]


def container(rendered: Rendered, name: str, kind: str = "StatefulSet") -> dict[str, Any]:
    return pod(rendered, name, kind)["spec"]["containers"][0]


def env(container: dict[str, Any]) -> dict[str, Any]:
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in container["env"]}


def settings_file(rendered: Rendered, role: Role) -> dict[str, Any]:
    (manifest,) = (m for m in rendered.manifests if m.kind == "ConfigMap" and m.name.startswith(f"k3-{role}-"))
    return json.loads(manifest.body["data"]["worker.json"])


# every child


@pytest.mark.parametrize("example", [MI300X, MI325X, LOCAL])
def test_every_child_belongs_to_the_deployment(example: str) -> None:
    rendered = render(inputs_of(example))
    assert len({manifest.key for manifest in rendered.manifests}) == len(rendered.manifests)
    for manifest in rendered.manifests:
        metadata = manifest.body["metadata"]
        assert metadata["ownerReferences"] == [
            {
                "apiVersion": "kimi-operator.io/v1alpha1",
                "kind": "KimiDeployment",
                "name": "k3",
                "uid": "uid-1",
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
        assert (manifest.namespace, metadata["namespace"]) == ("ns", "ns")
        assert metadata["labels"]["kimi-operator.io/deployment"] == "k3"
        assert (manifest.body["apiVersion"], manifest.body["kind"]) == (manifest.api_version, manifest.kind)


def test_children_in_the_order_to_apply_them() -> None:
    kinds = [
        (m.kind, m.name.removesuffix(m.name[-8:]) if is_hashed(m) else m.name) for m in render(inputs_of()).manifests
    ]
    assert kinds == [
        ("Service", "k3-prefill"),
        ("Service", "k3-decode"),
        ("ConfigMap", "k3-prefill-"),
        ("ConfigMap", "k3-decode-"),
        ("StatefulSet", "k3-prefill-0"),
        ("StatefulSet", "k3-decode-0"),
        ("Service", "k3-router"),
        ("ConfigMap", "k3-router"),
        ("Deployment", "k3-router"),
    ]


def is_hashed(manifest: Manifest) -> bool:
    return manifest.kind == "ConfigMap" and bool(manifest.body.get("immutable"))


def test_pods_are_found_before_they_are_ready() -> None:
    for role in Role:
        spec = body(render(inputs_of()), "Service", f"k3-{role}")["spec"]
        assert spec["clusterIP"] == "None"
        assert spec["publishNotReadyAddresses"] is True


# settings: what the worker accepts


@pytest.mark.parametrize("example", [MI300X, MI325X, LOCAL])
@pytest.mark.parametrize("role", list(Role))
def test_the_worker_accepts_its_settings(example: str, role: Role) -> None:
    inputs = inputs_of(example)
    rendered = render(inputs)
    settings = WorkerSettings.model_validate(settings_file(rendered, role))
    plan = inputs.plan.role(role)
    assert settings.model_dump(mode="json").keys() == settings_file(rendered, role).keys()
    assert (settings.limits.num_pages, settings.limits.num_state_slots) == (plan.num_pages, plan.num_state_slots)
    assert settings.parallel.world_size == plan.ranks


@pytest.mark.parametrize("role", list(Role))
def test_every_key_of_the_settings_is_written(role: Role) -> None:
    """Nothing is left to the worker's own defaults."""
    written = settings_file(render(inputs_of()), role)
    for section, value in WorkerSettings.model_validate(written).model_dump(mode="json").items():
        if isinstance(value, dict):
            assert written[section].keys() == value.keys(), section


def test_the_router_accepts_its_settings() -> None:
    written = json.loads(body(render(inputs_of()), "ConfigMap", "k3-router")["data"]["router.json"])
    settings = RouterSettings.model_validate(written)
    assert settings.model_dump(mode="json") == written
    assert settings.decode_service == "k3-decode.ns.svc"


def test_settings_name_the_config_map_that_pods_mount() -> None:
    rendered = render(inputs_of())
    for role in Role:
        (name,) = (m.name for m in rendered.manifests if m.kind == "ConfigMap" and m.name.startswith(f"k3-{role}-"))
        volumes = {volume["name"]: volume for volume in pod(rendered, f"k3-{role}-0")["spec"]["volumes"]}
        assert volumes["settings"]["configMap"]["name"] == name


# pods


@pytest.mark.parametrize("example", [MI300X, LOCAL])
@pytest.mark.parametrize(("kind", "name"), [("StatefulSet", "k3-decode-0"), ("Deployment", "k3-router")])
def test_pods_run_with_least_rights(example: str, kind: str, name: str) -> None:
    rendered = render(inputs_of(example))
    spec, security = pod(rendered, name, kind)["spec"], container(rendered, name, kind)["securityContext"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == 65532
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"]["drop"] == ["ALL"]


@pytest.mark.parametrize("name", WORKERS)
def test_a_gpu_pod_gets_what_the_profile_lists(name: str) -> None:
    rendered = render(inputs_of(MI300X))
    spec, worker = pod(rendered, name)["spec"], container(rendered, name)
    mounts = {mount["mountPath"]: mount for mount in worker["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    for device in ("/dev/kfd", "/dev/dri", "/dev/infiniband"):
        assert volumes[mounts[device]["name"]]["hostPath"] == {"path": device}
    assert worker["resources"]["limits"] == {"amd.com/gpu": "8"}
    assert worker["resources"]["requests"]["amd.com/gpu"] == "8"
    assert worker["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert spec["securityContext"]["supplementalGroups"] == [44, 109]
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert volumes[mounts["/dev/shm"]["name"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": str(64 << 30)}
    assert volumes[mounts["/models/checkpoint"]["name"]]["hostPath"] == {
        "path": "/mnt/nvme/kimi-k3",
        "type": "Directory",
    }
    assert mounts["/models/checkpoint"]["readOnly"] is True


@pytest.mark.parametrize("name", WORKERS)
def test_a_pod_mounts_what_the_profile_takes_from_the_node(name: str) -> None:
    inputs = inputs_of(LOCAL)
    paths = [
        {"path": "/opt/lib/a.so", "mountPath": "/usr/lib/a.so", "type": "File"},
        {"path": "/var/cache/kimi", "readOnly": False},
    ]
    document = dump(inputs.profile)
    document["spec"]["pod"]["hostPaths"] = paths
    rendered = render(dataclasses.replace(inputs, profile=parse(HardwareProfile, document)))
    spec, worker = pod(rendered, name)["spec"], container(rendered, name)
    mounts = {mount["mountPath"]: mount for mount in worker["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    library, cache = mounts["/usr/lib/a.so"], mounts["/var/cache/kimi"]
    assert volumes[library["name"]]["hostPath"] == {"path": "/opt/lib/a.so", "type": "File"}
    assert volumes[cache["name"]]["hostPath"] == {"path": "/var/cache/kimi", "type": ""}
    assert library["readOnly"] is True
    assert "readOnly" not in cache
    assert len(volumes) == len(spec["volumes"]), "every volume has a name of its own"
    assert not {"/usr/lib/a.so", "/var/cache/kimi"} & {
        mount["mountPath"] for mount in container(rendered, "k3-router", "Deployment")["volumeMounts"]
    }


def test_thor2_nodes_lend_their_verbs_libraries_to_mi325x_pods_alone() -> None:
    def from_node(example: str) -> dict[str, dict[str, Any]]:
        rendered = render(inputs_of(example))
        volumes = {one["name"]: one.get("hostPath") for one in pod(rendered, "k3-decode-0")["spec"]["volumes"]}
        mounts = container(rendered, "k3-decode-0")["volumeMounts"]
        return {one["mountPath"]: volumes[one["name"]] for one in mounts if one["mountPath"].startswith("/usr/lib")}

    folder = "/usr/lib/x86_64-linux-gnu"
    assert from_node(MI325X) == {
        f"{folder}/libibverbs/libbnxt_re-rdmav34.so": {"path": "/usr/local/lib/libbnxt_re-rdmav34.so", "type": "File"},
        f"{folder}/libibverbs.so.1": {"path": f"{folder}/libibverbs.so.1", "type": "File"},
    }
    assert from_node(MI300X) == {}


@pytest.mark.parametrize(("example", "lanes"), [(MI300X, 4), (LOCAL, 1)])
@pytest.mark.parametrize("role", Role)
def test_every_port_that_a_pod_listens_on_is_declared(example: str, lanes: int, role: Role) -> None:
    rendered = render(inputs_of(example))
    listed = container(rendered, f"k3-{role}-0")["ports"]
    ports = settings_file(rendered, role)["ports"]
    handoff = [ports["handoff"] + lane for lane in range(lanes)]
    assert [port["containerPort"] for port in listed] == [
        ports["api"], ports["rendezvous"], ports["coordinator"], *handoff,
    ]  # fmt: skip
    assert all("hostPort" not in port for port in listed), "the API server makes host ports of them on a node's network"


@pytest.mark.parametrize("example", [MI300X, MI325X])
def test_the_example_leaves_the_image_to_whoever_installs(example: str) -> None:
    rendered = render(inputs_of(example))
    for name, kind in [*((worker, "StatefulSet") for worker in WORKERS), ("k3-router", "Deployment")]:
        assert container(rendered, name, kind)["image"] == "worker:1", name


def test_the_heap_is_the_one_that_the_plan_has_set_aside() -> None:
    assert env(container(render(inputs_of(MI300X)), "k3-decode-0"))["MORI_SHMEM_HEAP_SIZE"] == str(8 << 30)
    assert env(container(render(inputs_of(MI325X)), "k3-decode-0"))["MORI_SHMEM_HEAP_SIZE"] == str(16 << 30)
    assert "MORI_SHMEM_HEAP_SIZE" not in env(container(render(inputs_of(LOCAL)), "k3-decode-0"))


def test_probes_leave_the_startup_budget() -> None:
    worker = container(render(inputs_of(MI300X)), "k3-decode-0")
    startup = worker["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 5400
    assert [worker[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "readiness", "liveness")] == [
        "/ready",
        "/ready",
        "/health",
    ]


def test_pods_may_drain_before_they_are_killed() -> None:
    assert pod(render(inputs_of(MI300X)), "k3-decode-0")["spec"]["terminationGracePeriodSeconds"] > 900


def test_pods_know_who_they_are_and_nobody_can_tell_them_otherwise() -> None:
    lies = [{"name": name, "value": "x"} for name in ("POD_NAME", "KIMI_GROUP", "KIMI_SETTINGS")]
    worker = container(render(inputs_of(decode__template__env=lies)), "k3-decode-0")
    assert len({item["name"] for item in worker["env"]}) == len(worker["env"])
    known = env(worker)
    assert known["KIMI_SETTINGS"] == "/etc/kimi/worker.json"
    assert known["KIMI_GROUP"] == {"fieldRef": {"fieldPath": "metadata.labels['kimi-operator.io/group']"}}
    assert known["KIMI_GROUP_GENERATION"] == {
        "fieldRef": {"fieldPath": "metadata.labels['kimi-operator.io/generation']"}
    }
    assert known["POD_NAME"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert known["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}


def test_a_template_overrides_the_profile() -> None:
    template = {
        "image": "mine:2",
        "imagePullSecrets": [{"name": "mine"}],
        "nodeSelector": {"pool": "k3"},
        "tolerations": [{"key": "amd-gpu", "operator": "Exists"}],
        "env": [
            {"name": "UCX_TLS", "value": "rc"},
            {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
        ],
        "resources": {"requests": {"cpu": "2"}, "limits": {"rdma/hca": 1}},
        "annotations": {"note": "x"},
        "priorityClassName": "high",
        "serviceAccountName": "runner",
    }
    rendered = render(inputs_of(decode__template=template))
    spec, worker = pod(rendered, "k3-decode-0")["spec"], container(rendered, "k3-decode-0")
    assert worker["image"] == "mine:2"
    assert env(worker)["UCX_TLS"] == "rc"
    assert env(worker)["TOKEN"] == {"secretKeyRef": {"name": "s", "key": "k"}}
    assert worker["resources"]["requests"] == {"cpu": "2", "memory": "256Mi", "amd.com/gpu": "2"}
    assert worker["resources"]["limits"] == {"rdma/hca": 1, "amd.com/gpu": "2"}
    assert spec["imagePullSecrets"] == [{"name": "mine"}]
    assert spec["nodeSelector"] == {"pool": "k3"}
    assert spec["tolerations"] == [{"key": "amd-gpu", "operator": "Exists"}]
    assert (spec["priorityClassName"], spec["serviceAccountName"]) == ("high", "runner")
    assert pod(rendered, "k3-decode-0")["metadata"]["annotations"] == {"note": "x"}
    assert container(rendered, "k3-prefill-0")["image"] == "worker:1"


def test_worker_pods_of_a_deployment_never_share_a_node_whatever_else_is_asked() -> None:
    wish = {"topologyKey": "rack", "labelSelector": {"matchLabels": {"app": "x"}}}
    mine = {
        "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []},
        "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [wish]},
    }
    affinity = pod(render(inputs_of(decode__template__affinity=mine)), "k3-decode-0")["spec"]["affinity"]
    mine_kept, rule = affinity["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert mine_kept == wish
    assert "nodeAffinity" in affinity
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    assert rule["labelSelector"]["matchExpressions"][0]["values"] == ["prefill", "decode"]


@pytest.mark.parametrize(
    ("checkpoint", "volume"),
    [
        (
            {"persistentVolumeClaim": {"claimName": "k3"}},
            {"persistentVolumeClaim": {"claimName": "k3", "readOnly": True}},
        ),
        ({"image": {"reference": "r/k3:1"}}, {"image": {"reference": "r/k3:1", "pullPolicy": "IfNotPresent"}}),
    ],
)
def test_other_sources_of_the_checkpoint(checkpoint: dict[str, Any], volume: dict[str, Any]) -> None:
    rendered = render(inputs_of(model__checkpoint=checkpoint))
    volumes = {item["name"]: item for item in pod(rendered, "k3-decode-0")["spec"]["volumes"]}
    assert volumes["checkpoint"] == {"name": "checkpoint", **volume}


# groups, restarts, revisions


def test_one_stateful_set_a_group() -> None:
    rendered = render(inputs_of(prefill__groups=2, decode__groups=3))
    names = [manifest.name for manifest in rendered.manifests if manifest.kind == "StatefulSet"]
    assert names == ["k3-prefill-0", "k3-prefill-1", "k3-decode-0", "k3-decode-1", "k3-decode-2"]
    spec = body(rendered, "StatefulSet", "k3-decode-2")["spec"]
    assert (spec["replicas"], spec["serviceName"], spec["podManagementPolicy"]) == (2, "k3-decode", "Parallel")
    assert spec["updateStrategy"] == {"type": "OnDelete"}
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
    assert LABEL_GENERATION not in spec["selector"]["matchLabels"]


def test_a_restart_changes_one_group_and_no_revision() -> None:
    inputs = inputs_of(decode__groups=2)
    stamped = dataclasses.replace(inputs, generations={GroupKey(Role.DECODE, 1): 4})
    before, after = render(inputs), render(stamped)
    assert before.revisions == after.revisions
    differing = [old.name for old, new in zip(before.manifests, after.manifests, strict=True) if old != new]
    assert differing == ["k3-decode-1"]
    group = body(after, "StatefulSet", "k3-decode-1")
    assert group["spec"]["template"]["metadata"]["labels"][LABEL_GENERATION] == "4"


@pytest.mark.parametrize(
    "changes",
    [
        {"decode__groups": 3},
        {"router__replicas": 3},
        {"rollout__paused": True},
        {"restartBudget": 1},
        {"suspend": True},
        {"prefill__template__annotations": {"x": "y"}},
        {"prefill__template__image": "worker:2"},
    ],
)
def test_what_does_not_change_decode_pods_keeps_their_revision(changes: dict[str, Any]) -> None:
    assert render(inputs_of(**changes)).revisions[Role.DECODE] == render(inputs_of()).revisions[Role.DECODE]


@pytest.mark.parametrize(
    "changes",
    [
        {"decode__template__image": "worker:2"},
        {"decode__template__tolerations": [{"key": "x", "operator": "Exists"}]},
        {"decode__template__nodeSelector": {"pool": "b"}},
        {"decode__template__priorityClassName": "high"},
        {"decode__template__env": [{"name": "A", "value": "1"}]},
        {"model__servedName": "other"},
        {"model__checkpoint": {"hostPath": {"path": "/other"}}},
    ],
)
def test_what_changes_decode_pods_changes_their_revision(changes: dict[str, Any]) -> None:
    before, after = render(inputs_of()), render(inputs_of(**changes))
    assert before.revisions[Role.DECODE] != after.revisions[Role.DECODE]
    assert before.revision != after.revision
    assert pod(after, "k3-decode-0")["metadata"]["labels"][LABEL_REVISION] == after.revisions[Role.DECODE]


def test_settings_are_made_anew_only_when_their_content_changes() -> None:
    def name(**changes: Any) -> str:
        manifests = render(inputs_of(**changes)).manifests
        return next(one.name for one in manifests if one.kind == "ConfigMap" and one.name.startswith("k3-decode-"))

    assert name(decode__template__env=[{"name": "A", "value": "1"}]) == name()
    assert name(model__servedName="other") != name()


def test_a_new_plan_or_a_new_default_image_changes_the_revision() -> None:
    inputs = inputs_of()
    smaller = msgspec.structs.replace(inputs.plan, decode=msgspec.structs.replace(inputs.plan.decode, num_pages=600))
    old = render(inputs).revisions
    assert render(dataclasses.replace(inputs, plan=smaller)).revisions[Role.DECODE] != old[Role.DECODE]
    assert render(dataclasses.replace(inputs, plan=smaller)).revisions[Role.PREFILL] == old[Role.PREFILL]
    newer = dataclasses.replace(inputs, config=RenderConfig(worker_image="worker:2"))
    assert render(newer).revisions[Role.DECODE] != old[Role.DECODE]


def test_revisions_are_versioned_and_stable() -> None:
    first, second = render(inputs_of()), render(inputs_of())
    assert first == second
    for revision in (*first.revisions.values(), first.router_revision, first.revision):
        version, _, digest = revision.partition("-")
        assert version == "v1"
        assert len(digest) == 8
        assert int(digest, 16) >= 0


def test_suspend_keeps_every_object_and_runs_no_pod() -> None:
    running, suspended = render(inputs_of(MI300X)), render(inputs_of(MI300X, suspend=True))
    assert [m.key for m in running.manifests] == [m.key for m in suspended.manifests]
    counts = [m.body["spec"]["replicas"] for m in suspended.manifests if m.kind in ("StatefulSet", "Deployment")]
    assert counts == [0, 0, 0]


def test_a_change_of_the_router_rolls_only_the_router() -> None:
    before, after = render(inputs_of()), render(inputs_of(router__template__env=[{"name": "A", "value": "1"}]))
    assert before.revisions == after.revisions
    assert before.router_revision != after.router_revision
    assert pod(after, "k3-router", "Deployment")["metadata"]["labels"][LABEL_REVISION] == after.router_revision


def test_several_routers_get_a_disruption_budget() -> None:
    kinds = [manifest.kind for manifest in render(inputs_of(router__replicas=2)).manifests]
    assert kinds.count("PodDisruptionBudget") == 1
    assert "PodDisruptionBudget" not in [manifest.kind for manifest in render(inputs_of()).manifests]
