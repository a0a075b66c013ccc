"""Kronecker patterns, conversions and projections: what they take and refuse, gradients, tracing, strides."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from conftest import dtypes_of
from hypothesis import given, settings
from hypothesis import strategies as st

import fretwork as fw
from fretwork import _library
from fretwork.patterns.kronecker import projected
from fretwork.patterns.pattern import opened

P = fw.KroneckerPattern
sizes = st.tuples(*(st.integers(1, 5),) * 4)


def mask_of(abcd):
    a, b, c, d = abcd
    return np.kron(np.kron(np.eye(a), np.ones((b, c))), np.eye(d)) != 0


def dense_of(w):
    """Weights at the places of the mask, which come in the order (i, j, l, k)."""
    dense = torch.zeros(mask_of(w.shape).shape, dtype=w.dtype)
    dense[torch.from_numpy(mask_of(w.shape))] = w.cpu().permute(0, 1, 3, 2).flatten()
    return dense.to(w.device)


@settings(max_examples=60, deadline=None)
@given(sizes)
def test_a_pattern_is_its_text(abcd):
    p = P(*abcd)
    assert p.text == "kronecker({},{},{},{})".format(*abcd) and repr(p) == f"KroneckerPattern{abcd}"
    assert fw.Pattern.parse(p.text) == p == pickle.loads(pickle.dumps(p)) == copy.deepcopy(p) == P(*p.weight_shape)
    assert np.array_equal(p.numpy_mask(), mask_of(abcd)) and p == p.T.T and p.key == p.text
    assert type(p.T) is P and p != fw.BlockLayout([[1]], 8)


@settings(max_examples=200, deadline=None)
@given(sizes, sizes)
def test_chain_rules(left, right):
    left, right = P(*left), P(*right)
    if left.chainable(right):
        terms = left.numpy_mask().astype(int) @ right.numpy_mask().astype(int)
        assert np.array_equal(terms > 0, left.product(right).numpy_mask()) and len(set(terms[terms > 0])) == 1
    else:
        with pytest.raises(ValueError, match=r"product: patterns: expected chainable ones.*, got \("):
            left.product(right)


@pytest.mark.parametrize("arguments, error, text", [
    ((1, 2.0, 3, 4), TypeError, "b: expected an int, got 2.0"),
    ((1, 2, True, 4), TypeError, "c: expected an int, got True"),
    ((1, 2, torch.tensor(True), 4), TypeError, r"c: expected an int, got tensor\(True\)"),
    ((1, 2, 3, torch.ones(2)), TypeError, "d: expected an int, got tensor"),
    ((1, 2, 3, torch.tensor(1.5)), TypeError, "d: expected an int, got tensor"),
    ((0, 2, 3, 4), ValueError, "a: expected at least 1, got 0"),
    ((1, 2**63, 1, 1), ValueError, "b: expected a number of 64 bits, got 9223372036854775808"),
    ((1, 2**32, 2**31, 1), ValueError, r"sizes: expected fewer than 2\^63 elements, got \(1,4294967296,2147483648,1\)"),
])  # fmt: skip
def test_patterns_refuse(arguments, error, text):
    with pytest.raises(error, match=f"^KroneckerPattern: {text}"):
        P(*arguments)


def test_integers_of_any_kind():
    assert P(np.int8(1), torch.tensor(2), np.uint64(3), 4) == P(1, 2, 3, 4)
    assert all(type(n) is int for n in P(np.int8(1), torch.tensor(2), np.uint64(3), 4).weight_shape)


def test_read_only():
    for name in ("nnz", "weight_shape", "_sizes", "other"):
        with pytest.raises(AttributeError):
            setattr(P(1, 2, 3, 4), name, 0)


def test_block_layouts():
    for abcd in [(3, 16, 8, 1), (2, 256, 96, 1), (1, 9, 11, 1)]:
        layout = P(*abcd).to_block_layout()
        assert isinstance(layout, fw.BlockLayout) and np.array_equal(layout.numpy_mask()[0], P(*abcd).numpy_mask())
    for abcd in [(3, 16, 8, 2), (3, 16, 7, 1), (2**20, 8, 8, 1)]:
        with pytest.raises(ValueError, match=r"^to_block_layout: pattern: expected .*, got \("):
            P(*abcd).to_block_layout()


def test_the_c_interface_refuses_other_patterns():
    core = _library.core()
    with opened(fw.BlockLayout([[1]], 8)) as handle:
        assert core.fretwork_kronecker_sizes(handle, _library.int64s((0,) * 4)) == -1
        assert "expected a Kronecker pattern" in _library.last_error()
        assert not core.fretwork_kronecker_block_layout(handle)
    assert core.fretwork_kronecker_chainable(_library.int64s((0, 1, 1, 1)), _library.int64s((1, 1, 1, 1))) == -1


# Conversions


@settings(max_examples=30, deadline=None)
@given(sizes, st.permutations(range(4)), st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]))
def test_any_strides(device, abcd, order, dtype):
    w = torch.randn([abcd[n] for n in order]).to(device, dtype).permute(*np.argsort(order).tolist())
    dense = fw.kronecker.to_dense(w)
    assert torch.equal(dense, dense_of(w))
    turned = torch.stack([dense, torch.full_like(dense, math.nan)], -1).mT.contiguous().mT[..., 0]
    assert torch.equal(fw.kronecker.from_dense(turned, P(*abcd)), w)
    assert torch.equal(fw.kronecker.from_dense(dense.mT, P(*abcd).T), w.transpose(1, 2))


def test_bits_survive(device):
    for dtype in dtypes_of(device):
        odd = torch.tensor([math.nan, -math.inf, -0.0, torch.finfo(dtype).smallest_normal / 4], dtype=dtype)
        w = odd.to(device).repeat(6).reshape(2, 2, 3, 2)
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[w.element_size()]
        back = fw.kronecker.from_dense(fw.kronecker.to_dense(w), P(2, 2, 3, 2))
        assert torch.equal(back.view(bits), w.view(bits))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_what_lies_outside_is_named(dtype, device):
    if dtype not in dtypes_of(device):
        pytest.skip("float64 is for the CPU")
    p = P(2, 3, 4, 5)
    dense = fw.kronecker.to_dense(torch.ones(2, 3, 4, 5, dtype=dtype, device=device))
    assert fw.kronecker.from_dense(torch.where(dense == 0, -0.0, dense), p).eq(1).all()
    dense[29, 39 - 20] = torch.finfo(dtype).tiny / 2  # a subnormal in the last row
    with pytest.raises(
        RuntimeError, match=r"from_dense: dense: expected zero outside kronecker.*, got .* at \(29, 19\)"
    ):
        fw.kronecker.from_dense(dense, p)
    dense[3, 7] = math.nan
    with pytest.raises(RuntimeError, match=r"got nan at \(3, 7\)"):
        fw.kronecker.from_dense(dense, p)


def test_conversions_refuse():
    k, w = fw.kronecker, torch.ones(2, 3, 4, 5)
    for call, error, text in [
        (lambda: k.to_dense(None), TypeError, r"to_dense: w: expected a torch.Tensor, got NoneType"),
        (lambda: k.to_dense(w[0]), RuntimeError, r"to_dense: w: expected \(a, b, c, d\).*, got \(3, 4, 5\)"),
        (lambda: k.to_dense(w.int()), RuntimeError, r"to_dense: w: expected float64, .*, got int32"),
        (lambda: k.to_dense(w[:0]), RuntimeError, r"to_dense: w: expected .* each at least 1, got \(0, 3, 4, 5\)"),
        (lambda: k.from_dense(w, P(1, 2, 3, 4)), RuntimeError, r"from_dense: dense: expected \(8, 12\) for kronecker"),
        (lambda: k.from_dense(w[0, 0], P(1, 2**20, 2**20, 4)), RuntimeError, r"from_dense: dense: expected \(4194304"),
        (lambda: k.from_dense(w[0, 0], "text"), TypeError, "from_dense: pattern: expected a KroneckerPattern or"),
        (lambda: k.from_dense(w[0, 0], (1, 0, 1, 1)), ValueError, "from_dense: pattern: b: expected at least 1, got 0"),
        (lambda: k.to_dense(w[0].to("meta")), RuntimeError, r"to_dense: w: expected \(a, b, c, d\).*, got \(3, 4, 5\)"),
        (lambda: torch.func.jvp(k.to_dense, (w,), (w,)), NotImplementedError, "to_dense: w: expected .* tangent, got"),
        (
            lambda: torch.func.jvp(lambda dense: k.from_dense(dense, P(1, 4, 5, 1)), (w[0, 0],), (w[0, 0],)),
            NotImplementedError,
            "from_dense: dense: expected .* tangent, got",
        ),
        (lambda: k.from_dense(w.to("meta")[0, 0], (1, 4, 5, 1)), RuntimeError, "dense: expected .* data, got one on"),
        (lambda: k.plan([]), ValueError, "plan: patterns: expected at least one, got none"),
        (lambda: k.plan([(1, 2, 3, 4)], 90), TypeError, "plan: arch: expected a str, got int"),
    ]:
        with pytest.raises(error, match=text):
            call()


def test_gradients_and_tracing():
    w = torch.randn(2, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    p = P(2, 3, 2, 2)
    assert torch.autograd.gradcheck(fw.kronecker.to_dense, w) and torch.autograd.gradgradcheck(fw.kronecker.to_dense, w)
    dense = fw.kronecker.to_dense(w.detach()).requires_grad_()
    (gradient,) = torch.autograd.grad(fw.kronecker.from_dense(dense, p).square().sum(), dense)
    assert torch.equal(gradient, 2 * dense)
    for name, arguments in [("to_dense", (w,)), ("from_dense", (dense, 2, 3, 2, 2))]:
        torch.library.opcheck(getattr(torch.ops.fretwork, f"kronecker_{name}").default, arguments)
    compiled = torch.compile(lambda w: fw.kronecker.to_dense(w).sin(), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(w), fw.kronecker.to_dense(w).sin())
    back = torch.compile(lambda dense: fw.kronecker.from_dense(dense, p), fullgraph=True, backend="aot_eager")
    assert torch.equal(back(dense), w)
    with pytest.raises(RuntimeError, match=r"from_dense: dense: expected zero outside kronecker\(2,3,2,2\), got"):
        back(torch.ones_like(dense))
    batch = torch.randn(2, 3, 4, 2, 2)
    mapped = torch.vmap(fw.kronecker.to_dense, in_dims=2)(batch)
    assert torch.equal(mapped, torch.stack([fw.kronecker.to_dense(one) for one in batch.unbind(2)]))
    assert torch.vmap(fw.kronecker.to_dense, in_dims=2)(batch[:, :, :0]).shape == (0, 12, 8)


# Projection


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_project_keeps_dtype_and_ignores_strides(dtype):
    W = torch.randn(20, 12, dtype=torch.float64).to(dtype).mT.requires_grad_()
    weights, error = fw.kronecker.project(W, [(5, 4, 4, 1), (1, 3, 5, 4)])
    assert all(w.dtype == dtype and not w.requires_grad for w in weights) and type(error) is float
    again, same = fw.kronecker.project(W.detach().contiguous(), fw.kronecker.monarch(12, 20, 3, 5))
    assert error == same and all(torch.equal(w, a) for w, a in zip(weights, again, strict=True))
    K = dense_of(weights[1]).double() @ dense_of(weights[0]).double()
    got = ((W.double() - K).norm() / W.double().norm()).item()
    assert got == pytest.approx(error, rel=0.02)


def test_large_values_do_not_overflow_half():
    W = 300.0 * torch.ones(64, 64, dtype=torch.float16)
    weights, error = fw.kronecker.project(W, fw.kronecker.butterfly(64))
    assert error < 1e-6 and max(w.abs().max().item() for w in weights) < 10


def test_project_refuses():
    W = torch.zeros(12, 20)
    monarch = fw.kronecker.monarch(12, 20, 3, 5)
    for call, error, text in [
        (lambda: fw.kronecker.project(None, monarch), TypeError, "W: expected a torch.Tensor, got NoneType"),
        (lambda: fw.kronecker.project(W[0], monarch), RuntimeError, "W: expected a floating .* matrix, got .*20"),
        (
            lambda: fw.kronecker.project(W.int(), monarch),
            RuntimeError,
            "W: expected a floating .* matrix, got torch.int32",
        ),
        (lambda: fw.kronecker.project(W + math.nan, monarch), RuntimeError, r"W: expected finite .* at \(0, 0\)"),
        (lambda: fw.kronecker.project(W, []), RuntimeError, "patterns: expected at least one, got none"),
        (lambda: fw.kronecker.project(W, monarch[0]), TypeError, "patterns: expected a sequence of KroneckerPattern"),
        (lambda: fw.kronecker.project(W, [monarch[0], (1, 2)]), TypeError, r"patterns\[1\]: expected a Kronecker"),
        (
            lambda: fw.kronecker.project(W, [monarch[0], (1, 0, 1, 1)]),
            ValueError,
            r"patterns\[1\]: b: expected at least",
        ),
        (
            lambda: fw.kronecker.project(W, monarch[::-1]),
            RuntimeError,
            r"patterns\[1\]: expected one that chains .*, got",
        ),
        (lambda: fw.kronecker.project(W.T, monarch), RuntimeError, r"W: expected \(12, 20\) .*, got \(20, 12\)"),
        (lambda: fw.kronecker.project(W.to("meta"), monarch), RuntimeError, "W: expected .* data, got one on meta"),
        (lambda: fw.kronecker.monarch(12, 20, 3.0, 5), TypeError, "p: expected an int, got 3.0"),
        (lambda: fw.kronecker.monarch(12, 0, 3, 5), ValueError, "in_features: expected at least 1, got 0"),
        (lambda: fw.kronecker.butterfly(2**70), ValueError, "n: expected a number of 64 bits"),
    ]:
        with pytest.raises(error, match=f"^(project|monarch|butterfly): {text}"):
            call()


def test_the_largest_butterfly_fits_its_room():
    assert len(fw.kronecker.butterfly(2**30)) == 30 and fw.kronecker.butterfly(2) == [P(1, 2, 2, 1)]
    with pytest.raises(ValueError, match=r"fewer than 2\^63 elements"):
        fw.kronecker.butterfly(2**62)


def test_project_gives_the_same_on_any_number_of_threads():
    W, patterns = torch.randn(60, 84, dtype=torch.float64).numpy(), fw.kronecker.monarch(60, 84, 6, 7)
    one, error = projected(W, patterns, 1)
    for threads in (0, 2, 5, 100):
        more, same = projected(W, patterns, threads)
        assert same == error and all((a == b).all() for a, b in zip(one, more, strict=True))
