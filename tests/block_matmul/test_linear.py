"""BlockSparseLinear beside torch.nn.Linear: values, gradients, initial weights, state, errors."""

import copy
import pickle

import pytest
import torch
from conftest import assert_close, dtypes_of, some_layout

import fretwork as fw


def pair(device, dtype=torch.float32, bias=True):
    layout = some_layout(1, 4, 3, (16, 32))
    dense = torch.nn.Linear(96, 64, bias=bias).to(device, dtype)
    layer = fw.nn.BlockSparseLinear.from_dense(dense, layout)
    with torch.no_grad():
        dense.weight.mul_(layout.mask(device)[0])
    return dense, layer


@pytest.mark.parametrize("lead", [(), (1,), (7,), (3, 5), (0,), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_as_the_dense_layer(bias, lead, device):
    for dtype in dtypes_of(device):
        dense, layer = pair(device, dtype, bias)
        x = torch.randn(*lead, 96, dtype=dtype, device=device, requires_grad=True)
        exact = copy.deepcopy(dense).cpu().double()
        x64 = x.detach().cpu().double().requires_grad_()
        got, want = layer(x), exact(x64)
        assert_close(got, want, dtype)
        assert_close(layer.to_dense(), exact.weight, dtype)
        upstream = torch.randn(want.shape).to(dtype)
        got.backward(upstream.to(device))
        want.backward(upstream.double())
        assert_close(x.grad, x64.grad, dtype, "gradient of x")
        stored = exact.weight.grad * layer.layout.mask()[0]
        assert_close(layer.layout.unpack(layer.weight.grad)[0], stored, dtype, "gradient of weight")
        if bias:
            assert_close(layer.bias.grad, exact.bias.grad, dtype, "gradient of bias")


def test_strided_inputs_are_not_copied(device):
    _, layer = pair(device)
    x = torch.randn(96, 10, device=device).T  # columns first: reshaping it would not be free
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.data_ptr()) or t, lambda t: t):
        y = layer(x)
    assert x.data_ptr() in seen
    assert_close(y, layer(x.contiguous()).double(), torch.float32)


def test_initial_weights_follow_the_stored_fan_in():
    layout = fw.BlockLayout(torch.rand(64, 64) < 0.25, 16)
    layer = fw.nn.BlockSparseLinear(1024, 1024, layout)
    bound = (1024 * layout.density) ** -0.5
    assert layer.weight.abs().max() <= bound and layer.weight.abs().max() > 0.99 * bound
    assert layer.weight.mean().abs() < 0.01 * bound and layer.bias.abs().max() <= bound
    empty = fw.nn.BlockSparseLinear(32, 32, fw.BlockLayout(torch.zeros(2, 2).bool(), 16))
    assert torch.equal(empty(torch.randn(3, 32)), torch.zeros(3, 32))


def test_state_copies_and_moves():
    _, layer = pair(torch.device("cpu"))
    assert sorted(layer.state_dict()) == ["bias", "weight"]
    x = torch.randn(5, 96)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.layout == layer.layout and torch.equal(other(x), layer(x))
        with torch.no_grad():
            other.weight.zero_()
        assert not torch.equal(other(x), layer(x))
    assert layer.double()(x.double()).dtype == torch.float64
    assert layer.half().weight.dtype == torch.float16
    meta = fw.nn.BlockSparseLinear(96, 64, layer.layout, device="meta")
    assert meta.weight.is_meta and meta(torch.empty(5, 96, device="meta")).shape == (5, 64)


def test_from_dense_keeps_what_the_dense_layer_was():
    dense = torch.nn.Linear(32, 16).eval()
    dense.weight.requires_grad_(False)
    layer = fw.nn.BlockSparseLinear.from_dense(dense, fw.BlockLayout([[1, 0]], 16))
    assert not layer.training and not layer.weight.requires_grad and layer.bias.requires_grad
    with torch.no_grad():
        layer.bias.add_(1)
    assert not torch.equal(layer.bias, dense.bias)


def test_in_a_compiled_model(device):
    _, layer = pair(device)
    torch._dynamo.reset()
    model = torch.nn.Sequential(layer, torch.nn.ReLU(), torch.nn.Linear(64, 3, device=device))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for rows in (4, 9):  # the second makes the batch symbolic
        x = torch.randn(rows, 96, device=device)
        assert_close(compiled(x), model(x).double(), torch.float32)
    compiled(x).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("args, text", [
    ((48, 32, "layout"), "layout: expected a fretwork.BlockLayout, got str"),
    ((96, 65, some_layout(1, 4, 3, (16, 32))), r"layout: expected one head of .*\(65, 96\), got \(1, 64, 96\)"),
    ((96.0, 64, some_layout(1, 4, 3, (16, 32))), r"in_features: expected an int, got 96\.0"),
    ((96, 64, some_layout(1, 4, 3, (16, 32)), True, None, torch.int32), r"dtype: expected .*, got torch\.int32"),
    ((96, 64, some_layout(1, 4, 3, (16, 32)), torch.zeros(64)), "bias: expected True or False, got Tensor"),
    ((96, 64, some_layout(2, 4, 3, (16, 32))), r"layout: expected one head of .*, got \(2, 64, 96\)")])  # fmt: skip
def test_refused(args, text):
    with pytest.raises((TypeError, ValueError), match=f"^BlockSparseLinear: {text}"):
        fw.nn.BlockSparseLinear(*args)


def test_refused_inputs():
    _, layer = pair(torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"^BlockSparseLinear: x: expected \(…, 96\), got \(5, 97\)"):
        layer(torch.ones(5, 97))
    with pytest.raises(RuntimeError, match=r"^BlockSparseLinear: x: expected torch.float32 like .*, got torch.float16"):
        layer(torch.ones(5, 96).half())
    with pytest.raises(RuntimeError, match=r"^BlockSparseLinear: x: expected a tensor on cpu, got one on meta"):
        layer(torch.ones(5, 96, device="meta"))
    with pytest.raises(
        TypeError, match=r"^BlockSparseLinear: x: expected a torch.Tensor, got ndarray; torch.as_tensor makes one of it"
    ):
        layer(torch.ones(5, 96).numpy())


def test_autocast_decides_the_dtype(device):
    layer = fw.nn.BlockSparseLinear(64, 48, some_layout(1, 3, 4), device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert layer(torch.randn(5, 64, device=device)).dtype == torch.bfloat16
