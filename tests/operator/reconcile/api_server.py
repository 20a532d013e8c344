"""A small API server in memory, over HTTP: what this operator uses of the real one, with errors on demand.

Objects have versions, uids and generations; server-side apply drops what its manager applied before and now leaves out
(lists are replaced whole); deletion has preconditions, grace and cascades; lists have label and field selectors. There
is no schema, no default and no watch: tests that need those run on a real cluster.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import yaml
from aiohttp import web
from kimi_operator.cluster import KINDS
from kimi_operator.times import format_time, parse_time

Document = dict[str, Any]
PLURALS = {kind.plural: name for name, kind in KINDS.items()}
UNANSWERED = 0
"""A status that is none: the connection breaks off."""


_SURROGATE = re.compile(rb"(?<!\\)(\\\\)*\\u[dD][89a-fA-F]")
"""An escape that the API server's YAML does not take, though JSON has it. PyYAML would."""


class Key(NamedTuple):
    """Which object."""

    kind: str
    namespace: str
    name: str


@dataclass
class Fault:
    """Requests that match are answered with an error."""

    status: int
    kind: str = ""
    name: str = ""
    method: str = ""
    message: str = "injected"
    headers: Mapping[str, str] = field(default_factory=dict)
    num_times: int = 1_000_000

    def strikes(self, method: str, key: Key) -> bool:
        """Whether it meets this request; counted."""
        wanted = ((self.kind, key.kind), (self.name, key.name), (self.method, method))
        if self.num_times == 0 or not all(want in ("", have) for want, have in wanted):
            return False
        self.num_times -= 1
        return True


class RefusedError(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str, *causes: str) -> None:
        super().__init__(message)
        self.status, self.message, self.causes = status, message, causes


