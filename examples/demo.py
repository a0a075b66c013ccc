"""The demo: block-sparse products and sparse attention here, checked against float64 and timed beside torch."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch

import fretwork as fw


def median_ms(call: Callable[[], object], device: torch.device, rounds: int = 7) -> float:
    times = []
    for _ in range(rounds):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return sorted(times)[rounds // 2]


def checked(got: torch.Tensor, exact: torch.Tensor, what: str) -> float:
    """The largest error, relative to the largest value; stops the demo where it is more than rounding."""
    error = ((got.double() - exact).abs().max() / exact.abs().max()).item()
    if not error < (1e-4 if got.dtype == torch.float32 else 2e-2):
        raise SystemExit(f"demo: {what} on {got.device.type}, {got.dtype}: wrong result, error {error:.1e}")
    return error


def row(device: torch.device, dtype: torch.dtype, n: int, block: int, density: float) -> str:
    mask = torch.rand(n // block, n // block) < density
    layout = fw.BlockLayout(mask, block)
    values = torch.randn(layout.nnz, block, block).to(device, dtype)
    x = torch.randn(n, n).to(device, dtype)
    dense = layout.unpack(values)[0]
    crow = torch.cat([torch.zeros(1, dtype=torch.long), mask.sum(1).cumsum(0)]).to(device)
    bsr = torch.sparse_bsr_tensor(crow, mask.nonzero()[:, 1].to(device), values, size=(n, n))

    error = checked(fw.dsd(values, x, layout), dense.double() @ x.double(), f"dsd of blocks of {block}")
    ours = median_ms(lambda: fw.dsd(values, x, layout), device)
    torch_dense = median_ms(lambda: dense @ x, device)
    torch_bsr = median_ms(lambda: bsr @ x, device, rounds=3)
    name = str(dtype)[6:]
    return (f"{device.type:6} {name:9} {n:6} {block:6} {density:8.2f} {ours:9.2f} "
            f"{torch_dense / ours:9.1f}x {torch_bsr / ours:9.1f}x {error:10.1e}")  # fmt: skip


def attention_row(device: torch.device, dtype: torch.dtype, heads: int, depth: int, pattern: fw.Pattern) -> str:
    seq = pattern.shape[0]
    q, k, v = (torch.randn(1, heads, seq, depth).to(device, dtype) for _ in range(3))
    mask = pattern.mask(device).bool()
    dense = torch.nn.functional.scaled_dot_product_attention
    exact = dense(q[:, :1].double(), k[:, :1].double(), v[:, :1].double(), mask)
    with torch.inference_mode():
        error = checked(fw.attention(q, k, v, pattern)[:, :1], exact, pattern.text)
        ours = median_ms(lambda: fw.attention(q, k, v, pattern), device)
        masked = median_ms(lambda: dense(q, k, v, mask), device, rounds=3)
    name = str(dtype)[6:]
    return (f"{device.type:6} {name:9} {pattern.text:28} {pattern.density:8.4f} {ours:9.2f} {masked / ours:9.1f}x "
            f"{error:10.1e}")  # fmt: skip


def attention_rows(device: torch.device) -> None:
    gpu = device.type == "cuda"
    seq, heads, depth, dtype = (8192, 16, 128, torch.bfloat16) if gpu else (2048, 4, 64, torch.float32)
    p, side = fw.patterns, 64 if gpu else 32
    for pattern in (
        p.sliding_window(seq, 128, 128),
        p.strided(seq, 64),
        p.dilated(seq, 128, 4),
        p.neighborhood((side, seq // side), 7),
    ):
        print(attention_row(device, dtype, heads, depth, pattern), flush=True)


def main() -> None:
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", message=".*(Sparse|bsr_dense_addmm).*")  # torch's own, about its BSR
    print("\nC = W·X, W block-sparse, n × n; error against float64")
    print("device dtype          n  block  density   time ms  vs dense    vs BSR      error")
    for block, density in ((64, 0.25), (32, 0.1), (16, 0.05)):
        print(row(torch.device("cpu"), torch.float32, 1536, block, density), flush=True)
    if torch.cuda.is_available():
        for block, density in ((128, 0.25), (64, 0.1), (32, 0.1), (16, 0.05)):
            print(row(torch.device("cuda"), torch.float16, 8192, block, density), flush=True)
    else:
        print("(no CUDA device here: the GPU rows are left out)")
    print("\nAttention over a pattern, beside torch's with the same mask")
    print("device dtype     pattern                       density   time ms vs masked      error")
    attention_rows(torch.device("cpu"))
    if torch.cuda.is_available():
        attention_rows(torch.device("cuda"))


if __name__ == "__main__":
    main()
