// Attention's Hopper kernels on walks that the device wrote: row tiles and column tiles are plain ranges, what the
// pattern says of them is uploaded once, and the runs of each row tile and the work of each CTA are written on the
// device.
#include "ops/dynamic_attention/cuda/hopper.h"

#include <algorithm>
#include <array>
#include <bit>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/divide.h"
#include "ops/attention/cuda/hopper_launch.h"
#include "ops/dynamic_attention/cuda/params_hopper.cuh"
#include "ops/dynamic_attention/cuda/walks.h"
#include "runtime/device_plan.h"
#include "runtime/upload_arena.h"

namespace fretwork::dynamic_attention_op::hopper {
namespace {

namespace driver = fretwork::cuda;
namespace kernels = attention_op::hopper;
using kernels::Pass;
using kernels::Side;

constexpr int kBlock = kRows;                  // of queries and of keys
constexpr std::int64_t kMostBlocks = 1 << 22;  // of all lists: each may be a run of 32 bytes, or two

constexpr const char* kNames[] = {"count_runs", "deal", "write_runs"};
constinit KernelTable<3> table;

KernelSpec spec(std::size_t which) {
  return {"ops/dynamic_attention/cuda/hopper_walk.cuh",
          std::string("fretwork::dynamic_attention_op::hopper::") + kNames[which]};
}
std::vector<KernelSpec> list_kernels(const std::string& arch) {
  return arch == "sm_90a" ? std::vector{spec(0), spec(1), spec(2)} : std::vector<KernelSpec>{};
}
const KernelList kList{"dynamic_attention", list_kernels};

/// Tokens in tiles of neighbours.
struct Axis {
  std::int64_t tokens;
  int side;

  int tiles() const { return static_cast<int>(ceil_div(tokens, side)); }
  int count(int tile) const {
    return static_cast<int>(std::min<std::int64_t>(side, tokens - std::int64_t{tile} * side));
  }
  int cut() const { return side - count(tiles() - 1); }
  Side on_device() const {
    Side made{{{1, 1, side}, {0, 0, 1}}};
    made.shift = cut();
    return made;
  }
  Place place(int tile) const {
    const int lacks = side - count(tile);
    return {tile * side - lacks + cut(), {0, 0, lacks}};
  }
};

// ---------------------------------------------------------------------------------------- what the pattern says

/// Of all row tiles, on the device.
struct Bands {
  driver::DeviceBuffer memory;
  std::size_t bands = 0, parts = 0, col_tiles = 0, col_tokens = 0, col_used = 0, bits = 0, used = 0;
  bool general = false;  ///< masks of bits, or columns that no row of a tile uses
  std::size_t bytes() const { return memory.bytes(); }
};

/// The rows of a tile as a column tile of `limit` columns meets them: columns [begin, end) of it.
std::vector<Interval> clip(std::span<const Interval> rows, int first, int limit) {
  std::vector<Interval> clipped;
  for (const Interval& row : rows) {
    const int begin = std::clamp(row.begin - first, 0, limit), end = std::clamp(row.end - first, 0, limit);
    clipped.push_back(begin < end ? Interval{begin, end} : Interval{0, 0});
  }
  return clipped;
}

/// A mask by bounds that grow by one from row to row, if that is what the rows are.
std::optional<Part> band_mask(const std::vector<Interval>& rows, int side, int limit) {
  int low = -kRows - side, high = kRows + side;
  for (int i = 0; i < static_cast<int>(rows.size()); ++i) {
    const auto& [begin, end] = rows[static_cast<std::size_t>(i)];
    low = begin > 0 ? begin - i : low;
    high = end > 0 && end < limit ? end - 1 - i : high;
  }
  for (int i = 0; i < static_cast<int>(rows.size()); ++i) {
    const auto& [begin, end] = rows[static_cast<std::size_t>(i)];
    const int from = std::max(0, low + i), to = std::min(limit, high + i + 1);
    if (begin < end ? from != begin || to != end : from < to) {
      return std::nullopt;
    }
  }
  return Part{0, kernels::kBand, low, high, limit};
}

/// What column tiles of a pattern become.
struct Columns {
  Axis axis;
  std::vector<Place> tiles;
  std::vector<int> tokens, used;
  std::vector<unsigned> bits, words;

