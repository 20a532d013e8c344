"""KDA: the chunked form against the recurrence, states carried over any cut, extreme decays, gradients."""

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kimi_kernels import kda
from torch import Tensor

Draw = Callable[..., Tensor]
Close = Callable[[Tensor, Tensor], None]
HEADS, K, V, SCALE = 3, 16, 8, 0.25


def operands(draw: Draw, *lead: int, tokens: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    q, k = (kda.l2norm(draw(*lead, tokens, HEADS, K, dtype=dtype)) for _ in range(2))
    v = draw(*lead, tokens, HEADS, V, dtype=dtype)
    g = -5 * torch.sigmoid(3 * draw(*lead, tokens, HEADS, K, dtype=dtype))
    beta = torch.sigmoid(draw(*lead, tokens, HEADS, dtype=dtype))
    return [q, k, v, g, beta, draw(*lead, HEADS, K, V, dtype=dtype)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 100])
def test_chunk_equals_the_recurrence(tokens: int, dtype: torch.dtype, draw: Draw, close: Close) -> None:
    arguments = operands(draw, 2, tokens=tokens, dtype=dtype)
    for got, expected in zip(kda.chunk(*arguments, SCALE), kda.recurrent(*arguments, SCALE), strict=True):
        assert got.dtype == dtype
        close(got, expected)


@pytest.mark.parametrize("decay", [-5.0, -4.99, -2.5, 0.0])
def test_chunk_holds_at_every_constant_decay(decay: float, draw: Draw, close: Close) -> None:
    q, k, v, g, beta, state = operands(draw, tokens=96)
    g = torch.full_like(g, decay)
    wide = [x.double() for x in (q, k, v, g, beta, state)]
    for got, expected in zip(kda.chunk(q, k, v, g, beta, state, SCALE), kda.recurrent(*wide, SCALE), strict=True):
        close(got, expected)


def test_chunk_holds_when_channels_decay_at_opposite_ends(draw: Draw, close: Close) -> None:
    q, k, v, g, beta, state = operands(draw, tokens=64)
    g = torch.where(torch.arange(K) % 2 == 0, -5.0, -1e-6).expand_as(g)
    expected, _ = kda.recurrent(*(x.double() for x in (q, k, v, g, beta, state)), SCALE)
    close(kda.chunk(q, k, v, g, beta, state, SCALE)[0], expected)


