"""Tensors from rank to rank through torch.distributed, in rounds: in round d a rank sends d ranks ahead, or back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fretwork._checks import fail
from fretwork._shapes import Shape


class Exchange:
    """Tensors to each peer that `gives` has some for, and tensors of `shapes[peer]` from each of these.

    Two rounds are under way at a time: one travels while the caller works on what the one before brought.
    """

    def __init__(
        self,
        op: str,
        group: dist.ProcessGroup,
        gives: Callable[[int], Sequence[Tensor]],
        shapes: dict[int, list[Shape]],
        like: Tensor,
        back: bool = False,
    ) -> None:
        self._op, self._group, self._gives, self._shapes, self._like = op, group, gives, shapes, like
        self._step, self._next = -1 if back else 1, 1
        self._posted: deque[tuple[int, list[Tensor], list[Tensor], list[Any]]] = deque()

    def post(self) -> None:
        """Starts the next round in which this rank has a part, if one is left."""
        rank, world = self._group.rank(), self._group.size()
        while self._next < world:
            distance = self._step * self._next
            to, source = (rank + distance) % world, (rank - distance) % world
            self._next += 1
            given = [t.contiguous() for t in self._gives(to)]
            arriving = [self._like.new_empty(tuple(shape)) for shape in self._shapes.get(source, ())]
            ops = [dist.P2POp(dist.isend, t, group=self._group, group_peer=to) for t in given if t.numel()]
            ops += [dist.P2POp(dist.irecv, t, group=self._group, group_peer=source) for t in arriving if t.numel()]
            if ops:
                with explained(self._op):
                    self._posted.append((source, arriving, given, dist.batch_isend_irecv(ops)))
                return

    def arrivals(self) -> Iterator[tuple[int, list[Tensor]]]:
        """(peer, what it sent), one after another, until all is sent and has come."""
        self.post()
        while self._posted:
            self.post()
            peer, arrived, _, works = self._posted.popleft()
            with explained(self._op):
                for work in works:
                    work.wait()
            if arrived:
                yield peer, arrived


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


def gathered(op: str, group: dist.ProcessGroup, numbers: list[int], device: torch.device) -> list[list[int]]:
    """The numbers of every rank."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    every = [torch.empty_like(mine) for _ in range(group.size())]
    with explained(op):
        dist.all_gather(every, mine, group=group)
        return torch.stack(every).tolist()  # type: ignore[no-any-return]
