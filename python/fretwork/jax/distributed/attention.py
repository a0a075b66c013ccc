"""Attention whose queries, keys and values are cut over the devices of a `jax.shard_map` along the sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import jax
from jax.typing import ArrayLike

from fretwork import _shapes
from fretwork._checks import fail, number
from fretwork.jax._handlers import alike, array, check_precision, default_precision, operand, varying
from fretwork.jax.attention import EXTRAS, AttentionCall, Patterns, alibi, wide
from fretwork.jax.distributed._pieces import SequenceCall, sequence_attention
from fretwork.jax.distributed._rounds import schedule_of
from fretwork.jax.dynamic_attention import BlockLists
from fretwork.patterns import Pattern

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["attention"]

_OP = "attention"

AxisName = str | tuple[str, ...]


class Options(TypedDict, total=False):
    """The options of `fretwork.jax.attention`."""

    scale: float | None
    bias: ArrayLike | alibi | None
    softcap: float
    dropout_p: float
    key_padding_mask: ArrayLike | None
    sinks: ArrayLike | None
    precision: str | None
    blocks: ArrayLike | BlockLists | None


@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    pattern: Patterns | None,
    axis_name: AxisName,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> jax.Array: ...


@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    pattern: Patterns | None,
    axis_name: AxisName,
    *,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[jax.Array, jax.Array]: ...


@overload
def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    pattern: Patterns | None,
    axis_name: AxisName,
    *,
    return_lse: bool = False,
    **options: Unpack[Options],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    pattern: Patterns | None,
    axis_name: AxisName,
    *,
    return_lse: bool = False,
    scale: float | None = None,
    bias: ArrayLike | alibi | None = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    key_padding_mask: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    precision: str | None = None,
    blocks: ArrayLike | BlockLists | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`fretwork.jax.attention` of a sequence that is cut into equal parts over an axis of a `jax.shard_map`.

    q is (B, Hq, rows, D), k (B, Hk, keys, D) and v (B, Hk, keys, Dv): this device's part. `pattern` is that of the
    whole, one or several as for `fretwork.jax.attention`; None holds every key. The result has this device's rows.

    Of other devices come the keys and values that the pattern needs, by `jax.lax.ppermute`; gradients go back the same
    way and are added in a fixed order. A row whose keys come in one piece is computed as on one device; others are
    merged by their log-sum-exp.

    `key_padding_mask` is (B, keys), of this device's keys. `sinks` are of all heads. `bias` has this device's rows and
    all columns, or broadcasts, or is `alibi(slopes)`. Dropout and `blocks` are refused.

    >>> import jax.numpy as jnp, fretwork as fw, fretwork.jax as fj
    >>> from jax.sharding import Mesh, PartitionSpec as P
    >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 2, 64, 16))
    >>> pattern, mesh, rows = fw.patterns.strided(64, 8), Mesh(jax.devices(), ("seq",)), P(None, None, "seq")
    >>> local = lambda q, k, v: attention(q, k, v, pattern, "seq")
    >>> o = jax.shard_map(local, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows)(q, k, v)
    >>> bool(jnp.allclose(o, fj.attention(q, k, v, pattern), atol=1e-6))
    True
    """
    _refuse(number(_OP, "dropout_p", dropout_p), blocks)
    check_precision(_OP, precision)
    arrays = [array(_OP, name, x) for name, x in zip("qkv", (q, k, v), strict=True)]
    extras: dict[str, jax.Array] = {}
    if isinstance(bias, alibi):
        extras["slopes"] = bias.slopes
    elif bias is not None:
        extras["bias"] = array(_OP, "bias", bias)
    for name, x in (("key_padding_mask", key_padding_mask), ("sinks", sinks)):
        if x is not None:
            extras[name] = array(_OP, name, x)
    devices = _devices(axis_name)
    patterns = _patterns(pattern, arrays, devices)
    scale, softcap = None if scale is None else number(_OP, "scale", scale), number(_OP, "softcap", softcap)
    _check(arrays, patterns, devices, extras, scale, softcap)
    if "slopes" in extras:
        extras["slopes"] = extras["slopes"].astype(wide(arrays[0].dtype))
    if "bias" in extras:
        x = extras["bias"]
        extras["bias"] = x.reshape((1,) * (4 - x.ndim) + x.shape)
    options = AttentionCall(
        (),
        float(arrays[0].shape[-1] ** -0.5) if scale is None else scale,
        softcap,
        0.0,
        precision or default_precision(),
        "".join(EXTRAS[name] for name in extras),
    )
    axes = (axis_name,) if isinstance(axis_name, str) else axis_name
    operands = (varying(x, axes) for x in alike(*arrays, *extras.values()))
    o, lse = sequence_attention(
        SequenceCall(schedule_of(patterns, devices, "slopes" in extras), axis_name, options), *operands
    )
    return (o, lse) if return_lse else o


