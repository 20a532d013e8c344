"""What a pod finds out about its checkpoint before it starts anything that takes minutes."""

import json
import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from kimi_worker.model.config import read_config, read_end_ids
from kimi_worker.preflight import PREFLIGHT_ERRORS, check_pod
from kimi_worker.server.app import serve
from kimi_worker.server.listen import PortError
from kimi_worker.server.text import Tokenizer
from kimi_worker.settings import PodIdentity, standalone_settings

TINY = Path(__file__).resolve().parents[3] / "examples/tiny-k3"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The tiny model's checkpoint, with files of its own but for the weights."""
    for path in TINY.iterdir():
        if path.suffix == ".safetensors":
            (tmp_path / path.name).symlink_to(path)
        elif path.is_file():
            shutil.copy(path, tmp_path)
    return tmp_path


def edit(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def check(folder: Path) -> None:
    check_pod(standalone_settings(folder, 8000, 8192), PodIdentity(run_dir=Path("/tmp/kimi")))


FAULTS: dict[str, Callable[[Path], object]] = {
    "tiktoken.model: No such file": lambda folder: (folder / "tiktoken.model").unlink(),
    "tokenizer_config.json: No such file": lambda folder: (folder / "tokenizer_config.json").unlink(),
    "tokenizer_config.json: added_tokens_decoder: .*'seven'": lambda folder: edit(
        folder / "tokenizer_config.json", lambda content: content["added_tokens_decoder"].update(seven={"content": "x"})
    ),
    "tokenizer_config.json: added_tokens_decoder: .*'7'": lambda folder: edit(
        folder / "tokenizer_config.json", lambda content: content["added_tokens_decoder"].update({"7": "x"})
    ),
    "added_tokens_decoder does not name <.open.>": lambda folder: edit(
        folder / "tokenizer_config.json", lambda content: content.update(added_tokens_decoder={})
    ),
    "tiktoken.model: line 1: ": lambda folder: (folder / "tiktoken.model").write_text("x\n"),
    "config.json: .*eos_token_id": lambda folder: edit(
        folder / "config.json", lambda content: content.update(eos_token_id=["end"])
    ),
}


@pytest.mark.parametrize(("said", "spoil"), FAULTS.items(), ids=FAULTS)
def test_a_fault_of_the_checkpoint_is_named_before_anything_starts(
    folder: Path, said: str, spoil: Callable[[Path], object]
) -> None:
    check(folder)
    spoil(folder)
    with pytest.raises(PREFLIGHT_ERRORS, match=said):
        check(folder)


async def test_a_port_of_the_api_that_is_held_is_named_with_its_holder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        settings = standalone_settings(TINY, port, 8192)
        with pytest.raises(PortError, match=rf"port {port} .*: Address already in use; process {os.getpid()} \("):
            await serve(settings, PodIdentity(run_dir=tmp_path))


def test_the_engine_and_the_api_end_answers_at_the_same_ids(folder: Path) -> None:
    """The lane stops there and the API leaves the token's text out."""
    ids = read_end_ids(folder)
    special = Tokenizer.load(folder).special
    assert set(ids) == {special["<|end_of_msg|>"], special["[EOS]"]}
    assert read_config(folder).eos_token_ids == ids
    assert Tokenizer.load(folder).stop_ids == set(ids)


def test_the_tiny_models_tokenizer_file_is_what_its_code_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a chat with it does not think unless it is asked to: the model has learnt no thinking."""
    monkeypatch.syspath_prepend(str(TINY))
    from tiny_k3.chat import write_tokenizer  # noqa: PLC0415

    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    length = json.loads((TINY / "tokenizer_config.json").read_text())["model_max_length"]
    write_tokenizer(tmp_path, length)
    for name in ("tokenizer_config.json", "tiktoken.model"):
        assert (tmp_path / name).read_bytes() == (TINY / name).read_bytes()
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template_kwargs"] == {"thinking": False}
