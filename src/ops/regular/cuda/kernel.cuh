// SPLAT's operators from lists of columns: a warp for each row or column, lanes on neighbouring elements of an operand,
// so that every access is whole. Sums are fp32 in a fixed order.
#pragma once

#include "device/load.cuh"
#include "device/math.cuh"
#include "device/reduce.cuh"
#include "device/types.cuh"
#include "ops/regular/cuda/params.h"

namespace fretwork {

inline constexpr int kRegularThreads = 256;

template <typename T>
__device__ __forceinline__ T* regular_line(const RegularOperand& o, i64 batch, i64 head, i64 row) {
  return static_cast<T*>(o.data) + batch * o.batch + head * o.head + row * o.row;
}

/// Lane l gets the sum of all lanes' x[l].
template <int BIT = 16>
__device__ __forceinline__ float sum_across(float (&x)[32]) {
  const bool upper = (threadIdx.x & BIT) != 0;
#pragma unroll
  for (int u = 0; u < BIT; ++u) {
    const float kept = upper ? x[u + BIT] : x[u], sent = upper ? x[u] : x[u + BIT];
    x[u] = kept + __shfl_xor_sync(0xffffffffu, sent, BIT);
  }
  if constexpr (BIT > 1) {
    return sum_across<BIT / 2>(x);
  } else {
    return x[0];
  }
}

/// The line of a warp and its piece of the depth, or the head of a CTA and its tile.
struct regular_task {
  int batch, head, line, chunk;
  __device__ __forceinline__ regular_task(u32 n, int chunks, int lines, int heads) {
    const u32 l = n / chunks, h = l / lines, z = h / heads;
    chunk = static_cast<int>(n - l * chunks);
    line = static_cast<int>(l - h * lines);
    head = static_cast<int>(h - z * heads);
    batch = static_cast<int>(z);
  }
};

/// x[i, t] = by_row[i] · by_col[column]; a lane holds its elements' part of 32 entries, which then change places.
template <typename T>
__global__ void __launch_bounds__(kRegularThreads) regular_values(const __grid_constant__ RegularParams p) {
  const u32 n = blockIdx.x * (kRegularThreads / 32) + threadIdx.x / 32;
  if (n >= p.tasks) {
    return;
  }
  const int lane = threadIdx.x % 32;
  const regular_task my(n, 1, p.row_count, p.heads);
  const int* const columns = p.columns + p.first[my.line];
  const int count = static_cast<int>(p.first[my.line + 1] - p.first[my.line]);
  const T* const left = regular_line<const T>(p.by_row, my.batch, my.head, my.line);
  const T* const right = regular_line<const T>(p.by_col, my.batch, my.head / p.group, 0);
  T* const out = regular_line<T>(p.values, my.batch, my.head, my.line);
  for (int first = 0; first < p.width; first += 32) {
    const int there = count - first;  // entries from here on, maybe none
    const int column = lane < there ? columns[first + lane] : 0;
    float part[32];
#pragma unroll
    for (int u = 0; u < 32; ++u) {
      part[u] = 0;
    }
    for (int chunk = there > 0 ? 0 : p.depth; chunk < p.depth; chunk += 32) {
      const int e = chunk + lane;
      const bool inside = e < p.depth;
      const float x = inside ? static_cast<float>(widen(left[e * p.by_row.col])) : 0.0f;
#pragma unroll
      for (int u = 0; u < 32; ++u) {
        const i64 j = __shfl_sync(0xffffffffu, column, u);
        if (u < there && inside) {
          part[u] = fmaf(x, static_cast<float>(widen(right[j * p.by_col.row + e * p.by_col.col])), part[u]);
        }
      }
    }
    const float sum = sum_across(part);
    if (first + lane < p.width) {
      out[(first + lane) * p.values.col] = narrow<T>(lane < there ? sum : 0.0f);
    }
  }
}

/// 32·N neighbouring elements of a sum of rows, N for each lane.
template <typename T, int N>
struct regular_sum {
  float sums[N];
  int first, depth;  ///< the lane's first element, and where they end

