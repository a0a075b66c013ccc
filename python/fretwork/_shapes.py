"""What the ops accept and the shapes of their results, from shapes and names of dtypes alone.

These are the core's own rules, for tracers, where no core runs; torch's fakes and the JAX functions share them.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fretwork._checks import fail, refuse, whole_number
from fretwork.patterns import BlockLayout, Pattern, full
from fretwork.patterns.pattern import row_width

Shape = Sequence[int]

_FLOATING = ("float64", "float32", "float16", "bfloat16")
_LARGEST = {"float32": (2 - 2**-23) * 2.0**127, "float16": 65504.0, "bfloat16": (2 - 2**-7) * 2.0**127}


class Operand(NamedTuple):
    """A tensor as a check sees it; the device only where it is known."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str = ""


def size(shape: Shape, d: int) -> int:
    """The size of dimension `d`, counted from the end; 1 where it is missing."""
    return shape[d] if len(shape) >= -d else 1


def both(m: int, n: int) -> int:
    """What two sizes broadcast to."""
    return n if m == 1 else m


def packed_shape(layout: BlockLayout) -> tuple[int, int, int]:
    return layout.nnz, *layout.block_shape


def check_floating(op: str, x: Operand) -> None:
    if x.dtype not in _FLOATING:
        fail(op, x.name, "float64, float32, float16 or bfloat16", x.dtype)


def _check_packed(op: str, x: Operand, layout: BlockLayout) -> None:
    shape = packed_shape(layout)
    if len(x.shape) not in (3, 4) or x.shape[-3:] != shape:
        fail(op, x.name, f"packed blocks {shape} or (Z, {str(shape)[1:]}", x.shape)


def _check_device(op: str, x: Operand, like: Operand) -> None:
    if x.device != like.device:
        fail(op, x.name, f"a tensor on {like.device} like {like.name}", f"one on {x.device}")


# The three products, y = op(a)·op(b). The op's name says which of them is packed.


def heads(op: str, a: Shape, b: Shape, layout: BlockLayout) -> int:
    """Of the product, before any sum."""
    if layout.heads != 1:
        return layout.heads
    return both(size(a, -3), size(b, -3)) if op == "sdd" else size(b if op == "dsd" else a, -3)


def product_shape(
    op: str, a: Shape, b: Shape, layout: BlockLayout, trans_a: bool, trans_b: bool, sum_z: bool, sum_h: bool
) -> list[int]:
    """Z if an operand has it; H unless nothing has Z, the dense operand is 2-D and the layout has one head."""
    z = [1 if sum_z else both(size(a, -4), size(b, -4))] if 4 in (len(a), len(b)) else []
    if op == "sdd":
        return [*z, *packed_shape(layout)]
    dense, trans_dense, trans_sparse = (b, trans_b, trans_a) if op == "dsd" else (a, trans_a, trans_b)
    free = dense[-2] if trans_dense == (op == "dsd") else dense[-1]
    _, rows, cols = layout.shape
    kept = cols if trans_sparse == (op == "dsd") else rows
    h = [1 if sum_h else heads(op, a, b, layout)] if z or len(dense) > 2 or layout.heads != 1 else []
    return [*z, *h, *((kept, free) if op == "dsd" else (free, kept))]


def check_product(
    op: str, a: Operand, b: Operand, layout: BlockLayout, trans_a: bool, trans_b: bool, sum_h: bool = False
) -> None:
    check_floating(op, a)
    check_floating(op, b)
    if a.dtype != b.dtype:
        fail(op, b.name, f"{a.dtype} like {a.name}", b.dtype)
    if a.device != b.device:
        fail(op, b.name, f"{a.device} like {a.name}", b.device)
    _, rows, cols = layout.shape
    if op == "sdd":
        _check_dense(op, a, None if trans_a else rows, rows if trans_a else None)
        k = a.shape[-2] if trans_a else a.shape[-1]
        _check_dense(op, b, cols if trans_b else k, k if trans_b else cols)
        _check_heads(op, a, layout, packed=not sum_h)
        _check_heads(op, b, layout, packed=not sum_h)
        _check_broadcast(op, a, b, -4, "batches")
        _check_broadcast(op, a, b, -3, "heads")
        return
    first = op == "dsd"  # the sparse operand contracts its columns there, its rows where it stands second
    values, dense, trans_sparse, trans_dense = (a, b, trans_a, trans_b) if first else (b, a, trans_b, trans_a)
    contracted = rows if trans_sparse == first else cols
    _check_packed(op, values, layout)
    if trans_dense == first:
        _check_dense(op, dense, None, contracted)
    else:
        _check_dense(op, dense, contracted, None)
    _check_heads(op, dense, layout, packed=False)
    _check_broadcast(op, a, b, -4, "batches")


