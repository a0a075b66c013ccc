// Makes the plan of an sdd: lines of 64 rows, the slots (groups of columns) that they need, and tiles that balance the
// load of the CTAs.
#include "blocks/plan_sdd.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <utility>

#include "core/divide.h"

namespace fretwork::blocks {
namespace {

/// A slot that a line of 64 rows needs: its column, and its blocks as in SddParams.
struct Slot {
  int column;
  std::array<int, 8> blocks;
};
using Slots = std::vector<Slot>;

/// The positions of blocks in lines and slots.
struct SddGeometry {
  const BlockIndex& index;
  int block, slot, block_lines, block_columns;

  int lines() const { return static_cast<int>(ceil_div(static_cast<std::int64_t>(block_lines) * block, 64)); }
  int along_line() const { return std::max(64 / block, 1); }
  int along_slot() const { return std::max(slot / block, 1); }
  /// The slots of a line, sorted by column.
  Slots slots(int head, int line) const {
    const int first = line * 64 / block, last = std::min(first + along_line(), block_lines);
    std::vector<int> place(static_cast<std::size_t>(ceil_div(static_cast<std::int64_t>(block_columns) * block, slot)),
                           -1);
    Slots found;
    for (int row = first; row < last; ++row) {
      for (const auto& entry : index.line(static_cast<std::int64_t>(head) * block_lines + row)) {
        const auto other = static_cast<int>(entry.other);
        for (int part = 0; part < block; part += slot) {  // a block of 128 is two slots
          const int column = (other * block + part) / slot;
          int& at = place[static_cast<std::size_t>(column)];
          if (at < 0) {
            at = static_cast<int>(found.size());
            found.push_back({column, {-1, -1, -1, -1, -1, -1, -1, -1}});
          }
          const int cell = other % along_slot() * along_line() + row - first;
          found[static_cast<std::size_t>(at)].blocks[static_cast<std::size_t>(cell)] = static_cast<int>(entry.block);
        }
      }
    }
    std::sort(found.begin(), found.end(), [](const Slot& a, const Slot& b) { return a.column < b.column; });
    return found;
  }
};

/// A line and some of its slots.
struct Row {
  int line;
  std::span<const Slot> slots;
};

/// One tile of an sdd: a line and slots for each warpgroup. `shared` slots are the same for both.
struct Tile {
  Row rows[2];
  std::size_t shared = 0;

  int lines() const { return rows[0].line == rows[1].line ? 1 : 2; }
  int slots() const { return static_cast<int>(rows[0].slots.size() + rows[1].slots.size() - shared); }
  /// Elements loaded per step of K: 64 or 128 rows, and the slots.
  int moved(int slot) const { return 64 * lines() + slot * slots(); }
};

/// A tile of one line, whose slots are divided between both warpgroups.
Tile alone(const Row& row) {
  const std::size_t half = (row.slots.size() + 1) / 2;
  return {{{row.line, row.slots.first(half)}, {row.line, row.slots.subspan(half)}}};
}

/// The work of an sdd: tiles of slots that two neighbouring lines share, and the remaining slots of each line.
struct SddWork {
  int slot;
  std::vector<Slots> memory{};  ///< owns the slots of all rows
  std::vector<Tile> pairs{};
  std::vector<std::vector<Row>> rests{};  ///< by head

  std::size_t most() const { return static_cast<std::size_t>(256 / slot); }  ///< slots per warpgroup, at most

