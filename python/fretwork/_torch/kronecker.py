"""torch's rules for the Kronecker products, and for the copies between their weights and dense matrices."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fretwork._checks import expect, fail
from fretwork._shapes import check_floating
from fretwork._torch.activation import before_activation
from fretwork._torch.arguments import autocasts
from fretwork._torch.differentiable import (
    DifferentiableOp,
    called_eagerly,
    called_plainly,
    holds_dtensors,
    on_parts,
)
from fretwork._torch.private import alive, any_requires_grad, bare, in_autocast, is_batched, node_apply
from fretwork._torch.registration import cast_first, operand, ops, register_autocast
from fretwork._torch.vmap import mapped, mapped_over_none, split

ksmm_op, backward_weight_op = DifferentiableOp("ksmm"), DifferentiableOp("ksmm_backward_weight")
to_dense_op, from_dense_op = DifferentiableOp("kronecker_to_dense"), DifferentiableOp("kronecker_from_dense")
_chain_op, _plain_chain = ops.ksmm_chain.default, bare(ops._ksmm_chain.default)
_plain_chain_backward = bare(ops._ksmm_chain_backward.default)


def _check_like(op: str, x: Tensor, others: dict[str, Tensor | None]) -> None:
    for name, t in others.items():
        if t is not None:
            expect(t.dtype == x.dtype, op, name, f"{x.dtype} like x", t.dtype)
            expect(t.device == x.device, op, name, f"{x.device} like x", t.device)


# Shapes, as the core has them. x is (batch, features), or (features, batch) where batch is last.


def _result(op: str, x: Tensor, factors: dict[str, Tensor], bias: Tensor | None, bs_last: bool) -> Tensor:
    _check_like(op, x, {**factors, "bias": bias})
    expect(x.dim() == 2, op, "x", "2 dimensions, batch and features", tuple(x.shape))
    batch, features = reversed(x.shape) if bs_last else x.shape
    for name, w in factors.items():
        expect(w.dim() == 4, op, name, "(a, b, c, d)", tuple(w.shape))
        a, b, c, d = w.shape
        expect(features == a * c * d, op, name, f"{features} in features (a·c·d)", a * c * d)
        features = a * b * d
    if bias is not None:
        expect(tuple(bias.shape) == (features,), op, "bias", f"{(features,)}", tuple(bias.shape))
    return x.new_empty((features, batch) if bs_last else (batch, features))


@ksmm_op.register_fake
def _fake(x: Tensor, w: Tensor, bias: Tensor | None, activation: str, bs_last: bool, precision: str) -> Tensor:
    return _result("ksmm", x, {"w": w}, bias, bs_last)


@torch.library.register_fake("fretwork::ksmm_chain")
@torch.library.register_fake("fretwork::_ksmm_chain")
def _chain_fake(
    x: Tensor, weights: list[Tensor], bias: Tensor | None, activation: str, bs_last: bool, precision: str
) -> Tensor:
    expect(len(weights) > 0, "ksmm_chain", "weights", "at least one", "none")
    return _result("ksmm_chain", x, {f"weights[{n}]": w for n, w in enumerate(weights)}, bias, bs_last)


@backward_weight_op.register_fake
def _backward_weight_fake(
    x: Tensor, d_out: Tensor, a: int, d: int, bs_last: bool, precision: str, bias: bool
) -> tuple[Tensor, Tensor]:
    op = "ksmm_backward_weight"
    _check_like(op, x, {"d_out": d_out})
    expect(x.dim() == 2 == d_out.dim(), op, "x and d_out", "2 dimensions", (tuple(x.shape), tuple(d_out.shape)))
    (batch, c), (d_batch, b) = (reversed(t.shape) if bs_last else t.shape for t in (x, d_out))
    expect(batch == d_batch, op, "d_out", f"a batch of {batch}", d_batch)
    return x.new_empty(a, b // (a * d), c // (a * d), d), x.new_empty(b if bias else 0)


@torch.library.register_fake("fretwork::_ksmm_chain_backward")
def _chain_backward_fake(
    x: Tensor,
    weights: list[Tensor],
    d_out: Tensor,
    bs_last: bool,
    precision: str,
    needs_x: bool,
    needs_weights: int,
    needs_bias: bool,
) -> list[Tensor]:
    features = d_out.shape[0 if bs_last else 1]
    d_weights = [w.new_empty(w.shape if needs_weights >> n & 1 else 0) for n, w in enumerate(weights)]
    return [x.new_empty(x.shape if needs_x else 0), x.new_empty(features if needs_bias else 0), *d_weights]


# Gradients


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, bias, ctx.activation, ctx.bs_last, ctx.precision = inputs
    ctx.a, ctx.d = w.shape[0], w.shape[3]
    again = ctx.activation in ("gelu", "silu")  # the sums before these are computed again
    ctx.save_for_backward(
        x if ctx.needs_input_grad[1] or again else None,
        w if ctx.needs_input_grad[0] or again else None,
        bias if again else None,
        output if ctx.activation == "relu" else None,
    )


def _one_op(d_out: Tensor, *saved: Tensor) -> bool:
    """Whether one op has all gradients: where they will not be differentiated themselves, and there is one of each."""
    return not torch.is_grad_enabled() and called_plainly((d_out, *saved)) and not is_batched(d_out)


def _gradient(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    x, w, bias, out = ctx.saved_tensors
    layout = (ctx.bs_last, ctx.precision)
    if ctx.activation == "none" and _one_op(d_out, x, w):
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        if needs_x and needs_w:  # one op has them
            d_x, d_bias, d_w = _plain_chain_backward(x, (w,), d_out, *layout, True, 1, needs_bias)
            return d_x, d_w, d_bias if needs_bias else None, None, None, None
    d_out = before_activation(ctx.activation, d_out, out, lambda: ksmm_op(x, w, bias, "none", *layout))
    needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
    d_x = ksmm_op(d_out, w.transpose(1, 2), None, "none", *layout) if needs_x else None
    d_w = d_bias = None
    if needs_w:
        d_w, d_bias = backward_weight_op(x, d_out, ctx.a, ctx.d, *layout, needs_bias)
    elif needs_bias:
        d_bias = d_out.sum(1 if ctx.bs_last else 0)
    return d_x, d_w, d_bias if needs_bias else None, None, None, None


def _save_chain(
    ctx: Any, x: Tensor, weights: list[Tensor], bias: Tensor | None, output: Tensor, needs_weights: bool
) -> None:
    ctx.again = ctx.activation in ("gelu", "silu")  # the sums before these are computed again, as is the middle
    ctx.save_for_backward(
        x if needs_weights or ctx.again else None,
        bias if ctx.again else None,
        output if ctx.activation == "relu" else None,
        *weights,
    )


def _chain_gradients(
    ctx: Any, d_out: Tensor, needs_x: bool, needs_w: Sequence[bool], needs_bias: bool
) -> tuple[Tensor | None, list[Tensor | None], Tensor | None]:
    """Of x, weights and bias. Nothing between the factors is saved: a fused chain never writes it, and here it is
    computed as far as needed."""
    x, bias, out, *weights = ctx.saved_tensors
    layout = (ctx.bs_last, ctx.precision)
    end = len(weights) - 1
    last = end if ctx.again else max([n for n, needs in enumerate(needs_w) if needs] or [0])
    before = [x]  # what comes into each factor
    for w in weights[:last]:
        before.append(ksmm_op(before[-1], w, None, "none", *layout))
    d_y = before_activation(
        ctx.activation, d_out, out, lambda: ksmm_op(before[end], weights[end], bias, "none", *layout)
    )
    d_bias = None
    if needs_bias and not needs_w[end]:
        d_bias = d_y.sum(1 if ctx.bs_last else 0)
    d_weights: list[Tensor | None] = [None] * len(weights)
    for n in range(end, -1, -1):
        w = weights[n]
        if needs_w[n]:
            with_bias = n == end and needs_bias
            d_weights[n], sums = backward_weight_op(before[n], d_y, w.shape[0], w.shape[3], *layout, with_bias)
            d_bias = sums if with_bias else d_bias
        if not (needs_x or any(needs_w[:n])):
            break
        d_y = ksmm_op(d_y, w.transpose(1, 2), None, "none", *layout)
    return d_y if needs_x else None, d_weights, d_bias


def _chain_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, bias, ctx.activation, ctx.bs_last, ctx.precision = inputs
    needs_w = ctx.needs_input_grad[1 : 1 + len(weights)]  # flat here, and a list of its own in the backward pass
    _save_chain(ctx, x, weights, bias, output, any(needs_w))


def _chain_gradient(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
    return *_chain_gradients(ctx, d_out, *ctx.needs_input_grad[:3]), None, None, None


class KroneckerChain(torch.autograd.Function):
    """The same node for plain calls, with the weights behind the other arguments, one by one."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, activation: str, bs_last: bool, precision: str, *weights: Tensor
    ) -> Tensor:
        output: Tensor = _plain_chain(x, weights, bias, activation, bs_last, precision)
        ctx.activation, ctx.bs_last, ctx.precision = activation, bs_last, precision
        _save_chain(ctx, x, list(weights), bias, output, any(ctx.needs_input_grad[5:]))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (d_out,) = gradients
        needs_x, needs_bias, _, _, _, *needs_w = ctx.needs_input_grad
        x, _, _, *weights = ctx.saved_tensors
        if not (ctx.activation == "none" and needs_w[-1] and _one_op(d_out, x, *weights)):
            d_x, d_weights, d_bias = _chain_gradients(ctx, d_out, needs_x, needs_w, needs_bias)
            return d_x, d_bias, None, None, None, *d_weights
        bits = sum(1 << n for n, needs in enumerate(needs_w) if needs)
        found = _plain_chain_backward(x, weights, d_out, ctx.bs_last, ctx.precision, needs_x, bits, needs_bias)
        wanted = (needs_x, needs_bias, *needs_w)
        d_x, d_bias, *d_weights = [d if needs else None for d, needs in zip(found, wanted, strict=True)]
        return d_x, d_bias, None, None, None, *d_weights


