"""One token of KDA for each of many requests as a Triton kernel for gfx942: states advance in place, by slot."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_V = 32
"""Value columns of a program. They are independent of each other: its tile of the state is [K, BLOCK_V] fp32."""
NUM_WARPS = 4


@triton.jit
def step_kernel(  # noqa: PLR0913, PLR0917 - Triton has no structures
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    state_ptr,
    slots_ptr,
    out_ptr,
    scale,
    num_heads,
    stride_slot,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Advance BLOCK_V value columns of one head of one request: decay, delta correction, read."""
    i_request = tl.program_id(0).to(tl.int64)
    i_head = tl.program_id(1)
    o_k = tl.arange(0, BLOCK_K)
    o_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_k, is_v = o_k < K, o_v < V
    o_row = i_request * num_heads + i_head
    b_q = tl.load(q_ptr + o_row * K + o_k, mask=is_k, other=0.0).to(tl.float32)
    b_k = tl.load(k_ptr + o_row * K + o_k, mask=is_k, other=0.0).to(tl.float32)
    b_g = tl.load(g_ptr + o_row * K + o_k, mask=is_k, other=0.0).to(tl.float32)
    b_v = tl.load(v_ptr + o_row * V + o_v, mask=is_v, other=0.0).to(tl.float32)
    b_beta = tl.load(beta_ptr + o_row).to(tl.float32)

    i_slot = tl.load(slots_ptr + i_request).to(tl.int64)
    o_state = i_slot * stride_slot + i_head.to(tl.int64) * (K * V) + o_k[:, None] * V + o_v[None, :]
    is_state = is_k[:, None] & is_v[None, :]
    b_state = tl.load(state_ptr + o_state, mask=is_state, other=0.0) * tl.exp(b_g)[:, None]
    b_error = b_v - tl.sum(b_state * b_k[:, None], axis=0)
    b_state += b_k[:, None] * (b_beta * b_error)[None, :]
    tl.store(state_ptr + o_state, b_state, mask=is_state)
    tl.store(out_ptr + o_row * V + o_v, tl.sum(b_state * b_q[:, None], axis=0) * scale, mask=is_v)


def step_slots(  # noqa: PLR0913, PLR0917 - the recurrence has seven operands
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, slots: Tensor, scale: float
) -> Tensor:
    """Arguments, effect and result as kda.step_slots. Raises ValueError for states that are not whole fp32 matrices."""
    num_requests, num_heads, key_dim = q.shape
    value_dim = v.shape[-1]
    if state.dtype != torch.float32 or state.stride()[1:] != (key_dim * value_dim, value_dim, 1):
        raise ValueError(
            f"KDA states are {state.dtype} with strides {state.stride()}, expected float32 with contiguous slots "
            f"[{num_heads}, {key_dim}, {value_dim}]; only the first axis may be strided"
        )
    out = torch.empty(num_requests, num_heads, value_dim, dtype=torch.float32, device=q.device)
    if num_requests:
        grid = (num_requests, num_heads, triton.cdiv(value_dim, BLOCK_V))
        step_kernel[grid](
            *(x.contiguous() for x in (q, k, v, g, beta)), state, slots.contiguous(), out, scale,
            num_heads, state.stride(0), K=key_dim, V=value_dim,
            BLOCK_K=triton.next_power_of_2(key_dim), BLOCK_V=BLOCK_V, num_warps=NUM_WARPS,
        )  # fmt: skip
    return out
