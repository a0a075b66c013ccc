"""A convolution layer whose weight is block-sparse."""

import math

import torch
from torch import Tensor, nn

from fretwork import _shapes, conv
from fretwork._checks import flag, whole_number
from fretwork._torch.arguments import FLOATING, autocasts
from fretwork.nn._structure import Structured
from fretwork.patterns import BlockLayout

_Two = int | tuple[int, int]


class BlockSparseConv2d(Structured):
    """A convolution whose weight (out_channels, in_channels, kh, kw) has the blocks of `layout` and nothing else.

    `layout` is that of `BlockLayout.for_conv2d`. `weight` holds the packed blocks, (nnz, rows, cols). Drop-in for
    `torch.nn.Conv2d` without groups; padding is with zeros, and the result has x's memory format.

    >>> import torch, fretwork as fw
    >>> mask = torch.zeros(2, 4, 3, 3)
    >>> mask[:, :, 1, 1] = mask[0, 0] = 1
    >>> layer = fw.nn.BlockSparseConv2d(64, 32, 3, fw.BlockLayout.for_conv2d(mask, block=16), padding=1)
    >>> layer
    BlockSparseConv2d(64, 32, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1), block=16, density=0.2222, bias=True)
    >>> layer(torch.randn(5, 64, 7, 7)).shape, layer.to_dense().shape
    (torch.Size([5, 32, 7, 7]), torch.Size([32, 64, 3, 3]))
    """

    in_channels: int
    out_channels: int
    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int] | str
    dilation: tuple[int, int]
    layout: BlockLayout
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: _Two,
        layout: BlockLayout,
        stride: _Two = 1,
        padding: _Two | str = 0,
        dilation: _Two = 1,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        op = "BlockSparseConv2d"
        if not isinstance(layout, BlockLayout):
            raise TypeError(f"{op}: layout: expected a fretwork.BlockLayout, got {type(layout).__name__}")
        self.in_channels = whole_number(op, "in_channels", in_channels)
        self.out_channels = whole_number(op, "out_channels", out_channels)
        if dtype not in (None, *FLOATING):
            raise TypeError(f"{op}: dtype: expected None, float64, float32, float16 or bfloat16, got {dtype}")
        self._geometry = _shapes.conv_geometry(op, kernel_size, stride, padding, dilation, ValueError)
        self.kernel_size, self.stride, ends, self.dilation = self._geometry
        self.padding = padding if isinstance(padding, str) else ends[:2]
        kh, kw = self.kernel_size
        if layout.shape != (kh * kw, self.out_channels, self.in_channels):
            raise ValueError(
                f"{op}: layout: expected {kh * kw} heads, one for each position of the kernel, of (out_channels, "
                f"in_channels) = ({self.out_channels}, {self.in_channels}), got {layout.shape}"
            )
        self.layout = layout
        self.weight = nn.Parameter(torch.empty(layout.nnz, *layout.block_shape, device=device, dtype=dtype))
        if flag(op, "bias", bias):
            self.bias = nn.Parameter(torch.empty(self.out_channels, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `torch.nn.Conv2d` does, with the mean number of stored inputs of an output channel as the fan-in."""
        fan_in = self.layout.nnz * math.prod(self.layout.block_shape) / max(self.out_channels, 1)
        bound = 1 / math.sqrt(fan_in) if fan_in > 0 else 0.0
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    @classmethod
    def from_dense(cls, conv2d: nn.Conv2d, layout: BlockLayout) -> "BlockSparseConv2d":
        """A layer with the weights of a dense one at the blocks of `layout`; the others are dropped.

        >>> import torch, fretwork as fw
        >>> dense = torch.nn.Conv2d(32, 16, 3, padding="same")
        >>> layer = fw.nn.BlockSparseConv2d.from_dense(dense, fw.BlockLayout.for_conv2d(torch.ones(1, 2, 3, 3), 16))
        >>> x = torch.randn(3, 32, 5, 6)
        >>> torch.allclose(layer(x), dense(x), atol=1e-5)
        True
        """
        op = "BlockSparseConv2d"
        if not isinstance(conv2d, nn.Conv2d):
            raise TypeError(f"{op}: conv2d: expected a torch.nn.Conv2d, got {type(conv2d).__name__}")
        if conv2d.groups != 1:
            raise NotImplementedError(f"{op}: conv2d: expected one group, got {conv2d.groups}")
        if conv2d.padding_mode != "zeros":
            raise NotImplementedError(
                f"{op}: conv2d: expected padding_mode zeros, got {conv2d.padding_mode}; torch.nn.functional.pad has "
                "the other modes, for a convolution without padding"
            )
        weight, bias = conv2d.weight, conv2d.bias
        kernel_size, stride, dilation = (_two(getattr(conv2d, n)) for n in ("kernel_size", "stride", "dilation"))
        padding = conv2d.padding if isinstance(conv2d.padding, str) else _two(conv2d.padding)
        sizes = conv2d.in_channels, conv2d.out_channels, kernel_size
        # Made on "meta", so that no random numbers are drawn for weights that are replaced at once.
        layer = cls(*sizes, layout, stride, padding, dilation, bias is not None, "meta", weight.dtype)
        matrices = weight.detach().permute(2, 3, 0, 1).flatten(0, 1)
        layer.weight = nn.Parameter(layout.pack(matrices), requires_grad=weight.requires_grad)
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
        return layer.train(conv2d.training)

    def to_dense(self) -> Tensor:
        """The weight as an (out_channels, in_channels, kh, kw) tensor."""
        matrices = self.layout.unpack(self.weight)
        return matrices.unflatten(0, self.kernel_size).permute(2, 3, 0, 1).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor):
            raise TypeError(f"BlockSparseConv2d: x: expected a torch.Tensor, got {type(x).__name__}")
        if x.dim() != 4 or x.shape[1] != self.in_channels:
            raise RuntimeError(f"BlockSparseConv2d: x: expected (N, {self.in_channels}, H, W), got {tuple(x.shape)}")
        weight = self.weight
        if x.device != weight.device:
            raise RuntimeError(f"BlockSparseConv2d: x: expected a tensor on {weight.device}, got one on {x.device}")
        if x.dtype != weight.dtype and not autocasts(x):
            raise RuntimeError(f"BlockSparseConv2d: x: expected {weight.dtype} like the weight, got {x.dtype}")
        return conv.run(x, weight, self.layout, self._geometry, self.bias)

    def _structure(self) -> str:
        """What the weights belong to, as one line."""
        return f"conv2d{self.kernel_size}: {self.layout.text}"

    def extra_repr(self) -> str:
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"]
        if self.padding != (0, 0):
            parts.append(f"padding={self.padding}")
        if self.dilation != (1, 1):
            parts.append(f"dilation={self.dilation}")
        parts.append(f"block={self.layout.block}, density={self.layout.density:.4g}, bias={self.bias is not None}")
        return ", ".join(parts)


def _two(numbers: tuple[int, ...]) -> tuple[int, int]:
    height, width = numbers
    return height, width
