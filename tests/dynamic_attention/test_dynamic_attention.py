"""Attention over keys known only on the device, against dense float64 attention under a mask made by the test."""

import re

import pytest
import torch
import torch._dynamo.testing
from conftest import TOLERANCE, assert_close, dtypes_of

import fretwork as fw

HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def poisoned():
    """New tensors hold NaN, so that what is not written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def dense(q, k, v, mask, scale=None, sinks=None, bias=None, softcap=0.0):
    """In float64; `mask` broadcasts to (B, Hq, Sq, Sk). A row without keys gives zeros."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = (s if bias is None else s + bias).masked_fill(~mask, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(*s.shape[:-1], 1)], -1)
    top = s.amax(-1, keepdim=True).clamp(min=-1e30).detach() if s.shape[-1] else s.new_zeros(*s.shape[:-1], 1)
    weight = (s - top).exp()
    total = weight.sum(-1, keepdim=True)
    share = weight / total.where(total > 0, 1)
    return share[..., : k.shape[2]] @ v, total[..., 0].log() + top[..., 0]


def make(device, dtype, seq, batch=2, heads=(4, 2), dims=(40, 24)):
    shapes = [
        (batch, heads[0], seq[0], dims[0]),
        (batch, heads[1], seq[1], dims[0]),
        (batch, heads[1], seq[1], dims[1]),
    ]
    return [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]


def check(call, reference, inputs):
    """Result, log-sum-exp and gradients, lse's gradient too; each run twice gives the same bits."""
    wide = [t.detach().double().cpu().requires_grad_() for t in inputs]
    (o, lse), (want, want_lse) = call(*inputs), reference(*wide)
    dtype = inputs[0].dtype
    assert_close(o, want, dtype, "o")
    seen = want_lse.isfinite()
    assert torch.equal(lse.isfinite().cpu(), seen) and (lse.cpu()[~seen] == -torch.inf).all()
    assert (lse.double().cpu() - want_lse)[seen].abs().max() < 1e2 * TOLERANCE[dtype] if seen.any() else True
    d_o, d_lse = torch.randn_like(o), torch.randn_like(lse).masked_fill(~seen.to(lse.device), 0)
    found = torch.autograd.grad((o, lse), inputs, (d_o, d_lse))
    expected = torch.autograd.grad(
        (want, want_lse.masked_fill(~seen, 0)), wide, (d_o.double().cpu(), d_lse.double().cpu())
    )
    for n, (got, right, t) in enumerate(zip(found, expected, inputs, strict=True)):
        # A bias and sinks have sums over rows, each of which adds what rounding left of its result.
        floor = 1e-3 if n < 3 else max(1e-3, 0.1 * (lse.numel() / max(right.numel(), 1)) ** 0.5)
        scale = max(right.abs().max().item(), floor) if right.numel() else 1.0
        assert (got.double().cpu() - right).abs().max() <= 2 * TOLERANCE[dtype] * scale, f"gradient {n}"
        assert got.dtype == t.dtype
    again, lse_again = call(*inputs)
    assert torch.equal(o, again) and torch.equal(lse, lse_again)
    repeated = torch.autograd.grad((again, lse_again), inputs, (d_o, d_lse))
    assert all(torch.equal(a, b) for a, b in zip(found, repeated, strict=True))


