"""What one rank computes and what travels to it, planned from patterns and ranges alone.

A rank's rows see its own keys and ranges of others'. Ranges that touch its own keys and are short (the halo of a
window) are put beside them, and only the rows near that end wait for them: each of these rows has its keys in one
piece. Other ranges are pieces of their own, whose results are merged by their log-sum-exp.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from fretwork.distributed.shards import Ranges, keys_of_rows
from fretwork.patterns import Pattern
from fretwork.patterns.pattern import placed

if TYPE_CHECKING:
    import torch

Range = tuple[int, int]

# Kernels take rows and keys by tiles of at most so many; rows that begin at a multiple are computed as in one process.
_TILE = 128
# A piece has no gap longer than this share of it: memory goes to gaps, and a kernel call to each piece.
_GAP = 0.25
_FEW_RANGES = 8
# Received keys are kept for the gradient up to so many equal parts of all keys, and up to so many are on their way.
_KEPT, _AHEAD = 2, 4


@dataclass(frozen=True)
class Places:
    """Rows (dimension 2) of a tensor, as ranges."""

    ranges: tuple[Range, ...]
    _index: dict[torch.device, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def count(self) -> int:
        return sum(last - first for first, last in self.ranges)

    def take(self, t: torch.Tensor) -> torch.Tensor:
        """The rows: a view where they are one range."""
        if len(self.ranges) == 1:
            first, last = self.ranges[0]
            return t[:, :, first:last]
        import torch

        if len(self.ranges) <= _FEW_RANGES:
            return torch.cat([t[:, :, first:last] for first, last in self.ranges], 2)
        return t.index_select(2, self._at(t.device))

    def put(self, t: torch.Tensor, rows: torch.Tensor, add: bool = False) -> None:
        """Writes or adds rows there. No place is named twice, so the order does not matter."""
        if len(self.ranges) > _FEW_RANGES:
            index = self._at(t.device)
            t[:, :, index] = t[:, :, index] + rows if add else rows
            return
        done = 0
        for first, last in self.ranges:
            part = rows[:, :, done : done + last - first]
            if add:
                t[:, :, first:last] += part
            else:
                t[:, :, first:last] = part
            done += last - first

    def _at(self, device: torch.device) -> torch.Tensor:
        import torch

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
    """Attention of some of a rank's rows on one piece of keys."""

    rows: Range  # among the rank's
    keys: Range  # among all
    patterns: tuple[Pattern, ...]
    own: tuple[Range, Range] | None  # places among the rank's keys, and the same in the piece
    sources: tuple[Source, ...]
    merges: bool  # with what the rows have, else it is their first
    pad_rows: int  # empty rows and keys at the end
    pad_keys: int

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
    receives: dict[int, int]  # rows of keys by peer
    gives: dict[int, Places]  # of the rank's own keys
    steps: tuple[Step, ...]  # in the order in which their keys come
    fetches_again: tuple[bool, ...]  # of each rank: received keys that are too many to keep until the gradient
    room: int  # for keys that are on their way

    @property
    def fetches(self) -> bool:
        """Whether this rank gets keys again for the gradient."""
        return self.fetches_again[self.rank]


@functools.lru_cache(maxsize=256)
def plan_of(patterns: tuple[Pattern, ...], rows: Ranges, keys: Ranges, rank: int, aligned: bool) -> Plan:
    """The plan of a rank. `aligned` ends the keys of each step at the position of its last row, as slopes need."""
    needs = _needs_of_ranks(patterns, rows, keys)
    first = keys[rank][0]
    gives = {
        peer: Places(tuple((a - first, b - first) for a, b in found[rank]))
        for peer, found in enumerate(needs)
        if rank in found
    }
    return Plan(
        rank,
        {peer: _count(ranges) for peer, ranges in needs[rank].items()},
        gives,
        tuple(_Planner(patterns, rows[rank], keys, rank, needs[rank], aligned).steps()),
        tuple(again for _, again in received(patterns, rows, keys)),
        _parts(_AHEAD, keys),
    )


@functools.lru_cache(maxsize=256)
def received(patterns: tuple[Pattern, ...], rows: Ranges, keys: Ranges) -> tuple[tuple[int, bool], ...]:
    """The keys that each rank receives, and whether these are too many to keep until the gradient."""
    most = _parts(_KEPT, keys)
    counts = [sum(_count(ranges) for ranges in found.values()) for found in _needs_of_ranks(patterns, rows, keys)]
    return tuple((count, count > most) for count in counts)


@functools.lru_cache(maxsize=256)
def _needs_of_ranks(patterns: tuple[Pattern, ...], rows: Ranges, keys: Ranges) -> tuple[dict[int, list[Range]], ...]:
    """The keys of others that each rank's rows have."""
    distinct = tuple(dict.fromkeys(patterns))
    needs = [_needs(distinct, range_, keys) for range_ in rows]
    for rank, found in enumerate(needs):
        found.pop(rank, None)
    return tuple(needs)


def _parts(number: int, keys: Ranges) -> int:
    """Keys of some equal parts."""
    return number * keys[-1][1] // len(keys)


def _count(ranges: Iterable[Range]) -> int:
    return sum(last - first for first, last in ranges)


def _needs(patterns: Iterable[Pattern], rows: Range, keys: Ranges) -> dict[int, list[Range]]:
    """The keys that some rows have, by the rank that has them."""
    tables = [keys_of_rows(pattern, rows, keys) for pattern in patterns]
    found: dict[int, list[Range]] = {}
    for rank, first, last in np.concatenate(tables).tolist():
        found.setdefault(rank, []).append((first, last))
    return found if len(tables) == 1 else {rank: joined(ranges) for rank, ranges in found.items()}


