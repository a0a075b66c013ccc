// Gradients of attention with a head dim above 128, where registers hold one accumulator tile at a time: a kernel each
// for queries, keys and values, eight products in all. As for smaller head dims, a CTA owns 128 rows and streams tiles
// of 64 columns. The two streamed operands have separate rings, because one of them is free before the other.
#pragma once

#include "ops/attention/cuda/hopper_backward_common.cuh"

namespace fretwork::attention_op::hopper {

/// Whose gradients. Rows are q and d_o, k and v, or k alone; columns k and v, or q and d_o.
enum class GradientOf { queries, keys, values };

/// For kDepth columns of q and k and kValues of v and d_o. All tiles have room for the larger. Rows lie first, then the
/// tiles of the first operand that streams, then those of the other. A step's notes and statistics are the first one's.
template <int kDepth, int kValues, GradientOf kOf>
struct HeadDimGt128Shared {
  static constexpr int kMost = kDepth > kValues ? kDepth : kValues;
  static constexpr HeadDimGt128Stages kRings = head_dim_gt_128_stages(kMost, kOf == GradientOf::values);
  static constexpr int kStages = kRings.first, kOtherStages = kRings.second;
  static constexpr int kHalves = kDepth / 64, kValueHalves = kValues / 64, kMostHalves = kMost / 64;
  static constexpr bool kTight = kOf != GradientOf::values && kDepth == 256;
  static constexpr u32 kFetchRegisters = kTight ? 24 : 40, kRegisters = kTight ? 240 : 232;
  static constexpr bool kScored = false, kRowBits = false;
  static constexpr bool kKeys = kOf != GradientOf::queries;  ///< rows are keys, and columns have statistics
  static constexpr u32 kRowHalf = kRows * 128, kRowTile = kMostHalves * kRowHalf;  ///< bytes of one operand
  static constexpr u32 kColHalf = kStream * 128, kColTile = kMostHalves * kColHalf;
  static constexpr u32 kCols = (kOf == GradientOf::values ? 1 : 2) * kRowTile, kOtherCols = kCols + kStages * kColTile;
  RingBarriers<2> rows;  ///< one of each operand
  RingBarriers<kStages> cols;
  RingBarriers<kOtherStages> other_cols;
  int4 item, steps[kStages];
  alignas(16) float stats[kStages][2][kStream];
  int used[kStages], part;
};

/// One warp fetches the rows of each item, the operand that is needed first as soon as the item before has done with
/// it. kSeen: columns are keys that may be padding.
template <bool kSeen, bool kSplit, int kDepth, int kValues, GradientOf kOf>
__device__ __forceinline__ void fetch_head_dim_gt_128_rows(const BackwardParams& p,
                                                           HeadDimGt128Shared<kDepth, kValues, kOf>& shared, u32 rows) {
  using S = HeadDimGt128Shared<kDepth, kValues, kOf>;
  const Walk& walk = p.walk;
  Producer<1> at;
#pragma unroll 1
  for (int i = word(walk.share, blockIdx.x); i < word(walk.share, blockIdx.x + 1); ++i, at.next()) {
    const int4 item = record(walk.items, i);
    if (threadIdx.x == 0) {
      const int4 place = record(walk.row_tiles, item.x);
      const u32 full = shared.rows.acquire({0, at.parity});
      shared.item = {steps_of<kSeen, kSplit>(p, i, item), item.y, item.z, item.x};
      if constexpr (kSplit) {
        shared.part = record(p.pieces, i).z;
      }
      mbarrier::arrive_expect(full, S::kHalves * 128 * walk.row_places);
      fetch<S::kHalves>(p.rows[0], rows, S::kRowHalf, full, place, item.y, item.z);
      if constexpr (kOf != GradientOf::values) {
        const u32 second = shared.rows.acquire({1, at.parity});
        mbarrier::arrive_expect(second, S::kValueHalves * 128 * walk.row_places);
        fetch<S::kValueHalves>(p.rows[1], rows + S::kRowTile, S::kRowHalf, second, place, item.y, item.z);
      }
    }
    __syncwarp();
    prefetch_rows<S::kKeys, kRows>(p, item);
  }
  if (threadIdx.x == 0) {
    const u32 full = shared.rows.acquire({0, at.parity});
    shared.item = {-1, 0, 0, 0};
    mbarrier::arrive(full);
  }
}

/// A thread of another warp one operand of the columns of each step.
template <bool kOther, bool kSeen, bool kSplit, int kDepth, int kValues, GradientOf kOf>
__device__ __forceinline__ void fetch_head_dim_gt_128_cols(const BackwardParams& p,
                                                           HeadDimGt128Shared<kDepth, kValues, kOf>& shared,
                                                           u32 tiles) {
  using S = HeadDimGt128Shared<kDepth, kValues, kOf>;
  constexpr int kHalves = kOther ? S::kValueHalves : S::kHalves;
  const Walk& walk = p.walk;
  Producer<kOther ? S::kOtherStages : S::kStages> at;
  walk_steps<S::kKeys, kSplit>(p, [&](int batch, int head, int r, int tile) {
    if (kSeen && !sees_tile(p.seen, batch, tile)) {
      return;
    }
    const u32 full = kOther ? shared.other_cols.acquire(at) : shared.cols.acquire(at);
    if constexpr (!kOther) {
      shared.steps[at.stage] = mask_of(walk, r);
      shared.used[at.stage] = used_of<!S::kKeys>(walk, batch, tile);
    }
    mbarrier::arrive_expect(full, kHalves * 128 * walk.col_places);
    const int4 place = record(walk.col_tiles, tile);
    fetch<kHalves>(p.cols[kOther ? 1 : 0], tiles + at.stage * S::kColTile, S::kColHalf, full, place, batch, head);
    at.next();
  });
}

/// What all three begin with.
template <int kDepth, int kValues, GradientOf kOf>
__device__ __forceinline__ void make_head_dim_gt_128_barriers(const BackwardParams& p,
                                                              HeadDimGt128Shared<kDepth, kValues, kOf>& shared,
                                                              u32 cols) {
  using S = HeadDimGt128Shared<kDepth, kValues, kOf>;
  clear_unplaced(cols, (S::kStages + S::kOtherStages) * S::kMostHalves, kStream, p.walk.col_places);
  init_barriers([&] {
    shared.rows.make(1, 8);
    shared.cols.make(S::kKeys ? 33 : 1, S::kKeys ? 256 : 8);
    shared.other_cols.make(1, 8);
  });
  begin_backward(p);
}
/// The roles of the warpgroup that fetches, a warp for each.
template <bool kSeen, bool kSplit, int kDepth, int kValues, GradientOf kOf>
__device__ __forceinline__ void fetch_all_head_dim_gt_128(const BackwardParams& p,
                                                          HeadDimGt128Shared<kDepth, kValues, kOf>& shared, u32 rows) {
  using S = HeadDimGt128Shared<kDepth, kValues, kOf>;
  if (threadIdx.x < 32) {
    fetch_head_dim_gt_128_rows<kSeen, kSplit>(p, shared, rows);
  } else if (threadIdx.x == 32) {
    fetch_head_dim_gt_128_cols<false, kSeen, kSplit>(p, shared, rows + S::kCols);
  } else if (threadIdx.x == 64) {
    fetch_head_dim_gt_128_cols<true, kSeen, kSplit>(p, shared, rows + S::kOtherCols);
  } else if (S::kKeys && threadIdx.x >= 96) {
    gather_stats<kSplit>(p, shared);
  }
}

__device__ __forceinline__ void to_probabilities(float (&s)[kStream / 2], const float (&lse_of)[kStream], float scale) {
  to_probabilities(s, scale,
                   [&](int j) { return *reinterpret_cast<const float2*>(&lse_of[8 * j + threadIdx.x % 4 * 2]); });
}

/// dq = scale · dS · k, or dk = scale · dSᵀ · q. kGeneral: there are masks of bits, or columns that nothing uses.
/// kSplit: items may be pieces of tiles.
template <typename T, int kDepth, int kValues, bool kKeys, bool kGeneral, bool kSplit>
struct BackwardDeep {
  using S = HeadDimGt128Shared<kDepth, kValues, kKeys ? GradientOf::keys : GradientOf::queries>;
  static constexpr Roles kRoles{
      .consumers = 2, .producer_registers = S::kFetchRegisters, .consumer_registers = S::kRegisters};
  const BackwardParams& p;
  S& shared;
  u32 rows;  ///< tiles; those of columns follow

