"""DeepSpeed's sparsity configurations: block layouts (heads, blocks, blocks) for any length.

Each says what a head sees as a bool mask (blocks, blocks); the base class makes the int64 layout of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor


class SparsityConfig:
    """What all have: the number of heads, the block, and whether heads have layouts of their own.

    >>> DenseSparsityConfig(num_heads=2, block=16).make_layout(64).shape
    torch.Size([2, 4, 4])
    """

    attention = "bidirectional"

    def __init__(self, num_heads: int, block: int = 16, different_layout_per_head: bool = False) -> None:
        for name, count in (("num_heads", num_heads), ("block", block)):
            if count < 1:
                self._refuse(name, "at least 1", count)
        self.num_heads, self.block, self.different_layout_per_head = num_heads, block, different_layout_per_head
        self.num_layout_heads = num_heads if different_layout_per_head else 1

    def _mask(self, head: int, blocks: int) -> Tensor:
        raise NotImplementedError(
            f"{type(self).__name__}: make_layout: expected one of the configurations, got their base class"
        )

    def make_layout(self, seq_len: int) -> Tensor:
        """The int64 layout of a sequence. No unidirectional one has a block after the diagonal."""
        if seq_len % self.block:
            raise ValueError(
                f"{type(self).__name__}: seq_len: expected a multiple of block {self.block}, got {seq_len}"
            )
        masks = torch.stack([self._mask(h, seq_len // self.block) for h in range(self.num_layout_heads)])
        masks = masks.tril() if self._one_way else masks
        return masks.expand(self.num_heads, -1, -1).long()

    @property
    def _one_way(self) -> bool:
        return self.attention == "unidirectional"

    def _set_attention(self, attention: str, horizontal: bool = False) -> None:
        if attention not in ("unidirectional", "bidirectional"):
            self._refuse("attention", "unidirectional or bidirectional", repr(attention))
        if horizontal and attention == "unidirectional":
            self._refuse("horizontal_global_attention", "False where attention is unidirectional", "True")
        self.attention = attention

    def _refuse(self, argument: str, expected: str, got: object) -> None:
        raise ValueError(f"{type(self).__name__}: {argument}: expected {expected}, got {got}")

    def _at_most(self, blocks: int, **counts: int) -> None:
        for name, count in counts.items():
            if count > blocks:
                self._refuse(name, f"at most the {blocks} blocks of the sequence", count)


class DenseSparsityConfig(SparsityConfig):
    """All blocks.

    >>> bool(DenseSparsityConfig(num_heads=2).make_layout(64).all())
    True
    """

    def _mask(self, head: int, blocks: int) -> Tensor:
        return torch.ones(blocks, blocks, dtype=torch.bool)


class FixedSparsityConfig(SparsityConfig):
    """Windows of `num_local_blocks`, and the last `num_global_blocks` of each window for all rows.

    With `num_different_global_patterns` head h takes the group of blocks that lies h mod that number groups before a
    window's end. The last window may be shorter; its group is then moved to lie inside. With
    `horizontal_global_attention` the rows of those blocks see everything.

    >>> FixedSparsityConfig(num_heads=1, num_local_blocks=2).make_layout(96)[0, 0].tolist()
    [1, 1, 0, 1, 0, 1]
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_local_blocks: int = 4,
        num_global_blocks: int = 1,
        attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
        num_different_global_patterns: int = 1,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        if num_global_blocks < 1 or num_local_blocks % num_global_blocks:
            self._refuse("num_global_blocks", f"a divisor of num_local_blocks {num_local_blocks}", num_global_blocks)
        self._set_attention(attention, horizontal_global_attention)
        most = num_local_blocks // num_global_blocks if different_layout_per_head else 1
        if num_different_global_patterns > most:
            which = "num_local_blocks / num_global_blocks" if different_layout_per_head else "heads have one layout"
            self._refuse("num_different_global_patterns", f"at most {most} ({which})", num_different_global_patterns)
        self.num_local_blocks, self.num_global_blocks = num_local_blocks, num_global_blocks
        self.horizontal_global_attention = horizontal_global_attention
        self.num_different_global_patterns = num_different_global_patterns

    def _mask(self, head: int, blocks: int) -> Tensor:
        local, size = self.num_local_blocks, self.num_global_blocks
        window = torch.arange(blocks) // local
        first = local - (1 + head % self.num_different_global_patterns) * size
        chosen = torch.zeros(blocks, dtype=torch.bool)
        for begin in range(0, blocks, local):
            start = begin + first
            if begin + local > blocks:
                start = max(min(start, blocks - size), 0)
            chosen[start : start + size] = True
        return _with_globals(window[:, None] == window, chosen, self.horizontal_global_attention)


