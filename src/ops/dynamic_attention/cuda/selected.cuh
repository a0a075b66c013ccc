// Selected key blocks on Hopper: attention, and the gradient of q. Neighbouring queries share what is fetched: a CTA
// has a tile of them, a warp for 16 query heads of each, and goes through the blocks that any of them has. A warp skips
// the blocks that its query does not have, so that no key meets a query that did not select it. Warps may be as far
// apart as the ring is long.
#pragma once

#include "device/pipeline.cuh"
#include "ops/attention/cuda/products.cuh"
#include "ops/attention/cuda/sinks.cuh"
#include "ops/dynamic_attention/cuda/params_hopper.cuh"

namespace fretwork::dynamic_attention_op::hopper {

/// What a stage holds: up to four runs of keys, from key[n] on, and which queries of the tile have them, eight bits
/// each. `last`: of the tile.
struct SelectedNote {
  int key[4];
  u32 has;
  int last;
};

template <typename T, int Depth, int Keys, bool Gradient>
struct Selected {
  static constexpr Roles kRoles{.consumers = 2, .producer_registers = 40, .consumer_registers = 232};
  static constexpr int kHalves = Depth / 64, kRuns = kSelectedKeys / Keys;
  static constexpr int kStages = selected_stages(Depth, Gradient), kStage = selected_stage(Depth);
  static constexpr u32 kHalf = kSelectedKeys * 128, kOwnHalf = 16 * 128, kOwn = kHalves * kOwnHalf;
  using Sums = register_sums<1, 8>[kHalves];
  using Own = shared_tile<128>;

  const SelectedParams& p;
  RingBarriers<kStages>& ring;
  SelectedNote (&notes)[kStages];
  u32 base;  // of the stages; then each warp's rows of q, and of the gradient of the result

  /// A tile of queries of a key head.
  struct Tile {
    int batch, head, query;
  };
  /// Later queries may have more keys.
  template <typename F>
  __device__ __forceinline__ void each_tile(const F& f) const {
    const int count = p.batch * p.key_heads * p.tiles, side = kSelectedWarps / p.warps_each;
    for (int n = static_cast<int>(blockIdx.x); n < count; n += static_cast<int>(gridDim.x)) {
      const int set = n / p.tiles, tile = p.tiles - 1 - (n - set * p.tiles), batch = set / p.key_heads;
      f(Tile{batch, set - batch * p.key_heads, tile * side});
    }
  }
  __device__ __forceinline__ IntervalArg interval_of(int query) const {
    return query < p.queries ? p.intervals[query] : IntervalArg{0, 0};
  }

  // ------------------------------------------------------------------------------------------------ fetching

  /// Stages that one warp fills: runs of keys are collected, and go out when the next one has no room.
  struct Fetch {
    const Selected& of;
    Producer<kStages> at;
    SelectedNote note{};
    int count = 0;

    __device__ __forceinline__ void add(const Tile& tile, int key, u32 has) {
      if (count == kRuns) {
        issue(tile, false);
      }
#pragma unroll
      for (int n = 0; n < kRuns; ++n) {
        note.key[n] = n == count ? key : note.key[n];
      }
      note.has |= has << 8 * count++;
    }
    __device__ __forceinline__ void issue(const Tile& tile, bool last) {
      if (threadIdx.x % 32 == 0) {
        const u32 full = of.ring.acquire(at), to = of.base + at.stage * kStage;
        note.last = last ? 1 : 0;
        of.notes[at.stage] = note;
        mbarrier::arrive_expect(full, static_cast<u32>(count * (kStage / kRuns)));
#pragma unroll
        for (int n = 0; n < kRuns; ++n) {
          for (int h = 0; h < kHalves && n < count; ++h) {
            const u32 there = to + h * kHalf + n * Keys * 128;
            tma::load(there, &of.p.k, full, 64 * h, note.key[n], tile.head, tile.batch);
            tma::load(there + kHalves * kHalf, &of.p.v, full, 64 * h, note.key[n], tile.head, tile.batch);
          }
        }
      }
      __syncwarp();
      at.next();
      count = 0;
      note.has = 0;
    }
  };

