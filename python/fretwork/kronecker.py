"""Kronecker factors beside their products: dense matrices, projections, and the patterns of well-known chains.

Lists of patterns and weights are in order of application: the first stands right-most in the matrix product.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from fretwork import _rules_kronecker_convert as _convert_rules
from fretwork._checks import flag, whole_number
from fretwork._library import core, last_error
from fretwork.ops import _check_tensor
from fretwork.patterns import KroneckerPattern
from fretwork.patterns.kronecker import butterfly, kronecker_patterns, monarch, projected

__all__ = ["butterfly", "from_dense", "monarch", "plan", "project", "to_dense"]

_to_dense, _from_dense = _convert_rules.to_dense, _convert_rules.from_dense


def to_dense(w: Tensor) -> Tensor:
    """The matrix (a·b·d, a·c·d) of a factor with weights w (a, b, c, d). Differentiable.

    >>> import torch, fretwork as fw
    >>> fw.kronecker.to_dense(torch.tensor([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 2, 2))
    tensor([[1., 0., 3., 0.],
            [0., 2., 0., 4.]])
    """
    _check_tensor("to_dense", "w", w)
    return _to_dense(w)


def from_dense(dense: Tensor, pattern: KroneckerPattern) -> Tensor:
    """The weights (a, b, c, d) of a matrix that has nothing outside the pattern; RuntimeError where it has.

    The check waits for the GPU where the matrix is on one. Differentiable.

    >>> import torch, fretwork as fw
    >>> w = torch.randn(2, 3, 4, 5)
    >>> torch.equal(fw.kronecker.from_dense(fw.kronecker.to_dense(w), fw.KroneckerPattern(2, 3, 4, 5)), w)
    True
    """
    _check_tensor("from_dense", "dense", dense)
    (pattern,) = kronecker_patterns("from_dense", [pattern], "pattern")
    w, outside = _from_dense(dense, *pattern.weight_shape)
    if torch.compiler.is_compiling():  # a graph cannot read the place
        torch._assert_async(outside < 0, f"from_dense: dense: expected zero outside {pattern.text}, got another value")
        return w
    if dense.is_meta:
        raise RuntimeError("from_dense: dense: expected a matrix with data, got one on meta")
    if (place := int(outside.item())) >= 0:
        row, col = divmod(place, pattern.shape[1])
        value = dense[row, col].item()
        raise RuntimeError(f"from_dense: dense: expected zero outside {pattern.text}, got {value} at ({row}, {col})")
    return w


def project(W: Tensor, patterns: Sequence[KroneckerPattern]) -> tuple[list[Tensor], float]:
    """Weights whose product is near W (out, in), and its relative error in the Frobenius norm.

    The nearest there is for one and two patterns; for L of them the error is at most √(L − 1) times the least. Each
    pattern must be `chainable` with the product of those applied before it. Computed in float64 on the CPU; the weights
    have W's dtype and device, and the error is that before they are rounded to it. Factors have equal norms. Not
    differentiable.

    >>> import torch, fretwork as fw
    >>> W = torch.ones(12, 20, dtype=torch.float64)
    >>> weights, error = fw.kronecker.project(W, fw.kronecker.monarch(12, 20, 3, 5))
    >>> [tuple(w.shape) for w in weights], error < 1e-12
    ([(5, 4, 4, 1), (1, 3, 5, 4)], True)
    """
    _check_tensor("project", "W", W)
    if not W.is_floating_point() or W.dim() != 2:
        raise RuntimeError(f"project: W: expected a floating (out, in) matrix, got {W.dtype} {tuple(W.shape)}")
    if W.is_meta:
        raise RuntimeError("project: W: expected a matrix with data, got one on meta")
    weights, error = projected(W.to(torch.float64).numpy(force=True), patterns)
    return [torch.from_numpy(w).to(W.device, W.dtype) for w in weights], error


def plan(
    patterns: Sequence[KroneckerPattern],
    arch: str = "cpu",
    dtype: torch.dtype = torch.float16,
    bs_last: bool = False,
    batch: int = 0,
) -> str:
    """How `fw.ksmm_chain` runs factors of these patterns, a line for each step.

    `arch` is "cpu", a GPU such as "cuda:0", or an architecture from "sm_75" on, such as "sm_90a", which need not be
    there. `batch` counts where rows are few; 0 stands for many. Operands are taken to be contiguous. Words name the
    family of kernels that a pattern allows; strides, precision and tuned tables have the last word.

    >>> import fretwork as fw
    >>> print(fw.kronecker.plan(fw.kronecker.monarch(1024, 1024, 32, 32), "sm_90a"))
    0+1: fused, 16 rows
    """
    chain = kronecker_patterns("plan", patterns)
    if not chain:
        raise ValueError("plan: patterns: expected at least one, got none")
    if not isinstance(arch, str):
        raise TypeError(f"plan: arch: expected a str, got {type(arch).__name__}")
    numbers = (ctypes.c_int64 * (4 * len(chain)))(*(n for p in chain for n in p.weight_shape))
    room = ctypes.create_string_buffer(64 * len(chain) + 1)
    name = str(dtype).removeprefix("torch.").encode()
    status = core().fretwork_kronecker_plan(
        numbers,
        len(chain),
        arch.encode(),
        name,
        flag("plan", "bs_last", bs_last),
        whole_number("plan", "batch", batch),
        room,
        len(room),
    )
    if status < 0:
        raise ValueError(last_error())
    return room.value.decode()
