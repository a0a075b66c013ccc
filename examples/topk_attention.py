"""A small transformer that chooses the key blocks that each head and block of queries reads, beside its dense twin.

The first half of a sequence are notes: blocks of tokens, each with a topic and an answer. The second half are
questions: blocks with a topic, whose answer stands in the one note of that topic. A query block reads its own block,
the first one, and the `top_k` − 2 others that suit it best by the means of their queries and keys. The choice is made
anew in every step and stays on the device. It has no gradient, but the blocks that were chosen train what the next
choice is made of. Guessing has a loss of 2.08.

python examples/topk_attention.py                                    # a minute on a CPU
python examples/topk_attention.py --seq 16384 --batch 8 --steps 300  # on a GPU
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fretwork as fw
from training import Attend, Block, Draw, Run, finish, options, train

WIDTH, HEADS, LAYERS = 64, 2, 2
ANSWERS = 8


class Model(nn.Module):
    """Tokens are a topic and an answer; the answer after the last means a question."""

    def __init__(self, topics: int, attend: Attend) -> None:
        super().__init__()
        self.topic, self.given = nn.Embedding(topics, WIDTH), nn.Embedding(ANSWERS + 1, WIDTH)
        blocks = [Block(WIDTH, HEADS, attend) for _ in range(LAYERS)]
        with torch.no_grad():
            for embedding in (self.topic, self.given):
                embedding.weight.mul_(0.5)
            for block in blocks:  # keys begin as queries do: what is alike suits each other from the first step
                block.qkv.weight[WIDTH : 2 * WIDTH] = block.qkv.weight[:WIDTH]
        self.blocks = nn.Sequential(*blocks)
        self.answer = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, ANSWERS))

    def forward(self, tokens: Tensor) -> Tensor:
        topics, given = tokens.unbind(-1)
        answers: Tensor = self.answer(self.blocks(self.topic(topics) + self.given(given)))
        return answers


def notes_and_questions(batch: int, seq: int, block: int, device: torch.device) -> Draw:
    """Pairs of a topic and an answer, and the answers to the questions; those of notes do not count."""
    notes = seq // block // 2

    def draw(held_out: bool) -> tuple[Tensor, Tensor]:
        topics = torch.rand(2, batch, notes, device=device).argsort(-1)  # of notes, and of questions
        answers = torch.randint(ANSWERS, (batch, notes), device=device)  # of each topic
        noted, wanted = (answers.gather(1, of) for of in topics)
        given = torch.cat([noted, torch.full_like(noted, ANSWERS)], 1)
        tokens = torch.stack([torch.cat([*topics], 1), given], -1)
        counted = torch.cat([torch.full_like(noted, -100), wanted], 1)
        return tokens.repeat_interleave(block, 1), counted.repeat_interleave(block, 1)

    return draw


def main(given: list[str] | None = None) -> list[Run]:
    sizes = dict(seq=(2048, 256), block=(32, 16), top_k=(5, 5), batch=(2, 2), steps=(60, 12))
    o = options(__doc__ or "", "topk_attention", given, **sizes)
    pattern = fw.patterns.causal(o.seq)

    def chosen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lists = fw.select_blocks(q, k, o.top_k, block=o.block)
        return fw.attention(q, k, v, pattern, blocks=lists, block=o.block)

    ways: dict[str, Attend] = {"dense": lambda q, k, v: fw.attention(q, k, v, pattern), "top-k": chosen}
    print(f"{o.top_k} of up to {-(-o.seq // o.block)} blocks of {o.block}, {o.seq} tokens on {o.device}")
    draw = notes_and_questions(o.batch, o.seq, o.block, o.device)
    runs = []
    for name, attend in ways.items():
        torch.manual_seed(0)
        model = Model(o.seq // o.block // 2, attend).to(o.device)
        runs.append(train(name, model, draw, o.steps, rate=5e-3))
    return finish(runs, o, "Key blocks chosen at run time")


if __name__ == "__main__":
    main()
