"""The examples in the docstrings run as written, everything public has one, and short programs do what they say."""

import doctest
import importlib
import importlib.util
import inspect
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "fretwork"
WITH_EXAMPLES = [file for file in sorted(PACKAGE.rglob("*.py")) if ">>>" in file.read_text()]
NAMES = [".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in WITH_EXAMPLES]
MODULES = [name.removesuffix(".__init__") for name in NAMES if ".jax." not in name]  # test_jax.py has those


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0 and result.attempted > 0


def test_everything_public_has_an_example():
    import fretwork as fw

    public = [getattr(fw, name) for name in fw.__all__ if not inspect.ismodule(getattr(fw, name))]
    public += [getattr(room, name) for room in (fw.nn, fw.kronecker, fw.patterns, fw.two_four) for name in room.__all__]
    without = [thing.__name__ for thing in public if ">>>" not in (thing.__doc__ or "")]
    assert not without


@pytest.fixture
def printed(capsys, monkeypatch):
    """What an example prints, line by line, run with the given arguments."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.syspath_prepend(EXAMPLES)  # where those that train find their shared module
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


def test_monarch_project(printed):
    rows = [line.split() for line in printed("monarch_project.py")[2:]]
    errors = {(row[0], " ".join(row[1:-3])): float(row[-1]) for row in rows}
    assert len(errors) == 12 and all(0.5 < e < 1 for (name, _), e in errors.items() if name == "random")
    assert all(e < 1e-12 for (name, _), e in errors.items() if name == "hadamard")


def test_quickstart_kronecker(printed):
    dense, sparse = (
        line.split() for line in printed("quickstart_kronecker.py", "--batch", "16", "--device", "cpu")[-2:]
    )
    assert dense[:2] == ["nn.Linear", "591,360"] and sparse[:2] == ["KSLinear", "321,024"]
    for row in (dense, sparse):
        assert all(float(ms) > 0 for ms in row[2:4]) and all(float(error) < 1e-5 for error in row[4:])


def test_jax_sparse_mhsa(printed):
    pytest.importorskip("jax")
    with pytest.importorskip("jax").default_matmul_precision("highest"):  # a GPU would round to tf32
        lines = printed("jax_sparse_mhsa.py", "--seq", "128", "--steps", "6")
    assert lines[0].startswith("sinks(128,4,64)") and float(lines[0].split()[-1]) < 1e-5
    rows = {line.split("  ")[0].strip(): [float(x) for x in line.split()[-2:]] for line in lines[-3:]}
    assert rows["sparse"] == pytest.approx(rows["masked"], rel=1e-2)
    assert all(last < first for first, last in rows.values())


def test_flax_sparse_mhsa(printed):
    pytest.importorskip("flax")
    with pytest.importorskip("jax").default_matmul_precision("highest"):  # a GPU would round to tf32
        lines = printed("flax_sparse_mhsa.py", "--seq", "128", "--steps", "6")
    assert lines[0].startswith("sinks(128,4,64)") and all(float(line.split()[-1]) < 1e-5 for line in lines[:2])
    rows = {line.split()[0]: [float(x) for x in line.split()[-2:]] for line in lines[-2:]}
    assert rows["sparse"] == pytest.approx(rows["masked"], rel=1e-3)
    assert all(last < first for first, last in rows.values())


def test_custom_pattern(printed):
    lines = printed("custom_pattern.py", "--seq", "256", "--heads", "1", "--device", "cpu")
    assert "band(256," in lines[0] and "█" in "".join(lines[2:34]) and float(lines[-1].split()[-1]) < 1e-5
    assert all(float(ms) > 0 for line in lines[-3:-1] for ms in line.split()[-2:])


def test_jit_examples(printed):
    for name, kernels in (("jit_compressor.py", 2), ("jit_epilogue.py", 1)):
        lines = printed(name)
        compiled = [line.split() for line in lines[: 2 * kernels]]
        assert {row[1] for row in compiled} == {"sm_80", "sm_90a"} and all(
            row[4:6] == ["0", "bytes"] for row in compiled
        )
        if torch.cuda.is_available():
            (error,) = [float(line.split()[-1]) for line in lines if line.startswith("largest error")]
            assert 0 < error < 4e-3 and "same matrix: False" not in lines and lines[-1].count(" ms") == 3
        else:
            assert lines[-1].endswith("needs a GPU")


def run_of(line):
    """Name, parameters, ms, MiB, losses and the held-out loss of a line of `training.table`."""
    name, parameters, ms, mib, *losses = re.fullmatch(r"(.+?)  +([\d,]+) +([\d.]+) +([\d.]+)  (.+)", line).groups()
    return name, int(parameters.replace(",", "")), float(ms), float(mib), [float(x) for x in losses[0].split()]


LATE = ("train_vit", "train_monarch")  # which learn in more steps than these


@pytest.mark.parametrize(
    "name, names",
    [
        ("longformer_block", ["dense", "longformer"]),
        ("sparse_resnet", ["dense", "sparse"]),
        ("topk_attention", ["dense", "top-k"]),
        ("vision_neighborhood", ["every patch", "swin 8", "nearest 7 × 7"]),
        ("vit_block", ["dense", "kronecker"]),
        ("train_characters", ["causal", "window, sinks"]),
        ("train_vit", ["all patches", "neighbourhood"]),
        ("train_two_four", ["dense", "2:4"]),
        ("train_monarch", ["dense", "Monarch"]),
        ("train_pruned", ["dense, first", "dense, on", "pruned, on"]),
    ],
)
def test_training(printed, name, names, tmp_path):
    png, table = tmp_path / "curves.png", tmp_path / "runs.csv"
    more = ("--steps", "80") if name == "topk_attention" else ()
    lines = printed(f"{name}.py", "--quick", "--device", "cpu", "--png", str(png), "--csv", str(table), *more)
    has_picture = importlib.util.find_spec("matplotlib") is not None
    assert lines[-1] == (f"picture: {png}" if has_picture else "no picture: matplotlib is not installed")
    assert png.exists() == has_picture
    runs = [run_of(line) for line in lines[-1 - len(names) : -1]]
    assert [run[0] for run in runs] == names and len(table.read_text().splitlines()) == 1 + len(names)
    for _, parameters, ms, mib, losses in runs:
        assert parameters > 0 and ms > 0 and len(losses) == 6 and mib > 16 * parameters / 2**20  # AdamW's states
    if name not in LATE:
        fresh = [losses for run, *_, losses in runs if not run.endswith(", on")]
        assert all(losses[4] < losses[0] for losses in fresh)
    if name in ("train_monarch", "train_pruned", "sparse_resnet", "vit_block"):
        assert runs[-1][1] < 0.7 * runs[0][1]
    if name == "topk_attention":  # the right notes are found, in fewer steps than guessing takes to end
        assert runs[-1][-1][-1] < 0.5  # 2.08 is guessing


def test_without_matplotlib(printed, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    lines = printed("train_monarch.py", "--quick", "--device", "cpu", "--png", str(tmp_path / "none.png"))
    assert lines[-1] == "no picture: matplotlib is not installed" and not list(tmp_path.iterdir())


def test_the_notebook_runs(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    for package in ("ipykernel", "matplotlib"):
        pytest.importorskip(package)
    notebook = nbformat.read(EXAMPLES / "training.ipynb", as_version=4)
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in codes)
    codes[0].source = codes[0].source.replace("arguments = []", 'arguments = ["--quick", "--device", "cpu"]')
    paths = [str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert {file.stem for file in tmp_path.glob("*.png")} == {f"train_{n}" for n in NOTEBOOK}
    for cell in codes[1:]:
        assert any("image/png" in output.get("data", {}) for output in cell.outputs)


NOTEBOOK = ["characters", "vit", "two_four", "monarch", "pruned"]
