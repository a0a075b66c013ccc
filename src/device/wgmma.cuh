// Warpgroup products on Hopper's tensor cores: shared-memory descriptors, ordering, and the instructions themselves.
#pragma once

#include "device/types.cuh"

namespace fretwork::wgmma {

/// How a tile lies in shared memory. Its unit-stride axis is K or the other one.
enum class Major { k, mn };

/// Descriptor of an operand whose rows of kRow bytes (128, 64 or 32) are swizzled as the copy engine does. K-major:
/// rows run along M or N, and the next 16 of K are 32 bytes on. MN-major: rows run along K, `chunk` bytes separate
/// neighbouring kRow-wide pieces of M or N, and the next 16 of K are 16 rows on. `eight` bytes separate groups of eight
/// rows.
template <int kRow>
__device__ __forceinline__ u64 descriptor(u32 address, u32 chunk = 16, u32 eight = 8 * kRow) {
  constexpr u64 kLayout = kRow == 128 ? 1 : kRow == 64 ? 2 : 3;
  return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(chunk >> 4) << 16 |
         static_cast<u64>(eight >> 4) << 32 | kLayout << 62;
}
/// The same of units of eight rows × 16 bytes that are not swizzled: 128 bytes each. K-major; `next` bytes separate
/// neighbouring ones along K, `eight` along M or N.
__device__ __forceinline__ u64 descriptor(u32 address, u32 next, u32 eight) {
  return static_cast<u64>((address & 0x3ffff) >> 4) | static_cast<u64>(next >> 4) << 16 |
         static_cast<u64>(eight >> 4) << 32;
}
/// What to add to a descriptor for the next 16 of K.
template <int kRow, Major kMajor>
inline constexpr u64 kNextK = (kMajor == Major::k ? 32 : 16 * kRow) >> 4;

/// Registers and shared memory written before are seen by the products after it.
__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kLeft>
__device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
/// After the wait for sparse products: they read their metadata while they run, which the compiler does not know, and
/// without this it might give the registers to something else.
template <int kCount>
__device__ __forceinline__ void metadata_read(const u32 (&words)[kCount]) {
#pragma unroll
  for (const u32 word : words) {
    asm volatile("" ::"r"(word));
  }
}

// The accumulator of m64nN: row 16·warp + lane/4 (+8), columns 8j + 2(lane%4); registers 4j, 4j+1 hold the row, 4j+2,
// 4j+3 the row 8 below. An asm statement must spell its registers; these lists do nothing else.

#define FRETWORK_F4(o) "+f"(d[(o)]), "+f"(d[(o) + 1]), "+f"(d[(o) + 2]), "+f"(d[(o) + 3])
#define FRETWORK_F8(o)                                                                                    \
  "+f"(d[(o)]), "+f"(d[(o) + 1]), "+f"(d[(o) + 2]), "+f"(d[(o) + 3]), "+f"(d[(o) + 4]), "+f"(d[(o) + 5]), \
      "+f"(d[(o) + 6]), "+f"(d[(o) + 7])
#define FRETWORK_F32(o) FRETWORK_F8(o), FRETWORK_F8((o) + 8), FRETWORK_F8((o) + 16), FRETWORK_F8((o) + 24)
#define FRETWORK_I8(o)                                                                                    \
  "+r"(d[(o)]), "+r"(d[(o) + 1]), "+r"(d[(o) + 2]), "+r"(d[(o) + 3]), "+r"(d[(o) + 4]), "+r"(d[(o) + 5]), \
      "+r"(d[(o) + 6]), "+r"(d[(o) + 7])
#define FRETWORK_I32(o) FRETWORK_I8(o), FRETWORK_I8((o) + 8), FRETWORK_I8((o) + 16), FRETWORK_I8((o) + 24)
#define FRETWORK_ACC4 "%0, %1, %2, %3"
#define FRETWORK_ACC8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FRETWORK_ACC16 \
  FRETWORK_ACC8        \
  ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FRETWORK_ACC12 \
  FRETWORK_ACC8        \
  ", %8, %9, %10, %11"
#define FRETWORK_ACC24 \
  FRETWORK_ACC16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FRETWORK_ACC28 \
  FRETWORK_ACC24       \
  ", %24, %25, %26, %27"
#define FRETWORK_ACC32 \
  FRETWORK_ACC16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FRETWORK_ACC48 \
  FRETWORK_ACC32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define FRETWORK_ACC64                                                               \
  FRETWORK_ACC32                                                                     \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FRETWORK_ACC80 \
  FRETWORK_ACC64       \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define FRETWORK_ACC96                                                               \
  FRETWORK_ACC64                                                                     \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FRETWORK_ACC112 \
  FRETWORK_ACC96        \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define FRETWORK_ACC120 \
  FRETWORK_ACC112       \
  ", %112, %113, %114, %115, %116, %117, %118, %119"
#define FRETWORK_ACC124 \
  FRETWORK_ACC120       \
  ", %120, %121, %122, %123"
#define FRETWORK_ACC128                                                                          \
  FRETWORK_ACC96                                                                                 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// Both operands from shared memory.
#define FRETWORK_WGMMA_SS(type, n, acc, a, b, ta, tb, add, ...)                                                    \
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, " add ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32." type \
               "." type " {" acc "}, " a ", " b ", p, 1, 1, " ta ", " tb ";\n}"                                    \
               : __VA_ARGS__                                                                                       \
               : "l"(left), "l"(right), "n"(kLeft == Major::mn ? 1 : 0), "n"(kRight == Major::mn ? 1 : 0),         \
                 "n"(kAdd ? 1 : 0))
