"""Fretwork's Kronecker products beside every other way to compute them, on the same data in one run.

    python bench/compare_kronecker.py                               # the sample grid, on a GPU if there is one
    python bench/compare_kronecker.py --batch 1,16,196              # small batches
    python bench/compare_kronecker.py --grid paper                  # all of the paper, in under 25 minutes on an H200
    python bench/compare_kronecker.py --grid paper --part 2/4       # the second quarter of it
    python bench/compare_kronecker.py --grid paper --peers all      # every peer in every row, in hours
    python bench/compare_kronecker.py --grid paper --peers all --resume    # goes on where that was stopped or killed
    python bench/compare_kronecker.py --chains                      # two factors, as Monarch matrices have them

Rows go to bench/results/<device>/kronecker.json (kronecker_paper.json for the paper's grid) and, as a table, to the
.csv beside it, losing ones too: mean, median, interquartile range and all times, in milliseconds. A time is one call on
a GPU, and the median of a turn of some 10 ms on a CPU. The floor of a row is its bytes (x, w and y once) at the copy
rate of the run or its FLOPs at the dense rate of the run, whichever takes longer.

The paper's grid has 376 patterns in both layouts, in fp16, bf16, and fp32 as ieee and as tf32: 3008 rows. Ours runs in
each; bmm and einsum in every 4th pattern, dense, bsr and sparse in every 16th, and none of them in a row that comes
later than its share of --minutes, unless --peers all. What a row leaves out, and what was not asked for, stands in it
with the reason.

Rows are written to a .partial file as they are measured. A run that was interrupted or killed goes on with the same
options and --resume; what is there already is not measured again.

The floor of a chain is x and y once at the copy rate of the run, as if its weights and all between the factors cost
nothing.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import fretwork as fw
from rows import RESULTS, Journal, Row, folder, machine, numbers, store
from timing import as_called, copy_rate, graphed, medians, turns

IDENTITY = ("pattern", "batch", "layout", "dtype", "precision", "arch", "part")
PEERS = ("bmm", "einsum", "bsr", "dense", "sparse")
DTYPES = ("float64", "float32", "float16", "bfloat16")
SLOW, FAST = ("bsr", "dense", "sparse"), ("bmm", "einsum")
MONARCHS = {1024: (32, 32), 2048: (32, 32), 4096: (64, 64)}  # features, and p and q
FACTS = [(1, 768, 192, 2), (6, 64, 64, 1), (1, 192, 48, 2), (4, 64, 64, 4), (1, 128, 128, 16), (1, 64, 64, 64),
         (128, 64, 64, 1), (1, 1024, 1024, 4), (16, 256, 256, 4), (4, 64, 64, 16)]  # fmt: skip
A = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
BC = ((48, 48), (48, 192), (64, 64), (96, 96), (96, 384), (128, 128), (192, 48), (192, 192), (192, 768), (256, 256),
      (384, 96), (384, 384), (512, 512), (768, 192), (768, 768), (1024, 1024))  # fmt: skip
D = (4, 16, 64)
FEW, SHORT_MS = 1024, 0.1  # batches, and floors, up to here are timed as graphs
Pattern = tuple[int, int, int, int]


def paper(batch: int = 25088) -> list[Pattern]:
    """The paper's grid, less what does not fit 31 bits there."""
    patterns = [(a, b, c, d) for a in A for b, c in BC for d in D]
    return [p for p in patterns if batch * p[0] * max(p[1], p[2]) * p[3] < 2**31 - 1 and math.prod(p) < 2**31 - 1]


def sample() -> list[Pattern]:
    """Ten patterns that stand for others and 30 more, the same in every run."""
    return FACTS + random.Random(4).sample([p for p in paper() if p not in FACTS], 30)


