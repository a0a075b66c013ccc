"""torch's rules for the block-sparse convolution.

y = S ∗ x ties three tensors, and each op gives one from the other two: the gradients of each op are the other two.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fretwork import _shapes
from fretwork._shapes import ConvGeometry
from fretwork._torch.differentiable import DifferentiableOp
from fretwork._torch.registration import cast_first, operand
from fretwork._torch.vmap import one_by_one
from fretwork.patterns.block import block_layout

conv_op = DifferentiableOp("block_conv2d")
backward_x_op, backward_values_op = (DifferentiableOp(f"block_conv2d_backward_{of}") for of in ("x", "values"))

Numbers = Sequence[int]


def _empty(like: Tensor, shape: Numbers, channels_last: bool) -> Tensor:
    if not channels_last:
        return like.new_empty(shape)
    n, c, h, w = shape
    return like.new_empty((n, h, w, c)).permute(0, 3, 1, 2)


def _geometry(kernel_size: Numbers, stride: Numbers, padding: Numbers, dilation: Numbers) -> ConvGeometry:
    return ConvGeometry(*(tuple(numbers) for numbers in (kernel_size, stride, padding, dilation)))  # type: ignore[arg-type]


@conv_op.register_fake
def _conv_fake(
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    key: str,
    kernel_size: Numbers,
    stride: Numbers,
    padding: Numbers,
    dilation: Numbers,
    precision: str,
    channels_last: bool,
) -> Tensor:
    given = [("x", x), ("values", values), *([] if bias is None else [("bias", bias)])]
    geometry = _geometry(kernel_size, stride, padding, dilation)
    shape = _shapes.check_conv2d([operand(*one) for one in given], block_layout(key), geometry)
    return _empty(x, shape, channels_last)


@backward_x_op.register_fake
def _backward_x_fake(d_out: Tensor, values: Tensor, key: str, *rest: Any) -> Tensor:
    *_, height, width, channels_last = rest
    return _empty(d_out, (d_out.shape[0], block_layout(key).shape[2], height, width), channels_last)


@backward_values_op.register_fake
def _backward_values_fake(x: Tensor, d_out: Tensor, key: str, *rest: Any) -> Tensor:
    return x.new_empty(_shapes.packed_shape(block_layout(key)))


# Gradients. ctx.call has what all three ops take behind their tensors.


def _conv_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, values, _, *ctx.call, ctx.channels_last = inputs
    ctx.size = x.shape[2:]
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, values if ctx.needs_input_grad[0] else None)


def _conv_gradient(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    x, values = ctx.saved_tensors
    d_bias = _sum_of_pixels(d_out) if ctx.needs_input_grad[2] else None
    if 0 in d_out.stride():  # one number for many, as a mean's gradient is: the fast kernels read rows
        d_out = d_out.contiguous(memory_format=torch.channels_last if ctx.channels_last else torch.contiguous_format)
    d_x = backward_x_op(d_out, values, *ctx.call, *ctx.size, ctx.channels_last) if ctx.needs_input_grad[0] else None
    d_values = backward_values_op(x, d_out, *ctx.call) if ctx.needs_input_grad[1] else None
    return d_x, d_values, d_bias, *(None,) * 7


def _sum_of_pixels(d_out: Tensor) -> Tensor:
    """In float32, also over many pixels of 16 bits."""
    wide = torch.promote_types(d_out.dtype, torch.float32)
    return d_out.sum((0, 2, 3), dtype=wide).to(d_out.dtype)


def _backward_x_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    d_out, values, *ctx.call, _, _, ctx.channels_last = inputs
    ctx.save_for_backward(d_out if ctx.needs_input_grad[1] else None, values if ctx.needs_input_grad[0] else None)


def _backward_x_gradient(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    d_out, values = ctx.saved_tensors
    d_d_out = conv_op(g, values, None, *ctx.call, ctx.channels_last) if ctx.needs_input_grad[0] else None
    d_values = backward_values_op(g, d_out, *ctx.call) if ctx.needs_input_grad[1] else None
    return d_d_out, d_values, *(None,) * 9


def _backward_values_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, d_out, *ctx.call = inputs
    ctx.size, ctx.formats = x.shape[2:], [_shapes.channels_last(t.shape, t.stride()) for t in (x, d_out)]
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, d_out if ctx.needs_input_grad[0] else None)


def _backward_values_gradient(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, d_out = ctx.saved_tensors
    d_x = backward_x_op(d_out, g, *ctx.call, *ctx.size, ctx.formats[0]) if ctx.needs_input_grad[0] else None
    d_d_out = conv_op(x, g, None, *ctx.call, ctx.formats[1]) if ctx.needs_input_grad[1] else None
    return d_x, d_d_out, *(None,) * 6


conv_op.register_gradient(_conv_gradient, _conv_setup)
backward_x_op.register_gradient(_backward_x_gradient, _backward_x_setup)
backward_values_op.register_gradient(_backward_values_gradient, _backward_values_setup)


# vmap: images that are mapped become part of N; values that are mapped take a call each.


def _register_vmap(call: DifferentiableOp, tensors: int, folds: bool) -> None:
    """`folds` where only the first of the tensors, which is images, needs to be mapped."""

    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
        first, rest = arguments[:tensors], arguments[tensors:]
        dims, size = in_dims[:tensors], info.batch_size
        if folds and dims[0] is not None and all(d is None for d in dims[1:]):
            images = first[0].movedim(dims[0], 0)
            if images.dim() == 5:
                result = call(images.reshape(-1, *images.shape[2:]), *first[1:], *rest)
                return result.reshape(*images.shape[:2], *result.shape[1:]), 0
        return one_by_one(lambda *one: call(*one, *rest), size, dims, first)

    call.register_vmap(vmap)


_register_vmap(conv_op, 3, folds=True)
_register_vmap(backward_x_op, 2, folds=True)
_register_vmap(backward_values_op, 2, folds=False)

conv_op.register_autocast(cast_first(3))
