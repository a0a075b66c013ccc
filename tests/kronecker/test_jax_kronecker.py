"""fretwork.jax.ksmm and ksmm_chain against einsum in float64: values, gradients, vmap, layouts and bad calls."""

import math
import os

import numpy as np
import pytest
import torch

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other test processes use the same GPU
jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax_support import assert_close, check, dtype, on_device, rejects, rng  # noqa: E402, F401

import fretwork as fw  # noqa: E402
import fretwork.jax as fj  # noqa: E402

ACTIVATIONS = {
    None: lambda y: y,
    "relu": jax.nn.relu,
    "gelu": lambda y: jax.nn.gelu(y, approximate=False),
    "silu": jax.nn.silu,
}
both_layouts = pytest.mark.parametrize("bs_last", [False, True], ids=["first", "last"])


def reference(x, *weights, bias=None, bs_last=False, activation=None):
    y = jnp.moveaxis(x, 0, -1) if bs_last else x
    for w in weights:
        a, b, c, d = w.shape
        y = jnp.einsum("...ikl,ijkl->...ijl", y.reshape(*y.shape[:-1], a, c, d), w).reshape(*y.shape[:-1], a * b * d)
    y = ACTIVATIONS[activation](y if bias is None else y + bias)
    return jnp.moveaxis(y, -1, 0) if bs_last else y


def functions(**options):
    """ksmm and its reference, with and without a bias."""
    return (
        lambda x, w, *bias: fj.ksmm(x, w, bias=bias[0] if bias else None, **options),
        lambda x, w, *bias: reference(x, w, bias=bias[0] if bias else None, **options),
    )


def arrays(rng, patterns, batch, dtype="float32", bs_last=False):
    (a, _, c, d), (e, b, _, f) = patterns[0], patterns[-1]
    x = (a * c * d, *batch) if bs_last else (*batch, a * c * d)
    made = [rng.standard_normal(x), *(rng.standard_normal(p) / np.sqrt(p[2]) for p in patterns)]
    return [jnp.asarray(t, dtype) for t in (*made, rng.standard_normal(e * b * f))]


CASES = [
    ((1, 3, 5, 1), (7,)),
    ((2, 3, 4, 5), (2, 3, 9)),
    ((3, 8, 2, 1), ()),
    ((1, 16, 24, 7), (33,)),
    ((4, 1, 1, 3), (0,)),
]


@both_layouts
@pytest.mark.parametrize("abcd, batch", CASES, ids=str)
def test_product(abcd, batch, bs_last, dtype, rng):
    inputs = arrays(rng, [abcd], batch, dtype, bs_last)
    function, exact = functions(bs_last=bs_last)
    check(function, exact, inputs, rng, dtype)
    check(function, exact, inputs[:2], rng, dtype)


@both_layouts
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_activations(activation, bs_last, dtype, rng):
    x, w, bias = arrays(rng, [(2, 3, 4, 5)], (3, 30), dtype, bs_last)
    x, w, bias = jnp.round(x), jnp.round(2 * w), jnp.round(bias) + jnp.asarray(0.5, dtype)  # so that no sum is zero
    check(*functions(bs_last=bs_last, activation=activation), [x, w, bias], rng, dtype)


@both_layouts
@pytest.mark.parametrize(
    "patterns", [[(6, 4, 5, 1), (1, 8, 3, 8)], [(2, 3, 5, 4), (4, 3, 2, 3), (1, 5, 6, 6)]], ids=len
)
def test_chain(patterns, bs_last, dtype, rng):
    x, *weights, bias = arrays(rng, patterns, (2, 5), dtype, bs_last)
    options = {"bs_last": bs_last, "activation": "silu"}
    if dtype in ("float16", "bfloat16"):  # the sums between the factors are rounded
        y = fj.ksmm_chain(x, weights, bias=bias, **options)
        for w in weights[:-1]:
            x = fj.ksmm(x, w, bs_last)
        assert jnp.array_equal(y, fj.ksmm(x, weights[-1], bias=bias, **options))
        return
    check(
        lambda x, b, *ws: fj.ksmm_chain(x, ws, bias=b, **options),
        lambda x, b, *ws: reference(x, *ws, bias=b, **options),
        [x, bias, *weights],
        rng,
        dtype,
    )


def test_a_chain_of_many_keeps_its_order(rng):
    x, *weights, _ = arrays(rng, [(1, 2, 2, 1)] * 12, (3,))
    check(lambda x, *ws: fj.ksmm_chain(x, ws), reference, [x, *weights], rng)


@both_layouts
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_second_derivative(activation, bs_last, rng, on_device):
    kind = "float64" if on_device.platform == "cpu" else "float32"
    inputs = arrays(rng, [(2, 2, 3, 2)], (4,), kind, bs_last)

    def twice(f):
        def loss(*t):
            first = jax.grad(lambda *t: (f(*t) ** 2).sum(), (0, 1, 2))(*t)
            return sum(jnp.sin(g).sum() for g in first)

        return jax.jit(jax.grad(loss, (0, 1, 2)))

    function, exact = functions(bs_last=bs_last, activation=activation)
    wide = [t.astype("float64") for t in inputs]
    for one, other in zip(twice(function)(*inputs), twice(exact)(*wide), strict=True):
        assert_close(one, other, kind, "second derivative")


