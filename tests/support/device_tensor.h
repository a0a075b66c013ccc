// The tests' tensor with a copy on a GPU. A test program that includes this has the label gpu.
#pragma once

#include <cstddef>

#include "runtime/cuda_driver.h"
#include "support/tensor.h"

namespace fretwork {

/// A Tensor and its copy on GPU 0: all of the storage, so that what is written beside the elements comes back too.
/// Addresses there have the alignment that the layout asks for.
class MirroredTensor : public Tensor {
 public:
  using Tensor::Tensor;
  TensorView device_view;  ///< on the GPU, from upload() on

  /// Copies the storage to the GPU; returns the view there.
  const TensorView& upload() {
    device_ = cuda::DeviceBuffer(0, data(), bytes());
    device_view = view;
    device_view.data = static_cast<std::byte*>(device_.data()) + (static_cast<const std::byte*>(view.data) - data());
    device_view.device = {DeviceType::cuda, 0};
    return device_view;
  }
  /// Copies the storage back, after what the stream has to do.
  void download(cuda::Handle stream = nullptr) {
    cuda::copy_to_host(data(), device_.data(), bytes(), stream);
    cuda::synchronize(stream);
  }

 private:
  cuda::DeviceBuffer device_;
};

}  // namespace fretwork
