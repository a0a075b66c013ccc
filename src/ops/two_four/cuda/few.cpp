// Host side of the mma.sp kernel for up to 64 columns: which problems fit, how warps and CTAs share the work, launch.
#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "core/divide.h"
#include "ops/two_four/cuda/params_few.cuh"
#include "ops/two_four/problem.h"
#include "runtime/alignment.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"

namespace fretwork::two_four::cuda {
namespace {

namespace driver = fretwork::cuda;
using namespace few;

/// A type, the numbers of columns that it has a kernel for (as bits: a power of two each), and its size.
struct Kind {
  DType dtype;
  int columns;
  int bytes;
};
constexpr Kind kKinds[] = {{DType::f16, 8 | 16 | 32 | 64, 2},
                           {DType::bf16, 8 | 16 | 32 | 64, 2},
                           {DType::i8, 16 | 64, 1},
                           {DType::u8, 16 | 64, 1}};
constexpr int kLeastColumns = 8, kSizes = 4;  // 8, 16, 32, 64
constexpr int kMostSplit = 8;

KernelSpec instance(DType dtype, int columns) {
  return {"ops/two_four/cuda/few.cuh",
          std::string("fretwork::two_four::few::product<") + device_type(dtype) + ", " + std::to_string(columns) + ">",
          KernelSpec::kBySize};
}
std::vector<KernelSpec> list_kernels(const std::string& /*arch*/) {
  std::vector<KernelSpec> list;
  for (const Kind& kind : kKinds) {
    for (int columns = kLeastColumns; columns <= kMostColumns; columns *= 2) {
      if ((kind.columns & columns) != 0) {
        list.push_back(instance(kind.dtype, columns));
      }
    }
  }
  return list;
}
const KernelList kKernels{"two_four", list_kernels};
constexpr std::size_t kCount = std::size(kKinds) * kSizes;
constinit KernelTable<kCount> kernels;

/// Steps of `stride` keep what `count` of them start from a multiple of.
bool keeps(std::int64_t count, std::int64_t stride, std::int64_t multiple) {
  return count == 1 || stride % multiple == 0;
}

bool gives(const Problem& p) {
  if (!is_integer(p.dtype)) {
    return (p.out == p.dtype || p.out == DType::f32) && p.scale_out == nullptr;
  }
  return p.out == DType::i32 ? p.is_plain() : p.out != DType::f32 || p.scale_out == nullptr;
}

/// Values in 16 bytes, the metadata of these at once, and types and numbers that the kernel knows.
bool suits(const Problem& p, const Kind& kind) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() / 64;
  const std::int64_t run = kRunBytes / kind.bytes;
  const bool sizes = p.n <= kMostColumns && p.batch <= kMostColumns && p.n * p.batch <= kMostColumns && p.m <= kMost &&
                     p.k <= kMost && p.k > 0 && p.k % run == 0;
  return gives(p) && sizes && p.values.along == 1 && is_aligned(p.values.data, 16) &&
         keeps(p.m, p.values.line * kind.bytes, 16) && (p.words.along == 1 || p.k <= 8 * p.word_bytes) &&
         is_aligned(p.words.data, run / 8) && keeps(p.m, p.words.line * p.word_bytes, run / 8);
}

/// How many warps of a CTA stand along the rows (as a power of two), how many CTAs share the k of their rows, and the
/// stages that they have room for: 0 if none suits.
struct Spread {
  int log_rows = 0, split = 1, stages = 0;
};

/// The bytes of metadata of a run.
int run_words(const Kind& kind) { return kind.bytes == 1 ? 4 : 2; }

/// Clocks that a spread takes at best. Memory gives the sparse operand, L2 that and b, to all CTAs that run at once; a
/// multiprocessor has its own ports to both and to its shared memory, and its tensor cores.
double cost(const Problem& p, const Kind& kind, int columns, std::int64_t blocks, const Spread& spread,
            std::int64_t resident) {
  constexpr double kMemory = 2300, kL2 = 3200, kPort = 24, kShared = 128, kProducts = 22;
  constexpr double kStage = 400, kStart = 2000, kMeet = 600, kMeetEach = 150, kRemote = 32;
  const int parts = parts_of(spread.log_rows);
  const std::int64_t ctas = ceil_div(p.m, std::int64_t{kRows} << spread.log_rows) * spread.split;
  const std::int64_t stages = ceil_div(ceil_div(blocks, std::int64_t{parts}), std::int64_t{spread.split});
  const double sparse = kWarps * (kValueBytes + kRows * kBlockRuns * run_words(kind));
  const double b = double(parts) * kBlockRuns * kRunBytes * double(p.n * p.batch);
  const double shared = 2 * sparse + b + double(kWarps) * kBlockRuns * kRunBytes * columns;
  const auto active = static_cast<double>(std::min(ctas, resident));
  const double stage = std::max({sparse * active / kMemory, (sparse + b) * active / kL2, (sparse + b) / kPort,
                                 std::max(shared / kShared, kProducts * columns) + kStage});
  const double sums = sums_bytes(columns, spread.log_rows);
  const double meet = spread.split > 1 ? kMeet + kMeetEach * spread.split + sums / kRemote : sums / kShared;
  return double(ceil_div(ctas, resident)) * (double(stages) * stage + kStart) + meet;
}

Spread choose(const Problem& p, const Kind& kind, int columns, const Kernel& kernel, int device) {
  const driver::DeviceInfo& info = driver::device_info(device);
  const std::int64_t blocks = ceil_div(p.k * kind.bytes, std::int64_t{kBlockRuns} * kRunBytes);
  Spread best;
  double least = std::numeric_limits<double>::max();
  for (int split = 1; split <= (info.arch >= 90 ? kMostSplit : 1); ++split) {
    const std::int64_t resident =
        split == 1 ? info.multiprocessors
                   : std::int64_t{split} * kernel.resident_clusters(split, kThreads, info.shared_per_block);
    for (int log_rows = 0; log_rows <= kLogWarps; ++log_rows) {
      const int room = info.shared_per_block / stage_bytes(columns, log_rows, run_words(kind));
      const Spread spread{log_rows, split, std::min(room, kMostStages)};
      if (spread.stages < 2 || sums_bytes(columns, log_rows) > info.shared_per_block ||
          (split > 1 && ceil_div(blocks, std::int64_t{parts_of(log_rows)}) < split)) {
        continue;
      }
      if (const double clocks = cost(p, kind, columns, blocks, spread, resident); clocks < least) {
        least = clocks;
        best = spread;
      }
    }
  }
  return best;
}

/// Bytes from column to column of b, over all batches, if it lies along k in words of four bytes; else 0.
std::int64_t wide_step(const Problem& p, int bytes) {
  const std::int64_t step = (p.n == 1 ? p.b.batch : p.b.col) * bytes;
  const bool one = p.n * p.batch == 1, even = p.n == 1 || p.batch == 1 || p.b.batch == p.n * p.b.col;
  const bool wide = p.b.row == 1 && is_aligned(p.b.data, 4) && even && (one || (step % 4 == 0 && step != 0));
  return !wide ? 0 : one ? 4 : step;
}

Params fill(const Problem& p, const Kind& kind, const Spread& spread) {
  Params params{};
  params.values = p.values.data;
  params.words = p.words.data;
  params.b = p.b.data;
  params.bias = p.bias.data;
  params.scale_s = static_cast<const float*>(p.scale_s.data);
  params.scale_b = static_cast<const float*>(p.scale_b.data);
  params.c = p.c.data;
  params.values_line = p.values.line * kind.bytes;
  params.words_line = p.words.line * p.word_bytes;
  params.b_row = p.b.row * kind.bytes;
  params.b_col = p.b.col * kind.bytes;
  params.b_batch = p.b.batch * kind.bytes;
  params.c_row = p.c.row;
  params.c_col = p.c.col;
  params.c_batch = p.c.batch;
  params.bias_stride = p.bias.stride;
  params.scale_s_stride = p.scale_s.stride;
  params.scale_b_stride = p.scale_b.stride;
  params.m = static_cast<int>(p.m);
  params.n = static_cast<int>(p.n);
  params.columns = static_cast<int>(p.n * p.batch);
  params.runs = static_cast<int>(p.k * kind.bytes / kRunBytes);
  params.log_rows = spread.log_rows;
  params.split = spread.split;
  params.stages = spread.stages;
  params.activation = static_cast<int>(p.activation);
  for (params.words_step = 16; params.words_step > 2; params.words_step /= 4) {
    if (is_aligned(p.words.data, params.words_step) && keeps(p.m, params.words_line, params.words_step)) {
      break;
    }
  }
  params.b_wide = wide_step(p, kind.bytes);
  params.c_rows = p.n == 1 || std::llabs(p.c.row) <= std::llabs(p.c.col);
  params.c_wide = p.c.row == 1 && is_aligned(p.c.data, 4 * size_of(p.out)) && keeps(p.n, p.c.col, 4) &&
                  keeps(p.batch, p.c.batch, 4);
  params.scale_out = p.scale_out;
  params.out = out_type(p.out);
  params.bias_type = out_type(p.bias_dtype());
  return params;
}

}  // namespace