  explicit Columns(const Axis& cols) : axis(cols) {
    for (int n = 0; n < axis.tiles(); ++n) {
      add(n, -1);
    }
  }
  int add(int n, int used_at) {
    tiles.push_back(axis.place(n));
    for (int i = 0; i < axis.side; ++i) {
      tokens.push_back(i < axis.count(n) ? n * axis.side + i : -1);
    }
    used.push_back(used_at);
    return static_cast<int>(tiles.size()) - 1;
  }
  /// One bit for each column that a row has.
  static void mark(const Interval& row, unsigned* to) {
    for (int i = row.begin; i < row.end; ++i) {
      to[i / 32] |= 1u << i % 32;
    }
  }

  /// Column tile n as the rows of one row tile meet it. Columns that none of them uses have a tile of their own, which
  /// says so: they may hold NaN.
  Part part(int n, std::span<const Interval> tile_rows) {
    const int limit = axis.count(n), line = axis.side / 32;
    const std::vector<Interval> rows = clip(tile_rows, n * axis.side, limit);
    std::vector<unsigned> some(static_cast<std::size_t>(line));
    for (const Interval& row : rows) {
      mark(row, some.data());
    }
    int columns = 0;
    for (const unsigned word : some) {
      columns += std::popcount(word);
    }
    Part made = band_mask(rows, axis.side, limit).value_or(Part{0, static_cast<int>(bits.size()), 0, 0, 0});
    if (made.kind >= 0) {
      bits.resize(bits.size() + static_cast<std::size_t>(kRows * line));
      for (std::size_t i = 0; i < rows.size(); ++i) {
        mark(rows[i], bits.data() + static_cast<std::size_t>(made.kind) + i * static_cast<std::size_t>(line));
      }
    }
    made.tile = n;
    if (columns < limit) {
      made.tile = add(n, static_cast<int>(words.size()));
      words.insert(words.end(), some.begin(), some.end());
    }
    return made;
  }
};

/// Which column tiles the rows of a tile meet: some of their elements, or all.
Band band_of(std::span<const Interval> rows, const Axis& cols) {
  std::int64_t begin = cols.tokens, end = 0, all_begin = 0, all_end = cols.tokens;
  for (const Interval& row : rows) {
    if (row.begin < row.end) {
      begin = std::min<std::int64_t>(begin, row.begin);
      end = std::max<std::int64_t>(end, row.end);
      all_begin = std::max<std::int64_t>(all_begin, row.begin);
      all_end = std::min<std::int64_t>(all_end, row.end);
    } else {
      all_end = 0;
    }
  }
  if (begin >= end) {
    return {0, 0, 0, 0, 0};
  }
  const int first = static_cast<int>(begin / cols.side), last = static_cast<int>(ceil_div(end, cols.side));
  const int whole = static_cast<int>(ceil_div(all_begin, cols.side)),
            whole_last = static_cast<int>(all_end / cols.side);
  return whole < whole_last ? Band{first, whole, whole_last, last, 0} : Band{first, first, first, last, 0};
}

std::shared_ptr<const Bands> find_bands(const RegularPattern& pattern, const Axis& rows, const Axis& cols, bool keys,
                                        const Context& context) {
  const std::string key = "hopper " + std::to_string(cols.side) + (keys ? " k " : " q ") + pattern.key();
  return find_device_plan<Bands>(key, context, [&](int device) {
    const auto known = intervals_of("attention", pattern);
    const std::vector<Interval>& lines = keys ? known->cols : known->rows;
    Columns columns(cols);
    std::vector<Band> bands;
    std::vector<Part> parts;
    for (int t = 0; t < rows.tiles(); ++t) {
      const auto tile =
          std::span(lines).subspan(static_cast<std::size_t>(t * rows.side), static_cast<std::size_t>(rows.count(t)));
      Band& band = bands.emplace_back(band_of(tile, cols));
      band.part = static_cast<int>(parts.size());
      for (int n = band.first; n < band.last; ++n) {
        if (n < band.whole || n >= band.whole_last) {
          parts.push_back(columns.part(n, tile));
        }
      }
    }
    driver::UploadArena arena;
    Bands made;
    made.bands = arena.add(bands);
    made.parts = arena.add(parts);
    made.col_tiles = arena.add(columns.tiles);
    made.col_tokens = arena.add(columns.tokens);
    made.col_used = arena.add(columns.used);
    made.bits = arena.add(columns.bits);
    made.used = arena.add(columns.words);
    made.general = !columns.bits.empty() || !columns.words.empty();
    made.memory = arena.upload(device);
    return made;
  });
}

// -------------------------------------------------------------------------------------------------------- walks

/// Blocks that a row block can have.
std::int64_t most_listed(const Keys& keys) {
  return keys.form == Form::lists ? std::min(keys.entries, keys.cols) : keys.cols;
}

/// Where the arrays of a walk lie in its memory.
struct Offsets {
  std::size_t run_count, steps, first, runs, row_tiles, row_tokens, slots, items, share, end;
};

/// What the device writes for one direction.
class DeviceWalk {
 public:
  /// `keys`: rows are keys.
  DeviceWalk(const Problem& problem, const Axis& rows, const Axis& cols, bool keys, Context& context)
      : keys_(problem.keys),
        p_(problem.attention),
        rows_(rows),
        cols_(cols),
        of_keys_(keys),
        bands_(find_bands(*p_.patterns[0], rows, cols, keys, context)),
        numbers_(keys_.batch * keys_.heads * rows.tiles()),
        heads_(keys ? p_.kv_heads : p_.heads),
        repeat_(keys ? p_.heads / p_.kv_heads : 1),
        together_(std::max<std::int64_t>(1, kernels::heads_in_l2(p_) / repeat_)),
        tiles_(p_.batch * heads_ * rows.tiles()),
        grid_(static_cast<int>(std::min<std::int64_t>(
            std::min(kMostCtas, driver::device_info(context.device.index).multiprocessors), tiles_))),
        at_(offsets()),
        memory_(context, at_.end) {}

