"""Stock Hugging Face models on fretwork's attention, with random weights: the same numbers as their own attention."""

import copy
import json
import warnings

import pytest
import torch

pytest.importorskip("transformers")
import transformers
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

import fretwork.compat.transformers

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


POSITIONAL = [
    "sinks({seq}, 4, 16)",
    "fixed({seq}, 8, 2)",
    "block_local({seq}, 16, 1) & causal({seq})",
    "longformer({seq}, 8, (0, 3, 11)) & causal({seq})",
    "sliding_window({seq}, 4, 0) | fixed({seq}, 16, 1)",
    "bigbird({seq}, 8, 1, 1, 1) & causal({seq})",
]


def model_with(pattern, device):
    config = LlamaConfig(**SIZES, fretwork_pattern=pattern)
    return LlamaForCausalLM._from_config(config, attn_implementation="fretwork").to(device).eval()


def padded(device, ends, length=50):
    """Random rows and their attention mask, with so much padding left and right."""
    ids = torch.randint(1, 64, (len(ends), length), device=device)
    mask = torch.ones(len(ends), length, dtype=torch.long, device=device)
    for row, (left, right) in enumerate(ends):
        mask[row, :left] = 0
        mask[row, length - right :] = 0
    return ids, mask


@pytest.mark.parametrize("ends", [[(20, 0), (0, 0), (7, 0)], [(0, 9), (0, 0), (0, 9)], [(5, 3), (1, 0), (0, 30)]])
@pytest.mark.parametrize("pattern", [*POSITIONAL, "strided({seq}, 7)", "sliding_window({seq}, 8, 0)"])
def test_padded_rows_are_the_rows_alone(device, pattern, ends):
    model, (ids, mask) = model_with(pattern, device), padded(device, ends)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    got = model(ids, attention_mask=mask, position_ids=positions).logits
    for row in range(len(ends)):
        alone = mask[row].bool()
        want = model(ids[row : row + 1, alone]).logits[0]
        assert torch.allclose(got[row, alone], want, atol=1e-4), (got[row, alone] - want).abs().max()


@pytest.mark.parametrize("additive", [False, True])
def test_a_whole_mask_does_not_count_padding(device, additive):
    """As (B, 1, Sq, Sk): right where positions do not matter, refused where they do."""
    ids, mask = padded(device, [(9, 0), (0, 0)], 40)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    whole = mask.bool()[:, None, None] & torch.ones(40, 40, device=device).tril().bool()
    whole = torch.zeros(whole.shape, device=device).masked_fill(~whole, -1e30) if additive else whole
    model = model_with("sliding_window({seq}, 8, 0)", device)
    got = model(ids, attention_mask=whole, position_ids=positions).logits[0, 9:]
    assert torch.allclose(got, model(ids[:1, 9:]).logits[0], atol=1e-4)
    with pytest.raises(ValueError, match=r"attention_mask: expected padding as \(B, Sk\) .*, got \(2, 1, 40, 40\)"):
        model_with("sinks({seq}, 4, 8)", device)(ids, attention_mask=whole, position_ids=positions)
    nothing_hidden = torch.ones(40, 40, device=device).tril().bool()[None, None]
    model = model_with("sinks({seq}, 4, 8)", device)
    assert torch.allclose(model(ids, attention_mask=nothing_hidden).logits, model(ids).logits, atol=1e-4)


@pytest.mark.parametrize("pattern", [POSITIONAL[0], "strided({seq}, 7)", [POSITIONAL[1], "causal({seq})"]])
def test_left_padded_generation(device, pattern):
    model, (ids, mask) = model_with(pattern, device), padded(device, [(20, 0), (0, 0), (7, 0)], 40)
    options = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False)
    got = model.generate(ids, attention_mask=mask, **options)
    for row in range(3):
        want = model.generate(ids[row : row + 1, mask[row].bool()], **options)
        assert torch.equal(got[row, 40:], want[0, -12:])


def test_gradients_of_padded_rows(device):
    model, (ids, mask) = model_with(POSITIONAL[0], device), padded(device, [(20, 0), (0, 4)])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    model(ids, attention_mask=mask, position_ids=positions).logits[mask.bool()].square().sum().backward()
    got = [x.grad.clone() for x in model.parameters()]
    model.zero_grad()
    for row in range(2):
        model(ids[row : row + 1, mask[row].bool()]).logits.square().sum().backward()
    for x, (name, y) in zip(got, model.named_parameters(), strict=True):
        assert torch.allclose(x, y.grad, rtol=1e-3, atol=1e-3 * y.grad.abs().max()), name


def test_padded_rows_under_autocast(device):
    model, (ids, mask) = model_with(POSITIONAL[0], device), padded(device, [(20, 0), (0, 0)])
    with torch.autocast(device.type, torch.bfloat16):
        got = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
        want = model(ids[:1, 20:]).logits
    assert torch.allclose(got[0, 20:].float(), want[0].float(), atol=2e-2)


