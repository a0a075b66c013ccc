"""Multi-head attention over a pattern, with the parameters and the call of torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fretwork._checks import flag, whole_number
from fretwork._shapes import WAYS, check_function
from fretwork._torch.arguments import FLOATING, as_number, autocasts, dtype_name
from fretwork._torch.attention_by_length import causal_part, causally, goes_by_length
from fretwork.attention import attention
from fretwork.nn._structure import Structured, shortened
from fretwork.patterns import Pattern

_OP = "MultiheadAttention"
AnyPattern = Pattern | Sequence[Pattern] | Callable[[int, int], Pattern | Sequence[Pattern]]


class MultiheadAttention(Structured):
    """`torch.nn.MultiheadAttention` in which a query sees the keys of a pattern.

    Parameters have torch's names and shapes, so its checkpoints load. With fewer key and value heads
    (`num_kv_heads`), `k_proj_weight` and `v_proj_weight` have that many heads of rows. `pattern` is a `fw.Pattern`, a
    sequence with one for each head, or a function of (Sq, Sk) that gives either. Inputs are (B, S, E), (S, B, E) with
    batch_first=False, or (S, E); key None is the query and value None the key.

    `key_padding_mask` (B, Sk) and `attn_mask`, (Sq, Sk), (B·H, Sq, Sk) or whatever broadcasts to (B, H, Sq, Sk), hide
    where they are True, or are floats that are added to the scores. `is_causal` takes pattern & causal; a mask beside
    it is applied too, so leave it out where it says the same. A query that sees nothing gives the output bias. Scores
    are never stored, so `need_weights=True` raises NotImplementedError.

    The pattern travels in the state_dict's metadata, and weights saved with another one are refused;
    `dict(state_dict)` drops it. A function is not saved.

    >>> import torch, fretwork as fw
    >>> attn = fw.nn.MultiheadAttention(64, 4, fw.patterns.sliding_window(100, 16, 0))
    >>> attn
    MultiheadAttention(
      embed_dim=64, num_heads=4, pattern=sliding_window(100,16,0)
      (out_proj): Linear(in_features=64, out_features=64, bias=True)
    )
    >>> out, none = attn(torch.randn(2, 100, 64))
    >>> out.shape
    torch.Size([2, 100, 64])
    """

    # Where torch finds this False, its encoder neither computes dense attention itself in eval mode nor packs a padded
    # batch into a nested tensor.
    _qkv_same_embed_dim = False

    in_proj_weight: nn.Parameter | None
    q_proj_weight: nn.Parameter | None
    k_proj_weight: nn.Parameter | None
    v_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    out_proj: nn.Linear

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        pattern: AnyPattern,
        dropout: float = 0.0,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        num_kv_heads: int | None = None,
        batch_first: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim = _positive("embed_dim", embed_dim)
        self.num_heads = _positive("num_heads", num_heads)
        self.num_kv_heads = _positive("num_kv_heads", num_heads if num_kv_heads is None else num_kv_heads)
        self.kdim = _positive("kdim", embed_dim if kdim is None else kdim)
        self.vdim = _positive("vdim", embed_dim if vdim is None else vdim)
        if self.embed_dim % self.num_heads:
            raise ValueError(f"{_OP}: embed_dim: expected a multiple of num_heads {num_heads}, got {embed_dim}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{_OP}: num_kv_heads: expected a divisor of num_heads {num_heads}, got {num_kv_heads}")
        self.dropout = as_number(_OP, "dropout", dropout)
        if not 0 <= self.dropout <= 1:
            raise ValueError(f"{_OP}: dropout: expected 0 to 1, got {dropout}")
        if dtype not in (None, *FLOATING):
            raise TypeError(f"{_OP}: dtype: expected None, float64, float32, float16 or bfloat16, got {dtype}")
        self.head_dim = self.embed_dim // self.num_heads
        self.batch_first = flag(_OP, "batch_first", batch_first)
        self.pattern = _checked(pattern, self.num_heads)
        self._make_parameters(flag(_OP, "bias", bias), device, dtype)

    def _make_parameters(self, bias: bool, device: Any, dtype: torch.dtype | None) -> None:
        embed, narrow = self.embed_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...] | None] = dict.fromkeys(
            ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias")
        )
        if embed == self.kdim == self.vdim == narrow:
            shapes["in_proj_weight"] = (3 * embed, embed)
        else:
            shapes["q_proj_weight"] = (embed, embed)
            shapes["k_proj_weight"], shapes["v_proj_weight"] = (narrow, self.kdim), (narrow, self.vdim)
        if bias:
            shapes["in_proj_bias"] = (embed + 2 * narrow,)
        for name, shape in shapes.items():
            made = None if shape is None else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
            self.register_parameter(name, made)
        self.out_proj = nn.Linear(embed, embed, bias, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As torch's: the same seed gives the same weights in a new module."""
        for weight in self._projections():
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def _projections(self) -> list[nn.Parameter | None]:
        return [self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]

    @classmethod
    def from_dense(cls, mha: nn.MultiheadAttention, pattern: AnyPattern) -> MultiheadAttention:
        """A layer with the weights of a dense one, in which queries see the keys of `pattern` only.

        >>> import torch, fretwork as fw
        >>> dense = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        >>> layer = fw.nn.MultiheadAttention.from_dense(dense, fw.patterns.full(10))
        >>> x = torch.randn(2, 10, 32)
        >>> torch.allclose(layer(x)[0], dense(x, x, x)[0], atol=1e-5)
        True
        """
        if not isinstance(mha, nn.MultiheadAttention):
            raise TypeError(f"{_OP}: mha: expected a torch.nn.MultiheadAttention, got {type(mha).__name__}")
        if mha.bias_k is not None or mha.add_zero_attn:
            extra = "add_bias_kv" if mha.bias_k is not None else "add_zero_attn"
            raise NotImplementedError(
                f"{_OP}: mha: expected one without {extra}, got one with it; append the extra key and value to the "
                "sequence, and give the pattern a column for them"
            )
        weight, biased = mha.out_proj.weight, mha.in_proj_bias is not None
        # Made on "meta", so that no random numbers are drawn for weights that are replaced at once.
        layer = cls(
            mha.embed_dim, mha.num_heads, pattern, mha.dropout, biased, mha.kdim, mha.vdim,
            batch_first=mha.batch_first, device="meta", dtype=weight.dtype,
        )  # fmt: skip
        for name, given in mha.named_parameters():
            owner = layer.out_proj if name.startswith("out_proj.") else layer
            copied = nn.Parameter(given.detach().clone(), requires_grad=given.requires_grad)
            setattr(owner, name.rpartition(".")[2], copied)
        return layer.train(mha.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        if need_weights:
            raise NotImplementedError(
                f"{_OP}: need_weights: expected False, got True; scores are not stored: "
                "fw.r_sddmm and fw.r_softmax give them for one pattern"
            )
        if isinstance(query, Tensor) and query.is_nested:
            return self._nested(query, key, value, key_padding_mask, attn_mask, is_causal), None
        key = query if key is None else key
        value = key if value is None else value
        self._check_inputs(query, key, value)
        apart = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        projected = project((query, key, value), self.in_proj_weight, apart, self.in_proj_bias)
        q, k, v = (self._heads(x) for x in projected)
        pattern = self._pattern_of(q.shape[2], k.shape[2], is_causal)
        bias = None if attn_mask is None else _attention_mask(attn_mask, q, k)
        padding = None if key_padding_mask is None else _padding_mask(key_padding_mask, k, query.dim() == 2)
        o = _attend(q, k, v, pattern, bias, padding, self.dropout if self.training else 0.0)
        return self.out_proj(self._joined(o, query.dim())), None

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        weight = self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight
        assert weight is not None
        batch_dim = 0 if self.batch_first else 1
        sizes = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}
        for (name, size), x in zip(sizes.items(), (query, key, value), strict=True):
            if not isinstance(x, Tensor):
                raise TypeError(f"{_OP}: {name}: expected a torch.Tensor, got {type(x).__name__}")
            if x.dim() not in (2, 3) or x.dim() != query.dim() or x.shape[-1] != size:
                forms = {2: f"(S, {size})", 3: f"(B, S, {size})" if self.batch_first else f"(S, B, {size})"}
                expected = (
                    forms[query.dim()] if query.dim() in forms and name != "query" else " or ".join(forms.values())
                )
                raise RuntimeError(f"{_OP}: {name}: expected {expected}, got {tuple(x.shape)}")
            if x.device != weight.device:
                raise RuntimeError(f"{_OP}: {name}: expected a tensor on {weight.device}, got one on {x.device}")
            if x.dtype != weight.dtype and not (autocasts(x) and x.is_floating_point()):
                raise RuntimeError(
                    f"{_OP}: {name}: expected {weight.dtype} like the weights, got {dtype_name(x.dtype)}"
                )
            if x.dim() == 3 and x.shape[batch_dim] != query.shape[batch_dim]:
                expected = f"a batch of {query.shape[batch_dim]} like the query"
                raise RuntimeError(f"{_OP}: {name}: expected {expected}, got {tuple(x.shape)}")
        if value.shape[:-1] != key.shape[:-1]:
            expected = f"{tuple(key.shape[:-1])} before its features, like the key"
            raise RuntimeError(f"{_OP}: value: expected {expected}, got {tuple(value.shape)}")

    def _heads(self, x: Tensor) -> Tensor:
        """(B, H, S, D) from what a projection gives, without a copy."""
        x = x.unflatten(-1, (-1, self.head_dim))
        if x.dim() == 3:
            return x.transpose(0, 1)[None]
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _joined(self, o: Tensor, dims: int) -> Tensor:
        """The way back of `_heads`: features side by side, in the query's order of dimensions."""
        if dims == 2:
            return o[0].transpose(0, 1).flatten(-2)
        return (o.transpose(1, 2) if self.batch_first else o.permute(2, 0, 1, 3)).flatten(-2)

    def _pattern_of(self, rows: int, cols: int, is_causal: bool) -> AnyPattern:
        made = self.pattern
        if not isinstance(made, (Pattern, tuple)):
            if goes_by_length(made):
                return causally(made) if is_causal else made
            made = _checked(made(rows, cols), self.num_heads, "pattern(Sq, Sk)")
        if not is_causal:
            return made
        if isinstance(made, Pattern):
            return causal_part(made, rows, cols)
        return [causal_part(p, rows, cols) for p in made]

    def _nested(self, query: Tensor, key: object, value: object, *rest: Any) -> Tensor:
        """A batch that torch's encoder packed because of its padding: unpacked, attended and packed again.

        An encoder does so if it was made with dense layers, whose attention was replaced afterwards.
        """
        padding, mask, is_causal = rest
        if not ((key is None or key is query) and (value is None or value is query) and padding is mask is None):
            raise NotImplementedError(
                f"{_OP}: query: expected a nested tensor without other keys, values or masks, got some; "
                "use padded tensors and key_padding_mask"
            )
        items = query.unbind()
        lengths = torch.tensor([len(x) for x in items], device=query.device)
        first = self.pattern[0] if isinstance(self.pattern, tuple) else self.pattern
        size = first.shape[-2] if isinstance(first, Pattern) else max(map(len, items))
        x = query.to_padded_tensor(0.0, (len(items), size, self.embed_dim))
        hidden = torch.arange(size, device=query.device) >= lengths[:, None]
        o, _ = self.forward(x if self.batch_first else x.transpose(0, 1), key_padding_mask=hidden, is_causal=is_causal)
        o = o if self.batch_first else o.transpose(0, 1)
        return torch.nested.as_nested_tensor([row[: len(x)] for row, x in zip(o, items, strict=True)])

    def _structure(self) -> str | None:
        if isinstance(self.pattern, Pattern):
            return self.pattern.text
        return "; ".join(p.text for p in self.pattern) if isinstance(self.pattern, tuple) else None

    def extra_repr(self) -> str:
        name = getattr(self.pattern, "__name__", type(self.pattern).__name__)
        text = self._structure() or str(name)
        options = {
            "num_kv_heads": self.num_kv_heads if self.num_kv_heads != self.num_heads else None,
            "kdim": self.kdim if self.kdim != self.embed_dim else None,
            "vdim": self.vdim if self.vdim != self.embed_dim else None,
            "dropout": self.dropout or None,
            "bias": False if self.in_proj_bias is None else None,
            "batch_first": None if self.batch_first else False,
        }
        said = "".join(f", {name}={value}" for name, value in options.items() if value is not None)
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, pattern={shortened(text)}{said}"


