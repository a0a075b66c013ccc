// Names and sizes of types, shapes of views.
#include "fretwork/tensor.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "fretwork/error.h"

namespace fretwork {

std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return 8;
    case DType::f32:
    case DType::i32:
    case DType::u32:
      return 4;
    case DType::f16:
    case DType::bf16:
    case DType::i16:
    case DType::u16:
      return 2;
    case DType::f8_e4m3:
    case DType::f8_e5m2:
    case DType::i8:
    case DType::boolean:
    case DType::u8:
      return 1;
  }
  return 0;
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::f64:
      return "float64";
    case DType::f32:
      return "float32";
    case DType::f16:
      return "float16";
    case DType::bf16:
      return "bfloat16";
    case DType::f8_e4m3:
      return "float8_e4m3fn";
    case DType::f8_e5m2:
      return "float8_e5m2";
    case DType::i8:
      return "int8";
    case DType::boolean:
      return "bool";
    case DType::i16:
      return "int16";
    case DType::i32:
      return "int32";
    case DType::u8:
      return "uint8";
    case DType::u16:
      return "uint16";
    case DType::u32:
      return "uint32";
  }
  return "?";
}

bool is_floating(DType dtype) {
  return dtype == DType::f64 || dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
}

std::string name_of(Device device) {
  const bool cpu = device.type == DeviceType::cpu;
  return cpu && device.index == 0 ? "cpu" : (cpu ? "cpu:" : "cuda:") + std::to_string(device.index);
}

template <typename Void>
BasicTensorView<Void>::BasicTensorView(Void* data, DType dtype, std::span<const std::int64_t> sizes, Device device)
    : data(data), dtype(dtype), device(device), rank(static_cast<int>(sizes.size())) {
  if (sizes.size() > kMaxRank) {
    throw Error("TensorView", "sizes", "at most 8 dimensions", std::to_string(sizes.size()));
  }
  if (std::any_of(sizes.begin(), sizes.end(), [](std::int64_t n) { return n < 0; })) {
    throw Error("TensorView", "sizes", "none below 0", shape_text(sizes));
  }
  std::copy(sizes.begin(), sizes.end(), this->sizes.begin());
  std::int64_t stride = 1;
  for (std::size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= sizes[d];
  }
}

template <typename Void>
BasicTensorView<Void>::BasicTensorView(Void* data, DType dtype, std::initializer_list<std::int64_t> sizes,
                                       Device device)
    : BasicTensorView(data, dtype, std::span(sizes.begin(), sizes.size()), device) {}

template <typename Void>
BasicTensorView<Void>::BasicTensorView(Void* data, DType dtype, std::span<const std::int64_t> sizes,
                                       std::span<const std::int64_t> strides, Device device)
    : BasicTensorView(data, dtype, sizes, device) {
  if (strides.size() != sizes.size()) {
    throw Error("TensorView", "strides", std::to_string(sizes.size()) + " of them", std::to_string(strides.size()));
  }
  std::copy(strides.begin(), strides.end(), this->strides.begin());
}

template <typename Void>
std::int64_t BasicTensorView<Void>::elements() const {
  const auto all = shape();
  return std::accumulate(all.begin(), all.end(), std::int64_t{1}, std::multiplies<>{});
}

template struct BasicTensorView<void>;
template struct BasicTensorView<const void>;

std::string shape_text(std::span<const std::int64_t> sizes) {
  std::string text = "(";
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    text += (d > 0 ? ", " : "") + std::to_string(sizes[d]);
  }
  return text + (sizes.size() == 1 ? ",)" : ")");
}

}  // namespace fretwork
