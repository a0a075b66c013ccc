// The pipeline of Hopper's kernels: one warpgroup fetches stages by TMA, the others multiply them by wgmma.
//
// A stage is a piece of shared memory with two barriers. `full` completes when its copies have landed, `empty` when all
// readers have released it. Stages form a ring. Each thread that waits keeps its own position in the ring, over all
// tiles of a persistent CTA: the parity of a barrier's phase depends on how often the ring was passed. So producer and
// consumers must walk the same number of stages for every tile.
//
//   struct Gemm {  // what a kernel fills in; each_tile and store_tile are its own
//     static constexpr Roles kRoles{.consumers = 2, .producer_registers = 40, .consumer_registers = 232};
//     const Params& p;
//     RingBarriers<4>& ring;  // in shared memory; made by init_barriers([&] { ring.make(1, 8); }): one producer, 8
//     warps u32 base;               // of the stages
//
//     void produce() const {  // what to fetch
//       if (threadIdx.x == 0) {
//         Producer<4> at;
//         each_tile(p, [&](Tile t) {
//           for (int k = 0; k < p.steps; ++k, at.next()) {
//             const u32 full = ring.acquire(at);
//             mbarrier::arrive_expect(full, kStageBytes);
//             tma::load(base + at.stage * kStageBytes, &p.a, full, 64 * k, t.row);
//             ...
//     void consume() const {  // what to multiply, and how to end
//       Consumer<4> at;
//       each_tile(p, [&](Tile t) {
//         float d[128];
//         clear(d);
//         multiply_stages(ring, at, p.steps, [&](u32 stage) {
//           wgmma::fence();
//           wgmma::multiply<T, 256, Major::k, Major::k>(d, ...);  // finds its operands at base + stage * kStageBytes
//           return true;
//         });
//         store_tile(...);
//       });
//       finish_stores();
//     }
//   };
//   run_warp_specialized(Gemm{p, shared.ring, base});
#pragma once

#include "device/barrier.cuh"
#include "device/cluster.cuh"
#include "device/tma.cuh"
#include "device/wgmma.cuh"

namespace fretwork {

// ---------------------------------------------------------------------------------------------------------- the ring

/// A position in a ring: the stage, and the parity of the phase to wait for there.
struct RingPosition {
  u32 stage = 0, parity;
};

/// A position that advances. kStages 0: next() is told the length of the ring at run time.
template <int kStages>
struct Ring : RingPosition {
  __device__ __forceinline__ explicit Ring(u32 first) : RingPosition{0, first} {}
  __device__ __forceinline__ void next() {
    static_assert(kStages > 0, "the length of this ring is an argument of next()");
    next(kStages);
  }
  __device__ __forceinline__ void next(u32 stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};
/// Where a thread fills stages next. A fresh barrier counts as completed in parity 1: all stages are free.
template <int kStages>
struct Producer : Ring<kStages> {
  __device__ __forceinline__ Producer() : Ring<kStages>(1) {}
};
/// Where a thread reads stages next.
template <int kStages>
struct Consumer : Ring<kStages> {
  __device__ __forceinline__ Consumer() : Ring<kStages>(0) {}
};

/// One thread makes barriers as make() says; all threads may use them when this returns. All call it. In a cluster
/// whose CTAs use each other's barriers, cluster_sync must follow.
template <typename Make>
__device__ __forceinline__ void init_barriers(Make make) {
  if (threadIdx.x == 0) {
    make();
    mbarrier::init_done();
  }
  __syncthreads();
}
/// The same for barriers that lie apart: `fetchers` arrivals fill a stage, `consumers` arrivals empty it.
__device__ __forceinline__ void init_ring(u64* full, u64* empty, u32 stages, u32 fetchers, u32 consumers) {
  init_barriers([=] {
    for (u32 s = 0; s < stages; ++s) {
      mbarrier::init(shared_address(full + s), fetchers);
      mbarrier::init(shared_address(empty + s), consumers);
    }
  });
}

/// A warp releases a stage, if it is one (−1 is none). Each warp releases for itself: the warps of a warpgroup may be
/// apart when they skip a stage.
__device__ __forceinline__ void release(u32 empty, int stage) {
  __syncwarp();  // one lane arrives for all, so all must have read the stage
  if (threadIdx.x % 32 == 0 && stage >= 0) {
    mbarrier::arrive(empty + 8 * stage);
  }
}

/// The barriers of a ring of at most kStages stages, in shared memory.
template <int kStages>
struct RingBarriers {
  u64 full[kStages], empty[kStages];

