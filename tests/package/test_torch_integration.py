"""The ops as torch sees them: opcheck, compile, export, vmap, autocast, inference mode, threads, memory, errors."""

import copy
import functools
import gc
import itertools
import subprocess
import sys
import threading

import pytest
import torch
from conftest import assert_close, some_layout
from torch._library import simple_registry
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

import fretwork as fw

OPS = ["sdd", "dsd", "dds", "block_softmax", "block_softmax_backward", "block_pack", "block_unpack"]
PRODUCTS = OPS[:3]
each_op = pytest.mark.parametrize("op", OPS)
each_product = pytest.mark.parametrize("op", PRODUCTS)


def arguments(op, device, layout=None, dtype=torch.float32, grad=True, lead=(2, 2), free=5):
    """Arguments of torch.ops.fretwork.<op>."""
    layout = layout or some_layout(2, 3, 2)
    _, m, n = layout.shape
    z = lead[:1] if len(lead) == 2 else ()

    def tensor(*shape):
        return torch.randn(shape, device=device, dtype=dtype, requires_grad=grad)

    def values():
        return tensor(*z, layout.nnz, *layout.block_shape)

    tail = (layout.key, False, False, "ieee", False, False)
    if op == "sdd":
        return tensor(*lead, m, free), tensor(*lead, free, n), *tail
    if op == "dsd":
        return values(), tensor(*lead, n, free), *tail
    if op == "dds":
        return tensor(*lead, free, m), values(), *tail
    if op == "block_softmax":
        rpe = tensor(*z, 1, 1, n) if z else tensor(m, n)
        return values(), layout.key, 0.5, rpe, None, torch.rand(m, n, device=device) < 0.8, "add", "mul"
    if op == "block_softmax_backward":
        with torch.no_grad():
            return fw.block_softmax(values(), layout), values().detach(), layout.key, 0.5, "h1n", dtype
    if op == "block_pack":
        return tensor(*lead, m, n), layout.key
    return values(), layout.key, 2.0


def call(op, *args):
    return getattr(torch.ops.fretwork, op).default(*args)


@each_op
def test_opcheck(op, device):
    packet = getattr(torch.ops.fretwork, op).default
    torch.library.opcheck(packet, arguments(op, device))
    torch.library.opcheck(packet, arguments(op, device, lead=(2,), grad=False))


def test_every_op_has_its_rules():
    """What has no fake cannot be traced, and without a gradient one would be lost in silence."""
    none = {"two_four_canonical", "two_four_check", "select_blocks", "select_any_blocks"}  # words, checks and lists
    every = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fretwork::")]
    for name in set(every) - {"fretwork::_nothing"}:
        has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, name)
        assert simple_registry.singleton.find(name).fake_impl.kernel, f"{name} has no fake"
        if name.startswith("fretwork::_"):  # for plain calls alone, which make their nodes themselves
            assert not has("Autograd"), f"{name} runs rules"
            continue
        assert has("FuncTorchBatched"), f"{name} has no batching rule"
        assert has("Autograd") or name.removeprefix("fretwork::") in none, f"{name} has no gradient"


@pytest.mark.parametrize("trans", [(True, False), (False, True), (True, True)])
@each_product
def test_opcheck_of_every_transpose(op, trans, device):
    layout = some_layout(1, 3, 3)
    a, b, *_ = arguments(op, device, layout, lead=(1,))
    a = a.detach().mT.contiguous().requires_grad_() if trans[0] and op != "dsd" else a
    b = b.detach().mT.contiguous().requires_grad_() if trans[1] and op != "dds" else b
    for sums in ((False, False), (True, True)):
        rest = (layout.key, *trans, "ieee", *sums)
        torch.library.opcheck(getattr(torch.ops.fretwork, op).default, (a, b, *rest))


def attention(layout):
    def function(q, k, v):
        scores = fw.sdd(q, k, layout, trans_b=True)
        return fw.dsd(fw.block_softmax(scores, layout, scale=0.3), v, layout)

    return function


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend, device):
    """Forward and backward in one graph each, also after the batch size changes; layouts of both key kinds."""
    for layout in (some_layout(2, 3, 3), some_layout(2, 40, 40, 8)):
        torch._dynamo.reset()
        size = layout.shape[1]
        compiled = torch.compile(attention(layout), fullgraph=True, backend=backend)
        for z in (2, 3):
            q, k, v = (torch.randn(z, 2, size, 8, device=device, requires_grad=True) for _ in range(3))
            got, want = compiled(q, k, v), attention(layout)(q, k, v)
            assert_close(got, want.double(), torch.float32)
            upstream = torch.randn_like(want)
            pairs = zip(
                torch.autograd.grad(got, (q, k, v), upstream),
                torch.autograd.grad(want, (q, k, v), upstream),
                strict=True,
            )
            for one, other in pairs:
                assert_close(one, other.double(), torch.float32, "gradient")


