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

Measurement measure(const BenchCase& one, DType dtype, const Stopwatch& clock);
/// GFLOP/s of the dense product, every block being there: the machine's peak as this library reaches it.
double dense_rate(std::int64_t n, DType dtype, const Stopwatch& clock);

}  // namespace fretwork::cli
