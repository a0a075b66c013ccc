"""A linear layer of two Kronecker-sparse factors beside the dense one: numbers it holds, time, and error."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import fretwork as fw

# 384 features to 1536: six blocks of 64 × 64 first, then two interleaved ones of 768 × 192.
PATTERNS = [(6, 64, 64, 1), (1, 768, 192, 2)]


def median_ms(call: Callable[[], object], device: torch.device, rounds: int = 5) -> float:
    times = []
    for _ in range(rounds + 1):  # the first one makes kernels and plans
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times[1:])


def forward_and_backward(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """y and the gradient of x; those of the parameters are in their .grad."""
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(dy)
    assert x.grad is not None
    return y.detach(), x.grad


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).abs().max() / want.abs().max()).item()


def row(name: str, layer: nn.Module, x: torch.Tensor, dy: torch.Tensor, exact: tuple[torch.Tensor, ...]) -> str:
    count = sum(p.numel() for p in layer.parameters())
    with torch.no_grad():
        forward = median_ms(lambda: layer(x), x.device)
    both = median_ms(lambda: forward_and_backward(layer, x, dy), x.device)
    errors = [error(got, want) for got, want in zip(forward_and_backward(layer, x, dy), exact, strict=True)]
    return f"{name:10} {count:11,} {forward:11.2f} {both:13.2f} {errors[0]:11.1e} {errors[1]:11.1e}"


def main(batch: int, device: torch.device) -> None:
    torch.manual_seed(0)
    layer = fw.nn.KSLinear(PATTERNS, device=device)
    dense = nn.Linear(layer.in_features, layer.out_features, device=device)
    with torch.no_grad():  # the same matrix, so that both compute the same
        dense.weight.copy_(layer.to_dense())
        dense.bias.copy_(layer.bias)  # type: ignore[arg-type]
    x = torch.randn(batch, layer.in_features, device=device)
    dy = torch.randn(batch, layer.out_features, device=device)
    W = dense.weight.detach().double()
    exact = (x.double() @ W.T + dense.bias.detach().double(), dy.double() @ W)

    print(f"{layer}\non {device}, batch {batch}, errors against float64")
    print("layer       parameters  forward ms  with backward  error of y error of dx")
    print(row("nn.Linear", dense, x, dy, exact))
    print(row("KSLinear", layer, x, dy, exact))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    main(options.batch, torch.device(options.device))
