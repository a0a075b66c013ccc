"""A bias, ALiBi and softcap, one by one and together with key padding, where Hopper's kernels take them: float64 from
the mask alone. Sizes are odd and take several tiles; patterns come in every order of tokens."""

import pytest
import torch
from test_attention import check, inputs
from test_key_padding import check as check_padded
from test_key_padding import some_padding

import fretwork as fw

P = fw.patterns
PATTERNS = {
    "causal": lambda: P.causal((150, 213)),
    "full": lambda: P.full((131, 140)),
    "window": lambda: P.sliding_window(270, 40, 20),
    "dilated": lambda: P.dilated(290, 10, 3),
    "strided": lambda: P.strided(260, 16),
    "longformer": lambda: P.longformer(200, 20, [3, 150]),
    "neighborhood": lambda: P.neighborhood((14, 18), 5),
    "late": lambda: P.sliding_window((40, 300), 60, 0),  # most keys are not used
    "empty rows": lambda: P.causal((200, 130)),
}
ALIGNED = {  # rows of a bias begin at multiples of 16 bytes, but tiles are cut
    "causal": lambda: P.causal((200, 264)),
    "full": lambda: P.full((136, 144)),
    "window": lambda: P.sliding_window(328, 40, 20),
    "odd window": lambda: P.sliding_window(328, 43, 21),  # tiles begin at any key
    "longformer": lambda: P.longformer(208, 20, [3, 150]),
    "late": lambda: P.sliding_window((40, 304), 60, 0),
    "empty rows": lambda: P.causal((200, 136)),
}
BIASES = {
    "whole": lambda b, h, m, n: torch.randn(b, h, m, n),
    "one for all": lambda b, h, m, n: torch.randn(m, n).expand(b, h, m, n),
    "keys": lambda b, h, m, n: torch.randn(b, 1, 1, n),
    "queries": lambda b, h, m, n: torch.randn(1, h, m, 1),
    "turned": lambda b, h, m, n: torch.randn(b, h, n, m).mT,
    "rows of pairs": lambda b, h, m, n: torch.randn(b, h, m, n + 1)[..., :n],  # of odd many keys
    "misaligned": lambda b, h, m, n: torch.randn(b * h * m * (n + 1) + 1)[1:].view(b, h, m, n + 1)[..., :n],
}


def half_types(device):
    """Those that Hopper's kernels have; a CPU does the same for all."""
    return [torch.bfloat16] if device.type == "cpu" else [torch.float16, torch.bfloat16]


def dims_of(device):
    return [(16, 24)] if device.type == "cpu" else [(128, 128), (64, 64), (72, 40), (16, 24)]


@pytest.mark.parametrize("name", ALIGNED)
def test_tiles_of_a_bias(device, name):
    """Where the copy engine can bring them: for each head, for all, and in rows with a gap; others beside it."""
    pattern = ALIGNED[name]()
    rows, cols = pattern.shape
    for dtype in half_types(device):
        for dims in dims_of(device):
            for batch, heads, gap in ((2, 4, 0), (1, 4, 8), (2, 1, 0)):
                bias = torch.randn(batch, heads, rows, cols + gap).to(device, dtype)[..., :cols].requires_grad_()
                check(pattern, inputs(device, dtype, pattern, dims=dims), bias, softcap=3.0 if gap else 0.0)
        qkv = [t.detach() for t in inputs(device, dtype, pattern, dims=dims_of(device)[0])]
        check_padded(pattern, pattern.mask(), some_padding(device, 2, cols), qkv, bias=bias.detach())


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(device, name):
    """ALiBi and a bias depend on where a token is, whatever tile it is in."""
    pattern = PATTERNS[name]()
    for dtype in half_types(device):
        for dims in dims_of(device):
            for softcap in (0.0, 3.0):
                check(
                    pattern,
                    inputs(device, dtype, pattern, dims=dims),
                    fw.alibi(torch.rand(4).to(device)),
                    softcap=softcap,
                )
                bias = torch.randn(2, 4, *pattern.shape).to(device, dtype).requires_grad_()
                check(pattern, inputs(device, dtype, pattern, dims=dims), bias, softcap=softcap)
            check(pattern, inputs(device, dtype, pattern, dims=dims), softcap=3.0)


