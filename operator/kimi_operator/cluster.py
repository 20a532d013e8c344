"""The only client of the API server: server-side apply, deletion with preconditions, status, events, lists.

What it writes is put into the store from the answer, so that the next look sees it before the watch brings it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic import DynamicClient
from kubernetes.aio.dynamic.resource import Resource

from kimi_operator.api.base import API_VERSION, GROUP, VERSION
from kimi_operator.drift import Accepted, with_hash
from kimi_operator.errors import ClusterUnavailable, InvalidSpec, KimiError, Problem, ResourceGone
from kimi_operator.limiter import RateLimit
from kimi_operator.store import Document, Listing, ObjectKey, Store, key_of

FIELD_MANAGER = "kimi-operator"
STATUS_MANAGER = "kimi-operator-status"
REQUEST_TIMEOUT_S = 30.0
APPLY = "application/apply-patch+yaml; charset=utf-8"
"""With its parameter the client sends the body as it is; the API server passes over it."""
PAGE_SIZE = 500
NAMESPACE_ENDS = "NamespaceTerminating"
"""The cause that the API server gives when nothing new may be made in a namespace that is being deleted."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind that this operator reads or writes."""

    group: str
    version: str
    plural: str
    namespaced: bool = True

    def path(self, kind: str) -> Resource:
        """What the dynamic client needs to address it; discovery is not asked for what is known."""
        prefix = "apis" if self.group else "api"
        return Resource(
            prefix=prefix, group=self.group, api_version=self.version, kind=kind, namespaced=self.namespaced,
            name=self.plural, verbs=[],
        )  # fmt: skip


KINDS = {
    "KimiDeployment": Kind(GROUP, VERSION, "kimideployments"),
    "HardwareProfile": Kind(GROUP, VERSION, "hardwareprofiles", namespaced=False),
    "StatefulSet": Kind("apps", "v1", "statefulsets"),
    "Deployment": Kind("apps", "v1", "deployments"),
    "PodDisruptionBudget": Kind("policy", "v1", "poddisruptionbudgets"),
    "Service": Kind("", "v1", "services"),
    "ConfigMap": Kind("", "v1", "configmaps"),
    "Pod": Kind("", "v1", "pods"),
    "Event": Kind("", "v1", "events"),
    "Node": Kind("", "v1", "nodes", namespaced=False),
}


async def connect(kubeconfig: str | None) -> client.ApiClient:
    """A client with the pod's service account, or with a kubeconfig outside of a cluster.

    Raises InvalidSpec when there is neither.
    """
    configuration = client.Configuration()
    try:
        if kubeconfig:
            await config.load_kube_config(config_file=kubeconfig, client_configuration=configuration)
        else:
            config.load_incluster_config(client_configuration=configuration)
    except config.ConfigException as error:
        problem = Problem(
            "KUBECONFIG", kubeconfig or "nothing", f"credentials of a cluster ({error})",
            "set KUBECONFIG, or run in a pod with a service account",
        )  # fmt: skip
        raise InvalidSpec((problem,)) from error
    api = client.ApiClient(configuration)
    api.user_agent = "kimi-operator"
    return api


