"""fw.attention and SPLAT's operators against float64: any pattern, size, heads, dtype and strides; torch's features."""

import functools
import operator

import pytest
import torch
from conftest import assert_close, dtypes_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

import fretwork as fw

parse = fw.Pattern.parse


def softmax(s):
    """Softmax and log-sum-exp of rows that may be empty."""
    top = torch.nn.functional.pad(s.detach(), (0, 1), value=-torch.inf).amax(-1, keepdim=True)
    top = top.where(top.isfinite(), 0.0)
    weight = torch.exp(s - top)
    total = weight.sum(-1, keepdim=True)
    safe = total.where(total > 0, 1.0)
    return weight / safe, (safe.log() + top).where(total > 0, -torch.inf).squeeze(-1)


def dense(q, k, v, mask, scale=None, bias=None, softcap=0.0):
    """The definition, in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    weight, lse = softmax((s if bias is None else s + bias).masked_fill(~mask, -torch.inf))
    return weight @ v, lse


def wide(t):
    return t.detach().double().cpu().requires_grad_()


def inputs(device, dtype, pattern, batch=2, heads=(4, 2), dims=(16, 24)):
    rows, cols = pattern.shape[-2:]
    shapes = [(batch, heads[0], rows, dims[0]), (batch, heads[1], cols, dims[0]), (batch, heads[1], cols, dims[1])]
    return [torch.randn(s, device=device).to(dtype).requires_grad_() for s in shapes]


def compare(got, want, dtype, what, factor=1.0, floor=1e-3):
    """Like assert_close, but rows without keys have lse −inf."""
    got, want = got.detach().double().cpu(), want.detach()
    assert got.shape == want.shape, what
    empty = want.isinf()
    assert torch.equal(got[empty], want[empty]), what
    rest = want[~empty]
    if rest.numel():
        error = (got[~empty] - rest).abs().max().item() / max(rest.abs().max().item(), floor)
        tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        assert error <= factor * tolerance, f"{what}: error {error:.2e}"  # false for NaN too


def check(pattern, qkv, bias=None, **options):
    """Results and gradients against the definition."""
    dtype = qkv[0].dtype
    patterns = pattern if isinstance(pattern, list) else [pattern]
    mask = torch.stack([p.mask().squeeze(0) if p.mask().dim() == 3 else p.mask() for p in patterns])
    tensors = [*qkv, bias] if torch.is_tensor(bias) else [*qkv]
    o, lse = fw.attention(*qkv, pattern, bias=bias, return_lse=True, **options)
    exact = [wide(t) for t in tensors]
    slopes = exact[3] if torch.is_tensor(bias) else None
    if isinstance(bias, fw.alibi):
        rows, cols = mask.shape[-2:]
        distance = (torch.arange(rows)[:, None] + cols - rows - torch.arange(cols)).abs()
        slopes = -bias.slopes.double().cpu()[:, None, None] * distance
    want, want_lse = dense(*exact[:3], mask, bias=slopes, **options)
    assert o.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    compare(o, want, dtype, "o")
    compare(lse, want_lse, torch.float32, "lse", 5 if dtype.itemsize > 2 else 50)
    weight = torch.randn(o.shape, device=o.device).to(dtype)
    gradients = torch.autograd.grad(o, tensors, weight)
    for n, (x, y) in enumerate(zip(gradients, torch.autograd.grad(want, exact, weight.double().cpu()), strict=True)):
        assert x.dtype == tensors[n].dtype
        # Where a query has one key, or a bias is the same for all of them, the terms of a gradient cancel, and what is
        # left is their rounding.
        floor = (
            (1.0 if n < 3 else max(1.0, (o[..., 0].numel() * mask.shape[-1] / x.numel()) ** 0.5)) if x.numel() else 1
        )
        compare(x, y, torch.float32 if dtype == torch.float64 != x.dtype else dtype, f"gradient {n}", 2, floor)


# Random patterns


@st.composite
def regular(draw, rows, cols):
    """A union or intersection of a few bands, windows, strides and others, some of them turned."""

    def number(low, high):
        return draw(st.integers(low, high))

    def term(seq, cols):
        kind = draw(st.sampled_from(["band", "window", "dilated", "strided", "fixed", "local", "sinks", "longformer"]))
        if kind == "band":
            return f"band({seq},{number(-40, 20)},{number(1, 7)},{number(0, 9)})"
        if kind == "window":
            return f"sliding_window({seq},{number(0, 20)},{number(0, 20)})"
        if kind == "dilated":
            return f"dilated({seq},{number(0, 5)},{number(1, 6)})"
        if kind == "strided":
            return f"strided({seq},{number(1, 9)})"
        if kind == "fixed":
            return f"fixed({seq},{number(3, 9)},{number(0, 3)})"
        if kind == "local":
            return f"block_local({seq},{number(1, 20)},{number(0, 2)})"
        if kind == "sinks":
            return f"sinks({seq},{number(0, 3)},{number(0, 9)})"
        return f"longformer({seq},{number(0, 5)},({number(0, cols - 1)},))"

    terms = []
    for _ in range(number(1, 3)):
        turned = draw(st.booleans())
        pattern = parse(term(f"({cols},{rows})", rows) if turned else term(f"({rows},{cols})", cols))
        terms.append(pattern.T if turned else pattern)
    return functools.reduce(operator.or_ if draw(st.booleans()) else operator.and_, terms)


def strided(tensor, how):
    """The same numbers with other strides."""
    if how == "transposed":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "sliced":
        return torch.stack([tensor, torch.full_like(tensor, torch.nan)], -1)[..., 0]
    if how == "turned":
        return tensor.mT.contiguous().mT
    return tensor


HOW = st.sampled_from(["plain", "transposed", "sliced", "turned"])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_union(device, data):
    """Small, of any depth and with anything beside; on a GPU half of them as its fastest kernels want them."""
    draw = data.draw
    fast = device.type == "cuda" and draw(st.booleans())
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16] if fast else dtypes_of(device)))
    size = st.integers(1, 400 if fast else 70)
    few = st.sampled_from([(40, 40), (64, 64), (80, 80), (128, 128), (192, 192), (64, 128), (192, 128)])  # to compile
    depth = st.integers(1, 40)
    rows, cols = draw(size), draw(size)
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    heads, batch = kv_heads * group, draw(st.integers(1, 2))
    pattern = draw(regular(rows, cols))
    dims = draw(few if fast else st.tuples(depth, depth))
    torch.manual_seed(draw(st.integers(0, 2**31)))
    qkv = [
        strided(t.detach(), draw(st.sampled_from(["plain", "transposed"]) if fast else HOW)).requires_grad_()
        for t in inputs(device, dtype, pattern, batch, (heads, kv_heads), dims)
    ]
    if fast:
        return check(pattern, qkv, scale=draw(st.sampled_from([None, 0.3])))
    bias = None
    if draw(st.booleans()):
        full = [batch, heads, rows, cols]
        shape = [draw(st.sampled_from([1, n])) for n in full][draw(st.integers(0, 4)) :]
        bias = torch.randn(shape, device=device).to(draw(st.sampled_from([dtype, torch.float32]))).requires_grad_()
    check(pattern, qkv, bias, scale=draw(st.sampled_from([None, 0.3])), softcap=draw(st.sampled_from([0.0, 2.0])))


@pytest.mark.parametrize("heads", [(1, 1), (6, 1), (6, 3), (5, 5)])
def test_heads_with_patterns(device, heads):
    """One each, some equal; and alibi."""
    texts = ["causal(50)", "strided(50, 7)", "band(50, -3, 2, 9)", "causal(50)", "document((20, 30))", "full(50)"]
    patterns = [parse(t) for t in texts[: heads[0]]]
    slopes = torch.rand(heads[0], device=device)
    check(patterns, inputs(device, torch.float32, patterns[0], 2, heads), fw.alibi(slopes))
    if torch.float64 in dtypes_of(device):  # slopes are as exact as the scores
        check(patterns, inputs(device, torch.float64, patterns[0], 2, heads), fw.alibi(slopes.double().sqrt()))
    check([patterns[0]] * heads[0], inputs(device, torch.float32, patterns[0], 2, heads))


@pytest.mark.parametrize(
    "text",
    [
        "causal((64, 700))",
        "causal((40, 2300))",
        "sinks((17, 900), 4, 300)",
        "dilated((48, 600), 9, 4)",
        "strided((33, 500), 16)",
        "longformer((20, 400), 30, (3, 390))",
        "from_mask",
    ],
)
@pytest.mark.parametrize(("heads", "depth"), [((8, 1), 64), ((12, 3), 128), ((4, 2), 192)])
def test_few_queries_share_keys(device, text, heads, depth):
    """Heads of a group may share tiles, however their queries lie."""
    torch.manual_seed(len(text))
    pattern = fw.patterns.from_mask(torch.rand(30, 300) < 0.2) if text == "from_mask" else parse(text)
    for dtype, how in ((torch.bfloat16, "plain"), (torch.float16, "transposed")):
        qkv = inputs(device, dtype, pattern, 2, heads, (depth, depth))
        check(pattern, [strided(t.detach(), how).requires_grad_() for t in qkv])


@pytest.mark.parametrize(
    "text", ["sinks((1,300),4,90)", "full((1,77))", "strided((1,400),32)", "band((1,90),5,1,9)", "full((1,0))"]
)
@pytest.mark.parametrize("how", ["plain", "transposed", "sliced"])
def test_one_query_of_shared_keys(device, text, how):
    """Decoding: heads that share keys may share a tile."""
    pattern = parse(text)
    for dtype in dtypes_of(device):
        qkv = [strided(t.detach(), how).requires_grad_() for t in inputs(device, dtype, pattern, 2, (6, 2))]
        check(pattern, qkv)
    for shape in ((6, 1, 1), (1, 6, 1, pattern.shape[1]), (2, 1, 1, 1)):  # of one type: a GPU compiles for each
        bias = torch.randn(shape, device=device).to(dtype).requires_grad_()
        check(pattern, qkv, bias, softcap=2.0)
    check([pattern] * 5 + [parse(f"full({pattern.shape})")], qkv)
    check(pattern, inputs(device, torch.float32, pattern, 1, (40, 2)))  # more than a tile's strip has
    check(pattern, inputs(device, torch.float32, pattern, 1, (11, 1)))
    check(pattern, inputs(device, torch.float32, pattern, 2, (6, 2)), fw.alibi(torch.rand(6, device=device)))


@pytest.mark.parametrize("dims", [(64, 128), (128, 64), (128, 128)])
@pytest.mark.parametrize("span", [(-40, 60), (0, 20), (60, -40), (-1000, 1000), (-1e4, 1e4), (1e4, -1e4)])
def test_scores_that_grow(device, span, dims):
    """A row's largest score grows from tile to tile by much, by little or not at all, and its sums with it."""
    pattern, top = parse("full((150,700))"), max(map(abs, span))
    # float32 scores of this size are off by a thousandth or two, and weights with them
    factor = 4 if top > 1000 else 1
    for dtype in (torch.float16, torch.bfloat16):
        q, k, v = (t.detach() for t in inputs(device, dtype, pattern, 1, dims=dims))
        q.mul_(0.1)[..., 0] = 1.0
        k.mul_(0.1)[..., 0] = torch.linspace(*span, 700).to(k)
        q, k, v = leaves = [t.requires_grad_() for t in (q, k, v)]
        o, lse = fw.attention(q, k, v, pattern, 1.0, return_lse=True)
        exact = [wide(t) for t in leaves]
        want, want_lse = dense(*exact, pattern.mask(), 1.0)
        compare(o, want, dtype, f"o, {dtype}", factor)
        compare(lse, want_lse, dtype, f"lse, {dtype}")
        weight = torch.randn_like(o)
        got, made = torch.autograd.grad(o, leaves, weight), torch.autograd.grad(want, exact, weight.double().cpu())
        # The keys' first column is large, and what a query's gradient has of it cancels; 300 rows give to few keys.
        compare(got[0][..., :1], made[0][..., :1], dtype, f"d_q of the large column, {dtype}", 2, top * dims[1] ** 0.5)
        compare(got[0][..., 1:], made[0][..., 1:], dtype, f"d_q, {dtype}", 2 * factor, 1.0)
        compare(got[1], made[1], dtype, f"d_k, {dtype}", 2 * factor, 300**0.5)
        compare(got[2], made[2], dtype, f"d_v, {dtype}", 2 * factor, 1.0)


