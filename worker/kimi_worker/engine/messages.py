"""Messages among the ranks of a group: a leader and its followers, the lanes and the coordinator."""

from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from kimi_worker.protocol.handoff import RankCommand, RankReport
from kimi_worker.protocol.step import StepPlan


def rank_socket(run_dir: Path, local: int) -> str:
    """ZeroMQ address where a lane's leader waits for follower `local` of its pod."""
    return f"ipc://{run_dir}/rank-{local}.sock"


def tcp_address(host: str, port: int) -> str:
    """ZeroMQ address of a host name or an IP address of either family."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


# Leader to follower: besides these, every RankCommand.


class Run(Struct, frozen=True, tag="run"):
    """Take part in the group's next step."""

    plan: StepPlan


ToRank: TypeAlias = Run | RankCommand


# Follower to leader: besides this, every RankReport.


class Started(Struct, frozen=True, tag="started"):
    """The rank has loaded its weights and met its group. Sizes are those of this rank."""

    tp_rank: int
    descriptor: bytes
    """Of the rank's transport; empty without a handoff."""
    weights_bytes: int
    free_bytes: int


FromRank: TypeAlias = Started | RankReport


# Lane to coordinator


class Join(Struct, frozen=True, tag="join"):
    """First message of a lane."""

    lane: int


class AskWave(Struct, frozen=True, tag="ask"):
    """The lane has work and wants this wave to begin."""

    wave: int


class AskDrain(Struct, frozen=True, tag="ask_drain"):
    """The lane was told to drain, so its whole group drains: no lane can step without the others."""


class Empty(Struct, frozen=True, tag="empty"):
    """The draining lane has nothing left to do."""

    lane: int


ToCoordinator: TypeAlias = Join | AskWave | AskDrain | Empty


# Coordinator to every lane


class Assembled(Struct, frozen=True, tag="assembled"):
    """Every lane has joined: the group can serve. First message."""


class Wake(Struct, frozen=True, tag="wake"):
    """A wave begins."""

    wave: int


class DrainGroup(Struct, frozen=True, tag="drain_group"):
    """Accept nothing new."""


class Drained(Struct, frozen=True, tag="drained"):
    """No lane of the group has anything left to do: its pods may end."""


FromCoordinator: TypeAlias = Assembled | Wake | DrainGroup | Drained
