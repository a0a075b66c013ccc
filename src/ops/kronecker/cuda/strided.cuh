// Batch first, d > 1, on the tensor cores of sm_80 and later, without transposing x: y[n,(i,j,l)] = activation(Σ_k
// w[i,j,k,l]·x[n,(i,k,l)] + bias).
//
// A CTA multiplies V neighbouring δ at once. A lane's 16-byte load at (n, k) holds neighbouring δ; byte permutes pair
// the halves of the loads at k and k + 1 into the A fragments of the products of these δ. Weights are packed
// beforehand, so ldmatrix gives B fragments. Per step a warp reads 512·V bytes of x and 8 KB of weights from shared
// memory for 131 KFLOP. At 128 bytes per clock that is 1,000 to 1,800 FLOP per clock, enough to keep up with memory to
// b = c = 128. Where the weights of a CTA fit on chip (V·b·c up to 64K of 16 bits) they stay, and L2 delivers x once
// per slab of columns. Otherwise weights are fetched again with every tile of rows, and L2 (24 bytes per clock) is the
// limit.
#pragma once

#include "device/activation.cuh"
#include "device/copy_async.cuh"
#include "device/load.cuh"
#include "device/mma.cuh"
#include "device/tile.cuh"
#include "device/types.cuh"
#include "ops/kronecker/cuda/params.h"

// ----------------------------------------------------------------------------------------------------
// Tiles of V neighbouring δ: copying [row][k][δ] to shared memory, and 16-byte loads that each serve the fragments of
// several products.

namespace fretwork::kronecker::strided {

struct alignas(16) quad {
  u32 word[4];
};

__device__ __forceinline__ quad load_quad(u32 address) {
  quad v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "r"(address));
  return v;
}

/// Waits for all but the newest `ring` − 2 groups.
__device__ __forceinline__ void wait_ring(int ring) {
  if (ring == 4) {
    copy_async_wait<2>();
  } else if (ring == 3) {
    copy_async_wait<1>();
  } else {
    copy_async_wait<0>();
  }
}

/// One chunk of a row: elements (k, δ) from k = `k` on, of `limit` in all; `from` points to (k, δ 0). A chunk holds
/// part of the V of one k, or with V < chunk all of several k, neighbours in memory when `flat`.
template <typename T, int V>
__device__ __forceinline__ void copy_chunk(u32 to, const T* from, int k, int limit, int d, bool row_inside, bool flat) {
  constexpr int kChunk = chunk_of<T>;
  constexpr int kSize = static_cast<int>(sizeof(T));
  if constexpr (V >= kChunk) {
    copy_async_part(to, from, row_inside && k < limit ? 16 : 0);
  } else {
    constexpr int kMany = kChunk / V;
    const int left = row_inside ? limit - k : 0;
    if (flat) {
      copy_async_part(to, from, left >= kMany ? 16 : left > 0 ? left * V * kSize : 0);
    } else {
#pragma unroll
      for (int m = 0; m < kMany; ++m) {
        const T* element = m < left ? from + static_cast<i64>(m) * d : from;
        if constexpr (V * kSize == 8) {
          copy_async_small<8>(to + 8 * m, element, m < left ? 8 : 0);
        } else {
          copy_async_4(to + 4 * m, element, m < left ? 4 : 0);
        }
      }
    }
  }
}

/// The part of chunk `q` that is its k, and its first δ.
template <typename T, int V>
__device__ __forceinline__ int chunk_k(int q) {
  return V >= chunk_of<T> ? q / (V >= chunk_of<T> ? V / chunk_of<T> : 1) : q * (chunk_of<T> / V);
}
template <typename T, int V>
__device__ __forceinline__ int chunk_delta(int q) {
  return V > chunk_of<T> ? q % (V / chunk_of<T>)*chunk_of<T> : 0;
}

/// Where chunk `q` of row `n` of a stage lies, XORed to q: the eight lanes that load together (two rows, four k) then
/// meet eight different 16-byte banks.
template <typename T, int V>
__device__ __forceinline__ u32 x_swizzle(u32 n, u32 q) {
  constexpr int kChunk = chunk_of<T>;
  if constexpr (V > kChunk && sizeof(T) == 2) {
    return (q >> 3 & 1) | (n & 1) << 1;
  } else if constexpr (sizeof(T) == 2 ? 2 * V >= kChunk : V > kChunk) {
    return n & 1;
  } else {
    return (n & 1) << 2;
  }
}

