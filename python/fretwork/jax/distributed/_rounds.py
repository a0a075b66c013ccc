"""One program for all devices: which keys travel in which round, and what each device computes when they are there.

The steps are those of `fretwork.distributed`, of every rank. In a round some devices send keys to the device that is
`distance` ahead, all of them the same number, since XLA needs static shapes. A stage is what devices compute once its
rounds have arrived: a branch for each list of steps, and for each device the number of its branch.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fretwork._library import core
from fretwork.distributed._steps import Plan, Range, Step, plan_of
from fretwork.distributed.shards import equal_ranges
from fretwork.patterns import Pattern
from fretwork.patterns.pattern import opened

Places = tuple[Range, ...]

# A round sends each list of places by itself up to this number of lists; more lists share a permutation, padded.
_FEW_LISTS = 2
# Slices whose strides do not line up are compared up to this number of elements: in seconds, beyond it in minutes.
_FEW_ELEMENTS = 2**20


@dataclass(frozen=True, eq=False)
class Round:
    """Keys that travel at once. `places` of a sender's keys, if all senders send the same ones, else `table`.

    `table` has a row for each device. Its padding lies behind the sender's keys.
    """

    pairs: tuple[tuple[int, int], ...]  # sender and receiver
    count: int  # keys that each pair sends
    places: Places | None
    table: np.ndarray | None


@dataclass(frozen=True)
class Part:
    """Some rows of what came in a round, and their places in a step's piece of the keys."""

    round: int
    rows: Places
    keys: Places


@dataclass(frozen=True)
class LocalStep:
    """A `Step` without the rank's name. `place` is where its first row and key are in the whole.

    It merges with what rows have of earlier stages. Sinks join the first of a rank's own steps on a row.
    """

    rows: Range
    length: int
    patterns: tuple[Pattern, ...]
    own: tuple[Range, Range] | None
    parts: tuple[Part, ...]
    merges: bool
    sinks: bool
    pad_rows: int
    place: tuple[int, int] = field(compare=False)


@dataclass(frozen=True, eq=False)
class Stage:
    """`branches[branch_of[rank]]` is what a device computes when the rounds up to here have arrived.

    `first_keys[rank]` says for each of its steps where the piece of keys begins in the whole.
    """

    rounds: tuple[int, ...]
    branches: tuple[tuple[LocalStep, ...], ...]
    branch_of: tuple[int, ...]
    first_keys: np.ndarray

    @property
    def needs(self) -> tuple[int, ...]:
        """The rounds that some branch reads."""
        steps = (step for branch in self.branches for step in branch)
        return tuple(sorted({part.round for step in steps for part in step.parts}))


@dataclass(frozen=True, eq=False)
class Schedule:
    """Attention over the devices of an axis."""

    rounds: tuple[Round, ...]
    stages: tuple[Stage, ...]
    sends_again: bool  # for the gradient: received keys are too many to keep
    merges: bool

    @property
    def keys_sent(self) -> int:
        """By all devices together."""
        return sum(len(r.pairs) * r.count for r in self.rounds)


