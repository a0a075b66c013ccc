"""Block-sparse products, softmax and packing on JAX arrays."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.typing import ArrayLike

from fretwork import _shapes
from fretwork._checks import fail, flag, number
from fretwork._shapes import both
from fretwork.jax._handlers import (
    array,
    check_layout,
    check_precision,
    default_precision,
    differentiable,
    differentiated_once,
    foreign,
    one_by_one,
    operand,
)
from fretwork.jax._partition import Axis, partitioned
from fretwork.patterns import BlockLayout


def _four(x: jax.Array) -> jax.Array:
    """With the missing leading dimensions."""
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _batch(operands: Sequence[jax.Array], result: int | None) -> Axis:
    """Z, of operands that have one; a single element is whole on every device."""
    return Axis([0 if x.shape[0] != 1 else None for x in operands], [result])


# Products. `mode` says which of C, A, B is sparse in C = op(A)·op(B).


class _Product(NamedTuple):
    """What a product is, besides its operands, which have four dimensions here."""

    mode: str
    layout: BlockLayout
    trans_a: bool
    trans_b: bool
    precision: str
    sum_z: bool = False
    sum_h: bool = False

    def shape(self, a: jax.Array, b: jax.Array) -> tuple[int, ...]:
        transposed, summed = (self.trans_a, self.trans_b), (self.sum_z, self.sum_h)
        return tuple(_shapes.product_shape(self.mode, a.shape, b.shape, self.layout, *transposed, *summed))


def _fold(x: jax.Array, batched: bool, size: int, z: int) -> jax.Array:
    """A mapped dimension becomes part of Z; what has neither stays one matrix that all share."""
    if not batched:
        if x.shape[0] == 1:
            return x
        x = x[None]
    return jnp.broadcast_to(x, (size, z, *x.shape[2:])).reshape(size * z, *x.shape[2:])


def _unfold(x: jax.Array, size: int, z: int) -> jax.Array:
    return x.reshape(size, z, *x.shape[1:])


def _matmul_call(p: _Product, a: jax.Array, b: jax.Array) -> jax.Array:
    def on_part(a: jax.Array, b: jax.Array) -> list[jax.Array]:
        result = jax.ShapeDtypeStruct(p.shape(a, b), a.dtype)
        options = {"trans_a": p.trans_a, "trans_b": p.trans_b, "sum_z": p.sum_z, "sum_h": p.sum_h}
        return [foreign("matmul", result, a, b, mode=p.mode, layout=p.layout.text, precision=p.precision, **options)]

    @custom_vmap
    def call(a: jax.Array, b: jax.Array) -> jax.Array:
        return partitioned(on_part, [_batch((a, b), None if p.sum_z else 0)], (a, b))[0]

    @call.def_vmap
    def _(size: int, batched: list[bool], a: jax.Array, b: jax.Array) -> tuple[jax.Array, bool]:
        z = both(*(x.shape[1 if many else 0] for x, many in zip((a, b), batched, strict=True)))
        folded = (_fold(x, many, size, z) for x, many in zip((a, b), batched, strict=True))
        out = _unfold(_matmul_call(p._replace(sum_z=False), *folded), size, z)
        return out.sum(axis=1, keepdims=True) if p.sum_z else out, True

    return call(a, b)


@functools.partial(differentiable, static=1)
def _matmul(p: _Product, a: jax.Array, b: jax.Array) -> jax.Array:
    return _matmul_call(p, a, b)


def _matmul_forward(p: _Product, a: jax.Array, b: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _matmul(p, a, b), (a, b)


def _matmul_backward(p: _Product, operands: tuple[jax.Array, jax.Array], d: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two products: dA = dC·op(B)ᵀ and dB = op(A)ᵀ·dC, each transposed as its operand is."""
    a, b = operands
    c_kind, a_kind, b_kind = tuple(p.mode)

    def product(like: jax.Array, mode: str, left: tuple[jax.Array, bool], right: tuple[jax.Array, bool]) -> jax.Array:
        (x, trans_x), (y, trans_y) = left, right
        q = _Product(mode, p.layout, trans_x, trans_y, p.precision)
        heads = p.layout.heads if mode[0] == "s" else like.shape[1]
        sum_z = like.shape[0] == 1 and both(x.shape[0], y.shape[0]) != 1
        q = q._replace(sum_z=sum_z, sum_h=heads == 1 and _shapes.heads(mode, x.shape, y.shape, p.layout) != 1)
        return jnp.broadcast_to(_matmul(q, x, y), like.shape)

    if p.trans_a:
        d_a = product(a, a_kind + b_kind + c_kind, (b, p.trans_b), (d, True))
    else:
        d_a = product(a, a_kind + c_kind + b_kind, (d, False), (b, not p.trans_b))
    if p.trans_b:
        d_b = product(b, b_kind + c_kind + a_kind, (d, True), (a, p.trans_a))
    else:
        d_b = product(b, b_kind + a_kind + c_kind, (a, not p.trans_a), (d, False))
    return d_a, d_b


