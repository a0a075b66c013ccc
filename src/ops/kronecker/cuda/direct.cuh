// Up to 256 batch rows of 16-bit types; weights are read where they lie. Every load of a warp goes straight to the
// registers that mma reads. All loads are issued before the first wait, and there is one barrier. Which k an entry of a
// fragment stands for is free if both operands agree. So a lane's entries are four neighbouring k of all its δ: 16
// bytes or more.
#pragma once

#include "device/activation.cuh"
#include "device/barrier.cuh"
#include "device/copy_async.cuh"
#include "device/mma.cuh"
#include "ops/kronecker/cuda/params.h"

namespace fretwork::kronecker::direct {

/// The transpose of an 8 × 8 matrix of 16-bit entries, whose row lane / 4 lies in four lanes.
__device__ __forceinline__ u32 transposed(u32 from) {
  u32 to;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(from));
  return to;
}

/// 16, 4 or 2 bytes where `there`, else zeros; without a branch, so that loads follow each other closely.
__device__ __forceinline__ void load_if(bool there, const void* from, u32* to) {
  asm volatile(
      "{.reg .pred p;\n"
      "setp.ne.u32 p, %5, 0;\n"
      "mov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\nmov.b32 %3, 0;\n"
      "@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];}"
      : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
      : "l"(from), "r"(static_cast<u32>(there)));
}
__device__ __forceinline__ u32 load_if(bool there, const void* from) {
  u32 to;
  asm volatile(
      "{.reg .pred p;\n"
      "setp.ne.u32 p, %2, 0;\n"
      "mov.b32 %0, 0;\n"
      "@p ld.global.nc.b32 %0, [%1];}"
      : "=r"(to)
      : "l"(from), "r"(static_cast<u32>(there)));
  return to;
}
__device__ __forceinline__ u32 load_16_if(bool there, const void* from) {
  u16 to;
  asm volatile(
      "{.reg .pred p;\n"
      "setp.ne.u32 p, %2, 0;\n"
      "mov.b16 %0, 0;\n"
      "@p ld.global.nc.b16 %0, [%1];}"
      : "=h"(to)
      : "l"(from), "r"(static_cast<u32>(there)));
  return to;
}
/// 4 or 2 bytes where `there`, without a branch too.
__device__ __forceinline__ void store_if(bool there, void* to, u32 word) {
  asm volatile(
      "{.reg .pred p;\n"
      "setp.ne.u32 p, %2, 0;\n"
      "@p st.global.b32 [%0], %1;}" ::"l"(to),
      "r"(word), "r"(static_cast<u32>(there))
      : "memory");
}
__device__ __forceinline__ void store_if(bool there, void* to, u16 half) {
  asm volatile(
      "{.reg .pred p;\n"
      "setp.ne.u32 p, %2, 0;\n"
      "@p st.global.b16 [%0], %1;}" ::"l"(to),
      "h"(half), "r"(static_cast<u32>(there))
      : "memory");
}

/// A lane's four k of V neighbouring l (V = 1: eight k) of a row: 4·V (8) elements, and the fragments of as many
/// products as there are l (two) that they make.
template <int V>
inline constexpr int kWords = V == 1 ? 4 : 2 * V;
template <int V>
inline constexpr int kProducts = kWords<V> / 2;
/// d, which is V where lanes have all l.
template <int V>
__device__ __forceinline__ int stride_of(const Params& p) {
  return V == 8 ? p.d : V;
}
/// From k of one lane to that of the next, and between neighbouring k of a lane. Where each k has 16 bytes for itself,
/// it is lanes that have neighbouring ones, so that they read the same line of memory.
template <int V>
inline constexpr int kLaneK = V == 8 ? 1 : depth_of(V) / 4;
template <int V>
inline constexpr int kNextK = V == 8 ? 4 : 1;

/// `depth` k from the lane's first exist.
template <int V>
__device__ __forceinline__ void load_row(bool there, const u16* from, int depth, int d, u32 (&words)[kWords<V>]) {
#pragma unroll
  for (int w = 0; w < kWords<V>; w += 4) {
    const int k = V == 8 ? w / 4 * kNextK<V> : 0;
    load_if(there && k < depth, V == 8 ? from + k * d : from + 2 * w, words + w);
  }
}

