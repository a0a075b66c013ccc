"""How long a call takes, for `bench=True`."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor


def timed(call: Callable[[], Tensor], bench: bool, device: torch.device) -> tuple[Tensor, float | None]:
    """The result, and with `bench` the nanoseconds that the call took on the device."""
    if not bench:
        return call(), None
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        result = call()
        end.record(stream)
        end.synchronize()
        return result, start.elapsed_time(end) * 1e6
    began = time.perf_counter_ns()
    result = call()
    return result, float(time.perf_counter_ns() - began)