class Cluster:
    """Calls to the API server. Every call waits for its share, and every failure is one of errors.py.

    What would be made in a namespace that is being deleted raises ResourceGone.
    """

    def __init__(
        self, api: client.ApiClient, store: Store, limit: RateLimit, count: Callable[[str, str], None]
    ) -> None:
        """`count(verb, kind)` is told of every request."""
        self._dynamic = DynamicClient(api)
        self._store = store
        self._limit = limit
        self._count = count
        self._paths = {name: kind.path(name) for name, kind in KINDS.items()}
        self._accepted = Accepted()

    async def apply(self, manifest: Document) -> bool:
        """Make an object as the manifest says, unless it already is. True when something was written.

        Only this operator's own fields are forced. Raises InvalidSpec with the API server's words when it refuses.
        """
        wanted = with_hash(manifest)
        key = key_of(wanted)
        live = self._store.get(key)
        if live is not None and self._accepted.is_settled(live, wanted):
            return False
        answer = await self._call(
            "apply", key,
            lambda path: self._server_side_apply(path.path(key.name, key.namespace or None), wanted, FIELD_MANAGER),
        )  # fmt: skip
        self._accepted.note(wanted, answer)
        self._store.put(answer)
        return True

    async def restamp(self, live: Document, change: Mapping[str, Any]) -> None:
        """Change a few fields of an object and leave the rest as it lives: for what must keep its old template."""
        key = key_of(live)
        body = {**change, "metadata": {**change.get("metadata", {}), "uid": live["metadata"]["uid"]}}
        answer = await self._call(
            "patch", key,
            lambda path: self._dynamic.patch(
                path, body, name=key.name, namespace=key.namespace, content_type="application/merge-patch+json",
                field_manager=FIELD_MANAGER, serializer=_plain, _request_timeout=REQUEST_TIMEOUT_S,
            ),
        )  # fmt: skip
        self._store.put(answer)

    async def write_status(self, key: ObjectKey, uid: str, status: Mapping[str, Any]) -> None:
        """Apply a KimiDeployment's status. A resource that was deleted meanwhile is no error."""
        body = {
            "apiVersion": API_VERSION,
            "kind": key.kind,
            "metadata": {"name": key.name, "namespace": key.namespace, "uid": uid},
            "status": status,
        }
        answer = await self._call(
            "status", key,
            lambda path: self._server_side_apply(path.path(key.name, key.namespace) + "/status", body, STATUS_MANAGER),
            absent=None,
        )  # fmt: skip
        if answer is not None:
            self._store.put(answer)

    async def _server_side_apply(self, path: str, body: Document, manager: str) -> Any:
        return await self._dynamic.request(
            "patch", path, body=as_yaml(body), content_type=APPLY, field_manager=manager, force_conflicts=True,
            serializer=_plain, _request_timeout=REQUEST_TIMEOUT_S,
        )  # fmt: skip

    async def delete(self, document: Document, grace_s: int | None = None) -> None:
        """Delete exactly this object: another of the same name, or none, is left alone. Its children go with it."""
        key, uid = key_of(document), document["metadata"]["uid"]
        body: dict[str, Any] = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        answer = await self._call(
            "delete", key,
            lambda path: self._dynamic.delete(
                path, name=key.name, namespace=key.namespace or None, body=body, serializer=_plain,
                _request_timeout=REQUEST_TIMEOUT_S,
            ),
            absent=None,
        )  # fmt: skip
        if answer is not None and answer.get("kind") == key.kind and answer["metadata"].get("deletionTimestamp"):
            self._store.put(answer)
        else:
            self._store.remove(document)
            self._accepted.forget(key)

    async def read(self, key: ObjectKey) -> Document | None:
        """One object as it is now, also put into the store; None when there is none."""
        answer: Document | None = await self._call(
            "get", key,
            lambda path: self._dynamic.get(
                path, name=key.name, namespace=key.namespace or None, serializer=_plain,
                _request_timeout=REQUEST_TIMEOUT_S,
            ),
            absent=None,
        )  # fmt: skip
        if answer is not None:
            self._store.put(answer)
        return answer

    async def list(
        self, kind: str, namespace: str | None = None, labels: str | None = None, fields: str | None = None
    ) -> Listing:
        """All objects of a kind that match, page by page, as of one moment."""
        found: list[Document] = []
        token, version = None, 0
        while True:
            query = {"limit": PAGE_SIZE, "label_selector": labels, "field_selector": fields, "_continue": token}

            async def page(path: Resource, query: dict[str, Any] = query) -> Any:
                return await self._dynamic.get(
                    path, namespace=namespace, serializer=_plain, _request_timeout=REQUEST_TIMEOUT_S, **query
                )

            answer = await self._call("list", ObjectKey(kind, namespace or "", ""), page)
            api_version = answer["apiVersion"]
            found += [{"apiVersion": api_version, "kind": kind, **item} for item in answer["items"]]
            token = answer["metadata"].get("continue")
            version = version or int(answer["metadata"]["resourceVersion"])
            if not token:
                return Listing(found, version)

    async def create_event(self, namespace: str, event: Mapping[str, Any]) -> None:
        """Write an Event; whoever calls this has made sure that it is news."""
        await self._call(
            "create", ObjectKey("Event", namespace, ""),
            lambda path: self._dynamic.create(
                path, body=dict(event), namespace=namespace, serializer=_plain, _request_timeout=REQUEST_TIMEOUT_S
            ),
        )  # fmt: skip

    async def _call(self, verb: str, key: ObjectKey, send: Callable[[Resource], Awaitable[Any]], **absent: None) -> Any:
        """One request. With `absent=None`, an object that is not there (or no longer that one) gives None."""
        await self._limit.take()
        self._count(verb, key.kind)
        what = f"{verb} {key.kind} {key.namespace}/{key.name}"
        try:
            return await send(self._paths[key.kind])
        except ApiException as error:
            if "absent" in absent and error.status in (404, 409):
                return None
            raise _convert(what, key, error) from error
        except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError, OSError) as error:
            raise ClusterUnavailable(f"{what}: the API server does not answer: {error!r}") from error


def _convert(what: str, key: ObjectKey, error: ApiException) -> KimiError:
    answer = _answer(error)
    message = str(answer.get("message") or error.reason)
    if any(cause.get("reason") == NAMESPACE_ENDS for cause in (answer.get("details") or {}).get("causes") or ()):
        return ResourceGone(f"{what}: {message}")
    if error.status in (400, 403, 413, 422):
        field = f"{key.kind} {key.namespace}/{key.name}".replace(" /", " ")
        remedy = "grant the operator this right" if "cannot" in message and error.status == 403 else "correct the spec"
        return InvalidSpec((Problem(field, f"refused: {message}", "an object that the API server takes", remedy),))
    headers = {str(name).lower(): value for name, value in dict(error.headers or {}).items()}
    after = str(headers.get("retry-after", ""))
    default_s = 1.0 if error.status in (404, 409, 429) else 5.0
    retry_after_s = float(after) if after.isdigit() else default_s
    is_answer = error.status not in (429, 503, 504)
    return ClusterUnavailable(f"{what}: {error.status} {message}", retry_after_s, is_answer=is_answer)


def _answer(error: ApiException) -> dict[str, Any]:
    """The Status that the API server answered; of anything else its beginning as the message."""
    body = error.body.decode(errors="replace") if isinstance(error.body, bytes) else str(error.body or "")
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    return answer if isinstance(answer, dict) else {"message": body[:500]}


def as_yaml(document: Document) -> bytes:
    """JSON that is also YAML, as which the API server reads what is applied.

    JSON's escapes of a character beyond U+FFFF, two surrogates, are not: those characters are sent as they are. All
    others beyond ASCII are escaped, since YAML refuses some of them raw.
    """
    text = json.dumps(document, ensure_ascii=False)
    return re.sub("[\x7f-\uffff]", _escaped, text).encode()


def _escaped(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\u{0xFFFD if 0xD800 <= number <= 0xDFFF else number:04x}"


def _plain(_: object, document: Any) -> Any:
    return document
