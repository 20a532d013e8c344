"""The chart, rendered by helm itself: what is installed, with which rights, and what its schema refuses."""

from __future__ import annotations

import base64
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from kimi_operator.api.crd import all_crds
from kimi_operator.cluster import KINDS
from kimi_operator.handlers import WATCHED_KINDS
from kimi_operator.settings import OperatorSettings
from kimi_operator.webhook import ANSWER_S, PATH, Certificate

CHART = Path(__file__).parents[3] / "charts" / "kimi-operator"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kimi-operator"


def find_helm() -> str | None:
    """The helm that the local cluster builds, or the machine's own if it is of version 4."""
    built = sorted(CACHE.glob("bin/*/helm"), key=lambda path: path.stat().st_mtime)
    return str(built[-1]) if built else shutil.which("helm")


pytestmark = pytest.mark.skipif(
    find_helm() is None, reason="no helm 4: `.venv/bin/localcluster build helm` builds it, and so does `make test`"
)


@cache
def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = find_helm()
    assert program is not None
    with tempfile.TemporaryDirectory() as home:
        env = {"PATH": os.environ["PATH"], "HOME": home}
        return subprocess.run([program, *arguments], env=env, capture_output=True, text=True, check=False, timeout=60)


def template(*arguments: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Rendered objects by kind and name."""
    done = helm("template", "kimi-operator", str(CHART), "--namespace", "kimi-system", *arguments)
    assert done.returncode == 0, done.stderr
    documents = [one for one in yaml.safe_load_all(done.stdout) if one]
    return {(one["kind"], one["metadata"]["name"]): one for one in documents}


def rights(rules: list[dict[str, Any]]) -> dict[tuple[str, str], set[str]]:
    granted: dict[tuple[str, str], set[str]] = defaultdict(set)
    for rule in rules:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                granted[group, resource] |= set(rule["verbs"])
    return granted


def test_helm_finds_nothing_to_complain_about() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_pod_is_locked_down() -> None:
    pod = template()["Deployment", "kimi-operator"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"]
    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= set(container)
    assert "hostPath" not in yaml.safe_dump(pod)


def test_every_variable_is_a_setting_of_the_operator() -> None:
    """An unknown environment variable would be ignored without a word."""
    pod = template("--set", "watchNamespaces={a,b}")["Deployment", "kimi-operator"]["spec"]["template"]["spec"]
    env = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
    fields = OperatorSettings.model_fields
    names = {f"KIMI_OPERATOR_{name.upper()}" for name in fields} | {"POD_NAME", "POD_NAMESPACE", "HOME"}
    assert set(env) <= names
    given = {name.removeprefix("KIMI_OPERATOR_").lower(): value for name, value in env.items() if value is not None}
    given.pop("home")
    settings = OperatorSettings.model_validate(given)
    assert settings.watch_namespaces == ("a", "b")
    assert settings.worker_image == "ghcr.io/kimi-operator/worker:0.1.0"
    defaults = OperatorSettings.model_validate({})
    for name in ("lease_duration_s", "lease_renew_s", "node_grace_s", "resync_s", "workers", "http_port"):
        assert getattr(settings, name) == getattr(defaults, name), name


CHILD = {"get", "list", "watch", "create", "patch", "delete"}
CLUSTER_RIGHTS = {
    ("kimi-operator.io", "hardwareprofiles"): {"list", "watch"},
    ("", "nodes"): {"list", "watch"},
}
NAMESPACED_RIGHTS = {
    ("kimi-operator.io", "kimideployments"): {"list", "watch"},
    ("kimi-operator.io", "kimideployments/status"): {"patch"},
    ("kimi-operator.io", "kimideployments/finalizers"): {"update"},
    ("apps", "statefulsets"): CHILD,
    ("apps", "deployments"): CHILD,
    ("policy", "poddisruptionbudgets"): CHILD,
    ("", "services"): CHILD,
    ("", "configmaps"): CHILD,
    ("", "pods"): {"list", "watch", "delete"},
    ("", "events"): {"list", "create"},
}


def test_rights_are_exactly_what_is_called() -> None:
    granted = rights(template()["ClusterRole", "kimi-operator"]["rules"])
    assert granted == CLUSTER_RIGHTS | NAMESPACED_RIGHTS
    for name in WATCHED_KINDS:
        kind = KINDS[name]
        assert {"list", "watch"} <= granted[kind.group, kind.plural], name


def test_a_lease_is_all_that_it_may_write_in_its_own_namespace() -> None:
    rules = template()["Role", "kimi-operator-lease"]["rules"]
    create, own = rules
    assert rights([create]) == {("coordination.k8s.io", "leases"): {"create"}}
    assert "resourceNames" not in create, "a name is not known to RBAC before the object is"
    assert rights([own]) == {("coordination.k8s.io", "leases"): {"get", "update"}}
    assert own["resourceNames"] == ["kimi-operator"]


def test_with_namespaces_the_cluster_role_only_reads_what_has_none() -> None:
    found = template("--set", "watchNamespaces={a,b}")
    assert rights(found["ClusterRole", "kimi-operator"]["rules"]) == CLUSTER_RIGHTS
    assert rights(found["Role", "kimi-operator"]["rules"]) == NAMESPACED_RIGHTS


def test_profiles_are_installed_unless_told_otherwise() -> None:
    kinds = {kind for kind, _ in template("--set", "profiles.install=false")}
    assert "HardwareProfile" not in kinds
    shipped = {path.stem for path in (CHART / "files" / "profiles").glob("*.yaml")}
    assert {name for kind, name in template() if kind == "HardwareProfile"} == shipped
    values = (CHART / "values.yaml").read_text()
    assert f"({', '.join(sorted(shipped))})" in values, "the comment of profiles.install names what is shipped"


def test_profiles_outlive_the_release_and_say_whose_they_are() -> None:
    found = template()
    for path in sorted((CHART / "files" / "profiles").glob("*.yaml")):
        shipped = yaml.safe_load(path.read_text())
        installed = found["HardwareProfile", shipped["metadata"]["name"]]
        assert installed["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
        assert installed["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"
        assert installed["spec"] == shipped["spec"]


def test_an_upgrade_first_renews_the_crds_with_no_right_but_that() -> None:
    found = template()
    names = [crd["metadata"]["name"] for crd in all_crds()]
    hooks = {key: one for key, one in found.items() if "helm.sh/hook" in one["metadata"].get("annotations", {})}
    assert {kind for kind, _ in hooks} == {"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Job"}
    for one in hooks.values():
        assert one["metadata"]["annotations"]["helm.sh/hook"] == "pre-upgrade"
    named, unnamed = hooks["ClusterRole", "kimi-operator-crds"]["rules"]
    assert (sorted(named["resourceNames"]), named["verbs"]) == (sorted(names), ["get", "patch"])
    assert unnamed["verbs"] == ["create"]
    assert set(rights([named, unnamed])) == {("apiextensions.k8s.io", "customresourcedefinitions")}
    pod = hooks["Job", "kimi-operator-crds"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    module = container["command"][container["command"].index("-m") + 1]
    assert importlib.util.find_spec(module) is not None
    assert (
        container["image"] == found["Deployment", "kimi-operator"]["spec"]["template"]["spec"]["containers"][0]["image"]
    )
    assert pod["securityContext"]["runAsNonRoot"] is True
    # Neither the operator's Service nor its disruption budget may take the Job's pod for one of the operator's.
    selector = found["Deployment", "kimi-operator"]["spec"]["selector"]["matchLabels"]
    labels = hooks["Job", "kimi-operator-crds"]["spec"]["template"]["metadata"]["labels"]
    assert not selector.items() <= labels.items()
    assert not [key for key, one in template("--set", "crds.upgrade=false").items() if key in hooks]


def test_a_network_policy_opens_one_port_to_those_who_are_named() -> None:
    assert not [kind for kind, _ in template() if kind == "NetworkPolicy"]
    policy = template("--set", "networkPolicy.enabled=true")["NetworkPolicy", "kimi-operator"]["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"] == [{"ports": [{"port": "http", "protocol": "TCP"}]}]
    peer = "networkPolicy.from[0].podSelector.matchLabels.app=prometheus"
    named = template("--set", "networkPolicy.enabled=true", "--set", peer)["NetworkPolicy", "kimi-operator"]["spec"]
    assert named["ingress"][0]["from"] == [{"podSelector": {"matchLabels": {"app": "prometheus"}}}]


@pytest.mark.parametrize(("tag", "is_warned"), [("", True), ("1.2.3", False)])
def test_whoever_installs_is_told_that_the_default_image_follows_the_operator(tag: str, is_warned: bool) -> None:
    done = helm("install", "kimi-operator", str(CHART), "--dry-run=client", "--set", f"worker.tag={tag}")
    assert done.returncode == 0, done.stderr
    assert ("the next upgrade restarts them group by group" in done.stdout) == is_warned


WEBHOOK = ("--set", "webhook.enabled=true")
SERVICE = "kimi-operator-webhook"


def webhook(*arguments: str) -> dict[str, Any]:
    """The one webhook of the rendered configuration."""
    (one,) = template(*WEBHOOK, *arguments)["ValidatingWebhookConfiguration", "kimi-operator"]["webhooks"]
    return dict(one)


def test_no_webhook_comes_unless_asked_for_and_it_needs_no_right() -> None:
    plain, with_webhook = template(), template(*WEBHOOK)
    assert not any("webhook" in name or "Webhook" in kind for kind, name in plain)
    assert "webhook" not in yaml.safe_dump(plain["Deployment", "kimi-operator"])
    assert set(with_webhook) - set(plain) == {
        ("Secret", SERVICE),
        ("Service", SERVICE),
        ("ValidatingWebhookConfiguration", "kimi-operator"),
    }
    for key, one in plain.items():
        if "rules" in one:
            assert one["rules"] == with_webhook[key]["rules"], key


def test_the_webhook_holds_up_nothing_but_changes_of_a_spec() -> None:
    one = webhook()
    assert (one["failurePolicy"], one["sideEffects"], one["timeoutSeconds"]) == ("Ignore", "None", 5)
    (rule,) = one["rules"]
    assert rule["resources"] == ["kimideployments"], "neither status nor scale"
    assert rule["operations"] == ["CREATE", "UPDATE"]
    (condition,) = one["matchConditions"]
    assert "object.spec != oldObject.spec" in condition["expression"]
    assert "!has(object.metadata.deletionTimestamp)" in condition["expression"]
    assert one["timeoutSeconds"] > ANSWER_S, "the operator gives up first, and says what it could not check"


def test_with_namespaces_the_webhook_is_asked_about_those_alone() -> None:
    assert "namespaceSelector" not in webhook()
    (term,) = webhook("--set", "watchNamespaces={a,b}")["namespaceSelector"]["matchExpressions"]
    assert term == {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["a", "b"]}


def test_the_webhooks_way_leads_to_the_operator() -> None:
    found = template(*WEBHOOK)
    reference = webhook()["clientConfig"]["service"]
    assert reference == {"name": SERVICE, "namespace": "kimi-system", "path": PATH, "port": 443}
    service, deployment = found["Service", SERVICE]["spec"], found["Deployment", "kimi-operator"]["spec"]
    assert service["selector"] == deployment["selector"]["matchLabels"]
    (container,) = deployment["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert service["ports"][0]["targetPort"] == "webhook"
    env = {one["name"]: one.get("value") for one in container["env"]}
    given = {name.removeprefix("KIMI_OPERATOR_").lower(): value for name, value in env.items() if "WEBHOOK" in name}
    settings = OperatorSettings.model_validate(given)
    assert settings.webhook_port == ports["webhook"] == 9443
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert str(settings.webhook_cert_dir) == mounts["webhook"]
    volumes = {one["name"]: one for one in deployment["template"]["spec"]["volumes"]}
    assert volumes["webhook"]["secret"] == {"secretName": SERVICE, "defaultMode": 0o440, "optional": True}


def test_the_charts_own_certificate_is_for_the_service_and_trusted_by_the_api_server(tmp_path: Path) -> None:
    found = template(*WEBHOOK)
    secret, trusted = found["Secret", SERVICE], webhook()["clientConfig"]["caBundle"]
    assert (secret["type"], secret["data"]["tls.crt"]) == ("kubernetes.io/tls", trusted)
    pair = {name: tmp_path / name for name in ("tls.crt", "tls.key")}
    for name, path in pair.items():
        path.write_bytes(base64.b64decode(secret["data"][name]))
    assert Certificate(tmp_path).renew(), "certificate and key belong together"
    host = f"{SERVICE}.kimi-system.svc"
    checks = ["-purpose", "sslserver", "-verify_hostname", host, "-CAfile", str(pair["tls.crt"]), str(pair["tls.crt"])]
    done = subprocess.run(["openssl", "verify", *checks], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


ISSUERS = {
    "its own": ([], {"kind": "Issuer", "name": SERVICE}),
    "another": (
        ["webhook.certManager.issuerRef.kind=ClusterIssuer", "webhook.certManager.issuerRef.name=internal"],
        {"kind": "ClusterIssuer", "name": "internal"},
    ),
}


@pytest.mark.parametrize(("settings", "issuer"), ISSUERS.values(), ids=ISSUERS.keys())
def test_cert_manager_can_make_the_certificate(settings: list[str], issuer: dict[str, str]) -> None:
    chosen = [word for one in ("webhook.certManager.enabled=true", *settings) for word in ("--set", one)]
    found = template(*WEBHOOK, *chosen)
    assert ("Secret", SERVICE) not in found
    assert (("Issuer", SERVICE) in found) == (issuer["kind"] == "Issuer")
    spec = found["Certificate", SERVICE]["spec"]
    assert (spec["secretName"], spec["dnsNames"]) == (SERVICE, [f"{SERVICE}.kimi-system.svc"])
    assert spec["issuerRef"] == issuer
    configuration = found["ValidatingWebhookConfiguration", "kimi-operator"]
    assert configuration["metadata"]["annotations"] == {"cert-manager.io/inject-ca-from": f"kimi-system/{SERVICE}"}
    assert "caBundle" not in configuration["webhooks"][0]["clientConfig"]


def test_a_network_policy_lets_the_api_server_ask() -> None:
    settings = ("--set", "networkPolicy.enabled=true", "--set", "networkPolicy.from[0].podSelector.matchLabels.app=p")
    policy = template(*WEBHOOK, *settings)["NetworkPolicy", "kimi-operator"]["spec"]
    metrics, asked = policy["ingress"]
    assert metrics["from"]
    assert asked == {"ports": [{"port": "webhook", "protocol": "TCP"}]}


def test_a_service_monitor_comes_only_when_asked_for() -> None:
    assert ("ServiceMonitor", "kimi-operator") not in template()
    assert ("ServiceMonitor", "kimi-operator") in template("--set", "metrics.serviceMonitor.enabled=true")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("replicas=0", "minimum"),
        ("replica=2", "additional properties 'replica' not allowed"),
        ("logLevel=loud", "logLevel"),
        ("watchNamespaces={Upper}", "pattern"),
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("networkPolicy.from=anybody", "networkPolicy"),
        ("webhook.timeoutSeconds=30", "timeoutSeconds"),
        ("webhook.failurePolicy=Fail", "additional properties 'failurePolicy' not allowed"),
        ("webhook.enabled=true,webhook.port=8080", "webhook.port: got 8080, expected another port than metrics.port"),
        ("leaderElection.renewDeadlineSeconds=15", "expected 1.2 * retry < renew < lease"),
        ("leaderElection.retryPeriodSeconds=9", "leaderElection: got retryPeriodSeconds 9, renewDeadlineSeconds 10"),
    ],
)
def test_a_wrong_value_is_refused_by_name(setting: str, words: str) -> None:
    done = helm("template", "kimi-operator", str(CHART), "--set", setting)
    assert done.returncode != 0
    assert words in done.stderr
