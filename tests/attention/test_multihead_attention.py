"""Multi-head attention over a pattern against torch's with the mask, and layers' structure in saved weights."""

import copy
import io

import pytest
import torch
from conftest import TOLERANCE, assert_close, dtypes_of

import fretwork as fw

P = fw.patterns


def stirred(module):
    """Weights of a size that gives attention peaks, and biases that are not zero."""
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape) * (0.5 if p.dim() == 1 else 1.2 * p.shape[-1] ** -0.5))
    return module


def pair(pattern, device, dtype=torch.float32, **options):
    """A dense module in float64 on the CPU, and ours with its weights."""
    dense = stirred(torch.nn.MultiheadAttention(32, 4, **{"batch_first": True} | options))
    ours = fw.nn.MultiheadAttention.from_dense(dense, pattern).to(device, dtype)
    wide = copy.deepcopy(dense).double()
    wide.load_state_dict({name: p.detach().cpu().double() for name, p in ours.state_dict().items()})
    return wide, ours


def check(wide, ours, inputs, hidden, **call):
    """Output and all gradients of one input for all, or three; `hidden`, as torch's attn_mask, is what is not seen."""
    dtype, device = ours.out_proj.weight.dtype, ours.out_proj.weight.device
    inputs = [x.to(dtype) for x in inputs]
    mine = [x.to(device).requires_grad_() for x in inputs]
    exact = [x.double().requires_grad_() for x in inputs]
    got = ours(*mine, **call)[0]
    want = wide(*(exact * 3)[:3], attn_mask=hidden, need_weights=False)[0]
    assert_close(got, want, dtype)
    upstream = torch.randn(want.shape).to(dtype)
    arrived = torch.autograd.grad(got, [*mine, *ours.parameters()], upstream.to(device))
    wanted = torch.autograd.grad(want, [*exact, *wide.parameters()], upstream.double())
    floor = max(w.abs().max().item() for w in wanted) / 20
    for g, w in zip(arrived, wanted, strict=True):
        error = (g.cpu().double() - w).abs().max().item() / max(w.abs().max().item(), floor)
        assert error <= 4 * TOLERANCE[dtype], error


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("pattern", [P.causal(21), P.strided(21, 4), P.longformer(21, 2, [0, 9])], ids=lambda p: p.text)
def test_as_torch_with_the_mask(pattern, batch_first, device):
    for dtype in dtypes_of(device):
        wide, ours = pair(pattern, device, dtype, batch_first=batch_first)
        check(wide, ours, [torch.randn((3, 21, 32) if batch_first else (21, 3, 32))], ~pattern.mask())


@pytest.mark.parametrize(
    "options", [{"kdim": 20, "vdim": 24}, {"bias": False}, {"vdim": 40, "batch_first": False}], ids=str
)
def test_other_keys_and_values(options, device):
    pattern = P.dilated((9, 14), 3, 2) | P.causal((9, 14))
    wide, ours = pair(pattern, device, **options)
    sizes = (9, 32), (14, options.get("kdim", 32)), (14, options.get("vdim", 32))
    inputs = [torch.randn((2, s, e) if ours.batch_first else (s, 2, e)) for s, e in sizes]
    check(wide, ours, inputs, ~pattern.mask())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
def test_a_finite_number_hides_nothing(name, dtype, device):
    """Added to every key it changes nothing, whatever the layer's dtype can hold."""
    for own in dtypes_of(device):
        _, ours = pair(P.sliding_window(12, 3, 0), device, own)
        x = torch.randn(2, 12, 32, device=device).to(own)
        for number in (-1e9, torch.finfo(dtype).min):
            mask = torch.full((2, 12) if name[0] == "k" else (12, 12), number, dtype=dtype, device=device)
            got = ours(x * 0, **{name: mask})[0]  # equal scores, which such a number does not round away
            assert_close(got, ours(x * 0)[0].detach().double(), own)


def test_two_masks_of_floats(device):
    """Are added without a loss of digits; and in fp16 without infinity, which hides a key that neither hides."""
    for own in dtypes_of(device):
        wide, ours = pair(P.full(12), device, own)
        x = torch.randn(2, 12, 32)
        added, padding = torch.randn(12, 12), torch.randn(2, 12)
        masks = {"attn_mask": added.to(device), "key_padding_mask": padding.to(device)}
        both = (added.double() + padding.double()[:, None]).repeat_interleave(4, 0)
        want = wide(*[x.to(own).double()] * 3, attn_mask=both, need_weights=False)[0]
        assert_close(ours(x.to(device, own), **masks)[0], want.detach(), own)
    _, ours = pair(P.full(12), device, torch.float16)
    x, low = torch.randn(2, 12, 32, device=device).half(), torch.finfo(torch.float16).min
    masks = {"attn_mask": torch.full((12, 12), low), "key_padding_mask": torch.full((2, 12), low)}
    got = ours(x * 0, **{name: mask.to(device).half() for name, mask in masks.items()})[0]
    assert_close(got, ours(x * 0)[0].detach().double(), torch.float16)


