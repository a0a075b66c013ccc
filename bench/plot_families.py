"""Draws each family's chosen shapes beside its peers, from the rows of the bench/compare_*.py programs.

    python bench/plot_families.py                       # bench/results to docs/benchmarks/*.svg

Attention by pattern and by length, block products by block and density, convolution by layer, Kronecker and 2:4
products by rows. Needs matplotlib (pip install fretwork[plot]).
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plotting import svg_pyplot
from report import PRECISIONS, ROOT, Row, best_peer

OURS, PEER, FLOOR = "#1f3b73", "#ee6677", "#888888"
SHADES = ["#1f3b73", "#2b8cbe", "#66c2a4", "#ccbb44", "#ee6677", "#aa3377", "#777777"]
BY_LENGTH = ("full", "causal", "window", "longformer", "strided", "neighborhood")
Draw = Callable[[Any, list[Row]], Any]


def plain_log(pyplot: Any, axis: Any, base: int = 10) -> None:
    """Powers of a base at a logarithmic axis as plain numbers."""
    axis.set_major_locator(pyplot.matplotlib.ticker.LogLocator(base=base))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(pyplot.NullLocator())


def attention(pyplot: Any, rows: list[Row]) -> Any:
    """Time by pattern: ours, the best peer, and the floor."""
    wanted = [r for r in rows if r["part"] == "pattern" and r["arch"] == "auto" and r.get("flex", "plain") == "plain"]
    of = [r for r in wanted if (r["seq"], r["depth"]) in ((16384, 128), (2048, 64))]
    names = list(dict.fromkeys(r["pattern"] for r in of))
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 1.4 + 0.22 * len(names)), sharey=True, layout="constrained")
    for axis, which in zip(axes, ("forward", "backward"), strict=True):
        by_name = {r["pattern"]: r for r in of if r["pass"] == which}
        at = [n for n, name in enumerate(names) if name in by_name]
        ours = [by_name[names[n]]["ms"]["ours"] for n in at]
        peers = [best_peer(by_name[names[n]])[1] or math.nan for n in at]
        axis.hlines(at, ours, peers, color=FLOOR, linewidth=0.8)
        axis.scatter(peers, at, s=22, color=PEER, label="best peer", zorder=3)
        axis.scatter(ours, at, s=22, color=OURS, label="Fretwork", zorder=3)
        axis.scatter([by_name[names[n]]["floor_ms"] for n in at], at, s=40, color=FLOOR, marker="|", label="floor")
        axis.set(xscale="log", title=which, xlabel="ms", yticks=range(len(names)), yticklabels=names)
        plain_log(pyplot, axis.xaxis)
        axis.grid(alpha=0.2)
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    first = of[0]
    figure.suptitle(
        f"{first['device']}: {first['heads']} heads, S = {first['seq']}, D = {first['depth']}, {first['dtype']}"
    )
    return figure


def attention_by_length(pyplot: Any, rows: list[Row]) -> Any:
    """Time over the number of tokens, of some patterns; None if there is one length."""
    of = [r for r in rows if r["part"] == "pattern" and r["arch"] == "auto" and r["depth"] == 128]
    of = [r for r in of if r.get("flex", "plain") in (None, "plain") and r["pattern"] in BY_LENGTH]
    if len({r["seq"] for r in of}) < 2:
        return None
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
    for axis, which in zip(axes, ("forward", "backward"), strict=True):
        for name, colour in zip(BY_LENGTH, SHADES, strict=False):
            line = sorted((r for r in of if r["pattern"] == name and r["pass"] == which), key=lambda r: r["seq"])
            axis.plot([r["seq"] for r in line], [r["ms"]["ours"] for r in line], marker=".", color=colour, label=name)
            floors = [r["floor_ms"] for r in line]
            axis.plot([r["seq"] for r in line], floors, ":", color=colour, linewidth=0.8)
        axis.set(xscale="log", yscale="log", title=which, xlabel="tokens")
        plain_log(pyplot, axis.xaxis, 4)
        plain_log(pyplot, axis.yaxis)
        axis.grid(alpha=0.2)
    axes[0].set_ylabel("ms; dotted: floor")
    axes[0].legend(fontsize=8, frameon=False)
    figure.suptitle(f"{of[0]['device']}: time by tokens, {of[0]['heads']} heads, D = 128, {of[0]['dtype']}")
    return figure


def block(pyplot: Any, rows: list[Row]) -> Any:
    """The rate on non-zeros as a share of torch's dense product, by block and density, beside torch's BSR."""
    of = [r for r in rows if r["op"] in ("dsd", "dds", "sdd") and r["arch"] == "auto"]
    dtypes = list(dict.fromkeys(r["dtype"] for r in of))
    figure, axes = pyplot.subplots(
        len(dtypes), 3, figsize=(9, 0.6 + 2.9 * len(dtypes)), sharey="row", squeeze=False, layout="constrained"
    )
    densities = sorted({r["density"] for r in of}, reverse=True)
    for above, dtype in zip(axes, dtypes, strict=True):
        for axis, op in zip(above, ("dsd", "dds", "sdd"), strict=True):
            for density, colour in zip(densities, itertools.cycle(SHADES), strict=False):
                line = sorted(
                    (r for r in of if (r["op"], r["dtype"], r["density"]) == (op, dtype, density)),
                    key=lambda r: r["block"],
                )
                blocks = [r["block"] for r in line]
                shares = [r["tflops"] / r["dense_tflops"] for r in line]
                axis.plot(blocks, shares, marker=".", color=colour, label=f"density {density}")
                bsr = [(r["block"], r["bsr_tflops"] / r["dense_tflops"]) for r in line if r.get("bsr_tflops")]
                axis.plot([b for b, _ in bsr], [share for _, share in bsr], "--", color=colour, linewidth=0.8)
            axis.set(xscale="log", title=f"{op}, {dtype}", xlabel="block")
            axis.set_xticks([16, 32, 64, 128], ["16", "32", "64", "128"])
            axis.xaxis.set_minor_locator(pyplot.NullLocator())
            axis.axhline(1.0, color="black", linewidth=0.8)
            axis.grid(alpha=0.2)
        above[0].set_ylabel("rate ÷ dense rate")
    axes[0][0].legend(fontsize=7, frameon=False)
    figure.suptitle(f"{of[0]['device']}, n = {of[0]['n']}: rate on non-zeros; dashed: torch's BSR")
    return figure


def conv(pyplot: Any, rows: list[Row]) -> Any:
    """Bars of torch's dense convolution ÷ ours."""
    of = [r for r in rows if r["arch"] == "auto"]
    names = list(dict.fromkeys((r["image"], r["block"], r["density"], r["format"]) for r in of))
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 1 + 0.22 * len(names)), sharey=True, layout="constrained")
    for axis, which in zip(axes, ("forward", "backward"), strict=True):
        found = {(r["image"], r["block"], r["density"], r["format"]): r["speedup"] for r in of if r["pass"] == which}
        axis.barh(range(len(names)), [found.get(name, 0) for name in names], 0.7, color=OURS)
        labels = [f"{image}², block {block}, density {density}, {form}" for image, block, density, form in names]
        axis.set(title=which, xlabel="dense ÷ ours", yticks=range(len(names)), yticklabels=labels)
        axis.tick_params(axis="y", labelsize=8)
        axis.axvline(1.0, color="black", linewidth=0.8)
        axis.grid(axis="x", alpha=0.2)
    axes[0].invert_yaxis()
    figure.suptitle(f"{of[0]['device']}: 3×3 convolution, {of[0]['dtype']}")
    return figure


