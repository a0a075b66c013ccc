// Uploads plans, with one allocation and one copy each, and lists row tiles in the order in which CTAs take them.
#include "ops/attention/device_plan.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>

#include "fretwork/error.h"
#include "ops/attention/pieces.h"
#include "runtime/plan_cache.h"

namespace fretwork::attention_op {
namespace {

using fretwork::cuda::DeviceBuffer;

int narrow(std::int64_t n) {
  if (n < std::numeric_limits<int>::min() || n > std::numeric_limits<int>::max()) {
    throw Error("attention", "pattern", "tiles that 32-bit numbers can count", std::to_string(n));
  }
  return static_cast<int>(n);
}

OrderArg order_arg(const Order& order) {
  OrderArg arg{};
  for (std::size_t a = 0; a < kTileAxes; ++a) {
    arg.extent[a] = order.extent[a];
    arg.stride[a] = order.extent[a] > 1 ? narrow(order.stride[a]) : 0;
  }
  return arg;
}

std::vector<TileArg> tile_args(const std::vector<Tile>& tiles) {
  std::vector<TileArg> args;
  args.reserve(tiles.size());
  for (const Tile& tile : tiles) {
    TileArg arg{narrow(tile.base), 0, tile.used, 0};
    for (unsigned a = 0; a < kTileAxes; ++a) {
      arg.inside |= static_cast<unsigned>(tile.count[a] + 511) << (10 * a);
    }
    args.push_back(arg);
  }
  return args;
}

/// Row tiles with the most pairs first, equal ones in their own order; and how many of them are so long that they
/// would end after all others if they did not begin before them.
std::vector<int> by_work(const Component& component, int& long_tiles) {
  std::vector<std::int64_t> work(component.row_tiles.size());
  std::int64_t all = 0;
  for (std::size_t t = 0; t < work.size(); ++t) {
    for (auto r = static_cast<std::size_t>(component.first[t]); r < static_cast<std::size_t>(component.first[t + 1]);
         ++r) {
      work[t] += component.runs[r].count;
    }
    all += work[t];
  }
  std::vector<int> order(work.size());
  std::iota(order.begin(), order.end(), 0);
  const auto of = [&](int t) { return work[static_cast<std::size_t>(t)]; };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return of(a) > of(b); });
  const std::int64_t mean = work.empty() ? 0 : all / static_cast<std::int64_t>(work.size());
  long_tiles =
      static_cast<int>(std::count_if(work.begin(), work.end(), [&](std::int64_t w) { return w > 4 * mean + 16; }));
  return order;
}

/// Where a component's arrays begin.
struct Places {
  std::size_t row_tiles, col_tiles, first, runs, by_work;
};

DevicePlan upload(const Plan& plan, int device) {
  Pieces pieces;
  std::vector<MaskArg> masks;
  masks.reserve(plan.masks.size());
  for (const Mask& mask : plan.masks) {
    const int reach = 4 * std::max(plan.shape.rows, plan.shape.cols);  // kernels add to it
    masks.push_back({std::clamp(mask.low, -reach, reach), std::clamp(mask.high, -reach, reach),
                     std::min(mask.limit, plan.shape.cols), plan.bits_of(mask)});
  }
  const std::size_t masks_at = pieces.add(masks), bits_at = pieces.add(plan.all_bits()),
                    used_at = pieces.add(plan.used);
  DevicePlan made;
  std::vector<Places> places;
  for (const Component& component : plan.components) {
    std::vector<int> first;
    for (const std::int64_t n : component.first) {
      first.push_back(narrow(n));
    }
    std::vector<RunArg> runs;
    runs.reserve(component.runs.size());
    for (const Run& run : component.runs) {
      runs.push_back({run.first, run.count, run.mask});
    }
    ComponentArg& arg = made.components.emplace_back();
    arg.row_order = order_arg(component.row_order);
    arg.col_order = order_arg(component.col_order);
    arg.row_tile_count = narrow(static_cast<std::int64_t>(component.row_tiles.size()));
    arg.col_tile_count = narrow(static_cast<std::int64_t>(component.col_tiles.size()));
    const std::vector<int> order = by_work(component, arg.long_tiles);
    places.push_back({pieces.add(tile_args(component.row_tiles)), pieces.add(tile_args(component.col_tiles)),
                      pieces.add(first), pieces.add(runs), pieces.add(order)});
  }
  made.memory = pieces.upload(device);
  const auto set = [&](auto*& pointer, std::size_t at) {
    pointer = piece<std::remove_pointer_t<std::remove_reference_t<decltype(pointer)>>>(made.memory, at);
  };
  for (std::size_t c = 0; c < places.size(); ++c) {
    ComponentArg& arg = made.components[c];
    set(arg.row_tiles, places[c].row_tiles);
    set(arg.col_tiles, places[c].col_tiles);
    set(arg.first, places[c].first);
    set(arg.runs, places[c].runs);
    set(arg.masks, masks_at);
    set(arg.bits, bits_at);
    set(arg.used, used_at);
    set(arg.by_work, places[c].by_work);
  }
  made.covers_rows = !plan.components.empty() && plan.components.front().covers_rows;
  return made;
}

/// What a cache has or makes, pinned while the context's stream is captured.
template <typename P, typename Make>
std::shared_ptr<const P> remembered(const std::string& key, const Context& context, const Make& make) {
  static PlanCache<P>& cache = *std::make_unique<PlanCache<P>>().release();
  auto found = cache.get(hash128(key), make);
  if (fretwork::cuda::is_capturing(context.stream)) {
    cache.pin(found);
  }
  return found;
}

}  // namespace

std::shared_ptr<const DevicePlan> device_plan(const RegularPattern& pattern, const TileShape& shape, bool transposed,
                                              const Context& context) {
  const int device = context.device.index;
  const int numbers[] = {shape.rows, shape.cols, transposed, device};
  std::string key(reinterpret_cast<const char*>(numbers), sizeof numbers);
  key += pattern.key();
  return remembered<DevicePlan>(key, context, [&] {
    return upload(transposed ? *attention_op::transposed_plan(pattern, shape) : *plan(pattern, shape), device);
  });
}

std::shared_ptr<const DeviceNumbers> device_numbers(std::span<const int> numbers, const Context& context) {
  std::string key(reinterpret_cast<const char*>(numbers.data()), numbers.size_bytes());
  const int device = context.device.index;
  key += "@" + std::to_string(device);
  return remembered<DeviceNumbers>(
      key, context, [&] { return DeviceNumbers{DeviceBuffer(device, numbers.data(), numbers.size_bytes())}; });
}

}  // namespace fretwork::attention_op
