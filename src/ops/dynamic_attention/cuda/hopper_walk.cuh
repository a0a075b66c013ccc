// Writes walks for attention's Hopper kernels: the runs of each row tile, from bits that say which blocks a row block
// meets or from where documents begin, and which CTA does which tiles.
#pragma once

#include "device/scan.cuh"
#include "device/types.cuh"
#include "ops/dynamic_attention/cuda/bits.cuh"
#include "ops/dynamic_attention/cuda/documents.cuh"
#include "ops/dynamic_attention/cuda/params_hopper.cuh"

namespace fretwork::dynamic_attention_op::hopper {

using attention_op::hopper::kBand;
using attention_op::hopper::kWhole;

/// A warp's number in the launch.
__device__ __forceinline__ int warp_number() {
  return static_cast<int>(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32);
}
/// One thread writes a run.
__device__ __forceinline__ void write_run(RunOf* to, int first, int count, int kind, int low, int high, int limit) {
  int4* const words = reinterpret_cast<int4*>(to);
  words[0] = {first, count, 0, 0};
  words[1] = {kind, low, high, limit};
}
/// Tokens [base, base + count) as a tile of `side`; a warp writes them.
__device__ __forceinline__ void write_tile(Place& place, int* tokens, int side, int shift, int base, int count) {
  const int lane = static_cast<int>(threadIdx.x) % 32, lacks = side - count;
  for (int n = lane; n < side; n += 32) {
    tokens[n] = n < count ? base + n : -1;
  }
  if (lane == 0) {
    place = {base - lacks + shift, {0, 0, lacks}};
  }
}
__device__ __forceinline__ void write_row_tile(const RowTiles& p, int number, int base, int count) {
  write_tile(p.places[number], p.tokens + static_cast<i64>(number) * p.side, p.side, p.shift, base, count);
}
__device__ __forceinline__ void write_counts(const RowTiles& p, int number, int first, int runs, int steps) {
  if (threadIdx.x % 32 == 0) {
    p.first[number] = first;
    p.last[number] = first + runs;
    p.steps[number] = steps;
  }
}

/// Row tiles of a list.
__device__ __forceinline__ int tiles_of(const OrderParams& p) {
  return p.tile_count != nullptr ? min(*p.tile_count, p.tiles) : p.tiles;
}

/// Where there are no more row tiles than CTAs, each has one: a warp gives its own to all pairs that have its list.
/// tiles: row tiles of a list.
__device__ __forceinline__ void write_items(const OrderParams& p, int tiles, int number, int steps) {
  if (p.items == nullptr) {
    return;
  }
  const int list = number / tiles, tile = number - list * tiles, lane = static_cast<int>(threadIdx.x) % 32;
  const int heads = p.heads / p.list_heads, batches = p.list_batch == 1 ? p.batch : 1;
  const int batch0 = p.list_batch == 1 ? 0 : list / p.list_heads, head0 = list % p.list_heads * heads;
  for (int n = lane; n < batches * heads; n += 32) {
    const int batch = batch0 + n / heads, head = head0 + n % heads;
    reinterpret_cast<int4*>(p.items)[(batch * p.heads + head) * tiles + tile] = {number, batch, head, steps * p.repeat};
  }
  if (number == 0) {
    for (int cta = lane; cta <= p.ctas; cta += 32) {
      p.share[cta] = min(cta, p.batch * p.heads * tiles);
    }
  }
}

// ------------------------------------------------------------------------------------------------------- blocks

/// Column tiles n0 … n0 + 31 as a row tile meets them, a bit for each.
struct Chunk {
  u32 all, whole;

