"""From the name of a service to the endpoints of prefill lanes."""

import select
import socket

import pytest
from kimi_worker.discovery import PeerDiscovery, endpoints
from kimi_worker.protocol.handoff import is_endpoint
from kimi_worker.settings import PeerSettings


def answer(*hosts: str) -> object:
    """A name service that knows these addresses."""
    families = {False: socket.AF_INET, True: socket.AF_INET6}
    return lambda *_, **__: [(families[":" in host], socket.SOCK_STREAM, 6, "", (host, 0)) for host in hosts]


def test_every_lane_of_every_pod_is_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", answer("10.0.0.2", "10.0.0.1", "fd00::1", "10.0.0.1"))
    found = endpoints(PeerSettings(service="k3-prefill.ns.svc", port=29600, lanes_per_pod=2))
    assert found == [
        *("tcp://10.0.0.1:29600", "tcp://10.0.0.1:29601"),
        *("tcp://10.0.0.2:29600", "tcp://10.0.0.2:29601"),
        *("tcp://[fd00::1]:29600", "tcp://[fd00::1]:29601"),
    ]
    assert all(map(is_endpoint, found))


def test_unknown_name_is_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert endpoints(PeerSettings(service="k3-prefill.ns.svc")) == []


def test_changes_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimi_worker.discovery.RESOLVE_S", 0.01)
    monkeypatch.setattr(socket, "getaddrinfo", answer("10.0.0.1"))
    discovery = PeerDiscovery(PeerSettings(service="k3-prefill.ns.svc", port=5))
    try:
        assert select.select([discovery.socket], [], [], 20.0)[0]
        assert discovery.take() == ["tcp://10.0.0.1:5"]
        monkeypatch.setattr(socket, "getaddrinfo", answer())
        monkeypatch.setattr(socket, "getaddrinfo", answer("10.0.0.1", "10.0.0.2"))
        assert select.select([discovery.socket], [], [], 20.0)[0]
        assert discovery.take() == ["tcp://10.0.0.1:5", "tcp://10.0.0.2:5"]
        assert discovery.take() is None
    finally:
        discovery.close()
