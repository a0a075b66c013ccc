"""Ops on DTensors: cut along batch or heads, each rank computes its part, and nothing is gathered.

An op has axes along which its results are independent. Operands that are cut along one of them are taken as they are,
whole ones are cut the same way (which sends nothing), and other placements are refused. What each rank computes is the
op on plain tensors, so gradients need no rules of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from torch import Size, Tensor, is_grad_enabled
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard

from fretwork._checks import fail
from fretwork._torch.registration import ops
from fretwork.patterns.block import block_layout


class Axis(NamedTuple):
    """One along which an op may be cut."""

    name: str
    dims: dict[int, int]  # the dimension of each argument that has it
    result: int | tuple[int, ...]  # that of every result, or of each
    whole: tuple[int, ...] = ()  # sizes that ranks must divide

    def of_result(self, n: int) -> int:
        return self.result if isinstance(self.result, int) else self.result[n]


Rule = Callable[[Sequence[Any]], list[Axis]]


def _batch_of(arguments: Sequence[Any], ranks: dict[int, int]) -> Axis | None:
    """Dimension 0 of operands that have so many dimensions, and more than one element there."""
    has = [n for n, rank in ranks.items() if isinstance(arguments[n], Tensor) and arguments[n].dim() == rank]
    cut = {n: 0 for n in has if arguments[n].shape[0] != 1}
    return Axis("batch", cut, 0) if cut else None


def _axes(*axes: Axis | None) -> list[Axis]:
    return [axis for axis in axes if axis is not None]


def _attention(
    arguments: Sequence[Any], bias: int = 5, slopes: int = 6, dropout: int = 8, padding: int = 11, sinks: int = 12
) -> list[Axis]:
    """Batch and heads; the places of the options among the arguments."""
    q, k, rate = arguments[0], arguments[1], arguments[dropout]
    if rate:
        raise NotImplementedError(f"attention: dropout_p: expected 0 on DTensors, got {rate}")
    shared = k.shape[1] == 1  # whole on every rank, beside cut queries
    batch, heads = {0: 0, 1: 0, 2: 0, padding: 0}, {0: 1, **({} if shared else {1: 1, 2: 1}), slopes: 0, sinks: 0}
    given = arguments[bias]
    for axis, dim, size in ((batch, -4, q.shape[0]), (heads, -3, q.shape[1])):
        if given is not None and given.dim() >= -dim and given.shape[dim] == size != 1:
            axis[bias] = given.dim() + dim
    return [Axis("batch", batch, 0), Axis("heads", heads, 1, ((q if shared else k).shape[1],))]


def _dynamic_attention(arguments: Sequence[Any]) -> list[Axis]:
    if arguments[8] is not None:  # packed documents: o has rows first, lse heads
        of_heads = {n: 1 for n in range(3) if arguments[n].shape[1] != 1}
        return [Axis("heads", {**of_heads, 19: 0}, (1, 0), tuple(arguments[n].shape[1] for n in of_heads))]
    axes = _attention(arguments, bias=12, slopes=13, dropout=15, padding=18, sinks=19)
    for dim, axis in enumerate(axes):  # of all elements or heads, or one for all
        axis.dims.update({n: dim for n in range(4, 8) if arguments[n] is not None and arguments[n].shape[dim] != 1})
    return axes


def _select_blocks(arguments: Sequence[Any]) -> list[Axis]:
    """One head of keys has scores of all query heads, which no rank has then."""
    heads = arguments[1].shape[1]
    return [Axis("batch", {0: 0, 1: 0}, 0), *([Axis("heads", {1: 1, 0: 1}, 1, (heads,))] if heads > 1 else [])]


def _per_head(arguments: Sequence[Any]) -> list[Axis]:
    """Of r-operators: (B, H, ·, ·), where heads of the second may be shared."""
    tensors = [n for n, t in enumerate(arguments) if isinstance(t, Tensor)]
    several = [n for n in tensors if arguments[n].shape[1] != 1]  # one head for all is whole on every rank
    heads = tuple(arguments[n].shape[1] for n in several)
    return [Axis("batch", dict.fromkeys(tensors, 0), 0), Axis("heads", dict.fromkeys(several, 1), 1, heads)]


def _product(arguments: Sequence[Any]) -> list[Axis]:
    sums = arguments[6] or arguments[7]  # over what would be cut
    return [] if sums else _axes(_batch_of(arguments, {0: 4, 1: 4}))


def _sparse_product(arguments: Sequence[Any], values: int, dense: int) -> list[Axis]:
    """Of packed values and a dense operand, of which the dimension that is not summed over may be cut too."""
    one_head, x = block_layout(arguments[2]).shape[0] == 1, arguments[dense]
    has_batch = 4 in (arguments[values].dim(), x.dim())
    has_heads = has_batch or x.dim() > 2 or not one_head
    before = has_batch + has_heads  # dimensions of the result before rows and columns
    is_last = bool(arguments[3 + dense]) == (dense == 0)  # transposed or not
    lines = Axis("columns" if dense else "rows", {dense: x.dim() - (1 if is_last else 2)}, before + dense)
    heads = Axis("heads", {dense: x.dim() - 3}, before - 1) if one_head and x.dim() > 2 else None
    return _axes(*_product(arguments), lines, None if arguments[6] or arguments[7] else heads)


def _kronecker(arguments: Sequence[Any]) -> list[Axis]:
    x, bs_last = arguments[0], arguments[4]
    return [Axis("rows", {0: d}, d) for d in (range(1, x.dim()) if bs_last else range(x.dim() - 1))]


def _two_four(arguments: Sequence[Any]) -> list[Axis]:
    dense, product = arguments[2], arguments[8]
    inner = 1 if product == "linear" else 2
    return [Axis("rows", {2: d}, d) for d in range(dense.dim() - inner)]


_RULES: dict[str, Rule] = {
    "attention": _attention,
    "dynamic_attention": _dynamic_attention,
    "select_blocks": _select_blocks,
    "r_sddmm": _per_head,
    "r_softmax": _per_head,
    "r_spmm": _per_head,
    "sdd": _product,
    "dsd": lambda a: _sparse_product(a, 0, 1),
    "dds": lambda a: _sparse_product(a, 1, 0),
    "block_softmax": lambda a: _axes(_batch_of(a, {0: 4, 3: 4, 4: 2})),
    "block_pack": lambda a: _axes(_batch_of(a, {0: 4})),
    "block_unpack": lambda a: _axes(_batch_of(a, {0: 4})),
    "block_conv2d": lambda a: [Axis("batch", {0: 0}, 0)],
    "ksmm": _kronecker,
    "ksmm_chain": _kronecker,
    "two_four_matmul": _two_four,
}


def on_parts(name: str, call: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """An op whose arguments, or lists among them, hold DTensors: `call` on this rank's parts, and DTensors of these."""
    tensors = list(_tensors(arguments))
    mesh = next(t.device_mesh for t in tensors if isinstance(t, DTensor))
    if name not in _RULES:
        raise NotImplementedError(
            f"{name}: arguments: expected plain tensors, got DTensors; to_local() gives this rank's part"
        )
    axes = _RULES[name](arguments)
    chosen = [_chosen(name, arguments, axes, mesh, m) for m in range(mesh.ndim)]
    local = [_each(a, functools.partial(_local, name, n, chosen, mesh)) for n, a in enumerate(arguments)]
    if name == "attention":
        local[3] = _patterns_of(arguments, chosen, mesh)
    results = call(*local)
    wrapped = []
    for n, t in enumerate(results if isinstance(results, tuple) else (results,)):
        placements = [Replicate() if axis is None else Shard(axis.of_result(n)) for axis in chosen]
        shape = _whole_shape(t, n, arguments, chosen)
        wrapped.append(DTensor.from_local(t, mesh, placements, run_check=False, shape=shape, stride=_strides(shape)))
    return tuple(wrapped) if isinstance(results, tuple) else wrapped[0]


