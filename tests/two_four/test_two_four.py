"""2:4 matrices: strides, slices, own layouts, files, what torch asks of an op, second derivatives, training."""

import copy
import io
import itertools
import logging
import os
import pickle
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, dtypes_of
from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass as torch_compress

import fretwork as fw
from fretwork import two_four
from fretwork._library import core

ops = torch.ops.fretwork
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
BYTES = [torch.int8, torch.uint8, *FP8]
SIGNED = {torch.uint8: torch.int8, torch.uint16: torch.int16, torch.uint32: torch.int32}


def pruned(rows, cols, dtype=torch.float32, device="cpu", dim=-1):
    """Random, with as many non-zeros as there may be."""
    A = torch.randint(1, 100, (rows, cols)) * (torch.randint(0, 2, (rows, cols)) * 2 - 1)
    A = A.abs() if dtype == torch.uint8 else A
    A = (A if dtype in (torch.int8, torch.uint8) else A / 64).to(dtype)
    return two_four.prune(A.to(device), dim=dim)


def same(got, want):
    torch.testing.assert_close(got.detach().cpu().double(), want.detach().cpu().double(), rtol=0, atol=0)


def spread(t):
    """The same numbers at other strides: a cut of a larger tensor, transposed in memory, and every second one."""
    wide = torch.empty(*t.shape[:-1], t.shape[-1] + 3, dtype=t.dtype, device=t.device)
    wide[..., 1:-2] = t
    twice = torch.empty(*t.shape[:-2], 2 * t.shape[-2], 2 * t.shape[-1], dtype=t.dtype, device=t.device)
    twice[..., ::2, ::2] = t
    return [t, wide[..., 1:-2], t.mT.contiguous().mT, twice[..., ::2, ::2]]


# The form


@pytest.mark.parametrize("dim", [-1, 0])
def test_every_stride(dim, device):
    A = pruned(24, 32, torch.bfloat16, device, dim)
    s = two_four.compress(A, dim=dim)
    for view in spread(A):
        t = two_four.compress(view, dim=dim)
        assert torch.equal(t.values, s.values) and torch.equal(t.metadata, s.metadata)
        same(two_four.prune(view, dim=dim), A)
        assert two_four.check(view, dim=dim) == (True, None)
        same(ops.two_four_gather(view, s.metadata, dim % 2), s.values)
    B = torch.randn(2, 32, 5, device=device).bfloat16() if dim else torch.randn(2, 5, 24, device=device).bfloat16()
    want = A.double() @ B.double() if dim else B.double() @ A.double()
    for values, words, b in itertools.product(spread(s.values), spread(s.metadata), spread(B)):
        t = fw.TwoFour(values, words, dim)
        same(t.to_dense(), A)
        assert_close(two_four.matmul(t, b) if dim else two_four.matmul(b, t), want, torch.bfloat16)


@pytest.mark.parametrize("dim", [-1, 0])
def test_lines_lie_in_one_piece(dim, device):
    """What kernels count on, whatever the axis."""
    A = pruned(64, 64, torch.float16, device, dim)
    s, (row_values, row_words, col_values, col_words) = (
        two_four.compress(A, dim),
        ops.two_four_prune_both(A, torch.int16),
    )
    joined = two_four.cat([s, s], dim=1 + dim)
    for values, words, axis in [
        (s.values, s.metadata, dim),
        (joined.values, joined.metadata, dim),
        (row_values, row_words, -1),
        (col_values, col_words, 0),
        (ops.two_four_gather(A, s.metadata, dim % 2), s.metadata, dim),
    ]:
        assert values.stride(axis) == words.stride(axis) == 1


def test_slices(device):
    A = pruned(48, 128, torch.float16, device)
    s = two_four.compress(A)
    for index in [
        slice(3, 20),
        slice(None),
        slice(40, None),
        slice(-8, None),
        slice(9, 9),
        slice(9, 3),
        (slice(1, 2), slice(16, 64)),
        (slice(None), slice(112, None)),
        (slice(None), slice(-16, 500)),
    ]:
        t = s[index]
        same(t.to_dense(), A[index] if index != slice(9, 3) else A[:0])
        same(s.T[index[::-1] if isinstance(index, tuple) else (slice(None), index)].to_dense(), t.to_dense().T)
        if t.values.numel():
            assert t.values.untyped_storage().data_ptr() == s.values.untyped_storage().data_ptr()
    B = torch.randn(48, 5, device=device).half()
    assert_close(two_four.matmul(s[3:20, 16:64], B), A[3:20, 16:64].double() @ B.double(), torch.float16)
    for index in [
        (slice(None), slice(8, 64)),
        (slice(None), slice(0, 20)),
        slice(0, 8, 2),
        3,
        (slice(None), 3),
        (slice(0, 1),) * 3,
    ]:
        with pytest.raises((ValueError, TypeError), match=r"TwoFour: index: expected .*got "):
            s[index]


def test_repr_and_properties(device):
    s = two_four.compress(torch.eye(8, device=device))
    assert repr(s).startswith("TwoFour(shape=(8, 8), dtype=torch.float32, dim=1, metadata=torch.int16")
    s = fw.TwoFour(s.values.requires_grad_(), s.metadata)
    assert "requires_grad=True" in repr(s) and not s.detach().values.requires_grad
    assert s.device == s.values.device and s.dtype == torch.float32


def test_as_tensors_are_multiplied_and_moved(device):
    A, x = pruned(24, 32, torch.float32, device), torch.randn(32, 5, device=device)
    s = two_four.compress(A)
    assert torch.equal(s @ x, two_four.matmul(s, x)) and torch.equal(x.T @ s.T, two_four.matmul(x.T, s.T))
    assert torch.equal(torch.compile(lambda y: s @ y, backend="eager")(x), s @ x)
    with pytest.raises(TypeError, match=r"^matmul: a and b: expected exactly one fretwork.TwoFour, got two"):
        s @ s.T
    with pytest.raises(TypeError, match=r"^matmul: b: expected a torch.Tensor, got int"):
        s @ 3
    assert s.cpu().device.type == "cpu" and torch.equal(s.cpu().to_dense(), A.cpu())
    if device.type == "cuda":
        assert s.cpu().cuda().device.type == "cuda" and s.cpu().cuda(0).device == torch.device("cuda:0")
    else:
        with pytest.raises((AssertionError, RuntimeError)):  # as torch says it
            s.cuda()


@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("word", [torch.int8, torch.int16, torch.int32], ids=str)
def test_to_another_dtype(dim, word, device):
    """Only fp32 has groups of two: its nibbles become those of fours, and back where fours keep one of each pair."""
    A = pruned(24, 44, torch.float32, device) if dim else pruned(44, 24, torch.float32, device, 0)
    s = two_four.compress(A, dim, word)
    for dtype in (torch.bfloat16, torch.float16, torch.int8, torch.float8_e5m2):
        t = s.to(dtype)
        fw.TwoFour(t.values, t.metadata, dim)  # every nibble is valid
        assert (t.dtype, t.metadata.dtype, t.shape) == (dtype, word, s.shape)
        same(t.to_dense(), A.to(dtype))
    same(s.to(torch.bfloat16).to(torch.float32).to_dense(), A.bfloat16())
    same(s.to(device).to_dense(), A)
    assert torch.equal(s.to(dtype=torch.float64).metadata, s.to(torch.float16).metadata)  # float64 has fours
    for moved in (s.to(device, torch.half, True), s.to(A.half()), s.to(torch.half, non_blocking=True)):
        assert moved.dtype == torch.half and moved.device == s.device and moved.metadata.device == s.device
    assert s.to("meta").metadata.is_meta and s.to("meta").dtype == s.dtype
    for more in ({"copy": True}, {}):
        with pytest.raises(RuntimeError, match=r"TwoFour.to: copy: expected no such argument, got one"):
            s.to(torch.half, False, *([] if more else [True]), **more)
    with pytest.raises(ValueError, match=r"TwoFour.to: dtype: expected .*got "):
        two_four.compress(torch.tensor([[1, 1, 0, 0.0]], device=device).half()).to(torch.float32)
    with pytest.raises(ValueError, match=r"TwoFour.to: dtype: expected .*got "):
        two_four.compress(torch.eye(6, device=device)).to(torch.float16)


@pytest.mark.parametrize("word", [torch.int8, torch.int16, torch.int32], ids=str)
def test_cat_inside_words(word, device):
    parts = [pruned(5, cols, torch.float16, device) for cols in (4, 20, 8, 12)]
    for dim in (-1, 0):
        turned = [A if dim else A.T for A in parts]
        s = two_four.cat([two_four.compress(A, dim, word) for A in turned], dim=dim)
        want = two_four.compress(torch.cat(turned, dim), dim, word)
        assert torch.equal(s.values, want.values) and torch.equal(s.metadata, want.metadata)


# What torch asks of an op