def blocks_mask(blocks, seq, block, heads):
    rows, cols = torch.arange(seq[0]) // block[0], torch.arange(seq[1]) // block[1]
    return blocks.repeat_interleave(heads // blocks.shape[1], 1)[:, :, rows][..., cols]


def lists_of(blocks, room=3):
    """Counts and shuffled indices, and numbers of any kind behind the counts."""
    width = blocks.shape[-1] + room
    indices = torch.randint(-9, 99, (*blocks.shape[:3], width), dtype=torch.int32)
    for at in torch.cartesian_prod(*map(torch.arange, blocks.shape[:3])).tolist():
        there = blocks[tuple(at)].nonzero()[:, 0]
        indices[tuple(at)][: len(there)] = there[torch.randperm(len(there))].int()
    return blocks.sum(-1, dtype=torch.int32), indices


@pytest.mark.parametrize("block", [(16, 16), (32, 64), (64, 32), (128, 128), (16, 128), (128, 16)], ids=str)
@pytest.mark.parametrize("lists", [(1, 1), (2, 2), (1, 4)], ids=str)
def test_blocks(device, block, lists):
    seq = (171, 203)
    causal = torch.arange(seq[1]) <= torch.arange(seq[0])[:, None] + seq[1] - seq[0]
    blocks = torch.rand(*lists, -(-seq[0] // block[0]), -(-seq[1] // block[1])) < 0.5
    blocks[:, :, -1] = False
    mask = blocks_mask(blocks, seq, block, 4)
    counts, indices = (t.to(device) for t in lists_of(blocks))
    for dtype in dtypes_of(device):
        inputs = make(device, dtype, seq)
        for given in blocks.to(device), fw.BlockLists(counts, indices):
            check(
                lambda q, k, v, g=given: fw.attention(q, k, v, blocks=g, block=block, return_lse=True),
                lambda *t: dense(*t, mask),
                inputs,
            )
        check(
            lambda q, k, v: fw.attention(
                q, k, v, fw.patterns.causal(seq), blocks=blocks.to(device), block=block, return_lse=True
            ),
            lambda *t: dense(*t, mask & causal),
            inputs,
        )


@pytest.mark.parametrize("dims", [(1, 1), (64, 64), (72, 96), (128, 128), (136, 200), (256, 256)], ids=str)
@pytest.mark.parametrize("side", [16, 64, 128])
def test_head_dims(device, dims, side):
    seq = (150, 190)
    blocks = torch.rand(1, 2, -(-seq[0] // side), -(-seq[1] // side)) < 0.6
    for dtype in dtypes_of(device):
        check(
            lambda q, k, v: fw.attention(q, k, v, blocks=blocks.to(device), block=side, return_lse=True),
            lambda *t: dense(*t, blocks_mask(blocks, seq, (side, side), 2)),
            make(device, dtype, seq, 1, (2, 2), dims),
        )


@pytest.mark.parametrize(
    "text",
    [
        "causal((150, 130))",
        "sliding_window((150, 130), 20, 5)",
        "document((30, 1, 60, 59))",
        "prefix_lm((150, 130), 40)",
        "block_local((150, 130), 32, 1)",
        "causal((150, 130), offset=7) & sliding_window((150, 130), 64, 64, offset=7)",
    ],
)
def test_patterns(device, text):
    pattern = fw.patterns.document([30, 1, 60, 59]) if text.startswith("document") else eval(text, vars(fw.patterns))
    seq = tuple(pattern.shape)
    blocks = torch.rand(2, 1, -(-seq[0] // 32), -(-seq[1] // 16)) < 0.6
    mask = blocks_mask(blocks, seq, (32, 16), 4) & pattern.mask()
    for dtype in dtypes_of(device)[-2:]:
        check(
            lambda q, k, v: fw.attention(q, k, v, pattern, blocks=blocks.to(device), block=(32, 16), return_lse=True),
            lambda *t: dense(*t, mask),
            make(device, dtype, seq),
        )


@pytest.mark.parametrize(
    "shape", [(2, 4, 150, 170), (4, 1, 1), (150, 170), (1, 1, 150, 1), (2, 1, 1, 170), (1,)], ids=str
)
def test_bias(device, shape):
    seq, blocks = (150, 170), torch.rand(2, 4, 5, 3) < 0.6
    mask = blocks_mask(blocks, seq, (32, 64), 4)
    for dtype in dtypes_of(device)[-3:]:
        inputs = [*make(device, dtype, seq), torch.randn(shape, device=device).to(dtype).requires_grad_()]
        check(
            lambda q, k, v, b: fw.attention(
                q, k, v, bias=b, softcap=4.0, blocks=blocks.to(device), block=(32, 64), return_lse=True
            ),
            lambda q, k, v, b: dense(q, k, v, mask, bias=b, softcap=4.0),
            inputs,
        )


def test_negative_scale(device):
    blocks = torch.rand(1, 1, 3, 4) < 0.6
    for dtype in dtypes_of(device):
        check(
            lambda q, k, v: fw.attention(q, k, v, scale=-0.3, blocks=blocks.to(device), block=64, return_lse=True),
            lambda *t: dense(*t, blocks_mask(blocks, (170, 200), (64, 64), 4), scale=-0.3),
            make(device, dtype, (170, 200)),
        )


def test_large_bias(device):
    """A large log-sum-exp has no room for what gradients need of it. All scores are exact."""
    blocks = torch.rand(1, 1, 3, 4) < 0.7
    bias = torch.randint(2000, 4000, (170, 1), device=device).float()
    inputs = [
        torch.randint(-2, 3, t.shape, device=device).float().requires_grad_()
        for t in make(device, torch.float32, (170, 200))
    ]
    wide = [t.detach().double().cpu().requires_grad_() for t in inputs]
    want, _ = dense(*wide, blocks_mask(blocks, (170, 200), (64, 64), 4), bias=bias.double().cpu(), scale=0.125)
    o = fw.attention(*inputs, bias=bias, scale=0.125, blocks=blocks.to(device), block=64)
    assert_close(o, want, torch.float32)
    d_o = torch.randn_like(o)
    for got, right in zip(
        torch.autograd.grad(o, inputs, d_o), torch.autograd.grad(want, wide, d_o.double().cpu()), strict=True
    ):
        assert_close(got, right, torch.float32)


# Selections


def selection(device, batch, heads, seq, block, entries):
    """Some entries stand for none, in any way."""
    columns = -(-seq[1] // block)
    order = torch.rand(batch, heads, seq[0], max(columns, entries)).argsort(-1)[..., :entries]
    none = (torch.rand(order.shape) < 0.2) | (order >= columns)
    indices = order.where(
        ~none, torch.randint(columns, 2**31 - 1, order.shape) * (2 * torch.randint(0, 2, order.shape) - 1)
    )
    mask = (torch.arange(seq[1]) // block == indices[..., None]).any(-2)
    return indices.int().to(device), mask


def check_selected(device, dtype, seq, heads, block, causal):
    indices, mask = selection(device, 2, heads[1], seq, block, 3)
    mask = mask.repeat_interleave(heads[0] // heads[1], 1)
    if causal:
        mask = mask & (torch.arange(seq[1]) <= torch.arange(seq[0])[:, None] + seq[1] - seq[0])
    sinks = torch.randn(heads[0], device=device).to(dtype).requires_grad_()
    check(
        lambda q, k, v, s: fw.selected_attention(q, k, v, indices, block, causal, sinks=s, return_lse=True),
        lambda q, k, v, s: dense(q, k, v, mask, sinks=s),
        [*make(device, dtype, seq, 2, heads), sinks],
    )


@pytest.mark.parametrize("heads", [(4, 2), (2, 2), (16, 1), (6, 2), (40, 1)], ids=str)
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_selected(device, heads, block):
    for seq, causal in ((150, 210), True), ((97, 60), True), ((70, 130), False):
        for dtype in dtypes_of(device)[-3:]:
            check_selected(device, dtype, seq, heads, block, causal)


@pytest.mark.parametrize("heads", [(32, 2), (3, 1)], ids=str)
def test_a_block_that_all_queries_select(device, heads):
    """The list of its queries is much longer than those of other blocks."""
    seq = (700, 700)
    indices, mask = selection(device, 1, heads[1], seq, 64, 4)
    indices[..., 0] = 0
    mask = (torch.arange(700) // 64 == indices.cpu()[..., None]).any(-2) & torch.ones(seq, dtype=torch.bool).tril()
    mask = mask.repeat_interleave(heads[0] // heads[1], 1)
    for dtype in dtypes_of(device)[-3:]:
        check(
            lambda q, k, v: fw.selected_attention(q, k, v, indices, return_lse=True),
            lambda *t: dense(*t, mask),
            make(device, dtype, seq, 1, heads),
        )


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
def test_selected_head_dims(device, dims):
    indices, mask = selection(device, 1, 2, (90, 300), 64, 3)
    mask = mask.repeat_interleave(2, 1) & (torch.arange(300) <= torch.arange(90)[:, None] + 210)
    for dtype in dtypes_of(device):
        check(
            lambda q, k, v: fw.selected_attention(q, k, v, indices, return_lse=True),
            lambda *t: dense(*t, mask),
            make(device, dtype, (90, 300), 1, (4, 2), dims),
        )


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("block", [16, 32, 64])
def test_bad_values_stay_with_their_rows(device, dtype, block):
    """A bad key or value reaches the queries that see it, in 16 bits as in 32."""
    seq = (130, 200)
    indices, mask = selection(device, 1, 2, seq, block, 3)
    mask = (mask & (torch.arange(200) <= torch.arange(130)[:, None] + 70)).repeat_interleave(2, 1)
    q, k, v = make(device, dtype, seq, 1)
    want = fw.selected_attention(q, k, v, indices, block)
    blocks = torch.rand(1, 2, 9, 13) < 0.5
    block_rows = blocks_mask(blocks, seq, (16, 16), 4)
    want_blocks = fw.attention(q, k, v, blocks=blocks.to(device), block=16)
    at = (torch.arange(200, device=device) == 100)[:, None]
    for bad in ((q, k.masked_fill(at, torch.nan), v), (q, k, v.masked_fill(at, torch.inf))):
        for got, right, sees in (
            (fw.selected_attention(*bad, indices, block), want, mask[..., 100]),
            (fw.attention(*bad, blocks=blocks.to(device), block=16), want_blocks, block_rows[..., 100]),
        ):
            assert torch.equal(got.cpu()[~sees], right.cpu()[~sees])
            assert not got.cpu()[sees].isfinite().all()


# Documents


def packed(cu_q, cu_k, causal, window, rows, cols):
    """The mask of packed documents, from the definition."""
    mask = torch.zeros(rows, cols, dtype=torch.bool)
    for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        apart = torch.arange(d - c) - (torch.arange(b - a)[:, None] + (d - c) - (b - a))
        seen = torch.ones_like(apart, dtype=torch.bool)
        seen &= apart <= 0 if causal else seen
        seen &= apart >= -window[0] if window[0] is not None else seen
        seen &= apart <= window[1] if window[1] is not None else seen
        mask[a:b, c:d] = seen
    return mask


@pytest.mark.parametrize("window", [(None, None), (20, None), (None, 3), (0, 0), (300, 7)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_varlen(device, causal, window):
    cu_q, cu_k = [3, 40, 40, 200, 201, 345], [0, 60, 77, 77, 307, 340]
    mask = packed(cu_q, cu_k, causal, window, 350, 345)
    given = [torch.tensor(x, device=device, dtype=torch.int32) for x in (cu_q, cu_k)]
    for dtype in dtypes_of(device)[-3:]:
        inputs = [t.detach()[0].transpose(0, 1).clone().requires_grad_() for t in make(device, dtype, (350, 345), 1)]

        def reference(q, k, v):
            o, lse = dense(*(t.transpose(0, 1)[None] for t in (q, k, v)), mask)
            return o[0].transpose(0, 1), lse[0]

        check(
            lambda q, k, v: fw.varlen_attention(q, k, v, *given, causal=causal, window=window, return_lse=True),
            reference,
            inputs,
        )


@pytest.mark.parametrize("most", [1, 32, 60, 200])
def test_bounds_change_nothing(device, most):
    """Not even those that are too low."""
    starts = torch.tensor([0, 40, 70, 200], dtype=torch.int32, device=device)
    for dtype in dtypes_of(device)[-2:]:
        q, k, v = (torch.randn(200, 2, 64, device=device).to(dtype).requires_grad_() for _ in range(3))
        found = []
        for bound in (None, most):
            o = fw.varlen_attention(q, k, v, starts, max_q=bound, max_k=bound, causal=True)
            found.append((o, *torch.autograd.grad(o.float().square().sum(), (q, k, v))))
        for got, want in zip(*found, strict=True):
            assert (got - want).abs().max() <= 2 * TOLERANCE[dtype] * want.abs().max()


def test_many_documents(device):
    """More documents than the threads that place them, most of them short, some empty."""
    lengths = torch.randint(0, 4, (1500,))
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(cu[-1])
    of = torch.repeat_interleave(torch.arange(1500), lengths)
    q, k, v = (torch.randn(total, 2, 16, device=device) for _ in range(3))
    o = fw.varlen_attention(q, k, v, cu.to(device))
    want, _ = dense(*(t.double().cpu().transpose(0, 1)[None] for t in (q, k, v)), of[:, None] == of)
    assert_close(o, want[0].transpose(0, 1), torch.float32)


def test_starts_out_of_range_are_harmless(device):
    """Whatever the tensor holds, nothing outside of q, k and v is touched."""
    q, k, v = (torch.randn(100, 2, 16, device=device) for _ in range(3))
    for starts in [50, 20, 90], [-5, 30, 10**9], [2**31 - 1, -(2**31), 40]:
        cu = torch.tensor(starts, dtype=torch.int32, device=device)
        o = fw.dynamic_attention._varlen_plainly(q, k, v, cu, cu, False, False)  # the core alone
        assert o.shape == (100, 2, 16)
        if starts == sorted(starts):
            assert torch.equal(fw.varlen_attention(q, k, v, cu), o)
    if device.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize("options", [{}, {"scale": 0.5}])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_starts_that_descend_are_refused_on_a_cpu(dtype, options):
    q, k, v = (torch.randn(100, 2, 16) for _ in range(3))
    right, wrong = torch.tensor([0, 60, 100], dtype=dtype), torch.tensor([0, 60, 30], dtype=dtype)
    with pytest.raises(RuntimeError, match=r"^varlen_attention: cu_q: expected starts that ascend, got \[0, 60, 30\]"):
        fw.varlen_attention(q, k, v, wrong, **options)
    with pytest.raises(RuntimeError, match=r"^varlen_attention: cu_k: expected starts that ascend, got \[0, 60, 30\]"):
        fw.varlen_attention(q, k, v, right, wrong, **options)
    fw.varlen_attention(q, k, v, torch.tensor([0, 0, 100, 100], dtype=dtype), **options)


def test_errors_name_the_function(device, monkeypatch):
    q, k, v = (torch.randn(100, 2, 16, device=device, requires_grad=True) for _ in range(3))
    cu = torch.tensor([0, 60, 100], dtype=torch.int32, device=device)
    batch = [x.transpose(0, 1)[None] for x in (q, k, v)]
    indices = torch.zeros(1, 2, 100, 1, dtype=torch.int32, device=device)
    calls = {
        "varlen_attention": lambda: fw.varlen_attention(q, k, v, cu),
        "selected_attention": lambda: fw.selected_attention(*batch, indices),
        "attention": lambda: fw.attention(*batch, blocks=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)),
    }
    for name, call in calls.items():
        (once,) = torch.autograd.grad(call().square().sum(), q, create_graph=True)
        with pytest.raises(NotImplementedError, match=f"^{name}: gradient: expected to be differentiated once"):
            torch.autograd.grad(once.sum(), q)
    with pytest.raises(RuntimeError, match=r"^varlen_attention: k: expected \(Tk, Hk, 16\), got \(100, 2, 8\)"):
        fw.varlen_attention(q, k[..., :8], v, cu)
    with pytest.raises(RuntimeError, match=r"^varlen_attention: v: expected \(100, 2, Dv\), got \(40, 2, 16\)"):
        fw.varlen_attention(q, k, v[:40], cu)

    def fails(*arguments):
        raise RuntimeError("attention: q: expected head sizes up to 8, got 16")  # as a GPU without room says it

    monkeypatch.setattr(fw.dynamic_attention, "dynamic_attention_op", fails)
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=f"^{name}: q: expected head sizes up to 8, got 16"):
            call()


@pytest.mark.parametrize("options", [{}, {"scale": 0.5}])
def test_lists_for_other_sides_are_refused(device, options):
    q = torch.randn(1, 2, 256, 16, device=device)
    lists = fw.select_blocks(q, q, 2, block=(64, 32))
    assert torch.isfinite(fw.attention(q, q, q, blocks=lists, block=(64, 32), **options)).all()
    same_shape = fw.BlockLists(lists.counts, lists.indices)
    assert torch.isfinite(fw.attention(q, q, q, blocks=same_shape, block=64, **options)).all()
    with pytest.raises(RuntimeError, match=r"^attention: block: expected \(64, 32\), .* got \(64, 64\)"):
        fw.attention(q, q, q, blocks=lists, block=64, **options)


@pytest.mark.parametrize("options", [{}, {"scale": 0.25}], ids=["plain", "options"])
def test_rows_to_spare_need_not_be_as_many_for_keys(device, options):
    """Without cu_k keys begin where queries do, whatever lies behind the last document of each."""
    for dtype in torch.int32, torch.int64:
        starts = torch.tensor([0, 15, 40], dtype=dtype, device=device)
        q, k, v = (torch.randn(n, 2, 16, device=device, requires_grad=True) for n in (43, 60, 60))
        found = []
        for given in (starts,), (starts, starts.clone()):
            o = fw.varlen_attention(q, k, v, *given, **options)
            found.append((o, *torch.autograd.grad(o.square().sum(), (q, k, v))))
        assert all(map(torch.equal, *found))
        assert not found[0][0][40:].any() and not found[0][2][40:].any() and found[0][0][:40].all()
        torch.testing.assert_close(found[0][0][:40], fw.varlen_attention(q[:40], k[:40], v[:40], starts, **options))


@pytest.mark.parametrize("block", ["64", 64.0, None])
def test_sides_that_are_no_ints(device, block):
    q = torch.randn(1, 2, 100, 16, device=device)
    blocks, indices = (
        torch.zeros(1, 2, n, 1, dtype=t, device=device) for n, t in ((1, torch.bool), (100, torch.int32))
    )
    for name, call in {
        "attention": lambda: fw.attention(q, q, q, blocks=blocks, block=block),
        "select_blocks": lambda: fw.select_blocks(q, q, 2, block=block),
        "selected_attention": lambda: fw.selected_attention(q, q, q, indices, block=block),
    }.items():
        with pytest.raises(TypeError, match=f"^{name}: block: expected an int, got {block!r}"):
            call()


# torch


def test_opcheck(device):
    q, k, v = make(device, torch.float32, (40, 50), 1)
    op, end = torch.ops.fretwork.dynamic_attention.default, (None, None, None, 0.0, 0.0, None, "ieee", None, None)
    blocks = torch.rand(1, 1, 3, 4, device=device) < 0.6
    calls = [
        (fw.patterns.full((40, 50)).key, blocks, *(None,) * 5, (16, 16, 0, -1, -1, -1, -1), *end),
        (
            "",
            *(None,) * 3,
            torch.zeros(1, 2, 40, 2, dtype=torch.int32, device=device),
            None,
            None,
            (1, 16, 1, -1, -1, -1, -1),
            *end,
        ),
        (
            "",
            *(None,) * 4,
            *(torch.tensor([0, 20, 40], dtype=torch.int32, device=device),) * 2,
            (1, 1, 1, -1, -1, -1, -1),
            *end,
        ),
    ]
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    for call in calls:
        given = (q, k, v) if call[5] is None else packed
        torch.library.opcheck(op, (*given, *call))


def test_second_derivative_is_refused(device):
    q, k, v = make(device, torch.float32, (40, 50), 1)
    o = fw.selected_attention(q, k, v, torch.zeros(1, 2, 40, 1, dtype=torch.int32, device=device))
    (gradient,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiated once"):
        torch.autograd.grad(gradient.sum(), q)


def test_heads_with_different_patterns_are_refused(device):
    q, k, v = make(device, torch.float32, (40, 40), 1)
    blocks = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    patterns = [fw.patterns.full(40), fw.patterns.causal(40)] * 2
    with pytest.raises(NotImplementedError, match=r"^attention: pattern: expected one for all heads"):
        fw.attention(q, k, v, patterns, blocks=blocks)
    assert fw.attention(q, k, v, [fw.patterns.causal(40)] * 4, blocks=blocks).isfinite().all()


@pytest.mark.parametrize("with_bias", [False, True])
def test_key_padding_with_blocks(device, with_bias):
    """Padding may hold anything."""
    blocks, padding = torch.rand(2, 1, 5, 6, device=device) < 0.7, torch.rand(2, 90, device=device) < 0.3
    padding[0, :40] = True
    mask = (blocks_mask(blocks, (70, 90), (16, 16), 4) & ~padding[:, None, None]).cpu()
    bias = torch.randn(4, 70, 90, device=device) if with_bias else None
    wide_bias = None if bias is None else bias.double().cpu()
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = make(device, dtype, (70, 90))

        def call(q, k, v):
            k, v = (t.masked_fill(padding[:, None, :, None], torch.nan) for t in (k, v))
            return fw.attention(q, k, v, bias=bias, blocks=blocks, block=16, key_padding_mask=padding, return_lse=True)

        check(call, lambda *t: dense(*t, mask, bias=wide_bias), [q, k, v])


@pytest.mark.parametrize("sink", [float("nan"), -torch.inf])
def test_sinks_that_are_no_numbers(device, sink):
    """NaN reaches its head; −inf is no sink, also for queries without keys, and its gradient is zero."""
    q, k, v = (torch.randn(1, 2, 40, 16, device=device, requires_grad=True) for _ in range(3))
    blocks = torch.tensor([[[[True, False, False], [False] * 3, [True] * 3]]], device=device)
    sinks = torch.tensor([sink, 0.5], device=device, requires_grad=True)
    o, lse = fw.attention(q, k, v, blocks=blocks, block=16, sinks=sinks, return_lse=True)
    if sink != sink:
        assert o[0, 0].isnan().all() and lse[0, 0].isnan().all()
        assert o[0, 1].isfinite().all()
        return
    plain, plain_lse = fw.attention(q, k, v, blocks=blocks, block=16, return_lse=True)
    torch.testing.assert_close(o[0, 0], plain[0, 0])
    torch.testing.assert_close(lse[0, 0], plain_lse[0, 0])
    (o.sum() + lse.masked_fill(lse == -torch.inf, 0).sum()).backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v, sinks))
    assert sinks.grad[0] == 0


def test_block_without_blocks_is_refused(device):
    q, k, v = make(device, torch.float32, (40, 40), 1)
    for options in ({}, {"sinks": torch.zeros(4, device=device)}, {"return_lse": True}):
        with pytest.raises(RuntimeError, match=r"^attention: block: expected blocks with it, got 64 without blocks"):
            fw.attention(q, k, v, fw.patterns.causal(40), block=64, **options)
    assert fw.attention(q, k, v, fw.patterns.causal(40), block=128).shape == (2 // 2, 4, 40, 24)


@pytest.mark.parametrize("turned", [False, True])
def test_gaps_between_rows_are_refused(device, turned):
    """Rows that are intervals, but of which neighbours do not touch."""
    mask = torch.zeros(6, 9, dtype=torch.bool)
    mask[:3, :2], mask[3:, 5:] = True, True
    mask = mask.T if turned else mask
    q, k, v = make(device, torch.float32, tuple(mask.shape), 1)
    pattern = fw.patterns.from_mask(mask)
    blocks = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    with pytest.raises(
        NotImplementedError, match=r"^attention: pattern: expected one whose rows are intervals without"
    ):
        fw.attention(q, k, v, pattern, blocks=blocks)


def test_wrong_calls_are_named(device):
    q, k, v = make(device, torch.float32, (40, 40), 1)
    ones = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    lists = fw.BlockLists(torch.ones(1, 1, 2, dtype=torch.int32), torch.ones(1, 1, 2, 1, dtype=torch.int32))
    for given, text in ((ones.int(), "expected bool, got int32"), (lists, r"expected \(1, 4 \| 2 \| 1, 1, N\) of .+")):
        with pytest.raises(RuntimeError, match=rf"^attention: blocks: {text}"):
            fw.attention(q, k, v, blocks=given)
    with pytest.raises(RuntimeError, match=r"^select_blocks: top_k: expected at least first \+ last, 1 \+ 1, got 1"):
        fw.select_blocks(q, k, 1)
    with pytest.raises(RuntimeError, match=r"^select_blocks: top_k: expected at least 1, got 0"):
        fw.select_blocks(q, k, 0, first=0, last=0)
    for block in (48, (16,)):
        with pytest.raises(ValueError, match=r"^BlockLists: block: expected .+, got "):
            fw.BlockLists(lists.counts, lists.indices, block)


# torch.compile


def blocks_call(q, k, v, mask):
    return fw.attention(q, k, v, blocks=mask, block=16)


def selected_call(q, k, v, indices):
    return fw.selected_attention(q, k, v, indices, 16)


def varlen_call(q, k, v, starts):
    return fw.varlen_attention(q, k, v, starts, causal=True)


def chosen_call(q, k, v, _):
    lists = fw.select_blocks(q, k, 3, block=16)
    return fw.attention(q, k, v, blocks=lists, block=16)


def keys_of(call, length, device):
    blocks = -(-length // 16)
    if call is blocks_call:
        return torch.rand(1, 2, blocks, blocks, device=device) < 0.5
    if call is selected_call:
        return torch.randint(0, blocks, (1, 2, length, 1), dtype=torch.int32, device=device)
    return torch.tensor([0, length // 3, length], dtype=torch.int32, device=device)


@pytest.mark.parametrize("call", [blocks_call, selected_call, varlen_call, chosen_call])
def test_compiled_once(device, call):
    """Other contents and, with dynamic sizes, other lengths need no other program, forward and backward."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, backend=counter, dynamic=True, fullgraph=True)
    made = None
    for length in (100, 100, 117, 230, 64, 310):
        q, k, v = make(device, torch.float32, (length, length), 1)
        if call is varlen_call:
            q, k, v = (t.detach()[0].transpose(0, 1).clone().requires_grad_() for t in (q, k, v))
        keys = keys_of(call, length, device)
        got, want = compiled(q, k, v, keys), call(q, k, v, keys)
        torch.testing.assert_close(got, want)
        for x, y in zip(
            *(torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (got, want)),
            strict=True,
        ):
            torch.testing.assert_close(x, y)
        made = made or counter.frame_count
        assert counter.frame_count == made


@pytest.mark.parametrize("heads", [(4, 4), (6, 3), (12, 2), (5, 1)], ids=str)
def test_threads_change_nothing(device, heads):
    """Lists or patterns of each head, of which each thread takes some heads, or all threads each."""
    if device.type != "cpu":
        pytest.skip("about a CPU's threads")
    seq, threads = (300, 330), torch.get_num_threads()
    blocks = torch.rand(2, heads[0], 10, 6) < 0.4
    inputs = make(device, torch.float32, seq, 2, heads)
    kinds = [fw.patterns.causal(seq), fw.patterns.sliding_window(seq, 40, 3)]
    patterns = [kinds[h % 2] for h in range(heads[0])]  # one pattern for several key heads, not for all
    masks = blocks_mask(blocks, seq, (32, 64), heads[0]), torch.stack([p.mask() for p in patterns])
    calls = [
        lambda: fw.attention(*inputs, blocks=blocks, block=(32, 64)),
        lambda: fw.attention(*inputs, patterns),
    ]
    for call, mask in zip(calls, masks, strict=True):
        want, _ = dense(*(t.detach().double() for t in inputs), mask)
        found = []
        try:
            for count in (1, 2, 3, 4):
                torch.set_num_threads(count)
                o = call()
                assert_close(o, want, torch.float32)
                found.append((o, *torch.autograd.grad(o.square().sum(), inputs)))
        finally:
            torch.set_num_threads(threads)
        for others in found[1:]:
            assert all(torch.equal(x, y) for x, y in zip(found[0], others, strict=True))


def test_bounds_of_lengths_are_no_part_of_a_program(device):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def call(q, starts, most):
        return fw.varlen_attention(q, q, q, starts, max_q=most, max_k=most, causal=True)

    compiled = torch.compile(call, backend=counter, dynamic=True, fullgraph=True)
    made = set()
    for length, most in ((100, 41), (100, 53), (130, 77), (90, 90)):
        q = torch.randn(length, 2, 16, device=device)
        starts = torch.tensor([0, length - most, length], dtype=torch.int32, device=device)
        torch.testing.assert_close(compiled(q, starts, most), call(q, starts, most))
        made.add(counter.frame_count)
    assert len(made) == 1


def test_the_number_of_blocks_is_no_part_of_a_program(device):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def call(q, k, v, top_k):
        lists = fw.select_blocks(q, k, top_k, block=16)
        return fw.attention(q, k, v, blocks=lists, block=16)

    compiled = torch.compile(call, backend=counter, dynamic=True, fullgraph=True)
    q, k, v = make(device, torch.float32, (150, 150), 1)
    made = set()
    for top_k in (3, 7, 5, 9):
        torch.testing.assert_close(compiled(q, k, v, top_k), call(q, k, v, top_k))
        made.add(counter.frame_count)
    assert len(made) == 1


def test_packed_shapes_are_named_as_they_were_given(device):
    starts = torch.tensor([0, 20, 40], device=device)
    shapes = {
        "v: expected (50, 2, Dv), got (40, 2, 32)": ((40, 2, 32), (50, 2, 32), (40, 2, 32)),
        "k: expected (Tk, Hk, 32), got (40, 2, 16)": ((40, 2, 32), (40, 2, 16), (40, 2, 32)),
        "k: expected a number of heads that divides the 4 of q, got (40, 3, 32)": (
            (40, 4, 32),
            (40, 3, 32),
            (40, 3, 8),
        ),
        "q: expected a last dimension of at least 1, got (40, 2, 0)": ((40, 2, 0), (40, 2, 0), (40, 2, 8)),
        "v: expected a last dimension of at least 1, got (40, 2, 0)": ((40, 2, 8), (40, 2, 8), (40, 2, 0)),
    }
    for text, qkv in shapes.items():
        for cu in (starts, starts.int()):
            with pytest.raises(RuntimeError, match=re.escape(f"varlen_attention: {text}") + "$"):
                fw.varlen_attention(*(torch.randn(shape, device=device) for shape in qkv), cu)


def test_packed_operands_with_a_batch_are_refused(device):
    """As other libraries have them, (1, T, H, D)."""
    x = torch.randn(40, 2, 16, device=device)
    for starts in (torch.tensor([0, 40], device=device), torch.tensor([0, 40], dtype=torch.int32, device=device)):
        for given in ((x[None], x[None], x[None]), (x, x[None], x), (x, x, x[None]), (x[0], x, x), (x[0, 0, 0], x, x)):
            with pytest.raises(RuntimeError, match=r"^varlen_attention: [qkv]: expected 3 dimensions \(T.+, got \("):
                fw.varlen_attention(*given, starts)


def test_starts_without_a_dimension_are_refused(device):
    x = torch.randn(40, 2, 16, device=device)
    for dtype in (torch.int32, torch.int64):
        one, starts = torch.tensor(3, dtype=dtype, device=device), torch.tensor([0, 40], dtype=dtype, device=device)
        with pytest.raises(RuntimeError, match=r"^varlen_attention: cu_q: expected one dimension .+, got \(\)"):
            fw.varlen_attention(x, x, x, one)
        with pytest.raises(RuntimeError, match=r"^varlen_attention: cu_k: expected one dimension .+, got \(\)"):
            fw.varlen_attention(x, x, x, starts, one)


@pytest.mark.parametrize("far", [2**31 - 1, 2**31, 2**63 - 1])
def test_far_windows_are_no_bounds(device, far):
    q, k, v = (torch.randn(n, 2, 16, device=device, requires_grad=True) for n in (100, 70, 70))
    starts = [torch.tensor(x, device=device) for x in ([0, 55, 100], [0, 20, 70])]
    for window in (far, far), (far, 3), (5, far):
        found = []
        for given in window, tuple(None if n == far else n for n in window):
            o = fw.varlen_attention(q, k, v, *starts, window=given)
            found.append((o, *torch.autograd.grad(o.square().sum(), (q, k, v))))
        assert all(map(torch.equal, *found))


def test_bounds_that_are_tensors_are_refused(device):
    """Which the host would have to wait for."""
    q, starts = torch.randn(40, 2, 16, device=device), torch.tensor([0, 40], dtype=torch.int32, device=device)
    for name in ("max_q", "max_k"):
        with pytest.raises(TypeError, match=rf"^varlen_attention: {name}: expected an int or None, got a Tensor"):
            fw.varlen_attention(q, q, q, starts, **{name: torch.tensor(30, device=device)})
    with pytest.raises(TypeError, match=r"^varlen_attention: window: expected an int or None, got a Tensor"):
        fw.varlen_attention(q, q, q, starts, window=(torch.tensor(3), None))


def test_lists_too_long_for_their_numbers_are_refused(device):
    q = torch.randn(1, 2, 40, 16, device=device)
    for top_k in (2**31, 2**40, 2**63 - 1):
        with pytest.raises(RuntimeError, match=f"^select_blocks: top_k: expected at most 2147483647, got {top_k}$"):
            fw.select_blocks(q, q, top_k)


@pytest.mark.parametrize("far", [2**31, 2**32 + 50, 2**62])
def test_starts_beyond_32_bits_are_clamped(device, far):
    q, k, v = (torch.randn(100, 2, 16, device=device) for _ in range(3))
    want = fw.varlen_attention(q, k, v, torch.tensor([0, 20, 100], device=device))
    assert torch.equal(fw.varlen_attention(q, k, v, torch.tensor([0, 20, far], device=device)), want)
    assert torch.equal(fw.varlen_attention(q, k, v, torch.tensor([-far, 20, 100], device=device)), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_sinks_under_autocast(device, dtype):
    """Of every type that autocast meets."""
    q, k, v = make(device, torch.float32, (64, 64), 1, (2, 2))
    packed = [t[0].transpose(0, 1) for t in (q, k, v)]
    sinks = torch.randn(2, device=device).to(dtype).requires_grad_()
    blocks = torch.ones(1, 1, 2, 2, dtype=torch.bool, device=device)
    indices = torch.arange(2, dtype=torch.int32, device=device).expand(1, 2, 64, 2).contiguous()
    starts = torch.tensor([0, 64], dtype=torch.int32, device=device)
    calls = [
        lambda s: fw.attention(q, k, v, fw.patterns.full(64), sinks=s),
        lambda s: fw.attention(q, k, v, blocks=blocks, block=32, sinks=s),
        lambda s: fw.selected_attention(q, k, v, indices, 32, False, sinks=s),
        lambda s: fw.varlen_attention(*packed, starts, sinks=s).transpose(0, 1)[None],
    ]
    want = calls[0](sinks.float())
    for call in calls:
        with torch.autocast(device.type, torch.bfloat16):
            o = call(sinks)
        assert o.dtype == torch.bfloat16 and (o.float() - want).abs().max() < 0.03
        (gradient,) = torch.autograd.grad(o.float().sum(), sinks)
        assert gradient.dtype == dtype and gradient.isfinite().all()
        with pytest.raises(RuntimeError, match="sinks: expected "), torch.autocast(device.type, torch.bfloat16):
            call(sinks.double())


def test_mixed_operands_under_autocast(device):
    """As models have them: queries and keys come from a rotation in float32, values from a product in 16 bits."""
    q, k, v = make(device, torch.float32, (64, 64), 1)
    packed = [t[0].transpose(0, 1) for t in (q, k, v)]
    blocks = torch.ones(1, 1, 2, 2, dtype=torch.bool, device=device)
    indices = torch.arange(2, dtype=torch.int32, device=device).expand(1, 2, 64, 2).contiguous()
    starts = [torch.tensor([0, 64], dtype=dtype, device=device) for dtype in (torch.int32, torch.int64)]
    calls = [
        lambda q, k, v: fw.attention(q, k, v, blocks=blocks, block=32),
        lambda q, k, v: fw.attention(q, k, v, blocks=fw.select_blocks(q, k, 2, block=32, causal=False), block=32),
        lambda q, k, v: fw.selected_attention(q, k, v, indices, 32, False),
        *(lambda q, k, v, s=s: fw.varlen_attention(q, k, v, s) for s in starts),
    ]
    for call in calls:
        given = packed if call in calls[3:] else (q, k, v)
        want = call(*given)
        for n in range(3):
            mixed = [t.bfloat16() if i == n else t for i, t in enumerate(given)]
            with torch.autocast(device.type, torch.bfloat16):
                o = call(*mixed)
            assert o.dtype == torch.bfloat16 and (o.float() - want).abs().max() < 0.05
            gradients = torch.autograd.grad(o.float().sum(), (q, k, v))
            assert all(g.dtype == torch.float32 and g.isfinite().all() for g in gradients)
            with pytest.raises(RuntimeError, match=r": [kv]: expected .+ like q, got "):
                call(*mixed)


def test_plain_calls_refuse_what_is_on_meta(device):
    """The core does not see such operands: Python's checks say what is wrong."""
    q, k, v = (torch.randn(128, 2, 16, device=device) for _ in range(3))
    starts = torch.tensor([0, 128], dtype=torch.int32, device="meta")
    with pytest.raises(RuntimeError, match="varlen_attention: cu_q: expected a tensor on"):
        fw.varlen_attention(q, k, v, starts)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    with pytest.raises(RuntimeError, match="attention: blocks: expected a tensor on"):
        fw.attention(q, k, v, blocks=torch.ones(1, 1, 2, 2, dtype=torch.bool, device="meta"), block=64)
    with pytest.raises(RuntimeError, match="attention: blocks: expected"):
        fw.attention(*(x.to("meta") for x in (q, k, v)), blocks=torch.ones(1, 1, 3, 3, device="meta").bool(), block=64)


def test_what_is_on_meta_beside_operands_that_are_not_is_refused(device):
    """Else the result would be on meta, too."""
    q, k, v = (torch.randn(1, 2, 128, 16, device=device) for _ in range(3))
    options = {
        "bias": torch.zeros(128, 128, device="meta"),
        "sinks": torch.zeros(2, device="meta"),
        "key_padding_mask": torch.zeros(1, 128, dtype=torch.bool, device="meta"),
    }
    blocks = torch.ones(1, 1, 2, 2, dtype=torch.bool, device=device)
    for name, x in options.items():
        with pytest.raises(RuntimeError, match=f"^attention: {name}: expected .+ like q, got .*meta"):
            fw.attention(q, k, v, blocks=blocks, block=64, **{name: x})
    indices = torch.zeros(1, 2, 128, 1, dtype=torch.int32, device="meta")
    with pytest.raises(RuntimeError, match=r"^selected_attention: indices: expected .+ like q, got .*meta"):
        fw.selected_attention(q, k, v, indices)
