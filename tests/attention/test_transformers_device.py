"""Stock Hugging Face models with packed sequences, static caches, learned sinks and chosen key blocks."""

import functools

import pytest
import torch
import torch._dynamo.testing

pytest.importorskip("transformers")
from test_transformers import SIZES, padded, tokens, twins
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

import fretwork as fw
import fretwork.compat._packed_positions as positions_read
import fretwork.compat.transformers as ft

MIXED = ["sliding_attention", "full_attention"]
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=9)),
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig(
            **SIZES, head_dim=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=9, layer_types=MIXED
        ),
    ),
    "gemma": (
        Gemma2ForCausalLM,
        Gemma2Config(**SIZES, head_dim=16, sliding_window=9, attn_logit_softcapping=5.0, layer_types=MIXED),
    ),
}
LENGTHS = (7, 1, 20, 22)
STARTS = [0, 7, 8, 28, 50]


@pytest.fixture(params=MODELS, ids=str)
def both(request, device):
    ours, theirs = twins(*MODELS[request.param], device)
    for name, x in theirs.named_parameters():
        if name.endswith("sinks"):  # which may begin as zeros
            torch.nn.init.normal_(x)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def positions(device, rows=1):
    return torch.cat([torch.arange(n) for n in LENGTHS])[None].expand(rows, -1).contiguous().to(device)


def fails(*_, **__):
    raise AssertionError("not to be called")


@pytest.mark.parametrize("rows", [1, 2])
def test_position_ids_that_begin_anew(both, device, rows):
    """As the model's own attention on each document alone, and on the whole where it looks at them; with gradients."""
    ours, theirs = both
    ids, at = tokens(device)[:rows], positions(device, rows)
    lengths = [LENGTHS, (30, 20)][:rows]
    if rows == 2:
        at[1] = torch.cat([torch.arange(n) for n in lengths[1]])
    got = ours(ids, position_ids=at, use_cache=False).logits
    want = torch.cat(
        [
            torch.cat([theirs(part, use_cache=False).logits for part in row[None].split(parts, 1)], 1)
            for row, parts in zip(ids, lengths, strict=True)
        ]
    )
    assert torch.allclose(got, want, atol=1e-4)
    if not isinstance(theirs, GptOssForCausalLM):
        assert torch.allclose(got, theirs(ids, position_ids=at, use_cache=False).logits, atol=1e-4)
    weight = torch.randn_like(want)
    for logits in got, want:
        (logits * weight).mean().backward()
    for (name, x), y in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if x.grad is not None or y.grad is not None:
            assert torch.allclose(x.grad, y.grad, atol=2e-5), name


def test_cu_seq_lens(both, device, monkeypatch):
    """As collators give them: nothing is read, and the results are those of each document alone."""
    ours, theirs = both
    ids = tokens(device)[:1]
    starts = torch.tensor(STARTS, dtype=torch.int32, device=device)
    if "gemma" not in type(ours).__name__.lower():  # which has a softcap
        monkeypatch.setattr(positions_read, "read_starts", fails)
        monkeypatch.setattr(ft, "starts_of", fails)
        monkeypatch.setattr(ft, "_document_patterns", fails)
    options = dict(cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=22, max_length_k=22)
    got = ours(ids, position_ids=positions(device), **options).logits
    want = torch.cat([theirs(part).logits for part in ids.split(LENGTHS, 1)], 1)
    assert torch.allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("pattern", ["sinks({seq}, 2, 5)", "strided({seq}, 7)", "sliding_window({seq}, 4, 0)"])
@pytest.mark.parametrize("given", ["position_ids", "cu_seq_lens_q"])
def test_patterns_of_documents(device, pattern, given):
    """Each document has the pattern of its own length."""
    model, _ = twins(LlamaForCausalLM, LlamaConfig(**SIZES, fretwork_pattern=pattern), device)
    ids, at = tokens(device)[:1], positions(device)
    starts = torch.tensor(STARTS, device=device)
    got = model(ids, position_ids=at, **({} if given == "position_ids" else {given: starts})).logits
    want = torch.cat([model(part).logits for part in ids.split(LENGTHS, 1)], 1)
    assert torch.allclose(got, want, atol=1e-4)
    assert not torch.allclose(model(ids).logits, want, atol=1e-4)


