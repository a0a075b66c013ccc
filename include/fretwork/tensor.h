// Element types, devices and tensor views: how data enters the library. A view owns nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <type_traits>

namespace fretwork {

enum class DType : std::uint8_t { f64, f32, f16, bf16, f8_e4m3, f8_e5m2, i8, boolean, i16, i32, u8, u16, u32 };

std::size_t size_of(DType dtype);
const char* name_of(DType dtype);
/// True for the types that products and softmax work in: f64, f32, f16, bf16.
bool is_floating(DType dtype);

enum class DeviceType : std::uint8_t { cpu, cuda };

struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};
std::string name_of(Device device);

inline constexpr int kMaxRank = 8;

/// A pointer with a type, a place and a shape; strides count elements and may be anything, 0 and negative included.
/// `Void` is const void where the data is only read.
template <typename Void>
struct BasicTensorView {
  Void* data = nullptr;
  DType dtype = DType::f32;
  Device device{};
  int rank = 0;
  std::array<std::int64_t, kMaxRank> sizes{};
  std::array<std::int64_t, kMaxRank> strides{};

  BasicTensorView() = default;
  /// Row-major and contiguous.
  BasicTensorView(Void* data, DType dtype, std::span<const std::int64_t> sizes, Device device = {});
  BasicTensorView(Void* data, DType dtype, std::initializer_list<std::int64_t> sizes, Device device = {});
  BasicTensorView(Void* data, DType dtype, std::span<const std::int64_t> sizes, std::span<const std::int64_t> strides,
                  Device device);
  /// What may be written may be read.
  template <typename Other>
  requires(std::is_const_v<Void>&& std::is_same_v<Other, void>)
      BasicTensorView(const BasicTensorView<Other>& other)  // NOLINT: a TensorView is a ConstTensorView
      : data(other.data),
        dtype(other.dtype),
        device(other.device),
        rank(other.rank),
        sizes(other.sizes),
        strides(other.strides) {}

  std::span<const std::int64_t> shape() const { return {sizes.data(), static_cast<std::size_t>(rank)}; }
  std::int64_t elements() const;
  /// Size and stride of dimension `d`; a negative d counts from the end, and one before the first is a broadcast 1.
  std::int64_t size(int d) const { return inside(d) ? sizes[at(d)] : 1; }
  std::int64_t stride(int d) const { return inside(d) && sizes[at(d)] != 1 ? strides[at(d)] : 0; }

 private:
  bool inside(int d) const { return d >= -rank && d < rank; }
  std::size_t at(int d) const { return static_cast<std::size_t>(d < 0 ? d + rank : d); }
};

extern template struct BasicTensorView<void>;
extern template struct BasicTensorView<const void>;

/// What an op writes.
using TensorView = BasicTensorView<void>;
/// What an op reads; a TensorView converts to it.
using ConstTensorView = BasicTensorView<const void>;

/// "(2, 3, 64, 48)", for messages.
std::string shape_text(std::span<const std::int64_t> sizes);

}  // namespace fretwork
