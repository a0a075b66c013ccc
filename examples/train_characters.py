"""A character model whose attention is a window with attention sinks, beside one that sees all earlier characters.

The text is this project's own documentation. A character sees the first 4 and the last 128 characters, so that the cost
of attention grows with the length of the text, not with its square.

python examples/train_characters.py                                                         # a minute on a CPU
python examples/train_characters.py --seq 16384 --batch 4 --width 512 --layers 6 --steps 500  # on a GPU
"""

from __future__ import annotations

import torch
from torch import Tensor

import fretwork as fw
from training import CharacterModel, Run, causal, finish, options, text_of_the_docs, train


def main(given: list[str] | None = None) -> list[Run]:
    sizes = dict(seq=(2048, 128), window=(128, 32), width=(128, 32), layers=(2, 1), batch=(2, 2), steps=(60, 12))
    o = options(__doc__ or "", "train_characters", given, **sizes)
    pattern = fw.patterns.sinks(o.seq, 4, o.window)

    def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fw.attention(q, k, v, pattern)

    draw = text_of_the_docs(o.batch, o.seq, o.device)
    print(f"{o.layers} blocks, {o.width} wide; {o.batch} passages of {o.seq} characters a step on {o.device}")
    print(f"{pattern.text} keeps {pattern.density / fw.patterns.causal(o.seq).density:.0%} of the causal scores")
    runs = []
    for name, attend in (("causal", causal), ("window, sinks", windowed)):
        torch.manual_seed(0)
        model = CharacterModel(o.seq, o.width, o.layers, attend).to(o.device)
        runs.append(train(name, model, draw, o.steps))
    return finish(runs, o, f"A character model, {o.seq} characters at once")


if __name__ == "__main__":
    main()