bool run_few(const Problem& problem, Context& context) {
  const int device = context.device.index, arch = driver::device_info(device).arch;
  const Kind* const kind = std::ranges::find(kKinds, problem.dtype, &Kind::dtype);
  if (arch < 80 || kind == std::end(kKinds) || !suits(problem, *kind)) {
    return false;
  }
  int columns = kLeastColumns;
  std::size_t which = static_cast<std::size_t>(kind - kKinds) * kSizes;
  for (; columns < problem.n * problem.batch || (kind->columns & columns) == 0; columns *= 2) {
    ++which;
  }
  const Kernel& kernel = kernels.get(which, device, [&] { return instance(problem.dtype, columns); });
  const Spread spread = choose(problem, *kind, columns, kernel, device);
  if (spread.stages == 0) {
    return false;
  }
  const Params params = fill(problem, *kind, spread);
  const std::int64_t grid = ceil_div(problem.m, std::int64_t{kRows} << spread.log_rows) * spread.split;
  const int shared = std::max(spread.stages * stage_bytes(columns, spread.log_rows, run_words(*kind)),
                              sums_bytes(columns, spread.log_rows));
  kernel.launch_clusters(grid, spread.split, kThreads, shared, &params, context.stream, arch >= 90);
  return true;
}

}  // namespace fretwork::two_four::cuda
