"""Every op on views: each input and each incoming gradient expanded, permuted, sliced out of NaN, misaligned or every
other element. The result is that of contiguous copies. FRETWORK_VIEWS sets how many random calls each op gets."""

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import TOLERANCE
from torch import Tensor

import fretwork as fw

CALLS = int(os.environ.get("FRETWORK_VIEWS", "12"))
KINDS = ["plain", "expanded", "permuted", "sliced", "misaligned", "every other"]


def view(like: Tensor, kind: str, rng: random.Random) -> Tensor:
    """A tensor of this shape and random values, which lies in memory as `kind` says."""
    shape, options = list(like.shape), {"dtype": like.dtype, "device": like.device}
    dim = rng.randrange(len(shape)) if shape else 0
    if kind == "expanded" and shape:
        thin = torch.randn([1 if d == dim else n for d, n in enumerate(shape)], device=like.device).to(like.dtype)
        return thin.expand(shape)
    fresh = torch.randn(shape, device=like.device).to(like.dtype)
    if kind == "permuted":
        order = rng.sample(range(len(shape)), len(shape))
        return fresh.permute(order).contiguous().permute([order.index(d) for d in range(len(shape))])
    if kind == "sliced":
        room = torch.full([n + rng.choice([1, 3, 8, 16]) for n in shape], float("nan"), **options)
        return room[tuple(slice(rng.randrange(m - n + 1), None) for m, n in zip(room.shape, shape, strict=True))][
            tuple(slice(n) for n in shape)
        ].copy_(fresh)
    if kind == "misaligned":
        room = torch.full([fresh.numel() + 9], float("nan"), **options)
        first = rng.randrange(1, 9)
        return room[first : first + fresh.numel()].view(shape).copy_(fresh)
    if kind == "every other" and shape:
        room = torch.full([2 * n if d == dim else n for d, n in enumerate(shape)], float("nan"), **options)
        return room[tuple(slice(None, None, 2) if d == dim else slice(None) for d in range(len(shape)))].copy_(fresh)
    return fresh


