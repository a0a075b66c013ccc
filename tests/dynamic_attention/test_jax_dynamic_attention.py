"""fretwork.jax's attention over keys known only on the device against the torch one, under jit, grad and vmap."""

import pytest
import torch

import fretwork as fw

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax_support import exact_products, to_jax  # noqa: E402, F401

import fretwork.jax as fwj  # noqa: E402


def close(got, want, tolerance=3e-5):
    got, want = torch.tensor(np.asarray(got)).double(), want.detach().double()
    assert got.shape == want.shape and torch.equal(got.isinf(), want.isinf())
    there = want[~want.isinf()]
    assert not there.numel() or (got[~want.isinf()] - there).abs().max() <= tolerance * max(there.abs().max().item(), 1)


def agree(ours, theirs, learned):
    """Results, and gradients of both, of functions of a list of arrays or tensors, with jit and without."""
    learned = [t.detach().requires_grad_() for t in learned]
    want = theirs(*learned)
    weights = [torch.randn_like(t) for t in want]
    seen = [w.masked_fill(t == -torch.inf, 0) for w, t in zip(weights, want, strict=True)]
    expected = torch.autograd.grad([t.masked_fill(t == -torch.inf, 0) for t in want], learned, seen)
    arrays = [to_jax(t) for t in learned]

    def loss(*arrays):
        pairs = zip(ours(*arrays), seen, strict=True)
        return sum((jnp.where(x == -jnp.inf, 0, x) * to_jax(w)).sum() for x, w in pairs)

    for run in (ours, jax.jit(ours)):
        for x, y in zip(run(*arrays), want, strict=True):
            close(x, y)
    gradient = jax.grad(loss, argnums=tuple(range(len(arrays))))
    for run in (gradient, jax.jit(gradient)):
        for x, y in zip(run(*arrays), expected, strict=True):
            close(x, y, 1e-4)


def qkv(rows=150, cols=170, batch=2, heads=(4, 2), dims=(24, 16)):
    return [torch.randn(s) for s in ((batch, heads[0], rows, dims[0]), *((batch, heads[1], cols, d) for d in dims))]


def lists_of(mask):
    order = mask.int().argsort(dim=-1, descending=True, stable=True).int()
    counts = mask.sum(-1, dtype=torch.int32)
    garbage = torch.randint(-9, 99, order.shape, dtype=torch.int32)
    return counts, order.where(torch.arange(order.shape[-1]) < counts[..., None], garbage)


FEATURES = ["plain", "lists", "causal", "bias", "wide bias", "alibi", "padding", "padded bias", "sinks", "all"]


@pytest.mark.parametrize("feature", FEATURES)
def test_blocks(feature):
    learned = qkv()
    mask = torch.rand(2, 2, 5, 3) < 0.5
    counts, indices = lists_of(mask)
    pattern = fw.patterns.causal((150, 170)) if feature in ("causal", "all") else None
    padding = torch.rand(2, 170) < 0.2 if feature in ("padding", "padded bias", "all") else None
    if "bias" in feature or feature == "all":
        learned.append(torch.randn((2, 4, 150, 170) if feature == "wide bias" else (4, 1, 170)))
    if feature in ("sinks", "all"):
        learned.append(torch.randn(4))
    slopes = torch.rand(4) if feature == "alibi" else None
    softcap = 3.0 if feature == "all" else 0.0

    def call(module, given, blocks, hidden, arrays):
        q, k, v, *rest = arrays
        options = {} if feature not in ("sinks", "all") else {"sinks": rest.pop()}
        bias = rest[0] if rest else module.alibi(given) if feature == "alibi" else None
        return module.attention(
            *(q, k, v, pattern, 0.3, bias, softcap),
            return_lse=True,
            key_padding_mask=hidden,
            blocks=blocks,
            block=(32, 64),
            **options,
        )

    with_lists = feature in ("lists", "all")
    ours = fwj.BlockLists(to_jax(counts), to_jax(indices)) if with_lists else to_jax(mask)
    theirs = fw.BlockLists(counts, indices) if with_lists else mask
    hidden = None if padding is None else to_jax(padding)
    slope = None if slopes is None else to_jax(slopes)
    agree(
        lambda *arrays: call(fwj, slope, ours, hidden, arrays),
        lambda *tensors: call(fw, slopes, theirs, padding, tensors),
        learned,
    )


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_selected(causal, sinks):
    learned = [*qkv(heads=(6, 2)), *([torch.randn(6)] if sinks else [])]
    indices = torch.rand(2, 2, 150, 7).argsort(-1)[..., :4].int().masked_fill(torch.rand(2, 2, 150, 4) < 0.3, -1)

    def call(module, given, q, k, v, sinks=None):
        return module.selected_attention(q, k, v, given, 32, causal, 0.2, sinks, return_lse=True)

    agree(lambda *x: call(fwj, to_jax(indices), *x), lambda *x: call(fw, indices, *x), learned)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [(None, None), (20, 3)])
