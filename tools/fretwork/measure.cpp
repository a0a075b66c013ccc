// Random numbers, clocks, and the copy that others are held against.
#include "measure.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "core/element.h"
#include "runtime/choose.h"

namespace fretwork::cli {
namespace {

/// Random numbers of magnitude 0.5 to 1 in any type: an exponent, and sign and mantissa from the generator.
template <typename Bits>
void fill_bits(std::vector<std::byte>& bytes, std::uint64_t seed, Bits exponent, Bits random_bits) {
  std::uint64_t state = seed;
  for (std::size_t at = 0; at < bytes.size(); at += sizeof(Bits)) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const std::uint64_t mixed = state ^ (state >> 33);
    const auto value = static_cast<Bits>((static_cast<Bits>(mixed) & random_bits) | exponent);
    std::memcpy(bytes.data() + at, &value, sizeof value);
  }
}

std::vector<std::byte> random_bytes(DType dtype, std::uint64_t seed, std::size_t count) {
  std::vector<std::byte> bytes(count);
  switch (dtype) {
    case DType::f64:
      fill_bits<std::uint64_t>(bytes, seed, 0x3fe0'0000'0000'0000, 0x800f'ffff'ffff'ffff);
      break;
    case DType::f32:
      fill_bits<std::uint32_t>(bytes, seed, 0x3f00'0000, 0x807f'ffff);
      break;
    case DType::f16:
      fill_bits<std::uint16_t>(bytes, seed, 0x3800, 0x83ff);
      break;
    case DType::f8_e4m3:
      fill_bits<std::uint8_t>(bytes, seed, 0x30, 0x87);
      break;
    case DType::f8_e5m2:
      fill_bits<std::uint8_t>(bytes, seed, 0x38, 0x83);
      break;
    case DType::i8:
    case DType::u8:
      fill_bits<std::uint8_t>(bytes, seed, 0x01, 0xff);
      break;
    default:
      fill_bits<std::uint16_t>(bytes, seed, 0x3f00, 0x807f);
  }
  return bytes;
}

/// At least so many, drawn once: a tuner asks again for every problem.
std::shared_ptr<const std::vector<std::byte>> drawn_bytes(DType dtype, std::uint64_t seed, std::size_t count) {
  static std::map<std::pair<DType, std::uint64_t>, std::shared_ptr<const std::vector<std::byte>>> known;
  auto& bytes = known[{dtype, seed}];
  if (bytes == nullptr || bytes->size() < count) {
    bytes = std::make_shared<const std::vector<std::byte>>(random_bytes(dtype, seed, count));
  }
  return bytes;
}

/// Copies the first `have` of `bytes` over the rest: `copy(to, from, count)`, twice as much each time.
template <typename Copy>
void repeat(std::byte* data, std::size_t have, std::size_t bytes, const Copy& copy) {
  for (; have < bytes; have *= 2) {
    copy(data + have, data, std::min(have, bytes - have));
  }
}

double milliseconds(std::chrono::steady_clock::duration time) {
  return std::chrono::duration<double, std::milli>(time).count();
}

/// Milliseconds per call of one round of `calls`.
double round_of(Device device, const std::function<void()>& call, int calls) {
  if (device.type == DeviceType::cuda) {
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

}  // namespace

Data::Data(Device device, DType dtype, std::initializer_list<std::int64_t> sizes, std::uint64_t seed)
    : view_(nullptr, dtype, sizes, device) {
  constexpr std::size_t kDrawn = 64 << 20;  // more is the same again: gigabytes would take longer than the work
  const std::size_t bytes = static_cast<std::size_t>(view_.elements()) * size_of(dtype);
  const std::size_t drawn = drawn_bytes_ = std::min(bytes, kDrawn);
  drawn_ = drawn_bytes(dtype, seed, drawn);
  if (device.type == DeviceType::cuda) {
    on_device_ = cuda::DeviceBuffer(device.index, nullptr, bytes);
    view_.data = on_device_.data();
    if (bytes > 0) {
      const cuda::DeviceScope scope(device.index);
      cuda::copy_to_device(view_.data, drawn_->data(), drawn, nullptr);
      repeat(static_cast<std::byte*>(view_.data), drawn, bytes,
             [](void* to, const void* from, std::size_t n) { cuda::copy_on_device(to, from, n, nullptr); });
      cuda::synchronize(nullptr);
    }
  } else {
    host_.resize(bytes);
    std::copy_n(drawn_->begin(), drawn, host_.begin());
    repeat(host_.data(), drawn, bytes, [](void* to, const void* from, std::size_t n) { std::memcpy(to, from, n); });
    view_.data = host_.data();
  }
}

double Data::drawn(std::int64_t at) const {
  const auto count = static_cast<std::int64_t>(drawn_bytes_ / size_of(view_.dtype));
  return read_element<double>(drawn_->data(), view_.dtype, at % count);
}

std::vector<double> Data::read(std::int64_t at, std::int64_t count) const {
  const std::size_t size = size_of(view_.dtype);
  std::vector<std::byte> bytes(static_cast<std::size_t>(count) * size);
  const auto* const from = static_cast<const std::byte*>(view_.data) + static_cast<std::size_t>(at) * size;
  if (view_.device.type == DeviceType::cuda) {
    const cuda::DeviceScope scope(view_.device.index);
    cuda::copy_to_host(bytes.data(), from, bytes.size(), nullptr);
    cuda::synchronize(nullptr);
  } else {
    std::memcpy(bytes.data(), from, bytes.size());
  }
  std::vector<double> numbers;
  for (std::int64_t n = 0; n < count; ++n) {
    numbers.push_back(read_element<double>(bytes.data(), view_.dtype, n));
  }
  return numbers;
}

void Data::clear() {
  const std::size_t bytes = static_cast<std::size_t>(view_.elements()) * size_of(view_.dtype);
  if (view_.device.type == DeviceType::cuda) {
    const cuda::DeviceScope scope(view_.device.index);
    cuda::fill_zero(view_.data, bytes, nullptr);
  } else {
    std::memset(view_.data, 0, bytes);
  }
}

std::vector<std::int64_t> sample_places(std::int64_t count, std::int64_t most, std::mt19937& random) {
  std::set<std::int64_t> found;
  for (std::int64_t n = 0; n < std::min<std::int64_t>(count, 3); ++n) {
    found.insert({n, count - 1 - n});
  }
  std::uniform_int_distribution<std::int64_t> any(0, count - 1);
  while (std::ssize(found) < std::min(count, most)) {
    found.insert(any(random));
  }
  return {found.begin(), found.end()};
}

double tolerance_of(DType dtype, Precision precision) {
  switch (dtype) {
    case DType::f64:
      return 1e-12;
    case DType::f32:
      return precision == Precision::tf32 ? 4e-3 : 2e-5;
    case DType::f16:
      return 4e-3;
    default:
      return 3e-2;
  }
}

Stopwatch::Stopwatch(Device device, Executor& executor, int rounds, Precision precision)
    : device_(device), executor_(executor), rounds_(rounds), precision_(precision) {
  if (device.type == DeviceType::cuda) {
    scope_.emplace(device.index);
  }
}

Context Stopwatch::context() const {
  Context context = device_.type == DeviceType::cuda ? Context::cuda(device_.index) : Context::cpu(executor_);
  context.precision = precision_;
  return context;
}

int Stopwatch::calls_for(const std::function<void()>& call) const {
  constexpr double kRoundMs = 5;  // long enough for the clock and for a GPU's queue to fill
  round_of(device_, call, 1);     // makes plans and kernels
  const double once = round_of(device_, call, 1);
  return static_cast<int>(std::clamp(std::ceil(kRoundMs / std::max(once, 1e-3)), 1.0, 1000.0));
}

void Stopwatch::explain_one(const std::function<void()>& call) const {
  if (explains_) {
    const bool before = explains();
    explain_calls(true);
    call();
    explain_calls(before);
  }
}

Times Stopwatch::warm(const std::function<void()>& call) const {
  explain_one(call);
  const int calls = calls_for(call);
  std::vector<double> rounds;
  for (int n = 0; n < rounds_; ++n) {
    rounds.push_back(round_of(device_, call, calls));
  }
  return times_of(std::move(rounds));
}

double Stopwatch::cold_round(const std::function<void()>& call, int calls) {
  if (device_.type == DeviceType::cpu) {
    return round_of(device_, call, calls);
  }
  if (flush_.data() == nullptr) {
    const std::size_t least = std::size_t{256} << 20;
    flush_ = cuda::DeviceBuffer(device_.index, nullptr, std::max(least, 4 * cuda::device_info(device_.index).l2));
  }
  // The clock starts behind the flush, which also gives the launch the time to get ready.
  cuda::fill_zero(flush_.data(), flush_.bytes(), nullptr);
  return round_of(device_, call, 1);
}

Times Stopwatch::cold(const std::function<void()>& call) {
  explain_one(call);
  const int calls = calls_for(call);
  std::vector<double> rounds;
  for (int n = 0; n < rounds_; ++n) {
    rounds.push_back(cold_round(call, calls));
  }
  return times_of(std::move(rounds));
}

double Stopwatch::copy_rate() {
  const bool gpu = device_.type == DeviceType::cuda;
  const std::int64_t bytes = std::int64_t{1} << (gpu ? 29 : 26);
  const Data from(device_, DType::f64, {bytes / 8}), to(device_, DType::f64, {bytes / 8});
  const Times times = cold([&] {
    if (gpu) {
      return cuda::copy_on_device(to.view().data, from.view().data, static_cast<std::size_t>(bytes), nullptr);
    }
    executor_.parallel_for(bytes, 1 << 20, [&](std::int64_t begin, std::int64_t end) {
      std::memcpy(static_cast<std::byte*>(to.view().data) + begin,
                  static_cast<const std::byte*>(from.view().data) + begin, static_cast<std::size_t>(end - begin));
    });
  });
  return 2 * static_cast<double>(bytes) / times.ms;
}

}  // namespace fretwork::cli
