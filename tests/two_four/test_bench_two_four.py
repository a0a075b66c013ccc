"""The comparison of 2:4 products: its rows, and what the tables show of them."""

import json
import sys
from pathlib import Path

import compare_two_four as compare

import report


def test_a_run_has_every_row_and_its_tables(tmp_path, monkeypatch, capsys):
    arguments = ["--device", "cpu", "--parts", "product,fallback", "--shapes", "64x32x3", "--seconds", "0.01"]
    monkeypatch.setattr(sys, "argv", ["compare", *arguments, "--out", str(tmp_path)])
    monkeypatch.setattr(compare, "copy_rate", lambda device: 1e6)
    monkeypatch.setattr(compare, "dense_rate", lambda dtype, device: 1e6)
    problems = compare.fallback_problems(gpu=False)
    assert {kind for *_, kind in problems} == {"float32", "bfloat16"} and len(problems) == len(set(problems)) == 20
    monkeypatch.setattr(compare, "fallback_problems", lambda gpu: [(32, 64, 5, "bfloat16")])
    compare.main()
    rows = json.loads((tmp_path / "cpu" / "two_four.json").read_text())
    assert [(r["part"], r["dtype"], r["m"]) for r in rows] == [
        ("product", "float32", 64), ("product", "bfloat16", 64), ("fallback", "bfloat16", 32)
    ]  # fmt: skip
    assert set(rows[2]["ms"]) == {"ours", "dense", "expanded"} and rows[2]["planned"] == "sparse"
    assert "| 32 × 64 | 5 | bfloat16 | " in capsys.readouterr().out


def test_what_a_call_costs_is_shown():
    """As called, every shape within so many µs of the GPU's time: the rows have it, and so does the table."""
    rows = json.loads((Path(compare.RESULTS) / "h200/two_four.json").read_text())
    measured = [r for r in rows if r.get("behind_us") is not None]
    head, _, *table = (line for line in report.two_four_section(measured) if line.startswith("|"))
    names = [name.strip() for name in head.split("|")]
    assert all(len(line.split("|")) == len(names) for line in table) and len(table) == len(measured)
    assert [line.split("|")[names.index("behind")].strip() for line in table] == [
        f"{r['behind_us']:.1f}" for r in measured
    ]
