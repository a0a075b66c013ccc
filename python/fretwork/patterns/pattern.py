"""Patterns as Python values: what is non-zero, compared by text, and carried everywhere as a text."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import operator
import os
import re
import shutil
import sys
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from fretwork._checks import whole_number
from fretwork._library import core, int64s, last_error, owned

if TYPE_CHECKING:
    import torch

    from fretwork.patterns.block import BlockLayout

_LARGEST_MASK = 2**30
_PACKED = re.compile(r"~[\w-]{13,}")  # bits, six in a letter
_NUMBERS = re.compile(r"((?:-?\d+,){4})(?:-?\d+,){12,}-?\d+")


_P = TypeVar("_P", bound="Pattern")


class _Transposed:
    """The transposed pattern. No property, which torch.compile does not follow on a pattern that it traced."""

    def __get__(self, pattern: _P | None, owner: type[_P]) -> _P:
        return self if pattern is None else transposed(pattern.text)  # type: ignore[return-value]  # as properties do


class Pattern:
    """An immutable description of what is non-zero. Patterns are equal when their texts are.

    >>> import fretwork as fw
    >>> layout = fw.Pattern.parse("block((1,2,2),(16,16),~J)")
    >>> layout
    BlockLayout(heads=1, blocks=(2, 2), block=16, nnz=2, density=0.5)
    >>> layout == fw.BlockLayout([[1, 0], [0, 1]], block=16)
    True
    """

    __slots__ = {
        "_held": None,
        "density": "The share of elements that are non-zero.",
        "key": "The text, or for a long one a digest that this process can look up: how a pattern crosses into an op.",
        "nnz": "How many are stored, in the family's own unit (blocks for a block layout).",
        "shape": "Sizes in elements.",
        "text": "Canonical, one line; `Pattern.parse` restores the pattern from it.",
    }
    text: str
    key: str
    shape: tuple[int, ...]
    nnz: int
    density: float

    # The class of each family, by the name its canonical text begins with.
    _families: ClassVar[dict[str, type[Pattern]]] = {}

    def __init_subclass__(cls, family: str | None = None) -> None:
        super().__init_subclass__()
        if family is not None:
            Pattern._families[family] = cls

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
        return parsed(text)

    T = _Transposed()
    """The transposed pattern."""

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
        count = math.prod(self.shape)
        if count > _LARGEST_MASK:
            raise ValueError(f"mask: pattern: expected at most 2^30 elements, got {count} in {self.shape}")
        mask = np.empty(self.shape, dtype=np.bool_)
        with opened(self) as handle:
            if core().fretwork_pattern_mask(handle, mask.ctypes.data, count) != 0:
                raise ValueError(last_error())
        return mask

    def __or__(self, other: Pattern) -> Pattern:
        """What is in either. Block layouts of one head and Kronecker patterns may join.

        >>> p = Pattern.parse("sliding_window(64, 4, 0)") | Pattern.parse("strided(64, 16)")
        >>> p.text, p.nnz
        ('sliding_window(64,4,0)|strided(64,16)', 1000)
        """
        return combined("union", self.text, other.text) if isinstance(other, Pattern) else NotImplemented

    def __and__(self, other: Pattern) -> Pattern:
        """What is in both.

        >>> (Pattern.parse("causal(64)") & Pattern.parse("document((24, 40))")).density
        0.2734375
        """
        return combined("intersection", self.text, other.text) if isinstance(other, Pattern) else NotImplemented

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
        for one, length in zip((*both, slice(None))[:2], self.shape[-2:], strict=True):
            ends += _slice_ends(one, length)
        return sliced(self.text, *ends)

    def contains(self, row: int, col: int) -> bool:
        """Whether query `row` may see key `col`.

        >>> Pattern.parse("strided(4096, 128)").contains(1000, 1000 - 3 * 128)
        True
        """
        with opened(self) as handle:
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
        start, stride, count = np.empty((3, self.shape[-2]), dtype=np.int64)
        with opened(self) as handle:
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
        rows, width = self.shape[-2], row_width(self, "columns")
        if rows * width > _LARGEST_MASK:
            got = f"{rows * width} in {(rows, width)}"
            raise ValueError(f"columns: pattern: expected a table of at most 2^30 elements, got {got}")
        table = np.empty((rows, width), dtype=np.int32)
        with opened(self) as handle:
            if core().fretwork_pattern_columns(handle, width, table.ctypes.data) != 0:
                raise ValueError(last_error())
        return table

    def block_cover(self, block: int | tuple[int, int] = 32) -> tuple[BlockLayout, float]:
        """The blocks that the pattern touches, and the share of their elements that it leaves out (the fill-in).

        For the operators that take block layouts. The last blocks may reach beyond the pattern.

        >>> Pattern.parse("sliding_window(64, 3, 0)").block_cover(16)
        (BlockLayout(heads=1, blocks=(4, 4), block=16, nnz=7, density=0.4375), 0.8604910714285714)
        """
        from fretwork.patterns.block import BlockLayout, block_sides

        sides, fill_in = block_sides("block_cover", block), ctypes.c_double()
        with opened(self) as handle:
            layout = from_handle(core().fretwork_pattern_block_cover(handle, *sides, ctypes.byref(fill_in)))
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
        if math.prod(self.shape) == 0:
            return None
        try:
            return self._text_of("svg", 0)
        except ValueError:
            return None

    def _text_of(self, function: str, *arguments: int) -> str:
        """A text that the core writes of a pattern."""
        write = getattr(core(), f"fretwork_pattern_{function}")
        with opened(self) as handle:
            room = ctypes.create_string_buffer(1 << 12)
            length = write(handle, *arguments, room, len(room))
            if length >= len(room):
                room = ctypes.create_string_buffer(length + 1)
                write(handle, *arguments, room, len(room))
        if length < 0:
            raise ValueError(last_error())
        return room.value.decode()

    def _take(self, handle: Any) -> None:
        """Copies from the core's pattern what Python reads often."""
        c = core()
        text, key = c.fretwork_pattern_text(handle), c.fretwork_pattern_key(handle)
        self._set(
            text=text.decode(),
            key=key.decode(),
            _held=None if key == text else _Held(handle, key),
            shape=tuple(c.fretwork_pattern_shape(handle)[: c.fretwork_pattern_rank(handle)]),
            nnz=c.fretwork_pattern_nnz(handle),
            density=c.fretwork_pattern_density(handle),
        )

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__}: {name}: expected no assignment (patterns are immutable), got one")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__}: {name}: expected no deletion (patterns are immutable), got one")

    def __eq__(self, other: object) -> bool:
        return self.text == other.text if isinstance(other, Pattern) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.text)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return parsed, (self.text,)

    def __copy__(self) -> Pattern:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Pattern:
        return self

    def __repr__(self) -> str:
        """The text; long bits or numbers are cut, and its facts follow.

        >>> import fretwork as fw
        >>> fw.patterns.causal(64), fw.patterns.from_mask(fw.patterns.causal(64).mask())
        (Pattern('causal(64)'), Pattern('from_mask((64,64),~…)', shape=(64, 64), nnz=2080, density=0.5078))
        """
        short = _PACKED.sub("~…", _NUMBERS.sub(r"\1…", self.text))
        facts = f", shape={self.shape}, nnz={self.nnz}, density={self.density:.4g}"
        return f"Pattern({short!r}{facts if short != self.text else ''})"


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


