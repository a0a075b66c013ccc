// Tiles of scores on mma.sync: the products that make and use them, and their masks.
#pragma once

#include "device/tile.cuh"
#include "ops/attention/cuda/walk.cuh"

namespace fretwork {

/// Where a lane reads fragments of a tile. The four places in 128 bytes that 16 entries can begin at differ in two
/// bits, and all else is a distance that the compiler knows: one register.
template <int Bytes>
struct Fragments {
  u32 base;

  __device__ __forceinline__ Fragments(shared_tile<Bytes> tile, u32 line, u32 half) : base(tile.chunk(line, half)) {}
  /// Of a tile in another order of chunks, in which they are permuted by the lowest three bits of the line too.
  __device__ __forceinline__ explicit Fragments(u32 first) : base(first) {}
  __device__ __forceinline__ u32 operator()(int line, int entry) const {
    return (base ^ static_cast<u32>(entry / 16 % 4 * 32)) + static_cast<u32>(entry / 64 * 128 + line * Bytes);
  }
  /// The same in a tile `bytes` further on.
  __device__ __forceinline__ Fragments operator+(u32 bytes) const {
    Fragments moved = *this;
    moved.base += bytes;
    return moved;
  }
};
/// Of a left operand with K along its lines, and of a right operand with K across them; rows from `row`.
template <int Bytes>
__device__ __forceinline__ Fragments<Bytes> fragments_across(shared_tile<Bytes> tile, int row) {
  const u32 lane = threadIdx.x % 32;
  return Fragments<Bytes>(tile, static_cast<u32>(row) + lane % 16, lane / 16);
}
/// Of a right operand with K along its lines.
template <int Bytes>
__device__ __forceinline__ Fragments<Bytes> fragments_along(shared_tile<Bytes> tile) {
  const u32 lane = threadIdx.x % 32;
  return Fragments<Bytes>(tile, lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

/// The same where a loop would rather keep the register than compute it in every turn.
template <int Bytes>
__device__ __forceinline__ Fragments<Bytes> kept(Fragments<Bytes> from) {
  from.base = kept(from.base);
  return from;
}

/// Fragments of a right operand are asked for so many loads before they are used.
inline constexpr int kAhead = 3;

/// sums += left·rightᵀ, both tiles' lines along K.
template <typename T, int Depth, int Frags, int Cols, int Bytes>
__device__ __forceinline__ void multiply_lines(register_sums<Frags, Cols / 8>& sums, const Fragments<Bytes>& left,
                                               const Fragments<Bytes>& right) {
  constexpr int kAcross = Cols / 16, kAll = Depth / 16 * kAcross, kRing = kAhead + 1;
  u32 a[2][Frags][4], b[kRing][4];
  const auto ask_left = [&](int k) {
#pragma unroll
    for (int i = 0; i < Frags; ++i) {
      ldmatrix(a[k % 2][i], left(16 * i, 16 * k));
    }
  };
  const auto ask_right = [&](int n) { ldmatrix(b[n % kRing], right(n % kAcross * 16, n / kAcross * 16)); };
  ask_left(0);
#pragma unroll
  for (int n = 0; n < min(kAhead, kAll); ++n) {
    ask_right(n);
  }
#pragma unroll
  for (int n = 0; n < kAll; ++n) {
    if (n % kAcross == 0 && n + kAcross < kAll) {
      ask_left(n / kAcross + 1);
    }
    if (n + kAhead < kAll) {
      ask_right(n + kAhead);
    }
#pragma unroll
    for (int i = 0; i < Frags; ++i) {
      mma_sync<T>(sums.at[i][n % kAcross * 2], a[n / kAcross % 2][i], b[n % kRing][0], b[n % kRing][1]);
      mma_sync<T>(sums.at[i][n % kAcross * 2 + 1], a[n / kAcross % 2][i], b[n % kRing][2], b[n % kRing][3]);
    }
  }
}

/// What multiply_across does to right's fragments: nothing.
struct keep_all {
  __device__ __forceinline__ void operator()(int, u32 (&)[4]) const {}
};

/// sums += left·right: left in fragments, 16 along K each, and right's lines run across K. keep(k, fragments) may
/// change those of the k-th 16 lines first.
template <typename T, int Depth, int Frags, int Cols, int Bytes, typename Keep = keep_all>
__device__ __forceinline__ void multiply_across(register_sums<Frags, Depth / 8>& sums,
                                                const u32 (&left)[Cols / 16][Frags][4], const Fragments<Bytes>& right,
                                                const Keep& keep = {}) {
  constexpr int kAcross = Depth / 16, kAll = Cols / 16 * kAcross, kRing = kAhead + 1;
  u32 b[kRing][4];
  const auto ask = [&](int n) { ldmatrix_trans(b[n % kRing], right(n / kAcross * 16, n % kAcross * 16)); };
#pragma unroll
  for (int n = 0; n < min(kAhead, kAll); ++n) {
    ask(n);
  }
#pragma unroll
  for (int n = 0; n < kAll; ++n) {
    if (n + kAhead < kAll) {
      ask(n + kAhead);
    }
    keep(n / kAcross, b[n % kRing]);
#pragma unroll
    for (int i = 0; i < Frags; ++i) {
      mma_sync<T>(sums.at[i][n % kAcross * 2], left[n / kAcross][i], b[n % kRing][0], b[n % kRing][1]);
      mma_sync<T>(sums.at[i][n % kAcross * 2 + 1], left[n / kAcross][i], b[n % kRing][2], b[n % kRing][3]);
    }
  }
}

/// What a product left in registers, as the left operand of another.
template <typename T, int Frags, int Eights>
__device__ __forceinline__ void narrow_sums(u32 (&left)[Eights / 2][Frags][4],
                                            const register_sums<Frags, Eights>& sums) {
#pragma unroll
  for (int k = 0; k < Eights / 2; ++k) {
#pragma unroll
    for (int i = 0; i < Frags; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float* from = sums.at[i][2 * k + e / 2] + e % 2 * 2;
        left[k][i][e] = narrow_pair<T>(from[0], from[1]);
      }
    }
  }
}

/// multiply_across where left is what an earlier product left in registers.
template <typename T, int Depth, int Frags, int Cols, int Bytes>
__device__ __forceinline__ void multiply_sums(register_sums<Frags, Depth / 8>& sums,
                                              const register_sums<Frags, Cols / 8>& left,
                                              const Fragments<Bytes>& right) {
  u32 a[Cols / 16][Frags][4];
  narrow_sums<T>(a, left);
  multiply_across<T, Depth, Frags, Cols>(sums, a, right);
}

/// Calls f(fragment, half, j, e, entry) for the entries of a lane.
template <int Frags, int Cols, typename F>
__device__ __forceinline__ void each_score(register_sums<Frags, Cols>& s, const F& f) {
#pragma unroll
  for (int i = 0; i < Frags; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < Cols; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          f(i, half, j, e, s.at[i][j][2 * half + e]);
        }
      }
    }
  }
}

