// Host side of the kernel for up to 64 columns on Hopper: which problems fit, how CTAs share the work, launch.
#include "ops/two_four/cuda/narrow.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "ops/two_four/cuda/params_narrow.cuh"
#include "runtime/alignment.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"
#include "runtime/tensor_map.h"

namespace fretwork::two_four::narrow {
namespace {

namespace driver = fretwork::cuda;

constexpr std::array kTypes = {DType::f16, DType::bf16};
constexpr std::array kColumns = {16, 32, 64};
constexpr std::array kGroups = {1, 2};
static_assert(shared_bytes(64, 2) + 256 <= 227 << 10 && stages(64, 2) > 3);

KernelSpec instance(DType dtype, int columns, int groups) {
  return {"ops/two_four/cuda/narrow.cuh",
          std::string("fretwork::two_four::narrow::product<") + device_type(dtype) + ", " + std::to_string(columns) +
              ", " + std::to_string(groups) + ">",
          shared_bytes(columns, groups)};
}
std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  for (const DType dtype : kTypes) {
    for (const int columns : kColumns) {
      for (const int groups : kGroups) {
        if (arch == "sm_90a") {
          list.push_back(instance(dtype, columns, groups));
        }
      }
    }
  }
  return list;
}
const KernelList kKernels{"two_four", list_kernels};
constinit KernelTable<kTypes.size() * kColumns.size() * kGroups.size()> kernels;

int columns_of(const Problem& p) { return *std::ranges::lower_bound(kColumns, static_cast<int>(p.n)); }

const Kernel& kernel(const Problem& p, int groups, int device) {
  const int columns = columns_of(p);
  const auto type = static_cast<std::size_t>(std::ranges::find(kTypes, p.dtype) - kTypes.begin());
  const auto wide = static_cast<std::size_t>(std::ranges::find(kColumns, columns) - kColumns.begin());
  return kernels.get((type * kColumns.size() + wide) * kGroups.size() + static_cast<std::size_t>(groups - 1), device,
                     [&] { return instance(p.dtype, columns, groups); });
}

/// As a linear layer calls it, and nothing that begins or ends within a tile.
bool suits(const Problem& p) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() / 64;
  const bool type = std::ranges::find(kTypes, p.dtype) != kTypes.end() && p.out == p.dtype;
  const bool sizes = p.batch == 1 && p.n <= kColumns.back() && p.m % rows(1) == 0 && p.m < kMost && p.k > 0 &&
                     p.k % kDepth == 0 && p.k < kMost;
  const bool result = p.c.row == 1 && is_aligned(p.c.data, 4) && (p.n == 1 || p.c.col % 2 == 0);
  return type && sizes && result && p.words.along == 1 && p.scale_s.data == nullptr && p.scale_b.data == nullptr &&
         p.scale_out == nullptr;
}
bool suits(const Problem& p, const Form& form) {
  return std::ranges::find(kGroups, form.groups) != kGroups.end() && p.m % rows(form.groups) == 0 && form.split >= 1 &&
         form.split <= kMostSplit && p.k / kDepth >= form.split;
}

/// Clocks that a form takes: memory gives the sparse operand, L2 that and b to all CTAs, each of which has a port to
/// it, and a CTA's sums go to others. The numbers are those that chose best among all forms of 39 products, 1024² to
/// 14336 × 4096.
double cost(const Problem& p, const Form& form) {
  constexpr double kMemory = 1200, kL2 = 5000, kPort = 40, kSums = 30, kMeet = 10;
  const auto ctas = static_cast<double>(p.m / rows(form.groups) * form.split);
  const std::int64_t steps = (p.k / kDepth + form.split - 1) / form.split;
  const double sparse = rows(form.groups) * (kDepth + kDepth / 8), b = double(p.n) * kDepth * 2;
  const double own = double(steps) * (sparse + b) / kPort;
  const double all = double(p.k / kDepth) / form.split * ctas;
  const double sums = 4.0 * rows(form.groups) * columns_of(p) / kSums + kMeet * form.split;
  return std::max({all * sparse / kMemory, all * (sparse + b) / kL2, own}) + own / 4 + sums;
}

