"""The block-sparse ops on torch tensors. A thin door: shapes, errors and arithmetic are the core's business.

Reverse mode through autograd; `torch.func.grad` and forward mode (jvp) raise, see docs/block-sparsity.md.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fretwork import _rules as _rules  # loads the library and registers gradients, fakes, vmap and autocast
from fretwork.pattern import BlockLayout

_ops = torch.ops.fretwork
_sdd, _dsd, _dds = _ops.sdd.default, _ops.dsd.default, _ops.dds.default
_softmax, _pack, _unpack = _ops.block_softmax.default, _ops.block_pack.default, _ops.block_unpack.default

# What torch.set_float32_matmul_precision asks for, as the GPU has it.
_PRECISION_OF_TORCH = {"highest": "ieee", "high": "tf32", "medium": "tf32"}


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
    _check_tensor("sdd", "a", a)
    _check_tensor("sdd", "b", b)
    return _sdd(a, b, _key("sdd", layout), bool(trans_a), bool(trans_b), _precision("sdd", precision), False, False)


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
    _check_tensor("dsd", "values", values)
    _check_tensor("dsd", "b", b)
    return _dsd(
        values, b, _key("dsd", layout), bool(trans_a), bool(trans_b), _precision("dsd", precision), False, False
    )


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
    _check_tensor("dds", "a", a)
    _check_tensor("dds", "values", values)
    return _dds(
        a, values, _key("dds", layout), bool(trans_a), bool(trans_b), _precision("dds", precision), False, False
    )


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
    mask (numbers), "mul" turns its zeros (or False) into −inf and leaves the rest. Gradients go to values and rpe, not
    to the masks.

    >>> import torch, fretwork as fw
    >>> layout = fw.BlockLayout([[1, 0, 1]], block=8)
    >>> fw.block_softmax(torch.zeros(2, 8, 8), layout).unique().tolist()
    [0.0625]
    """
    _check_tensor("block_softmax", "values", values)
    for name, extra in (("rpe", rpe), ("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
        if extra is not None:
            _check_tensor("block_softmax", name, extra)
    key = _key("block_softmax", layout)
    for name, mode in (("key_padding_mask_mode", key_padding_mask_mode), ("attn_mask_mode", attn_mask_mode)):
        if mode not in ("add", "mul"):
            raise RuntimeError(f'block_softmax: {name}: expected "add" or "mul", got {mode!r}')
    scale = _number("block_softmax", "scale", scale)
    return _softmax(values, key, scale, rpe, key_padding_mask, attn_mask, key_padding_mask_mode, attn_mask_mode)


def pack(dense: Tensor, layout: BlockLayout) -> Tensor:
    """See `BlockLayout.pack`."""
    _check_tensor("pack", "dense", dense)
    return _pack(dense, _key("pack", layout))


def unpack(values: Tensor, layout: BlockLayout, fill: float = 0.0) -> Tensor:
    """See `BlockLayout.unpack`."""
    _check_tensor("unpack", "values", values)
    return _unpack(values, _key("unpack", layout), _number("unpack", "fill", fill))


def _check_tensor(op: str, argument: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {argument}: expected a torch.Tensor, got {type(value).__name__}")
    # Torch would drop a tangent without a word.
    if (
        not torch.compiler.is_compiling()
        and forward_ad._current_level >= 0
        and forward_ad.unpack_dual(value).tangent is not None
    ):
        raise NotImplementedError(
            f"{op}: {argument}: expected a tensor without a tangent, got one of forward mode; use torch.autograd.grad"
        )


def _key(op: str, layout: object) -> str:
    """What stands for the layout inside an op; a graph that may be saved gets the whole text."""
    if not isinstance(layout, BlockLayout):
        raise TypeError(f"{op}: layout: expected a fretwork.BlockLayout, got {type(layout).__name__}")
    return layout._text if torch.compiler.is_exporting() else layout._key


def _precision(op: str, name: object) -> str:
    if name is None:
        return _precision_of_torch()
    if name not in ("ieee", "tf32", "tf32x3"):
        raise RuntimeError(f"{op}: precision: expected None, ieee, tf32 or tf32x3, got {name!r}")
    return str(name)


@torch.compiler.assume_constant_result  # a compiled graph is guarded on torch's setting anyway
def _precision_of_torch() -> str:
    try:
        return _PRECISION_OF_TORCH[torch.get_float32_matmul_precision()]
    except RuntimeError:  # the user has set torch.backends.cuda.matmul.fp32_precision, and torch answers one way only
        return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _number(op: str, argument: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{op}: {argument}: expected a number, got {type(value).__name__}") from None
