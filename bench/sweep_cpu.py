"""Random problems of each family on the CPU, ours against the best of torch's ways, interleaved in one run.

    python bench/sweep_cpu.py --seed 7 --draws 100                     # all families, one thread and two
    python bench/sweep_cpu.py --families kronecker --threads 1 --draws 40 --json rows.json

A draw has a random shape, type (fp32 or bf16) and pass (forward, or the gradients of all operands). The peers are what
a user of torch would write: the dense product, a batched product, einsum, a BSR matrix, SDPA with a mask. Weights of
the peers are prepared outside the clock. The ratio is the time of the best peer over ours. Rounds go on until times
fall no further: other programs on the machine only ever add to them. "Work" are draws whose best peer takes 30 µs or
more (100 µs backward): in shorter ones the time of the call itself decides.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import fretwork as fw
from rows import machine

Call = Callable[[], object]
Tensor = torch.Tensor
BEHIND = 0.9
# A call takes some ten milliseconds at most: multiplications, and elements of an operand.
MOST_PRODUCTS, MOST_ELEMENTS = 2**27, 2**22
ROWS = [1, 2, 4, 8, 16, 32, 50, 64, 128, 197, 256, 512, 1000, 2048]


def leaf(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(dtype).requires_grad_()


def leaf_of(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


class Draw:
    """Ways to compute one result, each with the operands that get gradients."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ways: dict[str, tuple[Call, list[Tensor]]] = {}

    def add(self, way: str, call: Call, *operands: Tensor) -> None:
        self.ways[way] = (call, list(operands))

    def calls(self, backward: bool) -> dict[str, Call]:
        return {way: self._call(*what, backward) for way, what in self.ways.items()}

    @staticmethod
    def _call(forward: Callable[[], Any], operands: list[Tensor], backward: bool) -> Call:
        if not backward:
            return forward
        out = forward()
        grad = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, operands, grad, retain_graph=True)


def kronecker(pick: random.Random, dtype: torch.dtype) -> Draw | None:
    a, d = pick.choice([1, 1, 2, 3, 4, 6, 8, 16, 32]), pick.choice([1, 1, 2, 3, 4, 8, 16, 32, 64])
    b, c = (pick.choice([4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256, 384, 512]) for _ in range(2))
    n, last = pick.choice(ROWS), pick.random() < 0.4
    wide = max(a * b * d, a * c * d)
    if (
        wide > 8192
        or a * b * c * d > MOST_ELEMENTS // 2
        or n * a * b * c * d > MOST_PRODUCTS
        or n * wide > MOST_ELEMENTS
    ):
        return None
    w, x = leaf(a, b, c, d, dtype=dtype), leaf(*((a * c * d, n) if last else (n, a * c * d)), dtype=dtype)
    blocks = leaf_of(w.permute(0, 3, 1, 2).reshape(a * d, b, c).contiguous())
    draw = Draw(f"({a},{b},{c},{d}) n={n} {'last' if last else 'first'}")
    draw.add("ours", lambda: fw.ksmm(x, w, bs_last=last), x, w)

    def bmm() -> Tensor:
        if last:
            columns = x.view(a, c, d, n).permute(0, 2, 1, 3).reshape(a * d, c, n)
            return torch.bmm(blocks, columns).view(a, d, b, n).permute(0, 2, 1, 3).reshape(a * b * d, n)
        rows = x.view(n, a, c, d).permute(1, 3, 0, 2).reshape(a * d, n, c)
        return torch.bmm(rows, blocks.transpose(1, 2)).view(a, d, n, b).permute(2, 0, 3, 1).reshape(n, a * b * d)

    draw.add("bmm", bmm, x, blocks)
    if last:
        draw.add("einsum", lambda: torch.einsum("abcd,acdn->abdn", w, x.view(a, c, d, n)).reshape(-1, n), x, w)
    else:
        draw.add("einsum", lambda: torch.einsum("abcd,nacd->nabd", w, x.view(n, a, c, d)).reshape(n, -1), x, w)
    if a * b * d * a * c * d <= 2**23:
        dense = leaf_of(fw.kronecker.to_dense(w))
        draw.add("dense", (lambda: dense @ x) if last else (lambda: F.linear(x, dense)), x, dense)
    return draw


