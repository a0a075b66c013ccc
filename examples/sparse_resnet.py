"""A small residual network, with dense 3×3 convolutions and with a quarter of their blocks.

Images show a bright bar that lies, stands or leans, in noise; the network says which. The sparse one keeps, of every
convolution between its blocks, the middle of the kernel and some blocks elsewhere. Images have the channels last.

python examples/sparse_resnet.py                                            # seconds on a CPU
python examples/sparse_resnet.py --images 256 --width 256 --steps 200       # on a GPU
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import fretwork as fw
from training import Run, finish, options, train

SIDE, BLOCK, DENSITY, CLASSES = 16, 16, 0.2, 3
Make = Callable[[int], nn.Module]  # a convolution of so many channels


def dense(width: int) -> nn.Module:
    return nn.Conv2d(width, width, 3, padding="same", bias=False)


def sparse(width: int) -> nn.Module:
    """The middle of the kernel of each block of channels, and a share of the other blocks."""
    count = width // BLOCK
    mask = torch.rand(count, count, 3, 3) < DENSITY
    mask[:, :, 1, 1] |= torch.eye(count).bool()
    return fw.nn.BlockSparseConv2d(width, width, 3, fw.BlockLayout.for_conv2d(mask, BLOCK), padding="same", bias=False)


class Residual(nn.Module):
    def __init__(self, width: int, conv: Make) -> None:
        super().__init__()
        self.first, self.second = conv(width), conv(width)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(x + self.norms[1](self.second(y)))


def network(width: int, conv: Make) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding="same"), Residual(width, conv), nn.MaxPool2d(2), Residual(width, conv),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES),
    )  # fmt: skip


def bars(count: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (N, 1, side, side) and which way their bars run."""
    ways = torch.randint(CLASSES, (count,))
    row, col = torch.arange(SIDE)[:, None], torch.arange(SIDE)
    lines = torch.stack([row.expand(SIDE, SIDE), col.expand(SIDE, SIDE), (row + col) // 2])
    at = torch.randint(2, SIDE - 2, (count, 1, 1))
    images = (lines[ways] == at).float() + 0.5 * torch.randn(count, SIDE, SIDE)
    return images[:, None].to(device, memory_format=torch.channels_last), ways.to(device)


def main(given: list[str] | None = None) -> list[Run]:
    o = options(__doc__ or "", "sparse_resnet", given, images=(32, 8), width=(64, 32), steps=(40, 12))
    print(f"{o.width} channels, {o.images} images of {SIDE}×{SIDE} a step on {o.device}")
    runs = []
    for name, conv in (("dense", dense), ("sparse", sparse)):
        torch.manual_seed(0)
        model = network(o.width, conv).to(o.device)
        runs.append(train(name, model, lambda held_out: bars(o.images, o.device), o.steps, rate=3e-3))
    return finish(runs, o, "Residual networks")


if __name__ == "__main__":
    main()
