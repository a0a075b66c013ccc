"""Advice: which structures are measured, and what is said of them."""

import json

import pytest
import torch
from torch import nn

import fretwork as fw
from fretwork.advise import Advice, Row
from fretwork.recipes import Block, Monarch, TwoFour


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_rows(device, dtype, training):
    if dtype == torch.float64 and device.type != "cpu":
        pytest.skip("float64 is for the CPU")
    state = torch.get_rng_state()
    advice = fw.advise(64, 96, 5, dtype, device, training, ["two_four", "block", "monarch"])
    assert torch.equal(torch.get_rng_state(), state)
    found = {row.recipe: row for row in advice.rows}
    assert set(found) == {None, TwoFour(), Block(32, 0.5), *map(Monarch, (8, 16, 32))}
    size = torch.finfo(dtype).bits // 8
    assert found[None].memory == 64 * 96 * size and found[None].speedup == 1
    bits = 4 * 64 * 96 // (2 if dtype == torch.float32 else 4)
    assert found[TwoFour()].memory == 32 * 96 * size + bits // 8
    assert found[Block(32, 0.5)].memory == 3 * (1024 * size + 8)
    assert found[Monarch(8)].parameters == 64 * 96 // 8 + 96 * 8
    assert ("forward and backward" in advice.verdict) == training


@pytest.mark.parametrize(
    "in_features, out_features, blocks",
    [
        (32, 32, set()),
        (128, 128, {(32, 0.5), (32, 0.25), (64, 0.5)}),
        (320, 32, {(32, 0.5), (32, 0.25), (32, 0.1)}),
        (1280, 256, {(b, d) for b in (32, 64, 128) for d in (0.5, 0.25, 0.1)}),
    ],
)
def test_densities_are_those_of_the_layers(in_features, out_features, blocks):
    """Few blocks do not make every density, and no layer is measured twice."""
    advice = fw.advise(in_features, out_features, 1, torch.float32, "cpu", kinds=["block"])
    made = {(r.recipe.block, r.recipe.density): r.parameters for r in advice.rows if r.recipe}
    assert made.keys() == blocks
    for (_, density), parameters in made.items():
        assert 0.99 * density <= parameters / (in_features * out_features) <= 1.25 * density


def test_what_it_says():
    advice = fw.advise(128, 128, 1, torch.float32, "cpu")
    lines = str(advice).splitlines()
    assert len(lines) == len(advice.rows) + 2 and lines[-1] == advice.verdict == json.loads(advice.to_json())["verdict"]
    assert advice.verdict.startswith("For 1 row of 128 → 128 in float32 on 1 CPU thread, forward: ")
    told = json.loads(advice.to_json())["rows"]
    assert [row["recipe"] for row in told] == [row.recipe and repr(row.recipe) for row in advice.rows]
    assert all(word in advice.verdict for word in ("2:4", "blocks of", "monarch of"))


def test_verdict_of_given_times():
    times = {Block(64, 0.25): 1.0, Block(32, 0.5): 1.5, None: 2.0, TwoFour(): 4.0}
    made = tuple(
        Row(recipe.kind if recipe else "dense", recipe, ms, 2.0, 2.0 / ms, 1, 1) for recipe, ms in times.items()
    )
    advice = Advice(made, "For us")
    assert advice.verdict == "For us: blocks of 64 at 25% is 2.0× as fast as dense, 2:4 is no faster (0.50×)."
    assert Advice(made[2:3], "For us").verdict == "For us: nothing else fits."


def test_sizes_that_nothing_fits():
    (only,) = fw.advise(7, 5, 3, torch.float32, "cpu").rows
    assert only.kind == "dense"
    assert {row.kind for row in fw.advise(12, 20, 3, torch.float32, "cpu", kinds=["dense"]).rows} == {"dense"}


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"kinds": ["fast"]}, "kinds: expected some of two_four, block, monarch, got 'fast'"),
        ({"kinds": "block"}, "kinds: expected some of"),
        ({"rows": 0}, "rows: expected 1 or more, got 0"),
        ({"in_features": 2.5}, "in_features: expected an int, got 2.5"),
        ({"dtype": "bf16"}, "dtype: expected float32, .* got 'bf16'"),
        ({"device": "meta"}, "device: expected a CPU or a CUDA GPU of this machine, got meta"),
        ({"device": "nowhere"}, "device: expected a CPU or a CUDA GPU, got 'nowhere'"),
        ({"device": 99}, "device: expected a CPU or a CUDA GPU of this machine, got cuda:99"),
        ({"training": 2}, "training: expected True or False"),
    ],
)
def test_refuses(bad, message):
    with pytest.raises((ValueError, TypeError), match=f"advise: {message}"):
        fw.advise(**({"in_features": 64, "out_features": 64, "rows": 4, "dtype": torch.float32, "device": "cpu"} | bad))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_first_gpu_is_not_the_cpu():
    with pytest.raises(ValueError, match="device: expected a CPU or a CUDA GPU of this machine, got cuda:0"):
        fw.advise(64, 64, 4, torch.float32, device=0)


def test_under_autocast():
    """The layers run in the dtype that was asked for."""
    seen = set()
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.add(out.dtype)),
    ):
        fw.advise(64, 64, 4, torch.float32, "cpu", kinds=["two_four"])
    assert seen == {torch.float32}


def test_a_wrong_layer_is_no_advice(monkeypatch):
    monkeypatch.setattr(
        fw.nn.SemiSparseLinear, "forward", lambda self, x: nn.functional.linear(x, self.to_dense()) * 1.1
    )
    with pytest.raises(RuntimeError, match=r"advise: TwoFour.*: expected the product"):
        fw.advise(64, 64, 4, torch.float32, "cpu")
