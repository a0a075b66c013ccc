"""Checks of the arguments that public functions take, and what an op is given in their place."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fretwork._checks import flag, number
from fretwork._torch.private import in_forward_mode
from fretwork.patterns import BlockLayout, Pattern

FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# What torch.set_float32_matmul_precision asks for, as the GPU has it.
_PRECISION_OF_TORCH = {"highest": "ieee", "high": "tf32", "medium": "tf32"}
# What to do with an array, by the library that it is of.
_ARRAYS = dict.fromkeys(("jax", "jaxlib"), "; fretwork.jax takes arrays") | {
    "numpy": "; torch.as_tensor makes one of it"
}


def check_tensor(op: str, argument: str, value: object) -> None:
    """Refuses what is no dense tensor, and tangents."""
    if not isinstance(value, Tensor):
        hint = _ARRAYS.get(type(value).__module__.split(".")[0], "")
        raise TypeError(f"{op}: {argument}: expected a torch.Tensor, got {type(value).__name__}{hint}")
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise RuntimeError(f"{op}: {argument}: expected a dense tensor, got one that is {kind}")
    if type(value) is not Tensor and isinstance(value, torch.sparse.SparseSemiStructuredTensor):  # strided, it says
        raise TypeError(f"{op}: {argument}: expected a dense tensor, got {type(value).__name__}; its to_dense() is one")
    # torch would drop a tangent silently.
    if in_forward_mode() and not torch.compiler.is_compiling() and forward_ad.unpack_dual(value).tangent is not None:
        raise NotImplementedError(
            f"{op}: {argument}: expected a tensor without a tangent, got one of forward mode; use torch.autograd.grad"
        )


def as_number(op: str, argument: str, value: Any) -> float:
    """A Python float; a tensor that requires grad is refused, because its gradient would be lost."""
    if type(value) is float:
        return value
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{op}: {argument}: expected a number, got a tensor that requires grad; multiply or add it outside the op"
        )
    return number(op, argument, value)


def transposes(op: str, trans_a: Any, trans_b: Any) -> tuple[bool, bool]:
    """The two flags of a product."""
    return flag(op, "trans_a", trans_a), flag(op, "trans_b", trans_b)


def layout_key(op: str, layout: object) -> str:
    """What stands for the layout inside an op; a graph that may be saved gets the whole text."""
    if not isinstance(layout, BlockLayout):
        raise TypeError(f"{op}: layout: expected a fretwork.BlockLayout, got {type(layout).__name__}")
    return layout.text if torch.compiler.is_exporting() else layout.key


def pattern_keys(patterns: Sequence[Pattern]) -> str:
    """What stands for the patterns inside an op, one on each line; a graph that may be saved gets the whole texts."""
    exporting = torch.compiler.is_exporting()
    if len(patterns) == 1:
        return patterns[0].text if exporting else patterns[0].key
    return "\n".join(p.text if exporting else p.key for p in patterns)


def pattern_key(op: str, pattern: object) -> str:
    """`pattern_keys` of one."""
    if not isinstance(pattern, Pattern):
        raise TypeError(f"{op}: pattern: expected a fretwork.Pattern, got {type(pattern).__name__}")
    return pattern_keys((pattern,))


def precision_name(op: str, name: object) -> str:
    """How fp32 is multiplied on a GPU; None follows torch."""
    if name is None:
        return torch_precision()
    if name not in ("ieee", "tf32", "tf32x3"):
        raise RuntimeError(f"{op}: precision: expected None, ieee, tf32 or tf32x3, got {name!r}")
    return str(name)


@torch.compiler.assume_constant_result  # a compiled graph is guarded on torch's setting anyway
def torch_precision() -> str:
    """What torch's own setting asks for."""
    try:
        return _PRECISION_OF_TORCH[torch.get_float32_matmul_precision()]
    except RuntimeError:  # the user has set torch.backends.cuda.matmul.fp32_precision, and torch answers one way only
        return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def autocasts(x: Tensor) -> bool:
    """Whether autocast is on where x is."""
    return x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)


def dtype_name(dtype: torch.dtype) -> str:
    """As messages and the core have it."""
    return str(dtype).removeprefix("torch.")
