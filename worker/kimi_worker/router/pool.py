"""The pods that the router knows: found by name, followed through their /state, with what was sent to them since."""

import asyncio
import errno
import ipaddress
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
import msgspec
import structlog

from kimi_worker.router.pick import LaneKey, LaneView, explain
from kimi_worker.settings import Role, RouterSettings

log = structlog.get_logger()

_POLL_TIMEOUT_S = 5.0
_MAX_REPORT_BYTES = 2**20
"""A lane takes under a kilobyte. Whatever has a pod's address now may send anything."""

_NO_SUCH_NAME = frozenset({socket.EAI_NONAME, socket.EAI_NODATA})


class LaneReport(msgspec.Struct, frozen=True):
    """One lane in a pod's /state; fields that routing does not need are left out."""

    lane: int
    handoff: str
    running: int
    waiting: int
    reserved: int
    queued_tokens: int
    free_pages: int
    max_num_seqs: int


class PodReport(msgspec.Struct, frozen=True):
    """A pod's /state."""

    deployment: str
    role: str
    group: str
    generation: int
    layout_hash: str
    ready: bool
    draining: bool
    lanes: list[LaneReport]
    error: str | None = None
    max_body_bytes: int = 0


_report_decoder = msgspec.json.Decoder(PodReport)


@dataclass(slots=True, eq=False)
class Trip:
    """One request on its way through a lane, or the part of it that the lane does."""

    pod: "Pod"
    lane: int
    num_tokens: int
    sent_s: float
    give_up: Callable[[], object] | None = None
    """Called when the lane will not answer any more; the trip is then still to be ended."""

    def end(self) -> None:
        """The lane has done its part. Only the first call counts."""
        self.pod.end(self)


@dataclass(slots=True)
class LaneBooks:
    """What this router has done with a lane since the lane's last report, which does not show it."""

    sent: int = 0
    sent_tokens: int = 0
    ended: int = 0

    def add(self, trip: Trip) -> None:
        self.sent += 1
        self.sent_tokens += trip.num_tokens

    def remove(self, trip: Trip) -> None:
        self.sent -= 1
        self.sent_tokens -= trip.num_tokens


@dataclass(slots=True)
class Pod:
    """One address of a service."""

    address: str
    """host:port"""
    role: Role
    report: PodReport | None = None
    reported_s: float = 0.0
    heard_s: float = 0.0
    """When an answer of any kind was last asked for and came."""
    is_listed: bool = True
    """Whether its service still names it. One that is not may yet have streams to end."""
    error: str = "not heard of yet"
    trips: set[Trip] = field(default_factory=set)
    books: dict[int, LaneBooks] = field(default_factory=lambda: defaultdict(LaneBooks))

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def take(self, report: PodReport, asked_s: float) -> None:
        """A new report; it shows what was sent before it was asked for."""
        self.report, self.reported_s = report, asked_s
        self.error = "" if report.ready else report.error or "not ready"
        self.books.clear()
        for trip in self.trips:
            if trip.sent_s >= asked_s:
                self.books[trip.lane].add(trip)

    def lose(self, error: str) -> None:
        """Not to be used until it reports again. What it is answering goes on: the pod may be well."""
        self.report, self.error = None, error

    def abandon(self, error: str) -> None:
        """It is gone, perhaps with its machine and without a last packet: nobody need wait for it any longer."""
        self.lose(error)
        if self.trips:
            log.warning("pod_abandoned", pod=self.address, error=error, requests=len(self.trips))
        for trip in self.trips:
            if trip.give_up:
                trip.give_up()

    def send(self, lane: int, num_tokens: int, now_s: float, give_up: Callable[[], object] | None = None) -> Trip:
        """Note a request on its way to a lane."""
        trip = Trip(self, lane, num_tokens, now_s, give_up)
        self.trips.add(trip)
        self.books[lane].add(trip)
        return trip

    def end(self, trip: Trip) -> None:
        """Note that a request has left its lane."""
        if trip not in self.trips:
            return
        self.trips.remove(trip)
        if trip.sent_s < self.reported_s:
            self.books[trip.lane].ended += 1
        else:
            self.books[trip.lane].remove(trip)

    def lanes(self) -> list[LaneView]:
        """The lanes that take requests now."""
        report = self.report
        if report is None or not report.ready or report.draining:
            return []
        return [self._view(report, lane) for lane in report.lanes]

    def _view(self, report: PodReport, lane: LaneReport) -> LaneView:
        books = self.books[lane.lane]
        load = max(0, lane.running + lane.waiting + lane.reserved - books.ended) + books.sent
        return LaneView(
            key=LaneKey(self.address, lane.lane),
            layout_hash=report.layout_hash,
            handoff=lane.handoff,
            can_prefill=report.role == Role.BOTH,
            room=lane.max_num_seqs - load,
            free_pages=lane.free_pages,
            queued_tokens=lane.queued_tokens + books.sent_tokens,
            group=f"{report.group}/{report.generation}",
        )


