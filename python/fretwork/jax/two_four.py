"""2:4 matrices and their products on JAX arrays; see `fretwork.two_four` for what they are.

>>> import jax, jax.numpy as jnp
>>> from fretwork.jax import two_four
>>> A = two_four.prune(jax.random.normal(jax.random.key(0), (8, 16)))
>>> s, x = two_four.compress(A), jnp.ones((3, 16))
>>> bool(jnp.allclose(two_four.linear(x, s), x @ A.T, atol=1e-5))
True
>>> jax.grad(lambda s: two_four.linear(x, s).sum(), allow_int=True)(s).values.shape
(8, 8)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.typing import ArrayLike, DTypeLike

from fretwork._checks import fail, flag, refuse, whole_number
from fretwork._library import two_four_order
from fretwork._shapes import two_four_axis, two_four_cut
from fretwork.jax._handlers import (
    ACTIVATIONS,
    array,
    check_precision,
    default_precision,
    differentiable,
    foreign,
    one_by_one,
)
from fretwork.jax._partition import Axis, partitioned

__all__ = ["TwoFour", "cat", "check", "compress", "from_layout", "linear", "matmul", "prune"]

_KINDS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8")
_LEARNING, _SMALL, _INTEGERS = _KINDS[:4], _KINDS[4:6], _KINDS[6:]
_WORDS = ("int8", "int16", "int32", "uint8", "uint16", "uint32")


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class TwoFour:
    """A matrix compressed along `dim`, line by line: `values` (lines, K/2) and `metadata` (lines, words).

    A line is a row where dim is 1 and a column where it is 0. A pytree; gradients go to `values`. Every nibble is
    looked at, but not while jax traces, as in `jit` and `grad`. A group whose values are zero may have any nibble, and
    has 4 in `metadata`.

    >>> import jax.numpy as jnp
    >>> from fretwork.jax import two_four
    >>> s = two_four.compress(jnp.eye(8)[:, :4], dim=0)
    >>> s.shape, s.values.shape, s.T.shape, s.T.dim
    ((8, 4), (4, 4), (4, 8), 1)
    """

    values: jax.Array
    metadata: jax.Array
    dim: int = -1

    def __post_init__(self) -> None:
        object.__setattr__(self, "dim", two_four_axis("TwoFour", self.dim, ValueError))
        for name in ("values", "metadata"):
            object.__setattr__(self, name, array("TwoFour", name, getattr(self, name)))
        given = self.metadata
        try:
            words, place = _canonical(jax.lax.stop_gradient(self.values), given)
        except RuntimeError as error:  # what the core says, after what XLA puts before it
            raise ValueError(str(error).rpartition("INVALID_ARGUMENT: ")[2].splitlines()[0]) from None
        object.__setattr__(self, "metadata", words)
        if (bad := _place(place)) is not None:
            valid = "4 or 14" if _group(self.dtype) == 2 else "4, 8, 9, 12, 13 or 14"
            line, k = divmod(bad, 2 * self.values.shape[1])
            where = (line, k) if self.dim else (k, line)
            word, group = divmod(k // _group(self.dtype), 2 * self.metadata.dtype.itemsize)
            nibble = int(given[line, word]) >> 4 * group & 15
            refuse("TwoFour", "metadata", f"nibbles that are {valid}", f"{nibble} for the group at {where}")

    @classmethod
    def _of(cls, values: Any, metadata: Any, dim: int) -> TwoFour:
        """From parts that are known to be right, or stand for some."""
        made = object.__new__(cls)
        for name, part in (("values", values), ("metadata", metadata), ("dim", dim)):
            object.__setattr__(made, name, part)
        return made

    def tree_flatten_with_keys(self) -> tuple[Any, int]:
        key = jax.tree_util.GetAttrKey
        return ((key("values"), self.values), (key("metadata"), self.metadata)), self.dim

    @classmethod
    def tree_unflatten(cls, dim: int, parts: tuple[Any, Any]) -> TwoFour:
        values, metadata = parts
        return cls._of(values, metadata, dim)

    @property
    def shape(self) -> tuple[int, int]:
        lines, half = self.values.shape
        return (lines, 2 * half) if self.dim else (2 * half, lines)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype

    @property
    def T(self) -> TwoFour:
        """The transpose; nothing is copied."""
        return TwoFour._of(self.values, self.metadata, 1 - self.dim)

    def to_dense(self) -> jax.Array:
        """The matrix, with zeros where nothing is kept."""
        dense = _to_dense(self.values, self.metadata)
        return dense if self.dim else dense.T

    def __matmul__(self, b: ArrayLike) -> jax.Array:
        return matmul(self, b)

    def __rmatmul__(self, a: ArrayLike) -> jax.Array:
        return matmul(a, self)

    def __getitem__(self, index: slice | tuple[slice, slice]) -> TwoFour:
        """s[a:b] and s[a:b, c:d]. Along `dim` a cut is between whole words of metadata.

        >>> import jax.numpy as jnp
        >>> from fretwork.jax import two_four
        >>> s = two_four.compress(jnp.eye(64))
        >>> s[8:24].shape, s[:, 32:].shape
        ((16, 64), (64, 32))
        """
        whole = 2 * self.metadata.dtype.itemsize * _group(self.dtype)
        lines, kept, words = two_four_cut(index, self.shape, self.dim, whole, whole_number)
        return TwoFour._of(self.values[lines, kept], self.metadata[lines, words], self.dim)

    def export(self, layout: str | ArrayLike, tile_k: int = 128) -> tuple[jax.Array, jax.Array]:
        """See `fretwork.TwoFour.export`.

        >>> import jax.numpy as jnp
        >>> from fretwork.jax import two_four
        >>> values, metadata = two_four.compress(jnp.eye(32, 64, dtype=jnp.float16)).export("torch")
        >>> values.shape, metadata.shape, metadata.dtype
        ((32, 32), (32, 4), dtype('int16'))
        """
        lines, half = self.values.shape
        order = _order("export", layout, lines, 2 * half, self.dtype, tile_k)
        plain = jnp.append(_bytes(self).reshape(-1), jnp.uint8(_EMPTY))  # −1 picks the last
        found = plain[order]
        if isinstance(layout, str) and layout in ("torch", "cutlass_sm80"):
            word = jnp.dtype("int32" if self.dtype.itemsize == 1 else "int16")
            words = _words_of(2 * half, self.dtype, word)
            found = jax.lax.bitcast_convert_type(found.reshape(lines, words, word.itemsize), word)
        return self.values, found


def _call(name: str, results: Any, *arrays: jax.Array, **attributes: Any) -> Any:
    return foreign(f"two_four_{name}", results, *arrays, **attributes)


_PLACE = jax.ShapeDtypeStruct((2,), jnp.int32)  # the two halves of an int64, which jax may not have
_EMPTY = 0x44  # two groups that keep their first elements: what padding holds


def _place(bad: jax.Array) -> int | None:
    """Of the first bad group; None where there is none, and where nothing can be read."""
    place = -1 if isinstance(bad, jax.core.Tracer) else int(np.asarray(bad).view(np.int64)[0])
    return place if place >= 0 else None


def _canonical(values: jax.Array, metadata: jax.Array) -> Any:
    """Words that kernels may read, and the place of a group with a number and no valid nibble."""
    results = [jax.ShapeDtypeStruct(metadata.shape, metadata.dtype), _PLACE]
    return _call("canonical", results, values, metadata, keep_valid=False)


def _group(dtype: Any) -> int:
    return 2 if dtype == jnp.float32 else 4


def _words_of(k: int, dtype: Any, word: Any) -> int:
    return -(-(k // _group(dtype)) // (2 * word.itemsize))


def _no_gradient(x: jax.Array) -> np.ndarray:
    return np.zeros(x.shape, jax.dtypes.float0)


# The form. to_dense and gather are each other's gradients.


@differentiable
def _to_dense(values: jax.Array, metadata: jax.Array) -> jax.Array:
    lines, half = values.shape
    return _call("to_dense", jax.ShapeDtypeStruct((lines, 2 * half), values.dtype), values, metadata)


@differentiable
def _gather(dense: jax.Array, metadata: jax.Array) -> jax.Array:
    lines, k = dense.shape
    return _call("gather", jax.ShapeDtypeStruct((lines, k // 2), dense.dtype), dense, metadata)


_to_dense.defvjp(lambda v, m: (_to_dense(v, m), m), lambda m, d: (_gather(d, m), _no_gradient(m)))
_gather.defvjp(lambda a, m: (_gather(a, m), m), lambda m, d: (_to_dense(d, m), _no_gradient(m)))


@functools.partial(differentiable, static=2)
def _compress(dim: int, word: str, dense: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    lines, k = dense.shape if dim else dense.shape[::-1]
    results = [
        jax.ShapeDtypeStruct((lines, k // 2), dense.dtype),
        jax.ShapeDtypeStruct((lines, _words_of(k, dense.dtype, jnp.dtype(word))), jnp.dtype(word)),
        _PLACE,
    ]
    return tuple(_call("compress", results, dense, dim=np.int64(dim)))


def _compress_forward(dim: int, word: str, dense: jax.Array) -> tuple[Any, jax.Array]:
    found = _compress(dim, word, dense)
    return found, found[1]


def _compress_backward(dim: int, word: str, metadata: jax.Array, d: Any) -> tuple[jax.Array]:
    dense = _to_dense(d[0], metadata)
    return (dense if dim else dense.T,)


_compress.defvjp(_compress_forward, _compress_backward)


@functools.partial(differentiable, static=2)
def _prune(dim: int, transposable: bool, dense: jax.Array) -> jax.Array:
    result = jax.ShapeDtypeStruct(dense.shape, dense.dtype)
    return _call("prune", result, dense, dim=np.int64(dim), transposable=transposable)


def _prune_forward(dim: int, transposable: bool, dense: jax.Array) -> tuple[jax.Array, jax.Array]:
    pruned = _prune(dim, transposable, dense)
    return pruned, pruned


_prune.defvjp(_prune_forward, lambda dim, transposable, pruned, d: (jnp.where(pruned != 0, d, 0),))


def _matrix(op: str, A: ArrayLike, dim: int, both: bool = False) -> tuple[jax.Array, int]:
    """The array and 0 or 1 for the axis, after the core's own checks."""
    dense = array(op, "A", A)
    if dense.dtype.name not in _KINDS:
        fail(op, "A", ", ".join(_KINDS[:-1]) + " or uint8", dense.dtype.name)
    if dense.ndim != 2:
        fail(op, "A", "a matrix", dense.shape)
    axis, group = two_four_axis(op, dim), _group(dense.dtype)
    for d in (0, 1) if both else (axis,):
        if dense.shape[d] % group:
            fail(op, "A", f"a multiple of {group} along dim {d}", dense.shape)
    return dense, axis


