"""Whole models: which layers a plan changes, what it refuses, what stays shared, and the ways there and back."""

import copy
import io
import itertools
import json
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import fretwork as fw
from fretwork import recipes

F32, BF16 = torch.float32, torch.bfloat16


class Tied(nn.Module):
    """An embedding, two projections of one weight, and a head."""

    def __init__(self, head_tied=False):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.up, self.again = nn.Linear(32, 32), nn.Linear(32, 32)
        self.again.weight = self.up.weight
        self.head = nn.Linear(32, 64, bias=False)
        if head_tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.again(self.up(self.embed(ids)).relu()))


PLANS_OF_ENCODERS = {
    "two_four": recipes.TwoFour(),
    "two_four that learns densely": recipes.TwoFour(trainable="dense"),
    "block": recipes.Block(16, 0.5),
    "monarch": recipes.Monarch(8),
}


def mlp(device="cpu", dtype=F32, sizes=(32, 64, 48)):
    layers = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
    return nn.Sequential(*layers).to(device, dtype)


def unchanged(model):
    """A function that checks that a model is what it was, module by module and bit by bit."""
    modules = dict(model.named_modules(remove_duplicate=False))
    tensors = {name: t.clone() for name, t in model.state_dict().items()}

    def check():
        now = dict(model.named_modules(remove_duplicate=False))
        assert now.keys() == modules.keys() and all(now[n] is m for n, m in modules.items())
        assert all(torch.equal(t, tensors[name]) for name, t in model.state_dict().items())

    return check


# Plans


def test_a_recipe_passes_over_what_it_is_not_for():
    model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    window = fw.patterns.sliding_window(24, 4, 4)
    report = fw.sparsify(model, {"*": recipes.Block(16, 0.5), "*attn": recipes.Attention(window)})
    assert {row.name: row.kind for row in report.rows} == {
        "self_attn": "attention",
        "linear1": "block",
        "linear2": "block",
    }
    assert type(model.self_attn.out_proj) is not nn.Linear or model.self_attn.out_proj.weight.shape == (64, 64)
    assert model(torch.randn(2, 24, 64)).shape == (2, 24, 64)


def test_none_keeps_what_is_inside_a_module():
    model = nn.Sequential(mlp(), mlp(sizes=(48, 16)))
    report = fw.sparsify(model, {"0.1": recipes.Monarch(4), "0": None, "*": recipes.TwoFour()})
    assert {row.name: row.kind for row in report.rows} == {"0.1": "monarch", "1.0": "two_four"}


@pytest.mark.parametrize(
    "plan, kind, message",
    [
        (recipes.TwoFour(), TypeError, r'plan: expected a dict.*\{"\*": recipe\}'),
        ({1: recipes.TwoFour()}, TypeError, "plan: expected globs as keys, got 1"),
        ({"*": recipes.TwoFour}, TypeError, r"plan\['\*'\]: expected a recipe"),
        ({"*": "2:4"}, TypeError, r"plan\['\*'\]: expected a recipe"),
        ({"*": recipes.TwoFour(), "2": None}, ValueError, r"plan\['2'\]: expected a glob that matches"),
        (
            {"0": recipes.Block(64, 0.5), "1": recipes.TwoFour()},
            ValueError,
            "sparsify: 0: block: in_features: expected",
        ),
        ({"*": recipes.Monarch(5)}, ValueError, "sparsify: 0: monarch: monarch: "),
        ({"1": recipes.Attention(fw.patterns.full(8))}, ValueError, r"plan\['1'\]: .* is for, got 1, a Linear"),
    ],
)
def test_plans_that_are_refused(plan, kind, message):
    model = mlp()
    check = unchanged(model)
    with pytest.raises(kind, match=message):
        fw.sparsify(model, plan)
    check()


def with_hook():
    model = mlp()
    model[1].register_forward_hook(lambda *_: None)
    return model


def pruned():
    model = mlp()
    prune.l1_unstructured(model[1], "weight", 0.5)
    return model


def filled(value):
    model = mlp()
    model[1].weight.data[3, 4] = value
    return model


