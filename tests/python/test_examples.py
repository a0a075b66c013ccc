"""The examples in the docstrings run as written, everything public has one, and short programs do what they say."""

import doctest
import importlib
import inspect
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

MODULES = [
    "fretwork",
    "fretwork.pattern",
    "fretwork.ops",
    "fretwork.kronecker",
    "fretwork.nn.block_sparse_linear",
    "fretwork.nn.ks_linear",
    "fretwork.compat.ksmm",
    "fretwork.compat.torch_blocksparse",
]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0 and result.attempted > 0


def test_everything_public_has_an_example():
    import fretwork as fw

    public = [getattr(fw, name) for name in fw.__all__ if not inspect.ismodule(getattr(fw, name))]
    public += [getattr(room, name) for room in (fw.nn, fw.kronecker) for name in room.__all__]
    without = [thing.__name__ for thing in public if ">>>" not in (thing.__doc__ or "")]
    assert not without


def test_monarch_project(capsys):
    runpy.run_path(str(EXAMPLES / "monarch_project.py"), run_name="__main__")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    errors = {(row[0], " ".join(row[1:-3])): float(row[-1]) for row in rows}
    assert len(errors) == 12 and all(0.5 < e < 1 for (name, _), e in errors.items() if name == "random")
    assert all(e < 1e-12 for (name, _), e in errors.items() if name == "hadamard")
