"""Host time of layers in training beside torch's own, in one run: what a call costs before the device's work counts.

Problems are small, so that the host is the bottleneck. On a GPU nothing waits for the device while the clock runs; the
queue is emptied between samples. Prints microseconds of a forward pass without gradients, of one with them, and of
forward and backward pass together, each with its ratio to torch's layer.

  python bench/host_time.py [--device cuda] [--dtype bfloat16] [--autocast] [--rounds 40] [--out bench/results]
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fretwork as fw
from fretwork._torch.arguments import dtype_name
from rows import folder, machine, store

Call = Callable[[], Tensor]
MODES = ("inference", "forward", "forward + backward")


def layers(device: torch.device, dtype: torch.dtype) -> dict[str, tuple[Call, list[Tensor], str]]:
    """By name: the call, the leaves whose gradients are cleared between calls, and the peer's name."""
    kind: dict[str, Any] = {"device": device, "dtype": dtype}
    on_gpu = device.type == "cuda"
    features, rows = (1024, 64) if on_gpu else (64, 8)
    block, factor = (64, 32) if on_gpu else (32, 8)
    layout = fw.BlockLayout(torch.eye(features // block, dtype=torch.bool), block)
    modules = {
        "Linear": nn.Linear(features, features, **kind),
        "BlockSparseLinear": fw.nn.BlockSparseLinear(features, features, layout, **kind),
        "KSLinear, 2 factors": fw.nn.KSLinear(fw.kronecker.monarch(features, features, factor, factor), **kind),
        "SemiSparseLinear": fw.nn.SemiSparseLinear(features, features, **kind),
        "SemiSparseLinear, dense": fw.nn.SemiSparseLinear(
            features, features, **kind, trainable="dense", prune="transposable"
        ),
    }
    calls: dict[str, tuple[Call, list[Tensor], str]] = {}
    for name, module in modules.items():
        x = torch.randn(rows, features, **kind).requires_grad_()
        calls[name] = functools.partial(module, x), [x, *module.parameters()], "Linear"
    heads, length, depth = (8, 256, 64) if on_gpu else (2, 16, 16)
    q, k, v = (torch.randn(1, heads, length, depth, **kind).requires_grad_() for _ in range(3))
    pattern = fw.patterns.causal(length)
    calls["scaled_dot_product_attention"] = (
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [q, k, v],
        "scaled_dot_product_attention",
    )
    calls["fw.attention"] = lambda: fw.attention(q, k, v, pattern), [q, k, v], "scaled_dot_product_attention"
    return calls


def autocasting(call: Call, device: torch.device) -> Call:
    """The same under autocast, which a backward pass is not."""

    def run() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return call()

    return run


def sample(call: Call, leaves: list[Tensor], mode: str, d_out: Tensor, count: int) -> float:
    """Mean microseconds of `count` calls."""
    if d_out.is_cuda:
        torch.cuda.synchronize()
    with torch.set_grad_enabled(mode != "inference"):
        began = time.perf_counter()
        if mode == "forward + backward":
            for _ in range(count):
                call().backward(d_out)
                for leaf in leaves:
                    leaf.grad = None
        else:
            for _ in range(count):
                call()
        return (time.perf_counter() - began) / count * 1e6


def measured(calls: dict[str, tuple[Call, list[Tensor], str]], rounds: int, count: int) -> dict[str, dict[str, float]]:
    """The least of interleaved rounds: other processes only add to it."""
    times: dict[str, dict[str, list[float]]] = {name: {mode: [] for mode in MODES} for name in calls}
    for round_ in range(-3, rounds):  # the first compile and warm up
        for name, (call, leaves, _) in calls.items():
            d_out = torch.randn_like(call())
            for mode in MODES:
                taken = sample(call, leaves, mode, d_out, count)
                if round_ >= 0:
                    times[name][mode].append(taken)
    return {name: {mode: min(all_) for mode, all_ in of.items()} for name, of in times.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None, help="float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--autocast", action="store_true", help="float32 parameters under autocast to bfloat16")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--count", type=int, default=50, help="calls of one sample")
    parser.add_argument("--out", type=Path, help="folder of results to keep the rows in, such as bench/results")
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    low = device.type == "cuda" and not given.autocast
    dtype = getattr(torch, given.dtype or ("bfloat16" if low else "float32"))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    calls = layers(device, dtype)
    if given.autocast:
        calls = {name: (autocasting(call, device), leaves, peer) for name, (call, leaves, peer) in calls.items()}
    found = measured(calls, given.rounds, given.count)
    peers = {name: peer for name, (_, _, peer) in calls.items()}
    print(f"{'µs on the host, ' + str(device):32}" + "".join(f"{mode:>26}" for mode in MODES))
    for name, of in found.items():
        cells = "".join(f"{of[mode]:>18.1f} {of[mode] / found[peers[name]][mode]:>6.2f}×" for mode in MODES)
        print(f"{name:32}{cells}")
    if given.out:
        facts = {**machine(device), "dtype": dtype_name(dtype), "autocast": given.autocast}
        rows = [
            {**facts, "layer": name, "peer": peers[name], "us": of, "peer_us": found[peers[name]]}
            for name, of in found.items()
        ]
        store(folder(given.out, facts) / "host_time.json", rows, ("device", "layer", "dtype", "autocast"))


if __name__ == "__main__":
    main(sys.argv[1:])