/// Entries 2·q and 2·q + 1 of the depth (half 0), or 2·q + 8 and 2·q + 9, in product e.
template <int V>
__device__ __forceinline__ u32 fragment(const u32 (&words)[kWords<V>], int e, int half) {
  if constexpr (V == 1) {
    return words[2 * e + half];
  } else {
    return pair_halves(words[half * V + e / 2], words[half * V + V / 2 + e / 2], e % 2);
  }
}
/// The k of such an entry, from the lane's first one, and its l.
template <int V>
__device__ __forceinline__ int k_of(int e, int half) {
  return 2 * half * kNextK<V> + (V == 1 ? 4 * e : 0);
}
template <int V>
__device__ __forceinline__ int l_of(int e) {
  return V == 1 ? 0 : e;
}

/// The right operand of eight batch rows, as it is loaded; `rows` and `depth` of them exist. Batch first as
/// load_row has it, else word 2·e + half is a fragment. Batch last fragments are transposed: lane / 4 counts k and
/// neighbouring lanes have neighbouring rows.
template <int V>
__device__ __forceinline__ void load_first(const Params& p, const u16* from, int rows, int depth, u32 lane,
                                           u32 (&words)[kWords<V>]) {
  const int r = static_cast<int>(lane / 4), k = static_cast<int>(lane % 4) * kLaneK<V>;
  load_row<V>(r < rows, from + r * p.x_batch + k * stride_of<V>(p), depth - k, stride_of<V>(p), words);
}
template <int V>
__device__ __forceinline__ void load_last(const Params& p, const u16* from, int rows, int depth, u32 lane,
                                          u32 (&words)[kWords<V>]) {
  const int k = static_cast<int>(lane / 8 * kLaneK<V> + lane / 4 % 2 * kNextK<V>);
  const int n = static_cast<int>(2 * (lane % 4));
  const u16* const first = from + k * stride_of<V>(p) * p.x_feature + n;
#pragma unroll
  for (int w = 0; w < kWords<V>; ++w) {
    const int more = k_of<V>(w / 2, w % 2);
    words[w] = load_if(n < rows && k + more < depth, first + (more * stride_of<V>(p) + l_of<V>(w / 2)) * p.x_feature);
  }
}
template <int V>
__device__ __forceinline__ void load_any(const Params& p, const u16* from, int rows, int depth, u32 lane,
                                         u32 (&words)[kWords<V>]) {
  const int r = static_cast<int>(lane / 4), k = static_cast<int>(lane % 4) * kLaneK<V>;
  const u16* const first = from + static_cast<i64>(r) * p.x_batch + k * stride_of<V>(p) * p.x_feature;
#pragma unroll
  for (int w = 0; w < kWords<V>; ++w) {
    const int more = k_of<V>(w / 2, w % 2);
    const u16* const at = first + (more * stride_of<V>(p) + l_of<V>(w / 2)) * p.x_feature;
    const auto there = [&](int next) { return r < rows && k + more + next < depth; };
    words[w] = load_16_if(there(0), at) | load_16_if(there(kNextK<V>), at + kNextK<V> * stride_of<V>(p) * p.x_feature)
                                              << 16;
  }
}

struct alignas(16) Four {
  float at[4];
};

/// Of the warps that have l or, with large shares, outputs of their own: there are tiles of l only where a lane has
/// eight.
template <int V, int kM, int kN>
__device__ __forceinline__ int log_own(const Params& p) {
  return V == 8 || kM * kN > 2 ? p.log_own : 0;
}

/// Pointers advance from load to load, and neither loads nor stores leap. Elsewhere registers are short, or, where l
/// are apart, results leave in pieces of sectors, which is slower when they leave faster.
template <int V, bool kFirst>
inline constexpr bool kStraight = V < 8 && kFirst;
/// Neighbouring l that a thread stores.
template <int V>
inline constexpr int kPair = V == 1 ? 1 : 2;

/// Where a CTA works.
struct Place {
  int i, j0, l0, n0;
};

