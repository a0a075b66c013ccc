// The gradient of the weights on Hopper as a·d products: rows are b, columns c, and the depth is the batch. The batch
// is split into parts whose sums go to a workspace. The bias gradient, the sum of d_y over the batch, is computed in
// the same pass.
#pragma once

#include "ops/kronecker/cuda/hopper.cuh"

namespace fretwork::kronecker::hopper {

/// The tiles of a product read the same rows of the batch, so they run together.
template <int kWidth>
__device__ __forceinline__ Tile gradient_tile(const GradientParams& p, int index) {
  const int tile = index % (p.row_tiles * p.col_tiles), rest = index / (p.row_tiles * p.col_tiles);
  const int product = rest % p.products, first = rest / p.products * p.steps_per_part;
  return {tile / p.col_tiles * kRows,
          tile % p.col_tiles * kWidth,
          product % p.d,
          product / p.d,
          first,
          min(first + p.steps_per_part, p.steps)};
}

/// One sum to its place among the partial ones.
__device__ __forceinline__ void add_sum(const GradientParams& p, float* to, float sum) {
  *to = p.add != 0 ? *to + sum : sum;
}

/// Sums of a warpgroup to the partial matrix at `to`.
template <int kWidth>
__device__ __forceinline__ void store_sums(const float (&d)[kWidth / 2], const GradientParams& p, const Tile& t,
                                           const int (&rows)[2], float* to) {
  const int col = t.col + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (rows[half] < p.b) {
      float* line = to + static_cast<i64>(rows[half]) * p.line + col;
#pragma unroll
      for (int j = 0; j < kWidth / 8; ++j) {
        const float low = d[4 * j + 2 * half], high = d[4 * j + 2 * half + 1];
        if (col + 8 * j + 1 < p.c) {
          float2& to_both = *reinterpret_cast<float2*>(line + 8 * j);
          const float2 before = p.add != 0 ? to_both : make_float2(0.0f, 0.0f);
          to_both = make_float2(before.x + low, before.y + high);
        } else if (col + 8 * j < p.c) {
          add_sum(p, line + 8 * j, low);
        }
      }
    }
  }
}

/// kLast: the batch is the unit axis of d_y and x, else the features.
template <typename T, int kWidth, bool kLast>
struct GradientKernel {
  using S = Stages<kWidth>;
  static constexpr bool kTurns = is_same<T, float> && !kLast;  ///< tf32 has the depth as the unit axis
  static constexpr Roles kRoles{
      .consumers = 2, .producer_registers = kTurns ? 56 : 40, .consumer_registers = kTurns ? 224 : 232};
  const GradientParams& p;
  S& stages;
  u32 base, extra;  ///< stages; barriers of turned stages, or ones

  template <typename Body>
  __device__ __forceinline__ void each_tile(Body body) const {
    for (int index = static_cast<int>(blockIdx.x); index < p.total; index += static_cast<int>(gridDim.x)) {
      body(gradient_tile<kWidth>(p, index), index);
    }
  }

  __device__ __forceinline__ void produce() const {
    if (threadIdx.x == 0) {
      tma::prefetch(&p.d_y);
      tma::prefetch(&p.x);
      Producer<S::kCount> at;
      each_tile([&](const Tile& t, int) { fetch<T, kWidth, kLast, kLast>(&p.d_y, &p.x, t, t, stages, base, at); });
    } else if (kTurns && threadIdx.x >= 32) {
      int steps = 0;  // of all tiles
      each_tile([&](const Tile& t, int) { steps += t.last - t.first; });
      turn_right<kWidth>(steps, stages, base, extra);
    }
  }

  __device__ __forceinline__ void consume() const {
    Consumer<S::kCount> at;
    const int above = static_cast<int>(threadIdx.x) / 128 * 64 - 64;  // rows of the warpgroup before
    each_tile([&](const Tile& t, int index) {
      const int rows[2] = {t.row + above + row_of<T, kLast>(0), t.row + above + row_of<T, kLast>(1)};
      float d[kWidth / 2], sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      clear(d);
      float* to = p.partials + static_cast<i64>(index / (p.row_tiles * p.col_tiles)) * p.b * p.line;
      if (p.with_sums != 0 && t.col == 0) {
        multiply<T, kWidth, kLast, kLast, true>(d, sums, t.last - t.first, stages, base, at, extra);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (threadIdx.x % 4 == 0 && rows[half] < p.b) {
            add_sum(p, to + static_cast<i64>(rows[half]) * p.line + p.c, sums[2 * half]);
          }
        }
      } else {
        multiply<T, kWidth, kLast, kLast, false>(d, sums, t.last - t.first, stages, base, at, extra);
      }
      store_sums<kWidth>(d, p, t, rows, to);
    });
  }
};

template <typename T, int kWidth, bool kLast>
__global__ void __launch_bounds__(kThreads, 1) gradient(const __grid_constant__ GradientParams p) {
  using S = Stages<kWidth>;
  using Kernel = GradientKernel<T, kWidth, kLast>;
  extern __shared__ u8 raw[];
  __shared__ S stages;
  __shared__ u64 turned[S::kCount];
  constexpr u32 kOnes = S::kCount * S::kBytes;
  const u32 base = stages_in(raw);
  if constexpr (sizeof(T) == 2) {
    if (threadIdx.x < 256) {  // 8 × 64 ones
      const u32 one = narrow<T>(1.0f).bits;
      *reinterpret_cast<u32*>(raw + (base - shared_address(raw)) + kOnes + threadIdx.x * 4) = one << 16 | one;
      fence_async_proxy();
    }
  }
  init_barriers([&] {
    stages.make(1, 8);
    if constexpr (Kernel::kTurns) {
      for (u64& barrier : turned) {
        mbarrier::init(shared_address(&barrier), kTurningWarps);
      }
    }
  });
  run_warp_specialized(Kernel{p, stages, base, Kernel::kTurns ? shared_address(turned) : base + kOnes});
}

}  // namespace fretwork::kronecker::hopper
