// All d products of a block at once on Hopper in tf32, batch first with d = 2 or 4: products and gradients.
#pragma once

#include "device/activation.cuh"
#include "device/epilogue.cuh"
#include "ops/kronecker/cuda/hopper_gradient.cuh"
#include "ops/kronecker/cuda/hopper_product.cuh"

// ----------------------------------------------------------------------------------------------------
// y = activation(x·Kᵀ + bias) on Hopper in tf32, batch first with d = 2 or 4. Rows of x and y are read and written as
// they lie; they hold the d products of a block interleaved. Columns and depth are counted in memory order, (j, l) and
// (k, l).

namespace fretwork::kronecker::hopper {

/// Adds the bias to a thread's sums of columns 8j + 2(lane%4) and the next.
template <int kDeltas, int kWidth>
__device__ __forceinline__ void add_interleaved(float (&d)[kDeltas][kWidth / 2],
                                                const float (&bias)[kDeltas * kWidth]) {
#pragma unroll
  for (int j = 0; j < kWidth / 8; ++j) {
    const auto both = load_run<float, 2 * kDeltas>(&bias[(8 * j + threadIdx.x % 4 * 2) * kDeltas]);
#pragma unroll
    for (int n = 0; n < 4 * kDeltas; ++n) {
      const int l = n % kDeltas, e = n / kDeltas;
      d[l][4 * j + e] += both.at(e % 2 * kDeltas + l);
    }
  }
}

/// 64 rows × 32 neighbours from piece · 32 to shared memory, as the copy engine swizzles rows of 128 bytes.
template <int kDeltas, int kSums>
__device__ __forceinline__ void write_interleaved(const float (&d)[kDeltas][kSums], int piece, u32 to) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {  // 16 bytes each: all of a column, or of two neighbours
    const int half = n / 2, j = kDeltas == 4 ? piece : 2 * piece + n % 2;
    const u32 unit = kDeltas == 4 ? threadIdx.x % 4 * 2 + n % 2 : n % 2 * 4 + threadIdx.x % 4;
    const auto at = [&](int e) { return d[e % kDeltas][4 * j + 2 * half + (kDeltas == 4 ? n % 2 : e / kDeltas)]; };
    const u32 row = tf32::InterleavedReader<kDeltas>::row_of(static_cast<u32>(half));
    tf32::store_shared(to + tma::swizzled<128>(row * 128 + unit * 16), at(0), at(1), at(2), at(3));
  }
}

/// Tiles are 128 rows × kWidth columns of all kDeltas = d products of a block.
template <int kDeltas, int kWidth>
__global__ void __launch_bounds__(kThreads, 1) product_interleaved(const __grid_constant__ ProductParams p) {
  using S = Stages<kWidth>;
  constexpr int kColumns = kDeltas * kWidth;
  extern __shared__ u8 raw[];
  __shared__ S stages;
  __shared__ alignas(16) float bias[2][kColumns];
  const u32 base = (shared_address(raw) + 1023) & ~1023u;
  init_ring(stages.full, stages.empty, S::kCount, 1, 8);
  if (threadIdx.x < 128) {
    fewer_registers<40>();
    if (threadIdx.x == 0) {
      tma::prefetch(&p.x);
      tma::prefetch(&p.weights);
      tma::prefetch(&p.y);
      wait_for_earlier_kernel();  // which packs the weights
      typename S::Ring ring(1);
      for (int index = static_cast<int>(blockIdx.x); index < p.total; index += static_cast<int>(gridDim.x)) {
        const Tile t = product_tile<kColumns>(p, index);
        for (int step = 0; step < p.steps; ++step, ring.next()) {
          mbarrier::wait(shared_address(&stages.empty[ring.stage]), ring.parity);
          const u32 full = shared_address(&stages.full[ring.stage]), to = base + ring.stage * S::kBytes;
          mbarrier::arrive_expect(full, S::kBytes);
          tma::load(to, &p.x, full, step * 32, t.row, 0, t.i);
          tma::load(to + kLeftBytes, &p.weights, full, step * (32 / kDeltas), t.col / kDeltas, 0, t.i);
        }
      }
    }
  } else {
    more_registers<232>();
    const int warpgroup = static_cast<int>(threadIdx.x) / 128 - 1;
    const u32 buffers = base + S::kCount * S::kBytes + warpgroup * 2 * kPieceBytes;
    typename S::Ring ring(0);
    u32 turn = 0;  // pieces stored so far
    for (int index = static_cast<int>(blockIdx.x); index < p.total; index += static_cast<int>(gridDim.x)) {
      const Tile t = product_tile<kColumns>(p, index);
      const Bias<float, kColumns> carried(p, t);  // read while the products run
      float d[kDeltas][kWidth / 2], unused[4];
#pragma unroll
      for (auto& of_delta : d) {
#pragma unroll
        for (float& sum : of_delta) {
          sum = 0.0f;
        }
      }
      multiply_tf32<tf32::InterleavedReader<kDeltas>, kDeltas, kWidth, false, false>(d, unused, p.steps, stages, base,
                                                                                     ring, 0);
      if (p.bias != nullptr) {
        carried.store(bias[warpgroup]);
        named_barrier(1 + warpgroup, 128);
        add_interleaved<kDeltas, kWidth>(d, bias[warpgroup]);
      }
#pragma unroll
      for (auto& of_delta : d) {
        activate(of_delta, p.activation);
      }
      const int row = t.row + warpgroup * 64;
#pragma unroll
      for (int piece = 0; piece < kColumns / 32; ++piece, ++turn) {
        const int col = t.col + piece * 32;
        store_in_turn<2>(
            turn, buffers, 1 + warpgroup, [&](u32 buffer) { write_interleaved(d, piece, buffer); },
            [&](u32 buffer) {
              if (col < p.b && row < p.batch) {
                tma::store(&p.y, buffer, col, row, 0, t.i);
              }
            });
      }
    }
    if (threadIdx.x % 128 == 0) {
      tma::store_wait();
    }
  }
}

}  // namespace fretwork::kronecker::hopper