class Pool:
    """All pods of both roles. Use as an async context: it follows them until the end."""

    def __init__(self, settings: RouterSettings, session: aiohttp.ClientSession) -> None:
        self._settings = settings
        self._session = session
        self._pods: dict[Role, dict[str, Pod]] = {Role.PREFILL: {}, Role.DECODE: {}}
        self._resolve_errors: dict[Role, str] = {}
        self._pollers: set[asyncio.Task[None]] = set()
        self._followers: list[asyncio.Task[None]] = []
        self.max_body_bytes = 0
        """The largest body that a pod takes, as far as pods have said; 0 before the first has."""

    async def __aenter__(self) -> "Pool":
        services = {Role.PREFILL: self._settings.prefill_service, Role.DECODE: self._settings.decode_service}
        self._followers = [asyncio.create_task(self._follow(role, service)) for role, service in services.items()]
        return self

    async def __aexit__(self, *_: object) -> None:
        tasks = [*self._followers, *self._pollers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def lanes(self, role: Role) -> list[LaneView]:
        return [lane for pod in self._pods[role].values() for lane in pod.lanes()]

    def pod(self, role: Role, key: LaneKey) -> Pod:
        return self._pods[role][key.pod]

    def ready_pod(self) -> Pod | None:
        """Any decode pod that answers requests."""
        return next((pod for pod in self._pods[Role.DECODE].values() if pod.lanes()), None)

    def shortage(self) -> str:
        """What is missing when no pair can be picked, and which pods do not answer and why; for a person."""
        reason, errors = explain(self.lanes(Role.DECODE), self.lanes(Role.PREFILL)), "; ".join(self._errors())
        return f"{reason} ({errors})" if errors else reason

    def _errors(self) -> list[str]:
        lines = []
        for role, pods in self._pods.items():
            if not pods:
                reason = self._resolve_errors.get(role, "not resolved yet")
                lines.append(f"{role.value}: no pods ({reason})")
            lines += [f"{role.value} {pod.address}: {pod.error}" for pod in pods.values() if pod.error]
        return lines

    def view(self) -> dict[str, object]:
        """The pool as seen, for /state."""
        return {
            role.value: [
                {
                    "address": pod.address,
                    "error": pod.error or None,
                    "report": msgspec.to_builtins(pod.report),
                    "sent_since_report": {str(lane): books.sent for lane, books in pod.books.items()},
                }
                for pod in pods.values()
            ]
            for role, pods in self._pods.items()
        }

    async def _follow(self, role: Role, service: str) -> None:
        """Keep the pods of a role equal to what its name resolves to."""
        pods = self._pods[role]
        while True:
            try:
                addresses = await resolve(service, self._settings.worker_port)
                self._resolve_errors.pop(role, None)
            except OSError as error:
                self._resolve_errors[role] = f"{service}: {error.strerror or error}"
                # a service without pods is an error of the resolver too; one that is down says nothing about pods
                addresses = set() if error.errno in _NO_SUCH_NAME else set(pods)
            for address in addresses - pods.keys():
                pod = pods[address] = Pod(address, role)
                task = asyncio.create_task(self._poll(pod))
                self._pollers.add(task)
                task.add_done_callback(self._pollers.discard)
            for address in pods.keys() - addresses:
                pods.pop(address).is_listed = False
            await asyncio.sleep(self._settings.poll_interval_s)

    async def _poll(self, pod: Pod) -> None:
        """Ask the pod for its state as long as its service names it or it has requests to answer."""
        while pod.is_listed or pod.trips:
            asked_s = time.monotonic()
            try:
                await self._ask(pod, asked_s)
            except (TimeoutError, aiohttp.ClientError) as error:
                self._not_heard(pod, error)
            except (msgspec.DecodeError, RecursionError) as error:
                pod.lose(f"/state is not what this router expects: {error}")
            await asyncio.sleep(self._settings.poll_interval_s)

    def _not_heard(self, pod: Pod, error: Exception) -> None:
        text = f"/state: {type(error).__name__}: {error}"
        os_error = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else None
        if os_error is not None and os_error.errno == errno.ECONNREFUSED:
            # its kernel answers, and has ended the connections of a process that died; one that ends takes no new ones
            pod.lose(text)
        elif time.monotonic() - pod.heard_s > self._settings.lost_after_s:
            pod.abandon(f"/state has not answered for {self._settings.lost_after_s:g} s")
        elif not isinstance(error, TimeoutError):
            pod.lose(text)

    async def _ask(self, pod: Pod, asked_s: float) -> None:
        timeout = aiohttp.ClientTimeout(total=min(_POLL_TIMEOUT_S, self._settings.lost_after_s / 3))
        async with self._session.get(f"{pod.url}/state", timeout=timeout) as reply:
            body = bytearray()
            async for part in reply.content.iter_any():
                body += part
                if len(body) > _MAX_REPORT_BYTES:
                    pod.lose(f"/state answers more than {_MAX_REPORT_BYTES} bytes")
                    return
        pod.heard_s = asked_s
        if reply.status != 200:
            pod.lose(f"/state answers {reply.status}")
            return
        report = _report_decoder.decode(body)
        if report.deployment != self._settings.deployment or report.role not in (pod.role, Role.BOTH):
            # addresses are reused; this is somebody else now
            pod.abandon(f"is {report.role} of {report.deployment}, not {pod.role.value} of {self._settings.deployment}")
            return
        pod.take(report, asked_s)
        self.max_body_bytes = max(self.max_body_bytes, report.max_body_bytes)


async def resolve(service: str, port: int) -> set[str]:
    """Addresses (host:port) behind a name. A comma-separated list of host:port or IP addresses stands for itself."""
    fixed = {part.strip() for part in service.split(",")}
    if all(_is_fixed(part) for part in fixed):
        return {part if _has_port(part) else f"{part}:{port}" for part in fixed}
    found = await asyncio.get_running_loop().getaddrinfo(service, port, type=socket.SOCK_STREAM)
    return {f"[{info[4][0]}]:{port}" if info[0] == socket.AF_INET6 else f"{info[4][0]}:{port}" for info in found}


def _has_port(part: str) -> bool:
    host, _, port = part.rpartition(":")
    return port.isdigit() and (":" not in host or host.endswith("]"))


def _is_fixed(part: str) -> bool:
    if _has_port(part):
        return True
    try:
        ipaddress.ip_address(part)
    except ValueError:
        return False
    return True
