// Multiplies a block-sparse matrix with a dense one on all cores of the CPU and checks the result against plain loops.
#include <fretwork/executor_tbb.h>
#include <fretwork/fretwork.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <random>
#include <vector>

namespace {

std::vector<float> random_numbers(std::int64_t count) {
  static std::mt19937 generator(1);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> numbers(static_cast<std::size_t>(count));
  std::generate(numbers.begin(), numbers.end(), [&] { return uniform(generator); });
  return numbers;
}

/// The same product in double, block by block, element by element.
std::vector<double> plain_product(const std::vector<float>& values, const std::vector<float>& dense,
                                  const fretwork::BlockLayout& layout, std::int64_t width) {
  const auto& s = layout.sizes();
  std::vector<double> out(static_cast<std::size_t>(s.rows * s.block_rows * width));
  for (std::int64_t i = 0; i < s.rows; ++i) {
    for (const auto& [j, block] : layout.by_row().line(i)) {
      for (std::int64_t y = 0; y < s.block_rows; ++y) {
        for (std::int64_t x = 0; x < s.block_cols; ++x) {
          const double a = values[(block * s.block_rows + y) * s.block_cols + x];
          for (std::int64_t n = 0; n < width; ++n) {
            out[(i * s.block_rows + y) * width + n] += a * dense[(j * s.block_cols + x) * width + n];
          }
        }
      }
    }
  }
  return out;
}

int run() {
  // 16 × 12 blocks of 32 × 32, of which about a quarter are there, times a dense 384 × 100 matrix.
  const auto layout = fretwork::random_blocks({1, 16, 12, 32, 32}, 0.25, 7);
  const std::int64_t rows = layout->shape()[1], cols = layout->shape()[2], width = 100;
  const std::vector<float> values = random_numbers(layout->nnz() * 32 * 32), dense = random_numbers(cols * width);
  std::vector<float> out(static_cast<std::size_t>(rows * width));

  fretwork::TbbExecutor threads;  // without one, Context::cpu() runs everything on this thread
  fretwork::Context context = fretwork::Context::cpu(threads);
  const auto f32 = fretwork::DType::f32;
  fretwork::dsd({values.data(), f32, {1, layout->nnz(), 32, 32}}, {dense.data(), f32, {1, 1, cols, width}}, layout,
                {out.data(), f32, {1, 1, rows, width}}, context);

  const std::vector<double> expected = plain_product(values, dense, *layout, width);
  double worst = 0;
  for (std::size_t n = 0; n < out.size(); ++n) {
    worst = std::max(worst, std::abs(out[n] - expected[n]));
  }
  std::printf("%lld of 192 blocks, density %.2f, largest error %.1e\n", static_cast<long long>(layout->nnz()),
              layout->density(), worst);
  return worst < 1e-4 ? 0 : 1;
}

}  // namespace

int main() {
  try {
    return run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
