// What is done to scores on Hopper besides the scale: softcap, bias, ALiBi, dropout. One definition for all kernels, in
// the two ways in which scores lie: a thread's two rows are queries (ScoresByQuery) or keys (ScoresByKey). kScore is
// the kernel's options as bits; kernels without options include none of this.
//
// A bias is asked for before the products that its scores wait for, in the accumulator's order. Tokens come as integers
// and become floats by their bits, 2^23 larger: a conversion would take the unit that exponents need.
#pragma once

#include "device/random.cuh"
#include "ops/attention/cuda/hopper.cuh"

namespace fretwork::attention_op::hopper {

template <unsigned kScore>
struct ScoreKind {
  static constexpr unsigned kBiasType = kScore & kBiasBits;
  static constexpr bool kBias = kBiasType != 0, kWide = kBiasType == 1, kHasAlibi = (kScore & kAlibi) != 0;
  static constexpr bool kCaps = (kScore & kSoftcap) != 0, kDrops = (kScore & kDropout) != 0;
  static constexpr bool kRest = kBias || kHasAlibi;                           ///< log-sum-exps may be large
  static constexpr bool kTiles = (kScore & kBiasTiles) != 0;                  ///< of the bias come by the copy engine
  static constexpr bool kTokens = (kBias && !kTiles) || kHasAlibi || kDrops;  ///< tokens say more than the product
  static constexpr bool kBoth = kCaps || kDrops;                              ///< dS is made with P, not after it
  static constexpr bool kRowBits = kDrops && !kRest;  ///< random_row's bits may take the place of `rest`
  static constexpr u32 kBytes = kWide ? 4 : 2;        ///< of an element of the bias
};

/// A token as a float, 2^23 larger: 0 ≤ token < 2^23.
__device__ __forceinline__ float far_float(int token) { return __int_as_float(0x4b000000 | token); }

__device__ __forceinline__ const u8* move(const u8* from, int count, int bytes) {
  const u8* to;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(to) : "r"(count), "r"(bytes), "l"(from));
  return to;
}
__device__ __forceinline__ u32 load_32(const u8* from) {
  u32 x;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(x) : "l"(from));
  return x;
}
__device__ __forceinline__ u32 load_16(const u8* from) {
  u16 x;
  asm volatile("ld.global.nc.b16 %0, [%1];" : "=h"(x) : "l"(from));
  return x;
}
/// One of a pair of biases of a type, 0 < type ≤ 3.
template <unsigned kType>
__device__ __forceinline__ float bias_in(u32 pair, int which) {
  if constexpr (kType == 2) {
    return widen(f16{static_cast<u16>(which == 0 ? pair : pair >> 16)});
  } else {
    return __uint_as_float(which == 0 ? pair << 16 : pair & 0xffff0000u);
  }
}