@functools.lru_cache(maxsize=256)
def schedule_of(patterns: tuple[Pattern, ...], devices: int, aligned: bool) -> Schedule:
    """The schedule of patterns of the whole, for equal parts. `aligned` as `plan_of` takes it."""
    queries, keys = patterns[0].shape[-2:]
    ranges = equal_ranges(queries, devices), equal_ranges(keys, devices)
    plans = [plan_of(patterns, *ranges, rank, aligned) for rank in range(devices)]
    rounds: list[Round] = []
    known: dict[tuple[int, int], int] = {}  # the round of a sender and a receiver
    by_distance: dict[int, list[int]] = {}
    for distance in range(1, devices):
        for one in _rounds(plans, distance, keys // devices):
            known |= {pair: len(rounds) for pair in one.pairs}
            by_distance.setdefault(distance, []).append(len(rounds))
            rounds.append(one)
    rows = queries // devices
    stages = [_stage(plans, rows, distance, known, by_distance.get(distance, [])) for distance in range(devices)]
    return Schedule(
        tuple(rounds),
        tuple(stage for stage in stages if stage.rounds or any(stage.branches)),
        any(plans[0].fetches_again),
        any(step.merges for plan in plans for step in plan.steps),
    )


# Rounds


def _rounds(plans: Sequence[Plan], distance: int, keys: int) -> Iterable[Round]:
    """What travels to the device so far ahead: as few permutations as keep the padding low."""
    sent = {}
    for sender, plan in enumerate(plans):
        if (places := plan.gives.get((sender + distance) % len(plans))) is not None:
            sent[sender] = places.ranges
    lists = dict.fromkeys(sent.values())
    if len(lists) <= _FEW_LISTS:
        groups = [[sender for sender, places in sent.items() if places == one] for one in lists]
    else:
        groups = _of_like_size({sender: _count(places) for sender, places in sent.items()})
    for senders in groups:
        pairs = tuple((sender, (sender + distance) % len(plans)) for sender in senders)
        alike = len({sent[sender] for sender in senders}) == 1
        count = max(_count(sent[sender]) for sender in senders)
        table = None if alike else _table({sender: sent[sender] for sender in senders}, len(plans), count, keys)
        yield Round(pairs, count, sent[senders[0]] if alike else None, table)


def _of_like_size(sizes: dict[int, int]) -> list[list[int]]:
    """Groups in which none is smaller than half of the largest, so that padding is at most what is needed."""
    groups: list[list[int]] = []
    for sender in sorted(sizes, key=lambda sender: -sizes[sender]):
        if groups and 2 * sizes[sender] >= sizes[groups[-1][0]]:
            groups[-1].append(sender)
        else:
            groups.append([sender])
    return [sorted(group) for group in groups]


def _table(sent: dict[int, Places], devices: int, count: int, keys: int) -> np.ndarray:
    table = np.tile(np.arange(keys, keys + count, dtype=np.int32), (devices, 1))
    for sender, places in sent.items():
        every = index_of(places)
        table[sender, : len(every)] = every
    return table


def _count(places: Places) -> int:
    return sum(last - first for first, last in places)


def index_of(places: Places) -> np.ndarray:
    """The places one by one."""
    return np.concatenate([np.arange(first, last, dtype=np.int32) for first, last in places])


# Stages


def _stage(
    plans: Sequence[Plan], rows: int, distance: int, known: dict[tuple[int, int], int], rounds: list[int]
) -> Stage:
    """The steps that wait for what comes from this far, and for nothing that comes from farther."""
    branches: list[tuple[LocalStep, ...]] = []
    branch_of, first_keys = [], []
    for rank, plan in enumerate(plans):
        waits = [(step, _farthest(step, rank, len(plans))) for step in plan.steps]
        late = any(step.merges and farthest < distance for step, farthest in waits)
        mine = tuple(_local(step, rank, rows, known, late) for step, farthest in waits if farthest == distance)
        same = (n for n, branch in enumerate(branches) if _alike(branch, mine))
        if (found := next(same, None)) is None:
            found = len(branches)
            branches.append(mine)
        branch_of.append(found)
        first_keys.append([step.place[1] for step in mine])
    most = max(map(len, first_keys))
    table = np.array([keys + [0] * (most - len(keys)) for keys in first_keys], np.int32)
    return Stage(tuple(rounds), tuple(branches), tuple(branch_of), table)


def _farthest(step: Step, rank: int, devices: int) -> int:
    return max(((rank - source.peer) % devices for source in step.sources), default=0)


def _local(step: Step, rank: int, rows: int, known: dict[tuple[int, int], int], late: bool) -> LocalStep:
    parts = tuple(Part(known[source.peer, rank], source.rows.ranges, source.keys.ranges) for source in step.sources)
    place = rank * rows + step.rows[0], step.keys[0]
    flags = {"merges": step.merges or late, "sinks": not step.merges}
    return LocalStep(
        step.rows, step.length, step.patterns, step.own, parts, **flags, pad_rows=step.pad_rows, place=place
    )


def _alike(a: tuple[LocalStep, ...], b: tuple[LocalStep, ...]) -> bool:
    """Whether two devices compute the same, so that one branch serves both."""
    if len(a) != len(b):
        return False
    for one, other in zip(a, b, strict=True):
        moved = tuple(there - here for here, there in zip(one.place, other.place, strict=True))
        if replace(one, patterns=()) != replace(other, patterns=()) or len(one.patterns) != len(other.patterns):
            return False
        pairs = dict.fromkeys(zip(one.patterns, other.patterns, strict=True))
        if not all(_same_elements(p, q, moved) for p, q in pairs):
            return False
    return True


@functools.lru_cache(maxsize=4096)
def _same_elements(p: Pattern, q: Pattern, moved: tuple[int, ...]) -> bool:
    """Whether two slices of a pattern, so far apart, hold the same. False too where that takes long to see."""
    if p == q:
        return True
    count = _elements(p)
    if p.shape != q.shape or _elements(q) != count:
        return False
    if count > _FEW_ELEMENTS and any(by % stride for stride in _strides(p) for by in moved):
        return False
    try:
        return _elements(p & q) == count
    except ValueError:
        return False


def _elements(pattern: Pattern) -> int:
    with opened(pattern) as handle:
        return int(core().fretwork_pattern_rows_nnz(handle, 0, pattern.shape[-2]))


def _strides(pattern: Pattern) -> list[int]:
    """Of the orders in which the pattern's parts are counted, as `describe` names them."""
    found = re.findall(r"(?:modulo|strides) ([\d, ]+):", pattern.describe())
    return [int(stride) for strides in found for stride in strides.split(",")]
