// Attention and its gradients in fp32, exact on FFMA or in tf32 on the tensor cores; and the gradient of a bias, exact
// (in 16-bit types where shared memory has no room for attention_bias_gradient). A CTA of 16 × 16 threads owns a square
// tile: thread (y, x) has rows y + 16·i and columns x + 16·j of the scores. Rows of more than 256 entries come to
// shared memory in slices, for every product again.
#pragma once

#include "device/mma.cuh"
#include "ops/attention/cuda/walk.cuh"

namespace fretwork {

template <int Depth>
struct SimpleShape {
  static constexpr int kSide = attention_op::simple_shape(Depth, 1).rows, kEach = kSide / 16, kThreads = 256;
  static constexpr int kSlice = attention_op::simple_slice(Depth), kSlices = Depth / kSlice;
  static constexpr int kLine = kSlice + 4, kScoreLine = kSide + 4;  // as simple_shape counts them
  static constexpr int kTile = kSide * kLine;                       // floats
  // In tf32 eight warps share a product: 16 rows for each, kWide columns of scores or kDeep of every 64 results.
  static constexpr int kRowParts = kSide / 16, kColParts = 8 / kRowParts;
  static constexpr int kWide = kSide / kColParts, kDeep = 64 / kColParts;
};

/// A thread's entries of a tile of scores.
template <int Depth>
using simple_scores = float[SimpleShape<Depth>::kEach][SimpleShape<Depth>::kEach];
/// A thread's entries of a tile of results: columns 4·x + 64·c + e of its rows.
template <int Depth>
using simple_sums = float[SimpleShape<Depth>::kEach][Depth / 64][4];

/// Brings a slice of lines to shared memory as floats, zero from `depth` on; `row_of(n)` as for copy_lines.
template <typename T, int Depth, typename RowOf>
__device__ __forceinline__ void fill_lines(float* tile, const u8* from, int row_bytes, int depth, int slice,
                                           const RowOf& row_of) {
  using Shape = SimpleShape<Depth>;
  constexpr int kChunks = Shape::kSlice / chunk_of<T>;
  from += slice * Shape::kSlice * static_cast<int>(sizeof(T));
  depth -= slice * Shape::kSlice;
#pragma unroll 2
  for (int n = static_cast<int>(threadIdx.x); n < Shape::kSide * kChunks; n += Shape::kThreads) {
    const int row = n / kChunks, col = n % kChunks * chunk_of<T>, token = row_of(row);
    float* to = tile + row * Shape::kLine + col;
    const T* source = reinterpret_cast<const T*>(from + static_cast<i64>(token) * row_bytes) + col;
    if (token >= 0 && col + chunk_of<T> <= depth) {
      const auto loaded = load_run<T, chunk_of<T>>(source);
#pragma unroll
      for (int e = 0; e < chunk_of<T>; ++e) {
        to[e] = widen(loaded.at(e));
      }
    } else {
      for (int e = 0; e < chunk_of<T>; ++e) {
        to[e] = token >= 0 && col + e < depth ? widen(source[e]) : 0.0f;
      }
    }
  }
}

/// A step's column tile likewise.
template <typename T, int Depth, int Cols, typename Plan>
__device__ __forceinline__ void fill_columns(float* tile, const u8* from, int row_bytes, int depth, int slice,
                                             const Step& step, const Place (&places)[Cols], const Plan& plan) {
  fill_lines<T, Depth>(tile, from, row_bytes, depth, slice, [&](int n) {
    const bool read = step.tile.used == -1 || (used_word(plan, step, n / 32) >> (n & 31) & 1) != 0;
    return read ? column_at(plan, step, places[n], n) : -1;
  });
}

__device__ __forceinline__ float4 four_at(const float* at) { return *reinterpret_cast<const float4*>(at); }

/// A warp's 16 rows × 8·kCount columns of a product in tf32, added to `sums`; left(row, k) and right(k, column).
template <int kCount, int kK, typename Left, typename Right>
__device__ __forceinline__ void multiply_part(float (&sums)[kCount][4], const Left& left, const Right& right) {
  const int g = static_cast<int>(threadIdx.x) % 32 / 4, t = static_cast<int>(threadIdx.x) % 4;
  const auto rounded = [](float x) { return to_tf32(__float_as_uint(x)); };
#pragma unroll 2
  for (int k = t; k < kK; k += 8) {
    const u32 a[4] = {rounded(left(g, k)), rounded(left(g + 8, k)), rounded(left(g, k + 4)),
                      rounded(left(g + 8, k + 4))};
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      mma_sync<float>(sums[n], a, rounded(right(k, 8 * n + g)), rounded(right(k + 4, 8 * n + g)));
    }
  }
}
template <int kCount>
__device__ __forceinline__ void put_part(const float (&sums)[kCount][4], float* to, int line) {
  const int g = static_cast<int>(threadIdx.x) % 32 / 4, t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    *reinterpret_cast<float2*>(to + g * line + 8 * n + 2 * t) = {sums[n][0], sums[n][1]};
    *reinterpret_cast<float2*>(to + (g + 8) * line + 8 * n + 2 * t) = {sums[n][2], sums[n][3]};
  }
}

