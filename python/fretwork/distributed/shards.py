"""Patterns cut over ranks: who has which rows, how much work that is, and which keys others must send."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from fretwork._checks import whole_number
from fretwork._library import core, int64s, last_error
from fretwork.patterns import Pattern
from fretwork.patterns.pattern import opened

__all__ = ["Shards", "shard"]

Ranges = tuple[tuple[int, int], ...]


class Shards:
    """Contiguous rows of a pattern for each rank, as `fd.shard` cuts them. An immutable value.

    `ranges` has (first, last) of each rank's rows, last not included; `key_ranges` those of its keys, which are the
    same for a square pattern, else equal parts.

    >>> import fretwork as fw, fretwork.distributed as fd
    >>> shards = fd.shard(fw.patterns.sliding_window(4096, 100, 0), 4)
    >>> shards.ranges
    [(0, 1024), (1024, 2048), (2048, 3072), (3072, 4096)]
    >>> shards.needs(1), shards.nnz(1)
    ({0: [(924, 1024)]}, 103424)
    """

    __slots__ = ("_keys", "_rows", "pattern")
    pattern: Pattern

    def __init__(self, pattern: Pattern, rows: Ranges, keys: Ranges) -> None:
        self.pattern, self._rows, self._keys = pattern, rows, keys

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return list(self._rows)

    @property
    def key_ranges(self) -> list[tuple[int, int]]:
        return list(self._keys)

    def nnz(self, rank: int) -> int:
        """Elements of a rank's rows."""
        with opened(self.pattern) as handle:
            count = core().fretwork_pattern_rows_nnz(handle, *self._rows[self._checked(rank)])
        if count < 0:
            raise ValueError(last_error())
        return int(count)

    def needs(self, rank: int) -> dict[int, list[tuple[int, int]]]:
        """The keys that a rank's rows have and others hold: ranges (first, last) of each peer that has some."""
        rank = self._checked(rank)
        found: dict[int, list[tuple[int, int]]] = {}
        for peer, first, last in keys_of_rows(self.pattern, self._rows[rank], self._keys).tolist():
            if peer != rank:
                found.setdefault(peer, []).append((first, last))
        return found

    def _checked(self, rank: int) -> int:
        rank = whole_number("shards", "rank", rank)
        if not 0 <= rank < len(self._rows):
            raise ValueError(f"shards: rank: expected 0 to {len(self._rows) - 1}, got {rank}")
        return rank

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Shards):
            return NotImplemented
        return (self.pattern, self._rows, self._keys) == (other.pattern, other._rows, other._keys)

    def __hash__(self) -> int:
        return hash((self.pattern, self._rows, self._keys))

    def __repr__(self) -> str:
        return f"Shards({self.pattern!r}, {self.ranges!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Shards, (self.pattern, self._rows, self._keys)


def shard(pattern: Pattern, world_size: int, align: int = 128) -> Shards:
    """Cuts the rows of a pattern into a contiguous range for each rank, of nearly equal numbers of elements.

    Ranges begin at multiples of `align`, by which the balance is limited; a rank may get none. Nothing is sent or asked
    of other ranks.

    >>> import fretwork as fw, fretwork.distributed as fd
    >>> shards = fd.shard(fw.patterns.causal(2**20), 4)
    >>> shards.ranges
    [(0, 524288), (524288, 741504), (741504, 908032), (908032, 1048576)]
    >>> max(shards.nnz(rank) for rank in range(4)) / (shards.pattern.nnz / 4) < 1.001
    True
    """
    op = "shard"
    if not isinstance(pattern, Pattern):
        raise TypeError(f"{op}: pattern: expected a fretwork.Pattern, got {type(pattern).__name__}")
    world_size, align = whole_number(op, "world_size", world_size), whole_number(op, "align", align)
    if world_size < 1:
        raise ValueError(f"{op}: world_size: expected at least 1, got {world_size}")
    rows, keys = int64s([0] * world_size), int64s([0] * world_size)
    with opened(pattern) as handle:
        if core().fretwork_pattern_shard(handle, world_size, align, rows, keys) != 0:
            raise ValueError(last_error())
    return Shards(pattern, _between(list(rows)), _between(list(keys)))


def equal_ranges(length: int, world_size: int) -> Ranges:
    """Contiguous ranges that differ by one row at most."""
    return _between([(rank + 1) * length // world_size for rank in range(world_size)])


def _between(ends: Sequence[int]) -> Ranges:
    return tuple(zip((0, *ends), ends, strict=False))


@functools.lru_cache(maxsize=1024)
def keys_of_rows(pattern: Pattern, rows: tuple[int, int], owners: Ranges) -> np.ndarray:
    """(rank, first, last) for all keys that some rows have, ascending, cut where the owners' ranges end."""
    ends, room = int64s([last for _, last in owners]), 256
    with opened(pattern) as handle:
        while True:
            found = np.empty((room, 3), np.int64)
            count = int(
                core().fretwork_pattern_rows_keys(handle, *rows, ends, len(ends), found.ctypes.data, len(found))
            )
            if count < 0:
                raise ValueError(last_error())
            if count <= room:
                return found[:count]
            room = count
