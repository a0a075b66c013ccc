"""Fretwork's 2:4 products and tools beside torch's dense product and its semi-structured tensors, in one run.

    python bench/compare_two_four.py                                   # this machine's GPU, or its CPU
    python bench/compare_two_four.py --dtypes bfloat16 --columns 1,64  # other numbers of columns (rows of x)
    python bench/compare_two_four.py --parts format

A row of `product` is y = x·Wᵀ with W (m, k) 2:4 and x (n, k), as a layer calls it. "dense" is torch's product with the
same weight (cuBLAS; its scaled product for fp8, its integer one for int8), "cusparselt" what torch's semi-structured
tensors run, with the algorithm that its own search finds; both, and ours, as CUDA graphs with the L2 cache flushed.
`called` are milliseconds of a call in a plain loop, host time and warm caches included, there with torch's 2:4 as its
users call it. Rows go to bench/results/<device>/two_four.json, losing ones too. FRETWORK_ARCH=sm_80 forces the portable
kernels and marks the rows so.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import fretwork as fw
from report import two_four_section
from rows import RESULTS, Row, folder, machine, numbers, store
from timing import as_called, copy_rate, graphed, host_microseconds, medians

IDENTITY = ("part", "op", "m", "k", "n", "dtype", "arch", "threads")
SQUARES = [(2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192)]
LAYERS = [(4096, 14336), (14336, 4096)]
SMALL = [(4096, 4096), (8192, 8192), *LAYERS]
FP8 = {"float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
Call = Callable[[], object]


def weight(m: int, k: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A 2:4 matrix, full groups."""
    wide = torch.float32 if dtype in FP8.values() or dtype == torch.int8 else dtype
    w = torch.randn(m, k, device=device) * (32 if dtype == torch.int8 else 1)
    pruned = fw.two_four.prune(w.to(torch.bfloat16 if wide == torch.float32 and dtype != wide else wide))
    return pruned.to(dtype)