// The left operand from registers.
#define FRETWORK_WGMMA_RS(type, n, acc, a, b, tb, add, ...)                                                            \
  asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, " add ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32." type     \
               "." type " {" acc "}, {" a "}, " b ", p, 1, 1, " tb ";\n}"                                              \
               : __VA_ARGS__                                                                                           \
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "n"(kRight == Major::mn ? 1 : 0), \
                 "n"(kAdd ? 1 : 0))

/// d[64 × kN] += left[64 × 16] · right[16 × kN]; the first of its kN / 2 registers is d[kAt]. Without kAdd, d is
/// overwritten. Asynchronous.
template <typename T, int kN, Major kLeft, Major kRight, int kAt = 0, bool kAdd = true, int kSize>
__device__ __forceinline__ void multiply(float (&d)[kSize], u64 left, u64 right) {
  static_assert(kAt + kN / 2 <= kSize);
  if constexpr (kN == 8) {
    if constexpr (is_same<T, f16>) {
      FRETWORK_WGMMA_SS("f16", "8", FRETWORK_ACC4, "%4", "%5", "%6", "%7", "%8", FRETWORK_F4(kAt));
    } else {
      FRETWORK_WGMMA_SS("bf16", "8", FRETWORK_ACC4, "%4", "%5", "%6", "%7", "%8", FRETWORK_F4(kAt));
    }
  } else if constexpr (kN == 64) {
    if constexpr (is_same<T, f16>) {
      FRETWORK_WGMMA_SS("f16", "64", FRETWORK_ACC32, "%32", "%33", "%34", "%35", "%36", FRETWORK_F32(kAt));
    } else {
      FRETWORK_WGMMA_SS("bf16", "64", FRETWORK_ACC32, "%32", "%33", "%34", "%35", "%36", FRETWORK_F32(kAt));
    }
  } else if constexpr (kN == 128) {
    if constexpr (is_same<T, f16>) {
      FRETWORK_WGMMA_SS("f16", "128", FRETWORK_ACC64, "%64", "%65", "%66", "%67", "%68", FRETWORK_F32(kAt),
                        FRETWORK_F32(kAt + 32));
    } else {
      FRETWORK_WGMMA_SS("bf16", "128", FRETWORK_ACC64, "%64", "%65", "%66", "%67", "%68", FRETWORK_F32(kAt),
                        FRETWORK_F32(kAt + 32));
    }
  } else if constexpr (kN == 192) {
    if constexpr (is_same<T, f16>) {
      FRETWORK_WGMMA_SS("f16", "192", FRETWORK_ACC96, "%96", "%97", "%98", "%99", "%100", FRETWORK_F32(kAt),
                        FRETWORK_F32(kAt + 32), FRETWORK_F32(kAt + 64));
    } else {
      FRETWORK_WGMMA_SS("bf16", "192", FRETWORK_ACC96, "%96", "%97", "%98", "%99", "%100", FRETWORK_F32(kAt),
                        FRETWORK_F32(kAt + 32), FRETWORK_F32(kAt + 64));
    }
  } else if constexpr (kN == 240) {
    if constexpr (is_same<T, f16>) {
      FRETWORK_WGMMA_SS("f16", "240", FRETWORK_ACC120, "%120", "%121", "%122", "%123", "%124", FRETWORK_F32(kAt),
                        FRETWORK_F32(kAt + 32), FRETWORK_F32(kAt + 64), FRETWORK_F8(kAt + 96), FRETWORK_F8(kAt + 104),
                        FRETWORK_F8(kAt + 112));
    } else {
      FRETWORK_WGMMA_SS("bf16", "240", FRETWORK_ACC120, "%120", "%121", "%122", "%123", "%124", FRETWORK_F32(kAt),
                        FRETWORK_F32(kAt + 32), FRETWORK_F32(kAt + 64), FRETWORK_F8(kAt + 96), FRETWORK_F8(kAt + 104),
                        FRETWORK_F8(kAt + 112));
    }
  } else if constexpr (kN == 248) {
    if constexpr (is_same<T, f16>) {
      FRETWORK_WGMMA_SS("f16", "248", FRETWORK_ACC124, "%124", "%125", "%126", "%127", "%128", FRETWORK_F32(kAt),
                        FRETWORK_F32(kAt + 32), FRETWORK_F32(kAt + 64), FRETWORK_F8(kAt + 96), FRETWORK_F8(kAt + 104),
                        FRETWORK_F8(kAt + 112), FRETWORK_F4(kAt + 120));
    } else {
      FRETWORK_WGMMA_SS("bf16", "248", FRETWORK_ACC124, "%124", "%125", "%126", "%127", "%128", FRETWORK_F32(kAt),
                        FRETWORK_F32(kAt + 32), FRETWORK_F32(kAt + 64), FRETWORK_F8(kAt + 96), FRETWORK_F8(kAt + 104),
                        FRETWORK_F8(kAt + 112), FRETWORK_F4(kAt + 120));
    }
  } else if constexpr (kN == 256) {
    if constexpr (is_same<T, f16>) {
      FRETWORK_WGMMA_SS("f16", "256", FRETWORK_ACC128, "%128", "%129", "%130", "%131", "%132", FRETWORK_F32(kAt),
                        FRETWORK_F32(kAt + 32), FRETWORK_F32(kAt + 64), FRETWORK_F32(kAt + 96));
    } else {
      FRETWORK_WGMMA_SS("bf16", "256", FRETWORK_ACC128, "%128", "%129", "%130", "%131", "%132", FRETWORK_F32(kAt),
                        FRETWORK_F32(kAt + 32), FRETWORK_F32(kAt + 64), FRETWORK_F32(kAt + 96));
    }
  } else {
    static_assert(kN == 64, "a width without an instruction here");
  }
}

