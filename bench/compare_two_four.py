"""Fretwork's 2:4 products and tools beside torch's dense product and its semi-structured tensors, in one run.

    python bench/compare_two_four.py                                   # this machine's GPU, or its CPU
    python bench/compare_two_four.py --dtypes bfloat16 --columns 1,64  # other numbers of columns (rows of x)
    python bench/compare_two_four.py --parts format
    python bench/compare_two_four.py --parts product --shapes 2048x2048x2048,512x512x1 --peers dense

A row of `product` is y = x·Wᵀ with W (m, k) 2:4 and x (n, k), as a layer calls it; of `matmul` W·b with b (k, n), and a
batch of 8 matrices, n rows in all, times a (k, m) matrix that is sparse along k. "dense" is torch's product with the
same weight (cuBLAS; its scaled product for fp8, its integer one for int8), "cusparselt" what torch's semi-structured
tensors run, with its first algorithm or the one that its own search finds, whichever is faster; both, and ours, as CUDA
graphs with the L2 cache flushed. `warm` is the time of a call within a graph of many, caches warm, and `called` that of
a plain loop, host time included, measured in turn with it; there torch's 2:4 is as its users call it. `behind_us` is
how far the best such loop of ours lies behind `warm`: what the call itself costs, others on the host left out.
`fallback` asks when expanding the weight and a dense product (`expanded`) is quicker. Rows go to
bench/results/<device>/two_four.json, losing ones too. FRETWORK_ARCH=sm_80 forces the portable kernels and marks the
rows so.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

import fretwork as fw
from report import two_four_section
from rows import RESULTS, Row, folder, machine, numbers, store
from timing import as_called, copy_rate, graphed, host_microseconds, medians, warm

IDENTITY = ("part", "op", "m", "k", "n", "dtype", "arch", "threads")
SQUARES = [(2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192)]
LAYERS = [(4096, 14336), (14336, 4096)]
SMALL = [(4096, 4096), (8192, 8192), *LAYERS, (2048, 2048), (4096, 1024), (512, 512)]
BATCH = 8
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


def cusparselt_call(x: torch.Tensor, w: torch.Tensor, search: bool) -> Call:
    """What torch's semi-structured tensors run on this GPU, by the first algorithm or the one its search finds."""
    packed = torch._cslt_compress(w)
    which = int(torch._cslt_sparse_mm_search(packed, x.t())) if search else 0
    return lambda: torch._cslt_sparse_mm(packed, x.t(), alg_id=which, transpose_result=True)


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


def makers(op: str, x: torch.Tensor, w: torch.Tensor) -> dict[str, Callable[[], Call]]:
    """Ours and others of a product of x (n, k) with w (m, k), or of the same with operands as `matmul` has them."""
    if op == "matmul, sparse · dense":
        s, b = fw.two_four.compress(w), x.t().contiguous()
        return {"ours": lambda: lambda: fw.two_four.matmul(s, b), "dense": lambda: lambda: w @ b}
    if op == "matmul, batch · sparse":
        a, wide = x.view(BATCH, -1, x.shape[1]), w.t().contiguous()
        s = fw.two_four.compress(wide, dim=0)
        return {"ours": lambda: lambda: fw.two_four.matmul(a, s), "dense": lambda: lambda: a @ wide}
    s = fw.two_four.compress(w)
    made = {"ours": lambda: lambda: fw.two_four.linear(x, s), "dense": lambda: dense_call(x, w)}
    if x.device.type == "cuda":
        made["cusparselt"] = lambda: cusparselt_call(x, w, False)
        made["cusparselt, searched"] = lambda: cusparselt_call(x, w, True)
        made["torch"] = lambda: torch_call(x, w)
    return made


def result_of(op: str, y: torch.Tensor) -> torch.Tensor:
    """(n, m), as y = x·Wᵀ has it."""
    return y.t() if op == "matmul, sparse · dense" else y.flatten(0, -2)


def graphs(run: dict[str, Call], stream: torch.cuda.Stream) -> dict[str, Call]:
    """As graphs, where that can be captured."""
    timed = {}
    for name, call in run.items():
        try:
            timed[name] = graphed(call, stream)
        except Exception:
            timed[name] = call
            torch.cuda.synchronize()
    return timed


def faster_algorithm(run: dict[str, Call], ms: Row) -> str | None:
    """Keeps the faster of cuSPARSELt's two, as "cusparselt"; says which it was."""
    both = {name: ms[name] for name in ("cusparselt", "cusparselt, searched") if name in ms}
    if not both:
        return None
    best = min(both, key=lambda name: both[name])
    ms["cusparselt"], run["cusparselt"] = ms[best], run[best]
    ms.pop("cusparselt, searched", None), run.pop("cusparselt, searched", None)
    other = "".join(f", the other {t:.4f} ms" for name, t in both.items() if name != best)
    return ("searched" if best != "cusparselt" else "first") + other


