"""Fretwork's block-sparse convolution beside torch's dense one (cuDNN, oneDNN), on the same data in one run.

    python bench/compare_conv.py                        # this machine's GPU if there is one, else its CPU
    python bench/compare_conv.py --quick                # blocks 32 and 64, density 0.25, channels last
    python bench/compare_conv.py --layers 128x256x28 --blocks 64 --passes forward

3×3 kernels, padding 1. Forward, and backward: the gradients of x and of the weight. torch's convolution of each memory
format is measured in the same rounds, cuDNN with its own search. Rows go to bench/results/<device>/conv.json, losing
ones too; `python bench/report.py` makes the tables of the docs. FRETWORK_ARCH=sm_80 forces the portable kernels and
marks the rows so.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import fretwork as fw
from rows import RESULTS, Row, folder, machine, numbers, store
from timing import Call, as_called, medians

IDENTITY = ("pass", "in", "out", "image", "batch", "block", "density", "format", "dtype", "arch", "threads")
FORMATS = {"nhwc": torch.channels_last, "nchw": torch.contiguous_format}


class Layer(NamedTuple):
    """Square images."""

    inner: int
    out: int
    image: int

    @staticmethod
    def read(text: str) -> Layer:
        sizes = [int(n) for n in text.split("x")]
        return Layer(sizes[0], sizes[-2], sizes[-1])


class Case:
    """One layer's data, the same for ours and for torch's."""

    def __init__(self, layer: Layer, batch: int, block: int, density: float, dtype: torch.dtype, device: torch.device):
        torch.manual_seed(block * 1000 + int(density * 100))
        blocks = layer.out // block, layer.inner // block
        mask = torch.zeros(blocks[0] * blocks[1] * 9, dtype=torch.bool)
        mask[torch.randperm(len(mask))[: max(1, round(density * len(mask)))]] = True
        self.layout = fw.BlockLayout.for_conv2d(mask.view(*blocks, 3, 3), block)
        scale = (9 * layer.inner * max(density, 1e-3)) ** -0.5
        self.values = (torch.randn(self.layout.nnz, block, block, device=device) * scale).to(dtype)
        matrices = self.layout.unpack(self.values)
        self.weight = matrices.unflatten(0, (3, 3)).permute(2, 3, 0, 1).contiguous()
        sizes = (batch, layer.inner, layer.image, layer.image), (batch, layer.out, layer.image, layer.image)
        self.x, self.d_out = (torch.randn(s, device=device).to(dtype) for s in sizes)
        self.flops = 2.0 * self.layout.nnz * block * block * batch * layer.image**2
        self.dense_flops = 2.0 * self.weight.numel() * batch * layer.image**2

    def leaves(self, memory_format: torch.memory_format) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x, the dense weight and the incoming gradient in a memory format."""
        found = [t.contiguous(memory_format=memory_format) for t in (self.x, self.weight, self.d_out)]
        return found[0].requires_grad_(), found[1].requires_grad_(), found[2]

    def calls(self, name: str, which: str) -> dict[str, Call]:
        """Ours and torch's of a memory format."""
        x, weight, d_out = self.leaves(FORMATS[name])
        values = self.values.detach().requires_grad_()
        if which == "forward":
            return {"ours": no_grad(lambda: self.ours(x, values)), "dense": no_grad(lambda: self.dense(x, weight))}
        return {
            "ours": gradients(self.ours(x, values), (x, values), d_out),
            "dense": gradients(self.dense(x, weight), (x, weight), d_out),
        }

    def ours(self, x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return fw.block_conv2d(x, values, self.layout, 3, padding=1)

    def dense(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, weight, padding=1)

    def error(self, name: str, which: str) -> float:
        """The largest one, in units of the largest number, against torch's convolution of an image in float64. In
        float32 it may add in the same order as ours, error for error, or round to tf32."""
        x, d_out = (t[:1].contiguous(memory_format=FORMATS[name]) for t in (self.x, self.d_out))
        given = [t.detach().requires_grad_() for t in (x, self.values)]
        wide = [t.detach().double().requires_grad_() for t in (x, self.weight)]
        got, want = self.ours(*given), self.dense(*wide)
        if which == "forward":
            return relative_error(got, want)
        found = torch.autograd.grad(got, given, d_out)
        d_x, d_weight = torch.autograd.grad(want, wide, d_out.double())
        packed = self.layout.pack(d_weight.permute(2, 3, 0, 1).flatten(0, 1))
        return max(relative_error(found[0], d_x), relative_error(found[1], packed))


def no_grad(call: Call) -> Call:
    def run() -> None:
        with torch.no_grad():
            call()

    return run


def gradients(out: torch.Tensor, leaves: tuple[torch.Tensor, ...], d_out: torch.Tensor) -> Call:
    return lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).abs().max() / want.abs().max().clamp_min(1e-30)).item()


