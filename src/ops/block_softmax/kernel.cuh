// Softmax over packed block rows. A warp takes a few whole rows of a block row and walks its blocks: neighbouring lanes
// hold neighbouring runs of 16 bytes, so a warp reads 512 bytes in one piece from each block. WARPS warps share the
// blocks of a line. Each thread keeps up to K runs in registers; a line that fits is read once, a longer one twice.
#pragma once

#include "device/load.cuh"
#include "device/reduce.cuh"
#include "device/types.cuh"
#include "ops/block_softmax/params.h"

namespace fretwork {

/// What an extra is: absent, added, or a mask whose zeros take an entry out.
struct none {
  static constexpr bool kThere = false, kMultiplies = false;
};
template <typename T>
struct adds {
  using type = T;
  static constexpr bool kThere = true, kMultiplies = false;
};
template <typename T>
struct multiplies {
  using type = T;
  static constexpr bool kThere = true, kMultiplies = true;
};

template <typename Acc>
__device__ __forceinline__ Acc minus_infinity() {
  if constexpr (sizeof(Acc) == 8) {
    return __longlong_as_double(static_cast<i64>(0xfff0000000000000ull));
  } else {
    return __uint_as_float(0xff800000u);
  }
}

/// Exponents are counted in units of the fast instruction: powers of two for float, of e for double.
template <typename Acc>
inline constexpr Acc kUnit = sizeof(Acc) == 8 ? Acc(1) : Acc(1.4426950408889634);

__device__ __forceinline__ float power(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ double power(double x) { return exp(x); }

__device__ __forceinline__ float fused(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double fused(double a, double b, double c) { return fma(a, b, c); }

/// −inf itself must not be subtracted from −inf; NaN still shows, as it enters the sum.
template <typename Acc>
__device__ __forceinline__ Acc safe(Acc top) {
  return top == minus_infinity<Acc>() ? Acc(0) : top;
}

/// The larger of each half; NaN loses to a number.
template <typename T>
__device__ __forceinline__ u32 max_pair(u32 a, u32 b) {
  u32 c;
  if constexpr (is_same<T, f16>) {
    asm("max.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  } else {
    asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  }
  return c;
}

/// The largest element of a run, or with `flip` (the sign's bit) the largest of the negated ones.
template <typename T, int N, typename Acc>
__device__ __forceinline__ Acc largest(const run<T, N>& r, u32 flip) {
  if constexpr (sizeof(T) == 2 && run<T, N>::kWide) {
    const u32 both = flip | flip >> 16;
    u32 pair = r.words[0] ^ both;
#pragma unroll
    for (int w = 1; w < run<T, N>::kWords; ++w) {
      pair = max_pair<T>(pair, r.words[w] ^ both);
    }
    return fmaxf(widen(T{static_cast<u16>(pair)}), widen(T{static_cast<u16>(pair >> 16)}));
  } else {
    Acc top = minus_infinity<Acc>();
#pragma unroll
    for (int e = 0; e < N; ++e) {
      const Acc x = static_cast<Acc>(widen(r.at(e)));
      top = take_max{}(flip ? -x : x, top);
    }
    return top;
  }
}

constexpr __host__ __device__ int power_of_two_from(int n) {
  int p = 1;
  while (p < n) {
    p *= 2;
  }
  return p;
}

/// How a row of a block of C elements lies over lanes.
template <typename T, int C, bool VECTOR>
struct row_lanes {
  static constexpr int kRun = VECTOR ? 16 / static_cast<int>(sizeof(T)) : 1;  ///< elements a lane takes at once
  static constexpr int kRuns = (C + kRun - 1) / kRun;
  static constexpr int kLanes = kRuns >= 32 ? 32 : power_of_two_from(kRuns);  ///< lanes of a row
  static constexpr int kPieces = (kRuns + kLanes - 1) / kLanes;               ///< runs of a lane in one block
  static constexpr int kRows = 32 / kLanes;                                   ///< rows of a warp
  static constexpr bool kFull = kLanes * kPieces * kRun == C;                 ///< every lane has a run in every piece
};

/// Where a thread stands: its row, its runs within a block, and its share of the line's steps. A step is one run.
template <typename T, int C, bool VECTOR, int WARPS>
struct place {
  using Lanes = row_lanes<T, C, VECTOR>;
  static constexpr int kGroups = WARPS == 1 ? 4 : 1;  ///< tasks of a CTA
  i64 z;
  SoftmaxLine line;
  int y, lane, member, steps;
  bool inside;  ///< there is a row

  __device__ __forceinline__ place(const SoftmaxLine* lines, i64 tasks, i64 batch, int block_rows) {
    const int warp = threadIdx.x / 32;
    const i64 task = static_cast<i64>(blockIdx.x) * kGroups + warp / WARPS;
    const int row_groups = (block_rows + Lanes::kRows - 1) / Lanes::kRows;
    const i64 per_line = batch * row_groups;
    const bool there = task < tasks;
    line = lines[there ? task / per_line : 0];
    const int rest = static_cast<int>(task % row_groups);
    z = task / row_groups % batch;
    y = rest * Lanes::kRows + threadIdx.x % 32 / Lanes::kLanes;
    lane = threadIdx.x % Lanes::kLanes;
    member = warp % WARPS;
    inside = there && y < block_rows;
    steps = inside ? line.count * Lanes::kPieces : 0;
  }
  /// The thread's n-th step.
  __device__ __forceinline__ int step(int n) const { return member + n * WARPS; }
  __device__ __forceinline__ int block(int step) const { return line.first + step / Lanes::kPieces; }
  __device__ __forceinline__ int column(int step) const {
    return (step % Lanes::kPieces * Lanes::kLanes + lane) * Lanes::kRun;
  }
  __device__ __forceinline__ bool has(int step) const { return step < steps && (Lanes::kFull || column(step) < C); }

  /// The thread's runs in a packed tensor.
  struct runs {
    T* first;
    i64 block, piece;
    __device__ __forceinline__ T* at(int step) const {
      if constexpr (Lanes::kPieces == 1) {
        return first + step * block;
      } else {
        return first + step / Lanes::kPieces * block + step % Lanes::kPieces * piece;
      }
    }
  };
  __device__ __forceinline__ runs of(const SoftmaxPacked& p) const {
    return {static_cast<T*>(p.data) + z * p.z + line.first * p.block + y * p.row + lane * Lanes::kRun * p.col, p.block,
            Lanes::kLanes * Lanes::kRun * p.col};
  }
};

/// Over the lanes of a row and over the WARPS that share it. `shared` holds WARPS · rows; all threads call it.
template <int LANES, int WARPS, typename A, typename Op>
__device__ __forceinline__ A reduce_row(A x, A* shared, Op op) {
  x = reduce_lanes<LANES>(x, op);
  if constexpr (WARPS > 1) {
    constexpr int kRows = 32 / LANES;
    const int row = threadIdx.x % 32 / LANES;
    __syncthreads();  // an earlier reduction may still be read
    if (threadIdx.x % LANES == 0) {
      shared[threadIdx.x / 32 * kRows + row] = x;
    }
    __syncthreads();
    x = shared[row];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) {
      x = op(x, shared[w * kRows + row]);
    }
  }
  return x;
}

template <typename Kind, int N, typename Acc>
__device__ __forceinline__ void apply(const SoftmaxDense& extra, i64 at, Acc (&x)[N]) {
  if constexpr (Kind::kThere) {
    using X = typename Kind::type;
    const X* const from = static_cast<const X*>(extra.data) + at;
    Acc m[N];
    if (extra.vector) {
      const auto r = load_run<X, N>(from);
#pragma unroll
      for (int e = 0; e < N; ++e) {
        m[e] = static_cast<Acc>(widen(r.at(e)));
      }
    } else {
#pragma unroll
      for (int e = 0; e < N; ++e) {
        m[e] = static_cast<Acc>(widen(from[e * extra.col]));
      }
    }
#pragma unroll
    for (int e = 0; e < N; ++e) {
      if constexpr (Kind::kMultiplies) {
        x[e] = m[e] == Acc(0) ? minus_infinity<Acc>() : x[e];
      } else {
        x[e] += m[e];
      }
    }
  }
}

constexpr __host__ __device__ int cta_threads(int warps) { return warps == 1 ? 128 : 32 * warps; }
/// CTAs that must fit on a multiprocessor together: 512 threads where a thread keeps sums, else (0) as the compiler
/// finds.
constexpr __host__ __device__ int cta_residents(int warps, bool sums) { return sums ? 512 / cta_threads(warps) : 0; }

/// T values, C columns of a block, VECTOR: runs of 16 bytes are aligned (else single elements), K runs kept by a
/// thread, WARPS on a line, then the kinds of the extras.
template <typename T, int C, bool VECTOR, int K, int WARPS, typename Rpe, typename Key, typename Attn>
__global__ void __launch_bounds__(cta_threads(WARPS), cta_residents(WARPS, Rpe::kThere || Key::kThere || Attn::kThere))
    block_softmax(const __grid_constant__ SoftmaxParams p) {
  using Acc = accumulator_t<T>;
  using Place = place<T, C, VECTOR, WARPS>;
  using Lanes = typename Place::Lanes;
  constexpr int kRun = Lanes::kRun;
  constexpr bool kExtras = Rpe::kThere || Key::kThere || Attn::kThere;
  __shared__ Acc shared[WARPS * Lanes::kRows];
  const Place my(p.lines, p.tasks, p.batch, p.block_rows);
  const auto values = my.of(p.values), results = my.of(p.out);

  // The runs as stored, or with extras the finished sums. An entry's exponent is x·factor.
  run<T, kRun> stored[K];
  Acc summed[kExtras ? K : 1][kRun];
  const Acc factor = (kExtras ? Acc(1) : static_cast<Acc>(p.scale)) * kUnit<Acc>;
  const u32 flip = factor < Acc(0) ? 0x80000000u : 0u;

  const auto dense_at = [&](const SoftmaxDense& d, int step) {
    return my.z * d.z + my.line.head * d.h + (static_cast<i64>(my.line.row) * p.block_rows + my.y) * d.row +
           (static_cast<i64>(p.columns[my.block(step)]) * C + my.column(step)) * d.col;
  };
  const auto load = [&](int first) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (my.has(my.step(first + k))) {
        stored[k] = load_run<T, kRun>(values.at(my.step(first + k)));
      }
    }
    if constexpr (kExtras) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        const int step = my.step(first + k);
        if (my.has(step)) {
#pragma unroll
          for (int e = 0; e < kRun; ++e) {
            summed[k][e] = static_cast<Acc>(widen(stored[k].at(e))) * static_cast<Acc>(p.scale);
          }
          const auto extra = [&]<typename Kind>(Kind, const SoftmaxDense& d) {
            apply<Kind>(d, Kind::kThere ? dense_at(d, step) : 0, summed[k]);
          };
          extra(Rpe{}, p.rpe);
          if constexpr (Key::kMultiplies) {  // what takes entries out comes last, so that nothing added there counts
            extra(Attn{}, p.attn);
            extra(Key{}, p.key_padding);
          } else {
            extra(Key{}, p.key_padding);
            extra(Attn{}, p.attn);
          }
        }
      }
    }
  };
  const auto element = [&](int k, int e) -> Acc {
    if constexpr (kExtras) {
      return summed[k][e];
    } else {
      return static_cast<Acc>(widen(stored[k].at(e)));
    }
  };
  // The highest exponent of a run, without a product for each entry.
  const auto highest = [&](int k) -> Acc {
    Acc top = minus_infinity<Acc>();
    if constexpr (kExtras) {
#pragma unroll
      for (int e = 0; e < kRun; ++e) {
        top = take_max{}(summed[k][e], top);
      }
    } else {
      top = largest<T, kRun, Acc>(stored[k], flip);
    }
    return top == minus_infinity<Acc>() ? top : top * (flip ? -factor : factor);
  };

  // Each thread's own highest exponent, and its sum of powers relative to that.
  Acc top = minus_infinity<Acc>(), sum = 0;
  const bool fits = my.steps <= K * WARPS;
  for (int first = 0; my.step(first) < my.steps; first += K) {
    load(first);
    Acc higher = top;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (my.has(my.step(first + k))) {
        higher = take_max{}(highest(k), higher);
      }
    }
    const Acc base = safe(higher);
    sum *= power(top - base);
    top = higher;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (my.has(my.step(first + k))) {
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
          sum += power(fused(element(k, e), factor, -base));
        }
      }
    }
  }

  const Acc base = safe(reduce_row<Lanes::kLanes, WARPS>(top, shared, take_max{}));
  const Acc total = reduce_row<Lanes::kLanes, WARPS>(sum * power(top - base), shared, take_sum{});
  const Acc share = total == Acc(0) ? Acc(0) : Acc(1) / total;

  for (int first = 0; my.step(first) < my.steps; first += K) {
    if (!fits) {
      load(first);
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int step = my.step(first + k);
      if (my.has(step)) {
        Acc x[kRun];
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
          x[e] = power(fused(element(k, e), factor, -base)) * share;
        }
        store_run<T, kRun>(results.at(step), x);
      }
    }
  }
}