/// Calls use(slice) for the slices of `depth` entries; if they take turns in shared memory, fill(slice) brings them.
/// Unroll where registers are named by the slice.
template <int Depth, bool Unroll, typename Fill, typename Use>
__device__ __forceinline__ void each_slice(int depth, const Fill& fill, const Use& use) {
  using Shape = SimpleShape<Depth>;
  constexpr int kTogether = Unroll ? Shape::kSlices : 1;
#pragma unroll(kTogether)
  for (int slice = 0; slice < Shape::kSlices; ++slice) {
    if constexpr (Shape::kSlices > 1) {
      if (slice * Shape::kSlice >= depth) {
        break;
      }
      __syncthreads();  // what was there is done with
      fill(slice);
      __syncthreads();
    }
    use(slice);
  }
}

/// sums += left·rightᵀ of two tiles of lines. In tf32 they pass through `exchange`.
template <int Depth, bool Tf32 = false>
__device__ __forceinline__ void dot_lines(simple_scores<Depth>& sums, const float* left, const float* right,
                                          float* exchange = nullptr) {
  using Shape = SimpleShape<Depth>;
  const int x = static_cast<int>(threadIdx.x) % 16, y = static_cast<int>(threadIdx.x) / 16;
  if constexpr (Tf32) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int row = warp % Shape::kRowParts * 16, col = warp / Shape::kRowParts * Shape::kWide;
    float part[Shape::kWide / 8][4] = {};
    multiply_part<Shape::kWide / 8, Shape::kSlice>(
        part, [&](int r, int k) { return left[(row + r) * Shape::kLine + k]; },
        [&](int k, int c) { return right[(col + c) * Shape::kLine + k]; });
    __syncthreads();  // an earlier exchange may still be read
    put_part(part, exchange + row * Shape::kScoreLine + col, Shape::kScoreLine);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Shape::kEach; ++i) {
#pragma unroll
      for (int j = 0; j < Shape::kEach; ++j) {
        sums[i][j] += exchange[(y + 16 * i) * Shape::kScoreLine + x + 16 * j];
      }
    }
    return;
  }
#pragma unroll 2
  for (int d = 0; d < Shape::kSlice; d += 4) {
    float4 a[Shape::kEach], b[Shape::kEach];
#pragma unroll
    for (int i = 0; i < Shape::kEach; ++i) {
      a[i] = four_at(left + (y + 16 * i) * Shape::kLine + d);
      b[i] = four_at(right + (x + 16 * i) * Shape::kLine + d);
    }
#pragma unroll
    for (int i = 0; i < Shape::kEach; ++i) {
#pragma unroll
      for (int j = 0; j < Shape::kEach; ++j) {
        sums[i][j] += a[i].x * b[j].x;
        sums[i][j] += a[i].y * b[j].y;
        sums[i][j] += a[i].z * b[j].z;
        sums[i][j] += a[i].w * b[j].w;
      }
    }
  }
}

