"""A hook that keeps torch's fast paths from bypassing a layer."""

from __future__ import annotations

from torch import nn

from fretwork._torch.private import register_idle_hook


def always_called(layer: nn.Module) -> None:
    """Registers a hook that does nothing. At inference torch's encoder layers read `linear1.weight` themselves unless
    the layer has a hook, and a layer in place of theirs would never be called."""
    register_idle_hook(layer, _nothing)


def _nothing(*_: object) -> None: ...
