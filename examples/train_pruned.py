"""A trained character model, pruned in one line by `fw.sparsify` and fine-tuned, beside the dense model trained on.

The linear layers of the blocks keep a third of their 32 × 32 blocks of weights, those that matter most for some
passages of the text.

python examples/train_pruned.py                                                           # a minute on a CPU
python examples/train_pruned.py --width 2048 --layers 4 --batch 32 --seq 1024 --steps 500  # on a GPU
"""

from __future__ import annotations

import copy

import torch

import fretwork as fw
from training import CharacterModel, Run, evaluate, finish, options, text_of_the_docs, train


def main(given: list[str] | None = None) -> list[Run]:
    sizes = dict(width=(256, 64), layers=(2, 1), batch=(4, 2), seq=(256, 64), steps=(50, 12))
    o = options(__doc__ or "", "train_pruned", given, **sizes)
    draw = text_of_the_docs(o.batch, o.seq, o.device)
    print(f"{o.layers} blocks, {o.width} wide; {o.batch} passages of {o.seq} characters a step on {o.device}")
    torch.manual_seed(0)
    dense = CharacterModel(o.seq, o.width, o.layers).to(o.device)
    first = train("dense, first", dense, draw, o.steps)

    pruned = copy.deepcopy(dense)
    passages = [draw(False)[0] for _ in range(8)]
    print(fw.sparsify(pruned, {"blocks.*": fw.recipes.Block(32, density=0.33)}, calibration=passages))
    before = evaluate(pruned, draw, o.device.type == "cuda")
    print(f"held out: {first.held_out:.3f} before pruning, {before:.3f} after it")

    runs = [first]
    for name, model in (("dense, on", dense), ("pruned, on", pruned)):
        runs.append(train(name, model, draw, o.steps, rate=1e-3, first=1))
    return finish(runs, o, "A trained character model, pruned and fine-tuned")


if __name__ == "__main__":
    main()
