// The host side of decoding: lists the used keys, chooses the number of segments, launches.
#include <algorithm>
#include <array>
#include <bit>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "core/divide.h"
#include "ops/attention/cuda/families.h"
#include "ops/attention/cuda/operands.h"
#include "runtime/alignment.h"
#include "runtime/cuda_driver.h"
#include "runtime/device_plan.h"
#include "runtime/kernels.h"
#include "runtime/upload_arena.h"

namespace fretwork::attention_op::decode {
namespace {

namespace driver = fretwork::cuda;

constexpr const char* kSource = "ops/attention/cuda/decode.cuh";
constexpr int kDepths[] = {64, 128, 256};
constexpr TileShape kTile{32, 64};  // of the plan that is asked for the keys

// -------------------------------------------------------------------------------------------------- kernels

KernelSpec decode_spec(DType dtype, int depth, bool extras) {
  return {kSource,
          std::string("fretwork::attention_decode<") + device_type(dtype) + ", " + std::to_string(depth) +
              (extras ? ", true>" : ", false>"),
          shared_bytes(depth)};
}
KernelSpec merge_spec(DType dtype, int depth) {
  return {kSource,
          std::string("fretwork::attention_decode_merge<") + device_type(dtype) + ", " + std::to_string(depth) + ">"};
}

std::vector<KernelSpec> list_kernels(const std::string& /*arch*/) {
  std::vector<KernelSpec> list;
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const int depth : kDepths) {
      list.push_back(decode_spec(dtype, depth, false));
      list.push_back(decode_spec(dtype, depth, true));
      list.push_back(merge_spec(dtype, depth));
    }
  }
  return list;
}
const KernelList kKernels{"attention", list_kernels};

/// `which`: 0 plain, 1 with extras, 2 merges.
const Kernel& kernel_of(DType dtype, int depth, int which, int device) {
  static constinit KernelTable<std::size(kDepths) * 6> table;
  const auto d = static_cast<std::size_t>(std::countr_zero(static_cast<unsigned>(depth / 64)));
  const std::size_t number = (d * 2 + (dtype == DType::bf16)) * 3 + static_cast<std::size_t>(which);
  return table.get(number, device,
                   [&] { return which == 2 ? merge_spec(dtype, depth) : decode_spec(dtype, depth, which == 1); });
}

// ---------------------------------------------------------------------------------------------------- steps

/// For each key the queries that use it, a bit for each.
class Users {
 public:
  explicit Users(const Plan& plan) : plan_(plan), of_(static_cast<std::size_t>(plan.cols)) {
    std::vector<Token> rows, cols;
    for (const Component& c : plan.components) {
      const auto row_places = places(c.row_order), col_places = places(c.col_order);
      for (std::size_t t = 0; t < c.row_tiles.size(); ++t) {
        put_inside(row_places, c.row_tiles[t], rows);
        for (std::int64_t r = c.first[t]; r < c.first[t + 1]; ++r) {
          const Run& run = c.runs[static_cast<std::size_t>(r)];
          for (int n = 0; n < run.count; ++n) {
            put_inside(col_places, c.col_tiles[static_cast<std::size_t>(run.first + n)], cols);
            add(rows, cols, run.mask);
          }
        }
      }
    }
  }
  const std::vector<std::uint16_t>& of() const { return of_; }

 private:
  struct Place {
    std::array<int, kTileAxes> at;
    std::int64_t offset;
  };
  struct Token {
    int place;
    std::int64_t token;
  };
  static std::vector<Place> places(const Order& order) {
    std::vector<Place> list;
    for (int a = 0; a < order.extent[0]; ++a) {
      for (int b = 0; b < order.extent[1]; ++b) {
        for (int c = 0; c < order.extent[2]; ++c) {
          list.push_back({{a, b, c}, a * order.stride[0] + b * order.stride[1] + c * order.stride[2]});
        }
      }
    }
    return list;
  }
  static void put_inside(const std::vector<Place>& places, const Tile& tile, std::vector<Token>& list) {
    list.clear();
    for (std::size_t n = 0; n < places.size(); ++n) {
      const auto& at = places[n].at;
      if (at[0] < tile.count[0] && at[1] < tile.count[1] && at[2] < tile.count[2]) {
        list.push_back({static_cast<int>(n), tile.base + places[n].offset});
      }
    }
  }
  bool has(const Mask& mask, int m, int n) const {
    if (mask.rows >= 0) {
      const auto [begin, end] = plan_.intervals[static_cast<std::size_t>(mask.rows + m)];
      return begin <= n && n < end;
    }
    if (mask.bits < 0) {
      return mask.low <= n - m && n - m <= mask.high && n < mask.limit;
    }
    const auto bit = static_cast<std::size_t>(m * plan_.shape.cols + n);
    return (plan_.bits[static_cast<std::size_t>(mask.bits) + bit / 32] >> (bit % 32) & 1) != 0;
  }
  void add(const std::vector<Token>& rows, const std::vector<Token>& cols, int mask) {
    for (const Token& row : rows) {
      const auto bit = static_cast<std::uint16_t>(1u << row.token);
      for (const Token& col : cols) {
        if (mask < 0 || has(plan_.masks[static_cast<std::size_t>(mask)], row.place, col.place)) {
          of_[static_cast<std::size_t>(col.token)] |= bit;
        }
      }
    }
  }