def with_other_shape():
    """As pruning rows by hand leaves it."""
    model = mlp()
    model[1].weight = nn.Parameter(model[1].weight[:40].detach())
    return model


def with_more(kind):
    model = mlp()
    if kind == "buffer":
        model[1].register_buffer("steps", torch.zeros(1))
    elif kind == "parameter":
        model[1].gain = nn.Parameter(torch.ones(1))
    else:
        model[1].inside = nn.Linear(64, 4)
    return model


@pytest.mark.parametrize(
    "model, message",
    [
        (with_other_shape, r"weight: expected \(48, 64\) as the layer says, got \(40, 64\)"),
        (lambda: with_more("buffer"), "a weight and a bias alone, got steps"),
        (lambda: with_more("parameter"), "a weight and a bias alone, got gain"),
        (lambda: with_more("module"), "a weight and a bias alone, got inside"),
        (lambda: nn.Sequential(mlp()[0], nn.LazyLinear(48)), "uninitialized"),
        (lambda: nn.Sequential(mlp()[0], parametrizations.weight_norm(mlp()[1])), "parametriz"),
        (with_hook, "hooks"),
        (pruned, "hooks|plain dense parameter"),
        (lambda: filled(math.nan), "finite"),
        (lambda: filled(math.inf), "finite"),
        (lambda: nn.Sequential(mlp()[0], mlp()[1].to("meta")), "meta"),
        (lambda: nn.Sequential(mlp()[0], mlp()[1].to(torch.float8_e5m2)), "expected float64"),
    ],
)
def test_layers_that_are_refused(model, message):
    model = model()
    before = list(model)
    with pytest.raises(ValueError, match=f"sparsify: 1: two_four: .*({message})"):
        fw.sparsify(model, {"*": recipes.TwoFour()})
    assert all(a is b for a, b in zip(before, model, strict=True))


def test_a_layer_is_no_model():
    with pytest.raises(ValueError, match="model: expected a module that holds the layers"):
        fw.sparsify(nn.Linear(8, 8), {"*": recipes.TwoFour()})
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module"):
        fw.sparsify([nn.Linear(8, 8)], {"*": recipes.TwoFour()})


@pytest.mark.parametrize("head", ["with add_bias_kv", "with add_zero_attn", "with another number of heads"])
def test_attention_that_is_refused(head):
    options = {"with add_bias_kv": {"add_bias_kv": True}, "with add_zero_attn": {"add_zero_attn": True}}
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(32, 4, batch_first=True, **options.get(head, {}))})
    with pytest.raises(ValueError, match="sparsify: attn: attention: "):
        fw.sparsify(model, {"*": recipes.Attention([fw.patterns.full(8)] * (3 if "number" in head else 4))})


# What is shared


@pytest.mark.parametrize("recipe", [recipes.TwoFour(), recipes.Block(8, 0.5), recipes.Monarch(4)], ids=str)
@pytest.mark.parametrize("calibrated", [False, True])
def test_one_weight_stays_one_weight(recipe, calibrated):
    model, ids = Tied(), torch.randint(64, (3, 9))
    report = fw.sparsify(model, {"up": recipe, "again": recipe}, calibration=[ids] if calibrated else None)
    own, other = ({n: p for n, p in m.named_parameters() if n != "bias"} for m in (model.up, model.again))
    assert own and own.keys() == other.keys() and all(other[n] is p for n, p in own.items())
    assert model.up.bias is not model.again.bias
    assert report.rows[1].parameters_before == report.rows[1].parameters_after == 32
    twin = fw.restructure(Tied(), fw.structure(model))
    assert all(p is q for p, q in zip(own_weights(twin.up), own_weights(twin.again), strict=True))
    twin.load_state_dict(model.state_dict())
    want = model(ids)
    assert torch.equal(twin(ids), want) and torch.equal(copy.deepcopy(model)(ids), want)
    fw.densify(model)
    assert model.up.weight is model.again.weight
    torch.testing.assert_close(model(ids), want, rtol=1e-4, atol=1e-5)


