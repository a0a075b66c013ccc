"""Whole models: `fw.sparsify` replaces the layers that a plan names, all of them or none, and reports what it did."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fretwork._calibration import calls_of, feature_norms, output_errors, weight_error
from fretwork._checks import refuse
from fretwork._modules import all_names, put, sharing
from fretwork.recipes import Recipe

__all__ = ["Report", "Row", "sparsify"]

_OP = "sparsify"


@dataclass(frozen=True)
class Row:
    """What happened to one layer. `error` is the relative Frobenius error of its weight, `output_error` that of its
    outputs on the calibration's inputs, None without them."""

    name: str
    kind: str
    shape: tuple[int, ...]
    parameters_before: int
    parameters_after: int
    error: float
    output_error: float | None = None


@dataclass(frozen=True, repr=False)
class Report:
    """What `fw.sparsify` did, a row for each layer. Prints as a table."""

    rows: tuple[Row, ...]
    calibrated: bool = False

    @property
    def parameters_before(self) -> int:
        return sum(row.parameters_before for row in self.rows)

    @property
    def parameters_after(self) -> int:
        return sum(row.parameters_after for row in self.rows)

    def to_json(self) -> str:
        """The rows and totals as JSON."""
        rows = [asdict(row) for row in self.rows]
        if not self.calibrated:
            for row in rows:
                del row["output_error"]
        totals = {"parameters_before": self.parameters_before, "parameters_after": self.parameters_after}
        return json.dumps({"rows": rows, **totals})

    def __str__(self) -> str:
        titles = ["name", "kind", "shape", "before", "after", "error", *["output error"] * self.calibrated]
        lines = [titles, *(self._cells(row) for row in self.rows)]
        lines.append(["total", "", "", f"{self.parameters_before:,}", f"{self.parameters_after:,}"])
        return table(lines, left=3)

    def _cells(self, row: Row) -> list[str]:
        cells = [row.name, row.kind, "×".join(map(str, row.shape))]
        cells += [f"{row.parameters_before:,}", f"{row.parameters_after:,}", f"{row.error:.4f}"]
        if self.calibrated:
            cells.append("—" if row.output_error is None else f"{row.output_error:.4f}")
        return cells

    __repr__ = __str__


def table(lines: list[list[str]], left: int) -> str:
    """Columns as wide as their widest cell; the first `left` of them are flush left. A line may end early."""
    widths = [max(len(line[n]) for line in lines if n < len(line)) for n in range(max(map(len, lines)))]
    padded = ([f"{cell:{'<' if n < left else '>'}{widths[n]}}" for n, cell in enumerate(line)] for line in lines)
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def sparsify(model: nn.Module, plan: Mapping[str, Recipe | None], calibration: Iterable[Any] | None = None) -> Report:
    """Replaces layers of `model` in place by sparse ones, as `plan` says, and reports it.

    `plan` maps globs to recipes of `fw.recipes`. A glob is matched to the whole dotted names of modules, where `*`
    crosses dots. The first one whose recipe is for such a module wins; None keeps a module with all that is inside it.
    Modules that no recipe is for are passed over, as is the output projection inside `torch.nn.MultiheadAttention`. A
    glob that matches nothing its recipe is for raises ValueError, and so does a layer that its recipe cannot take. All
    is checked and made before the first layer is replaced: a call that raises has changed nothing.

    A module with several names counts once. Layers that share one weight go on sharing it, if all have the same recipe;
    a weight that is also used elsewhere, such as by an embedding, is refused. Biases stay the same parameters.

    With `calibration`, an iterable of inputs (a tensor, a tuple of arguments or a dict of keyword arguments for the
    model), weights are scored by |W| · ‖x‖ of their input feature, and factors fitted to W · diag(‖x‖). The model then
    runs twice on each, in evaluation mode without gradients, and the report has the errors of the outputs. A layer that
    no input reaches is scored by its weight alone and has no output error.

    >>> import torch, fretwork as fw
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    >>> report = fw.sparsify(model, {"2": None, "*": fw.recipes.Block(16, 0.25)})
    >>> report.rows[0].name, report.parameters_before, report.parameters_after
    ('0', 16640, 4352)
    >>> model(torch.randn(3, 64)).shape
    torch.Size([3, 10])
    """
    if not isinstance(model, nn.Module):
        refuse(_OP, "model", "a torch.nn.Module", type(model).__name__, TypeError)
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        refuse(_OP, "model", "one that is not wrapped yet", "DistributedDataParallel; wrap it afterwards")
    names = all_names(model)
    chosen = _chosen(names, _checked(plan))
    groups = _groups(model, names, chosen)
    for module, recipe in chosen.items():
        _check(names[module][0], recipe, module)
    calls = None if calibration is None else calls_of(calibration)
    linears = [module for module in chosen if isinstance(module, nn.Linear)]
    norms = {} if calls is None else _checked_norms(names, feature_norms(model, linears, calls))
    layers = _made(groups, chosen, norms, names)
    errors = {}
    if calls is not None:
        errors = output_errors(model, {m: layers[m].to_dense for m in linears}, calls)  # type: ignore[misc]
    rows = _rows(names, chosen, layers, errors)
    _save_with_structure(model)
    put(model, layers)
    return Report(tuple(rows), calls is not None)


