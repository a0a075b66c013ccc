"""torch's rules for SPLAT's operators.

x[i, t] = a[i] · b[column] ties three tensors, and each product gives one from the other two: the gradients of each are
the other two.
"""

from typing import Any

import torch
from torch import Tensor

from fretwork import _shapes
from fretwork._torch.registration import autocast_operands, operand, ops
from fretwork._torch.vmap import mapped, sample_shape
from fretwork.patterns import Pattern

r_sddmm_op, r_spmm_op, r_spmm_transposed_op = ops.r_sddmm.default, ops.r_spmm.default, ops.r_spmm_transposed.default
r_softmax_op, r_softmax_backward_op = ops.r_softmax.default, ops.r_softmax_backward.default


@torch.library.register_fake("fretwork::r_sddmm")
def _r_sddmm_fake(q: Tensor, k: Tensor, key: str) -> Tensor:
    pattern = Pattern.parse(key)
    width = _shapes.check_r_sddmm(operand("q", q), operand("k", k), pattern)
    return q.new_empty((*q.shape[:3], width))


@torch.library.register_fake("fretwork::r_spmm")
def _r_spmm_fake(x: Tensor, v: Tensor, key: str) -> Tensor:
    _shapes.check_r_spmm(operand("x", x), operand("v", v), Pattern.parse(key))
    return x.new_empty((*x.shape[:3], v.shape[3]))


@torch.library.register_fake("fretwork::r_spmm_transposed")
def _r_spmm_transposed_fake(x: Tensor, y: Tensor, key: str, heads: int) -> Tensor:
    return y.new_empty((y.shape[0], heads, Pattern.parse(key).shape[-1], y.shape[3]))


@torch.library.register_fake("fretwork::r_softmax")
def _r_softmax_fake(x: Tensor, key: str, scale: float) -> Tensor:
    _shapes.check_r_softmax(operand("x", x), Pattern.parse(key))
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("fretwork::r_softmax_backward")
def _r_softmax_backward_fake(out: Tensor, d_out: Tensor, key: str, scale: float) -> Tensor:
    return torch.empty_like(out, memory_format=torch.contiguous_format)


def _product_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, ctx.key = inputs[:3]
    ctx.heads = b.shape[1]
    needs_a, needs_b = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if needs_b else None, b if needs_a else None)


def _rows(d: Tensor) -> Tensor:
    """A gradient whose rows are side by side, which a sum's is not: the fast kernels read rows."""
    return d if d.stride(-1) == 1 and 0 not in d.stride() else d.contiguous()


def _r_sddmm_gradient(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
    q, k = ctx.saved_tensors
    d = _rows(d)
    d_q = r_spmm_op(d, k, ctx.key) if ctx.needs_input_grad[0] else None
    return d_q, r_spmm_transposed_op(d, q, ctx.key, ctx.heads) if ctx.needs_input_grad[1] else None, None


def _r_spmm_gradient(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
    x, v = ctx.saved_tensors
    d = _rows(d)
    d_x = r_sddmm_op(d, v, ctx.key) if ctx.needs_input_grad[0] else None
    return d_x, r_spmm_transposed_op(x, d, ctx.key, ctx.heads) if ctx.needs_input_grad[1] else None, None


def _r_spmm_transposed_gradient(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
    x, y = ctx.saved_tensors
    d = _rows(d)
    d_x = r_sddmm_op(y, d, ctx.key) if ctx.needs_input_grad[0] else None
    return d_x, r_spmm_op(x, d, ctx.key) if ctx.needs_input_grad[1] else None, None, None


def _r_softmax_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.key, ctx.scale = inputs
    ctx.save_for_backward(output)


def _r_softmax_gradient(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
    (out,) = ctx.saved_tensors
    return r_softmax_backward_op(out, _rows(d), ctx.key, ctx.scale), None, None


def _r_softmax_second(ctx: Any, *gradients: Tensor) -> None:
    raise NotImplementedError("r_softmax: gradient: expected to be differentiated once, got a second time")


def _register_folding(op: str, tensors: int) -> None:
    """vmap: the mapped dimension of the first `tensors` arguments becomes part of the batch."""
    call = getattr(ops, op).default

    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
        given = list(zip(arguments[:tensors], in_dims, strict=False))
        folded = [mapped(t, d, info.batch_size) for t, d in given]
        result = call(*folded, *arguments[tensors:])
        return result.unflatten(0, (info.batch_size, sample_shape(*given[0])[0])), 0

    torch.library.register_vmap(f"fretwork::{op}", vmap)


torch.library.register_autograd("fretwork::r_sddmm", _r_sddmm_gradient, setup_context=_product_setup)
torch.library.register_autograd("fretwork::r_spmm", _r_spmm_gradient, setup_context=_product_setup)
torch.library.register_autograd(
    "fretwork::r_spmm_transposed", _r_spmm_transposed_gradient, setup_context=_product_setup
)
torch.library.register_autograd("fretwork::r_softmax", _r_softmax_gradient, setup_context=_r_softmax_setup)
torch.library.register_autograd("fretwork::r_softmax_backward", _r_softmax_second)
for _op in ("r_sddmm", "r_spmm", "r_spmm_transposed", "r_softmax_backward"):
    _register_folding(_op, 2)
_register_folding("r_softmax", 1)
for _op in ("r_sddmm", "r_spmm", "r_spmm_transposed"):
    autocast_operands(_op, 2)
