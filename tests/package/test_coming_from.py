"""Every pair of docs/coming-from.md runs: both sides where their library is there, and then `out` is the same."""

import re
import sys
import types
from pathlib import Path

import pytest
import torch

import fretwork.compat.deepspeed
import fretwork.compat.torch_blocksparse

PAGE = Path(__file__).resolve().parents[2] / "docs/coming-from.md"
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ON_A_GPU = {"torch's semi-structured tensors"}  # sections whose left side needs one


def tables():
    """(section, code before the table, left, right) of each row."""
    for section in PAGE.read_text().split("\n## ")[1:]:
        before = ""
        for piece in re.split(r"(<table>.*?</table>)", section, flags=re.DOTALL):
            if not piece.startswith("<table>"):
                before = "\n".join(FENCE.findall(piece))
                continue
            for row in piece.split("<tr><td>")[1:]:
                left, right = FENCE.findall(row)
                yield pytest.param(section.partition("\n")[0], before, left, right, id=section.partition("\n")[0])


@pytest.fixture(autouse=True)
def libraries():
    """What stands in for libraries that are not installed."""
    before = dict(sys.modules)
    fretwork.compat.torch_blocksparse.install()
    for name in ("deepspeed", "deepspeed.ops"):
        sys.modules.setdefault(name, types.ModuleType(name))
    fretwork.compat.deepspeed.install()
    yield
    for name in set(sys.modules) - set(before):
        if name.split(".")[0] in ("deepspeed", "torch_blocksparse"):
            del sys.modules[name]


def out_of(before, code):
    torch.manual_seed(7)
    names = {}
    exec(compile(before, str(PAGE), "exec"), names)
    exec(compile(code, str(PAGE), "exec"), names)
    return names["out"]


@pytest.mark.parametrize("section, before, left, right", list(tables()))
def test_pair(section, before, left, right):
    ours = out_of(before, right)
    assert ours.isfinite().all() and ours.abs().max() > 0
    if section in ON_A_GPU and not torch.cuda.is_available():
        pytest.skip("ours is right; theirs needs a GPU")
    try:
        theirs = out_of(before, left)
    except ModuleNotFoundError as missing:
        pytest.skip(f"ours is right; theirs is not installed: {missing.name}")
    tolerance = 2e-3 if ours.dtype == torch.float16 else 1e-5
    torch.testing.assert_close(ours, theirs.to(ours.device), rtol=tolerance, atol=tolerance * ours.abs().max().item())


def test_sections_have_pairs():
    sections = [pair.values[0] for pair in tables()]
    expected = {"torch-blocksparse": 4, "DeepSpeed": 3, "NATTEN": 3, "KSMM": 2, "TileLang": 1, "FlexAttention": 3}
    assert {name: sections.count(name) for name in expected} == expected
