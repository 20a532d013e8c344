"""Who a rank is: pure arithmetic from the group's shape. No torch."""

from dataclasses import dataclass

from kimi_worker.settings import ParallelSettings


class ParallelError(ValueError):
    """The group's shape does not fit the model or itself; the message says which numbers clash."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of one rank in its group.

    A lane is `tp_size` consecutive ranks of one pod that hold the same tokens; every rank of the group owns an equal
    share of the experts.
    """

    rank: int
    world_size: int
    ranks_per_node: int
    tp_size: int

    @property
    def ordinal(self) -> int:
        """Index of the rank's pod."""
        return self.rank // self.ranks_per_node

    @property
    def local(self) -> int:
        """Index of the rank within its pod, also of its GPU."""
        return self.rank % self.ranks_per_node

    @property
    def lane(self) -> int:
        """Index of the lane within the group."""
        return self.rank // self.tp_size

    @property
    def local_lane(self) -> int:
        """Index of the lane within its pod."""
        return self.local // self.tp_size

    @property
    def num_lanes(self) -> int:
        return self.world_size // self.tp_size

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def leader(self) -> int:
        """Global rank of the lane's leader."""
        return self.rank - self.tp_rank

    @property
    def is_leader(self) -> bool:
        return self.tp_rank == 0

    def lane_ranks(self, lane: int) -> range:
        """Global ranks of a lane of the group, leader first."""
        return range(lane * self.tp_size, (lane + 1) * self.tp_size)

    def experts(self, num_experts: int) -> range:
        """Experts that this rank owns. Raises ParallelError when the group cannot share them evenly."""
        if num_experts % self.world_size:
            raise ParallelError(
                f"num_experts {num_experts} is not a multiple of the group's {self.world_size} ranks; "
                "change nodes_per_group or ranks_per_node"
            )
        share = num_experts // self.world_size
        return range(self.rank * share, (self.rank + 1) * share)

    def share(self, size: int, what: str) -> range:
        """This rank's part of something that tensor parallelism splits evenly. Raises ParallelError."""
        if size % self.tp_size:
            raise ParallelError(f"{what} {size} is not a multiple of tensor_parallel {self.tp_size}")
        part = size // self.tp_size
        return range(self.tp_rank * part, (self.tp_rank + 1) * part)


def place(parallel: ParallelSettings, ordinal: int, local: int) -> RankPlace:
    """The place of rank `local` of pod `ordinal`. Raises ParallelError when there is no such rank."""
    if not 0 <= ordinal < parallel.nodes_per_group:
        raise ParallelError(f"pod ordinal {ordinal} is outside the group's {parallel.nodes_per_group} nodes")
    if not 0 <= local < parallel.ranks_per_node:
        raise ParallelError(f"local rank {local} is outside the pod's {parallel.ranks_per_node} ranks")
    return RankPlace(
        rank=ordinal * parallel.ranks_per_node + local,
        world_size=parallel.world_size,
        ranks_per_node=parallel.ranks_per_node,
        tp_size=parallel.tensor_parallel,
    )
