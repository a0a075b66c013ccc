"""Pieces of patterns, trees, strided neighbourhoods and block masks: definitions, texts, plans and attention."""

import os
import random
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import assert_close
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import fretwork as fw
from fretwork.compat import natten

P = fw.patterns
PROGRAM = Path(os.environ.get("FRETWORK_LIB_DIR", "")).parent / "bin" / "fretwork"


@pytest.fixture
def dice(fresh_seed):
    return random.Random(torch.initial_seed())


# Random patterns, each with the mask that it must have.


def leaf(dice, rows, cols):
    """One of some kinds of a given shape; its own mask is what test_patterns.py checks."""
    seq, n, m = (rows, cols), dice.randint(0, 6), dice.randint(1, 7)
    offset = dice.choice([None, 0, -3, 8])
    some = [dice.randrange(cols) for _ in range(3)] if cols else []
    grids = [P.full(seq)]
    if rows == cols and rows % 4 == 0 and rows:
        grids = [P.neighborhood((4, rows // 4), (2, 1)), P.swin(4, rows // 4, 2, 1), P.axial(4, rows // 4)]
    pattern = dice.choice(
        [
            P.causal(seq, offset=offset),
            P.sliding_window(seq, n, m, offset=offset),
            P.strided(seq, m, offset=offset),
            P.dilated(seq, n, m, dice.random() < 0.5, offset=offset),
            P.fixed(seq, m, min(n, m), offset=offset),
            P.vertical_slash(seq, some, [0, n], offset=offset),
            P.block_local(seq, m, 1, offset=offset),
            P.block_causal(seq, m, offset=offset),
            P.bigbird(seq, m, 1, 1, 1, n, offset=offset),
            P.longnet(seq, [5, 9], [m, 2], 1, offset=offset),
            P.from_mask(np.random.default_rng(n).random(seq) < 0.3),
            *grids,
        ]
    )
    return pattern, pattern.numpy_mask()


def piece(dice, depth):
    """A pattern made of others, and its mask by NumPy."""
    kind = dice.choice(["leaf", "slice", "place", "diag", "prefix", "union", "both", "turn"]) if depth else "leaf"
    if kind == "leaf":
        rows = dice.choice([1, 7, 12, 20, 33])
        return leaf(dice, rows, dice.choice([rows, rows, 5, 26]))
    pattern, mask = piece(dice, depth - 1)
    if kind == "slice":
        ends = [sorted(dice.randint(0, n) for _ in range(2)) for n in mask.shape]
        at = tuple(slice(*pair) for pair in ends)
        return pattern[at], mask[at]
    if kind == "place":
        at = dice.choice([(0, 0), (3, 0), (2, 9)])
        more = [n + a + dice.choice([0, 1, 17]) for n, a in zip(mask.shape, at, strict=True)]
        want = np.zeros(more, bool)
        want[at[0] : at[0] + mask.shape[0], at[1] : at[1] + mask.shape[1]] = mask
        return P.place(pattern, tuple(more), at=at), want
    if kind == "diag":
        others = [piece(dice, dice.randint(0, depth - 1)) for _ in range(dice.randint(0, 2))]
        masks = [mask, *(m for _, m in others)]
        want = torch.block_diag(*(torch.from_numpy(m.astype(np.uint8)) for m in masks)).numpy().astype(bool)
        return P.diag([pattern, *(p for p, _ in others)]), want
    if kind == "prefix":
        n = dice.choice([0, 1, 4])
        if mask.shape[0] != mask.shape[1]:
            with pytest.raises(ValueError, match=r"^with_prefix: pattern: expected a square one, got \("):
                P.with_prefix(pattern, n)
            return pattern, mask
        return P.with_prefix(pattern, n), np.pad(mask, ((n, 0), (n, 0)), constant_values=True)
    if kind == "turn":
        return pattern.T, mask.T
    if 0 in mask.shape:
        return pattern, mask
    other, more = leaf(dice, *mask.shape)
    return (pattern | other, mask | more) if kind == "union" else (pattern & other, mask & more)


def is_pattern(pattern, mask):
    assert pattern.shape == mask.shape and pattern.nnz == mask.sum(), pattern
    assert np.array_equal(pattern.numpy_mask(), mask), pattern
    again = fw.Pattern.parse(pattern.text)
    assert again == pattern and hash(again) == hash(pattern) and "\n" not in pattern.text
    assert np.array_equal(again.numpy_mask(), mask), pattern
    assert np.array_equal(pattern.T.numpy_mask(), mask.T) and pattern == pattern.T.T
    assert fw.Pattern.parse(pattern.T.text) == pattern.T


def test_random_pieces(dice):
    for _ in range(250):
        is_pattern(*piece(dice, 4))


def dense_attention(q, k, v, mask):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    e = torch.where(mask, (s - s.amax(-1, keepdim=True).clamp(min=-1e300)).exp(), 0.0)
    return e / e.sum(-1, keepdim=True).clamp(min=1e-300) @ v


def attends(pattern, mask, device, dtype=torch.float32, batch=1, heads=(2, 1), depth=16):
    """fw.attention and its gradients against the dense mask; unseen keys are NaN."""
    rows, cols = mask.shape
    shapes = (batch, heads[0], rows, depth), (batch, heads[1], cols, depth), (batch, heads[1], cols, depth + 8)
    tensors = [torch.randn(s, device=device).to(dtype).requires_grad_() for s in shapes]
    wide = [t.detach().double().cpu().requires_grad_() for t in tensors]
    unseen = ~torch.from_numpy(mask).any(0).to(device)
    with torch.no_grad():
        for t in tensors[1:]:
            t[:, :, unseen] = torch.nan
    o, want = fw.attention(*tensors, pattern), dense_attention(*wide, torch.from_numpy(mask))
    up = torch.randn_like(o)
    assert_close(o, want, dtype, f"o of {pattern}")
    got = torch.autograd.grad(o, tensors, up)
    for n, (x, y) in enumerate(zip(got, torch.autograd.grad(want, wide, up.double().cpu()), strict=True)):
        assert_close(x, y, dtype, f"gradient {n} of {pattern}", floor=1.0)


def test_attention_on_random_pieces(dice, device):
    tried = 0
    while tried < 25:
        pattern, mask = piece(dice, 4)
        if min(mask.shape) > 0:
            attends(pattern, mask, device)
            tried += 1


ODD = {
    "a slice of a union": lambda: (P.strided(300, 16) | P.sliding_window(300, 3, 9))[41:290, 7:203],
    "a slice of a slice": lambda: P.neighborhood((17, 19), (5, 3))[30:, :200][3:100, 5:],
    "a place with empty rows": lambda: P.place(P.dilated(150, 3, 5), (420, 300), at=(200, 101)),
    "a grid in a longer sequence": lambda: P.place(P.sliding_tile((16, 16), 4, 3), (300, 290), at=(31, 7)),
    "a diagonal of kinds": lambda: P.diag(
        [P.causal(70), P.strided((90, 50), 8), P.neighborhood((8, 9), 3), P.tree([-1, 0, 0, 1]), P.axial(9, 12)]
    ),
    "classes along a diagonal": lambda: P.diag([P.strided(128, 8), P.strided(100, 8), P.dilated(64, 3, 8)]),
    "a prefix of a grid": lambda: P.with_prefix(P.neighborhood((14, 15), 5, stride=2), 3),
    "a prefix of a shifted window": lambda: P.with_prefix(P.swin(12, 18, 6, 3), 1),
    "a prefix of a document": lambda: P.with_prefix(P.document([100, 33, 60], True), 150),
    "a tree": lambda: P.tree([*range(-1, 130), *(130 + n // 3 for n in range(80))]),
    "two chains": lambda: P.tree([-1, -1, *range(200)]),
    "blocks": lambda: P.block_causal((190, 260), 24),
    "strides of groups": lambda: P.neighborhood((6, 8, 10), (3, 4, 5), (1, 2, 1), (True, False, False), (2, 2, 5)),
    "whole groups": lambda: P.neighborhood((24, 40), 12, stride=4),
}


@pytest.mark.parametrize("name", ODD)
def test_attention_on_odd_pieces(name, device):
    pattern = ODD[name]()
    for dtype in (torch.float32, torch.bfloat16):
        attends(pattern, pattern.numpy_mask(), device, dtype, 2, (4, 2), 64)


# New patterns, by their definitions.


def axis_neighborhood(length, window, dilation, causal, stride):
    mask = np.zeros((length, length), bool)
    for p in range(length):
        members = list(range(p % dilation, length, dilation))
        rank = p // dilation
        group = rank // stride * stride
        if causal:
            lead = min(group + stride - 1, len(members) - 1)
            seen = [r for r in range(lead - window + 1, rank + 1) if r >= 0]
        else:
            lead = min(group + stride // 2, len(members) - 1)
            first = max(0, min(lead - window // 2, len(members) - window))
            seen = range(first, first + window)
        for r in seen:
            mask[p, members[r]] = True
    return mask


def test_random_neighborhoods(dice):
    for _ in range(300):
        shape = [dice.randint(1, (40, 11, 6)[n - 1]) for n in [dice.randint(1, 3)] for _ in range(n)]
        options = []
        for length in shape:
            dilation = min(length, dice.choice([1, 1, 2, 3, 7]))
            window = dice.randint(1, max(1, length // dilation))
            options.append((window, dilation, dice.random() < 0.3, dice.randint(1, window)))
        want = np.ones((1, 1), bool)
        for length, (window, dilation, causal, stride) in zip(shape, options, strict=True):
            want = np.kron(want, axis_neighborhood(length, window, dilation, causal, stride)).astype(bool)
        window, dilation, causal, stride = zip(*options, strict=True)
        pattern = P.neighborhood(tuple(shape), window, dilation, causal, stride)
        is_pattern(pattern, want)
        for most in (len(want), shape[-1]):  # and of one line of the grid
            begin = dice.randint(0, len(want) - 1)
            rows, cols = (slice(at, at + dice.randint(0, most)) for at in (begin, max(0, begin - dice.randint(0, 3))))
            is_pattern(pattern[rows, cols], want[rows, cols])
        other, mask = leaf(dice, *want.shape)
        is_pattern(pattern | other, want | mask)
        is_pattern(pattern & other, want & mask)


def test_one_group_on_an_axis():
    """Its digit would be the next axis' own."""
    pattern, causal = P.neighborhood((8, 4), 4, stride=(1, 4)), P.causal(32)
    is_pattern(pattern | causal, pattern.numpy_mask() | causal.numpy_mask())
    is_pattern(pattern & causal, pattern.numpy_mask() & causal.numpy_mask())
    with pytest.raises(ValueError, match="stride: expected at most window = 3, got 4294967296"):
        P.neighborhood((8,), 3, dilation=2**32, stride=2**32)


def test_random_trees_and_blocks(dice):
    for _ in range(100):
        parents = [dice.choice([n - 1, dice.randrange(-1, n)]) for n in range(dice.choice([0, 1, 9, 60]))]
        want = np.eye(len(parents), dtype=bool)
        for n, parent in enumerate(parents):
            if parent >= 0:
                want[n] |= want[parent]
        is_pattern(P.tree(parents), want)
        rows, cols, block, offset = (dice.randint(*ends) for ends in ((1, 40), (1, 40), (1, 12), (-20, 20)))
        p, j = np.ogrid[offset : offset + rows, :cols]
        is_pattern(P.block_causal((rows, cols), block, offset=offset), j // block <= p // block)


def test_long_ones():
    length = 1 << 20
    grid, strided = P.neighborhood((1024, 1024), 13), P.strided(length, 1024)
    made = [
        P.with_prefix(grid, 1), P.diag([P.causal(length), strided]), strided[4096:, : length // 2],
        P.place(grid, (length + 5000, length + 70), at=(4000, 9)), (strided | P.causal(length))[10:, 5:].T,
        P.neighborhood((1024, 1024), 8, stride=2), P.neighborhood((1 << 20,), 9, 2, stride=4),
        P.neighborhood((64, 128, 128), 4, 2, stride=3), P.block_causal(length, 2), P.tree(range(-1, length - 1))[:, 7:],
        P.diag([P.neighborhood((32, 32), 3)] * 1024),
    ]  # fmt: skip
    assert all(len(p.text) < 400 for p in made[:-2])
    assert made[0].nnz == grid.nnz + 2 * length + 1 and made[2].shape == (length - 4096, length // 2)
    assert made[1].nnz == P.causal(length).nnz + strided.nnz and made[-1].nnz == 1024 * P.neighborhood((32, 32), 3).nnz
    assert made[4].shape == (length - 5, length - 10)


def tiles(pattern):
    """Pairs of tiles that attention plans on a GPU."""
    return sum(int(line.split()[0]) for line in pattern.describe().splitlines() if " of 128×128 " in line)


@pytest.mark.parametrize(
    "call",
    ["neighborhood((128,128),13)", "strided(16384,128)", "sliding_tile((128,128),8,3)", "neighborhood((16,32,32),5)",
     "swin(128,128,16,8)", "dilated(16384,256,4)", "axial(128,128)"],
)  # fmt: skip
def test_pieces_plan_as_well_as_the_whole(call):
    pattern = fw.Pattern.parse(call)
    whole, lines = tiles(pattern), -(-pattern.shape[0] // 128)
    assert tiles(P.with_prefix(pattern, 1)) <= whole + 2 * lines + 3
    assert tiles(P.place(pattern, (16384 + 333, 16384 + 100), at=(77, 50))) <= 1.02 * whole
    assert tiles(P.diag([P.causal(1000), pattern])) <= 1.02 * whole + 36
    assert tiles(pattern[1024:]) <= 1.06 * whole


def test_strides_plan_well():
    """Groups that fit tiles need as few as sliding tiles; others not many more than windows of their own."""
    assert tiles(P.neighborhood((128, 128), 24, stride=8)) == tiles(P.sliding_tile((128, 128), 8, 3))
    alone = tiles(P.neighborhood((128, 128), 13))
    assert all(tiles(P.neighborhood((128, 128), 13, stride=s)) < 1.3 * alone for s in (2, 4, 8, 13))
    assert tiles(P.block_causal(8192, 100)) < 1.05 * tiles(P.causal(8192))


# Texts.


def test_texts():
    p = P.strided(40, 7)
    assert p[3:30, 11:29].text == "strided(40,7)[3:30,11:29]"
    assert p[3:30][2:, 5:] == p[5:30, 5:] and p[:] == p[0:40, :99] == p and p[-8:, :-1] == p[32:, :39]
    assert p[3:30, 11:29].T == p.T[11:29, 3:30] != p.T[3:30, 11:29]
    assert p[30:20].shape == (0, 40) and p[5:5, 5:6].nnz == 0
    both = p | P.causal(40)
    assert both[4:].text == "(causal(40)|strided(40,7))[4:40,0:40]" and both[4:] == both[4:].T.T
    assert both[:, 4:] == both.T[4:].T and (both & P.full(40))[1:].shape == (39, 40)
    parse = fw.Pattern.parse
    for text, want in {
        "strided(40, 7)[ 3 : 30 ]": p[3:30], "strided(40,7)[-5:,:-3]": p[-5:, :-3], "(strided(40,7))[:,:]": p,
        "strided(40,7).T[2:].T": p[:, 2:], "place((strided(40,7)|causal(40))[2:], (50,50), at=(1,2))":
        P.place(both[2:], (50, 50), at=(1, 2)), "diag([strided(40,7),((causal(40)))])": P.diag([p, P.causal(40)]),
        "diag(((causal(3)|full(3)).T&full(3),full(2)))": P.diag([(P.causal(3) | P.full(3)).T & P.full(3), P.full(2)]),
        "with_prefix((causal(3)|full(3))&full(3),2)": P.with_prefix((P.causal(3) | P.full(3)) & P.full(3), 2),
        "neighborhood((9,8),4,stride=2)": P.neighborhood((9, 8), 4, stride=2),
        "tree((-1,0,0))": P.tree(torch.tensor([-1, 0, 0])), "causal(4)[1:][1:][1:]": P.causal(4)[3:],
    }.items():  # fmt: skip
        assert parse(text) == want, text
    assert P.place(p, (40, 40)) == p == P.diag([p]) == P.with_prefix(p, 0)
    assert P.place(p, (41, 40)).text == "place(strided(40,7),(41,40))"
    layout = fw.BlockLayout([[1, 0], [1, 1]], block=8)
    assert np.array_equal(layout[4:, :9].numpy_mask(), layout.numpy_mask()[0][4:, :9])
    factor = fw.KroneckerPattern(2, 3, 4, 5)
    assert np.array_equal(factor[7:, 3:30].numpy_mask(), factor.numpy_mask()[7:, 3:30]) and factor[1] == 3
    for bad in ("causal(4)[1]", "causal(4)[1:2:1]", "causal(4)[1:2", "causal(4)[1:2,3:4,5:6]", "causal(4)[a:2]",
                "causal(4)" + "[:]" * 70, "place(causal(4),(5,5),(1,))", "diag(causal(4))", "diag([3])",
                "with_prefix(3,1)", "from_runs((4,4),[(0,1,0,1,0)])", "from_runs((4,4),[(0,5,0,5,0,0)])",
                "from_runs((4,4),[(0,1,2,2,0,9)])", "tree([-1,3])", "slice(causal(4),1,2)"):  # fmt: skip
        with pytest.raises(ValueError, match=r"expected .+, got"):
            parse(bad)


@pytest.mark.parametrize("call", [
    "p[::2]", "p[3]", "p[1, 2]", "p[1:, 2:, 3:]", "p['a':]", "p[...]", "P.place(3, (9, 9))", "P.place(p, 9)",
    "P.place(p, (99, 99), at=(60, 0))", "P.place(p, (99, 99, 9))", "P.place(p, (99, 99.5))", "P.diag(p)",
    "P.diag([p, 3])", "P.diag(3)", "P.with_prefix(p, 1.5)", "P.with_prefix(3, 1)", "P.with_prefix(p, 2**60)",
    "fw.BlockLayout(np.ones((2, 2, 2)), 8)[1:]", "P.place(p, (2**50, 9))", "p.show(width=2)", "p.show(head=1)",
])  # fmt: skip
def test_bad_pieces(call):
    with pytest.raises((ValueError, TypeError), match=r"^[\w.]+: [\w\[\]]+: expected .+, got .+"):
        eval(call, {"p": P.causal(40), "P": P, "fw": fw, "np": np})


def test_a_pattern_made_in_a_compiled_function():
    def call(q):
        pattern = P.with_prefix(P.diag([P.causal(20)[4:, 4:], P.place(P.tree([-1, 0, 0]), (5, 5), at=(1, 1))]), 2)
        return fw.attention(q, q, q, pattern.T | pattern & P.strided(23, 4).T)

    q = torch.randn(1, 2, 23, 8)
    assert torch.allclose(torch.compile(call, fullgraph=True, backend="eager")(q), call(q))


@pytest.mark.parametrize("text", ["random_blocks((1,2,2),16,0.9,0)", "kronecker(2,4,2,4)"])
def test_a_transpose_in_a_compiled_function(text):
    def call(q, k):
        return fw.attention(q, k, k, fw.Pattern.parse(text).T)

    cols, rows = fw.Pattern.parse(text).shape[-2:]
    q, k = torch.randn(1, 1, rows, 8), torch.randn(1, 1, cols, 8)
    assert torch.allclose(torch.compile(call, fullgraph=True, backend="eager")(q, k), call(q, k))


# Block masks.


def test_block_masks(dice, device):
    heads = 3
    noise = torch.rand(heads, 200, 260, device=device) < 0.4
    for _ in range(6):
        rows, cols = dice.randint(1, 200), dice.randint(1, 260)
        block = dice.choice([16, 128, (32, 64), (128, 32)])
        cut = dice.randint(0, 200)
        for mod, want in [
            (lambda b, h, q, k: noise[h, q, k] | (k < cut), lambda h, q, k: noise[h, q, k] | (k < cut)),  # noqa: B023
            (lambda b, h, q, k: q - k >= h * 9, lambda h, q, k: q - k >= h * 9),
        ]:
            made = P.from_block_mask(create_block_mask(mod, None, heads, rows, cols, device=device, BLOCK_SIZE=block))
            q, k = torch.arange(rows, device=device)[:, None], torch.arange(cols, device=device)
            for h in range(heads):
                is_pattern(made[h], want(h, q, k).cpu().numpy())
    one = P.from_block_mask(create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 300, 300, device=device))
    assert one == P.from_block_mask(create_block_mask(lambda b, h, q, k: k <= q, None, None, 300, 300, device=device))
    assert "1 triangle" in one.describe() and len(one.text) < 60


def test_full_blocks_do_not_ask(device):
    """A list may end in anything, and its blocks stand in any order."""
    counts, full = (torch.tensor([[n]], dtype=torch.int32, device=device) for n in ([1, 0], [1, 2]))
    indices = torch.tensor([[[[2, 9, 9], [7, 7, 7]]]], dtype=torch.int32, device=device)
    whole = torch.tensor([[[[0, 2, -5], [2, 1, 0]]]], dtype=torch.int32, device=device)
    mask = BlockMask.from_kv_blocks(counts, indices, full, whole, 16, lambda b, h, q, k: k % 2 == 1, (30, 41))
    want = np.zeros((30, 41), bool)
    want[:16, :16], want[:16, 33::2], want[16:, 16:] = True, True, True
    is_pattern(P.from_block_mask(mask), want)


def test_bad_block_masks(device):
    with pytest.raises(ValueError, match=r"^from_block_mask: block_mask: expected a batch of 1 .+, got kv_num_blocks"):
        P.from_block_mask(create_block_mask(lambda b, h, q, k: q >= k, 2, None, 128, 128, device=device))
    with pytest.raises(TypeError, match=r"^from_block_mask: block_mask: expected a BlockMask .+, got Pattern"):
        P.from_block_mask(P.causal(9))


# NATTEN.


def test_natten(dice, device):
    for axes in (1, 2, 3):
        grid = tuple(dice.randint(5, (40, 12, 7)[axes - 1]) for _ in range(axes))
        window, causal = tuple(dice.randint(1, n // 2) for n in grid), tuple(dice.random() < 0.3 for _ in grid)
        stride = tuple(dice.randint(1, w) for w in window)
        options = dict(kernel_size=window, stride=stride, dilation=(2,) * axes, is_causal=causal)
        want = np.ones((1, 1), bool)
        for n, w, c, s in zip(grid, window, causal, stride, strict=True):
            want = np.kron(want, axis_neighborhood(n, w, 2, c, s)).astype(bool)
        shapes = [(2, *grid, heads, 16) for heads in (4, 2, 2)]
        tensors = [torch.randn(s, device=device).transpose(1, -3).contiguous().transpose(1, -3) for s in shapes]
        o = getattr(natten, f"na{axes}d")(*tensors, **options)
        wide = (t.double().cpu().flatten(1, -3).transpose(1, 2) for t in tensors)
        expected = dense_attention(*wide, torch.from_numpy(want)).transpose(1, 2).unflatten(1, grid)
        assert_close(o, expected, torch.float32)
        assert o.is_contiguous()


@pytest.mark.parametrize("call, said", [
    ("na2d(x, x, x, 9)", "na2d: kernel_size: expected at most 8, the shortest residue class, got 9"),
    ("na2d(x, x, x, 3, stride=4)", "na2d: stride: expected at most kernel_size = 3, got 4"),
    ("na2d(x, x, x, 3, is_causal=1)", "na2d: is_causal: expected True or False, got 1"),
    ("na1d(x, x, x, 3)", r"na1d: query: expected \(batch, length, heads, dim\), got \(1, 8, 8, 2, 4\)"),
    ("na2d(x, x[:, 1:], x, 3)", r"na2d: key: expected the grid \(8, 8\) of query, got \(1, 7, 8, 2, 4\)"),
    ("na2d(x, x, None, 3)", "na2d: value: expected a torch.Tensor, got NoneType"),
])  # fmt: skip
def test_bad_natten(call, said):
    with pytest.raises((ValueError, TypeError, RuntimeError), match=f"^{said}"):
        eval(call, vars(natten) | {"x": torch.ones(1, 8, 8, 2, 4)})


# Pictures.


def test_pictures_are_those_of_the_program(capsys, tmp_path, monkeypatch):
    if not PROGRAM.exists():
        pytest.skip("no program beside the libraries")
    monkeypatch.setenv("COLUMNS", "60")
    for pattern in (P.strided(64, 8), P.with_prefix(P.axial(30, 40), 2), P.causal(1 << 20), P.full((3, 9))[1:]):
        pattern.show()
        shown = capsys.readouterr().out
        said = subprocess.run(
            [PROGRAM, "show", pattern.text, "--svg", tmp_path / "p.svg"], capture_output=True, text=True
        )
        assert shown.startswith("┌") and shown in said.stdout
        assert pattern._repr_svg_() == (tmp_path / "p.svg").read_text()


def test_pictures(capsys):
    P.causal(64).show(width=20)
    assert all(len(line) <= 20 for line in capsys.readouterr().out.splitlines()[:-1])
    layout = fw.Pattern.parse("random_blocks((3,8,8),16,0.4,1)")
    layout.show(head=2)
    assert "head 2 of 3" in capsys.readouterr().out
    assert P.full((0, 4))._repr_svg_() is None and P.causal(1 << 30)._repr_svg_() is None
    assert P.from_mask(np.eye(4))._repr_svg_().startswith("<svg") and "&amp;" in (P.causal(4) & P.full(4))._repr_svg_()
    P.causal(4)[2:2].show()
    assert P.bigbird(1 << 20, 64, 1, 1, 3)._repr_svg_().count("<path") > 3  # of some rows, not of every part for each
