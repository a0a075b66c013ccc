"""block_softmax against a dense float64 softmax of the mask, its gradients, and its masks' dtypes."""

import pytest
import torch
from conftest import assert_close, dense_of, dtypes_of, packed_of, some_layout
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fretwork as fw

INF = float("inf")
SETTINGS = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def reference(values, layout, scale, rpe, key_padding, attn, modes):
    x = dense_of(values, layout) * scale
    x = x if rpe is None else x + rpe
    gone = ~layout.mask()
    for mask, mode in zip((None if key_padding is None else key_padding[:, None, None], attn), modes, strict=True):
        if mask is not None and mode == "add":
            x = x + mask
        elif mask is not None:
            gone = gone | (mask == 0)
    x = x.masked_fill(gone, -INF)
    dead = (x == -INF).all(-1, keepdim=True)
    return packed_of(x.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0), layout)


def drawn_mask(mode, boolean, *shape):
    if mode == "mul":
        mask = torch.rand(shape) < 0.7
        return mask if boolean else mask * 1.5
    return torch.where(torch.rand(shape) < 0.2, -INF, torch.randn(shape))


@st.composite
def problems(draw):
    layout = some_layout(
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 5)),
        (draw(st.sampled_from([8, 16, 40])), draw(st.sampled_from([8, 16, 40]))),
        draw(st.floats(0, 1)),
    )
    z = draw(st.sampled_from([0, 1, 2, 3]))
    sizes = (z, *layout.shape)
    rpe = None
    if draw(st.booleans()):
        rank = draw(st.integers(0, 4))
        rpe = torch.randn([draw(st.sampled_from([1, n])) for n in sizes[4 - rank :]])
    modes = draw(st.tuples(*(st.sampled_from(["add", "mul"]),) * 2))
    key_padding = drawn_mask(modes[0], draw(st.booleans()), z, sizes[3]) if draw(st.booleans()) else None
    attn = (
        drawn_mask(modes[1], draw(st.booleans()), *sizes[draw(st.sampled_from([1, 2])) :])
        if draw(st.booleans())
        else None
    )
    return (
        layout,
        z,
        draw(st.sampled_from([1.0, -0.5, 0.0, 3.0])),
        rpe,
        key_padding,
        attn,
        modes,
        draw(st.integers(0, 3)),
    )


@SETTINGS
@given(problem=problems())
def test_any_problem(problem, device):
    layout, z, scale, rpe, key_padding, attn, modes, kind = problem
    dtype = dtypes_of(device)[kind % len(dtypes_of(device))]
    values = torch.randn(z, layout.nnz, *layout.block_shape).to(device, dtype).requires_grad_()
    leaves = [values]
    if rpe is not None:
        rpe = rpe.to(device, dtype).requires_grad_()
        leaves.append(rpe)
    masks = [m if m is None else m.to(device, m.dtype if m.dtype == torch.bool else dtype) for m in (key_padding, attn)]
    got = fw.block_softmax(values, layout, scale, rpe, *masks, *modes)
    exact = [t.detach().cpu().double().requires_grad_() for t in leaves]
    plain = [
        m if m is None or m.dtype == torch.bool else m.cpu().double()
        for m in (t if t is None else t.cpu() for t in masks)
    ]
    want = reference(exact[0], layout, scale, exact[1] if rpe is not None else None, *plain, modes)
    assert_close(got, want, dtype)
    upstream = torch.randn(want.shape).to(dtype)
    gradients = torch.autograd.grad(got, leaves, upstream.to(device))
    for gradient, t in zip(gradients, torch.autograd.grad(want, exact, upstream.double()), strict=True):
        assert_close(gradient, t, dtype, "gradient", floor=1.0)  # that of a broadcast rpe cancels to nothing