/// sums += scores·lines for a slice, the scores of all threads passing through `exchange`; in tf32 the results too,
/// behind them.
template <int Depth, bool Tf32>
__device__ __forceinline__ void add_lines(simple_sums<Depth>& sums, const simple_scores<Depth>& scores, float* exchange,
                                          const float* lines, int slice) {
  using Shape = SimpleShape<Depth>;
  const int x = static_cast<int>(threadIdx.x) % 16, y = static_cast<int>(threadIdx.x) / 16;
  const int first = slice * (Shape::kSlice / 64);
  __syncthreads();  // an earlier exchange may still be read
#pragma unroll
  for (int i = 0; i < Shape::kEach; ++i) {
#pragma unroll
    for (int j = 0; j < Shape::kEach; ++j) {
      exchange[(y + 16 * i) * Shape::kScoreLine + x + 16 * j] = scores[i][j];
    }
  }
  __syncthreads();
  if constexpr (Tf32) {
    constexpr int kLine = attention_op::kResultLine;
    float* const results = exchange + Shape::kSide * Shape::kScoreLine;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int row = warp % Shape::kRowParts * 16, col = warp / Shape::kRowParts * Shape::kDeep;
#pragma unroll
    for (int c = 0; c < Shape::kSlice / 64; ++c) {
      float part[Shape::kDeep / 8][4] = {};
      multiply_part<Shape::kDeep / 8, Shape::kSide>(
          part, [&](int r, int k) { return exchange[(row + r) * Shape::kScoreLine + k]; },
          [&](int k, int n) { return lines[k * Shape::kLine + 64 * c + col + n]; });
      if (c > 0) {
        __syncthreads();  // the 64 columns before are still read
      }
      put_part(part, results + row * kLine + col, kLine);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < Shape::kEach; ++i) {
        const float4 more = four_at(results + (y + 16 * i) * kLine + 4 * x);
        sums[i][first + c][0] += more.x;
        sums[i][first + c][1] += more.y;
        sums[i][first + c][2] += more.z;
        sums[i][first + c][3] += more.w;
      }
    }
    return;
  }
#pragma unroll 2
  for (int k = 0; k < Shape::kSide; ++k) {
    float w[Shape::kEach];
#pragma unroll
    for (int i = 0; i < Shape::kEach; ++i) {
      w[i] = exchange[(y + 16 * i) * Shape::kScoreLine + k];
    }
#pragma unroll
    for (int c = 0; c < Shape::kSlice / 64; ++c) {
      const float4 v = four_at(lines + k * Shape::kLine + 4 * x + 64 * c);
#pragma unroll
      for (int i = 0; i < Shape::kEach; ++i) {
        sums[i][first + c][0] += w[i] * v.x;
        sums[i][first + c][1] += w[i] * v.y;
        sums[i][first + c][2] += w[i] * v.z;
        sums[i][first + c][3] += w[i] * v.w;
      }
    }
  }
}

/// Calls f(i, j, whether the element is there) for a thread's scores.
template <int Depth, typename Plan, typename F>
__device__ __forceinline__ void each_simple(const Plan& plan, const Step& step, const F& f) {
  using Shape = SimpleShape<Depth>;
  const auto mask = mask_of<Shape::kSide>(plan, step);
  const int x = static_cast<int>(threadIdx.x) % 16, y = static_cast<int>(threadIdx.x) / 16;
#pragma unroll
  for (int i = 0; i < Shape::kEach; ++i) {
    u32 words[Shape::kSide / 32];
#pragma unroll
    for (int w = 0; w < Shape::kSide / 32; ++w) {
      words[w] = mask_word<Shape::kSide>(mask, plan.bits, y + 16 * i, w) & used_word(plan, step, w);
    }
#pragma unroll
    for (int j = 0; j < Shape::kEach; ++j) {
      f(i, j, (words[j / 2] >> (x + 16 * (j % 2)) & 1) != 0);
    }
  }
}