def kronecker(pyplot: Any, rows: list[Row]) -> Any:
    """The best of torch's ways ÷ ours: a line for each dtype, number of rows and layout, a point for each pattern."""
    found: dict[tuple[str, int, str], list[float]] = {}
    for r in rows:
        peers = [ms for name, ms in r["ms"].items() if name != "kernel"]
        if r["part"] == "forward" and peers:
            dtype = f"{r['dtype']} {PRECISIONS.get(r['precision'], '')}".strip()
            found.setdefault((dtype, r["batch"], r["layout"]), []).append(min(peers) / r["ms"]["kernel"])
    names = sorted(found)
    figure, axis = pyplot.subplots(figsize=(9, 1.2 + 0.28 * len(names)), layout="constrained")
    for n, name in enumerate(names):
        axis.scatter(found[name], [n] * len(found[name]), s=14, color=OURS, alpha=0.35, linewidths=0)
        axis.scatter([statistics.geometric_mean(found[name])], [n], s=60, color=PEER, marker="|", linewidths=2)
    labels = [f"{dtype}, {batch} rows, batch {layout}" for dtype, batch, layout in names]
    axis.set(xscale="log", xlabel="best of torch ÷ ours; bar: geometric mean", yticks=range(len(names)))
    axis.set_yticklabels(labels, fontsize=8)
    plain_log(pyplot, axis.xaxis, 2)
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.grid(axis="x", alpha=0.2)
    axis.invert_yaxis()
    figure.suptitle(f"{rows[0]['device']}: Kronecker products, one point for each pattern")
    return figure


