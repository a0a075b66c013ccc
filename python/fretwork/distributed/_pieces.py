"""The computation of attention over ranks: piece after piece of the keys, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fretwork._torch.arguments import pattern_keys
from fretwork._torch.attention import attention_backward_op, attention_op
from fretwork.distributed._exchange import Exchange
from fretwork.distributed._steps import Plan, Step

_OP = "attention"


@dataclass(eq=False)
class Call:
    """What a call is beside its differentiable tensors."""

    plan: Plan
    group: dist.ProcessGroup
    scale: float | None
    softcap: float
    precision: str
    slopes: Tensor | None
    padding: Tensor | None  # (B, this rank's keys), or (B, all keys)
    padding_is_whole: bool
    kept_padding: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)

    @property
    def fetches_again(self) -> bool:
        return self.plan.fetches_again[self.plan.rank]


Kept = dict[int, tuple[Tensor, ...]]


class PiecewiseAttention(torch.autograd.Function):
    """(o, lse) of a rank's rows."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, call: Call
    ) -> tuple[Tensor, Tensor]:
        rows, kept = _Rows(q, v), Kept()
        if call.padding is not None and not call.padding_is_whole:
            words = (call.padding.to(torch.uint8)[:, None, :, None],)
            for _ in _arriving((), words, call, call.kept_padding, again=False):
                pass
        for step, keys, values in _arriving(call.plan.steps, (k, v), call, kept, again=False):
            first, last = step.rows
            operands = F.pad(q[:, :, first:last], (0, 0, 0, step.pad_rows)), keys, values
            options = _options(step, bias, call)
            o, lse = attention_op(*operands, *options, None if step.merges else sinks)
            rows.add(step, o[:, :, : last - first], lse[:, :, : last - first])
        o, lse = rows.done()
        ctx.call, ctx.kept = call, Kept() if call.fetches_again else kept
        ctx.save_for_backward(q, k, v, bias, sinks, o, lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(f"{_OP}: gradient: expected to be differentiated once, got a second time")
        return *_Backward(ctx, *gradients).run(), None


class _Rows:
    """What rows have so far. A row that has keys in one piece only gets that piece's very bits."""

    def __init__(self, q: Tensor, v: Tensor) -> None:
        self._shape, self._like = (*q.shape[:3], v.shape[3]), q
        self._o: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, step: Step, o: Tensor, lse: Tensor) -> None:
        first, last = step.rows
        if self._o is None or self._lse is None:
            if last - first == self._shape[2]:
                self._o, self._lse = o, lse
                return
            self._o, self._lse = o.new_zeros(self._shape), lse.new_full(self._shape[:3], -math.inf)
        if not step.merges:
            self._o[:, :, first:last], self._lse[:, :, first:last] = o, lse
            return
        self._o = _widened(self._o)
        before, here = self._lse[:, :, first:last], self._o[:, :, first:last]
        both = torch.logaddexp(before, lse)
        old, new = ((t - both).exp().masked_fill(t == -math.inf, 0)[..., None] for t in (before, lse))
        self._o[:, :, first:last] = here * old + o * new
        self._lse[:, :, first:last] = both

    def done(self) -> tuple[Tensor, Tensor]:
        if self._o is None or self._lse is None:  # a rank without rows
            wide = torch.float64 if self._like.dtype == torch.float64 else torch.float32
            return self._like.new_zeros(self._shape), self._like.new_zeros(self._shape[:3], dtype=wide)
        return self._o.to(self._like.dtype), self._lse