_matmul.defvjp(_matmul_forward, _matmul_backward)


def _names(mode: str) -> list[str]:
    """Of the two operands."""
    return ["values" if kind == "s" else name for name, kind in zip("ab", mode[1:], strict=True)]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _product(
    mode: str, layout: BlockLayout, trans_a: bool, trans_b: bool, precision: str | None, a: jax.Array, b: jax.Array
) -> jax.Array:
    p = _Product(mode, layout, trans_a, trans_b, precision or default_precision())
    first, second = _names(mode)
    _shapes.check_product(mode, operand(first, a), operand(second, b), layout, trans_a, trans_b)
    return _matmul(p, _four(a), _four(b)).reshape(p.shape(a, b))


def _call_product(
    mode: str, a: ArrayLike, b: ArrayLike, layout: BlockLayout, trans_a: bool, trans_b: bool, precision: str | None
) -> jax.Array:
    check_layout(mode, layout)
    check_precision(mode, precision)
    transposed = flag(mode, "trans_a", trans_a), flag(mode, "trans_b", trans_b)
    arrays = (array(mode, name, x) for name, x in zip(_names(mode), (a, b), strict=True))
    return _product(mode, layout, *transposed, precision, *arrays)


def sdd(
    a: ArrayLike,
    b: ArrayLike,
    layout: BlockLayout,
    trans_a: bool = False,
    trans_b: bool = False,
    precision: str | None = None,
) -> jax.Array:
    """Sparse = op(a)·op(b) at the blocks of `layout`: packed (Z, nnz, rows, cols).

    `precision` says how fp32 runs on a GPU ("ieee", "tf32", "tf32x3"); None follows `jax.default_matmul_precision`.

    >>> layout = BlockLayout([[1, 0], [1, 1]], block=8)
    >>> sdd(jnp.ones((16, 4)), jnp.ones((4, 16)), layout).shape
    (3, 8, 8)
    """
    return _call_product("sdd", a, b, layout, trans_a, trans_b, precision)


def dsd(
    values: ArrayLike,
    b: ArrayLike,
    layout: BlockLayout,
    trans_a: bool = False,
    trans_b: bool = False,
    precision: str | None = None,
) -> jax.Array:
    """Dense = op(sparse)·op(b); `layout` is that of the sparse operand as stored.

    >>> layout = BlockLayout([[1, 0], [1, 1]], block=8)
    >>> dsd(jnp.ones((3, 8, 8)), jnp.ones((16, 2)), layout)[:, 0].tolist()[6:10]
    [8.0, 8.0, 16.0, 16.0]
    """
    return _call_product("dsd", values, b, layout, trans_a, trans_b, precision)


def dds(
    a: ArrayLike,
    values: ArrayLike,
    layout: BlockLayout,
    trans_a: bool = False,
    trans_b: bool = False,
    precision: str | None = None,
) -> jax.Array:
    """Dense = op(a)·op(sparse); `layout` is that of the sparse operand as stored.

    >>> layout = BlockLayout([[1, 0], [1, 1]], block=8)
    >>> dds(jnp.ones((2, 16)), jnp.ones((3, 8, 8)), layout)[0].tolist()[6:10]
    [16.0, 16.0, 8.0, 8.0]
    """
    return _call_product("dds", a, values, layout, trans_a, trans_b, precision)


# Softmax. Values and rpe have four dimensions below the checks.


class _Softmax(NamedTuple):
    """What a softmax is, besides its values and extras."""

    layout: BlockLayout
    scale: float
    extras: str  # which of rpe, key_padding_mask and attn_mask follow the values, as "r", "k", "a"
    key_padding_mask_mode: str
    attn_mask_mode: str
    rpe: tuple[tuple[int, ...], Any] | None  # shape and dtype, for its gradient


