"""Numbers of nodes that can be, near one that equal groups cannot share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from kimi_operator.api.base import parse
from kimi_operator.api.deployment import KimiDeployment, Role
from kimi_operator.api.profile import HardwareProfile
from kimi_operator.cli.manifests import plan_deployment
from kimi_operator.cli.outlook import assumed_lengths
from kimi_operator.errors import InvalidSpec
from kimi_operator.planner import Plan
from kimi_operator.planner.layout import MAX_NODES
from kimi_operator.planner.plan import kv_dtype_of
from kimi_operator.planner.refusals import shortage
from kimi_operator.planner.space import longest_request, worker_search
from kimi_operator.planner.workload import Workload, fixed
from kimi_operator.profiles import architecture


class Asked(Struct, frozen=True):
    """A number of nodes that cannot be, and the manifest that the other flags stand for with another one."""

    nodes: int
    num_groups: int
    chip: HardwareProfile
    document: Callable[[int], Mapping[str, Any]]
    """Nodes of all groups -> manifest; they must be whole groups."""

    def remedy(self) -> str:
        """What to write instead."""
        fewer = ", or lower --prefill-groups or --decode-groups"
        too_few = fewer if self.nodes < self.num_groups and self.num_groups > len(Role) else ""
        search = f", or --search {self.nodes} instead, which chooses the groups" if self._is_found() else ""
        near = (self._first(self._below()), self._first(self._above()))
        numbers = " or ".join(str(nodes) for nodes in near if nodes is not None)
        if numbers:
            return f"write --nodes {numbers}{too_few}{search}"
        return f"no number of nodes fits with the other flags: change those first{search}"

    def _below(self) -> Iterable[int]:
        step = self.num_groups
        return range(min(self.nodes // step, MAX_NODES) * step, 0, -step)

    def _above(self) -> Iterable[int]:
        step = self.num_groups
        return range(max(step, self.nodes // step * step + step), MAX_NODES * step + 1, step)

    def _first(self, numbers: Iterable[int]) -> int | None:
        return next((nodes for nodes in numbers if self._can_be(nodes)), None)

    def _can_be(self, nodes: int) -> bool:
        """Whether it fits."""
        try:
            deployment = parse(KimiDeployment, self.document(nodes))
            return isinstance(plan_deployment(deployment, {self.chip.metadata.name: self.chip}).plan, Plan)
        except InvalidSpec:
            return False

    def _is_found(self) -> bool:
        """Whether a search of so many nodes finds a layout for the lengths that it assumes."""
        if not 1 <= self.nodes <= MAX_NODES:
            return False
        try:
            spec = parse(KimiDeployment, self.document(self.num_groups)).spec
            a = architecture(spec.model.architecture)
        except InvalidSpec:
            return False
        profile, stated = self.chip.spec, spec.model.max_model_len
        prompt, output = assumed_lengths(profile.limits, longest_request(a, stated))
        workload = Workload(fixed(prompt), fixed(output))
        request = worker_search(a, profile, kv_dtype_of(spec, profile), workload, self.nodes)
        return shortage(replace(request, max_model_len=stated, is_assumed=True)) is None
