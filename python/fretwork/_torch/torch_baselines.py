"""The product of a Kronecker factor in torch's own ops: what `fretwork.ksmm` is measured against, and may be asked for.

Each takes x (batch, features), or (features, batch) where batch is last, and gives its result likewise. fp32 follows
`torch.set_float32_matmul_precision`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fretwork._torch.vmap import mapped, mapped_over_none, split


def _bmm(x: Tensor, w: Tensor, bs_last: bool) -> Tensor:
    a, b, c, d = w.shape
    n = x.shape[int(bs_last)]
    if bs_last:
        columns = _gathered(x, a, c, d).reshape(a * d, c, n)
        return _scattered(torch.bmm(w.permute(0, 3, 1, 2).reshape(a * d, b, c), columns), a, b, d)
    rows = x.reshape(n, a, c, d).permute(1, 3, 0, 2).reshape(a * d, n, c)
    y = torch.bmm(rows, w.permute(0, 3, 2, 1).reshape(a * d, c, b))
    return y.reshape(a, d, n, b).permute(2, 0, 3, 1).reshape(n, a * b * d)


def _einsum(x: Tensor, w: Tensor, bs_last: bool) -> Tensor:
    a, b, c, d = w.shape
    if bs_last:
        return torch.einsum("ijkl,ikln->ijln", w, x.reshape(a, c, d, x.shape[1])).reshape(a * b * d, x.shape[1])
    return torch.einsum("nikl,ijkl->nijl", x.reshape(x.shape[0], a, c, d), w).reshape(x.shape[0], a * b * d)


def _dense(x: Tensor, w: Tensor, bs_last: bool) -> Tensor:
    a, b, c, d = w.shape
    diagonals = torch.diag_embed(torch.diag_embed(w).movedim(0, -1))  # (b, c, d, d, a, a)
    matrix = diagonals.permute(4, 0, 2, 5, 1, 3).reshape(a * b * d, a * c * d)
    return matrix @ x if bs_last else F.linear(x, matrix)


def _csr_product(x: Tensor, w: Tensor) -> Tensor:
    a, b, c, d = w.shape
    wide = torch.promote_types(x.dtype, torch.float32)  # 16 bits exist on some devices only
    i, _, l, k = torch.meshgrid(*(torch.arange(n, device=x.device) for n in (a, b, d, c)), indexing="ij")
    rows = torch.arange(a * b * d + 1, device=x.device) * c
    values = w.transpose(2, 3).reshape(-1).to(wide)
    matrix = torch.sparse_csr_tensor(
        rows, ((i * c + k) * d + l).reshape(-1), values, (a * b * d, a * c * d), check_invariants=False
    )
    return (matrix @ x.to(wide)).to(x.dtype)


def _bsr_product(x: Tensor, w: Tensor) -> Tensor:
    """On rows and columns in the order (i, l, j), where the factor is block-diagonal."""
    a, b, c, d = w.shape
    p = math.gcd(b, c)  # torch's blocks are square
    if x.is_cuda:
        p = p & -p if p % 16 == 0 else 1  # on a GPU powers of two from 16 on, and 16-bit types without widening
    if p == 1:
        return _csr_product(x, w)
    wide = x.dtype if x.is_cuda else torch.promote_types(x.dtype, torch.float32)
    blocks = w.permute(0, 3, 1, 2).reshape(a * d, b // p, p, c // p, p).transpose(2, 3)
    blocks = blocks.reshape(-1, p, p).to(wide).contiguous()
    starts = torch.arange(a * d * b // p + 1, device=x.device) * (c // p)
    columns = torch.arange(a * d * c // p, device=x.device).reshape(a * d, 1, c // p).expand(-1, b // p, -1)
    matrix = torch.sparse_bsr_tensor(
        starts, columns.reshape(-1), blocks, (a * d * b, a * d * c), check_invariants=False
    )
    return _scattered(matrix @ _gathered(x, a, c, d).to(wide), a, b, d).to(x.dtype)


def _gathered(x: Tensor, a: int, c: int, d: int) -> Tensor:
    """Rows (i, k, l) in the order (i, l, k)."""
    return x.reshape(a, c, d, x.shape[1]).transpose(1, 2).reshape(a * d * c, x.shape[1])


def _scattered(y: Tensor, a: int, b: int, d: int) -> Tensor:
    """Rows (i, l, j) in the order (i, j, l)."""
    return y.reshape(a, d, b, y.shape[-1]).transpose(1, 2).reshape(a * b * d, y.shape[-1])


# An op of its own: torch's sparse formats cannot be traced, exported or mapped, and their gradients are missing or pass
# through a dense matrix.


def _run_sparse(x: Tensor, w: Tensor, blocks: bool) -> Tensor:
    """y = K x."""
    return (_bsr_product if blocks else _csr_product)(x, w).contiguous()


_library = torch.library.Library("fretwork", "FRAGMENT")
_library.define("ksmm_sparse(Tensor x, Tensor w, bool blocks) -> Tensor")
for _device in ("CPU", "CUDA"):
    _library.impl("ksmm_sparse", _run_sparse, _device)
_sparse_product = torch.ops.fretwork.ksmm_sparse.default


@torch.library.register_fake("fretwork::ksmm_sparse")
def _sparse_fake(x: Tensor, w: Tensor, blocks: bool) -> Tensor:
    a, b, _, d = w.shape
    return x.new_empty(a * b * d, x.shape[1])


def _sparse_setup(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
    x, w, ctx.blocks = inputs
    ctx.save_for_backward(x, w)


def _sparse_gradient(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, w = ctx.saved_tensors
    a, b, c, d = w.shape
    d_x = _sparse_product(d_y, w.transpose(1, 2), ctx.blocks) if ctx.needs_input_grad[0] else None
    d_w = None
    if ctx.needs_input_grad[1]:
        n = x.shape[1]
        # Not by einsum, which torch cannot map here.
        d_w = (d_y.reshape(a, b, d, n).transpose(1, 2) @ x.reshape(a, c, d, n).permute(0, 2, 3, 1)).permute(0, 2, 3, 1)
    return d_x, d_w, None


def _sparse_vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, w: Tensor, blocks: bool) -> tuple[Tensor, int]:
    (x_dim, w_dim, _), size = in_dims, info.batch_size
    if size == 0:
        return mapped_over_none(lambda x, w: _sparse_product(x, w, blocks), (x, x_dim), (w, w_dim))
    axis = 1 if w_dim is None else 0  # beside each other in the batch, or factors on a longer diagonal
    w = w if w_dim is None else mapped(w, w_dim, size, 0)
    return split(_sparse_product(mapped(x, x_dim, size, axis), w, blocks), size, axis), axis


torch.library.register_autograd("fretwork::ksmm_sparse", _sparse_gradient, setup_context=_sparse_setup)
torch.library.register_vmap("fretwork::ksmm_sparse", _sparse_vmap)


def _sparse(blocks: bool) -> Callable[[Tensor, Tensor, bool], Tensor]:
    def run(x: Tensor, w: Tensor, bs_last: bool) -> Tensor:
        return _sparse_product(x, w, blocks) if bs_last else _sparse_product(x.T, w, blocks).T

    return run


_PRODUCTS: dict[str, Callable[[Tensor, Tensor, bool], Tensor]] = {
    "bmm": _bmm,
    "bsr": _sparse(blocks=True),
    "einsum": _einsum,
    "dense": _dense,
    "sparse": _sparse(blocks=False),
}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}
BASELINES = tuple(_PRODUCTS)


def run(algo: str, x: Tensor, w: Tensor, bias: Tensor | None, activation: str, bs_last: bool) -> Tensor:
    """activation(product + bias) by the baseline called `algo`."""
    y = _PRODUCTS[algo](x, w, bs_last)
    if bias is not None:
        y = y + (bias[:, None] if bs_last else bias)
    return y if activation == "none" else _ACTIVATIONS[activation](y)
