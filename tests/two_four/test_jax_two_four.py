"""fretwork.jax.two_four against dense products in float64 and against the form of torch's side."""

import os

import numpy as np
import pytest
import torch

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other test processes use the same GPU
jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402
from jax_support import assert_close, check, on_device, rejects, rng  # noqa: E402, F401

import fretwork as fw  # noqa: E402
from fretwork.jax import two_four  # noqa: E402

ACTIVATIONS = {
    None: lambda y: y,
    "relu": jax.nn.relu,
    "gelu": lambda y: jax.nn.gelu(y, approximate=False),
    "silu": jax.nn.silu,
}
BYTES = ["int8", "uint8", "float8_e4m3fn", "float8_e5m2"]
each_dim = pytest.mark.parametrize("dim", [-1, 0])


def pruned(rng, shape, dtype, dim=-1):
    """No zeros among what is kept."""
    A = rng.integers(1, 100, shape) * (1 if dtype == "uint8" else rng.choice([-1, 1], shape))
    return two_four.prune(jnp.asarray(A if dtype in ("int8", "uint8") else A / 64, dtype), dim)


def of(s, values):
    return two_four.TwoFour(values, s.metadata, s.dim)


@each_dim
@pytest.mark.parametrize("kind", ["float64", "float32", "float16", "bfloat16", *BYTES])
def test_the_form_is_torchs(kind, dim, rng, on_device):
    if kind == "float64" and on_device.platform != "cpu":
        pytest.skip("float64 exists on CPU only")
    shape = (24, 36) if dim else (36, 24)
    A = pruned(rng, shape, kind, dim)
    wide = torch.from_numpy(np.array(A, np.float64)).to(getattr(torch, kind))
    for word in ("int8", "int16", "int32", "uint8", "uint16", "uint32"):
        s, t = two_four.compress(A, dim, word), fw.two_four.compress(wide, dim, getattr(torch, word))
        assert s.shape == shape == s.T.T.shape and s.T.shape == shape[::-1]
        values, metadata = (x if dim else x.T for x in (t.values, t.metadata))
        np.testing.assert_array_equal(np.asarray(s.values, np.float64), values.double().numpy())
        np.testing.assert_array_equal(np.asarray(s.metadata), metadata.numpy())
        np.testing.assert_array_equal(np.asarray(s.to_dense(), np.float64), np.asarray(A, np.float64))
        np.testing.assert_array_equal(np.asarray(s.T.to_dense(), np.float64), np.asarray(A.T, np.float64))
    for transposable in (False, True):
        full = jnp.asarray(rng.integers(0 if kind == "uint8" else -99, 99, (16, 24)), kind)
        got = two_four.prune(full, dim, transposable)
        want = torch.from_numpy(np.array(full, np.float64)).to(getattr(torch, kind))
        want = fw.two_four.prune(want, dim, transposable).double().numpy()
        np.testing.assert_array_equal(np.asarray(got, np.float64), want)


def test_as_arrays_are_multiplied(rng):
    s, x = two_four.compress(pruned(rng, (24, 32), "float32")), jnp.asarray(rng.standard_normal((32, 5)), "float32")
    assert jnp.array_equal(s @ x, two_four.matmul(s, x)) and jnp.array_equal(x.T @ s.T, two_four.matmul(x.T, s.T))
    assert jnp.array_equal(jax.jit(lambda s, x: s @ x)(s, x), s @ x)


@pytest.mark.parametrize(
    "batch, activation, dtype",
    [((), None, "float32"), ((2, 3), "gelu", "float32"), ((2, 3), "silu", "bfloat16"), ((), "relu", "float16")],
    ids=str,
)
@pytest.mark.parametrize("side", ["left", "right", "linear"])
def test_products_and_gradients(side, batch, activation, dtype, rng):
    A = pruned(rng, (12, 16), dtype)
    s = two_four.compress(A)
    dense = jnp.asarray(rng.standard_normal((*batch, 16, 5) if side == "left" else (*batch, 5, 16)), dtype)
    bias, kept = jnp.asarray(rng.standard_normal(12), dtype), A != 0

    def function(values, dense, bias):
        t = of(s, values)
        if side == "left":
            return two_four.matmul(t, dense, bias, activation)
        return (
            two_four.linear(dense, t, bias, activation)
            if side == "linear"
            else two_four.matmul(dense, t.T, bias, activation)
        )

    def reference(values, dense, bias):
        a = jnp.zeros((12, 16), values.dtype).at[jnp.nonzero(kept, size=96)].set(values.reshape(-1))
        y = a @ dense + bias[:, None] if side == "left" else dense @ a.T + bias
        return ACTIVATIONS[activation](y)

    check(function, reference, [s.values, dense, bias], rng, dtype)