/// The same with `left` in registers: the four fragments that ldmatrix gives for 16 rows × 16 of K of each warp. They
/// must stay untouched until the product has completed.
template <typename T, int kN, Major kRight, int kAt = 0, bool kAdd = true, int kSize>
__device__ __forceinline__ void multiply(float (&d)[kSize], const u32 (&left)[4], u64 right) {
  static_assert(kAt + kN / 2 <= kSize);
  if constexpr (kN == 16) {
    if constexpr (is_same<T, f16>) {
      FRETWORK_WGMMA_RS("f16", "16", FRETWORK_ACC8, "%8, %9, %10, %11", "%12", "%13", "%14", FRETWORK_F8(kAt));
    } else {
      FRETWORK_WGMMA_RS("bf16", "16", FRETWORK_ACC8, "%8, %9, %10, %11", "%12", "%13", "%14", FRETWORK_F8(kAt));
    }
  } else if constexpr (kN == 24) {
    if constexpr (is_same<T, f16>) {
      FRETWORK_WGMMA_RS("f16", "24", FRETWORK_ACC12, "%12, %13, %14, %15", "%16", "%17", "%18", FRETWORK_F8(kAt),
                        FRETWORK_F4(kAt + 8));
    } else {
      FRETWORK_WGMMA_RS("bf16", "24", FRETWORK_ACC12, "%12, %13, %14, %15", "%16", "%17", "%18", FRETWORK_F8(kAt),
                        FRETWORK_F4(kAt + 8));
    }
  } else if constexpr (kN == 48) {
    if constexpr (is_same<T, f16>) {
      FRETWORK_WGMMA_RS("f16", "48", FRETWORK_ACC24, "%24, %25, %26, %27", "%28", "%29", "%30", FRETWORK_F8(kAt),
                        FRETWORK_F8(kAt + 8), FRETWORK_F8(kAt + 16));
    } else {
      FRETWORK_WGMMA_RS("bf16", "48", FRETWORK_ACC24, "%24, %25, %26, %27", "%28", "%29", "%30", FRETWORK_F8(kAt),
                        FRETWORK_F8(kAt + 8), FRETWORK_F8(kAt + 16));
    }
  } else if constexpr (kN == 56) {
    if constexpr (is_same<T, f16>) {
      FRETWORK_WGMMA_RS("f16", "56", FRETWORK_ACC28, "%28, %29, %30, %31", "%32", "%33", "%34", FRETWORK_F8(kAt),
                        FRETWORK_F8(kAt + 8), FRETWORK_F8(kAt + 16), FRETWORK_F4(kAt + 24));
    } else {
      FRETWORK_WGMMA_RS("bf16", "56", FRETWORK_ACC28, "%28, %29, %30, %31", "%32", "%33", "%34", FRETWORK_F8(kAt),
                        FRETWORK_F8(kAt + 8), FRETWORK_F8(kAt + 16), FRETWORK_F4(kAt + 24));
    }
  } else if constexpr (kN == 96) {
    if constexpr (is_same<T, f16>) {
      FRETWORK_WGMMA_RS("f16", "96", FRETWORK_ACC48, "%48, %49, %50, %51", "%52", "%53", "%54", FRETWORK_F32(kAt),
                        FRETWORK_F8(kAt + 32), FRETWORK_F8(kAt + 40));
    } else {
      FRETWORK_WGMMA_RS("bf16", "96", FRETWORK_ACC48, "%48, %49, %50, %51", "%52", "%53", "%54", FRETWORK_F32(kAt),
                        FRETWORK_F8(kAt + 32), FRETWORK_F8(kAt + 40));
    }
  } else if constexpr (kN == 32) {
    if constexpr (is_same<T, f16>) {
      FRETWORK_WGMMA_RS("f16", "32", FRETWORK_ACC16, "%16, %17, %18, %19", "%20", "%21", "%22", FRETWORK_F8(kAt),
                        FRETWORK_F8(kAt + 8));
    } else {
      FRETWORK_WGMMA_RS("bf16", "32", FRETWORK_ACC16, "%16, %17, %18, %19", "%20", "%21", "%22", FRETWORK_F8(kAt),
                        FRETWORK_F8(kAt + 8));
    }
  } else if constexpr (kN == 64) {
    if constexpr (is_same<T, f16>) {
      FRETWORK_WGMMA_RS("f16", "64", FRETWORK_ACC32, "%32, %33, %34, %35", "%36", "%37", "%38", FRETWORK_F32(kAt));
    } else {
      FRETWORK_WGMMA_RS("bf16", "64", FRETWORK_ACC32, "%32, %33, %34, %35", "%36", "%37", "%38", FRETWORK_F32(kAt));
    }
  } else if constexpr (kN == 128) {
    if constexpr (is_same<T, f16>) {
      FRETWORK_WGMMA_RS("f16", "128", FRETWORK_ACC64, "%64, %65, %66, %67", "%68", "%69", "%70", FRETWORK_F32(kAt),
                        FRETWORK_F32(kAt + 32));
    } else {
      FRETWORK_WGMMA_RS("bf16", "128", FRETWORK_ACC64, "%64, %65, %66, %67", "%68", "%69", "%70", FRETWORK_F32(kAt),
                        FRETWORK_F32(kAt + 32));
    }
  } else if constexpr (kN == 192) {
    if constexpr (is_same<T, f16>) {
      FRETWORK_WGMMA_RS("f16", "192", FRETWORK_ACC96, "%96, %97, %98, %99", "%100", "%101", "%102", FRETWORK_F32(kAt),
                        FRETWORK_F32(kAt + 32), FRETWORK_F32(kAt + 64));
    } else {
      FRETWORK_WGMMA_RS("bf16", "192", FRETWORK_ACC96, "%96, %97, %98, %99", "%100", "%101", "%102", FRETWORK_F32(kAt),
                        FRETWORK_F32(kAt + 32), FRETWORK_F32(kAt + 64));
    }
  } else if constexpr (kN == 256) {
    if constexpr (is_same<T, f16>) {
      FRETWORK_WGMMA_RS("f16", "256", FRETWORK_ACC128, "%128, %129, %130, %131", "%132", "%133", "%134",
                        FRETWORK_F32(kAt), FRETWORK_F32(kAt + 32), FRETWORK_F32(kAt + 64), FRETWORK_F32(kAt + 96));
    } else {
      FRETWORK_WGMMA_RS("bf16", "256", FRETWORK_ACC128, "%128, %129, %130, %131", "%132", "%133", "%134",
                        FRETWORK_F32(kAt), FRETWORK_F32(kAt + 32), FRETWORK_F32(kAt + 64), FRETWORK_F32(kAt + 96));
    }
  } else {
    static_assert(kN == 64, "a width without an instruction here");
  }
}

