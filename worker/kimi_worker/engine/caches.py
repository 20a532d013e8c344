"""The memory that outlives a step: MLA pages, KDA states and convolution inputs of one rank."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from kimi_kernels.kda import CONV_TAPS
from torch import Tensor

from kimi_worker.handoff import transport
from kimi_worker.handoff.fabric import SCRATCH_UNITS
from kimi_worker.handoff.plan import RegionLayout, Unit
from kimi_worker.model.config import KimiConfig
from kimi_worker.parallel.ranks import RankPlace
from kimi_worker.settings import LimitSettings, RuntimeSettings

SCRATCH_BYTES = 4096
"""Of one test write."""
LAYOUT_VERSION = 2
"""Raise it when the meaning of a byte in a page or slot changes; ranks of different versions never exchange."""


@dataclass(frozen=True, slots=True)
class Region:
    """One tensor that the handoff copies from, or into, by whole units.

    tensor      contiguous, axis 0 counts the units: unit i is the bytes [i * unit_bytes, (i + 1) * unit_bytes)
    unit        "page" or "slot"
    """

    name: str
    tensor: Tensor
    unit: str

    @property
    def num_units(self) -> int:
        return self.tensor.shape[0]

    @property
    def unit_bytes(self) -> int:
        return self.tensor[0].nbytes


class TensorScratch:
    """Memory of test writes, on the caches' device: what goes through here goes the caches' way."""

    def __init__(self, device: torch.device) -> None:
        self._units = torch.zeros(SCRATCH_UNITS, SCRATCH_BYTES, dtype=torch.uint8, device=device)
        self.region = registered("scratch", Unit.SCRATCH, self._units)

    def fill(self, unit: int, data: bytes) -> None:
        self._units[unit].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        if self._units.is_cuda:
            # The network card does not wait for the copy as a kernel would.
            torch.cuda.synchronize(self._units.device)

    def read(self, unit: int) -> bytes:
        return self._units[unit].cpu().numpy().tobytes()


def registered(name: str, unit: Unit, tensor: Tensor) -> transport.Region:
    """A tensor whose axis 0 counts units, as the transport registers it."""
    return transport.Region(
        layout=RegionLayout(name, unit, tensor[0].nbytes),
        pointer=tensor.data_ptr(),
        num_units=tensor.shape[0],
        device=tensor.device.type,
        device_id=tensor.device.index or 0,
    )


class Caches:
    """Owns the three tensors; who may use which page or slot is the scheduler's business.

    pages  [P, mla_layers, S, L + rope]                kv cache dtype, the same on every rank of a lane
    state  [num_slots, kda_layers, H / TP, K, V]       fp32
    conv   [num_slots, kda_layers, 3, 3 * H / TP * K]  activation dtype: the last three inputs of q, k and v
    """

    def __init__(
        self,
        config: KimiConfig,
        place: RankPlace,
        limits: LimitSettings,
        runtime: RuntimeSettings,
        device: torch.device,
    ) -> None:
        heads = len(place.share(config.kda_num_heads, "linear_attn_config.num_heads"))
        dim = config.kda_head_dim
        slots, layers = limits.num_state_slots, len(config.kda_layers)
        kv_dtype = getattr(torch, runtime.kv_cache_dtype)
        self.pages = torch.zeros(
            limits.num_pages, len(config.mla_layers), limits.page_size_tokens, config.latent_row, dtype=kv_dtype,
            device=device,
        )  # fmt: skip
        self.state = torch.zeros(slots, layers, heads, dim, dim, dtype=torch.float32, device=device)
        self.conv = torch.zeros(
            slots, layers, CONV_TAPS - 1, 3 * heads * dim, dtype=getattr(torch, runtime.dtype), device=device
        )
        self.page_size = limits.page_size_tokens
        # Views of one layer each: [P, S, L + rope], [num_slots, H / TP, K, V], [num_slots, 3, 3 * H / TP * K].
        self.page_layers = self.pages.unbind(1)
        self.state_layers = self.state.unbind(1)
        self.conv_layers = self.conv.unbind(1)

    @property
    def regions(self) -> tuple[Region, ...]:
        """Everything that moves with a request, in a fixed order."""
        return (
            Region("pages", self.pages, "page"),
            Region("state", self.state, "slot"),
            Region("conv", self.conv, "slot"),
        )

    @property
    def pages_bytes(self) -> int:
        return self.pages.nbytes

    @property
    def slots_bytes(self) -> int:
        return self.state.nbytes + self.conv.nbytes

    def zero_slots(self, slots: Sequence[int]) -> None:
        """Make the slots those of sequences that have seen nothing yet."""
        if slots:
            index = torch.tensor(slots, dtype=torch.int64, device=self.state.device)
            self.state[index] = 0.0
            self.conv[index] = 0.0


def layout_hash(
    config: KimiConfig, tensor_parallel: int, limits: LimitSettings, runtime: RuntimeSettings, fingerprint: str
) -> str:
    """Name of everything that two ranks must agree on before one writes into the other's pages and slots.

    fingerprint  of the weights, so that two checkpoints of one architecture never exchange
    returns      16 hex digits
    """
    agreed = {
        "version": LAYOUT_VERSION,
        "mla_layers": config.mla_layers,
        "kda_layers": config.kda_layers,
        "latent_row": [config.kv_lora_rank, config.rope_dim],
        "kda": [config.kda_num_heads, config.kda_head_dim, CONV_TAPS],
        "page_size_tokens": limits.page_size_tokens,
        "dtypes": [runtime.kv_cache_dtype, "float32", runtime.dtype],
        "tensor_parallel": tensor_parallel,
        "fingerprint": fingerprint,
    }
    return hashlib.sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()[:16]