@pytest.fixture
def reads(monkeypatch):
    """What is read of position ids."""
    found, read = [], positions_read.read_starts
    monkeypatch.setattr(positions_read, "read_starts", lambda ids: (found.append(1), read(ids))[1])
    return found


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_positions_are_read_once_and_only_where_they_are_given(device, reads, mode):
    model, _ = twins(LlamaForCausalLM, LlamaConfig(**SIZES), device)
    ids = tokens(device)[:1]
    with mode():
        at = positions(device)
        plain = model(ids).logits
        assert len(reads) == 0
        first = model(ids, position_ids=at).logits
        assert len(reads) == 1
        assert torch.equal(model(ids, None, at).logits, first) and len(reads) == 2
        at.copy_(torch.arange(50))  # other contents are seen
        assert torch.equal(model(ids, position_ids=at).logits, plain) and len(reads) == 3


def test_positions_that_were_copied(device, monkeypatch):
    """As hooks copy them that spread layers over devices."""
    ours, theirs = twins(LlamaForCausalLM, LlamaConfig(**SIZES), device)
    for layer in ours.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs: (args, kwargs | {"position_ids": kwargs["position_ids"].clone()}), with_kwargs=True
        )
    ids, at = tokens(device), positions(device)
    got, want = (model(ids, position_ids=at, use_cache=False).logits for model in (ours, theirs))
    assert torch.allclose(got, want, atol=1e-4)


def test_positions_of_layers_that_run_again(device, reads):
    ours, theirs = (model.train() for model in twins(LlamaForCausalLM, LlamaConfig(**SIZES), device))
    ours.gradient_checkpointing_enable()
    ids, at = tokens(device), positions(device)
    for given in ({}, {"position_ids": at}):
        for model in (ours, theirs):
            model.zero_grad()
            model(ids, labels=ids, use_cache=False, **given).loss.backward()
        for (name, x), y in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(x.grad, y.grad, atol=2e-5), name
    assert len(reads) == 1


def test_positions_beside_a_mask(device, reads):
    """Of all ones, too: then they are no documents, as in the models' own attention."""
    model, theirs = twins(LlamaForCausalLM, LlamaConfig(**SIZES), device)
    ids, at, mask = tokens(device), positions(device, 2), torch.ones(2, 50, dtype=torch.long, device=device)
    for padding in (0, 3):
        mask[0, :padding] = 0
        given = dict(attention_mask=mask, position_ids=at, use_cache=False)
        got, want = (m(ids, **given).logits[mask.bool()] for m in (model, theirs))
        assert torch.allclose(got, want, atol=1e-4)
    assert not reads
    packed = model(ids, position_ids=at).logits
    assert not torch.allclose(packed[1], model(ids, attention_mask=mask | 1, position_ids=at).logits[1], atol=1e-2)


def test_wrong_packing(device):
    model, _ = twins(LlamaForCausalLM, LlamaConfig(**SIZES), device)
    ids, starts = tokens(device)[:1], torch.tensor([0, 20, 49], device=device)
    mask = torch.ones(1, 50, dtype=torch.long, device=device)
    mask[0, :3] = 0
    with pytest.raises(ValueError, match="attention: attention_mask: expected none with cu_seq_lens_q, got one"):
        model(ids, attention_mask=mask, cu_seq_lens_q=starts, cu_seq_lens_k=starts)
    model.config.fretwork_pattern = "strided({seq}, 7)"
    with pytest.raises(ValueError, match=r"cu_seq_lens_q: expected documents from 0 to 50, .*got \[0, 20, 49\]"):
        model(ids, cu_seq_lens_q=starts)
    with pytest.raises(NotImplementedError, match="cu_seq_lens_k: expected cu_seq_lens_q but for causal"):
        model(ids, cu_seq_lens_q=starts, cu_seq_lens_k=starts + 1)
    model.config.fretwork_pattern = "document((20, 30), causal=True)"
    with pytest.raises(ValueError, match=r"fretwork_pattern: expected \{seq\} in a text for cu_seq_lens_q"):
        model(ids, cu_seq_lens_q=starts)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("length", [5, 20])
def test_static_cache(both, device, padding, length):
    """Shorter and longer than the windows."""
    ids, mask = padded(device, [(4, 0), (0, 0)] if padding else [(0, 0), (0, 0)], length)
    options = dict(attention_mask=mask, max_new_tokens=12, min_new_tokens=12, do_sample=False)
    options |= dict(cache_implementation="static", return_dict_in_generate=True, output_scores=True)
    options |= dict(disable_compile=True, pad_token_id=0)
    got, want = (model.generate(ids, **options) for model in both)
    assert torch.equal(got.sequences, want.sequences)
    for x, y in zip(got.scores, want.scores, strict=True):
        assert torch.allclose(x, y, atol=1e-4)


