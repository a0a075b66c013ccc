"""Chains as one op: gradients that compute the middle again, torch's transforms, plans, and the pairs a GPU fuses."""

import os

import pytest
import torch
from conftest import assert_close
from test_kronecker import ACTIVATIONS, both_layouts, check_vmap, compare, reference, tensors

import fretwork as fw

PATTERNS = [(6, 4, 5, 1), (1, 8, 3, 8), (2, 3, 8, 4)]  # 30 → 24 → 64 → 24
chain = torch.ops.fretwork.ksmm_chain


@both_layouts
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_twice(activation, bs_last):
    patterns = [(2, 2, 3, 1), (1, 2, 2, 2)]
    inputs = [t.detach().requires_grad_() for t in tensors(patterns, (3,), "cpu", torch.float64, bs_last)]
    function = lambda x, v, w, b: fw.ksmm_chain(x, [v, w], bs_last, b, activation)  # noqa: E731
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (3,), (4,), (0, 4), (1, 3), (2, 4), (0, 1, 2, 3)], ids=str)
def test_only_some_require_grad(which, activation, device):
    inputs = tensors(PATTERNS, (9,), device, grad=False)
    some = [inputs[n].requires_grad_() for n in which]
    wide = [t.detach().cpu().double().requires_grad_(t.requires_grad) for t in inputs]
    got = fw.ksmm_chain(inputs[0], inputs[1:-1], bias=inputs[-1], activation=activation)
    want = reference(*wide[:-1], bias=wide[-1], activation=activation)
    exact = torch.autograd.grad(want.sum(), [wide[n] for n in which])
    for one, other in zip(torch.autograd.grad(got.sum(), some), exact, strict=True):
        assert_close(one, other, torch.float32)


def test_the_middle_is_not_saved(device):
    x, *weights, bias = tensors(PATTERNS, (9,), device)
    seen = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.add(t.data_ptr()) or t, lambda t: t):
        y = fw.ksmm_chain(x, weights, bias=bias)
    assert seen == {t.data_ptr() for t in (x, *weights)}
    y.sum().backward()
    assert all(t.grad is not None for t in (x, *weights, bias))


def arguments(device, bs_last, bias=True, activation="gelu", grad=True):
    x, *weights, b = tensors(PATTERNS, (7,), device, bs_last=bs_last, grad=grad)
    return x, weights, b if bias else None, activation, bs_last, "ieee"


@both_layouts
@pytest.mark.parametrize("bias", [True, False])
def test_opcheck(bias, bs_last, device):
    for activation in ("none", "relu", "silu"):
        torch.library.opcheck(chain.default, arguments(device, bs_last, bias, activation))
    torch.library.opcheck(chain.default, arguments(device, bs_last, bias, grad=False))


@both_layouts
@pytest.mark.parametrize("dims", [(0, None, None, None), (1, 0, None, None), (None, None, 2, 0), (None, 1, 0, None),
                                  (None, None, None, 0), (1, 4, 1, 0)], ids=str)  # fmt: skip
def test_vmap(dims, bs_last, device):
    function = lambda x, v, w, b: fw.ksmm_chain(x, [v, w], bs_last, b, "silu")  # noqa: E731
    check_vmap(function, tensors([(2, 3, 4, 1), (1, 5, 2, 3)], (5,), device, bs_last=bs_last, grad=False), dims)


def test_batched_gradients(device):
    inputs = tensors(PATTERNS, (5,), device)
    y = fw.ksmm_chain(inputs[0], inputs[1:-1], bias=inputs[-1], activation="gelu")
    upstream = torch.randn(4, *y.shape, device=device)
    got = torch.autograd.grad(y, inputs, upstream, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, inputs, u, retain_graph=True) for u in upstream]
    for one, others in zip(got, zip(*each, strict=True), strict=True):
        assert_close(one, torch.stack(others).double(), torch.float32)


def test_autocast_and_inference_mode(device):
    x, *weights, bias = tensors(PATTERNS, (9,), device)
    want = fw.ksmm_chain(x.bfloat16(), [w.bfloat16() for w in weights], bias=bias.bfloat16())
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = fw.ksmm_chain(x, weights, bias=bias)
        assert torch.equal(chain(x, weights, bias, "none", False, "ieee"), y)  # for graphs that hold the op itself
    assert torch.equal(y, want)
    assert all(g.dtype == torch.float32 for g in torch.autograd.grad(y.float().sum(), (x, *weights, bias)))
    with torch.inference_mode():
        y = fw.ksmm_chain(x, weights, bias=bias)
    assert y.is_inference() and torch.equal(y, fw.ksmm_chain(x, weights, bias=bias))


def test_refused_while_tracing():
    with torch.device("meta"):
        x, v, w = torch.empty(3, 30), torch.empty(6, 4, 5, 1), torch.empty(1, 8, 3, 8)
        for bad in [(x, [], None), (x[:, 1:], [v, w], None), (x, [v, v], None), (x, [v, w[0]], None),
                    (x, [v, w], x[0]), (x.half(), [v, w], None), (x[None], [v, w], None)]:  # fmt: skip
            with pytest.raises(RuntimeError, match=r"^ksmm_chain: [\w\[\]]+: expected .+, got .+"):
                chain(*bad, "none", False, "ieee")
    x, v, w = (torch.empty(t.shape) for t in (x, v, w))
    with pytest.raises(RuntimeError, match="ksmm_chain: activation: expected none, relu, gelu or silu, got tanh"):
        chain(x, [v, w], None, "tanh", False, "ieee")
    with pytest.raises(RuntimeError, match=r"ksmm_chain: weights\[1\]: expected 24 in features"):
        chain(x, [v, v], None, "none", False, "ieee")
    with pytest.raises(RuntimeError, match="ksmm_chain: weights: expected at least one, got none"):
        chain(x, [], None, "none", False, "ieee")


