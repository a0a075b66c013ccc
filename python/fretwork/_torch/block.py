"""torch's rules for the block-sparse products, softmax and packing."""

from typing import Any

import torch
from torch import Tensor

from fretwork import _shapes
from fretwork._shapes import Shape, both, product_shape, size
from fretwork._torch.differentiable import DifferentiableOp
from fretwork._torch.private import alive, any_requires_grad, node_apply
from fretwork._torch.registration import cast_first, operand
from fretwork._torch.vmap import one_by_one, sample_shape
from fretwork.patterns import BlockLayout
from fretwork.patterns.block import block_layout

sdd_op, dsd_op, dds_op = DifferentiableOp("sdd"), DifferentiableOp("dsd"), DifferentiableOp("dds")
softmax_op, softmax_backward_op = DifferentiableOp("block_softmax"), DifferentiableOp("block_softmax_backward")
pack_op, unpack_op = DifferentiableOp("block_pack"), DifferentiableOp("block_unpack")

# Which tensor of y = op(a)·op(b) is packed, and what its callers call a and b.
_PACKED = {"sdd": "y", "dsd": "a", "dds": "b"}
_NAMES = {"sdd": ("a", "b"), "dsd": ("values", "b"), "dds": ("a", "values")}


def _batched(like: Tensor, *sizes: int) -> list[int]:
    return [like.shape[0], *sizes] if like.dim() == 4 else list(sizes)


def _rpe_shape(rpe: str, values: Tensor, layout: BlockLayout) -> list[int]:
    heads, rows, cols = layout.shape
    sizes = {"z": size(values.shape, -4), "h": heads, "m": rows, "n": cols, "1": 1}
    return [sizes[letter] for letter in rpe]


# The three products


def _register_product(call: DifferentiableOp) -> None:
    op = call.name

    def fake(a: Tensor, b: Tensor, key: str, trans_a: bool, trans_b: bool, _: str, sum_z: bool, sum_h: bool) -> Tensor:
        layout, (first, second) = block_layout(key), _NAMES[op]
        _shapes.check_product(op, operand(first, a), operand(second, b), layout, trans_a, trans_b, sum_h)
        return a.new_empty(product_shape(op, a.shape, b.shape, layout, trans_a, trans_b, sum_z, sum_h))

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, ctx.key, ctx.trans_a, ctx.trans_b, ctx.precision, _, _ = inputs
        ctx.a_shape, ctx.b_shape = a.shape, b.shape
        ctx.save_for_backward(a if ctx.needs_input_grad[1] else None, b if ctx.needs_input_grad[0] else None)

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        trans_a, trans_b = ctx.trans_a, ctx.trans_b
        d_a = d_b = None
        if ctx.needs_input_grad[0]:
            pair = ("b", b, trans_b, "y", gradient, True) if trans_a else ("y", gradient, False, "b", b, not trans_b)
            d_a = _gradient(ctx, "a", ctx.a_shape, *pair)
        if ctx.needs_input_grad[1]:
            pair = ("y", gradient, True, "a", a, trans_a) if trans_b else ("a", a, not trans_a, "y", gradient, False)
            d_b = _gradient(ctx, "b", ctx.b_shape, *pair)
        return d_a, d_b, None, None, None, None, None, None

    def _gradient(
        ctx: Any, of: str, shape: Shape, left: str, x: Tensor, trans_x: bool, right: str, y: Tensor, trans_y: bool
    ) -> Tensor:
        """A gradient is the product of the other two, one transposed; which op that is, the packed one decides."""
        packed = _PACKED[op]
        product = dsd_op if packed == left else dds_op if packed == right else sdd_op
        heads = block_layout(ctx.key).heads if packed == of else size(shape, -3)
        sum_z, sum_h = size(shape, -4) == 1, heads == 1
        result = product(x, y, ctx.key, trans_x, trans_y, ctx.precision, sum_z, sum_h)
        result = result.reshape(result.shape[-len(shape) :])
        # A sum's gradient is the same for every term.
        return result if result.shape == shape else result.expand(shape)

    def vmap(info: Any, in_dims: tuple[Any, ...], a: Tensor, b: Tensor, key: str, *rest: Any) -> tuple[Tensor, int]:
        trans_a, trans_b, precision, sum_z, sum_h = rest
        samples = [sample_shape(t, d) for t, d in zip((a, b), in_dims, strict=False)]
        z = both(size(samples[0], -4), size(samples[1], -4))
        folded = [_fold(t, d, info.batch_size, z) for t, d in zip((a, b), in_dims, strict=False)]
        result = call(*folded, key, trans_a, trans_b, precision, False, sum_h)
        if sum_z:
            result = result.reshape(info.batch_size, z, *result.shape[1:]).sum(1, keepdim=True)
        shape = product_shape(op, samples[0], samples[1], block_layout(key), trans_a, trans_b, sum_z, sum_h)
        return result.reshape(info.batch_size, *shape), 0

    call.register_fake(fake)
    call.register_gradient(backward, setup)
    call.register_vmap(vmap)
    call.register_autocast(cast_first(2))