def _refuse(name: str, what: int | str, expected: str, got: object) -> NoReturn:
    """An argument of an op, by its place, or something else."""
    argument = what if isinstance(what, str) else getattr(ops, name).default._schema.arguments[what].name
    fail(name.removeprefix("dynamic_"), argument, expected, got)


def _tensors(arguments: Sequence[Any]) -> Any:
    for a in arguments:
        if isinstance(a, Tensor):
            yield a
        elif isinstance(a, (list, tuple)):
            yield from (t for t in a if isinstance(t, Tensor))


def _each(argument: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(argument, (list, tuple)):
        return [change(t) if isinstance(t, Tensor) else t for t in argument]
    return change(argument) if isinstance(argument, Tensor) else argument


def _chosen(name: str, arguments: Sequence[Any], axes: list[Axis], mesh: DeviceMesh, m: int) -> Axis | None:
    """The axis along which dimension m of the mesh cuts the op; None where every operand is whole there."""
    chosen = None
    for n, argument in enumerate(arguments):
        for t in _tensors([argument]):
            placement = t.placements[m] if isinstance(t, DTensor) else Replicate()
            if isinstance(t, DTensor) and t.device_mesh != mesh:
                _refuse(name, n, f"a tensor on {mesh} like others", f"one on {t.device_mesh}")
            if isinstance(placement, (Replicate, Partial)):
                continue
            axis = next((a for a in axes if type(placement) is Shard and a.dims.get(n) == placement.dim), None)
            if axis is None or isinstance(argument, (list, tuple)) or chosen not in (None, axis):
                may = ", ".join(f"Shard({a.dims[n]}) ({a.name})" for a in axes if n in a.dims)
                beside = f" beside one cut along {chosen.name}" if chosen else ""
                _refuse(name, n, f"Replicate(){' or ' if may else ''}{may}", f"{placement}{beside}")
            chosen = axis
    if chosen is not None:
        for size in chosen.whole:
            if size % mesh.size(m):
                _refuse(name, "placements", f"{chosen.name} whose number {mesh.size(m)} ranks divide", size)
    return chosen


def _local(name: str, n: int, chosen: Sequence[Axis | None], mesh: DeviceMesh, t: Tensor) -> Tensor:
    """This rank's part of an argument. What is whole where the op is cut gets a part of its gradient from each rank."""
    if not isinstance(t, DTensor):
        if t.requires_grad and is_grad_enabled():
            _refuse(name, n, "a DTensor, as others are, or a tensor that requires no grad", "a plain tensor")
        t = DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)
    placements: list[Placement] = []
    gradients: list[Placement] = []
    for axis in chosen:
        has = axis is not None and n in axis.dims
        placements.append(Shard(axis.dims[n]) if axis is not None and has else Replicate())
        gradients.append(Partial() if axis is not None and not has else placements[-1])
    return t.redistribute(mesh, placements).to_local(grad_placements=gradients)  # type: ignore[no-any-return]