// tf32: the left operand from registers, the right one K-major, the only major there is.
#define FRETWORK_WGMMA_TF32(n, acc, a, b, ...)                                                                        \
  asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" n "k8.f32.tf32.tf32 {" acc \
               "}, {" a "}, " b ", p, 1, 1;\n}"                                                                       \
               : __VA_ARGS__                                                                                          \
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right))

/// d[64 × kN] += left[64 × 8] · right[8 × kN] in tf32, where the lowest 13 bits of what `right` describes do not count.
template <int kN>
__device__ __forceinline__ void multiply_tf32(float (&d)[kN / 2], const u32 (&left)[4], u64 right) {
  if constexpr (kN == 64) {
    FRETWORK_WGMMA_TF32("64", FRETWORK_ACC32, "%32, %33, %34, %35", "%36", FRETWORK_F32(0));
  } else if constexpr (kN == 128) {
    FRETWORK_WGMMA_TF32("128", FRETWORK_ACC64, "%64, %65, %66, %67", "%68", FRETWORK_F32(0), FRETWORK_F32(32));
  } else if constexpr (kN == 192) {
    FRETWORK_WGMMA_TF32("192", FRETWORK_ACC96, "%96, %97, %98, %99", "%100", FRETWORK_F32(0), FRETWORK_F32(32),
                        FRETWORK_F32(64));
  } else {
    static_assert(kN == 256, "a width without an instruction here");
    FRETWORK_WGMMA_TF32("256", FRETWORK_ACC128, "%128, %129, %130, %131", "%132", FRETWORK_F32(0), FRETWORK_F32(32),
                        FRETWORK_F32(64), FRETWORK_F32(96));
  }
}

