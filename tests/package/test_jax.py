"""fretwork.jax against dense float64 formulas of the mask: values, gradients, vmap, broadcasting and bad calls."""

import doctest
import functools
import importlib
import pkgutil
import re
import threading

import numpy as np
import pytest
import torch

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax_support import TOLERANCE, assert_close, check, dtype, on_device, rejects, rng  # noqa: E402, F401

import fretwork as fw  # noqa: E402
import fretwork.jax as fj  # noqa: E402

INF, NAN = np.inf, np.nan
TRANS = {"nn": (False, False), "nt": (False, True), "tn": (True, False), "tt": (True, True)}
PRODUCTS = ["sdd", "dsd", "dds"]
each_product = pytest.mark.parametrize("op", PRODUCTS)
each_op = pytest.mark.parametrize("op", [*PRODUCTS, "softmax"])
each_trans = pytest.mark.parametrize("trans", TRANS)


# References: jnp in float64, from the mask alone.


def some_mask(rng, heads=3, rows=4, cols=3):
    """Random, with an empty row and an empty column; of several heads the first is full and the second empty."""
    mask = rng.random((heads, rows, cols)) < 0.6
    mask[-1, 0], mask[-1, :, -1], mask[-1, -1, 0] = False, False, True
    if heads > 1:
        mask[0], mask[1:-1] = True, False
    return mask


def sides(block):
    return block if isinstance(block, tuple) else (block, block)


def spread(values, mask, block, fill=0.0):
    """Packed (Z, nnz, r, c) to dense (Z, H, M, N)."""
    (heads, rows, cols), (r, c) = mask.shape, sides(block)
    blocks = jnp.full((values.shape[0], *mask.shape, r, c), fill, values.dtype)
    blocks = blocks.at[(slice(None), *np.nonzero(mask))].set(values)
    return blocks.swapaxes(3, 4).reshape(values.shape[0], heads, rows * r, cols * c)


def collect(dense, mask, block):
    (heads, rows, cols), (r, c) = mask.shape, sides(block)
    blocks = dense.reshape(dense.shape[0], heads, rows, r, cols, c).swapaxes(3, 4)
    return blocks[(slice(None), *np.nonzero(mask))]


def elements(mask, block):
    r, c = sides(block)
    return mask.repeat(r, -2).repeat(c, -1)


def product(op, a, b, mask, block, trans_a, trans_b):
    a = spread(a, mask, block) if op == "dsd" else a
    b = spread(b, mask, block) if op == "dds" else b
    out = (a.swapaxes(-1, -2) if trans_a else a) @ (b.swapaxes(-1, -2) if trans_b else b)
    if op != "sdd":
        return out
    return collect(jnp.broadcast_to(out, (out.shape[0], mask.shape[0], *out.shape[2:])), mask, block)


def softmax(values, rpe, mask, block, scale=1.0, key=None, attn=None, key_mode="add", attn_mode="add"):
    x = spread(values, mask, block) * scale
    x = x if rpe is None else x + rpe
    gone = ~elements(mask, block)[None]
    for extra, mode in ((None if key is None else key[:, None, None], key_mode), (attn, attn_mode)):
        if extra is not None and mode == "add":
            x = x + np.asarray(extra, np.float64)
        elif extra is not None:
            gone = gone | (np.asarray(extra) == 0)
    x = jnp.where(gone, -INF, x)
    dead = (x == -INF).all(-1, keepdims=True)
    return collect(jnp.where(dead, 0.0, jax.nn.softmax(jnp.where(dead, 0.0, x), -1)), mask, block)


