"""Attention on what only the device knows, beside torch's varlen_attn: key blocks, selections, packed documents.

    python bench/dynamic_attention.py                      # all three, bf16, D = 128
    python bench/dynamic_attention.py --parts varlen --json rows.json

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
from timing import medians

PARTS = ("blocks", "selected", "varlen")
Case = tuple[str, list[Tensor], float, dict[str, Callable[..., Tensor]]]


def operands(device: torch.device, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]


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


def measure(case: Case, device: torch.device, depth: int) -> Iterator[dict[str, object]]:
    name, inputs, scores, peers = case
    results = {peer: call(*inputs) for peer, call in peers.items()}
    weight = torch.randn_like(results["fretwork"])
    forward: dict[str, Callable[[], object]] = {peer: partial(call, *inputs) for peer, call in peers.items()}
    backward: dict[str, Callable[[], object]] = {
        p: partial(torch.autograd.grad, o, inputs, weight, retain_graph=True) for p, o in results.items()
    }
    for which, products, calls in (("forward", 2, forward), ("backward", 5, backward)):
        for peer, ms in medians(calls, device).items():
            rate = 2 * products * depth * scores / ms / 1e9
            yield {"case": name, "pass": which, "peer": peer, "ms": round(ms, 4), "tflops": round(rate, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seq", type=int, default=16384)
    parser.add_argument("--depth", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device, rows = torch.device(options.device), []
    for part in options.parts.split(","):
        for case in {"blocks": blocks, "selected": selected, "varlen": varlen}[part](
            device, options.seq, options.depth
        ):
            for row in measure(case, device, options.depth):
                rows.append(row)
                print(f"{row['case']:52} {row['pass']:9} {row['peer']:9} {row['ms']:9} ms {row['tflops']:7} TFLOP/s")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