class VariableSparsityConfig(SparsityConfig):
    """Windows of given sizes, the last size again and again, chosen blocks for all rows, and random ones.

    Blocks `global_block_indices` are seen by all; with `global_block_end_indices` those are where ranges begin, which
    end before the other. Random blocks are drawn by Python's `random`, row by row.

    >>> config = VariableSparsityConfig(num_heads=1, local_window_blocks=[1, 2], global_block_indices=[4])
    >>> config.make_layout(96)[0, 1].tolist()
    [0, 1, 1, 0, 1, 0]
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 0,
        local_window_blocks: Sequence[int] = (4,),
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        if not local_window_blocks or min(local_window_blocks) < 1:
            self._refuse("local_window_blocks", "sizes of 1 or more", list(local_window_blocks))
        _check_ranges(self, global_block_indices, global_block_end_indices)
        self._set_attention(attention, horizontal_global_attention)
        self.num_random_blocks, self.local_window_blocks = num_random_blocks, local_window_blocks
        self.global_block_indices, self.global_block_end_indices = global_block_indices, global_block_end_indices
        self.horizontal_global_attention = horizontal_global_attention

    def _mask(self, head: int, blocks: int) -> Tensor:
        self._at_most(blocks, num_random_blocks=self.num_random_blocks)
        drawn = _drawn(blocks, self.num_random_blocks, one_way=False)
        window: list[int] = []
        for size in self.local_window_blocks:
            window += [len(window)] * size  # each window has a number of its own
        while len(window) < blocks:
            window += [len(window)] * self.local_window_blocks[-1]
        number = torch.tensor(window[:blocks])
        chosen = _chosen(blocks, self.global_block_indices, self.global_block_end_indices)
        return drawn | _with_globals(number[:, None] == number, chosen, self.horizontal_global_attention)


class BigBirdSparsityConfig(SparsityConfig):
    """A sliding window, the first blocks as rows and columns, and random blocks, drawn by Python's `random`.

    >>> BigBirdSparsityConfig(num_heads=1, num_random_blocks=0).make_layout(96)[0, 4].tolist()
    [1, 0, 0, 1, 1, 1]
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 1,
        num_sliding_window_blocks: int = 3,
        num_global_blocks: int = 1,
        attention: str = "bidirectional",
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        self._set_attention(attention)
        self.num_random_blocks, self.num_global_blocks = num_random_blocks, num_global_blocks
        self.num_sliding_window_blocks = num_sliding_window_blocks

    def _mask(self, head: int, blocks: int) -> Tensor:
        sizes = {"num_random_blocks": self.num_random_blocks, "num_global_blocks": self.num_global_blocks}
        self._at_most(blocks, num_sliding_window_blocks=self.num_sliding_window_blocks, **sizes)
        drawn = _drawn(blocks, self.num_random_blocks, self._one_way)
        chosen = torch.arange(blocks) < self.num_global_blocks
        return drawn | _with_globals(_sliding(blocks, self.num_sliding_window_blocks), chosen, horizontal=True)


class BSLongformerSparsityConfig(SparsityConfig):
    """A sliding window, and chosen blocks as rows and columns.

    >>> BSLongformerSparsityConfig(num_heads=1, global_block_indices=[0, 5]).make_layout(96)[0, 3].tolist()
    [1, 0, 1, 1, 1, 1]
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_sliding_window_blocks: int = 3,
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: str = "bidirectional",
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        _check_ranges(self, global_block_indices, global_block_end_indices)
        self._set_attention(attention)
        self.num_sliding_window_blocks = num_sliding_window_blocks
        self.global_block_indices, self.global_block_end_indices = global_block_indices, global_block_end_indices

    def _mask(self, head: int, blocks: int) -> Tensor:
        self._at_most(blocks, num_sliding_window_blocks=self.num_sliding_window_blocks)
        chosen = _chosen(blocks, self.global_block_indices, self.global_block_end_indices)
        return _with_globals(_sliding(blocks, self.num_sliding_window_blocks), chosen, horizontal=True)


class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """A sliding window: blocks up to num_sliding_window_blocks // 2 away.

    >>> LocalSlidingWindowSparsityConfig(num_heads=1).make_layout(96)[0, 3].tolist()
    [0, 0, 1, 1, 0, 0]
    """

    def __init__(
        self, num_heads: int, block: int = 16, num_sliding_window_blocks: int = 3, attention: str = "unidirectional"
    ) -> None:
        super().__init__(num_heads, block)
        self._set_attention(attention)
        self.num_sliding_window_blocks = num_sliding_window_blocks

    def _mask(self, head: int, blocks: int) -> Tensor:
        self._at_most(blocks, num_sliding_window_blocks=self.num_sliding_window_blocks)
        return _sliding(blocks, self.num_sliding_window_blocks)


def _with_globals(mask: Tensor, chosen: Tensor, horizontal: bool) -> Tensor:
    """The columns of chosen blocks, and with `horizontal` their rows, beside a mask."""
    mask = mask | chosen
    return mask | chosen[:, None] if horizontal else mask


def _sliding(blocks: int, size: int) -> Tensor:
    at = torch.arange(blocks)
    return (at[:, None] - at).abs() <= size // 2


def _drawn(blocks: int, count: int, one_way: bool) -> Tensor:
    """`count` blocks of each row, among all or those up to the diagonal; fewer where there are not as many."""
    mask = torch.zeros(blocks, blocks, dtype=torch.bool)
    for row in range(blocks):
        reach = row + 1 if one_way else blocks
        mask[row, random.sample(range(reach), min(count, reach))] = True
    return mask


def _chosen(blocks: int, starts: Sequence[int], ends: Sequence[int] | None) -> Tensor:
    chosen = torch.zeros(blocks, dtype=torch.bool)
    for start, end in zip(starts, ends or [s + 1 for s in starts], strict=True):
        chosen[start:end] = True
    return chosen


def _check_ranges(config: SparsityConfig, starts: Sequence[int], ends: Sequence[int] | None) -> None:
    if any(start < 0 for start in starts):
        config._refuse("global_block_indices", "0 or more", list(starts))
    if ends is not None and (len(starts) != len(ends) or any(s >= e for s, e in zip(starts, ends, strict=True))):
        config._refuse("global_block_end_indices", f"one above each of {list(starts)}", list(ends))
