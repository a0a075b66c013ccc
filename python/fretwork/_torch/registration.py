"""Loads the library that registers the ops with torch, and what the rules of every family share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fretwork._library import library_path
from fretwork._shapes import Operand
from fretwork._torch.arguments import autocasts
from fretwork.patterns.pattern import TRACED_AS_CONSTANTS, parsed

torch.ops.load_library(str(library_path("fretwork_torch")))
ops = torch.ops.fretwork
_implementations = torch.library.Library("fretwork", "IMPL")  # registrations last as long as this object

# So that torch.load takes patterns, those of version 0.1 too.
torch.serialization.add_safe_globals([parsed, (parsed, "fretwork.pattern._parsed")])
for _function in TRACED_AS_CONSTANTS:
    torch.compiler.assume_constant_result(_function)


def operand(name: str, tensor: Tensor) -> Operand:
    """A tensor as the checks see it."""
    return Operand(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), str(tensor.device))


def register_autocast(op: str, cast: Callable[..., Any], call: Callable[..., Any]) -> None:
    """Under autocast runs `call` in the place of an op, on what `cast` makes of the arguments.

    `torch.library.register_autocast` casts to one dtype, named at registration; these ops follow autocast's own.
    """

    def autocast(*arguments: Any) -> Any:
        with torch.autocast(arguments[0].device.type, enabled=False):
            return call(*cast(*arguments))

    for device in ("CPU", "CUDA"):
        _implementations.impl(op, autocast, f"Autocast{device}")


def cast_first(count: int) -> Callable[..., Any]:
    """Casts the first `count` arguments as torch casts the operands of a matmul."""

    def cast(*arguments: Any) -> tuple[Any, ...]:
        dtype = torch.get_autocast_dtype(arguments[0].device.type)
        return *(lowered(t, dtype) for t in arguments[:count]), *arguments[count:]

    return cast


def lowered(operand: Any, dtype: torch.dtype) -> Any:
    """A tensor or a list of them in autocast's dtype; float64 and what is not floating stay, and so does None."""
    if isinstance(operand, (list, tuple)):
        return [lowered(tensor, dtype) for tensor in operand]
    if operand is None or not operand.is_floating_point() or operand.dtype == torch.float64:
        return operand
    return operand.to(dtype)


def as_autocast_has(*operands: Tensor) -> tuple[Tensor, ...]:
    """The operands of an op, of which autocast, where it is on, makes one dtype: for checks that come before the op."""
    if not autocasts(operands[0]):
        return operands
    dtype = torch.get_autocast_dtype(operands[0].device.type)
    return tuple(lowered(t, dtype) for t in operands)


@torch.library.register_fake("fretwork::_nothing")
def _nothing_fake(x: Tensor) -> Tensor:
    """Of the op that does nothing, by which benchmarks measure what a call costs."""
    return x.new_empty(x.shape)