@pytest.mark.parametrize("function", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_pattern_for_each_head(function, is_causal, device):
    made = [P.causal(13), P.full(13), P.sliding_window(13, 3, 1), P.dilated(13, 3, 2)]
    wide, ours = pair((lambda sq, sk: made) if function else made, device)
    seen = torch.stack([p.mask() for p in made])
    seen = seen & torch.ones(13, 13).tril().bool() if is_causal else seen
    check(wide, ours, [torch.randn(2, 13, 32)], ~seen.repeat(2, 1, 1), is_causal=is_causal)


def test_fewer_key_heads_are_shared(device):
    """As a module of as many key heads as query heads, with rows of the key and value weights repeated."""
    pattern, x = P.strided(15, 4), torch.randn(2, 15, 32, device=device)
    shared = stirred(fw.nn.MultiheadAttention(32, 4, pattern, num_kv_heads=2, device=device))
    plain = fw.nn.MultiheadAttention(32, 4, pattern, device=device)
    state = shared.state_dict()
    spread = lambda w: w.unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1)  # noqa: E731
    weights = [state["q_proj_weight"], spread(state["k_proj_weight"]), spread(state["v_proj_weight"])]
    biases = state["in_proj_bias"].split([32, 16, 16])
    joined = {"in_proj_weight": torch.cat(weights), "in_proj_bias": torch.cat([biases[0], *map(spread, biases[1:])])}
    plain.load_state_dict(joined | {name: p for name, p in state.items() if name.startswith("out_proj")})
    assert_close(shared(x)[0], plain(x)[0].double(), torch.float32)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("replaced", ["before", "after"])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors")
def test_in_an_encoder(mode, replaced, device):
    """In eval mode torch would compute dense attention itself, or pack the padded batch into a nested tensor."""
    layer = stirred(torch.nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True))
    pattern, x = P.strided(20, 4), torch.randn(3, 20, 32)
    padding = torch.tensor([[False] * 17 + [True] * 3, [False] * 13 + [True] * 7, [False] * 6 + [True] * 14])
    wide, want = copy.deepcopy(layer).double(), x.double()
    for _ in range(2):
        want = wide(want, src_mask=~pattern.mask(), src_key_padding_mask=padding)
    swap = lambda mha: fw.nn.MultiheadAttention.from_dense(mha, pattern)  # noqa: E731
    if replaced == "before":
        layer.self_attn = swap(layer.self_attn)
    encoder = torch.nn.TransformerEncoder(layer, 2).to(device).eval()
    for layer in encoder.layers if replaced == "after" else []:
        layer.self_attn = swap(layer.self_attn)
    with mode():
        got = encoder(x.to(device), src_key_padding_mask=padding.to(device))
    assert_close(got[~padding.to(device)], want[~padding], torch.float32)


def test_a_causal_pattern_compiles(device):
    torch._dynamo.reset()
    attn, x = fw.nn.MultiheadAttention(32, 4, P.dilated(12, 2, 2), device=device), torch.randn(2, 12, 32, device=device)
    fast = torch.compile(attn, fullgraph=True, backend="aot_eager")
    for call in ({}, {"is_causal": True}, {"key_padding_mask": torch.rand(2, 12, device=device) < 0.3}):
        assert_close(fast(x, **call)[0], attn(x, **call)[0].double(), torch.float32)


