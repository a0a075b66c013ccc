"""Attention over the devices of an axis: stage after stage of the keys, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fretwork.jax._handlers import alike, differentiable
from fretwork.jax.attention import AttentionCall, attention_call, attention_gradients, wide
from fretwork.jax.distributed._rounds import LocalStep, Places, Round, Schedule, Stage, index_of

# More ranges than this are read and written by their indices.
_FEW_RANGES = 8

Arrays = tuple[jax.Array, ...]


class SequenceCall(NamedTuple):
    """What a call is beside its arrays."""

    schedule: Schedule
    axis: str | tuple[str, ...]
    options: AttentionCall  # its extras are those of the call: bias, slopes, key padding and sinks, b, s, k, z

    def of_step(self, step: LocalStep) -> AttentionCall:
        extras = self.options.extras if step.sinks else self.options.extras.replace("z", "")
        return self.options._replace(patterns=step.patterns, extras=extras)


class _Own(NamedTuple):
    """What stays on a device, and does not come of other arrays' gradients."""

    q: jax.Array
    keys: Arrays  # keys, values, and words of the padding, (B, 1, keys, 1)
    bias: Arrays  # of this device's rows and all keys, or of one row or key that stands for all
    slopes: Arrays
    sinks: Arrays


def _own(call: SequenceCall, q: jax.Array, k: jax.Array, v: jax.Array, *extras: jax.Array) -> _Own:
    given = {kind: (x,) for kind, x in zip(call.options.extras, extras, strict=True)}
    words = tuple(x[:, None, :, None] for x in given.get("k", ()))
    return _Own(q, (k, v, *words), given.get("b", ()), given.get("s", ()), given.get("z", ()))


Kept = dict[int, Arrays]  # what came, by round


# What travels


def _travel(call: SequenceCall, number: int, own: Arrays) -> Arrays:
    """This device's keys go out, and those of another come in; zeros where none sends."""
    one = call.schedule.rounds[number]
    rows = tuple(_sent(call, one, x) for x in own)
    return tuple(jax.lax.ppermute(x, call.axis, one.pairs) for x in rows)


def _sent(call: SequenceCall, one: Round, x: jax.Array) -> jax.Array:
    if one.places is not None:
        return _take(x, one.places)
    return x.at[:, :, _table(call, one)].get(mode="fill", fill_value=0)


def _travel_back(call: SequenceCall, number: int, gradients: Arrays, sums: Arrays) -> Arrays:
    """The gradients of what came go home, where they are added."""
    one = call.schedule.rounds[number]
    home = [(receiver, sender) for sender, receiver in one.pairs]
    came = (jax.lax.ppermute(x, call.axis, home) for x in gradients)
    if one.places is not None:
        return tuple(_add(total, one.places, x) for total, x in zip(sums, came, strict=True))
    table = _table(call, one)
    return tuple(
        total.at[:, :, table].add(x.astype(total.dtype), mode="drop", unique_indices=True)
        for total, x in zip(sums, came, strict=True)
    )


def _table(call: SequenceCall, one: Round) -> jax.Array:
    return _of_device(call, jnp.asarray(one.table))


def _of_device(call: SequenceCall, table: jax.Array) -> jax.Array:
    return table[jax.lax.axis_index(call.axis)]


def _after(arrays: Arrays, earlier: jax.Array) -> Arrays:
    """The same arrays, once something else is computed: keys that are too many to keep come two stages ahead."""
    return tuple(jax.lax.optimization_barrier((*arrays, earlier))[:-1])


# Places


def _take(x: jax.Array, places: Places) -> jax.Array:
    if len(places) > _FEW_RANGES:
        return x.at[:, :, index_of(places)].get(mode="clip", unique_indices=True)
    parts = [x[:, :, first:last] for first, last in places]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, 2)