def own_weights(layer):
    return [p for n, p in layer.named_parameters() if n != "bias"]


@pytest.mark.parametrize(
    "plan, tied",
    [
        ({"head": recipes.TwoFour()}, True),
        ({"up": recipes.TwoFour()}, False),
        ({"up": recipes.TwoFour(), "again": recipes.Block(8, 0.5)}, False),
    ],
)
def test_a_weight_that_is_also_used_elsewhere_is_refused(plan, tied):
    model = Tied(tied)
    check = unchanged(model)
    with pytest.raises(ValueError, match=r"sparsify: (head|up): weight: expected the same recipe .* (embed|again)"):
        fw.sparsify(model, plan)
    check()


def test_biases_and_parameters_of_attention_stay_the_same_objects():
    model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    before = dict(model.named_parameters())
    plan = {"self_attn": recipes.Attention(fw.patterns.full(8)), "*": recipes.TwoFour()}
    fw.sparsify(model, plan)
    after = dict(model.named_parameters())
    kept = [name for name in before if name.startswith("self_attn") or name.endswith("bias")]
    assert all(after[name] is before[name] for name in kept) and len(kept) > 6


# Scores


def test_block_keeps_at_least_one_block_of_each_row():
    model = mlp(sizes=(64, 64))
    model[0].weight.data[:16] *= 1e-3
    fw.sparsify(model, {"*": recipes.Block(16, 0.0)})
    assert model[0].layout.nnz == 4 and model[0].layout.mask().any(-1).all()


@pytest.mark.parametrize("recipe", [recipes.TwoFour(), recipes.Block(8, 0.5), recipes.Monarch(4)], ids=str)
@pytest.mark.parametrize("of_weight, of_input", [(2.0**-80, 1), (2.0**80, 1), (1, 2.0**-80), (1, 2.0**64)])
def test_nothing_depends_on_the_size_of_weights_or_inputs(recipe, of_weight, of_input):
    """Squares of such numbers leave float32."""
    model, x = mlp(sizes=(32, 48)), torch.randn(20, 32) * torch.logspace(-1, 1, 32)
    scaled = copy.deepcopy(model)
    scaled[0].weight.data *= of_weight
    (plain,) = fw.sparsify(model, {"*": recipe}, calibration=[x]).rows
    (row,) = fw.sparsify(scaled, {"*": recipe}, calibration=[x * of_input]).rows
    assert (row.error, row.output_error) == pytest.approx((plain.error, plain.output_error), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, F32, torch.float16, BF16], ids=str)
