"""Ops with gradient rules, called by the shortest way.

torch runs the rules of `torch.library.register_autograd` in Python at every call, and its own layers around them, which
costs several times what a plain `autograd.Function` does. So rules are registered with torch for whatever traces, maps
or intercepts ops, and an eager call that nothing looks at makes the same node itself, around the op's twin, which has
no rules (`define_twins` in bindings/torch/call.h).
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling

from fretwork._torch.arguments import autocasts
from fretwork._torch.private import alive, any_requires_grad, bare, in_autocast, in_eager, node_apply
from fretwork._torch.registration import ops, register_autocast
from fretwork._torch.vmap import one_by_one

Rule = Callable[..., Any]

# Subclasses of Tensor may intercept ops: torch has to see them, and lists, which may hold them. Tuples hold numbers.
_TENSORS = frozenset((Tensor, nn.Parameter))
_PLAIN = frozenset((Tensor, nn.Parameter, str, bool, int, float, tuple, type(None), torch.dtype))


def called_eagerly(arguments: Iterable[object]) -> bool:
    """Whether nothing but autograd and autocast sees a call: no compiler, mode, transform or subclass of Tensor."""
    return not is_compiling() and in_eager() and _PLAIN.issuperset(map(type, arguments))


def called_plainly(arguments: Iterable[object]) -> bool:
    """The same without autocast."""
    return called_eagerly(arguments) and not in_autocast()


def called_with_tensors(*arguments: object) -> bool:
    """Whether a call is plain and all of these are tensors, so that an op may check them."""
    return not is_compiling() and in_eager() and not in_autocast() and _TENSORS.issuperset(map(type, arguments))


def holds_dtensors(arguments: Iterable[object]) -> bool:
    """Whether there is a DTensor among them. Their module takes long to import, so it may not be there."""
    tensor = sys.modules.get("torch.distributed.tensor")
    return tensor is not None and not is_compiling() and any(isinstance(a, tensor.DTensor) for a in arguments)


def on_parts(name: str, call: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """An op on DTensors."""
    from fretwork.distributed import _dtensor

    return _dtensor.on_parts(name, call, arguments)


class DifferentiableOp:
    """The op `fretwork::name`, with rules to be registered."""

    __slots__ = ("_cast", "_defaults", "name", "node", "op", "plain")

    def __init__(self, name: str) -> None:
        self.name = name
        self._cast: Rule | None = None
        self.op = getattr(ops, name).default
        self.plain = bare(getattr(ops, f"_{name}").default)
        # Rules see all arguments. The dispatcher, where a call went through it, has dropped those that are defaults.
        self._defaults = tuple(argument.default_value for argument in self.op._schema.arguments)

    def register_fake(self, fake: Rule) -> Rule:
        """Decorates the function that knows the result's shape."""
        for name in (self.name, f"_{self.name}"):
            torch.library.register_fake(f"fretwork::{name}", fake)
        return fake

    def register_gradient(self, backward: Rule, setup: Rule | None = None) -> None:
        """The rules as `torch.library.register_autograd` takes them. No argument is a list of tensors."""
        torch.library.register_autograd(f"fretwork::{self.name}", backward, setup_context=setup)
        plain = self.plain

        def forward(ctx: Any, *arguments: Any) -> Any:
            output = plain(*arguments)
            if setup is not None:
                setup(ctx, arguments, output)
            return output

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self.node = node_apply(type(self.name, (torch.autograd.Function,), methods))

    def register_vmap(self, rule: Rule | None = None) -> None:
        """Without a rule, elements are computed one by one."""

        def each(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
            return one_by_one(self, info.batch_size, in_dims, arguments)

        torch.library.register_vmap(f"fretwork::{self.name}", rule or each)

    def register_autocast(self, cast: Rule) -> None:
        """`cast` takes the op's arguments, and gives those that it has under autocast."""
        self._cast = cast
        register_autocast(self.name, cast, self)

    def __call__(self, *arguments: Any) -> Any:
        if not called_eagerly(arguments):
            if holds_dtensors(arguments):
                return on_parts(self.name, self, arguments)
            return self.op(*arguments)
        if in_autocast() and self._cast is not None and autocasts(arguments[0]):
            arguments = self._cast(*arguments)
        if is_grad_enabled() and any_requires_grad(*arguments):
            given = [alive(a) if type(a) is Tensor else a for a in arguments]
            return self.node(*given, *self._defaults[len(given) :])
        return self.plain(*arguments)
