"""Attention whose queries, keys and values are cut over ranks along the sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict, overload

import torch
import torch.distributed as dist
from torch import Tensor

from fretwork._checks import fail
from fretwork._shapes import Operand, check_attention, check_no_block, flat_patterns, full
from fretwork._torch.arguments import as_number, autocasts, check_tensor, precision_name
from fretwork._torch.attention import lowered_operands
from fretwork._torch.registration import operand
from fretwork.attention import Patterns, alibi, slopes_of
from fretwork.block_lists import BlockLists
from fretwork.distributed._call import Bias, Call, Sizes, method_of
from fretwork.distributed._exchange import agreed, checked_group
from fretwork.distributed._pieces import PiecewiseAttention
from fretwork.distributed._ulysses import UlyssesAttention
from fretwork.distributed.shards import Ranges, Shards, equal_ranges
from fretwork.patterns import Pattern

__all__ = ["attention"]

_OP = "attention"

if TYPE_CHECKING:
    from typing_extensions import Unpack

Method = Literal["auto", "ranges", "ulysses"]


class Options(TypedDict, total=False):
    """The options of `fw.attention`, and how keys travel."""

    scale: float | None
    bias: Tensor | alibi | None
    softcap: float
    dropout_p: float
    key_padding_mask: Tensor | None
    precision: str | None
    sinks: Tensor | None
    blocks: Tensor | BlockLists | None
    block: int | tuple[int, int]
    method: Method


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Patterns | None = None,
    shards: Shards | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Patterns | None = None,
    shards: Shards | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Patterns | None = None,
    shards: Shards | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]: ...


@torch.compiler.disable  # what travels is decided on the host
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: Patterns | None = None,
    shards: Shards | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    return_lse: bool = False,
    scale: float | None = None,
    bias: Tensor | alibi | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    key_padding_mask: Tensor | None = None,
    precision: str | None = None,
    sinks: Tensor | None = None,
    blocks: Tensor | BlockLists | None = None,
    block: int | tuple[int, int] = 128,
    method: Method = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`fw.attention` of a sequence that is cut over the ranks of a group.

    q is (B, Hq, rows, D), k (B, Hk, keys, D) and v (B, Hk, keys, Dv): this rank's part of the whole, as `shards` cuts
    it; without them rank r has rows ⌊r·S/ranks⌋ to ⌊(r+1)·S/ranks⌋. `pattern` is that of the whole, one or several as
    for `fw.attention`, and need not be the one that was cut; None holds every key and takes the lengths from `shards`.
    The result has this rank's rows.

    With `method="ranges"` a rank receives exactly the keys and values that its rows need and others hold
    (`shards.needs`), point to point, while it computes on its own. Gradients go back the same way and are added in a
    fixed order. A row whose keys come in one piece is computed as in one process; others are merged by their
    log-sum-exp. Received keys are kept for the gradient up to two equal parts of all keys; more are sent again.
    With `method="ulysses"` an all-to-all gives each rank Hq/ranks heads of the whole sequence, and another gives the
    rows back: every row is computed as in one process. The ranks must divide Hk. "auto" takes the method that sends
    fewer bytes over all ranks, "ranges" if both send equally many.

    Every rank makes the same call, and calls backward if one does. When a group first sees a call, ranks compare their
    arguments.

    A `bias` has this rank's rows and all columns, or broadcasts and is then the same on every rank; its gradient is
    this rank's share, as that of `sinks` is. `key_padding_mask` is (B, keys) of this rank's keys, or (B, Sk) of all.
    Other options are those of `fw.attention`, but for dropout and `blocks`, which are refused.

    >>> import torch, torch.distributed as dist, fretwork as fw, fretwork.distributed as fd
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun: no arguments
    >>> q, k, v = (torch.randn(1, 2, 100, 16) for _ in range(3))
    >>> pattern = fw.patterns.sliding_window(100, 20, 0)
    >>> torch.equal(fd.attention(q, k, v, pattern), fw.attention(q, k, v, pattern))
    True
    >>> dist.destroy_process_group()
    """
    _refuse(as_number(_OP, "dropout_p", dropout_p), blocks, block)
    _check_plain({"q": q, "k": k, "v": v})
    slopes, bias = (slopes_of(_OP, bias, q), None) if isinstance(bias, alibi) else (None, bias)
    extras = {"bias": bias, "slopes": slopes, "key_padding_mask": key_padding_mask, "sinks": sinks}
    given = {name: t for name, t in extras.items() if t is not None}
    _check_plain(given)
    group = checked_group(_OP, group)
    patterns = _patterns(pattern, shards, q)
    rows, keys = _ranges(patterns, shards, group)
    if autocasts(q):
        q, k, v, bias, sinks = lowered_operands(q, k, v, bias, sinks)
        given |= {name: t for name, t in (("bias", bias), ("sinks", sinks)) if t is not None}
    scale = None if scale is None else as_number(_OP, "scale", scale)
    softcap = as_number(_OP, "softcap", softcap)
    rank = group.rank()
    _check(q, k, v, patterns, (rows[rank], keys[rank]), given, scale, softcap)
    padding, whole = _padding(key_padding_mask, keys, rank)
    options = scale, softcap, precision_name(_OP, precision), slopes, padding, whole, return_lse
    call = Call(patterns, rows, keys, q.shape[1], group, *options)
    sizes = _sizes(q, k, v, bias, sinks, call)
    chosen = method_of(method, patterns, rows, keys, sizes)
    _agree(chosen, sizes, q, call, tuple(given))
    attend = UlyssesAttention if chosen == "ulysses" else PiecewiseAttention
    o, lse = attend.apply(q, k, v, bias, sinks, call)
    return (o, lse) if return_lse else o