def _check_dense(op: str, x: Operand, rows: int | None, cols: int | None) -> None:
    if not 2 <= len(x.shape) <= 4:
        fail(op, x.name, "2 to 4 dimensions, (Z, H, rows, columns)", x.shape)
    if any(want is not None and have != want for want, have in zip((rows, cols), x.shape[-2:], strict=True)):
        m, n = ("any" if want is None else want for want in (rows, cols))
        fail(op, x.name, f"(…, {m}, {n})", x.shape)


def _check_heads(op: str, x: Operand, layout: BlockLayout, packed: bool) -> None:
    """A one-head layout serves any number unless the result is packed."""
    own = layout.heads
    if (own != 1 or packed) and size(x.shape, -3) not in (1, own):
        fail(op, x.name, "1 head" if own == 1 else f"1 or {own} heads", x.shape)


def _check_broadcast(op: str, a: Operand, b: Operand, d: int, what: str) -> None:
    m, n = size(a.shape, d), size(b.shape, d)
    if m != n and m != 1 and n != 1:
        fail(op, b.name, f"{m} or 1 {what}, as {a.name} has {m}", b.shape)


# Softmax and packing


def check_softmax(
    values: Operand, layout: BlockLayout, extras: Sequence[Operand], key_padding_mask_mode: str, attn_mask_mode: str
) -> None:
    """Of the extras those that are there, by their names."""
    op = "block_softmax"
    _check_packed(op, values, layout)
    check_floating(op, values)
    all_heads, m, n = layout.shape
    full = (size(values.shape, -4), all_heads, m, n)
    for x in extras:
        if x.name == "rpe":
            check_floating(op, x)
            pairs = zip(x.shape[::-1], full[::-1], strict=False)
            if len(x.shape) > 4 or any(have != 1 and have != want for have, want in pairs):
                fail(op, x.name, f"a shape that broadcasts to {full}", x.shape)
        elif x.name == "key_padding_mask":
            _check_mask(x, [(full[0], n)], key_padding_mask_mode)
        else:
            _check_mask(x, [(m, n), (all_heads, m, n)], attn_mask_mode)
        _check_device(op, x, values)


def _check_mask(x: Operand, shapes: list[tuple[int, ...]], mode: str) -> None:
    op = "block_softmax"
    if x.shape not in shapes:
        fail(op, x.name, "shape " + " or ".join(map(str, shapes)), x.shape)
    if x.dtype == "bool" and mode == "add":
        fail(op, x.name, 'numbers to add, or mode "mul" for a mask of what stays', "bool")
    if x.dtype not in (*_FLOATING, "bool"):
        fail(op, x.name, "bool, float64, float32, float16 or bfloat16", x.dtype)


def check_pack(dense: Operand, layout: BlockLayout) -> None:
    shape = layout.shape
    matrix = layout.heads == 1 and len(dense.shape) == 2
    if not (2 if matrix else 3) <= len(dense.shape) <= 4 or dense.shape[-3:] != (shape[1:] if matrix else shape):
        one = f"{shape[1:]}, " if layout.heads == 1 else ""
        fail("pack", dense.name, f"shape {one}{shape} or (Z, {str(shape)[1:]}", dense.shape)
    check_floating("pack", dense)


def check_unpack(values: Operand, layout: BlockLayout, fill: float) -> None:
    _check_packed("unpack", values, layout)
    check_floating("unpack", values)
    if math.isfinite(fill) and abs(fill) > _LARGEST.get(values.dtype, math.inf):
        fail("unpack", "fill", f"a number that {values.dtype} holds, or an infinity", fill)


# The convolution


class ConvGeometry(NamedTuple):
    """(height, width) each; padding is (top, left, bottom, right)."""

    kernel_size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]