def test_long_patterns_are_not_compared_but_grouped(device, monkeypatch):
    """What costs too much to compare is computed row by row: the results are the same."""
    model, (ids, mask) = model_with("strided({seq}, 7)", device), padded(device, [(20, 0), (0, 4)])
    want = model(ids, attention_mask=mask).logits
    monkeypatch.setattr(fretwork.compat.transformers, "_LARGEST_COMPARED", 0)
    fretwork.compat.transformers._same_without.cache_clear()
    assert torch.allclose(model(ids, attention_mask=mask).logits[mask.bool()], want[mask.bool()], atol=1e-4)


def test_right_padding_before_a_global_token(device):
    """A pattern that has no shorter form stays as long as the row; the padding is not seen."""
    model, (ids, mask) = model_with("longformer({seq}, 8, (0, 40))", device), padded(device, [(0, 20), (4, 0), (2, 0)])
    got = model(ids, attention_mask=mask).logits[0]
    ids[0, 30:] = 1  # other padding
    assert torch.allclose(model(ids, attention_mask=mask).logits[0, :30], got[:30], atol=1e-5)


def test_padding_of_an_encoder(device):
    config = BertConfig(**{k: SIZES[k] for k in SIZES if "key_value" not in k}, fretwork_pattern="fixed({seq}, 8, 2)")
    model = BertModel(config).to(device).eval()
    assert model.config._attn_implementation == "fretwork"
    ids, mask = padded(device, [(0, 20), (0, 0), (6, 0), (50, 0)])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    got = model(ids, attention_mask=mask, position_ids=positions).last_hidden_state
    for row in range(3):
        alone = mask[row].bool()
        assert torch.allclose(got[row, alone], model(ids[row : row + 1, alone]).last_hidden_state[0], atol=1e-4)
    assert got.isfinite().all()


def test_keys_left_out_inside_a_row(device):
    model, (ids, mask) = model_with("sinks({seq}, 4, 16)", device), padded(device, [(0, 0), (3, 0)])
    mask[0, 20:25] = 0
    with pytest.raises(ValueError, match=r"attention: attention_mask: expected padding at the ends.*'sinks"):
        model(ids, attention_mask=mask)
    model.config.fretwork_pattern = "causal({seq})"
    _, theirs = twins(LlamaForCausalLM, LlamaConfig(**SIZES), device)
    theirs.load_state_dict(model.state_dict())
    got, want = (m(ids, attention_mask=mask).logits for m in (model, theirs))
    assert torch.allclose(got[mask.bool()], want[mask.bool()], atol=1e-4)
    mask[0] = 1
    model.config.fretwork_pattern = "document((20, 30), causal=True)"
    with pytest.raises(ValueError, match=r"fretwork_pattern: expected \{seq\} in a text for left padding, got 'docu"):
        model(ids, attention_mask=mask)