@both_layouts
@pytest.mark.parametrize("axes", [(0, None, None), (1, 0, None), (None, 2, 0), (None, None, 1), (1, 4, 1)], ids=str)
def test_vmap(axes, bs_last, rng):
    """Values and gradients, inside and outside the map, against the reference mapped by jax itself."""
    inputs = []
    for t, axis in zip(arrays(rng, [(2, 3, 4, 2)], (5,), bs_last=bs_last), axes, strict=True):
        many = jnp.asarray(rng.standard_normal((3, *t.shape)), t.dtype)
        inputs.append(t if axis is None else jnp.moveaxis(many, 0, axis))
    function, exact = functions(bs_last=bs_last, activation="silu")
    check(jax.vmap(function, axes), jax.vmap(exact, axes), inputs, rng)
    inside = lambda f: jax.vmap(jax.grad(lambda *t: (f(*t) ** 2).sum(), (0, 1, 2)), axes)  # noqa: E731
    wide = [t.astype("float64") for t in inputs]
    for got, want in zip(jax.jit(inside(function))(*inputs), jax.jit(inside(exact))(*wide), strict=True):
        assert_close(got, want, "float32", "gradient inside vmap")


@pytest.mark.parametrize("axes", [(0, None, None), (1, 0, None), (None, None, 0)], ids=str)
def test_vmap_of_a_chain(axes, rng):
    patterns = [(2, 3, 4, 1), (1, 5, 2, 3)]
    inputs = []
    for t, axis in zip(arrays(rng, patterns, (5,))[:-1], axes, strict=True):
        many = jnp.asarray(rng.standard_normal((3, *t.shape)), t.dtype)
        inputs.append(t if axis is None else jnp.moveaxis(many, 0, axis))
    function = lambda x, *weights: fj.ksmm_chain(x, weights, activation="gelu")  # noqa: E731
    exact = lambda x, *weights: reference(x, *weights, activation="gelu")  # noqa: E731
    check(jax.vmap(function, axes), jax.vmap(exact, axes), inputs, rng)


def test_nested_vmap(rng):
    x, w, _ = (jnp.asarray(rng.standard_normal((3, 2, *t.shape)), "float32") for t in arrays(rng, [(2, 3, 4, 2)], (5,)))
    check(jax.vmap(jax.vmap(fj.ksmm)), jax.vmap(jax.vmap(reference)), [x, w], rng)


BAD = {
    "features": {"x": (3, 41)},
    "batch last": {"bs_last": True},
    "no features": {"x": ()},
    "rank": {"w": (2, 3, 20)},
    "empty weight": {"w": (2, 0, 4, 5)},
    "bias": {"bias": jnp.zeros(1)},
    "bias dtype": {"bias": jnp.zeros(30, "bfloat16")},
    "weight dtype": {"w": jnp.zeros((2, 3, 4, 5), "float16")},
    "activation": {"activation": "tanh"},
    "precision": {"precision": "fast"},
}


@pytest.mark.parametrize("bad", BAD)
def test_refused(bad):
    call = {"x": (3, 40), "w": (2, 3, 4, 5)} | BAD[bad]
    call = {k: jnp.zeros(v, "float32") if isinstance(v, tuple) else v for k, v in call.items()}
    with rejects("ksmm"):
        fj.ksmm(**call)


def test_refused_chains():
    x, weights = jnp.zeros((7, 40)), [jnp.zeros(s) for s in [(2, 3, 5, 4), (5, 3, 3, 2)]]
    with pytest.raises(RuntimeError, match=r"^ksmm_chain: weights\[1\]: expected 24 .*, got 30 of"):
        fj.ksmm_chain(x, weights)
    with pytest.raises(RuntimeError, match=r"^ksmm_chain: x for weights\[0\]: expected \(…, 30\), a·c·d, got"):
        fj.ksmm_chain(x, weights[1:])
    with pytest.raises(RuntimeError, match=r"^ksmm_chain: weights: expected at least one, got none"):
        fj.ksmm_chain(x, [])
    with pytest.raises(TypeError, match=r"^ksmm_chain: weights: expected a sequence of arrays, got NoneType"):
        fj.ksmm_chain(x, None)