__device__ __forceinline__ float min_or_nan(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
/// 1 + e^(2u), u = scale · x / c. Larger exponents than `most` change nothing.
__device__ __forceinline__ float cap_power(const ScoreMore& more, float x, float most) {
  return 1.0f + exp2_fast(min_or_nan(x * more.cap, most));
}
/// c · tanh(scale · x / c) of two products, as c − 2c / (1 + e^(2u)), and the derivatives. One reciprocal serves both,
/// so a NaN of one is one of the other: products that are not in the pattern must be numbers before it, and the two
/// must be of a row that a NaN spoils anyway.
__device__ __forceinline__ void cap_two(const ScoreMore& more, float& x, float& y, float& dx, float& dy) {
  const float a = cap_power(more, x, 60.0f), b = cap_power(more, y, 60.0f);
  const float both = reciprocal(a * b), in_x = both * b, in_y = both * a, c = more.score.softcap;
  dx = in_x * (4.0f - 4.0f * in_x);
  dy = in_y * (4.0f - 4.0f * in_y);
  x = c - 2.0f * c * in_x;
  y = c - 2.0f * c * in_y;
}
/// Products of a thread's two rows become c · tanh(scale · x / c). A polynomial takes six instructions and no
/// exponential where all of a warp's |scale · x / c| are at most 3/4; its relative error is 7e-7. Else one reciprocal
/// serves four elements of a row, as in cap_two.
template <int kSize>
__device__ __forceinline__ void cap_rows(const ScoreMore& more, float (&s)[kSize]) {
  float most[2] = {0.0f, 0.0f};  // two chains: one waits for itself
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    most[i % 2] = fmaxf(most[i % 2], fabsf(s[i]));
  }
  if (__all_sync(0xffffffffu, fmaxf(most[0], most[1]) <= more.cap_bound)) {
#pragma unroll
    for (float& x : s) {
      const float z = x * x;
      float sum = more.cap_terms[4];
#pragma unroll
      for (int n = 3; n >= 0; --n) {
        sum = sum * z + more.cap_terms[n];
      }
      x *= sum;
    }
    return;
  }
  const float top = more.score.softcap;
#pragma unroll
  for (int j = 0; j < kSize; j += 8) {
#pragma unroll
    for (int i = j; i < j + 4; i += 2) {
      const float a = cap_power(more, s[i], 30.0f), b = cap_power(more, s[i + 1], 30.0f),
                  c = cap_power(more, s[i + 4], 30.0f), d = cap_power(more, s[i + 5], 30.0f);
      const float ab = a * b, cd = c * d, all = -2.0f * top * reciprocal(ab * cd), first = all * cd, second = all * ab;
      s[i] = first * b + top;
      s[i + 1] = first * a + top;
      s[i + 4] = second * d + top;
      s[i + 5] = second * c + top;
    }
  }
}
/// The scores of two products, without bias and ALiBi.
template <unsigned kScore>
__device__ __forceinline__ void begin_two(const ScoreMore& more, float& x, float& y, float& dx, float& dy) {
  if constexpr (ScoreKind<kScore>::kCaps) {
    cap_two(more, x, y, dx, dy);
  } else {
    x *= more.score.scale;
    y *= more.score.scale;
    dx = dy = 1.0f;
  }
}

/// exp2_of's argument for a share: differences come first, since products of large scores would be rounded.
__device__ __forceinline__ float exponent_of(float score, float lse, float rest) {
  return (score - lse) * kLog2e - rest;
}

/// What the elements of one (batch, head) share: where the bias of query 0 and key 0 is, the slope, a state of random
/// bits.
struct ScoreHead {
  const u8* bias;
  float slope;
  u32 drop;
};
/// `head` counts from the launch's first.
template <unsigned kScore>
__device__ __forceinline__ ScoreHead score_head(const ScoreMore& more, int batch, int head) {
  using K = ScoreKind<kScore>;
  head += more.head0;
  ScoreHead made{};
  if constexpr (K::kBias) {
    made.bias = static_cast<const u8*>(more.score.bias) +
                (batch * more.score.bias_batch + head * more.score.bias_head) * static_cast<i64>(K::kBytes);
  }
  if constexpr (K::kHasAlibi) {
    made.slope = __ldg(more.score.slopes + head * more.score.slope_stride);
  }
  if constexpr (K::kDrops) {
    made.drop = random_head(*more.score.seed, static_cast<i64>(more.score.first_batch + batch) * more.heads + head);
  }
  return made;
}
/// Scores whose rows are queries and whose kCols columns are keys: rows `row` and `row` + 8 of a thread.
template <unsigned kScore, int kCols>
struct ScoresByQuery {
  using K = ScoreKind<kScore>;
  static constexpr int kPart = K::kWide && kCols > 64 ? 64 : kCols;  ///< columns that are asked for at once
  const u8* line[2];
  float slope, place[2];
  u32 drop[2];
  u32 words[K::kBias ? kPart / (K::kWide ? 2 : 4) : 1];

