"""The block-sparse convolution on JAX arrays."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.typing import ArrayLike

from fretwork import _shapes
from fretwork._shapes import ConvGeometry
from fretwork.jax._handlers import (
    array,
    check_layout,
    check_precision,
    default_precision,
    differentiable,
    foreign,
    one_by_one,
    operand,
)
from fretwork.jax._partition import Axis, partitioned
from fretwork.patterns import BlockLayout


class _Conv(NamedTuple):
    """What a convolution is, besides its operands."""

    layout: BlockLayout
    geometry: ConvGeometry
    precision: str
    size: tuple[int, int]  # height and width of x


# y = S ∗ x ties three arrays. Each call gives one from the other two: "" the convolution from x and S (and a bias),
# "_backward_x" what x is from y and S, "_backward_values" what S is from x and y. So the gradients of each are the
# other two.


def _shape(kind: str, p: _Conv, a: jax.Array) -> tuple[int, ...]:
    if kind == "_backward_values":
        return _shapes.packed_shape(p.layout)
    if kind == "_backward_x":
        return a.shape[0], p.layout.shape[2], *p.size
    kernel, stride, padding, dilation = p.geometry
    ends = (
        (p.size[d] + padding[d] + padding[2 + d] - (kernel[d] - 1) * dilation[d] - 1) // stride[d] + 1 for d in (0, 1)
    )
    return a.shape[0], p.layout.shape[1], *ends


def _call(kind: str, p: _Conv, a: jax.Array, b: jax.Array, *bias: jax.Array) -> jax.Array:
    def on_part(a: jax.Array, b: jax.Array, *bias: jax.Array) -> list[jax.Array]:
        result = jax.ShapeDtypeStruct(_shape(kind, p, a), a.dtype)
        numbers = {name: np.array(given, np.int64) for name, given in p.geometry._asdict().items()}
        options = {"layout": p.layout.text, "precision": p.precision, **numbers}
        return [foreign(f"block_conv2d{kind}", result, a, b, *bias, **options)]

    @custom_vmap
    def call(a: jax.Array, b: jax.Array, *bias: jax.Array) -> jax.Array:
        both = kind == "_backward_values"  # of images and gradients, over whose batch it sums
        axis = Axis([0, 0 if both else None, *[None] * len(bias)], [None if both else 0])
        return partitioned(on_part, [axis], (a, b, *bias))[0]

    @call.def_vmap
    def _(size: int, batched: list[bool], *operands: jax.Array) -> tuple[jax.Array, bool]:
        if kind == "_backward_values" or any(batched[1:]):  # only images have an N to fold into
            return one_by_one(functools.partial(_call, kind, p), batched, operands), True
        images, *rest = operands
        folded = _call(kind, p, images.reshape(-1, *images.shape[2:]), *rest)
        return folded.reshape(*images.shape[:2], *folded.shape[1:]), True

    return call(a, b, *bias)


@functools.partial(differentiable, static=2)
def _conv(kind: str, p: _Conv, a: jax.Array, b: jax.Array, *bias: jax.Array) -> jax.Array:
    return _call(kind, p, a, b, *bias)


def _forward(
    kind: str, p: _Conv, a: jax.Array, b: jax.Array, *bias: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _conv(kind, p, a, b, *bias), (a, b, *bias)


def _backward(kind: str, p: _Conv, operands: tuple[jax.Array, ...], d: jax.Array) -> tuple[jax.Array, ...]:
    a, b, *bias = operands
    if kind == "_backward_values":
        return _conv("_backward_x", p, b, d), _conv("", p, a, d)
    if kind == "_backward_x":
        return _conv("", p, d, b), _conv("_backward_values", p, d, a)
    d_bias = [d.sum((0, 2, 3), dtype=jnp.promote_types(d.dtype, jnp.float32)).astype(d.dtype)] if bias else []
    return _conv("_backward_x", p, d, b), _conv("_backward_values", p, a, d), *d_bias


_conv.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _checked(
    layout: BlockLayout,
    geometry: ConvGeometry,
    precision: str | None,
    x: jax.Array,
    values: jax.Array,
    *bias: jax.Array,
) -> jax.Array:
    named = zip(("x", "values", "bias"), (x, values, *bias), strict=False)
    _shapes.check_conv2d([operand(*one) for one in named], layout, geometry)
    height, width = x.shape[2:]
    return _conv("", _Conv(layout, geometry, precision or default_precision(), (height, width)), x, values, *bias)


def block_conv2d(
    x: ArrayLike,
    values: ArrayLike,
    layout: BlockLayout,
    kernel_size: int | tuple[int, int],
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    bias: ArrayLike | None = None,
    precision: str | None = None,
) -> jax.Array:
    """A convolution of images (N, C, H, W) with a weight that has the blocks of `layout` and nothing else.

    `layout` is that of `BlockLayout.for_conv2d`, `values` are its blocks packed, (nnz, rows, cols). `padding` may be
    "same", which needs a stride of 1, or "valid". `precision` as for `sdd`.

    >>> layout = BlockLayout.for_conv2d(np.ones((2, 1, 3, 3)), block=8)
    >>> block_conv2d(jnp.ones((5, 8, 6, 6)), jnp.ones((18, 8, 8)), layout, 3, padding="same")[0, 0, 0].tolist()
    [32.0, 48.0, 48.0, 48.0, 48.0, 32.0]
    """
    op = "block_conv2d"
    check_layout(op, layout)
    check_precision(op, precision)
    geometry = _shapes.conv_geometry(op, kernel_size, stride, padding, dilation)
    rest = () if bias is None else (array(op, "bias", bias),)
    return _checked(layout, geometry, precision, array(op, "x", x), array(op, "values", values), *rest)
