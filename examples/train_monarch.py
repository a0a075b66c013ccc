"""An MLP whose wide layers are Monarch matrices, beside the dense MLP.

It hears which of 64 tones is in a noisy signal. A Fourier transform would tell, and that is a product of such matrices.

python examples/train_monarch.py                                                # seconds on a CPU
python examples/train_monarch.py --width 8192 --factor 64 --batch 4096 --steps 500  # on a GPU
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

import fretwork as fw
from training import Run, finish, options, train

TONES = 64


def mlp(width: int, layer: Callable[[int, int], nn.Module]) -> nn.Sequential:
    wide = [layer(width, 2 * width), nn.LayerNorm(2 * width), nn.GELU()]
    wide += [layer(2 * width, width), nn.LayerNorm(width), nn.GELU()]
    return nn.Sequential(*wide, nn.Linear(width, TONES))


def sounds(o: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Signals with a tone of unknown phase, and which tone it is."""
    tones = torch.randint(TONES, (o.batch, 1), device=o.device)
    phase = torch.rand(o.batch, 1, device=o.device) * 2 * math.pi
    turns = torch.arange(o.width, device=o.device) / o.width * 2 * math.pi
    return torch.sin((tones + 1) * turns + phase) + torch.randn(o.batch, o.width, device=o.device), tones.flatten()


def main(given: list[str] | None = None) -> list[Run]:
    sizes = dict(width=(1024, 64), factor=(32, 8), batch=(128, 16), steps=(100, 12))
    o = options(__doc__ or "", "train_monarch", given, **sizes)

    def monarch(inputs: int, outputs: int) -> nn.Module:
        return fw.nn.KSLinear(fw.kronecker.monarch(outputs, inputs, o.factor, o.factor))

    print(f"layers {o.width} → {2 * o.width} → {o.width} → {TONES}; {o.batch} signals a step on {o.device}")
    runs = []
    for name, layer in (("dense", nn.Linear), ("Monarch", monarch)):
        torch.manual_seed(0)
        model = mlp(o.width, layer).to(o.device)
        runs.append(train(name, model, lambda held_out: sounds(o), o.steps, rate=3e-3))
    return finish(runs, o, f"An MLP, {o.width} to {2 * o.width} to {o.width}")


if __name__ == "__main__":
    main()