template <int Depth, bool Tf32, typename Params = attention_op::ForwardParams>
__global__ void __launch_bounds__(256) simple_forward(const __grid_constant__ Params p) {
  using Shape = SimpleShape<Depth>;
  constexpr int kSide = Shape::kSide, kEach = Shape::kEach;
  extern __shared__ __align__(16) float lines[];
  __shared__ Tables<kSide, kSide> tables;
  float *const q = lines, *const k = q + Shape::kTile, *const v = k + Shape::kTile, *const exchange = v + Shape::kTile;

  const Item item = item_of(p.plan, p.heads, false);
  const int key_head = item.head / p.heads.ratio;
  const int x = static_cast<int>(threadIdx.x) % 16, y = static_cast<int>(threadIdx.x) / 16;
  tables.fill(p.plan, item.tile);
  __syncthreads();
  if (is_done(p, item, tables.token)) {
    return;
  }
  const auto fill_q = [&](int slice) {
    fill_lines<float, Depth>(q, head_of<float>(p.q, item.batch, item.head), p.q.row, p.depth, slice,
                             [&](int n) { return tables.token[n]; });
  };
  const auto fill_k = [&](const Step& step, int slice) {
    fill_columns<float, Depth>(k, head_of<float>(p.k, item.batch, key_head), p.k.row, p.depth, slice, step,
                               tables.place, p.plan);
  };
  const auto fill_v = [&](const Step& step, int slice) {
    fill_columns<float, Depth>(v, head_of<float>(p.v, item.batch, key_head), p.v.row, p.value_depth, slice, step,
                               tables.place, p.plan);
  };
  if constexpr (Shape::kSlices == 1) {
    fill_q(0);
  }
  const Score<true> score(p.score, item.batch, item.head, p.heads.all);
  simple_sums<Depth> out = {};
  float top[kEach], total[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    top[i] = -infinity();
    total[i] = 0.0f;
  }
  Walk<false, decltype(p.plan)> walk(p.plan, item);
#pragma unroll 1
  for (Step now = walk.take(); now.there(); now = walk.take()) {
    if constexpr (Shape::kSlices == 1) {
      __syncthreads();
      fill_k(now, 0);
      fill_v(now, 0);
      __syncthreads();
    }
    simple_scores<Depth> s = {};
    each_slice<Depth, false>(
        p.depth,
        [&](int slice) {
          fill_q(slice);
          fill_k(now, slice);
        },
        [&](int) { dot_lines<Depth, Tf32>(s, q, k, exchange); });
    each_simple<Depth>(p.plan, now, [&](int i, int j, bool there) {
      const int row = tables.token[y + 16 * i], col = position_of(p.plan, now, tables.place[x + 16 * j], x + 16 * j);
      float slope;
      s[i][j] = row >= 0 && there ? score.prepare(s[i][j], row, col, slope) : -infinity();
    });
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      float high = top[i];
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        high = fmaxf(high, s[i][j]);
      }
      high = reduce_lanes<16>(high, take_max{});
      const float from = high == -infinity() ? 0.0f : high, shrink = exp2_fast(score.exponent(top[i], from));
      top[i] = high;
      total[i] *= shrink;
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        s[i][j] = exp2_fast(score.exponent(s[i][j], from));
        total[i] += s[i][j];
        if (!score.keeps(tables.token[y + 16 * i], position_of(p.plan, now, tables.place[x + 16 * j], x + 16 * j))) {
          s[i][j] = 0.0f;
        }
      }
#pragma unroll
      for (int c = 0; c < Depth / 64; ++c) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          out[i][c][e] *= shrink;
        }
      }
    }
    each_slice<Depth, true>(
        p.value_depth, [&](int slice) { fill_v(now, slice); },
        [&](int slice) { add_lines<Depth, Tf32>(out, s, exchange, v, slice); });
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const float sum = reduce_lanes<16>(total[i], take_sum{});
    const int token = tables.token[y + 16 * i];
    const Merge merge(score, p, item, token, {top[i], sum});
    const float share = p.score.kept * merge.here;