  /// Whole tiles that follow each other are one run, as far as the chunk goes.
  __device__ __forceinline__ u32 starts() const { return (all & ~whole) | (whole & ~(whole << 1)); }
};
__device__ __forceinline__ Chunk chunk_of(const BlockWalkParams& p, const u32* words, const Band& band, int n0) {
  const int n = n0 + static_cast<int>(threadIdx.x) % 32, block = n / p.col_tiles_each;
  const bool in = n >= band.first && n < band.last && (words[block / 32] >> block % 32 & 1) != 0;
  return {__ballot_sync(~0u, in), __ballot_sync(~0u, in && n >= band.whole && n < band.whole_last)};
}

/// The part of a column tile that is not whole.
__device__ __forceinline__ int part_of(const Band& band, int n) {
  return band.part + (n < band.whole ? n - band.first : n - band.whole_last + band.whole - band.first);
}

/// One warp for each row tile. Runs lie where there is still room: where that is changes nothing.
__global__ void __launch_bounds__(kThreads) write_block_walk(const __grid_constant__ BlockWalkParams p) {
  const int number = warp_number(), lane = static_cast<int>(threadIdx.x) % 32;
  if (number >= p.numbers) {
    return;
  }
  const int list = number / p.tiles, tile = number - list * p.tiles;
  const Band band = p.bands[tile];
  const i64 line = static_cast<i64>(list) * p.row_blocks + tile / p.row_tiles_each;
  const u32* words = p.words + line * p.words_row;
  if (p.words == nullptr) {
    __shared__ u32 own_words[kThreads / 32][kMostWords];
    u32* const own = own_words[threadIdx.x / 32];
    write_line(p.bits, line, own);
    __syncwarp();
    words = own;
  }
  write_row_tile(p, number, tile * p.side, min(p.side, p.rows - tile * p.side));
  int runs = 0, steps = 0;
  for (int n0 = band.first / 32 * 32; n0 < band.last; n0 += 32) {
    const Chunk chunk = chunk_of(p, words, band, n0);
    runs += __popc(chunk.starts());
    steps += __popc(chunk.all);
  }
  const int first =
      p.taken == nullptr ? number * p.most : __shfl_sync(~0u, lane == 0 ? atomicAdd(p.taken, runs) : 0, 0);
  write_counts(p, number, first, runs, steps);
  write_items(p.order, tiles_of(p.order), number, steps);
  RunOf* to = p.runs + first;
  for (int n0 = band.first / 32 * 32; n0 < band.last; n0 += 32) {
    const Chunk chunk = chunk_of(p, words, band, n0);
    const u32 starts = chunk.starts();
    if ((starts >> lane & 1) != 0) {
      RunOf* const run = to + __popc(starts & ((1u << lane) - 1));
      if ((chunk.whole >> lane & 1) != 0) {
        const u32 rest = ~(chunk.whole >> lane);
        write_run(run, n0 + lane, rest == 0 ? 32 : __ffs(static_cast<int>(rest)) - 1, kWhole, 0, 0, 0);
      } else {
        const Part part = p.parts[part_of(band, n0 + lane)];
        write_run(run, part.tile, 1, part.kind, part.low, part.high, part.limit);
      }
    }
    to += __popc(starts);
  }
}

// ---------------------------------------------------------------------------------------------------- documents

__device__ __forceinline__ void write_col_tile(const ColTiles& p, int tile, int base, int count) {
  write_tile(p.places[tile], p.tokens + static_cast<i64>(tile) * p.side, p.side, p.shift, base, count);
  if (threadIdx.x % 32 == 0) {
    p.used[tile] = -1;  // all columns are
  }
}

/// Where the row tiles or the column tiles of each document begin. All threads of the CTA call it.
template <int kThreads>
__device__ __forceinline__ void scan_first_tiles(const DocumentWalkParams& p, bool rows, int* first) {
  const int side = rows ? p.side : p.cols.side;
  scan_counts<kThreads>(first, p.documents.documents + 2, 0, [&](int n) {
    const Document of = document_of(p.documents, n);
    return ((rows ? of.rows : of.cols) + side - 1) / side;
  });
}
/// Of many documents, for all CTAs of write_document_walk: a CTA for either.
__global__ void __launch_bounds__(kScanThreads) scan_tiles(const __grid_constant__ DocumentWalkParams p) {
  const bool rows = blockIdx.x == 0;
  scan_first_tiles<kScanThreads>(p, rows, rows ? p.first_tile : p.cols.first);
}

/// The runs of rows [row, row + count) of a document; a warp writes them.
struct DocumentRuns {
  const DocumentWalkParams& p;
  const Document& of;
  RunOf* to;
  int row, count;
  int first_col;  ///< the document's first column tile
  int own;        ///< the first one of the row tile's own
  int runs = 0, steps = 0;

