"""JAX arrays that are cut over four devices of a CPU, forward and backward: nothing is gathered under `jit`,
and `shard_map` with its type checks gives the results and gradients of one device."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("jax")

PRELUDE = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import fretwork as fw, fretwork.jax as fj
from fretwork.jax import two_four
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
draw = np.random.default_rng()
some = lambda *shape: jnp.asarray(draw.standard_normal(shape), jnp.float32)
"""

UNDER_JIT = """
def check(f, arguments, specs, out, learns=None):
    put = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arguments, specs, strict=True)]
    compiled = jax.jit(f).lower(*put).compile()
    got, want = compiled(*put), f(*arguments)
    assert np.allclose(got, want, atol=1e-4)
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, out), got.ndim), got.sharding
    assert "all-gather" not in compiled.as_text()
    gradient = jax.jit(jax.grad(lambda *a: (f(*a) ** 2).sum(), argnums=tuple(learns or range(len(arguments)))))
    found = gradient.lower(*put).compile()
    assert "all-gather" not in found.as_text()
    for g, e in zip(found(*put), gradient(*arguments), strict=True):
        assert np.allclose(g, e, atol=1e-3), abs(g - e).max()

both = P("x", "y")
qkv = [some(4, h, 48, 8) for h in (8, 4, 4)]
pattern = fw.patterns.strided(48, 8)
check(lambda q, k, v: fj.attention(q, k, v, pattern), qkv, [both] * 3, both)
check(lambda q, k, v: fj.attention(q, k, v, pattern), qkv, [P(("x", "y"))] * 3, P(("x", "y")))
several = [fw.patterns.sliding_window(48, n, 0) for n in range(8)]
check(lambda q, k, v: fj.attention(q, k, v, several), qkv, [P("x")] * 3, P("x"))
check(lambda q, k, v, s: fj.attention(q, k, v, pattern, sinks=s), [*qkv, some(8)], [both] * 3 + [P("y")], both)
check(lambda q, k, v, b: fj.attention(q, k, v, pattern, bias=b), [*qkv, some(8, 1, 48)], [both] * 3 + [P("y")], both)
padding = jnp.asarray(draw.random((4, 48)) < 0.3)
padded = lambda q, k, v, m: fj.attention(q, k, v, pattern, key_padding_mask=m)
check(padded, [*qkv, padding], [both] * 3 + [P("x")], both, (0, 1, 2))
slopes = jnp.arange(8.0)
check(lambda q, k, v: fj.attention(q, k, v, pattern, bias=fj.alibi(slopes)), qkv, [both] * 3, both)

# One head of keys for all: queries are cut along heads beside whole keys, whose gradients are summed.
one = [some(4, 1, 48, 8) for _ in range(2)]
for spec in (P("x"), P(None, "y"), both):
    shared = [spec, P(spec[0]), P(spec[0])]
    check(lambda q, k, v: fj.attention(q, k, v, pattern), [qkv[0], *one], shared, spec)
    check(lambda q, k: fj.r_sddmm(q, k, pattern), [qkv[0], one[0]], shared[:2], spec)
    more = some(4, 8, 48, fj.r_sddmm(qkv[0], one[0], pattern).shape[-1])
    check(lambda x, v: fj.r_spmm(x, v, pattern), [more, one[1]], shared[:2], spec)

check(lambda q, k: fj.r_sddmm(q, k, pattern), qkv[:2], [both] * 2, both)
width = fj.r_sddmm(*qkv[:2], pattern).shape[-1]
check(lambda x: fj.r_softmax(x, pattern), [some(4, 8, 48, width)], [both], both)
check(lambda x, v: fj.r_spmm(x, v, pattern), [some(4, 8, 48, width), qkv[2]], [both] * 2, both)

for bias in (False, True):
    more = [some(30)] * bias
    product = lambda x, w, *b: fj.ksmm(x, w, bias=b[0] if b else None, activation="gelu")
    check(product, [some(8, 40), some(2, 3, 4, 5), *more], [P("x"), P(), *[P()] * bias], P("x"))
chain = [some(8, 12), some(3, 2, 4, 1), some(1, 4, 6, 1)]
check(lambda x, a, b: fj.ksmm_chain(x, [a, b]), chain, [P(("x", "y")), P(), P()], P(("x", "y")))
last = lambda x, a, b: fj.ksmm_chain(x, [a, b], bs_last=True)
check(last, [some(12, 8), *chain[1:]], [P(None, "x"), P(), P()], P(None, "x"))

layout = fw.BlockLayout(draw.random((2, 3)) < 2, block=16)
check(lambda a, b: fj.sdd(a, b, layout), [some(4, 1, 32, 24), some(4, 1, 24, 48)], [P("x")] * 2, P("x"))
check(lambda v, b: fj.dsd(v, b, layout), [some(4, 6, 16, 16), some(4, 1, 48, 8)], [P("x")] * 2, P("x"))
check(lambda v, b: fj.dsd(v, b, layout), [some(1, 6, 16, 16), some(4, 1, 48, 8)], [P(), P("x")], P("x"))
check(lambda a, v: fj.dds(a, v, layout), [some(4, 1, 8, 32), some(4, 6, 16, 16)], [P("x")] * 2, P("x"))
check(lambda v: fj.block_softmax(v, layout, scale=0.5), [some(4, 6, 16, 16)], [P("x")], P("x"))
check(lambda x: fj.pack(x, layout), [some(4, 1, 32, 48)], [P("x")], P("x"))
check(lambda v: fj.unpack(v, layout), [some(4, 6, 16, 16)], [P("x")], P("x"))
kernels = fw.BlockLayout.for_conv2d(np.ones((2, 1, 3, 3)), block=8)
check(lambda x, w: fj.block_conv2d(x, w, kernels, 3), [some(4, 8, 6, 6), some(18, 8, 8)], [P("x"), P()], P("x"))
s = two_four.compress(two_four.prune(some(12, 32)))
check(lambda x: two_four.linear(x, s), [some(8, 32)], [P("x")], P("x"))
check(lambda x: two_four.linear(x, s), [some(2, 4, 32)], [P("y", "x")], P("y", "x"))
check(lambda b: two_four.matmul(s, b), [some(4, 32, 6)], [P("x")], P("x"))
# Heads that the devices do not divide are not cut, and results are right.
q, k = some(4, 6, 48, 8), some(4, 3, 48, 8)
put = [jax.device_put(t, NamedSharding(mesh, P(None, "y"))) if t is q else t for t in (q, k, k)]
assert np.allclose(jax.jit(lambda *a: fj.attention(*a, pattern))(*put), fj.attention(q, k, k, pattern), atol=1e-5)
line = Mesh(np.array(jax.devices()), ("x",))
learned = lambda q, k, v, s, b: fj.attention(q, k, v, pattern, sinks=s, bias=b)
blocked = lambda q, k, v: fj.attention(q, k, v, blocks=jnp.ones((1, q.shape[1], 3, 3), bool), block=16)
for f, sizes, specs in [
    (lambda q, k: fj.attention(q, k, k, pattern), [(4, 8, 48, 8), (4, 2, 48, 8)], [P(None, "x"), P()]),
    (lambda q, k: blocked(q, k, k), [(4, 12, 48, 8), (4, 6, 48, 8)], [P(None, "x"), P()]),
    (learned, [(4, 8, 48, 8), *[(4, 4, 48, 8)] * 2, (8,), (8, 48, 48)], [P("x")] * 5),  # two axes cut by one
]:
    operands = [some(*size) for size in sizes]
    put = [jax.device_put(t, NamedSharding(line, s)) for t, s in zip(operands, specs)]
    pull = lambda *a: jax.grad(lambda *a: (f(*a) ** 2).sum(), argnums=range(len(a)))(*a)
    for g, e in zip(jax.jit(lambda *a: (f(*a), *pull(*a)))(*put), (f(*operands), *pull(*operands))):
        assert np.allclose(g, e, atol=1e-3)
mapped = jax.vmap(lambda a, b: fj.attention(a, b, b, pattern))(qkv[0][None], qkv[1][None])[0]
assert np.allclose(mapped, fj.attention(qkv[0], qkv[1], qkv[1], pattern), atol=1e-5)
"""

