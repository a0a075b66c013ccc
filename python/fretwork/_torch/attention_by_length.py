"""Attention whose pattern is a function of the lengths, as an op: one compiled graph serves every length.

A pattern that a compiled function makes is a constant of its graph, which then serves one length. Here the graph holds
the function's number, and the op asks the function for the pattern when it runs.
"""

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from fretwork import _shapes
from fretwork._torch.arguments import pattern_keys
from fretwork._torch.attention import (
    attention_backward_fake,
    attention_backward_op,
    attention_cast,
    attention_op,
    attention_results,
    attention_second,
    attention_setup,
    gradient_rule,
)
from fretwork._torch.differentiable import DifferentiableOp
from fretwork._torch.registration import operand
from fretwork.patterns import Pattern, causal, full

OfLength = Callable[[int, int], Pattern | Sequence[Pattern]]

_functions: list[OfLength] = []  # which stay: a graph may be kept as long as the process runs


def goes_by_length(pattern: object) -> bool:
    """Whether a graph that is being compiled asks for its pattern when it runs. A graph that may be saved cannot, and
    of methods and other objects that can be called the compiler makes no constant."""
    compiling = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    return compiling and isinstance(pattern, FunctionType)


@torch.compiler.assume_constant_result
def function_key(function: OfLength) -> str:
    """What stands for a function inside the op, in this process."""
    if function not in _functions:
        _functions.append(function)
    return str(_functions.index(function))


def causally(function: OfLength) -> OfLength:
    """The function of the causal parts of its patterns."""

    def part(rows: int, cols: int) -> Pattern | Sequence[Pattern]:
        made, earlier = function(rows, cols), causal((rows, cols))
        return made & earlier if isinstance(made, Pattern) else [p & earlier for p in made]

    return part


def every_key(rows: int, cols: int) -> Pattern:
    """The function of a call without a pattern."""
    return full((rows, cols))


def patterns_of(function: OfLength, queries: Any, keys: Any) -> tuple[Any, ...]:
    """What a function gives for q and k of these shapes, checked."""
    rows, cols = _shapes.lengths("attention", queries, keys)
    return _shapes.flat_patterns("attention", _shapes.made_for("attention", function, rows, cols), queries)


def _keys(patterns: tuple[Pattern, ...], queries: Any, keys: Any) -> str:
    return pattern_keys(patterns)


def _resolved(op: DifferentiableOp, at: int, text: Callable[..., str]) -> Callable[..., Any]:
    """The op's twin, called with patterns in the place of a function's number."""

    def call(*arguments: Any) -> Any:
        q, k = arguments[:2]
        patterns = patterns_of(_functions[int(arguments[at])], q.shape, k.shape)
        return op.plain(*arguments[:at], text(patterns, q.shape, k.shape), *arguments[at + 1 :])

    return call


_library = torch.library.Library("fretwork", "FRAGMENT")  # registrations last as long as this object


def by_length(op: DifferentiableOp, name: str, at: int, text: Callable[..., str] = _keys) -> DifferentiableOp:
    """An op with the schema of another, whose text is a function's number; `text` is that of the patterns it gives."""
    schema = str(op.op._schema).partition("(")[2]
    for twin in (name, f"_{name}"):
        _library.define(f"{twin}({schema}")
        _library.impl(twin, _resolved(op, at, text), "CompositeExplicitAutograd")
    return DifferentiableOp(name)


by_length_op = by_length(attention_op, "attention_by_length", 3)
by_length_backward_op = by_length(attention_backward_op, "attention_by_length_backward", 7)


@by_length_op.register_fake
def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _shapes.check_qkv("attention", [operand(name, t) for name, t in zip("qkv", (q, k, v), strict=True)])
    return attention_results(q, v)


by_length_backward_op.register_fake(attention_backward_fake)
by_length_op.register_gradient(gradient_rule(by_length_backward_op), attention_setup)
by_length_backward_op.register_gradient(attention_second)
by_length_op.register_vmap()
by_length_backward_op.register_vmap()
by_length_op.register_autocast(attention_cast)
