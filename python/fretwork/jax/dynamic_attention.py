"""Attention over keys known only on the device, on JAX arrays: key blocks, blocks selected by each query, documents."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.typing import ArrayLike

from fretwork import _shapes
from fretwork._checks import fail, flag, number, whole_number
from fretwork.jax._handlers import (
    array,
    default_precision,
    differentiable,
    differentiated_once,
    fold,
    foreign,
    one_by_one,
    operand,
)
from fretwork.jax._partition import Axis, dims_of_extras, partitioned
from fretwork.patterns import Pattern

__all__ = ["BlockLists", "select_blocks", "selected_attention", "varlen_attention"]

# What names the keys, and how many arrays of it follow q, k and v.
_FORMS = {"mask": 1, "lists": 2, "selected": 1, "documents": 2}


class BlockLists(NamedTuple):
    """Which key blocks each query block takes, int32: `counts` (B|1, H|1, R) and `indices` (B|1, H|1, R, N), of which
    those from the count on and those outside the range of blocks are ignored. As `fretwork.BlockLists`, and a tree.

    >>> lists = BlockLists(jnp.array([[[1, 2]]]), jnp.array([[[[0, -1], [0, 1]]]]))
    >>> jax.jit(lambda lists: lists.counts.sum())(lists)
    Array(3, dtype=int32)
    """

    counts: jax.Array
    indices: jax.Array


class _Dynamic(NamedTuple):
    """What attention is, besides q, k, v, the keys and the extras that follow them."""

    keys: str  # of `_FORMS`
    pattern: str  # its text, or nothing
    sizes: tuple[int, ...]  # block rows, block columns, causal, left, right, max_q, max_k; −1: none
    scale: float
    precision: str
    softcap: float = 0.0
    dropout_p: float = 0.0
    extras: str = ""  # of bias, slopes and dropout's seed: b, s, d

    def options(self) -> dict[str, Any]:
        texts = {"keys": self.keys, "pattern": self.pattern, "precision": self.precision, "extras": self.extras}
        numbers = {"scale": self.scale, "softcap": self.softcap, "dropout_p": self.dropout_p}
        sizes = np.array(self.sizes, np.int64)
        return {**texts, "sizes": sizes, **{name: np.float64(number) for name, number in numbers.items()}}

    def axes(self, arguments: Sequence[jax.Array], count: int) -> list[Axis]:
        """Batch and heads, of the forward call or of the gradients: keys and extras follow after `count` operands.
        Documents share one batch, and are whole on every device."""
        if "d" in self.extras:  # dropped elements are counted from the first of a call
            return []
        extras = arguments[count + _FORMS[self.keys] :]
        axes = []
        for dim, size in enumerate(arguments[0].shape[:2]):
            of_keys = [None if self.keys == "documents" else dim] * _FORMS[self.keys]
            of_extras = dims_of_extras(self.extras, extras, dim, size)
            results = [dim] * 2 if count == 3 else [dim] * 3 + of_extras[: self.extras.startswith("b")]
            axes.append(Axis([dim] * count + of_keys + of_extras, results))
        return axes


def _fold_keys(form: str, x: jax.Array, batched: bool, size: int, batch: int) -> jax.Array:
    """Lists of one element or of each; blocks that all elements share stay as they are."""
    if form != "selected" and not batched and x.shape[0] == 1:
        return x
    many = x if batched else x[None]
    return jnp.broadcast_to(many, (size, batch, *many.shape[2:])).reshape(size * batch, *many.shape[2:])


def _batched_call(
    p: _Dynamic, call: Callable[..., Sequence[jax.Array]], count: int, operands: int
) -> Callable[..., Sequence[jax.Array]]:
    """`call`, which gives `count` results of so many operands, the keys and the extras, under vmap too: into the batch
    where it can be."""

    @custom_vmap
    def with_rule(*arguments: jax.Array) -> Sequence[jax.Array]:
        return partitioned(call, p.axes(arguments, operands), arguments)

    @with_rule.def_vmap
    def _(size: int, batched: list[bool], *arguments: jax.Array) -> tuple[Sequence[jax.Array], list[bool]]:
        again = _batched_call(p, call, count, operands)
        if p.keys == "documents" or p.extras:
            return one_by_one(again, batched, arguments), [True] * count
        batch = arguments[0].shape[1 if batched[0] else 0]
        folded = [fold(x, many, size) for x, many in zip(arguments[:operands], batched, strict=False)]
        keys = zip(arguments[operands:], batched[operands:], strict=True)
        folded += [_fold_keys(p.keys, x, many, size, batch) for x, many in keys]
        return [x.reshape(size, batch, *x.shape[1:]) for x in again(*folded)], [True] * count

    return with_rule


def _attention_call(p: _Dynamic, *arguments: jax.Array) -> Sequence[jax.Array]:
    """o and lse of q, k, v, the keys and the extras."""

    def call(*arguments: jax.Array) -> Sequence[jax.Array]:
        q, _, v = arguments[:3]
        wide = jnp.promote_types(q.dtype, jnp.float32)
        results = [
            jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype),
            jax.ShapeDtypeStruct(q.shape[:3], wide),
        ]
        return foreign("dynamic_attention", results, *arguments, **p.options())

    return _batched_call(p, call, 2, 3)(*arguments)


def _gradient_call(p: _Dynamic, *arguments: jax.Array) -> Sequence[jax.Array]:
    """The gradients of q, k, v and bias, of q, k, v, o, lse, d_o, d_lse, the keys and the extras."""
    like = 3 + p.extras.startswith("b")

    def call(*arguments: jax.Array) -> Sequence[jax.Array]:
        learned = [*arguments[:3], *arguments[7 + _FORMS[p.keys] :][: like - 3]]
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in learned]
        return foreign("dynamic_attention_backward", results, *arguments, **p.options())

    instead = "apply jax.nn.softmax to scores with -inf where a key is not seen"
    return differentiated_once("attention", _batched_call(p, call, like, 7), instead)(*arguments)


@functools.partial(differentiable, static=1)
def _attention(p: _Dynamic, *arguments: jax.Array) -> Sequence[jax.Array]:
    return _attention_call(p, *arguments)


def _attention_forward(p: _Dynamic, *arguments: jax.Array) -> tuple[Sequence[jax.Array], tuple[jax.Array, ...]]:
    results = _attention(p, *arguments)
    return results, (*arguments, *results)


def _attention_backward(
    p: _Dynamic, saved: tuple[jax.Array, ...], d: Sequence[jax.Array]
) -> tuple[jax.Array | None, ...]:
    q, k, v, *rest, o, lse = saved
    gradients = _gradient_call(p, q, k, v, o, lse, *d, *rest)
    of_rest: list[jax.Array | None] = [None] * len(rest)
    if len(gradients) > 3:
        of_rest[_FORMS[p.keys]] = gradients[3]
    return *gradients[:3], *of_rest


_attention.defvjp(_attention_forward, _attention_backward)


def _with_sinks(
    o: jax.Array, lse: jax.Array, sinks: jax.Array, rows: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The results after one more score for each query of head h, `sinks[h]`, whose value is zero.

    Heads are the dimension before the rows of lse; `rows`, if given, says which of them take part.
    """
    scores = jnp.broadcast_to(sinks.astype(lse.dtype)[:, None], lse.shape)
    none = (lse == -jnp.inf) & (scores == -jnp.inf)  # without any score there is nothing, and no gradient
    if rows is not None:
        none = none | ~rows
    own, scores = jnp.where(none, 0, lse), jnp.where(none, 0, scores)
    both = jnp.logaddexp(own, scores)
    share = jnp.where(none, 0, jnp.exp(own - both))
    return (o * share[..., None]).astype(o.dtype), jnp.where(none, -jnp.inf, both)


