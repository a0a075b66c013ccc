// The gradient of the weights on Hopper as a·d products: rows are b, columns c, and the depth is the batch. The batch
// is split into parts whose sums go to a workspace. The bias gradient, the sum of d_y over the batch, is computed in
// the same pass. In tf32, batch first with d = 2 or 4, rows are fetched as they lie, and a CTA sums the d products of a
// block at once (interleaved).
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

/// Warps 1 to 3 turn the right operand of `steps` stages around, from lines along columns to lines along the depth:
/// tf32 has no other instruction.
template <int kWidth, int kDeltas>
__device__ __forceinline__ void turn_right(int steps, Stages<kWidth, kDeltas>& stages, u32 base, u32 turned) {
  using S = Stages<kWidth, kDeltas>;
  typename S::Ring ring(0);
#pragma unroll 1
  for (int n = 0; n < steps; ++n, ring.next()) {
    stages.wait(ring);
    const u32 right = base + ring.stage * S::kBytes + S::kLeft;
#pragma unroll 1
    for (u32 box = threadIdx.x / 32 - 1; box < kWidth * kDeltas / 32; box += kTurningWarps) {
      tf32::turn_box<kDeltas>(right + box * 4096);
    }
    fence_async_proxy();  // wgmma reads what was written here
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      mbarrier::arrive(turned + 8 * ring.stage);
    }
  }
}

/// A warpgroup multiplies the stages of a tile, 64 rows × kWidth of each of kDeltas interleaved products. `sums` gets
/// the rows' sums of d_y, unrounded. Fragments take turns in two sets of registers, as those of products in flight must
/// not change.
template <int kDeltas, int kWidth>
__device__ __forceinline__ void multiply_interleaved(float (&d)[kDeltas][kWidth / 2], float (&sums)[kDeltas][2],
                                                     int steps, Stages<kWidth, kDeltas>& stages, u32 base,
                                                     typename Stages<kWidth, kDeltas>::Ring& ring, u32 turned) {
  using S = Stages<kWidth, kDeltas>;
  const u32 warpgroup = threadIdx.x / 128 - 1;
  const tf32::InterleavedRowReader<kDeltas> reader;
  u32 a[2][kDeltas][4];
  int pending = -1;  // the stage that products in flight still read
#pragma unroll 1
  for (int n = 0; n < steps; ++n, ring.next()) {
    stages.wait(ring);
    const u32 at = base + ring.stage * S::kBytes;
#pragma unroll
    for (u32 q = 0; q < 4; ++q) {
      reader.load(a[q % 2], at + warpgroup * (S::kLeft / 2), q);
#pragma unroll
      for (int l = 0; l < kDeltas; ++l) {
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
          sums[l][e % 2] += __uint_as_float(a[q % 2][l][e]);
          a[q % 2][l][e] = to_tf32(a[q % 2][l][e]);
        }
      }
      if (q == 0) {
        mbarrier::wait(turned + 8 * ring.stage, ring.parity);
      }
      wgmma::fence();
#pragma unroll
      for (u32 l = 0; l < kDeltas; ++l) {
        const u64 b = wgmma::descriptor<128>(at + S::kLeft + l * 1024, 16, kDeltas * 1024);
        wgmma::multiply_tf32<kWidth>(d[l], a[q % 2][l], b + q * wgmma::kNextK<128, wgmma::Major::k>);
      }
      wgmma::commit();
      wgmma::wait<1>();
      if (q == 0) {
        stages.release(pending);
      }
    }
    pending = static_cast<int>(ring.stage);
  }
  wgmma::wait<0>();
  stages.release(pending);
#pragma unroll
  for (auto& of_delta : sums) {
#pragma unroll
    for (float& sum : of_delta) {
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
    }
  }
}

/// kLast: the batch is the unit axis of d_y and x, else the features. kDeltas: see `gradient`.
template <typename T, int kWidth, bool kLast, int kDeltas>
struct GradientKernel {
  using S = Stages<kWidth, kDeltas>;
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
      turn_right(steps, stages, base, extra);
    }
  }

  __device__ __forceinline__ void consume() const {
    Consumer<S::kCount> at;
    const int above = static_cast<int>(threadIdx.x) / 128 * 64 - 64;  // rows of the warpgroup before
    each_tile([&](const Tile& t, int index) {
      if constexpr (kDeltas > 1) {
        float d[kDeltas][kWidth / 2] = {}, sums[kDeltas][2] = {};
        multiply_interleaved<kDeltas, kWidth>(d, sums, t.last - t.first, stages, base, at, extra);
        const int rows[2] = {t.row + above + row(0), t.row + above + row(1)};
        float* to = p.partials + static_cast<i64>(index / (p.row_tiles * p.col_tiles)) * kDeltas * p.b * p.line;
#pragma unroll
        for (int l = 0; l < kDeltas; ++l, to += static_cast<i64>(p.b) * p.line) {
          store_sums<kWidth>(d[l], p, t, rows, to);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            if (p.with_sums != 0 && t.col == 0 && threadIdx.x % 4 == 0 && rows[half] < p.b) {
              add_sum(p, to + static_cast<i64>(rows[half]) * p.line + p.c, sums[l][half]);
            }
          }
        }
      } else {
        const int rows[2] = {t.row + above + row(0), t.row + above + row(1)};
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
      }
    });
  }

  /// As row_of.
  static __device__ __forceinline__ int row(u32 half) {
    if constexpr (kDeltas > 1) {
      return static_cast<int>(tf32::InterleavedRowReader<kDeltas>::row_of(half));
    } else {
      return row_of<T, kLast>(half);
    }
  }
};

/// kDeltas > 1: tf32, batch first, as many products as d at once, 256 / kDeltas columns of each.
template <typename T, int kWidth, bool kLast, int kDeltas>
__global__ void __launch_bounds__(kThreads, 1) gradient(const __grid_constant__ GradientParams p) {
  using S = Stages<kWidth, kDeltas>;
  using Kernel = GradientKernel<T, kWidth, kLast, kDeltas>;
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
