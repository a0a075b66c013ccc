// Grouping lines that share partners. Lines whose partners are progressions of one stride and remainder share a tile;
// so do lines that begin at neighbouring partners. A line that has both kinds is part of two tiles, which add up.
#include "ops/regular/tiles.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <map>
#include <span>
#include <tuple>
#include <utility>

namespace fretwork::regular_op {
namespace {

constexpr std::int64_t kProgression = 4;  // entries that make a progression of their own
constexpr std::int64_t kLong = 8;         // times the average: a long line joins other long ones
constexpr std::int64_t kMostSteps = 24;   // of a tile, unless most are longer: a long one would run on alone
constexpr std::int64_t kSumCost = 6;      // steps that it costs a tile to add to another's sums
constexpr std::int64_t kWellFilled = 60;  // percent of the elements: no other grouping is looked for
constexpr std::int64_t kNever = std::numeric_limits<std::int32_t>::max();
constexpr std::int64_t kWorthTiles = 64;  // elements of tiles that cost as much as an entry from a list

/// One entry of a line.
struct Entry {
  std::int32_t partner, place;
};

/// The entries of all lines, by ascending partner in each.
struct Lists {
  std::span<const std::int64_t> first;
  const std::int32_t *partners, *places;  ///< without places, an entry's place is its number in the line
  std::int64_t step;                      ///< between neighbours of both
  std::int64_t partner_count;

  std::int64_t lines() const { return static_cast<std::int64_t>(first.size()) - 1; }
  std::int64_t entries() const { return first.back(); }
  std::int64_t count(std::int64_t line) const {
    return first[static_cast<std::size_t>(line) + 1] - first[static_cast<std::size_t>(line)];
  }
  Entry at(std::int64_t line, std::int64_t n) const {
    const std::int64_t at = (first[static_cast<std::size_t>(line)] + n) * step;
    return {partners[at], places == nullptr ? static_cast<std::int32_t>(n) : places[at]};
  }
};

/// A line's entries in one class, as ranges of their numbers.
struct Member {
  std::int32_t line;
  std::vector<std::array<std::int64_t, 2>> ranges;
  std::int64_t count() const {
    std::int64_t all = 0;
    for (const auto& [begin, end] : ranges) {
      all += end - begin;
    }
    return all;
  }
  template <typename Visit>
  void each(const Lists& lists, const Visit& visit) const {
    for (const auto& [begin, end] : ranges) {
      for (std::int64_t n = begin; n < end; ++n) {
        visit(lists.at(line, n));
      }
    }
  }
};

/// Lines by the stride of their entries; 1 also has whatever is no progression, and lines without entries.
using Classes = std::map<std::int32_t, std::vector<Member>>;

std::int64_t progression_length(const Lists& lists, std::int64_t line, std::int64_t from) {
  const std::int64_t count = lists.count(line);
  std::int64_t end = std::min(from + 2, count);
  const auto step = [&](std::int64_t n) { return lists.at(line, n).partner - lists.at(line, n - 1).partner; };
  while (end < count && step(end) == step(from + 1)) {
    ++end;
  }
  return end - from;
}

/// Progressions of strides above 1 go into classes of their own.
void classify(Classes& classes, const Lists& lists, std::int32_t line) {
  std::map<std::int32_t, Member> parts;
  for (std::int64_t n = 0; n < lists.count(line);) {
    const std::int64_t length = progression_length(lists, line, n);
    const std::int32_t stride = length < 2 ? 1 : lists.at(line, n + 1).partner - lists.at(line, n).partner;
    const bool whole = stride == 1 || length >= kProgression;
    const std::int64_t taken = whole ? length : 1;
    auto& ranges = parts[whole ? stride : 1].ranges;
    if (!ranges.empty() && ranges.back()[1] == n) {
      ranges.back()[1] = n + taken;
    } else {
      ranges.push_back({n, n + taken});
    }
    n += taken;
  }
  if (parts.empty()) {
    parts[1];
  }
  for (auto& [stride, member] : parts) {
    classes[stride].push_back({line, std::move(member.ranges)});
  }
}

Classes make_classes(const Lists& lists, bool apart) {
  Classes classes;
  for (std::int64_t line = 0; line < lists.lines(); ++line) {
    if (apart) {
      classify(classes, lists, static_cast<std::int32_t>(line));
    } else {
      classes[1].push_back({static_cast<std::int32_t>(line), {{0, lists.count(line)}}});
    }
  }
  return classes;
}

/// By which lines are sorted: those that share partners stand side by side, long ones and empty ones apart.
using Key = std::tuple<bool, bool, std::int32_t, std::int32_t>;  // long, empty, remainder, first partner

/// `plainly` leaves lines of one stride and remainder in their own order.
std::vector<Key> sort_members(std::vector<Member>& members, const Lists& lists, std::int32_t stride, bool plainly) {
  std::int64_t total = 0;
  for (const Member& m : members) {
    total += m.count();
  }
  const std::int64_t large = kLong * (total / std::max<std::int64_t>(static_cast<std::int64_t>(members.size()), 1) + 1);
  const auto key = [&](const Member& m) {
    const std::int64_t count = m.count();
    const std::int32_t first = count == 0 ? 0 : lists.at(m.line, m.ranges.front()[0]).partner;
    return Key(count > large, count == 0, first % stride, plainly ? 0 : first);
  };
  std::ranges::stable_sort(members, {}, key);
  std::vector<Key> keys(members.size());
  std::ranges::transform(members, keys.begin(), key);
  return keys;
}

/// Whether a tile of `size` lines ends before a line: it is full, or the line shares nothing with it.
bool ends(std::size_t size, const Key& last, const Key& next) {
  const bool other = std::get<2>(last) != std::get<2>(next);
  return size == kRegularLines || std::get<0>(last) != std::get<0>(next) || (other && size >= kRegularLines / 2);
}

/// Makes one tile after another.
class Maker {
 public:
  Maker(const Lists& lists, bool by_row)
      : lists_(&lists),
        by_row_(by_row),
        most_steps_(kWorthTiles * lists.entries() / (kRegularLines * kRegularBlock) +
                    4 * (lists.lines() / kRegularLines + 1)),
        next_wave_(static_cast<std::size_t>(lists.lines())),
        slot_of_(static_cast<std::size_t>(lists.partner_count)),
        marked_((static_cast<std::size_t>(lists.partner_count) + 63) / 64) {}

