"""The private interfaces of torch that are used, all of them, each with the reason why no public one does."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def in_forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is open.

    `forward_ad.unpack_dual` tells it of one tensor, at several times the cost, and every op asks for every tensor.
    """
    return forward_ad._current_level >= 0


def in_transform() -> bool:
    """Whether a transform of torch.func, such as vmap or grad, is running. torch has no public question for it."""
    return torch._C._functorch.maybe_current_level() is not None


def assert_in_graph(condition: Tensor, message: str) -> None:
    """An assertion inside a compiled graph, on the device. Python's own would read the value while tracing."""
    torch._assert_async(condition, message)


def bare(op: Any) -> Callable[..., Any]:
    """What an op's `__call__` calls: one step of Python less, where microseconds count."""
    return op._op
