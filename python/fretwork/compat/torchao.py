"""torchao's names for sparse weights: `from fretwork.compat.torchao import sparsify_, semi_sparse_weight`.

`sparsify_`, `semi_sparse_weight` (`SemiSparseWeightConfig`), `block_sparse_weight` (`BlockSparseWeightConfig`),
`apply_fake_sparsity`, and of torchao.sparsity.training `SemiSparseLinear`, `swap_linear_with_semi_sparse_linear` and
`swap_semi_sparse_linear_with_linear`.

Differences: everything works on CPU and GPU, in every floating dtype (float32 keeps one of two) and for any number of
rows. A weight that is not 2:4 is refused, not cut; `apply_fake_sparsity` cuts it before. `sparsify_` puts layers of
`fw.nn` in the places of `torch.nn.Linear`, so that state dicts have their keys. Names in the config of
`swap_linear_with_semi_sparse_linear` that the model has not are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fretwork import two_four
from fretwork._checks import refuse
from fretwork._modules import all_names, put
from fretwork.nn.block_sparse_linear import BlockSparseLinear
from fretwork.nn.hooks import always_called
from fretwork.nn.semi_sparse_linear import SemiSparseLinear as _Compressed
from fretwork.nn.semi_sparse_linear import pruned_linear
from fretwork.patterns import BlockLayout
from fretwork.recipes import Block, TwoFour, is_linear

__all__ = [
    "BlockSparseWeightConfig",
    "SemiSparseLinear",
    "SemiSparseWeightConfig",
    "apply_fake_sparsity",
    "block_sparse_weight",
    "semi_sparse_weight",
    "sparsify_",
    "swap_linear_with_semi_sparse_linear",
    "swap_semi_sparse_linear_with_linear",
]

Filter = Callable[[nn.Module, str], bool]


@dataclass
class SemiSparseWeightConfig:
    """Weights that are 2:4 already, compressed."""


@dataclass
class BlockSparseWeightConfig:
    """Weights without their blocks of zeros."""

    blocksize: int = 64


semi_sparse_weight = SemiSparseWeightConfig
block_sparse_weight = BlockSparseWeightConfig


def sparsify_(
    model: nn.Module, config: SemiSparseWeightConfig | BlockSparseWeightConfig, filter_fn: Filter | None = None
) -> nn.Module:
    """Compresses the weights of linear layers in place, and returns the model. They require no gradient then.

    `filter_fn(module, name)` says which layers; without it, all of them.

    >>> import torch
    >>> from fretwork.compat.torchao import apply_fake_sparsity, semi_sparse_weight, sparsify_
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32).bfloat16())
    >>> apply_fake_sparsity(model)
    >>> sparsify_(model, semi_sparse_weight())
    Sequential(
      (0): SemiSparseLinear(in_features=64, out_features=32, bias=True, prune=None, trainable=values, kept=2:4)
    )
    """
    if not isinstance(config, (SemiSparseWeightConfig, BlockSparseWeightConfig)):
        refuse("sparsify_", "config", "semi_sparse_weight() or block_sparse_weight()", repr(config), TypeError)
    recipe = TwoFour(prune=None) if isinstance(config, SemiSparseWeightConfig) else Block(config.blocksize)
    chosen = _chosen("sparsify_", model, filter_fn)
    with torch.no_grad():
        for linear, name in chosen.items():
            if (reason := recipe.refusal(linear)) is not None:
                raise ValueError(f"sparsify_: {name}: {reason}")
        layers = {linear: _compressed(linear, recipe) for linear in chosen}
    for layer in layers.values():
        layer.requires_grad_(False)
    if model in layers:
        return layers[model]
    put(model, layers)
    return model


def _compressed(linear: nn.Linear, recipe: TwoFour | Block) -> nn.Module:
    layer: nn.Module
    if isinstance(recipe, TwoFour):
        layer = _Compressed.from_dense(linear, prune=None)
    else:
        rows, cols = recipe.block_shape
        blocks = linear.weight.detach().unflatten(0, (-1, rows)).unflatten(2, (-1, cols))
        layer = BlockSparseLinear.from_dense(linear, BlockLayout((blocks != 0).any(3).any(1), recipe.block))
    layer.register_parameter("bias", linear.bias)
    return layer


def _chosen(op: str, model: nn.Module, filter_fn: Filter | None) -> dict[nn.Linear, str]:
    """Linear layers by their first name."""
    if not isinstance(model, nn.Module):
        refuse(op, "model", "a torch.nn.Module", type(model).__name__, TypeError)
    if filter_fn is not None and not callable(filter_fn):
        refuse(op, "filter_fn", "a function of a module and its name", repr(filter_fn), TypeError)
    chosen = {}
    for module, (name, *_) in all_names(model).items():
        if is_linear(module) if filter_fn is None else filter_fn(module, name):
            if not isinstance(module, nn.Linear):
                refuse(op, "filter_fn", "True for torch.nn.Linear alone", f"True for {name}, a {type(module).__name__}")
            chosen[module] = name
    return chosen


def apply_fake_sparsity(model: nn.Module, **kwargs: Any) -> None:
    """Prunes the weights of linear layers to 2:4 by magnitude, in place; they stay dense. `filter_fn` as `sparsify_`.

    >>> import torch, fretwork as fw
    >>> from fretwork.compat.torchao import apply_fake_sparsity
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32).half())
    >>> apply_fake_sparsity(model)
    >>> fw.two_four.check(model[0].weight)
    (True, None)
    """
    filter_fn = kwargs.pop("filter_fn", None)
    if kwargs:
        refuse("apply_fake_sparsity", "arguments", "filter_fn alone", ", ".join(kwargs), TypeError)
    chosen = _chosen("apply_fake_sparsity", model, filter_fn)
    with torch.no_grad():
        pruned = {linear: _pruned(linear, name) for linear, name in chosen.items()}
        for linear, weight in pruned.items():
            linear.weight.copy_(weight)


def _pruned(linear: nn.Linear, name: str) -> Tensor:
    try:
        return two_four.prune(linear.weight)
    except RuntimeError as error:
        raise ValueError(f"apply_fake_sparsity: {name}: weight: {error}") from None


class SemiSparseLinear(nn.Linear):
    """A `torch.nn.Linear` whose weight is pruned at every forward pass, so that it and its transpose are 2:4.

    `fw.nn.SemiSparseLinear` with trainable="dense" and prune="transposable" computes the same.

    >>> import torch
    >>> from fretwork.compat.torchao import SemiSparseLinear
    >>> linear = torch.nn.Linear(64, 32).bfloat16()
    >>> layer = SemiSparseLinear.from_dense(linear)
    >>> layer(torch.randn(5, 64).bfloat16()).shape, layer.weight is linear.weight
    (torch.Size([5, 32]), True)
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        always_called(self)

    def forward(self, x: Tensor) -> Tensor:
        return pruned_linear(x, self.weight, self.bias, transposable=True)

    @classmethod
    def from_dense(cls, linear: nn.Linear) -> SemiSparseLinear:
        """A layer with the same parameters."""
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"SemiSparseLinear: linear: expected a torch.nn.Linear, got {type(linear).__name__}")
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, "meta", linear.weight.dtype)
        return _with_parameters_of(layer, linear)  # type: ignore[return-value]

    @classmethod
    def to_dense(cls, semi_sparse_linear: nn.Linear) -> nn.Linear:
        """A `torch.nn.Linear` with the same parameters, not pruned."""
        sizes = semi_sparse_linear.in_features, semi_sparse_linear.out_features
        return _with_parameters_of(nn.Linear(*sizes, semi_sparse_linear.bias is not None, "meta"), semi_sparse_linear)


