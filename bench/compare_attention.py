"""Fretwork's attention beside FlexAttention and torch's own on the same masks and data in one run.

    python bench/compare_attention.py --quick                             # a table of eight, a minute on an H200
    python bench/compare_attention.py                                     # every pattern, forward and backward
    python bench/compare_attention.py --seqs 4096,16384,65536 --depths 64,128
    python bench/compare_attention.py --patterns full,causal --passes forward --parts patterns
    python bench/compare_attention.py --device cpu                        # S = 2048, 4 heads, D = 64, fp32

Rows go to bench/results/<device>/attention.json, losing ones too (quick ones only where --out says). Flex is compiled
for each mask and shape, as its users would (--flex tuned lets it search; rows say which); cuDNN and FlashAttention-2
run where they know the mask, which is full and causal; on a CPU torch's scaled_dot_product_attention gets the mask;
rows say why a peer is not in them. TFLOP/s count the pattern's elements alone, two products forward and five backward.
The floor of a row is that work at the rate of a dense product of the run, or the bytes of its operands at the copy
rate of the run, whichever takes longer. On a GPU the L2 cache is flushed before each call, and calls under two
milliseconds are timed as CUDA graphs, peers too. FRETWORK_ARCH=sm_80 forces the portable kernels and marks the rows
so.

Other parts: `decode` (a few queries against a long past), `host` (time of a call on the host, inference mode), `first`
(the first call of a process, kernel cache cold and warm), `plan` (patterns of a million tokens, made and planned).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import fretwork as fw
from attention_cases import CPU, GPU, Case, Rule, cases
from report import attention_section, number
from rows import RESULTS, Row, folder, machine, numbers, store
from timing import copy_rate, graphed, host_microseconds, medians

IDENTITY = ("part", "pattern", "pass", "seq", "batch", "heads", "kv_heads", "depth", "dtype", "arch", "cache",
            "queries", "flex")  # fmt: skip
UNSAID = {"flex": "plain"}  # by rows from before it was recorded
PARTS = ("patterns", "decode", "host", "first", "plan")
PEERS = {"cuda": ("flex", "cudnn", "fa2"), "cpu": ("flex", "sdpa")}
QUICK = "full,causal,window,block-local,longformer,dilated,strided,neighborhood"
SHORT_MS = 2.0  # calls up to here are timed as graphs
Call = Callable[[], object]
Rates = tuple[float, float]  # bytes and FLOP a millisecond
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def dense_rate(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP a millisecond of torch's dense product."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2.0 * n**3 / medians({"dense": lambda: a @ b}, device, seconds=0.3)["dense"]


def reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]


def peer(name: str, pattern: str, rule: Rule, sizes: tuple[int, int], device: torch.device,
         tuned: bool) -> Attention:  # fmt: skip
    """How a peer computes this mask; raises where it has no way. `sizes` are queries and keys."""
    offset = sizes[1] - sizes[0]
    if name == "flex":
        shifted = (lambda b, h, i, j: rule(i + offset, j)) if offset else (lambda b, h, i, j: rule(i, j))
        # Not timed. Compiling this took minutes on an H200 where the mask itself takes none, unless it is too large.
        small = sizes[0] * sizes[1] <= 2**29
        make = create_block_mask if small else torch.compile(create_block_mask, dynamic=False)
        mask = make(shifted, None, None, *sizes, device=device.type)
        mode = {"mode": "max-autotune-no-cudagraphs"} if tuned else {}
        compiled = torch.compile(flex_attention, dynamic=False, **mode)  # type: ignore[call-overload]
        return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    if name == "sdpa":
        i, j = torch.arange(sizes[0], device=device) + offset, torch.arange(sizes[1], device=device)
        allowed = rule(i[:, None], j[None]).expand(sizes).contiguous()
        return lambda q, k, v: scaled_dot_product_attention(q, k, v, allowed, enable_gqa=q.shape[1] != k.shape[1])
    if device.type != "cuda" or pattern not in ("full", "causal"):
        raise NotImplementedError("knows full and causal only" if device.type == "cuda" else "needs a GPU")
    backend = SDPBackend.CUDNN_ATTENTION if name == "cudnn" else SDPBackend.FLASH_ATTENTION

    def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            gqa = q.shape[1] != k.shape[1]
            return scaled_dot_product_attention(q, k, v, is_causal=pattern == "causal", enable_gqa=gqa)

    return dense


def attentions(name: str, pattern: fw.Pattern, rule: Rule, device: torch.device, algos: list[str], tuned: bool,
               left_out: dict[str, str]) -> dict[str, Attention]:  # fmt: skip
    """A function of q, k and v for each way, ours first."""
    torch._dynamo.reset()  # a row compiles for itself
    calls: dict[str, Attention] = {"ours": lambda q, k, v: fw.attention(q, k, v, pattern)}
    for algo in (algo for algo in algos if algo not in left_out):
        try:
            sizes = (pattern.shape[0], pattern.shape[1])
            calls[algo] = peer(algo, name, rule, sizes, device, tuned)
        except Exception as error:  # a peer fails in ways of its own
            left_out[algo] = reason(error)
    return calls


def not_run(asked: list[str], known: tuple[str, ...], late: bool) -> dict[str, str]:
    """The peers that a row leaves out from the start, with the reason."""
    return {
        algo: "not asked for" if algo not in asked else "out of time" for algo in known if late or algo not in asked
    }


def usable(calls: dict[str, Call], left_out: dict[str, str]) -> dict[str, Call]:
    """Those that run."""
    kept = {}
    for algo, call in calls.items():
        try:
            call()
            kept[algo] = call
        except Exception as error:
            if algo == "ours":
                raise
            left_out[algo] = reason(error)
    return kept


def timed(calls: dict[str, Call], device: torch.device, stream: Any, seconds: float) -> tuple[dict[str, float], Row]:
    """Medians; on a GPU short calls as graphs, where they can be captured. Gradients run on the stream of their forward
    pass, so all is timed there."""
    if device.type == "cpu":
        return medians(calls, device, seconds=seconds), {}
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        first = medians(calls, device, rounds=1)
        runs, plain = {}, []
        for algo, call in calls.items():
            runs[algo] = call
            if first[algo] < SHORT_MS:
                try:
                    runs[algo] = graphed(call, stream)
                except Exception:  # not every peer can be captured
                    plain.append(algo)
                    torch.cuda.synchronize()
        ms = medians(runs, device, seconds=seconds)
    return ms, {"not_graphed": plain} if plain else {}


def error_of(o: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> float:
    """Of some rows of the last head, against fp32."""
    rows = torch.arange(q.shape[2], device=q.device)[3 if q.shape[2] > 16 else 0 :: max(q.shape[2] // 61, 1)]
    keys = torch.arange(k.shape[2], device=q.device)
    scores = q[-1, -1, rows].float() @ k[-1, -1].float().T / math.sqrt(q.shape[3])
    allowed = rule(rows[:, None] + k.shape[2] - q.shape[2], keys[None])
    scores = scores.masked_fill(~allowed.expand_as(scores), -math.inf)
    want = torch.nan_to_num(torch.softmax(scores, -1)) @ v[-1, -1].float()
    return (o[-1, -1, rows].float() - want).abs().max().item()


def tensors(batch: int, heads: tuple[int, int], sizes: tuple[int, int], depth: int, dtype: torch.dtype,
            device: torch.device) -> list[torch.Tensor]:  # fmt: skip
    """q, k, v and the gradient of the result."""
    torch.manual_seed(0)
    shapes = [(batch, h, s, depth) for h, s in zip(heads, sizes, strict=True)]
    return [torch.randn(shapes[n], device=device).to(dtype) for n in (0, 1, 1, 0)]


def floor_of(flops: float, moved: list[torch.Tensor], rates: Rates) -> float:
    return max(flops / rates[1], sum(t.numel() * t.element_size() for t in moved) / rates[0])


def measure(name: str, case: Case, s: int, depth: int, dtype: torch.dtype, device: torch.device, rates: Rates,
            options: argparse.Namespace, left_out: dict[str, str]) -> list[Row]:  # fmt: skip
    """The rows of one pattern."""
    make, rule = case
    began = time.perf_counter()
    pattern = make()
    made = (time.perf_counter() - began) * 1e3
    functions = attentions(name, pattern, rule, device, options.peers, options.flex == "tuned", left_out)
    heads = (options.heads, options.kv_heads or options.heads)
    q, k, v, d_o = tensors(options.batch, heads, (s, s), depth, dtype, device)
    elements = pattern.nnz * options.batch * options.heads
    facts: Row = {
        "part": "pattern", "pattern": name, "call": pattern.text.split("(")[0],
        "text": pattern.text if len(pattern.text) < 100 else None, "seq": s,
        "batch": options.batch, "heads": heads[0], "kv_heads": heads[1], "depth": depth, "dtype": str(dtype)[6:],
        "density": pattern.density, "make_ms": made, "flex": options.flex,
    }  # fmt: skip
    rows: list[Row] = []
    stream = torch.cuda.Stream() if device.type == "cuda" else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())

    def keep(which: str, products: int, calls: dict[str, Call], moved: list[torch.Tensor], more: Row) -> None:
        ms, how = timed(calls, device, stream, options.seconds)
        flops = 2.0 * products * elements * depth
        rate = {algo: flops / t / 1e9 for algo, t in ms.items()}
        rows.append({**facts, "pass": which, "ms": ms, "tflops": rate, "floor_ms": floor_of(flops, moved, rates),
                     **more, **how, "left_out": dict(left_out)})  # fmt: skip

    if "forward" in options.passes:
        with torch.inference_mode():
            calls = usable({a: partial(f, q, k, v) for a, f in functions.items()}, left_out)
            keep("forward", 2, calls, [q, k, v, q], {"error": error_of(functions["ours"](q, k, v), q, k, v, rule)})
    if "backward" in options.passes:
        leaves = [x.requires_grad_() for x in (q, k, v)]
        backwards: dict[str, Call] = {}
        for algo, f in functions.items():
            try:
                with torch.cuda.stream(stream):  # where a graph of the gradients is captured
                    o = f(*leaves)
                backwards[algo] = partial(torch.autograd.grad, o, leaves, d_o, retain_graph=True)
            except Exception as error:
                left_out[algo] = reason(error)
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)
        keep("backward", 5, usable(backwards, left_out), [q, k, v, q, q, q, k, v], {})
    return rows


def measure_decode(queries: int, device: torch.device, dtype: torch.dtype, rates: Rates, options: argparse.Namespace,
                   late: bool) -> Row:  # fmt: skip
    """One query, or a few, against the sinks and the window of a long past; bound by reading its keys and values."""
    gpu = device.type == "cuda"
    past, window, batch, kv_heads, depth = (65536, 4096, 16, 8, 128) if gpu else (8192, 1024, 2, 2, 64)
    pattern = fw.patterns.sinks((queries, past), 4, window)
    rule: Rule = lambda i, j: (j <= i) & ((j < 4) | (i - j < window))  # noqa: E731
    known = ("flex", "sdpa")
    algos = [algo for algo in known if algo in options.peers or (gpu and options.peers)]
    left_out = not_run(algos, known, late)
    functions = attentions("sinks", pattern, rule, device, algos, options.flex == "tuned", left_out)
    q, k, v, _ = tensors(batch, (8 * kv_heads, kv_heads), (queries, past), depth, dtype, device)
    with torch.inference_mode():
        calls = usable({a: partial(f, q, k, v) for a, f in functions.items()}, left_out)
        ms = medians(calls, device, seconds=options.seconds)  # the host is ahead; a graph adds microseconds of its own
        error = error_of(functions["ours"](q, k, v), q, k, v, rule)
    seen = 4 + window + queries - 1
    moved = 2 * batch * kv_heads * seen * depth * k.element_size()
    return {
        "part": "decode", "pattern": "sinks", "text": pattern.text, "pass": "forward", "queries": queries,
        "seq": past, "batch": batch, "heads": 8 * kv_heads, "kv_heads": kv_heads, "depth": depth,
        "dtype": str(dtype)[6:], "ms": ms, "floor_ms": moved / rates[0], "gb_per_s": moved / ms["ours"] / 1e6,
        "copy_gb_per_s": rates[0] / 1e6, "error": error, "left_out": left_out, "flex": options.flex,
    }  # fmt: skip


def measure_host(device: torch.device, dtype: torch.dtype) -> list[Row]:
    """A call so small that the host is what takes time; plan cached, inference mode."""
    pattern = fw.patterns.sliding_window(128, 16, 16)
    q, k, v, _ = tensors(1, (1, 1), (128, 128), 64, dtype, device)
    with torch.inference_mode():
        ours = host_microseconds(lambda: fw.attention(q, k, v, pattern))
        empty = host_microseconds(lambda: torch.ops.fretwork._nothing(q))
        dense = host_microseconds(lambda: scaled_dot_product_attention(q, k, v))
    return [{"part": "host", "dtype": str(dtype)[6:], "us": ours, "empty_op_us": empty, "torch_us": dense}]


FIRST_CALL = """
import sys, time, torch, fretwork as fw
s = 2048
q, k, v, d = (torch.randn(1, 2, s, 128, device=sys.argv[2]).bfloat16() for _ in range(4))
wait = torch.cuda.synchronize if q.is_cuda else lambda: None
q @ k.mT; wait()
t = time.perf_counter()
pattern = fw.Pattern.parse(sys.argv[1]); o, lse = fw.attention(q, k, v, pattern, return_lse=True); wait()
u = time.perf_counter()  # the op itself: autograd and what else a gradient goes through have first calls of their own
rest = (None, pattern.key, None, None, None, 0.0, 0.0, None, "ieee", True, True, True, False)
torch.ops.fretwork.attention_backward(q, k, v, o, lse, d, *rest); wait()
print((u - t) * 1e3, (time.perf_counter() - u) * 1e3)
"""


def measure_first_calls(texts: tuple[str, ...], device: torch.device) -> list[Row]:
    """The first call of a process and its first gradient, kernel cache empty and filled."""
    rows: list[Row] = []
    for text in texts:
        with tempfile.TemporaryDirectory() as cache_folder:
            env = {**os.environ, "FRETWORK_CACHE_DIR": cache_folder}
            for cache in ("cold", "warm"):
                run = [sys.executable, "-c", FIRST_CALL, text, device.type]
                out = subprocess.run(run, env=env, capture_output=True, text=True)
                if out.returncode != 0:
                    print(f"first: {text}: {out.stderr.splitlines()[-1:]}", file=sys.stderr)
                forward, backward = map(float, out.stdout.split()[-2:]) if out.returncode == 0 else (None, None)
                rows.append({"part": "first", "pattern": text, "cache": cache, "ms": {"ours": forward},
                             "backward_ms": backward})  # fmt: skip
    return rows


def program() -> str | None:
    """The command-line program beside the libraries in use."""
    beside = Path(os.environ.get("FRETWORK_LIB_DIR", "/nowhere")).parent / "bin" / "fretwork"
    return str(beside) if beside.exists() else shutil.which("fretwork")


def measure_plans(rounds: int = 5) -> list[Row]:
    """Patterns of a million tokens, made and planned by the program."""
    name = program()
    if name is None:
        print("plan: no fretwork program found beside the libraries or on the path", file=sys.stderr)
        return []
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "plans.json"
        run = [name, "bench", "attention", "--plans", "--rounds", str(rounds), "--json", str(path)]
        subprocess.run(run, check=True, capture_output=True)
        measured = json.loads(path.read_text())["rows"]
    return [{"part": "plan", **row} for row in measured]


def line_of(row: Row) -> str:
    """What is printed of a row."""
    if row["part"] == "host":
        return (f"host: {row['us']:.1f} us a call, an op that does nothing {row['empty_op_us']:.1f}, "
                f"torch's attention {row['torch_us']:.1f}")  # fmt: skip
    if row["part"] == "plan":
        return (f"{row['pattern']}: made in {row['make_ms']:.2f} ms, planned in {row['plan_ms']:.2f} "
                f"(transposed {row['transposed_ms']:.2f}), {row['bytes'] / 1e6:.2f} MB")  # fmt: skip
    if row["part"] == "first":
        forward, backward = (number(ms, 1) for ms in (row["ms"]["ours"], row["backward_ms"]))
        return f"first call, {row['cache']} cache, {row['pattern']}: {forward} ms, its gradient {backward}"
    times = " ".join(f"{a} {t:.4f}" for a, t in row["ms"].items())
    if row["part"] == "decode":
        return (f"decode {row['queries']} of {row['seq']}: {times} ms, {row['gb_per_s']:.3g} GB/s of "
                f"{row['copy_gb_per_s']:.3g}, error {row['error']:.4f}")  # fmt: skip
    more = f" error {row['error']:.4f}" if "error" in row else ""
    return (f"{row['pattern']} {row['pass']} S={row['seq']} D={row['depth']} {row['dtype']} density "
            f"{row['density']:.4f}: {times} ms, floor {row['floor_ms']:.4f}, ours "
            f"{row['tflops']['ours']:.3g} TFLOP/s{more}")  # fmt: skip


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="one table of eight patterns; peers while time is left")
    parser.add_argument("--parts", default="", help=f"{','.join(PARTS)}; host and first on a GPU only")
    parser.add_argument("--patterns", default="", help="all unless named, with commas")
    parser.add_argument("--passes", default="forward,backward")
    parser.add_argument("--seqs", default="", help="16384 on a GPU, 2048 on a CPU; several with commas")
    parser.add_argument("--depths", default="", help="128 on a GPU (64,128 if not quick), 64 on a CPU")
    parser.add_argument("--dtypes", default="", help="bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=0, help="16 on a GPU, 4 on a CPU")
    parser.add_argument("--kv-heads", type=int, default=0, help="as many as heads unless given")
    parser.add_argument("--peers", default="", help="flex,cudnn,fa2 on a GPU, flex,sdpa on a CPU; none for none")
    parser.add_argument("--flex", choices=("plain", "tuned"), default="plain", help="how Flex is compiled")
    parser.add_argument("--seconds", type=float, default=0.0, help="of measuring for a row (1; quick: 0.15)")
    parser.add_argument("--minutes", type=float, default=0.0, help="that peers may make the whole run last (no limit)")
    parser.add_argument("--out", type=Path, help="where rows go; quick ones, some without peers, nowhere unless given")
    options = parser.parse_args()
    gpu = options.device.startswith("cuda")
    options.passes = numbers(options.passes, str)
    options.parts = numbers(options.parts or ",".join(PARTS), str)
    options.patterns = numbers(options.patterns or (QUICK if options.quick else ""), str)
    options.seqs = numbers(options.seqs or ("16384" if gpu else "2048"), int)
    options.depths = numbers(options.depths or ("64" if not gpu else "128" if options.quick else "64,128"), int)
    options.dtypes = numbers(options.dtypes or ("bfloat16" if gpu else "float32"), str)
    options.heads = options.heads or (16 if gpu else 4)
    options.peers = numbers(
        "" if options.peers == "none" else options.peers or ",".join(PEERS["cuda" if gpu else "cpu"]), str
    )
    options.seconds = options.seconds or (0.15 if options.quick else 1.0)
    options.minutes = options.minutes or (0.35 if options.quick else math.inf)
    options.out = options.out or (None if options.quick else RESULTS)
    return options


def main() -> None:
    options = parsed()
    device = torch.device(options.device)
    gpu = device.type == "cuda"
    began, facts = time.perf_counter(), machine(device)
    rows: list[Row] = []

    def late(share: float) -> bool:
        return time.perf_counter() - began > 8 + share * 60 * options.minutes

    def keep(some: list[Row]) -> None:
        for row in some:
            rows.append({**facts, **row})
            print(line_of(row), flush=True)

    copies = copy_rate(device)
    rates = {name: (copies, dense_rate(getattr(torch, name), device)) for name in options.dtypes}
    try:
        if "patterns" in options.parts:
            work = [(s, name, depth, dtype) for s in options.seqs
                    for name in options.patterns or list(cases(s, device, GPU if gpu else CPU))
                    for depth in options.depths for dtype in options.dtypes]  # fmt: skip
            for done, (s, name, depth, dtype) in enumerate(work):
                case = cases(s, device, GPU if gpu else CPU)[name]
                left_out = not_run(options.peers, PEERS[device.type], late((done + 1) / len(work)))
                try:
                    keep(measure(name, case, s, depth, getattr(torch, dtype), device, rates[dtype], options, left_out))
                except Exception as error:
                    if name == "full" and not gpu:
                        raise
                    print(f"{name} {s} {depth} {dtype}: {error}", file=sys.stderr)
                if gpu:
                    torch.cuda.empty_cache()
        dtype = getattr(torch, options.dtypes[0])
        if "decode" in options.parts:
            for queries in (1, 16):
                keep([measure_decode(queries, device, dtype, rates[options.dtypes[0]], options, late(1))])
        if "host" in options.parts and gpu:  # on a CPU the host is where the work is done
            keep(measure_host(device, dtype))
        if "plan" in options.parts:
            keep(measure_plans())
        if "first" in options.parts and gpu:
            quick = ("sliding_window(2048,255,0)",)
            keep(measure_first_calls(quick if options.quick else (*quick, "strided(2048,64)", "full(2048)"), device))
    finally:
        if options.out is not None:
            store(folder(options.out, facts) / "attention.json", rows, IDENTITY, UNSAID)
        if rows:
            print("", *attention_section(rows), sep="\n")
        print(f"{len(rows)} rows in {time.perf_counter() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
