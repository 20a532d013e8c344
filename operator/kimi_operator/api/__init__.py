"""Models of the custom resources. The CRDs are generated from them (`python -m kimi_operator.api.crd`)."""

from kimi_operator.api.base import API_VERSION, GROUP, VERSION, dump, parse
from kimi_operator.api.conditions import ConditionType, Reason
from kimi_operator.api.deployment import KimiDeployment, KimiDeploymentSpec, Role, RoleSpec
from kimi_operator.api.profile import HardwareProfile, HardwareProfileSpec
from kimi_operator.api.status import (
    Condition,
    Failure,
    GroupState,
    GroupStatus,
    KimiDeploymentStatus,
    MeasuredFabric,
    MeasuredPools,
    MemoryLineStatus,
    PlanStatus,
    RolePlanStatus,
    RoleStatus,
    RouterStatus,
)

__all__ = [
    "API_VERSION",
    "GROUP",
    "VERSION",
    "Condition",
    "ConditionType",
    "Failure",
    "GroupState",
    "GroupStatus",
    "HardwareProfile",
    "HardwareProfileSpec",
    "KimiDeployment",
    "KimiDeploymentSpec",
    "KimiDeploymentStatus",
    "MeasuredFabric",
    "MeasuredPools",
    "MemoryLineStatus",
    "PlanStatus",
    "Reason",
    "Role",
    "RolePlanStatus",
    "RoleSpec",
    "RoleStatus",
    "RouterStatus",
    "dump",
    "parse",
]