def _add(x: jax.Array, places: Places, rows: jax.Array) -> jax.Array:
    rows = rows.astype(x.dtype)
    if len(places) > _FEW_RANGES:
        return x.at[:, :, index_of(places)].add(rows, unique_indices=True)
    done = 0
    for first, last in places:
        x = x.at[:, :, first:last].add(rows[:, :, done : done + last - first])
        done += last - first
    return x


def _piece(step: LocalStep, own: jax.Array, came: dict[int, jax.Array]) -> jax.Array:
    """The rows of a step's piece of the keys, zero where it has gaps."""
    shape = (*own.shape[:2], step.length, own.shape[3])
    if sum(len(part.keys) for part in step.parts) > _FEW_RANGES:
        piece = jnp.zeros(shape, own.dtype)
        if step.own:
            (first, last), (begin, end) = step.own
            piece = piece.at[:, :, begin:end].set(own[:, :, first:last])
        for part in step.parts:
            rows = _take(came[part.round], part.rows)
            piece = piece.at[:, :, index_of(part.keys)].set(rows, unique_indices=True)
        return piece
    found = [(step.own[1], own, step.own[0])] if step.own else []
    for part in step.parts:
        found += [(there, came[part.round], here) for there, here in zip(part.keys, part.rows, strict=True)]
    pieces, done = [], 0
    for (begin, end), x, (first, last) in sorted(found, key=lambda one: one[0]):
        pieces += [jnp.zeros((*shape[:2], begin - done, shape[3]), own.dtype)] * (begin > done)
        pieces.append(x[:, :, first:last])
        done = end
    pieces += [jnp.zeros((*shape[:2], step.length - done, shape[3]), own.dtype)] * (done < step.length)
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, 2)


def _pieces(step: LocalStep, own: Arrays, came: Kept) -> tuple[jax.Array, ...]:
    return tuple(_piece(step, x, {r: arrays[n] for r, arrays in came.items()}) for n, x in enumerate(own))


def _rows(step: LocalStep, x: jax.Array, fill: float = 0.0) -> jax.Array:
    """The rows of a step, with the empty ones at its end."""
    first, last = step.rows
    rows = x[:, :, first:last]
    if not step.pad_rows:
        return rows
    return jnp.pad(rows, [(0, step.pad_rows if d == 2 else 0) for d in range(x.ndim)], constant_values=fill)


# Forward


def _switch(call: SequenceCall, stage: Stage, compute: Callable[..., Any], *operands: Any) -> Any:
    """The branch of this device."""
    branches = [functools.partial(compute, steps) for steps in stage.branches]
    if len(branches) == 1:
        return branches[0](*operands)
    return jax.lax.switch(_of_device(call, jnp.asarray(stage.branch_of, jnp.int32)), branches, *operands)


def _first_keys(call: SequenceCall, stage: Stage) -> jax.Array | None:
    """Where the pieces of this device's steps begin, if a bias asks for it."""
    return _of_device(call, jnp.asarray(stage.first_keys)) if "b" in call.options.extras else None


def _of_bias(step: LocalStep, bias: jax.Array, first_key: jax.Array) -> jax.Array:
    bias = bias if bias.shape[2] == 1 else _rows(step, bias)
    return bias if bias.shape[3] == 1 else jax.lax.dynamic_slice_in_dim(bias, first_key, step.length, 3)


def _add_bias(step: LocalStep, total: jax.Array, first_key: jax.Array, part: jax.Array) -> jax.Array:
    row = 0 if total.shape[2] == 1 else step.rows[0]
    start = (0, 0, row, 0 if total.shape[3] == 1 else first_key)
    there = jax.lax.dynamic_slice(total, start, part.shape)
    return jax.lax.dynamic_update_slice(total, there + part.astype(total.dtype), start)


def _extras(step: LocalStep, n: int, own: _Own, words: Sequence[jax.Array], firsts: jax.Array | None) -> Arrays:
    """Of step n, in the order of the handlers."""
    bias = () if firsts is None else tuple(_of_bias(step, x, firsts[n]) for x in own.bias)
    return (*bias, *own.slopes, *(x[:, 0, :, 0] for x in words), *(own.sinks if step.sinks else ()))