class BlockCall(NamedTuple):
    """The static part of `fretwork.jax.attention` with blocks."""

    patterns: tuple[Pattern, ...]
    lists: bool
    sides: tuple[int, int]
    scale: float | None
    softcap: float
    dropout_p: float
    precision: str | None


def _hide_padding(
    q: jax.Array, k: jax.Array, v: jax.Array, padding: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Padding as a bias of −inf, on keys and values without it: a GPU's kernels have no other way with blocks."""
    k, v = (jnp.where(padding[:, None, :, None], 0, x) for x in (k, v))
    hidden = jnp.where(padding, -jnp.inf, 0.0)[:, None, None].astype(jnp.float32 if bias is None else bias.dtype)
    return k, v, hidden if bias is None else bias + hidden


@functools.partial(jax.jit, static_argnums=0)
def block_attention(
    call: BlockCall,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    blocks: tuple[jax.Array, ...],
    extras: dict[str, jax.Array],
) -> Sequence[jax.Array]:
    """`fretwork.jax.attention` with blocks; `extras` as there."""
    op = "attention"
    operands = [operand(name, x) for name, x in zip("qkv", (q, k, v), strict=True)]
    _, _, rows, cols = _shapes.check_qkv(op, operands)
    _shapes.check_one_pattern(op, [p.text for p in call.patterns])
    if call.patterns:
        intervals = _shapes.has_interval_rows(call.patterns[0].key)
        _shapes.check_block_pattern(op, call.patterns[0], rows, cols, intervals)
    known = [operand(name, x) for name, x in extras.items() if name != "dropout"]
    whole = (_shapes.every_key(op, q.shape, k.shape),)
    _shapes.check_attention(operands, call.patterns or whole, known, call.scale, call.softcap, call.dropout_p)
    _shapes.check_blocks(op, operands[0], operands[1], operand("blocks", blocks[-1]), call.lists, call.sides)
    if call.lists:
        _check_counts(op, *blocks)
    bias, given = extras.get("bias"), []
    if "key_padding_mask" in extras:
        k, v, bias = _hide_padding(q, k, v, extras["key_padding_mask"], bias)
    if bias is not None:
        given.append(("b", bias.reshape((1,) * (4 - bias.ndim) + bias.shape)))
    if "slopes" in extras:
        given.append(("s", extras["slopes"].astype(jnp.promote_types(q.dtype, jnp.float32))))
    if "dropout" in extras:
        given.append(("d", extras["dropout"]))
    p = _Dynamic(
        "lists" if call.lists else "mask",
        call.patterns[0].text if call.patterns else "",
        (*call.sides, 0, -1, -1, -1, -1),
        float(q.shape[-1] ** -0.5) if call.scale is None else call.scale,
        call.precision or default_precision(),
        call.softcap,
        call.dropout_p if call.dropout_p < 1 else 0.0,
        "".join(letter for letter, _ in given),
    )
    o, lse = _attention(p, q, k, v, *blocks, *(x for _, x in given))
    if "sinks" in extras:
        o, lse = _with_sinks(o, lse, extras["sinks"])
    return o if call.dropout_p < 1 else jnp.where(False, o, 0), lse


def _check_counts(op: str, counts: jax.Array, indices: jax.Array) -> None:
    if counts.dtype != jnp.int32:
        fail(op, "blocks", "int32 counts", counts.dtype.name)
    if counts.shape != indices.shape[:3]:
        fail(op, "blocks", f"counts {indices.shape[:3]}, as indices have them", counts.shape)


def given_blocks(op: str, blocks: Any) -> tuple[jax.Array, ...]:
    """A mask, or counts and indices."""
    if isinstance(blocks, BlockLists):
        return array(op, "blocks", blocks.counts), array(op, "blocks", blocks.indices)
    return (array(op, "blocks", blocks),)


def select_blocks(
    q: ArrayLike,
    k: ArrayLike,
    top_k: int,
    block: int | tuple[int, int] = 128,
    causal: bool = True,
    first: int = 1,
    last: int = 1,
) -> BlockLists:
    """The `top_k` key blocks with the best scores for each query block; arguments as `fretwork.select_blocks` has them.

    The result is for `fretwork.jax.attention(blocks=)`. It has no gradient.

    >>> q = k = jnp.ones((1, 2, 100, 16))
    >>> lists = select_blocks(q, k, 2, block=32)
    >>> lists.counts.tolist()[0][0], lists.indices.tolist()[0][0]
    ([1, 2, 2, 2], [[0, -1], [0, 1], [0, 2], [0, 3]])
    """
    op = "select_blocks"
    top_k, first, last = (whole_number(op, name, n) for name, n in (("top_k", top_k), ("first", first), ("last", last)))
    numbers = (top_k, _shapes.check_sides(op, block), flag(op, "causal", causal), first, last)
    without_gradient = (jax.lax.stop_gradient(array(op, name, x)) for name, x in (("q", q), ("k", k)))
    return BlockLists(*_select(numbers, *without_gradient))


@functools.partial(jax.jit, static_argnums=0)
def _select(
    numbers: tuple[int, tuple[int, int], bool, int, int], q: jax.Array, k: jax.Array
) -> tuple[jax.Array, jax.Array]:
    top_k, sides, causal, first, last = numbers
    options = dict(causal=causal, first=np.int64(first), last=np.int64(last))
    options |= dict(block_q=np.int64(sides[0]), block_k=np.int64(sides[1]))

    def on_part(q: jax.Array, k: jax.Array) -> Sequence[jax.Array]:
        shape = _shapes.check_select_blocks(operand("q", q), operand("k", k), top_k, sides, first, last)
        results = [jax.ShapeDtypeStruct(s, jnp.int32) for s in (shape, (*shape, top_k))]
        return foreign("select_blocks", results, q, k, **options)  # type: ignore[no-any-return]

    @custom_vmap
    def call(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        dims = (0, 1) if k.ndim == 4 and k.shape[1] > 1 else (0,)  # one head of keys has scores of all query heads
        counts, indices = partitioned(on_part, [Axis([dim] * 2, [dim] * 2) for dim in dims], (q, k))
        return counts, indices

    @call.def_vmap
    def _(size: int, batched: list[bool], q: jax.Array, k: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[bool, ...]]:
        batch = q.shape[1 if batched[0] else 0]
        found = _select(numbers, *(fold(x, many, size) for x, many in zip((q, k), batched, strict=True)))
        return tuple(x.reshape(size, batch, *x.shape[1:]) for x in found), (True, True)

    return call(q, k)  # type: ignore[no-any-return]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _selected(
    side: int,
    causal: bool,
    scale: float | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    indices: jax.Array,
    sinks: jax.Array | None,
) -> Sequence[jax.Array]:
    op = "selected_attention"
    operands = [operand(name, x) for name, x in zip("qkv", (q, k, v), strict=True)]
    _shapes.check_selected(op, operands, operand("indices", indices))
    p = _Dynamic("selected", "", (1, side, int(causal), -1, -1, -1, -1), _scale(q, scale), default_precision())
    o, lse = _attention(p, q, k, v, indices)
    if sinks is None:
        return o, lse
    _shapes.check_sinks(op, operand("sinks", sinks), operands[0])
    return _with_sinks(o, lse, sinks)


def _scale(q: jax.Array, scale: float | None) -> float:
    return float(q.shape[-1] ** -0.5) if scale is None else scale


@overload
def selected_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    indices: ArrayLike,
    block: int = 64,
    causal: bool = True,
    scale: float | None = None,
    sinks: ArrayLike | None = None,
    return_lse: Literal[False] = False,
) -> jax.Array: ...


