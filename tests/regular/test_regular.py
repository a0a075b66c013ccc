"""SPLAT's operators on every pattern: against float64 from the mask alone, with odd views, sizes, scales and calls."""

import pytest
import torch
from conftest import assert_close, dtypes_of
from torch._subclasses.fake_tensor import FakeTensorMode

import fretwork as fw

parse = fw.Pattern.parse
INF, NAN = torch.inf, torch.nan

PROGRESSIONS = [
    "causal((37, 50))",
    "dilated(45, 3, 4)",
    "band((30, 64), -10, 2, 4)",
    "acsr((3,0,9,1,2),(2,1,1,4,3),(3,0,1,3,2),10)",
    "full((3, 90))",
]
UNIONS = [
    "strided(60, 7)",
    "strided((20, 61), 8)",
    "longformer(50, 4, (0, 33))",
    "axial(6, 7)",
    "neighborhood((7, 9), 3)",
    "swin(6, 8, (3, 4), (1, 2))",
    "vertical_slash(40, (1, 20), (0, 5, 13))",
    "dilated(30, 2, 4)|strided(30, 6)",
    "causal((12, 8))",
    "block_local((0, 8), 4)",
]
# Several tiles of a GPU, of several strides, and one that is cut into pieces.
LARGE = [
    ("strided(700, 16)", 64, 256),
    ("longformer(1700, 9, (5, 1000))", 64, 120),
    ("axial(20, 30)", 120, 136),
    ("sliding_window((300, 333), 70, 3)", 200, 64),
]


def some_pattern():
    """A random mask, some rows empty, some full."""
    rows, cols = (int(n) for n in torch.randint(1, 80, (2,)))
    mask = torch.rand(rows, cols) < torch.rand(rows, 1) ** 2
    mask[torch.rand(rows) < 0.1] = True
    return fw.patterns.from_mask(mask)


def columns_of(pattern):
    """The keys of each row in ascending order, −1 behind the row's end, from the mask."""
    rows = [row.nonzero().flatten().tolist() for row in pattern.mask()]
    width = max(map(len, rows), default=0)
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int32).view(len(rows), width)


class Reference:
    """The operators in float64, from the table of columns alone."""

    def __init__(self, pattern, group=1):
        at = columns_of(pattern)
        self.index, self.there, self.cols, self.group = at.clamp(min=0).long(), at >= 0, pattern.shape[-1], group

    def shared(self, t):
        return t.repeat_interleave(self.group, 1)

    def matrix(self, x):
        x = x.masked_fill(~self.there, 0.0)
        return x.new_zeros(*x.shape[:3], self.cols).scatter_add(-1, self.index.expand(x.shape), x)

    def sddmm(self, q, k):
        scores = q @ self.shared(k).mT
        return scores.gather(-1, self.index.expand(*q.shape[:2], -1, -1)).masked_fill(~self.there, 0.0)

    def softmax(self, x, scale):
        s = (x * scale).masked_fill(~self.there, -INF)
        dead = ~self.there.any(-1, keepdim=True)
        return s.masked_fill(dead, 0.0).softmax(-1).masked_fill(~self.there, 0.0)

    def spmm(self, x, v):
        return self.matrix(x) @ self.shared(v)


# The same numbers in other memory.
VIEWS = {
    "plain": lambda t: t,
    "permuted": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "turned": lambda t: t.mT.contiguous().mT,
    "sliced": lambda t: torch.nn.functional.pad(t, (3, 2, 1, 1), value=NAN)[:, :, 1:-1, 3:-2],
    "chunks": lambda t: torch.nn.functional.pad(t, (8, 16 + -t.shape[-1] % 8), value=NAN)[..., 8 : 8 + t.shape[-1]],
    "misaligned": lambda t: torch.nn.functional.pad(t.flatten(), (1, 0), value=NAN)[1:].view(t.shape),
    "every other": lambda t: torch.stack([t, torch.full_like(t, NAN)], -1)[..., 0],
}
EXPANDED = {f"expanded {d}": d for d in range(4)}


