"""torch-blocksparse's names against dense formulas."""

import pytest
import torch
from conftest import assert_close, dense_of, packed_of

import fretwork.compat.torch_blocksparse as tbs

LAYOUT = torch.tensor([[[1, 0, 1], [0, 1, 0], [1, 1, 1]], [[1, 1, 0], [1, 1, 0], [0, 0, 1]]])


@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("mode", ["sdd", "dsd", "dds"])
def test_products(mode, trans_a, trans_b, device):
    product = tbs.SparseMatMul(LAYOUT, 16, mode, trans_a=trans_a, trans_b=trans_b)
    a, b = torch.randn(2, 2, 48, 48, device=device), torch.randn(2, 2, 48, 48, device=device)
    layout = product.layout
    got = product(packed_of(a, layout) if mode == "dsd" else a, packed_of(b, layout) if mode == "dds" else b)
    x = (a * layout.mask(device) if mode == "dsd" else a).double()
    y = (b * layout.mask(device) if mode == "dds" else b).double()
    want = (x.mT if trans_a else x) @ (y.mT if trans_b else y)
    assert_close(got, packed_of(want, layout) if mode == "sdd" else want, torch.float32)


def test_softmax_leaves_its_input_and_takes_integer_masks(device):
    softmax = tbs.Softmax(LAYOUT, 16)
    x = torch.randn(2, int(LAYOUT.sum()), 16, 16, device=device)
    before, mask = x.clone(), torch.randint(0, 2, (48, 48), device=device)
    got = softmax(x, scale=0.5, attn_mask=mask, attn_mask_mode="mul")
    assert torch.equal(x, before)
    gone = ~(softmax.layout.mask(device) & (mask != 0))
    dense = (dense_of(x.double(), softmax.layout) * 0.5).masked_fill(gone, -torch.inf)
    assert_close(got, packed_of(dense.softmax(-1).nan_to_num(0.0), softmax.layout), torch.float32)


def test_linear(device):
    layer = tbs.Linear(48, 32, 16, torch.tensor([[[1, 0], [1, 1], [0, 1]]])).to(device)
    x = torch.randn(2, 5, 48, device=device)
    want = x.double() @ dense_of(layer.weight.detach().double(), layer.layout)[0, 0]
    assert_close(layer(x), want, torch.float32)
    with pytest.raises(ValueError, match="Linear: layout: expected"):
        tbs.Linear(32, 48, 16, torch.tensor([[[1, 0], [1, 1], [0, 1]]]))


def test_attention_with_a_full_layout_is_torch_attention(device):
    ours = tbs.MultiheadAttention(32, 4, torch.ones(4, 3, 3, dtype=torch.int64), 16).to(device)
    theirs = torch.nn.MultiheadAttention(32, 4).to(device)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([p.weight for p in (ours.q_proj, ours.k_proj, ours.v_proj)]))
        theirs.in_proj_bias.copy_(torch.cat([p.bias for p in (ours.q_proj, ours.k_proj, ours.v_proj)]))
        theirs.out_proj.load_state_dict(ours.out_proj.state_dict())
    q, k, v = (torch.randn(48, 3, 32, device=device) for _ in range(3))
    out, weights = ours(q, k, v)
    assert weights is None
    assert_close(out, theirs(q, k, v, need_weights=False)[0].double(), torch.float32)
    shared, _ = ours(q, k[:, :1], v[:, :1])
    assert_close(shared, ours(q, k[:, :1].expand_as(k), v[:, :1].expand_as(v))[0].double(), torch.float32)
    with pytest.raises(RuntimeError, match=r"sdd: b: expected \(…, 48, 8\), got \(1, 4, 144, 8\)"):
        ours(q, k.reshape(144, 1, 32), v)


def test_fixed_layouts():
    mask = tbs.SparsityConfig("fixed", 16, 64, "unidirectional", numverts=2).make_layout(2, 8)
    for head, row, col in torch.cartesian_prod(torch.arange(2), torch.arange(8), torch.arange(8)).tolist():
        allowed = col <= row and (row // 4 == col // 4 or col % 4 == 3 - head)
        assert mask[head, row, col] == allowed
    assert tbs.SparsityInfo("dense").make_layout(1, 3).all()
    assert torch.equal(
        tbs.SparsityConfig(attention="bidirectional").make_layout(1, 8)[0].tril(),
        tbs.SparsityConfig().make_layout(1, 8)[0],
    )


@pytest.mark.parametrize(
    "make, error",
    [
        (lambda: tbs.MatMul(LAYOUT, 16, "ddd"), ValueError),
        (lambda: tbs.Conv2d(8, 8, 3, LAYOUT, 8), NotImplementedError),
        (lambda: tbs.SparsityConfig("random"), NotImplementedError),
        (lambda: tbs.SparsityConfig(stride=40), ValueError),
        (lambda: tbs.SparsityConfig(numverts=9), ValueError),
        (lambda: tbs.SparsityConfig(attention="x"), ValueError),
        (lambda: tbs.MultiheadAttention(30, 4, LAYOUT, 16), ValueError),
        (lambda: tbs.MultiheadAttention(32, 4, LAYOUT, 16, add_bias_kv=True), NotImplementedError),
    ],
)
def test_refused(make, error):
    with pytest.raises(error, match=r"\w+: .+: expected .+, got .+"):
        make()
