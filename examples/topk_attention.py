"""A small transformer that chooses the key blocks that each head and block of queries reads, beside its dense twin.

The first half of a sequence are notes: blocks of tokens, each with a topic and an answer. The second half are
questions: blocks with a topic, whose answer stands in the one note of that topic. A query block reads its own block,
the first one, and the `top_k` − 2 others that suit it best by the means of their queries and keys. The choice is made
anew in every step and stays on the device. It has no gradient, but the blocks that were chosen train what the next
choice is made of.

python examples/topk_attention.py                                    # a minute on a CPU
python examples/topk_attention.py --seq 16384 --batch 8 --steps 300  # on a GPU
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import fretwork as fw

WIDTH, HEADS, LAYERS = 64, 2, 2
ANSWERS = 8
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        with torch.no_grad():  # keys begin as queries do: what is alike suits each other from the first step
            self.qkv.weight[WIDTH : 2 * WIDTH] = self.qkv.weight[:WIDTH]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, seq, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(batch, seq, WIDTH))
        return x + self.mlp(self.before_mlp(x))


class Model(nn.Module):
    """Tokens are a topic and an answer; the answer after the last means a question."""

    def __init__(self, topics: int, attend: Attend) -> None:
        super().__init__()
        self.topic, self.given = nn.Embedding(topics, WIDTH), nn.Embedding(ANSWERS + 1, WIDTH)
        self.blocks = nn.Sequential(*(Block(attend) for _ in range(LAYERS)))
        self.answer = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, ANSWERS))
        for embedding in (self.topic, self.given):
            nn.init.normal_(embedding.weight, std=0.5)

    def forward(self, topics: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        answers: torch.Tensor = self.answer(self.blocks(self.topic(topics) + self.given(given)))
        return answers


def draw(batch: int, seq: int, block: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Topics, what is given, and the answers, of which the second half are to be found."""
    notes = seq // block // 2
    topics = torch.rand(2, batch, notes, device=device).argsort(-1)  # of notes, and of questions
    answers = torch.randint(ANSWERS, (batch, notes), device=device)  # of each topic
    both = torch.cat([topics[0], topics[1]], 1)
    wanted = answers.gather(1, both)
    given = torch.cat([wanted[:, :notes], torch.full_like(topics[1], ANSWERS)], 1)
    tokens = [x.repeat_interleave(block, 1) for x in (both, given, wanted)]
    return tokens[0], tokens[1], tokens[2]


def train(
    model: Model, steps: int, batch: int, seq: int, block: int, device: torch.device
) -> tuple[list[float], list[float]]:
    """The loss of the questions and the milliseconds of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    losses, ms = [], []
    for _ in range(steps):
        topics, given, wanted = draw(batch, seq, block, device)
        began = time.perf_counter()
        found = model(topics, given)[:, seq // 2 :]
        loss = nn.functional.cross_entropy(found.flatten(0, 1), wanted[:, seq // 2 :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        ms.append((time.perf_counter() - began) * 1e3)
    return losses, ms


def picture(path: str, losses: dict[str, list[float]], ms: dict[str, list[float]]) -> bool:
    """The losses over time; False without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for name, of_steps in losses.items():
        seconds = torch.tensor(ms[name]).cumsum(0) / 1e3
        axes.plot(seconds.tolist(), of_steps, label=name)
    axes.set(xlabel="seconds", ylabel="loss of the questions")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--block", type=int, default=32, help="16, 32, 64 or 128")
    parser.add_argument("--top-k", type=int, default=5)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--png", default="topk_attention.png", help="written where matplotlib is installed")
    options = parser.parse_args()
    seq, block, device = options.seq, options.block, torch.device(options.device)
    pattern = fw.patterns.causal(seq)

    def chosen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        lists = fw.select_blocks(q, k, options.top_k, block=block)
        return fw.attention(q, k, v, pattern, blocks=lists, block=block)

    ways: dict[str, Attend] = {"dense": lambda q, k, v: fw.attention(q, k, v, pattern), "top-k": chosen}
    print(f"{options.top_k} of up to {-(-seq // block)} blocks of {block}, {seq} tokens; guessing has a loss of 2.08")
    losses, ms = {}, {}
    marks = [round(n * (options.steps - 1) / 4) for n in range(5)]
    print(f"{'':8}{'ms/step':>9}  loss at step " + " ".join(f"{n:7}" for n in marks))
    for name, attend in ways.items():
        torch.manual_seed(0)  # the same weights and sequences
        model = Model(seq // block // 2, attend).to(device)
        losses[name], ms[name] = train(model, options.steps, options.batch, seq, block, device)
        shown = " ".join(f"{losses[name][n]:7.3f}" for n in marks)
        print(f"{name:8}{statistics.median(ms[name]):9.1f}               {shown}")
    if picture(options.png, losses, ms):
        print(f"the losses over time are in {options.png}")


if __name__ == "__main__":
    main()
