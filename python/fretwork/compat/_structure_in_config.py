"""The structure of a sparse Hugging Face model, saved in its configuration and there again when it is loaded."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fretwork.nn.ks_linear import KSLinear
from fretwork.nn.semi_sparse_linear import SemiSparseLinear
from fretwork.structure import restructure, tellable
from fretwork.two_four import canonical

_METHOD = "fretwork"
_WITHOUT_WEIGHT = (KSLinear, SemiSparseLinear)
_log = logging.getLogger("fretwork")


@register_quantization_config(_METHOD)
class StructureConfig(QuantizationConfigMixin):
    """What `fw.structure` tells, in the form that transformers has for changed weights: it refuses to load such a model
    where the method is not registered, and lets the method replace modules before weights are read."""

    def __init__(self, structure: Mapping[str, Any] | None = None, **_: Any) -> None:
        self.quant_method = _METHOD  # type: ignore[assignment]
        self.structure = {} if structure is None else dict(structure)


@register_quantizer(_METHOD)
class StructureLoader(HfQuantizer):
    """Restructures a model before its weights are loaded. Afterwards it is a model like any other."""

    requires_calibration = False

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        told = self.quantization_config.structure
        restructure(model, {**told, "layers": _as_named_in(model, told.get("layers", {}))})
        for layer in model.modules():
            if isinstance(layer, _WITHOUT_WEIGHT) and layer.weight is None:
                # Some models initialize this before they look whether it was loaded.
                vars(layer)["weight"] = torch.empty(layer.out_features, layer.in_features, device="meta")
        return model

    def postprocess_model(self, model: nn.Module, **_: Any) -> nn.Module:
        with torch.no_grad():
            for name, layer in model.named_modules():
                if isinstance(layer, _WITHOUT_WEIGHT):
                    vars(layer).pop("weight", None)
                if isinstance(layer, SemiSparseLinear) and layer.trainable == "values":
                    _check_words(name, layer)
        self.remove_quantization_config(model)
        return model

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


def _check_words(name: str, layer: SemiSparseLinear) -> None:
    """transformers puts tensors into their places itself, so that nothing has looked at the metadata yet."""
    if layer.values.is_meta:
        return
    try:
        layer.metadata.copy_(canonical(layer.values, layer.metadata, 1, keep_valid=True))
    except ValueError as error:
        raise ValueError(f"from_pretrained: {name}: {error}") from None


def _as_named_in(model: nn.Module, layers: Mapping[str, Any]) -> dict[str, Any]:
    """Names of the model that was saved as those of this one, which may be its base, or have it as a base."""
    prefix = getattr(model, "base_model_prefix", "") + "."
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    has_base = any(name.startswith(prefix) for name in layers)
    given = {}
    for name, told in layers.items():
        found = next((way for way in (name, name.removeprefix(prefix), prefix + name) if way in names), None)
        if found is not None or name.startswith(prefix) or not has_base:  # else of a head that this one has not
            given[found or name] = told
    return given


@contextmanager
def structure_saved(model: PreTrainedModel) -> Iterator[None]:
    """The structure of a model stands in its configuration, if there is any."""
    told, failures = tellable(model)
    for error in failures:
        _log.warning("save_pretrained: the model's class has to build this layer: %s", error)
    if not told["layers"]:
        yield
        return
    model.config.quantization_config = {"quant_method": _METHOD, "structure": copy.deepcopy(told)}
    try:
        yield
    finally:
        del model.config.quantization_config
