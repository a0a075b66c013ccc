// Softmax over packed block rows. Neighbouring lanes hold neighbouring runs of 16 bytes: along a block's row, then of
// the next rows, then of the same rows in the next blocks, so that LANES lanes of a warp share a row. So do WARPS
// warps. Each thread keeps up to K runs in registers, so that what it does once for a row is shared by many entries; a
// line that fits is read once, a longer one twice.
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

constexpr __host__ __device__ int power_of_two_from(int n) {
  int p = 1;
  while (p < n) {
    p *= 2;
  }
  return p;
}

constexpr __host__ __device__ int cta_warps(int warps) { return warps < 4 ? 4 : warps; }

/// Where a thread stands: its line and row, and its share of the row's runs. At a step each lane of a warp takes one
/// run.
template <typename T, int C, bool VECTOR, int LANES, int WARPS>
struct place {
  static constexpr int kRun = VECTOR ? 16 / static_cast<int>(sizeof(T)) : 1;  ///< elements a lane takes at once
  static constexpr int kRuns = (C + kRun - 1) / kRun;
  static constexpr int kBlockLanes = kRuns >= 32 ? 32 : power_of_two_from(kRuns);  ///< lanes of a block's row
  static constexpr int kPieces = (kRuns + kBlockLanes - 1) / kBlockLanes;          ///< steps over a block
  static constexpr int kBlocks = LANES / kBlockLanes;                              ///< blocks that a step covers
  static constexpr int kRows = 32 / LANES;                                         ///< rows of a warp
  static constexpr int kGroups = cta_warps(WARPS) / WARPS;                         ///< tasks of a CTA
  static constexpr int kRowBits = 31 & ~((kRows - 1) * kBlockLanes);               ///< of lanes that share a row
  static constexpr bool kEven = kPieces == 1 || kBlockLanes * kPieces * kRun == C;
  static_assert(LANES >= kBlockLanes && LANES <= 32);

  SoftmaxLine line;
  int z, y, row, lane, sub, member;  ///< row: of the warp's; sub: of the blocks of a step
  int steps;                         ///< of this thread
  bool inside;                       ///< there is a row

  __device__ __forceinline__ place(const SoftmaxLine* lines, const SoftmaxTasks& tasks) {
    const int warp = threadIdx.x / 32;
    const u32 task = blockIdx.x * kGroups + warp / WARPS;
    const u32 row_group = divide(task, tasks.row_groups), batch = divide(row_group, tasks.batch);
    const bool there = task < tasks.count;
    line = lines[there ? batch : 0];
    z = static_cast<int>(row_group - batch * tasks.batch.by);
    lane = threadIdx.x % kBlockLanes;
    row = threadIdx.x / kBlockLanes % kRows;
    sub = threadIdx.x % 32 / (kBlockLanes * kRows);
    y = static_cast<int>(task - row_group * tasks.row_groups.by) * kRows + row;
    member = warp % WARPS;
    inside = there && y < tasks.block_rows;
    const u32 all = static_cast<u32>(line.count - sub + kBlocks - 1) / kBlocks * kPieces;
    steps = inside && lane * kRun < C ? static_cast<int>((all + WARPS - 1 - member) / WARPS) : 0;
  }
  /// One thread of each row and warp.
  __device__ __forceinline__ bool leads() const { return (threadIdx.x & kRowBits) == 0; }
  /// task < 2^31
  static __device__ __forceinline__ u32 divide(u32 task, const SoftmaxDivisor& d) {
    return static_cast<u32>(static_cast<u64>(task) * d.multiplier >> d.shift);
  }
  __device__ __forceinline__ int block(int n) const {
    return line.first + (member + n * WARPS) / kPieces * kBlocks + sub;
  }
  __device__ __forceinline__ int column(int n) const {
    return ((member + n * WARPS) % kPieces * kBlockLanes + lane) * kRun;
  }
  /// Whether the thread has a step first + k. Compared so that only `first` takes a register.
  __device__ __forceinline__ bool has(int first, int k) const {
    return k < steps - first && (kEven || column(first + k) < C);
  }

