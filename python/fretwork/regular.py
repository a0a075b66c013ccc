"""Scores, softmax and product apart: SPLAT's operators over the entries of a pattern's rows, on torch tensors."""

from torch import Tensor

from fretwork._torch.arguments import as_number, check_tensor, pattern_key
from fretwork._torch.regular import r_sddmm_op, r_softmax_op, r_spmm_op
from fretwork.patterns import Pattern

__all__ = ["r_sddmm", "r_softmax", "r_spmm"]


def r_sddmm(q: Tensor, k: Tensor, pattern: Pattern) -> Tensor:
    """The scores q kᵀ that a pattern holds, side by side: (B, Hq, Sq, W), W the entries of the longest row.

    The entries of a row are its keys in ascending order: entry t of row i is the score of key
    `pattern.columns()[i, t]`, and zero where that is −1, behind the row's end. q is (B, Hq, Sq, D), k (B, Hk, Sk, D),
    heads shared as in `attention`.

    >>> import torch, fretwork as fw
    >>> pattern = fw.patterns.sliding_window(6, 2, 0)
    >>> fw.r_sddmm(torch.ones(1, 1, 6, 4), torch.arange(6.0)[:, None].expand(1, 1, 6, 4), pattern)[0, 0].tolist()[:3]
    [[0.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 4.0, 8.0]]
    """
    check_tensor("r_sddmm", "q", q)
    check_tensor("r_sddmm", "k", k)
    return r_sddmm_op(q, k, pattern_key("r_sddmm", pattern))


def r_softmax(x: Tensor, pattern: Pattern, scale: float = 1.0) -> Tensor:
    """Softmax of scale · x over the entries of each row, as `r_sddmm` stores them; zeros behind a row's end.

    Entries of x behind a row's end are never read. A row in which every score is −inf gives zeros.

    >>> import torch, fretwork as fw
    >>> fw.r_softmax(torch.zeros(1, 1, 4, 2), fw.patterns.sliding_window(4, 1, 0))[0, 0].tolist()[:2]
    [[1.0, 0.0], [0.5, 0.5]]
    """
    check_tensor("r_softmax", "x", x)
    return r_softmax_op(x, pattern_key("r_softmax", pattern), as_number("r_softmax", "scale", scale))


def r_spmm(x: Tensor, v: Tensor, pattern: Pattern) -> Tensor:
    """x v for weights x (B, Hq, Sq, W) as `r_sddmm` stores them; v is (B, Hk, Sk, Dv), the result (B, Hq, Sq, Dv).

    >>> import torch, fretwork as fw
    >>> p = fw.patterns.strided(40, 6)
    >>> q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))
    >>> o = fw.r_spmm(fw.r_softmax(fw.r_sddmm(q, k, p), p, scale=0.25), v, p)
    >>> torch.allclose(o, fw.attention(q, k, v, p), atol=1e-5)
    True
    """
    check_tensor("r_spmm", "x", x)
    check_tensor("r_spmm", "v", v)
    return r_spmm_op(x, v, pattern_key("r_spmm", pattern))