/// Bias and activation of sums [l][j, j + 8][n, n + 1], if they are not plain, and their places in the result.
template <typename T, int V, bool kFirst, bool kPlain>
__device__ __forceinline__ void finish(const Params& p, int feature, int j, int n, float (&sums)[kPair<V> * 4],
                                       int rows) {
  if (!kPlain && p.bias != nullptr) {
#pragma unroll
    for (int s = 0; s < kPair<V>; ++s) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (j + 8 * h < p.b) {
          const float bias = widen(static_cast<const T*>(p.bias)[(feature + 8 * h * p.d + s) * p.bias_stride]);
          sums[s * 4 + 2 * h] += bias;
          sums[s * 4 + 2 * h + 1] += bias;
        }
      }
    }
  }
  if constexpr (!kPlain) {
    activate(sums, p.activation);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if constexpr (kStraight<V, kFirst>) {
      T* const first = static_cast<T*>(p.y) + static_cast<i64>(n) * p.y_batch + feature + 8 * h * p.d;
#pragma unroll
      for (int g = 0; g < 2; ++g) {
        const bool there = j + 8 * h < p.b && n + g < rows;
        if constexpr (kPair<V> == 2) {
          store_if(there, first + g * p.y_batch, narrow_pair<T>(sums[2 * h + g], sums[4 + 2 * h + g]));
        } else {
          store_if(there, first + g * p.y_batch, narrow<T>(sums[2 * h + g]).bits);
        }
      }
      continue;
    }
    if (j + 8 * h >= p.b) {
      return;
    }
    T* const to = static_cast<T*>(p.y) + static_cast<i64>(n) * p.y_batch + (feature + 8 * h * p.d) * p.y_feature;
    if (!kFirst && p.last) {
#pragma unroll
      for (int s = 0; s < kPair<V>; ++s) {
        *reinterpret_cast<u32*>(to + s * p.y_feature) = narrow_pair<T>(sums[s * 4 + 2 * h], sums[s * 4 + 2 * h + 1]);
      }
      continue;
    }
#pragma unroll
    for (int g = 0; g < 2; ++g) {
      if (n + g < rows) {
        if (kPair<V> == 2 && (kFirst || p.first)) {
          *reinterpret_cast<u32*>(to + g * p.y_batch) = narrow_pair<T>(sums[2 * h + g], sums[4 + 2 * h + g]);
        } else {
#pragma unroll
          for (int s = 0; s < kPair<V>; ++s) {
            to[g * p.y_batch + s * p.y_feature] = narrow<T>(sums[s * 4 + 2 * h + g]);
          }
        }
      }
    }
  }
}

/// The sums of all warps, [own][along k][l div 2][j][n][l mod 2][lane], become results.
template <typename T, int V, int kM, int kN, bool kFirst, bool kPlain>
__device__ __forceinline__ void store_sums(const Params& p, const Four* parts, const Place& at, int end) {
  constexpr int kSums = V * kM * kN, kUnits = kSums / kPair<V> * 32;
#pragma unroll 1
  for (u32 unit = threadIdx.x; unit < kUnits << log_own<V, kM, kN>(p); unit += blockDim.x) {
    const u32 lane = unit % 32, rest = unit % kUnits / 32, tile = rest % kN, m = rest / kN % kM;
    const u32 own = unit / kUnits, e = rest / (kN * kM) * kPair<V> + (V == 8 ? own * V : 0);
    const u32 tile_j = m + (V == 8 ? 0 : own * kM);
    const int n = at.n0 + static_cast<int>(tile * 8 + lane % 4 * 2);
    const int j = at.j0 + static_cast<int>(tile_j * 16 + lane / 4);
    if (n >= end) {
      continue;
    }
    float sums[kPair<V> * 4] = {};
    const Four* from = parts + own * p.along_k * (kSums * 32) + rest * kPair<V> * 32 + lane;
    if constexpr (V == 8) {
#pragma unroll 4
      for (int w = 0; w < p.along_k; ++w, from += kSums * 32) {
#pragma unroll
        for (int s = 0; s < kPair<V>; ++s) {
          const Four more = from[s * 32];
#pragma unroll
          for (int h = 0; h < 4; ++h) {
            sums[s * 4 + h] += more.at[h];
          }
        }
      }
    } else {
      constexpr int kTogether = 4;  // parts whose loads leave together, with no leap for those that are not there
#pragma unroll 1
      for (int w = 0; w < p.along_k; w += kTogether, from += kTogether * kSums * 32) {
        u32 words[kTogether][kPair<V>][4] = {};
#pragma unroll
        for (int v = 0; v < kTogether; ++v) {
#pragma unroll
          for (int s = 0; s < kPair<V>; ++s) {
            if (w + v < p.along_k) {
              load_shared_128(words[v][s], shared_address(from + (v * kSums + s) * 32));
            }
          }
        }
#pragma unroll
        for (int v = 0; v < kTogether; ++v) {
#pragma unroll
          for (int s = 0; s < kPair<V> * 4; ++s) {
            sums[s] += __uint_as_float(words[v][s / 4][s % 4]);
          }
        }
      }
    }
    finish<T, V, kFirst, kPlain>(p, (at.i * p.b + j) * p.d + at.l0 + static_cast<int>(e), j, n, sums, end);
  }
}