class _Sum:
    """A sum of gradients of rows, in a fixed order and in fp32 where there are several."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._all: Tensor | None = None

    @property
    def all(self) -> Tensor:
        """To be added to."""
        self._all = torch.zeros_like(_widened(self._like)) if self._all is None else _widened(self._all)
        return self._all

    def add(self, first: int, last: int, part: Tensor) -> None:
        if self._all is None and last - first == self._like.shape[2]:
            self._all = part
        else:
            self.all[:, :, first:last] += part

    def done(self) -> Tensor:
        return torch.zeros_like(self._like) if self._all is None else self._all.to(self._like.dtype)


class _Backward:
    """The gradients of q, k, v, bias and sinks."""

    def __init__(self, ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> None:
        self.call, self.kept, self.needs = ctx.call, ctx.kept, ctx.needs_input_grad
        self.q, self.k, self.v, self.bias, self.sinks, self.out, self.lse = ctx.saved_tensors
        self.d_out = torch.zeros_like(self.out) if d_out is None else d_out
        self.d_lse = d_lse
        self.sums = [_Sum(t) for t in (self.q, self.k, self.v)]
        self.d_bias = self._zeros(self.bias, self.needs[3])
        self.d_sinks = self._zeros(self.sinks, self.needs[4])
        # For each peer the gradients of what it sent, in the order in which it sent it.
        self.back: Kept = {}

    @staticmethod
    def _zeros(t: Tensor | None, needed: bool) -> Tensor | None:
        return torch.zeros_like(_widened(t)) if needed and t is not None else None

    def run(self) -> tuple[Tensor | None, ...]:
        call, steps = self.call, self.call.plan.steps
        own = [step for step in steps if not step.sources]
        others = [step for step in steps if step.sources]
        # The rank's own keys hide the keys' second journey, or else the gradients' one.
        now, later = ([*own, *others], []) if call.fetches_again else (others, own)
        for found in _arriving(now, (self.k, self.v), call, self.kept, again=True):
            self._step(*found)
        returned = self._returning()
        returned.post()
        for step in later:
            self._step(step, *_assembled(step, (self.k, self.v), self.kept))
        for peer, flat in returned.arrivals():
            wanted = [n for n in (1, 2) if self.needs[n]]
            places = call.plan.gives[peer]
            likes = [(self.q, self.k, self.v)[n] for n in wanted]
            for n, part in zip(wanted, _split(flat, likes, places.count), strict=True):
                places.put(self.sums[n].all, part, add=True)
        results = [total.done() if needed else None for total, needed in zip(self.sums, self.needs, strict=False)]
        for total, like in ((self.d_bias, self.bias), (self.d_sinks, self.sinks)):
            results.append(None if total is None or like is None else total.to(like.dtype))
        return tuple(results)

    def _step(self, step: Step, keys: Tensor, values: Tensor) -> None:
        first, last = step.rows

        def rows(t: Tensor, fill: float = 0.0) -> Tensor:
            return F.pad(t[:, :, first:last], (0,) * (2 * (t.dim() - 3)) + (0, step.pad_rows), value=fill)

        d_lse = None if self.d_lse is None else rows(self.d_lse)
        d_out = rows(self.d_out)
        operands = rows(self.q), keys, values, rows(self.out), rows(self.lse, -math.inf), d_out.contiguous(), d_lse
        *options, padding = _options(step, self.bias, self.call)
        sinks = None if step.merges else self.sinks
        d_q, d_k, d_v, d_bias, d_sinks = attention_backward_op(
            *operands, *options, *self.needs[:4], padding, sinks, sinks is not None and self.needs[4]
        )
        if self.needs[0]:
            self.sums[0].add(first, last, d_q[:, :, : last - first])
        for n, part in ((1, d_k), (2, d_v)):
            if self.needs[n]:
                self._give_back(step, n, part)
        if self.d_bias is not None:
            _of_step(step, self.d_bias).add_(d_bias)
        if self.d_sinks is not None and sinks is not None:
            self.d_sinks += d_sinks

    def _give_back(self, step: Step, n: int, part: Tensor) -> None:
        """Gradients of a piece's keys or values, to whom these belong."""
        if step.own:
            (first, last), (begin, end) = step.own
            self.sums[n].add(first, last, part[:, :, begin:end])
        for source in step.sources:
            if source.peer not in self.back:
                count = self.call.plan.receives[source.peer]
                self.back[source.peer] = tuple(
                    t.new_empty((*t.shape[:2], count if needed else 0, t.shape[3]))
                    for t, needed in ((self.k, self.needs[1]), (self.v, self.needs[2]))
                )
            source.rows.put(self.back[source.peer][n - 1], source.keys.take(part))

    def _returning(self) -> Exchange:
        plan = self.call.plan
        width = sum(_width(t) for t, needed in ((self.k, self.needs[1]), (self.v, self.needs[2])) if needed)
        sizes = {peer: places.count * width for peer, places in plan.gives.items()}

        def given(peer: int) -> Tensor | None:
            parts = self.back.pop(peer, None)
            return None if parts is None else torch.cat([t.reshape(-1) for t in parts])

        return Exchange(_OP, self.call.group, given, sizes, self.k, back=True)


