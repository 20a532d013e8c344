"""The loop of a rank that follows its lane's leader."""

import zmq

from kimi_worker.engine.links import LeaderLink
from kimi_worker.engine.messages import Run, ToRank
from kimi_worker.engine.runner import Runner
from kimi_worker.handoff.rank import RankPort
from kimi_worker.parallel.groups import Groups

PUMP_MS = 1
"""Milliseconds between polls of the transport while transfers are in flight and nothing else happens."""


class Follower:
    """Executes its leader's commands in order. Costs no CPU while there are none."""

    def __init__(self, leader: LeaderLink, runner: Runner, groups: Groups, port: RankPort | None) -> None:
        self._leader = leader
        self._runner = runner
        self._groups = groups
        self._port = port
        self._poller = zmq.Poller()
        self._poller.register(leader.socket, zmq.POLLIN)

    def run(self) -> None:
        """Until the process ends. Raises CollectiveError when another rank is gone."""
        while True:
            is_watching = self._port is not None and self._port.is_watching
            self._poller.poll(PUMP_MS if is_watching else None)
            for message in self._leader.receive():
                self._execute(message)
            if self._port is not None and self._port.is_watching:
                for report in self._port.poll():
                    self._leader.send(report)

    def _execute(self, message: ToRank) -> None:
        match message:
            case Run(plan):
                # No lane has work: the step that ends a wave computes nothing.
                if self._groups.sum_over_group(0):
                    self._runner.execute(plan)
            case command:
                assert self._port is not None, f"{type(command).__name__} without a handoff"
                self._port.execute(command)
