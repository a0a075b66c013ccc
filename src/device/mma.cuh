// Warp-wide matrix instructions of sm_80 and later: ldmatrix, mma.sync and, where a is 2:4, mma.sp. Before sm_80 there
// is mma.sync of f16 alone.
#pragma once

#include "device/types.cuh"

namespace fretwork {

/// Halves `odd` (0 or 1) of two words, as a word.
__device__ __forceinline__ u32 pair_halves(u32 low, u32 high, int odd) {
  return __byte_perm(low, high, odd != 0 ? 0x7632 : 0x5410);
}

/// Four 8×16-byte matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

/// The same, each matrix of 16-bit entries transposed on the way.
__device__ __forceinline__ void ldmatrix_trans(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ __forceinline__ u32 load_shared_32(u32 address) {
  u32 r;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(r) : "r"(address));
  return r;
}

__device__ __forceinline__ u32 load_shared_16(u32 address) {
  u16 r;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(r) : "r"(address));
  return r;
}

__device__ __forceinline__ void store_shared_16(u32 address, u16 x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(x) : "memory");
}

__device__ __forceinline__ void store_shared_32(u32 address, u32 word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

__device__ __forceinline__ void load_shared_64(u32& first, u32& second, u32 address) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(first), "=r"(second) : "r"(address));
}

/// 16 bytes, `address` being a multiple of that. Not moved across other accesses.
__device__ __forceinline__ void load_shared_128(u32 (&words)[4], u32 address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void store_shared_128(u32 address, const u32 (&words)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]),
               "r"(words[3])
               : "memory");
}

/// d += a·b: 16×8 with 32 bytes of K (16 of a 16-bit type, 8 of tf32).
template <typename T>
__device__ __forceinline__ void mma_sync(float (&d)[4], const u32* a, u32 b0, u32 b1) {
  if constexpr (is_same<T, f16>) {
#ifdef FRETWORK_BEFORE_SM80
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // of the depth
      asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(half == 0 ? b0 : b1));
    }
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
  } else if constexpr (is_same<T, bf16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(is_same<T, float>);
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// d += a·b where a is 2:4 (1:2 for tf32): 16×8 with 64 bytes of K, of which a has the 32 that are kept. Lanes of a
/// quad hold the metadata of rows lane / 4 and lane / 4 + 8. Of 16-bit types and tf32: two lanes, those that kSelector
/// (0 or 1) names, each 16 bits of either row, the lower row low; the odd lane has the second half of K. Of 8-bit types
/// (kSelector 0): all four, 32 bits each, odd lanes of the upper row, the last two of the second half of K. fp8 needs
/// sm_89.
template <typename T, int kSelector, typename Sum>
__device__ __forceinline__ void mma_sparse(Sum (&d)[4], const u32* a, const u32* b, u32 metadata) {
#define FRETWORK_MMA_SPARSE(shape_and_types, constraint)                                                       \
  asm("mma.sp::ordered_metadata.sync.aligned." shape_and_types                                                 \
      " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9,%10,%11}, {%0,%1,%2,%3}, %12, %13;"                               \
      : constraint(d[0]), constraint(d[1]), constraint(d[2]), constraint(d[3])                                 \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(metadata), \
        "n"(kSelector))
  if constexpr (is_same<T, f16>) {
    FRETWORK_MMA_SPARSE("m16n8k32.row.col.f32.f16.f16.f32", "+f");
  } else if constexpr (is_same<T, bf16>) {
    FRETWORK_MMA_SPARSE("m16n8k32.row.col.f32.bf16.bf16.f32", "+f");
  } else if constexpr (is_same<T, float>) {
    FRETWORK_MMA_SPARSE("m16n8k16.row.col.f32.tf32.tf32.f32", "+f");
  } else if constexpr (is_same<T, f8_e4m3>) {
    FRETWORK_MMA_SPARSE("m16n8k64.row.col.f32.e4m3.e4m3.f32", "+f");
  } else if constexpr (is_same<T, f8_e5m2>) {
    FRETWORK_MMA_SPARSE("m16n8k64.row.col.f32.e5m2.e5m2.f32", "+f");
  } else if constexpr (is_same<T, u8>) {
    FRETWORK_MMA_SPARSE("m16n8k64.row.col.s32.u8.u8.s32", "+r");
  } else {
    static_assert(is_same<T, i8>);
    FRETWORK_MMA_SPARSE("m16n8k64.row.col.s32.s8.s8.s32", "+r");
  }
#undef FRETWORK_MMA_SPARSE
}

/// The nearest tf32, ties away from zero.
__device__ __forceinline__ u32 to_tf32(u32 x) {
  u32 r;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(__uint_as_float(x)));
  return r;
}

/// What to_tf32 left out, cut to a tf32: it is small enough that rounding it would not be seen.
__device__ __forceinline__ u32 tf32_rest(u32 x, u32 rounded) {
  return __float_as_uint(__uint_as_float(x) - __uint_as_float(rounded)) & 0xffffe000u;
}

}  // namespace fretwork
