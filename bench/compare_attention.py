"""Fretwork's attention beside FlexAttention, cuDNN and FlashAttention-2 on the same masks and data in one run.

    python bench/compare_attention.py                                     # every pattern, forward and backward
    python bench/compare_attention.py --patterns full,causal --passes forward --depths 64,128
    python bench/compare_attention.py --device cpu --seqs 2048 --heads 4 --depths 64 --dtypes float32

Rows go to bench/results/<device>/attention.json, losing ones too. Flex is compiled for each mask and shape, as its
users would; cuDNN and FlashAttention-2 run where they know the mask, which is full and causal. TFLOP/s count the
pattern's elements alone, two products forward and five backward. FRETWORK_ARCH=sm_80 forces the portable kernels and
marks the rows so.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import fretwork as fw
from rows import RESULTS, Row, folder, machine, numbers, store
from timing import host_microseconds, medians

IDENTITY = ("pattern", "pass", "seq", "batch", "heads", "kv_heads", "depth", "dtype", "arch")
PEERS = ("flex", "cudnn", "fa2")
Rule = Callable[[Any, Any], Any]  # of query and key positions, ints or tensors


def clamped(window: int, size: int) -> Rule:
    """A window of `window` positions around i that stays inside [0, size)."""

    def rule(i: Any, j: Any) -> Any:
        begin = torch.clamp(i - window // 2, 0, size - window)
        return (j >= begin) & (j < begin + window)

    return rule


def grid(s: int) -> tuple[int, int]:
    """A grid of s positions, as square as a power of two allows."""
    height = 1 << (s.bit_length() - 1) // 2
    return height, s // height


def neighbours(s: int, window: int) -> Rule:
    (height, width), rows, cols = grid(s), clamped(window, grid(s)[0]), clamped(window, grid(s)[1])
    assert height * width == s
    return lambda i, j: rows(i // width, j // width) & cols(i % width, j % width)


def tiles(s: int, tile: int, window: int) -> Rule:
    height, width = grid(s)
    rows, cols = clamped(window, height // tile), clamped(window, width // tile)
    return lambda i, j: rows(i // width // tile, j // width // tile) & cols(i % width // tile, j % width // tile)


def regions(s: int, window: int, shift: int) -> Rule:
    height, width = grid(s)

    def part(x: Any, size: int) -> Any:  # windows after the shift, which the wrap cuts
        return (x - shift) % size // window * 2 + (x < shift) * 1

    return lambda i, j: (
        (part(i // width, height) == part(j // width, height)) & (part(i % width, width) == part(j % width, width))
    )


def documents(s: int) -> list[int]:
    lengths = [s // 3, s // 7, s // 5, s // 9]
    return [*lengths, s - sum(lengths)]


def same_document(s: int, device: torch.device) -> Rule:
    lengths = torch.tensor(documents(s), device=device)
    of = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
    return lambda i, j: (of[i] == of[j]) & (j <= i)


def cases(s: int, device: torch.device) -> dict[str, tuple[Callable[[], fw.Pattern], Rule]]:
    """Patterns by name: how Fretwork makes them, and the rule that others are given."""
    p = fw.patterns
    slash = [*range(256), 1024, 2048, 4095]
    vertical = list(range(0, s, max(s // 64, 1)))

    def listed(i: Any, j: Any) -> Any:
        d = i - j
        return (j <= i) & ((j % max(s // 64, 1) == 0) | (d < 256) | (d == 1024) | (d == 2048) | (d == 4095))

    def longnet(i: Any, j: Any) -> Any:
        hit = None
        for w, r in ((2048, 1), (4096, 2), (8192, 4)):
            one = (i // w == j // w) & (i % r == 0) & (j % r == 0)
            hit = one if hit is None else hit | one
        return hit

    return {
        "full": (lambda: p.full(s), lambda i, j: j >= 0),
        "causal": (lambda: p.causal(s), lambda i, j: j <= i),
        "window": (lambda: p.sliding_window(s, 512, 512), lambda i, j: (i - j <= 512) & (j - i <= 512)),
        "causal window": (lambda: p.sliding_window(s, 1023, 0), lambda i, j: (j <= i) & (i - j < 1024)),
        "block-local": (lambda: p.block_local(s, 1024), lambda i, j: i // 1024 == j // 1024),
        "longformer": (
            lambda: p.longformer(s, 512, range(64)),
            lambda i, j: ((i - j <= 512) & (j - i <= 512)) | (i < 64) | (j < 64),
        ),
        "dilated": (
            lambda: p.dilated(s, 512, 4),
            lambda i, j: (i - j <= 2048) & (j - i <= 2048) & ((i - j) % 4 == 0),
        ),
        "dilated narrow": (
            lambda: p.dilated(s, 128, 4),
            lambda i, j: (i - j <= 512) & (j - i <= 512) & ((i - j) % 4 == 0),
        ),
        "strided": (lambda: p.strided(s, 128), lambda i, j: (j <= i) & ((i - j < 128) | ((i - j) % 128 == 0))),
        "fixed": (lambda: p.fixed(s, 128, 16), lambda i, j: (j <= i) & ((i // 128 == j // 128) | (j % 128 >= 112))),
        "neighborhood": (lambda: p.neighborhood(grid(s), 13), neighbours(s, 13)),
        "sliding tile": (lambda: p.sliding_tile(grid(s), 8, 3), tiles(s, 8, 3)),
        "swin": (lambda: p.swin(*grid(s), 16, 8), regions(s, 16, 8)),
        "axial": (
            lambda: p.axial(*grid(s)),
            lambda i, j: (i // grid(s)[1] == j // grid(s)[1]) | (i % grid(s)[1] == j % grid(s)[1]),
        ),
        "longnet": (lambda: p.longnet(s, (2048, 4096, 8192), (1, 2, 4)), longnet),
        "document": (lambda: p.document(documents(s), causal=True), same_document(s, device)),
        "prefix": (lambda: p.prefix_lm(s, s // 8), lambda i, j: (j <= i) | (j < s // 8)),
        "sinks": (lambda: p.sinks(s, 64, 1024), lambda i, j: (j <= i) & ((j < 64) | (i - j < 1024))),
        "vertical-slash": (lambda: p.vertical_slash(s, vertical, slash), listed),
    }


def dense(backend: SDPBackend, causal: bool) -> Callable[..., torch.Tensor]:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    return call


def peer(name: str, pattern: str, rule: Rule, s: int, device: torch.device) -> Callable[..., torch.Tensor] | None:
    """How a peer computes this mask, or None where it has no way."""
    if name == "flex":
        mask = create_block_mask(lambda b, h, i, j: rule(i, j), None, None, s, s, device=device.type, _compile=True)
        compiled = torch.compile(flex_attention, dynamic=False)
        return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    if device.type == "cuda" and pattern in ("full", "causal"):
        backend = SDPBackend.CUDNN_ATTENTION if name == "cudnn" else SDPBackend.FLASH_ATTENTION
        return dense(backend, pattern == "causal")
    return None


def error_of(o: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule) -> float:
    """Of some rows of the last head, against fp32."""
    s = q.shape[2]
    rows = torch.arange(3, s, max(s // 61, 1), device=q.device)
    keys = torch.arange(s, device=q.device)
    scores = q[-1, -1, rows].float() @ k[-1, -1].float().T / math.sqrt(q.shape[3])
    scores = scores.masked_fill(~rule(rows[:, None], keys[None]).expand_as(scores), -math.inf)
    want = torch.nan_to_num(torch.softmax(scores, -1)) @ v[-1, -1].float()
    return (o[-1, -1, rows].float() - want).abs().max().item()


def tensors(options: argparse.Namespace, s: int, depth: int, dtype: torch.dtype, device: torch.device) -> Any:
    torch.manual_seed(0)
    size = lambda heads: (options.batch, heads, s, depth)  # noqa: E731
    heads, kv_heads = options.heads, options.kv_heads or options.heads
    return tuple(torch.randn(size(h), device=device, dtype=dtype) for h in (heads, kv_heads, kv_heads, heads))


def calls_of(name: str, make: Callable[[], fw.Pattern], rule: Rule, s: int, device: torch.device, algos: list[str],
             left_out: dict[str, str]) -> tuple[fw.Pattern, float, dict[str, Callable[..., torch.Tensor]]]:  # fmt: skip
    """The pattern, the milliseconds it took to make, and a function of q, k and v for each way."""
    began = time.perf_counter()
    pattern = make()
    made = (time.perf_counter() - began) * 1e3
    calls: dict[str, Callable[..., torch.Tensor]] = {"ours": lambda q, k, v: fw.attention(q, k, v, pattern)}
    for algo in algos:
        try:
            if (call := peer(algo, name, rule, s, device)) is not None:
                calls[algo] = call
        except Exception as error:  # a peer fails in ways of its own
            left_out[algo] = str(error).splitlines()[0][:120]
    return pattern, made, calls


def usable(calls: dict[str, Callable[[], object]], left_out: dict[str, str]) -> dict[str, Callable[[], object]]:
    """Those that run."""
    kept = {}
    for algo, call in calls.items():
        try:
            call()
            kept[algo] = call
        except Exception as error:
            if algo == "ours":
                raise
            left_out[algo] = str(error).splitlines()[0][:120]
    return kept


def measure(name: str, case: tuple[Callable[[], fw.Pattern], Rule], s: int, depth: int, dtype: torch.dtype,
            device: torch.device, options: argparse.Namespace) -> list[Row]:  # fmt: skip
    make, rule = case
    left_out: dict[str, str] = {}
    pattern, made, functions = calls_of(name, make, rule, s, device, numbers(options.peers, str), left_out)
    q, k, v, d_o = tensors(options, s, depth, dtype, device)
    elements = pattern.nnz * options.batch * options.heads
    facts: Row = {
        "pattern": name, "seq": s, "batch": options.batch, "heads": options.heads, "kv_heads": k.shape[1],
        "depth": depth, "dtype": str(dtype)[6:], "density": pattern.density, "make_ms": made,
    }  # fmt: skip
    rows: list[Row] = []

    def keep(which: str, products: int, calls: dict[str, Callable[[], object]], more: Row) -> None:
        ms = medians(calls, device, seconds=options.seconds)
        rate = {algo: 2 * products * elements * depth / t / 1e9 for algo, t in ms.items()}
        rows.append({**facts, "pass": which, "ms": ms, "tflops": rate, **more, "left_out": dict(left_out)})

    if "forward" in options.passes:
        with torch.inference_mode():
            calls = usable({a: (lambda f=f: f(q, k, v)) for a, f in functions.items()}, left_out)
            host = host_microseconds(calls["ours"], 70)
            keep("forward", 2, calls, {"error": error_of(calls["ours"](), q, k, v, rule), "host_us": host})
    if "backward" in options.passes:
        leaves = [x.requires_grad_() for x in (q, k, v)]
        backwards: dict[str, Callable[[], object]] = {}
        for algo, f in functions.items():
            try:
                o = f(*leaves)
                backwards[algo] = lambda o=o: torch.autograd.grad(o, leaves, d_o, retain_graph=True)
            except Exception as error:
                left_out[algo] = str(error).splitlines()[0][:120]
        keep("backward", 5, usable(backwards, left_out), {})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--patterns", default="", help="all unless named, with commas")
    parser.add_argument("--passes", default="forward,backward")
    parser.add_argument("--seqs", default="16384")
    parser.add_argument("--depths", default="128")
    parser.add_argument("--dtypes", default="bfloat16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=0, help="as many as heads unless given")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--seconds", type=float, default=1.0, help="of measuring for a row")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.passes = numbers(options.passes, str)
    device = torch.device(options.device)
    torch._dynamo.config.cache_size_limit = 512
    facts, rows = machine(device), []
    try:
        for s in numbers(options.seqs, int):
            table = cases(s, device)
            for name in numbers(options.patterns, str) or list(table):
                for depth in numbers(options.depths, int):
                    for dtype in numbers(options.dtypes, str):
                        try:
                            some = measure(name, table[name], s, depth, getattr(torch, dtype), device, options)
                        except Exception as error:
                            print(f"{name} {s} {depth} {dtype}: {error}", file=sys.stderr)
                            continue
                        for row in some:
                            rows.append({**facts, **row})
                            times = " ".join(f"{a} {t:.4f}" for a, t in row["ms"].items())
                            more = f"error {row['error']:.4f} host {row['host_us']:.0f} us" if "error" in row else ""
                            print(f"{name} {row['pass']} S={s} D={depth} {dtype} density {row['density']:.4f}: {times} "
                                  f"ms, ours {row['tflops']['ours']:.0f} TFLOP/s {more}", flush=True)  # fmt: skip
    finally:
        store(folder(options.out, facts) / "attention.json", rows, IDENTITY)


if __name__ == "__main__":
    main()
