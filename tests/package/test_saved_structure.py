"""Hugging Face models that are sparse: saved and loaded with their structure."""

import json
import logging

import pytest
import torch

import fretwork as fw
from fretwork import recipes

transformers = pytest.importorskip("transformers")
import fretwork.compat.transformers  # noqa: E402

PLAN = {
    "*.mlp.up_proj": recipes.Monarch(8),
    "*.mlp.*": recipes.TwoFour(),
    "*.q_proj": recipes.TwoFour("transposable", "dense"),
    "lm_head": None,
    "*_proj": recipes.Block(16, 0.5),
}


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def llama(dtype=torch.float32, **options):
    sizes = dict(vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, **options)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_saved_and_loaded(tmp_path, dtype, tied):
    model, ids = llama(dtype, tie_word_embeddings=tied), torch.randint(96, (2, 17))
    fw.sparsify(model, PLAN)
    model.save_pretrained(tmp_path / "one")
    assert not hasattr(model.config, "quantization_config")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    loaded.save_pretrained(tmp_path / "two")  # as often as one likes
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    with torch.no_grad():
        want = model(ids).logits
        for twin in (loaded, again):
            assert torch.equal(twin(ids).logits, want) and fw.structure(twin) == fw.structure(model)
            assert not twin.is_quantized and not hasattr(twin.config, "quantization_config")
    trained = loaded.train()(ids, labels=ids)
    trained.loss.backward()
    assert loaded.model.layers[0].mlp.down_proj.values.grad is not None


def test_a_base_model_of_a_saved_one_and_the_reverse(tmp_path):
    model, ids = llama(), torch.randint(96, (2, 17))
    fw.sparsify(model, {**PLAN, "lm_head": recipes.Block(32, 0.5)})
    model.save_pretrained(tmp_path / "whole")
    base = transformers.AutoModel.from_pretrained(tmp_path / "whole")
    base.save_pretrained(tmp_path / "base")
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        want = model.model(ids).last_hidden_state
        assert torch.equal(base(ids).last_hidden_state, want)
        assert torch.equal(whole.model(ids).last_hidden_state, want)
    assert type(whole.lm_head) is torch.nn.Linear


def test_another_head(tmp_path):
    """transformers names the weights of the old one in its report; its structure is of no use, either."""
    model, ids = llama(), torch.randint(96, (2, 7))
    fw.sparsify(model, {**PLAN, "lm_head": recipes.Block(32, 0.5)})
    model.save_pretrained(tmp_path)
    other = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(other.model(ids).last_hidden_state, model.model(ids).last_hidden_state)


@pytest.mark.parametrize("recipe", [recipes.TwoFour(), recipes.Block(16, 0.5), recipes.Monarch(8)], ids=str)
def test_models_that_look_at_the_weights_of_their_layers(tmp_path, recipe):
    """T5 initializes those of its attention itself, and asks for the dtype of one in every call."""
    sizes = {"vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1, "num_heads": 4}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    model, ids = transformers.T5ForConditionalGeneration(config).eval(), torch.randint(96, (2, 7))
    fw.sparsify(model, {"lm_head": None, "*": recipe})
    model.save_pretrained(tmp_path)
    loaded = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path)
    assert [n for n, _ in loaded.named_parameters()] == [n for n, _ in model.named_parameters()]
    for name, layer in model.named_modules():
        if type(layer).__module__.startswith("fretwork"):
            assert loaded.get_submodule(name).weight is None or layer.weight is not None
    with torch.no_grad():
        want = model(input_ids=ids, decoder_input_ids=ids).logits
        assert torch.equal(loaded(input_ids=ids, decoder_input_ids=ids).logits, want)


class Own(transformers.PreTrainedModel):
    """A model whose class builds sparse layers, one of which no text holds."""

    config_class = transformers.PretrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.block = fw.nn.BlockSparseLinear(32, 32, fw.BlockLayout([[1, 0], [1, 1]], 16))
        self.attn = fw.nn.MultiheadAttention(32, 4, lambda rows, cols: fw.patterns.causal((rows, cols)))
        self.dense = torch.nn.Linear(32, 32)
        self.post_init()

    def _init_weights(self, module):
        pass


def test_a_class_that_builds_sparse_layers(tmp_path, caplog):
    logging.disable(logging.NOTSET)
    model, x = Own(transformers.PretrainedConfig()), torch.randn(2, 5, 32)
    fw.sparsify(model, {"dense": recipes.TwoFour()})
    model.save_pretrained(tmp_path)
    assert "attn: pattern: expected a pattern" in caplog.text
    loaded = Own.from_pretrained(tmp_path)
    assert type(loaded.dense) is fw.nn.SemiSparseLinear
    for name in ("block", "dense"):
        assert torch.equal(loaded.get_submodule(name)(x), model.get_submodule(name)(x))
    assert torch.equal(loaded.attn(x)[0], model.attn(x)[0])


def test_a_dense_model_is_saved_as_ever(tmp_path):
    llama().save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


def test_pairs_of_float32_are_not_read_as_fours(tmp_path):
    model = llama()
    fw.sparsify(model, PLAN)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"mlp.down_proj: kept: expected 1:2 of float32, got 2:4"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)


def test_metadata_that_is_broken_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    model = llama()
    fw.sparsify(model, PLAN)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.metadata"][3, 0] = 0
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"from_pretrained: model.layers.1.mlp.down_proj: TwoFour: metadata: expected"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
