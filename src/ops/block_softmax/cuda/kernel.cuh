// Softmax over packed block rows. Neighbouring lanes hold neighbouring runs of 16 bytes: along a block's row, then of
// the next rows, then of the same rows in the next blocks, so that LANES lanes of a warp share a row. So do
// several warps. Each thread keeps up to K runs in registers, so that what it does once for a row is shared by many
// entries; a line that fits is read once, a longer one twice.
#pragma once

#include "device/load.cuh"
#include "device/reduce.cuh"
#include "device/types.cuh"
#include "ops/block_softmax/cuda/params.h"

namespace fretwork {

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

/// −inf itself must not be subtracted from −inf; NaN still shows, as it enters the sum.
template <typename Acc>
__device__ __forceinline__ Acc safe(Acc top) {
  return top == minus_infinity<Acc>() ? Acc(0) : top;
}

/// The larger of each half; NaN loses to a number.
template <typename T>
__device__ __forceinline__ u32 max_pair(u32 a, u32 b) {
#ifdef FRETWORK_BEFORE_SM80
  const auto larger = [&](int shift) {
    return fmaxf(widen(T{static_cast<u16>(a >> shift)}), widen(T{static_cast<u16>(b >> shift)}));
  };
  return narrow_pair<T>(larger(0), larger(16));
#else
  u32 c;
  if constexpr (is_same<T, f16>) {
    asm("max.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  } else {
    asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  }
  return c;
#endif
}

/// The largest element of some runs. 16-bit ones are compared as packed pairs and widened once, at the end.
template <typename T, int N, typename Acc>
struct peak {
  static constexpr bool kPacked = sizeof(T) == 2 && run<T, N>::kWide;
  Acc top = minus_infinity<Acc>();
  u32 pair = is_same<T, f16> ? 0xfc00fc00u : 0xff80ff80u;  // −inf twice

  __device__ __forceinline__ void add(const run<T, N>& r) {
    if constexpr (kPacked) {
#pragma unroll
      for (int w = 0; w < run<T, N>::kWords; ++w) {
        pair = max_pair<T>(pair, r.words[w]);
      }
    } else {
#pragma unroll
      for (int e = 0; e < N; ++e) {
        top = take_max{}(static_cast<Acc>(widen(r.at(e))), top);
      }
    }
  }
  __device__ __forceinline__ Acc value() const {
    if constexpr (kPacked) {
      return fmaxf(widen(T{static_cast<u16>(pair)}), widen(T{static_cast<u16>(pair >> 16)}));
    } else {
      return top;
    }
  }
};

inline constexpr int kMostWarps = 16;  // on a row

/// Where a thread stands: its line and row, and its share of the row's runs. At a step each lane of a warp takes one
/// run of RUN elements, BLOCK_LANES lanes a block's row. Runs of more than one element cover a block's row in one step.
template <typename T, int RUN, int BLOCK_LANES, int LANES>
struct place {
  static constexpr int kBlocks = LANES / BLOCK_LANES;                 ///< blocks that a step covers
  static constexpr int kRows = 32 / LANES;                            ///< rows of a warp
  static constexpr int kRowBits = 31 & ~((kRows - 1) * BLOCK_LANES);  ///< of lanes that share a row
  static constexpr bool kShared = LANES >= 4;                         ///< several warps may share a row
  static_assert(LANES >= BLOCK_LANES && LANES <= 32);

  SoftmaxLine line;
  int z, y, row, lane, sub, member;  ///< row: of the warp's; sub: of the blocks of a step
  int steps;                         ///< of this thread
  int cols, warps;                   ///< of a block; on a row
  bool inside;                       ///< there is a row

  __device__ __forceinline__ place(const SoftmaxLine* lines, const SoftmaxTasks& tasks) {
    const int warp = threadIdx.x / 32, bits = kShared ? tasks.warp_bits : 0;
    const u32 task = blockIdx.x * (blockDim.x / 32 >> bits) + (warp >> bits);
    const u32 row_group = static_cast<u32>(tasks.row_groups.quotient(static_cast<int>(task))),
              batch = static_cast<u32>(tasks.batch.quotient(static_cast<int>(row_group)));
    const bool there = task < tasks.count;
    line = lines[there ? batch : 0];
    z = static_cast<int>(row_group - batch * tasks.batch.divisor);
    lane = threadIdx.x % BLOCK_LANES;
    row = threadIdx.x / BLOCK_LANES % kRows;
    sub = threadIdx.x % 32 / (BLOCK_LANES * kRows);
    y = static_cast<int>(task - row_group * tasks.row_groups.divisor) * kRows + row;
    cols = tasks.block_cols;
    warps = 1 << bits;
    member = warp & (warps - 1);
    inside = there && y < tasks.block_rows;
    const int all = (line.count - sub + kBlocks - 1) / kBlocks * pieces();
    steps = inside && lane * RUN < cols ? (all + warps - 1 - member) >> bits : 0;
  }
  /// Steps over a block.
  __device__ __forceinline__ int pieces() const { return RUN > 1 ? 1 : (cols + BLOCK_LANES - 1) / BLOCK_LANES; }
  /// One thread of each row and warp.
  __device__ __forceinline__ bool leads() const { return (threadIdx.x & kRowBits) == 0; }
  __device__ __forceinline__ int block(int n) const {
    return line.first + (member + n * warps) / pieces() * kBlocks + sub;
  }
  __device__ __forceinline__ int column(int n) const {
    return ((member + n * warps) % pieces() * BLOCK_LANES + lane) * RUN;
  }
  /// Whether the thread has a step first + k. Compared so that only `first` takes a register.
  __device__ __forceinline__ bool has(int first, int k) const {
    return k < steps - first && (RUN > 1 || column(first + k) < cols);
  }

  /// The thread's runs in a packed tensor.
  struct runs {
    T* first;
    i64 step, piece;
    int member, warps, pieces;
    /// Of its n-th step.
    __device__ __forceinline__ T* at(int n) const {
      if constexpr (RUN > 1) {
        return first + n * step;
      } else {
        return first + (member + n * warps) / pieces * step + (member + n * warps) % pieces * piece;
      }
    }
    /// From the place of step n − 1 to that of step n.
    __device__ __forceinline__ void next(T*& place, int n) const {
      if constexpr (RUN > 1) {
        place += step;
      } else {
        place = at(n);
      }
    }
  };
  __device__ __forceinline__ runs of(const SoftmaxPacked& p) const {
    const int block = line.first + sub + (RUN > 1 ? member * kBlocks : 0);
    T* first = static_cast<T*>(p.data) + z * p.z + block * p.block + y * p.row + lane * RUN * p.col;
    i64 step = p.block * kBlocks * (RUN > 1 ? warps : 1);
    asm volatile("" : "+l"(first), "+l"(step));  // else the compiler does all of this again for every run
    return {first, step, BLOCK_LANES * p.col, member, warps, pieces()};
  }
};

/// What the warps that share a row tell each other, once.
template <typename Place, typename Part>
struct parts {
  Part part[kMostWarps][Place::kRows];

  /// All threads call it.
  __device__ __forceinline__ void put(const Place& my, const Part& mine) {
    if (my.leads()) {
      part[threadIdx.x / 32][my.row] = mine;
    }
    __syncthreads();
  }
  /// Every warp's part of this thread's row, in a fixed order.
  template <typename F>
  __device__ __forceinline__ void each(const Place& my, F f) const {
#pragma unroll 4
    for (int w = 0; w < my.warps; ++w) {
      f(part[threadIdx.x / 32 - my.member + w][my.row]);
    }
  }
};

/// A sum of powers relative to the highest entry.
template <typename Acc>
struct tally {
  Acc top, sum;
};

/// Calls f with a pointer to no element of the type.
template <typename F>
__device__ __forceinline__ void with_type(SoftmaxType type, F f) {
  switch (type) {
    case SoftmaxType::f64:
      return f(static_cast<double*>(nullptr));
    case SoftmaxType::f32:
      return f(static_cast<float*>(nullptr));
    case SoftmaxType::f16:
      return f(static_cast<f16*>(nullptr));
    case SoftmaxType::bf16:
      return f(static_cast<bf16*>(nullptr));
    case SoftmaxType::boolean:
      return f(static_cast<bool*>(nullptr));
  }
}

/// T values; RUN elements (16 bytes, or one where something is not aligned) that a lane takes at once; BLOCK_LANES
/// lanes on a block's row; K runs kept by a thread; LANES of a warp on a row; at most THREADS in a CTA.
template <typename T, int RUN, int BLOCK_LANES, int K, int LANES, int THREADS, SoftmaxExtras EXTRAS>
__global__ void __launch_bounds__(THREADS, EXTRAS == SoftmaxExtras::none && sizeof(T) < 8 ? 0 : 512 / THREADS)
    block_softmax(const __grid_constant__ SoftmaxParams p) {
  using Acc = accumulator_t<T>;
  using Place = place<T, RUN, BLOCK_LANES, LANES>;
  constexpr bool kExtras = EXTRAS != SoftmaxExtras::none;
  const Place my(p.lines, p.tasks);
  const auto values = my.of(p.values), results = my.of(p.out);

  // The runs as stored (negated where the scale is negative), or with extras the finished sums. An entry's exponent is
  // (x − top)·factor, and the factor is not negative. Differences come first: a large x·factor would be rounded, or
  // overflow.
  run<T, RUN> stored[K];
  Acc summed[kExtras ? K : 1][RUN];
  const Acc scale = static_cast<Acc>(p.scale);
  const bool negate = !kExtras && scale < Acc(0);
  // Where the factor overflows, the largest number does as well: equal entries are 0 apart.
  constexpr Acc kLargest = sizeof(Acc) == 8 ? Acc(1.7976931348623157e308) : Acc(3.4028234e38f);
  const Acc unbounded = (kExtras ? Acc(1) : negate ? -scale : scale) * kUnit<Acc>;
  const Acc factor = unbounded > kLargest ? kLargest : unbounded;

  // Adds an extra of type X to the kept runs, or takes entries out.
  [[maybe_unused]] const auto extend = [&]<typename X>(const SoftmaxDense& d, int first, X*) {
    const i64 row = static_cast<i64>(my.line.row) * p.tasks.block_rows + my.y;
    const i64 start = my.z * d.z + my.line.head * d.h + row * d.row;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (my.has(first, k)) {
        const i64 column = static_cast<i64>(p.columns[my.block(first + k)]) * my.cols + my.column(first + k);
        const auto r = load_run<X, RUN>(static_cast<const X*>(d.data) + start + column * d.col);
#pragma unroll
        for (int e = 0; e < RUN; ++e) {
          const Acc m = static_cast<Acc>(widen(r.at(e)));
          Acc& x = summed[k][e];
          x = !d.multiplies ? x + m : m == Acc(0) ? minus_infinity<Acc>() : x;
        }
      }
    }
  };
  const auto load = [&](int first) {
    T* from = values.at(first);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      stored[k] = load_run_if<T, RUN>(my.has(first, k), from);
      values.next(from, first + k + 1);
    }
    if (negate) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
        stored[k].negate();
      }
    }
    if constexpr (kExtras) {
#pragma unroll
      for (int k = 0; k < K; ++k) {
#pragma unroll
        for (int e = 0; e < RUN; ++e) {
          summed[k][e] = static_cast<Acc>(widen(stored[k].at(e))) * scale;
        }
      }
#pragma unroll 1
      for (int n = 0; n < p.extra_count; ++n) {
        if constexpr (EXTRAS == SoftmaxExtras::same) {
          extend(p.extras[n], first, static_cast<T*>(nullptr));
        } else {
          with_type(p.extras[n].type, [&](auto* type) { extend(p.extras[n], first, type); });
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
  // The highest entry of the kept runs.
  const auto highest = [&](int first) -> Acc {
    peak<T, RUN, Acc> largest;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (my.has(first, k)) {
        if constexpr (kExtras) {
#pragma unroll
          for (int e = 0; e < RUN; ++e) {
            largest.top = take_max{}(summed[k][e], largest.top);
          }
        } else {
          largest.add(stored[k]);
        }
      }
    }
    return kExtras ? largest.top : largest.value();
  };
  // A sum of powers relative to `from`, as it is relative to a higher one.
  const auto moved = [&](Acc part, Acc from, Acc to) -> Acc {
    return from == minus_infinity<Acc>() ? part : part * power((from - safe(to)) * factor);
  };

  // Each thread's own tally.
  Acc top = minus_infinity<Acc>(), sum = 0;
  const bool fits = my.steps <= K;
  for (int first = 0; first < my.steps; first += K) {
    load(first);
    const Acc higher = take_max{}(highest(first), top), base = safe(higher);
    Acc odd = 0;  // two chains of additions, as one would wait for itself
    sum = moved(sum, top, higher);
    top = higher;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (my.has(first, k)) {
#pragma unroll
        for (int e = 0; e < RUN; ++e) {
          (e % 2 == 0 ? sum : odd) += power((element(k, e) - base) * factor);
        }
      }
    }
    sum += odd;
  }

  // The row's: over lanes, then over warps.
  Acc base = reduce_bits<Place::kRowBits>(top, take_max{});
  sum = reduce_bits<Place::kRowBits>(moved(sum, top, base), take_sum{});
  if constexpr (Place::kShared) {
    __shared__ parts<Place, tally<Acc>> shared;
    if (my.warps > 1) {
      tally<Acc> all{minus_infinity<Acc>(), 0};
      shared.put(my, {base, sum});
      shared.each(my, [&](const tally<Acc>& part) { all.top = take_max{}(part.top, all.top); });
      shared.each(my, [&](const tally<Acc>& part) { all.sum += moved(part.sum, part.top, all.top); });
      base = all.top;
      sum = all.sum;
    }
  }
  base = safe(base);
  const Acc share = sum == Acc(0) ? Acc(0) : Acc(1) / sum;

  for (int first = 0; first < my.steps; first += K) {
    if (!fits) {
      load(first);
    }
    T* to = results.at(first);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (my.has(first, k)) {
        Acc x[RUN];
#pragma unroll
        for (int e = 0; e < RUN; ++e) {
          x[e] = power((element(k, e) - base) * factor) * share;
        }
        store_run<T, RUN>(to, x);
      }
      results.next(to, first + k + 1);
    }
  }
}

