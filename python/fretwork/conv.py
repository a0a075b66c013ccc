"""Block-sparse convolution: the weight holds whole blocks."""

from torch import Tensor

from fretwork import _shapes
from fretwork._shapes import ConvGeometry
from fretwork._torch.arguments import check_tensor, layout_key, precision_name
from fretwork._torch.conv import conv_op
from fretwork.patterns import BlockLayout

__all__ = ["block_conv2d"]


def block_conv2d(
    x: Tensor,
    values: Tensor,
    layout: BlockLayout,
    kernel_size: int | tuple[int, int],
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    bias: Tensor | None = None,
    *,
    precision: str | None = None,
) -> Tensor:
    """`torch.nn.functional.conv2d` with a weight that has the blocks of `layout` and nothing else.

    `layout` comes from `BlockLayout.for_conv2d`: a head for each kernel position (r, s), r·kw + s, of blocks (output
    channels × input channels). `values` are those blocks packed, (nnz, rows, cols). x is (N, C, H, W) of any strides;
    the result has x's memory format. `padding` may be "same", which needs a stride of 1, or "valid". `precision` as
    for `sdd`.

    >>> import torch, fretwork as fw
    >>> mask = torch.zeros(2, 4, 3, 3)
    >>> mask[:, 0] = mask[1, 2:, 1, 1] = 1  # the first 16 channels with every position, more in the middle
    >>> layout = fw.BlockLayout.for_conv2d(mask, block=16)
    >>> values = torch.randn(layout.nnz, 16, 16)
    >>> fw.block_conv2d(torch.randn(8, 64, 14, 14), values, layout, 3, stride=2, padding=1).shape
    torch.Size([8, 32, 7, 7])
    """
    geometry = _shapes.conv_geometry("block_conv2d", kernel_size, stride, padding, dilation)
    return run(x, values, layout, geometry, bias, precision)


def run(
    x: Tensor,
    values: Tensor,
    layout: BlockLayout,
    geometry: ConvGeometry,
    bias: Tensor | None,
    precision: str | None = None,
) -> Tensor:
    """`block_conv2d` with a geometry that is read already."""
    op = "block_conv2d"
    check_tensor(op, "x", x)
    check_tensor(op, "values", values)
    if bias is not None:
        check_tensor(op, "bias", bias)
    last = x.dim() == 4 and _shapes.channels_last(x.shape, x.stride())
    return conv_op(x, values, bias, layout_key(op, layout), *geometry, precision_name(op, precision), last)
