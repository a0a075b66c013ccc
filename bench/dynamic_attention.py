"""Attention over keys known only on the device: key blocks, selections, packed documents, beside torch's ways.

    python bench/dynamic_attention.py                      # on a GPU: all parts, bf16, D = 128
    python bench/dynamic_attention.py --parts varlen,host --json rows.json
    python bench/dynamic_attention.py --device cpu --json rows.json    # blocks beside SDPA with their mask, fp32

TFLOP/s count the scores that are there, two products forward and five backward. Tensors that name keys are random and
made before the clock starts; the work on them is in the times. Selections stand beside dense causal attention by cuDNN,
documents beside torch's varlen_attn and compiled FlexAttention, with its mask kept or made in each call (`both`: a
forward and a backward pass).
`sinks` compares calls with and without them, `select` times `select_blocks`, `walk` sums up the kernels that write
walks, `host` is the host's time of a small call in inference mode.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

import fretwork as fw
from rows import machine
from timing import Call, medians, turns

PARTS = {"cuda": "blocks,selected,varlen,sinks,select,walk,host", "cpu": "masked"}
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
    for side, density in ((128, 0.1), (128, 0.25), (64, 0.1), (64, 0.25), (32, 0.1), (16, 0.1)):
        mask = torch.rand(1, 16, seq // side, seq // side, device=device) < density
        scores = mask.sum().item() * side * side
        call = partial(fw.attention, blocks=mask, block=side)
        name = f"16 heads, S = {seq}, D = {depth}, blocks of {side}, density {density}"
        yield name, inputs, scores, {"fretwork": call}
    heads, side, top, tokens = 7, 64, 64, 64 * 1713
    inputs = operands(device, *((1, heads, tokens, depth),) * 3)
    chosen = torch.rand(1, heads, tokens // side, tokens // side, device=device).topk(top).indices.int()
    lists = fw.BlockLists(torch.full(chosen.shape[:3], top, dtype=torch.int32, device=device), chosen.sort(-1).values)
    call = partial(fw.attention, blocks=lists, block=side)
    yield (
        f"S = {tokens}, D = {depth}, {top} of {tokens // side} blocks of {side}, {heads} heads",
        inputs,
        chosen.numel() * side**2,
        {"fretwork": call},
    )


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def selected(device: torch.device, seq: int, depth: int) -> Iterator[Case]:
    for tokens, heads, kv_heads, side, top in (
        (seq // 2, 32, 2, 64, 16),
        (2 * seq, 32, 2, 64, 16),
        (seq, 16, 1, 64, 16),
        (seq, 64, 4, 16, 64),
        (seq, 4, 4, 64, 16),
    ):
        inputs = operands(device, (1, heads, tokens, depth), *((1, kv_heads, tokens, depth),) * 2)
        before = torch.arange(tokens, device=device)[:, None] // side + 1
        indices = (torch.rand(1, kv_heads, tokens, top, device=device) * before).int().sort(-1).values
        indices[..., 1:][indices.diff(dim=-1) == 0] = -1
        scores = (indices >= 0).sum().item() * side * (heads // kv_heads)
        peers: dict[str, Callable[..., Tensor]] = {
            "fretwork": partial(fw.selected_attention, indices=indices, block=side)
        }
        if heads > kv_heads:
            peers["cudnn, dense"] = cudnn
        name = f"D = {depth}, {top} selected blocks of {side}, {heads} heads on {kv_heads}, S = {tokens}"
        yield name, inputs, scores, peers


def torch_varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, most: int) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # of recent torch only

    o = varlen_attn(q, k, v, starts, starts, most, most, window_size=(-1, 0))
    return o if isinstance(o, Tensor) else o[0]


class Flex:
    """Compiled FlexAttention over documents, its mask kept, or made in each call by its function or that compiled."""

    def __init__(self, starts: Tensor, tokens: int, kept: bool = False, compiled: bool = False) -> None:
        self.starts, self.tokens = starts, tokens
        self.attend = torch.compile(flex_attention)
        self.make = torch.compile(create_block_mask) if compiled else create_block_mask
        self.kept = self.mask() if kept else None

    def mask(self) -> BlockMask:
        positions = torch.arange(self.tokens, device=self.starts.device, dtype=torch.int32)
        owner = torch.searchsorted(self.starts, positions, right=True)
        return self.make(  # type: ignore[no-any-return]
            lambda b, h, i, j: (owner[i] == owner[j]) & (j <= i), None, None, self.tokens, self.tokens, positions.device
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        return self.attend(q, k, v, block_mask=self.kept or self.mask())[0].transpose(0, 1)  # type: ignore


def varlen(device: torch.device, seq: int, depth: int) -> Iterator[Case]:
    half = seq // 2
    mixed = torch.randint(64, 2049, (seq // 1056,), generator=torch.Generator().manual_seed(0)).double()
    mixed_lengths = (mixed * (seq / mixed.sum())).int().tolist()
    for lengths in (
        mixed_lengths,
        [1024] * (seq // 1024),
        [128] * (seq // 128),
        [half, *[256] * (half // 256)],
    ):
        tokens = sum(lengths)
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
        inputs = operands(device, *((tokens, 16, depth),) * 3)
        most, scores = max(lengths), 16 * sum(n * n for n in lengths) / 2
        peers: dict[str, Callable[..., Tensor]] = {
            "fretwork": partial(fw.varlen_attention, cu_q=starts, causal=True),
            "torch": partial(torch_varlen, starts=starts, most=most),
        }
        if lengths is mixed_lengths:
            peers["flex"] = Flex(starts, tokens, kept=True)
            peers["flex, mask made"] = Flex(starts, tokens)
            peers["flex, compiled mask made"] = Flex(starts, tokens, compiled=True)
        span = f"{min(lengths)} to {max(lengths)}" if lengths is mixed_lengths else f"the first of {lengths[0]}"
        yield f"16 heads, D = {depth}, {len(lengths)} documents, {span}, causal", inputs, scores, peers


def sinks(device: torch.device, seq: int, depth: int) -> Iterator[Case]:
    """Calls with learned sinks beside the same without."""
    per_head, few = ((1, 16, seq, depth),) * 3, (1, 2, seq, depth)
    starts = torch.arange(0, seq + 1, 1024, dtype=torch.int32, device=device)
    chosen = (torch.rand(1, 2, seq, 16, device=device) * (torch.arange(seq, device=device)[:, None] // 64 + 1)).int()
    chosen = chosen.sort(-1).values
    chosen[..., 1:][chosen.diff(dim=-1) == 0] = -1
    calls: list[tuple[str, tuple[tuple[int, ...], ...], Callable[..., Tensor]]] = [
        (f"16 heads, S = {seq}, D = {depth}, {name}", per_head, partial(fw.attention, pattern=pattern))
        for name, pattern in {
            "causal": fw.patterns.causal(seq),
            "window ±512": fw.patterns.sliding_window(seq, 512, 512),
            "strided 128": fw.patterns.strided(seq, 128),
        }.items()
    ]
    for side in (128, 64):
        mask = torch.rand(1, 16, seq // side, seq // side, device=device) < 0.1
        name = f"16 heads, S = {seq}, D = {depth}, blocks of {side}, density 0.1, sinks"
        calls.append((name, per_head, partial(fw.attention, blocks=mask, block=side)))
    name = f"D = {depth}, up to 16 selected blocks of 64, 32 heads on 2, S = {seq}, sinks"
    calls.append((name, ((1, 32, seq, depth), few, few), partial(fw.selected_attention, indices=chosen)))
    name = f"16 heads, D = {depth}, {seq // 1024} documents of 1024, causal, sinks"
    calls.append((name, ((seq, 16, depth),) * 3, partial(fw.varlen_attention, cu_q=starts, causal=True)))
    for name, shapes, call in calls:
        inputs = operands(device, *shapes, (shapes[0][1],))  # heads are the second dimension, packed or not
        peers: dict[str, Callable[..., Tensor]] = {
            "with sinks": lambda q, k, v, s, call=call: call(q, k, v, sinks=s),
            "without": lambda q, k, v, s, call=call: call(q, k, v),
        }
        yield name, inputs, 0, peers


def select(device: torch.device, seq: int, depth: int) -> Iterator[dict[str, object]]:
    """Choosing key blocks."""
    q, k = operands(device, (1, 16, seq, depth), (1, 2, seq, depth))
    for side, top in ((64, 16), (128, 32)):
        us = 1e3 * medians({"select": partial(fw.select_blocks, q, k, top, side)}, device)["select"]
        case = f"select_blocks: {top} of {seq // side} blocks of {side}, 16 heads on 2, S = {seq}, D = {depth}"
        yield {**machine(device), "case": case, "pass": "forward", "peer": "fretwork", "us": round(us, 1)}


def walk(device: torch.device, seq: int, depth: int) -> Iterator[dict[str, object]]:
    """Kernels that write walks, in a forward and a backward pass."""
    q, k, v = operands(device, *((1, 16, seq, depth),) * 3)
    writers = ("write_", "transpose_bits", "order_items", "scan_tiles")
    for side in (128, 64):
        mask = torch.rand(1, 16, seq // side, seq // side, device=device) < 0.1

        def call(mask: Tensor = mask, side: int = side) -> None:
            fw.attention(q, k, v, blocks=mask, block=side).sum().backward()

        call()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(10):
                call()
            torch.cuda.synchronize()
        us = sum(e.device_time_total for e in profiled.key_averages() if any(name in e.key for name in writers)) / 10
        case = f"16 heads, S = {seq}, walks of blocks of {side}, density 0.1"
        yield {**machine(device), "case": case, "pass": "both", "peer": "fretwork", "us": round(us, 1)}


def host(device: torch.device, _seq: int, _depth: int) -> Iterator[dict[str, object]]:
    """µs of a call that does next to nothing on the GPU."""
    q, k, v = (torch.randn(1, 2, 256, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    masks = [torch.rand(1, 2, 4, 4, device=device) < 0.5 for _ in range(32)]
    starts = [torch.tensor([0, n, 256], dtype=torch.int32, device=device) for n in range(32)]
    (x, y, z), causal = (t[0].transpose(0, 1).contiguous() for t in (q, k, v)), fw.patterns.causal(256)
    calls: dict[str, Callable[[int], object]] = {
        "blocks, new contents": lambda n: fw.attention(q, k, v, causal, blocks=masks[n % 32], block=64),
        "blocks, the same": lambda n: fw.attention(q, k, v, causal, blocks=masks[0], block=64),
        "documents, new contents": lambda n: fw.varlen_attention(x, y, z, starts[n % 32], causal=True),
        "a static pattern": lambda n: fw.attention(q, k, v, causal),
        "torch's SDPA": lambda n: scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    best = dict.fromkeys(calls, float("inf"))
    with torch.inference_mode():
        for _ in range(30):  # in turn; a short burst leaves the queue room
            for name, call in calls.items():
                for n in range(5):  # behind another way's calls, the first ones are slower
                    call(n)
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for n in range(20):
                    call(n)
                best[name] = min(best[name], (time.perf_counter() - begin) / 20 * 1e6)
                torch.cuda.synchronize()
    for name, us in best.items():
        peer = "torch" if "torch" in name else "fretwork"
        yield {
            **machine(device),
            "case": f"host: {name}, inference mode, 256 tokens, D = 64",
            "pass": "forward",
            "peer": peer,
            "us": round(us, 1),
        }


def times(calls: dict[str, Call], device: torch.device) -> dict[str, float]:
    """Milliseconds: medians on a GPU, minima on a CPU, whose cores others may use too. Calls are interleaved."""
    if device.type == "cuda":
        return medians(calls, device)
    of = turns(calls, device, rounds=40, seconds=20.0)
    return {name: min(ms for turn in all_turns for ms in turn) for name, all_turns in of.items()}


def measure(case: Case, device: torch.device, depth: int) -> Iterator[dict[str, object]]:
    name, inputs, scores, peers = case
    results = {peer: call(*inputs) for peer, call in peers.items()}
    weight = torch.randn_like(next(iter(results.values())))
    forward: dict[str, Callable[[], object]] = {peer: partial(call, *inputs) for peer, call in peers.items()}
    backward: dict[str, Callable[[], object]] = {
        p: partial(torch.autograd.grad, o, inputs, weight, retain_graph=True, allow_unused=True)
        for p, o in results.items()
    }
    both: dict[str, Callable[[], object]] = {
        p: lambda call=call: torch.autograd.grad(call(*inputs), inputs, weight)  # type: ignore[misc]
        for p, call in peers.items()
        if "flex" in peers  # whose masks are made in the forward pass alone
    }
    for which, products, calls in (("forward", 2, forward), ("backward", 5, backward), ("both", 7, both)):
        for peer, ms in times(calls, device).items():
            rate = {"tflops": round(2 * products * depth * scores / ms / 1e9, 3)} if scores else {}
            facts = {**machine(device), "dtype": str(inputs[0].dtype).removeprefix("torch.")}
            facts["of"] = "medians" if device.type == "cuda" else "minima"
            yield {**facts, "case": name, "pass": which, "peer": peer, "ms": round(ms, 4), **rate}


def show(row: dict[str, object], threads: str) -> None:
    measured = f"{row['us']:9} µs" if "us" in row else f"{row['ms']:9} ms {row.get('tflops', ''):7} TFLOP/s"
    print(f"{row['case']:56} {row['pass']:9} {row['peer']:24} {measured} {threads}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", help="of blocks, selected, varlen, sinks, select, walk, host and masked")
    parser.add_argument("--seq", type=int, help="16384, on a CPU 2048")
    parser.add_argument("--depth", help="head dims, 128, on a CPU 64,128")
    parser.add_argument("--threads", default="", help="on a CPU 1,2")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device, rows = torch.device(options.device), []
    on_cpu = device.type == "cpu"
    parts = {"blocks": blocks, "selected": selected, "varlen": varlen, "masked": masked, "sinks": sinks}
    others = {"walk": walk, "host": host, "select": select}
    seq, depths = options.seq or (2048 if on_cpu else 16384), options.depth or ("64,128" if on_cpu else "128")
    for threads in (options.threads or ("1,2" if on_cpu else "0")).split(","):
        if int(threads):
            torch.set_num_threads(int(threads))
        for part in (options.parts or PARTS[device.type]).split(","):
            for depth in map(int, depths.split(",")):
                if part in others:
                    found = others[part](device, seq, depth)
                else:
                    found = (row for case in parts[part](device, seq, depth) for row in measure(case, device, depth))
                for row in found:
                    rows.append(row)
                    show(row, f"{threads} threads" if on_cpu else "")
    if options.json:
        options.json.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    main()
