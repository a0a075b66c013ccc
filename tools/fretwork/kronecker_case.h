// One measurement of a Kronecker product, and what it is held against.
#pragma once

#include <optional>
#include <string>

#include "fretwork/pattern.h"
#include "measure.h"

namespace fretwork::cli {

struct KroneckerCase {
  KroneckerPattern::Sizes pattern;
  std::int64_t batch = 0;
  bool bs_last = false;   ///< features stand before the batch in memory
  bool backward = false;  ///< the gradients of x, w and bias too
};

/// "(1,64,64,64)".
std::string text_of(const KroneckerPattern::Sizes& pattern);
double flops_of(const KroneckerCase& one);
/// Of x, w and y, which have to move once.
double bytes_of(const KroneckerCase& one, DType dtype);
/// What a measurement allocates.
double memory_of(const KroneckerCase& one, DType dtype);

/// Rows of x unless the command line says how many.
std::int64_t usual_batch(Device device);
/// Throws Error, which `command` begins, when the device has less memory than a measurement allocates.
void check_fits(const KroneckerCase& one, DType dtype, Device device, const char* command);

/// (batch, features) or weights, as yet without data.
struct KroneckerViews {
  TensorView x, w, y;
  KroneckerViews(const KroneckerCase& one, DType dtype, Device device);
};

/// A geometric mean that grows.
class Mean {
 public:
  void add(double value);
  int count() const { return count_; }
  double value() const;

 private:
  double logs_ = 0;
  int count_ = 0;
};

struct KroneckerTimes {
  Times forward;
  std::optional<Times> backward;
};
KroneckerTimes measure(const KroneckerCase& one, DType dtype, Stopwatch& clock);

/// The rates of this run that a floor is made of.
struct Rates {
  double copy = 0;   ///< bytes a millisecond, read and written
  double dense = 0;  ///< FLOP a millisecond of the dense product
};
Rates measure_rates(DType dtype, Stopwatch& clock);
/// Milliseconds below which no product can be: its bytes at the copy rate or its FLOPs at the dense one.
double floor_of(const KroneckerCase& one, DType dtype, const Rates& rates);

}  // namespace fretwork::cli