def view(t, how):
    """`t`, or one of it along a dimension for all, with other strides."""
    if how in EXPANDED:
        return t.narrow(EXPANDED[how], 0, min(1, t.shape[EXPANDED[how]])).expand(t.shape)
    return VIEWS[how](t)


def check(op, reference, tensors, dtype, how="plain", which=None):
    """Value and gradients, where tensor number `which`, or the incoming gradient (-1), is a view."""
    leaves = [view(t.detach(), how if which in (None, n) else "plain") for n, t in enumerate(tensors)]
    leaves = [t.detach().requires_grad_() for t in leaves]
    exact = [t.detach().cpu().double().requires_grad_() for t in leaves]
    got, want = op(*leaves), reference(*exact)
    assert_close(got, want, dtype, "value")
    weight = torch.randn(got.shape, device=got.device).to(dtype)
    weight = view(weight, how if which in (None, -1) else "plain")
    wanted = torch.autograd.grad(want, exact, weight.cpu().double())
    sizes = [t.abs().max().item() for t in (*wanted, weight) if t.numel()]  # what cancels is small beside them
    floor = max(sizes, default=0) / 50
    for n, (g, w) in enumerate(zip(torch.autograd.grad(got, leaves, weight), wanted, strict=True)):
        assert_close(g, w, dtype, f"gradient {n}", max(floor, 1e-3))
    return got.detach()


def draw(pattern, device, dtype, batch=2, heads=(4, 2), dims=(24, 16)):
    rows, cols = pattern.shape[-2:]
    shapes = (batch, heads[0], rows, dims[0]), (batch, heads[1], cols, dims[0]), (batch, heads[1], cols, dims[1])
    return [torch.randn(s, device=device).to(dtype) for s in shapes]


