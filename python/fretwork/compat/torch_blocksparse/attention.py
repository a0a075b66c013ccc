"""Multi-head attention over a block layout, as a `torch.nn.MultiheadAttention`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fretwork.compat.torch_blocksparse.matmul import MatMul
from fretwork.compat.torch_blocksparse.softmax import Softmax
from fretwork.nn.multihead_attention import project

_OP = "MultiheadAttention"


def make_layout(
    num_heads: int,
    num_blocks: int,
    mode: str,
    block_stride: int,
    unidirectional: bool | None,
    numverts: int,
    vertsize: int,
) -> Tensor:
    """The int64 layout (heads, blocks, blocks) of mode "dense" or "fixed".

    "fixed": the blocks of the own stride, and of each stride `vertsize` blocks that summarise it; head h takes the
    (h mod numverts)-th such group from the stride's end. Nothing unidirectional sees a later block.

    >>> make_layout(1, 6, "fixed", 4, True, 1, 1)[0, 5].tolist()
    [0, 0, 0, 1, 1, 1]
    """
    if mode == "dense":
        return torch.ones(num_heads, num_blocks, num_blocks, dtype=torch.int64)
    if mode != "fixed":
        raise NotImplementedError(f"make_layout: mode: expected fixed or dense, got {mode!r}; make the layout yourself")
    if not 0 < numverts * vertsize <= block_stride:
        raise ValueError(
            f"make_layout: numverts: expected numverts·vertsize of 1 to {block_stride}, got {numverts}·{vertsize}"
        )
    row, col = torch.arange(num_blocks)[:, None], torch.arange(num_blocks)
    first = block_stride - (1 + torch.arange(num_heads)[:, None, None] % numverts) * vertsize
    place = col % block_stride
    mask = (row // block_stride == col // block_stride) | ((place >= first) & (place < first + vertsize))
    return (mask & (col <= row) if unidirectional else mask).long()


class SparsityInfo:
    """Which blocks attention sees, for every length: `MultiheadAttention(embed_dim, num_heads, info)`.

    >>> SparsityInfo("fixed", block=16, stride=64, unidirectional=True).make_layout(heads=1, blocks=6)[0, 5].tolist()
    [0, 0, 0, 1, 1, 1]
    """

    def __init__(
        self,
        mode: str | None = None,
        block: int | None = None,
        stride: int = 128,
        unidirectional: bool | None = None,
        numverts: int = 1,
        vertsize: int = 1,
    ) -> None:
        self.mode, self.block, self.stride, self.unidirectional = mode, block, stride, unidirectional
        self.numverts, self.vertsize = numverts, vertsize

    def make_layout(self, heads: int, blocks: int) -> Tensor:
        return layout_of(self, heads, blocks)


def layout_of(info: Any, heads: int, blocks: int) -> Tensor:
    """The layout that a SparsityInfo, or anything with its attributes, describes."""
    op = type(info).__name__
    if not info.block or info.mode is None:
        raise ValueError(f"{op}: mode, block: expected both, got {info.mode!r} and {info.block!r}")
    if info.mode == "fixed" and info.stride % info.block:
        raise ValueError(f"{op}: stride: expected a multiple of block {info.block}, got {info.stride}")
    return make_layout(
        heads, blocks, info.mode, info.stride // info.block, info.unidirectional, info.numverts, info.vertsize
    )


def blocks_of(op: str, length: int, block: int) -> int:
    if length % block:
        raise RuntimeError(f"{op}: query: expected a length that is a multiple of block {block}, got {length}")
    return length // block


def multi_head_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    sparse_dot_sdd_nt: Callable[..., Tensor],
    sparse_dot_dsd_nn: Callable[..., Tensor],
    sparse_softmax: Callable[..., Tensor],
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    key_padding_mask_mode: str = "add",
    attn_mask_mode: str = "add",
) -> tuple[Tensor, None]:
    """What the module computes, on (L, B, E), by the given products and softmax. No weights are returned."""
    if query.shape[-1] != embed_dim_to_check:
        raise RuntimeError(f"{_OP}: query: expected (L, B, {embed_dim_to_check}), got {tuple(query.shape)}")
    if bias_k is not None or bias_v is not None or add_zero_attn or static_k is not None or static_v is not None:
        raise NotImplementedError(
            f"{_OP}: bias_k, bias_v, add_zero_attn, static_k, static_v: expected none of them, got some; "
            "append the extra key and value yourself and give the layout a column of blocks for them"
        )
    apart, packed = (q_proj_weight, k_proj_weight, v_proj_weight), in_proj_weight
    packed = None if use_separate_proj_weight else packed
    size = query.shape[-1] // num_heads
    projected = project((query, key, value), packed, apart, in_proj_bias)
    q, k, v = (x.unflatten(-1, (num_heads, size)).permute(1, 2, 0, 3) for x in projected)
    softmax = sparse_softmax.apart if isinstance(sparse_softmax, Softmax) else sparse_softmax  # spares a copy
    weights = softmax(
        sparse_dot_sdd_nt(q, k),
        scale=1 / math.sqrt(size),
        key_padding_mask=key_padding_mask,
        attn_mask=attn_mask,
        key_padding_mask_mode=key_padding_mask_mode,
        attn_mask_mode=attn_mask_mode,
    )
    out = sparse_dot_dsd_nn(F.dropout(weights, dropout_p, training), v)
    return F.linear(out.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias), None


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` over blocks: inputs (L, B, E), returns (output, None).

    `MultiheadAttention(embed_dim, num_heads, layout, block, dropout=0.0, bias=True, add_bias_kv=False,
    add_zero_attn=False, kdim=None, vdim=None, key_padding_mask_mode="add", attn_mask_mode="mul")`, with a layout
    (heads, L/block, L/block); or, as in the first versions, a `SparsityInfo` in place of `layout, block`, which serves
    every length. Both take `batch_first` by name. Within a block everything is seen: hide the rest with `attn_mask`.

    In mode "add" a mask is added to the scores, in "mul" its zeros hide. torch's own layers say `is_causal=` in their
    call: then masks mean what they mean in torch, whatever the modes.

    >>> import torch
    >>> attention = MultiheadAttention(32, 4, torch.ones(4, 2, 2, dtype=torch.int64), 16)
    >>> x = torch.randn(32, 3, 32)
    >>> attention(x, x, x)[0].shape
    torch.Size([32, 3, 32])
    >>> info = MultiheadAttention.SparsityInfo("fixed", block=16, stride=64, unidirectional=True)
    >>> MultiheadAttention(32, 4, info)(x, x, x)[0].shape
    torch.Size([32, 3, 32])
    """

    SparsityInfo = SparsityInfo
    _make_layout = staticmethod(make_layout)
    layout: Tensor | None
    sparsity: Any

    def __init__(self, embed_dim: int, num_heads: int, *args: Any, **options: Any) -> None:
        first = args[0] if args else options.get("layout", options.get("sparsity"))
        given = (_by_info if hasattr(first, "mode") and hasattr(first, "vertsize") else _by_layout)(*args, **options)
        if embed_dim % num_heads:
            raise ValueError(f"{_OP}: embed_dim: expected a multiple of num_heads {num_heads}, got {embed_dim}")
        if given["add_bias_kv"] or given["add_zero_attn"]:
            raise NotImplementedError(
                f"{_OP}: add_bias_kv, add_zero_attn: expected False, got True; "
                "append the extra key and value yourself and give the layout a column of blocks for them"
            )
        layout, block, sparsity = (given.pop(name) for name in ("layout", "block", "sparsity"))
        modes = given.pop("key_padding_mask_mode"), given.pop("attn_mask_mode")
        super().__init__(embed_dim, num_heads, **given)
        # Where torch finds this False, its encoder does not compute dense attention itself in eval mode.
        self._qkv_same_embed_dim = False
        self.key_padding_mask_mode, self.attn_mask_mode = modes
        self.layout, self.block, self.sparsity = layout, block, sparsity
        self._ops: dict[int, tuple[MatMul, MatMul, Softmax]] = {}
        if layout is not None:
            self._ops[0] = ops_of(layout, block)
            heads = self._ops[0][0].block_layout.heads
            if heads != num_heads:
                raise ValueError(f"{_OP}: layout: expected {num_heads} heads, got {heads}")

    def get_ops(self, L: int) -> tuple[MatMul, MatMul, Softmax]:
        """The two products and the softmax for a length."""
        if self.layout is not None:
            return self._ops[0]
        if L not in self._ops:
            blocks = blocks_of(_OP, L, self.sparsity.block)
            self._ops[L] = ops_of(layout_of(self.sparsity, self.num_heads, blocks), self.sparsity.block)
        return self._ops[L]

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> tuple[Tensor, None]:
        if self.batch_first:
            same = key is query, value is key
            query = query.transpose(0, 1)
            key = query if same[0] else key.transpose(0, 1)
            value = key if same[1] else value.transpose(0, 1)
        modes = self.key_padding_mask_mode, self.attn_mask_mode
        if is_causal is not None:
            modes = "add", "add"
            key_padding_mask, attn_mask = (_as_added(m, query) for m in (key_padding_mask, attn_mask))
            if is_causal and attn_mask is None:
                later = torch.ones(len(query), len(key), dtype=torch.bool, device=query.device)
                attn_mask = _as_added(later.triu(1), query)
        out, _ = multi_head_attention_forward(
            query, key, value, self.embed_dim, self.num_heads, self.in_proj_weight, self.in_proj_bias,
            None, None, False, self.dropout, self.out_proj.weight, self.out_proj.bias, *self.get_ops(query.shape[0]),
            self.training, key_padding_mask, need_weights, attn_mask,
            self.in_proj_weight is None, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight,
            key_padding_mask_mode=modes[0], attn_mask_mode=modes[1],
        )  # fmt: skip
        return out.transpose(0, 1) if self.batch_first else out, None


