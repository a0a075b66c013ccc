"""What keeps a layer in use where torch would go round it."""

from __future__ import annotations

from torch import nn


def always_called(layer: nn.Module) -> None:
    """Hangs a hook that does nothing on a layer. Without one, torch's encoder layers read `linear1.weight` themselves
    at inference, and a layer in place of theirs is never called."""
    layer.register_forward_hook(_nothing)


def _nothing(*_: object) -> None: ...
