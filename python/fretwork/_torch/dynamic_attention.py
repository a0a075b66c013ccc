"""torch's rules for attention on what only the device knows."""

from typing import Any

import torch
from torch import Tensor

from fretwork import _shapes
from fretwork._torch.arguments import pattern_keys
from fretwork._torch.attention import attention_results, gradients_like, lowered_operands
from fretwork._torch.attention_by_length import by_length
from fretwork._torch.differentiable import DifferentiableOp, called_plainly
from fretwork._torch.registration import operand
from fretwork._torch.vmap import mapped, one_by_one, sample_shape
from fretwork.patterns import Pattern

dynamic_attention_op = DifferentiableOp("dynamic_attention")
dynamic_attention_backward_op = DifferentiableOp("dynamic_attention_backward")


@torch.compiler.assume_constant_result
def has_interval_rows(key: str) -> bool:
    """A constant of what torch.compile traces."""
    return _shapes.has_interval_rows(key)


def _function(selected: object, cu_q: object) -> str:
    """What a person called."""
    return "varlen_attention" if cu_q is not None else "selected_attention" if selected is not None else "attention"


@dynamic_attention_op.register_fake
def _fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    op = _function(rest[4], rest[5])
    known = [operand(name, t) for name, t in zip("qkv", (q, k, v), strict=True)]
    packed = rest[5] is not None  # documents are, rows first
    sizes = _shapes.check_packed(op, known) if packed else _shapes.check_qkv(op, known)
    given = {"bias": rest[_BIAS - 3], "slopes": rest[_SLOPES - 3], "key_padding_mask": rest[_PADDING - 3]}
    given["sinks"] = rest[_SINKS - 3]
    _shapes.check_extras(op, [operand(name, t) for name, t in given.items() if t is not None], known[0], sizes)
    if not packed:
        return attention_results(q, v)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty((q.shape[1], q.shape[0]), dtype=wide)


@dynamic_attention_backward_op.register_fake
def _backward_fake(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    bias, sinks, needs = rest[_BIAS - 3], rest[_SINKS - 3], rest[-5:]
    return gradients_like(q, (k, v, bias, sinks), needs)


# Places among the arguments: q, k, v, pattern, mask, counts, indices, selected, cu_q, cu_k, sizes, scale, bias, slopes,
# softcap, dropout_p, seed, precision, key_padding_mask, sinks.
_BIAS, _SLOPES, _SEED, _PADDING, _SINKS = 12, 13, 16, 18, 19
_LEARNED = (0, 1, 2, _BIAS, _SINKS)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.rest = tuple(None if isinstance(x, Tensor) else x for x in inputs[3:])
    ctx.save_for_backward(*inputs[:3], *output, *(x if isinstance(x, Tensor) else None for x in inputs[3:]))
    ctx.set_materialize_grads(False)


def _gradient(
    ctx: Any,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    backward: DifferentiableOp = dynamic_attention_backward_op,
) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    rest = [x if t is None else t for x, t in zip(ctx.rest, tensors, strict=True)]
    nothing = (None,) * (len(rest) + 3)
    if d_out is None:
        if d_lse is None:
            return nothing
        d_out = torch.zeros_like(out)
    if 0 in d_out.stride():  # one number for many, as a sum's gradient is: kernels read rows
        d_out = d_out.contiguous()
    needs = tuple(ctx.needs_input_grad[n] for n in _LEARNED)
    plainly = not torch.is_grad_enabled() and called_plainly((q, k, v, d_out, d_lse, *rest))
    op: Any = backward.plain if plainly else backward
    found = op(q, k, v, out, lse, d_out, d_lse, *rest, *needs)
    gradients = list(nothing)
    for at, gradient, needed in zip(_LEARNED, found, needs, strict=True):
        gradients[at] = gradient if needed else None
    return tuple(gradients)


def _setup_second(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    ctx.function = _function(*inputs[11:13])  # behind out, lse, d_out and d_lse


def _second(ctx: Any, *gradients: Tensor) -> None:
    raise NotImplementedError(
        f"{ctx.function}: gradient: expected to be differentiated once, got a second time; for second derivatives "
        "apply torch.softmax to scores with −inf where a key is not seen"
    )


def _vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    """Into the batch, if only q, k, v, blocks and selections are mapped."""
    size = info.batch_size
    in_dims = tuple(d if isinstance(d, int) else None for d in in_dims)  # that of `sizes` is a list
    into_batch = {0, 1, 2, 4, 5, 6, 7}
    alone = arguments[8] is not None or any(arguments[n] is not None for n in (_BIAS, _SLOPES, _SEED, _PADDING))
    if alone or any(d is not None and n not in into_batch for n, d in enumerate(in_dims)):
        return one_by_one(dynamic_attention_op, size, in_dims, arguments)
    batch = sample_shape(arguments[0], in_dims[0])[0]
    given = list(arguments)
    for n in into_batch:
        if given[n] is None:
            continue
        x, dim = given[n], in_dims[n]
        if n > 3:  # of all batch elements, or one for all
            x = x[None] if dim is None else x.movedim(dim, 0)
            x, dim = x.expand(size, batch, *x.shape[2:]), 0
        given[n] = mapped(x, dim, size)
    found = dynamic_attention_op(*given)
    return tuple(t.unflatten(0, (size, batch)) for t in found), (0, 0)


def _cast(*arguments: Any) -> tuple[Any, ...]:
    given = list(arguments)
    given[0], given[1], given[2], given[_BIAS], given[_SINKS] = lowered_operands(*(given[n] for n in _LEARNED))
    return tuple(given)


dynamic_attention_op.register_gradient(_gradient, _setup)
dynamic_attention_backward_op.register_gradient(_second, _setup_second)
dynamic_attention_op.register_vmap(_vmap)
dynamic_attention_backward_op.register_vmap()
dynamic_attention_op.register_autocast(_cast)


# With blocks, and a pattern that is a function of the lengths.


def _one_pattern(patterns: tuple[Pattern, ...], queries: Any, keys: Any) -> str:
    texts = pattern_keys(patterns).split("\n")
    _shapes.check_one_pattern("attention", texts)
    _shapes.check_block_pattern("attention", patterns[0], queries[2], keys[2], _shapes.has_interval_rows(texts[0]))
    return texts[0]


blocks_by_length_op = by_length(dynamic_attention_op, "dynamic_attention_by_length", 3, _one_pattern)
_blocks_by_length_backward_op = by_length(
    dynamic_attention_backward_op, "dynamic_attention_by_length_backward", 7, _one_pattern
)


def _by_length_gradient(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    return _gradient(ctx, d_out, d_lse, _blocks_by_length_backward_op)


blocks_by_length_op.register_fake(_fake)
_blocks_by_length_backward_op.register_fake(_backward_fake)
blocks_by_length_op.register_gradient(_by_length_gradient, _setup)
_blocks_by_length_backward_op.register_gradient(_second, _setup_second)
blocks_by_length_op.register_vmap()
_blocks_by_length_backward_op.register_vmap()
blocks_by_length_op.register_autocast(_cast)
