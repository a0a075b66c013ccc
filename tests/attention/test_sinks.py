"""fw.attention with sinks against the definition in float64: one more score for each query, without a value."""

import pytest
import torch
from conftest import dtypes_of
from test_attention import compare, softmax

import fretwork as fw

P = fw.patterns


def dense(q, k, v, sinks, mask, bias=None, softcap=0.0, keep=1.0):
    """The definition in float64; `mask` broadcasts to (B, Hq, Sq, Sk)."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT * q.shape[-1] ** -0.5
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = (s if bias is None else s + bias).masked_fill(~mask, -torch.inf)
    weight, lse = softmax(torch.cat([s, sinks[:, None, None].expand(*s.shape[:-1], 1)], -1))
    return keep * weight[..., :-1] @ v, lse


def inputs(device, dtype, shape, batch=2, heads=(4, 2), dims=(64, 64)):
    rows, cols = shape
    sizes = [(batch, heads[0], rows, dims[0]), (batch, heads[1], cols, dims[0]), (batch, heads[1], cols, dims[1])]
    return [torch.randn(s, device=device).to(dtype) for s in sizes]


def check(pattern, mask, qkv, sinks, bias=None, **options):
    """Results and all gradients, of o and of lse."""
    dtype, device = qkv[0].dtype, qkv[0].device
    tensors = [t.detach().requires_grad_() for t in (*qkv, sinks, bias) if t is not None]
    exact = [t.detach().double().cpu().requires_grad_() for t in tensors]
    given = dict(sinks=tensors[3], bias=tensors[4] if bias is not None else None)
    o, lse = fw.attention(*tensors[:3], pattern, return_lse=True, **given, **options)
    padding = options.get("key_padding_mask")
    mask = mask if padding is None else mask & ~padding.cpu()[:, None, None]
    want, want_lse = dense(*exact[:4], mask, *exact[4:], softcap=options.get("softcap", 0.0))
    compare(o, want, dtype, "o")
    compare(lse, want_lse, torch.float32, "lse", 5 if dtype.itemsize > 2 else 50)
    up, up_lse = torch.randn(o.shape, device=device).to(dtype), torch.randn(lse.shape, device=device).to(lse.dtype)
    got = torch.autograd.grad((o, lse), tensors, (up, up_lse))
    expected = torch.autograd.grad((want, want_lse), exact, (up.double().cpu(), up_lse.double().cpu()))
    for n, (x, y, t) in enumerate(zip(got, expected, tensors, strict=True)):
        assert x.dtype == t.dtype
        floor = 1.0 if n < 3 else max(1.0, (o[..., 0].numel() / len(sinks)) ** 0.5)
        compare(x, y, coarser(dtype, t.dtype), f"gradient {n}", 2, floor)


def coarser(*types):
    return min(types, key=lambda t: torch.finfo(t).bits)


def some_sinks(device, dtype, heads):
    return torch.randn(heads, device=device).to(dtype)


PATTERNS = [
    "causal((70, 150))",
    "causal((150, 70))",
    "sliding_window(150, 40, 3)",
    "strided(150, 12)",
    "full((33, 200))",
]
PATTERNS += ["longformer(150, 9, (0, 71))", "dilated(140, 4, 5)", "neighborhood((10, 13), 5)"]


@pytest.mark.parametrize("text", PATTERNS)
@pytest.mark.parametrize("heads", [(2, 2), (4, 1)])
def test_patterns(device, text, heads):
    pattern = fw.Pattern.parse(text)
    for dtype in dtypes_of(device):
        for of in {dtype, torch.float32}:
            qkv = inputs(device, dtype, pattern.shape, 2, heads)
            check(pattern, pattern.mask(), qkv, some_sinks(device, of, heads[0]))


@pytest.mark.parametrize("dims", [(8, 8), (40, 64), (64, 128), (128, 128), (192, 128), (256, 256), (20, 33)])
@pytest.mark.parametrize("text", ["causal(150)", "strided(150, 12)"])
def test_depths(device, dims, text):
    pattern = fw.Pattern.parse(text)
    for dtype in dtypes_of(device):
        qkv = inputs(device, dtype, pattern.shape, dims=dims)
        check(pattern, pattern.mask(), qkv, some_sinks(device, torch.float32, 4))


@pytest.mark.parametrize("rows", [1, 3, 8, 16, 40])
@pytest.mark.parametrize("heads", [(8, 1), (2, 2), (16, 2)])
def test_few_queries(device, rows, heads):
    """Decoding, and heads that share a tile."""
    pattern = P.sinks((rows, 700), 4, 500)
    for dtype in dtypes_of(device):
        qkv = inputs(device, dtype, (rows, 700), 3, heads)
        check(pattern, pattern.mask(), qkv, some_sinks(device, dtype, heads[0]))


@pytest.mark.parametrize("text", ["longformer(3000, 20, (0, 1, 7))", "causal((64, 6000))", "causal(1024)"])
def test_rows_that_are_split(device, text):
    """On a GPU the keys of a long row are shared by several CTAs: the sink joins once."""
    pattern = fw.Pattern.parse(text)
    for dtype in [torch.float32, torch.bfloat16] if device.type == "cpu" else dtypes_of(device):
        qkv = inputs(device, dtype, pattern.shape, 1, (2, 1), (64, 64))
        check(pattern, pattern.mask(), qkv, some_sinks(device, dtype, 2) + 5)


@pytest.mark.parametrize("text", ["causal(90)", "strided(90, 9)", "causal((90, 60))"])
@pytest.mark.parametrize("option", ["bias", "shared bias", "softcap", "padding", "all"])
def test_options(device, text, option):
    pattern = fw.Pattern.parse(text)
    cols = pattern.shape[1]
    for dtype in dtypes_of(device):
        options = dict(softcap=3.0) if option in ("softcap", "all") else {}
        if option in ("padding", "all"):
            at = torch.arange(cols, device=device)
            options["key_padding_mask"] = torch.stack([at >= 40, at % 3 == 1, at >= 0])
        shape = {"bias": (4, 90, cols), "shared bias": (3, 1, 1, cols), "all": (1, 90, cols)}.get(option)
        bias = None if shape is None else torch.randn(shape, device=device).to(dtype)
        qkv = inputs(device, dtype, pattern.shape, 3)
        check(pattern, pattern.mask(), qkv, some_sinks(device, dtype, 4), bias, **options)


def test_alibi(device):
    slopes, pattern, at = torch.tensor([0.5, 0.25, 1.0, 0.0]), P.causal(90), torch.arange(90)
    bias = -slopes.double()[:, None, None] * (at[:, None] - at).abs()
    for dtype in dtypes_of(device):
        qkv, sinks = inputs(device, dtype, (90, 90)), some_sinks(device, dtype, 4)
        o, lse = fw.attention(*qkv, pattern, bias=fw.alibi(slopes.to(device)), sinks=sinks, return_lse=True)
        want, want_lse = dense(*(t.double().cpu() for t in (*qkv, sinks)), pattern.mask(), bias)
        compare(o, want, dtype, "o")
        compare(lse, want_lse, torch.float32, "lse", 5 if dtype.itemsize > 2 else 50)


def test_dropout_leaves_sinks(device):
    """With the identity as v the output is the dropped probabilities; lse knows nothing of dropout."""
    pattern, sinks = P.causal(96), some_sinks(device, torch.float32, 4).requires_grad_()
    for dtype in dtypes_of(device):
        q, k, v = (t.requires_grad_() for t in inputs(device, dtype, (96, 96), dims=(64, 96)))
        eye = torch.eye(96, device=device, dtype=dtype).expand(2, 2, 96, 96)

        def drop(values, q=q, k=k):
            torch.manual_seed(1)
            return fw.attention(q, k, values, pattern, dropout_p=0.3, sinks=sinks, return_lse=True)

        kept = (drop(eye)[0] != 0).double().cpu() / 0.7
        exact = [t.detach().double().cpu().requires_grad_() for t in (q, k, v, sinks)]
        want, want_lse = dense(*exact, pattern.mask(), keep=kept)
        o, lse = drop(v)
        compare(o, want, dtype, "o")
        compare(lse, want_lse, torch.float32, "lse", 5 if dtype.itemsize > 2 else 50)
        up = torch.randn(o.shape, device=device).to(dtype)
        got = torch.autograd.grad(o, (q, k, v, sinks), up)
        for n, (x, y) in enumerate(zip(got, torch.autograd.grad(want, exact, up.double().cpu()), strict=True)):
            compare(x, y, coarser(dtype, x.dtype), f"gradient {n}", 2, 1.0 if n < 3 else 10.0)


def test_patterns_of_heads_and_elements(device):
    """The gradient of sinks is a sum over elements with patterns of their own."""
    texts = ["causal(96)", "strided(96, 8)", "sliding_window(96, 9, 9)", "causal(96, offset=-20)"]
    kinds = [fw.Pattern.parse(t) for t in texts]
    rows = [kinds, kinds[::-1], [kinds[1]] * 4]
    masks = torch.stack([torch.stack([p.mask() for p in row]) for row in rows])
    for dtype in dtypes_of(device):
        check(kinds, masks[0], inputs(device, dtype, (96, 96)), some_sinks(device, dtype, 4))
        check(rows, masks, inputs(device, dtype, (96, 96), 3), some_sinks(device, dtype, 4))


@pytest.mark.parametrize("text", ["causal(70)", "strided(70, 8)", "longformer(70, 5, (0,))"])
def test_extremes(device, text):
    """Neither a sink nor a score may overflow beside the other, and −inf is no sink."""
    pattern = fw.Pattern.parse(text)
    for dtype in dtypes_of(device):
        q, k, v = inputs(device, dtype, (70, 70), 1, (4, 4))
        sinks = torch.tensor([-1e4, -torch.inf, 100.0, 1e4], device=device).to(dtype).requires_grad_()
        tensors = [t.requires_grad_() for t in (q, k, v)]
        o, lse = fw.attention(*tensors, pattern, sinks=sinks, return_lse=True)
        want, want_lse = dense(*(t.detach().double().cpu() for t in (q, k, v, sinks)), pattern.mask())
        for h in range(4):
            compare(o[:, h], want[:, h], dtype, "o")
            compare(lse[:, h], want_lse[:, h], torch.float32, "lse", 5 if dtype.itemsize > 2 else 50)
        found = torch.autograd.grad((o, lse), [*tensors, sinks], (torch.randn_like(o), torch.randn_like(lse)))
        assert all(g.isfinite().all() for g in found) and found[3][1] == 0
        o, lse = fw.attention(30 * q, 30 * k, v, pattern, sinks=sinks, return_lse=True)
        assert o.isfinite().all() and lse.isfinite().all()


def test_large_scores_and_sinks(device):
    """The gradients know what rounding a log-sum-exp near 5000 left out. Keys of zero leave scores exact."""
    pattern = P.causal(100)
    for dtype in dtypes_of(device):
        q, k, v = inputs(device, dtype, (100, 100), 1)
        bias = 5000 + torch.randint(-2048, 2048, (100, 100), device=device) / 1024
        sinks = 5002 + torch.randint(-1024, 1024, (4,), device=device) / 1024
        check(pattern, pattern.mask(), (q, torch.zeros_like(k), v), sinks, bias)


def test_no_keys(device):
    """Zeros and the sink, whose gradient is that of lse."""
    for pattern in P.causal((70, 40)), P.causal((5, 0)), P.sliding_window((40, 10), 3, 0):
        for dtype in dtypes_of(device):
            rows, cols = pattern.shape
            qkv, sinks = inputs(device, dtype, (rows, cols)), some_sinks(device, torch.float32, 4)
            check(pattern, pattern.mask(), qkv, sinks)
            o, lse = fw.attention(*qkv, pattern, sinks=sinks, return_lse=True)
            blind = ~pattern.mask().any(1)
            assert not o[:, :, blind].any()
            assert torch.allclose(lse[:, :, blind].float(), sinks[:, None].expand(2, 4, int(blind.sum())))


@pytest.mark.parametrize("wanted", range(4))
def test_single_gradient(device, wanted):
    pattern = P.longformer(90, 7, [0, 40])
    for dtype in dtypes_of(device):
        tensors = [*inputs(device, dtype, (90, 90)), some_sinks(device, dtype, 4)]
        everything = [t.clone().requires_grad_() for t in tensors]
        o = fw.attention(*everything[:3], pattern, sinks=everything[3])
        up = torch.randn_like(o)
        want = torch.autograd.grad(o, everything[wanted], up)[0]
        alone = [t.clone().requires_grad_(n == wanted) for n, t in enumerate(tensors)]
        got = torch.autograd.grad(fw.attention(*alone[:3], pattern, sinks=alone[3]), alone[wanted], up)[0]
        compare(got, want.double().cpu(), dtype, "gradient", 2)


def test_sizes_of_zero(device):
    for batch, rows in (0, 20), (2, 0):
        qkv = [t.requires_grad_() for t in inputs(device, torch.float32, (rows, 20), batch)]
        sinks = some_sinks(device, torch.float32, 4).requires_grad_()
        o = fw.attention(*qkv, P.full((rows, 20)), sinks=sinks)
        assert not torch.autograd.grad(o.sum(), sinks)[0].any()


def test_strides(device):
    sinks = torch.randn(4, 6, device=device)[:, 2]
    for dtype in dtypes_of(device):
        check(P.causal(90), P.causal(90).mask(), inputs(device, dtype, (90, 90)), sinks)


def test_deterministic(device):
    for dtype in dtypes_of(device):
        qkv = [t.requires_grad_() for t in inputs(device, dtype, (300, 300))]
        sinks = some_sinks(device, dtype, 4).requires_grad_()
        up = torch.randn(2, 4, 300, 64, device=device).to(dtype)
        runs = []
        for _ in range(3):
            o, lse = fw.attention(*qkv, P.causal(300), sinks=sinks, return_lse=True)
            runs.append([o, lse, *torch.autograd.grad(o, [*qkv, sinks], up)])
        assert all(torch.equal(x, y) for run in runs[1:] for x, y in zip(runs[0], run, strict=True))


def test_torch_features(device):
    """torch.compile, opcheck, vmap, autocast and inference mode; a second derivative is refused."""
    pattern = P.causal(40)
    q, k, v = (t.requires_grad_() for t in inputs(device, torch.float32, (40, 40)))
    sinks = some_sinks(device, torch.float32, 4).requires_grad_()

    def call(q, k, v, sinks):
        return fw.attention(q, k, v, pattern, sinks=sinks)

    want = call(q, k, v, sinks)
    up = torch.randn_like(want)
    gradients = torch.autograd.grad(want, (q, k, v, sinks), up)
    got = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v, sinks)
    assert torch.allclose(got, want, atol=1e-6)
    for x, y in zip(torch.autograd.grad(got, (q, k, v, sinks), up), gradients, strict=True):
        assert torch.allclose(x, y, atol=1e-5)
    arguments = (q, k, v, pattern.text, None, None, None, 0.0, 0.0, None, "ieee", None, sinks)
    torch.library.opcheck(torch.ops.fretwork.attention.default, arguments)
    for dim in None, 0:
        many = sinks if dim is None else torch.stack([sinks, sinks + 1])
        twice = [torch.stack([t, t.flip(0)]) for t in (q, k, v)]
        mapped = torch.vmap(call, (0, 0, 0, dim))(*twice, many)
        each = [call(*(t[n] for t in twice), sinks + (n if dim == 0 else 0)) for n in range(2)]
        assert torch.allclose(mapped, torch.stack(each), atol=1e-6)
    with torch.inference_mode():
        assert torch.equal(call(q, k, v, sinks), want)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        low = call(q, k, v, sinks)
        assert low.dtype == torch.bfloat16 and torch.allclose(low.float(), want, atol=0.05)
        assert torch.allclose(call(q, k, v, sinks.half()).float(), want, atol=0.05)
    first = torch.autograd.grad(call(q, k, v, sinks).sum(), sinks, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="differentiated once"):
        first.sum().backward()


def test_gradcheck(device):
    if device.type == "cpu":
        q, k, v = (t.requires_grad_() for t in inputs(device, torch.float64, (5, 9), 2, (2, 1), (3, 2)))
        sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
        pattern = P.causal((5, 9), offset=1)

        def call(*tensors):
            return fw.attention(*tensors[:3], pattern, sinks=tensors[3], return_lse=True)

        assert torch.autograd.gradcheck(call, (q, k, v, sinks))


@pytest.mark.parametrize(
    "wrong, text",
    [
        (torch.zeros(3), r"shape \(4,\)"),
        (torch.zeros(1, 4), r"shape \(4,\)"),
        (torch.zeros(4, dtype=torch.int32), "float32"),
        (torch.zeros(4, dtype=torch.float16), "float32"),
        (0.5, "a torch.Tensor"),
    ],
    ids=str,
)
def test_bad_sinks(device, wrong, text):
    qkv = inputs(device, torch.float32, (20, 20))
    wrong = wrong.to(device) if torch.is_tensor(wrong) else wrong
    with pytest.raises((RuntimeError, TypeError), match=rf"^attention: sinks: expected .*{text}.*, got "):
        fw.attention(*qkv, P.causal(20), sinks=wrong)


def test_gpt_oss(device):
    """Its learned sinks come as s_aux."""
    transformers = pytest.importorskip("transformers")
    import fretwork.compat.transformers  # noqa: F401

    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    more = dict(num_key_value_heads=2, head_dim=16, num_local_experts=2, sliding_window=8, pad_token_id=0)
    config = transformers.GptOssConfig(**sizes, **more, num_experts_per_tok=1, max_position_embeddings=128)
    ours, theirs = (
        transformers.GptOssForCausalLM._from_config(config, attn_implementation=name).to(device).eval()
        for name in ("fretwork", "eager")
    )
    for layer in ours.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    theirs.load_state_dict(ours.state_dict())
    ids = torch.randint(1, 64, (2, 50), device=device)
    loss, want = (model(ids, labels=ids).loss for model in (ours, theirs))
    assert torch.allclose(loss, want, atol=1e-5)
    loss.backward()
    want.backward()
    for (name, x), y in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(x.grad, y.grad, atol=1e-5), name
