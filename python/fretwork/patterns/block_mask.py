"""FlexAttention's BlockMask as runs of keys: whole blocks as they stand, partial ones by asking their mask_mod."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

_ELEMENTS = 1 << 23  # of partial blocks that are asked for at a time


def runs(op: str, block_mask: Any) -> tuple[tuple[int, int], list[np.ndarray]]:
    """(Sq, Sk), and for each head the (row, begin, end) of its runs of keys, in no particular order."""
    if not isinstance(block_mask, BlockMask):
        kind = type(block_mask).__name__
        raise TypeError(f"{op}: block_mask: expected a BlockMask of FlexAttention, got {kind}")
    counts = block_mask.kv_num_blocks
    if counts.dim() != 3 or counts.shape[0] != 1:
        raise ValueError(
            f"{op}: block_mask: expected a batch of 1 (a pattern has none: make a block mask for each example), got "
            f"kv_num_blocks of {tuple(counts.shape)}"
        )
    rows, cols = (int(length) for length in block_mask.seq_lengths)
    return (rows, cols), [_head(block_mask, head, rows, cols) for head in range(counts.shape[1])]


def _head(block_mask: BlockMask, head: int, rows: int, cols: int) -> np.ndarray:
    sides = bq, bk = block_mask.BLOCK_SIZE
    grid = -(-rows // bq), -(-cols // bk)
    full = _table(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, head, grid)
    partial = _table(block_mask.kv_num_blocks, block_mask.kv_indices, head, grid) & ~full
    found = [_whole(full, sides, rows, cols)]
    place, row, begin, end = [], [], [], []
    for blocks, mask in _asked(block_mask, head, np.argwhere(partial), rows, cols):
        block, i, first, last = _ends(mask)
        place.append(blocks[block])
        row.append(i)
        begin.append(first)
        end.append(last)
    if place:
        corner = np.concatenate(place) * np.array(sides)
        columns = np.stack([np.concatenate(begin), np.concatenate(end)], 1) + corner[:, 1:]
        found.append(np.column_stack([np.concatenate(row) + corner[:, 0], columns]))
    return np.ascontiguousarray(np.concatenate(found), dtype=np.int64)


def _table(counts: Tensor | None, indices: Tensor | None, head: int, grid: tuple[int, int]) -> np.ndarray:
    """Which blocks a list of them holds, as a table of rows and columns of blocks."""
    table = np.zeros(grid, dtype=bool)
    if counts is None or indices is None:
        return table
    listed, many = indices[0, head].cpu().numpy(), counts[0, head].cpu().numpy()
    behind = np.arange(listed.shape[-1]) >= many[:, None]
    row, entry = np.nonzero(~behind & (listed >= 0) & (listed < grid[1]))
    inside = row < grid[0]
    table[row[inside], listed[row, entry][inside]] = True
    return table


def _whole(full: np.ndarray, sides: tuple[int, int], rows: int, cols: int) -> np.ndarray:
    """Neighbouring full blocks of a row, for each of its queries."""
    _, block, first, last = _ends(full[None])
    row = (block[:, None] * sides[0] + np.arange(sides[0])).ravel()
    ends = [np.repeat(np.minimum(end * sides[1], cols), sides[0]) for end in (first, last)]
    return np.column_stack([row, *ends])[row < rows]


def _ends(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The runs of ones along the last of three axes: the two indices before it, begin and end."""
    change = np.diff(mask.astype(np.int8), axis=-1, prepend=0, append=0)
    (outer, inner, begin), (_, _, end) = np.nonzero(change == 1), np.nonzero(change == -1)
    return outer, inner, begin, end


def _asked(
    block_mask: BlockMask, head: int, blocks: np.ndarray, rows: int, cols: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Partial blocks, some at a time, and what mask_mod says of their elements. It is asked for what is inside only."""
    (bq, bk), device = block_mask.BLOCK_SIZE, block_mask.kv_num_blocks.device
    step = max(1, _ELEMENTS // (bq * bk))
    for some in np.split(blocks, range(step, len(blocks), step)) if len(blocks) else []:
        corners = torch.from_numpy(some * (bq, bk)).to(device)
        mod = _moved(block_mask, torch.tensor(head, device=device), corners, rows, cols)
        with torch.no_grad():
            mask = create_mask(mod, len(some), 1, bq, bk, device=device)[:, 0].bool().cpu().numpy()
        inside_q = some[:, :1] * bq + np.arange(bq) < rows
        inside_k = some[:, 1:] * bk + np.arange(bk) < cols
        yield some, mask & inside_q[:, :, None] & inside_k[:, None, :]


def _moved(block_mask: BlockMask, head: Tensor, corners: Tensor, rows: int, cols: int) -> Any:
    """The mask_mod of blocks that begin at `corners`, counted by the batch."""

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        i, j = (corners[b, 0] + q).clamp(max=rows - 1), (corners[b, 1] + k).clamp(max=cols - 1)
        return block_mask.mask_mod(head.new_zeros(()), head, i, j)

    return mod
