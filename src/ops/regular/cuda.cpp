// SPLAT's operators on a GPU: copy the progressions once, fill parameters, get the kernel, launch.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "fretwork/error.h"
#include "ops/regular/params.h"
#include "ops/regular/problem.h"
#include "runtime/kernels.h"
#include "runtime/plan_cache.h"

namespace fretwork::regular_op::cuda {
namespace {

using fretwork::cuda::DeviceBuffer;

constexpr const char* kSource = "ops/regular/kernel.cuh";
constexpr const char* kTileSource = "ops/regular/kernel_tiles.cuh";
constexpr int kTile = 64, kTileThreads = 128;  // lines and partners of a tile, and the threads it takes
constexpr std::int64_t kWorthTiles = 16;       // elements of tiles that cost less than an entry by itself
constexpr int kThreads = 256;                  // of a CTA, a warp for each line
constexpr int kMostHeld = 64;                  // entries of a lane where a warp holds a row for its softmax

/// A pattern's progressions on the device, and the tiles that they make.
struct Plan {
  DeviceBuffer lines, list, order, tiles;
  int tile_count = 0;  ///< none where tiles would be mostly empty
  int stride = 0;      ///< of all lines, or 0
  std::size_t bytes() const { return lines.bytes() + list.bytes() + order.bytes() + tiles.bytes(); }
};

int narrowed(std::int64_t n) {
  if (n > std::numeric_limits<int>::max()) {
    throw Error("fretwork", "pattern", "sizes below 2^31 on a GPU", std::to_string(n));
  }
  return static_cast<int>(n);
}

template <typename T>
DeviceBuffer upload(const std::vector<T>& host, int device) {
  return host.empty() ? DeviceBuffer() : DeviceBuffer(device, host.data(), host.size() * sizeof(T));
}

/// The stride of all lines of more than one entry; 0 where they have several.
int common_stride(const std::vector<RegularLine>& lines) {
  int stride = 1;
  bool first = true;
  for (const RegularLine& line : lines) {
    if (line.count > 1) {
      if (!first && line.stride != stride) {
        return 0;
      }
      stride = line.stride;
      first = false;
    }
  }
  return stride;
}

/// Lines in the order in which tiles take them: those of one stride and remainder side by side, by their start.
std::vector<int> tile_order(const std::vector<RegularLine>& lines) {
  const auto place = [&](int n) {
    const RegularLine& line = lines[static_cast<std::size_t>(n)];
    return std::tuple(line.stride, line.start % line.stride, line.start);
  };
  std::vector<int> order(lines.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, place);
  return order;
}

/// The longest first. Lines share a tile while no partner between theirs is missing.
std::vector<RegularTile> make_tiles(const std::vector<RegularLine>& lines, const std::vector<int>& order) {
  std::vector<RegularTile> tiles;
  for (int n = 0; n < static_cast<int>(order.size()); ++n) {
    const RegularLine& line = lines[static_cast<std::size_t>(order[static_cast<std::size_t>(n)])];
    const auto joins = [&](const RegularTile& tile) {
      return tile.lines < kTile && tile.step == line.stride && (line.start - tile.base) % tile.step == 0 &&
             (line.start - tile.base) / tile.step <= tile.slots;
    };
    if (tiles.empty() || !joins(tiles.back())) {
      tiles.push_back({n, 0, line.start, line.stride, 0});
    }
    RegularTile& tile = tiles.back();
    ++tile.lines;
    tile.slots = std::max(tile.slots, (line.start - tile.base) / tile.step + line.count);
  }
  std::ranges::stable_sort(tiles, std::ranges::greater{}, &RegularTile::slots);
  return tiles;
}

Plan make_plan(const std::vector<Progression>& lines, const std::vector<std::int64_t>& list, int device) {
  std::vector<RegularLine> narrow_lines;
  narrow_lines.reserve(lines.size());
  for (const Progression& line : lines) {
    narrow_lines.push_back({narrowed(line.start), line.count > 1 ? narrowed(line.stride) : 1, narrowed(line.count)});
  }
  std::vector<int> narrow_list(list.size());
  std::ranges::transform(list, narrow_list.begin(), narrowed);
  Plan plan{upload(narrow_lines, device), upload(narrow_list, device), {}, {}, 0, common_stride(narrow_lines)};
  if (list.empty()) {
    const std::vector<int> order = tile_order(narrow_lines);
    const std::vector<RegularTile> tiles = make_tiles(narrow_lines, order);
    std::int64_t area = 0, entries = 0;
    for (const RegularTile& tile : tiles) {
      area += (tile.slots + kTile - 1) / kTile * std::int64_t{kTile} * kTile;
    }
    for (const RegularLine& line : narrow_lines) {
      entries += line.count;
    }
    if (area <= kWorthTiles * entries) {
      plan.order = upload(order, device);
      plan.tiles = upload(tiles, device);
      plan.tile_count = static_cast<int>(tiles.size());
    }
  }
  return plan;
}

/// Remembered by pattern and device, and kept for good once a graph refers to it.
template <typename Make>
std::shared_ptr<const Plan> remember(const std::string& what, Context& context, const Make& make) {
  static PlanCache<Plan>& cache = *std::make_unique<PlanCache<Plan>>().release();
  auto plan = cache.get(hash128(what + "@" + std::to_string(context.device.index)), make);
  if (fretwork::cuda::is_capturing(context.stream)) {
    cache.pin(plan);
  }
  return plan;
}

std::shared_ptr<const Plan> row_plan(const RegularPattern& pattern, Context& context) {
  return remember("rows " + pattern.key(), context,
                  [&] { return make_plan(rows_of(pattern)->lines, {}, context.device.index); });
}

std::shared_ptr<const Plan> column_plan(const RegularPattern& pattern, Context& context) {
  return remember("columns " + pattern.key(), context, [&] {
    const auto columns = columns_of(pattern);
    return make_plan(columns->lines, columns->list, context.device.index);
  });
}

RegularOperand params(const Operand& o) { return {o.data, o.batch, o.head, o.row, o.col}; }

/// Elements that a lane adds up: what a warp needs for the whole depth, 4 at most.
int elements_of_lane(std::int64_t depth) { return depth <= 32 ? 1 : depth <= 64 ? 2 : 4; }

KernelSpec spec(Result result, DType dtype, int elements) {
  const std::string type = device_type(dtype);
  if (result == Result::values) {
    return {kSource, "fretwork::regular_values<" + type + ">"};
  }
  return {kSource, std::string("fretwork::") + (result == Result::by_row ? "regular_by_row<" : "regular_by_col<") +
                       type + ", " + std::to_string(elements) + ">"};
}

int tile_shared_bytes(Result result, std::int64_t depth) {
  const int operand = kTile * static_cast<int>((depth + 63) / 64 * 64) * 2;
  return (result == Result::values ? std::max(operand, kTile * (kTile + 8) * 2) : kTile * kTile * 2) + 2 * operand;
}

KernelSpec tile_spec(Result result, DType dtype, std::int64_t depth, std::int64_t stride) {
  const std::string arguments = std::string(device_type(dtype)) + ", " + std::to_string((depth + 63) / 64 * 64);
  const int shared = tile_shared_bytes(result, depth);
  switch (result) {
    case Result::values:
      return {kTileSource, "fretwork::regular_values_tiles<" + arguments + ">", shared};
    case Result::by_row:
      return {kTileSource, "fretwork::regular_by_row_tiles<" + arguments + ">", shared};
    default:
      return {kTileSource, "fretwork::regular_by_col_tiles<" + arguments + ", " + std::to_string(stride) + ">", shared};
  }
}

/// 16-byte accesses of whole rows.
bool in_chunks(const Operand& o, std::int64_t chunk) {
  return o.col == 1 && reinterpret_cast<std::uintptr_t>(o.data) % 16 == 0 && o.row % chunk == 0 &&
         o.head % chunk == 0 && o.batch % chunk == 0;
}

/// `held` entries in each lane, `together` of them at a time; 0 where a warp does not hold a row.
KernelSpec softmax_spec(bool backward, DType dtype, std::int64_t held, std::int64_t together) {
  const std::string name = std::string("fretwork::regular_softmax") + (backward ? "_backward" : "");
  const std::string type = device_type(dtype);
  return {kSource, held == 0
                       ? name + "<" + type + ">"
                       : name + "_held<" + type + ", " + std::to_string(held) + ", " + std::to_string(together) + ">"};
}

/// Kernels count lines in 32 bits.
std::int64_t checked_tasks(std::int64_t count) {
  if (count > std::numeric_limits<int>::max()) {
    throw Error("fretwork", "rows", "fewer than 2^31 rows of all batches and heads", std::to_string(count));
  }
  return count;
}

/// What both kinds of kernel are told.
template <typename Params>
Params common_params(const Product& p, const Plan& by_rows) {
  Params q{};
  q.rows = static_cast<const RegularLine*>(by_rows.lines.data());
  q.values = params(p.values);
  q.by_row = params(p.by_row);
  q.by_col = params(p.by_col);
  q.heads = narrowed(p.heads);
  q.group = narrowed(p.heads / p.kv_heads);
  q.width = narrowed(p.width);
  q.depth = narrowed(p.depth);
  return q;
}

/// A warp for each line, whatever the operands and the pattern.
void run_lines(const Product& p, const Plan& by_rows, const Plan& by_lines, Context& context) {
  const bool columns = p.result == Result::by_col;
  const int elements = elements_of_lane(p.depth);
  auto q = common_params<RegularParams>(p, by_rows);
  q.chunks = p.result == Result::values ? 1 : narrowed((p.depth + 32 * elements - 1) / (32 * elements));
  const std::int64_t tasks = checked_tasks(p.batch * (columns ? p.kv_heads * p.cols : p.heads * p.rows) * q.chunks);
  if (columns) {
    q.columns = static_cast<const RegularLine*>(by_lines.lines.data());
    q.list = static_cast<const int*>(by_lines.list.data());
  }
  q.tasks = static_cast<unsigned>(tasks);
  q.row_count = narrowed(p.rows);
  q.col_count = narrowed(p.cols);
  const Kernel& kernel = get_kernel(spec(p.result, p.dtype, elements), context.device.index);
  constexpr int kWarps = kThreads / 32;
  kernel.launch((tasks + kWarps - 1) / kWarps, kThreads, 0, &q, context.stream);
}

/// Whether 16-byte accesses and tensor cores can do it, and tiles are worth it.
bool fits_tiles(const Product& p, const Plan& by_rows, const Plan& by_lines) {
  return p.dtype != DType::f32 && p.depth % 8 == 0 && p.depth <= 256 && by_lines.tile_count > 0 && p.values.col == 1 &&
         in_chunks(p.by_row, 8) && in_chunks(p.by_col, 8) && (p.result != Result::by_col || by_rows.stride > 0);
}

void run_tiles(const Product& p, const Plan& by_rows, const Plan& by_lines, Context& context) {
  auto q = common_params<RegularTileParams>(p, by_rows);
  q.order = static_cast<const int*>(by_lines.order.data());
  q.tiles = static_cast<const RegularTile*>(by_lines.tiles.data());
  q.tile_count = by_lines.tile_count;
  const std::int64_t heads = p.result == Result::by_col ? p.kv_heads : p.heads;
  const Kernel& kernel = get_kernel(tile_spec(p.result, p.dtype, p.depth, by_rows.stride), context.device.index);
  kernel.launch(checked_tasks(p.batch * heads * q.tile_count), kTileThreads, tile_shared_bytes(p.result, p.depth), &q,
                context.stream);
}

}  // namespace

void run(const Product& p, Context& context) {
  const bool columns = p.result == Result::by_col;
  const std::int64_t lines = p.batch * (columns ? p.kv_heads * p.cols : p.heads * p.rows);
  if (lines == 0 || (p.result == Result::values ? p.width : p.depth) == 0) {
    return;
  }
  const fretwork::cuda::DeviceScope scope(context.device.index);
  const auto by_rows = row_plan(*p.pattern, context);
  const auto by_lines = columns ? column_plan(*p.pattern, context) : by_rows;
  (fits_tiles(p, *by_rows, *by_lines) ? run_tiles : run_lines)(p, *by_rows, *by_lines, context);
}

void run(const Softmax& s, Context& context) {
  const std::int64_t tasks = checked_tasks(s.batch * s.heads * s.rows);
  if (tasks * s.width == 0) {
    return;
  }
  const fretwork::cuda::DeviceScope scope(context.device.index);
  const auto plan = row_plan(*s.pattern, context);
  RegularSoftmaxParams q{};
  q.rows = static_cast<const RegularLine*>(plan->lines.data());
  q.in = params(s.in);
  q.d_out = params(s.d_out);
  q.out = params(s.out);
  q.scale = static_cast<float>(s.scale);
  q.heads = narrowed(s.heads);
  q.row_count = narrowed(s.rows);
  q.width = narrowed(s.width);
  q.tasks = static_cast<unsigned>(tasks);
  const std::int64_t chunk = 16 / static_cast<std::int64_t>(size_of(s.dtype));
  const bool whole = s.width % chunk == 0 && in_chunks(s.in, chunk) && in_chunks(s.out, chunk) &&
                     (s.d_out.data == nullptr || in_chunks(s.d_out, chunk));
  const std::int64_t step = whole ? chunk : 4;
  const std::int64_t held = ((s.width + 31) / 32 + step - 1) / step * step;
  const bool holds = held <= kMostHeld;
  const KernelSpec spec = softmax_spec(s.d_out.data != nullptr, s.dtype, holds ? held : 0, whole ? chunk : 1);
  constexpr int kWarps = kThreads / 32;  // a row's each, or all of a row
  get_kernel(spec, context.device.index)
      .launch(holds ? (tasks + kWarps - 1) / kWarps : tasks, kThreads, 0, &q, context.stream);
}

namespace {

std::vector<KernelSpec> list(const std::string& /*arch*/) {
  std::vector<KernelSpec> specs;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    specs.push_back(spec(Result::values, dtype, 0));
    for (const int elements : {1, 2, 4}) {
      specs.push_back(spec(Result::by_row, dtype, elements));
      specs.push_back(spec(Result::by_col, dtype, elements));
    }
    for (const std::int64_t depth : {64, 128, 192, 256}) {
      if (dtype != DType::f32) {
        specs.push_back(tile_spec(Result::values, dtype, depth, 0));
        specs.push_back(tile_spec(Result::by_row, dtype, depth, 0));
        specs.push_back(tile_spec(Result::by_col, dtype, depth, depth / 64));  // any stride
      }
    }
    for (const bool backward : {false, true}) {
      specs.push_back(softmax_spec(backward, dtype, 0, 0));
      for (const int held : {8, 24, kMostHeld}) {  // any multiple of what is taken together
        specs.push_back(softmax_spec(backward, dtype, held, 1));
        specs.push_back(softmax_spec(backward, dtype, held, 16 / static_cast<int>(size_of(dtype))));
      }
    }
  }
  return specs;
}

const KernelList kernels("regular", list);

}  // namespace

}  // namespace fretwork::regular_op::cuda
