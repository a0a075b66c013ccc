// A tensor that owns its memory, on the device of a context.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <ranges>
#include <span>

#include "fretwork/context.h"
#include "fretwork/tensor.h"

namespace fretwork {

/// Row-major and contiguous. The memory comes from the context's allocator and goes back to it, in the order of the
/// context's stream; both must outlive the tensor. Moves, but does not copy.
class DeviceTensor {
 public:
  /// Not initialised.
  DeviceTensor(const Context& context, DType dtype, std::span<const std::int64_t> sizes);
  DeviceTensor(const Context& context, DType dtype, std::initializer_list<std::int64_t> sizes);
  ~DeviceTensor();
  DeviceTensor(DeviceTensor&& other) noexcept;
  DeviceTensor& operator=(DeviceTensor&& other) noexcept;

  /// What ops write and read.
  TensorView view() { return view_; }
  ConstTensorView view() const { return view_; }

  Device device() const { return view_.device; }
  DType dtype() const { return view_.dtype; }
  std::span<const std::int64_t> shape() const { return view_.shape(); }
  std::int64_t elements() const { return view_.elements(); }
  std::size_t bytes() const { return bytes_; }

  /// All elements from or to memory of the host, such as a vector; they return when the copy is done. Throw Error where
  /// `host` does not have as many bytes.
  template <std::ranges::contiguous_range Range>
  void copy_from(const Range& host) {
    copy_bytes_from(std::as_bytes(std::span(host)));
  }
  template <std::ranges::contiguous_range Range>
  void copy_to(Range&& host) const {
    copy_bytes_to(std::as_writable_bytes(std::span(host)));
  }

 private:
  void copy_bytes_from(std::span<const std::byte> host);
  void copy_bytes_to(std::span<std::byte> host) const;

  Allocator* allocator_;
  void* stream_;
  TensorView view_;
  std::size_t bytes_;
};

}  // namespace fretwork
