"""2:4 checkpoints of compressed-tensors: `sparse-24-bitmask`, and `marlin_24` with its 4 or 8 bits.

`read` gives the tensors of a checkpoint, each sparse weight as a `fw.TwoFour`; `load` puts them into a model. The two
formats by themselves are `from_bitmask` and `from_marlin_24`. Files need safetensors, the extra `files`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fretwork import two_four
from fretwork._checks import needs, refuse, whole_number
from fretwork._modules import put
from fretwork._torch.arguments import FLOATING, check_tensor
from fretwork.nn.semi_sparse_linear import SemiSparseLinear
from fretwork.recipes import altered, is_linear
from fretwork.two_four import TwoFour, from_parts

__all__ = ["from_bitmask", "from_marlin_24", "load", "read"]

_BITMASK = ("compressed", "bitmask", "shape")
_MARLIN = ("weight_packed", "scale_packed", "meta")


def from_bitmask(compressed: Tensor, bitmask: Tensor, shape: Tensor | list[int] | tuple[int, ...]) -> TwoFour:
    """A matrix of `sparse-24-bitmask`: the values of each row, and a bit for each element, the first the lowest.

    >>> import torch
    >>> s = from_bitmask(torch.tensor([[7.0, 3.0]]).half(), torch.tensor([[0b1010]], dtype=torch.uint8), [1, 4])
    >>> s.to_dense().tolist()
    [[0.0, 7.0, 0.0, 3.0]]
    """
    op = "from_bitmask"
    check_tensor(op, "compressed", compressed)
    check_tensor(op, "bitmask", bitmask)
    rows, cols = _two(op, "shape", shape)
    if compressed.dtype == torch.float32:
        got = "float32; cast it to bfloat16 (dtype= of read and load)"
        refuse(op, "compressed", "a 16-bit or an 8-bit type, as float32 is 1:2 here", got)
    if tuple(compressed.shape) != (rows, cols // 2) or cols % 4:
        refuse(op, "compressed", f"half of {(rows, cols)}, groups of 4 in rows", tuple(compressed.shape))
    if bitmask.dtype != torch.uint8 or tuple(bitmask.shape) != (rows, -(-cols // 8)):
        got = f"{bitmask.dtype} {tuple(bitmask.shape)}"
        refuse(op, "bitmask", f"uint8 {(rows, -(-cols // 8))}", got)
    bits = bitmask[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=bitmask.device) & 1
    kept = bits.flatten(1)[:, :cols].bool()
    counts = kept.unflatten(1, (-1, 4)).sum(2)
    if (counts != 2).any():
        row, group = (counts != 2).nonzero()[0].tolist()
        refuse(op, "bitmask", "two bits for every four", f"{counts[row, group]} for the group at {(row, 4 * group)}")
    bytes_of = compressed.view(torch.uint8) if compressed.itemsize == 1 else compressed
    dense = torch.zeros(rows, cols, dtype=bytes_of.dtype, device=compressed.device)
    dense[kept] = bytes_of.flatten()
    return two_four.compress(dense.view(compressed.dtype))


def from_marlin_24(
    weight_packed: Tensor, scale_packed: Tensor, meta: Tensor, dtype: torch.dtype = torch.float16
) -> TwoFour:
    """A quantized matrix (N, K) of `marlin_24`, with its scales multiplied in: 4 or 8 bits, as the sizes say.

    `weight_packed` is int32 (K/32, 16·N·bits/32), `scale_packed` (groups, N), and `meta` has N·K/16 words of int16 in
    the order in which the Marlin kernels read them.
    """
    op = "from_marlin_24"
    tensors = {"weight_packed": weight_packed, "scale_packed": scale_packed, "meta": meta}
    for name, tensor in tensors.items():
        check_tensor(op, name, tensor)
        if tensor.dim() != 2:
            refuse(op, name, "two dimensions", tuple(tensor.shape))
    if weight_packed.dtype != torch.int32 or meta.dtype != torch.int16:
        refuse(op, "weight_packed and meta", "int32 and int16", f"{weight_packed.dtype} and {meta.dtype}")
    groups, n = scale_packed.shape
    half = 16 * weight_packed.shape[0]  # of K
    bits = 32 * weight_packed.shape[1] // max(16 * n, 1)
    if bits not in (4, 8) or weight_packed.shape[1] * 32 != 16 * n * bits or n % 64 or not half:
        expected = "16·N·bits/32 columns for 4 or 8 bits and N, a multiple of 64, as the scales have it"
        refuse(op, "weight_packed", expected, f"{tuple(weight_packed.shape)} for N = {n}")
    if half % max(groups, 1) or not groups or meta.numel() != n * half // 8:
        sizes = f"{groups} groups and {meta.numel()} words"
        refuse(op, "scale_packed and meta", f"a divisor of {half} groups and {n * half // 8} words", sizes)
    whole = _unpacked(weight_packed, bits, n).to(torch.float32) - (1 << bits - 1)
    scales = _scales(scale_packed, half).to(torch.float32).repeat_interleave(half // groups, 0)
    codes = TwoFour(whole.T.to(torch.float16), _words(meta, n, half // 8))
    # The metadata is canonical for the codes: a scale of zero moves nothing.
    return from_parts((whole * scales).T.contiguous().to(dtype), codes.metadata, 1)


def _unpacked(packed: Tensor, bits: int, n: int) -> Tensor:
    """The codes (K/2, N): tiles of 16 × 16 side by side, shuffled in runs of 1024 as the tensor cores read them."""
    per_word = 32 // bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    codes = (packed[:, :, None] >> shifts & (1 << bits) - 1).flatten(1)
    numbers = functools.partial(torch.arange, device=packed.device)
    lane, column, block, row = torch.meshgrid(*(numbers(size) for size in (32, 4, 2, 4)), indexing="ij")
    rows = 2 * (lane % 4) + row % 2 + 8 * (row // 2)
    order = 16 * rows + 256 * (lane // 8) + 8 * (lane // 4 % 2) + 4 * block + column
    evens_first = torch.cat([numbers(0, per_word, 2), numbers(1, per_word, 2)])
    order = order.reshape(-1, per_word)[:, evens_first].flatten()
    plain = torch.empty_like(codes.view(-1, order.numel()))
    plain[:, order] = codes.view(-1, order.numel())
    tiles = plain.view(packed.shape[0], n // 16, 16, 16)
    return tiles.permute(0, 2, 1, 3).reshape(-1, n)


def _words(meta: Tensor, rows: int, cols: int) -> Tensor:
    """The metadata row by row: columns stand in pairs, rows of 64 are shuffled, squares of 2 × 2 are transposed."""
    row, col = (torch.arange(size, device=meta.device) for size in (rows, cols))
    moved = row // 64 * 64 + row // 2 % 2 * 32 + row % 64 // 8 * 4 + row % 2 * 2
    at = col // 2 * 2 * rows + 2 * (moved[:, None] + col % 2) + (row // 4 % 2)[:, None]
    return meta.flatten()[at]


def _scales(packed: Tensor, half: int) -> Tensor:
    """Scales (groups, N); the columns of several groups are interleaved within eights."""
    if packed.shape[0] <= 2:  # a group as long as half of K, or longer, counts as one a channel
        return packed
    plain = torch.empty_like(packed)
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], device=packed.device)
    plain.view(-1, 8)[:, order] = packed.reshape(-1, 8)
    return plain


def _two(op: str, name: str, shape: Any) -> tuple[int, int]:
    sizes = shape.flatten().tolist() if isinstance(shape, Tensor) else shape
    if not isinstance(sizes, (list, tuple)) or len(sizes) != 2:
        refuse(op, name, "two sizes", repr(sizes))
    rows, cols = (whole_number(op, name, size) for size in sizes)
    return rows, cols


def read(
    path: str | PathLike[str], device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> dict[str, Tensor | TwoFour]:
    """The tensors of a checkpoint, a safetensors file or a folder of them, by name.

    What stands for one sparse weight becomes a `fw.TwoFour` with the name of the weight; everything else is as it is.
    8-bit values with a `weight_scale` are multiplied by it. Floating tensors are cast to `dtype` where that is given.

    >>> import tempfile, torch, fretwork as fw
    >>> from safetensors.torch import save_file
    >>> weight = {"up.compressed": torch.ones(2, 2).half(), "up.bitmask": torch.tensor([[3], [9]], dtype=torch.uint8)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({**weight, "up.shape": torch.tensor([[2], [4]])}, f"{folder}/model.safetensors")
    ...     read(folder)["up.weight"].to_dense().tolist()
    [[1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 1.0]]
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in FLOATING):
        refuse("read", "dtype", "float64, float32, float16 or bfloat16", repr(dtype), TypeError)
    tensors = _tensors(Path(path), str(torch.device(device)))
    found: dict[str, Tensor | TwoFour] = {}
    for suffixes, make in ((_BITMASK, _bitmask), (_MARLIN, _marlin)):
        for name in [name for name in tensors if name.endswith("." + suffixes[0])]:
            layer = name.removesuffix("." + suffixes[0])
            missing = [f"{layer}.{suffix}" for suffix in suffixes if f"{layer}.{suffix}" not in tensors]
            if missing:
                refuse("read", "path", f"{', '.join(missing)} beside {name}", "none")
            try:
                found[f"{layer}.weight"] = make(tensors, layer, dtype)
            except ValueError as error:
                raise ValueError(f"read: {layer}: {error}") from None
    for name, tensor in tensors.items():
        found[name] = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
    return found


