"""Kronecker patterns, those of well-known chains, and projections of NumPy matrices onto them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from fretwork._checks import whole_number
from fretwork._library import core, int64s, last_error, owned
from fretwork.patterns.block import BlockLayout
from fretwork.patterns.pattern import Pattern, from_handle, opened


class KroneckerPattern(Pattern, family="kronecker"):
    """The support I_a ⊗ 1_{b×c} ⊗ I_d of one Kronecker factor.

    Its weights are (a, b, c, d): w[i, j, k, l] stands at row (i·b + j)·d + l, column (i·c + k)·d + l.
    `a, b, c, d = p` unpacks it. The weights of `.T`, (a, c, b, d), are w.transpose(1, 2).

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
        with owned(core().fretwork_kronecker_pattern(int64s(sizes))) as handle:
            self._take(handle)

    def _take(self, handle: Any) -> None:
        super()._take(handle)
        sizes = (ctypes.c_int64 * 4)()
        core().fretwork_kronecker_sizes(handle, sizes)
        self._set(_sizes=tuple(sizes))

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
        return core().fretwork_kronecker_chainable(int64s(self._sizes), int64s(right._sizes)) == 1

    def product(self, right: KroneckerPattern) -> KroneckerPattern:
        """The pattern of the matrix self·right; ValueError where they do not chain.

        >>> KroneckerPattern(1, 3, 5, 4).product(KroneckerPattern(5, 4, 4, 1))
        KroneckerPattern(1, 12, 20, 1)
        """
        _check_kronecker("product", right)
        out = (ctypes.c_int64 * 4)()
        if core().fretwork_kronecker_product(int64s(self._sizes), int64s(right._sizes), out) != 0:
            raise ValueError(last_error())
        return KroneckerPattern(*out)

    def to_block_layout(self) -> BlockLayout:
        """The same pattern as a one-head block layout of the largest blocks that fit.

        ValueError unless d is 1 and b and c have divisors from 8 to 128.

        >>> KroneckerPattern(2, 16, 192, 1).to_block_layout()
        BlockLayout(heads=1, blocks=(2, 4), block=(16, 96), nnz=4, density=0.5)
        """
        with opened(self) as handle:
            layout = from_handle(core().fretwork_kronecker_block_layout(handle))
        assert isinstance(layout, BlockLayout)
        return layout

    def __repr__(self) -> str:
        return f"KroneckerPattern{self._sizes}"


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


def _check_kronecker(op: str, right: object) -> None:
    if not isinstance(right, KroneckerPattern):
        raise TypeError(f"{op}: right: expected a KroneckerPattern, got {type(right).__name__}")


def monarch(out_features: int, in_features: int, p: int, q: int) -> list[KroneckerPattern]:
    """The two patterns of a Monarch matrix (out, in): q blocks of out/p × in/q, then out/p interleaved ones of p × q.

    p divides out_features and q divides in_features.

    >>> import fretwork as fw
    >>> fw.kronecker.monarch(12, 20, 3, 5)
    [KroneckerPattern(5, 4, 4, 1), KroneckerPattern(1, 3, 5, 4)]
    """
    names = ("out_features", "in_features", "p", "q")
    numbers = [whole_number("monarch", n, v) for n, v in zip(names, (out_features, in_features, p, q), strict=True)]
    room = (ctypes.c_int64 * 8)()
    return _patterns(core().fretwork_kronecker_monarch(*numbers, room), room)


def butterfly(n: int) -> list[KroneckerPattern]:
    """The log2(n) patterns of a dyadic butterfly (n, n), n a power of two from 2 on.

    >>> import fretwork as fw
    >>> fw.kronecker.butterfly(8)
    [KroneckerPattern(4, 2, 2, 1), KroneckerPattern(2, 2, 2, 2), KroneckerPattern(1, 2, 2, 4)]
    """
    room = (ctypes.c_int64 * (4 * 62))()
    return _patterns(core().fretwork_kronecker_butterfly(whole_number("butterfly", "n", n), room), room)


def _patterns(count: int, room: ctypes.Array[ctypes.c_int64]) -> list[KroneckerPattern]:
    if count < 0:
        raise ValueError(last_error())
    return [KroneckerPattern(*room[4 * n : 4 * n + 4]) for n in range(count)]


def projected(W: np.ndarray, patterns: Any, threads: int = 1) -> tuple[list[np.ndarray], float]:
    """Weights whose product is near a float64 matrix, and its relative error, as `fretwork.kronecker.project` says."""
    chain, dense, error = kronecker_patterns("project", patterns), np.ascontiguousarray(W), ctypes.c_double()
    weights = [np.empty(p.weight_shape) for p in chain]
    status = core().fretwork_kronecker_project(
        dense.ctypes.data,
        *dense.shape,
        int64s([n for p in chain for n in p.weight_shape]),
        len(chain),
        (ctypes.c_void_p * len(chain))(*(w.ctypes.data for w in weights)),
        error,
        threads,
    )
    if status != 0:
        raise RuntimeError(last_error().replace("project: dense:", "project: W:", 1))
    return weights, error.value
