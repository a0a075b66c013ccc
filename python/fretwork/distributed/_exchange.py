"""Rows from rank to rank through torch.distributed, in rounds: in round d a rank sends d ranks ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """One tensor to each peer that `gives` names, one from each that `sizes` names.

    Two rounds are under way at a time: the next one travels while the caller works on what came by the last.
    """

    def __init__(
        self,
        op: str,
        group: dist.ProcessGroup,
        gives: Callable[[int], Tensor | None],
        sizes: dict[int, int],
        like: Tensor,
    ) -> None:
        self._op, self._group, self._gives, self._sizes, self._like = op, group, gives, sizes, like
        self._rank, self._world = group.rank(), group.size()
        self._next = 1
        self._posted: deque[tuple[int, Tensor | None, list[Any]]] = deque()
        self._sent: list[Tensor] = []

    def post(self) -> None:
        """Starts the next round that is any, if one is left."""
        while self._next < self._world:
            to, source = (self._rank + self._next) % self._world, (self._rank - self._next) % self._world
            self._next += 1
            size, given = self._sizes.get(source, 0), self._gives(to)
            if not size and (given is None or not given.numel()):
                continue
            arrives = self._like.new_empty(size) if size else None
            ops = []
            if given is not None and given.numel():
                self._sent.append(given)
                ops.append(dist.P2POp(dist.isend, given, group=self._group, group_peer=to))
            if arrives is not None:
                ops.append(dist.P2POp(dist.irecv, arrives, group=self._group, group_peer=source))
            with explained(self._op):
                self._posted.append((source, arrives, dist.batch_isend_irecv(ops)))
            return

    def arrivals(self) -> Any:
        """(peer, what it sent), one after another, each while the next is on its way."""
        self.post()
        while self._posted:
            self.post()
            peer, arrived, works = self._posted.popleft()
            with explained(self._op):
                for work in works:
                    work.wait()
            if arrived is not None:
                yield peer, arrived


class explained:
    """Says of an error of the transport whose it is."""

    def __init__(self, op: str) -> None:
        self._op = op

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            raise RuntimeError(
                f"{self._op}: group: expected every rank to make the same call within the group's timeout, got "
                f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
            ) from error


def gathered(op: str, group: dist.ProcessGroup, numbers: list[int], device: torch.device) -> list[list[int]]:
    """The numbers of every rank."""
    mine = torch.tensor(numbers, dtype=torch.int64, device=device)
    every = [torch.empty_like(mine) for _ in range(group.size())]
    with explained(op):
        dist.all_gather(every, mine, group=group)
        return torch.stack(every).tolist()  # type: ignore[no-any-return]
