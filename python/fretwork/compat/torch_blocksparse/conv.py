"""Convolution with a block-sparse kernel."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fretwork as fw
from fretwork.nn.hooks import always_called
from fretwork.patterns import BlockLayout

_ORDERS = ("NHWC", "CHWN")


class Conv2d(nn.Module):
    """`Conv2d(in_channels, out_channels, kernel_size, layout, block, …)(x, biasa=None, biasb=None)`.

    conv(relu(x + biasa) + biasb) with zeros around the image; biasa and biasb have one element, and without biasa there
    is no relu. `layout` (out/block, in/block, kernel rows, kernel columns) is 0/1, `weight` (nnz, block, block) holds
    the blocks [out, in] in the order of layout.permute(0, 2, 3, 1).nonzero(). x is (N, C, H, W) of any strides; the
    result lies in memory as `order`, "NHWC" or "CHWN", says. `layout` is in the state dict; after a change of it call
    `clear_cache()`.

    >>> import torch
    >>> conv = Conv2d(32, 48, (3, 3), torch.ones(3, 2, 3, 3).long(), 16, padding=(1, 1), order="CHWN")
    >>> y = conv(torch.randn(4, 32, 7, 8))
    >>> y.shape, y.stride(0), conv.weight.shape
    (torch.Size([4, 48, 7, 8]), 1, torch.Size([54, 16, 16]))
    """

    layout: Tensor
    _order: Tensor
    bias: nn.Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: tuple[int, int],
        layout: Tensor,
        block: int,
        padding: tuple[int, int] = (0, 0),
        stride: tuple[int, int] = (1, 1),
        order: str = "NHWC",
        bias: bool = False,
    ) -> None:
        super().__init__()
        always_called(self)
        if not isinstance(kernel_size, (tuple, list)) or len(kernel_size) != 2:
            raise TypeError(f"Conv2d: kernel_size: expected (height, width), got {kernel_size!r}")
        if order not in _ORDERS:
            raise ValueError(f"Conv2d: order: expected NHWC or CHWN, got {order!r}")
        for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
            if channels % block:
                raise ValueError(f"Conv2d: {name}: expected a multiple of block {block}, got {channels}")
        wanted = (out_channels // block, in_channels // block, *kernel_size)
        if tuple(layout.shape) != wanted:
            raise ValueError(
                f"Conv2d: layout: expected (out_channels/block, in_channels/block, *kernel_size) = {wanted}, "
                f"got {tuple(layout.shape)}"
            )
        self.in_channels, self.out_channels, self.block = in_channels, out_channels, block
        self.kernel_size, self.padding, self.stride, self.order = kernel_size, padding, stride, order
        self.register_buffer("layout", layout.detach().clone())
        self.register_buffer("_order", torch.empty(0, dtype=torch.int64), persistent=False)
        self.clear_cache()
        self.weight = nn.Parameter(torch.empty(self.num_blocks, block, block))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_channels)) if bias else None)
        self.reset_parameters()

    @property
    def num_blocks(self) -> int:
        return self._layout.nnz

    def clear_cache(self) -> None:
        """Reads `layout` anew."""
        mask = self.layout.detach().cpu()
        self._layout: BlockLayout = BlockLayout.for_conv2d(mask, self.block)
        out, inner, _, cols = mask.shape
        k, r, s, c = mask.permute(0, 2, 3, 1).nonzero(as_tuple=True)
        # Blocks stand in the order (k, r, s, c) here, and in (r, s, k, c) in Fretwork's layouts.
        self._order = (((r * cols + s) * out + k) * inner + c).argsort().to(self.layout.device)

    def reset_parameters(self) -> None:
        """As `torch.nn.Conv2d` does, with the mean number of stored inputs as the fan-in."""
        fan_in = self.num_blocks * self.block**2 / self.out_channels
        bound = 1 / math.sqrt(max(fan_in, 1.0))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def fixup_init(self, num_layers: int) -> None:
        """The initialisation of residual networks without normalisation."""
        fan_out = self.out_channels * math.prod(self.kernel_size)
        nn.init.normal_(self.weight, mean=0, std=math.sqrt(2 / fan_out) * num_layers ** (-0.25))

    def forward(self, a: Tensor, biasa: Tensor | None = None, biasb: Tensor | None = None) -> Tensor:
        if biasa is not None:
            a = F.relu(a + biasa)
        if biasb is not None:
            a = a + biasb
        values = self.weight.index_select(0, self._order)
        y = fw.block_conv2d(a, values, self._layout, self.kernel_size, self.stride, self.padding, bias=self.bias)
        return self.nchw_to_chwn(y) if self.order == "CHWN" else y.contiguous(memory_format=torch.channels_last)

    @staticmethod
    def nchw_to_chwn(x: Tensor) -> Tensor:
        """The same tensor with images next to each other in memory."""
        return x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)

    @staticmethod
    def chwn_to_nchw(x: Tensor) -> Tensor:
        return x.contiguous()

    @staticmethod
    def update_layout(layout_a: Tensor, tensor_a: Tensor, layout_b: Tensor, init_val: float) -> Tensor:
        """The blocks of layout_b: those of tensor_a where layout_a has them, `init_val` elsewhere."""
        a, b = (layout.permute(0, 2, 3, 1).bool().to(tensor_a.device) for layout in (layout_a, layout_b))
        spread = tensor_a.new_full((*a.shape, *tensor_a.shape[1:]), init_val)
        spread[a] = tensor_a
        return spread[b]

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.clear_cache()
