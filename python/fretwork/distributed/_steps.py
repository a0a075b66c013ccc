"""What one rank computes and what travels to it, planned from patterns and ranges alone.

A rank's rows see its own keys and ranges of others'. Ranges that touch its own keys and are short (the halo of a
window) are put beside them, and only the rows near that end wait for them: each of these rows has its keys in one
piece. Other ranges are pieces of their own, whose results are merged by their log-sum-exp.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from fretwork.distributed.shards import Ranges, keys_of_rows
from fretwork.patterns import Pattern
from fretwork.patterns.pattern import placed

Range = tuple[int, int]

# Kernels take rows and keys by tiles of at most so many; rows that begin at a multiple are computed as in one process.
_TILE = 128
# A piece has no gap longer than this share of it: memory goes to gaps, and a kernel call to each piece.
_GAP = 0.25
_FEW_RANGES = 8


@dataclass(frozen=True)
class Places:
    """Ranges along a dimension, as one tensor that holds them in a row sees them."""

    ranges: tuple[Range, ...]
    _index: dict[torch.device, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def count(self) -> int:
        return sum(last - first for first, last in self.ranges)

    def take(self, t: torch.Tensor) -> torch.Tensor:
        """These rows (dimension 2) of a tensor, a view of it where they are one range."""
        if len(self.ranges) == 1:
            first, last = self.ranges[0]
            return t[:, :, first:last]
        if len(self.ranges) <= _FEW_RANGES:
            return torch.cat([t[:, :, first:last] for first, last in self.ranges], 2)
        return t.index_select(2, self._at(t.device))

    def put(self, t: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes rows there."""
        self._write(t, rows, add=False)

    def add(self, t: torch.Tensor, rows: torch.Tensor) -> None:
        """Adds rows there. No place is named twice, so the order does not matter."""
        self._write(t, rows, add=True)

    def _write(self, t: torch.Tensor, rows: torch.Tensor, add: bool) -> None:
        if len(self.ranges) > _FEW_RANGES:
            index = self._at(t.device)
            t[:, :, index] = t[:, :, index] + rows if add else rows.to(t.dtype)
            return
        done = 0
        for first, last in self.ranges:
            part = rows[:, :, done : done + last - first]
            t[:, :, first:last].add_(part) if add else t[:, :, first:last].copy_(part)
            done += last - first

    def _at(self, device: torch.device) -> torch.Tensor:
        if device not in self._index:
            every = np.concatenate([np.arange(first, last) for first, last in self.ranges])
            self._index[device] = torch.from_numpy(every).to(device)
        return self._index[device]


@dataclass(frozen=True)
class Source:
    """Rows of what a peer sends, and where they lie among the keys of a step."""

    peer: int
    rows: Places
    keys: Places


@dataclass(frozen=True)
class Step:
    """Attention of some of the rank's rows on one piece of keys, both as places in the rank's own rows or in all keys."""

    rows: Range
    keys: Range
    patterns: tuple[Pattern, ...]
    own: tuple[Range, Range] | None  # places among the rank's keys, and the same in the piece
    sources: tuple[Source, ...]
    merges: bool  # into what the rows have, else it is their first
    pad_rows: int = 0  # empty rows and keys at the end
    pad_keys: int = 0

    @property
    def length(self) -> int:
        """Keys of the piece."""
        return self.keys[1] - self.keys[0] + self.pad_keys

    @property
    def is_full(self) -> bool:
        """Whether something fills all of the piece."""
        own = self.own[1][1] - self.own[1][0] if self.own else 0
        return own + sum(source.keys.count for source in self.sources) == self.length


@dataclass(frozen=True)
class Plan:
    """A rank's part of an attention. Peers are ranks of the group."""

    rank: int
    rows: Range
    keys: Range
    receives: dict[int, int]  # rows of keys by peer
    gives: dict[int, Places]  # of the rank's own keys
    steps: tuple[Step, ...]  # in the order in which their keys come
    fetches_again: tuple[bool, ...]  # of each rank: received keys that are too many to keep until the gradient


