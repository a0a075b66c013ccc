"""Self-attention over a sparsity configuration."""

from __future__ import annotations

import torch
from torch import Tensor

from fretwork.compat.deepspeed.sparsity_config import FixedSparsityConfig, SparsityConfig
from fretwork.compat.torch_blocksparse.deepspeedsparseselfattention import DeepSpeedSparseSelfAttention


class SparseSelfAttention(DeepSpeedSparseSelfAttention):
    """softmax(q kᵀ / √D + rpe + masks) v over the blocks of a configuration, on (B, H, L, D), in every floating dtype.

    The layout of `max_seq_length` is made once, in the buffer `master_layout`; a shorter sequence has its beginning.
    If torch.distributed is running, rank 0's is sent to all, so that random blocks agree.

    >>> import torch
    >>> q = torch.randn(2, 4, 128, 16)
    >>> SparseSelfAttention(FixedSparsityConfig(num_heads=4), max_seq_length=256)(q, q, q).shape
    torch.Size([2, 4, 128, 16])
    """

    master_layout: Tensor

    def __init__(
        self,
        sparsity_config: SparsityConfig | None = None,
        key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul",
        max_seq_length: int = 2048,
    ) -> None:
        config = FixedSparsityConfig(num_heads=4) if sparsity_config is None else sparsity_config
        if not hasattr(config, "make_layout"):
            raise TypeError(
                f"{type(self).__name__}: sparsity_config: expected a SparsityConfig, got {type(config).__name__}"
            )
        super().__init__(config, key_padding_mask_mode, attn_mask_mode)
        self.register_buffer("master_layout", config.make_layout(max_seq_length))
        self._need_layout_synchronization = True

    def get_layout(self, L: int) -> Tensor:
        """The layout of a length, on the CPU."""
        if self._need_layout_synchronization and torch.distributed.is_initialized():
            torch.distributed.broadcast(self.master_layout, src=0)
            self._need_layout_synchronization = False
        blocks, largest = L // self.sparsity_config.block, self.master_layout.shape[-1]
        if L % self.sparsity_config.block or blocks > largest:
            most = largest * self.sparsity_config.block
            raise RuntimeError(
                f"SparseSelfAttention: query: expected a length of up to {most} that is a multiple of block "
                f"{self.sparsity_config.block}, got {L}"
            )
        return self.master_layout[..., :blocks, :blocks].cpu()

    def _layout(self, heads: int, length: int) -> Tensor:
        layout = self.get_layout(length)
        if len(layout) != heads:
            raise RuntimeError(
                f"SparseSelfAttention: query: expected {len(layout)} heads like the configuration, got {heads}"
            )
        return layout