def samples(device):
    A = pruned(8, 32, torch.float32, device).requires_grad_()
    s, B = two_four.compress(A.detach()), torch.randn(2, 32, 3, device=device, requires_grad=True)
    values, bias = s.values.clone().requires_grad_(), torch.randn(8, device=device, requires_grad=True)
    across = two_four.compress(pruned(32, 8, torch.float32, device, 0), dim=0)
    down, x = across.values.clone().requires_grad_(), B.detach().mT.contiguous().requires_grad_()
    whole = two_four.compress(pruned(8, 32, torch.int8, device))
    scale, small = torch.rand(8, device=device), B.detach()[0].to(torch.int8)
    return {
        "compress": [(A, 1, torch.int16, True), (A, 1, torch.int8, False), (A.detach().T, 0, torch.int32, True)],
        "check": [(A.detach(), 1), (torch.ones(4, 8, device=device), 0)],
        "canonical": [
            (s.values, s.metadata, 1, False),
            (s.T.values, s.T.metadata.view(torch.uint16), 0, True),
            (torch.zeros_like(whole.values), torch.zeros_like(whole.metadata), 1, False),
        ],
        "to_dense": [(values, s.metadata, 1), (down, across.metadata, 0)],
        "gather": [(A, s.metadata, 1), (A.detach().T, s.T.metadata, 0)],
        "prune": [(A, 1, False), (A, 0, True)],
        "prune_both": [(A.detach(), torch.int16)],
        "matmul": [
            (values, s.metadata, B, None, "none", None, None, None, "left", "ieee"),
            (values, s.metadata, B, bias, "gelu", None, scale, scale.new_tensor(2.0), "left", "ieee"),
            (down, across.metadata, x, bias, "relu", None, None, None, "right", "ieee"),
            (values, s.metadata, x, bias, "silu", None, None, None, "linear", "ieee"),
            (values, s.metadata, x[0, 0], bias, "none", None, None, None, "linear", "ieee"),
            (whole.values, whole.metadata, small, None, "none", torch.float32, scale, None, "left", "ieee"),
            (values, s.metadata, x, bias, "relu", None, None, None, "linear", "ieee", scale.new_tensor(-2.0)),
            (whole.values, whole.metadata, small, scale, "relu", torch.int8, scale, None, "left", "ieee", scale[0] + 0),
        ],
    }  # fmt: skip


@pytest.mark.parametrize(
    "op", ["compress", "check", "canonical", "to_dense", "gather", "prune", "prune_both", "matmul"]
)
def test_opcheck(op, device):
    for arguments in samples(device)[op]:
        torch.library.opcheck(getattr(ops, f"two_four_{op}").default, arguments)
        if op == "matmul":  # its twin without gradient
            still = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments]
            torch.library.opcheck(ops._two_four_matmul.default, tuple(still))


