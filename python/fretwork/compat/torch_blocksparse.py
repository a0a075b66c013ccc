"""The names and signatures of torch-blocksparse: `import fretwork.compat.torch_blocksparse as torch_blocksparse`.

Layouts are 0/1 tensors (heads, rows, cols) and blocks square, as there. Differences: softmax is not in place, every
input may go without a gradient, and any size that the maths allows works.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from fretwork import ops
from fretwork.pattern import BlockLayout

__all__ = [
    "Conv2d",
    "Linear",
    "MatMul",
    "MultiheadAttention",
    "Softmax",
    "SparseMatMul",
    "SparseSoftmax",
    "SparsityConfig",
    "SparsityInfo",
]

_PRODUCTS = {"sdd": ops.sdd, "dsd": ops.dsd, "dds": ops.dds}


class MatMul:
    """`MatMul(layout, block, mode, trans_a, trans_b)(a, b)`, mode "sdd", "dsd" or "dds".

    >>> import torch
    >>> dot = MatMul(torch.ones(2, 3, 4, dtype=torch.int64), 16, "sdd", trans_b=True)
    >>> dot(torch.randn(1, 2, 48, 8), torch.randn(1, 2, 64, 8)).shape
    torch.Size([1, 24, 16, 16])
    """

    def __init__(self, layout: Tensor, block: int, mode: str, trans_a: bool = False, trans_b: bool = False) -> None:
        if mode not in _PRODUCTS:
            raise ValueError(f"MatMul: mode: expected sdd, dsd or dds, got {mode!r}")
        self.layout, self.mode, self.trans_a, self.trans_b = BlockLayout(layout, block), mode, trans_a, trans_b

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        return _PRODUCTS[self.mode](a, b, self.layout, self.trans_a, self.trans_b)


class Softmax:
    """`Softmax(layout, block)(x, …)` over the non-zero blocks of each row; a new tensor, x stays as it is.

    >>> import torch
    >>> Softmax(torch.ones(1, 1, 2, dtype=torch.int64), 16)(torch.zeros(1, 2, 16, 16)).unique().item()
    0.03125
    """

    def __init__(self, layout: Tensor, block: int) -> None:
        self.layout = BlockLayout(layout, block)

    def __call__(
        self,
        x: Tensor,
        scale: float = 1.0,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "add",
    ) -> Tensor:
        return ops.block_softmax(
            x,
            self.layout,
            scale,
            rpe,
            _mask(key_padding_mask, key_padding_mask_mode, x),
            _mask(attn_mask, attn_mask_mode, x),
            key_padding_mask_mode,
            attn_mask_mode,
        )


def _mask(mask: Tensor | None, mode: str, like: Tensor) -> Tensor | None:
    """Integer masks, which were common: what counts in "mul" is where they are zero; "add" wants numbers."""
    if mask is None or mask.is_floating_point() or mask.dtype == torch.bool:
        return mask
    return mask != 0 if mode == "mul" else mask.to(like.dtype)


SparseMatMul, SparseSoftmax = MatMul, Softmax


class Linear(nn.Module):
    """`Linear(in_features, out_features, block, layout)`: y = x·W, with W (in, out) of packed blocks, no bias.

    >>> import torch
    >>> layer = Linear(32, 48, 16, torch.ones(1, 2, 3, dtype=torch.int64))
    >>> layer(torch.randn(5, 32)).shape, layer.weight.shape
    (torch.Size([5, 48]), torch.Size([6, 16, 16]))
    """

    def __init__(self, in_features: int, out_features: int, block: int, layout: Tensor) -> None:
        super().__init__()
        self.in_features, self.out_features, self.block = in_features, out_features, block
        self.layout = BlockLayout(layout, block)
        if self.layout.shape != (1, in_features, out_features):
            raise ValueError(
                f"Linear: layout: expected one head of (in_features, out_features) = ({in_features}, {out_features}), "
                f"got {self.layout.shape}"
            )
        self.weight = nn.Parameter(torch.empty(self.layout.nnz, block, block))
        bound = 1 / math.sqrt(max(in_features * self.layout.density, 1.0))
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
        return ops.dds(rows, self.weight, self.layout).reshape(*x.shape[:-1], self.out_features)


class SparsityConfig:
    """Which blocks attention sees: mode "dense", or "fixed" (local strides and the last blocks of each stride).

    `attention` is "unidirectional" or "bidirectional"; `numverts` different summaries, each of `vertsize` blocks,
    are spread over the heads.

    >>> SparsityConfig(block=16, stride=64).make_layout(heads=1, blocks=6)[0].int().tolist()[5]
    [0, 0, 0, 1, 1, 1]
    """

    def __init__(
        self,
        mode: str = "fixed",
        block: int = 16,
        stride: int = 64,
        attention: str = "unidirectional",
        numverts: int = 1,
        vertsize: int = 1,
    ) -> None:
        if mode not in ("fixed", "dense"):
            raise NotImplementedError(
                f'SparsityConfig: mode: expected "fixed" or "dense", got {mode!r}; make the layout yourself'
            )
        if attention not in ("unidirectional", "bidirectional"):
            raise ValueError(
                f'SparsityConfig: attention: expected "unidirectional" or "bidirectional", got {attention!r}'
            )
        if stride % block or stride < block:
            raise ValueError(f"SparsityConfig: stride: expected a multiple of block {block}, got {stride}")
        if not 0 < numverts * vertsize <= stride // block:
            raise ValueError(
                f"SparsityConfig: numverts: expected numverts·vertsize of 1 to {stride // block}, "
                f"got {numverts}·{vertsize}"
            )
        self.mode, self.block, self.stride, self.attention = mode, block, stride, attention
        self.numverts, self.vertsize = numverts, vertsize

    def make_layout(self, heads: int, blocks: int) -> Tensor:
        """The bool mask (heads, blocks, blocks)."""
        if self.mode == "dense":
            return torch.ones(heads, blocks, blocks, dtype=torch.bool)
        row, col = torch.arange(blocks)[:, None], torch.arange(blocks)[None, :]
        step = self.stride // self.block
        mask = torch.empty(heads, blocks, blocks, dtype=torch.bool)
        for head in range(heads):
            # Head h takes the h-th summary from the end of each stride, in turn.
            end = step - (head % self.numverts) * self.vertsize
            summary = (col % step >= end - self.vertsize) & (col % step < end)
            mask[head] = (row // step == col // step) | summary
        if self.attention == "unidirectional":
            mask &= col <= row
        return mask


SparsityInfo = SparsityConfig


class MultiheadAttention(nn.Module):
    """`torch.nn.MultiheadAttention` with a block layout: inputs (L, B, E), returns (output, None).

    `layout` is (heads, L/block, L/block). Within a block everything is seen: mask the rest with `attn_mask`.

    >>> import torch
    >>> mask = torch.ones(4, 2, 2, dtype=torch.int64)
    >>> attention = MultiheadAttention(32, 4, mask, 16)
    >>> x = torch.randn(32, 3, 32)
    >>> attention(x, x, x)[0].shape
    torch.Size([32, 3, 32])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        layout: Tensor,
        block: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
    ) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise ValueError(
                f"MultiheadAttention: embed_dim: expected a multiple of num_heads {num_heads}, got {embed_dim}"
            )
        if add_bias_kv or add_zero_attn:
            raise NotImplementedError(
                "MultiheadAttention: add_bias_kv, add_zero_attn: expected False, got True; "
                "append the extra key and value yourself and give the layout a column of blocks for them"
            )
        self.embed_dim, self.num_heads, self.dropout = embed_dim, num_heads, dropout
        self.layout = BlockLayout(layout, block)
        self.key_padding_mask_mode, self.attn_mask_mode = key_padding_mask_mode, attn_mask_mode
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias)
        self.k_proj = nn.Linear(kdim or embed_dim, embed_dim, bias)
        self.v_proj = nn.Linear(vdim or embed_dim, embed_dim, bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        size = self.embed_dim // self.num_heads
        q, k, v = (
            projected.unflatten(-1, (self.num_heads, size)).permute(1, 2, 0, 3)
            for projected in (self.q_proj(query), self.k_proj(key), self.v_proj(value))
        )
        scores = ops.sdd(q, k, self.layout, trans_b=True)
        weights = ops.block_softmax(
            scores,
            self.layout,
            1 / math.sqrt(size),
            rpe,
            _mask(key_padding_mask, self.key_padding_mask_mode, scores),
            _mask(attn_mask, self.attn_mask_mode, scores),
            self.key_padding_mask_mode,
            self.attn_mask_mode,
        )
        weights = nn.functional.dropout(weights, self.dropout, self.training)
        out = ops.dsd(weights, v, self.layout)
        return self.out_proj(out.permute(2, 0, 1, 3).flatten(2)), None


class Conv2d(nn.Module):
    """Block-sparse convolution, which is not built."""

    def __init__(self, *args: Any, **options: Any) -> None:
        raise NotImplementedError(
            "Conv2d: call: expected MatMul, Softmax, Linear or MultiheadAttention, got Conv2d, which is not built; "
            "use torch.nn.functional.unfold and Linear"
        )
