"""A block of vision attention on a grid of patches: every patch, Swin's windows, and a neighbourhood.

The images are stripes whose direction changes from place to place; the model says the direction at each patch, which it
can see only from the patches around.

python examples/vision_neighborhood.py                                       # seconds on a CPU
python examples/vision_neighborhood.py --side 128 --images 4 --steps 200     # on a GPU
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fretwork as fw
from training import Attend, Block, Run, finish, options, train

WIDTH, HEADS, DIRECTIONS = 64, 2, 4


def attend_by(pattern: fw.Pattern) -> Attend:
    return lambda q, k, v: fw.attention(q, k, v, pattern)


class Model(nn.Module):
    def __init__(self, side: int, attends: list[Attend]) -> None:
        super().__init__()
        self.embed = nn.Linear(1, WIDTH)
        at = torch.arange(side)[:, None] * torch.tensor([math.pi / 2, math.pi / 4, math.pi / 8, math.pi / 16])
        waves = torch.cat([at.sin(), at.cos()], 1)  # (side, 8)
        grid = torch.cat([waves[:, None].expand(-1, side, -1), waves[None].expand(side, -1, -1)], 2)
        self.register_buffer("places", F.pad(grid.reshape(side * side, 16), (0, WIDTH - 16)))
        self.layers = nn.Sequential(*(Block(WIDTH, HEADS, attend) for attend in attends))
        self.answer = nn.Linear(WIDTH, DIRECTIONS)

    def forward(self, x: Tensor) -> Tensor:
        return self.answer(self.layers(self.embed(x) + self.places))


def stripes(images: int, side: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Brightness of each patch, and the direction of the stripes there: one for each quarter of the image."""
    quarters = torch.randint(DIRECTIONS, (images, 2, 2), device=device)
    labels = quarters.repeat_interleave(side // 2, 1).repeat_interleave(side // 2, 2)
    angle = labels * math.pi / DIRECTIONS
    y, x = torch.meshgrid(*(torch.arange(side, device=device),) * 2, indexing="ij")
    phase = torch.rand(images, 1, 1, device=device) * 6
    bright = torch.sin((x * angle.cos() + y * angle.sin()) * 1.6 + phase)
    return bright.reshape(images, side * side, 1), labels.reshape(images, -1)


def main(given: list[str] | None = None) -> list[Run]:
    sizes = dict(side=(32, 16), window=(7, 7), images=(2, 1), steps=(30, 6))
    o = options(__doc__ or "", "vision_neighborhood", given, **sizes)
    near = fw.patterns.neighborhood((o.side, o.side), o.window)
    windows = [fw.patterns.swin(o.side, o.side, 8, shift) for shift in (0, 4)]
    print(f"two layers, {WIDTH} wide; {o.images} images of {o.side} × {o.side} patches a step on {o.device}")
    kept = [f"{p.density:.1%}" for p in (*windows, near)]
    print(f"windows keep {kept[0]} and {kept[1]} of the scores, neighbourhoods {kept[2]}")
    images = stripes(o.images, o.side, o.device)  # the same at every step

    def draw(held_out: bool) -> tuple[Tensor, Tensor]:
        return stripes(o.images, o.side, o.device) if held_out else images

    ways: dict[str, list[Attend]] = {
        "every patch": [F.scaled_dot_product_attention] * 2,
        "swin 8": [attend_by(p) for p in windows],
        f"nearest {o.window} × {o.window}": [attend_by(near)] * 2,
    }
    runs = []
    for name, layers in ways.items():
        torch.manual_seed(0)
        model = Model(o.side, layers).to(o.device)
        runs.append(train(name, model, draw, o.steps, rate=3e-3))
    return finish(runs, o, "Vision attention on a grid of patches")


if __name__ == "__main__":
    main()
