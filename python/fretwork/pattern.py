"""Patterns as Python values: what is non-zero, said once, compared by text, and carried everywhere as a text."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import operator
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fretwork._library import core, last_error, owned

if TYPE_CHECKING:
    import torch

_LARGEST_MASK = 2**30


class Pattern:
    """An immutable description of what is non-zero. Patterns are equal when their texts are.

    >>> import fretwork as fw
    >>> layout = fw.Pattern.parse("block((1,2,2),(16,16),~J)")
    >>> layout
    BlockLayout(heads=1, blocks=(2, 2), block=16, nnz=2, density=0.5)
    >>> layout == fw.BlockLayout([[1, 0], [0, 1]], block=16)
    True
    """

    __slots__ = ("_density", "_held", "_key", "_nnz", "_shape", "_text")
    _text: str
    _key: str
    _shape: tuple[int, ...]
    _nnz: int
    _density: float

    def __init__(self) -> None:
        raise TypeError("Pattern: call: expected a family such as BlockLayout or Pattern.parse(text), got Pattern()")

    @staticmethod
    def parse(text: str) -> Pattern:
        """The pattern that a canonical text, or any text of the grammar, describes.

        >>> Pattern.parse("random_blocks((2, 4, 4), 32, 0.5, 7)").shape
        (2, 128, 128)
        """
        if not isinstance(text, str):
            raise TypeError(f"Pattern.parse: text: expected a str, got {type(text).__name__}")
        return _parsed(text)

    @property
    def text(self) -> str:
        """Canonical, one line; `Pattern.parse` restores the pattern from it."""
        return self._text

    @property
    def key(self) -> str:
        """The text, or for a long one a digest that this process can look up: how a pattern crosses into an op."""
        return self._key

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in elements."""
        return self._shape

    @property
    def nnz(self) -> int:
        """How many are stored, in the family's own unit (blocks for a block layout)."""
        return self._nnz

    @property
    def density(self) -> float:
        """The share of elements that are non-zero."""
        return self._density

    @property
    def T(self) -> Pattern:
        """The transposed pattern."""
        return _transposed(self._text)

    def mask(self, device: torch.device | str | None = None) -> torch.Tensor:
        """A dense bool tensor of the pattern's shape; refuses more than 2^30 elements.

        >>> Pattern.parse("block((1,1,2),(8,8),~C)").mask().sum(dim=(0, 1)).tolist()
        [0, 0, 0, 0, 0, 0, 0, 0, 8, 8, 8, 8, 8, 8, 8, 8]
        """
        import torch

        return torch.from_numpy(self.numpy_mask()).to(device)

    def numpy_mask(self) -> np.ndarray:
        """The same as a NumPy array.

        >>> Pattern.parse("block((1,1,2),(8,8),~C)").numpy_mask().shape
        (1, 8, 16)
        """
        count = math.prod(self._shape)
        if count > _LARGEST_MASK:
            raise ValueError(f"mask: pattern: expected at most 2^30 elements, got {count} in {self._shape}")
        mask = np.empty(self._shape, dtype=np.bool_)
        with _open(self) as handle:
            if core().fretwork_pattern_mask(handle, mask.ctypes.data, count) != 0:
                raise ValueError(last_error())
        return mask

    def __or__(self, other: Pattern) -> Pattern:
        """What is in either. Block layouts of one head and Kronecker patterns may join.

        >>> p = Pattern.parse("sliding_window(64, 4, 0)") | Pattern.parse("strided(64, 16)")
        >>> p.text, p.nnz
        ('sliding_window(64,4,0)|strided(64,16)', 1000)
        """
        return _combined("union", self._text, other._text) if isinstance(other, Pattern) else NotImplemented

    def __and__(self, other: Pattern) -> Pattern:
        """What is in both.

        >>> (Pattern.parse("causal(64)") & Pattern.parse("document((24, 40))")).density
        0.2734375
        """
        return _combined("intersection", self._text, other._text) if isinstance(other, Pattern) else NotImplemented

    def __getitem__(self, place: Any) -> Any:
        """Rows, and columns behind a comma, as slices with step 1. The parts move; nothing becomes a mask.

        >>> p = Pattern.parse("strided(4096, 128)")[1024:, :2048]
        >>> p.shape, p.text
        ((3072, 2048), 'strided(4096,128)[1024:4096,0:2048]')
        """
        both = place if isinstance(place, tuple) else (place,)
        if not 1 <= len(both) <= 2 or not all(isinstance(one, slice) for one in both):
            raise TypeError(f"Pattern: index: expected slices such as p[8:, :100], got {place!r}")
        ends: list[int] = []
        for one, length in zip((*both, slice(None))[:2], self._shape[-2:], strict=True):
            ends += _slice_ends(one, length)
        return _sliced(self._text, *ends)

    def contains(self, row: int, col: int) -> bool:
        """Whether query `row` may see key `col`.

        >>> Pattern.parse("strided(4096, 128)").contains(1000, 1000 - 3 * 128)
        True
        """
        with _open(self) as handle:
            place = whole_number("contains", "row", row), whole_number("contains", "col", col)
            found = core().fretwork_pattern_contains(handle, *place)
        if found < 0:
            raise ValueError(last_error())
        return found == 1

    def acsr(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(start, stride, count) of each row: its keys are start + t·stride, 0 ≤ t < count. int64.

        ValueError, naming the first row that is not one progression, where there is such a row.

        >>> [x.tolist() for x in Pattern.parse("dilated(5, 1, 2)").acsr()]
        [[0, 1, 0, 1, 2], [2, 2, 2, 2, 2], [2, 2, 3, 2, 2]]
        """
        import torch

        start, stride, count = (torch.from_numpy(x) for x in self.numpy_acsr())
        return start, stride, count

    def numpy_acsr(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The same as NumPy arrays.

        >>> Pattern.parse("causal(3)").numpy_acsr()[2].tolist()
        [1, 2, 3]
        """
        start, stride, count = np.empty((3, self._shape[-2]), dtype=np.int64)
        with _open(self) as handle:
            if core().fretwork_pattern_acsr(handle, start.ctypes.data, stride.ctypes.data, count.ctypes.data) != 0:
                raise ValueError(last_error())
        return start, stride, count

    def columns(self) -> torch.Tensor:
        """The keys of each row in ascending order, −1 behind a row's end: (Sq, W) int32, W the widest row.

        This is where the entries of `fw.r_sddmm` stand: entry t of row i is key columns[i, t].

        >>> Pattern.parse("sinks(5, 1, 2)").columns().tolist()
        [[0, -1, -1], [0, 1, -1], [0, 1, 2], [0, 2, 3], [0, 3, 4]]
        """
        import torch

        return torch.from_numpy(self.numpy_columns())

    def numpy_columns(self) -> np.ndarray:
        """The same as a NumPy array.

        >>> Pattern.parse("causal(2)").numpy_columns().tolist()
        [[0, -1], [0, 1]]
        """
        rows, width = self._shape[-2], row_width(self, "columns")
        if rows * width > _LARGEST_MASK:
            got = f"{rows * width} in {(rows, width)}"
            raise ValueError(f"columns: pattern: expected a table of at most 2^30 elements, got {got}")
        table = np.empty((rows, width), dtype=np.int32)
        with _open(self) as handle:
            if core().fretwork_pattern_columns(handle, width, table.ctypes.data) != 0:
                raise ValueError(last_error())
        return table

    def block_cover(self, block: int | tuple[int, int] = 32) -> tuple[BlockLayout, float]:
        """The blocks that the pattern touches, and the share of their elements that it leaves out (the fill-in).

        For the operators that take block layouts. The last blocks may reach beyond the pattern.

        >>> Pattern.parse("sliding_window(64, 3, 0)").block_cover(16)
        (BlockLayout(heads=1, blocks=(4, 4), block=16, nnz=7, density=0.4375), 0.8604910714285714)
        """
        sides, fill_in = _block_sides("block_cover", block), ctypes.c_double()
        with _open(self) as handle:
            layout = _from_handle(core().fretwork_pattern_block_cover(handle, *sides, ctypes.byref(fill_in)))
        assert isinstance(layout, BlockLayout)
        return layout, fill_in.value

    def describe(self) -> str:
        """What was recognised, a line for each kind of part, and what attention costs on a GPU: tiles, by order.

        >>> print(Pattern.parse("sliding_window(1024, 128, 0)").describe(), end="")
        sliding_window(1024,128,0): 1024×1024, 123840 elements, 11.8 %
          plain order: 1 band; 100 % of the elements
          15 tiles of 128×128 in plain order
          on a GPU attention multiplies 1.98 times the elements
        """
        return self._text_of("describe")

    def show(self, head: int = 0, width: int | None = None) -> None:
        """Prints a picture, as `fretwork show` draws it: queries downwards, keys to the right.

        `width` is what a line may take; the terminal's by default.

        >>> Pattern.parse("causal(8)").show()
        ┌────────┐
        │█▄      │
        │███▄    │
        │█████▄  │
        │███████▄│
        └────────┘
        """
        columns = shutil.get_terminal_size().columns if width is None else whole_number("show", "width", width)
        if not 3 <= columns <= 1000:
            if width is not None:
                raise ValueError(f"show: width: expected 3 to 1000, got {width}")
            columns = 80
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        print(self._text_of("draw", whole_number("show", "head", head), columns, int(colour)), end="")

    def _repr_svg_(self) -> str | None:
        """The picture in a notebook; None where there is nothing to draw or too much."""
        if math.prod(self._shape) == 0:
            return None
        try:
            return self._text_of("svg", 0)
        except ValueError:
            return None

    def _text_of(self, function: str, *arguments: int) -> str:
        """A text that the core writes of a pattern."""
        write = getattr(core(), f"fretwork_pattern_{function}")
        with _open(self) as handle:
            room = ctypes.create_string_buffer(1 << 12)
            length = write(handle, *arguments, room, len(room))
            if length >= len(room):
                room = ctypes.create_string_buffer(length + 1)
                write(handle, *arguments, room, len(room))
        if length < 0:
            raise ValueError(last_error())
        return room.value.decode()

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__}: {name}: expected no assignment (patterns are immutable), got one")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__}: {name}: expected no deletion (patterns are immutable), got one")

    def __eq__(self, other: object) -> bool:
        return self._text == other._text if isinstance(other, Pattern) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._text)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return _parsed, (self._text,)

    def __copy__(self) -> Pattern:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Pattern:
        return self

    def __repr__(self) -> str:
        return f"Pattern({self._text!r})"