def _refuse(dropout_p: float, blocks: object) -> None:
    if dropout_p != 0:
        raise NotImplementedError(
            f"{_OP}: dropout_p: expected 0 over several devices, got {dropout_p}; drop elements of the result instead"
        )
    if blocks is not None:
        raise NotImplementedError(
            f"{_OP}: blocks: expected None over several devices, got {type(blocks).__name__}; the pattern decides what "
            "travels, so give the blocks as one (fw.patterns.from_layout)"
        )


def _devices(axis_name: Any) -> int:
    names = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{_OP}: axis_name: expected the name of an axis, or several, got {axis_name!r}")
    try:
        return int(jax.lax.psum(1, axis_name))
    except NameError:
        fail(_OP, "axis_name", "an axis of the shard_map around this call", repr(axis_name), NameError)


def _patterns(pattern: Patterns | None, arrays: list[jax.Array], devices: int) -> tuple[Pattern, ...]:
    """Patterns of the whole, which the devices divide."""
    for name, x in zip("qkv", arrays, strict=True):
        if x.ndim != 4:
            fail(_OP, name, f"4 dimensions {'(B, Hq, rows, D)' if name == 'q' else '(B, Hk, keys, D)'}", x.shape)
    if pattern is None:
        pattern = _shapes.full((devices * arrays[0].shape[2], devices * arrays[1].shape[2]))
    patterns = _shapes.flat_patterns(_OP, pattern, arrays[0].shape)
    for n, p in enumerate(patterns):
        if len(p.shape) == 3 and p.shape[0] != 1:
            fail(_OP, f"pattern[{n}]", "a layout of one head", p.shape[0])
        if p.shape[-2:] != patterns[0].shape[-2:]:
            fail(_OP, f"pattern[{n}]", f"shape {patterns[0].shape[-2:]} like the first", p.shape[-2:])
        if any(length % devices for length in p.shape[-2:]):
            fail(_OP, "pattern", f"lengths that {devices} devices divide", p.shape[-2:])
    return patterns


def _check(
    arrays: list[jax.Array],
    patterns: tuple[Pattern, ...],
    devices: int,
    extras: dict[str, jax.Array],
    scale: float | None,
    softcap: float,
) -> None:
    """This device's rows, and then what `fretwork.jax.attention` asks, as if the rest of the sequence were here."""
    queries, keys = patterns[0].shape[-2:]
    operands = []
    for name, x in zip("qkv", arrays, strict=True):
        length = queries if name == "q" else keys
        if x.shape[2] != length // devices:
            expected = f"{length // devices} rows, one of {devices} parts of {length}"
            fail(_OP, name, expected, f"{x.shape[2]} in {x.shape}")
        operands.append(operand(name, x)._replace(shape=(*x.shape[:2], length, x.shape[3])))
    given = []
    for name, x in extras.items():
        shape = x.shape
        if name == "bias" and x.ndim >= 2 and shape[-2] != 1:
            rows = queries // devices
            if shape[-2] != rows:
                fail(_OP, name, f"{rows} rows, this device's, or 1", f"{shape[-2]} in {shape}")
            shape = *shape[:-2], queries, shape[-1]
        if name == "key_padding_mask":
            batch = arrays[0].shape[0]
            if shape != (batch, keys // devices):
                fail(_OP, name, f"shape {(batch, keys // devices)}, one for each key of this device", shape)
            shape = batch, keys
        given.append(operand(name, x)._replace(shape=shape))
    _shapes.check_attention(operands, patterns, given, scale, softcap, 0.0)