#pragma unroll
    for (int c = 0; c < Depth / 64; ++c) {
      if (merge.writes && p.o.data != nullptr) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          out[i][c][e] *= share;
        }
        merge_some<float>(p, item, token, 4 * x + 64 * c, merge.before, out[i][c]);
      }
    }
    __syncwarp();
    if (x == 0) {
      merge.store();
    }
  }
}

/// What a score's gradient is made of, for kernels that own queries or keys.
template <int Depth, typename Plan>
__device__ __forceinline__ void simple_gradients(simple_scores<Depth>& s, simple_scores<Depth>& g, const Plan& plan,
                                                 const Step& now, const Score<true>& score, const ScoreStats* stats,
                                                 bool keys, bool through_cap, const int* tokens, const Place* places) {
  const int x = static_cast<int>(threadIdx.x) % 16, y = static_cast<int>(threadIdx.x) / 16;
  each_simple<Depth>(plan, now, [&](int i, int j, bool there) {
    const int row = tokens[y + 16 * i], col = column_at(plan, now, places[x + 16 * j], x + 16 * j);
    const int query = keys ? col : row, key = keys ? row : col;
    if (row >= 0 && there) {
      const ScoreStats of = stats[query];
      float slope;
      const float share = score.share(score.prepare(s[i][j], query, key, slope), of);
      const bool keeps = score.keeps(query, key);
      g[i][j] = share * ((keeps ? g[i][j] * score.arg.kept : 0.0f) - of.delta) * (through_cap ? slope : 1.0f);
      s[i][j] = keeps ? share : 0.0f;
    } else {
      s[i][j] = g[i][j] = 0.0f;
    }
  });
}

template <int Depth>
__device__ __forceinline__ void store_simple(simple_sums<Depth>& sums, const OutputArg& out, const Item& item,
                                             const int* tokens, int depth, float factor, bool add) {
  if (out.data == nullptr) {
    return;
  }
  const int x = static_cast<int>(threadIdx.x) % 16, y = static_cast<int>(threadIdx.x) / 16;
#pragma unroll
  for (int i = 0; i < SimpleShape<Depth>::kEach; ++i) {
    const int token = tokens[y + 16 * i];
#pragma unroll
    for (int c = 0; c < Depth / 64; ++c) {
      if (token >= 0) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          sums[i][c][e] *= factor;
        }
        add_some<float>(out, item, token, 4 * x + 64 * c, depth, add, sums[i][c]);
      }
    }
  }
}