def _run(call: SequenceCall, *arguments: jax.Array) -> tuple[Arrays, Kept]:
    """(o, lse), and what came."""
    own, schedule = _own(call, *arguments), call.schedule
    q, v = own.q, own.keys[1]
    shape, dtype = (*q.shape[:3], v.shape[3]), wide(q.dtype) if schedule.merges else q.dtype
    empty = jnp.zeros(shape, dtype), jnp.full(shape[:3], -jnp.inf, wide(q.dtype))
    *rows, _ = alike(*empty, q)
    came, keys, done = Kept(), own.keys, [rows[1]]
    for stage in schedule.stages:
        if schedule.sends_again and len(done) > 2:
            keys = _after(keys, done[-2])
        came |= {r: _travel(call, r, keys) for r in stage.rounds}
        if any(stage.branches):
            here = {r: came[r] for r in stage.needs}
            compute = functools.partial(_forward_steps, call)
            rows = _switch(call, stage, compute, rows, own, here, _first_keys(call, stage))
            done.append(rows[1])
    return (rows[0].astype(q.dtype), rows[1]), came


def _forward_steps(
    call: SequenceCall,
    steps: Sequence[LocalStep],
    rows: Sequence[jax.Array],
    own: _Own,
    came: Kept,
    firsts: jax.Array | None,
) -> Sequence[jax.Array]:
    o, lse = rows
    for n, step in enumerate(steps):
        first, last = step.rows
        keys, values, *words = _pieces(step, own.keys, came)
        extras = _extras(step, n, own, words, firsts)
        found = attention_call(call.of_step(step), _rows(step, own.q), keys, values, *extras)
        o, lse = _merged(step, o, lse, *(x[:, :, : last - first] for x in found))
    return [o, lse]


def _merged(step: LocalStep, o: jax.Array, lse: jax.Array, new: jax.Array, new_lse: jax.Array) -> Sequence[jax.Array]:
    """A row that has keys in one piece only gets that piece's very bits."""
    first, last = step.rows
    new = new.astype(o.dtype)
    if step.merges:
        before = lse[:, :, first:last]
        both = jnp.logaddexp(before, new_lse)
        old, share = (jnp.where(x == -jnp.inf, 0, jnp.exp(x - both))[..., None] for x in (before, new_lse))
        new, new_lse = o[:, :, first:last] * old + new * share, both
    if last - first == o.shape[2]:
        return new, new_lse
    return o.at[:, :, first:last].set(new), lse.at[:, :, first:last].set(new_lse)


# Backward


class _Sums(NamedTuple):
    """Gradients of what a device has, in fp32 at least."""

    q: jax.Array
    keys: Arrays
    bias: Arrays
    sinks: Arrays


class _Results(NamedTuple):
    o: jax.Array
    lse: jax.Array
    d_o: jax.Array
    d_lse: jax.Array


def _zeros(like: jax.Array, shape: tuple[int, ...] | None = None, dtype: Any = None) -> jax.Array:
    zeros = jnp.zeros(like.shape if shape is None else shape, dtype or wide(like.dtype))
    return alike(zeros, like)[0]


