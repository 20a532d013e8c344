"""MoRI-IO's transport against a recording double of the library's documented interface. No hardware is involved."""

import ast
import ctypes
import inspect
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from kimi_worker.handoff import moriio
from kimi_worker.handoff.moriio import MoriioTransport
from kimi_worker.handoff.plan import Copy, RegionLayout, Unit
from kimi_worker.handoff.transport import Completion, Region, TransportError
from kimi_worker.settings import HandoffSettings
from pydantic import ValidationError

DOCKERFILE = Path(__file__).resolve().parents[3] / "worker" / "Dockerfile"
LAYOUTS = (RegionLayout("pages", Unit.PAGE, 64), RegionLayout("state", Unit.SLOT, 32))
COPIES = [Copy(0, 0, 128, 64), Copy(0, 128, 0, 64), Copy(1, 32, 0, 32)]


class Status:
    """A transfer's status, moved on by the test."""

    def __init__(self) -> None:
        self.state = "IN_PROGRESS"

    def InProgress(self) -> bool:  # noqa: N802
        return self.state == "IN_PROGRESS"

    def Succeeded(self) -> bool:  # noqa: N802
        return self.state == "SUCCESS"

    def Code(self) -> str:  # noqa: N802
        return self.state

    def Message(self) -> str:  # noqa: N802
        return "as the test said"


@dataclass(frozen=True)
class Desc:
    """EngineDesc and MemoryDesc: what they name, and that they pack."""

    name: str

    def pack(self) -> bytes:
        return self.name.encode()

    @classmethod
    def unpack(cls, packed: bytes) -> "Desc":
        if packed.startswith(b"\xff"):
            raise RuntimeError("bad msgpack")
        return cls(packed.decode())


@dataclass
class Library:
    """Everything that the double's classes share."""

    memory: dict[str, tuple[int, int, int, str]] = field(default_factory=dict)
    """Pointer, size, device and location, by descriptor."""
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    sessions: list[tuple[tuple[Any, ...], int]] = field(default_factory=list)
    """Each transfer and the identity of the session that made it."""
    raises: Exception | None = None
    """What the bindings answer everything with."""
    statuses: list[Status] = field(default_factory=list)
    reaches: bool = True
    uids: int = 0


class Session:
    def __init__(self, library: Library, local: Desc, remote: Desc) -> None:
        self._library, self._local, self._remote = library, local, remote

    def allocate_transfer_uid(self) -> int:
        self._library.uids += 1
        return self._library.uids

    def batch_write(self, local: list[int], remote: list[int], sizes: list[int], uid: int) -> Status:
        return self._move("write", local, remote, sizes, uid)

    def batch_read(self, local: list[int], remote: list[int], sizes: list[int], uid: int) -> Status:
        return self._move("read", local, remote, sizes, uid)

    def _move(self, kind: str, local: list[int], remote: list[int], sizes: list[int], uid: int) -> Status:
        """Move at once, complain as the bindings do; one status for the whole batch."""
        if not all(type(argument) is list for argument in (local, remote, sizes)):
            raise TypeError("incompatible function arguments")
        mine, theirs = (self._library.memory[desc.name] for desc in (self._local, self._remote))
        for at, to, size in zip(local, remote, sizes, strict=True):
            assert at + size <= mine[1]
            assert to + size <= theirs[1]
            here, there = mine[0] + at, theirs[0] + to
            ctypes.memmove(*((there, here) if kind == "write" else (here, there)), size)
        if self._library.raises:
            raise self._library.raises
        self._library.calls.append((kind, self._local.name, self._remote.name, local, remote, sizes, uid))
        self._library.sessions.append((self._library.calls[-1], id(self)))
        self._library.statuses.append(Status())
        return self._library.statuses[-1]


class Engine:
    def __init__(self, library: Library, key: str) -> None:
        self._library, self.key, self._memories = library, key, 0
        self.remotes: set[str] = set()

    def get_engine_desc(self) -> Desc:
        return Desc(self.key)

    def create_backend(self, kind: str, config: dict[str, Any]) -> None:
        self._library.calls.append(("backend", kind, config))

    def register_memory(self, pointer: int, size: int, device_id: int, location: str) -> Desc:
        if self._library.raises:
            raise self._library.raises
        self._memories += 1
        desc = Desc(f"{self.key}#{self._memories}")
        self._library.memory[desc.name] = (pointer, size, device_id, location)
        return desc

    def deregister_memory(self, desc: Desc) -> None:
        del self._library.memory[desc.name]

    def register_remote_engine(self, desc: Desc) -> None:
        self.remotes.add(desc.name)

    def deregister_remote_engine(self, desc: Desc) -> None:
        self.remotes.remove(desc.name)

    def create_session(self, local: Desc, remote: Desc) -> Session | None:
        assert remote.name.partition("#")[0] in self.remotes, "sessions need a registered engine"
        return Session(self._library, local, remote) if self._library.reaches else None


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    module = ModuleType("mori.io")
    module.__dict__.update(
        IOEngine=lambda key, config: Engine(library, key),
        IOEngineConfig=lambda host, port: (host, port),
        RdmaBackendConfig=lambda **options: options,
        EngineDesc=Desc,
        MemoryDesc=Desc,
        BackendType=type("BackendType", (), {"RDMA": "rdma"}),
        MemoryLocationType=type("MemoryLocationType", (), {"CPU": "cpu", "GPU": "gpu"}),
    )
    monkeypatch.setitem(sys.modules, "mori", ModuleType("mori"))
    monkeypatch.setitem(sys.modules, "mori.io", module)
    return library


