// On the CPU the lists are at hand: they become plans, which attention's own kernels walk. Row tiles never cross
// blocks, documents or, in a selection, queries, so no row meets a column tile that it does not list.
#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <unordered_map>

#include "core/divide.h"
#include "core/element.h"
#include "ops/attention/cpu/strips.h"
#include "ops/dynamic_attention/problem.h"

namespace fretwork::dynamic_attention_op::cpu {
namespace {

using attention_op::Plan;
using attention_op::TileShape;
using PlanPtr = std::shared_ptr<const Plan>;

constexpr std::int64_t kSide = 64;  // the most of a tile
constexpr std::int32_t kLowest = std::numeric_limits<std::int32_t>::min();
constexpr std::int32_t kHighest = std::numeric_limits<std::int32_t>::max();

struct TileRange {
  std::int64_t base;
  int count;
};

/// Tiles of `side` neighbours that cover [begin, end).
void add_tiles(std::vector<TileRange>& tiles, std::int64_t begin, std::int64_t end, std::int64_t side) {
  for (std::int64_t base = begin; base < end; base += side) {
    tiles.push_back({base, static_cast<int>(std::min(side, end - base))});
  }
}

std::vector<TileRange> tiles_of(std::int64_t length, std::int64_t side) {
  std::vector<TileRange> tiles;
  add_tiles(tiles, 0, length, side);
  return tiles;
}

/// Writes a plan of one component in plain order, row tile by row tile.
class PlanMaker {
 public:
  PlanMaker(TileShape shape, std::int64_t rows, std::int64_t cols, std::span<const TileRange> row_tiles,
            std::span<const TileRange> col_tiles, std::span<const Interval> intervals)
      : intervals_(intervals), col_tiles_(col_tiles), row_used_(row_tiles.size()), col_used_(col_tiles.size()) {
    plan_.shape = shape;
    plan_.rows = rows;
    plan_.cols = cols;
    attention_op::Component& made = plan_.components.emplace_back();
    made.row_order = {{1, 1, shape.rows}, {0, 0, 1}};
    made.col_order = {{1, 1, shape.cols}, {0, 0, 1}};
    made.covers_rows = true;
    made.first.push_back(0);
    for (const TileRange& tile : row_tiles) {
      made.row_tiles.push_back({tile.base, {1, 1, tile.count}, -1});
    }
    for (const TileRange& tile : col_tiles) {
      made.col_tiles.push_back({tile.base, {1, 1, tile.count}, -1});
    }
  }

  /// Begins the next row tile; `meet` calls belong to it.
  void begin() {
    ++tile_;
    const attention_op::Tile& tile = component().row_tiles[static_cast<std::size_t>(tile_)];
    base_ = tile.base;
    count_ = tile.count[2];
    any_ = {kHighest, kLowest};
    all_ = {kLowest, kHighest};
    for (int m = 0; m < count_; ++m) {
      const Interval row = intervals_[static_cast<std::size_t>(base_ + m)];
      if (row.begin >= row.end) {
        all_ = {kHighest, kLowest};
        continue;
      }
      any_ = {std::min(any_.begin, row.begin), std::max(any_.end, row.end)};
      all_ = {std::max(all_.begin, row.begin), std::min(all_.end, row.end)};
    }
  }
  /// Columns that some row of the tile has.
  Interval any() const { return any_; }

