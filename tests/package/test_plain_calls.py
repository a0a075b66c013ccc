"""Eager calls that nothing but autograd sees: they make their nodes themselves, and agree with the registered rules."""

import copy
import pickle
from typing import ClassVar

import pytest
import torch
from conftest import assert_close, some_layout
from torch.autograd import forward_ad
from torch.nn.utils import parametrize, prune
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fretwork as fw

CHAIN = [(6, 4, 5, 1), (2, 5, 3, 4), (1, 8, 10, 4)]
LAYERS = ["block", "kronecker", "kronecker, 1 factor", "kronecker, 3 factors", "two_four", "two_four, dense"]
each_layer = pytest.mark.parametrize("name", LAYERS)


def layer_named(name, device, dtype=torch.float32, bias=True):
    kind = {"device": device, "dtype": dtype, "bias": bias}
    if name == "block":
        return fw.nn.BlockSparseLinear(32, 48, some_layout(1, 3, 2), **kind)
    if name.startswith("kronecker"):
        count = {"1": 1, "3": 3}.get(name[11:12], 2)
        return fw.nn.KSLinear(CHAIN[:count], **kind)
    if name == "two_four":
        return fw.nn.SemiSparseLinear(32, 48, **kind)
    return fw.nn.SemiSparseLinear(32, 48, **kind, trainable="dense", prune="transposable")


def input_of(layer, *lead, grad=True):
    weight = next(layer.parameters())
    return torch.randn(*lead, layer.in_features, device=weight.device, dtype=weight.dtype, requires_grad=grad)


