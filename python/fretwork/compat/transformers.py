"""Hugging Face models with `attn_implementation="fretwork"`: importing this module registers it.

The pattern is given in the model's configuration as a text with {seq} for the lengths (or without, for calls of one
length), one for all layers or a list with one for each:

    import fretwork.compat.transformers
    config = LlamaConfig(..., fretwork_pattern="strided({seq}, 128)")
    model = AutoModelForCausalLM.from_config(config)

It is saved and loaded with the model. A configuration with a pattern means `attn_implementation="fretwork"` unless
another one is named; where this module is not imported, transformers refuses the model that was saved with it.

Without a pattern a model keeps the attention it has: causal, with its sliding window where it has one, or full; any
other (chunks, images whose tokens see each other) is read through a mask as transformers makes it. Position biases are
added. Models that compute their attention themselves, or choose their keys, are refused. Keys that the attention mask
leaves out as padding are not seen, and positions of a pattern count from a row's first real token, so that a padded row
has the results of the row alone: rows are computed in groups of equal padding where the pattern is not the same for all
of them. Keys left out inside a row raise with a pattern that depends on positions.
Caches that grow with the sequence work, and so do static ones, which are read through a mask as transformers makes it.
With a pattern the length of a static cache is read on the host in each call; where a pattern would need keys that a
cache has dropped, it raises.

Packed sequences are documents of their own: `cu_seq_lens_q`, as transformers' collators give it, or position ids that
are given and begin anew inside a row. An attention mask beside them, of all ones too, means one document in each row,
as in models' own attention. Position ids are read once for each call, and not where `torch.compile` or a CUDA graph
takes the call: there is then room for a document at every place, which takes smaller tiles than `cu_seq_lens_q` may.
Causal attention, full attention and windows run as `fw.varlen_attention`; of other patterns (and with softcap, dropout
or chosen blocks) every document has its own, made on the host, where a compiled graph breaks. A text of fixed lengths,
as "document((700, 324), causal=True)" for rows of 1024 tokens, is taken as it is.

A mask of four dimensions is added to the scores as it is. Where it hides keys from all queries and the pattern would
count them as positions, it raises: give the padding as (B, Sk) instead. Learned sinks (`s_aux`, as gpt-oss has them)
are attention's `sinks`. Key blocks may be chosen in each call by a function, see `use_blocks`.
Scores are not stored, so that `output_attentions=True` raises.

Models that `fw.sparsify` changed keep their structure in `save_pretrained` and `from_pretrained`. A program that loads
one imports this module first: without it transformers warns, and the sparse layers are dense and random.
"""

import functools
import itertools
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fretwork._checks import needs
from fretwork._torch.arguments import check_tensor
from fretwork.attention import attention
from fretwork.block_lists import BlockLists
from fretwork.compat._packed_positions import look_at_positions, starts_of
from fretwork.dynamic_attention import varlen_attention
from fretwork.patterns import Pattern, diag

with needs("fretwork.compat.transformers", "transformers", "transformers"):
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    from fretwork.compat._structure_in_config import structure_saved

# Options of a call by which a model names the keys that its queries see.
_OWN_KEYS = ("indices", "block_indices", "cache")

ChooseBlocks = Callable[[Tensor, Tensor, int | None], Tensor | BlockLists | None]

# Added to the scores of padding; the smallest number there is would be infinite after another is added.
_UNSEEN = torch.finfo(torch.float32).min / 4
_HIDES = -1e4  # what a mask adds to the scores of keys that it hides is this or less


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


def _given(module: torch.nn.Module) -> str | None:
    """The text that the configuration has for this layer."""
    config = getattr(module, "config", None)
    given = getattr(config, "fretwork_pattern", None)
    if given is None:
        return None
    _remember(config)
    if isinstance(given, (list, tuple)):
        given = _of_layer(given, config, getattr(module, "layer_idx", None))
    return str(given)


def _own(module: torch.nn.Module, causal: bool, window: int | None) -> str:
    """The text of the attention that a model has by itself."""
    if window is None:
        return "causal({seq})" if causal else "full({seq})"
    if causal:
        return f"sliding_window({{seq}}, {window - 1}, 0)"
    reach = getattr(getattr(module, "config", None), "sliding_window", None)  # which modules may count with themselves
    reach = window - 1 if reach is None else reach
    return f"sliding_window({{seq}}, {reach}, {reach})"


