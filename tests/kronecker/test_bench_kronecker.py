"""The comparison of Kronecker products: its rows, what it leaves out and says so, and what is drawn of them."""

import csv
import json
import math
import re
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import compare_kronecker as compare
import numpy as np
import plot_kronecker as plot
import pytest
import torch

import report
import timing


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
    assert len(rows) == 8 and len(table) == 48  # four patterns in two layouts, six algorithms
    assert all(set(r["ms"]) | set(r["left_out"]) == {"kernel", *compare.PEERS} for r in rows)
    assert all(r["left_out"][algo] == "not asked for" for r in rows for algo in ("bmm", "bsr", "dense"))
    assert all((line["median"] == "") != (line["why"] == "") for line in table)
    for line in (line for line in table if line["median"]):
        times = sorted(float(t) for t in line["times"].split())
        assert len(times) >= 1 and times[0] <= float(line["mean"]) <= times[-1] * 1.0001
        assert times[0] <= float(line["median"]) <= times[-1] and 0 <= float(line["iqr"]) <= times[-1] - times[0] + 1e-4
    reasons = {"", "not asked for", "measured in every 4th pattern", "measured in every 16th pattern"}
    assert {line["why"] for line in table} == reasons
    assert "8 rows in" in capsys.readouterr().err
    assert {"bmm", "einsum"} & set(rows[0]["ms"]) == set(rows[0]["peers_as_called_ms"]) == {"einsum"}
    assert report.as_called(rows[0]).endswith(")") and "(" not in report.as_called(rows[1] | {"peers_as_called_ms": {}})


def test_spread_is_numpys():
    times = [3.0, 1.0, 2.0, 10.0, 4.0, 7.5]
    low, high = np.percentile(times, [25, 75])
    assert compare.spread(times) == [f"{n:.5g}" for n in (np.mean(times), np.median(times), high - low)] + [
        "3 1 2 10 4 7.5"
    ]
    assert compare.spread([0.25]) == ["0.25", "0.25", "0", "0.25"]


def test_all_peers_and_resume(tmp_path, monkeypatch, capsys):
    """A run that stops goes on where it was, also behind a line that was not finished; every peer has a time."""
    arguments = ["--device", "cpu", "--grid", "paper", "--part", "1/188", "--batch", "2", "--seconds", "0.01"]
    arguments += ["--peers", "all", "--algos", "kernel,einsum,bmm", "--out", str(tmp_path)]
    monkeypatch.setattr(compare, "copy_rate", lambda device: 1e6)
    monkeypatch.setattr(compare, "dense_rate", lambda dtype, device: 1e6)
    measure, measured = compare.measure, []

    def stops(*args):
        measured.append(args[:3])
        if len(measured) == 3:
            raise KeyboardInterrupt
        return measure(*args)

    monkeypatch.setattr(compare, "measure", stops)
    monkeypatch.setattr(sys, "argv", ["compare", *arguments])
    with pytest.raises(KeyboardInterrupt):
        compare.main()
    partial = tmp_path / "cpu" / "kronecker_paper.partial"
    assert len(partial.read_text().splitlines()) == 3  # what was asked for, and two rows
    partial.write_text(partial.read_text() + '{"device": "th')  # as a killed process leaves it
    monkeypatch.setattr(sys, "argv", ["compare", *arguments, "--resume", "--layouts", "first"])
    with pytest.raises(SystemExit, match="--resume: expected the options of the run that was stopped, got another lay"):
        compare.main()
    monkeypatch.setattr(sys, "argv", ["compare", *arguments, "--resume"])
    compare.main()
    assert "2 rows are there already" in capsys.readouterr().err
    assert len(measured) == 3 + 2 and measured[2:4] == [measured[2], measured[2]]  # four rows; the third one again
    rows = json.loads((tmp_path / "cpu" / "kronecker_paper.json").read_text())
    assert len(rows) == 4 and all(set(r["ms"]) == {"kernel", "einsum", "bmm"} for r in rows) and not partial.exists()
    partial.write_text("{}\n" + json.dumps({**rows[0], "batch": 77}) + "\n")  # another run, not resumed
    monkeypatch.setattr(sys, "argv", ["compare", *arguments, "--part", "1/376", "--layouts", "last"])
    compare.main()
    rows = json.loads((tmp_path / "cpu" / "kronecker_paper.json").read_text())
    assert len(rows) == 5 and sum(r["batch"] == 77 for r in rows) == 1
    monkeypatch.setattr(sys, "argv", ["compare", *arguments, "--peers-every", "2"])
    with pytest.raises(SystemExit, match="--peers all: expected without --peers-every"):
        compare.main()


