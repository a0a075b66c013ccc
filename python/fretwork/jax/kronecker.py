"""Products of Kronecker factors on JAX arrays, their dense matrices, and projections onto them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.typing import ArrayLike

from fretwork._checks import fail, flag
from fretwork._shapes import check_floating, factor_features
from fretwork.jax._handlers import (
    ACTIVATIONS,
    array,
    check_precision,
    default_precision,
    differentiable,
    foreign,
    operand,
)
from fretwork.jax._partition import Axis, partitioned
from fretwork.patterns import KroneckerPattern
from fretwork.patterns.kronecker import butterfly, kronecker_patterns, monarch, projected

__all__ = ["butterfly", "from_dense", "ksmm", "ksmm_chain", "monarch", "project", "to_dense"]

_TORCH_ONLY = ("bmm", "bsr", "einsum", "dense", "sparse")


class _Product(NamedTuple):
    """What a product is, besides its operands. x is (batch, features), or (features, batch) where batch is last."""

    bs_last: bool
    activation: str
    precision: str

    @property
    def batch(self) -> int:
        """The axis of x and y that counts the batch."""
        return int(self.bs_last)

    def axes(self, operands: Sequence[jax.Array]) -> list[Axis]:
        """The batch; weights and bias are whole."""
        return [Axis([self.batch, *[None] * (len(operands) - 1)], [self.batch])]

    @property
    def plain(self) -> _Product:
        return self._replace(activation="none")


def _mapped(x: jax.Array, batched: bool, size: int, axis: int) -> jax.Array:
    """The mapped dimension, which comes first, moved to `axis` and merged with the one there."""
    many = x if batched else jnp.broadcast_to(x, (size, *x.shape))
    many = jnp.moveaxis(many, 0, axis)
    return many.reshape(*many.shape[:axis], many.shape[axis] * many.shape[axis + 1], *many.shape[axis + 2 :])


def _split(x: jax.Array, size: int, axis: int) -> jax.Array:
    """The inverse."""
    return jnp.moveaxis(x.reshape(*x.shape[:axis], size, x.shape[axis] // size, *x.shape[axis + 1 :]), axis, 0)


def _over_none(call: Callable[..., Any], batched: Sequence[bool], *operands: jax.Array) -> Any:
    """What a map of no elements gives: nothing, of the shape that one element would have."""
    one = [jax.ShapeDtypeStruct(x.shape[int(many) :], x.dtype) for x, many in zip(operands, batched, strict=True)]
    return jax.tree.map(lambda y: jnp.zeros((0, *y.shape), y.dtype), jax.eval_shape(call, *one))


def _ksmm_call(p: _Product, x: jax.Array, w: jax.Array, *bias: jax.Array) -> jax.Array:
    def on_part(x: jax.Array, w: jax.Array, *bias: jax.Array) -> list[jax.Array]:
        a, b, _, d = w.shape
        shape = (a * b * d, x.shape[1]) if p.bs_last else (x.shape[0], a * b * d)
        return [foreign("ksmm", jax.ShapeDtypeStruct(shape, x.dtype), x, w, *bias, **p._asdict())]

    @custom_vmap
    def call(*operands: jax.Array) -> jax.Array:
        return partitioned(on_part, p.axes(operands), operands)[0]

    @call.def_vmap
    def _(size: int, batched: list[bool], x: jax.Array, w: jax.Array, *bias: jax.Array) -> tuple[jax.Array, bool]:
        if size == 0:
            return _over_none(call, batched, x, w, *bias), True
        axis, factor = p.batch, (w, *bias)
        if any(batched[1:]):
            # Each has a factor of its own. They stand one after another on a longer diagonal: size·a instead of a.
            axis = 1 - axis
            factor = tuple(_mapped(t, many, size, 0) for t, many in zip(factor, batched[1:], strict=True))
        return _split(_ksmm_call(p, _mapped(x, batched[0], size, axis), *factor), size, axis), True

    return call(x, w, *bias)


def _weight_call(p: _Product, a: int, d: int, x: jax.Array, d_y: jax.Array) -> Sequence[jax.Array]:
    """The gradients of w and of the bias."""

    def on_part(x: jax.Array, d_y: jax.Array) -> Sequence[jax.Array]:
        features = 1 - p.batch
        b, c = (t.shape[features] // (a * d) for t in (d_y, x))
        results = [jax.ShapeDtypeStruct(shape, x.dtype) for shape in ((a, b, c, d), (a * b * d,))]
        return foreign("ksmm_backward_weight", results, x, d_y, bs_last=p.bs_last, precision=p.precision)

    @custom_vmap
    def call(x: jax.Array, d_y: jax.Array) -> Sequence[jax.Array]:
        return partitioned(on_part, [Axis([p.batch] * 2, [None] * 2)], (x, d_y))

    @call.def_vmap
    def _(size: int, batched: list[bool], x: jax.Array, d_y: jax.Array) -> tuple[list[jax.Array], list[bool]]:
        if size == 0:
            return _over_none(call, batched, x, d_y), [True, True]
        beside = (_mapped(t, many, size, 1 - p.batch) for t, many in zip((x, d_y), batched, strict=True))
        return [_split(t, size, 0) for t in _weight_call(p, size * a, d, *beside)], [True, True]

    return call(x, d_y)


# Gradients. Each formula is made of functions that have one, so that a gradient can be differentiated again.


@functools.partial(differentiable, static=1)
def _ksmm(p: _Product, x: jax.Array, w: jax.Array, *bias: jax.Array) -> jax.Array:
    return _ksmm_call(p, x, w, *bias)


def _ksmm_forward(p: _Product, x: jax.Array, w: jax.Array, *bias: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _ksmm(p, x, w, *bias), (x, w, *bias)


def _ksmm_backward(p: _Product, operands: tuple[jax.Array, ...], d_y: jax.Array) -> tuple[jax.Array, ...]:
    x, w, *bias = operands
    if p.activation != "none":
        sums = _ksmm(p.plain, *operands)  # once more; its derivative in fp32 at least
        wide = jnp.promote_types(x.dtype, jnp.float32)
        _, pull = jax.vjp(ACTIVATIONS[p.activation], sums.astype(wide))
        d_y = pull(d_y.astype(wide))[0].astype(x.dtype)
    d_w, d_bias = _weight(p.plain, w.shape[0], w.shape[3], x, d_y)
    return _ksmm(p.plain, d_y, w.swapaxes(1, 2)), d_w, *([d_bias] if bias else [])


_ksmm.defvjp(_ksmm_forward, _ksmm_backward)


@functools.partial(differentiable, static=3)
def _weight(p: _Product, a: int, d: int, x: jax.Array, d_y: jax.Array) -> Sequence[jax.Array]:
    return _weight_call(p, a, d, x, d_y)


def _weight_forward(
    p: _Product, a: int, d: int, x: jax.Array, d_y: jax.Array
) -> tuple[Sequence[jax.Array], tuple[jax.Array, jax.Array]]:
    return _weight(p, a, d, x, d_y), (x, d_y)


def _weight_backward(
    p: _Product, a: int, d: int, operands: tuple[jax.Array, jax.Array], g: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """d_w is linear in x and in d_y; with g in the place of w its gradients are the product and its transpose."""
    x, d_y = operands
    g_w, g_bias = g
    return _ksmm(p, d_y, g_w.swapaxes(1, 2)), _ksmm(p, x, g_w, g_bias)


_weight.defvjp(_weight_forward, _weight_backward)


# Chains. `count` of the operands after x are weights; the bias may follow.


def _walk(p: _Product, count: int, x: jax.Array, *operands: jax.Array) -> jax.Array:
    """Factor by factor: what a chain is, and what its gradients come from."""
    for w in operands[: count - 1]:
        x = _ksmm(p.plain, x, w)
    return _ksmm(p, x, *operands[count - 1 :])


def _chain_call(p: _Product, count: int, x: jax.Array, *operands: jax.Array) -> jax.Array:
    def on_part(x: jax.Array, *operands: jax.Array) -> list[jax.Array]:
        a, b, _, d = operands[count - 1].shape
        shape = (a * b * d, x.shape[1]) if p.bs_last else (x.shape[0], a * b * d)
        return [foreign("ksmm_chain", jax.ShapeDtypeStruct(shape, x.dtype), x, *operands, **p._asdict())]

    @custom_vmap
    def call(*operands: jax.Array) -> jax.Array:
        return partitioned(on_part, p.axes(operands), operands)[0]

    @call.def_vmap
    def _(size: int, batched: list[bool], x: jax.Array, *operands: jax.Array) -> tuple[jax.Array, bool]:
        if size == 0:
            return _over_none(call, batched, x, *operands), True
        if any(batched[1:]):
            walk = functools.partial(_walk, p, count)
            return jax.vmap(walk, in_axes=tuple(0 if many else None for many in batched))(x, *operands), True
        return _split(_chain_call(p, count, _mapped(x, batched[0], size, p.batch), *operands), size, p.batch), True

    return call(x, *operands)


@functools.partial(differentiable, static=2)
def _chain(p: _Product, count: int, x: jax.Array, *operands: jax.Array) -> jax.Array:
    return _chain_call(p, count, x, *operands)


def _chain_forward(
    p: _Product, count: int, x: jax.Array, *operands: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _chain(p, count, x, *operands), (x, *operands)


def _chain_backward(p: _Product, count: int, operands: tuple[jax.Array, ...], d_y: jax.Array) -> tuple[jax.Array, ...]:
    """What lies between the factors is computed again: a fused chain never had it."""
    return jax.vjp(functools.partial(_walk, p, count), *operands)[1](d_y)


_chain.defvjp(_chain_forward, _chain_backward)


def _check_factors(op: str, x: jax.Array, factors: Sequence[jax.Array], bias: jax.Array | None, bs_last: bool) -> None:
    check_floating(op, operand("x", x))
    if x.ndim == 0:
        fail(op, "x", "(features, …)" if bs_last else "(…, features)", "()")
    features = None
    for n, w in enumerate(factors):
        name = "w" if op == "ksmm" else f"weights[{n}]"
        if w.dtype != x.dtype:
            fail(op, name, f"{x.dtype} like x", w.dtype)
        features = factor_features(op, name, w.shape, features, x.shape, bs_last)
    if bias is not None and bias.dtype != x.dtype:
        fail(op, "bias", f"{x.dtype} like x", bias.dtype)
    if bias is not None and bias.shape != (features,):
        fail(op, "bias", (features,), bias.shape)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _apply_factors(
    op: str,
    bs_last: bool,
    activation: str | None,
    precision: str | None,
    x: jax.Array,
    factors: Sequence[jax.Array],
    bias: jax.Array | None,
) -> jax.Array:
    _check_factors(op, x, factors, bias, bs_last)
    p = _Product(bs_last, activation or "none", precision or default_precision())
    batch = x.shape[1:] if bs_last else x.shape[:-1]
    count = functools.reduce(lambda m, n: m * n, batch, 1)
    y = x.reshape(x.shape[0], count) if bs_last else x.reshape(count, x.shape[-1])
    operands = [*factors] if bias is None else [*factors, bias]
    y = _ksmm(p, y, *operands) if len(factors) == 1 else _chain(p, len(factors), y, *operands)
    return y.reshape(y.shape[0], *batch) if bs_last else y.reshape(*batch, y.shape[1])


def _call(
    op: str,
    x: ArrayLike,
    factors: Sequence[ArrayLike],
    bs_last: bool,
    bias: ArrayLike | None,
    activation: str | None,
    algo: str,
    precision: str | None,
) -> jax.Array:
    if activation not in (None, *ACTIVATIONS):
        fail(op, "activation", "None, 'relu', 'gelu' or 'silu'", repr(activation))
    if algo in _TORCH_ONLY:
        raise NotImplementedError(
            f"{op}: algo: expected auto or kernel on JAX arrays, got {algo!r}; write torch's ways with jax.numpy, "
            "such as jnp.einsum('...ikl,ijkl->...ijl', x, w)"
        )
    if algo not in ("auto", "kernel"):
        fail(op, "algo", "auto or kernel", repr(algo))
    bs_last = flag(op, "bs_last", bs_last)
    check_precision(op, precision)
    arrays = [array(op, "w" if op == "ksmm" else f"weights[{n}]", w) for n, w in enumerate(factors)]
    offset = None if bias is None else array(op, "bias", bias)
    return _apply_factors(op, bs_last, activation, precision, array(op, "x", x), arrays, offset)


def ksmm(
    x: ArrayLike,
    w: ArrayLike,
    bs_last: bool = False,
    bias: ArrayLike | None = None,
    activation: str | None = None,
    algo: str = "auto",
    precision: str | None = None,
) -> jax.Array:
    """y = activation(K x + bias) for the Kronecker factor K with weights w (a, b, c, d), whose support is I ⊗ 1 ⊗ I.

    x is (…, a·c·d) and y (…, a·b·d); with `bs_last` features come first. `activation` is None, "relu", "gelu" (with
    erf) or "silu"; `algo` is "auto" or "kernel", which are the same here; `precision` is that of `sdd`.

    >>> ksmm(jnp.ones((7, 40)), jnp.ones((2, 3, 4, 5))).shape
    (7, 30)
    """
    return _call("ksmm", x, [w], bs_last, bias, activation, algo, precision)


def ksmm_chain(
    x: ArrayLike,
    weights: Iterable[ArrayLike],
    bs_last: bool = False,
    bias: ArrayLike | None = None,
    activation: str | None = None,
    algo: str = "auto",
    precision: str | None = None,
) -> jax.Array:
    """One Kronecker factor after another, weights[0] first; bias and activation after the last.

    >>> ksmm_chain(jnp.ones((7, 30)), [jnp.ones((6, 4, 5, 1)), jnp.ones((1, 8, 6, 4))])[0, 0].item()
    30.0
    """
    if not isinstance(weights, Iterable):
        raise TypeError(f"ksmm_chain: weights: expected a sequence of arrays, got {type(weights).__name__}")
    if not (factors := list(weights)):
        fail("ksmm_chain", "weights", "at least one", "none")
    return _call("ksmm_chain", x, factors, bs_last, bias, activation, algo, precision)


def _places(a: int, b: int, c: int, d: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the weights in the matrix; they broadcast to (a, b, c, d)."""
    i, j, k, l = np.ogrid[:a, :b, :c, :d]
    return (i * b + j) * d + l, (i * c + k) * d + l


