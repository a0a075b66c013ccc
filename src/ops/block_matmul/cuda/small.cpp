// The host side of the small tiles: which of them fit, what they cost, the launch.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "blocks/plan.h"
#include "core/divide.h"
#include "ops/block_matmul/cuda/arguments.h"
#include "ops/block_matmul/cuda/families.h"
#include "runtime/alignment.h"
#include "runtime/cuda_driver.h"
#include "runtime/device_plan.h"
#include "runtime/kernels.h"

namespace fretwork::block_matmul::small {
namespace {

namespace driver = fretwork::cuda;

constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
constexpr int kElement = 2;  // bytes

/// What an instance depends on beside the tile.
struct Access {
  bool blocks_k, dense_k;
  int piece;  ///< bytes of the dense operand that are copied at a time
};
constexpr int kPieces[] = {16, 8, 4, 2};

KernelSpec instance(DType dtype, const SmallTile& tile, const Access& access) {
  const auto flag = [](bool value) { return value ? ", true" : ", false"; };
  return {"ops/block_matmul/cuda/small.cuh",
          std::string("fretwork::spmm_small<") + device_type(dtype) + ", " + std::to_string(tile.rows) + ", " +
              std::to_string(tile.cols) + flag(access.blocks_k) + flag(access.dense_k) + ", " +
              std::to_string(access.piece) + ">",
          tile.ring_bytes()};
}

std::vector<KernelSpec> list_kernels(const std::string& arch) {
  std::vector<KernelSpec> list;
  if (driver::arch_number(arch) < 80) {
    return list;
  }
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const SmallTile& tile : kSmallTiles) {
      for (const bool blocks_k : {false, true}) {
        list.push_back(instance(dtype, tile, {blocks_k, true, 16}));
        for (const int piece : kPieces) {
          list.push_back(instance(dtype, tile, {blocks_k, false, piece}));
        }
      }
    }
  }
  return list;
}
const KernelList kKernels{"block_matmul", list_kernels};

constinit KernelTable<256> kernels;

const Kernel& kernel_of(DType dtype, std::size_t tile, const Access& access, int device) {
  const auto order = access.dense_k ? 4 : std::ranges::find(kPieces, access.piece) - kPieces;
  const std::size_t which =
      tile << 5 | (dtype == DType::f16 ? 0u : 16u) | (access.blocks_k ? 8u : 0u) | static_cast<std::size_t>(order);
  return kernels.get(which, device, [&] { return instance(dtype, kSmallTiles[tile], access); });
}

// ------------------------------------------------------------------------------------------------------ operands

/// How blocks and the dense operand can be read; `fits` says whether they can.
struct Readable : Access {
  bool fits = false;
};
Readable readable(const Problem& p) {
  const BlocksArg b = blocks_arg(p);
  const Matrix& m = p.right;
  Readable r;
  r.blocks_k = b.col == 1 && is_aligned(b.data, {b.row, b.block, b.z}, kElement, 16);
  const bool blocks = r.blocks_k || (b.row == 1 && is_aligned(b.data, {b.col, b.block, b.z}, kElement, 16));
  const auto free_stride = m.cols == 1 ? 0 : m.col_stride;
  r.dense_k = m.row_stride == 1 && is_aligned(m.data, {free_stride, m.h_stride, m.z_stride}, kElement, 16);
  const bool along = m.col_stride == 1 || m.cols == 1;
  const auto copied = [&](int piece) {  // a chunk of 16 bytes is there whole or not at all
    return (piece < 16 || m.cols % 8 == 0) &&
           is_aligned(m.data, {m.row_stride, m.h_stride, m.z_stride}, kElement, piece);
  };
  r.piece = r.dense_k ? 16 : *std::ranges::find_if(kPieces, copied);  // all is aligned to 2
  r.fits = blocks && (r.dense_k || along);
  return r;
}

// ---------------------------------------------------------------------------------------------------------- plans

