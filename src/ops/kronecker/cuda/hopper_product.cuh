// y = activation(x·Kᵀ + bias) on Hopper as a·d products: rows are the batch, columns b, depth c.
#pragma once

#include "device/activation.cuh"
#include "device/epilogue.cuh"
#include "device/load.cuh"
#include "ops/kronecker/cuda/hopper.cuh"

namespace fretwork::kronecker::hopper {

/// A group of tiles of the batch goes through all products and columns before the next: it stays in the cache for
/// them, and CTAs that run together read neighbours. A tile may be so short that real divisions would take its time.
template <int kWidth>
__device__ __forceinline__ Tile product_tile(const ProductParams& p, int index) {
  const int group = p.group.quotient(index), in_group = index - group * static_cast<int>(p.group.divisor);
  const bool whole = (group + 1) * static_cast<int>(p.group.divisor) <= p.total;
  const Divisor& rows = whole ? p.share : p.tail;
  const int rest = rows.quotient(in_group), row = in_group - rest * static_cast<int>(rows.divisor);
  const int product = p.col_tiles.quotient(rest), col = rest - product * static_cast<int>(p.col_tiles.divisor);
  const int i = p.d.quotient(product), l = product - i * static_cast<int>(p.d.divisor);
  return {(group * static_cast<int>(p.share.divisor) + row) * kRows, col * kWidth, l, i, 0, p.steps};
}

/// kByThreads: where x has a map of neighbours, a line begins within a unit of 16 bytes, and its tiles up to so many
/// rows earlier.
template <typename T, bool kByThreads>
__device__ __forceinline__ Tile from_unit(const ProductParams& p, Tile t) {
  if (kByThreads && p.neighbours) {
    t.row -= t.l * static_cast<int>(p.strands.x_line) % (16 / static_cast<int>(sizeof(T)));
  }
  return t;
}

/// Where the copy engine finds a tile's rows of x.
template <bool kByThreads>
__device__ __forceinline__ Tile source_of(const ProductParams& p, Tile t) {
  if constexpr (kByThreads) {
    t.row += t.l * static_cast<int>(p.strands.x_line);
    t.l = 0;
  }
  return t;
}

/// The CTA's next tile. Some SMs are nearer to memory than others, so that in a long launch each takes what is next.
__device__ __forceinline__ int next_tile(const ProductParams& p, int index) {
  const int all = static_cast<int>(gridDim.x);
  if (p.taken == nullptr) {
    return index + all;
  }
  return (index + 1) % p.together != 0 ? index + 1 : (atomicAdd(p.taken, 1) + all) * p.together;
}

/// How far the fetching thread is.
struct Progress {
  int index, step;  ///< tile, and step of its depth
  u32 stages;       ///< filled so far
};

/// The first stages of the ring: kLeft is x alone, else the weights alone.
template <typename T, int kWidth, bool kLast, bool kWeightsK, bool kByThreads, bool kLeft>
__device__ __forceinline__ Progress fetch_ahead(const ProductParams& p, Stages<kWidth>& stages, u32 base) {
  using S = Stages<kWidth>;
  Progress at{static_cast<int>(blockIdx.x), 0, 0};
#pragma unroll 1
  for (; at.stages < S::kCount && at.index < p.total; ++at.stages) {
    const Tile t = from_unit<T, kByThreads>(p, product_tile<kWidth>(p, at.index));
    const u32 full = shared_address(&stages.full[at.stages]), to = base + at.stages * S::kBytes;
    if constexpr (kLeft) {
      const Tile from = source_of<kByThreads>(p, t);
      mbarrier::arrive_expect(full, S::kBytes);
      fetch_operand<T, !kLast, kRows>(to, &p.x, full, from.row, at.step * kLine<T>, from);
    } else {
      fetch_operand<T, kWeightsK, kWidth>(to + kLeftBytes, &p.weights, full, t.col, at.step * kLine<T>, t);
    }
    if (++at.step == p.steps) {
      at.step = 0;
      at.index += static_cast<int>(gridDim.x);
    }
  }
  return at;
}

/// Fetches tiles until there are none. Where CTAs take what is next, `tiles` says which one begins in a stage, or that
/// all have gone. The weights may still be packed by the kernel before; x was there before that began.
template <typename T, int kWidth, bool kLast, bool kWeightsK, bool kByThreads>
__device__ __forceinline__ void fetch_tiles(const ProductParams& p, Stages<kWidth>& stages, int* tiles, u32 base) {
  Progress at{static_cast<int>(blockIdx.x) * p.together, 0, 0};
  if (p.behind) {
    fetch_ahead<T, kWidth, kLast, kWeightsK, kByThreads, true>(p, stages, base);
    wait_for_earlier_kernel();
    at = fetch_ahead<T, kWidth, kLast, kWeightsK, kByThreads, false>(p, stages, base);
  }
  Producer<Stages<kWidth>::kCount> ring;
  for (u32 s = 0; s < at.stages; ++s) {
    ring.next();
  }
  for (int index = at.index, step = at.step, next; index < p.total; index = next, step = 0) {
    next = next_tile(p, index);  // on its way while this one is fetched
    Tile t = from_unit<T, kByThreads>(p, product_tile<kWidth>(p, index));
    t.first = step;
    if (p.taken != nullptr) {
      stages.acquire(ring);
      tiles[ring.stage] = index;
    }
    fetch<T, kWidth, !kLast, kWeightsK>(&p.x, &p.weights, t, source_of<kByThreads>(p, t), stages, base, ring);
  }
  if (p.taken != nullptr) {
    const u32 full = stages.acquire(ring);
    tiles[ring.stage] = p.total;
    mbarrier::arrive(full);
  }
}

/// The same for lines that the copy engine cannot follow. All fetching threads call it; CTAs take turns.
template <typename T, int kWidth, bool kWeightsK>
__device__ __forceinline__ void fetch_tile_lines(const ProductParams& p, Stages<kWidth>& stages, u32 base) {
  using S = Stages<kWidth>;
  const int cta = static_cast<int>(blockIdx.x), ctas = static_cast<int>(gridDim.x);
  const auto weights = [&](u32 stage, const Tile& t, int step) {
    const u32 full = shared_address(&stages.full[stage]), to = base + stage * S::kBytes + kLeftBytes;
    mbarrier::arrive_expect(full, S::kBytes - kLeftBytes);
    fetch_operand<T, kWeightsK, kWidth>(to, &p.weights, full, t.col, step * kLine<T>, t);
  };
  if (p.behind) {
    wait_for_earlier_kernel();
  }
  fetch_lines<T>(
      p, stages, base, line_ends(base + S::kCount * S::kBytes), (p.total - cta + ctas - 1) / ctas,
      [&](int turn) { return product_tile<kWidth>(p, cta + turn * ctas); }, weights);
}

/// The CTA's next tile; where it takes what is next, the one that begins in the ring's stage, once it is there. The
/// lane that reads it is the one that releases stages.
template <int kWidth>
__device__ __forceinline__ int tile_of(const ProductParams& p, Stages<kWidth>& stages, const int* tiles,
                                       const typename Stages<kWidth>::Ring& ring, int turn) {
  if (p.taken == nullptr) {
    return static_cast<int>(blockIdx.x + static_cast<u32>(turn) * gridDim.x);
  }
  stages.wait(ring);
  int index = 0;
  if (threadIdx.x % 32 == 0) {
    index = tiles[ring.stage];
  }
  return __shfl_sync(~0u, index, 0);
}

/// The bias of a tile's columns on its way to shared memory: thread t of a warpgroup carries columns t and t + 128.
template <typename T, int kWidth>
struct Bias {
  T carried[kWidth > 128 ? 2 : 1];