def contiguous(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def close(got: Tensor, want: Tensor, dtype: torch.dtype, what: str, floor: float = 1e-3) -> None:
    assert got.shape == want.shape, what
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    assert torch.equal(got.isnan(), want.isnan()), f"{what}: NaN where none is expected, or the reverse"
    scale = max(want.abs().max().item(), floor) if want.numel() else 1.0
    error = (got - want).abs().max().item() / scale if want.numel() else 0.0
    assert error <= 2 * TOLERANCE[dtype], f"{what}: error {error:.2e}"


def check(call: Callable[..., Tensor], shapes: list[Any], dtype: torch.dtype, device: torch.device, seed: int) -> None:
    """The call and its gradients on views against contiguous copies."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kinds = [rng.choice(KINDS) for _ in range(len(shapes) + 1)]
    templates = [torch.empty(s, dtype=dtype, device=device) for s in shapes]
    inputs = [view(t, k, rng).detach().requires_grad_() for t, k in zip(templates, kinds, strict=False)]
    copies = [contiguous(t.detach()).requires_grad_() for t in inputs]
    what = f"seed {seed}, {kinds}, {[tuple(s) for s in shapes]}"
    got, want = call(*inputs), call(*copies)
    close(got, want, dtype, what)
    upstream = view(got.detach(), kinds[-1], rng)
    gradients = torch.autograd.grad(got, inputs, upstream, allow_unused=True)
    wanted = torch.autograd.grad(want, copies, contiguous(upstream), allow_unused=True)
    for n, (g, w) in enumerate(zip(gradients, wanted, strict=True)):
        close(g, w, dtype, f"{what}, gradient {n}", floor=0.1)  # what equal inputs cancel is rounding


def products(rng: random.Random) -> tuple[Callable[..., Tensor], list[Any]]:
    block, heads = rng.choice([8, 16, 32, 64, 128]), rng.choice([1, 1, 3])
    rows, cols, free, z = rng.randint(1, 4), rng.randint(1, 4), rng.choice([1, 24, 72, 136, 300]), rng.choice([1, 2])
    mask = torch.rand(heads, rows, cols) < 0.6
    mask[0, 0, 0] = True
    layout = fw.BlockLayout(mask, block)
    op, trans_a, trans_b = rng.choice(["sdd", "dsd", "dds"]), rng.random() < 0.5, rng.random() < 0.5
    m, n = rows * block, cols * block
    if op == "sdd":
        shapes = [(free, m) if trans_a else (m, free), (n, free) if trans_b else (free, n)]
        shapes = [(z, heads, *s) for s in shapes]
    elif op == "dsd":
        k = m if trans_a else n
        shapes = [(z, layout.nnz, block, block), (z, heads, *((free, k) if trans_b else (k, free)))]
    else:
        k = n if trans_b else m
        shapes = [(z, heads, *((k, free) if trans_a else (free, k))), (z, layout.nnz, block, block)]
    function = getattr(fw, op)
    return lambda a, b: function(a, b, layout, trans_a, trans_b), shapes


def softmax(rng: random.Random) -> tuple[Callable[..., Tensor], list[Any]]:
    block, heads, side = rng.choice([8, 16, 32]), rng.choice([1, 2]), rng.randint(1, 4)
    layout = fw.BlockLayout(torch.rand(heads, side, side) < 0.7, block)
    shapes: list[Any] = [(2, layout.nnz, block, block), (2, heads, side * block, side * block)]
    return lambda v, rpe: fw.block_softmax(v, layout, scale=0.5, rpe=rpe), shapes


def packing(rng: random.Random) -> tuple[Callable[..., Tensor], list[Any]]:
    block, side = rng.choice([8, 16, 32]), rng.randint(1, 4)
    layout = fw.BlockLayout(torch.rand(2, side, side) < 0.7, block)
    return lambda dense: layout.unpack(layout.pack(dense)), [(2, 2, side * block, side * block)]


def kronecker(rng: random.Random) -> tuple[Callable[..., Tensor], list[Any]]:
    a, b, c = rng.choice([1, 2, 4]), rng.choice([8, 16, 48, 64]), rng.choice([8, 16, 32, 64])
    d, last, batch = rng.choice([1, 2, 3, 4, 16]), rng.random() < 0.5, rng.choice([1, 5, 16, 40, 128, 196])
    features = a * c * d
    shapes: list[Any] = [(features, batch) if last else (batch, features), (a, b, c, d), (a * b * d,)]
    return lambda x, w, bias: fw.ksmm(x, w, bs_last=last, bias=bias), shapes


def chain(rng: random.Random) -> tuple[Callable[..., Tensor], list[Any]]:
    p = rng.choice([8, 16, 32])
    patterns = fw.kronecker.monarch(p * p, p * p, p, p)
    batch, last = rng.choice([1, 16, 72]), rng.random() < 0.5
    x = (p * p, batch) if last else (batch, p * p)
    return lambda x, *w: fw.ksmm_chain(x, list(w), bs_last=last), [x, *(q.weight_shape for q in patterns)]


def attention(rng: random.Random) -> tuple[Callable[..., Tensor], list[Any]]:
    sq, sk = rng.choice([(1, 40), (16, 96), (72, 72), (150, 150), (130, 200)])
    pattern = rng.choice(
        [
            fw.patterns.causal((sq, sk)),
            fw.patterns.sliding_window((sq, sk), 30, 5),
            fw.patterns.strided((sq, sk), 8),
            fw.patterns.full((sq, sk)),
        ]
    )
    (hq, hk), depth, value = rng.choice([(2, 2), (4, 1)]), rng.choice([64, 128, 40, 192]), rng.choice([64, 128, 40])
    bias = rng.choice([[], [(1, 1, sq, sk)], [(2, hq, sq, sk)]])
    shapes: list[Any] = [(2, hq, sq, depth), (2, hk, sk, depth), (2, hk, sk, value), *bias]
    if rng.random() < 0.5:
        return lambda q, k, v, b=None: fw.attention(q, k, v, pattern, bias=b), shapes
    shapes.insert(3, (hq,))
    return lambda q, k, v, s, b=None: fw.attention(q, k, v, pattern, bias=b, sinks=s), shapes


def convolution(rng: random.Random) -> tuple[Callable[..., Tensor], list[Any]]:
    block, (kh, kw) = rng.choice([8, 16, 32, 64]), rng.choice([(1, 1), (3, 3), (2, 3)])
    out, inner = rng.randint(1, 3), rng.randint(1, 3)
    mask = torch.rand(out, inner, kh, kw) < 0.6
    mask[0, 0, 0, 0] = True
    layout = fw.BlockLayout.for_conv2d(mask, block)
    stride, padding = rng.choice([1, 1, 2, (1, 3)]), rng.choice([0, 1, (2, 0)])
    image = (rng.randint(1, 3), inner * block, rng.randint(4, 13), rng.randint(4, 16))
    shapes: list[Any] = [image, (layout.nnz, block, block), (out * block,)]
    return lambda x, v, b: fw.block_conv2d(x, v, layout, (kh, kw), stride, padding, bias=b), shapes


@pytest.mark.parametrize("op", [products, softmax, packing, kronecker, chain, attention, convolution])
def test_views(op: Callable[..., Any], device: torch.device) -> None:
    dtypes = [torch.float16, torch.bfloat16, torch.float32]
    start = int.from_bytes(os.urandom(3), "little")
    for seed in range(start, start + CALLS):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        call, shapes = op(rng)
        check(call, shapes, rng.choice(dtypes), device, seed)


def test_one_block_for_all(device: torch.device) -> None:
    """Values with a stride of 0 between blocks, every block size and transpose; and such a gradient of an sdd."""
    for block in (16, 32, 64, 128):
        layout = fw.BlockLayout(torch.tensor([[1, 0, 1], [1, 1, 0]]), block)
        for dtype in (torch.float16, torch.bfloat16):
            one = torch.randn(1, 1, block, block, device=device).to(dtype)
            values = one.expand(1, layout.nnz, block, block)
            for turned in (False, True):
                x = torch.randn(1, 1, (2 if turned else 3) * block, 192, device=device).to(dtype)
                got = fw.dsd(values, x, layout, trans_a=turned)
                close(got, fw.dsd(contiguous(values), x, layout, trans_a=turned), dtype, f"dsd {block} {turned}")
                y = torch.randn(1, 1, 192, (3 if turned else 2) * block, device=device).to(dtype)
                got = fw.dds(y, values, layout, trans_b=turned)
                close(got, fw.dds(y, contiguous(values), layout, trans_b=turned), dtype, f"dds {block} {turned}")
            a = torch.randn(1, 1, 2 * block, 64, device=device).to(dtype).requires_grad_()
            b = torch.randn(1, 1, 64, 3 * block, device=device).to(dtype).requires_grad_()
            c = fw.sdd(a, b, layout)
            for x, y in zip(
                torch.autograd.grad(c, (a, b), values, retain_graph=True),
                torch.autograd.grad(c, (a, b), contiguous(values)),
                strict=True,
            ):
                close(x, y, dtype, f"sdd {block}")


def test_rows_of_a_gradient_that_overlap() -> None:
    """As those of a sliding window have it; every activation, with the product of each family that ends with one."""
    x = torch.randn(5, 8, requires_grad=True)
    weights = torch.randn(1, 12, 8, 1), torch.eye(12, 8)
    sparse = fw.two_four.compress(weights[1])
    upstream = torch.randn(16).as_strided((5, 12), (1, 1))
    for activation in ("relu", "gelu", "silu"):
        for call in (
            lambda x, a=activation: fw.ksmm(x, weights[0], activation=a),
            lambda x, a=activation: fw.ksmm_chain(x, [weights[0]], activation=a),
            lambda x, a=activation: fw.two_four.linear(x, sparse, activation=a),
        ):
            (got,) = torch.autograd.grad(call(x), x, upstream)
            (want,) = torch.autograd.grad(call(x), x, contiguous(upstream))
            close(got, want, torch.float32, activation)