# Checks


def _refuse(dropout_p: float, blocks: object, block: object) -> None:
    if dropout_p != 0:
        raise NotImplementedError(
            f"{_OP}: dropout_p: expected 0 on several ranks, got {dropout_p}; drop elements of the result instead"
        )
    if blocks is not None:
        raise NotImplementedError(
            f"{_OP}: blocks: expected None on several ranks, got {type(blocks).__name__}; the pattern decides what "
            "travels, so give the blocks as one (fw.patterns.from_layout)"
        )
    check_no_block(_OP, block)


def _check_plain(tensors: dict[str, Tensor]) -> None:
    for name, t in tensors.items():
        check_tensor(_OP, name, t)
        if type(t) is not Tensor and type(t) is not torch.nn.Parameter:
            fail(_OP, name, "a plain tensor of this rank's rows", f"a {type(t).__name__} (to_local() gives one)")
        if name in ("q", "k", "v") and t.dim() != 4:
            fail(_OP, name, f"4 dimensions {'(B, Hq, rows, D)' if name == 'q' else '(B, Hk, keys, D)'}", tuple(t.shape))


def _patterns(pattern: Patterns | None, shards: Shards | None, q: Tensor) -> tuple[Pattern, ...]:
    if shards is not None and not isinstance(shards, Shards):
        raise TypeError(f"{_OP}: shards: expected what fd.shard returns, got {type(shards).__name__}")
    if pattern is None:
        if shards is None:
            raise TypeError(f"{_OP}: pattern: expected a fretwork.Pattern, or shards that say the lengths, got None")
        pattern = full((shards.ranges[-1][1], shards.key_ranges[-1][1]))
    patterns = flat_patterns(_OP, pattern, tuple(q.shape))
    for n, p in enumerate(patterns):
        if len(p.shape) == 3 and p.shape[0] != 1:
            fail(_OP, f"pattern[{n}]", "a layout of one head", p.shape[0])
        if p.shape[-2:] != patterns[0].shape[-2:]:
            fail(_OP, f"pattern[{n}]", f"shape {patterns[0].shape[-2:]} like the first", p.shape[-2:])
    return patterns