  __device__ __forceinline__ void produce() const {
    fetch_all_head_dim_gt_128<kGeneral && !kKeys, kSplit>(p, shared, rows);
  }

  __device__ __forceinline__ void consume() const {
    const int warpgroup = static_cast<int>(threadIdx.x) / 128 - 1, lane = static_cast<int>(threadIdx.x) % 32;
    const int row = warpgroup * 64 + static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane / 4;
    const u32 own_rows = rows + warpgroup * 8192, other_rows = own_rows + S::kRowTile;
    // Addresses, not release(empty, ) and so on: with those, ptxas spills more registers.
    const u32 empty = shared_address(shared.cols.empty), other_empty = shared_address(shared.other_cols.empty);
    const u32 row_full = shared_address(shared.rows.full), row_empty = shared_address(shared.rows.empty);
    Consumer<1> items;
    Consumer<S::kStages> at;
    Consumer<S::kOtherStages> other;
    for (;; items.next()) {
      mbarrier::wait(row_full, items.parity);
      const int steps = read_note(shared.item).x;  // the rest is read again: registers are short
      if (steps < 0) {
        break;
      }
      float2 stats[2];
      if constexpr (!kKeys) {
        const int4 note = read_note(shared.item);
        const int own = own_token(p.walk, note.w, warpgroup);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          stats[h] = stats_of(p, note.y, note.z, __shfl_sync(0xffffffffu, own, lane / 4 + 8 * h));
        }
      }
      float sums[kDepth / 2], s[kStream / 2], dp[kStream / 2];
      u32 left[kStream / 16][4];
#pragma unroll
      for (float& sum : sums) {
        sum = 0.0f;
      }
      mbarrier::wait(row_full + 8, items.parity);
      int pending = -1;  // the stage that products in flight still read
      const auto release_step = [&] {
        if constexpr (kKeys) {
          release_lane(empty, pending);
        } else {
          release(empty, pending);
        }
      };
#pragma unroll 1
      for (int n = 0; n < steps; ++n, at.next(), other.next()) {
        const u32 col = rows + S::kCols + at.stage * S::kColTile;
        const u32 other_col = rows + S::kOtherCols + other.stage * S::kColTile;
        shared.cols.wait(at);
        const int kind = read_note(shared.steps[at.stage]).x;
        int used = -1;
        if constexpr (kGeneral) {
          used = __shfl_sync(0xffffffffu, lane == 0 ? shared.used[at.stage] : 0, 0);
          if (used >= 0) {  // what dP finds in the other operand is left out with the scores
            clear_unused<S::kHalves, kStream>(col, p.walk.used + used);
            join_cleared(1 + warpgroup);
          }
          if (kind >= 0) {
            prefetch_bits<kStream / 32>(p.walk.bits + kind, row);
          }
        }
        wgmma::fence();
        multiply_scores<T, kDepth, kStream>(s, own_rows, S::kRowHalf, col, S::kColHalf);
        wgmma::commit();
        shared.other_cols.wait(other);
        wgmma::fence();
        multiply_scores<T, kValues, kStream>(dp, other_rows, S::kRowHalf, other_col, S::kColHalf);
        wgmma::commit();
        wgmma::wait<1>();
        release_step();
        pending = static_cast<int>(at.stage);
        if constexpr (kKeys) {
          to_probabilities(s, shared.stats[at.stage][0], p.scale_2);
        } else {
#pragma unroll
          for (int i = 0; i < kStream / 2; ++i) {
            s[i] = exp2_fast(s[i] * p.scale_2 - stats[i / 2 % 2].x);
          }
        }
        cut_masked<kGeneral>(s, kind, shared.steps[at.stage], p.walk.bits, row, 0.0f);
        const bool hides = kGeneral && !kKeys && used >= 0;
        if (hides) {
          cut_columns(s, p.walk.used + used, 0.0f);
        }
        wgmma::wait<0>();
        release(other_empty, static_cast<int>(other.stage));
        if constexpr (kKeys) {
          float2 delta[kStream / 8];
#pragma unroll
          for (int j = 0; j < kStream / 8; ++j) {
            delta[j] = *reinterpret_cast<const float2*>(&shared.stats[at.stage][1][8 * j + lane % 4 * 2]);
          }
          to_score_gradients(s, dp, kind != kWhole,
                             [&](int i) { return i % 2 == 0 ? delta[i / 4].x : delta[i / 4].y; });
        } else {
          to_score_gradients(s, dp, kind != kWhole || hides, [&](int i) { return stats[i / 2 % 2].y; });
        }
        pack<T>(left, s);
        wgmma::fence();
        multiply_values<T, kDepth, kStream>(sums, left, col, S::kColHalf);
        wgmma::commit();
      }
      wgmma::wait<0>();
      release_step();
      const int4 note = read_note(shared.item);
      const int part = kSplit ? read_part(shared.part) : -1;
      release(row_empty, 0);  // the next item's rows of this operand come while these sums leave through the other's
      const int own = own_token(p.walk, note.w, warpgroup);
      named_barrier(1 + warpgroup, 128);  // no one reads this half of the rows any more
      store_gradient<T, kDepth>(p, 0, p.depth, note, part, own, sums, p.scale, other_rows);
      fence_async_proxy();  // the next rows come by the copy engine
      release(row_empty, 1);
    }
    wait_for_earlier_kernel();  // so that kernels behind this one wait for that one too
  }
};

