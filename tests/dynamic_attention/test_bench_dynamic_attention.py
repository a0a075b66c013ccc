"""The benchmark runs on a CPU, on a small problem."""

import json
import sys

import dynamic_attention
import torch


def test_a_small_run(monkeypatch, tmp_path):
    file, threads = tmp_path / "rows.json", torch.get_num_threads()
    options = [
        "--device",
        "cpu",
        "--parts",
        "masked,sinks",
        "--seq",
        "1024",
        "--depth",
        "16",
        "--threads",
        "1",
        "--json",
        str(file),
    ]
    monkeypatch.setattr(sys, "argv", ["dynamic_attention.py", *options])
    turns = dynamic_attention.turns
    monkeypatch.setattr(
        dynamic_attention, "turns", lambda calls, device, **_: turns(calls, device, rounds=2, seconds=0.1)
    )
    torch.manual_seed(0)
    dynamic_attention.main()
    torch.set_num_threads(threads)
    rows = json.loads(file.read_text())
    assert {(r["pass"], r["peer"]) for r in rows} == {
        (p, m) for p in ("forward", "backward") for m in ("fretwork", "sdpa", "with sinks", "without")
    }
    assert all(r["threads"] == 1 and r["dtype"] == "float32" and r["ms"] > 0 for r in rows)
