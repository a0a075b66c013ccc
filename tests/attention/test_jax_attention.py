"""fretwork.jax's attention and SPLAT's operators against the torch ones, under jit, grad and vmap."""

import pytest
import torch

import fretwork as fw

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from jax.test_util import check_grads  # noqa: E402
from jax_support import exact_products, to_jax  # noqa: E402, F401

import fretwork.jax as fwj  # noqa: E402

parse = fw.Pattern.parse


def close(got, want, tolerance=2e-5):
    got, want = torch.tensor(jax.device_get(got)).double(), want.detach().double()
    assert got.shape == want.shape
    assert torch.equal(got.isinf(), want.isinf())
    error = (got - want)[~want.isinf()].abs().max() if want.numel() else 0
    assert error <= tolerance * max(want[~want.isinf()].abs().max().item() if want.numel() else 0, 1), error


def inputs(pattern, batch=2, heads=(4, 2), dims=(16, 24)):
    rows, cols = pattern.shape[-2:]
    shapes = [(batch, heads[0], rows, dims[0]), (batch, heads[1], cols, dims[0]), (batch, heads[1], cols, dims[1])]
    return [torch.randn(s, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("feature", ["plain", "bias", "wide bias", "alibi", "heads", "pieces"])
def test_attention(feature):
    pattern = parse("strided((30, 40), 6) | band((30, 40), 3, 1, 2)")
    qkv = inputs(pattern)
    shape = (2, 4, 30, 40) if feature == "wide bias" else (4, 1, 40)
    bias = torch.randn(shape, requires_grad=True) if "bias" in feature else None
    slopes = torch.rand(4)
    patterns = [pattern, parse("causal((30, 40))")] * 2 if feature == "heads" else pattern
    if feature == "pieces":
        tree, grid = fw.patterns.tree([-1, 0, 0, 1, 3] * 4), fw.patterns.neighborhood((5, 8), 4, stride=2)
        patterns = [
            fw.patterns.diag([tree, fw.patterns.causal((10, 20))]),
            fw.patterns.place(grid[3:22], (30, 40), at=(7, 0)),
            fw.patterns.with_prefix(grid, 3)[5:35, 2:42],
            fw.patterns.block_causal((30, 40), 7),
        ]
    tensors = [*qkv, *([] if bias is None else [bias])]
    want = fw.attention(*qkv, patterns, 0.3, fw.alibi(slopes) if feature == "alibi" else bias, 2.0, return_lse=True)
    weights = [torch.randn_like(t) for t in want]

    def call(q, k, v, *bias):
        extra = fwj.alibi(to_jax(slopes)) if feature == "alibi" else bias[0] if bias else None
        return fwj.attention(q, k, v, patterns, 0.3, extra, 2.0, return_lse=True)

    def loss(*arrays):
        return sum((x * to_jax(w)).sum() for x, w in zip(call(*arrays), weights, strict=True))

    arrays = [to_jax(t) for t in tensors]
    for run in (call, jax.jit(call)):
        for x, y in zip(run(*arrays), want, strict=True):
            close(x, y)
    expected = torch.autograd.grad(want, tensors, weights)
    for x, y in zip(jax.jit(jax.grad(loss, argnums=tuple(range(len(arrays)))))(*arrays), expected, strict=True):
        close(x, y, 1e-4)


@pytest.mark.parametrize("feature", ["plain", "bias", "own bias", "wide bias", "own slopes", "shared keys"])
def test_vmap_and_its_gradient(feature):
    """What a vmap gives is what its elements give, each alone."""
    pattern = parse("strided(20, 4)")
    arrays = [jnp.stack([to_jax(t), 2 * to_jax(t), -to_jax(t)]) for t in inputs(pattern)]
    axes = [0, 0, 0]
    if feature == "shared keys":
        arrays[1], axes[1] = arrays[1][0], None
    elif feature == "own slopes":
        arrays.append(to_jax(torch.rand(3, 4)))
        axes.append(0)
    elif feature != "plain":
        shape = {"bias": (4, 1, 20), "own bias": (3, 4, 20, 20), "wide bias": (2, 4, 20, 1)}[feature]
        arrays.append(to_jax(torch.randn(shape)))
        axes.append(0 if feature == "own bias" else None)

    def loss(q, k, v, *extra):
        bias = None if not extra else fwj.alibi(extra[0]) if feature == "own slopes" else extra[0]
        o, lse = fwj.attention(q, k, v, pattern, bias=bias, return_lse=True)
        return (o**2).sum() + jnp.sin(lse).sum()

    argnums = tuple(range(3 if feature == "own slopes" else len(arrays)))
    both = jax.value_and_grad(loss, argnums=argnums)
    value, gradients = jax.vmap(both, in_axes=tuple(axes))(*arrays)
    for n in range(3):
        alone = both(*(a if axis is None else a[n] for a, axis in zip(arrays, axes, strict=True)))
        assert jnp.allclose(value[n], alone[0], rtol=1e-4)
        for x, y in zip(gradients, alone[1], strict=True):
            assert jnp.allclose(x[n], y, atol=1e-4)


@pytest.mark.parametrize("extra", ["none", "bias", "padding"])
def test_sinks(extra):
    pattern = parse("strided((30, 40), 6) | band((30, 40), 3, 1, 2)")
    tensors = [*inputs(pattern), torch.randn(4, requires_grad=True)]
    if extra == "bias":
        tensors.append(torch.randn(4, 1, 40, requires_grad=True))
    padding = torch.arange(40)[None] >= torch.tensor([[30], [0]]) if extra == "padding" else None
    arrays = [to_jax(t) for t in tensors]

    def call(module, q, k, v, sinks, bias=None):
        hidden = padding if padding is None or module is fw else to_jax(padding)
        return module.attention(q, k, v, pattern, bias=bias, sinks=sinks, key_padding_mask=hidden, return_lse=True)

    want = call(fw, *tensors)
    weights = [torch.randn_like(t) for t in want]
    for x, y in zip(jax.jit(lambda *a: call(fwj, *a))(*arrays), want, strict=True):
        close(x, y)

    def loss(*a):
        return sum((x * to_jax(w)).sum() for x, w in zip(call(fwj, *a), weights, strict=True))

    gradients = jax.jit(jax.grad(loss, argnums=tuple(range(len(arrays)))))(*arrays)
    for x, y in zip(gradients, torch.autograd.grad(want, tensors, weights), strict=True):
        close(x, y, 1e-4)


@pytest.mark.parametrize("own", [False, True])
def test_vmap_of_sinks(own):
    pattern = parse("causal(20)")
    q, k, v = (jnp.stack([to_jax(t), 2 * to_jax(t)]) for t in inputs(pattern))
    sinks = to_jax(torch.randn(2, 4))

    def loss(q, k, v, sinks):
        return (fwj.attention(q, k, v, pattern, sinks=sinks) ** 2).sum()

    both = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))
    values, gradients = jax.vmap(both, in_axes=(0, 0, 0, 0 if own else None))(q, k, v, sinks if own else sinks[0])
    for n in range(2):
        value, alone = both(q[n], k[n], v[n], sinks[n if own else 0])
        assert jnp.allclose(values[n], value, rtol=1e-4)
        for x, y in zip(gradients, alone, strict=True):
            assert jnp.allclose(x[n], y, atol=1e-4)


