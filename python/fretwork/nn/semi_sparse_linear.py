"""A linear layer whose weight is 2:4 sparse."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fretwork import two_four
from fretwork._checks import whole_number
from fretwork._torch import two_four as rules
from fretwork._torch.arguments import FLOATING, as_number, check_tensor
from fretwork._torch.differentiable import called_plainly
from fretwork._torch.private import alive, held, in_autocast, in_forward_mode, in_transform, node_apply, whole
from fretwork.nn.hooks import always_called
from fretwork.two_four import TwoFour, from_parts, product_precision

_PRUNES, _TRAINABLES = ("magnitude", "transposable", None), ("values", "dense")


class SemiSparseLinear(nn.Module):
    """y = x Wᵀ + bias, where W (out_features, in_features) keeps two of every four neighbours (fp32: one of two).

    Drop-in for `torch.nn.Linear`. With trainable="values" the positions are fixed and `values` (out, in/2) learn,
    beside the buffer `metadata`. With trainable="dense" a dense `weight` learns, and every forward pass prunes it anew,
    by "magnitude" in rows or "transposable", where one pass makes the packings of W and of Wᵀ, so that the gradient of
    x is a sparse product too. Gradients go straight through the pruning to all of `weight`, with `decay` · W added
    where it is pruned (SR-STE). Under autocast a dense weight is lowered before it is pruned; values stay as they are.

    >>> import torch, fretwork as fw
    >>> layer = fw.nn.SemiSparseLinear(64, 32, dtype=torch.bfloat16)
    >>> layer
    SemiSparseLinear(in_features=64, out_features=32, bias=True, prune=magnitude, trainable=values, kept=2:4)
    >>> layer(torch.randn(5, 64).bfloat16()).shape, layer.values.shape, layer.metadata.shape
    (torch.Size([5, 32]), torch.Size([32, 32]), torch.Size([32, 2]))
    """

    in_features: int
    out_features: int
    values: nn.Parameter
    metadata: Tensor
    weight: nn.Parameter  # None where values are trainable
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        prune: str | None = "magnitude",
        trainable: str = "values",
        decay: float = 0.0,
    ) -> None:
        super().__init__()
        always_called(self)
        if prune not in _PRUNES:
            raise ValueError(f"SemiSparseLinear: prune: expected magnitude, transposable or None, got {prune!r}")
        if trainable not in _TRAINABLES:
            raise ValueError(f"SemiSparseLinear: trainable: expected values or dense, got {trainable!r}")
        if trainable == "dense" and prune is None:
            raise ValueError(
                "SemiSparseLinear: prune: expected magnitude or transposable for a dense weight that learns, got None"
            )
        decay = as_number("SemiSparseLinear", "decay", decay)
        if not 0 <= decay < math.inf or (decay and trainable != "dense"):
            expected = "0 where trainable is values" if trainable != "dense" else "0 or a positive number"
            raise ValueError(f"SemiSparseLinear: decay: expected {expected}, got {decay}")
        dtype = dtype or torch.get_default_dtype()
        if dtype not in FLOATING:
            raise TypeError(
                f"SemiSparseLinear: dtype: expected float64, float32, float16 or bfloat16, got {dtype}; "
                "fw.two_four.linear multiplies 8-bit weights"
            )
        group = rules.group_of(dtype)
        whole = {"in_features": group, "out_features": group if prune == "transposable" else 1}
        given = {"in_features": in_features, "out_features": out_features}
        for name, multiple in whole.items():
            size = whole_number("SemiSparseLinear", name, given[name])
            if size < 0 or size % multiple:
                expected = "0 or a positive number" if size < 0 else f"a multiple of {multiple}"
                raise ValueError(f"SemiSparseLinear: {name}: expected {expected}, got {size}")
        self.in_features, self.out_features = int(in_features), int(out_features)
        self.prune, self.trainable, self.decay = prune, trainable, decay
        linear = nn.Linear(in_features, out_features, bias, device, dtype)
        if prune is None:  # random numbers have to be pruned to begin with
            with torch.no_grad():
                linear.weight.copy_(two_four.prune(linear.weight))
        self._take(linear.weight, linear.bias)

    def _take(self, weight: Tensor, bias: Tensor | None) -> None:
        learns = weight.requires_grad
        weight = weight.detach()
        if self.trainable == "dense":  # autocast may lower it before it is pruned
            self.weight = nn.Parameter(weight.clone(), requires_grad=learns)
        else:
            two_four.say_what_float32_keeps(weight.dtype)
            if self.prune is not None:
                weight = two_four.prune(weight, transposable=self.prune == "transposable")
            # Words that process groups can send, as DDP does with buffers; few take int16.
            s = two_four.compress(weight, metadata_dtype=torch.int32, validate=self.prune is None)
            self.register_parameter("weight", None)  # as layers have it that hold no such tensor: models look at it
            self.values = nn.Parameter(s.values, requires_grad=learns)
            self.register_buffer("metadata", s.metadata)
        if bias is None:
            self.register_parameter("bias", None)
        else:
            self.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)

    @classmethod
    def from_dense(
        cls, linear: nn.Linear, prune: str | None = "magnitude", trainable: str = "values", *, decay: float = 0.0
    ) -> "SemiSparseLinear":
        """A layer with the weights of a dense one, pruned; with prune=None they are 2:4 already, or refused.

        >>> import torch, fretwork as fw
        >>> dense = torch.nn.Linear(32, 16)
        >>> layer = fw.nn.SemiSparseLinear.from_dense(dense, prune="transposable", trainable="dense")
        >>> torch.equal(layer.to_dense(), fw.two_four.prune(dense.weight, transposable=True))
        True
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"SemiSparseLinear: linear: expected a torch.nn.Linear, got {type(linear).__name__}")
        weight, bias = linear.weight, linear.bias
        # Made on "meta", so that no random numbers are drawn for weights that are replaced at once.
        layer = cls(
            linear.in_features,
            linear.out_features,
            bias is not None,
            "meta",
            weight.dtype,
            prune=prune,
            trainable=trainable,
            decay=decay,
        )
        layer._take(weight, bias)
        return layer.train(linear.training)

    @classmethod
    def from_sparse(cls, s: TwoFour, bias: Tensor | None = None) -> "SemiSparseLinear":
        """A layer whose weight (out, in) is 2:4 already, compressed along dim=-1; its values learn.

        >>> import torch, fretwork as fw
        >>> s = fw.two_four.compress(fw.two_four.prune(torch.randn(16, 32).bfloat16()))
        >>> layer = fw.nn.SemiSparseLinear.from_sparse(s)
        >>> torch.equal(layer.to_dense(), s.to_dense())
        True
        """
        if not isinstance(s, TwoFour) or s.dim != 1:
            got = f"dim={s.dim}" if isinstance(s, TwoFour) else type(s).__name__
            raise TypeError(f"SemiSparseLinear: s: expected a fretwork.TwoFour with dim=-1, got {got}")
        out_features, in_features = s.shape
        if bias is not None:
            check_tensor("SemiSparseLinear", "bias", bias)
            if tuple(bias.shape) != (out_features,) or bias.dtype != s.dtype:
                got = f"{tuple(bias.shape)} of {bias.dtype}"
                raise ValueError(f"SemiSparseLinear: bias: expected {(out_features,)} of {s.dtype}, got {got}")
        layer = cls(in_features, out_features, bias is not None, "meta", s.dtype, prune=None)
        layer._take(s.to_dense().requires_grad_(), bias if bias is None else bias.detach().requires_grad_())
        return layer

    @property
    def sparse(self) -> TwoFour:
        """The weight as the products see it; of a dense weight that autocast lowers, under autocast."""
        if self.trainable == "values":
            return from_parts(self.values, self.metadata, 1)
        weight = _lowered(self.weight, self.weight)
        return two_four.compress(two_four.prune(weight, transposable=self.prune == "transposable"))

    def to_dense(self) -> Tensor:
        """The pruned weight as an (out_features, in_features) tensor."""
        return self.sparse.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        if self.trainable == "values":
            values, metadata, bias = held(self, "values"), held(self, "metadata"), held(self, "bias")
            if in_forward_mode():
                return two_four.linear(x, from_parts(values, metadata, 1), bias)  # which refuses tangents
            check_tensor("linear", "x", x)
            return rules.linear(values, metadata, x, bias, product_precision("linear", values.dtype, None))
        return pruned_linear(x, held(self, "weight"), held(self, "bias"), self.prune == "transposable", self.decay)

    def _apply(self, fn: Any, recurse: bool = True) -> "SemiSparseLinear":
        """Only fp32 has pairs: where a change of dtype leaves it, the metadata follows; into it nothing fits."""
        words = None
        if self.trainable == "values":
            before = self.sparse.detach()
            dtype = fn(before.values.new_empty(0)).dtype
            if rules.group_of(dtype) != rules.group_of(before.dtype):
                words = two_four.regrouped(before, dtype)  # which refuses before anything has changed
        super()._apply(fn, recurse)
        if words is not None:
            self.metadata = words.to(self.values.device)
        return self

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, texts: Any, strict: bool, missing: Any, unexpected: Any, errors: Any
    ) -> None:
        """Every nibble is looked at: those of fours and of pairs may have the same shape."""
        super()._load_from_state_dict(state, prefix, texts, strict, missing, unexpected, errors)
        if self.trainable == "values" and not self.values.is_meta:
            try:
                with torch.no_grad():
                    values = whole(self.values)
                    self.metadata.copy_(two_four.canonical(values, self.metadata, 1, keep_valid=True))
            except (ValueError, RuntimeError) as error:
                errors.append(f"{prefix}metadata: {error}")

    def extra_repr(self) -> str:
        dtype = (self.weight if self.trainable == "dense" else self.values).dtype
        group = rules.group_of(dtype)  # 2 of fp32, which keeps one of two
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"prune={self.prune}, trainable={self.trainable}, kept={group // 2}:{group}"
            + (f", decay={self.decay:g}" if self.decay else "")
        )


