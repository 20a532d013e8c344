"""Reads this rank's slices of a checked checkpoint and puts them on its device. Only safetensors, never a pickle."""

import hashlib
from collections.abc import Sequence
from typing import Protocol

import torch
from kimi_kernels import mxfp4
from kimi_kernels.backend import Backend
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kimi_worker.model.checkpoint import Checkpoint, CheckpointError
from kimi_worker.model.forms import ExpertStorage, Forms
from kimi_worker.model.inventory import MODEL


class ExpertMatrices(Protocol):
    """One weight matrix of each of this rank's experts."""

    num_experts: int
    expert_bytes: int
    """Size of one decoded matrix, in bytes."""

    def get(self, expert: int, dtype: torch.dtype) -> Tensor:
        """The matrix [out, in] of one expert."""
        ...

    def take(self, expert: Tensor, dtype: torch.dtype) -> Tensor:
        """Copies of the matrices of the experts [m] int64 as [m, out, in]."""
        ...


class DecodedExperts:
    def __init__(self, weight: Tensor) -> None:
        """weight [E, out, in] in the compute dtype."""
        self._weight = weight
        self.num_experts, self.expert_bytes = weight.shape[0], weight[0].nbytes

    def get(self, expert: int, dtype: torch.dtype) -> Tensor:  # noqa: ARG002 - stored in the compute dtype
        return self._weight[expert]

    def take(self, expert: Tensor, dtype: torch.dtype) -> Tensor:  # noqa: ARG002 - stored in the compute dtype
        return self._weight.index_select(0, expert)


class PackedExperts:
    def __init__(self, packed: Tensor, scale: Tensor, backend: Backend) -> None:
        """packed [E, out, in/2] and scale [E, out, in/32], uint8."""
        self._packed, self._scale, self._backend = packed, scale, backend
        self.num_experts = packed.shape[0]
        # two columns a byte, two bytes each once decoded to bf16
        self.expert_bytes = packed[0].nbytes * 4

    def get(self, expert: int, dtype: torch.dtype) -> Tensor:
        return mxfp4.dequantise(self._packed[expert], self._scale[expert], dtype, backend=self._backend)

    def take(self, expert: Tensor, dtype: torch.dtype) -> Tensor:
        packed, scale = (part.index_select(0, expert) for part in (self._packed, self._scale))
        return mxfp4.dequantise(packed, scale, dtype, backend=self._backend)


class WeightSource:
    """Gives the blocks their weights. `read` and `linear` return CPU tensors; what `keep` returns lives on the device.

    forms         of the model that reads from here
    loaded_bytes  of everything that was kept
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, forms: Forms) -> None:
        self.checkpoint, self.dtype, self.device, self.forms = checkpoint, dtype, device, forms
        self.loaded_bytes = 0
        # Opening a file parses its header, of thousands of tensors in the release: once is enough.
        self._open: dict[str, safe_open] = {}

    def read(self, name: str, *, rows: range | None = None, columns: range | None = None) -> Tensor:
        """A tensor, or some of its rows (axis 0) or columns (axis 1), in the file's dtype. Raises CheckpointError."""
        entry = self.checkpoint.tensors[name]
        path = self.checkpoint.folder / entry.file
        try:
            if entry.file not in self._open:
                self._open[entry.file] = safe_open(path, framework="pt", device="cpu")
            file = self._open[entry.file]
            if rows is not None:
                return file.get_slice(name)[rows.start : rows.stop]
            if columns is not None:
                return file.get_slice(name)[:, columns.start : columns.stop]
            return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: {name}: {error}; copy the file again") from error

    def linear(self, base: str, *, rows: range | None = None, columns: range | None = None) -> Tensor:
        """A linear layer's weight [out, in], decoded to bf16 when it is stored packed."""
        if f"{base}.weight_packed" not in self.checkpoint.tensors:
            return self.read(f"{base}.weight", rows=rows, columns=columns)
        packed, scale = (self.read(f"{base}.{part}", rows=rows) for part in ("weight_packed", "weight_scale"))
        weight = mxfp4.dequantise(packed, scale)
        return weight if columns is None else weight[:, columns.start : columns.stop]

    def keep(self, *parts: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Concatenate parts on axis 0 and put them on the device, in the compute dtype unless told otherwise."""
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        # A clone, so that no slice keeps its file mapped.
        kept = torch.empty(joined.shape, dtype=dtype or self.dtype, device=self.device).copy_(joined)
        self.loaded_bytes += kept.nbytes
        return kept

    def experts(self, bases: Sequence[Sequence[str]]) -> ExpertMatrices:
        """One matrix an expert; each expert's layers are stacked on the output axis (w1 above w3)."""
        is_packed = all(f"{base}.weight_packed" in self.checkpoint.tensors for layers in bases for base in layers)
        if self.forms.experts is ExpertStorage.PACKED and is_packed:
            packed, scale = (
                self._stack([[self.read(f"{base}.{part}") for base in layers] for layers in bases], torch.uint8)
                for part in ("weight_packed", "weight_scale")
            )
            return PackedExperts(packed, scale, self.forms.backend)
        return DecodedExperts(self._stack([[self.linear(base) for base in layers] for layers in bases], self.dtype))

    def fingerprint(self) -> str:
        """Tells checkpoints of one architecture apart by a few small tensors that training always moves."""
        digest = hashlib.sha256(repr(self.checkpoint.config).encode())
        for name in ("norm.weight", "output_attn_res_norm.weight", "output_attn_res_proj.weight"):
            digest.update(self.read(f"{MODEL}{name}").view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _stack(self, matrices: list[list[Tensor]], dtype: torch.dtype) -> Tensor:
        return self.keep(torch.stack([torch.cat(layers) for layers in matrices]), dtype=dtype)