def check_all(pattern, device, dtype, heads=(4, 2), dims=(24, 16), how="plain", which=None, batch=2):
    """All three operators; what lies behind a row's end is NaN and must come out as zero."""
    reference = Reference(pattern, heads[0] // heads[1])
    q, k, v = draw(pattern, device, dtype, batch, heads, dims)
    beyond = ~reference.there.to(device)

    def poisoned(x):
        assert not x[..., beyond].any()
        return x if how in EXPANDED else x.masked_fill(beyond, NAN)  # one row for all would bring it into others

    options = {"dtype": dtype, "how": how, "which": which}
    scores = check(lambda q, k: fw.r_sddmm(q, k, pattern), reference.sddmm, (q, k), **options)
    x = poisoned(scores)
    weights = check(lambda x: fw.r_softmax(x, pattern, 0.3), lambda x: reference.softmax(x, 0.3), (x,), **options)
    check(lambda x, v: fw.r_spmm(x, v, pattern), reference.spmm, (poisoned(weights), v), **options)


@pytest.mark.parametrize("text", PROGRESSIONS + UNIONS)
def test_columns(text):
    pattern = parse(text)
    table = pattern.columns()
    assert table.dtype == torch.int32 and torch.equal(table, columns_of(pattern))
    assert (pattern.numpy_columns() == table.numpy()).all()


def test_columns_of_other_families():
    layout = fw.BlockLayout(torch.tensor([[1, 0, 1], [0, 1, 0]]), block=8)
    for pattern in (layout, fw.KroneckerPattern(2, 3, 2, 4)):
        flat = fw.patterns.from_mask(pattern.mask().reshape(pattern.shape[-2:]))
        assert torch.equal(pattern.columns(), flat.columns())
    with pytest.raises(ValueError, match=r"columns: pattern: expected a table of at most 2\^30 elements, got"):
        parse("full(65536)").columns()
    with pytest.raises(RuntimeError, match="columns: pattern: expected"):
        fw.BlockLayout(torch.ones(2, 1, 1), block=8).columns()


@pytest.mark.parametrize("text", PROGRESSIONS + UNIONS)
@pytest.mark.parametrize("heads", [(3, 3), (4, 2), (3, 1)])
def test_operators(device, text, heads):
    for dtype in dtypes_of(device):
        check_all(parse(text), device, dtype, heads, (24, 16) if heads != (3, 1) else (17, 40))


@pytest.mark.parametrize("text, depth, value_depth", LARGE)
def test_large_operators(device, text, depth, value_depth):
    check_all(parse(text), device, torch.bfloat16, (2, 1), (depth, value_depth), batch=1)


def test_random_patterns(device):
    for _ in range(12):
        for dtype in dtypes_of(device):
            check_all(some_pattern(), device, dtype, dims=(8 * int(torch.randint(1, 9, ())), 16))


@pytest.mark.parametrize("how", [*VIEWS, *EXPANDED])
def test_views(device, how):
    """Every tensor and the incoming gradient at once, and each alone."""
    for dtype in (torch.float32, torch.bfloat16):
        for text in ("strided(40, 6)", "sliding_window(70, 9, 2)"):
            for which in (None, -1, 0, 1):
                check_all(parse(text), device, dtype, how=how, which=which, batch=2)


@pytest.mark.parametrize("text", ["strided(300, 16)", "longformer(2100, 9, (5, 1000))"])
def test_deterministic(device, text):
    pattern = parse(text)
    q, k, v = (t.requires_grad_() for t in draw(pattern, device, torch.float16, 1, (4, 2), (64, 64)))

    def call():
        o = fw.r_spmm(fw.r_softmax(fw.r_sddmm(q, k, pattern), pattern, 0.1), v, pattern)
        return o, *torch.autograd.grad(o, (q, k, v), torch.ones_like(o))

    first = call()
    assert all(torch.equal(a, b) for _ in range(3) for a, b in zip(first, call(), strict=True))


@pytest.mark.parametrize("offset", range(8))
@pytest.mark.parametrize(
    "text",
    [
        "sliding_window((200, 420), 20, 170)",  # runs of one, two and three steps
        "longformer(300, 40, (0, 150))",  # a run beside single columns
        "bigbird(256, 16, 1, 1, 2, seed=3)",
        "strided(300, 16)",
    ],
)
def test_rows_that_begin_anywhere(device, text, offset):
    """Rows of x at every place of their 16 bytes, between numbers that must not be used."""
    pattern = parse(text)
    reference = Reference(pattern)
    rows, width = reference.there.shape
    dtype = (torch.bfloat16, torch.float16)[offset % 2]
    q, k, v = draw(pattern, device, dtype, 1, (2, 2), (64, 64))
    scores = fw.r_sddmm(q, k, pattern)
    assert_close(scores, reference.sddmm(q.cpu().double(), k.cpu().double()), dtype, "scores")
    stride = width + offset // 3
    room = torch.full((2 * rows * stride + 16,), NAN, device=device, dtype=dtype)
    x = room.as_strided((1, 2, rows, width), (2 * rows * stride, rows * stride, stride, 1), offset)
    x[..., reference.there.to(device)] = scores[..., reference.there.to(device)]
    exact = torch.where(reference.there, x.cpu().double(), 0.0)
    assert_close(fw.r_spmm(x, v, pattern), reference.spmm(exact, v.cpu().double()), dtype, "r_spmm")
    got = torch.ops.fretwork.r_spmm_transposed(x, q, pattern.key, 2)
    assert_close(got, reference.matrix(exact).mT @ q.cpu().double(), dtype, "r_spmm_transposed")


def test_unused_keys_never_leak(device):
    pattern = fw.patterns.strided((20, 90), 7) & fw.patterns.sliding_window((20, 90), 30, 0)
    used = pattern.mask().any(0).to(device)
    assert not used.all()
    for dtype in dtypes_of(device):
        q, k, v = draw(pattern, device, dtype)
        bad_k, bad_v = (t.masked_fill(~used[:, None], NAN) for t in (k, v))
        x = fw.r_sddmm(q, k, pattern)
        assert torch.equal(fw.r_sddmm(q, bad_k, pattern), x)
        assert torch.equal(fw.r_spmm(x, bad_v, pattern), fw.r_spmm(x, v, pattern))


@pytest.mark.parametrize("scale", [1e38, -1e38, 3e38, -3.4e38, 1e39, 1e-38, -1e-38, 0.0])
@pytest.mark.parametrize("size", [1.0, 1e30])
def test_softmax_of_large_scores(device, scale, size):
    """Finite scores and a finite scale have a softmax; in float64 the reference needs no care."""
    pattern = parse("longformer(33, 3, (7,))")
    reference = Reference(pattern)
    for dtype in dtypes_of(device):
        x = (torch.randn(1, 2, *reference.index.shape, dtype=torch.float64) * size).to(dtype)
        x = x.nan_to_num(posinf=6e4, neginf=-6e4).to(device)  # of float16
        got = fw.r_softmax(x, pattern, scale)
        assert got.isfinite().all()
        assert_close(got, reference.softmax(x.cpu().double(), scale), dtype, "value")


def test_softmax_of_infinities(device):
    """−inf is a weight of zero, a row of them gives zeros; +inf and NaN stay in their row."""
    pattern = parse("longformer(9, 2, (0,))")
    x = torch.randn(1, 1, *pattern.columns().shape, device=device)
    x[0, 0, 3, 1], x[0, 0, 4], x[0, 0, 5, 0], x[0, 0, 6, 1] = -INF, -INF, INF, NAN
    got = fw.r_softmax(x, pattern, 2.0)
    assert not got[0, 0, 3, 1] and not got[0, 0, 4].any()
    assert got[0, 0, 5:7].isnan().any(-1).all() and got[0, 0, [0, 1, 2, 3, 4, 7, 8]].isfinite().all()


@pytest.mark.parametrize("width", [3, 63, 130, 255, 256, 320, 512, 513, 2039, 2041, 2500])
def test_softmax_of_long_rows(device, width):
    """Held by a warp or not, with rows that begin anywhere in their 16 bytes."""
    pattern = fw.patterns.sliding_window((40, width), width - 1, 0)
    reference = Reference(pattern)
    for dtype in dtypes_of(device):
        # With a width of 3, three rows of a head have keys: of one head all their gradients may be small.
        x = torch.randn(2, 8, 40, width, device=device).to(dtype)
        for how in ("plain", "misaligned", "sliced", "every other"):
            check(lambda x: fw.r_softmax(x, pattern), lambda x: reference.softmax(x, 1.0), (x,), dtype, how)


def test_differentiate_twice():
    pattern = parse("longformer((6, 9), 1, (2,))")
    q, k, v = (t.requires_grad_() for t in draw(pattern, "cpu", torch.float64, 1, (2, 1), (3, 2)))
    x = fw.r_sddmm(q, k, pattern).detach().requires_grad_()
    for op, arguments in [(fw.r_sddmm, (q, k)), (fw.r_spmm, (x, v))]:
        assert torch.autograd.gradcheck(lambda *t, op=op: op(*t, pattern), arguments)
        assert torch.autograd.gradgradcheck(lambda *t, op=op: op(*t, pattern), arguments)
    assert torch.autograd.gradcheck(lambda x: fw.r_softmax(x, pattern), x)
    with pytest.raises(NotImplementedError, match=r"r_softmax: gradient: .*; for second derivatives apply"):
        torch.autograd.grad(torch.autograd.grad(fw.r_softmax(x, pattern).sum(), x, create_graph=True)[0].sum(), x)


def test_vmap_and_compile(device):
    pattern = parse("dilated((30, 40), 3, 4)|strided((30, 40), 7)")
    q, k, v = draw(pattern, device, torch.float32)

    def call(q, k, v):
        return fw.r_spmm(fw.r_softmax(fw.r_sddmm(q, k, pattern), pattern, 0.25), v, pattern)

    want = call(q, k, v)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), want)
    many = torch.vmap(call, (0, None, 0))(torch.stack([q, q.flip(0)]), k, torch.stack([v, v]))
    assert torch.equal(many[0], want) and torch.equal(many[1], call(q.flip(0), k, v))