def test_no_pattern():
    q, k, v = map(to_jax, inputs(parse("full((20, 30))")))
    assert jnp.array_equal(fwj.attention(q, k, v), fwj.attention(q, k, v, parse("full((20, 30))")))


def test_dropout():
    pattern = parse("full(30)")
    q, k, v = map(to_jax, inputs(pattern))
    first, second = jax.random.split(jax.random.key(0))

    @jax.jit
    def call(key, q):
        return fwj.attention(q, k, v, pattern, dropout_p=0.5, dropout_key=key)

    assert (call(first, q) == call(first, q)).all() and not (call(first, q) == call(second, q)).all()
    each = jax.vmap(call, in_axes=(0, None))(jnp.stack([first, second]), q)
    assert (each[0] == call(first, q)).all() and (each[1] == call(second, q)).all()
    assert not fwj.attention(q, k, v, pattern, dropout_p=1.0).any()
    with pytest.raises(RuntimeError, match=r"attention: dropout_key: expected a key of jax.random"):
        fwj.attention(q, k, v, pattern, dropout_p=0.5)


@pytest.mark.parametrize("text", ["dilated((30, 40), 3, 4)", "longformer((20, 30), 2, (5,))", "axial(5, 6)"])
def test_operators(text):
    pattern = parse(text)
    tensors = inputs(pattern)
    arrays = [to_jax(t) for t in tensors]

    def call(module, q, k, v):
        x = module.r_sddmm(q, k, pattern)
        return module.r_spmm(module.r_softmax(x, pattern, 0.25), v, pattern)

    want = call(fw, *tensors)
    weight = torch.randn_like(want)
    close(jax.jit(lambda *a: call(fwj, *a))(*arrays), want)

    def loss(*a):
        return (call(fwj, *a) * to_jax(weight)).sum()

    for x, y in zip(
        jax.grad(loss, argnums=(0, 1, 2))(*arrays), torch.autograd.grad(want, tensors, weight), strict=True
    ):
        close(x, y)
    stacked = [jnp.stack([a, -a]) for a in arrays]
    for x, y in zip(
        jax.vmap(jax.grad(loss, argnums=(0, 1, 2)), in_axes=(0, None, 0))(stacked[0], arrays[1], stacked[2]),
        jax.grad(loss, argnums=(0, 1, 2))(-arrays[0], arrays[1], -arrays[2]),
        strict=True,
    ):
        assert jnp.allclose(x[1], y, atol=1e-4)
    check_grads(lambda q, k: fwj.r_sddmm(q, k, pattern), arrays[:2], order=2, modes=["rev"], rtol=0.05)