def test_varlen(window, sinks):
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in qkv(345, 350, 1))
    learned = [q, k, v, *([torch.randn(4)] if sinks else [])]
    cu_q, cu_k = torch.tensor([3, 40, 40, 200, 201, 340]), torch.tensor([0, 60, 77, 77, 307, 340])

    def call(module, starts, q, k, v, sinks=None):
        return module.varlen_attention(
            q, k, v, *starts, max_q=200, causal=sinks is None, window=window, sinks=sinks, return_lse=True
        )

    agree(lambda *x: call(fwj, (to_jax(cu_q), to_jax(cu_k)), *x), lambda *x: call(fw, (cu_q, cu_k), *x), learned)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_segment_ids(rows):
    """One row without a batch, or rows of which none shares a document."""
    lengths = [[50, 1, 30, 19], [100], [99, 1]][: max(rows, 1)]
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(n)) % 2, torch.tensor(n)) for n in lengths])
    starts = torch.tensor([0, *torch.tensor([n for row in lengths for n in row]).cumsum(0).tolist()])
    shape = (rows, 100) if rows else (100,)
    learned = [torch.randn(*shape, heads, 16) for heads in (4, 2, 2)]
    given = to_jax(ids if rows else ids[0])

    def theirs(*tensors):
        flat = [t.reshape(-1, *t.shape[-2:]) for t in tensors]
        o, lse = fw.varlen_attention(*flat, starts, causal=True, return_lse=True)
        return o.reshape(*shape, 4, 16), lse.reshape(4, rows, 100).transpose(0, 1) if rows else lse

    agree(lambda *x: fwj.varlen_attention(*x, segment_ids=given, causal=True, return_lse=True), theirs, learned)


def test_other_contents_need_no_other_program():
    traced = []

    @jax.jit
    def call(q, mask, starts):
        traced.append(1)
        x = fwj.attention(q, q, q, blocks=mask, block=16)
        return x, fwj.varlen_attention(q[0], q[0], q[0], starts)

    q = jnp.asarray(np.random.randn(1, 60, 60, 8), "float32")
    for n in range(3):
        mask = np.random.rand(1, 1, 4, 4) < 0.5
        _, o = call(q, mask, jnp.array([0, 10 + n, 60]))
        want = fwj.varlen_attention(q[0], q[0], q[0], jnp.array([0, 10 + n, 60]))
        assert jnp.allclose(o, want, atol=1e-6)
    assert len(traced) == 1


