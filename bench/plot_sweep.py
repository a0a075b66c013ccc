"""Draws the ratios of random problems, best peer ÷ ours, from the rows of bench/sweep.py: by family, and by rows.

    python bench/plot_sweep.py                          # bench/results/*/sweep.json to docs/sweep-*.svg

The upper panels have the share of the draws with at least a ratio; the lower ones each draw over its number of rows
(attention: of tokens). Above 1 is faster than the best peer. Needs matplotlib (pip install fretwork[plot]).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from plotting import svg_pyplot

ROOT = Path(__file__).resolve().parent.parent
Row = dict[str, Any]
COLOURS = {"forward": "#1f3b73", "backward": "#ee6677"}


def size_of(row: Row) -> int:
    """Rows of a product, tokens of attention."""
    found = re.search(r"\b[nS]=(\d+)", row["problem"])
    assert found is not None
    return int(found[1])


def draw(rows: list[Row], title: str, path: Path) -> None:
    pyplot = svg_pyplot("plot_sweep")

    families = list(dict.fromkeys(r["family"] for r in rows))
    figure, axes = pyplot.subplots(
        2, len(families), figsize=(3.6 * len(families), 6), squeeze=False, layout="constrained"
    )
    for (above, below), family in zip(axes.T, families, strict=True):
        of = [r for r in rows if r["family"] == family]
        for name, colour in COLOURS.items():
            part = sorted((r["ratio"], size_of(r)) for r in of if r["pass"] == name)
            if part:
                shares = [100 * (len(part) - n) / len(part) for n in range(len(part))]
                above.plot([ratio for ratio, _ in part], shares, color=colour, linewidth=1.2, label=name)
                below.scatter(
                    [size for _, size in part],
                    [ratio for ratio, _ in part],
                    s=3,
                    c=colour,
                    linewidths=0,
                    rasterized=True,
                )
        what = "tokens" if family == "attention" else "rows"
        above.set(xscale="log", title=f"{family} ({len(of)})", xlabel="best peer ÷ ours", ylabel="% of draws")
        below.set(xscale="log", yscale="log", xlabel=what, ylabel="best peer ÷ ours")
        above.axvline(1.0, color="black", linewidth=0.8)
        below.axhline(1.0, color="black", linewidth=0.8)
        for one in (above.xaxis, below.xaxis, below.yaxis):
            one.set_major_locator(pyplot.matplotlib.ticker.LogLocator(base=2))
            one.set_major_formatter("{x:g}")
            one.set_minor_locator(pyplot.NullLocator())
        above.legend(fontsize=7, frameon=False)
        for axis in (above, below):
            axis.grid(alpha=0.2)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    print(path)


def main() -> None:
    for path in sorted((ROOT / "bench/results").glob("*/sweep.json")):
        of = json.loads(path.read_text())
        draw(of["rows"], f"{of['device']}, random problems, {of['date']}", ROOT / f"docs/sweep-{path.parent.name}.svg")


if __name__ == "__main__":
    main()