UNDER_SHARD_MAP = """
def check(f, arguments, specs, out, learns=None):
    local = jax.shard_map(f, mesh=mesh, in_specs=tuple(specs), out_specs=out)
    got, want = jax.jit(local)(*arguments), f(*arguments)
    assert np.allclose(got, want, atol=1e-4)
    learns = tuple(learns or range(len(arguments)))
    pull = lambda g: jax.jit(jax.grad(lambda *a: (g(*a) ** 2).sum(), argnums=learns))(*arguments)
    for g, e in zip(pull(local), pull(f), strict=True):
        assert np.allclose(g, e, atol=1e-3), abs(g - e).max()

both = P("x", "y")
qkv = [some(4, h, 48, 8) for h in (8, 4, 4)]
pattern = fw.patterns.strided(48, 8)
check(lambda q, k, v: fj.attention(q, k, v, pattern), qkv, [both] * 3, both)
check(lambda q, k, v, s: fj.attention(q, k, v, pattern, sinks=s), [*qkv, some(8)], [both] * 3 + [P("y")], both)
check(lambda q, k, v, b: fj.attention(q, k, v, pattern, bias=b), [*qkv, some(1, 48)], [both] * 3 + [P()], both)
slopes = jnp.arange(8.0)
check(lambda q, k, v: fj.attention(q, k, v, pattern, bias=fj.alibi(slopes)), qkv, [P("x")] * 3, P("x"))
check(lambda q, k: fj.r_sddmm(q, k, pattern), qkv[:2], [both] * 2, both)
width = fj.r_sddmm(*qkv[:2], pattern).shape[-1]
check(lambda x: fj.r_softmax(x, pattern), [some(4, 8, 48, width)], [both], both)
check(lambda x, v: fj.r_spmm(x, v, pattern), [some(4, 8, 48, width), qkv[2]], [both] * 2, both)
for bias in (False, True):
    more = [some(30)] * bias
    product = lambda x, w, *b: fj.ksmm(x, w, bias=b[0] if b else None, activation="gelu")
    check(product, [some(8, 40), some(2, 3, 4, 5), *more], [P("x"), P(), *[P()] * bias], P("x"))
chain = [some(8, 12), some(3, 2, 4, 1), some(1, 4, 6, 1)]
check(lambda x, a, b: fj.ksmm_chain(x, [a, b]), chain, [P(("x", "y")), P(), P()], P(("x", "y")))
layout = fw.BlockLayout(draw.random((2, 3)) < 2, block=16)
check(lambda a, b: fj.sdd(a, b, layout), [some(4, 1, 32, 24), some(4, 1, 24, 48)], [P("x")] * 2, P("x"))
check(lambda v, b: fj.dsd(v, b, layout), [some(1, 6, 16, 16), some(4, 1, 48, 8)], [P(), P("x")], P("x"))
check(lambda a, v: fj.dds(a, v, layout), [some(4, 1, 8, 32), some(1, 6, 16, 16)], [P("x"), P()], P("x"))
rpe = some(1, 1, 32, 48)
check(lambda v, r: fj.block_softmax(v, layout, scale=0.5, rpe=r), [some(4, 6, 16, 16), rpe], [P("x"), P()], P("x"))
check(lambda x: fj.pack(x, layout), [some(4, 1, 32, 48)], [P("x")], P("x"))
check(lambda v: fj.unpack(v, layout), [some(4, 6, 16, 16)], [P("x")], P("x"))
kernels = fw.BlockLayout.for_conv2d(np.ones((2, 1, 3, 3)), block=8)
images = [some(4, 8, 6, 6), some(18, 8, 8), some(16)]
check(lambda x, w, b: fj.block_conv2d(x, w, kernels, 3, bias=b), images, [P("x"), P(), P()], P("x"))
s = two_four.compress(two_four.prune(some(12, 32)))
check(lambda x: two_four.linear(x, s), [some(8, 32)], [P("x")], P("x"))
compressed = lambda x, w: two_four.linear(x, two_four.compress(two_four.prune(w)))
check(compressed, [some(8, 32), some(12, 32)], [P("x"), P()], P("x"))
check(lambda x, v: two_four.linear(x, two_four.TwoFour(v, s.metadata)), [some(8, 32), s.values], [P("x"), P()], P("x"))
check(lambda b: two_four.matmul(s, b), [some(4, 32, 6)], [P("x")], P("x"))
ids = jnp.asarray(np.sort(draw.integers(0, 3, 48)))
packed = [jnp.moveaxis(t[0], 0, 1) for t in qkv]
check(lambda q, k, v: fj.varlen_attention(q, k, v, segment_ids=ids), packed, [P(None, "y")] * 3, P(None, "y"))
"""