def test_opcheck(device):
    ops, pattern = torch.ops.fretwork, parse("longformer((30, 40), 3, (4,))")
    q, k, v = (t.requires_grad_() for t in draw(pattern, device, torch.float32))
    x = torch.randn(2, 4, *pattern.columns().shape, device=device, requires_grad=True)
    y = torch.randn(2, 4, 30, 24, device=device, requires_grad=True)
    torch.library.opcheck(ops.r_sddmm.default, (q, k, pattern.key))
    torch.library.opcheck(ops.r_spmm.default, (x, v, pattern.key))
    torch.library.opcheck(ops.r_spmm_transposed.default, (x, y, pattern.key, 2))
    torch.library.opcheck(ops.r_softmax.default, (x, pattern.key, 0.5))
    plain = [t.detach() for t in (x, torch.randn_like(x))]
    torch.library.opcheck(ops.r_softmax_backward.default, (*plain, pattern.key, 0.5))


def test_nothing_to_do(device):
    """No batch, no rows, no keys, no entries, no depth: empty or zero, and zero gradients."""
    for text in ("full((0, 5))", "full((5, 0))", "causal((5, 3)) & causal((5, 3), offset=-9)", "strided(5, 2)"):
        pattern = eval(text, vars(fw.patterns) | {})
        for batch, dims in ((0, (8, 8)), (2, (8, 8)), (2, (0, 8)), (1, (8, 0))):
            q, k, v = (t.requires_grad_() for t in draw(pattern, device, torch.float32, batch, (2, 1), dims))
            x = fw.r_sddmm(q, k, pattern)
            assert x.shape == (batch, 2, *pattern.columns().shape)
            o = fw.r_spmm(fw.r_softmax(x, pattern), v, pattern)
            assert o.shape == (batch, 2, pattern.shape[0], dims[1])
            for g in torch.autograd.grad(o.sum(), (q, k, v)):
                assert g.isfinite().all() and (pattern.nnz > 0 or not g.any())


