"""Patterns that are functions of the lengths: the same results, and one compiled graph for all lengths."""

import functools

import pytest
import torch
from conftest import assert_close
from torch.nn.attention.flex_attention import create_block_mask

import fretwork as fw

P = fw.patterns


def near(rows, cols):
    return P.sliding_window((rows, cols), 5, 2)


def for_heads(rows, cols):
    return [near(rows, cols), P.strided((rows, cols), 3)] * 2


def qkv_of(device, rows, cols, batch=2):
    shapes = (batch, 4, rows, 8), (batch, 2, cols, 8), (batch, 2, cols, 8)
    return [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]


def compiled(call, backend="aot_eager", dynamic=True):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(call, backend=backend, fullgraph=True, dynamic=dynamic)


def compilations():
    """Since `compiled`; a backend may be called more often."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def assert_same(got, want, inputs):
    assert torch.equal(got, want)
    weight = torch.randn_like(want)
    for x, y in zip(*(torch.autograd.grad(o, inputs, weight) for o in (got, want)), strict=True):
        assert_close(x, y.double(), torch.float32)


@pytest.mark.parametrize("pattern", [near, for_heads, None], ids=["one", "heads", "none"])
def test_a_function_is_the_pattern_that_it_gives(device, pattern):
    q, k, v = qkv_of(device, 12, 15)
    want = fw.attention(q, k, v, P.full((12, 15)) if pattern is None else pattern(12, 15))
    assert_same(fw.attention(q, k, v, pattern), want, (q, k, v))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("pattern", [near, for_heads, None], ids=["one", "heads", "none"])
def test_one_graph_serves_every_length(device, pattern, dynamic, backend):
    def call(q, k, v):
        return fw.attention(q, k, v, pattern) * 2

    fast = compiled(call, backend, dynamic)
    for rows, cols in ((12, 15), (13, 17), (30, 31), (64, 80), (7, 9)):
        inputs = qkv_of(device, rows, cols)
        assert_same(fast(*inputs), call(*inputs), inputs)
    assert compilations() == (1 if dynamic else 2)  # None learns from the second length that lengths differ


def test_options(device):
    slopes = torch.rand(4, device=device)
    sinks = torch.randn(4, device=device, requires_grad=True)

    def call(q, k, v, padding):
        options = dict(scale=0.3, softcap=5.0, key_padding_mask=padding, sinks=sinks)
        return fw.attention(q, k, v, near, bias=fw.alibi(slopes), return_lse=True, **options)

    fast = compiled(call)
    for n in (12, 19, 33):
        inputs = qkv_of(device, n, n)
        padding = torch.arange(n, device=device) >= torch.tensor([[n], [n - 4]], device=device)
        for got, want in zip(fast(*inputs, padding), call(*inputs, padding), strict=True):
            assert torch.equal(got, want)
        assert_same(fast(*inputs, padding)[0], call(*inputs, padding)[0], (*inputs, sinks))
    assert compilations() == 1


def one_for_all(rows, cols):
    return [near(rows, cols)] * 4


@pytest.mark.parametrize("pattern", [near, one_for_all], ids=["one", "heads"])
@pytest.mark.parametrize("lists", [False, True])
def test_with_blocks(device, pattern, lists):
    sinks = torch.randn(4, device=device, requires_grad=True)

    def call(q, k, v, mask):
        blocks = fw.select_blocks(q, k, 2, block=(32, 16)) if lists else mask
        return fw.attention(q, k, v, pattern, blocks=blocks, block=(32, 16), sinks=sinks, softcap=5.0)

    fast = compiled(call)
    for rows, cols in ((70, 75), (40, 50), (99, 90)):
        inputs = qkv_of(device, rows, cols)
        mask = torch.rand(2, 1, -(-rows // 32), -(-cols // 16), device=device) < 0.6
        assert_same(fast(*inputs, mask), call(*inputs, mask), (*inputs, sinks))
    assert compilations() == 1
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(fast(*inputs, mask), call(*inputs, mask))


@pytest.mark.parametrize(
    "pattern, words",
    [
        (lambda rows, cols: P.strided((rows, cols), 3), "expected one whose rows are intervals"),
        (lambda rows, cols: [P.causal((rows, cols)), P.full((rows, cols))] * 2, "expected one for all heads with bl"),
        (lambda rows, cols: P.causal((rows, cols + 1)), r"expected shape \(40, 50\)"),
    ],
    ids=["rows", "heads", "shape"],
)
def test_wrong_with_blocks(device, pattern, words):
    fast = compiled(lambda q, k, v, mask: fw.attention(q, k, v, pattern, blocks=mask, block=64))
    with pytest.raises(RuntimeError, match=f"attention: pattern: {words}"):
        fast(*qkv_of(device, 40, 50), torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device))


def test_mapped_with_blocks(device):
    q, k, v = (torch.randn(3, *t.shape, device=device) for t in qkv_of(device, 20, 30))
    masks = torch.rand(3, 1, 1, 2, 2, device=device) < 0.6

    def call(q, k, v, mask):
        return fw.attention(q, k, v, near, blocks=mask, block=16)

    want = torch.stack([call(*given) for given in zip(q, k, v, masks, strict=True)])
    assert torch.equal(compiled(torch.vmap(call))(q, k, v, masks), want)


def test_autocast(device):
    fast = compiled(lambda q, k, v: fw.attention(q, k, v, near))
    for n in (12, 19):
        inputs = qkv_of(device, n, n)
        with torch.autocast(device.type, torch.bfloat16):
            got, want = fast(*inputs), fw.attention(*inputs, near(n, n))
        assert got.dtype == torch.bfloat16 and torch.equal(got, want)
    assert compilations() == 1


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("pattern", [near, for_heads], ids=["one", "heads"])
def test_a_layer_is_compiled_once(device, pattern, is_causal):
    layer = fw.nn.MultiheadAttention(32, 4, pattern, device=device)
    fast = compiled(lambda x: layer(x, is_causal=is_causal)[0])
    for n in (12, 19, 33):
        x = torch.randn(2, n, 32, device=device, requires_grad=True)
        assert_same(fast(x), layer(x, is_causal=is_causal)[0], [x, *layer.parameters()])
    assert compilations() == 1


def test_a_graph_follows_what_the_function_reads(device):
    reach = [3]

    def pattern(rows, cols):
        return P.sliding_window((rows, cols), reach[0], 0)

    fast = compiled(lambda q, k, v: fw.attention(q, k, v, pattern))
    inputs = qkv_of(device, 12, 12)
    for reach[0] in (3, 5):
        assert torch.equal(fast(*inputs), fw.attention(*inputs, P.sliding_window(12, reach[0], 0)))


class Reach:
    def __init__(self, reach):
        self.reach = reach

    def __call__(self, rows, cols):
        return P.sliding_window((rows, cols), self.reach, 0)

    def other(self, rows, cols):
        return self(rows, cols)


@pytest.mark.parametrize("kind", ["object", "method", "partial"])
def test_other_things_that_can_be_called(device, kind):
    """They are compiled for each length."""
    made = Reach(4)
    pattern = {"object": made, "method": made.other, "partial": functools.partial(near)}[kind]
    fast = compiled(lambda q, k, v: fw.attention(q, k, v, pattern))
    for n in (12, 19):
        inputs = qkv_of(device, n, n)
        assert torch.equal(fast(*inputs), fw.attention(*inputs, pattern(n, n)))
    assert compilations() == 2


def test_exported_graphs_hold_the_pattern(device):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return fw.attention(q, k, v, near)

    inputs = qkv_of(device, 12, 15)
    graph = torch.export.export(Model(), tuple(inputs))
    assert "sliding_window" in str(graph.graph) and "by_length" not in str(graph.graph)
    assert torch.equal(graph.module()(*inputs), fw.attention(*inputs, near))


def test_vmap_under_compile(device):
    fast = compiled(torch.vmap(lambda q, k, v: fw.attention(q, k, v, near)))
    inputs = [torch.stack([t, 2 * t]) for t in qkv_of(device, 12, 15)]
    assert_close(fast(*inputs), torch.vmap(lambda *t: fw.attention(*t, near))(*inputs).double(), torch.float32)


def flex_causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def raises(rows, cols):
    raise TypeError("of its own")


def test_errors(device):
    q, k, v = qkv_of(device, 12, 15)
    with pytest.raises(TypeError, match=r"attention: pattern: expected a fretwork.Pattern or a sequence .* got int"):
        fw.attention(q, k, v, lambda m, n: 3)
    with pytest.raises(RuntimeError, match=r"attention: pattern: expected 1 or 4, one for each query head, got 2"):
        fw.attention(q, k, v, lambda m, n: [near(m, n)] * 2)
    with pytest.raises(RuntimeError, match=r"attention: pattern: expected .*12, 15.*12, 14"):
        fw.attention(q, k, v, lambda m, n: near(m, n - 1))
    with pytest.raises(RuntimeError, match="attention: q: expected 4 dimensions"):
        fw.attention(q[0], k, v, near)
    expected = r"pattern: expected a function of \(Sq, Sk\) that gives a fretwork.Pattern, got one of"
    for mask_mod in (lambda b, h, i, j: i >= j), flex_causal:
        for name, call in (
            ("attention", lambda: fw.attention(q, k, v, mask_mod)),  # noqa: B023
            ("MultiheadAttention", lambda: fw.nn.MultiheadAttention(64, 4, mask_mod)),  # noqa: B023
            ("recipes.Attention", lambda: fw.recipes.Attention(mask_mod)),  # noqa: B023
        ):
            with pytest.raises(TypeError, match=rf"^{name}: {expected} \(b, h, .*from_block_mask.* takes a mask_mod"):
                call()
    with pytest.raises(TypeError, match=rf"^attention: {expected} \(n\)$"):
        fw.attention(q, k, v, lambda n: near(n, n))
    with pytest.raises(TypeError, match="of its own"):  # an error inside of a function stays
        fw.attention(q, k, v, raises)
    block_mask = create_block_mask(flex_causal, None, None, 12, 15, device=device)
    with pytest.raises(TypeError, match=r"got BlockMask \(fw.patterns.from_block_mask makes a pattern\)"):
        fw.attention(q, k, v, block_mask)
    fast = compiled(lambda *t: fw.attention(*t, lambda m, n: near(m, n - 1)))
    with pytest.raises(RuntimeError, match=r"attention: pattern: expected .*12, 15.*12, 14"):
        fast(q, k, v)