  /// The tile's rows see the columns [begin, end) of a column tile, as far as they have them.
  void meet(std::int64_t col_tile, std::int64_t begin, std::int64_t end) {
    const TileRange& tile = col_tiles_[static_cast<std::size_t>(col_tile)];
    begin = std::max(begin, tile.base);
    end = std::min(end, tile.base + tile.count);
    if (std::max<std::int64_t>(begin, any_.begin) >= std::min<std::int64_t>(end, any_.end)) {
      return;
    }
    const auto at = static_cast<std::int32_t>(col_tile);
    if (end - begin == plan_.shape.cols && begin >= all_.begin && end <= all_.end) {
      row_used_[static_cast<std::size_t>(tile_)] = ~std::uint64_t{0};
      col_used_[static_cast<std::size_t>(col_tile)] = ~std::uint64_t{0};
      if (!whole_.empty() && whole_.back().first + whole_.back().count == at) {
        ++whole_.back().count;
      } else {
        whole_.push_back({at, 1, -1});
      }
      return;
    }
    std::vector<attention_op::Interval> mask(static_cast<std::size_t>(plan_.shape.rows), {0, 0});
    bool some = false;
    for (int m = 0; m < count_; ++m) {
      const Interval row = intervals_[static_cast<std::size_t>(base_ + m)];
      const std::int64_t from = std::max<std::int64_t>(row.begin, begin) - tile.base;
      const std::int64_t to = std::min<std::int64_t>(row.end, end) - tile.base;
      if (from < to) {
        mask[static_cast<std::size_t>(m)] = {static_cast<std::uint8_t>(from), static_cast<std::uint8_t>(to)};
        row_used_[static_cast<std::size_t>(tile_)] |= std::uint64_t{1} << m;
        col_used_[static_cast<std::size_t>(col_tile)] |= (~std::uint64_t{0} >> (64 - (to - from))) << from;
        some = true;
      }
    }
    if (some) {
      component().runs.push_back({at, 1, number(mask)});
      ++component().pairs;
    }
  }

  /// Ends the row tile.
  void end() {
    for (const attention_op::Run& run : whole_) {
      component().pairs += run.count;
    }
    component().runs.insert(component().runs.end(), whole_.begin(), whole_.end());
    whole_.clear();
    component().first.push_back(std::ssize(component().runs));
  }

  PlanPtr finish() {
    plan_.all_rows_used = mark(component().row_tiles, row_used_);
    plan_.all_cols_used = mark(component().col_tiles, col_used_);
    return std::make_shared<const Plan>(std::move(plan_));
  }

 private:
  attention_op::Component& component() { return plan_.components[0]; }

  /// A mask's number; equal ones are stored once.
  std::int32_t number(std::span<const attention_op::Interval> mask) {
    std::string key(mask.size_bytes(), '\0');
    std::memcpy(key.data(), mask.data(), mask.size_bytes());
    const auto [found, fresh] = known_.emplace(std::move(key), static_cast<std::int32_t>(plan_.masks.size()));
    if (fresh) {
      plan_.masks.push_back({0, 0, 0, -1, static_cast<std::int32_t>(plan_.intervals.size())});
      plan_.intervals.insert(plan_.intervals.end(), mask.begin(), mask.end());
    }
    return found->second;
  }

  /// Gives tiles with unused places their bits; whether there are none.
  bool mark(std::vector<attention_op::Tile>& tiles, std::span<const std::uint64_t> used) {
    const std::size_t words = static_cast<std::size_t>(std::max(plan_.shape.rows, plan_.shape.cols)) / 32;
    bool all = true;
    for (std::size_t t = 0; t < tiles.size(); ++t) {
      const std::uint64_t inside = ~std::uint64_t{0} >> (64 - tiles[t].count[2]);
      if ((used[t] & inside) == inside) {
        continue;
      }
      all = false;
      tiles[t].used = static_cast<int>(plan_.used.size());
      plan_.used.resize(plan_.used.size() + words);
      for (std::size_t w = 0; w < std::min<std::size_t>(words, 2); ++w) {
        plan_.used[static_cast<std::size_t>(tiles[t].used) + w] =
            static_cast<std::uint32_t>((used[t] & inside) >> 32 * w);
      }
    }
    return all;
  }