_apply_chain, _cast_chain = node_apply(KroneckerChain), cast_first(3)


def ksmm_chain_op(
    x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, activation: str, bs_last: bool, precision: str
) -> Tensor:
    """As a DifferentiableOp is called."""
    if not called_eagerly((x, *weights, bias)):
        if holds_dtensors((x, *weights, bias)):
            arguments = (x, weights, bias, activation, bs_last, precision)
            return on_parts("ksmm_chain", ksmm_chain_op, arguments)  # type: ignore[no-any-return]
        return _chain_op(x, weights, bias, activation, bs_last, precision)
    if in_autocast() and autocasts(x):
        x, weights, bias, *_ = _cast_chain(x, weights, bias)
    return ksmm_chain_plainly(x, weights, bias, activation, bs_last, precision)


def ksmm_chain_plainly(
    x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, activation: str, bs_last: bool, precision: str
) -> Tensor:
    """What was `called_plainly`; one factor is a chain too."""
    if len(weights) == 1:
        return ksmm_op(x, weights[0], bias, activation, bs_last, precision)  # type: ignore[no-any-return]
    if torch.is_grad_enabled() and any_requires_grad(x, *weights, bias):
        bias = None if bias is None else alive(bias)
        return _apply_chain(alive(x), bias, activation, bs_last, precision, *map(alive, weights))  # type: ignore[no-any-return]
    return _plain_chain(x, weights, bias, activation, bs_last, precision)  # type: ignore[no-any-return]