/// The same. Plain sums have code of their own, in one piece: what it leaps to is not in the cache of a short launch.
template <typename T, int V, int kM, int kN, bool kFirst>
__device__ __forceinline__ void store(const Params& p, const Four* parts, const Place& at, int end) {
  if (p.plain) {
    store_sums<T, V, kM, kN, kFirst, true>(p, parts, at, end);
  } else {
    store_sums<T, V, kM, kN, kFirst, false>(p, parts, at, end);
  }
}

/// What a warp multiplies.
struct Share {
  Place at;  ///< of its CTA
  u32 lane, own, warp;
  const u16 *weights, *x;  ///< of the lane's row, and of row n0; k = 0
  int j, lane_k;

  template <int V, int kM, int kN>
  static __device__ __forceinline__ Share make(const Params& p, int rows) {
    const auto split = [](int n, const Divisor& by, int& rest) {
      const int quotient = by.quotient(n);
      rest = n - quotient * static_cast<int>(by.divisor);
      return quotient;
    };
    Share s;
    int rest = split(static_cast<int>(blockIdx.x), p.groups, s.at.n0);
    s.at.l0 = 0;
    if constexpr (V == 8) {
      rest = split(rest, p.l_tiles, s.at.l0);
    }
    s.at.i = split(rest, p.j_tiles, s.at.j0);
    s.at.j0 *= 16 * kM << (V == 8 ? 0 : log_own<V, kM, kN>(p));
    s.at.l0 *= V << log_own<V, kM, kN>(p);
    s.at.n0 *= rows;
    s.lane = threadIdx.x % 32;
    s.own = threadIdx.x / 32 & ((1u << log_own<V, kM, kN>(p)) - 1);
    s.warp = threadIdx.x / 32 >> log_own<V, kM, kN>(p);
    s.j = s.at.j0 + static_cast<int>(s.lane / 4 + (V == 8 ? 0 : s.own * (16 * kM)));
    s.lane_k = static_cast<int>(s.lane % 4) * kLaneK<V>;
    const int l = s.at.l0 + static_cast<int>(V == 8 ? s.own * V : 0);
    s.weights = static_cast<const u16*>(p.w) + s.at.i * p.w_block + l + s.j * p.w_b;
    s.x = static_cast<const u16*>(p.x) + s.at.i * p.x_block + l * p.x_feature + s.at.n0 * static_cast<i64>(p.x_batch);
    return s;
  }
};

/// What was loaded of eight rows becomes fragments.
template <int V>
__device__ __forceinline__ void arrange_first(u32 (&words)[kWords<V>]) {
  u32 arranged[kWords<V>];
#pragma unroll
  for (int w = 0; w < kWords<V>; ++w) {
    arranged[w] = fragment<V>(words, w / 2, w % 2);
  }
#pragma unroll
  for (int w = 0; w < kWords<V>; ++w) {
    words[w] = arranged[w];
  }
}
template <int V>
__device__ __forceinline__ void arrange_last(u32 (&words)[kWords<V>]) {
#pragma unroll
  for (u32& word : words) {
    word = transposed(word);
  }
}

template <typename T, int V, int kM, int kN>
__device__ __forceinline__ void multiply(const u32 (&left)[kM][2][kWords<V>], const u32 (&right)[kN][kWords<V>],
                                         float (&sums)[V][kM][kN][4]) {
#pragma unroll
  for (int e = 0; e < kProducts<V>; ++e) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      const u32(&rows)[2][kWords<V>] = left[m];
      const u32 a[4] = {fragment<V>(rows[0], e, 0), fragment<V>(rows[1], e, 0), fragment<V>(rows[0], e, 1),
                        fragment<V>(rows[1], e, 1)};
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        mma_sync<T>(sums[l_of<V>(e)][m][n], a, right[n][2 * e], right[n][2 * e + 1]);
      }
    }
  }
}