def project(
    inputs: tuple[Tensor, Tensor, Tensor], packed: Tensor | None, apart: Sequence[Tensor | None], bias: Tensor | None
) -> Sequence[Tensor]:
    """Query, key and value by a packed weight or three; one product for inputs that are the same tensor."""
    query, key, value = inputs
    if packed is not None and query is key and key is value:
        return F.linear(query, packed, bias).chunk(3, -1)
    weights = [w for w in (apart if packed is None else packed.chunk(3)) if w is not None]
    biases = [None] * 3 if bias is None else bias.split([len(w) for w in weights])
    if packed is not None and key is value:
        size = len(weights[0])
        pair = F.linear(key, packed[size:], None if bias is None else bias[size:]).chunk(2, -1)
        return F.linear(query, weights[0], biases[0]), *pair
    return [F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]


def _positive(argument: str, value: Any) -> int:
    number = whole_number(_OP, argument, value)
    if number < 1:
        raise ValueError(f"{_OP}: {argument}: expected 1 or more, got {number}")
    return number


def _checked(pattern: Any, heads: int, argument: str = "pattern") -> Any:
    """A pattern, a tuple of one for each head, or a function."""
    if isinstance(pattern, Pattern):
        return pattern
    if argument == "pattern" and callable(pattern):
        check_function(_OP, argument, pattern)
        return pattern
    if isinstance(pattern, str) or not isinstance(pattern, Sequence):
        kinds, got = "a fretwork.Pattern, a sequence of them or a function of (Sq, Sk)", type(pattern).__name__
        raise TypeError(f"{_OP}: {argument}: expected {kinds}, got {got}{WAYS.get(got, '')}")
    if len(pattern) not in (1, heads):
        raise ValueError(f"{_OP}: {argument}: expected one for each of {heads} heads, got {len(pattern)}")
    for n, p in enumerate(pattern):
        if not isinstance(p, Pattern):
            raise TypeError(f"{_OP}: {argument}[{n}]: expected a fretwork.Pattern, got {type(p).__name__}")
    return pattern[0] if len(pattern) == 1 else tuple(pattern)