def _ranges(patterns: tuple[Pattern, ...], shards: Shards | None, group: dist.ProcessGroup) -> tuple[Ranges, Ranges]:
    """Who has which rows and which keys."""
    queries, keys = patterns[0].shape[-2:]
    world = group.size()
    if shards is None:
        return equal_ranges(queries, world), equal_ranges(keys, world)
    if len(shards.ranges) != world:
        fail(_OP, "shards", f"{world} ranges, one for each rank of the group", len(shards.ranges))
    given = shards.ranges[-1][1], shards.key_ranges[-1][1]
    if given != (queries, keys):
        fail(_OP, "shards", f"ranges of {queries} queries and {keys} keys, as the pattern has", given)
    return tuple(shards.ranges), tuple(shards.key_ranges)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    patterns: tuple[Pattern, ...],
    local: tuple[tuple[int, int], tuple[int, int]],
    extras: dict[str, Tensor],
    scale: float | None,
    softcap: float,
) -> None:
    """This rank's rows, and then what `fw.attention` asks, as if the rest of the sequence were here."""
    queries, keys = patterns[0].shape[-2:]
    operands = []
    for name, t in (("q", q), ("k", k), ("v", v)):
        (first, last), length = (local[0], queries) if name == "q" else (local[1], keys)
        if t.shape[2] != last - first:
            expected = f"{last - first} rows, this rank's part [{first}, {last}) of {length}"
            fail(_OP, name, expected, f"{t.shape[2]} in {tuple(t.shape)}")
        operands.append(operand(name, t)._replace(shape=(*t.shape[:2], length, t.shape[3])))
    given: list[Operand] = []
    for name, t in extras.items():
        x, shape = operand(name, t), list(t.shape)
        if name == "bias" and t.dim() >= 2 and shape[-2] != 1:
            if shape[-2] != q.shape[2]:
                fail(_OP, name, f"{q.shape[2]} rows, this rank's, or 1", f"{shape[-2]} in {tuple(shape)}")
            shape[-2] = queries
        if name == "key_padding_mask" and t.dim() == 2 and shape[1] != keys:
            if shape[1] != k.shape[2]:
                fail(_OP, name, f"{k.shape[2]} keys, this rank's, or all {keys}", f"{shape[1]} in {tuple(shape)}")
            shape[1] = keys
        given.append(x._replace(shape=tuple(shape)))
    check_attention(operands, patterns, given, scale, softcap, 0.0)


def _padding(mask: Tensor | None, keys: Ranges, rank: int) -> tuple[Tensor | None, bool]:
    """The mask, and whether it has all keys. A rank that holds all cannot tell, so others keep to theirs too."""
    first, last = keys[rank]
    if mask is None or mask.shape[1] == last - first:
        return mask, False
    if any(b - a == keys[-1][1] for a, b in keys):
        return mask[:, first:last], False
    return mask, True


def _sizes(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, call: Call) -> Sizes:
    learns = [t is not None and t.requires_grad and torch.is_grad_enabled() for t in (q, k, v, bias, sinks)]
    lse_width = max(q.element_size(), 4) if call.returns_lse else 0
    return Sizes(
        *(q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.element_size(), lse_width),
        *((learns[0], learns[1], learns[2]), any(learns), call.padding is not None and not call.padding_is_whole),
        None if bias is None else Bias.of(bias, call.rows, learns[3]),
    )


# Agreement


def _agree(method: str, sizes: Sizes, q: Tensor, call: Call, extras: tuple[str, ...]) -> None:
    """Compares the call with those of the other ranks, and gives it a tag."""
    options = {
        "scale": call.scale,
        "softcap": call.softcap,
        "precision": call.precision,
        "optional arguments": extras,
        "key_padding_mask": "of all keys" if call.padding_is_whole else "of local keys",
        "return_lse": call.returns_lse,
        "requires_grad": sizes.backward,
    }
    key = call.patterns, call.rows, call.keys, sizes, q.dtype, tuple(options.values()), method
    call.tag = agreed(_OP, call.group, key, lambda: _told(method, sizes, q, call) | options, q.device)


def _told(method: str, sizes: Sizes, q: Tensor, call: Call) -> dict[str, object]:
    """What ranks compare, by argument."""
    texts = [p.text for p in call.patterns]
    return {
        "pattern": texts[0] if len(texts) == 1 else texts,
        "shards": (call.rows, call.keys),
        "q": (sizes.batch, sizes.heads, sizes.depth, str(q.dtype), sizes.learns[0]),
        "k": (sizes.key_heads, sizes.learns[1]),
        "v": (sizes.value_depth, sizes.learns[2]),
        "bias": sizes.bias,
        "method": method,
    }
