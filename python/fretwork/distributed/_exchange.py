"""Tensors from rank to rank through torch.distributed, in rounds: in round d a rank sends d ranks ahead, or back."""

from __future__ import annotations

import hashlib
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fretwork._checks import fail
from fretwork._shapes import Shape


class _Round(NamedTuple):
    """Messages under way, and the tensors that they read and write."""

    source: int
    rows: int  # whose memory they take
    arriving: list[Tensor]
    given: list[Tensor]
    works: list[Any]


class Exchange:
    """Tensors to each peer that `gives` has some for, and tensors of `shapes[peer]` (B, H, rows, …) from each of these.

    A round waits for the work that a device was given before it, so rounds are posted ahead: while they take the memory
    of at most `room` rows, and two beside the one that the caller waits for in any case. A round takes the memory of
    the rows that arrive, and of the rows that leave in copies, `copies[peer]`. Transports that look at tags (Gloo) let
    no message of another call in.
    """

    def __init__(
        self,
        op: str,
        group: dist.ProcessGroup,
        gives: Callable[[int], Sequence[Tensor]],
        shapes: dict[int, list[Shape]],
        like: Tensor,
        room: int,
        copies: Mapping[int, int] | None = None,
        back: bool = False,
        tag: int = 0,
    ) -> None:
        self._op, self._group, self._gives, self._shapes, self._like = op, group, gives, shapes, like
        self._tag = tag
        self._step, self._next = -1 if back else 1, 1
        self._copies, self._room = copies or {}, room  # the room less what posted rounds take
        self._posted: deque[_Round] = deque()

    def post(self, least: int = 1) -> None:
        """Starts rounds in which this rank has a part, until so many are under way and there is no room for more."""
        rank, world = self._group.rank(), self._group.size()
        while self._next < world:
            distance = self._step * self._next
            to, source = (rank + distance) % world, (rank - distance) % world
            shapes = self._shapes.get(source, [])
            rows = self._copies.get(to, 0) + (int(shapes[0][2]) if shapes else 0)
            if len(self._posted) >= least and rows > self._room:
                return
            self._next += 1
            given = [t.contiguous() for t in self._gives(to)]
            arriving = [self._like.new_empty(tuple(shape)) for shape in shapes]
            ops = [self._message(dist.isend, t, to) for t in given if t.numel()]
            ops += [self._message(dist.irecv, t, source) for t in arriving if t.numel()]
            if given or arriving:
                self._room -= rows
                with explained(self._op):
                    works = dist.batch_isend_irecv(ops) if ops else []  # tensors may be empty
                self._posted.append(_Round(source, rows, arriving, given, works))

    def _message(self, way: Callable[..., Any], t: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(way, t, group=self._group, tag=self._tag, group_peer=peer)

    def arrivals(self) -> Iterator[tuple[int, list[Tensor]]]:
        """(peer, what it sent), one after another, until all is sent and has come."""
        while True:
            self.post(3)
            if not self._posted:
                return
            first = self._posted.popleft()
            with explained(self._op):
                for work in first.works:
                    work.wait()
            self._room += first.rows
            if first.arriving:
                yield first.source, first.arriving


def checked_group(op: str, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group, by default all ranks, of which this process is one."""
    if not dist.is_initialized():
        fail(op, "group", "torch.distributed to be initialised (dist.init_process_group)", "none")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        outside = group is dist.GroupMember.NON_GROUP_MEMBER
        got = "one that this rank is not in" if outside else type(group).__name__
        fail(op, "group", "a process group that this rank is in", got)
    return group


class explained:
    """Says of an error of the transport whose it is, and what may have led to it."""

    def __init__(self, op: str) -> None:
        self._op = op

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RuntimeError):
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise RuntimeError(
                f"{self._op}: group: expected every rank to make the same call within the group's timeout, got {first}"
            ) from error


# Calls that a group has agreed on, and the tags of their messages: small enough for every transport.
_TAGS = 2**15
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, int]] = weakref.WeakKeyDictionary()


def agreed(
    op: str, group: dist.ProcessGroup, key: object, values: Callable[[], dict[str, object]], device: torch.device
) -> int:
    """Compares checksums of a call's arguments with the other ranks, the first time that a group sees such a call.

    Gives the tag of the call.
    """
    known = _agreed.setdefault(group, {})
    if (op, key) in known or group.size() == 1:
        return known.get((op, key), 0)
    mine = values()
    every = _gathered(op, group, [_checksum(value) for value in mine.values()], device)
    for n, (name, value) in enumerate(mine.items()):
        others = [rank for rank, numbers in enumerate(every) if numbers[n] != every[group.rank()][n]]
        if others:
            got = f"{str(value)[:200]} on rank {group.rank()} and something else on rank {others[0]}"
            fail(op, name, "the same on every rank of the group", got)
    known[op, key] = sum(every[0]) % _TAGS
    return known[op, key]


def _checksum(value: object) -> int:
    """A number that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little", signed=True)


def _gathered(op: str, group: dist.ProcessGroup, numbers: list[int], device: torch.device) -> list[list[int]]:
    """The numbers of every rank."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    every = [torch.empty_like(mine) for _ in range(group.size())]
    with explained(op):
        dist.all_gather(every, mine, group=group)
        return torch.stack(every).tolist()  # type: ignore[no-any-return]
