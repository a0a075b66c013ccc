"""Attention on what only the device knows: blocks selected by each query, packed documents."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from fretwork._checks import fail, flag
from fretwork._shapes import (
    Operand,
    check_block_pattern,
    check_blocks,
    check_bound,
    check_extras,
    check_one_pattern,
    check_packed,
    check_qkv,
    check_selected,
    check_side,
    check_sides,
    check_starts,
    check_window,
)
from fretwork._torch.arguments import as_number, check_tensor, pattern_keys, precision_name, torch_precision
from fretwork._torch.differentiable import called_with_tensors
from fretwork._torch.dynamic_attention import blocks_by_length_op, dynamic_attention_op, has_interval_rows
from fretwork._torch.registration import as_autocast_has, operand
from fretwork.block_lists import BlockLists
from fretwork.patterns import Pattern

__all__ = ["selected_attention", "varlen_attention"]


@overload
def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    block: int = 64,
    causal: bool = True,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    block: int = 64,
    causal: bool = True,
    scale: float | None = None,
    sinks: Tensor | None = None,
    *,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    block: int = 64,
    causal: bool = True,
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention in which each query sees the key blocks that it selected.

    q is (B, Hq, Sq, D), k (B, Hk, Sk, D), v (B, Hk, Sk, Dv). `indices` (B, Hk, Sq, T), int32, has the blocks of `block`
    keys (16, 32, 64 or 128) of each query, shared by the query heads of a key head; −1 stands for none, and no block
    stands there twice. With `causal`, query i sees keys up to i + Sk − Sq. `sinks` (Hq,) is one more score of each
    query, without a value. With `return_lse` the result is (o, lse), lse (B, Hq, Sq). Nothing is read on the host.

    >>> import torch, fretwork as fw
    >>> q, k, v = (torch.randn(1, 2, 100, 16, requires_grad=True) for _ in range(3))
    >>> indices = torch.arange(100, dtype=torch.int32).div(16, rounding_mode="floor").expand(1, 2, 100)[..., None]
    >>> o = fw.selected_attention(q, k, v, indices, block=16)
    >>> own = fw.patterns.block_local(100, 16) & fw.patterns.causal(100)
    >>> torch.allclose(o, fw.attention(q, k, v, own), atol=1e-5)
    True
    """
    op = "selected_attention"
    for name, x in {"q": q, "k": k, "v": v, "indices": indices}.items():
        check_tensor(op, name, x)
    q, k, v = as_autocast_has(q, k, v)
    check_selected(op, [operand(n, x) for n, x in zip("qkv", (q, k, v), strict=True)], operand("indices", indices))
    sizes = (1, check_side(op, block), int(flag(op, "causal", causal)), -1, -1, -1, -1)
    if sinks is not None:
        check_tensor(op, "sinks", sinks)
    number = None if scale is None else as_number(op, "scale", scale)
    o, lse = _attended(op, q, k, v, indices, None, None, sizes, number, sinks)
    return (o, lse) if return_lse else o


