"""The computation of attention over ranks: piece after piece of the keys, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fretwork._shapes import Shape
from fretwork._torch.arguments import pattern_keys
from fretwork._torch.attention import attention_backward_op, attention_op
from fretwork.distributed._call import Call
from fretwork.distributed._exchange import Exchange
from fretwork.distributed._steps import Places, Range, Step, joined, meet

_OP = "attention"

Kept = dict[int, list[Tensor]]


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
            options = _options(step, bias, call)
            rows.add(step, *attention_op(_rows_of(step, q), keys, values, *options, None if step.merges else sinks))
        o, lse = rows.done()
        ctx.call, ctx.kept = call, Kept() if call.plan.fetches else kept
        ctx.save_for_backward(q, k, v, bias, sinks, o, lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(f"{_OP}: gradient: expected to be differentiated once, got a second time")
        return *_Backward(ctx, *gradients).run(), None


class _Rows:
    """What rows have so far. A row that has keys in one piece only gets that piece's very bits.

    The first steps of a plan, which merge nothing, have each row once.
    """

    def __init__(self, q: Tensor, v: Tensor) -> None:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        self._shape, self._dtype, self._count = (*q.shape[:3], v.shape[3]), q.dtype, 0
        self._o, self._lse = q.new_zeros(0), q.new_zeros(0, dtype=wide)

    def add(self, step: Step, o: Tensor, lse: Tensor) -> None:
        first, last = step.rows
        o, lse = o[:, :, : last - first], lse[:, :, : last - first]
        if step.merges:
            self._merge(first, last, o, lse)
        elif last - first == self._shape[2]:
            self._o, self._lse = o, lse
        else:
            if self._count == 0:
                self._o, self._lse = self._o.new_empty(self._shape), self._lse.new_empty(self._shape[:3])
            self._o[:, :, first:last], self._lse[:, :, first:last] = o, lse
        self._count += 1

    def _merge(self, first: int, last: int, o: Tensor, lse: Tensor) -> None:
        self._o = _widened(self._o)
        before = self._lse[:, :, first:last]
        share = (lse - before).sigmoid_().masked_fill_(lse == -math.inf, 0)  # of the new keys in the sum of both
        self._o[:, :, first:last].lerp_(_widened(o), share[..., None])
        before.copy_(torch.logaddexp(before, lse))

    def done(self) -> tuple[Tensor, Tensor]:
        if self._count == 0:  # a rank without rows
            return self._o.reshape(self._shape), self._lse.reshape(self._shape[:3])
        return self._o.to(self._dtype), self._lse


class _Sum:
    """A sum of gradients of rows, in a fixed order and in fp32 where there are several. It takes over what is added."""

    def __init__(self, like: Tensor) -> None:
        self._like, self._dtype = like, torch.float64 if like.dtype == torch.float64 else torch.float32
        self._all: Tensor | None = None
        self._has: list[Range] = []  # rows that have something; the others are not written

    def add(self, first: int, last: int, part: Tensor) -> None:
        if last - first == self._like.shape[2]:
            self._add_all(part)
            return
        whole = self._allocated()
        for a, b in _missing(self._has, (first, last)):
            whole[:, :, a:b] = part[:, :, a - first : b - first]
        for a, b in filter(None, (meet(r, (first, last)) for r in self._has)):
            whole[:, :, a:b] += part[:, :, a - first : b - first]
        self._has = joined([*self._has, (first, last)])

    def _add_all(self, part: Tensor) -> None:
        """Adds what is there to a part of all rows."""
        if self._all is not None:
            part = part.to(self._dtype)
            for a, b in self._has:
                part[:, :, a:b] += self._all[:, :, a:b]
        self._all, self._has = part, [(0, self._like.shape[2])]

    def add_at(self, places: Places, rows: Tensor) -> None:
        places.put(self._written(), rows, add=True)

    def done(self) -> Tensor:
        whole = self._all if self._all is not None and not self._missing() else self._written()
        return whole.to(self._like.dtype)

    def _allocated(self) -> Tensor:
        like = self._like
        self._all = like.new_empty(like.shape, dtype=self._dtype) if self._all is None else self._all.to(self._dtype)
        return self._all

    def _missing(self) -> list[Range]:
        return _missing(self._has, (0, self._like.shape[2]))

    def _written(self) -> Tensor:
        """All rows, zero where nothing was added."""
        whole = self._allocated()
        for a, b in self._missing():
            whole[:, :, a:b] = 0
        self._has = [(0, self._like.shape[2])]
        return whole


def _missing(has: Sequence[Range], within: Range) -> list[Range]:
    """The parts of a range that ascending ranges leave out."""
    found, at = [], within[0]
    for first, last in (*has, (within[1], within[1])):
        if at < min(first, within[1]):
            found.append((at, min(first, within[1])))
        at = max(at, last)
    return found


class _Backward:
    """The gradients of q, k, v, bias and sinks."""

    def __init__(self, ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> None:
        self.call, self.kept, self.needs = ctx.call, ctx.kept, ctx.needs_input_grad
        self.q, self.k, self.v, self.bias, self.sinks, self.out, self.lse = ctx.saved_tensors
        self.d_out, self.d_lse = whole_gradient(d_out, self.out), d_lse
        self.sums = [_Sum(t) for t in (self.q, self.k, self.v)]
        self.wanted = [n for n in (1, 2) if self.needs[n]]  # of keys and values
        self.d_bias = self._zeros(self.bias, self.needs[3])
        self.d_sinks = self._zeros(self.sinks, self.needs[4])
        # For each peer the gradients of the keys and values that it sent, in the order in which it sent them.
        self.back: dict[int, dict[int, Tensor]] = {}

    @staticmethod
    def _zeros(t: Tensor | None, needed: bool) -> Tensor | None:
        return torch.zeros_like(_widened(t)) if needed and t is not None else None

    def run(self) -> tuple[Tensor | None, ...]:
        plan = self.call.plan
        own = [step for step in plan.steps if not step.sources]
        others = [step for step in plan.steps if step.sources]
        # The rank's own keys hide the keys' second journey, or else the gradients' one.
        now, later = ([*own, *others], []) if plan.fetches else (others, own)
        for found in _arriving(now, (self.k, self.v), self.call, self.kept, again=True):
            self._step(*found)
        returned = self._returning()
        returned.post()
        for step in later:
            self._step(step, *_assembled(step, (self.k, self.v), self.kept))
        for peer, parts in returned.arrivals():
            for n, part in zip(self.wanted, parts, strict=True):
                self.sums[n].add_at(plan.gives[peer], part)
        results = [total.done() if needed else None for total, needed in zip(self.sums, self.needs, strict=False)]
        for total, like in ((self.d_bias, self.bias), (self.d_sinks, self.sinks)):
            results.append(None if total is None or like is None else total.to(like.dtype))
        return tuple(results)

    def _step(self, step: Step, keys: Tensor, values: Tensor) -> None:
        first, last = step.rows
        d_lse = None if self.d_lse is None else _rows_of(step, self.d_lse)
        operands = _rows_of(step, self.q), keys, values, _rows_of(step, self.out), _rows_of(step, self.lse, -math.inf)
        *options, padding = _options(step, self.bias, self.call)
        sinks = None if step.merges else self.sinks
        d_q, d_k, d_v, d_bias, d_sinks = attention_backward_op(
            *(*operands, _rows_of(step, self.d_out), d_lse, *options, *self.needs[:4]),
            *(padding, sinks, sinks is not None and self.needs[4]),
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
        for source in step.sources:
            back, found = self.back.setdefault(source.peer, {}), source.keys.take(part)
            count = self.call.plan.receives[source.peer]
            if source.rows.ranges == ((0, count),) and (found.shape == part.shape or len(source.keys.ranges) > 1):
                back[n] = found  # not a view that would keep the rest of the piece
                continue
            if n not in back:
                back[n] = part.new_empty((*part.shape[:2], count, part.shape[3]))
            source.rows.put(back[n], found)
        if step.own:
            (first, last), (begin, end) = step.own
            self.sums[n].add(first, last, part[:, :, begin:end])

    def _returning(self) -> Exchange:
        def given(peer: int) -> list[Tensor]:
            parts = self.back.pop(peer, {})
            return [parts[n] for n in self.wanted if n in parts]

        likes = [(self.q, self.k, self.v)[n] for n in self.wanted]
        shapes = {peer: _shapes(likes, places.count) for peer, places in self.call.plan.gives.items()}
        call = self.call
        return Exchange(_OP, call.group, given, shapes, self.k, call.plan.room, back=True, tag=call.tag)


def _shapes(likes: Iterable[Tensor], count: int) -> list[Shape]:
    """Of so many rows of each."""
    return [(*t.shape[:2], count, t.shape[3]) for t in likes]


def whole_gradient(d: Tensor | None, like: Tensor) -> Tensor:
    """As kernels read it: of all elements."""
    if d is None:
        return torch.zeros_like(like)
    return d.contiguous() if 0 in d.stride() else d  # one number for many, as a sum's gradient is


def _widened(t: Tensor) -> Tensor:
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def _rows_of(step: Step, t: Tensor, fill: float = 0.0) -> Tensor:
    """A step's rows of a tensor (B, H, rows, …), with the empty ones at the end."""
    rows = t[:, :, step.rows[0] : step.rows[1]]
    return F.pad(rows, (0, 0) * (t.dim() - 3) + (0, step.pad_rows), value=fill) if step.pad_rows else rows


