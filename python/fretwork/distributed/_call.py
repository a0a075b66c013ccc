"""What a call of attention over ranks is beside its operands."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor

from fretwork.distributed._steps import Plan, plan_of
from fretwork.distributed.shards import Ranges
from fretwork.patterns import Pattern


@dataclass(eq=False)
class Call:
    """The same on every rank but for the padding."""

    patterns: tuple[Pattern, ...]
    rows: Ranges
    keys: Ranges
    group: dist.ProcessGroup
    scale: float | None
    softcap: float
    precision: str
    slopes: Tensor | None
    padding: Tensor | None  # (B, this rank's keys), or (B, all keys)
    padding_is_whole: bool
    kept_padding: dict[int, list[Tensor]] = field(default_factory=dict)

    @functools.cached_property
    def plan(self) -> Plan:
        """Of ranges."""
        return plan_of(self.patterns, self.rows, self.keys, self.group.rank(), self.slopes is not None)