def test_cache_without_the_keys_of_a_pattern(device):
    """The cache of a model with a sliding window drops keys: patterns inside the window work, others raise."""
    config = MistralConfig(**SIZES, sliding_window=9, fretwork_pattern="sinks({seq}, 2, 5)")
    model = MistralForCausalLM(config).to(device).eval()
    ids, mask = padded(device, [(4, 0), (0, 0)], 20)
    options = dict(attention_mask=mask, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    with pytest.raises(NotImplementedError, match=r"past_key_values: expected a cache of all keys for .*'sinks"):
        model.generate(ids, **options)
    got = model.generate(ids, past_key_values=DynamicCache(), **options)
    alone = model.generate(ids[:1, 4:], past_key_values=DynamicCache(), **(options | {"attention_mask": mask[:1, 4:]}))
    assert torch.equal(got[0, 4:], alone[0])
    model.config.fretwork_pattern = "dilated({seq}, 2, 3, True)"
    got, want = (model.generate(ids, past_key_values=c, **options) for c in (None, DynamicCache()))
    assert torch.equal(got, want)


def test_a_saved_pattern_is_restored(device, tmp_path):
    model = model_with("sinks({seq}, 4, 16)", device)
    ids = tokens(device)
    want = model(ids).logits
    model.save_pretrained(tmp_path)
    for kind in (AutoModelForCausalLM, LlamaForCausalLM):
        loaded = kind.from_pretrained(tmp_path).to(device)
        assert loaded.config._attn_implementation == "fretwork"
        assert torch.allclose(loaded(ids).logits, want, atol=1e-5)
    assert json.loads((tmp_path / "config.json").read_text())["attn_implementation"] == "fretwork"
    other = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert other.config._attn_implementation == "sdpa" and "attn_implementation" not in other.config.to_dict()
    plain = json.loads((tmp_path / "config.json").read_text())
    del plain["attn_implementation"]  # as versions before this one have saved it
    (tmp_path / "config.json").write_text(json.dumps(plain))
    assert LlamaForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "fretwork"


def test_a_pattern_that_came_after_the_attention_is_saved_with_its_name(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.set_attn_implementation("fretwork")
    model.config.fretwork_pattern = "sinks({seq}, 4, 8)"
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["attn_implementation"] == "fretwork"


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


def test_output_attentions_is_refused(device):
    ours, _ = twins(LlamaForCausalLM, LlamaConfig(**SIZES), device)
    with pytest.raises(NotImplementedError, match="output_attentions: expected False, got True"):
        ours(tokens(device), output_attentions=True)


def test_a_compiled_model_serves_every_length_without_warnings(device):
    config = LlamaConfig(**SIZES, fretwork_pattern=["sinks({seq}, 4, 16)", "causal({seq})"])
    model = AutoModelForCausalLM.from_config(config).to(device).eval()
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="eager", dynamic=True, fullgraph=True)
    graphs = []
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        for length in (12, 19, 50, 31):
            ids = tokens(device, length)
            got, want = (m(ids, use_cache=False).logits for m in (compiled, model))
            assert torch.equal(got, want)
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs == [1] * 4


# Attention that is no causal, full or window one


SMALL = SIZES | dict(head_dim=16, bos_token_id=1, eos_token_id=2)
CHUNKS = dict(attention_chunk_size=8, no_rope_layers=[1, 0], num_local_experts=2, intermediate_size_mlp=96)
WINDOW = dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"])


@pytest.mark.parametrize("kind", ["chunks", "both directions"])
def test_other_attention_is_read_through_a_mask(device, kind):
    if kind == "chunks":
        ours, theirs = twins(transformers.Llama4ForCausalLM, transformers.Llama4TextConfig(**SMALL, **CHUNKS), device)
    else:
        config = transformers.Gemma3TextConfig(**SMALL, **WINDOW, use_bidirectional_attention=True)
        ours, theirs = twins(transformers.Gemma3TextModel, config, device)
    ids, mask = padded(device, [(13, 0), (0, 0)])
    for given in (None, mask):
        got, want = (model(ids, attention_mask=given, use_cache=False)[0] for model in (ours, theirs))
        seen = mask.bool() if given is not None else slice(None)
        assert torch.allclose(got[seen], want[seen], atol=1e-4)
    if kind == "chunks":
        options = dict(attention_mask=mask, max_new_tokens=12, min_new_tokens=12, do_sample=False)
        assert torch.equal(ours.generate(ids, **options), theirs.generate(ids, **options))


def t5(pattern=None):
    config = dict(vocab_size=64, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0)
    return transformers.T5Config(**config, fretwork_pattern=pattern)


def test_position_bias(device):
    ours, theirs = twins(transformers.T5ForConditionalGeneration, t5(), device)
    (ids, mask), labels = padded(device, [(0, 13), (0, 0)]), tokens(device, 20)
    got, want = (model(ids, attention_mask=mask, labels=labels) for model in (ours, theirs))
    assert torch.allclose(got.logits, want.logits, atol=1e-4)
    got.loss.backward()
    want.loss.backward()
    for (name, x), y in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(x.grad, y.grad, atol=1e-4), name


def test_position_bias_of_padded_rows(device):
    config = t5("block_local({seq}, 8)")
    model = transformers.T5EncoderModel._from_config(config, attn_implementation="fretwork").to(device).eval()
    ids, mask = padded(device, [(0, 13), (5, 0), (2, 3)])
    got = model(ids, attention_mask=mask)[0]
    for row in range(3):
        seen = mask[row].bool()
        assert torch.allclose(got[row, seen], model(ids[row : row + 1, seen])[0][0], atol=1e-4)


def test_a_window_that_counts_without_the_query(device):
    """T5Gemma's encoder sees as many keys on each side as its window has; others name one more."""
    part = SMALL | WINDOW | dict(query_pre_attn_scalar=16)
    config = transformers.T5GemmaConfig(encoder=part, decoder=part, vocab_size=64)
    ours, theirs = twins(transformers.T5GemmaForConditionalGeneration, config, device)
    ids, labels = tokens(device), tokens(device, 20)
    assert torch.allclose(*(model(ids, labels=labels).logits for model in (ours, theirs)), atol=1e-4)


def test_models_that_compute_their_own_attention_are_refused(device):
    bloom = transformers.BloomConfig(vocab_size=64, hidden_size=64, n_layer=2, n_head=4)
    for kind, config in (
        (transformers.BloomForCausalLM, bloom),
        (
            transformers.XLNetModel,
            transformers.XLNetConfig(d_model=64, n_head=4, n_layer=2, fretwork_pattern="full({seq})"),
        ),
    ):
        with pytest.raises(NotImplementedError, match=f"attn_implementation: expected .+, got {kind.__name__}"):
            kind._from_config(config, attn_implementation="fretwork")

    class Own(transformers.PreTrainedModel):  # which names no kind of configuration
        pass

    with pytest.raises(NotImplementedError, match=r"attn_implementation: expected .+, got Own"):
        Own(BertConfig(fretwork_pattern="full({seq})"))
    q = torch.randn(1, 2, 8, 16, device=device)
    with pytest.raises(NotImplementedError, match="attention: indices: expected None, got a Tensor"):
        fretwork.compat.transformers.attention_forward(torch.nn.Module(), q, q, q, None, indices=q)
