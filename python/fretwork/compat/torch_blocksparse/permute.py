"""Images in another order of memory."""

from __future__ import annotations

from torch import Tensor, nn

_ORDERS = ("NCHW", "CHWN")


class _permute:
    """The function below `Permute`, by the name that the original exports."""

    @staticmethod
    def strides(N: int, C: int, H: int, W: int, order: str) -> list[int]:
        if order not in _ORDERS:
            raise ValueError(f"Permute: order: expected NCHW or CHWN, got {order!r}")
        return [C * H * W, H * W, W, 1] if order == "NCHW" else [1, H * W * N, W * N, N]

    @staticmethod
    def apply(x: Tensor, in_order: str, out_order: str) -> Tensor:
        if x.dim() != 4:
            raise RuntimeError(f"Permute: x: expected (N, C, H, W), got {tuple(x.shape)}")
        n, c, h, w = x.shape
        _permute.strides(n, c, h, w, in_order)  # refuses a wrong name; x may have any strides
        return x.new_empty_strided(x.shape, _permute.strides(n, c, h, w, out_order)).copy_(x)


class Permute(nn.Module):
    """A copy of x (N, C, H, W) that lies in memory in another order, "NCHW" or "CHWN".

    >>> import torch
    >>> Permute("NCHW", "CHWN")(torch.zeros(6, 5, 4, 3)).stride()
    (1, 72, 18, 6)
    """

    def __init__(self, in_order: str, out_order: str) -> None:
        super().__init__()
        for order in (in_order, out_order):
            _permute.strides(1, 1, 1, 1, order)
        self.in_order, self.out_order = in_order, out_order

    def forward(self, x: Tensor) -> Tensor:
        return _permute.apply(x, self.in_order, self.out_order)