def pruned_linear(x: Tensor, weight: Tensor, bias: Tensor | None, transposable: bool, decay: float = 0.0) -> Tensor:
    """x · prune(weight)ᵀ + bias with a dense weight, as the layer with trainable="dense" computes it."""
    check_tensor("linear", "x", x)
    if torch.compiler.is_compiling() or in_autocast():
        bias = None if bias is None else _lowered(bias, weight)
        x, weight = _lowered(x, weight), _lowered(weight, weight)
    two_four.say_what_float32_keeps(weight.dtype)
    how = (transposable, decay, product_precision("linear", weight.dtype, None))
    if called_plainly((x, weight, bias)):
        bias = None if bias is None else alive(bias)
        return _apply_pruned(alive(x), alive(weight), bias, *how)  # type: ignore[no-any-return]
    if not torch.compiler.is_compiling() and in_transform():
        pruned = two_four.prune(weight.detach(), transposable=transposable)
        return F.linear(x, _Straight.apply(weight, pruned, decay), bias)
    return PrunedLinear.apply(x, weight, bias, *how)


def _lowered(t: Tensor, weight: Tensor) -> Tensor:
    """In autocast's dtype where that is on."""
    device = t.device.type
    on = device != "meta" and torch.is_autocast_enabled(device) and weight.dtype != torch.float64
    return t.to(torch.get_autocast_dtype(device)) if on else t