def ksmm_plainly(x: Tensor, w: Tensor, bs_last: bool, precision: str) -> Tensor:
    """What was `called_plainly`, without bias and activation."""
    if torch.is_grad_enabled() and any_requires_grad(x, w):
        return ksmm_op.node(alive(x), alive(w), None, "none", bs_last, precision)  # type: ignore[no-any-return]
    return ksmm_op.plain(x, w, None, "none", bs_last, precision)  # type: ignore[no-any-return]


def _backward_weight_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, d_out, _, _, ctx.bs_last, ctx.precision, ctx.bias = inputs
    ctx.save_for_backward(x, d_out)


def _backward_weight_gradient(ctx: Any, g_w: Tensor, g_bias: Tensor) -> tuple[Tensor | None, ...]:
    """d_w is linear in x and in d_out; with g_w in the place of w its gradients are the product and its transpose."""
    x, d_out = ctx.saved_tensors
    layout = ("none", ctx.bs_last, ctx.precision)
    g_x = ksmm_op(d_out, g_w.transpose(1, 2), None, *layout) if ctx.needs_input_grad[0] else None
    g_out = ksmm_op(x, g_w, g_bias if ctx.bias else None, *layout) if ctx.needs_input_grad[1] else None
    return g_x, g_out, None, None, None, None, None


# vmap


def _vmap(
    info: Any, in_dims: tuple[Any, ...], x: Tensor, w: Tensor, bias: Tensor | None, activation: str, last: bool, p: str
) -> tuple[Tensor, int]:
    x_dim, w_dim, bias_dim, size = *in_dims[:3], info.batch_size
    if size == 0:
        inputs = (x, x_dim), (w, w_dim), (bias, bias_dim)
        return mapped_over_none(lambda *one: ksmm_op(*one, activation, last, p), *inputs)
    axis = int(last)
    if w_dim is not None or bias_dim is not None:
        # Each has a factor of its own. They stand one after another on a longer diagonal: size·a instead of a.
        axis = 1 - axis
        w = mapped(w, w_dim, size, 0)
        bias = None if bias is None else mapped(bias, bias_dim, size, 0)
    return split(ksmm_op(mapped(x, x_dim, size, axis), w, bias, activation, last, p), size, axis), axis


