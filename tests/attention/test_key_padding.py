"""fw.attention with key_padding_mask, and with patterns for each element of a batch, against float64 from the mask."""

import pytest
import torch
from conftest import dtypes_of
from test_attention import compare, softmax

import fretwork as fw

P = fw.patterns


def dense(q, k, v, mask, bias=None, softcap=0.0):
    """The definition in float64; `mask` broadcasts to (B, Hq, Sq, Sk)."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT * q.shape[-1] ** -0.5
    s = softcap * torch.tanh(s / softcap) if softcap else s
    weight, lse = softmax((s if bias is None else s + bias).masked_fill(~mask, -torch.inf))
    return weight @ v, lse


def inputs(device, dtype, shape, batch=3, heads=(4, 2), dims=(64, 64)):
    rows, cols = shape
    sizes = [(batch, heads[0], rows, dims[0]), (batch, heads[1], cols, dims[0]), (batch, heads[1], cols, dims[1])]
    return [torch.randn(s, device=device).to(dtype) for s in sizes]


def some_padding(device, batch, cols):
    """At the end, at the beginning, here and there, everywhere."""
    at = torch.arange(cols, device=device)
    kinds = [at >= cols * 2 // 3, at < cols // 4, at % 3 == 1, at >= 0, at < 0]
    return torch.stack([kinds[b % len(kinds)] for b in range(batch)])


def check(pattern, mask, padding, qkv, **options):
    """Results and gradients, with NaN and infinity in what is not seen."""
    dtype, device = qkv[0].dtype, qkv[0].device
    bias = options.get("bias")
    exact = [t.double().cpu().requires_grad_() for t in (*qkv, bias) if t is not None]
    q, k, v = (t.clone() for t in qkv)
    if padding is not None:
        hidden = padding[:, None].expand(k.shape[:3])
        k[hidden], v[hidden] = torch.nan, torch.inf
        mask = mask & ~padding.cpu()[:, None, None]
    tensors = [t.requires_grad_() for t in (q, k, v, bias) if t is not None]
    o, lse = fw.attention(q, k, v, pattern, key_padding_mask=padding, return_lse=True, **options)
    want, want_lse = dense(*exact[:3], mask, *exact[3:], softcap=options.get("softcap", 0.0))
    compare(o, want, dtype, "o")
    compare(lse, want_lse, torch.float32, "lse", 5 if dtype.itemsize > 2 else 50)
    up, up_lse = torch.randn(o.shape, device=device).to(dtype), torch.randn(lse.shape, device=device).to(lse.dtype)
    got = torch.autograd.grad((o, lse), tensors, (up, up_lse))
    expected = torch.autograd.grad((want, want_lse), exact, (up.double().cpu(), up_lse.double().cpu()))
    for n, (x, y) in enumerate(zip(got, expected, strict=True)):
        floor = 1.0 if n < 3 else max(1.0, (o[..., 0].numel() * mask.shape[-1] / x.numel()) ** 0.5)
        compare(x, y, dtype, f"gradient {n}", 2, floor)
    if padding is not None:
        assert not got[1][hidden].any() and not got[2][hidden].any()


PATTERNS = ["causal((70, 150))", "sliding_window(150, 40, 3)", "strided(150, 12)", "longformer(150, 9, [0, 71])"]
PATTERNS += ["dilated(140, 4, 5)", "neighborhood((10, 13), 5)", "full((33, 200))"]


@pytest.mark.parametrize("text", PATTERNS)
@pytest.mark.parametrize("heads", [(2, 2), (4, 1)])
def test_patterns(device, text, heads):
    pattern = fw.Pattern.parse(text.replace("[", "(").replace("]", ",)"))
    for dtype in dtypes_of(device):
        qkv = inputs(device, dtype, pattern.shape, 5, heads)
        check(pattern, pattern.mask(), some_padding(device, 5, pattern.shape[1]), qkv)


@pytest.mark.parametrize("dims", [(8, 8), (40, 64), (64, 128), (128, 128), (192, 128), (256, 256), (20, 33)])
def test_depths(device, dims):
    pattern = P.causal(150)
    for dtype in dtypes_of(device):
        check(pattern, pattern.mask(), some_padding(device, 3, 150), inputs(device, dtype, (150, 150), dims=dims))


@pytest.mark.parametrize("rows", [1, 3, 8, 16, 40])
@pytest.mark.parametrize("heads", [(8, 1), (2, 2)])
def test_few_queries(device, rows, heads):
    pattern = P.sinks((rows, 700), 4, 500)
    for dtype in dtypes_of(device):
        check(pattern, pattern.mask(), some_padding(device, 5, 700), inputs(device, dtype, (rows, 700), 5, heads))


@pytest.mark.parametrize("shape", [(1, 1, 1, 90), (3, 1, 1, 90), (1, 4, 90, 90), (3, 4, 90, 1)])
def test_bias_and_softcap(device, shape):
    for dtype in dtypes_of(device):
        for pattern in (P.sliding_window(90, 20, 6), P.strided(90, 7)):
            bias = torch.randn(shape, device=device).to(dtype)
            padding = some_padding(device, 3, 90)
            check(pattern, pattern.mask(), padding, inputs(device, dtype, (90, 90)), bias=bias, softcap=2.0)


def test_dropout_and_alibi(device):
    """The same as taking those keys out of the pattern."""
    pattern, padding = P.sliding_window(60, 20, 5), some_padding(device, 1, 60)
    fewer = P.from_mask(pattern.mask() & ~padding.cpu())
    qkv = [t.requires_grad_() for t in inputs(device, torch.float32, (60, 60), 1)]
    options = {"dropout_p": 0.4, "bias": fw.alibi(torch.rand(4, device=device))}
    found = []
    for p, mask in ((pattern, padding), (fewer, None)):
        torch.manual_seed(3)
        o = fw.attention(*qkv, p, key_padding_mask=mask, **options)
        found.append([o, *torch.autograd.grad(o.square().sum(), qkv)])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


def test_strides_of_the_mask(device):
    pattern, qkv = P.causal(90), inputs(device, torch.float32, (90, 90))
    padding = some_padding(device, 3, 90)
    wide = torch.ones(3, 2, 180, dtype=torch.bool, device=device)
    wide[:, 1, 1::2] = padding
    turned = padding.T.contiguous().T
    one = padding[:1].expand(3, 90)
    for mask, same in ((wide[:, 1, 1::2], padding), (turned, padding), (one, one.contiguous())):
        got = fw.attention(*qkv, pattern, key_padding_mask=mask)
        assert torch.equal(got, fw.attention(*qkv, pattern, key_padding_mask=same))


def test_nothing_padded_changes_nothing(device):
    pattern = P.strided(150, 12)
    for dtype in dtypes_of(device):
        qkv = inputs(device, dtype, (150, 150))
        none = torch.zeros(3, 150, dtype=torch.bool, device=device)
        assert torch.equal(fw.attention(*qkv, pattern, key_padding_mask=none), fw.attention(*qkv, pattern))


@pytest.mark.parametrize("wanted", ["qkv", "qk", "k", "v", "kv"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_queries_whose_keys_are_all_padding(device, bad, wanted):
    """They may hold anything, and so may the gradient of their results: no key gets any of it."""
    if device.type != "cpu":
        pytest.skip("about a CPU's kernels")
    pattern, padding = P.causal(90), torch.arange(90) < torch.tensor([30, 0, 70])[:, None]
    blind = (~(pattern.mask() & ~padding[:, None]).any(-1))[:, None, :, None]
    for dtype in dtypes_of(device):
        qkv = inputs(device, dtype, (90, 90))
        up = torch.randn(3, 4, 90, 64).to(dtype)
        for options in (dict(), dict(sinks=torch.randn(4)), dict(blocks=torch.ones(1, 4, 3, 3).bool(), block=32)):
            found = []
            for q, d_o in ((qkv[0], up), (qkv[0].masked_fill(blind, bad), up.masked_fill(blind, bad))):
                given = {n: t.clone().requires_grad_(n in wanted) for n, t in zip("qkv", (q, *qkv[1:]), strict=True)}
                o = fw.attention(*given.values(), pattern, key_padding_mask=padding, **options)
                d_o = d_o if wanted != "qkv" else up  # then queries have gradients too
                found.append([o, *torch.autograd.grad(o, [given[name] for name in wanted], d_o)])
            for x, y in zip(*found, strict=True):
                assert torch.equal(x, y)


def tiles_of_padding(device, cols):
    """Whole tiles of 64 and of 128 keys at the start, in the middle, at the end, every other one; single keys at edges
    of tiles, hidden and seen. Kernels skip tiles with nothing seen, and mask those with some."""
    at = torch.arange(cols, device=device)
    edges = torch.isin(at, torch.tensor([0, 63, 64, 127, 128, 191, 255, 256, cols - 1], device=device))
    masks = {
        "start": at < 128,
        "start and one key": at < 129,
        "middle": (at >= 192) & (at < 320),
        "end": at >= cols // 128 * 128,
        "end but one key": at >= cols // 128 * 128 - 127,
        "alternate 64": at // 64 % 2 == 0,
        "alternate 128": at // 128 % 2 == 1,
        "edges hidden": edges,
        "edges seen": ~edges,
        "one key seen": at != 320,
        "all": at >= 0,
    }
    return torch.stack(list(masks.values()))


TILED = ["full((130, 450))", "causal(450)", "sliding_window(450, 100, 60)", "strided(450, 64)"]


@pytest.mark.parametrize("text", TILED)
@pytest.mark.parametrize("heads, dim", [((1, 1), 64), ((2, 1), 128), ((1, 1), 192)])
def test_hidden_tiles(device, text, heads, dim):
    """Every mask is a batch element of its own: tiles that one skips, others see."""
    pattern = fw.Pattern.parse(text)
    padding = tiles_of_padding(device, pattern.shape[1])
    for dtype in [torch.float32] if device.type == "cpu" else [torch.float16, torch.bfloat16, torch.float32]:
        qkv = inputs(device, dtype, pattern.shape, len(padding), heads, (dim, dim))
        check(pattern, pattern.mask(), padding, qkv)


@pytest.mark.parametrize("text", ["full((40, 2500))", "sinks((40, 2500), 4, 2300)", "longformer(700, 9, [0, 310])"])
def test_hidden_tiles_of_pieces(device, text):
    """Long row tiles are cut into pieces, and heads that share keys share tiles: a piece may have nothing to do."""
    pattern = fw.Pattern.parse(text.replace("[", "(").replace("]", ",)"))
    at = torch.arange(pattern.shape[1], device=device)
    half = len(at) // 2
    padding = torch.stack([at < half + 150, at >= half - 20, at // 64 % 3 != 0, at >= 0, at < 0])
    for dtype in [torch.float32] if device.type == "cpu" else [torch.bfloat16]:
        check(pattern, pattern.mask(), padding, inputs(device, dtype, pattern.shape, 5, (4, 1)))


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_hidden_tiles_are_deterministic(device, dim):
    """And a mask that hides nothing changes no bit where there are many tiles."""
    pattern, dtype = P.causal(450), torch.float32 if device.type == "cpu" else torch.bfloat16
    qkv = inputs(device, dtype, pattern.shape, 11, (1, 1), (dim, dim))
    padding = tiles_of_padding(device, 450)
    call = [fw.attention(*qkv, pattern, key_padding_mask=mask) for mask in (padding, padding, padding & False, None)]
    assert torch.equal(call[0], call[1])
    assert torch.equal(call[2], call[3])


@pytest.mark.parametrize("pattern", [P.full(1024), P.causal(4096)], ids=["full", "causal"])
@pytest.mark.parametrize("depth", [64, 128])
def test_all_gradients_at_once(device, pattern, depth):
    """Long enough for the kernels that make all gradients in five products."""
    if device.type == "cpu":
        pytest.skip("as all others on a CPU")
    rows = pattern.shape[0]
    heads = 33 if rows == 1024 else 15
    qkv = inputs(device, torch.bfloat16, (rows, rows), 1, (heads, heads), (depth, depth))
    check(pattern, pattern.mask(), (torch.arange(rows, device=device) % 200 > 120)[None], qkv)


def test_transforms(device):
    """compile, vmap over it, autocast, and the op's own rules."""
    pattern = P.sliding_window((20, 30), 8, 2)
    q, k, v = inputs(device, torch.float32, (20, 30))
    padding = some_padding(device, 3, 30)

    def call(q, k, v, mask):
        return fw.attention(q, k, v, pattern, key_padding_mask=mask)

    want = call(q, k, v, padding)
    torch.testing.assert_close(torch.compile(call, fullgraph=True)(q, k, v, padding), want)
    many = torch.stack([padding, ~padding])
    got = torch.func.vmap(call, (None, None, None, 0))(q, k, v, many)
    torch.testing.assert_close(got, torch.stack([want, call(q, k, v, ~padding)]))
    with torch.autocast(device.type, torch.bfloat16):
        assert call(q, k, v, padding).dtype == torch.bfloat16
    q.requires_grad_()
    rest = (pattern.key, None, None, None, 0.0, 0.0, None, "ieee", padding)
    torch.library.opcheck(torch.ops.fretwork.attention.default, (q, k, v, *rest))


