// One measurement of a block-sparse operator: data, warm-up, rounds, median.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>

#include "fretwork/context.h"
#include "fretwork/tensor.h"

namespace fretwork::cli {

enum class BenchOp : std::uint8_t { dsd, dds, sdd, softmax };
std::optional<BenchOp> bench_op(std::string_view name);
const char* name_of(BenchOp op);
/// "GFLOP/s", or "GB/s" where memory is what counts.
const char* unit_of(BenchOp op);

/// n×n matrices, one head, one batch.
struct BenchCase {
  BenchOp op;
  std::int64_t n, block;
  double density;
};

struct Measurement {
  std::int64_t nnz = 0;
  double ms = 0;    ///< median over the rounds
  double rate = 0;  ///< on the non-zeros, in the op's unit
};

class Bench {
 public:
  Bench(Device device, DType dtype, Executor& executor, int rounds)
      : device_(device), dtype_(dtype), executor_(executor), rounds_(rounds) {}
  Measurement measure(const BenchCase& one) const;

 private:
  /// Milliseconds per call of one round of `calls`.
  double round(const std::function<void()>& call, int calls) const;
  double median(const std::function<void()>& call) const;

  Device device_;
  DType dtype_;
  Executor& executor_;
  int rounds_;
};

}  // namespace fretwork::cli
