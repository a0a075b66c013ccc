"""KSMM's layer, with its signature, defaults and attributes: `from fretwork.compat.ksmm import KSLinear`.

Differences: every algo has gradients, works for any batch on CPU and CUDA, and sums 16-bit products in fp32; random
weights of `dense` stand on the pattern only. Factors have the shape (a, b, c, d) and the bias that of the out features,
whatever the algo and layout; `load_state_dict` takes the original's checkpoints, whose shapes depend on both.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fretwork import nn
from fretwork.kronecker import from_dense
from fretwork.nn.ks_linear import Patterns
from fretwork.patterns import KroneckerPattern


class KSLinear(nn.KSLinear):
    """y = x Wᵀ + bias with W a product of Kronecker-sparse factors; dense and float16 where nothing else is said.

    `weights` given at the start are copied, so that layers made of the same ones are trained apart.
    A checkpoint of the original with the same `algo` can be loaded: its `factors.N` are permuted to (a, b, c, d), and a
    bias of (out, 1), which it has with `bs_last`, to (out,). One of `dense` whose factor has non-zeros outside the
    pattern, as the original draws them, is refused.

    >>> import torch
    >>> layer = KSLinear([(6, 4, 5, 1), (1, 8, 6, 4)], algo="kernel", dtype=torch.float32)
    >>> layer(torch.randn(5, 30)).shape
    torch.Size([5, 32])
    >>> layer.in_size, layer.out_size, layer.num_mat, layer.get_dense_product().shape
    (30, 32, 2, torch.Size([32, 30]))
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
        if isinstance(weights, Iterable):
            weights = [w.detach().clone() if isinstance(w, Tensor) else w for w in weights]
        super().__init__(patterns, weights, bias, algo, dtype, bs_last, device)

    @property
    def in_size(self) -> int:
        return self.in_features

    @property
    def out_size(self) -> int:
        return self.out_features

    @property
    def num_mat(self) -> int:
        return len(self.patterns)

    @property
    def factors(self) -> torch.nn.ParameterList:
        """Parameters (a, b, c, d), in order of application."""
        return self.weights

    @property
    def dtype(self) -> torch.dtype:
        return self.weights[0].dtype

    @property
    def device(self) -> torch.device:
        return self.weights[0].device

    def get_dense_product(self) -> Tensor:
        """W, (out_size, in_size)."""
        return self.to_dense()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for n, pattern in enumerate(self.patterns):
            if (factor := state_dict.pop(f"{prefix}factors.{n}", None)) is None:
                continue
            try:
                state_dict[f"{prefix}weights.{n}"] = _weights_of(factor, pattern, self.algo)
            except RuntimeError as error:
                error_msgs.append(f"KSLinear: factors.{n}: of algo {self.algo}: {error}")
        bias = state_dict.get(f"{prefix}bias")
        if bias is not None and tuple(bias.shape) == (self.out_features, 1):
            state_dict[f"{prefix}bias"] = bias.squeeze(1)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _weights_of(factor: Tensor, pattern: KroneckerPattern, algo: str) -> Tensor:
    """(a, b, c, d) from how the original stores a factor for an algo."""
    a, b, c, d = pattern.weight_shape
    shape = {"kernel": (a * d * c, b), "bmm": (a * d, b, c)}.get(algo)
    if shape is not None and tuple(factor.shape) != shape:
        raise RuntimeError(f"expected {shape}, got {tuple(factor.shape)}")
    if algo == "kernel":
        return factor.reshape(a, d, c, b).permute(0, 3, 2, 1)
    if algo == "bmm":
        return factor.reshape(a, d, b, c).permute(0, 2, 3, 1)
    if algo in ("dense", "sparse"):
        return from_dense(factor.to_dense(), pattern)
    if algo == "bsr":  # the a·d products on one diagonal
        blocks = from_dense(factor.to_dense(), KroneckerPattern(a * d, b, c, 1))
        return blocks.reshape(a, d, b, c).permute(0, 2, 3, 1)
    return factor