def dense_rate(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP a millisecond of torch's dense product."""
    n = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2.0 * n**3 / medians({"dense": lambda: a @ b}, device)["dense"]


def inputs(p: Pattern, batch: int, last: bool, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    a, _, c, d = p
    size = (a * c * d, batch) if last else (batch, a * c * d)
    x = torch.randn(size, device=device, dtype=torch.float32 if device.type == "cpu" else dtype).to(dtype)
    return x, (torch.randn(p, device=device) / math.sqrt(c)).to(dtype)


def error_of(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, last: bool) -> float:
    """Of some rows, against float64."""
    rows = min(y.shape[1 if last else 0], 64)
    some, got = (x[:, -rows:].T, y[:, -rows:].T) if last else (x[-rows:], y[-rows:])
    a, _, c, d = w.shape
    want = torch.einsum("nikl,ijkl->nijl", some.reshape(rows, a, c, d).double(), w.double()).reshape(rows, -1)
    return ((got.double() - want).abs().max() / want.abs().max()).item()


def sampled(number: int, algos: list[str], every: int, slow_every: int, late: bool) -> dict[str, str]:
    """The peers that pattern `number` of a grid goes without, and why."""
    left_out = {}
    for algo in (algo for algo in algos if algo != "kernel"):
        step = max(every, slow_every) if algo in SLOW else every
        if number % step:
            left_out[algo] = f"measured in every {step}th pattern"
        elif late:
            left_out[algo] = "out of time"
    return left_out


def too_much(algo: str, p: Pattern, batch: int, rate: float, patient: bool) -> str | None:
    """Why a peer is left out of a row, if it is; the reason goes into the row."""
    a, b, c, d = p
    if algo in ("dense", "bsr", "sparse") and a * b * d * a * c * d > 2**31:
        return "the dense matrix has more than 2^31 elements"
    if algo == "dense" and not patient and 2.0 * batch * a * b * d * a * c * d / rate > 50:
        return "more than 50 ms at the dense rate"
    return None


def precision_of(dtype: torch.dtype) -> str | None:
    return torch.get_float32_matmul_precision() if dtype == torch.float32 else None


def measure(p: Pattern, batch: int, last: bool, dtype: torch.dtype, device: torch.device, algos: list[str],
            rates: tuple[float, float], seconds: float, left_out: dict[str, str], patient: bool) -> Row:  # fmt: skip
    a, b, _, d = p
    x, w = inputs(p, batch, last, dtype, device)
    left_out = {
        **{algo: "not asked for" for algo in PEERS if algo not in algos},
        **{algo: why for algo in algos if (why := too_much(algo, p, batch, rates[1], patient))},
        **left_out,
    }
    calls: dict[str, Any] = {}
    once: dict[str, float] = {}
    for algo in (algo for algo in algos if algo not in left_out):
        call = lambda algo=algo: fw.ksmm(x, w, bs_last=last, algo=algo)  # noqa: E731
        if algo == "dense":  # a dense layer has its matrix ready
            dense = fw.kronecker.to_dense(w)
            call = (lambda k=dense: k @ x) if last else (lambda k=dense: x @ k.T)
        try:
            y = call()
        except Exception as error:  # a peer fails in ways of its own, such as Triton's
            left_out[algo] = str(error).splitlines()[0][:120]
            continue
        if algo == "kernel":
            error_now = error_of(x, w, y, last)
        del y
        calls[algo] = call
        limit = 20 if algo in SLOW else 200
        if algo != "kernel" and (ms_now := medians({algo: call}, device, rounds=1)[algo]) > limit:
            once[algo] = ms_now  # far behind: one time is enough
    timed = {algo: call for algo, call in calls.items() if algo not in once}
    flops, moved = 2.0 * batch * math.prod(p), (x.numel() + w.numel() + batch * a * b * d) * x.element_size()
    floor = max(flops / rates[1], moved / rates[0])
    if device.type == "cuda" and (batch <= FEW or floor <= SHORT_MS):  # as short as the host's time for them
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        timed = {algo: call if algo in ("bsr", "sparse") else graphed(call, stream) for algo, call in timed.items()}
    times = {
        name: [statistics.median(turn) for turn in of] for name, of in turns(timed, device, seconds=seconds).items()
    }
    times |= {algo: [time] for algo, time in once.items()}
    ms = {algo: statistics.median(of) for algo, of in times.items()}

    def called(algo: str) -> float:
        return as_called(calls[algo], device, 10 if ms[algo] < 5 else 5)

    return {
        "part": "forward", "pattern": p, "batch": batch, "layout": "last" if last else "first", "dtype": str(dtype)[6:],
        "precision": precision_of(dtype),
        "ms": ms, "times_ms": {algo: [float(f"{ms:.5g}") for ms in of] for algo, of in times.items()},
        "as_called_ms": called("kernel"),
        # On a CPU large results come in fresh pages, which the system clears for everyone.
        "peers_as_called_ms": {algo: called(algo) for algo in calls if algo in FAST and device.type == "cpu"},
        "left_out": left_out,
        "floor_ms": floor, "error": error_now,
    }  # fmt: skip


def measure_backward(p: Pattern, batch: int, last: bool, dtype: torch.dtype, device: torch.device,
                     seconds: float) -> Row:  # fmt: skip
    x, w = inputs(p, batch, last, dtype, device)
    bias = torch.zeros(p[0] * p[1] * p[3], device=device, dtype=dtype)
    leaves = [t.requires_grad_() for t in (x, w, bias)]
    dy = torch.randn_like(fw.ksmm(x, w, last, bias, algo="kernel"))

    def forward() -> torch.Tensor:
        return fw.ksmm(x, w, last, bias, algo="kernel")

    if device.type == "cuda":  # autograd's host time is not the question
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            y = forward()
        calls = {
            "forward": graphed(forward, stream),
            "backward": graphed(lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True), stream),
        }
    else:
        y = forward()
        calls = {"forward": forward, "backward": lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)}
    ms = medians(calls, device, seconds=seconds)
    return {
        "part": "backward", "pattern": p, "batch": batch, "layout": "last" if last else "first",
        "dtype": str(dtype)[6:], "precision": precision_of(dtype), "ms": ms, "ratio": ms["backward"] / ms["forward"],
    }  # fmt: skip