def measure(case: Case, which: str, formats: list[str], device: torch.device, seconds: float) -> dict[str, Row]:
    """A row for each memory format, all of them in the same rounds, with torch's convolution in both."""
    calls = {
        f"{who} {name}": call
        for name in FORMATS
        for who, call in case.calls(name, which).items()
        if who == "dense" or name in formats
    }
    ms = medians(calls, device, seconds=seconds)
    products = 1 if which == "forward" else 2
    # What a user would have without blocks: torch's faster format, whichever ours has.
    dense = min(ms[f"dense {name}"] for name in FORMATS)
    rows = {}
    for name in formats:
        ours = ms[f"ours {name}"]
        rate, dense_rate = products * case.flops / ours / 1e9, products * case.dense_flops / dense / 1e9
        rows[name] = {
            "ms": {"ours": ours, **{f"dense {n}": ms[f"dense {n}"] for n in FORMATS}},
            "tflops": rate, "dense_tflops": dense_rate, "share": rate / dense_rate, "speedup": dense / ours,
            "as_called_ms": as_called(calls[f"ours {name}"], device, 5), "error": case.error(name, which),
        }  # fmt: skip
    return rows


def show(row: Row) -> str:
    ms = row["ms"]
    dense = " ".join(f"{name[6:]} {ms[name]:.3f}" for name in ms if name != "ours")
    return (
        f"{row['pass']:8} {row['in']}→{row['out']}@{row['image']} b {row['block']:3} density {row['density']:<4} "
        f"{row['format']} {row['dtype']}: {ms['ours']:8.3f} ms, {row['tflops']:7.2f} TFLOP/s; dense {dense}; "
        f"share {row['share']:.2f}, × dense {row['speedup']:.2f}, error {row['error']:.0e}"
    )


def summary(rows: list[Row]) -> list[str]:
    """Backward ÷ forward, and NCHW ÷ channels last, where both were measured."""
    lines = []
    by = {tuple(r[k] for k in ("dtype", "in", "block", "density", "format", "pass")): r["ms"]["ours"] for r in rows}
    for (*case, form, which), ms in by.items():
        name = f"{case[0]} {case[1]} b {case[2]} density {case[3]}"
        if which == "backward" and (forward := by.get((*case, form, "forward"))):
            lines.append(f"{name} {form}: backward ÷ forward {ms / forward:.2f}")
        if form == "nchw" and (last := by.get((*case, "nhwc", which))):
            lines.append(f"{name} {which}: NCHW ÷ channels last {ms / last:.2f}")
    return lines


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", default="256x56,512x28", help="CHANNELSxSIZE or INxOUTxSIZE")
    parser.add_argument("--batch", type=int, default=0, help="64 on a GPU, 2 on a CPU")
    parser.add_argument("--blocks", default="")
    parser.add_argument("--densities", default="")
    parser.add_argument("--formats", default="")
    parser.add_argument("--passes", default="forward,backward")
    parser.add_argument("--dtypes", default="", help="float16 on a GPU, float32 on a CPU")
    parser.add_argument("--seconds", type=float, default=1.0, help="for the rounds of a case")
    parser.add_argument("--quick", action="store_true", help="blocks 32,64, density 0.25, channels last")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.blocks = options.blocks or ("32,64" if options.quick else "64,32,128,16")
    options.densities = options.densities or ("0.25" if options.quick else "0.25,0.1")
    options.formats = options.formats or ("nhwc" if options.quick else "nhwc,nchw")
    return options


def main() -> None:
    options = options_of()
    device = torch.device(options.device)
    gpu = device.type == "cuda"
    batch = options.batch or (64 if gpu else 2)
    torch.backends.cudnn.benchmark = True
    facts: Row = machine(device)
    rows: list[Row] = []
    formats = numbers(options.formats, str)

    def keep(fixed: dict[str, Any], found: dict[str, Row]) -> None:
        for name, row in found.items():
            rows.append({**facts, **fixed, "format": name, **row})
            print(show(rows[-1]), flush=True)

    try:
        for dtype in numbers(options.dtypes or ("float16" if gpu else "float32"), str):
            for layer in map(Layer.read, numbers(options.layers, str)):
                for block in numbers(options.blocks, int):
                    for density in numbers(options.densities, float):
                        case = Case(layer, batch, block, density, getattr(torch, dtype), device)
                        fixed = {"in": layer.inner, "out": layer.out, "image": layer.image, "batch": batch,
                                 "block": block, "density": density, "dtype": dtype}  # fmt: skip
                        for which in numbers(options.passes, str):
                            keep({"pass": which, **fixed}, measure(case, which, formats, device, options.seconds))
        print("\n".join(summary(rows)))
    finally:
        store(folder(options.out, facts) / "conv.json", rows, IDENTITY)


if __name__ == "__main__":
    main()