def test_what_is_differentiated_once_says_so():
    pattern = parse("sliding_window(16, 3, 0)")
    q = jnp.ones((1, 2, 16, 8))
    calls = {
        "attention": (lambda x: fwj.attention(x, q, q, pattern), q),
        "r_softmax": (lambda x: fwj.r_softmax(x, pattern), fwj.r_sddmm(q, q, pattern)),
    }
    for op, (call, x) in calls.items():
        first = jax.grad(lambda x, call=call: (call(x) ** 2).sum())
        with pytest.raises(NotImplementedError, match=rf"^{op}: gradient: expected .*, got a second time; "):
            jax.grad(lambda x, first=first: first(x).sum())(x)


def test_bad_calls():
    pattern = parse("dilated(20, 2, 3)")
    q, k, v = map(to_jax, inputs(pattern))
    for call, words in [
        (lambda: fwj.attention(q[0], k, v, pattern), "attention: q: expected 4 dimensions"),
        (lambda: fwj.attention(q, k, v, parse("causal(19)")), "attention: pattern: expected shape"),
        (lambda: fwj.attention(q, k, v, pattern, bias=jnp.ones((3, 20, 20))), "attention: bias: expected a shape"),
        (lambda: fwj.attention(q, k, v, pattern, softcap=-1.0), "attention: softcap: expected"),
        (lambda: fwj.r_sddmm(q, k[..., :3], pattern), "r_sddmm: k: expected shape"),
        (lambda: fwj.r_softmax(q, pattern), "r_softmax: x: expected shape"),
        (lambda: fwj.attention(q, k, v, [pattern] * 3), "attention: pattern: expected 1 or 4, one for each query head"),
        (lambda: fwj.attention(q, k, v, pattern, float("nan")), "attention: scale: expected a finite number, got nan"),
    ]:
        with pytest.raises(RuntimeError, match=words):
            call()
    for call, words in [
        (lambda: fwj.attention(q, k, v, 3), "attention: pattern: expected a fretwork.Pattern"),
        (lambda: fwj.attention(q, k, v, pattern, "0.5"), "attention: scale: expected a number, got '0.5'"),
        (lambda: fwj.attention(q, k, v, pattern, softcap=None), "attention: softcap: expected a number, got NoneType"),
        (lambda: fwj.alibi(jnp.ones(4, bool)), "alibi: slopes: expected real numbers, got bool"),
    ]:
        with pytest.raises(TypeError, match=words):
            call()


@pytest.mark.parametrize("own_patterns", [False, True])
def test_padding_and_patterns_of_elements(own_patterns):
    """NaN in keys that are not seen stays there; vmap gives what its elements give."""
    near, far = parse("sliding_window((20, 30), 6, 2)"), parse("strided((20, 30), 5)")
    pattern = [[near], [far]] if own_patterns else near
    padding = torch.arange(30) >= torch.tensor([[18], [25]])
    q, k, v = inputs(near)
    with torch.no_grad():
        k[padding[:, None].expand(k.shape[:3])] = torch.nan
    want = fw.attention(q, k, v, pattern, key_padding_mask=padding, return_lse=True)
    weights = [torch.randn_like(t) for t in want]
    expected = torch.autograd.grad(want, (q, k, v), weights)

    def call(q, k, v, mask):
        return fwj.attention(q, k, v, pattern, key_padding_mask=mask, return_lse=True)

    def loss(q, k, v, mask):
        return sum((x * to_jax(w)).sum() for x, w in zip(call(q, k, v, mask), weights, strict=True))

    arrays, mask = [to_jax(t) for t in (q, k, v)], to_jax(padding)
    for x, y in zip(jax.jit(call)(*arrays, mask), want, strict=True):
        close(x, y)
    for x, y in zip(jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*arrays, mask), expected, strict=True):
        close(x, y, 1e-4)
    masks = jnp.stack([mask, mask])
    mapped = jax.vmap(jax.grad(loss, argnums=(0, 1, 2)), (None, None, None, 0))(*arrays, masks)
    for x, y in zip(mapped, expected, strict=True):
        close(x[1], y, 1e-4)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=r"attention: key_padding_mask: expected .+, got"):
        call(*arrays, mask[:, :-1])


def test_arrays_are_sent_here():
    with pytest.raises(TypeError, match=r"attention: q: expected a torch.Tensor, got \w+; fretwork.jax takes arrays"):
        fw.attention(*[jnp.ones((1, 2, 8, 16))] * 3)