@pytest.mark.parametrize("pattern", ["sinks({seq}, 2, 5)", "strided({seq}, 7)", "causal({seq})"])
@pytest.mark.parametrize("padding", [False, True])
def test_static_cache_with_a_pattern(device, pattern, padding):
    model, _ = twins(LlamaForCausalLM, LlamaConfig(**SIZES, fretwork_pattern=pattern), device)
    ids, mask = padded(device, [(4, 0), (0, 0)] if padding else [(0, 0), (0, 0)], 20)
    options = dict(attention_mask=mask, max_new_tokens=9, min_new_tokens=9, do_sample=False)
    want = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, cache_implementation="static", disable_compile=True, **options), want)


def test_static_window_with_a_pattern_is_refused(device):
    config = MistralConfig(**SIZES, sliding_window=9, fretwork_pattern="sinks({seq}, 2, 5)")
    model, _ = twins(MistralForCausalLM, config, device)
    with pytest.raises(
        NotImplementedError, match=r"past_key_values: expected a cache of all keys .* a static one with"
    ):
        model.generate(tokens(device, 5), max_new_tokens=5, cache_implementation="static", disable_compile=True)


def test_sinks_are_those_of_the_model(both, device):
    """And that they count: without them the results are others."""
    ours, theirs = both
    ids = tokens(device)
    assert torch.allclose(ours(ids).logits, theirs(ids).logits, atol=1e-4)
    learned = [x for name, x in ours.named_parameters() if name.endswith("sinks")]
    if learned:
        with torch.no_grad():
            for x in learned:
                x.add_(3.0)
        assert not torch.allclose(ours(ids).logits, theirs(ids).logits, atol=1e-3)