def compress(A: ArrayLike, dim: int = -1, metadata_dtype: DTypeLike = jnp.int16, *, validate: bool = True) -> TwoFour:
    """See `fretwork.two_four.compress`. Inside `jit` groups with too many non-zeros are not found.

    >>> import jax.numpy as jnp
    >>> from fretwork.jax import two_four
    >>> two_four.compress(jnp.array([[0, 7, 0, 3, 1, 5, 0, 0]], jnp.float16), metadata_dtype=jnp.int8).metadata
    Array([[77]], dtype=int8)
    """
    dense, axis = _matrix("compress", A, dim)
    validate = flag("compress", "validate", validate)
    values, metadata, bad = _compress(axis, _word("compress", metadata_dtype), dense)
    if validate and (place := _place(bad)) is not None:
        most = "1 non-zero in every 2" if _group(dense.dtype) == 2 else "2 non-zeros in every 4"
        fail("compress", "A", f"at most {most}", f"more in the group at {divmod(place, dense.shape[1])}")
    return TwoFour._of(values, metadata, axis)


def _name(op: str, argument: str, dtype: DTypeLike) -> str:
    try:
        return jnp.dtype(dtype).name
    except TypeError:
        refuse(op, argument, "a dtype", repr(dtype), TypeError)


def _word(op: str, dtype: DTypeLike) -> str:
    word = _name(op, "metadata_dtype", dtype)
    if word not in _WORDS:
        fail(op, "metadata_dtype", ", ".join(_WORDS[:-1]) + " or uint32", word)
    return word


