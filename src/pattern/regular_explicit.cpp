// Regular patterns that carry their data: masks, runs, trees, block layouts, Kronecker patterns, and progressions row
// by row.
#include <algorithm>
#include <map>
#include <utility>

#include "core/divide.h"
#include "fretwork/tensor.h"
#include "pattern/checks.h"
#include "pattern/regular_text.h"

namespace fretwork::patterns {
namespace {

using parts::between;
using parts::part;
using parts::tighten;
using text::Call;
using text::Family;

/// One head of a layout, in a layout of its own.
BlockLayoutPtr head_of(const BlockLayout& layout, std::int64_t head) {
  if (head < 0 || head >= layout.heads()) {
    throw Error("from_layout", "head", "0 to " + std::to_string(layout.heads() - 1), std::to_string(head));
  }
  BlockLayout::Sizes sizes = layout.sizes();
  sizes.heads = 1;
  std::vector<std::uint8_t> mask(static_cast<std::size_t>(sizes.rows * sizes.cols));
  for (std::int64_t i = 0; i < sizes.rows; ++i) {
    for (const BlockIndex::Entry& entry : layout.by_row().line(head * sizes.rows + i)) {
      mask[static_cast<std::size_t>(i * sizes.cols + entry.other)] = 1;
    }
  }
  return BlockLayout::make(sizes, mask);
}

/// The blocks of a layout's one head, as runs of block columns.
std::vector<Run> block_runs(const BlockLayout& layout) {
  std::vector<Run> runs;
  for (std::int64_t i = 0; i < layout.sizes().rows; ++i) {
    for (const BlockIndex::Entry& entry : layout.by_row().line(i)) {
      if (!runs.empty() && runs.back().row == i && runs.back().end == entry.other) {
        ++runs.back().end;
      } else {
        runs.push_back({i, entry.other, entry.other + 1});
      }
    }
  }
  return runs;
}

const Call& pattern_argument(const Call& call, std::size_t position, const char* argument, const char* expected) {
  const auto* inner = std::get_if<Call>(&call.arguments[position].is);
  if (inner == nullptr) {
    throw Error(call.name, argument, expected, "something else");
  }
  return *inner;
}

/// Runs of ones in a row-major matrix of bytes.
std::vector<Run> mask_runs(std::int64_t rows, std::int64_t cols, std::span<const std::uint8_t> mask) {
  std::vector<Run> runs;
  for (std::int64_t i = 0; i < rows; ++i) {
    const auto begin = mask.begin() + i * cols, end = begin + cols;
    for (auto at = std::find(begin, end, 1); at != end;) {
      const auto stop = std::find(at, end, 0);
      runs.push_back({i, at - begin, stop - begin});
      at = std::find(stop, end, 1);
    }
  }
  return runs;
}

/// The numbers that occur most often, at most `most` of them, each at least `least` times.
std::vector<std::int64_t> frequent(const std::map<std::int64_t, std::int64_t>& counts, std::size_t most,
                                   std::int64_t least = 1) {
  std::vector<std::pair<std::int64_t, std::int64_t>> all;
  for (const auto& [value, count] : counts) {
    if (count >= least) {
      all.emplace_back(-count, value);
    }
  }
  std::sort(all.begin(), all.end());
  all.resize(std::min(all.size(), most));
  std::vector<std::int64_t> values;
  std::transform(all.begin(), all.end(), std::back_inserter(values), [](const auto& pair) { return pair.second; });
  return values;
}

/// Distances at which a mask may repeat: between runs of a row, and between the first rows of parts. Where there are
/// many parts only those that an eighth of them keep: each takes long to try, and random masks keep none.
std::vector<std::int64_t> periods(const std::vector<Run>& runs, const std::vector<Part>& flat) {
  constexpr std::size_t kMany = 4096;
  std::map<std::int64_t, std::int64_t> along, down;
  for (std::size_t n = 1; n < runs.size(); ++n) {
    if (runs[n].row == runs[n - 1].row) {
      ++along[runs[n].begin - runs[n - 1].begin];
    }
  }
  for (std::size_t n = 1; n < flat.size(); ++n) {
    ++down[std::abs(flat[n][0].row_begin - flat[n - 1][0].row_begin)];
  }
  std::vector<std::int64_t> all;
  for (auto* const counts : {&along, &down}) {
    std::erase_if(*counts, [](const auto& pair) { return pair.first < 2; });
    std::int64_t sum = 0;
    for (const auto& [period, count] : *counts) {
      sum += count;
    }
    const std::vector<std::int64_t> some = frequent(*counts, 4, flat.size() > kMany ? sum / 8 : 1);
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

/// The same parts with those counted modulo `period` that are narrower than `least`; differences there begin at zero.
std::vector<PartGroup> counted(const std::vector<Part>& flat, std::int64_t period, std::int64_t least) {
  PartGroup wide{parts::flat_view(), {}}, narrow{parts::flat_view(), {}};
  std::map<std::int64_t, std::int64_t> residues;
  for (const Part& p : flat) {
    const bool is_wide = p[0].high - p[0].low + 1 >= least;
    (is_wide ? wide : narrow).parts.push_back(p);
    if (!is_wide && p[0].high - p[0].low < period) {
      residues[parts::floor_mod(p[0].low, period)] += p[0].row_end - p[0].row_begin;
    }
  }
  const auto first = frequent(residues, 1);
  const bool single = !first.empty() && residues.size() == 1;
  const View view = parts::residue_view(period, single ? first.front() : 0);
  narrow = {view, parts::refined(narrow, view)};
  parts::merge(narrow.parts, view.axes);
  return {std::move(wide), std::move(narrow)};
}

/// What a mask's flat parts are when counted in the best of a few periods.
std::vector<PartGroup> arranged(std::vector<Part> flat, const std::vector<Run>& runs) {
  constexpr std::size_t kFew = 4, kMany = std::size_t{1} << 18;
  parts::merge(flat, 1);
  std::vector<PartGroup> best{{parts::flat_view(), flat}};
  if (flat.size() <= kFew || flat.size() > kMany) {
    return best;
  }
  std::size_t fewest = flat.size() * 2 / 3;  // a little less is not worth another order
  for (const std::int64_t period : periods(runs, flat)) {
    for (const std::int64_t least : {period, parts::kFar}) {
      std::vector<PartGroup> groups = counted(flat, period, least);
      if (const std::size_t parts = groups[0].parts.size() + groups[1].parts.size(); parts < fewest) {
        fewest = parts;
        best = std::move(groups);
      }
    }
  }
  return best;
}

/// In order, and each element once; a run that is none or that leaves the matrix is refused.
std::vector<Run> joined(std::int64_t rows, std::int64_t cols, std::span<const Run> runs) {
  if (runs.size() > parts::kMostRuns) {
    throw Error("from_runs", "runs", "at most 2^25", std::to_string(runs.size()));
  }
  std::vector<Run> sorted(runs.begin(), runs.end()), all;
  const auto before = [](const Run& a, const Run& b) { return std::tie(a.row, a.begin) < std::tie(b.row, b.begin); };
  if (!std::is_sorted(sorted.begin(), sorted.end(), before)) {
    std::sort(sorted.begin(), sorted.end(), before);
  }
  for (const Run& run : sorted) {
    if (run.row < 0 || run.row >= rows || run.begin < 0 || run.begin >= run.end || run.end > cols) {
      throw Error(
          "from_runs", "runs", "[begin, end) of a row inside " + shape_text(std::vector{rows, cols}),
          "[" + std::to_string(run.begin) + ", " + std::to_string(run.end) + ") of row " + std::to_string(run.row));
    }
    if (!all.empty() && all.back().row == run.row && all.back().end >= run.begin) {
      all.back().end = std::max(all.back().end, run.end);
    } else {
      all.push_back(run);
    }
  }
  return all;
}

/// The runs of bands (row_begin, row_end, col_begin, col_end, low, high), as the text of from_runs has them.
std::vector<Run> read_bands(const Call& call, std::size_t position, std::int64_t rows, std::int64_t cols) {
  constexpr const char* kExpected = "tuples of 6 integers";
  const auto* bands = std::get_if<text::Tuple>(&call.arguments[position].is);
  if (bands == nullptr) {
    throw Error(call.name, "bands", kExpected, "something else");
  }
  std::vector<Run> runs;
  for (const text::Value& value : *bands) {
    const auto six = text::integers({call.name, {value}}, 0, "bands");
    if (six.size() != 6) {
      throw Error(call.name, "bands", kExpected, std::to_string(six.size()) + " numbers");
    }
    AxisRange band{six[0], six[1], six[2], six[3], six[4], six[5]};
    if (band.row_begin < 0 || band.row_end > rows || band.col_begin < 0 || band.col_end > cols ||
        std::max(std::abs(bounded(band.low)), std::abs(bounded(band.high))) > kLargest) {
      throw Error(call.name, "bands", "bands inside " + shape_text(std::vector{rows, cols}), shape_text(six));
    }
    if (!tighten(band)) {
      throw Error(call.name, "bands", "bands that hold an element", "one that does not");
    }
    if (runs.size() + static_cast<std::size_t>(band.row_end - band.row_begin) > parts::kMostRuns) {
      throw Error(call.name, "bands", "at most 2^25 rows together", "more");
    }
    for (std::int64_t row = band.row_begin; row < band.row_end; ++row) {
      runs.push_back({row, std::max(band.col_begin, row + band.low), std::min(band.col_end, row + band.high + 1)});
    }
  }
  return runs;
}

/// The runs of ancestors of every node, the node with them. A node continues its parent's last run or begins one.
std::vector<Run> ancestors(std::span<const std::int64_t> parents) {
  struct Node {
    std::int64_t begin, before;  ///< of the node's last run; the node that ends the run before it, or −1
    std::size_t runs;
  };
  std::vector<Node> nodes(parents.size());
  std::size_t count = 0;
  for (std::size_t n = 0; n < parents.size(); ++n) {
    const auto at = static_cast<std::int64_t>(n);
    const std::int64_t parent = parents[n];
    if (parent < -1 || parent >= at) {
      const std::string range = at == 0 ? "-1" : "-1 to " + std::to_string(at - 1);
      throw Error("tree", "parents", range + " for node " + std::to_string(at), std::to_string(parent));
    }
    const Node above = parent < 0 ? Node{0, -1, 0} : nodes[static_cast<std::size_t>(parent)];
    nodes[n] = parent >= 0 && parent == at - 1 ? above : Node{at, parent, above.runs + 1};
    count += nodes[n].runs;
    if (count > parts::kMostRuns) {
      throw Error("tree", "parents", "at most 2^25 runs of ancestors that follow one another, all nodes together",
                  "more");
    }
  }
  std::vector<Run> runs(count);
  auto end = runs.begin();
  for (std::size_t n = 0; n < nodes.size(); ++n) {
    auto at = end += static_cast<std::ptrdiff_t>(nodes[n].runs);
    for (auto node = static_cast<std::int64_t>(n); node >= 0;) {
      const Node& one = nodes[static_cast<std::size_t>(node)];
      *--at = {static_cast<std::int64_t>(n), one.begin, node + 1};
      node = one.before;
    }
  }
  return runs;
}

void check_progression(std::size_t row, std::int64_t start, std::int64_t stride, std::int64_t count,
                       std::int64_t cols) {
  const std::string where = " in row " + std::to_string(row);
  if (count < 0) {
    throw Error("acsr", "count", "at least 0", std::to_string(count) + where);
  }
  if (count > 1 && stride < 1) {
    throw Error("acsr", "stride", "at least 1", std::to_string(stride) + where);
  }
  std::int64_t last = start;
  if (count > 0 && (start < 0 ||
                    (count > 1 && (__builtin_mul_overflow(count - 1, stride, &last) ||
                                   __builtin_add_overflow(start, last, &last))) ||
                    last >= cols)) {
    throw Error("acsr", "start", "columns from 0 to " + std::to_string(cols - 1),
                std::to_string(start) + where + ", with stride " + std::to_string(stride) + " and count " +
                    std::to_string(count));
  }
}

}  // namespace

RegularPtr from_mask(std::int64_t rows, std::int64_t cols, std::span<const std::uint8_t> mask) {
  check_sizes("from_mask", rows, cols, "mask");
  if (mask.size() != static_cast<std::size_t>(rows * cols)) {
    throw Error("from_mask", "mask", std::to_string(rows * cols) + " entries", std::to_string(mask.size()));
  }
  if (const auto bad = std::find_if(mask.begin(), mask.end(), [](std::uint8_t m) { return m > 1; });
      bad != mask.end()) {
    throw Error("from_mask", "mask", "0 or 1 everywhere", std::to_string(*bad));
  }
  const std::array<std::int64_t, 2> shape{rows, cols};
  const std::vector<Run> runs = mask_runs(rows, cols, mask);
  return RegularMaker::make(Writer("from_mask").add(shape).add("~" + text::pack_bits(mask)).done(), rows, cols,
                            arranged(parts::from_runs(runs), runs));
}

RegularPtr from_runs(std::int64_t rows, std::int64_t cols, std::span<const Run> runs) {
  check_sizes("from_runs", rows, cols, "shape");
  const std::vector<Run> all = joined(rows, cols, runs);
  std::vector<Part> flat = parts::from_runs(all);
  parts::check_parts("from_runs", static_cast<parts::Wide>(flat.size()));
  parts::merge(flat, 1);
  std::string bands;
  for (const Part& p : flat) {
    const AxisRange& a = p[0];
    const std::array six{a.row_begin, a.row_end, a.col_begin, a.col_end, a.low, a.high};
    bands += (bands.empty() ? "" : ",") + Writer("").add(six).done().substr(1);
    bands.pop_back();
  }
  const std::array<std::int64_t, 2> shape{rows, cols};
  return RegularMaker::make(Writer("from_runs").add(shape).add("[" + bands + "]").done(), rows, cols,
                            arranged(std::move(flat), all));
}

RegularPtr tree(std::span<const std::int64_t> parents) {
  const auto length = static_cast<std::int64_t>(parents.size());
  check_sizes("tree", length, length, "parents");
  const std::vector<Run> runs = ancestors(parents);
  std::vector<Part> flat = parts::from_runs(runs);
  parts::check_parts("tree", static_cast<parts::Wide>(flat.size()));
  return RegularMaker::make(Writer("tree").add(parents).done(), length, length, arranged(std::move(flat), runs));
}

RegularPtr acsr(std::span<const std::int64_t> start, std::span<const std::int64_t> stride,
                std::span<const std::int64_t> count, std::int64_t cols) {
  if (start.size() != stride.size() || start.size() != count.size()) {
    throw Error(
        "acsr", "start, stride and count", "equal lengths",
        std::to_string(start.size()) + ", " + std::to_string(stride.size()) + " and " + std::to_string(count.size()));
  }
  const auto rows = static_cast<std::int64_t>(start.size());
  check_sizes("acsr", rows, cols, "cols");
  std::vector<std::int64_t> starts(start.begin(), start.end()), strides(stride.begin(), stride.end());
  std::vector<Run> runs;
  std::map<std::int64_t, PartGroup> classes;
  for (std::size_t n = 0; n < start.size(); ++n) {
    check_progression(n, start[n], stride[n], count[n], cols);
    starts[n] = count[n] > 0 ? start[n] : 0;
    const std::int64_t step = strides[n] = count[n] > 1 ? stride[n] : 1, row = static_cast<std::int64_t>(n);
    if (count[n] == 0) {
      continue;
    }
    if (step == 1) {
      runs.push_back({row, start[n], start[n] + count[n]});
      continue;
    }
    const std::int64_t first = start[n] / step, at = start[n] % step;
    Part p = part({between(row / step, row / step + 1, first, first + count[n]),
                   between(row % step, row % step + 1, at, at + 1)});
    tighten(p, 2);
    PartGroup& group = classes[step];
    group.view = parts::residue_view(step);
    group.parts.push_back(p);
  }
  std::vector<PartGroup> groups{{parts::flat_view(), parts::from_runs(runs)}};
  for (auto& [step, group] : classes) {
    groups.push_back(std::move(group));
  }
  return RegularMaker::make(Writer("acsr").add(starts).add(strides).add(count).add(cols).done(), rows, cols,
                            std::move(groups));
}

RegularPtr from_layout(const BlockLayoutPtr& layout, std::int64_t head) {
  const auto one = head_of(check_pattern("from_layout", "layout", layout), head);
  const auto& [heads, rows, cols, r, c] = one->sizes();
  PartGroup group;
  if (r == c) {  // blocks have digits of their own
    group = {parts::residue_view(r), parts::from_runs(block_runs(*one))};
    for (Part& p : group.parts) {
      p[1] = between(0, r, 0, c);
      tighten(p[1]);
    }
  } else {
    group.view = parts::flat_view();
    for (const Run& run : block_runs(*one)) {
      AxisRange box = between(run.row * r, (run.row + 1) * r, run.begin * c, run.end * c);
      tighten(box);
      group.parts.push_back(part({box}));
    }
  }
  return RegularMaker::make(Writer("from_layout").add(one->text()).done(), rows * r, cols * c, {std::move(group)});
}

BlockCover block_cover(const PatternPtr& given, std::int64_t block_rows, std::int64_t block_cols) {
  const RegularPtr regular = as_regular("block_cover", given);
  const RegularPattern& pattern = *regular;
  for (const auto& [argument, side] : {std::pair{"block_rows", block_rows}, {"block_cols", block_cols}}) {
    if (side < 1) {
      throw Error("block_cover", argument, "1 or more", std::to_string(side));
    }
  }
  const std::int64_t lines = ceil_div(pattern.rows(), block_rows), across = ceil_div(pattern.cols(), block_cols);
  if (static_cast<double>(lines) * static_cast<double>(across) > 0x1p30) {  // a layout has a bit for each
    throw Error("block_cover", "block", "at most 2^30 blocks", shape_text(std::vector{lines, across}));
  }
  std::vector<std::uint8_t> touched(static_cast<std::size_t>(lines * across));
  for (std::int64_t row = 0; row < pattern.rows(); ++row) {
    std::uint8_t* const line = touched.data() + row / block_rows * across;
    for (const auto& [begin, end] : pattern.row(row)) {
      std::fill(line + begin / block_cols, line + ceil_div(end, block_cols), std::uint8_t{1});
    }
  }
  auto layout = BlockLayout::make({1, lines, across, block_rows, block_cols}, touched);
  const auto stored = static_cast<double>(layout->nnz() * block_rows * block_cols);
  const double fill_in = stored > 0 ? 1 - static_cast<double>(pattern.nnz()) / stored : 0;
  return {std::move(layout), fill_in};
}

RegularPtr from_kronecker(const KroneckerPtr& given) {
  const KroneckerPattern& pattern = check_pattern("from_kronecker", "pattern", given);
  const auto& [a, b, c, d] = pattern.sizes();
  check_sizes("from_kronecker", pattern.rows(), pattern.cols());
  parts::check_parts("from_kronecker", a);
  PartGroup group{parts::residue_view(d), {}};
  for (std::int64_t i = 0; i < a; ++i) {
    Part p = part({between(i * b, (i + 1) * b, i * c, (i + 1) * c), d > 1 ? AxisRange{0, d, 0, d, 0, 0} : AxisRange{}});
    tighten(p[0]);
    group.parts.push_back(p);
  }
  return RegularMaker::make(Writer("from_kronecker").add(pattern.text()).done(), pattern.rows(), pattern.cols(),
                            {std::move(group)});
}

namespace {

std::vector<std::int64_t> read_shape(const Call& call) {
  auto shape = read_list(call, 0, "shape");
  if (shape.size() != 2) {
    throw Error(call.name, "shape", "(rows, cols)", std::to_string(shape.size()) + " numbers");
  }
  return shape;
}

const Family kFromMask{"from_mask", [](const Call& given) -> PatternPtr {
                         const Call call = ordered(given, {"shape", "bits"});
                         const auto shape = read_shape(call);
                         check_sizes("from_mask", shape[0], shape[1], "shape");
                         return from_mask(shape[0], shape[1],
                                          bits(call, 1, "bits", static_cast<std::size_t>(shape[0] * shape[1])));
                       }};
const Family kFromRuns{"from_runs", [](const Call& given) -> PatternPtr {
                         const Call call = ordered(given, {"shape", "bands"});
                         const auto shape = read_shape(call);
                         check_sizes("from_runs", shape[0], shape[1], "shape");
                         return from_runs(shape[0], shape[1], read_bands(call, 1, shape[0], shape[1]));
                       }};
const Family kTree{
    "tree", [](const Call& given) -> PatternPtr { return tree(read_list(ordered(given, {"parents"}), 0, "parents")); }};
const Family kAcsr{"acsr", [](const Call& given) -> PatternPtr {
                     const Call call = ordered(given, {"start", "stride", "count", "cols"});
                     return acsr(read_list(call, 0, "start"), read_list(call, 1, "stride"), read_list(call, 2, "count"),
                                 integer(call, 3, "cols"));
                   }};
const Family kFromLayout{"from_layout", [](const Call& given) -> PatternPtr {
                           const Call call = ordered(given, {"layout"}, {"head"});
                           constexpr const char* kExpected = "a block layout";
                           const PatternPtr inner = make(pattern_argument(call, 0, "layout", kExpected));
                           const auto layout = std::dynamic_pointer_cast<const BlockLayout>(inner);
                           if (layout == nullptr) {
                             throw Error(call.name, "layout", kExpected, inner->text());
                           }
                           return from_layout(layout, read_or(call, 1, "head", 0));
                         }};
const Family kFromKronecker{"from_kronecker", [](const Call& given) -> PatternPtr {
                              const Call call = ordered(given, {"pattern"});
                              constexpr const char* kExpected = "a Kronecker pattern";
                              const PatternPtr inner = make(pattern_argument(call, 0, "pattern", kExpected));
                              const auto kronecker = std::dynamic_pointer_cast<const KroneckerPattern>(inner);
                              if (kronecker == nullptr) {
                                throw Error(call.name, "pattern", kExpected, inner->text());
                              }
                              return from_kronecker(kronecker);
                            }};

}  // namespace
}  // namespace fretwork::patterns
