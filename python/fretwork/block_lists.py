"""Lists of key blocks for attention, as the device has them."""

from __future__ import annotations

import torch
from torch import Tensor

from fretwork._checks import refuse
from fretwork._torch.arguments import check_tensor, dtype_name

__all__ = ["BlockLists"]


class BlockLists:
    """Which key blocks each query block takes: `counts` (B|1, H|1, R) and `indices` (B|1, H|1, R, N), both int32.

    Query block r takes the key blocks indices[b, h, r, :counts[b, h, r]]. Entries from the count on are ignored, and so
    are those outside the range of blocks. FlexAttention's `kv_num_blocks` and `kv_indices` are such lists. The tensors
    are taken as they are: nothing is copied, and nothing is read on the host.

    >>> import torch, fretwork as fw
    >>> counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    >>> indices = torch.tensor([[[[0, -1], [0, 1]]]], dtype=torch.int32)
    >>> fw.BlockLists(counts, indices)
    BlockLists(counts=(1, 1, 2), indices=(1, 1, 2, 2))
    """

    __slots__ = ("counts", "indices")
    counts: Tensor
    indices: Tensor

    def __init__(self, counts: Tensor, indices: Tensor) -> None:
        op = "BlockLists"
        for name, tensor, sizes in (("counts", counts, "(B, H, R)"), ("indices", indices, "(B, H, R, N)")):
            check_tensor(op, name, tensor)
            if tensor.dtype != torch.int32:
                refuse(op, name, "int32", dtype_name(tensor.dtype), TypeError)
            if tensor.dim() != len(sizes.split(",")):
                refuse(op, name, sizes, tuple(tensor.shape))
        if indices.shape[:3] != counts.shape:
            refuse(op, "indices", f"({', '.join(map(str, counts.shape))}, N), as counts are", tuple(indices.shape))
        if indices.device != counts.device:
            refuse(op, "indices", f"a tensor on {counts.device}", f"one on {indices.device}")
        self.counts, self.indices = counts, indices

    def __repr__(self) -> str:
        return f"BlockLists(counts={tuple(self.counts.shape)}, indices={tuple(self.indices.shape)})"
