"""fw.select_blocks and fw.BlockLists against the definition in float64: means of blocks, their products, the best."""

import pytest
import torch
from conftest import dtypes_of

import fretwork as fw


def pair(block):
    return block if isinstance(block, tuple) else (block, block)


def scores_of(q, k, block):
    """(B, Hk, R, C) in float64; the heads of a group are averaged."""
    bq, bk = pair(block)

    def means(x, side):
        parts = [part.mean(2) for part in x.split(side, 2)] if x.shape[2] else []
        return torch.stack(parts, 2) if parts else x.new_zeros(*x.shape[:2], 0, x.shape[3])

    q, k = q.double().cpu(), k.double().cpu()
    return means(q.unflatten(1, (k.shape[1], -1)).mean(2), bq) @ means(k, bk).mT


def places(rows, cols, block, causal=True, first=1, last=1):
    """(R, C): what a query block may take, and what it must."""
    bq, bk = pair(block)
    j = torch.arange(-(-cols // bk))
    ends = torch.tensor([min((r + 1) * bq, rows) - 1 + cols - rows for r in range(-(-rows // bq))], dtype=torch.long)
    own = ends.div(bk, rounding_mode="floor")[:, None]
    may = (j <= own) | torch.tensor(not causal)
    return may, may & ((j < first) | ((j > own - last) & (j <= own)))


def check(q, k, top_k, block, exact=False, **options):
    lists = fw.select_blocks(q, k, top_k, block, **options)
    scores = scores_of(q.detach(), k.detach(), block)
    may, must = places(q.shape[2], k.shape[2], block, **options)
    counts, indices = lists.counts.cpu(), lists.indices.cpu()
    assert lists.counts.device == q.device and counts.dtype == indices.dtype == torch.int32
    assert indices.shape == (*scores.shape[:3], top_k)
    assert torch.equal(counts, may.sum(1).clamp(max=top_k).int().expand(counts.shape))
    there = torch.arange(top_k) < counts[..., None]
    assert (indices[~there] == -1).all()
    assert (indices.diff(dim=-1)[there[..., 1:]] > 0).all(), "not ascending"
    chosen = torch.zeros(*scores.shape[:3], scores.shape[3] + 1, dtype=torch.bool)
    chosen = chosen.scatter(-1, indices.long() % (scores.shape[3] + 1), True)[..., :-1]
    assert not (chosen & ~may).any() and not (must & ~chosen).any()
    if exact:
        order = scores.masked_fill(must, torch.inf).masked_fill(~may, -torch.inf)
        best = order.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
        assert torch.equal(chosen, torch.zeros_like(chosen).scatter(-1, best, True) & may)
    elif scores.numel():
        worst = scores.masked_fill(~chosen | must, torch.inf).amin(-1)
        left = scores.masked_fill(chosen | ~may, -torch.inf).amax(-1)
        assert (left <= worst + 1e-5 * scores.abs().max()).all(), "a better block was left out"
    return lists


def inputs(device, dtype, rows, cols, batch=2, heads=(4, 2), depth=64):
    return [torch.randn(batch, h, s, depth, device=device).to(dtype) for h, s in zip(heads, (rows, cols), strict=True)]


CASES = [
    ((256, 256), 32, 4, {}),
    ((1000, 1000), 16, 5, {}),
    ((200, 200), 32, 3, dict(causal=False)),
    ((100, 333), (16, 64), 4, {}),
    ((333, 100), (64, 16), 3, {}),
    ((333, 100), (64, 16), 3, dict(causal=False)),
    ((130, 200), (128, 16), 5, dict(first=2, last=2)),
    ((200, 300), 64, 3, dict(first=0, last=0)),
    ((100, 150), 16, 20, {}),
    ((1, 500), (16, 64), 4, dict(first=2)),
    ((1500, 3000), (128, 32), 40, dict(first=0, last=30)),
    ((40, 20000), (16, 16), 300, {}),
    ((40, 20000), (16, 16), 1, dict(first=0, last=0, causal=False)),
]


@pytest.mark.parametrize("seq, block, top_k, options", CASES, ids=str)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
def test_definition(device, seq, block, top_k, options, heads):
    for dtype in dtypes_of(device):
        check(*inputs(device, dtype, *seq, 2, heads), top_k, block, **options)


@pytest.mark.parametrize("depth", [1, 8, 33, 64, 100, 256, 300])
def test_depths(device, depth):
    for dtype in dtypes_of(device):
        check(*inputs(device, dtype, 300, 300, depth=depth), 4, 32)


@pytest.mark.parametrize("options", [{}, dict(causal=False), dict(first=0, last=2), dict(first=0, last=0)], ids=str)
def test_ties(device, options):
    """Small integers are exact, and many scores are equal; −0 is 0."""
    for dtype in dtypes_of(device):
        q, k = (torch.randint(-1, 2, (2, h, 640, 4), device=device).to(dtype) for h in (4, 2))
        q, k = (t.unflatten(2, (40, 16))[:, :, :, :1].expand(-1, -1, -1, 16, -1).flatten(2, 3) for t in (q, k))
        for x in q, torch.zeros_like(q), -torch.zeros_like(q):
            check(x, k, 4, 16, exact=True, **options)


def test_views(device):
    """Any strides, and a row that does not begin at 16 bytes."""
    for dtype in dtypes_of(device):
        q = torch.randn(2, 300, 4, 65, device=device).to(dtype).transpose(1, 2)[..., 1:]
        k = torch.randn(64, 2, 2, 300, device=device).to(dtype).permute(1, 2, 3, 0)
        check(q, k, 4, 32)
        check(q.flip(2), k[:, :1].expand(2, 2, 300, 64), 4, 32)


def test_long_sequences(device):
    """More key blocks than shared memory has places for."""
    rows, cols = (64, 200_000) if device.type == "cpu" else (300, 400_000)
    q, k = inputs(device, torch.float32, rows, cols, 1, (2, 1), 16)
    check(q, k, 16, 16)
    check(q, k, 7, 16, causal=False)


def test_sizes_of_zero(device):
    for batch, rows, cols in (0, 64, 64), (2, 0, 64), (2, 64, 0):
        lists = check(*inputs(device, torch.float32, rows, cols, batch), 3, 16)
        assert cols or not lists.counts.any()


def test_not_a_number_is_taken_last(device):
    q, k = inputs(device, torch.float32, 160, 160, 1, (1, 1))
    k[:, :, 48:64] = torch.nan
    lists = fw.select_blocks(q, k, 4, 16, causal=False, first=0, last=0)
    assert not (lists.indices == 3).any()
    must = fw.select_blocks(q, k, 4, 16, causal=False, first=4, last=0).indices
    assert torch.equal(must.cpu(), torch.arange(4).int().expand(must.shape))


def test_torch_features(device):
    """Nothing to differentiate; torch.compile, opcheck, vmap."""
    q, k = (t.requires_grad_() for t in inputs(device, torch.float32, 100, 130))
    want = fw.select_blocks(q, k, 3, 16)
    assert not want.counts.requires_grad and not want.indices.requires_grad

    def call(q, k):
        lists = fw.select_blocks(q, k, 3, 16)
        return lists.counts, lists.indices

    got = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k)
    assert torch.equal(got[0], want.counts) and torch.equal(got[1], want.indices)
    torch.library.opcheck(torch.ops.fretwork.select_blocks.default, (q.detach(), k.detach(), 3, 16, 16, True, 1, 1))
    many = [torch.stack([t, t.flip(0)]) for t in (q, k)]
    for dims in (0, 0), (0, None):
        other = many[1] if dims[1] == 0 else k
        counts, indices = torch.vmap(call, dims)(many[0], other)
        for n in range(2):
            each = fw.select_blocks(many[0][n], other[n] if dims[1] == 0 else k, 3, 16)
            assert torch.equal(counts[n], each.counts) and torch.equal(indices[n], each.indices)


def test_deterministic(device):
    q, k = inputs(device, torch.bfloat16 if device.type == "cuda" else torch.float32, 2000, 2000)
    runs = [fw.select_blocks(q, k, 8, 16).indices for _ in range(5)]
    assert all(torch.equal(runs[0], other) for other in runs)


def test_captured(device):
    """Nothing is read on the host: a graph gives the result of what it finds."""
    if device.type != "cuda":
        pytest.skip("speaks of CUDA")
    q, k = inputs(device, torch.bfloat16, 1000, 1000)
    fw.select_blocks(q, k, 5, 32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lists = fw.select_blocks(q, k, 5, 32)
    for _ in range(3):
        q.normal_()
        k.normal_()
        graph.replay()
        want = fw.select_blocks(q, k, 5, 32)
        assert torch.equal(lists.counts, want.counts) and torch.equal(lists.indices, want.indices)


@pytest.mark.parametrize(
    "argument, change",
    [
        ("top_k", dict(top_k=0)),
        ("top_k", dict(top_k=2.5)),
        ("top_k", dict(top_k=1)),
        ("first", dict(first=-1)),
        ("last", dict(last=-1)),
        ("block", dict(block=24)),
        ("block", dict(block=(16, 16, 16))),
        ("causal", dict(causal="yes")),
        ("q", dict(q=torch.ones(2, 4, 64))),
        ("q", dict(q=None)),
        ("k", dict(k=torch.ones(2, 3, 64, 8))),
        ("k", dict(k=torch.ones(2, 2, 64, 7))),
        ("k", dict(k=torch.ones(2, 2, 64, 8).half())),
    ],
    ids=str,
)
def test_bad_calls(device, argument, change):
    given = dict(q=torch.ones(2, 4, 64, 8), k=torch.ones(2, 2, 64, 8), top_k=3, block=16) | change
    given = {name: x.to(device) if torch.is_tensor(x) else x for name, x in given.items()}
    with pytest.raises(
        (RuntimeError, TypeError, ValueError), match=rf"^select_blocks: {argument}: expected .+, got .+"
    ):
        fw.select_blocks(**given)


def whole(*shape):
    return torch.zeros(shape, dtype=torch.int32)


@pytest.mark.parametrize(
    "argument, counts, indices",
    [
        ("counts", torch.zeros(1, 1, 2), whole(1, 1, 2, 3)),
        ("counts", whole(1, 2), whole(1, 1, 2, 3)),
        ("counts", [2], whole(1, 1, 2, 3)),
        ("indices", whole(1, 1, 2), whole(1, 1, 2, 3).long()),
        ("indices", whole(1, 1, 2), whole(1, 2, 3)),
        ("indices", whole(1, 1, 2), None),
        ("indices", whole(1, 1, 2), whole(1, 1, 3, 3)),
        ("indices", whole(1, 1, 2), whole(2, 1, 2, 3)),
        ("indices", whole(1, 1, 2), torch.zeros(1, 1, 2, 3, dtype=torch.int32, device="meta")),
    ],
)
def test_bad_lists(argument, counts, indices):
    with pytest.raises((TypeError, ValueError), match=rf"^BlockLists: {argument}: expected .+, got .+"):
        fw.BlockLists(counts, indices)


def test_lists_keep_what_they_are_given():
    counts, indices = whole(2, 1, 4), whole(2, 1, 4, 5)
    lists = fw.BlockLists(counts, indices)
    assert lists.counts is counts and lists.indices is indices
    assert repr(lists) == "BlockLists(counts=(2, 1, 4), indices=(2, 1, 4, 5))"
