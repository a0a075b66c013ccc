"""Products with a block-sparse operand or result, and the linear layer made of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fretwork.block import dds, dsd, sdd
from fretwork.compat.torch_blocksparse._timing import timed
from fretwork.nn._structure import Structured
from fretwork.patterns import BlockLayout

_PRODUCTS = {"sdd": sdd, "dsd": dsd, "dds": dds}


class MatMul:
    """`MatMul(layout, block, mode, trans_a, trans_b)(a, b)`, mode "sdd", "dsd" or "dds".

    Missing leading dimensions of a and b are added, and the result keeps them. With `bench`, `time_c` is the last
    call's time in nanoseconds; `time_da` and `time_db` stay None, since autograd computes gradients after the call.

    >>> import torch
    >>> dot = MatMul(torch.ones(2, 3, 4, dtype=torch.int64), 16, "sdd", trans_b=True)
    >>> dot(torch.randn(1, 2, 48, 8), torch.randn(1, 2, 64, 8)).shape
    torch.Size([1, 24, 16, 16])
    """

    time_c: float | None
    time_da: float | None
    time_db: float | None

    def __init__(
        self,
        layout: Tensor,
        block: int,
        mode: str,
        trans_a: bool = False,
        trans_b: bool = False,
        bench: bool = False,
    ) -> None:
        if mode not in _PRODUCTS:
            raise ValueError(f"MatMul: mode: expected sdd, dsd or dds, got {mode!r}")
        self.block_layout = BlockLayout(layout, block)
        self.layout, self.block, self.spdims = layout, block, layout.shape
        self.mode, self.trans_a, self.trans_b, self.bench = mode, trans_a, trans_b, bench
        self.time_c = self.time_da = self.time_db = None

    @staticmethod
    def _pad_shape(x: Tensor, is_sparse: bool) -> Tensor:
        """A dense operand gets four dimensions; packed blocks have three or four."""
        missing = 0 if is_sparse else 4 - x.dim()
        return x[(None,) * missing] if missing > 0 else x

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = self._pad_shape(a, self.mode == "dsd"), self._pad_shape(b, self.mode == "dds")
        product = _PRODUCTS[self.mode]
        c, self.time_c = timed(
            lambda: product(a, b, self.block_layout, self.trans_a, self.trans_b), self.bench, a.device
        )
        return c


SparseMatMul = MatMul


class Linear(Structured):
    """`Linear(in_features, out_features, block, layout)`: y = x·W, with W (in, out) of packed blocks, no bias.

    >>> import torch
    >>> layer = Linear(32, 48, 16, torch.ones(1, 2, 3, dtype=torch.int64))
    >>> layer(torch.randn(5, 32)).shape, layer.weight.shape
    (torch.Size([5, 48]), torch.Size([6, 16, 16]))
    """

    def __init__(self, in_features: int, out_features: int, block: int, layout: Tensor, bench: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features, self.block = in_features, out_features, block
        self.matmul = MatMul(layout, block, "dds", bench=bench)
        shape = self.matmul.block_layout.shape
        if shape != (1, in_features, out_features):
            raise ValueError(
                f"Linear: layout: expected one head of (in_features, out_features) = ({in_features}, {out_features}), "
                f"got {shape}"
            )
        self.weight = nn.Parameter(torch.empty(self.matmul.block_layout.nnz, block, block))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `torch.nn.Linear` does, with the mean number of stored inputs as the fan-in."""
        bound = 1 / math.sqrt(max(self.in_features * self.matmul.block_layout.density, 1.0))
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
        return self.matmul(rows, self.weight).reshape(*x.shape[:-1], self.out_features)

    def _structure(self) -> str:
        return self.matmul.block_layout.text
