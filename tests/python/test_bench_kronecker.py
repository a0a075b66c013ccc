"""The comparison of Kronecker products: its rows, what it leaves out and says so, and what is drawn of them."""

import csv
import json
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
compare = pytest.importorskip("compare_kronecker")
plot = pytest.importorskip("plot_kronecker")


def test_parts_make_the_whole():
    whole = compare.paper()
    assert len(whole) == len(set(whole)) == 376
    parts = [compare.part_of(f"{k}/7", whole) for k in range(1, 8)]
    assert [p for part in parts for p in part] == list(enumerate(whole))
    with pytest.raises(SystemExit, match="--part"):
        compare.part_of("8/7", whole)


def test_peers_are_sampled_and_said_so():
    algos = ["kernel", *compare.PEERS]
    assert compare.sampled(0, algos, 4, 16, late=False) == {}
    assert set(compare.sampled(4, algos, 4, 16, late=False)) == {"bsr", "dense", "sparse"}
    assert compare.sampled(5, algos, 4, 16, late=False)["bmm"] == "measured in every 4th pattern"
    late = compare.sampled(0, algos, 4, 16, late=True)
    assert set(late) == set(compare.PEERS) and set(late.values()) == {"out of time"}


def test_a_run_has_every_row_and_a_table(tmp_path, monkeypatch, capsys):
    arguments = ["--device", "cpu", "--grid", "paper", "--part", "1/94", "--batch", "2", "--seconds", "0.01"]
    monkeypatch.setattr(sys, "argv", ["compare", *arguments, "--algos", "kernel,einsum,sparse", "--out", str(tmp_path)])
    monkeypatch.setattr(compare, "copy_rate", lambda device: 1e6)
    monkeypatch.setattr(compare, "dense_rate", lambda dtype, device: 1e6)
    compare.main()
    rows = json.loads((tmp_path / "cpu" / "kronecker_paper.json").read_text())
    with (tmp_path / "cpu" / "kronecker_paper.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(rows) == 8 and len(table) == 24  # four patterns in two layouts, three algorithms
    assert all(set(r["ms"]) | set(r["left_out"]) == {"kernel", "einsum", "sparse"} for r in rows)
    assert all((line["ms"] == "") != (line["why"] == "") for line in table)
    assert {line["why"] for line in table} == {"", "measured in every 4th pattern", "measured in every 16th pattern"}
    assert "8 rows in" in capsys.readouterr().err


def test_points_of_a_plot():
    row = {"pattern": [2, 3, 5, 7], "batch": 11, "dtype": "float16", "precision": None, "device": "NVIDIA",
           "ms": {"kernel": 3.0}, "floor_ms": 1.5}  # fmt: skip
    flops, moved = 2 * 11 * 2 * 3 * 5 * 7, 2 * (11 * 2 * 7 * (3 + 5) + 2 * 3 * 5 * 7)
    assert plot.points([row], "kernel") == ([pytest.approx(flops / moved)], [2.0])
    assert plot.points([row], "bmm") == ([], [])
    tf32 = {**row, "dtype": "float32", "precision": "high"}
    assert list(plot.panels([row, tf32])) == ["float16", "float32 tf32"]
    assert math.isclose(plot.geomean([1.0, 4.0]), 2.0)


def test_plot_needs_rows(tmp_path, monkeypatch):
    file = tmp_path / "rows.json"
    file.write_text("[]")
    monkeypatch.setattr(sys, "argv", ["plot", "--rows", str(file), "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="--rows: expected forward rows"):
        plot.main()
