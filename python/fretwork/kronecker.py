"""Kronecker-sparse factors on torch tensors: products, dense matrices, projections, and the patterns of known chains.

Lists of patterns and weights are in order of application: the first stands right-most in the matrix product.
"""

import ctypes
import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fretwork._checks import flag, whole_number
from fretwork._library import core, int64s, last_error
from fretwork._shapes import factor_features
from fretwork._torch import torch_baselines
from fretwork._torch.arguments import FLOATING, autocasts, check_tensor, dtype_name, precision_name, torch_precision
from fretwork._torch.differentiable import called_with_tensors, holds_dtensors, on_parts
from fretwork._torch.kronecker import from_dense_op, ksmm_chain_op, ksmm_op, ksmm_plainly, to_dense_op
from fretwork._torch.private import assert_in_graph
from fretwork._torch.registration import lowered
from fretwork._torch.torch_baselines import BASELINES
from fretwork.patterns import KroneckerPattern
from fretwork.patterns.kronecker import butterfly, kronecker_patterns, monarch, projected

__all__ = ["butterfly", "dense_wins", "from_dense", "ksmm", "ksmm_chain", "monarch", "plan", "project", "to_dense"]

ALGOS = ("kernel", *BASELINES, "auto")
# "auto" is the kernel: each baseline moves x, w or y more than once, and "dense" writes its matrix at every call, so
# that it loses even where a dense layer is memory-bound.
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
    library's own (with d = 1 on a GPU that may be a product by cuBLAS), or "bmm", "bsr", "einsum", "dense" or "sparse"
    of torch, or "auto", the fastest one known. `precision` as for `sdd`.

    A factorisation is not always faster: a product with a dense fp16 matrix below about 368 × 368 takes a GPU no longer
    than reading x and writing y, which every factor does as well. There `torch.nn.Linear` is the faster layer.

    >>> import torch, fretwork as fw
    >>> w = torch.ones(2, 3, 4, 5)
    >>> fw.ksmm(torch.ones(7, 40), w).shape, fw.ksmm(torch.ones(40, 7, 6), w, bs_last=True).shape
    (torch.Size([7, 30]), torch.Size([30, 7, 6]))
    >>> fw.ksmm(torch.ones(40), w, bias=torch.arange(30.0) - 30, activation="relu").tolist()[24:]
    [0.0, 0.0, 0.0, 1.0, 2.0, 3.0]
    """
    plain = bias is None and activation is None and precision is None and algo == "auto" and type(bs_last) is bool
    if plain and called_with_tensors(x, w) and x.dim() == 2:
        try:
            return ksmm_plainly(x, w, bs_last, "ieee" if x.is_cpu else torch_precision())
        except (RuntimeError, NotImplementedError):
            pass  # the checks below say what is wrong
    check_tensor("ksmm", "w", w)
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
        check_tensor("ksmm_chain", name, w)
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
    check_tensor(op, "x", x)
    if bias is not None:
        check_tensor(op, "bias", bias)
    if activation not in (None, "relu", "gelu", "silu"):
        raise RuntimeError(f"{op}: activation: expected None, relu, gelu or silu, got {activation!r}")
    if algo not in ALGOS:
        raise RuntimeError(f"{op}: algo: expected {', '.join(ALGOS[:-1])} or auto, got {algo!r}")
    if precision is not None and algo in BASELINES:
        raise NotImplementedError(
            f"{op}: precision: expected None with the algo {algo}, got {precision!r}; "
            "torch's own products follow torch.set_float32_matmul_precision"
        )
    bs_last = flag(op, "bs_last", bs_last)
    x, factors, bias = _lowered(x, factors, bias)
    _check_factors(op, x, factors, bs_last, bias)
    rest = bias, activation or "none", bs_last, precision_name(op, precision)
    weights = list(factors.values())
    if algo in OURS and holds_dtensors((x, *weights, bias)):  # cut along any dimension of rows
        if op == "ksmm":
            return on_parts(op, lambda x, w, *rest: _multiply(algo, x, [w], *rest), (x, *weights, *rest))  # type: ignore[no-any-return]
        return on_parts(op, functools.partial(_multiply, algo), (x, weights, *rest))  # type: ignore[no-any-return]
    return _multiply(algo, x, weights, *rest)


def _multiply(
    algo: str, x: Tensor, weights: list[Tensor], bias: Tensor | None, activation: str, bs_last: bool, precision: str
) -> Tensor:
    """Of x with any number of dimensions."""
    if bs_last:
        y = x if x.dim() == 2 else x.flatten(1) if x.dim() > 2 else x[:, None]
    else:
        y = x if x.dim() == 2 else x.flatten(0, -2) if x.dim() > 2 else x[None]
    if len(weights) > 1 and algo in OURS:
        y = ksmm_chain_op(y, weights, bias, activation, bs_last, precision)
    else:
        for w in weights[:-1]:
            y = _product(algo, y, w, None, "none", bs_last, precision)
        y = _product(algo, y, weights[-1], bias, activation, bs_last, precision)
    if x.dim() == 2:
        return y
    return y.reshape(y.shape[0], *x.shape[1:]) if bs_last else y.reshape(*x.shape[:-1], y.shape[1])


def _product(
    algo: str, x: Tensor, w: Tensor, bias: Tensor | None, activation: str, bs_last: bool, precision: str
) -> Tensor:
    if algo in OURS:
        return ksmm_op(x, w, bias, activation, bs_last, precision)
    if not autocasts(x):
        return torch_baselines.run(algo, x, w, bias, activation, bs_last)
    with torch.autocast(x.device.type, enabled=False):  # its casts are done
        return torch_baselines.run(algo, x, w, bias, activation, bs_last)


def _lowered(
    x: Tensor, factors: dict[str, Tensor], bias: Tensor | None
) -> tuple[Tensor, dict[str, Tensor], Tensor | None]:
    """What autocast makes of them where it is on."""
    if not autocasts(x):
        return x, factors, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    factors = {name: lowered(w, dtype) for name, w in factors.items()}
    return lowered(x, dtype), factors, lowered(bias, dtype)


def _check_factors(op: str, x: Tensor, factors: dict[str, Tensor], bs_last: bool, bias: Tensor | None) -> None:
    if x.dim() == 0:
        raise RuntimeError(f"{op}: x: expected {'(features, …)' if bs_last else '(…, features)'}, got ()")
    if x.dtype not in FLOATING:
        raise RuntimeError(f"{op}: x: expected float64, float32, float16 or bfloat16, got {dtype_name(x.dtype)}")
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
        raise RuntimeError(f"{op}: {argument}: expected {dtype_name(x.dtype)} like x, got {dtype_name(value.dtype)}")
    if value.device != x.device:
        raise RuntimeError(f"{op}: {argument}: expected {x.device} like x, got {value.device}")


def to_dense(w: Tensor) -> Tensor:
    """The matrix (a·b·d, a·c·d) of a factor with weights w (a, b, c, d). Differentiable.

    >>> import torch, fretwork as fw
    >>> fw.kronecker.to_dense(torch.tensor([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 2, 2))
    tensor([[1., 0., 3., 0.],
            [0., 2., 0., 4.]])
    """
    check_tensor("to_dense", "w", w)
    return to_dense_op(w)


def from_dense(dense: Tensor, pattern: KroneckerPattern) -> Tensor:
    """The weights (a, b, c, d) of a matrix that has nothing outside the pattern; RuntimeError where it has.

    The check waits for the GPU where the matrix is on one. Differentiable.

    >>> import torch, fretwork as fw
    >>> w = torch.randn(2, 3, 4, 5)
    >>> torch.equal(fw.kronecker.from_dense(fw.kronecker.to_dense(w), fw.KroneckerPattern(2, 3, 4, 5)), w)
    True
    """
    check_tensor("from_dense", "dense", dense)
    (pattern,) = kronecker_patterns("from_dense", [pattern], "pattern")
    w, outside = from_dense_op(dense, *pattern.weight_shape)
    if torch.compiler.is_compiling():  # a graph cannot read the place
        assert_in_graph(outside < 0, f"from_dense: dense: expected zero outside {pattern.text}, got another value")
        return w
    if dense.is_meta:
        raise RuntimeError("from_dense: dense: expected a matrix with data, got one on meta")
    if (place := int(outside.item())) >= 0:
        row, col = divmod(place, pattern.shape[1])
        value = dense[row, col].item()
        raise RuntimeError(f"from_dense: dense: expected zero outside {pattern.text}, got {value} at ({row}, {col})")
    return w


def project(W: Tensor, patterns: Sequence[KroneckerPattern]) -> tuple[list[Tensor], float]:
    """Weights whose product is near W (out, in), and its relative error in the Frobenius norm.

    For one or two patterns it is the nearest product; for L patterns the error is at most √(L − 1) times the least.
    Each pattern must be `chainable` with the product of those applied before it. Computed in float64 on the CPU, by as
    many threads as torch has; the weights have W's dtype and device, and the error is that before they are rounded to
    it. Factors have equal norms. Not differentiable.

    >>> import torch, fretwork as fw
    >>> W = torch.ones(12, 20, dtype=torch.float64)
    >>> weights, error = fw.kronecker.project(W, fw.kronecker.monarch(12, 20, 3, 5))
    >>> [tuple(w.shape) for w in weights], error < 1e-12
    ([(5, 4, 4, 1), (1, 3, 5, 4)], True)
    """
    check_tensor("project", "W", W)
    if not W.is_floating_point() or W.dim() != 2:
        raise RuntimeError(f"project: W: expected a floating (out, in) matrix, got {W.dtype} {tuple(W.shape)}")
    if W.is_meta:
        raise RuntimeError("project: W: expected a matrix with data, got one on meta")
    weights, error = projected(W.to(torch.float64).numpy(force=True), patterns, torch.get_num_threads())
    return [torch.from_numpy(w).to(W.device, W.dtype) for w in weights], error


def plan(
    patterns: Sequence[KroneckerPattern],
    arch: str = "cpu",
    dtype: torch.dtype = torch.float16,
    bs_last: bool = False,
    batch: int = 0,
) -> str:
    """How `fw.ksmm_chain` runs factors of these patterns, a line for each step.

    `arch` is "cpu", a GPU such as "cuda:0", or an architecture from "sm_75" on, such as "sm_90a", which need not be
    there. `batch` is the number of rows, which matters if they are few; 0 stands for many. Operands are assumed to be
    contiguous, and cuBLAS to be installed. The strides and precision of a call, or a tuned table, may select another
    kernel.

    >>> import fretwork as fw
    >>> print(fw.kronecker.plan(fw.kronecker.monarch(1024, 1024, 32, 32), "sm_90a"))
    0+1: fused, 16 rows
    """
    chain = _chain_on("plan", patterns, arch)
    room = ctypes.create_string_buffer(64 * len(chain) + 1)
    name = str(dtype).removeprefix("torch.").encode()
    status = core().fretwork_kronecker_plan(
        _sizes(chain),
        len(chain),
        arch.encode(),
        name,
        flag("plan", "bs_last", bs_last),
        whole_number("plan", "batch", batch),
        room,
        len(room),
    )
    if status < 0:
        raise ValueError(last_error())
    return room.value.decode()


def dense_wins(
    patterns: Sequence[KroneckerPattern],
    arch: str = "cpu",
    dtype: torch.dtype = torch.float16,
    bs_last: bool = False,
    batch: int = 0,
) -> bool:
    """Whether a product with the dense matrix of a chain is expected to take clearly less time than `ksmm_chain`.

    By the cost model that chooses kernels; False where it knows nothing: on a CPU, of fp32 and of float64, and for no
    rows. Arguments as of `plan`.

    >>> import fretwork as fw
    >>> fw.kronecker.dense_wins([fw.KroneckerPattern(1, 768, 1024, 3)], "sm_90a", batch=1000)
    True
    >>> fw.kronecker.dense_wins(fw.kronecker.monarch(4096, 4096, 64, 64), "sm_90a", batch=1000)
    False
    """
    chain = tuple(_chain_on("dense_wins", patterns, arch))
    return expects_dense(
        chain, arch, dtype, flag("dense_wins", "bs_last", bs_last), whole_number("dense_wins", "batch", batch)
    )


@functools.lru_cache(maxsize=4096)
def expects_dense(
    chain: tuple[KroneckerPattern, ...], arch: str, dtype: torch.dtype, bs_last: bool, batch: int
) -> bool:
    """`dense_wins` of arguments that are right, remembered."""
    name = str(dtype).removeprefix("torch.").encode()
    wins = core().fretwork_kronecker_dense_wins(_sizes(chain), len(chain), arch.encode(), name, bs_last, batch)
    if wins < 0:
        raise ValueError(last_error())
    return wins == 1


def _chain_on(op: str, patterns: Sequence[KroneckerPattern], arch: str) -> list[KroneckerPattern]:
    chain = kronecker_patterns(op, patterns)
    if not chain:
        raise ValueError(f"{op}: patterns: expected at least one, got none")
    if not isinstance(arch, str):
        raise TypeError(f"{op}: arch: expected a str, got {type(arch).__name__}")
    return chain


def _sizes(patterns: Sequence[KroneckerPattern]) -> ctypes.Array[ctypes.c_int64]:
    return int64s([n for p in patterns for n in p.weight_shape])