def test_patience():
    """A dense peer that takes long is left out, unless all are asked for; one without room is always."""
    long, large = (16, 1024, 1024, 2), (64, 192, 192, 64)
    assert "50 ms" in compare.too_much("dense", long, 25088, 1e9, False)
    assert compare.too_much("dense", long, 25088, 1e9, True) is None
    assert "2^31" in compare.too_much("dense", large, 1, 1e9, True)


@pytest.mark.parametrize("algos", ["", "bmm", "kernel,fast"])
def test_unknown_algorithms_are_refused(algos):
    with pytest.raises(SystemExit, match="--algos: expected kernel and some of bmm"):
        compare.asked(algos)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--layouts", "both"], "--layouts: expected some of first, last, got both"),
        (["--layouts", ""], "--layouts: expected some of first, last, got "),
        (["--dtypes", "fp16"], "--dtypes: expected some of float64, float32, float16, bfloat16, got fp16"),
        (["--precisions", "tf32"], "--precisions: expected some of highest, high, medium, got tf32"),
        (["--part", "half"], "--part: expected 1/N to N/N, got half"),
        (["--batch", "many"], "--batch: expected numbers from 1 on with commas, got many"),
        (["--batch", "16,0"], "--batch: expected numbers from 1 on with commas, got 16,0"),
        (["--patterns", "1,2,x,4"], "--patterns: expected a,b,c,d"),
    ],
)
def test_what_it_cannot_measure_is_refused(arguments, says, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["compare", "--device", "cpu", "--out", str(tmp_path), *arguments])
    with pytest.raises(SystemExit, match=says):
        compare.main()


def test_gradients_say_their_precision():
    device = torch.device("cpu")
    for dtype, precision in ((torch.float32, torch.get_float32_matmul_precision()), (torch.bfloat16, None)):
        row = compare.measure_backward((1, 8, 8, 2), 4, False, dtype, device, 0.01)
        assert row["precision"] == precision and row["ratio"] > 0


ROOT = Path(__file__).resolve().parents[2]


def results(machine):
    return json.loads((ROOT / "bench/results" / machine / "kronecker.json").read_text())


def test_pages_are_of_the_rows():
    """After a change of the rows: python bench/report.py."""
    measured = (ROOT / "docs/benchmarks/kronecker.md").read_text()
    for machine in ("h200", "cpu"):
        assert "\n".join(report.kronecker_section(results(machine))).rstrip() in measured
    assert "\n".join(report.kronecker_summary(results("h200"))) in (ROOT / "src/ops/kronecker/README.md").read_text()


def test_dates_are_all_of_the_rows():
    """A page of measurements names the first and the last day of each table."""
    rows = [{"date": f"2026-11-{day}"} for day in (16, 15, 17)]
    assert report.days(rows) == "2026-11-15 to 2026-11-17" and report.days(rows[:1]) == "2026-11-16"
    block = json.loads((ROOT / "bench/results/h200/block.json").read_text())
    head = report.section("H200", block)[2]
    dates = {r["date"] for r in block if r["arch"] == "auto" and r["op"] in ("dsd", "dds", "sdd")}
    assert min(dates) in head and max(dates) in head and head in (ROOT / "docs/benchmarks/block.md").read_text()


def test_plots_are_of_the_rows():
    """After a change of the rows: python bench/plot_kronecker.py."""
    rows = plot.shown(results("h200"))
    for layout in ("first", "last"):
        told = re.findall(r">([^<>]+)</text>", (ROOT / f"docs/kronecker-{layout}.svg").read_text())
        panels = plot.panels([r for r in rows if r["layout"] == layout])
        assert len(panels) == 4
        for title, of in panels.items():
            told = told[told.index(title) :]
            legend = list(plot.labels(of).values())
            assert told[1 : 1 + len(legend)] == legend


