"""Draws each family's chosen shapes beside its peers, from the rows of the bench/compare_*.py programs.

    python bench/plot_families.py                       # bench/results to docs/benchmarks/*.svg

Attention by pattern and by length, block products by block and density, convolution by layer, Kronecker and 2:4
products by rows. Needs matplotlib (pip install fretwork[plot]).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plotting import svg_pyplot
from report import ROOT, Row, best_peer

OURS, PEER, FLOOR = "#1f3b73", "#ee6677", "#888888"
SHADES = ["#1f3b73", "#2b8cbe", "#66c2a4", "#ccbb44", "#ee6677", "#aa3377", "#777777"]
BY_LENGTH = ("full", "causal", "window", "longformer", "strided", "neighborhood")
Draw = Callable[[Any, list[Row]], Any]


def attention(pyplot: Any, rows: list[Row]) -> Any:
    """Bars of time by pattern: ours, the best peer, and the floor."""
    wanted = [r for r in rows if r["part"] == "pattern" and r["arch"] == "auto" and r.get("flex", "plain") == "plain"]
    seq = 16384 if any(r["seq"] == 16384 for r in wanted) else 2048
    of = [r for r in wanted if r["seq"] == seq and r["depth"] in (128, 64 if seq == 2048 else 128)]
    names = list(dict.fromkeys(r["pattern"] for r in of))
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 1 + 0.26 * len(names)), sharey=True, layout="constrained")
    for axis, which in zip(axes, ("forward", "backward"), strict=True):
        by_name = {r["pattern"]: r for r in of if r["pass"] == which}
        for n, name in enumerate(names):
            if (row := by_name.get(name)) is None:
                continue
            peer = best_peer(row)[1]
            axis.barh(n - 0.2, row["ms"]["ours"], 0.38, color=OURS, label="Fretwork" if n == 0 else None)
            if peer is not None:
                axis.barh(n + 0.2, peer, 0.38, color=PEER, label="best peer" if n == 0 else None)
            axis.plot([row["floor_ms"]] * 2, [n - 0.42, n + 0.42], color=FLOOR, label="floor" if n == 0 else None)
        axis.set(xscale="log", title=which, xlabel="ms", yticks=range(len(names)), yticklabels=names)
        axis.grid(axis="x", alpha=0.2)
    axes[0].invert_yaxis()
    axes[1].legend(fontsize=8, frameon=False)
    first = of[0]
    figure.suptitle(f"{first['device']}: {first['heads']} heads, S = {seq}, D = {first['depth']}, {first['dtype']}")
    return figure


def attention_by_length(pyplot: Any, rows: list[Row]) -> Any:
    """Time over the number of tokens, of some patterns; None if there is one length."""
    of = [r for r in rows if r["part"] == "pattern" and r["arch"] == "auto" and r["depth"] == 128]
    of = [r for r in of if r.get("flex", "plain") in (None, "plain") and r["pattern"] in BY_LENGTH]
    if len({r["seq"] for r in of}) < 2:
        return None
    figure, axes = pyplot.subplots(2, len(BY_LENGTH) // 2, figsize=(9, 5.5), sharex=True, layout="constrained")
    for axis, name in zip(axes.flat, BY_LENGTH, strict=True):
        for which, style in (("forward", "-"), ("backward", "--")):
            line = sorted((r for r in of if r["pattern"] == name and r["pass"] == which), key=lambda r: r["seq"])
            axis.plot([r["seq"] for r in line], [r["ms"]["ours"] for r in line], style, marker=".", color=OURS)
            peers = [(r["seq"], best_peer(r)[1]) for r in line if best_peer(r)[1]]
            axis.plot([s for s, _ in peers], [ms for _, ms in peers], style, marker=".", color=PEER)
        axis.set(xscale="log", yscale="log", title=name)
        axis.set_xticks([4096, 16384, 65536], ["4096", "16,384", "65,536"], fontsize=8)
        axis.xaxis.set_minor_locator(pyplot.NullLocator())
        axis.grid(alpha=0.2)
    for axis in axes[:, 0]:
        axis.set_ylabel("ms")
    lines = [pyplot.Line2D([], [], color=c, linestyle=s) for c in (OURS, PEER) for s in ("-", "--")]
    labels = ["Fretwork, forward", "backward", "best peer, forward", "backward"]
    figure.legend(lines, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
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
            for density, colour in zip(densities, SHADES, strict=False):
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


def by_rows(
    pyplot: Any, found: dict[str, dict[str, list[tuple[int, float]]]], title: str, label: str, means: bool
) -> Any:
    """A panel for each dtype: ratios over rows, as a line for each name; with `means`, points and their means."""
    columns = min(2, len(found))
    lines = -(-len(found) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(9, 0.6 + 3 * lines), squeeze=False, sharex=True, layout="constrained"
    )
    for axis in axes.flat[len(found) :]:
        axis.set_visible(False)
    for axis, (dtype, named) in zip(axes.flat, sorted(found.items()), strict=False):
        for (name, points), colour in zip(sorted(named.items()), SHADES, strict=False):
            sizes = sorted({size for size, _ in points})
            mean = [statistics.geometric_mean(ratio for at, ratio in points if at == size) for size in sizes]
            axis.plot(sizes, mean, marker="." if not means else None, color=colour, label=name)
            if means:
                axis.scatter([s for s, _ in points], [r for _, r in points], s=6, color=colour, alpha=0.4, linewidths=0)
        axis.set(xscale="log", yscale="log", title=dtype, xlabel="rows", ylabel=label)
        axis.xaxis.set_major_locator(pyplot.matplotlib.ticker.LogLocator(base=4))
        axis.xaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_major_locator(pyplot.matplotlib.ticker.LogLocator(base=2))
        axis.yaxis.set_major_formatter("{x:g}")
        for one in (axis.xaxis, axis.yaxis):
            one.set_minor_locator(pyplot.NullLocator())
        axis.tick_params(axis="x", labelrotation=30, labelsize=8)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.grid(alpha=0.2)
        axis.legend(fontsize=7, frameon=False)
    figure.suptitle(title)
    return figure


def kronecker(pyplot: Any, rows: list[Row]) -> Any:
    """The best of torch's ways ÷ ours, over the rows of x."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for r in rows:
        peers = [ms for name, ms in r["ms"].items() if name != "kernel"]
        if r["part"] == "forward" and peers:
            dtype = " ".join([r["dtype"], {"highest": "ieee", "high": "tf32"}.get(r["precision"], "")]).strip()
            points = found.setdefault(dtype, {}).setdefault(f"batch {r['layout']}", [])
            points.append((r["batch"], min(peers) / r["ms"]["kernel"]))
    return by_rows(pyplot, found, f"{rows[0]['device']}: Kronecker products", "best of torch ÷ ours", means=True)


def two_four(pyplot: Any, rows: list[Row]) -> Any:
    """Torch's dense layer ÷ ours, over the rows of x."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for r in rows:
        if r["part"] == "product" and r["op"] == "linear" and r["arch"] == "auto" and r["ms"].get("dense"):
            points = found.setdefault(r["dtype"], {}).setdefault(f"{r['m']} × {r['k']}", [])
            points.append((r["n"], r["ms"]["dense"] / r["ms"]["ours"]))
    return by_rows(pyplot, found, f"{rows[0]['device']}: 2:4 layers", "dense ÷ ours", means=False)


PICTURES: dict[str, tuple[str, Draw]] = {
    "attention": ("attention", attention),
    "attention-length": ("attention", attention_by_length),
    "block": ("block", block),
    "conv": ("conv", conv),
    "kronecker": ("kronecker", kronecker),
    "two_four": ("two_four", two_four),
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
