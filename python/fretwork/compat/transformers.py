"""Hugging Face models with `attn_implementation="fretwork"`: importing this module registers it.

The pattern is given in the model's configuration as a text with {seq} for the lengths (or without, for calls of one
length), one for all layers or a list with one for each, so that it is saved and loaded with the model:

    import fretwork.compat.transformers
    config = LlamaConfig(..., fretwork_pattern="strided({seq}, 128)")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="fretwork")

Without one a model keeps the attention it has: causal, with its sliding window where it has one, or full. Keys that the
attention mask leaves out as padding are not seen. Caches that grow with the sequence work; a static cache raises.
Position ids that begin anew inside a row (packed sequences) are not looked at: give the lengths of the documents, as in
`model.config.fretwork_pattern = "document((700, 324), causal=True)"` for rows of 1024 tokens.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from fretwork.ops import _check_tensor
from fretwork.pattern import Pattern
from fretwork.regular import attention

# Added to the scores of padding; the smallest number there is would be infinite after another is added.
_UNSEEN = torch.finfo(torch.float32).min / 4


@functools.lru_cache(maxsize=1024)
def _pattern(template: str, rows: int, cols: int) -> Pattern:
    expected = "attention: fretwork_pattern: expected a text with {seq} for the lengths"
    try:
        pattern = Pattern.parse(template.replace("{seq}", f"({rows}, {cols})"))
    except ValueError as error:
        raise ValueError(f"{expected}, as 'strided({{seq}}, 128)', got {template!r} ({error})") from None
    if pattern.shape != (rows, cols):
        raise ValueError(f"{expected}, or one of shape ({rows}, {cols}), got {template!r} of shape {pattern.shape}")
    return pattern


def _of_layer(given: list[str] | tuple[str, ...], config: Any, layer: Any) -> str:
    layers = len(given) if getattr(config, "is_encoder_decoder", False) else config.num_hidden_layers
    if layer is None or layer >= len(given) or layers != len(given):
        raise ValueError(
            "attention: fretwork_pattern: expected one text for all layers, or one for each"
            f"{' (which these do not count)' if layer is None else f' of {layers}'}, got a list of {len(given)}"
        )
    return given[layer]


def _template(module: torch.nn.Module, causal: bool, window: int | None) -> str:
    given = getattr(getattr(module, "config", None), "fretwork_pattern", None)
    if isinstance(given, (list, tuple)):
        given = _of_layer(given, module.config, getattr(module, "layer_idx", None))
    if given is not None:
        return str(given)
    if window is not None:
        return f"sliding_window({{seq}}, {window - 1}, {'0' if causal else window - 1})"
    return "causal({seq})" if causal else "full({seq})"


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What a model calls: q, k, v are (B, H, S, D), the result is (B, S, H, D). `attention_mask` is (B, Sk), 0 or False
    where a key is padding, or something to add to the scores, (B, 1 or H, Sq, Sk)."""
    _check_tensor("attention", "q", query)
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    pattern = _pattern(_template(module, causal, sliding_window), query.shape[2], key.shape[2])
    bias = None
    if attention_mask is not None:
        padding = attention_mask.dim() == 2
        bias = attention_mask[:, None, None] if padding else attention_mask[..., : key.shape[2]]
        if padding or bias.dtype == torch.bool:
            bias = torch.zeros(bias.shape, device=bias.device).masked_fill_(~bias.bool(), _UNSEEN)
    o = attention(query, key, value, pattern, scaling, bias, softcap or 0.0, dropout)
    return o.transpose(1, 2).contiguous(), None


def padding_mask(
    *args: Any, q_length: int = 0, kv_length: int = 0, q_offset: Any = 0, kv_offset: int = 0, **kwargs: Any
) -> Tensor | None:
    """What a model makes of its attention mask: the padding alone, or None where there is none."""
    if isinstance(q_offset, Tensor) or (q_offset and q_offset + q_length != kv_offset + kv_length):
        raise NotImplementedError(
            "attention: past_key_values: expected a cache as long as the sequence, got a static one; use DynamicCache"
        )
    mask: Tensor | None = kwargs.get("attention_mask")
    if mask is None:
        return None
    mask = mask[:, -kv_length:] if kv_length else mask
    return None if bool(mask.all()) else mask


AttentionInterface.register("fretwork", attention_forward)
AttentionMaskInterface.register("fretwork", padding_mask)