def _backward_steps(
    call: SequenceCall,
    steps: Sequence[LocalStep],
    sums: _Sums,
    back: Kept,
    own: _Own,
    came: Kept,
    results: _Results,
    firsts: jax.Array | None,
) -> tuple[_Sums, Kept]:
    """Adds what these steps give to the gradients of what is here and of what came."""
    for n, step in enumerate(steps):
        (first, last), p = step.rows, call.of_step(step)
        keys, values, *words = _pieces(step, own.keys, came)
        o, lse, d_o, d_lse = (_rows(step, x, -jnp.inf if x is results.lse else 0.0) for x in results)
        extras = _extras(step, n, own, words, firsts)
        d_q, d_k, d_v, *learned = attention_gradients(p, _rows(step, own.q), keys, values, o, lse, d_o, d_lse, *extras)
        d_keys, of_keys = (d_k, d_v), sums.keys
        if step.own:
            mine, (begin, end) = step.own
            parts = (x[:, :, begin:end] for x in d_keys)
            of_keys = tuple(_add(total, (mine,), x) for total, x in zip(of_keys, parts, strict=True))
        for part in step.parts:
            parts = (_take(x, part.keys) for x in d_keys)
            given = tuple(_add(total, part.rows, x) for total, x in zip(back[part.round], parts, strict=True))
            back = {**back, part.round: given}
        of_bias, of_sinks = sums.bias, sums.sinks
        if firsts is not None:
            of_bias = (_add_bias(step, of_bias[0], firsts[n], learned[0]),)
        if "z" in p.extras:
            of_sinks = (of_sinks[0] + learned[-1],)
        sums = _Sums(_add(sums.q, (step.rows,), d_q[:, :, : last - first]), of_keys, of_bias, of_sinks)
    return sums, back


def _gradients(call: SequenceCall, arguments: Arrays, came: Kept, results: _Results) -> _Sums:
    own, schedule = _own(call, *arguments), call.schedule
    k_and_v, keys = own.keys[:2], own.keys
    sums = _Sums(_zeros(own.q), *(tuple(map(_zeros, arrays)) for arrays in (k_and_v, own.bias, own.sinks)))
    others = tuple(map(_zeros, k_and_v))  # apart, so that no stage waits for what returns
    back, done = Kept(), [sums.q]
    last = {r: n for n, stage in enumerate(schedule.stages) for r in stage.needs}
    for n, stage in enumerate(schedule.stages):
        if schedule.sends_again:
            # At first after something of the gradient's own, or XLA would keep the keys of the forward pass.
            keys = _after(keys, done[-2] if len(done) > 2 else results.d_o)
            came = came | {r: _travel(call, r, keys) for r in stage.rounds}
        if not any(stage.branches):
            continue
        here = {r: came[r] for r in stage.needs}
        new = [r for r in stage.needs if r not in back]
        back |= {r: tuple(_zeros(x, dtype=x.dtype) for x in came[r][:2]) for r in new}
        asked = {r: back[r] for r in stage.needs}
        compute = functools.partial(_backward_steps, call)
        sums, given = _switch(call, stage, compute, sums, asked, own, here, results, _first_keys(call, stage))
        done.append(sums.q)
        back |= given
        for r in stage.needs:
            if last[r] == n:
                others = _travel_back(call, r, back.pop(r), others)
    of_keys = tuple(mine + other for mine, other in zip(sums.keys, others, strict=True)) if back or last else sums.keys
    return sums._replace(keys=of_keys)


@functools.partial(differentiable, static=1)
def sequence_attention(call: SequenceCall, *arguments: jax.Array) -> Arrays:
    """(o, lse) of this device's rows, of q, k, v and the extras."""
    return _run(call, *arguments)[0]


def _forward(call: SequenceCall, *arguments: jax.Array) -> tuple[Arrays, Any]:
    results, came = _run(call, *arguments)
    return results, (arguments, Kept() if call.schedule.sends_again else came, results)


def _backward(call: SequenceCall, saved: Any, d: Sequence[jax.Array]) -> tuple[jax.Array | None, ...]:
    arguments, came, results = saved
    sums = _gradients(call, arguments, came, _Results(*results, *d))
    q, k, v = (x.astype(like.dtype) for x, like in zip((sums.q, *sums.keys), arguments, strict=False))
    learned = {"b": sums.bias, "z": sums.sinks}
    of_extras = zip(call.options.extras, arguments[3:], strict=True)
    return q, k, v, *(learned[kind][0].astype(x.dtype) if kind in learned else None for kind, x in of_extras)


sequence_attention.defvjp(_forward, _backward)