template <typename T, int kDepth, int kValues, bool kKeys, bool kGeneral, bool kSplit>
__global__ void __launch_bounds__(threads_of(kRows), 1)
    backward_head_dim_gt_128(const __grid_constant__ BackwardParams p) {
  using Kernel = BackwardDeep<T, kDepth, kValues, kKeys, kGeneral, kSplit>;
  using S = typename Kernel::S;
  extern __shared__ u8 raw[];
  __shared__ S shared;
  const u32 rows = stages_in(raw);
  make_head_dim_gt_128_barriers(p, shared, rows + S::kCols);
  run_warp_specialized(Kernel{p, shared, rows});
}

/// dv = Pᵀ · d_o. The scores of a step are in the tensor cores while the probabilities of the step before meet d_o.
/// kGeneral: there are masks of bits, or queries that nothing uses.
template <typename T, int kDepth, int kValues, bool kGeneral, bool kSplit>
struct BackwardDeepValues {
  using S = HeadDimGt128Shared<kDepth, kValues, GradientOf::values>;
  static constexpr Roles kRoles{
      .consumers = 2, .producer_registers = S::kFetchRegisters, .consumer_registers = S::kRegisters};
  const BackwardParams& p;
  S& shared;
  u32 rows;  ///< tiles; those of columns follow

