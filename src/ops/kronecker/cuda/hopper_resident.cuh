// Products whose weights fit into shared memory beside a ring for x. All threads gather the weights from where they lie
// while the first rows of x are fetched, so no kernel packs them first. A CTA keeps its columns and loops over row
// tiles.
#pragma once

#include "ops/kronecker/cuda/hopper_product.cuh"

namespace fretwork::kronecker::hopper {

/// The product and columns that a CTA keeps, its first tile of rows, and the distance to its next.
struct Seat {
  Tile tile;
  int first, by;
};
template <typename T, int kWidth, bool kByThreads>
__device__ __forceinline__ Seat seat_of(const ProductParams& p) {
  const int cta = static_cast<int>(blockIdx.x), seats = static_cast<int>(p.share.divisor);
  const int first = p.share.quotient(cta), seat = cta - first * seats;
  const int product = p.col_tiles.quotient(seat), col = seat - product * static_cast<int>(p.col_tiles.divisor);
  const int i = p.d.quotient(product), l = product - i * static_cast<int>(p.d.divisor);
  const Tile tile = from_unit<T, kByThreads>(p, {0, col * kWidth, l, i, 0, p.steps});
  return {tile, first, static_cast<int>(gridDim.x) / seats};
}

/// The weights of a tile's columns, as the copy engine would fetch them with k as the unit axis: a line of 128 bytes
/// for each column in every step.
template <int kWidth>
__device__ __forceinline__ void keep_weights(const ProductParams& p, const Tile& t, u32 to) {
  constexpr int kUnit = 8, kAtOnce = 4;  // elements in 16 bytes, and such units of a thread whose loads go together
  const Strands& s = p.strands;
  const int total = p.steps * kWidth * 8;
  const u16* const from = static_cast<const u16*>(s.w) + t.i * s.w_i + t.l * s.w_l;
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x); first < total; first += kAtOnce * kThreads) {
    u32 found[kAtOnce][kUnit];
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
      const int at = first + a * kThreads, line = at / 8, step = line / kWidth;
      const int col = t.col + line - step * kWidth, depth = step * 64 + at % 8 * kUnit;
      const u16* const column = from + col * s.w_j;
#pragma unroll
      for (int e = 0; e < kUnit; ++e) {
        found[a][e] = 0;
        if (at < total && col < p.b && depth + e < s.c) {
          found[a][e] = column[(depth + e) * s.w_k];
        }
      }
    }
#pragma unroll
    for (int a = 0; a < kAtOnce; ++a) {
      if (const int at = first + a * kThreads; at < total) {
        u32 words[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          words[w] = found[a][2 * w] | found[a][2 * w + 1] << 16;
        }
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to + tma::swizzled<128>(at * 16)), "r"(words[0]),
                     "r"(words[1]), "r"(words[2]), "r"(words[3])
                     : "memory");
      }
    }
  }
}

/// As multiply_16, with a ring of x alone and the weights of all steps at `weights`.
template <typename T, int kWidth>
__device__ __forceinline__ void multiply_kept(float (&d)[kWidth / 2], int steps, Stages<0>& stages, u32 base,
                                              u32 weights, Stages<0>::Ring& ring) {
  using wgmma::Major;
  constexpr Major kA = Major::mn;
  const u32 empty = shared_address(stages.empty), warpgroup = threadIdx.x / 128 - 1;
  int pending = -1;  // the stage that products in flight still read
#pragma unroll 1
  for (int n = 0; n < steps; ++n, ring.next()) {
    mbarrier::wait(shared_address(&stages.full[ring.stage]), ring.parity);
    const u64 a = wgmma::descriptor<128>(base + ring.stage * Stages<0>::kBytes + warpgroup * 8192, 8192);
    const u64 b = wgmma::descriptor<128>(weights + n * (kWidth * 128), 8192);
    wgmma::fence();
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      wgmma::multiply<T, kWidth, kA, Major::k>(d, a + q * wgmma::kNextK<128, kA>, b + q * wgmma::kNextK<128, Major::k>);
    }
    wgmma::commit();
    wgmma::wait<1>();
    release(empty, pending);
    pending = static_cast<int>(ring.stage);
  }
  wgmma::wait<0>();
  release(empty, pending);
}