  __device__ __forceinline__ Bias(const ProductParams& p, const Tile& t) {
#pragma unroll
    for (int n = 0; n * 128 < kWidth; ++n) {
      const int j = t.col + n * 128 + static_cast<int>(threadIdx.x % 128);
      const bool there = p.bias != nullptr && n * 128 + threadIdx.x % 128 < kWidth && j < p.b;
      const i64 at = (static_cast<i64>(t.i) * p.b + j) * p.d.divisor + t.l;
      carried[n] = there ? static_cast<const T*>(p.bias)[at * p.bias_stride] : T{0};
    }
  }
  __device__ __forceinline__ void store(T (&to)[kWidth]) const {
#pragma unroll
    for (int n = 0; n * 128 < kWidth; ++n) {
      if (const u32 at = n * 128 + threadIdx.x % 128; at < kWidth) {
        to[at] = carried[n];
      }
    }
  }
};

template <typename T, int kWidth>
__device__ __forceinline__ void add_columns(float (&d)[kWidth / 2], const T (&bias)[kWidth]) {
#pragma unroll
  for (int j = 0; j < kWidth / 8; ++j) {
    const run<T, 2> pair = load_run<T, 2>(&bias[8 * j + threadIdx.x % 4 * 2]);
    const float low = widen(pair.at(0)), high = widen(pair.at(1));
    d[4 * j] += low;
    d[4 * j + 1] += high;
    d[4 * j + 2] += low;
    d[4 * j + 3] += high;
  }
}

/// Whether all sums are numbers, no infinities.
template <int kSize>
__device__ __forceinline__ bool finite(const float (&d)[kSize]) {
  float zeros[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (int n = 0; n < kSize; ++n) {
    zeros[n % 4] = fmaf(d[n], 0.0f, zeros[n % 4]);
  }
  return zeros[0] + zeros[1] + (zeros[2] + zeros[3]) == 0.0f;
}

/// What a thread has of a tile of dense blocks, again, each sum from its own δ alone: 64 rows from `row`.
template <typename T, int kWidth>
__device__ __forceinline__ void add_up_again(const ProductParams& p, const Tile& t, int row) {
  const Strands& s = p.strands;
  const int d = static_cast<int>(s.d.divisor);
#pragma unroll 1
  for (int at = 0; at < kWidth / 2; ++at) {
    const int n = row + row_of<T, true>(at % 2), col = t.col + at / 4 * 8 + threadIdx.x % 4 * 2 + at / 2 % 2;
    if (n < p.batch && col < p.b) {
      const int j = s.d.quotient(col), l = col - j * d;
      const T* x = static_cast<const T*>(s.x) + n * s.x_line + static_cast<i64>(t.i) * s.c * d + l;
      const T* w = static_cast<const T*>(s.w) + t.i * s.w_i + j * s.w_j + l * s.w_l;
      float sum[1] = {0.0f};
#pragma unroll 4
      for (int k = 0; k < s.c; ++k) {
        sum[0] = fmaf(widen(x[static_cast<i64>(k) * d]), widen(w[k * s.w_k]), sum[0]);
      }
      const i64 feature = static_cast<i64>(t.i) * p.b + col;
      sum[0] += p.bias != nullptr ? widen(static_cast<const T*>(p.bias)[feature * p.bias_stride]) : 0.0f;
      activate(sum, p.activation);
      static_cast<T*>(s.y)[n * s.y_line + feature] = narrow<T>(sum[0]);
    }
  }
}

/// A warpgroup's sums of a tile become results: its 64 rows leave through two buffers at `buffers`. `turn` counts the
/// pieces stored so far. kDense, kByThreads: see `product`.
template <typename T, int kWidth, bool kLast, bool kDense, bool kByThreads>
__device__ __forceinline__ void finish_tile(const ProductParams& p, const Tile& t, float (&d)[kWidth / 2],
                                            const Bias<T, kWidth>& carried, T (&bias)[kWidth], u32 buffers, u32& turn) {
  const int warpgroup = static_cast<int>(threadIdx.x) / 128 - 1;
  const bool spoilt = kDense && named_barrier_any(1 + warpgroup, 128, !finite(d));
  if (p.bias != nullptr) {
    carried.store(bias);
    named_barrier(1 + warpgroup, 128);
    add_columns<T, kWidth>(d, bias);
  }
  activate(d, p.activation);
  const int row = t.row + warpgroup * 64;
  const auto store = [&](int piece, u32 buffer) {
    const int col = t.col + piece * kLine<T>;
    if (col < p.b && row < p.batch) {
      kLast ? tma::store(&p.y, buffer, row, col, t.l, t.i) : tma::store(&p.y, buffer, col, row, t.l, t.i);
    }
    if constexpr (kLast && kLine<T> < 64) {  // the other 32 rows
      if (col < p.b && row + 32 < p.batch) {
        tma::store(&p.y, buffer + kPieceBytes / 2, row + 32, col, t.l, t.i);
      }
    }
  };
  if constexpr (kByThreads) {
    if (p.neighbours) {
      store_units<T>(p, t, row, d, buffers, 1 + warpgroup);
    } else {
      store_tile_by_threads<T, true>(d, buffers, 1 + warpgroup, [&](int piece, u32 buffer) {
        store_line_piece<T>(p, t, row, t.col + piece * kLine<T>, buffer);
      });
    }
  } else {
    store_tile<T, kLast, 2>(d, buffers, 1 + warpgroup, store, turn);
    turn += kWidth / kLine<T>;
  }
  if (spoilt) {
    if (threadIdx.x % 128 == 0) {
      tma::store_wait();  // what is stored next lies on top
    }
    named_barrier(1 + warpgroup, 128);
    if constexpr (kDense) {
      add_up_again<T, kWidth>(p, t, row);
    }
  }
}

/// kByThreads: y has no map, and x one of neighbours or none. kLast, kWeightsK, kDense: see `product`.
template <typename T, int kWidth, bool kLast, bool kWeightsK, bool kDense, bool kByThreads>
struct ProductKernel {
  using S = Stages<kWidth>;
  static constexpr Roles kRoles{.consumers = 2, .producer_registers = 40, .consumer_registers = 232};
  const ProductParams& p;
  S& stages;
  int* tiles;
  T (&bias)[2][kWidth];
  u32 base;

  /// Whether threads fetch x, line by line.
  __device__ __forceinline__ bool lines() const { return kByThreads && !p.neighbours; }

  __device__ __forceinline__ void produce() const {
    if (lines()) {
      fetch_tile_lines<T, kWidth, kWeightsK>(p, stages, base);
    } else if (threadIdx.x == 0) {
      tma::prefetch(&p.x);
      tma::prefetch(&p.weights);
      if constexpr (!kByThreads) {
        tma::prefetch(&p.y);
      }
      fetch_tiles<T, kWidth, kLast, kWeightsK, kByThreads>(p, stages, tiles, base);
    }
  }

  __device__ __forceinline__ void consume() const {
    const int warpgroup = static_cast<int>(threadIdx.x) / 128 - 1;
    const u32 buffers = base + S::kCount * S::kBytes + warpgroup * 2 * kPieceBytes;
    Consumer<S::kCount> at;
    u32 turn = 0;  // pieces stored so far
    for (int index, tile = 0; (index = tile_of<kWidth>(p, stages, tiles, at, tile)) < p.total; ++tile) {
      const Tile t = from_unit<T, kByThreads>(p, product_tile<kWidth>(p, index));
      const Bias<T, kWidth> carried(p, t);  // read while the products run
      float d[kWidth / 2], unused[4];
      clear(d);
      multiply<T, kWidth, !kLast, kWeightsK, false>(d, unused, p.steps, stages, base, at, 0);
      finish_tile<T, kWidth, kLast, kDense, kByThreads>(p, t, d, carried, bias[warpgroup], buffers, turn);
    }
    finish_stores();
  }
};

/// Runs a kernel's CTAs.
template <typename T, int kWidth, bool kLast, bool kWeightsK, bool kDense, bool kByThreads>
__device__ __forceinline__ void make_tiles(const ProductParams& p, Stages<kWidth>& stages, int* tiles,
                                           T (&bias)[2][kWidth], u32 base) {
  const ProductKernel<T, kWidth, kLast, kWeightsK, kDense, kByThreads> kernel{p, stages, tiles, bias, base};
  init_barriers([&] { stages.make(kernel.lines() ? 1 + kLineArrivals : 1, 8); });
  run_warp_specialized(kernel);
}

}  // namespace fretwork::kronecker::hopper

// ----------------------------------------------------------------------------------------------------
// Interleaved: tf32, batch first with d = 2 or 4. Rows of x and y are read and written as they lie; they hold the d
// products of a block interleaved. Columns and depth are counted in memory order, (j, l) and (k, l).

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
struct InterleavedKernel {
  using S = Stages<kWidth>;
  static constexpr int kColumns = kDeltas * kWidth;
  static constexpr Roles kRoles{.consumers = 2, .producer_registers = 40, .consumer_registers = 232};
  const ProductParams& p;
  S& stages;
  float (&bias)[2][kColumns];
  u32 base;