  __device__ __forceinline__ void produce() const { fetch_all_head_dim_gt_128<false, kSplit>(p, shared, rows); }

  __device__ __forceinline__ void consume() const {
    const int warpgroup = static_cast<int>(threadIdx.x) / 128 - 1, lane = static_cast<int>(threadIdx.x) % 32;
    const int row = warpgroup * 64 + static_cast<int>(threadIdx.x) / 32 % 4 * 16 + lane / 4;
    const u32 k = rows + warpgroup * 8192;
    const u32 empty = shared_address(shared.cols.empty), other_empty = shared_address(shared.other_cols.empty);
    Consumer<1> items;
    Consumer<S::kStages> at;
    Consumer<S::kOtherStages> behind;  // of the step whose probabilities are to be multiplied
    for (;; items.next()) {
      shared.rows.wait({0, items.parity});
      const int4 note = read_note(shared.item);
      if (note.x < 0) {
        break;
      }
      const int own = own_token(p.walk, note.w, warpgroup);
      float dv[kValues / 2], s[kStream / 2];
      u32 left[kStream / 16][4];
#pragma unroll
      for (float& sum : dv) {
        sum = 0.0f;
      }
      int kind = kWhole, used = -1, used_before = -1;
      const auto begin_scores = [&] {
        shared.cols.wait(at);
        kind = read_note(shared.steps[at.stage]).x;
        wgmma::fence();
        multiply_scores<T, kDepth, kStream>(s, k, S::kRowHalf, rows + S::kCols + at.stage * S::kColTile, S::kColHalf);
        wgmma::commit();
        if constexpr (kGeneral) {
          used_before = used;
          used = __shfl_sync(0xffffffffu, lane == 0 ? shared.used[at.stage] : 0, 0);
          if (kind >= 0) {
            prefetch_bits<kStream / 32>(p.walk.bits + kind, row);
          }
        }
      };
      const auto end_scores = [&] {
        to_probabilities(s, shared.stats[at.stage][0], p.scale_2);
        cut_masked<kGeneral>(s, kind, shared.steps[at.stage], p.walk.bits, row, 0.0f);
        release_lane(empty, static_cast<int>(at.stage));
        at.next();
      };
      const auto add_values = [&](int unused) {
        const u32 d_o = rows + S::kOtherCols + behind.stage * S::kColTile;
        shared.other_cols.wait(behind);
        if constexpr (kGeneral) {
          if (unused >= 0) {
            clear_unused<S::kValueHalves, kStream>(d_o, p.walk.used + unused);
            join_cleared(1 + warpgroup);
          }
        }
        wgmma::fence();
        multiply_values<T, kValues, kStream>(dv, left, d_o, S::kColHalf);
        wgmma::commit();
      };
      const auto end_values = [&] {
        wgmma::wait<0>();
        release(other_empty, static_cast<int>(behind.stage));
        behind.next();
      };
      if (note.x > 0) {
        begin_scores();
        wgmma::wait<0>();
        end_scores();
        pack<T>(left, s);
#pragma unroll 1
        for (int n = 1; n < note.x; ++n) {
          begin_scores();
          add_values(used_before);
          wgmma::wait<1>();
          end_scores();
          end_values();
          pack<T>(left, s);
        }
        add_values(used);
        end_values();
      }
      named_barrier(1 + warpgroup, 128);  // no one reads this half of the rows any more
      store_gradient<T, kValues>(p, 0, p.value_depth, note, kSplit ? read_part(shared.part) : -1, own, dv, 1.0f, k);
      fence_async_proxy();  // the next rows come by the copy engine
      shared.rows.release(0);
    }
    wait_for_earlier_kernel();  // so that kernels behind this one wait for that one too
  }
};

template <typename T, int kDepth, int kValues, bool kGeneral, bool kSplit>
__global__ void __launch_bounds__(threads_of(kRows), 1)
    backward_head_dim_gt_128_values(const __grid_constant__ BackwardParams p) {
  using Kernel = BackwardDeepValues<T, kDepth, kValues, kGeneral, kSplit>;
  using S = typename Kernel::S;
  extern __shared__ u8 raw[];
  __shared__ S shared;
  const u32 rows = stages_in(raw);
  make_head_dim_gt_128_barriers(p, shared, rows + S::kCols);
  run_warp_specialized(Kernel{p, shared, rows});
}

}  // namespace fretwork::attention_op::hopper
