"""Sparse linear layers cut over the ranks of a mesh, as styles for `torch.distributed.tensor.parallel`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from fretwork._torch.two_four import group_of
from fretwork.distributed._exchange import explained
from fretwork.kronecker import ksmm_chain
from fretwork.nn import BlockSparseLinear, KSLinear, SemiSparseLinear
from fretwork.patterns import BlockLayout

__all__ = ["ColwiseParallel", "RowwiseParallel"]

_LAYERS = (BlockSparseLinear, SemiSparseLinear, KSLinear)


class Cut(NamedTuple):
    """Which of the layer's features this rank takes: of the output, or else of the input."""

    op: str
    rank: int
    world: int
    of_output: bool

    def range_of(self, features: int, unit: int) -> tuple[int, int]:
        """This rank's equal part, in whole units."""
        if features % (self.world * unit):
            name = "out_features" if self.of_output else "in_features"
            whole = f"{self.world} ranks" + (f" · {unit}, the smallest part of the weight" if unit > 1 else "")
            raise ValueError(f"{self.op}: {name}: expected a multiple of {whole}, got {features}")
        part = features // self.world
        return self.rank * part, (self.rank + 1) * part


class _Style(ParallelStyle):
    """Cuts a layer of Fretwork in place."""

    of_output: bool

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        op = type(self).__name__
        if not isinstance(module, _LAYERS):
            names = ", ".join(layer.__name__ for layer in _LAYERS)
            raise TypeError(f"{op}: module: expected one of {names}, got {type(module).__name__}")
        if device_mesh.ndim != 1:
            raise ValueError(f"{op}: device_mesh: expected one dimension, got {device_mesh.ndim}")
        cut = Cut(op, device_mesh.get_local_rank(), device_mesh.size(), self.of_output)
        with torch.no_grad():
            local = next(rule for layer, rule in _CUTS.items() if isinstance(module, layer))(module, cut)
        bias = None if self.of_output else module.bias
        in_features, out_features = module.in_features, module.out_features
        module._parameters.clear()
        module._buffers.clear()
        module._modules.clear()
        changed: Any = module  # the parent keeps the very object
        changed.__class__ = ColwiseLinear if self.of_output else RowwiseLinear
        changed._take(local, bias, device_mesh, (in_features, out_features), cut)
        return module


class ColwiseParallel(_Style):
    """Cuts a `BlockSparseLinear`, `SemiSparseLinear` or `KSLinear` along its output features, in equal parts.

    A style for `torch.distributed.tensor.parallel.parallelize_module`, beside torch's own. The layer takes an input
    that every rank has and gives this rank's features, plain tensors both; the gradient of the input is added over
    ranks. Each rank holds its part of the weight under a name of its own (`shard1of4`), so that a distributed
    checkpoint has all of them. A Kronecker factor that cannot be cut is whole on every rank, with the same gradient.

    >>> import torch, torch.distributed as dist, fretwork as fw, fretwork.distributed as fd
    >>> from torch.distributed.tensor.parallel import parallelize_module
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = torch.nn.ModuleDict({"up": fw.nn.SemiSparseLinear(64, 128), "down": fw.nn.SemiSparseLinear(128, 64)})
    >>> mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    >>> model = parallelize_module(model, mesh, {"up": fd.ColwiseParallel(), "down": fd.RowwiseParallel()})
    >>> model["down"](model["up"](torch.randn(3, 64))).shape
    torch.Size([3, 64])
    >>> dist.destroy_process_group()
    """

    of_output = True


class RowwiseParallel(_Style):
    """Cuts a `BlockSparseLinear`, `SemiSparseLinear` or `KSLinear` along its input features, in equal parts.

    The layer takes this rank's features, as `ColwiseParallel` gives them, and gives the whole output on every rank: the
    sum of all parts, to which the bias is added once. Otherwise as `ColwiseParallel`, which has an example.
    """

    of_output = False