@pytest.mark.parametrize("wrong", ["shape", "dtype", "device", "type"])
def test_bad_masks(device, wrong):
    qkv = inputs(device, torch.float32, (20, 20))
    mask = torch.zeros(3, 20, dtype=torch.bool, device=device)
    bad = {"shape": mask[:, :-1], "dtype": mask.float(), "device": mask.to("meta"), "type": [[True]]}[wrong]
    with pytest.raises(
        (RuntimeError, TypeError, NotImplementedError), match=None if wrong == "device" else "key_padding_mask"
    ):
        fw.attention(*qkv, P.causal(20), key_padding_mask=bad)


# Patterns of batch elements


@pytest.mark.parametrize("heads", [(1, 1), (4, 2)])
def test_patterns_of_elements(device, heads):
    one_each = [[P.causal(60)], [P.strided(60, 8)], [P.strided(60, 8)], [P.longformer(60, 3, [0, 17])]]
    each_head = [[P.sliding_window(60, h + 2 * b, 1) for h in range(heads[0])] for b in range(4)]
    for patterns in (one_each, each_head, [one_each[0], *each_head[1:]], [one_each[0]] * 4):
        rows = [row * heads[0] if len(row) == 1 else row for row in patterns]
        mask = torch.stack([torch.stack([p.mask() for p in row]) for row in rows])
        for dtype in dtypes_of(device):
            for padding in (None, some_padding(device, 4, 60)):
                check(patterns, mask, padding, inputs(device, dtype, (60, 60), 4, heads))


