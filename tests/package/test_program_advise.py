"""`fretwork advise`: which layers it measures, what they hold, and that a wrong result is no advice."""

from __future__ import annotations

import inspect
import json
import math

import pytest
import torch
from program import PROGRAM, in_terminal, ok, run

import fretwork as fw
from fretwork import recipes

pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason=f"the program is not built: {PROGRAM}")

CPU = ("--device", "cpu", "--threads", "1", "--rounds", "1")
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def advice(sizes: str, *arguments: str) -> dict:
    return json.loads(ok("advise", sizes, *CPU, "--json", *arguments))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("training", [False, True])
def test_rows_are_those_of_python(dtype, training):
    """The same layers with the same parameters and memory; `recipe` is Python's text of one."""
    told = advice("96x160", "--rows", "5", "--dtype", dtype, *["--training"][:training])
    python = {repr(r.recipe) if r.recipe else None: r for r in fw.advise(96, 160, 5, DTYPES[dtype], "cpu").rows}
    rows = {row["recipe"]: row for row in told["rows"]}
    assert rows.keys() == python.keys() and len(rows) == len(told["rows"]) > 5
    for recipe, row in rows.items():
        same = python[recipe]
        assert (row["kind"], row["parameters"], row["memory"]) == (same.kind, same.parameters, same.memory), recipe
        assert recipe is None or eval(recipe, vars(recipes)) == same.recipe
    times = [row["ms"] for row in told["rows"]]
    assert times == sorted(times) and all(ms > 0 for ms in times)
    for row in told["rows"]:
        assert math.isclose(row["dense_ms"], rows[None]["ms"]) and math.isclose(
            row["speedup"], row["dense_ms"] / row["ms"]
        )
    assert told["dense"] in ("ksmm with one factor", "a block product with every block", "cuBLASLt")
    assert (told["in_features"], told["out_features"], told["batch_rows"]) == (96, 160, 5)
    assert ("forward and backward" in told["verdict"]) == training


@pytest.mark.parametrize(
    ("sizes", "kinds"),
    [
        ("7x5", {"dense"}),
        ("1x1", {"dense"}),
        ("12x20", {"dense", "two_four"}),
        ("24x40", {"dense", "two_four", "monarch"}),
        ("96x33", {"dense", "two_four"}),
        ("33x96", {"dense"}),
        ("64x32", {"dense", "two_four", "block", "monarch"}),
    ],
)
@pytest.mark.parametrize("dtype", ["fp64", "fp16"])
def test_only_what_fits(sizes, kinds, dtype):
    told = advice(sizes, "--rows", "3", "--dtype", dtype, "--training")
    assert {row["kind"] for row in told["rows"]} == kinds
    assert ("nothing else fits" in told["verdict"]) == (kinds == {"dense"})


def test_long_sums_of_half_precision():
    told = advice("131072x16", "--rows", "2", "--dtype", "fp16", "--training")
    assert {row["kind"] for row in told["rows"]} == {"dense", "two_four", "monarch"}


def test_defaults_are_those_of_python():
    told = advice("64x64")
    defaults = {name: p.default for name, p in inspect.signature(fw.advise).parameters.items()}
    assert told["batch_rows"] == defaults["rows"] and DTYPES["bf16"] == defaults["dtype"]
    assert (told["dtype"], told["training"]) == ("bfloat16", defaults["training"])


@pytest.mark.parametrize("sizes", ["32x32", "128x128", "320x32", "1280x256"])
def test_densities_are_those_of_python(sizes):
    python = fw.advise(*map(int, sizes.split("x")), 1, device="cpu", kinds=["block"])
    told = advice(sizes, "--rows", "1", "--kinds", "block")
    assert {row["recipe"] for row in told["rows"]} == {r.recipe and repr(r.recipe) for r in python.rows}


def test_some_kinds():
    assert {row["kind"] for row in advice("64x64", "--kinds", "monarch,two_four")["rows"]} == {
        "dense",
        "monarch",
        "two_four",
    }


def test_the_table_and_the_verdict():
    text = ok("advise", "64x128", "--rows", "1", "--dtype", "bf16", *CPU)
    head, dense, titles, *rows, verdict = text.splitlines()
    assert "bfloat16, 1 row of 64 → 128, forward" in head
    assert dense.startswith("dense: the fastest dense product that this program has here, ")
    assert titles.split() == ["kind", "recipe", "ms", "speedup", "parameters", "memory"]
    assert len(rows) == len(advice("64x128", "--dtype", "bf16")["rows"])
    assert verdict.startswith("For 1 row of 64 → 128 in bfloat16 on ") and verdict.endswith(".")
    assert all(kind in verdict for kind in ("2:4 is ", "blocks of ", "monarch of "))
    assert "64x128" not in in_terminal("advise", "64x128", *CPU).splitlines()[-1]  # the bar is gone


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "INxOUT: expected a value, got nothing"),
        (["64"], "advise: INxOUT: expected two sizes from 1 to 1048576, such as 4096x14336, got 64"),
        (["64x64x64"], "got 64x64x64"),
        (["64X64"], "got 64X64"),
        (["0x64"], "got 0x64"),
        (["64x-4"], "got 64x-4"),
        (["64x 4"], "got 64x 4"),
        (["64x99999999999999999999"], "got 64x99999999999999999999"),
        (["64x64", "--rows", "0"], "--rows: expected 1 to 16777216, got '0'"),
        (["64x64", "--kinds", "fast"], "advise: --kinds: expected some of two_four, block, monarch, got fast"),
        (["64x64", "--dtype", "int8"], "advise: --dtype: expected float64, float32, float16 or bfloat16"),
        (["64x64", "--device", "tpu"], "advise: --device: expected cpu or cuda:N, got tpu"),
    ],
)
def test_bad_usage(arguments, says):
    done = run("advise", *arguments)
    assert done.returncode == 2 and done.stdout == "" and says in done.stderr and done.stderr.count("\n") == 1


def test_layers_that_memory_cannot_hold():
    done = run("advise", "1048576x1048576", "--device", "cpu")
    assert done.returncode == 1 and "advise: INxOUT: expected layers that fit into the " in done.stderr


def test_help():
    text = ok("advise", "--help")
    for option in ("--rows", "--dtype", "--training", "--json", "--html", "--kinds", "--device", "Example"):
        assert option in text
