"""A small transformer that recalls and copies, with Longformer's attention and with all of it.

A sequence opens with a header of random symbols. Every later token either asks for one of them by its number, or stands
for nothing, and then the answer is the token a few places before it. The window does the copying, the global positions
the recalling.

python examples/longformer_block.py                                   # seconds on a CPU
python examples/longformer_block.py --seq 8192 --batch 8 --steps 300  # on a GPU
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import fretwork as fw

WIDTH, HEADS, LAYERS = 64, 2, 2
HEADER, SYMBOLS, BACK = 4, 8, 3  # symbols asked for, their kinds, and how far back a copy reaches
WINDOW = 32
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, seq, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(batch, seq, WIDTH))
        return x + self.mlp(self.before_mlp(x))


class Model(nn.Module):
    """Tokens are the symbols, then the questions. A few sines of the position tell neighbours apart."""

    def __init__(self, seq: int, attend: Attend) -> None:
        super().__init__()
        self.tokens = nn.Embedding(SYMBOLS + HEADER, WIDTH)
        self.header = nn.Embedding(HEADER + 1, WIDTH)  # which place of the header this is, if any
        angles = torch.arange(seq)[:, None] * torch.exp(-torch.arange(WIDTH // 2) / 4)
        self.register_buffer("places", torch.cat([angles.sin(), angles.cos()], 1))
        self.register_buffer("number", torch.arange(seq).clamp(max=HEADER))
        self.blocks = nn.Sequential(*(Block(attend) for _ in range(LAYERS)))
        self.answer = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS))
        for embedding in (self.tokens, self.header):
            nn.init.normal_(embedding.weight, std=0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.answer(self.blocks(self.tokens(ids) + self.header(self.number) + self.places))


def sample(batch: int, seq: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and the answer at each of them."""
    ids = torch.randint(SYMBOLS, (batch, seq), device=device)
    header, asked = ids[:, :HEADER], torch.randint(HEADER, (batch, seq), device=device)
    answers = ids.roll(BACK, 1)
    asks = torch.rand(batch, seq, device=device) < 0.5
    asks[:, :HEADER] = False
    answers[asks] = header.gather(1, asked)[asks]
    copied = ~asks & (answers >= 0)
    ids = torch.where(asks, SYMBOLS + asked, ids)
    answers[copied & (ids.roll(BACK, 1) >= SYMBOLS)] = -100  # a question stands there: nothing to copy
    answers[:, :HEADER] = -100
    return ids, answers


def train(name: str, attend: Attend, options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    device = torch.device(options.device)
    model = Model(options.seq, attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    losses, times = [], []
    for _ in range(options.steps):
        ids, answers = sample(options.batch, options.seq, device)
        began = time.perf_counter()
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # waits for the GPU
        times.append((time.perf_counter() - began) * 1e3)
    shown = [losses[round(n * (options.steps - 1) / 5)] for n in range(6)]
    ms = statistics.median(times[1:] or times)
    print(f"{name:10} {ms:9.1f}   " + " ".join(f"{loss:6.3f}" for loss in shown), flush=True)


def main(options: argparse.Namespace) -> None:
    pattern = fw.patterns.longformer(options.seq, WINDOW, range(HEADER))
    print(
        f"{LAYERS} blocks, {WIDTH} wide; {options.batch} sequences of {options.seq} tokens a step on {options.device}"
    )
    print(f"pattern {pattern.text}, density {pattern.density:.4f}")
    print("attention  ms a step   loss, from the first step to the last")
    train("dense", nn.functional.scaled_dot_product_attention, options)
    train("longformer", lambda q, k, v: fw.attention(q, k, v, pattern), options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    main(parser.parse_args())
