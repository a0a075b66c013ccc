"""Products with a block-sparse operand or result, as DeepSpeed calls them."""

from __future__ import annotations

from torch import Tensor

from fretwork.compat.torch_blocksparse import matmul


class MatMul(matmul.MatMul):
    """torch-blocksparse's `MatMul`, with 2-D layouts, and results without dimensions that the operands lack.

    >>> import torch
    >>> dot = MatMul(torch.ones(3, 4, dtype=torch.int64), 16, "sdd")
    >>> dot(torch.randn(48, 8), torch.randn(8, 64)).shape
    torch.Size([12, 16, 16])
    """

    @staticmethod
    def _pad_shape(x: Tensor, is_sparse: bool) -> Tensor:
        return x
