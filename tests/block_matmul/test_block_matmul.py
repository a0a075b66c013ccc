"""sdd, dsd and dds against dense float64 products of the mask: values, gradients and second gradients."""

import numpy as np
import pytest
import torch
from conftest import assert_close, dense_of, dtypes_of, packed_of, some_layout
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fretwork as fw

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
each_product = pytest.mark.parametrize("op", ["sdd", "dsd", "dds"])
each_sum = pytest.mark.parametrize("sum_z, sum_h", [(True, False), (False, True), (True, True)])

STRIDES = [
    lambda t: t,
    lambda t: t.mT.contiguous().mT,
    lambda t: t.repeat_interleave(2, -1)[..., ::2],
    lambda t: torch.nn.functional.pad(t, (1, 2, 3, 0))[..., 3:, 1:-2] if t.dim() > 1 else t,
    lambda t: t.flip(-1).flip(-1) if t.dim() < 3 else t.transpose(0, 1).contiguous().transpose(0, 1),
]


def full(t, packed, layout):
    """An operand as (Z, H, ·, ·)."""
    return dense_of(t, layout) if packed else t.reshape((1,) * (4 - t.dim()) + t.shape)


def reference(op, a, b, layout, trans_a, trans_b, sum_z=False, sum_h=False):
    """The product on (Z, H, ·, ·) tensors; packed for sdd. Always with Z, and H where it is dense."""
    a, b = full(a, op == "dsd", layout), full(b, op == "dds", layout)
    out = (a.mT if trans_a else a) @ (b.mT if trans_b else b)
    if sum_z:
        out = out.sum(0, keepdim=True)
    if sum_h:
        out = out.sum(1, keepdim=True)
    return packed_of(out.expand(-1, layout.heads, -1, -1), layout) if op == "sdd" else out


@st.composite
def problems(draw):
    op = draw(st.sampled_from(["sdd", "dsd", "dds"]))
    side = st.sampled_from([8, 16, 24, 32])
    block = (draw(side), draw(side))
    heads = draw(st.integers(1, 3))
    layout = some_layout(heads, draw(st.integers(1, 4)), draw(st.integers(1, 4)), block, draw(st.floats(0, 1)))
    trans_a, trans_b = draw(st.booleans()), draw(st.booleans())
    free = draw(st.sampled_from([0, 1, 3, 8, 17, 40]))
    z = draw(st.sampled_from([0, 1, 2, 3]))
    dense_heads = st.sampled_from([1, heads] if heads > 1 or op == "sdd" else [1, 1, 4])
    _, m, n = layout.shape

    def operand(shape, transposed):
        rank = draw(st.integers(2, 4))
        lead = (draw(st.sampled_from([1, z])), draw(dense_heads))[4 - rank :]
        return *lead, *(shape[::-1] if transposed else shape)

    def packed():
        return *draw(st.sampled_from([(), (1,), (z,)])), layout.nnz, *block

    if op == "sdd":
        shapes = operand((m, free), trans_a), operand((free, n), trans_b)
    elif op == "dsd":
        shapes = packed(), operand((m if trans_a else n, free), trans_b)
    else:
        shapes = operand((free, n if trans_b else m), trans_a), packed()
    return op, layout, shapes, trans_a, trans_b, draw(st.sampled_from(STRIDES)), draw(st.integers(0, 3))


@SETTINGS
@given(problem=problems())
def test_any_problem(problem, device):
    op, layout, shapes, trans_a, trans_b, strided, kind = problem
    dtype = dtypes_of(device)[kind % len(dtypes_of(device))]
    inputs = [strided(torch.randn(s).to(device, dtype)).requires_grad_() for s in shapes]
    exact = [t.detach().cpu().double().requires_grad_() for t in inputs]
    got = getattr(fw, op)(*inputs, layout, trans_a, trans_b)
    want = reference(op, *exact, layout, trans_a, trans_b)
    has_z = 4 in (len(shapes[0]), len(shapes[1]))
    dense = shapes[1 if op == "dsd" else 0]
    has_h = op == "sdd" or has_z or len(dense) > 2 or layout.heads > 1
    want = want if has_z else want[0] if has_h else want[0, 0]
    assert_close(got, want, dtype)
    upstream = torch.randn(want.shape).to(dtype)
    gradients = torch.autograd.grad(got, inputs, strided(upstream.to(device)))
    for gradient, t in zip(gradients, torch.autograd.grad(want, exact, upstream.double()), strict=True):
        assert_close(gradient, t, dtype, "gradient")