def _chain_vmap(
    info: Any,
    dims: tuple[Any, ...],
    x: Tensor,
    weights: list[Tensor],
    bias: Tensor | None,
    act: str,
    last: bool,
    p: str,
) -> tuple[Tensor, int]:
    x_dim, w_dims, bias_dim = dims[:3]
    size, axis = info.batch_size, int(last)
    if size > 0 and bias_dim is None and all(dim is None for dim in w_dims):
        return split(ksmm_chain_op(mapped(x, x_dim, size, axis), weights, bias, act, last, p), size, axis), axis
    for w, w_dim in zip(weights[:-1], w_dims[:-1], strict=True):
        x, x_dim = _vmap(info, (x_dim, w_dim, None), x, w, None, "none", last, p)
    return _vmap(info, (x_dim, w_dims[-1], bias_dim), x, weights[-1], bias, act, last, p)


def _backward_weight_vmap(
    info: Any, in_dims: tuple[Any, ...], x: Tensor, d_out: Tensor, a: int, d: int, last: bool, p: str, bias: bool
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    size, features = info.batch_size, 1 - int(last)
    x, d_out = mapped(x, in_dims[0], size, features), mapped(d_out, in_dims[1], size, features)
    d_w, d_bias = backward_weight_op(x, d_out, size * a, d, last, p, bias)
    return (split(d_w, size, 0), split(d_bias, size, 0) if bias else d_bias.new_empty(size, 0)), (0, 0)


ksmm_op.register_gradient(_gradient, _setup)
torch.library.register_autograd("fretwork::ksmm_chain", _chain_gradient, setup_context=_chain_setup)
backward_weight_op.register_gradient(_backward_weight_gradient, _backward_weight_setup)
ksmm_op.register_vmap(_vmap)
torch.library.register_vmap("fretwork::ksmm_chain", _chain_vmap)
backward_weight_op.register_vmap(_backward_weight_vmap)
ksmm_op.register_autocast(cast_first(3))
register_autocast("ksmm_chain", _cast_chain, ksmm_chain_op)


# Dense matrices and weights. Each copy is the other's gradient: what lies outside the pattern has none.


@to_dense_op.register_fake
def _to_dense_fake(w: Tensor) -> Tensor:
    check_floating("to_dense", operand("w", w))
    if w.dim() != 4 or 0 in w.shape:
        fail("to_dense", "w", "(a, b, c, d), each at least 1", tuple(w.shape))
    a, b, c, d = w.shape
    return w.new_empty(a * b * d, a * c * d)


@from_dense_op.register_fake
def _from_dense_fake(dense: Tensor, a: int, b: int, c: int, d: int) -> tuple[Tensor, Tensor]:
    check_floating("from_dense", operand("dense", dense))
    if tuple(dense.shape) != (a * b * d, a * c * d):
        expected = f"{(a * b * d, a * c * d)} for kronecker({a},{b},{c},{d})"
        fail("from_dense", "dense", expected, tuple(dense.shape))
    return dense.new_empty(a, b, c, d), dense.new_empty((), dtype=torch.int64)


def _to_dense_setup(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.sizes = inputs[0].shape


def _to_dense_gradient(ctx: Any, gradient: Tensor) -> Tensor:
    return from_dense_op(gradient, *ctx.sizes)[0]


def _from_dense_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])


def _from_dense_gradient(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None, None, None, None]:
    return to_dense_op(gradient), None, None, None, None


def _to_dense_vmap(info: Any, in_dims: tuple[int], w: Tensor) -> tuple[Tensor, int]:
    if info.batch_size == 0:
        return mapped_over_none(to_dense_op, (w, in_dims[0]))
    return torch.stack([to_dense_op(one) for one in w.unbind(in_dims[0])]), 0


def _from_dense_vmap(
    info: Any, in_dims: tuple[Any, ...], dense: Tensor, *sizes: int
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    each = [from_dense_op(one, *sizes) for one in dense.unbind(in_dims[0])]
    return (torch.stack([w for w, _ in each]), torch.stack([outside for _, outside in each])), (0, 0)


to_dense_op.register_gradient(_to_dense_gradient, _to_dense_setup)
from_dense_op.register_gradient(_from_dense_gradient, _from_dense_setup)
to_dense_op.register_vmap(_to_dense_vmap)
from_dense_op.register_vmap(_from_dense_vmap)
