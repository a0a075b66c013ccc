"""torchao's names: what they do to a model, and what they refuse."""

import pytest
import torch
from torch import nn

import fretwork as fw
from fretwork.compat import torchao as ao


def mlp(device, dtype=torch.bfloat16):
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32, bias=False)).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_four(device, dtype):
    model, x = mlp(device, dtype), torch.randn(5, 64, device=device, dtype=dtype)
    ao.apply_fake_sparsity(model)
    want, bias = model(x), model[0].bias
    assert ao.sparsify_(model, ao.semi_sparse_weight()) is model
    assert [type(model[n]) for n in (0, 2)] == [fw.nn.SemiSparseLinear] * 2 and model[0].bias is bias
    torch.testing.assert_close(model(x), want, rtol=0.02, atol=0.02)
    assert not any(p.requires_grad for p in model.parameters())


def test_blocks_lose_nothing(device):
    model, x = mlp(device, torch.float32), torch.randn(5, 64, device=device)
    model[0].weight.data[:64, 32:] = 0
    want = model(x)
    ao.sparsify_(model, ao.block_sparse_weight(32), lambda module, name: name == "0")
    assert type(model[0]) is fw.nn.BlockSparseLinear and model[0].layout.nnz == 6 and type(model[2]) is nn.Linear
    torch.testing.assert_close(model(x), want)


def test_a_layer_by_itself(device):
    linear = nn.Linear(64, 32, device=device, dtype=torch.float16)
    ao.apply_fake_sparsity(linear)
    layer = ao.sparsify_(linear, ao.SemiSparseWeightConfig())
    assert torch.equal(layer.to_dense(), linear.weight)


def test_what_is_refused(device):
    model = mlp(device)
    first = model[0]
    with pytest.raises(
        ValueError, match="sparsify_: 0: weight: expected one that is 2:4 already with prune=None, got more"
    ):
        ao.sparsify_(model, ao.semi_sparse_weight())
    with pytest.raises(TypeError, match="config: expected semi_sparse_weight"):
        ao.sparsify_(model, ao.semi_sparse_weight)
    with pytest.raises(ValueError, match=r"filter_fn: expected True for torch.nn.Linear alone, got True for 1, a ReLU"):
        ao.sparsify_(model, ao.semi_sparse_weight(), lambda module, name: name == "1")
    with pytest.raises(ValueError, match=r"config\['1'\]: expected the name of a torch.nn.Linear, got ReLU"):
        ao.swap_linear_with_semi_sparse_linear(model, {"0": ao.SemiSparseLinear, "1": ao.SemiSparseLinear})
    with pytest.raises(ValueError, match=r"config\['3'\]: .* got none"):
        ao.swap_linear_with_semi_sparse_linear(model, {"3": ao.SemiSparseLinear})
    with pytest.raises(TypeError, match="arguments: expected filter_fn alone, got sparsity"):
        ao.apply_fake_sparsity(model, sparsity=0.5)
    with pytest.raises(TypeError, match="filter_fn: expected a function of a module and its name, got '0'"):
        ao.sparsify_(model, ao.semi_sparse_weight(), "0")
    with pytest.raises(TypeError, match="config: expected a dict of names and layer classes, got list"):
        ao.swap_linear_with_semi_sparse_linear(model, ["0"])
    with pytest.raises(TypeError, match=r"config\['0'\]: expected a layer class with from_dense, .* got 'sparse'"):
        ao.swap_linear_with_semi_sparse_linear(model, {"0": "sparse"})
    for swap in (ao.swap_semi_sparse_linear_with_linear, lambda m: ao.swap_linear_with_semi_sparse_linear(m, {})):
        with pytest.raises(TypeError, match=r"_linear: model: expected a torch\.nn\.Module, got list"):
            swap([model])
    with pytest.raises(ValueError, match=r"apply_fake_sparsity: 0: weight: .*expected a multiple of 4"):
        ao.apply_fake_sparsity(nn.Sequential(nn.Linear(6, 4)).half())
    assert model[0] is first
    model[0].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="sparsify_: 0: expected a module without hooks"):
        ao.sparsify_(model, ao.block_sparse_weight(32))
    assert model[0] is first


@pytest.mark.parametrize("compiled", [False, True])
def test_training_layers(device, compiled):
    model, x = mlp(device), torch.randn(8, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    dense = model[0]
    ao.swap_linear_with_semi_sparse_linear(model, {"0": ao.SemiSparseLinear})
    assert type(model[0]) is ao.SemiSparseLinear and model[0].weight is dense.weight and model[0].bias is dense.bias
    pruned = fw.two_four.prune(dense.weight.detach(), transposable=True)
    torch.compiler.reset()
    run = torch.compile(model[0], fullgraph=True, backend="aot_eager") if compiled else model[0]
    y = run(x)
    torch.testing.assert_close(y, nn.functional.linear(x, pruned, dense.bias), rtol=0.02, atol=0.05)
    upstream = torch.randn_like(y)
    gradients = torch.autograd.grad(y, (x, dense.weight, dense.bias), upstream)
    want = (upstream @ pruned, upstream.T @ x, upstream.sum(0))
    for got, right in zip(gradients, want, strict=True):
        torch.testing.assert_close(got, right, rtol=0.05, atol=0.2)
    ao.swap_semi_sparse_linear_with_linear(model)
    assert type(model[0]) is nn.Linear and model[0].weight is dense.weight


def test_training_layer_in_an_encoder(device):
    """At inference torch's encoder layer would read its weight."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).to(device).eval()
    dense = layer.linear1
    ao.swap_linear_with_semi_sparse_linear(layer, {"linear1": ao.SemiSparseLinear})
    x = torch.randn(2, 7, 64, device=device)
    with torch.no_grad():
        got = layer(x)
        dense.weight.copy_(fw.two_four.prune(dense.weight, transposable=True))
        layer.linear1 = dense
        torch.testing.assert_close(got, layer(x), rtol=1e-4, atol=1e-4)
