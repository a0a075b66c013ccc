"""The random problems of bench/sweep.py, and the pages that are made of their rows."""

import argparse
import json
import re
from pathlib import Path

import plot_sweep
import pytest
import sweep

import report

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("family", sweep.FAMILIES)
def test_a_number_is_always_the_same_problem(family):
    made = [[sweep.draw_of(family, seed, number) for number in range(1, 6)] for seed in (3, 3, 4)]
    names = [[(draw[0].name, *draw[1:]) if draw else None for draw in draws] for draws in made]
    assert names[0] == names[1] != names[2]


@pytest.mark.parametrize("family", sweep.FAMILIES)
def test_every_way_of_a_problem_runs(family):
    args = argparse.Namespace(seed=5, draws=2, seconds=60.0, rounds=1)
    rows = list(sweep.sweep(family, args))
    assert len(rows) == 2
    for row in rows:
        assert "ours" in row["us"] and len(row["us"]) > 1 and row["ratio"] > 0
        assert plot_sweep.size_of(row) > 0


def test_pages_are_of_the_rows():
    """After a change of the rows: python bench/report.py and python bench/plot_sweep.py."""
    assert "\n".join(report.sweep_page()).rstrip() + "\n" == (ROOT / "docs/sweeps.md").read_text()
    path = ROOT / "bench/results/h200/sweep.json"
    assert "\n".join(report.readme_sweep(path)) in (ROOT / "README.md").read_text()
    for file in (ROOT / "bench/results").glob("*/sweep.json"):
        rows = json.loads(file.read_text())["rows"]
        told = re.findall(r">([^<>]+)</text>", (ROOT / f"docs/sweep-{file.parent.name}.svg").read_text())
        for family in {r["family"] for r in rows}:
            assert f"{family} ({sum(r['family'] == family for r in rows)})" in told
