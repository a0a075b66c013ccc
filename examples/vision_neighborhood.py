"""A block of vision attention on a grid of patches: every patch, Swin's windows, and a neighbourhood.

The images are stripes whose direction changes from place to place; the model says the direction at each patch, which it
can see only from the patches around.

python examples/vision_neighborhood.py                                       # seconds on a CPU
python examples/vision_neighborhood.py --side 128 --images 4 --steps 200     # on a GPU
"""

from __future__ import annotations

import argparse
import math
import statistics
import time

import torch
from torch import nn

import fretwork as fw

WIDTH, HEADS, DIRECTIONS = 64, 2, 4


class Layer(nn.Module):
    def __init__(self, pattern: fw.Pattern | None) -> None:
        super().__init__()
        self.pattern = pattern
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images, patches, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(images, patches, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        if self.pattern is None:
            o = nn.functional.scaled_dot_product_attention(q, k, v)
        else:
            o = fw.attention(q, k, v, self.pattern)
        x = x + self.out(o.transpose(1, 2).reshape(images, patches, WIDTH))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, side: int, patterns: tuple[fw.Pattern | None, ...]) -> None:
        super().__init__()
        self.embed = nn.Linear(1, WIDTH)
        at = torch.arange(side)[:, None] * torch.tensor([math.pi / 2, math.pi / 4, math.pi / 8, math.pi / 16])
        waves = torch.cat([at.sin(), at.cos()], 1)  # (side, 8)
        grid = torch.cat([waves[:, None].expand(-1, side, -1), waves[None].expand(side, -1, -1)], 2)
        self.register_buffer("places", nn.functional.pad(grid.reshape(side * side, 16), (0, WIDTH - 16)))
        self.layers = nn.Sequential(*(Layer(p) for p in patterns))
        self.answer = nn.Linear(WIDTH, DIRECTIONS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.answer(self.layers(self.embed(x) + self.places))


def stripes(images: int, side: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Brightness of each patch, and the direction of the stripes there: one for each quarter of the image."""
    quarters = torch.randint(DIRECTIONS, (images, 2, 2), device=device)
    labels = quarters.repeat_interleave(side // 2, 1).repeat_interleave(side // 2, 2)
    angle = labels * math.pi / DIRECTIONS
    y, x = torch.meshgrid(*(torch.arange(side, device=device),) * 2, indexing="ij")
    phase = torch.rand(images, 1, 1, device=device) * 6
    bright = torch.sin((x * angle.cos() + y * angle.sin()) * 1.6 + phase)
    return bright.reshape(images, side * side, 1), labels.reshape(images, -1)


def train(name: str, patterns: tuple[fw.Pattern | None, ...], options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    device = torch.device(options.device)
    model = Model(options.side, patterns).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x, labels = stripes(options.images, options.side, device)  # the same images at every step
    losses, times = [], []
    for _ in range(options.steps):
        began = time.perf_counter()
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # waits for the GPU
        times.append((time.perf_counter() - began) * 1e3)
    density = statistics.mean(1.0 if p is None else p.density for p in patterns)
    ms = statistics.median(times[1:] or times)
    print(f"{name:14} {density:8.4f} {ms:10.1f} {losses[0]:14.3f} {losses[-1]:8.3f}", flush=True)


def main(options: argparse.Namespace) -> None:
    side, window = options.side, options.window
    near = fw.patterns.neighborhood((side, side), window)
    still, moved = (fw.patterns.swin(side, side, 8, shift) for shift in (0, 4))
    print(f"two layers, {WIDTH} wide; {options.images} images of {side} × {side} patches a step on {options.device}")
    print("attention       density  ms a step  loss at first  at last")
    train("every patch", (None, None), options)
    train("swin 8", (still, moved), options)
    train(f"nearest {window} × {window}", (near, near), options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=32, help="patches of an image, each way; even (32)")
    parser.add_argument("--window", type=int, default=7)
    parser.add_argument("--images", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    main(parser.parse_args())
