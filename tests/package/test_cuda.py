"""What only a GPU can show: graphs, streams, repeated launches, both kernel classes on large and odd shapes."""

import pytest
import torch

import fretwork as fw

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
BLOCKS = [16, 32, 64, 128]


def operands(block, free=520, heads=2, density=0.4, dtype=torch.float16):
    mask = torch.rand(heads, 6, 5) < density
    mask[0, 1] = False
    layout = fw.BlockLayout(mask, block)
    _, m, n = layout.shape
    values = torch.randn(2, layout.nnz, block, block).to("cuda", dtype)
    b = torch.randn(2, heads, n, free).to("cuda", dtype)
    a = torch.randn(2, heads, free, m).to("cuda", dtype)
    return layout, values, a, b


def every_op(layout, values, a, b):
    left, right = a.mT.contiguous(), b.mT.contiguous()  # (m, free) and (free, n)
    return [
        lambda: fw.dsd(values, b, layout),
        lambda: fw.dds(a, values, layout),
        lambda: fw.sdd(left, right, layout),
        lambda: fw.block_softmax(values, layout, scale=0.3),
    ]


@pytest.mark.parametrize("block", BLOCKS)
def test_graph_capture_replays_on_new_data(block):
    layout, values, a, b = operands(block)
    calls = every_op(layout, values, a, b)
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [call() for call in calls]
    for t in (values, a, b):
        t.copy_(torch.randn_like(t))
    graph.replay()
    torch.cuda.synchronize()
    for out, call in zip(outs, calls, strict=True):
        assert torch.equal(out, call())


def test_first_call_may_be_inside_a_capture():
    """A plan made while a graph is captured uploads on its own stream and lives as long as the graph may."""
    layout, values, _, b = operands(32, free=136, density=0.37)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fw.dsd(values, b, layout)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, fw.dsd(values, b, layout))


@pytest.mark.parametrize("block", BLOCKS)
def test_a_thousand_launches_agree_bit_for_bit(block):
    layout, values, a, b = operands(block, free=264)
    for call in every_op(layout, values, a, b):
        first = call()
        differing = sum((call() != first).any() for _ in range(1000))
        assert int(differing) == 0


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_large_shapes(block, dtype):
    """Many tiles per CTA, uneven rows, tails: against torch in float32."""
    n, free = 2048, 1000
    mask = torch.rand(1, n // block, n // block) < torch.linspace(0, 0.6, n // block)[:, None]
    mask[0, 3] = True  # one long row
    layout = fw.BlockLayout(mask, block)
    values = torch.randn(layout.nnz, block, block).to("cuda", dtype)
    dense = layout.unpack(values).float().reshape(n, n)
    b = torch.randn(n, free).to("cuda", dtype)
    tolerance = 4e-3 if dtype is torch.float16 else 3e-2

    def close(got, want):
        return ((got.float() - want).abs().max() / want.abs().max()).item() < tolerance

    assert close(fw.dsd(values, b, layout), dense @ b.float())
    assert close(fw.dsd(values, b, layout, trans_a=True), dense.T @ b.float())
    assert close(fw.dsd(values, b.T.contiguous(), layout, trans_b=True), dense @ b.float())
    assert close(fw.dds(b.T.contiguous(), values, layout), b.T.float() @ dense)
    assert close(fw.dds(b, values, layout, trans_a=True, trans_b=True), b.T.float() @ dense.T)
    x, y = torch.randn(n, free).to("cuda", dtype), torch.randn(free, n).to("cuda", dtype)
    assert close(fw.sdd(x, y, layout), layout.pack(x.float() @ y.float()))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
def test_sdd_of_many_lines_with_few_blocks(block, trans_a, trans_b):
    """More lines than multiprocessors: on Hopper the ends of two lines share a tile, which changes no bit."""
    m, n, k = 300 * max(block, 64), 7 * block, 136
    torch.manual_seed(block)
    mask = torch.rand(2, m // block, n // block) < 0.25 * min(block, 64) / 64
    layout = fw.BlockLayout(mask, block)
    a, b = torch.randn(2, m, k).to("cuda", torch.float16), torch.randn(2, k, n).to("cuda", torch.float16)
    a[0, :64], b[:, :, : block // 2] = a[0, :64] * 100, b[:, :, : block // 2] / 50
    turned = (a.mT.contiguous() if trans_a else a, b.mT.contiguous() if trans_b else b)
    got = fw.sdd(*turned, layout, trans_a, trans_b)
    want = layout.pack(a.float() @ b.float())
    assert ((got.float() - want).abs().max() / want.abs().max()).item() < 4e-3
    mask[:, 64 // min(block, 64) :] = False  # few lines, none of which needs to share
    few = fw.BlockLayout(mask, block)
    kept = layout.unpack(got).reshape(2, m, n)
    assert torch.equal(few.pack(kept), fw.sdd(*turned, few, trans_a, trans_b).reshape(few.nnz, block, block))


def test_side_stream():
    layout, values, _, b = operands(64)
    want = fw.dsd(values, b, layout)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = fw.dsd(values, b, layout)
    stream.synchronize()
    assert torch.equal(got, want)


@pytest.mark.parametrize("precision, tolerance", [("ieee", 1e-6), ("tf32", 2e-3), ("tf32x3", 2e-5)])
@pytest.mark.parametrize("block", BLOCKS)
def test_float32_precisions(block, precision, tolerance):
    layout, values, _, b = operands(block, free=72, dtype=torch.float32)
    want = layout.unpack(values).double() @ b.double()
    got = fw.dsd(values, b, layout, precision=precision)
    assert ((got.double() - want).abs().max() / want.abs().max()).item() < tolerance
