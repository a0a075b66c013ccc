"""Draws time ÷ floor of every algorithm against arithmetic intensity, from the rows of bench/compare_kronecker.py.

    python bench/plot_kronecker.py                      # rows of the H200 to docs/kronecker-*.svg
    python bench/plot_kronecker.py --rows bench/results/cpu/kronecker.json --out /tmp

One picture per layout, with a panel for each type. A point is a pattern; 1 is the floor of the row, below which nothing
can be. Needs matplotlib (pip install fretwork[plot]).
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from plotting import svg_pyplot

ROOT = Path(__file__).resolve().parent.parent
Row = dict[str, Any]
BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
PRECISIONS = {"highest": " ieee", "high": " tf32"}
# Ours on top of the others; colours that differ in lightness too.
STYLES = {
    "sparse": ("#bbbbbb", "x"), "bsr": ("#ccbb44", "v"), "dense": ("#66ccee", "s"), "einsum": ("#228833", "^"),
    "bmm": ("#ee6677", "D"), "kernel": ("#1f3b73", "o"),
}  # fmt: skip

TICKS = [n * 10**power for power in range(5) for n in (1, 2, 3, 5)]


def intensity(row: Row) -> float:
    """FLOPs for each byte of x, w and y."""
    a, b, c, d = row["pattern"]
    moved = (row["batch"] * a * (b + c) * d + a * b * c * d) * BYTES[row["dtype"]]
    return 2.0 * row["batch"] * a * b * c * d / moved


def points(rows: list[Row], algo: str) -> tuple[list[float], list[float]]:
    """Intensities, and times by the floor, where the algorithm was measured."""
    of = [r for r in rows if algo in r["ms"]]
    return [intensity(r) for r in of], [r["ms"][algo] / r["floor_ms"] for r in of]


def shown(rows: list[Row], batch: int | None = None) -> list[Row]:
    """Those of a picture: forward, with a batch or the largest there is."""
    forward = [r for r in rows if r["part"] == "forward" and r["arch"] == "auto"]
    most = max((r["batch"] for r in forward), default=0)
    return [r for r in forward if r["batch"] == (batch or most)]


def panels(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows by what a panel's title says."""
    found: dict[str, list[Row]] = {}
    for r in rows:
        precision = PRECISIONS.get(r.get("precision") or "", "") if "NVIDIA" in r["device"] else ""
        found.setdefault(f"{r['dtype']}{precision}", []).append(r)
    return found


def labels(rows: list[Row]) -> dict[str, str]:
    """What a panel's legend says of each algorithm that was measured."""
    told = {}
    for algo in STYLES:
        if over := points(rows, algo)[1]:
            name = "fretwork" if algo == "kernel" else algo
            told[algo] = f"{name} ({statistics.geometric_mean(over):.1f}×, {len(over)})"
    return told


def draw(rows: list[Row], title: str, path: Path) -> None:
    pyplot = svg_pyplot("plot_kronecker")

    by_type = panels(rows)
    figure, axes = pyplot.subplots(
        1, len(by_type), figsize=(4.2 * len(by_type) + 0.8, 4.2), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, (name, of) in zip(axes[0], by_type.items(), strict=True):
        for algo, label in labels(of).items():
            colour, marker = STYLES[algo]
            axis.scatter(*points(of, algo), s=14, c=colour, marker=marker, linewidths=0.8, label=label)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set(xscale="log", yscale="log", title=name, xlabel="FLOP / byte")
        axis.set_xticks([n for n in TICKS if axis.get_xlim()[0] <= n <= axis.get_xlim()[1]])
        axis.set_yticks([n for n in TICKS if axis.get_ylim()[0] <= n <= axis.get_ylim()[1]])
        for one in (axis.xaxis, axis.yaxis):
            one.set_major_formatter("{x:g}")
            one.set_minor_locator(pyplot.NullLocator())
        axis.legend(fontsize=7, frameon=False)
        axis.grid(alpha=0.2)
    axes[0][0].set_ylabel("time ÷ floor")
    figure.suptitle(title, fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ROOT / "bench/results/h200/kronecker.json"
    parser.add_argument("--rows", type=Path, nargs="+", default=[default], help="files of rows")
    parser.add_argument("--batch", type=int, help="rows with this batch (the largest there is)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="the folder for pictures")
    options = parser.parse_args()
    rows = shown([r for file in options.rows for r in json.loads(file.read_text())], options.batch)
    if not rows:
        raise SystemExit("plot_kronecker: --rows: expected forward rows with such a batch, got none")
    for layout in ("first", "last"):
        if of := [r for r in rows if r["layout"] == layout]:
            what = f"{of[0]['device']}, batch {layout}, {of[0]['batch']} rows"
            draw(of, f"{what}: each point a pattern (geometric mean, count)", options.out / f"kronecker-{layout}.svg")


if __name__ == "__main__":
    main()