def _fold(tensor: Tensor, dim: int | None, batch: int, z: int, always: bool = False) -> Tensor:
    """The mapped dimension folded into Z: (batch·z, ·, ·, ·), or Z = 1 for what is the same everywhere."""
    lead = tensor[None] if dim is None else tensor.movedim(dim, 0)
    lead = lead.reshape(lead.shape[0], *(1,) * (5 - lead.dim()), *lead.shape[1:])
    if dim is None and lead.shape[1] == 1 and not always:
        return lead[0]
    return lead.expand(batch, z, *lead.shape[2:]).reshape(batch * z, *lead.shape[2:])


for _op in (sdd_op, dsd_op, dds_op):
    _register_product(_op)


# A layer's product, x Wᵀ + bias, in one node


class BlockLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, bias: Tensor | None, key: str, precision: str) -> Tensor:
        ctx.how = key, precision
        needs_x, needs_values = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_values else None, values if needs_x else None)
        return _linear_forward(x, values, bias, key, precision)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (d,) = gradients
        x, values = ctx.saved_tensors
        needs_x, needs_values, needs_bias = ctx.needs_input_grad[:3]
        key, precision = ctx.how
        d_x = dds_op(d, values, key, False, False, precision, False, False) if needs_x else None
        d_values = sdd_op(d, x, key, True, False, precision, False, False) if needs_values else None
        return d_x, d_values, d.sum(0) if needs_bias else None, None, None


_apply_linear, _plain_dds = node_apply(BlockLinear), dds_op.plain


def _linear_forward(x: Tensor, values: Tensor, bias: Tensor | None, key: str, precision: str) -> Tensor:
    y: Tensor = _plain_dds(x, values, key, False, True, precision, False, False)
    return y if bias is None else y.add_(bias)


def linear(x: Tensor, values: Tensor, bias: Tensor | None, key: str, precision: str) -> Tensor:
    """x (rows, in), layout (out, in): what was `called_plainly`, with one dtype."""
    if torch.is_grad_enabled() and any_requires_grad(x, values, bias):
        return _apply_linear(alive(x), alive(values), None if bias is None else alive(bias), key, precision)  # type: ignore[no-any-return]
    return _linear_forward(x, values, bias, key, precision)


# Softmax


