"""A block of ViT-S/16 whose MLP is two Kronecker chains, trained on synthetic images beside the dense one.

python examples/vit_block.py                          # seconds on a CPU
python examples/vit_block.py --images 128 --steps 50  # on a GPU
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn

import fretwork as fw

WIDTH, HIDDEN, HEADS, CLASSES = 384, 1536, 6, 10
# Widen: blocks of 64 × 64, then two interleaved ones of 768 × 192. Narrow: the same the other way round.
WIDEN = [(6, 64, 64, 1), (1, 768, 192, 2)]
NARROW = [(1, 192, 768, 2), (6, 64, 64, 1)]


class Block(nn.Module):
    """Attention and MLP, each on normalised tokens and added to them."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = mlp

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        images, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(images, tokens, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        o = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(o.transpose(1, 2).reshape(images, tokens, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))


class Classifier(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.block, self.head = Block(mlp), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x).mean(1))


def dense_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))


def kronecker_mlp() -> nn.Module:
    return nn.Sequential(fw.nn.KSLinear(WIDEN), nn.GELU(), fw.nn.KSLinear(NARROW))


def images_of(prototypes: torch.Tensor, labels: torch.Tensor, tokens: int) -> torch.Tensor:
    """Embedded patches: noise, and in each a little of what the class looks like."""
    noise = torch.randn(len(labels), tokens, WIDTH, device=labels.device)
    return noise + 0.5 * prototypes[labels][:, None]


def train(model: nn.Module, images: int, tokens: int, steps: int, device: torch.device) -> tuple[list[float], float]:
    """The losses, and the median milliseconds of a step."""
    torch.manual_seed(1)  # every model sees the same images
    prototypes = torch.randn(CLASSES, WIDTH, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, times = [], []
    for _ in range(steps):
        labels = torch.randint(CLASSES, (images,), device=device)
        x = images_of(prototypes, labels, tokens)
        began = time.perf_counter()
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # waits for the GPU
        times.append((time.perf_counter() - began) * 1e3)
    return losses, statistics.median(times[1:] or times)


def main(images: int, tokens: int, steps: int, device: torch.device) -> None:
    print(
        f"one block, {WIDTH} wide, MLP {HIDDEN}; {images} images of {tokens} tokens a step, {steps} steps on {device}"
    )
    print("mlp          in the mlp  in the block  ms a step  loss at first  at last")
    for name, mlp in (("dense", dense_mlp), ("kronecker", kronecker_mlp)):
        torch.manual_seed(0)
        model = Classifier(mlp()).to(device)
        inside, whole = (sum(p.numel() for p in m.parameters()) for m in (model.block.mlp, model.block))
        losses, ms = train(model, images, tokens, steps, device)
        print(f"{name:10} {inside:12,} {whole:13,} {ms:10.1f} {losses[0]:14.3f} {losses[-1]:8.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4, help="in a step (4)")
    parser.add_argument("--tokens", type=int, default=197, help="of an image (197, as of 224 × 224 pixels)")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    main(options.images, options.tokens, options.steps, torch.device(options.device))