  std::span<const Slot> keep(Slots slots) { return memory.emplace_back(std::move(slots)); }
  void add_line(int line, Slots slots) {
    if (!slots.empty()) {
      rests.back().push_back({line, keep(std::move(slots))});
    }
  }
  /// Slots that two lines share become tiles of both lines, full ones only: such a tile loads a third less. The
  /// remaining slots are handled line by line, unless they are just the end of the shared ones.
  void add_lines(int line, const Slots& upper, const Slots& lower) {
    Slots shared[2], rest[2];
    for (std::size_t i = 0, j = 0; i < upper.size() || j < lower.size();) {
      if (j == lower.size() || (i < upper.size() && upper[i].column < lower[j].column)) {
        rest[0].push_back(upper[i++]);
      } else if (i == upper.size() || lower[j].column < upper[i].column) {
        rest[1].push_back(lower[j++]);
      } else {
        shared[0].push_back(upper[i++]);
        shared[1].push_back(lower[j++]);
      }
    }
    const std::size_t size = shared[0].size();
    const std::size_t paired = rest[0].empty() && rest[1].empty() ? size : size / most() * most();
    for (int r = 0; r < 2; ++r) {
      rest[r].insert(rest[r].end(), shared[r].begin() + static_cast<std::ptrdiff_t>(paired), shared[r].end());
      add_line(line + r, std::move(rest[r]));
    }
    const std::span<const Slot> both[2] = {keep(std::move(shared[0])), keep(std::move(shared[1]))};
    for (std::size_t at = 0; at < paired; at += most()) {
      const std::size_t count = std::min(most(), paired - at);
      pairs.push_back({{{line, both[0].subspan(at, count)}, {line + 1, both[1].subspan(at, count)}}, count});
    }
  }
};

/// Joins rows that would leave a warpgroup idle into tiles of two: the longest with the longest that still fits.
void join(std::vector<std::vector<Row>> by_size, int fits, std::vector<Tile>& tiles) {
  const auto of = [&](int size) -> std::vector<Row>& { return by_size[static_cast<std::size_t>(size)]; };
  const auto take = [&](int size) {
    const Row row = of(size).back();
    of(size).pop_back();
    return row;
  };
  for (int size = static_cast<int>(by_size.size()) - 1; size > 0; --size) {
    while (!of(size).empty()) {
      const Row first = take(size);
      int other = std::min(size, fits - size);
      while (other > 0 && of(other).empty()) {
        --other;
      }
      tiles.push_back(other > 0 ? Tile{{first, take(other)}} : alone(first));
    }
  }
}

/// Cuts the work into tiles that load no more than `limit`, those that load most first. `joined`: the ends of lines are
/// joined two by two.
std::vector<Tile> cut_tiles(const SddWork& work, int limit, bool joined) {
  std::vector<Tile> tiles = work.pairs;
  const std::size_t longest = std::min(2 * work.most(), static_cast<std::size_t>((limit - 64) / work.slot));
  for (const auto& head : work.rests) {
    std::vector<std::vector<Row>> small(work.most() + 1);  // by size
    for (Row row : head) {
      for (; row.slots.size() > longest; row.slots = row.slots.subspan(longest)) {
        tiles.push_back(alone({row.line, row.slots.first(longest)}));
      }
      if (joined && row.slots.size() <= work.most()) {
        small[row.slots.size()].push_back(row);
      } else {
        tiles.push_back(alone(row));
      }
    }
    join(std::move(small), (limit - 128) / work.slot, tiles);
  }
  std::stable_sort(tiles.begin(), tiles.end(),
                   [&](const Tile& a, const Tile& b) { return a.moved(work.slot) > b.moved(work.slot); });
  return tiles;
}

/// The load of the busiest CTA if tiles are distributed as by turn_tile. A tile counts as at least kLeast, because a
/// step of K has a fixed cost.
std::int64_t busiest(const std::vector<Tile>& tiles, int slot, int times, int ctas) {
  constexpr int kLeast = 5 * 64;
  const auto stride = static_cast<std::size_t>(ctas);
  std::vector<std::int64_t> shares(stride, 0);
  for (std::size_t n = 0; n < tiles.size() * static_cast<std::size_t>(times); ++n) {
    const std::size_t place = n / stride % 2 == 0 ? n % stride : stride - 1 - n % stride;
    shares[place] += std::max(kLeast, tiles[n % tiles.size()].moved(slot));
  }
  return *std::max_element(shares.begin(), shares.end());
}

/// The cut with the smallest maximum load. If CTAs have many tiles each, only two cuts are tried.
std::vector<Tile> best_tiles(const SddWork& work, int times, int ctas) {
  constexpr int kFull = 64 + 512, kMany = 16;
  std::vector<Tile> best = cut_tiles(work, kFull, false);
  const bool many = static_cast<std::int64_t>(best.size()) * times > std::int64_t{kMany} * ctas;
  std::int64_t least = busiest(best, work.slot, times, ctas);
  for (int limit = kFull; limit > (many ? kFull - 1 : kFull / 2); limit -= std::max(work.slot, 32)) {
    std::vector<Tile> tiles = cut_tiles(work, limit, true);
    if (const std::int64_t most = busiest(tiles, work.slot, times, ctas); most < least) {
      least = most;
      best = std::move(tiles);
    }
  }
  return best;
}

SddWork find_work(const SddGeometry& geometry, int heads) {
  SddWork work{geometry.slot};
  for (int head = 0; head < heads; ++head) {
    work.rests.emplace_back();
    for (int line = 0; line < geometry.lines(); line += 2) {
      Slots upper = geometry.slots(head, line);
      const int at = head * geometry.lines() + line;
      line + 1 < geometry.lines() ? work.add_lines(at, upper, geometry.slots(head, line + 1))
                                  : work.add_line(at, std::move(upper));
    }
  }
  return work;
}

}  // namespace

SddPlan make_sdd_plan(const BlockLayout& layout, bool transposed, int slot, int times, int ctas) {
  const BlockLayout::Sizes& sizes = layout.sizes();
  const SddGeometry geometry{transposed ? layout.by_col() : layout.by_row(), static_cast<int>(sizes.block_rows), slot,
                             static_cast<int>(transposed ? sizes.cols : sizes.rows),
                             static_cast<int>(transposed ? sizes.rows : sizes.cols)};
  const SddWork work = find_work(geometry, static_cast<int>(layout.heads()));
  const int cells = geometry.along_line() * geometry.along_slot();
  SddPlan plan;
  plan.lines = geometry.lines();
  for (const Tile& tile : best_tiles(work, times, ctas)) {
    const auto& [upper, lower] = tile.rows;
    const int counts[2] = {static_cast<int>(upper.slots.size()), static_cast<int>(lower.slots.size())};
    const auto first = static_cast<int>(plan.columns.size()), shared = static_cast<int>(tile.shared);
    plan.strips.push_back({{upper.line, lower.line}, first, {counts[0], counts[1]}, shared});
    for (const Row& row : tile.rows) {
      for (const Slot& entry : row.slots) {
        plan.columns.push_back(entry.column);
        plan.blocks.insert(plan.blocks.end(), entry.blocks.begin(), entry.blocks.begin() + cells);
      }
    }
    const auto product = [&](int count) { return count * slot > 128 ? 256 : 128; };  // columns of a product
    const int reach = std::max(product(counts[0]), (counts[0] - shared) * slot + product(counts[1]));
    plan.stage_bytes = std::max(plan.stage_bytes, 128 * tile.moved(slot));
    plan.reach_bytes = std::max(plan.reach_bytes, 128 * (64 * tile.lines() + reach));
  }
  return plan;
}

}  // namespace fretwork::blocks
