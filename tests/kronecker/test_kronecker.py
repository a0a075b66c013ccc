"""ksmm and ksmm_chain against einsum in float64: values, gradients twice over, and as torch's transforms see them."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, dtypes_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fretwork as fw

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
ALGOS = ["kernel", "bmm", "bsr", "einsum", "dense", "sparse"]
ACTIVATIONS = {None: lambda y: y, "relu": F.relu, "gelu": F.gelu, "silu": F.silu}
each_algo = pytest.mark.parametrize("algo", ALGOS)
both_layouts = pytest.mark.parametrize("bs_last", [False, True], ids=["first", "last"])


def reference(x, *weights, bias=None, bs_last=False, activation=None):
    y = x.movedim(0, -1) if bs_last else x
    for w in weights:
        a, _, c, d = w.shape
        y = torch.einsum("...ikl,ijkl->...ijl", y.unflatten(-1, (a, c, d)), w).flatten(-3)
    y = ACTIVATIONS[activation](y if bias is None else y + bias)
    return y.movedim(-1, 0) if bs_last else y


def tensors(patterns, batch, device, dtype=torch.float32, bs_last=False, grad=True):
    """x, the weights, and a bias."""
    (a, _, c, d), (e, b, _, f) = patterns[0], patterns[-1]
    shapes = [(a * c * d, *batch) if bs_last else (*batch, a * c * d), *patterns, (e * b * f,)]
    made = [torch.randn(s) / (math.sqrt(s[2]) if n in range(1, len(patterns) + 1) else 1) for n, s in enumerate(shapes)]
    return [t.to(device, dtype).requires_grad_(grad) for t in made]


def compare(function, exact, inputs, dtype):
    """Value and gradients; the inputs stay as they are."""
    wide = [t.detach().cpu().double().requires_grad_() for t in inputs]
    before = [t.detach().clone() for t in inputs]
    got, want = function(*inputs), exact(*wide)
    # Terms have unit size: where a lone sum happens to vanish, its error is still measured against them.
    assert_close(got, want, dtype, floor=1.0)
    upstream = torch.randn(want.shape).to(dtype)
    gradients = torch.autograd.grad(got, inputs, upstream.to(got.device))
    for n, (one, other) in enumerate(zip(gradients, torch.autograd.grad(want, wide, upstream.double()), strict=True)):
        assert_close(one, other, dtype, f"gradient of input {n}", floor=1.0)
    assert all(torch.equal(t, b) for t, b in zip(inputs, before, strict=True))


# Properties

sizes = st.integers(1, 6)
STRIDES = [
    lambda t: t,
    lambda t: t.permute(*reversed(range(t.dim()))).contiguous().permute(*reversed(range(t.dim()))),
    lambda t: torch.stack([t, torch.full_like(t, math.nan)], -1).flatten(-2)[..., ::2],
    lambda t: F.pad(t, (2, 1), value=math.nan)[..., 2:-1],
    lambda t: t[:1].expand_as(t),
]


@SETTINGS
@given(st.data())
def test_any_problem(device, data):
    a, b, c, d = (data.draw(sizes) for _ in range(4))
    batch = tuple(data.draw(st.lists(st.integers(0, 4), max_size=3)))
    bs_last, dtype = data.draw(st.booleans()), data.draw(st.sampled_from(dtypes_of(device)))
    activation = data.draw(st.sampled_from([None, "gelu", "silu"]))
    inputs = tensors([(a, b, c, d)], batch, device, dtype, bs_last)[: data.draw(st.sampled_from([2, 3]))]
    inputs = [data.draw(st.sampled_from(STRIDES))(t.detach()).requires_grad_() for t in inputs]
    options = {"bs_last": bs_last, "activation": activation}
    compare(
        lambda x, w, *bias: fw.ksmm(x, w, bias=bias[0] if bias else None, **options),
        lambda x, w, *bias: reference(x, w, bias=bias[0] if bias else None, **options),
        inputs,
        dtype,
    )


@st.composite
def chains(draw):
    """Patterns that fit: each takes a divisor of the features so far as its a·d, and the rest as c."""
    patterns = [tuple(draw(sizes) for _ in range(4))]
    for _ in range(draw(st.integers(0, 3))):
        features = patterns[-1][0] * patterns[-1][1] * patterns[-1][3]
        a = draw(st.sampled_from([n for n in range(1, features + 1) if features % n == 0]))
        d = draw(st.sampled_from([n for n in range(1, features // a + 1) if features // a % n == 0]))
        patterns.append((a, draw(st.integers(1, 3)), features // a // d, d))
    return patterns


@SETTINGS
@given(chains(), st.booleans(), st.sampled_from([*ALGOS, "auto"]))
def test_any_chain(device, patterns, bs_last, algo):
    dtype = dtypes_of(device)[0]
    x, *weights, bias = tensors(patterns, (3, 2), device, dtype, bs_last)
    compare(
        lambda x, b, *ws: fw.ksmm_chain(x, ws, bs_last, b, "silu", algo),
        lambda x, b, *ws: reference(x, *ws, bias=b, bs_last=bs_last, activation="silu"),
        [x, bias, *weights],
        dtype,
    )


@each_algo
@both_layouts
def test_relu(bs_last, algo, device):
    for dtype in dtypes_of(device):
        x, w, bias = (t.detach() for t in tensors([(2, 3, 4, 5)], (3, 30), device, dtype, bs_last))
        inputs = [t.requires_grad_() for t in (x.round(), (2 * w).round(), bias.round() + 0.5)]  # no sum is zero
        options = {"bs_last": bs_last, "activation": "relu"}
        compare(
            lambda x, w, b, o=options: fw.ksmm(x, w, bias=b, algo=algo, **o),
            lambda x, w, b, o=options: reference(x, w, bias=b, **o),
            inputs,
            dtype,
        )


@both_layouts
def test_results_are_contiguous_and_strided_inputs_are_not_copied(bs_last, device):
    x, w, _ = tensors([(2, 3, 4, 5)], (7,), device, bs_last=not bs_last)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.data_ptr()) or t, lambda t: t):
        y = fw.ksmm(x.T, w, bs_last)
    assert y.is_contiguous() and x.data_ptr() in seen and w.data_ptr() in seen


# Gradients


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_activations_of_extremes(dtype):
    """Of numbers that an exponential does not hold, and of what is none."""
    bias = torch.tensor([-math.inf, math.nan, -3e4, -800.0, -100.0, -50.0, 0.0, 800.0, 3e4], dtype=dtype)
    x, w = torch.zeros(1, 1, dtype=dtype), torch.zeros(1, len(bias), 1, 1, dtype=dtype)
    for name in ("relu", "gelu", "silu"):
        got, want = fw.ksmm(x, w, bias=bias, activation=name, algo="kernel")[0], ACTIVATIONS[name](bias)
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-30, equal_nan=True)


def test_gelu_of_the_lower_tail(device):
    """Small results are right to their own size: 1 + erf(x) would have cancelled."""
    bias = torch.linspace(-9, -1, 65, device=device)
    x, w = torch.zeros(1, 1, device=device), torch.zeros(1, len(bias), 1, 1, device=device)
    for precision in ("ieee", "tf32", "tf32x3"):
        got = fw.ksmm(x, w, bias=bias, activation="gelu", algo="kernel", precision=precision)[0]
        exact = 0.5 * bias.double() * torch.special.erfc(bias.double() * -math.sqrt(0.5))
        torch.testing.assert_close(got.double(), exact, rtol=2e-5, atol=0)


@both_layouts
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_twice(activation, bs_last):
    """The second derivative is right, not only refused, for the kernel and every activation."""
    inputs = [t.detach().requires_grad_() for t in tensors([(2, 2, 3, 2)], (3,), "cpu", torch.float64, bs_last)]
    function = lambda x, w, b: fw.ksmm(x, w, bs_last, b, activation, "kernel")  # noqa: E731
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("algo", ["bsr", "sparse"])
def test_sparse_formats_twice(algo):
    inputs = tensors([(2, 2, 3, 2)], (3,), "cpu", torch.float64)[:2]
    assert torch.autograd.gradgradcheck(lambda x, w: fw.ksmm(x, w, algo=algo), inputs)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 2), (1, 2)], ids=str)
def test_only_some_require_grad(which, activation, device):
    inputs = tensors([(2, 3, 4, 5)], (9,), device, grad=False)
    some = [inputs[n].requires_grad_() for n in which]
    wide = [t.detach().cpu().double().requires_grad_(t.requires_grad) for t in inputs]
    got = fw.ksmm(*inputs[:2], bias=inputs[2], activation=activation)
    want = reference(*wide[:2], bias=wide[2], activation=activation)
    exact = torch.autograd.grad(want.sum(), [wide[n] for n in which])
    for one, other in zip(torch.autograd.grad(got.sum(), some), exact, strict=True):
        assert_close(one, other, torch.float32)


# As torch sees them


@both_layouts
@pytest.mark.parametrize(("features", "batch"), [(3, 1 << 16), (4200, 1 << 11)], ids=str)
def test_bias_of_a_long_batch(features, batch, bs_last):
    """Rows are added up by hundreds: one by one, what follows a large one would be lost."""
    upstream = torch.ones(features, batch) if bs_last else torch.ones(batch, features)
    upstream.select(int(bs_last), 0).fill_(2.0**24)
    bias = torch.zeros(features, requires_grad=True)
    w = torch.zeros(1, 1, 1, features, requires_grad=True)  # with it the core adds up, not torch
    y = fw.ksmm(torch.zeros_like(upstream), w, bs_last, bias)
    _, sums = torch.autograd.grad(y, (w, bias), upstream)
    assert (sums.double() - (2.0**24 + batch - 1)).abs().max() < 300


def op_arguments(op, device, bs_last, bias=True, activation="gelu", grad=True):
    x, w, b = tensors([(2, 3, 4, 5)], (7,), device, bs_last=bs_last, grad=grad)
    if op == "ksmm":
        return x, w, b if bias else None, activation, bs_last, "ieee"
    d_out = torch.randn((30, 7) if bs_last else (7, 30), device=device, requires_grad=grad)
    return x, d_out, 2, 5, bs_last, "ieee", bias


@both_layouts
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("op", ["ksmm", "ksmm_backward_weight"])
def test_opcheck(op, bias, bs_last, device):
    packet = getattr(torch.ops.fretwork, op).default
    for activation in ("none", "relu", "silu"):
        torch.library.opcheck(packet, op_arguments(op, device, bs_last, bias, activation))
    torch.library.opcheck(packet, op_arguments(op, device, bs_last, bias, grad=False))


@both_layouts
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend, bs_last, device):
    """One graph forward and one backward; a new batch size compiles again at most once."""
    torch._dynamo.reset()
    function = lambda x, b, *ws: fw.ksmm_chain(x, ws, bs_last, b, "gelu")  # noqa: E731
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for batch in ((4, 2), (9, 2), (11, 2)):
        x, *weights, bias = tensors([(6, 4, 5, 1), (1, 8, 3, 8)], batch, device, bs_last=bs_last)
        exact = lambda x, b, *ws: reference(x, *ws, bias=b, bs_last=bs_last, activation="gelu")  # noqa: E731
        compare(compiled, exact, [x, bias, *weights], torch.float32)


def test_shapes_are_checked_while_tracing():
    ops = torch.ops.fretwork
    with torch.device("meta"):
        x, w = torch.empty(3, 40), torch.empty(2, 3, 4, 5)
        for bad in [(x[:, 1:], w, None), (x, w[0], None), (x, w, x[0]), (x.half(), w, None), (x[None], w, None)]:
            with pytest.raises(RuntimeError, match=r"^ksmm: \w+: expected .+, got .+"):
                ops.ksmm(*bad, "none", False, "ieee")
            with pytest.raises(RuntimeError, match=r"^ksmm_chain: [\w\[\]]+: expected .+, got .+"):
                ops.ksmm_chain(bad[0], [bad[1], torch.empty(1, 7, 30, 1)], bad[2], "none", False, "ieee")


def test_export(tmp_path):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(2, 3, 4, 5))

        def forward(self, x):
            return fw.ksmm(x, self.w, activation="silu")

    model, x = Model(), torch.randn(4, 2, 40)
    program = torch.export.export(model, (x,), dynamic_shapes={"x": {0: torch.export.Dim("n", min=2, max=64)}})
    torch.export.save(program, tmp_path / "model.pt2")
    again, x = torch.export.load(tmp_path / "model.pt2").module(), torch.randn(9, 2, 40)
    assert torch.equal(again(x), model(x))


@both_layouts
@pytest.mark.parametrize("dims", [(0, None, None), (1, 0, None), (None, 2, 0), (None, None, 0), (1, 4, 0)], ids=str)
def test_vmap(dims, bs_last, device):
    function = lambda x, w, b: fw.ksmm(x, w, bs_last, b, "silu")  # noqa: E731
    check_vmap(function, tensors([(2, 3, 4, 2)], (5,), device, bs_last=bs_last, grad=False), dims)


@pytest.mark.parametrize("dims", [(0, None, None), (None, 0, 0)], ids=str)
@pytest.mark.parametrize("algo", ["kernel", "sparse"])
def test_vmap_over_none(algo, dims, device):
    """An empty result, and gradients of zero."""
    made = tensors([(2, 3, 4, 2)], (5,), device, grad=False)
    inputs = [(t if d is None else t.new_empty(0, *t.shape)).requires_grad_() for t, d in zip(made, dims, strict=True)]
    y = torch.func.vmap(lambda x, w, b: fw.ksmm(x, w, bias=b, algo=algo), dims)(*inputs)
    assert y.shape == (0, 5, 12)
    for t, gradient in zip(inputs, torch.autograd.grad(y.sum(), inputs), strict=True):
        assert gradient.shape == t.shape and not gradient.any()
    second = torch.zeros(1, 5, 12, 1, device=device)
    mapped = torch.func.vmap(lambda x, w: fw.ksmm_chain(x, [w, second], algo=algo), dims[:2])(*inputs[:2])
    assert mapped.shape == (0, 5, 5)


@both_layouts
@pytest.mark.parametrize("algo", ["bsr", "sparse"])
def test_sparse_formats_as_torch_sees_them(algo, bs_last, device):
    """Torch cannot trace or map its own sparse tensors, so an op holds them."""
    x, w, bias = tensors([(2, 4, 8, 3)], (5,), device, bs_last=bs_last)
    columns = x if bs_last else x.T
    torch.library.opcheck(torch.ops.fretwork.ksmm_sparse.default, (columns, w, algo == "bsr"))
    function = lambda x, w, b: fw.ksmm(x, w, bs_last, b, "silu", algo)  # noqa: E731
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    exact = lambda x, w, b: reference(x, w, bias=b, bs_last=bs_last, activation="silu")  # noqa: E731
    compare(compiled, exact, [x, w, bias], torch.float32)
    for dims in ((0, None, None), (None, 2, 0), (1, 4, None)):
        check_vmap(function, [t.detach() for t in (x, w, bias)], dims)
    assert function(x.to("meta"), w.to("meta"), bias.to("meta")).shape == function(x, w, bias).shape
    layer = fw.nn.KSLinear([(6, 4, 5, 1), (1, 8, 6, 4)], algo=algo, device=device)
    program = torch.export.export(layer, (torch.randn(5, 30, device=device),))
    x = torch.randn(5, 30, device=device)
    assert_close(program.module()(x), layer(x).double(), torch.float32)


def check_vmap(function, operands, dims):
    """Values and gradients are those of a loop, whatever is mapped."""
    inputs = []
    for t, dim in zip(operands, dims, strict=True):
        inputs.append((t if dim is None else torch.stack([t, 2 * t, -t], dim)).requires_grad_())
    pick = lambda n: [t if d is None else t.select(d, n) for t, d in zip(inputs, dims, strict=True)]  # noqa: E731
    want = torch.stack([function(*pick(n)) for n in range(3)])
    got = torch.func.vmap(function, dims)(*inputs)
    assert_close(got, want.double(), torch.float32)
    upstream = torch.randn_like(want)
    gradients = (torch.autograd.grad(y, inputs, upstream) for y in (got, want))
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other.double(), torch.float32, "gradient")


@both_layouts
@each_algo
def test_batched_gradients_and_nested_vmap(algo, bs_last, device):
    x, w, bias = tensors([(2, 3, 4, 2)], (5,), device, bs_last=bs_last)
    y = fw.ksmm(x, w, bs_last, bias, "gelu", algo)
    upstream = torch.randn(4, *y.shape, device=device)
    got = torch.autograd.grad(y, (x, w, bias), upstream, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y, (x, w, bias), u, retain_graph=True) for u in upstream]
    for one, others in zip(got, zip(*each, strict=True), strict=True):
        assert_close(one, torch.stack(others).double(), torch.float32)
    many = torch.randn(3, 4, *x.shape, device=device)
    function = lambda t: fw.ksmm(t, w.detach(), bs_last, algo=algo)  # noqa: E731
    nested = torch.func.vmap(torch.func.vmap(function))(many)
    want = torch.stack([torch.stack([function(t) for t in row]) for row in many])
    assert_close(nested, want.double(), torch.float32)


@pytest.mark.parametrize("algo", [*ALGOS, "auto"])
def test_autocast(algo, device):
    x, w, bias = tensors([(2, 3, 4, 5)], (9,), device)
    want = fw.ksmm(*(t.detach().bfloat16() for t in (x, w)), bias=bias.detach().bfloat16(), algo=algo)
    for given_x in (x, x.half()):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            y = fw.ksmm(given_x, w, bias=bias, algo=algo)
        assert_close(y, want.double(), torch.bfloat16)
        assert all(g.dtype == torch.float32 for g in torch.autograd.grad(y.float().sum(), (x, w, bias)))
    if device.type == "cpu":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert fw.ksmm(x.double(), w.double(), algo=algo).dtype == torch.float64
    with torch.autocast(device.type, dtype=torch.bfloat16):  # the op itself too, for graphs that hold it
        assert torch.ops.fretwork.ksmm(x, w, bias, "none", False, "ieee").dtype == torch.bfloat16


def test_inference_mode(device):
    x, w, bias = tensors([(2, 3, 4, 5)], (9,), device)
    with torch.inference_mode():
        y = fw.ksmm(x, w, bias=bias)
    assert y.is_inference() and torch.equal(y, fw.ksmm(x, w, bias=bias))


@pytest.mark.parametrize("precision", ["ieee", "tf32", "tf32x3", None])
def test_precisions(precision, device):
    x, w, _ = tensors([(2, 32, 64, 4)], (65,), device, grad=False)
    want = reference(x.cpu().double(), w.cpu().double())
    got = fw.ksmm(x, w, precision=precision).cpu().double()
    tolerance = 2e-3 if precision == "tf32" and device.type == "cuda" else 2e-5
    assert (got - want).abs().max() <= tolerance * want.abs().max()
    assert torch.equal(fw.ksmm_chain(x, [w], precision=precision).cpu().double(), got)


# Errors


def test_refused(device):
    x, w = torch.zeros(3, 40, device=device), torch.zeros(2, 3, 4, 5, device=device)
    bad = {
        r"x for w: expected \(…, 40\), a·c·d, got \(3, 41\)": {"x": x.new_zeros(3, 41)},
        r"x for w: expected \(40, …\), a·c·d, got \(3, 40\)": {"bs_last": True},
        r"x: expected \(…, features\), got \(\)": {"x": x[0, 0]},
        r"w: expected \(a, b, c, d\), each at least 1, got \(2, 3, 20\)": {"w": w.flatten(2)},
        r"w: expected \(a, b, c, d\), each at least 1, got \(2, 0, 4, 5\)": {"w": w[:, :0]},
        r"w: expected float32 like x, got float16": {"w": w.half()},
        r"x: expected float64, float32, float16 or bfloat16, got int64": {"x": x.long(), "w": w.long()},
        r"bias: expected \(30,\), got \(29,\)": {"bias": x[0, :29]},
        r"bias: expected float32 like x, got bfloat16": {"bias": x[0, :30].bfloat16()},
        r"algo: expected kernel, .* or auto, got 'fast'": {"algo": "fast"},
        r"activation: expected None, relu, gelu or silu, got 'tanh'": {"activation": "tanh"},
        r"precision: expected None, ieee, tf32 or tf32x3, got 'fast'": {"precision": "fast"},
        r"precision: expected None with the algo bmm, got 'tf32'": {"precision": "tf32", "algo": "bmm"},
        r"w: expected a torch.Tensor, got list": {"w": [1.0]},
        r"bs_last: expected True or False, got 'no'": {"bs_last": "no"},
        r"bs_last: expected True or False, got Tensor": {"bs_last": x[0, :30]},  # a bias in the wrong place
        r"x: expected a dense tensor, got one that is sparse_coo": {"x": x.to_sparse()},
        r"w: expected a dense tensor, got one that is sparse_coo": {"w": w.to_sparse()},
    }
    for text, change in bad.items():
        for algo in ({"algo": a} for a in ([None] if "algo" in change else ["kernel", "einsum"])):
            if "precision: expected None, ieee" in text and algo != {"algo": "kernel"}:
                continue
            call = {"x": x, "w": w} | ({} if algo["algo"] is None else algo) | change
            with pytest.raises((RuntimeError, TypeError), match=f"^ksmm: {text}"):
                fw.ksmm(**call)


def test_ops_refuse_what_the_door_would(device):
    """The core checks for those who call the op itself."""
    x, w = torch.zeros(3, 40, device=device), torch.zeros(2, 3, 4, 5, device=device)
    rest = ("none", False, "ieee")
    for arguments, text in [
        ((x[:, :39], w, None, *rest), r"ksmm: x: expected \(batch, a·c·d = 40\), got \(3, 39\)"),
        ((x[None], w, None, *rest), "ksmm: x: expected 2 dimensions, batch and features, got"),
        ((x, w[0], None, *rest), r"ksmm: w: expected \(a, b, c, d\), each at least 1, got \(3, 4, 5\)"),
        ((x, w, x[0], *rest), r"ksmm: bias: expected \(30,\), got \(40,\)"),
        ((x, w, None, "tanh", False, "ieee"), "ksmm: activation: expected none, relu, gelu or silu, got tanh"),
    ]:
        with pytest.raises(RuntimeError, match=text):
            torch.ops.fretwork.ksmm(*arguments)
    with pytest.raises(RuntimeError, match=r"ksmm_chain: x: expected \(batch, a·c·d = 40\), got \(3, 39\)"):
        torch.ops.fretwork.ksmm_chain(x[:, :39], [w], None, *rest)
    for a, d in [(0, 5), (2, 0), (7, 1), (2, 3)]:
        with pytest.raises(RuntimeError, match=r"ksmm_backward_weight: .*: expected .*, got"):
            torch.ops.fretwork.ksmm_backward_weight(x, x[:, :30], a, d, False, "ieee", True)


def test_refused_chains(device):
    x = torch.zeros(7, 40, device=device)
    weights = [torch.zeros(s, device=device) for s in [(2, 3, 5, 4), (5, 3, 3, 2)]]
    for chosen, text in [
        (weights, r"weights\[1\]: expected 24 .*, got 30 of"),
        (weights[1:], r"x for weights\[0\]: expected \(…, 30\), a·c·d, got \(7, 40\)"),
        ([weights[0], weights[1].half()], r"weights\[1\]: expected float32 like x, got float16"),
        ([], "weights: expected at least one, got none"),
        (None, "weights: expected a sequence of tensors, got NoneType"),
    ]:
        with pytest.raises((RuntimeError, TypeError), match=f"^ksmm_chain: {text}"):
            fw.ksmm_chain(x, chosen)
    with pytest.raises(RuntimeError, match=r"^ksmm_chain: precision: expected None, ieee, tf32 or tf32x3, got 'fast'"):
        fw.ksmm_chain(x, weights[:1], precision="fast")


def test_auto_is_the_kernel(device):
    x, w, _ = tensors([(2, 3, 4, 5)], (9,), device)
    assert torch.equal(fw.ksmm(x, w), fw.ksmm(x, w, algo="kernel"))
