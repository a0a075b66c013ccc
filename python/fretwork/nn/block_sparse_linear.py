"""A linear layer whose weight is block-sparse."""

import math

import torch
from torch import Tensor, nn

from fretwork._checks import flag, whole_number
from fretwork._torch.arguments import FLOATING, autocasts, check_tensor, torch_precision
from fretwork._torch.block import linear
from fretwork._torch.differentiable import called_plainly, holds_dtensors
from fretwork._torch.private import held
from fretwork.block import dds
from fretwork.nn._structure import Structured
from fretwork.nn.hooks import always_called
from fretwork.patterns import BlockLayout


class BlockSparseLinear(Structured):
    """y = x Wᵀ + bias, where W (out_features, in_features) has the blocks of `layout` (one head) and nothing else.

    `weight` holds the packed blocks, (nnz, rows, cols). Drop-in for `torch.nn.Linear`. The layout travels in
    the state_dict's metadata, and weights of another layout are refused; its keys are `weight` and `bias`.

    >>> import torch, fretwork as fw
    >>> layer = fw.nn.BlockSparseLinear(64, 32, fw.BlockLayout([[1, 0, 0, 1], [0, 1, 0, 0]], block=16))
    >>> layer
    BlockSparseLinear(in_features=64, out_features=32, block=16, density=0.375, bias=True)
    >>> layer(torch.randn(5, 64)).shape
    torch.Size([5, 32])
    """

    in_features: int
    out_features: int
    layout: BlockLayout
    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        layout: BlockLayout,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        always_called(self)
        if not isinstance(layout, BlockLayout):
            raise TypeError(f"BlockSparseLinear: layout: expected a fretwork.BlockLayout, got {type(layout).__name__}")
        in_features = whole_number("BlockSparseLinear", "in_features", in_features)
        out_features = whole_number("BlockSparseLinear", "out_features", out_features)
        if dtype not in (None, *FLOATING):
            raise TypeError(
                f"BlockSparseLinear: dtype: expected None, float64, float32, float16 or bfloat16, got {dtype}"
            )
        if layout.shape != (1, out_features, in_features):
            raise ValueError(
                f"BlockSparseLinear: layout: expected one head of (out_features, in_features) = "
                f"({out_features}, {in_features}), got {layout.shape}"
            )
        self.in_features, self.out_features, self.layout = in_features, out_features, layout
        self.weight = nn.Parameter(torch.empty(layout.nnz, *layout.block_shape, device=device, dtype=dtype))
        if flag("BlockSparseLinear", "bias", bias):
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As `torch.nn.Linear` does, with the mean number of stored inputs of a row as the fan-in."""
        fan_in = self.in_features * self.layout.density
        bound = 1 / math.sqrt(fan_in) if fan_in > 0 else 0.0
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    @classmethod
    def from_dense(cls, linear: nn.Linear, layout: BlockLayout) -> "BlockSparseLinear":
        """A layer with the weights of a dense one at the blocks of `layout`; the others are dropped.

        >>> import torch, fretwork as fw
        >>> dense = torch.nn.Linear(32, 16)
        >>> layer = fw.nn.BlockSparseLinear.from_dense(dense, fw.BlockLayout([[1, 1]], block=16))
        >>> x = torch.randn(3, 32)
        >>> torch.allclose(layer(x), dense(x), atol=1e-5)
        True
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"BlockSparseLinear: linear: expected a torch.nn.Linear, got {type(linear).__name__}")
        weight, bias = linear.weight, linear.bias
        # Made on "meta", so that no random numbers are drawn for weights that are replaced at once.
        layer = cls(linear.in_features, linear.out_features, layout, bias is not None, "meta", weight.dtype)
        layer.weight = nn.Parameter(layout.pack(weight.detach()), requires_grad=weight.requires_grad)
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
        return layer.train(linear.training)

    def to_dense(self) -> Tensor:
        """The weight as an (out_features, in_features) tensor."""
        return self.layout.unpack(self.weight)[0]

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = held(self, "weight"), held(self, "bias")
        if not isinstance(x, Tensor) or not called_plainly((x, weight, bias)) or _mixed(weight, bias):
            self._check(x, weight)
            return self._composed(x, weight, bias)
        rank = x.dim()
        try:
            rows = x if rank == 2 else x.flatten(0, -2) if rank > 2 else x[None]
            y = linear(rows, weight, bias, self.layout.key, torch_precision())
        except RuntimeError:
            self._check(x, weight)  # says what is wrong in the layer's words
            raise
        return y if rank == 2 else y.reshape(*x.shape[:-1], self.out_features)

    def _composed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Of ops that others trace, map or cast."""
        if x.dim() == 2 or (x.dim() in (3, 4) and holds_dtensors((x,))):  # which may be cut along any dimension
            rows = x
        else:
            rows = x.flatten(0, -2) if x.dim() > 2 else x[None]
        y = dds(rows, weight, self.layout, trans_b=True)
        if bias is not None:
            y = y + bias.to(y.dtype)  # which autocast may have chosen
        return y if rows is x else y.reshape(*x.shape[:-1], self.out_features)

    def _check(self, x: Tensor, weight: Tensor) -> None:
        check_tensor("BlockSparseLinear", "x", x)
        if x.dim() < 1 or x.shape[-1] != self.in_features:
            raise RuntimeError(f"BlockSparseLinear: x: expected (…, {self.in_features}), got {tuple(x.shape)}")
        if x.device != weight.device:
            raise RuntimeError(f"BlockSparseLinear: x: expected a tensor on {weight.device}, got one on {x.device}")
        if x.dtype is not weight.dtype and not autocasts(x):
            raise RuntimeError(f"BlockSparseLinear: x: expected {weight.dtype} like the weight, got {x.dtype}")

    def _structure(self) -> str:
        return self.layout.text

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, block={self.layout.block}, "
            f"density={self.layout.density:.4g}, bias={self.bias is not None}"
        )


def _mixed(weight: Tensor, bias: Tensor | None) -> bool:
    return bias is not None and bias.dtype is not weight.dtype