@overload
def selected_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    indices: ArrayLike,
    block: int = 64,
    causal: bool = True,
    scale: float | None = None,
    sinks: ArrayLike | None = None,
    *,
    return_lse: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...


def selected_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    indices: ArrayLike,
    block: int = 64,
    causal: bool = True,
    scale: float | None = None,
    sinks: ArrayLike | None = None,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention in which each query sees the key blocks that it selected; arguments as `fretwork.selected_attention`.

    >>> q = k = v = jnp.ones((1, 2, 100, 16))
    >>> indices = jnp.zeros((1, 2, 100, 1), jnp.int32)
    >>> selected_attention(q, k, v, indices, block=32).shape
    (1, 2, 100, 16)
    """
    op = "selected_attention"
    side, causal = _shapes.check_side(op, block), flag(op, "causal", causal)
    arrays = [array(op, n, x) for n, x in {"q": q, "k": k, "v": v, "indices": indices}.items()]
    learned = None if sinks is None else array(op, "sinks", sinks)
    o, lse = _selected(side, causal, _finite(op, scale), *arrays, learned)
    return (o, lse) if return_lse else o


def _finite(op: str, scale: float | None) -> float | None:
    found = None if scale is None else number(op, "scale", scale)
    if found is not None and not np.isfinite(found):
        fail(op, "scale", "a finite number", found)
    return found


def _starts_of(segment_ids: jax.Array, most: int | None) -> jax.Array:
    """Where runs of equal ids begin, each row on its own: room for `most` in a row, or for one in each place, and their
    end."""
    ids = segment_ids if segment_ids.ndim == 2 else segment_ids[None]
    begins = jnp.concatenate([jnp.ones((ids.shape[0], min(ids.shape[1], 1)), bool), ids[:, 1:] != ids[:, :-1]], 1)
    total = ids.size
    room = total if most is None else min(most * ids.shape[0], total)
    return jnp.nonzero(begins.ravel(), size=room + 1, fill_value=total)[0].astype(jnp.int32)


def _narrow(cu: Any) -> Any:
    """Starts in 32 bits; others than they hold are out of range anyway. JAX itself would wrap an array of NumPy's."""
    if not isinstance(cu, (jax.Array, np.ndarray)) or cu.dtype != np.int64:
        return cu
    return cu.clip(-(2**31), 2**31 - 1).astype(np.int32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _varlen(
    sizes: tuple[int, ...],
    scale: float | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cu_q: jax.Array,
    cu_k: jax.Array | None,
    sinks: jax.Array | None,
) -> Sequence[jax.Array]:
    op = "varlen_attention"
    operands = [operand(name, x) for name, x in zip("qkv", (q, k, v), strict=True)]
    _shapes.check_packed(op, operands)
    _shapes.check_starts(op, operand("cu_q", cu_q))
    if cu_k is not None:
        _shapes.check_starts(op, operand("cu_k", cu_k), operand("cu_q", cu_q))
    starts = [_narrow(x) for x in (cu_q, cu_q if cu_k is None else cu_k)]
    p = _Dynamic("documents", "", sizes, _scale(q, scale), default_precision())
    o, lse = _attention(p, *(x.swapaxes(0, 1)[None] for x in (q, k, v)), *starts)
    if sinks is not None:
        heads_first = operands[0]._replace(shape=(1, q.shape[1], q.shape[0], q.shape[2]))
        _shapes.check_sinks(op, operand("sinks", sinks), heads_first)
        row = jnp.arange(q.shape[0])
        o, lse = _with_sinks(o, lse, sinks, (row >= starts[0][0]) & (row < starts[0][-1]))
    return o[0].swapaxes(0, 1), lse[0]


@overload
def varlen_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_q: ArrayLike | None = None,
    cu_k: ArrayLike | None = None,
    max_q: int | None = None,
    max_k: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    scale: float | None = None,
    sinks: ArrayLike | None = None,
    return_lse: Literal[False] = False,
    *,
    segment_ids: ArrayLike | None = None,
    max_segments: int | None = None,
) -> jax.Array: ...