@pytest.mark.parametrize("trainable", ["values", "dense"])
@pytest.mark.parametrize("how", ["magnitude", "transposable"])
def test_calibrated_two_four(dtype, trainable, how, device):
    if dtype == torch.float64 and device.type != "cpu":
        pytest.skip("float64 is for the CPU")
    model = mlp(device, dtype, (32, 64))
    weight, x = model[0].weight.detach().clone(), torch.randn(50, 32, device=device, dtype=dtype)
    x[:, ::4] *= 30
    x[:, 1] = 0
    (row,) = fw.sparsify(model, {"*": recipes.TwoFour(how, trainable)}, calibration=[x]).rows
    dense, group = model[0].to_dense(), 2 if dtype == F32 else 4
    kept = dense != 0
    assert torch.equal(dense, torch.where(kept, weight, 0)) and kept.sum() == weight.numel() // 2
    score = weight.double().abs() * x.double().norm(dim=0)
    if how == "transposable":
        assert fw.two_four.check(dense, 0)[0] and fw.two_four.check(dense, 1)[0]
        plain = fw.two_four.prune(weight, transposable=True) != 0
        assert score[kept].sum() > score[plain].sum()
    else:
        best = score.unflatten(1, (-1, group)).sort(dim=-1).values[..., group // 2 :]
        assert score[kept].sum().item() == pytest.approx(best.sum().item(), rel=1e-6)
    assert row.output_error < row.error
    assert (model[0].prune, model[0].trainable) == (how, trainable)


@pytest.mark.parametrize("dtype", [torch.float64, F32, torch.float16], ids=str)
def test_calibrated_factors_are_balanced_and_finite(dtype):
    """Also where a feature is never seen, and where features differ by many orders."""
    model = mlp(dtype=dtype, sizes=(32, 48))
    weight = model[0].weight.detach().clone()
    x = torch.randn(40, 32, dtype=dtype) * torch.logspace(-3, 2, 32, dtype=dtype)
    x[:, 5] = 0
    (row,) = fw.sparsify(model, {"*": recipes.Monarch(4)}, calibration=[x]).rows
    assert all(w.isfinite().all() for w in model[0].weights) and 0 < row.output_error < row.error < 1
    first, second = (w.double().norm().item() for w in model[0].weights)
    assert first == pytest.approx(second, rel=1e-2)
    seen = model[0].to_dense()[:, 5].double().norm() / weight[:, 5].double().norm()
    assert seen > 0.01


@pytest.mark.parametrize("calibrated", [False, True])
def test_a_default_device_changes_nothing(calibrated):
    """New layers are where the old ones are."""
    model, calls = mlp(sizes=(64, 64, 64, 64)), [torch.randn(5, 64)]
    plan = {"0": recipes.TwoFour("transposable"), "1": recipes.Block(16, 0.5), "2": recipes.Monarch(8)}
    with torch.device("meta"):
        fw.sparsify(model, plan, calls if calibrated else None)
        twin = fw.restructure(mlp("meta", sizes=(64, 64, 64, 64)), fw.structure(model))
    y = model(calls[0])
    assert y.device.type == "cpu" and all(p.is_meta for p in twin.parameters())
    twin.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(twin(calls[0]), y)
    with torch.device("meta"):
        fw.densify(model)
    torch.testing.assert_close(model(calls[0]), y)


def test_zero_weights_have_no_error():
    model = mlp()
    model[0].weight.data.zero_()
    report = fw.sparsify(model, {"0": recipes.Monarch(4)}, calibration=[torch.randn(3, 32)])
    assert (report.rows[0].error, report.rows[0].output_error) == (0.0, 0.0)


@pytest.mark.parametrize("recipe", [recipes.TwoFour(), recipes.Block(8, 0.5), recipes.Monarch(4)], ids=str)
def test_inputs_of_zeros_leave_the_choice_to_the_weight(recipe):
    model = mlp()
    plain = copy.deepcopy(model)
    fw.sparsify(plain, {"0": recipe})
    (row,) = fw.sparsify(model, {"0": recipe}, calibration=[torch.zeros(3, 32)]).rows
    assert torch.equal(model[0].to_dense(), plain[0].to_dense()) and row.output_error == 0


class Sometimes(nn.Module):
    """A layer that no input reaches, and one that is given its input by name."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x):
        return self.used(input=x) if len(x) else self.unused(x)


def test_calibration_that_does_not_reach_a_layer():
    model, x = Sometimes(), torch.randn(7, 32)
    plain = copy.deepcopy(model)
    fw.sparsify(plain, {"*": recipes.TwoFour()})
    report = fw.sparsify(model, {"*": recipes.TwoFour()}, calibration=[x, x[:0]])
    errors = {row.name: row.output_error for row in report.rows}
    assert errors["used"] > 0 and errors["unused"] is None and "—" in str(report)
    assert torch.equal(model.unused.to_dense(), plain.unused.to_dense())
    assert json.loads(report.to_json())["rows"][1]["output_error"] is None


@pytest.mark.parametrize(
    "calibration, kind, message",
    [
        (torch.randn(3, 32), TypeError, r"calibration: expected an iterable .* got a Tensor; \[x\]"),
        ({"input": torch.randn(3, 32)}, TypeError, "calibration: expected an iterable"),
        ([], ValueError, "calibration: expected at least one input, got none"),
        ([3.0], TypeError, r"calibration\[0\]: expected a tensor"),
        (
            [torch.full((3, 32), math.nan)],
            ValueError,
            "calibration: expected inputs that are finite where they reach 0",
        ),
        ([torch.randn(3, 31)], RuntimeError, "shapes"),
    ],
)
def test_calibration_that_is_refused(calibration, kind, message):
    model = mlp().train()
    check = unchanged(model)
    with pytest.raises(kind, match=message):
        fw.sparsify(model, {"*": recipes.TwoFour()}, calibration=calibration)
    check()
    assert all(m.training and not m._forward_pre_hooks for m in model.modules())


def test_calibration_under_autocast_and_in_lists():
    model, x = mlp(), torch.randn(9, 32)
    twin = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        lowered = fw.sparsify(model, {"0": recipes.TwoFour()}, calibration=[[x]])
    plain = fw.sparsify(twin, {"0": recipes.TwoFour()}, calibration=[(x,)])
    assert lowered.to_json() == plain.to_json()


# torch's encoder and attention


@pytest.mark.parametrize("recipe", [*PLANS_OF_ENCODERS.values()], ids=[*PLANS_OF_ENCODERS])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("which", ["*", "layers.1.*"])
def test_an_encoder_with_a_padding_mask(recipe, grad, which):
    """torch's encoder packs padded batches into nested tensors at inference, if its layers are dense."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 8, 64)
    dense, hidden = copy.deepcopy(model), torch.arange(8) >= torch.tensor([[8], [5]])
    report = fw.sparsify(model, {which: recipe}, calibration=[{"src": x, "src_key_padding_mask": hidden}])
    assert all(0 < row.output_error < 1 for row in report.rows)
    twin = fw.restructure(copy.deepcopy(dense), fw.structure(model))
    twin.load_state_dict(model.state_dict())
    for name in [row.name for row in report.rows]:
        dense.get_submodule(name).weight.data = model.get_submodule(name).to_dense().detach()
    with torch.set_grad_enabled(grad):
        want = dense(x, src_key_padding_mask=hidden)
        for sparse in (model, twin, copy.deepcopy(model)):
            got = sparse(x, src_key_padding_mask=hidden)
            torch.testing.assert_close(got[~hidden], want[~hidden], rtol=1e-3, atol=1e-3)
        assert fw.densify(model)(x, src_key_padding_mask=hidden).shape == x.shape


def test_calibration_does_not_count_rows_of_padding_that_torch_packs_away():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 1).eval()
    x, hidden = torch.randn(2, 8, 32), torch.arange(8) >= torch.tensor([[8], [5]])
    twin = copy.deepcopy(model)
    calls = [{"src": x, "src_key_padding_mask": hidden}]
    report = fw.sparsify(model, {"*": recipes.Block(8, 0.5)}, calibration=calls)
    apart = [x[:1], x[1:, :5]]
    want = fw.sparsify(twin, {"*": recipes.Block(8, 0.5)}, calibration=apart)
    for row, same in zip(report.rows, want.rows, strict=True):
        assert row.output_error == pytest.approx(same.output_error, rel=1e-4)


