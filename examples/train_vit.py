"""A vision transformer in which patches see their neighbourhood and a class token sees all, beside one that sees all.

The images are noise with stripes somewhere, and the class is the direction of the stripes. A patch shows
little of it, its neighbourhood more, and the class token collects what the neighbourhoods found.

python examples/train_vit.py                                                       # a minute on a CPU
python examples/train_vit.py --side 96 --images 32 --width 512 --layers 6 --steps 500  # on a GPU
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fretwork as fw
from training import Attend, Block, Run, finish, options, train

DIRECTIONS, PATCH = 4, 4  # classes, and pixels of a patch each way


class VisionTransformer(nn.Module):
    def __init__(self, side: int, width: int, layers: int, attend: Attend, heads: int = 2) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, width, PATCH, PATCH)
        self.places = nn.Parameter(torch.randn(side * side + 1, width) * 0.02)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.blocks = nn.Sequential(*(Block(width, heads, attend) for _ in range(layers)))
        self.answer = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, DIRECTIONS))

    def forward(self, images: Tensor) -> Tensor:
        patches = self.embed(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(patches), -1, -1), patches], 1)
        return self.answer(self.blocks(tokens + self.places)[:, 0])


def striped(images: int, side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Images of side × side patches, and the direction of the stripes in each."""
    pixels = side * PATCH
    classes = torch.randint(DIRECTIONS, (images, 1, 1), device=device)
    at = torch.randint(pixels // 4, pixels - pixels // 4, (2, images, 1, 1), device=device)  # middle of the stripes
    phase = torch.rand(images, 1, 1, device=device) * 2 * math.pi
    y, x = torch.meshgrid(*(torch.arange(pixels, device=device),) * 2, indexing="ij")
    angle = classes * math.pi / DIRECTIONS
    stripes = torch.sin((x * angle.cos() + y * angle.sin()) * 1.2 + phase)
    near = (x - at[0]).square() + (y - at[1]).square() < (pixels / 4) ** 2
    noise = torch.randn(images, pixels, pixels, device=device) * 0.3
    return (noise + stripes * near)[:, None], classes.flatten()


def main(given: list[str] | None = None) -> list[Run]:
    sizes = dict(side=(24, 8), window=(7, 3), images=(8, 4), width=(64, 32), layers=(2, 1), steps=(60, 12))
    o = options(__doc__ or "", "train_vit", given, **sizes)
    pattern = fw.patterns.with_prefix(fw.patterns.neighborhood((o.side, o.side), o.window), 1)

    def near(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fw.attention(q, k, v, pattern)

    def draw(held_out: bool) -> tuple[Tensor, Tensor]:
        return striped(o.images, o.side, o.device)  # never the same image twice

    print(f"{o.layers} blocks, {o.width} wide; {o.images} images of {o.side} × {o.side} patches a step on {o.device}")
    print(f"a class token and neighbourhoods of {o.window} × {o.window} keep {pattern.density:.1%} of the scores")
    runs = []
    for name, attend in (("all patches", F.scaled_dot_product_attention), ("neighbourhood", near)):
        torch.manual_seed(0)
        model = VisionTransformer(o.side, o.width, o.layers, attend).to(o.device)
        runs.append(train(name, model, draw, o.steps))
    return finish(runs, o, f"A vision transformer, {o.side} × {o.side} patches and a class token")


if __name__ == "__main__":
    main()
