// The host side of the Hopper kernels, between its files: which kernels there are and what a launch of one takes
// (hopper_launch.cpp), plans on the device (hopper_plan.cpp), and the two directions (hopper_forward.cpp,
// hopper_backward.cpp).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "fretwork/tensor.h"
#include "ops/attention/cuda/families.h"
#include "ops/attention/cuda/operands.h"
#include "ops/attention/cuda/params.h"
#include "ops/attention/schedule.h"
#include "runtime/cuda_driver.h"
#include "runtime/kernels.h"

namespace fretwork::attention_op::hopper {

// -------------------------------------------------------------------------------------------------- kernels

inline constexpr int kMostColumns = 256;  ///< that registers have room for

enum class Pass : unsigned {
  forward,
  d_keys,
  d_queries,
  d_values,
  five_product,
  finish,
  fill,
  statistics,
  join,
  scored_statistics,
  scored_join
};

/// Columns that kernels have, of q and k and of v: whole 64s. Beyond those of a problem they find zeros, and store
/// nothing.
struct Columns {
  int depth, values;

  int most() const { return std::max(depth, values); }
  /// Registers have no room for the gradients of keys and values at once.
  bool head_dim_gt_128() const { return most() > 128; }
  std::string text() const;  ///< as template arguments
};
Columns columns_of(const Problem& p);

/// What a kernel need not have where no component asks for it: masks of bits and columns that nothing uses; items that
/// are pieces of tiles, and heads that share tiles; options, as bits (cuda/params.h); or fewer rows in a tile.
struct Extras {
  bool general = false, split = false;
  unsigned score = 0;
  int rows = kRows;

  std::string text() const;
};

/// Whether kernels can read the biases of `count` neighbouring keys at once, from any multiple of it on.
bool has_groups(const Problem& p, std::size_t count);
/// The options of a problem.
unsigned score_of(const Problem& p);
/// What they need; heads are those from `first` on. The rows of the component are keys, or else its columns.
ScoreMore score_more(const Problem& p, std::int64_t first, const Order& rows, const Order& cols);

/// What makes the gradients of keys and values, or of queries.
std::vector<Pass> backward_passes(const Columns& columns, bool keys);

/// Which kernel; those from fill on have neither columns nor extras. Of five_product ones extras say whether there
/// are masks, and padding.
struct KernelConfig {
  Pass pass;
  DType dtype;
  Columns columns{64, 64};
  Extras extras{};

  std::size_t number() const;
  KernelSpec spec() const;
  const Kernel& kernel(int device) const;
  int shared_bytes() const;  ///< that a launch asks for, of kernels over a plan's components
};

/// Has these kernels ready; those that are new are compiled at the same time.
void prepare_kernels(std::span<const KernelConfig> wanted, int device);

/// Bytes for what ForwardShared, BackwardShared and HeadDimGt128Shared describe.
int forward_shared(const Columns& columns, unsigned score = 0, int rows = kRows);
int backward_shared(const Columns& columns, bool scored = false, int rows = kRows);

// ------------------------------------------------------------------------------------------ plans on a device

inline constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
inline constexpr std::int64_t kNoEdge = -kMost / 2;  ///< of DevicePlan

/// Tiles of one side: where the copy engine finds them. `shift` tokens before the operand is where it counts from, so
/// that a tile which is cut may start later on its axes and still never at a negative place.
struct Side {
  Order order;
  std::int64_t shift = 0;
  std::size_t tiles = 0, tokens = 0, used = 0;  ///< where they are in the plan's memory
  int unit = 8;  ///< tiles begin with tokens that are multiples of 8, or of 1; 0: some have none at their first place