def conv_geometry(
    op: str, kernel_size: Any, stride: Any, padding: Any, dilation: Any, kind: type[Exception] = RuntimeError
) -> ConvGeometry:
    """From ints and pairs of them; padding also "same" or "valid"."""
    kernel, steps = _pair(op, "kernel_size", kernel_size, 1, kind), _pair(op, "stride", stride, 1, kind)
    gaps = _pair(op, "dilation", dilation, 1, kind)
    if not isinstance(padding, str):
        begin = _pair(op, "padding", padding, 0, kind)
        return ConvGeometry(kernel, steps, (*begin, *begin), gaps)
    if padding not in ("same", "valid"):
        fail(op, "padding", 'an int, a pair of ints, "same" or "valid"', repr(padding), kind)
    if padding == "valid":
        return ConvGeometry(kernel, steps, (0, 0, 0, 0), gaps)
    if steps != (1, 1):
        fail(op, "padding", '"same" with a stride of 1 only', f'"same" with {steps}', kind)
    whole = [gap * (size - 1) for gap, size in zip(gaps, kernel, strict=True)]
    (top, left), (bottom, right) = [n // 2 for n in whole], [n - n // 2 for n in whole]
    return ConvGeometry(kernel, steps, (top, left, bottom, right), gaps)


def _pair(op: str, argument: str, value: Any, least: int, kind: type[Exception]) -> tuple[int, int]:
    numbers = tuple(value) if isinstance(value, (tuple, list)) else (value, value)
    if len(numbers) != 2:
        fail(op, argument, "an int or a pair of ints", value, kind)
    first, second = (n if type(n) is int else whole_number(op, argument, n) for n in numbers)
    if first < least or second < least:
        fail(op, argument, f"at least {least} along both axes", (first, second), kind)
    return first, second


def channels_last(shape: Shape, strides: Shape) -> bool:
    """Whether images (N, C, H, W) have their channels innermost: as torch's memory format of that name has it, and as
    slices and permutations of such tensors do. Where both formats fit, as for 1×1 images, it is NCHW."""
    n, c, h, w = shape
    inner = strides[1]
    if n == 0 or c == 0 or h * w <= 1 or inner == 0:
        return False
    return (h == 1 or inner < strides[2]) and (w == 1 or inner < strides[3])


def check_conv2d(operands: Sequence[Operand], layout: BlockLayout, geometry: ConvGeometry) -> tuple[int, int, int, int]:
    """x, values and, where there is one, the bias; gives the result's shape."""
    op = "block_conv2d"
    x, values, *rest = operands
    kernel, stride, padding, dilation = geometry
    if layout.heads != kernel[0] * kernel[1]:
        fail(op, "kernel_size", f"as many positions as the layout has heads, {layout.heads}", kernel)
    _, channels_out, channels_in = layout.shape
    check_floating(op, x)
    if len(x.shape) != 4 or x.shape[1] != channels_in:
        fail(op, "x", f"(N, {channels_in}, H, W)", x.shape)
    check_floating(op, values)
    if tuple(values.shape) != packed_shape(layout):
        fail(op, "values", packed_shape(layout), values.shape)
    for one in (values, *rest):
        if one.name == "bias" and one.shape != (channels_out,):
            fail(op, "bias", (channels_out,), one.shape)
        if one.dtype != x.dtype:
            fail(op, one.name, f"{x.dtype} like x", one.dtype)
        if one.device != x.device:
            fail(op, one.name, f"{x.device} like x", one.device)
    sizes = []
    for axis, word in enumerate(("height", "width")):
        padded = x.shape[2 + axis] + padding[axis] + padding[2 + axis]
        reach = (kernel[axis] - 1) * dilation[axis] + 1
        if padded < reach:
            fail(op, "x", f"a padded {word} of at least {reach}", x.shape)
        sizes.append((padded - reach) // stride[axis] + 1)
    return x.shape[0], channels_out, sizes[0], sizes[1]


# Attention


def check_qkv(op: str, operands: Sequence[Operand]) -> tuple[int, int, int, int]:
    """Gives the batch, the query heads, the queries and the keys."""
    q, k, v = operands
    if len(q.shape) != 4:
        fail(op, "q", "4 dimensions (B, Hq, Sq, D)", q.shape)
    check_floating(op, q)
    for x in (k, v):
        if x.dtype != q.dtype:
            fail(op, x.name, f"{q.dtype} like q", x.dtype)
        _check_device(op, x, q)
    batch, heads, rows, depth = q.shape
    if len(k.shape) != 4 or k.shape[0] != batch or k.shape[3] != depth:
        fail(op, "k", f"({batch}, Hk, Sk, {depth})", k.shape)
    _, kv_heads, cols, _ = k.shape
    _check_group(op, k, heads)
    if len(v.shape) != 4 or v.shape[:3] != k.shape[:3]:
        fail(op, "v", f"({batch}, {kv_heads}, {cols}, Dv)", v.shape)
    for x in (q, v):
        if x.shape[3] < 1:
            fail(op, x.name, "a last dimension of at least 1", x.shape)
    return batch, heads, rows, cols


def _check_group(op: str, k: Operand, heads: int) -> None:
    """That each of k's heads serves as many of q's `heads`."""
    if heads != k.shape[1] if 0 in (heads, k.shape[1]) else heads % k.shape[1] != 0:
        fail(op, "k", f"a number of heads that divides the {heads} of q", k.shape)


def check_attention(
    operands: Sequence[Operand],
    patterns: Sequence[Pattern],
    extras: Sequence[Operand],
    scale: float | None,
    softcap: float,
    dropout_p: float,
) -> None:
    """q, k and v; patterns; extras as `check_extras` has them."""
    op = "attention"
    batch, heads, rows, cols = check_qkv(op, operands)
    check_patterns(op, patterns, batch, heads, rows, cols)
    check_extras(op, extras, operands[0], (batch, heads, rows, cols))
    if scale is not None and not math.isfinite(scale):
        fail(op, "scale", "a finite number", scale)
    if not 0 <= softcap < float("inf"):
        fail(op, "softcap", "0 (none) or a positive number", softcap)
    if not 0 <= dropout_p <= 1:
        fail(op, "dropout_p", "0 to 1", dropout_p)


def check_extras(op: str, extras: Sequence[Operand], q: Operand, sizes: tuple[int, int, int, int]) -> None:
    """Of bias, slopes, key_padding_mask and sinks those that are there, by their names."""
    batch, heads, _, cols = sizes
    for x in extras:
        if x.name == "slopes":
            check_slopes(op, x.shape, heads)
        elif x.name == "key_padding_mask":
            if x.dtype != "bool":
                fail(op, x.name, "bool", x.dtype)
            if tuple(x.shape) != (batch, cols):
                fail(op, x.name, f"shape {(batch, cols)}, one for each key", x.shape)
        elif x.name == "sinks":
            check_sinks(op, x, q)
        else:
            _check_bias(op, x, q, sizes)
        _check_device(op, x, q)


def check_slopes(op: str, shape: Shape, heads: int) -> None:
    if tuple(shape) != (heads,):
        fail(op, "bias", f"slopes of shape {(heads,)}", tuple(shape))


def check_sinks(op: str, x: Operand, q: Operand) -> None:
    check_floating(op, x)
    _check_like_q_or_float(op, x, q)
    if tuple(x.shape) != (q.shape[1],):
        fail(op, x.name, f"shape {(q.shape[1],)}", x.shape)


def _check_like_q_or_float(op: str, x: Operand, q: Operand) -> None:
    if x.dtype not in (q.dtype, "float32"):
        fail(op, x.name, "float32 like q" if q.dtype == "float32" else f"{q.dtype} like q or float32", x.dtype)


def _check_bias(op: str, x: Operand, q: Operand, full: tuple[int, ...]) -> None:
    _check_like_q_or_float(op, x, q)
    pairs = zip(x.shape[::-1], full[::-1], strict=False)
    if len(x.shape) > 4 or any(have != 1 and have != want for have, want in pairs):
        fail(op, x.name, f"a shape that broadcasts to {full}", x.shape)


def lengths(op: str, queries: Shape, keys: Shape) -> tuple[int, int]:
    """Sq and Sk, of the shapes of q and k."""
    for name, shape, sizes in (("q", queries, "(B, Hq, Sq, D)"), ("k", keys, "(B, Hk, Sk, D)")):
        if len(shape) != 4:
            fail(op, name, f"4 dimensions {sizes}", tuple(shape))
    return queries[2], keys[2]


def every_key(op: str, queries: Shape, keys: Shape) -> Pattern:
    """The pattern of a call that names none; of the shapes of q and k."""
    return full(lengths(op, queries, keys))


def flat_patterns(op: str, pattern: Any, queries: Shape) -> tuple[Any, ...]:
    """The patterns of a call as an op takes them: one, Hq of them, or Hq for each of B elements, one after another.

    `pattern` is one, a sequence of one or Hq, or a sequence of B sequences of one or Hq each; `queries` is q's shape.
    """
    if isinstance(pattern, Pattern):
        return (pattern,)
    batch, heads = queries[:2] if len(queries) == 4 else (None, None)
    _check_sequence(op, "pattern", pattern)
    if not any(isinstance(p, Sequence) and not isinstance(p, str) for p in pattern):
        _check_patterns(op, "pattern", pattern, heads)
        return tuple(pattern)
    rows = []
    for n, row in enumerate(pattern):
        if isinstance(row, Pattern):
            raise TypeError(f"{op}: pattern[{n}]: expected a sequence of patterns, as others are, got a Pattern")
        _check_sequence(op, f"pattern[{n}]", row)
        _check_patterns(op, f"pattern[{n}]", row, heads)
        rows.append([row[0] for _ in range(heads or 1)] if len(row) == 1 else row)
    if batch is not None and len(rows) != batch:
        fail(op, "pattern", f"{batch} sequences, one for each element of the batch", len(rows))
    return tuple(p for row in rows for p in row)


# What makes a pattern of other things, by the names of their types.
WAYS = {
    "Tensor": " (fw.patterns.from_mask makes a pattern)",
    "BlockMask": " (fw.patterns.from_block_mask makes a pattern)",
    "str": " (fw.Pattern.parse reads one)",
}


def check_function(op: str, argument: str, function: Callable[..., Any]) -> None:
    """That it takes two lengths, as far as its signature is known. A mask_mod takes four indices."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(1, 1)
    except TypeError:
        got = f"one of ({', '.join(signature.parameters)})"
        if len(signature.parameters) == 4:
            got += "; fw.patterns.from_block_mask(create_block_mask(mask_mod, None, None, Sq, Sk)) takes a mask_mod"
        refuse(op, argument, "a function of (Sq, Sk) that gives a fretwork.Pattern", got, TypeError)


def made_for(op: str, function: Callable[[int, int], Any], rows: int, cols: int) -> Any:
    """What a function of the lengths gives. Its signature is read only if it fails: torch.compile traces this."""
    try:
        return function(rows, cols)
    except TypeError:
        check_function(op, "pattern", function)
        raise


def _check_sequence(op: str, argument: str, patterns: object) -> None:
    if isinstance(patterns, str) or not isinstance(patterns, Sequence) or len(patterns) == 0:
        got = "an empty sequence" if isinstance(patterns, Sequence) and not patterns else type(patterns).__name__
        raise TypeError(
            f"{op}: {argument}: expected a fretwork.Pattern or a sequence of them, got {got}{WAYS.get(got, '')}"
        )


def _check_patterns(op: str, argument: str, patterns: Sequence[object], heads: int | None) -> None:
    for n, p in enumerate(patterns):
        if not isinstance(p, Pattern):
            raise TypeError(f"{op}: {argument}[{n}]: expected a fretwork.Pattern, got {type(p).__name__}")
    if heads is not None and len(patterns) != 1 and len(patterns) != heads:
        fail(op, argument, f"1 or {heads}, one for each query head", len(patterns))


def check_patterns(op: str, patterns: Sequence[Pattern], batch: int, heads: int, rows: int, cols: int) -> None:
    """A block layout has a dimension of heads, of which attention takes one."""
    if len(patterns) not in (1, heads, batch * heads):
        expected = f"1, {heads}, one for each query head, or {batch * heads}, for each element of the batch too"
        fail(op, "pattern", expected, len(patterns))
    for p in dict.fromkeys(patterns):
        if p.shape[-2:] != (rows, cols):
            fail(op, "pattern", f"shape {(rows, cols)}, queries and keys of (B, H, S, D)", p.shape[-2:])
        if len(p.shape) > 2 and p.shape[0] != 1:
            fail(op, "pattern", "a regular pattern, a block layout of one head or a Kronecker pattern", p.text)


# Attention on what only the device knows

_SIDES = (16, 32, 64, 128)


def check_side(op: str, block: Any, kind: type[Exception] = RuntimeError) -> int:
    side = block if type(block) is int else whole_number(op, "block", block)
    if side not in _SIDES:
        fail(op, "block", "16, 32, 64 or 128", side, kind)
    return side


def check_sides(op: str, block: Any, kind: type[Exception] = RuntimeError) -> tuple[int, int]:
    """Of queries and of keys."""
    if isinstance(block, (tuple, list)) and len(block) != 2:
        fail(op, "block", "one or a pair of 16, 32, 64 or 128", block, kind)
    rows, cols = block if isinstance(block, (tuple, list)) else (block, block)
    return check_side(op, rows, kind), check_side(op, cols, kind)


def check_no_block(op: str, block: Any) -> None:
    """Where there are no blocks their side means nothing."""
    if block not in (128, (128, 128)):
        fail(op, "block", "blocks with it", f"{block} without blocks")


@lru_cache(256)
def has_interval_rows(key: str) -> bool:
    """Whether each row and each column of a pattern is an interval, without gaps between those of neighbours."""
    pattern = Pattern.parse(key)
    try:
        lines = [p.numpy_acsr() for p in (pattern, pattern.T)]
    except ValueError:
        return False
    return all(_touching_intervals(*line) for line in lines)


def _touching_intervals(start: Any, stride: Any, count: Any) -> bool:
    if ((stride != 1) & (count > 1)).any():
        return False
    begin, end = start[count > 0], (start + count)[count > 0]
    first, last = np.minimum.accumulate(begin)[:-1], np.maximum.accumulate(end)[:-1]
    return bool(((begin[1:] <= last) & (end[1:] >= first)).all())


def check_one_pattern(op: str, texts: Sequence[str]) -> None:
    if (different := len(set(texts))) > 1:
        raise NotImplementedError(
            f"{op}: pattern: expected one for all heads with blocks, got {different} different ones; call each group "
            "of heads on its own"
        )


def check_block_pattern(op: str, pattern: Pattern, rows: int, cols: int, intervals: bool) -> None:
    """`intervals`: what `has_interval_rows` says of it."""
    if pattern.shape[-2:] != (rows, cols):
        fail(op, "pattern", f"shape {(rows, cols)}, queries and keys of (B, H, S, D)", pattern.shape[-2:])
    if not intervals:
        fail(
            op,
            "pattern",
            "one whose rows are intervals without gaps between them with blocks, such as causal or sliding_window",
            f"{pattern!r}; without blocks every pattern is taken",
            NotImplementedError,
        )


def check_blocks(op: str, q: Operand, k: Operand, blocks: Operand, lists: bool, sides: tuple[int, int]) -> None:
    """A mask, or the indices of lists."""
    batch, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
    lines, width = -(-q.shape[2] // sides[0]), -(-k.shape[2] // sides[1])
    if blocks.dtype != ("int32" if lists else "bool"):
        fail(op, blocks.name, "int32" if lists else "bool", blocks.dtype)
    shape = tuple(blocks.shape)
    right = len(shape) == 4 and shape[2] == lines and (lists or shape[3] == width)
    if not right or shape[0] not in (1, batch) or shape[1] not in (1, heads, kv_heads):
        first, second = (
            " | ".join(map(str, sorted({*sizes}, reverse=True))) for sizes in ((batch, 1), (heads, kv_heads, 1))
        )
        last = "N" if lists else width
        fail(
            op,
            blocks.name,
            f"({first}, {second}, {lines}, {last}) of (batch, heads, query blocks, key blocks) for block={sides}",
            shape,
        )
    if blocks.device != q.device:
        fail(op, blocks.name, f"a tensor on {q.device} like q", blocks.device)


def check_selected(op: str, operands: Sequence[Operand], indices: Operand) -> None:
    batch, _, rows, _ = check_qkv(op, operands)
    kv_heads = operands[1].shape[1]
    if indices.dtype != "int32":
        fail(op, "indices", "int32", indices.dtype)
    if len(indices.shape) != 4 or tuple(indices.shape[:3]) != (batch, kv_heads, rows):
        fail(op, "indices", f"({batch}, {kv_heads}, {rows}, T)", tuple(indices.shape))
    _check_device(op, indices, operands[0])


def check_packed(op: str, operands: Sequence[Operand]) -> tuple[int, int, int, int]:
    """`check_qkv` of q, k and v without a batch, heads behind rows."""
    for x, sizes in zip(operands, ("(Tq, Hq, D)", "(Tk, Hk, D)", "(Tk, Hk, Dv)"), strict=True):
        if len(x.shape) != 3:
            fail(op, x.name, f"3 dimensions {sizes}", tuple(x.shape))
    q, k, v = operands
    if k.shape[2] != q.shape[2]:
        fail(op, "k", f"(Tk, Hk, {q.shape[2]})", k.shape)
    if v.shape[:2] != k.shape[:2]:
        fail(op, "v", f"({k.shape[0]}, {k.shape[1]}, Dv)", v.shape)
    _check_group(op, k, q.shape[1])
    for x in (q, v):
        if x.shape[2] < 1:
            fail(op, x.name, "a last dimension of at least 1", x.shape)
    return check_qkv(op, [x._replace(shape=(1, x.shape[1], x.shape[0], x.shape[2])) for x in operands])


def check_starts(op: str, cu: Operand, like: Operand | None = None) -> None:
    """Where documents begin; those of keys `like` those of queries."""
    if cu.dtype not in ("int32", "int64"):
        fail(op, cu.name, "int32 or int64", cu.dtype)
    if len(cu.shape) != 1 or cu.shape[0] == 0:
        fail(op, cu.name, "one dimension and at least one entry", tuple(cu.shape))
    if like is not None and tuple(cu.shape) != tuple(like.shape):
        fail(op, cu.name, f"shape {tuple(like.shape)} like cu_q", tuple(cu.shape))


def check_window(op: str, window: Any) -> tuple[int, int]:
    """−1 for none."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        fail(op, "window", "a pair (left, right), None for no bound", window)
    return check_bound(op, "window", window[0]), check_bound(op, "window", window[1])


def check_bound(op: str, name: str, value: Any) -> int:
    """−1 for none."""
    if value is None:
        return -1
    if hasattr(value, "dtype") and not isinstance(value, (np.generic, np.ndarray)):  # it may lie on a GPU
        fail(op, name, "an int or None", f"a {type(value).__name__}; give what the host knows, or nothing", TypeError)
    number = whole_number(op, name, value)
    if number < 0:
        fail(op, name, "0 or more, or None", value)
    return number


# The selection of key blocks


def check_top_k(op: str, top_k: int) -> int:
    """Of which there is room for so many; blocks are counted in 32 bits."""
    if top_k > 2**31 - 1:
        fail(op, "top_k", "at most 2147483647", top_k)
    return top_k


def check_select_blocks(
    q: Operand, k: Operand, top_k: int, block: tuple[int, int], first: int, last: int
) -> tuple[int, int, int]:
    """Gives the shape of the counts."""
    op = "select_blocks"
    check_top_k(op, top_k)
    if len(q.shape) != 4:
        fail(op, "q", "4 dimensions (B, Hq, Sq, D)", q.shape)
    check_floating(op, q)
    batch, heads, rows, depth = q.shape
    if depth < 1:
        fail(op, "q", "a last dimension of at least 1", q.shape)
    if k.dtype != q.dtype:
        fail(op, "k", f"{q.dtype} like q", k.dtype)
    if len(k.shape) != 4 or k.shape[0] != batch or k.shape[3] != depth:
        fail(op, "k", f"({batch}, Hk, Sk, {depth})", k.shape)
    kv_heads = k.shape[1]
    _check_group(op, k, heads)
    _check_device(op, k, q)
    for side in block:
        if side not in _SIDES:
            fail(op, "block", "16, 32, 64 or 128", side)
    for name, count in (("first", first), ("last", last)):
        if count < 0:
            fail(op, name, "0 or more", count)
    if top_k < 1 or top_k < first + last:
        fail(op, "top_k", f"at least first + last, {first} + {last}" if first + last else "at least 1", top_k)
    return batch, kv_heads, -(-rows // block[0])


# SPLAT's operators


def check_r_sddmm(q: Operand, k: Operand, pattern: Pattern) -> int:
    """Gives the width of the result."""
    op = "r_sddmm"
    width = row_width(pattern, op)
    rows, cols = pattern.shape[-2:]
    _check_four(op, q, "(B, Hq, Sq, D)")
    batch, heads, _, depth = q.shape
    if q.shape[2] != rows:
        fail(op, q.name, f"shape {(batch, heads, rows, depth)}", q.shape)
    _check_shared(op, k, q, (batch, heads, cols), depth)
    return width


def check_r_spmm(x: Operand, v: Operand, pattern: Pattern) -> None:
    check_r_softmax(x, pattern, "r_spmm")
    _check_shared("r_spmm", v, x, (x.shape[0], x.shape[1], pattern.shape[-1]))


def check_r_softmax(x: Operand, pattern: Pattern, op: str = "r_softmax") -> None:
    width = row_width(pattern, op)
    _check_four(op, x, "(B, Hq, Sq, W)")
    want = (*x.shape[:2], pattern.shape[-2], width)
    if x.shape != want:
        fail(op, x.name, f"shape {want}", x.shape)


def _check_four(op: str, x: Operand, expected: str) -> None:
    check_floating(op, x)
    if len(x.shape) != 4:
        fail(op, x.name, f"4 dimensions {expected}", x.shape)


def _check_shared(op: str, x: Operand, like: Operand, sizes: tuple[int, int, int], depth: int | None = None) -> None:
    """Keys or values, whose heads may serve several of the queries'."""
    batch, heads, cols = sizes
    _check_four(op, x, "(B, Hk, Sk, D)")
    if x.dtype != like.dtype:
        fail(op, x.name, like.dtype, x.dtype)
    _check_device(op, x, like)
    own = x.shape[1]
    if x.shape[0] != batch or x.shape[2] != cols or (depth is not None and x.shape[3] != depth):
        fail(op, x.name, f"shape {(batch, own, cols, x.shape[3] if depth is None else depth)}", x.shape)
    if heads != own if 0 in (heads, own) else heads % own != 0:
        fail(op, x.name, f"a number of heads that divides {heads}", x.shape)


# Kronecker factors


def factor_features(op: str, name: str, w: Shape, before: int | None, x: Shape, bs_last: bool) -> int:
    """The out features of a Kronecker factor that meets x, or as many features as the factor before it has left."""
    if len(w) != 4 or 0 in w:
        fail(op, name, "(a, b, c, d), each at least 1", tuple(w))
    a, b, c, d = w
    features = a * c * d
    if before is None:
        if x[0 if bs_last else -1] != features:
            fail(op, f"x for {name}", f"({features}, …), a·c·d" if bs_last else f"(…, {features}), a·c·d", tuple(x))
    elif before != features:
        fail(op, name, f"{before} in features (a·c·d), as come before it", f"{features} of {tuple(w)}")
    return a * b * d


# 2:4


def two_four_axis(
    op: str, dim: Any, kind: type[Exception] = RuntimeError, number: Callable[[str, str, Any], int] = whole_number
) -> int:
    """0 or 1."""
    dim = number(op, "dim", dim)
    if dim not in (-2, -1, 0, 1):
        fail(op, "dim", "-1, 0 or 1", dim, kind)
    return dim % 2


def two_four_cut(
    index: Any, shape: Shape, dim: int, whole: int, number: Callable[[str, str, Any], int]
) -> tuple[slice, slice, slice]:
    """Which lines of a 2:4 matrix, and of each which values and words, are s[index]; a word is of `whole` elements.

    `slice.indices` would do some of it, but torch.compile does not follow it everywhere.
    """
    both = index if isinstance(index, tuple) else (index, slice(None))
    if len(both) != 2 or not all(isinstance(i, slice) for i in both):
        refuse("TwoFour", "index", "one slice or two", index, TypeError)
    if any(i.step not in (None, 1) for i in both):
        refuse("TwoFour", "index", "slices with step 1", index)
    cuts = []
    for i, most in zip(both, shape, strict=True):
        given = ((i.start, 0), (i.stop, most))
        begin, end = (default if at is None else number("TwoFour", "index", at) for at, default in given)
        begin, end = (min(max(at + most if at < 0 else at, 0), most) for at in (begin, end))
        cuts.append((begin, max(begin, end)))
    begin, end = cuts[dim]
    if begin % whole or (end % whole and end != shape[dim]):
        refuse("TwoFour", "index", f"multiples of {whole} along dim {dim}, whole words", f"[{begin}:{end}]")
    return slice(*cuts[1 - dim]), slice(begin // 2, end // 2), slice(begin // whole, -(-end // whole))
