"""Attention by all-to-all: against dense float64 and one process, the bytes it is chosen by, what it refuses."""

import math

import pytest
import torch
import torch.distributed as dist
from conftest import assert_close
from ranks import on_ranks  # noqa: F401 (a fixture)

import fretwork as fw
import fretwork.distributed as fd
from fretwork.distributed._call import Bias, Sizes, bytes_of_ranges, bytes_of_ulysses, method_of

P = fw.patterns
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
DTYPES = [F64, F32, BF16]


# The reference


def masks(patterns, batch, heads):
    """(B, Hq, Sq, Sk) of one pattern, one for each head, or those of each element."""
    if isinstance(patterns, fw.Pattern):
        patterns = [patterns]
    rows = [patterns] * batch if isinstance(patterns[0], fw.Pattern) else patterns
    rows = [list(row) * (heads if len(row) == 1 else 1) for row in rows]
    return torch.stack([torch.stack([p.mask().reshape(p.shape[-2:]) for p in row]) for row in rows])


def dense(q, k, v, mask, scale=None, bias=None, softcap=0.0, sinks=None, key_padding_mask=None):
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    s = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    if isinstance(bias, fw.alibi):
        queries, keys = mask.shape[-2:]
        distance = (torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)).abs()
        bias = -bias.slopes.double()[:, None, None] * distance
    s = s if bias is None else s + bias
    if key_padding_mask is not None:
        mask = mask & ~key_padding_mask[:, None, None]
    s = s.masked_fill(~mask, -math.inf)
    lse = s.logsumexp(-1)
    lse = lse if sinks is None else torch.logaddexp(lse, sinks[:, None])
    return (s - lse.masked_fill(lse == -math.inf, 0)[..., None]).exp() @ v, lse