  int places() const { return order.extent[0] * order.extent[1] * order.extent[2]; }
};

/// The bias of a component's tiles for the copy engine, if that can bring them: 16 bits, neighbouring keys and queries
/// in a tile that begins at a multiple of 16 bytes, a matrix for each head or batch element or for all.
std::optional<BiasSource> bias_source(const Problem& p, const Side& queries, const Side& keys);

struct DeviceComponent {
  Side rows, cols;
  int col_count = 0;                ///< of column tiles
  std::size_t first = 0, runs = 0;  ///< where they are in the plan's memory
  std::vector<int> steps;           ///< of each row tile
  bool general = false;             ///< has masks of bits, or columns that nothing uses
  bool covers_rows = false;
};

struct DevicePlan {
  std::shared_ptr<const Plan> plan;  ///< kept, so that its address stays its own
  std::vector<DeviceComponent> components;
  std::size_t bits = 0, used = 0;
  std::optional<std::int64_t>
      edge;  ///< the least column − row, if that and whole tiles are all there is; kNoEdge: all elements
  fretwork::cuda::DeviceBuffer memory;

  std::size_t bytes() const { return memory.bytes(); }
};

struct Schedule {
  std::size_t items, pieces, share, splits;  ///< where they are in the memory of all schedules of a plan
  int grid;
  int split_count, parts;
  bool split;     ///< items may be pieces, or heads share tiles
  LoadsOf loads;  ///< as in Deal
};

/// A plan and the schedules of its components for some number of heads.
struct Prepared {
  std::shared_ptr<const DevicePlan> plan;
  std::vector<std::size_t> order;       ///< of the components; the first one reaches all rows where any does
  std::vector<Schedule> schedules;      ///< in that order
  bool fill = false;                    ///< rows may be reached by no component
  fretwork::cuda::DeviceBuffer memory;  ///< of the schedules
  std::shared_ptr<const Plan> beside;   ///< kept, as the plan is

  const DeviceComponent& component(std::size_t at) const { return plan->components[order[at]]; }
  std::size_t bytes() const { return memory.bytes(); }
};

/// The launch whose time another may fill: the one before it, with the loads it was dealt, or else the one after it.
struct Beside {
  std::shared_ptr<const Plan> plan = nullptr;
  Pairs pairs{};
  int repeat = 1;
  const LoadsOf* before = nullptr;
};

/// Whether 32 bits can count all that kernels do.
bool is_countable(const Plan& plan);

/// Both are cached.
std::shared_ptr<const DevicePlan> find_plan(const std::shared_ptr<const Plan>& plan, int device);
std::shared_ptr<const Prepared> prepare(const std::shared_ptr<const Plan>& plan, const Pairs& pairs, int repeat,
                                        int longest, const Beside& beside, const Context& context);

// ------------------------------------------------------------------------------------------------- operands

/// Whether the copy engine can move the operand's rows, 16 bytes at a time.
bool movable(const Operand& x);
Operand from_head(Operand x, std::int64_t head, std::int64_t bytes);
SinksArg from_head(SinksArg sinks, std::int64_t head);
Lines lines_of(const Operand& x);
/// `sizes`: batch, heads, tokens. With `pack` heads in a tile, of `room` rows each, sizes counts such heads.
std::optional<Source> make_source(Operand x, const std::array<std::int64_t, 3>& sizes, std::int64_t depth,
                                  const Side& side, int pack = 1, int room = 0);

/// Heads [first, first + count) have the same plan.
struct HeadRange {
  std::int64_t first, count;
  std::shared_ptr<const Plan> plan;
};

std::vector<HeadRange> ranges_of(const Plans& plans, std::int64_t heads);

/// Heads [first, first + count) of queries, and the key heads they use.
struct Heads {
  std::int64_t first, count, kv_first, kv_count;
};

/// The operands, results and sizes of a launch over tiles of `rows` and `cols`, on any walk; none if the copy engine
/// cannot bring the operands. The forward pass's q are `pack` heads in a tile, of `room` rows each.
std::optional<ScoredForwardParams> forward_operands(const Problem& p, std::int64_t first, std::int64_t count,
                                                    const Side& rows, const Side& cols, int pack = 1, int room = 0);
std::optional<ScoredBackwardParams> backward_operands(const BackwardProblem& b, Pass pass, const Heads& heads,
                                                      const Side& rows, const Side& cols);

/// Heads whose keys and values fit L2 at the same time, in whole groups of those that share them.
int heads_in_l2(const Problem& p);

// ------------------------------------------------------------------------------------------------- launches

template <typename Params>
struct Launch {
  KernelConfig config;
  int grid;
  Params params;
  ScoredJoinParams join{};  ///< of the parts, where there are any
  int parts = 0;