def test_gradients_through_compress_and_prune(rng):
    A, x = jnp.asarray(rng.standard_normal((8, 16)), "float32"), jnp.asarray(rng.standard_normal((3, 16)), "float32")

    @jax.jit
    def loss(A):
        return (two_four.linear(x, two_four.compress(two_four.prune(A))) ** 2).sum()

    kept = two_four.prune(A)
    want = jax.grad(lambda a: ((x @ a.T) ** 2).sum())(kept)
    assert_close(jax.grad(loss)(A), jnp.where(kept != 0, want, 0), "float32", "gradient")
    across = jax.grad(lambda A: two_four.compress(A, dim=0).to_dense().sum())(kept.T)
    assert_close(across, (kept.T != 0).astype("float32"), "float32", "compress along columns")


def test_second_derivative(rng):
    with jax.default_device(jax.devices("cpu")[0]):  # where float64 is
        s, x = two_four.compress(pruned(rng, (4, 8), "float64")), jnp.asarray(rng.standard_normal((3, 8)))
        check_grads(lambda v, x: two_four.linear(x, of(s, v), activation="silu"), (s.values, x), 2, ["rev"])


def test_vmap(rng):
    A = jnp.stack([pruned(rng, (8, 16), "float32") for _ in range(3)])
    B = jnp.asarray(rng.standard_normal((3, 16, 5)), "float32")
    s = two_four.compress(A[0])
    assert_close(jax.vmap(lambda b: two_four.matmul(s, b))(B), A[0] @ B, "float32", "dense operand")
    assert_close(jax.vmap(lambda a, b: two_four.matmul(two_four.compress(a), b))(A, B), A @ B, "float32", "both")


@pytest.mark.parametrize("kind", BYTES)
def test_small_types(kind, rng):
    integers = kind in ("int8", "uint8")
    A, x = pruned(rng, (8, 32), kind), jnp.asarray(rng.integers(0 if kind == "uint8" else -9, 9, (3, 32)), kind)
    want = np.asarray(x, np.float64) @ np.asarray(A, np.float64).T
    y = two_four.linear(x, two_four.compress(A))
    assert y.dtype == ("int32" if integers else "bfloat16")
    assert_close(y, want, "float32" if integers else "bfloat16", "value")
    y = two_four.matmul(x, two_four.compress(A).T, out_dtype="float32")
    assert_close(y, want, "float16", "wide")
    bias = jnp.ones(8, "float32")
    if integers:
        grad = jax.grad(lambda b: two_four.matmul(x, two_four.compress(A).T, b, out_dtype="float32").sum())(bias)
        assert_close(grad, np.full(8, 3.0), "float32", "bias")


@pytest.mark.parametrize(
    "kind, out",
    [("int8", "int8"), ("uint8", "float8_e4m3fn"), ("float8_e5m2", "float8_e5m2"), ("bfloat16", "float8_e5m2"),
     ("bfloat16", "float16"), ("float32", "int8"), ("float32", "bfloat16")],
)  # fmt: skip
def test_results_of_other_types(kind, out, rng):
    """The kernel's rounding and XLA's, which follows where there are scales, are the same: to even, and saturated."""
    least = 0 if kind == "uint8" else -4
    A = two_four.prune(jnp.asarray(rng.integers(least, 5, (16, 32)), kind))
    B = jnp.asarray(rng.integers(least, 5, (32, 9)), kind)
    s, plain = two_four.compress(A), np.asarray(A, np.float64) @ np.asarray(B, np.float64)

    def rounded(exact):
        if out == "int8":
            return np.clip(np.rint(exact), -128, 127)
        most = float(jnp.finfo(out).max)
        return np.asarray(jnp.asarray(np.clip(exact, -most, most), "float32").astype(out), np.float64)

    def product(b, scale):
        return two_four.matmul(s, b, activation="relu", out_dtype=out, scale_out=scale)

    for factor in (None, 0.125, 32.0):
        got = product(B, None) if factor is None else jax.jit(product)(B, jnp.float32(factor))
        assert got.dtype == out
        np.testing.assert_array_equal(np.asarray(got, np.float64), rounded(np.maximum(plain, 0) * (factor or 1.0)))
    if kind == "bfloat16" and out == "float8_e5m2":
        with rejects("matmul", NotImplementedError):
            jax.grad(lambda b: two_four.matmul(s, b, out_dtype=out).astype("float32").sum())(B)
    for bad in (jnp.ones(1, "float32"), jnp.float16(1)):
        with rejects("matmul"):
            two_four.matmul(s, B, out_dtype=out, scale_out=bad)