  __device__ __forceinline__ regular_sum(int chunk, int d) : first(chunk * 32 * N + threadIdx.x % 32), depth(d) {
#pragma unroll
    for (int e = 0; e < N; ++e) {
      sums[e] = 0;
    }
  }
  __device__ __forceinline__ void add(float factor, const T* row, i64 col) {
#pragma unroll
    for (int e = 0; e < N; ++e) {
      if (first + 32 * e < depth) {
        sums[e] = fmaf(factor, static_cast<float>(widen(row[(first + 32 * e) * col])), sums[e]);
      }
    }
  }
  __device__ __forceinline__ void store(T* row, i64 col) const {
#pragma unroll
    for (int e = 0; e < N; ++e) {
      if (first + 32 * e < depth) {
        row[(first + 32 * e) * col] = narrow<T>(sums[e]);
      }
    }
  }
};

/// by_row[i] = Σ_t x[i, t]·by_col[column].
template <typename T, int N>
__global__ void __launch_bounds__(kRegularThreads, 3) regular_by_row(const __grid_constant__ RegularParams p) {
  const u32 n = blockIdx.x * (kRegularThreads / 32) + threadIdx.x / 32;
  if (n >= p.tasks) {
    return;
  }
  const int lane = threadIdx.x % 32;
  const regular_task my(n, p.chunks, p.row_count, p.heads);
  const int* const columns = p.columns + p.first[my.line];
  const int count = static_cast<int>(p.first[my.line + 1] - p.first[my.line]);
  const T* const values = regular_line<const T>(p.values, my.batch, my.head, my.line);
  const T* const right = regular_line<const T>(p.by_col, my.batch, my.head / p.group, 0);
  regular_sum<T, N> sum(my.chunk, p.depth);
  for (int first = 0; first < count; first += 32) {
    const int many = min(32, count - first);
    const int column = lane < many ? columns[first + lane] : 0;
    const float x = lane < many ? static_cast<float>(widen(values[(first + lane) * p.values.col])) : 0.0f;
#pragma unroll 4
    for (int u = 0; u < many; ++u) {
      const i64 j = __shfl_sync(0xffffffffu, column, u);
      sum.add(__shfl_sync(0xffffffffu, x, u), right + j * p.by_col.row, p.by_col.col);
    }
  }
  sum.store(regular_line<T>(p.by_row, my.batch, my.head, my.line), p.by_row.col);
}

/// by_col[j] = Σ x[i, t]·by_row[i] over the entries of column j and the heads that share it.
template <typename T, int N>
__global__ void __launch_bounds__(kRegularThreads, 3) regular_by_col(const __grid_constant__ RegularParams p) {
  const u32 n = blockIdx.x * (kRegularThreads / 32) + threadIdx.x / 32;
  if (n >= p.tasks) {
    return;
  }
  const int lane = threadIdx.x % 32;
  const regular_task my(n, p.chunks, p.col_count, p.heads / p.group);
  const RegularPlace* const places = p.places + p.col_first[my.line];
  const int count = static_cast<int>(p.col_first[my.line + 1] - p.col_first[my.line]);
  regular_sum<T, N> sum(my.chunk, p.depth);
  for (int head = my.head * p.group; head < (my.head + 1) * p.group; ++head) {
    const T* const left = regular_line<const T>(p.by_row, my.batch, head, 0);
    for (int first = 0; first < count; first += 32) {
      const int many = min(32, count - first);
      int row = 0;
      float x = 0;
      if (lane < many) {
        const RegularPlace at = places[first + lane];
        row = at.row;
        x = widen(regular_line<const T>(p.values, my.batch, head, row)[at.place * p.values.col]);
      }
#pragma unroll 4
      for (int u = 0; u < many; ++u) {
        const int r = __shfl_sync(0xffffffffu, row, u);
        sum.add(__shfl_sync(0xffffffffu, x, u), left + r * p.by_row.row, p.by_row.col);
      }
    }
  }
  sum.store(regular_line<T>(p.by_col, my.batch, my.head, my.line), p.by_col.col);
}

inline constexpr int kSoftmaxWarps = 8;
#if __CUDA_ARCH__ >= 900
inline constexpr int kBackwardCtas = 4;  ///< that registers are left for; before, the compiler needs some more
#else
inline constexpr int kBackwardCtas = 3;
#endif
/// Zeros from `to` to `end`, by kLanes neighbouring lanes.
template <int kLanes = 32, typename T>
__device__ __forceinline__ void fill_zeros(T* to, T* end) {
  constexpr int kChunk = 16 / static_cast<int>(sizeof(T));
  const int lane = threadIdx.x % kLanes;
  T* const whole = reinterpret_cast<T*>((reinterpret_cast<u64>(to) + 15) / 16 * 16);
  for (T* at = to + lane; at < end && at < whole; at += kLanes) {
    *at = T{};
  }
  const u32 zeros[4] = {};
  T* at = whole + lane * kChunk;
  for (; at + kChunk <= end; at += kLanes * kChunk) {
    store_words<4>(at, zeros);
  }
  for (; at < end; ++at) {  // one lane's, less than a chunk
    *at = T{};
  }
}

/// The row of some lanes or of a CTA.
struct regular_softmax_row {
  int batch, head, line, count;
  __device__ __forceinline__ regular_softmax_row(const RegularSoftmaxParams& p, u32 n, bool idle = false) {
    const regular_task my(n, 1, p.row_count, p.heads);
    const u64 row = *reinterpret_cast<const u64*>(p.rows + my.line);
    batch = my.batch;
    head = my.head;
    line = static_cast<int>(row);
    count = idle ? 0 : static_cast<int>(row >> 32);
  }
};

/// The same pointer to global memory, computed once: accesses at fixed distances from it are to take no arithmetic of
/// their own.
template <typename T>
__device__ __forceinline__ T* opaque(T* p) {
  asm volatile("" : "+l"(p));
  __builtin_assume(__isGlobal(p));
  return p;
}

/// A row of up to L·N entries of L neighbouring lanes, N in each: C neighbours at a time, in one aligned access. Where
/// C is more than 1, the row may begin `lead` elements behind an aligned address, and all tensors have the same lead.
template <typename T, int N, int C, int L>
struct regular_row {
  int count, lead;
  int own;  ///< the lane's first place, counted from the aligned address
  __device__ __forceinline__ regular_row(int entries, const T* row)
      : count(entries),
        lead(C > 1 ? static_cast<int>(reinterpret_cast<u64>(row) / sizeof(T) % C) : 0),
        own(static_cast<int>(threadIdx.x % L) * C) {}
  __device__ __forceinline__ static constexpr int offset(int e) { return e / C * L * C + e % C; }
  /// Negative in front of the row.
  __device__ __forceinline__ int entry(int e) const { return own - lead + offset(e); }
  __device__ __forceinline__ bool there(int e) const {
    return offset(e) < count + lead - own && (e >= C || own + e >= lead);
  }
  /// Anything beyond the row's entries. What an access reads around them lies in the same 16 bytes as one of them, and
  /// in front of `end`.
  __device__ __forceinline__ void load(float (&x)[N], const T* row, i64 col, const void* end) const {
    if constexpr (C == 1) {
#pragma unroll
      for (int e = 0; e < N; ++e) {
        if (there(e)) {
          x[e] = widen(row[entry(e) * col]);
        }
      }
    } else {
      const i64 readable = static_cast<const T*>(end) - row;
      const int whole = readable >= count + C ? count : static_cast<int>(readable) - C + 1;  // accesses begin below
      const T* const from = opaque(row + (own - lead));
      run<T, C> some[N / C];
#pragma unroll
      for (int e = 0; e < N; e += C) {
        some[e / C] = load_run_if<T, C>(entry(e) < whole, from + offset(e));
      }
#pragma unroll
      for (int e = 0; e < N; ++e) {
        x[e] = widen(some[e / C].at(e % C));
      }
      if (whole < count) {  // the tensor's last row
#pragma unroll
        for (int e = 0; e < N; ++e) {
          if (entry(e - e % C) >= whole && there(e)) {
            x[e] = widen(row[entry(e)]);
          }
        }
      }
    }
  }
  /// x is zero beyond the row's entries. And zeros from there on.
  __device__ __forceinline__ void store(T* row, i64 col, int width, const float (&x)[N]) const {
    const int held = min(width, N * L - lead);  // what is stored from registers
    if constexpr (C == 1) {
#pragma unroll
      for (int e = 0; e < N; ++e) {
        if (entry(e) < held) {
          row[entry(e) * col] = narrow<T>(x[e]);
        }
      }
      for (int t = held + static_cast<int>(threadIdx.x % L); t < width; t += L) {
        row[t * col] = T{};
      }
    } else {
      store_chunks(opaque(row + (own - lead)), held, x);
      if (held < width) {
        fill_zeros<L>(row + held, row + width);
      }
    }
  }

