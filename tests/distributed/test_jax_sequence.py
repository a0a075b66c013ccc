"""Attention over four devices of a CPU, under `shard_map` with its type checks, against one device: results, gradients,
bits of rows whose keys come in one piece, and the bytes that travel, read from the program."""

import os
import subprocess
import sys

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, PartitionSpec  # noqa: E402

import fretwork as fw  # noqa: E402
import fretwork.jax as fj  # noqa: E402
import fretwork.jax.distributed as fjd  # noqa: E402

P = fw.patterns

PRELUDE = """
import re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, PartitionSpec as P
import fretwork as fw, fretwork.distributed as fd, fretwork.jax as fj, fretwork.jax.distributed as fjd
from fretwork.jax.distributed._rounds import schedule_of
pt = fw.patterns
mesh = Mesh(np.array(jax.devices()), ("seq",))
draw = np.random.default_rng()
some = lambda *shape, dtype=jnp.float32: jnp.asarray(draw.standard_normal(shape), dtype)
rows = P(None, None, "seq")

def whole(size, heads=(4, 2), dims=(8, 12), keys=None, dtype=jnp.float32):
    shapes = [(heads[0], size, dims[0]), (heads[1], keys or size, dims[0]), (heads[1], keys or size, dims[1])]
    return [some(2, *shape, dtype=dtype) for shape in shapes]

def over(f, *specs, out=(rows, rows), on=mesh, **more):
    return jax.jit(jax.shard_map(f, mesh=on, in_specs=(rows,) * 3 + specs, out_specs=out, **more))

def near(got, want, most=1e-4):
    got, want = (jnp.nan_to_num(t.astype(jnp.float32), neginf=-1.0) for t in (got, want))
    assert jnp.allclose(got, want, atol=most), abs(got - want).max()

def check(pattern, qkv, options=(), cut=(), **static):
    '''`options` by name, in parts as `cut` says; floating ones learn. Gradients of o and of lse.'''
    options, cut = dict(options), dict(cut)
    names = list(options)
    def call(attention, q, k, v, *given):
        given = dict(zip(names, given, strict=True))
        if "slopes" in given:
            given["bias"] = fj.alibi(given.pop("slopes"))
        return attention(q, k, v, **given, **static, return_lse=True)
    one = lambda *a: call(lambda q, k, v, **more: fj.attention(q, k, v, pattern, **more), *a)
    local = lambda *a: call(lambda q, k, v, **more: fjd.attention(q, k, v, pattern, "seq", **more), *a)
    many = over(local, *(cut.get(name, P()) for name in names))
    given = [*qkv, *options.values()]
    (o, lse), (want, want_lse) = many(*given), one(*given)
    near(o, want), near(lse, want_lse)
    d, d_lse = some(*o.shape), jnp.where(want_lse == -jnp.inf, 0, some(*lse.shape))
    learns = tuple(n for n, x in enumerate(given) if x.dtype != bool and (n < 3 or names[n - 3] in ("bias", "sinks")))
    def loss(f, *a):
        o, lse = f(*a)
        return (o * d).sum() + (jnp.where(d_lse == 0, 0, lse) * d_lse).sum()
    for g, e in zip(*(jax.jit(jax.grad(lambda *a: loss(f, *a), learns))(*given) for f in (many, one)), strict=True):
        near(g, e, 1e-3)
"""

OPTIONS = """
texts = ["sliding_window(128,20,0)", "sliding_window(128,9,14)", "strided(128,11)", "longformer(128,5,(0,70,127))",
         "causal(128)", "sinks(128,3,20)"]
for text in texts:
    pattern, padding = fw.Pattern.parse(text), jnp.asarray(draw.random((2, 128)) < 0.3)
    check(pattern, whole(128), dict(sinks=some(4)), scale=0.3, softcap=3.0)
    more = dict(slopes=jnp.asarray(draw.random(4), jnp.float32), key_padding_mask=padding)
    check(pattern, whole(128), more, dict(key_padding_mask=P(None, "seq")))
for text, shape in zip(texts[1:5], [(2, 1, 128, 1), (1, 4, 128, 128), (4, 1, 128), (1,)], strict=True):
    cut = rows if shape[-2:-1] == (128,) else P()
    check(fw.Pattern.parse(text), whole(128), dict(bias=some(*shape), sinks=some(4)), dict(bias=cut))
several = [fw.Pattern.parse(text) for text in texts[:4]]
check(several, whole(128), dict(slopes=jnp.arange(4.0), sinks=some(4)))
check([[several[2]], several], whole(128))
print("done")
"""

