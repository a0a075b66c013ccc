"""Trains a small model on sequences that are cut over processes, and shows that the loss is that of one process:

torchrun --nproc-per-node 2 examples/long_context.py
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fretwork as fw
import fretwork.distributed as fd

TOKENS, PERIOD = 32, 64
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(-2))
        return x + self.mlp(self.between(x))


class Model(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, width), nn.Embedding(PERIOD, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, TOKENS)

    def forward(self, tokens: Tensor, places: Tensor, attend: Attend) -> Tensor:
        x = self.tokens(tokens) + self.places(places % PERIOD)
        for block in self.blocks:
            x = block(x, attend)
        return self.head(x)  # type: ignore[no-any-return]


def sequences(length: int) -> Tensor:
    """Two that repeat themselves: what comes next stood there one period before."""
    pieces = torch.randint(TOKENS, (2, PERIOD), generator=torch.Generator().manual_seed(1))
    return pieces.repeat(1, length // PERIOD + 2)[:, : length + 1]


def train(tokens: Tensor, shards: fd.Shards | None, pattern: fw.Pattern, steps: int) -> list[float]:
    """The losses; of a sequence cut over processes where there are shards, else of a whole one."""
    torch.manual_seed(0)  # the same weights in every process
    model = Model()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        given, wanted, places = tokens[:, :-1], tokens[:, 1:], torch.arange(tokens.shape[1] - 1)
        if shards is not None:  # this process's tokens; everything but attention needs no others
            given, wanted = (fd.scatter(t, shards, 1) for t in (given, wanted))
            places = fd.scatter(places, shards, 0)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return fw.attention(q, k, v, pattern) if shards is None else fd.attention(q, k, v, pattern, shards)

        scores = model(given, places, attend)
        loss = F.cross_entropy(scores.flatten(0, 1), wanted.flatten(), reduction="sum") / tokens[:, 1:].numel()
        optimiser.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        if shards is not None:  # each process has its tokens' share of the loss and of the gradients
            for part in (total, *(p.grad for p in model.parameters())):
                dist.all_reduce(part)
        optimiser.step()
        losses.append(total.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=21)
    options = parser.parse_args()
    for name, alone in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29511")):
        os.environ.setdefault(name, alone)  # torchrun sets them
    dist.init_process_group("gloo")
    pattern = fw.patterns.strided(options.length, PERIOD)
    shards = fd.shard(pattern, dist.get_world_size())
    tokens = sequences(options.length)
    many, one = (train(tokens, cut, pattern, options.steps) for cut in (shards, None))
    if dist.get_rank() == 0:
        for rank, (first, last) in enumerate(shards.ranges):
            received = sum(b - a for ranges in shards.needs(rank).values() for a, b in ranges)
            print(f"process {rank}: tokens {first} to {last}, keys of {received} others")
        print(f"{'step':>4} {f'{len(shards.ranges)} processes':>12} {'one':>8}")
        for step, losses in enumerate(zip(many, one, strict=True)):
            if step % 5 == 0 or step + 1 == len(many):
                print(f"{step:4} {losses[0]:12.5f} {losses[1]:8.5f}")
    if not all(abs(a - b) < 1e-3 for a, b in zip(many, one, strict=True)):
        raise SystemExit("long_context: the losses differ")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