class Seen(TorchDispatchMode):
    """Notes the ops that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def results(function, inputs):
    """The outputs of a function and the gradients of its inputs, for an upstream of ones and twos."""
    outputs = function()
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream = [1 + (torch.arange(y.numel(), device=y.device) % 2).reshape(y.shape).to(y.dtype) for y in outputs]
    wanted = [t for t in inputs if t.requires_grad]
    gradients = torch.autograd.grad(outputs, wanted, upstream, allow_unused=True)
    return [*outputs, *gradients]


def assert_same_as_the_rules(function, inputs):
    """By the registered rules, which a dispatch mode asks for."""
    plain = results(function, inputs)
    with Seen() as seen:
        ruled = results(function, inputs)
    ours = [name for name in seen.names if name.startswith("fretwork.")]
    assert ours and not any(name.startswith("fretwork._") for name in ours), ours
    for got, want in zip(plain, ruled, strict=True):
        assert (got is None) == (want is None)
        assert got is None or torch.equal(got, want)


def leaves(device, *shapes):
    return [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]


def op_cases(device):
    """By name: a call, and what it differentiates."""
    layout, pattern = some_layout(2, 3, 2), fw.patterns.sliding_window(12, 3, 2)
    heads, m, n = layout.shape
    nnz = (layout.nnz, *layout.block_shape)
    a, b, values = leaves(device, (2, heads, m, 5), (2, heads, 5, n), (2, *nnz))
    right, left = leaves(device, (heads, n, 7), (heads, 7, m))
    x, *weights, bias = leaves(device, (9, 30), *CHAIN, (32,))
    q, k, v, score = leaves(device, (2, 4, 12, 8), (2, 2, 12, 8), (2, 2, 12, 6), (4, 12, 12))
    matrix = torch.randn(24, 32, device=device).bfloat16()
    s = fw.two_four.compress(fw.two_four.prune(matrix))
    s.values.requires_grad_()
    rows, shift = (torch.randn(n, device=device).bfloat16().requires_grad_() for n in ((3, 5, 32), (24,)))
    images, packed, offset = leaves(device, (2, 32, 6, 6), (3, 16, 16), (32,))
    taps = fw.BlockLayout.for_conv2d(torch.tensor([[1, 0], [1, 1]])[:, :, None, None], 16)
    padding = torch.arange(12, device=device)[None].expand(2, 12) > 9
    return {
        "sdd": (lambda: fw.sdd(a, b, layout), [a, b]),
        "dsd": (lambda: fw.dsd(values, right, layout), [values, right]),
        "dds": (lambda: fw.dds(left, values, layout), [left, values]),
        "softmax": (lambda: fw.block_softmax(values, layout, 0.5), [values]),
        "pack": (lambda: layout.pack(layout.unpack(values)), [values]),
        "ksmm": (lambda: fw.ksmm(x, weights[0], activation="silu"), [x, weights[0]]),
        "ksmm, short": (lambda: fw.ksmm(x, weights[0]), [x, weights[0]]),
        "chain": (lambda: fw.ksmm_chain(x, weights, bias=bias), [x, *weights, bias]),
        "chain, relu": (lambda: fw.ksmm_chain(x, weights[:2], activation="relu"), [x, *weights[:2]]),
        "chain, last": (lambda: fw.ksmm_chain(x.T, weights, True, bias, "gelu"), [x, *weights, bias]),
        "to_dense": (lambda: fw.kronecker.to_dense(weights[0]), [weights[0]]),
        "matmul": (lambda: fw.two_four.matmul(s, rows.mT, shift, "gelu"), [s.values, rows, shift]),
        "linear": (lambda: fw.two_four.linear(rows, s, shift, "relu"), [s.values, rows, shift]),
        "linear, short": (lambda: fw.two_four.linear(rows, s), [s.values, rows]),
        "attention, short": (lambda: fw.attention(q, k, v, pattern), [q, k, v]),
        "attention": (lambda: fw.attention(q, k, v, pattern, bias=score, softcap=3.0), [q, k, v, score]),
        "attention, lse": (
            lambda: fw.attention(q, k, v, pattern, key_padding_mask=padding, return_lse=True),
            [q, k, v],
        ),
        "r_spmm": (lambda: fw.r_spmm(fw.r_softmax(fw.r_sddmm(q, k, pattern), pattern), v, pattern), [q, k, v]),
        "conv": (lambda: fw.block_conv2d(images, packed, taps, 1, bias=offset), [images, packed, offset]),
    }


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x, w, s, q, p: fw.ksmm(x.to_sparse(), w),
            "ksmm: x: expected a dense tensor, got one that is sparse_coo",
        ),
        (lambda x, w, s, q, p: fw.ksmm(x, w.double()), "ksmm: w: expected float32 like x, got float64"),
        (lambda x, w, s, q, p: fw.ksmm(x, w.to("meta")), "ksmm: w: expected .* like x, got meta"),
        (lambda x, w, s, q, p: fw.ksmm(x.to("meta"), w), "ksmm: w: expected meta like x, got"),
        (
            lambda x, w, s, q, p: fw.two_four.linear(x, s, torch.zeros(8, device="meta")),
            "linear: bias: expected a tensor on .*, got one on meta",
        ),
        (lambda x, w, s, q, p: fw.ksmm(x[:, 1:], w), r"ksmm: x for w: expected \(…, 32\), a·c·d, got \(3, 31\)"),
        (
            lambda x, w, s, q, p: fw.two_four.linear(x.to_sparse(), s),
            "linear: x: expected a dense tensor, got one that is",
        ),
        (lambda x, w, s, q, p: fw.two_four.linear(x.half(), s), "linear: x: expected float32, got float16"),
        (lambda x, w, s, q, p: fw.two_four.linear(x[:, 2:], s), r"linear: x: expected \(…, 32\), got \(3, 30\)"),
        (lambda x, w, s, q, p: fw.attention(q, q, q.to_sparse(), p), "attention: v: expected a dense tensor, got one"),
        (lambda x, w, s, q, p: fw.attention(q, q[..., 1:], q, p), "attention: k: expected"),
        (lambda x, w, s, q, p: fw.attention(q[:, :, 1:], q, q, p), "attention: pattern: expected"),
    ],
)
def test_short_calls_say_what_is_wrong(call, message, device):
    x, w, q = (torch.randn(shape, device=device) for shape in ((3, 32), (2, 3, 4, 4), (1, 1, 12, 8)))
    s = fw.two_four.compress(fw.two_four.prune(torch.randn(8, 32, device=device)))
    with pytest.raises(RuntimeError, match=message):
        call(x, w, s, q, fw.patterns.causal(12))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("bad", [None, 3, "x", (1.0,), torch.float32])
def test_short_calls_refuse_what_is_no_tensor(bad, grad, device):
    x, w, q = (
        torch.randn(shape, device=device, requires_grad=grad) for shape in ((3, 32), (2, 3, 4, 4), (1, 1, 12, 8))
    )
    s = fw.two_four.compress(fw.two_four.prune(torch.randn(8, 32, device=device)))
    pattern = fw.patterns.causal(12)
    calls = {
        "ksmm: x": lambda: fw.ksmm(bad, w),
        "ksmm: w": lambda: fw.ksmm(x, bad),
        "linear: x": lambda: fw.two_four.linear(bad, s),
        "attention: q": lambda: fw.attention(bad, q, q, pattern),
        "attention: v": lambda: fw.attention(q, q, bad, pattern),
    }
    if bad is not None:
        calls["linear: bias"] = lambda: fw.two_four.linear(x, s, bad)
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"{name}: expected a torch.Tensor, got {type(bad).__name__}"):
            call()


@pytest.mark.parametrize("name", op_cases(torch.device("cpu")))
def test_ops_agree_with_their_rules(name, device):
    call, inputs = op_cases(device)[name]
    assert_same_as_the_rules(call, inputs)
    for only in inputs:  # and where one of them alone learns
        for t in inputs:
            t.requires_grad_(t is only)
        assert_same_as_the_rules(call, inputs)


@pytest.mark.parametrize("lead", [(5,), (2, 3), (), (0,)], ids=str)
@each_layer
def test_layers_agree_with_their_rules(name, lead, device):
    for bias in (True, False):
        layer = layer_named(name, device, bias=bias)
        x = input_of(layer, *lead)
        inputs = [x, *layer.parameters()]
        assert_same_as_the_rules(lambda layer=layer, x=x: layer(x), inputs)
        for only in inputs:
            for t in inputs:
                t.requires_grad_(t is only)
            assert_same_as_the_rules(lambda layer=layer, x=x: layer(x), inputs)


def assert_many_gradients_at_once(y, inputs):
    """As `torch.autograd.functional.jacobian(…, vectorize=True)` asks for them."""
    upstream = torch.randn(3, *y.shape, device=y.device).to(y.dtype)
    got = torch.autograd.grad(y, inputs, upstream, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, inputs, one, retain_graph=True) for one in upstream]
    for many, ones in zip(got, zip(*each, strict=True), strict=True):
        assert_close(many, torch.stack(ones).double(), y.dtype)


@pytest.mark.parametrize("name", [name for name in op_cases(torch.device("cpu")) if name != "attention, lse"])
def test_many_gradients_of_ops_at_once(name, device):
    call, inputs = op_cases(device)[name]
    assert_many_gradients_at_once(call(), inputs)


@pytest.mark.parametrize("lead", [(5,), (2, 3), ()], ids=str)
@each_layer
def test_many_gradients_of_layers_at_once(name, lead, device):
    layer = layer_named(name, device)
    x = input_of(layer, *lead)
    assert_many_gradients_at_once(layer(x), [x, *layer.parameters()])


@each_layer
def test_plain_calls_take_no_registered_rule(name, device):
    layer = layer_named(name, device)
    assert "GeneratedBackward" not in layer(input_of(layer, 5)).grad_fn.name()


def test_every_way_of_attention_takes_no_registered_rule(device):
    q, k, v = leaves(device, *[(1, 2, 12, 8)] * 3)
    pattern = fw.patterns.causal(12)
    for o in (fw.attention(q, k, v, pattern), fw.attention(q, k, v, pattern, return_lse=True)[0]):
        assert "GeneratedBackward" not in o.grad_fn.name()


@each_layer
def test_compiled_graphs_have_the_ops_with_rules(name, device):
    layer = layer_named(name, device)
    x = input_of(layer, 5)
    seen = []

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes if "fretwork" in str(node.target))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch.compiler.reset()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    got = results(lambda: compiled(x), [x, *layer.parameters()])
    if name != "two_four, dense":  # whose ops are inside an autograd.Function
        assert seen and not any("._" in target for target in seen), seen
    for one, other in zip(got, results(lambda: layer(x), [x, *layer.parameters()]), strict=True):
        assert_close(one, other.double(), torch.float32)


@pytest.mark.parametrize("name", LAYERS[:4])
def test_double_backward(name):
    layer = layer_named(name, torch.device("cpu"), torch.float64)
    x = input_of(layer, 3)
    inputs = (x, *layer.parameters())
    names = [n for n, _ in layer.named_parameters()]

    def call(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,)).square()

    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize("reentrant", [True, False])
@each_layer
def test_checkpoints(name, reentrant, device):
    layer = layer_named(name, device)
    x = input_of(layer, 5)
    want = results(lambda: layer(x), [x, *layer.parameters()])
    checkpoint(layer, x, use_reentrant=reentrant).backward(
        1 + (torch.arange(want[0].numel()) % 2).to(x).view_as(want[0])
    )
    for got, other in zip([x.grad, *(p.grad for p in layer.parameters())], want[1:], strict=True):
        assert torch.equal(got, other)


@each_layer
def test_results_can_be_changed_in_place(name, device):
    layer = layer_named(name, device)
    for lead in ((5,), (2, 3)):
        x = input_of(layer, *lead)
        want = torch.autograd.grad(layer(x).relu().sum(), x)
        assert torch.equal(torch.autograd.grad(layer(x).relu_().sum(), x)[0], want[0])


@each_layer
def test_under_autocast(name, device):
    layer = layer_named(name, device)
    x = input_of(layer, 5)
    with torch.autocast(device.type, torch.bfloat16):
        y = layer(x)
    y.float().sum().backward()
    assert y.dtype == (torch.float32 if name == "two_four" else torch.bfloat16)
    assert x.grad.dtype == torch.float32 and all(p.grad.dtype == torch.float32 for p in layer.parameters())


class Halved(torch.nn.Module):
    def forward(self, weight):
        return weight / 2


@pytest.mark.parametrize(
    ("name", "weight"), [("block", "weight"), ("two_four", "values"), ("two_four, dense", "weight")]
)
def test_computed_weights(name, weight, device):
    layer = layer_named(name, device, bias=False)
    x = input_of(layer, 5)
    want = layer(x) / 2
    pruned = copy.deepcopy(layer)
    if weight != "values":  # a name that torch's parametrizations cannot have
        parametrize.register_parametrization(layer, weight, Halved())
        assert torch.equal(layer(x), want)
    prune.custom_from_mask(pruned, weight, torch.zeros_like(getattr(pruned, weight)))
    assert not pruned(x).any()


@each_layer
def test_hooks_run_and_copies_keep_the_idle_one(name, device):
    layer = layer_named(name, device)
    assert len(layer._forward_hooks) == 1 and not layer._forward_hooks
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert len(other._forward_hooks) == 1 and not other._forward_hooks
        calls = []
        handle = other.register_forward_hook(lambda *_, calls=calls: calls.append("forward"))
        other.register_full_backward_hook(lambda *_, calls=calls: calls.append("backward"))
        other(input_of(other, 5)).sum().backward()
        assert calls == ["forward", "backward"]
        handle.remove()
        other(input_of(other, 5))
        assert calls == ["forward", "backward"] and not other._forward_hooks


@each_layer
def test_tensors_that_a_transform_has_leaked(name, device):
    layer = layer_named(name, device)
    leaked = []

    def function(x):
        leaked.append(2 * x)
        return leaked[0].sum()

    torch.func.grad(function)(input_of(layer, 5, grad=False))
    layer(leaked[0]).sum().backward()
    plain = [p.grad for p in layer.parameters()]
    assert all(g is not None for g in plain)


@each_layer
def test_traced_by_torch_jit(name, device):
    if name == "two_four, dense":
        pytest.skip("torch.jit takes no autograd.Function")
    layer = layer_named(name, device)
    x = input_of(layer, 5)
    traced = torch.jit.trace(layer, (x,), check_trace=False)
    graph = str(traced.inlined_graph)
    assert "fretwork::" in graph and "fretwork::_" not in graph and "^" not in graph  # which marks functions of Python
    assert torch.equal(traced(x), layer(x))


class Marked(torch.Tensor):
    """A subclass that sees ops, as those of FSDP and quantisation do."""

    seen: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(str(func))
        plain = torch.utils._pytree.tree_map_only(Marked, lambda t: t.held, args)
        return func(*plain, **(kwargs or {}))


@pytest.mark.parametrize("name", LAYERS[:-1])
def test_subclasses_of_tensors_see_the_ops(name, device):
    layer = layer_named(name, device)
    x = input_of(layer, 5, grad=False)
    Marked.seen.clear()
    with torch.no_grad():
        assert torch.equal(layer(Marked(x)), layer(x))
    ours = [name for name in Marked.seen if name.startswith("fretwork.")]
    assert ours and not any(name.startswith("fretwork._") for name in ours)


@pytest.mark.parametrize("name", LAYERS[:-1])
def test_tangents_are_refused(name, device):
    layer = layer_named(name, device)
    x = input_of(layer, 5, grad=False)
    refused = pytest.raises(NotImplementedError, match="expected a tensor without a tangent")
    with refused:
        torch.func.jvp(layer, (x,), (x,))
    weight = next(n for n, _ in layer.named_parameters() if n != "bias")
    with forward_ad.dual_level():
        with refused:
            layer(forward_ad.make_dual(x, x))
        value = dict(layer.named_parameters())[weight].detach()
        with refused:
            torch.func.functional_call(layer, {weight: forward_ad.make_dual(value, value)}, (x,))


@each_layer
def test_backward_passes_that_are_compiled(name, device):
    layer = layer_named(name, device)
    x = input_of(layer, 5)
    want = torch.autograd.grad(layer(x).sum(), [x, *layer.parameters()])
    torch.compiler.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        layer(x).sum().backward()
    for got, other in zip([x, *layer.parameters()], want, strict=True):
        assert_close(got.grad, other.double(), torch.float32)


@each_layer
def test_without_data(name):
    layer = layer_named(name, "meta")
    for lead in ((5,), (2, 3)):
        x = input_of(layer, *lead)
        layer(x).sum().backward()
        assert x.grad.shape == x.shape and all(p.grad.shape == p.shape for p in layer.parameters())