@pytest.mark.parametrize("recipe", [recipes.TwoFour(), recipes.Block(16, 0.5), recipes.Monarch(8)], ids=str)
@pytest.mark.parametrize("kdim", [64, 32])
def test_the_output_projection_of_our_attention(recipe, kdim):
    """It is a layer like others, while torch's attention reads the weight of its own."""
    model = nn.ModuleDict({"attn": fw.nn.MultiheadAttention(64, 4, fw.patterns.causal(8), kdim=kdim)})
    dense, x, key = copy.deepcopy(model), torch.randn(2, 8, 64), torch.randn(2, 8, kdim)
    (row,) = fw.sparsify(model, {"*": recipe}).rows
    assert row.name == "attn.out_proj"
    dense["attn"].out_proj.weight.data = model["attn"].out_proj.to_dense().detach()
    value = torch.randn(2, 8, 64)
    want = dense["attn"](x, key, value)[0]
    torch.testing.assert_close(model["attn"](x, key, value)[0], want, rtol=1e-4, atol=1e-5)
    if kdim == 64:  # torch's attention has no other place for it
        twin = fw.restructure(
            nn.ModuleDict({"attn": nn.MultiheadAttention(64, 4, batch_first=True)}), fw.structure(model)
        )
        twin.load_state_dict(model.state_dict())


