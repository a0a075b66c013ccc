"""Attention on what only the device knows, beside torch's own: key blocks, selections, packed documents.

    python bench/dynamic_attention.py                      # on a GPU: all three, bf16, D = 128
    python bench/dynamic_attention.py --parts varlen --json rows.json
    python bench/dynamic_attention.py --device cpu --json rows.json    # blocks beside SDPA with their mask, fp32

TFLOP/s count the scores that are there, two products forward and five backward. Tensors that name keys are random and
made before the clock starts; the work on them is in the times.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import fretwork as fw
from rows import machine
from timing import Call, medians, turns

PARTS = {"cuda": "blocks,selected,varlen", "cpu": "masked"}
Case = tuple[str, list[Tensor], float, dict[str, Callable[..., Tensor]]]


def operands(device: torch.device, *shapes: tuple[int, ...]) -> list[Tensor]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]


def masked(device: torch.device, seq: int, depth: int) -> Iterator[Case]:
    """Four heads, with blocks of their own, beside SDPA with the same mask."""
    side, heads = 64, 4
    inputs = operands(device, *((1, heads, seq, depth),) * 3)
    mask = torch.rand(1, heads, seq // side, seq // side, device=device) < 0.1
    elements = mask.repeat_interleave(side, 2).repeat_interleave(side, 3)
    peers: dict[str, Callable[..., Tensor]] = {
        "fretwork": partial(fw.attention, blocks=mask, block=side),
        "sdpa": partial(torch.nn.functional.scaled_dot_product_attention, attn_mask=elements),
    }
    name = f"{heads} heads, S = {seq}, D = {depth}, blocks of {side}, density 0.1"
    yield name, inputs, mask.sum().item() * side * side, peers


def blocks(device: torch.device, seq: int, depth: int) -> Iterator[Case]:
    inputs = operands(device, *((1, 16, seq, depth),) * 3)
    for side in (128, 64, 32, 16):
        mask = torch.rand(1, 16, seq // side, seq // side, device=device) < 0.1
        scores = mask.sum().item() * side * side
        call = partial(fw.attention, blocks=mask, block=side)
        yield f"blocks of {side}, density 0.1", inputs, scores, {"fretwork": call}


def selected(device: torch.device, seq: int, depth: int) -> Iterator[Case]:
    for heads, kv_heads, side, top in ((16, 1, 64, 16), (64, 4, 64, 16), (64, 4, 16, 64), (4, 4, 64, 16)):
        inputs = operands(device, (1, heads, seq, depth), *((1, kv_heads, seq, depth),) * 2)
        before = torch.arange(seq, device=device)[:, None] // side + 1
        indices = (torch.rand(1, kv_heads, seq, top, device=device) * before).int().sort(-1).values
        indices[..., 1:][indices.diff(dim=-1) == 0] = -1
        scores = (indices >= 0).sum().item() * side * (heads // kv_heads)
        call = partial(fw.selected_attention, indices=indices, block=side)
        yield f"{top} selected blocks of {side}, {heads} heads on {kv_heads}", inputs, scores, {"fretwork": call}


def torch_varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, most: int) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # of recent torch only

    o = varlen_attn(q, k, v, starts, starts, most, most, window_size=(-1, 0))
    return o if isinstance(o, Tensor) else o[0]


def varlen(device: torch.device, seq: int, depth: int) -> Iterator[Case]:
    half = seq // 2
    for lengths in ([1024] * (seq // 1024), [128] * (seq // 128), [half, *[256] * (half // 256)]):
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
        inputs = operands(device, *((seq, 16, depth),) * 3)
        most, scores = max(lengths), 16 * sum(n * n for n in lengths) / 2
        peers: dict[str, Callable[..., Tensor]] = {
            "fretwork": partial(fw.varlen_attention, cu_q=starts, causal=True),
            "torch": partial(torch_varlen, starts=starts, most=most),
        }
        yield f"{len(lengths)} documents, the first of {lengths[0]}, causal", inputs, scores, peers


def times(calls: dict[str, Call], device: torch.device) -> dict[str, float]:
    """Milliseconds: medians on a GPU, minima on a CPU, whose cores others may use too. Calls are interleaved."""
    if device.type == "cuda":
        return medians(calls, device)
    of = turns(calls, device, rounds=40, seconds=20.0)
    return {name: min(ms for turn in all_turns for ms in turn) for name, all_turns in of.items()}


def measure(case: Case, device: torch.device, depth: int) -> Iterator[dict[str, object]]:
    name, inputs, scores, peers = case
    results = {peer: call(*inputs) for peer, call in peers.items()}
    weight = torch.randn_like(results["fretwork"])
    forward: dict[str, Callable[[], object]] = {peer: partial(call, *inputs) for peer, call in peers.items()}
    backward: dict[str, Callable[[], object]] = {
        p: partial(torch.autograd.grad, o, inputs, weight, retain_graph=True) for p, o in results.items()
    }
    for which, products, calls in (("forward", 2, forward), ("backward", 5, backward)):
        for peer, ms in times(calls, device).items():
            rate = 2 * products * depth * scores / ms / 1e9
            facts = {**machine(device), "dtype": str(inputs[0].dtype).removeprefix("torch.")}
            facts["of"] = "medians" if device.type == "cuda" else "minima"
            yield {**facts, "case": name, "pass": which, "peer": peer, "ms": round(ms, 4), "tflops": round(rate, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", help="of blocks, selected, varlen and masked")
    parser.add_argument("--seq", type=int, help="16384, on a CPU 2048")
    parser.add_argument("--depth", help="head dims, 128, on a CPU 64,128")
    parser.add_argument("--threads", default="", help="on a CPU 1,2")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device, rows = torch.device(options.device), []
    on_cpu = device.type == "cpu"
    parts = {"blocks": blocks, "selected": selected, "varlen": varlen, "masked": masked}
    seq, depths = options.seq or (2048 if on_cpu else 16384), options.depth or ("64,128" if on_cpu else "128")
    for threads in (options.threads or ("1,2" if on_cpu else "0")).split(","):
        if int(threads):
            torch.set_num_threads(int(threads))
        for part in (options.parts or PARTS[device.type]).split(","):
            for depth in map(int, depths.split(",")):
                for case in parts[part](device, seq, depth):
                    for row in measure(case, device, depth):
                        rows.append(row)
                        shown = f"{row['case']:52} {row['pass']:9} {row['peer']:9} {row['ms']:9} ms"
                        print(shown, f"{row['tflops']:7} TFLOP/s", f"{threads} threads" if on_cpu else "")
    if options.json:
        options.json.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    main()
