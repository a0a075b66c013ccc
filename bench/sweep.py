"""Random problems of each family, ours against the best of torch's ways, interleaved in one run.

    python bench/sweep.py --seed 7 --draws 100                         # all families on a CPU, one thread and two
    python bench/sweep.py --families kronecker --threads 1 --draws 40 --json rows.json
    python bench/sweep.py --device cuda --seconds 45 --families kronecker,two_four,block --json sweep.json
    python bench/sweep.py --device cuda --draws 64 --families attention --warm 0/8    # compiles a share of the draws

A draw has a random shape and type. On a CPU the types are fp32 and bf16, and 40 % of the draws are the gradients of all
operands; on a GPU they are fp16 and bf16, forward but for half of attention's. The peers are what a user of torch would
write: the dense product, a batched product, einsum, a BSR matrix, SDPA with a mask, on a GPU FlexAttention. Weights of
the peers are prepared outside the clock. The ratio is the time of the best peer over ours; a draw is behind below 0.9
on a CPU, 0.95 on a GPU. On a CPU rounds go on until times fall no further: other programs on the machine only ever add
to them. "Work" are draws whose best peer takes 30 µs or more there (100 µs backward): in shorter ones the time of the
call itself decides. On a GPU times are medians of five, taken as in every benchmark here (timing.py).
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
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import fretwork as fw
from rows import machine
from timing import medians

Call = Callable[[], object]
Tensor = torch.Tensor


@dataclass(frozen=True)
class Space:
    """What draws are taken from. Calls take some ten milliseconds at most: multiplications, elements of an operand."""

    device: torch.device
    behind: float
    types: list[torch.dtype]
    rows: list[int]
    sizes: list[int]  # of a Kronecker block
    features: list[int]  # of a 2:4 weight
    most_products: int
    most_elements: int
    most_width: int  # of a Kronecker product
    most_dense: int  # elements of a dense peer

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


CPU = Space(
    torch.device("cpu"), 0.9, [torch.float32, torch.bfloat16],
    rows=[1, 2, 4, 8, 16, 32, 50, 64, 128, 197, 256, 512, 1000, 2048],
    sizes=[4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 192, 256, 384, 512],
    features=[64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096],
    most_products=2**27, most_elements=2**22, most_width=8192, most_dense=2**23,
)  # fmt: skip
GPU = Space(
    torch.device("cuda"), 0.95, [torch.float16, torch.bfloat16],
    rows=[1, 4, 16, 50, 64, 128, 197, 256, 384, 512, 1000, 2048, 4096, 8192, 25088],
    sizes=[8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256, 384, 512, 768, 1024],
    features=[512, 768, 1024, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192, 11008, 13824, 14336],
    most_products=2**42, most_elements=2**29, most_width=16384, most_dense=2**28,
)  # fmt: skip
space = CPU


def leaf(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=space.device).to(dtype).requires_grad_()


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
    b, c = (pick.choice(space.sizes) for _ in range(2))
    n, last = pick.choice(space.rows), pick.random() < 0.4
    wide = max(a * b * d, a * c * d)
    if (
        wide > space.most_width
        or a * b * c * d > min(2**23, space.most_elements // 2)
        or n * a * b * c * d > space.most_products
        or n * wide > space.most_elements
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
    if a * b * d * a * c * d <= space.most_dense:
        dense = leaf_of(fw.kronecker.to_dense(w))
        draw.add("dense", (lambda: dense @ x) if last else (lambda: F.linear(x, dense)), x, dense)
    return draw


def two_four(pick: random.Random, dtype: torch.dtype) -> Draw | None:
    m, k = (pick.choice(space.features) for _ in range(2))
    n = pick.choice(space.rows)
    if m * k > space.most_elements or m * k * n > 4 * space.most_products:
        return None
    w = leaf_of(fw.two_four.prune(torch.randn(m, k, device=space.device).to(dtype)))
    s = fw.two_four.compress(w.detach())
    s = fw.TwoFour(leaf_of(s.values), s.metadata)
    x = leaf(n, k, dtype=dtype)
    draw = Draw(f"{m}x{k} n={n}")
    draw.add("ours", lambda: fw.two_four.linear(x, s), x, s.values)
    draw.add("dense", lambda: F.linear(x, w), x, w)
    return draw


def block(pick: random.Random, dtype: torch.dtype) -> Draw | None:
    size = pick.choice([16, 32, 64, 128] if space.on_gpu else [8, 16, 32, 64, 128])
    sizes = [6, 8, 16, 24, 32, 40, 64] if space.on_gpu else [1, 2, 3, 6, 8, 16, 24, 32]
    m, k = (size * max(1, 128 * pick.choice(sizes) // size) for _ in range(2))
    n, density = pick.choice(space.rows), pick.choice([0.02, 0.05, 0.1, 0.25] if size >= 64 else [0.02, 0.05, 0.1])
    if m * k * n > 16 * space.most_products:
        return None
    mask = torch.rand(1, m // size, k // size) < density
    mask.view(-1)[pick.randrange(mask.numel())] = True  # at least one
    layout = fw.BlockLayout(mask, block=size)
    linear = pick.random() < 0.5  # as a layer calls it, with rows of x; else columns
    kept = layout.mask().view(m, k).to(space.device)
    dense = leaf_of((torch.randn(m, k, device=space.device) * kept).to(dtype))
    values, x = leaf_of(layout.pack(dense.detach())), leaf(*((n, k) if linear else (k, n)), dtype=dtype)
    draw = Draw(f"{m}x{k} b={size} density={density} n={n} {'linear' if linear else 'dsd'}")
    if linear:
        draw.add("ours", lambda: fw.dds(x, values, layout, trans_b=True), x, values)
        draw.add("dense", lambda: F.linear(x, dense), x, dense)
        return draw
    draw.add("ours", lambda: fw.dsd(values, x, layout), x, values)
    draw.add("dense", lambda: dense @ x, x, dense)
    if dtype == torch.float32 or space.on_gpu:
        bsr, plain = dense.detach().to_sparse_bsr(size), x.detach()
        draw.add("bsr", lambda: bsr @ plain)
    return draw


def attention(pick: random.Random, dtype: torch.dtype) -> Draw | None:
    if space.on_gpu:
        seq, dim = pick.choice([1024, 2048, 4096, 8192]), pick.choice([64, 128])
        heads, batch, windows = pick.choice([8, 16, 32]), pick.choice([1, 2, 8]), [64, 256, 1024]
        too_large = seq * heads * batch > 2**19
    else:
        seq, dim = pick.choice([16, 50, 64, 128, 197, 256, 512, 1024]), pick.choice([16, 32, 64, 80, 128])
        heads, batch, windows = pick.choice([1, 2, 4, 8, 12]), pick.choice([1, 2, 4]), [8, 16, 64, 256]
        too_large = seq * seq * heads * batch * dim > space.most_products
    if too_large:
        return None
    side, w, r, patterns = math.isqrt(seq), pick.choice(windows), pick.choice([2, 4]), fw.patterns
    kinds: dict[str, tuple[Callable[[], Any], Callable[..., Any] | None]] = {
        "full": (lambda: patterns.full(seq), None),
        "causal": (lambda: patterns.causal(seq), lambda b, h, i, j: i >= j),
        "window": (lambda: patterns.sliding_window(seq, w, w), lambda b, h, i, j: (i - j).abs() <= w),
        "causal window": (lambda: patterns.sliding_window(seq, w, 0), lambda b, h, i, j: (i >= j) & (i - j <= w)),
        "sinks": (lambda: patterns.sinks(seq, 4, w), lambda b, h, i, j: (i >= j) & ((i - j < w) | (j < 4))),
        "strided": (
            lambda: patterns.strided(seq, side),
            lambda b, h, i, j: (i >= j) & ((i - j < side) | ((i - j) % side == 0)),
        ),
        "dilated": (
            lambda: patterns.dilated(seq, max(1, w // r), r),
            lambda b, h, i, j: ((i - j).abs() <= max(1, w // r) * r) & ((i - j) % r == 0),
        ),
        "block_local": (
            lambda: patterns.block_local(seq, w, 1),
            lambda b, h, i, j: (i // w - j // w >= 0) & (i // w - j // w <= 1),
        ),
    }
    kind = pick.choice(list(kinds))
    make, kept = kinds[kind]
    pattern = make()
    q, k, v = (leaf(batch, heads, seq, dim, dtype=dtype) for _ in range(3))
    draw = Draw(f"{kind} w={w} B={batch} H={heads} S={seq} D={dim}")
    draw.add("ours", lambda: fw.attention(q, k, v, pattern), q, k, v)
    if space.on_gpu:
        draw.add("flex", flex(kept, seq, q, k, v), q, k, v)
    if kind == "full":
        draw.add("sdpa", lambda: F.scaled_dot_product_attention(q, k, v), q, k, v)
    elif kind == "causal":
        draw.add("sdpa", lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v)
    elif not space.on_gpu:
        mask = pattern.mask()
        added = torch.zeros(mask.shape).masked_fill(~mask, -math.inf).to(dtype)
        draw.add("sdpa", lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), q, k, v)
        draw.add("sdpa_float", lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=added), q, k, v)
    return draw


def flex(kept: Callable[..., Any] | None, seq: int, q: Tensor, k: Tensor, v: Tensor) -> Call:
    """FlexAttention compiled for these shapes, with what is kept as its users write it."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.config.recompile_limit = 1000
    mask = create_block_mask(kept, None, None, seq, seq, device="cuda") if kept else None
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=mask)


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


