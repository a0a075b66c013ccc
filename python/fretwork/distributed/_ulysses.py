"""Attention over ranks by all-to-all: each rank computes some heads of the whole sequence, and gets its rows back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fretwork._shapes import Shape
from fretwork._torch.arguments import pattern_keys
from fretwork._torch.attention import attention_backward_op, attention_op
from fretwork.distributed._call import Call
from fretwork.distributed._exchange import explained
from fretwork.distributed._pieces import whole_gradient
from fretwork.distributed.shards import Ranges
from fretwork.patterns import Pattern

_OP = "attention"


class UlyssesAttention(torch.autograd.Function):
    """(o, lse) of a rank's rows, lse where it is asked for. The ranks divide the key heads."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, call: Call
    ) -> tuple[Tensor, Tensor | None]:
        ctx.call, ctx.shapes = call, [None if t is None else t.shape for t in (bias, sinks)]
        q, k, v = _to_heads(call.group, (q, call.rows), (k, call.keys), (v, call.keys))
        bias, sinks = _bias_of_heads(bias, call), None if sinks is None else _own_heads(sinks, 0, call.group)
        padding = _whole_padding(call)
        o, lse = attention_op(q, k, v, *_options(bias, call), padding, sinks)
        ctx.save_for_backward(q, k, v, bias, sinks, padding, o, lse)
        ctx.set_materialize_grads(False)
        if not call.returns_lse:
            return _to_rows(call.group, (o, call.rows))[0], None
        rows, words = _to_rows(call.group, (o, call.rows), (_as_words(lse, o), call.rows))
        return rows, words.view(lse.dtype)[..., 0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(f"{_OP}: gradient: expected to be differentiated once, got a second time")
        call, needs = ctx.call, ctx.needs_input_grad
        q, k, v, bias, sinks, padding, o, lse = ctx.saved_tensors
        d_out, d_lse = _gradients_of_heads(gradients, o, lse, call)
        found = attention_backward_op(
            q, k, v, o, lse, d_out, d_lse, *_options(bias, call), *needs[:4], padding, sinks, needs[4]
        )
        wanted = [(d, r) for d, r, n in zip(found, (call.rows, call.keys, call.keys), needs, strict=False) if n]
        rows = iter(_to_rows(call.group, *wanted))
        d_bias = _bias_gradient(found[3], ctx.shapes[0], call) if needs[3] else None
        d_sinks = _of_all_heads(found[4], 0, ctx.shapes[1], call.group) if needs[4] else None
        return *(next(rows) if n else None for n in needs[:3]), d_bias, d_sinks, None


def _gradients_of_heads(
    gradients: Sequence[Tensor | None], o: Tensor, lse: Tensor, call: Call
) -> tuple[Tensor, Tensor | None]:
    """Zeros travel too: other ranks may have used what this one did not."""
    first, last = call.rows[call.group.rank()]
    shape = o.shape[0], o.shape[1] * call.group.size(), last - first
    d_out = whole_gradient(gradients[0], o.new_empty(()).expand(*shape, o.shape[3]))
    if not call.returns_lse:
        return _to_heads(call.group, (d_out, call.rows))[0], None
    words = _as_words(whole_gradient(gradients[1], lse.new_empty(()).expand(shape)), o)
    d_out, words = _to_heads(call.group, (d_out, call.rows), (words, call.rows))
    return d_out, words.view(lse.dtype)[..., 0]


def _as_words(lse: Tensor, like: Tensor) -> Tensor:
    """(B, H, rows, words) of another dtype, so that it travels beside tensors of that."""
    return lse[..., None].view(like.dtype)


def _options(bias: Tensor | None, call: Call) -> tuple[Any, ...]:
    """An op's arguments from the patterns to the precision."""
    slopes = None if call.slopes is None else _own_heads(call.slopes, 0, call.group)
    keys = pattern_keys(_own_patterns(call))
    return keys, call.scale, bias, slopes, call.softcap, 0.0, None, call.precision


# The part of each argument that belongs to a rank's heads


def _own_heads(t: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return t.chunk(group.size(), dim)[group.rank()]


def _of_all_heads(part: Tensor, dim: int, shape: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Zeros in the heads of other ranks."""
    whole = part.new_zeros(tuple(shape))
    _own_heads(whole, dim, group).copy_(part)
    return whole


def _own_patterns(call: Call) -> tuple[Pattern, ...]:
    """Of one for all, one for each head, or one for each head of each element."""
    patterns, rank, world = call.patterns, call.group.rank(), call.group.size()
    if len(patterns) == 1:
        return patterns
    heads = call.heads
    part = heads // world
    return tuple(p for at in range(rank * part, len(patterns), heads) for p in patterns[at : at + part])


def _whole_padding(call: Call) -> Tensor | None:
    if call.padding is None or call.padding_is_whole:
        return call.padding
    words = call.padding.to(torch.uint8)[:, None, :, None].expand(-1, call.group.size(), -1, -1)
    return _to_heads(call.group, (words, call.keys))[0][:, 0, :, 0].bool()


def _bias_of_heads(bias: Tensor | None, call: Call) -> Tensor | None:
    """All rows of it, if it has any."""
    if bias is None:
        return None
    bias = bias[(None,) * (4 - bias.dim())]
    if bias.shape[2] != 1:
        every = bias.expand(-1, call.group.size(), -1, -1) if bias.shape[1] == 1 else bias
        return _to_heads(call.group, (every, call.rows))[0]
    return bias if bias.shape[1] == 1 else _own_heads(bias, 1, call.group)


def _bias_gradient(d: Tensor, shape: Sequence[int], call: Call) -> Tensor:
    """This rank's rows, from all heads; or, of a bias without rows, what its heads add to the sum."""
    _, heads, rows, _ = (1,) * (4 - len(shape)) + tuple(shape)
    if rows != 1:
        (d,) = _to_rows(call.group, (d, call.rows))
        d = d.sum(1, keepdim=True) if heads == 1 else d
    elif heads != 1:
        d = _of_all_heads(d, 1, (d.shape[0], heads, *d.shape[2:]), call.group)
    return d.reshape(tuple(shape))


# From rows to heads and back


def _to_heads(group: dist.ProcessGroup, *tensors: tuple[Tensor, Ranges]) -> list[Tensor]:
    """All rows of this rank's heads, from this rank's rows of all heads. Each tensor comes with everyone's rows."""
    world = group.size()
    heads = [t.chunk(world, 1) for t, _ in tensors]
    given = [[parts[peer] for parts in heads] for peer in range(world)]
    shapes = [
        [(t.shape[0], t.shape[1] // world, rows[peer][1] - rows[peer][0], t.shape[3]) for t, rows in tensors]
        for peer in range(world)
    ]
    return [torch.cat(parts, 2) for parts in zip(*_all_to_all(given, shapes, group), strict=True)]


def _to_rows(group: dist.ProcessGroup, *tensors: tuple[Tensor, Ranges]) -> list[Tensor]:
    """This rank's rows of all heads, from all rows of this rank's heads."""
    given = [[t[:, :, slice(*rows[peer])] for t, rows in tensors] for peer in range(group.size())]
    shapes = [t.shape for t in given[group.rank()]]
    return [torch.cat(parts, 1) for parts in zip(*_all_to_all(given, [shapes] * group.size(), group), strict=True)]


def _all_to_all(
    given: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[Shape]], group: dist.ProcessGroup
) -> list[list[Tensor]]:
    """From each peer the tensors that it gives, which have these shapes, for those given to it."""
    if not given[0]:
        return []
    splits = [sum(t.numel() for t in parts) for parts in given]
    sizes = [sum(map(math.prod, of)) for of in shapes]
    sent, arrived = given[0][0].new_empty(sum(splits)), given[0][0].new_empty(sum(sizes))
    for flat, parts in zip(sent.split(splits), given, strict=True):
        for place, t in zip(_parts(flat, [t.shape for t in parts]), parts, strict=True):
            place.copy_(t)
    with explained(_OP):
        dist.all_to_all_single(arrived, sent, sizes, splits, group=group)
    return [_parts(flat, of) for flat, of in zip(arrived.split(sizes), shapes, strict=True)]


def _parts(flat: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Tensors that lie one after another in a flat one."""
    parts = flat.split([math.prod(shape) for shape in shapes])
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]