 private:
  /// Chunks that reach beyond the row on either side are stored element by element. In front that is the first; behind
  /// it is one of the last two, as N is no more than the longest row needs.
  __device__ __forceinline__ void store_chunks(T* to, int held, const float (&x)[N]) const {
    float rest[C];
    int last = N * L;  // where `rest` goes
#pragma unroll
    for (int e = 0; e < N; e += C) {
      const int first = entry(e);
      float some[C];
#pragma unroll
      for (int u = 0; u < C; ++u) {
        some[u] = x[e + u];
      }
      if ((e > 0 || first >= 0) && first + C <= held) {
        store_run<T, C>(to + offset(e), some);
      }
      if (e == 0 || e + 2 * C >= N) {
        const bool partial = first < held && (first < 0 || first + C > held);
        if (e == 0 && partial) {
          store_some(to, 0, held, some);
        } else if (e > 0) {
#pragma unroll
          for (int u = 0; u < C; ++u) {
            rest[u] = partial ? some[u] : rest[u];
          }
          last = partial ? offset(e) : last;
        }
      }
    }
    if (last < N * L) {
      store_some(to, last, held, rest);
    }
  }
  __device__ __forceinline__ void store_some(T* to, int at, int end, const float (&x)[C]) const {
#pragma unroll
    for (int u = 0; u < C; ++u) {
      if (static_cast<u32>(own - lead + at + u) < static_cast<u32>(end)) {
        to[at + u] = narrow<T>(x[u]);
      }
    }
  }
};

/// exp(after·x), x ≤ 0 or NaN; fast where T is rounded to 16 bits. `after` is at most half of the largest number.
template <typename T>
__device__ __forceinline__ float regular_exp(float after, float x) {
  return sizeof(T) == 2 ? exp2_fast(after * kLog2e * x) : expf(after * x);
}

/// out = softmax of scale·in over a row's entries, which L lanes hold in registers.
template <typename T, int N, int C, int L>
__global__ void __launch_bounds__(32 * kSoftmaxWarps, N <= 20 && C > 1 ? 5 : 1)
    regular_softmax_held(const __grid_constant__ RegularSoftmaxParams p) {
  const u32 n = blockIdx.x * (32 * kSoftmaxWarps / L) + threadIdx.x / L;
  if (L == 32 && n >= p.tasks) {
    return;
  }
  const bool idle = L < 32 && n >= p.tasks;  // but lanes beside may not be
  const regular_softmax_row my(p, idle ? p.tasks - 1 : n, idle);
  const int width = idle ? 0 : p.width;
  const T* const in = regular_line<const T>(p.in, my.batch, my.head, my.line);
  const regular_row<T, N, C, L> row(my.count, in);
  float x[N], top = -infinity(), sum = 0;
  row.load(x, in, p.in.col, p.in_end);
#pragma unroll
  for (int e = 0; e < N; ++e) {
    x[e] = row.there(e) ? p.before * x[e] : -infinity();
    top = fmaxf(top, x[e]);  // NaN loses, and shows in the sum
  }
  top = reduce_lanes<L>(top, take_max{});
  top = top == -infinity() ? 0.0f : top;  // a row of −inf alone must not subtract it from itself
#pragma unroll
  for (int e = 0; e < N; ++e) {
    x[e] = regular_exp<T>(p.after, x[e] - top);
    sum += x[e];
  }
  sum = reduce_lanes<L>(sum, take_sum{});
  const float share = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
  for (int e = 0; e < N; ++e) {
    x[e] *= share;
  }
  if (share != share) {  // which zeros are not to become
    regular_row<T, N, C, L> row(my.count, in);
    asm volatile("" : "+r"(row.count));  // so that no predicate is kept from above for this
#pragma unroll
    for (int e = 0; e < N; ++e) {
      x[e] = row.there(e) ? x[e] : 0.0f;
    }
  }
  row.store(regular_line<T>(p.out, my.batch, my.head, my.line), p.out.col, width, x);
}

/// d_in = scale·out·(d_out − Σ out·d_out); `in` is the softmax here. Where nothing came out nothing counts.
template <typename T, int N, int C, int L>
__global__ void __launch_bounds__(32 * kSoftmaxWarps, N <= 20 && C > 1 ? kBackwardCtas : 1)
    regular_softmax_backward_held(const __grid_constant__ RegularSoftmaxParams p) {
  const u32 n = blockIdx.x * (32 * kSoftmaxWarps / L) + threadIdx.x / L;
  if (L == 32 && n >= p.tasks) {
    return;
  }
  const bool idle = L < 32 && n >= p.tasks;  // but lanes beside may not be
  const regular_softmax_row my(p, idle ? p.tasks - 1 : n, idle);
  const int width = idle ? 0 : p.width;
  const T* const in = regular_line<const T>(p.in, my.batch, my.head, my.line);
  const regular_row<T, N, C, L> row(my.count, in);
  float x[N], d[N], dot = 0;
  row.load(x, in, p.in.col, p.in_end);
  row.load(d, regular_line<const T>(p.d_out, my.batch, my.head, my.line), p.d_out.col, p.d_out_end);
#pragma unroll
  for (int e = 0; e < N; ++e) {
    dot += row.there(e) && x[e] != 0.0f ? x[e] * d[e] : 0.0f;
  }
  dot = reduce_lanes<L>(dot, take_sum{});
#pragma unroll
  for (int e = 0; e < N; ++e) {
    x[e] = row.there(e) && x[e] != 0.0f ? p.scale * (x[e] * (d[e] - dot)) : 0.0f;
  }
  row.store(regular_line<T>(p.out, my.batch, my.head, my.line), p.out.col, width, x);
}

/// The softmax of longer rows, a CTA for each.
template <typename T>
__global__ void __launch_bounds__(32 * kSoftmaxWarps) regular_softmax(const __grid_constant__ RegularSoftmaxParams p) {
  const regular_softmax_row my(p, blockIdx.x);
  const T* const in = regular_line<const T>(p.in, my.batch, my.head, my.line);
  T* const out = regular_line<T>(p.out, my.batch, my.head, my.line);
  const int thread = static_cast<int>(threadIdx.x);
  const auto score = [&](int t) { return p.before * static_cast<float>(widen(in[t * p.in.col])); };
  float top = -infinity(), sum = 0;
  for (int t = thread; t < my.count; t += 32 * kSoftmaxWarps) {
    top = fmaxf(top, score(t));  // NaN loses, and shows in the sum
  }
  top = reduce_block<kSoftmaxWarps>(top, take_max{});
  top = top == -infinity() ? 0.0f : top;
  for (int t = thread; t < my.count; t += 32 * kSoftmaxWarps) {
    sum += regular_exp<T>(p.after, score(t) - top);
  }
  sum = reduce_block<kSoftmaxWarps>(sum, take_sum{});
  const float share = sum == 0.0f ? 0.0f : 1.0f / sum;
  for (int t = thread; t < p.width; t += 32 * kSoftmaxWarps) {
    out[t * p.out.col] = narrow<T>(t < my.count ? regular_exp<T>(p.after, score(t) - top) * share : 0.0f);
  }
}

/// The gradient of `in` for longer rows, a CTA for each.
template <typename T>
__global__ void __launch_bounds__(32 * kSoftmaxWarps)
    regular_softmax_backward(const __grid_constant__ RegularSoftmaxParams p) {
  const regular_softmax_row my(p, blockIdx.x);
  const T* const in = regular_line<const T>(p.in, my.batch, my.head, my.line);
  const T* const upstream = regular_line<const T>(p.d_out, my.batch, my.head, my.line);
  T* const out = regular_line<T>(p.out, my.batch, my.head, my.line);
  const int thread = static_cast<int>(threadIdx.x);
  float dot = 0;
  for (int t = thread; t < my.count; t += 32 * kSoftmaxWarps) {
    const float x = widen(in[t * p.in.col]), d = widen(upstream[t * p.d_out.col]);
    dot += x != 0.0f ? x * d : 0.0f;
  }
  dot = reduce_block<kSoftmaxWarps>(dot, take_sum{});
  for (int t = thread; t < p.width; t += 32 * kSoftmaxWarps) {
    float result = 0;
    if (t < my.count) {
      const float x = widen(in[t * p.in.col]), d = widen(upstream[t * p.d_out.col]);
      result = x != 0.0f ? p.scale * (x * (d - dot)) : 0.0f;
    }
    out[t * p.out.col] = narrow<T>(result);
  }
}

}  // namespace fretwork
