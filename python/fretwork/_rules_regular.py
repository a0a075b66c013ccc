"""What torch needs of attention over regular patterns beyond running it: shapes, gradients, vmap and autocast."""

from typing import Any

import torch
from torch import Tensor

from fretwork import _shapes
from fretwork._rules import _library, _lowered, _operand, _sample  # which loads the library
from fretwork.patterns import Pattern

_ops = torch.ops.fretwork
_attention, _attention_backward = _ops.attention.default, _ops.attention_backward.default


def _patterns(keys: str) -> list[Pattern]:
    lines = keys.split("\n")
    known = {key: Pattern.parse(key) for key in dict.fromkeys(lines)}
    return [known[key] for key in lines]


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@torch.library.register_fake("fretwork::attention")
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
) -> tuple[Tensor, Tensor]:
    given = {"bias": bias, "slopes": slopes, "key_padding_mask": key_padding_mask}
    extras = [_operand(name, t) for name, t in given.items() if t is not None]
    operands = [_operand(name, t) for name, t in zip("qkv", (q, k, v), strict=True)]
    _shapes.check_attention(operands, _patterns(patterns), extras, scale, softcap, dropout_p)
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=_lse_dtype(q))


@torch.library.register_fake("fretwork::attention_backward")
def _attention_backward_fake(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    bias, needs = rest[2], rest[8:12]
    return tuple(
        torch.empty_like(t, memory_format=torch.contiguous_format) if wanted and t is not None else q.new_empty(0)
        for t, wanted in zip((q, k, v, bias), needs, strict=True)
    )


def _attention_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.patterns, ctx.scale, bias, slopes, ctx.softcap, ctx.dropout_p, seed, ctx.precision = inputs[:11]
    padding = inputs[11] if len(inputs) > 11 else None
    ctx.save_for_backward(q, k, v, *output, bias, slopes, seed, padding)
    ctx.inputs = len(inputs)
    ctx.set_materialize_grads(False)


def _attention_gradient(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, bias, slopes, seed, padding = ctx.saved_tensors
    needs = [ctx.needs_input_grad[n] for n in (0, 1, 2, 5)]
    if d_out is None:
        if d_lse is None:
            return (None,) * ctx.inputs
        d_out = torch.zeros_like(out)
    if 0 in d_out.stride():  # one number for many, as a sum's gradient is: the fast kernels read rows
        d_out = d_out.contiguous()
    found = _attention_backward(
        *(q, k, v, out, lse, d_out, d_lse, ctx.patterns, ctx.scale, bias, slopes, ctx.softcap, ctx.dropout_p, seed),
        *(ctx.precision, *needs, padding),
    )
    d_q, d_k, d_v, d_bias = (d if wanted else None for d, wanted in zip(found, needs, strict=True))
    return d_q, d_k, d_v, None, None, d_bias, *(None,) * (ctx.inputs - 6)


def _attention_second(ctx: Any, *gradients: Tensor) -> None:
    raise NotImplementedError(
        "attention: gradient: expected to be differentiated once, got a second time; for second derivatives apply "
        "torch.softmax to scores with −inf where pattern.mask() is False"
    )


def _each(call: Any, info: Any, in_dims: tuple[Any, ...], arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    """One call for each element of a vmap."""
    results = [
        call(*(a if d is None else a.select(d, n) for a, d in zip(arguments, in_dims, strict=True)))
        for n in range(info.batch_size)
    ]
    stacked = tuple(map(torch.stack, zip(*results, strict=True)))
    return stacked, (0,) * len(stacked)


def _fold(tensor: Tensor, dim: int | None, size: int) -> Tensor:
    """The mapped dimension folded into the batch."""
    lead = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return lead.flatten(0, 1)


def _fold_bias(bias: Tensor, dim: int | None, size: int, batch: int) -> Tensor:
    shape = _sample(bias, dim)
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
    size = info.batch_size
    # Samples have dropout, slopes and patterns of their own elements: a batch of one call would not.
    alone = (
        seed is not None
        or in_dims[6] is not None
        or _by_element(patterns, _sample(q, in_dims[0]))
        or any(t.dim() != (4 if d is None else 5) for t, d in zip((q, k, v), in_dims, strict=False))
    )
    if size == 0:  # nobody draws, and slopes are nobody's
        slopes = seed = None
        dropout_p = 0.0
    elif alone:
        return _each(_attention, info, in_dims, arguments)
    batch = _sample(q, in_dims[0])[0]
    q, k, v = (_fold(t, d, size) for t, d in zip((q, k, v), in_dims, strict=False))
    if bias is not None:
        bias = _fold_bias(bias, in_dims[5], size, batch)
    if padding is not None:
        padding = _fold(padding, padding_dim, size)
    if size == 0:
        patterns = patterns.split("\n")[0]
    found = _attention(q, k, v, patterns, scale, bias, slopes, softcap, dropout_p, seed, precision, padding)
    return tuple(t.unflatten(0, (size, batch)) for t in found), (0, 0)


def _attention_backward_vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    return _each(_attention_backward, info, in_dims, arguments)


def _attention_autocast(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    device = q.device.type
    dtype = torch.get_autocast_dtype(device)
    patterns, scale, bias, *others = rest
    if bias is not None and bias.dtype != torch.float32:  # which goes with every type
        bias = _lowered(bias, dtype)
    with torch.autocast(device, enabled=False):
        return _attention(*(_lowered(t, dtype) for t in (q, k, v)), patterns, scale, bias, *others)


torch.library.register_autograd("fretwork::attention", _attention_gradient, setup_context=_attention_setup)
torch.library.register_autograd("fretwork::attention_backward", _attention_second)
torch.library.register_vmap("fretwork::attention", _attention_vmap)
torch.library.register_vmap("fretwork::attention_backward", _attention_backward_vmap)
for _device in ("CPU", "CUDA"):
    _library.impl("attention", _attention_autocast, f"Autocast{_device}")


# SPLAT's operators. x[i, t] = a[i] · b[column] ties three tensors; each product gives one from the other two, so that
# the gradients of each are the other two.

_r_sddmm, _r_spmm, _r_spmm_transposed = _ops.r_sddmm.default, _ops.r_spmm.default, _ops.r_spmm_transposed.default
_r_softmax, _r_softmax_backward = _ops.r_softmax.default, _ops.r_softmax_backward.default


@torch.library.register_fake("fretwork::r_sddmm")
def _r_sddmm_fake(q: Tensor, k: Tensor, key: str) -> Tensor:
    pattern = Pattern.parse(key)
    width = _shapes.check_r_sddmm(_operand("q", q), _operand("k", k), pattern)
    return q.new_empty((*q.shape[:3], width))


@torch.library.register_fake("fretwork::r_spmm")
def _r_spmm_fake(x: Tensor, v: Tensor, key: str) -> Tensor:
    _shapes.check_r_spmm(_operand("x", x), _operand("v", v), Pattern.parse(key))
    return x.new_empty((*x.shape[:3], v.shape[3]))


@torch.library.register_fake("fretwork::r_spmm_transposed")
def _r_spmm_transposed_fake(x: Tensor, y: Tensor, key: str, heads: int) -> Tensor:
    return y.new_empty((y.shape[0], heads, Pattern.parse(key).shape[-1], y.shape[3]))


@torch.library.register_fake("fretwork::r_softmax")
def _r_softmax_fake(x: Tensor, key: str, scale: float) -> Tensor:
    _shapes.check_r_softmax(_operand("x", x), Pattern.parse(key))
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("fretwork::r_softmax_backward")
def _r_softmax_backward_fake(out: Tensor, d_out: Tensor, key: str, scale: float) -> Tensor:
    return torch.empty_like(out, memory_format=torch.contiguous_format)


def _product_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, ctx.key = inputs[:3]
    ctx.heads = b.shape[1]
    needs_a, needs_b = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if needs_b else None, b if needs_a else None)


def _rows(d: Tensor) -> Tensor:
    """A gradient whose rows are side by side, which a sum's is not: the fast kernels read rows."""
    return d if d.stride(-1) == 1 and 0 not in d.stride() else d.contiguous()


def _r_sddmm_gradient(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
    q, k = ctx.saved_tensors
    d = _rows(d)
    d_q = _r_spmm(d, k, ctx.key) if ctx.needs_input_grad[0] else None
    return d_q, _r_spmm_transposed(d, q, ctx.key, ctx.heads) if ctx.needs_input_grad[1] else None, None


def _r_spmm_gradient(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
    x, v = ctx.saved_tensors
    d = _rows(d)
    d_x = _r_sddmm(d, v, ctx.key) if ctx.needs_input_grad[0] else None
    return d_x, _r_spmm_transposed(x, d, ctx.key, ctx.heads) if ctx.needs_input_grad[1] else None, None


def _r_spmm_transposed_gradient(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
    x, y = ctx.saved_tensors
    d = _rows(d)
    d_x = _r_sddmm(y, d, ctx.key) if ctx.needs_input_grad[0] else None
    return d_x, _r_spmm(x, d, ctx.key) if ctx.needs_input_grad[1] else None, None, None


def _r_softmax_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.key, ctx.scale = inputs
    ctx.save_for_backward(output)


def _r_softmax_gradient(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
    (out,) = ctx.saved_tensors
    return _r_softmax_backward(out, _rows(d), ctx.key, ctx.scale), None, None


def _r_softmax_second(ctx: Any, *gradients: Tensor) -> None:
    raise NotImplementedError("r_softmax: gradient: expected to be differentiated once, got a second time")


def _register_folding(op: str, tensors: int) -> None:
    """vmap: the mapped dimension of the first `tensors` arguments becomes part of the batch."""
    call = getattr(_ops, op).default

    def vmap(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
        given = list(zip(arguments[:tensors], in_dims, strict=False))
        folded = [_fold(t, d, info.batch_size) for t, d in given]
        result = call(*folded, *arguments[tensors:])
        return result.unflatten(0, (info.batch_size, _sample(*given[0])[0])), 0

    torch.library.register_vmap(f"fretwork::{op}", vmap)


def _register_lowering(op: str) -> None:
    call = getattr(_ops, op).default

    def autocast(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
        device = a.device.type
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return call(_lowered(a, dtype), _lowered(b, dtype), *rest)

    for device in ("CPU", "CUDA"):
        _library.impl(op, autocast, f"Autocast{device}")


torch.library.register_autograd("fretwork::r_sddmm", _r_sddmm_gradient, setup_context=_product_setup)
torch.library.register_autograd("fretwork::r_spmm", _r_spmm_gradient, setup_context=_product_setup)
torch.library.register_autograd(
    "fretwork::r_spmm_transposed", _r_spmm_transposed_gradient, setup_context=_product_setup
)
torch.library.register_autograd("fretwork::r_softmax", _r_softmax_gradient, setup_context=_r_softmax_setup)
torch.library.register_autograd("fretwork::r_softmax_backward", _r_softmax_second)
for _op in ("r_sddmm", "r_spmm", "r_spmm_transposed", "r_softmax_backward"):
    _register_folding(_op, 2)
_register_folding("r_softmax", 1)
for _op in ("r_sddmm", "r_spmm", "r_spmm_transposed"):
    _register_lowering(_op)