def case(op, mask, rng, dtype="float32", block=16, free=24, trans="nn", batch=2):
    """An op, its reference and random inputs; `free` is the size that the layout leaves open."""
    (heads, rows, cols), (r, c), (trans_a, trans_b) = mask.shape, sides(block), TRANS[trans]
    m, n = rows * r, cols * c
    layout, packed = fw.BlockLayout(mask, block), (batch, int(mask.sum()), r, c)
    if op == "softmax":
        shapes = packed, (batch, heads, m, n)
        function = lambda v, rpe: fj.block_softmax(v, layout, scale=0.5, rpe=rpe)  # noqa: E731
        reference = functools.partial(softmax, mask=mask, block=block, scale=0.5)
    else:
        a = {"sdd": (m, free), "dsd": None, "dds": (free, n if trans_b else m)}[op]
        b = {"sdd": (free, n), "dsd": (m if trans_a else n, free), "dds": None}[op]
        turned = [None if s is None else s[::-1] if t else s for s, t in ((a, trans_a), (b, trans_b))]
        shapes = [packed if s is None else (batch, heads, *s) for s in turned]
        function = functools.partial(getattr(fj, op), layout=layout, trans_a=trans_a, trans_b=trans_b)
        reference = functools.partial(product, op, mask=mask, block=block, trans_a=trans_a, trans_b=trans_b)
    return function, reference, [jnp.asarray(rng.standard_normal(s), dtype) for s in shapes]


# Products


@each_trans
@each_product
def test_products(op, trans, dtype, rng):
    check(*case(op, some_mask(rng), rng, dtype, (16, 8), 37, trans), rng, dtype)


@pytest.mark.parametrize("block", [32, 128])
@each_op
def test_blocks(op, block, rng):
    check(*case(op, some_mask(rng, 2, 3, 2), rng, block=block), rng)


MASKS = {"full": np.ones((2, 3, 2), bool), "empty": np.zeros((2, 3, 2), bool), "diagonal": np.eye(4, dtype=bool)[None]}


@pytest.mark.parametrize("kind", MASKS)
@each_op
def test_patterns(op, kind, rng):
    check(*case(op, MASKS[kind], rng), rng)


@each_op
def test_large(op, rng):
    """Enough work for several threads, and a layout whose text crosses as a digest."""
    mask = rng.random((2, 24, 24)) < 0.3
    assert "@" in fw.BlockLayout(mask, 32).key
    check(*case(op, mask, rng, block=32, free=200), rng)


LEADS = [("2H", "1H"), ("2H", "21"), ("11", "2H"), ("H", "2H"), ("2H", ""), ("H", "1"), ("", "H"), ("", "")]


@pytest.mark.parametrize("leads, heads", [*((leads, 3) for leads in LEADS), *((leads, 1) for leads in LEADS[-4:])])
@each_product
def test_leading_dimensions(op, leads, heads, rng):
    """Z is there if an operand has it; H unless nothing has Z, the dense one is 2-D and the layout has one head."""
    function, reference, inputs = case(op, some_mask(rng, heads, 2, 3), rng)
    for n, lead in enumerate(leads):
        z = slice(int(lead[0])) if len(lead) == 2 else 0
        h = 0 if lead == "" else slice(None) if lead[-1] == "H" else slice(1)
        inputs[n] = inputs[n][z] if (op, n) in (("dsd", 0), ("dds", 1)) else inputs[n][z, h]
    has_z = any(len(lead) == 2 for lead in leads)
    has_h = op == "sdd" or heads > 1 or leads[op == "dsd"] != ""

    def shaped(a, b):
        out = reference(*(x.reshape((1,) * (4 - x.ndim) + x.shape) for x in (a, b)))
        return out if has_z else out[0] if has_h else out[0, 0]

    check(function, shaped, inputs, rng)


@pytest.mark.parametrize("op", ["dsd", "dds"])
def test_one_head_layout_serves_many(op, rng):
    mask = some_mask(rng, 1)
    function, reference, inputs = case(op, mask, rng)
    n = 1 if op == "dsd" else 0
    inputs[n] = jnp.asarray(rng.standard_normal((2, 5, *inputs[n].shape[2:])), "float32")
    check(function, reference, inputs, rng)


@pytest.mark.parametrize("batch, free", [(0, 24), (2, 0), (0, 0)])
@each_op
def test_zero_sizes(op, batch, free, rng):
    check(*case(op, some_mask(rng), rng, free=free, batch=batch), rng)


@each_product
def test_zero_batches_of_a_shared_operand(op, rng):
    """The gradient of what no batch used is zero."""
    function, reference, inputs = case(op, some_mask(rng), rng)
    check(function, reference, [inputs[0][:0], inputs[1][:1]], rng)


