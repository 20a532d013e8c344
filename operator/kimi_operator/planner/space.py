"""The layouts to search: which shapes divide a model, how groups fill the nodes, and each role solved once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property

from msgspec import Struct, field
from msgspec.structs import replace

from kimi_operator.api.deployment import Role
from kimi_operator.api.profile import DType, HardwareProfileSpec
from kimi_operator.errors import Problem
from kimi_operator.planner.architecture import Architecture
from kimi_operator.planner.budget import BlockPool, Budget, PagePool, PoolDesign
from kimi_operator.planner.case import Case, Solution, Timing
from kimi_operator.planner.layout import divides, even_shapes
from kimi_operator.planner.memory import (
    ExpertFormat,
    GroupShape,
    expert_format,
    page_bytes,
    reserve_lines,
    slot_bytes,
    weight_lines,
)
from kimi_operator.planner.pools import Units, num_slots, seqs_by_context
from kimi_operator.planner.solve import solve
from kimi_operator.planner.targets import Verdict
from kimi_operator.planner.unified import block_layout
from kimi_operator.planner.workload import Workload


class Layout(Struct, frozen=True):
    """Groups of both roles. Lanes are data parallel, and all ranks of a group share its experts."""

    prefill: GroupShape
    prefill_groups: int
    decode: GroupShape
    decode_groups: int

    @property
    def nodes(self) -> int:
        """Nodes of all groups."""
        return self.prefill_groups * self.prefill.nodes + self.decode_groups * self.decode.nodes

    def shape(self, role: Role) -> GroupShape:
        """Shape of a role's groups."""
        return self.prefill if role is Role.PREFILL else self.decode

    def groups(self, role: Role) -> int:
        """Groups of a role."""
        return self.prefill_groups if role is Role.PREFILL else self.decode_groups

    def lanes(self, role: Role) -> int:
        """Lanes of all groups of a role."""
        return self.groups(role) * self.shape(role).lanes

    def __str__(self) -> str:
        return ", ".join(f"{role}: {self.groups(role)} x {self.shape(role).in_nodes}" for role in Role)


def _no_wait(_layout: Layout, _decode: Solution) -> tuple[Verdict, ...]:
    """Without predictions nobody can say what waits."""
    return ()


class Search(Struct, frozen=True, dict=True):
    """What to search. One hardware profile for all nodes."""

    architecture: Architecture
    profile: HardwareProfileSpec
    workload: Workload
    num_nodes: int
    design: Callable[[int], PoolDesign]
    """tensorParallel -> how a GPU's pool is cut: `page_pools` or `block_pools`."""
    experts: ExpertFormat = ExpertFormat.MXFP4
    max_model_len: int | None = None
    """Tokens that a request may have and both roles must hold, where they are stated."""
    max_num_seqs: Mapping[Role, int] = field(default_factory=dict)
    """Running requests of a lane, where they are stated: a pool sets their slots aside however few run."""
    is_assumed: bool = False
    """Nobody stated the lengths: a lane runs no more than a plan does, which gives each the profile's context."""
    pool_bytes: int | None = None
    """Of a GPU, where a pool is stated, as vLLM takes it; no command states one."""
    timing: Callable[[GroupShape, int], Timing] | None = None
    """(shape, groups) -> times of each group."""
    throughput: Callable[[Layout, Solution], float] | None = None
    """(layout, decode) -> requests or tokens a second, more is better. Without it capacity ranks, and
    then the fewest prefill groups win: capacity knows nothing of how fast prompts come."""
    queued: Callable[[Layout, Solution], tuple[Verdict, ...]] = _no_wait
    """(layout, decode) -> what is held against the wait for a prefill lane; nothing where none waits."""

    def outcome(self, role: Role, shape: GroupShape, groups: int) -> Solution | Problem:
        """One role of one layout, solved once."""
        key = (role, shape, groups)
        if key not in self._solved:
            self._solved[key] = solve(self._case(role, shape, groups))
        return self._solved[key]

    def fits(self, role: Role, shape: GroupShape) -> bool:
        """Whether a group of this shape can serve the workload's longest request."""
        return divides(self.architecture, shape) and isinstance(self.outcome(role, shape, 1), Solution)

    def budget(self, shape: GroupShape) -> Budget:
        """Memory of a GPU of a group."""
        lines = weight_lines(self.architecture, shape, self.experts, self.profile.runtime.dtype)
        lines += reserve_lines(self.profile)
        return Budget(self.profile.gpu.memory, lines, self.design(shape.tensor_parallel), self.pool_bytes)

    @property
    def longest(self) -> int:
        """Tokens that a request may have."""
        return longest_request(self.architecture, self.max_model_len)

    @cached_property
    def _solved(self) -> dict[tuple[Role, GroupShape, int], Solution | Problem]:
        return {}

    @cached_property
    def _served(self) -> Workload:
        return self.workload.within(self.longest)

    def _case(self, role: Role, shape: GroupShape, groups: int) -> Case:
        budget, stated = self.budget(shape), self.max_num_seqs.get(role)
        if stated is not None and isinstance(budget.design, PagePool):
            budget = replace(budget, design=replace(budget.design, slots=num_slots(stated)))
        return Case(
            workload=self._served,
            role=role,
            lanes=groups * shape.lanes,
            budget=budget,
            most_seqs=stated or self._most_seqs(budget),
            max_positions=self.longest,
            timing=None if self.timing is None else self.timing(shape, groups).of(role),
            longest=self.max_model_len or 1,
            is_set=stated is not None,
        )

    def _most_seqs(self, budget: Budget) -> int:
        limits, pool = self.profile.limits, budget.design
        if not self.is_assumed or not isinstance(pool, PagePool):
            return limits.max_num_seqs
        needed = pool.units(self.max_model_len or 1)
        return seqs_by_context(limits, self.max_model_len, Units(budget.free, pool.slot_bytes, pool.page_bytes, needed))


