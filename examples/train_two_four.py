"""A small transformer trained dense, then fine-tuned with 2:4 weights in all of its linear layers.

Every token follows from the two before it by a table that the model has to learn by heart, so that weights matter:
pruning them costs something, and fine-tuning brings it back. The weights stay dense for the optimizer; each forward
pass prunes them anew, so that they and their transposes are 2:4, and both products of the layer and of its input's
gradient are sparse. A copy that goes on dense shows what is left to lose.

python examples/train_two_four.py                                                      # half a minute on a CPU
python examples/train_two_four.py --width 1024 --layers 4 --batch 64 --seq 512 --steps 400  # on a GPU
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import time

import torch
import torch.nn.functional as F
from torch import nn

import fretwork as fw

SYMBOLS, HEADS, POINTS = 24, 4, 8  # kinds of tokens, heads, and points of a curve


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.before_attention(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(o.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class Model(nn.Module):
    def __init__(self, width: int, layers: int, seq: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(SYMBOLS, width), nn.Parameter(torch.randn(seq, width) / 8)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.answer = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, SYMBOLS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.answer(self.blocks(self.tokens(ids) + self.places[: ids.shape[1]]))


def two_four(model: Model) -> Model:
    """A copy whose blocks have 2:4 layers; embedding and answer, which are small, stay dense."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        for parent, name in ((block, "qkv"), (block, "out"), (block.mlp, "0"), (block.mlp, "2")):
            sparse = fw.nn.SemiSparseLinear.from_dense(
                getattr(parent, name), prune="transposable", trainable="dense", decay=2e-4
            )
            setattr(parent, name, sparse)
    return model


def sequences(table: torch.Tensor, batch: int, seq: int) -> torch.Tensor:
    ids = torch.randint(SYMBOLS, (2, batch), device=table.device)
    rows = list(ids)
    while len(rows) <= seq:
        rows.append(table[rows[-2], rows[-1]])
    return torch.stack(rows, 1)


def loss_of(model: Model, ids: torch.Tensor) -> torch.Tensor:
    with torch.autocast(ids.device.type, torch.bfloat16):  # fp32 weights would be 1:2
        logits = model(ids[:, :-1])
    return F.cross_entropy(logits[:, 1:].flatten(0, 1).float(), ids[:, 2:].flatten())


def train(
    model: Model, table: torch.Tensor, batch: int, seq: int, steps: int, rate: float
) -> tuple[list[float], float]:
    """The losses of all steps, and the median milliseconds of one."""
    torch.manual_seed(1)  # every run sees the same sequences
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1, pct_start=0.1)
    losses, times = [], []
    for _ in range(steps):
        ids = sequences(table, batch, seq)
        began = time.perf_counter()
        loss = loss_of(model, ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())  # waits for the GPU
        times.append((time.perf_counter() - began) * 1e3)
    return losses, statistics.median(times[1:] or times)


def curve(losses: list[float]) -> str:
    """Means of equal stretches."""
    ends = [len(losses) * n // POINTS for n in range(POINTS + 1)]
    parts = [losses[begin:end] for begin, end in itertools.pairwise(ends) if begin < end]
    return " ".join(f"{statistics.mean(part):6.3f}" for part in parts)


def main(width: int, layers: int, batch: int, seq: int, steps: int, device: torch.device) -> None:
    torch.manual_seed(0)
    table = torch.randint(SYMBOLS, (SYMBOLS, SYMBOLS), device=device)
    model = Model(width, layers, seq).to(device)
    inside = sum(p.numel() for p in model.blocks.parameters())
    print(f"{layers} blocks, {width} wide, {inside:,} parameters; {batch} sequences of {seq} a step, on {device}")
    print("                ms a step  loss, from the first step to the last")
    losses, ms = train(model, table, batch, seq, steps, 2e-3)
    print(f"dense          {ms:10.1f}  {curve(losses)}", flush=True)
    sparse = two_four(model)
    held_out = sequences(table, 4 * batch, seq)
    with torch.no_grad():
        before, pruned = (loss_of(m, held_out).item() for m in (model, sparse))
    for name, tuned in (("dense, on", model), ("2:4, on", sparse)):
        losses, ms = train(tuned, table, batch, seq, steps // 2, 1e-3)
        print(f"{name:14} {ms:10.1f}  {curve(losses)}", flush=True)
    with torch.no_grad():
        dense, after = (loss_of(m, held_out).item() for m in (model, sparse))
    print("on other sequences: dense, pruned at once; after going on: dense, 2:4")
    print(f"{before:.3f} {pruned:.3f} {dense:.3f} {after:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128, help="a multiple of 16 (128)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--steps", type=int, default=160, help="dense; half as many follow (160)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args()
    main(given.width, given.layers, given.batch, given.seq, given.steps, torch.device(given.device))
