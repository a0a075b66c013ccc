"""Attention of one process beside that of several, each on a core of its own: what a cut sequence costs on a CPU.

Forward and backward pass of the same whole sequence, in turns: first rank 0 alone on the whole, then all ranks on their
parts. Prints milliseconds on the clock (the slowest rank's) and of the processor (the busiest rank's; waiting does not
count), and their ratios to one process. On a machine that does other things, the processor's are the ones to compare.

  python bench/compare_distributed.py [--world 2] [--length 8192] [--method ranges] [--out bench/results]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import fretwork as fw
import fretwork.distributed as fd
from rows import Row, folder, machine, store

IDENTITY = ("device", "pattern", "world", "batch", "heads", "depth", "dtype", "method")
PATTERNS: dict[str, Callable[[int], fw.Pattern]] = {
    "causal window": lambda length: fw.patterns.sliding_window(length, 511, 0),
    "window": lambda length: fw.patterns.sliding_window(length, 256, 256),
    "strided": lambda length: fw.patterns.strided(length, 64),
    "causal": fw.patterns.causal,
}


def both_passes(attend: Callable[..., Tensor], leaves: list[Tensor], d_out: Tensor) -> None:
    torch.autograd.grad(attend(*leaves), leaves, d_out)


def clocks(call: Callable[[], None]) -> tuple[float, float]:
    """Milliseconds on the clock and of the processor, of all threads."""
    began, worked = time.perf_counter(), time.process_time()
    call()
    return (time.perf_counter() - began) * 1e3, (time.process_time() - worked) * 1e3


def slowest(times: tuple[float, float]) -> list[float]:
    """Of all ranks."""
    most = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.tolist()  # type: ignore[no-any-return]


def compare(name: str, given: argparse.Namespace) -> Row:
    """A row, the same on every rank but for the times, which are rank 0's and the slowest rank's."""
    pattern, (heads, key_heads) = PATTERNS[name](given.length), given.heads
    shards, rank = fd.shard(pattern, given.world), dist.get_rank()
    torch.manual_seed(0)
    whole = [torch.randn(1, h, given.length, given.depth) for h in (heads, key_heads, key_heads, heads)]
    *leaves, d_out = [t[:, :, slice(*shards.ranges[rank])].clone() for t in whole]
    for t in (*leaves, *whole[:3]):
        t.requires_grad_()

    def many() -> None:
        both_passes(lambda q, k, v: fd.attention(q, k, v, pattern, shards, method=given.method), leaves, d_out)

    def one() -> None:
        both_passes(lambda q, k, v: fw.attention(q, k, v, pattern), whole[:3], whole[3])

    times: dict[str, list[tuple[float, ...]]] = {"one": [], "many": []}
    for turn in range(-2, given.rounds):  # the first make plans and agree
        dist.barrier()
        alone = clocks(one) if rank == 0 else (0.0, 0.0)
        dist.barrier()
        together = clocks(many)
        if turn >= 0:
            times["one"].append(tuple(slowest(alone)))
            times["many"].append(tuple(slowest(together)))
    of = {side: [statistics.median(taken) for taken in zip(*all_, strict=True)] for side, all_ in times.items()}
    return {
        "pattern": pattern.text, "name": name, "world": given.world, "batch": 1, "heads": [heads, key_heads],
        "depth": given.depth, "dtype": "float32", "method": given.method,
        "ms": {side: clock for side, (clock, _) in of.items()},
        "processor_ms": {side: work for side, (_, work) in of.items()},
    }  # fmt: skip


def serve(rank: int, place: str, given: argparse.Namespace) -> None:
    """One rank, on a core of its own."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=given.world)
    rows = []
    for name in given.patterns:
        row = compare(name, given)
        rows.append(row)
        if rank == 0:
            ratios = {key: row[key]["many"] / row[key]["one"] for key in ("ms", "processor_ms")}
            print(
                f"{name:16}{row['ms']['one']:10.1f}{row['ms']['many']:10.1f}{ratios['ms']:8.2f}"
                f"{row['processor_ms']['one']:10.1f}{row['processor_ms']['many']:10.1f}{ratios['processor_ms']:8.2f}",
                flush=True,
            )
    if rank == 0 and given.out:
        facts = machine(torch.device("cpu"))
        store(folder(given.out, facts) / "distributed.json", [{**facts, **row} for row in rows], IDENTITY)
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2, help="processes, and cores to run them on")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--heads", type=int, nargs=2, default=(8, 8), help="of queries and of keys")
    parser.add_argument("--depth", type=int, default=64)
    parser.add_argument("--method", default="auto", help="auto, ranges or ulysses")
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="folder of results to keep the rows in, such as bench/results")
    given = parser.parse_args(arguments)
    if len(os.sched_getaffinity(0)) < given.world:
        raise SystemExit(f"--world: expected at most {len(os.sched_getaffinity(0))}, the cores here, got {given.world}")
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    print(f"{'':16}{'ms, one':>10}{'many':>10}{'ratio':>8}{'CPU, one':>10}{'many':>10}{'ratio':>8}")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as place:
        ranks = [context.Process(target=serve, args=(rank, f"{place}/store", given)) for rank in range(given.world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if failed := [rank for rank, process in enumerate(ranks) if process.exitcode]:
        raise SystemExit(f"ranks {failed} failed")


if __name__ == "__main__":
    main(sys.argv[1:])