  __device__ __forceinline__ void produce() const {
    if (threadIdx.x >= 32) {
      return;
    }
    const int lane = static_cast<int>(threadIdx.x) % 32, side = kSelectedWarps / p.warps_each;
    Fetch fetch{*this};
    each_tile([&](const Tile& tile) {
      const int query = lane < side ? tile.query + lane : p.queries;
      const IntervalArg keys = interval_of(query);
      const int first = keys.begin / p.block, last = keys.begin < keys.end ? (keys.end - 1) / p.block + 1 : 0;
      const u32* const line =
          p.words + ((static_cast<i64>(tile.batch) * p.key_heads + tile.head) * p.queries + min(query, p.queries - 1)) *
                        p.words_row;
      const auto word_at = [&](int w) {  // without blocks that the query may not see
        return 32 * w < last && 32 * (w + 1) > first
                   ? line[w] & low_bits(min(last - 32 * w, 32)) & ~low_bits(min(max(first - 32 * w, 0), 32))
                   : 0u;
      };
      const int end = __reduce_max_sync(~0u, (last + 31) / 32);
      int w = __reduce_min_sync(~0u, last > 0 ? first / 32 : end);
      u32 word = w < end ? word_at(w) : 0u;
      for (; w < end; ++w) {
        const u32 next = w + 1 < end ? word_at(w + 1) : 0u;
        for (u32 any = __reduce_or_sync(~0u, word); any != 0; any &= any - 1) {
          const int bit = __ffs(static_cast<int>(any)) - 1, key = (32 * w + bit) * p.block;
          const u32 has = __ballot_sync(~0u, (word >> bit & 1) != 0);
          fetch.add(tile, key, has);
          if (p.block > Keys) {
            fetch.add(tile, key + Keys, has);
          }
        }
        word = next;
      }
      fetch.issue(tile, true);
    });
  }

  // --------------------------------------------------------------------------------------------- multiplying

  /// The rows of a warp.
  struct Rows {
    int query, first;  ///< first: of the query heads
    int count;
  };