class _ParallelLinear(nn.Module):
    """What a layer has become: this rank's part of it."""

    in_features: int
    out_features: int
    _name: str

    def _take(
        self, local: nn.Module, bias: nn.Parameter | None, mesh: DeviceMesh, features: tuple[int, int], cut: Cut
    ) -> None:
        self.in_features, self.out_features = features
        self._group, self._name, self._world = mesh.get_group(), f"shard{cut.rank}of{cut.world}", cut.world
        if isinstance(local, KroneckerShard):
            local.group = self._group
        self.add_module(self._name, local.train(self.training))
        if not cut.of_output:
            self.register_parameter("bias", bias)

    @property
    def local(self) -> nn.Module:
        """This rank's part, a layer."""
        return self._modules[self._name]  # type: ignore[return-value]

    def _check(self, x: Any, features: int) -> None:
        name = type(self).__name__
        if not isinstance(x, Tensor) or hasattr(x, "to_local"):
            raise TypeError(f"{name}: x: expected a plain tensor, got {type(x).__name__}")
        first = isinstance(self.local, KroneckerShard) and self.local.bs_last
        if x.dim() < 1 or x.shape[0 if first else -1] != features:
            expected = f"({features}, …)" if first else f"(…, {features})"
            raise RuntimeError(f"{name}: x: expected {expected}, got {tuple(x.shape)}")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class ColwiseLinear(_ParallelLinear):
    """A layer of which this rank has a part of the output features."""

    def forward(self, x: Tensor) -> Tensor:
        self._check(x, self.in_features)
        return self.local(copied(x, self._group))  # type: ignore[no-any-return]