def _mask(name: str, mask: Tensor, like: Tensor) -> Tensor:
    """Bool, or floats that attention takes beside `like`: a finite one stays finite, so that it hides nothing."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{_OP}: {name}: expected a torch.Tensor, got {type(mask).__name__}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise RuntimeError(f"{_OP}: {name}: expected bool or floats, got {dtype_name(mask.dtype)}")
    if mask.device != like.device:
        raise RuntimeError(f"{_OP}: {name}: expected a tensor on {like.device}, got one on {mask.device}")
    if mask.dtype in (torch.bool, like.dtype):
        return mask
    if like.dtype == torch.float64:
        return mask.double()
    if mask.dtype == torch.float64:
        largest = torch.finfo(torch.float32).max
        mask = torch.where(mask.isinf(), mask, mask.clamp(-largest, largest))
    return mask.float()


def _attention_mask(mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """What is added to the scores, in a form that broadcasts to (B, H, Sq, Sk)."""
    mask = _mask("attn_mask", mask, q)
    batch, heads, rows, cols = *q.shape[:3], k.shape[2]
    if mask.dim() == 3 and mask.shape[0] == batch * heads and batch != 1:
        mask = mask.unflatten(0, (batch, heads))
    sizes = (batch, heads, rows, cols)[4 - min(mask.dim(), 4) :]
    if mask.dim() > 4 or any(n not in (1, size) for n, size in zip(mask.shape, sizes, strict=True)):
        forms = f"({rows}, {cols}), ({batch * heads}, {rows}, {cols}) or what broadcasts to {batch, heads, rows, cols}"
        raise RuntimeError(f"{_OP}: attn_mask: expected {forms}, got {tuple(mask.shape)}")
    return _as_added(mask, q)


def _padding_mask(mask: Tensor, k: Tensor, unbatched: bool) -> Tensor:
    """(B, Sk), bool or floats."""
    mask = _mask("key_padding_mask", mask, k)
    expected = (k.shape[2],) if unbatched else (k.shape[0], k.shape[2])
    if tuple(mask.shape) != expected:
        raise RuntimeError(f"{_OP}: key_padding_mask: expected {expected}, got {tuple(mask.shape)}")
    return mask[None] if unbatched else mask


def _as_added(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, float("-inf"))


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pattern: AnyPattern,
    bias: Tensor | None,
    padding: Tensor | None,
    dropout: float,
) -> Tensor:
    """Attention; a padding mask (B, Sk) of floats is one more bias."""
    if padding is not None and padding.dtype != torch.bool:
        added = _as_added(padding, q)[:, None, None]
        if bias is not None:  # a sum in 16 bits may leave their range, and hide keys that neither mask hides
            wide = torch.promote_types(q.dtype, torch.float32)
            added = bias.to(wide) + added.to(wide)
        bias, padding = added, None
    return attention(q, k, v, pattern, bias=bias, dropout_p=dropout, key_padding_mask=padding)
