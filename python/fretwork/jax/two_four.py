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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from fretwork._shapes import fail
from fretwork.jax._handlers import check_precision, default_precision
from fretwork.jax.kronecker import _ACTIVATIONS

__all__ = ["TwoFour", "compress", "linear", "matmul", "prune"]

_KINDS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
_LEARNING = _KINDS[:4]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values", "metadata"], meta_fields=["dim"])
@dataclasses.dataclass(frozen=True)
class TwoFour:
    """A matrix compressed along `dim`, line by line: `values` (lines, K/2) and `metadata` (lines, words).

    A line is a row where dim is 1 and a column where it is 0. A pytree; gradients go to `values`.

    >>> import jax.numpy as jnp
    >>> from fretwork.jax import two_four
    >>> s = two_four.compress(jnp.eye(8)[:, :4], dim=0)
    >>> s.shape, s.values.shape, s.T.shape, s.T.dim
    ((8, 4), (4, 4), (4, 8), 1)
    """

    values: jax.Array
    metadata: jax.Array
    dim: int = 1

    def __post_init__(self) -> None:
        if self.dim not in (-2, -1, 0, 1):
            raise ValueError(f"TwoFour: dim: expected -1, 0 or 1, got {self.dim}")
        object.__setattr__(self, "dim", self.dim % 2)

    @property
    def shape(self) -> tuple[int, int]:
        lines, half = self.values.shape
        return (lines, 2 * half) if self.dim else (2 * half, lines)

    @property
    def T(self) -> TwoFour:
        """The transpose; nothing is copied."""
        return TwoFour(self.values, self.metadata, 1 - self.dim)

    def to_dense(self) -> jax.Array:
        """The matrix, with zeros where nothing is kept."""
        dense = _to_dense(self.values, self.metadata)
        return dense if self.dim else dense.T


def _call(name: str, results: Any, *arrays: jax.Array, **attributes: Any) -> Any:
    return jax.ffi.ffi_call(f"fretwork_two_four_{name}", results, vmap_method="sequential")(*arrays, **attributes)


def _group(dtype: Any) -> int:
    return 2 if dtype == jnp.float32 else 4


def _no_gradient(x: jax.Array) -> np.ndarray:
    return np.zeros(x.shape, jax.dtypes.float0)


# The form. to_dense and gather are each other's gradients.


@jax.custom_vjp
def _to_dense(values: jax.Array, metadata: jax.Array) -> jax.Array:
    lines, half = values.shape
    return _call("to_dense", jax.ShapeDtypeStruct((lines, 2 * half), values.dtype), values, metadata)