def test_fakes_refuse_what_the_core_refuses(device):
    s, B, bias = (
        two_four.compress(torch.eye(32, device=device)),
        torch.ones(32, 5, device=device),
        torch.ones(32, device=device),
    )
    whole = two_four.compress(torch.eye(32, dtype=torch.int8, device=device))
    calls = [
        lambda: two_four.compress(B[:, :3]), lambda: two_four.compress(B, dim=2), lambda: two_four.compress(bias),
        lambda: two_four.compress(B.long(), dim=0), lambda: two_four.compress(B, dim=0, metadata_dtype=torch.int64),
        lambda: two_four.prune(B, transposable=True), lambda: two_four.prune(B),
        lambda: fw.TwoFour(s.values, s.metadata[:, :1]), lambda: fw.TwoFour(s.values, s.metadata.float()),
        lambda: fw.TwoFour(s.values[0], s.metadata), lambda: fw.TwoFour(s.values.long(), s.metadata),
        lambda: two_four.matmul(s, B[:16]), lambda: two_four.matmul(s, B.half()), lambda: two_four.matmul(s, bias),
        lambda: two_four.matmul(s, B, bias=bias[:3]), lambda: two_four.matmul(s, B, bias=bias.half()),
        lambda: two_four.matmul(s, B, scale_a=bias[:3]), lambda: two_four.matmul(s, B, scale_b=bias[:1]),
        lambda: two_four.matmul(s, B, scale_a=bias.double()), lambda: two_four.matmul(s, B, scale_out=bias[0].half()),
        lambda: two_four.matmul(s, B, out_dtype=torch.int32), lambda: two_four.matmul(s, B, out_dtype=torch.uint8),
        lambda: two_four.matmul(whole, whole.to_dense(), out_dtype=torch.float64),
        lambda: two_four.linear(B, s), lambda: two_four.linear(bias.half(), s),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises((RuntimeError, ValueError), match=r"^\w+: \w+: expected .*, got ") as eager:
            call()
        assert isinstance(eager.value, ValueError) == str(eager.value).startswith("TwoFour: "), "ops, and a constructor"
        with pytest.raises(Exception, match=r"expected .*, got ") as traced:
            torch.compile(call, fullgraph=True, backend="aot_eager")()
        start = str(eager.value).split(": expected")[0]
        assert start in str(traced.value), f"{start!r} is not in {traced.value}"


def test_wrong_kinds_are_refused(device):
    s, B = two_four.compress(torch.eye(16, device=device)), torch.ones(16, 3, device=device)
    for call in [
        lambda: two_four.compress([[1.0]]), lambda: two_four.compress(B, metadata_dtype="int16"),
        lambda: fw.TwoFour(s, B), lambda: two_four.cat([B]),
        lambda: two_four.matmul(s, [1.0]), lambda: two_four.matmul(s, B, bias=1.0), lambda: two_four.linear([1.0], s),
        lambda: two_four.matmul(s, B, scale_a=2.0), lambda: two_four.linear(B.T, s, fallback="sparse"),
        lambda: two_four.matmul(s, B, precision="half"), lambda: two_four.linear(B.T, s, activation="tanh"),
        lambda: two_four.matmul(s, B, out_dtype=torch.int32), lambda: two_four.matmul(s, B, out_dtype=torch.int64),
            lambda: two_four.matmul(s, B, scale_out=2.0), lambda: two_four.matmul(s, B, scale_out=B[:1, 0]),
        lambda: two_four.prune(B, dim=2**32), lambda: two_four.check(B, dim=2**32),
        lambda: fw.TwoFour(s.values, s.metadata, 2**32 + 1), lambda: two_four.compress(B, dim=2**70),
        lambda: two_four.matmul(s, B, activation=["relu"]), lambda: fw.TwoFour(s.values, s.metadata.to("meta")),
        lambda: two_four.matmul(s, B.to("meta")), lambda: s.to(torch.int64), lambda: two_four.cat([s, s.to("meta")]),
    ]:  # fmt: skip
        with pytest.raises((TypeError, ValueError, RuntimeError), match=r"^[\w.]+: .*: expected .*, got "):
            call()
    for call in [
        lambda: two_four.compress(B, 0.0), lambda: two_four.compress(B, False), lambda: two_four.prune(B, "0"),
        lambda: two_four.compress(B, validate="no"), lambda: two_four.prune(B, transposable="no"),
        lambda: two_four.check(B, None), lambda: fw.TwoFour(s.values, s.metadata, 1.0), lambda: two_four.cat([s], 0.0),
        lambda: two_four.cat(3), lambda: two_four.cat(s), lambda: s[0.5:], lambda: s["a":],
        lambda: two_four.matmul(s, B, out_dtype="float32"), lambda: two_four.matmul(s, B, out_dtype=3),
        lambda: s.export("cutlass_sm90", tile_k=128.5), lambda: two_four.save(3, s), lambda: two_four.load(3),
        lambda: two_four.from_layout(s.values, s.metadata, "torch", dim=1.0),
    ]:  # fmt: skip
        with pytest.raises(TypeError, match=r"^[\w.]+: .*: expected .*, got "):
            call()
    assert two_four.compress(s.to_dense(), np.int64(0)).dim == 0 and s[np.int64(4) :].shape == (12, 16)


@pytest.mark.parametrize("dtype", [*BYTES, torch.float32], ids=str)
def test_pickle_and_torch_load(dtype, device):
    s = two_four.compress(pruned(8, 16, dtype, device))
    buffer = io.BytesIO()
    torch.save({"s": s.T}, buffer)
    buffer.seek(0)
    for other in (torch.load(buffer)["s"].T, pickle.loads(pickle.dumps(s)), copy.deepcopy(s)):
        assert (other.dim, other.device) == (1, s.device) and torch.equal(other.metadata, s.metadata)
        assert other.values.dtype == dtype
        same(other.values, s.values)
    s.metadata.zero_()
    with pytest.raises(ValueError, match="TwoFour: metadata: expected nibbles"):
        pickle.loads(pickle.dumps(s))


@pytest.mark.parametrize("word", [torch.int8, torch.int16, torch.int32], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_an_invalid_nibble_is_named(dim, word, device):
    s = two_four.compress(pruned(8, 64, torch.float16, device), metadata_dtype=word)
    metadata, group, per_word = s.metadata.clone(), 13, 2 * word.itemsize  # of line 5
    kept = int(metadata[5, group // per_word]) & ~(15 << 4 * (group % per_word)) | 5 << 4 * (group % per_word)
    low = -(1 << 4 * per_word - 1)
    metadata[5, group // per_word] = (kept - low) % (1 << 4 * per_word) + low  # as signed words hold it
    pair = (s.values, metadata) if dim else (s.values.t(), metadata.t())
    where = "(5, 52)" if dim else "(52, 5)"
    with pytest.raises(ValueError, match=re.escape(f"9, 12, 13 or 14, got 5 for the group at {where}")):
        fw.TwoFour(*pair, dim=dim)


def test_matrices_without_memory():
    s = two_four.compress(torch.eye(16).half()).to("meta")
    assert fw.TwoFour(s.values, s.metadata).to(torch.float32).to_dense().shape == (16, 16)
    assert copy.deepcopy(s).values.is_meta
    assert two_four.matmul(s, torch.empty(16, 3, device="meta").half()).shape == (16, 3)
    whole, one = two_four.compress(torch.eye(16).char()).to("meta"), torch.ones((), device="meta")
    for name, option in {
        "out_dtype": torch.float64, "scale_a": one.double(), "scale_b": torch.ones(()), "scale_out": one.half()
    }.items():  # fmt: skip
        with pytest.raises(RuntimeError, match=f"^matmul: {name}: expected .*, got "):
            two_four.matmul(whole, torch.empty(16, 3, device="meta").char(), **{name: option})
    with pytest.raises(RuntimeError, match=r"^check: A: expected a matrix with data, got one on meta$"):
        two_four.check(torch.empty(16, 16, device="meta"))


def test_other_operators_still_refuse_integers(device):
    layout = fw.BlockLayout([[1]], block=16)
    for dtype in (torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32):
        x = torch.ones(16, 16, device=device).to(dtype)
        with pytest.raises(
            RuntimeError, match=f"sdd: a: expected float64, float32, float16 or bfloat16, got {str(dtype)[6:]}"
        ):
            fw.sdd(x, x, layout)


# Words that others wrote


def nibbles_of(metadata):
    """(lines, groups), lines being rows."""
    both = metadata.contiguous().view(torch.uint8)
    return torch.stack((both & 15, both >> 4), -1).flatten(1).cpu()


@pytest.mark.parametrize("word", [torch.int16, *SIGNED], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, *BYTES], ids=str)
def test_groups_of_zeros_take_any_nibble(dtype, word, device):
    """And the product is that of the dense matrix, whatever stood there; what a user keeps stays as it was."""
    empty = torch.rand(24, 16).lt(0.4).repeat_interleave(4, 1)
    A = torch.where(empty, 0.0, pruned(24, 64, dtype).double()).to(dtype).to(device)
    s = two_four.compress(A, metadata_dtype=word)
    half = 1 if dtype == torch.float32 else 2
    empty = (s.values.float() == 0).unflatten(1, (-1, half)).all(-1).cpu()
    nibbles = torch.where(empty, torch.randint(0, 16, empty.shape), nibbles_of(s.metadata)[:, : empty.shape[1]])
    both = (nibbles[:, ::2] | nibbles[:, 1::2] << 4).to(torch.uint8).to(device).view(word)
    before = both.view(torch.uint8).clone()
    for t in (fw.TwoFour(s.values, both), fw.TwoFour(s.values.t(), both.t(), dim=0).T):
        assert t.metadata.dtype == word and torch.equal(nibbles_of(t.metadata), nibbles_of(s.metadata))
        same(t.to_dense(), A)
        same(two_four.linear(torch.eye(64, device=device).to(dtype), t), A.double().T)
    assert torch.equal(both.view(torch.uint8), before)
    kept = two_four.canonical(s.values, both, 1, keep_valid=True)
    valid = [4, 14] if half == 1 else [4, 8, 9, 12, 13, 14]
    want = torch.where(torch.isin(nibbles, torch.tensor(valid)), nibbles, 4)
    assert torch.equal(nibbles_of(kept).long(), want), "what may be read"


def test_zeros_stay_where_they_were(tmp_path, device):
    """A mask is more than its values: zeros that learn keep their places in files, pickles and state dicts."""
    s = two_four.compress(pruned(16, 32, torch.float16, device))
    zeros = two_four.from_parts(torch.zeros_like(s.values), s.metadata, 1)
    assert torch.equal(pickle.loads(pickle.dumps(zeros)).metadata, s.metadata)
    assert torch.equal(copy.deepcopy(zeros).metadata, s.metadata)
    layer = fw.nn.SemiSparseLinear.from_sparse(zeros)
    other = fw.nn.SemiSparseLinear(32, 16, bias=False, device=device, dtype=torch.float16)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.sparse.metadata, layer.sparse.metadata)
    state = layer.state_dict()
    state["metadata"] = torch.zeros_like(state["metadata"])
    other.load_state_dict(state)
    assert (nibbles_of(other.metadata) == 4).all(), "what no instruction may read"
    pytest.importorskip("safetensors")
    two_four.save(tmp_path / "zeros.safetensors", zeros)
    assert torch.equal(two_four.load(tmp_path / "zeros.safetensors", device).metadata, s.metadata)


@pytest.mark.parametrize("word", SIGNED, ids=str)
def test_unsigned_words_are_cut_joined_moved_and_stored(word, tmp_path, device):
    A = pruned(32, 128, torch.float16, device)
    s, signed = (two_four.compress(A, metadata_dtype=w) for w in (word, SIGNED[word]))

    def alike(one, other):
        assert one.metadata.dtype == word and torch.equal(one.metadata.view(SIGNED[word]), other.metadata)
        same(one.to_dense(), other.to_dense())

    alike(s[8:24, 32:], signed[8:24, 32:])
    for dim in (0, 1):
        alike(
            two_four.cat([s, s[:, :32] if dim else s], dim),
            two_four.cat([signed, signed[:, :32] if dim else signed], dim),
        )
    alike(two_four.cat([s, two_four.compress(A[:, :4], metadata_dtype=word), s], 1),
          two_four.cat([signed, two_four.compress(A[:, :4], metadata_dtype=SIGNED[word]), signed], 1))  # fmt: skip
    alike(s.to("cpu"), signed.to("cpu"))
    alike(copy.deepcopy(s), signed)
    alike(pickle.loads(pickle.dumps(s)), signed)
    for ours, theirs in zip(s.export("torch"), signed.export("torch"), strict=True):
        assert torch.equal(ours, theirs)
    alike(two_four.from_layout(*s.export("torch"), "torch", metadata_dtype=word), signed)
    pytest.importorskip("safetensors")
    two_four.save(tmp_path / "weight.safetensors", s)
    alike(two_four.load(tmp_path / "weight.safetensors", device), signed)


# Results of any type


def narrowed(exact, out):
    if out == torch.int8:
        return exact.round().clamp(-128, 127)
    largest = torch.finfo(out).max
    return exact.clamp(-largest, largest).float().to(out).double()


@pytest.mark.parametrize("out", [torch.int8, *FP8, torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, *FP8, torch.bfloat16, torch.float32], ids=str)
def test_every_result_of_every_operand(dtype, out, device):
    """Whole numbers that every sum holds, in sizes for every class of kernels, on both sides, scaled and biased."""
    for m, n, k in [(64, 1, 128), (72, 16, 256), (130, 40, 132), (256, 264, 512), (33, 300, 64)]:
        least = 0 if dtype == torch.uint8 else -3
        A = two_four.prune(torch.randint(least, 4, (m, k)).to(torch.float32 if dtype == torch.float32 else torch.int8))
        B = torch.randint(least, 4, (k, n))
        s, b = two_four.compress(A.to(dtype).to(device)), B.to(dtype).to(device)
        bias = torch.randint(-8, 9, (m,)).double()
        kind = out if out.itemsize > 1 or n == 40 else torch.float32
        plain = A.double() @ B.double()
        options = {"precision": "tf32", "bias": bias.to(kind).to(device), "activation": "relu",
                   "scale_out": torch.tensor(0.25, device=device), "out_dtype": out}  # fmt: skip
        want = (plain + bias[:, None]).relu() * 0.25
        want = narrowed(want, out) if out.itemsize == 1 else want.to(out).double()
        same(two_four.matmul(s, b, **options), want)
        same(two_four.matmul(b.T, s.T, **options), want.T)
        same(
            two_four.matmul(s, b.T.contiguous().T, out_dtype=out),
            narrowed(plain, out) if out.itemsize == 1 else plain.to(out),
        )


def test_uint8_has_no_sign(device):
    """0 to 255 in products of every class, and magnitudes that order as numbers do."""
    for m, n, k in [(64, 1, 128), (72, 16, 256), (130, 40, 132), (256, 264, 512)]:
        full = torch.randint(0, 256, (m, k), dtype=torch.uint8)
        groups = full.long().unflatten(1, (-1, 4))
        rank = groups * 4 + torch.tensor([3, 2, 1, 0])  # of equal ones the first
        A = torch.where(rank >= rank.topk(2).values[..., 1:], groups, 0).flatten(1)
        B = torch.randint(0, 256, (k, n), dtype=torch.uint8)
        pruned_ = two_four.prune(full.to(device))
        same(pruned_, A)
        s = two_four.compress(pruned_)
        same(two_four.matmul(s, B.to(device)), A @ B.long())
        same(two_four.matmul(B.T.contiguous().to(device), s.T), (A @ B.long()).T)
    square = torch.tensor([[200, 1, 1, 199]] * 2 + [[1, 180, 127, 1]] * 2, dtype=torch.uint8, device=device)
    assert (two_four.prune(square, transposable=True) > 1).sum() == 8


def test_8_bits_round_once_and_saturate(device):
    """Every fp8 number comes back, what lies in between goes to the nearest, ties to even, and NaN stays."""
    s = two_four.compress(torch.tensor([[1.0, 0.0]], device=device))

    def rounded(x, out):
        both = torch.stack((x, torch.zeros_like(x))).to(device)
        return two_four.matmul(s, both, out_dtype=out, precision="ieee")[0].cpu()

    for out in FP8:
        numbers = torch.arange(256).to(torch.uint8).view(out).float()
        finite, largest = numbers[numbers.isfinite()].unique(), torch.finfo(out).max
        ties = (finite[1:] + finite[:-1]) / 2
        beyond = torch.tensor([float("inf"), float("-inf"), 1e30, -1e30, 1e-30, largest * 1.04])
        x = torch.cat([finite, ties, ties.nextafter(finite[1:]), ties.nextafter(finite[:-1]), beyond]).unique() + 0.0
        want = x.clamp(-largest, largest).to(out)
        assert torch.equal(rounded(x, out).view(torch.uint8), want.view(torch.uint8))
        assert rounded(torch.tensor([float("nan")]), out).float().isnan().all()
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 127.4, 127.5, 300, -128.5, -128.6, 1e9, float("-inf"), float("nan")])
    assert rounded(x, torch.int8).tolist() == [0, 2, 2, 0, -2, 127, 127, 127, -128, -128, 127, -128, 0]


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_gradient_of_a_scaled_result(activation, device):
    A, B = pruned(8, 32, torch.float32, device), torch.randn(32, 5, device=device, requires_grad=True)
    s, bias = two_four.compress(A), torch.randn(8, device=device, requires_grad=True)
    values, scale = s.values.clone().requires_grad_(), torch.tensor(-0.5, device=device)
    c = two_four.matmul(fw.TwoFour(values, s.metadata), B, bias, activation, scale_out=scale, precision="ieee")
    upstream = torch.randn_like(c)
    c.backward(upstream)
    wide = [t.detach().cpu().double().requires_grad_() for t in (A, B, bias)]
    exact = wide[0] @ wide[1] + wide[2][:, None]
    ((getattr(F, activation)(exact) if activation else exact) * -0.5).backward(upstream.cpu().double())
    assert_close(B.grad, wide[1].grad, torch.float32)
    assert_close(bias.grad, wide[2].grad, torch.float32)
    kept = torch.where(A.cpu() != 0, wide[0].grad, 0)
    assert_close(fw.TwoFour(values.grad, s.metadata).to_dense(), kept, torch.float32)


def test_narrow_results_elsewhere(device):
    """Traced, compiled, batched by vmap, under autocast and without memory."""
    s, b = two_four.compress(pruned(16, 32, torch.int8, device)), torch.ones(3, 32, 5, device=device).char()
    bias, scale = torch.randn(16, device=device), torch.tensor(0.125, device=device)

    def f(b):
        return two_four.matmul(s, b, bias, "relu", torch.int8, scale_out=scale)

    want = f(b)
    assert want.dtype == torch.int8 and want.shape == (3, 16, 5)
    same(torch.compile(f, backend="eager", fullgraph=True)(b), want)
    same(torch.vmap(f)(b), want)
    with torch.autocast(device.type, torch.bfloat16):
        same(f(b), want)
    empty = s.to("meta")
    assert two_four.matmul(empty, b.to("meta"), out_dtype=torch.float8_e5m2).dtype == torch.float8_e5m2


def test_a_backward_pass_warns_of_nothing(device):
    """autograd's own thread begins with one of our ops, and goes on with cuBLAS: that has a context there."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    program = (
        "import torch, fretwork as fw\n"
        "s = fw.two_four.compress(fw.two_four.prune(torch.randn(64, 128, device='cuda').half()))\n"
        "values = s.values.clone().requires_grad_()\n"
        "x = torch.randn(5, 128, device='cuda').half().requires_grad_()\n"
        "fw.two_four.linear(x, fw.TwoFour(values, s.metadata)).sum().backward()\n"
        "torch.cuda.synchronize()\n"
    )
    done = subprocess.run([sys.executable, "-W", "always", "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "CUDA context" not in done.stderr, done.stderr


# Gradients


@pytest.mark.parametrize("product", ["left", "right", "linear"])
def test_second_derivatives(product):
    A = pruned(8, 12, torch.float64, dim=0 if product == "right" else -1)
    s = two_four.compress(A, dim=0 if product == "right" else -1)
    shape = {"left": (2, 12, 3), "right": (2, 3, 8), "linear": (3, 12)}[product]
    values, dense = s.values.clone().requires_grad_(), torch.randn(shape, dtype=torch.float64, requires_grad=True)
    scale = torch.rand((), dtype=torch.float32)

    def f(v, d):
        return ops.two_four_matmul(v, s.metadata, d, None, "silu", None, scale, None, product, "ieee")

    assert torch.autograd.gradcheck(f, (values, dense), eps=1e-6, atol=1e-4)
    assert torch.autograd.gradgradcheck(f, (values, dense), eps=1e-6, atol=1e-4)


def test_gradient_of_wide_and_scaled_results(device):
    A = pruned(8, 32, torch.bfloat16, device)
    s, B = two_four.compress(A), torch.randn(32, 5, device=device).bfloat16().requires_grad_()
    values, bias = s.values.clone().requires_grad_(), torch.randn(8, device=device, requires_grad=True)
    rows, cols = torch.rand(8, device=device) + 1, torch.rand(5, device=device) + 1
    c = two_four.matmul(fw.TwoFour(values, s.metadata), B, bias, "gelu", torch.float32, rows, cols)
    c.backward(torch.ones_like(c))
    wide = [t.detach().cpu().double().requires_grad_() for t in (A, B, bias)]
    scaled = wide[0] @ wide[1] * rows.cpu().double()[:, None] * cols.cpu().double()
    F.gelu(scaled + wide[2][:, None]).sum().backward()
    assert (values.grad.dtype, B.grad.dtype, bias.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert_close(B.grad, wide[1].grad, torch.bfloat16)
    assert_close(bias.grad, wide[2].grad, torch.float32)
    kept = torch.where(A.cpu() != 0, wide[0].grad, 0)
    assert_close(fw.TwoFour(values.grad, s.metadata).to_dense(), kept, torch.bfloat16)


VIEWS = {
    "contiguous": lambda t: t,
    "turned": lambda t: t.mT.contiguous().mT,
    "every second": lambda t: torch.stack((t, t), -1).flatten(-2)[..., ::2],
    "moved": lambda t: torch.cat((t[..., :1], t), -1)[..., 1:],
    "expanded": lambda t: t[..., :1, :].expand(t.shape),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("lead", [(), (1,), (5,), (0,), (2, 3), (70,)])
@pytest.mark.parametrize("view", VIEWS)
def test_gradients_of_views(view, lead, dtype):
    """A layer's gradients on the CPU, whose operands and upstream lie in any way, wanted together and alone."""
    if view != "contiguous" and (lead == () or lead == (0,)):
        return
    out, k = 24, 68
    dense = fw.two_four.prune(torch.randn(out, k).to(dtype))
    s = fw.two_four.compress(dense)
    s.values.requires_grad_()
    bias = torch.randn(out).to(dtype).requires_grad_()
    x = VIEWS[view](torch.randn(*lead, k).to(dtype)).detach().requires_grad_()
    upstream = VIEWS[view](torch.randn(*lead, out).to(dtype))
    rows, above = x.detach().double().reshape(-1, k), upstream.double().reshape(-1, out)
    kept = two_four.from_parts(torch.ones_like(s.values), s.metadata, 1).to_dense() != 0  # half of every line
    want = {"x": (above @ dense.double()).reshape(x.shape), "bias": above.sum(0)}
    want["values"] = (above.T @ rows)[kept].reshape(out, k // 2)
    y = fw.two_four.linear(x, s, bias)
    operands = {"x": x, "values": s.values, "bias": bias}
    for names in (["x", "values", "bias"], ["x"], ["values"], ["bias", "values"]):
        found = torch.autograd.grad(y, [operands[n] for n in names], upstream, retain_graph=True)
        for name, got in zip(names, found, strict=True):
            assert_close(got, want[name], dtype, name)


def test_what_has_no_gradient_says_so(device):
    s, B = two_four.compress(torch.eye(16, device=device).half()), torch.ones(16, 3, device=device).half()
    scale = torch.ones((), device=device, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"matmul: scales: expected .*got .*; multiply"):
        two_four.matmul(s, B.requires_grad_(), scale_a=scale)
    t = s.to(torch.float8_e4m3fn)
    with pytest.raises(NotImplementedError, match=r"matmul: gradient: expected .*got torch.float8_e4m3fn"):
        two_four.matmul(fw.TwoFour(t.values.requires_grad_(), t.metadata), B.detach().to(t.dtype))
    with pytest.raises(NotImplementedError, match=r"linear: gradient: expected .*got torch.float8_e4m3fn; let"):
        two_four.linear(B.detach().T.to(t.dtype), fw.TwoFour(t.values.requires_grad_(), t.metadata))
    for out in (torch.int8, torch.float8_e5m2):
        with pytest.raises(NotImplementedError, match=rf"matmul: gradient: expected .* result, got {out}"):
            two_four.matmul(s, B, out_dtype=out)
    A = torch.ones(4, 4, device=device, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"prune_both: gradient: expected .*got "):
        ops.two_four_prune_both(A, torch.int16)[0].sum().backward()


@pytest.mark.parametrize("n", [3, 40])
def test_whole_results_are_scaled_biased_and_activated(n, device):
    """int32 results without fractions on the way are exact; the others are rounded to the nearest."""
    A, B = pruned(8, 64, torch.int8, device), torch.randint(-9, 10, (64, n), dtype=torch.int8, device=device)
    s, sums = two_four.compress(A), A.cpu().double() @ B.cpu().double()
    bias, scale = torch.randint(-(2**28), 2**28, (8,), dtype=torch.int32), torch.rand(8) / 64
    biased = sums + bias.double()[:, None]
    same(two_four.matmul(s, B, bias.to(device)), biased)
    same(two_four.matmul(s, B, bias.to(device), "relu"), biased.relu())
    same(two_four.matmul(B.T, s.T, bias.to(device), "relu"), biased.relu().T)
    got = two_four.matmul(s, B, (bias % 99).to(device), "gelu", scale_a=scale.to(device))
    want = F.gelu(sums * scale.double()[:, None] + (bias % 99).double()[:, None])
    assert got.dtype == torch.int32 and (got.cpu() - want).abs().max() < 0.501
    same(two_four.matmul(s, B, scale_a=torch.tensor(1e30, device=device)).clamp(-1, 1), sums.clamp(-1, 1))


@pytest.mark.parametrize("dtype", BYTES, ids=str)
def test_bias_learns_beside_small_types(dtype, device):
    s, x = two_four.compress(pruned(8, 16, dtype, device)), pruned(3, 16, dtype, device)
    bias = torch.zeros(8, dtype=torch.bfloat16, device=device, requires_grad=True)
    two_four.matmul(x, s.T, bias, out_dtype=torch.bfloat16).sum().backward()
    same(bias.grad, torch.full((8,), 3.0))


def test_modes_that_are_not_reverse_are_refused(device):
    """None may give zeros in silence."""
    s, x = two_four.compress(torch.eye(8, device=device)), torch.randn(3, 8, device=device)

    def of_values(values):
        return two_four.linear(x, two_four.from_parts(values, s.metadata, 1))

    for call in (
        lambda: torch.func.jvp(lambda x: two_four.linear(x, s), (x,), (x,)),
        lambda: torch.func.jvp(of_values, (s.values,), (s.values,)),
        lambda: torch.func.jvp(lambda v: fw.TwoFour(v, s.metadata).to_dense(), (s.values,), (s.values,)),
    ):
        with pytest.raises(NotImplementedError, match=r"expected a tensor without a tangent, got "):
            call()
    for call, at in ((lambda x: two_four.linear(x, s), x), (of_values, s.values)):
        with pytest.raises(RuntimeError, match=r"setup_context"):
            torch.func.grad(lambda t, call=call: call(t).sum())(at)


# vmap and autocast


def test_vmap_over_each_operand(device):
    A = torch.stack([pruned(8, 16, torch.float32, device) for _ in range(3)])
    B, x = torch.randn(3, 16, 5, device=device), torch.randn(3, 16, device=device)
    s = two_four.compress(A[0])
    bias = torch.randn(3, 8, device=device)

    def close(got, want):
        assert_close(got, want.cpu().double(), torch.float32)

    close(torch.vmap(lambda b: two_four.matmul(s, b))(B), A[0] @ B)
    close(torch.vmap(lambda b: two_four.matmul(s, b), in_dims=2, out_dims=1)(B.movedim(0, 2)), (A[0] @ B).movedim(0, 1))
    close(torch.vmap(lambda b: two_four.matmul(b.mT, s.T))(B), B.mT @ A[0].T)
    close(torch.vmap(lambda b, c: two_four.matmul(s, b, bias=c))(B, bias), A[0] @ B + bias[..., None])
    close(torch.vmap(lambda v: two_four.linear(v, s))(x), x @ A[0].T)
    close(torch.vmap(lambda a: two_four.matmul(two_four.compress(a), B[0]))(A), A @ B[0])
    close(torch.vmap(lambda a: two_four.compress(a, dim=0).to_dense())(A.mT), A.mT)
    close(torch.vmap(lambda a: two_four.prune(a))(torch.ones(2, 4, 4, device=device)), torch.eye(2)[0].repeat(2, 4, 2))
    values = torch.randn(3, *s.values.shape, device=device)
    got = torch.vmap(lambda v: two_four.matmul(fw.TwoFour(v, s.metadata), B[0]))(values)
    close(got, torch.stack([fw.TwoFour(v, s.metadata).to_dense() for v in values]) @ B[0])
    close(torch.vmap(lambda a: two_four.matmul(two_four.compress(two_four.prune(a)), B[0]))(A[:0]), A[:0] @ B[0])
    close(torch.vmap(lambda v: two_four.matmul(fw.TwoFour(v, s.metadata), B[0]))(values[:0]), A[:0] @ B[0])
    parts = [two_four.compress(a) for a in A]
    values, words = torch.stack([t.values for t in parts]), torch.stack([t.metadata for t in parts])
    close(torch.vmap(lambda v, m: two_four.matmul(fw.TwoFour(v, m), B[0]))(values, words), A @ B[0])
    words[2, 0, 0] = 0
    with pytest.raises(RuntimeError):
        torch.vmap(lambda v, m: fw.TwoFour(v, m).to_dense())(values, words)
    with pytest.raises(RuntimeError, match="matmul: b: expected"):
        torch.vmap(lambda b: two_four.matmul(s, b))(x)


def test_gradient_through_vmap(device):
    """Of tensors that require it outside."""
    A, bias = pruned(8, 16, torch.float32, device), torch.randn(8, device=device, requires_grad=True)
    values = two_four.compress(A).values.clone().requires_grad_()
    s, B = fw.TwoFour(values, two_four.compress(A).metadata), torch.randn(3, 16, 5, device=device, requires_grad=True)
    (got,) = torch.autograd.grad(torch.vmap(lambda b: two_four.matmul(s.detach(), b))(B).sum(), B)
    assert_close(got, A.T.sum(1)[None, :, None].expand(3, 16, 5).cpu().double(), torch.float32)
    inputs = (values, B, bias)
    got = torch.autograd.grad(torch.vmap(lambda b: two_four.matmul(s, b, bias))(B).square().sum(), inputs)
    want = torch.autograd.grad(two_four.matmul(s, B, bias).square().sum(), inputs)
    for one, other in zip(got, want, strict=True):
        assert_close(one, other.cpu().double(), torch.float32)


def test_autocast_follows_the_sparse_operand(device):
    A, x = pruned(8, 16, torch.float32, device), torch.randn(3, 16, device=device, requires_grad=True)
    bias = torch.randn(8, device=device, requires_grad=True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        s = two_four.compress(A).to(dtype)
        x.grad = bias.grad = None
        with torch.autocast(device.type, torch.bfloat16):
            y = two_four.linear(x, s, bias)
        assert y.dtype == dtype
        assert_close(y.bfloat16(), (x @ A.T + bias).cpu().double(), torch.bfloat16)
        y.sum().backward()
        assert x.grad.dtype == bias.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("product", ["left", "right", "linear"])
def test_a_backward_pass_inside_autocast(product, dtype, device):
    """Compiled graphs run theirs as the forward pass ran; nothing may be lowered there, fp32 least, whose groups are
    not those of what it would become."""
    torch._dynamo.reset()
    A, B = pruned(8, 32, dtype, device), torch.randn(2, 32, 3, device=device).to(dtype)
    s, bias = two_four.compress(A), torch.randn(8, device=device).to(dtype)

    def loss(values, dense, bias):
        t = two_four.from_parts(values, s.metadata, 1)
        if product == "left":
            return two_four.matmul(t, dense, bias, "gelu").square().sum()
        x = dense.mT
        return (two_four.linear(x, t, bias) if product == "linear" else two_four.matmul(x, t.T, bias)).square().sum()

    want = torch.autograd.grad(loss(*(inputs := [t.clone().requires_grad_() for t in (s.values, B, bias)])), inputs)
    for call in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        with torch.autocast(device.type, torch.bfloat16):
            got = torch.autograd.grad(call(*inputs), inputs)
        for one, other in zip(got, want, strict=True):
            assert_close(one, other, dtype)


@pytest.mark.parametrize("prune", ["magnitude", "transposable"])
def test_dense_training_under_autocast(prune, device):
    """The fp32 weight is lowered, then pruned by fours."""
    layer = fw.nn.SemiSparseLinear.from_dense(torch.nn.Linear(32, 16, device=device), prune, "dense")
    x = (torch.rand(4, 32, device=device) + 0.1).requires_grad_()  # whose sums, the gradient, cannot be 0 by chance
    with torch.autocast(device.type, torch.bfloat16):
        y = layer(x)
    want = x.bfloat16() @ two_four.prune(layer.weight.detach().bfloat16(), transposable=prune == "transposable").T
    assert y.dtype == torch.bfloat16
    assert_close(y, (want + layer.bias.detach().bfloat16()).cpu().double(), torch.bfloat16)
    y.sum().backward()
    assert layer.weight.grad.dtype == x.grad.dtype == torch.float32 and layer.weight.grad.ne(0).all()


# Foreign layouts and files


@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_a_layout_of_ones_own(dim, dtype, device):
    """Bytes turned round, with two of padding before each line."""
    A = pruned(6, 64, dtype, device) if dim else pruned(64, 6, dtype, device, 0)
    s = two_four.compress(A, dim)
    per_line = 64 // (4 if dtype == torch.float32 else 8)
    order = F.pad(torch.arange(6 * per_line).view(6, per_line).flip(1), (2, 0), value=-1).flatten()
    values, words = s.export(order)
    lines = (s.metadata if dim else s.metadata.T).contiguous().view(torch.uint8)
    assert torch.equal(words.view(6, -1)[:, 2:], lines.flip(1)) and (words.view(6, -1)[:, :2] == 0x44).all()
    back = two_four.from_layout(values, words, order, dim, metadata_dtype=torch.int32)
    same(back.to_dense(), A)
    assert back.metadata.dtype == torch.int32 and back.dim == s.dim
    for bad in (order.int(), order.view(2, -1), order + 1000):
        with pytest.raises(ValueError, match=r"export: layout: expected .*got "):
            s.export(bad)
    with pytest.raises(ValueError, match=r"from_layout: metadata: expected .*got "):
        two_four.from_layout(values, words[:-1], order, dim)
    twice = torch.cat((order, order))
    same(two_four.from_layout(values, torch.cat((words, words)), twice, dim).to_dense(), A)
    with pytest.raises(ValueError, match=r"from_layout: metadata: expected the same .*got others"):
        two_four.from_layout(values, torch.cat((words, words.flip(0))), twice, dim)
    missing = torch.where(order == 0, -1, order)
    with pytest.raises(ValueError, match=r"TwoFour: metadata: expected .*got "):
        two_four.from_layout(values, words, missing, dim)


def test_from_layout_checks(device):
    values, words = two_four.compress(pruned(32, 64, torch.float16, device)).export("torch")
    for arguments in [(values[0], words, "torch"), (values, words[:16], "torch"), (values[:7], words, "torch")]:
        with pytest.raises(ValueError, match=r"from_layout: .*: expected .*got "):
            two_four.from_layout(*arguments)
    with pytest.raises(ValueError, match=r"from_layout: metadata: expected integers, got torch.float16"):
        two_four.from_layout(values, words.view(torch.float16), "torch")
    with pytest.raises(TypeError, match=r"from_layout: metadata_dtype: expected .*got int16"):
        two_four.from_layout(values, words, "torch", metadata_dtype="int16")


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)])
def test_layouts_of_nothing(shape, device):
    for dtype in (torch.float16, torch.int8, torch.float32):
        s = two_four.compress(torch.zeros(shape, dtype=dtype, device=device))
        for layout in ("torch", "cutlass_sm90"):
            assert two_four.from_layout(*s.export(layout), layout).shape == shape
        assert s.export(torch.tensor([-1, -1]))[1].tolist() == [0x44, 0x44]
        assert two_four.cat([s, s], dim=1).to_dense().shape == (shape[0], 2 * shape[1])


