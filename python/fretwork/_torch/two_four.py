"""torch's rules for the 2:4 operators."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from fretwork._checks import expect
from fretwork._torch.activation import before_activation
from fretwork._torch.arguments import FLOATING
from fretwork._torch.differentiable import DifferentiableOp, called_plainly
from fretwork._torch.private import alive, any_requires_grad, bare, in_autocast, node_apply
from fretwork._torch.registration import ops
from fretwork._torch.vmap import one_by_one

check_op, canonical_op = ops.two_four_check.default, ops.two_four_canonical.default
compress_op, to_dense_op, gather_op, prune_op, prune_both_op, matmul_op = (
    DifferentiableOp(f"two_four_{name}") for name in ("compress", "to_dense", "gather", "prune", "prune_both", "matmul")
)

SMALL = (torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.int8, torch.uint8)
KINDS = (*FLOATING, *SMALL, *INTEGERS)
_WORDS = (torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32)
WORDS_TEXT = "int8, int16, int32 or the unsigned types of these sizes"


def group_of(dtype: torch.dtype) -> int:
    """Neighbours in a group."""
    return 2 if dtype == torch.float32 else 4


def words_of(k: int, dtype: torch.dtype, word: torch.dtype) -> int:
    """Words for k elements."""
    return -(-(k // group_of(dtype)) // (2 * word.itemsize))


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of a product, where none is asked for."""
    return torch.int32 if dtype in INTEGERS else torch.bfloat16 if dtype in SMALL else dtype


def bias_dtypes(out: torch.dtype) -> tuple[torch.dtype, ...]:
    """Of a product whose result has this dtype."""
    return (out, torch.float32) if out.itemsize == 1 else (out,)


# Shapes, as the core has them


def _check_device(op: str, argument: str, t: Tensor, like: Tensor) -> None:
    """torch calls a fake where any operand is on "meta"; the others may be elsewhere."""
    expect(t.device == like.device, op, argument, f"a tensor on {like.device}", f"one on {t.device}")


def _check_scale(op: str, argument: str, scale: Tensor, like: Tensor) -> None:
    expect(scale.dtype == torch.float32, op, argument, torch.float32, scale.dtype)
    _check_device(op, argument, scale, like)


def _check_dense(op: str, dense: Tensor, dim: int) -> tuple[int, int]:
    """Lines and elements of a line."""
    expect(dense.dtype in KINDS, op, "A", "a floating type, int8 or uint8", dense.dtype)
    expect(dense.dim() == 2, op, "A", "a matrix", tuple(dense.shape))
    expect(dim in (0, 1), op, "dim", "-1, 0 or 1", dim)
    group, k = group_of(dense.dtype), dense.shape[dim]
    expect(k % group == 0, op, "A", f"a multiple of {group} along dim {dim}", tuple(dense.shape))
    return dense.shape[1 - dim], k


def _check_plain(values: Tensor, metadata: Tensor, dim: int) -> tuple[int, int]:
    """Rows and columns of the matrix."""
    op = "TwoFour"
    expect(values.dtype in KINDS, op, "values", "a floating type, int8 or uint8", values.dtype)
    expect(metadata.dtype in _WORDS, op, "metadata", WORDS_TEXT, metadata.dtype)
    expect(values.dim() == 2, op, "values", "a matrix", tuple(values.shape))
    expect(dim in (0, 1), op, "dim", "-1, 0 or 1", dim)
    lines, k = values.shape[1 - dim], 2 * values.shape[dim]
    group = group_of(values.dtype)
    expect(k % group == 0, op, "values", f"a multiple of {group // 2} along dim {dim}", tuple(values.shape))
    words = words_of(k, values.dtype, metadata.dtype)
    shape = (lines, words) if dim else (words, lines)
    expect(tuple(metadata.shape) == shape, op, "metadata", shape, tuple(metadata.shape))
    _check_device(op, "metadata", metadata, values)
    return (lines, k) if dim else (k, lines)