def _softmax_call(p: _Softmax, values: jax.Array, *extras: jax.Array) -> jax.Array:
    def on_part(values: jax.Array, *extras: jax.Array) -> list[jax.Array]:
        options = {"key_padding_mask_mode": p.key_padding_mask_mode, "attn_mask_mode": p.attn_mask_mode}
        options |= {"layout": p.layout.text, "extras": p.extras}
        result = jax.ShapeDtypeStruct(values.shape, values.dtype)
        return [foreign("softmax", result, values, *extras, scale=np.float64(p.scale), **options)]

    @custom_vmap
    def call(values: jax.Array, *extras: jax.Array) -> jax.Array:
        axes = [] if extras else [_batch((values,), 0)]
        return partitioned(on_part, axes, (values, *extras))[0]

    @call.def_vmap
    def _(size: int, batched: list[bool], values: jax.Array, *extras: jax.Array) -> tuple[jax.Array, bool]:
        arguments = (values, *extras)
        if "a" in p.extras and batched[-1]:  # attn_mask has no Z to fold into
            return one_by_one(functools.partial(_softmax_call, p), batched, arguments), True
        z = values.shape[1 if batched[0] else 0]
        folded = []
        for kind, many, x in zip("v" + p.extras, batched, arguments, strict=True):
            if kind in "vk" and not many:  # these need all of Z
                x, many = jnp.broadcast_to(x, (size, *x.shape)), True
            folded.append(x if kind == "a" else _fold(x, many, size, z))
        return _unfold(_softmax_call(p, *folded), size, z), True

    return call(values, *extras)


def _softmax_gradients(p: _Softmax, out: jax.Array, d: jax.Array) -> Sequence[jax.Array]:
    """Of the values, and of rpe where there is one."""

    def on_part(out: jax.Array, d: jax.Array) -> Sequence[jax.Array]:
        shapes = [(out.shape, out.dtype), *([p.rpe] if p.rpe else [])]
        results = [jax.ShapeDtypeStruct(*s) for s in shapes]
        return foreign("softmax_backward", results, out, d, layout=p.layout.text, scale=np.float64(p.scale))

    @custom_vmap
    def call(out: jax.Array, d: jax.Array) -> Sequence[jax.Array]:
        return partitioned(on_part, [] if p.rpe else [_batch((out, d), 0)], (out, d))

    @call.def_vmap
    def _(size: int, batched: list[bool], out: jax.Array, d: jax.Array) -> tuple[list[jax.Array], list[bool]]:
        z = out.shape[1 if batched[0] else 0]
        whole = (size, z, *out.shape[-3:])
        folded = [_fold(jnp.broadcast_to(x, whole), True, size, z) for x in (out, d)]
        rpe = p.rpe and ((size * z, *p.rpe[0][1:]), p.rpe[1])
        results = [_unfold(x, size, z) for x in _softmax_gradients(p._replace(rpe=rpe), *folded)]
        if p.rpe and p.rpe[0][0] != z:
            results[1] = results[1].sum(axis=1, keepdims=True)
        return results, [True] * len(results)

    instead = "apply jax.nn.softmax to unpack(values, layout, fill=-jnp.inf)"
    return differentiated_once("block_softmax", call, instead)(out, d)


@functools.partial(differentiable, static=1)
def _softmax(p: _Softmax, values: jax.Array, *extras: jax.Array) -> jax.Array:
    return _softmax_call(p, values, *extras)


def _softmax_forward(p: _Softmax, values: jax.Array, *extras: jax.Array) -> tuple[jax.Array, jax.Array]:
    out = _softmax(p, values, *extras)
    return out, out


def _softmax_backward(p: _Softmax, out: jax.Array, d: jax.Array) -> tuple[jax.Array | None, ...]:
    if p.rpe and p.rpe[0][-1] == 1:  # softmax is shift-invariant
        gradients = [*_softmax_gradients(p._replace(rpe=None), out, d), jnp.zeros(*p.rpe)]
    else:
        gradients = [*_softmax_gradients(p, out, d)]
    return *gradients, *(None for kind in p.extras if kind != "r")  # masks have none


_softmax.defvjp(_softmax_forward, _softmax_backward)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _checked_softmax(
    layout: BlockLayout,
    scale: float,
    key_padding_mask_mode: str,
    attn_mask_mode: str,
    values: jax.Array,
    extras: dict[str, jax.Array],
) -> jax.Array:
    operands = [operand(name, x) for name, x in extras.items()]
    _shapes.check_softmax(operand("values", values), layout, operands, key_padding_mask_mode, attn_mask_mode)
    ordered = {name: extras[name] for name in ("rpe", "key_padding_mask", "attn_mask") if name in extras}
    rpe = None
    if "rpe" in ordered:
        ordered["rpe"] = _four(ordered["rpe"])
        rpe = (ordered["rpe"].shape, ordered["rpe"].dtype)
    kinds = "".join(name[0] for name in ordered)
    p = _Softmax(layout, scale, kinds, key_padding_mask_mode, attn_mask_mode, rpe)
    return _softmax(p, _four(values), *ordered.values()).reshape(values.shape)


