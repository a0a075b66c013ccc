// One measurement of a block-sparse operator.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "measure.h"

namespace fretwork::cli {

enum class BenchOp : std::uint8_t { dsd, dds, sdd, softmax };
std::optional<BenchOp> bench_op(std::string_view name);
const char* name_of(BenchOp op);
/// "GFLOP/s", or "GB/s" where memory is what counts.
const char* unit_of(BenchOp op);

/// One head, one batch, n×n where blocks are: values · (n × rows), (rows × n) · values, (n × rows) · (rows × n).
struct BenchCase {
  BenchOp op;
  std::int64_t n, rows, block;
  double density;
};

struct Measurement {
  std::int64_t nnz = 0;
  double ms = 0;    ///< median over the rounds
  double rate = 0;  ///< on the non-zeros, in the op's unit
};

Measurement measure(const BenchCase& one, DType dtype, Stopwatch& clock);

}  // namespace fretwork::cli