  /// A lane answers for query `own` of its warp, or for none.
  __device__ __forceinline__ void begin(const ScoreMore& more, int batch, int of, int own) {
    const ScoreHead head = score_head<kScore>(more, batch, of);
    slope = head.slope;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int query = max(0, __shfl_sync(0xffffffffu, own, threadIdx.x % 32 / 4 + 8 * h));
      if constexpr (K::kBias && !K::kTiles) {
        line[h] = move(head.bias, query, more.bias_row);
      }
      if constexpr (K::kHasAlibi) {
        place[h] = static_cast<float>(query + more.score.distance) + 8388608.0f;
      }
      if constexpr (K::kDrops) {
        drop[h] = random_row(head.drop, query);
      }
    }
  }

  /// Takes the biases of a warp's 16 rows from a tile: 64 rows of 128 bytes for each 64 columns.
  __device__ __forceinline__ void take(u32 tile) {
    const u32 row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 16;
#pragma unroll
    for (int j = 0; j < kCols / 8; j += 2) {
      const u32 at = row * 128 + (j % 8 + threadIdx.x % 32 / 16) * 16;
      u32 four[4];
      wgmma::load_pieces(four, tile + j / 8 * 8192 + tma::swizzled<128>(at));
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        words[2 * j + n] = four[n];
      }
    }
  }

  /// Asks for the biases of columns [kFrom, kFrom + kPart), whose tokens are in shared memory.
  template <int kFrom = 0>
  __device__ __forceinline__ void ask(const ScoreMore& more, const int* tokens) {
    if constexpr (K::kBias && !K::kTiles) {
      const int shift = static_cast<int>(threadIdx.x) % 4 * 2, first = tokens[0];
      const bool follow = more.col_line != 0 && tokens[kCols - 1] >= 0;
      if (more.bias_pairs != 0 && follow && first % 2 == 0) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const u8* const from = line[h] + static_cast<i64>(first + kFrom + shift) * K::kBytes;
#pragma unroll
          for (int j = 0; j < kPart / 8; ++j) {
            if constexpr (K::kWide) {
              asm volatile("ld.global.nc.v2.b32 {%0, %1}, [%2];"
                           : "=r"(words[4 * j + 2 * h]), "=r"(words[4 * j + 2 * h + 1])
                           : "l"(from + j * 32));
            } else {
              words[2 * j + h] = load_32(from + j * 16);
            }
          }
        }
      } else {
#pragma unroll
        for (int j = 0; j < kPart / 8; ++j) {
          const int2 at = *reinterpret_cast<const int2*>(tokens + kFrom + 8 * j + shift);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const u8* const x = move(line[h], max(at.x, 0), more.bias_col);
            const u8* const y = move(line[h], max(at.y, 0), more.bias_col);
            if constexpr (K::kWide) {
              words[4 * j + 2 * h] = load_32(x);
              words[4 * j + 2 * h + 1] = load_32(y);
            } else {
              words[2 * j + h] = load_16(x) | load_16(y) << 16;
            }
          }
        }
      }
    }
  }
  /// Which of a thread's elements dropout drops, a bit for each.
  __device__ __forceinline__ void drop_some(const ScoreMore& more, const int* tokens,
                                            u32 (&dropped)[kCols / 64]) const {
    const int shift = static_cast<int>(threadIdx.x) % 4 * 2, first = tokens[0];
    const auto mark = [&](int i, u32 bits) { dropped[i / 32] |= (bits >= more.score.threshold ? 0u : 1u) << i % 32; };
    if (more.col_line != 0 && first % 16 == 0) {  // a thread has both columns of a random_pair
#pragma unroll
      for (int i = 0; i < kCols / 2; ++i) {
        if (i % 8 < 4) {
          const u32 bits = random_pair(drop[i / 2 % 2], first + i / 4 * 8 + shift + i % 2);
          mark(i, swap_halves(bits));
          mark(i + 4, bits);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCols / 2; ++i) {
        mark(i, random_bits(drop[i / 2 % 2], tokens[i / 4 * 8 + shift + i % 2]));
      }
    }
  }
  /// Of the tile's element i, for the part that was asked for.
  __device__ __forceinline__ float bias(int i) const {
    i %= kPart / 2;
    if constexpr (K::kWide) {
      return __uint_as_float(words[i]);
    } else {
      return bias_in<K::kBiasType>(words[i / 2], i % 2);
    }
  }

  /// Products become scores; `also(i, derivative of the softcap)` hears of each after it. kCapped: they are capped.
  template <int kFrom, bool kCapped, typename Also>
  __device__ __forceinline__ void apply_part(const ScoreMore& more, float (&s)[kCols / 2], const int* tokens,
                                             Also also) const {
    const int shift = static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int j = kFrom / 8; j < (kFrom + kPart) / 8; ++j) {
      int2 keys{0, 0};
      if constexpr (K::kHasAlibi) {
        keys = *reinterpret_cast<const int2*>(tokens + 8 * j + shift);
      }
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; i += 2) {
        float d[2] = {1.0f, 1.0f};
        if constexpr (!kCapped) {
          begin_two<kScore>(more, s[i], s[i + 1], d[0], d[1]);
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if constexpr (K::kBias) {
            s[i + e] += bias(i + e);
          }
          if constexpr (K::kHasAlibi) {
            s[i + e] -= slope * fabsf(place[i / 2 % 2] - far_float(e == 0 ? keys.x : keys.y));
          }
          also(i + e, d[e]);
        }
      }
    }
  }
  /// The first part was asked for already.
  template <bool kCapped = false, typename Also>
  __device__ __forceinline__ void apply(const ScoreMore& more, float (&s)[kCols / 2], const int* tokens, Also also) {
    apply_part<0, kCapped>(more, s, tokens, also);
    if constexpr (kPart < kCols) {
      ask<kPart>(more, tokens);
      apply_part<kPart, kCapped>(more, s, tokens, also);
    }
  }
};

