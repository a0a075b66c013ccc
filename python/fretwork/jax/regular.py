"""SPLAT's operators on JAX arrays.

x[i, t] = a[i] · b[column] ties three arrays, and each product gives one from the other two: the gradients of each are
the other two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jax.custom_batching import custom_vmap
from jax.typing import ArrayLike

from fretwork import _shapes
from fretwork._checks import number
from fretwork.jax._handlers import array, differentiable, differentiated_once, fold, foreign, operand
from fretwork.jax._partition import Axis, partitioned
from fretwork.patterns import Pattern
from fretwork.patterns.pattern import row_width

_BATCH_AND_HEADS = [Axis([d, d], [d]) for d in (0, 1)]


class _Product(NamedTuple):
    """Which product; `heads` of the transposed one's result."""

    op: str
    pattern: Pattern
    heads: int = 0

    def shape(self, a: jax.Array, b: jax.Array) -> tuple[int, ...]:
        if self.op == "r_sddmm":
            return *a.shape[:3], row_width(self.pattern, self.op)
        if self.op == "r_spmm":
            return *a.shape[:3], b.shape[3]
        return a.shape[0], self.heads, self.pattern.shape[-1], b.shape[3]


def _folded(call: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The call under vmap: mapped dimensions become part of the batch."""
    mapped = custom_vmap(call)

    @mapped.def_vmap
    def _(size: int, batched: list[bool], *arguments: jax.Array) -> tuple[jax.Array, bool]:
        batch = arguments[0].shape[1 if batched[0] else 0]
        folded = (fold(x, many, size) for x, many in zip(arguments, batched, strict=True))
        result = _folded(call)(*folded)
        return result.reshape(size, batch, *result.shape[1:]), True

    return mapped


@functools.partial(differentiable, static=1)
def _product(p: _Product, a: jax.Array, b: jax.Array) -> jax.Array:
    def call(a: jax.Array, b: jax.Array) -> jax.Array:
        whole = a.shape[1]

        def on_part(a: jax.Array, b: jax.Array) -> list[jax.Array]:
            heads = p.heads if p.heads == 1 or not whole else p.heads * a.shape[1] // whole
            part = p._replace(heads=heads)
            result = jax.ShapeDtypeStruct(part.shape(a, b), a.dtype)
            return [foreign(p.op, result, a, b, pattern=p.pattern.text)]

        return partitioned(on_part, _BATCH_AND_HEADS, (a, b))[0]

    return _folded(call)(a, b)


def _product_forward(p: _Product, a: jax.Array, b: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(p, a, b), (a, b)


def _product_backward(p: _Product, operands: tuple[jax.Array, jax.Array], d: jax.Array) -> tuple[jax.Array, jax.Array]:
    a, b = operands
    sddmm, spmm = _Product("r_sddmm", p.pattern), _Product("r_spmm", p.pattern)
    transposed = _Product("r_spmm_transposed", p.pattern, b.shape[1])
    if p.op == "r_sddmm":
        return _product(spmm, d, b), _product(transposed, d, a)
    if p.op == "r_spmm":
        return _product(sddmm, d, b), _product(transposed, a, d)
    return _product(sddmm, b, d), _product(spmm, a, d)


_product.defvjp(_product_forward, _product_backward)


@functools.partial(differentiable, static=2)
def _softmax(pattern: Pattern, scale: float, x: jax.Array) -> jax.Array:
    def on_part(x: jax.Array) -> list[jax.Array]:
        result = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return [foreign("r_softmax", result, x, pattern=pattern.text, scale=np.float64(scale))]

    def call(x: jax.Array) -> jax.Array:
        return partitioned(on_part, [Axis([d], [d]) for d in (0, 1)], (x,))[0]

    return _folded(call)(x)


def _softmax_forward(pattern: Pattern, scale: float, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    out = _softmax(pattern, scale, x)
    return out, out


def _softmax_backward(pattern: Pattern, scale: float, out: jax.Array, d: jax.Array) -> tuple[jax.Array]:
    def on_part(out: jax.Array, d: jax.Array) -> list[jax.Array]:
        result, options = jax.ShapeDtypeStruct(out.shape, out.dtype), {"scale": np.float64(scale)}
        return [foreign("r_softmax_backward", result, out, d, pattern=pattern.text, **options)]

    def call(out: jax.Array, d: jax.Array) -> jax.Array:
        return partitioned(on_part, _BATCH_AND_HEADS, (out, d))[0]

    return (differentiated_once("r_softmax", _folded(call), "apply jax.nn.softmax to its entries")(out, d),)


_softmax.defvjp(_softmax_forward, _softmax_backward)


def _check_pattern(op: str, pattern: object) -> None:
    if not isinstance(pattern, Pattern):
        raise TypeError(f"{op}: pattern: expected a fretwork.Pattern, got {type(pattern).__name__}")


@functools.partial(jax.jit, static_argnums=(0,))
def _checked_sddmm(pattern: Pattern, q: jax.Array, k: jax.Array) -> jax.Array:
    _shapes.check_r_sddmm(operand("q", q), operand("k", k), pattern)
    return _product(_Product("r_sddmm", pattern), q, k)


@functools.partial(jax.jit, static_argnums=(0,))
def _checked_spmm(pattern: Pattern, x: jax.Array, v: jax.Array) -> jax.Array:
    _shapes.check_r_spmm(operand("x", x), operand("v", v), pattern)
    return _product(_Product("r_spmm", pattern), x, v)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _checked_softmax(pattern: Pattern, scale: float, x: jax.Array) -> jax.Array:
    _shapes.check_r_softmax(operand("x", x), pattern)
    return _softmax(pattern, scale, x)


def r_sddmm(q: ArrayLike, k: ArrayLike, pattern: Pattern) -> jax.Array:
    """The scores q kᵀ that a pattern holds, (B, Hq, Sq, W); see `fretwork.r_sddmm`.

    >>> import jax.numpy as jnp, fretwork as fw
    >>> r_sddmm(jnp.ones((1, 2, 9, 4)), jnp.ones((1, 2, 9, 4)), fw.Pattern.parse("sliding_window(9, 2, 0)")).shape
    (1, 2, 9, 3)
    """
    _check_pattern("r_sddmm", pattern)
    return _checked_sddmm(pattern, array("r_sddmm", "q", q), array("r_sddmm", "k", k))


def r_softmax(x: ArrayLike, pattern: Pattern, scale: float = 1.0) -> jax.Array:
    """Softmax of scale · x over the entries of each row; see `fretwork.r_softmax`.

    >>> import jax.numpy as jnp, fretwork as fw
    >>> r_softmax(jnp.zeros((1, 1, 9, 3)), fw.Pattern.parse("sliding_window(9, 2, 0)"))[0, 0, 1].tolist()
    [0.5, 0.5, 0.0]
    """
    _check_pattern("r_softmax", pattern)
    return _checked_softmax(pattern, number("r_softmax", "scale", scale), array("r_softmax", "x", x))


def r_spmm(x: ArrayLike, v: ArrayLike, pattern: Pattern) -> jax.Array:
    """x v for weights x as `r_sddmm` stores them; see `fretwork.r_spmm`.

    >>> import jax.numpy as jnp, fretwork as fw
    >>> pattern = fw.Pattern.parse("sliding_window(9, 2, 0)")
    >>> r_spmm(jnp.ones((1, 1, 9, 3)), jnp.ones((1, 1, 9, 4)), pattern)[0, 0, :3, 0].tolist()
    [1.0, 2.0, 3.0]
    """
    _check_pattern("r_spmm", pattern)
    return _checked_spmm(pattern, array("r_spmm", "x", x), array("r_spmm", "v", v))
