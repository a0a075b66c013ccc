// Views, owning tensors, hashes, errors and executors, and what every op does with its arguments.
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>
#include <type_traits>
#include <vector>

#include "c_threads.h"
#include "core/hash.h"
#include "fretwork/executor_tbb.h"
#include "fretwork/fretwork.h"
#include "fretwork/parallel_loop.h"
#include "support/error_text.h"

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

TEST(Executors, ThreadsOfACall) {
  ShortThreads one(1), three(3);
  check_executor(one);
  check_executor(three);
}

TEST(ParallelLoop, AWorkerBeginsWithItsPartAndTakesWhatIsLeft) {
  ParallelLoop loop(10, 2, 3);
  ASSERT_EQ(loop.workers(), 3);
  std::vector<std::pair<std::int64_t, std::int64_t>> taken;
  loop.work(1, [&](std::int64_t begin, std::int64_t end) { taken.emplace_back(begin, end); });
  EXPECT_EQ(taken, (decltype(taken){{3, 5}, {5, 6}, {6, 8}, {8, 10}, {0, 2}, {2, 3}}));
  loop.work(0, [](auto, auto) { ADD_FAILURE() << "nothing is left"; });
  loop.finish();
}

TEST(ParallelLoop, NothingRunsBehindAnException) {
  ParallelLoop loop(10, 1, 2);
  int runs = 0;
  loop.work(0, [&](auto, auto) { ++runs, throw Error("from a body"); });
  loop.work(1, [&](auto, auto) { ++runs; });
  EXPECT_EQ(runs, 1);
  EXPECT_THROW(loop.finish(), Error);
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

TEST(TensorView, ConvertsToOneThatIsRead) {
  static_assert(std::is_convertible_v<TensorView, ConstTensorView>);
  static_assert(!std::is_convertible_v<ConstTensorView, TensorView>);
  static_assert(std::is_convertible_v<TwoFour, ConstTwoFour> && !std::is_convertible_v<ConstTwoFour, TwoFour>);
  float data[6] = {};
  const std::int64_t sizes[] = {2, 3}, strides[] = {1, 2};
  const TensorView written(data, DType::f32, sizes, strides, {});
  const ConstTensorView read = written;
  EXPECT_EQ(read.data, data);
  EXPECT_EQ(read.dtype, DType::f32);
  EXPECT_EQ(read.rank, 2);
  EXPECT_EQ(read.sizes, written.sizes);
  EXPECT_EQ(read.strides, written.strides);
}

TEST(TensorView, OpsTakeConstMemory) {
  const auto layout = BlockLayout::make({1, 1, 1, 8, 8}, std::vector<std::uint8_t>{1});
  const std::vector<float> values(64, 2.0F), dense(64, 3.0F);
  std::vector<float> out(64);
  Context context = Context::cpu();
  dsd({values.data(), DType::f32, {1, 8, 8}}, {dense.data(), DType::f32, {8, 8}}, layout,
      {out.data(), DType::f32, {8, 8}}, context);
  EXPECT_EQ(out, std::vector<float>(64, 48.0F));
}

TEST(Patterns, RefuseNone) {
  Context context = Context::cpu();
  std::vector<float> data(64);
  const TensorView values(data.data(), DType::f32, {1, 8, 8}), dense(data.data(), DType::f32, {8, 8});
  EXPECT_EQ(error_of([&] { sdd(dense, dense, nullptr, values, context); }),
            "sdd: layout: expected a pattern, got none");
  EXPECT_EQ(error_of([&] { block_softmax(values, nullptr, values, context); }),
            "block_softmax: layout: expected a pattern, got none");
  EXPECT_EQ(error_of([&] { block_pack(dense, nullptr, values, context); }),
            "pack: layout: expected a pattern, got none");
  EXPECT_EQ(error_of([&] { block_conv2d(dense, values, nullptr, dense, context); }),
            "block_conv2d: layout: expected a pattern, got none");
  EXPECT_EQ(error_of([] { draw(nullptr); }), "draw: pattern: expected a pattern, got none");
  EXPECT_EQ(error_of([] { kronecker::to_block_layout(nullptr); }),
            "to_block_layout: pattern: expected a pattern, got none");
  EXPECT_NE(error_of([] { attention_cost(nullptr); }).find("attention_cost: pattern: expected"), std::string::npos);
}

/// Counts what is held.
class Counting final : public Allocator {
 public:
  void* allocate(std::size_t bytes) override {
    held += bytes;
    return host_allocator().allocate(bytes);
  }
  void release(void* memory, std::size_t bytes) noexcept override {
    held -= bytes;
    host_allocator().release(memory, bytes);
  }
  std::size_t held = 0;
};

TEST(DeviceTensor, OwnsMemoryOfTheContextsAllocator) {
  Counting memory;
  Context context = Context::cpu();
  context.allocator = &memory;
  {
    DeviceTensor a(context, DType::f32, {2, 3});
    EXPECT_EQ(memory.held, 24U);
    EXPECT_EQ(a.bytes(), 24U);
    EXPECT_EQ(a.elements(), 6);
    EXPECT_EQ(a.view().stride(0), 3);
    DeviceTensor b = std::move(a);
    EXPECT_EQ(memory.held, 24U);
    b = DeviceTensor(context, DType::f16, {5});
    EXPECT_EQ(memory.held, 10U);
    EXPECT_EQ(b.dtype(), DType::f16);
    const DeviceTensor none(context, DType::f64, {4, 0});
    EXPECT_EQ(none.view().data, nullptr);
    EXPECT_EQ(memory.held, 10U);
  }
  EXPECT_EQ(memory.held, 0U);
}

TEST(DeviceTensor, CopiesAllOfIt) {
  const Context context = Context::cpu();
  DeviceTensor tensor(context, DType::f32, {2, 2});
  const std::vector<float> given{1, 2, 3, 4};
  tensor.copy_from(given);
  std::vector<float> got(4);
  tensor.copy_to(got);
  EXPECT_EQ(got, given);
  EXPECT_EQ(error_of([&] { tensor.copy_from(std::vector<float>(3)); }), "copy_from: host: expected 16 bytes, got 12");
  got.resize(5);
  EXPECT_EQ(error_of([&] { tensor.copy_to(got); }), "copy_to: host: expected 16 bytes, got 20");
  DeviceTensor(context, DType::i8, {0}).copy_from(std::vector<char>());  // nothing, without an error
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