def test_compiled_code_follows_the_layout_and_the_precision(device):
    torch._dynamo.reset()
    seen = []

    def backend(graph, inputs):
        seen.extend(a for node in graph.graph.nodes for a in node.args if a in ("ieee", "tf32", "tf32x3"))
        return graph

    compiled = torch.compile(lambda a, b, layout: fw.sdd(a, b, layout), fullgraph=True, backend=backend)
    a, b = torch.randn(32, 5, device=device), torch.randn(5, 32, device=device)
    before = torch.get_float32_matmul_precision()
    try:
        for mask in ([[1, 0], [0, 1]], [[1, 1], [0, 1]]):
            layout = fw.BlockLayout(mask, 16)
            torch.set_float32_matmul_precision("high" if layout.nnz == 3 else "highest")
            assert compiled(a, b, layout).shape == (layout.nnz, 16, 16)
        assert seen == ["ieee", "tf32"]
    finally:
        torch.set_float32_matmul_precision(before)


def test_either_way_of_setting_torch_precision():
    """torch refuses the old question once the new setting was used; the ops must not."""
    code = """
import torch, fretwork as fw
from fretwork._torch.arguments import torch_precision
torch.backends.cuda.matmul.fp32_precision = "tf32"
layout = fw.BlockLayout([[1]], 16)
fw.dsd(torch.ones(1, 16, 16), torch.ones(16, 3), layout)
assert torch_precision() == "tf32"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_export_carries_the_whole_layout(tmp_path):
    layout = some_layout(1, 30, 30, 8)
    layer = fw.nn.BlockSparseLinear(240, 240, layout)
    assert "@" in layout.key
    x = torch.randn(4, 240)
    program = torch.export.export(layer, (x,))
    texts = [a for node in program.graph.nodes for a in node.args if isinstance(a, str) and a.startswith("block")]
    assert texts == [layout.text]
    torch.export.save(program, tmp_path / "layer.pt2")
    assert torch.allclose(torch.export.load(tmp_path / "layer.pt2").module()(x), layer(x))


# vmap


@pytest.mark.parametrize(
    "lead_a, lead_b", [((2, 2), (2, 2)), ((2,), (2,)), ((2, 2), (2,)), ((2,), (3, 2)), ((), (3, 2))]
)
@pytest.mark.parametrize("dims", [(0, 0), (0, None), (None, 0), (1, 0)])
@each_product
def test_vmap_of_products(op, dims, lead_a, lead_b, device):
    """Any mix of mapped operands with and without Z and H gives what a loop gives."""
    layout = some_layout(2, 3, 2)
    lead_b = (lead_a[0], *lead_b[1:]) if len(lead_a) == len(lead_b) == 2 else lead_b

    def operand(n, lead, dim):
        t = arguments(op, device, layout, grad=False, lead=lead)[n]
        return t if dim is None else torch.stack([t, 2 * t, -t], dim)

    a, b = operand(0, lead_a, dims[0]), operand(1, lead_b, dims[1])
    function = lambda x, y: getattr(fw, op)(x, y, layout)  # noqa: E731
    got = torch.func.vmap(function, in_dims=dims)(a, b)
    pick = lambda t, d, n: t if d is None else t.select(d, n)  # noqa: E731
    want = torch.stack([function(pick(a, dims[0], n), pick(b, dims[1], n)) for n in range(3)])
    assert_close(got, want.double(), torch.float32)


def test_vmap_of_softmax_and_packing(device):
    layout = some_layout(2, 3, 2)
    _, m, n = layout.shape
    values = torch.randn(3, 2, layout.nnz, 16, 16, device=device)
    for rpe, attn, keys in (
        (None, None, None),
        (torch.randn(3, n, device=device), None, torch.randn(3, 2, n, device=device)),
        (torch.randn(3, 2, 2, m, n, device=device), torch.randn(3, m, n, device=device), None),
    ):
        given = {k: v for k, v in {"rpe": rpe, "attn_mask": attn, "key_padding_mask": keys}.items() if v is not None}
        function = lambda v, e: fw.block_softmax(v, layout, **e)  # noqa: E731
        want = torch.stack([function(values[i], {k: e[i] for k, e in given.items()}) for i in range(3)])
        assert_close(torch.func.vmap(function)(values, given), want.double(), torch.float32)
        none = values[:0].requires_grad_()
        out = torch.func.vmap(function)(none, {k: e[:0] for k, e in given.items()})
        assert out.shape == torch.autograd.grad(out.sum(), none)[0].shape == none.shape
    same = torch.func.vmap(lambda r: fw.block_softmax(values[0], layout, rpe=r))(torch.zeros(4, n, device=device))
    assert_close(same, fw.block_softmax(values[0], layout).expand(4, *values[0].shape).double(), torch.float32)
    dense = torch.func.vmap(layout.unpack)(values)
    assert dense.shape == (3, 2, *layout.shape) and torch.equal(torch.func.vmap(layout.pack, 1, 1)(dense), values)
    assert torch.equal(torch.func.vmap(layout.unpack)(values[:, 0]), dense[:, 0])
    nested = torch.func.vmap(torch.func.vmap(layout.unpack))(values)
    assert torch.equal(nested, dense)


def test_batched_gradients(device):
    """Several upstream gradients at once: the backward ops run under vmap."""
    layout = some_layout(2, 3, 3)
    for lead in ((2, 2), (2,)):
        q, k, v = (torch.randn(*lead, 48, 8, device=device, requires_grad=True) for _ in range(3))
        shared = torch.randn(48, 8, device=device, requires_grad=True)
        rpe = torch.randn(2, 1, 48, device=device, requires_grad=True)
        scores = fw.block_softmax(fw.sdd(q, k + shared, layout, trans_b=True), layout, rpe=rpe)
        out = fw.dsd(layout.pack(layout.unpack(scores)), v, layout) + fw.dsd(scores, shared, layout)
        leaves = (q, k, v, shared, rpe)
        upstream = torch.randn(3, *out.shape, device=device)

        def gradients(u, out=out, leaves=leaves):
            return torch.autograd.grad(out, leaves, u, retain_graph=True)

        want = [torch.stack(parts).double() for parts in zip(*map(gradients, upstream), strict=True)]
        legacy = torch.autograd.grad(out, leaves, upstream, is_grads_batched=True, retain_graph=True)
        for got in (torch.func.vmap(gradients)(upstream), legacy):
            for one, other in zip(got, want, strict=True):
                assert_close(one, other, torch.float32)


# Autocast, inference mode, threads, memory


@each_product
def test_autocast_lowers_as_matmul_does(op, device):
    a, b, *_ = arguments(op, device)
    layout = some_layout(2, 3, 2)
    a, b, *_ = arguments(op, device, layout)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = getattr(fw, op)(a, b.half(), layout)
        assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert a.grad.dtype == torch.float32 and b.grad.dtype == torch.float32
    want = getattr(fw, op)(a.detach().bfloat16(), b.detach().half().bfloat16(), layout)
    assert torch.equal(out, want)
    if device.type == "cpu":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert getattr(fw, op)(a.double(), b.double(), layout).dtype == torch.float64


@each_op
def test_inference_mode(op, device):
    args = arguments(op, device)
    want = call(op, *args)
    with torch.inference_mode():
        got = call(op, *args)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other) and one.is_inference() and not one.requires_grad


@each_op
def test_no_grad_for_inputs_that_need_none(op, device):
    args = arguments(op, device, grad=False)
    out = call(op, *args)
    assert not (out[0] if isinstance(out, tuple) else out).requires_grad


def test_threads_share_the_ops(device):
    layout = some_layout(2, 8, 8)
    a, b = torch.randn(2, 128, 24, device=device), torch.randn(2, 24, 128, device=device)
    want, failures = fw.sdd(a, b, layout), []

    def work():
        try:
            for _ in range(30):
                assert torch.equal(fw.sdd(a, b, layout), want)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@each_op
def test_the_number_of_threads_changes_nothing(op):
    """Large enough for several of torch's threads, which share the work as they get free."""
    args = arguments(op, torch.device("cpu"), some_layout(2, 24, 24), grad=False, free=200)
    want = call(op, *args)
    before = torch.get_num_threads()
    try:
        for threads in (2, 4):
            torch.set_num_threads(threads)
            got = call(op, *args)
            for one, other in zip(got, want, strict=True):
                assert torch.equal(one, other)
    finally:
        torch.set_num_threads(before)


