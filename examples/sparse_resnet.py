"""A small residual network, with dense 3×3 convolutions and with a quarter of their blocks.

Images show a bright bar that lies, stands or leans, in noise; the network says which. The sparse one keeps, of every
convolution between its blocks, the middle of the kernel and some blocks elsewhere. Images have the channels last.

python examples/sparse_resnet.py                                            # seconds on a CPU
python examples/sparse_resnet.py --images 256 --width 256 --steps 200       # on a GPU
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import fretwork as fw

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
    return images[:, None].to(device), ways.to(device)


def train(name: str, conv: Make, options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    device = torch.device(options.device)
    model = network(options.width, conv).to(device)
    count = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, times = [], []
    for _ in range(options.steps):
        images, ways = bars(options.images, device)
        began = time.perf_counter()
        loss = nn.functional.cross_entropy(model(images.contiguous(memory_format=torch.channels_last)), ways)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # waits for the GPU
        times.append((time.perf_counter() - began) * 1e3)
    shown = [losses[round(n * (options.steps - 1) / 5)] for n in range(6)]
    ms = statistics.median(times[1:] or times)
    print(f"{name:8} {count:10,} {ms:9.1f}   " + " ".join(f"{loss:6.3f}" for loss in shown), flush=True)


def main(options: argparse.Namespace) -> None:
    print(f"{options.width} channels, {options.images} images of {SIDE}×{SIDE} a step on {options.device}")
    print("weights  parameters ms a step   loss, from the first step to the last")
    train("dense", dense, options)
    train("sparse", sparse, options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    main(parser.parse_args())
