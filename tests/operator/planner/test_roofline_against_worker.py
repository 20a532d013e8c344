"""What the roofline says that the bundled worker does with experts, against the worker's own code."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from kimi_kernels import mxfp4
from kimi_kernels.backend import Backend
from kimi_operator.planner.fit import calibrate
from kimi_operator.planner.roofline import (
    CHOICE_BYTES,
    SUM_ITEMSIZE,
    DecodeLoad,
    Decoding,
    Exchange,
    Graphs,
    Setup,
    distinct_experts,
)
from kimi_operator.profiles import architecture, built_in_profiles
from kimi_operator.profiles.measurements import worker_engine
from kimi_worker.model import moe
from kimi_worker.model.forms import ExpertStorage, Forms
from kimi_worker.model.moe import Experts
from kimi_worker.model.weights import PackedExperts
from kimi_worker.parallel.experts import AllToAllExchange
from kimi_worker.parallel.groups import Collective
from kimi_worker.parallel.ranks import RankPlace
from published_setups import BUILT_IN, EP16, K3, MI300X
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ENGINE = worker_engine(built_in_profiles()["mi300x"])


class Echo:
    """Collectives that give each rank its own back; notes rows and bytes of a row."""

    size = 4

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []

    def all_to_all(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        assert sum(send) == sum(receive) == rows.shape[0]
        self.sent.append((rows.shape[0], rows[0].nbytes))
        return rows


def test_counts_then_a_row_to_each_rank_then_its_sum_in_float32() -> None:
    assert ENGINE.exchange is Exchange.ALL_TO_ALLS
    world, latent, choices = Echo(), 8, torch.tensor([[0, 1, 2, 3], [0, 5, 6, 15], [4, 7, 8, 12]])
    exchange = AllToAllExchange(cast("Collective", world), 16, RankPlace(0, 4, 1, 1))
    rows = torch.zeros(3, latent, dtype=torch.bfloat16)
    exchange.run(rows, choices, torch.ones(3, 4), lambda arrived, _, __: arrived.float())
    # one rank, three, three: four experts are of each
    copies, row = 1 + 3 + 3, latent * ENGINE.itemsize + choices.shape[1] * CHOICE_BYTES
    assert world.sent == [(4, 8), (copies, row), (copies, latent * SUM_ITEMSIZE)]


def packed_experts() -> Experts:
    """Six small ones, as on a GPU: packed, and run one by one."""

    def matrices(out: int, columns: int) -> PackedExperts:
        return PackedExperts(*mxfp4.quantise(torch.ones(6, out, columns)), Backend.TORCH)

    experts = Experts.__new__(Experts)
    experts.first, experts._betas = 0, (4.0, 25.0)
    experts._w_in, experts._w_out = matrices(128, 64), matrices(64, 64)
    return experts


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What is decoded, in order. A GPU does it in one kernel, and here in none that is counted."""
    found: list[Tensor] = []

    def dequantise(packed: Tensor, scale: Tensor, dtype: torch.dtype, backend: Backend) -> Tensor:
        found.append(torch.empty(*packed.shape[:-1], packed.shape[-1] * 2, dtype=dtype))
        return found[-1]

    monkeypatch.setattr(mxfp4, "dequantise", dequantise)
    monkeypatch.setattr(moe, "_GATHER_BYTES", 0)
    return found


class Launches(TorchDispatchMode):
    """Counts operations that are a kernel on a GPU."""

    NONE = ("empty", "select", "slice", "split", "t", "view", "unsqueeze", "transpose", "expand", "alias", "detach")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ not in self.NONE
        return func(*args, **(kwargs or {}))


def test_each_expert_that_is_hit_is_decoded_once_and_no_other(decoded: list[Tensor]) -> None:
    assert ENGINE.decoding is Decoding.IN_MEMORY
    assert Forms.suited_to(torch.device("cuda")).experts is ExpertStorage.PACKED
    choices = torch.tensor([[0, 4], [4, 2], [9, 4]])
    packed_experts()(torch.ones(3, 64, dtype=torch.bfloat16), choices, torch.ones(3, 2))
    assert [tuple(each.shape) for each in decoded] == [(128, 64), (64, 64)] * 3, "experts 0, 2 and 4"
    assert {each.element_size() for each in decoded} == {ENGINE.itemsize}


def test_an_expert_more_takes_twenty_launches_more(decoded: list[Tensor]) -> None:
    def launches(*experts: int) -> int:
        decoded.clear()
        choices = torch.tensor([experts])
        with Launches() as counted:
            packed_experts()(torch.ones(1, 64, dtype=torch.bfloat16), choices, torch.ones(choices.shape))
        return counted.count + len(decoded)

    setup = Setup(K3, MI300X, EP16, ENGINE, graphs=Graphs.NONE)
    told = calibrate(setup, DecodeLoad, BUILT_IN.samples).beyond
    more = launches(0, 1, 2) - launches(0, 1, 9)
    assert f"{more} for each expert that a rank runs" in told
    for requests, milliseconds in ((1, 42), (64, 234)):
        hit = distinct_experts(896, 16, requests) / 16
        assert (93 * 140 + 92 * more * hit) * 2.8e-3 == pytest.approx(milliseconds, abs=1)


def test_no_experts_of_the_released_size_are_copied_together() -> None:
    """One choice of one token takes more than what is gathered, so each expert is decoded on its own."""
    assert architecture("kimi-k3").expert_weights * ENGINE.itemsize > moe._GATHER_BYTES