/// A fragments of one step for min(V, chunk) products, from part `part` of the δ. `line` is the lane's row.
template <typename T, int V, int Pitch>
__device__ __forceinline__ void load_left(u32 (&a)[V < chunk_of<T> ? V : chunk_of<T>][4], u32 line, u32 row, u32 lane,
                                          int step, int part) {
  constexpr int kChunk = chunk_of<T>, kMany = V < kChunk ? V : kChunk;
  constexpr u32 kParts = V > kChunk ? V / kChunk : 1;
  // The chunk of a load is the lane's own bits and constant ones, which XOR into different bits.
  const u32 t = lane % 4;
  const u32 own = sizeof(T) == 2 && 2 * V >= kChunk ? 2 * t * kParts : t * kParts;
  const u32 first = own ^ x_swizzle<T, V>(row, own);
  const auto at = [&](u32 half_row, u32 chunk) {
    return load_quad(line + half_row * 8 * Pitch + ((first ^ (chunk & 7)) << 4) + (chunk & ~7u) * 16);
  };
#pragma unroll
  for (int u = 0; u < 2; ++u) {  // rows g and g + 8
    if constexpr (sizeof(T) == 2 && V >= kChunk) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {  // k and k + 8
        const u32 chunk = (16 * step + 8 * h) * kParts + part;
        const quad even = at(u, chunk), odd = at(u, chunk + kParts);
#pragma unroll
        for (int e = 0; e < kMany; ++e) {
          a[e][2 * h + u] = pair_halves(even.word[e / 2], odd.word[e / 2], e % 2);
        }
      }
    } else if constexpr (sizeof(T) == 2 && 2 * V == kChunk) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const quad both = at(u, 8 * step + h);
#pragma unroll
        for (int e = 0; e < kMany; ++e) {
          a[e][2 * h + u] = pair_halves(both.word[e / 2], both.word[2 + e / 2], e % 2);
        }
      }
    } else if constexpr (sizeof(T) == 2) {
      const quad four = at(u, 4 * step);
#pragma unroll
      for (int e = 0; e < kMany; ++e) {
        a[e][u] = pair_halves(four.word[0], four.word[1], e);
        a[e][2 + u] = pair_halves(four.word[2], four.word[3], e);
      }
    } else if constexpr (V >= kChunk) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {  // k and k + 4
        const quad own_k = at(u, (8 * step + 4 * h) * kParts + part);
#pragma unroll
        for (int e = 0; e < kMany; ++e) {
          a[e][2 * h + u] = own_k.word[e];
        }
      }
    } else {
      const quad both = at(u, 4 * step);
#pragma unroll
      for (int e = 0; e < kMany; ++e) {
        a[e][u] = both.word[e];
        a[e][2 + u] = both.word[2 + e];
      }
    }
  }
}

/// Four words of V (or half of V) sums that neighbour each other in y.
template <typename T, int Blocks, int V>
__device__ __forceinline__ void pack_words(u32* words, const float (&sums)[V][Blocks][4], int first, int count, int q,
                                           int r) {
#pragma unroll
  for (int w = 0; w < count; ++w) {
    if constexpr (sizeof(T) == 2) {
      words[w] = narrow_pair<T>(sums[first + 2 * w][q][r], sums[first + 2 * w + 1][q][r]);
    } else {
      words[w] = __float_as_uint(sums[first + w][q][r]);
    }
  }
}

/// A warp has `Columns` of each of V products.
template <typename T, int V, int WM, int Columns = 256 / V>
struct Product {
  static constexpr Tile kTile{static_cast<int>(sizeof(T)), V, WM};
  static constexpr int kChunk = chunk_of<T>, kBlocks = Columns / 8;
  static constexpr int kPitch = kTile.line() * 16;
  using Sums = float[V][kBlocks][4];

