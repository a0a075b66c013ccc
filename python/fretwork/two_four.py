"""2:4 sparsity: of every four neighbours two are kept (fp32: one of two). The plain form, its tools and products.

>>> import torch, fretwork as fw
>>> A = torch.tensor([[0, 7, 0, 3, 1, 5, 0, 0, 0, 0, 2, 4, 9, 0, 9, 0]], dtype=torch.float16)
>>> s = fw.two_four.compress(A)
>>> s.values.tolist(), s.metadata.tolist()
([[7.0, 3.0, 1.0, 5.0, 2.0, 4.0, 9.0, 9.0]], [[-29107]])
>>> torch.equal(fw.two_four.matmul(s, A.T), A @ A.T)
True
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from os import PathLike, fspath
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from fretwork._checks import flag, needs, refuse, whole_number
from fretwork._library import core, two_four_order
from fretwork._shapes import two_four_axis, two_four_cut
from fretwork._torch.arguments import FLOATING, check_tensor, dtype_name, precision_name, torch_precision
from fretwork._torch.differentiable import called_with_tensors
from fretwork._torch.private import in_forward_mode
from fretwork._torch.two_four import (
    KINDS,
    SMALL,
    WORDS_TEXT,
    canonical_op,
    check_op,
    compress_op,
    group_of,
    linear_plainly,
    matmul_op,
    prune_op,
    to_dense_op,
    words_of,
)

__all__ = ["TwoFour", "cat", "check", "compress", "from_layout", "linear", "load", "matmul", "prune", "save"]

_ACTIVATIONS = {None: "none", "relu": "relu", "gelu": "gelu", "silu": "silu"}
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32}
_EMPTY = 0x44  # two groups that keep their first elements: what padding holds
_log = logging.getLogger("fretwork")


def _whole(op: str, argument: str, value: Any) -> Any:
    """An int from anything that counts as one; what torch.compile and torch.export trace stays as it is."""
    return value if type(value) in (int, torch.SymInt) else whole_number(op, argument, value)


def _axis(op: str, dim: Any, kind: type[Exception] = RuntimeError) -> int:
    return two_four_axis(op, dim, kind, _whole)


def _check_word(op: str, dtype: object) -> None:
    if not isinstance(dtype, torch.dtype):
        refuse(op, "metadata_dtype", f"torch's {WORDS_TEXT}", dtype, TypeError)


class TwoFour:
    """A matrix compressed along `dim`, in the plain form: `values` and `metadata`, both readable and of any strides.

    Of every group of four neighbours along `dim` (of two for fp32) half are kept. `values` has half the size along
    `dim`. Group g of a line has the nibble idx0 | idx1 << 2, idx0 < idx1, at bit 4g of the line's words, which have 8,
    16 or 32 bits, signed or not; an fp32 pair has 4 (the first is kept) or 0xE (the second). `fw.two_four.compress`
    makes one from a dense matrix. The constructor takes values and words from any compressor and checks every nibble: a
    group whose values are zero may have any, and has 4 in `metadata`, which is a copy. Gradients go to `values`.

    >>> import torch, fretwork as fw
    >>> s = fw.TwoFour(torch.tensor([[1.0, 2.0]]).half(), torch.tensor([[0x4E]], dtype=torch.int8))
    >>> s
    TwoFour(shape=(1, 4), dtype=torch.float16, dim=1, metadata=torch.int8)
    >>> s.to_dense().tolist(), s.T.shape
    ([[0.0, 0.0, 1.0, 2.0]], torch.Size([4, 1]))
    """

    __slots__ = ("dim", "metadata", "values")
    values: Tensor
    metadata: Tensor
    dim: int

    def __init__(self, values: Tensor, metadata: Tensor, dim: int = -1) -> None:
        check_tensor("TwoFour", "values", values)
        check_tensor("TwoFour", "metadata", metadata)
        self.values, self.dim = values, _axis("TwoFour", dim, ValueError)
        self.metadata = canonical(values, metadata, self.dim)

    def __reduce__(self) -> tuple[Any, ...]:
        """Every nibble is checked on the way back. fp8 and unsigned words are shown as types that pickle can hold."""
        small, plain = self.dtype in SMALL, _SIGNED.get(self.metadata.dtype, self.metadata.dtype)
        values = self.values.detach().view(torch.uint8) if small else self.values
        return _restored, (values, self.metadata.view(plain), self.dim, self.dtype, self.metadata.dtype)

    @property
    def shape(self) -> torch.Size:
        """The shape of the matrix."""
        rows, cols = self.values.shape
        return torch.Size((rows, 2 * cols) if self.dim else (2 * rows, cols))

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def T(self) -> TwoFour:
        """The transpose; copies nothing."""
        return from_parts(self.values.t(), self.metadata.t(), 1 - self.dim)

    def to_dense(self) -> Tensor:
        """The matrix, with zeros where nothing is kept."""
        check_tensor("to_dense", "values", self.values)
        return to_dense_op(self.values, self.metadata, self.dim)

    def detach(self) -> TwoFour:
        return from_parts(self.values.detach(), self.metadata, self.dim)

    def to(self, *args: Any, **kwargs: Any) -> TwoFour:
        """As `torch.Tensor.to`, for device and dtype. A 1:2 matrix of fp32 becomes a 2:4 matrix of another dtype.

        >>> import torch, fretwork as fw
        >>> fw.two_four.compress(torch.eye(4)).to(torch.bfloat16)
        TwoFour(shape=(4, 4), dtype=torch.bfloat16, dim=1, metadata=torch.int16)
        """
        flags = [value for value in args if isinstance(value, bool)]  # non_blocking and copy
        if len(flags) > 1 or "copy" in kwargs:
            raise RuntimeError("TwoFour.to: copy: expected no such argument, got one")
        like = self.values.new_empty(0).to(*args, **kwargs)  # torch reads the arguments
        device, dtype, non_blocking = like.device, like.dtype, kwargs.get("non_blocking", any(flags))
        metadata = self.metadata
        if dtype not in KINDS:
            refuse("TwoFour.to", "dtype", "a floating type, int8 or uint8", dtype)
        if group_of(dtype) != group_of(self.dtype):
            metadata = regrouped(self, dtype)
        values = self.values.to(device=device, dtype=dtype, non_blocking=non_blocking)
        return from_parts(values, metadata.to(device=device, non_blocking=non_blocking), self.dim)

    def cuda(self, device: torch.device | str | int | None = None) -> TwoFour:
        return self.to("cuda" if device is None else device)

    def cpu(self) -> TwoFour:
        return self.to("cpu")

    def __matmul__(self, b: Tensor) -> Tensor:
        return matmul(self, b)

    def __rmatmul__(self, a: Tensor) -> Tensor:
        return matmul(a, self)

    def __getitem__(self, index: slice | tuple[slice, slice]) -> TwoFour:
        """s[a:b] and s[a:b, c:d]; copies nothing. Along `dim` a cut is between whole words of metadata.

        >>> import torch, fretwork as fw
        >>> s = fw.two_four.compress(torch.eye(64))
        >>> s[8:24].shape, s[:, 32:].shape
        (torch.Size([16, 64]), torch.Size([64, 32]))
        """
        whole = 2 * self.metadata.element_size() * group_of(self.dtype)
        lines, kept, words = two_four_cut(index, self.shape, self.dim, whole, _whole)
        values, metadata = ((lines, kept), (lines, words)) if self.dim else ((kept, lines), (words, lines))
        return from_parts(self.values[values], self.metadata[metadata], self.dim)

    def export(self, layout: str | Tensor, tile_k: int = 128) -> tuple[Tensor, Tensor]:
        """Values and metadata in the order of another library, row by row (rows of `s.T` if dim is 0).

        `layout` is "torch" (of `torch.sparse`'s semi-structured tensors, CUTLASS), "cutlass_sm80", which is the same,
        "cutlass_sm90" for a kernel's `tile_k`, or an order of your own: int64, for each byte of the foreign metadata
        the byte of the plain one that it holds (line · bytes of a line + byte), or −1 for padding.

        >>> import torch, fretwork as fw
        >>> s = fw.two_four.compress(fw.two_four.prune(torch.randn(32, 64).half()))
        >>> values, metadata = s.export("torch")
        >>> values.shape, metadata.shape, metadata.dtype
        (torch.Size([32, 32]), torch.Size([32, 4]), torch.int16)
        >>> plain = s.metadata.view(torch.uint8).flatten()
        >>> torch.equal(s.export(torch.arange(256).flip(0))[1], plain.flip(0))
        True
        """
        s = self if self.dim else self.T
        lines, k = s.shape
        order = _order("export", layout, lines, k, self.dtype, tile_k).to(self.device)
        plain = _bytes(s)
        found = torch.full(order.shape, _EMPTY, dtype=torch.uint8, device=self.device)
        found[order >= 0] = plain.flatten()[order[order >= 0]]
        if layout in ("torch", "cutlass_sm80"):
            word = torch.int32 if self.dtype.itemsize == 1 else torch.int16
            found = found.view(word).view(lines, words_of(k, self.dtype, word))
        return s.values.detach().contiguous(), found

    def __repr__(self) -> str:
        return (
            f"TwoFour(shape={tuple(self.shape)}, dtype={self.dtype}, dim={self.dim}, metadata={self.metadata.dtype}"
            + (f", device='{self.device}'" if self.device.type != "cpu" else "")
            + (", requires_grad=True)" if self.values.requires_grad else ")")
        )


def from_parts(values: Tensor, metadata: Tensor, dim: int) -> TwoFour:
    """A TwoFour of parts that are known to be right."""
    made = object.__new__(TwoFour)
    made.values, made.metadata, made.dim = values, metadata, dim
    return made


def canonical(values: Tensor, metadata: Tensor, dim: int, keep_valid: bool = False) -> Tensor:
    """Words as kernels may read them: groups of zeros have nibble 4, with `keep_valid` only if theirs was not valid."""
    try:
        words, bad = canonical_op(values.detach(), metadata, dim, keep_valid)
    except RuntimeError as error:  # as an op says it
        if str(error).startswith("TwoFour: "):
            raise ValueError(str(error)) from None
        raise
    if torch.compiler.is_compiling() or bad.is_meta:  # nothing can be read there
        return words
    place = int(bad.item())
    if place >= 0:
        valid = "4 or 14" if values.dtype == torch.float32 else "4, 8, 9, 12, 13 or 14"
        row, col = divmod(place, values.shape[1] * (1 + dim))
        line, at = (row, col) if dim else (col, row)
        word, group = divmod(at // group_of(values.dtype), 2 * metadata.element_size())
        nibble = int((metadata if dim else metadata.t())[line, word].item()) >> 4 * group & 15
        refuse("TwoFour", "metadata", f"nibbles that are {valid}", f"{nibble} for the group at {(row, col)}")
    return words


def _restored(
    values: Tensor, metadata: Tensor, dim: int, dtype: torch.dtype | None = None, word: torch.dtype | None = None
) -> TwoFour:
    """What was one before: places of zeros stay where they are. dtype and word are what its parts are shown as."""
    values = values if dtype in (None, values.dtype) else values.view(dtype)
    metadata = metadata if word is None else metadata.view(word)
    return from_parts(values, canonical(values, metadata, dim, keep_valid=True), dim)


def _of_bytes(values: Tensor, dtype: torch.dtype, metadata: Tensor, dim: int) -> TwoFour:
    """As pickles of version 0.1 call it."""
    return _restored(values, metadata, dim, dtype)


# So that torch.load takes them as it takes tensors.
torch.serialization.add_safe_globals([TwoFour, _restored, _of_bytes])


# Metadata as bytes and nibbles, for what is rare. Lines are rows here.


def _groups(s: TwoFour) -> int:
    return s.shape[s.dim] // group_of(s.dtype)


def _bytes(s: TwoFour) -> Tensor:
    words = s.metadata if s.dim else s.metadata.t()
    return words.contiguous().view(torch.uint8)[:, : -(-_groups(s) // 2)]


def _nibbles(s: TwoFour) -> Tensor:
    both = _bytes(s)
    return torch.stack((both & 15, both >> 4), -1).flatten(1)[:, : _groups(s)]


def _words(nibbles: Tensor, word: torch.dtype, dim: int) -> Tensor:
    missing = -nibbles.shape[1] % (2 * word.itemsize)
    pairs = F.pad(nibbles, (0, missing), value=4).unflatten(1, (-1, 2))
    both = (pairs[..., 0] | pairs[..., 1] << 4).flatten()
    words = both.view(word).view(nibbles.shape[0], -(-nibbles.shape[1] // (2 * word.itemsize)))
    return words if dim else words.t()


def regrouped(s: TwoFour, dtype: torch.dtype) -> Tensor:
    """The metadata of the same matrix in a type with other groups."""
    nibbles = _nibbles(s)
    if group_of(dtype) == 4:  # two pairs side by side are a group that keeps one of each
        if nibbles.shape[1] % 2:
            refuse("TwoFour.to", "dtype", f"a multiple of 4 along dim {s.dim} for {dtype}", tuple(s.shape))
        second = (nibbles == 0xE).to(torch.uint8).unflatten(1, (-1, 2))
        return _words(second[..., 0] | (second[..., 1] + 2) << 2, s.metadata.dtype, s.dim)
    if not nibbles.is_meta and ((nibbles == 4) | (nibbles == 0xE)).any():
        refuse("TwoFour.to", "dtype", "a matrix with one kept of every two for float32", "two of one pair")
    first, second = (torch.where(index.bool(), 0xE, 4) for index in (nibbles & 1, nibbles >> 2 & 1))
    return _words(torch.stack((first, second), -1).flatten(1).to(torch.uint8), s.metadata.dtype, s.dim)


def _order(op: str, layout: str | Tensor, lines: int, k: int, dtype: torch.dtype, tile_k: int) -> Tensor:
    if isinstance(layout, Tensor):
        size = lines * -(-(k // group_of(dtype)) // 2)
        if layout.dtype != torch.int64 or layout.dim() != 1:
            refuse(op, "layout", "a name or one dimension of int64", f"{layout.dtype} {tuple(layout.shape)}")
        if layout.numel() and (int(layout.min()) < -1 or int(layout.max()) >= size):
            refuse(op, "layout", f"-1 to {size - 1}", f"{int(layout.min())} to {int(layout.max())}")
        return layout
    return torch.from_numpy(two_four_order(op, layout, lines, k, dtype_name(dtype), _whole(op, "tile_k", tile_k)))


# What makes a TwoFour


def compress(A: Tensor, dim: int = -1, metadata_dtype: torch.dtype = torch.int16, *, validate: bool = True) -> TwoFour:
    """The plain form of a matrix that has it: at most two non-zeros in every four along `dim` (one in two for fp32).

    A group with more is refused, and named; with `validate=False` there is no check, and no wait for a GPU. −0.0 counts
    as zero, NaN does not. Words of metadata have 8, 16 or 32 bits, signed or not. Gradients go to what is kept.

    >>> import torch, fretwork as fw
    >>> fw.two_four.compress(torch.eye(8).half(), metadata_dtype=torch.int8).metadata[:3].tolist()
    [[68], [68], [72]]
    >>> fw.two_four.compress(torch.ones(8, 8).half())
    Traceback (most recent call last):
    RuntimeError: compress: A: expected at most 2 non-zeros in every 4, got more in the group at (0, 0)
    """
    check_tensor("compress", "A", A)
    _check_word("compress", metadata_dtype)
    axis = _axis("compress", dim)
    values, metadata = compress_op(A, axis, metadata_dtype, flag("compress", "validate", validate))
    return from_parts(values, metadata, axis)


def prune(A: Tensor, dim: int = -1, transposable: bool = False) -> Tensor:
    """A with half of every group along `dim` set to zero: the two largest magnitudes of four stay (of equal ones the
    first), of two the larger for fp32, which is logged once.

    `transposable`: half of every row and every column of each 4×4 (fp32: 2×2) square stays, near the largest sum of
    magnitudes, so that A and its transpose both compress. The gradient passes where something stayed.

    >>> import torch, fretwork as fw
    >>> fw.two_four.prune(torch.tensor([[1.0, -5, 3, 2, 0, 0, 0, 1]]).half()).tolist()
    [[0.0, -5.0, 3.0, 0.0, 0.0, 0.0, 0.0, 1.0]]
    """
    check_tensor("prune", "A", A)
    say_what_float32_keeps(A.dtype)
    return prune_op(A, _axis("prune", dim), flag("prune", "transposable", transposable))


_said = False


def say_what_float32_keeps(dtype: torch.dtype) -> None:
    """Once: who prunes float32 may expect two of four."""
    global _said
    if dtype == torch.float32 and not is_compiling() and not _said:
        _said = True
        _log.warning(
            "two_four.prune: float32 keeps one of every two (1:2), as the hardware has it; float16 and bfloat16 keep "
            "two of every four (logged once)"
        )


def check(A: Tensor, dim: int = -1) -> tuple[bool, tuple[int, int] | None]:
    """Whether `compress` takes A, and the place of the first element of the first group that it refuses.

    >>> import torch, fretwork as fw
    >>> fw.two_four.check(torch.eye(8)), fw.two_four.check(torch.ones(8, 8))
    ((True, None), (False, (0, 0)))
    """
    check_tensor("check", "A", A)
    if A.is_meta:
        refuse("check", "A", "a matrix with data", "one on meta", RuntimeError)
    place = int(check_op(A.detach(), _axis("check", dim)).item())
    return (True, None) if place < 0 else (False, divmod(place, A.shape[1]))


def cat(parts: Iterable[TwoFour], dim: int = 0) -> TwoFour:
    """Matrices side by side, all compressed along the same axis, of one dtype and one kind of word.

    >>> import torch, fretwork as fw
    >>> s = fw.two_four.compress(torch.eye(32))
    >>> fw.two_four.cat([s, s]).shape, fw.two_four.cat([s, s, s], dim=1).shape
    (torch.Size([64, 32]), torch.Size([32, 96]))
    """
    if isinstance(parts, TwoFour) or not isinstance(parts, Iterable):
        refuse("cat", "parts", "a sequence of fretwork.TwoFour", type(parts).__name__, TypeError)
    parts = list(parts)
    if not parts or not all(isinstance(s, TwoFour) for s in parts):
        got = "none" if not parts else ", ".join(type(s).__name__ for s in parts)
        refuse("cat", "parts", "at least one fretwork.TwoFour", got, TypeError)
    axis, first = _axis("cat", dim, ValueError), parts[0]
    for n, s in enumerate(parts):
        kind, like = ((t.dtype, t.metadata.dtype, t.dim, t.shape[1 - axis], t.device) for t in (s, first))
        if kind != like:
            words = "{} in {} words with dim {}, {} along the other axis, on {}"
            refuse("cat", f"parts[{n}]", words.format(*like), words.format(*kind))

    def joined(tensors: list[Tensor]) -> Tensor:  # in memory as they are: lines in one piece
        return torch.cat(tensors, axis) if first.dim else torch.cat([t.t() for t in tensors], 1 - axis).t()

    values = joined([s.values for s in parts])
    per_word = 2 * first.metadata.element_size()
    if axis != first.dim or all(_groups(s) % per_word == 0 for s in parts[:-1]):
        metadata = joined([s.metadata for s in parts])
    else:
        metadata = _words(torch.cat([_nibbles(s) for s in parts], 1), first.metadata.dtype, first.dim)
    return from_parts(values, metadata, first.dim)


def from_layout(
    values: Tensor,
    metadata: Tensor,
    layout: str | Tensor,
    dim: int = -1,
    *,
    tile_k: int = 128,
    metadata_dtype: torch.dtype = torch.int16,
) -> TwoFour:
    """What `TwoFour.export` gave, or another library, in the plain form; `dim` says which axis the rows are of.

    `layout` and `tile_k` are those of `TwoFour.export`. "torch" is what torch's semi-structured tensors hold for
    CUTLASS: `t.packed` and `t.meta`.

    >>> import torch, fretwork as fw
    >>> A = fw.two_four.prune(torch.randn(32, 64).half())
    >>> pair = fw.two_four.compress(A).export("torch")
    >>> torch.equal(fw.two_four.from_layout(*pair, "torch").to_dense(), A)
    True
    """
    op, axis = "from_layout", _axis("from_layout", dim, ValueError)
    check_tensor(op, "values", values)
    if metadata is None:  # as torch's tensors for cuSPARSELt have it
        refuse(op, "metadata", "words beside the values", "None; compress(t.to_dense()) instead", TypeError)
    check_tensor(op, "metadata", metadata)
    if metadata.is_floating_point() or metadata.is_complex():
        refuse(op, "metadata", "integers", metadata.dtype)
    _check_word(op, metadata_dtype)
    if values.dim() != 2:
        refuse(op, "values", "a matrix, row by row of what is compressed", tuple(values.shape))
    lines, k = values.shape[0], 2 * values.shape[1]
    order = _order(op, layout, lines, k, values.dtype, tile_k).to(values.device)
    foreign = metadata.detach().contiguous().view(torch.uint8).flatten()
    if foreign.numel() != order.numel():
        refuse(op, "metadata", f"{order.numel()} bytes", foreign.numel())
    per_line, held = -(-(k // group_of(values.dtype)) // 2), order >= 0
    plain = torch.zeros(lines * per_line, dtype=torch.uint8, device=values.device)  # what no byte is for is refused
    plain[order[held]] = foreign = foreign.to(values.device)[held]
    if isinstance(layout, Tensor) and not torch.equal(plain[order[held]], foreign):
        refuse(op, "metadata", "the same in all bytes that the layout has for one", "others")
    both = plain.view(lines, per_line)
    nibbles = torch.stack((both & 15, both >> 4), -1).flatten(1)[:, : k // group_of(values.dtype)]
    return TwoFour(values if axis else values.t(), _words(nibbles, metadata_dtype, axis), axis)


# Products


def matmul(
    a: TwoFour | Tensor,
    b: TwoFour | Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    scale_out: Tensor | None = None,
    *,
    precision: str | None = None,
) -> Tensor:
    """activation(a·b·scale_a·scale_b + bias)·scale_out, where one of a and b is a `TwoFour` compressed along the axis
    that is summed over.

    a is (M, K) with dim=-1 and b (…, K, N), or a (…, M, K) and b (K, N) with dim=0; strides may be any. The sums are
    fp32 (int32 for int8 and uint8), the result has the operands' dtype (int32 for integers, bfloat16 for fp8) unless
    `out_dtype` says otherwise: any floating type, fp8 or int8. It is rounded once, to nearest even; fp8 and int8 are
    saturated. `bias` has one number for each feature of the sparse operand, in the result's dtype (or fp32, where that
    has 8 bits). `activation` is None, "relu", "gelu" (with erf) or "silu". Scales are fp32: `scale_a` and `scale_b` one
    number or one for each row of a and column of b, `scale_out` one number. `precision` is that of `fw.sdd`.

    Gradients go to the dense operand, bias and `values`. Under autocast the dense operand takes the dtype of the
    sparse one.

    >>> import torch, fretwork as fw
    >>> A, B = fw.two_four.prune(torch.randn(8, 16)), torch.randn(3, 16, 5)
    >>> torch.allclose(fw.two_four.matmul(fw.two_four.compress(A), B), A @ B, atol=1e-5)
    True
    >>> torch.allclose(fw.two_four.matmul(B.mT, fw.two_four.compress(A).T), B.mT @ A.T, atol=1e-5)
    True
    >>> s, x = fw.two_four.compress(torch.tensor([[0, 100, 0, -7]]).char()), torch.ones(4, 1).char()
    >>> fw.two_four.matmul(s, x, out_dtype=torch.int8, scale_out=torch.tensor(0.5)).item()  # 46.5, to even
    46
    """
    left = isinstance(a, TwoFour)
    if left == isinstance(b, TwoFour):
        refuse("matmul", "a and b", "exactly one fretwork.TwoFour", "two" if left else "none", TypeError)
    s, dense = (a, b) if left else (b, a)
    assert isinstance(s, TwoFour) and not isinstance(dense, TwoFour)
    if s.dim != (1 if left else 0):  # a number that torch.compile traces differs from True
        raise NotImplementedError(
            f"matmul: {'a' if left else 'b'}: expected a matrix compressed along the axis that is summed over, "
            f"dim={'-1' if left else '0'}, got dim={s.dim}; compress the dense matrix along that axis"
        )
    check_tensor("matmul", "b" if left else "a", dense)
    for name, extra in (("bias", bias), ("scale_a", scale_a), ("scale_b", scale_b), ("scale_out", scale_out)):
        if extra is not None:
            check_tensor("matmul", name, extra)
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        refuse("matmul", "out_dtype", "a torch.dtype or None", repr(out_dtype), TypeError)
    how = "left" if left else "right"
    word, exact = _activation("matmul", activation), product_precision("matmul", s.dtype, precision)
    return _product(s, dense, bias, word, out_dtype, scale_a, scale_b, how, exact, scale_out)


def linear(
    x: Tensor,
    s: TwoFour,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    fallback: str | None = None,
    precision: str | None = None,
) -> Tensor:
    """activation(x sᵀ + bias): x (…, in), s (out, in) with dim=-1. See `matmul`.

    With `fallback="dense"` s is expanded and multiplied as a dense matrix where that was quicker when measured, as for
    exact fp32 on a GPU, and the log of "fretwork" says so once. Not inside `torch.compile`.

    >>> import torch, fretwork as fw
    >>> weight, x, bias = fw.two_four.prune(torch.randn(12, 16)), torch.randn(2, 5, 16), torch.randn(12)
    >>> y = fw.two_four.linear(x, fw.two_four.compress(weight), bias, "relu")
    >>> torch.allclose(y, torch.nn.functional.linear(x, weight, bias).relu(), atol=1e-5)
    True
    """
    if not isinstance(s, TwoFour):
        refuse("linear", "s", "a fretwork.TwoFour", type(s).__name__, TypeError)
    short = activation is None and fallback is None and precision is None and s.dim == 1
    operands = (x, s.values) if bias is None else (x, s.values, bias)
    if short and s.values.dtype in FLOATING and called_with_tensors(*operands):
        try:
            exact = "ieee" if s.values.is_cpu else product_precision("linear", s.values.dtype, None)
            return linear_plainly(s.values, s.metadata, x, bias, exact)
        except (RuntimeError, NotImplementedError):
            pass  # the checks below say what is wrong
    if s.dim != 1:
        raise NotImplementedError(
            "linear: s: expected (out, in) compressed along in, dim=-1, got dim=0; compress the weight along that axis"
        )
    check_tensor("linear", "x", x)
    if bias is not None:
        check_tensor("linear", "bias", bias)
    word = "none" if activation is None else _activation("linear", activation)
    exact = product_precision("linear", s.values.dtype, precision)
    if fallback is not None:
        if fallback != "dense":
            refuse("linear", "fallback", 'None or "dense"', repr(fallback), RuntimeError)
        if not torch.compiler.is_compiling() and dense_wins(x, s, bias, exact):
            with torch.autocast(x.device.type, enabled=False):  # the result's dtype is the sparse product's
                y = F.linear(x, s.to_dense(), bias)
            return y if activation is None else getattr(F, activation)(y)
    return _product(s, x, bias, word, None, None, None, "linear", exact)


def _product(
    s: TwoFour,
    dense: Tensor,
    bias: Tensor | None,
    activation: str,
    out_dtype: torch.dtype | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    product: str,
    precision: str,
    scale_out: Tensor | None = None,
) -> Tensor:
    values = s.values
    if in_forward_mode() and not is_compiling():
        check_tensor("matmul", "values", values)  # which refuses tangents, as everywhere
    rest = (bias, activation, out_dtype, scale_a, scale_b, product, precision, scale_out)
    return matmul_op(values, s.metadata, dense, *rest)


def _activation(op: str, name: str | None) -> str:
    word = _ACTIVATIONS.get(name) if name is None or isinstance(name, str) else None
    if word is None:
        refuse(op, "activation", "None, relu, gelu or silu", repr(name), RuntimeError)
    return word


def product_precision(op: str, dtype: torch.dtype, precision: str | None) -> str:
    """Only fp32 has a choice."""
    if precision is not None:
        return precision_name(op, precision)
    return torch_precision() if dtype == torch.float32 else "ieee"


_warned = False


def dense_wins(x: Tensor, s: TwoFour, bias: Tensor | None, precision: str) -> bool:
    out, k = s.shape
    fits = x.dtype == s.dtype and x.dtype in FLOATING and x.dim() > 0 and x.shape[-1] == k
    if not fits or (bias is not None and (bias.dtype != x.dtype or tuple(bias.shape) != (out,))):
        return False  # the sparse product says what is wrong
    if x.dtype == torch.float32 and precision != torch_precision():
        return False  # the dense product would be torch's, in its precision
    rows = x.numel() // max(k, 1)
    name, kind, index = dtype_name(s.dtype).encode(), s.device.type.encode(), s.device.index or 0
    wins = core().fretwork_two_four_dense_wins(out, rows, k, name, kind, index, precision.encode()) == 1
    global _warned
    if wins and not _warned:
        _warned = True
        _log.warning(
            "two_four.linear: (%d, %d) by %d rows of %s on %s runs as a dense product, which is quicker there "
            "(logged once)",
            *(out, k, rows, s.dtype, s.device),
        )
    return wins


# Files

_VERSION = "1"


def _safetensors(op: str) -> Any:
    with needs(op, "safetensors", "files"):
        import safetensors
        import safetensors.torch
    return safetensors


def _path(op: str, file: object) -> str:
    if not isinstance(file, (str, PathLike)):
        refuse(op, "file", "a path", repr(file), TypeError)
    return str(fspath(file))


def save(file: str | PathLike[str], matrices: TwoFour | Mapping[str, TwoFour]) -> None:
    """One matrix, or several by name, as a safetensors file (which needs that package) with a version.

    A matrix is stored line by line: `name.values`, `name.metadata`, and its dim in the file's metadata.

    >>> import tempfile, torch, fretwork as fw
    >>> s = fw.two_four.compress(torch.eye(16))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fw.two_four.save(f"{folder}/weights.safetensors", {"up": s})
    ...     fw.two_four.load(f"{folder}/weights.safetensors")["up"].shape
    torch.Size([16, 16])
    """
    if not isinstance(matrices, (TwoFour, Mapping)):
        refuse("save", "matrices", "a fretwork.TwoFour or a mapping of them", type(matrices).__name__, TypeError)
    given = {"": matrices} if isinstance(matrices, TwoFour) else matrices
    named = {str(name): s for name, s in given.items()}
    if len(named) < len(given):
        refuse("save", "matrices", "names that differ as texts", ", ".join(map(repr, given)))
    tensors, texts, places = {}, {"format": "fretwork.two_four", "version": _VERSION}, set()
    for name, s in named.items():
        if not isinstance(s, TwoFour):
            refuse("save", f"matrices[{name!r}]", "a fretwork.TwoFour", type(s).__name__, TypeError)
        prefix = f"{name}." if name else ""
        for key, t in (("values", s.values.detach()), ("metadata", s.metadata)):
            lines = (t if s.dim else t.t()).contiguous()
            shared = lines.untyped_storage().data_ptr() in places  # which safetensors refuses
            tensors[prefix + key] = lines.clone() if shared else lines
            places.add(lines.untyped_storage().data_ptr())
        texts[f"{prefix}dim"] = str(s.dim)
    library = _safetensors("save")
    try:
        library.torch.save_file(tensors, _path("save", file), texts)
    except library.SafetensorError as error:
        refuse("save", "file", "a path that can be written", f"{file}: {error}")


def load(file: str | PathLike[str], device: torch.device | str = "cpu") -> TwoFour | dict[str, TwoFour]:
    """What `save` wrote: the matrix, or a dict of them. Every nibble is checked.

    >>> import tempfile, torch, fretwork as fw
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fw.two_four.save(f"{folder}/weight.safetensors", fw.two_four.compress(torch.eye(16)))
    ...     fw.two_four.load(f"{folder}/weight.safetensors")
    TwoFour(shape=(16, 16), dtype=torch.float32, dim=1, metadata=torch.int16)
    """
    found, library = {}, _safetensors("load")
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError):
        refuse("load", "device", "a torch.device or its name", repr(device))
    try:
        held_open = library.safe_open(_path("load", file), framework="pt")
    except library.SafetensorError as error:
        refuse("load", "file", "a safetensors file", f"{file}: {error}")
    with held_open as opened:
        texts = opened.metadata() or {}
        if texts.get("format") != "fretwork.two_four":
            refuse("load", "file", "a file of fretwork.two_four.save", f"{file} without that mark")
        if texts.get("version") != _VERSION:
            refuse("load", "version", _VERSION, texts.get("version"))
        held = set(opened.keys())
        for key, text in texts.items():
            if key == "dim" or key.endswith(".dim"):
                prefix = key[:-3]
                if text not in ("0", "1"):
                    refuse("load", key, "0 or 1", text)
                names = [prefix + part for part in ("values", "metadata")]
                if missing := set(names) - held:
                    refuse("load", "file", f"{' and '.join(names)} in {file}", f"no {' and no '.join(sorted(missing))}")
                held -= set(names)
                values, metadata = (t if text == "1" else t.t() for t in map(opened.get_tensor, names))
                found[prefix[:-1]] = _restored(values, metadata, int(text)).to(device)
        if held:
            refuse("load", "file", f"a dim for every matrix in {file}", f"none for {', '.join(sorted(held))}")
    return found[""] if list(found) == [""] else found
