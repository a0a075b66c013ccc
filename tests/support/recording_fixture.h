// A test over the recording driver, which ctest loads in the place of the driver.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "fretwork/context.h"
#include "support/recording_driver.h"

namespace fretwork {

class RecordedTest : public testing::Test {
 protected:
  void SetUp() override {
    launches_ = find<RecordedLaunches>("recorded_launches");
    if (launches_ == nullptr) {
      GTEST_SKIP() << "not the recording driver: ctest loads it";
    }
    context_ = Context::cuda(0);
  }

  template <typename Function>
  static Function find(const char* name) {
    void* const driver = dlopen("libcuda.so.1", RTLD_NOW);
    return driver == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(driver, name));
  }
  std::size_t count() const {
    const RecordedLaunch* first = nullptr;
    return launches_(&first);
  }
  /// All but the first `before` launches.
  std::vector<RecordedLaunch> launches(std::size_t before) const {
    const RecordedLaunch* first = nullptr;
    const std::size_t count = launches_(&first);
    return {first + before, first + count};
  }
  /// Contiguous, of memory that is never read.
  TensorView tensor(DType dtype, const std::vector<std::int64_t>& sizes) {
    TensorView view(nullptr, dtype, sizes, Device{DeviceType::cuda, 0});
    memory_.push_back(
        std::make_unique<Workspace>(context_, static_cast<std::size_t>(view.elements() + 8) * size_of(dtype)));
    view.data = memory_.back()->data();
    return view;
  }

  Context context_;
  std::vector<std::unique_ptr<Workspace>> memory_;
  RecordedLaunches launches_ = nullptr;
};

}  // namespace fretwork
