"""block_conv2d and BlockSparseConv2d against torch's dense convolution in float64."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, dtypes_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fretwork as fw

SETTINGS = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
F32 = torch.float32
LAST, FIRST = torch.channels_last, torch.contiguous_format


def kernel_mask(kernel, out=3, inner=2, density=0.5):
    """Random, with an output block that is read by nothing and a kernel position that has no blocks."""
    mask = torch.rand(out, inner, *kernel) < density
    mask[0, -1, 0, 0] = True
    if out > 1:
        mask[-1] = False
    if mask[0, 0].numel() > 1:
        mask[..., -1, -1] = False
    return mask


def dense_weight(values, mask, block):
    """(out, in, kh, kw), from the mask alone."""
    (rows, cols), (out, inner, kh, kw), order = block, mask.shape, mask.permute(2, 3, 0, 1)
    blocks = values.new_zeros(*order.shape, rows, cols).index_put(order.nonzero(as_tuple=True), values)
    return blocks.permute(2, 4, 3, 5, 0, 1).reshape(out * rows, inner * cols, kh, kw)


# What an argument or an incoming gradient may be: a view that equals the tensor it is given.

VIEWS = {
    "plain": lambda t: t.contiguous(),
    "channels last": lambda t: t.contiguous(memory_format=LAST) if t.dim() == 4 else t,
    "batch innermost": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
    "last two swapped": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
    "sliced out of NaN": lambda t: F.pad(t, (1, 2) * min(t.dim(), 3), value=float("nan"))[
        (..., *(slice(1, -2),) * min(t.dim(), 3))
    ],
    "misaligned": lambda t: torch.cat([t.new_full((3,), float("nan")), t.flatten()])[3:].view(t.shape),
    "every other": lambda t: torch.stack([t, torch.full_like(t, float("nan"))], -1)[..., 0],
}
# These change what the tensor holds: one number for all along a dimension.
EXPANDED = {f"expanded {d}": (lambda t, d=d: t.narrow(d, 0, 1).expand_as(t) if d < t.dim() else t) for d in range(4)}


def viewed(name, tensor):
    """A leaf-like view; autograd sees what it was made of."""
    if tensor.numel() == 0:
        return tensor
    return {**VIEWS, **EXPANDED}[name](tensor)


def check(mask, block, x, values, bias, d_out, reference="cpu", **geometry):
    """The value and the three gradients, for the tensors as they lie. The reference is computed on a device."""
    layout, kernel, dtype = fw.BlockLayout.for_conv2d(mask, block), tuple(mask.shape[2:]), x.dtype
    given = [t.detach().requires_grad_() for t in (x, values, bias)]
    wide = [t.detach().to(reference).double().contiguous().requires_grad_() for t in given]
    got = fw.block_conv2d(*given[:2], layout, kernel, bias=given[2], **geometry)
    want = F.conv2d(wide[0], dense_weight(wide[1], mask.to(reference), layout.block_shape), wide[2], **geometry)
    assert_close(got, want, dtype)
    upstream = d_out(want.shape)
    found = torch.autograd.grad(got, given, upstream)
    wanted = torch.autograd.grad(want, wide, upstream.detach().to(reference).double())
    for name, g, w in zip(("x", "values", "bias"), found, wanted, strict=True):
        assert_close(g, w, dtype, f"gradient of {name}", floor=max(1e-3, 0.05 * max(map(abs_max, wanted))))
    return got, found


def abs_max(t):
    return t.abs().max().item() if t.numel() else 0.0


@st.composite
def problems(draw):
    side = st.sampled_from([8, 16, 24, 32])
    block = draw(side)
    block = (block, draw(side)) if draw(st.integers(0, 3)) == 0 else block
    kernel = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    dilation = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    stride = draw(st.sampled_from([(1, 1), (1, 1), (2, 2), (1, 3), (3, 2)]))
    padding = draw(st.sampled_from(["same", "valid", (0, 0), (1, 1), (2, 0), (3, 4)]))
    padding = (1, 2) if padding == "same" and stride != (1, 1) else padding
    # At least what the kernel reaches over without padding.
    image = tuple((k - 1) * d + draw(st.integers(1, 7)) for k, d in zip(kernel, dilation, strict=True))
    names = st.sampled_from([*VIEWS, *EXPANDED])
    sizes = {"out": draw(st.integers(1, 4)), "inner": draw(st.integers(1, 3)), "density": draw(st.floats(0, 1))}
    geometry = {"stride": stride, "padding": padding, "dilation": dilation}
    return (
        block,
        kernel,
        image,
        draw(st.integers(0, 3)),
        sizes,
        geometry,
        [draw(names) for _ in range(4)],
        draw(st.integers(0, 3)),
    )


@SETTINGS
@given(problem=problems())
def test_any_problem(problem, device):
    """Any geometry; every input and the incoming gradient any view."""
    block, kernel, image, batch, sizes, geometry, names, kind = problem
    dtype = dtypes_of(device)[kind % len(dtypes_of(device))]
    mask = kernel_mask(kernel, **sizes)
    rows, cols = block if isinstance(block, tuple) else (block, block)

    def tensor(name, *shape):
        return viewed(name, torch.randn(shape).to(device, dtype))

    x = tensor(names[0], batch, mask.shape[1] * cols, *image)
    values = tensor(names[1], int(mask.sum()), rows, cols)
    bias = tensor(names[2], mask.shape[0] * rows)
    check(mask, block, x, values, bias, lambda shape: tensor(names[3], *shape), **geometry)


@pytest.mark.parametrize(
    "kernel, geometry",
    [
        ((2, 4), {"padding": "same"}),
        ((4, 2), {"padding": "same", "dilation": (1, 3)}),
        ((3, 2), {"padding": "valid", "stride": (1, 2)}),
        ((3, 3), {"padding": 2, "stride": 2, "dilation": 2}),
        ((1, 5), {"padding": (3, 4), "stride": (4, 1)}),
    ],
    ids=str,
)
def test_geometries(kernel, geometry, device):
    """Such as "same" with kernels of even size, which has more padding at the end."""
    mask = kernel_mask(kernel)
    shapes = (2, 32, 11, 9), (int(mask.sum()), 16, 16), (48,)
    tensors = (torch.randn(s, device=device) for s in shapes)
    check(mask, 16, *tensors, lambda s: torch.randn(s, device=device), **geometry)


@pytest.mark.parametrize("name", [*VIEWS, *EXPANDED])
def test_ops_on_views(name, device):
    """Each tensor of each of the three ops as a view: the same as on a contiguous copy."""
    mask = kernel_mask((3, 3))
    layout = fw.BlockLayout.for_conv2d(mask, 16)
    x, values, d_out = (torch.randn(s, device=device) for s in ((2, 32, 6, 5), (layout.nnz, 16, 16), (2, 48, 6, 5)))
    geometry = (layout.key, [3, 3], [1, 1], [1, 1, 1, 1], [1, 1], "ieee")
    ops = torch.ops.fretwork
    calls = {
        "forward": (lambda a, b: ops.block_conv2d(a, b, None, *geometry, False), x, values),
        "x": (lambda a, b: ops.block_conv2d_backward_x(a, b, *geometry, 6, 5, False), d_out, values),
        "values": (lambda a, b: ops.block_conv2d_backward_values(a, b, *geometry), x, d_out),
    }
    for what, (call, a, b) in calls.items():
        for one, other in ((viewed(name, a), b), (a, viewed(name, b)), (viewed(name, a), viewed(name, b))):
            got, want = call(one, other), call(one.contiguous(), other.contiguous())
            assert_close(got, want.double(), F32, what)


def images(device, *shape, memory_format=FIRST):
    return torch.randn(shape, device=device).contiguous(memory_format=memory_format)


@pytest.mark.parametrize("block", [8, 16, 32, 64, 128, (16, 64), (48, 8)], ids=str)
def test_blocks(block, device):
    rows, cols = block if isinstance(block, tuple) else (block, block)
    mask = kernel_mask((3, 2), 2, 2)
    for memory_format in (FIRST, LAST):
        x = images(device, 2, 2 * cols, 9, 10, memory_format=memory_format)
        tensors = x, torch.randn(int(mask.sum()), rows, cols, device=device), torch.randn(2 * rows, device=device)
        check(mask, block, *tensors, lambda s: torch.randn(s, device=device), padding=1)


def test_memory_formats(device):
    """The result and the gradient have x's format, whatever that of the incoming gradient; torch's rule where it has
    one."""
    mask = kernel_mask((3, 3))
    layout, values = fw.BlockLayout.for_conv2d(mask, 8), torch.randn(int(mask.sum()), 8, 8, device=device)
    dense = dense_weight(values.cpu(), mask, (8, 8))
    whole = torch.randn(2, 9, 11, 40, device=device)
    cases = {
        "NCHW": (images(device, 2, 16, 6, 7), FIRST),
        "channels last": (images(device, 2, 16, 6, 7, memory_format=LAST), LAST),
        "sliced": (whole[:, 1:7, 2:9, 5:21].permute(0, 3, 1, 2), LAST),
        "of one row": (images(device, 2, 16, 1, 7, memory_format=LAST), LAST),
        "of one column": (images(device, 2, 16, 7, 1, memory_format=LAST), LAST),
        "one pixel": (images(device, 2, 16, 1, 1, memory_format=LAST), FIRST),
        "one image": (images(device, 1, 16, 6, 7, memory_format=LAST), LAST),
        "transposed": (images(device, 2, 16, 7, 6).mT, FIRST),
        "one channel for all": (images(device, 2, 1, 6, 7).expand(2, 16, 6, 7), FIRST),
        "one number": (torch.randn(1, device=device).expand(2, 16, 6, 7), FIRST),
    }
    for name, (x, wanted) in cases.items():
        for incoming in (FIRST, LAST):
            leaf = x.detach().requires_grad_()
            y = fw.block_conv2d(leaf, values, layout, 3, padding=1)
            assert y.is_contiguous(memory_format=wanted), name
            (d_x,) = torch.autograd.grad(y, leaf, torch.randn_like(y).contiguous(memory_format=incoming))
            assert d_x.is_contiguous(memory_format=wanted), name
        if name in ("NCHW", "channels last", "of one row", "one image"):
            want = F.conv2d(x.cpu(), dense.contiguous(memory_format=wanted), padding=1)
            assert want.stride() == y.stride(), name


def test_bias_is_summed_in_float32(device):
    """20,000 numbers, rounded once: sums of rows that are rounded to 16 bits would end at the next number."""
    layout = fw.BlockLayout.for_conv2d(torch.ones(1, 1, 1, 1), 8)
    for dtype, each, total in ((torch.float16, 1 + 2**-10, 20016.0), (torch.bfloat16, 1 + 2**-7, 20096.0)):
        bias = torch.zeros(8, device=device, dtype=dtype, requires_grad=True)
        x, values = (torch.zeros(s, device=device, dtype=dtype) for s in ((2, 8, 100, 100), (1, 8, 8)))
        upstream = torch.full_like(x, each)
        fw.block_conv2d(x, values, layout, 1, bias=bias).backward(upstream)
        assert torch.equal(bias.grad, torch.full_like(bias, total))


def test_second_derivatives():
    mask = torch.ones(1, 1, 2, 1)
    layout = fw.BlockLayout.for_conv2d(mask, 8)
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((1, 8, 3, 2), (2, 8, 8), (8,))]

    def conv(x, values, bias):
        return fw.block_conv2d(x, values, layout, (2, 1), (2, 1), (1, 0), bias=bias)

    assert torch.autograd.gradgradcheck(conv, leaves, fast_mode=True)


def test_determinism(device):
    mask = kernel_mask((3, 3), 4, 4)
    layout, x = fw.BlockLayout.for_conv2d(mask, 32), torch.randn(4, 128, 20, 20, device=device, requires_grad=True)
    values = torch.randn(layout.nnz, 32, 32, device=device, requires_grad=True)
    upstream = torch.randn(4, 128, 20, 20, device=device)

    def all_three():
        y = fw.block_conv2d(x, values, layout, 3, padding=1)
        return y, *torch.autograd.grad(y, (x, values), upstream)

    for one, other in zip(all_three(), all_three(), strict=True):
        assert torch.equal(one, other)


# As torch sees it


def arguments(device, grad=True, channels_last=False, dtype=F32):
    """Of torch.ops.fretwork.block_conv2d and its gradients."""
    mask = kernel_mask((3, 2))
    layout = fw.BlockLayout.for_conv2d(mask, 8)
    tail = (layout.key, [3, 2], [2, 1], [1, 0, 1, 1], [1, 2], "ieee")

    def tensor(*shape):
        t = torch.randn(shape, device=device, dtype=dtype)
        t = t.contiguous(memory_format=LAST) if channels_last and t.dim() == 4 else t
        return t.requires_grad_(grad)

    x, values, bias, d_out = tensor(2, 16, 7, 6), tensor(layout.nnz, 8, 8), tensor(24), tensor(2, 24, 4, 5)
    return {
        "block_conv2d": (x, values, bias, *tail, channels_last),
        "block_conv2d_backward_x": (d_out, values, *tail, 7, 6, channels_last),
        "block_conv2d_backward_values": (x, d_out, *tail),
    }


each_op = pytest.mark.parametrize("op", ["block_conv2d", "block_conv2d_backward_x", "block_conv2d_backward_values"])


@each_op
def test_opcheck(op, device):
    packet = getattr(torch.ops.fretwork, op).default
    torch.library.opcheck(packet, arguments(device)[op])
    torch.library.opcheck(packet, arguments(device, grad=False, channels_last=True)[op])


def network(device, **options):
    layout = fw.BlockLayout.for_conv2d(kernel_mask((3, 3), 2, 2), 8)
    return fw.nn.BlockSparseConv2d(16, 16, 3, layout, padding=1, device=device, **options)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend, device):
    """Forward and backward in one graph each, also after sizes change (which Inductor is spared), in both formats."""
    torch._dynamo.reset()
    conv = network(device)

    def residual(x):
        return torch.relu(conv(x)) + x

    compiled = torch.compile(residual, fullgraph=True, backend=backend)
    for memory_format in (FIRST, LAST)[backend == "inductor" :]:
        for shape in ((2, 16, 6, 7), (3, 16, 8, 7))[backend == "inductor" :]:
            x = images(device, *shape, memory_format=memory_format).requires_grad_()
            leaves = (x, conv.weight, conv.bias)
            got, want = compiled(x), residual(x)
            assert_close(got, want.double(), F32)
            assert got.stride() == want.stride()
            upstream = torch.randn_like(want)
            found, wanted = (torch.autograd.grad(y, leaves, upstream) for y in (got, want))
            for g, w in zip(found, wanted, strict=True):
                assert_close(g, w.double(), F32, "gradient")


def test_export(tmp_path):
    conv, x = network("cpu"), torch.randn(2, 16, 6, 7)
    program = torch.export.export(conv, (x,))
    torch.export.save(program, tmp_path / "conv.pt2")
    assert torch.allclose(torch.export.load(tmp_path / "conv.pt2").module()(x), conv(x))


def test_autocast(device):
    conv = network(device)
    x = images(device, 2, 16, 6, 7, memory_format=LAST).requires_grad_()
    with torch.autocast(device.type, torch.bfloat16):
        y = conv(x)
        wide = (
            fw.block_conv2d(x.detach().double(), conv.weight.double(), conv.layout, 3) if device.type == "cpu" else None
        )
    assert y.dtype == torch.bfloat16 and y.is_contiguous(memory_format=LAST)
    assert wide is None or wide.dtype == torch.float64
    assert_close(y, conv(x).double(), torch.bfloat16)
    y.float().square().mean().backward()
    assert x.grad.dtype == conv.weight.grad.dtype == conv.bias.grad.dtype == F32
    assert x.grad.is_contiguous(memory_format=LAST)


@pytest.mark.parametrize(
    "in_dims", [(0, None, None), (2, None, None), (None, 0, None), (0, 3, 1), (None, None, 0)], ids=str
)
def test_vmap(in_dims, device):
    """Images, values and bias mapped or not."""
    mask = kernel_mask((2, 3))
    layout, count = fw.BlockLayout.for_conv2d(mask, 8), 3
    shapes = (2, 16, 5, 6), (layout.nnz, 8, 8), (24,)

    def conv(x, values, bias):
        return fw.block_conv2d(x, values, layout, (2, 3), padding=1, bias=bias)

    tensors = []
    for shape, d in zip(shapes, in_dims, strict=True):
        t = torch.randn(*(() if d is None else (count,)), *shape, device=device)
        tensors.append(t if d is None else t.movedim(0, d))
    each = [[t if d is None else t.select(d, n) for t, d in zip(tensors, in_dims, strict=True)] for n in range(count)]
    got = torch.vmap(conv, in_dims)(*tensors)
    assert_close(got, torch.stack([conv(*one) for one in each]).double(), F32)


def test_many_gradients_at_once(device):
    layout = fw.BlockLayout.for_conv2d(kernel_mask((2, 3)), 8)
    leaves = [torch.randn(s, device=device, requires_grad=True) for s in ((2, 16, 5, 6), (layout.nnz, 8, 8), (24,))]
    y = fw.block_conv2d(*leaves[:2], layout, (2, 3), bias=leaves[2])
    upstream = torch.randn(3, *y.shape, device=device)
    found = torch.autograd.grad(y, leaves, upstream, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, leaves, one, retain_graph=True) for one in upstream]
    for n, g in enumerate(found):
        assert_close(g, torch.stack([one[n] for one in each]).double(), F32, f"gradient {n}")


def test_vmap_of_none(device):
    layout = fw.BlockLayout.for_conv2d(kernel_mask((1, 1)), 8)
    x, values = torch.randn(2, 16, 5, 6, device=device), torch.randn(0, layout.nnz, 8, 8, device=device)
    assert torch.vmap(lambda v: fw.block_conv2d(x, v, layout, 1))(values).shape == (0, 2, 24, 5, 6)
    none = x.new_empty(0, 2, 16, 5, 6)
    one = values.new_ones(layout.nnz, 8, 8)
    assert torch.vmap(lambda x: fw.block_conv2d(x, one, layout, 1))(none).shape == (0, 2, 24, 5, 6)


def test_only_what_is_asked_for_is_saved(device):
    layout = fw.BlockLayout.for_conv2d(kernel_mask((1, 1)), 8)
    x, values = torch.randn(2, 16, 5, 6, device=device), torch.randn(layout.nnz, 8, 8, device=device)
    for wanted, kept in ((x, values), (values, x)):
        seen = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.data_ptr()) or t, lambda t: t):  # noqa: B023
            given = [t.detach().requires_grad_(t is wanted) for t in (x, values)]
            fw.block_conv2d(*given, layout, 1)
        assert seen == [kept.data_ptr()]


# The layer


def test_initial_weights_follow_the_stored_fan_in():
    layout = fw.BlockLayout.for_conv2d(torch.rand(8, 8, 3, 3) < 0.25, 16)
    layer = fw.nn.BlockSparseConv2d(128, 128, 3, layout)
    bound = (128 * 9 * layout.density) ** -0.5
    assert 0.99 * bound < layer.weight.abs().max() <= bound and layer.bias.abs().max() <= bound
    empty = fw.nn.BlockSparseConv2d(16, 16, 1, fw.BlockLayout.for_conv2d(torch.zeros(1, 1, 1, 1), 16))
    assert torch.equal(empty(torch.randn(2, 16, 3, 3)), torch.zeros(2, 16, 3, 3))


def test_state_copies_and_moves():
    layer = network("cpu")
    assert sorted(layer.state_dict()) == ["bias", "weight"]
    x = torch.randn(2, 16, 5, 5)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.layout == layer.layout and torch.equal(other(x), layer(x))
        with torch.no_grad():
            other.weight.zero_()
        assert not torch.equal(other(x), layer(x))
    assert layer.double()(x.double()).dtype == torch.float64
    meta = fw.nn.BlockSparseConv2d(16, 16, 3, layer.layout, device="meta")
    assert meta.weight.is_meta and meta(torch.empty(5, 16, 6, 6, device="meta")).shape == (5, 16, 4, 4)


def test_from_dense_keeps_what_the_dense_layer_was():
    dense = torch.nn.Conv2d(16, 24, (3, 2), stride=(1, 2), padding=(2, 0), dilation=2).half().eval()
    dense.weight.requires_grad_(False)
    layer = fw.nn.BlockSparseConv2d.from_dense(dense, fw.BlockLayout.for_conv2d(torch.ones(3, 2, 3, 2), 8))
    assert not layer.training and not layer.weight.requires_grad and layer.bias.requires_grad
    assert layer.weight.dtype == torch.float16 and torch.equal(layer.to_dense(), dense.weight)
    names = ("kernel_size", "stride", "padding", "dilation", "in_channels", "out_channels")
    assert all(getattr(layer, name) == getattr(dense, name) for name in names)
    assert "kernel_size=(3, 2), stride=(1, 2), padding=(2, 0), dilation=(2, 2), block=8" in repr(layer)
    dense.bias.data.zero_()
    assert layer.bias.abs().max() > 0  # a copy


@pytest.mark.parametrize(
    "change, text",
    [
        ({"kernel_size": 2}, "block_conv2d: kernel_size: expected as many positions as the layout has heads, 9, got "),
        ({"kernel_size": (1, 2, 3)}, "block_conv2d: kernel_size: expected an int or a pair of ints, got (1, 2, 3)"),
        ({"kernel_size": 3.0}, "block_conv2d: kernel_size: expected an int, got 3.0"),
        ({"stride": 0}, "block_conv2d: stride: expected at least 1 along both axes, got (0, 0)"),
        ({"padding": (0, -1)}, "block_conv2d: padding: expected at least 0 along both axes, got (0, -1)"),
        ({"padding": "full"}, "block_conv2d: padding: expected an int, a pair of ints, \"same\" or "),
        ({"padding": "same", "stride": 2}, 'block_conv2d: padding: expected "same" with a stride of 1 only'),
        ({"dilation": True}, "block_conv2d: dilation: expected an int, got True"),
        ({"x": torch.ones(2, 8, 6, 6)}, "block_conv2d: x: expected (N, 16, H, W), got (2, 8, 6, 6)"),
        ({"x": torch.ones(2, 16, 2, 6)}, "block_conv2d: x: expected a padded height of at least 3, got (2, 16, 2, 6)"),
        ({"x": torch.ones(2, 16, 6, 6).half()}, "block_conv2d: values: expected float16 like x, got float32"),
        ({"values": torch.ones(3, 8, 8)}, "block_conv2d: values: expected "),
        ({"bias": torch.ones(8)}, "block_conv2d: bias: expected (24,), got (8,)"),
        ({"bias": 1.0}, "block_conv2d: bias: expected a torch.Tensor, got float"),
        ({"layout": None}, "block_conv2d: layout: expected a fretwork.BlockLayout, got NoneType"),
        ({"precision": "half"}, "block_conv2d: precision: expected None, ieee, tf32 or tf32x3, got 'half'"),
    ],
    ids=str,
)  # fmt: skip
def test_bad_calls(change, text, device):
    mask = torch.zeros(3, 2, 3, 3)
    mask[0, 0, 0] = mask[2, 1, 1, 1] = 1
    good = {"x": torch.ones(2, 16, 6, 6), "values": torch.ones(4, 8, 8), "layout": fw.BlockLayout.for_conv2d(mask, 8)}
    call = {
        n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in (good | {"kernel_size": 3} | change).items()
    }
    with pytest.raises((RuntimeError, TypeError)) as error:
        fw.block_conv2d(**call)
    assert str(error.value).startswith(text)


def test_tracers_refuse_what_the_core_does():
    """The fake's words are the core's."""
    op = torch.ops.fretwork.block_conv2d.default
    good = arguments(torch.device("cpu"), grad=False)["block_conv2d"]
    bad = [
        (0, good[0][:, :8]),
        (0, good[0].half()),
        (0, good[0][0]),
        (0, good[0][..., :1]),
        (0, good[0].int()),
        (1, good[1][1:]),
    ]
    bad += [(2, good[2][1:]), (2, good[2].double()), (4, [2, 2])]
    for place, wrong in bad:
        call = [*good[:place], wrong, *good[place + 1 :]]
        with pytest.raises(RuntimeError) as core:
            op(*call)
        with pytest.raises(RuntimeError) as fake:
            op(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in call))
        assert str(core.value).splitlines()[0] == str(fake.value).splitlines()[0]


def test_autocast_of_other_devices_does_not_reach_the_layer(device):
    layer = network(device)
    with pytest.raises(
        RuntimeError, match=r"BlockSparseConv2d: x: expected torch.float32 like the weight, got torch.float16"
    ):
        layer(torch.ones(1, 16, 4, 4, device=device).half())
    with pytest.raises(RuntimeError, match=r"BlockSparseConv2d: x: expected \(N, 16, H, W\), got \(16, 4, 4\)"):
        layer(torch.ones(16, 4, 4, device=device))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize(
    "kernel, image, geometry",
    [
        ((3, 3), (33, 40), {"padding": 1}),
        ((3, 3), (56, 57), {"padding": 0}),
        ((5, 2), (24, 25), {"padding": (3, 1)}),
        ((3, 3), (11, 16), {"padding": 2, "dilation": 2}),
        ((1, 3), (61, 64), {"padding": (0, 2), "dilation": (1, 2)}),
        ((3, 3), (40, 31), {"padding": 1, "stride": (2, 1)}),
        ((3, 3), (56, 56), {"padding": 3}),
        ((3, 3), (7, 8), {"padding": 1}),
        ((3, 3), (28, 28), {"padding": 1}),
        ((5, 5), (56, 56), {"padding": 2}),
        ((3, 5), (24, 25), {"padding": (1, 2)}),
        ((3, 3), (40, 9), {"padding": 4, "dilation": 4}),
    ],
    ids=str,
)
def test_many_pixels(block, kernel, image, geometry, device):
    """Enough of them for the kernels of whole machines, in both orders of x and of the incoming gradient, with an odd
    number of block rows."""
    if device.type != "cuda":
        pytest.skip("for --device cuda")
    mask = kernel_mask(kernel, max(3, 320 // block), max(2, 128 // block), 0.4)
    batch = -(-50_000 // (image[0] * image[1]))
    orders = [(a, b) for a in (FIRST, LAST) for b in (FIRST, LAST)]
    for n, (order, incoming) in enumerate(orders):
        dtype = (torch.float16, torch.bfloat16)[n % 2]
        x = images(device, batch, mask.shape[1] * block, *image, memory_format=order).to(dtype)
        values = (torch.randn(int(mask.sum()), block, block, device=device) / block).to(dtype)
        bias = torch.randn(mask.shape[0] * block, device=device).to(dtype)

        def d_out(shape, incoming=incoming, dtype=dtype):
            return images(device, *shape, memory_format=incoming).to(dtype)

        check(mask, block, x, values, bias, d_out, reference=device, **geometry)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("order", [FIRST, LAST], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("image", [(56, 56), (28, 28), (48, 23)], ids=str)
def test_nan_reaches_only_what_reads_it(image, block, order, device):
    """And nothing around the ends of rows and of images. Small blocks may share what one of them reads: all do."""
    if device.type != "cuda":
        pytest.skip("for --device cuda")
    rows = 256 // block
    mask = (torch.rand(rows if block >= 64 else 1, 2, 3, 3) < 0.4).expand(rows, -1, -1, -1).clone()
    mask[:, 0, 1, 1] = True
    x = images(device, 40, 2 * block, *image, memory_format=order).half()
    lost = torch.rand(x.shape, device=device) < 1e-4
    lost[:, :, :, 0] |= torch.rand(x.shape[:3], device=device) < 1e-3
    lost[:, :, :, -1] |= torch.rand(x.shape[:3], device=device) < 1e-3
    x[lost] = torch.nan
    layout = fw.BlockLayout.for_conv2d(mask, block)
    values = torch.randn(layout.nnz, block, block, device=device).half()
    reads = mask.to(device).float().repeat_interleave(block, 0).repeat_interleave(block, 1)
    want = F.conv2d(lost.float(), reads, padding=1) > 0.5
    assert torch.equal(fw.block_conv2d(x, values, layout, 3, padding=1).isnan(), want)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("order", [FIRST, LAST], ids=["nchw", "nhwc"])
@pytest.mark.parametrize("block", [16, 32, 64])
def test_few_rows_have_blocks(block, order, device):
    """Most tiles of the result have nothing to multiply, and the others only some of x."""
    if device.type != "cuda":
        pytest.skip("for --device cuda")
    mask = torch.zeros(512 // block, 256 // block, 3, 3, dtype=torch.bool)
    mask[1, -1, 0, 2] = mask[-1, 0, 1, 1] = mask[-1, 1, 2, 0] = True
    x = images(device, 20, mask.shape[1] * block, 56, 56, memory_format=order).half()
    values, bias = (torch.randn(shape, device=device).half() for shape in [(3, block, block), (512,)])

    def d_out(shape):
        return images(device, *shape, memory_format=order).half()

    check(mask, block, x, values, bias, d_out, reference=device, padding=1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_graph_capture(device):
    """Replayed with other contents."""
    if device.type != "cuda":
        pytest.skip("for --device cuda")
    layer = network(device, dtype=torch.float16)
    x = images(device, 4, 16, 12, 12, memory_format=LAST).half()
    with torch.no_grad():
        layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(y, layer(x))