  /// Makes the barriers: `fills` arrivals, and the bytes they announce, fill a stage; `releases` free it. For
  /// init_barriers.
  __device__ __forceinline__ void make(u32 fills, u32 releases, u32 stages = kStages) {
    for (u32 s = 0; s < stages; ++s) {
      mbarrier::init(shared_address(full + s), fills);
      mbarrier::init(shared_address(empty + s), releases);
    }
  }
  /// Waits until a stage is free. Returns the barrier that counts what fills it: notes are written to shared memory
  /// first, then mbarrier::arrive_expect, then the copies.
  __device__ __forceinline__ u32 acquire(const RingPosition& at) {
    mbarrier::wait(shared_address(&empty[at.stage]), at.parity);
    return shared_address(&full[at.stage]);
  }
  __device__ __forceinline__ bool is_free(const RingPosition& at) {
    return mbarrier::test(shared_address(&empty[at.stage]), at.parity);
  }
  /// Waits until a stage is full.
  __device__ __forceinline__ void wait(const RingPosition& at) {
    mbarrier::wait(shared_address(&full[at.stage]), at.parity);
  }
  /// A warp releases a stage; a ring whose consumers are warps counts one arrival of each.
  __device__ __forceinline__ void release(int stage) { fretwork::release(shared_address(empty), stage); }
  /// A lane does, where each lane reads notes or statistics of the stage itself and all are counted.
  __device__ __forceinline__ void release_lane(u32 stage) { mbarrier::arrive(shared_address(&empty[stage])); }
  /// A warp releases a stage that several CTAs of a cluster fill, to all of them: lane n tells CTA rank(n).
  template <typename Rank>
  __device__ __forceinline__ void release_to(u32 stage, u32 ctas, Rank rank) {
    __syncwarp();
    if (const u32 lane = threadIdx.x % 32; lane < ctas) {
      arrive_at(shared_address(&empty[stage]), rank(lane));
    }
  }
};

/// Where the stages begin in dynamic shared memory: swizzled tiles are aligned to 1024 bytes.
__device__ __forceinline__ u32 stages_in(const u8* dynamic) { return (shared_address(dynamic) + 1023) & ~1023u; }

// ----------------------------------------------------------------------------------------------------- the main loop

template <typename Sum, int kSize>
__device__ __forceinline__ void clear(Sum (&d)[kSize]) {
#pragma unroll
  for (Sum& sum : d) {
    sum = 0;
  }
}

/// A warpgroup multiplies `count` stages of a ring of `stages`, with one group of products in flight. multiply(stage)
/// starts the products of a stage (fence and multiply, no commit) and returns true, or starts none and returns false. A
/// stage is released when the products of the next one have started and its own have ended; at the end all are
/// released. Before a stage is skipped, the one before it is released: else a warpgroup that skips a whole ring would
/// hold a stage that the producer waits for.
template <int kMost, int kStages, typename Multiply>
__device__ __forceinline__ void multiply_stages(RingBarriers<kMost>& barriers, Ring<kStages>& at, int count,
                                                Multiply multiply, u32 stages = kStages) {
  int pending = -1;  // the stage that products in flight still read
#pragma unroll 1     // unrolling gains nothing and costs a third of the compile time
  for (int n = 0; n < count; ++n, at.next(stages)) {
    barriers.wait(at);
    if (multiply(at.stage)) {
      wgmma::commit();
      wgmma::wait<1>();
      barriers.release(pending);
      pending = static_cast<int>(at.stage);
    } else {
      wgmma::wait<0>();
      barriers.release(pending);
      pending = -1;
      barriers.release(static_cast<int>(at.stage));
    }
  }
  wgmma::wait<0>();
  barriers.release(pending);
}

/// Consumers end with this where one thread of a warpgroup stores by TMA: shared memory must outlive the copies.
__device__ __forceinline__ void finish_stores() {
  if (threadIdx.x % 128 == 0) {
    tma::store_wait();
  }
}

// --------------------------------------------------------------------------------------------------------- the roles

/// How a CTA is split: its first warpgroup fetches, the others multiply.
struct Roles {
  u32 consumers;                               ///< warpgroups that multiply
  u32 producer_registers, consumer_registers;  ///< of a thread
  bool cluster = false;                        ///< CTAs write or arrive in each other's shared memory
  u32 ctas = 1;                                ///< of a multiprocessor

  /// Whether the CTA is launched with as many registers as its roles ask for. Asking for more hangs.
  constexpr bool fit() const {
    const u32 warpgroups = consumers + 1, at_launch = 65536 / (128 * warpgroups * ctas) / 8 * 8;
    return producer_registers + consumers * consumer_registers <= warpgroups * at_launch;
  }
};

/// What a kernel fills in. All threads of the first warpgroup call produce(), those of the others consume().
template <typename Kernel>
concept WarpSpecialized = requires(const Kernel& kernel) {
  Kernel::kRoles.consumers;
  kernel.produce();
  kernel.consume();
};

/// Splits a CTA into its roles and hands registers from the producer to the consumers. setmaxnreg works only if each
/// role is one branch of a single if/else. In a cluster, a CTA waits for the others before and after: for their
/// barriers, and because they may still write or arrive here.
template <WarpSpecialized Kernel>
__device__ __forceinline__ void run_warp_specialized(const Kernel& kernel) {
  constexpr Roles kRoles = Kernel::kRoles;
  static_assert(kRoles.fit(), "the roles ask for more registers than the CTA is launched with");
  if constexpr (kRoles.cluster) {
    cluster_sync();
  }
  if (threadIdx.x < 128) {
    fewer_registers<kRoles.producer_registers>();
    kernel.produce();
  } else {
    more_registers<kRoles.consumer_registers>();
    kernel.consume();
  }
  if constexpr (kRoles.cluster) {
    cluster_sync();
  }
}

}  // namespace fretwork