def _tensors(path: Path, device: str) -> dict[str, Tensor]:
    with needs("read", "safetensors", "files"):
        from safetensors import SafetensorError, safe_open
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        refuse("read", "path", "a safetensors file or a folder of them", path)
    tensors = {}
    for file in files:
        try:
            with safe_open(str(file), framework="pt", device=device) as opened:
                tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
        except (SafetensorError, FileNotFoundError) as error:
            refuse("read", "path", "a safetensors file or a folder of them", f"{file}: {error}")
    return tensors


def _bitmask(tensors: dict[str, Tensor], layer: str, dtype: torch.dtype | None) -> TwoFour:
    values, bitmask, shape = (tensors.pop(f"{layer}.{suffix}") for suffix in _BITMASK)
    scale = tensors.get(f"{layer}.weight_scale")
    if values.itemsize > 1 or scale is None:
        kind = values.dtype if dtype is None or values.itemsize == 1 else dtype
        return from_bitmask(values.to(kind), bitmask, shape)
    s = from_bitmask(values, bitmask, shape)
    del tensors[f"{layer}.weight_scale"]
    if scale.numel() not in (1, s.shape[0]):
        refuse("from_bitmask", "weight_scale", f"1 or {s.shape[0]} of them", tuple(scale.shape))
    kind = dtype or (scale.dtype if scale.itemsize == 2 else torch.bfloat16)
    return from_parts((s.values.float() * scale.reshape(-1, 1).float()).to(kind), s.metadata, 1)