def inputs(n: int, k: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    x = torch.randn(n, k, device=device) * (32 if dtype == torch.int8 else 1)
    return x.to(dtype)


def dense_call(x: torch.Tensor, w: torch.Tensor) -> Call:
    if w.dtype == torch.int8:
        return lambda: torch._int_mm(x, w.t())
    if w.dtype in FP8.values():
        one = torch.ones((), device=x.device)
        return lambda: torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    return lambda: F.linear(x, w)


def cusparselt_call(x: torch.Tensor, w: torch.Tensor) -> Call:
    """What torch's semi-structured tensors run on this GPU, by the algorithm its search finds."""
    packed = torch._cslt_compress(w)
    best = int(torch._cslt_sparse_mm_search(packed, x.t()))
    return lambda: torch._cslt_sparse_mm(packed, x.t(), alg_id=best, transpose_result=True)


def torch_call(x: torch.Tensor, w: torch.Tensor) -> Call:
    sparse = torch.sparse.to_sparse_semi_structured(w)
    return lambda: F.linear(x, sparse)


def usable(calls: dict[str, Callable[[], Call]], left_out: dict[str, str]) -> dict[str, Call]:
    kept: dict[str, Call] = {}
    for name, make in calls.items():
        try:
            call = make()
            call()
            kept[name] = call
        except Exception as error:  # a peer fails in ways of its own
            if name == "ours":
                raise
            left_out[name] = (str(error).splitlines() or [type(error).__name__])[0][:120]
    return kept


def measure(
    m: int, k: int, n: int, dtype: torch.dtype, device: torch.device, rates: Row, options: argparse.Namespace
) -> Row:
    torch.manual_seed(m + k + n)
    w, x = weight(m, k, dtype, device), inputs(n, k, dtype, device)
    s = fw.two_four.compress(w)
    gpu = device.type == "cuda"
    left_out: dict[str, str] = {}
    calls: dict[str, Callable[[], Call]] = {
        "ours": lambda: lambda: fw.two_four.linear(x, s),
        "dense": lambda: dense_call(x, w),
    }
    if gpu:
        calls["cusparselt"] = lambda: cusparselt_call(x, w)
        calls["torch"] = lambda: torch_call(x, w)
    calls = {name: make for name, make in calls.items() if name in ("ours", *options.peers)}
    with torch.inference_mode():
        run = usable(calls, left_out)
        got, want = run["ours"](), x.double() @ w.double().t()
        error = ((got.double() - want).abs().max() / want.abs().max()).item()  # type: ignore[attr-defined]
        called = {name: as_called(call, device, 20 if gpu else 3) for name, call in run.items()}
        host = host_microseconds(run["ours"], 350) if gpu else None
        run.pop("torch", None)
        if gpu:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            timed = {}
            for name, call in run.items():
                try:
                    timed[name] = graphed(call, stream)
                except Exception:
                    timed[name] = call
                    torch.cuda.synchronize()
        else:
            timed = run
        ms = medians(timed, device, rounds=25, seconds=options.seconds)
    size = w.element_size()
    moved = m * k // 2 * size + m * k // (8 if size < 4 else 4) + n * k * size + n * m * got.element_size()  # type: ignore[attr-defined]
    flops = 2.0 * m * n * k
    return {
        "part": "product", "op": "linear", "m": m, "k": k, "n": n, "dtype": str(dtype)[6:], "ms": ms, "called": called,
        "host_us": host, "dense_equivalent_tflops": flops / ms["ours"] / 1e9, "error": error,
        "floor_ms": max(moved / rates["copy"], flops / 2 / rates["dense"][str(dtype)[6:]]), "left_out": left_out,
    }  # fmt: skip


def dense_rate(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP a millisecond of torch's dense product."""
    n = 8192 if device.type == "cuda" else 1024
    call = dense_call(inputs(n, n, dtype, device), inputs(n, n, dtype, device))
    return 2.0 * n**3 / medians({"dense": call}, device, seconds=0.3)["dense"]


def measure_format(n: int, dtype: torch.dtype, device: torch.device, copies: float, seconds: float) -> list[Row]:
    """The tools on an n × n matrix: bytes that must move, against the copy rate of the run."""
    a = torch.randn(n, n, device=device).to(dtype)
    p = fw.two_four.prune(a)
    s = fw.two_four.compress(p)
    size = a.numel() * a.element_size()
    packed = size // 2 + a.numel() // (8 if a.element_size() < 4 else 4)
    both = torch.ops.fretwork.two_four_prune_both
    work: dict[str, tuple[Call, int, Call | None]] = {
        "compress": (lambda: fw.two_four.compress(p, validate=False), size + packed, None),
        "compress, dim 0": (lambda: fw.two_four.compress(p.t(), dim=0, validate=False), size + packed, None),
        "check": (lambda: torch.ops.fretwork.two_four_check(p, 1), size, None),
        "prune": (lambda: fw.two_four.prune(a), 2 * size, None),
        "prune, transposable": (lambda: fw.two_four.prune(a, transposable=True), 2 * size, None),
        "prune and pack both": (lambda: both(a, torch.int16), size + 2 * packed, None),
        "to_dense": (s.to_dense, size + packed, None),
    }
    if device.type == "cuda":
        work["compress"] = (*work["compress"][:2], lambda: torch._cslt_compress(p))
        tile = torch._sparse_semi_structured_tile
        work["prune and pack both"] = (*work["prune and pack both"][:2], lambda: tile(a, "", True))
    rows: list[Row] = []
    for op, (call, moved, peer) in work.items():
        left_out: dict[str, str] = {}
        made: dict[str, Callable[[], Call]] = {"ours": lambda c=call: c}  # type: ignore[misc]
        if peer is not None:
            made["torch"] = lambda c=peer: c  # type: ignore[misc]
        with torch.inference_mode():
            ms = medians(usable(made, left_out), device, rounds=25, seconds=seconds)
        rows.append({
            "part": "format", "op": op, "m": n, "k": n, "n": 0, "dtype": str(dtype)[6:], "ms": ms,
            "gb_per_s": moved / ms["ours"] / 1e6, "copy_gb_per_s": copies / 1e6, "floor_ms": moved / copies,
            "left_out": left_out,
        })  # fmt: skip
    return rows


def line_of(r: Row) -> str:
    times = " ".join(f"{a} {t:.4f}" for a, t in r["ms"].items())
    if r["part"] == "format":
        share = r["gb_per_s"] / r["copy_gb_per_s"]
        return f"{r['op']} {r['dtype']} {r['m']}: {times} ms, {r['gb_per_s']:.0f} GB/s, {share:.2f} of a copy"
    called = " ".join(f"{a} {t:.4f}" for a, t in r["called"].items())
    beat = r["ms"].get("dense", 0) / r["ms"]["ours"]
    return (f"{r['m']}x{r['k']} n={r['n']} {r['dtype']}: {beat:.2f}x dense; {times} ms (called {called}), floor "
            f"{r['floor_ms']:.4f}, error {r['error']:.0e}")  # fmt: skip


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parts", default="product,format")
    parser.add_argument(
        "--dtypes", default="", help="bfloat16,float16,int8,float8_e4m3fn on a GPU, float32,bfloat16 on a CPU"
    )
    parser.add_argument("--columns", default="", help="rows of x for the layers' shapes, instead of the usual ones")
    parser.add_argument("--peers", default="dense,cusparselt,torch", help="cuSPARSELt's search takes long for int8")
    parser.add_argument("--seconds", type=float, default=0.4, help="of measuring for a row")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.peers = numbers(options.peers, str)
    return options


def problems(gpu: bool, columns: list[int], dtype: str) -> list[tuple[int, int, int]]:
    if columns:
        return [(m, k, n) for m, k in SMALL for n in columns]
    if not gpu:
        return [(m, k, n) for m, k in SMALL[:1] + LAYERS for n in (1, 4, 16, 64)]
    many = [*SQUARES, *((m, k, n) for m, k in LAYERS for n in (4096, 512))]
    if dtype in ("int8", *FP8):
        return many
    return [*many, *((m, k, n) for m, k in SMALL for n in (64, 16, 1))]


def main() -> None:
    warnings.filterwarnings("ignore")
    options = parsed()
    device = torch.device(options.device)
    gpu = device.type == "cuda"
    facts = machine(device)
    names = numbers(options.dtypes or ("bfloat16,float16,int8,float8_e4m3fn" if gpu else "float32,bfloat16"), str)
    copies = copy_rate(device)
    rates: Row = {"copy": copies, "dense": {name: dense_rate(getattr(torch, name), device) for name in names}}
    rows: list[Row] = []
    try:
        if "format" in options.parts:
            for name in names if not gpu else names[:1]:
                rows += measure_format(8192 if gpu else 2048, getattr(torch, name), device, copies, options.seconds)
                print(*map(line_of, rows[-7:]), sep="\n", flush=True)
        for name in names if "product" in options.parts else []:
            for m, k, n in problems(gpu, numbers(options.columns, int), name):
                rows.append(measure(m, k, n, getattr(torch, name), device, rates, options))
                print(line_of(rows[-1]), flush=True)
    finally:
        rows = [{**facts, **row} for row in rows]
        store(folder(options.out, facts) / "two_four.json", rows, IDENTITY)
        if rows:
            print("", *two_four_section(rows), sep="\n")


if __name__ == "__main__":
    main()
