"""The vocabulary of status: condition types and reasons. Nothing else may appear in `status.conditions`."""

from __future__ import annotations

from enum import StrEnum


class ConditionType(StrEnum):
    """What a condition is about; one of each type stands in every status from the first visit on."""

    READY = "Ready"
    """Summary: every role has its groups ready at the current revision and the router answers."""
    AVAILABLE = "Available"
    """At least one pair of a prefill and a decode group serves requests."""
    PROGRESSING = "Progressing"
    """Something is being started, replaced or removed."""
    PLAN_RESOLVED = "PlanResolved"
    """The planner found a layout that fits; False carries the arithmetic."""
    PREFILL_READY = "PrefillReady"
    DECODE_READY = "DecodeReady"
    ROUTER_READY = "RouterReady"
    FABRIC_VERIFIED = "FabricVerified"
    """A test pattern that each prefill lane wrote into each decode lane was read back equal."""
    WEIGHTS_READY = "WeightsReady"
    """Every rank of the ready groups has loaded its part of the checkpoint."""
    CAPACITY_AVAILABLE = "CapacityAvailable"
    """The cluster has the nodes and GPUs that the groups need."""
    SCALING_ACTIVE = "ScalingActive"
    """Whether something other than the spec sets the number of groups."""
    DEGRADED = "Degraded"
    """The service answers with less than was asked for, or GPUs have less memory to spare than was planned."""
    STALLED = "Stalled"
    """No progress will come without a change by a person."""


class Reason(StrEnum):
    """Why a condition has its status."""

    # all is well
    AS_DESIRED = "AsDesired"
    SERVING = "Serving"
    PLAN_FITS = "PlanFits"
    GROUPS_READY = "GroupsReady"
    PODS_READY = "PodsReady"
    WEIGHTS_LOADED = "WeightsLoaded"
    FABRIC_VERIFIED = "FabricVerified"
    CAPACITY_SUFFICIENT = "CapacitySufficient"
    FIXED_GROUPS = "FixedGroups"
    # on the way
    RECONCILING = "Reconciling"
    GROUPS_STARTING = "GroupsStarting"
    GROUP_RESTARTING = "GroupRestarting"
    PODS_NOT_READY = "PodsNotReady"
    UPDATING = "Updating"
    DRAINING = "Draining"
    FABRIC_CHECKING = "FabricChecking"
    NOT_CHECKED = "NotChecked"
    # a person must act, or did
    PAUSED = "Paused"
    SUSPENDED = "Suspended"
    DOES_NOT_FIT = "DoesNotFit"
    INVALID_SPEC = "InvalidSpec"
    PROFILE_UNKNOWN = "ProfileUnknown"
    ARCHITECTURE_UNKNOWN = "ArchitectureUnknown"
    INSUFFICIENT_CAPACITY = "InsufficientCapacity"
    UNSCHEDULABLE = "Unschedulable"
    """No node takes the pods, for another reason than room: taints, selectors, volumes bound elsewhere."""
    PODS_REFUSED = "PodsRefused"
    """The API server does not let the pods be made: Pod Security, a quota, a webhook, a missing account or class.
    Or a pod that is not the group's has the name of one."""
    WEIGHTS_MISSING = "WeightsMissing"
    FABRIC_FAILED = "FabricFailed"
    IMAGE_UNAVAILABLE = "ImageUnavailable"
    RESTART_BUDGET_EXHAUSTED = "RestartBudgetExhausted"
    POOLS_DIFFER = "PoolsDiffer"
    HARDWARE_DIFFERS = "HardwareDiffers"
    """Pods run on nodes that are not what the profile describes: another chip, or parts of one."""
    MEMORY_DIFFERS = "MemoryDiffers"
    """Weights or free memory of a GPU are not as planned, though the pools are: the profile should be mended. Where
    less is left than was planned, it is also the reason of Degraded."""
    POOLS_UNREAD = "PoolsUnread"
    NAME_CONFLICT = "NameConflict"
    APPLY_REFUSED = "ApplyRefused"
    NODE_LOST = "NodeLost"
    # the cluster must act
    API_UNAVAILABLE = "ApiUnavailable"
