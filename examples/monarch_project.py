"""Projects a dense matrix onto Monarch factors: how near they come, and what they cost, for a few block counts."""

from __future__ import annotations

import torch

import fretwork as fw


def smooth_kernel(n: int) -> torch.Tensor:
    """A matrix as physics has them: points that influence each other by their distance."""
    x = torch.linspace(0, 1, n, dtype=torch.float64)
    return 1 / (1 + 100 * (x[:, None] - x[None, :] ** 2).abs())


def hadamard(n: int) -> torch.Tensor:
    """A butterfly, and so a Monarch matrix too."""
    H = torch.ones(1, 1, dtype=torch.float64)
    while len(H) < n:
        H = torch.kron(H, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64))
    return H


def report(name: str, W: torch.Tensor, chain: str, patterns: list[fw.KroneckerPattern]) -> None:
    weights, error = fw.kronecker.project(W, patterns)
    product = fw.kronecker.to_dense(weights[0])
    for w in weights[1:]:
        product = fw.kronecker.to_dense(w) @ product
    measured = ((W - product).norm() / W.norm()).item()
    assert abs(measured - error) < 1e-9
    numbers = sum(w.numel() for w in weights)
    print(f"{name:10} {chain:16} {numbers:9,} {numbers / W.numel():9.1%} {error:12.2e}")


def main(n: int = 256) -> None:
    torch.manual_seed(0)
    matrices = {"random": torch.randn(n, n, dtype=torch.float64), "smooth": smooth_kernel(n), "hadamard": hadamard(n)}
    print(f"{n} x {n} matrices, {n * n:,} numbers each")
    print("matrix     factors            numbers  of dense        error")
    for name, W in matrices.items():
        for p in (4, 16, 64):
            report(name, W, f"monarch {p} x {p}", fw.kronecker.monarch(n, n, p, p))
        report(name, W, "butterfly", fw.kronecker.butterfly(n))


if __name__ == "__main__":
    main()