def _with_parameters_of(layer: nn.Linear, other: nn.Linear) -> nn.Linear:
    layer.weight = other.weight
    layer.register_parameter("bias", other.bias)
    return layer.train(other.training)


def swap_linear_with_semi_sparse_linear(model: nn.Module, config: Mapping[str, Any], current: str = "") -> None:
    """Replaces the linear layers that `config` names, by `config[name].from_dense(linear)`, in place.

    >>> import torch
    >>> from fretwork.compat.torchao import SemiSparseLinear, swap_linear_with_semi_sparse_linear
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 64))
    >>> swap_linear_with_semi_sparse_linear(model, {"0": SemiSparseLinear})
    >>> type(model[0]).__name__, type(model[1]).__name__
    ('SemiSparseLinear', 'Linear')
    """
    op = "swap_linear_with_semi_sparse_linear"
    if not isinstance(model, nn.Module):
        refuse(op, "model", "a torch.nn.Module", type(model).__name__, TypeError)
    if not isinstance(config, Mapping):
        refuse(op, "config", "a dict of names and layer classes", type(config).__name__, TypeError)
    prefix = f"{current}." if current else ""
    named = {prefix + name: module for module, names in all_names(model).items() for name in names if name}
    layers = {}
    for name, kind in config.items():
        if not name.startswith(prefix):
            continue
        linear = named.get(name)
        if not isinstance(linear, nn.Linear):
            got = "none" if linear is None else type(linear).__name__
            refuse(op, f"config[{name!r}]", "the name of a torch.nn.Linear", got)
        if not hasattr(kind, "from_dense"):
            refuse(op, f"config[{name!r}]", "a layer class with from_dense, as SemiSparseLinear", repr(kind), TypeError)
        layers[linear] = kind.from_dense(linear)
    put(model, layers)


def swap_semi_sparse_linear_with_linear(model: nn.Module, current: str = "") -> None:
    """The way back: layers of `SemiSparseLinear` become `torch.nn.Linear` with the same parameters, in place."""
    if not isinstance(model, nn.Module):
        refuse("swap_semi_sparse_linear_with_linear", "model", "a torch.nn.Module", type(model).__name__, TypeError)
    found = [module for module in model.modules() if isinstance(module, SemiSparseLinear) and module is not model]
    put(model, {module: module.to_dense(module) for module in found})