def test_starts_as_torchs():
    for options in ({}, {"kdim": 20}, {"bias": False}):
        torch.manual_seed(3)
        ours = fw.nn.MultiheadAttention(32, 4, P.full(8), **options).state_dict()
        torch.manual_seed(3)
        theirs = torch.nn.MultiheadAttention(32, 4, **options).state_dict()
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], p) for name, p in theirs.items())


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda m, x: m(x[0, 0]), "query: expected"),
        (lambda m, x: m(x.double()), "query: expected torch.float32"),
        (lambda m, x: m(x, x[:1]), "key: expected a batch of 2"),
        (lambda m, x: m(x, x[0]), "key: expected"),
        (lambda m, x: m(x, x, x[:, :5]), "value: expected"),
        (lambda m, x: m(x, attn_mask=x[0, :, :8] > 0), "attn_mask: expected"),
        (lambda m, x: m(x, attn_mask=torch.ones(8, 8).long()), "attn_mask: expected bool or floats"),
        (lambda m, x: m(x, key_padding_mask=torch.ones(8).bool()), "key_padding_mask: expected"),
        (lambda m, x: m(x[0], key_padding_mask=torch.ones(2, 8).bool()), "key_padding_mask: expected"),
        (lambda m, x: m(x, key_padding_mask=[True]), "key_padding_mask: expected a torch.Tensor"),
        (lambda m, x: m(torch.nested.as_nested_tensor([x[0]]), x), "query: expected a nested tensor without other"),
        (lambda m, x: m(x, need_weights=True), "need_weights: expected False"),
    ],
)
def test_refused(call, message):
    attn = fw.nn.MultiheadAttention(32, 4, P.causal(9))
    with pytest.raises((RuntimeError, TypeError, NotImplementedError), match=f"MultiheadAttention: {message}.*, got"):
        call(attn, torch.randn(2, 9, 32))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "pattern", [P.full(9), [P.full(9), P.causal(9)], lambda sq, sk: P.full(9)], ids=["one", "heads", "function"]
)
def test_other_lengths_are_refused(pattern, is_causal):
    attn = fw.nn.MultiheadAttention(32, 2, pattern)
    with pytest.raises(RuntimeError, match=r"attention: pattern: expected shape \(8, 8\).*, got \(9, 9\)"):
        attn(torch.randn(2, 8, 32), is_causal=is_causal)


# Structure in saved weights


def layouts():
    return fw.BlockLayout(torch.eye(4).int(), 8), fw.BlockLayout(torch.eye(4).flip(0).int(), 8)


MAKERS = {
    "block": [lambda p=p: fw.nn.BlockSparseLinear(32, 32, p) for p in layouts()],
    "kronecker": [lambda p=p: fw.nn.KSLinear([p]) for p in ((2, 4, 4, 4), (4, 4, 4, 2))],
    "attention": [lambda p=p: fw.nn.MultiheadAttention(32, 4, p) for p in (P.causal(8), P.full(8))],
    "heads": [
        lambda p=p: fw.nn.MultiheadAttention(32, 4, p) for p in ([P.full(8)] * 4, [P.full(8)] * 3 + [P.causal(8)])
    ],
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("inside", [False, True])
def test_weights_of_another_structure_are_refused(kind, inside):
    wrap = (lambda m: torch.nn.Sequential(torch.nn.ReLU(), m)) if inside else (lambda m: m)
    one, same, other = (wrap(make()) for make in (MAKERS[kind][0], *MAKERS[kind]))
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    same.load_state_dict(saved)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=r"\w+: state_dict: expected weights of .+, got those of .+"):
            other.load_state_dict(saved, strict=strict)
    if kind != "kronecker":  # where shapes tell
        other.load_state_dict(dict(saved))  # a plain dict says nothing of structure


def test_the_message_names_both():
    one, other = (make() for make in MAKERS["attention"])
    with pytest.raises(RuntimeError, match=r"expected weights of full\(8\), got those of causal\(8\)"):
        other.load_state_dict(one.state_dict())
    long = [fw.nn.BlockSparseLinear(512, 512, fw.BlockLayout(torch.rand(64, 64) < 0.3, 8)) for _ in range(2)]
    long[1].weight = torch.nn.Parameter(torch.zeros_like(long[0].weight))
    with pytest.raises(RuntimeError, match="crc32") as caught:
        long[1].load_state_dict(long[0].state_dict())
    assert len(str(caught.value)) < 700


def test_a_function_is_not_saved():
    attn = fw.nn.MultiheadAttention(32, 4, lambda sq, sk: P.causal((sq, sk)))
    fw.nn.MultiheadAttention(32, 4, P.full(8)).load_state_dict(attn.state_dict())
    attn.load_state_dict(fw.nn.MultiheadAttention(32, 4, P.full(8)).state_dict())
    torch.nn.MultiheadAttention(32, 4).load_state_dict(attn.state_dict())


def test_a_sequence_of_one_is_for_all_heads(device):
    pattern, x = P.sliding_window(9, 2, 1), torch.randn(2, 9, 32, device=device)
    one = fw.nn.MultiheadAttention(32, 4, [pattern]).to(device)
    assert one.pattern == pattern and fw.structure(one)["layers"][""]["pattern"] == pattern.text
    made = fw.nn.MultiheadAttention(32, 4, lambda rows, cols: [pattern]).to(device)
    made.load_state_dict(one.state_dict())
    assert torch.equal(made(x)[0], one(x)[0])
    q = torch.randn(2, 4, 9, 8, device=device)
    assert torch.equal(fw.attention(q, q, q, [pattern]), fw.attention(q, q, q, pattern))