SHARED = [
    "causal(300)",
    "strided(400, 16)",
    "longformer(333, 20, (5, 200))",
    "neighborhood((20, 17), 5)",
    "full((9, 500))",
]


@pytest.mark.parametrize("text", SHARED)
def test_kernel_classes_agree(device, text, monkeypatch):
    """The portable kernels and those of this GPU on the same numbers: apart by rounding only, to float32 before it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        pytest.skip("needs a GPU with two classes of kernels")
    pattern = parse(text)
    for dtype, dims in ((torch.float16, (64, 64)), (torch.bfloat16, (128, 128)), (torch.bfloat16, (192, 128))):
        leaves = inputs(device, dtype, pattern, 2, (4, 2), dims)
        weight = torch.randn(2, 4, pattern.shape[0], dims[1], device=device).to(dtype)
        results = []
        for arch in ("sm_80", ""):
            monkeypatch.setenv("FRETWORK_ARCH", arch)
            o, lse = fw.attention(*leaves, pattern, return_lse=True)
            results.append([o, lse, *torch.autograd.grad(o, leaves, weight)])
        for what, x, y in zip(("o", "lse", "d_q", "d_k", "d_v"), *results, strict=True):
            compare(x, y.double().cpu(), torch.float32 if what == "lse" else dtype, f"{what}, {dtype}, {dims}", 1, 0.1)


def test_layouts_and_kronecker(device):
    layout, factor = fw.BlockLayout([[1, 0, 1], [0, 1, 1]], block=16), fw.KroneckerPattern(2, 8, 12, 3)
    for pattern in (layout, factor):
        check(pattern, inputs(device, torch.float32, pattern))


@pytest.mark.parametrize("sizes", [(0, 2, 5, 7), (2, 0, 5, 7), (2, 2, 0, 7), (2, 2, 5, 0), (0, 0, 0, 0)])
def test_nothing_there(device, sizes):
    batch, heads, rows, cols = sizes
    pattern = parse(f"full(({rows},{cols}))")
    qkv = inputs(device, torch.float32, pattern, batch, (heads, heads))
    bias = torch.ones(rows, cols, device=device, requires_grad=True)
    o, lse = fw.attention(*qkv, pattern, bias=bias, return_lse=True)
    assert o.shape == (batch, heads, rows, 24) and not o.any()
    assert (lse == -torch.inf).all() or cols
    for gradient, t in zip(torch.autograd.grad(o.sum(), [*qkv, bias]), [*qkv, bias], strict=True):
        assert gradient.shape == t.shape and (cols or not gradient.any())
        assert batch * heads or not gradient.any()


def test_all_dropped(device):
    pattern = parse("causal(20)")
    qkv = inputs(device, torch.float32, pattern)
    o, lse = fw.attention(*qkv, pattern, dropout_p=1.0, return_lse=True)
    assert not o.any() and torch.equal(lse, fw.attention(*qkv, pattern, return_lse=True)[1])
    assert not any(g.any() for g in torch.autograd.grad(o.sum(), qkv, retain_graph=True))
    assert torch.autograd.grad(lse[..., 1:].sum(), qkv[0])[0].any()


def test_gradient_of_lse_alone(device):
    pattern = parse("strided(40, 5)")
    qkv = inputs(device, torch.float32, pattern)
    exact = [wide(t) for t in qkv]
    lse, want = fw.attention(*qkv, pattern, return_lse=True)[1], dense(*exact, pattern.mask())[1]
    for x, y in zip(
        torch.autograd.grad(lse.square().sum(), qkv[:2]),
        torch.autograd.grad(want.square().sum(), exact[:2]),
        strict=True,
    ):
        compare(x, y, torch.float32, "gradient", 2)


@pytest.mark.parametrize("shape", [(), (1, 1), (4, 1, 1), (2, 1, 1, 1)])
@pytest.mark.parametrize("rows, cols", [(0, 0), (0, 9), (9, 0)])
def test_bias_of_nothing(device, shape, rows, cols):
    """A bias that is one number for all has a gradient, zero, where there are no queries or keys."""
    pattern = fw.patterns.full((rows, cols))
    bias = torch.randn(shape, device=device, requires_grad=True)
    fw.attention(*inputs(device, torch.float32, pattern), pattern, bias=bias).sum().backward()
    assert torch.equal(bias.grad, torch.zeros_like(bias))


# torch's features


def op_arguments(device, dropout=0.0, bias=True, dtype=torch.float32):
    pattern = parse("strided((20, 30), 4)")
    qkv = inputs(device, dtype, pattern, dims=(8, 8))
    extra = torch.randn(4, 1, 30, device=device, requires_grad=True) if bias else None
    slopes = None if bias else torch.rand(4, device=device)
    seed = torch.tensor(7, device=device) if dropout else None
    return (*qkv, pattern.key, None, extra, slopes, 0.0, dropout, seed, "ieee")


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("bias", [False, True])
def test_opcheck(device, dropout, bias):
    arguments = op_arguments(device, dropout, bias)
    torch.library.opcheck(torch.ops.fretwork.attention.default, arguments)
    q, k, v, *rest = (t.detach() if torch.is_tensor(t) else t for t in arguments)
    o, lse = torch.ops.fretwork.attention.default(q, k, v, *rest)
    for wanted in ((True,) * 4, (False, True, False, False)):
        call = (q, k, v, o, lse, torch.randn_like(o), torch.randn_like(lse), *rest, *wanted)
        torch.library.opcheck(torch.ops.fretwork.attention_backward.default, call)


@pytest.mark.parametrize("feature", ["plain", "bias", "alibi", "heads", "dropout"])
def test_compile(device, feature):
    patterns = [parse("strided(40, 5)"), parse("causal(40)")] * 2
    pattern = patterns if feature == "heads" else patterns[0]
    slopes = torch.rand(4, device=device)
    extra = torch.randn(40, 40, device=device)

    def call(q, k, v):
        bias = fw.alibi(slopes) if feature == "alibi" else extra if feature == "bias" else None
        o, lse = fw.attention(q, k, v, pattern, bias=bias, return_lse=True, dropout_p=0.5 * (feature == "dropout"))
        return o * 2, lse

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch in (2, 3):
        qkv = inputs(device, torch.float32, patterns[0], batch)
        torch.manual_seed(5)
        got = compiled(*qkv)
        torch.manual_seed(5)
        want = call(*qkv)
        assert all(map(torch.equal, got, want))
        weight = torch.randn_like(want[0])
        for x, y in zip(*(torch.autograd.grad(r[0], qkv, weight) for r in (got, want)), strict=True):
            assert torch.equal(x, y)


def test_autocast(device):
    pattern = parse("strided(40, 5)")
    qkv = inputs(device, torch.float32, pattern)
    bias = torch.randn(40, 40, device=device, requires_grad=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        o, lse = fw.attention(*qkv, pattern, bias=bias, return_lse=True)
        x = fw.r_sddmm(*qkv[:2], parse("dilated(40, 2, 3)"))
    assert o.dtype == x.dtype == torch.bfloat16 and lse.dtype == torch.float32
    want = dense(*map(wide, qkv), pattern.mask(), bias=wide(bias))[0]
    compare(o, want, torch.bfloat16, "o")
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(o.float().sum(), [*qkv, bias]))


def test_inference_mode_and_no_grad(device):
    pattern = parse("strided(40, 5)")
    qkv = inputs(device, torch.float32, pattern)
    want = fw.attention(*qkv, pattern)
    with torch.inference_mode():
        assert torch.equal(fw.attention(*qkv, pattern), want)
    with torch.no_grad():
        assert torch.equal(fw.attention(*qkv, pattern), want)


@pytest.mark.parametrize("dynamic", [None, True])
def test_compile_makes_patterns(device, dynamic):
    """A pattern made inside is a constant of the graph, also where its sizes are the tensors'."""
    P = fw.patterns

    def call(q, k, given):
        seq = q.shape[2], k.shape[2]
        near = P.sliding_window(seq, 3, None) | P.longformer(seq, 1, [0, 2], offset=1)
        turned = fw.Pattern.parse(f"sliding_window(({seq[1]}, {seq[0]}), 4, 4).T")
        return fw.attention(q, k, k, near & given.T & turned)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for n in (5, 7, 12):
        q, k = torch.randn(2, 3, n, 8, device=device), torch.randn(2, 3, n + 2, 8, device=device)
        given = P.strided((n + 2, n), 2)
        assert torch.equal(compiled(q, k, given), call(q, k, given))


