// y = activation(x·Kᵀ + bias) on Hopper in tf32, batch first with d = 2 or 4. Rows of x and y are read and written as
// they lie; they hold the d products of a block interleaved. Columns and depth are counted in memory order, (j, l) and
// (k, l).
#pragma once

#include "device/activation.cuh"
#include "device/epilogue.cuh"
#include "ops/kronecker/cuda/hopper_product.cuh"

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