// 2:4 (1:2 for tf32): the left operand holds what is kept, from shared memory, K-major. `type` is all between the width
// and the operands, `signs` what follows the predicate.
#define FRETWORK_WGMMA_SP(type, n, acc, a, b, e, select, signs, ...)                                                  \
  asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sp.sync.aligned.m64n" n type " {" acc "}, " a \
               ", " b ", " e ", " select ", p" signs ";\n}"                                                           \
               : __VA_ARGS__                                                                                          \
               : "l"(left), "l"(right), "r"(metadata), "n"(kSelect), "n"(kRight == Major::mn ? 1 : 0))
// 16-bit types: `right` has a major, and there are more widths.
#define FRETWORK_WGMMA_SP_HALF(type)                                                                               \
  if constexpr (kN == 16) {                                                                                        \
    FRETWORK_WGMMA_SP(type, "16", FRETWORK_ACC8, "%8", "%9", "%10", "%11", ", 1, 1, 0, %12", FRETWORK_F8(0));      \
  } else if constexpr (kN == 32) {                                                                                 \
    FRETWORK_WGMMA_SP(type, "32", FRETWORK_ACC16, "%16", "%17", "%18", "%19", ", 1, 1, 0, %20", FRETWORK_F8(0),    \
                      FRETWORK_F8(8));                                                                             \
  } else if constexpr (kN == 64) {                                                                                 \
    FRETWORK_WGMMA_SP(type, "64", FRETWORK_ACC32, "%32", "%33", "%34", "%35", ", 1, 1, 0, %36", FRETWORK_F32(0));  \
  } else if constexpr (kN == 96) {                                                                                 \
    FRETWORK_WGMMA_SP(type, "96", FRETWORK_ACC48, "%48", "%49", "%50", "%51", ", 1, 1, 0, %52", FRETWORK_F32(0),   \
                      FRETWORK_F8(32), FRETWORK_F8(40));                                                           \
  } else if constexpr (kN == 128) {                                                                                \
    FRETWORK_WGMMA_SP(type, "128", FRETWORK_ACC64, "%64", "%65", "%66", "%67", ", 1, 1, 0, %68", FRETWORK_F32(0),  \
                      FRETWORK_F32(32));                                                                           \
  } else if constexpr (kN == 160) {                                                                                \
    FRETWORK_WGMMA_SP(type, "160", FRETWORK_ACC80, "%80", "%81", "%82", "%83", ", 1, 1, 0, %84", FRETWORK_F32(0),  \
                      FRETWORK_F32(32), FRETWORK_F8(64), FRETWORK_F8(72));                                         \
  } else if constexpr (kN == 192) {                                                                                \
    FRETWORK_WGMMA_SP(type, "192", FRETWORK_ACC96, "%96", "%97", "%98", "%99", ", 1, 1, 0, %100", FRETWORK_F32(0), \
                      FRETWORK_F32(32), FRETWORK_F32(64));                                                         \
  } else if constexpr (kN == 224) {                                                                                \
    FRETWORK_WGMMA_SP(type, "224", FRETWORK_ACC112, "%112", "%113", "%114", "%115", ", 1, 1, 0, %116",             \
                      FRETWORK_F32(0), FRETWORK_F32(32), FRETWORK_F32(64), FRETWORK_F8(96), FRETWORK_F8(104));     \
  } else {                                                                                                         \
    FRETWORK_WGMMA_SP(type, "256", FRETWORK_ACC128, "%128", "%129", "%130", "%131", ", 1, 1, 0, %132",             \
                      FRETWORK_F32(0), FRETWORK_F32(32), FRETWORK_F32(64), FRETWORK_F32(96));                      \
  }