def test_rpe_of_another_dtype(device):
    """A table of float32 parameters beside half-precision values keeps its own dtype."""
    layout = some_layout()
    values = torch.randn(1, layout.nnz, 16, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    rpe = torch.randn(layout.shape[1:], device=device, requires_grad=True)
    out = fw.block_softmax(values, layout, rpe=rpe)
    upstream = torch.randn(out.shape).bfloat16()
    gradients = torch.autograd.grad(out, (values, rpe), upstream.to(device))
    x, r = values.detach().cpu().double().requires_grad_(), rpe.detach().cpu().double().requires_grad_()
    want = reference(x, layout, 1.0, r, None, None, ("add", "add"))
    exact = torch.autograd.grad(want, (x, r), upstream.double())
    assert_close(out, want, torch.bfloat16)
    assert_close(gradients[0], exact[0], torch.bfloat16, "gradient of values")
    assert gradients[1].dtype == torch.float32
    assert_close(gradients[1].bfloat16(), exact[1], torch.bfloat16, "gradient of rpe")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lead", [(), (2,)], ids=["plain", "vmap"])
def test_the_gradient_of_a_float_rpe_is_not_rounded_to_half(lead, dtype, device):
    """One number for a column sums over all rows, beyond what float16 holds and finer than bfloat16 does."""
    layout = fw.BlockLayout(torch.ones(64, 1), 8)
    values, upstream = torch.randn(*lead, 64, 8, 8).to(device, dtype), torch.zeros(*lead, 64, 8, 8)
    upstream[..., 0] = 8192.0
    rpe = torch.rand(8, device=device).requires_grad_()  # so that no column has it all, whatever is drawn
    call = lambda v: fw.block_softmax(v, layout, rpe=rpe)  # noqa: E731
    out = torch.vmap(call)(values) if lead else call(values)
    (gradient,) = torch.autograd.grad(out, rpe, upstream.to(device, dtype))
    r = rpe.detach().cpu().double().requires_grad_()
    (exact,) = torch.autograd.grad((values.cpu().double() + r).softmax(-1), r, upstream.double())
    assert gradient.dtype == torch.float32 and exact.abs().max() > 65504
    assert not torch.equal(gradient, gradient.to(dtype).float())
    assert (gradient.cpu() - exact).abs().max() < 1e-3 * exact.abs().max()  # it is made of a result that is rounded


def test_only_rpe_requires_grad(device):
    layout = some_layout()
    rpe = torch.randn(1, 2, 48, 64, device=device, requires_grad=True)
    fw.block_softmax(torch.randn(3, layout.nnz, 16, 16, device=device), layout, rpe=rpe).square().sum().backward()
    assert rpe.grad is not None and rpe.grad.shape == rpe.shape and rpe.grad.abs().sum() > 0


def test_a_second_gradient_is_refused_clearly(device):
    layout = some_layout()
    values = torch.randn(1, layout.nnz, 16, 16, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(fw.block_softmax(values, layout).square().sum(), values, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"block_softmax: gradient: expected .*, got a second"):
        torch.autograd.grad(gradient.sum(), values)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"scale": "big"}, "scale: expected a number, got 'big'"),
        ({"scale": "1"}, "scale: expected a number, got '1'"),
        ({"scale": 10**400}, "scale: expected a number of 64 bits, got a larger one"),
        ({"scale": torch.ones((), requires_grad=True)}, "scale: expected a number, got a tensor that requires grad"),
        ({"attn_mask_mode": None}, "attn_mask_mode: expected"),
        ({"rpe": 3.0}, "rpe: expected a torch.Tensor, got float"),
        ({"attn_mask": [[1]]}, "attn_mask: expected a torch"),
        ({"key_padding_mask": torch.ones(1, 64).long()}, "key_padding_mask: expected .*, got int64"),
    ],
)
def test_refused(options, text):
    layout = some_layout()
    with pytest.raises((TypeError, RuntimeError), match=f"^block_softmax: {text}"):
        fw.block_softmax(torch.ones(1, layout.nnz, 16, 16), layout, **options)


@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
def test_an_added_mask_that_should_learn_is_refused(name, device):
    """It would never get a gradient; a mask of what stays has none to get."""
    layout, values = fw.BlockLayout([[1, 1]], 8), torch.randn(1, 2, 8, 8, device=device)
    mask = torch.randn((1, 16) if name == "key_padding_mask" else (8, 16), device=device, requires_grad=True)
    with pytest.raises(NotImplementedError, match=rf"^block_softmax: {name}: expected .*, got .* grad; add .* to rpe"):
        fw.block_softmax(values, layout, **{name: mask})
    with torch.no_grad():
        frozen = fw.block_softmax(values, layout, **{name: mask})
    assert torch.equal(fw.block_softmax(values, layout, **{name: mask.detach()}), frozen)
    assert fw.block_softmax(values, layout, **{name: mask, f"{name}_mode": "mul"}).isfinite().all()


@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
def test_a_bool_mask_is_not_added(name, device):
    """It would count True as 1; those who pass one mean what stays."""
    layout = fw.BlockLayout([[1, 1]], 8)
    mask = torch.ones((1, 16) if name == "key_padding_mask" else (8, 16), dtype=torch.bool, device=device)
    with pytest.raises(RuntimeError, match=rf"block_softmax: {name}: expected numbers to add.*, got bool"):
        fw.block_softmax(torch.zeros(1, 2, 8, 8, device=device), layout, **{name: mask})


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64], ids=str)
def test_integer_masks_of_what_stays(dtype, device):
    """As tokenizers give them."""
    layout, values = fw.BlockLayout([[1, 1]], 8), torch.randn(2, 2, 8, 8, device=device)
    key, attn = (torch.randint(0, 3, s, device=device, dtype=dtype) for s in ((2, 16), (8, 16)))
    modes = {"key_padding_mask_mode": "mul", "attn_mask_mode": "mul"}
    got = fw.block_softmax(values, layout, key_padding_mask=key, attn_mask=attn, **modes)
    assert torch.equal(got, fw.block_softmax(values, layout, key_padding_mask=key != 0, attn_mask=attn != 0, **modes))


@pytest.mark.parametrize("shape", [(), (1,), (48, 1), (3, 1, 1), (2, 3, 48, 1)], ids=str)
def test_a_shift_of_whole_rows_has_no_gradient(shape, device):
    """Exactly none: what rounding leaves of such a sum would pass for one."""
    layout = some_layout(3, 3, 4)
    values = torch.randn(2, layout.nnz, 16, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    rpe = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    d_values, d_rpe = torch.autograd.grad(fw.block_softmax(values, layout, rpe=rpe).square().sum(), (values, rpe))
    assert d_rpe.shape == shape and d_rpe.dtype == rpe.dtype and not d_rpe.any() and d_values.any()