  template <typename Body>
  __device__ __forceinline__ void each_tile(Body body) const {
    for (int index = static_cast<int>(blockIdx.x); index < p.total; index += static_cast<int>(gridDim.x)) {
      body(product_tile<kColumns>(p, index));
    }
  }

  __device__ __forceinline__ void produce() const {
    if (threadIdx.x == 0) {
      tma::prefetch(&p.x);
      tma::prefetch(&p.weights);
      tma::prefetch(&p.y);
      wait_for_earlier_kernel();  // which packs the weights
      Producer<S::kCount> at;
      each_tile([&](const Tile& t) {
        for (int step = 0; step < p.steps; ++step, at.next()) {
          const u32 full = stages.acquire(at), to = base + at.stage * S::kBytes;
          mbarrier::arrive_expect(full, S::kBytes);
          tma::load(to, &p.x, full, step * 32, t.row, 0, t.i);
          tma::load(to + kLeftBytes, &p.weights, full, step * (32 / kDeltas), t.col / kDeltas, 0, t.i);
        }
      });
    }
  }

  __device__ __forceinline__ void consume() const {
    const int warpgroup = static_cast<int>(threadIdx.x) / 128 - 1;
    const u32 buffers = base + S::kCount * S::kBytes + warpgroup * 2 * kPieceBytes;
    Consumer<S::kCount> at;
    u32 turn = 0;  // pieces stored so far
    each_tile([&](const Tile& t) {
      const Bias<float, kColumns> carried(p, t);  // read while the products run
      float d[kDeltas][kWidth / 2], unused[4];
#pragma unroll
      for (auto& of_delta : d) {
        clear(of_delta);
      }
      multiply_tf32<tf32::InterleavedReader<kDeltas>, kDeltas, kWidth, false, false>(d, unused, p.steps, stages, base,
                                                                                     at, 0);
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
    });
    finish_stores();
  }
};

}  // namespace fretwork::kronecker::hopper

