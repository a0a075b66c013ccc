// The tests' tensor: any strides, in a storage whose other bytes are NaN, so that what is read or written beside its
// elements shows.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <numeric>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "core/element.h"
#include "fretwork/tensor.h"

namespace fretwork {

/// How the elements of a tensor lie in memory.
struct MemoryLayout {
  std::vector<std::size_t> order{};      ///< dimensions from the slowest to the fastest; empty: row-major
  std::int64_t step = 1;                 ///< elements from one to the next along the fastest dimension
  std::int64_t gap = 0;                  ///< elements left out behind each dimension
  unsigned backwards = 0, expanded = 0;  ///< a bit for each dimension: negative strides, strides of 0
  std::size_t alignment = 16;            ///< the lowest address is an odd multiple of it; a power of two up to 256

  /// The last two of `rank` dimensions swapped, if there are two.
  static MemoryLayout transposed(std::size_t rank) {
    MemoryLayout layout;
    layout.order.resize(rank);
    std::iota(layout.order.begin(), layout.order.end(), std::size_t{0});
    if (rank >= 2) {
      std::swap(layout.order[rank - 1], layout.order[rank - 2]);
    }
    return layout;
  }
};

/// A tensor that owns its memory. Every byte is 0xff at first: NaN in all floating types, true for booleans.
class Tensor {
 public:
  TensorView view;  ///< on the host

  Tensor() = default;
  Tensor(DType dtype, std::span<const std::int64_t> sizes, const MemoryLayout& layout = {})
      : Tensor(dtype, sizes, strides_of(sizes, layout), layout.alignment) {}
  Tensor(DType dtype, std::initializer_list<std::int64_t> sizes, const MemoryLayout& layout = {})
      : Tensor(dtype, std::span(sizes.begin(), sizes.size()), layout) {}
  Tensor(DType dtype, std::span<const std::int64_t> sizes, std::span<const std::int64_t> strides,
         std::size_t alignment = 16) {
    std::int64_t lowest = 0, highest = 0;
    for (std::size_t d = 0; d < sizes.size(); ++d) {
      const std::int64_t reach = std::max<std::int64_t>(sizes[d] - 1, 0) * strides[d];
      (reach < 0 ? lowest : highest) += reach;
    }
    const auto span = static_cast<std::size_t>(highest - lowest + 1) * size_of(dtype);
    lines_.resize((2 * kGuard + alignment + span + sizeof(Line) - 1) / sizeof(Line));
    poison();
    std::byte* const first = data() + kGuard + alignment;
    view = TensorView(first - lowest * static_cast<std::int64_t>(size_of(dtype)), dtype, sizes, strides, {});
  }
  Tensor(Tensor&&) = default;
  Tensor& operator=(Tensor&&) = default;

  bool empty() const { return lines_.empty(); }  ///< made without sizes
  std::vector<std::int64_t> sizes() const { return {view.shape().begin(), view.shape().end()}; }
  std::int64_t size(int d) const { return view.size(d); }

  /// An element by its number in row-major order, or by an index for each dimension.
  double get(std::int64_t n) const { return read(offset(n)); }
  double get(std::span<const std::int64_t> index) const { return read(offset(index)); }
  double get(std::initializer_list<std::int64_t> index) const { return read(offset(list(index))); }
  void set(std::int64_t n, double value) { write(offset(n), value); }
  void set(std::span<const std::int64_t> index, double value) { write(offset(index), value); }
  void set(std::initializer_list<std::int64_t> index, double value) { write(offset(list(index)), value); }
  /// Where element n lies, in row-major order.
  const std::byte* address(std::int64_t n) const { return address_of(offset(n)); }
  std::byte* address(std::int64_t n) { return const_cast<std::byte*>(address_of(offset(n))); }
  /// The element at a broadcast index: sizes of 1, and dimensions before the first, take any.
  double broadcast(std::initializer_list<std::int64_t> index) const {
    std::int64_t at = 0;
    int d = -static_cast<int>(index.size());
    for (const std::int64_t n : index) {
      at += n * view.stride(d++);
    }
    return read(at);
  }

