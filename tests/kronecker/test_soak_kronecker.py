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
    chains = [p for p in problems if p.second]
    assert 20 < len(chains) < 100 and {p.dtype for p in chains} == {torch.float16, torch.bfloat16}
    for p in chains:
        assert fw.KroneckerPattern(*p.sizes).shape[0] == fw.KroneckerPattern(*p.second).shape[1]
        assert max(p.sizes) <= 64 and p.batch <= 600
    large = [p for p in problems if max(p.sizes[1:3]) > 200]
    assert 20 < len(large) < 100 and max(max(p.sizes[1:3]) for p in large) > 800 and max(p.batch for p in large) > 3000
    assert all(max(p.sizes[1:3]) <= 1024 and 0 < p.batch <= 4096 for p in large)
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


@pytest.mark.parametrize("activation", ["gelu", "silu"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("part", ["d_x", "d_w", "d_bias"])
def test_sees_a_gradient_that_is_a_few_roundings_off(part, dtype, activation, device, monkeypatch):
    exact = fw.ksmm
    problem = soak_kronecker.Problem(
        0, (2, 2, 39, 16), 74, False, dtype, None, "plain", "plain", True, activation, True
    )

    def spoilt(gradient):
        gradient = gradient.clone()
        last = gradient.view(-1)[-1:]
        last += 10 * soak_kronecker.ROUNDING[dtype] * last.abs().clamp(min=1)
        return gradient

    def wrong(x, w, bs_last, bias, activation, algo, precision=None):
        if algo == "kernel":
            {"d_x": x, "d_w": w, "d_bias": bias}[part].register_hook(spoilt)
        return exact(x, w, bs_last, bias, activation, algo, precision)

    assert all(float(e) <= 1 for e in soak_kronecker.run(problem, 3, device).values())
    monkeypatch.setattr(fw, "ksmm", wrong)
    assert [name for name, e in soak_kronecker.run(problem, 3, device).items() if float(e) > 1] == [part]


def test_chains_are_right_and_a_wrong_element_is_seen(device, monkeypatch):
    chains = [p for p in (soak_kronecker.draw(n, 5) for n in range(400)) if p.second]
    assert all(float(soak_kronecker.run(p, 5, device)["result"]) <= 1 for p in chains[:8])
    exact = fw.ksmm_chain

    def wrong(*arguments):
        y = exact(*arguments)
        y.view(-1)[-1] += 0.25
        return y

    monkeypatch.setattr(fw, "ksmm_chain", wrong)
    assert all(float(soak_kronecker.run(p, 5, device)["result"]) > 1 for p in chains[:4])