  /// The thread's runs in a packed tensor.
  struct runs {
    T* first;
    i64 step, piece;
    int member;
    /// Of its n-th step.
    __device__ __forceinline__ T* at(int n) const {
      if constexpr (kPieces == 1) {
        return first + n * step;
      } else {
        return first + (member + n * WARPS) / kPieces * step + (member + n * WARPS) % kPieces * piece;
      }
    }
    /// From the place of step n − 1 to that of step n.
    __device__ __forceinline__ void next(T*& place, int n) const {
      if constexpr (kPieces == 1) {
        place += step;
      } else {
        place = at(n);
      }
    }
  };
  __device__ __forceinline__ runs of(const SoftmaxPacked& p) const {
    const int block = line.first + sub + (kPieces == 1 ? member * kBlocks : 0);
    T* first = static_cast<T*>(p.data) + z * p.z + block * p.block + y * p.row + lane * kRun * p.col;
    i64 step = p.block * kBlocks * (kPieces == 1 ? WARPS : 1);
    asm volatile("" : "+l"(first), "+l"(step));  // else the compiler does all of this again for every run
    return {first, step, kBlockLanes * kRun * p.col, member};
  }
};

/// What the warps that share a row tell each other, once.
template <typename Place, int WARPS, typename Part>
struct parts {
  Part part[cta_warps(WARPS)][Place::kRows];

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
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      f(part[threadIdx.x / 32 / WARPS * WARPS + w][my.row]);
    }
  }
};

/// A sum of powers relative to the highest exponent.
template <typename Acc>
struct tally {
  Acc top, sum;
};

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

constexpr __host__ __device__ int cta_threads(int warps) { return 32 * cta_warps(warps); }
/// CTAs that must fit on a multiprocessor together: 512 threads where a thread keeps sums, else (0) as the compiler
/// finds.
constexpr __host__ __device__ int cta_residents(int warps, bool sums) { return sums ? 512 / cta_threads(warps) : 0; }

/// T values, C columns of a block, VECTOR: runs of 16 bytes are aligned (else single elements), K runs kept by a
/// thread, LANES and WARPS on a row, then the kinds of the extras.
template <typename T, int C, bool VECTOR, int K, int LANES, int WARPS, typename Rpe, typename Key, typename Attn>
__global__ void __launch_bounds__(cta_threads(WARPS), cta_residents(WARPS, Rpe::kThere || Key::kThere || Attn::kThere))
    block_softmax(const __grid_constant__ SoftmaxParams p) {
  using Acc = accumulator_t<T>;
  using Place = place<T, C, VECTOR, LANES, WARPS>;
  constexpr int kRun = Place::kRun;
  constexpr bool kExtras = Rpe::kThere || Key::kThere || Attn::kThere;
  const Place my(p.lines, p.tasks);
  const auto values = my.of(p.values), results = my.of(p.out);

  // The runs as stored (negated where the scale is negative), or with extras the finished sums. An entry's exponent is
  // x·factor, and the factor is not negative.
  run<T, kRun> stored[K];
  Acc summed[kExtras ? K : 1][kRun];
  const Acc scale = static_cast<Acc>(p.scale);
  const bool negate = !kExtras && scale < Acc(0);
  const Acc factor = (kExtras ? Acc(1) : negate ? -scale : scale) * kUnit<Acc>;

  const auto dense_at = [&](const SoftmaxDense& d, int n) {
    return my.z * d.z + my.line.head * d.h + (static_cast<i64>(my.line.row) * p.tasks.block_rows + my.y) * d.row +
           (static_cast<i64>(p.columns[my.block(n)]) * C + my.column(n)) * d.col;
  };
  const auto load = [&](int first) {
    T* from = values.at(first);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      stored[k] = load_run_if<T, kRun>(my.has(first, k), from);
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
        if (my.has(first, k)) {
#pragma unroll
          for (int e = 0; e < kRun; ++e) {
            summed[k][e] = static_cast<Acc>(widen(stored[k].at(e))) * scale;
          }
          const auto extra = [&]<typename Kind>(Kind, const SoftmaxDense& d) {
            apply<Kind>(d, Kind::kThere ? dense_at(d, first + k) : 0, summed[k]);
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
  // The highest exponent of the kept runs.
  const auto highest = [&](int first) -> Acc {
    peak<T, kRun, Acc> largest;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (my.has(first, k)) {
        if constexpr (kExtras) {
#pragma unroll
          for (int e = 0; e < kRun; ++e) {
            largest.top = take_max{}(summed[k][e], largest.top);
          }
        } else {
          largest.add(stored[k]);
        }
      }
    }
    const Acc top = kExtras ? largest.top : largest.value();
    return top == minus_infinity<Acc>() ? top : top * factor;
  };

  // Each thread's own tally.
  Acc top = minus_infinity<Acc>(), sum = 0;
  const bool fits = my.steps <= K;
  for (int first = 0; first < my.steps; first += K) {
    load(first);
    const Acc higher = take_max{}(highest(first), top), base = safe(higher);
    Acc odd = 0;  // two chains of additions, as one would wait for itself
    sum *= power(top - base);
    top = higher;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (my.has(first, k)) {
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
          (e % 2 == 0 ? sum : odd) += power(fused(element(k, e), factor, -base));
        }
      }
    }
    sum += odd;
  }

  // The row's: over lanes, then over warps.
  Acc base = reduce_bits<Place::kRowBits>(top, take_max{});
  sum = reduce_bits<Place::kRowBits>(sum * power(top - safe(base)), take_sum{});
  if constexpr (WARPS > 1) {
    __shared__ parts<Place, WARPS, tally<Acc>> shared;
    tally<Acc> all{minus_infinity<Acc>(), 0};
    shared.put(my, {base, sum});
    shared.each(my, [&](const tally<Acc>& part) { all.top = take_max{}(part.top, all.top); });
    shared.each(my, [&](const tally<Acc>& part) { all.sum += part.sum * power(part.top - safe(all.top)); });
    base = all.top;
    sum = all.sum;
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
        Acc x[kRun];
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
          x[e] = power(fused(element(k, e), factor, -base)) * share;
        }
        store_run<T, kRun>(to, x);
      }
      results.next(to, first + k + 1);
    }
  }
}