// ----------------------------------------------------------------------------------------------------
// The gradient of the weights on Hopper in tf32, batch first with d = 2 or 4. Rows of d_y and x are fetched as they
// lie, and a CTA sums the d products of a block at once. Boxes of x are transposed in place, because wgmma needs lines
// along the batch.

namespace fretwork::kronecker::hopper {

/// Stages hold 32 rows of the batch: 128 · d neighbours of d_y, then 256 of x.
template <int kDeltas>
struct InterleavedStages {
  static constexpr int kWidth = 256 / kDeltas;  // columns of a tile
  static constexpr u32 kLeft = kRows * kDeltas * 128, kBytes = interleaved_stage_bytes(kDeltas);
  static constexpr u32 kCount = interleaved_stages(kDeltas);
  using Ring = fretwork::Ring<kCount>;
  u64 full[kCount], empty[kCount], turned[kCount];
};

/// One thread fetches the stages of a tile.
template <int kDeltas>
__device__ __forceinline__ void fetch_interleaved(const GradientParams& p, const Tile& t,
                                                  InterleavedStages<kDeltas>& stages, u32 base,
                                                  typename InterleavedStages<kDeltas>::Ring& ring) {
  using S = InterleavedStages<kDeltas>;
#pragma unroll 1
  for (int step = t.first; step < t.last; ++step, ring.next()) {
    mbarrier::wait(shared_address(&stages.empty[ring.stage]), ring.parity);
    const u32 full = shared_address(&stages.full[ring.stage]), to = base + ring.stage * S::kBytes;
    mbarrier::arrive_expect(full, S::kBytes);
    for (int at = 0; at < kRows * kDeltas; at += 32) {
      tma::load(to + at * 128, &p.d_y, full, t.row * kDeltas + at, step * 32, 0, t.i);
    }
    for (int at = 0; at < 256; at += 32) {
      tma::load(to + S::kLeft + at * 128, &p.x, full, t.col * kDeltas + at, step * 32, 0, t.i);
    }
  }
}

/// Three warps turn x around in all stages.
template <int kDeltas>
__device__ __forceinline__ void turn_interleaved(int steps, InterleavedStages<kDeltas>& stages, u32 base) {
  using S = InterleavedStages<kDeltas>;
  typename S::Ring ring(0);
#pragma unroll 1
  for (int n = 0; n < steps; ++n, ring.next()) {
    mbarrier::wait(shared_address(&stages.full[ring.stage]), ring.parity);
#pragma unroll 1
    for (u32 box = threadIdx.x / 32 - 1; box < 8; box += kTurningWarps) {
      tf32::turn_box<kDeltas>(base + ring.stage * S::kBytes + S::kLeft + box * 4096);
    }
    fence_async_proxy();  // wgmma reads what was written here
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      mbarrier::arrive(shared_address(&stages.turned[ring.stage]));
    }
  }
}