  /// 16-byte chunks of a warp's rows: f(row, column, where they lie in a tile).
  template <typename F>
  static __device__ __forceinline__ void each_chunk(u32 own, const F& f) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    constexpr int kChunks = Depth / 8;
#pragma unroll
    for (int n = 0; n < 16 * kChunks / 32; ++n) {
      const int at = 32 * n + lane, row = at / kChunks, chunk = at % kChunks;
      f(row, 8 * chunk, Own{own + chunk / 8 * kOwnHalf}.chunk(static_cast<u32>(row), static_cast<u32>(chunk % 8)));
    }
  }
  __device__ __forceinline__ void ask_rows(const attention_op::InputArg& from, int depth, const Tile& tile,
                                           const Rows& rows, u32 own) const {
    const u8* const lines = head_of<T>(from, tile.batch, rows.first);
    each_chunk(own, [&](int row, int col, u32 to) {
      const bool there = row < rows.count && col < depth;
      const u8* const at = lines + static_cast<i64>(rows.query) * from.row +
                           (there ? (row * from.head + col) * static_cast<i64>(sizeof(T)) : 0);
      copy_async_part(to, at, there ? min(depth - col, 8) * 2 : 0);
    });
  }
  /// The rows of a result, which pass through shared memory.
  __device__ __forceinline__ void store_rows(const Sums& sums, const float (&factor)[2], int depth, const Tile& tile,
                                             const Rows& rows, u32 own) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    __syncwarp();  // what was there is done with
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* const x = sums[h].at[0][j] + 2 * half;
          const u32 to = Own{own + h * kOwnHalf}.chunk(static_cast<u32>(lane / 4 + 8 * half), static_cast<u32>(j));
          asm volatile("st.shared.b32 [%0], %1;" ::"r"(to + lane % 4 * 4),
                       "r"(narrow_pair<T>(x[0] * factor[half], x[1] * factor[half]))
                       : "memory");
        }
      }
    }
    __syncwarp();
    T* const lines = static_cast<T*>(p.out.data) + tile.batch * p.out.batch + rows.first * p.out.head +
                     static_cast<i64>(rows.query) * p.out.row;
    each_chunk(own, [&](int row, int col, u32 from) {
      if (row < rows.count && col < depth) {
        u32 words[4];
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                     : "r"(from)
                     : "memory");
        T* const to = lines + row * p.out.head + col * p.out.col;
        if (p.out.vector) {
          *reinterpret_cast<uint4*>(to) = uint4{words[0], words[1], words[2], words[3]};
        } else {
          const u16* const parts = reinterpret_cast<const u16*>(words);
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            *reinterpret_cast<u16*>(to + e * p.out.col) = parts[e];
          }
        }
      }
    });
  }

  /// Fragments of keys or values as the copy engine swizzled them.
  static __device__ __forceinline__ Fragments<128> along(u32 tile) {
    const u32 lane = threadIdx.x % 32;
    return Fragments<128>(tile + tma::swizzled<128>((lane % 8 + lane / 16 * 8) * 128 + lane / 8 % 2 * 16));
  }
  static __device__ __forceinline__ Fragments<128> across(u32 tile) {
    const u32 lane = threadIdx.x % 32;
    return Fragments<128>(tile + tma::swizzled<128>(lane % 16 * 128 + lane / 16 * 16));
  }

  /// Keys [begin, end) of a run: of the others neither scores nor entries count, whatever they are.
  struct Cut {
    u32 words[(Keys + 31) / 32];

    __device__ __forceinline__ Cut(int begin, int end) {
#pragma unroll
      for (int w = 0; w < (Keys + 31) / 32; ++w) {
        words[w] = low_bits(min(max(end - 32 * w, 0), 32)) & ~low_bits(min(max(begin - 32 * w, 0), 32));
      }
    }
    /// Of a lane's scores.
    __device__ __forceinline__ bool has(int j, int e) const {
      return (words[j / 4] >> (j % 4 * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + e) & 1) != 0;
    }
    /// Zeros in the fragments of 16 keys.
    __device__ __forceinline__ void operator()(int k, u32 (&b)[4]) const {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const u32 pair = words[k / 2] >> (k % 2 * 16 + 8 * e + static_cast<int>(threadIdx.x) % 4 * 2);
        const u32 keep = ((pair & 1) != 0 ? 0xffffu : 0u) | ((pair & 2) != 0 ? 0xffff0000u : 0u);
        b[e] &= keep;
        b[e + 2] &= keep;
      }
    }
  };

  template <typename Keep>
  static __device__ __forceinline__ void multiply_run(Sums& sums, const u32 (&left)[Keys / 16][1][4], u32 tile,
                                                      const Keep& keep) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      multiply_across<T, 64, 1, Keys>(sums[h], left, across(tile + h * kHalf), keep);
    }
  }
  static __device__ __forceinline__ void scores(register_sums<1, Keys / 8>& s, u32 own, u32 tile) {
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      multiply_lines<T, 64, 1, Keys>(s, fragments_across(Own{own + h * kOwnHalf}, 0), along(tile + h * kHalf));
    }
  }

  /// Of a lane's two rows: what their exponents are counted from, and the sum of shares. For gradients the log-sum-exp
  /// and delta.
  struct State {
    float level[2], sum[2];
  };

  template <bool Cuts>
  __device__ __forceinline__ void step(Sums& sums, State& state, u32 own, u32 keys, const Cut& cut) const {
    const u32 values = keys + kHalves * kHalf;
    register_sums<1, Keys / 8> s = {};
    scores(s, own, keys);
    if constexpr (Gradient) {
      register_sums<1, Keys / 8> g = {};
      scores(g, own + kOwn, values);
      each_score(s, [&](int, int half, int j, int e, float& x) {
        const float share = exp2_fast(x * p.scale_2 - state.level[half]);
        const float d = share * (g.at[0][j][2 * half + e] - state.sum[half]);
        x = !Cuts || cut.has(j, e) ? d : 0.0f;
      });
    } else {
      if constexpr (Cuts) {
        each_score(s, [&](int, int, int j, int e, float& x) { x = cut.has(j, e) ? x : -infinity(); });
      }
      follow(s, sums, state);
    }
    u32 left[Keys / 16][1][4];
    narrow_sums<T>(left, s);
    if constexpr (Cuts) {
      multiply_run(sums, left, Gradient ? keys : values, cut);
    } else {
      multiply_run(sums, left, Gradient ? keys : values, keep_all{});
    }
  }

  /// Scores to shares. The level follows the highest score, unless that is little more.
  __device__ __forceinline__ void follow(register_sums<1, Keys / 8>& s, Sums& sums, State& state) const {
    constexpr float kSlack = 8.0f;
    float high[2];
    bool grows = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = -infinity();
#pragma unroll
      for (int j = 0; j < Keys / 8; ++j) {
        most = fmaxf(most, fmaxf(s.at[0][j][2 * half], s.at[0][j][2 * half + 1]));
      }
      high[half] = reduce_lanes<4>(most, take_max{}) * p.scale_2;
      grows = grows || high[half] > state.level[half] + kSlack;
    }
    if (__any_sync(~0u, grows)) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float to = high[half] > state.level[half] + kSlack ? high[half] : state.level[half];
        const float shrink = exp2_fast(state.level[half] - to);
        state.level[half] = to;
        state.sum[half] *= shrink;