@each_sum
@each_product
def test_sums_over_batches_and_heads(op, sum_z, sum_h, device):
    """What gradients of broadcast operands use; differentiable themselves."""
    layout = some_layout(1 if op == "sdd" and sum_h else 2)
    _, m, n = layout.shape
    heads = 3 if layout.heads == 1 else 2
    values = (2, layout.nnz, 16, 16)
    shapes = {
        "sdd": ((2, heads, m, 5), (1, 1, 5, n)),
        "dsd": (values, (1, 1, n, 5)),
        "dds": ((2, heads, 5, m), values),
    }[op]
    inputs = [torch.randn(s, dtype=torch.float32, device=device, requires_grad=True) for s in shapes]
    exact = [t.detach().cpu().double().requires_grad_() for t in inputs]
    call = getattr(torch.ops.fretwork, op).default
    got = call(*inputs, layout.key, False, False, "ieee", sum_z, sum_h)
    want = reference(op, *exact, layout, False, False, sum_z, sum_h)
    assert_close(got, want, torch.float32)
    upstream = torch.randn(want.shape)
    gradients = torch.autograd.grad(got, inputs, upstream.to(device))
    for gradient, t in zip(gradients, torch.autograd.grad(want, exact, upstream.double()), strict=True):
        assert_close(gradient, t, torch.float32, "gradient")


@pytest.mark.parametrize("trans_a, trans_b", [(False, False), (True, True)])
@pytest.mark.parametrize("broadcast", [False, True])
@each_product
def test_second_gradients(op, broadcast, trans_a, trans_b):
    layout = some_layout(2, 2, 2, 8)
    _, m, n = layout.shape
    dense = {"sdd": ((m, 3), (3, n)), "dsd": (None, (m if trans_a else n, 3)), "dds": ((3, n if trans_b else m), None)}
    shapes = [
        (layout.nnz, 8, 8) if s is None else (*(() if broadcast else (2, 2)), *(s[::-1] if t else s))
        for s, t in zip(dense[op], (trans_a, trans_b), strict=True)
    ]
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    function = lambda a, b: getattr(fw, op)(a, b, layout, trans_a, trans_b)  # noqa: E731
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@each_product
def test_only_what_is_needed_is_kept(op):
    """An input is saved only for the other's gradient."""
    layout = some_layout(1, 2, 2, 8)
    a, b = {"sdd": ((16, 3), (3, 16)), "dsd": ((layout.nnz, 8, 8), (16, 3)), "dds": ((3, 16), (layout.nnz, 8, 8))}[op]
    a, b = torch.randn(a, requires_grad=True), torch.randn(b)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        out = getattr(fw, op)(a, b, layout)
    assert kept == [b.data_ptr()] and out.requires_grad


def test_products_chain(device):
    """Attention without its softmax: (q kᵀ restricted) v, and back."""
    layout = some_layout(2, 4, 4, 16)
    q, k, v = (torch.randn(1, 2, 64, 8, device=device, requires_grad=True) for _ in range(3))
    got = fw.dsd(fw.sdd(q, k, layout, trans_b=True), v, layout)
    x, y, w = (t.detach().cpu().double().requires_grad_() for t in (q, k, v))
    want = ((x @ y.mT) * layout.mask()) @ w
    assert_close(got, want, torch.float32)
    upstream = torch.randn(want.shape)
    pairs = zip(
        torch.autograd.grad(got, (q, k, v), upstream.to(device)),
        torch.autograd.grad(want, (x, y, w), upstream.double()),
        strict=True,
    )
    for one, other in pairs:
        assert_close(one, other, torch.float32, "gradient")


