"""Lists of key blocks: what attention reads on the device, and their selection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fretwork._checks import flag, refuse, whole_number
from fretwork._shapes import check_sides, check_top_k
from fretwork._torch.arguments import autocasts, check_tensor, dtype_name
from fretwork._torch.select_blocks import selected_blocks

__all__ = ["BlockLists", "select_blocks"]


class BlockLists:
    """Which key blocks each query block takes: `counts` (B|1, H|1, R) and `indices` (B|1, H|1, R, N), both int32.

    Query block r takes the key blocks indices[b, h, r, :counts[b, h, r]]. Entries from the count on are ignored, and so
    are those outside the range of blocks. FlexAttention's `kv_num_blocks` and `kv_indices` are such lists, but
    for the full blocks, which a BlockMask of `create_block_mask` keeps apart. The tensors are taken as they are:
    nothing is copied, and nothing is read on the host. `block` is a block's sides (queries, keys), if they are known;
    attention with other sides is then refused.

    >>> import torch, fretwork as fw
    >>> counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    >>> indices = torch.tensor([[[[0, -1], [0, 1]]]], dtype=torch.int32)
    >>> fw.BlockLists(counts, indices)
    BlockLists(counts=(1, 1, 2), indices=(1, 1, 2, 2))
    """

    __slots__ = ("block", "counts", "indices")
    counts: Tensor
    indices: Tensor
    block: tuple[int, int] | None

    def __init__(self, counts: Tensor, indices: Tensor, block: int | tuple[int, int] | None = None) -> None:
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
            refuse(op, "indices", f"a tensor on {counts.device} like counts", f"one on {indices.device}")
        self.counts, self.indices = counts, indices
        self.block = None if block is None else check_sides(op, block, ValueError)

    def __repr__(self) -> str:
        return f"BlockLists(counts={tuple(self.counts.shape)}, indices={tuple(self.indices.shape)})"


def select_blocks(
    q: Tensor,
    k: Tensor,
    top_k: int,
    block: int | tuple[int, int] = 128,
    causal: bool = True,
    first: int = 1,
    last: int = 1,
) -> BlockLists:
    """The `top_k` key blocks with the best scores for each query block, as lists for `fw.attention(blocks=)`.

    q is (B, Hq, Sq, D), k (B, Hk, Sk, D); `block` is the side of a block, 16, 32, 64 or 128, or a pair of them for
    queries and keys. The score is the mean of a block's queries, over the heads that share a key head too, times the
    mean of a block's keys, in float32; ties go to the lower index. Query i has the position p = i + Sk − Sq, and a
    query block's own key block is that of its last position. With `causal`, blocks after it are out. The `first` blocks
    and the `last` ones up to the own are always among the `top_k`, which is at least first + last. Where there are
    fewer blocks, all of them are listed. The result is (B, Hk, R, top_k) for R query blocks, with indices ascending and
    −1 from the count on. No matrix of scores is stored, nothing is read on the host, and there is no gradient.

    >>> import torch, fretwork as fw
    >>> k = torch.eye(4).repeat_interleave(16, 0)[None, None]  # a direction of its own for each block
    >>> q = 3 * k + 2 * k.roll(32, 2)                          # and queries that like it, and the one two blocks away
    >>> lists = fw.select_blocks(q, k, 2, block=16, first=0)
    >>> lists.counts.tolist(), lists.indices.tolist()
    ([[[1, 2, 2, 2]]], [[[[0, -1], [0, 1], [0, 2], [1, 3]]]])
    """
    op = "select_blocks"
    check_tensor(op, "q", q)
    check_tensor(op, "k", k)
    sides = check_sides(op, block)
    top_k, first, last = (_number(op, name, n) for name, n in (("top_k", top_k), ("first", first), ("last", last)))
    check_top_k(op, top_k)
    causal = flag(op, "causal", causal)
    if autocasts(q) and q.dtype != k.dtype and q.is_floating_point() and k.is_floating_point():
        q, k = (x.to(torch.promote_types(q.dtype, k.dtype)) for x in (q, k))  # means are float32 in any case
    counts, indices = selected_blocks(q.detach(), k.detach(), top_k, *sides, causal, first, last)
    return BlockLists(counts, indices, sides)


def _number(op: str, argument: str, value: Any) -> int:
    return value if type(value) is int else whole_number(op, argument, value)