def as_called_and_warm(
    run: dict[str, Call], device: torch.device, stream: torch.cuda.Stream
) -> tuple[Row, Row, float | None]:
    """In turn, because a GPU that is busy for long gets slower; medians. And how far ours is behind at best."""
    called: Row = {}
    within: Row = {}
    behind = None
    for name, call in run.items():
        once = as_called(call, device, 1)
        count, rounds = (100, 25) if once < 0.2 else (20, 9) if once < 2 else (3, 9 if once < 20 else 1)
        try:
            alone = warm(call, stream, count) if name != "torch" else None
        except Exception:  # what cannot be captured
            alone = None
            torch.cuda.synchronize()
        turns = [(alone() if alone else 0.0, as_called(call, device, count)) for _ in range(rounds)]
        called[name] = statistics.median(turn[1] for turn in turns)
        if alone:
            within[name] = statistics.median(turn[0] for turn in turns)
            if name == "ours":
                behind = 1e3 * (min(turn[1] for turn in turns) - within[name])
    return called, within, behind


def measure(
    op: str, m: int, k: int, n: int, dtype: torch.dtype, device: torch.device, rates: Row, options: argparse.Namespace
) -> Row:
    torch.manual_seed(m + k + n)
    w, x = weight(m, k, dtype, device), inputs(n, k, dtype, device)
    gpu = device.type == "cuda"
    left_out: dict[str, str] = {}
    more: Row = {}
    made = makers(op, x, w)
    for name in [name for name in made if name.split(",")[0] not in ("ours", *options.peers)]:
        made.pop(name)
        left_out[name.split(",")[0]] = "not asked for (--peers)"
    with torch.inference_mode():
        run = usable(made, left_out)
        got = run["ours"]()
        assert isinstance(got, torch.Tensor)
        want = x.double() @ w.double().t()
        error = ((result_of(op, got).double() - want).abs().max() / want.abs().max()).item()
        if gpu:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            timed = graphs({name: call for name, call in run.items() if name != "torch"}, stream)
            ms = medians(timed, device, rounds=options.rounds, seconds=options.seconds)
            if (which := faster_algorithm(run, ms)) is not None:
                more["cusparselt"] = which
            called, more["warm"], more["behind_us"] = as_called_and_warm(run, device, stream)
        else:
            called = {name: as_called(call, device, 3) for name, call in run.items()}
            ms = medians(run, device, rounds=options.rounds, seconds=options.seconds)
        host = host_microseconds(run["ours"], 350) if gpu else None
    size = w.element_size()
    moved = m * k // 2 * size + m * k // (8 if size < 4 else 4) + n * k * size + n * m * got.element_size()
    flops = 2.0 * m * n * k
    return {
        "part": "product", "op": op, "m": m, "k": k, "n": n, "dtype": str(dtype)[6:], "ms": ms, "called": called,
        **more, "host_us": host, "dense_equivalent_tflops": flops / ms["ours"] / 1e9, "error": error,
        "floor_ms": max(moved / rates["copy"], flops / 2 / rates["dense"][str(dtype)[6:]]), "left_out": left_out,
    }  # fmt: skip


def measure_fallback(m: int, k: int, n: int, kind: str, device: torch.device, seconds: float) -> Row:
    """A layer's product, the dense one, and the dense one with its weight expanded first, which `fallback` takes."""
    dtype, _, precision = kind.partition(", ")
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    w, x = weight(m, k, getattr(torch, dtype), device), inputs(n, k, getattr(torch, dtype), device)
    s = fw.two_four.compress(w)
    run: dict[str, Call] = {
        "ours": lambda: fw.two_four.linear(x, s),
        "dense": lambda: F.linear(x, w),
        "expanded": lambda: F.linear(x, s.to_dense()),
    }
    with torch.inference_mode():
        stream = torch.cuda.Stream() if device.type == "cuda" else None
        ms = medians(graphs(run, stream) if stream else run, device, rounds=15, seconds=seconds)
        planned = fw.two_four.dense_wins(x, s, None, precision or "ieee")
    torch.backends.cuda.matmul.allow_tf32 = False
    return {"part": "fallback", "op": f"linear, {precision}" if precision else "linear", "m": m, "k": k, "n": n,
            "dtype": dtype, "ms": ms, "planned": "dense" if planned else "sparse", "left_out": {}}  # fmt: skip