def _widened(t: Tensor) -> Tensor:
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def _width(t: Tensor) -> int:
    """Elements of a row in all heads."""
    return t.shape[0] * t.shape[1] * t.shape[3]


def _split(flat: Tensor, likes: Iterable[Tensor], count: int) -> tuple[Tensor, ...]:
    """`count` rows of each of some tensors, from one flat one."""
    parts, at = [], 0
    for t in likes:
        parts.append(flat[at : at + count * _width(t)].view(*t.shape[:2], count, t.shape[3]))
        at += count * _width(t)
    return tuple(parts)


def _arriving(
    steps: Iterable[Step], own: tuple[Tensor, ...], call: Call, kept: Kept, again: bool
) -> Iterator[tuple[Any, ...]]:
    """Each step with its keys and values as soon as they are here. What arrives is put into `kept`.

    `again` sends to those only, and receives only there, where it was not kept.
    """
    plan = call.plan
    receives = {} if again and not call.fetches_again else plan.receives

    def given(peer: int) -> Tensor | None:
        places = plan.gives.get(peer)
        if places is None or (again and not plan.fetches_again[peer]):
            return None
        return torch.cat([places.take(t).reshape(-1) for t in own])

    sizes = {peer: count * sum(_width(t) for t in own) for peer, count in receives.items()}
    exchange = Exchange(_OP, call.group, given, sizes, own[0])
    exchange.post()
    arrivals = exchange.arrivals()
    left = [source.peer for step in steps for source in step.sources]
    for step in steps:
        while any(source.peer not in kept for source in step.sources):
            peer, flat = next(arrivals)
            kept[peer] = _split(flat, own, plan.receives[peer])
        yield (step, *_assembled(step, own, kept))
        for source in step.sources:
            left.remove(source.peer)
            if call.fetches_again and source.peer not in left:
                del kept[source.peer]
    for peer, flat in arrivals:
        kept[peer] = _split(flat, own, plan.receives[peer])


def _assembled(step: Step, own: tuple[Tensor, ...], kept: Kept) -> list[Tensor]:
    """The rows of a step's piece of the keys, of each tensor."""
    if step.own and not step.sources and step.is_full:
        (first, last), _ = step.own
        return [t[:, :, first:last] for t in own]
    if len(step.sources) == 1 and not step.own and step.is_full:
        (source,) = step.sources
        return [source.rows.take(t) for t in kept[source.peer]]
    pieces = []
    for n, t in enumerate(own):
        shape = (*t.shape[:2], step.length, t.shape[3])
        piece = t.new_empty(shape) if step.is_full else t.new_zeros(shape)
        if step.own:
            (first, last), (begin, end) = step.own
            piece[:, :, begin:end] = t[:, :, first:last]
        for source in step.sources:
            source.keys.put(piece, source.rows.take(kept[source.peer][n]))
        pieces.append(piece)
    return pieces


def _options(step: Step, bias: Tensor | None, call: Call) -> tuple[Any, ...]:
    """An op's arguments from the patterns to the padding mask."""
    padding = None
    if call.padding is not None and call.padding_is_whole:
        padding = F.pad(call.padding[:, step.keys[0] : step.keys[1]], (0, step.pad_keys))
    elif call.padding is not None:
        words = call.padding.to(torch.uint8)[:, None, :, None]
        padding = _assembled(step, (words,), call.kept_padding)[0][:, 0, :, 0].bool()
    bias = None if bias is None else _of_step(step, bias)
    keys = pattern_keys(step.patterns)
    return keys, call.scale, bias, call.slopes, call.softcap, 0.0, None, call.precision, padding


def _of_step(step: Step, bias: Tensor) -> Tensor:
    """What a bias of a rank's rows and all keys, or one that broadcasts, has for a step."""
    if bias.dim() >= 2 and bias.shape[-2] != 1:
        bias = bias[..., step.rows[0] : step.rows[1], :]
    if bias.dim() >= 1 and bias.shape[-1] != 1:
        bias = bias[..., step.keys[0] : step.keys[1]]
    return bias