@pytest.mark.parametrize("shape", [(1, 1, 1, 50), (1, 2, 50, 50), (3, 1, 50, 50)])
def test_patterns_of_elements_and_a_bias(device, shape):
    patterns = [[P.causal(50)], [P.strided(50, 6)], [P.sliding_window(50, 2, 2)]]
    mask = torch.stack([p.mask() for (p,) in patterns])[:, None]
    for dtype in dtypes_of(device):
        bias = 3 * torch.randn(shape, device=device)
        bias[..., 30:] = -1e30  # so low that what rounding leaves of lse counts
        qkv = inputs(device, dtype, (50, 50), 3, (2, 2))
        check(
            patterns,
            mask.expand(3, 2, 50, 50),
            None,
            qkv,
            bias=bias.to(dtype if dtype != torch.float16 else bias.dtype),
        )


def test_dropout_of_elements(device):
    """As if all had the same pattern: it is counted by batch element."""
    qkv = inputs(device, torch.float32, (40, 40), 3)
    patterns = [P.causal(40), P.full(40), P.causal(40)]
    torch.manual_seed(5)
    got = fw.attention(*qkv, [[p] for p in patterns], dropout_p=0.5)
    for b, pattern in enumerate(patterns):
        torch.manual_seed(5)
        torch.testing.assert_close(got[b], fw.attention(*qkv, pattern, dropout_p=0.5)[b])


