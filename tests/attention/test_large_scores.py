"""Large finite scores are numbers: attention with a large bias, softmaxes with a large scale, against float64."""

import pytest
import torch
from conftest import dtypes_of

import fretwork as fw

P = fw.patterns
MAGNITUDES = [1e3, 1e5, 1e7, 1e9, 1e11, 1e13, 1e17, 1e25, 1e30, 1e37, 2e38, 3.4e38]
PATTERNS = {
    "window": P.sliding_window(40, 2, 2),
    "longformer": P.longformer(40, 2, [3, 30]),
    "strided": P.strided(40, 6),
    "causal": P.causal((3, 40)),
    "one query": P.sliding_window((1, 40), 12, 0),
}


def rounded(s, dtype):
    """s as that type has it; its gradient is that of s."""
    return s + (s.to(dtype).double() - s).detach().nan_to_num(0.0)  # −inf stays


def dense(q, k, v, mask, bias, dtype):
    """The definition in float64, of scores rounded as `dtype` has them: a large bias swallows what it is added to."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = rounded(rounded(q @ k.mT * q.shape[-1] ** -0.5, dtype) + bias, dtype).masked_fill(~mask, -torch.inf)
    top = s.detach().amax(-1, keepdim=True)
    top = top.where(top > -torch.inf, 0.0)
    weight = (s - top).exp()
    total = weight.sum(-1, keepdim=True)
    safe = total.where(total > 0, 1.0)
    return weight / safe @ v, (safe.log() + top).where(total > 0, -torch.inf).squeeze(-1)


def close(got, want, tolerance, what):
    got, want = got.detach().double().cpu(), want.detach()
    assert got.isfinite().all(), what
    error = ((got - want).abs() / want.abs().clamp(min=1.0)).max().item()
    assert error <= tolerance, f"{what}: error {error:.2e}, allowed {tolerance:.2e}"


def agrees(device, dtype, pattern, bias, wide_bias, tolerance, heads=(4, 2)):
    """With head dims that the portable kernels take, and on a GPU with those that Hopper's do."""
    for dims in [(16, 8)] if device.type == "cpu" else [(16, 8), (64, 72)]:
        agrees_with(dims, device, dtype, pattern, bias, wide_bias, tolerance, heads)


def agrees_with(dims, device, dtype, pattern, bias, wide_bias, tolerance, heads):
    """Result, log-sum-exp and all gradients. Scores without the bias stay below 1/4."""
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    rows, cols = pattern.shape
    sizes = ((heads[0], rows, dims[0]), (heads[1], cols, dims[0]), (heads[1], cols, dims[1]))
    most = 0.49 * dims[0] ** -0.25
    q, k, v = (torch.empty(2, *s).uniform_(-most, most).to(device, dtype).requires_grad_() for s in sizes)
    bias = bias.to(device, acc if wide_bias else dtype).requires_grad_()
    o, lse = fw.attention(q, k, v, pattern, bias=bias, return_lse=True)
    exact = [t.detach().double().cpu().requires_grad_() for t in (q, k, v, bias)]
    want, want_lse = dense(*exact[:3], pattern.mask(), exact[3], acc)
    close(o, want, tolerance, "o")
    empty = want_lse.isinf()
    assert torch.equal(lse.cpu()[empty].double(), want_lse[empty]), "lse of empty rows"
    error = (lse.double().cpu() - want_lse)[~empty].abs() / want_lse[~empty].abs().clamp(min=1.0)
    assert error.max() <= max(tolerance, 1e-6), "lse"
    up, up_lse = torch.randn(o.shape).to(device, dtype), torch.randn(lse.shape).to(device, acc)
    got = torch.autograd.grad((o, lse), (q, k, v, bias), (up, up_lse))
    for name, x, y in zip(
        ["q", "k", "v", "bias"],
        got,
        torch.autograd.grad((want, want_lse), exact, (up.double().cpu(), up_lse.double().cpu())),
        strict=True,
    ):
        close(x, y, 8 * tolerance, f"gradient of {name}")


