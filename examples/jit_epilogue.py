"""A 2:4 product with an epilogue of your own: y = silu(x·Gᵀ) · (x·Uᵀ), the gated layer of language models, in bf16.

G and U are one matrix for the kernel, eight rows of G before eight of U: a lane then holds the sums of both for the
same feature, and what is between them never reaches memory. Rows of the plain form can be taken apart and put together
like those of any tensor.

python examples/jit_epilogue.py                                          # without a GPU it compiles only
python examples/jit_epilogue.py --features 14336 --k 4096 --rows 4096
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F

import fretwork as fw

SOURCE = """
#include "device/gemm_sp.cuh"
using namespace fretwork;

struct Stage {
  static constexpr int kBytes = 128 * kValueBytes + 64 * kDepthBytes + 128 * 8;
  value_tile values;
  shared_tile<kDepthBytes> x;
  u32 words;
  __device__ explicit Stage(u32 base)
      : values{base}, x{base + 128 * kValueBytes}, words(base + 128 * kValueBytes + 64 * kDepthBytes) {}
};

/// A CTA of four warps makes 64 features of 64 rows of y (n, features) from 128 rows of G and U. features is a multiple
/// of 64, k of 64, n any; a row of `words`, the plain metadata, has k / 8 bytes.
extern "C" __global__ void __launch_bounds__(128)
gated(const bf16* values, const u8* words, const bf16* x, bf16* y, i64 features, i64 n, i64 k) {
  __shared__ __align__(128) u8 memory[2 * Stage::kBytes];
  const i64 row0 = blockIdx.x * 128ll, n_first = blockIdx.y * 64ll;
  const int there = int(min(64ll, n - n_first));  // rows of x
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m0 = warp % 2 * 64, n0 = warp / 2 * 32;
  const int steps = int(k / sparse_depth<bf16>);
  const auto stage = [&](int step) { return Stage(shared_address(memory) + step % 2 * Stage::kBytes); };
  const auto fetch = [&](int step) {
    if (step < steps) {
      const u8* const from = reinterpret_cast<const u8*>(values + row0 * (k / 2)) + i64{step} * kValueBytes;
      copy_lines<128, kValueBytes / 16, 128>(stage(step).values, from, k, 128, kValueBytes / 16);
      const u8* const dense = reinterpret_cast<const u8*>(x + n_first * k) + i64{step} * kDepthBytes;
      copy_lines<64, kDepthBytes / 16, 128>(stage(step).x, dense, 2 * k, there, kDepthBytes / 16);
      copy_async_small<8>(stage(step).words + threadIdx.x * 8, words + (row0 + threadIdx.x) * (k / 8) + step * 8, 8);
    }
    copy_async_commit();
  };
  float sums[4][4][4] = {};
  fetch(0);
  for (int step = 0; step < steps; ++step) {
    fetch(step + 1);
    copy_async_wait<1>();  // this step has come, the next one may be under way
    __syncthreads();
    gemm_sp<bf16, true>(sums, stage(step).values, stage(step).x, plain_words<bf16>{stage(step).words}, m0, n0);
    __syncthreads();  // before the next but one overwrites it
  }
  for (int r = 0; r < 4; ++r) {
    const i64 feature = (row0 + m0 + 16 * r) / 2 + lane / 4;
    for (int c = 0; c < 4; ++c) {
      for (int e = 0; e < 2; ++e) {
        const i64 row = n0 + 8 * c + lane % 4 * 2 + e;
        const float gate = sums[r][c][e], up = sums[r][c][e + 2];  // eight rows further down
        if (row < there) y[(n_first + row) * features + feature] = narrow<bf16>(gate / (1.0f + __expf(-gate)) * up);
      }
    }
  }
}
"""
gated = fw.jit.kernel(SOURCE, "gated")


def by_eights(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Eight rows of one, eight of the other, in turn: of values as of metadata."""
    return torch.stack((gate.unflatten(0, (-1, 8)), up.unflatten(0, (-1, 8))), 1).flatten(0, 2)


def milliseconds(call: Callable[[], object], times: int = 20) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    begin.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / times


def run(features: int, k: int, n: int) -> None:
    weights = [torch.randn(features, k, device="cuda") / k**0.5 for _ in range(2)]
    G, U = (fw.two_four.prune(w.bfloat16()) for w in weights)
    gate, up = fw.two_four.compress(G), fw.two_four.compress(U)
    values, words = by_eights(gate.values, up.values), by_eights(gate.metadata, up.metadata)
    x = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    y = x.new_empty(n, features)
    fused = lambda: gated((features // 64, -(-n // 64)), 128, values, words, x, y, features, n, k)  # noqa: E731
    fused()
    want = F.silu(x.double() @ G.double().T) * (x.double() @ U.double().T)
    error = ((y.double() - want).abs().max() / want.abs().max()).item()
    print(f"largest error, of the largest entry: {error:.2e}")
    two = lambda: fw.two_four.linear(x, gate, activation="silu") * fw.two_four.linear(x, up)  # noqa: E731
    print(f"fused {milliseconds(fused):.3f} ms, two products of fw.two_four {milliseconds(two):.3f} ms,", end=" ")
    print(f"torch dense {milliseconds(lambda: F.silu(x @ G.T) * (x @ U.T)):.3f} ms")


def main(features: int, k: int, n: int) -> None:
    for arch in ("sm_80", "sm_90a"):
        report = gated.compile(arch)
        print(f"{gated.name:9} {arch:7} {report.registers:4} registers, {report.spills} bytes spilled")
    if torch.cuda.is_available():
        run(features, k, n)
    else:
        print("running it needs a GPU")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=int, default=1024, help="of y, a multiple of 64 (1024)")
    parser.add_argument("--k", type=int, default=512, help="features of x, a multiple of 64 (512)")
    parser.add_argument("--rows", type=int, default=200, help="of x (200)")
    sizes = parser.parse_args()
    if sizes.features % 64 or sizes.k % 64 or min(sizes.features, sizes.k, sizes.rows) < 1:
        parser.error("features and k are multiples of 64")
    main(sizes.features, sizes.k, sizes.rows)
