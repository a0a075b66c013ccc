"""fretwork.jax.block_conv2d against XLA's dense convolution in float64: values, gradients, vmap and bad calls."""

import os

import numpy as np
import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other test processes use the same GPU
jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax_support import TOLERANCE, dtype, on_device, rejects, rng  # noqa: E402, F401

import fretwork as fw  # noqa: E402
import fretwork.jax as fj  # noqa: E402

GEOMETRIES = [
    ((3, 3), {"padding": 1}),
    ((1, 1), {}),
    ((2, 4), {"padding": "same"}),
    ((3, 2), {"stride": (2, 1), "padding": (2, 0), "dilation": (1, 2)}),
    ((1, 3), {"stride": 3, "padding": "valid"}),
]


def some_mask(rng, kernel):
    mask = rng.random((3, 2, *kernel)) < 0.5
    mask[0, 0, 0, 0], mask[-1] = True, False
    return mask


def reference(x, values, bias, mask, kernel, stride=1, padding=0, dilation=1):
    """XLA's convolution with a dense weight that is made of the mask alone."""
    order = mask.transpose(2, 3, 0, 1)
    b = values.shape[-1]
    blocks = jnp.zeros((*order.shape, b, b), values.dtype).at[order.nonzero()].set(values)
    weight = blocks.transpose(2, 4, 3, 5, 0, 1).reshape(mask.shape[0] * b, mask.shape[1] * b, *kernel)
    stride, dilation = (n if isinstance(n, tuple) else (n, n) for n in (stride, dilation))
    if padding == "same":
        whole = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        padding = [(n // 2, n - n // 2) for n in whole]
    elif padding == "valid":
        padding = [(0, 0), (0, 0)]
    else:
        padding = [(n, n) for n in (padding if isinstance(padding, tuple) else (padding, padding))]
    y = jax.lax.conv_general_dilated(x, weight, stride, padding, rhs_dilation=dilation)
    return y + bias[:, None, None]


def assert_close(got, want, dtype, what):
    assert got.shape == want.shape and got.dtype == dtype, what
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    assert np.abs(got - want).max(initial=0) <= TOLERANCE[dtype] * max(np.abs(want).max(initial=0), 1e-3), what


def problem(rng, kernel, dtype="float32", block=8):
    mask = some_mask(rng, kernel)
    shapes = (2, 2 * block, 7, 6), (int(mask.sum()), block, block), (3 * block,)
    return mask, fw.BlockLayout.for_conv2d(mask, block), [jnp.asarray(rng.standard_normal(s), dtype) for s in shapes]


def test_every_type(rng, dtype):
    check(*GEOMETRIES[3], rng, dtype)


@pytest.mark.parametrize("kernel, geometry", GEOMETRIES, ids=str)
def test_geometries(kernel, geometry, rng):
    check(kernel, geometry, rng, "float32")


def check(kernel, geometry, rng, dtype):
    """The value, with and without bias, and the gradients."""
    mask, layout, operands = problem(rng, kernel, dtype)
    wide = [x.astype("float64") for x in operands]

    def conv(x, values, bias):
        return fj.block_conv2d(x, values, layout, kernel, bias=bias, **geometry)

    got, back = jax.vjp(jax.jit(conv), *operands)
    want, exact = jax.vjp(lambda *w: reference(*w, mask, kernel, **geometry), *wide)
    assert_close(got, want, dtype, "value")
    d = jnp.asarray(rng.standard_normal(want.shape), dtype)
    for name, g, w in zip(("x", "values", "bias"), back(d), exact(d.astype("float64")), strict=True):
        assert_close(g, w, dtype, f"gradient of {name}")
    plain = fj.block_conv2d(*operands[:2], layout, kernel, **geometry)
    assert_close(plain, reference(*wide[:2], 0 * wide[2], mask, kernel, **geometry), dtype, "without bias")


def test_second_derivative(rng):
    mask, layout, operands = problem(rng, (2, 3), "float32")

    def twice(f):
        inner = jax.grad(lambda *o: jnp.sum(jnp.sin(f(*o))), argnums=(0, 1, 2))
        return jax.grad(lambda *o: sum(jnp.sum(jnp.cos(g)) for g in inner(*o)), argnums=(0, 1, 2))(*operands)

    got = twice(lambda x, v, b: fj.block_conv2d(x, v, layout, (2, 3), bias=b))
    for g, w in zip(got, twice(lambda x, v, b: reference(x, v, b, mask, (2, 3))), strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=2e-4 * np.abs(w).max())


@pytest.mark.parametrize(
    "axes", [(0, None, None), (2, None, None), (None, 1, None), (0, 0, 0), (None, None, 0)], ids=str
)
def test_vmap(axes, rng):
    """Images, values and bias mapped or not, and the gradients of each."""
    _, layout, operands = problem(rng, (2, 2))
    mapped = [x if axis is None else jnp.stack([x, 2 * x, x - 1], axis) for x, axis in zip(operands, axes, strict=True)]

    def conv(*o):
        return fj.block_conv2d(*o[:2], layout, 2, bias=o[2])

    def gradients(*o):
        return jax.grad(lambda *o: jnp.sum(conv(*o) ** 2), argnums=(0, 1, 2))(*o)

    each = [[x if a is None else jnp.take(x, n, a) for x, a in zip(mapped, axes, strict=True)] for n in range(3)]
    assert_close(jax.vmap(conv, axes)(*mapped), jnp.stack([conv(*o) for o in each]), "float32", "value")
    for n, g in enumerate(jax.vmap(gradients, axes)(*mapped)):
        assert_close(g, jnp.stack([gradients(*o)[n] for o in each]), "float32", f"gradient {n}")


def test_nothing(rng):
    _, layout, (x, values, bias) = problem(rng, (2, 2))
    empty = fj.block_conv2d(x[:0], values, layout, 2, bias=bias)
    assert empty.shape == (0, 24, 6, 5)
    d = jax.grad(lambda v: fj.block_conv2d(x[:0], v, layout, 2, bias=bias).sum())(values)
    assert not d.any()
    none = fw.BlockLayout.for_conv2d(np.zeros((3, 2, 2, 2)), 8)
    y = fj.block_conv2d(x, values[:0], none, 2, bias=bias)
    np.testing.assert_array_equal(y, jnp.broadcast_to(bias[:, None, None], y.shape))


@pytest.mark.parametrize(
    "change",
    [
        *({"x": x} for x in (jnp.ones((2, 8, 7, 6)), jnp.ones((16, 7, 6)), jnp.ones((2, 16, 1, 6)))),
        *({"x": jnp.ones((2, 16, 7, 6), t)} for t in ("float16", "int32")),
        *({"values": jnp.ones(s)} for s in ((1, 8, 8), (24, 8, 8, 1))),
        *({"bias": jnp.ones(s)} for s in ((8,), (24, 1))),
        *({"kernel_size": k} for k in (3, (2, 2, 1), 2.0)),
        *(
            {"stride": 0},
            {"padding": "full"},
            {"padding": -1},
            {"dilation": "2"},
            {"layout": None},
            {"precision": "low"},
        ),
    ],
    ids=str,
)
def test_bad_calls(change):
    good = {"x": jnp.ones((2, 16, 7, 6), "float32"), "values": jnp.ones((24, 8, 8), "float32")}
    good |= {"layout": fw.BlockLayout.for_conv2d(np.ones((3, 2, 2, 2)), 8), "kernel_size": 2}
    with rejects("block_conv2d", (RuntimeError, TypeError)):
        fj.block_conv2d(**{**good, **change})