@functools.lru_cache(maxsize=256)
def plan_of(patterns: tuple[Pattern, ...], rows: Ranges, keys: Ranges, rank: int, aligned: bool) -> Plan:
    """The plan of a rank. `aligned` ends the keys of each step at the position of its last row, as slopes need."""
    distinct = tuple(dict.fromkeys(patterns))
    needs = [_needs(distinct, rows[peer], keys) for peer in range(len(rows))]
    mine = {peer: found for peer, found in needs[rank].items() if peer != rank}
    first = keys[rank][0]
    gives = {
        peer: Places(tuple((a - first, b - first) for a, b in found[rank]))
        for peer, found in enumerate(needs)
        if peer != rank and found.get(rank)
    }
    received = [sum(b - a for p, found in needs[r].items() if p != r for a, b in found) for r in range(len(rows))]
    steps = _Planner(patterns, distinct, rows[rank], keys, rank, mine, aligned).steps()
    return Plan(
        rank,
        rows[rank],
        keys[rank],
        {peer: sum(b - a for a, b in found) for peer, found in mine.items()},
        gives,
        tuple(steps),
        tuple(count > end - begin for count, (begin, end) in zip(received, keys, strict=True)),
    )


def _needs(patterns: Iterable[Pattern], rows: Range, keys: Ranges) -> dict[int, list[Range]]:
    """The keys that some rows have, by the rank that has them."""
    tables = [keys_of_rows(pattern, rows, keys) for pattern in patterns]
    found: dict[int, list[Range]] = {}
    if len(tables) == 1:
        for rank, first, last in tables[0].tolist():
            found.setdefault(rank, []).append((first, last))
        return found
    every = np.concatenate(tables)
    for rank in np.unique(every[:, 0]).tolist():
        found[rank] = _joined(every[every[:, 0] == rank, 1:].tolist())
    return found


def _joined(ranges: Iterable[Sequence[int]]) -> list[Range]:
    """The same places as ranges that are as long as can be, in order."""
    every: list[Range] = []
    for first, last in sorted((int(a), int(b)) for a, b in ranges):
        if every and first <= every[-1][1]:
            every[-1] = (every[-1][0], max(every[-1][1], last))
        else:
            every.append((first, last))
    return every


def _parts_of(piece: Range, ranges: Iterable[Range]) -> list[Range]:
    """What the ranges have of a piece."""
    return [(max(a, piece[0]), min(b, piece[1])) for a, b in ranges if max(a, piece[0]) < min(b, piece[1])]


