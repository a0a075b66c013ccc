"""What a call of attention over ranks is beside its operands, and which method moves fewer bytes for it."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from fretwork._checks import fail
from fretwork.distributed._steps import Plan, plan_of, received
from fretwork.distributed.shards import Ranges
from fretwork.patterns import Pattern

_OP = "attention"

METHODS = ("auto", "ranges", "ulysses")


@dataclass(eq=False)
class Call:
    """The same on every rank but for the padding."""

    patterns: tuple[Pattern, ...]
    rows: Ranges
    keys: Ranges
    heads: int
    group: dist.ProcessGroup
    scale: float | None
    softcap: float
    precision: str
    slopes: Tensor | None
    padding: Tensor | None  # (B, this rank's keys), or (B, all keys)
    padding_is_whole: bool
    returns_lse: bool
    kept_padding: dict[int, list[Tensor]] = field(default_factory=dict)
    tag: int = 0  # of its messages

    @functools.cached_property
    def plan(self) -> Plan:
        """Of ranges."""
        return plan_of(self.patterns, self.rows, self.keys, self.group.rank(), self.slopes is not None)


class Bias(NamedTuple):
    """The sizes of a bias tensor; None where a rank with one row cannot tell whether it has rows or broadcasts."""

    batch: int
    heads: int
    has_rows: bool | None
    columns: int
    width: int  # bytes of an element
    learns: bool

    @staticmethod
    def of(t: Tensor, rows: Ranges, learns: bool) -> Bias:
        batch, heads, own, columns = (1,) * (4 - t.dim()) + tuple(t.shape)
        unclear = len(rows) > 1 and any(last - first == 1 for first, last in rows)
        return Bias(batch, heads, None if unclear else own != 1, columns, t.element_size(), learns)


class Sizes(NamedTuple):
    """What bytes are counted from. Every rank has the same, which `_agree` makes sure of."""

    batch: int
    heads: int
    key_heads: int
    depth: int
    value_depth: int
    width: int  # bytes of an element
    lse_width: int  # the same of lse, 0 where it is not asked for
    learns: tuple[bool, bool, bool]  # q, k and v
    backward: bool  # whether anything gets a gradient
    padding: bool  # whether it travels
    bias: Bias | None


def method_of(method: str, patterns: tuple[Pattern, ...], rows: Ranges, keys: Ranges, sizes: Sizes) -> str:
    """The method asked for, or for auto the one that sends fewer bytes."""
    if method not in METHODS:
        fail(_OP, "method", "auto, ranges or ulysses", repr(method))
    if method == "ulysses":
        _check_ulysses(rows, sizes)
    return _cheapest(patterns, rows, keys, sizes) if method == "auto" else method


def _check_ulysses(rows: Ranges, sizes: Sizes) -> None:
    if sizes.key_heads % len(rows):
        fail(_OP, "k", f"a number of heads that {len(rows)} ranks divide, with method='ulysses'", sizes.key_heads)
    if sizes.bias is not None and sizes.bias.has_rows is None:
        fail(_OP, "shards", "no rank with one row, with method='ulysses' and a bias", [b - a for a, b in rows])


@functools.lru_cache(maxsize=1024)
def _cheapest(patterns: tuple[Pattern, ...], rows: Ranges, keys: Ranges, sizes: Sizes) -> str:
    unclear = sizes.bias is not None and sizes.bias.has_rows is None
    if sizes.key_heads % len(rows) or unclear:
        return "ranges"
    least = bytes_of_ulysses(rows, keys, sizes) < bytes_of_ranges(patterns, rows, keys, sizes)
    return "ulysses" if least else "ranges"


def bytes_of_ranges(patterns: tuple[Pattern, ...], rows: Ranges, keys: Ranges, sizes: Sizes) -> int:
    """Keys and values that ranks receive, once or twice, and their gradients, which go back."""
    every = received(patterns, rows, keys)
    once = sum(count for count, _ in every)
    again = sum(count for count, fetches in every if fetches)
    key, value = (sizes.batch * sizes.key_heads * depth * sizes.width for depth in (sizes.depth, sizes.value_depth))
    total = once * (key + value + sizes.batch * sizes.padding)
    if sizes.backward:
        total += again * (key + value) + once * (key * sizes.learns[1] + value * sizes.learns[2])
    return total


def bytes_of_ulysses(rows: Ranges, keys: Ranges, sizes: Sizes) -> int:
    """All of q, k, v and o and their gradients, but for the part of each that is where it has to be."""
    world, queries, columns = len(rows), rows[-1][1], keys[-1][1]
    query, key = queries * sizes.batch * sizes.heads, columns * sizes.batch * sizes.key_heads
    q, k, v = query * sizes.depth, key * sizes.depth, key * sizes.value_depth
    o, lse = query * sizes.value_depth * sizes.width, query * sizes.lse_width
    bias = _bias_of_ulysses(queries, world, sizes.bias)
    total = (q + k + v) * sizes.width + o + lse + bias + columns * sizes.batch * sizes.padding * world
    if sizes.backward:
        learned = sum(size for size, learns in zip((q, k, v), sizes.learns, strict=True) if learns)
        total += o + lse + learned * sizes.width + (bias if sizes.bias is not None and sizes.bias.learns else 0)
    return total * (world - 1) // world


def _bias_of_ulysses(queries: int, world: int, bias: Bias | None) -> int:
    """Bytes of all rows of a bias: of its heads, or on each rank of its one for all."""
    if bias is None or not bias.has_rows:
        return 0
    return queries * bias.batch * (world if bias.heads == 1 else bias.heads) * bias.columns * bias.width
