// Memory of owning tensors, and copies between it and the host.
#include "fretwork/device_tensor.h"

#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "fretwork/error.h"
#include "runtime/cuda_driver.h"

namespace fretwork {
namespace {

void check_bytes(const char* op, std::size_t given, std::size_t wanted) {
  if (given != wanted) {
    throw Error(op, "host", std::to_string(wanted) + " bytes", std::to_string(given));
  }
}

}  // namespace

DeviceTensor::DeviceTensor(const Context& context, DType dtype, std::span<const std::int64_t> sizes)
    : allocator_(context.allocator),
      stream_(context.stream),
      view_(nullptr, dtype, sizes, context.device),
      bytes_(static_cast<std::size_t>(view_.elements()) * size_of(dtype)) {
  if (allocator_ == nullptr) {
    throw Error("DeviceTensor", "context.allocator", "an address", "null");
  }
  if (bytes_ > 0) {
    view_.data = allocator_->allocate(bytes_);
    if (view_.data == nullptr) {
      throw std::bad_alloc();
    }
  }
}

DeviceTensor::DeviceTensor(const Context& context, DType dtype, std::initializer_list<std::int64_t> sizes)
    : DeviceTensor(context, dtype, std::span(sizes.begin(), sizes.size())) {}

DeviceTensor::~DeviceTensor() {
  if (view_.data != nullptr) {
    allocator_->release(view_.data, bytes_);
  }
}

DeviceTensor::DeviceTensor(DeviceTensor&& other) noexcept
    : allocator_(other.allocator_),
      stream_(other.stream_),
      view_(std::exchange(other.view_, {})),
      bytes_(std::exchange(other.bytes_, 0)) {}

DeviceTensor& DeviceTensor::operator=(DeviceTensor&& other) noexcept {
  std::swap(allocator_, other.allocator_);
  std::swap(stream_, other.stream_);
  std::swap(view_, other.view_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

void DeviceTensor::copy_bytes_from(std::span<const std::byte> host) {
  check_bytes("copy_from", host.size(), bytes_);
  if (bytes_ == 0) {
    return;
  }
  if (device().type == DeviceType::cpu) {
    std::memcpy(view_.data, host.data(), bytes_);
    return;
  }
  const cuda::DeviceScope scope(device().index);
  cuda::copy_to_device(view_.data, host.data(), bytes_, stream_);
  cuda::synchronize(stream_);
}

void DeviceTensor::copy_bytes_to(std::span<std::byte> host) const {
  check_bytes("copy_to", host.size(), bytes_);
  if (bytes_ == 0) {
    return;
  }
  if (device().type == DeviceType::cpu) {
    std::memcpy(host.data(), view_.data, bytes_);
    return;
  }
  const cuda::DeviceScope scope(device().index);
  cuda::copy_to_host(host.data(), view_.data, bytes_, stream_);
  cuda::synchronize(stream_);
}

}  // namespace fretwork
