"""Which axes of its operands a call may be cut along: XLA then runs it on each device's part and gathers nothing."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Dims = Sequence[int | None]


class Axis(NamedTuple):
    """The dimension of each argument and of each result; None for those without it.

    Arguments without it are whole on every device. A result without it is a sum over the axis.
    """

    arguments: Dims
    results: Dims


def partitioned(
    call: Callable[..., Sequence[jax.Array]], axes: Sequence[Axis], arguments: Sequence[jax.Array]
) -> Sequence[jax.Array]:
    """`call` of these arguments, a sequence of arrays. It runs on parts of them where they are cut along `axes`."""
    axes = [axis for axis in axes if any(d is not None for d in axis.arguments)]
    if not axes or not all(x.size for x in arguments):
        return call(*arguments)
    results = jax.eval_shape(call, *arguments)
    axes = [_of_several(axis, arguments, results) for axis in axes]
    of_arguments = [[axis.arguments[n] for axis in axes] for n in range(len(arguments))]
    of_results = [[axis.results[n] for axis in axes] for n in range(len(results))]

    def partition(mesh: Mesh, given: Any, made: Any) -> Any:
        operands = [*zip(given, of_arguments, strict=True), *zip(made, of_results, strict=True)]
        names: list[tuple[str, ...] | None] = []
        for n in range(len(axes)):
            taken = {name for found in names for name in found or ()}
            names.append(_names(mesh, [(x, dims[n]) for x, dims in operands], taken))

        def sharding(rank: int, dims: Dims) -> NamedSharding:
            spec: list[Any] = [None] * rank
            for d, name in zip(dims, names, strict=True):
                if d is not None:
                    spec[d] = name
            return NamedSharding(mesh, PartitionSpec(*spec))

        def local(*parts: jax.Array) -> Sequence[jax.Array]:
            found = list(call(*parts))
            for n, dims in enumerate(of_results):
                over = tuple(axis for d, name in zip(dims, names, strict=True) if d is None for axis in name or ())
                if over:
                    found[n] = jax.lax.psum(found[n], over)
            return found

        before = tuple(sharding(len(x.shape), dims) for x, dims in zip(given, of_arguments, strict=True))
        after = [sharding(len(x.shape), dims) for x, dims in zip(made, of_results, strict=True)]
        return mesh, local, after, before

    cut = custom_partitioning(lambda *given: list(call(*given)))
    shapes = [x.shape for x in arguments], of_arguments, [x.shape for x in results], of_results
    # Shardings that name no axes come with a mesh of none, whose size is 0.
    cut.def_partition(partition=partition, sharding_rule=lambda mesh, *_: _rule(*shapes, max(mesh.size, 1)))
    return cut(*arguments)  # type: ignore[no-any-return]


def dims_of_extras(kinds: str, extras: Sequence[jax.Array], dim: int, size: int) -> list[int | None]:
    """Of the batch (0) or the heads (1) of attention: a bias b, slopes s, a seed d, key padding k, sinks z."""
    own = "sz" if dim else "k"
    return [
        (dim if x.shape[dim] == size != 1 else None) if kind == "b" else (0 if kind in own else None)
        for kind, x in zip(kinds, extras, strict=True)
    ]


def _of_several(axis: Axis, arguments: Sequence[Any], results: Sequence[Any]) -> Axis:
    """The axis of the operands that have several elements there: one head for all is whole, and its gradient a sum."""

    def kept(operands: Sequence[Any], dims: Dims) -> Dims:
        return [None if d is None or (several and x.shape[d] == 1) else d for x, d in zip(operands, dims, strict=True)]

    several = any(d is not None and x.shape[d] != 1 for x, d in zip(arguments, axis.arguments, strict=True))
    return Axis(kept(arguments, axis.arguments), kept(results, axis.results))


def _names(mesh: Mesh, places: Sequence[tuple[Any, int | None]], taken: set[str]) -> tuple[str, ...] | None:
    """The axes of the mesh that cut an axis, by the first operand that they cut; None where they do not divide it, or
    cut another one."""
    there = [(x, d) for x, d in places if d is not None]
    for x, d in there:
        spec = getattr(x.sharding, "spec", ())
        found = spec[d] if d < len(spec) else None
        if found:
            names = found if isinstance(found, tuple) else (found,)
            count = 1
            for name in names:
                count *= mesh.shape[name]
            divided = all(t.shape[at] % count == 0 for t, at in there)
            return names if divided and not taken.intersection(names) else None
    return None


def _rule(
    arguments: Sequence[tuple[int, ...]],
    of_arguments: Sequence[Dims],
    results: Sequence[Any],
    of_results: Sequence[Dims],
    devices: int,
) -> SdyShardingRule:
    """Shardy's words for it: a letter for each dimension, the same where an axis passes.

    Heads may be fewer in keys than in queries: the larger dimension is then made of the smaller and another. It has a
    letter of its own if the devices do not divide the smaller: Shardy would cut that all the same.
    """
    operands = [*zip(arguments, of_arguments, strict=True), *zip(results, of_results, strict=True)]
    axes = range(len(of_arguments[0]))
    lengths = [min(shape[d] for shape, dims in operands if (d := dims[n]) is not None) for n in axes]
    alone = (f"w{n}" for n in itertools.count())
    shared: dict[tuple[int, int], str] = {}
    sizes: dict[str, Any] = {}
    whole: list[str] = []

    def words(shape: tuple[int, ...], dims: Dims) -> ArrayMapping:
        found: list[Any] = []
        for d, length in enumerate(shape):
            n = list(dims).index(d) if d in dims else None
            if n is None:
                whole.append(next(alone))
                found.append(whole[-1])
            elif length == lengths[n] or lengths[n] % devices:
                found.append(shared.setdefault((n, length), f"s{len(shared)}"))
            else:
                whole.append(next(alone))
                sizes[whole[-1]] = length // lengths[n]
                smaller = shared.setdefault((n, lengths[n]), f"s{len(shared)}")
                found.append(CompoundFactor(smaller, whole[-1]))
        return ArrayMapping(*found)

    left = tuple(words(shape, dims) for shape, dims in zip(arguments, of_arguments, strict=True))
    right = tuple(words(tuple(shape), dims) for shape, dims in zip(results, of_results, strict=True))
    sums = {n for n in axes if all(dims[n] is None for dims in of_results)}
    special: dict[str, Any] = {
        "need_replication_factors": tuple(whole),
        "reduction_factors": tuple(name for (n, _), name in shared.items() if n in sums),
    }
    known = inspect.signature(SdyShardingRule).parameters  # JAX 0.6 has none of them
    return SdyShardingRule(left, right, **sizes, **{name: of for name, of in special.items() if name in known})
