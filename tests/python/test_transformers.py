"""Stock Hugging Face models on fretwork's attention, with random weights: the same numbers as their own attention."""

import copy

import pytest
import torch

pytest.importorskip("transformers")
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import fretwork.compat.transformers  # noqa: F401

SIZES = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
)


def twins(kind, config, device):
    """A model with its own attention and one with ours, of the same weights."""
    ours, theirs = (
        kind._from_config(copy.deepcopy(config), attn_implementation=name) for name in ("fretwork", "eager")
    )
    theirs.load_state_dict(ours.state_dict())
    return ours.to(device).eval(), theirs.to(device).eval()


def tokens(device, length=50):
    return torch.randint(1, 64, (2, length), device=device)


@pytest.mark.parametrize(
    "kind, config",
    [(LlamaForCausalLM, LlamaConfig(**SIZES)), (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=9))],
    ids=["llama", "mistral"],
)
def test_same_as_eager(device, kind, config):
    ours, theirs = twins(kind, config, device)
    ids = tokens(device)
    loss, want = (model(ids, labels=ids).loss for model in (ours, theirs))
    assert torch.allclose(loss, want, atol=1e-5)
    loss.backward()
    want.backward()
    for (name, x), y in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(x.grad, y.grad, atol=1e-5), name


def test_padding(device):
    ours, theirs = twins(LlamaForCausalLM, LlamaConfig(**SIZES), device)
    ids, mask = tokens(device), torch.ones(2, 50, dtype=torch.long, device=device)
    mask[1, :20] = 0
    got, want = (model(ids, attention_mask=mask).logits for model in (ours, theirs))
    assert torch.allclose(got[mask.bool()], want[mask.bool()], atol=1e-4)


def test_generation(device):
    """A pattern from the configuration, and a cache that grows."""
    config = LlamaConfig(**SIZES, fretwork_pattern="sliding_window({seq}, 8, 0)")
    ours, _ = twins(LlamaForCausalLM, config, device)
    reference, _ = twins(MistralForCausalLM, MistralConfig(**SIZES, sliding_window=9), device)
    reference.load_state_dict(ours.state_dict())
    assert ours.config.to_dict()["fretwork_pattern"] == "sliding_window({seq}, 8, 0)"
    ids = tokens(device, 20)
    got, want = (m.generate(ids, min_new_tokens=20, max_new_tokens=20, do_sample=False) for m in (ours, reference))
    assert torch.equal(got, want)
    with torch.no_grad():
        whole, part = ours(got).logits, ours(got[:, :30], use_cache=True)
        rest = ours(got[:, 30:], past_key_values=part.past_key_values).logits
    assert torch.allclose(whole[:, 30:], rest, atol=1e-4)


def test_pattern_of_each_layer(device):
    config = LlamaConfig(**SIZES, fretwork_pattern=["causal({seq})", "strided({seq}, 7)"])
    ours, theirs = twins(LlamaForCausalLM, config, device)
    ids = tokens(device)
    got, want = ours(ids).logits, theirs(ids).logits
    assert not torch.allclose(got, want, atol=1e-4)
    ours.config.fretwork_pattern = ["causal({seq})", "strided({seq}, 7) | causal({seq})"]
    assert torch.allclose(ours(ids).logits, want, atol=1e-4)
    ours.config.fretwork_pattern = "causal(49)"
    with pytest.raises(ValueError, match=r"fretwork_pattern: expected a text with \{seq\}.*got 'causal\(49\)'"):
        ours(ids)


@pytest.mark.parametrize(
    "given, words",
    [
        ("strided(seq, 8)", r"as 'strided\(\{seq\}, 128\)', got 'strided\(seq, 8\)'.*strided: seq: expected"),
        ("strided({seq})", r"got 'strided\(\{seq\}\)' \(strided: stride: expected a value"),
        (["causal({seq})"] * 3, "one for each of 2, got a list of 3"),
        (["causal({seq})"], "one for each of 2, got a list of 1"),
    ],
)
def test_wrong_pattern(device, given, words):
    ours, _ = twins(LlamaForCausalLM, LlamaConfig(**SIZES, fretwork_pattern=given), device)
    with pytest.raises(ValueError, match=f"attention: fretwork_pattern: expected .*{words}"):
        ours(tokens(device))


def test_packed_sequences(device):
    """Documents in one row, as the docstring has them: a text of one length, and what it gives for another."""
    ours, theirs = twins(
        LlamaForCausalLM, LlamaConfig(**SIZES, fretwork_pattern="document((20, 30), causal=True)"), device
    )
    ids = tokens(device)
    got = ours(ids, position_ids=torch.cat([torch.arange(20), torch.arange(30)])[None].to(device)).logits
    want = torch.cat([theirs(part).logits for part in ids.split([20, 30], 1)], 1)
    assert torch.allclose(got, want, atol=1e-4)
    with pytest.raises(ValueError, match=r"one of shape \(49, 49\), got .* of shape \(50, 50\)"):
        ours(ids[:, 1:])


def test_static_cache_is_refused(device):
    ours, _ = twins(LlamaForCausalLM, LlamaConfig(**SIZES), device)
    with pytest.raises(NotImplementedError, match="static"):
        ours.generate(tokens(device, 9), max_new_tokens=5, cache_implementation="static")
