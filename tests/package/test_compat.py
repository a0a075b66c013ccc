"""torch-blocksparse's and DeepSpeed's names against dense formulas and the definitions of their layouts."""

import copy
import importlib
import math
import pickle
import random
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, dense_of, dtypes_of, packed_of

import fretwork.compat.deepspeed as ds
import fretwork.compat.torch_blocksparse as tbs

DENSE = tbs.SparsityInfo("dense", 16)
LAYOUT = torch.tensor([[[1, 0, 1], [0, 1, 0], [1, 1, 1]], [[1, 1, 0], [1, 1, 0], [0, 0, 1]]])


@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("mode", ["sdd", "dsd", "dds"])
def test_products(mode, trans_a, trans_b, device):
    product = tbs.SparseMatMul(LAYOUT, 16, mode, trans_a=trans_a, trans_b=trans_b)
    a, b = torch.randn(2, 2, 48, 48, device=device), torch.randn(2, 2, 48, 48, device=device)
    layout = product.block_layout
    got = product(packed_of(a, layout) if mode == "dsd" else a, packed_of(b, layout) if mode == "dds" else b)
    x = (a * layout.mask(device) if mode == "dsd" else a).double()
    y = (b * layout.mask(device) if mode == "dds" else b).double()
    want = (x.mT if trans_a else x) @ (y.mT if trans_b else y)
    assert_close(got, packed_of(want, layout) if mode == "sdd" else want, torch.float32)


def some_values(device, heads=LAYOUT):
    return torch.randn(2, int(heads.sum()), 16, 16, device=device)


def softmax_of(x, layout, hidden=False):
    dense = dense_of(x.double(), layout) * 0.5
    return packed_of(dense.masked_fill(~layout.mask(x.device) | hidden, -torch.inf).softmax(-1).nan_to_num(0.0), layout)


def test_softmax_is_in_place_and_takes_integer_masks(device):
    softmax = tbs.Softmax(LAYOUT, 16)
    x, mask = some_values(device), torch.randint(0, 2, (48, 48), device=device)
    want = softmax_of(x, softmax.block_layout, mask == 0)
    assert_close(softmax.apart(x, scale=0.5, attn_mask=mask, attn_mask_mode="mul"), want, torch.float32)
    got = softmax(x, scale=0.5, attn_mask=mask, attn_mask_mode="mul")
    assert got is x
    assert_close(x, want, torch.float32)
    far = torch.full((48, 48), -(10**9), device=device)  # added to all of a row it hides nothing, in 16 bits either
    for dtype in dtypes_of(device):
        assert_close(
            softmax.apart(x.to(dtype) * 0, attn_mask=far), softmax_of(x.to(dtype) * 0, softmax.block_layout), dtype
        )


def test_softmax_in_place_with_gradients(device):
    """x.grad is that of what x was; what uses x afterwards has the gradient of the softmax."""
    softmax, leaf = tbs.Softmax(LAYOUT, 16), some_values(device).requires_grad_()
    upstream, exact = torch.randn_like(leaf), leaf.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(softmax_of(exact, softmax.block_layout), exact, upstream.double())
    x = leaf * 1.0
    x.retain_grad()
    softmax(x, scale=0.5)
    x.backward(upstream)
    assert_close(x.grad, want, torch.float32)
    assert_close(leaf.grad, want, torch.float32)


def test_softmax_writes_only_what_can_be_written(device):
    softmax, leaf = tbs.Softmax(LAYOUT, 16), some_values(device).requires_grad_()
    before = leaf.detach().clone()
    for x in (leaf, leaf[:], before[:1].expand(3, -1, -1, -1)):
        kept = x.detach().clone()
        assert softmax(x, scale=0.5) is not x and torch.equal(x, kept)
    saved = leaf.exp()  # which keeps its result for the backward pass: torch refuses, nothing is silently wrong
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        softmax(saved).sum().backward()


@pytest.mark.parametrize("bench", [False, True])
def test_added_dimensions_and_times(bench, device):
    a, b = torch.randn(48, 20, device=device), torch.randn(20, 48, device=device)
    dot = tbs.MatMul(LAYOUT[:1], 16, "sdd", bench=bench)
    assert dot(a, b).shape == (1, 6, 16, 16) and dot(a[None], b[None]).shape == (1, 6, 16, 16)
    back = tbs.MatMul(LAYOUT[:1], 16, "dsd", bench=bench)
    assert back(dot(a, b)[0], b.mT).shape == (1, 1, 48, 20)
    softmax = tbs.Softmax(LAYOUT[:1], 16, bench=bench)
    softmax(dot(a, b))
    for time in (dot.time_c, back.time_c, softmax.time_y):
        assert time > 0 if bench else time is None
    assert ds.matmul.MatMul(LAYOUT[0], 16, "sdd")(a, b).shape == (6, 16, 16)