def test_softmax_is_differentiated_once():
    layout = fw.BlockLayout([[1, 0], [1, 1]], 8)
    first = jax.grad(lambda x: (fj.block_softmax(x, layout) ** 2).sum())
    for transform in (lambda f: f, jax.jit, jax.vmap):
        values = jnp.ones((2, 3, 8, 8)) if transform is jax.vmap else jnp.ones((3, 8, 8))
        with pytest.raises(NotImplementedError, match=r"^block_softmax: gradient: expected .*, got a second time; "):
            transform(jax.grad(lambda x: first(x).sum()))(values)
        assert transform(first)(values).shape == values.shape


@pytest.mark.parametrize("op", ["dsd", "dds"])
def test_a_layout_of_no_heads(op):
    layout, values, dense = fw.BlockLayout(np.zeros((0, 2, 2), bool), 8), jnp.zeros((0, 8, 8)), jnp.ones((16, 5))
    call = lambda x: fj.dsd(values, x, layout) if op == "dsd" else fj.dds(x.T, values, layout)  # noqa: E731
    assert call(dense).shape == ((0, 16, 5) if op == "dsd" else (0, 5, 16))
    assert not jax.grad(lambda x: call(x).sum())(dense).any()


@each_product
def test_second_derivative(op, rng):
    function, reference, inputs = case(op, some_mask(rng, 2, 2, 2), rng, "float64", 8, 5, "tn")
    inputs = [inputs[0][:1], inputs[1]]
    twice = lambda f: jax.grad(lambda a, b: jnp.sin(jax.grad(lambda x: (f(x, b) ** 2).sum())(a)).sum(), (0, 1))  # noqa: E731
    for got, want in zip(jax.jit(twice(function))(*inputs), jax.jit(twice(reference))(*inputs), strict=True):
        assert_close(got, want, "float64", "second derivative")


# Transformations


@pytest.mark.parametrize(
    "batches, axes",
    [((None, None), (0, 0)), ((2, 2), (2, 1)), ((2, 1), (0, None)), ((1, 2), (0, 0)), ((2, 2), (None, 0))],
    ids=str,
)
@each_op
def test_vmap(op, batches, axes, rng):
    """Values and gradients, inside and outside the map, against the reference mapped by jax itself."""
    function, reference, inputs = case(op, some_mask(rng, 2, 2, 3), rng, block=8, free=5, trans="tn")
    if op == "softmax" and batches[0] == 1:
        pytest.skip("values decide Z")
    inputs = [x[0] if z is None else x[:z] for x, z in zip(inputs, batches, strict=True)]

    def shaped(*x):
        out = reference(*(y.reshape((1,) * (4 - y.ndim) + y.shape) for y in x))
        return out[0] if batches[0] is None else out

    mapped = []
    for x, axis in zip(inputs, axes, strict=True):
        many = jnp.asarray(rng.standard_normal((3, *x.shape)), x.dtype)
        mapped.append(x if axis is None else jnp.moveaxis(many, 0, axis))
    check(jax.vmap(function, axes), jax.vmap(shaped, axes), mapped, rng)
    exact = [x.astype("float64") for x in mapped]
    inside = lambda f: jax.vmap(jax.grad(lambda *x: (f(*x) ** 2).sum(), (0, 1)), axes)  # noqa: E731
    for got, want in zip(jax.jit(inside(function))(*mapped), jax.jit(inside(shaped))(*exact), strict=True):
        assert_close(got, want, "float32", "gradient inside vmap")


@each_op
def test_nested_vmap(op, rng):
    function, reference, inputs = case(op, some_mask(rng, 2, 2, 3), rng, block=8, free=5)
    inputs = [jnp.asarray(rng.standard_normal((3, 2, *x.shape)), "float32") for x in inputs]
    check(jax.vmap(jax.vmap(function)), jax.vmap(jax.vmap(reference)), inputs, rng)


def test_traced_once(rng):
    """Equal layouts share a compiled program."""
    mask = some_mask(rng)
    values, dense = jnp.ones((int(mask.sum()), 16, 16)), jnp.ones((3, 48, 7))
    fj.dsd(values, dense, fw.BlockLayout(mask, 16))
    from fretwork.jax import block

    before = block._product._cache_size()
    fj.dsd(values, dense, fw.BlockLayout(mask.astype(int), (16, 16)))
    assert block._product._cache_size() == before


