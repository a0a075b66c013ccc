// Host side of the kernel for few columns and small weights on Hopper: which problems fit, its configuration, launch.
#include "ops/two_four/cuda/direct.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "core/divide.h"
#include "ops/two_four/cuda/params_direct.cuh"
#include "runtime/alignment.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"

namespace fretwork::two_four::direct {
namespace {

namespace driver = fretwork::cuda;

constexpr std::array kTypes = {DType::f16, DType::bf16};
constexpr std::array kTiles = {1, 2};
constexpr std::array kBlocks = {1, 2};
constexpr std::array kWarps = {4, 8, 16};

KernelSpec instance(DType dtype, int tiles, int blocks) {
  return {"ops/two_four/cuda/direct.cuh",
          std::string("fretwork::two_four::direct::product<") + device_type(dtype) + ", " + std::to_string(tiles) +
              ", " + std::to_string(blocks) + ">",
          KernelSpec::kBySize};
}
std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  for (const DType dtype : kTypes) {
    for (const int tiles : kTiles) {
      for (const int blocks : kBlocks) {
        if (arch == "sm_90a") {
          list.push_back(instance(dtype, tiles, blocks));
        }
      }
    }
  }
  return list;
}
const KernelList kKernels{"two_four", list_kernels};
constinit KernelTable<kTypes.size() * kTiles.size() * kBlocks.size()> kernels;

const Kernel& kernel(DType dtype, int tiles, int blocks, int device) {
  const auto type = static_cast<std::size_t>(std::ranges::find(kTypes, dtype) - kTypes.begin());
  const auto wide = static_cast<std::size_t>(std::ranges::find(kTiles, tiles) - kTiles.begin());
  return kernels.get((type * kTiles.size() + wide) * kBlocks.size() + static_cast<std::size_t>(blocks - 1), device,
                     [&] { return instance(dtype, tiles, blocks); });
}

int tiles_of(const Problem& p) { return static_cast<int>(ceil_div(p.n, 8)); }

/// Whether lines of `count` that are `bytes` apart begin with whole units of 16 bytes.
bool in_units(const void* data, std::int64_t count, std::int64_t bytes) {
  return is_aligned(data, 16) && (count == 1 || bytes % 16 == 0);
}

/// As a linear layer calls it: operands along k in whole blocks.
bool suits(const Problem& p) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() / 64;
  const bool type = std::ranges::find(kTypes, p.dtype) != kTypes.end() && p.out == p.dtype;
  const bool sizes = p.batch == 1 && p.n <= 8 * kTiles.back() && p.m < kMost && p.k > 0 && p.k % kDepth == 0 &&
                     p.k < kMost && p.scale_s.data == nullptr && p.scale_b.data == nullptr && p.scale_out == nullptr;
  return type && sizes && p.values.along == 1 && in_units(p.values.data, p.m, 2 * p.values.line) &&
         p.words.along == 1 && in_units(p.words.data, p.m, p.words.line * p.word_bytes) && p.b.row == 1 &&
         in_units(p.b.data, p.n, 2 * p.b.col);
}
bool suits(const Problem& p, const Form& form) {
  return std::ranges::find(kWarps, form.warps) != kWarps.end() &&
         std::ranges::find(kBlocks, form.blocks) != kBlocks.end() && form.warps <= most_warps(tiles_of(p), form.blocks);
}

/// Whether it is the quickest: with up to 8 columns it was on all weights that were tried, with more b, which every CTA
/// reads, takes as long as small weights.
bool wins(const Problem& p) { return p.m * p.k <= (tiles_of(p) == 1 ? 1 << 26 : 1 << 22); }

/// As many warps as find room when all CTAs run at once, and no more than there are blocks.
Form choose(const Problem& p, int device) {
  const std::int64_t ctas = ceil_div(p.m, kRows), blocks = p.k / kDepth;
  const std::int64_t each = ceil_div(ctas, driver::device_info(device).multiprocessors);
  const int most = tiles_of(p) == 1 ? 16 : 8, room = each == 1 ? most : each == 2 ? 8 : 4;
  const int warps = blocks <= 4 ? 4 : blocks <= 8 ? std::min(room, 8) : room;
  return {warps, blocks > warps * (tiles_of(p) == 1 ? 4 : 1) ? 2 : 1};
}

}  // namespace

bool run(const Problem& p, Context& context, const Form& form) {
  if (!suits(p) || !suits(p, form)) {
    return false;
  }
  Params params{};
  params.values = p.values.data;
  params.words = p.words.data;
  params.b = p.b.data;
  params.bias = p.bias.data;
  params.c = p.c.data;
  params.values_line = 2 * p.values.line;
  params.words_line = p.words.line * p.word_bytes;
  params.b_col = 2 * p.b.col;
  params.c_row = p.c.row;
  params.c_col = p.c.col;
  params.bias_stride = p.bias.stride;
  params.m = static_cast<int>(p.m);
  params.n = static_cast<int>(p.n);
  params.blocks = static_cast<int>(p.k / kDepth);
  params.activation = static_cast<int>(p.activation);
  kernel(p.dtype, tiles_of(p), form.blocks, context.device.index)
      .launch_behind(ceil_div(p.m, kRows), 32 * form.warps, shared_bytes(tiles_of(p), form.warps), &params,
                     context.stream);
  return true;
}

}  // namespace fretwork::two_four::direct

namespace fretwork::two_four::cuda {

bool run_direct(const Problem& problem, Context& context) {
  return fretwork::cuda::kernel_arch(context.device.index) == "sm_90a" && direct::suits(problem) &&
         direct::wins(problem) && direct::run(problem, context, direct::choose(problem, context.device.index));
}

}  // namespace fretwork::two_four::cuda