def gpu_race(calls: dict[str, Call]) -> dict[str, float]:
    return {way: 1e3 * ms for way, ms in medians(calls, space.device, rounds=5).items()}


def draw_of(family: str, seed: int, number: int) -> tuple[Draw, torch.dtype, bool] | None:
    """Draw `number` of a seed, its type, and whether its gradients are meant."""
    pick = random.Random(f"{family} {seed} {number}")
    dtype = pick.choice(space.types)
    backward = pick.random() < (0.4 if not space.on_gpu else 0.5 if family == "attention" else 0.0)
    with torch.set_grad_enabled(True):
        draw = FAMILIES[family](pick, dtype)
    if draw is not None and backward:
        draw.ways.pop("bsr", None)
    return None if draw is None else (draw, dtype, backward)


def sweep(family: str, args: argparse.Namespace) -> Iterable[dict[str, Any]]:
    torch.manual_seed(args.seed)
    end, done, number = time.monotonic() + args.seconds, 0, 0
    while done < args.draws and time.monotonic() < end:
        number += 1
        if (made := draw_of(family, args.seed, number)) is None:
            continue
        draw, dtype, backward = made
        done += 1
        with torch.set_grad_enabled(backward):
            calls = draw.calls(backward)
            times = gpu_race(calls) if space.on_gpu else race(calls, args.rounds)
        yield {
            "seed": args.seed, "family": family, "problem": draw.name, "dtype": str(dtype).removeprefix("torch."),
            "pass": "backward" if backward else "forward", "threads": torch.get_num_threads(),
            "ratio": round(ratio(times), 3), "us": {way: round(us, 2) for way, us in times.items()},
        }  # fmt: skip