/// d_values = scale · out · (d_out − Σ out·d_out). DOTS: the sums are wanted too.
template <typename T, int C, bool VECTOR, int K, int WARPS, bool DOTS>
__global__ void __launch_bounds__(cta_threads(WARPS))
    block_softmax_backward(const __grid_constant__ SoftmaxBackwardParams p) {
  using Acc = accumulator_t<T>;
  using Place = place<T, C, VECTOR, WARPS>;
  using Lanes = typename Place::Lanes;
  constexpr int kRun = Lanes::kRun;
  __shared__ Acc shared[WARPS * Lanes::kRows];
  const Place my(p.lines, p.tasks, p.batch, p.block_rows);
  const Acc scale = static_cast<Acc>(p.scale);
  const auto outs = my.of(p.out), d_outs = my.of(p.d_out), results = my.of(p.d_values);
  run<T, kRun> out[K], d_out[K];

  const auto load = [&](int first) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int step = my.step(first + k);
      if (my.has(step)) {
        out[k] = load_run<T, kRun>(outs.at(step));
        d_out[k] = load_run<T, kRun>(d_outs.at(step));
      }
    }
  };

  Acc dot = 0;
  const bool fits = my.steps <= K * WARPS;
  for (int first = 0; my.step(first) < my.steps; first += K) {
    load(first);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (my.has(my.step(first + k))) {
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
          const Acc o = static_cast<Acc>(widen(out[k].at(e))), g = static_cast<Acc>(widen(d_out[k].at(e)));
          dot += o != Acc(0) ? o * g : Acc(0);  // where nothing came out nothing counts, NaN upstream included
        }
      }
    }
  }
  dot = reduce_row<Lanes::kLanes, WARPS>(dot, shared, take_sum{});
  if constexpr (DOTS) {
    if (my.inside && my.lane == 0 && my.member == 0) {
      const i64 row = static_cast<i64>(my.line.row) * p.block_rows + my.y;
      static_cast<Acc*>(p.dots)[(my.z * p.heads + my.line.head) * p.rows + row] = dot;
    }
  }
  for (int first = 0; my.step(first) < my.steps; first += K) {
    if (!fits) {
      load(first);
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int step = my.step(first + k);
      if (my.has(step)) {
        Acc x[kRun];
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
          const Acc o = static_cast<Acc>(widen(out[k].at(e))), g = static_cast<Acc>(widen(d_out[k].at(e)));
          x[e] = o != Acc(0) ? scale * (o * (g - dot)) : Acc(0);
        }
        store_run<T, kRun>(results.at(step), x);
      }
    }
  }
}