  /// Tile n of the document, of which the row tile sees columns [begin, end), each row a part.
  __device__ __forceinline__ void add_part(int n, int begin, int end, int own_tile) {
    const ColTiles& cols = p.cols;
    const int from = max(begin, n * cols.side), until = min(end, (n + 1) * cols.side);
    const bool cut = from > n * cols.side || until < min((n + 1) * cols.side, of.cols);
    const int position = row + of.cols - of.rows;  // of the first row
    constexpr int kFar = 1 << 29;
    if (cut) {
      write_col_tile(cols, own_tile, of.col + from, until - from);
    }
    const int low = p.documents.left < 0 ? -kFar : position - p.documents.left - from;
    const int high = p.documents.right < 0 ? kFar : position + p.documents.right - from;
    add_run(cut ? own_tile : first_col + n, 1, kBand, low, high, until - from);
  }
  __device__ __forceinline__ void add_run(int tile, int tiles, int kind, int low, int high, int limit) {
    if (threadIdx.x % 32 == 0) {
      write_run(to + runs, tile, tiles, kind, low, high, limit);
    }
    ++runs;
    steps += tiles;
  }

  __device__ __forceinline__ void write() {
    const int side = p.cols.side, left = p.documents.left, right = p.documents.right;
    const int position = row + of.cols - of.rows, last_position = position + count - 1;
    const int begin = left < 0 ? 0 : max(0, position - left);
    const int end = right < 0 ? of.cols : min(of.cols, last_position + right + 1);
    if (begin >= end) {
      return;
    }
    const int first = begin / side, last = (end + side - 1) / side;
    int whole = left < 0 ? 0 : (max(0, last_position - left) + side - 1) / side;
    int whole_last = right < 0 ? of.cols / side : max(0, min(of.cols, position + right + 1)) / side;
    if (whole >= whole_last) {
      whole = whole_last = last;
    }
    for (int n = first; n < whole; ++n) {
      add_part(n, begin, end, own + (n == first ? 0 : 1));
    }
    if (whole < whole_last) {
      add_run(first_col + whole, whole_last - whole, kWhole, 0, 0, 0);
    }
    for (int n = whole_last; n < last; ++n) {
      add_part(n, begin, end, own + (n == first ? 0 : 1));
    }
  }
};

/// A warp for each row tile, then one for each column tile.
__global__ void __launch_bounds__(kThreads) write_document_walk(const __grid_constant__ DocumentWalkParams p) {
  __shared__ int firsts[2][kFewDocuments + 3];
  const int warp = warp_number(), all = p.documents.documents + 2;
  const bool few = p.documents.documents <= kFewDocuments;
  const int *const first_row = few ? firsts[0] : p.first_tile, *const first_col = few ? firsts[1] : p.cols.first;
  if (few) {
    scan_first_tiles<kThreads>(p, true, firsts[0]);
    scan_first_tiles<kThreads>(p, false, firsts[1]);
    __syncthreads();
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      p.first_tile[all] = firsts[0][all];  // for order_items
    }
  }
  if (warp < p.capacity) {
    const int tiles = first_row[all];
    if (warp >= tiles) {
      return;
    }
    const int n = last_at(all, warp, [&](int d) { return first_row[d]; });
    const Document of = document_of(p.documents, n);
    const int row = (warp - first_row[n]) * p.side, count = min(p.side, of.rows - row);
    write_row_tile(p, warp, of.row + row, count);
    DocumentRuns runs{
        p, of, p.runs + static_cast<i64>(warp) * kDocumentRuns, row, count, first_col[n], p.cols.capacity + 2 * warp};
    if (first_col[n + 1] <= p.cols.capacity) {  // starts that do not ascend need more
      runs.write();
    }
    write_counts(p, warp, warp * kDocumentRuns, runs.runs, runs.steps);
    write_items(p.order, min(tiles, p.order.tiles), warp, runs.steps);
    return;
  }
  const int tile = warp - p.capacity;
  if (tile >= min(p.cols.capacity, first_col[all])) {
    return;
  }
  const int n = last_at(all, tile, [&](int d) { return first_col[d]; });
  const Document of = document_of(p.documents, n);
  const int col = (tile - first_col[n]) * p.cols.side;
  write_col_tile(p.cols, tile, of.col + col, min(p.cols.side, of.cols - col));
}