def compile_share(family: str, args: argparse.Namespace) -> None:
    """Calls every n-th draw once, so that its kernels are in the caches."""
    share, of = map(int, args.warm.split("/"))
    for number in range(1 + share, 2 * args.draws, of):
        if (made := draw_of(family, args.seed, number)) is not None:
            for call in made[0].calls(made[2]).values():
                call()


def summary(rows: list[dict[str, Any]]) -> str:
    ratios = [row["ratio"] for row in rows]
    behind = sum(r < space.behind for r in ratios)
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    percent = round(100 - 100 * space.behind)
    share = f"{behind} behind by over {percent} % ({100 * behind / len(rows):.1f} %)"
    return f"{len(rows)} draws, {share}, geomean {mean:.2f}, worst {min(ratios):.2f}"


def peer_us(row: dict[str, Any]) -> float:
    return min(us for way, us in row["us"].items() if way != "ours")


def report(rows: list[dict[str, Any]], losers: int) -> None:
    family, threads = rows[0]["family"], rows[0]["threads"]
    print(f"== {family}{'' if space.on_gpu else f', threads: {threads}'}: {summary(rows)}")
    parts = {value: [row for row in rows if value in row.values()] for value in ("forward", "backward")}
    parts |= {value: [row for row in rows if value in row.values()] for value in ("float32", "float16", "bfloat16")}
    if not space.on_gpu:
        parts["work"] = [row for row in rows if peer_us(row) >= (30 if row["pass"] == "forward" else 100)]
    for name, part in parts.items():
        if part:
            print(f"   {name}: {summary(part)}")
    for row in sorted(rows, key=lambda row: row["ratio"])[:losers]:
        if row["ratio"] < space.behind:
            times = ", ".join(f"{way} {us:.1f}" for way, us in row["us"].items())
            print(f"   {row['ratio']:.2f}  {row['problem']} {row['dtype']} {row['pass']}: {times} µs")


def store(path: Path, rows: list[dict[str, Any]]) -> None:
    """A row a line."""
    facts = {name: fact for name, fact in machine(space.device).items() if name != "threads"}
    path.write_text(json.dumps(facts)[:-1] + ', "rows": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]}\n")


def main() -> None:
    warnings.filterwarnings("ignore", message="Sparse BSR")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--draws", type=int, default=100, help="of each family and number of threads, at most")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of each family, at most")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--threads", default="1,2", help="on a CPU")
    parser.add_argument("--rounds", type=int, default=40, help="on a CPU, at most")
    parser.add_argument("--losers", type=int, default=12, help="draws listed that fall behind")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--warm", help="i/n: only compile the kernels of every n-th draw")
    args = parser.parse_args()
    global space
    space = GPU if args.device == "cuda" else CPU
    print(f"seed {args.seed}: {machine(space.device)}")
    rows: list[dict[str, Any]] = []
    for family in args.families.split(","):
        if args.warm:
            compile_share(family, args)
            continue
        for threads in [0] if space.on_gpu else map(int, args.threads.split(",")):
            if threads:
                torch.set_num_threads(threads)
            part = list(sweep(family, args))
            report(part, args.losers)
            rows += part
            if args.json:
                store(args.json, rows)


if __name__ == "__main__":
    main()