/// A warp's sums, where `store` finds them.
template <int V, int kM, int kN>
__device__ __forceinline__ void put(const Params& p, const Share& share, const float (&sums)[V][kM][kN][4],
                                    Four* parts) {
  Four* const to = parts + (share.own * p.along_k + share.warp) * (V * kM * kN * 32) + share.lane;
#pragma unroll
  for (int e = 0; e < V; ++e) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        const int place = V == 1 ? m * kN + n : ((e / 2 * kM + m) * kN + n) * 2 + e % 2;
        const float(&d)[4] = sums[e][m][n];
        to[place * 32] = {{d[0], d[1], d[2], d[3]}};
      }
    }
  }
}

/// A warp has 16·kM of b, V of d and 8·kN batch rows. Those of a CTA share the depth, kSteps steps at a time, but for
/// groups that have l, or outputs, of their own. V is d, or 8 that divides it.
template <typename T, int V, int kSteps, int kM, int kN, bool kFirst>
__device__ __forceinline__ void multiply_rows(const Params& p, Four* parts) {
  constexpr int kDepth = depth_of(V);
  const Share share = Share::make<V, kM, kN>(p, 8 * kN);
  float sums[V][kM][kN][4] = {};
  constexpr bool straight = kStraight<V, kFirst>;
  const i64 eight = 8 * p.w_b, eight_rows = 8 * p.x_batch;
  const int d = stride_of<V>(p);
  const auto turn = [&](int k0) {
    u32 left[kSteps][kM][2][kWords<V>], right[kSteps][kN][kWords<V>];
    const u16* const weights = share.weights + (k0 + share.lane_k) * d;
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int k = k0 + s * kDepth + share.lane_k;
#pragma unroll
      for (int m = 0; m < 2 * kM; ++m) {
        load_row<V>(share.j + m * 8 < p.b,
                    straight ? weights + m * eight + s * kDepth * d : share.weights + m * 8 * p.w_b + k * d, p.c - k, d,
                    left[s][m / 2][m % 2]);
      }
    }
    const auto each = [&](const auto& act) {
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          act(k0 + s * kDepth, n, right[s][n]);
        }
      }
    };
    const auto load = [&](const auto& how) {
      each([&](int k, int n, u32(&words)[kWords<V>]) {
        how(p, share.x + n * 8 * p.x_batch + k * d * p.x_feature, p.batch - share.at.n0 - n * 8, p.c - k, share.lane,
            words);
      });
    };
    if constexpr (straight) {
      const int r = static_cast<int>(share.lane / 4);
      const u16* const x = share.x + r * p.x_batch + (k0 + share.lane_k) * d;
      each([&](int k, int n, u32(&words)[kWords<V>]) {
        load_row<V>(r + n * 8 < p.batch - share.at.n0, x + n * eight_rows + (k - k0) * d, p.c - k - share.lane_k, d,
                    words);
      });
      each([](int, int, u32(&words)[kWords<V>]) { arrange_first<V>(words); });
    } else if (kFirst || p.first) {
      load(load_first<V>);
      each([](int, int, u32(&words)[kWords<V>]) { arrange_first<V>(words); });
    } else if (p.last) {
      load(load_last<V>);
      each([](int, int, u32(&words)[kWords<V>]) { arrange_last<V>(words); });
    } else {
      load(load_any<V>);
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      multiply<T, V, kM, kN>(left[s], right[s], sums);
    }
  };
  int k0 = static_cast<int>(share.warp) * (kSteps * kDepth);
  const int next = p.along_k * (kSteps * kDepth);
  if constexpr (V < 8) {
#pragma unroll 1
    do {  // every warp has a turn
      turn(k0);
    } while ((k0 += next) < p.c);
  } else {
#pragma unroll 1
    for (; k0 < p.c; k0 += next) {
      turn(k0);
    }
  }
  put<V, kM, kN>(p, share, sums, parts);
  __syncthreads();
  store<T, V, kM, kN, kFirst>(p, parts, share.at, p.batch);
}