def test_linear(device):
    layer = tbs.Linear(48, 32, 16, torch.tensor([[[1, 0], [1, 1], [0, 1]]])).to(device)
    x = torch.randn(2, 5, 48, device=device)
    want = x.double() @ dense_of(layer.weight.detach().double(), layer.matmul.block_layout)[0, 0]
    assert_close(layer(x), want, torch.float32)
    with pytest.raises(ValueError, match="Linear: layout: expected"):
        tbs.Linear(32, 48, 16, torch.tensor([[[1, 0], [1, 1], [0, 1]]]))


def dense_attention(mha, inputs, seen, added=0.0):
    """(L, B, E) in float64 with the weights of `mha`."""
    weights = {name: p.detach().cpu().double() for name, p in mha.named_parameters()}
    bias = weights.get("in_proj_bias", torch.zeros(3 * mha.embed_dim).double()).chunk(3)
    size, apart = mha.embed_dim // mha.num_heads, "q_proj_weight" in weights
    projections = [weights[f"{n}_proj_weight"] for n in "qkv"] if apart else weights["in_proj_weight"].chunk(3)
    q, k, v = (
        F.linear(x.detach().cpu().double(), w, b).unflatten(-1, (-1, size)).permute(1, 2, 0, 3)
        for x, w, b in zip(inputs, projections, bias, strict=True)
    )
    scores = (q @ k.mT / math.sqrt(size) + added).masked_fill(~seen, -torch.inf)
    out = scores.softmax(-1).nan_to_num(0.0) @ v
    return F.linear(out.permute(2, 0, 1, 3).flatten(2), weights["out_proj.weight"], weights.get("out_proj.bias"))


def spread(mask, block=16):
    return mask.bool().repeat_interleave(block, -2).repeat_interleave(block, -1)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 24, "vdim": 40}, {"batch_first": True}], ids=str)
def test_attention(options, device):
    mha = tbs.MultiheadAttention(32, 2, LAYOUT, 16, **options).to(device)
    assert isinstance(mha, torch.nn.MultiheadAttention)
    sizes = 32, options.get("kdim", 32), options.get("vdim", 32)
    inputs = [torch.randn(48, 3, e, device=device) for e in sizes]
    padding, shown = torch.randn(3, 48), torch.rand(48, 48) < 0.7
    turn = (lambda x: x.transpose(0, 1)) if mha.batch_first else (lambda x: x)
    out, none = mha(*map(turn, inputs), padding.to(device), attn_mask=shown.float().to(device))
    assert none is None
    want = dense_attention(mha, inputs, spread(LAYOUT) & shown, padding.double()[:, None, None])
    assert_close(turn(out), want, torch.float32)
    out, _ = mha(*map(turn, inputs), is_causal=True)
    assert_close(
        turn(out), dense_attention(mha, inputs, (spread(LAYOUT) & torch.ones(48, 48).tril().bool())), torch.float32
    )