def joined(ranges: Iterable[Range]) -> list[Range]:
    """The same places as ranges that are as long as can be, in order."""
    every: list[Range] = []
    for first, last in sorted(ranges):
        if every and first <= every[-1][1]:
            every[-1] = (every[-1][0], max(every[-1][1], last))
        else:
            every.append((first, last))
    return every


def _hull(ranges: Sequence[Range]) -> Range | None:
    return (min(a for a, _ in ranges), max(b for _, b in ranges)) if ranges else None


def meet(a: Range, b: Range) -> Range | None:
    both = max(a[0], b[0]), min(a[1], b[1])
    return both if both[0] < both[1] else None


class _Planner:
    """The steps of one rank."""

    def __init__(
        self,
        patterns: tuple[Pattern, ...],
        rows: Range,
        keys: Ranges,
        rank: int,
        needs: dict[int, list[Range]],
        aligned: bool,
    ) -> None:
        self.patterns, self.distinct = patterns, tuple(dict.fromkeys(patterns))
        self.rows, self.keys, self.rank, self.own = rows, keys, rank, keys[rank]
        self.needs, self.aligned = needs, aligned

    def steps(self) -> list[Step]:
        if self.rows[0] == self.rows[1]:
            return []
        halo, world = self._halo(), len(self.keys)
        peers = [(self.rank - d) % world for d in range(1, world)]  # in the order in which they send
        blocks = self._blocks(halo)
        blocks.sort(key=lambda step: max((peers.index(source.peer) + 1 for source in step.sources), default=0))
        return blocks + [step for peer in peers for step in self._far(peer, halo)]

    def _halo(self) -> Range:
        """The rank's own keys with short ranges beside them."""
        begin, end = self.own
        every = joined(r for ranges in self.needs.values() for r in ranges)
        left = next((a for a, b in every if b == begin), begin)
        right = next((b for a, b in every if a == end), end)
        short = 2 * (begin - left + right - end) <= end - begin
        return (left, right) if short and begin < end else self.own

    def _blocks(self, halo: Range) -> list[Step]:
        """The rows with their own keys and the halo, each row once."""
        (first, last), (begin, end) = self.rows, self.own
        top, bottom = first, last  # rows before the one and from the other on wait for keys
        if halo[0] < begin and (near := self._rows_of((halo[0], begin))):
            top = min(last, first + -(-(near[1] - first) // _TILE) * _TILE)
        if halo[1] > end and (near := self._rows_of((end, halo[1]))):
            bottom = first + (near[0] - first) // _TILE * _TILE
        if top >= bottom:
            return [self._step(self.rows, halo, halo, False)]
        steps = [self._step((top, bottom), self.own, halo, False)]
        for rows in ((first, top), (bottom, last)):
            if rows[0] < rows[1]:
                needed = (r for ranges in _needs(self.distinct, rows, self.keys).values() for r in ranges)
                piece = _hull([r for both in needed if (r := meet(both, halo))])
                steps.append(self._step(rows, piece or (begin, begin), halo, False))
        return steps

    def _far(self, peer: int, halo: Range) -> list[Step]:
        """What comes from a peer beside the halo, in pieces without long gaps."""
        found = [r for r in self.needs.get(peer, []) if not meet(r, halo)]
        if not found:
            return []
        most = _GAP * (found[-1][1] - found[0][0])
        pieces = [found[0]]
        for r in found[1:]:
            if r[0] - pieces[-1][1] > most:
                pieces.append(r)
            else:
                pieces[-1] = pieces[-1][0], r[1]
        return [self._step(rows, piece, piece, True, (peer,)) for piece in pieces if (rows := self._rows_of(piece))]

    def _rows_of(self, keys: Range) -> Range | None:
        """From the first to the last of the rank's rows that have some of these keys."""
        first, last = self.rows
        owners = ((0, first), (first, last))
        tables = [keys_of_rows(pattern.T, keys, owners).tolist() for pattern in self.distinct]
        return _hull([(a, b) for table in tables for owner, a, b in table if owner == 1])

    def _step(self, rows: Range, piece: Range, within: Range, merges: bool, peers: Iterable[int] | None = None) -> Step:
        """Of the keys that others have only those `within`, and of `peers` where the piece is theirs."""
        own = meet(piece, self.own)
        pad_rows = pad_keys = 0
        if self.aligned:
            queries, keys = self.patterns[0].shape[-2:]
            short = rows[1] + keys - queries - piece[1]
            pad_rows, pad_keys = max(-short, 0), max(short, 0)
        return Step(
            _moved(rows, -self.rows[0]),
            piece,
            self._sliced(rows, piece, pad_rows, pad_keys),
            (_moved(own, -self.own[0]), _moved(own, -piece[0])) if own else None,
            tuple(self._sources(piece, within, self.needs if peers is None else peers)),
            merges,
            pad_rows,
            pad_keys,
        )

    def _sources(self, piece: Range, within: Range, peers: Iterable[int]) -> Iterable[Source]:
        for peer in peers:
            before, taken, places = 0, [], []
            for r in self.needs[peer]:
                if meet(r, within) and (both := meet(r, piece)):
                    taken.append(_moved(both, before - r[0]))
                    places.append(_moved(both, -piece[0]))
                before += r[1] - r[0]
            if taken:
                yield Source(peer, Places(tuple(taken)), Places(tuple(places)))

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