@pytest.mark.parametrize("fake", [False, True], ids=["core", "tracer"])
def test_bad_calls(device, fake):
    pattern = parse("dilated(20, 2, 3)")
    two_heads = fw.BlockLayout(torch.ones(2, 1, 1), block=8)
    with FakeTensorMode() if fake else torch.no_grad():
        q, k = torch.ones(1, 4, 20, 8, device=device), torch.ones(1, 2, 20, 8, device=device)
        x = torch.ones(1, 4, 20, 5, device=device)
        for call, words in [
            (lambda: fw.r_sddmm(q, k, two_heads), "r_sddmm: pattern: expected a"),
            (lambda: fw.r_sddmm(q[:, :, 1:], k, pattern), r"r_sddmm: q: expected shape \("),
            (lambda: fw.r_sddmm(q[:, :3], k, pattern), "r_sddmm: k: expected a number of heads that divides 3"),
            (lambda: fw.r_sddmm(q, k[..., :7], pattern), r"r_sddmm: k: expected shape \(1, 2, 20, 8\)"),
            (lambda: fw.r_sddmm(q.double(), k, pattern), "r_sddmm: k: expected float64, got float32"),
            (lambda: fw.r_softmax(x[..., :4], pattern), r"r_softmax: x: expected shape \(1, 4, 20, 5\)"),
            (lambda: fw.r_spmm(x, k[:, :, :19], pattern), r"r_spmm: v: expected shape \(1, 2, 20, 8\)"),
        ]:
            if device.type == "cuda" and "float64" in words:
                continue
            with pytest.raises(RuntimeError, match=words):
                call()
    with pytest.raises(TypeError, match=r"r_softmax: pattern: expected a fretwork.Pattern, got int"):
        fw.r_softmax(x, 3)
    with pytest.raises(RuntimeError, match="r_softmax: scale: expected a finite number, got"):
        fw.r_softmax(torch.ones(1, 4, 20, 5, device=device), pattern, INF)