def test_failed_and_repeated_calls_leak_nothing():
    """Every argument is given back, whether the op succeeds or throws: tensors by reference count, strings by size."""
    layout = some_layout(1, 2, 2, 8)
    values, b, wrong = torch.randn(layout.nnz, 8, 8), torch.randn(16, 4), torch.randn(17, 4)
    long_name = "x" * 1_000_000

    def resident():
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    def once():
        fw.dsd(values, b, layout)
        with pytest.raises(RuntimeError, match="dsd: b: expected"):
            fw.dsd(values, wrong, layout)
        with pytest.raises(RuntimeError, match="precision: expected"):
            torch.ops.fretwork.dsd(values, b, layout.key, False, False, long_name, False, False)

    counts = [t._use_count() for t in (values, b, wrong)]
    for _ in range(20):
        once()
    before = resident()
    for _ in range(200):
        once()
    assert [t._use_count() for t in (values, b, wrong)] == counts
    assert resident() - before < 60e6  # a name leaked in each round would be 200 MB


# Errors


@each_product
def test_operands_that_are_refused(op, device):
    layout = some_layout(2, 3, 2)
    a, b, *_ = arguments(op, device, layout, grad=False)
    function = getattr(fw, op)
    bad = [
        (None, b, layout),
        (a, [1.0], layout),
        (a, b, None),
        (a, b, layout.mask()),
        (a, b, layout.text),
        (a, b, layout.T),
        (a.long(), b.long(), layout),
        (a.to(torch.complex64), b, layout),
        (a, b.half(), layout),
        (a[(None,) * 8], b, layout),
        (a, b[(None,) * 8], layout),
        (a.bool(), b.bool(), layout),
        (a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), layout),
        (a[0, 0, 0, 0], b, layout),
    ]
    for arguments_ in bad:
        with pytest.raises((RuntimeError, TypeError), match=rf"^{op}: \w+: expected .+, got .+"):
            function(*arguments_)
    with pytest.raises(RuntimeError, match=rf"^{op}: precision: expected .*, got 'fast'"):
        function(a, b, layout, precision="fast")


