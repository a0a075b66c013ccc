"""A block of ViT-S/16 whose MLP is two Kronecker chains, trained on synthetic images beside the dense one.

python examples/vit_block.py                          # seconds on a CPU
python examples/vit_block.py --images 128 --steps 50  # on a GPU
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fretwork as fw
from training import Block, Draw, Run, finish, options, train

WIDTH, HEADS, CLASSES = 384, 6, 10
# Widen: blocks of 64 × 64, then two interleaved ones of 768 × 192. Narrow: the same the other way round.
WIDEN = [(6, 64, 64, 1), (1, 768, 192, 2)]
NARROW = [(1, 192, 768, 2), (6, 64, 64, 1)]


class Classifier(nn.Module):
    """Of images whose patches are embedded; without an MLP of its own the block has the dense one."""

    def __init__(self, mlp: nn.Sequential | None) -> None:
        super().__init__()
        self.block, self.head = Block(WIDTH, HEADS, F.scaled_dot_product_attention), nn.Linear(WIDTH, CLASSES)
        self.block.mlp = mlp or self.block.mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x).mean(1))


def kronecker_mlp() -> nn.Sequential:
    return nn.Sequential(fw.nn.KSLinear(WIDEN), nn.GELU(), fw.nn.KSLinear(NARROW))


def embedded(images: int, tokens: int, device: torch.device) -> Draw:
    """Embedded patches, noise with a little of what the class looks like in each, and the classes."""
    torch.manual_seed(1)
    prototypes = torch.randn(CLASSES, WIDTH, device=device)

    def draw(held_out: bool) -> tuple[Tensor, Tensor]:
        labels = torch.randint(CLASSES, (images,), device=device)
        return torch.randn(images, tokens, WIDTH, device=device) + 0.5 * prototypes[labels][:, None], labels

    return draw


def main(given: list[str] | None = None) -> list[Run]:
    o = options(__doc__ or "", "vit_block", given, images=(4, 4), tokens=(197, 8), steps=(8, 6))
    print(f"one block, {WIDTH} wide; {o.images} images of {o.tokens} tokens a step on {o.device}")
    draw, runs = embedded(o.images, o.tokens, o.device), []
    for name, mlp in (("dense", lambda: None), ("kronecker", kronecker_mlp)):
        torch.manual_seed(0)
        model = Classifier(mlp()).to(o.device)
        print(f"{name}: {sum(p.numel() for p in model.block.mlp.parameters()):,} parameters in the MLP")
        runs.append(train(name, model, draw, o.steps, rate=1e-3))
    return finish(runs, o, "A block of ViT-S/16")


if __name__ == "__main__":
    main()