/// What a kernel's CTAs do. kByThreads: y has no map, and x one of neighbours or none.
template <typename T, int kWidth, bool kByThreads>
__device__ __forceinline__ void make_seat(const ProductParams& p, Stages<0>& stages, T (&bias)[2][kWidth], u32 base) {
  using S = Stages<0>;
  const u32 staging = base + S::kCount * S::kBytes, weights = staging + kStagingBytes;
  const Seat seat = seat_of<T, kWidth, kByThreads>(p);
  const bool lines = kByThreads && !p.neighbours;
  init_ring(stages.full, stages.empty, S::kCount, lines ? kLineArrivals : 1, 8);

  const Tile from = source_of<kByThreads>(p, seat.tile);
  int tile = seat.first, step = 0;  // that are fetched next
  S::Ring ahead(1);
  const auto fetch_stages = [&](u32 most) {
#pragma unroll 1
    for (; most > 0 && tile < p.total; --most, ahead.next()) {
      mbarrier::wait(shared_address(&stages.empty[ahead.stage]), ahead.parity);
      const u32 full = shared_address(&stages.full[ahead.stage]);
      mbarrier::arrive_expect(full, S::kBytes);
      fetch_operand<T, false, kRows>(base + ahead.stage * S::kBytes, &p.x, full, from.row + tile * kRows,
                                     step * kLine<T>, from);
      if (++step == p.steps) {
        step = 0;
        tile += seat.by;
      }
    }
  };
  const auto tile_of = [&](int turn) {
    Tile t = seat.tile;
    t.row += (seat.first + turn * seat.by) * kRows;
    return t;
  };
  if (!lines && threadIdx.x == 0) {
    tma::prefetch(&p.x);
    if constexpr (!kByThreads) {
      tma::prefetch(&p.y);
    }
    fetch_stages(S::kCount);  // none of which is in use
  }
  __syncwarp();
  keep_weights<kWidth>(p, seat.tile, weights);
  fence_async_proxy();  // wgmma reads what was written here
  __syncthreads();
  if (threadIdx.x < 128) {
    fewer_registers<40>();
    if (lines) {
      fetch_lines<T>(p, stages, base, line_ends(staging), (p.total - seat.first + seat.by - 1) / seat.by, tile_of,
                     [](u32, const Tile&, int) {});
    } else if (threadIdx.x == 0) {
      fetch_stages(~0u);
    }
  } else {
    more_registers<232>();
    const int warpgroup = static_cast<int>(threadIdx.x) / 128 - 1;
    const u32 buffers = staging + warpgroup * 2 * kPieceBytes;
    S::Ring ring(0);
    u32 turn = 0;  // pieces stored so far
#pragma unroll 1
    for (int row = 0; seat.first + row * seat.by < p.total; ++row) {
      const Tile t = tile_of(row);
      const Bias<T, kWidth> carried(p, t);  // read while the products run
      float d[kWidth / 2];
#pragma unroll
      for (float& sum : d) {
        sum = 0.0f;
      }
      multiply_kept<T, kWidth>(d, p.steps, stages, base, weights, ring);
      finish_tile<T, kWidth, true, false, kByThreads>(p, t, d, carried, bias[warpgroup], buffers, turn);
    }
    if (threadIdx.x % 128 == 0) {
      tma::store_wait();
    }
  }
}

/// 16-bit types, batch last. p.share counts the seats, p.total the tiles of rows.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads, 1) product_resident(const __grid_constant__ ProductParams p) {
  extern __shared__ u8 raw[];
  __shared__ Stages<0> stages;
  __shared__ alignas(16) T bias[2][kWidth];
  const u32 base = (shared_address(raw) + 1023) & ~1023u;
  if (p.mapped) {
    make_seat<T, kWidth, false>(p, stages, bias, base);
  } else {
    make_seat<T, kWidth, true>(p, stages, bias, base);
  }
}

}  // namespace fretwork::kronecker::hopper