  int grid() const { return grid_; }
  bool general() const { return bands_->general; }
  void write(const BlockBits& bits, Context& context) const;
  kernels::Walk walk() const;

 private:
  /// Tiles that a CTA may get: one for each round of each group.
  std::int64_t rounds() const {
    const std::int64_t group = together_ * rows_.tiles();
    return tiles_ / group * ceil_div(group, grid_) + ceil_div(tiles_ % group, grid_);
  }
  std::int64_t most_runs() const {
    return keys_.batch * keys_.heads * keys_.rows * most_listed(keys_) * (kBlock / cols_.side);
  }
  Offsets offsets() const {
    std::size_t end = 0;
    const auto add = [&](std::int64_t count, std::size_t size) {
      const std::size_t at = end;
      end += (static_cast<std::size_t>(count) * size + 15) / 16 * 16;
      return at;
    };
    Offsets made{};
    made.run_count = add(numbers_, sizeof(int));
    made.steps = add(numbers_, sizeof(int));
    made.first = add(numbers_ + 1, sizeof(int));
    made.runs = add(most_runs(), sizeof(RunOf));
    made.row_tiles = add(numbers_, sizeof(Place));
    made.row_tokens = add(numbers_ * kRows, sizeof(int));
    made.slots = add(grid_ * rounds(), sizeof(Item));
    made.items = add(tiles_, sizeof(Item));
    made.share = add(grid_ + 1, sizeof(int));
    made.end = end;
    return made;
  }
  template <typename T>
  T* array(std::size_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(memory_.data()) + offset);
  }

