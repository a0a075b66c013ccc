"""The comparison of host times: its table and its rows."""

import json

import host_time
import pytest


@pytest.mark.parametrize("extra", [[], ["--autocast"]], ids=["plain", "autocast"])
def test_a_run_has_every_layer(tmp_path, capsys, extra):
    host_time.main(["--rounds", "1", "--count", "2", "--out", str(tmp_path), *extra])
    rows = json.loads((tmp_path / "cpu/host_time.json").read_text())
    names = [row["layer"] for row in rows]
    assert {"Linear", "BlockSparseLinear", "SemiSparseLinear", "fw.attention"} <= set(names)
    for row in rows:
        assert set(row["us"]) == set(host_time.MODES) and min(row["us"].values()) > 0
        assert row["autocast"] == bool(extra) and (row["layer"] != row["peer"] or row["us"] == row["peer_us"])
    head, *table = capsys.readouterr().out.splitlines()
    assert "forward + backward" in head and [line[:32].strip() for line in table] == names
