// Operands of each op, and what its time means.
#include "bench_case.h"

#include <algorithm>
#include <array>

#include "fretwork/ops.h"

namespace fretwork::cli {
namespace {

constexpr std::array kNames = {"dsd", "dds", "sdd", "softmax"};

}  // namespace

std::optional<BenchOp> bench_op(std::string_view name) {
  const auto found = std::find(kNames.begin(), kNames.end(), name);
  return found != kNames.end() ? std::optional(static_cast<BenchOp>(found - kNames.begin())) : std::nullopt;
}

const char* name_of(BenchOp op) { return kNames[static_cast<std::size_t>(op)]; }

const char* unit_of(BenchOp op) { return op == BenchOp::softmax ? "GB/s" : "GFLOP/s"; }

Measurement measure(const BenchCase& one, DType dtype, Stopwatch& clock) {
  Context context = clock.context();
  const Device device = clock.device();
  const auto layout = random_blocks({1, one.n / one.block, one.n / one.block, one.block, one.block}, one.density, 0);
  const bool softmax = one.op == BenchOp::softmax;
  const std::int64_t n = softmax ? 0 : one.n, rows = softmax ? 0 : one.rows;  // softmax has no dense operands
  const Data values(device, dtype, {1, layout->nnz(), one.block, one.block});
  const Data wide(device, dtype, {1, 1, rows, n}), tall(device, dtype, {1, 1, n, rows});
  const Data out(device, dtype, {1, 1, one.op == BenchOp::dds ? rows : 0, n});
  const Data tall_out(device, dtype, {1, 1, one.op == BenchOp::dsd ? n : 0, rows});
  const Data result(device, dtype, {1, softmax ? layout->nnz() : 0, one.block, one.block});
  Measurement measured{layout->nnz()};
  const auto call = [&] {
    switch (one.op) {
      case BenchOp::dsd:
        return dsd(values.view(), tall.view(), layout, tall_out.view(), context);
      case BenchOp::dds:
        return dds(wide.view(), values.view(), layout, out.view(), context);
      case BenchOp::sdd:
        return sdd(tall.view(), wide.view(), layout, values.view(), context);
      case BenchOp::softmax:
        return block_softmax(values.view(), layout, result.view(), context);
    }
  };
  measured.ms = clock.cold(call).ms;
  const double entries = static_cast<double>(layout->nnz()) * static_cast<double>(one.block * one.block);
  const double work =
      softmax ? 2 * entries * static_cast<double>(size_of(dtype)) : 2 * entries * static_cast<double>(one.rows);
  measured.rate = work / measured.ms * 1e-6;
  return measured;
}

}  // namespace fretwork::cli