def _by_layout(
    layout: Tensor | None = None, block: int = 0, dropout: float = 0.0, bias: bool = True, add_bias_kv: bool = False,
    add_zero_attn: bool = False, kdim: int | None = None, vdim: int | None = None,
    key_padding_mask_mode: str = "add", attn_mask_mode: str = "mul", *, batch_first: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The constructor of the last version, behind embed_dim and num_heads."""
    options = locals()
    for name, there in (("layout", layout is not None), ("block", block > 0)):
        if not there:
            raise TypeError(f"{_OP}: {name}: expected the {name} of the weights behind num_heads, got none")
    return {"sparsity": None} | options


def _by_info(
    sparsity: Any, dropout: float = 0.0, bias: bool = True, add_bias_kv: bool = False,
    add_zero_attn: bool = False, kdim: int | None = None, vdim: int | None = None,
    key_padding_mask_mode: str = "add", attn_mask_mode: str = "mul", *, batch_first: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The constructor of the first ones."""
    return {"layout": None, "block": None} | locals()


def ops_of(layout: Tensor, block: int) -> tuple[MatMul, MatMul, Softmax]:
    return MatMul(layout, block, "sdd", trans_b=True), MatMul(layout, block, "dsd"), Softmax(layout, block)


def _as_added(mask: Tensor | None, like: Tensor) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)


