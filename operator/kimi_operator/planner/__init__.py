"""Pure planner: exact integers in bytes, no I/O, no kopf, no torch."""

from kimi_operator.planner.architecture import Architecture, read_architecture
from kimi_operator.planner.memory import MemoryLine
from kimi_operator.planner.plan import Infeasible, Plan, RolePlan, make_plan
from kimi_operator.planner.report import plan_status, weights_bytes

__all__ = [
    "Architecture",
    "Infeasible",
    "MemoryLine",
    "Plan",
    "RolePlan",
    "make_plan",
    "plan_status",
    "read_architecture",
    "weights_bytes",
]
