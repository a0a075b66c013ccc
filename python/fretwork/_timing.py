"""How calls are timed, here and in every benchmark: interleaved in one run, medians. On a GPU the L2 cache is flushed
before each call, which the host has issued when the clock starts; on a CPU a turn begins with calls that are not timed:
all find the caches as they left them."""

from __future__ import annotations

import ctypes
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import TypeVar

import torch

from fretwork._torch.private import gpu_sleep

Call = Callable[[], object]
_Key = TypeVar("_Key")


def medians(
    calls: Mapping[_Key, Call], device: torch.device, rounds: int = 15, seconds: float = 2.0
) -> dict[_Key, float]:
    """Median milliseconds of each call, in interleaved rounds; stops early after `seconds` once each ran 3 times."""
    of = turns(calls, device, rounds, seconds)
    return {name: statistics.median(ms for turn in all_turns for ms in turn) for name, all_turns in of.items()}


def turns(
    calls: Mapping[_Key, Call], device: torch.device, rounds: int = 15, seconds: float = 2.0
) -> dict[_Key, list[list[float]]]:
    """The times behind `medians`: of each call, for each round, the milliseconds of its turn (one on a GPU).

    Rounds have their own order, the same in every run: who comes behind a long dense product finds the GPU slower.
    """
    times: dict[_Key, list[list[float]]] = {name: [] for name in calls}
    order, orders = list(calls), random.Random(0)
    with nullcontext() if device.type == "cuda" else _memory_kept():
        for call in calls.values():
            call()
            call()
        turn = _gpu_timer() if device.type == "cuda" else _cpu_turn
        began = time.perf_counter()
        for n in range(rounds):
            orders.shuffle(order)
            for name in order:
                times[name].append(turn(calls[name]))
            if n >= 2 and time.perf_counter() - began > seconds:
                break
    return times


@contextmanager
def _memory_kept() -> Iterator[None]:
    """What is freed stays with the process, as torch keeps a GPU's memory: fresh pages of a large result, which the
    system clears first, would take as long as the product. `as_called` does without."""
    mmap_max, trim_threshold = -4, -1  # of malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
    try:
        yield
    finally:
        mallopt(mmap_max, 65536)
        mallopt(trim_threshold, 128 << 10)


def _cpu_turn(call: Call) -> list[float]:
    """20 ms of calls that are not timed, as caches take that long to forget the peer before (a product of 2 ms gets
    faster for five or six calls), then 10 ms of calls that are, as short ones vary more; at least one of each."""
    _cpu_calls(call, 0.02)
    return _cpu_calls(call, 0.01)


def _cpu_calls(call: Call, seconds: float) -> list[float]:
    marks = [time.perf_counter()]
    while marks[-1] - marks[0] < seconds:
        call()
        marks.append(time.perf_counter())
    return [(end - begin) * 1e3 for begin, end in pairwise(marks)]


def _gpu_timer() -> Callable[[Call], list[float]]:
    """The GPU is kept busy until the host has issued flush and call: a host that is late (80 to 350 µs a call after a
    pause, seen beside an H200) would be timed too. A call that waits for the GPU itself is timed with its host."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    clocks, tries = 1_000_000, 3  # half a millisecond

    def turn(call: Call) -> list[float]:
        for n in range(tries):
            gpu_sleep(clocks << 2 * n)
            flush.zero_()
            begin.record()
            call()
            end.record()
            in_time = not begin.query()
            torch.cuda.synchronize()
            if in_time:
                break
        return [begin.elapsed_time(end)]

    return turn