def replace_mha(model: nn.Module, info: SparsityInfo) -> None:
    """Puts sparse attention in place of every `torch.nn.MultiheadAttention` inside a model, with its weights.

    As in the original, key padding masks are of mode "mul" and attention masks of mode "add" in calls without
    `is_causal`.

    >>> import torch
    >>> model = torch.nn.ModuleDict({"attention": torch.nn.MultiheadAttention(32, 4)})
    >>> replace_mha(model, SparsityInfo("fixed", block=16, stride=64, unidirectional=True))
    >>> model["attention"].sparsity.block
    16
    """
    for name, child in model.named_children():
        if not isinstance(child, nn.MultiheadAttention):
            replace_mha(child, info)
            continue
        weight, biased = child.out_proj.weight, child.in_proj_bias is not None
        mha = MultiheadAttention(
            child.embed_dim, child.num_heads, info, child.dropout, biased, child.bias_k is not None,
            child.add_zero_attn, child.kdim, child.vdim, "mul", "add", batch_first=child.batch_first,
        ).to(weight.device, weight.dtype)  # fmt: skip
        mha.load_state_dict(dict(child.state_dict()))
        for ours, theirs in zip(mha.parameters(), child.parameters(), strict=True):
            ours.requires_grad_(theirs.requires_grad)
        setattr(model, name, mha.train(child.training))