  const Keys& keys_;
  const attention_op::Problem& p_;
  Axis rows_, cols_;
  bool of_keys_;
  std::shared_ptr<const Bands> bands_;
  std::int64_t numbers_, heads_, repeat_, together_, tiles_;
  int grid_;
  Offsets at_;
  Workspace memory_;
};

void DeviceWalk::write(const BlockBits& bits, Context& context) const {
  WalkParams walk{};
  walk.words = of_keys_ ? bits.transposed() : bits.words();
  walk.words_row = of_keys_ ? bits.transposed_row() : bits.words_row();
  walk.row_blocks = static_cast<int>(of_keys_ ? keys_.cols : keys_.rows);
  walk.tiles = rows_.tiles();
  walk.numbers = static_cast<int>(numbers_);
  walk.per_block = kBlock / cols_.side;
  walk.tokens = static_cast<int>(rows_.tokens);
  walk.shift = rows_.cut();
  walk.bands = driver::uploaded<Band>(bands_->memory, bands_->bands);
  walk.parts = driver::uploaded<Part>(bands_->memory, bands_->parts);
  walk.run_count = array<int>(at_.run_count);
  walk.steps = array<int>(at_.steps);
  walk.first = array<int>(at_.first);
  walk.runs = array<RunOf>(at_.runs);
  walk.row_tiles = array<Place>(at_.row_tiles);
  walk.row_tokens = array<int>(at_.row_tokens);
  DealParams deal{};
  deal.run_count = walk.run_count;
  deal.steps = walk.steps;
  deal.first = walk.first;
  deal.numbers = walk.numbers;
  deal.tiles = walk.tiles;
  deal.batch = static_cast<int>(p_.batch);
  deal.heads = static_cast<int>(heads_);
  deal.list_batch = static_cast<int>(keys_.batch);
  deal.list_heads = static_cast<int>(keys_.heads);
  deal.repeat = static_cast<int>(repeat_);
  deal.together = static_cast<int>(together_);
  deal.ctas = grid_;
  deal.rounds = static_cast<int>(rounds());
  deal.slots = array<Item>(at_.slots);
  deal.items = array<Item>(at_.items);
  deal.share = array<int>(at_.share);
  const auto launch = [&](std::size_t which, std::int64_t grid, int threads, const void* params) {
    table.get(which, context.device.index, [&] { return spec(which); })
        .launch(grid, threads, 0, params, context.stream);
  };
  launch(0, ceil_div(numbers_, 4), 128, &walk);
  launch(1, 1, 1024, &deal);
  launch(2, ceil_div(numbers_, 4), 128, &walk);
}

kernels::Walk DeviceWalk::walk() const {
  const driver::DeviceBuffer& memory = bands_->memory;
  kernels::Walk made{};
  made.row_tiles = array<Place>(at_.row_tiles);
  made.col_tiles = driver::uploaded<Place>(memory, bands_->col_tiles);
  made.first = array<int>(at_.first);
  made.runs = array<RunOf>(at_.runs);
  made.row_tokens = array<int>(at_.row_tokens);
  made.col_tokens = driver::uploaded<int>(memory, bands_->col_tokens);
  made.col_used = driver::uploaded<int>(memory, bands_->col_used);
  made.bits = driver::uploaded<unsigned>(memory, bands_->bits);
  made.used = driver::uploaded<unsigned>(memory, bands_->used);
  made.items = array<Item>(at_.items);
  made.share = array<int>(at_.share);
  made.row_places = rows_.side;
  made.col_places = cols_.side;
  return made;
}

// ----------------------------------------------------------------------------------------------------- launches

bool suits(const Problem& problem, const Context& context) {
  const Keys& keys = problem.keys;
  const attention_op::Problem& p = problem.attention;
  const bool blocks =
      (keys.form == Form::mask || keys.form == Form::lists) && keys.block_rows == kBlock && keys.block_cols == kBlock;
  return blocks && p.patterns.size() == 1 && p.padding.data == nullptr && kernels::score_of(p) == 0 &&
         kernels::fits(p, context) && p.heads % keys.heads == 0 &&
         keys.batch * keys.heads * keys.rows * most_listed(keys) <= kMostBlocks &&
         p.batch * p.heads * std::max(keys.rows, keys.cols) <= kMostBlocks;
}

/// What a tensor map of the gradients' or the forward's operand needs.
std::optional<kernels::Source> source(const attention_op::Operand& x, const attention_op::Problem& p, bool keys,
                                      std::int64_t depth, const Axis& axis) {
  return kernels::make_source(x, {p.batch, keys ? p.kv_heads : p.heads, axis.tokens}, depth, axis.on_device());
}

constexpr double kLog2e = 1.4426950408889634;

std::optional<kernels::ScoredBackwardParams> backward_params(const attention_op::BackwardProblem& b, Pass pass,
                                                             const Axis& rows, const Axis& cols, const void* stats) {
  const attention_op::Problem& p = b.forward;
  const bool keys = pass != Pass::d_queries;
  const Axis &queries = keys ? cols : rows, &others = keys ? rows : cols;
  const auto q = source(p.q, p, false, p.depth, queries), d_o = source(b.d_o, p, false, p.value_depth, queries);
  const auto k = source(p.k, p, true, p.depth, others), v = source(p.v, p, true, p.value_depth, others);
  if (!q || !d_o || !k || !v) {
    return std::nullopt;
  }
  kernels::ScoredBackwardParams params{};
  params.rows[0] = keys ? *k : *q;
  params.rows[1] = keys ? *v : *d_o;
  params.cols[0] = keys ? *q : *k;
  params.cols[1] = keys ? *d_o : *v;
  const kernels::Lines d_v = kernels::lines_of(b.d_v);
  params.out[0] = pass == Pass::d_values ? d_v : kernels::lines_of(keys ? b.d_k : b.d_q);
  params.out[1] = d_v;
  params.stats = static_cast<const attention_op::RowStats*>(stats);
  params.stats_batch = static_cast<int>(p.heads * p.rows);
  params.stats_head = static_cast<int>(p.rows);
  params.group = static_cast<int>(p.heads / p.kv_heads);
  params.depth = static_cast<int>(p.depth);
  params.value_depth = static_cast<int>(p.value_depth);
  params.scale = static_cast<float>(p.scale);
  params.scale_2 = static_cast<float>(p.scale * kLog2e);
  return params;
}

}  // namespace