// ----------------------------------------------------------------------------------------------------
// The kernel.

namespace fretwork::kronecker::hopper {

/// kLast: the batch is the unit axis of x and y, else the features. kWeightsK: k is the unit axis of the weights, else
/// j, which tf32 (T is float) has no instruction for. kDense: blocks of d products with zeros between, batch first.
/// kDeltas > 1: that many interleaved products at once.
template <typename T, int kWidth, bool kLast, bool kWeightsK, bool kDense, int kDeltas>
__global__ void __launch_bounds__(kThreads, 1) product(const __grid_constant__ ProductParams p) {
  extern __shared__ u8 raw[];
  __shared__ Stages<kWidth> stages;
  __shared__ int tiles[Stages<kWidth>::kCount];
  __shared__ alignas(16) T bias[2][kDeltas * kWidth];
  const u32 base = stages_in(raw);
  if constexpr (kDeltas > 1) {
    init_barriers([&] { stages.make(1, 8); });
    run_warp_specialized(InterleavedKernel<kDeltas, kWidth>{p, stages, bias, base});
  } else if (!kLast || p.mapped) {  // apart, so that its code is in one piece
    make_tiles<T, kWidth, kLast, kWeightsK, kDense, false>(p, stages, tiles, bias, base);
  } else if constexpr (kLast) {
    make_tiles<T, kWidth, kLast, kWeightsK, kDense, true>(p, stages, tiles, bias, base);
  }
}

}  // namespace fretwork::kronecker::hopper
