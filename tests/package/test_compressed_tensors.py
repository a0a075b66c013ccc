"""2:4 checkpoints of compressed-tensors, packed here index by index as its formats say, and read back.

Where the package is installed (0.14 is the last release that writes 2:4), its own compressors pack, too.
"""

import importlib
import math

import pytest
import torch
from torch import nn

import fretwork as fw
from fretwork.compat import compressed_tensors as ct

save_file = pytest.importorskip("safetensors.torch").save_file


def bitmask_of(weight, kept):
    """compressed, bitmask and shape: bits from the lowest up."""
    bits = torch.zeros(weight.shape[0], math.ceil(weight.shape[1] / 8), dtype=torch.uint8)
    for row, col in kept.nonzero().tolist():
        bits[row, col // 8] |= 1 << col % 8
    values = weight[kept].view(weight.shape[0], weight.shape[1] // 2)
    return {"compressed": values, "bitmask": bits, "shape": torch.tensor(weight.shape).reshape(-1, 1)}


def two_of_four(rows, cols):
    """A random mask with two of every four."""
    return torch.rand(rows, cols // 4, 4).argsort(-1).argsort(-1).flatten(1) < 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("rows, cols", [(3, 4), (5, 12), (16, 64), (0, 8)])
def test_bitmask(dtype, rows, cols, device):
    kept = two_of_four(rows, cols)
    weight = torch.randint(-9, 10, (rows, cols)).where(kept, 0).float()  # some of the kept ones are zero
    parts = {name: t.to(device) for name, t in bitmask_of(weight.to(dtype).float(), kept).items()}
    s = ct.from_bitmask(parts["compressed"].to(dtype), parts["bitmask"], parts["shape"])
    assert s.dtype == dtype and tuple(s.shape) == (rows, cols) and s.values.device.type == device.type
    assert torch.equal(s.to_dense().cpu().float(), weight)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"bitmask": torch.tensor([[0x37], [0x33]], dtype=torch.uint8)},
            r"bitmask: expected two bits .* got 3 for the group at \(0, 0\)",
        ),
        (
            {"bitmask": torch.tensor([[0x33], [0x31]], dtype=torch.uint8)},
            r"bitmask: expected two bits .* got 1 for the group at \(1, 0\)",
        ),
        ({"bitmask": torch.zeros(2, 2, dtype=torch.uint8)}, r"bitmask: expected uint8 \(2, 1\)"),
        ({"compressed": torch.ones(2, 3).half()}, r"compressed: expected half of \(2, 8\)"),
        ({"compressed": torch.ones(2, 4)}, "compressed: expected a 16-bit .* got float32"),
        ({"shape": [2, 8, 1]}, "shape: expected two sizes"),
        ({"shape": None}, "shape: expected two sizes, got None"),
    ],
)
def test_bitmask_refuses(change, message):
    good = dict(compressed=torch.ones(2, 4).half(), bitmask=torch.full((2, 1), 0x33, dtype=torch.uint8), shape=[2, 8])
    ct.from_bitmask(**good)
    with pytest.raises(ValueError, match=f"from_bitmask: {message}"):
        ct.from_bitmask(**{**good, **change})


