"""A short run of the soak, which a GPU gets at full length, and that it would see a wrong result."""

import pytest
import soak
import soak_two_four
import torch

import fretwork as fw


def test_random_products(device):
    seed = int(torch.randint(1 << 30, ()))
    print(f"seed {seed}")
    assert soak.soak(soak_two_four.draw, soak_two_four.run, 80, seed, device) == 80


def test_every_kind_is_drawn():
    problems = [soak_two_four.draw(n, 7) for n in range(2000)]
    assert {(p.dtype, p.precision) for p in problems} == set(soak_two_four.KINDS)
    for what in ("left", "bias", "activation", "scales", "scale_out", "backward"):
        assert len({getattr(p, what) for p in problems}) > 1, what
    assert {p.word for p in problems} == set(soak_two_four.WORDS)
    for what, rank in (("strides", 4), ("values", 2), ("gradient", 4)):
        assert {getattr(p, what) for p in problems} == set(soak_two_four.views(rank)), what
    for dtype, _ in soak_two_four.KINDS:
        assert {p.out for p in problems if p.dtype == dtype} == set(soak_two_four.OUTS), "every result"


def test_a_wrong_result_is_seen(monkeypatch):
    right = fw.two_four.matmul

    def wrong(*args, **options):
        c = right(*args, **options)
        return (c.float() + (torch.arange(c.shape[-1]) == 0) * 3).to(c.dtype)

    monkeypatch.setattr(fw.two_four, "matmul", wrong)
    with pytest.raises(AssertionError, match="wrong, among them"):
        soak.soak(soak_two_four.draw, soak_two_four.run, 40, 11, torch.device("cpu"))
