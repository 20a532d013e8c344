"""Collectives of a group: rendezvous over a TCP store, one process group for all ranks, one a lane, one for control.

The process groups are made directly on a prefixed store instead of through torch's global default group: each can then
be bound to the pod's own address (gloo otherwise guesses from the host name), and nothing is shared between groups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from kimi_worker.parallel.ranks import RankPlace


class CollectiveError(Exception):
    """A peer is gone or too slow. The whole group must be restarted: its collectives cannot be resumed."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where and how the ranks of one group meet.

    host, port       rank 0's store; `host` is what the other ranks dial
    own_ip           address that this rank's gloo sockets bind to and publish
    generation       restarts of the group; ranks of different generations never meet
    collectives      gloo, or nccl (RCCL on ROCm) for the tensors on the device
    """

    host: str
    port: int
    own_ip: str
    generation: int
    collectives: str
    start_timeout_s: float
    collective_timeout_s: float


class Collective:
    """The collectives of one set of ranks. They raise CollectiveError when a peer is gone or too slow.

    Over gloo a call blocks until it is done. Over RCCL it only orders the GPU's streams and returns; a dead peer shows
    at a later call or when results are read, or the library's watchdog aborts the process (SIGABRT) at the time-out.
    """

    def __init__(
        self, backend: "dist.ProcessGroupGloo | dist.ProcessGroupNCCL", rank: int, size: int, name: str
    ) -> None:
        self._backend = backend
        self._name = name
        self.rank = rank
        self.size = size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the ranks in place and return it. Every rank gets the same bits."""
        self._wait("all_reduce", lambda: self._backend.allreduce([tensor]))
        return tensor

    def all_to_all(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Send the next `send[r]` rows to rank r and return the `receive[r]` rows of each rank r, in rank order.

        rows     [sum(send), ...]  contiguous
        returns  [sum(receive), ...]
        """
        received = rows.new_empty((sum(receive), *rows.shape[1:]))
        self._wait("all_to_all", lambda: self._backend.alltoall_base(received, rows, receive, send))
        return received

    def gather(self, tensor: Tensor) -> list[Tensor] | None:
        """Collect a tensor of the same shape from every rank on rank 0, in rank order; None on the others."""
        options = dist.GatherOptions()
        options.rootRank = 0
        received = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else []
        self._wait("gather", lambda: self._backend.gather([received] if received else [], [tensor], options))
        return received or None

    def close(self) -> None:
        """Give the sockets back; later calls fail."""
        self._backend.shutdown()

    def _wait(self, what: str, start: Callable[[], dist.Work]) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            raise CollectiveError(
                f"{what} over the {self._name} ({self.size} ranks): {error}; a rank has died or hangs, "
                "the group must restart"
            ) from error


class MeetingPoint:
    """Waits for slow ranks at the start, over the store: patient for the start timeout, and names who is missing."""

    def __init__(self, store: dist.Store, place: RankPlace, meeting: Rendezvous) -> None:
        self._store, self._place, self._meeting = store, place, meeting

    def wait_for_all(self, what: str) -> None:
        """See Groups.wait_for_all."""
        keys = [f"{what}/{rank}" for rank in range(self._place.world_size)]
        try:
            self._store.set(keys[self._place.rank], "1")
            self._store.wait(keys, timedelta(seconds=self._meeting.start_timeout_s))
        except dist.DistStoreError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise CollectiveError(
                f"rank {self._place.rank} (generation {self._meeting.generation}): ranks {missing} of "
                f"{self._place.world_size} were not {what} within {self._meeting.start_timeout_s:.0f} s; "
                "look at their pods' logs"
            ) from error
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self._place.rank}: rank 0 has gone while others were not {what}: {error}"
            ) from error


@dataclass(frozen=True, slots=True)
class Groups:
    """What one rank needs to talk to the others. A group of one rank has no collectives at all.

    world    all ranks, tensors on the device: expert exchange; None when the group has one rank
    lane     the ranks of this lane, tensors on the device; None without tensor parallelism
    control  all ranks, CPU tensors over gloo: step bookkeeping; None when the group has one rank
    """

    place: RankPlace
    device: torch.device
    world: Collective | None = None
    lane: Collective | None = None
    control: Collective | None = None
    meeting_point: "MeetingPoint | None" = None

    def sum_over_group(self, value: int) -> int:
        """Sum of a number over all ranks; every rank calls it and sees the same result. Raises CollectiveError."""
        if self.control is None:
            return value
        return int(self.control.all_reduce(torch.tensor([value], dtype=torch.int64)).item())

    def wait_for_all(self, what: str) -> None:
        """Return once every rank has called this with the same `what`, at most once each. Raises CollectiveError."""
        if self.meeting_point is not None:
            self.meeting_point.wait_for_all(what)

    def close(self) -> None:
        for collective in (self.control, self.lane, self.world):
            if collective is not None:
                collective.close()


def device_of(place: RankPlace, kind: str) -> torch.device:
    """The device of a rank: `cpu`, or the GPU with the rank's index in its pod."""
    return torch.device("cpu") if kind == "cpu" else torch.device("cuda", place.local)


def connect(place: RankPlace, device: torch.device, meeting: Rendezvous) -> Groups:
    """Meet the other ranks of the group; returns when all are there. Raises CollectiveError after the start timeout."""
    if place.world_size == 1:
        return Groups(place, device)
    try:
        store = _open_store(place, meeting)
        meeting_point = MeetingPoint(store, place, meeting)
        # First, because the process groups wait for their members only as long as for a collective.
        meeting_point.wait_for_all("present")
        world = _make(store, "group", (place.rank, place.world_size), device, meeting)
        control = _make(store, "control", (place.rank, place.world_size), torch.device("cpu"), meeting)
        lane = None
        if place.tp_size > 1:
            lane = _make(store, f"lane {place.lane}", (place.tp_rank, place.tp_size), device, meeting)
        groups = Groups(place, device, world, lane, control, meeting_point)
        # gloo connects while it is made, RCCL at its first collective: make every group prove itself here.
        for collective in (world, control, lane):
            if collective is not None:
                on = torch.device("cpu") if collective is control else device
                collective.all_reduce(torch.ones(1, device=on))
    except RuntimeError as error:
        raise CollectiveError(
            f"rank {place.rank} of {place.world_size} (generation {meeting.generation}) could not meet its group at "
            f"{meeting.host}:{meeting.port} within {meeting.start_timeout_s:.0f} s: {error}"
        ) from error
    return groups


def _open_store(place: RankPlace, meeting: Rendezvous) -> dist.Store:
    if place.world_size == 1:
        # Nobody else comes: no port, which the store would open on all addresses.
        return dist.HashStore()
    is_master = place.rank == 0
    store = dist.TCPStore(
        # Rank 0 reaches its own store without the name service.
        host_name=meeting.own_ip if is_master else meeting.host,
        port=meeting.port,
        world_size=place.world_size,
        is_master=is_master,
        timeout=timedelta(seconds=meeting.start_timeout_s),
        wait_for_workers=False,
    )
    return dist.PrefixStore(f"generation-{meeting.generation}", store)


def _make(
    store: dist.Store, name: str, member: tuple[int, int], device: torch.device, meeting: Rendezvous
) -> Collective:
    """Make one process group; `member` is this rank's index in it and its size."""
    rank, size = member
    prefixed = dist.PrefixStore(name.replace(" ", "-"), store)
    timeout = timedelta(seconds=meeting.collective_timeout_s)
    if meeting.collectives == "nccl" and device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return Collective(dist.ProcessGroupNCCL(prefixed, rank, size, nccl), rank, size, name)
    gloo = dist.ProcessGroupGloo._Options()
    gloo._timeout = timeout
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=meeting.own_ip)]
    return Collective(dist.ProcessGroupGloo(prefixed, rank, size, gloo), rank, size, name)