def block_bias(mask, block, seq):
    at = [torch.arange(n) // b for n, b in zip(seq, block, strict=True)]
    seen = mask[:, :, at[0]][..., at[1]]
    return torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("lists", [False, True])
def test_blocks_of_each_layer(both, device, lists):
    """Against the model's own attention with a whole mask for each layer, gradients and sinks too."""
    ours, theirs = both
    ids, chosen = tokens(device), [torch.rand(2, 4, 2, 4) < 0.5 for _ in range(2)]
    for mask in chosen:  # each query sees its own block: without keys the model's own attention sees them all
        mask[..., 0, :2] = mask[..., 1, 2:] = True

    def choose(q, k, layer):
        assert q.shape == (2, 4, 50, 16) and k.shape == (2, 2, 50, 16)
        mask = chosen[layer].to(device)
        if not lists:
            return mask
        indices = mask.int().argsort(dim=-1, descending=True, stable=True).int()
        return fw.BlockLists(mask.sum(-1, dtype=torch.int32), indices)

    def own(module, args, kwargs):
        kwargs["attention_mask"] = kwargs["attention_mask"] + block_bias(
            chosen[module.layer_idx], (32, 16), (50, 50)
        ).to(device)
        return args, kwargs

    for layer in theirs.model.layers:
        layer.self_attn.register_forward_pre_hook(own, with_kwargs=True)
    ft.use_blocks(ours, choose, (32, 16))
    losses = [model(ids, labels=ids).loss for model in both]
    assert torch.allclose(*losses, atol=1e-5)
    for loss in losses:
        loss.backward()
    for (name, x), y in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if x.grad is not None:
            assert torch.allclose(x.grad, y.grad, atol=2e-5), name
    ft.use_blocks(ours, None)
    assert not any(hasattr(module, "_fretwork_blocks") for module in ours.modules())


def test_blocks_with_padding_packing_and_caches(device):
    """All blocks are no blocks; some give each document and each row what it has alone."""
    ours, theirs = twins(LlamaForCausalLM, LlamaConfig(**SIZES), device)
    ids, mask = padded(device, [(20, 0), (0, 0)])
    ft.use_blocks(ours, lambda q, k, layer: fw.select_blocks(q, k, top_k=9, block=16), 16)
    at = (mask.cumsum(1) - 1).clamp(min=0)
    got, want = (model(ids, attention_mask=mask, position_ids=at).logits for model in (ours, theirs))
    assert torch.allclose(got[mask.bool()], want[mask.bool()], atol=1e-4)
    got = ours(ids[:1], position_ids=positions(device)).logits
    want = torch.cat([theirs(part).logits for part in ids[:1].split(LENGTHS, 1)], 1)
    assert torch.allclose(got, want, atol=1e-4)
    options = dict(max_new_tokens=9, min_new_tokens=9, do_sample=False, attention_mask=mask)
    assert torch.equal(*(model.generate(ids, **options) for model in (ours, theirs)))
    with pytest.raises(NotImplementedError, match="past_key_values: expected a cache that grows for use_blocks"):
        ours.generate(ids, cache_implementation="static", disable_compile=True, **options)
    with pytest.raises(TypeError, match="use_blocks: choose: expected a function or None, got list"):
        ft.use_blocks(ours, [1])


@pytest.mark.parametrize("rows", [1, 2])
def test_compiled(device, reads, rows):
    """One graph for plain calls and one for position ids, of which nothing is read."""
    ours, theirs = twins(LlamaForCausalLM, LlamaConfig(**SIZES), device)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(ours, backend=counter, fullgraph=True, dynamic=True)
    lengths, graphs = (LENGTHS, (30, 2), (9, 9, 9, 9, 9, 9)), []
    for given in (False, True):
        for parts in lengths:
            ids = tokens(device, sum(parts))[:rows]
            at = torch.cat([torch.arange(n, device=device) for n in parts])[None].expand(rows, -1)
            named = {"position_ids": at} if given else {}
            want = theirs(ids, use_cache=False, **named).logits
            assert torch.allclose(compiled(ids, use_cache=False, **named).logits, want, atol=1e-4)
            graphs.append(counter.frame_count)
    assert len({*graphs[:3]}) == len({*graphs[3:]}) == 1
    assert not reads


def test_compiled_with_blocks(device):
    ours, _ = twins(MistralForCausalLM, MistralConfig(**SIZES, sliding_window=9), device)
    ft.use_blocks(ours, lambda q, k, layer: fw.select_blocks(q, k, top_k=2, block=16), 16)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(ours, backend=counter, fullgraph=True, dynamic=True)
    for length in (50, 64, 77):
        ids = tokens(device, length)
        assert torch.equal(compiled(ids, use_cache=False).logits, ours(ids, use_cache=False).logits)
    assert counter.frame_count == 1


def test_compiled_with_cu_seq_lens(device):
    """Other lengths, the longest of them, and another number of documents need no other graph."""
    ours, theirs = twins(LlamaForCausalLM, LlamaConfig(**SIZES), device)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(ours, backend=counter, fullgraph=True, dynamic=True)
    graphs = set()
    for parts in ((20, 30), (30, 2, 7), (9, 11)):
        ids, starts = tokens(device, sum(parts))[:1], torch.tensor([0, *parts], device=device).cumsum(0).int()
        at = torch.cat([torch.arange(n, device=device) for n in parts])[None]
        options = dict(position_ids=at, cu_seq_lens_q=starts, cu_seq_lens_k=starts, use_cache=False)
        got = compiled(ids, **options, max_length_q=max(parts), max_length_k=max(parts)).logits
        assert torch.allclose(got, theirs(ids, position_ids=at, use_cache=False).logits, atol=1e-4)
        graphs.add(counter.frame_count)
    assert len(graphs) == 1


def test_compiled_documents_of_a_pattern(device):
    """Made on the host, where the graph breaks."""
    model, _ = twins(LlamaForCausalLM, LlamaConfig(**SIZES, fretwork_pattern="strided({seq}, 7)"), device)
    ids, at = tokens(device), positions(device)
    want = model(ids, position_ids=at, use_cache=False).logits
    torch._dynamo.reset()
    got = torch.compile(model, backend="eager")(ids, position_ids=at, use_cache=False).logits
    assert torch.allclose(got, want, atol=1e-5)


def test_a_mask_function_of_a_models_own(device):
    """One that is not known is read as a whole mask."""
    seen = functools.partial(lambda first, batch, head, q, k: (k <= q) & (k >= first), 2)
    mask = ft.padding_mask(1, q_length=5, kv_length=5, mask_function=seen, device=device)
    q, k = torch.arange(5, device=device)[:, None], torch.arange(5, device=device)
    assert torch.equal(mask.expand(1, 1, 5, 5)[0, 0], (k <= q) & (k >= 2))