  void add(std::span<Member> members);
  Tiles finish();
  /// In steps; the largest number where lists serve better than these tiles.
  std::int64_t cost() const { return worthwhile() ? steps() + sum_cost_ : kNever; }

 private:
  using Bits = std::array<RegularBits, kRegularLines>;
  /// What an element of a step's bits was given last.
  struct Last {
    int copy = -1, place = -2;
  };
  std::int64_t steps() const { return static_cast<std::int64_t>(out_.partners.size()) / kRegularBlock; }
  bool worthwhile() const { return steps() <= most_steps_; }
  void mark(std::span<const Member> members);
  void fill(std::span<const Member> members);
  void put(int step, int at, int bit, int place);
  void emit(std::span<const Member> members);
  void cut(const RegularTile& tile, std::int64_t most, std::vector<RegularTileLine>& lines);
  void shape(const RegularTile& tile);

  const Lists* lists_;
  bool by_row_;
  std::int64_t most_steps_, sum_cost_ = 0;
  Tiles out_;
  std::vector<int> next_wave_;  ///< of each line
  std::vector<int> slot_of_;    ///< of each partner of the tile
  std::vector<std::uint64_t> marked_;
  std::vector<int> slots_;                ///< the tile's partners, ascending
  std::vector<std::vector<Bits>> steps_;  ///< of the tile; more than one where places do not follow one another
  std::vector<Last> last_;
};

void Maker::mark(std::span<const Member> members) {
  std::size_t low = marked_.size(), high = 0;
  for (const Member& m : members) {
    m.each(*lists_, [&](const Entry& entry) {
      const auto word = static_cast<std::size_t>(entry.partner) / 64;
      marked_[word] |= std::uint64_t{1} << (entry.partner % 64);
      low = std::min(low, word);
      high = std::max(high, word + 1);
    });
  }
  slots_.clear();
  for (std::size_t word = low; word < high; ++word) {
    for (std::uint64_t bits = std::exchange(marked_[word], 0); bits != 0; bits &= bits - 1) {
      const int partner = static_cast<int>(word * 64) + std::countr_zero(bits);
      slot_of_[static_cast<std::size_t>(partner)] = static_cast<int>(slots_.size());
      slots_.push_back(partner);
    }
  }
}

void Maker::put(int step, int at, int bit, int place) {
  Last& last = last_[static_cast<std::size_t>(step) * kRegularLines + static_cast<std::size_t>(at)];
  auto& copies = steps_[static_cast<std::size_t>(step)];
  if (place != last.place + 1) {
    if (++last.copy == static_cast<int>(copies.size())) {
      copies.emplace_back().fill({0, 0, 0});
    }
    copies[static_cast<std::size_t>(last.copy)][static_cast<std::size_t>(at)] = {0, place - bit, 0};
  }
  last.place = place;
  copies[static_cast<std::size_t>(last.copy)][static_cast<std::size_t>(at)].mask |= std::uint64_t{1} << bit;
}

void Maker::fill(std::span<const Member> members) {
  const std::size_t steps = (slots_.size() + kRegularBlock - 1) / kRegularBlock;
  steps_.assign(steps, {});
  last_.assign(steps * kRegularLines, {});
  for (std::size_t n = 0; n < members.size(); ++n) {
    const int group = static_cast<int>(n) / kRegularBlock * kRegularBlock, line = static_cast<int>(n) - group;
    members[n].each(*lists_, [&](const Entry& entry) {
      const int slot = slot_of_[static_cast<std::size_t>(entry.partner)];
      const int step = slot / kRegularBlock, partner = slot % kRegularBlock;
      by_row_ ? put(step, group + line, partner, entry.place) : put(step, group + partner, line, entry.place);
    });
  }
}

void Maker::emit(std::span<const Member> members) {
  const std::int64_t first = steps();
  for (std::size_t s = 0; s < steps_.size(); ++s) {
    for (const Bits& bits : steps_[s]) {
      for (std::size_t u = s * kRegularBlock; u < (s + 1) * kRegularBlock; ++u) {
        out_.partners.push_back(u < slots_.size() ? slots_[u] : -1);
      }
      out_.bits.insert(out_.bits.end(), bits.begin(), bits.end());
    }
  }
  out_.tiles.push_back(
      {static_cast<int>(out_.lines.size()), static_cast<int>(first), static_cast<int>(steps() - first), 0, 0});
  bool seen = false;
  for (std::size_t n = 0; n < kRegularLines; ++n) {
    out_.lines.push_back({n < members.size() ? members[n].line : -1, -1, 0, 0});
    if (n < members.size()) {
      seen = seen || std::exchange(next_wave_[static_cast<std::size_t>(members[n].line)], 1) > 0;
    }
  }
  sum_cost_ += seen ? kSumCost : 0;
}

void Maker::add(std::span<Member> members) {
  if (!worthwhile()) {
    return;
  }
  for (std::size_t first = 0; first < members.size(); first += kRegularBlock) {  // a row's places rise with its columns
    std::ranges::sort(members.subspan(first, std::min<std::size_t>(kRegularBlock, members.size() - first)), {},
                      &Member::line);
  }
  mark(members);
  fill(members);
  emit(members);
}

/// Appends a tile in pieces of up to `most` steps, each a wave later than the one before.
void Maker::cut(const RegularTile& tile, std::int64_t most, std::vector<RegularTileLine>& lines) {
  const std::span members(out_.lines.data() + tile.lines, kRegularLines);
  int wave = 0;
  for (const RegularTileLine& m : members) {
    wave = std::max(wave, m.line < 0 ? 0 : next_wave_[static_cast<std::size_t>(m.line)]);
  }
  const std::int64_t pieces = std::max<std::int64_t>(1, (tile.steps + most - 1) / most);
  for (std::int64_t piece = 0; piece < pieces; ++piece, ++wave) {
    const auto begin = static_cast<int>(tile.steps * piece / pieces),
               end = static_cast<int>(tile.steps * (piece + 1) / pieces);
    out_.tiles.push_back({static_cast<int>(lines.size()), tile.first + begin, end - begin, wave, 0});
    for (RegularTileLine m : members) {
      if (m.line >= 0) {
        m.earlier = std::exchange(next_wave_[static_cast<std::size_t>(m.line)], wave + 1) > 0 ? 1 : 0;
      }
      lines.push_back(m);
    }
  }
}

/// Says what a tile's masks look like, and where a row goes on from step to step.
void Maker::shape(const RegularTile& tile) {
  for (int e = 0; e < kRegularLines; ++e) {
    RegularBits* before = nullptr;
    for (int s = tile.first; s < tile.first + tile.steps; ++s) {
      RegularBits& b = out_.bits[static_cast<std::size_t>(s) * kRegularLines + static_cast<std::size_t>(e)];
      const int first = std::countr_zero(b.mask), end = first + std::popcount(b.mask);  // 64 where there is none
      const bool run = b.mask == 0 || end == 64 - std::countl_zero(b.mask);
      b.shape = static_cast<unsigned>(first) | static_cast<unsigned>(end) << 8 | (run ? kRegularRun : 0);
      const bool joins = before != nullptr && before->mask >> 63 != 0 && (before->shape & kRegularRun) != 0 && run &&
                         (b.mask & 1) != 0 && b.origin == before->origin + kRegularBlock;
      if (joins) {
        b.shape |= kRegularJoins;
        before->shape |= kRegularGoesOn;
      }
      before = &b;
    }
  }
}

/// Cuts long tiles, and says which lines have several and in which order tiles run.
Tiles Maker::finish() {
  const std::vector<RegularTile> whole = std::exchange(out_.tiles, {});
  const std::int64_t most =
      std::max(kMostSteps, 2 * steps() / std::max<std::int64_t>(static_cast<std::int64_t>(whole.size()), 1));
  std::vector<RegularTileLine> lines;
  std::ranges::fill(next_wave_, 0);
  for (const RegularTile& tile : whole) {
    cut(tile, most, lines);
  }
  std::vector<int> sum_of(next_wave_.size(), -1);
  for (std::size_t n = lines.size(); n-- > 0;) {  // a line's last tile first
    RegularTileLine& line = lines[n];
    if (line.line >= 0) {
      int& sum = sum_of[static_cast<std::size_t>(line.line)];
      line.later = sum >= 0 ? 1 : 0;
      if (line.earlier != 0 && sum < 0) {
        sum = out_.sums++;
      }
      line.sum = sum;
    }
  }
  out_.lines = std::move(lines);
  for (RegularTile& tile : out_.tiles) {
    shape(tile);
    const std::span members(out_.lines.data() + tile.lines, kRegularLines);
    tile.shared = std::ranges::any_of(members, [](const RegularTileLine& m) { return m.sum >= 0; }) ? 1 : 0;
    out_.wave_tiles.resize(std::max(out_.wave_tiles.size(), static_cast<std::size_t>(tile.wave) + 1));
    out_.wave_tiles[static_cast<std::size_t>(tile.wave)] += tile.shared;
  }
  // Those that wait for one another first: their sums are long done when the others end.
  std::ranges::stable_sort(out_.tiles, {},
                           [](const RegularTile& t) { return std::tuple(1 - t.shared, t.wave, -t.steps); });
  return std::move(out_);
}

Maker make(const Lists& lists, bool apart, bool plainly, bool by_row) {
  Classes classes = make_classes(lists, apart);
  Maker maker(lists, by_row);
  for (auto& [stride, members] : classes) {
    const std::vector<Key> keys = sort_members(members, lists, stride, plainly);
    std::size_t first = 0;
    for (std::size_t n = 1; n <= members.size(); ++n) {
      if (n == members.size() || ends(n - first, keys[n - 1], keys[n])) {
        maker.add(std::span(members).subspan(first, n - first));
        first = n;
      }
    }
  }
  return maker;
}

/// Of all ways to group the lines, the one of the fewest steps.
Tiles best_tiles(const Lists& lists, bool by_row) {
  Maker best = make(lists, true, false, by_row);
  for (const auto& [apart, plainly] : {std::pair(false, false), std::pair(false, true)}) {
    if (best.cost() * kWellFilled * kRegularLines * kRegularBlock > 100 * lists.entries()) {
      Maker other = make(lists, apart, plainly, by_row);
      if (other.cost() < best.cost()) {
        best = std::move(other);
      }
    }
  }
  return best.cost() < kNever ? best.finish() : Tiles{};
}

}  // namespace

Tiles make_tiles(const Rows& rows, std::int64_t cols) {
  return best_tiles({rows.first, rows.columns.data(), nullptr, 1, cols}, true);
}

Tiles make_tiles(const Columns& columns, std::int64_t rows) {
  static_assert(sizeof(Columns::Entry) == 2 * sizeof(std::int32_t));
  const auto* const entries = reinterpret_cast<const std::int32_t*>(columns.entries.data());
  return best_tiles({columns.first, entries, entries == nullptr ? nullptr : entries + 1, 2, rows}, false);
}

}  // namespace fretwork::regular_op