class ApiServer:
    """The server; `objects` may be read and changed by the test at any time, with `put` for new versions."""

    def __init__(self) -> None:
        self.objects: dict[Key, Document] = {}
        self.applied: dict[tuple[Key, str], Document] = {}
        self.faults: list[Fault] = []
        self.writes: list[tuple[str, Key]] = []
        self.ending: set[str] = set()
        """Namespaces that are being deleted."""
        self.graces: dict[str, int | None] = {}
        """By name of each deleted pod, the grace that was asked for."""
        self.before_write: Callable[[str, Key], None] = lambda method, key: None
        self.now_s = 1_800_000_000.0
        self._numbers = itertools.count(1)
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    # -- objects -----------------------------------------------------------------

    def put(self, document: Document) -> Document:
        """Keep a new version, or a new object; its generation counts changes of the spec."""
        key = _key(document)
        known, metadata = self.objects.get(key), document["metadata"]
        if known is None:
            metadata |= {"uid": f"uid-{next(self._numbers)}", "creationTimestamp": format_time(self.now_s)}
        changed = known is None or known.get("spec") != document.get("spec")
        metadata["generation"] = (known["metadata"]["generation"] if known else 0) + changed
        metadata["resourceVersion"] = str(next(self._numbers))
        self.objects[key] = document
        return document

    def of(self, kind: str) -> list[Document]:
        return [one for key, one in sorted(self.objects.items()) if key.kind == kind]

    def get(self, kind: str, name: str) -> Document:
        return next(one for one in self.of(kind) if one["metadata"]["name"] == name)

    def edit(self, kind: str, name: str, **fields: Any) -> Document:
        """Change top-level fields of an object as its user or its controller would."""
        return self.put({**copy.deepcopy(self.get(kind, name)), **fields})

    def drop(self, key: Key) -> None:
        """Remove an object at once, and what it owns."""
        gone = self.objects.pop(key, None)
        if gone is None:
            return
        for other, document in list(self.objects.items()):
            owners = document["metadata"].get("ownerReferences", ())
            if any(one["uid"] == gone["metadata"]["uid"] for one in owners):
                self.drop(other)

    # -- requests ----------------------------------------------------------------

    async def _handle(self, request: web.Request) -> web.Response:
        parts = request.match_info["path"].split("/")
        parts = parts[2:] if parts[0] == "api" else parts[3:]
        namespace = parts[1] if parts[0] == "namespaces" else ""
        parts = parts[2:] if namespace else parts
        key = Key(PLURALS[parts[0]], namespace, parts[1] if len(parts) > 1 else "")
        fault = next((one for one in self.faults if one.strikes(request.method, key)), None)
        if fault is not None and fault.status == UNANSWERED:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if fault is not None:
            return _error(fault.status, fault.message, fault.headers)
        try:
            return web.json_response(self._answer(request, key, parts[2:], await request.read()))
        except RefusedError as error:
            return _error(error.status, error.message, {}, error.causes)

    def _answer(self, request: web.Request, key: Key, rest: list[str], raw: bytes) -> Document:
        if request.content_type == "application/apply-patch+yaml" and _SURROGATE.search(raw):
            raise RefusedError(400, "error decoding YAML: found invalid Unicode character escape code")
        body: Document = yaml.safe_load(raw) if raw else {}
        if request.method == "GET":
            return self._list(key, request.query) if not key.name else self._known(key)
        self.before_write(request.method, key)
        if key.namespace in self.ending and request.method != "DELETE" and key not in self.objects:
            message = f"unable to create new content in namespace {key.namespace} because it is being terminated"
            raise RefusedError(403, f"{key.kind} is forbidden: {message}", "NamespaceTerminating")
        match request.method, request.content_type:
            case "POST", _:
                answer = self.put({"kind": key.kind, **body})
            case "PATCH", "application/apply-patch+yaml":
                answer = self._apply(key, body, request.query["fieldManager"], is_status=rest == ["status"])
            case "PATCH", _:
                answer = self._merge(key, body)
            case _:
                answer = self._delete(key, body)
        self.writes.append((request.method, key))
        return answer

    def _known(self, key: Key) -> Document:
        if key not in self.objects:
            raise RefusedError(404, f"{key.kind} {key.name} not found")
        return self.objects[key]

    def _list(self, key: Key, query: Mapping[str, str]) -> Document:
        found = [
            one for one in self.of(key.kind)
            if key.namespace in ("", one["metadata"].get("namespace"))
            and _has_labels(one, query.get("labelSelector", ""))
            and _has_fields(one, query.get("fieldSelector", ""))
        ]  # fmt: skip
        return {"apiVersion": "v1", "metadata": {"resourceVersion": str(next(self._numbers))}, "items": found}

    def _apply(self, key: Key, body: Document, manager: str, *, is_status: bool) -> Document:
        uid = body["metadata"].get("uid")
        if is_status or uid is not None:
            live = self._known(key)
            if uid is not None and uid != live["metadata"]["uid"]:
                raise RefusedError(409, "the UID in the precondition is not that of the object")
        known = self.objects.get(key, {"apiVersion": body["apiVersion"], "kind": key.kind, "metadata": {}})
        # Only the status moves by /status, and only the rest without.
        part = {"status": body.get("status", {})} if is_status else {k: v for k, v in body.items() if k != "status"}
        answer = _applied(known, part, self.applied.get((key, manager), {}))
        self.applied[key, manager] = part
        return self.put(answer)

    def _merge(self, key: Key, body: Document) -> Document:
        live = self._known(key)
        if body["metadata"].get("uid") not in (None, live["metadata"]["uid"]):
            raise RefusedError(409, "the UID in the precondition is not that of the object")
        return self.put(_merged(live, body))

    def _delete(self, key: Key, body: Document) -> Document:
        live = self._known(key)
        if body.get("preconditions", {}).get("uid") not in (None, live["metadata"]["uid"]):
            raise RefusedError(409, "the UID in the precondition is not that of the object")
        grace_s = body.get("gracePeriodSeconds")
        if key.kind == "Pod":
            self.graces[key.name] = grace_s
        if key.kind != "Pod" or grace_s == 0:
            self.drop(key)
            return {"kind": "Status", "status": "Success", "metadata": {}}
        return self.begin_to_delete(key.name, grace_s)

    # -- controllers and kubelets --------------------------------------------------

    def begin_to_delete(self, pod: str, grace_s: int | None = None) -> Document:
        """What `kubectl delete pod` does, or a node's drain."""
        document = copy.deepcopy(self.get("Pod", pod))
        end_s = self.now_s + (30 if grace_s is None else grace_s)
        earlier_s = parse_time(document["metadata"].get("deletionTimestamp"))
        document["metadata"]["deletionTimestamp"] = format_time(min(end_s, earlier_s or end_s))
        return self.put(document)

    def end_deleted_pods(self) -> None:
        """Every pod that was told to leave has left."""
        for pod in self.of("Pod"):
            if "deletionTimestamp" in pod["metadata"]:
                self.drop(_key(pod))

    def relabel(self, pod: str, **labels: str | None) -> None:
        """What `kubectl label pod` does; None takes a label away."""
        document = copy.deepcopy(self.get("Pod", pod))
        together = {**document["metadata"]["labels"], **labels}
        document["metadata"]["labels"] = {name: value for name, value in together.items() if value is not None}
        self.put(document)

    def make_pods(self) -> None:
        """The StatefulSets' controller lets go and takes back pods by their labels, and makes what is missing."""
        for owner in self.of("StatefulSet"):
            self._claim_pods(owner)
            template = owner["spec"]["template"]
            for ordinal in range(owner["spec"]["replicas"]):
                name = f"{owner['metadata']['name']}-{ordinal}"
                if any(pod["metadata"]["name"] == name for pod in self.of("Pod")):
                    continue
                metadata = {"name": name, "namespace": owner["metadata"]["namespace"],
                            "ownerReferences": [_reference(owner)], **copy.deepcopy(template["metadata"])}  # fmt: skip
                metadata["labels"]["statefulset.kubernetes.io/pod-name"] = name
                self.put({"apiVersion": "v1", "kind": "Pod", "metadata": metadata,
                          "spec": copy.deepcopy(template["spec"]), "status": {"phase": "Pending"}})  # fmt: skip

    def _claim_pods(self, owner: Document) -> None:
        uid, selector = owner["metadata"]["uid"], owner["spec"]["selector"]["matchLabels"]
        for pod in self.of("Pod"):
            metadata = pod["metadata"]
            holders = [one["uid"] for one in metadata.get("ownerReferences", ()) if one.get("controller")]
            matches = metadata.get("labels", {}).items() >= selector.items()
            is_named = metadata["name"].rpartition("-")[0] == owner["metadata"]["name"]
            if holders == [uid] and not matches:
                self.put({**pod, "metadata": {**metadata, "ownerReferences": []}})
            elif not holders and matches and is_named:
                self.put({**pod, "metadata": {**metadata, "ownerReferences": [_reference(owner)]}})

    def start_pods(self) -> None:
        """Every pod gets a node of its own; those of a StatefulSet are ready ten seconds after the last was made."""
        pods = self.of("Pod")
        made = {pod["metadata"]["name"]: parse_time(pod["metadata"]["creationTimestamp"]) or 0.0 for pod in pods}
        for index, pod in enumerate(pods):
            if pod["status"]["phase"] == "Pending":
                name = pod["metadata"]["name"]
                made_s, group = made[name], name.rpartition("-")[0]
                ready_s = 10 + max(at_s for one, at_s in made.items() if one.rpartition("-")[0] == group)
                self.now_s = max(self.now_s, ready_s)
                running = {"running": {"startedAt": format_time(made_s + 2)}}
                status = {
                    "phase": "Running",
                    "conditions": [
                        {"type": "Ready", "status": "True", "lastTransitionTime": format_time(ready_s)},
                        {"type": "PodScheduled", "status": "True", "lastTransitionTime": format_time(made_s)},
                    ],
                    "containerStatuses": [{"name": "worker", "ready": True, "restartCount": 0, "state": running}],
                }
                self.put({**pod, "spec": {**pod["spec"], "nodeName": f"node{index}"}, "status": status})

    def start_router(self) -> None:
        """The router's pods are there and ready."""
        for one in self.of("Deployment"):
            num = one["spec"]["replicas"]
            seen = one["metadata"]["generation"]
            self.put({**one, "status": {"readyReplicas": num, "updatedReplicas": num, "observedGeneration": seen}})

    def kill(self, pod: str, message: str = "") -> None:
        """The pod's container ends, with that for its last words; the kubelet has not restarted it yet."""
        document = copy.deepcopy(self.get("Pod", pod))
        end = {"exitCode": 137, "reason": "Error", "finishedAt": format_time(self.now_s), "message": message}
        document["status"]["containerStatuses"][0] |= {"ready": False, "state": {"terminated": end}}
        document["status"]["conditions"][0] |= {"status": "False", "lastTransitionTime": format_time(self.now_s)}
        self.put(document)


