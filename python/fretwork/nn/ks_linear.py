"""A linear layer whose weight is a product of Kronecker-sparse factors."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fretwork._checks import flag
from fretwork._torch.arguments import FLOATING, autocasts, check_tensor, torch_precision
from fretwork._torch.differentiable import called_plainly
from fretwork._torch.kronecker import ksmm_chain_plainly
from fretwork._torch.private import held, listed, state_of
from fretwork._torch.torch_baselines import BASELINES
from fretwork.kronecker import ALGOS, OURS, expects_dense, ksmm_chain, plan, project, to_dense
from fretwork.nn._structure import Structured
from fretwork.nn.hooks import always_called
from fretwork.patterns import KroneckerPattern
from fretwork.patterns.kronecker import kronecker_patterns

Patterns = Iterable[KroneckerPattern | Sequence[int]]


class _Dense(NamedTuple):
    """The dense matrix of these weights in these states, made on this stream."""

    weights: list[Tensor]
    states: list[tuple[int, int]]
    matrix: Tensor
    stream: torch.cuda.Stream | None


def may_keep_dense(weight: Tensor) -> bool:
    """On a GPU whose current stream records no graph, which must not depend on a matrix that the layer may drop."""
    return weight.is_cuda and not torch.cuda.is_current_stream_capturing()


class KSLinear(Structured):
    """y = x Wᵀ + bias, where W is the product of factors with the given patterns; patterns[0] is applied first.

    A pattern is a `fw.KroneckerPattern` or its (a, b, c, d). `weights` has a parameter of that shape for each. Drop-in
    for `torch.nn.Linear`, and with `bs_last` for features that come first, x (in_features, …). `algo` is that of
    `fw.ksmm`. `weights` given at the start are taken as they are, and dtype and device follow them. The patterns travel
    in the state_dict's metadata, and weights of others are refused.

    With `cache_dense` the layer keeps its dense matrix at inference and multiplies with it where the cost model expects
    that to be clearly faster (`fw.kronecker.dense_wins`): 16-bit layers on a GPU, in `eval()` mode, where no gradient
    of the weights is recorded, and not while a CUDA graph is captured. The matrix takes out · in elements. `train()`,
    `eval()`, moving the layer and in-place changes of its weights drop it; a change through `weight.data` is not seen
    before one of these.

    >>> import torch, fretwork as fw
    >>> layer = fw.nn.KSLinear([(6, 4, 5, 1), (1, 8, 6, 4)])
    >>> layer
    KSLinear(in_features=30, out_features=32, patterns=[(6, 4, 5, 1), (1, 8, 6, 4)], bias=True, algo=auto)
    >>> layer(torch.randn(5, 30)).shape, layer.to_dense().shape
    (torch.Size([5, 32]), torch.Size([32, 30]))
    """

    in_features: int
    out_features: int
    patterns: list[KroneckerPattern]
    weights: nn.ParameterList
    bias: nn.Parameter | None

    def __init__(
        self,
        patterns: Patterns,
        weights: Iterable[Tensor] | None = None,
        bias: bool = True,
        algo: str = "auto",
        dtype: torch.dtype | None = None,
        bs_last: bool = False,
        device: torch.device | str | None = None,
        cache_dense: bool = False,
    ) -> None:
        super().__init__()
        always_called(self)
        self.patterns = _chain(patterns)
        self.in_features, self.out_features = self.patterns[0].shape[1], self.patterns[-1].shape[0]
        if algo not in ALGOS:
            raise ValueError(f"KSLinear: algo: expected {', '.join(ALGOS[:-1])} or auto, got {algo!r}")
        bias = flag("KSLinear", "bias", bias)
        if dtype is not None and dtype not in FLOATING:
            raise ValueError(f"KSLinear: dtype: expected float64, float32, float16 or bfloat16, got {dtype}")
        self.algo, self.bs_last = algo, flag("KSLinear", "bs_last", bs_last)
        self.cache_dense = flag("KSLinear", "cache_dense", cache_dense)
        if self.cache_dense and algo not in OURS:
            raise ValueError(f"KSLinear: cache_dense: expected False with the algo {algo}, got True")
        self._dense: _Dense | None = None
        if weights is None:
            shapes = [p.weight_shape for p in self.patterns]
            self.weights = nn.ParameterList(torch.empty(shape, device=device, dtype=dtype) for shape in shapes)
        else:
            self.weights = nn.ParameterList(_parameter(w, dtype, device) for w in _of_patterns(weights, self.patterns))
        self.register_parameter("weight", None)  # as layers have it that hold no such tensor: models look at it
        first = self.weights[0]
        if bias:
            self.bias = nn.Parameter(torch.empty(self.out_features, device=first.device, dtype=first.dtype))
        else:
            self.register_parameter("bias", None)
        if weights is None:
            self.reset_parameters()
        else:
            self._reset_bias()

    def reset_parameters(self) -> None:
        """Uniform, each factor by its own fan-in c and the bias by that of the layer."""
        for w in self.weights:
            bound = 1 / math.sqrt(w.shape[2])
            nn.init.uniform_(w, -bound, bound)
        self._reset_bias()

    def _reset_bias(self) -> None:
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    @classmethod
    def from_dense(cls, linear: nn.Linear, patterns: Patterns) -> "KSLinear":
        """A layer near a dense one: its weight is `fw.kronecker.project` of the dense weight, its bias the same.

        >>> import torch, fretwork as fw
        >>> dense = torch.nn.Linear(20, 12)
        >>> layer = fw.nn.KSLinear.from_dense(dense, fw.kronecker.monarch(12, 20, 3, 5))
        >>> bool((layer.to_dense() - dense.weight).norm() < dense.weight.norm())
        True
        """

        if not isinstance(linear, nn.Linear):
            raise TypeError(f"KSLinear: linear: expected a torch.nn.Linear, got {type(linear).__name__}")
        weight, bias = linear.weight, linear.bias
        chain = _chain(patterns)
        try:
            weights, _ = project(weight.detach(), chain)
        except NotImplementedError:
            raise
        except RuntimeError as error:  # which here comes from a constructor
            detail = str(error).removeprefix("project: ").replace("W:", "linear.weight:", 1)
            raise ValueError(f"KSLinear: {detail}") from None
        layer = cls(chain, weights, bias=False, dtype=weight.dtype, device=weight.device)
        layer.weights.requires_grad_(weight.requires_grad)
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
        return layer.train(linear.training)

    def to_dense(self) -> Tensor:
        """The product of the factors as an (out_features, in_features) tensor."""

        first, *rest = self.weights
        if not rest:
            return to_dense(first)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):  # the weights' own dtype
            return ksmm_chain(to_dense(first), rest, bs_last=True)

    def plan(self, arch: str | None = None, batch: int = 0) -> str:
        """How the layer runs, a line for each step; factors are counted from 0 in order of application.

        `arch` is that of a GPU, such as "sm_90a", whether there is one or not, or "cpu"; without it, of the layer.
        `batch` counts where rows are few; 0 stands for many.

        >>> import torch, fretwork as fw
        >>> layer = fw.nn.KSLinear(fw.kronecker.monarch(4096, 4096, 64, 64), dtype=torch.float16, device="meta")
        >>> print(layer.plan("sm_90a"))
        0+1: fused, clusters of 8, 16 rows
        >>> print(layer.plan("cpu"))
        0: cpu
        1: cpu
        """

        if self.algo in BASELINES:
            return "\n".join(f"{n}: {self.algo}" for n in range(len(self.patterns)))
        weight = self.weights[0]
        here = f"cuda:{weight.device.index or 0}" if weight.is_cuda else "cpu"
        return plan(self.patterns, here if arch is None else arch, weight.dtype, self.bs_last, batch)

    def forward(self, x: Tensor) -> Tensor:
        weights, bias = listed(self.weights), held(self, "bias")
        rank = x.dim() if isinstance(x, Tensor) else 0
        short = self.algo in OURS and (rank == 2 or (rank > 2 and not self.bs_last))
        if not short or not called_plainly((x, bias, *weights)):
            self._check(x, weights[0])
            return ksmm_chain(x, weights, self.bs_last, bias, algo=self.algo)
        if self.cache_dense and self._dense_wins(x, weights):
            return self._dense_product(x, weights, bias)
        try:
            rows = x if rank == 2 else x.flatten(0, -2)
            y = ksmm_chain_plainly(rows, weights, bias, "none", self.bs_last, torch_precision())
        except RuntimeError:
            self._check(x, weights[0])  # says what is wrong in the layer's words
            raise
        return y if rank == 2 else y.reshape(*x.shape[:-1], self.out_features)

    def _dense_wins(self, x: Tensor, weights: list[Tensor]) -> bool:
        first = weights[0]
        if self.training or not may_keep_dense(first) or x.device != first.device or x.dtype is not first.dtype:
            return False
        if x.shape[0 if self.bs_last else -1] != self.in_features or any(w.is_inference() for w in weights):
            return False  # inference tensors count no changes
        if torch.is_grad_enabled() and any(w.requires_grad for w in weights):
            return False
        rows = x.numel() // self.in_features if self.in_features else 0
        return expects_dense(tuple(self.patterns), f"cuda:{first.device.index}", first.dtype, self.bs_last, rows)

    def _dense_product(self, x: Tensor, weights: list[Tensor], bias: Tensor | None) -> Tensor:
        dense = self._cached(weights)
        if not self.bs_last:
            return F.linear(x, dense, bias)
        return dense @ x if bias is None else torch.addmm(bias[:, None], dense, x)

    def _cached(self, weights: list[Tensor]) -> Tensor:
        kept, stream = self._dense, torch.cuda.current_stream(weights[0].device) if weights[0].is_cuda else None
        states = [state_of(w) for w in weights]
        if kept is None or kept.states != states or any(a is not b for a, b in zip(kept.weights, weights, strict=True)):
            with torch.inference_mode(False), torch.no_grad():
                kept = _Dense(weights, states, self.to_dense(), stream)
            if stream is not None:
                stream.synchronize()  # once, so that other streams may read it
            self._dense = kept
        if stream is not None and stream != kept.stream:
            kept.matrix.record_stream(stream)
        return kept.matrix

    def train(self, mode: bool = True) -> "KSLinear":
        self._dense = None
        return super().train(mode)

    def _apply(self, fn: Any, recurse: bool = True) -> "KSLinear":
        self._dense = None
        return super()._apply(fn, recurse)  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dense": None}  # copies and files hold the factors only

    def _check(self, x: Tensor, weight: Tensor) -> None:
        check_tensor("KSLinear", "x", x)
        if x.dim() < 1 or x.shape[0 if self.bs_last else -1] != self.in_features:
            expected = f"({self.in_features}, …)" if self.bs_last else f"(…, {self.in_features})"
            raise RuntimeError(f"KSLinear: x: expected {expected}, got {tuple(x.shape)}")
        if x.device != weight.device:
            raise RuntimeError(f"KSLinear: x: expected a tensor on {weight.device}, got one on {x.device}")
        if x.dtype is not weight.dtype and not autocasts(x):
            raise RuntimeError(f"KSLinear: x: expected {weight.dtype} like the weights, got {x.dtype}")

    def _structure(self) -> str:
        return "; ".join(p.text for p in self.patterns)

    def extra_repr(self) -> str:
        patterns = ", ".join(str(p.weight_shape) for p in self.patterns)
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, patterns=[{patterns}], "
            f"bias={self.bias is not None}, algo={self.algo}"
            + (", bs_last=True" if self.bs_last else "")
            + (", cache_dense=True" if self.cache_dense else "")
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"  # without the list of parameters, which says it again


def _chain(patterns: Patterns) -> list[KroneckerPattern]:
    """Patterns that fit one after another."""
    chain = kronecker_patterns("KSLinear", patterns)
    if not chain:
        raise ValueError("KSLinear: patterns: expected at least one, got none")
    for n, (before, pattern) in enumerate(itertools.pairwise(chain), start=1):
        if pattern.shape[1] != before.shape[0]:
            raise ValueError(
                f"KSLinear: patterns[{n}]: expected {before.shape[0]} in features (a·c·d), as come before it, "
                f"got {pattern.shape[1]} of {pattern.weight_shape}"
            )
    return chain


def _of_patterns(given: Iterable[Tensor], patterns: list[KroneckerPattern]) -> list[Tensor]:
    if not isinstance(given, Iterable):
        raise TypeError(f"KSLinear: weights: expected a sequence of tensors, got {type(given).__name__}")
    weights = list(given)
    if len(weights) != len(patterns):
        raise ValueError(f"KSLinear: weights: expected {len(patterns)}, one for each pattern, got {len(weights)}")
    for n, (w, p) in enumerate(zip(weights, patterns, strict=True)):
        if not isinstance(w, Tensor):
            raise TypeError(f"KSLinear: weights[{n}]: expected a torch.Tensor, got {type(w).__name__}")
        if w.dtype not in FLOATING:
            raise ValueError(f"KSLinear: weights[{n}]: expected float64, float32, float16 or bfloat16, got {w.dtype}")
        if tuple(w.shape) != p.weight_shape:
            raise ValueError(f"KSLinear: weights[{n}]: expected {p.weight_shape} of its pattern, got {tuple(w.shape)}")
        if (w.dtype, w.device) != (weights[0].dtype, weights[0].device):
            raise ValueError(
                f"KSLinear: weights[{n}]: expected {weights[0].dtype} on {weights[0].device} like weights[0], "
                f"got {w.dtype} on {w.device}"
            )
    return weights


def _parameter(w: Tensor, dtype: torch.dtype | None, device: torch.device | str | None) -> nn.Parameter:
    """A parameter stays the one it is, so that layers can share it, or as frozen as it is where it has to change."""
    moved = w.to(device=w.device if device is None else device, dtype=dtype or w.dtype)
    if not isinstance(w, nn.Parameter):
        return nn.Parameter(moved.detach())
    return w if moved is w else nn.Parameter(moved.detach(), requires_grad=w.requires_grad)
