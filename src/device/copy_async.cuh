// cp.async: global to shared memory without registers, in groups that are waited for in order.
#pragma once

#include "device/types.cuh"

namespace fretwork {

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

}  // namespace fretwork
