"""Advice: which sparse structure pays for a linear layer of given sizes, measured here beside torch's dense layer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fretwork import recipes
from fretwork._checks import flag, refuse, whole_number
from fretwork._timing import medians
from fretwork._torch.arguments import FLOATING, dtype_name
from fretwork.nn.block_sparse_linear import BlockSparseLinear
from fretwork.nn.ks_linear import KSLinear
from fretwork.sparsify import table

__all__ = ["Advice", "Row", "advise"]

_OP = "advise"
_KINDS = ("two_four", "block", "monarch")
_BLOCKS, _DENSITIES, _FACTORS = (32, 64, 128), (0.5, 0.25, 0.1), (8, 16, 32, 64, 128)
_CLOSE = 1.25  # how much denser a layer may be than its recipe says: whole blocks do not make every density
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-2, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@dataclass(frozen=True)
class Row:
    """A layer that was measured. `memory` is the size of the weight in bytes, indices included."""

    kind: str
    recipe: recipes.Recipe | None
    ms: float
    dense_ms: float
    speedup: float
    parameters: int
    memory: int


@dataclass(frozen=True, repr=False)
class Advice:
    """What `fw.advise` measured, a row for each layer, the fastest first. Prints as a table with a verdict."""

    rows: tuple[Row, ...]
    what: str

    @property
    def best(self) -> Row:
        """The fastest."""
        return self.rows[0]

    @property
    def verdict(self) -> str:
        """One sentence: the fastest of each kind against dense."""
        best = {row.kind: row for row in reversed(self.rows) if row.recipe is not None}
        told = [f"{_named(row)} is {_times(row.speedup)}" for row in sorted(best.values(), key=lambda row: row.ms)]
        return f"{self.what}: {', '.join(told) or 'nothing else fits'}."

    def to_json(self) -> str:
        """The rows as JSON, recipes as text."""
        rows = [{**asdict(row), "recipe": row.recipe and repr(row.recipe)} for row in self.rows]
        return json.dumps({"rows": rows, "verdict": self.verdict})

    def __str__(self) -> str:
        lines = [["kind", "recipe", "ms", "speedup", "parameters", "memory"]]
        for row in self.rows:
            sizes = [f"{row.parameters:,}", f"{row.memory / 1024:,.0f} KiB"]
            times = [f"{row.ms:.4g}", f"{row.speedup:.2f}×"]
            lines.append([row.kind, "" if row.recipe is None else repr(row.recipe), *times, *sizes])
        return f"{table(lines, left=2)}\n{self.verdict}"

    __repr__ = __str__


def _named(row: Row) -> str:
    if isinstance(row.recipe, recipes.Block):
        return f"blocks of {row.recipe.block} at {row.recipe.density:.0%}"
    return f"monarch of {row.recipe.p}" if isinstance(row.recipe, recipes.Monarch) else "2:4"


def _times(speedup: float) -> str:
    return f"{speedup:.1f}× as fast as dense" if speedup >= 1.05 else f"no faster ({speedup:.2f}×)"


def advise(
    in_features: int,
    out_features: int,
    rows: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | int | None = None,
    training: bool = False,
    kinds: Iterable[str] | None = None,
) -> Advice:
    """Measures a dense layer and every structure that fits it on this machine, and sorts them by time.

    The layers are `torch.nn.Linear` without a bias and what `fw.sparsify` makes of one: 2:4, blocks of 32 to 128 at
    densities of 0.5 to 0.1 as far as whole blocks make them, at least one in each row, and Monarch of several sizes;
    `kinds` leaves some of "two_four", "block" and "monarch". `rows` is the number of input rows, `device` the GPU if
    there is one. With `training` a call is a forward and a backward pass, with gradients of the input and the weight.
    Each result is compared with a dense product before it is timed; a layer that is wrong raises. On a GPU the time is
    the GPU's, without that of the host.

    >>> import torch, fretwork as fw
    >>> advice = fw.advise(128, 64, rows=4, dtype=torch.float32, device="cpu", kinds=["two_four"])
    >>> sorted(row.kind for row in advice.rows), advice.best is advice.rows[0]
    (['dense', 'two_four'], True)
    """
    names = {"in_features": in_features, "out_features": out_features, "rows": rows}
    sizes = [whole_number(_OP, name, value) for name, value in names.items()]
    for name, size in zip(names, sizes, strict=True):
        if size < 1:
            refuse(_OP, name, "1 or more", size)
    where = _checked_device(device)
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATING or (dtype == torch.float64 and where.type != "cpu"):
        got = dtype_name(dtype) if isinstance(dtype, torch.dtype) else repr(dtype)
        refuse(_OP, "dtype", "float32, float16, bfloat16, or float64 on a CPU", got, TypeError)
    training = flag(_OP, "training", training)
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(where.type, enabled=False),
        torch.random.fork_rng(_gpus(where)),
    ):
        torch.manual_seed(0)
        dense = nn.Linear(sizes[0], sizes[1], bias=False, device=where, dtype=dtype)
        x = torch.randn(sizes[2], sizes[0], device=where, dtype=dtype)
        layers = _layers(dense, _checked_kinds(kinds))
        for recipe, layer in layers.items():
            _verify(recipe, layer, x)
        calls = {key: _call(layer, x, training) for key, layer in layers.items()}
        with torch.cuda.device(where) if where.type == "cuda" else nullcontext():
            times = medians(calls, where, seconds=1.0)
    found = [_row(recipe, layer, times[recipe], times[None]) for recipe, layer in layers.items()]
    problem = f"{sizes[2]} row{'s' * (sizes[2] > 1)} of {sizes[0]} → {sizes[1]} in {dtype_name(dtype)}"
    passes = "forward and backward" if training else "forward"
    return Advice(tuple(sorted(found, key=lambda row: row.ms)), f"For {problem} on {_machine(where)}, {passes}")


def _checked_device(device: torch.device | str | int | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError):
        refuse(_OP, "device", "a CPU or a CUDA GPU", repr(device))
    if where.type not in ("cpu", "cuda") or (where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count()):
        refuse(_OP, "device", "a CPU or a CUDA GPU of this machine", where)
    return where


def _gpus(device: torch.device) -> list[int]:
    return [torch.cuda.current_device() if device.index is None else device.index] if device.type == "cuda" else []


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{threads} CPU thread{'s' * (threads > 1)}"


def _checked_kinds(kinds: Iterable[str] | None) -> set[str]:
    if kinds is None:
        return set(_KINDS)
    if isinstance(kinds, str) or not isinstance(kinds, Iterable):
        refuse(_OP, "kinds", f"some of {', '.join(_KINDS)}", repr(kinds), TypeError)
    chosen = list(kinds)
    for kind in chosen:
        if kind not in (*_KINDS, "dense"):
            refuse(_OP, "kinds", f"some of {', '.join(_KINDS)}", repr(kind))
    return set(chosen)


def _layers(dense: nn.Linear, kinds: set[str]) -> dict[recipes.Recipe | None, nn.Module]:
    """The dense layer under None, and one for each recipe that fits."""
    layers: dict[recipes.Recipe | None, nn.Module] = {None: dense}
    for recipe in _recipes(dense.in_features, dense.out_features):
        if recipe.kind in kinds and recipe.refusal(dense) is None:
            layers[recipe] = _random_factors(recipe, dense) if recipe.kind == "monarch" else recipe.make(dense)
    return layers


def _recipes(in_features: int, out_features: int) -> Iterable[Any]:
    yield recipes.TwoFour()
    for block in _BLOCKS:
        rows, blocks = out_features // block, (out_features // block) * (in_features // block)
        for density in _DENSITIES:
            kept = max(math.ceil(density * blocks), rows)  # at least one in each row
            if blocks and kept / blocks <= _CLOSE * density:
                yield recipes.Block(block, density)
    for p in _FACTORS:
        if in_features // p + p < in_features:  # else the factors have as many elements as the dense weight
            yield recipes.Monarch(p)


def _random_factors(recipe: recipes.Monarch, dense: nn.Linear) -> KSLinear:
    """With the patterns of the recipe; to fit them to the weight would take longer than to measure them all."""
    patterns = recipe.patterns_for(dense.out_features, dense.in_features)
    return KSLinear(patterns, bias=False, device=dense.weight.device, dtype=dense.weight.dtype)


def _verify(recipe: recipes.Recipe | None, layer: nn.Module, x: Tensor) -> None:
    weight = layer.weight if isinstance(layer, nn.Linear) else layer.to_dense()  # type: ignore[operator]
    with torch.no_grad():
        kind = torch.float64 if x.dtype == torch.float64 else torch.float32
        want = x.to(kind) @ weight.to(kind).T
        error = (layer(x).to(kind) - want).norm().item()
        if not error <= _TOLERANCES[x.dtype] * want.norm().item():
            raise RuntimeError(f"{_OP}: {recipe}: expected the product with its dense matrix, got another result")


def _call(layer: nn.Module, x: Tensor, training: bool) -> Callable[[], object]:
    if not training:

        def forward() -> None:
            with torch.no_grad():
                layer(x)

        return forward
    x = x.detach().requires_grad_()
    wanted = [x, *layer.parameters()]
    upstream = torch.ones_like(layer(x))

    def step() -> None:
        torch.autograd.grad(layer(x), wanted, upstream)

    return step


def _row(recipe: recipes.Recipe | None, layer: nn.Module, ms: float, dense_ms: float) -> Row:
    tensors = [*layer.parameters(), *layer.buffers()]
    memory = sum(t.numel() * t.element_size() for t in tensors)
    if isinstance(layer, BlockSparseLinear):
        memory += 8 * layer.layout.nnz  # a row and a column of 32 bits for each block
    parameters = sum(p.numel() for p in layer.parameters())
    return Row("dense" if recipe is None else recipe.kind, recipe, ms, dense_ms, dense_ms / ms, parameters, memory)