def _marlin(tensors: dict[str, Tensor], layer: str, dtype: torch.dtype | None) -> TwoFour:
    weight, scale, meta = (tensors.pop(f"{layer}.{suffix}") for suffix in _MARLIN)
    return from_marlin_24(weight, scale, meta, dtype or torch.float16)


def load(model: nn.Module, path: str | PathLike[str], dtype: torch.dtype | None = None) -> list[str]:
    """Puts a checkpoint into a dense model, in place: `fw.nn.SemiSparseLinear` where its weights are sparse.

    Gives the names of those layers. The names of the checkpoint have to be those of the model's state dict; ValueError
    where they are not, and then nothing is changed. The layers' weights have the dtype of the checkpoint, or `dtype`.
    """
    if not isinstance(model, nn.Module):
        refuse("load", "model", "a torch.nn.Module", type(model).__name__, TypeError)
    if any(tensor.is_meta for tensor in itertools.chain(model.parameters(), model.buffers())):
        refuse("load", "model", "one with data", "one on meta; to_empty(device=…) gives it room")
    first = next(iter(model.parameters()), None)
    state = read(path, "cpu" if first is None else first.device, dtype)
    modules = dict(model.named_modules(remove_duplicate=False))
    layers: dict[nn.Module, nn.Module] = {}
    for name, s in state.items():
        if isinstance(s, TwoFour):
            linear = _linear_of(modules, name.removesuffix(".weight"), s)
            layers[linear] = _layer(state, name, s, linear)
    _check_tensors(model, state)
    names = [name.removesuffix(".weight") for name, s in state.items() if isinstance(s, TwoFour)]
    replaced = {f"{name}.{key}" for name in names for key in ("weight", "bias")}
    put(model, layers)
    model.load_state_dict({name: t for name, t in state.items() if name not in replaced}, strict=False)
    return names


def _check_tensors(model: nn.Module, given: Mapping[str, Tensor | TwoFour]) -> None:
    """Every tensor of the model is given in its shape, or is one with another that is."""
    own = model.state_dict(keep_vars=True)
    filled = {id(tensor) for name, tensor in own.items() if isinstance(given.get(name), Tensor)}
    missing = {name for name, tensor in own.items() if name not in given and id(tensor) not in filled}
    if missing or given.keys() - own.keys():
        got = f"none for {sorted(missing)[:3]}, others for {sorted(given.keys() - own.keys())[:3]}"
        refuse("load", "path", "a tensor for each name of the model's state dict", got)
    for name, tensor in given.items():
        if tensor.shape != own[name].shape:
            refuse("load", f"path: {name}", tuple(own[name].shape), tuple(tensor.shape))


def _linear_of(modules: dict[str, nn.Module], name: str, s: TwoFour) -> nn.Linear:
    linear = modules.get(name)
    if not isinstance(linear, nn.Linear) or (linear.out_features, linear.in_features) != tuple(s.shape):
        got = "none" if linear is None else repr(linear)
        refuse("load", "path", f"weights of layers that the model has, {name} of {tuple(s.shape)}", got)
    if not is_linear(linear):
        refuse("load", name, "a torch.nn.Linear that is called", f"a {type(linear).__name__}")
    if (reason := altered(linear)) is not None:
        raise ValueError(f"load: {name}: {reason}")
    if s.dtype not in FLOATING:
        refuse("load", name, "values with a weight_scale, or a floating type", s.dtype)
    return linear


def _layer(state: dict[str, Tensor | TwoFour], name: str, s: TwoFour, linear: nn.Linear) -> SemiSparseLinear:
    bias = state.get(name.removesuffix("weight") + "bias")
    layer = SemiSparseLinear.from_sparse(s, bias.to(s.dtype) if isinstance(bias, Tensor) else None)
    layer.values.requires_grad_(linear.weight.requires_grad)
    if layer.bias is not None and linear.bias is not None:
        layer.bias.requires_grad_(linear.bias.requires_grad)
    return layer.train(linear.training)
