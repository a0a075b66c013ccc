// Views, hashes, errors and executors.
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>

#include "core/hash.h"
#include "fretwork/context.h"
#include "fretwork/error.h"
#include "fretwork/executor_tbb.h"
#include "fretwork/tensor.h"

namespace fretwork {
namespace {

TEST(TensorView, ContiguousStrides) {
  float data[1];
  const TensorView view(data, DType::f32, {2, 3, 4});
  EXPECT_EQ(view.rank, 3);
  EXPECT_EQ(view.elements(), 24);
  EXPECT_EQ(view.stride(0), 12);
  EXPECT_EQ(view.stride(1), 4);
  EXPECT_EQ(view.stride(2), 1);
  EXPECT_EQ(view.size(-1), 4);
  EXPECT_EQ(view.stride(-3), 12);
  EXPECT_EQ(shape_text(view.shape()), "(2, 3, 4)");
}

TEST(TensorView, MissingAndUnitDimensionsBroadcast) {
  const TensorView view(nullptr, DType::f64, {1, 5});
  EXPECT_EQ(view.size(-3), 1);
  EXPECT_EQ(view.stride(-3), 0);
  EXPECT_EQ(view.stride(0), 0);
  EXPECT_EQ(view.stride(1), 1);
  const TensorView scalar(nullptr, DType::f32, std::initializer_list<std::int64_t>{});
  EXPECT_EQ(scalar.elements(), 1);
  EXPECT_EQ(shape_text(scalar.shape()), "()");
  EXPECT_EQ(TensorView(nullptr, DType::f32, {0, 3}).elements(), 0);
}

TEST(TensorView, KeepsGivenStrides) {
  const std::int64_t sizes[] = {4, 6}, strides[] = {-1, 0};
  const TensorView view(nullptr, DType::bf16, sizes, strides, Device{DeviceType::cuda, 2});
  EXPECT_EQ(view.stride(0), -1);
  EXPECT_EQ(view.stride(1), 0);
  EXPECT_EQ(name_of(view.device), "cuda:2");
}

TEST(TensorView, RefusesBadArguments) {
  const std::vector<std::int64_t> nine(9, 1), one(1, 1);
  try {
    const TensorView view(nullptr, DType::f32, nine);
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "TensorView: sizes: expected at most 8 dimensions, got 9");
  }
  const std::int64_t sizes[] = {2, 2};
  EXPECT_THROW(TensorView(nullptr, DType::f32, sizes, one, Device{}), Error);
}

TEST(DTypes, NamesAndSizes) {
  EXPECT_STREQ(name_of(DType::bf16), "bfloat16");
  EXPECT_EQ(size_of(DType::f64), 8u);
  EXPECT_EQ(size_of(DType::f16), 2u);
  EXPECT_EQ(size_of(DType::f8_e4m3), 1u);
  EXPECT_TRUE(is_floating(DType::f16));
  EXPECT_FALSE(is_floating(DType::i8));
}

TEST(Hash, IsStableAndSpreads) {
  // Digests are stored in files and graphs, so they may not change.
  EXPECT_EQ(hash128("").hex(), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(hash128("fretwork"), hash128(std::string("fretwork")));
  std::set<std::string> seen;
  for (int n = 0; n < 1000; ++n) {
    seen.insert(hash128(std::string(static_cast<std::size_t>(n), 'x')).hex());
  }
  EXPECT_EQ(seen.size(), 1000u);
  EXPECT_EQ(seen.begin()->size(), 32u);
}

TEST(Errors, SayWhatWasExpected) { EXPECT_STREQ(Error("op", "a", "b", "c").what(), "op: a: expected b, got c"); }

/// Every index once, ranges in bounds, and no range when there is nothing to do.
void check_executor(Executor& executor) {
  EXPECT_GE(executor.concurrency(), 1);
  for (const std::int64_t count : {0, 1, 7, 1000}) {
    for (const std::int64_t grain : {0, 1, 13, 5000}) {
      std::vector<std::atomic<int>> visits(static_cast<std::size_t>(count));
      executor.parallel_for(count, grain, [&](std::int64_t begin, std::int64_t end) {
        EXPECT_LT(begin, end);
        for (std::int64_t n = begin; n < end; ++n) {
          ++visits.at(static_cast<std::size_t>(n));
        }
      });
      for (const auto& v : visits) {
        EXPECT_EQ(v, 1);
      }
    }
  }
  EXPECT_THROW(executor.parallel_for(10, 1, [](auto, auto) { throw Error("from a body"); }), Error);
}

TEST(Executors, Serial) {
  check_executor(serial_executor());
  EXPECT_EQ(serial_executor().concurrency(), 1);
}

TEST(Executors, Tbb) {
  TbbExecutor all, two(2);
  check_executor(all);
  check_executor(two);
  EXPECT_EQ(two.concurrency(), 2);
}

TEST(Executors, TbbFromManyThreads) {
  TbbExecutor executor(2);
  std::atomic<std::int64_t> sum = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back(
        [&] { executor.parallel_for(100, 10, [&](std::int64_t begin, std::int64_t end) { sum += end - begin; }); });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(sum, 400);
}

TEST(Contexts, CpuWorkspaceIsAligned) {
  Context context = Context::cpu();
  const Workspace some(context, 100), none(context, 0);
  ASSERT_NE(some.data(), nullptr);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(some.data()) % 64, 0u);
  EXPECT_EQ(none.data(), nullptr);
  EXPECT_EQ(context.device, Device{});
  EXPECT_EQ(context.executor, &serial_executor());
}

TEST(Contexts, AnAllocatorMayGiveNull) {
  struct : Allocator {
    void* allocate(std::size_t) override { return nullptr; }
    void release(void*, std::size_t) noexcept override {}
  } empty;
  Context context = Context::cpu();
  context.allocator = &empty;
  EXPECT_THROW(Workspace(context, 100), std::bad_alloc);
  EXPECT_EQ(Workspace(context, 0).data(), nullptr);
}

TEST(Devices, AreNamedApart) {
  EXPECT_EQ(name_of(Device{}), "cpu");
  EXPECT_EQ(name_of(Device{DeviceType::cpu, 1}), "cpu:1");
  EXPECT_EQ(name_of(Device{DeviceType::cuda, 0}), "cuda:0");
}

TEST(Views, RefuseNegativeSizes) { EXPECT_THROW(TensorView(nullptr, DType::f32, {64, -10}), Error); }

TEST(Contexts, WorkAsTheyAreMade) {
  Context context;
  ASSERT_NE(context.executor, nullptr);
  const Workspace space(context, 100);
  EXPECT_NE(space.data(), nullptr);
}

}  // namespace
}  // namespace fretwork