def _arriving(
    steps: Iterable[Step], own: tuple[Tensor, ...], call: Call, kept: Kept, again: bool
) -> Iterator[tuple[Any, ...]]:
    """Each step with its keys and values as soon as they are here. What arrives is put into `kept`.

    `again` sends to those only, and receives only there, where it was not kept.
    """
    plan = call.plan
    receives = {} if again and not plan.fetches else plan.receives
    gives = {peer: places for peer, places in plan.gives.items() if not again or plan.fetches_again[peer]}
    every = any(places.count == own[0].shape[2] for places in gives.values())
    sent = [t.contiguous() for t in own] if every else own  # one copy for all peers that get every row

    def given(peer: int) -> list[Tensor]:
        return [gives[peer].take(t) for t in sent] if peer in gives else []

    shapes = {peer: _shapes(own, count) for peer, count in receives.items()}
    copies = {peer: places.count for peer, places in gives.items() if places.count < own[0].shape[2]}
    exchange = Exchange(_OP, call.group, given, shapes, own[0], plan.room, copies, tag=call.tag)
    exchange.post()
    arrivals = exchange.arrivals()
    left = [source.peer for step in steps for source in step.sources]
    for step in steps:
        while any(source.peer not in kept for source in step.sources):
            peer, parts = next(arrivals)
            kept[peer] = parts
        yield (step, *_assembled(step, own, kept))
        for source in step.sources:
            left.remove(source.peer)
            if plan.fetches and source.peer not in left:
                del kept[source.peer]
    kept.update(arrivals)


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
