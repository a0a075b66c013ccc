// What the exact fp32 kernels share: copies to shared memory, a thread's operands, its multiplications, and
// activations.
#pragma once

#include "device/activation.cuh"
#include "device/copy_async.cuh"
#include "device/types.cuh"
#include "ops/kronecker/cuda/params.h"
#include "ops/kronecker/cuda/params_ieee.cuh"

namespace fretwork::kronecker::ieee {

/// Copies of one operand's share of a stage into shared memory, as it lies in global memory: Outer lines, Pitch words
/// apart, of Inner words. A thread's copies lie a fixed distance apart, so that a fetch costs few instructions.
/// Whole: no 16 bytes exist in part.
template <int Outer, int Inner, int Pitch, int Threads, bool Whole>
struct Copies {
  static constexpr int kChunks = Inner / 4;  // of 16 bytes
  static constexpr int kAcross =
      (kChunks & -kChunks) < Threads ? kChunks & -kChunks : Threads;  // by neighbouring threads
  static constexpr int kPass = Threads / kAcross, kPasses = (Outer + kPass - 1) / kPass, kBlocks = kChunks / kAcross;

  const float* source;  ///< of this thread's first copy
  i64 outer_stride, block_stride, advance;
  int outer, chunk;  ///< where this thread's first copy is

  /// `inner_stride` elements between runs of Run neighbours; `advance`: from one stage to the next.
  __device__ __forceinline__ Copies(const float* from, i64 outer_apart, i64 inner_apart, int run, i64 stage_apart)
      : outer_stride(outer_apart),
        block_stride(kAcross * 4 / run * inner_apart),
        advance(stage_apart),
        outer(static_cast<int>(threadIdx.x) / kAcross),
        chunk(static_cast<int>(threadIdx.x) % kAcross) {
    source = from + outer * outer_apart + chunk * 4 / run * inner_apart + chunk * 4 % run;
  }

  /// Of `outers` lines that exist with `inners` words each; the rest is not read and becomes zero. The next call is for
  /// the next stage.
  __device__ __forceinline__ void fetch(u32 to, int outers, int inners) {
    const u32 place = to + 4 * (outer * Pitch + chunk * 4);
    if (kPass <= Outer || outer < Outer) {
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const int bytes = 4 * min(4, max(0, inners - 4 * (chunk + block * kAcross)));
        const float* from = source + block * block_stride;
#pragma unroll
        for (int pass = 0; pass < kPasses; ++pass) {
          if (Outer % kPass == 0 || kPass > Outer || outer + pass * kPass < Outer) {
            const u32 there = place + 4 * (pass * kPass * Pitch + block * kAcross * 4);
            const bool exists = outer + pass * kPass < outers;
            if constexpr (Whole) {
              copy_async_16(there, from, exists && bytes > 0);
            } else {
              copy_async_part(there, from, exists ? bytes : 0);
            }
          }
          from += kPass * outer_stride;
        }
      }
    }
    source += advance;
  }

  /// The same where lines may begin anywhere, a word at a time.
  __device__ __forceinline__ void fetch_words(u32 to, int outers, int inners) {
    const float* const from = source - outer * outer_stride - chunk * 4;
#pragma unroll 1
    for (int n = static_cast<int>(threadIdx.x); n < Outer * Inner; n += Threads) {
      const int line = n / Inner, at = n % Inner;
      const bool there = line < outers && at < inners;
      copy_async_4(to + 4 * (line * Pitch + at), there ? from + line * outer_stride + at : source, there ? 4 : 0);
    }
    source += advance;
  }
};

/// Stages of shared memory in turn: one is used while the following are filled.
template <int Stages, int Words>
struct Ring {
  const float *first, *use;
  u32 fill_first, fill;
  i64 left;  ///< of the depth, not yet fetched
  int step;

  __device__ __forceinline__ Ring(const float* stages, i64 depth, int depth_of_stage)
      : first(stages),
        use(stages),
        fill_first(shared_address(stages)),
        fill(fill_first),
        left(depth),
        step(depth_of_stage) {}
  /// Of the stage to fill; not above 0 when nothing is left.
  __device__ __forceinline__ int next_depth() const { return static_cast<int>(max(i64{0}, min(left, i64{step}))); }
  __device__ __forceinline__ void filled() {
    copy_async_commit();
    left -= step;
    fill = fill == fill_first + 4 * (Stages - 1) * Words ? fill_first : fill + 4 * Words;
  }
  __device__ __forceinline__ void used() { use = use == first + (Stages - 1) * Words ? first : use + Words; }
};

template <int N>
struct alignas(4 * N) float_run {
  float at[N];
};

/// Groups of four neighbours, `Apart` from each other.
template <int N, int Apart>
__device__ __forceinline__ void load_along(float (&to)[N], const float* from) {
#pragma unroll
  for (int g = 0; g < N / 4; ++g) {
    const auto four = *reinterpret_cast<const float_run<4>*>(from + g * Apart);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      to[4 * g + e] = four.at[e];
    }
  }
}

/// Neighbours in memory become number n of Deep operands.
template <int Deep, int N>
__device__ __forceinline__ void load_across(float (&to)[Deep][N], int n, const float* from) {
  const auto run = *reinterpret_cast<const float_run<Deep>*>(from);
#pragma unroll
  for (int e = 0; e < Deep; ++e) {
    to[e][n] = run.at[e];
  }
}

template <int M, int N>
__device__ __forceinline__ void multiply_add(float (&sum)[M][N], const float (&a)[M], const float (&b)[N]) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      sum[m][n] = fmaf(a[m], b[n], sum[m][n]);
    }
  }
}

}  // namespace fretwork::kronecker::ieee