def allowed(dtype, magnitude):
    """What rounding allows: up to 1e6 a score that rounds the other way changes a probability."""
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    rounding = 4 * eps * magnitude if magnitude * eps < 0.25 else 0.0
    return {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype] + rounding


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("sign", [-1, 1])
def test_large_bias(device, name, sign):
    pattern = PATTERNS[name]
    for n, magnitude in enumerate(MAGNITUDES):
        for dtype in dtypes_of(device):
            wide = (n + (dtype == torch.bfloat16)) % 2 == 0
            small = dtype == torch.float16 and not wide
            if magnitude > (6e4 if small else 3.3e38 if dtype == torch.bfloat16 else torch.inf):
                continue
            bias = torch.zeros(40)
            bias[20:] = sign * magnitude  # some rows see only these, some none of them
            shape = [(40,), (2, 1, 1, 40), (1, 4, pattern.shape[0], 40)][n % 3]
            agrees(device, dtype, pattern, bias.expand(shape).clone(), wide, allowed(dtype, magnitude))


@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_large_and_absent(device, magnitude):
    """−inf is not seen, however low all others are."""
    bias = torch.full((40, 40), -magnitude)
    bias[:, ::3] = -torch.inf
    bias[7] = -torch.inf
    agrees(device, torch.float32, P.sliding_window(40, 2, 2), bias, True, allowed(torch.float32, magnitude))


def test_the_least_of_each_type(device):
    """torch.finfo(dtype).min, as models build their masks."""
    for dtype in dtypes_of(device):
        bias = torch.zeros(8, dtype=dtype)
        bias[4:] = torch.finfo(dtype).min
        for pattern in (P.sliding_window(8, 1, 1), P.causal((2, 8))):
            agrees(device, dtype, pattern, bias, False, allowed(dtype, torch.inf))


@pytest.mark.parametrize("scale", [1e20, -1e20, 1e38, -1e38, 3.4e38, -3.4e38])
def test_softmaxes_with_a_large_scale(device, scale):
    layout = fw.BlockLayout(torch.tensor([[[1, 1], [0, 1]]]), 16)
    pattern = P.sliding_window(40, 3, 3)
    for dtype in dtypes_of(device):
        x = (4 * torch.randn(2, layout.nnz, 16, 16)).to(device, dtype).requires_grad_()
        got = fw.block_softmax(x, layout, scale=scale)
        wide = x.detach().double().cpu()

        def shares_of(t, dtype=dtype):
            """Rounded: where three entries are equal they have a third each."""
            return t.mul(scale).softmax(-1).to(dtype).double()

        want = shares_of(torch.cat([wide[:, 0], wide[:, 1]], -1))
        close(torch.cat([got[:, 0], got[:, 1]], -1), want, 1e-6, "block_softmax")
        close(got[:, 2], shares_of(wide[:, 2]), 1e-6, "block_softmax")
        assert not torch.autograd.grad(got, x, torch.randn(got.shape).to(got))[0].isnan().any()  # equal entries: inf
        y = (4 * torch.randn(1, 2, 40, 7)).to(device, dtype).requires_grad_()
        shares = fw.r_softmax(y, pattern, scale)
        close(shares[..., 3:37, :], shares_of(y.detach().double().cpu())[..., 3:37, :], 1e-6, "r_softmax")
        assert shares.isfinite().all() and not torch.autograd.grad(shares, y, torch.randn_like(shares))[0].isnan().any()


@pytest.mark.parametrize("magnitude", [1e9, 1e13, 1e30, 3e38])
def test_block_softmax_with_a_large_mask(device, magnitude):
    layout = fw.BlockLayout(torch.ones(1, 2, 2), 16)
    mask = torch.zeros(32, 32)
    mask[:16, 5:] = -magnitude
    mask[16:] = -magnitude
    x = torch.empty(1, 4, 16, 16).uniform_(-0.2, 0.2)
    got = fw.block_softmax(x.to(device), layout, attn_mask=mask.to(device)).cpu()
    rows = torch.cat([torch.cat([x[0, 0], x[0, 1]], -1), torch.cat([x[0, 2], x[0, 3]], -1)])
    close(
        torch.cat([torch.cat([got[0, 0], got[0, 1]], -1), torch.cat([got[0, 2], got[0, 3]], -1)]),
        (rows + mask).double().softmax(-1),
        1e-5,
        "block_softmax",
    )
