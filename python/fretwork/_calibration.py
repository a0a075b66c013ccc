"""What the linear layers of a model see on given inputs: the norms of features, and the errors of other weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fretwork._checks import refuse

Call = tuple[tuple[Any, ...], dict[str, Any]]


def calls_of(calibration: object) -> list[Call]:
    """Arguments for each call of the model."""
    kinds = "an iterable of inputs (tensors, tuples of arguments or dicts of keyword arguments)"
    if isinstance(calibration, (Tensor, Mapping, str, bytes)) or not isinstance(calibration, Iterable):
        kind = type(calibration).__name__
        refuse("sparsify", "calibration", kinds, f"a {kind}; [x] holds one input", TypeError)
    calls = [_call_of(n, given) for n, given in enumerate(calibration)]
    if not calls:
        refuse("sparsify", "calibration", "at least one input", "none")
    return calls


def _call_of(n: int, given: object) -> Call:
    if isinstance(given, Tensor):
        return (given,), {}
    if isinstance(given, Mapping):
        return (), dict(given)
    if isinstance(given, (tuple, list)):
        return tuple(given), {}
    expected = "a tensor, a tuple of arguments or a dict of keyword arguments"
    refuse("sparsify", f"calibration[{n}]", expected, type(given).__name__, TypeError)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode and without gradients; afterwards every module is in its own mode again."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _watch(
    model: nn.Module, linears: Sequence[nn.Linear], calls: Iterable[Call], see: Callable[[nn.Linear, Tensor], None]
) -> None:
    """Runs the model, and shows what goes into each layer as (rows, features) in float32 or float64."""

    def before(linear: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x: Tensor = (args[0] if args else kwargs["input"]).detach()
        x = torch.cat(x.unbind()) if x.is_nested else x  # as torch's encoder packs padded batches
        x = x.reshape(-1, x.shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            see(linear, x if x.dtype == torch.float64 else x.float())  # type: ignore[arg-type]

    handles = [linear.register_forward_pre_hook(before, with_kwargs=True) for linear in linears]
    try:
        with _evaluating(model):
            for args, kwargs in calls:
                model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()


def feature_norms(model: nn.Module, linears: Sequence[nn.Linear], calls: Iterable[Call]) -> dict[nn.Linear, Tensor]:
    """The norm of each input feature over all rows, float64. Layers that no row reaches are missing."""
    squares: dict[nn.Linear, Tensor] = {}

    def add(linear: nn.Linear, x: Tensor) -> None:
        if len(x):
            found = torch.linalg.vector_norm(x, dim=0, dtype=torch.float64).square()
            squares[linear] = squares[linear] + found if linear in squares else found

    _watch(model, linears, calls, add)
    return {linear: total.sqrt() for linear, total in squares.items()}


def output_errors(
    model: nn.Module, weights: Mapping[nn.Linear, Callable[[], Tensor]], calls: Iterable[Call]
) -> dict[nn.Linear, float]:
    """The relative error of each layer's output, without its bias, if it had another weight and its own inputs."""
    sums: dict[nn.Linear, Tensor] = {}

    def add(linear: nn.Linear, x: Tensor) -> None:
        if len(x):
            own, other = (w.detach().to(x.dtype) for w in (linear.weight, weights[linear]()))
            outputs = (x @ w.T for w in (own - other, own))
            found = torch.stack([torch.linalg.vector_norm(y, dtype=torch.float64).square() for y in outputs])
            sums[linear] = sums[linear] + found if linear in sums else found

    _watch(model, list(weights), calls, add)
    return {linear: _ratio(*total.sqrt().tolist()) for linear, total in sums.items()}


def weight_error(weight: Tensor, other: Tensor) -> float:
    """The relative error of a weight in the Frobenius norm."""
    own, other = (w.detach() if w.dtype == torch.float64 else w.detach().float() for w in (weight, other))
    norms = [torch.linalg.vector_norm(w, dtype=torch.float64).item() for w in (own - other, own)]
    return _ratio(*norms)


def _ratio(error: float, whole: float) -> float:
    return error / whole if error else 0.0
