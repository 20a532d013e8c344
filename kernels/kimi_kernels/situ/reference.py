"""SiTU-GLU in plain torch."""

import torch
from torch import Tensor


def situ(gate: Tensor, up: Tensor, beta: float = 4.0, linear_beta: float = 25.0) -> Tensor:
    """beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta), computed in fp32.

    gate, up  [...]  same shape, any float dtype
    returns   [...]  gate's dtype, bounded by beta * linear_beta
    """
    if gate.dtype == torch.float64:
        a, b = gate, up
    else:
        a, b = gate.float(), up.float()
    out = beta * torch.tanh(a / beta) * torch.sigmoid(a) * (linear_beta * torch.tanh(b / linear_beta))
    return out.to(gate.dtype)
