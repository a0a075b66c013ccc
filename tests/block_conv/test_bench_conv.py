"""The comparison of convolutions: its rows, and what the table shows of them."""

import json
import sys

import compare_conv as compare
import pytest

import report


def test_a_run_has_every_row_and_its_table(tmp_path, monkeypatch, capsys):
    arguments = ["--device", "cpu", "--layers", "32x16x6", "--blocks", "8,16", "--densities", "0.5", "--batch", "2"]
    monkeypatch.setattr(sys, "argv", ["compare", *arguments, "--seconds", "0.01", "--out", str(tmp_path)])
    compare.main()
    rows = json.loads((tmp_path / "cpu" / "conv.json").read_text())
    assert [(r["block"], r["pass"], r["format"]) for r in rows] == [
        (block, which, form) for block in (8, 16) for which in ("forward", "backward") for form in ("nhwc", "nchw")
    ]
    for r in rows:
        assert (r["in"], r["out"], r["image"], r["batch"]) == (32, 16, 6, 2) and 0 < r["error"] < 1e-5
        assert set(r["ms"]) == {"ours", "dense nhwc", "dense nchw"} and r["speedup"] > 0
        # The share is the speedup by the blocks that are there.
        flops = r["tflops"] * r["ms"]["ours"] / (r["dense_tflops"] * min(r["ms"]["dense nhwc"], r["ms"]["dense nchw"]))
        assert 0.1 < flops < 0.9 and r["share"] == pytest.approx(flops * r["speedup"])
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--quick", "--passes", "forward", "--out", str(tmp_path / "quick")])
    compare.main()  # torch's faster format is what counts, also where ours is measured in one
    quick = json.loads((tmp_path / "quick/cpu/conv.json").read_text())
    assert {r["format"] for r in quick} == {"nhwc"} and all("dense nchw" in r["ms"] for r in quick)
    printed = capsys.readouterr().out
    assert "nhwc: backward ÷ forward" in printed and "forward: NCHW ÷ channels last" in printed
    head, _, *table = (line for line in report.conv_section(rows) if line.startswith("|"))
    assert len(table) == 4 and all(line.count("|") == head.count("|") for line in table)