  Plan plan_;
  std::span<const Interval> intervals_;
  std::span<const TileRange> col_tiles_;
  std::vector<std::uint64_t> row_used_, col_used_;
  std::vector<attention_op::Run> whole_;
  std::unordered_map<std::string, std::int32_t> known_;
  std::int64_t tile_ = -1, base_ = 0;
  int count_ = 0;
  Interval any_{}, all_{};
};

// ------------------------------------------------------------------------------------------------------- blocks

/// One side of the blocks: which of its tiles meet which of the other's.
struct Side {
  std::int64_t length, block, blocks;
  std::int64_t tile() const { return std::min(block, kSide); }
  std::int64_t each() const { return block / tile(); }  ///< tiles of a block
};

/// `present(r, c)`: whether row block r meets column block c.
template <typename Present>
PlanPtr block_plan(const Side& rows, const Side& cols, std::span<const Interval> intervals, const Present& present) {
  const auto row_tiles = tiles_of(rows.length, rows.tile()), col_tiles = tiles_of(cols.length, cols.tile());
  const TileShape shape{kSide, static_cast<int>(std::max<std::int64_t>(cols.tile(), 32))};
  PlanMaker maker(shape, rows.length, cols.length, row_tiles, col_tiles, intervals);
  for (std::int64_t t = 0; t < std::ssize(row_tiles); ++t) {
    maker.begin();
    const Interval any = maker.any();
    const std::int64_t last = any.begin < any.end ? ceil_div(any.end, cols.block) : 0;
    for (std::int64_t c = any.begin < any.end ? any.begin / cols.block : 0; c < last; ++c) {
      if (!present(t / rows.each(), c)) {
        continue;
      }
      const std::int64_t end = std::min((c + 1) * cols.each(), std::ssize(col_tiles));
      for (std::int64_t tile = c * cols.each(); tile < end; ++tile) {
        maker.meet(tile, 0, cols.length);
      }
    }
    maker.end();
  }
  return maker.finish();
}

/// The blocks of one list, a byte each.
std::vector<std::uint8_t> blocks_of(const Keys& keys, std::int64_t b, std::int64_t h) {
  std::vector<std::uint8_t> there(static_cast<std::size_t>(keys.rows * keys.cols));
  for (std::int64_t r = 0; r < keys.rows; ++r) {
    std::uint8_t* const line = there.data() + r * keys.cols;
    if (keys.form == Form::mask) {
      for (std::int64_t c = 0; c < keys.cols; ++c) {
        line[c] = keys.mask.flag(b, h, r, c);
      }
      continue;
    }
    const std::int64_t count = std::min<std::int64_t>(keys.counts.number(b, h, r, 0), keys.entries);
    for (std::int64_t n = 0; n < count; ++n) {
      if (const std::int64_t c = keys.indices.number(b, h, r, n); c >= 0 && c < keys.cols) {
        line[c] = 1;
      }
    }
  }
  return there;
}

PlanPtr block_plan(const Problem& p, std::int64_t b, std::int64_t h, bool transposed) {
  const auto there = blocks_of(p.keys, b, h);
  const auto intervals = intervals_of("attention", *p.attention.patterns[0]);
  const Side queries{p.attention.rows, p.keys.block_rows, p.keys.rows};
  const Side keys{p.attention.cols, p.keys.block_cols, p.keys.cols};
  if (transposed) {
    return block_plan(keys, queries, intervals->cols, [&](std::int64_t c, std::int64_t r) {
      return there[static_cast<std::size_t>(r * keys.blocks + c)] != 0;
    });
  }
  return block_plan(queries, keys, intervals->rows, [&](std::int64_t r, std::int64_t c) {
    return there[static_cast<std::size_t>(r * keys.blocks + c)] != 0;
  });
}

// ---------------------------------------------------------------------------------------------------- selections

/// A tile for each query.
PlanPtr selected_plan(const Problem& p, std::int64_t b, std::int64_t h) {
  const Keys& keys = p.keys;
  const auto intervals = intervals_of("selected_attention", *p.attention.patterns[0]);
  const Side cols{p.attention.cols, keys.block_cols, keys.cols};
  const auto row_tiles = tiles_of(p.attention.rows, 1), col_tiles = tiles_of(cols.length, cols.tile());
  PlanMaker maker({32, static_cast<int>(std::max<std::int64_t>(cols.tile(), 32))}, p.attention.rows, cols.length,
                  row_tiles, col_tiles, intervals->rows);
  std::vector<std::int64_t> blocks;
  for (std::int64_t i = 0; i < p.attention.rows; ++i) {
    maker.begin();
    blocks.clear();
    for (std::int64_t n = 0; n < keys.entries; ++n) {
      if (const std::int64_t c = keys.indices.number(b, h, i, n); c >= 0 && c < keys.cols) {
        blocks.push_back(c);
      }
    }
    std::ranges::sort(blocks);
    blocks.erase(std::unique(blocks.begin(), blocks.end()), blocks.end());
    for (const std::int64_t c : blocks) {
      const std::int64_t end = std::min((c + 1) * cols.each(), std::ssize(col_tiles));
      for (std::int64_t tile = c * cols.each(); tile < end; ++tile) {
        maker.meet(tile, 0, cols.length);
      }
    }
    maker.end();
  }
  return maker.finish();
}

/// Rows are keys: the queries of each block, in stretches of neighbours.
PlanPtr transposed_selection(const Problem& p, std::int64_t b, std::int64_t h) {
  const Keys& keys = p.keys;
  const auto intervals = intervals_of("selected_attention", *p.attention.patterns[0]);
  std::vector<std::vector<std::int64_t>> queries(static_cast<std::size_t>(keys.cols));
  for (std::int64_t i = 0; i < p.attention.rows; ++i) {
    for (std::int64_t n = 0; n < keys.entries; ++n) {
      const std::int64_t c = keys.indices.number(b, h, i, n);
      if (c >= 0 && c < keys.cols &&
          (queries[static_cast<std::size_t>(c)].empty() || queries[static_cast<std::size_t>(c)].back() != i)) {
        queries[static_cast<std::size_t>(c)].push_back(i);
      }
    }
  }
  const Side rows{p.attention.cols, keys.block_cols, keys.cols};
  const auto row_tiles = tiles_of(rows.length, rows.tile()), col_tiles = tiles_of(p.attention.rows, kSide);
  PlanMaker maker({kSide, kSide}, rows.length, p.attention.rows, row_tiles, col_tiles, intervals->cols);
  for (std::int64_t t = 0; t < std::ssize(row_tiles); ++t) {
    const auto& list = queries[static_cast<std::size_t>(t / rows.each())];
    maker.begin();
    for (std::size_t n = 0; n < list.size();) {
      std::size_t end = n + 1;
      while (end < list.size() && list[end] == list[end - 1] + 1 && list[end] % kSide != 0) {
        ++end;
      }
      maker.meet(list[n] / kSide, list[n], list[end - 1] + 1);
      n = end;
    }
    maker.end();
  }
  return maker.finish();
}

// ----------------------------------------------------------------------------------------------------- documents

struct Document {
  std::int64_t row, rows, col, cols;  ///< where its queries and keys begin, and how many there are
};

std::vector<Document> documents_of(const Problem& p) {
  std::vector<Document> all;
  const auto at = [](const Table& cu, std::int64_t n, std::int64_t most) {
    return std::clamp<std::int64_t>(cu.number(n, 0, 0, 0), 0, most);
  };
  for (std::int64_t d = 0; d < p.keys.documents; ++d) {
    const std::int64_t row = at(p.keys.cu_q, d, p.attention.rows), col = at(p.keys.cu_k, d, p.attention.cols);
    all.push_back({row, std::max<std::int64_t>(at(p.keys.cu_q, d + 1, p.attention.rows) - row, 0), col,
                   std::max<std::int64_t>(at(p.keys.cu_k, d + 1, p.attention.cols) - col, 0)});
  }
  return all;
}

/// One plan for all heads. `transposed`: rows are keys; then p − j is counted the other way round.
PlanPtr document_plan(const Problem& p, bool transposed) {
  const std::int64_t length = transposed ? p.attention.cols : p.attention.rows;
  const std::int64_t width = transposed ? p.attention.rows : p.attention.cols;
  const std::int64_t left = transposed ? p.keys.right : p.keys.left, right = transposed ? p.keys.left : p.keys.right;
  std::vector<Interval> intervals(static_cast<std::size_t>(length), {0, 0});
  std::vector<TileRange> row_tiles, col_tiles;
  std::vector<std::array<std::int64_t, 2>> meets;  // column tiles of each row tile
  std::int64_t done = 0;
  const auto gap = [&](std::int64_t end) {
    add_tiles(row_tiles, done, end, kSide);
    meets.resize(row_tiles.size(), {0, 0});
    done = std::max(done, end);
  };
  for (Document d : documents_of(p)) {
    if (transposed) {
      d = {d.col, d.cols, d.row, d.rows};
    }
    gap(d.row);
    const std::int64_t first = std::ssize(col_tiles);
    add_tiles(col_tiles, d.col, d.col + d.cols, kSide);
    add_tiles(row_tiles, d.row, d.row + d.rows, kSide);
    meets.resize(row_tiles.size(), {first, std::ssize(col_tiles)});
    done = std::max(done, d.row + d.rows);
    for (std::int64_t i = 0; i < d.rows; ++i) {
      const std::int64_t at = i + d.cols - d.rows;
      const std::int64_t begin = left >= 0 ? std::max<std::int64_t>(at - left, 0) : 0;
      const std::int64_t end = right >= 0 ? std::min(at + right + 1, d.cols) : d.cols;
      if (begin < end) {
        intervals[static_cast<std::size_t>(d.row + i)] = {static_cast<std::int32_t>(d.col + begin),
                                                          static_cast<std::int32_t>(d.col + end)};
      }
    }
  }
  gap(length);
  PlanMaker maker({kSide, kSide}, length, width, row_tiles, col_tiles, intervals);
  for (const auto& [first, last] : meets) {
    maker.begin();
    for (std::int64_t c = first; c < last; ++c) {
      maker.meet(c, 0, width);
    }
    maker.end();
  }
  return maker.finish();
}

// ---------------------------------------------------------------------------------------------------------- all

/// One plan, one for each query head, or one for each (batch element, query head).
std::vector<PlanPtr> plans_of(const Problem& p, bool transposed, Context& context) {
  const Keys& keys = p.keys;
  if (keys.form == Form::documents) {
    return {document_plan(p, transposed)};
  }
  std::vector<PlanPtr> lists(static_cast<std::size_t>(keys.batch * keys.heads));
  context.executor->parallel_for(std::ssize(lists), 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t n = first; n < last; ++n) {
      const std::int64_t b = n / keys.heads, h = n % keys.heads;
      lists[static_cast<std::size_t>(n)] = keys.form != Form::selected ? block_plan(p, b, h, transposed)
                                           : transposed                ? transposed_selection(p, b, h)
                                                                       : selected_plan(p, b, h);
    }
  });
  if (lists.size() == 1) {
    return lists;
  }
  std::vector<PlanPtr> plans;
  for (std::int64_t n = 0; n < (keys.batch == 1 ? 1 : p.attention.batch) * p.attention.heads; ++n) {
    const std::int64_t b = n / p.attention.heads, h = n % p.attention.heads * keys.heads / p.attention.heads;
    plans.push_back(lists[static_cast<std::size_t>(b * keys.heads + h)]);
  }
  return plans;
}