  /// All elements in row-major order.
  std::vector<double> values() const {
    std::vector<double> all;
    all.reserve(static_cast<std::size_t>(view.elements()));
    walk([&](std::int64_t at, const auto&) { all.push_back(read(at)); });
    return all;
  }
  void assign(std::span<const double> values) {
    std::size_t n = 0;
    walk([&](std::int64_t at, const auto&) { write(at, values[n++]); });
  }
  /// Sets each element, in row-major order, to what `next()` gives.
  template <typename Next>
  Tensor& generate(const Next& next) {
    walk([&](std::int64_t at, const auto&) { write(at, next()); });
    return *this;
  }
  template <typename Engine, typename Distribution = std::normal_distribution<double>>
  Tensor& randomise(Engine& engine, Distribution distribution = Distribution()) {
    return generate([&] { return static_cast<double>(distribution(engine)); });
  }
  /// visit(index) for every element, in row-major order.
  template <typename Visit>
  void each(const Visit& visit) const {
    walk([&](std::int64_t, const std::vector<std::int64_t>& index) { visit(index); });
  }

  /// All bytes, those of the elements too, as they were at first.
  void poison() { std::fill_n(data(), bytes(), kPoison); }
  /// Whether every byte that belongs to no element is as it was at first.
  bool intact_around() const {
    std::vector<std::byte> rest = storage();
    walk([&](std::int64_t at, const auto&) {
      std::fill_n(rest.begin() + (address_of(at) - data()), size_of(view.dtype), kPoison);
    });
    return std::ranges::all_of(rest, [](std::byte byte) { return byte == kPoison; });
  }
  /// The storage, elements and all around them.
  std::vector<std::byte> storage() const { return {data(), data() + bytes()}; }
  bool same_bytes(const Tensor& other) const {
    return bytes() == other.bytes() && std::equal(data(), data() + bytes(), other.data());
  }

  /// Row-major unless the layout says otherwise.
  static std::vector<std::int64_t> strides_of(std::span<const std::int64_t> sizes, const MemoryLayout& layout) {
    std::vector<std::size_t> order = layout.order;
    if (order.empty()) {
      order.resize(sizes.size());
      std::iota(order.begin(), order.end(), std::size_t{0});
    }
    std::vector<std::int64_t> strides(sizes.size());
    std::int64_t span = layout.step;
    for (auto d = order.rbegin(); d != order.rend(); ++d) {
      const bool expanded = (layout.expanded >> *d & 1) != 0, backwards = (layout.backwards >> *d & 1) != 0;
      strides[*d] = expanded ? 0 : backwards ? -span : span;
      if (!expanded) {
        span = span * std::max<std::int64_t>(sizes[*d], 1) + layout.gap;
      }
    }
    return strides;
  }

 protected:
  const std::byte* data() const { return lines_.empty() ? nullptr : lines_.front().bytes.data(); }
  std::byte* data() { return lines_.empty() ? nullptr : lines_.front().bytes.data(); }
  std::size_t bytes() const { return lines_.size() * sizeof(Line); }

 private:
  static constexpr std::byte kPoison{0xff};
  static constexpr std::size_t kGuard = 8192;  ///< bytes before and behind
  struct alignas(512) Line {
    std::array<std::byte, 512> bytes;
  };

  /// visit(offset, index) for every element, in row-major order.
  template <typename Visit>
  void walk(const Visit& visit) const {
    std::vector<std::int64_t> index(static_cast<std::size_t>(view.rank));
    std::int64_t at = 0;
    for (std::int64_t left = view.elements(); left > 0; --left) {
      visit(at, std::as_const(index));
      for (std::size_t d = index.size(); d-- > 0;) {
        at += view.strides[d];
        if (++index[d] < view.sizes[d]) {
          break;
        }
        at -= view.sizes[d] * view.strides[d];
        index[d] = 0;
      }
    }
  }
  static std::span<const std::int64_t> list(std::initializer_list<std::int64_t> index) {
    return {index.begin(), index.size()};
  }
  std::int64_t offset(std::int64_t n) const {
    std::int64_t at = 0;
    for (int d = view.rank; d-- > 0;) {
      const auto axis = static_cast<std::size_t>(d);
      at += n % view.sizes[axis] * view.strides[axis];
      n /= view.sizes[axis];
    }
    return at;
  }
  std::int64_t offset(std::span<const std::int64_t> index) const {
    std::int64_t at = 0;
    for (std::size_t d = 0; d < index.size(); ++d) {
      at += index[d] * view.strides[d];
    }
    return at;
  }
  double read(std::int64_t at) const { return read_element<double>(view.data, view.dtype, at); }
  void write(std::int64_t at, double value) { write_element(view.data, view.dtype, at, value); }
  const std::byte* address_of(std::int64_t at) const {
    return static_cast<const std::byte*>(view.data) + at * static_cast<std::int64_t>(size_of(view.dtype));
  }

  std::vector<Line> lines_;
};

}  // namespace fretwork
