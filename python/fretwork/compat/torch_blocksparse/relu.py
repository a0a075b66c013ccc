"""ReLU of a scaled, shifted sum."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


def relu(x: Tensor, scale: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """relu(x · scale + bias + residual), with gradients to all four."""
    return F.relu(x * scale + bias + residual)


class ReLU(nn.Module):
    """relu(x · scale + bias + residual); scale and bias have one element.

    >>> import torch
    >>> one = torch.ones(1)
    >>> ReLU()(torch.tensor([-3.0, 2.0]), 2 * one, one, torch.tensor([1.0, 1.0])).tolist()
    [0.0, 6.0]
    """

    def forward(self, x: Tensor, scale: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return relu(x, scale, bias, residual)
