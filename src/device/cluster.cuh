// CTAs of a cluster: who they are, how they meet, and how one reaches the shared memory of another.
#pragma once

#include "device/types.cuh"

namespace fretwork {

__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
/// The number of this cluster, and how many there are; a CTA that was launched without one is its own.
__device__ __forceinline__ u32 cluster_index() {
  u32 index;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}
__device__ __forceinline__ u32 cluster_count() {
  u32 count;
  asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(count));
  return count;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
/// All threads of a cluster of `ctas`; of one, or before sm_90, those of this CTA.
__device__ __forceinline__ void meet(int ctas) {
#if __CUDA_ARCH__ >= 900
  if (ctas > 1) {
    cluster_sync();
    return;
  }
#endif
  __syncthreads();
}
/// Arrives at the barrier that lies at `barrier` in CTA `rank` of the cluster. Releasing at the cluster's scope would
/// wait for every store to global memory that is under way (MEMBAR.ALL.GPU); what was read needs no such fence.
__device__ __forceinline__ void arrive_at(u32 barrier, u32 rank) {
  asm volatile(
      "{.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
/// Four words that lie at `address` in CTA `rank` of the cluster, which before sm_90 is this one.
__device__ __forceinline__ void load_from_rank(u32 (&to)[4], u32 address, u32 rank) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %4, %5;\n"
      "ld.shared::cluster.v4.b32 {%0, %1, %2, %3}, [remote];}"
      : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
      : "r"(address), "r"(rank)
      : "memory");
#else
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
#endif
}
/// Four words to `to` in CTA `rank`, another of the cluster, counted by the barrier that lies at `barrier` there.
__device__ __forceinline__ void store_to_rank(u32 to, const u32 (&words)[4], u32 barrier, u32 rank) {
  asm volatile(
      "{.reg .b32 place, counter;\n"
      "mapa.shared::cluster.u32 place, %0, %2;\n"
      "mapa.shared::cluster.u32 counter, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [place], {%3, %4, %5, %6}, [counter];}" ::"r"(to),
      "r"(barrier), "r"(rank), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
      : "memory");
}
/// Bytes from this CTA's shared memory to `to` in CTA `rank`, counted by the barrier that lies at `barrier` there. What
/// ordinary stores wrote needs fence_async_proxy first.
__device__ __forceinline__ void copy_to_rank(u32 to, u32 from, int bytes, u32 barrier, u32 rank) {
  asm volatile(
      "{.reg .b32 place, counter;\n"
      "mapa.shared::cluster.u32 place, %0, %4;\n"
      "mapa.shared::cluster.u32 counter, %3, %4;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [place], [%1], %2, [counter];}" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier), "r"(rank)
      : "memory");
}

}  // namespace fretwork