def to_dense(w: ArrayLike) -> jax.Array:
    """The matrix (a·b·d, a·c·d) of a factor with weights w (a, b, c, d).

    >>> to_dense(jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 2, 2)).tolist()
    [[1.0, 0.0, 3.0, 0.0], [0.0, 2.0, 0.0, 4.0]]
    """
    w = array("to_dense", "w", w)
    check_floating("to_dense", operand("w", w))
    if w.ndim != 4 or 0 in w.shape:
        fail("to_dense", "w", "(a, b, c, d), each at least 1", w.shape)
    a, b, c, d = w.shape
    return jnp.zeros((a * b * d, a * c * d), w.dtype).at[_places(a, b, c, d)].set(w)


def from_dense(dense: ArrayLike, pattern: KroneckerPattern) -> jax.Array:
    """The weights (a, b, c, d) of a matrix that has nothing outside the pattern; RuntimeError where it has.

    The check reads the matrix, so that it cannot be one that is traced.

    >>> import fretwork as fw
    >>> from_dense(jnp.eye(6), fw.KroneckerPattern(2, 1, 1, 3)).shape
    (2, 1, 1, 3)
    """
    dense = array("from_dense", "dense", dense)
    (pattern,) = kronecker_patterns("from_dense", [pattern], "pattern")
    check_floating("from_dense", operand("dense", dense))
    if dense.shape != pattern.shape:
        fail("from_dense", "dense", f"{pattern.shape} for {pattern.text}", dense.shape)
    _check_values("from_dense", "dense", dense)
    places = _places(*pattern.weight_shape)
    outside = np.array(dense)
    outside[places] = 0
    if (bad := np.argwhere(outside)).size:
        row, col = map(int, bad[0])
        got = f"{outside[row, col]} at ({row}, {col})"
        fail("from_dense", "dense", f"zero outside {pattern.text}", got)
    return dense[places]


def project(W: ArrayLike, patterns: Sequence[KroneckerPattern]) -> tuple[list[jax.Array], float]:
    """Weights whose product is near W (out, in), in its dtype, and the relative error: `fretwork.kronecker.project`.

    Computed in float64 on the CPU, of a matrix that is not traced.

    >>> weights, error = project(jnp.ones((12, 20)), monarch(12, 20, 3, 5))
    >>> [w.shape for w in weights], error < 1e-6
    ([(5, 4, 4, 1), (1, 3, 5, 4)], True)
    """
    W = array("project", "W", W)
    check_floating("project", operand("W", W))
    if W.ndim != 2:
        fail("project", "W", "an (out, in) matrix", W.shape)
    _check_values("project", "W", W)
    weights, error = projected(np.asarray(W).astype(np.float64), patterns, os.cpu_count() or 1)
    return [jnp.asarray(w, W.dtype) for w in weights], error


def _check_values(op: str, argument: str, x: jax.Array) -> None:
    if isinstance(x, jax.core.Tracer):
        raise NotImplementedError(
            f"{op}: {argument}: expected an array with values, got one that is traced; call it outside jit and grad"
        )