def _is_own(mask_function: Callable[..., Any], config: Any, by_functions: bool) -> bool:
    """Whether a model's mask is causal, full or a window, of documents too. `by_functions`: it has others besides.

    transformers makes it of functions: chunks are a conjunction, as windows are, and blocks that see themselves in both
    directions are added last, in a disjunction. A callable without a name is a model's own.
    """
    kind = getattr(mask_function, "__name__", None)
    chunks = kind == "and_mask" and getattr(config, "attention_chunk_size", None) is not None
    return not by_functions and kind not in (None, "or_mask") and not chunks


# A row's padding: how many keys at its beginning and at its end, and whether others are left out between them.
_Ends = tuple[int, int, bool]


def _read_ends(mask: Tensor) -> list[_Ends]:
    """The padding of each row of a mask (B, Sk), in one copy from the device."""
    seen, cols = mask.bool().cumsum(1), mask.shape[1]
    count = seen[:, -1]
    left = (seen == 0).sum(1)
    right = (seen == count[:, None]).sum(1) - 1
    return [
        (first, last if total else 0, total > 0 and first + last + total != cols)
        for first, last, total in torch.stack([left, right, count], 1).tolist()
    ]


def _ends(mask: Tensor) -> list[_Ends]:
    """The same, read once for all layers where `padding_mask` made the mask."""
    known: list[_Ends] | None = getattr(mask, "_fretwork_ends", None)
    return _read_ends(mask) if known is None else known


# Masks up to this many elements are compared; beyond, groups of rows cost less than the comparison.
_LARGEST_COMPARED = 2**20


def _real_queries(rows: int, cols: int, left: int, right: int) -> slice:
    """Which queries are no padding; they stand at the last `rows` of `cols` positions."""
    first = max(left - (cols - rows), 0)
    return slice(first, max(rows - right, first))


@functools.lru_cache(maxsize=4096)
def _same_without(template: str, rows: int, cols: int, left: int, right: int) -> bool:
    """Whether the pattern of the whole row, cut to what is no padding, is known to be the pattern of the row alone."""
    if left == right == 0 or "{seq}" not in template:
        return True
    if rows * cols > _LARGEST_COMPARED:
        return False
    queries = _real_queries(rows, cols, left, right)
    whole = _pattern(template, rows, cols).numpy_mask()[queries, left : cols - right]
    return 0 in whole.shape or np.array_equal(whole, _pattern(template, *whole.shape).numpy_mask())


@functools.lru_cache(maxsize=4096)
def _cut(template: str, rows: int, cols: int, left: int, right: int) -> tuple[int, int]:
    """What to cut off. Nothing on the right where no such pattern is so short (a global token beyond its end)."""
    queries = _real_queries(rows, cols, left, right)
    try:
        if right and left + right < cols:
            _pattern(template, queries.stop - queries.start, cols - left - right)
    except ValueError:
        return left, 0
    return left, right


def _is(template: str, rows: int, cols: int, *texts: str) -> bool:
    return any(_pattern(template, rows, cols) == _pattern(text, rows, cols) for text in texts)


def _groups(
    module: torch.nn.Module, causal: bool, template: str, rows: int, cols: int, ends: list[_Ends]
) -> list[tuple[int, int]]:
    """The padding of each row if rows are to be computed by themselves, or nothing if one call serves them all."""
    if _is(template, rows, cols, "full({seq})"):
        return []
    if getattr(module, "is_cross_attention", False) or (getattr(module, "is_decoder", False) and not causal):
        raise NotImplementedError(
            f"attention: fretwork_pattern: expected 'full({{seq}})' where the keys are another sequence with padding, "
            f"got {template!r}"
        )
    if any(holes for _, _, holes in ends) and not _is(template, rows, cols, "causal({seq})"):
        raise ValueError(
            "attention: attention_mask: expected padding at the ends of a row, got keys left out inside one, which "
            f"{template!r} would count as positions; pad on the left to generate, or give what is added to the scores, "
            "(B, 1, Sq, Sk)"
        )
    if "{seq}" not in template and any(left for left, _, _ in ends):
        raise ValueError(f"attention: fretwork_pattern: expected {{seq}} in a text for left padding, got {template!r}")
    cuts = {(left, right): _cut(template, rows, cols, left, right) for left, right, _ in ends}
    if all(_same_without(template, rows, cols, *cut) for cut in cuts.values()):
        return []
    return [cuts[left, right] for left, right, _ in ends]