def opened(pattern: Pattern) -> Any:
    """The core's pattern for the length of a scope. A value is its text, so none is held longer."""
    key = pattern.key.encode()
    return owned(core().fretwork_pattern_parse(key, len(key)))


def from_handle(handle: Any) -> Pattern:
    """The Python value of a pattern of the core, which is freed; ValueError with the core's text when it is null."""
    with owned(handle):
        family = core().fretwork_pattern_text(handle).split(b"(", 1)[0].decode()
        pattern = object.__new__(Pattern._families.get(family, Pattern))
        pattern._take(handle)
        return pattern


@functools.lru_cache(maxsize=256)
def _read(text: str) -> Pattern:
    encoded = text.encode(errors="backslashreplace")
    return from_handle(core().fretwork_pattern_parse(encoded, len(encoded)))


# torch.compile runs these while it traces (`TRACED_AS_CONSTANTS`): they take texts, and a pattern that a compiled
# function makes is a constant of its graph.


def parsed(text: str) -> Pattern:
    return _read(text)


def transposed(text: str) -> Pattern:
    with opened(_read(text)) as handle:
        return from_handle(core().fretwork_pattern_transpose(handle))


def combined(how: str, left: str, right: str) -> Pattern:
    with opened(_read(left)) as first, opened(_read(right)) as second:
        return from_handle(getattr(core(), f"fretwork_pattern_{how}")(first, second))


def sliced(text: str, *ends: int) -> Pattern:
    with opened(_read(text)) as handle:
        return from_handle(core().fretwork_pattern_slice(handle, int64s(ends)))


def placed(text: str, *place: int) -> Pattern:
    with opened(_read(text)) as handle:
        return from_handle(core().fretwork_pattern_place(handle, *place))


def prefixed(text: str, n: int) -> Pattern:
    with opened(_read(text)) as handle:
        return from_handle(core().fretwork_pattern_with_prefix(handle, n))


def diagonal(*texts: str) -> Pattern:
    with contextlib.ExitStack() as stack:
        handles = [stack.enter_context(opened(_read(text))) for text in texts]
        array = (type(handles[0]) * len(handles))(*handles) if handles else None
        return from_handle(core().fretwork_pattern_diag(array, len(handles)))


TRACED_AS_CONSTANTS = (parsed, transposed, combined, sliced, placed, prefixed, diagonal)


@functools.lru_cache(maxsize=256)
def row_width(pattern: Pattern, op: str) -> int:
    """Entries of the longest row of a pattern; where it has none, an error that names `op`."""
    with opened(pattern) as handle:
        width = core().fretwork_pattern_width(handle, op.encode())
    if width < 0:
        raise RuntimeError(last_error())
    return width
