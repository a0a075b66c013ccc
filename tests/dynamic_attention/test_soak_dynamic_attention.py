"""A short run of the soak, which a GPU gets at full length, and that it would see a wrong result."""

import pytest
import soak
import soak_dynamic_attention
import torch

import fretwork as fw


def test_random_problems(device):
    seed = int(torch.randint(1 << 30, ()))
    print(f"seed {seed}")
    assert soak.soak(soak_dynamic_attention.draw, soak_dynamic_attention.run, 60, seed, device) == 60


def test_every_kind_is_drawn():
    problems = [soak_dynamic_attention.draw(n, 7) for n in range(2000)]
    assert {p.kind for p in problems} == set(soak_dynamic_attention.KINDS)
    assert {(p.dtype, p.precision) for p in problems} == set(soak_dynamic_attention.TYPES)
    blocks = [p for p in problems if p.kind in ("mask", "lists")]
    assert {p.pattern for p in blocks} == set(soak_dynamic_attention.PATTERNS)
    assert {p.block for p in blocks} == {(a, b) for a in (16, 32, 64, 128) for b in (16, 32, 64, 128)}
    for what in ("softcap", "bias", "slopes", "padding", "lists"):
        assert len({getattr(p, what) for p in blocks}) > 1, what
    for what in ("causal", "bounded", "sinks", "scale", "backward", "twice", "density"):
        assert len({getattr(p, what) for p in problems}) > 1, what
    assert {how for p in problems for how in p.strides} == set(soak_dynamic_attention.STRIDES)
    assert any(p.entries == 0 for p in problems) and max(max(p.seq) for p in problems) > 600


@pytest.mark.parametrize("spoilt", ["result", "gradient", "sink"])
@pytest.mark.parametrize("name", ["attention", "selected_attention", "varlen_attention"])
def test_a_wrong_element_is_seen(spoilt, name, monkeypatch):
    right = getattr(fw, name)

    def wrong(q, k, v, *args, **options):
        o, lse = right(q, k, v, *args, **options)
        if not o.numel() or not v.numel():
            return o, lse
        if spoilt == "sink":
            return o, lse + 0.05
        last = v.flatten()[-1].nan_to_num(0)
        off = torch.zeros_like(o)
        off[(-1,) * off.dim()] = 0.5
        return (o + off if spoilt == "result" else o + (last - last.detach()).to(o.dtype)), lse

    monkeypatch.setattr(fw, name, wrong)
    with pytest.raises(AssertionError, match="wrong, among them"):
        soak.soak(soak_dynamic_attention.draw, soak_dynamic_attention.run, 40, 11, torch.device("cpu"))
