"""A short run of the soak, which a GPU gets at full length, and that it would see a wrong result."""

import os

import pytest
import soak
import soak_kronecker
import torch

import fretwork as fw


def test_random_problems(device):
    seed = int.from_bytes(os.urandom(4), "little")
    assert soak.soak(soak_kronecker.draw, soak_kronecker.run, 60, seed, device) == 60


def test_draws_of_every_kind():
    problems = [soak_kronecker.draw(n, 7) for n in range(2000)]
    for field in ("bs_last", "bias", "backward"):
        assert {getattr(p, field) for p in problems} == {False, True}
    assert {(p.dtype, p.precision) for p in problems} == set(soak_kronecker.KINDS)
    assert {p.activation for p in problems} == {None, "relu", "gelu", "silu"}
    assert {p.w_strides for p in problems} > {p.x_strides for p in problems} > {"plain", "turned"}
    batches = {p.batch for p in problems}
    assert {0, 1, 2, 8, 32, 33} <= batches and max(batches) > 400
    for n in range(4):
        assert max(p.sizes[n] for p in problems) > (8 if n == 0 else 40) and min(p.sizes[n] for p in problems) == 1


@pytest.mark.parametrize("spoilt", ["result", "gradient"])
def test_sees_a_wrong_element(spoilt, monkeypatch):
    exact = fw.ksmm

    def wrong(x, w, bs_last, bias, activation, algo, precision=None):
        y = exact(x, w, bs_last, bias, activation, algo)
        if algo == "dense" or not y.numel():
            return y
        if spoilt == "result":
            off = torch.zeros_like(y)
            off.view(-1)[-1] = 0.25
            return y + off
        return y + (0.3 * w.flatten()[-1] - 0.3 * w.flatten()[-1].detach())  # the value stays

    monkeypatch.setattr(fw, "ksmm", wrong)
    with pytest.raises(AssertionError, match="wrong, among them"):
        soak.soak(soak_kronecker.draw, soak_kronecker.run, 40, 11, torch.device("cpu"))
