"""A small transformer that recalls and copies, with Longformer's attention and with all of it.

A sequence opens with a header of random symbols. Every later token either asks for one of them by its number, or stands
for nothing, and then the answer is the token a few places before it. The window does the copying, the global positions
the recalling.

python examples/longformer_block.py                                   # seconds on a CPU
python examples/longformer_block.py --seq 8192 --batch 8 --steps 300  # on a GPU
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import fretwork as fw
from training import Attend, Block, Draw, Run, finish, options, train

WIDTH, HEADS, LAYERS = 64, 2, 2
HEADER, SYMBOLS, BACK = 4, 8, 3  # symbols asked for, their kinds, and how far back a copy reaches
WINDOW = 32


class Model(nn.Module):
    """Tokens are the symbols, then the questions. A few sines of the position tell neighbours apart."""

    def __init__(self, seq: int, attend: Attend) -> None:
        super().__init__()
        self.tokens = nn.Embedding(SYMBOLS + HEADER, WIDTH)
        self.header = nn.Embedding(HEADER + 1, WIDTH)  # which place of the header this is, if any
        angles = torch.arange(seq)[:, None] * torch.exp(-torch.arange(WIDTH // 2) / 4)
        self.register_buffer("places", torch.cat([angles.sin(), angles.cos()], 1))
        self.register_buffer("number", torch.arange(seq).clamp(max=HEADER))
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS, attend) for _ in range(LAYERS)))
        self.answer = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS))
        for embedding in (self.tokens, self.header):
            nn.init.normal_(embedding.weight, std=0.5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.answer(self.blocks(self.tokens(ids) + self.header(self.number) + self.places))


def recalls_and_copies(batch: int, seq: int, device: torch.device) -> Draw:
    """Tokens, and the answer at each of them; −100 where there is none."""

    def draw(held_out: bool) -> tuple[Tensor, Tensor]:
        ids = torch.randint(SYMBOLS, (batch, seq), device=device)
        header, asked = ids[:, :HEADER], torch.randint(HEADER, (batch, seq), device=device)
        asks = torch.rand(batch, seq, device=device) < 0.5
        asks[:, :HEADER] = False
        answers = torch.where(asks, header.gather(1, asked), ids.roll(BACK, 1))
        answers[~asks & asks.roll(BACK, 1)] = -100  # a question stands there: nothing to copy
        answers[:, :HEADER] = -100
        return torch.where(asks, SYMBOLS + asked, ids), answers

    return draw


def main(given: list[str] | None = None) -> list[Run]:
    sizes = dict(seq=(1024, 128), batch=(2, 2), steps=(100, 16))
    o = options(__doc__ or "", "longformer_block", given, **sizes)
    pattern = fw.patterns.longformer(o.seq, WINDOW, range(HEADER))
    print(f"{LAYERS} blocks, {WIDTH} wide; {o.batch} sequences of {o.seq} tokens a step on {o.device}")
    print(f"pattern {pattern.text}, density {pattern.density:.4f}")
    ways: dict[str, Attend] = {
        "dense": scaled_dot_product_attention,
        "longformer": lambda q, k, v: fw.attention(q, k, v, pattern),
    }
    draw, runs = recalls_and_copies(o.batch, o.seq, o.device), []
    for name, attend in ways.items():
        torch.manual_seed(0)
        runs.append(train(name, Model(o.seq, attend).to(o.device), draw, o.steps, rate=8e-3))
    return finish(runs, o, "Recalling and copying")


if __name__ == "__main__":
    main()
