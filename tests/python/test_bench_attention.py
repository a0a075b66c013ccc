"""The comparison of attention: its rules say what its patterns say, and its rows are whole."""

import sys
from pathlib import Path

import pytest
import torch

import fretwork as fw

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
cases = pytest.importorskip("attention_cases")
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
        for make, _ in cases.cases(1 << 14, torch.device("cpu"), device_sizes).values():
            made.add(make().text.split("(")[0])
    explicit = {"acsr", "from_layout", "from_mask"}  # someone's own, not measured by name
    assert made == set(fw.patterns.__all__) - explicit