def check(A: ArrayLike, dim: int = -1) -> tuple[bool, tuple[int, int] | None]:
    """See `fretwork.two_four.check`; not inside `jit`, where nothing can be read.

    >>> import jax.numpy as jnp
    >>> from fretwork.jax import two_four
    >>> two_four.check(jnp.eye(8)), two_four.check(jnp.ones((8, 8)))
    ((True, None), (False, (0, 0)))
    """
    dense, axis = _matrix("check", A, dim)
    if isinstance(dense, jax.core.Tracer):
        refuse("check", "A", "an array outside of jit, vmap and grad", "a traced one", NotImplementedError)
    place = _place(_call("check", _PLACE, dense, dim=np.int64(axis)))
    return (True, None) if place is None else (False, divmod(place, dense.shape[1]))


def prune(A: ArrayLike, dim: int = -1, transposable: bool = False) -> jax.Array:
    """See `fretwork.two_four.prune`.

    >>> import jax.numpy as jnp
    >>> from fretwork.jax import two_four
    >>> two_four.prune(jnp.array([[1, -5, 3, 2]], jnp.float16)).tolist()
    [[0.0, -5.0, 3.0, 0.0]]
    """
    transposable = flag("prune", "transposable", transposable)
    dense, axis = _matrix("prune", A, dim, transposable)
    return _prune(axis, transposable, dense)


