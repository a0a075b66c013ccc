"""The regular patterns by name, as `fretwork.patterns` has them. Only `from_block_mask` needs torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from fretwork._checks import whole_number, zeros_and_ones
from fretwork._library import core
from fretwork.patterns.block import BlockLayout
from fretwork.patterns.kronecker import KroneckerPattern
from fretwork.patterns.pattern import Pattern, diagonal, from_handle, parsed, placed, prefixed

if TYPE_CHECKING:
    import torch
    from torch.nn.attention.flex_attention import BlockMask

    from fretwork.patterns.block import Mask

    Array = torch.Tensor | np.ndarray | Iterable[int]

Seq = int | tuple[int, int]
PerAxis = int | tuple[int, ...]


def full(seq: Seq, *, offset: int | None = None) -> Pattern:
    """Every key.

    >>> full(33) == full((33, 33)), full((2, 3)).nnz
    (True, 6)
    """
    return _made("full", seq=_seq("full", seq), offset=offset)


def causal(seq: Seq, *, offset: int | None = None) -> Pattern:
    """Keys j ≤ p.

    >>> causal((2, 4)).mask().int().tolist()
    [[1, 1, 1, 0], [1, 1, 1, 1]]
    """
    return _made("causal", seq=_seq("causal", seq), offset=offset)


def sliding_window(seq: Seq, left: int | None, right: int | None, *, offset: int | None = None) -> Pattern:
    """Keys with −left ≤ j − p ≤ right; None is unlimited.

    >>> sliding_window(4, 1, 0).mask().int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """
    return _made("sliding_window", seq=_seq("sliding_window", seq), left=left, right=right, offset=offset)


def dilated(seq: Seq, window: int, dilation: int, causal: bool = False, *, offset: int | None = None) -> Pattern:
    """Keys with |p − j| ≤ window·dilation that are a multiple of `dilation` away (and j ≤ p).

    >>> dilated(5, 1, 2, causal=True).mask().int().tolist()[3:]
    [[0, 1, 0, 1, 0], [0, 0, 1, 0, 1]]
    """
    op = "dilated"
    numbers = {"window": window, "dilation": dilation}
    return _made(op, seq=_seq(op, seq), **numbers, causal=_flag(op, causal), offset=offset)


def strided(seq: Seq, stride: int, *, offset: int | None = None) -> Pattern:
    """Keys j ≤ p that are less than `stride` away, or a multiple of it (Child et al.).

    >>> strided(6, 2).mask().int().tolist()[5]
    [0, 1, 0, 1, 1, 1]
    """
    return _made("strided", seq=_seq("strided", seq), stride=stride, offset=offset)


def fixed(seq: Seq, stride: int, summary: int, *, offset: int | None = None) -> Pattern:
    """Keys j ≤ p of the same block of `stride`, or among the last `summary` of theirs (Child et al.).

    >>> fixed(6, 3, 1).mask().int().tolist()[4]
    [0, 0, 1, 1, 1, 0]
    """
    return _made("fixed", seq=_seq("fixed", seq), stride=stride, summary=summary, offset=offset)


def longformer(seq: Seq, window: int, globals: Array, *, offset: int | None = None) -> Pattern:
    """Keys with |p − j| ≤ window; and global positions see all and are seen by all.

    >>> longformer(5, 0, [1]).mask().int().tolist()[2:4]
    [[0, 1, 1, 0, 0], [0, 1, 0, 1, 0]]
    """
    return _made(
        "longformer",
        seq=_seq("longformer", seq),
        window=window,
        globals=_list("longformer", "globals", globals),
        offset=offset,
    )


def bigbird(
    seq: Seq, block: int, window: int, globals: int, random: int, seed: int = 0, *, offset: int | None = None
) -> Pattern:
    """On blocks P of queries and J of keys: |P − J| ≤ window, or P < globals, or J < globals, or drawn at random.

    For each P, `random` blocks are drawn without replacement among those not otherwise allowed; fewer if there are
    fewer. The same seed draws the same blocks everywhere.

    >>> bigbird(256, 16, 1, 1, 2).density
    0.40625
    """
    numbers = {"block": block, "window": window, "globals": globals, "random": random, "seed": seed}
    return _made("bigbird", seq=_seq("bigbird", seq), **numbers, offset=offset)


def block_local(seq: Seq, block: int, previous: int = 0, *, offset: int | None = None) -> Pattern:
    """Keys of the same block, or of one of the `previous` before it.

    >>> block_local(8, 2, previous=1).mask().int().tolist()[4]
    [0, 0, 1, 1, 1, 1, 0, 0]
    """
    return _made("block_local", seq=_seq("block_local", seq), block=block, previous=previous, offset=offset)


def block_causal(seq: Seq, block: int, *, offset: int | None = None) -> Pattern:
    """Keys of the same block, or of any block before it: ⌊j/block⌋ ≤ ⌊p/block⌋.

    >>> block_causal(6, 2).mask().int().tolist()[2]
    [1, 1, 1, 1, 0, 0]
    """
    return _made("block_causal", seq=_seq("block_causal", seq), block=block, offset=offset)


def swin(height: int, width: int, window: PerAxis, shift: PerAxis = 0) -> Pattern:
    """Grid positions in the same window after a cyclic shift by −shift, and on the same side of the wrap.

    >>> swin(8, 8, 4, shift=2).nnz
    576
    """
    return _made(
        "swin",
        height=height,
        width=width,
        window=_per_axis("swin", "window", window, 2),
        shift=_per_axis("swin", "shift", shift, 2),
    )


def axial(height: int, width: int) -> Pattern:
    """Grid positions of the same row or the same column.

    >>> axial(2, 3).mask().int().tolist()[0]
    [1, 1, 1, 1, 0, 0]
    """
    return _made("axial", height=height, width=width)


def neighborhood(
    shape: PerAxis,
    window: PerAxis,
    dilation: PerAxis = 1,
    causal: bool | tuple[bool, ...] = False,
    stride: PerAxis = 1,
) -> Pattern:
    """Grid positions that are near on every axis of one to three (NATTEN).

    On each axis: the `window` positions of p's residue class modulo `dilation` around p, shifted to stay inside (an
    even window has its extra one on the left); on a causal axis those that end at p, cut at the border. With a `stride`
    the positions of a class form groups, and a group shares the window of its middle position, index g·stride + stride
    // 2 or the last one; on a causal axis that of its last position, as far as p.

    >>> neighborhood((6,), 3).mask().int().tolist()[:2]
    [[1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0]]
    >>> neighborhood((6,), 3, stride=2).mask().int().tolist()[2:4]
    [[0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 1, 0]]
    """
    op, lengths = "neighborhood", _grid("neighborhood", shape)
    flags = tuple(_flag(op, x) for x in causal) if isinstance(causal, (tuple, list)) else _flag(op, causal)
    return _made(
        op,
        shape=lengths,
        window=_per_axis(op, "window", window, len(lengths)),
        dilation=_per_axis(op, "dilation", dilation, len(lengths)),
        causal=_as_many(op, "causal", flags, len(lengths)),
        stride=_per_axis(op, "stride", stride, len(lengths)),
    )


def sliding_tile(shape: PerAxis, tile: PerAxis, window: PerAxis) -> Pattern:
    """A neighbourhood of `window` tiles, on tile coordinates; tiles that do not divide the grid are cut at its end.

    >>> sliding_tile((8, 8), 4, 1).density
    0.25
    """
    op, lengths = "sliding_tile", _grid("sliding_tile", shape)
    return _made(
        op,
        shape=lengths,
        tile=_per_axis(op, "tile", tile, len(lengths)),
        window=_per_axis(op, "window", window, len(lengths)),
    )


def longnet(seq: Seq, segments: Array, rates: Array, head: int = 0, *, offset: int | None = None) -> Pattern:
    """For some (w, r) of segments and rates: the same segment of w, and p ≡ j ≡ head (mod r).

    >>> longnet(8, [2, 8], [1, 4]).mask().int().tolist()[4]
    [1, 0, 0, 0, 1, 1, 0, 0]
    """
    op = "longnet"
    lists = {"segments": _list(op, "segments", segments), "rates": _list(op, "rates", rates)}
    return _made(op, seq=_seq(op, seq), **lists, head=head, offset=offset)


def document(lengths: Array, causal: bool = False) -> Pattern:
    """Keys of the same document (and j ≤ p); the lengths sum to S.

    >>> document([1, 2]).mask().int().tolist()
    [[1, 0, 0], [0, 1, 1], [0, 1, 1]]
    """
    return _made("document", lengths=_list("document", "lengths", lengths), causal=_flag("document", causal))


def tree(parents: Array) -> Pattern:
    """Keys that are p or one of its ancestors: parents[p] < p, −1 for a root (drafts of speculative decoding).

    >>> tree([-1, 0, 0, 1]).mask().int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    """
    return _made("tree", parents=_list("tree", "parents", parents))


def prefix_lm(seq: Seq, prefix: int, *, offset: int | None = None) -> Pattern:
    """Keys j ≤ p, and those of the prefix.

    >>> prefix_lm(3, 2).mask().int().tolist()
    [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """
    return _made("prefix_lm", seq=_seq("prefix_lm", seq), prefix=prefix, offset=offset)


def sinks(seq: Seq, sinks: int, window: int, *, offset: int | None = None) -> Pattern:
    """Keys j ≤ p that are less than `window` away, or among the first `sinks` (StreamingLLM).

    >>> sinks(5, 1, 2).mask().int().tolist()[4]
    [1, 0, 0, 1, 1]
    """
    return _made("sinks", seq=_seq("sinks", seq), sinks=sinks, window=window, offset=offset)


def vertical_slash(seq: Seq, vertical: Array, slash: Array, *, offset: int | None = None) -> Pattern:
    """Keys j ≤ p in `vertical`, or with p − j in `slash` (MInference).

    >>> vertical_slash(5, [1], [0, 2]).mask().int().tolist()[4]
    [0, 1, 1, 0, 1]
    """
    op = "vertical_slash"
    lists = {"vertical": _list(op, "vertical", vertical), "slash": _list(op, "slash", slash)}
    return _made(op, seq=_seq(op, seq), **lists, offset=offset)


def band(seq: Seq, start: int, stride: int, count: int, *, offset: int | None = None) -> Pattern:
    """Keys p + start + t·stride, 0 ≤ t < count, as far as they are inside.

    >>> band(5, -3, 3, 2).mask().int().tolist()[3]
    [1, 0, 0, 1, 0]
    """
    return _made("band", seq=_seq("band", seq), start=start, stride=stride, count=count, offset=offset)


def acsr(start: Array, stride: Array, count: Array, cols: int) -> Pattern:
    """One progression for each row: keys start + t·stride, 0 ≤ t < count, all in [0, cols).

    >>> acsr([3, 0], [2, 1], [2, 1], cols=6).mask().int().tolist()
    [[0, 0, 0, 1, 0, 1], [1, 0, 0, 0, 0, 0]]
    """
    arrays = [_integers("acsr", n, v) for n, v in (("start", start), ("stride", stride), ("count", count))]
    if len({len(array) for array in arrays}) != 1:
        got = ", ".join(str(len(array)) for array in arrays)
        raise ValueError(f"acsr: start, stride and count: expected equal lengths, got {got}")
    pointers = [array.ctypes.data for array in arrays]
    return from_handle(core().fretwork_pattern_from_acsr(*pointers, len(arrays[0]), whole_number("acsr", "cols", cols)))


def from_mask(mask: Mask) -> Pattern:
    """A boolean matrix (Sq, Sk), analysed: bands, rectangles and what is left of it.

    >>> p = from_mask([[1, 0], [1, 1]])
    >>> p.nnz, p == from_mask(p.mask())
    (3, True)
    """
    bits = zeros_and_ones("from_mask", "mask", mask)
    if bits.ndim != 2:
        raise ValueError(f"from_mask: mask: expected (Sq, Sk), got shape {bits.shape}")
    return from_handle(core().fretwork_pattern_from_mask(*bits.shape, bits.ctypes.data))


def from_layout(layout: BlockLayout, head: int = 0) -> Pattern:
    """One head of a block layout.

    >>> import fretwork as fw
    >>> from_layout(fw.BlockLayout([[1, 0], [1, 1]], block=8)).nnz
    192
    """
    if isinstance(layout, KroneckerPattern):
        if whole_number("from_layout", "head", head) != 0:
            raise ValueError(f"from_layout: head: expected 0, as a Kronecker pattern has one, got {head}")
        return parsed(f"from_kronecker({layout.text})")
    if not isinstance(layout, BlockLayout):
        raise TypeError(f"from_layout: layout: expected a BlockLayout, got {type(layout).__name__}")
    return parsed(f"from_layout({layout.text},head={whole_number('from_layout', 'head', head)})")


def from_block_mask(block_mask: BlockMask) -> Pattern | list[Pattern]:
    """What a BlockMask of FlexAttention allows, one pattern, or one for each head where it has several.

    `mask_mod` is asked for the elements of partial blocks; full blocks do not ask it. A batch of more than one is
    refused: make a block mask, and a pattern of it, for each example.

    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> block_mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 300, 300, device="cpu")
    >>> p = from_block_mask(block_mask)
    >>> p.shape, p.nnz == causal(300).nnz
    ((300, 300), True)
    """
    from fretwork.patterns import block_mask as flex

    (rows, cols), heads = flex.runs("from_block_mask", block_mask)
    made = [from_handle(core().fretwork_pattern_from_runs(rows, cols, runs.ctypes.data, len(runs))) for runs in heads]
    return made[0] if len(made) == 1 else made


def place(pattern: Pattern, shape: tuple[int, int], at: tuple[int, int] = (0, 0)) -> Pattern:
    """An otherwise empty pattern of `shape` with the top left corner of `pattern` at `at`.

    >>> place(causal(2), (3, 4), at=(1, 2)).mask().int().tolist()
    [[0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    """
    sizes, corner = _pair("place", "shape", shape), _pair("place", "at", at)
    return placed(_given("place", "pattern", pattern).text, *sizes, *corner)


def diag(patterns: Iterable[Pattern]) -> Pattern:
    """Patterns along the diagonal, each beginning where the one before it ends; nothing elsewhere.

    >>> diag([causal(2), full((1, 2))]).mask().int().tolist()
    [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1]]
    """
    if isinstance(patterns, Pattern) or not isinstance(patterns, Iterable):
        raise TypeError(f"diag: patterns: expected a sequence of patterns, got {type(patterns).__name__}")
    return diagonal(*[_given("diag", f"patterns[{n}]", pattern).text for n, pattern in enumerate(patterns)])


def with_prefix(pattern: Pattern, n: int) -> Pattern:
    """A square pattern with `n` tokens in front that see all and are seen by all, such as a ViT's class token.

    >>> with_prefix(neighborhood((2, 2), 1), 1).mask().int().tolist()
    [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 0, 1]]
    """
    return prefixed(_given("with_prefix", "pattern", pattern).text, whole_number("with_prefix", "n", n))


def _made(op: str, **arguments: Any) -> Pattern:
    """The pattern of a call: its text, which the core parses, checks and makes canonical."""
    return parsed(f"{op}({','.join(f'{name}={_word(op, name, value)}' for name, value in arguments.items())})")


def _word(op: str, name: str, value: Any) -> str:
    if (value is None and name in ("left", "right", "offset")) or (isinstance(value, bool) and name == "causal"):
        return str(value)
    if isinstance(value, tuple):
        return f"({','.join(map(str, value))},)" if value else "()"
    return str(whole_number(op, name, value))


def _given(op: str, argument: str, pattern: Any) -> Pattern:
    if not isinstance(pattern, Pattern):
        raise TypeError(f"{op}: {argument}: expected a pattern, got {type(pattern).__name__}")
    return pattern


def _pair(op: str, name: str, value: Any) -> tuple[int, int]:
    numbers = _list(op, name, value)
    if len(numbers) != 2:
        raise ValueError(f"{op}: {name}: expected two numbers, got {len(numbers)}")
    return numbers[0], numbers[1]


def _flag(op: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{op}: causal: expected True or False, got {value!r}")
    return bool(value)


def _seq(op: str, seq: Any) -> int | tuple[int, ...]:
    if isinstance(seq, (tuple, list)) and len(seq) != 2:
        raise ValueError(f"{op}: seq: expected S or (Sq, Sk), got {len(seq)} numbers")
    return _per_axis(op, "seq", seq, 2)


def _grid(op: str, shape: Any) -> tuple[int, ...]:
    return _list(op, "shape", shape if isinstance(shape, (tuple, list)) else (shape,))


def _per_axis(op: str, name: str, value: Any, axes: int) -> int | tuple[int, ...]:
    if not isinstance(value, (tuple, list)):
        return whole_number(op, name, value)
    return _as_many(op, name, _list(op, name, value), axes)


def _as_many(op: str, name: str, value: Any, axes: int) -> Any:
    if isinstance(value, tuple) and len(value) != axes:
        raise ValueError(f"{op}: {name}: expected one number, or {axes} as there are axes, got {len(value)}")
    return value


def _list(op: str, name: str, values: Any) -> tuple[int, ...]:
    if isinstance(values, (tuple, list)):  # without NumPy, so that torch.compile can follow
        return tuple(whole_number(op, name, value) for value in values)
    return tuple(_integers(op, name, values).tolist())


def _integers(op: str, name: str, values: Any) -> np.ndarray:
    """A contiguous int64 vector from a tensor on any device, an array or any sequence of ints."""
    if hasattr(values, "detach"):  # a torch tensor; NumPy cannot read one that lives on a GPU
        values = values.detach().cpu()
    elif not hasattr(values, "__array__"):
        if not isinstance(values, Iterable) or isinstance(values, (str, bytes)):
            raise TypeError(f"{op}: {name}: expected a sequence of ints, got {values!r}")
        values = [whole_number(op, name, value) for value in values]
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{op}: {name}: expected one axis, got shape {array.shape}")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{op}: {name}: expected integers, got {array.dtype}")
    if array.dtype.kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise ValueError(f"{op}: {name}: expected numbers within 64 bits, got {array.max()}")
    return np.ascontiguousarray(array, dtype=np.int64)