PATTERNS = """
check(pt.causal((60, 120)), whole(60, keys=120), dict(bias=some(2, 4, 60, 120)), dict(bias=rows))
check(pt.causal((60, 120)), whole(60, keys=120), dict(slopes=jnp.arange(4.0)))
check(None, whole(48))
check(pt.fixed(1024, 32, 2), whole(1024, (1, 1)))  # many ranges from each device
check(pt.sinks(512, 3, 40) | pt.from_mask(draw.random((512, 512)) < 0.01), whole(512, (1, 1)))  # all different
check(fw.BlockLayout(draw.random((8, 8)) < 0.4, block=16), whole(128))
check(pt.place(pt.full(0), (64, 64)), whole(64))
# Heads are cut by another axis, and operands are whole on an axis that cuts nothing.
for names in (("heads", "seq"), ("nothing", "seq")):
    two = Mesh(np.array(jax.devices()).reshape(2, 2), names)
    cut, of_heads = (P(None, "heads", "seq"), P("heads")) if "heads" in names else (rows, P())
    pattern, given = pt.sinks(128, 3, 20), [*whole(128), some(4)]
    local = lambda q, k, v, s: fjd.attention(q, k, v, pattern, "seq", sinks=s)
    for checks in (True, False):
        many = jax.shard_map(local, mesh=two, in_specs=(cut, cut, cut, of_heads), out_specs=cut, check_vma=checks)
        one = lambda q, k, v, s: fj.attention(q, k, v, pattern, sinks=s)
        near(jax.jit(many)(*given), one(*given))
        found = (jax.jit(jax.grad(lambda *a: (f(*a) ** 2).sum(), range(4)))(*given) for f in (many, one))
        for g, e in zip(*found, strict=True):
            near(g, e, 1e-3)
# Both axes cut the sequence; a map over further elements; remat.
two = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
cut, given, pattern = P(None, None, ("x", "y")), whole(128), pt.strided(128, 8)
many = jax.shard_map(
    lambda *a: fjd.attention(*a, pattern, ("x", "y")), mesh=two, in_specs=(cut,) * 3, out_specs=cut
)
near(jax.jit(many)(*given), fj.attention(*given, pattern))
parts = P(None, None, None, "seq")
mapped = jax.shard_map(
    jax.vmap(jax.checkpoint(lambda *a: fjd.attention(*a, pattern, "seq"))),
    mesh=mesh, in_specs=(parts,) * 3, out_specs=parts,
)
twice = [jnp.stack([x, 2 * x]) for x in given]
near(jax.jit(mapped)(*twice)[1], fj.attention(*(2 * x for x in given), pattern))
g = jax.jit(jax.grad(lambda *a: (mapped(*a) ** 2).sum(), range(3)))(*twice)
e = jax.grad(lambda *a: (fj.attention(*a, pattern) ** 2).sum(), range(3))(*(2 * x for x in given))
[near(a[1], b, 1e-2) for a, b in zip(g, e, strict=True)]
print("done")
"""

TRAVELS = """
def size(shape, pairs):
    return 4 * np.prod([int(n) for n in shape]) * pairs

def moved(compiled):
    '''Bytes of all permutations; nothing else may travel.'''
    total = 0
    for line in compiled.as_text().splitlines():
        assert not re.search("all-gather|all-reduce|all-to-all|reduce-scatter|collective-broadcast", line), line
        if "collective-permute" in line:
            (shape,) = re.findall(r"= f32\\[([\\d,]+)\\]\\S* collective-permute", line)
            total += size(shape.split(","), line.partition("pairs=")[2].partition("}}")[0].count("{") - 1)
    return total

def asked(lowered):
    '''The same before XLA: on a CPU it takes keys that are sent twice for the same.'''
    found = re.findall(r"collective_permute.*tensor<(\\d+)x2xi64>}> : \\(tensor<([\\dx]+)xf32>", lowered.as_text())
    return sum(size(shape.split("x"), int(pairs)) for pairs, shape in found)

for pattern, keys, journeys in (
    (pt.sliding_window(1024, 100, 0), 3 * 100, 1),
    (pt.sliding_window(1024, 60, 60), 6 * 60, 1),
    (pt.full(1024), 12 * 256, 2),
    (pt.causal(1024), 6 * 256, 2),
    (pt.sinks(1024, 4, 60), 63 + 2 * 59 + 2 * 4, 1),
    (pt.longformer(1024, 30, [0]), 3 * 256 + 3 * 31 + 2 * 30 + 2 * 1, 2),  # two that need 30 get 31
):
    schedule = schedule_of((pattern,), 4, False)
    parts = tuple((n, n + 256) for n in range(0, 1024, 256))
    needs = (fd.Shards(pattern, parts, parts).needs(rank) for rank in range(4))
    needed = sum(last - first for peers in needs for ranges in peers.values() for first, last in ranges)
    assert keys - needed == (2 if "longformer" in pattern.text else 0)
    assert schedule.keys_sent == keys and schedule.sends_again == (journeys == 2)
    qkv = whole(1024, (2, 1), (32, 16))
    local = over(lambda q, k, v: fjd.attention(q, k, v, pattern, "seq"), out=rows)
    lowered = jax.jit(jax.grad(lambda *a: local(*a).sum(), range(3))).lower(*qkv)
    pull = lowered.compile()
    of_a_key = 2 * (32 + 16) * 4
    assert moved(local.lower(*qkv).compile()) == keys * of_a_key
    assert moved(pull) == 2 * keys * of_a_key
    assert asked(lowered) == (1 + journeys) * keys * of_a_key  # there, perhaps again, and back
    assert all((a == b).all() for a, b in zip(pull(*qkv), pull(*qkv), strict=True))
    for given in (qkv, [x.astype(jnp.bfloat16) for x in qkv]):
        if "sliding" in pattern.text:  # all keys of a row in one piece
            assert (local(*given) == fj.attention(*given, pattern)).all()
        near(local(*given), fj.attention(*given, pattern), 1e-4 if given is qkv else 0.03)
print("done")
"""