def _checked(plan: object) -> dict[str, Recipe | None]:
    if not isinstance(plan, Mapping):
        hint = '; {"*": recipe} is for every layer' if isinstance(plan, Recipe) else ""
        refuse(_OP, "plan", "a dict of globs and recipes", type(plan).__name__ + hint, TypeError)
    for glob, recipe in plan.items():
        if not isinstance(glob, str):
            refuse(_OP, "plan", "globs as keys", repr(glob), TypeError)
        if recipe is not None and not isinstance(recipe, Recipe):
            refuse(_OP, f"plan[{glob!r}]", "a recipe of fretwork.recipes or None", repr(recipe), TypeError)
    return dict(plan)


def _chosen(names: dict[nn.Module, list[str]], plan: dict[str, Recipe | None]) -> dict[nn.Module, Recipe]:
    """The recipe of each module that gets one."""
    unused = set(plan)
    chosen: dict[nn.Module, Recipe] = {}
    for module, own in names.items():
        open_yet = True
        for glob, recipe in plan.items():
            if not any(_matches(glob, name, recipe is None) for name in own):
                continue
            if recipe is None or recipe.takes(module):
                unused.discard(glob)
                if open_yet and recipe is not None:
                    chosen[module] = recipe
                open_yet = False
    for glob in plan:
        if glob in unused:
            what = "module" if plan[glob] is None else f"layer that {plan[glob]} is for"
            others = ((name, m) for m, own in names.items() for name in own if name and fnmatchcase(name, glob))
            got = next((f"{name}, a {type(m).__name__}" for name, m in others), "none")
            refuse(_OP, f"plan[{glob!r}]", f"a glob that matches the name of a {what}", got)
    if (recipe := chosen.get(next(iter(names)))) is not None:
        refuse(_OP, "model", "a module that holds the layers to replace", f"one that {recipe} is for itself")
    return chosen


def _matches(glob: str, name: str, inside: bool) -> bool:
    """Whether a glob matches a name or, with `inside`, one of the modules that it is inside of."""
    while not fnmatchcase(name, glob):
        if not inside or "." not in name:
            return False
        name = name.rpartition(".")[0]
    return bool(name) or glob == "*"


def _groups(
    model: nn.Module, names: dict[nn.Module, list[str]], chosen: dict[nn.Module, Recipe]
) -> list[list[nn.Module]]:
    """Modules that share one weight stand together."""
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    groups: dict[int, list[nn.Module]] = {}
    for module, recipe in chosen.items():
        weight = module.weight if isinstance(module, nn.Linear) else None
        for other in owners.get(id(weight), []):
            if chosen.get(other) != recipe:
                raise ValueError(
                    f"{_OP}: {names[module][0]}: weight: expected the same recipe for all layers that share it, got "
                    f"another for {names[other][0]}; keep both with None, or give {names[module][0]} its own weight"
                )
        groups.setdefault(id(module if weight is None else weight), []).append(module)
    return list(groups.values())


