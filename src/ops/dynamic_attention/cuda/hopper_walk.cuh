// Writes a walk for attention's Hopper kernels from bits that say which blocks a row block meets: the runs of each row
// tile, and which CTA does which tiles.
#pragma once

#include "device/types.cuh"
#include "ops/dynamic_attention/cuda/params_hopper.cuh"

namespace fretwork::dynamic_attention_op::hopper {

/// Column tiles n0 … n0 + 31 as a row tile meets them, a bit for each.
struct Chunk {
  u32 all, whole;

  /// Whole tiles that follow each other are one run, as far as the chunk goes.
  __device__ __forceinline__ u32 starts() const { return (all & ~whole) | (whole & ~(whole << 1)); }
};
__device__ __forceinline__ Chunk chunk_of(const WalkParams& p, const u32* words, const Band& band, int n0) {
  const int n = n0 + static_cast<int>(threadIdx.x) % 32, block = n / p.per_block;
  const bool in = n >= band.first && n < band.last && (words[block / 32] >> block % 32 & 1) != 0;
  return {__ballot_sync(~0u, in), __ballot_sync(~0u, in && n >= band.whole && n < band.whole_last)};
}

/// The row tile of a warp, or −1.
__device__ __forceinline__ int warp_tile(const WalkParams& p) {
  const int number = static_cast<int>(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32);
  return number < p.numbers ? number : -1;
}
__device__ __forceinline__ const u32* words_of(const WalkParams& p, int number) {
  const int list = number / p.tiles;
  return p.words + (static_cast<i64>(list) * p.row_blocks + number - list * p.tiles) * p.words_row;
}

/// One warp for each row tile.
__global__ void __launch_bounds__(128) count_runs(const __grid_constant__ WalkParams p) {
  const int number = warp_tile(p);
  if (number < 0) {
    return;
  }
  const Band band = p.bands[number % p.tiles];
  const u32* const words = words_of(p, number);
  int runs = 0, steps = 0;
  for (int n0 = band.first / 32 * 32; n0 < band.last; n0 += 32) {
    const Chunk chunk = chunk_of(p, words, band, n0);
    runs += __popc(chunk.starts());
    steps += __popc(chunk.all);
  }
  if (threadIdx.x % 32 == 0) {
    p.run_count[number] = runs;
    p.steps[number] = steps;
  }
}

/// The part of a column tile that is not whole.
__device__ __forceinline__ int part_of(const Band& band, int n) {
  return band.part + (n < band.whole ? n - band.first : n - band.whole_last + band.whole - band.first);
}

/// One warp for each row tile, when `first` is known.
__global__ void __launch_bounds__(128) write_runs(const __grid_constant__ WalkParams p) {
  const int number = warp_tile(p), lane = static_cast<int>(threadIdx.x) % 32;
  if (number < 0) {
    return;
  }
  const int tile = number % p.tiles, base = tile * kRows;
  for (int row = lane; row < kRows; row += 32) {
    p.row_tokens[static_cast<i64>(number) * kRows + row] = base + row < p.tokens ? base + row : -1;
  }
  if (lane == 0) {
    const int cut = max(0, base + kRows - p.tokens);
    p.row_tiles[number] = {base - cut + p.shift, {0, 0, cut}};
  }
  const Band band = p.bands[tile];
  const u32* const words = words_of(p, number);
  int4* to = reinterpret_cast<int4*>(p.runs + p.first[number]);
  for (int n0 = band.first / 32 * 32; n0 < band.last; n0 += 32) {
    const Chunk chunk = chunk_of(p, words, band, n0);
    const u32 starts = chunk.starts();
    if ((starts >> lane & 1) != 0) {
      int4* const run = to + 2 * __popc(starts & ((1u << lane) - 1));
      if ((chunk.whole >> lane & 1) != 0) {
        const u32 rest = ~(chunk.whole >> lane);
        run[0] = {n0 + lane, rest == 0 ? 32 : __ffs(static_cast<int>(rest)) - 1, 0, 0};
        run[1] = {attention_op::hopper::kWhole, 0, 0, 0};
      } else {
        const Part part = p.parts[part_of(band, n0 + lane)];
        run[0] = {part.tile, 1, 0, 0};
        run[1] = {part.kind, part.low, part.high, part.limit};
      }
    }
    to += 2 * __popc(starts);
  }
}

inline constexpr int kDealThreads = 1024;

/// A row tile among those of all pairs (batch, head).
struct PairTile {
  int number, batch, head;
};
__device__ __forceinline__ PairTile pair_tile(const DealParams& p, int index) {
  const int pair = index / p.tiles, batch = pair / p.heads, head = pair - batch * p.heads;
  const int list = (p.list_batch == 1 ? 0 : batch * p.list_heads) + head / (p.heads / p.list_heads);
  return {list * p.tiles + index - pair * p.tiles, batch, head};
}

/// ranks[n] = how many of `size` loads are smaller, or equal with a smaller index; several threads for each.
__device__ __forceinline__ void rank(const int* loads, int* ranks, int size) {
  const int thread = static_cast<int>(threadIdx.x), parts = kDealThreads / size, length = (size + parts - 1) / parts;
  if (thread < size) {
    ranks[thread] = 0;
  }
  __syncthreads();
  const int part = thread / size, n = thread - part * size;
  if (part < parts) {
    const int own = loads[n], begin = part * length, end = min(size, begin + length);
    int before = 0;
#pragma unroll 8
    for (int m = begin; m < end; ++m) {
      const int other = loads[m];
      before += other < own || (other == own && m < n) ? 1 : 0;
    }
    if (before > 0) {
      atomicAdd(ranks + n, before);
    }
  }
  __syncthreads();
}

/// The sum over the threads of a block of kDealThreads up to each, and over all.
struct Sums {
  int here, all;
};
__device__ __forceinline__ Sums sum_up(int own) {
  __shared__ int sums[kDealThreads / 32];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, sum, step);
    sum += lane >= step ? other : 0;
  }
  if (lane == 31) {
    sums[warp] = sum;
  }
  __syncthreads();
  const int part = lane < kDealThreads / 32 ? sums[lane] : 0;
  int before = lane < warp ? part : 0, all = part;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    before += __shfl_xor_sync(~0u, before, step);
    all += __shfl_xor_sync(~0u, all, step);
  }
  __syncthreads();  // before sums are written again
  return {before + sum, all};
}