def test_sequences_of_patterns(device):
    q, k, v = inputs(device, torch.float32, (40, 40))
    causal = P.causal(40)
    want = fw.attention(q, k, v, causal)
    for same in ([causal], [causal] * 4, [[causal]] * 3, [[causal] * 4, [causal], [causal]]):
        assert torch.equal(fw.attention(q, k, v, same), want)
    own = [[causal], [P.full(40)], [causal] * 4]
    compiled = torch.compile(lambda q: fw.attention(q, k, v, own), fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(q), fw.attention(q, k, v, own))
    mapped = torch.func.vmap(lambda q: fw.attention(q, k, v, [[causal], [P.full(40)], [causal]]))(q.expand(2, *q.shape))
    torch.testing.assert_close(mapped[1], fw.attention(q, k, v, [[causal], [P.full(40)], [causal]]))


@pytest.mark.parametrize("batch, heads", [(0, 4), (2, 0), (0, 0)])
def test_elements_of_nothing(device, batch, heads):
    """A list of one for each element, or each head, has nothing in it where there are none."""
    q, k, v = (torch.randn(batch, heads, 40, 8, device=device, requires_grad=True) for _ in range(3))
    for patterns in ([[P.causal(40)] for _ in range(batch)], [P.causal(40) for _ in range(heads)]):
        o = fw.attention(q, k, v, patterns)
        assert o.shape == q.shape and torch.autograd.grad(o.sum(), q)[0].shape == q.shape


@pytest.mark.parametrize(
    "bad, argument",
    [
        ("[causal] * 3", "pattern"),
        ("[[causal]] * 2", "pattern"),
        ("[[causal], [causal] * 3, [causal]]", r"pattern\[1\]"),
        ("[[causal], [], [causal]]", r"pattern\[1\]"),
        ("[[causal], [0], [causal]]", r"pattern\[1\]\[0\]"),
        ("[[causal], [other], [causal]]", "pattern"),
        ("[]", "pattern"),
        ("[[causal], causal, [causal]]", r"pattern\[1\]"),
    ],
)
def test_bad_sequences(device, bad, argument):
    qkv = inputs(device, torch.float32, (40, 40))
    with pytest.raises((TypeError, RuntimeError, ValueError), match=f"attention: {argument}: expected .+, got"):
        fw.attention(*qkv, eval(bad, {"causal": P.causal(40), "other": P.causal(41)}))
