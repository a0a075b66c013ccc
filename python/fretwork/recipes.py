"""How one layer of a model becomes sparse: recipes for `fw.sparsify`, which makes them work on whole models.

>>> import fretwork as fw
>>> fw.recipes.TwoFour()
TwoFour(prune='magnitude', trainable='values')
>>> fw.recipes.Monarch(32)
Monarch(p=32, q=None)
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from fretwork import two_four
from fretwork._checks import number, refuse, whole_number
from fretwork._shapes import check_function
from fretwork._torch.arguments import FLOATING, dtype_name
from fretwork._torch.two_four import group_of
from fretwork.kronecker import project
from fretwork.nn.block_sparse_linear import BlockSparseLinear
from fretwork.nn.ks_linear import KSLinear
from fretwork.nn.multihead_attention import MultiheadAttention
from fretwork.nn.semi_sparse_linear import SemiSparseLinear
from fretwork.patterns import BlockLayout, KroneckerPattern, Pattern
from fretwork.patterns.kronecker import kronecker_patterns, monarch

__all__ = ["Attention", "Block", "Kronecker", "Monarch", "Recipe", "TwoFour"]


class Recipe(ABC):
    """What `fw.sparsify` asks of a recipe. `kind` is the word for it in reports."""

    kind: ClassVar[str]

    @abstractmethod
    def takes(self, module: nn.Module) -> bool:
        """Whether this is the kind of module that the recipe is for. Others are passed over."""

    @abstractmethod
    def refusal(self, module: Any) -> str | None:
        """Why this module cannot be replaced, or None. Changes nothing, and costs little."""

    @abstractmethod
    def make(self, module: Any, norms: Tensor | None = None) -> nn.Module:
        """The layer that takes the module's place; `norms` are those of the input's features, float64."""


class _OfLinear(Recipe):
    """A recipe for `torch.nn.Linear`."""

    def takes(self, module: nn.Module) -> bool:
        return is_linear(module)

    def refusal(self, module: nn.Linear) -> str | None:
        return _unfit(module) or self._unfit_weight(module)

    @abstractmethod
    def _unfit_weight(self, linear: nn.Linear) -> str | None: ...


@dataclass(frozen=True)
class TwoFour(_OfLinear):
    """Two of every four weights along the input (float32: one of two), as `fw.nn.SemiSparseLinear`.

    `prune` is "magnitude", "transposable", or None for a weight that is 2:4 already. With trainable="dense" a dense
    weight learns and is pruned at every forward pass; weights that calibration drops then start at zero.

    >>> import torch, fretwork as fw
    >>> model = torch.nn.Sequential(torch.nn.Linear(32, 16).half())
    >>> report = fw.sparsify(model, {"*": fw.recipes.TwoFour()})
    >>> fw.two_four.check(model[0].to_dense())
    (True, None)
    """

    prune: str | None = "magnitude"
    trainable: str = "values"
    kind: ClassVar[str] = "two_four"

    def __post_init__(self) -> None:
        try:
            SemiSparseLinear(4, 4, False, "meta", torch.float16, prune=self.prune, trainable=self.trainable)
        except ValueError as error:
            raise ValueError(str(error).replace("SemiSparseLinear", "recipes.TwoFour", 1)) from None

    def _unfit_weight(self, linear: nn.Linear) -> str | None:
        group = group_of(linear.weight.dtype)
        if linear.in_features % group:
            return f"in_features: expected a multiple of {group}, got {linear.in_features}"
        if self.prune == "transposable" and linear.out_features % group:
            return f"out_features: expected a multiple of {group}, got {linear.out_features}"
        if self.prune is None:
            right, where = two_four.check(linear.weight)
            if not right:
                return f"weight: expected one that is 2:4 already with prune=None, got more in the group at {where}"
        return None

    def make(self, module: nn.Linear, norms: Tensor | None = None) -> SemiSparseLinear:
        if norms is None or self.prune is None:
            return SemiSparseLinear.from_dense(module, self.prune, self.trainable)
        kept = _best_of_groups(module.weight, norms, self.prune == "transposable")
        pruned = nn.Linear(module.in_features, module.out_features, False, "meta", module.weight.dtype)
        weight = module.weight.detach().where(kept, 0)
        pruned.weight = nn.Parameter(weight, requires_grad=module.weight.requires_grad)
        layer = SemiSparseLinear.from_dense(pruned, self.prune, self.trainable)
        layer.bias = module.bias
        return layer.train(module.training)


@dataclass(frozen=True)
class Block(_OfLinear):
    """The blocks of largest norm, as `fw.nn.BlockSparseLinear`.

    ⌈density · blocks⌉ of them are kept, and the best of each block row in any case, so that no output loses all of its
    inputs. `block` is a size or (rows, columns) of the weight (out, in).

    >>> import torch, fretwork as fw
    >>> model = torch.nn.Sequential(torch.nn.Linear(128, 64))
    >>> report = fw.sparsify(model, {"*": fw.recipes.Block(block=16, density=0.25)})
    >>> model[0].layout.nnz
    8
    """

    block: int | tuple[int, int] = 64
    density: float = 0.25
    kind: ClassVar[str] = "block"

    def __post_init__(self) -> None:
        op = "recipes.Block"
        density = number(op, "density", self.density)
        if not 0 <= density <= 1:
            refuse(op, "density", "0 to 1", density)
        sizes = self.block if isinstance(self.block, (tuple, list)) else (self.block, self.block)
        rows, cols = _pair(op, sizes)
        try:
            BlockLayout([[1]], (rows, cols))
        except ValueError as error:
            raise ValueError(str(error).replace("BlockLayout", op, 1)) from None
        object.__setattr__(self, "density", density)
        object.__setattr__(self, "block", rows if rows == cols else (rows, cols))

    @property
    def block_shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.block if isinstance(self.block, tuple) else (self.block, self.block)

    def _unfit_weight(self, linear: nn.Linear) -> str | None:
        sizes = ("out_features", linear.out_features), ("in_features", linear.in_features)
        for (name, size), step in zip(sizes, self.block_shape, strict=True):
            if size % step or not size:
                return f"{name}: expected a positive multiple of {step}, got {size}"
        return None

    def make(self, module: nn.Linear, norms: Tensor | None = None) -> BlockSparseLinear:
        return BlockSparseLinear.from_dense(module, BlockLayout(self._best_blocks(module.weight, norms), self.block))

    def _best_blocks(self, weight: Tensor, norms: Tensor | None) -> Tensor:
        """The mask of blocks to keep, on the CPU."""
        rows, cols = self.block_shape
        strips = _wide(weight.detach()).unflatten(0, (-1, rows))
        scores = torch.linalg.vector_norm(strips, dim=1, dtype=torch.float64)
        if norms is not None:
            scores *= norms
        scores = torch.linalg.vector_norm(scores.unflatten(1, (-1, cols)), dim=2).cpu()
        count = max(math.ceil(self.density * scores.numel()), len(scores))
        scores.scatter_(1, scores.argmax(1, keepdim=True), math.inf)
        order = scores.flatten().argsort(descending=True, stable=True)
        mask = torch.zeros(scores.numel(), dtype=torch.bool, device="cpu")
        mask[order[:count]] = True
        return mask.view_as(scores)


class _OfFactors(_OfLinear):
    """A recipe whose layer is a product of Kronecker-sparse factors, fitted to the weight."""

    @abstractmethod
    def patterns_for(self, out_features: int, in_features: int) -> list[KroneckerPattern]:
        """In order of application; ValueError where there are none."""

    def _unfit_weight(self, linear: nn.Linear) -> str | None:
        try:
            self.patterns_for(linear.out_features, linear.in_features)
        except ValueError as error:
            return str(error)
        return None

    def make(self, module: nn.Linear, norms: Tensor | None = None) -> KSLinear:
        patterns = self.patterns_for(module.out_features, module.in_features)
        if norms is None:
            return KSLinear.from_dense(module, patterns)
        # Features that calibration never saw have to be divided by something, too.
        norms = norms.clamp_min(norms.max() * 1e-6)
        weights, _ = project(module.weight.detach().double() * norms, patterns)
        a, _, c, d = weights[0].shape
        weights[0] /= norms.view(a, 1, c, d)
        weight = module.weight
        layer = KSLinear(patterns, [w.to(weight.dtype) for w in _balanced(weights)], bias=False)
        layer.weights.requires_grad_(weight.requires_grad)
        layer.bias = module.bias
        return layer.train(module.training)


@dataclass(frozen=True)
class Monarch(_OfFactors):
    """Two factors, q blocks of out/p × in/q and out/p interleaved ones of p × q, as `fw.nn.KSLinear`; q is p if None.

    >>> import torch, fretwork as fw
    >>> model = torch.nn.Sequential(torch.nn.Linear(48, 64))
    >>> report = fw.sparsify(model, {"*": fw.recipes.Monarch(8)})
    >>> model[0].patterns
    [KroneckerPattern(8, 8, 6, 1), KroneckerPattern(1, 8, 8, 8)]
    """

    p: int
    q: int | None = None
    kind: ClassVar[str] = "monarch"

    def __post_init__(self) -> None:
        for name, value in (("p", self.p), ("q", self.q)):
            if (name, value) != ("q", None):
                size = whole_number("recipes.Monarch", name, value)
                if size < 1:
                    refuse("recipes.Monarch", name, "1 or more", size)
                object.__setattr__(self, name, size)

    def patterns_for(self, out_features: int, in_features: int) -> list[KroneckerPattern]:
        return monarch(out_features, in_features, self.p, self.p if self.q is None else self.q)


@dataclass(frozen=True)
class Kronecker(_OfFactors):
    """A product of factors with given patterns, in order of application, as `fw.nn.KSLinear`.

    >>> import torch, fretwork as fw
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    >>> report = fw.sparsify(model, {"*": fw.recipes.Kronecker(fw.kronecker.butterfly(16))})
    >>> len(model[0].weights)
    4
    """

    patterns: Sequence[KroneckerPattern | Sequence[int]]
    kind: ClassVar[str] = "kronecker"

    def __post_init__(self) -> None:
        op = "recipes.Kronecker"
        patterns = tuple(kronecker_patterns(op, self.patterns))
        if not patterns:
            refuse(op, "patterns", "at least one", "none")
        whole = patterns[0]
        for n, pattern in enumerate(patterns[1:], start=1):
            if not pattern.chainable(whole):
                refuse(op, f"patterns[{n}]", f"one that chains with what is applied before it, {whole.text}", pattern)
            whole = pattern.product(whole)
        object.__setattr__(self, "patterns", patterns)
        object.__setattr__(self, "_shape", whole.shape)

    def patterns_for(self, out_features: int, in_features: int) -> list[KroneckerPattern]:
        shape: tuple[int, int] = self._shape  # type: ignore[attr-defined]
        if shape != (out_features, in_features):
            raise ValueError(f"weight: expected {shape} as the patterns have it, got {(out_features, in_features)}")
        return list(self.patterns)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Attention(Recipe):
    """`fw.nn.MultiheadAttention` over a pattern in the place of `torch.nn.MultiheadAttention`, with its parameters.

    `pattern` is a `fw.Pattern`, a sequence with one for each head, or a function of (Sq, Sk).

    >>> import torch, fretwork as fw
    >>> model = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    >>> window = fw.patterns.sliding_window(100, 8, 8)
    >>> report = fw.sparsify(model, {"self_attn": fw.recipes.Attention(window)})
    >>> model(torch.randn(2, 100, 64)).shape
    torch.Size([2, 100, 64])
    """

    pattern: Pattern | Sequence[Pattern] | Callable[[int, int], Pattern | Sequence[Pattern]]
    kind: ClassVar[str] = "attention"

    def __post_init__(self) -> None:
        given = self.pattern
        if isinstance(given, Pattern):
            return
        if callable(given) and not isinstance(given, type):
            return check_function("recipes.Attention", "pattern", given)
        one_each = isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 0
        if not one_each or not all(isinstance(p, Pattern) for p in given):  # type: ignore[union-attr]
            expected = "a fretwork.Pattern, a sequence of them or a function of (Sq, Sk)"
            refuse("recipes.Attention", "pattern", expected, repr(given), TypeError)
        object.__setattr__(self, "pattern", tuple(given))  # type: ignore[arg-type]

    def takes(self, module: nn.Module) -> bool:
        return isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward

    def refusal(self, module: nn.MultiheadAttention) -> str | None:
        if module.bias_k is not None or module.add_zero_attn:
            return f"expected one without {'add_bias_kv' if module.bias_k is not None else 'add_zero_attn'}"
        heads = len(self.pattern) if isinstance(self.pattern, tuple) else 1
        if heads not in (1, module.num_heads):
            return f"pattern: expected one for each of {module.num_heads} heads, got {heads}"
        if (dtype := module.out_proj.weight.dtype) not in FLOATING:
            return f"weights: expected float64, float32, float16 or bfloat16, got {dtype_name(dtype)}"
        return altered(module) or altered(module.out_proj)

    def make(self, module: nn.MultiheadAttention, norms: Tensor | None = None) -> MultiheadAttention:
        layer = MultiheadAttention.from_dense(module, self.pattern)
        for name, parameter in module.named_parameters():  # the very same ones, which others may share
            owner = layer.out_proj if name.startswith("out_proj.") else layer
            setattr(owner, name.rpartition(".")[2], parameter)
        return layer


def is_linear(module: nn.Module) -> bool:
    """Whether it is a `torch.nn.Linear` that does what torch's does, and is called for it: torch's attention reads the
    weight of its own output projection instead."""
    return (
        isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear)
    )


def altered(module: nn.Module) -> str | None:
    """What a module has that its replacement would not have."""
    if is_parametrized(module):
        return "expected plain parameters, got parametrized ones; remove_parametrizations makes them plain"
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, name, None) for name in hooks) or "forward" in vars(module):
        return "expected a module without hooks or a forward of its own, got one with; the new layer would lose them"
    return None


def _unfit(linear: nn.Linear) -> str | None:
    """Why no recipe takes this layer."""
    weight = linear.weight
    if isinstance(weight, nn.UninitializedParameter):
        return "weight: expected one with data, got an uninitialized one; run the model once before"
    if (reason := altered(linear)) is not None:
        return reason
    named = itertools.chain(linear.named_parameters(), linear.named_buffers(), linear.named_children())
    if more := [name for name, _ in named if name not in ("weight", "bias")]:
        return f"expected a weight and a bias alone, got {more[0]} beside them; the new layer would lose it"
    if not isinstance(weight, nn.Parameter) or type(weight.data) is not Tensor or weight.layout != torch.strided:
        return f"weight: expected a plain dense parameter, got {type(weight.data).__name__} of {weight.layout}"
    if weight.shape != (shape := (linear.out_features, linear.in_features)):
        return f"weight: expected {shape} as the layer says, got {tuple(weight.shape)}"
    if weight.is_meta:
        return "weight: expected one with data, got one on meta; fw.restructure works there"
    if weight.dtype not in FLOATING or (weight.dtype == torch.float64 and not weight.is_cpu):
        return f"weight: expected float64 on a CPU, float32, float16 or bfloat16, got {dtype_name(weight.dtype)}"
    if not weight.isfinite().all():
        return "weight: expected finite elements, got others"
    return None


def _pair(op: str, sizes: Sequence[Any]) -> tuple[int, int]:
    if len(sizes) != 2:
        refuse(op, "block", "a size or (rows, columns)", tuple(sizes))
    rows, cols = (whole_number(op, "block", size) for size in sizes)
    return rows, cols


def _wide(weight: Tensor) -> Tensor:
    return weight if weight.dtype == torch.float64 else weight.float()


# Rows are scored this many elements at a time: the scores of a large layer would take several times its memory.
_CHUNK = 2**24


def _best_of_groups(weight: Tensor, norms: Tensor, transposable: bool) -> Tensor:
    """Which weights 2:4 keeps (float32: 1:2) by |weight| · norm of its feature."""
    weight, group = weight.detach(), group_of(weight.dtype)
    norms = norms / norms.max()  # so that nothing overflows
    if not transposable:
        step = max(1, _CHUNK // max(weight.shape[1], 1))
        parts = [_halves(_wide(rows).abs() * norms.to(_wide(rows).dtype), group) for rows in weight.split(step)]
        return torch.cat(parts)
    scores = _wide(weight).abs() * norms
    scores = scores / scores.max()
    # The dtype says how large a group is, so that a GPU, which has no float64 here, takes rounded scores.
    kind = torch.float32 if group == 2 else torch.float64 if weight.is_cpu else weight.dtype
    scores = scores.to(kind).clamp_min(torch.finfo(kind).tiny)  # pruned is what becomes zero
    return two_four.prune(scores, transposable=True) != 0


def _halves(scores: Tensor, group: int) -> Tensor:
    """The larger half of each group along the last axis; of equal scores the first."""
    columns = scores.unflatten(-1, (-1, group)).unbind(-1)
    ranks = [torch.zeros_like(columns[0], dtype=torch.int8) for _ in columns]
    for i in range(group):
        for j in range(i + 1, group):
            later = columns[j] > columns[i]
            ranks[i] += later
            ranks[j] += ~later
    return (torch.stack(ranks, -1) < group // 2).flatten(-2)


def _balanced(weights: list[Tensor]) -> list[Tensor]:
    """Factors of equal norm with the same product, as `project` makes them."""
    sizes = [w.norm().item() for w in weights]
    if not all(sizes):
        return weights
    each = math.exp(sum(map(math.log, sizes)) / len(sizes))
    return [w * (each / size) for w, size in zip(weights, sizes, strict=True)]
