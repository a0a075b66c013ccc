"""How long calls take on this machine: interleaved rounds, medians, and on a GPU the time of the GPU alone.

On a GPU the L2 cache is flushed before each call, and the host issues the call while the GPU still has work, so that
the time it takes to do so does not count. On a CPU a call runs for a while before it is timed, as caches hold what the
call before it left there.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

_Key = TypeVar("_Key")
_FLUSH = 1 << 28  # bytes, more than any L2 cache has
_WARM, _TIMED = 0.004, 0.008  # seconds of a turn on a CPU


def medians(
    calls: Mapping[_Key, Callable[[], object]], device: torch.device, seconds: float = 1.0
) -> dict[_Key, float]:
    """Milliseconds of each call; at least three rounds, and more as `seconds` allow."""
    times: dict[_Key, list[float]] = {key: [] for key in calls}
    for call in calls.values():
        call()
        call()
    turn = _gpu_turns(device) if device.type == "cuda" else _cpu_turn
    began = time.perf_counter()
    for done in range(50):
        if done >= 3 and time.perf_counter() - began > seconds:
            break
        order = list(calls)
        for key in order[done % len(order) :] + order[: done % len(order)]:  # each has other neighbours in time
            times[key] += turn(calls[key])
    return {key: statistics.median(found) for key, found in times.items()}


def _cpu_turn(call: Callable[[], object]) -> list[float]:
    _repeated(call, _WARM)
    return _repeated(call, _TIMED)


def _repeated(call: Callable[[], object], seconds: float) -> list[float]:
    """Milliseconds of calls for so long, at least one."""
    found: list[float] = []
    began = time.perf_counter()
    while not found or time.perf_counter() - began < seconds:
        before = time.perf_counter()
        call()
        found.append((time.perf_counter() - before) * 1e3)
    return found


def _gpu_turns(device: torch.device) -> Callable[[Callable[[], object]], list[float]]:
    flush = torch.empty(_FLUSH, dtype=torch.uint8, device=device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def turn(call: Callable[[], object]) -> list[float]:
        for fills in (4, 16, 64):  # of some 60 µs each, until they last longer than the host needs to issue the call
            for _ in range(fills):
                flush.zero_()
            begin.record()
            call()
            end.record()
            in_time = not begin.query()
            torch.cuda.synchronize(device)
            if in_time:
                break
        return [begin.elapsed_time(end)]

    return turn