def _key(document: Document) -> Key:
    metadata = document["metadata"]
    return Key(document["kind"], metadata.get("namespace", ""), metadata["name"])


def _reference(owner: Document) -> Document:
    """What makes an object the controller of another."""
    metadata = owner["metadata"]
    return {"kind": owner["kind"], "name": metadata["name"], "uid": metadata["uid"], "controller": True}


def _error(status: int, message: str, headers: Mapping[str, str], causes: Iterable[str] = ()) -> web.Response:
    details = {"causes": [{"reason": cause} for cause in causes]}
    body = {"kind": "Status", "status": "Failure", "code": status, "message": message, "details": details}
    return web.Response(status=status, text=json.dumps(body), content_type="application/json", headers=dict(headers))


def _applied(live: Document, wanted: Document, before: Document) -> Document:
    """Server-side apply of one manager, in maps; lists and values are replaced."""
    result = {name: value for name, value in live.items() if name in wanted or name not in before}
    for name, value in wanted.items():
        both = isinstance(value, dict) and isinstance(live.get(name), dict)
        inner = before.get(name, {})
        result[name] = _applied(live[name], value, inner if isinstance(inner, dict) else {}) if both else value
    return copy.deepcopy(result)


def _merged(live: Document, patch: Document) -> Document:
    """JSON merge patch."""
    result = dict(live)
    for name, value in patch.items():
        both = isinstance(value, dict) and isinstance(live.get(name), dict)
        result[name] = _merged(live[name], value) if both else value
    return {name: value for name, value in copy.deepcopy(result).items() if value is not None}


def _has_labels(document: Document, selector: str) -> bool:
    labels = document["metadata"].get("labels", {})
    for term in filter(None, selector.split(",")):
        name, is_equal, value = term.partition("=")
        if name not in labels or (is_equal and labels[name] != value):
            return False
    return True


def _has_fields(document: Document, selector: str) -> bool:
    for term in filter(None, selector.split(",")):
        path, _, value = term.replace("!=", "=!").partition("=")
        have: Any = document
        for name in path.split("."):
            have = have.get(name, {})
        have = have or ""
        if have == value[1:] if value.startswith("!") else have != value:
            return False
    return True