@softmax_op.register_fake
def _softmax_fake(
    values: Tensor,
    key: str,
    scale: float,
    rpe: Tensor | None,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    *modes: str,
) -> Tensor:
    given = {"rpe": rpe, "key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
    extras = [operand(name, tensor) for name, tensor in given.items() if tensor is not None]
    _shapes.check_softmax(operand("values", values), block_layout(key), extras, *modes)
    return values.new_empty(values.shape)


@softmax_backward_op.register_fake
def _softmax_backward_fake(
    out: Tensor, d_out: Tensor, key: str, scale: float, rpe: str, rpe_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    shape = [0] if rpe == "none" else _rpe_shape(rpe, out, block_layout(key))
    return out.new_empty(out.shape), out.new_empty(shape, dtype=rpe_dtype)


def _softmax_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.key, ctx.scale, rpe = inputs[:4]
    ctx.rpe = "none"
    ctx.rpe_shape, ctx.rpe_dtype = None, output.dtype
    if rpe is not None and ctx.needs_input_grad[3]:
        ctx.rpe_shape, ctx.rpe_dtype = rpe.shape, rpe.dtype
        # Softmax is shift-invariant: one number for a whole row has a gradient of zero, without a sum that rounds.
        if size(rpe.shape, -1) != 1:
            ctx.rpe = "".join(
                "1" if n == 1 else letter for n, letter in zip(rpe.shape, "zhmn"[4 - rpe.dim() :], strict=True)
            )
    ctx.save_for_backward(output)


def _softmax_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (out,) = ctx.saved_tensors
    d_values, d_rpe = softmax_backward_op(out, gradient, ctx.key, ctx.scale, ctx.rpe, ctx.rpe_dtype)
    rpe = None
    if ctx.rpe_shape is not None:
        rpe = gradient.new_zeros(ctx.rpe_shape, dtype=ctx.rpe_dtype) if ctx.rpe == "none" else d_rpe
    return d_values if ctx.needs_input_grad[0] else None, None, None, rpe, None, None, None, None


def _softmax_second(ctx: Any, *gradients: Tensor) -> None:
    raise NotImplementedError(
        "block_softmax: gradient: expected to be differentiated once, got a second time; "
        "for second derivatives apply torch.softmax to layout.unpack(values, fill=-inf)"
    )


def _softmax_vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
    values, key, scale, rpe, key_padding, attn, *modes = arguments
    dims = dict(zip(("values", "key", "scale", "rpe", "key_padding", "attn"), in_dims, strict=False))
    if info.batch_size == 0 and dims["attn"] is not None:  # then any mask will do
        attn = attn.new_zeros(sample_shape(attn, dims["attn"]))
    elif dims["attn"] is not None:  # an attention mask has no Z to fold into
        return one_by_one(softmax_op, info.batch_size, in_dims, arguments)
    batch, sample = info.batch_size, sample_shape(values, dims["values"])
    z = size(sample, -4)
    values = _fold(values, dims["values"], batch, z, always=True)
    if rpe is not None:
        rpe = _fold(rpe, dims["rpe"], batch, z)
    if key_padding is not None:
        lead = key_padding[None] if dims["key_padding"] is None else key_padding.movedim(dims["key_padding"], 0)
        key_padding = lead.expand(batch, *lead.shape[1:]).reshape(-1, lead.shape[-1])
    result = softmax_op(values, key, scale, rpe, key_padding, attn, *modes)
    return result.reshape(batch, *sample), 0


def _softmax_backward_vmap(
    info: Any,
    in_dims: tuple[Any, ...],
    out: Tensor,
    d_out: Tensor,
    key: str,
    scale: float,
    rpe: str,
    dtype: torch.dtype,
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    batch, sample = info.batch_size, sample_shape(out, in_dims[0])
    z = size(sample, -4)
    out, d_out = (_fold(t, d, batch, z, always=True) for t, d in zip((out, d_out), in_dims, strict=False))
    # The gradient of rpe is asked for with every Z, and summed here where rpe has none.
    asked = rpe if rpe == "none" else "z" + rpe[-3:].rjust(3, "1")
    d_values, d_rpe = softmax_backward_op(out, d_out, key, scale, asked, dtype)
    if rpe == "none":
        return (d_values.reshape(batch, *sample), d_rpe.new_empty(batch, 0)), (0, 0)
    d_rpe = d_rpe.reshape(batch, z, *d_rpe.shape[1:])
    if len(rpe) < 4 or rpe[0] == "1":
        d_rpe = d_rpe.sum(1, keepdim=True)
    d_rpe = d_rpe.reshape(batch, *d_rpe.shape[5 - len(rpe) :])
    return (d_values.reshape(batch, *sample), d_rpe), (0, 0)


softmax_op.register_gradient(_softmax_gradient, _softmax_setup)
softmax_backward_op.register_gradient(_softmax_second)
softmax_op.register_vmap(_softmax_vmap)
softmax_backward_op.register_vmap(_softmax_backward_vmap)


# Packing


@pack_op.register_fake
def _pack_fake(dense: Tensor, key: str) -> Tensor:
    layout = block_layout(key)
    _shapes.check_pack(operand("dense", dense), layout)
    return dense.new_empty(_batched(dense, *_shapes.packed_shape(layout)))


@unpack_op.register_fake
def _unpack_fake(values: Tensor, key: str, fill: float) -> Tensor:
    layout = block_layout(key)
    _shapes.check_unpack(operand("values", values), layout, fill)
    return values.new_empty(_batched(values, *layout.shape))


def _pack_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    dense, ctx.key = inputs
    ctx.shape = dense.shape


def _pack_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return unpack_op(gradient, ctx.key, 0.0).reshape(ctx.shape), None


def _unpack_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.key = inputs[1]


def _unpack_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return pack_op(gradient, ctx.key), None, None


def _pack_vmap(info: Any, in_dims: tuple[Any, ...], dense: Tensor, key: str) -> tuple[Tensor, int]:
    sample = sample_shape(dense, in_dims[0])
    result = pack_op(_fold(dense, in_dims[0], info.batch_size, size(sample, -4)), key)
    return result.reshape(info.batch_size, *sample[:-3], *result.shape[1:]), 0


def _unpack_vmap(info: Any, in_dims: tuple[Any, ...], values: Tensor, key: str, fill: float) -> tuple[Tensor, int]:
    sample = sample_shape(values, in_dims[0])
    result = unpack_op(_fold(values, in_dims[0], info.batch_size, size(sample, -4)), key, fill)
    return result.reshape(info.batch_size, *sample[:-3], *result.shape[1:]), 0


pack_op.register_gradient(_pack_gradient, _pack_setup)
unpack_op.register_gradient(_unpack_gradient, _unpack_setup)
pack_op.register_vmap(_pack_vmap)
unpack_op.register_vmap(_unpack_vmap)
