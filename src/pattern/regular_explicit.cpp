// Regular patterns that carry their data: masks, block layouts, Kronecker patterns, and progressions row by row.
#include "fretwork/tensor.h"
#include "pattern/regular_text.h"

namespace fretwork::patterns {
namespace {

using parts::between;
using parts::part;
using parts::tighten;
using text::Call;
using text::Family;

/// One head of a layout, in a layout of its own.
std::shared_ptr<const BlockLayout> head_of(const BlockLayout& layout, std::int64_t head) {
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
std::vector<parts::Run> block_runs(const BlockLayout& layout) {
  std::vector<parts::Run> runs;
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

}  // namespace

RegularPtr from_layout(const BlockLayout& layout, std::int64_t head) {
  const auto one = head_of(layout, head);
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
    for (const parts::Run& run : block_runs(*one)) {
      AxisRange box = between(run.row * r, (run.row + 1) * r, run.begin * c, run.end * c);
      tighten(box);
      group.parts.push_back(part({box}));
    }
  }
  return RegularMaker::make(Writer("from_layout").add(one->text()).done(), rows * r, cols * c, {std::move(group)});
}

RegularPtr from_kronecker(const KroneckerPattern& pattern) {
  const auto& [a, b, c, d] = pattern.sizes();
  check_sizes("from_kronecker", pattern.rows(), pattern.cols());
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

const Family kFromLayout{"from_layout", [](const Call& given) -> PatternPtr {
                           const Call call = ordered(given, {"layout", "head"});
                           constexpr const char* kExpected = "a block layout";
                           const PatternPtr inner = make(pattern_argument(call, 0, "layout", kExpected));
                           const auto* layout = dynamic_cast<const BlockLayout*>(inner.get());
                           if (layout == nullptr) {
                             throw Error(call.name, "layout", kExpected, inner->text());
                           }
                           return from_layout(*layout, read_or(call, 1, "head", 0));
                         }};
const Family kFromKronecker{"from_kronecker", [](const Call& given) -> PatternPtr {
                              const Call call = ordered(given, {"pattern"});
                              constexpr const char* kExpected = "a Kronecker pattern";
                              const PatternPtr inner = make(pattern_argument(call, 0, "pattern", kExpected));
                              const auto* kronecker = dynamic_cast<const KroneckerPattern*>(inner.get());
                              if (kronecker == nullptr) {
                                throw Error(call.name, "pattern", kExpected, inner->text());
                              }
                              return from_kronecker(*kronecker);
                            }};

}  // namespace
}  // namespace fretwork::patterns
