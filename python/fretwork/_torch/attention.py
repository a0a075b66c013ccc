"""torch's rules for attention over regular patterns."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fretwork import _shapes
from fretwork._torch.differentiable import DifferentiableOp, called_plainly
from fretwork._torch.private import alive, any_requires_grad, bare, node_apply
from fretwork._torch.registration import lowered, operand, ops
from fretwork._torch.vmap import mapped, one_by_one, sample_shape
from fretwork.patterns import Pattern

attention_op, attention_backward_op = DifferentiableOp("attention"), DifferentiableOp("attention_backward")


def _patterns(keys: str) -> list[Pattern]:
    lines = keys.split("\n")
    known = {key: Pattern.parse(key) for key in dict.fromkeys(lines)}
    return [known[key] for key in lines]


def attention_results(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Tensors like the output and lse, whatever the pattern."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=wide)


def gradients_like(q: Tensor, others: Sequence[Tensor | None], needs: Sequence[Any]) -> tuple[Tensor, ...]:
    """Tensors like the gradients of those that need one, empty ones for the others."""
    return tuple(
        torch.empty_like(t, memory_format=torch.contiguous_format) if wanted and t is not None else q.new_empty(0)
        for t, wanted in zip((q, *others), needs, strict=True)
    )


@attention_op.register_fake
def _attention_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    patterns: str,
    scale: float | None,
    bias: Tensor | None,
    slopes: Tensor | None,
    softcap: float,
    dropout_p: float,
    seed: Tensor | None,
    precision: str,
    key_padding_mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    given = {"bias": bias, "slopes": slopes, "key_padding_mask": key_padding_mask, "sinks": sinks}
    extras = [operand(name, t) for name, t in given.items() if t is not None]
    operands = [operand(name, t) for name, t in zip("qkv", (q, k, v), strict=True)]
    _shapes.check_attention(operands, _patterns(patterns), extras, scale, softcap, dropout_p)
    return attention_results(q, v)


@attention_backward_op.register_fake
def attention_backward_fake(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    bias, needs = rest[2], rest[8:12]
    sinks, needs_sinks = rest[13:15] if len(rest) > 14 else (None, False)
    return gradients_like(q, (k, v, bias, sinks), (*needs, needs_sinks))


def attention_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, patterns, scale, bias, slopes, softcap, dropout_p, seed, precision, padding, sinks = inputs
    ctx.how = patterns, scale, softcap, dropout_p, precision
    ctx.save_for_backward(q, k, v, *output, bias, slopes, seed, padding, sinks)
    ctx.set_materialize_grads(False)


def gradient_rule(backward: DifferentiableOp) -> Callable[..., tuple[Tensor | None, ...]]:
    """The gradient of an op with attention's arguments, by an op with those of its backward pass."""

    def gradient(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad  # of what the dispatcher has left, which drops defaults
        needs_sinks = len(needs) > 12 and needs[12]
        d_q, d_k, d_v, d_bias, d_sinks = _gradients(ctx, d_out, d_lse, needs[5], needs_sinks, backward)
        return d_q, d_k, d_v, None, None, d_bias, None, None, None, None, None, None, d_sinks

    return gradient


def _gradients(
    ctx: Any,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    needs_bias: bool,
    needs_sinks: bool,
    backward: DifferentiableOp = attention_backward_op,
) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, bias, slopes, seed, padding, sinks = ctx.saved_tensors
    patterns, scale, softcap, dropout_p, precision = ctx.how
    needs_q, needs_k, needs_v = ctx.needs_input_grad[:3]
    if d_out is None:
        if d_lse is None:
            return None, None, None, None, None
        d_out = torch.zeros_like(out)
    if 0 in d_out.stride():  # one number for many, as a sum's gradient is: the fast kernels read rows
        d_out = d_out.contiguous()
    plainly = not torch.is_grad_enabled() and called_plainly((q, k, v, d_out, d_lse, bias, sinks))
    short = plainly and backward is attention_backward_op and ctx.how[1:] == _NO_OPTIONS
    if short and d_lse is bias is slopes is padding is sinks is None and q.is_cpu:
        found = _plain_output_backward(q, k, v, out, lse, d_out, patterns, needs_q + 2 * needs_k + 4 * needs_v)
        d_q, d_k, d_v = (d if needs else None for d, needs in zip(found, (needs_q, needs_k, needs_v), strict=True))
        return d_q, d_k, d_v, None, None
    op: Callable[..., Any] = backward.plain if plainly else backward
    found = op(
        *(q, k, v, out, lse, d_out, d_lse, patterns, scale, bias, slopes, softcap, dropout_p, seed),
        *(precision, needs_q, needs_k, needs_v, needs_bias, padding, sinks, needs_sinks),
    )
    wanted = needs_q, needs_k, needs_v, needs_bias, needs_sinks
    return tuple(d if needs else None for d, needs in zip(found, wanted, strict=True))


class Attention(torch.autograd.Function):
    """The same node for plain calls that want no lse, which is half the results and a sixth of the host's time."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        slopes: Tensor | None,
        seed: Tensor | None,
        padding: Tensor | None,
        sinks: Tensor | None,
        how: tuple[Any, ...],
    ) -> Tensor:
        patterns, scale, softcap, dropout_p, precision = ctx.how = how
        out, lse = attention_op.plain(
            q, k, v, patterns, scale, bias, slopes, softcap, dropout_p, seed, precision, padding, sinks
        )
        ctx.save_for_backward(q, k, v, out, lse, bias, slopes, seed, padding, sinks)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        d_q, d_k, d_v, d_bias, d_sinks = _gradients(ctx, gradients[0], None, needs[3], needs[7])
        return d_q, d_k, d_v, d_bias, None, None, None, d_sinks, None


_apply_attention = node_apply(Attention)


def attention_output(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    slopes: Tensor | None,
    seed: Tensor | None,
    padding: Tensor | None,
    sinks: Tensor | None,
    how: tuple[str, float | None, float, float, str],
) -> Tensor:
    """`attention_op` without lse. `how` is patterns, scale, softcap, dropout_p and precision."""
    op: Callable[..., tuple[Tensor, Tensor]] = attention_op
    if called_plainly((q, k, v, bias, slopes, padding, sinks)):
        if torch.is_grad_enabled() and any_requires_grad(q, k, v, bias, sinks):
            bias, sinks = (None if t is None else alive(t) for t in (bias, sinks))
            return _apply_attention(alive(q), alive(k), alive(v), bias, slopes, seed, padding, sinks, how)  # type: ignore[no-any-return]
        op = attention_op.plain
    patterns, scale, softcap, dropout_p, precision = how
    return op(q, k, v, patterns, scale, bias, slopes, softcap, dropout_p, seed, precision, padding, sinks)[0]


@torch.library.register_fake("fretwork::_attention_output")
def _output_fake(q: Tensor, k: Tensor, v: Tensor, patterns: str, precision: str) -> Tensor:
    return _attention_fake(q, k, v, patterns, None, None, None, 0.0, 0.0, None, precision)[0]


@torch.library.register_fake("fretwork::_attention_output_backward")
def _output_backward_fake(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, patterns: str, needs: int
) -> tuple[Tensor, ...]:
    return gradients_like(q, (k, v), (needs & 1, needs & 2, needs & 4))


_plain_output, _plain_output_backward = (
    bare(ops._attention_output.default),
    bare(ops._attention_output_backward.default),
)
_NO_OPTIONS = (None, 0.0, 0.0, "ieee")  # scale, softcap, dropout_p, precision


def attention_plainly(q: Tensor, k: Tensor, v: Tensor, patterns: str) -> Tensor:
    """What was `called_plainly`, on a CPU, without options."""
    if torch.is_grad_enabled() and any_requires_grad(q, k, v):
        how = (patterns, None, 0.0, 0.0, "ieee")
        return _apply_attention(alive(q), alive(k), alive(v), None, None, None, None, None, how)  # type: ignore[no-any-return]
    return _plain_output(q, k, v, patterns, "ieee")  # type: ignore[no-any-return]


def attention_second(ctx: Any, *gradients: Tensor) -> None:
    raise NotImplementedError(
        "attention: gradient: expected to be differentiated once, got a second time; for second derivatives apply "
        "torch.softmax to scores with −inf where pattern.mask() is False"
    )


def _fold_bias(bias: Tensor, dim: int | None, size: int, batch: int) -> Tensor:
    shape = sample_shape(bias, dim)
    if dim is None and (len(shape) < 4 or shape[0] == 1):
        return bias  # the same everywhere
    lead = bias[None] if dim is None else bias.movedim(dim, 0)
    lead = lead.reshape(lead.shape[0], *(1,) * (4 - len(shape)), *shape)
    return lead.expand(size, batch, *lead.shape[2:]).flatten(0, 1)


def _by_element(patterns: str, queries: Any) -> bool:
    """Whether each element of a batch has patterns of its own."""
    return patterns.count("\n") + 1 not in (1, queries[1])


def _attention_vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    q, k, v, patterns, scale, bias, slopes, softcap, dropout_p, seed, precision = arguments[:11]
    padding, padding_dim = (arguments[11], in_dims[11]) if len(arguments) > 11 else (None, None)
    sinks, sinks_dim = (arguments[12], in_dims[12]) if len(arguments) > 12 else (None, None)
    size = info.batch_size
    # Where the elements differ in dropout, slopes, sinks or patterns, they do not fit into one batch.
    alone = (
        seed is not None
        or in_dims[6] is not None
        or sinks_dim is not None
        or _by_element(patterns, sample_shape(q, in_dims[0]))
        or any(t.dim() != (4 if d is None else 5) for t, d in zip((q, k, v), in_dims, strict=False))
    )
    if size == 0:  # no element has dropout, slopes or sinks
        slopes = seed = None
        sinks = sinks if sinks_dim is None else None
        dropout_p = 0.0
    elif alone:
        return one_by_one(attention_op, size, in_dims, arguments)
    batch = sample_shape(q, in_dims[0])[0]
    q, k, v = (mapped(t, d, size) for t, d in zip((q, k, v), in_dims, strict=False))
    if bias is not None:
        bias = _fold_bias(bias, in_dims[5], size, batch)
    if padding is not None:
        padding = mapped(padding, padding_dim, size)
    if size == 0:
        patterns = patterns.split("\n")[0]
    found = attention_op(q, k, v, patterns, scale, bias, slopes, softcap, dropout_p, seed, precision, padding, sinks)
    return tuple(t.unflatten(0, (size, batch)) for t in found), (0, 0)


def lowered_operands(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """As autocast has them. A bias and sinks of float32 go with every type, and stay."""
    dtype = torch.get_autocast_dtype(q.device.type)
    bias, sinks = (t if t is None or t.dtype == torch.float32 else lowered(t, dtype) for t in (bias, sinks))
    return lowered(q, dtype), lowered(k, dtype), lowered(v, dtype), bias, sinks


def attention_cast(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Any, ...]:
    patterns, scale, bias, *others = rest
    given = others.pop() if len(others) > 6 else None
    q, k, v, bias, sinks = lowered_operands(q, k, v, bias, given)
    return q, k, v, patterns, scale, bias, *others, *(() if given is None else (sinks,))


attention_op.register_gradient(gradient_rule(attention_backward_op), attention_setup)
attention_backward_op.register_gradient(attention_second)
attention_op.register_vmap(_attention_vmap)
attention_backward_op.register_vmap()
attention_op.register_autocast(attention_cast)