def measure_chain(n: int, batch: int, dtype: torch.dtype, device: torch.device, copies: float,
                  seconds: float) -> Row:  # fmt: skip
    """Monarch's two factors of n features, forward and backward, beside torch's batched products and a dense layer."""
    patterns = fw.kronecker.monarch(n, n, *MONARCHS[n])
    x = torch.randn(batch, n, device=device).to(dtype).requires_grad_()
    weights = [
        (torch.randn(p.weight_shape, device=device) / p.weight_shape[2] ** 0.5).to(dtype).requires_grad_()
        for p in patterns
    ]
    with torch.no_grad():
        dense = fw.kronecker.to_dense(weights[1].float()) @ fw.kronecker.to_dense(weights[0].float())
        want = x[-64:].double() @ dense.double().T
    layer = dense.to(dtype).requires_grad_()
    ways = {
        "kernel": (lambda: fw.ksmm_chain(x, weights, algo="kernel"), weights),
        "bmm": (lambda: fw.ksmm_chain(x, weights, algo="bmm"), weights),
        "dense": (lambda: torch.nn.functional.linear(x, layer), [layer]),
    }
    error = ((ways["kernel"][0]()[-64:].double() - want).abs().max() / want.abs().max()).item()
    dy = torch.randn_like(x)
    stream = torch.cuda.Stream() if device.type == "cuda" else None
    if stream:
        stream.wait_stream(torch.cuda.current_stream())
    calls: dict[str, dict[str, Any]] = {"forward": {}, "backward": {}}
    for name, (call, leaves) in ways.items():
        with torch.cuda.stream(stream) if stream else nullcontext():
            y = call()
        gradients = lambda y=y, leaves=leaves: torch.autograd.grad(y, [x, *leaves], dy, retain_graph=True)  # noqa: E731
        forward = torch.no_grad()(call)
        calls["forward"][name] = graphed(forward, stream) if stream else forward
        calls["backward"][name] = graphed(gradients, stream) if stream else gradients
    times = {part: medians(of, device, seconds=seconds) for part, of in calls.items()}
    return {
        "part": "chain", "pattern": [p.weight_shape for p in patterns], "batch": batch, "layout": "first",
        "dtype": str(dtype)[6:], "precision": None, "ms": times["forward"], "backward_ms": times["backward"],
        "left_out": {algo: "not a way of chains here" for algo in PEERS if algo not in ways},
        "floor_ms": 2 * x.numel() * x.element_size() / copies, "error": error,
    }  # fmt: skip


def geomean(values: list[float]) -> float:
    return statistics.geometric_mean(values) if values else math.nan


