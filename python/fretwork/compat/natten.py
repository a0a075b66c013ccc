"""NATTEN's functions on (batch, *grid, heads, dim): `from fretwork.compat.natten import na1d, na2d, na3d`.

Each is `fw.attention` over `fw.patterns.neighborhood` of the grid, on a CPU or a GPU, in every floating type, with
gradients. Key and value heads may be fewer than query heads, which then share them in groups.
"""

import re
from typing import Any

from torch import Tensor

from fretwork._torch.arguments import check_tensor
from fretwork.attention import attention
from fretwork.patterns import Pattern, neighborhood

__all__ = ["na1d", "na2d", "na3d"]

PerAxis = int | tuple[int, ...]
Flags = bool | tuple[bool, ...]


def na1d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: PerAxis,
    stride: PerAxis = 1,
    dilation: PerAxis = 1,
    is_causal: Flags = False,
    scale: float | None = None,
) -> Tensor:
    """Neighbourhood attention on (batch, length, heads, dim).

    >>> import torch
    >>> q, k, v = (torch.randn(1, 64, 2, 16) for _ in range(3))
    >>> na1d(q, k, v, kernel_size=7, dilation=2, is_causal=True).shape
    torch.Size([1, 64, 2, 16])
    """
    return _attention("na1d", 1, query, key, value, kernel_size, stride, dilation, is_causal, scale)


def na2d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: PerAxis,
    stride: PerAxis = 1,
    dilation: PerAxis = 1,
    is_causal: Flags = False,
    scale: float | None = None,
) -> Tensor:
    """Neighbourhood attention on (batch, height, width, heads, dim).

    >>> import torch
    >>> q, k, v = (torch.randn(1, 12, 16, 2, 16) for _ in range(3))
    >>> na2d(q, k, v, kernel_size=(3, 5), stride=(1, 2)).shape
    torch.Size([1, 12, 16, 2, 16])
    """
    return _attention("na2d", 2, query, key, value, kernel_size, stride, dilation, is_causal, scale)


def na3d(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: PerAxis,
    stride: PerAxis = 1,
    dilation: PerAxis = 1,
    is_causal: Flags = False,
    scale: float | None = None,
) -> Tensor:
    """Neighbourhood attention on (batch, depth, height, width, heads, dim).

    >>> import torch
    >>> q, k, v = (torch.randn(1, 4, 6, 8, 2, 16) for _ in range(3))
    >>> na3d(q, k, v, kernel_size=3, is_causal=(True, False, False)).shape
    torch.Size([1, 4, 6, 8, 2, 16])
    """
    return _attention("na3d", 3, query, key, value, kernel_size, stride, dilation, is_causal, scale)


def _attention(
    op: str,
    axes: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: PerAxis,
    stride: PerAxis,
    dilation: PerAxis,
    is_causal: Flags,
    scale: float | None,
) -> Tensor:
    check_tensor(op, "query", query)
    if query.dim() != axes + 3:
        form = {1: "length", 2: "height, width", 3: "depth, height, width"}[axes]
        raise RuntimeError(f"{op}: query: expected (batch, {form}, heads, dim), got {tuple(query.shape)}")
    grid = tuple(query.shape[1:-2])
    for name, tensor in (("key", key), ("value", value)):
        check_tensor(op, name, tensor)
        if tensor.dim() != query.dim() or tuple(tensor.shape[1:-2]) != grid:
            raise RuntimeError(f"{op}: {name}: expected the grid {grid} of query, got {tuple(tensor.shape)}")
    pattern = _pattern(op, grid, kernel_size, stride, dilation, is_causal)
    q, k, v = (t.flatten(1, -3).transpose(1, 2) for t in (query, key, value))
    return attention(q, k, v, pattern, scale).transpose(1, 2).contiguous().unflatten(1, grid)


_NAMES = {"window": "kernel_size", "causal": "is_causal"}


def _pattern(op: str, grid: tuple[int, ...], window: Any, stride: Any, dilation: Any, causal: Any) -> Pattern:
    """The neighbourhood, whose errors are said in NATTEN's words."""
    try:
        return neighborhood(grid, window, dilation, causal, stride)
    except (TypeError, ValueError) as error:
        _, argument, rest = str(error).split(": ", 2)
        for ours, theirs in _NAMES.items():
            rest = re.sub(rf"\b{ours}\b", theirs, rest)
        raise type(error)(f"{op}: {_NAMES.get(argument, argument)}: {rest}") from None
