"""What is said about one plan under a workload: memory, predicted times and rates, targets. Data."""

from __future__ import annotations

from msgspec import Struct

from kimi_operator.api.deployment import Role
from kimi_operator.api.profile import LimitsSpec
from kimi_operator.cli.manifests import Planned
from kimi_operator.errors import Problem
from kimi_operator.planner import MemoryLine, Plan, RolePlan
from kimi_operator.planner.case import Case, Solution, Stretch
from kimi_operator.planner.memory import GroupShape
from kimi_operator.planner.objective import Forecast
from kimi_operator.planner.predict import (
    CurvePoint,
    Prediction,
    Request,
)
from kimi_operator.planner.workload import Workload, fixed

ASSUMED_OUTPUT_SHARE = 8
"""Without a workload an eighth of the profile's context a request is its answer."""
TABLE_ROWS = 8


class RoleOutlook(Struct, frozen=True):
    """One role under the workload."""

    plan: RolePlan
    groups: int
    shape: GroupShape
    case: Case
    """With the plan's maxNumSeqs and its slots."""
    widest: Case
    """With slots cut for as many as would run, up to the profile's limit."""
    at_plan: Solution | Problem
    """What the plan's settings run."""
    best: Solution | Problem
    """What memory and the profile's limit would allow for this workload."""
    stretches: tuple[Stretch, ...]
    unused: tuple[MemoryLine, ...]

    @property
    def lanes(self) -> int:
        """Lanes of all groups."""
        return self.plan.lanes * self.groups


class Speed(Struct, frozen=True):
    """Predicted times and rates of the workload's mean request."""

    request: Request
    tpot_alone: Prediction
    prefill: Prediction
    """Of a prompt alone in its group."""
    busy_lanes: int
    """Lanes of a prefill group that this load keeps busy; targets are judged beside them."""
    prefill_busy: Prediction
    waiting_ttft: Prediction | None
    """Mean TTFT where prompts wait, for prefill or for memory of decode."""
    arriving_ttft: Prediction | None
    """Mean TTFT at a rate."""
    handoff: Prediction | None
    curve: tuple[CurvePoint, ...]
    """The knee, `at` and the capacity are among its points."""
    capacity: int
    """Requests that all decode lanes run at once. More may be under way: the others are in prefill, or wait."""
    knee: CurvePoint
    at: CurvePoint
    """At the concurrency that is asked for, else where all lanes are full."""
    comes: float | None = None
    """Output tokens a second of a stated rate; None without one."""

    @property
    def grows(self) -> bool:
        """Whether more comes than is served with any number at once, so that the queue never ends."""
        most = max(point.tokens_per_second.value for point in self.curve)
        return self.comes is not None and most < self.comes

    @property
    def running(self) -> int:
        """Requests in decode at once that `tpot` is for: no more than prefill feeds."""
        return self.at.running

    @property
    def mean_running(self) -> float:
        """Requests in decode at once on average, by Little's law, where prefill feeds no more."""
        return self.at.tokens_per_second.value * self.tpot.value / 1e3

    @property
    def tpot(self) -> Prediction:
        """Of the load that is sustained."""
        return self.at.tpot

    @property
    def ttft(self) -> Prediction:
        """Of the load that is asked for, on average, without the handoff."""
        return self.waiting_ttft or self.arriving_ttft or self.prefill_busy

    @property
    def rows(self) -> tuple[CurvePoint, ...]:
        """About `TABLE_ROWS` points of the curve, spread over it, with every one that a text names."""
        named = {self.capacity, self.knee.concurrency, self.at.concurrency, self.curve[-1].concurrency}
        step = max(1, len(self.curve) // TABLE_ROWS)
        return tuple(point for i, point in enumerate(self.curve) if i % step == 0 or point.concurrency in named)


class DecodeSpeed(Struct, frozen=True):
    """What bandwidth alone predicts of the workload's mean request, on a chip whose FLOPs nobody stated."""

    request: Request
    running: int
    tpot: Prediction
    tpot_alone: Prediction
    handoff: Prediction | None


class ContextPoint(Struct, frozen=True):
    """Requests of all decode lanes at once, every one being so long."""

    context_tokens: int
    planned: int
    cut_for_it: int
    """If slots and pages were cut for this context, within the profile's limit."""


class Outlook(Struct, frozen=True):
    """Everything that is said about one plan."""

    planned: Planned
    plan: Plan
    workload: Workload
    is_assumed: bool
    """Nobody stated the lengths."""
    prefill: RoleOutlook
    decode: RoleOutlook
    speed: Speed | None
    no_speed: str
    """Why there are no predictions, or none but those of `decode_speed`; empty when there are all."""
    misses: tuple[Problem, ...]
    doubts: tuple[Problem, ...]
    """Targets that are met within the prediction's band alone, where nothing else misses them."""
    crowd: tuple[Problem, ...] = ()
    """A stated load of which most wait for prefill, though it misses nothing that is stated."""
    decode_speed: DecodeSpeed | None = None
    """Where prefill, and so throughput, cannot be predicted, but a decode step can."""
    forecast: Forecast | None = None
    """Times on any layout of these GPUs; None where they are not known."""
    better: str = ""
    """A layout of the same nodes that gives much more output, and the command that shows it."""

    def role(self, role: Role) -> RoleOutlook:
        """One role."""
        return self.prefill if role is Role.PREFILL else self.decode

    @property
    def nodes(self) -> int:
        """Nodes of all groups."""
        return sum(each.groups * each.shape.nodes for each in (self.prefill, self.decode))


def assumed_workload(planned: Planned, plan: Plan) -> Workload:
    """What is assumed where nobody stated lengths: requests of the context that the profile sets aside for each."""
    prompt, output = assumed_lengths(planned.profile.spec.limits, plan.decode.max_model_len)
    return Workload(fixed(prompt), fixed(output))


def assumed_lengths(limits: LimitsSpec, longest: int) -> tuple[int, int]:
    """Prompt and output tokens of a request that fills its context, where none may have more than `longest`."""
    context = min(limits.context_tokens_per_seq, longest)
    output = max(1, context // ASSUMED_OUTPUT_SHARE)
    return max(1, context - output), output


def shape_of(planned: Planned, role: Role) -> GroupShape:
    """Shape of a role's groups."""
    spec = planned.deployment.spec.role(role)
    return GroupShape(spec.nodes_per_group, spec.gpus_per_node, spec.tensor_parallel)
