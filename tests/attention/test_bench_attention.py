"""The comparison of attention: its rules say what its patterns say, and its rows are whole."""

import json
import sys

import compare_attention as compare
import patterns_page
import pytest
import torch

import attention_cases as cases
import fretwork as fw
import report

SMALL = cases.Sizes(w=24, stride=16, window=5, tile=2)


@pytest.mark.parametrize("name", cases.cases(512, torch.device("cpu"), SMALL))
def test_rules_are_the_patterns(name):
    make, rule = cases.cases(512, torch.device("cpu"), SMALL)[name]
    at = torch.arange(512)
    want = make().mask()
    got = rule(at[:, None], at[None]).expand(512, 512)
    assert torch.equal(got, want.bool())
    assert want.sum() > 0 and (name == "full") == bool(want.all())


def test_every_named_pattern_is_measured():
    made = set()
    for device_sizes in (cases.GPU, SMALL):
        for make, _ in cases.cases(1 << 12, torch.device("cpu"), device_sizes).values():
            made.add(make().text.split("(")[0])
    assert made == set(fw.patterns.__all__) - {"from_block_mask"}  # whose patterns are runs, as a mask's are


def test_a_run_has_every_row_and_is_reported(tmp_path, monkeypatch, capsys):
    arguments = ["--device", "cpu", "--seqs", "256", "--heads", "2", "--depths", "8", "--seconds", "0.01"]
    arguments += ["--patterns", "full,strided,neighborhood", "--parts", "patterns,decode,host", "--peers", "sdpa"]
    monkeypatch.setattr(sys, "argv", ["compare", *arguments, "--out", str(tmp_path)])
    monkeypatch.setattr(compare, "copy_rate", lambda device: 1e6)
    monkeypatch.setattr(compare, "dense_rate", lambda dtype, device: 1e6)
    compare.main()
    path = tmp_path / "cpu" / "attention.json"
    rows = json.loads(path.read_text())
    assert [r["part"] for r in rows] == ["pattern"] * 6 + ["decode"] * 2
    assert all(set(r["ms"]) == {"ours", "sdpa"} and r["floor_ms"] > 0 for r in rows)
    assert all(r["error"] < 1e-4 for r in rows if "error" in r)
    assert all(r["left_out"] == {"flex": "not asked for"} and r["flex"] == "plain" for r in rows)
    before = [{k: v for k, v in r.items() if k != "flex"} for r in rows[:6]]  # when its mode was not recorded
    path.write_text(json.dumps([*before, *rows[6:]]))
    compare.store(path, rows[:6], compare.IDENTITY, compare.UNSAID)  # the same cases again replace themselves
    assert len(json.loads(path.read_text())) == 8 and all("flex" in r for r in json.loads(path.read_text()))
    tuned = [{**r, "flex": "tuned"} for r in rows[:2]]  # another case
    compare.store(path, tuned, compare.IDENTITY, compare.UNSAID)
    assert len(json.loads(path.read_text())) == 10
    assert "Flex tuned" in "\n".join(report.attention_section([*rows, *tuned]))
    said = capsys.readouterr()
    assert "8 rows in" in said.err and "| neighborhood |" in said.out
    rows += compare.measure_host(torch.device("cpu"), torch.float32)

    plan = {"part": "plan", "pattern": "window", "make_ms": 1, "plan_ms": 2, "transposed_ms": 3, "bytes": 4e6}
    first = {"part": "first", "pattern": "full(9)", "cache": "cold", "ms": {"ours": 5.0}, "backward_ms": None}
    text = "\n".join(report.attention_section([*rows, plan, first]))
    assert text.count("| strided |") == 1 and "| window | 1.00 | 2.00 | 3.00 | 4.00 |" in text
    assert "| full(9) | cold | 5.0 | – |" in text and "Host time of a call" in text
    assert "sinks((16,8192),4,1024)" in text