/// d = 2, batch first, all of x and the weights at once: a warp has 16 outputs, kTileSteps steps of the depth and all
/// rows of the CTA, up to 8·kN. Those that share a part of the depth copy its x to shared memory together.
template <typename T, int kN>
__device__ __forceinline__ void multiply_tile(const Params& p, Four* parts) {
  constexpr int V = 2, kDepth = kTileSteps * depth_of(V);
  const Share share = Share::make<V, 1, kN>(p, p.rows);
  const int k0 = static_cast<int>(share.warp) * kDepth, rows = min(p.rows, p.batch - share.at.n0);
  const u16* const weights = share.weights + (k0 + share.lane_k) * V;
  const int depth = p.c - k0 - share.lane_k;
  u32 left[kTileSteps][1][2][kWords<V>];
#pragma unroll
  for (int s = 0; s < kTileSteps; ++s) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      load_row<V>(share.j + m * 8 < p.b, weights + m * static_cast<i64>(8 * p.w_b) + s * depth_of(V) * V,
                  depth - s * depth_of(V), V, left[s][0][m]);
    }
  }
  // A warp copies two rows at a time, kN times for each quarter of the rows that is its own.
  const u32 x =
      shared_address(parts) + (p.along_k << p.log_own) * sums_bytes(V, 1, kN) + share.warp * (8 * kN * kTilePitch);
  const int piece = static_cast<int>(share.lane % 16), bytes = k0 + piece * 4 < p.c ? 16 : 0;
#pragma unroll 1
  for (int quarter = static_cast<int>(share.own); quarter < 4; quarter += 1 << p.log_own) {
    const int row = quarter * (2 * kN) + static_cast<int>(share.lane / 16);
    const u16* from = share.x + row * p.x_batch + k0 * V + piece * 8;
#pragma unroll
    for (int n = 0; n < 2 * kN; n += 2, from += 2 * static_cast<i64>(p.x_batch)) {
      copy_async_part_if(row + n < rows, x + (row + n) * kTilePitch + piece * 16, from, bytes);
    }
  }
  copy_async_commit();
  named_barrier(1 + share.warp, 32 << p.log_own);  // keeps the compiler from moving loads behind the wait
  copy_async_wait<0>();
  named_barrier(1 + share.warp, 32 << p.log_own);

  float sums[V][1][kN][4] = {};
  const u32 lines = x + share.lane / 4 * kTilePitch + share.lane % 4 * 16;
#pragma unroll
  for (int s = 0; s < kTileSteps; ++s) {
    u32 right[kN][kWords<V>];
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      load_shared_128(right[n], lines + n * 8 * kTilePitch + s * 64);
      arrange_first<V>(right[n]);
    }
    multiply<T, V, 1, kN>(left[s], right, sums);
  }
  put<V, 1, kN>(p, share, sums, parts);
  __syncthreads();
  store<T, V, 1, kN, true>(p, parts, share.at, share.at.n0 + rows);
}

/// Batch last, d = 1, lines that begin anywhere: a block of x is copied as the one piece of memory that it is, and so
/// is what becomes of it. A warp has 16 outputs and every fourth 16 batch rows. Two lines have (k, k + 1) of rows 2g
/// and 2g + 1, columns g of two products, and a lane ends with four neighbouring rows. Its k are four neighbours, so
/// that lanes meet different banks where lines are 8 bytes longer than a multiple of 64.
template <typename T>
__device__ __forceinline__ void multiply_piece(const Params& p, Four* parts) {
  constexpr int kSteps = kPieceDepth / 16;
  const int i = p.j_tiles.quotient(static_cast<int>(blockIdx.x));
  const int j0 = (static_cast<int>(blockIdx.x) - i * static_cast<int>(p.j_tiles.divisor)) * kPieceOutputs;
  const u32 piece = shared_address(parts);
  const u8* const x = reinterpret_cast<const u8*>(static_cast<const u16*>(p.x) + i * p.x_block);
  for (int n = static_cast<int>(threadIdx.x) * 16; n < p.c * p.batch * 2; n += kPieceThreads * 16) {
    copy_async_16(piece + n, x + n, true);
  }
  copy_async_commit();

  const int lane = static_cast<int>(threadIdx.x % 32), g = lane / 4, t = lane % 4;
  const int warp = static_cast<int>(threadIdx.x / 32), j = j0 + warp % 4 * 16 + g;
  const bool there = j0 + warp % 4 * 16 < p.b;  // outputs are a multiple of 16
  const u16* const weights = static_cast<const u16*>(p.w) + i * p.w_block + j * p.w_b + 4 * t;
  u32 left[kSteps][4];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint2 two{};
      if (there && s * 16 < p.c) {
        two = *reinterpret_cast<const uint2*>(weights + h * 8 * p.w_b + s * 16);
      }
      left[s][h] = two.x;
      left[s][2 + h] = two.y;
    }
  }
  copy_async_wait<0>();
  __syncthreads();
  T* const results = reinterpret_cast<T*>(reinterpret_cast<u8*>(parts) + piece_x_bytes(p.c, p.batch));
