"""A character model trained from scratch with 2:4 weights in all linear layers of its blocks, beside its dense twin.

The weights stay dense for the optimizer. Each forward pass prunes them anew, so that they and their transposes are 2:4,
and both the products of the layers and those of their inputs' gradients are sparse. Runs under bf16 autocast, because
fp32 weights would be 1:2.

python examples/train_two_four.py                                                           # a minute on a CPU
python examples/train_two_four.py --width 2048 --layers 4 --batch 32 --seq 1024 --steps 500  # on a GPU
"""

from __future__ import annotations

import torch
from torch import nn

import fretwork as fw
from training import CharacterModel, Run, finish, options, text_of_the_docs, train


def two_four(model: CharacterModel) -> CharacterModel:
    """The same model with 2:4 layers; embedding and answer, which are small, stay dense."""
    for name, module in list(model.blocks.named_modules()):
        if isinstance(module, nn.Linear):
            layer = fw.nn.SemiSparseLinear.from_dense(module, prune="transposable", trainable="dense", decay=2e-4)
            model.blocks.set_submodule(name, layer)
    return model


def main(given: list[str] | None = None) -> list[Run]:
    sizes = dict(width=(128, 32), layers=(2, 1), batch=(8, 2), seq=(256, 64), steps=(100, 12))
    o = options(__doc__ or "", "train_two_four", given, **sizes)
    draw = text_of_the_docs(o.batch, o.seq, o.device)
    print(f"{o.layers} blocks, {o.width} wide; {o.batch} passages of {o.seq} characters a step on {o.device}")
    runs = []
    for name in ("dense", "2:4"):
        torch.manual_seed(0)
        model = CharacterModel(o.seq, o.width, o.layers)
        model = (model if name == "dense" else two_four(model)).to(o.device)
        runs.append(train(name, model, draw, o.steps, bf16=True))
    return finish(runs, o, "A character model, 2:4 from scratch")


if __name__ == "__main__":
    main()
