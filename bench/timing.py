"""What the benchmarks time besides `medians` of the package: a copy, calls in a loop, CUDA graphs, the host."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from fretwork._timing import Call, medians, turns

__all__ = ["Call", "as_called", "copy_rate", "graphed", "host_microseconds", "medians", "turns", "warm"]


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
