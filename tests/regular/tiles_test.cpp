// The tiles of SPLAT's operators: every entry stands in one of them, once, at its place in x; and lines that several
// tiles have are added up in a fixed order.
#include "ops/regular/tiles.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "fretwork/fretwork.h"
#include "fretwork/patterns.h"

namespace fretwork::regular_op {
namespace {

using Regular = std::shared_ptr<const RegularPattern>;
using Found = std::map<std::tuple<std::int64_t, std::int64_t>, std::int64_t>;  // (row, column) → place

Regular parsed(const char* text) { return std::dynamic_pointer_cast<const RegularPattern>(parse_pattern(text)); }

std::vector<Regular> some_patterns() {
  std::vector<Regular> all;
  for (const char* text :
       {"causal((150,200))", "strided(900,16)", "strided(700,128)", "longformer(2100,9,(5,1000))", "axial(20,30)",
        "dilated(333,20,4)|strided(333,6)", "bigbird(512,16,1,1,2,seed=1)", "swin(14,21,7,3)", "full((5,0))",
        "full((0,5))", "sliding_window((300,333),70,3)", "vertical_slash(400,(1,20,30),(0,5,13))", "full((3,2000))",
        "longnet(300,(50,300),(1,6))", "neighborhood((20,20),5)", "(causal(50)&document((20,30)))|strided(50,9)"}) {
    all.push_back(parsed(text));
  }
  std::vector<std::uint8_t> mask(97 * 211);
  unsigned seed = 7;
  for (std::uint8_t& bit : mask) {
    seed = seed * 1664525u + 1013904223u;
    bit = seed >> 24 < 60 ? 1 : 0;
  }
  all.push_back(patterns::from_mask(97, 211, mask));
  return all;
}

/// Every entry of a tile's steps; `by_row` says which of line and partner is the row.
Found entries_of(const Tiles& tiles, bool by_row) {
  Found found;
  for (const RegularTile& tile : tiles.tiles) {
    for (int s = tile.first; s < tile.first + tile.steps; ++s) {
      const int* const partners = tiles.partners.data() + static_cast<std::ptrdiff_t>(s) * kRegularBlock;
      for (int e = 0; e < kRegularLines; ++e) {
        const RegularBits& bits = tiles.bits[static_cast<std::size_t>(s * kRegularLines + e)];
        std::int64_t place = bits.mask == 0 ? 0 : bits.origin + std::countr_zero(bits.mask);
        for (std::uint64_t left = bits.mask; left != 0; left &= left - 1) {
          const int bit = std::countr_zero(left), group = e / kRegularBlock * kRegularBlock;
          const RegularTileLine* const lines = tiles.lines.data() + tile.lines;
          const int line = by_row ? lines[e].line : lines[group + bit].line;
          const int partner = by_row ? partners[bit] : partners[e - group];
          EXPECT_TRUE(line >= 0 && partner >= 0);
          const auto at = by_row ? std::tuple<std::int64_t, std::int64_t>(line, partner)
                                 : std::tuple<std::int64_t, std::int64_t>(partner, line);
          EXPECT_TRUE(found.emplace(at, place++).second) << "twice";
        }
      }
    }
  }
  return found;
}

/// Shapes say what masks are; a row goes on where the next step of its tile has the places behind.
void check_shapes(const Tiles& tiles) {
  for (const RegularTile& tile : tiles.tiles) {
    for (int e = 0; e < kRegularLines; ++e) {
      const auto at = [&](int s) { return tiles.bits[static_cast<std::size_t>((tile.first + s) * kRegularLines + e)]; };
      for (int s = 0; s < tile.steps; ++s) {
        const RegularBits b = at(s);
        const std::uint64_t aligned = b.mask == 0 ? 0 : b.mask >> (b.shape & 0xff);
        EXPECT_EQ(aligned & 1, b.mask == 0 ? 0u : 1u);
        EXPECT_EQ(std::popcount(b.mask), static_cast<int>(b.shape >> 8 & 0xff) - static_cast<int>(b.shape & 0xff));
        EXPECT_EQ((aligned & (aligned + 1)) == 0, (b.shape & kRegularRun) != 0);
        const bool joins = s > 0 && at(s - 1).mask >> 63 != 0 && (b.mask & 1) != 0 && (b.shape & kRegularRun) != 0 &&
                           (at(s - 1).shape & kRegularRun) != 0 && at(s - 1).origin + 64 == b.origin;
        EXPECT_EQ((b.shape & kRegularJoins) != 0, joins);
        EXPECT_EQ(s > 0 && (at(s - 1).shape & kRegularGoesOn) != 0, joins);
      }
      EXPECT_TRUE(tile.steps == 0 || (at(tile.steps - 1).shape & kRegularGoesOn) == 0);
    }
  }
}

/// Lines follow one another by waves, and know what was before and what is to come.
void check_lines(const Tiles& tiles, std::int64_t lines) {
  std::map<int, std::vector<RegularTileLine>> of_line;
  std::map<int, int> last_wave;
  std::vector<int> wave_tiles(tiles.wave_tiles.size());
  int wave = 0, alone = 0;
  for (const RegularTile& tile : tiles.tiles) {
    EXPECT_TRUE(tile.shared == 0 || (alone == 0 && tile.wave >= wave)) << "waits for one that comes later";
    alone += 1 - tile.shared;
    wave = tile.wave;
    wave_tiles[static_cast<std::size_t>(wave)] += tile.shared;
    int shared = 0;
    for (int n = 0; n < kRegularLines; ++n) {
      const RegularTileLine& line = tiles.lines[static_cast<std::size_t>(tile.lines + n)];
      if (line.line >= 0) {
        EXPECT_TRUE(of_line[line.line].empty() || last_wave[line.line] < wave);
        of_line[line.line].push_back(line);
        last_wave[line.line] = wave;
        shared = std::max(shared, line.sum >= 0 ? 1 : 0);
      }
    }
    EXPECT_EQ(tile.shared, shared);
  }
  EXPECT_EQ(wave_tiles, tiles.wave_tiles);
  EXPECT_EQ(static_cast<std::int64_t>(of_line.size()), lines);
  std::set<int> sums;
  for (const auto& [line, all] : of_line) {
    for (std::size_t n = 0; n < all.size(); ++n) {
      EXPECT_EQ(all[n].earlier, n > 0 ? 1 : 0);
      EXPECT_EQ(all[n].later, n + 1 < all.size() ? 1 : 0);
      EXPECT_EQ(all[n].sum, all[0].sum);
    }
    EXPECT_EQ(all[0].sum >= 0, all.size() > 1);
    EXPECT_TRUE(all[0].sum < 0 || (all[0].sum < tiles.sums && sums.insert(all[0].sum).second));
  }
  EXPECT_EQ(static_cast<int>(sums.size()), tiles.sums);
}

TEST(RegularTiles, HaveEveryEntryOnce) {
  for (const Regular& pattern : some_patterns()) {
    SCOPED_TRACE(pattern->text().substr(0, 60));
    const auto entries = pattern->entries();
    Found want;
    for (std::int64_t i = 0; i < pattern->rows(); ++i) {
      const auto n = static_cast<std::size_t>(i);
      for (std::int64_t t = entries.first[n]; t < entries.first[n + 1]; ++t) {
        want[{i, entries.columns[static_cast<std::size_t>(t)]}] = t - entries.first[n];
      }
    }
    const Tiles by_row = make_tiles(*rows_of(*pattern), pattern->cols());
    const Tiles by_col = make_tiles(*columns_of(*pattern), pattern->rows());
    EXPECT_TRUE(entries_of(by_row, true) == want);  // not EXPECT_EQ, which would print thousands
    EXPECT_TRUE(entries_of(by_col, false) == want);
    check_shapes(by_row);
    check_shapes(by_col);
    check_lines(by_row, pattern->rows());
    check_lines(by_col, pattern->cols());
  }
}

/// Steps of the patterns that they are for: close to what their entries need.
TEST(RegularTiles, AreFew) {
  const auto steps = [](const char* text, bool by_row) {
    const Regular pattern = parsed(text);
    const Tiles tiles =
        by_row ? make_tiles(*rows_of(*pattern), pattern->cols()) : make_tiles(*columns_of(*pattern), pattern->rows());
    return static_cast<double>(tiles.partners.size()) / kRegularBlock * kRegularBlock * kRegularLines /
           static_cast<double>(pattern->nnz());
  };
  for (const bool by_row : {true, false}) {
    EXPECT_LT(steps("sliding_window(4096,256,256)", by_row), 1.4);
    EXPECT_LT(steps("strided(4096,64)", by_row), 3.6);
    EXPECT_LT(steps("longformer(4096,256,(0,))", by_row), 2.0);
    EXPECT_LT(steps("dilated(4096,32,8)", by_row), 3.5);
  }
}

/// Random places that share nothing are left to lists.
TEST(RegularTiles, AreNoneWhereEmpty) {
  std::vector<std::uint8_t> mask(1024 * 8192);
  unsigned seed = 1;
  for (std::size_t n = 0; n < 1024 * 8; ++n) {
    seed = seed * 1664525u + 1013904223u;
    mask[n / 8 * 8192 + (seed >> 8) % 8192] = 1;
  }
  const auto pattern = patterns::from_mask(1024, 8192, mask);
  EXPECT_TRUE(make_tiles(*rows_of(*pattern), pattern->cols()).tiles.empty());
}

}  // namespace
}  // namespace fretwork::regular_op