def two_four(pick: random.Random, dtype: torch.dtype) -> Draw | None:
    m, k = (pick.choice([64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096]) for _ in range(2))
    n = pick.choice(ROWS)
    if m * k > MOST_ELEMENTS or m * k * n > 4 * MOST_PRODUCTS:
        return None
    w = leaf_of(fw.two_four.prune(torch.randn(m, k).to(dtype)))
    s = fw.two_four.compress(w.detach())
    s = fw.TwoFour(leaf_of(s.values), s.metadata)
    x = leaf(n, k, dtype=dtype)
    draw = Draw(f"{m}x{k} n={n}")
    draw.add("ours", lambda: fw.two_four.linear(x, s), x, s.values)
    draw.add("dense", lambda: F.linear(x, w), x, w)
    return draw


def block(pick: random.Random, dtype: torch.dtype) -> Draw | None:
    size = pick.choice([8, 16, 32, 64, 128])
    m, k = (size * max(1, 128 * pick.choice([1, 2, 3, 6, 8, 16, 24, 32]) // size) for _ in range(2))
    n, density = pick.choice(ROWS), pick.choice([0.02, 0.05, 0.1, 0.25] if size >= 64 else [0.02, 0.05, 0.1])
    if m * k * n > 16 * MOST_PRODUCTS:
        return None
    mask = torch.rand(1, m // size, k // size) < density
    mask.view(-1)[pick.randrange(mask.numel())] = True  # at least one
    layout = fw.BlockLayout(mask, block=size)
    linear = pick.random() < 0.5  # as a layer calls it, with rows of x; else columns
    dense = leaf_of((torch.randn(m, k) * layout.mask().view(m, k)).to(dtype))
    values, x = leaf_of(layout.pack(dense.detach())), leaf(*((n, k) if linear else (k, n)), dtype=dtype)
    draw = Draw(f"{m}x{k} b={size} density={density} n={n} {'linear' if linear else 'dsd'}")
    if linear:
        draw.add("ours", lambda: fw.dds(x, values, layout, trans_b=True), x, values)
        draw.add("dense", lambda: F.linear(x, dense), x, dense)
        return draw
    draw.add("ours", lambda: fw.dsd(values, x, layout), x, values)
    draw.add("dense", lambda: dense @ x, x, dense)
    if dtype == torch.float32:
        bsr, plain = dense.detach().to_sparse_bsr(size), x.detach()
        draw.add("bsr", lambda: bsr @ plain)
    return draw


def attention(pick: random.Random, dtype: torch.dtype) -> Draw | None:
    seq, dim = pick.choice([16, 50, 64, 128, 197, 256, 512, 1024]), pick.choice([16, 32, 64, 80, 128])
    heads, batch = pick.choice([1, 2, 4, 8, 12]), pick.choice([1, 2, 4])
    if seq * seq * heads * batch * dim > MOST_PRODUCTS:
        return None
    side, w, r, patterns = math.isqrt(seq), pick.choice([8, 16, 64, 256]), pick.choice([2, 4]), fw.patterns
    kinds: dict[str, Callable[[], Any]] = {
        "full": lambda: patterns.full(seq),
        "causal": lambda: patterns.causal(seq),
        "window": lambda: patterns.sliding_window(seq, w, w),
        "causal window": lambda: patterns.sliding_window(seq, w, 0),
        "sinks": lambda: patterns.sinks(seq, 4, w),
        "strided": lambda: patterns.strided(seq, side),
        "dilated": lambda: patterns.dilated(seq, max(1, w // r), r),
        "block_local": lambda: patterns.block_local(seq, w, 1),
    }
    kind = pick.choice(list(kinds))
    pattern = kinds[kind]()
    q, k, v = (leaf(batch, heads, seq, dim, dtype=dtype) for _ in range(3))
    draw = Draw(f"{kind} w={w} B={batch} H={heads} S={seq} D={dim}")
    draw.add("ours", lambda: fw.attention(q, k, v, pattern), q, k, v)
    if kind == "full":
        draw.add("sdpa", lambda: F.scaled_dot_product_attention(q, k, v), q, k, v)
    elif kind == "causal":
        draw.add("sdpa", lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v)
    else:
        mask = pattern.mask()
        added = torch.zeros(mask.shape).masked_fill(~mask, -math.inf).to(dtype)
        draw.add("sdpa", lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), q, k, v)
        draw.add("sdpa_float", lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=added), q, k, v)
    return draw


FAMILIES = {"kronecker": kronecker, "two_four": two_four, "block": block, "attention": attention}


def timed(call: Call, seconds: float) -> list[float]:
    marks = [time.perf_counter()]
    while marks[-1] - marks[0] < seconds:
        call()
        marks.append(time.perf_counter())
    return [end - begin for begin, end in pairwise(marks)]


def race(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """The least microseconds of each call, once three rounds have come within 5 % of them: a thread that has to wait
    for another program makes all others wait. A turn begins with calls that are not timed."""
    best, hits = dict.fromkeys(calls, math.inf), dict.fromkeys(calls, 0)
    order = list(calls)
    for _ in range(rounds):
        random.shuffle(order)
        for way in order:
            timed(calls[way], 0.001)
            us = 1e6 * min(timed(calls[way], 0.0015))
            hits[way] = 1 if us < 0.95 * best[way] else hits[way] + (us < 1.05 * best[way])
            best[way] = min(best[way], us)
        # A draw that is clear need not be measured well.
        if min(hits.values()) >= (3 if ratio(best) < 1.5 else 2):
            break
    return best


def ratio(times: dict[str, float]) -> float:
    return min(us for way, us in times.items() if way != "ours") / times["ours"]


def sweep(family: str, seed: int, draws: int, rounds: int) -> Iterable[dict[str, Any]]:
    pick = random.Random(seed)
    torch.manual_seed(seed)
    done = 0
    while done < draws:
        dtype, backward = pick.choice([torch.float32, torch.bfloat16]), pick.random() < 0.4
        draw = FAMILIES[family](pick, dtype)
        if draw is None:
            continue
        done += 1
        if backward:
            draw.ways.pop("bsr", None)
        with torch.set_grad_enabled(backward):
            times = race(draw.calls(backward), rounds)
        yield machine(torch.device("cpu")) | {
            "seed": seed, "family": family, "problem": draw.name, "dtype": str(dtype).removeprefix("torch."),
            "pass": "backward" if backward else "forward", "threads": torch.get_num_threads(),
            "ratio": round(ratio(times), 3), "us": {way: round(us, 2) for way, us in times.items()},
        }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> str:
    ratios = [row["ratio"] for row in rows]
    behind = sum(r < BEHIND for r in ratios)
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    share = f"{behind} behind by over 10 % ({100 * behind / len(rows):.0f} %)"
    return f"{len(rows)} draws, {share}, geomean {mean:.2f}, worst {min(ratios):.2f}"


def peer_us(row: dict[str, Any]) -> float:
    return min(us for way, us in row["us"].items() if way != "ours")


def report(rows: list[dict[str, Any]], losers: int) -> None:
    family, threads = rows[0]["family"], rows[0]["threads"]
    print(f"== {family}, {threads} thread{'s' * (threads > 1)}: {summary(rows)}")
    parts = {value: [row for row in rows if value in row.values()] for value in ("forward", "backward")}
    parts |= {value: [row for row in rows if value in row.values()] for value in ("float32", "bfloat16")}
    parts["work"] = [row for row in rows if peer_us(row) >= (30 if row["pass"] == "forward" else 100)]
    for name, part in parts.items():
        if part:
            print(f"   {name}: {summary(part)}")
    for row in sorted(rows, key=lambda row: row["ratio"])[:losers]:
        if row["ratio"] < BEHIND:
            times = ", ".join(f"{way} {us:.1f}" for way, us in row["us"].items())
            print(f"   {row['ratio']:.2f}  {row['problem']} {row['dtype']} {row['pass']}: {times} µs")


def main() -> None:
    warnings.filterwarnings("ignore", message="Sparse BSR")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--draws", type=int, default=100, help="of each family and number of threads")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=40, help="at most")
    parser.add_argument("--losers", type=int, default=12, help="draws listed that fall behind")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"seed {args.seed}: {machine(torch.device('cpu'))}")
    rows: list[dict[str, Any]] = []
    for family in args.families.split(","):
        for threads in map(int, args.threads.split(",")):
            torch.set_num_threads(threads)
            part = list(sweep(family, args.seed, args.draws, args.rounds))
            report(part, args.losers)
            rows += part
            if args.json:
                args.json.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    main()