def summary(rows: list[Row]) -> None:
    """Geometric means over the rows of each kind, to stderr."""

    def kind(r: Row) -> tuple[str, ...]:
        many = "d > 1" if r["pattern"][3] > 1 else "d = 1"
        return r["dtype"], r["precision"] or "", f"batch {r['layout']} {r['batch']}", many

    forward = [r for r in rows if r["part"] == "forward"]
    for each in sorted({kind(r) for r in forward}):
        of = [r for r in forward if kind(r) == each]
        floor = geomean([r["ms"]["kernel"] / r["floor_ms"] for r in of])
        peers = [
            min(v for k, v in r["ms"].items() if k != "kernel") / r["ms"]["kernel"] for r in of if len(r["ms"]) > 1
        ]
        print(f"{' '.join(each)}: {len(of)} patterns, time / floor {floor:.2f}, best peer / ours "
              f"{geomean(peers):.2f} (least {min(peers, default=math.nan):.2f})", file=sys.stderr)  # fmt: skip
    for r in (r for r in rows if r["part"] == "chain"):
        times = " ".join(f"{k} {v:.4f}" for k, v in r["backward_ms"].items())
        print(f"chain {r['pattern']} {r['dtype']}: time / floor {r['ms']['kernel'] / r['floor_ms']:.2f}, "
              f"backward {times}", file=sys.stderr)  # fmt: skip
    if ratios := [r["ratio"] for r in rows if r["part"] == "backward"]:
        print(f"backward / forward: {geomean(ratios):.2f} (most {max(ratios):.2f})", file=sys.stderr)


def spread(times: list[float]) -> list[str]:
    """Mean, median and interquartile range of times, and all of them, as columns of a table."""
    quarters = statistics.quantiles(times, n=4, method="inclusive") if len(times) > 1 else [times[0]] * 3
    numbers = statistics.fmean(times), statistics.median(times), quarters[2] - quarters[0]
    return [f"{n:.5g}" for n in numbers] + [" ".join(f"{t:.5g}" for t in times)]


