"""The comparison of several processes with one: its table and its rows."""

import json
import os

import compare_distributed
import pytest


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="each process has a core of its own")
def test_a_run_has_every_pattern(tmp_path, capfd):
    asked = ["--length", "256", "--heads", "4", "2", "--depth", "16", "--rounds", "1", "--method", "ulysses"]
    compare_distributed.main([*asked, "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "cpu/distributed.json").read_text())
    assert [row["name"] for row in rows] == list(compare_distributed.PATTERNS)
    for row in rows:
        assert row["heads"] == [4, 2] and row["world"] == 2 and row["method"] == "ulysses"
        assert set(row["ms"]) == set(row["processor_ms"]) == {"one", "many"} and min(row["ms"].values()) > 0
    head, *table = capfd.readouterr().out.splitlines()
    assert "ratio" in head and [line[:16].strip() for line in table] == list(compare_distributed.PATTERNS)


def test_more_processes_than_cores():
    with pytest.raises(SystemExit, match="--world: expected at most "):
        compare_distributed.main(["--world", "4096"])