def test_patterns_are_static_arguments(rng):
    """Without being named so; another one is another trace."""
    traces = []

    @jax.jit
    def product(values, x, layout):
        traces.append(layout)
        return fj.dsd(values, x, layout)

    first, second = (fw.BlockLayout(mask, block=16) for mask in ([[1, 0], [1, 1]], [[1, 1], [0, 1]]))
    values, x = rng.standard_normal((3, 16, 16)), rng.standard_normal((32, 5))
    for layout in (first, second, fw.BlockLayout([[1, 0], [1, 1]], block=16)):
        got = product(values, x, layout)
        assert np.allclose(got, layout.unpack(torch.tensor(values))[0].numpy() @ x)
    assert traces == [first, second]
    q, near, far = rng.standard_normal((1, 2, 9, 4)), fw.patterns.causal(9), fw.patterns.strided(9, 3)
    assert np.array_equal(jax.jit(fj.attention)(q, q, q, [near, far]), fj.attention(q, q, q, [near, far]))
    assert jax.tree.leaves([fw.KroneckerPattern(1, 2, 3, 4), near, first]) == []


def test_many_threads_at_once(rng):
    """Calls that fill XLA's pool wait only for work that runs."""
    function, reference, (values, dense) = case("dsd", rng.random((1, 16, 16)) < 0.3, rng, block=32, free=64)
    scales = jnp.arange(1.0, 9.0, dtype="float32")
    f = jax.jit(lambda v, x: [function(v * s, x) for s in scales])  # independent, so XLA may run them side by side
    f(values, dense)
    results = {}

    def call(n):
        with jax.default_matmul_precision("highest"):  # the fixture's setting holds only in its own thread
            results[n] = f(values, dense)

    threads = [threading.Thread(target=call, args=(n,)) for n in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(timeout=60)
    assert len(results) == len(threads)
    want = reference(values.astype("float64"), dense.astype("float64"))
    for outs in results.values():
        for out, scale in zip(outs, scales, strict=True):
            assert_close(out, want * scale, "float32", "value")


# Softmax


@pytest.mark.parametrize(
    "key, attn", [(None, None), ("add", "mul"), ("mul bool", "add"), (None, "mul per head"), ("mul", "mul bool")]
)
@pytest.mark.parametrize(
    "rpe, dtype",
    [(None, "float32"), ((64, 48), "float16"), ((2, 1, 1, 48), "bfloat16"), ((2, 3, 64, 48), "float64")],
    ids=str,
    indirect=["dtype"],
)
def test_softmax(rpe, key, attn, rng, dtype):
    mask, options, ours = some_mask(rng), {"scale": -0.3}, {"scale": -0.3}
    shapes = {"key": (2, 48), "attn": (3, 64, 48) if "head" in str(attn) else (64, 48)}
    for name, kind in (("key", key), ("attn", attn)):
        if kind is None:
            continue
        if kind == "add":
            extra = np.where(rng.random(shapes[name]) < 0.3, -INF, rng.standard_normal(shapes[name]))
        else:
            extra = rng.integers(0, 3, shapes[name]) * 1.5
        if name == "attn":
            extra[..., 5, :] = -INF if kind == "add" else 0
        extra = jnp.asarray(extra).astype(bool if "bool" in kind else dtype)
        full = {"key": "key_padding_mask", "attn": "attn_mask"}[name]
        ours.update({full: extra, f"{full}_mode": kind[:3]})
        options.update({name: np.asarray(extra), f"{name}_mode": kind[:3]})
    layout = fw.BlockLayout(mask, 16)
    inputs = [jnp.asarray(rng.standard_normal(s), dtype) for s in ((2, layout.nnz, 16, 16), rpe) if s]
    check(
        lambda v, r=None: fj.block_softmax(v, layout, rpe=r, **ours),
        lambda v, r=None: softmax(v, r, mask, 16, **options),
        inputs,
        rng,
        dtype,
    )


def test_softmax_rows_with_nothing_left_are_exactly_zero(rng, dtype):
    layout = fw.BlockLayout([[1, 0, 1], [1, 0, 0]], 8)
    values = jnp.asarray(rng.standard_normal((2, 3, 8, 8)), dtype).at[0, :2, 3].set(-INF)
    attn = jnp.ones((16, 24), dtype).at[12].set(0)
    f = lambda v: fj.block_softmax(v, layout, attn_mask=attn, attn_mask_mode="mul")  # noqa: E731
    out, pull = jax.vjp(f, values)
    for result in (out, *pull(out + 1)):
        assert (result[0, :2, 3] == 0).all() and (result[:, 2, 4] == 0).all() and not jnp.isnan(result).any()
    assert (out[1, :2, 3] > 0).all()


def test_softmax_vmap_over_masks(rng):
    """An attention mask per example has no batch dimension of the op to go to; a key padding mask has."""
    mask = some_mask(rng)
    layout = fw.BlockLayout(mask, 16)
    values = jnp.asarray(rng.standard_normal((2, layout.nnz, 16, 16)), "float32")
    key = jnp.asarray(rng.integers(0, 2, (3, 2, 48)), bool)
    attn = jnp.asarray(rng.integers(0, 2, (3, 64, 48)), bool)
    modes = {"key_padding_mask_mode": "mul", "attn_mask_mode": "mul"}
    for axes in ((None, 0, 0), (None, 0, None), (None, None, 0)):
        used = [x if axis == 0 or x is values else x[0] for x, axis in zip((values, key, attn), axes, strict=True)]
        f = jax.vmap(lambda v, k, a: fj.block_softmax(v, layout, 1.0, None, k, a, **modes), axes)
        got, pull = jax.vjp(lambda v, f=f, used=used: f(v, *used[1:]), values)
        want = []
        for n in range(3):
            k, a = (x[n] if axis == 0 else x for x, axis in zip(used[1:], axes[1:], strict=True))
            want.append(softmax(values.astype("float64"), None, mask, 16, 1.0, k, a, "mul", "mul"))
        assert_close(got, jnp.stack(want), "float32", "value")
        (gradient,) = pull(got)
        assert gradient.shape == values.shape and jnp.isfinite(gradient).all()


# Packing


@pytest.mark.parametrize("lead", [(2, 3), (3,), (0, 3)], ids=str)
def test_pack_and_unpack(lead, rng, dtype):
    mask = some_mask(rng)
    layout = fw.BlockLayout(mask, (8, 16))
    four = lambda x: x.reshape((1,) * (4 - x.ndim) + x.shape)  # noqa: E731
    like = lambda out: out if len(lead) == 2 else out[0]  # noqa: E731
    dense = jnp.asarray(rng.standard_normal((*lead, 32, 48)), dtype)
    check(lambda x: fj.pack(x, layout), lambda x: like(collect(four(x), mask, (8, 16))), [dense], rng, dtype)
    values = fj.pack(dense, layout)
    check(
        lambda x: fj.unpack(x, layout, 1.5), lambda x: like(spread(four(x), mask, (8, 16), 1.5)), [values], rng, dtype
    )
    mapped = jax.vmap(lambda x: fj.unpack(fj.pack(x, layout), layout))(dense[None])[0]
    assert jnp.array_equal(mapped, jnp.where(elements(mask, (8, 16)), dense, 0))


def test_pack_of_a_matrix(rng):
    layout = fw.BlockLayout(some_mask(rng, 1)[0], 8)
    assert fj.pack(jnp.ones((32, 24)), layout).shape == (layout.nnz, 8, 8)


# Bad calls

SPARSE = np.array([[[0, 1], [1, 1], [1, 1]], [[1, 1], [1, 1], [1, 1]]])  # with blocks of 16, (2, 48, 32) with 11 blocks
DENSE, PACKED = (1, 2, 48, 32), (1, 11, 16, 16)


@pytest.mark.parametrize(
    "op, a, b, trans",
    [
        ("sdd", (1, 2, 48, 20), (1, 2, 21, 32), "nn"),
        ("sdd", (1, 2, 47, 20), (1, 2, 20, 32), "nn"),
        ("sdd", (48,), (20, 32), "nn"),
        ("sdd", (1, 3, 48, 20), (1, 3, 20, 32), "nn"),
        ("sdd", (2, 2, 48, 20), (3, 2, 20, 32), "nn"),
        ("sdd", (48, 20), (20, 32), "tn"),
        ("dsd", PACKED, (1, 2, 31, 20), "nn"),
        ("dsd", PACKED, (1, 2, 32, 20), "tn"),
        ("dsd", PACKED, (1, 3, 32, 20), "nn"),
        ("dsd", DENSE, (1, 2, 32, 20), "nn"),
        ("dsd", (1, 10, 16, 16), (32, 20), "nn"),
        ("dsd", (1, 11, 8, 16), (32, 20), "nn"),
        ("dds", (1, 2, 20, 47), PACKED, "nn"),
        ("dds", (1, 2, 20, 48), PACKED, "nt"),
        ("dds", (48,), PACKED, "nn"),
        ("dds", (1, 2, 20, 48), DENSE, "nn"),
        ("dds", (2, 2, 20, 48), (3, 11, 16, 16), "nn"),
    ],
)
def test_bad_shapes(op, a, b, trans):
    with rejects(op):
        getattr(fj, op)(jnp.ones(a), jnp.ones(b), fw.BlockLayout(SPARSE, 16), *TRANS[trans])


@each_product
def test_bad_operands(op, rng):
    function, _, (a, b) = case(op, SPARSE.astype(bool), rng)
    pairs = [(a.astype("float16"), b), (a, b.astype("bfloat16")), (a.astype(int), b.astype(int)), (a, b.astype(bool))]
    for pair in pairs:
        with rejects(op):
            function(*pair)
    layout = fw.BlockLayout(SPARSE, 16)
    for bad in (layout.T, fw.BlockLayout(SPARSE, 8), fw.BlockLayout(SPARSE[:1], 16)):
        with rejects(op):
            getattr(fj, op)(a, b, bad)
    for bad in (SPARSE, None, layout.text):
        with rejects(op, TypeError):
            getattr(fj, op)(a, b, bad)
    with rejects(op):
        getattr(fj, op)(a, b, layout, precision="high")


@pytest.mark.parametrize(
    "options",
    [
        {"values": DENSE},
        {"values": (1, 12, 16, 16)},
        {"rpe": (1, 2, 32, 48)},
        {"rpe": (3, 48, 32)},
        {"key_padding_mask": (1, 48)},
        {"key_padding_mask": (2, 32)},
        {"attn_mask": (32, 48)},
        {"attn_mask": (3, 48, 32)},
        {"attn_mask": (48, 32), "attn_mask_mode": "max"},
        {"key_padding_mask": (1, 32), "key_padding_mask_mode": "and"},
    ],
    ids=str,
)
def test_bad_softmax(options):
    options = {k: jnp.ones(v) if isinstance(v, tuple) else v for k, v in options.items()}
    values = options.pop("values", jnp.ones(PACKED))
    with rejects("block_softmax"):
        fj.block_softmax(values, fw.BlockLayout(SPARSE, 16), **options)


def test_the_words_are_those_of_torch():
    layout = fw.BlockLayout(SPARSE, 16)
    calls = [
        ("sdd", [(48, 5), (6, 32)]),
        ("dsd", [(1, 11, 16, 8), (32, 4)]),
        ("dds", [(2, 4, 47), PACKED]),
        ("block_softmax", [(11, 16, 8)]),
        ("pack", [(1, 3, 48, 31)]),
        ("unpack", [(11, 16, 8)]),
    ]
    for op, shapes in calls:
        with pytest.raises(RuntimeError) as ours:
            getattr(fj, op)(*map(jnp.ones, shapes), layout)
        with pytest.raises(RuntimeError) as torchs:
            getattr(fw.block, op)(*map(torch.ones, shapes), layout)
        assert str(ours.value) == str(torchs.value)


@pytest.mark.parametrize("op, shape", [("pack", (1, 2, 32, 48)), ("pack", (1, 3, 48, 32)), ("pack", (48, 32))])
def test_bad_pack(op, shape):
    with rejects(op):
        fj.pack(jnp.ones(shape), fw.BlockLayout(SPARSE, 16))


@pytest.mark.parametrize("shape", [DENSE, (1, 12, 16, 16), (11, 16, 8)], ids=str)
def test_bad_unpack(shape):
    with rejects("unpack"):
        fj.unpack(jnp.ones(shape), fw.BlockLayout(SPARSE, 16))


def test_bad_numbers():
    layout = fw.BlockLayout(SPARSE, 16)
    with rejects("block_softmax", TypeError):
        fj.block_softmax(jnp.ones(PACKED), layout, scale="1")
    with rejects("unpack", TypeError):
        fj.unpack(jnp.ones(PACKED), layout, fill="0")


def test_core_errors_arrive():
    """What the checks above would miss is still refused, with the core's text."""
    layout = fw.BlockLayout(SPARSE, 16)
    options = {"trans_a": False, "trans_b": False, "sum_z": False, "sum_h": False}
    call = jax.ffi.ffi_call("fretwork_matmul", jax.ShapeDtypeStruct((1, 2, 48, 5), "float32"))
    with pytest.raises(Exception, match=r"dsd: b: expected .+, got \(1, 2, 31, 5\)"):
        call(
            *(jnp.ones(s, "float32") for s in (PACKED, (1, 2, 31, 5))),
            mode="dsd",
            layout=layout.key,
            precision="ieee",
            **options,
        ).block_until_ready()


MODULES = [module.name for module in pkgutil.walk_packages(fj.__path__, "fretwork.jax.")]


@pytest.mark.parametrize("name", ["fretwork.jax", *(name for name in MODULES if "._" not in name)])
def test_examples(name):
    jax.config.update("jax_enable_x64", False)  # as users have it
    try:
        result = doctest.testmod(importlib.import_module(name))
    finally:
        jax.config.update("jax_enable_x64", True)
    assert result.failed == 0 and result.attempted > 0


LAYOUT_OF_ONE = fw.BlockLayout(torch.ones(1, 1, dtype=torch.int64), block=8)
MATRIX = jnp.eye(8)
NO_ARRAYS = {
    "ksmm: x": lambda bad: fj.ksmm(bad, jnp.ones((2, 3, 4, 5))),
    "ksmm: w": lambda bad: fj.ksmm(jnp.ones((7, 40)), bad),
    "ksmm_chain: weights[1]": lambda bad: fj.ksmm_chain(jnp.ones((7, 40)), [jnp.ones((2, 3, 4, 5)), bad]),
    "to_dense: w": fj.kronecker.to_dense,
    "sdd: a": lambda bad: fj.sdd(bad, MATRIX, LAYOUT_OF_ONE),
    "dds: values": lambda bad: fj.dds(MATRIX, bad, LAYOUT_OF_ONE),
    "block_softmax: values": lambda bad: fj.block_softmax(bad, LAYOUT_OF_ONE),
    "unpack: values": lambda bad: fj.unpack(bad, LAYOUT_OF_ONE),
    "block_conv2d: x": lambda bad: fj.block_conv2d(bad, MATRIX[None], LAYOUT_OF_ONE, 1),
    "attention: k": lambda bad: fj.attention(MATRIX[None, None], bad, bad, fw.patterns.causal(8)),
    "selected_attention: indices": lambda bad: fj.selected_attention(*(MATRIX[None, None],) * 3, bad),
    "select_blocks: k": lambda bad: fj.select_blocks(MATRIX[None, None], bad, 2),
    "varlen_attention: v": lambda bad: fj.varlen_attention(MATRIX[None], MATRIX[None], bad, MATRIX[0]),
    "r_spmm: v": lambda bad: fj.r_spmm(MATRIX[None, None], bad, fw.patterns.causal(8)),
    "alibi: slopes": fj.alibi,
    "compress: A": fj.two_four.compress,
    "matmul: b": lambda bad: fj.two_four.matmul(fj.two_four.compress(MATRIX), bad),
    "TwoFour: values": lambda bad: fj.two_four.TwoFour(bad, MATRIX),
}


@pytest.mark.parametrize("what", NO_ARRAYS)
def test_what_is_no_array_is_named(what):
    for bad, name in ((None, "NoneType"), ("x", "str"), (object(), "object"), ([[1.0], [2.0, 3.0]], "list")):
        with pytest.raises(TypeError, match=f"^{re.escape(what)}: expected an array of numbers, got {name}$"):
            NO_ARRAYS[what](bad)
