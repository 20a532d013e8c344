"""The operator's own settings, read once from the environment (KIMI_OPERATOR_*) and frozen. Times in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from kimi_operator.decide.evidence import NODE_GRACE_S

LEAVE_S = 3.0
"""How long the parts of an operator that ends may take."""
DEFAULT_WORKER_IMAGE = "ghcr.io/kimi-operator/worker:0.1.0"


class OperatorSettings(BaseSettings):
    """Chart values set these; each has a default that suits a real cluster."""

    model_config = SettingsConfigDict(env_prefix="KIMI_OPERATOR_", frozen=True, extra="forbid", validate_by_name=True)

    worker_image: str = DEFAULT_WORKER_IMAGE
    """Image of workers and routers whose template names none."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    image_pull_secrets: Annotated[tuple[str, ...], NoDecode] = ()
    """Comma-separated names of Secrets."""

    watch_namespaces: Annotated[tuple[str, ...], NoDecode] = ()
    """Comma-separated; empty: the whole cluster."""
    node_selector: str = ""
    """Label selector of the nodes to watch; empty: all."""

    identity: str = Field(default="", validation_alias="POD_NAME")
    """Name of this replica in the Lease; the host's name when empty."""
    lease_namespace: str = Field(default="kimi-system", validation_alias="POD_NAMESPACE")
    lease_name: str = "kimi-operator"
    lease_duration_s: PositiveInt = 15
    """A standby takes over this long after the leader's last sign of life."""
    lease_renew_s: PositiveFloat = 10.0
    """A leader gives up and ends this long after it began its last renewal."""
    lease_retry_s: PositiveFloat = 2.0

    kubeconfig: str | None = Field(default=None, validation_alias="KUBECONFIG")
    """Path; without it the pod's service account counts."""
    requests_per_second: PositiveFloat = 300.0
    """A change of one spec takes about five; at rest there are none."""
    request_burst: PositiveInt = 600

    workers: PositiveInt = 8
    """Resources that are reconciled at the same time."""
    resync_s: PositiveFloat = 300.0
    """Every resource is looked at, and every cache listed anew, about this often."""
    node_grace_s: PositiveFloat = NODE_GRACE_S
    """How long a node may be NotReady before its groups are restarted."""

    http_port: int = Field(default=8080, ge=0, le=65535)
    """/healthz, /readyz and /metrics."""
    webhook_port: int | None = Field(default=None, ge=0, le=65535)
    """Where the API server asks before it takes a KimiDeployment; absent: nothing listens."""
    webhook_cert_dir: Path = Path("/etc/kimi/webhook")
    """Holds tls.crt and tls.key; looked at again and again, since they are renewed in place."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("image_pull_secrets", "watch_namespaces", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return tuple(filter(None, value.split(","))) if isinstance(value, str) else value

    def model_post_init(self, _: object) -> None:
        """Refuse a Lease whose times contradict one another."""
        if self.lease_renew_s <= 1.2 * self.lease_retry_s:
            raise ValueError(
                f"lease_renew_s: got {self.lease_renew_s:g}, expected more than 1.2 * lease_retry_s "
                f"({self.lease_retry_s:g}): a leader must be able to try twice; raise the one or lower the other"
            )
        if self.lease_renew_s + LEAVE_S > self.lease_duration_s:
            raise ValueError(
                f"lease_duration_s: got {self.lease_duration_s}, expected at least lease_renew_s "
                f"({self.lease_renew_s:g}) + {LEAVE_S:g}: a leader that gives up must be gone before a standby takes "
                "over; raise the one or lower the other"
            )