@each_dim
@pytest.mark.parametrize("word", ["int16", "uint8", "uint32"])
def test_groups_of_zeros_take_any_nibble(word, dim, rng):
    A = np.array(pruned(rng, (8, 32) if dim else (32, 8), "float16", dim))
    (A if dim else A.T)[:, 8:16] = 0
    s = two_four.compress(A, dim, word)
    both = np.array(s.metadata).view(np.uint8)
    both[:, 1] = rng.integers(0, 256, 8)
    t = two_four.TwoFour(s.values, jnp.asarray(both.view(word)), dim)
    assert t.metadata.dtype == word
    np.testing.assert_array_equal(np.asarray(t.metadata), np.asarray(s.metadata))
    inside = jax.jit(lambda v, m: two_four.TwoFour(v, m, dim).metadata)(s.values, jnp.asarray(both.view(word)))
    np.testing.assert_array_equal(np.asarray(inside), np.asarray(s.metadata))
    with pytest.raises(ValueError, match=r"^TwoFour: metadata: .* got 0 for the group at \(0, 0\)"):
        two_four.TwoFour(s.values, jnp.asarray((both & 0xF0).view(word)), dim)


@each_dim
@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_cat_inside_words(kind, dim, rng):
    for sizes in [(12, 20, 4), (32, 64)]:
        A = [pruned(rng, (3, k) if dim else (k, 3), kind, dim) for k in sizes]
        s = two_four.cat([two_four.compress(a, dim) for a in A], dim)
        two_four.TwoFour(s.values, s.metadata, dim)  # which looks at every nibble
        np.testing.assert_array_equal(np.asarray(s.to_dense(), np.float64), np.concatenate(A, dim).astype(np.float64))
    twice = two_four.cat([two_four.compress(A[1], dim)] * 2, 1 if dim == 0 else 0)
    np.testing.assert_array_equal(twice.to_dense(), np.concatenate([A[1]] * 2, 1 if dim == 0 else 0))


@pytest.mark.parametrize("dim", [0, 1])
def test_slices(dim, rng):
    A = pruned(rng, (48, 128), "float16")
    A = A if dim else A.T
    s = two_four.compress(A, dim)
    for along, across in [
        (slice(None), slice(3, 20)), (slice(16, 64), slice(None)), (slice(-16, 500), slice(9, 3)),
        (slice(112, None), slice(-8, None)),
    ]:  # fmt: skip
        index = (across, along) if dim else (along, across)
        part = s[index]
        np.testing.assert_array_equal(np.asarray(part.to_dense()), np.asarray(A[index]))
        assert part.shape == A[index].shape and part.dim == dim
    rows = slice(16, 32)
    np.testing.assert_array_equal(np.asarray(jax.jit(lambda s: s[rows])(s).to_dense()), np.asarray(A[rows]))
    turned = s if dim else s.T
    for index in [(slice(None), slice(8, 64)), slice(0, 8, 2), 3, (slice(0, 1),) * 3, slice(0.5, None)]:
        with pytest.raises((ValueError, TypeError), match=r"TwoFour: index: expected .*got "):
            turned[index]


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_layouts_are_torchs(kind, rng):
    A = pruned(rng, (64, 128), kind)
    s, t = (
        two_four.compress(A),
        fw.two_four.compress(torch.from_numpy(np.array(A, np.float64)).to(getattr(torch, kind))),
    )
    for layout in ("torch", "cutlass_sm90", np.arange(np.asarray(s.metadata).nbytes)[::-1].copy()):
        values, metadata = s.export(layout)
        _, want = t.export(layout if isinstance(layout, str) else torch.from_numpy(layout))
        np.testing.assert_array_equal(np.asarray(metadata), want.numpy())
        back = two_four.from_layout(values, metadata, layout, metadata_dtype="int8")
        np.testing.assert_array_equal(np.asarray(back.to_dense(), np.float64), np.asarray(A, np.float64))
    twice = np.concatenate((layout, layout))
    two_four.from_layout(values, jnp.concatenate((metadata, metadata)), twice)
    for words, order in ((jnp.concatenate((metadata, metadata[::-1])), twice), (metadata.astype("float32"), layout)):
        with pytest.raises(ValueError, match=r"from_layout: metadata: expected .*got "):
            two_four.from_layout(values, words, order)


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_scales(kind, rng):
    A, B = pruned(rng, (8, 32), kind), jnp.asarray(rng.integers(-9, 9, (32, 5)), kind)
    rows, cols = (jnp.asarray(rng.random(n) + 0.5, "float32") for n in (8, 5))
    bias, exact = jnp.asarray(rng.standard_normal(8), "float32"), np.asarray(A, np.float64) @ np.asarray(B, np.float64)
    want = np.asarray(rows)[:, None] * exact * np.asarray(cols) + np.asarray(bias)[:, None]
    s = two_four.compress(A)
    got = two_four.matmul(s, B, bias, "relu", "float32", rows, cols)
    assert_close(got, np.maximum(want, 0), "float16", "left")
    got = two_four.matmul(B.T, s.T, bias, None, "float32", scale_b=rows)
    assert_close(got, exact.T * np.asarray(rows) + np.asarray(bias), "float16", "right")
    got = jax.grad(lambda r: two_four.matmul(s, B, out_dtype="float32", scale_a=r).sum())(rows)
    assert_close(got, exact.sum(1), "float16", "gradient of a scale")


