"""The page of the modelled GPUs, docs/benchmarks/scale.md, from the rows of bench/scale.py."""

from __future__ import annotations

import textwrap
from typing import Any

Row = dict[str, Any]
SHOWN = (8, 64, 512)  # GPUs in the tables; the rows have more
PATTERNS = {
    "window": "causal windows of 4096 keys",
    "sinks": "causal windows of 4096 keys, and the first 4",
    "longformer": "windows of ±512 keys, and a first token that attends to all and that all attend to",
    "strided": "causal, the last 1024 keys and every 1024th",
    "causal": "causal, all keys",
}
METHOD = """- **Measured** on one GPU: steps of a rank's plan (attention of some rows on one piece of keys), forward and
  backward, of several sizes; merging and adding of rows; the host's time for a step. Longer steps than the longest
  measured one are extrapolated by their number of elements, at its rate.
- **Exact**: which steps a rank has, and which bytes travel, from the planner of `fd.attention`, for every rank.
- **Published**: the rates of links, each direction, as NCCL reaches them: 370 GB/s on NVLink 4 within 8 GPUs (450 on
  paper), 48 GB/s on 400 Gb/s InfiniBand for each GPU between nodes, and 30 µs for each message.
- **Modelled**: rounds as the exchange posts them, each as long as its transfer or the work beside it; the slowest rank
  counts. Left out: what transfers take from kernels beside them, congestion, and the other layers of a model.
- *All-gather* collects all keys and values before it computes, keeps them for the gradient, and uses all links of a
  node at once. *Ring* passes all keys and values (backward their gradients too) around in rounds that work hides. Both
  are given rows that are balanced perfectly and kernels at their best rate, so they are bounds.
- *Efficiency*: the time of perfectly balanced kernels at their best rate, without any transfer, ÷ ours. *GB* is what
  the rank that receives or sends most does in a forward pass. –: tensors of one layer do not fit into 141 GB.
"""


def figure(value: float, fits: bool = True) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 and fits else f"{value:.3g}" if fits else "–"


def table_head(names: str) -> list[str]:
    columns = names.split(", ")
    return ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]


def pattern_table(rows: list[Row]) -> list[str]:
    """One pattern by length and number of GPUs."""
    head = "tokens, GPUs, ms, forward, backward, efficiency, GB received, GB sent, all-gather ms, ring ms"
    lines = table_head(head)
    for r in rows:
        if r["world"] not in SHOWN:
            continue
        ms, fits = r["ms"], r["fits"]
        both = figure(ms["forward"] + ms["backward"], fits["ours"])
        cells = [f"{r['tokens']:,}", str(r["world"]), f"**{both}**" if fits["ours"] else both]
        cells += [figure(ms[name], fits["ours"]) for name in ("forward", "backward")]
        cells += [f"{r['efficiency']:.2g}" if fits["ours"] else "–", figure(r["received_gb"]), figure(r["sent_gb"])]
        cells += [figure(ms[name], fits[name]) for name in ("all_gather", "ring")]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def check_table(rows: list[Row]) -> list[str]:
    """The model's sums beside complete sequences of a rank's steps."""
    lines = table_head("pattern, tokens, GPUs, rank, steps, forward ms, modelled, ratio, backward ms, modelled, ratio")
    for r in rows:
        cells = [r["family"], f"{r['tokens']:,}", str(r["world"]), str(r["rank"]), str(r["steps"])]
        for which in ("forward", "backward"):
            measured, predicted = r["measured"][which], r["predicted"][which]
            cells += [f"{measured:.3g}", f"{predicted:.3g}", f"{predicted / measured:.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def scale_section(rows: list[Row]) -> list[str]:
    """All patterns of a machine's rows, and the check."""
    first = rows[0]
    heads = f"{first['heads']} heads, D = {first['depth']}, {first['dtype']}"
    told = f"{heads}; torch {first['torch']}, measured {first['date']}. Times are those of one attention."
    lines = [f"## {first['device']}", "", *textwrap.wrap(told, 120), ""]
    for family in dict.fromkeys(r["family"] for r in rows if r["part"] == "model"):
        of = [r for r in rows if r["part"] == "model" and r["family"] == family]
        lines += [f"### {family}: {PATTERNS[family]}", "", *pattern_table(of), ""]
    told = "All that one rank computes, called in a plain loop on one GPU (nothing travels), beside the model's sum:"
    return [*lines, "### Check", "", told, "", *check_table([r for r in rows if r["part"] == "check"]), ""]
