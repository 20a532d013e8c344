"""KDA and AttnRes against the naive operators of fla-core, which others wrote and use."""

import importlib
import warnings
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from kimi_kernels import attn_res, kda
from torch import Tensor

Draw = Callable[..., Tensor]
Close = Callable[[Tensor, Tensor], None]


def load(name: str) -> ModuleType:
    with warnings.catch_warnings():
        # fla says at import that there is no GPU; its naive operators need none.
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


@pytest.fixture
def arguments(draw: Draw) -> list[Tensor]:
    q, k = (kda.l2norm(draw(2, 128, 3, 16)) for _ in range(2))
    g = kda.gate(draw(2, 128, 3, 16), draw(3), draw(48))
    return [q, k, draw(2, 128, 3, 8), g, torch.sigmoid(draw(2, 128, 3)), draw(2, 3, 16, 8)]


@pytest.mark.parametrize("oracle", ["naive_recurrent_kda", "naive_chunk_kda"])
@pytest.mark.parametrize("form", [kda.chunk, kda.recurrent])
def test_both_forms_equal_fla(form: Callable[..., tuple[Tensor, Tensor]], oracle: str, arguments: list[Tensor],
                              close: Close) -> None:  # fmt: skip
    naive = getattr(load("fla.ops.kda.naive"), oracle)
    *rest, state = arguments
    expected, last = naive(*rest, scale=0.25, initial_state=state, output_final_state=True)
    o, new_state = form(*arguments, 0.25)
    close(o, expected)
    close(new_state, last)


def test_gate_equals_fla(draw: Draw, close: Close) -> None:
    z, a_log, bias = draw(5, 3, 16), draw(3), draw(48)
    expected = load("fla.ops.kda.gate").naive_kda_lowerbound_gate(z, a_log, bias, lower_bound=-5.0)
    close(kda.gate(z, a_log, bias), expected)


def test_attention_residual_mix_equals_fla(draw: Draw, close: Close) -> None:
    rows, norm, proj = [draw(7, 64) for _ in range(4)], draw(64), draw(1, 64)
    expected = load("fla.ops.attnres.naive").naive_attnres(proj[0], rows, norm, rms_eps=1e-5)
    got = attn_res.mix(rows[-1], torch.stack(rows[:-1]), attn_res.site_weight(norm, proj))
    close(got, expected)