class RowwiseLinear(_ParallelLinear):
    """A layer of which this rank has a part of the input features."""

    bias: nn.Parameter | None

    def forward(self, x: Tensor) -> Tensor:
        self._check(x, self.in_features // self._world)
        y = summed(self.local(x), self._group)
        if self.bias is None:
            return y
        first = isinstance(self.local, KroneckerShard) and self.local.bs_last
        bias = self.bias.to(y.dtype)  # which autocast may have chosen
        return y + (bias.view(-1, *(1,) * (y.dim() - 1)) if first else bias)


# How ranks share what they compute


def copied(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The same on every rank; each computes a part from it, so gradients are added."""
    return _Copied.apply(x, group)  # type: ignore[no-any-return]


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks, from which each computes the same."""
    return _Summed.apply(x, group)  # type: ignore[no-any-return]


def _sum_over(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    if group.size() == 1:
        return x
    total = x.clone(memory_format=torch.contiguous_format)
    with explained("parallel layer"):
        dist.all_reduce(total, group=group)
    return total


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Summed.apply(gradients[0], ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _sum_over(group, x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Copied.apply(gradients[0], ctx.group), None


# Parts of layers


def _part(parameter: nn.Parameter, part: Tensor) -> nn.Parameter:
    """A parameter with a copy, so that the whole can be freed."""
    return nn.Parameter(part.detach().clone(memory_format=torch.contiguous_format), parameter.requires_grad)


def _bias_of(layer: nn.Module, cut: Cut, features: tuple[int, int]) -> nn.Parameter | None:
    bias = layer.bias if cut.of_output else None
    return None if bias is None else _part(bias, bias[features[0] : features[1]])  # type: ignore[arg-type, index]


def _cut_blocks(layer: BlockSparseLinear, cut: Cut) -> BlockSparseLinear:
    """Whole block rows, or columns."""
    layout = layer.layout
    rows, cols = layout.block_shape
    blocks = layout.numpy_mask()[0, ::rows, ::cols]
    unit, features = (rows, layer.out_features) if cut.of_output else (cols, layer.in_features)
    first, last = cut.range_of(features, unit)
    begin, end = first // unit, last // unit
    places = blocks.nonzero()[0 if cut.of_output else 1]
    mine = torch.from_numpy((places >= begin) & (places < end)).to(layer.weight.device)
    kept = BlockLayout(blocks[begin:end] if cut.of_output else blocks[:, begin:end], (rows, cols))
    _, out_features, in_features = kept.shape
    bias = _bias_of(layer, cut, (first, last))
    local = BlockSparseLinear(in_features, out_features, kept, bias is not None, "meta", layer.weight.dtype)
    local.weight = _part(layer.weight, layer.weight[mine])
    local.bias = bias
    return local


def _cut_two_four(layer: SemiSparseLinear, cut: Cut) -> SemiSparseLinear:
    """Along the output freely; along the input at whole groups, or whole words of metadata where there are some."""
    values = layer.trainable == "values"
    weight = layer.values if values else layer.weight
    group = group_of(weight.dtype)
    if cut.of_output:
        unit, features = (group if layer.prune == "transposable" and not values else 1), layer.out_features
    else:
        unit, features = group * (2 * layer.metadata.element_size() if values else 1), layer.in_features
    first, last = cut.range_of(features, unit)

    def part(t: Tensor, per: int) -> Tensor:
        """Rows, or columns of which each stands for so many features."""
        return t[first:last] if cut.of_output else t[:, first // per : last // per]

    bias = _bias_of(layer, cut, (first, last))
    sizes = (layer.in_features, last - first) if cut.of_output else (last - first, layer.out_features)
    prune = None if values else layer.prune
    local = SemiSparseLinear(
        *sizes, bias is not None, "meta", weight.dtype, prune=prune, trainable=layer.trainable, decay=layer.decay
    )
    if values:
        local.prune = layer.prune
        local.values, local.metadata = _part(layer.values, part(weight, 2)), part(layer.metadata, unit).contiguous()
    else:
        local.weight = _part(layer.weight, part(weight, 1))
    local.bias = bias
    return local


class KroneckerShard(nn.Module):
    """This rank's part of a chain of Kronecker-sparse factors.

    Cut along the output, the last factors have parts of their weights, which see a range of what the factors before
    them give; those are whole. Cut along the input it is the first factors that have parts, and their results fill a
    range of what the whole ones after them take.
    """

    def __init__(self, layer: KSLinear, cut: Cut) -> None:
        super().__init__()
        self.algo, self.bs_last = layer.algo, layer.bs_last
        features = layer.out_features if cut.of_output else layer.in_features
        at = cut.range_of(features, 1)
        self.bias = _bias_of(layer, cut, at)
        order = list(layer.weights)[::-1] if cut.of_output else list(layer.weights)
        parts: list[nn.Parameter] = []
        for w in order:
            a, sides = w.shape[0], (w.shape[1], w.shape[2])
            near, far = sides if cut.of_output else sides[::-1]
            d = w.shape[3]
            if a % cut.world == 0:  # whole blocks of the diagonal, and so of the factor beyond
                i = a // cut.world
                parts.append(_part(w, w[cut.rank * i : (cut.rank + 1) * i]))
                at = cut.rank * i * far * d, (cut.rank + 1) * i * far * d
                continue
            if cut.world % a == 0 and a * near % cut.world == 0:  # some of the lines of one block
                begin, end = at[0] // d, at[1] // d
                i, lines = begin // near, slice(begin % near, (end - 1) % near + 1)
                parts.append(_part(w, w[i : i + 1, lines] if cut.of_output else w[i : i + 1, :, lines]))
                at = i * far * d, (i + 1) * far * d
            break
        whole = order[len(parts) :]
        self.at = at
        # Features between the parts and the whole factors, of which the parts have a range.
        w = order[len(parts)] if whole else order[-1]
        lines = w.shape[1] if cut.of_output == bool(whole) else w.shape[2]
        self.width = w.shape[0] * lines * w.shape[3]
        self.cuts_output = cut.of_output
        self.parts = nn.ParameterList(parts[::-1] if cut.of_output else parts)
        self.whole = nn.ParameterList(whole[::-1] if cut.of_output else whole)
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.cuts_output:
            return self._multiply(self._narrowed(self._multiply(x, self._shared())), [*self.parts], self.bias)
        return self._multiply(self._padded(self._multiply(x, [*self.parts])), self._shared())

    def _shared(self) -> list[Tensor]:
        """Factors that every rank has: each sees a part of their gradient."""
        return [w if self.group is None else copied(w, self.group) for w in self.whole]

    def _multiply(self, x: Tensor, weights: list[Tensor], bias: Tensor | None = None) -> Tensor:
        if weights:
            return ksmm_chain(x, weights, self.bs_last, bias, algo=self.algo)
        if bias is None:
            return x
        return x + (bias.view(-1, *(1,) * (x.dim() - 1)) if self.bs_last else bias)

    def _narrowed(self, x: Tensor) -> Tensor:
        return (
            x
            if self.at == (0, self.width)
            else x.narrow(0 if self.bs_last else -1, self.at[0], self.at[1] - self.at[0])
        )

    def _padded(self, x: Tensor) -> Tensor:
        around = self.at[0], self.width - self.at[1]
        if around == (0, 0):
            return x
        return F.pad(x, (0, 0) * (x.dim() - 1) + around) if self.bs_last else F.pad(x, around)

    def extra_repr(self) -> str:
        return ", ".join(
            f"{name}={[tuple(w.shape) for w in weights]}"
            for name, weights in (("parts", self.parts), ("whole", self.whole))
        )


_CUTS: dict[type, Any] = {
    BlockSparseLinear: _cut_blocks,
    SemiSparseLinear: _cut_two_four,
    KSLinear: KroneckerShard,
}