@settings(max_examples=25)
@given(cuts=st.lists(st.integers(1, 69), max_size=4, unique=True), single=st.booleans())
def test_any_cut_of_a_sequence_gives_the_same(cuts: list[int], single: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    *arguments, state = operands(
        lambda *s, dtype: torch.randn(*s, generator=generator, dtype=dtype), tokens=70, dtype=torch.float64
    )
    expected, last = kda.recurrent(*arguments, state, SCALE)
    outputs = []
    edges = [0, *sorted(cuts), 70]
    for begin, end in itertools.pairwise(edges):
        part = [x[begin:end] for x in arguments]
        if single and end - begin == 1:
            o, state = kda.step(*(x[0] for x in part), state, SCALE)
            o = o.unsqueeze(0)
        else:
            o, state = kda.chunk(*part, state, SCALE)
        outputs.append(o)
    torch.testing.assert_close(torch.cat(outputs), expected, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(state, last, rtol=1e-11, atol=1e-11)


def test_step_advances_each_request_alone_and_leaves_its_state_argument(draw: Draw, close: Close) -> None:
    q, k, v, g, beta, _ = operands(draw, tokens=5)
    states = draw(5, HEADS, K, V)
    before = states.clone()
    o, new_states = kda.step(q, k, v, g, beta, states, SCALE)
    assert torch.equal(states, before)
    for r in range(5):
        one, state = kda.recurrent(*(x[r : r + 1] for x in (q, k, v, g, beta)), states[r], SCALE)
        assert torch.equal(o[r], one[0])
        assert torch.equal(new_states[r], state)


def test_a_dead_token_changes_nothing(draw: Draw) -> None:
    q, k, v, g, beta, state = operands(draw, tokens=1)
    _, after = kda.chunk(q, k, v, torch.zeros_like(g), torch.zeros_like(beta), state, SCALE)
    assert torch.equal(after, state)


def test_a_full_write_is_read_back(draw: Draw, close: Close) -> None:
    """With beta 1 and no decay the state maps the last key to its value, whatever stood there."""
    _, k, v, g, beta, state = operands(draw, tokens=40, dtype=torch.float64)
    k = k / k.norm(dim=-1, keepdim=True)
    o, _ = kda.chunk(k, k, v, torch.zeros_like(g), torch.ones_like(beta), state, 1.0)
    close(o, v)


def test_gradients_of_chunk_are_those_of_the_recurrence(draw: Draw, close: Close) -> None:
    arguments = operands(draw, 2, tokens=70, dtype=torch.float64)
    weight = draw(2, 70, HEADS, V, dtype=torch.float64)
    gradients = []
    for form in (kda.chunk, kda.recurrent):
        leaves = [x.clone().requires_grad_() for x in arguments]
        o, state = form(*leaves, SCALE)
        ((o * weight).sum() + state.square().sum()).backward()
        gradients.append([leaf.grad for leaf in leaves])
    for got, expected in zip(*gradients, strict=True):
        close(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolution_is_four_taps_and_silu(dtype: torch.dtype, draw: Draw, close: Close) -> None:
    x, weight, state = draw(9, 6, dtype=dtype), draw(6, 1, 4), draw(3, 6, dtype=dtype)
    y, new_state = kda.conv_chunk(x, weight, state)
    window = torch.cat([state, x]).double()
    for t in range(9):
        plain = sum(window[t + j] * weight[:, 0, j].double() for j in range(4))
        close(y[t], plain * torch.sigmoid(plain))
    assert y.dtype == dtype
    assert torch.equal(new_state, x[-3:])


@pytest.mark.parametrize("cut", [1, 2, 3, 8])
def test_convolution_carries_its_state_over_a_cut(cut: int, draw: Draw) -> None:
    # 7 channels: no cut falls together with the ends of the CPU's vectors.
    x, weight, state = draw(9, 7), draw(7, 1, 4), draw(3, 7)
    whole, last = kda.conv_chunk(x, weight, state)
    first, middle = kda.conv_chunk(x[:cut], weight, state)
    second, end = kda.conv_chunk(x[cut:], weight, middle)
    # Bit for bit: the sums have one order, and the SiLU treats the last elements of a tensor like the others.
    assert torch.equal(torch.cat([first, second]), whole)
    assert torch.equal(end, last)


def test_conv_step_is_conv_chunk_of_one_token_a_request(draw: Draw) -> None:
    x, weight, states = draw(5, 7), draw(7, 1, 4), draw(5, 3, 7)
    y, new_states = kda.conv_step(x, weight, states)
    for r in range(5):
        one, state = kda.conv_chunk(x[r : r + 1], weight, states[r])
        assert torch.equal(y[r], one[0])
        assert torch.equal(new_states[r], state)


def test_convolution_of_extreme_inputs_is_finite_and_so_is_its_gradient() -> None:
    x = torch.tensor([-1e30, -200.0, -89.0, 0.0, 89.0, 1e30]).unsqueeze(0).requires_grad_()
    weight = torch.zeros(6, 1, 4)
    weight[:, 0, 3] = 1.0
    y, _ = kda.conv_chunk(x, weight, torch.zeros(3, 6))
    y.sum().backward()
    expected = torch.nn.functional.silu(x.detach().double())
    torch.testing.assert_close(y.detach()[0, 1:].double(), expected[0, 1:], rtol=2e-5, atol=1e-30)
    assert y.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_step_slots_advances_the_named_slots_alone(draw: Draw) -> None:
    q, k, v, g, beta, _ = operands(draw, tokens=3)
    memory = draw(7, 2, HEADS, K, V)
    states, before, slots = memory[:, 1], memory.clone(), torch.tensor([5, 0, 2])
    o = kda.step_slots(q, k, v, g, beta, states, slots, SCALE)
    expected, advanced = kda.step(q, k, v, g, beta, before[slots, 1], SCALE)
    assert torch.equal(o, expected)
    before[slots, 1] = advanced
    assert torch.equal(memory, before)


def test_gate_drops_the_padding_of_a_log_and_stays_in_bounds(draw: Draw) -> None:
    z, bias = 20 * draw(7, HEADS, K), draw(HEADS * K)
    padded = torch.cat([draw(HEADS), torch.zeros(125)])
    g = kda.gate(z, padded, bias)
    assert torch.equal(g, kda.gate(z, padded[:HEADS], bias))
    assert g.dtype == torch.float32
    assert g.min() >= -5.0
    assert g.max() <= 0.0


def test_gated_norm_rounds_once_at_the_end(draw: Draw, close: Close) -> None:
    o, output_gate, weight = draw(4, HEADS, V), draw(4, HEADS, V, dtype=torch.bfloat16), draw(V)
    got = kda.gated_norm(o, output_gate, weight)
    wide = o.double()
    expected = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, (expected * torch.sigmoid(output_gate.double())).to(torch.bfloat16))