def two_four(pyplot: Any, rows: list[Row]) -> Any:
    """Torch's dense layer ÷ ours, over the rows of x: a panel for each dtype, a line for each layer."""
    of = [r for r in rows if r["part"] == "product" and r["op"] == "linear" and r["arch"] == "auto"]
    of = [r for r in of if r["ms"].get("dense")]
    dtypes, layers = sorted({r["dtype"] for r in of}), sorted({(r["m"], r["k"]) for r in of})
    lines = -(-len(dtypes) // 2)
    figure, axes = pyplot.subplots(
        lines, 2, figsize=(9, 0.9 + 2.8 * lines), squeeze=False, sharex=True, sharey=True, layout="constrained"
    )
    for axis, dtype in zip(axes.flat, dtypes, strict=False):
        for (m, k), colour in zip(layers, itertools.cycle(SHADES), strict=False):
            line = sorted((r["n"], r["ms"]["dense"] / r["ms"]["ours"]) for r in of if (r["m"], r["k"]) == (m, k)
                          and r["dtype"] == dtype)  # fmt: skip
            axis.plot([n for n, _ in line], [ratio for _, ratio in line], marker=".", color=colour, label=f"{m} × {k}")
        axis.set(xscale="log", title=dtype, xlabel="rows", ylabel="dense ÷ ours")
        plain_log(pyplot, axis.xaxis, 4)
        axis.tick_params(axis="x", labelrotation=30, labelsize=8)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.grid(alpha=0.2)
    labels = axes[0][0].get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=7, fontsize=8, frameon=False)
    figure.suptitle(f"{of[0]['device']}: 2:4 layers (out × in)")
    return figure


def scale(pyplot: Any, rows: list[Row]) -> Any:
    """Time over the number of GPUs: a panel for each pattern, a colour for each length, dashed what others take."""
    of = [r for r in rows if r["part"] == "model"]
    names, lengths = list(dict.fromkeys(r["family"] for r in of)), sorted({r["tokens"] for r in of})
    figure, axes = pyplot.subplots(2, 3, figsize=(9, 6), sharex=True, layout="constrained")
    for axis, name in zip(axes.flat, names, strict=False):
        for tokens, colour in zip(lengths, SHADES, strict=False):
            line = sorted((r for r in of if (r["family"], r["tokens"]) == (name, tokens)), key=lambda r: r["world"])
            for style, way in (("-", "ours"), ("--", "all_gather"), (":", "ring")):
                axis.plot([r["world"] for r in line], [_scale_ms(r, way) for r in line], style, color=colour,
                          linewidth=1.4 if way == "ours" else 0.9)  # fmt: skip
        axis.set(xscale="log", yscale="log", title=name)
        plain_log(pyplot, axis.xaxis, 2)
        plain_log(pyplot, axis.yaxis)
        axis.grid(alpha=0.2)
    lines, key = pyplot.matplotlib.lines.Line2D, axes.flat[-1]
    shown = [lines([], [], color=c, label=_tokens(n)) for n, c in zip(lengths, SHADES, strict=False)]
    styles = (("-", "Fretwork"), ("--", "all-gather"), (":", "ring"))
    shown += [lines([], [], color="black", linestyle=style, label=label) for style, label in styles]
    key.legend(handles=shown, loc="center", fontsize=9, frameon=False)
    key.set_axis_off()
    figure.supxlabel("GPUs", fontsize=10)
    figure.supylabel("ms, forward and backward", fontsize=10)
    first = of[0]
    figure.suptitle(f"{first['device']}, modelled: {first['heads']} heads, D = {first['depth']}, {first['dtype']}")
    return figure


def _scale_ms(row: Row, way: str) -> float:
    """NaN where the tensors do not fit."""
    ms = row["ms"]["forward"] + row["ms"]["backward"] if way == "ours" else row["ms"][way]
    return float(ms) if row["fits"][way] else math.nan


def _tokens(count: int) -> str:
    return f"{count >> 20}M tokens" if count >= 1 << 20 else f"{count >> 10}k tokens"


PICTURES: dict[str, tuple[str, Draw]] = {
    "attention": ("attention", attention),
    "attention-length": ("attention", attention_by_length),
    "block": ("block", block),
    "conv": ("conv", conv),
    "kronecker": ("kronecker", kronecker),
    "two_four": ("two_four", two_four),
    "scale": ("scale_model", scale),
}


def main(folder: Path = ROOT / "docs/benchmarks") -> None:
    """Draws all pictures into a folder."""
    pyplot = svg_pyplot("plot_families")
    folder.mkdir(parents=True, exist_ok=True)
    for name, (suite, draw) in PICTURES.items():
        for path in sorted((ROOT / "bench/results").glob(f"*/{suite}.json")):
            if (figure := draw(pyplot, json.loads(path.read_text()))) is not None:
                file = folder / f"{name}-{path.parent.name}.svg"
                figure.savefig(file, metadata={"Date": None, "Creator": None})
                pyplot.close(figure)
                print(file)


if __name__ == "__main__":
    main()
