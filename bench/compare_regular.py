"""SPLAT's operators beside the time that their bytes take.

    python bench/compare_regular.py                          # S = 16,384, 16 heads, D = 64 and 128, fp16 and bf16
    python bench/compare_regular.py --seq 4096 --depths 64 --patterns window,strided --dtypes bfloat16

For each operator, forward and backward: microseconds, the floor and the floor's share of the time. The floor reads
each input once and writes each output once at --rate (4.2 TB/s). Of x, the entries are read, and all of (B, H, S, W)
is written, zeros behind a row's end included. Backward is all that the gradients of all inputs take: both products of
r_sddmm and r_spmm read x or its gradient once each. L2 is flushed before each call. Rows go to
bench/results/<device>/regular.json. FRETWORK_ARCH=sm_80 forces the portable kernels and marks the rows so.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import fretwork as fw
from fretwork.patterns import Pattern
from fretwork.patterns.pattern import row_width
from rows import RESULTS, Row, folder, machine, store
from timing import Call, medians

IDENTITY = ("pattern", "seq", "heads", "depth", "dtype", "operator", "arch")

PATTERNS: dict[str, Callable[[int], Pattern]] = {
    "window": lambda s: fw.patterns.sliding_window(s, 256, 256),
    "strided": lambda s: fw.patterns.strided(s, 128),
    "longformer": lambda s: fw.patterns.longformer(s, 256, [0]),
}


def cases(p: Pattern, heads: int, depth: int, dtype: torch.dtype) -> Iterator[tuple[str, Call, float]]:
    """Name, call and bytes of each."""
    seq, width = p.shape[-1], row_width(p, "bench")
    size = torch.finfo(dtype).bits // 8
    operand, entries, padded = heads * seq * depth * size, heads * p.nnz * size, heads * seq * width * size
    q, k, v = (torch.randn(1, heads, seq, depth, device="cuda", dtype=dtype) for _ in range(3))
    ops, key = torch.ops.fretwork, p.key
    x = fw.r_sddmm(q, k, p)
    yield "r_sddmm", lambda: fw.r_sddmm(q, k, p), 2 * operand + padded
    yield (
        "r_sddmm backward",
        lambda: (ops.r_spmm(x, k, key), ops.r_spmm_transposed(x, q, key, heads)),
        2 * entries + 4 * operand,
    )
    yield "r_softmax", lambda: fw.r_softmax(x, p, 0.1), entries + padded
    yield "r_softmax backward", lambda: ops.r_softmax_backward(x, x, key, 0.1), 2 * entries + padded
    yield "r_spmm", lambda: fw.r_spmm(x, v, p), entries + 2 * operand
    yield (
        "r_spmm backward",
        lambda: (ops.r_sddmm(q, v, key), ops.r_spmm_transposed(x, q, key, heads)),
        padded + entries + 4 * operand,
    )
    yield "r_spmm transposed", lambda: ops.r_spmm_transposed(x, q, key, heads), entries + 2 * operand


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--depths", default="64,128")
    parser.add_argument("--dtypes", default="float16,bfloat16")
    parser.add_argument("--patterns", default=",".join(PATTERNS))
    parser.add_argument("--rate", type=float, default=4.2, help="TB/s")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    device = torch.device("cuda")
    facts = machine(device)
    rows: list[Row] = []
    print(facts["device"])
    print(f"{'pattern':<12}{'dtype':<10}{'D':>4}  {'operator':<20}{'us':>10}{'floor us':>10}{'ratio':>7}")
    for name in given.patterns.split(","):
        p = PATTERNS[name](given.seq)
        for dtype in given.dtypes.split(","):
            for depth in map(int, given.depths.split(",")):
                begin = time.perf_counter()
                for operator, call, moved in cases(p, given.heads, depth, getattr(torch, dtype)):
                    us = 1e3 * medians({operator: call}, device, given.rounds)[operator]
                    floor = moved / given.rate / 1e6
                    case = {"pattern": name, "seq": given.seq, "heads": given.heads, "depth": depth, "dtype": dtype}
                    rows.append({**facts, **case, "operator": operator, "us": us, "floor_us": floor})
                    print(
                        f"{name:<12}{dtype:<10}{depth:>4}  {operator:<20}{us:>10.1f}{floor:>10.1f}{floor / us:>7.2f}",
                        flush=True,
                    )
                torch.cuda.empty_cache()
                print(f"# {time.perf_counter() - begin:.1f} s with plans and compilation", flush=True)
                store(folder(given.out, facts) / "regular.json", rows, IDENTITY)


if __name__ == "__main__":
    main()
