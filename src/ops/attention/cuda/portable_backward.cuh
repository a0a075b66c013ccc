// Gradients of attention on mma.sync and cp.async (sm_80 and later), 16-bit types. A CTA owns a tile of queries and
// streams their keys, or owns keys and streams their queries. Both are the same loop: each side has two matrices (Q and
// dO, or K and V); the product of the first ones gives the scores, that of the second ones dP, and each gradient is a
// product with a matrix of the other side.
#pragma once

#include "ops/attention/cuda/products.cuh"
#include "ops/attention/cuda/walk.cuh"

namespace fretwork {

/// Writes a gradient, or adds it to what is there in float.
template <typename T, int Depth, int Rows, int Threads>
__device__ __forceinline__ void store_gradient(const register_sums<1, Depth / 8>& sums, const Staging<Depth>& staging,
                                               const OutputArg& out, const Item& item, const int* tokens, int warp_row,
                                               int depth, float factor, bool add) {
  if (out.data == nullptr) {
    return;
  }
  __syncthreads();  // what was there is done with
  staging.put(sums, warp_row, [&](int, int) { return factor; });
  __syncthreads();
  staging.template each<Rows, Threads>(depth, [&](int row, int col, float(&x)[8]) {
    if (tokens[row] >= 0) {
      add_some<T>(out, item, tokens[row], col, depth, add, x);
    }
  });
}

/// Keys: the rows are keys. First, Second: which gradients of the rows' two matrices are made; queries have the first.
template <typename T, int Depth, bool Keys, bool First, bool Second, bool Extras>
__global__ void __launch_bounds__(32 * attention_op::backward_shape(Depth, Extras).warps)
    attention_backward(const __grid_constant__ attention_op::BackwardParams p) {
  constexpr auto kShape = attention_op::backward_shape(Depth, Extras);
  constexpr int kRows = kShape.rows, kCols = kShape.cols, kThreads = 32 * kShape.warps;
  constexpr int kLine = attention_op::line_bytes(Depth), kTileBytes = kCols * kLine;
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ Tables<kRows, kCols> tables;
  using Stats = typename Score<Extras>::Stats;
  __shared__ __align__(sizeof(Stats)) Stats stats[Keys ? 2 : 1][Keys ? kCols : kRows];

  const Item item = item_of(p.plan, p.heads, Keys);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const shared_tile<kLine> first{shared_address(memory)}, second{first.base + kRows * kLine};
  const u32 ring = second.base + kRows * kLine;
  tables.fill(p.plan, item.tile, p.padding, item.batch);
  __syncthreads();

  const auto member_head = [&](int member) {
    if constexpr (!Keys) {
      return item.head;
    }
    const int n = item.first_member + member;
    return p.heads.heads != nullptr ? p.heads.heads[n] : n;
  };
  const auto stats_of = [&](int head) {
    return static_cast<const Stats*>(p.stats) + (static_cast<i64>(item.batch) * p.heads.all + head) * p.queries;
  };
  const shared_tile<kLine> columns{ring};
  const ColumnCopies<T, Depth, kCols, kThreads, kLine> first_copies(columns, p.depth),
      second_copies(columns, p.value_depth);
#pragma unroll
  for (u32 stage = 0; stage < 2; ++stage) {
    first_copies.clear(static_cast<const u8*>(p.first.data), stage * 2 * kTileBytes);
    second_copies.clear(static_cast<const u8*>(p.first.data), (stage * 2 + 1) * kTileBytes);
  }
  const auto ask = [&](const Step& step, int stage) {
    const int head = Keys ? member_head(step.member) : item.head / p.heads.ratio;
    const u32 ahead = static_cast<u32>(stage) * 2 * kTileBytes;
    first_copies.ask(step, head_of<T>(p.other_first, item.batch, head), p.other_first.row, tables.place, p.plan.used,
                     ahead);
    second_copies.ask(step, head_of<T>(p.other_second, item.batch, head), p.other_second.row, tables.place, p.plan.used,
                      ahead + kTileBytes);
    if constexpr (Keys) {
      if (thread < kCols) {
        const Place place = tables.place[thread];
        const bool read = is_inside(step.tile.inside, place.at);
        constexpr int kBytes = sizeof(Stats);
        copy_async_small<kBytes>(shared_address(&stats[stage][thread]),
                                 stats_of(head) + (read ? step.tile.base + place.offset : 0), read ? kBytes : 0);
      }
    }
  };

  const auto row_token = [&](int n) { return tables.token[n]; };
  copy_lines<T, Depth, kRows, kThreads, 4>(first, head_of<T>(p.first, item.batch, item.head), p.first.row, p.depth,
                                           row_token);
  copy_lines<T, Depth, kRows, kThreads, 4>(second, head_of<T>(p.second, item.batch, item.head), p.second.row,
                                           p.value_depth, row_token);
  if constexpr (!Keys) {
    for (int n = thread; n < kRows; n += kThreads) {
      stats[0][n] = tables.token[n] >= 0 ? stats_of(item.head)[tables.token[n]] : Stats{infinity(), 0.0f};
    }
  }
  Walk<Keys> walk(p.plan, item.tile, item.member_count, item.batch);
  Step now = walk.take();
  if (now.there()) {
    ask(now, 0);
  }
  copy_async_commit();
  Step next = walk.take();

  const int warp_row = __shfl_sync(~0u, thread / 32, 0) * 16;
  register_sums<1, First ? Depth / 8 : 1> d_first = {};
  register_sums<1, Second ? Depth / 8 : 1> d_second = {};
  const auto first_at = kept(fragments_across(first, warp_row)), across = kept(fragments_across(columns, 0));
  const auto along = kept(fragments_along(columns));
  int stage = 0;
#pragma unroll 1
  while (now.there()) {
    copy_async_wait<0>();
    __syncthreads();  // this stage is here, and the other is done with
    if (next.there()) {
      ask(next, stage ^ 1);
    }
    copy_async_commit();
    const Step later = walk.take();
    const u32 here = static_cast<u32>(stage) * 2 * kTileBytes;

    register_sums<1, kCols / 8> s = {}, g = {};  // scores and their gradients
    multiply_lines<T, Depth, 1, kCols>(s, first_at, along + here);
    if constexpr (First) {
      multiply_lines<T, Depth, 1, kCols>(g, first_at + kRows * kLine, along + (here + kTileBytes));
    }
    const auto stat = [&](int half, int j, int e) {
      return Keys ? stats[stage][8 * j + lane % 4 * 2 + e] : stats[0][warp_row + 8 * half + lane / 4];
    };
    const auto score = score_of<Extras>(p.score, item.batch, member_head(now.member), p.heads.all);
    if constexpr (Extras) {
      const MaskWords<1, kCols, !Keys> there(p.plan, now, warp_row);
      each_score(s, [&](int i, int half, int j, int e, float& x) {
        float& gradient = g.at[i][j][2 * half + e];
        const int row = tables.token[warp_row + 8 * half + lane / 4];
        const int col = now.tile.base + tables.place[8 * j + lane % 4 * 2 + e].offset;
        const int query = Keys ? col : row, key = Keys ? row : col;
        if (row >= 0 && there(i, half, j, e)) {
          const ScoreStats of = stat(half, j, e);
          float slope;
          const float share = score.share(score.prepare(x, query, key, slope), of);
          const bool keeps = score.keeps(query, key);
          gradient = share * ((keeps ? gradient * p.score.kept : 0.0f) - of.delta) * slope;
          x = keeps ? share : 0.0f;
        } else {
          x = gradient = 0.0f;
        }
      });
    } else {
      each_score(s, [&](int i, int half, int j, int e, float& x) {
        const RowStats of = stat(half, j, e);
        x = exp2_fast(x * score.factor - of.lse);
        g.at[i][j][2 * half + e] = x * (g.at[i][j][2 * half + e] - of.delta);
      });
      if (!is_whole(now)) {
        const MaskWords<1, kCols, !Keys> there(p.plan, now, warp_row);
        each_score(s, [&](int i, int half, int j, int e, float& x) {
          const bool is = there(i, half, j, e);
          x = is ? x : 0.0f;
          g.at[i][j][2 * half + e] = is ? g.at[i][j][2 * half + e] : 0.0f;
        });
      }
    }
    if constexpr (Second) {
      multiply_sums<T, Depth, 1, kCols>(d_second, s, across + (here + kTileBytes));
    }
    if constexpr (First) {
      multiply_sums<T, Depth, 1, kCols>(d_first, g, across + here);
    }
    now = next;
    next = later;
    stage ^= 1;
  }
  copy_async_wait<0>();

  const Staging<Depth> staging{reinterpret_cast<float*>(memory)};
  if constexpr (First) {
    store_gradient<T, Depth, kRows, kThreads>(d_first, staging, p.d_first, item, tables.token, warp_row, p.depth,
                                              p.score.scale, p.add);
  }
  if constexpr (Second) {
    store_gradient<T, Depth, kRows, kThreads>(d_second, staging, p.d_second, item, tables.token, warp_row,
                                              p.value_depth, Extras ? p.score.kept : 1.0f, p.add);
  }
}

}  // namespace fretwork
