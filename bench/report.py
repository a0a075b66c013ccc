"""Writes docs/benchmarks.md and its pages, docs/sweeps.md, the tables of README.md and of src/ops/kronecker/README.md
and the speeds of docs/patterns.md from bench/results: every figure comes from a row there."""

from __future__ import annotations

import json
import math
import statistics
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plot_sweep import size_of

from report_scale import METHOD, scale_section

ROOT = Path(__file__).resolve().parent.parent
Row = dict[str, Any]
PRECISIONS = {"highest": "ieee", "high": "tf32"}


def number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def days(rows: list[Row]) -> str:
    """When they were measured: a day, or the first and the last."""
    dates = sorted(r["date"] for r in rows)
    return " to ".join(sorted({dates[0], dates[-1]}))


def product_table(rows: list[Row]) -> list[str]:
    unit = "TFLOP/s" if rows[0]["tflops"] > 5 else "GFLOP/s"
    factor = 1 if unit == "TFLOP/s" else 1000
    lines = [
        f"| op | dtype | block | density | {unit} on non-zeros | torch BSR | dense rate of the run | share of it | "
        "× BSR | ms | as called | floor ms | error |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        bsr = r.get("bsr_tflops")
        lines.append(
            f"| {r['op']} | {r['dtype']} | {r['block']} | {r['density']} | **{number(r['tflops'] * factor)}** | "
            f"{number(bsr and bsr * factor)} | {number(r['dense_tflops'] * factor)} | "
            f"{r['tflops'] / r['dense_tflops']:.2f} | {number(bsr and r['tflops'] / bsr, 1)} | {r['ms']:.3f} | "
            f"{r['as_called_ms']:.3f} | {r['floor_ms']:.3f} | {r['error']:.0e} |"
        )
    return lines


def softmax_table(rows: list[Row]) -> list[str]:
    lines = ["| dtype | block | density | TB/s on the bytes that must move | ms | floor ms | dense ms | error |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for r in rows:
        lines.append(
            f"| {r['dtype']} | {r['block']} | {r['density']} | **{r['tb_per_s']:.2f}** | {r['ms']:.3f} | "
            f"{number(r['floor_ms'], 3)} | {r['dense_ms']:.3f} | {r['error']:.0e} |"
        )
    return lines


def section(title: str, rows: list[Row]) -> list[str]:
    lines = [f"## {title}", ""]
    for arch in dict.fromkeys(r["arch"] for r in rows):
        of_arch = [r for r in rows if r["arch"] == arch]
        products = [r for r in of_arch if r["op"] in ("dsd", "dds", "sdd")]
        if products:
            first = products[0]
            kernels = "" if arch == "auto" else f", kernels forced to {arch}"
            lines += [f"n = {first['n']}, torch {first['torch']}, {days(products)}{kernels}.", ""]
            lines += [*product_table(products), ""]
        if softmax := [r for r in of_arch if r["op"] == "block_softmax"]:
            lines += ["Softmax, (2, 8, n, n):", "", *softmax_table(softmax), ""]
        for r in of_arch:
            if r["op"] == "host":
                lines += [f"Host time of a cached dsd in inference mode: {r['us']:.1f} µs; an op that does nothing "
                          f"{r['empty_op_us']:.1f} µs; torch's matmul {r['torch_us']:.1f} µs.", ""]  # fmt: skip
        if first_calls := [r for r in of_arch if r["op"] == "first call"]:
            lines += ["| first call | kernel cache | ms |", "|---|---|---|"]
            lines += [f"| {r['kind']}, block {r['block']} | {r['cache']} | {number(r['ms'], 1)} |" for r in first_calls]
            lines += [""]
    return lines


def kronecker_summary(rows: list[Row]) -> list[str]:
    """Geometric means over the patterns of each kind with d > 1, and of backward ÷ forward."""

    def kind(r: Row) -> tuple[str, str, int, str]:
        return r["dtype"], PRECISIONS.get(r["precision"], ""), r["batch"], r["layout"]

    forward = [r for r in rows if r["part"] == "forward" and r["pattern"][3] > 1]
    peers = sorted({algo for r in forward for algo in r["ms"]} - {"kernel"})
    lines = ["Geometric means over patterns with d > 1. Batches up to 1024 (and, since 16 November 2026, rows with a",
             "floor up to 0.1 ms) are timed as CUDA graphs, for us and for peers. Peers:",
             f"{', '.join(peers) or 'none'}.", "",
             "| dtype | batch | layout | patterns | time ÷ floor | best peer ÷ ours | least | with peers | date |",
             "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for each in sorted({kind(r) for r in forward}, key=str):
        of = [r for r in forward if kind(r) == each]
        floor = statistics.geometric_mean(r["ms"]["kernel"] / r["floor_ms"] for r in of)
        beside = [r["ms"] for r in of if len(r["ms"]) > 1]
        best = [min(v for k, v in ms.items() if k != "kernel") / ms["kernel"] for ms in beside]
        mean = statistics.geometric_mean(best) if best else None
        lines.append(
            f"| {each[0]} {each[1]} | {each[2]} | {each[3]} | {len(of)} | {number(floor, 2)} | {number(mean, 2)} | "
            f"{number(min(best, default=None), 2)} | {len(best)} | {days(of)} |"
        )
    backward = [r for r in rows if r["part"] == "backward"]
    for dtype, precision, batch, layout in sorted({kind({"precision": None, **r}) for r in backward}, key=str):
        of = [r for r in backward if kind({"precision": None, **r}) == (dtype, precision, batch, layout)]
        most = max(of, key=lambda r: r["ratio"])
        mean = statistics.geometric_mean(r["ratio"] for r in of)
        name = " ".join((dtype, precision)).strip()
        lines += ["", f"Backward ÷ forward, {name}, batch {layout}, {batch} rows, {len(of)} patterns: {mean:.2f}, at "
                  f"most {most['ratio']:.2f} with {tuple(most['pattern'])}."]  # fmt: skip
    return [*lines, ""]


def as_called(row: Row) -> str:
    """Ours, and where it is known the best of the peers."""
    peers = row.get("peers_as_called_ms", {}).items()
    name, ms = min(peers, key=lambda x: x[1], default=("", None))
    return number(row.get("as_called_ms"), 4) + (f" ({name} {ms:.4f})" if ms is not None else "")


def kronecker_section(rows: list[Row]) -> list[str]:
    """One line per pattern and layout: ours, the floor, and the fastest of torch's ways that ran."""
    lines = [f"## Kronecker products, {rows[0]['device']}", ""]
    forward = [r for r in rows if r["part"] == "forward"]
    lines += kronecker_summary(rows)
    lines += [
        "| pattern | batch | layout | dtype | ms | as called | floor ms | time ÷ floor | best peer ms | × it | error |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in forward:
        ours = r["ms"]["kernel"]
        core = ", 1 core" if "NVIDIA" not in r["device"] and r["threads"] == 1 else ""
        name, peer = min(((k, v) for k, v in r["ms"].items() if k != "kernel"), key=lambda x: x[1], default=("", None))
        lines.append(
            f"| {tuple(r['pattern'])} | {r['batch']}{core} | {r['layout']} | "
            f"{r['dtype']} {PRECISIONS.get(r['precision'], '')} | "
            f"**{ours:.4f}** | {as_called(r)} | {r['floor_ms']:.4f} | {ours / r['floor_ms']:.2f} | "
            f"{number(peer, 4)} {name} | {number(peer and peer / ours, 2)} | {r.get('error', math.nan):.0e} |"
        )
    if chains := [r for r in rows if r["part"] == "chain"]:
        lines += [
            *(
                "",
                "Two factors of a Monarch matrix, forward and backward (x and both weights), beside torch's batched",
            ),
            *("products and a dense layer. The floor is reading x and writing y at the copy rate of the run:", ""),
            "| factors | batch | dtype | ms | floor ms | × floor | bmm | dense | backward ms | bmm | dense | error |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for r in chains:
            times, back = ([number(r[part].get(k), 4) for k in ("bmm", "dense")] for part in ("ms", "backward_ms"))
            ours = r["ms"]["kernel"]
            lines.append(
                f"| {', '.join(str(tuple(p)) for p in r['pattern'])} | {r['batch']} | {r['dtype']} | **{ours:.4f}** | "
                f"{r['floor_ms']:.4f} | {ours / r['floor_ms']:.2f} | {' | '.join(times)} | "
                f"**{r['backward_ms']['kernel']:.4f}** | {' | '.join(back)} | {r['error']:.0e} |"
            )
    if backward := [r for r in rows if r["part"] == "backward"]:
        lines += [
            *("", "Gradients of x, w and bias together, through autograd, as CUDA graphs:", ""),
            "| pattern | batch | layout | dtype | forward ms | backward ms | ratio |",
            "|---|---|---|---|---|---|---|",
        ]
        for r in backward:
            lines.append(
                f"| {tuple(r['pattern'])} | {r['batch']} | {r['layout']} | {r['dtype']} | {r['ms']['forward']:.4f} | "
                f"{r['ms']['backward']:.4f} | {r['ratio']:.2f} |"
            )
    return [*lines, ""]


def best_peer(row: Row) -> tuple[str, float | None]:
    """The fastest of the peers that ran, and its time."""
    peers = ((k, v) for k, v in row["ms"].items() if k != "ours")
    return min(peers, key=lambda x: x[1], default=("", None))


def attention_table(rows: list[Row]) -> list[str]:
    """One line per pattern, forward and backward side by side."""
    rate = 1 if max(r["tflops"]["ours"] for r in rows) > 5 else 1000
    unit = "TFLOP/s" if rate == 1 else "GFLOP/s"
    lines = [
        f"| pattern | density | forward ms | {unit} | floor ms | best peer ms | × it | error | "
        f"backward ms | {unit} | floor ms | best peer ms | × it |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(r["pattern"] for r in rows):
        of = {r["pass"]: r for r in rows if r["pattern"] == name}
        cells = [name, number(next(iter(of.values()))["density"], 4)]
        for which in ("forward", "backward"):
            if (r := of.get(which)) is None:
                cells += ["–"] * (6 if which == "forward" else 5)
                continue
            ours, (peer, ms) = r["ms"]["ours"], best_peer(r)
            cells += [f"**{ours:.3f}**", number(r["tflops"]["ours"] * rate), number(r["floor_ms"], 3)]
            cells += [f"{number(ms, 3)} {peer}".strip(), number(ms and ms / ours, 2)]
            cells += [f"{r['error']:.0e}"] if which == "forward" else []
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def attention_section(rows: list[Row]) -> list[str]:
    """Every pattern beside its peers, then what one call costs besides."""
    lines = [f"## Attention, {rows[0]['device']}", ""]
    measured = [r for r in rows if r["part"] == "pattern"]

    def kind(r: Row) -> tuple[Any, ...]:
        sizes = tuple(r[k] for k in ("arch", "dtype", "seq", "depth", "batch", "heads", "kv_heads"))
        return (*sizes, r.get("flex", "plain"))

    for each in sorted({kind(r) for r in measured}, key=str):
        arch, dtype, seq, depth, batch, heads, kv_heads, flex = each
        of = [r for r in measured if kind(r) == each]
        forced = "" if arch == "auto" else f", kernels forced to {arch}"
        shared = "" if heads == kv_heads else f" ({kv_heads} of keys)"
        where = f"torch {of[0]['torch']}{', Flex tuned' if flex == 'tuned' else ''}, {days(of)}"
        lines += [f"B = {batch}, {heads} heads{shared}, S = {seq}, D = {depth}, {dtype}{forced}; {where}.", ""]
        lines += [*attention_table(of), ""]
    if decode := [r for r in rows if r["part"] == "decode"]:
        lines += ["Decoding, each key head shared by eight query heads; GB/s on the keys and values that are seen:", ""]
        lines += ["| pattern | queries | batch | key heads | D | ms | GB/s | copy of the run | best peer ms | error |"]
        lines += ["|---|---|---|---|---|---|---|---|---|---|"]
        for r in decode:
            peer, ms = best_peer(r)
            lines.append(
                f"| {r['text']} | {r['queries']} | {r['batch']} | {r['kv_heads']} | {r['depth']} | "
                f"**{r['ms']['ours']:.4f}** | {r['gb_per_s']:.1f} | {r['copy_gb_per_s']:.0f} | "
                f"{number(ms, 4)} {peer} | {r['error']:.0e} |"
            )
        lines += [""]
    for r in rows:
        if r["part"] == "host":
            lines += [f"Host time of a call, plan cached, inference mode: {r['us']:.1f} µs; an op that does nothing "
                      f"{r['empty_op_us']:.1f} µs; torch's attention {r['torch_us']:.1f} µs.", ""]  # fmt: skip
    if first := [r for r in rows if r["part"] == "first"]:
        lines += ["| first call of a process | kernel cache | forward ms | its gradient ms |", "|---|---|---|---|"]
        lines += [f"| {r['pattern']} | {r['cache']} | {number(r['ms']['ours'], 1)} | {number(r['backward_ms'], 1)} |"
                  for r in first]  # fmt: skip
        lines += [""]
    if plans := [r for r in rows if r["part"] == "plan"]:
        lines += [
            "| pattern of 1,048,576 tokens | made ms | planned ms | for keys ms | plan MB |",
            "|---|---|---|---|---|",
        ]
        lines += [f"| {r['pattern']} | {r['make_ms']:.2f} | {r['plan_ms']:.2f} | {r['transposed_ms']:.2f} | "
                  f"{r['bytes'] / 1e6:.2f} |" for r in plans]  # fmt: skip
        lines += [""]
    return lines


def block_glance(gpu: list[Row], cpu: list[Row]) -> list[str]:
    """dsd beside torch's BSR: one line per block, two densities on each machine across."""
    heads, columns, machines = [], [], []
    for name, rows, dtype, unit, factor in (
        ("H200, fp16, n = 8192", gpu, "float16", "TFLOP/s", 1),
        ("2 CPU cores, fp32, n = 2048", cpu, "float32", "GFLOP/s", 1000),
    ):
        chosen = [r for r in rows if r["op"] == "dsd" and r["dtype"] == dtype and r["arch"] == "auto"]
        if not chosen:
            continue
        dense = sorted(r["dense_tflops"] for r in chosen)[len(chosen) // 2] * factor
        machines.append(f"{name}: {unit}, torch's dense product {dense:.0f}")
        for density in (0.5, 0.1):
            heads.append(f"{name.split(',')[0]}, density {density}")
            columns.append({r["block"]: (r, factor) for r in chosen if r["density"] == density})
    told = (
        "A block-sparse matrix times a dense one: rate on non-zeros, and in brackets that rate ÷ that of torch's BSR. "
    )
    lines = [*textwrap.wrap(told + "; ".join(machines) + ".", 120), ""]
    lines += ["| block | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for block in sorted({b for column in columns for b in column}, reverse=True):
        cells = []
        for column in columns:
            r, factor = column[block]
            bsr = f" ({r['tflops'] / r['bsr_tflops']:.1f}×)" if r.get("bsr_tflops") else ""
            cells.append(f"{r['tflops'] * factor:.0f}{bsr}")
        lines += [f"| {block} | " + " | ".join(cells) + " |"]
    return [*lines, ""]


GLANCE_ATTENTION = {
    "H200": {"dtype": "bfloat16", "seq": 16384, "depth": 128},
    "CPU": {"dtype": "float32", "seq": 2048, "depth": 64},
}


def attention_glance(rows: dict[str, list[Row]]) -> list[str]:
    """Some patterns beside the best of their peers, forward and backward, on each machine."""
    names = ("full", "causal", "window", "longformer", "dilated", "strided", "neighborhood")
    told = (
        "Attention: ms, and in brackets the time of the best of FlexAttention and torch's own on the same mask ÷ ours, "
        "in one run. H200: bf16, 16 heads, S = 16,384, D = 128. 2 CPU cores: fp32, 4 heads, S = 2048, D = 64."
    )
    lines = [*textwrap.wrap(told, 120), "",
             "| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]  # fmt: skip
    for machine, case in GLANCE_ATTENTION.items():
        usual = {**case, "part": "pattern", "arch": "auto"}
        chosen = [r for r in rows[machine] if all(r.get(k) == v for k, v in usual.items())]
        of = {(r["pattern"], r["pass"]): r for r in chosen if r.get("flex", "plain") == "plain"}
        for which in ("forward", "backward"):
            cells = []
            for name in names:
                row = of.get((name, which))
                ms = best_peer(row)[1] if row else None
                times = ms / row["ms"]["ours"] if row and ms else 0.0
                ratio = f" ({times:.{1 if times >= 1 else 2}f}×)" if times else ""
                cells.append(f"{row['ms']['ours']:.2f}{ratio}" if row else "–")
            lines.append(f"| {machine} {which} | " + " | ".join(cells) + " |")
    return lines


def two_four_section(rows: list[Row]) -> list[str]:
    """Products against dense and cuSPARSELt, then the tools against a copy."""
    lines = [f"## 2:4, {rows[0]['device']}", ""]
    for arch in dict.fromkeys(r["arch"] for r in rows):
        kernels = "" if arch == "auto" else f", kernels forced to {arch}"
        if products := [r for r in rows if r["part"] == "product" and r["arch"] == arch]:
            lines += [
                f"y = x·Wᵀ with W (m, k) 2:4 and x (n, k), or the `matmul` that is named{kernels}. *Warm* is a call in "
                "a CUDA graph of many calls, *called* is a plain loop, *behind* is how many µs longer than warm a "
                "call takes in the best such loop.",
                "",
                "| m × k | n | dtype | ms | dense ms | × dense | cuSPARSELt ms | × it | warm | called | behind | "
                "dense called | torch 2:4 called | host µs | floor ms | error |",
                "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
            ]
        for r in products:
            ours, dense, peer, called = r["ms"]["ours"], r["ms"].get("dense"), r["ms"].get("cusparselt"), r["called"]
            op, within = "" if r["op"] == "linear" else f" {r['op']}", r.get("warm", {}).get("ours")
            lines.append(
                f"| {r['m']} × {r['k']}{op} | {r['n']} | {r['dtype']} | **{ours:.4f}** | {number(dense, 4)} | "
                f"{number(dense and dense / ours, 2)} | {number(peer, 4)} | {number(peer and peer / ours, 2)} | "
                f"{number(within, 4)} | {called['ours']:.4f} | {number(r.get('behind_us'), 1)} | "
                f"{number(called.get('dense'), 4)} | "
                f"{number(called.get('torch'), 4)} | {number(r['host_us'], 1)} | {r['floor_ms']:.4f} | "
                f"{r['error']:.0e} |"
            )
        if choices := [r for r in rows if r["part"] == "fallback" and r["arch"] == arch]:
            lines += [
                "",
                f"The crossover to dense products{kernels}, in µs: sparse, dense, expanding the weight plus dense, and "
                'the one that `fallback="dense"` takes.',
                "",
                "| m × k | n | dtype | sparse | dense | expanded | taken |",
                "|---|---|---|---|---|---|---|",
            ]
        for r in choices:
            times = " | ".join(f"{1e3 * r['ms'][name]:.1f}" for name in ("ours", "dense", "expanded"))
            dtype = r["dtype"] + r["op"].removeprefix("linear")
            lines.append(f"| {r['m']} × {r['k']} | {r['n']} | {dtype} | {times} | {r['planned']} |")
        if tools := [r for r in rows if r["part"] == "format" and r["arch"] == arch]:
            lines += [
                *("", "| tool | size | dtype | ms | GB/s on the bytes that must move | share of a copy | torch ms |"),
                "|---|---|---|---|---|---|---|",
            ]
        for r in tools:
            lines.append(
                f"| {r['op']} | {r['m']} × {r['k']} | {r['dtype']} | **{r['ms']['ours']:.4f}** | {r['gb_per_s']:.0f} | "
                f"{r['gb_per_s'] / r['copy_gb_per_s']:.2f} | {number(r['ms'].get('torch'), 4)} |"
            )
        lines.append("")
    return lines


def conv_section(rows: list[Row]) -> list[str]:
    """Forward and backward of each layer side by side, in both memory formats."""
    lines = [f"## Convolution, {rows[0]['device']}", ""]
    rate = 1 if max(r["tflops"] for r in rows) > 5 else 1000
    unit = "TFLOP/s" if rate == 1 else "GFLOP/s"

    def layer(r: Row) -> tuple[Any, ...]:
        return tuple(r[k] for k in ("arch", "dtype", "in", "out", "image", "batch"))

    for each in dict.fromkeys(map(layer, rows)):
        of = [r for r in rows if layer(r) == each]
        arch, dtype, inner, out, image, batch = each
        forced = "" if arch == "auto" else f", kernels forced to {arch}"
        lines += [
            f"3×3, {inner} → {out} channels at {image}×{image}, {batch} images, {dtype}{forced}; "
            f"torch {of[0]['torch']}, {days(of)}. *Share* is the rate on non-zeros ÷ torch's "
            "dense rate in its faster memory format.",
            "",
            f"| block | density | format | forward ms | {unit} | share | dense ms | × dense | backward ms | {unit} | "
            "share | dense ms | × dense | backward ÷ forward | error |",
            "|---" * 15 + "|",
        ]
        cases = dict.fromkeys((r["block"], r["density"], r["format"]) for r in of)
        for case in cases:
            both = {r["pass"]: r for r in of if (r["block"], r["density"], r["format"]) == case}
            cells = [str(cell) for cell in case]
            for which in ("forward", "backward"):
                r = both.get(which)
                if r is None:
                    cells += ["–"] * 5
                    continue
                cells += [f"**{r['ms']['ours']:.3f}**", number(r["tflops"] * rate), f"{r['share']:.2f}"]
                dense = min(ms for name, ms in r["ms"].items() if name != "ours")
                cells += [number(dense, 3), f"{r['speedup']:.2f}"]
            ratio = both["backward"]["ms"]["ours"] / both["forward"]["ms"]["ours"] if len(both) == 2 else None
            cells += [number(ratio, 2), f"{max(r['error'] for r in both.values()):.0e}"]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return lines


MOST_LOST = 120  # shown; all are in the rows
SWEEP_NAMES = {"block": "block products", "two_four": "2:4 layers", "kronecker": "Kronecker products"}


def sweep_line(name: str, rows: list[Row], behind: float) -> str:
    ratios = sorted(r["ratio"] for r in rows)
    share = [100 * sum(map(test, ratios)) / len(ratios) for test in (lambda r: r > 1, lambda r: r < behind)]
    mean = statistics.geometric_mean(ratios)
    return f"| {name} | {len(rows)} | {share[0]:.0f}% | {share[1]:.1f}% | {mean:.2f} | {ratios[0]:.2f} |"


def sweep_table(head: str, parts: dict[str, list[Row]], behind: float) -> list[str]:
    lines = [f"| {head} | problems | ahead | behind by > {round(100 - 100 * behind)}% | geomean | worst |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    return lines + [sweep_line(name, rows, behind) for name, rows in parts.items()] + [""]


def parted(rows: list[Row], key: Callable[[Row], Any]) -> dict[str, list[Row]]:
    parts: dict[Any, list[Row]] = {}
    for r in rows:
        parts.setdefault(key(r), []).append(r)
    return {str(k): parts[k] for k in sorted(parts)}


def sweep_families(rows: list[Row], threads: bool = False) -> dict[str, list[Row]]:
    """Rows by family, and on a CPU by the number of threads."""
    key = lambda r: SWEEP_NAMES.get(r["family"], r["family"]) + (f", threads: {r['threads']}" if threads else "")  # noqa: E731
    return parted(rows, key)


def sweep_section(machine: str, sweep: Row) -> list[str]:
    behind = 0.95 if "NVIDIA" in sweep["device"] else 0.9
    rows, seeds = sweep["rows"], sorted({r["seed"] for r in sweep["rows"]})
    threads = len({r["threads"] for r in rows}) > 1
    seeded = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    told = f"torch {sweep['torch']}, {sweep['date']}, {seeded}. {sweep.get('note', '')}"
    lines = [f"## {sweep['device']}", "", *textwrap.wrap(told.rstrip(), 120), "",
             f"![ratios by family and rows](sweep-{machine}.svg)", ""]  # fmt: skip
    lines += sweep_table("family", sweep_families(rows, threads), behind)
    for name, of in sweep_families(rows).items():
        what = "tokens" if name == "attention" else "rows"
        lines += sweep_table(f"{name}, {what}", parted(of, size_of), behind)
    lost = sorted((r for r in rows if r["ratio"] < behind), key=lambda r: r["ratio"])
    shown = f"{MOST_LOST} of the {len(lost)}" if len(lost) > MOST_LOST else f"{len(lost)}"
    lines += [f"<details><summary>The {shown} problems that are behind, the worst first</summary>", "",
              "| ratio | problem | | ours, µs | best peer |", "|---|---|---|---|---|"]  # fmt: skip
    for r in lost[:MOST_LOST]:
        way, us = min(((way, us) for way, us in r["us"].items() if way != "ours"), key=lambda found: found[1])
        kind = f"{r['family']}, {r['dtype']}, {r['pass']}" + (f", threads: {r['threads']}" if threads else "")
        lines.append(f"| {r['ratio']:.2f} | {r['problem']} | {kind} | {r['us']['ours']:.1f} | {way} {us:.1f} |")
    return [*lines, "", "</details>", ""]


def sweep_page() -> list[str]:
    lines = ["# Random problems", "",
             "Generated by `bench/report.py` from the rows of `bench/sweep.py`: problems drawn at random from the",
             "shapes that models have, not those that kernels were tuned on. Each is timed beside the ways that a user",
             "of torch has (a dense product, a batched one, einsum, BSR, FlexAttention or SDPA), whose weights are",
             "prepared outside the clock. The ratio is the time of the best of them ÷ ours.",
             "[Tables of chosen shapes](benchmarks.md).", ""]  # fmt: skip
    for path in sorted((ROOT / "bench/results").glob("*/sweep.json"), reverse=True):
        lines += sweep_section(path.parent.name, json.loads(path.read_text()))
    return lines


# What the README shows of each family: a title, the rows' file, and what tells the row.
HEADLINES: list[tuple[str, str, Row]] = [
    ("attention, `strided(16384,128)`, 16 heads, D = 128", "attention", {"text": "strided(16384,128)", "depth": 128}),
    ("attention, `sliding_window(16384,512,512)`, likewise", "attention",
     {"text": "sliding_window(16384,512,512)", "depth": 128}),
    ("16 selected blocks of 64 for each query, 32 heads on 2, S = 32,768", "dynamic_attention",
     {"case": "D = 128, 16 selected blocks of 64, 32 heads on 2, S = 32768"}),
    ("15 packed documents of 126 to 2193 tokens, 16 heads", "dynamic_attention",
     {"case": "16 heads, D = 128, 15 documents, 126 to 2193, causal"}),
    ("8192 × 8192 · 8192 columns, blocks of 64, density 0.1", "block",
     {"op": "dsd", "block": 64, "density": 0.1, "dtype": "float16"}),
    ("3×3 convolution, 512 channels at 28², 64 images, blocks of 64, density 0.1", "conv",
     {"in": 512, "block": 64, "density": 0.1, "format": "nhwc"}),
    ("Kronecker (4,64,64,4), 25,088 rows", "kronecker",
     {"pattern": [4, 64, 64, 4], "batch": 25088, "layout": "first", "dtype": "float16"}),
    ("2:4 layer 8192 × 8192, 8192 rows", "two_four",
     {"op": "linear", "m": 8192, "k": 8192, "n": 8192, "dtype": "bfloat16"}),
]  # fmt: skip


PEERS = {
    "flex": "FlexAttention", "dense nhwc": "cuDNN", "cusparselt": "cuSPARSELt", "cudnn, dense": "cuDNN, dense",
    "torch": "varlen_attn",
}  # fmt: skip


def beside_peers(rows: list[Row]) -> list[Row]:
    """Rows of one peer each, joined by case and pass."""
    joined: dict[tuple[str, str], Row] = {}
    for r in rows:
        if "ms" in r:
            times = joined.setdefault((r["case"], r["pass"]), {**r, "ms": {}})["ms"]
            times["ours" if r["peer"] == "fretwork" else r["peer"]] = r["ms"]
    return list(joined.values())


def readme_headlines() -> list[str]:
    """One forward row of each family beside the best of its peers."""
    lines = ["On an H200, fp16 or bf16, forward:", "", "| | ours, ms | best peer, ms | |", "|---|---|---|---|"]
    for title, suite, which in HEADLINES:
        which = {"arch": "auto", "pass": "forward", **which}
        rows = results("h200", suite)
        rows = beside_peers(rows) if suite == "dynamic_attention" else rows
        row = next(r for r in rows if all(r.get(k, v) == v for k, v in which.items()))
        if suite == "block":
            row = {**row, "ms": {"ours": row["ms"], "dense": row["dense_ms"], "BSR": row["bsr_ms"]}}
        ours = row["ms"]["kernel" if suite == "kronecker" else "ours"]
        peer, ms = min(((k, v) for k, v in row["ms"].items() if k not in ("ours", "kernel")), key=lambda x: x[1])
        lines.append(f"| {title} | {ours:.3g} | {ms:.3g} ({PEERS.get(peer, peer)}) | {ms / ours:.1f}× |")
    return lines


def readme_sweep(path: Path) -> list[str]:
    if not path.exists():
        return []
    sweep = json.loads(path.read_text())
    head = f"On {len(sweep['rows']):,} [random draws](docs/sweeps.md) on an H200, against the best of torch's ways:"
    return ["", head, "", *sweep_table("", sweep_families(sweep["rows"]), 0.95)[:-1]]


NOTES = """- GPU: the L2 cache is flushed before each call, and the clock starts after the host has issued the call (in
  rows up to 16 November 2026 that are not CUDA graphs, host latency was included).
- CPU: each library is timed in a loop of its own, so its own calls warm the caches (in rows of attention, Kronecker and
  2:4 up to 16 November 2026, the peer that ran before did). Freed memory stays with the process, except as called,
  where large results are allocated in fresh pages.
- *Floor*: the work at the rate of torch's dense product, or its bytes at the rate of a copy, whichever takes longer. A
  row may be faster than that.
- *As called*: a plain loop of calls, host time included.
"""
Section = Callable[[list[Row]], list[str]]
FAMILIES: dict[str, tuple[str, str, Section]] = {
    "attention": ("Attention", "time by pattern, and by length", attention_section),
    "block": ("Block products and softmax", "rate by block and density", lambda rows: section(rows[0]["device"], rows)),
    "conv": ("Convolution", "dense ÷ ours, by layer", conv_section),
    "kronecker": ("Kronecker products", "best of torch ÷ ours, by type and rows", kronecker_section),
    "two_four": ("2:4 layers and tools", "dense ÷ ours, by rows", two_four_section),
}


def pictures(family: str, folder: str) -> list[str]:
    """The plots of a family that bench/plot_families.py has drawn, the H200's first."""
    title, shows, _ = FAMILIES.get(family, ("Many GPUs, modelled", "time by GPUs", None))
    shows, _, second = shows.partition(", and ")
    lines = []
    for machine, words in {"h200": "an H200", "cpu": "a CPU"}.items():
        for kind, what in {family: shows, f"{family}-length": f"time {second}"}.items():
            if (ROOT / f"docs/benchmarks/{kind}-{machine}.svg").exists():
                lines += [f"![{title} on {words}: {what}]({folder}{kind}-{machine}.svg)", ""]
    return lines


def family_page(family: str) -> list[str]:
    """A family's plots and tables."""
    title, _, of = FAMILIES[family]
    lines = [f"# {title}, measured", ""]
    lines += ["Generated by `bench/report.py`; [what the columns mean](../benchmarks.md).", ""]
    lines += pictures(family, "")
    for path in sorted((ROOT / "bench/results").glob(f"*/{family}.json"), reverse=True):
        lines += of(json.loads(path.read_text()))
    return lines


def scale_page() -> list[str]:
    """Many GPUs, modelled from what one measured."""
    told = (
        "Generated by `bench/report.py` from the rows of `bench/scale.py`: a forward and a backward pass of attention "
        "over 8 to 512 GPUs. No such machine was available."
    )
    lines = [
        "# Many GPUs, modelled",
        "",
        *textwrap.wrap(told, 120),
        "",
        *METHOD.splitlines(),
        "",
        *pictures("scale", ""),
    ]
    for path in sorted((ROOT / "bench/results").glob("*/scale_model.json"), reverse=True):
        lines += scale_section(json.loads(path.read_text()))
    return lines


def results(machine: str, suite: str) -> list[Row]:
    path = ROOT / "bench/results" / machine / f"{suite}.json"
    return json.loads(path.read_text()) if path.exists() else []


def overview() -> list[str]:
    """How everything is measured, tables of a few rows, and a plot of each family."""
    lines = ["# Measured", "", "Generated by `bench/report.py` from `bench/results`. Peers run in the same process on "
             "the same data. Times are medians.", "", *NOTES.splitlines(),
             "- Shapes are chosen here; [random ones](sweeps.md) have a page of their own.", "",
             "| family | plots | all rows |", "|---|---|---|"]  # fmt: skip
    for family, (title, shows, _) in FAMILIES.items():
        lines.append(f"| {title} | {shows} | [tables](benchmarks/{family}.md) |")
    lines.append("| Many GPUs, modelled | time by GPUs | [tables](benchmarks/scale.md) |")
    lines += ["", "## At a glance", "", *block_glance(results("h200", "block"), results("cpu", "block"))]
    lines += attention_glance({name: results(name.lower(), "attention") for name in GLANCE_ATTENTION})
    for family, (title, *_) in FAMILIES.items():
        lines += ["", f"## {title}", "", *pictures(family, "benchmarks/")[:2]]
        lines += [f"[All rows and plots](benchmarks/{family}.md)"]
    return lines


def write_pages() -> None:
    """docs/benchmarks.md, the page of each family, and that of many GPUs."""
    families = {f"/{family}": family_page(family) for family in FAMILIES}
    for page, lines in {"": overview(), **families, "/scale": scale_page()}.items():
        (ROOT / f"docs/benchmarks{page}.md").write_text("\n".join(lines).rstrip() + "\n")


def main() -> None:
    write_pages()
    (ROOT / "docs/sweeps.md").write_text("\n".join(sweep_page()).rstrip() + "\n")

    sys.path.insert(0, str(ROOT / "scripts"))
    from patterns_page import page

    (ROOT / "docs/patterns.md").write_text(page())

    shown = readme_headlines() + readme_sweep(ROOT / "bench/results/h200/sweep.json")
    put_in(ROOT / "README.md", shown)
    put_in(ROOT / "src/ops/kronecker/README.md", kronecker_summary(results("h200", "kronecker")))


def put_in(page: Path, shown: list[str]) -> None:
    """Between the two marks of a page."""
    before, rest = page.read_text().split("<!-- measured -->\n")
    after = rest.split("<!-- end -->\n")[1]
    page.write_text("\n".join([f"{before}<!-- measured -->", *shown, f"<!-- end -->\n{after}"]))


if __name__ == "__main__":
    main()