@pytest.mark.parametrize("feature", ["plain", "bias", "own bias", "own slopes", "shared keys"])
def test_vmap(device, feature):
    pattern = parse("strided(40, 5)")
    many = [
        torch.stack([t.detach(), t.detach().flip(0), 2 * t.detach()], 1) for t in inputs(device, torch.float32, pattern)
    ]
    dims = [1, 1, 1, None]
    extra = None
    if feature == "bias":
        extra = torch.randn(4, 1, 40, device=device)
    elif feature == "own bias":
        extra, dims[3] = torch.randn(2, 1, 40, 40, 3, device=device), 4
    elif feature == "own slopes":
        extra, dims[3] = torch.rand(3, 4, device=device), 0
    elif feature == "shared keys":
        many[1], dims[1] = many[1][:, 0], None

    def call(q, k, v, extra):
        bias = fw.alibi(extra) if feature == "own slopes" else extra
        return fw.attention(q, k, v, pattern, bias=bias)

    got = torch.vmap(call, tuple(dims))(*many, extra)
    for n in range(3):
        one = [t if d is None else t.select(d, n) for t, d in zip((*many, extra), dims, strict=True)]
        assert_close(got[n], call(*one).double(), torch.float32)


def test_vmap_over_nothing(device):
    pattern = parse("strided(20, 5)")
    q, k, v = (t.detach() for t in inputs(device, torch.float32, pattern))
    none = q.new_empty(0, *q.shape)
    for options in ({}, {"dropout_p": 0.5}, {"bias": fw.alibi(torch.rand(4, device=device))}):
        got = torch.vmap(lambda q: fw.attention(q, k, v, pattern, **options), randomness="different")(none)  # noqa: B023
        assert got.shape == (0, 2, 4, 20, 24)


