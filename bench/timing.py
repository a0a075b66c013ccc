"""How every benchmark here takes time: peers interleaved in one run, medians. On a GPU the L2 cache is flushed before
each call, which the host has issued when the clock starts; on a CPU a peer's turn begins with calls that are not timed:
all find the caches as they left them."""

from __future__ import annotations

import ctypes
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise

import torch

Call = Callable[[], object]


def medians(calls: dict[str, Call], device: torch.device, rounds: int = 15, seconds: float = 2.0) -> dict[str, float]:
    """Median milliseconds of each call, in interleaved rounds; stops early after `seconds` once each ran 3 times."""
    of = turns(calls, device, rounds, seconds)
    return {name: statistics.median(ms for turn in all_turns for ms in turn) for name, all_turns in of.items()}


def turns(
    calls: dict[str, Call], device: torch.device, rounds: int = 15, seconds: float = 2.0
) -> dict[str, list[list[float]]]:
    """The times behind `medians`: of each call, for each round, the milliseconds of its turn (one on a GPU).

    Rounds have their own order, the same in every run: who comes behind a long dense product finds the GPU slower.
    """
    times: dict[str, list[list[float]]] = {name: [] for name in calls}
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


def copy_rate(device: torch.device) -> float:
    """Bytes a millisecond of a large copy, read and written."""
    x = torch.empty(1 << (29 if device.type == "cuda" else 26), dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    return 2 * x.numel() / medians({"copy": lambda: y.copy_(x)}, device, seconds=0.3)["copy"]


def as_called(call: Call, device: torch.device, count: int = 20) -> float:
    """Milliseconds per call of a plain loop, as a user's program would see it (caches warm, host time included)."""
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / count * 1e3


def graphed(call: Call, stream: torch.cuda.Stream) -> Call:
    """The same work as one CUDA graph, so that the host's time for its kernels does not count.

    `stream` is where autograd saw the forward pass.
    """
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()

    def replay(kept: Call = call) -> None:
        """Holds the call too: the graph reads what it does, as what autograd saved, and keeps none of it alive."""
        graph.replay()

    return replay


def warm(call: Call, stream: torch.cuda.Stream, count: int = 20) -> Callable[[], float]:
    """A function that measures milliseconds per call on the GPU alone, caches warm: a graph of many calls."""
    many = graphed(lambda: [call() for _ in range(count)], stream)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def once() -> float:
        many()
        begin.record()
        many()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / count

    return once


def host_microseconds(call: Call, count: int = 2000) -> float:
    """Host time of one call: the best of several loops, since nothing but interference makes it longer."""
    best = float("inf")
    for _ in range(7):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count // 7):
            call()
        best = min(best, (time.perf_counter() - began) / (count // 7))
    return best * 1e6


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
            torch.cuda._sleep(clocks << 2 * n)
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
