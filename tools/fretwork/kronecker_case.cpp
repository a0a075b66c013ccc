// Operands in either layout, the product and its gradients.
#include "kronecker_case.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "fretwork/error.h"
#include "fretwork/ops.h"
#include "layers.h"
#include "machine.h"
#include "terminal.h"

namespace fretwork::cli {
namespace {

double elements(std::int64_t batch, std::int64_t features) {
  return static_cast<double>(batch) * static_cast<double>(features);
}

std::int64_t inputs_of(const KroneckerPattern::Sizes& p) { return p.a * p.c * p.d; }
std::int64_t outputs_of(const KroneckerPattern::Sizes& p) { return p.a * p.b * p.d; }
double weights_of(const KroneckerPattern::Sizes& p) { return elements(p.a * p.b, p.c * p.d); }

TensorView swapped(TensorView view, std::size_t first, std::size_t second) {
  std::swap(view.sizes[first], view.sizes[second]);
  std::swap(view.strides[first], view.strides[second]);
  return view;
}

/// (batch, features) in the case's layout, as yet without data.
TensorView batch_view(const KroneckerCase& one, std::int64_t features, DType dtype, Device device) {
  return one.bs_last ? swapped(TensorView(nullptr, dtype, {features, one.batch}, device), 0, 1)
                     : TensorView(nullptr, dtype, {one.batch, features}, device);
}

/// The same with random numbers.
class Batch {
 public:
  Batch(const KroneckerCase& one, std::int64_t features, DType dtype, Device device)
      : data_(device, dtype, {one.batch, features}), view_(batch_view(one, features, dtype, device)) {
    view_.data = data_.view().data;
  }
  const TensorView& view() const { return view_; }

 private:
  Data data_;
  TensorView view_;
};

}  // namespace

std::string text_of(const KroneckerPattern::Sizes& p) { return fmt::format("({},{},{},{})", p.a, p.b, p.c, p.d); }

double flops_of(const KroneckerCase& one) { return 2 * static_cast<double>(one.batch) * weights_of(one.pattern); }

double bytes_of(const KroneckerCase& one, DType dtype) {
  const auto& p = one.pattern;
  return static_cast<double>(size_of(dtype)) *
         (elements(one.batch, inputs_of(p)) + elements(one.batch, outputs_of(p)) + weights_of(p));
}

double memory_of(const KroneckerCase& one, DType dtype) {
  return (one.backward ? 2 : 1) * bytes_of(one, dtype);  // a gradient is as large as what it is of
}

std::int64_t usual_batch(Device device) { return device.type == DeviceType::cuda ? 25088 : 2048; }

void check_fits(const KroneckerCase& one, DType dtype, Device device, const char* command) {
  const bool gpu = device.type == DeviceType::cuda;
  const double have = gpu ? static_cast<double>(cuda::device_info(device.index).memory) : memory_bytes();
  if (const double need = memory_of(one, dtype); need > have) {
    throw Error(fmt::format("{}: {} at batch {}: needs {}, {} has {} (try a smaller --batch)", command,
                            text_of(one.pattern), one.batch, bytes_text(need), name_of(device), bytes_text(have)));
  }
}

KroneckerViews::KroneckerViews(const KroneckerCase& one, DType dtype, Device device)
    : x(batch_view(one, inputs_of(one.pattern), dtype, device)),
      w(nullptr, dtype, {one.pattern.a, one.pattern.b, one.pattern.c, one.pattern.d}, device),
      y(batch_view(one, outputs_of(one.pattern), dtype, device)) {}

void Mean::add(double value) {
  logs_ += std::log(value);
  ++count_;
}

double Mean::value() const { return std::exp(logs_ / count_); }

KroneckerTimes measure(const KroneckerCase& one, DType dtype, Stopwatch& clock) {
  Context context = clock.context();
  const Device device = clock.device();
  const auto& p = one.pattern;
  const Batch x(one, inputs_of(p), dtype, device);
  const Data w(device, dtype, {p.a, p.b, p.c, p.d});
  KroneckerTimes times;
  {
    const Batch y(one, outputs_of(p), dtype, device);
    times.forward = clock.cold([&] { ksmm(x.view(), w.view(), y.view(), context); });
  }
  if (one.backward) {
    const Batch d_y(one, outputs_of(p), dtype, device), d_x(one, inputs_of(p), dtype, device);
    const Data d_w(device, dtype, {p.a, p.b, p.c, p.d}), d_bias(device, dtype, {outputs_of(p)});
    times.backward = clock.cold([&] {
      ksmm(d_y.view(), swapped(w.view(), 1, 2), d_x.view(), context);
      ksmm_backward_weight(x.view(), d_y.view(), d_w.view(), d_bias.view(), context);
    });
  }
  return times;
}

Rates measure_rates(DType dtype, Stopwatch& clock) {
  const std::int64_t n = clock.device().type == DeviceType::cuda ? 8192 : 1024;
  return {clock.copy_rate(), dense_rate(n, dtype, clock)};
}

double floor_of(const KroneckerCase& one, DType dtype, const Rates& rates) {
  return std::max(bytes_of(one, dtype) / rates.copy, flops_of(one) / rates.dense);
}

}  // namespace fretwork::cli