/// Scores whose rows are keys and whose 64 columns are queries. query(n) and key(n) are tokens of a step's n-th column
/// and of a warp's n-th row; `head` is in shared memory, because registers are short. kForQueries: gradients of queries
/// are made of them, too, so a NaN must not pass from one query to another; else it must not from one key to another,
/// because one that is padding may be NaN. There a warpgroup also has 8 KB of shared memory, through which a bias of 16
/// bits passes: 64 queries of 64 keys, 128 bytes each, swizzled.
template <unsigned kScore, bool kForQueries>
struct ScoresByKey {
  using K = ScoreKind<kScore>;
  static constexpr int kPart = K::kWide ? 32 : 64;  ///< queries whose biases are asked for at once
  static constexpr bool kStaged = kForQueries && K::kBias && !K::kWide;
  u32 words[K::kBias ? 16 : 1];

  /// What the warpgroup asked for goes to its memory, if it has any.
  __device__ __forceinline__ void stage(u32 memory) const {
    if constexpr (kStaged) {
      const u32 thread = threadIdx.x % 128;
#pragma unroll
      for (u32 n = 0; n < 4; ++n) {
        store_shared_128(memory + tma::swizzled<128>((thread / 8 + 16 * n) * 128 + thread % 8 * 16),
                         {words[4 * n], words[4 * n + 1], words[4 * n + 2], words[4 * n + 3]});
      }
    }
  }