/// Every block row has room for the longest one (see SmallParams). Where that would be mostly empty, other kernels run:
/// their plans are made of steps alone.
bool has_even_rows(const Problem& p) {
  constexpr std::int64_t kLongest = 2048, kFree = 1 << 16;  // blocks of a row; entries that may always be empty
  const BlockIndex& index = p.transposed ? p.layout->by_col() : p.layout->by_row();
  const std::int64_t lines = p.layout->heads() * shape_of(p).lines;
  std::int64_t longest = 0;
  for (std::int64_t line = 0; line < lines; ++line) {
    longest = std::max(longest, static_cast<std::int64_t>(index.line(line).size()));
  }
  return longest <= kLongest && lines * longest <= 4 * p.layout->nnz() + kFree;
}

/// See SmallParams.
struct DevicePlan {
  driver::DeviceBuffer rows;
  int row_count, stride, groups_per_head;
  std::size_t bytes() const { return rows.bytes(); }
};

DevicePlan make_plan(const Problem& p, int device) {
  const blocks::SpmmPlan plan = blocks::make_spmm_plan(*p.layout, p.transposed, 1, 0);
  const auto stride = static_cast<std::size_t>(1 + plan.segments.front().last - plan.segments.front().first);
  std::vector<int> rows(2 * stride * plan.segments.size());
  for (std::size_t n = 0; const auto& segment : plan.segments) {
    int* const row = rows.data() + 2 * stride * n++;
    row[0] = segment.group;
    row[1] = segment.last - segment.first;
    std::copy(plan.steps.begin() + 2 * segment.first, plan.steps.begin() + 2 * segment.last, row + 2);
  }
  return {driver::DeviceBuffer(device, rows.data(), rows.size() * sizeof(int)), static_cast<int>(plan.segments.size()),
          static_cast<int>(stride), plan.groups_per_head};
}

std::shared_ptr<const DevicePlan> find_plan(const Problem& p, const Context& context) {
  return find_device_plan<DevicePlan>((p.transposed ? "small t " : "small n ") + p.layout->key(), context,
                                      [&](int device) { return make_plan(p, device); });
}

int shared_bytes(const DevicePlan& plan, const SmallTile& tile) { return tile.ring_bytes() + 8 * plan.stride; }

std::int64_t ctas_of(const Problem& p, const DevicePlan& plan, const SmallTile& tile) {
  return plan.row_count * (shape_of(p).block_rows / tile.rows) * ceil_div(p.out.cols, tile.cols) * p.z_out *
         grid_heads(p);
}

/// Whether the result is stored along its rows' axis.
bool is_turned(const Problem& p) { return p.out.row_stride == 1 && (p.out.col_stride != 1 || p.out.cols == 1); }

/// Elements of the result that can be stored at a time, along its rows' axis or along its columns'.
int run_of(const Problem& p, bool turned) {
  const Matrix& out = p.out;
  const std::int64_t line = turned ? (out.cols == 1 ? 0 : out.col_stride) : out.row_stride;
  for (const int run : {8, 4, 2}) {
    const bool whole = turned || (out.col_stride == 1 && out.cols % run == 0);
    if (whole && is_aligned(out.data, {line, out.z_stride, out.h_stride}, kElement, kElement * run)) {
      return run;
    }
  }
  return 1;
}

/// µs, fitted to some thousand random products (bench/results/h200/block_candidates.json). An SM is busy for `stage`
/// with 64 of K of a tile, and for `cta` with each CTA; a CTA alone takes `start`, and `chain` for 64 of K.
struct Rates {
  double stage, cta, chain, start;
};
constexpr Rates kRates[] = {{0.79, 1.07, 0.54, 1.06}, {0.30, 0.80, 0.45, 0.99}, {0.27, 0.73, 0.44, 1.02},
                            {0.23, 0.72, 0.39, 0.98}, {0.33, 0.99, 0.51, 1.15}, {0.31, 0.76, 0.45, 1.11}};
static_assert(std::size(kRates) == std::size(kSmallTiles));