/// A warpgroup multiplies the stages of a tile, 64 rows × kWidth of each product. `sums` gets the rows' sums of d_y,
/// unrounded. Fragments take turns in two sets of registers, as those of products in flight must not change.
template <int kDeltas, int kWidth>
__device__ __forceinline__ void multiply_interleaved(float (&d)[kDeltas][kWidth / 2], float (&sums)[kDeltas][2],
                                                     int steps, InterleavedStages<kDeltas>& stages, u32 base,
                                                     typename InterleavedStages<kDeltas>::Ring& ring) {
  using S = InterleavedStages<kDeltas>;
  const u32 empty = shared_address(stages.empty), warpgroup = threadIdx.x / 128 - 1;
  const tf32::InterleavedRowReader<kDeltas> reader;
  u32 a[2][kDeltas][4];
  int pending = -1;  // the stage that products in flight still read
#pragma unroll 1
  for (int n = 0; n < steps; ++n, ring.next()) {
    mbarrier::wait(shared_address(&stages.full[ring.stage]), ring.parity);
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
        mbarrier::wait(shared_address(&stages.turned[ring.stage]), ring.parity);
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
        release(empty, pending);
      }
    }
    pending = static_cast<int>(ring.stage);
  }
  wgmma::wait<0>();
  release(empty, pending);
#pragma unroll
  for (auto& of_delta : sums) {
#pragma unroll
    for (float& sum : of_delta) {
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
    }
  }
}

template <int kDeltas>
__global__ void __launch_bounds__(kThreads, 1) gradient_interleaved(const __grid_constant__ GradientParams p) {
  using S = InterleavedStages<kDeltas>;
  extern __shared__ u8 raw[];
  __shared__ S stages;
  const u32 base = (shared_address(raw) + 1023) & ~1023u;
  if (threadIdx.x == 0) {
    for (u64& barrier : stages.turned) {
      mbarrier::init(shared_address(&barrier), kTurningWarps);
    }
  }
  init_ring(stages.full, stages.empty, S::kCount, 1, 8);
  if (threadIdx.x < 128) {
    fewer_registers<56>();
    if (threadIdx.x == 0) {
      tma::prefetch(&p.d_y);
      tma::prefetch(&p.x);
      typename S::Ring ring(1);
      for (int index = static_cast<int>(blockIdx.x); index < p.total; index += static_cast<int>(gridDim.x)) {
        fetch_interleaved<kDeltas>(p, gradient_tile<S::kWidth>(p, index), stages, base, ring);
      }
    } else if (threadIdx.x >= 32) {
      int steps = 0;  // of all tiles
      for (int index = static_cast<int>(blockIdx.x); index < p.total; index += static_cast<int>(gridDim.x)) {
        const Tile t = gradient_tile<S::kWidth>(p, index);
        steps += t.last - t.first;
      }
      turn_interleaved<kDeltas>(steps, stages, base);
    }
  } else {
    more_registers<224>();
    typename S::Ring ring(0);
    const int above = static_cast<int>(threadIdx.x) / 128 * 64 - 64;  // rows of the warpgroup before
    for (int index = static_cast<int>(blockIdx.x); index < p.total; index += static_cast<int>(gridDim.x)) {
      const Tile t = gradient_tile<S::kWidth>(p, index);
      float d[kDeltas][S::kWidth / 2] = {}, sums[kDeltas][2] = {};
      multiply_interleaved<kDeltas, S::kWidth>(d, sums, t.last - t.first, stages, base, ring);
      using Reader = tf32::InterleavedRowReader<kDeltas>;
      const int rows[2] = {t.row + above + static_cast<int>(Reader::row_of(0)),
                           t.row + above + static_cast<int>(Reader::row_of(1))};
      float* to = p.partials + static_cast<i64>(index / (p.row_tiles * p.col_tiles)) * kDeltas * p.b * p.line;
#pragma unroll
      for (int l = 0; l < kDeltas; ++l, to += static_cast<i64>(p.b) * p.line) {
        store_sums<S::kWidth>(d[l], p, t, rows, to);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (p.with_sums != 0 && t.col == 0 && threadIdx.x % 4 == 0 && rows[half] < p.b) {
            add_sum(p, to + static_cast<i64>(rows[half]) * p.line + p.c, sums[l][half]);
          }
        }
      }
    }
  }
}

}  // namespace fretwork::kronecker::hopper