def test_vmap_of_dropout(device):
    pattern = parse("full(30)")
    q, k, v = (t.detach() for t in inputs(device, torch.float32, pattern))
    stacked = q.expand(2, *q.shape)

    def call(q):
        return fw.attention(q, k, v, pattern, dropout_p=0.5)

    same = torch.vmap(call, randomness="same")(stacked)
    different = torch.vmap(call, randomness="different")(stacked)
    assert torch.equal(same[0], same[1]) and not torch.equal(different[0], different[1])


def test_batched_gradients(device):
    pattern = parse("strided(20, 5)")
    qkv = inputs(device, torch.float32, pattern)
    o = fw.attention(*qkv, pattern)
    weights = torch.randn(3, *o.shape, device=device)
    got = torch.autograd.grad(o, qkv, weights, is_grads_batched=True, retain_graph=True)
    for n in range(3):
        for x, y in zip(got, torch.autograd.grad(o, qkv, weights[n], retain_graph=True), strict=True):
            assert_close(x[n], y.double(), torch.float32)


def test_second_derivative_is_refused(device):
    pattern = parse("causal(9)")
    qkv = inputs(device, torch.float32, pattern)
    (first,) = torch.autograd.grad(fw.attention(*qkv, pattern).sum(), qkv[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="attention: gradient"):
        first.sum().backward()


def test_export(device, tmp_path):
    """A saved program has the whole text of its patterns, not a name that only this process knows."""
    mask = torch.rand(60, 60) < 0.3
    pattern = fw.patterns.from_mask(mask)
    assert pattern.key != pattern.text
    q, k, v = (t.detach() for t in inputs(device, torch.float32, pattern))

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return fw.attention(q, k, v, [pattern, parse("causal(60)")] * 2)

    torch.export.save(torch.export.export(Model(), (q, k, v)), tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    assert pattern.text in loaded.graph_module.code
    assert torch.equal(loaded.module()(q, k, v), Model()(q, k, v))


def test_cuda_graph(device):
    if device.type != "cuda":
        pytest.skip("graphs are a GPU's")
    pattern, progression = parse("strided(200, 16)"), parse("dilated(200, 3, 4)")
    q, k, v = (t.detach() for t in inputs(device, torch.bfloat16, pattern, heads=(2, 2), dims=(64, 64)))

    def call():
        o = fw.attention(q, k, v, pattern)
        fw.attention(q, k, v, pattern, dropout_p=0.5)  # draws its seed without waiting
        return o, fw.r_spmm(fw.r_softmax(fw.r_sddmm(q, k, progression), progression), v, progression)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert all(map(torch.equal, captured, call()))


@pytest.mark.parametrize(
    ("text", "dims"), [("strided(200,16)", (64, 40)), ("causal(150)", (100, 128)), ("causal(70)", (130, 200))]
)
def test_tf32(device, text, dims):
    """As close as fp16 would be, gradients too; on a GPU not the exact products."""
    pattern = parse(text)
    qkv = inputs(device, torch.float32, pattern, dims=dims)
    weight = torch.randn(2, 4, pattern.shape[0], dims[1], device=device)
    results = {}
    for precision in ("ieee", "tf32"):
        o = fw.attention(*qkv, pattern, precision=precision)
        results[precision] = [o, *torch.autograd.grad(o, qkv, weight)]
    for n, (exact, rough) in enumerate(zip(*results.values(), strict=True)):
        compare(rough, exact.detach().double().cpu(), torch.float16, f"result {n}", 1, 0.5)
        assert torch.equal(exact, rough) == (device.type == "cpu")


# Length and repetition; on a GPU at full size

LONG = [
    ("sliding_window({},1024,0)", lambda d: (d >= 0) & (d <= 1024)),
    ("strided({},512)", lambda d: (d >= 0) & ((d < 512) | (d % 512 == 0))),
]


@pytest.mark.parametrize(("text", "sees"), LONG, ids=["window", "strided"])
def test_long_sequences(device, text, sees):
    """Rows and columns picked out of many, in float64; gradients of keys take lse and o as the forward gave them."""
    size, dtype = (262144, torch.bfloat16) if device.type == "cuda" else (5000, torch.float32)
    small = torch.arange(2000)
    assert torch.equal(parse(text.format(2000)).mask(), sees(small[:, None] - small))
    pattern = parse(text.format(size))
    q, k, v = inputs(device, dtype, pattern, 1, (2, 1), (128, 64))
    o, lse = fw.attention(q, k, v, pattern, return_lse=True)
    d_o = torch.randn_like(o)
    gradients = torch.autograd.grad(o, (q, k, v), d_o)
    positions, scale = torch.arange(size, device=device), 128**-0.5
    picked = [0, 1, 127, 128, size // 2 - 1, size // 2 + 77, size - 129, size - 1]
    made = [[] for _ in range(5)]
    for head in range(2):
        for n in picked:
            keys = positions[sees(n - positions)]
            row, near, values, up = (
                t.detach().double() for t in (q[0, head, n], k[0, 0, keys], v[0, 0, keys], d_o[0, head, n])
            )
            s = near @ row * scale
            p = s.softmax(0)
            made[0].append(p @ values)
            made[1].append(s.logsumexp(0))
            made[2].append(scale * (p * (values @ up - (p @ values) @ up)) @ near)
    for n in picked:
        rows, one, two = positions[sees(positions - n)], 0.0, 0.0
        for head in range(2):
            x, up, out, sums = (t.detach()[0, head, rows].double() for t in (q, d_o, o, lse))
            p = (x @ k[0, 0, n].detach().double() * scale - sums).exp()
            one = one + scale * (p * (up @ v[0, 0, n].detach().double() - (up * out).sum(-1))) @ x
            two = two + p @ up
        made[3].append(one)
        made[4].append(two)
    got = (
        o[0, :, picked],
        lse[0, :, picked],
        gradients[0][0, :, picked],
        gradients[1][0, 0, picked],
        gradients[2][0, 0, picked],
    )
    for what, x, want in zip(("o", "lse", "d_q", "d_k", "d_v"), got, made, strict=True):
        want = torch.stack(want).cpu().reshape(x.shape)
        if what == "lse":
            compare(x, want, torch.float32, what, 50, 1.0)
            continue
        # Each row by its own measure; where a query has few keys the terms of its gradient cancel.
        for one, other in zip(x.flatten(0, -2), want.flatten(0, -2), strict=True):
            compare(one, other, dtype, what, 2, 0.02 if what == "o" else 0.1)


@pytest.mark.parametrize("depth", [64, 128, 256])
def test_many_launches_are_equal(device, depth):
    count, size = (1000, 1024) if device.type == "cuda" else (5, 300)
    pattern = parse(f"strided({size},32)")
    q, k, v = inputs(device, torch.bfloat16, pattern, 2, (4, 2), (depth, depth))
    d_o = torch.randn(2, 4, size, depth, device=device).bfloat16()

    def run():
        o = fw.attention(q, k, v, pattern)
        return [o, *torch.autograd.grad(o, (q, k, v), d_o)]

    first = run()
    differ = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(count):
        differ += sum((x != y).sum() for x, y in zip(run(), first, strict=True))
    assert differ == 0 and all(x.isfinite().all() for x in first)


@pytest.mark.parametrize("text", ["full(4096)", "causal(4096)"])
@pytest.mark.parametrize("depth", [64, 128])
def test_gradients_beside_other_work(device, text, depth):
    """Their CTAs wait for each other on Hopper, and must come to an end wherever others take their places."""
    if device.type != "cuda":
        pytest.skip("for kernels that run side by side")
    pattern, d_o = parse(text), torch.randn(1, 16, 4096, depth, device=device).bfloat16()
    sets = [inputs(device, torch.bfloat16, pattern, 1, (16, 16), (depth, depth)) for _ in range(4)]
    streams = [torch.cuda.Stream() for _ in sets]
    other, a = torch.cuda.Stream(), torch.randn(8192, 8192, device=device).bfloat16()
    torch.cuda.synchronize()

    def run():
        with torch.cuda.stream(other):
            torch.mm(a, a)
        results = []
        for qkv, stream in zip(sets, streams, strict=True):
            with torch.cuda.stream(stream):
                results += torch.autograd.grad(fw.attention(*qkv, pattern), qkv, d_o)
        torch.cuda.synchronize()
        return results

    first = run()
    assert all(all(map(torch.equal, run(), first)) for _ in range(10))


# Bad calls: the core and a tracer refuse the same things with the same words

BAD = [
    (dict(q=(4, 16, 8)), "q: expected 4 dimensions (B, Hq, Sq, D), got (4, 16, 8)"),
    (dict(q=(2, 4, 16, 9)), "k: expected (2, Hk, Sk, 9), got (2, 2, 16, 8)"),
    (dict(q=(2, 3, 16, 8)), "k: expected a number of heads that divides the 3 of q, got (2, 2, 16, 8)"),
    (dict(q=(2, 0, 16, 8)), "k: expected a number of heads that divides the 0 of q, got (2, 2, 16, 8)"),
    (dict(v=(2, 2, 15, 8)), "v: expected (2, 2, 16, Dv), got (2, 2, 15, 8)"),
    (dict(v=(2, 2, 16, 0)), "v: expected a last dimension of"),
    (dict(bias=(3, 16, 16)), "bias: expected a shape that broadcasts to (2, 4, 16, 16), got (3, 16, 16)"),
    (dict(pattern="causal(17)"), "pattern: expected shape (16, 16), queries and keys of (B, H, S, D), got (17, 17)"),
    (dict(heads=2), "pattern: expected 1 or 4, one for each query head, got 2"),
    (dict(slopes=3), "bias: expected slopes of shape (4,), got (3,)"),
    (dict(scale=float("nan")), "scale: expected a finite number, got nan"),
    (dict(softcap=-1.0), "softcap: expected 0 (none) or a positive number, got -1"),
    (dict(dtypes=dict(k=torch.float64)), "k: expected float32 like q, got float64"),
    (dict(dtypes=dict(bias=torch.float64), bias=(16, 16)), "bias: expected float32 like q, got float64"),
    (dict(dtypes=dict(q=torch.int32)), "q: expected float64, float32, float16 or bfloat16, got int32"),
]


@pytest.mark.parametrize("bad, words", BAD, ids=[words.split(":")[0] for _, words in BAD])
@pytest.mark.parametrize("fake", [False, True], ids=["core", "tracer"])
def test_bad_call(device, bad, words, fake):
    call = dict(q=(2, 4, 16, 8), k=(2, 2, 16, 8), v=(2, 2, 16, 8), pattern="causal(16)") | bad
    dtypes = call.pop("dtypes", {})
    pattern = parse(call.pop("pattern"))
    if "heads" in call:
        pattern = [pattern] * call.pop("heads")
    slopes = call.pop("slopes", None)

    def run():
        for name in {"q", "k", "v", "bias"} & call.keys():
            call[name] = torch.ones(call[name], device=device).to(dtypes.get(name, torch.float32))
        if slopes:
            call["bias"] = fw.alibi(torch.ones(slopes, device=device))
        return fw.attention(pattern=pattern, **call)

    with pytest.raises(RuntimeError) as error:
        if fake:
            with FakeTensorMode():
                run()
        else:
            run()
    assert f"attention: {words}" in str(error.value)


def test_bad_python_values(device):
    pattern = parse("causal(9)")
    q, k, v = inputs(device, torch.float32, pattern)
    for bad, words in [
        (dict(pattern=9), "attention: pattern: expected a fretwork.Pattern or a sequence of them, got int"),
        (dict(pattern="causal(9)"), "attention: pattern: expected a fretwork.Pattern or a sequence of them, got str"),
        (dict(pattern=[pattern, 9]), r"attention: pattern\[1\]: expected a fretwork.Pattern, got int"),
        (dict(pattern=[]), "attention: pattern: expected .*, got an empty sequence"),
        (dict(pattern=[pattern] * 3), "attention: pattern: expected 1 or 4, one for each query head, got 3"),
        (
            dict(pattern=[pattern] * len(q)),
            r"got 2; for elements of the batch give a list of lists, \[\[p1\], \[p2\]\]",
        ),
        (dict(pattern=pattern.mask().numpy()), r"got ndarray \(fw.patterns.from_mask makes a pattern\)"),
        (dict(scale="x"), "attention: scale: expected a number"),
        (dict(scale="0.5"), "attention: scale: expected a number, got '0.5'"),
        (dict(scale=torch.tensor(0.5, requires_grad=True)), "attention: scale: expected a number, got a tensor that"),
        (dict(softcap=-1), "attention: softcap: expected 0 .none. or a positive number, got -1$"),
        (dict(dropout_p=True), "attention: dropout_p: expected a number, got True"),
        (dict(bias=fw.alibi(torch.ones(4, requires_grad=True))), "attention: bias: expected slopes that require no"),
        (dict(bias=3.0), "attention: bias: expected a torch.Tensor, got float"),
        (dict(dropout_p=1.5), "attention: dropout_p: expected 0 to 1, got 1.5"),
        (dict(precision="odd"), "attention: precision: expected None, ieee"),
    ]:
        with pytest.raises((TypeError, RuntimeError), match=words):
            fw.attention(**(dict(q=q, k=k, v=v, pattern=pattern) | bad))
    with pytest.raises(ValueError, match="alibi: slopes"):
        fw.alibi(torch.ones(2, 2))
    with pytest.raises(TypeError, match="alibi: slopes: expected real numbers, got bool"):
        fw.alibi(torch.ones(2).bool())
    two_heads = fw.BlockLayout(torch.ones(2, 1, 1).bool(), block=9)
    with pytest.raises(
        RuntimeError, match="attention: pattern: expected a regular pattern, a block layout of one head"
    ):
        fw.attention(q, k, v, two_heads)