  /// One stage's chunks of x, four or eight for each thread. `from` is (row 0, k 0, δ 0) of the tile and stage.
  static __device__ __forceinline__ void ask_x(const ProductParams& p, u32 to, const T* from, int k0, int rows) {
    constexpr int kLine = kTile.line(), kRows = kThreads / kLine;
    const int q = static_cast<int>(threadIdx.x) % kLine, row = static_cast<int>(threadIdx.x) / kLine;
    const int k = chunk_k<T, V>(q);
    const T* chunk = from + static_cast<i64>(k) * p.d + chunk_delta<T, V>(q);
#pragma unroll 2
    for (int z = 0; z < kTile.rows() / kRows; ++z) {
      const int n = row + z * kRows;
      const bool inside = n < rows && k0 + k < p.c;
      copy_chunk<T, V>(to + n * kPitch + ((q ^ x_swizzle<T, V>(n, q)) << 4),
                       inside ? chunk + n * p.x_stride : static_cast<const T*>(p.x), k0 + k, p.c, p.d, inside,
                       p.x_flat);
    }
  }

  static __device__ __forceinline__ void copy_bytes(u32 to, const u8* from, int bytes) {
    for (int at = static_cast<int>(threadIdx.x) * 16; at < bytes; at += kThreads * 16) {
      copy_async_16(to + at, from + at, true);
    }
  }

