"""The command-line program as a user runs it, and a C++ project on an installed copy."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import xml.etree.ElementTree as ET
import zlib
from pathlib import Path

import pytest
from program import LIBRARIES, PROGRAM, ROOT, in_terminal, nvrtc_environment, ok, run

LAYOUT = "random_blocks((1,64,64),32,0.1,0)"
# Four heads of 2 x 3 blocks; the bits are row-major, six to a character: A none, B the first, -(62) all but the first.
BITS = "block((4,2,3),(8,16),~AB-_)"

pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason=f"the program is not built: {PROGRAM}")


@pytest.fixture
def own_cache(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "FRETWORK_CACHE_DIR": str(tmp_path / "cache")}


def test_version_and_help() -> None:
    assert re.fullmatch(r"fretwork \d+\.\d+\.\d+\n", ok("--version"))
    top = ok("--help")
    for command in ("info", "show", "advise", "bench", "tune", "report", "two_four", "compile", "cache"):
        assert command in top
        assert "fretwork " + command in ok(command, "--help")
    for suite in ("attention", "block", "conv", "kronecker", "two_four"):
        assert "Example" in ok("bench", suite, "--help")
    for command in ("show", "advise", "report", "two_four", "compile", "cache", "info"):
        assert "Example" in ok(command, "--help")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "expected one of info, show, advise, bench, tune, report, two_four, compile, cache, got nothing"),
        (["frob"], "got frob"),
        (["info", "--frob"], "--frob"),
        (["--json", "info"], "--json: expected an option of fretwork, got an unknown one (try: fretwork info --help)"),
        (["show"], "PATTERN: expected a value, got nothing"),
        (["show", "frob"], "show: PATTERN: expected one such as random_blocks((1,64,64),32,0.1,0), or -"),
        (["show", "frob(1)"], "show: PATTERN: expected two_four or one of acsr, "),
        (["show", "random_blocks((1,4,4),16,1.5,0)"], "density: expected 0 to 1, got 1.5 "),
        (["show", LAYOUT, "--png"], "--png: expected a value, got nothing"),
        (["show", LAYOUT, LAYOUT], "show: PATTERN: expected several of Kronecker factors only, got "),
        (
            ["show", "kronecker(2,3,4,1)", "kronecker(1,2,6,1)", "--svg", "x"],
            "PATTERN: expected one to draw, got several",
        ),
        (["show", "kronecker(2,3,4,1)", "kronecker(1,2,5,1)"], "plan: patterns[1]: expected 6 in features"),
        (["show", LAYOUT, "--head", "one"], "--head: expected a number, got 'one'"),
        (["show", "block((1,2"], "expected"),
        (["show", "block((1,2,2),(4,4),~A)"], "block: expected 8 to 128, got 4"),
        (["show", "random_blocks((1,4000000,4000000),32,0.1,0)"], "at most 2^30 blocks"),
        (["show", "kronecker(2,0,3,4)"], "KroneckerPattern: b: expected at least 1, got 0"),
        (["show", "kronecker(2,3)"], "expected a, b, c, d, got 2 of them"),
        (["show", LAYOUT, "--head", "1"], "--head: expected 0, got 1"),
        (["show", LAYOUT, "--head", "-1"], "--head"),
        (["show", "two_four(8,8,0)", "--head", "1"], "--head: expected 0, got 1"),
        (["show", "kronecker(2,3,4,1)", "kronecker(1,2,6,1)", "--head", "1"], "--head: expected 0, got 1"),
        (["show", LAYOUT, "--name", "a"], "--name: expected with a .safetensors file, got it with random_blocks("),
        (["show", LAYOUT, "--png", "x", "--svg", "x"], "--svg: expected another file than --png, got x"),
        (["bench", "block", "--csv", "x", "--json", "x"], "--json: expected another file than --csv, got x"),
        (
            ["show", "two_four(8,6,0)"],
            "show: PATTERN: expected two_four(rows,cols,seed), rows and cols up to 32768, cols",
        ),
        (["show", "two_four(8,8)"], "got two_four(8,8)"),
        (["two_four", "inspect"], "FILE: expected a value, got nothing"),
        (["bench", "two_four", "--m", "12"], "--m and --k: expected multiples of 8, got 12 and 4096"),
        (["bench"], "expected one of attention, block, conv, kronecker, two_four, got nothing"),
        (["bench", "attention", "--pass", "sideways"], "--pass: expected forward or backward, got sideways"),
        (["bench", "attention", "--pattern", "full(7)"], "--pattern: expected a pattern of "),
        (["bench", "attention", "--pattern", "frob(7)"], "--pattern: "),
        (["bench", "attention", "--seq", "64", "--seq", "32"], "--seq: expected one value, got 2"),
        (["bench", "attention", "--heads", "4", "--kv-heads", "3"], "--kv-heads: expected a number that divides the 4"),
        (["bench", "block", "--op", "frob"], "--op: expected dsd, dds, sdd or softmax, got frob"),
        (["bench", "block", "--n", "100", "--block", "32"], "--n: expected a multiple"),
        (
            ["bench", "conv", "--layer", "16x"],
            "--layer: expected CHANNELSxSIZE or INxOUTxSIZE",
        ),
        (
            ["bench", "conv", "--layer", "20x8", "--block", "8"],
            "--layer: expected channels that are a multiple of every",
        ),
        (["bench", "conv", "--layer", "8x3", "--block", "8", "--kernel", "9", "--padding", "0"], "an image of"),
        (["bench", "conv", "--op", "both"], "--op: expected one of forward, backward_x, backward_values, got both"),
        (["bench", "conv", "--format", "hwc"], "--format: expected one of nhwc, nchw, got hwc"),
        (["bench", "block", "--density", "1.5"], "--density: expected 0 to 1, got '1.5'"),
        (["bench", "block", "--dtype", "int8"], "--dtype: expected float64"),
        (["bench", "block", "--device", "tpu"], "--device: expected cpu or cuda:N, got tpu"),
        (["bench", "block", "--rounds", "0"], "--rounds"),
        (["bench", "kronecker", "--grid", "frob"], "--grid: expected facts, sample, paper or a file, got frob"),
        (["bench", "kronecker", "--grid", "facts", "--patterns", "1,2,3,4"], "--grid: expected without --patterns"),
        (["bench", "kronecker", "--grid", os.devnull], "/dev/null: expected at least one pattern, got none"),
        (["bench", "kronecker", "--patterns", "1,64,64"], "--patterns: expected a,b,c,d, four whole numbers, got '1,6"),
        (["bench", "kronecker", "--patterns", "1,2,3,4;1,2,3,4,5"], "four whole numbers, got '1,2,3,4,5'"),
        (["bench", "kronecker", "--patterns", "1,2,3,4x"], "four whole numbers, got '1,2,3,4x'"),
        (["bench", "kronecker", "--patterns", "kronecker(1,2,3,4"], "four whole numbers, got 'kronecker(1,2,3,4'"),
        (
            ["bench", "kronecker", "--patterns", "1,2,0,4"],
            "--patterns: KroneckerPattern: c: expected at least 1, got 0",
        ),
        (["bench", "kronecker", "--patterns", "9999999999,9999999999,1,1"], "--patterns: KroneckerPattern"),
        (["bench", "kronecker", "--batch", "0"], "--batch: expected 1 to"),
        (["bench", "block", "--rows", "0"], "--rows: expected 1 to 1048576, got '0'"),
        (
            ["bench", "kronecker", "--chain", "2,3,4,1;1,2,5,1"],
            "bench: --chain: expected a factor of 6 in features after (2,3,4,1), got (1,2,5,1)",
        ),
        (
            ["bench", "kronecker", "--chain", "2,3,4"],
            "bench: --chain: expected a,b,c,d, four whole numbers, got '2,3,4'",
        ),
        (["bench", "kronecker", "--chain", "1,2,3,4", "--backward"], "--backward"),
        (["bench", "kronecker", "--chain", "1,2,3,4", "--grid", "paper"], "--grid"),
        (["report"], "FILE: expected a value, got nothing"),
        (
            ["bench", "kronecker", "--algos", "kernel,bmm"],
            "--algos: expected some of kernel,dense (torch's are in bench/compare_kronecker.py), got 'bmm'",
        ),
        (["bench", "kronecker", "--algos", "dense,"], "--algos: expected some of kernel,dense"),
        (["bench", "kronecker", "--algos", "dense", "--backward"], "--backward: expected kernel among --algos"),
        (["bench", "kronecker", "--dtype", "fp8"], "--dtype: expected float64"),
        (["bench", "kronecker", "--precision", "fp19"], "--precision: expected ieee, tf32 or tf32x3, got fp19"),
        (["bench", "kronecker", "--device", "cpu", "--precision", "tf32"], "got tf32 for float32 on cpu"),
        (["bench", "kronecker", "--device", "tpu"], "--device: expected cpu or cuda:N, got tpu"),
        (["compile"], "--arch: expected a value, got nothing"),
        (["compile", "--arch", "hopper"], "--arch: expected an architecture"),
        (["compile", "--arch", "sm_80", "--op", "frob"], "--op: expected one of"),
        (["compile", "--arch", "sm_80", "--match", "frob"], "--match: expected a part of a kernel's name, got frob"),
        (["cache", "frob"], "expected one of clear, got frob"),
        (["tune", "frob"], "expected one of kronecker, got frob"),
        (["show", "--frob"], "--frob: expected an option of fretwork show, got an unknown one"),
        (["show", LAYOUT, "--wdith", "3"], "--wdith: expected an option of fretwork show, got an unknown one"),
        (["bench", "block", "--frob", "1"], "--frob: expected an option of fretwork bench block, got an unknown one"),
        (["bench", "block", "1"], "expected nothing more, got '1'"),
        (["bench", "block", "--density", "nan"], "--density: expected 0 to 1, got nan"),
        (["show", LAYOUT, "--png", ""], "--png: expected a value, got ''"),
        (["show", LAYOUT, "--svg="], "--svg: expected a value, got ''"),
        (["bench", "kronecker", "--patterns", ""], "--patterns: expected a value, got ''"),
    ],
)
def test_bad_usage_is_one_line_and_2(arguments: list[str], says: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and done.stderr.startswith("fretwork: ")
    assert says in done.stderr


def test_failures_are_one_line_and_1(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "missing" / "file")
    for arguments in (
        ["show", LAYOUT, "--json", "--png", nowhere],
        ["show", LAYOUT, "--json", "--svg", nowhere],
        ["bench", "block", "--n", "64", "--block", "32", "--csv", nowhere],
        ["bench", "kronecker", "--patterns", "1,8,8,2", "--json", nowhere],
        ["bench", "kronecker", "--grid", str(tmp_path)],
        ["two_four", "inspect", os.devnull],
        ["bench", "kronecker", "--device", "cpu", "--patterns", "1,64,64,64", "--batch", "99999999999"],
    ):
        done = run(*arguments)
        assert done.returncode == 1, arguments
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("fretwork: "), done.stderr
    with open("/dev/full", "w") as full:
        done = subprocess.run([PROGRAM, "show", LAYOUT], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and "standard output" in done.stderr
    link = tmp_path / "full.png"
    link.symlink_to("/dev/full")
    done = run("show", LAYOUT, "--json", "--png", str(link))
    assert done.returncode == 1 and "cannot be written" in done.stderr and link.is_symlink()  # it is not ours to remove


def test_a_reader_that_leaves_is_no_failure() -> None:
    done = subprocess.run(
        ["bash", "-c", f"for n in $(seq 50); do '{PROGRAM}' show '{LAYOUT}'; done | head -n 1"],
        capture_output=True,
        text=True,
    )
    assert done.stderr == "" and done.stdout.count("\n") == 1


def test_info(own_cache: dict[str, str]) -> None:
    text = ok("info", env=own_cache)
    for part in ("fretwork", "CPU", "NVRTC", own_cache["FRETWORK_CACHE_DIR"]):
        assert part in text
    assert "CUDA" in text or "cuda:0" in text
    facts = json.loads(ok("info", "--json", env=own_cache))
    assert facts["cpu"]["threads"] >= 1 and facts["cpu"]["simd"]
    assert facts["cache"]["files"] == 0 and facts["cache"]["limit"] > 0
    assert f"FRETWORK_CACHE_DIR={own_cache['FRETWORK_CACHE_DIR']}" in facts["environment"]
    odd = {**own_cache, "FRETWORK_CACHE_DIR": own_cache["FRETWORK_CACHE_DIR"] + "\udcff"}  # a byte that is no UTF-8
    assert json.loads(ok("info", "--json", env=odd))["cache"]["folder"].endswith("cache\ufffd")


def test_show_facts() -> None:
    facts = json.loads(ok("show", BITS, "--json"))
    assert facts["shape"] == [4, 16, 48] and facts["block"] == [8, 16] and facts["text"] == BITS
    assert facts["nnz"] == sum(head["nnz"] for head in facts["heads"]) == 12
    assert facts["bytes_fp16"] == 2 * 12 * 8 * 16 and facts["density"] == 0.5
    assert [head["nnz"] for head in facts["heads"]] == [0, 1, 5, 6]
    assert facts["heads"][2] == {"nnz": 5, "shortest_row": 2, "longest_row": 3, "empty_rows": 0}
    assert facts["heads"][1]["empty_rows"] == 1
    text = ok("show", BITS)
    assert "(4, 16, 48)" in text and "12 of 24 blocks" in text and "50 %" in text and BITS in text
    assert ok("show", "-", input=BITS + "\n") == text


def test_show_draws_the_head_that_was_asked_for() -> None:
    def picture(head: str) -> list[str]:
        return [line.strip("│") for line in ok("show", BITS, "--head", head).splitlines() if line.startswith("│")]

    # A block of 8 x 16 is two squares side by side; two rows of squares share a line.
    assert picture("0") == ["      "]
    assert picture("1") == ["▀▀    "]
    assert picture("2") == ["▄▄████"]
    assert picture("3") == ["██████"]


def test_show_a_kronecker_factor() -> None:
    facts = json.loads(ok("show", "kronecker(2, 16, 16, 4)", "--json"))
    assert facts["shape"] == [128, 128] and facts["weight_shape"] == [2, 16, 16, 4]
    assert facts["nnz"] == 2048 and facts["density"] == 0.125 and facts["text"] == "kronecker(2,16,16,4)"
    assert facts["heads"] == [{"nnz": 2048, "shortest_row": 16, "longest_row": 16, "empty_rows": 0}]
    text = ok("show", "kronecker(2,16,16,4)")
    assert "2 on the diagonal, each 4 interleaved ones of 16 x 16" in text and "16 elements in each, 4 apart" in text
    small = [line.strip("│") for line in ok("show", "kronecker(2,1,2,2)").splitlines() if line.startswith("│")]
    assert small == ["▀▄▀▄    ", "    ▀▄▀▄"]
    # Squares of 128, not of 71: the 8 blocks of 512 are crisp.
    large = [
        line.strip("│") for line in ok("show", "kronecker(8,64,64,8)", "--width", "60").splitlines() if "│" in line
    ]
    assert large == [" " * 4 * (n // 2) + "▒▒▒▒" + " " * 4 * (7 - n // 2) for n in range(16)]


def test_show_a_large_kronecker_factor() -> None:
    text = "kronecker(128,128,128,4)"  # of the paper; a mask would take 4 GiB
    heads = json.loads(ok("show", text, "--json"))["heads"]
    assert heads == [{"nnz": 4 * 128**3, "shortest_row": 128, "longest_row": 128, "empty_rows": 0}]
    lines = [line.strip("│") for line in ok("show", text, "--width", "66").splitlines() if line.startswith("│")]
    assert lines == [(" " * (2 * n) + "░░").ljust(64) for n in range(32)]


def test_show_a_chain() -> None:
    factors = ("kronecker(64,64,64,1)", "kronecker(1,64,64,64)")
    facts = json.loads(ok("show", *factors, "--json"))
    assert facts["shape"] == [4096, 4096] and facts["weights"] == 2 * 64**3
    assert facts["plan"]["sm_90a"] == ["0+1: fused, clusters of 8, 16 rows"]
    assert facts["plan"]["cpu"] == ["0: cpu", "1: cpu"]
    text = ok("show", *factors)
    assert "chain of 2" in text and "sm_80    0: cublas; 1: strided" in text and "1.0 MiB stored, 32.0 MiB" in text


@pytest.mark.parametrize("text, nnz", [
    ("strided(1048576,1024)", 1609564672), ("causal(8) & document([3,5])", 21), ("axial(4,5).T", 160),
    ("neighborhood((1024,1024),13)", 1024**2 * 169), ("full((0,5))", 0)])  # fmt: skip
def test_show_a_regular_pattern(text: str, nnz: int) -> None:
    assert json.loads(ok("show", text, "--json"))["nnz"] == nnz
    lines = ok("show", text, "--width", "40").splitlines()
    assert any(line.startswith("parts ") for line in lines) == (nnz > 0) and any(f"{nnz:,}" in line for line in lines)


def test_the_gallery_is_up_to_date() -> None:
    script = [sys.executable, str(ROOT / "scripts/patterns_page.py"), str(PROGRAM), "--check"]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_show_scales_down_to_shades() -> None:
    text = ok("show", "random_blocks((1,500,500),16,0.2,0)", "--width", "42")
    rows = [line for line in text.splitlines() if line.startswith("│")]
    assert len(rows[0]) <= 42 and set("".join(rows)) <= set("│ ░▒▓█") and "░" in text
    assert "shades" in text


def test_colours_only_in_a_terminal_that_wants_them() -> None:
    coloured = in_terminal("show", LAYOUT)
    assert "\033[38;5;" in coloured
    plain = re.sub(r"\033\[[0-9;]*m", "", coloured)
    assert max(len(line) for line in plain.splitlines() if line[:1] in "┌│└") <= 60
    assert "\033" not in in_terminal("show", LAYOUT, NO_COLOR="1")
    assert "\033" not in ok("show", LAYOUT)


def test_progress_only_in_a_terminal() -> None:
    case = ("bench", "block", "--n", "64", "--block", "32", "--density", "0.5", "--rounds", "1")
    assert "0/1 dsd n=64" in in_terminal(*case)
    ok(*case)  # nothing on standard error
    kronecker = ("bench", "kronecker", "--patterns", "1,8,8,2;2,8,8,1", "--batch", "16", "--rounds", "1")
    shown = in_terminal(*kronecker)
    assert "0/2 copy and dense" in shown and "1/2 (2,8,8,1)" in shown


def read_png(file: Path) -> tuple[int, int, bytes]:
    """Width, height and RGB pixels of a PNG whose rows all use one of the five filters."""
    data = file.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, body = 8, b""
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, chunk = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, height, depth, colour = struct.unpack(">IIBB", chunk[:10])
            assert (depth, colour) == (8, 2)
        body += chunk if kind == b"IDAT" else b""
        at += 12 + length
    raw, rows, above = zlib.decompress(body), [], bytes(3 * width)
    for y in range(height):
        line = raw[y * (3 * width + 1) : (y + 1) * (3 * width + 1)]
        row = bytearray(line[1:])
        for x in range(3 * width):
            left, up, corner = (row[x - 3], above[x], above[x - 3]) if x >= 3 else (0, above[x], 0)
            guess = left + up - corner
            nearest = min((left, up, corner), key=lambda v: abs(guess - v))
            row[x] = (row[x] + (0, left, up, (left + up) // 2, nearest)[line[0]]) % 256
        above = bytes(row)
        rows.append(above)
    return width, height, b"".join(rows)


def test_png_shows_the_blocks(tmp_path: Path) -> None:
    file = tmp_path / "layout.png"
    assert ok("show", BITS, "--head", "2", "--png", str(file)).endswith(f"wrote {file}\n")
    width, height, pixels = read_png(file)
    assert width == 3 * height  # 16 x 48 elements
    colours = [
        [pixels[3 * (y * width + x) :][:3] for x in range(width // 6, width, width // 3)]
        for y in range(height // 4, height, height // 2)
    ]
    assert len({colours[0][1], colours[0][2], *colours[1]}) == 1  # the five blocks that are there
    assert colours[0][0] != colours[0][1]
    assert sum(colours[0][0]) > sum(colours[0][1])  # dark on light


def test_svg_shows_the_blocks(tmp_path: Path) -> None:
    file = tmp_path / "layout.svg"
    ok("show", BITS, "--head", "2", "--svg", str(file))
    tree = ET.parse(file).getroot()
    assert tree.attrib["viewBox"] == "0 0 6 2"
    (path,) = tree.findall("{http://www.w3.org/2000/svg}path")
    assert path.attrib["d"] == "M2 0h4v1h-4zM0 1h6v1h-6z"


def test_bench_measures_every_case(tmp_path: Path) -> None:
    rows, whole = tmp_path / "rows.csv", tmp_path / "whole.json"
    text = ok(
        *("bench", "block", "--n", "64,128", "--block", "16,32", "--density", "0.5", "--op", "dsd,dds,sdd,softmax"),
        *("--dtype", "bfloat16", "--threads", "2", "--rounds", "1", "--csv", str(rows), "--json", str(whole)),
    )
    assert "of dense:" in text and "bfloat16" in text
    with rows.open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 16
    assert {row["op"] for row in table} == {"dsd", "dds", "sdd", "softmax"}
    for row in table:
        entries = int(row["nnz"]) * int(row["block"]) ** 2
        work = 4 * entries if row["op"] == "softmax" else 2 * entries * int(row["n"])
        assert float(row["rate"]) == pytest.approx(work / float(row["ms"]) / 1e6, rel=1e-3)
        assert float(row["share"]) == pytest.approx(float(row["rate"]) / float(row["dense_rate"]), rel=1e-2)
        assert row["unit"] == ("GB/s" if row["op"] == "softmax" else "GFLOP/s")
    summary = json.loads(whole.read_text())
    assert summary["threads"] == 2 and summary["dtype"] == "bfloat16" and len(summary["rows"]) == 16


def test_bench_conv_measures_every_case(tmp_path: Path) -> None:
    rows, whole = tmp_path / "rows.csv", tmp_path / "whole.json"
    text = ok(
        *(
            "bench",
            "conv",
            "--layer",
            "16x8,32x16x7",
            "--block",
            "8,16",
            "--density",
            "0.5",
            "--stride",
            "2",
            "--batch",
        ),
        *("3", "--op", "forward,backward_x,backward_values", "--rounds", "1", "--csv", str(rows), "--json", str(whole)),
    )
    assert "of dense:" in text and "batch 3, kernel 3, stride 2, padding 1, dilation 1" in text
    with rows.open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 2 * 3 * 2 * 2 and {row["format"] for row in table} == {"nhwc", "nchw"}
    assert {(row["in"], row["out"], row["image"]) for row in table} == {("16", "16", "8"), ("32", "16", "7")}
    for row in table:
        work = 2 * int(row["nnz"]) * int(row["block"]) ** 2 * 3 * 4 * 4  # both images become 4 × 4
        assert float(row["gflops"]) == pytest.approx(work / float(row["ms"]) / 1e6, rel=1e-3)
    summary = json.loads(whole.read_text())
    assert summary["kernel"] == 3 and [row["ms"] for row in summary["rows"]] == pytest.approx(
        [float(row["ms"]) for row in table], rel=1e-4
    )


def test_bench_attention_measures_every_pattern(tmp_path: Path) -> None:
    rows, whole = tmp_path / "rows.csv", tmp_path / "whole.json"
    text = ok(*("bench", "attention", "--device", "cpu", "--seq", "256", "--heads", "4", "--kv-heads", "2", "--depth"),
              *("16", "--rounds", "1", "--threads", "1", "--csv", str(rows), "--json", str(whole)))  # fmt: skip
    assert "of full:" in text and "4 heads (2 of keys)" in text and "neighborhood((16,16),13)" in text
    with rows.open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 18 and {row["pass"] for row in table} == {"forward", "backward"}
    for row in table:
        flops = (4 if row["pass"] == "forward" else 10) * float(row["density"]) * 256**2 * 4 * 16
        assert float(row["gflops"]) == pytest.approx(flops / float(row["ms"]) / 1e6, rel=1e-3)
    assert [row["pattern"] for row in json.loads(whole.read_text())["rows"]] == [row["pattern"] for row in table]


def two_four_file(folder: Path, edit=None, cut: int = 0, **texts: str) -> str:
    """A file as fw.two_four.save writes it: a (1, 16) and, compressed along dim 0, b (4, 1); `edit` may change it."""
    data = struct.pack("<8e", 7, 3, 1, 5, 2, 4, 9, 9) + b"\x4d\x8e" + struct.pack("<2b", -3, 5) + b"\x4c"
    header = {
        "__metadata__": {"format": "fretwork.two_four", "version": "1", "a.dim": "1", "b.dim": "0", **texts},
        "a.values": {"dtype": "F16", "shape": [1, 8], "data_offsets": [0, 16]},
        "a.metadata": {"dtype": "I16", "shape": [1, 1], "data_offsets": [16, 18]},
        "b.values": {"dtype": "I8", "shape": [1, 2], "data_offsets": [18, 20]},
        "b.metadata": {"dtype": "I8", "shape": [1, 1], "data_offsets": [20, 21]},
    }
    if edit is not None:
        data = edit(header, data) or data
    text = json.dumps(header).encode()
    whole = struct.pack("<Q", len(text)) + text + data
    file = folder / "two.safetensors"
    file.write_bytes(whole[: len(whole) - cut])
    return str(file)


def test_two_four_inspect(tmp_path: Path) -> None:
    file = two_four_file(tmp_path)
    text = ok("two_four", "inspect", file)
    assert "version 1, 2 matrices" in text and "word 0   0x8e4d │ . 7 . 3 │ 1 5 . . │ . . 2 4 │ 9 . 9 . │" in text
    assert "column 0\n  word 0   0x4c │ -3 . . 5 │\n" in text and "nibbles   C keeps 0 3 100.0 %" in text
    facts = json.loads(ok("two_four", "inspect", file, "--json"))
    assert [(one["name"], one["shape"], one["dim"], one["dtype"]) for one in facts["matrices"]] == [
        ("a", [1, 16], 1, "float16"),
        ("b", [4, 1], 0, "int8"),
    ]
    assert facts["matrices"][0]["nibbles"] == {"4": 1, "8": 1, "D": 1, "E": 1} and facts["matrices"][0]["bytes"] == 18
    text = ok("two_four", "inspect", file, "--name", "b", "--rows", "0")
    assert "version 1\nmatrix    b\n" in text, "how many there are is not said of one"
    corners = {"a": [" ▀ ▀▀▀    ▀▀▀ ▀ "], "b": ["▀", "▄"]}
    for name, corner in corners.items():
        assert [line.strip("│") for line in ok("show", file, "--name", name).splitlines() if "│" in line] == corner


def spoil(*keys: str, value: object):
    """An edit that puts something else into the header."""

    def edit(header: dict, data: bytes) -> None:
        at = header
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "texts", "cut", "says"),
    [
        (None, {"format": "pt"}, 0, "expected a file of fretwork.two_four.save, got one without that mark"),
        (None, {"version": "2"}, 0, "expected version 1, got 2"),
        (None, {"a.dim": "2"}, 0, "expected 0 or 1 as a.dim, got 2"),
        (None, {"c.dim": "1"}, 0, "expected a tensor 'c.values', got none"),
        (None, {}, 1, "bytes, which b.metadata reaches, got "),
        (None, {}, 30, "expected a safetensors file, got "),
        (spoil("a.values", "dtype", value="U64"), {}, 0, "for a.values, got U64"),
        (spoil("a.values", "shape", value=[8]), {}, 0, "expected two sizes for a.values, got [8]"),
        (spoil("a.values", "shape", value=[1, 9]), {}, 0, "expected 18 bytes for a.values, got [0,16]"),
        (spoil("a.values", "data_offsets", value=[-16, 0]), {}, 0, "expected 16 bytes for a.values, got [-16,0]"),
        (spoil("a.metadata", "dtype", value="I8"), {}, 0, "expected 1 bytes for a.metadata, got [16,18]"),
        (
            spoil("a.metadata", value={"dtype": "I8", "shape": [1, 1], "data_offsets": [16, 17]}),
            {},
            0,
            "expected (1, 2)",
        ),
        (spoil("a.metadata", value=3), {}, 0, "expected dtype, shape and data_offsets of a.metadata, got 3"),
        (
            lambda _, data: data[:17] + b"\x85" + data[18:],
            {},
            0,
            "a.metadata: expected valid nibbles, got 5 for the group at (0, 8)",
        ),
    ],
)
def test_two_four_inspect_refuses_bad_files(edit, texts, cut, says, tmp_path: Path) -> None:
    done = run("two_four", "inspect", two_four_file(tmp_path, edit, cut, **texts))
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and says in done.stderr, done.stderr


def test_two_four_inspect_reads_what_was_saved(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    import torch

    import fretwork as fw

    file = str(tmp_path / "weights.safetensors")
    pruned = fw.two_four.prune(torch.randn(6, 44).bfloat16())
    fw.two_four.save(file, fw.two_four.compress(pruned, metadata_dtype=torch.int32))
    (matrix,) = json.loads(ok("two_four", "inspect", file, "--json"))["matrices"]
    assert matrix["shape"] == [6, 44] and matrix["word"] == "int32" and sum(matrix["nibbles"].values()) == 66
    rows = [line for line in ok("two_four", "inspect", file, "--rows", "6").splitlines() if line.startswith("  word")]
    numbers = [0.0 if n == "." else float(n) for row in rows for n in row.split("│", 1)[1].replace("│", " ").split()]
    assert numbers == pytest.approx(pruned.flatten().tolist(), rel=1e-3)
    whole = fw.two_four.compress(torch.tensor([[0, 200, 0, 7]], dtype=torch.uint8), metadata_dtype=torch.uint16)
    fw.two_four.save(file, whole)
    (matrix,) = json.loads(ok("two_four", "inspect", file, "--json"))["matrices"]
    assert (matrix["dtype"], matrix["word"], matrix["nibbles"]) == ("uint8", "uint16", {"D": 1})
    assert "│ . 200 . 7 │" in ok("two_four", "inspect", file) and "▀ ▀" in ok("show", file)


def test_show_draws_two_four(tmp_path: Path) -> None:
    svg, png = tmp_path / "two.svg", tmp_path / "two.png"
    text = ok("show", "two_four(64,128,3)", "--width", "42", "--svg", str(svg), "--png", str(png))
    rows = [line.strip("│") for line in text.splitlines() if line.startswith("│")]
    assert "the first 32 rows and 40 columns" in text and len(rows) == 16
    for row in rows:
        for g in range(0, 40, 4):
            group = row[g : g + 4]
            assert sum(c in "▀█" for c in group) == 2 and sum(c in "▄█" for c in group) == 2
    assert svg.stat().st_size > 0 and png.stat().st_size > 0
    assert f"wrote {png}\nwrote {svg}\n" in text
    assert json.loads(ok("show", "two_four(64,128,3)", "--json"))["nnz"] == 4096
    file = two_four_file(tmp_path)
    text = ok("show", file)
    assert "two_four, a" in text and "one of 2 matrices in the file: a, b (--name)" in text
    assert json.loads(ok("show", file, "--json", "--name", "b"))["name"] == "b"
    assert "(--name)" not in ok("show", file, "--name", "b")


def test_bench_two_four(tmp_path: Path) -> None:
    rows, whole = tmp_path / "rows.csv", tmp_path / "whole.json"
    text = ok(*("bench", "two_four", "--device", "cpu", "--m", "64", "--k", "32,40", "--columns", "1,100"),
              *("--rounds", "1", "--csv", str(rows), "--json", str(whole)))  # fmt: skip
    assert "speedup" in text
    with rows.open() as file:
        table = list(csv.DictReader(file))
    assert [(row["k"], row["n"], row["plan"]) for row in table] == [
        (k, n, "2:4") for k in ("32", "40") for n in ("1", "100")
    ]
    for row in table:
        assert float(row["speedup"]) == pytest.approx(float(row["dense_ms"]) / float(row["ms"]), rel=1e-2)
    assert len(json.loads(whole.read_text())["rows"]) == 4
    for dtype, name in [("int8", "int8"), ("fp8", "float8_e4m3fn"), ("float8_e5m2", "float8_e5m2")]:
        small = ("--m", "64", "--k", "32", "--columns", "3", "--rounds", "1", "--dtype", dtype)
        assert f"{name}, median" in ok("bench", "two_four", "--device", "cpu", *small)


@pytest.mark.parametrize(
    "suite",
    [
        ("attention", "--seq", "64", "--heads", "1", "--pattern", "causal(64)"),
        ("block", "--n", "64", "--block", "32", "--density", "0.5", "--op", "dsd,softmax"),
        ("kronecker", "--patterns", "1,4,4,2", "--batch", "8"),
        ("two_four", "--m", "64", "--k", "32", "--columns", "3"),
    ],
    ids=lambda suite: suite[0],
)
def test_bench_explain_on_a_cpu(suite: tuple[str, ...]) -> None:
    done = run("bench", *suite, "--device", "cpu", "--rounds", "1", "--explain")
    assert done.returncode == 0
    assert done.stderr == "bench: --explain: kernels are chosen on CUDA only, and this run is on the CPU\n"
    assert "median of 1 rounds" in done.stdout
    help_text = ok("bench", suite[0], "--help")
    assert "--explain" in help_text[: help_text.index("Examples:")]
    assert "--explain" in help_text[help_text.index("Examples:") :]


RECORDING = LIBRARIES.parent / "tests/recording/libcuda.so.1"  # tests/support/recording_driver.cpp


@pytest.mark.skipif(not RECORDING.exists(), reason="the recording driver is not built")
@pytest.mark.parametrize(
    ("suite", "problems"),
    [
        (("attention", "--seq", "256", "--pattern", "causal(256)"), ["attention, ", "attention_backward, "]),
        (
            ("block", "--n", "256", "--block", "32", "--density", "0.5,0.1", "--op", "dsd,softmax,sdd"),
            ["dsd, ", "dsd, ", "sdd, ", "sdd, "],
        ),
        (("kronecker", "--patterns", "1,4,4,2;2,8,8,1", "--batch", "8", "--algos", "kernel,dense"), ["ksmm, "] * 2),
        (("two_four", "--m", "512", "--k", "512", "--columns", "1,128"), ["two_four.matmul, "] * 2),
    ],
    ids=lambda value: value[0],
)
def test_bench_explains_every_row(suite: tuple[str, ...], problems: list[str], own_cache: dict[str, str]) -> None:
    """Rows only, not what they are set against; one kernel is taken in each."""
    driver = {"LD_LIBRARY_PATH": str(RECORDING.parent), "FRETWORK_NVRTC": str(RECORDING)}
    arguments = ("bench", *suite, "--device", "cuda:0", "--rounds", "1")
    assert run(*arguments, env=own_cache | driver).stderr == ""
    done = run(*arguments, "--explain", env=own_cache | driver)
    assert done.returncode == 0, done.stderr
    explained = done.stderr.split("fretwork: ")[1:]
    assert [text.startswith(problem) for text, problem in zip(explained, problems, strict=True)] == [True] * len(
        problems
    )
    assert all(text.count(", taken\n") == 1 and text.count("  took ") == 1 for text in explained), done.stderr


def test_bench_of_an_empty_layout() -> None:
    assert "0.0 GFLOP/s" in ok("bench", "block", "--n", "64", "--block", "32", "--density", "0", "--rounds", "1")


def test_bench_block_beside_the_best_dense_product(tmp_path: Path) -> None:
    rows, whole = tmp_path / "rows.csv", tmp_path / "whole.json"
    text = ok(*("bench", "block", "--device", "cpu", "--threads", "1", "--rounds", "1", "--n", "96", "--rows", "5,96"),
              *("--block", "32", "--density", "0.5", "--op", "dsd,dds,sdd,softmax", "--csv", str(rows), "--json"),
              str(whole))  # fmt: skip
    assert "dense: the fastest dense product that this program has here" in text
    table = list(csv.DictReader(rows.read_text().splitlines()))
    assert [(row["op"], row["rows"]) for row in table] == [
        *((op, count) for op in ("dsd", "dds", "sdd") for count in ("5", "96")),
        ("softmax", "96"),
    ]
    for row, told in zip(table, json.loads(whole.read_text())["rows"], strict=True):
        ms, entries, dense = float(row["ms"]), int(row["nnz"]) * 32 * 32, float(row["dense_ms"])
        assert float(row["speedup"]) == pytest.approx(dense / ms, rel=1e-2) and float(row["floor_ms"]) > 0
        assert float(row["share"]) == pytest.approx(dense / ms * entries / 96**2, rel=1e-2)
        work = 8 * entries if row["op"] == "softmax" else 2 * entries * int(row["rows"])
        assert float(row["rate"]) == pytest.approx(work / ms / 1e6, rel=1e-2)
        whole_work = 8 * 96**2 if row["op"] == "softmax" else 2 * 96**2 * int(row["rows"])
        assert float(row["dense_rate"]) == pytest.approx(whole_work / dense / 1e6, rel=1e-2)
        assert row["dense_by"] == told["dense_by"] and told["floor_ms"] == pytest.approx(
            float(row["floor_ms"]), rel=1e-3
        )


def test_bench_chains(tmp_path: Path) -> None:
    rows, whole = tmp_path / "rows.csv", tmp_path / "whole.json"
    text = small_bench(*("--chain", "6,4,5,1; 1,8,6,4", "--chain", "kronecker(2,3,5,7)", "--dtype", "bf16"),
                       *("--csv", str(rows), "--json", str(whole)))  # fmt: skip
    assert "(6,4,5,1) (1,8,6,4)" in text and "batch 48" in text
    first, second = csv.DictReader(rows.read_text().splitlines())
    sizes = ("chain", "rows", "in", "out", "parameters")
    assert [first[name] for name in sizes] == ["(6,4,5,1) (1,8,6,4)", "48", "30", "32", "312"]
    assert [second[name] for name in sizes] == ["(2,3,5,7)", "48", "70", "42", "210"]
    rates = json.loads(whole.read_text())
    for row, told in zip((first, second), rates["rows"], strict=True):
        moved = 2 * (48 * (told["in"] + told["out"]) + told["parameters"])
        flops = 2 * 48 * told["parameters"]
        floor = max(moved / rates["copy_gb_per_s"], flops / rates["dense_gflop_per_s"]) / 1e6
        assert float(row["floor_ms"]) == pytest.approx(floor, rel=1e-3)
        assert float(row["over_floor"]) == pytest.approx(told["ms"] / floor, rel=1e-3)
        assert float(row["speedup"]) == pytest.approx(told["dense_ms"] / told["ms"], rel=1e-2)


def test_every_suite_has_the_same_device_and_pages() -> None:
    calls = [("bench", suite) for suite in ("attention", "block", "conv", "kronecker", "two_four")]
    for call in [*calls, ("tune", "kronecker"), ("advise",)]:
        text = " ".join(ok(*call, "--help").split())
        assert "cpu or cuda:N (the first GPU, else the CPU)" in text and "--html" in text, call


def small_bench(*arguments: str) -> str:
    return ok("bench", "kronecker", "--device", "cpu", "--threads", "2", "--rounds", "2", "--batch", "48", *arguments)


def test_bench_kronecker_measures_every_pattern(tmp_path: Path) -> None:
    rows, whole = tmp_path / "rows.csv", tmp_path / "whole.json"
    text = small_bench(*("--patterns", "2,8,16,4; 3,8,8,1", "--backward", "--bs-last", "--dtype", "bf16"),
                       *("--csv", str(rows), "--json", str(whole)))  # fmt: skip
    assert "bfloat16, batch 48 (last)" in text and "backward / forward: geometric mean" in text
    assert re.search(r"^\(2,8,16,4\) +\d", text, re.MULTILINE) and "d > 1" in text and "d = 1" in text
    with rows.open() as file:
        reader = csv.DictReader(file)
        table = list(reader)
        assert list(reader.fieldnames or [])[:5] == ["batch_size", "a", "b", "c", "d"]
    assert [[int(row[name]) for name in ("batch_size", "a", "b", "c", "d")] for row in table] == [
        [48, 2, 8, 16, 4],
        [48, 3, 8, 8, 1],
    ]
    rates = json.loads(whole.read_text())
    for row in table:
        a, b, c, d = (int(row[name]) for name in "abcd")
        ms, moved, flops = float(row["median"]), 2 * (48 * a * d * (b + c) + a * b * c * d), 2 * 48 * a * b * c * d
        assert float(row["gb_per_s"]) == pytest.approx(moved / ms / 1e6, rel=1e-3)
        assert float(row["gflop_per_s"]) == pytest.approx(flops / ms / 1e6, rel=1e-3)
        floor = max(moved / rates["copy_gb_per_s"], flops / rates["dense_gflop_per_s"]) / 1e6
        assert float(row["floor_ms"]) == pytest.approx(floor, rel=1e-3)
        assert float(row["over_floor"]) == pytest.approx(ms / floor, rel=1e-3)
        assert float(row["std"]) >= 0 and float(row["backward_ms"]) > 0
        times = [float(time) for time in row["times"].split()]
        assert len(times) == 2 and ms == pytest.approx(max(times), rel=1e-3)  # of two rounds the upper is the median
        assert float(row["mean"]) == pytest.approx(sum(times) / 2, rel=1e-3)
        assert float(row["iqr"]) == pytest.approx(abs(times[1] - times[0]) / 2, rel=0.02, abs=1e-6)
        assert (row["layout"], row["dtype"], row["device"], row["threads"]) == ("last", "bfloat16", "cpu", "2")
    assert [row["pattern"] for row in rates["rows"]] == [[2, 8, 16, 4], [3, 8, 8, 1]]
    assert rates["batch"] == 48 and rates["threads"] == 2 and rates["rows"][0]["backward_ms"] > 0


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16", "bfloat16"])
def test_bench_kronecker_of_every_type(dtype: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    small_bench("--patterns", "1,8,8,3", "--dtype", dtype, "--csv", str(file))
    (row,) = csv.DictReader(file.read_text().splitlines())
    assert row["dtype"] == dtype.replace("fp", "float") and row["layout"] == "first" and row["backward_ms"] == ""
    assert row["precision"] == ("ieee" if dtype == "fp32" else "")


def test_bench_kronecker_beside_dense(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    # The dense layer of the second has 2^32 entries.
    text = small_bench("--patterns", "1,8,8,3;256,1,1,256", "--algos", "kernel,dense", "--csv", str(file))
    assert "too large" in text
    small, large = csv.DictReader(file.read_text().splitlines())
    assert float(small["dense_ms"]) > 0 and large["dense_ms"] == ""
    text = small_bench("--patterns", "1,8,8,3", "--algos", "dense", "--csv", str(file))
    (alone,) = csv.DictReader(file.read_text().splitlines())
    assert float(alone["dense_ms"]) > 0 and float(alone["floor_ms"]) > 0
    assert alone["median"] == alone["over_floor"] == alone["mean"] == alone["iqr"] == alone["times"] == ""
    assert alone["threads"] == small["threads"] and "geometric mean" not in text


def listed(*arguments: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, line.split(","))) for line in ok("bench", "kronecker", "--list", *arguments).splitlines()]


def test_bench_kronecker_reads_files(tmp_path: Path) -> None:
    file = tmp_path / "patterns"
    file.write_text("# two of them\n1, 64,64, 64\n\n  6 64\t64 1 # contiguous\r\n1,64,64,64\n")
    assert listed("--grid", str(file)) == [(1, 64, 64, 64), (6, 64, 64, 1)]
    file.write_text("batch_size a b c d TILEX ms\n25088 4 48 192 16 32 0.5\n")
    assert listed("--grid", str(file)) == [(4, 48, 192, 16)]
    file.write_text("kronecker(1,64,64,64)\n kronecker( 6, 64,64 ,1 )  # contiguous\n")
    assert listed("--grid", str(file)) == [(1, 64, 64, 64), (6, 64, 64, 1)]
    assert listed("--patterns", "kronecker(1,64,64,64);6,64,64,1") == [(1, 64, 64, 64), (6, 64, 64, 1)]
    file.write_text("note,d,c,b,a\n,4,3,2,1\n")
    assert listed("--grid", str(file)) == [(1, 2, 3, 4)]
    small_bench("--patterns", "2,3,4,5", "--csv", str(file))
    assert listed("--grid", str(file)) == [(2, 3, 4, 5)]
    file.write_text("1,64,64,64\n1,64,64\n")
    done = run("bench", "kronecker", "--grid", str(file))
    assert done.returncode == 2 and f"{file}:2: expected a,b,c,d" in done.stderr


def test_bench_kronecker_has_the_grids_of_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    import compare_kronecker as script

    assert listed() == listed("--grid", "facts") == script.FACTS
    assert listed("--grid", "sample") == script.sample()
    assert listed("--grid", "paper") == script.paper()


def test_compile_fills_the_cache(own_cache: dict[str, str]) -> None:
    own_cache = {**nvrtc_environment(), **own_cache}
    if not json.loads(ok("info", "--json", env=own_cache))["nvrtc"]["available"]:
        pytest.skip("NVRTC is not installed: pip install nvidia-cuda-nvrtc")
    command = ("compile", "--arch", "sm_80", "--op", "block_softmax", "--match", "rpe_backward<bf16")
    first = json.loads(ok(*command, "--json", env=own_cache))
    assert first["arch"] == "sm_80" and first["kernels"]
    assert all(k["registers"] > 0 and not k["from_cache"] and k["error"] is None for k in first["kernels"])
    assert {k["op"] for k in first["kernels"]} == {"block_softmax"}
    assert {k["dynamic_shared_bytes"] for k in first["kernels"]} == {0}
    assert all(k["from_cache"] for k in json.loads(ok(*command, "--json", env=own_cache))["kernels"])
    count = len(first["kernels"])
    assert f"{count} kernels for sm_80: 0 compiled, {count} from the cache" in ok(*command, env=own_cache)
    assert re.search(rf"kernels +{count}\n", ok("cache", env=own_cache))
    assert ok("cache", "clear", env=own_cache).startswith(f"removed {count} kernel")
    assert re.search(r"kernels +0\n", ok("cache", env=own_cache))


def test_compile_for_turing(own_cache: dict[str, str]) -> None:
    """Small batches and products in lines, in both 16-bit types; what older GPUs and other kernels are told."""
    own_cache = {**nvrtc_environment(), **own_cache}
    done = run("compile", "--arch", "sm_70", env=own_cache)
    assert done.returncode == 2
    assert "--arch: expected an architecture from sm_75 on (NVRTC 13 compiles for no older one)" in done.stderr
    if not json.loads(ok("info", "--json", env=own_cache))["nvrtc"]["available"]:
        pytest.skip("NVRTC is not installed: pip install nvidia-cuda-nvrtc")
    command = ("compile", "--arch", "sm_75", "--op", "kronecker", "--json", "--match")
    for match, count in (("few::product<bf16, kronecker::few::kAlongL", 3), ("1, 64, 2, true, true", 2)):
        kernels = json.loads(ok(*command, match, env=own_cache))["kernels"]
        assert len(kernels) == count and all(k["error"] is None and k["registers"] > 0 for k in kernels), kernels
    assert run(*command, "strided::", env=own_cache).returncode == 2  # for sm_80 and later


def test_compile_tells_static_and_dynamic_shared_memory(own_cache: dict[str, str]) -> None:
    own_cache = {**nvrtc_environment(), **own_cache}
    if not json.loads(ok("info", "--json", env=own_cache))["nvrtc"]["available"]:
        pytest.skip("NVRTC is not installed: pip install nvidia-cuda-nvrtc")
    command = ("compile", "--arch", "sm_80", "--op", "block_matmul", "--match", "spmm<f16, 1, 128, 128, 4, 1, 1, 1>")
    (kernel,) = json.loads(ok(*command, "--json", env=own_cache))["kernels"]
    assert 0 < kernel["static_shared_bytes"] < 48 << 10 < kernel["dynamic_shared_bytes"] <= 163 << 10
    assert re.search(
        rf"regs +spills +static +dynamic.*\n.* {kernel['static_shared_bytes']} +{kernel['dynamic_shared_bytes']} ",
        ok(*command, env=own_cache),
    )


def test_compile_without_nvrtc_says_where_to_get_it(own_cache: dict[str, str]) -> None:
    done = run("compile", "--arch", "sm_80", env={**own_cache, "FRETWORK_NVRTC": "/nowhere"})
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "pip install" in done.stderr
    told = ok("info", env={**own_cache, "FRETWORK_NVRTC": "/nowhere"})
    assert "; pip install fretwork[cuda] brings it, or FRETWORK_NVRTC names it\n" in told


def cmake(*arguments: object) -> None:
    done = subprocess.run(["cmake", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def build_example(prefix: Path, build: Path) -> None:
    """The programs of examples/cpp on the package at `prefix` work; without a GPU one of them says so."""
    cmake("-S", ROOT / "examples/cpp", "-B", build, f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_BUILD_TYPE=Release")
    cmake("--build", build)
    bare = {"PATH": os.environ["PATH"]}
    product = subprocess.run([build / "product"], capture_output=True, text=True, env=bare)
    assert product.returncode == 0 and "largest error" in product.stdout, product.stdout + product.stderr
    gpus = not re.search(r"^CUDA +not available", ok("info"), re.MULTILINE)
    says = "largest error of attention" if gpus else "There is no GPU here"
    cuda = subprocess.run([build / "cuda"], capture_output=True, text=True)
    assert cuda.returncode == 0 and says in cuda.stdout, cuda.stdout + cuda.stderr
    dynamic = subprocess.run([build / "dynamic"], capture_output=True, text=True)
    says = f"on {'a GPU' if gpus else 'the CPU'}, largest error of a mask"
    assert dynamic.returncode == 0 and says in dynamic.stdout, dynamic.stdout + dynamic.stderr


def test_the_demo_builds_all_that_is_installed() -> None:
    rules = (ROOT / "cmake/install.cmake").read_text()
    installed = set(re.findall(r"install\(TARGETS (\w+) ", rules))  # ${BINDING} is one of the loop's
    (bindings,) = re.findall(r"foreach\(BINDING ([\w ]+)\)", rules)
    demo = (ROOT / "Makefile").read_text().split("\ndemo:")[1].split("\n\n")[0]
    (built,) = re.findall(r"--target ([\w ]+)", demo)
    assert installed | set(bindings.split()) <= {"fretwork", *built.split()}  # the others link the library


@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
def test_an_installed_copy_works(tmp_path: Path) -> None:
    prefix, moved = tmp_path / "prefix", tmp_path / "elsewhere"
    cmake("--install", LIBRARIES.parent, "--prefix", prefix)
    prefix.rename(moved)  # nothing may remember where it was installed first
    bare = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    version = subprocess.run([moved / "bin/fretwork", "--version"], capture_output=True, text=True, env=bare)
    assert version.stdout == ok("--version")
    build_example(moved, tmp_path / "build")


@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
def test_the_build_folder_is_a_package(tmp_path: Path) -> None:
    build_example(LIBRARIES.parent, tmp_path / "build")