# The report


def test_the_report_reads_as_a_table():
    report = fw.sparsify(mlp(), {"0": recipes.TwoFour(), "1": recipes.Block(16, 0.5)})
    lines = str(report).splitlines()
    assert repr(report) == str(report) and len(lines) == 4
    assert lines[0].split() == ["name", "kind", "shape", "before", "after", "error"]
    assert lines[1].split()[:5] == ["0", "two_four", "64×32", "2,112", "1,088"]
    assert lines[-1].split() == ["total", "5,232", f"{report.parameters_after:,}"]
    assert len({len(line) for line in lines[:-1]}) == 1 and "output_error" not in report.to_json()
    assert str(fw.sparsify(mlp(), {})).splitlines()[-1].split() == ["total", "0", "0"]


# There and back


def test_structure_of_convolutions_and_patterns():
    layout = fw.BlockLayout.for_conv2d(torch.randint(2, (2, 1, 3, 3)).clamp_(min=1), 16)
    window = [fw.patterns.sliding_window(9, 2, n) for n in range(4)]
    model = nn.ModuleDict(
        {
            "conv": fw.nn.BlockSparseConv2d(16, 32, 3, layout, padding=1),
            "attn": fw.nn.MultiheadAttention(32, 4, window, batch_first=False),
            "ks": fw.nn.KSLinear([(2, 3, 4, 5)], algo="einsum", bias=False),
        }
    )
    fresh = nn.ModuleDict(
        {
            "conv": nn.Conv2d(16, 32, 3, padding=1),
            "attn": nn.MultiheadAttention(32, 4),
            "ks": nn.Linear(40, 30, bias=False),
        }
    )
    told = json.loads(json.dumps(fw.structure(model)))
    assert fw.restructure(fresh, told) is fresh and fw.structure(fresh) == told
    fresh.load_state_dict(model.state_dict())
    x, image = torch.randn(9, 2, 32), torch.randn(2, 16, 5, 6)
    assert torch.equal(fresh["attn"](x)[0], model["attn"](x)[0]) and fresh["ks"].algo == "einsum"
    want = model["conv"](image)
    assert torch.equal(fresh["conv"](image), want)
    fw.densify(model)
    assert type(model["conv"]) is nn.Conv2d and type(model["attn"]) is fw.nn.MultiheadAttention
    torch.testing.assert_close(model["conv"](image), want, rtol=1e-4, atol=1e-5)


def wrong_structures():
    told = fw.structure(sparse := mlp())
    fw.sparsify(sparse, {"1": recipes.TwoFour()})
    told = fw.structure(sparse)
    layer = told["layers"]["1"]
    yield None, TypeError, "a dict that fw.structure made"
    yield {**told, "version": 2}, ValueError, "version 1, got 2"
    yield {**told, "version": "1"}, ValueError, "version 1, got '1'"
    for change, message in [
        ({"kind": "3:5"}, "structure: 1: kind: expected two_four or .* got '3:5'"),
        ({"kind": ["block"]}, r"structure: 1: kind: expected two_four or .* got \['block'\]"),
        ({"prune": 0}, "1: SemiSparseLinear: prune: expected .* got 0"),
        ({"shape": [48, 65]}, r"1: shape: expected \[48, 65\], got \[48, 64\]"),
        ({"bias": False}, "1: bias: expected False, got True"),
        ({"prune": "random"}, "1: .*prune"),
        ({"kept": "2:4"}, "1: kept: expected 2:4, got 1:2 of float32"),
        ({"more": 1}, "1: more: expected 1, got None"),
    ]:
        yield {**told, "layers": {"0": {**layer, "shape": [64, 32]}, "1": {**layer, **change}}}, ValueError, message
    yield (
        {**told, "layers": {"0": {"kind": "block"}}},
        ValueError,
        "structure: 0: expected a value for layout, got none",
    )
    yield {**told, "layers": {"0": {"kind": "attention"}}}, ValueError, "0: expected a torch.nn.Multihead.* got Linear"
    yield {**told, "layers": {"5": layer}}, ValueError, "layers that the model has, such as 5"


