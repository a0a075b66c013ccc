// Gradients of attention on mma.sync and cp.async (sm_80 and later), 16-bit types. A CTA owns a tile of queries and
// streams their keys, or owns keys and streams their queries. Both are the same loop: each side has two matrices (Q and
// dO, or K and V); the product of the first ones gives the scores, that of the second ones dP, and each gradient is a
// product with a matrix of the other side.
#pragma once

#include "ops/attention/cuda/products.cuh"
#include "ops/attention/cuda/walk.cuh"

namespace fretwork {

/// Writes a gradient, or adds it to what is there in float.
template <typename T, int Depth, int Rows, int Threads, int Eights>
__device__ __forceinline__ void store_gradient(const register_sums<1, Eights>& sums, const Staging<Depth>& staging,
                                               const OutputArg& out, const Item& item, const int* tokens, int warp_row,
                                               int warp_col, int depth, float factor, bool add) {
  if (out.data == nullptr) {
    return;
  }
  __syncthreads();  // what was there is done with
  staging.put(sums, warp_row, warp_col, [&](int, int) { return factor; });
  __syncthreads();
  staging.template each<Rows, Threads>(depth, [&](int row, int col, float(&x)[8]) {
    if (tokens[row] >= 0) {
      add_some<T>(out, item, tokens[row], col, depth, add, x);
    }
  });
}

/// Keys: the rows are keys. First, Second: which gradients of the rows' two matrices are made; queries have the first.
/// Params have the plan's type; tiles have up to Rows rows.
template <typename T, int Depth, bool Keys, bool First, bool Second, bool Extras,
          typename Params = attention_op::BackwardParams, int Rows = 128>
__global__ void __launch_bounds__(32 * attention_op::backward_shape(Depth, Extras, Rows).warps)
    attention_backward(const __grid_constant__ Params p) {
  constexpr auto kShape = attention_op::backward_shape(Depth, Extras, Rows);
  constexpr int kRows = kShape.rows, kCols = kShape.cols, kThreads = 32 * kShape.warps;
  constexpr int kParts = attention_op::parts_of(Depth), kPart = Depth / kParts;
  constexpr bool kTwoStages = attention_op::backward_stages(Depth) == 2;
  constexpr int kLine = attention_op::line_bytes(kPart), kPartBytes = kCols * kLine, kTileBytes = kParts * kPartBytes;
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ Tables<kRows, kCols> tables;
  using Stats = typename Score<Extras>::Stats;
  __shared__ __align__(sizeof(Stats)) Stats stats[Keys ? 2 : 1][Keys ? kCols : kRows];

  Item item = item_of(p.plan, p.heads, Keys);
  if (!find_piece(p.plan, item)) {
    return;
  }
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const shared_tile<kLine> first{shared_address(memory)}, second{first.base + kParts * kRows * kLine};
  const u32 ring = second.base + kParts * kRows * kLine;
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
  const PartCopies<T, Depth, kCols, kThreads, kLine> first_copies(columns, p.depth),
      second_copies(columns, p.value_depth);
#pragma unroll
  for (u32 stage = 0; stage < (kTwoStages ? 2 : 1); ++stage) {
    first_copies.clear(static_cast<const u8*>(p.first.data), stage * 2 * kTileBytes);
    second_copies.clear(static_cast<const u8*>(p.first.data), (stage * 2 + 1) * kTileBytes);
  }
  const auto ask = [&](const Step& step, int stage) {
    const int head = Keys ? member_head(step.member) : item.head / p.heads.ratio;
    const u32 ahead = static_cast<u32>(stage) * 2 * kTileBytes;
    first_copies.ask(step, head_of<T>(p.other_first, item.batch, head), p.other_first.row, tables.place, p.plan, ahead);
    second_copies.ask(step, head_of<T>(p.other_second, item.batch, head), p.other_second.row, tables.place, p.plan,
                      ahead + kTileBytes);
    if constexpr (Keys) {
      if (thread < kCols) {
        const int token = column_at(p.plan, step, tables.place[thread], thread);
        constexpr int kBytes = sizeof(Stats);
        copy_async_small<kBytes>(shared_address(&stats[stage][thread]), stats_of(head) + max(token, 0),
                                 token < 0 ? 0 : kBytes);
      }
    }
  };

  const auto row_token = [&](int n) { return tables.token[n]; };
  copy_parts<T, Depth, kRows, kThreads>(first, head_of<T>(p.first, item.batch, item.head), p.first.row, p.depth,
                                        row_token);
  copy_parts<T, Depth, kRows, kThreads>(second, head_of<T>(p.second, item.batch, item.head), p.second.row,
                                        p.value_depth, row_token);
  if constexpr (!Keys) {
    for (int n = thread; n < kRows; n += kThreads) {
      stats[0][n] = tables.token[n] >= 0 ? stats_of(item.head)[tables.token[n]] : Stats{infinity(), 0.0f};
    }
  }
  Walk<Keys, decltype(p.plan)> walk(p.plan, item);
  Step now = walk.take();
  if (now.there()) {
    ask(now, 0);
  }
  copy_async_commit();
  Step next = walk.take();

  const int warp = __shfl_sync(~0u, thread / 32, 0), part = kParts > 1 ? warp / (kRows / 16) : 0;
  const int warp_row = (kParts > 1 ? warp % (kRows / 16) : warp) * 16;
  register_sums<1, First ? kPart / 8 : 1> d_first = {};
  register_sums<1, Second ? kPart / 8 : 1> d_second = {};
  const auto first_at = kept(fragments_across(first, warp_row));
  const auto across = kept(fragments_across(columns, 0) + static_cast<u32>(part * kPartBytes));
  const auto along = kept(fragments_along(columns));
  int stage = 0;
#pragma unroll 1
  while (now.there()) {
    copy_async_wait<0>();
    __syncthreads();  // this stage is here, and the other is done with
    if constexpr (kTwoStages) {
      if (next.there()) {
        ask(next, stage ^ 1);
      }
      copy_async_commit();
    }
    const Step later = walk.take();
    const u32 here = static_cast<u32>(stage) * 2 * kTileBytes;

    register_sums<1, kCols / 8> s = {}, g = {};  // scores and their gradients
#pragma unroll
    for (int n = 0; n < kParts; ++n) {
      multiply_lines<T, kPart, 1, kCols>(s, first_at + n * kRows * kLine, along + (here + n * kPartBytes));
    }
    if constexpr (First) {
#pragma unroll
      for (int n = 0; n < kParts; ++n) {
        multiply_lines<T, kPart, 1, kCols>(g, first_at + (kParts + n) * kRows * kLine,
                                           along + (here + kTileBytes + n * kPartBytes));
      }
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
        const int n = 8 * j + lane % 4 * 2 + e, col = position_of(p.plan, now, tables.place[n], n);
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
      multiply_sums<T, kPart, 1, kCols>(d_second, s, across + (here + kTileBytes));
    }
    if constexpr (First) {
      multiply_sums<T, kPart, 1, kCols>(d_first, g, across + here);
    }
    if constexpr (kTwoStages) {
      stage ^= 1;
    } else {
      __syncthreads();  // the columns are done with
      if (next.there()) {
        ask(next, 0);
      }
      copy_async_commit();
    }
    now = next;
    next = later;
  }
  copy_async_wait<0>();

  const Staging<Depth> staging{reinterpret_cast<float*>(memory)};
  const auto store = [&](const auto& sums, const OutputArg& out, int which, int depth, float factor) {
    if (is_part(p.plan, item)) {
      store_gradient<float, Depth, kRows, kThreads>(sums, staging, part_of(p.plan, item, which), item, tables.token,
                                                    warp_row, part * kPart, depth, factor, false);
    } else {
      store_gradient<T, Depth, kRows, kThreads>(sums, staging, out, item, tables.token, warp_row, part * kPart, depth,
                                                factor, p.add);
    }
  };
  if constexpr (First) {
    store(d_first, p.d_first, 0, p.depth, p.score.scale);
  }
  if constexpr (Second) {
    store(d_second, p.d_second, 1, p.value_depth, Extras ? p.score.kept : 1.0f);
  }
}

/// A step for one (batch, head) of those that a bias is summed over.
struct BiasTurn {
  Step step;
  int batch, head;
  bool last;  ///< of the step's
};

/// Two neighbours of a row of the bias's gradient: stored, or added to what is there in float.
__device__ __forceinline__ void put_bias(const attention_op::BiasGradientParams& p, i64 at, const float (&x)[2],
                                         const bool (&there)[2]) {
  if (p.pairs && there[0] && there[1] && at % 2 == 0) {
    if (p.out_type == BiasType::f32) {
      *reinterpret_cast<float2*>(static_cast<float*>(p.out) + at) = float2{x[0], x[1]};
    } else {
      const u32 word = p.out_type == BiasType::f16 ? narrow_pair<f16>(x[0], x[1]) : narrow_pair<bf16>(x[0], x[1]);
      *reinterpret_cast<u32*>(static_cast<u16*>(p.out) + at) = word;
    }
    return;
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const i64 to = at + e * p.out_col;
    if (!there[e]) {
      continue;
    }
    if (p.add) {
      static_cast<float*>(p.out)[to] += x[e];
    } else if (p.out_type == BiasType::f32) {
      static_cast<float*>(p.out)[to] = x[e];
    } else if (p.out_type == BiasType::f16) {
      static_cast<f16*>(p.out)[to] = narrow<f16>(x[e]);
    } else {
      static_cast<bf16*>(p.out)[to] = narrow<bf16>(x[e]);
    }
  }
}

/// The gradient of the bias for the row tile of one (batch, head) of the bias, summed over those it is broadcast to.
/// RowSums: over the tile's columns too. Extras: more than a bias is done to scores. `splits` CTAs for each (batch,
/// head, row tile) take its steps in turn. Scores and dP are recomputed, sums stay in registers; the tiles of the next
/// (batch, head) arrive meanwhile.
template <typename T, int Depth, bool Keys, bool RowSums, bool Extras,
          typename Params = attention_op::BiasGradientParams>
__global__ void __launch_bounds__(32 * attention_op::bias_shape(Depth).warps)
    attention_bias_gradient(const __grid_constant__ Params p) {
  constexpr auto kShape = attention_op::bias_shape(Depth);
  constexpr int kRows = kShape.rows, kCols = kShape.cols, kThreads = 32 * kShape.warps;
  constexpr int kLine = attention_op::line_bytes(Depth), kStage = 2 * (kRows + kCols) * kLine;
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ Tables<kRows, kCols> tables;
  __shared__ __align__(16) ScoreStats stats[2][Keys ? kCols : kRows];

  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const u32 tiles = static_cast<u32>(p.plan.row_tile_count), splits = static_cast<u32>(p.splits);
  const u32 set = blockIdx.x / (tiles * splits), within = blockIdx.x - set * tiles * splits;
  const int tile = tile_at(p.plan, within / splits, Keys);
  const u32 head_sets = p.sum_heads ? 1u : static_cast<u32>(p.head_count);
  const int batch_set = p.first_batch + static_cast<int>(set / head_sets), head_set = static_cast<int>(set % head_sets);
  const auto head_at = [&](int n) { return p.heads != nullptr ? p.heads[n] : n; };
  const int batch_begin = p.sum_batch ? p.first_batch : batch_set, head_begin = p.sum_heads ? 0 : head_set;
  const int batch_end = p.sum_batch ? p.first_batch + p.batch : batch_set + 1;
  const int head_end = p.sum_heads ? p.head_count : head_set + 1;
  const bool one = batch_end - batch_begin == 1 && head_end - head_begin == 1;  // rows are copied once
  const i64 out = (p.sum_batch ? 0 : batch_set * p.out_batch) + (p.sum_heads ? 0 : head_at(head_set) * p.out_head);
  tables.fill(p.plan, tile);
  __syncthreads();

  const shared_tile<kLine> rows{shared_address(memory)}, columns{rows.base + 2 * kRows * kLine};
  const ColumnCopies<T, Depth, kCols, kThreads, kLine> first_copies(columns, p.depth),
      second_copies(columns, p.value_depth);
#pragma unroll
  for (u32 stage = 0; stage < 2; ++stage) {
    first_copies.clear(static_cast<const u8*>(p.first.data), stage * kStage);
    second_copies.clear(static_cast<const u8*>(p.first.data), stage * kStage + kCols * kLine);
  }
  const auto row_seen = [&](int n, int batch) {
    const int token = tables.token[n];
    return token >= 0 && !is_padding(p.padding, batch, token) ? token : -1;
  };
  const auto ask = [&](const BiasTurn& turn, u32 stage, bool with_rows) {
    const int key_head = turn.head / p.ratio, row_head = Keys ? key_head : turn.head;
    const int col_head = Keys ? turn.head : key_head;
    const u32 ahead = stage * kStage;
    if (with_rows) {
      const auto row_token = [&](int n) { return row_seen(n, turn.batch); };
      const shared_tile<kLine> first{rows.base + ahead}, second{first.base + kRows * kLine};
      copy_lines<T, Depth, kRows, kThreads, 4>(first, head_of<T>(p.first, turn.batch, row_head), p.first.row, p.depth,
                                               row_token);
      copy_lines<T, Depth, kRows, kThreads, 4>(second, head_of<T>(p.second, turn.batch, row_head), p.second.row,
                                               p.value_depth, row_token);
    }
    first_copies.ask(turn.step, head_of<T>(p.other_first, turn.batch, col_head), p.other_first.row, tables.place,
                     p.plan, ahead);
    second_copies.ask(turn.step, head_of<T>(p.other_second, turn.batch, col_head), p.other_second.row, tables.place,
                      p.plan, ahead + kCols * kLine);
    const ScoreStats* const from = p.stats + (static_cast<i64>(turn.batch) * p.all + turn.head) * p.queries;
    for (int n = thread; n < (Keys ? kCols : kRows); n += kThreads) {
      int token = tables.token[Keys ? 0 : n];
      if constexpr (Keys) {
        const Place place = tables.place[n];
        token = is_inside(turn.step.tile.inside, place.at) ? turn.step.tile.base + place.offset : -1;
      }
      copy_async_small<16>(shared_address(&stats[stage][n]), from + max(token, 0), token < 0 ? 0 : 16);
    }
  };

  Walk<false, decltype(p.plan)> walk(p.plan, Item{tile, 0, 0, 0, 1});
  const auto skip_to = [&](u32 count) {  // the step after `count` others
    Step step = walk.take();
    for (; count > 0 && step.there(); --count) {
      step = walk.take();
    }
    return step;
  };
  Step taken = skip_to(within % splits);
  int batch = batch_begin, n = head_begin;
  const auto take = [&] {
    BiasTurn turn{taken, batch, 0, false};
    if (!taken.there()) {
      return turn;
    }
    turn.head = head_at(n);
    walk.see_as(turn.step, batch, turn.head);
    if (++n == head_end) {
      n = head_begin;
      if (++batch == batch_end) {
        batch = batch_begin;
        turn.last = true;
        taken = skip_to(splits - 1);
      }
    }
    return turn;
  };
  BiasTurn now = take();
  if (now.step.there()) {
    ask(now, 0, true);
  }
  copy_async_commit();

  const int warp_row = __shfl_sync(~0u, thread / 32, 0) * 16, own[2] = {warp_row + lane / 4, warp_row + 8 + lane / 4};
  const int shift = lane % 4 * 2;
  register_sums<1, RowSums ? 1 : kCols / 8> sum = {};
  float totals[2] = {0.0f, 0.0f};
  const auto row_at = fragments_across(rows, warp_row);
  const auto along = fragments_along(columns);
  u32 stage = 0;
#pragma unroll 1
  while (now.step.there()) {
    const BiasTurn next = take();
    copy_async_wait<0>();
    __syncthreads();  // this stage is here, and the other is done with
    if (next.step.there()) {
      ask(next, stage ^ 1, !one);
    }
    copy_async_commit();
    const u32 here = stage * kStage;
    const Score<true> score(p.score, now.batch, now.head, p.all);
    const int tokens[2] = {row_seen(own[0], now.batch), row_seen(own[1], now.batch)};
    const auto col_of = [&](int at) { return now.step.tile.base + tables.place[at].offset; };
    // Biases are asked for before the products: of pairs, or those of the rows where columns share them.
    u32 pairs[Extras || RowSums ? 1 : kCols / 8][2] = {};
    float of_row[2] = {0.0f, 0.0f};
    const bool in_pairs = !Extras && !RowSums && p.bias_pairs && p.follow && now.step.tile.base % 2 == 0;
    if constexpr (!Extras) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = max(tokens[half], 0);
        if constexpr (RowSums) {
          of_row[half] = score.bias(Keys ? 0 : row, Keys ? row : 0);
        } else if (in_pairs) {
          const u16* const line = static_cast<const u16*>(p.score.bias) + score.bias_at + row * p.score.bias_row;
#pragma unroll
          for (int j = 0; j < kCols / 8; ++j) {
            const int col = max(0, min(col_of(8 * j + shift), p.keys - 2));  // outside of them nothing is added
            pairs[j][half] = __ldg(reinterpret_cast<const u32*>(line + (col & ~1)));
          }
        }
      }
    }
    register_sums<1, kCols / 8> s = {}, g = {};
    multiply_lines<T, Depth, 1, kCols>(s, row_at + (one ? 0 : here), along + here);
    multiply_lines<T, Depth, 1, kCols>(g, row_at + ((one ? 0 : here) + kRows * kLine), along + (here + kCols * kLine));
    const MaskWords<1, kCols, true> there(p.plan, now.step, warp_row);
    each_score(s, [&](int i, int half, int j, int e, float& x) {
      const int row = tokens[half], at = 8 * j + shift + e;
      const ScoreStats of = stats[stage][Keys ? at : own[half]];
      float gradient = g.at[i][j][2 * half + e], share;
      const bool is = row >= 0 && there(i, half, j, e);
      if constexpr (Extras) {
        const int col = col_of(at), query = Keys ? col : row, key = Keys ? row : col;
        float slope;
        share = is ? score.share(score.prepare(x, query, key, slope), of) : 0.0f;
        gradient = is && score.keeps(query, key) ? gradient * p.score.kept : 0.0f;
      } else {
        const u32 pair = RowSums ? 0 : pairs[RowSums ? 0 : j][half];
        const float bias = RowSums    ? of_row[half]
                           : in_pairs ? (p.score.bias_type == BiasType::bf16
                                             ? __uint_as_float(e == 0 ? pair << 16 : pair & 0xffff0000u)
                                             : widen(f16{static_cast<u16>(e == 0 ? pair : pair >> 16)}))
                           : is       ? score.bias(row, col_of(at))
                                      : 0.0f;
        share = score.share(x * p.score.scale + bias, of);
      }
      const float d = is ? share * (gradient - of.delta) : 0.0f;
      if constexpr (RowSums) {
        totals[half] += d;
      } else {
        sum.at[i][j][2 * half + e] += d;
      }
    });
    if constexpr (!RowSums) {
      if (now.last) {
        now.step.tile.used = -1;  // what no batch element has is zero
        const MaskWords<1, kCols, false> written(p.plan, now.step, warp_row);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = tables.token[own[half]];
#pragma unroll
          for (int j = 0; j < kCols / 8; ++j) {
            const float pair[2] = {sum.at[0][j][2 * half], sum.at[0][j][2 * half + 1]};
            const bool inside[2] = {row >= 0 && written(0, half, j, 0), row >= 0 && written(0, half, j, 1)};
            const i64 at = out + row * p.out_row + col_of(8 * j + shift) * p.out_col;
            if (p.follow) {
              put_bias(p, at, pair, inside);
            } else {
              put_bias(p, at, pair, {inside[0], false});
              put_bias(p, out + row * p.out_row + (col_of(8 * j + shift + 1) - 1) * p.out_col, pair,
                       {false, inside[1]});
            }
            sum.at[0][j][2 * half] = sum.at[0][j][2 * half + 1] = 0.0f;
          }
        }
      }
    }
    now = next;
    stage ^= 1;
  }
  copy_async_wait<0>();
  if constexpr (RowSums) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float all = reduce_lanes<4>(totals[half], take_sum{});
      const int row = tables.token[own[half]];
      if (lane % 4 == 0 && row >= 0) {
        const i64 at = out + static_cast<i64>(within % splits) * p.out_split;
        static_cast<float*>(p.out)[at + row * (Keys ? p.out_col : p.out_row)] += all;
      }
    }
  }
}

}  // namespace fretwork
