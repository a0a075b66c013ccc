// cp.async: global to shared memory without registers, in groups that are waited for in order. Before sm_80 the same
// copies pass through registers and are done when they return, as cp.async may be.
#pragma once

#include "device/types.cuh"

namespace fretwork {

#ifdef FRETWORK_BEFORE_SM80

/// kSize (4, 8 or 16) bytes, of which the first `bytes` are read and the rest are zero.
template <int kSize>
__device__ __forceinline__ void copy_now(u32 shared, const void* global, int bytes) {
  u32 words[4] = {};
  if (bytes >= kSize) {
    const u32* const from = static_cast<const u32*>(global);
    if constexpr (kSize == 16) {
      asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "l"(from)
                   : "memory");
    } else if constexpr (kSize == 8) {
      asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(from) : "memory");
    } else {
      words[0] = *from;
    }
  } else if (bytes > 0) {  // the end of a line
    u64 halves[2] = {};
#pragma unroll 1
    for (int n = 0; n < bytes; ++n) {
      const u64 byte = static_cast<const u8*>(global)[n];
      (n < 8 ? halves[0] : halves[1]) |= byte << n % 8 * 8;
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      words[n] = static_cast<u32>(halves[n / 2] >> n % 2 * 32);
    }
  }
  if constexpr (kSize == 16) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                 "r"(words[3])
                 : "memory");
  } else if constexpr (kSize == 8) {
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(shared), "r"(words[0]), "r"(words[1]) : "memory");
  } else {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(words[0]) : "memory");
  }
}

__device__ __forceinline__ void copy_async_16(u32 shared, const void* global, bool inside) {
  copy_now<16>(shared, global, inside ? 16 : 0);
}
__device__ __forceinline__ void copy_async_part(u32 shared, const void* global, int bytes) {
  copy_now<16>(shared, global, bytes);
}
__device__ __forceinline__ void copy_async_part_if(bool there, u32 shared, const void* global, int bytes) {
  if (there) {
    copy_now<16>(shared, global, bytes);
  }
}
template <int kSize>
__device__ __forceinline__ void copy_async_small(u32 shared, const void* global, int bytes) {
  copy_now<kSize>(shared, global, bytes);
}
__device__ __forceinline__ void copy_async_4(u32 shared, const void* global, int bytes) {
  copy_now<4>(shared, global, bytes);
}
__device__ __forceinline__ void copy_async_commit() {}
template <int Pending>
__device__ __forceinline__ void copy_async_wait() {}

#else

/// 16 bytes, or zeros when not `inside`. Past L1: tiles are reused from shared memory.
__device__ __forceinline__ void copy_async_16(u32 shared, const void* global, bool inside) {
  asm volatile(
      "{.reg .pred p;\n"
      "setp.eq.u32 p, %2, 0;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, p;}" ::"r"(shared),
      "l"(global), "r"(static_cast<u32>(inside))
      : "memory");
}

/// 16 bytes, of which the first `bytes` are read and the rest are zero.
__device__ __forceinline__ void copy_async_part(u32 shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}

/// The same where `there`, else nothing; without a branch, which the compiler would make of an `if`.
__device__ __forceinline__ void copy_async_part_if(bool there, u32 shared, const void* global, int bytes) {
  asm volatile(
      "{.reg .pred p;\n"
      "setp.ne.u32 p, %3, 0;\n"
      "@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;}" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(static_cast<u32>(there))
      : "memory");
}

/// kSize (4 or 8) bytes, of which the first `bytes` are read and the rest are zero.
template <int kSize>
__device__ __forceinline__ void copy_async_small(u32 shared, const void* global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(global), "n"(kSize), "r"(bytes)
               : "memory");
}

/// 4 bytes, or zero when `bytes` is 0.
__device__ __forceinline__ void copy_async_4(u32 shared, const void* global, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most `Pending` of this thread's latest groups are unfinished.
template <int Pending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

#endif

}  // namespace fretwork
