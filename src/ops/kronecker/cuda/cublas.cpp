// Products with d = 1 by cuBLASLt: how they are written as a batch of dense products, and their cost.
#include "runtime/cublas.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "ops/kronecker/cuda/families.h"
#include "runtime/cost.h"

namespace fretwork::kronecker::cublas {
namespace {

namespace library = fretwork::cublas;

/// A matrix of `rows` × `cols` with these strides, blocks `batch` apart; nothing where neither stride is 1.
std::optional<library::Matrix> matrix(void* data, std::int64_t rows, std::int64_t row, std::int64_t cols,
                                      std::int64_t col, std::int64_t batch) {
  if (row == 1 || rows == 1) {
    return library::Matrix{data, cols > 1 ? col : std::max(col, rows), batch, false};
  }
  if (col == 1 || cols == 1) {
    return library::Matrix{data, rows > 1 ? row : std::max(row, cols), batch, true};
  }
  return std::nullopt;
}

/// y of a block as features × batch if features are neighbours, else as batch × features.
std::optional<library::Product> product_of(const Problem& p) {
  const auto& [a, b, c, d] = p.sizes;
  const bool first = p.y.feature == 1;
  const auto x = first ? matrix(p.x.data, c, p.x.feature, p.batch, p.x.batch, c * p.x.feature)
                       : matrix(p.x.data, p.batch, p.x.batch, c, p.x.feature, c * p.x.feature);
  const auto w = first ? matrix(p.w.data, b, p.w.b, c, p.w.c, p.w.a) : matrix(p.w.data, c, p.w.c, b, p.w.b, p.w.a);
  const auto y = first ? matrix(p.y.data, b, p.y.feature, p.batch, p.y.batch, b * p.y.feature)
                       : matrix(p.y.data, p.batch, p.y.batch, b, p.y.feature, b * p.y.feature);
  const bool bias = p.bias.data == nullptr || (first && a == 1 && (b == 1 || p.bias.stride == 1));
  const bool type = p.dtype == DType::f16 || p.dtype == DType::bf16;
  if (d != 1 || !type || !x || !w || !y || !bias || p.activation != Activation::none) {
    return std::nullopt;
  }
  return first ? library::Product{p.dtype, b, p.batch, c, a, *w, *x, *y, p.bias.data}
               : library::Product{p.dtype, p.batch, b, c, a, *x, *w, *y, nullptr};
}

bool fits(const Problem& p, const Config& /*config*/, const Machine& machine) {
  const auto product = product_of(p);
  const bool plans = machine.device < 0;  // for a GPU that is not here, with the library
  return product && machine.number >= 80 && (plans || library::fits(*product, machine.device));
}

/// A tile of the library as its times suggest them: outputs × rows of the batch, µs of 64 of the depth, µs at its end.
struct Tile {
  std::int64_t rows, cols;
  double step, end;
};
constexpr Tile kTiles[] = {{64, 64, 0.13, 0.14}, {64, 128, 0.12, 1.32}, {128, 256, 0.67, 1.73}};

/// µs, fitted to 1,800 random products (bench/results/h200/kronecker_candidates.json has a sample): three of four are
/// within 6%.
double cost(const Problem& p, const Config& /*config*/, const Machine& machine) {
  constexpr double kRamp = 1.05, kRampBytes = 2e6, kStart = 0.18, kUnaligned = 3;
  const auto& [a, b, c, d] = p.sizes;
  const double scale = cost::kMultiprocessors / machine.multiprocessors, moved = moved_bytes(p);
  const bool aligned = p.x.feature == 1 || p.x.feature % 8 == 0;
  double tiles = std::numeric_limits<double>::infinity();
  for (const auto& [rows, cols, step, end] : kTiles) {
    const double waves = std::ceil(double(a * ceil_div(b, rows) * ceil_div(p.batch, cols)) / machine.multiprocessors);
    tiles = std::min(tiles, waves * (double(ceil_div(c, std::int64_t{64})) * step + end));
  }
  const cost::Work work{.memory = moved / cost::kMemory * scale + kRamp * (1 - std::exp(-moved / kRampBytes)),
                        .busiest = tiles * (aligned ? 1 : kUnaligned),
                        .serial = kStart};
  return work.without_launches();
}

void launch(const Problem& p, const Config& /*config*/, Context& context) { library::run(*product_of(p), context); }

}  // namespace

constinit const Functions<Problem> kProduct{fits, cost, launch};

}  // namespace fretwork::kronecker::cublas
