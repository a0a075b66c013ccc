// SPLAT's operators on a GPU: upload what the pattern says once, fill parameters, get the kernel, launch.
#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "fretwork/error.h"
#include "ops/regular/cuda/params.h"
#include "ops/regular/problem.h"
#include "ops/regular/tiles.h"
#include "runtime/alignment.h"
#include "runtime/device_plan.h"
#include "runtime/kernels.h"

namespace fretwork::regular_op::cuda {
namespace {

namespace driver = fretwork::cuda;
using driver::DeviceBuffer;

constexpr const char* kSource = "ops/regular/cuda/kernel.cuh";
constexpr const char* kTileSource = "ops/regular/cuda/tiles.cuh";
constexpr int kTileThreads = 2 * kRegularLines;
constexpr int kThreads = 256;      // of a CTA, a warp for each line
constexpr int kMostHeld = 64;      // entries of a lane where a warp holds a row for its softmax
constexpr int kMostInPairs = 32;   // of them, where they are not taken 16 bytes at a time: registers
constexpr int kMostInFew = 20;     // and where less than a warp holds a row
constexpr int kRowCost = 24;       // of a lane, in entries
constexpr int kTilesAtOnce = 600;  // more than run at once: a head's sums are free when their place is needed again

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
template <typename T>
const T* data(const DeviceBuffer& buffer) {
  return static_cast<const T*>(buffer.data());
}

/// Entries as lists: the columns of rows, or RegularPlaces of columns.
struct ListPlan {
  DeviceBuffer first, entries;
  std::size_t bytes() const { return first.bytes() + entries.bytes(); }
};

std::shared_ptr<const ListPlan> row_lists(const RegularPattern& pattern, Context& context) {
  return find_device_plan<ListPlan>("rows " + pattern.key(), context, [&](int device) {
    const auto rows = rows_of(pattern);
    return ListPlan{upload(rows->first, device), upload(rows->columns, device)};
  });
}

std::shared_ptr<const ListPlan> column_lists(const RegularPattern& pattern, Context& context) {
  static_assert(sizeof(Columns::Entry) == sizeof(RegularPlace));
  return find_device_plan<ListPlan>("columns " + pattern.key(), context, [&](int device) {
    const auto columns = columns_of(pattern);
    return ListPlan{upload(columns->first, device), upload(columns->entries, device)};
  });
}

struct TilePlan {
  DeviceBuffer tiles, lines, bits, partners, wave_tiles, first;
  int tile_count = 0, wave_count = 0, sums = 0;  ///< no tiles where they would be mostly empty
  std::size_t bytes() const { return lines.bytes() + bits.bytes() + partners.bytes() + first.bytes(); }
};

std::shared_ptr<const TilePlan> tile_plan(const RegularPattern& pattern, bool by_col, Context& context) {
  return find_device_plan<TilePlan>(
      (by_col ? "column tiles " : "row tiles ") + pattern.key(), context, [&](int device) {
        const Tiles made =
            by_col ? make_tiles(*columns_of(pattern), pattern.rows()) : make_tiles(*rows_of(pattern), pattern.cols());
        return TilePlan{upload(made.tiles, device),
                        upload(made.lines, device),
                        upload(made.bits, device),
                        upload(made.partners, device),
                        upload(made.wave_tiles, device),
                        by_col ? DeviceBuffer() : upload(rows_of(pattern)->first, device),
                        static_cast<int>(made.tiles.size()),
                        static_cast<int>(made.wave_tiles.size()),
                        made.sums};
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

/// What tiles.cuh lays out.
int tile_shared_bytes(Result result, std::int64_t depth) {
  constexpr int kStage = kRegularLines * kRegularPitch * 2, kStep = kRegularLines * 16 + kRegularBlock * 4;
  const int panels = kRegularBlock * static_cast<int>((depth + 63) / 64 * 64) * 2;
  const int x = result == Result::values ? std::max(2 * panels, kStage) : 2 * kStage;
  return 2 * panels + x + 3 * kStep + 2 * kRegularLines * 4 + 16;
}

KernelSpec tile_spec(Result result, DType dtype, std::int64_t depth, const std::string& arch) {
  const char* const name = result == Result::values   ? "regular_values_tiles"
                           : result == Result::by_row ? "regular_by_row_tiles"
                                                      : "regular_by_col_tiles";
  return {kTileSource,
          std::string("fretwork::") + name + "<" + device_type(dtype) + ", " + std::to_string((depth + 63) / 64 * 64) +
              ", " + (arch == "sm_90a" ? "true" : "false") + ">",
          tile_shared_bytes(result, depth)};
}

/// Kernels count a row's bytes in 32 bits.
bool short_rows(const Operand& o) { return o.row >= 0 && o.row < std::int64_t{1} << 30; }

/// 16-byte accesses of whole rows.
bool in_chunks(const Operand& o) {
  return o.col == 1 && short_rows(o) && is_aligned(o.data, {o.row, o.head, o.batch}, 2, 16);
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
Params common_params(const Product& p) {
  Params q{};
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
void run_lists(const Product& p, Context& context) {
  const bool by_col = p.result == Result::by_col;
  const auto lists = by_col ? column_lists(*p.pattern, context) : row_lists(*p.pattern, context);
  const int elements = elements_of_lane(p.depth);
  auto q = common_params<RegularParams>(p);
  q.chunks = p.result == Result::values ? 1 : narrowed((p.depth + 32 * elements - 1) / (32 * elements));
  const std::int64_t tasks = checked_tasks(p.batch * (by_col ? p.kv_heads * p.cols : p.heads * p.rows) * q.chunks);
  if (by_col) {
    q.col_first = data<long long>(lists->first);
    q.places = data<RegularPlace>(lists->entries);
  } else {
    q.first = data<long long>(lists->first);
    q.columns = data<int>(lists->entries);
  }
  q.tasks = static_cast<unsigned>(tasks);
  q.row_count = narrowed(p.rows);
  q.col_count = narrowed(p.cols);
  const Kernel& kernel = get_kernel(spec(p.result, p.dtype, elements), context.device.index);
  constexpr int kWarps = kThreads / 32;
  kernel.launch((tasks + kWarps - 1) / kWarps, kThreads, 0, &q, context.stream);
}

/// Whether 16-byte accesses and tensor cores can do it.
bool fits_tiles(const Product& p, const Context& context) {
  return p.dtype != DType::f32 && p.depth % 8 == 0 && p.depth <= 256 && p.values.col == 1 && short_rows(p.values) &&
         in_chunks(p.by_row) && in_chunks(p.by_col) &&
         tile_shared_bytes(p.result, p.depth) <= driver::device_info(context.device.index).shared_per_block;
}

void run_tiles(const Product& p, const TilePlan& plan, Context& context) {
  auto q = common_params<RegularTileParams>(p);
  q.tiles = data<RegularTile>(plan.tiles);
  q.lines = data<RegularTileLine>(plan.lines);
  q.bits = data<RegularBits>(plan.bits);
  q.partners = data<int>(plan.partners);
  q.first = data<long long>(plan.first);
  q.wave_tiles = data<int>(plan.wave_tiles);
  q.tile_count = plan.tile_count;
  q.sum_count = plan.sums;
  const std::int64_t heads = p.batch * (p.result == Result::by_col ? p.kv_heads : p.heads);
  const std::int64_t tasks = checked_tasks(heads * q.tile_count);
  const bool waits = p.result != Result::values && plan.wave_count > 1;
  q.wave_count = waits ? plan.wave_count : 1;
  q.ring = narrowed(std::min(heads, std::max<std::int64_t>(2, kTilesAtOnce / q.tile_count + 1)));
  const std::size_t counters = waits ? static_cast<std::size_t>(heads * plan.wave_count + 1) * sizeof(int) : 0;
  const Workspace sums(context, waits ? static_cast<std::size_t>(q.ring * std::int64_t{plan.sums} * p.depth) * 4 : 0);
  const Workspace done(context, counters);
  if (waits) {
    q.sums = static_cast<float*>(sums.data());
    q.taken = static_cast<int*>(done.data());
    q.done = q.taken + 1;
    driver::fill_zero(done.data(), counters, context.stream);
  }
  const int device = context.device.index;
  get_kernel(tile_spec(p.result, p.dtype, p.depth, driver::kernel_arch(device)), device)
      .launch(tasks, kTileThreads, tile_shared_bytes(p.result, p.depth), &q, context.stream);
}

}  // namespace

void run(const Product& p, Context& context) {
  const bool by_col = p.result == Result::by_col;
  const std::int64_t lines = p.batch * (by_col ? p.kv_heads * p.cols : p.heads * p.rows);
  if (lines == 0 || (p.result == Result::values ? p.width : p.depth) == 0) {
    return;
  }
  const driver::DeviceScope scope(context.device.index);
  if (fits_tiles(p, context)) {
    const auto plan = tile_plan(*p.pattern, by_col, context);
    if (plan->tile_count > 0) {
      return run_tiles(p, *plan, context);
    }
  }
  run_lists(p, context);
}

namespace {

/// Rows that a warp holds, and longer ones.
struct SoftmaxPlan {
  DeviceBuffer rows;
  int held = 0, longer = 0;       ///< how many; the longer ones stand behind
  std::int64_t most_entries = 0;  ///< of those held
  std::size_t bytes() const { return rows.bytes(); }
};

std::shared_ptr<const SoftmaxPlan> softmax_plan(const RegularPattern& pattern, Context& context) {
  return find_device_plan<SoftmaxPlan>(pattern.key(), context, [&](int device) {
    std::vector<RegularSoftmaxRow> held, longer;
    SoftmaxPlan plan;
    int row = 0;
    for (const std::int64_t count : pattern.row_lengths()) {
      const bool fits = count <= 32 * kMostHeld - 8;  // with what a chunk may have in front of the row
      (fits ? held : longer).push_back({row++, narrowed(count)});
      plan.most_entries = std::max(plan.most_entries, fits ? count : 0);
    }
    plan.held = static_cast<int>(held.size());
    plan.longer = static_cast<int>(longer.size());
    held.insert(held.end(), longer.begin(), longer.end());
    plan.rows = upload(held, device);
    return plan;
  });
}

/// How a row is taken: by `lanes` lanes of a warp, `held` entries in each, `together` at a time; or, where `held` is 0,
/// by a CTA that does not hold it.
struct Lanes {
  std::int64_t held = 0, together = 1, lanes = 32;
};

KernelSpec softmax_spec(bool backward, DType dtype, const Lanes& lanes) {
  const std::string name = std::string("fretwork::regular_softmax") + (backward ? "_backward" : "");
  const std::string type = device_type(dtype);
  const auto numbers = ", " + std::to_string(lanes.held) + ", " + std::to_string(lanes.together) + ", " +
                       std::to_string(lanes.lanes) + ">";
  return {kSource, lanes.held == 0 ? name + "<" + type + ">" : name + "_held<" + type + numbers};
}

/// Whether each row of both begins at the same place of a chunk of so many elements.
bool aligned_alike(const Operand& a, const Operand& b, std::int64_t chunk, std::int64_t size) {
  const auto differs = [&](std::int64_t x, std::int64_t y) { return (x - y) % chunk != 0; };
  const auto place = [&](const Operand& o) {
    return reinterpret_cast<std::uintptr_t>(o.data) % static_cast<std::uintptr_t>(chunk * size);
  };
  return a.col == 1 && b.col == 1 && !differs(a.row, b.row) && !differs(a.head, b.head) && !differs(a.batch, b.batch) &&
         place(a) == place(b);
}

/// A row costs each lane of it about ten instructions for each entry that the lane has room for, there or not, and as
/// much as kRowCost entries besides. Rows that begin anywhere may fill large chunks badly (513 entries: 65 chunks of 8,
/// in three rounds of 32 lanes), and short ones are better taken by half a warp. So of all sizes of a chunk and all
/// numbers of lanes, the cheapest.
Lanes lanes_of(const Softmax& s, std::int64_t most_entries) {
  const auto size = static_cast<std::int64_t>(size_of(s.dtype)), largest = 16 / size;
  const auto some = [&](std::int64_t lanes, std::int64_t chunk, std::int64_t front, std::int64_t step) {
    const std::int64_t held = ((most_entries + front + lanes - 1) / lanes + step - 1) / step * step;
    return Lanes{std::max(held, step), chunk, lanes};
  };
  const auto cost = [](const Lanes& l) { return l.lanes * (l.held + kRowCost); };
  Lanes best = some(32, 1, 0, 4);
  for (std::int64_t chunk = largest; chunk > 1; chunk /= 2) {
    const bool alike = aligned_alike(s.in, s.out, chunk, size) &&
                       (s.d_out.data == nullptr || aligned_alike(s.in, s.d_out, chunk, size));
    const bool led = !aligned_alike(s.in, {nullptr, 0, 0, 0, 1}, chunk, size);
    for (const std::int64_t lanes : {32, 16, 8}) {
      const Lanes other = some(lanes, chunk, led ? chunk - 1 : 0, chunk);
      const bool whole = lanes == 32 && chunk == largest;
      const bool fits = other.held <= (lanes == 32 ? kMostInPairs : kMostInFew);
      if (alike && (whole || (fits && (best.together == 1 || cost(other) < cost(best))))) {
        best = other;
      }
    }
  }
  return best;
}

const void* end_of(const Softmax& s, const Operand& o) {
  const std::int64_t last =
      (s.batch - 1) * o.batch + (s.heads - 1) * o.head + (s.rows - 1) * o.row + (s.width - 1) * o.col;
  return static_cast<const char*>(o.data) + (last + 1) * static_cast<std::int64_t>(size_of(s.dtype));
}

}  // namespace

void run(const Softmax& s, Context& context) {
  if (s.batch * s.heads * s.rows * s.width == 0) {
    return;
  }
  const driver::DeviceScope scope(context.device.index);
  const auto plan = softmax_plan(*s.pattern, context);
  const bool backward = s.d_out.data != nullptr;
  constexpr double kLargest = std::numeric_limits<float>::max();
  const SplitScale split(s.scale, kLargest / 2);  // which log2(e) may multiply
  RegularSoftmaxParams q{};
  q.in = params(s.in);
  q.out = params(s.out);
  q.in_end = end_of(s, s.in);
  if (backward) {
    q.d_out = params(s.d_out);
    q.d_out_end = end_of(s, s.d_out);
  }
  q.before = static_cast<float>(split.before);
  q.after = static_cast<float>(split.after);
  q.scale = static_cast<float>(std::clamp(s.scale, -kLargest, kLargest));
  q.heads = narrowed(s.heads);
  q.width = narrowed(s.width);
  const Lanes lanes = lanes_of(s, plan->most_entries);
  const auto launch = [&](int first, int rows, const Lanes& some, std::int64_t rows_of_cta) {
    if (rows > 0) {
      q.rows = data<RegularSoftmaxRow>(plan->rows) + first;
      q.row_count = rows;
      const std::int64_t tasks = checked_tasks(s.batch * s.heads * rows);
      q.tasks = static_cast<unsigned>(tasks);
      get_kernel(softmax_spec(backward, s.dtype, some), context.device.index)
          .launch((tasks + rows_of_cta - 1) / rows_of_cta, kThreads, 0, &q, context.stream);
    }
  };
  launch(0, plan->held, lanes, kThreads / lanes.lanes);
  launch(plan->held, plan->longer, {}, 1);
}

namespace {

std::vector<KernelSpec> list(const std::string& arch) {
  std::vector<KernelSpec> specs;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    specs.push_back(spec(Result::values, dtype, 0));
    for (const int elements : {1, 2, 4}) {
      specs.push_back(spec(Result::by_row, dtype, elements));
      specs.push_back(spec(Result::by_col, dtype, elements));
    }
    for (const std::int64_t depth : {64, 128, 192, 256}) {
      for (const Result result : {Result::values, Result::by_row, Result::by_col}) {
        if (dtype != DType::f32) {
          specs.push_back(tile_spec(result, dtype, depth, arch));
        }
      }
    }
    for (const bool backward : {false, true}) {
      specs.push_back(softmax_spec(backward, dtype, {}));
      const int largest = 16 / static_cast<int>(size_of(dtype));
      for (const int held : {8, 18, 24, kMostHeld}) {  // any multiple of what is taken together
        for (const int together : {1, 2, 4, 8}) {
          for (const int lanes : {32, 16}) {
            const bool taken = together == largest || (together < largest && held <= kMostInPairs) || together == 1;
            if (taken && held % together == 0 && (lanes == 32 || (held <= kMostInFew && together > 1))) {
              specs.push_back(softmax_spec(backward, dtype, {held, together, lanes}));
            }
          }
        }
      }
    }
  }
  return specs;
}

const KernelList kernels("regular", list);

}  // namespace

}  // namespace fretwork::regular_op::cuda