class BlockLayout(Pattern):
    """Whole blocks that are there or not, one layout per head.

    `mask` is (heads, rows, cols) or (rows, cols) in blocks, 0/1 of any bool or real dtype: a torch tensor on any
    device, an array or nested lists. `block` is 8 to 128, or (rows, cols).

    >>> import torch
    >>> layout = BlockLayout(torch.eye(3, dtype=torch.bool), block=(16, 32))
    >>> layout.heads, layout.block, layout.nnz, layout.shape
    (1, (16, 32), 3, (1, 48, 96))
    >>> layout.T.shape
    (1, 96, 48)
    """

    __slots__ = ("_block", "_grid")
    _grid: tuple[int, int, int]
    _block: tuple[int, int]

    def __init__(self, mask: Any, block: int | tuple[int, int] = 32) -> None:
        bits, sides = _mask_bits(mask), _block_sides("BlockLayout", block)
        sizes = (ctypes.c_int64 * 5)(*bits.shape, *sides)
        with owned(core().fretwork_block_layout(sizes, bits.ctypes.data)) as handle:
            _fill(self, handle)

    @classmethod
    def for_conv2d(cls, mask: Any, block: int | tuple[int, int] = 32) -> BlockLayout:
        """The layout of a convolution's weight, from a mask (out blocks, in blocks, kh, kw) of 0 and 1.

        It has a head for each kernel position (r, s), r·kw + s; a block is (output channels, input channels).

        >>> import numpy as np
        >>> BlockLayout.for_conv2d(np.ones((4, 2, 3, 3), bool), block=16)
        BlockLayout(heads=9, blocks=(4, 2), block=16, nnz=72, density=1)
        """
        bits = zeros_and_ones("for_conv2d", "mask", mask)
        if bits.ndim != 4:
            raise ValueError(f"for_conv2d: mask: expected (out blocks, in blocks, kh, kw), got {bits.shape}")
        out, inner, kh, kw = bits.shape
        return cls(bits.transpose(2, 3, 0, 1).reshape(kh * kw, out, inner), block)

    @property
    def heads(self) -> int:
        """The number of heads, each with blocks of its own."""
        return self._grid[0]

    @property
    def blocks(self) -> tuple[int, int]:
        """Rows and columns of blocks in a head."""
        return self._grid[1:]

    @property
    def block(self) -> int | tuple[int, int]:
        """The side of a block, or (rows, cols) where they differ."""
        return self._block[0] if self._block[0] == self._block[1] else self._block

    @property
    def block_shape(self) -> tuple[int, int]:
        """(rows, cols) of a block."""
        return self._block

    @property
    def T(self) -> BlockLayout:
        """The layout of the transposed matrix; its packed values stand in another order, each block transposed."""
        turned = super().T
        assert isinstance(turned, BlockLayout)
        return turned

    def pack(self, dense: torch.Tensor) -> torch.Tensor:
        """Dense (Z, H, M, N) or (H, M, N), or (M, N) for one head, to packed values ((Z,) nnz, rows, cols).

        >>> import torch
        >>> layout = BlockLayout([[0, 1], [1, 1]], block=8)
        >>> layout.pack(torch.arange(256.0).reshape(16, 16)).shape
        torch.Size([3, 8, 8])
        """
        from fretwork import ops

        return ops.pack(dense, self)

    def unpack(self, values: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """Packed values ((Z,) nnz, rows, cols) to dense ((Z,) H, M, N), with `fill` where there is no block.

        >>> import torch
        >>> layout = BlockLayout([[0, 1], [1, 1]], block=8)
        >>> layout.unpack(torch.ones(3, 8, 8)).sum().item()
        192.0
        """
        from fretwork import ops

        return ops.unpack(values, self, fill)

    def __repr__(self) -> str:
        return (
            f"BlockLayout(heads={self.heads}, blocks={self.blocks}, block={self.block}, nnz={self.nnz}, "
            f"density={self.density:.4g})"
        )


class KroneckerPattern(Pattern):
    """The support I_a ⊗ 1_{b×c} ⊗ I_d of one Kronecker factor.

    Its weights are (a, b, c, d): w[i, j, k, l] stands at row (i·b + j)·d + l, column (i·c + k)·d + l.
    `a, b, c, d = p` unpacks it.

    >>> p = KroneckerPattern(2, 3, 4, 5)
    >>> p.shape, p.weight_shape, p.nnz, p.density
    ((30, 40), (2, 3, 4, 5), 120, 0.1)
    >>> p.T
    KroneckerPattern(2, 4, 3, 5)
    >>> KroneckerPattern(1, 2, 2, 2).mask().int().tolist()
    [[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]]
    """

    __slots__ = ("_sizes",)
    _sizes: tuple[int, int, int, int]

    def __init__(self, a: int, b: int, c: int, d: int) -> None:
        sizes = [whole_number("KroneckerPattern", name, n) for name, n in zip("abcd", (a, b, c, d), strict=True)]
        with owned(core().fretwork_kronecker_pattern((ctypes.c_int64 * 4)(*sizes))) as handle:
            _fill(self, handle)

    @property
    def weight_shape(self) -> tuple[int, int, int, int]:
        """(a, b, c, d)."""
        return self._sizes

    def __iter__(self) -> Iterator[int]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, n: Any) -> Any:
        is_place = isinstance(n, tuple) and all(isinstance(one, slice) for one in n)
        return super().__getitem__(n) if is_place else self._sizes[n]

    @property
    def T(self) -> KroneckerPattern:
        """The pattern (a, c, b, d) of the transposed matrix; its weights are w.transpose(1, 2)."""
        turned = super().T
        assert isinstance(turned, KroneckerPattern)
        return turned

    def chainable(self, right: KroneckerPattern) -> bool:
        """Whether self·right is a chain: a Kronecker pattern again, onto which a dense matrix can be projected.

        With r = a·c / right.a it needs a·c·d = right.a·right.b·right.d, right.a a multiple of a, d a multiple of
        right.d, and r whole on both sides.

        >>> KroneckerPattern(1, 3, 5, 4).chainable(KroneckerPattern(5, 4, 4, 1))
        True
        >>> KroneckerPattern(5, 4, 4, 1).chainable(KroneckerPattern(1, 4, 5, 5))
        False
        """
        _check_kronecker("chainable", right)
        return core().fretwork_kronecker_chainable(_int64s(self._sizes), _int64s(right._sizes)) == 1

    def product(self, right: KroneckerPattern) -> KroneckerPattern:
        """The pattern of the matrix self·right; ValueError where they do not chain.

        >>> KroneckerPattern(1, 3, 5, 4).product(KroneckerPattern(5, 4, 4, 1))
        KroneckerPattern(1, 12, 20, 1)
        """
        _check_kronecker("product", right)
        out = (ctypes.c_int64 * 4)()
        if core().fretwork_kronecker_product(_int64s(self._sizes), _int64s(right._sizes), out) != 0:
            raise ValueError(last_error())
        return KroneckerPattern(*out)

    def to_block_layout(self) -> BlockLayout:
        """The same pattern as a one-head block layout of the largest blocks that fit.

        ValueError unless d is 1 and b and c have divisors from 8 to 128.

        >>> KroneckerPattern(2, 16, 192, 1).to_block_layout()
        BlockLayout(heads=1, blocks=(2, 4), block=(16, 96), nnz=4, density=0.5)
        """
        with _open(self) as handle:
            layout = _from_handle(core().fretwork_kronecker_block_layout(handle))
        assert isinstance(layout, BlockLayout)
        return layout

    def __repr__(self) -> str:
        return f"KroneckerPattern{self._sizes}"