#pragma unroll 1
  for (int n0 = warp / 4 * 16; there && n0 < p.batch; n0 += 64) {
    float sums[2][4] = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      if (s * 16 < p.c) {
        u32 lines[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          lines[r] = load_shared_32(piece + ((s * 16 + 4 * t + r) * p.batch + n0 + 2 * g) * 2);
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          mma_sync<T>(sums[e], left[s], pair_halves(lines[0], lines[1], e), pair_halves(lines[2], lines[3], e));
        }
      }
    }
    const int n = n0 + 4 * t;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float bias =
          p.bias != nullptr ? widen(static_cast<const T*>(p.bias)[(i * p.b + j + 8 * h) * p.bias_stride]) : 0.0f;
      float v[4] = {sums[0][2 * h] + bias, sums[1][2 * h] + bias, sums[0][2 * h + 1] + bias, sums[1][2 * h + 1] + bias};
      activate(v, p.activation);
      u32* const to = reinterpret_cast<u32*>(results + (j - j0 + 8 * h) * p.batch + n);
      if (n < p.batch) {
        to[0] = narrow_pair<T>(v[0], v[1]);
      }
      if (n + 2 < p.batch) {
        to[1] = narrow_pair<T>(v[2], v[3]);
      }
    }
  }
  __syncthreads();
  u8* const y = reinterpret_cast<u8*>(static_cast<T*>(p.y) + static_cast<i64>(i * p.b + j0) * p.batch);
  for (int n = static_cast<int>(threadIdx.x) * 16; n < min(kPieceOutputs, p.b - j0) * p.batch * 2;
       n += kPieceThreads * 16) {
    *reinterpret_cast<uint4*>(y + n) = *reinterpret_cast<const uint4*>(reinterpret_cast<const u8*>(results) + n);
  }
}

/// A few rows, or more, which may have larger shares.
template <typename T, int V, int kSteps, int kM, int kN, int kMoreSteps, int kMoreM, int kMoreN, bool kFirst>
__device__ __forceinline__ void multiply_some(const Params& p, Four* parts) {
  if constexpr (kM != kMoreM || kN != kMoreN) {
    if (p.more) {
      multiply_rows<T, V, kMoreSteps, kMoreM, kMoreN, kFirst>(p, parts);
      return;
    }
  }
  multiply_rows<T, V, kSteps, kM, kN, kFirst>(p, parts);
}

/// kFirst: p.first holds, and there is half the code to fetch.
template <typename T, int V, int kSteps, int kM, int kN, int kMoreSteps, int kMoreM, int kMoreN, bool kFirst>
__global__ void __launch_bounds__(most_threads(V, kMoreSteps, kMoreM, kMoreN),
                                  least_ctas(V, kMoreSteps, kMoreM, kMoreN)) product(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) Four parts[];
  if constexpr (V == 1 && !kFirst) {
    if (p.piece) {
      multiply_piece<T>(p, parts);
      return;
    }
  }
  if constexpr (V == 2 && kSteps == kTileSteps && kFirst) {
    if (!p.apart) {
      if (p.rows > kTileFewer) {
        multiply_tile<T, kTileRows / 8>(p, parts);
      } else {
        multiply_tile<T, kTileFewer / 8>(p, parts);
      }
      return;
    }
  }
  multiply_some<T, V, kSteps, kM, kN, kMoreSteps, kMoreM, kMoreN, kFirst>(p, parts);
}

}  // namespace fretwork::kronecker::direct