def test_empty_groups_of_cutlass_sm90(device):
    """CUTLASS writes 0, which no instruction may read."""
    s = two_four.compress(torch.zeros(64, 128, dtype=torch.float16, device=device))
    values, words = s.export("cutlass_sm90")
    t = two_four.from_layout(values, torch.zeros_like(words), "cutlass_sm90")
    assert torch.equal(t.metadata, s.metadata)


def test_a_checkpoint_of_torchs_semi_structured_tensors(tmp_path, device):
    """Torch's own class, saved and loaded; the product is the same. It has to be taken apart, and says so."""
    A, x = pruned(64, 128, torch.float16), torch.randn(5, 128).half()
    packed, meta = torch_compress(A)
    kind = torch.sparse.SparseSemiStructuredTensorCUTLASS
    torch.save({"weight": kind(A.shape, packed, meta, None, None, None)}, tmp_path / "old.pt")
    held = torch.load(tmp_path / "old.pt", weights_only=False)["weight"]
    assert isinstance(held, kind)
    s = two_four.from_layout(held.packed, held.meta, "torch").to(device)
    same(s.to_dense(), A)
    with pytest.raises(
        TypeError, match=r"compress: A: expected a dense tensor, got SparseSemiStructuredTensorCUTLASS;"
    ):
        two_four.compress(held)
    with pytest.raises(TypeError, match=r"from_layout: metadata: expected words .*, got None; compress\(t.to_dense"):
        two_four.from_layout(held.packed, None, "torch")
    assert_close(two_four.linear(x.to(device), s), x.double() @ A.double().T, torch.float16)