@pytest.mark.parametrize("told, kind, message", list(wrong_structures()))
def test_restructure_refuses(told, kind, message):
    model = mlp()
    check = unchanged(model)
    with pytest.raises(kind, match=message):
        fw.restructure(model, told)
    check()


def test_restructure_of_a_layer_by_itself():
    told = fw.structure(fw.nn.SemiSparseLinear(8, 8))
    with pytest.raises(ValueError, match="dense_model: expected a module that holds the layers, got a Linear itself"):
        fw.restructure(nn.Linear(8, 8), told)


def test_restructure_on_meta():
    model = mlp()
    plan = {"0": recipes.TwoFour(), "1": recipes.Monarch(4)}
    fw.sparsify(model, plan)
    with torch.device("meta"):
        fresh = fw.restructure(mlp("meta"), fw.structure(model))
    fresh = fresh.to_empty(device="cpu")
    fresh.load_state_dict(model.state_dict())
    x = torch.randn(3, 32)
    assert torch.equal(fresh(x), model(x))


def test_structure_cannot_hold_a_function():
    model = nn.ModuleDict({"attn": fw.nn.MultiheadAttention(32, 4, lambda rows, cols: fw.patterns.full((rows, cols)))})
    with pytest.raises(NotImplementedError, match="structure: attn: pattern: "):
        fw.structure(model)


def test_densify_refuses_features_that_come_first():
    model = nn.Sequential(fw.nn.KSLinear([(1, 4, 4, 2)], bs_last=True))
    check = unchanged(model)
    with pytest.raises(NotImplementedError, match="densify: 0: "):
        fw.densify(model)
    check()


class Doubled(fw.nn.BlockSparseLinear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_layers_that_derive_from_ours_or_have_hooks_are_not_taken_for_them():
    model = nn.Sequential(Doubled(16, 16, fw.BlockLayout([[1]], 16)))
    check = unchanged(model)
    for call in (fw.structure, fw.densify):
        with pytest.raises(NotImplementedError, match=f"{call.__name__}: 0: expected a layer .* got .*Doubled"):
            call(model)
    check()
    sparse, dense = mlp(), mlp()
    fw.sparsify(sparse, {"*": recipes.TwoFour()})
    told = fw.structure(sparse)
    for model, call in ((sparse, fw.densify), (dense, lambda model: fw.restructure(model, told))):
        model[1].register_forward_hook(lambda *_: None)
        check = unchanged(model)
        with pytest.raises(ValueError, match="1: expected a module without hooks"):
            call(model)
        check()


def test_a_line_on_a_terminal_says_how_far_it_is(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    ticks = itertools.count(0, 2)
    monkeypatch.setattr("time.monotonic", lambda: next(ticks))
    for written in (Terminal(), io.StringIO()):
        monkeypatch.setattr("sys.stderr", written)
        fw.sparsify(mlp(), {"*": recipes.Block(16, 0.5)})
        said = "sparsify: 1 of 2 layers are made, 1 is next" in written.getvalue()
        assert said == written.isatty() and written.getvalue().endswith("\r" if said else "")
        assert said or not written.getvalue()


def test_ddp(tmp_path):
    """Afterwards it can be wrapped; before that a wrapped model is refused."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        model = mlp()
        with pytest.raises(ValueError, match="DistributedDataParallel; wrap it afterwards"):
            fw.sparsify(nn.parallel.DistributedDataParallel(model), {"*": recipes.TwoFour()})
        fw.sparsify(model, {"0": recipes.TwoFour(), "1": recipes.Monarch(4)})
        wrapped = nn.parallel.DistributedDataParallel(model)
        wrapped(torch.randn(3, 32)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
    finally:
        torch.distributed.destroy_process_group()
