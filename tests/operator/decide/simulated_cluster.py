"""A small cluster in virtual time, for the decisions alone: StatefulSets with OnDelete and Parallel, kubelets, nodes.

It keeps the semantics that matter: a StatefulSet makes missing pods from its present template, at some later moment and
perhaps from a template that it has not yet seen replaced; a deleted pod takes time to leave, and never leaves a node
that is off; a group becomes ready only when all of its pods of one generation run since their first start together;
one whose peer does not come gives up after a while; readiness may be lost and come back.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

from kimi_operator.api.status import GroupState
from kimi_operator.decide.evidence import Scene
from kimi_operator.decide.groups import GroupDecision, GroupPolicy, GroupWanted, Stamp
from kimi_operator.decide.rollout import decide_groups
from kimi_operator.observe import Ended, GroupSeen, NodeSeen, PodSeen
from kimi_operator.render.names import GroupKey, stateful_set_name

OWNER = "uid-of-k3"
STEP_S = 2.0


@dataclass
class SimulatedSet:
    """A StatefulSet: the object in the API, and the older template that its controller may still believe in."""

    seen: GroupSeen
    controller_template: tuple[int, str]
    pods: dict[int, PodSeen] = field(default_factory=dict)


class SimulatedCluster:
    """Moves in steps of two seconds; `operate` is one look of the operator."""

    def __init__(self, seed: int, wanted: list[GroupWanted], policy: GroupPolicy, num_nodes: int = 8) -> None:
        self.rng = random.Random(seed)
        self.now_s = 1_000_000.0
        self.wanted = wanted
        self.policy = policy
        self.paused = False
        self.nodes = {f"n{i}": NodeSeen(name=f"n{i}") for i in range(num_nodes)}
        self.sets: dict[GroupKey, SimulatedSet] = {}
        self.leaving: list[tuple[float, PodSeen, GroupKey, int]] = []
        self.broken_revisions: set[str] = set()
        self.decisions: dict[GroupKey, GroupDecision] = {}
        self.num_uids = 0
        self.num_places = 1_000_000
        """Pods that the nodes have room for."""
        self.peer_patience_s = math.inf
        """A container that has waited this long for its peers ends."""
        self.graces: list[float | None] = []
        """Of the deletions that the operator asked for, in seconds; None: the pod's own."""

    # -- what the operator does ------------------------------------------------

    def operate(self) -> None:
        """Decide and act once, as reconcile does."""
        seen = {key: self._group_seen(key) for key in self.sets}
        scene = Scene(self.nodes, self.now_s)
        self.decisions = decide_groups(self.wanted, seen, scene, self.policy, paused=self.paused)
        revisions = {group.key: group.revision for group in self.wanted}
        for key, decision in self.decisions.items():
            if decision.stamp is not None:
                revision = seen[key].revision if decision.keep_template else revisions[key]
                self._apply(key, decision.stamp, decision.replicas, revision)
            for pod in decision.delete:
                self.graces.append(decision.grace_s)
                self._delete(key, pod, decision.grace_s)
            for pod in decision.force_delete:
                self._remove(key, pod)
        for key in set(self.sets) - set(self.decisions):
            for pod in list(self.sets[key].pods.values()):
                self._remove(key, pod)
            del self.sets[key]

    def _group_seen(self, key: GroupKey) -> GroupSeen:
        going = tuple(replace(pod, deleting=True) for _, pod, owner, _ in self.leaving if owner == key)
        return replace(self.sets[key].seen, pods=going + tuple(self.sets[key].pods.values()))

    def _apply(self, key: GroupKey, stamp: Stamp, replicas: int, revision: str) -> None:
        known = self.sets.get(key)
        seen = GroupSeen(
            key, f"set-{key}", OWNER, stamp.generation, revision, replicas,
            stamp.restarted_s, stamp.restarts, stamp.streak, stamp.failure,
        )  # fmt: skip
        if known is None:
            self.sets[key] = SimulatedSet(seen, (stamp.generation, revision))
            return
        assert stamp.generation >= known.seen.generation, "a generation never goes back"
        if known.seen.revision != revision:
            assert stamp.generation > known.seen.generation, "a generation has one revision"
        known.seen = seen

    def _delete(self, key: GroupKey, pod: PodSeen, grace_s: int | None) -> None:
        ordinal = int(pod.name.rsplit("-", 1)[1])
        standing = self.sets[key].pods.get(ordinal)
        if standing is None or standing.uid != pod.uid:  # the precondition of the real call
            return
        del self.sets[key].pods[ordinal]
        if standing.node is None:  # nobody has to end anything
            return
        leaves_s = self.now_s + self.rng.uniform(0, 30 if grace_s is None else grace_s)
        self.leaving.append((leaves_s, standing, key, ordinal))

    def _remove(self, key: GroupKey, pod: PodSeen) -> None:
        self.leaving = [entry for entry in self.leaving if entry[1].uid != pod.uid]
        pods = self.sets[key].pods
        for ordinal in [number for number, standing in pods.items() if standing.uid == pod.uid]:
            del pods[ordinal]

    # -- what the cluster does -------------------------------------------------

    def step(self) -> None:
        """Two seconds of controllers and kubelets."""
        self.now_s += STEP_S
        self.leaving = [
            entry for entry in self.leaving if entry[0] > self.now_s or not self.nodes[entry[1].node or ""].ready
        ]
        for key, group in self.sets.items():
            self._stateful_set_controller(key, group)
            self._kubelets(group)

    def _stateful_set_controller(self, key: GroupKey, group: SimulatedSet) -> None:
        generation, revision = group.controller_template
        # Its cache lags: pods may be made from the template before.
        if self.rng.random() < 0.7:
            generation, revision = group.controller_template = (group.seen.generation, group.seen.revision)
        for ordinal in [number for number in group.pods if number >= group.seen.replicas]:
            self._delete(key, group.pods[ordinal], None)
        busy = {number for _, _, owner, number in self.leaving if owner == key}
        for ordinal in range(group.seen.replicas):
            if ordinal not in group.pods and ordinal not in busy:
                group.pods[ordinal] = self._new_pod(key, ordinal, generation, revision)

    def _new_pod(self, key: GroupKey, ordinal: int, generation: int, revision: str) -> PodSeen:
        self.num_uids += 1
        return PodSeen(
            f"{stateful_set_name('k3', key)}-{ordinal}", f"pod-{self.num_uids}", generation, revision, self.now_s
        )

    def _kubelets(self, group: SimulatedSet) -> None:
        free = [name for name, node in self.nodes.items() if node.ready and not node.out_of_service]
        for ordinal, pod in group.pods.items():
            if pod.node is None and free:
                group.pods[ordinal] = self._schedule(pod, free)
            elif pod.node and self.nodes[pod.node].ready and pod.started_s is None and pod.ended is None:
                if pod.restarts == 0 and self.rng.random() < 0.6:
                    group.pods[ordinal] = replace(pod, started_s=self.now_s, phase="Running")
            elif pod.revision in self.broken_revisions and pod.started_s is not None and pod.restarts == 0:
                self.kill_container(group, ordinal, "checkpoint /models/checkpoint/config.json: no such file")
            elif not pod.was_ready and pod.restarts == 0 and self._has_waited_in_vain(pod):
                self.kill_container(group, ordinal, "its peers did not come")
        self._form(group)
        self._recover(group)

    def _schedule(self, pod: PodSeen, free: list[str]) -> PodSeen:
        placed = [one for group in self.sets.values() for one in group.pods.values() if one.node is not None]
        if len(placed) + len(self.leaving) >= self.num_places:
            return replace(pod, unschedulable="0/8 nodes are available: 8 Insufficient amd.com/gpu.")
        return replace(pod, node=self.rng.choice(free), scheduled_s=self.now_s, unschedulable=None)

    def _has_waited_in_vain(self, pod: PodSeen) -> bool:
        return pod.started_s is not None and self.now_s - pod.started_s > self.peer_patience_s

    def _recover(self, group: SimulatedSet) -> None:
        """A group that has lost nothing but its readiness gets it back."""
        whole = len(group.pods) == group.seen.replicas and all(pod.was_ready for pod in group.pods.values())
        for ordinal, pod in group.pods.items():
            well = pod.restarts == 0 and pod.node is not None and self.nodes[pod.node].ready
            if whole and well and not pod.ready and self.rng.random() < 0.2:
                group.pods[ordinal] = replace(pod, ready=True, ready_changed_s=self.now_s)

    def _form(self, group: SimulatedSet) -> None:
        """All pods of one generation that run since their first start become ready together."""
        pods = list(group.pods.values())
        whole = len(pods) == group.seen.replicas and len({(pod.generation, pod.revision) for pod in pods}) == 1
        fresh = all(pod.started_s is not None and pod.restarts == 0 and not pod.was_ready for pod in pods)
        alive = all(pod.node and self.nodes[pod.node].ready for pod in pods)
        good = not any(pod.revision in self.broken_revisions for pod in pods)
        if whole and fresh and alive and good and self.rng.random() < 0.6:
            for ordinal, pod in group.pods.items():
                group.pods[ordinal] = replace(pod, ready=True, ready_changed_s=self.now_s + 1.5)

    # -- faults ----------------------------------------------------------------

    def kill_container(self, group: SimulatedSet, ordinal: int, message: str = "rank 0 ended with signal 9") -> None:
        """The container ends and the kubelet restarts it in place, not ready."""
        pod = group.pods[ordinal]
        group.pods[ordinal] = replace(
            pod, restarts=pod.restarts + 1, ready=False, ready_changed_s=self.now_s, started_s=self.now_s,
            ended=Ended("Error", 1, message, self.now_s),
        )  # fmt: skip

    def blip(self, key: GroupKey, ordinal: int) -> None:
        """Two probes in a row come too late: the pod is unready for a while."""
        pod = self.sets[key].pods.get(ordinal)
        if pod is not None and pod.ready:
            self.sets[key].pods[ordinal] = replace(pod, ready=False, ready_changed_s=self.now_s)

    def delete_pod(self, key: GroupKey, ordinal: int) -> None:
        """kubectl delete pod, or the drain of its node."""
        if ordinal in self.sets[key].pods:
            self._delete(key, self.sets[key].pods[ordinal], None)

    def vanish_pod(self, key: GroupKey, ordinal: int) -> None:
        """kubectl delete pod --force: gone at once, and made again before anybody looks."""
        self.sets[key].pods.pop(ordinal, None)
        self._stateful_set_controller(key, self.sets[key])

    def stop_node(self, name: str) -> None:
        """The node loses its network: NotReady, its pods unready, nothing there can be deleted."""
        self.nodes[name] = replace(self.nodes[name], ready=False, ready_changed_s=self.now_s)
        for group in self.sets.values():
            for ordinal, pod in group.pods.items():
                if pod.node == name and pod.ready:
                    group.pods[ordinal] = replace(pod, ready=False, ready_changed_s=self.now_s)

    def start_node(self, name: str) -> None:
        """It is back; containers that ran on it have lost their peers and end."""
        self.nodes[name] = NodeSeen(name=name)
        for group in self.sets.values():
            for ordinal, pod in list(group.pods.items()):
                if pod.node == name and pod.started_s is not None:
                    self.kill_container(group, ordinal, "lost the connection to rank 0")

    # -- looking ---------------------------------------------------------------

    def has_formed(self, key: GroupKey) -> bool:
        """Whether all pods of a group stand, and have been ready together."""
        pods = self.sets[key].pods.values()
        return len(pods) == self.sets[key].seen.replicas and all(pod.was_ready for pod in pods)

    def run(self, for_s: float, every_s: float = STEP_S) -> None:
        """Let cluster and operator run side by side."""
        for turn in range(int(for_s / STEP_S)):
            self.step()
            self.check()
            if turn % int(every_s / STEP_S) == 0:
                self.operate()
                self.check()

    def run_until_settled(self, limit_s: float, every_s: float = STEP_S) -> None:
        """Run until nothing is left to do; fails after `limit_s` of the cluster's time."""
        end_s = self.now_s + limit_s
        while self.now_s < end_s:
            self.run(for_s=20.0, every_s=every_s)
            if self.settled():
                return
        raise AssertionError({key: (one.state, one.message) for key, one in self.decisions.items()})

    def check(self) -> None:
        """What must hold at every moment: ready pods of a group share one generation and one revision."""
        for key, group in self.sets.items():
            ready = {(pod.generation, pod.revision) for pod in group.pods.values() if pod.ready}
            assert len(ready) <= 1, f"{key} mixes {ready}"

    def settled(self) -> bool:
        """Every wanted group is ready at the wanted revision, and the operator would change nothing."""
        self.operate()
        return all(
            self.decisions[group.key].state is (GroupState.PENDING if group.suspended else GroupState.READY)
            and self.sets[group.key].seen.revision == group.revision
            for group in self.wanted
        )