def message(function, *arguments, **options):
    with pytest.raises(RuntimeError) as caught:
        function(*arguments, **options)
    return str(caught.value).splitlines()[0]


BAD_PRODUCTS = {  # heads 2, 48 by 32
    "sdd": [((2, 48, 5), (2, 6, 32)), ((2, 47, 5), (2, 5, 32)), ((3, 48, 5), (5, 32)), ((48, 5), (5,))],
    "dsd": [((5, 16, 16), (32, 4)), ((6, 16, 16), (31, 4)), ((2, 6, 16, 16), (3, 2, 32, 4)), ((6, 16, 16), (3, 32, 4))],
    "dds": [((4, 48), (5, 16, 16)), ((4, 32), (6, 16, 16)), ((3, 1, 4, 48), (2, 6, 16, 16)), ((48,), (6, 16, 16))],
}
BAD_EXTRAS = [
    {"rpe": torch.ones(3, 1, 1)},
    {"rpe": torch.ones(1, 1, 1, 48, 32)},
    {"rpe": torch.ones(32, dtype=torch.int64)},
    {"key_padding_mask": torch.ones(32)},
    {"key_padding_mask": torch.ones(3, 32)},
    {"key_padding_mask": torch.ones(1, 32, dtype=torch.bool)},
    {"attn_mask": torch.ones(1, 48, 32)},
    {"attn_mask": torch.ones(48, 32, dtype=torch.int8)},
]


