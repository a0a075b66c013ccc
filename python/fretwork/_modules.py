"""Modules of a model under all of their names, and what takes their places."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn


def all_names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Every module once, with its names; the first is that of `named_modules`. The model's own is ""."""
    found: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(module, []).append(name)
    return found


def put(model: nn.Module, layers: Mapping[Any, nn.Module]) -> None:
    """Puts each layer where its key is, under every name.

    A `torch.nn.TransformerEncoder` around it packs padded batches no more: it would read `weight` of its own linear
    layers for that, and layers in their places take no nested tensors.
    """
    for module, names in all_names(model).items():
        for name in names if module in layers else ():
            model.set_submodule(name, layers[module])
    linears = {layer for module, layer in layers.items() if isinstance(module, nn.Linear)}
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and not linears.isdisjoint(encoder.modules()):
            encoder.use_nested_tensor = False


def sharing(layer: nn.Module, bias: nn.Parameter | None) -> nn.Module:
    """A layer with the same parameters and buffers but for its bias."""
    twin = copy.copy(layer)
    vars(twin).update({name: dict(vars(layer)[name]) for name in ("_parameters", "_buffers", "_modules")})
    twin.register_parameter("bias", bias)
    return twin
