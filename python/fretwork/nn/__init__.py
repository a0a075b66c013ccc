"""Layers with sparse weights or attention, drop-in for those of torch.nn."""

from fretwork.nn.block_sparse_conv2d import BlockSparseConv2d
from fretwork.nn.block_sparse_linear import BlockSparseLinear
from fretwork.nn.ks_linear import KSLinear
from fretwork.nn.multihead_attention import MultiheadAttention
from fretwork.nn.semi_sparse_linear import SemiSparseLinear

__all__ = ["BlockSparseConv2d", "BlockSparseLinear", "KSLinear", "MultiheadAttention", "SemiSparseLinear"]