def ranges_of(rank, world, shape, shards):
    if shards is not None:
        return shards.ranges[rank], shards.key_ranges[rank]
    return tuple((n * rank // world, n * (rank + 1) // world) for n in shape)


def check(
    rank,
    world,
    patterns,
    shards=None,
    options=None,
    local=None,
    dtype=F32,
    heads=(8, 4),
    dims=(8, 12),
    method="ulysses",
):
    """Result, lse and all gradients: those of dense attention, and every bit that one process gives.

    `local` has the dimension of options of which a rank has its rows or keys. Tensors of `options` that require grad
    get theirs: of local ones the rows' part, of others a share, which all ranks add up.
    """
    options, local = options or {}, local or {}
    mask = masks(patterns, 2, heads[0])
    shape = mask.shape[-2:]
    rows, keys = ranges_of(rank, world, shape, shards)
    cut = {"rows": rows, "keys": keys}
    sizes = [(heads[0], shape[0], dims[0]), (heads[1], shape[1], dims[0]), (heads[1], shape[1], dims[1])]
    whole = [torch.randn(2, *size, dtype=dtype) for size in sizes]
    parts = [t[:, :, slice(*r)].clone().requires_grad_() for t, r in zip(whole, (rows, keys, keys), strict=True)]
    learns = [name for name, t in options.items() if isinstance(t, torch.Tensor) and t.requires_grad]
    mine = dict(options)
    for name in {*learns, *local}:
        t = options[name].detach()
        if name in local:
            dim, what = local[name]
            t = t.narrow(dim, cut[what][0], cut[what][1] - cut[what][0])
        mine[name] = t.clone().requires_grad_(name in learns)
    o, lse = fd.attention(*parts, patterns, shards, return_lse=True, method=method, **mine)
    up, up_lse = torch.randn(2, heads[0], shape[0], dims[1], dtype=dtype), torch.randn(2, heads[0], shape[0]).to(lse)
    up_lse = up_lse.masked_fill(~mask.any(-1), 0)
    got = torch.autograd.grad(
        [o, lse], [*parts, *(mine[n] for n in learns)], [t[:, :, slice(*rows)] for t in (up, up_lse)]
    )

    def both(call, wide):
        """What one process has of (o, lse) and of all gradients."""
        leaves = [t.detach().to(wide or t.dtype).requires_grad_() for t in (*whole, *(options[n] for n in learns))]
        given = {
            n: t.double() if wide and isinstance(t, torch.Tensor) and t.is_floating_point() else t
            for n, t in options.items()
        }
        given |= dict(zip(learns, leaves[3:], strict=True))
        results = call(*leaves[:3], **given)
        return results, torch.autograd.grad(results, leaves, [up.to(results[0]), up_lse.to(results[1])])

    (want, want_lse), expected = both(lambda q, k, v, **kw: dense(q, k, v, mask, **kw), F64)
    (one, one_lse), exact = both(lambda q, k, v, **kw: fw.attention(q, k, v, patterns, return_lse=True, **kw), None)
    assert o.dtype == dtype and o.shape == (2, heads[0], rows[1] - rows[0], dims[1])
    assert torch.equal(o, one[:, :, slice(*rows)]) and torch.equal(lse, one_lse[:, :, slice(*rows)])
    assert_close(o, want[:, :, slice(*rows)], dtype)
    assert_close(lse.nan_to_num(neginf=-1).to(dtype), want_lse[:, :, slice(*rows)].nan_to_num(neginf=-1), dtype)
    for g, x, e, r in zip(got, exact, expected, (rows, keys, keys), strict=False):
        assert torch.equal(g, x[:, :, slice(*r)])
        assert_close(g, e[:, :, slice(*r)], dtype)
    for name, g, e in zip(learns, got[3:], expected[3:], strict=True):
        assert g.shape == mine[name].shape
        if name in local:
            assert_close(g.to(dtype), e.narrow(local[name][0], rows[0], rows[1] - rows[0]), dtype)
        else:
            dist.all_reduce(g)
            assert_close(g.to(dtype), e, dtype)


def uneven(size, world, keys=None):
    """Ranges of different lengths; the last rank has none, if there are more than two."""
    ends = [[n // 3, *[n] * (world - 1)] if world < 4 else [n // 5, n // 2 + 1, n, n] for n in (size, keys or size)]
    return fd.Shards(P.full((size, keys or size)), *(tuple(zip([0, *e], e, strict=False)) for e in ends))


# Every option


def every_option(rank, world):
    size = 70
    for pattern in (P.causal(size), P.strided(size, 9), P.longformer(size, 4, [0, 40])):
        for shards in (None, uneven(size, world), fd.shard(pattern, world, align=48)):
            padding = torch.rand(2, size) < 0.3
            check(rank, world, pattern, shards, dict(scale=0.3, softcap=2.0))
            check(rank, world, pattern, shards, dict(key_padding_mask=padding))
            check(
                rank,
                world,
                pattern,
                shards,
                dict(key_padding_mask=padding),
                dict(key_padding_mask=(1, "keys")),
                dtype=F64,
            )
            check(rank, world, pattern, shards, dict(sinks=torch.randn(8, requires_grad=True)))
            check(rank, world, pattern, shards, dict(bias=fw.alibi(torch.rand(8))))


def every_bias(rank, world):
    """With rows and without, of each head and for all, of each element and for all; in bf16 and fp32."""
    pattern, size = P.sliding_window(60, 11, 7), 60
    for shape in [(2, 8, size, size), (8, size, size), (2, 1, size, size), (size, size), (8, size, 1), (1, 1, size, 1)]:
        for shards in (None, uneven(size, world)):
            bias = torch.randn(shape, requires_grad=True)
            check(rank, world, pattern, shards, dict(bias=bias), dict(bias=(len(shape) - 2, "rows")))
    for shape in [(2, 8, 1, size), (1, 8, 1, 1), (8, 1, size), (2, 1, 1, size), (1, size), (size,), ()]:
        bias = torch.randn(shape, requires_grad=True)
        check(rank, world, pattern, uneven(size, world), dict(bias=bias))
    wide = torch.randn(8, size, size, requires_grad=True)
    check(rank, world, pattern, None, dict(bias=wide), dict(bias=(1, "rows")), dtype=BF16)
    check(rank, world, pattern, None, dict(bias=wide.detach()), dict(bias=(1, "rows")))
    check(
        rank,
        world,
        pattern,
        None,
        dict(bias=torch.randn(8, size, size, dtype=F64), sinks=torch.randn(8)),
        dict(bias=(1, "rows")),
        F64,
    )


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("what", [every_option, every_bias])
def test_options(on_ranks, world, what):
    on_ranks(world, what)


def every_pattern(rank, world):
    """One of each head, those of each element, more keys than queries; all types and numbers of heads."""
    several = [
        P.causal(64),
        P.full(64),
        P.strided(64, 7),
        P.sliding_window(64, 5, 5),
        P.sinks(64, 2, 9),
        P.dilated(64, 4, 3),
    ]
    heads = (6, 3) if world == 3 else (8, 4)
    each = [several[n % 6] for n in range(heads[0])]
    slopes = dict(bias=fw.alibi(torch.rand(heads[0])))
    for shards in (None, uneven(64, world)):
        check(rank, world, each, shards, heads=heads)
        check(rank, world, [each, each[::-1]], shards, slopes | dict(sinks=torch.randn(heads[0])), heads=heads)
        check(rank, world, [each, [several[2]]], shards, dtype=F64, heads=heads)
    check(rank, world, fw.BlockLayout((torch.rand(4, 4) < 0.6).int(), block=16), heads=heads)
    for shape in ((40, 90), (90, 40)):
        for shards in (None, uneven(shape[0], world, shape[1])):
            options = slopes | dict(key_padding_mask=torch.rand(2, shape[1]) < 0.2)
            check(rank, world, P.causal(shape), shards, options, dict(key_padding_mask=(1, "keys")), heads=heads)
    for dtype in DTYPES:
        for numbers in ((world, world), (3 * world, world), (6 * world, 3 * world)):
            check(rank, world, P.causal(64), uneven(64, world), dtype=dtype, heads=numbers, dims=(16, 8))
    check(rank, world, P.place(P.full(0), (50, 50)), heads=heads)
    check(rank, world, P.causal(130), dtype=BF16, dims=(64, 64), heads=heads)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_patterns(on_ranks, world):
    on_ranks(world, every_pattern)


# Tensors of every layout, and gradients that come in every way


def layouts(rank, world):
    size, pattern = 48, P.causal(48)
    q, k, v = (torch.randn(2, size, h, 8) for h in (8, 4, 4))
    rows = slice(rank * size // world, (rank + 1) * size // world)
    views = [t[:, rows].transpose(1, 2).requires_grad_() for t in (q, k, v)]  # as projections give them
    whole = [t.transpose(1, 2).contiguous().requires_grad_() for t in (q, k, v)]
    o, want = fd.attention(*views, pattern, method="ulysses"), fw.attention(*whole, pattern)
    assert torch.equal(o, want[:, :, rows])
    up = torch.randn(2, size, 8, 8)
    for d in (up.transpose(1, 2), torch.ones(()).expand_as(want), up.transpose(1, 2).flip(3)):
        got = torch.autograd.grad(o, views, d[:, :, rows], retain_graph=True)
        again = torch.autograd.grad(o, views, d[:, :, rows], retain_graph=True)
        expected = torch.autograd.grad(want, whole, d, retain_graph=True)
        for g, a, e in zip(got, again, expected, strict=True):
            assert torch.equal(g, e[:, :, rows]) and torch.equal(g, a)
    kept = [t.detach().clone() for t in views]
    with torch.no_grad():
        assert torch.equal(fd.attention(*views, pattern, method="ulysses"), o)
        assert all(torch.equal(t, before) for t, before in zip(views, kept, strict=True))
    with torch.inference_mode():
        assert torch.equal(fd.attention(*views, pattern, method="ulysses"), o)


def some_gradients(rank, world):
    """Of some operands; of lse alone, and on one rank alone; one derivative, not two."""
    size, pattern = 48, P.strided(48, 5)
    whole = [torch.randn(1, 4, size, 8, requires_grad=True) for _ in range(3)]
    sinks = torch.randn(4, requires_grad=True)
    rows = slice(rank * size // world, (rank + 1) * size // world)
    want, want_lse = fw.attention(*whole, pattern, sinks=sinks, return_lse=True)
    for learns in [(0,), (1,), (2,), (0, 2), ()]:
        mine = [t.detach()[:, :, rows].clone().requires_grad_(n in learns) for n, t in enumerate(whole)]
        own = sinks.detach().clone().requires_grad_(not learns)
        o, lse = fd.attention(*mine, pattern, sinks=own, return_lse=True, method="ulysses")
        ours, theirs = [mine[n] for n in learns] or [own], [whole[n] for n in learns] or [sinks]
        # The last rank uses its rows of lse, the others those of o.
        last = rank == world - 1
        used = want_lse[:, :, rows].sum() if last else want[:, :, rows].square().sum()
        got = torch.autograd.grad(lse.sum() if last else o.square().sum(), ours)
        expected = torch.autograd.grad(used, theirs, retain_graph=True)
        total = torch.stack([torch.zeros_like(e) for e in expected])
        for t, e in zip(total, expected, strict=True):
            t += e
        dist.all_reduce(total)
        for g, e in zip(got, total, strict=True):
            if learns:
                assert_close(g, e[:, :, rows], F32)
            else:
                dist.all_reduce(g)
                assert_close(g, e, F32)
    leaf = whole[0].detach()[:, :, rows].clone().requires_grad_()
    o = fd.attention(leaf, leaf, leaf, pattern, method="ulysses").square().sum()
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.autograd.grad(o, leaf, create_graph=True)
    with torch.autocast("cpu", BF16):
        low = fd.attention(leaf, leaf, leaf, pattern, method="ulysses")
    half = leaf.bfloat16()
    assert low.dtype == BF16 and torch.equal(low, fd.attention(half, half, half, pattern, method="ulysses"))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("what", [layouts, some_gradients])
def test_gradients(on_ranks, world, what):
    on_ranks(world, what)


# Bytes, and the choice


class Counted:
    """Bytes that this rank receives of other ranks by all-to-all and point to point."""

    def __init__(self):
        self.bytes, self.way = 0, set()

    def __enter__(self):
        self.kept = dist.all_to_all_single, dist.batch_isend_irecv
        dist.all_to_all_single, dist.batch_isend_irecv = self.all_to_all, self.point_to_point
        return self

    def __exit__(self, *error):
        dist.all_to_all_single, dist.batch_isend_irecv = self.kept

    def all_to_all(self, output, given, sizes, splits, group):
        self.way.add("ulysses")
        self.bytes += (sum(sizes) - sizes[group.rank()]) * output.element_size()
        return self.kept[0](output, given, sizes, splits, group=group)

    def point_to_point(self, ops):
        self.way.add("ranges")
        self.bytes += sum(op.tensor.numel() * op.tensor.element_size() for op in ops if op.op is dist.irecv)
        return self.kept[1](ops)

    def all(self):
        total = torch.tensor(self.bytes)
        dist.all_reduce(total)
        return total.item()


def one_count(rank, world, pattern, shards, heads, dtype, learns, lse, padding, bias, method):
    rows, keys = ranges_of(rank, world, pattern.shape, shards)
    mine = [
        torch.randn(2, h, r[1] - r[0], d, dtype=dtype, requires_grad=n in learns)
        for n, (h, r, d) in enumerate([(heads[0], rows, 16), (heads[1], keys, 16), (heads[1], keys, 8)])
    ]
    options = dict(key_padding_mask=torch.rand(2, keys[1] - keys[0]) < 0.2) if padding else {}
    if bias is not None:
        shape = [rows[1] - rows[0] if n == "rows" else n for n in bias]
        options["bias"] = torch.randn(shape, requires_grad=True)
    with Counted() as counted:
        results = fd.attention(*mine, pattern, shards, return_lse=True, method=method, **options)
        if learns or bias:
            leaves = [mine[n] for n in learns] + [options[n] for n in options if n == "bias"]
            (results[0].square().sum() + (results[1].sum() if lse else 0)).backward(inputs=leaves)
    ranges = [tuple(r) for r in zip(*(ranges_of(n, world, pattern.shape, shards) for n in range(world)), strict=True)]
    sizes = Sizes(
        *(2, *heads, 16, 8, mine[0].element_size(), max(4, mine[0].element_size())),
        *(tuple(n in learns for n in range(3)), bool(learns) or bias is not None, padding),
        None if bias is None else Bias.of(options["bias"], ranges[0], True),
    )
    total = counted.all()
    bytes_of = dict(ranges=bytes_of_ranges((pattern,), *ranges, sizes), ulysses=bytes_of_ulysses(*ranges, sizes))
    assert counted.way <= {method} if method != "auto" else True
    if method != "auto":
        assert total == bytes_of[method], (method, total, bytes_of)
        return
    least = "ulysses" if bytes_of["ulysses"] < bytes_of["ranges"] and heads[1] % world == 0 else "ranges"
    assert total == bytes_of[least] == min(bytes_of.values()) or heads[1] % world
    assert method_of("auto", (pattern,), *ranges, sizes) == least


def counts(rank, world):
    """What is counted is what travels; the method that is chosen is the one that sends less."""
    for pattern in (P.full(64), P.causal(64), P.sliding_window(64, 9, 2), P.causal((64, 96)), P.strided(64, 8)):
        for shards in (None, uneven(*pattern.shape[:1], world, pattern.shape[1])):
            for method in ("ranges", "ulysses", "auto"):
                for learns in ((), (0, 1, 2), (0,), (2,)):
                    one_count(rank, world, pattern, shards, (8, 4), F32, learns, True, False, None, method)
                one_count(rank, world, pattern, shards, (4, 4), BF16, (0, 1), False, True, None, method)
                one_count(rank, world, pattern, shards, (8, 4), F32, (), False, False, (8, "rows", 1), method)
    for bias in [(1, 8, "rows", 64), ("rows", 64), (8, 1, 64), (64,)]:
        for method in ("ulysses", "auto"):
            one_count(rank, world, P.causal(64), None, (8, 4), F64, (0,), False, True, bias, method)
    one_count(rank, world, P.full(64), None, (3, 3), F32, (0, 1, 2), True, False, None, "auto")


@pytest.mark.parametrize("world", [2, 4])
def test_bytes(on_ranks, world):
    on_ranks(world, counts)


def sizes(world, heads, key_heads, bias=None):
    return Sizes(1, heads, key_heads, 64, 64, 2, 0, (True, True, True), True, False, bias)


def equal(size, world):
    return tuple((size * n // world, size * (n + 1) // world) for n in range(world))


@pytest.mark.parametrize(
    "pattern, world, heads, expected",
    [
        (P.full(4096), 8, (32, 8), "ulysses"),
        (P.causal(4096), 8, (32, 8), "ulysses"),
        (P.causal(4096), 8, (32, 4), "ranges"),  # whose key heads 8 ranks do not divide
        (P.causal(4096), 8, (12, 12), "ranges"),
        (P.sliding_window(4096, 255, 0), 8, (8, 8), "ranges"),
        (P.document([512] * 8), 8, (8, 8), "ranges"),
        (P.full(4096), 2, (8, 8), "ranges"),  # as many bytes
        (P.full(4096), 4, (8, 8), "ulysses"),
        (P.full(4096), 4, (64, 8), "ranges"),  # few keys for many queries
    ],
)
def test_choice(pattern, world, heads, expected):
    ranges = equal(pattern.shape[0], world)
    assert method_of("auto", (pattern,), ranges, ranges, sizes(world, *heads)) == expected


# What is refused, and ranks that disagree


def refused(rank, world):
    ends = ((0, 1), (1, 64))
    for method, heads, shards, bias, text in [
        ("ulysses", 3, None, None, "k: expected a number of heads that 2 ranks divide, with method='ulysses', got 3"),
        ("ulysses", 2, fd.Shards(P.causal(64), ends, ends), torch.zeros(1, 64),
         "shards: expected no rank with one row, with method='ulysses' and a bias, got [1, 63]"),
        ("ring", 2, None, None, "method: expected auto, ranges or ulysses, got 'ring'"),
        (None, 2, None, None, "method: expected auto, ranges or ulysses, got None"),
    ]:  # fmt: skip
        rows = shards.ranges[rank] if shards else (rank * 32, rank * 32 + 32)
        q = torch.zeros(1, heads, rows[1] - rows[0], 8)
        with pytest.raises(RuntimeError) as error:
            fd.attention(q, q, q, P.causal(64), shards, bias=bias, method=method)
        assert str(error.value) == f"attention: {text}"
        fd.attention(q, q, q, P.causal(64), shards, bias=bias)  # takes the way that is there


def disagree(rank, world, what):
    q = torch.randn(1, 2, 32, 16)
    options = dict(
        method=dict(method="ulysses" if rank else "ranges"),
        bias=dict(bias=torch.zeros(*((2, 32, 64) if rank else (2, 1, 64)))),
        return_lse=dict(return_lse=bool(rank)),
    )[what]
    text = f"attention: {what}: expected the same on every rank of the group, got .* on rank"
    with pytest.raises(RuntimeError, match=text):
        fd.attention(q, q, q, P.causal(64), **options)
    fd.attention(q, q, q, P.causal(64), method="ulysses")  # the group still works


@pytest.mark.parametrize("what", ["method", "bias", "return_lse"])
def test_disagreement(on_ranks, what):
    on_ranks(2, disagree, what)


def test_refuses(on_ranks):
    on_ranks(2, refused)