def marlin_words(words):
    """Metadata (N, K/16) as CUTLASS's reorder_meta has it, but for rows: the sparse Marlin kernels have theirs."""
    n, cols = words.shape
    flat = torch.zeros(n * cols, dtype=words.dtype)
    for row in range(n):
        for col in range(cols):
            r, c = row // 64 * 64 + row % 2 * 2 + row % 8 // 4 + row % 4 // 2 * 32 + row % 64 // 8 * 4, col
            if r % 2 != c % 2:
                r, c = (r + 1, c - 1) if c % 2 else (r - 1, c + 1)
            flat[c // 2 * 2 * n + 2 * r + c % 2] = words[row, col]
    return flat.view(cols // 2, 2 * n)


def marlin_of(codes, scales, bits):
    """weight_packed, scale_packed and meta of 2:4 codes (N, K) and scales (N, groups), written as loops."""
    n, k = codes.shape
    plain = fw.two_four.compress(codes.half())
    shifted = (plain.values.T + (1 << bits - 1)).long()  # (K/2, N)
    per_word, order = 32 // bits, []
    for lane in range(32):
        for column in range(4):
            for block in range(2):
                for row in (2 * (lane % 4), 2 * (lane % 4) + 1, 2 * (lane % 4) + 8, 2 * (lane % 4) + 9):
                    order.append(16 * row + (lane // 8) * 256 + 8 * (lane // 4 % 2) + 4 * block + column)
    interleave = {4: [0, 2, 4, 6, 1, 3, 5, 7], 8: [0, 2, 1, 3]}[bits]
    order = [order[at + j] for at in range(0, 1024, per_word) for j in interleave]
    packed = torch.zeros(k // 32, 16 * n // per_word, dtype=torch.int64)
    for tile_row in range(k // 32):
        flat = [0] * (16 * n)
        for tile in range(n // 16):
            for r in range(16):
                for c in range(16):
                    flat[tile * 256 + r * 16 + c] = int(shifted[tile_row * 16 + r, tile * 16 + c])
        moved = [flat[at + o] for at in range(0, 16 * n, 1024) for o in order]
        for at, code in enumerate(moved):
            packed[tile_row, at // per_word] |= code << bits * (at % per_word)
    packed = packed.sub((packed >= 1 << 31).long() << 32).to(torch.int32)
    if scales.shape[1] > 2:
        eights = [0, 4, 1, 5, 2, 6, 3, 7]
        stored = torch.stack([scales[8 * (c // 8) + eights[c % 8]] for c in range(n)], 1)
    else:
        stored = scales.T.contiguous()
    return {"weight_packed": packed, "scale_packed": stored, "meta": marlin_words(plain.metadata)}


def quantized(n, k, bits, groups):
    limit = 1 << bits - 1
    codes = torch.randint(-limit, limit, (n, k)).where(two_of_four(n, k), 0)
    scales = torch.rand(n, groups).half() + 0.5
    return codes, scales, codes * scales.float().repeat_interleave(k // groups, 1)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("n, k, groups", [(64, 128, 1), (128, 256, 2), (64, 512, 4), (192, 1024, 8)])
def test_marlin(bits, n, k, groups, device):
    codes, scales, want = quantized(n, k, bits, groups)
    s = ct.from_marlin_24(**{name: t.to(device) for name, t in marlin_of(codes, scales, bits).items()})
    assert torch.equal(s.to_dense().cpu(), want.half()) and fw.TwoFour(s.values, s.metadata).shape == (n, k)


def test_a_default_device_changes_nothing():
    codes, scales, want = quantized(64, 128, 4, 1)
    parts = marlin_of(codes, scales, 4)
    with torch.device("meta"):
        s = ct.from_marlin_24(**parts)
    assert torch.equal(s.to_dense(), want.half())


@pytest.mark.parametrize("name", ["weight_packed", "scale_packed", "meta"])
def test_marlin_refuses(name):
    parts = marlin_of(*quantized(64, 128, 4, 1)[:2], 4)
    with pytest.raises((ValueError, TypeError), match=f"from_marlin_24: .*{name}|for N = 63"):
        ct.from_marlin_24(**{**parts, name: parts[name][:, :-1]})
    with pytest.raises((ValueError, TypeError), match=f"from_marlin_24: {name}"):
        ct.from_marlin_24(**{**parts, name: parts[name].flatten()})


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(8, 64), nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.head = nn.Linear(64, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.down(self.up(self.embed(ids)).relu()))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_load(tmp_path, sharded, scaled):
    dense = Net().to(torch.bfloat16)
    up, down = two_of_four(64, 64), two_of_four(64, 64)
    dense.up.weight.data *= up
    dense.down.weight.data *= down
    state = {"up.bias": dense.up.bias.data, "embed.weight": dense.embed.weight.data}
    if scaled:
        values = (dense.up.weight.data.float() * 400).to(torch.float8_e4m3fn)
        scale = torch.full((64, 1), 1 / 400, dtype=torch.bfloat16)
        dense.up.weight.data = (values.float() * scale.float()).to(torch.bfloat16)
        parts = bitmask_of(values.view(torch.uint8), up)
        parts["compressed"] = parts["compressed"].view(torch.float8_e4m3fn)
        state["up.weight_scale"] = scale
    else:
        parts = bitmask_of(dense.up.weight.data, up)
    state |= {f"up.{name}": t for name, t in parts.items()}
    other = {f"down.{name}": t for name, t in bitmask_of(dense.down.weight.data, down).items()}
    if sharded:
        save_file(state, tmp_path / "model-00001-of-00002.safetensors")
        save_file(other, tmp_path / "model-00002-of-00002.safetensors")
    else:
        save_file(state | other, tmp_path / "model.safetensors")
    model, ids = Net().to(torch.bfloat16), torch.arange(8)
    assert sorted(ct.load(model, tmp_path)) == ["down", "up"]
    assert type(model.up) is type(model.down) is fw.nn.SemiSparseLinear and model.head.weight is model.embed.weight
    assert torch.equal(model.up.to_dense(), dense.up.weight) and torch.equal(model.embed.weight, dense.embed.weight)
    torch.testing.assert_close(model(ids).float(), dense(ids).float(), rtol=0.05, atol=0.02)
    read = ct.read(tmp_path, dtype=torch.float16)
    assert read["up.weight"].dtype == read["up.bias"].dtype == torch.float16


def test_load_refuses(tmp_path):
    weight = torch.randn(64, 64).half() * (kept := two_of_four(64, 64))
    parts = bitmask_of(weight, kept)
    good = {f"down.{name}": t for name, t in parts.items()} | {
        name: torch.zeros(shape) for name, shape in (("embed.weight", (8, 64)), ("up.weight", (64, 64)))
    }
    good["up.bias"] = torch.zeros(64)
    before = (model := Net()).down
    for change, message in [
        ({"up.bias": None}, r"load: path: .* none for \['up.bias'\]"),
        ({"left": torch.ones(1)}, r"load: path: .* others for \['left'\]"),
        ({"down.shape": None}, "read: path: expected down.shape beside down.compressed"),
        (
            {"down.bitmask": torch.zeros(64, 8, dtype=torch.uint8)},
            "read: down: from_bitmask: bitmask: expected two bits",
        ),
        ({f"side.{name}": t for name, t in parts.items()}, "load: path: expected weights .* side of"),
        ({"down.bias": torch.zeros(64)}, r"load: path: .* others for \['down.bias'\]"),
        ({"up.bias": torch.zeros(63)}, r"load: path: up.bias: expected \(64,\), got \(63,\)"),
    ]:
        tensors = {name: t for name, t in (good | change).items() if t is not None}
        save_file({name: t.clone() for name, t in tensors.items()}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            ct.load(model, tmp_path)
        assert model.down is before
    save_file({name: t.clone() for name, t in good.items()}, tmp_path / "model.safetensors")
    with pytest.raises(TypeError, match=r"read: dtype: expected float64, .* got torch.int8"):
        ct.load(model, tmp_path, torch.int8)
    more = type("More", (Net,), {"get_extra_state": lambda _: {}})  # a state dict may hold other things than tensors
    with pytest.raises(ValueError, match=r"load: path: .*_extra_state"):
        ct.load(more(), tmp_path)
    with pytest.raises(ValueError, match="load: model: expected one with data, got one on meta"):
        ct.load(Net().to("meta"), tmp_path)
    before.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"load: down: expected a module without hooks"):
        ct.load(model, tmp_path)
    assert model.down is before
    model = Net().eval().requires_grad_(False)
    ct.load(model, tmp_path)
    assert not model.down.training and not any(p.requires_grad for p in model.parameters())
    for path in (tmp_path / "none", tmp_path / "none.safetensors"):
        with pytest.raises(ValueError, match="read: path: expected a safetensors file"):
            ct.read(path)


def package(name):
    """A module of compressed-tensors, or a skip where that is not installed or has no 2:4."""
    pytest.importorskip("compressed_tensors")
    try:
        return importlib.import_module(f"compressed_tensors.{name}")
    except ModuleNotFoundError:
        pytest.skip("this compressed-tensors writes no 2:4")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("rows, cols", [(3, 4), (64, 100), (7, 1024), (20, 36)])
def test_bitmask_of_the_package(tmp_path, dtype, rows, cols):
    compressor = package("compressors.sparse_compressors").Sparse24BitMaskCompressor(
        config=package("config").Sparse24BitMaskConfig(sparsity_structure="2:4")
    )
    weights = {"up.weight": torch.randn(rows, cols).to(dtype), "up.bias": torch.ones(rows)}
    save_file(compressor.compress(weights, {"up"}), tmp_path / "model.safetensors")
    theirs, ours = dict(compressor.decompress(str(tmp_path))), ct.read(tmp_path)
    assert ours.keys() == theirs.keys() and ours["up.weight"].dtype == dtype
    assert torch.equal(ours["up.weight"].to_dense().double(), theirs["up.weight"].double())


@pytest.mark.filterwarnings("ignore:The marlin24 format is deprecated")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    "n, k, group", [(64, 64, None), (192, 512, None), (64, 128, 128), (64, 256, 128), (128, 640, 128)]
)
def test_marlin_of_the_package(tmp_path, n, k, group, bits, dtype):
    own = package("compressors.sparse_quantized_compressors.marlin_24")
    quantization = package("quantization")
    args = quantization.QuantizationArgs(num_bits=bits, strategy="group" if group else "channel", group_size=group)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    weight = (torch.randn(n, k) * two_of_four(n, k)).to(dtype)
    scale = weight.abs().unflatten(1, (-1, group or k)).amax(-1) / (2 ** (bits - 1) - 1)
    compressor = own.Marlin24Compressor(config=quantization.QuantizationConfig(config_groups={"all": scheme}))
    state = compressor.compress({"up.weight": weight, "up.weight_scale": scale}, {"up": scheme})
    save_file(state, tmp_path / "model.safetensors")
    want = quantization.fake_quantize(weight.half(), scale.half(), None, args)  # the compressor cannot go back
    assert torch.equal(ct.read(tmp_path)["up.weight"].to_dense(), want)