def test_check_and_nibbles(rng):
    A = np.array(pruned(rng, (8, 16), "float16"))
    assert two_four.check(A) == (True, None) and two_four.check(A.T, 0) == (True, None)
    A[5, 8:12] = 1
    assert two_four.check(A) == (False, (5, 8)) and two_four.check(A.T, 0) == (False, (8, 5))
    with rejects("check", NotImplementedError):
        jax.jit(two_four.check)(A)
    s = two_four.compress(A, validate=False)
    for dim, place in ((1, (3, 0)), (0, (0, 3))):
        with pytest.raises(
            ValueError, match=rf"^TwoFour: metadata: .* got 0 for the group at \({place[0]}, {place[1]}\)"
        ):
            two_four.TwoFour(s.values, s.metadata.at[3].set(0), dim)
    for values, metadata in [(s.values[0], s.metadata), (s.values, s.metadata[:3]), (s.values, s.values)]:
        with pytest.raises(ValueError, match=r"^TwoFour: \w+: expected .*, got "):
            two_four.TwoFour(values, metadata)
    for call in [
        lambda: two_four.cat(3), lambda: two_four.cat(s), lambda: two_four.compress(A, dim=1.0),
        lambda: two_four.compress(A, validate="no"), lambda: two_four.prune(A, transposable="no"),
        lambda: two_four.compress(A, metadata_dtype="word"),
        lambda: two_four.matmul(A, s.T, out_dtype="wide"),
    ]:  # fmt: skip
        with rejects(r"\w+", TypeError):
            call()


def test_refusals():
    s, B, bias = two_four.compress(jnp.eye(16, dtype="float32")), jnp.ones((16, 4), "float32"), jnp.ones(16, "float32")
    for call in [
        lambda: two_four.compress(jnp.ones((8, 8), "float32")), lambda: two_four.compress(B, dim=2),
        lambda: two_four.compress(bias), lambda: two_four.compress(B, metadata_dtype="int64"),
        lambda: two_four.compress(B.astype("int32")),
    ]:  # fmt: skip
        with rejects("compress"):
            call()
    with rejects("prune"):
        two_four.prune(jnp.ones((6, 8), "float16"), transposable=True)
    for call in [
        lambda: two_four.matmul(s, s.T), lambda: two_four.matmul(B, B), lambda: two_four.matmul(s, B[:8]),
        lambda: two_four.matmul(s, B.astype("float16")), lambda: two_four.matmul(s, B, bias[:3]),
        lambda: two_four.matmul(s, B, activation="tanh"), lambda: two_four.matmul(s, B, out_dtype="int32"),
        lambda: two_four.matmul(s, bias), lambda: two_four.matmul(s, B, precision="half"),
    ]:  # fmt: skip
        with rejects("matmul"):
            call()
    for call in (
        lambda: two_four.linear(B, s),
        lambda: two_four.linear(B.T, B),
        lambda: two_four.linear(B.T, s, bias[:2]),
    ):
        with rejects("linear"):
            call()
    for call in (lambda: two_four.matmul(B.T, s), lambda: two_four.matmul(s.T, B), lambda: two_four.linear(B.T, s.T)):
        with pytest.raises(NotImplementedError, match=r"^\w+: \w+: expected .*, got dim=\d; compress the "):
            call()


def test_dims_count_from_either_end(rng):
    s = two_four.compress(pruned(rng, (8, 16), "float32"))
    t = two_four.TwoFour(s.values, s.metadata, -1)
    assert t.dim == 1 and t.T.dim == 0 and t.T.shape == (16, 8)
    assert two_four.TwoFour(s.values, s.metadata, -2).shape == (16, 8)
    np.testing.assert_array_equal(two_four.matmul(t, jnp.eye(16, dtype="float32")), s.to_dense())
    with pytest.raises(ValueError, match=r"TwoFour: dim: expected .*got 2"):
        two_four.TwoFour(s.values, s.metadata, 2)
