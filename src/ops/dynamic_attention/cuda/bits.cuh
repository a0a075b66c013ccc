// Which blocks a row block meets, a bit for each, from a mask or from lists.
#pragma once

#include "device/types.cuh"
#include "ops/dynamic_attention/cuda/params.h"

namespace fretwork::dynamic_attention_op {

/// A warp writes line `index` of all lists.
__device__ __forceinline__ void write_line(const BitsParams& p, i64 index, u32* line) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const i64 list = index / p.rows, row = index - list * p.rows, batch = list / p.heads, head = list - batch * p.heads;
  const auto place = [&](const TableArg& of) { return batch * of.batch + head * of.head + row * of.row; };
  if (p.mask.data != nullptr) {
    const u8* const from = static_cast<const u8*>(p.mask.data) + place(p.mask);
    for (int c = lane; c < p.words_row * 32; c += 32) {
      const u32 word = __ballot_sync(~0u, c < p.cols && from[c * p.mask.col] != 0);
      if (lane == 0) {
        line[c / 32] = word;
      }
    }
    return;
  }
  for (int w = lane; w < p.words_row; w += 32) {
    line[w] = 0;
  }
  __syncwarp();
  const int count =
      p.counts.data != nullptr ? min(static_cast<const int*>(p.counts.data)[place(p.counts)], p.entries) : p.entries;
  const int* const from = static_cast<const int*>(p.indices.data) + place(p.indices);
  for (int n = lane; n < count; n += 32) {
    const int c = from[n * p.indices.col];
    if (c >= 0 && c < p.cols) {
      atomicOr(line + c / 32, 1u << (c % 32));
    }
  }
}

}  // namespace fretwork::dynamic_attention_op
