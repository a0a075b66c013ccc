"""The comparison of host times: its table and its rows."""

import csv

import host_time
import pytest


@pytest.mark.parametrize("extra", [[], ["--autocast"]], ids=["plain", "autocast"])
def test_a_run_has_every_layer(tmp_path, capsys, extra):
    file = tmp_path / "host.csv"
    host_time.main(["--rounds", "1", "--count", "2", "--csv", str(file), *extra])
    rows = list(csv.DictReader(file.open()))
    names = list(dict.fromkeys(row["layer"] for row in rows))
    assert {"Linear", "BlockSparseLinear", "SemiSparseLinear", "fw.attention"} <= set(names)
    assert len(rows) == 3 * len(names) and all(float(row["us"]) > 0 for row in rows)
    assert all(float(row["ratio"]) == 1 for row in rows if row["layer"] == row["peer"])
    head, *table = capsys.readouterr().out.splitlines()
    assert "forward + backward" in head and [line[:32].strip() for line in table] == names
