// Uploads attention plans and deals their row tiles out to CTAs.
#include <algorithm>
#include <array>
#include <initializer_list>
#include <iterator>
#include <numeric>
#include <string>
#include <utility>

#include "ops/attention/cuda/hopper_launch.h"
#include "runtime/plan_cache.h"
#include "runtime/upload_arena.h"

namespace fretwork::attention_op::hopper {
namespace {

namespace driver = fretwork::cuda;
using driver::UploadArena;

std::int64_t cut_of(const Order& order, const Tile& tile) {
  std::int64_t tokens = 0;
  for (std::size_t k = 0; k < kTileAxes; ++k) {
    tokens += (order.extent[k] - tile.count[k]) * order.stride[k];
  }
  return tokens;
}

/// The token of each place of a tile; the others stay as they are.
void write_tokens(const Order& order, const Tile& tile, int* tokens) {
  for (int u0 = 0; u0 < tile.count[0]; ++u0) {
    for (int u1 = 0; u1 < tile.count[1]; ++u1) {
      int* const line = tokens + (u0 * order.extent[1] + u1) * order.extent[2];
      const std::int64_t base = tile.base + u0 * order.stride[0] + u1 * order.stride[1];
      for (int u2 = 0; u2 < tile.count[2]; ++u2) {
        line[u2] = static_cast<int>(base + u2 * order.stride[2]);
      }
    }
  }
}

/// `places` a tile has room for.
Side make_side(const Order& order, const std::vector<Tile>& tiles, int places, UploadArena& arena) {
  Side side{order};
  for (const Tile& tile : tiles) {
    side.shift = std::max(side.shift, cut_of(order, tile));
  }
  std::vector<Place> boxes;
  std::vector<int> tokens(tiles.size() * static_cast<std::size_t>(places), -1), used;
  for (const Tile& tile : tiles) {
    Place box{static_cast<int>(tile.base - cut_of(order, tile) + side.shift), {}};
    for (std::size_t k = 0; k < kTileAxes; ++k) {
      box.skip[k] = order.extent[k] - tile.count[k];
    }
    int* const own = tokens.data() + boxes.size() * static_cast<std::size_t>(places);
    write_tokens(order, tile, own);
    side.unit = own[0] < 0 ? 0 : std::min(side.unit, own[0] % 8 == 0 ? 8 : 1);
    boxes.push_back(box);
    used.push_back(tile.used);
  }
  side.tiles = arena.add(boxes);
  side.tokens = arena.add(tokens);
  side.used = arena.add(used);
  return side;
}

RunOf run_of(const Run& run, const Plan& plan) {
  RunOf made{run.first, run.count, {}, kWhole, 0, 0, 0};
  if (run.mask >= 0) {
    const Mask& mask = plan.masks[static_cast<std::size_t>(run.mask)];
    const int side = plan.shape.rows + plan.shape.cols;  // beyond it a bound says nothing, and sums could overflow
    const std::int32_t bits = plan.bits_of(mask);
    made.kind = bits >= 0 ? bits : kBand;
    made.low = std::clamp(mask.low, -side, side);
    made.high = std::clamp(mask.high, -side, side);
    made.limit = std::clamp(mask.limit, 0, side);
  }
  return made;
}

DeviceComponent make_component(const Component& component, const Plan& plan, UploadArena& arena) {
  DeviceComponent made;
  made.rows = make_side(component.row_order, component.row_tiles, plan.shape.rows, arena);
  made.cols = make_side(component.col_order, component.col_tiles, plan.shape.cols, arena);
  made.col_count = static_cast<int>(component.col_tiles.size());
  made.covers_rows = component.covers_rows;
  std::vector<int> first(component.first.begin(), component.first.end());
  std::vector<RunOf> runs;
  runs.reserve(component.runs.size());
  for (const Run& run : component.runs) {
    runs.push_back(run_of(run, plan));
    made.general = made.general || runs.back().kind >= 0;
  }
  for (const Tile& tile : component.col_tiles) {
    made.general = made.general || tile.used >= 0;
  }
  for (std::size_t t = 0; t + 1 < first.size(); ++t) {
    const auto begin = component.runs.begin() + first[t], end = component.runs.begin() + first[t + 1];
    made.steps.push_back(std::accumulate(begin, end, 0, [](int sum, const Run& run) { return sum + run.count; }));
  }
  made.first = arena.add(first);
  made.runs = arena.add(runs);
  return made;
}

/// Where a plan has all elements with column − row ≥ low and no others, in whole tiles one after the other, each row
/// tile some and the first one some of each column tile: low, or kNoEdge where it has every element.
std::optional<std::int64_t> edge_of(const Plan& plan) {
  const auto follow = [](const Order& order, const std::vector<Tile>& tiles, int side, std::int64_t tokens) {
    std::int64_t next = 0;
    return order.extent == std::array{1, 1, side} && order.stride[2] == 1 &&
           std::all_of(tiles.begin(), tiles.end(),
                       [&](const Tile& t) { return std::exchange(next, next + side) == t.base && t.used < 0; }) &&
           next == tokens;
  };
  if (plan.components.size() != 1) {
    return std::nullopt;
  }
  const auto [rows, cols] = plan.shape;
  const Component& c = plan.components.front();
  std::int64_t low = kNoEdge;
  const auto low_of = [&](const Run& run, std::size_t t) {
    return plan.masks[static_cast<std::size_t>(run.mask)].low + cols * run.first - rows * static_cast<std::int64_t>(t);
  };
  if (const auto cut = std::find_if(c.runs.begin(), c.runs.end(), [](const Run& r) { return r.mask >= 0; });
      cut != c.runs.end()) {
    const auto after = std::upper_bound(c.first.begin(), c.first.end(), cut - c.runs.begin());
    low = low_of(*cut, static_cast<std::size_t>(after - c.first.begin() - 1));
  }
  const auto fits_edge = [&](const Run& run, std::size_t t) {
    const Mask* const mask = run.mask >= 0 ? &plan.masks[static_cast<std::size_t>(run.mask)] : nullptr;
    return mask == nullptr ? low + rows * static_cast<std::int64_t>(t) - cols * run.first <= 1 - rows
                           : run.count == 1 && low_of(run, t) == low && mask->high >= cols - 1 && mask->limit >= cols &&
                                 mask->bits < 0 && mask->rows < 0;
  };
  for (std::size_t t = 0; t < c.row_tiles.size(); ++t) {
    std::int64_t next = std::max<std::int64_t>(0, (rows * static_cast<std::int64_t>(t) + low) / cols);
    if (t == 0 && next > 0) {
      return std::nullopt;
    }
    for (auto n = static_cast<std::size_t>(c.first[t]); n < static_cast<std::size_t>(c.first[t + 1]); ++n) {
      if (c.runs[n].first != next || !fits_edge(c.runs[n], t)) {
        return std::nullopt;
      }
      next += c.runs[n].count;
    }
    if (c.first[t] == c.first[t + 1] || next != static_cast<std::int64_t>(c.col_tiles.size())) {
      return std::nullopt;
    }
  }
  return follow(c.row_order, c.row_tiles, rows, plan.rows) && follow(c.col_order, c.col_tiles, cols, plan.cols)
             ? std::optional(low)
             : std::nullopt;
}

DevicePlan make_plan(const std::shared_ptr<const Plan>& plan, int device) {
  DevicePlan made;
  made.plan = plan;
  made.edge = edge_of(*plan);
  UploadArena arena;
  for (const Component& component : plan->components) {
    made.components.push_back(make_component(component, *plan, arena));
  }
  made.bits = arena.add(plan->all_bits());
  made.used = arena.add(plan->used);
  made.memory = arena.upload(device);
  return made;
}

/// Where a task begins in the runs of its tile, which have so many steps.
PieceOf piece_of(const Task& task, const Component& component, int steps) {
  PieceOf made{static_cast<int>(component.first[static_cast<std::size_t>(task.tile)]), 0, task.part, 0};
  if (steps > 0) {
    made.turn = task.begin / steps;
    made.skip = task.begin % steps;
    for (; made.skip >= component.runs[static_cast<std::size_t>(made.run)].count; ++made.run) {
      made.skip -= component.runs[static_cast<std::size_t>(made.run)].count;
    }
  }
  return made;
}

Schedule make_schedule(const Plan& plan, std::size_t at, const std::vector<int>& steps, const Pairs& pairs, int repeat,
                       bool empty, const Cutting& cutting, int device, UploadArena& arena) {
  const Deal deal = deal_tasks(steps, pairs, repeat, empty, driver::device_info(device).multiprocessors, cutting);
  const bool split = deal.parts() > 0 || plan.shape.rows < kRows;
  const auto batch = [&](const auto& of) { return static_cast<int>(of.pair / pairs.heads); };
  const auto head = [&](const auto& of) { return static_cast<int>(of.pair % pairs.heads); };
  std::vector<Item> items;
  std::vector<PieceOf> begins;
  std::vector<int> share{0};
  for (const auto& list : deal.lists) {
    for (const Task& task : list) {
      items.push_back({task.tile, batch(task), head(task), task.steps});
      if (split) {
        begins.push_back(piece_of(task, plan.components[at], steps[static_cast<std::size_t>(task.tile)]));
      }
    }
    share.push_back(static_cast<int>(items.size()));
  }
  std::vector<Split> splits;
  for (const Cut& cut : deal.cuts) {
    splits.push_back({cut.tile, batch(cut), head(cut), cut.first, cut.count});
  }
  return {arena.add(items),
          arena.add(begins),
          arena.add(share),
          arena.add(splits),
          static_cast<int>(deal.lists.size()),
          static_cast<int>(splits.size()),
          deal.parts(),
          split,
          deal.loads};
}

Hash128 hash_of(std::initializer_list<const Plan*> plans, std::initializer_list<std::int64_t> rest) {
  std::string bytes;
  const auto add = [&](const auto& value) { bytes.append(reinterpret_cast<const char*>(&value), sizeof value); };
  std::for_each(plans.begin(), plans.end(), add);
  std::for_each(rest.begin(), rest.end(), add);
  return hash128(bytes);
}

}  // namespace

bool is_countable(const Plan& plan) {
  const auto small = [](const Order& order) {
    return std::all_of(order.stride.begin(), order.stride.end(), [](std::int64_t s) { return s < kMost / 256; });
  };
  return plan.rows < kMost / 4 && plan.cols < kMost / 4 &&
         std::all_of(plan.components.begin(), plan.components.end(), [&](const Component& c) {
           const std::size_t most = std::max({c.runs.size(), c.row_tiles.size() * 64, c.col_tiles.size() * 64});
           return small(c.row_order) && small(c.col_order) && static_cast<std::int64_t>(most) < kMost / 2;
         });
}

std::shared_ptr<const DevicePlan> find_plan(const std::shared_ptr<const Plan>& plan, int device) {
  static PlanCache<DevicePlan>& cache = *std::make_unique<PlanCache<DevicePlan>>().release();
  return cache.get(hash_of({plan.get()}, {device}), [&] { return make_plan(plan, device); });
}

std::shared_ptr<const Prepared> prepare(const std::shared_ptr<const Plan>& plan, const Pairs& pairs, int repeat,
                                        int longest, const Beside& beside, const Context& context) {
  static PlanCache<Prepared>& cache = *std::make_unique<PlanCache<Prepared>>().release();
  const int device = context.device.index, ctas = driver::device_info(device).multiprocessors;
  const Pairs& other = beside.pairs;
  const Hash128 key =
      hash_of({plan.get(), beside.plan.get()},
              {pairs.batch, pairs.heads, pairs.heads_in_l2, pairs.backwards, repeat, longest, device, other.batch,
               other.heads, other.heads_in_l2, other.backwards, beside.repeat, beside.before != nullptr});
  auto prepared = cache.get(key, [&] {
    Prepared made{find_plan(plan, device), {}, {}, false, {}, beside.plan};
    UploadArena arena;
    made.order.resize(plan->components.size());
    std::iota(made.order.begin(), made.order.end(), std::size_t{0});
    const auto reaches_all = [&](std::size_t c) { return made.plan->components[c].covers_rows; };
    const auto first = std::find_if(made.order.begin(), made.order.end(), reaches_all);
    made.fill = first == made.order.end();
    if (!made.fill) {
      std::rotate(made.order.begin(), first, first + 1);
    }
    Cutting cutting{longest};
    if (beside.before != nullptr) {
      cutting.before = *beside.before;
    } else if (beside.plan != nullptr) {
      const auto& next = find_plan(beside.plan, device)->components.front();
      cutting.after = ways_to_deal(next.steps, beside.pairs, beside.repeat, true, ctas);
    }
    Pairs turn = pairs;
    for (std::size_t at = 0; at < made.order.size(); ++at, turn.backwards = !turn.backwards) {
      const bool empty = at == 0 && !made.fill;
      made.schedules.push_back(
          make_schedule(*plan, made.order[at], made.component(at).steps, turn, repeat, empty, cutting, device, arena));
    }
    made.memory = arena.upload(device);
    return made;
  });
  if (driver::is_capturing(context.stream)) {
    cache.pin(prepared);
  }
  return prepared;
}

}  // namespace fretwork::attention_op::hopper