class _Planner:
    """The steps of one rank."""

    def __init__(
        self,
        patterns: tuple[Pattern, ...],
        distinct: tuple[Pattern, ...],
        rows: Range,
        keys: Ranges,
        rank: int,
        needs: dict[int, list[Range]],
        aligned: bool,
    ) -> None:
        self.patterns, self.distinct, self.rows, self.keys, self.rank = patterns, distinct, rows, keys, rank
        self.needs, self.aligned, self.own = needs, aligned, keys[rank]
        self.sizes = patterns[0].shape[-2:]

    def steps(self) -> list[Step]:
        if self.rows[0] == self.rows[1]:
            return []
        halo = self._halo()
        world = len(self.keys)
        first = self._blocks(halo)
        # Those whose keys are here come first, and others in the order in which peers send.
        first.sort(key=lambda step: max(((self.rank - s.peer) % world for s in step.sources), default=0))
        return first + [step for d in range(1, world) for step in self._far((self.rank - d) % world, halo)]

    def _halo(self) -> Range:
        """The rank's own keys with the short ranges beside them."""
        begin, end = self.own
        every = _joined(r for found in self.needs.values() for r in found)
        left = next((a for a, b in every if b == begin), begin)
        right = next((b for a, b in every if a == end), end)
        short = 2 * (begin - left + right - end) <= end - begin
        return (left, right) if short and begin < end else self.own

    def _blocks(self, halo: Range) -> list[Step]:
        """The rows with their own keys and the halo, each row once."""
        (first, last), (begin, end) = self.rows, self.own
        top, bottom = first, last  # rows before one and from the other on wait for keys
        if halo[0] < begin and (near := self._rows_of((halo[0], begin))):
            top = min(last, first + -(-(near[1] - first) // _TILE) * _TILE)
        if halo[1] > end and (near := self._rows_of((end, halo[1]))):
            bottom = first + (near[0] - first) // _TILE * _TILE
        if top >= bottom:
            return [self._step(self.rows, halo, halo, False)]
        steps = [self._step((top, bottom), self.own, halo, False)]
        for rows in ((first, top), (bottom, last)):
            if rows[0] < rows[1]:
                wanted = [r for found in _needs(self.distinct, rows, self.keys).values() for r in _parts_of(halo, found)]
                piece = (min(a for a, _ in wanted), max(b for _, b in wanted)) if wanted else (begin, begin)
                steps.append(self._step(rows, piece, halo, False))
        return steps

    def _far(self, peer: int, halo: Range) -> list[Step]:
        """What comes from a peer beyond the halo, in pieces without long gaps."""
        found = [r for r in self.needs.get(peer, []) if not halo[0] <= r[0] < halo[1]]
        if not found:
            return []
        most = _GAP * (found[-1][1] - found[0][0])
        pieces = [[found[0]]]
        for before, r in zip(found, found[1:], strict=False):
            if r[0] - before[1] > most:
                pieces.append([])
            pieces[-1].append(r)
        steps = []
        for ranges in pieces:
            piece = ranges[0][0], ranges[-1][1]
            rows = self._rows_of(piece)
            if rows is not None:
                steps.append(self._step(rows, piece, piece, True))
        return steps

    def _rows_of(self, keys: Range) -> Range | None:
        """From the first to the last of the rank's rows that have some of these keys."""
        first, last = self.rows
        owners = ((0, first), (first, last), (last, self.sizes[0]))
        found = [keys_of_rows(pattern.T, keys, owners) for pattern in self.distinct]
        rows = [(int(a), int(b)) for table in found for rank, a, b in table.tolist() if rank == 1]
        return (min(a for a, _ in rows), max(b for _, b in rows)) if rows else None

    def _step(self, rows: Range, piece: Range, within: Range, merges: bool) -> Step:
        begin = piece[0]
        own = _parts_of(piece, [self.own])
        sources = []
        for peer, found in self.needs.items():
            at, taken, places = 0, [], []
            for a, b in found:
                if within[0] <= a < within[1]:
                    for c, d in _parts_of(piece, [(a, b)]):
                        taken.append((at + c - a, at + d - a))
                        places.append((c - begin, d - begin))
                at += b - a
            if taken:
                sources.append(Source(peer, Places(tuple(taken)), Places(tuple(places))))
        pad_rows = pad_keys = 0
        if self.aligned:
            short = rows[1] + self.sizes[1] - self.sizes[0] - piece[1]
            pad_rows, pad_keys = max(-short, 0), max(short, 0)
        return Step(
            (rows[0] - self.rows[0], rows[1] - self.rows[0]),
            piece,
            self._sliced(rows, piece, pad_rows, pad_keys),
            (_moved(own[0], -self.own[0]), _moved(own[0], -begin)) if own else None,
            tuple(sources),
            merges,
            pad_rows,
            pad_keys,
        )

    def _sliced(self, rows: Range, keys: Range, pad_rows: int, pad_keys: int) -> tuple[Pattern, ...]:
        known: dict[Pattern, Pattern] = {}
        for pattern in self.distinct:
            piece = pattern[rows[0] : rows[1], keys[0] : keys[1]]
            if pad_rows or pad_keys:
                piece = placed(piece.text, piece.shape[0] + pad_rows, piece.shape[1] + pad_keys, 0, 0)
            known[pattern] = piece
        return tuple(known[pattern] for pattern in self.patterns)


def _moved(r: Range, by: int) -> Range:
    return r[0] + by, r[1] + by