/// rpe's gradient of type R. THREADS threads sum into each element, in a fixed order: 1 where only z and h are
/// broadcast, a CTA of 256 where rows or columns are.
template <typename T, typename R, int THREADS>
__global__ void __launch_bounds__(256) block_softmax_rpe_backward(const __grid_constant__ SoftmaxRpeParams p) {
  using Acc = accumulator_t<T>;
  const i64 element = (static_cast<i64>(blockIdx.x) * 256 + threadIdx.x) / THREADS;
  if (element >= p.sizes[0] * p.sizes[1] * p.sizes[2] * p.sizes[3]) {
    return;  // THREADS is 1 here: a whole CTA never leaves part of itself waiting
  }
  const i64 n0 = element % p.sizes[3], m0 = element / p.sizes[3] % p.sizes[2];
  const i64 h0 = element / (p.sizes[3] * p.sizes[2]) % p.sizes[1];
  const i64 z0 = element / (p.sizes[3] * p.sizes[2] * p.sizes[1]);
  const i64 count = p.summed[0] * p.summed[1] * p.summed[2] * p.summed[3];
  const i64 block_rows = p.rows / p.block_rows, block_cols = p.cols / p.block_cols;
  Acc sum = 0;
  for (i64 k = threadIdx.x % THREADS; k < count; k += THREADS) {
    const i64 n = n0 + k % p.summed[3], m = m0 + k / p.summed[3] % p.summed[2];
    const i64 h = h0 + k / (p.summed[3] * p.summed[2]) % p.summed[1];
    const i64 z = z0 + k / (p.summed[3] * p.summed[2] * p.summed[1]);
    const i64 block = p.block_at[(h * block_rows + m / p.block_rows) * block_cols + n / p.block_cols];
    if (block >= 0) {
      const auto at = [&](const SoftmaxPacked& t) {
        return widen(static_cast<const T*>(
            t.data)[z * t.z + block * t.block + m % p.block_rows * t.row + n % p.block_cols * t.col]);
      };
      const Acc o = static_cast<Acc>(at(p.out));
      if (o != Acc(0)) {
        const Acc dot = static_cast<const Acc*>(p.dots)[(z * p.heads + h) * p.rows + m];
        sum += o * (static_cast<Acc>(at(p.d_out)) - dot);
      }
    }
  }
  if constexpr (THREADS > 1) {
    sum = reduce_block<THREADS / 32>(sum, take_sum{});
  }
  if (threadIdx.x % THREADS == 0) {
    static_cast<R*>(p.d_rpe.data)[z0 * p.d_rpe.z + h0 * p.d_rpe.h + m0 * p.d_rpe.row + n0 * p.d_rpe.col] =
        narrow<R>(sum);
  }
}

}  // namespace fretwork