def write_csv(path: Path, rows: list[Row]) -> None:
    """One line per pattern and algorithm, in the columns that users of KSMM know; why, where there is no time."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        case = ["batch_size", "a", "b", "c", "d", "layout", "dtype", "precision", "algo"]
        writer.writerow([*case, "mean", "median", "iqr", "times", "floor_ms", "why"])
        for r in (r for r in rows if r["part"] == "forward"):
            case = [r["batch"], *r["pattern"], r["layout"], r["dtype"], r["precision"] or ""]
            for algo, ms in r["ms"].items():
                times = r.get("times_ms", {}).get(algo)  # rows of earlier versions have the median alone
                columns = spread(times) if times else ["", f"{ms:.5g}", "", ""]
                writer.writerow([*case, algo, *columns, f"{r['floor_ms']:.6g}", ""])
            for algo, why in r["left_out"].items():
                writer.writerow([*case, algo, "", "", "", "", f"{r['floor_ms']:.6g}", why])


def given(text: str) -> list[Pattern]:
    """The patterns of --patterns."""
    patterns = [tuple(whole(one, "--patterns", "a,b,c,d;a,b,c,d and so on")) for one in text.split(";") if one]
    if any(len(p) != 4 for p in patterns):
        raise SystemExit(f"--patterns: expected a,b,c,d;a,b,c,d and so on, got {text}")
    return [(a, b, c, d) for a, b, c, d in patterns]


def whole(text: str, option: str, expected: str) -> list[int]:
    """Numbers from 1 on with commas, one at least."""
    try:
        if min(found := numbers(text, int)) > 0:
            return found
    except ValueError:
        pass
    raise SystemExit(f"{option}: expected {expected}, got {text}")


def some_of(known: tuple[str, ...], text: str, option: str) -> list[str]:
    """Names with commas, one at least."""
    names = numbers(text, str)
    if not names or not set(names) <= set(known):
        raise SystemExit(f"{option}: expected some of {', '.join(known)}, got {text}")
    return names


def part_of(text: str, patterns: list[Pattern]) -> list[tuple[int, Pattern]]:
    """Part k of n, "k/n", of a grid, its patterns with their numbers."""
    k, n = whole(text.replace("/", ","), "--part", "1/N to N/N") if text.count("/") == 1 else (0, 0)
    if not 1 <= k <= n:
        raise SystemExit(f"--part: expected 1/N to N/N, got {text}")
    return list(enumerate(patterns))[len(patterns) * (k - 1) // n : len(patterns) * k // n]


def kinds(options: argparse.Namespace, gpu: bool) -> list[tuple[torch.dtype, str]]:
    """Types, fp32 in each precision."""
    names = some_of(DTYPES, options.dtypes or ("float16,bfloat16,float32" if gpu else "float32"), "--dtypes")
    precisions = some_of(("highest", "high", "medium"), options.precisions, "--precisions")
    return [
        (getattr(torch, name), precision)
        for name in names
        for precision in (precisions if gpu and name == "float32" else ["highest"])
    ]


def chain_dtypes(options: argparse.Namespace, gpu: bool) -> list[torch.dtype]:
    names = some_of(DTYPES, options.dtypes or ("float16,bfloat16" if gpu else "float32"), "--dtypes")
    return [getattr(torch, name) for name in names]


def asked(text: str) -> list[str]:
    """The algorithms of --algos."""
    algos, known = numbers(text, str), ("kernel", *PEERS)
    if "kernel" not in algos or not set(algos) <= set(known):
        raise SystemExit(f"--algos: expected kernel and some of {', '.join(PEERS)}, got {text}")
    return algos


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--grid", choices=("facts", "sample", "paper"), default="sample")
    parser.add_argument("--patterns", default="", help="these instead of a grid: 1,64,64,64;6,64,64,1")
    parser.add_argument("--batch", default="", help="25088 on a GPU, 2048 on a CPU; several with commas")
    parser.add_argument("--dtypes", default="", help="float16,bfloat16,float32 on a GPU, float32 on a CPU")
    parser.add_argument("--precisions", default="highest,high", help="highest (ieee), high (tf32); of float32 on a GPU")
    parser.add_argument("--layouts", default="first,last")
    parser.add_argument("--algos", default=",".join(("kernel", *PEERS)))
    parser.add_argument("--chains", action="store_true", help="Monarch chains of 1024 to 4096 features, no grid")
    parser.add_argument("--backward", action="store_true", help="time the gradients too")
    parser.add_argument("--seconds", type=float, help="of measuring for a row (0.5; 0.1 of the paper's grid)")
    parser.add_argument(
        "--minutes", type=float, help="that peers may make the whole run last (no limit; 23 of the paper's)"
    )
    parser.add_argument(
        "--peers",
        choices=("sampled", "all"),
        help="all: every peer in every row, however long (all; sampled of the paper's)",
    )
    parser.add_argument("--resume", action="store_true", help="go on with a run of the same options that was stopped")
    parser.add_argument("--peers-every", type=int, help="n: peers in every n-th pattern (1; 4 of the paper's grid)")
    parser.add_argument("--slow-every", type=int, help="the same for dense, bsr and sparse (1; 16 of the paper's grid)")
    parser.add_argument("--part", default="1/1", help="k/n: part k of n of the grid")
    parser.add_argument("--csv", type=Path, help="the table, if not beside the rows")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.peers == "all" and (options.peers_every or options.slow_every):
        raise SystemExit("--peers all: expected without --peers-every and --slow-every, got one of them")
    return options


Case = tuple[tuple[torch.dtype, str], int, tuple[int, Pattern], str]  # type and precision, batch, number, layout
Chain = tuple[int, int, torch.dtype]  # features, batch, type


def all_cases(options: argparse.Namespace, gpu: bool) -> tuple[list[Case], list[Chain]]:
    """What is to be measured: products, or chains."""
    grids = {"facts": lambda: FACTS, "sample": sample, "paper": paper}
    grid = part_of(options.part, given(options.patterns) or grids[options.grid]())
    layouts = some_of(("first", "last"), options.layouts, "--layouts")
    batches = whole(options.batch or ("25088" if gpu else "2048"), "--batch", "numbers from 1 on with commas")
    types = kinds(options, gpu)
    if options.chains:
        return [], [(n, batch, dtype) for n in MONARCHS for batch in batches for dtype in chain_dtypes(options, gpu)]
    return [
        (kind, batch, case, layout) for kind in types for batch in batches for case in grid for layout in layouts
    ], []


def new_chains(chains: list[Chain], journal: Journal, facts: Row, device: torch.device, s: float) -> Iterator[Row]:
    """The rows of chains that are not there yet, from `s` seconds of measuring each."""
    copies = copy_rate(device)
    for n, batch, dtype in chains:
        pattern = [p.weight_shape for p in fw.kronecker.monarch(n, n, *MONARCHS[n])]
        case = {"part": "chain", "pattern": pattern, "batch": batch, "layout": "first", "dtype": str(dtype)[6:]}
        if {**facts, **case} not in journal:
            yield measure_chain(n, batch, dtype, device, copies, s)


def new_products(
    cases: list[Case], options: argparse.Namespace, journal: Journal, facts: Row, device: torch.device, seconds: float
) -> Iterator[Row]:
    """The rows of products, and of their gradients where they are asked for, that are not there yet."""
    began, algos, copies, rates = time.perf_counter(), asked(options.algos), copy_rate(device), {}
    samples = options.peers == "sampled" or (options.grid == "paper" and options.peers is None)
    usual = 23.0 / int(options.part.split("/")[1]) if samples else math.inf
    minutes = options.minutes if options.minutes is not None else usual
    every, slow_every = (options.peers_every or (4 if samples else 1)), (options.slow_every or (16 if samples else 1))
    for done, ((dtype, precision), batch, (number, p), layout) in enumerate(cases):
        torch.set_float32_matmul_precision(precision)
        args = (p, batch, layout == "last", dtype, device)
        case = {**facts, "pattern": p, "batch": batch, "layout": layout, "dtype": str(dtype)[6:],
                "precision": precision_of(dtype)}  # fmt: skip
        if {**case, "part": "forward"} not in journal:
            if (dtype, precision) not in rates:
                rates[dtype, precision] = dense_rate(dtype, device)
            late = time.perf_counter() - began > 10 + (done + 1) / len(cases) * 60 * minutes
            left_out = sampled(number, algos, every, slow_every, late)
            floors = (copies, rates[dtype, precision])
            with torch.inference_mode():
                row = measure(*args, algos, floors, seconds, left_out, options.peers == "all")
            yield row
        if options.backward and {**case, "part": "backward"} not in journal:
            yield measure_backward(*args, seconds)


def say(row: Row) -> None:
    times = " ".join(f"{k} {v:.4f}" for k, v in row["ms"].items())
    rest = f"ratio {row['ratio']:.2f}" if "ratio" in row else f"floor {row['floor_ms']:.4f} error {row['error']:.0e}"
    print(json.dumps(row["pattern"]), row["batch"], row["layout"], row["dtype"], times, rest, flush=True)


def main() -> None:
    options = read_options()
    device, is_paper = torch.device(options.device), options.grid == "paper"
    cases, chains = all_cases(options, device.type == "cuda")
    asked(options.algos)
    seconds = options.seconds if options.seconds is not None else 0.1 if is_paper else 0.5
    began, facts = time.perf_counter(), machine(device)
    path = folder(options.out, facts) / ("kronecker_paper.json" if is_paper else "kronecker.json")
    changes_no_row = ("out", "csv", "resume", "minutes")
    question = {**{k: v for k, v in vars(options).items() if k not in changes_no_row}, "machine": facts["device"]}
    journal = Journal(path.with_suffix(".partial"), question, IDENTITY, options.resume)
    if journal.abandoned:
        store(path, journal.abandoned, IDENTITY)  # measured all the same
    print(f"{len(cases)} products, {len(chains)} chains, {len(journal.rows)} rows are there already", file=sys.stderr)
    complete = False
    try:
        args = (journal, facts, device, seconds)
        for row in new_chains(chains, *args) if options.chains else new_products(cases, options, *args):
            journal.add({**facts, **row})
            say(row)
        complete = True
    finally:
        store(path, journal.rows, IDENTITY)
        write_csv(options.csv or path.with_suffix(".csv"), json.loads(path.read_text()))
        summary(journal.rows)
        print(f"{len(journal.rows)} rows in {(time.perf_counter() - began) / 60:.1f} minutes", file=sys.stderr)
        if complete:
            journal.remove()


if __name__ == "__main__":
    main()
