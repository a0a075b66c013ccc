"""torch's rules for SPLAT's operators.

x[i, t] = a[i] · b[column] ties three tensors, and each product gives one from the other two: the gradients of each are
the other two.
"""

from typing import Any

import torch
from torch import Tensor

from fretwork import _shapes
from fretwork._torch.differentiable import DifferentiableOp
from fretwork._torch.registration import cast_first, operand
from fretwork._torch.vmap import mapped, sample_shape
from fretwork.patterns import Pattern

r_sddmm_op, r_spmm_op = DifferentiableOp("r_sddmm"), DifferentiableOp("r_spmm")
r_spmm_transposed_op = DifferentiableOp("r_spmm_transposed")
r_softmax_op, r_softmax_backward_op = DifferentiableOp("r_softmax"), DifferentiableOp("r_softmax_backward")


@r_sddmm_op.register_fake
def _r_sddmm_fake(q: Tensor, k: Tensor, key: str) -> Tensor:
    pattern = Pattern.parse(key)
    width = _shapes.check_r_sddmm(operand("q", q), operand("k", k), pattern)
    return q.new_empty((*q.shape[:3], width))


@r_spmm_op.register_fake
def _r_spmm_fake(x: Tensor, v: Tensor, key: str) -> Tensor:
    _shapes.check_r_spmm(operand("x", x), operand("v", v), Pattern.parse(key))
    return x.new_empty((*x.shape[:3], v.shape[3]))


@r_spmm_transposed_op.register_fake
def _r_spmm_transposed_fake(x: Tensor, y: Tensor, key: str, heads: int) -> Tensor:
    return y.new_empty((y.shape[0], heads, Pattern.parse(key).shape[-1], y.shape[3]))


@r_softmax_op.register_fake
def _r_softmax_fake(x: Tensor, key: str, scale: float) -> Tensor:
    _shapes.check_r_softmax(operand("x", x), Pattern.parse(key))
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@r_softmax_backward_op.register_fake
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
    raise NotImplementedError(
        "r_softmax: gradient: expected to be differentiated once, got a second time; "
        "for second derivatives apply torch.softmax to x with -inf where pattern.columns() is -1"
    )


def _register_folding(call: DifferentiableOp, tensors: int) -> None:
    """vmap: the mapped dimension of the first `tensors` arguments becomes part of the batch."""

    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
        given = list(zip(arguments[:tensors], in_dims, strict=False))
        folded = [mapped(t, d, info.batch_size) for t, d in given]
        result = call(*folded, *arguments[tensors:])
        return result.unflatten(0, (info.batch_size, sample_shape(*given[0])[0])), 0

    call.register_vmap(vmap)


r_sddmm_op.register_gradient(_r_sddmm_gradient, _product_setup)
r_spmm_op.register_gradient(_r_spmm_gradient, _product_setup)
r_spmm_transposed_op.register_gradient(_r_spmm_transposed_gradient, _product_setup)
r_softmax_op.register_gradient(_r_softmax_gradient, _r_softmax_setup)
r_softmax_backward_op.register_gradient(_r_softmax_second)
for _op in (r_sddmm_op, r_spmm_op, r_spmm_transposed_op, r_softmax_backward_op):
    _register_folding(_op, 2)
_register_folding(r_softmax_op, 1)
for _op in (r_sddmm_op, r_spmm_op, r_spmm_transposed_op):
    _op.register_autocast(cast_first(2))