# Pairs that are fused where the GPU can: Monarch matrices.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1024, 1024, 32, 32), (2048, 2048, 32, 32), (4096, 4096, 64, 64)], ids=str)
def test_monarchs(shape, dtype, device):
    patterns = fw.kronecker.monarch(*shape)
    assert "fused" in fw.kronecker.plan(patterns, "sm_90a", dtype)
    for batch, activation in ((1, None), (37, "gelu")):
        x, *weights, bias = tensors([p.weight_shape for p in patterns], (batch,), device, dtype)
        function = lambda x, v, w, b: fw.ksmm_chain(x, [v, w], bias=b, activation=activation)  # noqa: E731, B023
        exact = lambda x, v, w, b: reference(x, v, w, bias=b, activation=activation)  # noqa: E731, B023
        compare(function, exact, [x, *weights, bias], dtype)


def test_longer_chains_and_strides(device):
    patterns = [(1, 1024, 8, 1), *(p.weight_shape for p in fw.kronecker.monarch(1024, 1024, 32, 32)), (1, 3, 1024, 1)]
    x, *weights, bias = tensors(patterns, (21,), device, torch.float16)
    for turned in (x, x.T.contiguous().T, torch.cat([x, x], 1)[:, :8]):
        y = fw.ksmm_chain(turned, weights, bias=bias)
        assert_close(y, reference(*(t.cpu().double() for t in (x, *weights)), bias=bias.cpu().double()), torch.float16)


def test_empty_batch(device):
    x, *weights, bias = tensors(PATTERNS, (0,), device)
    y = fw.ksmm_chain(x, weights, bias=bias)
    y.sum().backward()
    assert y.shape == (0, 24) and all(torch.count_nonzero(w.grad) == 0 for w in weights)


# Plans


def test_plan():
    patterns = fw.kronecker.monarch(4096, 4096, 64, 64)
    layer = fw.nn.KSLinear(patterns, dtype=torch.bfloat16, device="meta")
    assert layer.plan("sm_90a") == "0+1: fused, clusters of 8, 16 rows"
    assert layer.plan("sm_80") == "0: cublas\n1: strided"
    assert layer.plan() == "0: cpu\n1: cpu"
    last = fw.nn.KSLinear(patterns, dtype=torch.bfloat16, device="meta", bs_last=True)
    assert last.plan("sm_90a") == "0: cublas\n1: hopper"
    assert fw.nn.KSLinear(patterns, algo="einsum", device="meta").plan("sm_90a") == "0: einsum\n1: einsum"
    with pytest.raises(ValueError, match=r"^plan: arch: expected cpu, a GPU such as cuda:0, or an arch.*, got tpu"):
        layer.plan("tpu")
    with pytest.raises(ValueError, match=r"^plan: arch: expected sm_75 or later, as NVRTC 13 .*, got sm_70"):
        layer.plan("sm_70")
    factor = fw.nn.KSLinear([(1, 64, 64, 4)], dtype=torch.float16, device="meta")
    for dtype, plans in (
        (torch.float16, ["direct", "direct", "portable", "simple"]),
        (torch.bfloat16, ["few", "few", "simple", "simple"]),  # no tensor cores for it
    ):
        one, four = (fw.nn.KSLinear([(1, 64, 64, d)], dtype=dtype, device="meta") for d in (1, 4))
        assert [f.plan("sm_75", n) for n in (16, 4096) for f in (one, four)] == [f"0: {plan}" for plan in plans]
    assert [factor.plan("sm_90a", batch) for batch in (1, 4096)] == ["0: direct", "0: small"]
    assert layer.plan("sm_90a", 32) == "0: direct\n1: direct" and "fused" in layer.plan("sm_90a", 33)
    with pytest.raises(ValueError, match=r"^plan: batch: expected at least 0, got -1"):
        factor.plan("sm_90a", -1)
    with pytest.raises(ValueError, match=r"^plan: dtype: expected float64, .*, got int8"):
        fw.kronecker.plan(patterns, dtype=torch.int8)
    with pytest.raises(TypeError, match=r"^plan: bs_last: expected True or False, got 'no'"):
        fw.kronecker.plan(patterns, bs_last="no")
    with pytest.raises(ValueError, match=r"^plan: patterns\[1\]: expected 12 in features"):
        fw.kronecker.plan([fw.KroneckerPattern(2, 6, 5, 1), fw.KroneckerPattern(1, 2, 3, 1)])


def test_plan_on_this_device(device):
    layer = fw.nn.KSLinear(fw.kronecker.monarch(1024, 1024, 32, 32), dtype=torch.float16, device=device)
    plan = layer.plan()
    arch = os.environ.get("FRETWORK_ARCH") or "sm_90a"
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0) and arch == "sm_90a"
    assert plan == "0+1: fused, 16 rows" if hopper else "fused" not in plan
