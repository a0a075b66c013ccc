"""KSLinear beside torch.nn.Linear: values, gradients, initial weights, state, projection, errors; and KSMM's own."""

import copy
import math
import pickle

import pytest
import torch
from conftest import assert_close, dtypes_of

import fretwork as fw
from fretwork.compat import ksmm

PATTERNS = [(6, 4, 5, 1), (1, 8, 6, 4)]  # 30 -> 24 -> 32


def product(layer):
    """The float64 matrix, from the definition of a factor alone."""
    matrix = torch.eye(layer.in_features, dtype=torch.float64)
    for w in layer.weights:
        a, b, c, d = w.shape
        factor = torch.zeros(a, b, d, a, c, d, dtype=torch.float64)
        for i in range(a):
            for l in range(d):
                factor[i, :, l, i, :, l] = w[i, :, :, l].detach().cpu().double()
        matrix = factor.reshape(a * b * d, a * c * d) @ matrix
    return matrix


@pytest.mark.parametrize("lead", [(), (1,), (7,), (3, 5), (0,), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bs_last", [False, True], ids=["first", "last"])
def test_as_the_dense_layer(bs_last, bias, lead, device):
    for dtype in (d for d in dtypes_of(device) if d.itemsize > 2):
        layer = fw.nn.KSLinear(PATTERNS, bias=bias, dtype=dtype, bs_last=bs_last, device=device)
        x = torch.randn(30, *lead).to(device, dtype) if bs_last else torch.randn(*lead, 30).to(device, dtype)
        x.requires_grad_()
        x64, matrix = x.detach().cpu().double().requires_grad_(), product(layer)
        rows = x64.movedim(0, -1) if bs_last else x64
        want = torch.nn.functional.linear(rows, matrix, layer.bias.detach().cpu().double() if bias else None)
        want = want.movedim(-1, 0) if bs_last else want
        got = layer(x)
        assert_close(got, want, dtype)
        assert_close(layer.to_dense(), matrix, dtype)
        upstream = torch.randn(want.shape, dtype=torch.float64)
        (d_x,), (exact,) = torch.autograd.grad(got, x, upstream.to(got)), torch.autograd.grad(want, x64, upstream)
        assert_close(d_x, exact, dtype, "gradient of x")


def test_shapes_names_and_words():
    layer = fw.nn.KSLinear([fw.KroneckerPattern(*p) for p in PATTERNS])
    assert [(n, tuple(p.shape)) for n, p in layer.named_parameters()] == [
        ("bias", (32,)),
        ("weights.0", PATTERNS[0]),
        ("weights.1", PATTERNS[1]),
    ]
    assert layer.patterns == [fw.KroneckerPattern(*p) for p in PATTERNS]
    assert "bs_last" not in repr(layer) and "bs_last=True" in repr(fw.nn.KSLinear(PATTERNS, bs_last=True))
    assert layer.plan() == "0: cpu\n1: cpu"
    meta = fw.nn.KSLinear(PATTERNS, device="meta")
    assert meta(torch.empty(5, 30, device="meta")).shape == (5, 32) and meta.to_dense().shape == (32, 30)


def test_initial_weights():
    layer = fw.nn.KSLinear([(2, 30, 50, 10), (20, 20, 30, 1)])
    for values, fan_in in [(layer.weights[0], 50), (layer.weights[1], 30), (layer.bias, 1000)]:
        bound = fan_in**-0.5
        assert 0.8 * bound < values.abs().max() <= bound
    before = [p.clone() for p in layer.parameters()]
    layer.reset_parameters()
    assert not any(torch.equal(b, p) for b, p in zip(before, layer.parameters(), strict=True))


def test_given_weights():
    weights = [torch.randn(p, dtype=torch.float64) for p in PATTERNS]
    layer = fw.nn.KSLinear(PATTERNS, weights)
    assert all(p.dtype == torch.float64 for p in layer.parameters())
    assert all(torch.equal(w, p) for w, p in zip(weights, layer.weights, strict=True))
    shared = fw.nn.KSLinear(PATTERNS, list(layer.weights))
    assert all(w is p for w, p in zip(layer.weights, shared.weights, strict=True))
    assert all(p.dtype == torch.float16 for p in fw.nn.KSLinear(PATTERNS, weights, dtype=torch.float16).parameters())


def test_frozen_weights_stay_frozen():
    frozen = torch.nn.Parameter(torch.zeros(2, 3, 4, 5), requires_grad=False)
    layer = fw.nn.KSLinear([(2, 3, 4, 5)], [frozen], dtype=torch.float16)
    assert not layer.weights[0].requires_grad and layer.bias.requires_grad


def test_state_copies_and_moves(device):
    layer = fw.nn.KSLinear(PATTERNS, device=device)
    x = torch.randn(5, 30, device=device)
    loaded = fw.nn.KSLinear(PATTERNS, device=device)
    loaded.load_state_dict(layer.state_dict())
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert other.patterns == layer.patterns and torch.equal(other(x), layer(x))
        with torch.no_grad():
            other.weights[0].zero_()
        assert not torch.equal(other(x), layer(x))
    assert layer.half().weights[1].dtype == torch.float16


def test_from_dense_keeps_what_the_dense_layer_was(device):
    dense = torch.nn.Linear(20, 12, device=device).eval()
    dense.weight.requires_grad_(False)
    layer = fw.nn.KSLinear.from_dense(dense, fw.kronecker.monarch(12, 20, 3, 5))
    assert not layer.training and layer.bias.requires_grad and layer.weights[0].device == dense.weight.device
    assert not any(w.requires_grad for w in layer.weights)
    _, error = fw.kronecker.project(dense.weight, layer.patterns)
    difference = (layer.to_dense() - dense.weight).norm() / dense.weight.norm()
    assert abs(float(difference) - float(error)) < 1e-5
    with torch.no_grad():
        layer.bias.add_(1)
    assert not torch.equal(layer.bias, dense.bias)
    bare = fw.nn.KSLinear.from_dense(torch.nn.Linear(20, 12, bias=False).double(), [(5, 4, 4, 1), (1, 3, 5, 4)])
    assert bare.bias is None and bare.weights[0].dtype == torch.float64


def test_in_a_compiled_model(device):
    layer = fw.nn.KSLinear(PATTERNS, device=device)
    torch._dynamo.reset()
    model = torch.nn.Sequential(layer, torch.nn.ReLU(), torch.nn.Linear(32, 3, device=device))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for rows in (4, 9):  # the second makes the batch symbolic
        x = torch.randn(rows, 30, device=device)
        assert_close(compiled(x), model(x).double(), torch.float32)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            assert_close(compiled(x), model(x).double(), torch.bfloat16)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert_close(layer.to_dense(), product(layer), torch.float32)
    compiled(x).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("change, text", [
    ({"patterns": []}, "patterns: expected at least one, got none"),
    ({"patterns": [(6, 4, 5, 1), (1, 8, 6, 5)]}, r"patterns\[1\]: expected 24 in features .*, got 30 of"),
    ({"patterns": [(6, 4, 5)]}, r"patterns\[0\]: expected a KroneckerPattern or \(a, b, c, d\), got \(6, 4, 5\)"),
    ({"patterns": [(6, 0, 5, 1)]}, r"patterns\[0\]: .*expected .*, got 0"),
    ({"algo": "fast"}, "algo: expected kernel, .* or auto, got 'fast'"),
    ({"weights": [torch.zeros(6, 4, 5, 1)]}, "weights: expected 2, one for each pattern, got 1"),
    ({"weights": [torch.zeros(6, 4, 5, 1), torch.zeros(1, 6, 8, 4)]}, r"weights\[1\]: expected \(1, 8, 6, 4\) of its"),
    ({"weights": [torch.zeros(6, 4, 5, 1), None]}, r"weights\[1\]: expected a torch.Tensor, got NoneType"),
    ({"weights": [torch.zeros(6, 4, 5, 1), torch.zeros(1, 8, 6, 4).half()]}, r"weights\[1\]: expected torch.float32"),
    ({"weights": [torch.zeros(p).int() for p in PATTERNS]}, r"weights\[0\]: expected float64, .*, got torch.int32"),
    ({"weights": 3}, "weights: expected a sequence of tensors, got int"),
    ({"dtype": torch.int32}, "dtype: expected float64, float32, float16 or bfloat16, got torch.int32"),
    ({"dtype": torch.complex64}, "dtype: expected float64, float32, float16 or bfloat16, got torch.complex64"),
    ({"bias": torch.zeros(32)}, "bias: expected True or False, got Tensor"),
    ({"bs_last": "no"}, "bs_last: expected True or False, got 'no'"),
])  # fmt: skip
def test_refused(change, text):
    with pytest.raises((TypeError, ValueError), match=f"^KSLinear: {text}"):
        fw.nn.KSLinear(**({"patterns": PATTERNS} | change))


def test_refused_inputs():
    layer = fw.nn.KSLinear(PATTERNS)
    with pytest.raises(RuntimeError, match=r"^KSLinear: x: expected \(…, 30\), got \(5, 31\)"):
        layer(torch.ones(5, 31))
    with pytest.raises(RuntimeError, match=r"^KSLinear: x: expected \(30, …\), got \(5, 30\)"):
        fw.nn.KSLinear(PATTERNS, bs_last=True)(torch.ones(5, 30))
    with pytest.raises(RuntimeError, match=r"^KSLinear: x: expected torch.float32 like the weights, got torch.float16"):
        layer(torch.ones(5, 30).half())
    with pytest.raises(TypeError, match=r"^KSLinear: linear: expected a torch.nn.Linear, got Identity"):
        fw.nn.KSLinear.from_dense(torch.nn.Identity(), PATTERNS)
    with pytest.raises(TypeError, match=r"^KSLinear: x: expected a torch.Tensor, got list"):
        layer([1.0])
    for sizes, patterns, text in [
        ((31, 32), PATTERNS, r"linear.weight: expected \(32, 30\) .*, got \(32, 31\)"),
        ((6, 6), [(1, 3, 3, 2), (3, 2, 2, 1)], r"patterns\[1\]: expected one that chains .*, got"),
    ]:
        with pytest.raises(ValueError, match=f"^KSLinear: {text}"):
            fw.nn.KSLinear.from_dense(torch.nn.Linear(*sizes), patterns)


def stored_by_the_original(w, algo):
    """A factor (a, b, c, d) in the shape that KSMM keeps for an algo."""
    a, b, c, d = w.shape
    match algo:
        case "kernel":
            return w.permute(0, 3, 2, 1).reshape(a * d * c, b)
        case "bmm":
            return w.permute(0, 3, 1, 2).reshape(a * d, b, c)
        case "dense":
            return fw.kronecker.to_dense(w)
        case "sparse":
            return fw.kronecker.to_dense(w).to_sparse_csr()
        case "bsr":
            dense = fw.kronecker.to_dense(w.permute(0, 3, 1, 2).reshape(a * d, b, c, 1))
            return dense.to_sparse_bsr((math.gcd(b, c),) * 2)
    return w


@pytest.mark.parametrize("bs_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("algo", ["kernel", "bmm", "einsum", "dense", "sparse", "bsr"])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_checkpoints_of_the_original_layer(algo, bs_last):
    weights = [torch.randn(p) for p in PATTERNS]
    bias = torch.randn(32)
    state = {f"layer.factors.{n}": stored_by_the_original(w, algo) for n, w in enumerate(weights)}
    state["layer.bias"] = bias[:, None] if bs_last else bias
    layer = ksmm.KSLinear(PATTERNS, None, True, algo, torch.float32, bs_last)
    torch.nn.ModuleDict({"layer": layer}).load_state_dict(state)
    assert all(torch.equal(w, want) for w, want in zip(layer.weights, weights, strict=True))
    assert torch.equal(layer.bias, bias)
    layer.load_state_dict(layer.state_dict())  # and its own
    for n in range(2):
        bad = {**{k.removeprefix("layer."): v for k, v in state.items()}, f"factors.{n}": torch.randn(3, 3)}
        with pytest.raises(RuntimeError, match=f"factors.{n}|weights.{n}"):
            layer.load_state_dict(bad)


@pytest.mark.parametrize(
    ("algo", "other"), [("kernel", "bmm"), ("kernel", "einsum"), ("bmm", "kernel"), ("bmm", "einsum")]
)
def test_checkpoints_of_another_algo_are_refused(algo, other):
    """They have as many elements, in another order."""
    layer = ksmm.KSLinear([(2, 3, 4, 5)], bias=False, algo=algo)
    state = {"factors.0": stored_by_the_original(torch.randn(2, 3, 4, 5), other)}
    with pytest.raises(RuntimeError, match=rf"KSLinear: factors.0: of algo {algo}: expected \(.*\), got \("):
        layer.load_state_dict(state)


def test_what_the_original_layer_offers(device):
    layer = ksmm.KSLinear(PATTERNS, algo="kernel", dtype=torch.float32, device=str(device))
    assert (layer.in_size, layer.out_size, layer.num_mat) == (30, 32, 2)
    assert [tuple(f.shape) for f in layer.factors] == PATTERNS
    assert [(a, b, c, d) for a, b, c, d in layer.patterns] == PATTERNS == [tuple(p) for p in layer.patterns]
    assert layer.patterns[-1][1] == 8 and all(len(p) == 4 for p in layer.patterns)
    assert layer.dtype == torch.float32 and layer.device.type == torch.device(device).type
    assert_close(layer.get_dense_product(), product(layer), torch.float32)
    assert layer.double().dtype == torch.float64  # as it is now
    assert set(layer.state_dict()) == {"weights.0", "weights.1", "bias"}


def test_the_original_layer_copies_what_it_is_given():
    for given in (torch.ones, lambda *p: torch.nn.Parameter(torch.ones(*p), requires_grad=False)):
        weights = [given(*p) for p in PATTERNS]
        layer, other = (
            ksmm.KSLinear(PATTERNS, weights, algo=algo, dtype=torch.float32) for algo in ("kernel", "dense")
        )
        assert all(w.requires_grad for w in layer.weights)
        with torch.no_grad():
            layer.weights[0].zero_()
        assert torch.equal(other.weights[0], torch.ones(PATTERNS[0])) and torch.equal(other.weights[0], weights[0])


def test_the_original_layer(device):
    layer = ksmm.KSLinear(PATTERNS)
    assert layer.algo == "dense" and all(p.dtype == torch.float16 for p in layer.parameters())
    for algo in ("dense", "kernel", "bmm"):
        layer = ksmm.KSLinear(PATTERNS, None, False, algo, torch.float32, True, str(device))
        x = torch.randn(30, 2, 5, device=device)
        assert_close(layer(x), torch.einsum("oi,inm->onm", product(layer), x.cpu().double()), torch.float32)


def test_dense_wins_where_the_rows_say_so():
    """Of one block with three offsets dense was clearly faster when measured, of Monarch's factors clearly slower."""

    def wins(patterns, rows, arch="sm_90a", dtype=torch.float16):
        return fw.kronecker.dense_wins([fw.KroneckerPattern(*p) for p in patterns], arch, dtype, batch=rows)

    assert wins([(1, 768, 1024, 3)], 1000) and wins([(1, 1024, 1024, 3)], 384, dtype=torch.bfloat16)
    assert not wins([(64, 64, 64, 1)], 4096) and not wins([(64, 64, 64, 1), (1, 64, 64, 64)], 4096)
    assert not wins([(1, 768, 1024, 3)], 1000, arch="cpu") and not wins([(1, 768, 1024, 3)], 1000, dtype=torch.float32)
    assert not wins([(1, 768, 1024, 3)], 0)
    with pytest.raises(ValueError, match=r"^dense_wins: arch: expected cpu, a GPU .*, got tpu"):
        wins([(1, 4, 4, 1)], 5, arch="tpu")
    with pytest.raises(TypeError, match=r"^dense_wins: arch: expected a str, got int"):
        wins([(1, 4, 4, 1)], 5, arch=90)
    with pytest.raises(ValueError, match=r"^dense_wins: patterns: expected at least one, got none"):
        wins([], 5)


@pytest.fixture
def dense_always_wins(monkeypatch, device):
    if device.type != "cuda":
        monkeypatch.setattr("fretwork.nn.ks_linear.may_keep_dense", lambda _: True)
    monkeypatch.setattr("fretwork.nn.ks_linear.expects_dense", lambda *_: True)


@pytest.mark.parametrize("bs_last", [False, True], ids=["first", "last"])
@pytest.mark.usefixtures("dense_always_wins")
def test_cached_dense_matrix(bs_last, device):
    layer = fw.nn.KSLinear(PATTERNS, bs_last=bs_last, device=device, cache_dense=True)
    plain = fw.nn.KSLinear(PATTERNS, list(layer.weights), bs_last=bs_last, device=device)
    plain.bias = layer.bias
    x = torch.randn(30, 7, device=device) if bs_last else torch.randn(2, 7, 30, device=device)
    assert "cache_dense=True" in repr(layer) and "cache_dense" not in repr(plain)
    assert layer(x).requires_grad and layer._dense is None  # in training
    layer.eval()
    assert layer(x).requires_grad and layer._dense is None  # gradients of the weights are recorded
    with torch.no_grad():
        torch.testing.assert_close(layer(x), plain(x))
        kept = layer._dense.matrix
        layer(x)
        assert layer._dense.matrix is kept
        layer.weights[0].mul_(2)
        torch.testing.assert_close(layer(x), plain(x))  # which has the same parameter
        assert layer._dense.matrix is not kept
        assert copy.deepcopy(layer)._dense is None and layer.double()._dense is None
        torch.testing.assert_close(layer(x.double()), plain.double()(x.double()))
        layer.train()
        assert layer._dense is None
    layer.eval().requires_grad_(False)
    x = x.double().requires_grad_()
    got, want = (torch.autograd.grad(one(x).square().sum(), x)[0] for one in (layer, plain))
    torch.testing.assert_close(got, want)
    assert layer._dense is not None
    with torch.inference_mode():
        layer.eval()(x.detach())
    torch.testing.assert_close(torch.autograd.grad(layer(x).square().sum(), x)[0], want)  # as any matrix, later
    layer.weights = torch.nn.ParameterList(w.detach() * 3 for w in layer.weights)  # others, in the same state
    bias = layer.bias[:, None] if bs_last else layer.bias
    torch.testing.assert_close(layer.requires_grad_(False)(x), plain(x) * 9 - bias * 8)


def test_cached_dense_matrix_is_for_our_kernels():
    with pytest.raises(ValueError, match=r"^KSLinear: cache_dense: expected False with the algo bmm, got True"):
        fw.nn.KSLinear(PATTERNS, algo="bmm", cache_dense=True)
    with pytest.raises(TypeError, match=r"^KSLinear: cache_dense: expected"):
        fw.nn.KSLinear(PATTERNS, cache_dense="yes")
