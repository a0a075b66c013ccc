"""The private interfaces of torch that are used, all of them, each with the reason why no public one does."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad


def in_forward_mode() -> bool:
    """Whether a level of forward-mode differentiation is open.

    `forward_ad.unpack_dual` tells it of one tensor, at several times the cost, and every op asks for every tensor.
    """
    return forward_ad._current_level >= 0


def in_transform() -> bool:
    """Whether a transform of torch.func, such as vmap or grad, is running. torch has no public question for it."""
    return torch._C._functorch.maybe_current_level() is not None


_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active
_tracing = torch._C._get_tracing_state
# Whether autocast is on for any device.
in_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled


def in_eager() -> bool:
    """Whether ops run as they are called: no dispatch mode, transform, tracer of torch.jit or forward-mode
    differentiation is active.

    torch has public questions for some of these, each of which costs as much as all of them here.
    """
    return not (_modes() or _transforms() or _tracing() is not None or in_forward_mode())


# Whether a gradient is many at once, as `torch.autograd.grad(…, is_grads_batched=True)` has them. That is torch's older
# vmap, no transform to `in_eager`: it runs one by one the ops that give tensors, but not those that give a list.
is_batched: Callable[[Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor


def assert_in_graph(condition: Tensor, message: str) -> None:
    """An assertion inside a compiled graph, on the device. Python's own would read the value while tracing."""
    torch._assert_async(condition, message)


# What makes calls short, where microseconds count


def bare(op: Any) -> Callable[..., Any]:
    """What an op's `__call__` calls: one step of Python less."""
    return op._op


# Whether any of its arguments requires grad: one call for all of them.
any_requires_grad: Callable[..., bool] = torch._C._any_requires_grad


def node_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`apply` without the step of Python in front of it, which looks for transforms, as `in_eager` has done, and
    takes tensors out of transforms that have ended: callers have to do that with `alive`."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]


# The tensor itself, or what is in it where it was leaked by a transform that has ended.
alive: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead


def held(module: nn.Module, name: str) -> Any:
    """A module's parameter or buffer. As an attribute it takes five times as long: torch looks here last."""
    for own in (module._parameters, module._buffers):
        if name in own:
            return own[name]
    return getattr(module, name)  # one that is computed, as parametrizations and pruning have it


def whole(t: Tensor) -> Tensor:
    """All of a tensor of which ranks have parts, as `fully_shard` cuts parameters; every rank asks."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t  # type: ignore[no-any-return]


def listed(parameters: nn.ParameterList) -> list[Tensor]:
    """Its tensors. The list's own iterator looks each of them up by name, which takes ten times as long."""
    own = parameters._parameters
    return list(own.values()) if len(own) == len(parameters) else list(parameters)  # type: ignore[arg-type]


def state_of(tensor: Tensor) -> tuple[int, int]:
    """Where its data is, and a count of its in-place changes, for which torch has no public name. Not of inference
    tensors, which count none."""
    return tensor.data_ptr(), tensor._version


class _HooksWithOneIdle(OrderedDict[int, Any]):
    """A module's hooks, false as long as there is only the one that does nothing: then torch skips its code for hooks,
    and `len` still counts it."""

    def __bool__(self) -> bool:
        return len(self) > 1


def register_idle_hook(module: nn.Module, hook: Callable[..., None]) -> None:
    """A forward hook that is there but need not run. A public one costs each call more than a microsecond."""
    module._forward_hooks = _HooksWithOneIdle(module._forward_hooks)
    module.register_forward_hook(hook)


def gpu_sleep(clocks: int) -> None:
    """Keeps the current GPU busy for so many of its clocks, in stream order. torch has no public call that does."""
    torch.cuda._sleep(clocks)
