"""What the vmap rules of the families share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def sample_shape(tensor: Tensor, dim: int | None) -> list[int]:
    """The shape that one element of a vmap sees."""
    return [n for d, n in enumerate(tensor.shape) if d != dim]


def one_by_one(call: Callable[..., Any], size: int, in_dims: Any, arguments: Any) -> tuple[Any, Any]:
    """A call for each of `size` elements; where there are none, a call of zeros shows the shapes.

    What is no tensor is not mapped; of a list of numbers, `in_dims` has a list.
    """

    def element(a: Tensor, d: int, n: int) -> Tensor:
        return a.select(d, n) if size else a.new_zeros(sample_shape(a, d))

    results = [
        call(*(element(a, d, n) if isinstance(d, int) else a for a, d in zip(arguments, in_dims, strict=True)))
        for n in range(max(size, 1))
    ]
    if isinstance(results[0], Tensor):
        return torch.stack(results)[:size], 0
    stacked = tuple(torch.stack(each)[:size] for each in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


def mapped(tensor: Tensor, dim: int | None, size: int, to: int = 0) -> Tensor:
    """With the mapped dimension at `to`, merged with the next, such as the batch."""
    if dim is None:
        tensor = tensor.unsqueeze(to)
        return tensor.expand(*tensor.shape[:to], size, *tensor.shape[to + 1 :]).flatten(to, to + 1)
    return tensor.movedim(dim, to).flatten(to, to + 1)


def split(tensor: Tensor, size: int, dim: int) -> Tensor:
    """The inverse of `mapped`."""
    return tensor.reshape(*tensor.shape[:dim], size, tensor.shape[dim] // size, *tensor.shape[dim + 1 :])


def mapped_over_none(op: Callable[..., Tensor], *inputs: tuple[Tensor | None, int | None]) -> tuple[Tensor, int]:
    """What a map of no elements gives: nothing, of the shape that one element would have, and gradients of zero."""
    one = [t if dim is None or t is None else t.new_zeros(t.movedim(dim, 0).shape[1:]) for t, dim in inputs]
    y = op(*one)
    return y.new_empty(0, *y.shape) + sum(t.sum() for t, _ in inputs if t is not None), 0
