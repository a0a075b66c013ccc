// Vector code of the CPU beside tiles: sums for the bias gradient. Compiled once per instruction set.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/kronecker/cpu/vectors.cpp"
#include <hwy/foreach_target.h>
// After foreach_target.h.
#include <hwy/highway.h>

#include "ops/kronecker/cpu/run.h"

HWY_BEFORE_NAMESPACE();
namespace fretwork::kronecker::cpu::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <typename T>
void AddUp(const T* from, std::int64_t rows, std::int64_t cols, bool along, T* to) {
  const hn::ScalableTag<T> d;
  constexpr auto kLanes = static_cast<std::int64_t>(hn::MaxLanes(d));
  const std::int64_t whole = cols - cols % kLanes;
  if (along) {
    for (std::int64_t i = 0; i < rows; ++i, from += cols) {
      auto sum = hn::Zero(d);
      for (std::int64_t j = 0; j < whole; j += kLanes) {
        sum = hn::Add(sum, hn::LoadU(d, from + j));
      }
      T rest = hn::GetLane(hn::SumOfLanes(d, sum));
      for (std::int64_t j = whole; j < cols; ++j) {
        rest += from[j];
      }
      to[i] += rest;
    }
    return;
  }
  for (std::int64_t j = 0; j < whole; j += kLanes) {
    auto sum = hn::Zero(d);  // not what is there already: small terms would be lost in a large sum
    for (std::int64_t i = 0; i < rows; ++i) {
      sum = hn::Add(sum, hn::LoadU(d, from + i * cols + j));
    }
    hn::StoreU(hn::Add(hn::LoadU(d, to + j), sum), d, to + j);
  }
  for (std::int64_t j = whole; j < cols; ++j) {
    T sum = 0;
    for (std::int64_t i = 0; i < rows; ++i) {
      sum += from[i * cols + j];
    }
    to[j] += sum;
  }
}

void AddUpFloat(const void* from, std::int64_t rows, std::int64_t cols, bool along, void* to) {
  AddUp(static_cast<const float*>(from), rows, cols, along, static_cast<float*>(to));
}
void AddUpDouble(const void* from, std::int64_t rows, std::int64_t cols, bool along, void* to) {
  AddUp(static_cast<const double*>(from), rows, cols, along, static_cast<double*>(to));
}

}  // namespace fretwork::kronecker::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fretwork::kronecker::cpu {
HWY_EXPORT(AddUpFloat);
HWY_EXPORT(AddUpDouble);

void add_up(const void* from, std::int64_t rows, std::int64_t cols, bool along, void* to, DType dtype) {
  dtype == DType::f64 ? HWY_DYNAMIC_DISPATCH(AddUpDouble)(from, rows, cols, along, to)
                      : HWY_DYNAMIC_DISPATCH(AddUpFloat)(from, rows, cols, along, to);
}

}  // namespace fretwork::kronecker::cpu
#endif
