"""Fretwork's block-sparse products and softmax beside torch's dense product and its BSR, on the same data in one run.

    python bench/compare_block.py                      # this machine's GPU if there is one, else its CPU
    python bench/compare_block.py --blocks 128 --densities 0.5 --ops dsd

Rows go to bench/results/<device>/block.json, losing ones too; `python bench/report.py` makes the tables of the docs.
FRETWORK_ARCH=sm_80 forces the portable kernels and marks the rows so.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

import fretwork as fw
from rows import RESULTS, Row, folder, machine, numbers, store
from timing import as_called, host_microseconds, medians

IDENTITY = ("op", "n", "block", "density", "dtype", "arch", "kind", "cache", "call")
BANDWIDTH = 4.3e12  # bytes a second a device-to-device copy reaches on the H200


def tensors(op: str, n: int, block: int, density: float, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """A layout and the operands of C = op(A)·op(B) at n×n×n, with the same matrix as a torch BSR tensor."""
    torch.manual_seed(block * 1000 + int(density * 100))
    mask = torch.rand(1, n // block, n // block) < density
    layout = fw.BlockLayout(mask, block)
    values = (torch.randn(layout.nnz, block, block, device=device) / 8).to(dtype)
    dense = torch.randn(n, n, device=device).to(dtype)
    cols = mask[0].nonzero()[:, 1]
    crow = torch.cat([torch.zeros(1, dtype=torch.long), mask[0].sum(1).cumsum(0)])
    bsr = torch.sparse_bsr_tensor(crow.to(device), cols.to(device), values, size=(n, n))
    full = layout.unpack(values)
    return {"layout": layout, "values": values, "dense": dense, "bsr": bsr, "full": full.reshape(n, n)}


def product_case(op: str, data: dict[str, Any]) -> tuple[Any, Any, Any]:
    """(ours, torch's BSR or None, the float32 result to compare with)."""
    layout, values, dense, bsr, full = (data[k] for k in ("layout", "values", "dense", "bsr", "full"))
    if op == "dsd":
        return lambda: fw.dsd(values, dense, layout), lambda: bsr @ dense, lambda: full.float() @ dense.float()
    if op == "dds":
        # torch has dense·BSRᵀ only, as nn.functional.linear: the nearest a user gets
        return (
            lambda: fw.dds(dense, values, layout),
            lambda: torch.nn.functional.linear(dense, bsr),
            lambda: dense.float() @ full.float(),
        )
    return lambda: fw.sdd(dense, full, layout), None, lambda: layout.pack(dense.float() @ full.float())


def works(call: Any) -> bool:
    """Whether a peer runs here at all."""
    try:
        call()
        return True
    except (RuntimeError, NotImplementedError, ValueError, AttributeError):
        return False


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.float() - want).abs().max() / want.abs().max()).item()


@functools.cache
def full_rate(n: int, dtype: torch.dtype, device: torch.device) -> float:
    """FLOP a millisecond of torch's dense product on random data: what a matrix without zeros would run at."""
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2.0 * n**3 / medians({"dense": lambda: a @ b}, device)["dense"]


def measure_product(op: str, n: int, block: int, density: float, dtype: torch.dtype, device: torch.device) -> Row:
    data = tensors(op, n, block, density, dtype, device)
    ours, peer, exact = product_case(op, data)
    error = relative_error(ours(), exact())
    calls = {"fretwork": ours, "dense": lambda: data["full"] @ data["dense"]}
    if peer is not None and works(peer):
        calls["bsr"] = peer
    if device.type == "cpu":  # other work on it comes and goes: rates compare only within the same rounds
        calls["full"] = lambda: data["dense"] @ data["dense"]
    ms = medians(calls, device)
    stored = data["layout"].nnz * block * block
    flops, size = 2.0 * stored * n, data["dense"].element_size()
    moved = (stored + 2 * n * n) * size
    dense_rate = 2.0 * n**3 / ms["full"] if "full" in ms else full_rate(n, dtype, device)
    return {
        "op": op, "n": n, "block": block, "density": density, "dtype": str(dtype)[6:],
        "ms": ms["fretwork"], "tflops": flops / ms["fretwork"] / 1e9, "as_called_ms": as_called(ours, device),
        "dense_ms": ms["dense"], "dense_tflops": dense_rate / 1e9,
        "bsr_ms": ms.get("bsr"), "bsr_tflops": flops / ms["bsr"] / 1e9 if "bsr" in ms else None,
        "floor_ms": max(flops / dense_rate, moved / BANDWIDTH * 1e3 if device.type == "cuda" else 0.0),
        "error": error,
    }  # fmt: skip