// -------------------------------------------------------------------------------------------------------- order

/// A row tile among those of all pairs (batch, head).
struct PairTile {
  int number, batch, head;
};
__device__ __forceinline__ PairTile pair_tile(const OrderParams& p, int tiles, int index) {
  const int pair = index / tiles, batch = pair / p.heads, head = pair - batch * p.heads;
  const int list = (p.list_batch == 1 ? 0 : batch * p.list_heads) + head / (p.heads / p.list_heads);
  return {list * tiles + index - pair * tiles, batch, head};
}

/// Items of a CTA begin here, where `all` are dealt out to `ctas` of them.
__device__ __forceinline__ int share_of(int all, int ctas, int cta) {
  const int rounds = all / ctas, rest = all - rounds * ctas;
  return cta * rounds + (rounds % 2 == 0 ? min(cta, rest) : max(0, cta - (ctas - rest)));
}

/// One CTA for each group. Which of equally long tiles comes first is left open: a tile's result is the same on
/// any CTA.
__global__ void __launch_bounds__(kOrderThreads) order_items(const __grid_constant__ OrderParams p) {
  __shared__ int bins[kOrderThreads];
  const int thread = static_cast<int>(threadIdx.x);
  const int tiles = tiles_of(p), pairs = p.batch * p.heads;
  const int pair0 = static_cast<int>(blockIdx.x) * p.together, first = pair0 * tiles;
  const int size = min(p.together, pairs - pair0) * tiles, all = pairs * tiles;
  const auto bin = [&](int steps) { return kOrderThreads - 1 - min(steps >> p.coarse, kOrderThreads - 1); };
  bins[thread] = 0;
  __syncthreads();
  for (int n = thread; n < size; n += kOrderThreads) {
    atomicAdd(bins + bin(p.steps[pair_tile(p, tiles, first + n).number]), 1);
  }
  __syncthreads();
  const int own = bins[thread], here = scan_cta<kOrderThreads>(own).here;
  bins[thread] = first + here - own;
  __syncthreads();
  for (int n = thread; n < size; n += kOrderThreads) {
    const PairTile tile = pair_tile(p, tiles, first + n);
    const int steps = p.steps[tile.number], rank = atomicAdd(bins + bin(steps), 1);
    const int round = rank / p.ctas, turn = rank - round * p.ctas, cta = round % 2 == 0 ? turn : p.ctas - 1 - turn;
    reinterpret_cast<int4*>(p.items)[share_of(all, p.ctas, cta) + round] = {tile.number, tile.batch, tile.head,
                                                                            steps * p.repeat};
  }
  if (blockIdx.x == 0) {
    for (int cta = thread; cta <= p.ctas; cta += kOrderThreads) {
      p.share[cta] = share_of(all, p.ctas, cta);
    }
  }
}

}  // namespace fretwork::dynamic_attention_op::hopper