def _check_whole(module: torch.nn.Module, causal: bool, template: str, rows: int, mask: Tensor) -> None:
    """Raises where a mask (B, 1 or H, Sq, Sk) hides keys from all queries that the pattern counts as positions."""
    if (ends := getattr(mask, "_fretwork_ends", None)) is None:
        seen = mask if mask.dtype == torch.bool else mask > _HIDES
        ends = mask._fretwork_ends = _read_ends(seen.flatten(1, -2).any(1))  # type: ignore[attr-defined]
    padded = any(left or right or holes for left, right, holes in ends)
    if padded and _groups(module, causal, template, rows, mask.shape[-1], ends):
        raise ValueError(
            "attention: attention_mask: expected padding as (B, Sk) where a pattern depends on positions, got "
            f"{tuple(mask.shape)} with keys that no query sees, which {template!r} would count"
        )


def _seen(mask: Tensor) -> Tensor:
    """A bias that hides padding, of a mask (B, Sk) or one that broadcasts to (B, H, Sq, Sk)."""
    mask = mask[:, None, None] if mask.dim() == 2 else mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask.bool(), _UNSEEN)


def _sum(bias: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if bias is None else bias if other is None else bias + other


def use_blocks(model: torch.nn.Module, choose: ChooseBlocks | None, block: int | tuple[int, int] = 64) -> None:
    """Lets a function choose the key blocks of every attention layer of a model, in each call; None takes it away.

    `choose(q, k, layer)` gets the queries (B, Hq, Sq, D) and keys (B, Hk, Sk, D) of a layer and its number, and returns
    a bool mask (B|1, Hq|Hk|1, ⌈Sq/bq⌉, ⌈Sk/bk⌉) or `fw.BlockLists`, as for `fw.attention(blocks=)`, or None for all
    keys. The layer's own pattern stays: causal, a window, or one of the configuration whose rows are intervals. With
    a cache the queries are the last of the keys; a static cache is refused. The function is not saved with the model.

    >>> import torch, fretwork as fw, fretwork.compat.transformers as ft
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    >>> model = LlamaForCausalLM._from_config(LlamaConfig(**sizes), attn_implementation="fretwork")
    >>> ft.use_blocks(model, lambda q, k, layer: fw.select_blocks(q, k, top_k=2 + layer, block=16), block=16)
    >>> model(torch.arange(60)[None]).logits.shape
    torch.Size([1, 60, 64])
    """
    if choose is not None and not callable(choose):
        raise TypeError(f"use_blocks: choose: expected a function or None, got {type(choose).__name__}")
    for module in model.modules():
        if choose is not None:
            module._fretwork_blocks = (choose, block)  # type: ignore[assignment]
        elif hasattr(module, "_fretwork_blocks"):
            del module._fretwork_blocks


def _attend(module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, pattern: Any, **options: Any) -> Tensor:
    """Attention with the layer's chosen blocks, if there are any."""
    if (chosen := getattr(module, "_fretwork_blocks", None)) is not None:
        choose, block = chosen
        if (blocks := choose(q, k, getattr(module, "layer_idx", None))) is not None:
            options |= {"blocks": blocks, "block": block}
    return attention(q, k, v, pattern, **options)


def _by_groups(
    module: torch.nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    template: str,
    mask: Tensor,
    cuts: list[tuple[int, int]],
    position_bias: Tensor | None,
    **options: Any,
) -> Tensor:
    """Each group of rows of equal padding without it; zeros for queries that are padding."""
    rows, cols = q.shape[2], k.shape[2]
    o = q.new_zeros(*q.shape[:3], v.shape[3])
    for left, right in sorted(set(cuts)):
        queries, keys = _real_queries(rows, cols, left, right), slice(left, cols - right)
        if queries.start == queries.stop or left == cols:
            continue
        members = [n for n, cut in enumerate(cuts) if cut == (left, right)]
        at = torch.tensor(members, device=q.device)
        hidden = any(_ends(mask)[n][:2] != (left, right) for n in members)
        bias = _seen(mask[at, keys]) if hidden else None
        if position_bias is not None:
            bias = _sum(bias, position_bias.expand(len(cuts), *q.shape[1:3], cols)[at][:, :, queries, keys])
        own = _pattern(template, queries.stop - queries.start, cols - left - right)
        part = _attend(module, q[at, :, queries], k[at, :, keys], v[at, :, keys], own, bias=bias, **options)
        o = o.to(part.dtype)  # another one under autocast
        o[at, :, queries] = part
    return o


# Packed sequences


_VARLEN = re.compile(r"\s*(?:causal\(\{seq\}\)|full\(\{seq\}\)|sliding_window\(\{seq\}, *(\d+), *(\d+)\))\s*")


@torch.compiler.disable  # what it reads decides which kernels run
def _document_patterns(template: str, starts: Tensor, batch: int, rows: int) -> Pattern | list[list[Pattern]]:
    """A pattern of the documents' own ones for each row, from lengths that are read here."""
    ends = starts.tolist()
    if ends[0] != 0 or ends[-1] != batch * rows or not {n * rows for n in range(batch)} <= {*ends}:
        raise ValueError(
            f"attention: cu_seq_lens_q: expected documents from 0 to {batch * rows}, none in two rows, for a pattern "
            f"as {template!r}, got {ends}"
        )
    found: list[list[Pattern]] = [[] for _ in range(batch)]
    for begin, end in itertools.pairwise(ends):
        if end > begin:
            found[begin // rows].append(_pattern(template, end - begin, end - begin))
    patterns = [diag(row) for row in found]
    return patterns[0] if len(set(patterns)) == 1 else [[pattern] for pattern in patterns]


def _by_documents(
    module: torch.nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    template: str,
    starts: tuple[Tensor, Tensor | None],
    longest: tuple[Any, Any],
    bias: Tensor | None,
    **options: Any,
) -> Tensor:
    """Documents side by side, in one row or several; the result is (B, S, H, D)."""
    batch, rows = q.shape[0], q.shape[2]
    known = _VARLEN.fullmatch(template)
    plain = bias is None and not options["softcap"] and not options["dropout_p"]
    if known and plain and getattr(module, "_fretwork_blocks", None) is None:
        packed_q, packed_k, packed_v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        max_q, max_k = (n if isinstance(n, int) else None for n in longest)
        left, right = (None if n is None else int(n) for n in known.groups())
        bounds: dict[str, Any] = dict(max_q=max_q, max_k=max_k, window=(left, right), causal="causal" in template)
        bounds |= dict(scale=options["scale"], sinks=options["sinks"])
        o: Tensor = varlen_attention(packed_q, packed_k, packed_v, *starts, **bounds)
        return o.unflatten(0, (batch, rows))
    if "{seq}" not in template:
        raise ValueError(f"attention: fretwork_pattern: expected {{seq}} in a text for cu_seq_lens_q, got {template!r}")
    if starts[1] is not None and starts[1] is not starts[0] and not torch.equal(starts[0], starts[1]):
        raise NotImplementedError(
            "attention: cu_seq_lens_k: expected cu_seq_lens_q but for causal attention, full attention and windows "
            "without softcap, dropout, position bias and blocks, got others"
        )
    patterns = _document_patterns(template, starts[0], batch, rows)
    return _attend(module, q, k, v, patterns, bias=bias, **options).transpose(1, 2)


def _packed(
    module: torch.nn.Module, q: Tensor, k: Tensor, template: str, mask: Tensor | None, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor | None] | None:
    """Where the documents of queries and keys begin, if sequences are packed."""
    cu_q, cu_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if cu_q is not None:
        if mask is not None:
            raise ValueError("attention: attention_mask: expected none with cu_seq_lens_q, got one")
        return cu_q, None if cu_k is cu_q else cu_k
    other = mask is not None or "{seq}" not in template or getattr(module, "is_cross_attention", False)
    if other or q.shape[2] != k.shape[2] or q.shape[2] < 2:
        return None
    starts = starts_of(kwargs.get("position_ids"), q.shape[0], q.shape[2])
    return None if starts is None else (starts, None)


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
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What a model calls: q, k, v are (B, H, S, D), the result is (B, S, H, D). `attention_mask` is (B, Sk), 0 or False
    where a key is padding, or something to add to the scores, (B, 1 or H, Sq, Sk). Where it is shorter than the keys,
    those behind it are a static cache's room. `position_bias` broadcasts to (B, H, Sq, Sk) and is added, too."""
    check_tensor("attention", "q", query)
    for name in _OWN_KEYS:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"attention: {name}: expected None, got a {type(kwargs[name]).__name__}; load the model with "
                'attn_implementation="eager" to let it choose its keys'
            )
    if kwargs.get("output_attentions"):
        raise NotImplementedError(
            "attention: output_attentions: expected False, got True; scores are not stored: load the model with "
            'attn_implementation="eager" to see them'
        )
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    given = _given(module)
    template = _own(module, causal, sliding_window) if given is None else given
    if s_aux is not None and s_aux.dtype != torch.float32:
        s_aux = s_aux.to(query.dtype)
    options: dict[str, Any] = dict(scale=scaling, softcap=softcap or 0.0, dropout_p=dropout, sinks=s_aux)
    if (starts := _packed(module, query, key, template, attention_mask, kwargs)) is not None:
        longest = (kwargs.get("max_length_q"), kwargs.get("max_length_k"))
        o = _by_documents(module, query, key, value, template, starts, longest, position_bias, **options)
        return o.contiguous(), None
    if given is not None and attention_mask is not None and attention_mask.dim() == 2:
        key, value = (x[:, :, : attention_mask.shape[1]] for x in (key, value))
    rows, cols, bias = query.shape[2], key.shape[2], attention_mask
    if attention_mask is not None and attention_mask.dim() == 2:
        ends = None if given is None else _ends(attention_mask)
        if ends is not None and (cuts := _groups(module, causal, template, rows, attention_mask.shape[1], ends)):
            o = _by_groups(module, query, key, value, template, attention_mask, cuts, position_bias, **options)
            return o.transpose(1, 2).contiguous(), None
        bias = None if ends is not None and not any(map(any, ends)) else _seen(attention_mask)
    elif attention_mask is not None:
        template = _of_whole_mask(module, causal, template, given is not None, rows, cols, attention_mask)
        bias = attention_mask[..., :cols]
        bias = _seen(bias) if bias.dtype == torch.bool else bias
    bias = bias if position_bias is None else _sum(bias, position_bias[..., :cols])
    compiling = torch.compiler.is_compiling()  # then one graph is for all lengths
    pattern = (lambda *lengths: _pattern(template, *lengths)) if compiling else _pattern(template, rows, cols)
    o = _attend(module, query, key, value, pattern, bias=bias, **options)
    return o.transpose(1, 2).contiguous(), None


def _of_whole_mask(
    module: torch.nn.Module, causal: bool, template: str, given: bool, rows: int, cols: int, mask: Tensor
) -> str:
    """The pattern beside a mask (B, 1 or H, Sq, Sk). With a cache the mask says all that a model has by itself, of
    which only the device knows the position in a static one. Masks of `_whole_mask` always do."""
    if given:
        _check_whole(module, causal, template, rows, mask)
        return template
    if rows == cols and not hasattr(mask, "_fretwork_says_all"):
        return template
    if rows != cols and getattr(module, "_fretwork_blocks", None) is not None:
        raise NotImplementedError(
            "attention: past_key_values: expected a cache that grows for use_blocks, got a static one or a mask "
            f"{tuple(mask.shape)}; use DynamicCache"
        )
    return "full({seq})"


def _check_dropped(config: Any, ends: list[_Ends], rows: int, kept: int, dropped: int) -> None:
    """A cache of the last `kept` keys serves patterns that need no other key and no position."""
    given = getattr(config, "fretwork_pattern", None) or []
    kinds = getattr(config, "layer_types", None)
    if isinstance(given, (list, tuple)) and kinds and len(kinds) == len(given):
        given = [text for text, kind in zip(given, kinds, strict=True) if kind != "full_attention"]
    for template in {given} if isinstance(given, str) else set(given):
        for left in {left for left, _, _ in ends if left < dropped + kept} or {0}:
            cut, cols = max(dropped - left, 0), dropped + kept - left
            fits = rows * cols <= _LARGEST_COMPARED
            if fits:
                whole = _pattern(template, rows, cols).numpy_mask()
                fits = not whole[:, :cut].any() and _same_without(template, rows, cols, cut, 0)
            if not fits:
                raise NotImplementedError(
                    f"attention: past_key_values: expected a cache of all keys for fretwork_pattern {template!r}, got "
                    f"one that keeps the last {kept}; give past_key_values=DynamicCache()"
                )


def padding_mask(
    *args: Any,
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """What a model makes of its attention mask: the padding alone, or None where there is none; with a static cache,
    and for attention that is no causal, full or window one, a whole mask; with a static cache and a pattern one as long
    as the keys that are there."""
    by_functions = kwargs.get("use_vmap", False)
    if getattr(config, "fretwork_pattern", None) is None and not _is_own(mask_function, config, by_functions):
        sizes = dict(q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset)
        return _whole_mask(*args, **sizes, mask_function=mask_function, attention_mask=attention_mask, **kwargs)
    own_keys = q_offset or "allow_is_bidirectional_skip" not in kwargs  # else they may be another sequence's
    if isinstance(q_offset, Tensor) or (own_keys and q_offset + q_length != kv_offset + kv_length):
        sizes = dict(q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset)
        mask_options = dict(mask_function=mask_function, attention_mask=attention_mask, config=config)
        return _static_mask(*args, **sizes, **mask_options, **kwargs)
    if kv_offset:
        ends = [] if attention_mask is None else _read_ends(attention_mask)
        _check_dropped(config, ends, q_length, kv_length, kv_offset)
    if attention_mask is None:
        return None
    mask = attention_mask[:, -kv_length:]  # a tensor of its own, also where it is the whole
    ends = mask._fretwork_ends = _read_ends(mask)  # type: ignore[attr-defined]
    return mask if any(left or right or holes for left, right, holes in ends) else None


def _whole_mask(*args: Any, **kwargs: Any) -> Tensor:
    """All that a model has by itself, as transformers makes it."""
    mask: Tensor = sdpa_mask(*args, **kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    mask._fretwork_says_all = True  # type: ignore[attr-defined]
    return mask


def _static_mask(*args: Any, attention_mask: Tensor | None, config: Any, **kwargs: Any) -> Tensor:
    """Of a cache with room behind its keys."""
    if (given := getattr(config, "fretwork_pattern", None)) is None:
        return _whole_mask(*args, attention_mask=attention_mask, **kwargs)
    if getattr(config, "sliding_window", None) is not None and "sliding_attention" in (
        getattr(config, "layer_types", None) or ["sliding_attention"]
    ):
        raise NotImplementedError(
            "attention: past_key_values: expected a cache of all keys with fretwork_pattern "
            f"{given!r}, got a static one with a sliding window; use DynamicCache"
        )
    length = int(kwargs["q_offset"]) + kwargs["q_length"]  # a pattern's positions are the host's
    if attention_mask is None:
        batch = args[0] if args else kwargs["batch_size"]
        mask = torch.ones(batch, length, dtype=torch.bool, device=kwargs.get("device", "cpu"))
    else:
        mask = attention_mask[:, :length]
    mask._fretwork_ends = _read_ends(mask)  # type: ignore[attr-defined]
    return mask


def _remember(config: Any) -> None:
    """Saved with the pattern: a program that does not import this module then raises instead of leaving it out."""
    if getattr(config, "attn_implementation", None) != "fretwork":
        config.attn_implementation = "fretwork"


_chosen, _save = PreTrainedModel.get_correct_attn_implementation, PreTrainedModel.save_pretrained


def _check_model(model: PreTrainedModel, has_pattern: bool) -> None:
    """Raises for a model whose attention cannot be chosen, if it would read our masks or leave a pattern out."""
    kinds = [kind for kind in type(model).__mro__ if issubclass(kind, PreTrainedModel) and kind is not PreTrainedModel]
    names = {name for kind in kinds for name in vars(sys.modules[kind.__module__])}
    if model._supports_attention_backend or "ALL_ATTENTION_FUNCTIONS" in names:
        return
    makes_masks = any(re.fullmatch(r"create_(?!recurrent)\w*mask\w*", name) for name in names)
    if makes_masks or (has_pattern and not model.config.sub_configs):  # whose models are asked, too
        raise NotImplementedError(
            "attention: attn_implementation: expected a model whose attention can be chosen, got "
            f"{type(model).__name__}, which computes its own; "
            'load it with attn_implementation="eager" and without a fretwork_pattern'
        )


@functools.wraps(_chosen)
def _with_pattern(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> Any:
    """transformers' choice of an attention, with ours for a configuration that has a pattern and names none."""
    has_pattern = getattr(self.config, "fretwork_pattern", None) is not None
    chosen = _chosen(self, requested_attention or ("fretwork" if has_pattern else None), *args, **kwargs)
    if chosen != "fretwork":
        vars(self.config).pop("attn_implementation", None)
    else:
        _check_model(self, has_pattern)
        look_at_positions(type(self))
        if has_pattern:
            _remember(self.config)
    return chosen


@functools.wraps(_save)
def _save_with_name(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A pattern that was given after the attention was chosen is saved with its name, too, and so is the structure."""
    chosen = getattr(self.config, "_attn_implementation", None) == "fretwork"
    if chosen and getattr(self.config, "fretwork_pattern", None) is not None:
        _remember(self.config)
    with structure_saved(self):
        return _save(self, *args, **kwargs)


AttentionInterface.register("fretwork", attention_forward)
AttentionMaskInterface.register("fretwork", padding_mask)
PreTrainedModel.get_correct_attn_implementation = _with_pattern
PreTrainedModel.save_pretrained = _save_with_name