  KernelConfig join_config() const {
    const bool scored = config.pass == Pass::forward && config.extras.score != 0;
    return {scored ? Pass::scored_join : Pass::join, config.dtype};
  }

  /// Of memory for the parts.
  std::size_t sums_bytes(int n) const { return static_cast<std::size_t>(parts) * kRows * 4 * join.lines[n]; }
  std::size_t bytes() const {
    const bool weighed = config.pass == Pass::forward;
    return sums_bytes(0) + sums_bytes(1) + (weighed ? static_cast<std::size_t>(parts) * kRows * sizeof(Share) : 0);
  }
};

/// `seen`: some keys may be padding.
KernelConfig config_of(Pass pass, const Problem& p, const Prepared& prepared, std::size_t at, bool seen);
Walk walk_of(const Prepared& prepared, std::size_t at);
/// What joins the parts of a launch; where they lie is told later.
ScoredJoinParams join_of(const Prepared& prepared, std::size_t at);

/// What says which columns of the launches' tiles are seen, until all is launched.
using Seen = std::vector<std::unique_ptr<SeenColumns>>;

/// Has a walk's columns be those keys that are seen, if some are padding.
SeenTiles see(const Problem& p, const DeviceComponent& component, int side, Walk& walk, Seen& seen, Context& context);

/// Of all rows: RowStats, or ScoreStats where there are options. in_tiles as StatsParams has it.
void launch_statistics(const BackwardProblem& b, void* stats, bool in_tiles, Context& context);

/// Zeros in all rows of x, and −∞ or the sink in lse where there is one.
void launch_fill(DType dtype, const Operand& x, const Operand& lse, const std::array<std::int64_t, 3>& sizes,
                 std::int64_t depth, const SinksArg& sinks, Context& context);

void give_memory(Launch<ScoredForwardParams>& launch, char* memory);
void give_memory(Launch<ScoredBackwardParams>& launch, char* memory);

/// Memory for the parts of all launches. Each has its own: a kernel may start before the one before it has ended.
template <typename Params>
std::size_t parts_bytes(const std::vector<Launch<Params>>& launches) {
  return std::accumulate(launches.begin(), launches.end(), std::size_t{0},
                         [](std::size_t sum, const Launch<Params>& launch) { return sum + launch.bytes(); });
}
template <typename Params>
void give_parts(std::vector<Launch<Params>>& launches, const Workspace& memory) {
  auto* at = static_cast<char*>(memory.data());
  for (Launch<Params>& launch : launches) {
    if (launch.parts > 0) {
      give_memory(launch, at);
      at += launch.bytes();
    }
  }
}

/// Has the kernels of all launches and of `others` ready; those that are new are compiled at once.
template <typename Params>
void prepare_kernels(const std::vector<Launch<Params>>& launches, std::vector<KernelConfig> others, int device) {
  for (const Launch<Params>& launch : launches) {
    others.push_back(launch.config);
    if (launch.parts > 0) {
      others.push_back(launch.join_config());
    }
  }
  prepare_kernels(others, device);
}

/// Joins the parts of `tiles` split tiles.
void launch_join(const KernelConfig& config, const ScoredJoinParams& join, const Context& context);

inline bool starts_early(const ForwardParams&) { return false; }
inline bool starts_early(const BackwardParams& params) { return params.early != 0; }

/// Parts are joined before a kernel that waits for them; one that starts early does not.
template <typename Params>
void launch_all(const std::vector<Launch<Params>>& launches, const Context& context) {
  auto joined = launches.begin();
  const auto join_until = [&](auto end) {
    for (; joined != end; ++joined) {
      if (joined->parts > 0) {
        launch_join(joined->join_config(), joined->join, context);
      }
    }
  };
  for (auto launch = launches.begin(); launch != launches.end(); ++launch) {
    if (!starts_early(launch->params)) {
      join_until(launch);
    }
    launch->config.kernel(context.device.index)
        .launch_behind(launch->grid, threads_of(kRows), launch->config.shared_bytes(), &launch->params, context.stream);
  }
  join_until(launches.end());
}

}  // namespace fretwork::attention_op::hopper