@jax.custom_vjp
def _gather(dense: jax.Array, metadata: jax.Array) -> jax.Array:
    lines, k = dense.shape
    return _call("gather", jax.ShapeDtypeStruct((lines, k // 2), dense.dtype), dense, metadata)


_to_dense.defvjp(lambda v, m: (_to_dense(v, m), m), lambda m, d: (_gather(d, m), _no_gradient(m)))
_gather.defvjp(lambda a, m: (_gather(a, m), m), lambda m, d: (_to_dense(d, m), _no_gradient(m)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _compress(dim: int, word: str, dense: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    lines, k = dense.shape if dim else dense.shape[::-1]
    words = -(-(k // _group(dense.dtype)) // (2 * jnp.dtype(word).itemsize))
    results = [
        jax.ShapeDtypeStruct((lines, k // 2), dense.dtype),
        jax.ShapeDtypeStruct((lines, words), jnp.dtype(word)),
        jax.ShapeDtypeStruct((2,), jnp.int32),
    ]
    return tuple(_call("compress", results, dense, dim=np.int64(dim)))


def _compress_forward(dim: int, word: str, dense: jax.Array) -> tuple[Any, jax.Array]:
    found = _compress(dim, word, dense)
    return found, found[1]


def _compress_backward(dim: int, word: str, metadata: jax.Array, d: Any) -> tuple[jax.Array]:
    dense = _to_dense(d[0], metadata)
    return (dense if dim else dense.T,)


_compress.defvjp(_compress_forward, _compress_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _prune(dim: int, transposable: bool, dense: jax.Array) -> jax.Array:
    result = jax.ShapeDtypeStruct(dense.shape, dense.dtype)
    return _call("prune", result, dense, dim=np.int64(dim), transposable=transposable)


def _prune_forward(dim: int, transposable: bool, dense: jax.Array) -> tuple[jax.Array, jax.Array]:
    pruned = _prune(dim, transposable, dense)
    return pruned, pruned


_prune.defvjp(_prune_forward, lambda dim, transposable, pruned, d: (jnp.where(pruned != 0, d, 0),))


def _matrix(op: str, A: ArrayLike, dim: int, both: bool = False) -> tuple[jax.Array, int]:
    """The array and 0 or 1 for the axis, after the core's own checks."""
    dense = jnp.asarray(A)
    if dense.dtype.name not in _KINDS:
        fail(op, "A", ", ".join(_KINDS[:-1]) + " or int8", dense.dtype.name)
    if dense.ndim != 2:
        fail(op, "A", "a matrix", dense.shape)
    if dim not in (-2, -1, 0, 1):
        fail(op, "dim", "-1, 0 or 1", dim)
    axis, group = dim % 2, _group(dense.dtype)
    for d in (0, 1) if both else (axis,):
        if dense.shape[d] % group:
            fail(op, "A", f"a multiple of {group} along dim {d}", dense.shape)
    return dense, axis


def compress(A: ArrayLike, dim: int = -1, metadata_dtype: DTypeLike = jnp.int16) -> TwoFour:
    """See `fretwork.two_four.compress`. Inside `jit` nobody looks for groups with too many non-zeros.

    >>> import jax.numpy as jnp
    >>> from fretwork.jax import two_four
    >>> two_four.compress(jnp.array([[0, 7, 0, 3, 1, 5, 0, 0]], jnp.float16), metadata_dtype=jnp.int8).metadata
    Array([[77]], dtype=int8)
    """
    dense, axis = _matrix("compress", A, dim)
    word = jnp.dtype(metadata_dtype).name
    if word not in ("int8", "int16", "int32"):
        fail("compress", "metadata_dtype", "int8, int16 or int32", word)
    values, metadata, bad = _compress(axis, word, dense)
    if not isinstance(bad, jax.core.Tracer):
        place = int(np.asarray(bad).view(np.int64)[0])
        if place >= 0:
            most = "1 non-zero in every 2" if _group(dense.dtype) == 2 else "2 non-zeros in every 4"
            fail("compress", "A", f"at most {most}", f"more in the group at {divmod(place, dense.shape[1])}")
    return TwoFour(values, metadata, axis)


def prune(A: ArrayLike, dim: int = -1, transposable: bool = False) -> jax.Array:
    """See `fretwork.two_four.prune`.

    >>> import jax.numpy as jnp
    >>> from fretwork.jax import two_four
    >>> two_four.prune(jnp.array([[1, -5, 3, 2]], jnp.float16)).tolist()
    [[0.0, -5.0, 3.0, 0.0]]
    """
    dense, axis = _matrix("prune", A, dim, bool(transposable))
    return _prune(axis, bool(transposable), dense)


# Products


class _Product(NamedTuple):
    """What a product is, besides its operands: s·b where left, else a·sᵀ for the lines of s."""

    left: bool
    activation: str
    out: str
    precision: str


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(p: _Product, values: jax.Array, metadata: jax.Array, dense: jax.Array, *bias: jax.Array) -> jax.Array:
    shape = list(dense.shape)
    shape[-2 if p.left else -1] = values.shape[0]
    result = jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(p.out))
    attributes = {"left": p.left, "activation": p.activation, "precision": p.precision}
    return _call("matmul", result, values, metadata, dense, *bias, **attributes)


def _forward(p: _Product, *operands: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _matmul(p, *operands), operands


def _backward(p: _Product, operands: tuple[jax.Array, ...], d: jax.Array) -> tuple[Any, ...]:
    values, metadata, dense, *bias = operands
    if p.activation != "none":
        wide = jnp.promote_types(d.dtype, jnp.float32)
        sums = _matmul(p._replace(activation="none"), *operands).astype(wide)  # once more
        d = jax.vjp(_ACTIVATIONS[p.activation], sums)[1](d.astype(wide))[0].astype(d.dtype)
    summed = tuple(n for n in range(d.ndim) if n != d.ndim - (2 if p.left else 1))
    d_bias = [d.sum(summed).astype(bias[0].dtype)] if bias else []
    if values.dtype.name not in _LEARNING:
        if values.dtype.name != "int8":
            raise NotImplementedError(
                f"matmul: gradient: expected {', '.join(_LEARNING[:-1])} or bfloat16 operands, got {values.dtype.name}"
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
) -> jax.Array:
    dense = jnp.asarray(dense)
    name = "x" if op == "linear" else "b" if left else "a"
    lines, k = s.values.shape[0], 2 * s.values.shape[1]
    if dense.dtype != s.values.dtype:
        fail(op, name, f"{s.values.dtype.name} like the sparse operand", dense.dtype.name)
    if dense.ndim < (1 if op == "linear" else 2) or dense.shape[-2 if left else -1] != k:
        fail(op, name, f"(…, {k}, N)" if left else f"(…, {k})", dense.shape)
    default = {"int8": "int32", "float8_e4m3fn": "bfloat16", "float8_e5m2": "bfloat16"}
    out = jnp.dtype(out_dtype).name if out_dtype is not None else default.get(dense.dtype.name, dense.dtype.name)
    wider = (
        ("float32", "float16", "bfloat16") if dense.dtype.itemsize == 1 else ("float32",) * (dense.dtype.itemsize < 8)
    )
    may = {default.get(dense.dtype.name, dense.dtype.name), *wider}
    if out not in may:
        fail(op, "out_dtype", " or ".join(sorted(may)) + f" for {dense.dtype.name}", out)
    if activation is not None and activation not in _ACTIVATIONS:
        fail(op, "activation", "None, relu, gelu or silu", repr(activation))
    check_precision(op, precision)
    extra = [] if bias is None else [jnp.asarray(bias)]
    for b in extra:
        if b.shape != (lines,) or b.dtype.name != out:
            fail(op, "bias", f"({lines},) of {out}", f"{b.shape} of {b.dtype.name}")
    p = _Product(left, activation or "none", out, precision or default_precision())
    if dense.ndim == 1:
        return _matmul(p, s.values, s.metadata, dense[None], *extra)[0]
    return _matmul(p, s.values, s.metadata, dense, *extra)


def matmul(
    a: TwoFour | ArrayLike,
    b: TwoFour | ArrayLike,
    bias: ArrayLike | None = None,
    activation: str | None = None,
    out_dtype: DTypeLike | None = None,
    *,
    precision: str | None = None,
) -> jax.Array:
    """See `fretwork.two_four.matmul`; scales are left to what comes after, as XLA fuses them there.

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
            f"dim={'-1' if left else '0'}, got dim={s.dim}"
        )
    return _product("matmul", left, s, dense, bias, activation, out_dtype, precision)


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
        raise NotImplementedError("linear: s: expected (out, in) compressed along in, dim=-1, got dim=0")
    return _product("linear", False, s, x, bias, activation, None, precision)