#pragma unroll
        for (int h = 0; h < kHalves; ++h) {
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            sums[h].at[0][j][2 * half] *= shrink;
            sums[h].at[0][j][2 * half + 1] *= shrink;
          }
        }
      }
    }
    each_score(s, [&](int, int half, int, int, float& x) {
      x = exp2_fast(x * p.scale_2 - state.level[half]);
      state.sum[half] += x;
    });
  }

  __device__ __forceinline__ void consume() const {
    const int warp = uniform(threadIdx.x / 32) - 4, slot = warp / p.warps_each, part = warp - slot * p.warps_each;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const u32 own = base + kStages * kStage + warp * (Gradient ? 2 * kOwn : kOwn);
    Consumer<kStages> at;
    each_tile([&](const Tile& tile) {
      Rows rows{tile.query + slot, tile.head * p.group + 16 * part, min(p.group - 16 * part, 16)};
      const IntervalArg keys = interval_of(rows.query);
      if (rows.query >= p.queries) {
        rows = {0, 0, 0};
      }
      __syncwarp();  // the rows before are stored
      ask_rows(p.q, p.depth, tile, rows, own);
      State state{{-3.4028235e38f, -3.4028235e38f}, {0.0f, 0.0f}};  // the lowest: no key yet
      if constexpr (Gradient) {
        ask_rows(p.d_o, p.value_depth, tile, rows, own + kOwn);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = lane / 4 + 8 * half;
          const i64 head = static_cast<i64>(tile.batch) * p.key_heads * p.group + rows.first + row;
          const auto of =
              row < rows.count ? p.stats[head * p.queries + rows.query] : attention_op::RowStats{infinity(), 0.0f};
          state.level[half] = of.lse;
          state.sum[half] = of.delta;
        }
      }
      copy_async_commit();
      copy_async_wait<0>();
      __syncwarp();
      Sums sums = {};
      bool last;
      do {
        ring.wait(at);
        const SelectedNote& note = notes[at.stage];
        last = note.last != 0;
#pragma unroll
        for (int n = 0; n < kRuns; ++n) {
          if ((note.has >> (8 * n + slot) & 1) != 0) {
            const u32 there = base + at.stage * kStage + n * Keys * 128;
            const int begin = keys.begin - note.key[n], end = keys.end - note.key[n];
            const Cut cut(begin, end);
            if (begin <= 0 && end >= Keys) {
              step<false>(sums, state, own, there, cut);
            } else {
              step<true>(sums, state, own, there, cut);
            }
          }
        }
        ring.release(static_cast<int>(at.stage));
        at.next();
      } while (!last);
      finish(sums, state, tile, rows, own);
    });
  }

  /// One more score joins a row; `share` is what the others' sum is multiplied by. −∞ is no score.
  static __device__ __forceinline__ void join_sink(float sink, float& level, float& sum, float& share) {
    if (sink == -infinity()) {
      return;
    }
    const float most = fmaxf(level, sink);
    share = exp2_fast(level - most);
    sum = sum * share + exp2_fast(sink - most);
    level = most;
  }
  __device__ __forceinline__ void finish(const Sums& sums, const State& state, const Tile& tile, const Rows& rows,
                                         u32 own) const {
    float factor[2] = {p.scale, p.scale};
    if constexpr (!Gradient) {
      const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = reduce_lanes<4>(state.sum[half], take_sum{}), level = state.level[half], share = 1.0f;
        const int row = lane / 4 + 8 * half;
        if (p.sinks.data != nullptr && row < rows.count) {
          join_sink(attention_op::sink_of(p.sinks, rows.first + row) * kLog2e, level, sum, share);
        }
        factor[half] = sum == 0.0f ? 0.0f : share / sum;
        if (lane % 4 == 0 && row < rows.count && p.lse.data != nullptr) {
          static_cast<float*>(p.lse.data)[tile.batch * p.lse.batch + (rows.first + row) * p.lse.head +
                                          static_cast<i64>(rows.query) * p.lse.row] =
              sum == 0.0f ? -infinity() : (level + log2f(sum)) * kLn2;
        }
      }
    }
    store_rows(sums, factor, Gradient ? p.depth : p.value_depth, tile, rows, own);
  }
};

/// Keys: of a product, 16, 32 or 64: blocks, or as much of them as a stage holds.
template <typename T, int Depth, int Keys, bool Gradient>
__global__ void __launch_bounds__(kSelectedThreads, 1) selected(const __grid_constant__ SelectedParams p) {
  using Kernel = Selected<T, Depth, Keys, Gradient>;
  extern __shared__ u8 memory[];
  __shared__ RingBarriers<Kernel::kStages> ring;
  __shared__ SelectedNote notes[Kernel::kStages];
  init_barriers([&] { ring.make(1, kSelectedWarps); });
  run_warp_specialized(Kernel{p, ring, notes, stages_in(memory)});
}

}  // namespace fretwork::dynamic_attention_op::hopper