class PrunedLinear(torch.autograd.Function):
    """x · prune(weight)ᵀ + bias, whose gradient goes straight through to the weight."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposable: bool, decay: float, precision: str
    ) -> Tensor:
        if transposable:
            values, metadata, *back = rules.prune_both_op(weight, torch.int16)
        else:
            pruned = rules.prune_op(weight, 1, False)
            values, metadata = rules.compress_op(pruned, 1, torch.int16, False)
            back = [pruned]
        ctx.decay, ctx.precision, ctx.transposable = decay, precision, transposable
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            x if needs_weight else None,
            weight if needs_weight and (needs_x or decay) else None,
            *(back if needs_x or (needs_weight and decay) else [None] * len(back)),
        )
        return rules.matmul_op(values, metadata, x, bias, "none", None, None, None, "linear", precision, None)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (d,) = gradients
        x, weight, *back = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        rows = rules.rows_of(d)
        d_x = d_weight = None
        kept: Any = None
        # Whether these may be differentiated themselves: straight through the pruning, as the product is.
        again = weight is not None and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if (needs_x and (again or not ctx.transposable)) or (needs_weight and ctx.decay):
            kept = rules.to_dense_op(*back, 0) if ctx.transposable else back[0]
        if needs_x and ctx.transposable and not again:
            d_x = rules.matmul_op(*back, rows, None, "none", None, None, None, "right", ctx.precision, None)
        elif needs_x:
            d_x = rows @ (_Straight.apply(weight, kept, 0.0) if again else kept)
        if needs_weight:
            d_weight = rows.T @ rules.rows_of(x)
            if kept is not None and ctx.decay:
                d_weight = d_weight + ctx.decay * torch.where(kept == 0, weight, 0)
        d_x = None if d_x is None else d_x.view(*d.shape[:-1], d_x.shape[-1])
        return d_x, d_weight, rows.sum(0) if needs_bias else None, None, None, None


_apply_pruned = node_apply(PrunedLinear)


class _Straight(torch.autograd.Function):
    """The pruned weight, whose gradient is the weight's: in the form that vmap and torch.func take, which is slower."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, pruned: Tensor, decay: float) -> Tensor:
        return pruned.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        weight, pruned, ctx.decay = inputs
        ctx.save_for_backward(*((weight, pruned) if ctx.decay else ()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (d,) = gradients
        if ctx.decay:
            weight, pruned = ctx.saved_tensors
            d = d + ctx.decay * (weight - pruned)
        return d, None, None
