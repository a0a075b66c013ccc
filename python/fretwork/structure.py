"""Structure of sparse models: as plain data, put into a dense model, and the way back to dense layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from fretwork._checks import refuse
from fretwork._modules import all_names, put, sharing
from fretwork._torch.two_four import group_of
from fretwork.nn.block_sparse_conv2d import BlockSparseConv2d
from fretwork.nn.block_sparse_linear import BlockSparseLinear
from fretwork.nn.ks_linear import KSLinear
from fretwork.nn.multihead_attention import MultiheadAttention
from fretwork.nn.semi_sparse_linear import SemiSparseLinear
from fretwork.patterns import BlockLayout, Pattern
from fretwork.recipes import altered

__all__ = ["densify", "restructure", "structure"]

_VERSION = 1
_Model = TypeVar("_Model", bound=nn.Module)


def structure(model: nn.Module) -> dict[str, Any]:
    """What is sparse in a model, without its weights: a dict that JSON can hold, for `restructure`.

    >>> import json, torch, fretwork as fw
    >>> model = torch.nn.Sequential(torch.nn.Linear(32, 16))
    >>> report = fw.sparsify(model, {"*": fw.recipes.TwoFour()})
    >>> json.loads(json.dumps(fw.structure(model)))["layers"]["0"]["kind"]
    'two_four'
    """
    if not isinstance(model, nn.Module):
        refuse("structure", "model", "a torch.nn.Module", type(model).__name__, TypeError)
    told, failures = tellable(model)
    if failures:
        raise failures[0]
    return told


def tellable(model: nn.Module) -> tuple[dict[str, Any], list[NotImplementedError]]:
    """The structure of all layers that have one in words, and the errors of the others."""
    layers: dict[str, dict[str, Any]] = {}
    failures = []
    for module, names in all_names(model).items():
        try:
            told = _told(names[0], module)
        except NotImplementedError as error:
            failures.append(error)
        else:
            layers.update({name: dict(told) for name in names} if told is not None else {})
    return {"version": _VERSION, "layers": layers}, failures


def restructure(dense_model: _Model, structure: Mapping[str, Any]) -> _Model:
    """Gives a dense model the structure of a sparse one, in place, and returns it; `load_state_dict` does the rest.

    Until weights are loaded, a layer has the dense weights that its structure keeps; factors are random. Layers that
    have their structure already stay as they are. ValueError if the models differ; then nothing is changed. Works on
    the meta device, too.

    >>> import torch, fretwork as fw
    >>> model = torch.nn.Sequential(torch.nn.Linear(32, 16))
    >>> report = fw.sparsify(model, {"*": fw.recipes.Block(16, 0.5)})
    >>> twin = fw.restructure(torch.nn.Sequential(torch.nn.Linear(32, 16)), fw.structure(model))
    >>> twin.load_state_dict(model.state_dict())
    <All keys matched successfully>
    """
    if not isinstance(dense_model, nn.Module):
        refuse("restructure", "dense_model", "a torch.nn.Module", type(dense_model).__name__, TypeError)
    told = _layers_of(structure)
    modules = {name: module for module, names in all_names(dense_model).items() for name in names}
    layers: dict[nn.Module, nn.Module] = {}
    of_weight: dict[tuple[int, str], nn.Module] = {}
    with torch.inference_mode(False), torch.no_grad():
        for name, entry in told.items():
            if name not in modules:
                refuse("restructure", "structure", f"layers that the model has, such as {name}", "a model without it")
            module = modules[name]
            if module not in layers and _told(name, module) == entry:
                continue  # the model's class builds it so
            if module not in layers:
                layers[module] = _like(name, module, entry, of_weight)
            if (got := _told(name, layers[module])) != entry:
                _differs(name, entry, got)
    if dense_model in layers:
        kind = type(dense_model).__name__
        refuse("restructure", "dense_model", "a module that holds the layers", f"a {kind} itself")
    put(dense_model, layers)
    return dense_model


def densify(model: _Model) -> _Model:
    """Puts torch's layers in the places of sparse ones, in place, and returns the model, which computes the same.

    A weight becomes `to_dense()` of its layer. `fw.nn.MultiheadAttention` stays, because torch's holds no pattern.

    >>> import torch, fretwork as fw
    >>> model = torch.nn.Sequential(torch.nn.Linear(32, 16))
    >>> report = fw.sparsify(model, {"*": fw.recipes.TwoFour()})
    >>> fw.densify(model)
    Sequential(
      (0): Linear(in_features=32, out_features=16, bias=True)
    )
    """
    if not isinstance(model, nn.Module):
        refuse("densify", "model", "a torch.nn.Module", type(model).__name__, TypeError)
    layers: dict[nn.Module, nn.Module] = {}
    weights: dict[tuple[object, ...], nn.Parameter] = {}
    with torch.inference_mode(False), torch.no_grad():
        for module, names in all_names(model).items():
            if not _is_ours("densify", names[0], module) or not isinstance(module, _LINEAR_OR_CONV):
                continue
            if (reason := altered(module)) is not None:
                raise ValueError(f"densify: {names[0]}: {reason}")
            if isinstance(module, KSLinear) and module.bs_last:
                raise NotImplementedError(
                    f"densify: {names[0]}: expected features last, as torch.nn.Linear has them, got bs_last=True"
                )
            own = [p for name, p in module.named_parameters() if name != "bias"]
            key = (type(module), *map(id, own))
            if key not in weights:  # one weight stays one weight
                learns = any(p.requires_grad for p in own)
                weights[key] = nn.Parameter(module.to_dense().detach(), requires_grad=learns)
            layers[module] = _dense(module, weights[key])
    if model in layers:
        refuse("densify", "model", "a module that holds the layers", f"a {type(model).__name__} itself")
    put(model, layers)
    return model


# One entry of a structure


def _told(name: str, module: nn.Module) -> dict[str, Any] | None:
    """What JSON can hold of a sparse layer, without its weights."""
    if not _is_ours("structure", name, module):
        return None
    if isinstance(module, SemiSparseLinear):
        weight = module.weight if module.trainable == "dense" else module.values
        how = {"prune": module.prune, "trainable": module.trainable, "decay": module.decay}
        kept = "1:2 of float32" if group_of(weight.dtype) == 2 else "2:4"
        return {"kind": "two_four", **_sizes(module), **how, "kept": kept}
    if isinstance(module, BlockSparseLinear):
        return {"kind": "block", **_sizes(module), "layout": module.layout.text}
    if isinstance(module, KSLinear):
        patterns = [list(p.weight_shape) for p in module.patterns]
        how = {"algo": module.algo, "bs_last": module.bs_last, "cache_dense": module.cache_dense}
        return {"kind": "kronecker", **_sizes(module), "patterns": patterns, **how}
    if isinstance(module, BlockSparseConv2d):
        told = {name: getattr(module, name) for name in ("kernel_size", "stride", "padding", "dilation")}
        told = {name: list(value) if isinstance(value, tuple) else value for name, value in told.items()}
        shape = [module.out_channels, module.in_channels]
        return {"kind": "conv2d", "shape": shape, "bias": module.bias is not None, **told, "layout": module.layout.text}
    assert isinstance(module, MultiheadAttention)
    return _told_attention(name, module)


_LINEAR_OR_CONV = (BlockSparseLinear, KSLinear, SemiSparseLinear, BlockSparseConv2d)


def _is_ours(op: str, name: str, module: nn.Module) -> bool:
    """Whether it is a layer of `fretwork.nn`. What derives from one may do something else, and is refused."""
    own = (*_LINEAR_OR_CONV, MultiheadAttention)
    if isinstance(module, own) and type(module) not in own:
        kind = f"{type(module).__module__}.{type(module).__name__}"
        raise NotImplementedError(f"{op}: {name}: expected a layer of fretwork.nn itself, got {kind}")
    return type(module) in own


def _sizes(module: Any) -> dict[str, Any]:
    return {"shape": [module.out_features, module.in_features], "bias": module.bias is not None}


def _told_attention(name: str, module: MultiheadAttention) -> dict[str, Any]:
    given = module.pattern
    if not isinstance(given, (Pattern, tuple)):
        raise NotImplementedError(
            f"structure: {name}: pattern: expected a pattern or one for each head, got a function, which JSON cannot "
            "hold; give the pattern of one length, or build the layer where the model is built"
        )
    pattern = given.text if isinstance(given, Pattern) else [p.text for p in given]
    sizes = {n: getattr(module, n) for n in ("embed_dim", "num_heads", "num_kv_heads", "kdim", "vdim", "batch_first")}
    return {"kind": "attention", **sizes, "bias": module.in_proj_bias is not None, "pattern": pattern}


def _layers_of(structure: object) -> dict[str, dict[str, Any]]:
    if not isinstance(structure, Mapping) or not isinstance(structure.get("layers"), Mapping):
        refuse("restructure", "structure", "a dict that fw.structure made", repr(structure)[:100], TypeError)
    if (version := structure.get("version")) != _VERSION:
        refuse("restructure", "structure", f"version {_VERSION}", repr(version))
    for name, entry in structure["layers"].items():
        kind = entry.get("kind") if isinstance(entry, Mapping) else entry
        if not isinstance(kind, str) or kind not in _MAKERS:
            refuse("restructure", f"structure: {name}: kind", " or ".join(_MAKERS), repr(kind))
    return {name: dict(entry) for name, entry in structure["layers"].items()}


def _differs(name: str, entry: dict[str, Any], got: dict[str, Any] | None) -> NoReturn:
    got = got or {}
    wrong = next(key for key in {**entry, **got} if entry.get(key) != got.get(key))
    refuse("restructure", f"{name}: {wrong}", entry.get(wrong), got.get(wrong))


def _like(
    name: str, module: nn.Module, entry: dict[str, Any], of_weight: dict[tuple[int, str], nn.Module]
) -> nn.Module:
    """A layer with the structure of an entry in the place of a dense module. One weight stays one weight."""
    dense, make = _MAKERS[entry["kind"]]
    if not isinstance(module, dense):
        refuse("restructure", name, f"a torch.nn.{dense.__name__}", type(module).__name__)
    if (reason := altered(module)) is not None:
        raise ValueError(f"restructure: {name}: {reason}")
    weight = getattr(module, "weight", module)
    key = (id(weight), repr(sorted((n, str(value)) for n, value in entry.items() if n != "bias")))
    if key in of_weight:
        layer = sharing(of_weight[key], module.bias)  # type: ignore[arg-type]
        return layer.train(module.training)
    try:
        layer = of_weight[key] = make(module, entry)
    except KeyError as missing:
        refuse("restructure", f"structure: {name}", f"a value for {missing.args[0]}", "none")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"restructure: {name}: {error}") from None
    for own, parameter in module.named_parameters():
        if own.endswith("bias") or dense is nn.MultiheadAttention:  # the very same ones, which others may share
            owner, _, last = own.rpartition(".")
            layer.get_submodule(owner).register_parameter(last, parameter)
    return layer.train(module.training)


def _two_four(linear: nn.Linear, entry: dict[str, Any]) -> nn.Module:
    how = {"trainable": entry["trainable"], "decay": entry["decay"]}
    prune = entry["prune"]  # None is for a weight that is 2:4, as the dense one here need not be
    layer = SemiSparseLinear.from_dense(linear, "magnitude" if prune is None else prune, **how)
    layer.prune = prune
    return layer


def _kronecker(linear: nn.Linear, entry: dict[str, Any]) -> nn.Module:
    weight = linear.weight
    how = {name: entry[name] for name in ("algo", "bs_last", "cache_dense")}
    layer = KSLinear(entry["patterns"], bias=linear.bias is not None, dtype=weight.dtype, device=weight.device, **how)
    layer.weights.requires_grad_(weight.requires_grad)
    return layer


def _dense(module: nn.Module, weight: nn.Parameter) -> nn.Module:
    """torch's layer for one of ours."""
    layer: nn.Module
    if isinstance(module, BlockSparseConv2d):
        sizes = module.in_channels, module.out_channels, module.kernel_size
        layer = nn.Conv2d(*sizes, module.stride, module.padding, module.dilation, bias=False, device="meta")
    else:
        layer = nn.Linear(module.in_features, module.out_features, False, "meta")  # type: ignore[arg-type]
    layer.weight = weight
    layer.register_parameter("bias", module.bias)  # type: ignore[arg-type]
    return layer.train(module.training)


def _layout(entry: dict[str, Any]) -> BlockLayout:
    layout = Pattern.parse(entry["layout"])
    if not isinstance(layout, BlockLayout):
        refuse("restructure", "layout", "the text of a BlockLayout", layout.text)
    return layout


def _attention(mha: nn.MultiheadAttention, entry: dict[str, Any]) -> nn.Module:
    texts = entry["pattern"]
    pattern = Pattern.parse(texts) if isinstance(texts, str) else [Pattern.parse(text) for text in texts]
    return MultiheadAttention.from_dense(mha, pattern)


_MAKERS: dict[str, tuple[type[nn.Module], Callable[[Any, dict[str, Any]], nn.Module]]] = {
    "two_four": (nn.Linear, _two_four),
    "block": (nn.Linear, lambda linear, entry: BlockSparseLinear.from_dense(linear, _layout(entry))),
    "kronecker": (nn.Linear, _kronecker),
    "conv2d": (nn.Conv2d, lambda conv, entry: BlockSparseConv2d.from_dense(conv, _layout(entry))),
    "attention": (nn.MultiheadAttention, _attention),
}