/// As attention_backward: Keys says whose gradients these are.
template <int Depth, bool Keys, bool Tf32, typename Params = attention_op::BackwardParams>
__global__ void __launch_bounds__(256) simple_backward(const __grid_constant__ Params p) {
  using Shape = SimpleShape<Depth>;
  constexpr int kSide = Shape::kSide;
  extern __shared__ __align__(16) float lines[];
  __shared__ Tables<kSide, kSide> tables;
  float *const first = lines, *const second = first + Shape::kTile, *const a = second + Shape::kTile,
               *const b = a + Shape::kTile, *const exchange = b + Shape::kTile;

  Item item = item_of(p.plan, p.heads, Keys);
  if (!find_piece(p.plan, item)) {
    return;
  }
  tables.fill(p.plan, item.tile, p.padding, item.batch);
  __syncthreads();
  const auto fill_rows = [&](float* to, const InputArg& from, int depth, int slice) {
    fill_lines<float, Depth>(to, head_of<float>(from, item.batch, item.head), from.row, depth, slice,
                             [&](int n) { return tables.token[n]; });
  };
  if constexpr (Shape::kSlices == 1) {
    fill_rows(first, p.first, p.depth, 0);
    fill_rows(second, p.second, p.value_depth, 0);
  }
  simple_sums<Depth> d_first = {};
  float d_second[Keys ? Shape::kEach : 1][Depth / 64][4] = {};
  Walk<Keys, decltype(p.plan)> walk(p.plan, item);
#pragma unroll 1
  for (Step now = walk.take(); now.there(); now = walk.take()) {
    const int member = item.first_member + now.member;
    const int query_head = !Keys ? item.head : p.heads.heads != nullptr ? p.heads.heads[member] : member;
    const int other_head = Keys ? query_head : item.head / p.heads.ratio;
    const auto fill_other = [&](float* to, const InputArg& from, int depth, int slice) {
      fill_columns<float, Depth>(to, head_of<float>(from, item.batch, other_head), from.row, depth, slice, now,
                                 tables.place, p.plan);
    };
    const auto fill_a = [&](int slice) { fill_other(a, p.other_first, p.depth, slice); };
    const auto fill_b = [&](int slice) { fill_other(b, p.other_second, p.value_depth, slice); };
    if constexpr (Shape::kSlices == 1) {
      __syncthreads();
      fill_a(0);
      fill_b(0);
      __syncthreads();
    }
    simple_scores<Depth> s = {}, g = {};
    each_slice<Depth, false>(
        p.depth,
        [&](int slice) {
          fill_rows(first, p.first, p.depth, slice);
          fill_a(slice);
        },
        [&](int) { dot_lines<Depth, Tf32>(s, first, a, exchange); });
    each_slice<Depth, false>(
        p.value_depth,
        [&](int slice) {
          fill_rows(second, p.second, p.value_depth, slice);
          fill_b(slice);
        },
        [&](int) { dot_lines<Depth, Tf32>(g, second, b, exchange); });
    const Score<true> score(p.score, item.batch, query_head, p.heads.all);
    simple_gradients<Depth>(
        s, g, p.plan, now, score,
        static_cast<const ScoreStats*>(p.stats) + (static_cast<i64>(item.batch) * p.heads.all + query_head) * p.queries,
        Keys, true, tables.token, tables.place);
    if constexpr (Keys) {
      each_slice<Depth, true>(p.value_depth, fill_b,
                              [&](int slice) { add_lines<Depth, Tf32>(d_second, s, exchange, b, slice); });
    }
    each_slice<Depth, true>(p.depth, fill_a,
                            [&](int slice) { add_lines<Depth, Tf32>(d_first, g, exchange, a, slice); });
  }
  const auto store = [&](auto& sums, const OutputArg& out, int which, int depth, float factor) {
    store_simple<Depth>(sums, is_part(p.plan, item) ? part_of(p.plan, item, which) : out, item, tables.token, depth,
                        factor, p.add);
  };
  store(d_first, p.d_first, 0, p.depth, p.score.scale);
  if constexpr (Keys) {
    store(d_second, p.d_second, 1, p.value_depth, p.score.kept);
  }
}