  /// Adds a stage's products. `columns` of this warp's are wanted.
  template <int Products>
  static __device__ __forceinline__ void multiply_stage(Sums& sums, u32 x, u32 w, int row, int slab, int columns) {
    constexpr int kParts = V > kChunk ? V / kChunk : 1, kMany = V / kParts;
    constexpr int kUnit = kTile.unit() / 16;
    const u32 lane = threadIdx.x % 32, g = lane / 4;
    const u32 line = x + (row + g) * kPitch;
    const u32 column = lane / 16 * 8 + lane % 8;
    const u32 right = w + column * 32 + ((lane / 8 % 2) ^ (column >> 2 & 1)) * 16;
#pragma unroll 1
    for (int step = 0; step < kTile.steps(); ++step) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        u32 a[kMany][4];
        load_left<T, V, kPitch>(a, line, g, lane, step, part);
        mma_operand<T, Products> left[kMany];
#pragma unroll
        for (int e = 0; e < kMany; ++e) {
          left[e].set(a[e]);
        }
#pragma unroll
        for (int block = 0; block < kTile.columns() / 16; block += kUnit) {
          if (block * 16 < columns) {
#pragma unroll
            for (int e = 0; e < kMany; ++e) {
#pragma unroll
              for (int n = block; n < block + kUnit; ++n) {
                u32 b[4];
                ldmatrix(b, right + ((step * V + part * kMany + e) * slab + n * 16) * 32);
                mma_operand<T, Products> both;
                both.set(b);
                multiply(sums[part * kMany + e][2 * n], left[e], both, 0);
                multiply(sums[part * kMany + e][2 * n + 1], left[e], both, 2);
              }
            }
          }
        }
      }
    }
  }

  /// Column of y, inside a block of eight, of a lane's sum e (0 or 1).
  static __device__ __forceinline__ int column_of(int t, int e) { return V >= kChunk ? 4 * e + t : 2 * t + e; }

  /// Sums begin with the bias, which points to (i, j 0 of the warp, δ 0), if there is one: its loads are under way
  /// before the products need them. Columns that are not wanted load from where there certainly is something.
  static __device__ __forceinline__ void start(const ProductParams& p, Sums& sums, const T* bias, int columns) {
    constexpr int kMany = V < kChunk ? V : kChunk;
    const int t = static_cast<int>(threadIdx.x) % 4;
    int stride = p.bias_stride;
    asm volatile("" : "+r"(stride));  // the places are not worth registers between tiles
    const auto fill = [&](const auto& load) {
#pragma unroll
      for (int q = 0; q < kBlocks; ++q) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int j = 8 * q + column_of(t, e);
          const T* from = j < columns ? bias + j * p.d * stride : static_cast<const T*>(p.bias);
#pragma unroll
          for (int part = 0; part < V; part += kMany) {
            float add[kMany] = {};
            load(add, from + part * stride);
#pragma unroll
            for (int l = 0; l < kMany; ++l) {
              sums[part + l][q][e] = sums[part + l][q][2 + e] = j < columns ? add[l] : 0.0f;
            }
          }
        }
      }
    };
    if (p.bias_vector) {
      fill([](float(&add)[kMany], const T* from) {
        const auto some = load_run<T, kMany>(from);
#pragma unroll
        for (int l = 0; l < kMany; ++l) {
          add[l] = widen(some.at(l));
        }
      });
    } else if (bias != nullptr) {
      fill([&](float(&add)[kMany], const T* from) {
#pragma unroll
        for (int l = 0; l < kMany; ++l) {
          add[l] = widen(from[l * stride]);
        }
      });
    } else {
      fill([](float(&)[kMany], const T*) {});
    }
  }

  /// Activates a quarter of the sums at a time, which then move on in a circle, so that the code is a quarter as long.
  static __device__ __forceinline__ void finish(Sums& sums, int activation) {
    constexpr int kAll = V * kBlocks * 4, kSome = kAll / 4;
    float(&all)[kAll] = reinterpret_cast<float(&)[kAll]>(sums);
#pragma unroll 1
    for (int quarter = 0; quarter < 4; ++quarter) {
      if constexpr (sizeof(T) == 2) {
        activate(reinterpret_cast<float(&)[kSome]>(sums), activation);
      } else {
#pragma unroll
        for (int n = 0; n < kSome; ++n) {
          all[n] = activate_exactly(all[n], activation);
        }
      }
#pragma unroll
      for (int n = 0; n < kSome; ++n) {  // four exchange places
        const float first = all[n];
        all[n] = all[n + kSome];
        all[n + kSome] = all[n + 2 * kSome];
        all[n + 2 * kSome] = all[n + 3 * kSome];
        all[n + 3 * kSome] = first;
      }
    }
  }

  /// Rows g and g + 8 of the warp, of `rows` wanted; `out` is (row 0, i, j 0, δ 0).
  static __device__ __forceinline__ void store(const ProductParams& p, const Sums& sums, T* out, i64 rows,
                                               int columns) {
    const int lane = static_cast<int>(threadIdx.x) % 32, t = lane % 4;
    // Only whole chunks of 16 bytes, or with few δ the two columns of a lane together.
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const int n = lane / 4 + 8 * u;
      T* to =
          out + n * p.y_stride + (V > kChunk ? t / 2 * 2 : column_of(t, 0)) * p.d + (V > kChunk ? t % 2 * kChunk : 0);
#pragma unroll
      for (int q = 0; q < kBlocks; ++q, to += 8 * p.d) {
        if (8 * q >= columns) {
          break;
        }
        const bool row_inside = n < rows;
        if constexpr (V > kChunk) {
          // Lanes t and t ^ 1 exchange halves, so that together they store 32 neighbouring bytes.
          const bool odd = t % 2 != 0;
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            u32 low[4], high[4], first[4], second[4];
            pack_words<T>(low, sums, 0, 4, q, 2 * u + e);
            pack_words<T>(high, sums, kChunk, 4, q, 2 * u + e);
#pragma unroll
            for (int w = 0; w < 4; ++w) {
              const u32 other = __shfl_xor_sync(0xffffffffu, odd ? low[w] : high[w], 1);
              first[w] = odd ? other : low[w];
              second[w] = odd ? high[w] : other;
            }
            const int j = 8 * q + 4 * e + t / 2 * 2;
            if (row_inside && j < columns) {
              store_words<4>(to + 4 * e * p.d, first);
            }
            if (row_inside && j + 1 < columns) {
              store_words<4>(to + (4 * e + 1) * p.d, second);
            }
          }
        } else if constexpr (V == kChunk) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            u32 words[4];
            pack_words<T>(words, sums, 0, 4, q, 2 * u + e);
            if (row_inside && 8 * q + 4 * e + t < columns) {
              store_words<4>(to + 4 * e * p.d, words);
            }
          }
        } else {
          constexpr int kWords = 4 * V / kChunk;
          u32 words[2 * kWords];
          pack_words<T>(words, sums, 0, kWords, q, 2 * u);
          pack_words<T>(words + kWords, sums, 0, kWords, q, 2 * u + 1);
          const int j = 8 * q + 2 * t;
          if (row_inside && p.y_flat && j + 1 < columns) {
            store_words<2 * kWords>(to, words);
          } else if (row_inside) {
            if (j < columns) {
              store_words<kWords>(to, words);
            }
            if (j + 1 < columns) {
              store_words<kWords>(to + p.d, words + kWords);
            }
          }
        }
      }
    }
  }
};

