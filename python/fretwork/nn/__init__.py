"""Layers with sparse weights, drop-in for those of torch.nn."""

from fretwork.nn.block_sparse_linear import BlockSparseLinear

__all__ = ["BlockSparseLinear"]
