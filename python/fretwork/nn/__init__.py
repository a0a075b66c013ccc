"""Layers with sparse weights, drop-in for those of torch.nn."""

from fretwork.nn.block_sparse_linear import BlockSparseLinear
from fretwork.nn.ks_linear import KSLinear

__all__ = ["BlockSparseLinear", "KSLinear"]