def _patterns_of(arguments: Sequence[Any], chosen: Sequence[Axis | None], mesh: DeviceMesh) -> str:
    """The patterns of this rank's part: one, one of each head, or those of each element of the batch."""
    lines = arguments[3].split("\n")
    batch, heads = arguments[0].shape[:2]
    if len(lines) == 1:
        return lines[0]
    ranges = {"batch": range(batch), "heads": range(heads)}
    for m, axis in enumerate(chosen):
        if axis is not None:
            whole = ranges[axis.name]
            part = -(-len(whole) // mesh.size(m))  # as Shard cuts
            at = mesh.get_local_rank(m) * part
            ranges[axis.name] = whole[at : at + part]
    rows = ranges["batch"] if len(lines) == batch * heads and batch != 1 else range(1)
    return "\n".join(lines[b * heads + h] for b in rows for h in ranges["heads"])


def _whole_shape(t: Tensor, result: int, arguments: Sequence[Any], chosen: Sequence[Axis | None]) -> Size:
    """A result's shape on all ranks together: where it is cut, the operands say how long it is."""
    shape = list(t.shape)
    for axis in chosen:
        if axis is not None:
            n, dim = next(iter(axis.dims.items()))
            shape[axis.of_result(result)] = arguments[n].shape[dim]
    return Size(shape)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()
