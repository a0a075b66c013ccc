"""A 2:4 compressor of your own, with metadata in an order of your own, and the product that reads it: y = A·Bᵀ in bf16.

Words of metadata lie column by column here, word w of row r at w · M + r, so that lanes with neighbouring rows read
neighbouring words and no shared memory is needed for them. The product asks for them through a layout.

python examples/jit_compressor.py                              # without a GPU it compiles only
python examples/jit_compressor.py --m 4096 --n 4096 --k 4096
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

import fretwork as fw

SOURCE = """
#include "device/gemm_sp.cuh"
#include "device/load.cuh"
using namespace fretwork;

/// A thread compresses 16 neighbours of A, which is 2:4: eight values and one word, four nibbles.
extern "C" __global__ void compress(const bf16* a, bf16* values, u16* words, i64 m, i64 k) {
  const i64 at = blockIdx.x * 256ll + threadIdx.x, row = at / (k / 16), word = at % (k / 16);
  if (row >= m) return;
  const run<bf16, 16> dense = load_run<bf16, 16>(a + row * k + word * 16);
  u32 nibbles = 0;
  for (int g = 0; g < 4; ++g) {
    u32 there = 0;  // a bit for each non-zero; -0.0 is zero
    for (int e = 0; e < 4; ++e) there |= u32((dense.at(4 * g + e).bits & 0x7fff) != 0) << e;
    // With fewer than two the lowest free place is kept as well: every nibble is a valid one.
    const int second = max(1, 31 - __clz(there | 1)), first = __popc(there) > 1 ? __ffs(there) - 1 : 0;
    nibbles |= u32(first | second << 2) << 4 * g;
    values[row * (k / 2) + word * 8 + 2 * g] = a[row * k + word * 16 + 4 * g + first];
    values[row * (k / 2) + word * 8 + 2 * g + 1] = a[row * k + word * 16 + 4 * g + second];
  }
  words[word * m + row] = u16(nibbles);
}

/// This order of words, seen from a tile.
struct columns_of_words {
  const u16* first;
  i64 m;
  __device__ u32 operator()(u32 row, u32 word) const { return first[word * m + row]; }
};

struct Stage {
  static constexpr int kBytes = 128 * kValueBytes + 128 * kDepthBytes;
  value_tile values;
  shared_tile<kDepthBytes> b;
  __device__ explicit Stage(u32 base) : values{base}, b{base + 128 * kValueBytes} {}
};

/// A CTA of four warps makes 128 x 128 of y. m and n are multiples of 128, k of 64, b is (n, k).
extern "C" __global__ void __launch_bounds__(128)
product(const bf16* values, const u16* words, const bf16* b, bf16* y, i64 m, i64 n, i64 k) {
  __shared__ __align__(128) u8 memory[2 * Stage::kBytes];
  const i64 row0 = blockIdx.y * 128ll, col0 = blockIdx.x * 128ll;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m0 = warp % 2 * 64, n0 = warp / 2 * 64;
  const int steps = int(k / sparse_depth<bf16>);
  const auto stage = [&](int step) { return Stage(shared_address(memory) + step % 2 * Stage::kBytes); };
  const auto fetch = [&](int step) {
    if (step < steps) {
      const u8* const from = reinterpret_cast<const u8*>(values + row0 * (k / 2)) + i64{step} * kValueBytes;
      copy_lines<128, kValueBytes / 16, 128>(stage(step).values, from, k, 128, kValueBytes / 16);
      const u8* const dense = reinterpret_cast<const u8*>(b + col0 * k) + i64{step} * kDepthBytes;
      copy_lines<128, kDepthBytes / 16, 128>(stage(step).b, dense, 2 * k, 128, kDepthBytes / 16);
    }
    copy_async_commit();
  };
  float sums[4][8][4] = {};
  fetch(0);
  for (int step = 0; step < steps; ++step) {
    fetch(step + 1);
    copy_async_wait<1>();  // this step has come, the next one may be under way
    __syncthreads();
    const columns_of_words layout{words + i64{step} * 4 * m + row0, m};
    gemm_sp<bf16, true>(sums, stage(step).values, stage(step).b, layout, m0, n0);
    __syncthreads();  // before the next but one overwrites it
  }
  for (int r = 0; r < 4; ++r) {
    for (int c = 0; c < 8; ++c) {
      for (int e = 0; e < 4; e += 2) {
        const i64 row = row0 + m0 + 16 * r + lane / 4 + e / 2 * 8, col = col0 + n0 + 8 * c + lane % 4 * 2;
        *reinterpret_cast<u32*>(y + row * n + col) = narrow_pair<bf16>(sums[r][c][e], sums[r][c][e + 1]);
      }
    }
  }
}
"""
compress, product = (fw.jit.kernel(SOURCE, name) for name in ("compress", "product"))


def milliseconds(call: Callable[[], object], times: int = 20) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    begin.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / times


def run(m: int, n: int, k: int) -> None:
    A = fw.two_four.prune(torch.randn(m, k, device="cuda", dtype=torch.bfloat16))
    B = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    values, words = A.new_empty(m, k // 2), torch.empty(k // 16, m, device="cuda", dtype=torch.int16)
    y = A.new_empty(m, n)
    packing = lambda: compress(-(-m * k // 16 // 256), 256, A, values, words, m, k)  # noqa: E731
    product_of = lambda: product((n // 128, m // 128), 128, values, words, B, y, m, n, k)  # noqa: E731
    packing()
    plain = fw.TwoFour(values, words.t())  # the plain form of any strides: these words are one, seen turned
    print("same matrix:", torch.equal(plain.to_dense(), A))
    product_of()
    want = A.double() @ B.double().T
    error = ((y.double() - want).abs().max() / want.abs().max()).item()
    print(f"largest error, of the largest entry: {error:.2e}")
    print(f"compress {milliseconds(packing):.3f} ms, product {milliseconds(product_of):.3f} ms,", end=" ")
    print(f"torch dense {milliseconds(lambda: A @ B.T):.3f} ms")


def main(m: int, n: int, k: int) -> None:
    for kernel in (compress, product):
        for arch in ("sm_80", "sm_90a"):
            report = kernel.compile(arch)
            print(f"{kernel.name:9} {arch:7} {report.registers:4} registers, {report.spills} bytes spilled")
    if torch.cuda.is_available():
        run(m, n, k)
    else:
        print("running them needs a GPU")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, multiple in (("m", 128), ("n", 128), ("k", 64)):
        parser.add_argument(f"--{name}", type=int, default=1024, help=f"a multiple of {multiple} (1024)")
    sizes = parser.parse_args()
    if sizes.m % 128 or sizes.n % 128 or sizes.k % 64 or min(sizes.m, sizes.n, sizes.k) < 1:
        parser.error("m and n are multiples of 128, k of 64")
    main(sizes.m, sizes.n, sizes.k)