def dense_rate(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP a millisecond of torch's dense product."""
    n = 8192 if device.type == "cuda" else 1024
    call = dense_call(inputs(n, n, dtype, device), inputs(n, n, dtype, device))
    return 2.0 * n**3 / medians({"dense": call}, device, seconds=0.3)["dense"]


def measure_format(n: int, dtype: torch.dtype, device: torch.device, copies: float, seconds: float) -> list[Row]:
    """The tools on an n × n matrix: bytes that must move, against the copy rate of the run."""
    a = torch.randn(n, n, device=device).to(dtype)
    p, p0 = fw.two_four.prune(a), fw.two_four.prune(a, dim=0)
    s = fw.two_four.compress(p)
    size = a.numel() * a.element_size()
    packed = size // 2 + a.numel() // (8 if a.element_size() < 4 else 4)
    both = torch.ops.fretwork.two_four_prune_both
    work: dict[str, tuple[Call, int, Call | None]] = {
        "compress": (lambda: fw.two_four.compress(p, validate=False), size + packed, None),
        "compress, dim 0": (lambda: fw.two_four.compress(p0, dim=0, validate=False), size + packed, None),
        "compress, validated": (lambda: fw.two_four.compress(p), size + packed, None),
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
    what = f"{r['op']} {r['m']}x{r['k']} n={r['n']} {r['dtype']}"
    if r["part"] == "fallback":
        best = "dense" if r["ms"]["expanded"] < r["ms"]["ours"] else "sparse"
        return f"{what}: {times} ms, {best}, planned {r['planned']}"
    called = " ".join(f"{a} {t:.4f}" for a, t in r["called"].items())
    beat = r["ms"].get("dense", 0) / r["ms"]["ours"]
    behind = f", at best {r['behind_us']:.1f} us behind the GPU" if r.get("behind_us") is not None else ""
    return (f"{what}: {beat:.3f}x dense; {times} ms (called {called}{behind}), floor {r['floor_ms']:.4f}, error "
            f"{r['error']:.0e}")  # fmt: skip


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parts", default="product,matmul,format,fallback")
    parser.add_argument(
        "--dtypes", default="", help="bfloat16,float16,int8,float8_e4m3fn on a GPU, float32,bfloat16 on a CPU"
    )
    parser.add_argument("--columns", default="", help="rows of x for the layers' shapes, instead of the usual ones")
    parser.add_argument("--shapes", default="", help="mxkxn, instead of the usual ones: 2048x2048x64,512x512x1")
    parser.add_argument("--peers", default="dense,cusparselt,torch", help="cuSPARSELt's search takes long for int8")
    parser.add_argument("--seconds", type=float, default=0.4, help="of measuring for a row")
    parser.add_argument("--rounds", type=int, default=25, help="that a row has at most")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.peers = numbers(options.peers, str)
    return options


def problems(gpu: bool, columns: list[int], shapes: str) -> list[tuple[int, int, int]]:
    if shapes:
        return [(m, k, n) for m, k, n in (map(int, shape.split("x")) for shape in shapes.split(","))]
    if columns:
        return [(m, k, n) for m, k in SMALL for n in columns]
    if not gpu:
        return [(m, k, n) for m, k in SMALL[:1] + LAYERS for n in (1, 4, 16, 64)]
    many = [*SQUARES, *((m, k, n) for m, k in LAYERS for n in (4096, 512))]
    return [*many, *((m, k, n) for m, k in SMALL for n in (64, 16, 1))]


def matmul_problems() -> list[tuple[str, int, int, int]]:
    shapes = [SQUARES[1], SQUARES[2], (*LAYERS[0], 4096), (*LAYERS[1], 4096)]
    return [(op, *shape) for op in ("matmul, sparse · dense", "matmul, batch · sparse") for shape in shapes]


def fallback_problems(gpu: bool) -> list[tuple[int, int, int, str]]:
    """Weights from half a megabyte on, one with rows that are no multiple of 32 bytes, and the fp32 ways."""
    if not gpu:
        each = itertools.product((512, 2048), (1, 16, 64, 256, 2048), ("float32", "bfloat16"))
        return [(size, size, n, kind) for size, n, kind in each]
    columns, weights = (1, 16, 64, 128, 256, 1024, 4096), [(512, 512), (1024, 1024), (2048, 2048), (4096, 4096)]
    half = [(m, k, n, "bfloat16") for m, k in [*weights, (14336, 4096), (4096, 4092)] for n in columns]
    return half + [
        (m, k, n, kind) for kind in ("float32, tf32", "float32, ieee") for m, k in weights[1::2] for n in columns
    ]


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

    def keep(row: Row) -> None:
        """At once, so that a run which is stopped has what it measured."""
        rows.append({**facts, **row})
        store(folder(options.out, facts) / "two_four.json", rows[-1:], IDENTITY)
        print(line_of(row), flush=True)

    if "format" in options.parts:
        for name in names if not gpu else names[:1]:
            for row in measure_format(8192 if gpu else 2048, getattr(torch, name), device, copies, options.seconds):
                keep(row)
    shapes = problems(gpu, numbers(options.columns, int), options.shapes)
    wanted = [(name, "linear", *p) for name in names for p in shapes] if "product" in options.parts else []
    if "matmul" in options.parts and gpu:
        wanted += [(name, *p) for name in names if name in ("bfloat16", "float16") for p in matmul_problems()]
    for name, op, m, k, n in wanted:
        keep(measure(op, m, k, n, getattr(torch, name), device, rates, options))
    for m, k, n, kind in fallback_problems(gpu) if "fallback" in options.parts else []:
        keep(measure_fallback(m, k, n, kind, device, options.seconds))
    print("", *two_four_section(rows), sep="\n")


if __name__ == "__main__":
    main()
