"""What a checkpoint folder holds, checked against config.json from the files' headers alone. No torch."""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kimi_worker.model.config import KimiConfig, read_config
from kimi_worker.model.inventory import ANY, Plain, inventory

INDEX_FILE = "model.safetensors.index.json"
SKIPPED_PREFIXES = ("vision_tower.", "mm_projector.")
"""Parts of the release that a text model does not read."""

_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
_BYTES |= {"BOOL": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8}
# The format's own limit; a larger length means that the file is something else, such as a Git LFS pointer.
_MAX_HEADER_BYTES = 100_000_000


class _Described(msgspec.Struct):
    """What a safetensors header says about one tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class CheckpointError(Exception):
    """A checkpoint file is missing, damaged or not what config.json promises; the message says which and what to do."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a safetensors file, as its header describes it."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checked folder: its sizes and the language model's tensors by name."""

    folder: Path
    config: KimiConfig
    tensors: dict[str, TensorEntry]

    @property
    def num_bytes(self) -> int:
        """Payload of the language model, in bytes."""
        return sum(entry.num_bytes for entry in self.tensors.values())


def check_checkpoint(folder: Path) -> Checkpoint:
    """Check presence, type, shape and length of everything that a worker will read.

    Reads config.json, the index and every file's header. Raises ConfigError or CheckpointError at the first fault.
    """
    config = read_config(folder)
    weight_map = _read_index(folder / INDEX_FILE)
    headers = {file: _read_header(folder / file) for file in sorted(set(weight_map.values()))}
    _check_labels(folder, weight_map, headers)
    present = {name: headers[file][name] for name, file in weight_map.items() if not name.startswith(SKIPPED_PREFIXES)}
    _check_tensors(folder, config, present)
    return Checkpoint(folder, config, present)


def _read_index(path: Path) -> dict[str, str]:
    """The map from tensor name to file name."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror}; a released checkpoint has an index beside its safetensors files"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}; copy the file again") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map: expected an object from tensor to file, got {weight_map!r:.80}")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                f"{path}: weight_map.{name}: expected a file name in the same folder, got {file!r:.120}"
            )
    return weight_map


def _read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one file; checks that the file is as long as its header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            text = file.read(length) if length <= min(size - 8, _MAX_HEADER_BYTES) else None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; the index names this file: copy it to this node") from error
    if text is None:
        raise CheckpointError(
            f"{path}: {size} bytes, but a header of {length} bytes is announced; the file is truncated or not in the "
            "safetensors format (a Git LFS pointer?): copy it again"
        )
    try:
        content = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        content.pop("__metadata__", None)
        described = {name: msgspec.json.decode(raw, type=_Described) for name, raw in content.items()}
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path}: the safetensors header cannot be read: {error}; copy the file again") from error
    payload = max((value.data_offsets[1] for value in described.values()), default=0)
    if size != 8 + length + payload:
        raise CheckpointError(
            f"{path}: expected {8 + length + payload} bytes from its header, got {size}; the copy is incomplete or "
            "damaged: copy it again"
        )
    return {name: _entry(path, name, value) for name, value in described.items()}


def _entry(path: Path, name: str, value: _Described) -> TensorEntry:
    dtype, shape, (begin, end) = value.dtype, value.shape, value.data_offsets
    if dtype not in _BYTES:
        raise CheckpointError(f"{path}: {name}: unknown type {dtype}, expected one of {', '.join(_BYTES)}")
    expected = math.prod(shape) * _BYTES[dtype]
    if end - begin != expected or begin < 0:
        raise CheckpointError(
            f"{path}: {name}: {dtype} {list(shape)} needs {expected} bytes, its header gives {end - begin}; the "
            "file is damaged: copy it again"
        )
    return TensorEntry(path.name, dtype, shape, expected)


def _check_labels(folder: Path, weight_map: dict[str, str], headers: dict[str, dict[str, TensorEntry]]) -> None:
    """Index and headers name the same tensors in the same files."""
    for name, file in weight_map.items():
        if name not in headers[file]:
            holders = [other for other, header in headers.items() if name in header]
            where = f"it is in {holders[0]}" if holders else "no file has it"
            raise CheckpointError(
                f"{folder / file}: {name}: the index puts it here, but {where}; the files are mislabelled or from "
                f"different releases: copy the files and {INDEX_FILE} of one release again"
            )
    for file, header in headers.items():
        for name in header:
            if weight_map.get(name) != file:
                raise CheckpointError(
                    f"{folder / file}: {name}: the index puts it in {weight_map.get(name, 'no file')}; the files are "
                    f"mislabelled or from different releases: copy the files and {INDEX_FILE} of one release again"
                )


def _check_tensors(folder: Path, config: KimiConfig, present: dict[str, TensorEntry]) -> None:
    expected = {tensor.name: tensor for item in inventory(config) for tensor in item.tensors(present)}
    for name, tensor in expected.items():
        if name not in present:
            raise CheckpointError(
                f"{folder / INDEX_FILE}: {name}: missing, expected {tensor.dtype} {list(tensor.shape)}; copy the whole "
                "release, or correct config.json if it belongs to another checkpoint"
            )
        _check_tensor(folder, config, tensor, present[name])
    for name, entry in present.items():
        if name not in expected:
            raise CheckpointError(
                f"{folder / entry.file}: {name}: unknown tensor ({entry.dtype} {list(entry.shape)}); quantised weights "
                "are read only as MXFP4 (weight_packed and weight_scale), and other models are not served"
            )
    if not config.quantised:
        for name in expected:
            if name.endswith(".weight_packed"):
                raise CheckpointError(
                    f"{folder / 'config.json'}: text_config.quantization_config: missing, but {name} exists; its "
                    "format is unknown: restore the released config.json"
                )


def _check_tensor(folder: Path, config: KimiConfig, expected: Plain, entry: TensorEntry) -> None:
    where = f"{folder / entry.file}: {expected.name}"
    if entry.dtype != expected.dtype:
        raise CheckpointError(
            f"{where}: expected type {expected.dtype}, got {entry.dtype}; use the released files or convert them back"
        )
    sizes_agree = len(entry.shape) == len(expected.shape) and all(
        want in {ANY, got} for want, got in zip(expected.shape, entry.shape, strict=True)
    )
    if not sizes_agree:
        raise CheckpointError(
            f"{where}: expected shape {list(expected.shape)} from config.json, got {list(entry.shape)}; config.json "
            "and the weights are of different models"
        )
    if expected.name.endswith("A_log") and entry.shape[0] < config.kda_num_heads:
        raise CheckpointError(
            f"{where}: expected at least {config.kda_num_heads} entries (linear_attn_config.num_heads), "
            f"got {entry.shape[0]}; config.json and the weights are of different models"
        )