@pytest.mark.parametrize("view", BIASES)
@pytest.mark.parametrize("wide", [False, True])
def test_views_of_a_bias(device, view, wide):
    """Any shape that broadcasts, any strides, 16 or 32 bits; −inf is as good as a mask."""
    pattern = P.causal((150, 201))
    for dtype in half_types(device):
        bias = BIASES[view](2, 4, 150, 201)
        bias = bias.masked_fill(torch.rand(bias.shape) < 0.2, -torch.inf) if view == "whole" else bias
        if view == "whole":
            bias[:, 1, 5:9] = -torch.inf  # queries that see nothing
        stored = torch.empty_strided(bias.shape, bias.stride(), device=device, dtype=torch.float32 if wide else dtype)
        stored.copy_(bias) if 0 not in bias.stride() else None
        given = stored if 0 not in bias.stride() else bias.to(device, stored.dtype)
        check(pattern, inputs(device, dtype, pattern, dims=dims_of(device)[0]), given.detach().requires_grad_())


@pytest.mark.parametrize("pattern", [P.causal((150, 201)), P.strided(180, 16)], ids=["causal", "strided"])
def test_with_key_padding(device, pattern):
    """Padding may be NaN beside any option."""
    for dtype in half_types(device):
        for dims in dims_of(device)[:2]:
            rows, cols = pattern.shape
            padding = some_padding(device, 5, cols)
            shapes = [(5, 4, rows, dims[0]), (5, 2, cols, dims[0]), (5, 2, cols, dims[1])]
            for options in ({"softcap": 3.0}, {"bias": (4, rows, cols)}, {"bias": (5, 1, 1, cols), "softcap": 3.0}):
                qkv = [torch.randn(s, device=device).to(dtype) for s in shapes]
                if "bias" in options:
                    options["bias"] = torch.randn(options["bias"], device=device).to(dtype)
                check_padded(pattern, pattern.mask(), padding, qkv, **options)


def test_long_causal(device):
    """As long as the kernel for all gradients at once takes it, on a GPU; each option beside float32 of the formula."""
    if device.type == "cpu":
        pytest.skip("the pattern of a GPU's kernel")
    pattern, heads, length = P.causal(4224), 14, 4224
    at = torch.arange(length, device=device)
    slopes = torch.rand(heads, device=device) * 0.1
    bias = torch.randn(1, 1, length, length, device=device).bfloat16()
    for options in ({"bias": bias}, {"bias": fw.alibi(slopes)}, {"softcap": 5.0}, {"bias": bias, "softcap": 5.0}):
        for padded in (False, True):
            q, k, v = (torch.randn(1, heads, length, 128, device=device).bfloat16().requires_grad_() for _ in range(3))
            up = torch.randn(1, heads, length, 128, device=device).bfloat16()
            padding = (at % 5 == 1)[None] if padded else None
            o = fw.attention(q, k, v, pattern, key_padding_mask=padding, **options)
            got = (o, *torch.autograd.grad(o, (q, k, v), up))
            for head in (0, heads - 1):
                exact = [t.detach()[:, head].double().requires_grad_() for t in (q, k, v)]
                s = exact[0] @ exact[1].mT * 128**-0.5
                cap = options.get("softcap", 0.0)
                s = cap * torch.tanh(s / cap) if cap else s
                given = options.get("bias")
                if isinstance(given, fw.alibi):
                    s = s - slopes[head].double() * (at[:, None] - at).abs()
                elif given is not None:
                    s = s + given[0].double()
                seen = (at[:, None] >= at) & (True if padding is None else ~padding[0])
                p = s.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
                want = p @ exact[2]
                for x, y in zip(got, (want, *torch.autograd.grad(want, exact, up[:, head].double())), strict=True):
                    error = (x[:, head].double() - y).abs().max().item() / max(y.abs().max().item(), 1e-3)
                    assert error <= 3e-2, f"{options.keys()}, padded {padded}, head {head}: error {error:.2e}"


def test_dropout_drops_the_same(device):
    """Forward and gradients agree on what is dropped: the result is linear in v, with the gradient as its slope."""
    pattern = P.causal(200)
    for dtype in half_types(device):
        q, k, v = (t.detach() for t in inputs(device, dtype, pattern, dims=dims_of(device)[0]))
        v = torch.zeros_like(v).requires_grad_()
        torch.manual_seed(7)
        o = fw.attention(q, k, v, pattern, dropout_p=0.4)
        up = torch.randn_like(o)
        (slope,) = torch.autograd.grad(o, v, up)
        step = torch.randn_like(v).detach()
        torch.manual_seed(7)
        moved = fw.attention(q, k, step, pattern, dropout_p=0.4)
        lhs, rhs = (moved.double() * up.double()).sum(), (slope.double() * step.double()).sum()
        assert abs(lhs - rhs) <= 2e-2 * moved.double().norm() * up.double().norm() / 10
