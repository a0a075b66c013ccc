"""Block layouts: whole blocks that are there or not."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np

from fretwork._checks import zeros_and_ones
from fretwork._library import core, owned
from fretwork.patterns.pattern import Pattern, parsed

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike

    Mask = torch.Tensor | ArrayLike  # of 0 and 1


class BlockLayout(Pattern, family="block"):
    """Whole blocks that are there or not, one layout per head.

    `mask` is (heads, rows, cols) or (rows, cols) in blocks, 0/1 of any bool or real dtype: a torch tensor on any
    device, an array or nested lists. `block` is 8 to 128, or (rows, cols). The packed values of `.T` stand in another
    order, each block transposed.

    >>> import torch
    >>> layout = BlockLayout(torch.eye(3, dtype=torch.bool), block=(16, 32))
    >>> layout.heads, layout.block, layout.nnz, layout.shape
    (1, (16, 32), 3, (1, 48, 96))
    >>> layout.T.shape
    (1, 96, 48)
    """

    __slots__ = ("_block", "_grid")
    _grid: tuple[int, int, int]
    _block: tuple[int, int]

    def __init__(self, mask: Mask, block: int | tuple[int, int] = 32) -> None:
        bits, sides = _mask_bits(mask), block_sides("BlockLayout", block)
        sizes = (ctypes.c_int64 * 5)(*bits.shape, *sides)
        with owned(core().fretwork_block_layout(sizes, bits.ctypes.data)) as handle:
            self._take(handle)

    def _take(self, handle: Any) -> None:
        super()._take(handle)
        sizes = (ctypes.c_int64 * 5)()
        core().fretwork_block_layout_sizes(handle, sizes)
        self._set(_grid=tuple(sizes[:3]), _block=tuple(sizes[3:]))

    @classmethod
    def for_conv2d(cls, mask: Mask, block: int | tuple[int, int] = 32) -> BlockLayout:
        """The layout of a convolution's weight, from a mask (out blocks, in blocks, kh, kw) of 0 and 1.

        It has a head for each kernel position (r, s), r·kw + s; a block is (output channels, input channels).

        >>> import numpy as np
        >>> BlockLayout.for_conv2d(np.ones((4, 2, 3, 3), bool), block=16)
        BlockLayout(heads=9, blocks=(4, 2), block=16, nnz=72, density=1)
        """
        bits = zeros_and_ones("for_conv2d", "mask", mask)
        if bits.ndim != 4:
            raise ValueError(f"for_conv2d: mask: expected (out blocks, in blocks, kh, kw), got {bits.shape}")
        out, inner, kh, kw = bits.shape
        return cls(bits.transpose(2, 3, 0, 1).reshape(kh * kw, out, inner), block)

    @property
    def heads(self) -> int:
        """The number of heads, each with blocks of its own."""
        return self._grid[0]

    @property
    def blocks(self) -> tuple[int, int]:
        """Rows and columns of blocks in a head."""
        return self._grid[1:]

    @property
    def block(self) -> int | tuple[int, int]:
        """The side of a block, or (rows, cols) where they differ."""
        return self._block[0] if self._block[0] == self._block[1] else self._block

    @property
    def block_shape(self) -> tuple[int, int]:
        """(rows, cols) of a block."""
        return self._block

    def pack(self, dense: torch.Tensor) -> torch.Tensor:
        """Dense (Z, H, M, N) or (H, M, N), or (M, N) for one head, to packed values ((Z,) nnz, rows, cols).

        >>> import torch
        >>> layout = BlockLayout([[0, 1], [1, 1]], block=8)
        >>> layout.pack(torch.arange(256.0).reshape(16, 16)).shape
        torch.Size([3, 8, 8])
        """
        from fretwork import block

        return block.pack(dense, self)

    def unpack(self, values: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """Packed values ((Z,) nnz, rows, cols) to dense ((Z,) H, M, N), with `fill` where there is no block.

        >>> import torch
        >>> layout = BlockLayout([[0, 1], [1, 1]], block=8)
        >>> layout.unpack(torch.ones(3, 8, 8)).sum().item()
        192.0
        """
        from fretwork import block

        return block.unpack(values, self, fill)

    def __repr__(self) -> str:
        return (
            f"BlockLayout(heads={self.heads}, blocks={self.blocks}, block={self.block}, nnz={self.nnz}, "
            f"density={self.density:.4g})"
        )


def block_layout(key: str) -> BlockLayout:
    """The layout behind a text or key that an op was given."""
    layout = parsed(key)
    if not isinstance(layout, BlockLayout):
        raise RuntimeError(f"fretwork: layout: expected a block layout, got {key}")
    return layout


def _mask_bits(mask: Any) -> np.ndarray:
    """A contiguous uint8 copy of a mask, (heads, rows, cols), every entry 0 or 1."""
    array = zeros_and_ones("BlockLayout", "mask", mask)
    if array.ndim not in (2, 3):
        raise ValueError(f"BlockLayout: mask: expected (heads, rows, cols) or (rows, cols), got {array.shape}")
    return array if array.ndim == 3 else array[None]


def block_sides(op: str, block: Any) -> tuple[int, int]:
    """(rows, cols) of a block, from one number or two."""
    sides = block if isinstance(block, (tuple, list)) else (block, block)
    if len(sides) != 2:
        raise ValueError(f"{op}: block: expected an int or (rows, cols), got {len(sides)} numbers")
    for side in sides:
        if isinstance(side, bool) or not isinstance(side, (int, np.integer)):
            raise TypeError(f"{op}: block: expected an int or (rows, cols), got {side!r}")
        if not 8 <= side <= 128:
            raise ValueError(f"{op}: block: expected 8 to 128, got {side}")
    return int(sides[0]), int(sides[1])