@pytest.mark.parametrize("op", ["dsd", "dds"])
def test_no_heads_at_all(op, device):
    """A one-head layout serves any number of heads, none too; the gradient of what none used is zero."""
    layout = fw.BlockLayout([[1, 0], [1, 1]], 8)
    values = torch.randn(3, 8, 8, device=device, requires_grad=True)
    dense = torch.randn(2, 0, 16, 5, device=device)
    out = fw.dsd(values, dense, layout) if op == "dsd" else fw.dds(dense.mT, values, layout)
    out.sum().backward()
    assert out.shape == ((2, 0, 16, 5) if op == "dsd" else (2, 0, 5, 16)) and not values.grad.any()


@pytest.mark.parametrize("op", ["dsd", "dds"])
@pytest.mark.parametrize("lead", [(), (1,), (2, 1)], ids=str)
def test_a_layout_of_no_heads(lead, op, device):
    """The result has the layout's heads, none, also where the dense operand is one matrix."""
    layout = fw.BlockLayout(torch.zeros(0, 2, 2, dtype=torch.bool), 8)
    values = torch.zeros(0, 8, 8, device=device)
    dense = torch.randn(*lead, 16, 5, device=device, requires_grad=True)
    out = fw.dsd(values, dense, layout) if op == "dsd" else fw.dds(dense.mT, values, layout)
    assert out.shape == (*lead[:-1], 0, *((16, 5) if op == "dsd" else (5, 16)))
    assert not torch.autograd.grad(out.sum(), dense)[0].any()


@pytest.mark.parametrize("value", ["no", "", None, 2, 0.0, [], torch.tensor(True)], ids=repr)
@pytest.mark.parametrize("name", ["trans_a", "trans_b"])
def test_a_transposition_is_a_bool(name, value):
    layout = fw.BlockLayout([[1]], 8)
    with pytest.raises(TypeError, match=f"^dsd: {name}: expected True or False, got "):
        fw.dsd(torch.ones(1, 8, 8), torch.ones(8, 8), layout, **{name: value})
    for plain in (1, np.True_, np.int64(1)):
        fw.dsd(torch.ones(1, 8, 8), torch.ones(8, 8), layout, **{name: plain})


def test_tensors_that_are_not_dense():
    layout, values, b = fw.BlockLayout([[1]], 8), torch.ones(1, 8, 8), torch.ones(8, 8)
    with pytest.raises(RuntimeError, match=r"^dsd: b: expected a dense tensor, got one that is sparse_coo"):
        fw.dsd(values, b.to_sparse(), layout)
    with pytest.raises(RuntimeError, match=r"^dsd: b: expected a dense tensor, got one that is nested"):
        fw.dsd(values, torch.nested.nested_tensor([b], layout=torch.jagged), layout)


def test_a_fill_beyond_the_type():
    layout = fw.BlockLayout([[1, 0]], 8)
    for dtype, largest, beyond in ((torch.float16, 65504.0, 65505.0), (torch.bfloat16, 3.38e38, 3.4e38),
                                   (torch.float32, 3.4e38, 1e39)):  # fmt: skip
        values = torch.ones(1, 8, 8, dtype=dtype)
        assert layout.unpack(values, fill=largest).isfinite().all()
        assert layout.unpack(values, fill=-torch.inf).isinf().any()
        for fill in (beyond, -beyond):
            with pytest.raises(RuntimeError, match=r"^unpack: fill: expected a number that .* holds, .*, got "):
                layout.unpack(values, fill=fill)
            with pytest.raises(RuntimeError, match=r"unpack: fill: expected a number that .* holds, .*, got "):
                layout.unpack(values.to("meta"), fill=fill)