def test_peers_that_do_not_run_have_a_reason(monkeypatch):
    make, rule = cases.cases(64, torch.device("cpu"), SMALL)["strided"]
    left_out = compare.not_run(["flex", "cudnn", "sdpa"], ("flex", "cudnn", "fa2"), False)
    assert left_out == {"fa2": "not asked for"}
    assert set(compare.not_run(["flex"], ("flex", "fa2"), True).values()) == {"out of time", "not asked for"}
    monkeypatch.setattr(compare, "create_block_mask", lambda *a, **k: (_ for _ in ()).throw(ValueError("no mask")))
    calls = compare.attentions("strided", make(), rule, torch.device("cpu"), ["flex", "cudnn", "sdpa"], False, left_out)
    assert set(calls) == {"ours", "sdpa"}
    assert left_out == {"fa2": "not asked for", "flex": "no mask", "cudnn": "needs a GPU"}


def test_first_calls(monkeypatch, capsys):
    """What a process of its own runs: the op's gradient is timed without autograd around it."""
    monkeypatch.setattr(sys, "argv", ["-c", "sliding_window(2048,15,0)", "cpu"])
    exec(compare.FIRST_CALL, {})
    forward, backward = map(float, capsys.readouterr().out.split())
    assert forward > 0 and backward > 0


def test_a_glance_at_attention():
    row = {"part": "pattern", "pattern": "strided", "arch": "auto", "dtype": "bfloat16", "seq": 16384, "depth": 128,
           "pass": "forward", "ms": {"ours": 0.25, "flex": 4.0, "other": 5.0}}  # fmt: skip
    lines = report.attention_glance({"H200": [row, {**row, "depth": 64, "ms": {"ours": 9.0}}], "CPU": [row]})
    assert "| H200 forward | – | – | – | – | – | 0.25 (16.0×) | – |" in lines
    assert "| CPU forward |" + " – |" * 7 in lines


def test_plans_of_the_program():
    if compare.program() is None:
        pytest.skip("no program beside the libraries")
    rows = compare.measure_plans(rounds=1)
    assert len(rows) >= 5 and all(r["part"] == "plan" and r["plan_ms"] > 0 and r["bytes"] > 0 for r in rows)


def test_the_gallery_says_what_was_measured(tmp_path, monkeypatch):
    row = {"part": "pattern", "call": "strided", "text": "strided(16384,128)", "pattern": "strided", "arch": "auto",
           "dtype": "bfloat16", "seq": 16384, "depth": 128, "heads": 16, "density": 0.01, "pass": "forward",
           "ms": {"ours": 0.2, "flex": 3.8}}  # fmt: skip
    backward, later = {**row, "pass": "backward", "ms": {"ours": 0.7}}, {**row, "ms": {"ours": 9.0}}
    file = tmp_path / "attention.json"
    file.write_text(json.dumps([row, backward, later, {**row, "depth": 64, "call": "full"}]))
    monkeypatch.setattr(patterns_page, "RESULTS", file)
    entry = {entry.name: entry for entry in patterns_page.ENTRIES}
    said = patterns_page.speed(entry["strided"], patterns_page.measured())
    assert "`strided(16384, 128)` has 1.17 % of all pairs." in said
    assert "strided(16384,128) of 1 %, 16 heads, S = 16,384, D = 128, bfloat16: forward 0.2 ms (flex 3.8), back" in said
    assert said.count("ms") == 2 and "H200" not in patterns_page.speed(entry["full"], patterns_page.measured())
    assert patterns_page.speed(entry["from_mask"], patterns_page.measured()) == ""


def test_the_gallery_shows_the_calls_that_are_measured(monkeypatch):
    first = {}
    for name, (make, _) in cases.cases(16384, torch.device("cpu"), cases.GPU).items():
        if name != "mask":  # which takes a second
            pattern = make()
            first.setdefault(pattern.text.split("(")[0], pattern)
    calls = [entry for entry in patterns_page.ENTRIES if not entry.example.startswith(" ")]
    assert len(calls) == 24
    for entry in calls:
        assert patterns_page.made(entry.example) == first[entry.name], entry.name
