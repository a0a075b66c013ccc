"""The examples in the docstrings run as written, and everything public has one."""

import doctest
import importlib
import inspect

import pytest

MODULES = [
    "fretwork",
    "fretwork.pattern",
    "fretwork.ops",
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
    public += [getattr(fw.nn, name) for name in fw.nn.__all__]
    without = [thing.__name__ for thing in public if ">>>" not in (thing.__doc__ or "")]
    assert not without
