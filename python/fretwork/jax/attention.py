"""Attention over regular patterns on JAX arrays."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.typing import ArrayLike

from fretwork import _shapes
from fretwork._checks import fail, number
from fretwork.jax._handlers import (
    array,
    check_precision,
    default_precision,
    differentiable,
    differentiated_once,
    fold,
    foreign,
    one_by_one,
    operand,
)
from fretwork.jax._partition import Axis, dims_of_extras, partitioned
from fretwork.jax.dynamic_attention import BlockCall, BlockLists, block_attention, given_blocks
from fretwork.patterns import Pattern

Patterns = Pattern | Sequence[Pattern] | Sequence[Sequence[Pattern]]


# What may follow q, k and v, in this order, as the handlers name it: bias has 4 dimensions, dropout is a seed.
EXTRAS = {"bias": "b", "slopes": "s", "dropout": "d", "key_padding_mask": "k", "sinks": "z"}


class AttentionCall(NamedTuple):
    """What attention is, besides q, k, v and the extras that follow them."""

    patterns: tuple[Pattern, ...]
    scale: float
    softcap: float
    dropout_p: float
    precision: str
    extras: str  # which of `EXTRAS` there are, by their letters

    def options(self) -> dict[str, Any]:
        numbers = {"scale": self.scale, "softcap": self.softcap, "dropout_p": self.dropout_p}
        return {
            "patterns": "\n".join(p.text for p in self.patterns),
            "precision": self.precision,
            "extras": self.extras,
            **{name: np.float64(number) for name, number in numbers.items()},
        }

    def axes(self, arguments: Sequence[jax.Array], count: int) -> list[Axis]:
        """Batch and heads, of the forward call or of the gradients: the extras follow after `count` operands."""
        if "d" in self.extras:  # dropped elements are counted from the first of a call
            return []
        batch, heads = arguments[0].shape[:2]
        axes = []
        for dim, size in enumerate((batch, heads)):
            if len(self.patterns) > 1 and (dim == 1 or len(self.patterns) != heads):
                continue
            of_extras = dims_of_extras(self.extras, arguments[count:], dim, size)
            learned = [d for kind, d in zip(self.extras, of_extras, strict=True) if kind in "bz"]
            results = [dim] * 2 if count == 3 else [dim] * 3 + learned
            axes.append(Axis([dim] * count + of_extras, results))
        return axes

    def alone(self, batched: Sequence[bool], heads: int) -> bool:
        """Whether the elements of a vmap have something of their own that a batch shares; the extras come last."""
        own = dict(zip(self.extras, batched[len(batched) - len(self.extras) :], strict=True))
        return "d" in own or own.get("s", False) or own.get("z", False) or len(self.patterns) not in (1, heads)


def wide(dtype: Any) -> Any:
    """Of lse."""
    return jnp.promote_types(dtype, jnp.float32)


def _fold_bias(bias: jax.Array, batched: bool, size: int, batch: int) -> jax.Array:
    many = bias if batched else bias[None]
    return jnp.broadcast_to(many, (size, batch, *many.shape[2:])).reshape(size * batch, *many.shape[2:])


def attention_call(p: AttentionCall, *arguments: jax.Array) -> Sequence[jax.Array]:
    """o and lse of q, k, v and the extras."""

    def on_part(*arguments: jax.Array) -> Sequence[jax.Array]:
        q, _, v = arguments[:3]
        results = [
            jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), q.dtype),
            jax.ShapeDtypeStruct(q.shape[:3], wide(q.dtype)),
        ]
        return foreign("attention", results, *arguments, **p.options())

    @custom_vmap
    def call(*arguments: jax.Array) -> Sequence[jax.Array]:
        return partitioned(on_part, p.axes(arguments, 3), arguments)

    @call.def_vmap
    def _(size: int, batched: list[bool], *arguments: jax.Array) -> tuple[Sequence[jax.Array], list[bool]]:
        if p.alone(batched, arguments[0].shape[-3]):
            return one_by_one(functools.partial(attention_call, p), batched, arguments), [True, True]
        batch = arguments[0].shape[1 if batched[0] else 0]
        folded = [fold(x, many, size) for x, many in zip(arguments[:3], batched, strict=False)]
        for kind, many, x in zip(p.extras, batched[3:], arguments[3:], strict=True):
            same = kind in "sz" or (kind == "b" and not many and x.shape[0] == 1)
            folded.append(x if same else _fold_bias(x, many, size, batch))
        return [x.reshape(size, batch, *x.shape[1:]) for x in attention_call(p, *folded)], [True, True]

    return call(*arguments)


def attention_gradients(p: AttentionCall, *arguments: jax.Array) -> Sequence[jax.Array]:
    """The gradients of q, k, v, bias and sinks, of q, k, v, o, lse, d_o, d_lse and the extras."""

    def on_part(*arguments: jax.Array) -> Sequence[jax.Array]:
        learned = [x for kind, x in zip(p.extras, arguments[7:], strict=True) if kind in "bz"]
        like = [*arguments[:3], *learned]
        results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like]
        return foreign("attention_backward", results, *arguments, **p.options())

    @custom_vmap
    def call(*arguments: jax.Array) -> Sequence[jax.Array]:
        return partitioned(on_part, p.axes(arguments, 7), arguments)

    @call.def_vmap
    def _(size: int, batched: list[bool], *arguments: jax.Array) -> tuple[Sequence[jax.Array], list[bool]]:
        count = 3 + len(set(p.extras) & set("bz"))
        # The elements of a batch would add up their gradients of sinks.
        if "z" in p.extras or p.alone(batched, arguments[0].shape[-3]):
            return one_by_one(functools.partial(attention_gradients, p), batched, arguments), [True] * count
        batch = arguments[0].shape[1 if batched[0] else 0]
        folded = [fold(x, many, size) for x, many in zip(arguments[:7], batched, strict=False)]
        for kind, many, x in zip(p.extras, batched[7:], arguments[7:], strict=True):
            folded.append(x if kind == "s" else _fold_bias(x, many, size, batch))
        found = [x.reshape(size, batch, *x.shape[1:]) for x in attention_gradients(p, *folded)]
        if count == 4 and arguments[7].shape[1 if batched[7] else 0] != batch:
            found[3] = found[3].sum(axis=1, keepdims=True)
        return found, [True] * count

    instead = "apply jax.nn.softmax to scores with -inf where pattern.numpy_mask() is False"
    return differentiated_once("attention", call, instead)(*arguments)


@functools.partial(differentiable, static=1)
def _attention(p: AttentionCall, *arguments: jax.Array) -> Sequence[jax.Array]:
    return attention_call(p, *arguments)


def _attention_forward(p: AttentionCall, *arguments: jax.Array) -> tuple[Sequence[jax.Array], tuple[jax.Array, ...]]:
    results = _attention(p, *arguments)
    return results, (*arguments, *results)


def _attention_backward(
    p: AttentionCall, saved: tuple[jax.Array, ...], d: Sequence[jax.Array]
) -> tuple[jax.Array | None, ...]:
    q, k, v, *extras, o, lse = saved
    gradients = attention_gradients(p, q, k, v, o, lse, *d, *extras)
    found = iter(gradients[3:])
    return *gradients[:3], *(next(found) if kind in "bz" else None for kind in p.extras)


_attention.defvjp(_attention_forward, _attention_backward)


class alibi:
    """A bias of −slope · |p − j| for each head, as `fretwork.alibi`; slopes count as constants.

    >>> alibi(jnp.ones(4)).slopes.shape
    (4,)
    """

    __slots__ = ("slopes",)
    slopes: jax.Array

    def __init__(self, slopes: ArrayLike) -> None:
        self.slopes = array("alibi", "slopes", slopes)
        if jnp.issubdtype(self.slopes.dtype, jnp.complexfloating) or self.slopes.dtype == bool:
            raise TypeError(f"alibi: slopes: expected real numbers, got {self.slopes.dtype.name}")
        if self.slopes.ndim != 1:
            raise ValueError(f"alibi: slopes: expected (Hq,), one for each query head, got {self.slopes.shape}")

    def __repr__(self) -> str:
        return f"alibi({self.slopes!r})"


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _checked_attention(
    patterns: tuple[Pattern, ...],
    scale: float | None,
    softcap: float,
    dropout_p: float,
    precision: str | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    extras: dict[str, jax.Array],
) -> Sequence[jax.Array]:
    known = [operand(name, extras[name]) for name in EXTRAS if name in extras and name != "dropout"]
    operands = [operand(name, x) for name, x in zip("qkv", (q, k, v), strict=True)]
    _shapes.check_attention(operands, patterns, known, scale, softcap, dropout_p)
    ordered = {name: extras[name] for name in EXTRAS if name in extras}
    if "slopes" in ordered:
        ordered["slopes"] = ordered["slopes"].astype(wide(q.dtype))
    if "bias" in ordered:
        bias = ordered["bias"]
        ordered["bias"] = bias.reshape((1,) * (4 - bias.ndim) + bias.shape)
    p = AttentionCall(
        patterns,
        float(q.shape[-1] ** -0.5) if scale is None else scale,
        softcap,
        dropout_p if dropout_p < 1 else 0.0,
        precision or default_precision(),
        "".join(EXTRAS[name] for name in ordered),
    )
    o, lse = _attention(p, q, k, v, *ordered.values())
    return o if dropout_p < 1 else jnp.where(False, o, 0), lse


@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    pattern: Patterns | None = None,
    scale: float | None = None,
    bias: ArrayLike | alibi | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    return_lse: Literal[False] = False,
    *,
    dropout_key: jax.Array | None = None,
    key_padding_mask: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    precision: str | None = None,
    blocks: ArrayLike | BlockLists | None = None,
    block: int | tuple[int, int] = 128,
) -> jax.Array: ...


@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    pattern: Patterns | None = None,
    scale: float | None = None,
    bias: ArrayLike | alibi | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    *,
    return_lse: Literal[True],
    dropout_key: jax.Array | None = None,
    key_padding_mask: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    precision: str | None = None,
    blocks: ArrayLike | BlockLists | None = None,
    block: int | tuple[int, int] = 128,
) -> tuple[jax.Array, jax.Array]: ...


@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    pattern: Patterns | None = None,
    scale: float | None = None,
    bias: ArrayLike | alibi | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    *,
    dropout_key: jax.Array | None = None,
    key_padding_mask: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    precision: str | None = None,
    blocks: ArrayLike | BlockLists | None = None,
    block: int | tuple[int, int] = 128,
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    pattern: Patterns | None = None,
    scale: float | None = None,
    bias: ArrayLike | alibi | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    *,
    dropout_key: jax.Array | None = None,
    key_padding_mask: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    precision: str | None = None,
    blocks: ArrayLike | BlockLists | None = None,
    block: int | tuple[int, int] = 128,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention in which a query sees the keys that `pattern` holds; arguments as `fretwork.attention` has them.

    q is (B, Hq, Sq, D), k (B, Hk, Sk, D), v (B, Hk, Sk, Dv), Hq a multiple of Hk. `bias` broadcasts to (B, Hq, Sq, Sk)
    or is `alibi(slopes)`. Keys where `key_padding_mask` (B, Sk) is True are not seen. `sinks` (Hq,) are scores that
    join the sum of each query of a head. Dropout takes a key of `jax.random`. With `return_lse` the result is (o, lse).
    `blocks` are key blocks known only on the device, a bool array or `fretwork.jax.BlockLists`, of the sides `block`.

    >>> import fretwork as fw
    >>> q = k = v = jnp.ones((1, 2, 50, 16))
    >>> attention(q, k, v, fw.Pattern.parse("strided(50, 8)")).shape
    (1, 2, 50, 16)
    >>> blocks = jnp.eye(4, dtype=bool)[None, None]
    >>> attention(q, k, v, fw.patterns.causal(50), blocks=blocks, block=16).shape
    (1, 2, 50, 16)
    """
    op = "attention"
    check_precision(op, precision)
    extras: dict[str, jax.Array] = {}
    if isinstance(bias, alibi):
        extras["slopes"] = bias.slopes
    elif bias is not None:
        extras["bias"] = array(op, "bias", bias)
    rate = number(op, "dropout_p", dropout_p)
    if not 0 <= rate <= 1:
        fail(op, "dropout_p", "0 to 1", dropout_p)
    if 0 < rate < 1:
        if dropout_key is None:
            fail(op, "dropout_key", "a key of jax.random where there is dropout", None)
        extras["dropout"] = jax.random.bits(dropout_key, (2,), jnp.uint32)  # the 64 bits of a seed
    if key_padding_mask is not None:
        extras["key_padding_mask"] = array(op, "key_padding_mask", key_padding_mask)
    if sinks is not None:
        extras["sinks"] = array(op, "sinks", sinks)
    arrays = [array(op, name, x) for name, x in zip("qkv", (q, k, v), strict=True)]
    numbers = (None if scale is None else number(op, "scale", scale), number(op, "softcap", softcap), rate)
    if blocks is not None:
        patterns = () if pattern is None else _shapes.flat_patterns(op, pattern, arrays[0].shape, arrays[1].shape)
        given = given_blocks(op, blocks)
        call = BlockCall(patterns, len(given) == 2, _shapes.check_sides(op, block), *numbers, precision)
        o, lse = block_attention(call, *arrays, given, extras)
        return (o, lse) if return_lse else o
    _shapes.check_no_block(op, block)
    if pattern is None:
        pattern = _shapes.every_key(op, arrays[0].shape, arrays[1].shape)
    patterns = _shapes.flat_patterns(op, pattern, arrays[0].shape, arrays[1].shape)
    o, lse = _checked_attention(patterns, *numbers, precision, *arrays, extras)
    return (o, lse) if return_lse else o
