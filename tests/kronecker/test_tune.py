"""`fretwork tune` as a user runs it: rows, tables that ops read, runs that are stopped, killed and resumed."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from program import PROGRAM, in_terminal, nvrtc_environment, ok, run

pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason=f"the program is not built: {PROGRAM}")

CPU = ("--rounds", "2", "--device", "cpu", "--threads", "1")
TWO = (*CPU, "--candidates", "rows:64,rows:256", "--batch", "64")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FRETWORK_TUNE_DIR", str(tmp_path / "tuned"))
    return tmp_path / "tuned"


def the_table(folder: Path) -> Path:
    (file,) = folder.iterdir()  # and nothing else was left there
    assert re.fullmatch(r"kronecker\.[a-z0-9-]+\.json", file.name)
    return file


def rows_of(file: Path) -> dict[str, dict]:
    table = json.loads(file.read_text())
    assert table["format"] == "fretwork tuned 1"
    ((device, ops),) = table["devices"].items()
    assert device and list(ops) == ["kronecker"]
    return ops["kronecker"]


def change(file: Path, problem: str, **values: object) -> None:
    table = json.loads(file.read_text())
    for ops in table["devices"].values():
        ops["kronecker"][problem].update(values)
    file.write_text(json.dumps(table))


def test_tunes_and_the_op_reads_it(folder: Path, tmp_path: Path) -> None:
    patterns = ("--patterns", "2,8,16,4;3,8,8,1")
    before = ok("tune", "kronecker", *patterns, *TWO, "--show")
    assert [line.split()[1:] for line in before.splitlines()] == [["best", "heuristic"]] * 2
    assert not folder.exists()

    text = ok("tune", "kronecker", *patterns, *TWO, "--csv", str(tmp_path / "rows.csv"))
    file = the_table(folder)
    assert f"wrote {file}" in text and "heuristic / table: geometric mean" in text
    found = rows_of(file)
    assert list(found) == ["2,8,16,4 float32 first 64", "3,8,8,1 float32 first 64"]
    for row in found.values():
        assert set(row["ms_of"]) == {"best", "rows:64", "rows:256"}
        assert row["ms"] == row["ms_of"][row["choice"]] and row["batch"] == 64
        assert 0 < row["mse"] < 1e-9 and row["heuristic_ms"] == row["ms_of"]["best"]
    with (tmp_path / "rows.csv").open() as lines:
        reader = csv.DictReader(lines)
        table = list(reader)
        columns = "batch_size a b c d kernel tile_columns deltas batch_warps batch_rows ms std mse "
        assert " ".join(reader.fieldnames or []).startswith(columns)
    assert [row["configuration"] for row in table] == [row["choice"] for row in found.values()]
    for row in table:  # the same in columns, empty where a kernel has no such parameter
        assert row["configuration"] == row["kernel"] + (f":{row['batch_rows']}" if row["batch_rows"] else "")
        assert row["tile_columns"] == row["deltas"] == row["batch_warps"] == ""

    assert json.loads(ok("info", "--json"))["tables"][-1] == str(file) and str(file) in ok("info")

    # What a call takes, and why. The row counts for batches up to the next power of two, in this layout and type.
    change(file, "2,8,16,4 float32 first 64", choice="rows:64")
    shown = ok("tune", "kronecker", *patterns, *CPU, "--show", "--batch", "127").splitlines()
    assert shown[0].split() == ["(2,8,16,4)", "rows:64", str(file)] and shown[1].split()[2] == str(file)
    for other in (["--batch", "128"], ["--batch", "64", "--bs-last"], ["--batch", "64", "--dtype", "fp16"]):
        assert "heuristic" in ok("tune", "kronecker", *patterns, *CPU, "--show", *other).splitlines()[0]
    compared = ok("tune", "kronecker", *patterns, *TWO, "--compare")
    assert re.search(r"^\(2,8,16,4\) +rows:64 ", compared, re.MULTILINE) and "wrote" not in compared


@pytest.mark.parametrize("extra", [["--bs-last"], ["--dtype", "fp64"], ["--dtype", "bf16"], ["--dtype", "fp16"]])
def test_every_candidate_of_the_cpu_is_right(folder: Path, extra: list[str]) -> None:
    common = ("--rounds", "1", "--device", "cpu", "--batch", "100")
    ok("tune", "kronecker", "--patterns", "2,8,16,4;1,7,5,3;1,48,48,1", *common, *extra)  # says nothing on stderr
    for row in rows_of(the_table(folder)).values():
        assert {"rows:64", "rows:256", "lanes:96", "lanes:192"} <= set(row["ms_of"])


@pytest.mark.parametrize(
    "extra", [["--dtype", "fp16"], ["--dtype", "bf16", "--bs-last"], ["--dtype", "fp32", "--precision", "tf32"]]
)
def test_every_candidate_of_the_gpu_is_right(folder: Path, device: torch.device, extra: list[str]) -> None:
    if device.type != "cuda":
        pytest.skip("for --device cuda")
    common = ("--patterns", "2,64,64,16;1,256,128,4;6,64,64,1;2,72,40,2;1,7,5,3", "--rounds", "1", "--batch", "1000")
    environment = {**nvrtc_environment(), **os.environ}
    ok("tune", "kronecker", "--device", "cuda", *common, *extra, env=environment)  # says nothing on stderr
    for row in rows_of(the_table(folder)).values():
        assert {"best", "simple"} <= set(row["ms_of"])


def grid(tmp_path: Path, count: int) -> str:
    file = tmp_path / "patterns"
    file.write_text("a b c d\n" + "".join(f"1 {8 * n} 16 4\n" for n in range(1, count + 1)))
    return str(file)


def test_configurations_are_in_columns(folder: Path, tmp_path: Path) -> None:
    """As in KSMM's tables; a row of any kernel, as a resumed run finds it in its table."""
    common = ("--patterns", "2,8,16,4;3,8,8,1;1,8,8,8;1,8,8,4", *TWO)
    ok("tune", "kronecker", *common)
    file, choices = the_table(folder), ("strided:16x4", "hopper:128", "lanes:96", "best")
    for problem, choice in zip(("2,8,16,4", "3,8,8,1", "1,8,8,8", "1,8,8,4"), choices, strict=True):
        change(file, f"{problem} float32 first 64", choice=choice)
    ok("tune", "kronecker", *common, "--resume", "--csv", str(tmp_path / "rows.csv"))
    with (tmp_path / "rows.csv").open() as lines:
        names = ("kernel", "tile_columns", "deltas", "batch_warps", "batch_rows")
        found = [tuple(row[name] for name in names) for row in csv.DictReader(lines)]
    assert found == [("strided", "", "16", "4", ""), ("hopper", "128", "", "", ""), ("lanes", "", "", "", "96"),
                     ("best", "", "", "", "")]  # fmt: skip


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_stopped_and_resumed(folder: Path, tmp_path: Path, how: signal.Signals) -> None:
    count = 60
    command = ("tune", "kronecker", "--patterns", grid(tmp_path, count), *TWO)
    child = subprocess.Popen([PROGRAM, *command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    done: list[str] = []
    while len(done) < 3 and time.monotonic() < deadline:
        time.sleep(0.005)
        if files := [file for file in folder.glob("*.json") if file.stat().st_size]:
            done = list(rows_of(files[0]))  # whole at any time
    child.send_signal(how)
    _, said = child.communicate(timeout=60)
    file = next(folder.glob("*.json"))
    kept = rows_of(file)
    assert 3 <= len(kept) < count
    if how == signal.SIGKILL:
        assert child.returncode == -how
    else:
        assert child.returncode == 130 and said.count("\n") == 1
        assert f"interrupted: {len(kept)} of {count} are done and in {file}; --resume" in said
        the_table(folder)

    first = "1,8,16,4 float32 first 64"
    change(file, first, ms=123.0)
    ok(*command, "--resume", "--csv", str(tmp_path / "rows.csv"))
    resumed = rows_of(the_table(folder))
    assert len(resumed) == count and resumed[first]["ms"] == 123.0  # not measured again
    assert all(resumed[problem] == row for problem, row in kept.items() if problem != first)
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == count + 1
    ok("tune", "kronecker", "--patterns", "1,8,16,4", *TWO)
    again = rows_of(the_table(folder))
    assert len(again) == count and again[first]["ms"] < 123.0


def test_a_second_run_on_the_same_table_is_refused(folder: Path, tmp_path: Path) -> None:
    command = ("tune", "kronecker", "--patterns", grid(tmp_path, 200), *TWO)
    child = subprocess.Popen([PROGRAM, *command], stdout=subprocess.DEVNULL)
    while not list(folder.glob("*.json")) if folder.exists() else True:
        time.sleep(0.005)
    done = run(*command)
    child.kill()
    child.wait()
    assert done.returncode == 1 and "expected no other process to write it" in done.stderr


def test_bad_tables_are_ignored_with_one_line(folder: Path) -> None:
    ok("tune", "kronecker", "--patterns", "2,8,16,4", *TWO)
    file = the_table(folder)
    good = file.read_text()
    call = ("bench", "kronecker", "--device", "cpu", "--patterns", "2,8,16,4", "--batch", "64", "--rounds", "1")
    ok(*call)  # nothing on standard error
    for text, says in (
        (good[: len(good) // 2], "not a table of tuned choices"),
        ("[1, 2]", "not a table of tuned choices"),
        (good.replace("tuned 1", "tuned 7"), "expected the format 'fretwork tuned 1', got 'fretwork tuned 7'"),
        (re.sub(r'"choice": "[^"]*"', '"choice": "warp:9"', good), "knows no kronecker choice 'warp:9' for '2,8,16,4"),
        (good.replace("float32 first 64", "float31 first 64"), "for '2,8,16,4 float31 first 64'"),
    ):
        file.write_text(text)
        done = run(*call)
        assert done.returncode == 0 and done.stderr.count("\n") == 1
        assert done.stderr.startswith(f"fretwork: tuning table {file}: ") and done.stderr.endswith("; ignored\n")
        assert says in done.stderr, done.stderr
        shown = run("tune", "kronecker", "--patterns", "2,8,16,4", *TWO, "--show")
        assert "heuristic" in shown.stdout and shown.stderr == done.stderr
    # A choice of a GPU is known here and not for this problem: the op does without.
    file.write_text(re.sub(r'"choice": "[^"]*"', '"choice": "hopper:128"', good))
    assert "hopper:128" in ok("tune", "kronecker", "--patterns", "2,8,16,4", *TWO, "--show")
    assert " best " in ok("tune", "kronecker", "--patterns", "2,8,16,4", *TWO, "--compare")
    ok(*call)
    # Nor does a run write over what it does not understand.
    file.write_text("{}")
    done = run("tune", "kronecker", "--patterns", "2,8,16,4", *TWO)
    assert done.returncode == 1 and "not a table" in done.stderr and file.read_text() == "{}"


def test_best_merges_tables(folder: Path, tmp_path: Path) -> None:
    one, two, best = (tmp_path / name for name in ("one.json", "two.json", "best.json"))
    ok("tune", "kronecker", "--patterns", "2,8,16,4;3,8,8,1", *TWO, "--out", str(one))
    two.write_text(one.read_text())
    change(one, "2,8,16,4 float32 first 64", ms=1e-9, choice="rows:64")
    change(two, "3,8,8,1 float32 first 64", ms=1e-9, choice="rows:256")
    text = ok("tune", "--best", str(one), str(two), "--out", str(best))
    assert "kronecker: 2 problems" in text and f"wrote {best}" in text
    merged = rows_of(best)
    assert [row["choice"] for row in merged.values()] == ["rows:64", "rows:256"]
    assert json.loads(ok("tune", "--best", str(one), str(two))) == json.loads(best.read_text())
    change(one, "2,8,16,4 float32 first 64", ms=1.9, batch=127)  # of more rows, each of which takes less
    change(two, "2,8,16,4 float32 first 64", ms=1.0, batch=64, choice="best")
    for tables in ([one, two], [two, one]):
        (merged,) = json.loads(ok("tune", "--best", *map(str, tables)))["devices"].values()
        assert merged["kronecker"]["2,8,16,4 float32 first 64"]["choice"] == "rows:64"
    assert not folder.exists()


def test_progress_in_a_terminal(folder: Path) -> None:
    shown = in_terminal("tune", "kronecker", "--patterns", "2,8,16,4;3,8,8,1", *TWO)
    assert "0/2 (2,8,16,4)" in shown and "1/2 (3,8,8,1)" in shown and "s left" in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "tune: expected kronecker or --best, got nothing"),
        (["frob"], "frob"),
        (["--out", "x"], "--out: expected with --best"),
        (["--best", "/nowhere/t.json"], "--best: expected tables, got /nowhere/t.json"),
        (["kronecker", "--short", "--long"], "expected without"),
        (["kronecker", "--patterns", "1,2,3"], "tune: --patterns: expected a,b,c,d, four whole numbers, got '1,2,3'"),
        (["kronecker", "--patterns", os.devnull], "tune: /dev/null: expected at least one pattern"),
        *(
            (
                ["kronecker", "--device", "cpu", "--candidates", f"rows:64,{unknown}"],
                f"tune: --candidates: expected some of best,rows:64,lanes:96,rows:128,lanes:192,rows:256,lanes:384,"
                f"rows:512,lanes:768, got '{unknown}'",
            )
            for unknown in ("warp:3", "hopper:64", "rows:63", "")
        ),
        (["kronecker", "--dtype", "fp8"], "tune: --dtype: expected float64"),
        (["kronecker", "--device", "tpu"], "tune: --device: expected cpu or cuda:N, got tpu"),
        (["kronecker", "--device", "cpu", "--precision", "tf32"], "tune: --precision: expected ieee"),
        (["kronecker", "--batch", "0"], "--batch: expected 1 to"),
        (["kronecker", "--compare", "--resume"], "expected without"),
        (["kronecker", "--show", "--csv", "rows.csv"], "expected without"),
        (["kronecker", "--show", "--resume"], "expected without"),
        (["kronecker", "--patterns", "mine.txt"], "tune: --patterns: expected a file or a,b,c,d, got mine.txt"),
    ],
)
def test_bad_usage_is_one_line_and_2(arguments: list[str], says: str) -> None:
    done = run("tune", *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("fretwork: ")
    assert says in done.stderr


def test_what_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("tune", "kronecker", "--patterns", "1,8,8,2", *TWO, "--out", str(tmp_path / "file" / "table.json"))
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "cannot be written" in done.stderr


def test_help_helps() -> None:
    assert "kronecker" in ok("tune", "--help") and "FRETWORK_TUNE_DIR" in ok("tune", "--help")
    text = ok("tune", "kronecker", "--help")
    for option in ("--short", "--long", "--patterns", "--dtype", "--bs-last", "--batch", "--resume", "Example"):
        assert option in text