def _check(name: str, recipe: Recipe, module: nn.Module) -> None:
    with torch.no_grad():
        reason = recipe.refusal(module)
    if reason is not None:
        raise ValueError(f"{_OP}: {name}: {recipe.kind}: {reason}")


def _checked_norms(names: dict[nn.Module, list[str]], norms: dict[nn.Linear, Tensor]) -> dict[nn.Linear, Tensor]:
    for linear, found in norms.items():
        if not found.isfinite().all():
            refuse(_OP, "calibration", f"inputs that are finite where they reach {names[linear][0]}", "others")
    return norms


def _made(
    groups: list[list[nn.Module]],
    chosen: dict[nn.Module, Recipe],
    norms: dict[nn.Linear, Tensor],
    names: dict[nn.Module, list[str]],
) -> dict[nn.Module, nn.Module]:
    """The new layer of each module."""
    layers: dict[nn.Module, nn.Module] = {}
    with torch.inference_mode(False), torch.no_grad(), _Progress(len(groups)) as progress:
        for first, *others in groups:
            progress.at(names[first][0])
            found = [norms[m] for m in (first, *others) if m in norms]  # type: ignore[index]
            scale = torch.stack(found).norm(dim=0) if found else None
            layer = chosen[first].make(first, scale if scale is not None and scale.any() else None)
            if isinstance(first, nn.Linear):
                layer.register_parameter("bias", first.bias)  # the very same one, which others may share
            layers[first] = layer
            for other in others:
                layers[other] = sharing(layer, other.bias).train(other.training)  # type: ignore[arg-type]
    return layers


def _rows(
    names: dict[nn.Module, list[str]],
    chosen: dict[nn.Module, Recipe],
    layers: dict[nn.Module, nn.Module],
    errors: dict[nn.Linear, float],
) -> list[Row]:
    rows: list[Row] = []
    before: set[nn.Parameter] = set()
    after: set[nn.Parameter] = set()
    for module, recipe in chosen.items():
        layer, error, shape = layers[module], 0.0, (0, 0)
        if isinstance(module, nn.Linear):
            shape = (module.out_features, module.in_features)
            error = weight_error(module.weight, layer.to_dense())  # type: ignore[operator]
        elif isinstance(module, nn.MultiheadAttention):
            shape = (module.embed_dim, module.embed_dim)
        output_error = errors.get(module) if isinstance(module, nn.Linear) else None
        sizes = _count(module, before), _count(layer, after)
        rows.append(Row(names[module][0], recipe.kind, shape, *sizes, error, output_error))
    return rows


def _count(module: nn.Module, counted: set[nn.Parameter]) -> int:
    """Elements of the parameters that are not counted yet, which then are."""
    new = set(module.parameters()) - counted
    counted |= new
    return sum(p.numel() for p in new)


def _save_with_structure(model: nn.Module) -> None:
    """`save_pretrained` of a Hugging Face model keeps the structure once this module is there."""
    pretrained = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    if pretrained is not None and any(isinstance(module, pretrained) for module in model.modules()):
        importlib.import_module("fretwork.compat.transformers")


class _Progress:
    """A line on a terminal that says which layer is made, once it takes long."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._began, self._wide = total, 0, time.monotonic(), 0

    def __enter__(self) -> _Progress:
        return self

    def at(self, name: str) -> None:
        if sys.stderr.isatty() and time.monotonic() - self._began > 1:
            self._write(f"{_OP}: {self._done} of {self._total} layers are made, {name} is next")
        self._done += 1

    def _write(self, text: str) -> None:
        print(f"\r{text:<{self._wide}}", end="", file=sys.stderr, flush=True)
        self._wide = len(text)

    def __exit__(self, *_: object) -> None:
        if self._wide:
            self._write("")
            print("\r", end="", file=sys.stderr, flush=True)