  const Plan& plan_;
  std::vector<std::uint16_t> of_;
};

/// Steps on a device.
struct DeviceSteps {
  driver::DeviceBuffer memory;
  const int *tokens, *masks;
  const unsigned short* bits;
  int count;
  std::size_t bytes() const { return memory.bytes(); }
};

DeviceSteps upload(const Steps& steps, int device) {
  driver::UploadArena arena;
  const std::size_t tokens = arena.add(steps.tokens), masks = arena.add(steps.masks), bits = arena.add(steps.bits);
  driver::DeviceBuffer memory = arena.upload(device);
  const auto *const first = driver::uploaded<int>(memory, tokens), *const second = driver::uploaded<int>(memory, masks);
  const auto* const third = driver::uploaded<unsigned short>(memory, bits);
  return {std::move(memory), first, second, third, steps.count()};
}

std::shared_ptr<const DeviceSteps> device_steps(const RegularPattern& pattern, const Context& context) {
  return find_device_plan<DeviceSteps>(pattern.key(), context,
                                       [&](int device) { return upload(steps_of(*plan(pattern, kTile)), device); });
}

/// The fewest that keep every multiprocessor busy: a CTA on nearly each, and where they do not all run at once, little
/// time in which some have ended and no others are left. A segment is worth beginning when each warp has a few steps.
int segments_for(std::int64_t sets, int steps, int depth, const driver::DeviceInfo& device) {
  const int most = std::max(1, steps / (4 * shape_of(depth).warps));
  const std::int64_t at_once =
      static_cast<std::int64_t>(device.multiprocessors) * std::max(1, device.shared_per_block / shared_bytes(depth));
  int best = 1;
  double best_busy = 0;
  for (int segments = 1; segments <= most; ++segments) {
    const std::int64_t all = sets * segments, waves = ceil_div(all, at_once);
    const double busy = waves == 1 ? std::min(1.0, static_cast<double>(all) / device.multiprocessors)
                                   : static_cast<double>(all) / static_cast<double>(waves * at_once);
    if (busy > best_busy) {
      best = segments;
      best_busy = busy;
    }
    if (busy >= 0.95) {
      break;
    }
  }
  return best;
}

InputArg input_arg(const Operand& x) { return {x.data, x.batch, x.head, static_cast<int>(2 * x.row)}; }

int depth_for(const Problem& p) {
  return *std::lower_bound(std::begin(kDepths), std::end(kDepths), std::max(p.depth, p.value_depth));
}
/// Tiles of 16 rows that the queries of all heads of a key head take.
int tiles_of(const Problem& p) { return static_cast<int>(ceil_div(p.heads / p.kv_heads * p.rows, kRows)); }

Params params_of(const Problem& p, const ScoreArg& score, const DeviceSteps& steps) {
  Params params{};
  params.q = input_arg(p.q);
  params.k = input_arg(p.k);
  params.v = input_arg(p.v);
  params.o = output_arg(p.o);
  params.lse = output_arg(p.lse);
  params.score = score;
  params.tokens = steps.tokens;
  params.masks = steps.masks;
  params.padding = padding_arg(p);
  params.bits = steps.bits;
  params.steps = steps.count;
  params.rows = static_cast<int>(p.rows);
  params.heads = static_cast<int>(p.heads);
  params.kv_heads = static_cast<int>(p.kv_heads);
  params.ratio = static_cast<int>(p.heads / p.kv_heads);
  params.tiles = tiles_of(p);
  params.depth = static_cast<int>(p.depth);
  params.value_depth = static_cast<int>(p.value_depth);
  params.all_rows = p.batch * p.heads * p.rows;
  params.sinks = sinks_arg(p);
  return params;
}

}  // namespace

