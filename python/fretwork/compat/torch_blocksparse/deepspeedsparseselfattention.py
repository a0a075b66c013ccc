"""Self-attention on queries, keys and values that are already projected, as DeepSpeed had it first."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fretwork.compat.torch_blocksparse.attention import blocks_of, layout_of, make_layout, ops_of
from fretwork.compat.torch_blocksparse.matmul import MatMul
from fretwork.compat.torch_blocksparse.softmax import Softmax


class SparsityConfig:
    """Which blocks attention sees: mode "dense", or "fixed" (local strides and the last blocks of each stride).

    `attention` is "unidirectional" or "bidirectional"; `numverts` different summaries, each of `vertsize` blocks,
    are spread over the heads.

    >>> SparsityConfig(block=16, stride=64).make_layout(heads=1, blocks=6)[0].tolist()[5]
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

    @property
    def unidirectional(self) -> bool:
        return self.attention == "unidirectional"

    def make_layout(self, heads: int, blocks: int) -> Tensor:
        return layout_of(self, heads, blocks)


class DeepSpeedSparseSelfAttention(nn.Module):
    """softmax(q kᵀ / √D + rpe + masks) v over blocks, on (B, H, L, D).

    Keys may come transposed, (B, H, D, L), and masks with dimensions of size 1: (B, 1, 1, L) and (1, 1, L, L).

    >>> import torch
    >>> q = torch.randn(2, 4, 128, 16)
    >>> DeepSpeedSparseSelfAttention(SparsityConfig(block=16, stride=64))(q, q, q).shape
    torch.Size([2, 4, 128, 16])
    """

    def __init__(
        self,
        sparsity_config: Any = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
    ) -> None:
        super().__init__()
        self.sparsity_config = SparsityConfig() if sparsity_config is None else sparsity_config
        self.key_padding_mask_mode, self.attn_mask_mode = key_padding_mask_mode, attn_mask_mode
        self._ops: dict[tuple[int, int], tuple[MatMul, MatMul, Softmax]] = {}

    @staticmethod
    def _make_layout(
        num_heads: int, num_blocks: int, mode: str, block_stride: int, attention: str, numverts: int, vertsize: int
    ) -> Tensor:
        one_way = attention == "unidirectional"
        return make_layout(num_heads, num_blocks, mode, block_stride, one_way, numverts, vertsize)

    def _layout(self, heads: int, length: int) -> Tensor:
        blocks = blocks_of(type(self).__name__, length, self.sparsity_config.block)
        return self.sparsity_config.make_layout(heads, blocks)

    def get_ops(self, H: int, L: int) -> tuple[MatMul, MatMul, Softmax]:
        """The two products and the softmax for a number of heads and a length."""
        if (H, L) not in self._ops:
            self._ops[H, L] = ops_of(self._layout(H, L), self.sparsity_config.block)
        return self._ops[H, L]

    def transpose_key_for_scores(self, x: Tensor, L: int) -> Tensor:
        """Keys as (B, H, L, D), also where they come as (B, H, D, L)."""
        return x if x.shape[-2] == L else x.mT

    def transpose_mask_for_sparse(self, qtype: torch.dtype, x: Tensor, is_key_padding_mask: bool = False) -> Tensor:
        """A mask of the query's type without its dimensions of size 1; of padding, the first one stays."""
        x = x.to(qtype)
        return x.reshape(x.shape[0], *(n for n in x.shape[1:] if n > 1)) if is_key_padding_mask else x.squeeze()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        op = type(self).__name__
        if query.dim() != 4:
            raise RuntimeError(f"{op}: query: expected (B, H, L, D), got {tuple(query.shape)}")
        transposed = self.transpose_key_for_scores(key, query.shape[-2])
        for name, given, x in (("key", key, transposed), ("value", value, value)):
            if x.shape != query.shape:
                expected = f"{tuple(query.shape)} like the query"
                raise RuntimeError(f"{op}: {name}: expected {expected}, got {tuple(given.shape)}")
        key = transposed
        sdd, dsd, softmax = self.get_ops(*query.shape[1:3])
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.reshape(key_padding_mask.shape[0], query.shape[2])
        while attn_mask is not None and attn_mask.dim() > 2 and attn_mask.shape[0] == 1:
            attn_mask = attn_mask[0]
        weights = softmax.apart(
            sdd(query, key),
            1 / math.sqrt(query.shape[-1]),
            rpe,
            key_padding_mask,
            attn_mask,
            self.key_padding_mask_mode,
            self.attn_mask_mode,
        )
        return dsd(weights, value)