/// The quickest by reckoning of those whose CTAs all run at once.
std::optional<Form> choose(const Problem& p, int device) {
  struct Candidate {
    double cost;
    Form form;
  };
  std::array<Candidate, kGroups.size() * kMostSplit> all;
  std::size_t count = 0;
  const int multiprocessors = driver::device_info(device).multiprocessors;
  for (const int groups : kGroups) {
    for (int split = 1; split <= kMostSplit; ++split) {
      if (const Form form{groups, split}; suits(p, form) && p.m / rows(groups) * split <= multiprocessors) {
        all[count++] = {cost(p, form), form};
      }
    }
  }
  const auto end = all.begin() + count;
  std::sort(all.begin(), end, [](const Candidate& x, const Candidate& y) { return x.cost < y.cost; });
  const auto fits = [&](const Candidate& candidate) {
    const auto [groups, split] = candidate.form;
    return split == 1 ||
           p.m / rows(groups) <=
               kernel(p, groups, device).resident_clusters(split, threads(groups), shared_bytes(columns_of(p), groups));
  };
  const auto found = std::find_if(all.begin(), end, fits);
  return found != end ? std::optional(found->form) : std::nullopt;
}

void share(Params& params, int steps, int units, int split) {
  params.split = split;
  params.slots = (units + split - 1) / split;
  params.inverse = ((1u << 31) + static_cast<unsigned>(split) - 1) / static_cast<unsigned>(split);
  for (int rank = 0; rank <= split; ++rank) {
    params.first_step[rank] = static_cast<int>(std::int64_t{rank} * steps / split);
    params.first_unit[rank] = rank * units / split;
  }
}

}  // namespace

bool run(const Problem& p, Context& context, const Form& form) {
  if (!suits(p) || !suits(p, form)) {
    return false;
  }
  const auto values = make_tiled_view(p.values.data, {p.k / 2, p.m, 1, 1}, {p.values.along, p.values.line, 0, 0});
  const auto words = make_tiled_view(p.words.data, {p.k / 8, p.m, 1, 1}, {1, p.words.line * p.word_bytes, 0, 0}, 1);
  const auto b = make_tiled_view(p.b.data, {p.k, p.n, 1, 1}, {p.b.row, p.b.col, 0, 0});
  if (!values || !words || !b) {
    return false;
  }
  const int columns = columns_of(p), device = context.device.index;
  const auto tile = static_cast<std::uint32_t>(rows(form.groups));
  Params params{};
  params.values = values->map(kDepth / 2, tile);
  params.words = words->map(64, tile);
  params.b = b->map(64, static_cast<std::uint32_t>(columns));
  params.out = p.c.data;
  params.c_col = p.c.col;
  params.bias = p.bias.data;
  params.bias_stride = p.bias.stride;
  params.activation = static_cast<int>(p.activation);
  params.n = static_cast<int>(p.n);
  share(params, static_cast<int>(p.k / kDepth), units(columns, form.groups), form.split);
  kernel(p, form.groups, device)
      .launch_clusters(p.m / tile * form.split, form.split, threads(form.groups), shared_bytes(columns, form.groups),
                       &params, context.stream, true);
  return true;
}

}  // namespace fretwork::two_four::narrow

namespace fretwork::two_four::cuda {

bool run_narrow(const Problem& problem, Context& context) {
  if (fretwork::cuda::kernel_arch(context.device.index) != "sm_90a" || !narrow::suits(problem)) {
    return false;
  }
  const auto form = narrow::choose(problem, context.device.index);
  return form && narrow::run(problem, context, *form);
}

}  // namespace fretwork::two_four::cuda
