"""The parts of a pod that this API lets a user set: small, typed, and passed on to the pod template."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints

from kimi_operator.api.base import ApiModel, FreeForm, Quantity, rule, rules
from kimi_operator.api.quantity import with_enough_bytes

Name = Annotated[str, StringConstraints(min_length=1, max_length=253)]
LabelValue = Annotated[str, StringConstraints(max_length=253)]
Path = Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=r"^/")]
Source = Annotated[str, StringConstraints(min_length=1, max_length=512)]


class EnvVar(ApiModel):
    """One environment variable of a container."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("!(has(self.value) && has(self.valueFrom))", "value and valueFrom exclude each other")
        )
    )

    name: str = Field(
        min_length=1, max_length=253, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="Name of the variable."
    )
    value: str | None = Field(
        default=None, max_length=4096, description="Literal value; leave out when valueFrom is given."
    )
    value_from: FreeForm | None = Field(
        default=None, description="Source of the value, as in a Pod (secretKeyRef, fieldRef, ...)."
    )


class TolerationOperator(StrEnum):
    """How a toleration compares."""

    EXISTS = "Exists"
    EQUAL = "Equal"


class Toleration(ApiModel):
    """A toleration, as in a Pod."""

    key: str | None = Field(default=None, max_length=317, description="Key of the taint; all keys when absent.")
    operator: TolerationOperator = Field(default=TolerationOperator.EQUAL, description="Exists or Equal.")
    value: str | None = Field(default=None, max_length=63, description="Value of the taint, for Equal.")
    effect: str | None = Field(
        default=None, max_length=32, description="NoSchedule, PreferNoSchedule or NoExecute; all when absent."
    )
    toleration_seconds: int | None = Field(
        default=None, ge=0, description="How long NoExecute is tolerated, in seconds."
    )


Amounts = Annotated[dict[Name, Quantity], AfterValidator(with_enough_bytes)]


class Resources(ApiModel):
    """Requests and limits of a container; GPUs are left out: the hardware profile and gpusPerNode say how many."""

    requests: Amounts = Field(default_factory=dict, max_length=16, description="What the scheduler sets aside.")
    limits: Amounts = Field(default_factory=dict, max_length=16, description="What the kubelet enforces.")


class ImagePullSecret(ApiModel):
    """Name of a Secret with registry credentials in the deployment's namespace."""

    name: Name = Field(description="Name of the Secret.")


class PodTemplate(ApiModel):
    """What a platform team sets on the pods of a role or of the router; all else follows from the plan."""

    image: str | None = Field(
        default=None, min_length=1, max_length=512, description="Container image; the operator's default when absent."
    )
    image_pull_secrets: tuple[ImagePullSecret, ...] = Field(
        default=(), max_length=8, description="Secrets for the registry."
    )
    node_selector: dict[Name, LabelValue] = Field(
        default_factory=dict, max_length=16, description="Labels that a node must have."
    )
    tolerations: tuple[Toleration, ...] = Field(default=(), max_length=16, description="Taints that the pods tolerate.")
    affinity: FreeForm | None = Field(
        default=None, description="Affinity, as in a Pod; added to the rule of one pod a node."
    )
    env: tuple[EnvVar, ...] = Field(
        default=(), max_length=64, description="More environment; overrides the profile's variables of the same name."
    )
    resources: Resources = Field(
        default_factory=Resources, description="More requests and limits; override the profile's."
    )
    annotations: dict[Name, Annotated[str, StringConstraints(max_length=4096)]] = Field(
        default_factory=dict, max_length=32, description="Annotations of the pods."
    )
    priority_class_name: str | None = Field(default=None, max_length=253, description="PriorityClass of the pods.")
    service_account_name: str | None = Field(
        default=None, max_length=253, description="ServiceAccount of the pods; its token is not mounted."
    )
