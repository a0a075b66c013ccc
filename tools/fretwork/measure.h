// What every measurement needs: data of any type on any device, and the time of calls on either clock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "fretwork/context.h"
#include "runtime/cuda_driver.h"
#include "runtime/tuner.h"

namespace fretwork::cli {

/// A tensor of random numbers, row-major, where an op runs.
class Data {
 public:
  Data(Device device, DType dtype, std::initializer_list<std::int64_t> sizes, std::uint64_t seed = 1);
  const TensorView& view() const { return view_; }
  /// The random number at a place in memory, whatever was written over it since.
  double drawn(std::int64_t at) const;
  /// `count` elements from a place in memory on, as they are now.
  std::vector<double> read(std::int64_t at, std::int64_t count) const;
  /// Zeros everywhere.
  void clear();

 private:
  TensorView view_;
  std::shared_ptr<const std::vector<std::byte>>
      drawn_;  ///< at least drawn_bytes_; all data of a type and a seed has the same
  std::size_t drawn_bytes_ = 0;
  std::vector<std::byte> host_;
  cuda::DeviceBuffer on_device_;
};

/// Up to `most` of [0, count): the ends, where tails are, and places between them.
std::vector<std::int64_t> sample_places(std::int64_t count, std::int64_t most, std::mt19937& random);
/// The error that a result may have, as a share of the largest magnitude, as the tests allow.
double tolerance_of(DType dtype, Precision precision);

/// Takes the time of calls on one device, which is the current one while this lives.
class Stopwatch {
 public:
  Stopwatch(Device device, Executor& executor, int rounds, Precision precision = Precision::ieee);

  Device device() const { return device_; }
  /// Whether a measurement begins with a call that says which kernels could run it (FRETWORK_EXPLAIN).
  void explain(bool yes) { explains_ = yes; }
  /// For the calls.
  Context context() const;
  /// Rounds of some milliseconds, in which calls follow one another and find in the caches what the last one left.
  Times warm(const std::function<void()>& call) const;
  /// On a GPU every call finds the L2 cache flushed; a CPU's caches are left as they are.
  Times cold(const std::function<void()>& call);
  /// One such round: how many calls it takes, and milliseconds per call.
  int calls_for(const std::function<void()>& call) const;
  double cold_round(const std::function<void()>& call, int calls);
  /// Bytes a millisecond, read and written, of a large copy.
  double copy_rate();

 private:
  void explain_one(const std::function<void()>& call) const;

  Device device_;
  Executor& executor_;
  int rounds_;
  Precision precision_;
  bool explains_ = false;
  std::optional<cuda::DeviceScope> scope_;
  cuda::DeviceBuffer flush_;
};

}  // namespace fretwork::cli