def test_patterns_of_ones_own():
    assert compare.given("1,2,3,4;6,64,64,1;") == [(1, 2, 3, 4), (6, 64, 64, 1)] and compare.given("") == []
    for text in ("1,2,3", "1,2,3,0"):
        with pytest.raises(SystemExit, match="--patterns: expected a,b,c,d"):
            compare.given(text)


def test_older_peers_stay_with_their_date(tmp_path):
    file = tmp_path / "rows.json"
    row = {"case": (1, 2), "date": "2026-01-01", "ms": {"kernel": 3.0, "bmm": 5.0, "dense": 7.0}}
    compare.store(file, [row], ("case",))
    compare.store(file, [{**row, "date": "2026-02-02", "ms": {"kernel": 2.0, "dense": 6.0}}], ("case",))
    compare.store(file, [{**row, "date": "2026-03-03", "ms": {"kernel": 1.0}}, {"case": 2, "us": 4}], ("case",))
    one, other = json.loads(file.read_text())
    assert one["ms"] == {"kernel": 1.0} and other == {"case": 2, "us": 4}
    assert one["earlier"] == {"bmm": {"ms": 5.0, "date": "2026-01-01"}, "dense": {"ms": 6.0, "date": "2026-02-02"}}
    compare.store(file, [row], ("case",))
    assert "earlier" not in json.loads(file.read_text())[0]  # all of it is new again


def test_chains_have_rows_and_a_table(tmp_path, monkeypatch, capsys):
    arguments = ["--device", "cpu", "--chains", "--batch", "70", "--seconds", "0.01", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["compare", *arguments])
    monkeypatch.setattr(compare, "copy_rate", lambda device: 1e6)
    monkeypatch.setattr(compare, "MONARCHS", {64: (8, 8), 96: (8, 12)})
    compare.main()
    rows = json.loads((tmp_path / "cpu" / "kronecker.json").read_text())
    assert [r["pattern"] for r in rows] == [[[8, 8, 8, 1], [1, 8, 8, 8]], [[12, 12, 8, 1], [1, 8, 12, 12]]]
    for r in rows:
        assert set(r["ms"]) == set(r["backward_ms"]) == {"kernel", "bmm", "dense"} and r["error"] < 1e-5
        assert math.isclose(r["floor_ms"], 2 * 70 * 4 * math.prod(r["pattern"][0][k] for k in (0, 2)) / 1e6)
    assert "chain [(8, 8, 8, 1)" in capsys.readouterr().err
    table = "\n".join(report.kronecker_section(rows))
    assert "| (8, 8, 8, 1), (1, 8, 8, 8) | 70 | float32 |" in table


def test_a_graph_keeps_what_its_call_reads(monkeypatch):
    class Operand:
        pass

    monkeypatch.setattr(timing.torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(timing.torch.cuda, "graph", lambda graph, stream: nullcontext())
    monkeypatch.setattr(timing.torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    operand = Operand()
    alive = weakref.ref(operand)
    replay = timing.graphed(lambda operand=operand: operand, SimpleNamespace(synchronize=lambda: None))
    del operand
    assert alive() is not None
    replay()
    del replay
    assert alive() is None


def test_points_of_a_plot():
    row = {"pattern": [2, 3, 5, 7], "batch": 11, "dtype": "float16", "precision": None, "device": "NVIDIA",
           "ms": {"kernel": 3.0}, "floor_ms": 1.5}  # fmt: skip
    flops, moved = 2 * 11 * 2 * 3 * 5 * 7, 2 * (11 * 2 * 7 * (3 + 5) + 2 * 3 * 5 * 7)
    assert plot.points([row], "kernel") == ([pytest.approx(flops / moved)], [2.0])
    assert plot.points([row], "bmm") == ([], [])
    tf32 = {**row, "dtype": "float32", "precision": "high"}
    assert list(plot.panels([row, tf32])) == ["float16", "float32 tf32"]
    assert plot.labels([row, {**row, "floor_ms": 0.375}]) == {"kernel": "fretwork (4.0×, 2)"}


def test_plot_needs_rows(tmp_path, monkeypatch):
    file = tmp_path / "rows.json"
    file.write_text("[]")
    monkeypatch.setattr(sys, "argv", ["plot", "--rows", str(file), "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="--rows: expected forward rows"):
        plot.main()
