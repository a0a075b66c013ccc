"""The library's handlers, made known to XLA, and what the functions that call them share."""

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from fretwork._checks import fail
from fretwork._library import library_path
from fretwork._shapes import Operand
from fretwork.patterns import BlockLayout, KroneckerPattern, Pattern

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
}


class _Handlers(ctypes.Structure):
    """What XLA calls for an op on each platform."""

    _fields_ = (("op", ctypes.c_char_p), ("cpu", ctypes.c_void_p), ("CUDA", ctypes.c_void_p))


def _register() -> None:
    listed = ctypes.CDLL(str(library_path("fretwork_jax"))).fretwork_jax_handlers
    listed.restype = ctypes.POINTER(_Handlers)
    for handlers in itertools.takewhile(lambda h: h.op, map(listed().__getitem__, itertools.count())):
        for platform in ("cpu", "CUDA"):
            handler = jax.ffi.pycapsule(getattr(handlers, platform))
            jax.ffi.register_ffi_target(f"fretwork_{handlers.op.decode()}", handler, platform=platform)


_register()

# Arguments of what jax.jit traces may be patterns: static ones, without being named so.
for _kind in (Pattern, BlockLayout, KroneckerPattern):
    jax.tree_util.register_static(_kind)


# Checks. They repeat the core's, which run only with the compiled program.


def operand(name: str, x: jax.Array) -> Operand:
    """An array as the checks see it."""
    return Operand(name, x.shape, x.dtype.name)


def array(op: str, name: str, x: object) -> jax.Array:
    """An argument as an array; the error of `jnp.asarray` names neither op nor argument."""
    if isinstance(x, jax.Array):
        return x
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):
        raise TypeError(f"{op}: {name}: expected an array of numbers, got {type(x).__name__}") from None


def check_precision(op: str, precision: object) -> None:
    if precision not in (None, "ieee", "tf32", "tf32x3"):
        fail(op, "precision", "None, ieee, tf32 or tf32x3", repr(precision))


def default_precision() -> str:
    """JAX's own default lets a GPU round fp32 operands to tf32."""
    setting = str(jax.config.jax_default_matmul_precision).lower()  # type: ignore[attr-defined]
    return "ieee" if setting in ("highest", "float32", "f32_f32_f32") else "tf32"


# Calls. Under `shard_map` the type of an array says over which axes of the mesh it varies.


def alike(*arrays: jax.Array) -> Sequence[jax.Array]:
    """The arrays, each varying over all axes over which one of them does. Their gradients are summed over the rest."""
    every = frozenset[str]().union(*map(_varying, arrays))
    return [varying(x, every) for x in arrays]


def varying(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """The same array, varying over these axes too."""
    rest = tuple(sorted(frozenset(axes) - _varying(x)))
    return jax.lax.pcast(x, rest, to="varying") if rest and hasattr(jax.lax, "pcast") else x


def _varying(x: jax.Array) -> frozenset[str]:
    """The axes over which an array varies; none where JAX is too old to say it."""
    if not hasattr(jax.lax, "pcast"):
        return frozenset()
    known = jax.typeof(x)
    manual = getattr(known, "manual_axis_type", None)
    return getattr(known, "vma", frozenset()) if manual is None else manual.varying


def foreign(target: str, results: Any, *arrays: jax.Array, **attributes: Any) -> Any:
    """A call of a handler. `results`, one or several, vary over the axes over which the operands do."""
    same = alike(*arrays)
    axes = _varying(same[0])
    found = jax.ffi.ffi_call(f"fretwork_{target}", results, vmap_method="sequential")(*same, **attributes)
    return jax.tree.map(lambda x: varying(x, axes), found)  # JAX takes them for the same on all devices


class differentiable:
    """`jax.custom_vjp` of a function of `static` hashable values and arrays. The arrays vary over the same axes."""

    def __init__(self, function: Callable[..., Any], static: int = 0) -> None:
        self._rule, self._static = jax.custom_vjp(function, nondiff_argnums=tuple(range(static))), static

    def defvjp(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        self._rule.defvjp(forward, backward)

    def __call__(self, *arguments: Any) -> Any:
        return self._rule(*arguments[: self._static], *alike(*arguments[self._static :]))


def differentiated_once(op: str, gradient: Callable[..., Any], instead: str) -> Callable[..., Any]:
    """A gradient that has none itself, and says so before JAX names the call behind it."""
    call = jax.custom_jvp(gradient)

    @call.defjvp
    def _(primals: object, tangents: object) -> NoReturn:
        raise NotImplementedError(
            f"{op}: gradient: expected to be differentiated once, got a second time; for second derivatives {instead}"
        )

    return call


def check_layout(op: str, layout: object) -> None:
    if not isinstance(layout, BlockLayout):
        raise TypeError(f"{op}: layout: expected a fretwork.BlockLayout, got {type(layout).__name__}")


# vmap


def fold(x: jax.Array, batched: bool, size: int) -> jax.Array:
    """A mapped dimension becomes part of the batch."""
    many = x if batched else jnp.broadcast_to(x, (size, *x.shape))
    return many.reshape(size * many.shape[1], *many.shape[2:])


def one_by_one(f: Callable[..., Any], batched: Sequence[bool], arguments: tuple[jax.Array, ...]) -> Any:
    """A call for each element of a vmap."""

    def step(mapped: tuple[jax.Array, ...]) -> Any:
        rest = iter(mapped)
        return f(*(next(rest) if many else x for many, x in zip(batched, arguments, strict=True)))

    return jax.lax.map(step, tuple(x for many, x in zip(batched, arguments, strict=True) if many))
