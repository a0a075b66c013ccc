// Data of any type on any device, and timing on either clock.
#include "bench_case.h"

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "fretwork/ops.h"
#include "runtime/cuda_driver.h"

namespace fretwork::cli {
namespace {

constexpr std::array kNames = {"dsd", "dds", "sdd", "softmax"};

/// Random numbers of magnitude 0.5 to 1 in any type: an exponent, and sign and mantissa from the generator.
template <typename Bits>
void fill_bits(std::vector<std::byte>& bytes, Bits exponent, Bits random_bits) {
  std::uint64_t state = 1;
  for (std::size_t at = 0; at < bytes.size(); at += sizeof(Bits)) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const std::uint64_t mixed = state ^ (state >> 33);
    const auto value = static_cast<Bits>((static_cast<Bits>(mixed) & random_bits) | exponent);
    std::memcpy(bytes.data() + at, &value, sizeof value);
  }
}

std::vector<std::byte> random_bytes(DType dtype, std::int64_t count) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(count) * size_of(dtype));
  switch (dtype) {
    case DType::f64:
      fill_bits<std::uint64_t>(bytes, 0x3fe0'0000'0000'0000, 0x800f'ffff'ffff'ffff);
      break;
    case DType::f32:
      fill_bits<std::uint32_t>(bytes, 0x3f00'0000, 0x807f'ffff);
      break;
    case DType::f16:
      fill_bits<std::uint16_t>(bytes, 0x3800, 0x83ff);
      break;
    default:
      fill_bits<std::uint16_t>(bytes, 0x3f00, 0x807f);
  }
  return bytes;
}

/// A tensor of random numbers where the op runs.
class Data {
 public:
  Data(Device device, DType dtype, std::initializer_list<std::int64_t> sizes) : view_(nullptr, dtype, sizes, device) {
    host_ = random_bytes(dtype, view_.elements());
    view_.data = host_.data();
    if (device.type == DeviceType::cuda) {
      on_device_ = cuda::DeviceBuffer(device.index, host_.data(), host_.size());
      view_.data = on_device_.data();
      host_ = {};
    }
  }
  const TensorView& view() const { return view_; }

 private:
  TensorView view_;
  std::vector<std::byte> host_;
  cuda::DeviceBuffer on_device_;
};

double milliseconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double, std::milli>(time).count();
}

}  // namespace

std::optional<BenchOp> bench_op(std::string_view name) {
  const auto found = std::find(kNames.begin(), kNames.end(), name);
  return found != kNames.end() ? std::optional(static_cast<BenchOp>(found - kNames.begin())) : std::nullopt;
}

const char* name_of(BenchOp op) { return kNames[static_cast<std::size_t>(op)]; }

const char* unit_of(BenchOp op) { return op == BenchOp::softmax ? "GB/s" : "GFLOP/s"; }

double Bench::round(const std::function<void()>& call, int calls) const {
  if (device_.type == DeviceType::cuda) {
    cuda::Timer timer;
    timer.start(nullptr);
    for (int n = 0; n < calls; ++n) {
      call();
    }
    return static_cast<double>(timer.stop(nullptr)) / calls;
  }
  const auto begin = std::chrono::steady_clock::now();
  for (int n = 0; n < calls; ++n) {
    call();
  }
  return milliseconds(std::chrono::steady_clock::now() - begin) / calls;
}

double Bench::median(const std::function<void()>& call) const {
  constexpr double kRoundMs = 5;  // long enough for the clock and for a GPU's queue to fill
  round(call, 1);                 // makes plans and kernels
  const double once = round(call, 1);
  const int calls = static_cast<int>(std::clamp(std::ceil(kRoundMs / std::max(once, 1e-3)), 1.0, 1000.0));
  std::vector<double> times;
  for (int n = 0; n < rounds_; ++n) {
    times.push_back(round(call, calls));
  }
  const auto middle = times.begin() + std::ssize(times) / 2;
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

Measurement Bench::measure(const BenchCase& one) const {
  std::optional<cuda::DeviceScope> scope;
  if (device_.type == DeviceType::cuda) {
    scope.emplace(device_.index);
  }
  Context context = device_.type == DeviceType::cuda ? Context::cuda(device_.index) : Context::cpu(executor_);
  const auto layout = random_blocks({1, one.n / one.block, one.n / one.block, one.block, one.block}, one.density, 0);
  const bool softmax = one.op == BenchOp::softmax;
  const std::int64_t n = softmax ? 0 : one.n;  // softmax has no dense operands
  const Data values(device_, dtype_, {1, layout->nnz(), one.block, one.block});
  const Data left(device_, dtype_, {1, 1, n, n}), right(device_, dtype_, {1, 1, n, n});
  const Data result(device_, dtype_, {1, softmax ? layout->nnz() : 0, one.block, one.block});
  Measurement measured{layout->nnz()};
  measured.ms = median([&] {
    switch (one.op) {
      case BenchOp::dsd:
        return dsd(values.view(), right.view(), *layout, left.view(), context);
      case BenchOp::dds:
        return dds(left.view(), values.view(), *layout, right.view(), context);
      case BenchOp::sdd:
        return sdd(left.view(), right.view(), *layout, values.view(), context);
      case BenchOp::softmax:
        return block_softmax(values.view(), *layout, result.view(), context);
    }
  });
  const double entries = static_cast<double>(layout->nnz()) * static_cast<double>(one.block * one.block);
  const double work =
      softmax ? 2 * entries * static_cast<double>(size_of(dtype_)) : 2 * entries * static_cast<double>(one.n);
  measured.rate = work / measured.ms * 1e-6;
  return measured;
}

}  // namespace fretwork::cli