def test_algos():
    """Arguments stand in the order that torch's have; the ways of torch itself are not here."""
    x, w = jnp.ones((3, 40)), jnp.ones((2, 3, 4, 5))
    assert jnp.array_equal(fj.ksmm(x, w, False, None, None, "kernel", "ieee"), fj.ksmm_chain(x, [w], algo="auto"))
    with pytest.raises(NotImplementedError, match=r"^ksmm: algo: expected auto or kernel .*, got 'bmm'"):
        fj.ksmm(x, w, algo="bmm")
    with pytest.raises(RuntimeError, match=r"^ksmm: algo: expected auto or kernel, got 'fast'"):
        fj.ksmm(x, w, algo="fast")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dense_matrices(dtype, rng):
    w = jnp.asarray(rng.standard_normal((2, 3, 4, 5)), dtype).at[0, 0, 0, 0].set(jnp.inf)
    dense = fj.kronecker.to_dense(w)
    p = fw.KroneckerPattern(2, 3, 4, 5)
    want = np.zeros(p.shape)
    want[p.numpy_mask()] = np.array(w, "float64").swapaxes(2, 3).ravel()  # row by row
    assert dense.dtype == w.dtype and np.array_equal(np.array(dense, "float64"), want)
    assert jnp.array_equal(fj.kronecker.from_dense(dense, p), w)
    assert jnp.array_equal(jax.grad(lambda w: (fj.kronecker.to_dense(w) * 2).sum())(w), jnp.full_like(w, 2))
    assert jax.jit(jax.vmap(fj.kronecker.to_dense))(jnp.ones((3, 2, 3, 4, 5))).shape == (3, 30, 40)
    for value in (1.0, math.nan):
        with pytest.raises(
            RuntimeError, match=rf"^from_dense: dense: expected zero outside .*, got {value} at \(3, 7\)"
        ):
            fj.kronecker.from_dense(dense.at[3, 7].set(value), p)


def test_projections_are_those_of_torch():
    W = np.random.default_rng(0).standard_normal((12, 20)).astype("float32")
    patterns = fj.kronecker.monarch(12, 20, 3, 5)
    assert patterns == fw.kronecker.monarch(12, 20, 3, 5) and fj.kronecker.butterfly(8) == fw.kronecker.butterfly(8)
    want, error = fw.kronecker.project(torch.from_numpy(W), patterns)
    weights, same = fj.kronecker.project(W.T.copy().T, patterns)
    assert same == error and all(np.array_equal(w, v) for w, v in zip(weights, want, strict=True))
    halves, _ = fj.kronecker.project(jnp.asarray(W, jnp.bfloat16), patterns)
    assert all(w.dtype == jnp.bfloat16 and w.shape == p.weight_shape for w, p in zip(halves, patterns, strict=True))


def test_dense_matrices_refuse():
    k, p = fj.kronecker, fw.KroneckerPattern(2, 3, 4, 5)
    for call, error, text in [
        (
            lambda: k.to_dense(jnp.ones((2, 3, 4))),
            RuntimeError,
            r"to_dense: w: expected \(a, b, c, d\).*, got \(2, 3, 4\)",
        ),
        (lambda: k.to_dense(jnp.ones((2, 3, 4, 5), int)), RuntimeError, "to_dense: w: expected float64, .*, got int"),
        (lambda: k.from_dense(jnp.ones((40, 30)), p), RuntimeError, r"from_dense: dense: expected \(30, 40\) for kron"),
        (lambda: k.from_dense(jnp.ones((30, 40)), "p"), TypeError, "from_dense: pattern: expected a KroneckerPattern"),
        (
            lambda: jax.jit(lambda dense: k.from_dense(dense, p))(jnp.zeros((30, 40))),
            NotImplementedError,
            "from_dense: dense: expected an array with values, got one that is traced",
        ),
        (lambda: k.project(jnp.ones(3), [p]), RuntimeError, r"project: W: expected an \(out, in\) matrix, got \(3,\)"),
        (lambda: k.project(jnp.ones((30, 40), int), [p]), RuntimeError, "project: W: expected float64, .*, got int"),
        (lambda: k.project(jnp.ones((40, 30)), [p]), RuntimeError, r"project: W: expected \(30, 40\) as the patterns"),
        (lambda: k.project(jnp.full((30, 40), math.nan), [p]), RuntimeError, "project: W: expected finite elements"),
        (
            lambda: jax.jit(lambda W: k.project(W, [p])[0])(jnp.zeros((30, 40))),
            NotImplementedError,
            "project: W: expected an array with values, got one that is traced",
        ),
    ]:
        with pytest.raises(error, match=f"^{text}"):
            call()


def test_vmap_over_none():
    x, w = jnp.ones((0, 3, 40)), jnp.ones((2, 3, 4, 5))
    chain = lambda x, w: fj.ksmm_chain(x, [w, jnp.ones((1, 7, 30, 1))])  # noqa: E731
    for function, features in [(fj.ksmm, 30), (chain, 7)]:
        assert jax.vmap(function, (0, None))(x, w).shape == (0, 3, features)
        many = jnp.ones((0, *w.shape))
        d_x, d_w = jax.grad(lambda x, w: jax.vmap(function)(x, w).sum(), (0, 1))(x, many)  # noqa: B023
        assert d_x.shape == x.shape and d_w.shape == many.shape