def _lines(like: Tensor, lines: int, along: int, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    made = like.new_empty((lines, along), dtype=dtype or like.dtype)
    return made if dim else made.t()


def _made(op: str, dense: Tensor, dim: int, word: torch.dtype) -> tuple[Tensor, Tensor]:
    lines, k = _check_dense(op, dense, dim)
    expect(word in _WORDS, op, "metadata_dtype", WORDS_TEXT, word)
    return _lines(dense, lines, k // 2, dim), _lines(dense, lines, words_of(k, dense.dtype, word), dim, word)


@compress_op.register_fake
def _compress_fake(dense: Tensor, dim: int, metadata_dtype: torch.dtype, validate: bool) -> tuple[Tensor, Tensor]:
    return _made("compress", dense, dim, metadata_dtype)


@torch.library.register_fake("fretwork::two_four_check")
def _check_fake(dense: Tensor, dim: int) -> Tensor:
    _check_dense("check", dense, dim)
    return dense.new_empty((), dtype=torch.int64)


@torch.library.register_fake("fretwork::two_four_canonical")
def _canonical_fake(values: Tensor, metadata: Tensor, dim: int, keep_valid: bool) -> tuple[Tensor, Tensor]:
    _check_plain(values, metadata, dim)
    words = _lines(metadata, metadata.shape[1 - dim], metadata.shape[dim], dim)
    return words, values.new_empty((), dtype=torch.int64)


@to_dense_op.register_fake
def _to_dense_fake(values: Tensor, metadata: Tensor, dim: int) -> Tensor:
    return values.new_empty(_check_plain(values, metadata, dim))


@gather_op.register_fake
def _gather_fake(dense: Tensor, metadata: Tensor, dim: int) -> Tensor:
    lines, k = _check_dense("gather", dense, dim)
    values = _lines(dense, lines, k // 2, dim)
    _check_plain(values, metadata, dim)
    return values


@prune_op.register_fake
def _prune_fake(dense: Tensor, dim: int, transposable: bool) -> Tensor:
    _check_dense("prune", dense, dim)
    if transposable:
        _check_dense("prune", dense, 1 - dim)
    return dense.new_empty(dense.shape)


@prune_both_op.register_fake
def _prune_both_fake(dense: Tensor, metadata_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, cols = (_made("prune", dense, dim, metadata_dtype) for dim in (1, 0))
    return *rows, *cols


@matmul_op.register_fake
def _matmul_fake(
    values: Tensor,
    metadata: Tensor,
    dense: Tensor,
    bias: Tensor | None,
    activation: str,
    out_dtype: torch.dtype | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    product: str,
    precision: str,
    scale_out: Tensor | None = None,
) -> Tensor:
    right = product == "right"
    rows, cols = _check_plain(values, metadata, 0 if right else 1)
    lines, k = (cols, rows) if right else (rows, cols)
    op, name = {"left": ("matmul", "b"), "right": ("matmul", "a"), "linear": ("linear", "x")}[product]
    expect(dense.dtype == values.dtype, op, name, values.dtype, dense.dtype)
    contracted, rank = (-2, 2) if product == "left" else (-1, 1 if product == "linear" else 2)
    fits = dense.dim() >= rank and dense.shape[contracted] == k
    expect(fits, op, name, f"{k} in dimension {contracted}", tuple(dense.shape))
    _check_device(op, name, dense, values)
    if bias is not None:
        _check_device(op, "bias", bias, values)
    shape = list(dense.shape)
    shape[contracted] = lines
    out = out_dtype or result_dtype(dense.dtype)
    wide = torch.int32 if dense.dtype in INTEGERS else torch.float64
    expect(out in (wide, *FLOATING[1:], *SMALL, torch.int8), op, "out_dtype", f"one for {dense.dtype}", out)
    if bias is not None:
        expect(tuple(bias.shape) == (lines,), op, "bias", (lines,), tuple(bias.shape))
        expect(bias.dtype in bias_dtypes(out), op, "bias", out, bias.dtype)
    for scale, count in ((scale_a, -2), (scale_b, -1)):
        if scale is not None:
            name = "scale_a" if count == -2 else "scale_b"
            right_shape = scale.dim() == 0 or tuple(scale.shape) == (shape[count],)
            expect(right_shape, op, name, "one number or one of each", tuple(scale.shape))
            _check_scale(op, name, scale, values)
    if scale_out is not None:
        expect(scale_out.dim() == 0, op, "scale_out", "one number", tuple(scale_out.shape))
        _check_scale(op, "scale_out", scale_out, values)
    return dense.new_empty(shape, dtype=out)


# Gradients. to_dense and gather are each other's.


def _compress_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.dim = inputs[1]
    ctx.save_for_backward(output[1])
    ctx.mark_non_differentiable(output[1])


def _compress_gradient(ctx: Any, d_values: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return to_dense_op(d_values, ctx.saved_tensors[0], ctx.dim), None, None, None


def _form_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, metadata, ctx.dim = inputs
    ctx.save_for_backward(metadata)


def _to_dense_gradient(ctx: Any, d_dense: Tensor) -> tuple[Tensor | None, ...]:
    return gather_op(d_dense, ctx.saved_tensors[0], ctx.dim), None, None


def _gather_gradient(ctx: Any, d_values: Tensor) -> tuple[Tensor | None, ...]:
    return to_dense_op(d_values, ctx.saved_tensors[0], ctx.dim), None, None


def _prune_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _prune_gradient(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    (out,) = ctx.saved_tensors
    return torch.where(out != 0, d_out, 0), None, None


def _prune_both_gradient(ctx: Any, *gradients: Any) -> None:
    raise NotImplementedError(
        "prune_both: gradient: expected none to be asked for, got one; "
        "compress(prune(A, transposable=True)) has one for each packing"
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    values, metadata, dense, bias, activation, _, scale_a, scale_b, product, precision, scale_out = inputs
    needs = ctx.needs_input_grad
    needs_values, needs_dense = needs[0], needs[2]
    if needs[6] or needs[7] or needs[10] or values.dtype not in FLOATING or output.dtype not in FLOATING:
        _check_gradient("linear" if product == "linear" else "matmul", needs, values.dtype, output.dtype)
    again = activation in ("gelu", "silu")  # the sums before these are computed again
    again |= activation == "relu" and scale_out is not None  # which may hide their sign
    ctx.how = activation, product, precision, again, dense.dtype
    ctx.save_for_backward(
        values if needs_dense or again else None,
        metadata,
        dense if needs_values or again else None,
        bias if again else None,
        output if activation == "relu" and not again else None,
        scale_a,
        scale_b,
        scale_out,
    )


def _check_gradient(op: str, needs: tuple[bool, ...], operands: torch.dtype, result: torch.dtype) -> None:
    if needs[6] or needs[7] or needs[10]:
        raise NotImplementedError(
            f"{op}: scales: expected tensors without gradient, got one that requires it; multiply the result by it"
        )
    if (needs[0] or needs[2]) and operands not in FLOATING:
        raise NotImplementedError(
            f"{op}: gradient: expected float64, float32, float16 or bfloat16 operands, got {operands}; "
            "let one of these learn, and TwoFour.to makes the other"
        )
    if any(needs) and result not in FLOATING:
        raise NotImplementedError(
            f"{op}: gradient: expected a float64, float32, float16 or bfloat16 result, got {result}; "
            "round the result of one of these"
        )


def _gradient(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    """Without autocast, which a backward pass may run under: groups depend on the dtype, and so does the result."""
    if not is_compiling() and not in_autocast():
        return _gradients(ctx, d_out)
    device = d_out.device.type
    with torch.autocast("cpu" if device == "meta" else device, enabled=False):
        return _gradients(ctx, d_out)


def _gradients(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    values, metadata, dense, bias, out, scale_a, scale_b, scale_out = ctx.saved_tensors
    activation, product, precision, again, dtype = ctx.how
    needs_values, _, needs_dense, needs_bias = ctx.needs_input_grad[:4]
    d = d_out if scale_out is None else d_out * scale_out
    if activation != "none":

        def sums() -> Tensor:
            scales = (scale_a, scale_b, product, precision, None)
            return matmul_op(values, metadata, dense, bias, "none", d.dtype, *scales)  # type: ignore[no-any-return]

        out = sums() if activation == "relu" and again else out
        d = before_activation(activation, d, out, sums)
    d_values = d_dense = d_bias = None
    if needs_bias:
        d_bias = rows_of(d.mT if product == "left" else d).sum(0)
    if needs_values or needs_dense:
        d = d if scale_a is None else d * (scale_a[:, None] if scale_a.dim() else scale_a)
        d = (d if scale_b is None else d * scale_b).to(dtype)
        if _one_op(product, d, values, metadata, dense):
            asked = dense if needs_values else None, values if needs_dense else None
            d_dense, d_values, _ = _plain_backward(d, *asked, metadata, False)
            found = d_values if needs_values else None, None, d_dense if needs_dense else None, d_bias
            return *found, None, None, None, None, None, None, None
    if needs_dense:
        a = to_dense_op(values, metadata, 0 if product == "right" else 1)
        d_dense = _dense_product(a.T, d) if product == "left" else _dense_product(d, a.T if product == "right" else a)
    if needs_values:
        d_values = gather_op(_outer(product, d, dense), metadata, 0 if product == "right" else 1)
    return d_values, None, d_dense, d_bias, None, None, None, None, None, None, None


def _one_op(product: str, d: Tensor, *saved: Tensor | None) -> bool:
    """Whether one op has the gradients of a layer's product: where they will not be differentiated themselves."""
    return product == "linear" and d.dim() > 1 and not torch.is_grad_enabled() and called_plainly((d, *saved))


class TwoFourLinear(torch.autograd.Function):
    """The same node for a layer's plain calls, with fewer arguments; its dtypes have gradients."""

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, metadata: Tensor, dense: Tensor, bias: Tensor | None, precision: str
    ) -> Tensor:
        needs_values, _, needs_dense, _, _ = ctx.needs_input_grad
        ctx.how = "none", "linear", precision, False, dense.dtype
        kept = values if needs_dense else None, metadata, dense if needs_values else None
        ctx.save_for_backward(*kept, None, None, None, None, None)
        return _plain_linear(values, metadata, dense, bias, precision)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (d,) = gradients
        values, metadata, dense, *_ = ctx.saved_tensors
        if not _one_op("linear", d, values, metadata, dense):
            return *_gradient(ctx, d)[:4], None
        needs_values, _, needs_dense, needs_bias, _ = ctx.needs_input_grad
        asked = dense if needs_values else None, values if needs_dense else None
        d_dense, d_values, d_bias = _plain_backward(d, *asked, metadata, needs_bias)
        found = d_dense if needs_dense else None, d_bias if needs_bias else None
        return d_values if needs_values else None, None, *found, None


_apply_linear, _plain_linear = node_apply(TwoFourLinear), bare(ops._two_four_linear.default)
_plain_backward = bare(ops._two_four_linear_backward.default)


@torch.library.register_fake("fretwork::_two_four_linear_backward")
def _linear_backward_fake(
    d: Tensor, dense: Tensor | None, values: Tensor | None, metadata: Tensor, needs_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        d.new_empty(0 if values is None else (*d.shape[:-1], 2 * values.shape[1])),
        d.new_empty(0 if dense is None else (d.shape[-1], dense.shape[-1] // 2)),
        d.new_empty(d.shape[-1] if needs_bias else 0),
    )


@torch.library.register_fake("fretwork::_two_four_linear")
def _linear_fake(values: Tensor, metadata: Tensor, x: Tensor, bias: Tensor | None, precision: str) -> Tensor:
    return _matmul_fake(values, metadata, x, bias, "none", None, None, None, "linear", precision)


def linear(values: Tensor, metadata: Tensor, dense: Tensor, bias: Tensor | None, precision: str) -> Tensor:
    """`matmul_op` as a layer calls it."""
    if not called_plainly((values, metadata, dense, bias)):
        y: Tensor = matmul_op(values, metadata, dense, bias, "none", None, None, None, "linear", precision, None)
        return y
    return linear_plainly(values, metadata, dense, bias, precision)


def linear_plainly(values: Tensor, metadata: Tensor, dense: Tensor, bias: Tensor | None, precision: str) -> Tensor:
    """What was `called_plainly`, of floating values."""
    if torch.is_grad_enabled() and any_requires_grad(values, dense, bias):
        bias = None if bias is None else alive(bias)
        return _apply_linear(alive(values), metadata, alive(dense), bias, precision)  # type: ignore[no-any-return]
    return _plain_linear(values, metadata, dense, bias, precision)  # type: ignore[no-any-return]


def rows_of(t: Tensor) -> Tensor:
    """A matrix. Not by `flatten`, which torch does not do of many gradients at once."""
    return t if t.dim() == 2 else t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


def _dense_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, without torch's look at the shapes where it is known to be mm."""
    return torch.mm(a, b) if a.dim() == b.dim() == 2 else a @ b


def _outer(product: str, d: Tensor, dense: Tensor) -> Tensor:
    """The gradient of all elements of the sparse operand, of which some are kept."""
    if product == "right":
        return torch.mm(rows_of(dense).T, rows_of(d))
    if product == "linear":
        return torch.mm(rows_of(d).T, rows_of(dense))
    if d.dim() == 2:
        return torch.mm(d, dense.T)
    return torch.mm(rows_of(d.mT).T, rows_of(dense.mT))


# vmap


def _each(call: Callable[..., Any]) -> Callable[..., Any]:
    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        return one_by_one(call, info.batch_size, in_dims, arguments)

    return vmap


def _canonical_vmap(
    info: Any, in_dims: tuple[Any, ...], values: Tensor, metadata: Tensor, dim: int, keep_valid: bool
) -> tuple[tuple[Tensor, Tensor], tuple[int, None]]:
    """One answer for all, which can be read: a place of one of them, or −1."""
    (words, found), _ = one_by_one(canonical_op, info.batch_size, in_dims, (values, metadata, dim, keep_valid))
    return (words, found.amax(0) if info.batch_size else found.new_tensor(-1)), (0, None)


def _matmul_vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
    values, metadata, dense, *rest = arguments
    alone = any(d is not None for n, d in enumerate(in_dims) if n != 2)
    if alone or dense.dim() < (2 if rest[5] == "linear" else 3):
        return one_by_one(matmul_op, info.batch_size, in_dims, arguments)
    return matmul_op(values, metadata, dense.movedim(in_dims[2], 0), *rest), 0


def _matmul_cast(
    values: Tensor, metadata: Tensor, dense: Tensor, bias: Tensor | None, activation: str, out: Any, *rest: Any
) -> tuple[Any, ...]:
    """The dense operand takes the type of the sparse one, which stays: its groups depend on it."""
    common = (torch.float32, torch.float16, torch.bfloat16)
    if dense.dtype in common and values.dtype in common:
        dense = dense.to(values.dtype)
    if bias is not None and bias.dtype in common:
        takes = bias_dtypes(out or result_dtype(dense.dtype))
        bias = bias if bias.dtype in takes else bias.to(takes[-1])
    return values, metadata, dense, bias, activation, out, *rest


compress_op.register_gradient(_compress_gradient, _compress_setup)
to_dense_op.register_gradient(_to_dense_gradient, _form_setup)
gather_op.register_gradient(_gather_gradient, _form_setup)
prune_op.register_gradient(_prune_gradient, _prune_setup)
prune_both_op.register_gradient(_prune_both_gradient)
matmul_op.register_gradient(_gradient, _setup)
for _op in (compress_op, to_dense_op, gather_op, prune_op, prune_both_op):
    _op.register_vmap(_each(_op))
torch.library.register_vmap("fretwork::two_four_check", _each(check_op))
torch.library.register_vmap("fretwork::two_four_canonical", _canonical_vmap)
matmul_op.register_vmap(_matmul_vmap)
matmul_op.register_autocast(_matmul_cast)
