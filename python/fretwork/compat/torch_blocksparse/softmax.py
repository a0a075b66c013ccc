"""Softmax over the stored blocks of a row, in place."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from fretwork.block import block_softmax
from fretwork.compat.torch_blocksparse._timing import timed
from fretwork.patterns import BlockLayout


class Softmax:
    """`Softmax(layout, block)(x, …)` over the non-zero blocks of each row; the result is written into x.

    Autograd knows of that. A leaf that requires a gradient and a view that holds an element more than once cannot be
    written: there the result is a new tensor. So take what is returned, and give a copy of x where x is needed later,
    or use `fw.block_softmax`, which never writes its input. With `bench`, `time_y` is the last call's time in
    nanoseconds.

    >>> import torch
    >>> Softmax(torch.ones(1, 1, 2, dtype=torch.int64), 16)(torch.zeros(1, 2, 16, 16)).unique().item()
    0.03125
    """

    time_y: float | None

    def __init__(self, layout: Tensor, block: int, bench: bool = False) -> None:
        self.block_layout = BlockLayout(layout, block)
        self.layout, self.block, self.spdims, self.bench = layout, block, layout.shape, bench
        self.time_y = None

    def __call__(
        self,
        x: Tensor,
        scale: float = 1.0,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "add",
    ) -> Tensor:
        return _written(
            x, self.apart(x, scale, rpe, key_padding_mask, attn_mask, key_padding_mask_mode, attn_mask_mode)
        )

    def apart(
        self,
        x: Tensor,
        scale: float = 1.0,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "add",
    ) -> Tensor:
        """The same as a new tensor."""
        padding, mask = _mask(key_padding_mask, key_padding_mask_mode), _mask(attn_mask, attn_mask_mode)
        modes = key_padding_mask_mode, attn_mask_mode
        y, self.time_y = timed(
            lambda: block_softmax(x, self.block_layout, scale, rpe, padding, mask, *modes), self.bench, x.device
        )
        return y


SparseSoftmax = Softmax


def _mask(mask: Tensor | None, mode: str) -> Tensor | None:
    """Integer masks, which were common: what counts in "mul" is where they are zero; "add" wants numbers, which stay
    finite."""
    if mask is None or mask.is_floating_point() or mask.dtype == torch.bool:
        return mask
    return mask != 0 if mode == "mul" else mask.float()


def _written(x: Tensor, y: Tensor) -> Tensor:
    """y in x's memory, or y where x cannot be written."""
    base = x._base if x._base is not None else x
    kept = torch.is_grad_enabled() and base.requires_grad and base.is_leaf
    overlapping = any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True))
    if kept or overlapping:
        return y
    if x.retains_grad:  # x.grad stays the gradient of what x was, as its owner asked
        owner = weakref.ref(x)

        def keep(gradient: Tensor) -> None:
            if (tensor := owner()) is not None:
                tensor.grad = gradient

        x.register_hook(keep)
    return x.copy_(y)