# In both ways.
DEVICE_KEYS = """
# Keys that only the device knows: masks and lists of a batch, of heads or of all, selections, documents.
for shape in ((4, 8), (4, 4), (1, 4), (4, 1), (1, 1)):
    mask = jnp.asarray(draw.random((*shape, 3, 3)) < 0.6)
    spec = P(*(name if size > 1 else None for name, size in zip("xy", shape)))
    blocked = lambda q, k, v, m: fj.attention(q, k, v, blocks=m, block=16)
    check(blocked, [*qkv, mask], [both] * 3 + [spec], both, (0, 1, 2))
    counts, indices = mask.sum(3, dtype=jnp.int32), jnp.argsort(~mask, axis=3).astype(jnp.int32)
    listed = lambda q, k, v, c, i: fj.attention(q, k, v, blocks=fj.BlockLists(c, i), block=16)
    check(listed, [*qkv, counts, indices], [both] * 3 + [spec] * 2, both, (0, 1, 2))
mask = jnp.asarray(draw.random((4, 8, 3, 3)) < 0.6)
causal = fw.patterns.causal(48)
learned = lambda q, k, v, s, b, m: fj.attention(q, k, v, causal, sinks=s, bias=b, blocks=m, block=16)
check(learned, [*qkv, some(8), some(8, 48, 48), mask], [both] * 3 + [P("y"), P("y"), both], both, range(5))
blocked = lambda q, k, v, m: fj.attention(q, k, v, blocks=m, block=16)
check(blocked, [qkv[0], some(4, 1, 48, 8), some(4, 1, 48, 8), mask], [both, P("x"), P("x"), both], both, (0, 1, 2))
selection = jnp.asarray(draw.permuted(np.tile(np.arange(3), (4, 4, 48, 1)), axis=3)[..., :2], jnp.int32)
selected = lambda q, k, v, i: fj.selected_attention(q, k, v, i, block=16)
check(selected, [*qkv, selection], [both] * 4, both, (0, 1, 2))
topk = lambda q, k, v: fj.attention(q, k, v, blocks=fj.select_blocks(q, k, 2, block=16), block=16)
check(topk, qkv, [both] * 3, both)
check(topk, [qkv[0], some(4, 1, 48, 8), some(4, 1, 48, 8)], [P("x")] * 3, P("x"))
packed = [x[0].swapaxes(0, 1) for x in qkv]
documents = lambda q, k, v: fj.varlen_attention(q, k, v, jnp.array([0, 5, 30, 48]), causal=True)
check(documents, packed, [P(None, "x")] * 3, P(None, "x"))
"""


def run(program):
    flags = dict(XLA_FLAGS="--xla_force_host_platform_device_count=4", JAX_PLATFORMS="cpu")
    command = [sys.executable, "-c", f"{PRELUDE}{program}{DEVICE_KEYS}print('done')"]
    done = subprocess.run(command, env=os.environ | flags, capture_output=True, text=True, timeout=300)
    assert done.stdout == "done\n", done.stderr[-3000:]


def test_nothing_is_gathered_under_jit():
    run(UNDER_JIT)


def test_shard_map():
    run(UNDER_SHARD_MAP)