#define FRETWORK_WGMMA_SP_F32(type)                                                                            \
  if constexpr (kN == 64) {                                                                                    \
    FRETWORK_WGMMA_SP(type, "64", FRETWORK_ACC32, "%32", "%33", "%34", "%35", ", 1, 1", FRETWORK_F32(0));      \
  } else if constexpr (kN == 128) {                                                                            \
    FRETWORK_WGMMA_SP(type, "128", FRETWORK_ACC64, "%64", "%65", "%66", "%67", ", 1, 1", FRETWORK_F32(0),      \
                      FRETWORK_F32(32));                                                                       \
  } else {                                                                                                     \
    FRETWORK_WGMMA_SP(type, "256", FRETWORK_ACC128, "%128", "%129", "%130", "%131", ", 1, 1", FRETWORK_F32(0), \
                      FRETWORK_F32(32), FRETWORK_F32(64), FRETWORK_F32(96));                                   \
  }
#define FRETWORK_WGMMA_SP_I32(type)                                                                                    \
  if constexpr (kN == 64) {                                                                                            \
    FRETWORK_WGMMA_SP(type, "64", FRETWORK_ACC32, "%32", "%33", "%34", "%35", "", FRETWORK_I32(0));                    \
  } else if constexpr (kN == 128) {                                                                                    \
    FRETWORK_WGMMA_SP(type, "128", FRETWORK_ACC64, "%64", "%65", "%66", "%67", "", FRETWORK_I32(0), FRETWORK_I32(32)); \
  } else {                                                                                                             \
    FRETWORK_WGMMA_SP(type, "256", FRETWORK_ACC128, "%128", "%129", "%130", "%131", "", FRETWORK_I32(0),               \
                      FRETWORK_I32(32), FRETWORK_I32(64), FRETWORK_I32(96));                                           \
  }