/// Rows outside of all documents have no sink.
void clear_outside(const Problem& problem) {
  const attention_op::Problem& p = problem.attention;
  const auto start = [&](std::int64_t n) {
    return std::clamp<std::int64_t>(problem.keys.cu_q.number(n, 0, 0, 0), 0, p.rows);
  };
  const std::int64_t first = start(0), last = start(problem.keys.documents);
  for (std::int64_t row = 0; row < p.rows; ++row) {
    for (std::int64_t head = 0; head < p.heads && (row < first || row >= last); ++head) {
      write_element(p.lse.data, p.dtype == DType::f64 ? DType::f64 : DType::f32, head * p.lse.head + row * p.lse.row,
                    -std::numeric_limits<double>::infinity());
    }
  }
}

}  // namespace

void forward(const Problem& problem, Context& context) {
  attention_op::cpu::forward(problem.attention, plans_of(problem, false, context), context);
  if (problem.attention.sinks.data != nullptr && problem.keys.form == Form::documents) {
    clear_outside(problem);
  }
}

void backward(const BackwardProblem& problem, Context& context) {
  const Problem forward{problem.attention.forward, problem.keys};
  const auto plans = plans_of(forward, false, context), transposed = plans_of(forward, true, context);
  attention_op::cpu::backward(problem.attention, plans, transposed, context);
}

}  // namespace fretwork::dynamic_attention_op::cpu