def measure_softmax(n: int, block: int, density: float, dtype: torch.dtype, device: torch.device) -> Row:
    heads = 8
    torch.manual_seed(block)
    mask = torch.rand(heads, n // block, n // block) < density
    layout = fw.BlockLayout(mask, block)
    values = torch.randn(2, layout.nnz, block, block, device=device).to(dtype)
    dense = torch.randn(2, heads, n, n, device=device, dtype=dtype)
    small = fw.BlockLayout(mask[:1], block)
    some = values[:1, : small.nnz]
    want = small.unpack(some, fill=float("-inf")).float().softmax(-1).nan_to_num(0.0)
    error = relative_error(fw.block_softmax(some, small), small.pack(want))
    ms = medians({"fretwork": lambda: fw.block_softmax(values, layout), "dense": lambda: dense.softmax(-1)}, device)
    moved = 2 * values.numel() * values.element_size()
    return {
        "op": "block_softmax", "n": n, "block": block, "density": density, "dtype": str(dtype)[6:],
        "ms": ms["fretwork"], "tb_per_s": moved / ms["fretwork"] / 1e9, "dense_ms": ms["dense"],
        "as_called_ms": as_called(lambda: fw.block_softmax(values, layout), device),
        "floor_ms": moved / BANDWIDTH * 1e3 if device.type == "cuda" else None, "error": error,
    }  # fmt: skip


def measure_host(device: torch.device) -> list[Row]:
    """Host time of a small dsd in inference mode with its plan cached, beside an op that does nothing."""
    layout = fw.BlockLayout(torch.eye(4, dtype=torch.bool), 64)
    values = torch.randn(layout.nnz, 64, 64, device=device, dtype=torch.float16)
    dense = torch.randn(256, 64, device=device, dtype=torch.float16)
    with torch.inference_mode():
        empty = host_microseconds(lambda: torch.ops.fretwork._nothing(dense))
        ours = host_microseconds(lambda: fw.dsd(values, dense, layout))
        matmul = host_microseconds(lambda: dense @ dense.T)
    return [
        {"op": "host", "call": "dsd", "us": ours, "empty_op_us": empty, "over_us": ours - empty, "torch_us": matmul}
    ]


FIRST_CALL = """
import time, torch, fretwork as fw
layout = fw.BlockLayout(torch.eye(4, dtype=torch.bool), {block})
v = torch.randn(layout.nnz, {block}, {block}, device="cuda", dtype=torch.float16)
d = torch.randn(4 * {block}, 512, device="cuda", dtype=torch.float16)
d @ d.T; torch.cuda.synchronize()
t = time.perf_counter(); fw.dsd(v, d, layout); torch.cuda.synchronize(); print((time.perf_counter() - t) * 1e3)
"""


def measure_first_calls() -> list[Row]:
    """The first dsd of a process, with an empty kernel cache and with a warm one."""
    rows: list[Row] = []
    for kind, block, arch in (("portable", 128, "sm_80"), ("hopper", 128, ""), ("hopper narrow", 32, "")):
        with tempfile.TemporaryDirectory() as folder:
            env = {**os.environ, "FRETWORK_CACHE_DIR": folder, **({"FRETWORK_ARCH": arch} if arch else {})}
            for cache in ("cold", "warm"):
                out = subprocess.run(
                    [sys.executable, "-c", FIRST_CALL.format(block=block)], env=env, capture_output=True, text=True
                )
                ms = float(out.stdout.split()[-1]) if out.returncode == 0 else None
                rows.append({"op": "first call", "kind": kind, "block": block, "cache": cache, "ms": ms})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--n", type=int, default=0, help="8192 on a GPU, 2048 on a CPU")
    parser.add_argument("--blocks", default="128,64,32,16")
    parser.add_argument("--densities", default="0.5,0.25,0.1,0.05")
    parser.add_argument("--ops", default="dsd,dds,sdd,softmax,host,first")
    parser.add_argument("--dtypes", default="", help="float16 on a GPU, float32,bfloat16 on a CPU")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    device = torch.device(options.device)
    gpu = device.type == "cuda"
    n = options.n or (8192 if gpu else 2048)
    dtypes = numbers(options.dtypes or ("float16" if gpu else "float32,bfloat16"), str)
    facts, rows = machine(device), []
    warnings.filterwarnings("ignore", message=".*(Sparse|bsr_dense_addmm).*")

    def keep(row: Row) -> None:
        rows.append({**facts, **row})
        shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
        print(json.dumps(shown), flush=True)

    try:
        for op in numbers(options.ops, str):
            if op == "host" and gpu:  # on a CPU the product itself is host time
                for row in measure_host(device):
                    keep(row)
            elif op == "first" and gpu:
                for row in measure_first_calls():
                    keep(row)
            elif op in ("dsd", "dds", "sdd", "softmax"):
                for dtype in dtypes:
                    for block in numbers(options.blocks, int):
                        for density in numbers(options.densities, float):
                            args = (n, block, density, getattr(torch, dtype), device)
                            with torch.inference_mode():
                                keep(measure_softmax(*args) if op == "softmax" else measure_product(op, *args))
    finally:
        store(folder(options.out, facts) / "block.json", rows, IDENTITY)


if __name__ == "__main__":
    main()