class Rank:
    """A transport over real host memory, as if it were a GPU's."""

    def __init__(self, name: str, fill: int) -> None:
        self.buffers = [ctypes.create_string_buffer(bytes([fill]) * 256, 256) for _ in LAYOUTS]
        self.regions = [
            Region(layout, ctypes.addressof(buffer), 256 // layout.bytes_per_unit, "cuda", 3)
            for layout, buffer in zip(LAYOUTS, self.buffers, strict=True)
        ]
        self.transport = MoriioTransport(name, "10.0.0.1")
        self.descriptor = self.transport.register(self.regions)


@pytest.fixture
def ranks(library: Library) -> tuple[Rank, Rank]:
    return Rank("prefill", 7), Rank("decode", 0)


def finish(library: Library, state: str = "SUCCESS") -> None:
    for status in library.statuses:
        if status.InProgress():
            status.state = state


def test_memory_is_registered_where_it_is(ranks: tuple[Rank, Rank], library: Library) -> None:
    places = [(size, device, location) for _, size, device, location in library.memory.values()]
    assert places[:2] == [(256, 3, "gpu"), (256, 3, "gpu")]
    assert ("backend", "rdma", {"enable_notification": False}) in library.calls


def test_each_region_is_one_batch_of_its_session(ranks: tuple[Rank, Rank], library: Library) -> None:
    prefill, decode = ranks
    peer = prefill.transport.connect(decode.descriptor)
    post = prefill.transport.post_write(peer, COPIES)
    assert library.calls[-2:] == [
        ("write", "prefill/1#1", "decode/1#1", [0, 128], [128, 0], [64, 64], 1),
        ("write", "prefill/1#2", "decode/1#2", [32], [0], [32], 2),
    ]
    assert prefill.transport.poll() == []
    library.statuses[0].state = "SUCCESS"
    assert prefill.transport.poll() == []
    library.statuses[1].state = "SUCCESS"
    assert prefill.transport.poll() == [Completion(post)]
    assert prefill.transport.poll() == []
    assert decode.buffers[0].raw == bytes([7] * 64 + [0] * 64 + [7] * 64 + [0] * 64)


def test_read_back_reads_every_written_region(ranks: tuple[Rank, Rank], library: Library) -> None:
    prefill, decode = ranks
    peer = prefill.transport.connect(decode.descriptor)
    prefill.transport.post_write(peer, COPIES)
    post = prefill.transport.post_read_back(peer, COPIES)
    assert library.calls[-2:] == [
        ("read", "prefill/1#1", "decode/1#1", [56, 184], [184, 56], [8, 8], 3),
        ("read", "prefill/1#2", "decode/1#2", [56], [24], [8], 4),
    ]
    # Behind the writes: over the very sessions that wrote
    used = [(call[0], session) for call, session in library.sessions]
    assert {session for kind, session in used if kind == "read"} == {
        session for kind, session in used if kind == "write"
    }
    finish(library)
    assert Completion(post) in prefill.transport.poll()


def test_failed_status_is_an_unsettled_error(ranks: tuple[Rank, Rank], library: Library) -> None:
    prefill, decode = ranks
    post = prefill.transport.post_write(prefill.transport.connect(decode.descriptor), COPIES)
    library.statuses[0].state = "SUCCESS"
    finish(library, "ERR_RDMA_OP")
    (completion,) = prefill.transport.poll()
    assert completion == Completion(post, "transfer with decode/1: ERR_RDMA_OP: as the test said", settled=False)


def test_a_list_of_statuses_is_waited_for_in_full(
    ranks: tuple[Rank, Rank], library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_a_copy(session: Session, local: list[int], remote: list[int], sizes: list[int], uid: int) -> list[Status]:
        statuses = [Status() for _ in sizes]
        library.statuses += statuses
        return statuses

    monkeypatch.setattr(Session, "batch_write", one_a_copy)
    prefill, decode = ranks
    post = prefill.transport.post_write(prefill.transport.connect(decode.descriptor), COPIES)
    for status in library.statuses:
        assert prefill.transport.poll() == []
        status.state = "SUCCESS"
    assert prefill.transport.poll() == [Completion(post)]


def test_unknown_peer_and_wild_copies_are_settled_errors(ranks: tuple[Rank, Rank], library: Library) -> None:
    prefill, decode = ranks
    prefill.transport.post_write("nobody", COPIES)
    prefill.transport.post_read_back("nobody", COPIES)
    prefill.transport.post_write(prefill.transport.connect(decode.descriptor), [Copy(0, 0, 224, 64)])
    errors = [(completion.error, completion.settled) for completion in prefill.transport.poll()]
    assert errors == [
        ("not connected to nobody", True),
        ("not connected to nobody", True),
        ("a copy ends beyond region pages of decode/1", True),
    ]
    assert not [call for call in library.calls if call[0] in ("read", "write")]


def test_disconnected_post_ends_when_the_library_lets_go(ranks: tuple[Rank, Rank], library: Library) -> None:
    prefill, decode = ranks
    peer = prefill.transport.connect(decode.descriptor)
    post = prefill.transport.post_write(peer, COPIES)
    prefill.transport.disconnect(peer)
    prefill.transport.disconnect(peer)
    assert prefill.transport.poll() == []
    finish(library, "ERR_BAD_STATE")
    assert prefill.transport.poll() == [Completion(post, "disconnected from decode/1", settled=False)]


def test_revoke_registers_all_memory_anew(ranks: tuple[Rank, Rank], library: Library) -> None:
    prefill, decode = ranks
    peer = prefill.transport.connect(decode.descriptor)
    descriptor = decode.transport.revoke()
    assert {name.partition("#")[0] for name in library.memory} == {"prefill/1", "decode/2"}
    prefill.transport.disconnect(peer)
    assert prefill.transport.connect(descriptor) == "decode/2"


def test_close_gives_everything_back(ranks: tuple[Rank, Rank], library: Library) -> None:
    for rank in ranks:
        rank.transport.close()
        rank.transport.close()
    assert library.memory == {}


def test_unreachable_peer_is_an_error(ranks: tuple[Rank, Rank], library: Library) -> None:
    prefill, decode = ranks
    library.reaches = False
    with pytest.raises(TransportError, match="no session to engine decode/1"):
        prefill.transport.connect(decode.descriptor)


def test_wrong_descriptors_are_errors(ranks: tuple[Rank, Rank], library: Library) -> None:
    prefill, decode = ranks
    with pytest.raises(TransportError, match="descriptor"):
        prefill.transport.connect(b"no descriptor")
    decode.transport.close()
    fewer = decode.transport.register(decode.regions[:1])
    with pytest.raises(TransportError, match="has 1 regions, this rank 2"):
        prefill.transport.connect(fewer)


@pytest.mark.parametrize("field", ["engine", "memories"])
def test_malformed_descriptor_is_an_error_and_leaves_no_peer(
    ranks: tuple[Rank, Rank], library: Library, field: str
) -> None:
    prefill, decode = ranks
    descriptor = msgspec.msgpack.decode(decode.descriptor)
    descriptor[field] = b"\xff" if field == "engine" else [b"\xff", b"\xff"]
    with pytest.raises(TransportError, match="cannot connect to engine decode/1: bad msgpack"):
        prefill.transport.connect(msgspec.msgpack.encode(descriptor))
    # The true one is still welcome
    assert prefill.transport.connect(decode.descriptor) == "decode/1"


def test_memory_that_cannot_be_registered_is_an_error(ranks: tuple[Rank, Rank], library: Library) -> None:
    library.raises = RuntimeError("ibv_reg_mr failed")
    with pytest.raises(TransportError, match="cannot register memory: ibv_reg_mr failed"):
        ranks[0].transport.revoke()


def test_transfer_that_cannot_be_posted_is_an_error_of_its_post(ranks: tuple[Rank, Rank], library: Library) -> None:
    prefill, decode = ranks
    peer = prefill.transport.connect(decode.descriptor)
    library.raises = RuntimeError("queue pair is in error")
    post = prefill.transport.post_write(peer, COPIES)
    text = "transfer with decode/1 was not posted: queue pair is in error"
    assert prefill.transport.poll() == [Completion(post, text, settled=False)]


def test_settings_without_the_fence_are_refused() -> None:
    with pytest.raises(ValidationError, match="set fence to read_back"):
        HandoffSettings(transport="moriio")
    with pytest.raises(ValidationError, match="set fence to read_back"):
        HandoffSettings.model_validate({"transport": "moriio", "fence": "none"})
    assert HandoffSettings(transport="moriio", fence="read_back").transport == "moriio"


def test_the_build_of_the_image_looks_for_every_name_that_is_used() -> None:
    package = ast.parse(inspect.getsource(moriio))
    used = {
        node.attr
        for node in ast.walk(package)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in {"mori", "self._mori"}
    }
    _, _, line = DOCKERFILE.read_text().replace("\\\n", "").partition("from mori.io import ")
    looked_for = line.partition('"')[0].split(", ")
    assert set(looked_for) == used
    assert {"IOEngine", "RdmaBackendConfig"} <= used


def test_missing_library_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mori.io", None)
    with pytest.raises(TransportError, match="needs the mori package"):
        MoriioTransport("rank", "10.0.0.1")
