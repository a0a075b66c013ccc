"""The gradients of the activations that products end with."""

from collections.abc import Callable

import torch
from torch import Tensor

_aten = torch.ops.aten


def before_activation(activation: str, d_out: Tensor, out: Tensor, sums: Callable[[], Tensor]) -> Tensor:
    """The gradient of the sums that the activation was applied to; `out` is saved where it says enough."""
    if activation == "none":
        return d_out
    if activation == "relu":
        return _aten.threshold_backward(d_out, out, 0)
    if activation == "gelu" and d_out.is_cpu:
        d_out = d_out.contiguous()  # oneDNN refuses rows that overlap
    return (_aten.gelu_backward if activation == "gelu" else _silu_backward)(d_out, sums())


def _silu_backward(d_out: Tensor, sums: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return _aten.silu_backward(d_out, sums)
    slope = sums.sigmoid()  # torch's own has no derivative
    return d_out * slope * (1 + sums * (1 - slope))