double cost(const Problem& p, const DevicePlan& plan, std::size_t number, const Readable& access, int multiprocessors) {
  const SmallTile& tile = kSmallTiles[number];
  const auto& [stage, cta, chain, start] = kRates[number];
  const double cols = static_cast<double>(shape_of(p).block_cols) / 64 / tile.teams();  // stages of a block
  const double ctas = static_cast<double>(ctas_of(p, plan, tile));
  const double stages = ctas * static_cast<double>(p.layout->nnz()) / plan.row_count * cols;
  // Lines along K arrive faster; small pieces take more copies, and what is shifted in registers is not copied far
  // ahead. Results that are stored in small runs take longer as well.
  const double slower = access.dense_k       ? 0.8
                        : access.piece == 16 ? 1
                        : access.piece == 8  ? 1.45
                        : access.piece == 4  ? 1.9
                                             : 2.4;
  const int run = run_of(p, is_turned(p));
  const double storing = run == 8 ? 1 : run == 4 ? 1.1 : run == 2 ? 1.33 : 2;
  const double traffic = stages * tile.teams() * tile.stage_bytes();
  // A dense operand that L2 cannot hold: block rows fetch their strips at different times, each from memory.
  const double strips = 2 * static_cast<double>(p.right.rows * p.right.cols * p.z_out * p.h_out);
  const double again = strips > 40e6 ? traffic / (static_cast<double>(shape_of(p).block_rows) / tile.rows) : 0;
  const double busy = stages / multiprocessors * stage * slower + std::ceil(ctas / multiprocessors) * cta * storing;
  const double alone = start + (plan.stride - 1) * cols * chain * slower;
  constexpr double kL2 = 8e6;  // bytes per µs: strips are shared
  const cost::Work work{.memory = std::max(operand_bytes(p), again) / cost::kMemory,
                        .l2 = traffic / kL2 * cost::kMultiprocessors / multiprocessors,
                        .busiest = std::max(busy, alone),
                        .serial = 0.15 * std::min(busy, alone)};
  return work.microseconds();
}

}  // namespace

std::vector<Candidate<int>> candidates(const Problem& p, const Context& context) {
  const auto [lines, rows, cols] = shape_of(p);
  const int device = context.device.index;
  if (p.kind != Kind::spmm || (p.dtype != DType::f16 && p.dtype != DType::bf16) || p.layout->nnz() == 0 ||
      p.z_out == 0 || p.h_out == 0 || p.out.cols == 0 || p.z_sum != 1 || p.h_sum != 1 || rows % 16 != 0 ||
      cols % 16 != 0 || driver::arch_number(device) < 80) {
    return {};
  }
  const Readable access = readable(p);
  if (!access.fits || !has_even_rows(p)) {
    return {};
  }
  const auto plan = find_plan(p, context);
  const auto& info = driver::device_info(device);
  std::vector<Candidate<int>> list;
  for (std::size_t n = 0; n < std::size(kSmallTiles); ++n) {
    const SmallTile& tile = kSmallTiles[n];
    if (rows % tile.rows == 0 && shared_bytes(*plan, tile) <= info.shared_per_block &&
        ctas_of(p, *plan, tile) <= kMost) {
      list.push_back({static_cast<int>(n), cost(p, *plan, n, access, info.multiprocessors)});
    }
  }
  return list;
}

void launch(const Problem& p, Context& context, int number) {
  const SmallTile tile = kSmallTiles[static_cast<std::size_t>(number)];
  const auto plan = find_plan(p, context);
  const Readable access = readable(p);
  const auto [lines, block_rows, block_cols] = shape_of(p);
  SmallParams params{};
  params.blocks = blocks_arg(p);
  params.dense = matrix_arg(p.right);
  params.out = matrix_arg(p.out);
  params.rows = static_cast<const int*>(plan->rows.data());
  params.per_block = Divisor(block_cols / 16);
  params.row_count = plan->row_count;
  params.stride = plan->stride;
  params.pieces = static_cast<int>(block_rows / tile.rows);
  params.tiles = static_cast<int>(ceil_div(p.out.cols, tile.cols));
  params.heads = static_cast<int>(grid_heads(p));
  params.groups_per_head = plan->groups_per_head;
  params.block_rows = static_cast<int>(block_rows);
  params.block_cols = static_cast<int>(block_cols);
  params.free = static_cast<int>(p.out.cols);
  params.turned = is_turned(p);
  params.run = run_of(p, params.turned);
  kernel_of(p.dtype, static_cast<std::size_t>(number), access, context.device.index)
      .launch(ctas_of(p, *plan, tile), 32 * tile.warps, shared_bytes(*plan, tile), &params, context.stream);
}

}  // namespace fretwork::block_matmul::small