/// The gradient of the bias for the row tile of one (batch, head) of the bias, summed over those it is broadcast to.
/// RowSums: over the tile's columns too. A CTA for each (batch, head, row tile).
template <typename T, int Depth, bool Keys, bool RowSums, typename Params = attention_op::BiasGradientParams>
__global__ void __launch_bounds__(256, Depth > 64 ? 1 : 2) bias_gradient(const __grid_constant__ Params p) {
  using Shape = SimpleShape<Depth>;
  constexpr int kSide = Shape::kSide, kEach = Shape::kEach;
  extern __shared__ __align__(16) float lines[];
  __shared__ Tables<kSide, kSide> tables;
  __shared__ int seen[kSide];  // the rows of a batch element
  float *const first = lines, *const second = first + Shape::kTile, *const a = second + Shape::kTile,
               *const b = a + Shape::kTile;

  const int x = static_cast<int>(threadIdx.x) % 16, y = static_cast<int>(threadIdx.x) / 16;
  const u32 tiles = static_cast<u32>(p.plan.row_tile_count), set = blockIdx.x / tiles;
  const int tile = tile_at(p.plan, blockIdx.x - set * tiles, Keys);
  const u32 head_sets = p.sum_heads ? 1u : static_cast<u32>(p.head_count);
  const int batch_set = p.first_batch + static_cast<int>(set / head_sets), head_set = static_cast<int>(set % head_sets);
  const auto head_at = [&](int n) { return p.heads != nullptr ? p.heads[n] : n; };
  const int batch_begin = p.sum_batch ? p.first_batch : batch_set;
  const int batch_end = p.sum_batch ? p.first_batch + p.batch : batch_set + 1;
  const int head_begin = p.sum_heads ? 0 : head_set, head_end = p.sum_heads ? p.head_count : head_set + 1;
  float* const out = static_cast<float*>(p.out) + (p.sum_batch ? 0 : batch_set * p.out_batch) +
                     (p.sum_heads ? 0 : head_at(head_set) * p.out_head);
  tables.fill(p.plan, tile);
  simple_scores<Depth> sum = {};
  Walk<false, decltype(p.plan)> walk(p.plan, Item{tile, 0, 0, 0, 1});
#pragma unroll 1
  for (Step now = walk.take(); now.there(); now = walk.take()) {
#pragma unroll 1
    for (int batch = batch_begin; batch < batch_end; ++batch) {
#pragma unroll 1
      for (int n = head_begin; n < head_end; ++n) {
        const int head = head_at(n), key_head = head / p.ratio;
        const int row_head = Keys ? key_head : head, col_head = Keys ? head : key_head;
        Step step = now;
        walk.see_as(step, batch, head);
        __syncthreads();
        for (int m = static_cast<int>(threadIdx.x); m < kSide; m += static_cast<int>(blockDim.x)) {
          const int token = tables.token[m];
          seen[m] = token >= 0 && is_padding(p.padding, batch, token) ? -1 : token;
        }
        __syncthreads();
        const auto row_token = [&](int m) { return seen[m]; };
        const auto fill = [&](float* rows, const InputArg& row, float* cols, const InputArg& col, int depth,
                              int slice) {
          fill_lines<T, Depth>(rows, head_of<T>(row, batch, row_head), row.row, depth, slice, row_token);
          fill_columns<T, Depth>(cols, head_of<T>(col, batch, col_head), col.row, depth, slice, step, tables.place,
                                 p.plan);
        };
        const auto fill_first = [&](int slice) { fill(first, p.first, a, p.other_first, p.depth, slice); };
        const auto fill_second = [&](int slice) { fill(second, p.second, b, p.other_second, p.value_depth, slice); };
        if constexpr (Shape::kSlices == 1) {
          fill_first(0);
          fill_second(0);
          __syncthreads();
        }
        simple_scores<Depth> s = {}, g = {};
        each_slice<Depth, false>(p.depth, fill_first, [&](int) { dot_lines<Depth>(s, first, a); });
        each_slice<Depth, false>(p.value_depth, fill_second, [&](int) { dot_lines<Depth>(g, second, b); });
        const Score<true> score(p.score, batch, head, p.all);
        simple_gradients<Depth>(s, g, p.plan, step, score,
                                p.stats + (static_cast<i64>(batch) * p.all + head) * p.queries, Keys, false, seen,
                                tables.place);
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
#pragma unroll
          for (int j = 0; j < kEach; ++j) {
            sum[i][j] += g[i][j];
          }
        }
      }
    }
    if constexpr (!RowSums) {
      now.tile.used = -1;  // what no batch element has is zero
      each_simple<Depth>(p.plan, now, [&](int i, int j, bool there) {
        const int row = tables.token[y + 16 * i], col = now.tile.base + tables.place[x + 16 * j].offset;
        if (row >= 0 && there) {
          out[row * p.out_row + col * p.out_col] += sum[i][j];
        }
        sum[i][j] = 0.0f;
      });
    }
  }
  if constexpr (RowSums) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      float all = 0.0f;
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        all += sum[i][j];
      }
      all = reduce_lanes<16>(all, take_sum{});
      __syncthreads();
      const int row = tables.token[y + 16 * i];
      if (x == 0 && row >= 0) {
        out[row * (Keys ? p.out_col : p.out_row)] += all;
      }
    }
  }
}

}  // namespace fretwork