def bad_calls():
    """Every op with tensors that it refuses."""
    layout = fw.BlockLayout(torch.tensor([[[1, 0]] * 3, [[0, 1]] * 3]), 16)
    for op, shapes in BAD_PRODUCTS.items():
        for a, b in shapes:
            yield getattr(fw, op), (torch.ones(a), torch.ones(b), layout), {}
        a, b = BAD_PRODUCTS[op][0]
        yield getattr(fw, op), (torch.ones(a), torch.ones(b).half(), layout), {}
        yield getattr(fw, op), (torch.ones(a).int(), torch.ones(b), layout), {}
        yield getattr(fw, op), (torch.ones(a), torch.ones(b).bool(), layout), {}
    for extras in BAD_EXTRAS:
        yield fw.block_softmax, (torch.ones(6, 16, 16), layout), extras
    yield fw.block_softmax, (torch.ones(6, 16), layout), {}
    yield fw.block_softmax, (torch.ones(6, 16, 16).int(), layout), {}
    yield layout.pack, (torch.ones(48, 32),), {}
    yield layout.pack, (torch.ones(2, 48, 32).int(),), {}
    yield fw.BlockLayout([[1, 1]] * 3, 16).pack, (torch.ones(48, 33),), {}
    yield layout.unpack, (torch.ones(1, 1, 6, 16, 16),), {}
    q, k = torch.ones(2, 4, 64, 8), torch.ones(2, 2, 64, 8)
    for wrong in (torch.ones(3), torch.ones(1, 4), torch.ones(4).int(), torch.ones(4).half()):
        yield fw.attention, (q, k, k), dict(sinks=wrong)
    for wrong in (k[..., 1:], k[:1], k.half(), torch.ones(2, 3, 64, 8)):
        yield fw.select_blocks, (q, wrong, 3), {}
    yield fw.select_blocks, (q[0], k, 3), {}
    yield fw.select_blocks, (q, k, 1), {}
    yield fw.select_blocks, (q, k, 3, 24), {}
    yield fw.select_blocks, (q, k, 3), dict(first=-1)
    yield fw.select_blocks, (q, k, 3), dict(last=-1)


@pytest.mark.parametrize("number", range(sum(1 for _ in bad_calls())))
def test_tracing_refuses_what_the_core_refuses(number):
    """With the same words, on meta tensors and on fake ones."""
    function, arguments_, options = next(itertools.islice(bad_calls(), number, None))
    want = message(function, *arguments_, **options)
    move = functools.partial(pytree.tree_map_only, torch.Tensor)
    meta = move(lambda t: t.to("meta"), (arguments_, options))
    assert message(function, *meta[0], **meta[1]) == want
    with FakeTensorMode() as mode:
        fake = move(mode.from_tensor, (arguments_, options))
        assert message(function, *fake[0], **fake[1]) == want


def test_forward_mode_is_refused_and_not_dropped():
    layout = some_layout(1, 2, 2)
    x = torch.randn(32, 4)
    values = torch.randn(layout.nnz, 16, 16)
    calls = {
        "dsd: b": (lambda t: fw.dsd(values, t, layout), x),
        "dsd: values": (lambda t: fw.dsd(t, x, layout), values),
        "block_softmax: values": (lambda t: fw.block_softmax(t, layout), values),
        "unpack: values": (layout.unpack, values),
    }
    for name, (function, at) in calls.items():
        with pytest.raises(NotImplementedError, match=f"^{name}: expected a tensor without a tangent, got"):
            torch.func.jvp(function, (at,), (at,))


def test_a_layout_text_that_is_none():
    with pytest.raises(RuntimeError, match=r"expected .*, got "):
        torch.ops.fretwork.block_pack(torch.ones(8, 8), "nonsense")


@pytest.mark.parametrize("name", ["ieee", "tf32", "tf32x3", None])
def test_precisions(name, device):
    layout = some_layout(2, 3, 2)
    a, b, *_ = arguments("sdd", device, layout, grad=False)
    want = fw.sdd(a.double().cpu(), b.double().cpu(), layout)
    got = fw.sdd(a, b, layout, precision=name)
    tolerance = 2e-3 if name == "tf32" and device.type == "cuda" else 2e-5
    assert (got.double().cpu() - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("kind", ["block", "kronecker", "values", "dense"])
def test_in_an_encoder_layer_of_torch(kind):
    """Which reads the weights of its linear layers at inference and would not call what stands in their place."""
    torch.manual_seed(0)
    make = {
        "block": lambda: fw.nn.BlockSparseLinear.from_dense(
            torch.nn.Linear(32, 64), fw.BlockLayout(torch.eye(2, 1).bool(), 32)
        ),
        "kronecker": lambda: fw.nn.KSLinear([(1, 8, 4, 8), (8, 8, 8, 1)]),
        "values": lambda: fw.nn.SemiSparseLinear(32, 64),
        "dense": lambda: fw.nn.SemiSparseLinear(32, 64, prune="transposable", trainable="dense"),
    }[kind]
    layer = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    layer.linear1, x = make(), torch.randn(2, 5, 32)
    want = layer(x)
    with torch.no_grad():
        assert torch.allclose(copy.deepcopy(layer).eval()(x), want, atol=1e-5)