/// d_values = scale · out · (d_out − Σ out·d_out).
template <typename T, int RUN, int BLOCK_LANES, int K, int LANES, int THREADS>
__global__ void __launch_bounds__(THREADS) block_softmax_backward(const __grid_constant__ SoftmaxBackwardParams p) {
  using Acc = accumulator_t<T>;
  using Place = place<T, RUN, BLOCK_LANES, LANES>;
  const Place my(p.lines, p.tasks);
  const Acc scale = static_cast<Acc>(p.scale);
  const auto outs = my.of(p.out), d_outs = my.of(p.d_out), results = my.of(p.d_values);
  run<T, RUN> out[K], d_out[K];

  const auto load = [&](int first) {
    T *from_out = outs.at(first), *from_d_out = d_outs.at(first);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      out[k] = load_run_if<T, RUN>(my.has(first, k), from_out);
      d_out[k] = load_run_if<T, RUN>(my.has(first, k), from_d_out);
      outs.next(from_out, first + k + 1);
      d_outs.next(from_d_out, first + k + 1);
    }
  };

  Acc dot = 0;
  const bool fits = my.steps <= K;
  for (int first = 0; first < my.steps; first += K) {
    load(first);
    Acc odd = 0;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (my.has(first, k)) {
#pragma unroll
        for (int e = 0; e < RUN; ++e) {
          const Acc o = static_cast<Acc>(widen(out[k].at(e))), g = static_cast<Acc>(widen(d_out[k].at(e)));
          (e % 2 == 0 ? dot : odd) += o != Acc(0) ? o * g : Acc(0);  // nothing out, nothing counts: not even NaN
        }
      }
    }
    dot += odd;
  }
  dot = reduce_bits<Place::kRowBits>(dot, take_sum{});
  if constexpr (Place::kShared) {
    __shared__ parts<Place, Acc> shared;
    if (my.warps > 1) {
      const Acc mine = dot;
      dot = 0;
      shared.put(my, mine);
      shared.each(my, [&](const Acc& part) { dot += part; });
    }
  }
  if (p.dots != nullptr && my.inside && my.member == 0 && my.leads()) {
    const i64 row = static_cast<i64>(my.line.row) * p.tasks.block_rows + my.y;
    static_cast<Acc*>(p.dots)[(my.z * p.heads + my.line.head) * p.rows + row] = dot;
  }
  for (int first = 0; first < my.steps; first += K) {
    if (!fits) {
      load(first);
    }
    T* to = results.at(first);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (my.has(first, k)) {
        Acc x[RUN];
#pragma unroll
        for (int e = 0; e < RUN; ++e) {
          const Acc o = static_cast<Acc>(widen(out[k].at(e))), g = static_cast<Acc>(widen(d_out[k].at(e)));
          x[e] = o != Acc(0) ? scale * (o * (g - dot)) : Acc(0);
        }
        store_run<T, RUN>(to, x);
      }
      results.next(to, first + k + 1);
    }
  }
}

/// rpe's gradient. THREADS threads sum into each element, in a fixed order: 1 where only z and h are
/// broadcast, a CTA of 256 where rows or columns are.
template <typename T, int THREADS>
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
    const i64 at = z0 * p.d_rpe.z + h0 * p.d_rpe.h + m0 * p.d_rpe.row + n0 * p.d_rpe.col;
    with_type(p.d_rpe.type, [&]<typename R>(R*) { static_cast<R*>(p.d_rpe.data)[at] = narrow<R>(sum); });
  }
}

}  // namespace fretwork