def block_softmax(
    values: ArrayLike,
    layout: BlockLayout,
    scale: float = 1.0,
    rpe: ArrayLike | None = None,
    key_padding_mask: ArrayLike | None = None,
    attn_mask: ArrayLike | None = None,
    key_padding_mask_mode: str = "add",
    attn_mask_mode: str = "add",
) -> jax.Array:
    """Softmax over the stored entries of each row of values·scale + rpe + key padding + attention mask.

    `rpe` broadcasts to (Z, H, M, N); `key_padding_mask` is (Z, N), `attn_mask` (M, N) or (H, M, N). Mode "add" adds a
    mask, "mul" turns its zeros into −inf. A row with nothing left gives zeros. Gradients go to values and rpe; masks
    count as constants: add what learns to rpe.

    >>> layout = BlockLayout([[1, 0], [1, 1]], block=8)
    >>> block_softmax(jnp.zeros((3, 8, 8)), layout)[:, 0, 0].tolist()
    [0.125, 0.0625, 0.0625]
    """
    op = "block_softmax"
    check_layout(op, layout)
    for name, mode in (("key_padding_mask_mode", key_padding_mask_mode), ("attn_mask_mode", attn_mask_mode)):
        if mode not in ("add", "mul"):
            fail(op, name, '"add" or "mul"', repr(mode))
    scale = number(op, "scale", scale)
    given = {"rpe": rpe, "key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
    extras = {name: array(op, name, x) for name, x in given.items() if x is not None}
    for name, mode in (("key_padding_mask", key_padding_mask_mode), ("attn_mask", attn_mask_mode)):
        if mode == "mul" and name in extras and jnp.issubdtype(extras[name].dtype, jnp.integer):
            extras[name] = extras[name] != 0
    return _checked_softmax(layout, scale, key_padding_mask_mode, attn_mask_mode, array(op, "values", values), extras)


# Dense to packed and back; each is the other's gradient.


def _copy_call(op: str, layout: BlockLayout, fill: float, x: jax.Array) -> jax.Array:
    def on_part(x: jax.Array) -> list[jax.Array]:
        shape = _shapes.packed_shape(layout) if op == "pack" else layout.shape
        options = {} if op == "pack" else {"fill": np.float64(fill)}
        result = jax.ShapeDtypeStruct((x.shape[0], *shape), x.dtype)
        return [foreign(op, result, x, layout=layout.text, **options)]

    @custom_vmap
    def call(x: jax.Array) -> jax.Array:
        return partitioned(on_part, [_batch((x,), 0)], (x,))[0]

    @call.def_vmap
    def _(size: int, batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
        z = x.shape[1]
        return _unfold(_copy_call(op, layout, fill, _fold(x, True, size, z)), size, z), True

    return call(x)


@functools.partial(differentiable, static=3)
def _copy(op: str, layout: BlockLayout, fill: float, x: jax.Array) -> jax.Array:
    return _copy_call(op, layout, fill, x)


def _copy_forward(op: str, layout: BlockLayout, fill: float, x: jax.Array) -> tuple[jax.Array, None]:
    return _copy(op, layout, fill, x), None


def _copy_backward(op: str, layout: BlockLayout, fill: float, _: None, d: jax.Array) -> tuple[jax.Array]:
    return (_copy("unpack" if op == "pack" else "pack", layout, 0.0, d),)


_copy.defvjp(_copy_forward, _copy_backward)


@functools.partial(jax.jit, static_argnums=(1,))
def _pack(dense: jax.Array, layout: BlockLayout) -> jax.Array:
    _shapes.check_pack(operand("dense", dense), layout)
    values = _copy("pack", layout, 0.0, _four(dense))
    return values if dense.ndim == 4 else values[0]


def pack(dense: ArrayLike, layout: BlockLayout) -> jax.Array:
    """The stored blocks of a dense (Z, H, M, N) array, in the order of the mask's non-zeros: (Z, nnz, rows, cols).

    Z may be missing, and H too for a layout of one head.

    >>> pack(jnp.ones((16, 16)), BlockLayout([[1, 0], [1, 1]], block=8)).shape
    (3, 8, 8)
    """
    check_layout("pack", layout)
    return _pack(array("pack", "dense", dense), layout)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _unpack(values: jax.Array, layout: BlockLayout, fill: float) -> jax.Array:
    _shapes.check_unpack(operand("values", values), layout, fill)
    dense = _copy("unpack", layout, fill, _four(values))
    return dense if values.ndim == 4 else dense[0]


def unpack(values: ArrayLike, layout: BlockLayout, fill: float = 0.0) -> jax.Array:
    """The dense (Z, H, M, N) array of packed values, with `fill` where there is no block.

    >>> unpack(jnp.ones((3, 8, 8)), BlockLayout([[1, 0], [1, 1]], block=8))[0, 0, 6:10].tolist()
    [1.0, 1.0, 0.0, 0.0]
    """
    check_layout("unpack", layout)
    return _unpack(array("unpack", "values", values), layout, number("unpack", "fill", fill))