@overload
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor | None = None,
    max_q: int | None = None,
    max_k: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor | None = None,
    max_q: int | None = None,
    max_k: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    scale: float | None = None,
    sinks: Tensor | None = None,
    *,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor | None = None,
    max_q: int | None = None,
    max_k: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    scale: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention inside documents that lie side by side.

    q is (Tq, Hq, D), k (Tk, Hk, D), v (Tk, Hk, Dv). Document n has the queries cu_q[n] … cu_q[n+1] − 1 and the keys
    likewise by `cu_k`, or by `cu_q` without it; both are int32 or int64 and ascend, which is checked on a CPU. Query i
    of Lq sees key j of Lk if, with p = i + Lk − Lq, j ≤ p where `causal` and −left ≤ j − p ≤ right for `window` =
    (left, right), None for no bound. `max_q` and `max_k` are bounds of the lengths. They never change results. `sinks`
    (Hq,) is one more score of each query, without a value. Rows outside of all documents are zeros with lse −inf. lse
    is (Hq, Tq). Nothing is read from a GPU.

    >>> import torch, fretwork as fw
    >>> q, k, v = (torch.randn(100, 2, 16, requires_grad=True) for _ in range(3))
    >>> o = fw.varlen_attention(q, k, v, torch.tensor([0, 30, 100]), causal=True)
    >>> pattern = fw.patterns.document([30, 70], causal=True)
    >>> x = [t.transpose(0, 1)[None] for t in (q, k, v)]
    >>> torch.allclose(o, fw.attention(*x, pattern)[0].transpose(0, 1), atol=1e-5)
    True
    """
    op = "varlen_attention"
    plain = scale is None and sinks is None and type(causal) is bool and max_q is None and max_k is None
    plain = plain and type(window) is tuple and window == (None, None)
    ends = cu_q if cu_k is None else cu_k
    plain = plain and _checked_by_the_core(q, k, v, cu_q, ends) and cu_q.dtype is ends.dtype is torch.int32
    if plain and _ascend(cu_q) and (ends is cu_q or _ascend(ends)):
        try:
            return _varlen_plainly(q, k, v, cu_q, ends, causal, return_lse)
        except (RuntimeError, NotImplementedError, IndexError):
            pass  # the checks below say what is wrong
    for name, x in {"q": q, "k": k, "v": v, "cu_q": cu_q, **({} if cu_k is None else {"cu_k": cu_k})}.items():
        check_tensor(op, name, x)
    q, k, v = as_autocast_has(q, k, v)
    check_packed(op, [operand(n, x) for n, x in zip("qkv", (q, k, v), strict=True)])
    starts = [_starts(op, operand("cu_q", cu_q), cu_q, q)]
    if cu_k is not None:
        starts.append(_starts(op, operand("cu_k", cu_k), cu_k, q, operand("cu_q", cu_q)))
    bounds = *check_window(op, window), _longest(op, "max_q", max_q), _longest(op, "max_k", max_k)
    sizes = (1, 1, int(flag(op, "causal", causal)), *bounds)
    if sinks is not None:
        check_tensor(op, "sinks", sinks)
    number = None if scale is None else as_number(op, "scale", scale)
    o, lse = _attended(op, q, k, v, None, starts[0], starts[-1], sizes, number, sinks)
    return (o, lse) if return_lse else o


def _attended(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selected: Tensor | None,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    sizes: tuple[int, ...],
    scale: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """o and lse. The core knows one attention for all of them, whose errors get the name of the function."""
    rest = (sizes, scale, None, None, 0.0, 0.0, None, precision_name(op, None), None, sinks)
    try:
        found = dynamic_attention_op(q, k, v, "", None, None, None, selected, cu_q, cu_k, *rest)
    except RuntimeError as error:
        if not str(error).startswith("attention: "):
            raise
        raise type(error)(str(error).replace("attention", op, 1)) from None
    return found  # type: ignore[no-any-return]


def _checked_by_the_core(*tensors: Any) -> bool:
    """Whether a call is plain and the core sees these: not what is on meta, where torch asks for shapes alone."""
    return called_with_tensors(*tensors) and not any(x.is_meta for x in tensors)


def _varlen_plainly(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, causal: bool, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """`varlen_attention` of plain tensors without options, which the core checks."""
    o, lse = dynamic_attention_op(
        *(q, k, v, "", None, None, None, None, cu_q, cu_k, (1, 1, int(causal), -1, -1, -1, -1)),
        *(None, None, None, 0.0, 0.0, None, torch_precision(), None, None),
    )
    return (o, lse) if return_lse else o


def _pair(block: Any) -> Any:
    """The sides of a block, of queries and keys."""
    return (block, block) if type(block) is int else block


def block_attention_plainly(q: Tensor, k: Tensor, v: Tensor, pattern: Any, blocks: Any, block: Any) -> Tensor | None:
    """`fw.attention` with blocks and without options, of plain tensors, which the core checks; None for other calls."""
    mask, counts, indices = None, None, None
    if isinstance(blocks, BlockLists):
        counts, indices = blocks.counts, blocks.indices
        plain = _checked_by_the_core(q, k, v, counts, indices) and blocks.block in (None, _pair(block))
    else:
        mask = blocks
        plain = _checked_by_the_core(q, k, v, mask)
    sides = _pair(block)
    if not plain or type(sides) is not tuple or [type(side) for side in sides] != [int, int]:
        return None
    if pattern is not None and not isinstance(pattern, Pattern):
        return None
    o, _ = dynamic_attention_op(
        *(q, k, v, "" if pattern is None else pattern.key, mask, counts, indices, None, None, None),
        *((*sides, 0, -1, -1, -1, -1), None, None, None, 0.0, 0.0, None, torch_precision(), None, None),
    )
    return o  # type: ignore[no-any-return]


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    patterns: tuple[Pattern, ...] | str,
    blocks: Tensor | BlockLists,
    block: int | tuple[int, int],
    options: tuple[Any, ...],
) -> tuple[Tensor, Tensor]:
    """`fw.attention` with blocks; no pattern stands for every key, a text for a function of the lengths.

    `options`: scale, bias, slopes, softcap, dropout_p, seed, precision, padding, sinks.
    """
    op = "attention"
    sides = check_sides(op, block)
    texts = [patterns] if isinstance(patterns, str) else pattern_keys(patterns).split("\n")
    check_one_pattern(op, texts)
    q, k, v = as_autocast_has(q, k, v)
    known = [operand(name, x) for name, x in zip("qkv", (q, k, v), strict=True)]
    sizes = check_qkv(op, known)
    if patterns and not isinstance(patterns, str):
        check_block_pattern(op, patterns[0], *sizes[2:], has_interval_rows(texts[0]))
    if not isinstance(blocks, (Tensor, BlockLists)):
        fail(op, "blocks", "a bool tensor or fw.BlockLists", type(blocks).__name__, TypeError)
    if isinstance(blocks, BlockLists) and blocks.block not in (None, sides):
        fail(op, "block", f"{blocks.block}, the sides for which the lists were made", sides)
    table = blocks.indices if isinstance(blocks, BlockLists) else blocks
    check_tensor(op, "blocks", table)
    check_blocks(op, known[0], known[1], operand("blocks", table), isinstance(blocks, BlockLists), sides)
    if options[-2] is not None and q.is_cuda:
        check_extras(op, [operand("key_padding_mask", options[-2])], known[0], sizes)
        k, v, options = _hide_padding(k, v, options)
    mask = blocks if isinstance(blocks, Tensor) else None
    lists = (None, None) if isinstance(blocks, Tensor) else (blocks.counts, blocks.indices)
    attend = blocks_by_length_op if isinstance(patterns, str) else dynamic_attention_op
    found = attend(q, k, v, texts[0], mask, *lists, None, None, None, (*sides, 0, -1, -1, -1, -1), *options)
    return found  # type: ignore[no-any-return]


def _hide_padding(k: Tensor, v: Tensor, options: tuple[Any, ...]) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Padding as a bias of −inf, on keys and values without it: GPU kernels have no other way with blocks."""
    scale, bias, *others, padding, sinks = options
    hidden = torch.zeros(padding.shape, device=padding.device).masked_fill(padding, -torch.inf)[:, None, None]
    k, v = (t.masked_fill(padding[:, None, :, None], 0) for t in (k, v))
    return k, v, (scale, hidden if bias is None else (bias + hidden).to(bias.dtype), *others, None, sinks)


def _starts(op: str, known: Operand, cu: Tensor, q: Tensor, like: Operand | None = None) -> Tensor:
    check_starts(op, known, like)
    if cu.device != q.device:
        fail(op, known.name, f"a tensor on {q.device} like q", f"one on {cu.device}")
    if _checked_by_the_core(cu) and not _ascend(cu):
        fail(op, known.name, "starts that ascend", str(cu.tolist())[:80])
    return cu if cu.dtype == torch.int32 else cu.clamp(-(2**31), 2**31 - 1).to(torch.int32)


def _longest(op: str, name: str, value: Any) -> int:
    """A bound of lengths. A compiler would make a program for each number, so it sees none: results are the same."""
    if torch.compiler.is_compiling() and isinstance(value, int) and not isinstance(value, bool):
        return -1
    return check_bound(op, name, value)


def _ascend(cu: Tensor) -> bool:
    """Whether starts do, as far as the host knows: nothing is read from a GPU."""
    return not cu.is_cpu or cu.dim() != 1 or not bool((cu[1:] < cu[:-1]).any())