def run(program):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    environment = os.environ | dict(XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.stdout == "done\n", done.stderr[-3000:]


@pytest.mark.parametrize("program", [OPTIONS, PATTERNS, TRAVELS], ids=["options", "patterns", "travels"])
def test_four_devices(program):
    run(PRELUDE + program)


WITHOUT_TORCH = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "torch" else find(name, *more)
sys.modules["torch"] = None
import fretwork as fw, fretwork.distributed as fd, fretwork.jax.distributed as fjd
from fretwork.jax.distributed._rounds import schedule_of
assert fd.shard(fw.patterns.causal(256), 2).needs(1) == {0: [(0, 128)]}
assert schedule_of((fw.patterns.causal(256),), 2, False).keys_sent == 128
print("done")
"""


def test_it_needs_no_torch():
    run(WITHOUT_TORCH)


@pytest.mark.parametrize(
    "bad, text",
    [
        (dict(axis_name="other"), "axis_name: expected an axis of the shard_map around this call, got 'other'"),
        (dict(axis_name=3), "axis_name: expected the name of an axis, or several, got 3"),
        (dict(dropout_p=0.1), "dropout_p: expected 0 over several devices, got 0.1"),
        (dict(bias=np.zeros((63, 64))), r"bias: expected 64 rows, this device's, or 1, got 63 in \(63, 64\)"),
        (dict(bias=np.zeros((64, 63))), r"bias: expected a shape that broadcasts to \(2, 2, 64, 64\), got \(64, 63\)"),
        (dict(blocks=np.ones((1, 1, 1, 1), bool)), "blocks: expected None over several devices, got ndarray"),
        (dict(q=np.zeros((2, 2, 63, 8))), r"q: expected 64 rows, one of 1 parts of 64, got 63 in \(2, 2, 63, 8\)"),
        (dict(k=np.zeros((2, 64, 8))), r"k: expected 4 dimensions \(B, Hk, keys, D\), got \(2, 64, 8\)"),
        (dict(v=np.zeros((2, 2, 64, 0))), "v: expected "),
        (dict(sinks=np.zeros(3)), r"sinks: expected shape \(2,\), got \(3,\)"),
        (dict(bias=lambda: fj.alibi(jnp.zeros(3))), r"bias: expected slopes of shape \(2,\), got \(3,\)"),
        (
            dict(key_padding_mask=np.zeros((2, 63), bool)),
            r"key_padding_mask: expected shape \(2, 64\), one for each key of this device, got \(2, 63\)",
        ),
        (dict(key_padding_mask=np.zeros((2, 64))), "key_padding_mask: expected bool, True where a key is padding, "),
        (dict(pattern=[P.causal(64), P.causal(63)]), r"pattern\[1\]: expected shape \(64, 64\) like the first, got "),
        (dict(pattern=P.causal((64, 63))), "k: expected 63 rows, one of 1 parts of 63, got 64 in "),
        (dict(softcap=-1.0), r"softcap: expected 0 \(none\) or a positive number, got -1.0"),
        (dict(precision="half"), "precision: expected None, ieee, tf32 or tf32x3, got 'half'"),
    ],
    ids=lambda x: ", ".join(x) if isinstance(x, dict) else "",
)
def test_refuses(bad, text):
    call = dict(zip("qkv", jnp.zeros((3, 2, 2, 64, 8)), strict=True), pattern=P.causal(64), axis_name="seq") | bad
    call |= {name: x() for name, x in call.items() if callable(x)}
    mesh, whole = Mesh(jax.devices()[:1], ("seq",)), PartitionSpec()
    with pytest.raises((RuntimeError, TypeError, NotImplementedError, NameError), match=f"^attention: {text}"):
        jax.shard_map(lambda: fjd.attention(**call), mesh=mesh, in_specs=(), out_specs=whole)()


def test_parts_must_be_equal():
    with pytest.raises(
        RuntimeError, match=r"attention: pattern: expected lengths that 2 devices divide, got \(63, 63\)"
    ):
        part = jnp.zeros((1, 1, 31, 8))
        jax.vmap(lambda q: fjd.attention(q, q, q, P.causal(63), "seq"), axis_name="seq")(jnp.stack([part, part]))