def longest_request(a: Architecture, max_model_len: int | None) -> int:
    """Tokens that a request may have: what is stated, else what the model was made for."""
    return min(max_model_len or a.max_positions, a.max_positions)


def worker_search(
    a: Architecture, profile: HardwareProfileSpec, kv_dtype: DType, workload: Workload, num_nodes: int
) -> Search:
    """A search of layouts of the bundled worker, which has its own pools and form of experts."""
    experts = expert_format(profile.runtime)
    return Search(a, profile, workload, num_nodes, page_pools(a, profile, kv_dtype), experts)


def page_pools(a: Architecture, profile: HardwareProfileSpec, kv_dtype: DType) -> Callable[[int], PoolDesign]:
    """Pools as the bundled worker cuts them, by tensorParallel."""
    size = profile.limits.page_size_tokens
    page, dtype = page_bytes(a, size, kv_dtype), profile.runtime.dtype
    return lambda tensor_parallel: PagePool(size, page, slot_bytes(a, tensor_parallel, dtype))


def block_pools(a: Architecture, row_itemsize: int) -> Callable[[int], PoolDesign]:
    """Pools as vLLM cuts them, by tensorParallel; rows of `row_itemsize` bytes a number.

    No command searches with them: they hold the search against published layouts.
    """
    return lambda tensor_parallel: BlockPool(block_layout(a, tensor_parallel, row_itemsize))


def layouts(request: Search) -> Iterator[Layout]:
    """Layouts whose groups fit. Decode takes all groups that the nodes beside prefill allow: fewer serve no more."""
    nodes = request.num_nodes
    shapes = [shape for n in range(1, nodes + 1) for shape in shapes_of(request, n)]
    for prefill in (shape for shape in shapes if request.fits(Role.PREFILL, shape)):
        for decode in (shape for shape in shapes if request.fits(Role.DECODE, shape)):
            # A rank writes straight into its peer's memory, so lanes of both roles are equally wide.
            if prefill.tensor_parallel != decode.tensor_parallel:
                continue
            for groups in range(1, (nodes - decode.nodes) // prefill.nodes + 1):
                yield Layout(prefill, groups, decode, (nodes - groups * prefill.nodes) // decode.nodes)


def shapes_of(request: Search, nodes: int) -> list[GroupShape]:
    """Shapes of a group of so many nodes that divide the model evenly."""
    return even_shapes(request.architecture, nodes, request.profile.gpu.per_node)