/// d_values = scale · out · (d_out − Σ out·d_out). DOTS: the sums are wanted too.
template <typename T, int C, bool VECTOR, int K, int LANES, int WARPS, bool DOTS>
__global__ void __launch_bounds__(cta_threads(WARPS))
    block_softmax_backward(const __grid_constant__ SoftmaxBackwardParams p) {
  using Acc = accumulator_t<T>;
  using Place = place<T, C, VECTOR, LANES, WARPS>;
  constexpr int kRun = Place::kRun;
  const Place my(p.lines, p.tasks);
  const Acc scale = static_cast<Acc>(p.scale);
  const auto outs = my.of(p.out), d_outs = my.of(p.d_out), results = my.of(p.d_values);
  run<T, kRun> out[K], d_out[K];

  const auto load = [&](int first) {
    T *from_out = outs.at(first), *from_d_out = d_outs.at(first);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      out[k] = load_run_if<T, kRun>(my.has(first, k), from_out);
      d_out[k] = load_run_if<T, kRun>(my.has(first, k), from_d_out);
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
        for (int e = 0; e < kRun; ++e) {
          const Acc o = static_cast<Acc>(widen(out[k].at(e))), g = static_cast<Acc>(widen(d_out[k].at(e)));
          (e % 2 == 0 ? dot : odd) += o != Acc(0) ? o * g : Acc(0);  // nothing out, nothing counts: not even NaN
        }
      }
    }
    dot += odd;
  }
  dot = reduce_bits<Place::kRowBits>(dot, take_sum{});
  if constexpr (WARPS > 1) {
    __shared__ parts<Place, WARPS, Acc> shared;
    const Acc mine = dot;
    dot = 0;
    shared.put(my, mine);
    shared.each(my, [&](const Acc& part) { dot += part; });
  }
  if constexpr (DOTS) {
    if (my.inside && my.member == 0 && my.leads()) {
      const i64 row = static_cast<i64>(my.line.row) * p.tasks.block_rows + my.y;
      static_cast<Acc*>(p.dots)[(my.z * p.heads + my.line.head) * p.rows + row] = dot;
    }
  }
  for (int first = 0; first < my.steps; first += K) {
    if (!fits) {
      load(first);
    }
    T* to = results.at(first);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (my.has(first, k)) {
        Acc x[kRun];
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
          const Acc o = static_cast<Acc>(widen(out[k].at(e))), g = static_cast<Acc>(widen(d_out[k].at(e)));
          x[e] = o != Acc(0) ? scale * (o * (g - dot)) : Acc(0);
        }
        store_run<T, kRun>(to, x);
      }
      results.next(to, first + k + 1);
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
