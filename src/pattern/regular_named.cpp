// The named patterns on sequences: what each allows, as disjoint parts from its rule.
#include <set>

#include "pattern/regular_text.h"

namespace fretwork::patterns {
namespace {

using parts::between;
using parts::differing;
using parts::flat_view;
using parts::floor_div;
using parts::floor_mod;
using parts::kAnywhere;
using parts::kFar;
using parts::part;
using parts::residue_view;
using parts::tighten;
using parts::Wide;
using text::Call;
using text::Family;

/// [begin, end) of numbers that follow each other.
struct Range {
  std::int64_t begin, end;
};

std::vector<Range> ranges(const std::vector<std::int64_t>& sorted) {
  std::vector<Range> all;
  for (const std::int64_t x : sorted) {
    if (!all.empty() && all.back().end == x) {
      ++all.back().end;
    } else {
      all.push_back({x, x + 1});
    }
  }
  return all;
}

/// splitmix64: the same numbers on every machine.
std::uint64_t next_random(std::uint64_t& state) {
  std::uint64_t x = state += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

/// `count` different numbers of [0, end), sorted; all of them where there are no more.
std::vector<std::int64_t> draw(std::int64_t count, std::int64_t end, std::uint64_t state) {
  std::set<std::int64_t> drawn;
  for (std::int64_t n = end - std::min(count, end); n < end; ++n) {
    const auto wide = static_cast<unsigned __int128>(next_random(state)) * static_cast<std::uint64_t>(n + 1);
    const auto x = static_cast<std::int64_t>(wide >> 64);
    drawn.insert(drawn.contains(x) ? n : x);
  }
  return {drawn.begin(), drawn.end()};
}

/// What lies between the ranges, far ends included.
std::vector<Range> gaps(const std::vector<Range>& taken) {
  std::vector<Range> all;
  std::int64_t from = -kFar;
  for (const Range& range : taken) {
    all.push_back({from, range.begin});
    from = range.end;
  }
  all.push_back({from, kFar});
  return all;
}

RegularPtr flat(std::string text, const Seq& seq, std::int64_t offset, const AxisRange& wanted) {
  return make(std::move(text), seq, {{flat_view(offset), {part({wanted})}}});
}

AxisRange with_difference(AxisRange range, std::int64_t low, std::int64_t high) {
  range.low = low;
  range.high = high;
  return range;
}

}  // namespace

RegularPtr full(const Seq& seq) {
  const std::int64_t offset = checked_offset("full", seq);
  return flat(Writer("full").add(seq).offset(seq).done(), seq, offset, kAnywhere);
}

RegularPtr causal(const Seq& seq) {
  const std::int64_t offset = checked_offset("causal", seq);
  return flat(Writer("causal").add(seq).offset(seq).done(), seq, offset, differing(-kFar, 0));
}

RegularPtr sliding_window(const Seq& seq, Optional left, Optional right) {
  constexpr const char* kOp = "sliding_window";
  const std::int64_t offset = checked_offset(kOp, seq);
  check_least(kOp, "left", left.value_or(0), 0);
  check_least(kOp, "right", right.value_or(0), 0);
  return flat(Writer(kOp).add(seq).add(left).add(right).offset(seq).done(), seq, offset,
              differing(-bounded(left.value_or(kFar)), bounded(right.value_or(kFar))));
}

RegularPtr dilated(const Seq& seq, std::int64_t window, std::int64_t dilation, bool causal) {
  const std::int64_t offset = checked_offset("dilated", seq);
  check_least("dilated", "window", window, 0);
  check_least("dilated", "dilation", dilation, 1);
  const std::int64_t reach = bounded(window), step = bounded(dilation);
  return make(Writer("dilated").add(seq).add(window).add(dilation).keyword("causal", causal).offset(seq).done(), seq,
              {{residue_view(step, offset), {part({differing(-reach, causal ? 0 : reach), differing(0, 0)})}}});
}

RegularPtr strided(const Seq& seq, std::int64_t stride) {
  const std::int64_t offset = checked_offset("strided", seq);
  check_least("strided", "stride", stride, 1);
  const std::int64_t step = bounded(stride);
  std::string text = Writer("strided").add(seq).add(stride).offset(seq).done();
  if (step == 1) {
    return flat(std::move(text), seq, offset, differing(-kFar, 0));
  }
  return make(std::move(text), seq,
              {{flat_view(offset), {part({differing(1 - step, 0)})}},
               {residue_view(step, offset), {part({differing(-kFar, -1), differing(0, 0)})}}});
}

RegularPtr fixed(const Seq& seq, std::int64_t stride, std::int64_t summary) {
  const std::int64_t offset = checked_offset("fixed", seq);
  check_least("fixed", "stride", stride, 1);
  if (summary < 0 || summary > stride) {
    throw Error("fixed", "summary", "0 to stride = " + std::to_string(stride), std::to_string(summary));
  }
  std::string text = Writer("fixed").add(seq).add(stride).add(summary).offset(seq).done();
  if (stride == 1) {
    return flat(std::move(text), seq, offset, differing(summary == 1 ? -kFar : 0, 0));
  }
  const std::int64_t step = bounded(stride), least = step - std::min(step, summary);
  return make(std::move(text), seq,
              {{residue_view(step, offset),
                {part({differing(0, 0), differing(-kFar, 0)}),
                 part({differing(-kFar, -1), between(-kFar, kFar, least, step)})}}});
}

RegularPtr longformer(const Seq& seq, std::int64_t window, std::span<const std::int64_t> globals) {
  const std::int64_t offset = checked_offset("longformer", seq);
  check_least("longformer", "window", window, 0);
  const auto set =
      checked_set("longformer", "globals", globals, std::max(seq.cols, seq.rows + std::max<std::int64_t>(offset, 0)));
  const std::int64_t reach = bounded(window);
  const std::vector<Range> taken = ranges(set);
  parts::check_parts("longformer", Wide(taken.size()) * taken.size());
  // The window stays whole; global columns lose it, and global rows lose both.
  std::vector<Part> all{part({differing(-reach, reach)})};
  const auto outside = [&](const AxisRange& box) {
    all.push_back(part({with_difference(box, -kFar, -reach - 1)}));
    all.push_back(part({with_difference(box, reach + 1, kFar)}));
  };
  for (const Range& c : taken) {
    outside(between(-kFar, kFar, c.begin, c.end));
  }
  for (const Range& r : taken) {
    for (const Range& c : gaps(taken)) {
      outside(between(r.begin, r.end, c.begin, c.end));
    }
  }
  return make(Writer("longformer").add(seq).add(window).add(set).offset(seq).done(), seq, {{flat_view(offset), all}});
}

RegularPtr bigbird(const Seq& seq, std::int64_t block, std::int64_t window, std::int64_t globals, std::int64_t random,
                   std::uint64_t seed) {
  constexpr const char* kOp = "bigbird";
  const std::int64_t offset = checked_offset(kOp, seq);
  check_least(kOp, "block", block, 1);
  check_least(kOp, "window", window, 0);
  check_least(kOp, "globals", globals, 0);
  check_least(kOp, "random", random, 0);
  const std::int64_t side = bounded(block), reach = bounded(window), first = bounded(globals);
  std::vector<Wanted> wanted(1);
  wanted[0].view = residue_view(side, offset);
  const auto add = [&](const AxisRange& blocks) { wanted[0].parts.push_back(part({blocks, kAnywhere})); };
  add(differing(-reach, reach));
  for (const Range& far : {Range{-kFar, -reach - 1}, Range{reach + 1, kFar}}) {
    add(with_difference(between(-kFar, kFar, 0, first), far.begin, far.end));
    add(with_difference(between(-kFar, first, first, kFar), far.begin, far.end));
  }
  // For each block row beyond the globals, among [first, blocks) without [P − reach, P + reach].
  const std::int64_t blocks = floor_div(seq.cols + side - 1, side), end = floor_div(offset + seq.rows - 1, side) + 1;
  const std::int64_t begin = std::max(first, floor_div(offset, side));
  const std::int64_t most = std::min(random, std::max<std::int64_t>(blocks - first, 0));
  parts::check_parts(kOp, Wide{most} * std::max<std::int64_t>(end - begin, 0));
  parts::reserve(wanted[0].parts, static_cast<std::size_t>(5 + most * std::max<std::int64_t>(end - begin, 0)));
  for (std::int64_t row = begin; most > 0 && row < end; ++row) {
    const std::int64_t from = std::clamp(row - reach, first, blocks), to = std::clamp(row + reach + 1, first, blocks);
    std::uint64_t state = seed ^ (static_cast<std::uint64_t>(row) * 0xd1342543de82ef95);
    next_random(state);
    std::vector<std::int64_t> drawn = draw(most, blocks - first - (to - from), state);
    for (std::int64_t& x : drawn) {
      x += first;
      x += x >= from ? to - from : 0;
    }
    for (const Range& c : ranges(drawn)) {
      add(between(row, row + 1, c.begin, c.end));
    }
  }
  return make(Writer(kOp)
                  .add(seq)
                  .add(block)
                  .add(window)
                  .add(globals)
                  .add(random)
                  .keyword("seed", static_cast<std::int64_t>(seed), 0)
                  .offset(seq)
                  .done(),
              seq, wanted);
}

RegularPtr longnet(const Seq& seq, std::span<const std::int64_t> segments, std::span<const std::int64_t> rates,
                   std::int64_t head) {
  constexpr const char* kOp = "longnet";
  const std::int64_t offset = checked_offset(kOp, seq);
  if (segments.size() != rates.size()) {
    throw Error(kOp, "rates", "as many as segments = " + std::to_string(segments.size()), std::to_string(rates.size()));
  }
  check_least(kOp, "head", head, 0);
  std::vector<PartGroup> all;
  for (std::size_t n = 0; n < segments.size(); ++n) {
    check_least(kOp, "segments", segments[n], 1);
    check_least(kOp, "rates", rates[n], 1);
    const std::int64_t segment = bounded(segments[n]), rate = bounded(rates[n]), at = head % rate;
    Wanted wanted{residue_view(rate, offset), {}};
    // Segments that hold both queries and keys; in each, ranks of the class from the first not before its beginning.
    const std::int64_t low = floor_div(std::max<std::int64_t>(offset, 0), segment);
    const std::int64_t high = floor_div(std::min(offset + seq.rows, seq.cols) - 1, segment);
    parts::check_parts(kOp, Wide{high} - low);
    for (std::int64_t s = low; s <= high; ++s) {
      const std::int64_t begin = -floor_div(at - s * segment, rate), end = -floor_div(at - (s + 1) * segment, rate);
      wanted.parts.push_back(part({between(begin, end, begin, end), between(at, at + 1, at, at + 1)}));
    }
    all = parts::unite(all, clipped(seq, {wanted}));
  }
  return RegularMaker::make(Writer(kOp).add(seq).add(segments).add(rates).keyword("head", head, 0).offset(seq).done(),
                            seq.rows, seq.cols, std::move(all));
}

RegularPtr block_local(const Seq& seq, std::int64_t block, std::int64_t previous) {
  const std::int64_t offset = checked_offset("block_local", seq);
  check_least("block_local", "block", block, 1);
  check_least("block_local", "previous", previous, 0);
  return make(Writer("block_local").add(seq).add(block).keyword("previous", previous, 0).offset(seq).done(), seq,
              {{residue_view(bounded(block), offset), {part({differing(-bounded(previous), 0), kAnywhere})}}});
}

RegularPtr block_causal(const Seq& seq, std::int64_t block) {
  const std::int64_t offset = checked_offset("block_causal", seq);
  check_least("block_causal", "block", block, 1);
  std::string text = Writer("block_causal").add(seq).add(block).offset(seq).done();
  if (block == 1) {
    return flat(std::move(text), seq, offset, differing(-kFar, 0));
  }
  // Plain order needs the fewest tiles, whatever the block, but a part for each block; many blocks have a digit.
  constexpr std::int64_t kManyBlocks = 1 << 15;
  const std::int64_t side = bounded(block), first = floor_div(offset, side),
                     last = floor_div(offset + seq.rows - 1, side);
  if (last - first >= kManyBlocks) {
    return make(std::move(text), seq, {{residue_view(side, offset), {part({differing(-kFar, 0), kAnywhere})}}});
  }
  std::vector<Part> all;
  for (std::int64_t b = first; b <= last; ++b) {
    all.push_back(part({between(b * side, (b + 1) * side, 0, (b + 1) * side)}));
  }
  return make(std::move(text), seq, {{flat_view(offset), all}});
}

RegularPtr prefix_lm(const Seq& seq, std::int64_t prefix) {
  const std::int64_t offset = checked_offset("prefix_lm", seq);
  check_least("prefix_lm", "prefix", prefix, 0);
  return make(
      Writer("prefix_lm").add(seq).add(prefix).offset(seq).done(), seq,
      {{flat_view(offset),
        {part({differing(-kFar, 0)}), part({with_difference(between(-kFar, kFar, 0, bounded(prefix)), 1, kFar)})}}});
}

RegularPtr sinks(const Seq& seq, std::int64_t sinks, std::int64_t window) {
  const std::int64_t offset = checked_offset("sinks", seq);
  check_least("sinks", "sinks", sinks, 0);
  check_least("sinks", "window", window, 0);
  const std::int64_t reach = bounded(window);
  return make(Writer("sinks").add(seq).add(sinks).add(window).offset(seq).done(), seq,
              {{flat_view(offset),
                {part({differing(1 - reach, 0)}),
                 part({with_difference(between(-kFar, kFar, 0, bounded(sinks)), -kFar, -reach)})}}});
}

RegularPtr vertical_slash(const Seq& seq, std::span<const std::int64_t> vertical, std::span<const std::int64_t> slash) {
  constexpr const char* kOp = "vertical_slash";
  const std::int64_t offset = checked_offset(kOp, seq);
  const auto columns = checked_set(kOp, "vertical", vertical, seq.cols);
  const auto distances = checked_set(kOp, "slash", slash, kLargest);
  const std::vector<Range> bands = ranges(distances);
  const std::vector<Range> lines = ranges(columns);
  parts::check_parts(kOp, Wide(lines.size()) * (bands.size() + 1));
  std::vector<Part> all;
  for (const Range& d : bands) {
    all.push_back(part({differing(1 - d.end, -d.begin)}));
  }
  for (const Range& c : lines) {
    for (const Range& d : gaps(bands)) {
      all.push_back(part(
          {with_difference(between(-kFar, kFar, c.begin, c.end), 1 - d.end, -std::max<std::int64_t>(d.begin, 0))}));
    }
  }
  return make(Writer(kOp).add(seq).add(columns).add(distances).offset(seq).done(), seq, {{flat_view(offset), all}});
}

RegularPtr band(const Seq& seq, std::int64_t start, std::int64_t stride, std::int64_t count) {
  const std::int64_t offset = checked_offset("band", seq);
  check_least("band", "stride", stride, 1);
  check_least("band", "count", count, 0);
  std::string text = Writer("band").add(seq).add(start).add(stride).add(count).offset(seq).done();
  // Clamped as far as it can matter: a start out of reach stays so, in its class.
  const std::int64_t step = bounded(stride), turns = bounded(count);
  const std::int64_t quotient = bounded(floor_div(start, step)), rest = floor_mod(start, step);
  if (step == 1) {
    return flat(std::move(text), seq, offset, differing(quotient, quotient + turns - 1));
  }
  Wanted wanted{residue_view(step, offset), {part({differing(quotient, quotient + turns - 1), differing(rest, rest)})}};
  if (rest > 0) {
    wanted.parts.push_back(part({differing(quotient + 1, quotient + turns), differing(rest - step, rest - step)}));
  }
  return make(std::move(text), seq, {wanted});
}

RegularPtr document(std::span<const std::int64_t> lengths, bool causal) {
  std::int64_t total = 0;
  std::vector<PartGroup> groups(1);
  groups[0].view = flat_view();
  parts::reserve(groups[0].parts, lengths.size());
  for (const std::int64_t length : lengths) {
    if (length < 0 || length > kLargest || total + length > kLargest) {
      throw Error("document", "lengths", "lengths from 0 on with a sum up to 2^48", std::to_string(length));
    }
    AxisRange box = between(total, total + length, total, total + length);
    box.high = causal ? 0 : box.high;
    if (tighten(box)) {
      groups[0].parts.emplace_back()[0] = box;
    }
    total += length;
  }
  check_sizes("document", total, total, "lengths");
  return RegularMaker::make(Writer("document").add(lengths).keyword("causal", causal).done(), total, total,
                            std::move(groups));
}

namespace {

const Family kFull{
    "full", [](const Call& given) -> PatternPtr { return full(read_seq(ordered(given, {"seq"}, {"offset"}), 1)); }};
const Family kCausal{
    "causal", [](const Call& given) -> PatternPtr { return causal(read_seq(ordered(given, {"seq"}, {"offset"}), 1)); }};
const Family kSlidingWindow{"sliding_window", [](const Call& given) -> PatternPtr {
                              const Call call = ordered(given, {"seq", "left", "right"}, {"offset"});
                              return sliding_window(read_seq(call, 3), read_optional(call, 1, "left"),
                                                    read_optional(call, 2, "right"));
                            }};
const Family kDilated{"dilated", [](const Call& given) -> PatternPtr {
                        const Call call = ordered(given, {"seq", "window", "dilation"}, {"causal", "offset"});
                        return dilated(read_seq(call, 4), integer(call, 1, "window"), integer(call, 2, "dilation"),
                                       read_flag(call, 3, "causal"));
                      }};
const Family kStrided{"strided", [](const Call& given) -> PatternPtr {
                        const Call call = ordered(given, {"seq", "stride"}, {"offset"});
                        return strided(read_seq(call, 2), integer(call, 1, "stride"));
                      }};
const Family kFixed{"fixed", [](const Call& given) -> PatternPtr {
                      const Call call = ordered(given, {"seq", "stride", "summary"}, {"offset"});
                      return fixed(read_seq(call, 3), integer(call, 1, "stride"), integer(call, 2, "summary"));
                    }};
const Family kLongformer{"longformer", [](const Call& given) -> PatternPtr {
                           const Call call = ordered(given, {"seq", "window", "globals"}, {"offset"});
                           return longformer(read_seq(call, 3), integer(call, 1, "window"),
                                             read_list(call, 2, "globals"));
                         }};
const Family kBigbird{
    "bigbird", [](const Call& given) -> PatternPtr {
      const Call call = ordered(given, {"seq", "block", "window", "globals", "random"}, {"seed", "offset"});
      return bigbird(read_seq(call, 6), integer(call, 1, "block"), integer(call, 2, "window"),
                     integer(call, 3, "globals"), integer(call, 4, "random"),
                     static_cast<std::uint64_t>(read_or(call, 5, "seed", 0)));
    }};
const Family kLongnet{"longnet", [](const Call& given) -> PatternPtr {
                        const Call call = ordered(given, {"seq", "segments", "rates"}, {"head", "offset"});
                        return longnet(read_seq(call, 4), read_list(call, 1, "segments"), read_list(call, 2, "rates"),
                                       read_or(call, 3, "head", 0));
                      }};
const Family kBlockLocal{"block_local", [](const Call& given) -> PatternPtr {
                           const Call call = ordered(given, {"seq", "block"}, {"previous", "offset"});
                           return block_local(read_seq(call, 3), integer(call, 1, "block"),
                                              read_or(call, 2, "previous", 0));
                         }};
const Family kBlockCausal{"block_causal", [](const Call& given) -> PatternPtr {
                            const Call call = ordered(given, {"seq", "block"}, {"offset"});
                            return block_causal(read_seq(call, 2), integer(call, 1, "block"));
                          }};
const Family kPrefixLm{"prefix_lm", [](const Call& given) -> PatternPtr {
                         const Call call = ordered(given, {"seq", "prefix"}, {"offset"});
                         return prefix_lm(read_seq(call, 2), integer(call, 1, "prefix"));
                       }};
const Family kSinks{"sinks", [](const Call& given) -> PatternPtr {
                      const Call call = ordered(given, {"seq", "sinks", "window"}, {"offset"});
                      return sinks(read_seq(call, 3), integer(call, 1, "sinks"), integer(call, 2, "window"));
                    }};
const Family kVerticalSlash{"vertical_slash", [](const Call& given) -> PatternPtr {
                              const Call call = ordered(given, {"seq", "vertical", "slash"}, {"offset"});
                              return vertical_slash(read_seq(call, 3), read_list(call, 1, "vertical"),
                                                    read_list(call, 2, "slash"));
                            }};
const Family kBand{"band", [](const Call& given) -> PatternPtr {
                     const Call call = ordered(given, {"seq", "start", "stride", "count"}, {"offset"});
                     return band(read_seq(call, 4), integer(call, 1, "start"), integer(call, 2, "stride"),
                                 integer(call, 3, "count"));
                   }};
const Family kDocument{"document", [](const Call& given) -> PatternPtr {
                         const Call call = ordered(given, {"lengths"}, {"causal"});
                         return document(read_list(call, 0, "lengths"), read_flag(call, 1, "causal"));
                       }};

}  // namespace
}  // namespace fretwork::patterns