def test_attention_by_info_in_torchs_layers(device):
    """Every length, masks as torch's layers send them, in eval mode too."""
    info = tbs.SparsityInfo("fixed", block=16, stride=32, unidirectional=True)
    dense = torch.nn.TransformerEncoderLayer(32, 2, 48, dropout=0.0, batch_first=True, norm_first=True).to(device)
    layer = copy.deepcopy(dense)
    tbs.replace_mha(layer, info)
    assert isinstance(layer.self_attn, tbs.MultiheadAttention)
    for length in (64, 96):
        x = torch.randn(2, length, 32, device=device)
        padding = torch.arange(length, device=device) >= torch.tensor([[length], [40]], device=device)
        row, col = torch.arange(length)[:, None] // 16, torch.arange(length) // 16
        seen = (col <= row) & ((row // 2 == col // 2) | (col % 2 == 1))
        later = torch.rand(length, length) < 0.2
        later.fill_diagonal_(False)
        want = dense(x, src_mask=(~seen | later).to(device), src_key_padding_mask=padding)
        for mode in (torch.enable_grad, torch.no_grad):
            with mode():
                got = layer.eval()(x, src_mask=later.to(device), src_key_padding_mask=padding)
            assert_close(got[~padding], want[~padding].double(), torch.float32)


def test_self_attention_without_projections(device):
    q, k, v = torch.randn(3, 2, 4, 96, 16, device=device)
    rpe, padding = torch.randn(4, 96, 96, device=device), torch.randn(2, 96, device=device)
    for attention in (
        tbs.DeepSpeedSparseSelfAttention(tbs.SparsityConfig(numverts=2)),
        ds.SparseSelfAttention(ds.FixedSparsityConfig(4, attention="unidirectional"), max_seq_length=128),
    ):
        got = attention.to(device)(q, k.mT, v, rpe=rpe, key_padding_mask=padding[:, None, None])
        seen = spread(attention.get_ops(4, 96)[0].layout).to(device)
        scores = (q.double() @ k.double().mT / 4 + rpe + padding[:, None, None]).masked_fill(~seen, -torch.inf)
        assert_close(got, scores.softmax(-1) @ v.double(), torch.float32)


def test_shapes_of_keys_and_masks():
    attention = tbs.DeepSpeedSparseSelfAttention()
    key = torch.randn(2, 3, 8, 32)
    assert torch.equal(attention.transpose_key_for_scores(key, 32), key.mT)
    assert attention.transpose_key_for_scores(key, 8) is key
    mask = torch.ones(2, 1, 1, 32, dtype=torch.bool)
    found = attention.transpose_mask_for_sparse(torch.float16, mask, is_key_padding_mask=True)
    assert found.shape == (2, 32) and found.dtype == torch.float16
    assert attention.transpose_mask_for_sparse(torch.float16, mask[:1, :, :, :1], True).shape == (1,)
    assert attention.transpose_mask_for_sparse(torch.float32, torch.ones(1, 1, 32, 32)).shape == (32, 32)
    with pytest.raises(RuntimeError, match=r"key: expected \(2, 4, 16, 64\) like the query, got \(2, 4, 63, 16\)"):
        attention(torch.zeros(2, 4, 16, 64), torch.zeros(2, 4, 63, 16), torch.zeros(2, 4, 16, 64))


@pytest.mark.parametrize("order", ["NHWC", "CHWN"])
@pytest.mark.parametrize("fused, bias", [(False, False), (True, True)])
def test_conv(order, fused, bias, device):
    mask = torch.rand(3, 2, 3, 2) < 0.5
    conv = tbs.Conv2d(32, 48, (3, 2), mask.long(), 16, (1, 0), (1, 2), order, bias).to(device)
    x = torch.randn(4, 32, 7, 8, device=device).requires_grad_()
    extra = [torch.randn(1, device=device).requires_grad_() for _ in range(2 * fused)]
    places = mask.permute(0, 2, 3, 1).nonzero(as_tuple=True)

    def reference(x, weight, *extra):
        blocks = weight.new_zeros(3, 3, 2, 2, 16, 16).index_put(places, weight)
        x = F.relu(x + extra[0]) + extra[1] if extra else x
        dense = blocks.permute(0, 4, 3, 5, 1, 2).reshape(48, 32, 3, 2)
        return F.conv2d(x, dense, conv.bias.detach().cpu().double() if bias else None, (1, 2), (1, 0))

    got = conv(x, *extra)
    wide = [t.detach().cpu().double().requires_grad_() for t in (x, conv.weight, *extra)]
    want = reference(*wide)
    assert_close(got, want, torch.float32)
    assert got.stride(0 if order == "CHWN" else 1) == 1
    upstream = torch.rand(want.shape)
    arrived = torch.autograd.grad(got, (x, conv.weight, *extra), upstream.to(device))
    expected = torch.autograd.grad(want, wide, upstream.double())
    terms = expected[0].abs().sum().item()  # those of a scalar's gradient are x's, and may nearly cancel
    for g, w in zip(arrived, expected, strict=True):
        assert_close(g, w, torch.float32, floor=terms / 100 if w.numel() == 1 else 1e-3)


def test_conv_of_another_layout():
    """A checkpoint brings its layout; blocks that two layouts share can be kept."""
    masks = torch.zeros(2, 2, 2, 1, 1).long()
    masks[0, 0, 0], masks[0, 1, 1], masks[1, 1, 1], masks[1, 0, 1] = 1, 1, 1, 1
    one, other = (tbs.Conv2d(16, 16, (1, 1), mask, 8) for mask in masks)
    x = torch.randn(2, 16, 3, 3)
    other.load_state_dict(one.state_dict())
    assert torch.equal(other(x), one(x)) and torch.equal(other.layout, masks[0])
    values = tbs.Conv2d.update_layout(masks[0], one.weight.detach(), masks[1], 7.0)
    assert torch.equal(values, torch.stack([torch.full((8, 8), 7.0), one.weight.detach()[1]]))


def test_batchnorm_and_permute(device):
    ours, theirs = tbs.BatchNorm2d(6, momentum=0.3).to(device), torch.nn.BatchNorm2d(6, momentum=0.3).double()
    turned = tbs.Permute("NCHW", "CHWN")(torch.randn(5, 6, 4, 3, device=device) + 1)
    assert turned.stride() == tuple(tbs._permute.strides(5, 6, 4, 3, "CHWN")) == (1, 60, 15, 5)
    for x in (turned, tbs.Permute("CHWN", "NCHW")(turned)):
        y = ours(x)
        assert_close(y, theirs(x.cpu().double()), torch.float32)
        assert y.stride() == x.stride()
    for name, value in theirs.named_buffers():
        if value.is_floating_point():
            assert_close(ours.get_buffer(name), value, torch.float32)


@pytest.fixture
def aliases():
    """Removes the names that a test adds to the imported modules."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if not name.startswith("fretwork"):
            del sys.modules[name]


def test_alias(aliases):
    """The names of the original, as modules."""
    tbs.install()
    tbs.install()
    import torch_blocksparse
    from torch_blocksparse.attention import make_layout, multi_head_attention_forward, replace_mha
    from torch_blocksparse.softmax import Softmax

    assert torch_blocksparse is tbs and torch_blocksparse.softmax.Softmax is Softmax is tbs.Softmax
    assert tbs.MultiheadAttention._make_layout is make_layout and tbs.replace_mha is replace_mha
    assert callable(multi_head_attention_forward)
    sys.modules["another"] = types.ModuleType("another")
    with pytest.raises(ImportError, match="install: another: expected not to be imported yet, got"):
        tbs.install("another")


def test_alias_of_deepspeed(aliases):
    with pytest.raises(ImportError):
        ds.install("a_package_that_is_not_there.ops.sparse_attention")
    sys.modules |= {name: types.ModuleType(name) for name in ("some_deepspeed", "some_deepspeed.ops")}
    ds.install("some_deepspeed.ops.sparse_attention")
    from some_deepspeed.ops.sparse_attention import FixedSparsityConfig
    from some_deepspeed.ops.sparse_attention.matmul import MatMul

    assert FixedSparsityConfig is ds.FixedSparsityConfig and MatMul is ds.matmul.MatMul


@pytest.mark.parametrize("name", ["attention", "batchnorm", "conv", "matmul", "permute", "relu", "softmax"])
def test_every_submodule_is_importable(name):
    assert importlib.import_module(f"fretwork.compat.torch_blocksparse.{name}")


def test_modules_are_copied_and_pickled(device):
    x = torch.randn(48, 2, 32, device=device)
    mha = tbs.MultiheadAttention(32, 2, LAYOUT, 16).to(device)
    linear = tbs.Linear(48, 32, 16, torch.tensor([[[1, 0], [1, 1], [0, 1]]])).to(device)
    for twin in (copy.deepcopy(mha), pickle.loads(pickle.dumps(mha))):
        assert torch.equal(twin(x, x, x)[0], mha(x, x, x)[0])
    with pytest.raises(RuntimeError, match=r"Linear: state_dict: expected weights of .+, got those of"):
        tbs.Linear(48, 32, 16, torch.tensor([[[0, 1], [1, 1], [1, 0]]])).load_state_dict(linear.state_dict())


@pytest.mark.parametrize("blocks", [8, 7])
@pytest.mark.parametrize("numverts, vertsize", [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("one_way", [True, False])
def test_fixed_layouts(blocks, numverts, vertsize, one_way):
    attention = "unidirectional" if one_way else "bidirectional"
    config = tbs.SparsityConfig("fixed", 16, 64, attention, numverts, vertsize)
    info = tbs.SparsityInfo("fixed", 16, 64, one_way, numverts, vertsize)
    mask = config.make_layout(3, blocks)
    assert torch.equal(mask, info.make_layout(3, blocks)) and mask.dtype == torch.int64
    for head, row, col in torch.cartesian_prod(torch.arange(3), torch.arange(blocks), torch.arange(blocks)).tolist():
        from_end = (3 - col % 4) // vertsize  # which group of its stride a column belongs to
        allowed = (row // 4 == col // 4 or from_end == head % numverts) and (col <= row or not one_way)
        assert mask[head, row, col] == allowed
    assert tbs.SparsityInfo("dense", 16).make_layout(1, 3).all()


# DeepSpeed's configurations


def each(heads, blocks, allowed):
    """The layout of a rule (head, row, col) → bool."""
    places = torch.cartesian_prod(torch.arange(heads), torch.arange(blocks), torch.arange(blocks)).tolist()
    return torch.tensor([int(allowed(*place)) for place in places]).view(heads, blocks, blocks)


BOTH = pytest.mark.parametrize("one_way", [True, False])


def direction(one_way):
    return "unidirectional" if one_way else "bidirectional"


@BOTH
@pytest.mark.parametrize("local, size, groups", [(4, 1, 1), (4, 2, 2), (3, 1, 3)])
@pytest.mark.parametrize("blocks", [12, 14])
def test_fixed_configuration(local, size, groups, blocks, one_way):
    horizontal = not one_way
    config = ds.FixedSparsityConfig(5, 16, True, local, size, direction(one_way), horizontal, groups)

    def is_global(head, block):
        begin = block // local * local
        start = begin + local - (1 + head % groups) * size
        if begin + local > blocks:  # a short last window
            start = min(start, blocks - size)
        return start <= block < start + size or (blocks % local and is_moved(head, block))

    def is_moved(head, block):
        """The last window's group, which may lie before the window."""
        begin = blocks // local * local
        start = min(begin + local - (1 + head % groups) * size, blocks - size)
        return start <= block < start + size

    def allowed(head, row, col):
        seen = row // local == col // local or is_global(head, col) or (horizontal and is_global(head, row))
        return seen and (col <= row or not one_way)

    assert torch.equal(config.make_layout(16 * blocks), each(5, blocks, allowed))
    shared = ds.FixedSparsityConfig(5, 16, False, local, size, direction(one_way), horizontal).make_layout(16 * blocks)
    assert all(torch.equal(shared[h], shared[0]) for h in range(5))


@BOTH
@pytest.mark.parametrize("ends", [None, [2, 7]])
def test_variable_configuration(ends, one_way):
    config = ds.VariableSparsityConfig(
        2, 8, local_window_blocks=[1, 3, 2], global_block_indices=[1, 5], global_block_end_indices=ends,
        attention=direction(one_way), horizontal_global_attention=not one_way,
    )  # fmt: skip
    window = [0, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5]
    chosen = {1, 5} if ends is None else {1, 5, 6}

    def allowed(head, row, col):
        seen = window[row] == window[col] or col in chosen or (not one_way and row in chosen)
        return seen and (col <= row or not one_way)

    assert torch.equal(config.make_layout(88), each(2, 11, allowed))


@BOTH
@pytest.mark.parametrize("window", [1, 3, 4])
def test_sliding_configurations(window, one_way):
    local = ds.LocalSlidingWindowSparsityConfig(2, 16, window, direction(one_way)).make_layout(144)
    near = each(2, 9, lambda head, row, col: abs(row - col) <= window // 2 and (col <= row or not one_way))
    assert torch.equal(local, near)
    long = ds.BSLongformerSparsityConfig(2, 16, False, window, [0, 4, 99], None, direction(one_way)).make_layout(144)
    lines = each(2, 9, lambda head, row, col: (row in (0, 4) or col in (0, 4)) and (col <= row or not one_way))
    assert torch.equal(long, near | lines)
    ranges = ds.BSLongformerSparsityConfig(2, 16, False, window, [0, 4], [1, 5], direction(one_way)).make_layout(144)
    assert torch.equal(ranges, long)


@BOTH
@pytest.mark.parametrize("count", [0, 2])
def test_random_blocks(count, one_way):
    """Python's generator decides, row by row; nothing of the future is drawn or kept."""
    random.seed(11)
    layout = ds.BigBirdSparsityConfig(3, 16, True, count, 3, 2, direction(one_way)).make_layout(160)
    random.seed(11)
    reach = [row + 1 if one_way else 10 for row in range(10)]
    drawn = [[set(random.sample(range(n), min(count, n))) for n in reach] for _ in range(3)]

    def allowed(head, row, col):
        seen = abs(row - col) <= 1 or min(row, col) < 2 or col in drawn[head][row]
        return seen and (col <= row or not one_way)

    assert torch.equal(layout, each(3, 10, allowed))
    random.seed(11)
    layout = ds.VariableSparsityConfig(1, 16, False, count, [1], [0], attention=direction(one_way)).make_layout(160)
    assert not one_way or not layout.triu(1).any()
    assert (layout.sum(-1) >= 1).all() and layout.sum() <= 10 * (2 + count)


def test_dense_configuration():
    assert torch.equal(ds.DenseSparsityConfig(3, 8).make_layout(40), torch.ones(3, 5, 5).long())


@pytest.mark.parametrize(
    "make, error",
    [
        (lambda: tbs.MatMul(LAYOUT, 16, "ddd"), ValueError),
        (lambda: tbs.Conv2d(8, 8, (3, 3), LAYOUT, 8), ValueError),
        (lambda: tbs.Conv2d(12, 8, (3, 3), LAYOUT, 8), ValueError),
        (lambda: tbs.Conv2d(8, 8, (3, 3), LAYOUT, 8, order="NCHW"), ValueError),
        (lambda: tbs.Permute("NCHW", "NHWC"), ValueError),
        (lambda: tbs.SparsityInfo().make_layout(1, 2), ValueError),
        (lambda: tbs.SparsityInfo("random", 16).make_layout(1, 2), NotImplementedError),
        (lambda: tbs.SparsityInfo("fixed", 16, 40).make_layout(1, 2), ValueError),
        (lambda: tbs.MultiheadAttention(32, 4, LAYOUT, 16), ValueError),  # of two heads
        (
            lambda: tbs.MultiheadAttention(32, 2, tbs.SparsityInfo("dense", 16))(*[torch.zeros(40, 1, 32)] * 3),
            RuntimeError,
        ),
        (lambda: tbs.DeepSpeedSparseSelfAttention()(*[torch.zeros(1, 2, 40, 8)] * 3), RuntimeError),
        (lambda: ds.SparseSelfAttention(max_seq_length=64)(*[torch.zeros(1, 4, 128, 8)] * 3), RuntimeError),
        (lambda: ds.SparseSelfAttention(max_seq_length=64)(*[torch.zeros(1, 2, 64, 8)] * 3), RuntimeError),
        (lambda: ds.SparsityConfig(4).make_layout(64), NotImplementedError),
        (lambda: ds.FixedSparsityConfig(4).make_layout(60), ValueError),
        (lambda: ds.FixedSparsityConfig(4, num_local_blocks=4, num_global_blocks=3), ValueError),
        (lambda: ds.FixedSparsityConfig(4, num_different_global_patterns=2), ValueError),
        (lambda: ds.FixedSparsityConfig(4, attention="unidirectional", horizontal_global_attention=True), ValueError),
        (lambda: ds.VariableSparsityConfig(4, global_block_indices=[2], global_block_end_indices=[2]), ValueError),
        (lambda: ds.VariableSparsityConfig(4, local_window_blocks=[]), ValueError),
        (lambda: ds.VariableSparsityConfig(4, num_random_blocks=9).make_layout(64), ValueError),
        (lambda: ds.BigBirdSparsityConfig(4, attention="both"), ValueError),
        (lambda: ds.LocalSlidingWindowSparsityConfig(4, num_sliding_window_blocks=9).make_layout(64), ValueError),
        (lambda: tbs.SparsityConfig("random"), NotImplementedError),
        (lambda: tbs.SparsityConfig(stride=40), ValueError),
        (lambda: tbs.SparsityConfig(numverts=9), ValueError),
        (lambda: tbs.SparsityConfig(attention="x"), ValueError),
        (lambda: tbs.MultiheadAttention(30, 4, LAYOUT, 16), ValueError),
        (lambda: tbs.MultiheadAttention(32, 4, LAYOUT, 16, add_bias_kv=True), NotImplementedError),
        (lambda: tbs.MultiheadAttention(32, 2, LAYOUT), TypeError),
        (lambda: tbs.MultiheadAttention(32, 2), TypeError),
        (lambda: tbs.Conv2d(8, 8, 3, LAYOUT, 8), TypeError),
        (lambda: ds.FixedSparsityConfig(4, block=0), ValueError),
        (lambda: ds.SparseSelfAttention(3), TypeError),
    ],
)
def test_refused(make, error):
    with pytest.raises(error, match=r"\w+: .+: expected .+, got .+"):
        make()