def whole_number(op: str, argument: str, value: Any) -> int:
    """A Python int of 64 bits from anything that counts as an integer."""
    is_bool = isinstance(value, (bool, np.bool_)) or (
        not isinstance(value, int) and str(getattr(value, "dtype", "")) == "torch.bool"
    )
    if is_bool or not hasattr(type(value), "__index__"):
        raise TypeError(f"{op}: {argument}: expected an int, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:  # such as a tensor that is no integer
        raise TypeError(f"{op}: {argument}: expected an int, got {value!r}") from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{op}: {argument}: expected a number of 64 bits, got {number}")
    return number


def number(op: str, argument: str, value: Any) -> float:
    """A Python float from what has a value now, so no traced one. Texts and bools, which float takes, are slips."""
    if isinstance(value, (str, bytes, bool, np.bool_)):
        raise TypeError(f"{op}: {argument}: expected a number, got {value!r}")
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{op}: {argument}: expected a number, got {type(value).__name__}") from None
    except OverflowError:
        raise RuntimeError(f"{op}: {argument}: expected a number of 64 bits, got a larger one") from None


def flag(op: str, argument: str, value: Any) -> bool:
    """A bool from one of Python or NumPy, or from 0 or 1; any other value is a slip, such as a size or a word."""
    if value is True or value is False:
        return value
    if not isinstance(value, (int, np.bool_, np.integer)) or value not in (0, 1):
        got = repr(value) if isinstance(value, (int, float, str, type(None))) else type(value).__name__
        raise TypeError(f"{op}: {argument}: expected True or False, got {got}")
    return bool(value)


def kronecker_patterns(op: str, patterns: Any, only: str | None = None) -> list[KroneckerPattern]:
    """A list of Kronecker patterns from patterns and tuples (a, b, c, d); errors begin with `op` and say which.

    `only` is the name of the argument where it holds just one.
    """
    if isinstance(patterns, (Pattern, str)) or not isinstance(patterns, Iterable):
        raise TypeError(f"{op}: patterns: expected a sequence of KroneckerPattern, got {type(patterns).__name__}")
    made = []
    for n, p in enumerate(patterns):
        name = only or f"patterns[{n}]"
        if isinstance(p, KroneckerPattern):
            made.append(p)
            continue
        if isinstance(p, (Pattern, str)) or not isinstance(p, Sequence) or len(p) != 4:
            raise TypeError(f"{op}: {name}: expected a KroneckerPattern or (a, b, c, d), got {p!r}")
        try:
            made.append(KroneckerPattern(*p))
        except (TypeError, ValueError) as error:
            detail = str(error).removeprefix("KroneckerPattern: ")
            raise type(error)(f"{op}: {name}: {detail}") from None
    return made


def _slice_ends(one: slice, length: int) -> tuple[int, int]:
    """[begin, end) of a slice, as Python counts. Not by slice.indices, which torch.compile may not trace."""

    def whole(end: Any, default: int) -> int:
        if end is None:
            return default
        try:
            at = operator.index(end)
        except TypeError:
            raise TypeError(f"Pattern: index: expected integers as ends of a slice, got {one!r}") from None
        return max(at + length, 0) if at < 0 else min(at, length)

    if one.step not in (None, 1):
        raise ValueError(f"Pattern: index: expected slices with step 1, got step {one.step!r}")
    begin = whole(one.start, 0)
    return begin, max(begin, whole(one.stop, length))


def _check_kronecker(op: str, right: object) -> None:
    if not isinstance(right, KroneckerPattern):
        raise TypeError(f"{op}: right: expected a KroneckerPattern, got {type(right).__name__}")


def _int64s(numbers: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def zeros_and_ones(op: str, argument: str, value: Any) -> np.ndarray:
    """A contiguous uint8 copy of anything that holds 0 and 1 only: a torch tensor on any device, an array, lists."""
    if hasattr(value, "detach"):  # NumPy cannot read a tensor that lives on a GPU, or bfloat16
        if value.is_meta or str(value.layout) != "torch.strided":
            kind = "no data" if value.is_meta else f"the layout {value.layout}"
            raise TypeError(f"{op}: {argument}: expected a dense tensor with data, got one with {kind}")
        value = value.detach().cpu()
        value = value.double() if value.is_floating_point() else value
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError(f"{op}: {argument}: expected rows of equal lengths, got ragged lists") from None
    if array.dtype.kind not in "biuf":
        got = type(value).__name__ if array.dtype.kind == "O" else array.dtype
        raise TypeError(f"{op}: {argument}: expected a bool or integer dtype, got {got}")
    if array.dtype.kind != "b" and (wrong := array[(array != 0) & (array != 1)]).size:
        raise ValueError(f"{op}: {argument}: expected 0 or 1 everywhere, got {wrong.flat[0]}")
    return np.array(array, dtype=np.uint8, order="C")


def _mask_bits(mask: Any) -> np.ndarray:
    """A contiguous uint8 copy of a mask, (heads, rows, cols), every entry 0 or 1."""
    array = zeros_and_ones("BlockLayout", "mask", mask)
    if array.ndim not in (2, 3):
        raise ValueError(f"BlockLayout: mask: expected (heads, rows, cols) or (rows, cols), got {array.shape}")
    return array if array.ndim == 3 else array[None]


def _block_sides(op: str, block: Any) -> tuple[int, int]:
    sides = block if isinstance(block, (tuple, list)) else (block, block)
    if len(sides) != 2:
        raise ValueError(f"{op}: block: expected an int or (rows, cols), got {len(sides)} numbers")
    for side in sides:
        if isinstance(side, bool) or not isinstance(side, (int, np.integer)):
            raise TypeError(f"{op}: block: expected an int or (rows, cols), got {side!r}")
        if not 8 <= side <= 128:
            raise ValueError(f"{op}: block: expected 8 to 128, got {side}")
    return int(sides[0]), int(sides[1])


class _Held:
    """Lets the core forget a long text, which its key stands for, no sooner than the last pattern that has it."""

    __slots__ = ("_key", "_let_go")

    def __init__(self, handle: Any, key: bytes) -> None:
        if core().fretwork_pattern_hold(handle) != 0:
            raise MemoryError(last_error())
        self._key, self._let_go = key, core().fretwork_key_let_go

    def __del__(self) -> None:
        if hasattr(self, "_let_go"):
            self._let_go(self._key)


def _open(pattern: Pattern) -> Any:
    """The core's pattern for the length of a scope. A value is its text, so none is held longer."""
    key = pattern.key.encode()
    return owned(core().fretwork_pattern_parse(key, len(key)))


def _fill(pattern: Pattern, handle: Any) -> Pattern:
    """Copies what Python asks often."""
    c = core()
    text, key = c.fretwork_pattern_text(handle), c.fretwork_pattern_key(handle)
    facts: dict[str, object] = {
        "_text": text.decode(),
        "_key": key.decode(),
        "_held": None if key == text else _Held(handle, key),
        "_shape": tuple(c.fretwork_pattern_shape(handle)[: c.fretwork_pattern_rank(handle)]),
        "_nnz": c.fretwork_pattern_nnz(handle),
        "_density": c.fretwork_pattern_density(handle),
    }
    if isinstance(pattern, BlockLayout):
        sizes = (ctypes.c_int64 * 5)()
        c.fretwork_block_layout_sizes(handle, sizes)
        facts["_grid"], facts["_block"] = tuple(sizes[:3]), tuple(sizes[3:])
    if isinstance(pattern, KroneckerPattern):
        four = (ctypes.c_int64 * 4)()
        c.fretwork_kronecker_sizes(handle, four)
        facts["_sizes"] = tuple(four)
    for name, value in facts.items():
        object.__setattr__(pattern, name, value)
    return pattern


def _from_handle(handle: Any) -> Pattern:
    with owned(handle):
        family = core().fretwork_pattern_text(handle).split(b"(", 1)[0]
        return _fill(object.__new__(_FAMILIES.get(family, Pattern)), handle)


# The class of each family, by the name its canonical text begins with.
_FAMILIES: dict[bytes, type[Pattern]] = {b"block": BlockLayout, b"kronecker": KroneckerPattern}


@functools.lru_cache(maxsize=256)
def _read(text: str) -> Pattern:
    encoded = text.encode(errors="backslashreplace")
    return _from_handle(core().fretwork_pattern_parse(encoded, len(encoded)))


# torch.compile runs these, of texts alone, when it traces: a pattern made inside a compiled function is a constant.


def _parsed(text: str) -> Pattern:
    return _read(text)


def _transposed(text: str) -> Pattern:
    with _open(_read(text)) as handle:
        return _from_handle(core().fretwork_pattern_transpose(handle))


def _combined(how: str, left: str, right: str) -> Pattern:
    with _open(_read(left)) as first, _open(_read(right)) as second:
        return _from_handle(getattr(core(), f"fretwork_pattern_{how}")(first, second))


def _sliced(text: str, *ends: int) -> Pattern:
    with _open(_read(text)) as handle:
        return _from_handle(core().fretwork_pattern_slice(handle, _int64s(ends)))


def _placed(text: str, *place: int) -> Pattern:
    with _open(_read(text)) as handle:
        return _from_handle(core().fretwork_pattern_place(handle, *place))


def _prefixed(text: str, n: int) -> Pattern:
    with _open(_read(text)) as handle:
        return _from_handle(core().fretwork_pattern_with_prefix(handle, n))


def _diagonal(*texts: str) -> Pattern:
    with contextlib.ExitStack() as stack:
        handles = [stack.enter_context(_open(_read(text))) for text in texts]
        array = (type(handles[0]) * len(handles))(*handles) if handles else None
        return _from_handle(core().fretwork_pattern_diag(array, len(handles)))


# What torch.compiler.assume_constant_result does, without torch.
for _function in (_parsed, _transposed, _combined, _sliced, _placed, _prefixed, _diagonal):
    _function._dynamo_marked_constant = True  # type: ignore[union-attr]


def block_layout(key: str) -> BlockLayout:
    """The layout behind a text or key that an op was given."""
    layout = _parsed(key)
    if not isinstance(layout, BlockLayout):
        raise RuntimeError(f"fretwork: layout: expected a block layout, got {key}")
    return layout


@functools.lru_cache(maxsize=256)
def row_width(pattern: Pattern, op: str) -> int:
    """Entries of the longest row of a pattern; where it has none, an error that names `op`."""
    with _open(pattern) as handle:
        width = core().fretwork_pattern_width(handle, op.encode())
    if width < 0:
        raise RuntimeError(last_error())
    return width
