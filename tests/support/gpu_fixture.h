// A test that needs a GPU with the tensor cores of sm_80, and makes it current.
#pragma once

#include <gtest/gtest.h>

#include <memory>

#include "runtime/cuda_driver.h"

namespace fretwork {

class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::available()) {
      GTEST_SKIP() << cuda::unavailable_reason();
    }
    if (cuda::device_info(0).arch < 80) {
      GTEST_SKIP() << "needs sm_80";
    }
    scope_ = std::make_unique<cuda::DeviceScope>(0);
  }
  std::unique_ptr<cuda::DeviceScope> scope_;
};

}  // namespace fretwork
