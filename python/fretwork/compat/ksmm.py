"""KSMM's layer, with its signature and defaults: `from fretwork.compat.ksmm import KSLinear`.

Differences: every algo has gradients, works for any batch on CPU and CUDA, and sums 16-bit products in fp32; random
weights of `dense` stand on the pattern only.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fretwork import nn
from fretwork.nn.ks_linear import Patterns


class KSLinear(nn.KSLinear):
    """y = x Wᵀ + bias with W a product of Kronecker-sparse factors; dense and float16 where nothing else is said.

    >>> import torch
    >>> layer = KSLinear([(6, 4, 5, 1), (1, 8, 6, 4)], algo="kernel", dtype=torch.float32)
    >>> layer(torch.randn(5, 30)).shape
    torch.Size([5, 32])
    """

    def __init__(
        self,
        patterns: Patterns,
        weights: Sequence[Tensor] | None = None,
        bias: bool = True,
        algo: str = "dense",
        dtype: torch.dtype = torch.float16,
        bs_last: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(patterns, weights, bias, algo, dtype, bs_last, device)
