"""The pages that the program writes: whole, of one file, and without a complaint in a browser."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from browser import WIDTHS, look, needs_browser
from program import PROGRAM, ok, run

import fretwork as fw
from fretwork.report import write

pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason=f"the program is not built: {PROGRAM}")

SHORT = ("--device", "cpu", "--threads", "1", "--rounds", "1")
RUNS = {
    "advise": ("advise", "64x32", *SHORT),
    "attention": ("bench", "attention", *SHORT, "--seq", "64", "--heads", "1", "--depth", "16"),
    "block": ("bench", "block", *SHORT, "--n", "64", "--rows", "3,64", "--block", "32", "--op", "dsd,dds,sdd,softmax"),
    "conv": ("bench", "conv", *SHORT, "--layer", "32x8", "--block", "32"),
    "kronecker": ("bench", "kronecker", *SHORT, "--rows", "8", "--patterns", "1,8,8,3;2,4,4,1", "--backward"),
    "chains": ("bench", "kronecker", *SHORT, "--rows", "8", "--chain", "4,4,4,1;1,4,4,4", "--chain", "1,4,4,4"),
    "two_four": ("bench", "two_four", *SHORT, "--m", "64", "--k", "32", "--rows", "1,8"),
    "tune": ("tune", "kronecker", *SHORT, "--patterns", "2,8,16,4;3,8,8,1", "--rows", "8"),
}
VOID = {"meta", "link", "br"}


class Reader(HTMLParser):
    """Checks that tags are closed, and keeps what a test wants of the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.facts: dict[str, str] = {}
        self.cells: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        at = self.open[-1] if self.open else ""
        if at == "dt":
            self.facts[data] = ""
        elif at == "dd":
            self.facts[list(self.facts)[-1]] = data
        elif at == "td":
            self.cells.append(data)