/// d[64 × kN] += left · right over 64 bytes of right's K and the 32 bytes of left that are kept of them. `metadata` as
/// plain words of a line have it, and it must stay untouched until the product has completed. With lane / 4 = r of a
/// warp's 16 rows: 8-bit types take 32 bits of row r + 8·(lane % 2), at bytes 4·(lane % 4 / 2) of its eight; others
/// take, from lanes with lane % 4 / 2 = kSelect, 16 bits at bytes 2·(lane % 2) of four, row r's low and row r + 8's
/// high. Only 16-bit types may have `right` MN-major. Asynchronous.
template <typename T, int kN, Major kRight, int kSelect, typename Sum>
__device__ __forceinline__ void multiply_sparse(Sum (&d)[kN / 2], u64 left, u64 right, u32 metadata) {
  constexpr bool kHalf = is_same<T, f16> || is_same<T, bf16>;
  static_assert(kN == 64 || kN == 128 || kN == 256 || (kHalf && (kN == 16 || (kN % 32 == 0 && kN < 256))),
                "no instruction here");
  static_assert(kRight == Major::k || kHalf);
  static_assert(kSelect == 0 || sizeof(T) > 1);
  if constexpr (is_same<T, f16>) {
    FRETWORK_WGMMA_SP_HALF("k32.f32.f16.f16");
  } else if constexpr (is_same<T, bf16>) {
    FRETWORK_WGMMA_SP_HALF("k32.f32.bf16.bf16");
  } else if constexpr (is_same<T, f8_e4m3>) {
    FRETWORK_WGMMA_SP_F32("k64.f32.e4m3.e4m3");
  } else if constexpr (is_same<T, f8_e5m2>) {
    FRETWORK_WGMMA_SP_F32("k64.f32.e5m2.e5m2");
  } else if constexpr (is_same<T, float>) {
    FRETWORK_WGMMA_SP_F32("k16.f32.tf32.tf32");
  } else if constexpr (is_same<T, u8>) {
    FRETWORK_WGMMA_SP_I32("k64.s32.u8.u8");
  } else {
    static_assert(is_same<T, i8>);
    FRETWORK_WGMMA_SP_I32("k64.s32.s8.s8");
  }
}

#undef FRETWORK_WGMMA_SP
#undef FRETWORK_WGMMA_SP_HALF
#undef FRETWORK_WGMMA_SP_F32
#undef FRETWORK_WGMMA_SP_I32
#undef FRETWORK_WGMMA_SS
#undef FRETWORK_WGMMA_RS
#undef FRETWORK_WGMMA_TF32
#undef FRETWORK_F4
#undef FRETWORK_F8
#undef FRETWORK_F32
#undef FRETWORK_I8
#undef FRETWORK_I32
#undef FRETWORK_ACC4
#undef FRETWORK_ACC8
#undef FRETWORK_ACC16
#undef FRETWORK_ACC32
#undef FRETWORK_ACC12
#undef FRETWORK_ACC24
#undef FRETWORK_ACC48
#undef FRETWORK_ACC64
#undef FRETWORK_ACC80
#undef FRETWORK_ACC96
#undef FRETWORK_ACC112
#undef FRETWORK_ACC120
#undef FRETWORK_ACC124
#undef FRETWORK_ACC128

/// Four 8×8 pieces to or from shared memory; lanes 8i … 8i+7 give the addresses of the rows of piece i.
__device__ __forceinline__ void load_pieces(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_pieces_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void store_pieces(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}
__device__ __forceinline__ void store_pieces_transposed(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}
/// An 8×8 piece as a fragment has it (row lane/4, columns 2(lane%4) and the next), transposed.
__device__ __forceinline__ u32 transposed_piece(u32 piece) {
  u32 result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(piece));
  return result;
}

}  // namespace fretwork::wgmma