/// first[n] = the sum of counts before n.
__device__ __forceinline__ void scan(const int* counts, int* first, int size) {
  int before = 0;
  for (int base = 0; base < size; base += kDealThreads) {
    const int n = base + static_cast<int>(threadIdx.x), own = n < size ? counts[n] : 0;
    const auto [here, all] = sum_up(own);
    if (n < size) {
      first[n] = before + here - own;
    }
    before += all;
  }
  if (threadIdx.x == 0) {
    first[size] = before;
  }
}

/// Numbers 0 … size − 1 in the order of their steps, most first. Which of equal ones comes first is left open: a tile's
/// result is the same whoever makes it.
__device__ __forceinline__ void sort_down(const int* steps, int* sorted, int size) {
  __shared__ int bins[kDealThreads];
  const int thread = static_cast<int>(threadIdx.x);
  const auto bin = [&](int n) { return kDealThreads - 1 - min(steps[n], kDealThreads - 1); };
  bins[thread] = 0;
  __syncthreads();
  for (int n = thread; n < size; n += kDealThreads) {
    atomicAdd(bins + bin(n), 1);
  }
  __syncthreads();
  const int own = bins[thread], here = sum_up(own).here;
  bins[thread] = here - own;
  __syncthreads();
  for (int n = thread; n < size; n += kDealThreads) {
    sorted[atomicAdd(bins + bin(n), 1)] = n;
  }
  __syncthreads();
}

/// One block for all.
__global__ void __launch_bounds__(kDealThreads) deal(const __grid_constant__ DealParams p) {
  constexpr int kOverhead = 2;  // of a tile, in steps, as attention's schedule has it
  __shared__ int loads[kMostCtas], counts[kMostCtas], ranks[kMostCtas], shares[kMostCtas];
  __shared__ int steps[kMostSorted], sorted[kMostSorted];
  const int thread = static_cast<int>(threadIdx.x);
  scan(p.run_count, p.first, p.numbers);
  if (thread < p.ctas) {
    loads[thread] = counts[thread] = 0;
  }
  const int all = p.batch * p.heads * p.tiles, most = p.together * p.tiles;
  for (int base = 0; base < all; base += most) {
    const int size = min(most, all - base);
    const bool sorts = size <= kMostSorted;
    if (sorts) {
      for (int n = thread; n < size; n += kDealThreads) {
        steps[n] = p.steps[pair_tile(p, base + n).number] * p.repeat;
      }
      __syncthreads();
      sort_down(steps, sorted, size);
    }
    for (int begin = 0; begin < size; begin += p.ctas) {
      __syncthreads();
      rank(loads, ranks, p.ctas);
      const int at = thread < p.ctas ? begin + ranks[thread] : size;
      if (at < size) {
        const int index = sorts ? sorted[at] : at;
        const PairTile tile = pair_tile(p, base + index);
        const int work = sorts ? steps[index] : p.steps[tile.number] * p.repeat;
        p.slots[thread * p.rounds + counts[thread]] = {tile.number, tile.batch, tile.head, work};
        ++counts[thread];
        loads[thread] += work + kOverhead;
      }
    }
    __syncthreads();
  }
  const int before = sum_up(thread < p.ctas ? counts[thread] : 0).here;
  if (thread < p.ctas) {
    shares[thread] = before - counts[thread];
    p.share[thread + 1] = before;
  }
  if (thread == 0) {
    p.share[0] = 0;
  }
  __syncthreads();
  for (int n = thread; n < p.ctas * p.rounds; n += kDealThreads) {
    const int cta = n / p.rounds, at = n - cta * p.rounds;
    if (at < counts[cta]) {
      reinterpret_cast<int4*>(p.items)[shares[cta] + at] = reinterpret_cast<const int4*>(p.slots)[n];
    }
  }
}

}  // namespace fretwork::dynamic_attention_op::hopper