@overload
def varlen_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_q: ArrayLike | None = None,
    cu_k: ArrayLike | None = None,
    max_q: int | None = None,
    max_k: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    scale: float | None = None,
    sinks: ArrayLike | None = None,
    *,
    return_lse: Literal[True],
    segment_ids: ArrayLike | None = None,
    max_segments: int | None = None,
) -> tuple[jax.Array, jax.Array]: ...


def varlen_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    cu_q: ArrayLike | None = None,
    cu_k: ArrayLike | None = None,
    max_q: int | None = None,
    max_k: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    scale: float | None = None,
    sinks: ArrayLike | None = None,
    return_lse: bool = False,
    *,
    segment_ids: ArrayLike | None = None,
    max_segments: int | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention inside documents that lie side by side; arguments as `fretwork.varlen_attention` has them.

    q is (T, Hq, D), k (T, Hk, D), v (T, Hk, Dv). In the place of `cu_q` there may be `segment_ids` (T,), of which each
    run of equal ones is a document; with (B, S) q, k and v are (B, S, heads, head dim), as are the results, and no
    document reaches into another row. The length of `cu_q` is part of the program, its contents are not. `max_segments`
    is how many documents a row of `segment_ids` has at most: without it a program has room for one in each place, and
    takes the tiles of short documents. If all rows together have more than it has room for, the last are zeros with lse
    −inf.

    >>> q = k = v = jnp.ones((100, 2, 16))
    >>> o = varlen_attention(q, k, v, jnp.array([0, 30, 100]), causal=True)
    >>> ids = jnp.arange(100) >= 30
    >>> bool(jnp.allclose(o, varlen_attention(q, k, v, segment_ids=ids, causal=True)))
    True
    """
    op = "varlen_attention"
    arrays = [array(op, name, x) for name, x in zip("qkv", (q, k, v), strict=True)]
    bounds = (
        *_shapes.check_window(op, window),
        *(_shapes.check_bound(op, name, x) for name, x in (("max_q", max_q), ("max_k", max_k))),
    )
    sizes = (1, 1, int(flag(op, "causal", causal)), *bounds)
    learned = None if sinks is None else array(op, "sinks", sinks)
    rows: tuple[int, ...] = ()
    most = _shapes.check_bound(op, "max_segments", max_segments)
    if most == 0:
        fail(op, "max_segments", "1 or more", most)
    if segment_ids is None:
        if max_segments is not None:
            fail(op, "max_segments", "segment_ids with it", "none")
        if cu_q is None:
            fail(op, "cu_q", "cu_q or segment_ids", "none", TypeError)
        starts = [array(op, "cu_q", _narrow(cu_q)), None if cu_k is None else array(op, "cu_k", _narrow(cu_k))]
    else:
        if cu_q is not None or cu_k is not None:
            fail(op, "segment_ids", "either them or cu_q and cu_k", "both")
        ids = array(op, "segment_ids", segment_ids)
        rows = _check_segments(op, ids, arrays)
        arrays = [x.reshape(-1, *x.shape[-2:]) for x in arrays]
        starts = [_starts_of(ids, None if most < 0 else most), None]
    o, lse = _varlen(sizes, _finite(op, scale), *arrays, *starts, learned)
    if len(rows) == 2:
        o, lse = o.reshape(*rows, *o.shape[1:]), lse.reshape(lse.shape[0], *rows).swapaxes(0, 1)
    return (o, lse) if return_lse else o


def _check_segments(op: str, ids: jax.Array, arrays: Sequence[jax.Array]) -> tuple[int, ...]:
    if ids.ndim not in (1, 2) or jnp.issubdtype(ids.dtype, jnp.inexact):
        fail(op, "segment_ids", "integers of one or two dimensions", f"{ids.dtype.name} {ids.shape}")
    for name, x in zip("qkv", arrays, strict=True):
        if x.ndim != ids.ndim + 2 or x.shape[: ids.ndim] != ids.shape:
            fail(op, name, f"{ids.ndim + 2} dimensions, the first as segment_ids' {ids.shape}", x.shape)
    return ids.shape