  /// Asks for the biases of queries [kFrom, kFrom + kPart) of a step. `pairs`: the warp's keys follow each other, and
  /// two can be read at once. Lanes read keys of a query, as they lie in memory; apply() transposes.
  template <int kFrom = 0, typename Query, typename Key>
  __device__ __forceinline__ void ask(const ScoreMore& more, const ScoreHead& head, Query query, Key key, bool pairs) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if constexpr (K::kWide) {
      const int at[2] = {key(lane / 4) * more.bias_col, key(lane / 4 + 8) * more.bias_col};
#pragma unroll
      for (int j = 0; j < kPart / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const u8* const line = move(head.bias, query(kFrom + 8 * j + lane % 4 * 2 + e), more.bias_row);
          words[4 * j + e] = load_32(line + at[0]);
          words[4 * j + 2 + e] = load_32(line + at[1]);
        }
      }
    } else if constexpr (kStaged) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int thread = static_cast<int>(threadIdx.x) % 128;  // eight read 128 bytes of a query
        const u8* const from =
            move(head.bias + key(thread % 8 * 8 - thread / 32 * 16) * 2, query(thread / 8 + 16 * n), more.bias_row);
        asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[4 * n]), "=r"(words[4 * n + 1]), "=r"(words[4 * n + 2]), "=r"(words[4 * n + 3])
                     : "l"(from));
      }
    } else if constexpr (K::kBias) {
      if (pairs) {
        const u8* const first = head.bias + key(lane % 4 * 2) * 2;
#pragma unroll
        for (int j = 0; j < kPart / 8; ++j) {
          const u8* const line = move(first, query(8 * j + lane / 4), more.bias_row);
          words[2 * j] = load_32(line);
          words[2 * j + 1] = load_32(line + 16);
        }
      } else {
        const auto at = [&](int n) { return key(n / 2 * 8 + lane % 4 * 2 + n % 2) * more.bias_col; };
#pragma unroll
        for (int j = 0; j < kPart / 8; ++j) {
          const u8* const line = move(head.bias, query(8 * j + lane / 4), more.bias_row);
          words[2 * j] = load_16(line + at(0)) | load_16(line + at(1)) << 16;
          words[2 * j + 1] = load_16(line + at(2)) | load_16(line + at(3)) << 16;
        }
      }
    }
  }

  /// Gives `also(i, score, derivative of the softcap)` for the products of queries [kFrom, kFrom + kPart).
  template <int kFrom, typename Query, typename Key, typename Also>
  __device__ __forceinline__ void apply_part(const ScoreMore& more, const ScoreHead& head, const float (&s)[32],
                                             Query query, Key key, u32 memory, Also also) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float place[2] = {0.0f, 0.0f}, slope = 0.0f;
    if constexpr (K::kHasAlibi) {
      slope = head.slope;
      place[0] = far_float(key(lane / 4)) - static_cast<float>(more.score.distance);
      place[1] = far_float(key(lane / 4 + 8)) - static_cast<float>(more.score.distance);
    }
    u32 four[4] = {};
#pragma unroll
    for (int j = kFrom / 8; j < (kFrom + kPart) / 8; ++j) {
      u32 pair[2] = {0, 0};
      if constexpr (kStaged) {
        if (j % 2 == 0) {
          const u32 row = static_cast<u32>(8 * j + lane / 16 * 8 + lane % 8), unit = threadIdx.x / 32 % 4 * 2;
          wgmma::load_pieces_transposed(four, memory + tma::swizzled<128>(row * 128 + (unit + lane / 8 % 2) * 16));
        }
        pair[0] = four[j % 2 * 2];
        pair[1] = four[j % 2 * 2 + 1];
      } else if constexpr (K::kBias && !K::kWide) {
        pair[0] = wgmma::transposed_piece(words[2 * j]);
        pair[1] = wgmma::transposed_piece(words[2 * j + 1]);
      }
      float d[4], x[4] = {s[4 * j], s[4 * j + 1], s[4 * j + 2], s[4 * j + 3]};
      begin_two<kScore>(more, x[0], x[kForQueries ? 2 : 1], d[0], d[kForQueries ? 2 : 1]);
      begin_two<kScore>(more, x[kForQueries ? 1 : 2], x[3], d[kForQueries ? 1 : 2], d[3]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int h = i / 2, e = i % 2;
        if constexpr (K::kWide) {
          x[i] += __uint_as_float(words[(4 * j + i) % 16]);
        } else if constexpr (K::kBias) {
          x[i] += bias_in<K::kBiasType>(pair[h], e);
        }
        if constexpr (K::kHasAlibi) {
          x[i] -= slope * fabsf(far_float(query(8 * j + lane % 4 * 2 + e)) - place[h]);
        }
        also(4 * j + i, x[i], d[i]);
      }
    }
  }
  /// Of all. The first part was asked for already.
  template <typename Query, typename Key, typename Also>
  __device__ __forceinline__ void apply(const ScoreMore& more, const ScoreHead& head, const float (&s)[32], Query query,
                                        Key key, u32 memory, Also also) {
    apply_part<0>(more, head, s, query, key, memory, also);
    if constexpr (kPart < 64) {
      ask<kPart>(more, head, query, key, false);
      apply_part<kPart>(more, head, s, query, key, memory, also);
    }
  }
};

}  // namespace fretwork::attention_op::hopper
