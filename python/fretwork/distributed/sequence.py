"""Tensors cut along their sequence and put together again, with gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fretwork._checks import fail, whole_number
from fretwork._torch.arguments import check_tensor
from fretwork.distributed._exchange import agreed, checked_group, explained
from fretwork.distributed.shards import Shards

__all__ = ["gather", "scatter"]


def scatter(x: Tensor, shards: Shards, dim: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """This rank's rows of a tensor that every rank has: those of `shards` along `dim`. Nothing is sent.

    Ranks are expected to go on as one process would, so the gradient is that of the whole: backward, every rank gets
    the rows of all.

    >>> import torch, torch.distributed as dist, fretwork as fw, fretwork.distributed as fd
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> shards = fd.shard(fw.patterns.causal(8), world_size=1)
    >>> x = torch.arange(16.0).reshape(2, 8)
    >>> torch.equal(fd.gather(fd.scatter(x, shards, 1), shards, 1), x)
    True
    >>> dist.destroy_process_group()
    """
    group, dim, sizes = _checked("scatter", x, shards, dim, group)
    if x.shape[dim] != sum(sizes):
        fail("scatter", "x", f"{sum(sizes)} rows in dimension {dim}", f"{x.shape[dim]} in {tuple(x.shape)}")
    return _Scatter.apply(x, dim, sizes, group)  # type: ignore[no-any-return]


def gather(local: Tensor, shards: Shards, dim: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """The whole tensor on every rank, from each rank's rows along `dim`.

    Every rank is expected to compute the same from it, as one process would: the gradient of its rows is that part of
    its own gradient. Where ranks compute different things, add the gradients of the whole first (`all_reduce`).

    >>> import torch, torch.distributed as dist, fretwork as fw, fretwork.distributed as fd
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> fd.gather(torch.ones(3, 8), fd.shard(fw.patterns.causal(8), 1), dim=1).shape
    torch.Size([3, 8])
    >>> dist.destroy_process_group()
    """
    group, dim, sizes = _checked("gather", local, shards, dim, group)
    own = sizes[group.rank()]
    if local.shape[dim] != own:
        fail(
            "gather",
            "local",
            f"{own} rows in dimension {dim}, this rank's",
            f"{local.shape[dim]} in {tuple(local.shape)}",
        )
    return _Gather.apply(local, dim, sizes, group)  # type: ignore[no-any-return]


def _checked(
    op: str, x: Tensor, shards: Shards, dim: int, group: dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup, int, tuple[int, ...]]:
    """The group, the dimension counted from 0, and each rank's rows."""
    name = "x" if op == "scatter" else "local"
    check_tensor(op, name, x)
    if not isinstance(shards, Shards):
        raise TypeError(f"{op}: shards: expected what fd.shard returns, got {type(shards).__name__}")
    dim, group = whole_number(op, "dim", dim), checked_group(op, group)
    if not -x.dim() <= dim < x.dim():
        fail(op, "dim", f"one of the {x.dim()} dimensions of {name}", dim)
    if len(shards.ranges) != group.size():
        fail(op, "shards", f"{group.size()} ranges, one for each rank of the group", len(shards.ranges))
    return group, dim % x.dim(), tuple(last - first for first, last in shards.ranges)


def _own(x: Tensor, dim: int, sizes: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    rank = group.rank()
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank])


def _all(op: str, local: Tensor, dim: int, sizes: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """Everyone's rows. Parts of different sizes travel padded to the longest."""
    if group.size() == 1:
        return local
    rows = local.movedim(dim, 0).contiguous()
    key = tuple(rows.shape[1:]), local.dtype, dim, sizes
    agreed(op, group, key, lambda: {"shards": sizes, "dim": dim, "local": key[:2]}, local.device)
    is_byte = rows.element_size() == 1  # bool and float8, which not every transport knows
    rows = rows.view(torch.uint8) if is_byte else rows
    most = max(sizes)
    padded = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, most - rows.shape[0]))
    every = padded.new_empty((group.size() * most, *rows.shape[1:]))
    with explained(op):
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from torch 2.13 on
        gather(every, padded.contiguous(), group=group)
    parts = [part[:size] for part, size in zip(every.split(most or 1), sizes, strict=False)]
    whole = torch.cat(parts) if parts else every
    return (whole.view(local.dtype) if is_byte else whole).movedim(0, dim).contiguous()


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, sizes: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        ctx.how = dim, sizes, group
        return _own(x, dim, sizes, group).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _Gather.apply(gradients[0], *ctx.how), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, sizes: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
        ctx.how = dim, sizes, group
        return _all("gather", local, dim, sizes, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _Scatter.apply(gradients[0], *ctx.how), None, None, None