# Metadata as bytes and nibbles, for what is rare


def _bytes(s: TwoFour) -> jax.Array:
    lines, words = s.metadata.shape
    both = jax.lax.bitcast_convert_type(s.metadata, jnp.uint8).reshape(lines, words * s.metadata.dtype.itemsize)
    return both[:, : _words_of(2 * s.values.shape[1], s.dtype, jnp.dtype("int8"))]


def _nibbles(both: jax.Array, groups: int) -> jax.Array:
    return jnp.stack((both & 15, both >> 4), -1).reshape(both.shape[0], 2 * both.shape[1])[:, :groups]


def _words(nibbles: jax.Array, word: Any) -> jax.Array:
    lines, groups = nibbles.shape
    words = -(-groups // (2 * word.itemsize))
    full = jnp.pad(nibbles, ((0, 0), (0, words * 2 * word.itemsize - groups)), constant_values=4)
    pairs = full.reshape(lines, words, word.itemsize, 2)
    both = pairs[..., 0] | pairs[..., 1] << 4
    return jax.lax.bitcast_convert_type(both[..., 0] if word.itemsize == 1 else both, word)


def _order(op: str, layout: str | ArrayLike, lines: int, k: int, dtype: Any, tile_k: int) -> np.ndarray:
    if layout is None or isinstance(layout, str):
        return two_four_order(op, layout, lines, k, dtype.name, whole_number(op, "tile_k", tile_k))
    order, size = np.asarray(layout), lines * _words_of(k, dtype, jnp.dtype("int8"))
    if order.dtype.kind != "i" or order.ndim != 1:
        refuse(op, "layout", "a name or one dimension of integers", f"{order.dtype} {order.shape}")
    if order.size and (order.min() < -1 or order.max() >= size):
        refuse(op, "layout", f"-1 to {size - 1}", f"{order.min()} to {order.max()}")
    return order


def cat(parts: Iterable[TwoFour], dim: int = 0) -> TwoFour:
    """See `fretwork.two_four.cat`.

    >>> import jax.numpy as jnp
    >>> from fretwork.jax import two_four
    >>> s = two_four.compress(jnp.eye(12))
    >>> two_four.cat([s, s]).shape, two_four.cat([s, s, s], dim=1).shape
    ((24, 12), (12, 36))
    """
    if not isinstance(parts, Iterable):
        refuse("cat", "parts", "a sequence of TwoFour", type(parts).__name__, TypeError)
    parts = list(parts)
    if not parts or not all(isinstance(s, TwoFour) for s in parts):
        got = ", ".join(type(s).__name__ for s in parts) or "none"
        refuse("cat", "parts", "at least one TwoFour", got, TypeError)
    axis, first = two_four_axis("cat", dim, ValueError), parts[0]
    for n, s in enumerate(parts):
        kind, like = ((t.dtype.name, t.metadata.dtype.name, t.dim, t.shape[1 - axis]) for t in (s, first))
        if kind != like:
            words = "{} in {} words with dim {}, {} along the other axis"
            refuse("cat", f"parts[{n}]", words.format(*like), words.format(*kind))
    along = int(axis == first.dim)
    values, word = jnp.concatenate([s.values for s in parts], along), first.metadata.dtype
    groups = [2 * s.values.shape[1] // _group(first.dtype) for s in parts]
    if not along or all(n % (2 * word.itemsize) == 0 for n in groups[:-1]):
        metadata = jnp.concatenate([s.metadata for s in parts], along)
    else:
        each = [_nibbles(_bytes(s), n) for s, n in zip(parts, groups, strict=True)]
        metadata = _words(jnp.concatenate(each, 1), word)
    return TwoFour._of(values, metadata, first.dim)


def from_layout(
    values: ArrayLike,
    metadata: ArrayLike,
    layout: str | ArrayLike,
    dim: int = -1,
    *,
    tile_k: int = 128,
    metadata_dtype: DTypeLike = jnp.int16,
) -> TwoFour:
    """See `fretwork.two_four.from_layout`.

    >>> import jax.numpy as jnp
    >>> from fretwork.jax import two_four
    >>> A = jnp.eye(32, 64, dtype=jnp.float16)
    >>> pair = two_four.compress(A).export("torch")
    >>> bool((two_four.from_layout(*pair, "torch").to_dense() == A).all())
    True
    """
    op = "from_layout"
    values, metadata = array(op, "values", values), array(op, "metadata", metadata)
    if metadata.dtype.kind not in "iu":
        refuse(op, "metadata", "integers", metadata.dtype)
    if values.ndim != 2:
        refuse(op, "values", "a matrix, row by row of what is compressed", values.shape)
    lines, k = values.shape[0], 2 * values.shape[1]
    order = _order(op, layout, lines, k, values.dtype, tile_k)
    foreign = jax.lax.bitcast_convert_type(metadata, jnp.uint8).reshape(-1)
    if foreign.size != order.size:
        refuse(op, "metadata", f"{order.size} bytes", foreign.size)
    per_line, held = _words_of(k, values.dtype, jnp.dtype("int8")), order >= 0
    plain = jnp.zeros(lines * per_line, jnp.uint8).at[order[held]].set(foreign[held])  # what no byte is for is refused
    if not isinstance(foreign, jax.core.Tracer) and (plain[order[held]] != foreign[held]).any():
        refuse(op, "metadata", "the same in all bytes that the layout has for one", "others")
    nibbles = _nibbles(plain.reshape(lines, per_line), k // _group(values.dtype))
    return TwoFour(values, _words(nibbles, jnp.dtype(_word(op, metadata_dtype))), dim)


# Products


class _Product(NamedTuple):
    """What a product is, besides its operands: s·b where left, else a·sᵀ for the lines of s."""

    left: bool
    activation: str
    out: str
    precision: str


@functools.partial(differentiable, static=1)
def _matmul(p: _Product, values: jax.Array, metadata: jax.Array, dense: jax.Array, *bias: jax.Array) -> jax.Array:
    attributes = {"left": p.left, "activation": p.activation, "precision": p.precision}

    def on_part(values: jax.Array, metadata: jax.Array, dense: jax.Array, *bias: jax.Array) -> list[jax.Array]:
        shape = list(dense.shape)
        shape[-2 if p.left else -1] = values.shape[0]
        result = jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(p.out))
        return [_call("matmul", result, values, metadata, dense, *bias, **attributes)]

    @custom_vmap
    def call(*operands: jax.Array) -> jax.Array:
        whole = [None] * len(bias)
        axes = [Axis([None, None, d, *whole], [d]) for d in range(operands[2].ndim - (2 if p.left else 1))]
        return partitioned(on_part, axes, operands)[0]

    @call.def_vmap
    def _(size: int, batched: list[bool], *operands: jax.Array) -> tuple[jax.Array, bool]:
        return one_by_one(lambda *one: on_part(*one)[0], batched, operands), True

    return call(values, metadata, dense, *bias)


def _forward(p: _Product, *operands: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _matmul(p, *operands), operands


def _backward(p: _Product, operands: tuple[jax.Array, ...], d: jax.Array) -> tuple[Any, ...]:
    values, metadata, dense, *bias = operands
    if values.dtype.name in _LEARNING and p.out not in _LEARNING:
        raise NotImplementedError(
            f"matmul: gradient: expected a {', '.join(_LEARNING[:-1])} or bfloat16 result, got {p.out}; "
            "round the result of one of these"
        )
    if p.activation != "none":
        wide = jnp.promote_types(d.dtype, jnp.float32)
        sums = _matmul(p._replace(activation="none"), *operands).astype(wide)  # once more
        d = jax.vjp(ACTIVATIONS[p.activation], sums)[1](d.astype(wide))[0].astype(d.dtype)
    summed = tuple(n for n in range(d.ndim) if n != d.ndim - (2 if p.left else 1))
    d_bias = [d.sum(summed).astype(bias[0].dtype)] if bias else []
    if values.dtype.name not in _LEARNING:
        if values.dtype.name not in _INTEGERS:
            raise NotImplementedError(
                f"matmul: gradient: expected {', '.join(_LEARNING[:-1])} or bfloat16 operands, got {values.dtype.name}"
                "; let one of these learn, and compress what it became in the other"
            )
        return _no_gradient(values), _no_gradient(metadata), _no_gradient(dense), *d_bias
    d = d.astype(dense.dtype)
    a = _to_dense(values, metadata)
    if p.left:
        d_dense, outer = jnp.matmul(a.T, d), jnp.einsum("...mn,...kn->mk", d, dense)
    else:
        d_dense, outer = jnp.matmul(d, a), jnp.einsum("...n,...k->nk", d, dense)
    return _gather(outer, metadata), _no_gradient(metadata), d_dense, *d_bias


_matmul.defvjp(_forward, _backward)


def _product(
    op: str,
    left: bool,
    s: TwoFour,
    dense: ArrayLike,
    bias: ArrayLike | None,
    activation: str | None,
    out_dtype: DTypeLike | None,
    precision: str | None,
    scales: tuple[ArrayLike | None, ...] = (None, None, None),
) -> jax.Array:
    name = "x" if op == "linear" else "b" if left else "a"
    dense = array(op, name, dense)
    lines, k = s.values.shape[0], 2 * s.values.shape[1]
    if dense.dtype != s.values.dtype:
        fail(op, name, f"{s.values.dtype.name} like the sparse operand", dense.dtype.name)
    if dense.ndim < (1 if op == "linear" else 2) or dense.shape[-2 if left else -1] != k:
        fail(op, name, f"(…, {k}, N)" if left else f"(…, {k})", dense.shape)
    kind = dense.dtype.name
    integers = kind in _INTEGERS
    out = "int32" if integers else "bfloat16" if kind in _SMALL else kind
    out = out if out_dtype is None else _name(op, "out_dtype", out_dtype)
    may = [*(["int32"] if integers else ["float64"]), "float32", "float16", "bfloat16", *_SMALL, "int8"]
    if out not in may:
        fail(op, "out_dtype", ", ".join(may[:-1]) + f" or int8 for {kind}", out)
    if activation is not None and (not isinstance(activation, str) or activation not in ACTIVATIONS):
        fail(op, "activation", "None, relu, gelu or silu", repr(activation))
    check_precision(op, precision)
    extra = [] if bias is None else [array(op, "bias", bias)]
    for b in extra:
        takes = (out, "float32") if jnp.dtype(out).itemsize == 1 else (out,)
        if b.shape != (lines,) or b.dtype.name not in takes:
            fail(op, "bias", f"({lines},) of {out}", f"{b.shape} of {b.dtype.name}")
    p = _Product(left, activation or "none", out, precision or default_precision())
    if any(scale is not None for scale in scales):
        return _scaled(p, s, dense, extra, scales)
    if dense.ndim == 1:
        return _matmul(p, s.values, s.metadata, dense[None], *extra)[0]
    return _matmul(p, s.values, s.metadata, dense, *extra)


def _scaled(
    p: _Product, s: TwoFour, dense: jax.Array, bias: list[jax.Array], scales: tuple[ArrayLike | None, ...]
) -> jax.Array:
    """Scales, bias and activation after the product, in fp32, as XLA fuses them; gradients go to all of them."""
    sums = "int32" if dense.dtype.name in _INTEGERS else "float64" if dense.dtype == jnp.float64 else "float32"
    y = _matmul(p._replace(activation="none", out=sums), s.values, s.metadata, dense)
    y = y.astype(jnp.promote_types(y.dtype, jnp.float32) if sums != "int32" else jnp.float32)
    for name, given, axis in (("scale_a", scales[0], -2), ("scale_b", scales[1], -1)):
        if given is not None:
            scale = array("matmul", name, given)
            if scale.dtype.name != "float32" or scale.shape not in ((), (y.shape[axis],)):
                fail("matmul", name, f"() or ({y.shape[axis]},) of float32", f"{scale.shape} of {scale.dtype.name}")
            y = y * (scale[:, None] if scale.ndim and axis == -2 else scale)
    for b in bias:
        y = y + (b[:, None] if p.left else b).astype(y.dtype)
    y = y if p.activation == "none" else ACTIVATIONS[p.activation](y)
    if scales[2] is not None:
        scale = array("matmul", "scale_out", scales[2])
        if scale.dtype.name != "float32" or scale.shape:
            fail("matmul", "scale_out", "() of float32", f"{scale.shape} of {scale.dtype.name}")
        y = y * scale
    return _rounded(y, p.out)


def _rounded(y: jax.Array, out: str) -> jax.Array:
    """To nearest even; int8 and fp8 are saturated."""
    if out == "int32":
        return jnp.rint(y).astype(out)
    if out == "int8":
        return jnp.where(jnp.isnan(y), 0, jnp.clip(jnp.rint(y), -128, 127)).astype(out)
    if out in _SMALL:
        largest = float(jnp.finfo(out).max)
        y = jnp.clip(y, -largest, largest)
    return y.astype(out)


def matmul(
    a: TwoFour | ArrayLike,
    b: TwoFour | ArrayLike,
    bias: ArrayLike | None = None,
    activation: str | None = None,
    out_dtype: DTypeLike | None = None,
    scale_a: ArrayLike | None = None,
    scale_b: ArrayLike | None = None,
    scale_out: ArrayLike | None = None,
    *,
    precision: str | None = None,
) -> jax.Array:
    """See `fretwork.two_four.matmul`.

    >>> import jax.numpy as jnp
    >>> from fretwork.jax import two_four
    >>> s = two_four.compress(jnp.eye(8))
    >>> two_four.matmul(s, jnp.ones((2, 8, 3)), activation="relu").shape, two_four.matmul(jnp.ones((3, 8)), s.T).shape
    ((2, 8, 3), (3, 8))
    """
    left = isinstance(a, TwoFour)
    if left == isinstance(b, TwoFour):
        fail("matmul", "a and b", "exactly one TwoFour", "two" if left else "none")
    s: Any = a if left else b
    dense: Any = b if left else a
    if s.dim != left:
        raise NotImplementedError(
            f"matmul: {'a' if left else 'b'}: expected a matrix compressed along the axis that is summed over, "
            f"dim={'-1' if left else '0'}, got dim={s.dim}; compress the dense matrix along that axis"
        )
    return _product("matmul", left, s, dense, bias, activation, out_dtype, precision, (scale_a, scale_b, scale_out))


def linear(
    x: ArrayLike,
    s: TwoFour,
    bias: ArrayLike | None = None,
    activation: str | None = None,
    *,
    precision: str | None = None,
) -> jax.Array:
    """activation(x sᵀ + bias): x (…, in), s (out, in) with dim=-1.

    >>> import jax.numpy as jnp
    >>> from fretwork.jax import two_four
    >>> two_four.linear(jnp.ones((2, 3, 8)), two_four.compress(jnp.eye(8)), jnp.ones(8)).max().item()
    2.0
    """
    if not isinstance(s, TwoFour):
        fail("linear", "s", "a TwoFour", type(s).__name__)
    if s.dim != 1:
        raise NotImplementedError(
            "linear: s: expected (out, in) compressed along in, dim=-1, got dim=0; compress the weight along that axis"
        )
    return _product("linear", False, s, x, bias, activation, None, precision)
