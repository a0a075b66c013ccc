"""A pattern of one's own: a union of bands in five lines, its picture, and its speed.

python examples/custom_pattern.py
python examples/custom_pattern.py --seq 16384 --heads 16 --depth 128   # on a GPU
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import fretwork as fw


def telescope(seq: int) -> fw.Pattern:
    """64 keys one by one, the 64 before them by twos, then by fours and eights; and the first few always."""
    pattern = fw.patterns.sinks(seq, 4, 64)
    for step in (2, 4, 8):
        pattern = pattern | fw.patterns.band(seq, 64 - 127 * step, step, 64)
    return pattern


def picture(pattern: fw.Pattern, side: int = 32) -> str:
    """Squares of the matrix by how full they are."""
    cell = pattern.shape[0] // side
    share = pattern.mask()[: cell * side, : cell * side].float().reshape(side, cell, side, cell).mean((1, 3))
    inks = " ░▒▓█"
    return "\n".join("".join(inks[int((x > 0) + x * 3.999)] * 2 for x in row) for row in share.tolist())


def median_ms(call: Callable[[], object], device: torch.device, rounds: int = 7) -> float:
    call()
    times = []
    for _ in range(rounds):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def main(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    pattern = telescope(options.seq)
    print(f"{pattern.text}\n{pattern.nnz:,} of {options.seq**2:,} scores, density {pattern.density:.4f}")
    print(picture(telescope(1024)))
    print(pattern.describe())

    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = (1, options.heads, options.seq, options.depth)
    q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))
    mask = pattern.mask(device).bool()
    dense = torch.nn.functional.scaled_dot_product_attention

    def both(o: torch.Tensor) -> object:
        return torch.autograd.grad(o.sum(), (q, k, v))

    difference = (fw.attention(q, k, v, pattern) - dense(q, k, v, mask)).abs().max().item()
    forward = [median_ms(call, device) for call in
               (lambda: fw.attention(q, k, v, pattern), lambda: dense(q, k, v, mask))]  # fmt: skip
    whole = [median_ms(lambda: both(fw.attention(q, k, v, pattern)), device),
             median_ms(lambda: both(dense(q, k, v, mask)), device)]  # fmt: skip
    print(f"\n{'':22} forward ms  with gradients")
    print(f"{'fw.attention':22} {forward[0]:10.2f} {whole[0]:15.2f}")
    print(f"{'torch with the mask':22} {forward[1]:10.2f} {whole[1]:15.2f}")
    print(f"largest difference {difference:.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--depth", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    main(parser.parse_args())
