"""The patterns of well-known chains, and projections of NumPy matrices: what torch and JAX have in common."""

import ctypes
from typing import Any

import numpy as np

from fretwork._library import core, last_error
from fretwork.pattern import KroneckerPattern, kronecker_patterns, whole_number


def projected(W: np.ndarray, patterns: Any) -> tuple[list[np.ndarray], float]:
    """Weights whose product is near a float64 matrix, and its relative error, as `fretwork.kronecker.project` says."""
    chain, dense, error = kronecker_patterns("project", patterns), np.ascontiguousarray(W), ctypes.c_double()
    weights = [np.empty(p.weight_shape) for p in chain]
    status = core().fretwork_kronecker_project(
        dense.ctypes.data,
        *dense.shape,
        (ctypes.c_int64 * (4 * len(chain)))(*(n for p in chain for n in p.weight_shape)),
        len(chain),
        (ctypes.c_void_p * len(chain))(*(w.ctypes.data for w in weights)),
        error,
    )
    if status != 0:
        raise RuntimeError(last_error().replace("project: dense:", "project: W:", 1))
    return weights, error.value


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
