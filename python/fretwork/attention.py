"""Attention over regular patterns on torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from fretwork._shapes import check_no_block, check_slopes, flat_patterns
from fretwork._torch.arguments import as_number, check_tensor, dtype_name, pattern_keys, precision_name
from fretwork._torch.attention import attention_op, attention_output, attention_plainly
from fretwork._torch.attention_by_length import (
    OfLength,
    by_length_op,
    every_key,
    function_key,
    goes_by_length,
    patterns_of,
)
from fretwork._torch.differentiable import called_with_tensors
from fretwork.block_lists import BlockLists
from fretwork.dynamic_attention import block_attention, block_attention_plainly
from fretwork.patterns import Pattern

__all__ = ["alibi", "attention"]

Patterns = Pattern | Sequence[Pattern] | Sequence[Sequence[Pattern]] | OfLength


class alibi:
    """A bias of −slope · |p − j| for each head, p = i + Sk − Sq the query's position and j the key's.

    Slopes get no gradient: those that require one are refused.

    >>> import torch, fretwork as fw
    >>> q, k, v = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    >>> slopes = torch.tensor([0.5, 0.25])
    >>> distance = (torch.arange(5)[:, None] + 4 - torch.arange(9)).abs()
    >>> pattern = fw.patterns.causal((5, 9))
    >>> o = fw.attention(q, k, v, pattern, bias=fw.alibi(slopes))
    >>> torch.allclose(o, fw.attention(q, k, v, pattern, bias=-slopes[:, None, None] * distance), atol=1e-5)
    True
    """

    __slots__ = ("slopes",)
    slopes: Tensor

    def __init__(self, slopes: Tensor) -> None:
        if not isinstance(slopes, Tensor):
            raise TypeError(f"alibi: slopes: expected a torch.Tensor, got {type(slopes).__name__}")
        if slopes.is_complex() or slopes.dtype == torch.bool:
            raise TypeError(f"alibi: slopes: expected real numbers, got {dtype_name(slopes.dtype)}")
        if slopes.dim() != 1:
            raise ValueError(f"alibi: slopes: expected (Hq,), one for each query head, got {tuple(slopes.shape)}")
        self.slopes = slopes

    def __repr__(self) -> str:
        return f"alibi({self.slopes!r})"


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Patterns | None = None,
    scale: float | None = None,
    bias: Tensor | alibi | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    return_lse: Literal[False] = False,
    *,
    key_padding_mask: Tensor | None = None,
    precision: str | None = None,
    sinks: Tensor | None = None,
    blocks: Tensor | BlockLists | None = None,
    block: int | tuple[int, int] = 128,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Patterns | None = None,
    scale: float | None = None,
    bias: Tensor | alibi | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    *,
    return_lse: Literal[True],
    key_padding_mask: Tensor | None = None,
    precision: str | None = None,
    sinks: Tensor | None = None,
    blocks: Tensor | BlockLists | None = None,
    block: int | tuple[int, int] = 128,
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Patterns | None = None,
    scale: float | None = None,
    bias: Tensor | alibi | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    *,
    key_padding_mask: Tensor | None = None,
    precision: str | None = None,
    sinks: Tensor | None = None,
    blocks: Tensor | BlockLists | None = None,
    block: int | tuple[int, int] = 128,
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Patterns | None = None,
    scale: float | None = None,
    bias: Tensor | alibi | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    *,
    key_padding_mask: Tensor | None = None,
    precision: str | None = None,
    sinks: Tensor | None = None,
    blocks: Tensor | BlockLists | None = None,
    block: int | tuple[int, int] = 128,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention in which a query sees the keys that `pattern` holds.

    o = dropout(softmax(softcap(scale · q kᵀ) + bias)) v. q is (B, Hq, Sq, D), k (B, Hk, Sk, D), v (B, Hk, Sk, Dv) and o
    (B, Hq, Sq, Dv); Hq is a multiple of Hk, and query head h uses key head h // (Hq/Hk). `pattern` is one, a sequence
    of Hq, or a sequence of B sequences of one or Hq, (Sq, Sk) each: of `fw.patterns`, a `BlockLayout` of one head or a
    `KroneckerPattern`; None holds every key. `key_padding_mask` is (B, Sk) of bool: keys where it is True are not seen,
    whatever they and their values hold, and get zero gradients. `scale` is 1/√D unless given. `bias` broadcasts to (B,
    Hq, Sq, Sk), or is `fw.alibi(slopes)`. A softcap c > 0 turns a score s into c · tanh(s/c). Dropout follows
    `torch.manual_seed`. With `return_lse` the result is (o, lse), lse (B, Hq, Sq) the natural log-sum-exp of each
    query's scores. A query without keys gives zeros and −inf. `sinks` is (Hq,) of q's dtype or float32: a score for
    each head that joins the sum of its queries, and lse, without a value of its own, scale, cap, bias or dropout. It
    gets a gradient. A query without keys gives zeros and its sink then. `precision` is that of `fw.sdd`; "tf32x3" is
    computed as "ieee".

    `blocks` names key blocks that only the device knows: a bool tensor (B|1, Hq|Hk|1, ⌈Sq/bq⌉, ⌈Sk/bk⌉) or `BlockLists`
    of that many rows. Query i then sees key j if block (i // bq, j // bk) is there and the pattern, None for all,
    allows it. `block` is one or a pair of 16, 32, 64, 128. The pattern is then one for all heads whose rows are
    intervals. Nothing is read on the host.

    >>> import torch, fretwork as fw
    >>> q, k, v = (torch.randn(1, 2, 100, 16, requires_grad=True) for _ in range(3))
    >>> o = fw.attention(q, k, v, fw.patterns.strided(100, 8))
    >>> o.sum().backward()
    >>> o.shape, q.grad.shape
    (torch.Size([1, 2, 100, 16]), torch.Size([1, 2, 100, 16]))
    >>> padding = torch.arange(100)[None] >= 60
    >>> o = fw.attention(q, k, v, fw.patterns.causal(100), key_padding_mask=padding)
    >>> torch.allclose(o[:, :, :60], fw.attention(q, k, v, fw.patterns.causal(100))[:, :, :60])
    True
    >>> sinks = torch.zeros(2, requires_grad=True)
    >>> o, lse = fw.attention(q, k, v, fw.patterns.causal(100), sinks=sinks, return_lse=True)
    >>> plain, lse_plain = fw.attention(q, k, v, fw.patterns.causal(100), return_lse=True)
    >>> torch.allclose(lse, torch.logaddexp(lse_plain, sinks[:, None]), atol=1e-5)
    True
    >>> torch.allclose(o, plain * (lse_plain - lse).exp()[..., None], atol=1e-5)
    True
    """
    short = scale is None and bias is None and not return_lse and key_padding_mask is None and precision is None
    plain = type(softcap) is type(dropout_p) is float and softcap == dropout_p == 0
    if short and plain and sinks is None and called_with_tensors(q, k, v):
        try:
            if blocks is not None:
                if (found := block_attention_plainly(q, k, v, pattern, blocks, block)) is not None:
                    return found
            elif isinstance(pattern, Pattern) and q.is_cpu and block == 128:
                return attention_plainly(q, k, v, pattern.key)
        except (RuntimeError, NotImplementedError):
            pass  # the checks below say what is wrong
    op = "attention"
    check_tensor(op, "q", q)
    check_tensor(op, "k", k)
    check_tensor(op, "v", v)
    slopes = None
    if isinstance(bias, alibi):
        slopes, bias = slopes_of(op, bias, q), None
    elif bias is not None:
        check_tensor(op, "bias", bias)
    if key_padding_mask is not None:
        check_tensor(op, "key_padding_mask", key_padding_mask)
    if sinks is not None:
        check_tensor(op, "sinks", sinks)
    if pattern is None and blocks is None:
        pattern = every_key
    by_length = goes_by_length(pattern)
    patterns: tuple[
        Pattern, ...
    ] = ()  # with blocks, none stands for every key: its text would be another for each length
    if by_length:
        keys = function_key(pattern)
    else:
        if callable(pattern):
            patterns = patterns_of(pattern, q.shape, k.shape)
        elif pattern is not None:
            patterns = flat_patterns(op, pattern, q.shape)
        keys = pattern_keys(patterns)
    if blocks is None:
        check_no_block(op, block)
    if scale is not None:
        scale = as_number(op, "scale", scale)
    rate = as_number(op, "dropout_p", dropout_p)
    if not 0 <= rate <= 1:
        raise RuntimeError(f"{op}: dropout_p: expected 0 to 1, got {dropout_p}")
    seed = None
    if 0 < rate < 1:  # drawn where it is used: no copy, no wait
        seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=q.device)
    cap = as_number(op, "softcap", softcap)
    p = rate if rate < 1 else 0.0
    precision = precision_name(op, precision)
    lse = None
    if blocks is not None:
        options = (scale, bias, slopes, cap, p, seed, precision, key_padding_mask, sinks)
        o, lse = block_attention(q, k, v, keys if by_length else patterns, blocks, block, options)
    elif return_lse or by_length:
        attend = by_length_op if by_length else attention_op
        o, lse = attend(q, k, v, keys, scale, bias, slopes, cap, p, seed, precision, key_padding_mask, sinks)
    else:
        o = attention_output(q, k, v, bias, slopes, seed, key_padding_mask, sinks, (keys, scale, cap, p, precision))
    if rate == 1:
        o = torch.where(torch.zeros_like(o, dtype=torch.bool), o, 0)  # all dropped; zero gradients
    return (o, lse) if return_lse and lse is not None else o


def slopes_of(op: str, bias: alibi, q: Tensor) -> Tensor:
    """The slopes as ops take them."""
    slopes = bias.slopes
    if slopes.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{op}: bias: expected slopes that require no grad, got some that do; detach them, or give the bias as a "
            "tensor, −slopes[:, None, None] · |p − j|"
        )
    if q.dim() == 4:
        check_slopes(op, slopes.shape, q.shape[1])
    return slopes.detach().to(torch.float64 if q.dtype == torch.float64 else torch.float32)
