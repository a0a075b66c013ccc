// Barriers in shared memory, named barriers, and registers moved between warpgroups: what pipeline.cuh is made of.
#pragma once

#include "device/copy_async.cuh"
#include "device/types.cuh"

namespace fretwork {

namespace mbarrier {

__device__ __forceinline__ void init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
/// Makes initialised barriers visible to the copy engine; a CTA barrier must follow.
__device__ __forceinline__ void init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
/// Arrives and lets the phase wait for `bytes` of copies as well.
__device__ __forceinline__ void arrive_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/// Whether the phase of this parity has completed.
__device__ __forceinline__ bool test(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n.reg .pred done;\nmbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
/// Returns when the phase of this parity has completed. A fresh barrier has "completed" parity 1.
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finish;\nbra again;\nfinish:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

}  // namespace mbarrier

/// The number of a warp or warpgroup, in a way that tells the compiler that a warp's threads agree on it. What follows
/// from it, descriptors above all, then lies in uniform registers, and branches on it stay branches.
__device__ __forceinline__ int uniform(u32 number) { return __shfl_sync(~0u, static_cast<int>(number), 0); }

/// Joins `threads` threads of a CTA at barrier `id` (1…15; 0 is the CTA's own).
__device__ __forceinline__ void named_barrier(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// The same; whether `flag` holds for any of the threads.
__device__ __forceinline__ bool named_barrier_any(u32 id, u32 threads, bool flag) {
  u32 any;
  asm volatile(
      "{.reg .pred p, q;\n"
      "setp.ne.u32 p, %3, 0;\n"
      "bar.red.or.pred q, %1, %2, p;\n"
      "selp.u32 %0, 1, 0, q;}"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<u32>(flag))
      : "memory");
  return any != 0;
}

/// Ordinary writes to shared memory before this are seen by the copy engine and the tensor cores after a barrier.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/// The same of global memory, both ways.
__device__ __forceinline__ void fence_async_proxy_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

/// A number by which CTAs tell each other how far they are: what one did before it stored it is seen by one that loaded
/// it.
__device__ __forceinline__ int load_acquire(const int* from) {
  int number;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(number) : "l"(from) : "memory");
  return number;
}
__device__ __forceinline__ void store_release(int* to, int number) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(number) : "memory");
}

/// The next kernel on the stream, if launched behind this one, may start once every CTA has said so or ended. Nothing
/// before sm_90, where none is.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
/// Returns when the kernel that this one was launched behind has ended and its writes are seen. Before sm_90 none is.
__device__ __forceinline__ void wait_for_earlier_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Moves registers between the warpgroups of a CTA; each role is one branch of a single if/else.
template <u32 kCount>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <u32 kCount>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace fretwork
