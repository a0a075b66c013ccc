// Runs of neighbouring elements between global memory and registers, in accesses of 16 bytes where the run allows.
#pragma once

#include "device/types.cuh"

namespace fretwork {

/// N neighbours as they lie in memory. Held as words, so that the compiler moves them as words.
template <typename T, int N>
struct run {
  static constexpr int kBytes = N * static_cast<int>(sizeof(T));
  static constexpr bool kWide = kBytes % 4 == 0;
  static constexpr int kWords = kWide ? kBytes / 4 : 1;
  static constexpr int kStep = kBytes % 16 == 0 ? 16 : kBytes % 8 == 0 ? 8 : 4;  ///< bytes of one access
  u32 words[kWords];
  T elements[kWide ? 1 : N];

  __device__ __forceinline__ T at(int e) const {
    if constexpr (!kWide) {
      return elements[e];
    } else if constexpr (sizeof(T) == 8) {
      return __longlong_as_double(static_cast<i64>(static_cast<u64>(words[2 * e + 1]) << 32 | words[2 * e]));
    } else if constexpr (sizeof(T) == 4) {
      return __uint_as_float(words[e]);
    } else if constexpr (sizeof(T) == 2) {
      return T{static_cast<u16>(words[e / 2] >> 16 * (e % 2))};
    } else {
      return (words[e / 4] >> 8 * (e % 4) & 0xffu) != 0;
    }
  }
  /// Of floating-point elements.
  __device__ __forceinline__ void negate() {
    if constexpr (kWide) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        words[w] ^= sizeof(T) == 2 ? 0x80008000u : sizeof(T) == 4 || w % 2 == 1 ? 0x80000000u : 0u;
      }
    } else {
#pragma unroll
      for (int e = 0; e < N; ++e) {
        elements[e].bits ^= 0x8000u;  // only a 16-bit element is less than a word
      }
    }
  }
};

/// What one access moves.
template <int WORDS>
struct alignas(4 * WORDS) word_group {
  u32 words[WORDS];
};

/// In one access, which the compiler would take apart where the words come from conversions.
template <int WORDS>
__device__ __forceinline__ void store_words(void* to, const u32* words) {
  if constexpr (WORDS == 4) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
  } else if constexpr (WORDS == 2) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(words[0]), "r"(words[1]) : "memory");
  } else {
    *static_cast<u32*>(to) = words[0];
  }
}

/// `from` is aligned to the run's access.
template <typename T, int N>
__device__ __forceinline__ run<T, N> load_run(const T* from) {
  using Run = run<T, N>;
  Run r;
  if constexpr (Run::kWide) {
    using Group = word_group<Run::kStep / 4>;
#pragma unroll
    for (int g = 0; g < Run::kBytes / Run::kStep; ++g) {
      const Group group = reinterpret_cast<const Group*>(from)[g];
#pragma unroll
      for (int w = 0; w < Run::kStep / 4; ++w) {
        r.words[g * (Run::kStep / 4) + w] = group.words[w];
      }
    }
  } else {
#pragma unroll
    for (int e = 0; e < N; ++e) {
      r.elements[e] = from[e];
    }
  }
  return r;
}

/// Same where `there`, else anything. 16 bytes take no branch, so that loads follow each other closely.
template <typename T, int N>
__device__ __forceinline__ run<T, N> load_run_if(bool there, const T* from) {
  run<T, N> r;
  if constexpr (run<T, N>::kBytes == 16) {
    asm volatile(
        "{.reg .pred p;\n"
        "setp.ne.u32 p, %5, 0;\n"
        "@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];}"
        : "=r"(r.words[0]), "=r"(r.words[1]), "=r"(r.words[2]), "=r"(r.words[3])
        : "l"(from), "r"(static_cast<u32>(there)));
  } else if (there) {
    r = load_run<T, N>(from);
  }
  return r;
}

/// Rounds x to T and stores the run; `to` is aligned to the run's access.
template <typename T, int N, typename Acc>
__device__ __forceinline__ void store_run(T* to, const Acc (&x)[N]) {
  using Run = run<T, N>;
  if constexpr (!Run::kWide || sizeof(T) == 1) {
#pragma unroll
    for (int e = 0; e < N; ++e) {
      to[e] = narrow<T>(x[e]);
    }
  } else {
    Run r;
#pragma unroll
    for (int w = 0; w < Run::kWords; ++w) {
      if constexpr (sizeof(T) == 2) {
        r.words[w] = narrow_pair<T>(static_cast<float>(x[2 * w]), static_cast<float>(x[2 * w + 1]));
      } else if constexpr (sizeof(T) == 4) {
        r.words[w] = __float_as_uint(static_cast<float>(x[w]));
      } else {
        r.words[w] = static_cast<u32>(static_cast<u64>(__double_as_longlong(x[w / 2])) >> 32 * (w % 2));
      }
    }
    constexpr int kWords = Run::kStep / 4;
#pragma unroll
    for (int g = 0; g < Run::kBytes / Run::kStep; ++g) {
      store_words<kWords>(reinterpret_cast<u32*>(to) + g * kWords, r.words + g * kWords);
    }
  }
}

}  // namespace fretwork