@pytest.mark.parametrize("dtype", [*dtypes_of(torch.device("cpu")), *BYTES], ids=str)
def test_files(dtype, tmp_path, device):
    pytest.importorskip("safetensors")
    if dtype == torch.float64 and device.type == "cuda":
        pytest.skip("float64 is for the CPU")
    file = tmp_path / "weights.safetensors"
    up, down = pruned(8, 32, dtype, device), pruned(12, 6, dtype, device, 0)
    both = {"a.up": two_four.compress(up, metadata_dtype=torch.int32), "down": two_four.compress(down, dim=0)}
    two_four.save(file, both)
    (tmp_path / "text").write_text("no file of numbers")
    with pytest.raises(ValueError, match=r"load: file: expected a safetensors file, got .*text: "):
        two_four.load(tmp_path / "text")
    found = two_four.load(file, device)
    assert set(found) == set(both) and found["a.up"].metadata.dtype == torch.int32 and found["down"].dim == 0
    same(found["a.up"].to_dense(), up)
    same(found["down"].to_dense(), down)
    assert found["down"].values.stride(0) == 1, "lines stay in one piece"
    two_four.save(file, both["down"])
    same(two_four.load(file).to_dense(), down)


def test_files_are_checked(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    file, s = tmp_path / "weights.safetensors", two_four.compress(torch.eye(16))
    parts = {"values": s.values, "metadata": s.metadata}
    for texts in (None, {"format": "pt"}, {"format": "fretwork.two_four", "version": "2", "dim": "1"}):
        safetensors.save_file(parts, file, texts)
        with pytest.raises(ValueError, match=r"load: .*: expected .*got "):
            two_four.load(file)
    for keys, dim in ((parts, "x"), (parts, "-1"), (parts, None), (("metadata",), "1")):
        texts = {"format": "fretwork.two_four", "version": "1"} | ({} if dim is None else {"dim": dim})
        safetensors.save_file({key: parts[key] for key in keys}, file, texts)
        with pytest.raises(ValueError, match=r"load: .*: expected .*got "):
            two_four.load(file)
    parts["metadata"] = torch.zeros_like(s.metadata)
    safetensors.save_file(parts, file, {"format": "fretwork.two_four", "version": "1", "dim": "1"})
    with pytest.raises(ValueError, match="TwoFour: metadata: expected"):
        two_four.load(file)
    with pytest.raises(TypeError, match=r"save: matrices\['x'\]: expected .*got "):
        two_four.save(file, {"x": torch.eye(4)})
    for wrong in ([s], torch.eye(4)):
        with pytest.raises(TypeError, match=r"save: matrices: expected .*got "):
            two_four.save(file, wrong)
    with pytest.raises(ValueError, match=r"save: matrices: expected names that differ as texts, got 0, '0'"):
        two_four.save(file, {0: s, "0": s})
    with pytest.raises(ValueError, match=r"^save: file: expected a path that can be written, got .*no/file: "):
        two_four.save(tmp_path / "no/file", s)
    two_four.save(file, s.T)
    with pytest.raises(ValueError, match=r"load: device: expected .*got 'gpu'"):
        two_four.load(file, "gpu")
    assert two_four.load(file, "meta").values.is_meta and two_four.load(file, "cpu").values.stride(0) == 1


def test_matrices_that_share_memory_are_saved(tmp_path):
    pytest.importorskip("safetensors")
    A = pruned(8, 32, torch.float16)
    s = two_four.compress(A)
    two_four.save(tmp_path / "tied.safetensors", {"a": s, "tied": s, "turned": s.T, "part": s[2:], 0: s[:4]})
    found = two_four.load(tmp_path / "tied.safetensors")
    for name, want in (("a", A), ("tied", A), ("turned", A.T), ("part", A[2:]), ("0", A[:4])):
        same(found[name].to_dense(), want)


def test_without_safetensors(monkeypatch):
    """The package is named, not a line of its insides."""
    monkeypatch.setitem(sys.modules, "safetensors", None)
    told = r"^save: safetensors: expected the package, got none; pip install 'fretwork\[files\]'$"
    with pytest.raises(ImportError, match=told):
        two_four.save("never", two_four.compress(torch.eye(4)))


# The planner


def test_where_dense_wins():
    def wins(n, k, dtype, device, precision):
        return core().fretwork_two_four_dense_wins(4096, n, k, dtype, device, 0, precision)

    for n in (1, 1000):  # there are no sparse units for it
        assert wins(n, 64, b"float32", b"cuda", b"ieee") == 1 and wins(n, 64, b"float32", b"cpu", b"ieee") == 0
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    behind = hopper and os.environ.get("FRETWORK_ARCH", "") not in ("", "sm_90a")  # older kernels on a newer GPU
    assert wins(256, 4096, b"float32", b"cuda", b"tf32") == 1
    assert wins(4096, 4096, b"float32", b"cuda", b"tf32") == int(behind)
    assert wins(0, 64, b"float32", b"cuda", b"ieee") == 0
    assert wins(16, 4092, b"bfloat16", b"cuda", b"ieee") == 0  # lines that begin anywhere
    assert wins(1, 64, b"int64", b"cuda", b"ieee") == -1


def test_that_float32_keeps_pairs_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(two_four, "_said", False)
    two_four.prune(torch.randn(4, 8).half())
    fw.recipes.TwoFour()  # which has no dtype yet
    assert not caplog.records
    layer = fw.nn.SemiSparseLinear(8, 4, trainable="dense")
    with torch.autocast("cpu", torch.bfloat16):  # which prunes it in bf16
        layer(torch.randn(2, 8))
    assert not caplog.records
    layer(torch.randn(2, 8))
    two_four.prune(torch.randn(4, 8))
    assert len(caplog.records) == 1 and "one of every two (1:2)" in caplog.text


def test_fallback_to_the_dense_product(caplog, monkeypatch, device):
    def wins(m, n, k, dtype, device, index, precision):
        assert (m, k, dtype, precision) == (16, 32, b"float32", b"ieee")
        return int(n > 64)

    monkeypatch.setattr(two_four, "core", lambda: SimpleNamespace(fretwork_two_four_dense_wins=wins))
    monkeypatch.setattr(two_four, "_warned", False)
    monkeypatch.setattr(two_four, "_said", True)
    A, bias = pruned(16, 32, device=device), torch.randn(16, device=device)
    s, few, many = two_four.compress(A), torch.randn(2, 32, device=device), torch.randn(500, 32, device=device)
    with caplog.at_level(logging.INFO, "fretwork"):
        two_four.linear(few, s, bias, fallback="dense")
        two_four.linear(many, s, bias)
        assert not caplog.records
        for activation in (None, "relu", "gelu", "silu"):
            y = two_four.linear(many, s, bias, activation, fallback="dense")
            assert_close(y, two_four.linear(many, s, bias, activation).cpu().double(), torch.float32)
    assert len(caplog.records) == 1 and "dense" in caplog.text
    with torch.autocast(device.type, torch.bfloat16):
        assert two_four.linear(many, s, fallback="dense").dtype == two_four.linear(many, s).dtype == torch.float32
    monkeypatch.setattr(two_four, "torch_precision", lambda: "tf32")
    with monkeypatch.context() as patched:
        patched.setattr(F, "linear", lambda *_: pytest.fail("torch would multiply with less precision than asked for"))
        two_four.linear(many, s, bias, fallback="dense", precision="ieee")
    monkeypatch.setattr(two_four, "torch_precision", lambda: "ieee")
    for x, b in ((many.half(), None), (many[:, :30], None), (many, bias[:3]), (many, bias.half())):
        with pytest.raises(RuntimeError, match=r"linear: \w+: expected .*got "):
            two_four.linear(x, s, b, fallback="dense")
    x = few.requires_grad_()
    torch.compile(lambda x: two_four.linear(x, s, fallback="dense"), fullgraph=True, backend="aot_eager")(x)


# The layer


def test_layer_by_sizes(device):
    for options in ({}, {"prune": None}, {"prune": "transposable"}, {"trainable": "dense"}):
        layer = fw.nn.SemiSparseLinear(32, 16, device=device, dtype=torch.bfloat16, **options)
        assert two_four.check(layer.to_dense()) == (True, None) and layer.to_dense().count_nonzero() == 16 * 16
        assert layer(torch.ones(3, 32, device=device).bfloat16()).shape == (3, 16)
        assert layer(torch.ones(32, device=device).bfloat16()).shape == (16,)
    for options in ({"trainable": "dense", "prune": None}, {"decay": 0.1}, {"trainable": "dense", "decay": -1.0}):
        with pytest.raises(ValueError, match=r"SemiSparseLinear: .*: expected .*got "):
            fw.nn.SemiSparseLinear(32, 16, **options)
    for sizes, options in [((8.0, 8), {}), ((8, "8"), {}), ((8, 8), {"dtype": torch.int8}), ((8, 8), {"decay": "no"})]:
        with pytest.raises(TypeError, match=r"SemiSparseLinear: \w+: expected .*got "):
            fw.nn.SemiSparseLinear(*sizes, **options)
    with pytest.raises(TypeError, match=r"SemiSparseLinear: linear: expected .*got "):
        fw.nn.SemiSparseLinear.from_dense(torch.nn.ReLU())


@pytest.mark.parametrize("trainable", ["values", "dense"])
def test_layer_refuses_no_tensors_and_has_shapes_without_memory(trainable):
    layer = fw.nn.SemiSparseLinear(32, 16, device="meta", trainable=trainable)
    assert layer(torch.empty(3, 32, device="meta")).shape == (3, 16)
    with pytest.raises(TypeError, match=r"linear: x: expected a torch\.Tensor, got list"):
        layer([1.0])


@pytest.mark.parametrize("trainable", ["values", "dense"])
def test_layer_in_a_process_group(trainable, device):
    """DDP sends buffers too, and no process group takes every dtype."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        layer = fw.nn.SemiSparseLinear(32, 16, device=device, trainable=trainable)
        torch.nn.parallel.DistributedDataParallel(layer)(torch.randn(3, 32, device=device)).sum().backward()
        assert all(p.grad is not None for p in layer.parameters())
    finally:
        torch.distributed.destroy_process_group()


def test_layer_keeps_what_the_dense_one_was(device):
    linear = torch.nn.Linear(32, 16, device=device).eval().requires_grad_(False)
    for trainable in ("values", "dense"):
        layer = fw.nn.SemiSparseLinear.from_dense(linear, trainable=trainable)
        assert not layer.training and not any(p.requires_grad for p in layer.parameters())


def test_layer_changes_dtype(device):
    layer = fw.nn.SemiSparseLinear(32, 16, device=device)
    before = layer.to_dense().detach()
    layer.bfloat16()
    same(layer.to_dense(), before.bfloat16())
    same(layer.float().to_dense(), before.bfloat16())
    fours = fw.nn.SemiSparseLinear.from_dense(torch.nn.Linear(64, 64, device=device, dtype=torch.float16))
    same(copy.deepcopy(fours).bfloat16().to_dense(), fours.to_dense().bfloat16())
    before = fours.to_dense().detach()
    with pytest.raises(ValueError, match=r"TwoFour.to: dtype: expected"):
        fours.float()
    assert fours.values.dtype == fours.bias.dtype == torch.float16, "a layer that is refused stays as it was"
    same(fours.to_dense(), before)


def test_layer_looks_at_what_it_loads(device):
    fours = fw.nn.SemiSparseLinear(16, 8, device=device, dtype=torch.float16)
    pairs = fw.nn.SemiSparseLinear(16, 8, device=device)
    assert fours.metadata.shape == pairs.metadata.shape
    fours.metadata.fill_(0x9DCE489D - 2**32)
    fw.nn.SemiSparseLinear(16, 8, device=device, dtype=torch.bfloat16).load_state_dict(fours.state_dict())
    with pytest.raises(RuntimeError, match=r"metadata: TwoFour: metadata: expected nibbles .*got "):
        pairs.load_state_dict(fours.state_dict())


@pytest.mark.parametrize("prune", ["magnitude", "transposable"])
def test_decay_pulls_what_is_pruned(prune, device):
    linear = torch.nn.Linear(32, 16, device=device)
    plain, pulled = (fw.nn.SemiSparseLinear.from_dense(linear, prune, "dense", decay=d) for d in (0.0, 0.5))
    x = torch.randn(7, 32, device=device)
    for layer in (plain, pulled):
        layer(x).square().sum().backward()
    kept = two_four.prune(linear.weight.detach(), transposable=prune == "transposable")
    assert_close(
        pulled.weight.grad - plain.weight.grad, 0.5 * (linear.weight.detach() - kept).cpu().double(), torch.float32
    )


def test_transposable_layer_multiplies_gradients_sparsely(device):
    """Whatever the batch looks like; the reference is the pruned weight as a dense one."""
    layer = fw.nn.SemiSparseLinear.from_dense(torch.nn.Linear(32, 48, device=device), "transposable", "dense")
    weight = layer.to_dense().detach()
    for shape in [(32,), (1, 32), (2, 3, 32), (0, 32)]:
        x = torch.randn(shape, device=device, requires_grad=True)
        d = torch.randn(*shape[:-1], 48, device=device)
        layer(x).backward(d)
        assert_close(x.grad, (d.double() @ weight.double()).cpu(), torch.float32)
    x = torch.randn(6, 32, device=device, requires_grad=True)
    layer(x).sum().backward()  # a gradient of stride 0
    assert_close(x.grad, weight.double().sum(0).expand(6, 32).cpu(), torch.float32)


@pytest.mark.parametrize(
    "trainable, prune", [("values", "magnitude"), ("dense", "magnitude"), ("dense", "transposable")]
)
def test_compiled_training_is_the_same(trainable, prune, device):
    torch._dynamo.reset()
    layer = fw.nn.SemiSparseLinear.from_dense(
        torch.nn.Linear(32, 16, device=device), prune, trainable, decay=0.1 * (trainable == "dense")
    )
    twin = copy.deepcopy(layer)
    run = torch.compile(twin, fullgraph=True, backend="aot_eager")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (layer, twin)]
    for rows in (5, 5, 9, 12):
        x = torch.randn(rows, 32, device=device)
        for call, optimizer in zip((layer, run), optimizers, strict=True):
            optimizer.zero_grad()
            call(x).square().mean().backward()
            optimizer.step()
    for got, want in zip(twin.parameters(), layer.parameters(), strict=True):
        assert_close(got, want.cpu().double(), torch.float32)


def test_compress_and_products_in_a_compiled_graph(device):
    def step(A, B):
        s = two_four.compress(two_four.prune(A))
        return two_four.matmul(s, B, activation="relu").sum() + s.T.to_dense().sum() + s[:4].to_dense().sum()

    A, B = torch.randn(8, 32, device=device, requires_grad=True), torch.randn(32, 3, device=device)
    want = step(A, B)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(A, B)
    assert_close(got, want.cpu().double(), torch.float32)
    (d,) = torch.autograd.grad(got, A)
    assert_close(d, torch.autograd.grad(want, A)[0].cpu().double(), torch.float32)


@pytest.mark.parametrize("dim", [-1, 0])
def test_a_compiled_graph_with_an_axis_that_is_traced(dim, device):
    """As `dynamic=True` traces every number that a function is given."""
    A = pruned(16, 16, torch.float32, device, dim)
    s, B = two_four.compress(A, dim=dim), torch.randn(16, 16, device=device)

    def product(values, metadata, dim):
        t = fw.TwoFour(values, metadata, dim=dim)
        return two_four.matmul(t, B) if t.dim else two_four.matmul(B, t)

    torch._dynamo.reset()
    got = torch.compile(product, fullgraph=True, backend="aot_eager", dynamic=True)(s.values, s.metadata, dim)
    assert_close(got, (A @ B if s.dim else B @ A).cpu().double(), torch.float32)


@pytest.mark.parametrize("prune", ["magnitude", "transposable"])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_second_derivatives_of_dense_training(decay, prune):
    """Of a loss with a penalty on its gradients. What stays is W · mask, whose gradient goes to all of W."""
    layer = fw.nn.SemiSparseLinear(16, 8, dtype=torch.float64, trainable="dense", prune=prune, decay=decay)
    x = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
    pruned = layer.to_dense().detach()
    shift = layer.weight.detach() * (pruned == 0)

    def dense(x):
        straight = layer.weight - shift  # the pruned weight, with a gradient of one
        y = F.linear(x, straight, layer.bias)
        pull = decay * (layer.weight.square() * (pruned == 0)).sum() / 2  # its gradient is what decay adds
        return y, pull - pull.detach()

    def penalized(y, extra=0.0):
        loss = y.tanh().sum() + extra
        inputs = (x, *layer.parameters())
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        return torch.autograd.grad(loss + sum(g.square().sum() for g in first), inputs)

    for got, want in zip(penalized(layer(x)), penalized(*dense(x)), strict=True):
        assert_close(got, want, torch.float64)


@pytest.mark.parametrize("trainable", ["values", "dense"])
def test_layer_says_what_it_keeps(trainable, device):
    """fp32 keeps one of two, which its user may not expect of a 2:4 layer."""
    for dtype, kept in ((torch.float32, "1:2"), (torch.float16, "2:4"), (torch.float64, "2:4")):
        if dtype not in dtypes_of(device):
            continue
        layer = fw.nn.SemiSparseLinear(16, 8, dtype=dtype, device=device, trainable=trainable)
        ratio = {"1:2": (2, 1), "2:4": (4, 2)}[kept]
        assert (layer.to_dense().unflatten(1, (-1, ratio[0])).ne(0).sum(2) <= ratio[1]).all()
        assert f"kept={kept}" in repr(layer)


@pytest.mark.parametrize("prune", ["magnitude", "transposable"])
def test_dense_training_under_vmap_and_func(prune, device):
    layer = fw.nn.SemiSparseLinear(8, 12, device=device, trainable="dense", prune=prune, decay=0.25)
    x, names = torch.randn(3, 5, 8, device=device), dict(layer.named_parameters())
    each = [torch.autograd.grad(layer(one).square().sum(), list(names.values())) for one in x]

    def loss(parameters, one):
        return torch.func.functional_call(layer, parameters, (one,)).square().sum()

    got = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(names, x)
    for n, name in enumerate(names):
        assert_close(got[name], torch.stack([one[n] for one in each]).cpu().double(), torch.float32)
    torch.vmap(layer)(x).square().sum().backward()
    mapped = layer.weight.grad.clone()
    layer.zero_grad()
    layer(x).square().sum().backward()
    assert_close(mapped, layer.weight.grad.cpu().double(), torch.float32)


def test_checkpoints_hold_what_the_layer_needs(device):
    layer = fw.nn.SemiSparseLinear(32, 16, device=device)
    assert set(layer.state_dict()) == {"values", "metadata", "bias"}
    assert set(fw.nn.SemiSparseLinear(32, 16, trainable="dense", bias=False).state_dict()) == {"weight"}
    other = pickle.loads(pickle.dumps(layer))
    assert torch.equal(other.metadata, layer.metadata) and torch.equal(other.values, layer.values)


def test_layer_of_a_matrix_that_is_sparse_already(device):
    s = two_four.compress(pruned(16, 32, torch.bfloat16, device))
    layer = fw.nn.SemiSparseLinear.from_sparse(s, torch.ones(16, dtype=torch.bfloat16, device=device))
    x = torch.randn(3, 32, device=device).bfloat16()
    assert torch.equal(layer(x), two_four.linear(x, s, layer.bias)) and layer.values.requires_grad
    trained = fw.nn.SemiSparseLinear(32, 16, dtype=torch.bfloat16, device=device, trainable="dense")
    assert torch.equal(fw.nn.SemiSparseLinear.from_sparse(trained.sparse.detach()).to_dense(), trained.to_dense())
    for wrong in (s.T, s.to_dense()):
        with pytest.raises(TypeError, match=r"SemiSparseLinear: s: expected .*, got "):
            fw.nn.SemiSparseLinear.from_sparse(wrong)
    with pytest.raises(ValueError, match=r"SemiSparseLinear: bias: expected \(16,\) of torch.bfloat16, got"):
        fw.nn.SemiSparseLinear.from_sparse(s, torch.ones(16, device=device))


def test_layer_sizes_are_checked_when_it_is_made():
    for sizes, options in [((6, 8), {}), ((96, 10), {"prune": "transposable", "trainable": "dense"})]:
        with pytest.raises(ValueError, match=r"SemiSparseLinear: \w+_features: expected a multiple of 4, got "):
            fw.nn.SemiSparseLinear(*sizes, dtype=torch.bfloat16, **options)


def test_what_autocast_multiplies_is_shown(device):
    layer = fw.nn.SemiSparseLinear(32, 16, bias=False, device=device, trainable="dense")
    x = torch.randn(3, 32, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        y, weight = layer(x), layer.to_dense()
    assert weight.dtype == torch.bfloat16 and two_four.check(weight) == (True, None)
    torch.testing.assert_close(y.float(), x.bfloat16().float() @ weight.float().T, atol=2e-2, rtol=2e-2)