def count(reader: Reader, kind: str) -> int:
    return sum(attributes.get("class") == kind for _, attributes in reader.tags)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of every run, with the JSON of those that write one."""
    folder = tmp_path_factory.mktemp("pages")
    made = {}
    for name, arguments in RUNS.items():
        page = folder / f"{name}.html"
        table = ("--out", str(folder / "table.json")) if name == "tune" else ()
        rows = () if name in ("advise", "tune") else ("--json", str(folder / f"{name}.json"))
        ok(*arguments, *table, *rows, "--html", str(page))
        made[name] = page
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 64))
    report = fw.sparsify(
        model, {"0": fw.recipes.TwoFour(), "1": fw.recipes.Monarch(8)}, calibration=[torch.randn(3, 64)]
    )
    (folder / "model.json").write_text(report.to_json())
    made["model"] = Path(write(folder / "model.json"))
    return made


each = pytest.mark.parametrize("name", [*RUNS, "model"])


@each
def test_a_page_is_whole_and_alone(pages, name):
    text = pages[name].read_text()
    reader = Reader(text)
    assert text.startswith("<!doctype html>") and count(reader, "row") >= 2 and count(reader, "axis") >= 1
    assert not {"script", "iframe", "img", "style src"} & {tag for tag, _ in reader.tags}
    links = [value for _, attributes in reader.tags for key, value in attributes.items() if key in ("src", "href")]
    assert links == ["data:,"] and "@import" not in text and "url(" not in text
    assert reader.facts["fretwork"] == ok("--version").split()[1]
    if name != "model":
        assert reader.facts["machine"] in ok(*RUNS["two_four"]) and "UTC" in reader.facts["measured"]
        assert reader.facts["dtype"] == ("bfloat16" if name == "advise" else "float32")


@pytest.mark.parametrize("name", [name for name in RUNS if name not in ("advise", "tune")])
def test_a_page_has_every_row_with_its_floor_and_peer(pages, name):
    rows = json.loads(pages[name].with_suffix(".json").read_text())["rows"]
    reader = Reader(pages[name].read_text())
    assert count(reader, "row") == len(rows)
    times = {"attention": ("ms", "full_ms", "floor_ms"), "kronecker": ("ms", "floor_ms", "backward_ms")}
    for row in rows:
        for field in times.get(name, ("ms", "dense_ms", "floor_ms")):
            assert row[field] > 0 and f"{row[field]:.4g}" in reader.cells
    marks = sum(tag == "g" and attributes.get("class") == "s0" for tag, attributes in reader.tags)
    assert marks == len(rows) + 1  # and the legend


@needs_browser
@each
def test_a_browser_has_nothing_to_complain_of(pages, name, tmp_path):
    seen = look(pages[name], tmp_path)
    assert seen.complaints == [] and seen.frames.keys() == set(WIDTHS)
    for frame in seen.frames.values():
        assert frame["width"] <= frame["window"] and frame["marks"] == frame["inside"] > 0


@needs_browser
@pytest.mark.parametrize("fault", ["<script>nothing.at.all()</script>", "<script>console.error('so')</script>"])
def test_complaints_are_found(fault, tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text(f"<!doctype html><html><body>{fault}<p style='width: 2000px'>wide</p></body></html>")
    seen = look(bad, tmp_path)
    assert len(seen.complaints) == len(WIDTHS) and all(f["width"] > f["window"] for f in seen.frames.values())


def test_names_are_escaped(tmp_path):
    row = {"name": '<b>"&', "kind": "two_four", "shape": [4, 4], "error": 0.5}
    report = {"rows": [{**row, "parameters_before": 16, "parameters_after": 8}], "parameters_before": 16}
    (tmp_path / "m.json").write_text(json.dumps(report))
    text = Path(write(tmp_path / "m.json", tmp_path / "other.html")).read_text()
    assert "<b>" not in text and "&lt;b&gt;&quot;&amp;" in text
    assert "&lt;b&gt;&quot;&amp;" in text and '<b>"&' in Reader(text).cells


def test_an_error_of_zero_has_its_mark(tmp_path):
    """As attention's layers have, which keep all weights."""
    row = {"kind": "attention", "shape": [], "error": 0.0, "parameters_before": 16, "parameters_after": 16}
    for others in (0.0, 0.4):
        rows = [{**row, "name": "a"}, {**row, "name": "b", "error": others}]
        (tmp_path / "m.json").write_text(json.dumps({"rows": rows}))
        text = Path(write(tmp_path / "m.json")).read_text()
        assert "nan" not in text and "inf" not in text
        marks = sum(tag == "g" and attributes.get("class") == "s0" for tag, attributes in Reader(text).tags)
        assert marks == 2 * (len(rows) + 1)  # two plots, each with a legend


def test_a_report_of_nothing(tmp_path):
    (tmp_path / "m.json").write_text(fw.sparsify(torch.nn.Sequential(torch.nn.ReLU()), {}).to_json())
    assert "0 layers" in Path(write(tmp_path / "m.json")).read_text()


def test_report_as_a_command(tmp_path):
    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fretwork.report", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    model = torch.nn.Sequential(torch.nn.Linear(16, 8))
    (tmp_path / "model.json").write_text(fw.sparsify(model, {"*": fw.recipes.TwoFour()}).to_json())
    done = call("model.json")
    assert (done.returncode, done.stdout, done.stderr) == (0, "wrote model.html\n", "")
    assert re.search(r"keep 52\.9 %", (tmp_path / "model.html").read_text())
    for name, text in {"bad.json": "{", "other.json": '{"rows": [{"name": 1}]}', "list.json": "[1]"}.items():
        (tmp_path / name).write_text(text)
        done = call(name)
        expected = f"fretwork.report: {name}: expected the JSON of fw.sparsify's report, got something else\n"
        assert (done.returncode, done.stderr) == (1, expected)
    assert "gone.json: cannot be read: No such file" in call("gone.json").stderr
    assert call(".").stderr == "fretwork.report: .: cannot be read: Is a directory\n"
    assert "nowhere/x.html: cannot be written" in call("model.json", "--html", "nowhere/x.html").stderr


def test_files_are_not_written_over_each_other(tmp_path):
    for other in ("--csv", "--json"):
        done = run(*RUNS["two_four"], other, str(tmp_path / "x"), "--html", str(tmp_path / "x"))
        assert done.returncode == 2 and f"--html: expected another file than {other}" in done.stderr
