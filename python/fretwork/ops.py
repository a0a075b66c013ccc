"""The ops on torch tensors. A thin door: shapes, errors and arithmetic are the core's business.

Reverse mode through autograd; `torch.func.grad` and forward mode (jvp) raise, see docs/block-sparsity.md.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fretwork import _ksmm_peers as peers
from fretwork import _rules as _rules  # loads the library and registers gradients, fakes, vmap and autocast
from fretwork import _rules_kronecker as _rules_kronecker
from fretwork._checks import flag, number
from fretwork._shapes import factor_features
from fretwork.patterns import BlockLayout
from fretwork.patterns.pattern import TRACED_AS_CONSTANTS, parsed

torch.serialization.add_safe_globals(
    [parsed, (parsed, "fretwork.pattern._parsed")]
)  # so that torch.load takes patterns
for _function in TRACED_AS_CONSTANTS:
    torch.compiler.assume_constant_result(_function)

_ops = torch.ops.fretwork
_sdd, _dsd, _dds = _ops.sdd.default, _ops.dsd.default, _ops.dds.default
_softmax, _pack, _unpack = _ops.block_softmax.default, _ops.block_pack.default, _ops.block_unpack.default
_ksmm, _chain = _ops.ksmm.default, _ops.ksmm_chain.default

# What torch.set_float32_matmul_precision asks for, as the GPU has it.
_PRECISION_OF_TORCH = {"highest": "ieee", "high": "tf32", "medium": "tf32"}


def sdd(
    a: Tensor,
    b: Tensor,
    layout: BlockLayout,
    trans_a: bool = False,
    trans_b: bool = False,
    *,
    precision: str | None = None,
) -> Tensor:
    """Sparse = op(a)·op(b) at the blocks of `layout`; gives packed values ((Z,) nnz, rows, cols).

    a and b are dense (Z, H, ·, ·); leading dimensions may be missing, and a Z or H of 1 broadcasts. `precision` is how
    fp32 is multiplied on a GPU: "ieee", "tf32", "tf32x3", or None to follow `torch.get_float32_matmul_precision()`.

    >>> import torch, fretwork as fw
    >>> layout = fw.BlockLayout([[1, 0], [0, 1]], block=16)
    >>> fw.sdd(torch.ones(32, 5), torch.ones(5, 32), layout).shape
    torch.Size([2, 16, 16])
    """
    _check_tensor("sdd", "a", a)
    _check_tensor("sdd", "b", b)
    return _sdd(a, b, _key("sdd", layout), *_turns("sdd", trans_a, trans_b), _precision("sdd", precision), False, False)


def dsd(
    values: Tensor,
    b: Tensor,
    layout: BlockLayout,
    trans_a: bool = False,
    trans_b: bool = False,
    *,
    precision: str | None = None,
) -> Tensor:
    """Dense = op(sparse)·op(b); `values` are packed in `layout`, the layout of the sparse operand as stored.

    >>> import torch, fretwork as fw
    >>> layout = fw.BlockLayout([[1, 0], [1, 1]], block=16)
    >>> fw.dsd(torch.ones(3, 16, 16), torch.ones(32, 7), layout, trans_a=True)[:, 0].unique().tolist()
    [16.0, 32.0]
    """
    _check_tensor("dsd", "values", values)
    _check_tensor("dsd", "b", b)
    return _dsd(
        values, b, _key("dsd", layout), *_turns("dsd", trans_a, trans_b), _precision("dsd", precision), False, False
    )


def dds(
    a: Tensor,
    values: Tensor,
    layout: BlockLayout,
    trans_a: bool = False,
    trans_b: bool = False,
    *,
    precision: str | None = None,
) -> Tensor:
    """Dense = op(a)·op(sparse); `values` are packed in `layout`, the layout of the sparse operand as stored.

    >>> import torch, fretwork as fw
    >>> layout = fw.BlockLayout([[[1, 0]], [[1, 1]]], block=16)
    >>> fw.dds(torch.ones(2, 7, 16), torch.ones(3, 16, 16), layout).shape
    torch.Size([2, 7, 32])
    """
    _check_tensor("dds", "a", a)
    _check_tensor("dds", "values", values)
    return _dds(
        a, values, _key("dds", layout), *_turns("dds", trans_a, trans_b), _precision("dds", precision), False, False
    )


def block_softmax(
    values: Tensor,
    layout: BlockLayout,
    scale: float = 1.0,
    rpe: Tensor | None = None,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    key_padding_mask_mode: str = "add",
    attn_mask_mode: str = "add",
) -> Tensor:
    """Softmax of values·scale + rpe + masks over the stored entries of each row; a row with nothing left gives zeros.

    `rpe` broadcasts to (Z, H, M, N), `key_padding_mask` is (Z, N), `attn_mask` (M, N) or (H, M, N). Mode "add" adds the
    mask (floating), "mul" turns its zeros (or False) into −inf and leaves the rest. Gradients go to values and rpe, not
    to the masks: one that is added and requires grad is refused.

    >>> import torch, fretwork as fw
    >>> layout = fw.BlockLayout([[1, 0, 1]], block=8)
    >>> fw.block_softmax(torch.zeros(2, 8, 8), layout).unique().tolist()
    [0.0625]
    """
    _check_tensor("block_softmax", "values", values)
    for name, extra in (("rpe", rpe), ("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
        if extra is not None:
            _check_tensor("block_softmax", name, extra)
    key = _key("block_softmax", layout)
    if key_padding_mask_mode == "mul":
        key_padding_mask = _what_stays(key_padding_mask)
    if attn_mask_mode == "mul":
        attn_mask = _what_stays(attn_mask)
    masks = {"key_padding_mask": (key_padding_mask, key_padding_mask_mode), "attn_mask": (attn_mask, attn_mask_mode)}
    for name, (mask, mode) in masks.items():
        if mode not in ("add", "mul"):
            raise RuntimeError(f'block_softmax: {name}_mode: expected "add" or "mul", got {mode!r}')
        if mask is not None and mode == "add" and mask.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"block_softmax: {name}: expected a mask without a gradient, got one that requires grad; "
                "add what learns to rpe, or detach it"
            )
    scale = _number("block_softmax", "scale", scale)
    return _softmax(values, key, scale, rpe, key_padding_mask, attn_mask, key_padding_mask_mode, attn_mask_mode)


def _what_stays(mask: Tensor | None) -> Tensor | None:
    """A "mul" mask of integers, as tokenizers give them, says the same as where it is not zero."""
    if mask is None or mask.is_floating_point() or mask.is_complex() or mask.dtype == torch.bool:
        return mask
    return mask != 0


def pack(dense: Tensor, layout: BlockLayout) -> Tensor:
    """See `BlockLayout.pack`."""
    _check_tensor("pack", "dense", dense)
    return _pack(dense, _key("pack", layout))


def unpack(values: Tensor, layout: BlockLayout, fill: float = 0.0) -> Tensor:
    """See `BlockLayout.unpack`."""
    _check_tensor("unpack", "values", values)
    return _unpack(values, _key("unpack", layout), _number("unpack", "fill", fill))


FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ALGOS = ("kernel", *peers.PEERS, "auto")
# "auto" is the kernel: each peer moves x, w or y more than once, and "dense" writes its matrix at every call, so that
# it loses even where a dense layer is bound by memory alone.
OURS = ("kernel", "auto")


def ksmm(
    x: Tensor,
    w: Tensor,
    bs_last: bool = False,
    bias: Tensor | None = None,
    activation: str | None = None,
    algo: str = "auto",
    precision: str | None = None,
) -> Tensor:
    """y = activation(K x + bias) for the Kronecker factor K with weights w (a, b, c, d), whose support is I ⊗ 1 ⊗ I.

    y[…, (i, j, l)] = Σ_k w[i, j, k, l]·x[…, (i, k, l)]. x is (…, a·c·d) and y (…, a·b·d); with `bs_last` features come
    first, (a·c·d, …) and (a·b·d, …). `activation` is None, "relu", "gelu" (with erf) or "silu". `algo` is "kernel", the
    library's own, one of torch's ways "bmm", "bsr", "einsum", "dense", "sparse", or "auto", which is never one that is
    known to be slower than "kernel". `precision` as for `sdd`.

    A factorisation is not always a gain: a dense fp16 matrix below about 368 × 368 takes a GPU no longer than reading x
    and writing y, which every factor does as well. There `torch.nn.Linear` is the faster layer, whatever the algo.

    >>> import torch, fretwork as fw
    >>> w = torch.ones(2, 3, 4, 5)
    >>> fw.ksmm(torch.ones(7, 40), w).shape, fw.ksmm(torch.ones(40, 7, 6), w, bs_last=True).shape
    (torch.Size([7, 30]), torch.Size([30, 7, 6]))
    >>> fw.ksmm(torch.ones(40), w, bias=torch.arange(30.0) - 30, activation="relu").tolist()[24:]
    [0.0, 0.0, 0.0, 1.0, 2.0, 3.0]
    """
    _check_tensor("ksmm", "w", w)
    return _apply_factors("ksmm", x, {"w": w}, bs_last, bias, activation, algo, precision)


def ksmm_chain(
    x: Tensor,
    weights: Iterable[Tensor],
    bs_last: bool = False,
    bias: Tensor | None = None,
    activation: str | None = None,
    algo: str = "auto",
    precision: str | None = None,
) -> Tensor:
    """One Kronecker factor after another, weights[0] first; bias and activation after the last. See `ksmm`.

    >>> import torch, fretwork as fw
    >>> x, first, second = torch.randn(5, 30), torch.randn(6, 4, 5, 1), torch.randn(1, 8, 6, 4)
    >>> y = fw.ksmm_chain(x, [first, second], activation="silu")
    >>> torch.equal(y, fw.ksmm(fw.ksmm(x, first), second, activation="silu"))
    True
    """
    if not isinstance(weights, Iterable):
        raise TypeError(f"ksmm_chain: weights: expected a sequence of tensors, got {type(weights).__name__}")
    factors = {f"weights[{n}]": w for n, w in enumerate(weights)}
    if not factors:
        raise RuntimeError("ksmm_chain: weights: expected at least one, got none")
    for name, w in factors.items():
        _check_tensor("ksmm_chain", name, w)
    return _apply_factors("ksmm_chain", x, factors, bs_last, bias, activation, algo, precision)


def _apply_factors(
    op: str,
    x: Tensor,
    factors: dict[str, Tensor],
    bs_last: bool,
    bias: Tensor | None,
    activation: str | None,
    algo: str,
    precision: str | None,
) -> Tensor:
    _check_tensor(op, "x", x)
    if bias is not None:
        _check_tensor(op, "bias", bias)
    if activation not in (None, "relu", "gelu", "silu"):
        raise RuntimeError(f"{op}: activation: expected None, relu, gelu or silu, got {activation!r}")
    if algo not in ALGOS:
        raise RuntimeError(f"{op}: algo: expected {', '.join(ALGOS[:-1])} or auto, got {algo!r}")
    if precision is not None and algo in peers.PEERS:
        raise NotImplementedError(
            f"{op}: precision: expected None with the algo {algo}, got {precision!r}; "
            "torch's own products follow torch.set_float32_matmul_precision"
        )
    bs_last = flag(op, "bs_last", bs_last)
    x, factors, bias = _as_autocast_has_it(x, factors, bias)
    _check_factors(op, x, factors, bs_last, bias)
    if bs_last:
        y = x if x.dim() == 2 else x.flatten(1) if x.dim() > 2 else x[:, None]
    else:
        y = x if x.dim() == 2 else x.flatten(0, -2) if x.dim() > 2 else x[None]
    name = _precision(op, precision)
    weights = list(factors.values())
    if len(weights) > 1 and algo in OURS:
        y = _chain(y, weights, bias, activation or "none", bs_last, name)
    else:
        for w in weights[:-1]:
            y = _product(algo, y, w, None, "none", bs_last, name)
        y = _product(algo, y, weights[-1], bias, activation or "none", bs_last, name)
    if x.dim() == 2:
        return y
    return y.reshape(y.shape[0], *x.shape[1:]) if bs_last else y.reshape(*x.shape[:-1], y.shape[1])


def _product(
    algo: str, x: Tensor, w: Tensor, bias: Tensor | None, activation: str, bs_last: bool, precision: str
) -> Tensor:
    if algo in OURS:
        return _ksmm(x, w, bias, activation, bs_last, precision)
    if not _autocasts(x):
        return peers.run(algo, x, w, bias, activation, bs_last)
    with torch.autocast(x.device.type, enabled=False):  # which has had its say
        return peers.run(algo, x, w, bias, activation, bs_last)


def _autocasts(x: Tensor) -> bool:
    return x.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(x.device.type)


def _as_autocast_has_it(
    x: Tensor, factors: dict[str, Tensor], bias: Tensor | None
) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
    if not _autocasts(x):
        return x, factors, bias
    dtype, lowered = torch.get_autocast_dtype(x.device.type), _rules._lowered
    factors = {name: lowered(w, dtype) for name, w in factors.items()}
    return lowered(x, dtype), factors, None if bias is None else lowered(bias, dtype)


def _check_factors(op: str, x: Tensor, factors: dict[str, Tensor], bs_last: bool, bias: Tensor | None) -> None:
    if x.dim() == 0:
        raise RuntimeError(f"{op}: x: expected {'(features, …)' if bs_last else '(…, features)'}, got ()")
    if x.dtype not in FLOATING:
        raise RuntimeError(f"{op}: x: expected float64, float32, float16 or bfloat16, got {_name(x.dtype)}")
    features = None
    for name, w in factors.items():
        _check_like(op, name, w, x)
        features = factor_features(op, name, w.shape, features, x.shape, bs_last)
    if bias is not None:
        _check_like(op, "bias", bias, x)
        if tuple(bias.shape) != (features,):
            raise RuntimeError(f"{op}: bias: expected {(features,)}, got {tuple(bias.shape)}")


def _check_like(op: str, argument: str, value: Tensor, x: Tensor) -> None:
    if value.dtype != x.dtype:
        raise RuntimeError(f"{op}: {argument}: expected {_name(x.dtype)} like x, got {_name(value.dtype)}")
    if value.device != x.device:
        raise RuntimeError(f"{op}: {argument}: expected {x.device} like x, got {value.device}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_tensor(op: str, argument: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {argument}: expected a torch.Tensor, got {type(value).__name__}")
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise RuntimeError(f"{op}: {argument}: expected a dense tensor, got one that is {kind}")
    if type(value) is not Tensor and isinstance(value, torch.sparse.SparseSemiStructuredTensor):  # strided, it says
        raise TypeError(f"{op}: {argument}: expected a dense tensor, got {type(value).__name__}; its to_dense() is one")
    # Torch would drop a tangent without a word.
    if (
        forward_ad._current_level >= 0
        and not torch.compiler.is_compiling()
        and forward_ad.unpack_dual(value).tangent is not None
    ):
        raise NotImplementedError(
            f"{op}: {argument}: expected a tensor without a tangent, got one of forward mode; use torch.autograd.grad"
        )


def _key(op: str, layout: object) -> str:
    """What stands for the layout inside an op; a graph that may be saved gets the whole text."""
    if not isinstance(layout, BlockLayout):
        raise TypeError(f"{op}: layout: expected a fretwork.BlockLayout, got {type(layout).__name__}")
    return layout.text if torch.compiler.is_exporting() else layout.key


def _precision(op: str, name: object) -> str:
    if name is None:
        return _precision_of_torch()
    if name not in ("ieee", "tf32", "tf32x3"):
        raise RuntimeError(f"{op}: precision: expected None, ieee, tf32 or tf32x3, got {name!r}")
    return str(name)


@torch.compiler.assume_constant_result  # a compiled graph is guarded on torch's setting anyway
def _precision_of_torch() -> str:
    try:
        return _PRECISION_OF_TORCH[torch.get_float32_matmul_precision()]
    except RuntimeError:  # the user has set torch.backends.cuda.matmul.fp32_precision, and torch answers one way only
        return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _turns(op: str, trans_a: Any, trans_b: Any) -> tuple[bool, bool]:
    return flag(op, "trans_a", trans_a), flag(op, "trans_b", trans_b)


def _number(op: str, argument: str, value: Any) -> float:
    if type(value) is float:
        return value
    if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            f"{op}: {argument}: expected a number, got a tensor that requires grad; multiply or add it outside the op"
        )
    return number(op, argument, value)