/// CTA: group (slab of columns, then δ, then i) and piece of the batch. The ring of stages runs on across its tiles.
template <typename T, int Products, int V, int WM>
__global__ void __launch_bounds__(kThreads, 1) product(const __grid_constant__ ProductParams p) {
  using Work = Product<T, V, WM>;
  constexpr Tile kTile = Work::kTile;
  extern __shared__ __align__(128) u8 shared[];
  const int group = static_cast<int>(blockIdx.x) % p.groups, piece = static_cast<int>(blockIdx.x) / p.groups;
  const int slab = group % p.slabs, block = group / p.slabs;
  const int deltas = p.d / V, i = block / deltas, l = block % deltas * V;
  const i64 tiles = (p.batch + kTile.rows() - 1) / kTile.rows();
  const i64 first = tiles * piece / p.pieces, last = tiles * (piece + 1) / p.pieces;

  const int warp = static_cast<int>(threadIdx.x) / 32, row = warp / kTile.wn() * 16;
  const int column = slab * p.slab + warp % kTile.wn() * p.columns;  // the warp's first
  const int columns = min(p.columns, p.b - column);                  // may be negative
  const T* x = static_cast<const T*>(p.x) + static_cast<i64>(i) * p.c * p.d + l;
  const i64 out = (static_cast<i64>(i) * p.b + column) * p.d + l;

  const T* bias = p.bias == nullptr ? nullptr : static_cast<const T*>(p.bias) + out * p.bias_stride;

  const int w_stage = kTile.steps() * V * p.slab * 32;
  const u8* w = static_cast<const u8*>(p.w) + static_cast<i64>(group) * p.stages * w_stage;
  const u32 base = shared_address(shared);
  const u32 ring = base + (p.resident ? p.stages * w_stage : 0);
  const int stage_bytes = kTile.stage() + (p.resident ? 0 : w_stage);

  i64 ask_tile = first;
  int ask_stage = 0, ask_slot = 0;
  const auto ask = [&] {
    if (ask_tile < last) {
      const u32 to = ring + ask_slot * stage_bytes;
      const i64 n = ask_tile * kTile.rows();
      const int k = ask_stage * kTile.steps() * kTile.depth();
      Work::ask_x(p, to, x + n * p.x_stride + static_cast<i64>(k) * p.d, k,
                  static_cast<int>(min(static_cast<i64>(kTile.rows()), p.batch - n)));
      if (!p.resident) {
        Work::copy_bytes(to + kTile.stage(), w + static_cast<i64>(ask_stage) * w_stage, w_stage);
      }
      if (++ask_stage == p.stages) {
        ask_stage = 0;
        ++ask_tile;
      }
      ask_slot = ask_slot + 1 == p.ring ? 0 : ask_slot + 1;
    }
    copy_async_commit();
  };

  if (p.resident) {
    Work::copy_bytes(base, w, p.stages * w_stage);
  }
  for (int n = 1; n < p.ring; ++n) {
    ask();
  }
  int slot = 0;
#pragma unroll 1
  for (i64 tile = first; tile < last; ++tile) {
    typename Work::Sums sums;
    Work::start(p, sums, bias, columns);
#pragma unroll 1
    for (int stage = 0; stage < p.stages; ++stage) {
      wait_ring(p.ring);
      __syncthreads();
      ask();
      const u32 x_at = ring + slot * stage_bytes;
      const u32 w_at = p.resident ? base + stage * w_stage : x_at + kTile.stage();
      if (columns > 0) {
        Work::template multiply_stage<Products>(sums, x_at, w_at + (column - slab * p.slab) * 32, row, p.slab, columns);
      }
      slot = slot + 1 == p.ring ? 0 : slot + 1;
    }
    if (columns > 0) {
      if (p.activation != 0) {
        Work::finish(sums, p.activation);
      }
      const i64 n = tile * kTile.rows() + row;
      Work::store(p, sums, static_cast<T*>(p.y) + n * p.y_stride + out, p.batch - n, columns);
    }
  }
}

}  // namespace fretwork::kronecker::strided