@pytest.mark.parametrize("block", [16, (32, 64)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_select_blocks(block, causal):
    q, k, _ = qkv(150, 250)
    want = fw.select_blocks(q, k, 5, block, causal, first=2)
    for run in (fwj.select_blocks, jax.jit(fwj.select_blocks, static_argnums=(2, 3, 4), static_argnames="first")):
        got = run(to_jax(q), to_jax(k), 5, block, causal, first=2)
        assert np.array_equal(got.counts, want.counts) and np.array_equal(got.indices, want.indices)

    def loss(q, k):  # the choice has no gradient, what is done with it does
        lists = fwj.select_blocks(q, k, 5, block, causal)
        return fwj.attention(q, k, k, blocks=lists, block=block).sum()

    d_q, d_k = jax.jit(jax.grad(loss, argnums=(0, 1)))(to_jax(q), to_jax(k))
    learned = [t.clone().requires_grad_() for t in (q, k)]
    lists = fw.select_blocks(*learned, 5, block, causal)
    fw.attention(*learned, learned[1], blocks=lists, block=block).sum().backward()
    close(d_q, learned[0].grad, 1e-4)
    close(d_k, learned[1].grad, 1e-4)


@pytest.mark.parametrize("shared", ["nothing", "keys", "blocks", "one list", "blocks of one"])
@pytest.mark.parametrize("kind", ["mask", "lists", "selected", "varlen", "bias", "sinks", "chosen"])
def test_vmap(kind, shared):
    """What a vmap gives is what its elements give, each alone; the same for its gradient."""
    many, batch, lists = 3, 1 if shared == "blocks of one" else 2, 1 if shared in ("one list", "blocks of one") else 2
    q, k, v = (jnp.asarray(np.random.randn(many, batch, h, 60, 16), "float32") for h in (4, 2, 2))
    mask = jnp.asarray(np.random.rand(many, lists, 2, 4, 4) < 0.5)
    indices = jnp.asarray(np.random.randint(-1, 4, (many, batch, 2, 60, 1)), "int32")
    starts = jnp.asarray(np.sort(np.random.randint(0, 60, (many, 4))), "int32")

    def call(q, k, v, mask, indices, starts):
        if kind == "selected":
            return fwj.selected_attention(q, k, v, indices, 16)
        if kind == "varlen":
            return fwj.varlen_attention(*(x[0].swapaxes(0, 1) for x in (q, k, v)), starts)
        blocks = mask
        if kind == "lists":
            order = jnp.argsort(~mask, axis=-1, stable=True).astype("int32")
            blocks = fwj.BlockLists(mask.sum(-1, dtype="int32"), order)
        if kind == "chosen":
            blocks = fwj.select_blocks(q, k, 2, 16)
        options = {"bias": jnp.sin(q[:, :, :, :1])} if kind == "bias" else {}
        options |= {"sinks": q[0, :, 0, 0]} if kind == "sinks" else {}
        return fwj.attention(q, k, v, blocks=blocks, block=16, **options)

    given = [q, k, v, mask, indices, starts]
    alone = {"keys": (1, 2), "blocks": (3, 4, 5), "one list": (3,), "blocks of one": (3, 4, 5)}.get(shared, ())
    given = [x[0] if n in alone else x for n, x in enumerate(given)]
    axes = [None if n in alone else 0 for n in range(6)]

    def gradients(*arrays):
        return jax.grad(lambda *a: jnp.sin(call(*a, *arrays[3:])).sum(), argnums=(0, 1, 2))(*arrays[:3])

    for function in (lambda *x: (call(*x),), gradients):
        got = jax.jit(jax.vmap(function, axes))(*given)
        for n in range(many):
            want = function(*(x if a is None else x[n] for x, a in zip(given, axes, strict=True)))
            for x, y in zip(got, want, strict=True):
                assert jnp.allclose(x[n], y, atol=2e-5)


def test_dropout():
    q, k, v = (to_jax(t) for t in qkv())
    mask, key = jnp.ones((1, 1, 5, 6), bool), jax.random.key(3)
    call = lambda p: fwj.attention(q, k, v, dropout_p=p, dropout_key=key, blocks=mask, block=32)  # noqa: E731
    want = fwj.attention(q, k, v, dropout_p=0.4, dropout_key=key)
    assert jnp.allclose(call(0.4), want, atol=1e-5) and (call(1.0) == 0).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits(dtype):
    q, k, v = (to_jax(t).astype(dtype) for t in qkv())
    mask = jnp.asarray(np.random.rand(1, 4, 5, 6) < 0.6)
    sinks = jnp.asarray(np.random.randn(4), "float32")
    got = fwj.attention(q, k, v, blocks=mask, block=32, sinks=sinks)
    want = fwj.attention(*(x.astype("float32") for x in (q, k, v)), blocks=mask, block=32, sinks=sinks)
    assert got.dtype == dtype and jnp.allclose(got.astype("float32"), want, atol=3e-2)


Q = jnp.ones((1, 2, 40, 8))
MASK = jnp.ones((1, 1, 3, 3), bool)
LISTS = fwj.BlockLists(jnp.ones((1, 1, 3), "int32"), jnp.ones((1, 1, 3, 2), "int32"))
INDICES = jnp.zeros((1, 2, 40, 1), "int32")
T = jnp.ones((40, 2, 8))
CU = jnp.array([0, 40])
BAD = {
    "attention: block: expected blocks with it": lambda: fwj.attention(Q, Q, Q, block=16),
    "attention: block: expected 16, 32, 64 or 128": lambda: fwj.attention(Q, Q, Q, blocks=MASK, block=24),
    "attention: blocks: expected bool": lambda: fwj.attention(Q, Q, Q, blocks=MASK.astype("int32"), block=16),
    "attention: blocks: expected .+ for block=.128, 128.": lambda: fwj.attention(Q, Q, Q, blocks=MASK),
    "attention: blocks: expected int32 counts": lambda: fwj.attention(
        Q, Q, Q, blocks=LISTS._replace(counts=jnp.ones((1, 1, 3))), block=16
    ),
    "attention: blocks: expected counts": lambda: fwj.attention(
        Q, Q, Q, blocks=LISTS._replace(counts=jnp.ones((1, 1, 2), "int32")), block=16
    ),
    "attention: sinks: expected shape": lambda: fwj.attention(Q, Q, Q, blocks=MASK, block=16, sinks=jnp.ones(3)),
    "attention: key_padding_mask: expected bool": lambda: fwj.attention(
        Q, Q, Q, blocks=MASK, block=16, key_padding_mask=jnp.ones((1, 40))
    ),
    "selected_attention: indices: expected int32": lambda: fwj.selected_attention(Q, Q, Q, INDICES.astype("float32")),
    "selected_attention: indices: expected .1, 2, 40, T.": lambda: fwj.selected_attention(Q, Q, Q, INDICES[:, :1]),
    "selected_attention: sinks: expected shape": lambda: fwj.selected_attention(Q, Q, Q, INDICES, sinks=jnp.ones(3)),
    "selected_attention: scale: expected a finite": lambda: fwj.selected_attention(Q, Q, Q, INDICES, scale=np.inf),
    "varlen_attention: q: expected 3 dimensions": lambda: fwj.varlen_attention(Q, Q, Q, CU),
    "varlen_attention: cu_q: expected int32": lambda: fwj.varlen_attention(T, T, T, CU.astype("float32")),
    "varlen_attention: cu_k: expected shape": lambda: fwj.varlen_attention(T, T, T, CU, CU[:1]),
    "varlen_attention: window: expected 0 or more": lambda: fwj.varlen_attention(T, T, T, CU, window=(-1, 0)),
    "varlen_attention: segment_ids: expected either": lambda: fwj.varlen_attention(
        T, T, T, CU, segment_ids=jnp.zeros(40, int)
    ),
    "varlen_attention: segment_ids: expected integers": lambda: fwj.varlen_attention(
        T, T, T, segment_ids=jnp.zeros(40)
    ),
    "varlen_attention: q: expected 4 dimensions": lambda: fwj.varlen_attention(
        T, T, T, segment_ids=jnp.zeros((1, 40), int)
    ),
    "select_blocks: top_k: expected at least first": lambda: fwj.select_blocks(Q, Q, 1),
}


@pytest.mark.parametrize("text", BAD)
def test_wrong_calls(text):
    with pytest.raises(RuntimeError, match=rf"^{text}.*, got .+"):
        BAD[text]()


def test_what_is_valid_but_not_built():
    patterns = [fw.patterns.full(40), fw.patterns.causal(40)]
    with pytest.raises(NotImplementedError, match=r"^attention: pattern: expected one for all heads"):
        fwj.attention(Q, Q, Q, patterns, blocks=MASK, block=16)
    with pytest.raises(NotImplementedError, match=r"^attention: pattern: expected one whose rows are intervals"):
        fwj.attention(Q, Q, Q, fw.patterns.strided(40, 8), blocks=MASK, block=16)
    with pytest.raises(NotImplementedError, match=r"^attention: gradient: expected to be differentiated once"):
        jax.grad(lambda x: jax.grad(lambda y: fwj.selected_attention(y, Q, Q, INDICES).sum())(x).sum())(Q)
    with pytest.raises(TypeError, match=r"^varlen_attention: cu_q: expected cu_q or segment_ids, got none"):
        fwj.varlen_attention(T, T, T)


def test_starts_beyond_32_bits_are_clamped():
    q = jnp.asarray(np.random.default_rng(0).standard_normal((100, 2, 16)), jnp.float32)
    want = fwj.varlen_attention(q, q, q, np.array([0, 20, 100]))
    far = np.array([-(2**40), 20, 2**32 + 50])
    assert (fwj.varlen_attention(q, q, q, far) == want).all()
    with jax.enable_x64(True):
        assert (jax.jit(fwj.varlen_attention)(q, q, q, jnp.asarray(far)) == want).all()


def test_packed_shapes_are_named_as_they_were_given():
    x = {shape: jnp.ones(shape) for shape in ((40, 4, 32), (40, 3, 32), (50, 4, 32), (40, 4, 8))}
    for text, k, v in (
        (r"v: expected \(50, 4, Dv\), got \(40, 4, 32\)", (50, 4, 32), (40, 4, 32)),
        (r"k: expected \(Tk, Hk, 32\), got \(40, 4, 8\)", (40, 4, 8), (40, 4, 8)),
        (r"k: expected a number of heads .*, got \(40, 3, 32\)", (40, 3, 32), (40, 3, 32)),
    ):
        with pytest.raises(RuntimeError, match=f"^varlen_attention: {text}"):
            fwj.varlen_attention(x[40, 4, 32], x[k], x[v], jnp.array([0, 40]))


def test_bounds_and_lists_that_are_refused():
    q = jnp.ones((40, 2, 16))
    with pytest.raises(TypeError, match=r"^varlen_attention: max_q: expected an int or None, got a"):
        fwj.varlen_attention(q, q, q, jnp.array([0, 40]), max_q=jnp.array(30))
    with pytest.raises(RuntimeError, match=r"^select_blocks: top_k: expected at most 2147483647, got 1099511627776"):
        fwj.select_blocks(q[None], q[None], 2**40)


@pytest.mark.parametrize("most", [1, 2, 3, 5, 99])
def test_max_segments(most):
    """Enough of them in each row change nothing; of fewer, documents beyond are zeros."""
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((2, 40, 2, 16)), jnp.float32)
    ids = jnp.asarray([[0] * 10 + [1] * 30, [1] * 5 + [0] * 20 + [1] * 15])
    ends = [10, 40, 45, 65, 80]
    call = jax.jit(
        lambda q, ids, most: fwj.varlen_attention(
            q, q, q, segment_ids=ids, max_segments=most, causal=True, return_lse=True
        ),
        static_argnums=2,
    )
    (o, lse), (want, want_lse) = call(q, ids, most), call(q, ids, None)
    seen = (np.arange(80) < (0, *ends)[min(2 * most, 5)]).reshape(2, 40)
    assert np.array_equal(o, np.where(seen[..., None, None], want, 0))
    assert np.array_equal(lse, np.where(seen[:, None], want_lse, -np.inf))


def test_max_segments_needs_segment_ids():
    q = jnp.ones((40, 2, 16))
    with pytest.raises(RuntimeError, match=r"^varlen_attention: max_segments: expected segment_ids with it, got none"):
        fwj.varlen_attention(q, q, q, jnp.array([0, 40]), max_segments=1)
    with pytest.raises(RuntimeError, match=r"^varlen_attention: max_segments: expected 0 or more, or None, got -1"):
        fwj.varlen_attention(q, q, q, segment_ids=jnp.zeros(40, int), max_segments=-1)
    with pytest.raises(RuntimeError, match=r"^varlen_attention: max_segments: expected 1 or more, got 0"):
        fwj.varlen_attention(q, q, q, segment_ids=jnp.zeros(40, int), max_segments=0)


def test_rows_to_spare_need_not_be_as_many_for_keys():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((n, 2, 16)), jnp.float32) for n in (43, 60))
    starts = jnp.array([0, 15, 40])
    got = fwj.varlen_attention(q, k, k, starts)
    assert not got[40:].any()
    np.testing.assert_allclose(got[:40], fwj.varlen_attention(q[:40], k[:40], k[:40], starts), atol=1e-6)
