"""What torch needs of the copies between Kronecker weights and dense matrices: shapes, gradients and vmap."""

from typing import Any

import torch
from torch import Tensor

from fretwork._checks import fail
from fretwork._rules_kronecker import mapped_over_none  # which loads the library
from fretwork._shapes import Operand, check_floating

to_dense = torch.ops.fretwork.kronecker_to_dense.default
from_dense = torch.ops.fretwork.kronecker_from_dense.default


@torch.library.register_fake("fretwork::kronecker_to_dense")
def _to_dense_fake(w: Tensor) -> Tensor:
    check_floating("to_dense", Operand("w", tuple(w.shape), str(w.dtype).removeprefix("torch.")))
    if w.dim() != 4 or 0 in w.shape:
        fail("to_dense", "w", "(a, b, c, d), each at least 1", tuple(w.shape))
    a, b, c, d = w.shape
    return w.new_empty(a * b * d, a * c * d)


@torch.library.register_fake("fretwork::kronecker_from_dense")
def _from_dense_fake(dense: Tensor, a: int, b: int, c: int, d: int) -> tuple[Tensor, Tensor]:
    check_floating("from_dense", Operand("dense", tuple(dense.shape), str(dense.dtype).removeprefix("torch.")))
    if tuple(dense.shape) != (a * b * d, a * c * d):
        expected = f"{(a * b * d, a * c * d)} for kronecker({a},{b},{c},{d})"
        fail("from_dense", "dense", expected, tuple(dense.shape))
    return dense.new_empty(a, b, c, d), dense.new_empty((), dtype=torch.int64)


# Each is the other's gradient: what lies outside the pattern has none.


def _to_dense_setup(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.sizes = inputs[0].shape


def _to_dense_gradient(ctx: Any, gradient: Tensor) -> Tensor:
    return from_dense(gradient, *ctx.sizes)[0]


def _from_dense_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])


def _from_dense_gradient(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None, None, None, None]:
    return to_dense(gradient), None, None, None, None


def _to_dense_vmap(info: Any, in_dims: tuple[int], w: Tensor) -> tuple[Tensor, int]:
    if info.batch_size == 0:
        return mapped_over_none(to_dense, (w, in_dims[0]))
    return torch.stack([to_dense(one) for one in w.unbind(in_dims[0])]), 0


def _from_dense_vmap(
    info: Any, in_dims: tuple[Any, ...], dense: Tensor, *sizes: int
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    each = [from_dense(one, *sizes) for one in dense.unbind(in_dims[0])]
    return (torch.stack([w for w, _ in each]), torch.stack([outside for _, outside in each])), (0, 0)


torch.library.register_autograd("fretwork::kronecker_to_dense", _to_dense_gradient, setup_context=_to_dense_setup)
torch.library.register_autograd("fretwork::kronecker_from_dense", _from_dense_gradient, setup_context=_from_dense_setup)
torch.library.register_vmap("fretwork::kronecker_to_dense", _to_dense_vmap)
torch.library.register_vmap("fretwork::kronecker_from_dense", _from_dense_vmap)