/// Which of a lane's entries a step has: a word for 32 columns of each of its rows, shifted to the lane's columns.
/// Used: columns may be padding, which no mask knows of.
template <int Frags, int Cols, bool Used>
struct MaskWords {
  u32 word[Frags][2][Cols / 32];

  template <typename Plan>
  __device__ __forceinline__ MaskWords(const Plan& plan, const Step& step, int warp_row) {
    const auto mask = mask_of<Cols>(plan, step);
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < Frags; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int w = 0; w < Cols / 32; ++w) {
          word[i][half][w] = (mask_word<Cols>(mask, plan.bits, warp_row + 16 * i + 8 * half + lane / 4, w) &
                              (Used ? used_word(plan, step, w) : ~0u)) >>
                             (lane % 4 * 2);
        }
      }
    }
  }
  __device__ __forceinline__ bool operator()(int i, int half, int j, int e) const {
    return (word[i][half][j / 4] >> (j % 4 * 8 + e) & 1) != 0;
  }
};

/// Takes out the scores that a step does not have. Word by word: registers are few.
template <int Frags, int Cols, typename Plan>
__device__ __forceinline__ void apply_mask(register_sums<Frags, Cols / 8>& s, const Plan& plan, const Step& step,
                                           int warp_row) {
  const auto mask = mask_of<Cols>(plan, step);
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < Frags; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int w = 0; w < Cols / 32; ++w) {
        const int row = warp_row + 16 * i + 8 * half + lane / 4;
        const u32 word = (mask_word<Cols>(mask, plan.bits, row, w) & used_word(plan, step, w)) >> (lane % 4 * 2);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          float& x = s.at[i][4 * w + n / 2][2 * half + n % 2];
          x = (word >> (n / 2 * 8 + n % 2) & 1) != 0 ? x : -infinity();
        }
      }
    }
  }
}

/// Sums on their way out: rows of floats in shared memory, so that what is written and merged is written in whole rows
/// and by little code. Lines are padded as attention_op::staging_bytes counts.
template <int Depth>
struct Staging {
  static constexpr int kLine = Depth + 8;
  float* data;

  /// A warp's rows and 8 · Eights columns from `col` on, times factor(fragment, half).
  template <int Frags, int Eights, typename Factor>
  __device__ __forceinline__ void put(const register_sums<Frags, Eights>& sums, int warp_row, int col,
                                      const Factor& factor) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < Frags; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float by = factor(i, half);
        float* const row = data + (warp_row + 16 * i + 8 * half + lane / 4) * kLine + col + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < Eights; ++j) {
          *reinterpret_cast<float2*>(row + 8 * j) =
              float2{sums.at[i][j][2 * half] * by, sums.at[i][j][2 * half + 1] * by};
        }
      }
    }
  }
  /// Calls f(row, col, eight neighbours) for all that lies before `depth`.
  template <int Rows, int Threads, typename F>
  __device__ __forceinline__ void each(int depth, const F& f) const {
    constexpr int kEights = Depth / 8;
#pragma unroll 1
    for (int n = static_cast<int>(threadIdx.x); n < Rows * kEights; n += Threads) {
      const int row = n / kEights, col = n % kEights * 8;
      if (col < depth) {
        const float4 low = *reinterpret_cast<const float4*>(data + row * kLine + col);
        const float4 high = *reinterpret_cast<const float4*>(data + row * kLine + col + 4);
        float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        f(row, col, x);
      }
    }
  }
};

}  // namespace fretwork