bool forward(const Problem& problem, Context& context) {
  const attention_op::Problem& p = problem.attention;
  if (!suits(problem, context)) {
    return false;
  }
  const Axis rows{p.rows, kRows}, cols{p.cols, kernels::forward_shape(p).cols};
  const auto q = source(p.q, p, false, p.depth, rows), k = source(p.k, p, true, p.depth, cols);
  const auto v = source(p.v, p, true, p.value_depth, cols);
  if (!q || !k || !v) {
    return false;
  }
  const BlockBits bits(problem.keys, false, context);
  const DeviceWalk walk(problem, rows, cols, false, context);
  kernels::ScoredForwardParams params{};
  params.q = *q;
  params.k = *k;
  params.v = *v;
  params.walk = walk.walk();
  params.o = kernels::lines_of(p.o);
  params.lse = kernels::lines_of(p.lse);
  params.group = static_cast<int>(p.heads / p.kv_heads);
  params.scale = static_cast<float>(p.scale * kLog2e);
  params.value_depth = static_cast<int>(p.value_depth);
  const kernels::KernelConfig config{Pass::forward, p.dtype, kernels::columns_of(p), {walk.general(), false, 0}};
  walk.write(bits, context);
  config.kernel(context.device.index)
      .launch(walk.grid(), kernels::kThreads, config.shared_bytes(), &params, context.stream);
  return true;
}

bool backward(const BackwardProblem& problem, Context& context) {
  const attention_op::BackwardProblem& b = problem.attention;
  const attention_op::Problem& p = b.forward;
  const Problem walked{p, problem.keys};
  // Key tiles meet the queries of all heads in their group by one list.
  if (!suits(walked, context) || !kernels::fits(b, context) || p.kv_heads % problem.keys.heads != 0) {
    return false;
  }
  const bool wants_keys = b.d_k.data != nullptr || b.d_v.data != nullptr, wants_queries = b.d_q.data != nullptr;
  const Workspace stats(context, static_cast<std::size_t>(p.batch * p.heads * p.rows) * sizeof(attention_op::RowStats));
  struct Launch {
    Pass pass;
    const DeviceWalk* walk;
    kernels::ScoredBackwardParams params;
  };
  const BlockBits bits(problem.keys, wants_keys, context);
  std::vector<Launch> launches;
  std::deque<DeviceWalk> walks;
  for (const bool keys : {true, false}) {
    if (keys ? !wants_keys : !wants_queries) {
      continue;
    }
    const Axis rows{keys ? p.cols : p.rows, kRows}, cols{keys ? p.rows : p.cols, kernels::kBackwardShape.cols};
    const DeviceWalk& walk = walks.emplace_back(walked, rows, cols, keys, context);
    for (const Pass pass : kernels::backward_passes(kernels::columns_of(p), keys)) {
      const auto params = backward_params(b, pass, rows, cols, stats.data());
      if (!params) {
        return false;
      }
      launches.push_back({pass, &walk, *params});
      launches.back().params.walk = walk.walk();
    }
  }
  kernels::launch_statistics(b, stats.data(), false, context);
  for (const DeviceWalk& walk : walks) {
    walk.write(bits, context);
  }
  for (const Launch& launch : launches) {
    const kernels::KernelConfig config{
        launch.pass, p.dtype, kernels::columns_of(p), {launch.walk->general(), false, 0}};
    config.kernel(context.device.index)
        .launch(launch.walk->grid(), kernels::kThreads, config.shared_bytes(), &launch.params, context.stream);
  }
  return true;
}

}  // namespace fretwork::dynamic_attention_op::hopper
