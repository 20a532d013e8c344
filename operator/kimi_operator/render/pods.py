"""What worker and router pods have in common: security, environment, probes, scheduling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kimi_operator.api.base import dump
from kimi_operator.api.pod import EnvVar, PodTemplate, Resources
from kimi_operator.render.inputs import RenderConfig

USER_ID = 65532
"""The non-root user of the images."""
SETTINGS_DIR = "/etc/kimi"
GRACE_MARGIN_S = 30
"""Between the end of draining and SIGKILL."""


def pod_spec(template: PodTemplate, config: RenderConfig, grace_s: int) -> dict[str, Any]:
    """A pod without containers and volumes: identity, security, scheduling."""
    secrets = [secret.name for secret in template.image_pull_secrets] or list(config.image_pull_secrets)
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_s + GRACE_MARGIN_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "imagePullSecrets": [{"name": name} for name in secrets],
        "nodeSelector": dict(template.node_selector),
        "tolerations": [dump(toleration) for toleration in template.tolerations],
        "priorityClassName": template.priority_class_name,
        "serviceAccountName": template.service_account_name,
    }
    return without_empty(spec)


def container(
    name: str, command: list[str], template: PodTemplate, config: RenderConfig, capabilities: Iterable[str] = ()
) -> dict[str, Any]:
    """A container without environment, probes and mounts."""
    added = list(capabilities)
    return {
        "name": name,
        "image": template.image or config.worker_image,
        "imagePullPolicy": config.image_pull_policy,
        "command": command,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"], **({"add": added} if added else {})},
        },
    }


def environment(
    settings_file: str, layers: Iterable[Iterable[EnvVar]], identity: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """Later layers win over earlier ones of the same name; nobody overrides the pod's identity.

    `identity` maps more variables to paths within the pod, as the downward API names them.
    """
    merged = {variable.name: dump(variable) for layer in layers for variable in layer}
    # The root file system is read-only: caches of compilers and libraries go to the emptyDir.
    merged["HOME"] = {"name": "HOME", "value": "/tmp"}  # noqa: S108 - an emptyDir of the pod
    merged["KIMI_SETTINGS"] = {"name": "KIMI_SETTINGS", "value": f"{SETTINGS_DIR}/{settings_file}"}
    for name, path in {"POD_NAME": "metadata.name", "POD_IP": "status.podIP", **(identity or {})}.items():
        merged[name] = {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
    return list(merged.values())


def resources(*layers: Resources, extended: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Requests and limits; later layers win, extended resources (GPUs) stand in both."""
    requests: dict[str, Any] = {}
    limits: dict[str, Any] = {}
    for layer in layers:
        requests |= layer.requests
        limits |= layer.limits
    for name, amount in (extended or {}).items():
        requests[name] = limits[name] = str(amount)
    return without_empty({"requests": requests, "limits": limits})


def http_probe(path: str, period_s: int, failures: int, timeout_s: int = 5) -> dict[str, Any]:
    """A probe on the API port."""
    return {
        "httpGet": {"path": path, "port": "http", "scheme": "HTTP"},
        "periodSeconds": period_s,
        "failureThreshold": failures,
        "timeoutSeconds": timeout_s,
    }


def without_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that say something: no None, no empty list, no empty mapping."""
    return {key: value for key, value in values.items() if value not in (None, [], {}, "")}
