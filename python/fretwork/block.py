"""Block-sparse products, softmax and packing on torch tensors. Shapes, errors and arithmetic are the core's business.

Reverse mode through autograd; `torch.func.grad` and forward mode (jvp) raise, see docs/block-sparsity.md.
"""

import torch
from torch import Tensor

from fretwork._torch.arguments import as_number, check_tensor, layout_key, precision_name, transposes
from fretwork._torch.block import dds_op, dsd_op, pack_op, sdd_op, softmax_op, unpack_op
from fretwork.patterns import BlockLayout

__all__ = ["block_softmax", "dds", "dsd", "pack", "sdd", "unpack"]


def sdd(
    a: Tensor,
    b: Tensor,
    layout: BlockLayout,
    trans_a: bool = False,
    trans_b: bool = False,
    *,
    precision: str | None = None,
) -> Tensor:
    """Sparse = op(a)·op(b) at the blocks of `layout`; gives packed values ((Z,) nnz, rows, cols).

    a and b are dense (Z, H, ·, ·); leading dimensions may be missing, and a Z or H of 1 broadcasts. `precision` is how
    fp32 is multiplied on a GPU: "ieee", "tf32", "tf32x3", or None to follow `torch.get_float32_matmul_precision()`.

    >>> import torch, fretwork as fw
    >>> layout = fw.BlockLayout([[1, 0], [0, 1]], block=16)
    >>> fw.sdd(torch.ones(32, 5), torch.ones(5, 32), layout).shape
    torch.Size([2, 16, 16])
    """
    check_tensor("sdd", "a", a)
    check_tensor("sdd", "b", b)
    key, precision = layout_key("sdd", layout), precision_name("sdd", precision)
    return sdd_op(a, b, key, *transposes("sdd", trans_a, trans_b), precision, False, False)


def dsd(
    values: Tensor,
    b: Tensor,
    layout: BlockLayout,
    trans_a: bool = False,
    trans_b: bool = False,
    *,
    precision: str | None = None,
) -> Tensor:
    """Dense = op(sparse)·op(b); `values` are packed in `layout`, the layout of the sparse operand as stored.

    >>> import torch, fretwork as fw
    >>> layout = fw.BlockLayout([[1, 0], [1, 1]], block=16)
    >>> fw.dsd(torch.ones(3, 16, 16), torch.ones(32, 7), layout, trans_a=True)[:, 0].unique().tolist()
    [16.0, 32.0]
    """
    check_tensor("dsd", "values", values)
    check_tensor("dsd", "b", b)
    key, precision = layout_key("dsd", layout), precision_name("dsd", precision)
    return dsd_op(values, b, key, *transposes("dsd", trans_a, trans_b), precision, False, False)


def dds(
    a: Tensor,
    values: Tensor,
    layout: BlockLayout,
    trans_a: bool = False,
    trans_b: bool = False,
    *,
    precision: str | None = None,
) -> Tensor:
    """Dense = op(a)·op(sparse); `values` are packed in `layout`, the layout of the sparse operand as stored.

    >>> import torch, fretwork as fw
    >>> layout = fw.BlockLayout([[[1, 0]], [[1, 1]]], block=16)
    >>> fw.dds(torch.ones(2, 7, 16), torch.ones(3, 16, 16), layout).shape
    torch.Size([2, 7, 32])
    """
    check_tensor("dds", "a", a)
    check_tensor("dds", "values", values)
    key, precision = layout_key("dds", layout), precision_name("dds", precision)
    return dds_op(a, values, key, *transposes("dds", trans_a, trans_b), precision, False, False)


def block_softmax(
    values: Tensor,
    layout: BlockLayout,
    scale: float = 1.0,
    rpe: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    key_padding_mask_mode: str = "add",
    attn_mask_mode: str = "add",
) -> Tensor:
    """Softmax of values·scale + rpe + masks over the stored entries of each row; a row with nothing left gives zeros.

    `rpe` broadcasts to (Z, H, M, N), `key_padding_mask` is (Z, N), `attn_mask` (M, N) or (H, M, N). Mode "add" adds the
    mask (floating), "mul" turns its zeros (or False) into −inf and leaves the rest. Gradients go to values and rpe, not
    to the masks: one that is added and requires grad is refused.

    >>> import torch, fretwork as fw
    >>> layout = fw.BlockLayout([[1, 0, 1]], block=8)
    >>> fw.block_softmax(torch.zeros(2, 8, 8), layout).unique().tolist()
    [0.0625]
    """
    check_tensor("block_softmax", "values", values)
    for name, extra in (("rpe", rpe), ("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
        if extra is not None:
            check_tensor("block_softmax", name, extra)
    key = layout_key("block_softmax", layout)
    if key_padding_mask_mode == "mul":
        key_padding_mask = as_bool_mask(key_padding_mask)
    if attn_mask_mode == "mul":
        attn_mask = as_bool_mask(attn_mask)
    masks = {"key_padding_mask": (key_padding_mask, key_padding_mask_mode), "attn_mask": (attn_mask, attn_mask_mode)}
    for name, (mask, mode) in masks.items():
        if mode not in ("add", "mul"):
            raise RuntimeError(f'block_softmax: {name}_mode: expected "add" or "mul", got {mode!r}')
        if mask is not None and mode == "add" and mask.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"block_softmax: {name}: expected a mask without a gradient, got one that requires grad; "
                "add what learns to rpe, or detach it"
            )
    scale = as_number("block_softmax", "scale", scale)
    return softmax_op(values, key, scale, rpe, key_padding_mask, attn_mask, key_padding_mask_mode, attn_mask_mode)


def as_bool_mask(mask: Tensor | None) -> Tensor | None:
    """A "mul" mask of integers, as tokenizers give them, is one of bool: where it is not zero."""
    if mask is None or mask.is_floating_point() or mask.is_complex() or mask.dtype == torch.bool:
        return mask
    return mask != 0


def pack(dense: Tensor, layout: BlockLayout) -> Tensor:
    """See `BlockLayout.pack`."""
    check_tensor("pack", "dense", dense)
    return pack_op(dense, layout_key("pack", layout))


def unpack(values: Tensor, layout: BlockLayout, fill: float = 0.0) -> Tensor:
    """See `BlockLayout.unpack`."""
    check_tensor("unpack", "values", values)
    return unpack_op(values, layout_key("unpack", layout), as_number("unpack", "fill", fill))