Steps steps_of(const Plan& plan) {
  const Users users(plan);
  std::vector<std::int32_t> keys;
  for (std::size_t n = 0; n < users.of().size(); ++n) {
    if (users.of()[n] != 0) {
      keys.push_back(static_cast<std::int32_t>(n));
    }
  }
  Steps steps;
  steps.tokens.reserve(keys.size() + kKeys);
  using Bits = std::array<std::uint16_t, kMostQueries>;
  std::map<Bits, std::int32_t> known;
  for (std::size_t from = 0; from < keys.size(); from += kKeys) {
    Bits bits{};
    for (std::size_t n = 0; n < kKeys; ++n) {
      const bool there = from + n < keys.size();
      steps.tokens.push_back(there ? keys[from + n] : -1);
      const unsigned uses = there ? users.of()[static_cast<std::size_t>(keys[from + n])] : 0;
      for (std::size_t row = 0; row < static_cast<std::size_t>(plan.rows); ++row) {
        bits[row] = static_cast<std::uint16_t>(bits[row] | (uses >> row & 1) << n);
      }
    }
    const auto rows = std::span(bits).first(static_cast<std::size_t>(plan.rows));
    if (std::ranges::all_of(rows, [](std::uint16_t row) { return row == 0xffff; })) {
      steps.masks.push_back(-1);
      continue;
    }
    const auto [at, made] = known.emplace(bits, static_cast<std::int32_t>(known.size()));
    if (made) {
      steps.bits.insert(steps.bits.end(), rows.begin(), rows.end());
    }
    steps.masks.push_back(at->second);
  }
  return steps;
}

bool fits(const Problem& p) {
  const auto& first = p.patterns.front();
  return p.rows <= kMostQueries && p.dtype != DType::f32 && std::max(p.depth, p.value_depth) <= std::end(kDepths)[-1] &&
         std::ranges::all_of(p.patterns, [&](const auto& q) { return q == first; }) &&
         readable(p.q, p.depth, p.dtype) && readable(p.k, p.depth, p.dtype) && readable(p.v, p.value_depth, p.dtype);
}

cost::Work cost(const Problem& p, const Context& context) {
  // From a step's token list to its keys to the merge, beyond an empty kernel: loads that wait for each other. Fitted.
  constexpr double kExposed = 3.7;
  const driver::DeviceInfo& info = driver::device_info(context.device.index);
  const double keys = static_cast<double>(p.patterns.front()->nnz()) / static_cast<double>(p.rows);
  const std::int64_t sets = p.batch * p.kv_heads * tiles_of(p);
  const int steps = static_cast<int>(keys / kKeys) + 1, segments = segments_for(sets, steps, depth_for(p), info);
  const double each = 2 * keys * static_cast<double>((p.depth + p.value_depth) * p.batch * p.kv_heads);
  const double busy = std::min(1.0, static_cast<double>(sets * segments) / info.multiprocessors);
  return {.launches = segments > 1 ? 2.0 : 1.0,
          .memory = copies_us(each, (tiles_of(p) - 1) * each, busy),
          .serial = kExposed};
}

void launch(const Problem& p, Context& context, int segments) {
  const int device = context.device.index, depth = depth_for(p);
  const ScoreArg score = portable::score_arg(p);
  const auto steps = device_steps(*p.patterns.front(), context);
  Params params = params_of(p, score, *steps);
  const std::int64_t sets = p.batch * p.kv_heads * params.tiles;
  const driver::DeviceInfo& info = driver::device_info(device);
  params.segments = segments > 0 ? segments : segments_for(sets, steps->count, depth, info);

  const std::int64_t grid = sets * params.segments;
  const std::size_t lines = params.segments > 1 ? static_cast<std::size_t>(grid * kRows) : 0;
  const std::size_t sums = lines * static_cast<std::size_t>(depth) * sizeof(float);
  const Workspace space(context, sums + lines * sizeof(Share));
  if (lines > 0) {
    params.sums = static_cast<float*>(space.data());
    params.shares = reinterpret_cast<Share*>(static_cast<char*>(space.data()) + sums);
  }
  const bool extras = score.softcap > 0 || score.bias != nullptr || score.slopes != nullptr || score.threshold != 0 ||
                      !(score.scale > 0);
  params.unit = extras ? 1.0f : score.scale;
  kernel_of(p.dtype, depth, extras ? 1 : 0, device)
      .launch(grid, 32 * shape_of(depth).warps, shared_bytes(depth), &params, context.stream);
  if (lines > 0) {
    const Kernel& merge = kernel_of(p.dtype, depth, 2, device);
    const std::int64_t ctas = ceil_div(params.all_rows, kMergeWarps);
    info.arch >= 90 ? merge.launch_behind(ctas, 32 * kMergeWarps, 0, &params, context.stream)
                    : merge.launch(ctas, 32 * kMergeWarps, 0, &params, context.stream);
  }
}

}  // namespace fretwork::attention_op::decode
