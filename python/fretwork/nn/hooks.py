"""A hook that keeps torch's fast paths from bypassing a layer."""

from __future__ import annotations

from torch import nn


def always_called(layer: nn.Module) -> None:
    """Registers a hook that does nothing. At inference torch's encoder layers read `linear1.weight` themselves unless
    the layer has a hook, and a layer in place of theirs would never be called."""
    layer.register_forward_hook(_nothing)


def _nothing(*_: object) -> None: ...
